"""A server's figures of the last quarter of an hour, for the exporter's own page. Pure; seconds on the caller's clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from typing import NamedTuple

from sglang_tuning_exporter.state.rank import RankState
from sglang_tuning_exporter.state.server import ServerState

LENGTH_SECONDS = 900.0
STEP_SECONDS = 5.0


class HistoryPoint(NamedTuple):
    """What a server did at one moment, all schedulers together; None is unknown. `retractions` counts since the exporter started."""

    at: float
    queued: float | None
    usage: float | None  # of the fullest pool, 0-1
    running: float | None
    throughput: float | None  # generated tokens per second
    replayed: float | None  # share of decode batches with a captured graph since the moment before
    retractions: float


class History:
    """Keeps a moment every five seconds."""

    def __init__(self) -> None:
        self._moments: deque[HistoryPoint] = deque(maxlen=int(LENGTH_SECONDS / STEP_SECONDS) + 1)
        self._due = -inf
        self._batches = (0.0, 0.0)  # replayed and eager, when the last moment was kept

    def begin(self, state: ServerState) -> None:
        """Leave out what `state` has counted so far."""
        self._batches = _batches(state)

    def offer(self, state: ServerState, now: float) -> None:
        """Keep the figures of `state` if five seconds have passed."""
        if now < self._due:
            return
        self._due = now + STEP_SECONDS
        ranks = state.schedulers
        totals = [rank.totals.counts for rank in ranks]
        before, self._batches = self._batches, _batches(state)
        gained = (self._batches[0] - before[0], self._batches[1] - before[1])
        events = sum(t["retraction_events"] or t["native_retracted_requests"] for t in totals)
        usages = [rank.usage for rank in ranks if rank.usage is not None]
        self._moments.append(
            HistoryPoint(
                now,
                added_up(rank.queued for rank in ranks),
                max(usages, default=None),
                added_up(rank.running for rank in ranks),
                tokens_per_second(ranks),
                gained[0] / sum(gained) if sum(gained) > 0 else None,
                events,
            )
        )

    def line(self, figure: Callable[[HistoryPoint], float | None]) -> list[tuple[float, float | None]]:
        """Return one figure over time: seconds relative to the last moment (0 or less), and its value."""
        if not self._moments:
            return []
        end = self._moments[-1].at
        return [(moment.at - end, figure(moment)) for moment in self._moments]

    def retractions(self) -> list[tuple[float, float | None]]:
        """Return the retractions of each step, as `line` does."""
        line = self.line(lambda moment: moment.retractions)
        before = [value for _, value in line]
        return [
            (at, max((value or 0.0) - (earlier or 0.0), 0.0))
            for (at, value), earlier in zip(line[1:], before, strict=False)
        ]


def _batches(state: ServerState) -> tuple[float, float]:
    counts = [rank.totals.counts for rank in state.schedulers]
    return sum(of["replayed"] for of in counts), sum(of["eager"] for of in counts)


def added_up(figures: Iterable[float | None]) -> float | None:
    """Return the sum of the figures that are known; None where none is."""
    known = [figure for figure in figures if figure is not None]
    return sum(known) if known else None


def tokens_per_second(ranks: Iterable[RankState]) -> float | None:
    """Return the tokens generated per second; none by a rank that hangs, although SGLang's gauge keeps its last value."""
    return added_up(0.0 if rank.time.hangs else rank.generation_throughput for rank in ranks)
