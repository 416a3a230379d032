"""How long requests wait and how long their answers are, out of SGLang's own histograms: how many, how many too long, and how long lately.

Pure; `now` is seconds on the caller's clock. Counted since the exporter came: the first scrape is the base, and a server
that starts again counts from nothing. Its own counts tell that it has, not the log: a page under way when the start is
printed is still the old server's, and would be counted whole. A breach is an observation above the profile's objective, estimated inside its
bucket by a straight line as Prometheus' `histogram_quantile` does, hence floats.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from sglang_tuning_exporter.state.totals import STEP_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang_tuning_exporter.sglang.events import Scrape
    from sglang_tuning_exporter.sglang.metrics.histograms import Histogram

Latency: TypeAlias = Literal["time_to_first_token", "inter_token", "request", "queue"]
LATENCIES: tuple[Latency, ...] = get_args(Latency)
ALIKE = 0.95  # of the answers in one bucket are of one length
ENOUGH_ANSWERS = 50  # below, the longest of a hundred is the edge of a bucket and little more


@dataclass(frozen=True, slots=True)
class Recent:
    """What was observed lately: counts are floats, times seconds. Quantiles are estimates inside a bucket."""

    observations: float
    breaches: float | None  # None without an objective
    mean_seconds: float | None
    p50_seconds: float
    p99_seconds: float
    quarter_seconds: float | None = None  # a quarter took no longer

    @property
    def breach_share(self) -> float | None:
        """Part of the observations above the objective, 0-1."""
        return None if self.breaches is None else self.breaches / self.observations


class LatencyLedger:
    """Takes one scrape after the other; remembers the last `length` seconds in steps of ten.

    `objectives` are seconds by latency; a latency without one is observed and not judged.
    """

    def __init__(self, objectives: Mapping[Latency, float | None], length: float = 600.0) -> None:
        self._tallies = {latency: _Tally(objectives.get(latency), length) for latency in LATENCIES}
        self._answers = _Tally(None, length)  # of tokens, where the others are of seconds
        self._scraped = False

    def observe(self, scrape: Scrape, now: float) -> None:
        """Take one successful scrape."""
        self._answers.see(scrape.answer_tokens, now, first=not self._scraped)
        for latency, tally in self._tallies.items():
            tally.see(told(scrape, latency), now, first=not self._scraped)
        self._scraped = True

    def begin_window(self) -> None:
        """Leave out of what is recent everything up to now."""
        for tally in (self._answers, *self._tallies.values()):
            tally.begin_window()

    def objective(self, latency: Latency) -> float | None:
        """Seconds that an observation may take."""
        return self._tallies[latency].objective

    def observations(self, latency: Latency) -> float | None:
        """How many there were since the exporter came; None before the first scrape."""
        return self._tallies[latency].observations if self._scraped else None

    def breaches(self, latency: Latency) -> float | None:
        """How many of them took longer than the objective; None before the first scrape and without an objective."""
        tally = self._tallies[latency]
        return tally.breaches if self._scraped and tally.objective is not None else None

    def recent(self, latency: Latency, now: float, seconds: float | None = None) -> Recent | None:
        """Give what came in the last `seconds` (the ledger's length unless told, and at most); None if nothing did."""
        return self._tallies[latency].recent(now, seconds)

    def longest_answer(self, now: float, seconds: float | None = None) -> float | None:
        """Estimate the tokens that all but one in a hundred of the last answers end within; None where too few are told for that."""
        recent = self._answers.recent(now, seconds)
        return None if recent is None or recent.observations < ENOUGH_ANSWERS else recent.p99_seconds

    def fixed_answer(self, now: float, seconds: float | None = None) -> float | None:
        """Give the tokens of an answer where nearly all of the last answers are of one length; None where they differ, or too few are known."""
        gained = self._answers.gained(now, seconds)
        if gained is None or gained.observations < ENOUGH_ANSWERS or gained.fullest_share < ALIKE:
            return None
        return gained.mean_seconds


def told(scrape: Scrape, latency: Latency) -> Histogram | None:
    """Give the histogram that a scrape has for a latency."""
    if latency == "time_to_first_token":
        return scrape.time_to_first_token
    if latency == "inter_token":
        return scrape.inter_token
    return scrape.request_latency if latency == "request" else scrape.queue_time


class _Tally:
    """One latency."""

    def __init__(self, objective: float | None, length: float) -> None:
        self.objective = objective
        self.observations = 0.0
        self.breaches = 0.0
        self._base: Histogram | None = None  # the server's own counts, as last told
        self._length = length
        self._seen: Histogram | None = None  # what came since the boundaries are what they are
        self._marks: deque[tuple[float, Histogram | None]] = deque()
        self._due = -inf

    def see(self, histogram: Histogram | None, now: float, *, first: bool) -> None:
        if histogram is not None:
            # A family that the first page did not have had seen nothing then.
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
            self._marks.clear()  # other boundaries cannot be subtracted: the window begins anew
        self._seen = gained

    def gained(self, now: float, seconds: float | None) -> Histogram | None:
        """Give the observations of the last `seconds`."""
        start = now - min(self._length if seconds is None else seconds, self._length)
        before = [seen for at, seen in self._marks if at <= start]
        gained = self._seen
        if gained is not None and before and before[-1] is not None:
            gained = gained.since(before[-1])
        return gained

    def recent(self, now: float, seconds: float | None) -> Recent | None:
        gained = self.gained(now, seconds)
        if gained is None:
            return None
        median, slow = gained.quantile(0.5), gained.quantile(0.99)
        if median is None or slow is None:
            return None
        breaches = None if self.objective is None else gained.above(self.objective)
        return Recent(gained.observations, breaches, gained.mean_seconds, median, slow, gained.quantile(0.25))
