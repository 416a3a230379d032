"""Prefill speed while prefill runs, and the share of time that prefill takes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_tuning_exporter.capacity.estimate import Estimate, jackknife
from sglang_tuning_exporter.capacity.readings import Interval

LEAST_BUSY_SECONDS = 0.5
LEAST_WINDOWS, MOST_WINDOWS = 4, 10
LEAST_SHARE_SECONDS = 20.0


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
    return jackknife(tokens / busy, without)
