"""Latency histograms of one page of `/metrics`: many series of a family as one histogram. Pure; nothing here raises.

How the series of a family are related (SGLang 0.3.5 to 0.5.23, `srt/metrics/collector.py`, later
`srt/observability/metrics_collector.py`):

* A request is observed in one series, that of its own labels. So series are added, those of `priority` too: `priority=""` has the
  requests without one, not the total as for gauges.
* TP and PP ranks may each print the same request's `queue_time_seconds` (`--enable-metrics-for-all-schedulers`): of the
  processes of one DP rank the one with most observations is taken.
* Operators choose the bounds (`--bucket-time-to-first-token` and others), so none are assumed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import fsum, inf, isnan
from operator import lt
from typing import NamedTuple, TypeAlias

from sglang_tuning_exporter.sglang.metrics.exposition import labels

# A histogram of SGLang has 16 to 40 bounds; a hostile page any number.
MOST_BOUNDS = 512
# Larger floats cannot count by one.
MOST = 2.0**53

Samples: TypeAlias = "Sequence[tuple[str, int]]"  # raw labels, and the number of the sample in the page's order
_Key: TypeAlias = frozenset[tuple[str, str]]
_PROCESS = frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts of observations: `counts[i]` took `bounds[i]` seconds or less.

    Bounds rise and end with +Inf; counts never fall. `seconds` is the sum of all observations, None where the page has none.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    seconds: float | None = None

    @property
    def observations(self) -> float:
        """The number of observations."""
        return self.counts[-1]

    @property
    def mean_seconds(self) -> float | None:
        """Mean of all observations; None without any, and where the sum is unknown."""
        return self.seconds / self.counts[-1] if self.seconds is not None and self.counts[-1] > 0 else None

    def above(self, seconds: float) -> float:
        """Estimate how many took longer than `seconds`, by linear interpolation inside its bucket: the inverse of `histogram_quantile`.

        0 for more than the largest finite bound: how much longer an observation took is unknown.
        """
        at = bisect_left(self.bounds, seconds)
        if self.bounds[at] == inf:
            return 0.0
        lower, below = (self.bounds[at - 1], self.counts[at - 1]) if at else (min(0.0, self.bounds[0]), 0.0)
        width = self.bounds[at] - lower
        part = max(0.0, (seconds - lower) / width) if width > 0 else 1.0
        return max(0.0, self.counts[-1] - (below + (self.counts[at] - below) * part))

    def quantile(self, share: float) -> float | None:
        """Estimate the quantile `share` (0-1) in seconds, as `histogram_quantile` does.

        None without observations; the largest finite bound where it is beyond that.
        """
        if self.counts[-1] <= 0:
            return None
        rank = share * self.counts[-1]
        at = bisect_left(self.counts, rank)
        if self.bounds[at] == inf:
            return self.bounds[at - 1]
        if at == 0 and self.bounds[0] <= 0:
            return self.bounds[0]
        lower, below = (self.bounds[at - 1], self.counts[at - 1]) if at else (0.0, 0.0)
        within = self.counts[at] - below
        return lower + (self.bounds[at] - lower) * ((rank - below) / within if within > 0 else 1.0)

    def since(self, earlier: Histogram) -> Histogram | None:
        """Return what came after `earlier`; None where a count fell or the bounds differ: it is a new server."""
        if self.bounds != earlier.bounds or any(map(lt, self.counts, earlier.counts)):
            return None
        seconds = None
        if self.seconds is not None and earlier.seconds is not None and self.seconds >= earlier.seconds:
            seconds = self.seconds - earlier.seconds
        gained = (now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return Histogram(self.bounds, tuple(accumulate(gained, max)), seconds)

    def __add__(self, other: Histogram) -> Histogram:
        """Add observations with the same bounds."""
        seconds = None if self.seconds is None or other.seconds is None else self.seconds + other.seconds
        return Histogram(
            self.bounds, tuple(mine + its for mine, its in zip(self.counts, other.counts, strict=True)), seconds
        )


class _Series(NamedTuple):
    """Where one series is: its bounds, and the numbers of their samples and of its sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    seconds: int | None

    def read(self, values: Sequence[float]) -> Histogram:
        counts = accumulate([values[number] for number in self.counts], max)
        return Histogram(self.bounds, tuple(counts), None if self.seconds is None else values[self.seconds])


class Places(NamedTuple):
    """Where the samples of one family are on a page: the series of each process of each DP rank."""

    ranks: list[list[list[_Series]]]

    def read(self, values: Sequence[float]) -> Histogram | None:
        """Return them as one histogram; None where they cannot be read."""
        read = [[[series.read(values) for series in process] for process in rank] for rank in self.ranks]
        # Of the processes of one DP rank that with most observations.
        most = (max(each, key=lambda process: fsum(one.observations for one in process)) for each in read)
        return _sum([histogram for process in most for histogram in process])


def places(buckets: Samples, counts: Samples = (), sums: Samples = (), where: tuple[str, str] | None = None) -> Places:
    """Return where the samples of one family (`_bucket`, `_count`, `_sum`) are.

    `where` leaves out series in which that label has another value; series without the label are kept.
    """
    series: dict[_Key, dict[float, int]] = {}
    for raw, number in buckets:
        key, bound = _series_and_bound(raw)
        if bound is not None:
            known = series.setdefault(key, {})
            if len(known) <= MOST_BOUNDS:
                known.setdefault(bound, number)  # of two samples of one series the first, as in the pass-through
    totals, seconds = _by_series(counts), _by_series(sums)
    by_rank: dict[str, dict[_Key, list[_Series]]] = {}
    for key, found in series.items():
        names, infinite = dict(key), found.pop(inf, totals.get(key))
        if (
            infinite is None
            or not 0 < len(found) <= MOST_BOUNDS
            or (where and names.get(where[0], where[1]) != where[1])
        ):
            continue
        process, bounds = frozenset(item for item in key if item[0] in _PROCESS), sorted(found)
        one = _Series((*bounds, inf), (*(found[bound] for bound in bounds), infinite), seconds.get(key))
        by_rank.setdefault(names.get("dp_rank", ""), {}).setdefault(process, []).append(one)
    return Places([list(processes.values()) for processes in by_rank.values()])


def _series_and_bound(raw: str) -> tuple[_Key, float | None]:
    """Return the series of a sample, and its bound where it is a bucket."""
    found = labels(raw)
    series = frozenset(item for item in found.items() if item[0] != "le")
    try:
        bound = float(found["le"])
    except (KeyError, ValueError):
        return series, None
    return series, None if isnan(bound) or bound == -inf else bound


def _by_series(samples: Samples) -> dict[_Key, int]:
    found: dict[_Key, int] = {}
    for raw, number in samples:
        found.setdefault(_series_and_bound(raw)[0], number)
    return found


def _sum(histograms: list[Histogram]) -> Histogram | None:
    """Add series; where their bounds differ, only the common ones are kept."""
    if len(histograms) < 2:
        return histograms[0] if histograms else None
    bounds = histograms[0].bounds
    if any(histogram.bounds != bounds for histogram in histograms):
        bounds = tuple(sorted(set(bounds).intersection(*(histogram.bounds for histogram in histograms))))
        histograms = [_with_bounds(histogram, bounds) for histogram in histograms]
    if len(bounds) < 2:
        return None
    counts = tuple(fsum(column) for column in zip(*(histogram.counts for histogram in histograms), strict=True))
    sums = [histogram.seconds for histogram in histograms if histogram.seconds is not None]
    return Histogram(bounds, counts, fsum(sums) if len(sums) == len(histograms) else None)


def _with_bounds(histogram: Histogram, bounds: tuple[float, ...]) -> Histogram:
    counts = dict(zip(histogram.bounds, histogram.counts, strict=True))
    return Histogram(bounds, tuple(counts[bound] for bound in bounds), histogram.seconds)
