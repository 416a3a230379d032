"""What one scheduler did between two readings of `/v1/loads`, over a sliding window, and how fast it prefilled meanwhile. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang_tuning_exporter.capacity.estimate import Estimate, jackknife
from sglang_tuning_exporter.capacity.step_time import NONE, StepSums
from sglang_tuning_exporter.sglang.server_info import Load

LEAST_SECONDS = 1.0  # between two readings
BACKWARDS_SECONDS = 5.0  # a snapshot that much older than the last one is from another clock or another server
LEAST_BUSY_SECONDS = 0.5
LEAST_WINDOWS, MOST_WINDOWS = 4, 10
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
