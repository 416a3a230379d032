"""Cumulative figures of a scheduler, and their part in a recent window. Pure; seconds on the caller's clock."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from functools import lru_cache
from math import inf
from typing import TypeAlias, TypeVar

from sglang_tuning_exporter.state.signals import IDLE, SIGNALS, STATES, UNKNOWN, Signal, States

STEP_SECONDS = 10.0
ADMISSION_SECONDS = 60.0
_SECONDS_KEPT = 256  # of admissions
_COARSE_ABOVE = 128  # larger batch sizes are rounded up to a multiple of 8, as captured sizes are


# The keys of `Totals.seconds` for the time in which something ran or waited and the signal was known.
_SERVING = {
    signal: tuple((signal, state) for state in STATES[signal] if state not in {IDLE, UNKNOWN}) for signal in SIGNALS
}

HELD_BACK = "held_back"  # the state of `admission`
_Key = TypeVar("_Key")


# The states of a scheduler, and its queued requests, usage of the fullest pool and running requests, where known.
Snapshot: TypeAlias = tuple[States, float | None, float | None, float | None]


@lru_cache(maxsize=1024)
def _keys(states: States) -> tuple[tuple[Signal, str], ...]:
    return tuple(zip(SIGNALS, states, strict=True))


def _combine(mine: dict[_Key, float], theirs: dict[_Key, float], sign: int) -> None:
    for key, value in theirs.items():
        mine[key] += sign * value


class Totals:
    """Cumulative figures of one scheduler, or their difference over a window.

    `seconds` by (signal, state); `running_seconds` by decode batch size; `integrals` are figure x seconds of serving time (queued, usage,
    running), and of its part with admission `held_back` (held_back_usage, held_back_running). All three are computed when they are read.
    """

    def __init__(
        self,
        seconds: defaultdict[tuple[Signal, str], float] | None = None,
        running_seconds: defaultdict[int, float] | None = None,
        integrals: defaultdict[str, float] | None = None,
        counts: defaultdict[str, float] | None = None,
    ) -> None:
        self._seconds = defaultdict(float) if seconds is None else seconds
        self._running_seconds = defaultdict(float) if running_seconds is None else running_seconds
        self._integrals = defaultdict(float) if integrals is None else integrals
        self.counts = defaultdict(float) if counts is None else counts
        self.pending: list[tuple[float, Snapshot]] = []  # seconds and what held in them, not added up yet

    @property
    def seconds(self) -> defaultdict[tuple[Signal, str], float]:
        """Seconds by (signal, state)."""
        self.settle()
        return self._seconds

    @property
    def running_seconds(self) -> defaultdict[int, float]:
        """Seconds of serving time by decode batch size, see `batch_size_bucket`."""
        self.settle()
        return self._running_seconds

    @property
    def integrals(self) -> defaultdict[str, float]:
        """Figure x seconds of serving time, and `<figure>_seconds` in which it was known."""
        self.settle()
        return self._integrals

    def settle(self) -> None:
        """Add up what is pending."""
        if self.pending:
            self._add_up(self.pending)
            self.pending.clear()

    def _add_up(self, pending: list[tuple[float, Snapshot]]) -> None:  # noqa: C901, PLR0912 - one loop: all seconds of a log
        held_for: dict[States, float] = {}
        sizes: dict[float, float] = {}
        of_queued = of_usage = of_running = queued_for = usage_for = running_for = 0.0
        held_back_usage = held_back_running = held_back_for = seconds_so_far = 0.0
        last = pending[0][1][0]
        serves, is_held_back = last[0] == "serving", last[3] == HELD_BACK
        for seconds, (states, queued, usage, running) in pending:
            if states is not last and states != last:  # most often they are those of before
                held_for[last] = held_for.get(last, 0.0) + seconds_so_far
                last, seconds_so_far, serves, is_held_back = states, 0.0, states[0] == "serving", states[3] == HELD_BACK
            seconds_so_far += seconds
            if not serves:
                continue
            if queued is not None:
                of_queued += queued * seconds
                queued_for += seconds
            if usage is not None:
                of_usage += usage * seconds
                usage_for += seconds
            if running is not None:
                of_running += running * seconds
                running_for += seconds
                if running:
                    sizes[running] = sizes.get(running, 0.0) + seconds
                if is_held_back and usage is not None:
                    held_back_for += seconds
                    held_back_usage += usage * seconds
                    held_back_running += running * seconds
        held_for[last] = held_for.get(last, 0.0) + seconds_so_far
        for size, seconds in sizes.items():
            self._running_seconds[batch_size_bucket(size)] += seconds
        for states, seconds in held_for.items():
            for key in _keys(states):
                self._seconds[key] += seconds
        for figure, figure_seconds, integral, known_for in (
            ("queued", "queued_seconds", of_queued, queued_for),
            ("usage", "usage_seconds", of_usage, usage_for),
            ("running", "running_seconds", of_running, running_for),
            ("held_back_usage", "held_back_usage_seconds", held_back_usage, held_back_for),
            ("held_back_running", "held_back_running_seconds", held_back_running, held_back_for),
        ):
            if known_for:
                self._integrals[figure] += integral
                self._integrals[figure_seconds] += known_for

    def copy(self) -> Totals:
        """Return an independent copy."""
        self.settle()
        return Totals(self._seconds.copy(), self._running_seconds.copy(), self._integrals.copy(), self.counts.copy())

    def __add__(self, other: Totals) -> Totals:
        """Add another scheduler's figures."""
        return self._with(other, 1)

    def __sub__(self, earlier: Totals) -> Totals:
        """Subtract what had come earlier."""
        return self._with(earlier, -1)

    def _with(self, other: Totals, sign: int) -> Totals:
        result = self.copy()
        _combine(result.seconds, other.seconds, sign)
        _combine(result.running_seconds, other.running_seconds, sign)
        _combine(result.integrals, other.integrals, sign)
        _combine(result.counts, other.counts, sign)
        return result

    def serving_seconds(self, signal: Signal = "activity") -> float:
        """Return the seconds in which something ran or waited and `signal` was known."""
        seconds = self.seconds
        return sum([seconds[key] for key in _SERVING[signal] if key in seconds])

    def share(self, signal: Signal, state: str) -> float | None:
        """Return the share of the signal's serving time in `state`, 0-1; None without serving time."""
        return self.share_of(signal, (state,))

    def share_of(self, signal: Signal, states: Iterable[str]) -> float | None:
        """Return the share of the signal's serving time in any of `states`, 0-1; None without serving time."""
        serving = self.serving_seconds(signal)
        shares = [self.seconds[signal, state] / serving for state in states] if serving > 0 else []
        return sum(shares) if shares else None

    def mean(self, figure: str) -> float | None:
        """Return the mean of `queued`, `usage` or `running` over the serving time in which it was known."""
        seconds = self.integrals[figure + "_seconds"]
        return self.integrals[figure] / seconds if seconds > 0 else None

    def running_quantile(self, share: float) -> int | None:
        """Return the decode batch size that is not exceeded for `share` of the serving time."""
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
    """Return the batch size that is kept: exact up to 128, then rounded up to a multiple of 8, so memory is bounded."""
    size = int(running)
    return size if size <= _COARSE_ABOVE else min(-(-size // 8) * 8, 1 << 16)


class Window:
    """Keeps `Totals` every 10 s: what happened in the last `length` seconds is a difference."""

    def __init__(self, length: float) -> None:
        self.length = length
        self._marks: deque[tuple[float, Totals]] = deque()
        self.due = -inf  # when the next mark is kept

    def mark(self, now: float, totals: Totals) -> None:
        """Keep the totals if 10 s have passed since the last ones."""
        if now < self.due:
            return
        self.due = now + STEP_SECONDS
        self._marks.append((now, totals.copy()))
        while len(self._marks) > 2 and self._marks[1][0] <= now - self.length:
            self._marks.popleft()

    def begin(self, totals: Totals) -> None:
        """Leave out everything up to now: it was restored, or happened before the exporter started."""
        self._marks.clear()
        self._marks.append((-inf, totals.copy()))
        self.due = -inf

    def recent(self, now: float, totals: Totals, seconds: float | None = None) -> Totals:
        """Return what came in the last `seconds` (by default the window's length), from the nearest mark before."""
        start = now - (self.length if seconds is None else seconds)
        before = [mark for at, mark in self._marks if at <= start]
        return totals - (before[-1] if before else Totals())

    def last_seen(self, now: float, totals: Totals, signal: Signal, state: str) -> float | None:
        """Return when the signal was last in `state`, to the next mark or the oldest one; None where it never was."""
        spent, later = totals.seconds[signal, state], now
        if not spent:
            return None
        for at, mark in reversed(self._marks):
            if mark.seconds[signal, state] < spent:
                return later
            later = at
        return later


class AdmissionRate:
    """Requests that left the queue per second, over the last minute of serving time, by whole seconds.

    Pauses in which nothing runs or waits are left out: how fast requests start does not follow from them.
    """

    def __init__(self) -> None:
        self._admitted: deque[tuple[float, float]] = deque()  # before the present second
        self._sum = 0.0  # of `_admitted`
        self._since: float | None = None
        self._second = -inf
        self._now = 0.0  # admitted in `_second`
        self._paused = 0.0  # seconds in which nothing was served: the times above do not contain them

    def pause(self, seconds: float) -> None:
        """Leave out `seconds` in which nothing ran or waited."""
        self._paused += seconds

    def add(self, now: float, requests: float) -> None:
        """Count `requests` admitted just now."""
        now -= self._paused
        if self._second <= now < self._second + 1.0:
            self._now += requests
            return
        if self._now:
            self._admitted.append((self._second, self._now))
            self._sum += self._now
            if len(self._admitted) > _SECONDS_KEPT:
                self._drop(now - ADMISSION_SECONDS)
        if self._since is None:
            self._since = now
        self._second, self._now = now // 1.0, requests

    def _drop(self, oldest: float) -> None:
        while self._admitted and self._admitted[0][0] < oldest:
            self._sum -= self._admitted.popleft()[1]

    def per_second(self, now: float) -> float | None:
        """Return the rate; None in the first ten seconds of serving time."""
        now -= self._paused
        watched = 0.0 if self._since is None else min(now - self._since, ADMISSION_SECONDS)
        if watched < 10.0:
            return None
        oldest = now - ADMISSION_SECONDS
        self._drop(oldest)
        if self._second < oldest:
            self._now = 0.0
        return (self._sum + self._now) / watched
