"""A server over time: events in, seconds in each state and counts out. Pure; times are unix seconds.

A line says what holds until the next one. All lines of one time are one moment, because printed times are whole seconds: its prefill batches
take the time that their tokens need, the rest is decoding. Where the next line is overdue (`OVERDUE` intervals), the scheduler is idle.
Everything is added up in buckets of ten seconds, so any stretch of time is a sum of buckets.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, inf
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core.events import CAUSE, COUNTED_KINDS, ENDINGS, Event, Rank, says_why
from sglang_tuning_exporter.core.facts import DECODE_LOG_INTERVAL, Facts
from sglang_tuning_exporter.core.reasons import AT_LIMIT, EARLY, STUCK_SECONDS, Sample, reason
from sglang_tuning_exporter.core.sums import (
    IDLE,
    LATENCIES,
    LATENCIES_JUDGED,
    LIVENESS,
    PAGE_SUMS,
    SIGNALS,
    UNKNOWN,
    WAITS,
    Totals,
    merged,
)
from sglang_tuning_exporter.sglang.metrics import RANK_COUNTS, SERVER_COUNTS, Histogram, RankFigures, Scrape

BUCKET_SECONDS = 10.0
OVERDUE = 2.5  # intervals between two lines; then nothing is decoded any more
LEAST_HOLD_SECONDS = 2.0  # printed times are whole seconds
MOST_HOLD_SECONDS = 300.0
USUAL_MOMENTS = 10  # with lines, between two silences that may be hangs
MANY_RUNNING = 8  # a silence that began with so many is worth a note
USUAL_STEP_SECONDS = 0.05  # until the log shows it
USUAL_PREFILL_RATE = 1000.0  # tokens a second, until the log shows it
FULL_PREFILL = 0.9  # of the most tokens that a prefill batch may have
CHUNK_STEP = 64  # sizes of chunks are multiples of it
SAME_CHUNK = 3  # lines with exactly the most tokens show the size of a chunk
ASSUMED_CAPTURED = 160.0  # the largest captured batch, where the start is not known: the smallest default on large GPUs
USUAL_CAPTURED = "160 to 256 (8 to 80 on a small GPU)"
RATE_SECONDS = 60.0  # over which admissions are counted for the wait
LEAST_RATE_SECONDS = 5.0
# After a request does not fit, SGLang tries the next one only when a running one has ended (batch_is_full, srt/managers/scheduler.py).
BESIDE = 2.0
LEAST_USAGE = 0.05  # printed with two decimals: less says too little of the cache's size
MOST_RESERVED = 4096.0  # tokens that SGLang reserves for one request, at most (CLIP_MAX_NEW_TOKENS, srt/managers/schedule_policy.py)
COARSE = 0.05  # of the pool: smaller requests fill it smoothly, and usage alone says whether it is full
SHARED_PREFIXES = 0.2
LOGGED_SECONDS = 60.0  # since the last batch line: what the log counts is not taken from the counters
SHORT_WAIT_SECONDS = 1.0  # of a queue that only scrapes show
QUEUE_FULL = 0.5  # of --max-queued-requests: gauges are older than the rejections
SHOWN_SECONDS = 60.0  # that a scrape's gauges hold at most
LEAST_STEPS, LEAST_COMPUTED = (
    40.0,
    1024.0,
)  # decode steps, prompt tokens between two scrapes of an idle scheduler: less are health checks
STEP_SECONDS = 1.0  # between two step times: SGLang prints whole seconds
NEARLY_SAME = 0.1  # of the mean batch, between two decode lines: the mean is off by half as much at most
WORKS_ON_SECONDS = 30.0  # after a line that says it is about to end, or an exception: then it did not end by it
COVERAGE_SECONDS = 600.0  # over which the share of the batches with a graph is shown
MOST_WINDOWS = 16  # whose sums are kept
MOST_STARTS = 64  # whose times are kept
MOST_SCHEDULERS = 384  # DP ranks; those of a larger server are not taken
REPEAT_SECONDS = 10.0  # within which other ranks print the same event
MOST_REPEATED = 4096  # events that other ranks may print, such as failed transfers
MANY_ELSEWHERE = 0.25  # of the running requests: fewer are always on their way between the two sides
ELSEWHERE = ("bootstrap", "unbootstrapped", "prealloc", "transfer", "transferring", "inflight", "host_receive")
ENDS = {
    "process_died": "one of its processes died",
    "scheduler_exception": "an exception ended its scheduler",
    "launch_failed": "its start failed",
    "aborted": "one of its processes was aborted",
}
_ELSEWHERE = frozenset(ELSEWHERE)
_LIVENESS_OF = {"hang": "watchdog_timeout", "health": "health_check_failed", "aborted": "process_died"}
_T = TypeVar("_T", Scrape, RankFigures)
Stage: TypeAlias = Literal["tokenizer", "scheduler", "detokenizer"]
STAGES: tuple[Stage, ...] = get_args(Stage)
UNUSUAL_SECONDS = (
    10.0  # without output while requests run, or open requests beside idle schedulers: nothing is said of latencies
)
PROVEN_SECONDS = 20.0  # without output after tokens that must have been sent
PAUSE_SECONDS = 600.0  # of /pause_generation, until it is a hang
CHECK_SECONDS, CHECK_GAP_SECONDS = 20.0, 90.0  # a health check takes at most; between two that fail in a row
STEPS_TO_OUTPUT = 60.0  # decode steps after which every running request must have sent tokens
SPECULATED_STEPS = 250.0  # the same with speculative decoding, where a step gives several tokens
SUSPECT_SECONDS = 30.0  # without progress, until the exporter makes a health check of its own
_STAGE_WORDS: Mapping[Stage, str] = {
    "tokenizer": "requests come in and none is passed on",
    "scheduler": "requests run or wait, and no token is generated",
    "detokenizer": "tokens are generated and not sent",
}


class Moment(NamedTuple):
    """What a scheduler does: one word for each of `SIGNALS`."""

    queue: str
    token_usage: str
    admission: str
    cuda_graph: str

    @property
    def activity(self) -> str:
        """Whether it serves: `serving`, `idle` or `unknown`."""
        return IDLE if self == _ALL_IDLE else UNKNOWN if self == _ALL_UNKNOWN else "serving"


_ALL_IDLE = Moment(IDLE, IDLE, IDLE, IDLE)
_ALL_UNKNOWN = Moment(UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)


class Hang(NamedTuple):
    """A time without progress, with work before it, and after it or waiting all through it."""

    begin: float
    seconds: float
    before: float  # requests that ran before; 0 where that is not known
    after: float  # and after
    stage: Stage | None = None  # which does nothing, where pages show it
    is_pause: bool = False  # by /pause_generation

    @property
    def until(self) -> float:
        """Its end."""
        return self.begin + self.seconds

    @property
    def sentence(self) -> str:
        """What pages show."""
        waiting = f" ({self.after:.0f} requests)" if self.after else ""
        if self.is_pause or self.stage is None:
            return f"the server has been paused by /pause_generation for {self.seconds:.0f} s{waiting}"
        return f"the {self.stage} hangs: {_STAGE_WORDS[self.stage]} for {self.seconds:.0f} s{waiting}"


# A page


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

    They are cumulative since the server's start; one that appears counts from 0. If the server was away meanwhile, or its log shows a
    start, counters that fall belong to a new start, else only if they are still smaller on the next page: a page can be spoiled.

    Streamed requests that SGLang rejects are answered with status 200 and an error, and never finish. One request ends in both counters at
    about the same time, so only what exceeds the greatest difference so far counts. A prompt that is too long ends in the same way, but
    runs: rejected are those that a full queue turns away, and those that leave the queue unstarted after SGLANG_REQ_WAITING_TIMEOUT.
    """

    def __init__(self) -> None:
        self.page: Scrape | None = None  # the last one
        # The last one whose counters were used, with those of pages before that it lacks.
        self.whole: Scrape | None = None
        self.former: Scrape | None = (
            None  # until the first page: retractions and progress on the last one of the exporter before
        )
        self.is_continued = False  # the first page was of the same start as that one
        self.ranks: tuple[RankGains, ...] = ()
        self.restarted = False
        self.moved: float | None = None  # tokens and requests together; None where no counter shows it
        self.counts: dict[str, float] = {}
        self.latencies: dict[str, Histogram] = {}
        self._fell = False  # those of the last one were smaller
        self._begin(Scrape([]))

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
        """Return how much a difference of counters is above the most that it was: what makes it smaller for a while is no loss."""
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
        """Take a page. `queue_is_full`: by --max-queued-requests. `is_new`: smaller counters are those of a new start."""
        before, is_first, self.page = self.whole, self.page is None, page
        known = {} if before is None else {rank.dp: rank for rank in before.ranks}
        self.ranks = tuple(RankGains(rank, {}, is_fresh=True) for rank in page.ranks)
        self.restarted, self.moved, self.counts, self.latencies = False, None, {}, {}
        unsure = before is not None and not (is_new or self._fell) and _any_fell(before, known, page)
        if page.counters_invalid or unsure or (is_first and self._lacks_the_former(page)):
            self._fell = self._fell or (unsure and not page.counters_invalid)
            return
        self.restarted, self._fell = self.fell(page), False
        if before is None:
            self._take_first(page)
            return
        if self.restarted:
            before, known = Scrape([]), {}
            self._begin(before)
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

    def _lacks_the_former(self, page: Scrape) -> bool:
        """Whether a page has none of the schedulers that the last one of the exporter before had: the next page decides."""
        former = {rank.dp for rank in self.former.ranks} if self.former is not None else set()
        return bool(former and page.ranks) and former.isdisjoint(rank.dp for rank in page.ranks)

    def _take_first(self, page: Scrape) -> None:
        """Take the first page: it gained nothing but what was retracted since the last one of the exporter before."""
        former, self.former, self.whole = self.former, None, page
        self.moved = None if page.progress is None else 0.0
        self.is_continued = (
            former is not None and page.progress is not None and not _is_less(page.progress, former.progress)
        )
        known = (
            {rank.dp: rank.retracted_requests or 0.0 for rank in former.ranks} if former and self.is_continued else {}
        )
        ranks = []
        for rank in page.ranks:
            number = rank.retracted_requests
            earlier = None if number is None else min(known.get(rank.dp, number), number)
            ranks.append(replace(_rank(replace(rank, retracted_requests=earlier), rank), is_fresh=True))
        self.ranks = tuple(ranks)
        self._begin(page)

    def _broken(self, page: Scrape) -> float:
        """Return how many more requests an exception ended before SGLang counted their answer, as two pages in a row show it.

        Processes write their counters one after the other, so on a single page a request may be counted and not yet be open.
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
    """Return how many requests left the queues without a start, so far, at least; None where a rank does not expose it."""
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


def _any_fell(before: Scrape, known: Mapping[int | None, RankFigures], page: Scrape) -> bool:
    """Whether any counter of a page is smaller than before."""
    histograms = [(getattr(page, name), getattr(before, name)) for name in LATENCIES]
    return (
        any(_is_less(getattr(page, name), getattr(before, name)) for name in ("progress", *SERVER_COUNTS))
        or any(now is not None and old is not None and now.observations < old.observations for now, old in histograms)
        or any(
            old is not None and any(_is_less(getattr(rank, name), getattr(old, name)) for name in RANK_COUNTS)
            for rank in page.ranks
            if (old := known.get(rank.dp)) is not None
        )
    )


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
    return RankGains(rank, gained, any(gained.values()) or _gauges(old) != _gauges(rank))


def _gauges(rank: RankFigures) -> tuple[float | None, ...]:
    return rank.running, rank.queued, rank.full_usage, rank.used_tokens, rank.generation_throughput


# A server


class Scheduler:
    """One DP rank, or the whole server without."""

    def __init__(self, dp: int | None, server: Server) -> None:
        self.dp = dp
        self._serves, self._waits, self._waited = f"serves/{dp}", f"waits/{dp}", f"waited/{dp}"
        self._admitted, self._batches = f"admitted_requests/{dp}", (f"eager_batches/{dp}", f"replayed_batches/{dp}")
        self._server = server
        self._life = server.life(dp)
        self.speaker: Rank | None = None  # of the ranks that print the same batch, the one that counts
        self.printed: tuple[str, dict[str, float]] = ("", {})  # the last batch line
        self.running: float | None = None
        self.queued: float | None = None
        self.usages: dict[str, float] = {}
        self.graph: bool | None = None
        self.queues: dict[str, float] = {}
        self.grammar_queued: float | None = None
        self._printed: set[str] = set()  # pools and queues that lines show: others are of the present page alone
        self._is_of_page = self._is_ratio_of_page = False  # what is said to run and wait; new_token_ratio
        self.pending: tuple[float, float] | None = None  # tokens that wait, and of how many requests
        self.new_token_ratio: float | None = None  # the last one that was shown
        self.throughput: float | None = None
        self.at: float | None = None  # the moment
        self.spent = -inf  # up to when time is counted
        self._tokens = self._joined = 0.0  # of the moment's prefill batches
        self._full = False
        self._decoded = False  # the moment's last line is of decoding
        self._goes_on = False  # the last prompt continues in the next batch
        self._steps: deque[float] = deque(maxlen=5)  # seconds between decode lines, as the throughput has it
        self.decoded_at: float | None = None
        self.prefilled_at = -inf
        self._gaps: deque[float] = deque(maxlen=5)
        self._rate = USUAL_PREFILL_RATE  # most prompt tokens in a second
        self._second = (-inf, 0.0)
        # Tokens of the largest prefill batch, how many were as large, and after how many of these a prompt continued.
        self._largest, self._as_large, self._continued = 0.0, 0, 0
        self._fell_at: float | None = None  # a request ended since the last one was admitted
        self._begun = 0.0  # requests that began since it was idle
        self._is_early = False  # requests wait, and too few have ended to show why
        self._woke = True  # it was idle, or nothing is known, since the last decode line
        self._was_empty = False  # a prompt came to an empty batch since then
        self._moments = 0  # since the last long silence
        self._pool: float | None = None  # tokens of the KV cache, by tokens and usage of a line
        self._waits_elsewhere = False  # most requests wait for the other side of a pair
        self._nothing_since = -inf  # since when requests wait and none is started
        self._at_limit_at = -inf  # the batch last had as many requests as the limit allows
        # Decode lines that show the time of a step, of the last ten minutes at most: time, batch, seconds, tokens per request.
        self.steps: deque[tuple[float, float, float, float]] = deque(maxlen=600)
        self._step_due = -inf
        self._retracted_at = -inf  # the last retraction line
        # Scrapes
        self.logged_at = -inf  # the last batch line
        self._shown_at = -inf  # a scrape last showed that something had changed
        self._scraped_at = -inf
        self._computing: float | None = None  # seconds of prefill between two scrapes
        # Requests of a prefill batch, on average: a gauge of that moment does not count them as running.
        self._joining = 0.0
        self._counts_admissions = False

    # A line

    def repeats(self, event: Event) -> bool:
        """Whether a batch line is of another rank than the lowest: every pipeline stage, and some tensor-parallel ranks, print every batch."""
        rank, known = event.rank, self.speaker
        if rank.tp is None and rank.pp is None:
            return False
        if known is not None and _place(rank) >= _place(known):
            return _place(rank) > _place(known)
        self.speaker = rank
        return known is not None and (event.kind, event.figures) == self.printed  # a higher rank printed it first

    def take(self, event: Event, now: float) -> None:
        """Take a batch line."""
        figures = event.figures
        is_first = self.at is None or now != self.at
        if is_first:
            self._proceed(now, event)
            self._computing = None
        self.logged_at = now
        for name, figure in (("full", "usage"), ("swa", "swa_usage"), ("mamba", "mamba_usage")):
            if figure in figures:
                self.usages[name] = figures[figure]
                self._printed.add(name)
        if not _ELSEWHERE.isdisjoint(figures):
            self.queues.update({name: figures[name] for name in ELSEWHERE if name in figures})
            self._printed.update(self.queues.keys() & figures.keys())
        before = self.running
        self.running, self.queued = figures.get("running", self.running), figures.get("queued", self.queued)
        self._is_of_page = False
        if before is not None and self.running is not None and self.running < before:
            self._fell_at = now
        if not self.queued or (self.running or 0.0) > (before or 0.0):
            self._nothing_since = now
        if event.kind == "decode":
            if is_first:
                self._add_step(figures, now)
            self._decode(event, now)
        else:
            self._prefill(event, now)
        self.printed = (event.kind, figures)
        self._note_load(1.0, now)

    def _note_load(self, lines: float, now: float) -> None:
        bucket = self._server.bucket(now)
        bucket["lines"] += lines
        running = (self.running or 0.0) + self._joined
        bucket.most("most_running", running)
        bucket.most("most_queued", self.queued or 0.0)
        # Where most of those that run were not seen to begin, the load is older than what was read of it.
        self._begun = inf if running > 2 * self._begun else max(self._begun, running)
        bucket.most("most_usage", self.usage or 0.0)

    def _admit(self, requests: float, now: float) -> None:
        self._server.bucket(now)[self._admitted] += requests
        self._begun += requests
        self._fell_at, self._nothing_since = None, now

    def _add_step(self, figures: dict[str, float], now: float) -> None:
        """Add the step time that a decode line shows: its throughput is over the time since a decode line with nearly the same batch."""
        running, speed, accepted = figures.get("running"), figures.get("throughput"), figures.get("accept_length")
        before = self.printed[1].get("running") if self.printed[0] == "decode" else None
        if now < self._step_due or not running or not before or not speed:
            return
        batch = (before + running) / 2
        if abs(before - running) > NEARLY_SAME * batch:
            return
        since, ranks = self.decoded_at or now, self._server.facts.attention_ranks
        if self._woke or (ranks > 1 and self._server.prefilled_elsewhere(self.dp, since)):
            return  # it paused, or waited for another rank's prefill
        self._step_due = now + STEP_SECONDS
        if accepted or not self._server.facts.is_on("speculative_algorithm"):
            tokens = accepted or 1.0
            self.steps.append((now, batch, batch * tokens / speed, tokens))

    def _decode(self, event: Event, now: float) -> None:
        figures, bucket, facts = event.figures, self._server.bucket(now), self._server.facts
        running, steps = self.running or 0.0, facts.steps_between_lines
        throughput, accepted = figures.get("throughput"), figures.get("accept_length", 1.0)
        self.throughput = throughput if throughput is not None else self.throughput
        # The throughput is over the time since the line before, pauses included.
        # Where no prompt came to an empty batch since the decode line before, it decoded on.
        paused = self._woke and (facts.role == "decode" or self.decoded_at is None or self._was_empty)
        if self.decoded_at is None:
            self._gaps.clear()  # those of prefill lines
        if throughput and running and not paused:
            self._steps.append(steps * max(accepted, 1.0) * running / throughput)
        if self.decoded_at is not None and now > self.decoded_at and not paused:
            self._gaps.append(now - self.decoded_at)
        self.decoded_at, self._decoded, self._woke, self._joined, self._was_empty = now, True, False, 0.0, False
        bucket["decode_lines"] += 1
        self._server.counted["decode_lines"] += 1
        self._server.logged_steps += steps
        if figures.get("usage", 0.0) >= LEAST_USAGE and "tokens" in figures:
            self._pool = figures["tokens"] / figures["usage"]
        bucket["decoded_tokens"] += steps * max(accepted, 1.0) * running
        if "accept_length" in figures:
            bucket.observe("accepted", accepted)  # tokens of a verified step, the one that needs no draft included
        if "graph" in figures:
            self.graph = bool(figures["graph"])
            if "replayed_batches" not in self._server.by_page:
                self._count_batches(now, *((steps, 0.0) if self.graph else (0.0, steps)))
            facts.graph_device = "" if self.graph else event.word or facts.graph_device
            name, size = ("replayed_most", running) if self.graph else ("eager_inverse", 1.0 / max(running, 1.0))
            bucket.most(name, size)
            if not self.graph and self._server.another_decides(self.dp, running, now):
                self.graph = None

    def _prefill(self, event: Event, now: float) -> None:
        figures, bucket, facts = event.figures, self._server.bucket(now), self._server.facts
        tokens, sequences = figures.get("tokens", 0.0), figures.get("sequences", 0.0)
        bucket["prefill_lines"] += 1
        self._server.counted["prefill_lines"] += 1
        if tokens <= 1 and not (self.running or self.queued or figures.get("cached")):
            self.running = self.queued = 0.0  # a health probe is no load
            self._tokens = self._joined = 0.0
            return
        most = facts.prefill_tokens or self._chunk(tokens, bucket)
        counted = tokens + (self.running or 0.0 if facts.is_on("enable_mixed_chunk") else 0.0)
        ended_by_requests = sequences >= (facts.size("prefill_max_requests") or inf) and counted < (most or 0.0)
        full = most is not None and counted >= FULL_PREFILL * most and not ended_by_requests
        started = max(sequences - self._goes_on, 0.0)
        chunk = facts.size("chunked_prefill_size")
        self._goes_on = full and (
            counted >= FULL_PREFILL * chunk if chunk else facts.number("chunked_prefill_size") != -1
        )
        self._full = full  # of the moment's last prefill batch
        self._tokens += tokens
        self._decoded = False
        self._was_empty = self._was_empty or not self.running
        self._joined = sequences  # which the next line's running requests have, but for a prompt that goes on
        printed = int(now if event.time is None else event.time)  # late or not
        second = self._second[1] + tokens if printed == self._second[0] else tokens
        self._second = (printed, second)
        self._rate = max(self._rate, second)
        bucket["peak"] = self._rate  # the same in every bucket: a window takes the largest
        if self.decoded_at is None and -inf < self.prefilled_at < now:
            self._gaps.append(now - self.prefilled_at)
        self.prefilled_at = now
        if started:
            self._admit(started, now)
        bucket["full_lines"] += full
        bucket["computed_tokens"] += tokens
        bucket["cached_tokens"] += figures.get("cached", 0.0)
        if "computed_tokens" not in self._server.by_page:
            self._life["computed_tokens"] += tokens
            self._life["cached_tokens"] += figures.get("cached", 0.0)
        bucket["sequences"] += sequences
        bucket["admitted_requests"] += started
        if tokens <= sequences:  # several answers to one prompt: each finds all of it
            bucket["repeated"] += figures.get("cached", 0.0)
        if "pending" in figures:
            self.pending = (figures["pending"], figures.get("queued", 0.0))

    def _chunk(self, tokens: float, bucket: Totals) -> float | None:
        """Return the most tokens of a batch where only the log shows them: a size that returns and that nothing exceeds.

        The size is that of a chunk where prompts continue after such batches: fewer run than joined. Whole prompts of one length may
        only not fill the rest of a batch.
        """
        if tokens > self._largest:
            self._largest, self._as_large, self._continued = tokens, 0, 0
        self._as_large += tokens == self._largest
        bucket.most("most_prefill", self._largest)
        kind, before = self.printed
        if kind == "prefill" and before.get("tokens") == self._largest:
            sequences = before.get("sequences", 0.0)
            may_be_whole = sequences > 1 and self._largest % sequences == 0
            self._continued += not may_be_whole and (self.running or 0.0) < before.get("running", 0.0) + sequences
        if self._as_large < SAME_CHUNK or self._largest % CHUNK_STEP:
            return None
        if self._continued >= SAME_CHUNK:
            bucket.most("chunk_seen", self._largest)
        return self._largest

    def retract(self, event: Event, now: float) -> None:
        """Take a retraction of this scheduler; one that waited brings the usage of its moment."""
        self.advance(now)
        usage = event.figures.get("usage", self.usage)
        if usage is not None:
            self._server.bucket(now).observe("usage_before", usage)
        after, at = event.figures.get("ratio_after"), now if event.time is None else event.time
        if after is not None and at >= self._retracted_at:
            self._retracted_at = at
            self.new_token_ratio, self._is_ratio_of_page = after, False

    @property
    def usage(self) -> float | None:
        """The usage of the fullest pool, 0 to 1."""
        return max(self.usages.values(), default=None)

    # A scrape

    def take_page(self, gains: RankGains, counted: Iterable[str], now: float) -> None:
        """Take what a page shows. Its gauges hold until the next line or scrape; lines of the log, where they come, say more.

        SGLang refreshes a gauge when it prints a batch line, and when it is idle: unchanged figures are the old observation.
        counted: what the page counts of this scheduler; the log is not needed for it from then on.
        """
        figures, logged = gains.figures, now - self.logged_at <= LOGGED_SECONDS
        interval = now - self._scraped_at if self._scraped_at > -inf else 0.0
        self._count(gains, interval, counted, now, logged=logged)
        serving = bool(figures.running or figures.queued or figures.grammar_queued or any(figures.queues.values()))
        if logged and self.at is not None and now < self.at + self.hold_seconds:
            if serving:
                self._shown_at = self._scraped_at = now
                self.throughput = figures.generation_throughput if self.throughput is None else self.throughput
                self._see_queues(figures)
                return
            if self._tokens:
                return  # a prefill, which the gauges do not show
        was_idle = not (self.running or self.queued)
        self.advance(now)
        if was_idle and not logged and interval:
            self._serve_between(gains, interval, now, serving=serving)
        self._see_queues(figures)
        if figures.running is None and figures.queued is None:
            self._scraped_at = now
            if self._is_of_page:
                self.rest()
            return
        self.running, self.queued, self._is_of_page = figures.running, figures.queued, True
        self.usages.update(_usages(figures))
        self.throughput = figures.generation_throughput
        self._shown_at = now if gains.is_fresh or not serving else self._shown_at
        self.at, self.spent, self._scraped_at = now, max(now, self.spent), now
        self._tokens = self._joined = 0.0
        if logged:
            self._full, self._computing = False, 0.0
        if serving:
            if not logged and figures.accept_length and gains.is_fresh:
                self._server.bucket(now).observe("accepted", figures.accept_length)
            self._note_load(max(1.0 - gains.lines, 0.0), now)

    def _see_queues(self, figures: RankFigures) -> None:
        """Take the queues of a page; those and pools that only earlier pages showed are gone."""
        self.grammar_queued, pools = figures.grammar_queued, _usages(figures)
        self.queues = {name: each for name, each in self.queues.items() if name in self._printed} | figures.queues
        self.usages = {name: each for name, each in self.usages.items() if name in self._printed or name in pools}
        ratio = figures.new_token_ratio
        if ratio is not None or self._is_ratio_of_page:
            self.new_token_ratio, self._is_ratio_of_page = ratio, True

    def _count(self, gains: RankGains, interval: float, counted: Iterable[str], now: float, *, logged: bool) -> None:
        """Count what the server's own counters gained since the scrape before, and, where no line is logged, what it did meanwhile."""
        gained, facts, bucket = gains.gained, self._server.facts, self._server.bucket(now)
        by_page = self._server.by_page
        by_page.update({"computed_tokens", "replayed_batches"}.intersection(counted))
        if "computed_tokens" in counted or not (logged or "computed_tokens" in by_page):
            for name in gained.keys() & {"computed_tokens", "cached_tokens"}:
                self._life[name] += gained[name]
        if "replayed_batches" in gained or "eager_batches" in gained:
            self._count_batches(now, gained.get("replayed_batches", 0.0), gained.get("eager_batches", 0.0))
        if logged:
            return
        steps, passes = gains.steps, gained.get("prefill_passes", 0.0)
        for name in ("computed_tokens", "cached_tokens", "admitted_requests", "decoded_tokens"):
            bucket[name] += gained.get(name, 0.0)
        bucket["lines"] += gains.lines
        bucket["decode_lines"] += steps / facts.steps_between_lines
        bucket["prefill_lines"] += passes
        bucket["sequences"] += gained.get("admitted_requests", 0.0)
        self._counts_admissions = self._counts_admissions or "admitted_requests" in gained
        if gained.get("admitted_requests"):
            self._admit(gained["admitted_requests"], now)
        tokens, most = gained.get("computed_tokens", 0.0), facts.prefill_tokens
        if not gains.is_fresh:
            return  # nothing has changed: what the scrape before showed holds
        self._full = bool(most and tokens >= FULL_PREFILL * most * max(passes, 1.0))
        bucket["full_lines"] += passes if self._full else 0.0
        self._joining = gained.get("admitted_requests", 0.0) / passes if passes else 0.0
        self._computing = (
            interval * passes / (passes + steps) if passes else interval if tokens and not steps and interval else 0.0
        )
        if steps or passes:
            eager = gained.get("eager_batches", 0.0) > gained.get("replayed_batches", 0.0)
            known = bool(facts.arguments) or bool(
                gains.figures.replayed_batches
            )  # else it may be a server without a GPU
            self.graph = None if not steps or not known else not eager
        if interval and tokens:
            self._rate = max(self._rate, tokens / interval)
            bucket["peak"] = self._rate

    def _count_batches(self, now: float, replayed: float, eager: float) -> None:
        bucket = self._server.bucket(now)
        for name, key, number in (
            ("eager_batches", self._batches[0], eager),
            ("replayed_batches", self._batches[1], replayed),
        ):
            self._life[name] += number
            bucket[key] += number

    def coverage(self, recent: Totals) -> float | None:
        """Return the share of the decode batches of some time that replayed a graph; None without any."""
        eager, replayed = (recent[name] for name in self._batches)
        return replayed / (replayed + eager) if replayed + eager else None

    def rest(self) -> None:
        """Forget the present figures: nothing answers any more."""
        self.at = self.running = self.queued = self.throughput = self.pending = self.graph = None
        self.new_token_ratio = None
        self.grammar_queued = None
        self.usages.clear()
        self.queues.clear()

    def _serve_between(self, gains: RankGains, interval: float, now: float, *, serving: bool) -> None:
        """Count the time since the scrape before as serving where only the counters show work, and neither scrape found something to do.

        Those that wait now came on average in the middle of it.
        """
        if serving:
            self._server.bucket(now)[self._waited] += (gains.figures.queued or 0.0) * min(interval, SHOWN_SECONDS) / 2
            return
        steps, decoded = gains.steps, gains.gained.get("decoded_tokens", 0.0)
        if steps < LEAST_STEPS and gains.gained.get("computed_tokens", 0.0) < LEAST_COMPUTED:
            return
        begin = max(now - min(interval, SHOWN_SECONDS), self.spent - interval)
        self.spent, self.running, self.queued = begin, decoded / steps if steps and decoded else 0.0, 0.0
        self._spend(now, Moment("empty", UNKNOWN, "no_queue", self._graphs()))

    # Time

    def _are_the_same(self, event: Event) -> bool:
        """Whether the requests of a batch line can be those of the line before: a prefill line shows who joins.

        The decode server of a pair prints none: there as many must hold the tokens of before, and at most those of one line's steps more.
        """
        facts, figures, before = self._server.facts, event.figures, self.printed[1]
        if event.kind == "prefill" or not (facts.role == "decode" or "prealloc" in figures):
            return True
        grown = figures.get("tokens", 0.0) - before.get("tokens", inf)
        each = facts.steps_between_lines * max(figures.get("accept_length", 1.0), 1.0) + (
            facts.size("page_size") or 1.0
        )
        return figures.get("running") == before.get("running") and 0 <= grown <= each * figures.get("running", 0.0)

    def _proceed(self, now: float, event: Event) -> None:
        """Begin a moment with its first line."""
        self.advance(now)
        runs = event.figures.get("running")
        if self.at is not None and runs is not None:
            gap, ran = now - self.at, (self.running or 0.0) + self._joined
            moments, self._moments = self._moments, self._moments + 1
            if gap > max(STUCK_SECONDS, self.hold_seconds):
                self._moments = 0
                broke_off = max(self._server.last.get(name, -inf) for name in ("server_starts", "pause", "ends"))
                if moments < USUAL_MOMENTS or ran < 1 or self._server.stopping or broke_off > self.at:
                    pass  # a log that is silent again and again shows its rhythm, no hang
                elif runs >= ran / 2 and self._are_the_same(event):
                    self._server.hung(Hang(self.at, gap, ran, runs), now)
                elif ran >= MANY_RUNNING and len(self._server.silences) < MOST_STARTS:
                    self._server.silences.append(Hang(self.at, gap, ran, runs))
        self.at, self.spent = now, max(now, self.spent)
        self._tokens = self._joined = 0.0
        self._full = self._decoded = False

    @property
    def hold_seconds(self) -> float:
        """How long the last moment is valid."""
        known = min(self._steps, default=None)
        gap = min(self._gaps, default=None)
        due = min(filter(None, (known, gap)), default=self._server.facts.steps_between_lines * USUAL_STEP_SECONDS)
        if known is None and gap is not None:
            due = max(self._gaps)
        return min(max(OVERDUE * (due + self.prefill_seconds), LEAST_HOLD_SECONDS), MOST_HOLD_SECONDS)

    @property
    def prefill_seconds(self) -> float:
        """How long the moment's prompts take to compute."""
        return self._tokens / self._rate

    def advance(self, now: float) -> None:
        """Count the time up to `now`."""
        while self.at is not None and self.spent < now:
            moment, until, prefilling = self._does(self.at, self.spent, now)
            if prefilling:
                self._server.bucket(self.spent)["prefilling"] += min(now, until) - self.spent
            self._spend(min(now, until), moment)

    def moment(self, now: float) -> Moment:
        """Return what it does now, as far as the last line or scrape shows it."""
        return _ALL_UNKNOWN if self.at is None else self._does(self.at, now, now)[0]

    def _does(self, at: float, time: float, now: float) -> tuple[Moment, float, bool]:
        """Return what it does at a time, until when, and whether it prefills, by what was shown at `at`: afterwards nothing is known."""
        if self._is_idle():
            return _ALL_IDLE, inf, False
        computes = self.prefill_seconds if self._computing is None else self._computing
        if time < (until := at + min(computes, STUCK_SECONDS)):
            return self._states(prefilling=True), until, True
        until = at + self.hold_seconds if self._computing is None else at
        if now - self._scraped_at <= SHOWN_SECONDS:  # scrapes show when it is idle
            until = max(until, self._shown_at + SHOWN_SECONDS)
        if time < until:
            return self._states(prefilling=False), until, False
        waits = self.queued is None or self.queued > 0 or any(self.queues.values()) or self._computing is not None
        return (_ALL_UNKNOWN if waits else _ALL_IDLE), inf, False

    def _is_idle(self) -> bool:
        return (
            self.running == 0
            and not self.queued
            and not self._joined
            and not any(self.queues.values())
            and not self.grammar_queued
        )

    def _spend(self, until: float, moment: Moment) -> None:  # noqa: C901, PLR0912 - one loop over all sums
        """Count the time up to `until` as this."""
        activity, states = _state_keys(moment)
        if until > self.spent:
            life, lived = self._life, until - self.spent
            for key in (activity, *states):
                life[key] += lived
        serves = moment is not _ALL_IDLE and moment is not _ALL_UNKNOWN
        self._woke = self._woke or not serves
        if moment is _ALL_IDLE:
            self._begun = 0.0
        running = None if self.running is None else self.running + self._joined
        waiting = sum(self.queues.values()) if self._waits_elsewhere else self.queued
        while self.spent < until:
            bucket = self._server.bucket(self.spent)
            end = min(until, (self.spent // BUCKET_SECONDS + 1) * BUCKET_SECONDS) if serves else until
            seconds, self.spent = end - self.spent, end
            for key in states:
                bucket[key] += seconds
            if not serves:
                continue
            self._server.last["requests"] = end
            bucket[self._serves] += seconds
            if self.queued:
                bucket[self._waited] += self.queued * seconds
            if self._is_early:
                bucket["early"] += seconds
            if self._waits_elsewhere:
                bucket["elsewhere"] += seconds
            if moment.queue not in {"empty", UNKNOWN}:
                bucket[self._waits] += seconds
            if moment.admission == "hybrid_pool_full" and self.usages.get("mamba", 0.0) >= (self.usage or 0.0):
                bucket["mamba"] += seconds
            # Between two scrapes that found nothing to do, what runs is known, and not what it holds.
            usage = None if moment.token_usage == UNKNOWN else self.usage
            figures = (running, waiting, usage, self.throughput)
            for value, keys in zip(figures, _figure_keys(moment.admission), strict=True):
                if value is None:
                    continue
                product = value * seconds
                for weighed, timed in keys:
                    bucket[weighed] += product
                    bucket[timed] += seconds
            if running:
                bucket[f"batch/{_binned(running)}"] += seconds
                if moment.admission == "held_back":
                    bucket[f"held/{_binned(running)}"] += seconds
                    bucket["usage2@held_back"] += (self.usage or 0.0) ** 2 * seconds

    # States

    def wait(self, recent: Totals) -> float | None:
        """Estimate the mean wait in some time: requests waiting over requests started, retracted ones again; None where neither was seen."""
        waited, started = recent[self._waited], recent[self._admitted]
        return waited / started if started else inf if waited else None

    def _last_minute(self) -> Totals:
        """Return what waited, started and served in the last minute of this start; nothing where it is too little to be a rate."""
        names, recent = (self._waited, self._admitted, self._serves), Totals()
        since = max(self.spent - RATE_SECONDS, self._server.last.get("server_starts", -inf)) - BUCKET_SECONDS
        for begin, totals in reversed(self._server.buckets):
            if begin <= since:
                break
            for name in names:
                recent[name] += totals.get(name, 0.0)
        return recent if recent[self._serves] >= LEAST_RATE_SECONDS else Totals()

    def _present_wait(self) -> float | None:
        """Estimate the wait in the last minute; None where it is not known: who starts is in the prefill lines."""
        known = self.prefilled_at > -inf or self._counts_admissions
        return self.wait(self._last_minute()) if self.queued and known else None

    def _states(self, *, prefilling: bool) -> Moment:
        profile, self._is_early = self._server.profile, False
        usage, queued = self.usage, self.queued
        running = None if self.running is None else self.running + self._joined
        target = profile.token_usage_target
        at_usage = UNKNOWN if usage is None else "at_target" if usage >= target else "below_target"
        elsewhere = sum(self.queues.values()) if self.queues else 0.0
        slow = self._waits_elsewhere = elsewhere > (queued or 0.0) and self._other_side_is_slow(elsewhere, running)
        compiles = (self.grammar_queued or 0.0) > max(queued or 0.0, elsewhere) and (usage is None or usage < target)
        wait = self._present_wait() if queued else None
        queue = self._queue(elsewhere if slow else queued, wait)
        limit = self._server.facts.limit(self.dp)
        if running is not None and limit is not None and running >= AT_LIMIT * limit:
            self._at_limit_at = self.spent
        if not (queued or slow or compiles):
            return Moment(queue, at_usage, UNKNOWN if queued is None else "no_queue", self._graphs())
        full_batch = self._full and (prefilling or not self._decoded)
        sample = self._sample(running, limit, wait, for_grammar=compiles, elsewhere=slow, full_batch=full_batch)
        why = reason(sample)
        self._is_early = why is EARLY
        return Moment(queue, at_usage, why.state, self._graphs())

    def _graphs(self) -> str:
        """Return how its decode batches run."""
        facts = self._server.facts
        if facts.without_graph or self.graph is not False:
            return facts.without_graph or ("replayed" if self.graph else UNKNOWN)
        is_larger = (self.running or 0.0) > (facts.largest_captured or ASSUMED_CAPTURED)
        return "beyond_captured" if is_larger else "eager"

    def _queue(self, queued: float | None, wait: float | None) -> str:
        profile = self._server.profile
        if not queued:
            return UNKNOWN if queued is None else "empty"
        if queued > profile.queue_upper:
            return "above_range"
        if profile.queue_wait_seconds is not None:
            if wait is None and self.prefilled_at == -inf and self._computing is None:
                return UNKNOWN  # a log of decode lines alone: the queue is judged by its wait
            if wait is not None and wait > profile.queue_wait_seconds:
                return "above_range"
        return "below_range" if queued < (profile.queue_lower or -inf) else "in_range"

    def _sample(
        self,
        running: float | None,
        limit: float | None,
        wait: float | None,
        *,
        for_grammar: bool,
        elsewhere: bool,
        full_batch: bool,
    ) -> Sample:
        """Return the figures by which one can say why requests wait."""
        facts, usage, target = self._server.facts, self.usage, self._server.profile.token_usage_target
        # A scrape sees a queue that the next batch takes. Where no admissions are counted, the queue is taken as it is seen.
        is_short = self._counts_admissions if wait is None else wait < SHORT_WAIT_SECONDS
        # Until as many requests have ended as run, it is not known how much of its reservation one uses.
        counts = self.prefilled_at > -inf or self._counts_admissions
        return Sample(
            running=running,
            joining=0.0 if self._computing is None else self._joining,
            limit=limit,
            at_limit_seconds=self.spent - self._at_limit_at,
            full_batch=full_batch,
            continues=self._goes_on,
            usage=usage,
            full_usage=self.usages.get("full", usage or 0.0),
            target=target,
            free=self._free,
            reserved=self._most_reserved,
            fits=running is None or usage is None or self._next_fits(running, usage, target),
            for_grammar=for_grammar,
            elsewhere=elsewhere,
            waits_by=facts.waits_by,
            passes=self._computing is not None and is_short,
            idle_seconds=self.spent - self._nothing_since,
            ended_seconds=-inf if self._fell_at is None else self._fell_at - self._nothing_since,
            early=counts and self._begun < 2 * (self.running or 0.0) * facts.micro_batches,
        )

    @property
    def _free(self) -> float:
        """Tokens of the KV cache that are free; 0 where its size is not known."""
        pool = self._server.facts.pool(self.dp) or self._pool
        return (1.0 - (self.usage or 0.0)) * pool if pool else 0.0

    @property
    def _most_reserved(self) -> float:
        """The most tokens that SGLang can have reserved for the running requests and the next ones."""
        return MOST_RESERVED * ((self.running or 0.0) + BESIDE)

    def _other_side_is_slow(self, elsewhere: float, running: float | None) -> bool:
        """Whether requests wait long for the other side of a pair: some always do, while their KV cache is transferred."""
        objective, recent = self._server.profile.queue_wait_seconds, self._last_minute()
        started, served = recent[self._admitted], recent[self._serves]
        if objective is None or not started:
            return elsewhere > MANY_ELSEWHERE * (running or 0.0)
        return elsewhere > started / served * objective

    def _next_fits(self, running: float, usage: float, target: float) -> bool:
        """Return whether one more request would leave the KV cache below its target.

        Small requests fill it smoothly: usage alone decides. A large one needs its prompt in whole pages and a page to decode into, and,
        where few prefixes are shared, what the mean running request has.
        """
        facts, totals = self._server.facts, self._server.totals
        pool, computed, cached = facts.pool(self.dp), totals["computed_tokens"], totals["cached_tokens"]
        shared = cached / (cached + computed) if cached else 0.0
        need = 0.0 if running <= 0 or shared > SHARED_PREFIXES else usage / (running * facts.micro_batches)
        answer = totals["decoded_tokens"] / totals["admitted_requests"] if totals["admitted_requests"] else 0.0
        tokens, requests = self.pending or (0.0, 0.0)
        prompt = (
            (1 - shared) * tokens / requests
            if tokens and requests
            else computed / max(totals["admitted_requests"], 1.0)
        )
        if pool and prompt:
            page = max(facts.size("page_size") or 1.0, 1.0)
            need = max(need, page * (ceil(prompt / page) + 1) / pool)
            whole = page * ceil((max(prompt, computed / max(totals["admitted_requests"], 1.0)) + answer) / page)
            if (
                facts.may_reserve_in_full
                and whole >= COARSE * pool
                and (running * facts.micro_batches + BESIDE) * whole > target * pool
            ):
                return False  # those that run will use what is free
        return need < COARSE or usage + need <= target


def _usages(figures: RankFigures) -> dict[str, float]:
    """Return the usage of each pool on a page."""
    usages = {"full": figures.full_usage, "swa": figures.swa_usage, "mamba": figures.mamba_usage}
    return {name: usage for name, usage in usages.items() if usage is not None}


@lru_cache(maxsize=1024)
def _state_keys(moment: Moment) -> tuple[str, tuple[str, ...]]:
    """Return the names of its activity, and of its state of each signal."""
    states = tuple(f"{signal}/{state}" for signal, state in zip(SIGNALS, moment, strict=True))
    return f"activity/{moment.activity}", states


@lru_cache
def _figure_keys(admission: str) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Return the names under which each of running, queued, usage and throughput is summed, with its seconds."""
    names = ("running", "queued", "usage", "throughput")
    return tuple(
        tuple((each, f"{each}:s") for each in ((name, f"{name}@{admission}") if admission in WAITS else (name,)))
        for name in names
    )


def _binned(running: float) -> str:
    return f"{running:.0f}" if running <= 256 else f"{ceil(running / 8) * 8}"


class Server:
    """One server: facts since its start, its schedulers, buckets, and what happened."""

    def __init__(self, profile: profiles.Profile, late: float = 0.0) -> None:
        self.base = profile
        self.profile = profile
        self.late = late  # seconds that lines may come after the second that they print: until then it is not counted
        self.facts = Facts()
        self.schedulers: dict[int | None, Scheduler] = {}
        self.buckets: deque[tuple[float, Totals]] = deque()
        # Sums of buckets that are over, by the windows that were asked for.
        self._ended: dict[tuple[float, float, float], Totals] = {}
        self.totals = Totals()  # counts of this start, without the open bucket
        self.counted = Totals()  # counts since the beginning: they never fall
        self.lives: dict[int | None, Totals] = {}  # the same of each scheduler, by `life`
        self.absent: set[int | None] = set()  # of these, schedulers that are not there now: nothing of them is shown
        self.by_page: set[str] = set()  # what is counted by its metrics, and not by its log
        self.capped: Counter[str] = Counter()  # what was dropped because there is too much of it
        self.unexplained: float | None = None  # a failure for want of memory whose phase may still be printed
        self.begin: float | None = None  # the first and the last time
        self.now: float | None = None
        self.starts = 0
        self.starting = False  # arguments were printed, and nothing served yet
        self.stopping = False  # it was asked to end
        self.ended = ""  # how it ended, in words, while it has not started again
        self.how_ended = ""  # the last end
        self.explanation: Event | None = None  # the line that may explain an end, while it did not work on
        self.end_explanation: Event | None = None  # that of the last end
        self.hangs: list[Hang] = []
        self.silences: list[Hang] = []
        self.last: dict[str, float] = {}  # when something happened last
        self.started_at: deque[float] = deque(maxlen=MOST_STARTS)
        self._repeated: dict[tuple[float | str | None, ...], tuple[float, Counter[Rank]]] = {}
        self._failed: dict[str, float] = {}
        self._failing_beside = 0.0  # requests that ran while health checks have failed
        self.counters = Counters()
        self._start_is_due = False  # the log shows a start that the counters do not show yet
        self._was_away = False  # nothing answered since the last page
        self.progress = Progress()
        self.logged_steps = 0.0  # decode steps by the log since the last scrape
        self._logged = Totals()  # rejected and failed requests that the log has shown, and no counter so far
        self.transfer: Event | None = None  # the last failed one whose line says why, else the last
        self.hicache: Event | None = None  # what its host or storage cache could not do, at last
        self._is_one_of_some = False  # the last failed one was a warning about "some requests"

    @property
    def objectives(self) -> Mapping[str, float | None]:
        """The profile's objective for each latency that is judged."""
        return {name: getattr(self.profile, f"{name}_seconds") for name in LATENCIES_JUDGED}

    @property
    def page(self) -> Scrape | None:
        """The last page of its metrics."""
        return self.counters.page

    def _take_page(self, page: Scrape, now: float) -> None:
        counters = self.counters
        self.now = now = now if self.now is None else max(self.now, now)
        self.begin = now if self.begin is None else self.begin
        longest = self.facts.size("max_queued_requests")
        queues = (*(rank.queued for rank in page.ranks), *(each.queued for each in self.schedulers.values()))
        full = longest is not None and max(filter(None, queues), default=0.0) >= QUEUE_FULL * longest
        # A start that the log shows, or that nothing answered before, makes smaller counters certain.
        counters.take(page, queue_is_full=full, is_new=self._start_is_due or self._was_away)
        if counters.restarted and not self._start_is_due:
            self._take_start(Event("arguments", now, arguments={}), now)
        if not page.counters_invalid:
            self._start_is_due = self._was_away = False
        self.facts.role_seen = page.engine_type or self.facts.role_seen
        self.facts.page = {rank.dp: rank for rank in page.ranks}
        self._count_gains(page, now)
        for rank in counters.ranks:
            scheduler = self._scheduler(rank.figures.dp)
            if scheduler is not None:
                scheduler.take_page(self._complete(rank), rank.gained, now)
        self._leave_out(page, now)
        self.progress = Progress() if counters.restarted else self.progress
        self.progress.take(
            page, counters, logged_steps=self.logged_steps, speculates=self.facts.is_on("speculative_algorithm"),
            interval=self.facts.size("stream_interval") or 0.0, now=now,
        )  # fmt: skip
        self.logged_steps = 0.0
        if counters.moved:
            self.last["work"] = now
            self._work_on(now)
        if self.ended or self.starting:
            self.ended, self.starting = "", False

    def _count_gains(self, page: Scrape, now: float) -> None:
        """Count what the whole server gained. What is counted is there from the first page on, as 0."""
        bucket, counts = self.bucket(now), self.counters.counts
        for name in PAGE_SUMS:
            if getattr(page, name, None) is not None:
                self.counted[name] += 0.0  # it is counted from here on
        if page.answered_requests is not None:
            self.counted["rejected_requests"] += 0.0
        for name in PAGE_SUMS:
            if (gained := counts.get(name)) is None:
                continue
            known = min(self._logged[name], max(gained, 0.0))  # the log's lines of the same requests came first
            self._logged[name] -= known
            more = gained - known
            bucket[name] += more
            self.counted[name] += max(more, 0.0)
            if more > 0:
                self.last[name] = now
        self._count_latencies(page, bucket)

    def _count_latencies(self, page: Scrape, bucket: Totals) -> None:
        for name, histogram in self.counters.latencies.items():
            for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
                bucket[f"{name}/{bound:g}"] += count
            bucket[f"{name}:s"] += histogram.seconds or 0.0
        for name, objective in self.objectives.items():
            if getattr(page, name) is not None:
                seen = self.counters.latencies.get(name)
                self.counted[f"latency_observations.{name}"] += 0.0 if seen is None else seen.observations
                self.counted[f"latency_breaches.{name}"] += (
                    0.0 if seen is None or objective is None else seen.above(objective)
                )

    def counts_by_now(self) -> Totals:
        """Return what was counted, with a failure whose phase may still be printed as one of an unknown phase."""
        counted = Totals(self.counted)
        if self.unexplained is not None:
            counted["out_of_memory.unknown"] += 1
        return counted

    @property
    def running_limit(self) -> float | None:
        """How many requests may run at once, of all schedulers together; None where unknown."""
        limits = [limit for dp in self.schedulers if (limit := self.facts.limit(dp)) is not None]
        return sum(limits) if limits else None

    def life(self, dp: int | None) -> Totals:
        """Return what a scheduler did since the beginning, restarts of SGLang and of this program included. None of it ever falls.

        | name | |
        |---|---|
        | `retraction_events` | of the log |
        | `retracted_requests` | of the log or of the server's counter |
        | `computed_tokens` `cached_tokens` | of the server's counter, else of the log; absent until one shows some |
        | `replayed_batches` `eager_batches` | all where the server counts them, else those of the log's decode lines |
        | `SIGNAL/STATE` | seconds in each state of `STATES`, in `idle` and in `unknown` |
        """
        life = self.lives.get(dp)
        if life is None:
            life, gone = Totals(), self.absent & self.lives.keys()
            if len(self.lives) > MOST_SCHEDULERS and gone:  # its place is for one that is there
                del self.lives[gone.pop()]
            if len(self.lives) <= MOST_SCHEDULERS:
                self.lives[dp] = life
        return life

    def _scheduler(self, dp: int | None) -> Scheduler | None:
        """Return a scheduler; None for one too many."""
        scheduler = self.schedulers.get(dp)
        if scheduler is None:
            if len(self.schedulers) >= MOST_SCHEDULERS:
                self.capped["dp_ranks"] += 1
                return None
            scheduler = self.schedulers[dp] = Scheduler(dp, self)
            self.absent.discard(dp)
        return scheduler

    def _leave_out(self, page: Scrape, now: float) -> None:
        """Drop the schedulers that are not on the page: what only pages showed is gone, and a rank of the log if the page names its ranks."""
        present, names_ranks = {rank.dp for rank in page.ranks}, any(rank.dp is not None for rank in page.ranks)
        for dp in self.schedulers.keys() - present:
            logged_at = self.schedulers[dp].logged_at
            if logged_at == -inf or (names_ranks and dp is not None and now - logged_at > LOGGED_SECONDS):
                del self.schedulers[dp]
                self.absent.add(dp)

    def lose(self, now: float) -> None:
        """Note that nothing answers: what the last scrape showed holds no longer."""
        self._stop(now, rest=True)
        self._was_away = True
        self.progress = Progress()

    def count_retracted(self, requests: float, now: float, dp: int | None = None) -> None:
        """Count retracted requests of a scheduler that only a counter shows."""
        bucket = self.bucket(now)
        for name in ("retraction_events", "retracted_requests"):
            bucket[name] += requests
        self.counted["retracted_requests"] += requests
        self.life(dp)["retracted_requests"] += requests
        self.last["retraction_events"] = now

    def forget(self, before: float) -> None:
        """Drop the sums from before a time."""
        while self.buckets and self.buckets[0][0] < before and len(self.buckets) > 1:
            self.buckets.popleft()
        if len(self.hangs) > MOST_STARTS:
            del self.hangs[:-MOST_STARTS]

    def _complete(self, rank: RankGains) -> RankGains:
        """Return the gains of a server's only scheduler with what older releases count of the whole server, when requests end."""
        if len(self.counters.ranks) > 1 or "computed_tokens" in rank.gained:
            return rank
        counts = self.counters.counts
        names = (("finished_answer_tokens", "decoded_tokens"), ("started_requests", "admitted_requests"))
        cached = counts.get("finished_cached_tokens", 0.0)
        computed = max(counts.get("finished_prompt_tokens", 0.0) - cached, 0.0)
        whole = {"computed_tokens": computed, "cached_tokens": cached}
        whole |= {name: counts[count] for count, name in names if count in counts}
        return replace(rank, gained={**whole, **rank.gained})

    def bucket(self, now: float) -> Totals:
        """Return the sums of ten seconds."""
        begin = now // BUCKET_SECONDS * BUCKET_SECONDS
        if not self.buckets or begin > self.buckets[-1][0]:
            if self.buckets:
                self.totals.add(self.buckets[-1][1])
            self.buckets.append((begin, Totals()))
        elif begin < self.buckets[-1][0]:  # a rank whose lines come late
            self._ended.clear()
            for start, totals in reversed(self.buckets):
                if start <= begin:
                    return totals
        return self.buckets[-1][1]

    def window(self, seconds: float, now: float | None = None) -> Totals:
        """Return the sums of the last `seconds` up to `now`, by default the present."""
        if not self.buckets:
            return Totals()
        end = (self.now or 0.0) if now is None else now
        since, last = end - seconds - BUCKET_SECONDS, self.buckets[-1]
        key = since // BUCKET_SECONDS, end // BUCKET_SECONDS, last[0]
        ended = self._ended.get(key)
        if ended is None:  # those that are over change no more
            ended = merged(totals for begin, totals in self.buckets if since < begin <= end and begin < last[0])
            if len(self._ended) >= MOST_WINDOWS:
                self._ended.clear()
            self._ended[key] = ended
        whole = Totals(ended)
        if since < last[0] <= end:
            whole.add(last[1])
        return whole

    def advance(self, now: float) -> None:
        """Count the time up to `now`."""
        self.now = now if self.now is None else max(self.now, now)
        for scheduler in self.schedulers.values():
            scheduler.advance(self.now - self.late)
        if self.unexplained is not None and self.now - self._failed.get("unknown", self.unexplained) > REPEAT_SECONDS:
            self.unexplained = None
            self.counted["out_of_memory.unknown"] += 1

    def take(self, seen: Event | Scrape, now: float = 0.0) -> None:
        """Take a line, at the time of the last one where it has none; or a page of the server's own metrics at `now`."""
        if isinstance(seen, Event):
            self._take_line(seen)
        else:
            self._take_page(seen, now)

    def _take_line(self, event: Event) -> None:  # noqa: C901, PLR0912, PLR0915 - one case for each kind
        now = event.time if event.time is not None else self.now
        if event.time is not None:
            self.begin = event.time if self.begin is None else self.begin
        now = 0.0 if now is None else now if self.now is None else max(now, self.now - self.late)
        self.now = now if self.now is None else max(now, self.now)
        name = event.word if event.kind == "end" else event.kind
        name = _LIVENESS_OF.get(name, name)
        if name in LIVENESS:  # several processes or lines say the same of one event
            name = f"liveness_events.{name}"
            self.counted[name] += now - self.last.get(name, -inf) > REPEAT_SECONDS
            self.last[name] = now
        match event.kind:
            case "decode" | "prefill":
                self._take_batch(event, now)
            case "retraction":
                self._take_retraction(event, now)
            case "out_of_memory":
                self._take_out_of_memory(event, now)
            case "arguments":
                self._take_start(event, now)
                self._start_is_due = True
            case "end":
                self._take_end(event, now)
            case "words":
                self._take_words(event, now)
            case "draining":
                self.stopping = True
                if event.figures.get("remaining") == 0:  # the figures of the last batch line are over
                    self._stop(now, rest=True)
                    for scheduler in self.schedulers.values():
                        scheduler.running = scheduler.queued = 0.0
            case "hang":
                self.count("watchdogs", now, event)
                if seconds := event.figures.get("seconds"):
                    self.hung(Hang(now - seconds, seconds, 0.0, 0.0), now)
            case "transfer":
                self._take_transfer(event, now)
            case kind if kind in COUNTED_KINDS and not self.is_repeated(event, now):
                self.count(kind, now, event)
                self.hicache = event if kind == "hicache" else self.hicache
                self.facts.take(event)
            case "rejected":
                self.count("rejected_requests", now, event)
            case "pause" | "resume":
                self.last[event.kind] = now
            case "server_error":
                self.count("server_errors", now, event)
            case "refused":
                self.count("refused", now, event)
                self.bucket(now)["refused_for_grammar"] += event.figures.get("grammar", 0.0)
            case "too_long":
                longest = (self.facts.size("context_length") or inf) - 8
                is_beyond = event.figures.get("most", 0.0) >= longest
                self.count("beyond_context" if is_beyond else "too_long", now, event)
                tokens = "beyond_context_tokens" if is_beyond else "too_long_tokens"
                self.bucket(now)[tokens] += event.figures.get("tokens", 0.0)
            case "health":  # the detokenizer sends nothing
                self._take_failed_check(event, now)
            case _ if event.marked and not self.starting and "work" in self.last:
                pass  # what SGLang prints at its start only, beside text of others: no setting changes by it
            case _:
                self.facts.take(event)
                self.starting = self.starting and event.kind != "ready"

    def count(self, name: str, now: float, event: Event, number: float = 1.0) -> None:
        """Count what happened, and what of it is marked."""
        bucket = self.bucket(now)
        bucket[name] += number
        if event.marked:
            bucket[f"marked.{name}"] += number
        self.last[name] = now
        if name in {"rejected_requests", "server_errors", "failed_transfers"}:
            self._logged[name] += number
        if name == "out_of_memory.unknown":
            self.unexplained = now
        else:
            self.counted[name] += number

    def _work_on(self, now: float) -> None:
        """Note work: whoever works on long after it was asked to end, or after an exception, has not ended by it."""
        if now - self.last.get("liveness_events.draining", -inf) > WORKS_ON_SECONDS:
            self.stopping = False
        if now - self.last.get("words", -inf) > WORKS_ON_SECONDS:
            self.explanation = None

    def _take_batch(self, event: Event, now: float) -> None:
        rank = event.rank
        scheduler = self._scheduler(rank.dp)
        if scheduler is None or scheduler.repeats(event):
            return
        self.last["work"] = now
        if self.stopping or self.explanation is not None:
            self._work_on(now)
        if self.ended or self.starting:
            self.ended, self.starting = "", event.kind != "decode" and self.starting and not self.facts.ready
            self.advance(now)
        if not self.facts.arguments:  # the form of the lines shows the guide's edition
            is_later = not event.figures.keys().isdisjoint({"graph", "pending"})
            if is_later or event.kind == "decode":
                self.facts.first_form = not is_later
            if self.facts.is_first_edition != (self.profile is not self.base):
                self.profile = self.base.for_server(is_first_edition=self.facts.is_first_edition, role=self.facts.role)
        scheduler.take(event, now)

    def _take_retraction(self, event: Event, now: float) -> None:
        figures = event.figures
        if figures.get("testing") or self.is_repeated(event, now):
            return
        scheduler = self._retracts(event)
        if scheduler is not None:
            scheduler.retract(event, now)
        life = self.life(scheduler.dp if scheduler is not None else event.rank.dp)
        requests = figures.get("requests", 0.0)
        self.count("retraction_events", now, event)
        self.count("retracted_requests", now, event, requests)
        life["retraction_events"] += 1
        life["retracted_requests"] += requests
        if "ratio_after" in figures:
            self.bucket(now).observe("ratio_after", figures["ratio_after"])

    def _retracts(self, event: Event) -> Scheduler | None:
        """Return the scheduler of a retraction; None where it is not known."""
        only = next(iter(self.schedulers.values())) if len(self.schedulers) == 1 else None
        return self.schedulers.get(event.rank.dp) or only

    def with_moment(self, event: Event) -> Event:
        """Return a retraction that is to wait, with the usage of this moment."""
        scheduler = self._retracts(event)
        usage = {} if scheduler is None or scheduler.usage is None else {"usage": scheduler.usage}
        return replace(event, figures={**usage, **event.figures})

    def is_repeated(self, event: Event, now: float) -> bool:
        """Whether another rank has printed this event: its n-th line is the n-th line of any other. Of a request there is one."""
        room = event.figures.get("room")
        key = (
            (event.kind, event.rank.dp, *(event.figures.get(name) for name in _ALIKE))
            if room is None
            else (event.kind, room)
        )
        last, lines = self._repeated.pop(key, (now, Counter[Rank]()))
        if now - last > REPEAT_SECONDS and room is None:
            lines = Counter[Rank]()
        before = max(lines.values(), default=0)
        lines[event.rank] += 1
        self._repeated[key] = (now, lines)
        if len(self._repeated) > MOST_REPEATED:
            self._repeated.pop(next(iter(self._repeated)))
        return lines[event.rank] <= before or (room is not None and before > 0)

    def _take_out_of_memory(self, event: Event, now: float) -> None:
        """Count a failure once: it is logged and raised, by each rank and by the parent process, and not every line has its phase."""
        recent = {phase for phase, at in self._failed.items() if now - at <= REPEAT_SECONDS}
        phase = event.word or "unknown"
        self.bucket(now).most(
            "failed_batch", max((each.running or 0.0 for each in self.schedulers.values()), default=0.0)
        )
        if held := event.figures.get("held_elsewhere_gb"):
            self.bucket(now).most("held_elsewhere_gb", held)
        if phase == "unknown" and recent - {phase}:
            return
        self._failed[phase] = now
        if phase in recent:
            return
        if "unknown" in recent:
            del self._failed["unknown"]
            if self.unexplained is not None:
                self.bucket(self.unexplained)["out_of_memory.unknown"] -= 1
            self.unexplained = None
        self.end_explanation = self.explanation
        self.count(f"out_of_memory.{phase}", now, event)

    def _take_end(self, event: Event, now: float) -> None:
        if self.stopping and event.word in {"process_died", "aborted"}:
            return  # how processes end that were asked to is no crash
        if not self.ended:
            self.count("ends", now, event)
            self.last["work_before_the_end"] = self.last.get("work", -inf)
        self.ended = self.how_ended = event.text or self.ended or ENDS.get(event.word, event.word)
        self.end_explanation = self.explanation
        self._stop(now)

    def settle(self) -> None:
        """Take the last line of a log as an end, if it explains one and nothing worked on after it."""
        said = self.explanation
        if said is None or self.ended or not said.is_sure or said.word == "hang" or said.ending.weight < CAUSE:
            return
        if self._failed and not said.denies_memory:
            return  # the failure is the finding
        if self.last.get("work", -inf) <= (inf if said.time is None else said.time):
            self._take_end(Event("end", said.time, word="aborted", marked=said.marked), self.now or 0.0)

    def _take_words(self, event: Event, now: float) -> None:
        """Take a line that may explain an end: before it, or after its first line."""
        said = replace(event, time=now, word=event.word if event.word in ENDINGS else "unknown")
        self.last["words"] = now
        if self.explanation is None or said.explains_better(self.explanation):
            self.explanation = said
            if self.ended or any(now - at <= REPEAT_SECONDS for at in self._failed.values()):
                self.end_explanation = said

    def _take_transfer(self, event: Event, now: float) -> None:
        """Count a request whose KV cache did not arrive once: every rank prints it, and a warning without a request may stand beside it."""
        self.explain_transfer(event, now)
        room, last = event.figures.get("room"), self.last.get("failed_transfers", -inf)
        if "attempt" in event.figures or self.is_repeated(event, now):
            return
        if now - last > REPEAT_SECONDS or (room is not None and not self._is_one_of_some):
            self.count("failed_transfers", now, event)
        self._is_one_of_some = room is None

    def explain_transfer(self, event: Event, now: float) -> None:
        """Note why a transfer failed; that of another rank is none."""
        known = self.transfer
        is_old = known is None or now - (known.time or now) > REPEAT_SECONDS
        if known is None or says_why(event.text) or (is_old and not says_why(known.text)):
            self.transfer = event

    def _take_start(self, event: Event, now: float) -> None:
        self.advance(now)
        self._stop(now)
        self.starts += 1
        self.count("server_starts", now, event)
        self.started_at.append(now)
        self.facts = Facts(version=self.facts.version)
        self.facts.take(event)
        self.profile = self.base.for_server(is_first_edition=self.facts.is_first_edition, role=self.facts.role)
        self.schedulers.clear()
        self._failed.clear()
        self._logged.clear()
        self.totals = Totals()
        self.starting, self.stopping, self.ended, self.explanation = True, False, "", None
        self.transfer = self.hicache = None

    def _stop(self, now: float, *, rest: bool = False) -> None:
        """Let no scheduler's figures hold any longer; `rest`: they are over, too."""
        for scheduler in self.schedulers.values():
            scheduler.advance(now)
            scheduler.at = None
            if rest:
                scheduler.rest()

    def _take_failed_check(self, event: Event, now: float) -> None:
        """Count a failed health check where pages show that nothing is sent, else once checks have failed for a minute: a long prefill passes."""
        at, since = now if event.time is None else event.time, self.progress.failing_since
        self.progress.check(at, answered=False)
        if self.progress.failing_since != since:
            self._failing_beside = 0.0
        if "silent" not in event.figures or self.last.get("pause", -inf) > self.last.get("resume", -inf):
            return
        since = self.progress.failing_since or at
        running = max(self._failing_beside, sum(each.running or 0.0 for each in self.schedulers.values()))
        self._failing_beside = running
        if running and (self.page is not None or at - since >= STUCK_SECONDS):
            self.count("health_failures", now, event)
            # An idle server sends nothing either.
            begin = min(max(at - event.figures["silent"], since - CHECK_GAP_SECONDS), since)
            self.hung(Hang(begin, at - begin, running, running), now)

    # What schedulers ask

    def another_decides(self, dp: int | None, running: float, now: float) -> bool:
        """Whether a step ran without a graph because of another rank of DP attention: one prefilled, or has a larger batch."""
        if dp is None or (self.facts.knows_arguments and self.facts.attention_ranks < 2):
            return False
        largest = self.facts.largest_captured or ASSUMED_CAPTURED
        others = max((each.running or 0.0 for each in self.schedulers.values() if each.dp != dp), default=0.0)
        return self.prefilled_elsewhere(dp, now - 2.0) or running <= largest < others

    def prefilled_elsewhere(self, dp: int | None, since: float) -> bool:
        """Whether another rank has prefilled since: with DP attention all ranks wait for it."""
        return any(each.dp != dp and each.prefilled_at >= since for each in self.schedulers.values())

    def hangs_on(self, hang: Hang, now: float) -> None:
        """Lengthen the last hang: pages show that it goes on."""
        if self.hangs and self.hangs[-1].until >= hang.begin:
            self.hung(hang._replace(before=self.hangs[-1].before, after=self.hangs[-1].after), now)

    def hung(self, hang: Hang, now: float) -> None:
        """Note a hang; several schedulers have the same, and each failed health check shows it longer."""
        if self.hangs and self.hangs[-1].until >= hang.begin:
            last = self.hangs.pop()
            begin = min(last.begin, hang.begin)
            hang = Hang(begin, max(last.until, hang.until) - begin, last.before, hang.after)
        self.hangs.append(hang)
        self.bucket(now)["hangs"] += 1
        self.last["hangs"] = now


_ALIKE = ("requests", "aborted", "gained", "ratio_before", "ratio_after")


def _place(rank: Rank) -> tuple[int, int]:
    return rank.pp or 0, rank.tp or 0


def mean_prompt(totals: Totals) -> float | None:
    """Return the tokens of a mean prompt, cached ones included; None where unknown."""
    return (
        (totals["computed_tokens"] + totals["cached_tokens"]) / totals["admitted_requests"]
        if totals["admitted_requests"]
        else None
    )


# Whether it makes progress


@dataclass(slots=True)
class Progress:
    """Whether each stage of one start makes progress: the tokenizer takes requests, the scheduler computes, the detokenizer sends tokens."""

    sent_at: float | None = None  # something was sent last
    worked_at: float | None = None  # a scheduler did something last
    proven_at: float | None = None  # since when tokens must have been sent
    open_at: float | None = None  # since when requests are open, and nothing was sent
    idle_at: float | None = None  # since when the schedulers are idle beside them
    failing_since: float | None = None  # health checks
    failed_at: float = -inf
    paused_at: float | None = None
    resumed_at: float = -inf
    requests: float | None = None
    gave_up: float = 0.0  # requests, since something was sent
    _works: bool = False  # requests run or wait
    _steps: float = 0.0  # decode steps since something was sent, of requests that may have been there all the time
    _unsent: float = 0.0  # decode steps since something was sent
    _sent: float | None = None
    _shown: object = None  # what a scheduler shows
    _pauses: tuple[float, float] | None = None

    def take(
        self, page: Scrape, counters: Counters, *, logged_steps: float, speculates: bool, interval: float, now: float
    ) -> None:
        """Take a page. `logged_steps`: decode steps that the log shows since the page before; `interval`: --stream-interval."""
        if page.posted_requests is not None:
            self._see_pauses(page.pauses or 0.0, page.resumptions or 0.0, now)
        works = sum((rank.running or 0) + (rank.queued or 0) for rank in page.ranks)
        self._works, self.requests = works > 0 and page.sent is not None, page.open_requests or works
        excused = any((rank.grammar_queued or 0) + sum(rank.queues.values()) > 0 for rank in page.ranks)
        before, self._shown = self._shown, (page.scheduled, [_gauges(rank) for rank in page.ranks])
        steps = max([logged_steps, *(rank.steps for rank in counters.ranks)])
        moved = page.scheduled is None and bool(counters.moved)
        if moved or steps > 0 or not works or before != self._shown or excused:
            self.worked_at = now
        if page.sent is None or page.sent != self._sent:
            self._sent = page.sent
            self.sent_at, self._steps, self._unsent, self.gave_up = now, 0.0, 0.0, 0.0
            self.proven_at = self.open_at = self.idle_at = self.failing_since = None
            return
        aborted = counters.counts.get("aborted_requests", 0.0)
        self.gave_up += aborted
        # Requests that decode after others gave up may be younger.
        self._steps = 0.0 if aborted else self._steps + steps
        self._unsent += steps
        enough = max(SPECULATED_STEPS if speculates else STEPS_TO_OUTPUT, 1.2 * interval) + DECODE_LOG_INTERVAL
        if self.proven_at is None and works and self._steps >= enough:
            self.proven_at = now
        waits = bool(page.open_requests) and not excused
        self.open_at = (self.open_at or now) if waits else None
        self.idle_at = (self.idle_at or now) if waits and not works else None

    def _see_pauses(self, pauses: float, resumptions: float, now: float) -> None:
        before, self._pauses = self._pauses, (pauses, resumptions)
        if before is not None and resumptions > before[1]:
            self.paused_at, self.resumed_at, self.failing_since = None, now, None
        elif pauses > (resumptions if before is None else before[0]):
            self.paused_at = self.paused_at or now

    def check(self, now: float, *, answered: bool, lasted: float = CHECK_SECONDS) -> None:
        """Take a health check, of the log or of the exporter's own: a busy scheduler answers it alone, an idle one passes it on."""
        if answered:
            self.failing_since, self.gave_up = None, 0.0
            if self.idle_at is not None or self.open_at is None:
                self.open_at = self.idle_at = None
        else:
            if self.failing_since is None or now - self.failed_at > CHECK_GAP_SECONDS:
                self.failing_since = now - lasted
            self.failed_at = now

    def is_suspicious(self, now: float) -> bool:
        """Whether a health check may show more: requests are open or were given up, and nothing moves."""
        if self.sent_at is None or now - self.sent_at < SUSPECT_SECONDS:
            return False
        return _lasts(self.open_at, SUSPECT_SECONDS, now) or self.gave_up > 0 or self.failing_since is not None

    def silence(self, now: float) -> float:
        """Return for how many seconds nothing was sent although requests run; 0 for a while that is usual."""
        seconds = 0.0 if self.sent_at is None or not self._works else now - self.sent_at
        return seconds if seconds >= UNUSUAL_SECONDS else 0.0

    def stuck(self, now: float) -> Hang | None:
        """Return which stage hangs; a paused server hangs only if it stays paused."""
        stage, since = self._stands(now)
        if stage is None or now - self.resumed_at < STUCK_SECONDS:
            return None
        if self.paused_at is not None:
            if now - self.paused_at < PAUSE_SECONDS:
                return None
            stage, since = "scheduler", self.paused_at
        requests = self.requests or 0.0
        return Hang(since, now - since, requests, requests, stage, is_pause=self.paused_at is not None)

    def _stands(self, now: float) -> tuple[Stage | None, float]:
        """Return which stage does nothing, and since when."""
        if _lasts(self.proven_at, PROVEN_SECONDS, now):
            return "detokenizer", self.sent_at or now
        if _lasts(self.worked_at, STUCK_SECONDS, now):
            return "scheduler", self.worked_at or now
        if _lasts(self.open_at, STUCK_SECONDS, now) and _lasts(self.idle_at, UNUSUAL_SECONDS, now):
            return "detokenizer" if self._unsent else "tokenizer", self.open_at or now
        if _lasts(self.failing_since, STUCK_SECONDS, now) and now - self.failed_at <= CHECK_GAP_SECONDS:
            return "scheduler", self.failing_since or now
        return None, now


def _lasts(since: float | None, seconds: float, now: float) -> bool:
    return since is not None and now - since >= seconds
