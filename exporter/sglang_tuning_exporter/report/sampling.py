"""Puts a server's figures into a series, a look a second at most. Pure; moments in seconds."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from sglang_tuning_exporter.report.series import Series

if TYPE_CHECKING:
    from sglang_tuning_exporter.state.rank import RankState
    from sglang_tuning_exporter.state.server import ServerState

STEP_SECONDS = 1.0
# A figure holds until the next line, but a mean must not be that of the last line before a pause.
_HOLDS_SECONDS = 10.0
_THROUGHPUT_STEPS = 8  # in a bucket: it is read out of its line only when it is asked for, and that takes time


class Sampler:
    """Looks at all schedulers together."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self.series = Series(0.0)
        self.due = -inf
        self.generated = self.generated_for = 0.0  # tokens per second x seconds, and seconds
        self._throughput_due = -inf
        self._counted = (0.0, 0.0, 0.0)  # replayed, eager, retractions that the series has

    def begin(self, moment: float) -> None:
        """The log begins."""
        self.series.begin = self.due = moment

    def take(self, now: float, until: float) -> None:  # noqa: C901 - one loop: every second of a log passes here
        """Take what was seen last, at `now`; it held `until` then."""
        self.due = now + STEP_SECONDS
        ranks = self._state.schedulers
        if not ranks:
            return
        bucket = self.series.at(now)
        seconds = min(until - now, _HOLDS_SECONDS)
        if seconds > STEP_SECONDS:  # not beyond what the state says of it
            serving = [end - now for rank in ranks if (end := rank.serves_until) is not None]
            seconds = min(seconds, max([STEP_SECONDS, *serving]))
        running = queued = usage = None
        replayed = eager = retractions = 0.0
        for rank in ranks:
            counts = rank.totals.counts
            replayed += counts["replayed"]
            eager += counts["eager"]
            retractions += counts["retraction_events"]
            if rank.seen_at is None:
                continue
            if rank.running is not None:
                running = rank.running + (running or 0.0)
            if rank.queued is not None:
                queued = rank.queued + (queued or 0.0)
            for full in rank.usages.values():
                usage = full if usage is None or full > usage else usage
        if running is not None:
            bucket.add("running", running, seconds)
        if queued is not None:
            bucket.add("queued", queued, seconds)
        if usage is not None:
            bucket.add("usage", usage, seconds)
        had, self._counted = self._counted, (replayed, eager, retractions)
        bucket.replayed += replayed - had[0]
        bucket.eager += eager - had[1]
        bucket.retractions += retractions - had[2]
        if running and now >= self._throughput_due:
            self._take_throughput(ranks, now, seconds)

    def _take_throughput(self, ranks: list[RankState], now: float, seconds: float) -> None:
        self._throughput_due = now + self.series.width / _THROUGHPUT_STEPS
        told = [rank.generation_throughput for rank in ranks if rank.seen_at is not None]
        figures = [figure for figure in told if figure is not None]
        if figures:
            self.series.at(now).add("throughput", sum(figures), seconds)
            self.generated += sum(figures) * seconds
            self.generated_for += seconds
