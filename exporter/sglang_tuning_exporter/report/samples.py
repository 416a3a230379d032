"""The samples that a Prometheus would hold of a server's counters, and its `increase()` over them. Pure.

`increase()` extrapolates exactly as Prometheus does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from sglang_tuning_exporter.state.signals import IDLE, SIGNALS, STATES, UNKNOWN, Signal

EVALUATION_SECONDS = 15.0  # alerts/prometheus.yml: scrape_interval and evaluation_interval
# Prometheus evaluates a fixed time after it scrapes, less than an interval; the extrapolation of a range that is not yet full
# depends on it.
DELAY_SECONDS = 5.0
# Seconds in which a signal was unknown are in no share, so that schedulers of earlier starts stand still.
COUNTED = tuple((signal, state) for signal in SIGNALS for state in STATES[signal] if state != UNKNOWN)
_OF_SIGNAL = {signal: [place for place, (counted, _) in enumerate(COUNTED) if counted == signal] for signal in SIGNALS}
_T = TypeVar("_T")


class SampleSeries(Generic[_T]):
    """Samples of a series, or of several that are always scraped together, as far back as rules need them."""

    __slots__ = ("_kept", "samples")

    def __init__(self, kept: float) -> None:
        self._kept = kept
        self.samples: deque[tuple[float, _T]] = deque()

    def add(self, now: float, value: _T) -> None:
        """Add a sample."""
        self.samples.append((now, value))
        self.prune(now)

    def prune(self, now: float) -> None:
        """Drop samples that no rule needs any more."""
        while self.samples and self.samples[0][0] <= now - self._kept:
            self.samples.popleft()

    @property
    def is_level(self) -> bool:
        """Whether the first and the last sample are equal, so that a counter has not increased."""
        samples = self.samples
        return not samples or samples[0][1] == samples[-1][1]

    def within(self, window: float, now: float) -> RangeVector[_T] | None:
        """Return the first and the last sample of the window, and how many there are; None for less than two.

        The window ends soon after `now`, which may be before the last sample.
        """
        start, end = now + DELAY_SECONDS - window, now + DELAY_SECONDS
        samples, last = self.samples, len(self.samples) - 1
        while last >= 0 and samples[last][0] > end:
            last -= 1
        if last < 0:
            return None
        # Samples are evenly spaced except for gaps, so the first one is close to the computed place.
        place = max(0, last + 1 - round(window / EVALUATION_SECONDS))
        while place > 0 and samples[place - 1][0] > start:
            place -= 1
        while place <= last and samples[place][0] <= start:
            place += 1
        count = last + 1 - place
        if count < 2:
            return None
        return RangeVector(*samples[place], *samples[last], count, start, end)


@dataclass(slots=True)
class RangeVector(Generic[_T]):
    """The first and the last sample of a range selector, and how many it has."""

    first_at: float
    first: _T
    last_at: float
    last: _T
    count: int
    start: float
    end: float

    def increases(self, counters: Iterable[tuple[float, float]]) -> list[float]:
        """Return `increase()` of counters, each given by its first and last value (promql/functions.go, extrapolatedRate)."""
        sampled = self.last_at - self.first_at
        between = sampled / (self.count - 1)
        limit = 1.1 * between
        before, after = self.first_at - self.start, self.end - self.last_at
        after = after if after < limit else between / 2
        found = []
        for first, last in counters:
            gained, lead = last - first, before
            if gained > 0 and first >= 0:
                lead = min(before, sampled * (first / gained))  # it cannot have been below 0
            lead = lead if lead < limit else between / 2
            found.append(gained * (sampled + lead + after) / sampled)
        return found


class Shares:
    """Seconds in each state over one window, of every scheduler and of all of them together."""

    def __init__(self, seconds: dict[int | None, SampleSeries[tuple[float, ...]]], window: float, now: float) -> None:
        """`seconds`: of the schedulers that moved at all."""
        found = ((dp, series.within(window, now)) for dp, series in seconds.items())
        self._by_rank = [(dp, vector) for dp, vector in found if vector is not None]
        self._gained: dict[Signal, list[dict[str, float]]] = {}  # of each scheduler, by state

    def _of(self, signal: Signal) -> list[dict[str, float]]:
        """Return the seconds of one signal; most evaluations need few signals."""
        known = self._gained.get(signal)
        if known is None:
            known = self._gained[signal] = []
            for _, vector in self._by_rank:
                first, last = vector.first, vector.last
                moved = [place for place in _OF_SIGNAL[signal] if first[place] != last[place]]
                gained = vector.increases([(first[place], last[place]) for place in moved])
                known.append({COUNTED[place][1]: each for place, each in zip(moved, gained, strict=True)})
        return known

    def busy(self, signal: Signal) -> float:
        """Return the seconds in which the busiest scheduler served."""
        return max([_serving(own) for own in self._of(signal)], default=0.0)

    def share(self, signal: Signal, states: tuple[str, ...]) -> float | None:
        """Return the part of them in these states, 0-1; None without any."""
        serving = sum([_serving(own) for own in self._of(signal)])
        if serving <= 0:
            return None
        return sum([own.get(state, 0.0) for own in self._of(signal) for state in states]) / serving

    def waiting(self) -> list[float]:
        """Return the part of the time in which requests waited, of each DP rank."""
        if all(dp is None for dp, _ in self._by_rank):
            return []
        shares = []
        for (dp, _), own in zip(self._by_rank, self._of("queue"), strict=True):
            watched = sum(own.values())
            if dp is not None and watched > 0:
                shares.append((_serving(own) - own.get("empty", 0.0)) / watched)
        return shares


def _serving(seconds: dict[str, float]) -> float:
    return sum([gained for state, gained in seconds.items() if state != IDLE])
