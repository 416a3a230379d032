"""What one scheduler can do: readings of `/v1/loads` over ten minutes, its speeds by them, and what the KV cache and the running limit allow. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import floor, inf
from typing import NamedTuple

from sglang_tuning_exporter.capacity.step_time import (
    LEAST_LINES,
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


class Counters(NamedTuple):
    """One scheduler's cumulative counters at a time of its own clock."""

    at: float
    prefill_tokens: float
    prefill_seconds: float
    decode: StepSums

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


class Interval(NamedTuple):
    """What one scheduler did between two readings."""

    end: float
    seconds: float
    prefill_tokens: float
    prefill_seconds: float
    decode: StepSums


class Readings:
    """The intervals between one scheduler's readings in the last `length` seconds of its clock."""

    def __init__(self, length: float) -> None:
        self._length = length
        self.last: Counters | None = None
        self.intervals: deque[Interval] = deque()
        self.restarted = False  # reset by the reader

    def take(self, reading: Counters) -> bool:
        """Add a reading; return False for a snapshot that was read before.

        Counters that fall belong to a restarted server, so the intervals before them are removed.
        """
        last = self.last
        if last is None:
            self.last = reading
            return True
        if last.at - BACKWARDS_SECONDS <= reading.at < last.at + LEAST_SECONDS and not _decreased(last, reading):
            return reading.at > last.at
        interval = _between(last, reading)
        if interval is None:
            self.intervals.clear()
            self.restarted = True
        elif interval.seconds <= self._length:
            self.intervals.append(interval)
        self.last = reading
        while self.intervals and self.intervals[0].end - self.intervals[0].seconds < reading.at - self._length:
            self.intervals.popleft()
        return True


def _decreased(last: Counters, new: Counters) -> bool:
    return (
        new.prefill_tokens < last.prefill_tokens
        or new.prefill_seconds < last.prefill_seconds
        or any(after < before for before, after in zip(last.decode, new.decode, strict=True))
    )


def _between(last: Counters, new: Counters) -> Interval | None:
    """Return the difference; None where the counters restarted."""
    if new.at <= last.at or _decreased(last, new):
        return None
    decode = new.decode.minus(last.decode)
    # After months of uptime the sums lose their last digits, and the spread of a few steps may be negative.
    if not decode.are_possible:
        decode = NONE
    seconds = new.at - last.at
    return Interval(
        new.at, seconds, new.prefill_tokens - last.prefill_tokens, new.prefill_seconds - last.prefill_seconds, decode
    )


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompt tokens a second while prefill runs, and its share of wall time; an unknown figure is None."""

    tokens_per_second: Estimate | None
    share: float | None


def measure(intervals: Sequence[Interval]) -> Prefill:
    """Return the speed and the share over `intervals`."""
    watched = sum(each.seconds for each in intervals)
    busy = sum(each.prefill_seconds for each in intervals)
    # SGLang counts a prefill when it ends, so the busy time of a long one may exceed a short interval.
    share = min(busy / watched, 1.0) if watched >= LEAST_SHARE_SECONDS else None
    return Prefill(_speed([each for each in intervals if each.prefill_seconds > 0], busy), share)


def _speed(computing: Sequence[Interval], busy: float) -> Estimate | None:
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


STALE_SECONDS = 120.0  # older figures say nothing about now
LEAST_SERVING_SECONDS = 20.0
MOST_FITS = 64
NOT_MEASURED = Prefill(None, None)
DECODES_NOTHING = "the prefill side of disaggregation decodes nothing"
NO_DECODE_STEPS = "no decode steps were seen: /v1/loads counts them from 0.5.18 on, and a log shows them under load"
NO_ACCEPT_LENGTH = "the decode lines do not show how many tokens a speculative step gives (accept len)"


@dataclass(frozen=True, slots=True)
class RankCapacity:
    """The speed of one scheduler; an unknown figure is None.

    `tokens_per_request`: KV cache tokens that a running request holds. `most_requests`: how many such requests fit and may run.
    `prefill_per_token`: prompt tokens computed for each generated token, in the present mix.
    """

    dp: int | None
    step: StepTime | None = None
    prefill: Prefill = NOT_MEASURED
    waiting_tokens: float | None = None
    prefill_per_token: float | None = None
    running: float | None = None
    tokens_per_request: float | None = None
    most_requests: int | None = None
    pool_tokens: float | None = None
    running_limit: float | None = None
    no_step: str = ""  # why the step time is unknown

    @property
    def backlog_seconds(self) -> Estimate | None:
        """Seconds of prefill that the waiting prompts need."""
        speed, waiting = self.prefill.tokens_per_second, self.waiting_tokens
        return None if speed is None or waiting is None else speed.dividing(waiting)

    @property
    def decode_limit(self) -> Estimate | None:
        """Generated tokens a second with as many requests as fit and may run, without prefill."""
        return None if self.most_requests is None else self.decode_speed(self.most_requests)

    def decode_speed(self, batch: float) -> Estimate | None:
        """Return the generated tokens a second at a batch, without prefill."""
        step = None if self.step is None else self.step.at(batch)
        return None if step is None or self.step is None else step.dividing(batch * self.step.tokens_per_request)


def most_requests(pool: float | None, tokens_held: float | None, limit: float | None) -> int | None:
    """Return how many requests of `tokens_held` fit into the KV cache and may run; None where what fits is not known."""
    if pool is None or not tokens_held:
        return None  # with the limit alone nothing is known: the KV cache may hold far fewer
    fitting = pool / tokens_held
    return max(floor(fitting if limit is None else min(fitting, limit)), 1)


@lru_cache(maxsize=MOST_FITS)
def fit_of_lines(lines: tuple[StepSums, ...]) -> StepTime | str:
    """Return the step time from decode lines, each as one step, or why there is none; cached, because one page needs a fit several times."""
    return fit(lines, least=LEAST_LINES, source="log") or (
        f"{len(lines)} decode lines of the last ten minutes show the time of a step (one a second at most, and none after a prefill or"
        f" another batch), and {LEAST_LINES} are needed: give a longer log, or ask the server itself (--sglang-url, from 0.5.18 on)"
    )


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
