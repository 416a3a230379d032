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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import fsum, inf, isnan
from operator import lt
from typing import TypeAlias

from sglang_tuning_exporter.sglang.metrics.exposition import labels

# A histogram of SGLang has 16 to 40 bounds; a hostile page any number.
MOST_BOUNDS = 512
# Larger floats cannot count by one.
MOST = 2.0**53

Samples: TypeAlias = "Sequence[tuple[str, float]]"  # raw labels and value
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


def read(
    buckets: Samples, counts: Samples = (), sums: Samples = (), where: tuple[str, str] | None = None
) -> Histogram | None:
    """Return the samples of one family (`_bucket`, `_count`, `_sum`) as one histogram; None where they cannot be read.

    `where` leaves out series in which that label has another value; series without the label are kept.
    """
    series: dict[_Key, dict[float, float]] = {}
    for raw, value in buckets:
        key, bound = _series_and_bound(raw)
        if bound is not None and _is_count(value):
            known = series.setdefault(key, {})
            if len(known) <= MOST_BOUNDS:
                known.setdefault(bound, value)  # of two samples of one series the first, as in the pass-through
    totals = _by_series(counts)
    seconds = _by_series(sums)
    by_rank: dict[str, dict[_Key, list[Histogram]]] = {}
    for key, found in series.items():
        names = dict(key)
        histogram = _histogram(found, totals.get(key), seconds.get(key))
        if histogram is None or (where is not None and names.get(where[0], where[1]) != where[1]):
            continue
        process = frozenset(item for item in key if item[0] in _PROCESS)
        by_rank.setdefault(names.get("dp_rank", ""), {}).setdefault(process, []).append(histogram)
    most_observed = (
        max(processes.values(), key=lambda each: fsum(histogram.observations for histogram in each))
        for processes in by_rank.values()
    )
    return _sum([histogram for process in most_observed for histogram in process])


@lru_cache(maxsize=4096)
def _series_and_bound(raw: str) -> tuple[_Key, float | None]:
    """Return the series of a sample, and its bound where it is a bucket."""
    found = labels(raw)
    series = _shared(frozenset(item for item in found.items() if item[0] != "le"))
    try:
        bound = float(found["le"])
    except (KeyError, ValueError):
        return series, None
    return series, None if isnan(bound) or bound == -inf else bound


@lru_cache(maxsize=512)
def _shared(key: _Key) -> _Key:
    """Return one object for all buckets of a series, to save memory."""
    return key


def _is_count(value: float) -> bool:
    return 0 <= value <= MOST


def _by_series(samples: Samples) -> dict[_Key, float]:
    found: dict[_Key, float] = {}
    for raw, value in samples:
        if _is_count(value):
            found.setdefault(_series_and_bound(raw)[0], value)
    return found


def _histogram(buckets: Mapping[float, float], total: float | None, seconds: float | None) -> Histogram | None:
    infinite = buckets.get(inf, total)
    finite = sorted(bound for bound in buckets if bound != inf)
    if infinite is None or not finite or len(finite) > MOST_BOUNDS:
        return None
    counts = accumulate((*(buckets[bound] for bound in finite), infinite), max)
    return Histogram((*finite, inf), tuple(counts), seconds)


def _sum(histograms: list[Histogram]) -> Histogram | None:
    """Add series; where their bounds differ, only the common ones are kept."""
    if not histograms:
        return None
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
