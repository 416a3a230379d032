"""What a Prometheus would hold of the counters of a server, and what its `increase()` makes of it. Pure.

The extrapolation over the samples of a range is followed figure by figure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Generic, TypeVar

from sglang_tuning_exporter.state.signals import IDLE, SIGNALS, STATES, UNKNOWN

if TYPE_CHECKING:
    from sglang_tuning_exporter.state.signals import Signal

EVALUATION_SECONDS = 15.0  # alerts/prometheus.yml: scrape_interval and evaluation_interval
# A Prometheus evaluates some fixed time after it scrapes, less than an interval; what it rounds in a range that is not yet
# full depends on it.
DELAY_SECONDS = 5.0
COUNTED = tuple((signal, state) for signal in SIGNALS for state in STATES[signal])
_OF_SIGNAL = {
    signal: [place for place, (of, state) in enumerate(COUNTED) if of == signal and state not in {IDLE, UNKNOWN}]
    for signal in SIGNALS
}
_WAITED = [place for place in _OF_SIGNAL["queue"] if COUNTED[place][1] != "empty"]
_WATCHED = [place for place, (of, state) in enumerate(COUNTED) if of == "queue" and state != UNKNOWN]
_T = TypeVar("_T")


class SampleSeries(Generic[_T]):
    """Samples of a series, or of several that are always told together, as far back as anybody asks."""

    __slots__ = ("_kept", "samples")

    def __init__(self, kept: float) -> None:
        self._kept = kept
        self.samples: deque[tuple[float, _T]] = deque()

    def add(self, now: float, value: _T) -> None:
        """Take what was scraped just now."""
        self.samples.append((now, value))
        self.prune(now)

    def prune(self, now: float) -> None:
        """Drop what nobody asks for any more."""
        while self.samples and self.samples[0][0] <= now - self._kept:
            self.samples.popleft()

    @property
    def is_level(self) -> bool:
        """Whether the first and the last are equal: a counter between them has gained nothing."""
        samples = self.samples
        return not samples or samples[0][1] == samples[-1][1]

    def within(self, window: float, now: float) -> RangeVector[_T] | None:
        """Give first and last sample of the window, and how many there are; None for less than two.

        Sampled at `now`, evaluated soon after; `now` may be a moment before the last sample.
        """
        start, end = now + DELAY_SECONDS - window, now + DELAY_SECONDS
        samples, last = self.samples, len(self.samples) - 1
        while last >= 0 and samples[last][0] > end:
            last -= 1
        if last < 0:
            return None
        # Samples are evenly spaced but for gaps, so the place of the first is close to where it is reckoned.
        place = max(0, last + 1 - round(window / EVALUATION_SECONDS))
        while place > 0 and samples[place - 1][0] > start:
            place -= 1
        while place <= last and samples[place][0] <= start:
            place += 1
        count = last + 1 - place
        if count < 2:
            return None
        return RangeVector(*samples[place], *samples[last], count, start, end)


@dataclass(frozen=True, slots=True)
class RangeVector(Generic[_T]):
    """What a range selector found: its first and last sample."""

    first_at: float
    first: _T
    last_at: float
    last: _T
    count: int
    start: float
    end: float

    def increase(self, first: float, last: float) -> float:
        """Stretch what a counter gained between the samples to the window, as Prometheus does (promql/functions.go, extrapolatedRate)."""
        gained = last - first
        sampled = self.last_at - self.first_at
        between = sampled / (self.count - 1)
        before, after = self.first_at - self.start, self.end - self.last_at
        if gained > 0 and first >= 0:
            before = min(before, sampled * (first / gained))  # it cannot have been below 0
        limit = 1.1 * between
        before = before if before < limit else between / 2
        after = after if after < limit else between / 2
        return gained * (sampled + before + after) / sampled


def increase_of(series: SampleSeries[float], window: float, now: float) -> float | None:
    """Give what a counter gained in the window, as `increase()` does; None for less than two samples."""
    found = series.within(window, now)
    return None if found is None else found.increase(found.first, found.last)


class Shares:
    """Seconds in each state over one window, of every scheduler and of all of them together."""

    def __init__(self, seconds: dict[int | None, SampleSeries[tuple[float, ...]]], window: float, now: float) -> None:
        self._gained = [0.0] * len(COUNTED)
        self._serving: dict[Signal, float] = {}
        self._busy: dict[Signal, float] = {}
        self._by_rank: list[dict[int, float]] = []  # seconds in each state, by its place
        self.waiting: dict[int, float] = {}  # by DP rank
        for dp, series in seconds.items():
            found = series.within(window, now)
            if found is None:
                continue
            own = {
                place: found.increase(first, last)
                for place, (first, last) in enumerate(zip(found.first, found.last, strict=True))
                if first != last
            }
            self._by_rank.append(own)
            for place, gained in own.items():
                self._gained[place] += gained
            watched = 0.0 if dp is None else sum(own.get(place, 0.0) for place in _WATCHED)
            if dp is not None and watched > 0:
                self.waiting[dp] = sum(own.get(place, 0.0) for place in _WAITED) / watched

    def serving(self, signal: Signal) -> float:
        """Give the seconds in which a signal was known while something ran or waited, of all schedulers together."""
        known = self._serving.get(signal)
        if known is None:
            known = self._serving[signal] = sum([self._gained[place] for place in _OF_SIGNAL[signal]])
        return known

    def busy(self, signal: Signal) -> float:
        """Give the seconds in which the busiest scheduler served."""
        known = self._busy.get(signal)
        if known is None:
            of_ranks = [sum([own.get(place, 0.0) for place in _OF_SIGNAL[signal]]) for own in self._by_rank]
            known = self._busy[signal] = max(of_ranks, default=0.0)
        return known

    def share(self, signal: Signal, states: tuple[str, ...]) -> float | None:
        """Give the part of them in these states, 0-1; None without any."""
        serving = self.serving(signal)
        if serving <= 0:
            return None
        return sum([self._gained[place] for place in _places(signal, states)]) / serving


@cache
def _places(signal: Signal, states: tuple[str, ...]) -> tuple[int, ...]:
    """Give where a signal's seconds in these states stand."""
    return tuple(place for place in _OF_SIGNAL[signal] if COUNTED[place][1] in states)
