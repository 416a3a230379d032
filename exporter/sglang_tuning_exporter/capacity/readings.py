"""The counters of `/v1/loads` over time: what happened between two readings of one scheduler, over a sliding window. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from sglang_tuning_exporter.capacity.moments import NONE, Moments

if TYPE_CHECKING:
    from sglang_tuning_exporter.sglang.server_info import Load

LEAST_SECONDS = 1.0  # between two readings: a snapshot is written every few steps
BACKWARDS_SECONDS = 5.0  # a snapshot so much older than the last one is from another clock, or another server


class Reading(NamedTuple):
    """What one scheduler had counted at a moment of its own clock."""

    at: float
    prefill_tokens: float
    prefill_seconds: float
    decode: Moments

    @classmethod
    def of(cls, load: Load) -> Reading | None:
        """Return what `/v1/loads` counted; None where this release does not count, or what it gives cannot be."""
        if load.timestamp is None or load.prefill_busy_seconds is None or load.prefill_uncached_tokens is None:
            return None
        decode = NONE
        if load.decode_moments is not None:
            steps, batch, microseconds, squared, batch_microseconds, tokens = load.decode_moments
            decode = Moments(steps, batch, microseconds / 1e6, squared, batch_microseconds / 1e6, tokens)
        if not decode.are_possible:
            return None
        return cls(load.timestamp, load.prefill_uncached_tokens, load.prefill_busy_seconds, decode)


class Interval(NamedTuple):
    """What a scheduler did between two readings."""

    end: float
    seconds: float
    prefill_tokens: float
    prefill_seconds: float
    decode: Moments


class Readings:
    """One scheduler's readings, as the intervals between them in the last `length` seconds of its clock."""

    def __init__(self, length: float) -> None:
        self._length = length
        self.last: Reading | None = None
        self.intervals: deque[Interval] = deque()
        self.restarted = False  # until somebody takes note

    def take(self, reading: Reading) -> bool:
        """Take a reading; False for the snapshot that is known already.

        Counters that fall are those of a new server: what the one before did says nothing about it.
        """
        last = self.last
        if last is None:
            self.last = reading
            return True
        if last.at - BACKWARDS_SECONDS <= reading.at < last.at + LEAST_SECONDS and not _fell(last, reading):
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


def _fell(last: Reading, new: Reading) -> bool:
    return (
        new.prefill_tokens < last.prefill_tokens
        or new.prefill_seconds < last.prefill_seconds
        or any(after < before for before, after in zip(last.decode, new.decode, strict=True))
    )


def _between(last: Reading, new: Reading) -> Interval | None:
    """Return what happened between; None where the counters began again, or their difference cannot be."""
    if new.at <= last.at or _fell(last, new):
        return None
    decode = new.decode.minus(last.decode)
    # Sums of a server that has run for months lose their last digits: a few steps' spread may come out below zero.
    if not decode.are_possible:
        decode = NONE
    seconds = new.at - last.at
    return Interval(
        new.at, seconds, new.prefill_tokens - last.prefill_tokens, new.prefill_seconds - last.prefill_seconds, decode
    )
