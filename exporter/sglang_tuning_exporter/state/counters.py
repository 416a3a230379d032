"""What SGLang's own counters gained from scrape to scrape, of one scheduler and of the whole server. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sglang_tuning_exporter.sglang.events import RankFigures, Scrape
from sglang_tuning_exporter.sglang.metrics.catalogue import SERVER_COUNTS
from sglang_tuning_exporter.state.totals import Totals

# Reasons: docs/decisions.md, "Constants by name".
PREFILL_PROGRESS = 1024.0
DECODE_PROGRESS = 40.0
_KEPT_BY_LOG = ("retraction_events", "log_retracted_requests", "retracted_requests")
_PASSES = ("replayed", "eager")


class Increases(NamedTuple):
    """What the counters gained since the scrape before, and whether anything that moves with work has moved."""

    replayed: float = 0.0
    eager: float = 0.0
    retracted: float = 0.0
    admitted: float = 0.0
    is_fresh: bool = True
    has_worked: bool = False


class SchedulerCounters:
    """The counters of one scheduler: the last figures, and which counters the server exposes.

    The log counts the same things. Each is counted from one of the two, and the totals go on without a jump when the other takes over.
    """

    def __init__(self, dp: int | None, totals: Totals) -> None:
        self.dp = dp
        self._totals = totals
        self.last: RankFigures | None = None  # of the last scrape
        self.has_passes = self.has_retractions = self.has_admitted = False
        self._progress: float | None = None
        self._passes = dict.fromkeys(_PASSES, 0.0)  # at the start of the server: those since then are from its log
        self._retracted = (0.0, 0.0)  # requests by log and by metrics at the last `count_retracted`

    def figure(self, name: str) -> float | None:
        """Return a figure of the last scrape by its name in `RankFigures`."""
        found: float | None = getattr(self.last, name, None)
        return found

    def take(self, new: RankFigures, progress: float | None, base: RankFigures | None) -> Increases:
        """Return what `new` gained; `base` are the figures to count from where no scrape came before."""
        old = self.last or base
        moved = None if progress is None or self._progress is None else progress - self._progress
        self.last, self._progress = new, progress
        if old is None:
            return Increases(has_worked=moved is not None and moved >= PREFILL_PROGRESS)
        replayed, eager = increase(old.graph_passes, new.graph_passes), increase(old.eager_passes, new.eager_passes)
        return Increases(
            replayed,
            eager,
            increase(old.retracted_requests, new.retracted_requests),
            increase(old.admitted_requests, new.admitted_requests),
            is_fresh=bool(moved) or _evidence(old) != _evidence(new),
            has_worked=replayed + eager >= DECODE_PROGRESS or (moved is not None and moved >= PREFILL_PROGRESS),
        )

    def count(self, new: RankFigures, found: Increases) -> None:
        """Add what a scrape found to the totals."""
        counts = self._totals.counts
        # The server counts from its first batch on: the batches that were counted from the log are among them.
        is_first = not self.has_passes and (new.graph_passes is not None or new.eager_passes is not None)
        logged = {kind: counts[kind] - self._passes[kind] if is_first else 0.0 for kind in _PASSES}
        self.has_passes = self.has_passes or is_first
        self.has_admitted = self.has_admitted or new.admitted_requests is not None
        self.has_retractions = self.has_retractions or new.retracted_requests is not None
        counts["replayed"] += max(int(found.replayed) - logged["replayed"], 0)
        counts["eager"] += max(int(found.eager) - logged["eager"], 0)
        counts["native_retracted_requests"] += int(found.retracted)

    def count_retracted(self, *, by_log: bool) -> None:
        """Add the requests retracted since the last call, from the log or from the server's counter."""
        counts = self._totals.counts
        retracted = (counts["log_retracted_requests"], counts["native_retracted_requests"])
        if retracted == self._retracted:
            return
        (logged, native), self._retracted = self._retracted, retracted
        by_log = by_log or not self.has_retractions
        counts["retracted_requests"] += self._retracted[0] - logged if by_log else self._retracted[1] - native

    def begin_again(self) -> None:
        """Count the server's counters from 0: one may already have passed its value before the restart."""
        if self.last is not None:
            self.last = RankFigures(self.dp)

    def reset(self) -> None:
        """Forget whether a new server counts its passes: until a scrape shows it, the log counts them."""
        self.has_passes = False
        self._passes = {kind: self._totals.counts[kind] for kind in _PASSES}

    def saved(self) -> dict[str, float]:
        """Return the counts that come from the log alone; a later process would count them twice."""
        names = _KEPT_BY_LOG if self.has_passes else _KEPT_BY_LOG + _PASSES
        return {name: self._totals.counts[name] for name in names}

    def restore(self, counts: Mapping[str, float]) -> None:
        """Add what `saved` returned to an earlier process."""
        for name in ("retraction_events", "log_retracted_requests", *_PASSES):
            self._totals.counts[name] += counts.get(name, 0)
        for kind in _PASSES:
            self._passes[kind] += counts.get(kind, 0)
        logged = counts.get("log_retracted_requests", 0)
        self._totals.counts["retracted_requests"] += counts.get("retracted_requests", logged)
        self._retracted = (self._retracted[0] + logged, self._retracted[1])


def _evidence(figures: RankFigures) -> tuple[float | None, ...]:
    """Return the figures of which at least one changes when the gauges are refreshed."""
    return (
        figures.running,
        figures.queued,
        figures.full_usage,
        figures.used_tokens,
        figures.generation_throughput,
        figures.graph_passes,
        figures.eager_passes,
    )


def increase(old: float | None, new: float | None) -> float:
    """Return how much a counter grew: from 0 where it was absent (it appears on first use) or fell (the server restarted)."""
    if new is None:
        return 0.0
    return new if old is None or new < old else new - old


def unstarted_requests(scrape: Scrape) -> float | None:
    """Return how many requests left the queues without a start, so far, at least; None if a rank does not expose it.

    All requests that wait are open. The gauges of the queues are older than the counters.
    """
    if scrape.open_requests is None or not scrape.ranks:
        return None
    waiting = -scrape.open_requests
    for rank in scrape.ranks:
        if rank.queued_requests is None or rank.admitted_requests is None:
            return None
        waiting += rank.queued_requests - rank.admitted_requests
    return max(waiting, 0.0)


class Rejections:
    """Requests that SGLang answered with 503: by its counter, which no text can forge, else by the lines of its access log.

    While there is a counter, lines wait for the next scrape, and count only if there is none.
    """

    def __init__(self) -> None:
        self.waiting = 0  # lines since the last scrape
        self._since: float | None = None  # the first scrape with the counter; None while there is no counter
        self._counted = 0  # lines since the counter was last seen

    def log(self, now: float) -> int:
        """Take a line of the log; return 1 if it counts at once: there is no counter, or the line is older than that."""
        if self._since is not None and now >= self._since:
            self.waiting += 1
            return 0
        self._counted += self._since is None
        return 1

    def count(self, gained: int, now: float, *, counts: bool) -> int:
        """Return how many more were rejected by a scrape; `counts`: the server has the counter, which gained so many."""
        if not counts:
            return self.lose_counter()
        if self._since is None:
            self._since = now
        more = max(gained - self._counted, 0)
        self.waiting = self._counted = 0
        return more

    def lose_counter(self) -> int:
        """Return how many lines count after a scrape that failed, or without the counter."""
        lines, self.waiting, self._since = self.waiting, 0, None
        self._counted += lines
        return lines


class RejectedStreams:
    """Streamed requests that SGLang rejected: it answers them with status 200 and an error, and never finishes them.

    One request ends in both counters at about the same time, so only what exceeds the greatest difference so far counts. A
    prompt that is too long ends in the same way, but runs: rejected are those that a full queue turns away, and those that
    leave the queue unstarted after SGLANG_REQ_WAITING_TIMEOUT.
    """

    def __init__(self) -> None:
        self._unfinished = self._most = 0.0
        self._unstarted: float | None = None  # the most so far
        self._left = 0.0  # of these, not seen as answered

    def take(self, answered: float, finished: float, *, queue_is_full: bool, unstarted: float | None = None) -> int:
        """Return how many more were rejected, of so many more requests answered and finished.

        `unstarted` is the number of requests that left the queue without a start; None if not known, or if others may
        have taken them out of it.
        """
        self._unfinished += answered - finished
        if unstarted is not None:
            before = unstarted if self._unstarted is None else self._unstarted
            self._left += max(unstarted - before, 0.0)
            self._unstarted = max(unstarted, before)
        else:
            self._unstarted, self._left = None, 0.0
        can_be = queue_is_full or self._left > 0
        above = max(self._unfinished - self._most, 0.0)
        more = above if queue_is_full else min(above, self._left)
        self._left = max(self._left - more, 0.0)
        self._most = max(self._unfinished, self._most) if can_be else self._unfinished
        return int(more)


class ServerCounters:
    """The counters of the whole server, of those in `SERVER_COUNTS`."""

    def __init__(self) -> None:
        self._last: dict[str, float | None] = {}
        self._open: float | None = None  # requests at the last scrape

    def take(self, scrape: Scrape, *, is_first: bool) -> dict[str, float]:
        """Return what each counter gained; one that the first scrape did not have counts from 0.

        `failed_requests` are those that ended without a counted response: an exception in SGLang ended them.
        """
        found = {}
        for name in SERVER_COUNTS:
            figure: float | None = getattr(scrape, name)
            if figure is not None:
                is_base = is_first and name not in self._last
                found[name] = 0.0 if is_base else increase(self._last.get(name), figure)
                self._last[name] = figure
        if scrape.open_requests is not None and {"generation_posts", "generation_responses"} <= found.keys():
            opened = 0.0 if self._open is None else scrape.open_requests - self._open
            found["failed_requests"] = found["generation_posts"] - found["generation_responses"] - opened
            self._open = scrape.open_requests
        return found

    def has(self, name: str) -> bool:
        """Whether the server has a counter."""
        return name in self._last

    def begin_again(self) -> None:
        """Count from 0."""
        self._last, self._open = dict.fromkeys(self._last), 0.0
