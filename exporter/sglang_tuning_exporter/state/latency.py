"""Latencies and lengths of answers from SGLang's own histograms: observations, those above the objective, and recent quantiles.

Pure; `now` is seconds on the caller's clock. Counted since the exporter started: the first scrape is the base, and a server that starts
again counts from 0. Its counts show a new start, not its log: a page that is being written when the start is logged is still the old
server's. A breach is an observation above the profile's objective, estimated inside its bucket by linear interpolation as in
Prometheus' `histogram_quantile`, so it is a float.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal, TypeAlias, get_args

from sglang_tuning_exporter.sglang.events import Scrape
from sglang_tuning_exporter.sglang.metrics.histograms import Histogram
from sglang_tuning_exporter.state.totals import STEP_SECONDS

Latency: TypeAlias = Literal["time_to_first_token", "inter_token", "request", "queue"]
LATENCIES: tuple[Latency, ...] = get_args(Latency)
ALIKE = 0.95  # of the answers in one bucket: they have one length
ENOUGH_ANSWERS = 50


@dataclass(frozen=True, slots=True)
class RecentLatency:
    """Recent observations: counts are floats, times seconds, quantiles are estimates inside a bucket."""

    observations: float
    breaches: float | None  # None without an objective
    mean_seconds: float | None
    p50_seconds: float
    p99_seconds: float
    quarter_seconds: float | None = None  # the 25th percentile

    @property
    def breach_share(self) -> float | None:
        """Share of the observations above the objective, 0-1."""
        return None if self.breaches is None else self.breaches / self.observations


class LatencyLedger:
    """Takes one scrape after the other; keeps the last `length` seconds in steps of ten.

    `objectives` are seconds by latency; a latency without one has no breaches.
    """

    def __init__(self, objectives: Mapping[Latency, float | None], length: float = 600.0) -> None:
        self._tallies = {latency: _LatencyTotals(objectives.get(latency), length) for latency in LATENCIES}
        self._answers = _LatencyTotals(None, length)  # of tokens, where the others are of seconds
        self._scraped = False

    def observe(self, scrape: Scrape, now: float) -> None:
        """Take one successful scrape."""
        self._answers.see(scrape.answer_tokens, now, first=not self._scraped)
        for latency, tally in self._tallies.items():
            tally.see(histogram_of(scrape, latency), now, first=not self._scraped)
        self._scraped = True

    def begin_window(self) -> None:
        """Leave everything up to now out of what is recent."""
        for tally in (self._answers, *self._tallies.values()):
            tally.begin_window()

    def objective(self, latency: Latency) -> float | None:
        """Return the objective in seconds."""
        return self._tallies[latency].objective

    def observations(self, latency: Latency) -> float | None:
        """Return the observations since the exporter started; None before the first scrape."""
        return self._tallies[latency].observations if self._scraped else None

    def breaches(self, latency: Latency) -> float | None:
        """Return the observations above the objective; None before the first scrape and without an objective."""
        tally = self._tallies[latency]
        return tally.breaches if self._scraped and tally.objective is not None else None

    def recent(self, latency: Latency, now: float, seconds: float | None = None) -> RecentLatency | None:
        """Return what came in the last `seconds` (by default and at most the ledger's length); None if nothing did."""
        return self._tallies[latency].recent(now, seconds)

    def longest_answer(self, now: float, seconds: float | None = None) -> float | None:
        """Return the 99th percentile of the tokens of recent answers; None where they are too few."""
        recent = self._answers.recent(now, seconds)
        return None if recent is None or recent.observations < ENOUGH_ANSWERS else recent.p99_seconds

    def fixed_answer(self, now: float, seconds: float | None = None) -> float | None:
        """Return the tokens of an answer where nearly all recent answers have one length; None where they differ or are too few."""
        gained = self._answers.gained(now, seconds)
        if gained is None or gained.observations < ENOUGH_ANSWERS or gained.fullest_share < ALIKE:
            return None
        return gained.mean_seconds


def histogram_of(scrape: Scrape, latency: Latency) -> Histogram | None:
    """Return the histogram of a latency in a scrape."""
    if latency == "time_to_first_token":
        return scrape.time_to_first_token
    if latency == "inter_token":
        return scrape.inter_token
    return scrape.request_latency if latency == "request" else scrape.queue_time


class _LatencyTotals:
    """One latency."""

    def __init__(self, objective: float | None, length: float) -> None:
        self.objective = objective
        self.observations = 0.0
        self.breaches = 0.0
        self._base: Histogram | None = None  # the server's own counts at the last scrape
        self._length = length
        self._seen: Histogram | None = None  # all observations with the present boundaries
        self._marks: deque[tuple[float, Histogram | None]] = deque()
        self._due = -inf

    def see(self, histogram: Histogram | None, now: float, *, first: bool) -> None:
        if histogram is not None:
            # A family that the first page did not have had no observations then.
            base, self._base = histogram if first else self._base, histogram
            self._add((histogram.since(base) if base is not None else None) or histogram)
        if now >= self._due:
            self._due = now + STEP_SECONDS
            self._marks.append((now, self._seen))
            while len(self._marks) > 2 and self._marks[1][0] <= now - self._length:
                self._marks.popleft()

    def begin_window(self) -> None:
        self._marks = deque([(-inf, self._seen)])
        self._due = -inf

    def _add(self, gained: Histogram) -> None:
        self.observations += gained.observations
        if self.objective is not None:
            self.breaches += gained.above(self.objective)
        if self._seen is not None and self._seen.bounds == gained.bounds:
            gained = self._seen + gained
        else:
            self._marks.clear()  # other boundaries cannot be subtracted: the window begins again
        self._seen = gained

    def gained(self, now: float, seconds: float | None) -> Histogram | None:
        """Return the observations of the last `seconds`."""
        start = now - min(self._length if seconds is None else seconds, self._length)
        before = [seen for at, seen in self._marks if at <= start]
        gained = self._seen
        if gained is not None and before and before[-1] is not None:
            gained = gained.since(before[-1])
        return gained

    def recent(self, now: float, seconds: float | None) -> RecentLatency | None:
        gained = self.gained(now, seconds)
        if gained is None:
            return None
        median, slow = gained.quantile(0.5), gained.quantile(0.99)
        if median is None or slow is None:
            return None
        breaches = None if self.objective is None else gained.above(self.objective)
        return RecentLatency(gained.observations, breaches, gained.mean_seconds, median, slow, gained.quantile(0.25))
