"""What the counters of `/v1/loads` show of each scheduler: its speeds, over the last ten minutes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from sglang_tuning_exporter.capacity.ranks import STALE_SECONDS
from sglang_tuning_exporter.capacity.readings import Counters, Prefill, Readings, measure
from sglang_tuning_exporter.capacity.step_time import StepTime, fit, total
from sglang_tuning_exporter.sglang.server_info import Load

MOST_SCHEDULERS = 384


class Speeds(NamedTuple):
    """What one scheduler's counters show: step time, prefill, and prompt tokens computed for each generated token."""

    step: StepTime | None
    prefill: Prefill
    per_token: float | None


class MeasuredScheduler:
    """One scheduler's readings, with the fit of them and the last line that could be fitted."""

    def __init__(self, window_seconds: float) -> None:
        self.readings = Readings(window_seconds)
        self.seen_at = -inf
        self.waiting: float | None = None
        self._fitted: tuple[float, StepTime] | None = None
        self._known: tuple[float | None, Speeds] | None = None  # the last reading's time, and the fit up to it

    def speeds(self, now: float) -> Speeds:
        """Return the present fit, made once for each new reading.

        At a running limit the batch does not vary, and no line can be fitted. Then the line of the time when it varied is used: it answers
        what a larger batch would bring.
        """
        last = None if self.readings.last is None else self.readings.last.at
        if self._known is not None and self._known[0] == last:
            return self._known[1]
        if self.readings.restarted:
            self.readings.restarted, self._fitted = False, None
        intervals = list(self.readings.intervals)
        step, generated = fit([each.decode for each in intervals]), total(each.decode for each in intervals).tokens
        if step is not None and step.line is not None:
            self._fitted = (now, step)
        elif step is not None and self._fitted is not None:
            at, earlier = self._fitted
            step = step.with_line_of(earlier, now - at)
        prefilled = sum(each.prefill_tokens for each in intervals)
        found = Speeds(step, measure(intervals), prefilled / generated if step is not None and generated else None)
        self._known = (last, found)
        return found


class Measured:
    """The counters of `/v1/loads` of one server, by DP rank."""

    def __init__(self, window_seconds: float) -> None:
        self._length = window_seconds
        self._ranks: dict[int | None, MeasuredScheduler] = {}

    def observe(self, loads: Sequence[Load], now: float) -> None:
        """Add one answer; each scheduler in it has a time stamp of its own, and a snapshot seen before is ignored."""
        for load in loads:
            counted = Counters.of(load)
            if counted is None or (load.dp not in self._ranks and len(self._ranks) >= MOST_SCHEDULERS):
                continue
            rank = self._ranks.setdefault(load.dp, MeasuredScheduler(self._length))
            if rank.readings.take(counted):
                waiting = load.waiting_uncached_tokens
                rank.seen_at, rank.waiting = now, None if waiting is None else float(waiting)

    def forget(self) -> None:
        """Remove everything: another server runs, or the same one with other arguments."""
        self._ranks.clear()

    def scheduler(self, dp: int | None, now: float, *, only: bool) -> MeasuredScheduler | None:
        """Return one scheduler; a server's only scheduler is rank 0 in `/v1/loads`. None where its counters are old or absent."""
        rank = self._ranks.get(0 if dp is None and only and None not in self._ranks else dp)
        return None if rank is None or now - rank.seen_at >= STALE_SECONDS else rank
