"""What one series of the exporter's page shows at any moment: a gauge in steps, or a counter."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import floor
from typing import TypeAlias

Key: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]


def key(name: str, **labels: str) -> Key:
    """Name a series of the exporter; `sglang_tuning_` is added."""
    return "sglang_tuning_" + name, tuple(sorted(labels.items()))


@dataclass(frozen=True)
class Gauge:
    """A gauge: its value from each moment on, None where the page does not have it."""

    steps: tuple[tuple[float, float | None], ...]

    def at(self, moment: float) -> float | None:
        """Give the value that a scrape at this moment reads."""
        place = bisect_right(self.steps, moment, key=lambda step: step[0]) - 1
        return self.steps[place][1] if place >= 0 else None

    def during(self, begin: float, end: float, value: float | None) -> Gauge:
        """Give the same with another value from `begin` to `end`."""
        back = self.at(end)
        kept = [step for step in self.steps if not begin <= step[0] <= end]
        return Gauge(tuple(sorted([*kept, (begin, value), (end, back)], key=lambda step: step[0])))

    @property
    def constant(self) -> float | None:
        """The value, where it never changes."""
        return self.steps[0][1] if len(self.steps) == 1 else None


@dataclass(frozen=True)
class Counter:
    """A counter: how fast it grows from each moment on, single increments, and when the exporter began to count anew."""

    rates: tuple[tuple[float, float], ...]
    jumps: tuple[float, ...] = ()
    is_whole: bool = True
    initial: float = 0.0
    resets: tuple[float, ...] = ()

    def at(self, moment: float) -> float:
        """Give the value that a scrape at this moment reads."""
        place = bisect_right(self.resets, moment) - 1
        if place >= 0:
            return self._counted(moment) - self._counted(self.resets[place])
        return self.initial + self._counted(moment)

    def _counted(self, moment: float) -> float:
        total = 0.0
        for number, (begin, rate) in enumerate(self.rates):
            end = self.rates[number + 1][0] if number + 1 < len(self.rates) else moment
            if begin >= moment:
                break
            total += rate * (min(end, moment) - begin)
        total += bisect_right(self.jumps, moment)
        return floor(total + 1e-9) if self.is_whole else total

    def during(self, begin: float, end: float, rate: float) -> Counter:
        """Give the same, growing at another rate from `begin` to `end`."""
        back = self._rate(end)
        kept = [(at, own) for at, own in self.rates if not begin <= at <= end]
        return replace(self, rates=tuple(sorted([*kept, (begin, rate), (end, back)])))

    def _rate(self, moment: float) -> float:
        place = bisect_right(self.rates, moment, key=lambda step: step[0]) - 1
        return self.rates[max(place, 0)][1]

    def jumping(self, moments: Iterable[float]) -> Counter:
        """Give the same with one more increment at each of these moments."""
        return replace(self, jumps=tuple(sorted([*self.jumps, *moments])))

    def anew(self, moments: Iterable[float]) -> Counter:
        """Give the same, counted from 0 again at each of these moments."""
        return replace(self, resets=tuple(sorted([*self.resets, *moments])))

    @property
    def constant(self) -> float | None:
        """The value, where it never changes."""
        still = not self.jumps and not self.resets and all(rate == 0 for _, rate in self.rates)
        return self.initial if still else None


@dataclass(frozen=True)
class Age:
    """A gauge of the seconds since something last happened, that the page does not have before; a restart forgets it."""

    moments: tuple[float, ...]
    resets: tuple[float, ...] = ()
    constant: float | None = None

    def at(self, moment: float) -> float | None:
        """Give the value that a scrape at this moment reads."""
        place = bisect_right(self.moments, moment) - 1
        forgotten = bisect_right(self.resets, moment) - 1
        if place < 0 or (forgotten >= 0 and self.resets[forgotten] >= self.moments[place]):
            return None
        return moment - self.moments[place]

    def anew(self, moments: Iterable[float]) -> Age:
        """Give the same, forgotten at each of these moments."""
        return replace(self, resets=tuple(sorted([*self.resets, *moments])))


Series: TypeAlias = Gauge | Counter | Age
Page: TypeAlias = dict[Key, Series]


def shown(value: float | None) -> Gauge:
    """Give a gauge that always has this value."""
    return Gauge(((0.0, value),))


def growing(per_second: float, *, is_whole: bool = True, initial: float = 0.0) -> Counter:
    """Give a counter that always grows as fast."""
    return Counter(((0.0, per_second),), is_whole=is_whole, initial=initial)


def labelled(name: str, labels: Mapping[str, str]) -> str:
    """Write a series as promtool reads it. No label of ours needs escapes."""
    return name + "{" + ", ".join(f'{label}="{value}"' for label, value in labels.items()) + "}"
