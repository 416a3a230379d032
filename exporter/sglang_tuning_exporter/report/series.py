"""Figures of a log over time, sampled at most once a second, in a fixed number of buckets. Pure; times in seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Literal, TypeAlias

from sglang_tuning_exporter.serve.pages.chart import Point
from sglang_tuning_exporter.state.rank import RankState
from sglang_tuning_exporter.state.server import ServerState

BUCKETS = 240
FIRST_WIDTH = 1.0  # seconds; printed times are whole seconds
STEP_SECONDS = 1.0
# A figure holds until the next line, but no longer: the last line before a long pause must not dominate a mean.
_HOLDS_SECONDS = 10.0
_THROUGHPUT_STEPS = 8  # samples in a bucket: reading it from its line takes time

Figure: TypeAlias = Literal["queued", "usage", "running", "throughput"]


@dataclass(slots=True)
class Range:
    """One figure in one bucket: its time-weighted sum, lowest and highest value."""

    seconds: float = 0.0
    sum: float = 0.0
    low: float = float("inf")
    high: float = float("-inf")

    def add(self, value: float, seconds: float) -> None:
        """Add a value that held for so many seconds."""
        self.seconds += seconds
        self.sum += value * seconds
        self.low = value if value < self.low else self.low  # noqa: FURB136 - min() costs three times as much
        self.high = value if value > self.high else self.high  # noqa: FURB136 - likewise

    def merge(self, other: Range) -> None:
        """Add another range."""
        self.seconds += other.seconds
        self.sum += other.sum
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)

    @property
    def mean(self) -> float:
        """Its time-weighted mean."""
        return self.sum / self.seconds


@dataclass(slots=True)
class Bucket:
    """The figures of one bucket; a figure that was never known is absent."""

    figures: dict[Figure, Range] = field(default_factory=dict)
    replayed: float = 0.0  # decode batches with a captured graph
    eager: float = 0.0  # and those without
    retractions: float = 0.0

    def range(self, figure: Figure) -> Range:
        """Return the range of a figure, to which its values are added."""
        return self.figures.setdefault(figure, Range())

    def add(self, figure: Figure, value: float, seconds: float) -> None:
        """Add a figure's value that held for so many seconds."""
        self.range(figure).add(value, seconds)

    def merge(self, other: Bucket) -> None:
        """Add the next bucket."""
        for figure, values in other.figures.items():
            self.range(figure).merge(values)
        self.replayed += other.replayed
        self.eager += other.eager
        self.retractions += other.retractions


class Series:
    """Figures in time order in at most `limit` buckets, which double their width when all are used."""

    def __init__(self, begin: float, limit: int = BUCKETS) -> None:
        self.begin = begin
        self.width = FIRST_WIDTH
        self._limit = limit
        self._buckets: dict[int, Bucket] = {}  # in time order

    def _place(self, moment: float) -> int:
        return int((moment - self.begin) / self.width)

    def at(self, moment: float) -> Bucket:
        """Return the bucket that `moment` falls into, made if it does not exist."""
        while self._place(moment) >= self._limit:
            self.width *= 2
            narrow, self._buckets = self._buckets, {}
            for place, bucket in narrow.items():
                if (wide := self._buckets.setdefault(place // 2, bucket)) is not bucket:
                    wide.merge(bucket)
        return self._buckets.setdefault(self._place(moment), Bucket())

    def end_of(self, moment: float) -> float:
        """Return where the bucket that `moment` falls into ends."""
        return self.begin + (self._place(moment) + 1) * self.width

    def __len__(self) -> int:
        return len(self._buckets)

    def _all(self) -> Iterator[tuple[float, Bucket]]:
        """Return the buckets, each with its middle; seconds since the series began."""
        return (((place + 0.5) * self.width, bucket) for place, bucket in self._buckets.items())

    def line(self, figure: Figure) -> list[Point]:
        """Return the points of one figure."""
        known = ((at, bucket.figures.get(figure)) for at, bucket in self._all())
        return [
            Point(at, each.mean, each.low, each.high) for at, each in known if each is not None and each.seconds > 0
        ]

    def coverage(self) -> list[Point]:
        """Return the share of decode batches that replayed a captured graph, 0-1."""
        decoding = ((at, bucket) for at, bucket in self._all() if bucket.replayed + bucket.eager > 0)
        shares = ((at, bucket.replayed / (bucket.replayed + bucket.eager)) for at, bucket in decoding)
        return [Point(at, share, share, share) for at, share in shares]

    def retractions(self) -> list[Point]:
        """Return the retractions of each bucket that has some."""
        counts = ((at, bucket.retractions) for at, bucket in self._all())
        return [Point(at, count, count, count) for at, count in counts if count > 0]


class Sampler:
    """Samples all schedulers together."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self.series = Series(0.0)
        self.due = -inf
        self.generated = self.generated_for = 0.0  # tokens per second x seconds, and seconds
        self._throughput_due = self._seen = -inf
        self._throughput, self._held_until = 0.0, -inf  # what was seen last, and until when it holds
        self._bucket = Bucket()
        self._throughput_bucket = self._bucket
        self._running = self._queued = self._usage = Range()  # of the present bucket
        self._bucket_ends = -inf
        self._counted = (0.0, 0.0, 0.0)  # replayed, eager, retractions that the series has

    def begin(self, moment: float) -> None:
        """Begin with the log."""
        self.series.begin = self.due = moment

    def take(self, now: float, until: float) -> None:  # noqa: C901 - one loop: every second of a log passes here
        """Add what was seen last, at `now`, and held `until` then."""
        self.due = now + STEP_SECONDS
        if now >= self._bucket_ends:
            self._begin_bucket(now)
        ranks = self._state.schedulers
        seconds = until - now
        if seconds > STEP_SECONDS and not any(rank.time.until >= until for rank in ranks):
            seconds = min(seconds, _held_seconds(ranks, now))
        running = queued = usage = None
        for rank in ranks:
            if rank.time.seen_at is None:
                continue
            if rank.running is not None:
                running = rank.running if running is None else running + rank.running
            if rank.queued is not None:
                queued = rank.queued if queued is None else queued + rank.queued
            if rank.usage is not None and (usage is None or rank.usage > usage):
                usage = rank.usage
        if running is not None:
            self._running.add(running, seconds)
        if queued is not None:
            self._queued.add(queued, seconds)
        if usage is not None:
            self._usage.add(usage, seconds)
        if running and now >= self._throughput_due:
            self._take_throughput(ranks, now)

    def end(self, now: float) -> None:
        """Take the end of the log."""
        self.take(now, now + STEP_SECONDS)
        self._settle_throughput(now + STEP_SECONDS)
        self._count()

    def _begin_bucket(self, now: float) -> None:
        self._count()
        self._bucket = bucket = self.series.at(now)
        self._running, self._queued = bucket.range("running"), bucket.range("queued")
        self._usage = bucket.range("usage")
        self._bucket_ends = self.series.end_of(now)

    def _count(self) -> None:
        """Add the counts since the last bucket to the present one."""
        totals = [rank.totals.counts for rank in self._state.schedulers]
        replayed, eager, retractions = (
            sum(counts[name] for counts in totals) for name in ("replayed", "eager", "retraction_events")
        )
        had, self._counted = self._counted, (replayed, eager, retractions)
        self._bucket.replayed += replayed - had[0]
        self._bucket.eager += eager - had[1]
        self._bucket.retractions += retractions - had[2]

    def _take_throughput(self, ranks: list[RankState], now: float) -> None:
        """Take the throughput that was logged last. It counts once, however often it is looked at: files may end at any line."""
        seen = max((rank.time.seen_at for rank in ranks if rank.time.seen_at is not None), default=-inf)
        if seen <= self._seen:
            return
        self._settle_throughput(seen)
        self._throughput_due = now + self.series.width / _THROUGHPUT_STEPS
        known = [rank.generation_throughput for rank in ranks if rank.time.seen_at is not None]
        figures = [figure for figure in known if figure is not None]
        if figures:
            serves_until = [end for rank in ranks if (end := rank.time.serves_until) is not None]
            self._seen, self._throughput, self._throughput_bucket = seen, sum(figures), self._bucket
            self._held_until = min(seen + _HOLDS_SECONDS, max([seen + STEP_SECONDS, *serves_until]))

    def _settle_throughput(self, now: float) -> None:
        """Count the throughput that was seen last, up to now but no longer than it holds."""
        seconds = min(now, self._held_until) - self._seen
        if self._seen > -inf and seconds > 0:
            self._throughput_bucket.add("throughput", self._throughput, seconds)
            self.generated += self._throughput * seconds
            self.generated_for += seconds
        self._held_until = self._seen


def _held_seconds(ranks: list[RankState], now: float) -> float:
    """Return how long the present state holds at most: a second, or while a scheduler serves."""
    serving = [end - now for rank in ranks if (end := rank.time.serves_until) is not None]
    return min(_HOLDS_SECONDS, max([STEP_SECONDS, *serving]))
