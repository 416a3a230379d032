"""How much of everything happened, and how much of it lately. Pure; seconds are on the caller's clock."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TypeVar

from sglang_tuning_exporter.signals import IDLE, UNKNOWN, Signal

STEP_SECONDS = 10.0
ADMISSION_SECONDS = 60.0
_COARSE_ABOVE = 128  # batch sizes above it are kept to the next multiple of 8, as captured sizes are


_Key = TypeVar("_Key")


def _zeros() -> defaultdict[_Key, float]:
    return defaultdict(float)


def _combined(mine: dict[_Key, float], theirs: dict[_Key, float], sign: int) -> defaultdict[_Key, float]:
    result = defaultdict(float, mine)
    for key, value in theirs.items():
        result[key] += sign * value
    return result


@dataclass(slots=True)
class Totals:
    """Cumulative figures of one scheduler, or their difference over a window.

    `seconds` by (signal, state); `running_seconds` by decode batch size; `integrals` are figure x seconds of serving
    time (queued, usage, running).
    """

    seconds: defaultdict[tuple[Signal, str], float] = field(default_factory=_zeros)
    running_seconds: defaultdict[int, float] = field(default_factory=_zeros)
    integrals: defaultdict[str, float] = field(default_factory=_zeros)
    counts: defaultdict[str, float] = field(default_factory=_zeros)

    def copy(self) -> Totals:
        """Give an independent copy."""
        return self + Totals()

    def __add__(self, other: Totals) -> Totals:
        """Add another scheduler's figures."""
        return self._with(other, 1)

    def __sub__(self, earlier: Totals) -> Totals:
        """Give what came after `earlier`."""
        return self._with(earlier, -1)

    def _with(self, other: Totals, sign: int) -> Totals:
        return Totals(
            _combined(self.seconds, other.seconds, sign),
            _combined(self.running_seconds, other.running_seconds, sign),
            _combined(self.integrals, other.integrals, sign),
            _combined(self.counts, other.counts, sign),
        )

    def serving_seconds(self, signal: Signal = "activity") -> float:
        """Add up the seconds in which `signal` was told while something ran or waited."""
        return sum(s for (name, state), s in self.seconds.items() if name == signal and state not in {IDLE, UNKNOWN})

    def share(self, signal: Signal, state: str) -> float | None:
        """Give the part of the signal's serving time spent in `state`, 0-1; None without any."""
        serving = self.serving_seconds(signal)
        return self.seconds[signal, state] / serving if serving > 0 else None

    def mean(self, figure: str) -> float | None:
        """Weigh `queued`, `usage` or `running` by time, over the serving time in which it was told."""
        seconds = self.integrals[figure + "_seconds"]
        return self.integrals[figure] / seconds if seconds > 0 else None

    def running_quantile(self, share: float) -> int | None:
        """Find the decode batch size that is not exceeded for `share` of the serving time."""
        total = sum(s for s in self.running_seconds.values() if s > 0)
        below = 0.0
        for size in sorted(size for size, s in self.running_seconds.items() if s > 0):
            below += self.running_seconds[size]
            if below >= share * total:
                return size
        return None

    @property
    def coverage(self) -> float | None:
        """Share of decode batches that replayed a captured graph, 0-1; None without decode batches."""
        batches = self.counts["replayed"] + self.counts["eager"]
        return self.counts["replayed"] / batches if batches else None


def batch_size_bucket(running: float) -> int:
    """Round a batch size to what is remembered: exact up to 128, then the next multiple of 8, so memory is bounded."""
    size = int(running)
    return size if size <= _COARSE_ABOVE else min(-(-size // 8) * 8, 1 << 16)


class Window:
    """Remembers `Totals` every 10 s, so that what happened in the last `length` seconds is a subtraction."""

    def __init__(self, length: float) -> None:
        self._length = length
        self._marks: deque[tuple[float, Totals]] = deque()

    def mark(self, now: float, totals: Totals) -> None:
        """Offer the totals at `now`; kept when 10 s have passed since the last kept ones."""
        if self._marks and now - self._marks[-1][0] < STEP_SECONDS:
            return
        self._marks.append((now, totals.copy()))
        while len(self._marks) > 2 and self._marks[1][0] <= now - self._length:
            self._marks.popleft()

    def recent(self, now: float, totals: Totals, seconds: float | None = None) -> Totals:
        """Give what came in the last `seconds` (the window's length unless told), to the nearest mark before."""
        start = now - (self._length if seconds is None else seconds)
        before = [mark for at, mark in self._marks if at <= start]
        return totals - (before[-1] if before else Totals())


class AdmissionRate:
    """Requests that left the queue per second, over the last minute."""

    def __init__(self) -> None:
        self._admitted: deque[tuple[float, float]] = deque()
        self._since: float | None = None

    def add(self, now: float, requests: float) -> None:
        """Count `requests` admitted just now."""
        if self._since is None:
            self._since = now
        if requests > 0:
            if self._admitted and now - self._admitted[-1][0] < 1.0:
                at, before = self._admitted.pop()
                self._admitted.append((at, before + requests))
            else:
                self._admitted.append((now, requests))

    def per_second(self, now: float) -> float | None:
        """Give the rate, or None until ten seconds have been watched."""
        while self._admitted and self._admitted[0][0] < now - ADMISSION_SECONDS:
            self._admitted.popleft()
        watched = 0.0 if self._since is None else min(now - self._since, ADMISSION_SECONDS)
        if watched < 10.0:
            return None
        return sum(requests for _, requests in self._admitted) / watched
