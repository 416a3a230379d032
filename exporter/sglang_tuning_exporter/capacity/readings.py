"""Readings of `/v1/loads` over ten minutes, and the speeds of each scheduler by them: the step time and prefill. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from sglang_tuning_exporter.capacity.step_time import (
    LEAST_WINDOWS,
    MOST_WINDOWS,
    NONE,
    Estimate,
    StepSums,
    StepTime,
    fit,
    jackknife,
    total,
)
from sglang_tuning_exporter.sglang.server_info import Load

LEAST_SECONDS = 1.0  # between two readings
BACKWARDS_SECONDS = 5.0  # a snapshot that much older than the last one is from another clock or another server
LEAST_BUSY_SECONDS = 0.5
LEAST_SHARE_SECONDS = 20.0
LEAST_SERVING_SECONDS = 20.0
STALE_SECONDS = 120.0  # older figures say nothing about now
MOST_SCHEDULERS = 384


class Counters(NamedTuple):
    """One scheduler's cumulative counters at a time of its own clock; or what it did in so many seconds up to a time."""

    at: float
    prefill_tokens: float
    prefill_seconds: float
    decode: StepSums
    seconds: float = 0.0

    @classmethod
    def of(cls, load: Load) -> Counters | None:
        """Return the counters of an answer; None where the release has none, or the values are impossible."""
        if load.timestamp is None or load.prefill_busy_seconds is None or load.prefill_uncached_tokens is None:
            return None
        decode = NONE
        if load.decode_moments is not None:
            steps, batch, microseconds, squared, batch_microseconds, tokens = load.decode_moments
            decode = StepSums(steps, batch, microseconds / 1e6, squared, batch_microseconds / 1e6, tokens)
        if not decode.are_possible:
            return None
        return cls(load.timestamp, load.prefill_uncached_tokens, load.prefill_busy_seconds, decode)

    def fell_since(self, last: Counters) -> bool:
        """Whether any counter is lower than before."""
        mine, theirs = (self[1:3] + self.decode, last[1:3] + last.decode)
        return any(after < before for before, after in zip(theirs, mine, strict=True))

    def since(self, last: Counters) -> Counters | None:
        """Return what was done since an earlier reading; None where the counters restarted."""
        if self.at <= last.at or self.fell_since(last):
            return None
        decode = self.decode.minus(last.decode)
        # After months of uptime the sums lose their last digits, and the spread of a few steps may be negative.
        if not decode.are_possible:
            decode = NONE
        tokens, seconds = self.prefill_tokens - last.prefill_tokens, self.prefill_seconds - last.prefill_seconds
        return Counters(self.at, tokens, seconds, decode, self.at - last.at)


class Prefill(NamedTuple):
    """Prompt tokens a second while prefill runs, and its share of wall time; an unknown figure is None."""

    tokens_per_second: Estimate | None = None
    share: float | None = None


def prefill_of(intervals: Sequence[Counters]) -> Prefill:
    """Return the speed and the share over `intervals`."""
    watched = sum(each.seconds for each in intervals)
    busy = sum(each.prefill_seconds for each in intervals)
    # SGLang counts a prefill when it ends, so the busy time of a long one may exceed a short interval.
    share = min(busy / watched, 1.0) if watched >= LEAST_SHARE_SECONDS else None
    return Prefill(_speed([each for each in intervals if each.prefill_seconds > 0], busy), share)


def _speed(computing: Sequence[Counters], busy: float) -> Estimate | None:
    """Return the speed; None where its interval reaches zero."""
    tokens = sum(each.prefill_tokens for each in computing)
    if busy < LEAST_BUSY_SECONDS or not tokens or len(computing) < LEAST_WINDOWS:
        return None
    size = -(-len(computing) // MOST_WINDOWS)
    cut = [computing[first : first + size] for first in range(0, len(computing), size)]
    without = []
    for window in cut:
        rest = busy - sum(each.prefill_seconds for each in window)
        if rest <= 0:
            return None
        without.append((tokens - sum(each.prefill_tokens for each in window)) / rest)
    found = jackknife(tokens / busy, without)
    return found if found is not None and found.low > 0 else None


class Speeds(NamedTuple):
    """What one scheduler shows: step time, prefill, and prompt tokens computed for each generated token; None where not known."""

    step: StepTime | None = None
    prefill: Prefill = Prefill()
    per_token: float | None = None


class Readings:
    """The intervals between one scheduler's readings in the last `length` seconds of its clock, and the fit of them."""

    def __init__(self, length: float) -> None:
        self._length = length
        self.last: Counters | None = None
        self.intervals: deque[Counters] = deque()
        self.seen_at = -inf
        self.waiting: float | None = None  # prompt tokens
        self._fitted: StepTime | None = None  # the last one with a line
        self._known: tuple[float | None, Speeds] | None = None  # the last reading's time, and the fit up to it

    def take(self, reading: Counters) -> bool:
        """Add a reading; return False for a snapshot that was read before.

        Counters that fall belong to a restarted server, so the intervals before them are removed.
        """
        last, self.last = self.last, reading
        if last is None:
            return True
        if last.at - BACKWARDS_SECONDS <= reading.at < last.at + LEAST_SECONDS and not reading.fell_since(last):
            self.last = last
            return reading.at > last.at
        interval = reading.since(last)
        if interval is None:
            self.intervals.clear()
            self._fitted = None
        elif interval.seconds <= self._length:
            self.intervals.append(interval)
        while self.intervals and self.intervals[0].at - self.intervals[0].seconds < reading.at - self._length:
            self.intervals.popleft()
        return True

    @property
    def speeds(self) -> Speeds:
        """The present fit, made once for each new reading.

        At a running limit the batch does not vary, and no line can be fitted. Then the line of the time when it varied is used: it answers
        what a larger batch would bring.
        """
        last = None if self.last is None else self.last.at
        if self._known is not None and self._known[0] == last:
            return self._known[1]
        step = fit([each.decode for each in self.intervals])
        generated = total(each.decode for each in self.intervals).tokens
        if step is not None and step.line is not None:
            self._fitted = step
        elif step is not None and self._fitted is not None:
            step = step.with_line_of(self._fitted)
        prefilled = sum(each.prefill_tokens for each in self.intervals)
        per_token = prefilled / generated if step is not None and generated else None
        found = Speeds(step, prefill_of(list(self.intervals)), per_token)
        self._known = (last, found)
        return found


class Measured:
    """The counters of `/v1/loads` of one server, by DP rank."""

    def __init__(self, window_seconds: float) -> None:
        self._length = window_seconds
        self._ranks: dict[int | None, Readings] = {}

    def observe(self, loads: Sequence[Load], now: float) -> None:
        """Add one answer; each scheduler in it has a time stamp of its own, and a snapshot seen before is ignored."""
        for load in loads:
            counted = Counters.of(load)
            if counted is None or (load.dp not in self._ranks and len(self._ranks) >= MOST_SCHEDULERS):
                continue
            rank = self._ranks.setdefault(load.dp, Readings(self._length))
            if rank.take(counted):
                waiting = load.waiting_uncached_tokens
                rank.seen_at, rank.waiting = now, None if waiting is None else float(waiting)

    def forget(self) -> None:
        """Remove everything: another server runs, or the same one with other arguments."""
        self._ranks.clear()

    def scheduler(self, dp: int | None, now: float, *, only: bool) -> Readings | None:
        """Return one scheduler; a server's only scheduler is rank 0 in `/v1/loads`. None where its counters are old or absent."""
        rank = self._ranks.get(0 if dp is None and only and None not in self._ranks else dp)
        return None if rank is None or now - rank.seen_at >= STALE_SECONDS else rank
