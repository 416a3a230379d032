"""A server's figures over time, sampled at most once a second. Pure; times in seconds."""

from __future__ import annotations

from math import inf

from sglang_tuning_exporter.report.series import Bucket, Range, Series
from sglang_tuning_exporter.state.rank import RankState
from sglang_tuning_exporter.state.server import ServerState

STEP_SECONDS = 1.0
# A figure holds until the next line, but no longer: the last line before a long pause must not dominate a mean.
_HOLDS_SECONDS = 10.0
_THROUGHPUT_STEPS = 8  # samples in a bucket: reading it from its line takes time


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
        self._running, self._queued, self._usage = (
            bucket.range("running"),
            bucket.range("queued"),
            bucket.range("usage"),
        )
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
