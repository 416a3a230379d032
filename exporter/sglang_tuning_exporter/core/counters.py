"""The counters of a server's pages, and what each page gained beside the one before. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, starmap
from math import inf
from typing import Any, TypeVar

from sglang_tuning_exporter.core.events import is_count
from sglang_tuning_exporter.core.facts import DECODE_LOG_INTERVAL
from sglang_tuning_exporter.core.sums import LATENCIES
from sglang_tuning_exporter.sglang.metrics import (
    MOST_BOUNDS,
    RANK_COUNTS,
    SERVER_COUNTS,
    Histogram,
    RankFigures,
    Scrape,
)

_T = TypeVar("_T", Scrape, RankFigures)
# Of tokens between two pages: beyond any server, even where each prompt is found in its cache. The next page decides.
MOST_GAINED = 1e9
MOST_RETURNS = 2  # of pages to smaller counters, after which they are those of another server and not spoiled


def increase(old: float | None, new: float | None) -> float:
    """Return how much a counter grew: from 0 where it was absent or fell."""
    if new is None:
        return 0.0
    return new if old is None or new < old else new - old


@dataclass(frozen=True, slots=True)
class RankGains:
    """One scheduler of a page: its figures, and what its counters gained."""

    figures: RankFigures
    gained: Mapping[str, float]
    is_fresh: bool  # a gauge or a counter of it has changed

    @property
    def steps(self) -> float:
        """Decode steps, where the release counts them."""
        return self.gained.get("replayed_batches", 0.0) + self.gained.get("eager_batches", 0.0)

    @property
    def lines(self) -> float:
        """Batch lines that the log must have meanwhile, about."""
        steps, running = self.steps, self.figures.running
        if not steps and running:
            steps = self.gained.get("decoded_tokens", 0.0) / running
        return steps / DECODE_LOG_INTERVAL + self.gained.get("prefill_passes", 0.0)


class Counters:
    """The counters of the pages so far, and what the last page gained beside the one before.

    They are cumulative since the server's start; one that appears counts from 0. If the server was away meanwhile, or
    its log shows a start, counters that fall belong to a new start, else only if they are still smaller on the next
    page: a page can be spoiled. A page whose counters leap beyond any server, or are no figures, is set aside in the
    same way, with its gauges. Where the pages of two servers come in turn, one of them is followed.

    Streamed requests that SGLang rejects are answered with status 200 and an error, and never finish. One request ends
    in both counters at about the same time, so only what exceeds the greatest difference so far counts. A prompt that
    is too long ends in the same way, but runs: rejected are those that a full queue turns away, and those that leave
    the queue unstarted after SGLANG_REQ_WAITING_TIMEOUT.
    """

    def __init__(self) -> None:
        self.page: Scrape | None = None  # the last one that was not set aside
        # The last one whose counters were used, with those of pages before that it lacks.
        self.whole: Scrape | None = None
        self.ranks: tuple[RankGains, ...] = ()
        self.restarted = False
        self.moved: float | None = None  # tokens and requests together; None where no counter shows it
        self.counts: dict[str, float] = {}
        self.latencies: dict[str, Histogram] = {}
        self.are_used = False  # the counters of the last one
        self.is_set_aside = False  # the last one: no server has such a page between those before and after it
        self._other: Scrape | None = None  # the last one whose counters were smaller, beside `whole`
        self._returns = 0  # how often a later one continued it, after one that continued `whole`
        self._fell = False  # the counters of the last one were smaller, or leapt
        self._was_invalid = False
        self._begin(Scrape([]))

    @property
    def alternate(self) -> bool:
        """Whether the pages of two servers come in turn."""
        return self._returns >= MOST_RETURNS

    def _begin(self, first: Scrape) -> None:
        """Begin the sums of one start, of which this is the first page."""
        self._unfinished = self._most_unfinished = 0.0  # answered requests that have not finished
        self._left = 0.0  # left the queue without a start, and not seen as answered
        self._unanswered = _unanswered(first)
        run = sum((rank.running or 0.0) + (rank.queued or 0.0) for rank in first.ranks)
        tokenless = _tokenless(first) + (run if first.open_requests is None else first.open_requests)
        self._most = {
            "unanswered": self._unanswered,
            "tokenless": tokenless,
        }  # differences of counters, the most so far
        self._rise("unstarted", _unstarted(first))

    def _rise(self, name: str, value: float | None) -> float:
        """Return how much a difference of counters is above the most that it was: what makes it smaller for a while is
        no loss.
        """
        if value is None:
            self._most.pop(name, None)
            return 0.0
        before = self._most.get(name, value)
        self._most[name] = max(before, value)
        return self._most[name] - before

    def fell(self, page: Scrape) -> bool:
        """Whether the counters of a page are smaller than before."""
        return self.whole is not None and not page.counters_invalid and _is_less(page.progress, self.whole.progress)

    def take(self, page: Scrape, *, queue_is_full: bool = False, is_new: bool = False) -> None:
        """Take a page.

        `queue_is_full`: by --max-queued-requests. `is_new`: smaller counters are those of a new start.
        """
        before = self.whole
        known = {} if before is None else {rank.dp: rank for rank in before.ranks}
        self.ranks = tuple(RankGains(rank, {}, is_fresh=True) for rank in page.ranks)
        self.restarted, self.moved, self.counts, self.latencies = False, None, {}, {}
        is_invalid = page.counters_invalid
        unsure = before is not None and not is_new and self._is_unsure(before, page)
        self.are_used = not (is_invalid or unsure)
        self.is_set_aside = before is not None and (unsure or (is_invalid and not self._was_invalid))
        self._was_invalid = is_invalid
        self.page = self.page if self.is_set_aside else page
        if not self.are_used:
            self._fell = self._fell or (unsure and not is_invalid)
            return
        self.restarted, self._fell = self.fell(page), False
        if before is None:
            self._take_first(page)
            return
        if self.restarted:
            before, known, self._other, self._returns = Scrape([]), {}, None, 0
            self._begin(before)
        if known and known.keys().isdisjoint(rank.dp for rank in page.ranks):
            known |= {rank.dp: rank for rank in page.ranks}  # all are new names: their counters are no gain
        self.counts = _counted(before, page)
        if page.open_requests is not None and page.generation_posts is not None:
            self.counts["server_errors"] = self.counts.get("server_errors", 0.0) + self._broken(page)
        if self.counts:
            streams = self._rejected_streams(page, queue_is_full=queue_is_full)
            self.counts["rejected_requests"] = self.counts.get("refused_requests", 0.0) + streams
        if page.started_requests is not None and "finished_requests" in self.counts:
            self.counts["tokenless_requests"] = self._rise("tokenless", _tokenless(page))  # at least
        for name in LATENCIES:
            histogram, earlier = getattr(page, name), getattr(before, name)
            more = histogram if histogram is None or earlier is None else histogram.since(earlier)
            if more is not None and more.observations:
                self.latencies[name] = more
        self.ranks = tuple(_rank(known.get(rank.dp) or RankFigures(rank.dp), rank) for rank in page.ranks)
        self.moved = None if page.progress is None else increase(before.progress, page.progress)
        # A counter that a page lacks goes on when it is back, and is not counted from 0.
        known |= {rank.dp: _with_older(rank, known.get(rank.dp), RANK_COUNTS) for rank in page.ranks}
        self.whole = replace(_with_older(page, before, (*SERVER_COUNTS, *LATENCIES)), ranks=list(known.values()))

    def _is_unsure(self, before: Scrape, page: Scrape) -> bool:
        """Whether the next page has to decide about the counters of this one; of two servers only one is followed."""
        counts = _pairs(before, page)
        if page.counters_invalid or not any(starmap(_is_less, counts)):
            return not self._fell and any(starmap(_leaps, counts))
        continues_other = self._other is not None and not any(starmap(_is_less, _pairs(self._other, page)))
        if self._fell and not (continues_other and self.alternate):
            return False
        self._returns += continues_other and not self._fell
        self._other = page
        return True

    def _take_first(self, page: Scrape) -> None:
        """Take the first page, which gained nothing."""
        self.moved = None if page.progress is None else 0.0
        self.whole = page
        self.ranks = tuple(replace(_rank(rank, rank), is_fresh=True) for rank in page.ranks)
        self._begin(page)

    def saved(self) -> object:
        """Return the counters of the present start as plain JSON, for the exporter after this one."""
        page = self.whole
        if page is None:
            return None
        return {
            "server": {name: figure for name in _OF_SERVER if (figure := getattr(page, name)) is not None},
            "latencies": {
                name: [list(histogram.bounds[:-1]), list(histogram.counts), histogram.seconds]
                for name in LATENCIES
                if (histogram := getattr(page, name)) is not None
            },
            "ranks": [[rank.dp, [getattr(rank, name) for name in RANK_COUNTS]] for rank in page.ranks],
            "differences": [self._unfinished, self._most_unfinished, self._left, self._unanswered, self._most],
            "fell": self._fell,
        }

    def restore(self, saved: object) -> None:
        """Go on from what `saved` returned; without all of it the next page is the first."""
        match saved:
            case {
                "server": dict() as server,
                "latencies": dict() as latencies,
                "ranks": list() as ranks,
                "differences": [*numbers, dict() as most],
                "fell": bool() as fell,
            } if len(numbers) == 4 and all(map(_is_number, (*numbers, *most.values()))):
                figures = {name: float(server[name]) for name in _OF_SERVER if is_count(server.get(name))}
                known = {name: _histogram(latencies.get(name)) for name in LATENCIES}
                of_ranks = [rank for entry in ranks if (rank := _rank_of(entry)) is not None]
                whole: dict[str, Any] = {**figures, **known}
                self._begin(Scrape([]))
                self.whole, self._fell = Scrape(of_ranks, **whole), fell
                self._unfinished, self._most_unfinished, self._left, self._unanswered = map(float, numbers)
                self._most = {str(name): float(value) for name, value in most.items()}

    def _broken(self, page: Scrape) -> float:
        """Return how many more requests an exception ended before SGLang counted their answer, as two pages in a row
        show it.

        Processes write their counters one after the other, so on a single page a request may be counted and not yet be
        open.
        """
        before, self._unanswered = self._unanswered, _unanswered(page)
        return self._rise("unanswered", min(before, self._unanswered))

    def _rejected_streams(self, page: Scrape, *, queue_is_full: bool) -> float:
        """Return how many more streamed requests were rejected."""
        counts = self.counts
        self._unfinished += counts.get("answered_requests", 0.0) - counts.get("finished_requests", 0.0)
        # Whoever aborts takes out of the queue as well.
        unstarted = None if counts.get("aborted_requests") else _unstarted(page)
        self._left = 0.0 if unstarted is None else self._left
        self._left += self._rise("unstarted", unstarted)
        above = max(self._unfinished - self._most_unfinished, 0.0)
        more = above if queue_is_full else min(above, self._left)
        can_be = queue_is_full or self._left > 0
        self._left = max(self._left - more, 0.0)
        self._most_unfinished = max(self._unfinished, self._most_unfinished) if can_be else self._unfinished
        return float(int(more))


def _unstarted(page: Scrape) -> float | None:
    """Return how many requests left the queues without a start, so far, at least; None
    where a rank does not expose it.
    """
    if page.open_requests is None or not page.ranks:
        return None
    waiting = -page.open_requests  # all that wait are open; the gauges of the queues are older than the counters
    for rank in page.ranks:
        if rank.queued_requests is None or rank.admitted_requests is None:
            return None
        waiting += rank.queued_requests - rank.admitted_requests
    return max(waiting, 0.0)


def _unanswered(page: Scrape) -> float:
    """Return how many requests came, have no answer and are not open any more."""
    return (page.generation_posts or 0.0) - (page.generation_responses or 0.0) - (page.open_requests or 0.0)


def _tokenless(page: Scrape) -> float:
    """Return how many requests ended before their first token, less those that have one and still run."""
    return (page.finished_requests or 0.0) - (page.started_requests or 0.0)


def _with_older(new: _T, old: _T | None, names: Iterable[str]) -> _T:
    lacks: dict[str, Any] = {name: getattr(old, name, None) for name in names if getattr(new, name) is None}
    return replace(new, **lacks) if any(value is not None for value in lacks.values()) else new


def _is_less(new: float | None, old: float | None) -> bool:
    return old is not None and new is not None and new < old


_OF_SERVER = ("progress", *SERVER_COUNTS)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15


def _histogram(saved: object) -> Histogram | None:
    """Return a histogram that was saved; None where it cannot be one."""
    match saved:
        case [list() as bounds, list() as counts, None | int() | float() as seconds] if (
            all(map(is_count, (*bounds, *counts)))
            and len(counts) == len(bounds) + 1 <= MOST_BOUNDS
            and all(low < high for low, high in pairwise(bounds))
            and all(low <= high for low, high in pairwise(counts))
            and (seconds is None or is_count(seconds))
        ):
            return Histogram((*map(float, bounds), inf), tuple(map(float, counts)), seconds)
    return None


def _rank_of(saved: object) -> RankFigures | None:
    """Return the counters of a scheduler that were saved; None where they cannot be some."""
    match saved:
        case [None | int() as dp, list() as figures] if len(figures) == len(RANK_COUNTS):
            counts: dict[str, Any] = {
                name: float(figure) for name, figure in zip(RANK_COUNTS, figures, strict=True) if is_count(figure)
            }
            return RankFigures(dp, **counts)
    return None


def _leaps(new: float | None, old: float | None) -> bool:
    return old is not None and new is not None and new > old + MOST_GAINED


def _pairs(before: Scrape, page: Scrape) -> list[tuple[float | None, float | None]]:
    """Return each counter of a page with the same one of the page before."""
    pairs = [(getattr(page, name), getattr(before, name)) for name in _OF_SERVER]
    histograms = ((getattr(page, name), getattr(before, name)) for name in LATENCIES)
    pairs += [(new.observations, old.observations) for new, old in histograms if new is not None and old is not None]
    known = {rank.dp: rank for rank in before.ranks}
    pairs += [
        (getattr(rank, name), getattr(known.get(rank.dp), name, None)) for rank in page.ranks for name in RANK_COUNTS
    ]
    return pairs


def _counted(before: Scrape, page: Scrape) -> dict[str, float]:
    found = {
        name: increase(getattr(before, name), figure)
        for name in SERVER_COUNTS
        if (figure := getattr(page, name)) is not None
    }
    if "failed_bootstraps" in found:
        found["failed_transfers"] = found.get("failed_transfers", 0.0) + found.pop("failed_bootstraps")
    return found


def _rank(old: RankFigures, rank: RankFigures) -> RankGains:
    gained = {
        name: increase(getattr(old, name), figure)
        for name in RANK_COUNTS
        if (figure := getattr(rank, name)) is not None
    }
    return RankGains(rank, gained, any(gained.values()) or gauges_of(old) != gauges_of(rank))


def gauges_of(rank: RankFigures) -> tuple[float | None, ...]:
    """Return what a scheduler shows of its present."""
    return rank.running, rank.queued, rank.full_usage, rank.used_tokens, rank.generation_throughput
