"""What is counted and summed of a server: every name, with its unit and its source. Pure.

A name that is not declared here is an error where it is read and where it is written. One figure has one name, from the
server's page or a line of its log to our `/metrics` and the report.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import takewhile
from math import inf
from typing import Literal, NamedTuple, TypeAlias

from sglang_tuning_exporter.core.events import COUNTED_KINDS, OUT_OF_MEMORY_PHASES

BUCKET_SECONDS = 10.0
MOST_WINDOWS = 16  # whose sums are kept
IDLE, UNKNOWN = "idle", "unknown"
SIGNALS = ("queue", "token_usage", "admission", "cuda_graph")
WAITS = (
    "held_back", "running_limit", "pool_full", "hybrid_pool_full", "prefill_bound", "grammar_queue", "pd_queue",
    "standing_still",
)  # fmt: skip
STATES = {
    "activity": ("serving",),
    "queue": ("empty", "below_range", "in_range", "above_range"),
    "token_usage": ("below_target", "at_target"),
    "admission": ("no_queue", *WAITS),
    "cuda_graph": ("replayed", "beyond_captured", "eager", "disabled", "unsupported"),
}  # of each signal; each is also `idle` and `unknown`. `activity`: whether it serves at all
LIVENESS = (
    "ready", "draining", "launch_failed", "process_died", "scheduler_exception", "watchdog_timeout",
    "health_check_failed",
)  # fmt: skip
LATENCIES_JUDGED = ("time_to_first_token", "inter_token")
LATENCIES = (*LATENCIES_JUDGED, "request_latency", "queue_time")

# How two values of one name become one. A `sum` is added, of `most` the largest is kept. An `event` is a sum with a
# second one, `marked.NAME`: the events beside text that clients can write. A `mean` has its number of values beside it,
# `NAME:n`. A `figure` is weighed with the seconds that it held, `NAME:s`, over the serving time and over each reason
# for waiting, `NAME@REASON`.
Kind: TypeAlias = Literal["sum", "most", "event", "mean", "figure"]
_RANK = re.compile(r"None|\d+")  # a DP rank; None is a server without
_NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?|inf")


class Sum(NamedTuple):
    """One name, or with `members` one for each of them: a closed set, or a pattern."""

    name: str
    unit: str
    source: str
    kind: Kind = "sum"
    members: tuple[str, ...] | re.Pattern[str] = ("",)


SUMS: tuple[Sum, ...] = (
    # Batches
    Sum("lines", "lines", "batch lines; of a page, as many as its counters stand for"),
    Sum("decode_lines", "lines", "the same, of decode batches"),
    Sum("prefill_lines", "lines", "the same, of prefill batches"),
    Sum("full_lines", "lines", "the same, of prefill batches that were full"),
    Sum("sequences", "requests", "prefill batches; one whose prompt continues is counted again"),
    Sum("admitted_requests", "requests", "prefill batches, else the page: requests that started"),
    Sum("computed_tokens", "tokens", "prefill batches, else the page: prompt tokens that were computed"),
    Sum("cached_tokens", "tokens", "prefill batches, else the page: prompt tokens of the prefix cache"),
    Sum("repeated", "tokens", "prefill batches: of these, prompts that were whole in the cache"),
    Sum("decoded_tokens", "tokens", "decode batches, else the page: generated tokens"),
    Sum("accepted", "tokens", "decode batches, else the page: tokens of a step with speculative decoding", "mean"),
    Sum("peak", "tokens/s", "prefill batches, else the page: the most in any second of this start", "most"),
    Sum("most_prefill", "tokens", "prefill batches, where the start is not known", "most"),
    Sum(
        "chunk_seen",
        "tokens",
        "prefill batches, where the start is not known: full ones after which a prompt continues",
        "most",
    ),
    Sum("most_running", "requests", "batches and pages", "most"),
    Sum("most_queued", "requests", "batches and pages", "most"),
    Sum("most_usage", "ratio", "batches and pages", "most"),
    Sum("replayed_most", "requests", "decode batches that replayed a CUDA graph", "most"),
    Sum("eager_inverse", "1/requests", "decode batches that did not: one over the smallest", "most"),
    Sum("replayed_batches", "batches", "the page, else the log: decode batches that replayed a CUDA graph"),
    Sum("eager_batches", "batches", "the page, else the log: decode batches that did not"),
    # Of each scheduler
    Sum("admitted_requests/", "requests", "as `admitted_requests`", members=_RANK),
    Sum("replayed_batches/", "batches", "as `replayed_batches`", members=_RANK),
    Sum("eager_batches/", "batches", "as `eager_batches`", members=_RANK),
    Sum("serves/", "seconds", "time: something ran or waited", members=_RANK),
    Sum("waits/", "seconds", "time: requests waited", members=_RANK),
    Sum("waited/", "requests x seconds", "time: requests that waited", members=_RANK),
    # What happened
    Sum("retraction_events", "events", "the log, else the page", "event"),
    Sum("retracted_requests", "requests", "the log, else the page", "event"),
    Sum("usage_before", "ratio", "the usage just before retractions", "mean"),
    Sum("ratio_after", "ratio", "the log: the new-token ratio just after retractions", "mean"),
    Sum("out_of_memory.", "failures", "the log", "event", OUT_OF_MEMORY_PHASES),
    Sum("held_elsewhere_gb", "GB", "the log: what other processes held at a failure", "most"),
    Sum("failed_batch", "requests", "those that ran at a failure for want of memory", "most"),
    Sum("server_starts", "starts", "the log, else the page", "event"),
    Sum("ends", "ends", "the log: those that nobody asked for", "event"),
    Sum("watchdogs", "events", "the log", "event"),
    Sum("health_failures", "checks", "the log", "event"),
    Sum("hangs", "hangs", "the log or the page"),
    Sum("liveness_events.", "events", "the log", members=LIVENESS),
    Sum("rejected_requests", "requests", "the page, else the log", "event"),
    Sum("server_errors", "requests", "the page, else the log", "event"),
    Sum("failed_transfers", "requests", "the page, else the log", "event"),
    Sum("refused", "requests", "the log: invalid ones", "event"),
    Sum("refused_for_grammar", "requests", "the log: of these, for want of a grammar backend"),
    Sum("too_long", "requests", "the log: prompts longer than the KV cache", "event"),
    Sum("too_long_tokens", "tokens", "the log: of these prompts"),
    Sum("beyond_context", "requests", "the log: prompts longer than the context", "event"),
    Sum("beyond_context_tokens", "tokens", "the log: of these prompts"),
    *(Sum(kind, "events", "the log: lines of this kind", "event") for kind in COUNTED_KINDS),
    Sum("unreadable", "lines", "the log: of a known kind, with words of no known release"),
    # The page counts these of the whole server
    Sum("aborted_requests", "requests", "the page"),
    Sum("started_requests", "requests", "the page: got their first token"),
    Sum("finished_requests", "requests", "the page"),
    Sum("finished_prompt_tokens", "tokens", "the page"),
    Sum("finished_answer_tokens", "tokens", "the page"),
    Sum("generation_posts", "requests", "the page: over HTTP"),
    Sum("tokenless_requests", "requests", "the page: ended without a token, at least"),
    *(Sum(f"{latency}/", "observations", "the page: up to this bound", members=_NUMBER) for latency in LATENCIES),
    *(Sum(f"{latency}:s", "seconds", "the page: their sum") for latency in LATENCIES),
    Sum("latency_observations.", "observations", "the page", members=LATENCIES_JUDGED),
    Sum("latency_breaches.", "observations", "the page: above the profile's objective", members=LATENCIES_JUDGED),
    # As time passes
    *(Sum(f"{signal}/", "seconds", "time", members=(*states, IDLE, UNKNOWN)) for signal, states in STATES.items()),
    Sum("running", "requests", "time", "figure"),
    Sum("queued", "requests", "time", "figure"),
    Sum("usage", "ratio", "time", "figure"),
    Sum("throughput", "tokens/s", "time", "figure"),
    Sum("usage2@", "ratio squared x seconds", "time: while the new-token ratio holds requests back", members=WAITS),
    Sum("prefilling", "seconds", "time: prompts are computed"),
    Sum("early", "seconds", "time: requests wait, and too few have ended to show why"),
    Sum("elsewhere", "seconds", "time: requests wait for the other side of a pair"),
    Sum("mamba", "seconds", "time: the mamba cache is what is full"),
    Sum("batch/", "seconds", "time: with so many running", members=_NUMBER),
    Sum("held/", "seconds", "time: the same while the new-token ratio holds requests back", members=_NUMBER),
    # Of a stretch, by what else is in it
    Sum("limit_seen", "requests", "the view: a batch that stays at one size"),
    Sum("starts_recently", "starts", "the view: in half an hour, with the same arguments"),
)
# Those that a page shows of the whole server, or by which `server.Counters` finds them.
PAGE_SUMS = (
    "aborted_requests", "started_requests", "finished_requests", "finished_prompt_tokens", "finished_answer_tokens",
    "generation_posts", "tokenless_requests", "rejected_requests", "server_errors", "failed_transfers",
)  # fmt: skip
# When something happened last is kept under the name of its sum, or one of these.
MOMENTS = frozenset({"batch", "work", "work_before_the_end", "words", "requests", "pause", "resume", "back"})
# The names of a state file of an earlier release.
_FORMER = {
    "retractions": "retraction_events", "retracted": "retracted_requests", "rejected": "rejected_requests",
    "starts": "server_starts",
    "computed": "computed_tokens", "cached": "cached_tokens", "replayed": "replayed_batches", "eager": "eager_batches",
    **{f"liveness.{event}": f"liveness_events.{event}" for event in LIVENESS},
    **{f"{latency}_observed": f"latency_observations.{latency}" for latency in LATENCIES_JUDGED},
    **{f"{latency}_late": f"latency_breaches.{latency}" for latency in LATENCIES_JUDGED},
}  # fmt: skip


def _expanded(declared: Sum) -> Iterator[str]:
    """Give all names of a sum, but those of an open family."""
    members = declared.members if isinstance(declared.members, tuple) else ()
    for name in (declared.name + member for member in members):
        yield name
        match declared.kind:
            case "event":
                yield f"marked.{name}"
            case "mean":
                yield f"{name}:n"
            case "figure":
                yield f"{name}:s"
                yield from (f"{name}@{wait}{end}" for wait in WAITS for end in ("", ":s"))


NAMES = frozenset(name for declared in SUMS for name in _expanded(declared))
_OPEN = {each.name: each.members for each in SUMS if isinstance(each.members, re.Pattern)}
_MOST = frozenset(each.name for each in SUMS if each.kind == "most")


@lru_cache(maxsize=4096)
def is_declared(name: str) -> bool:
    """Whether there is a sum of this name."""
    if name in NAMES:
        return True
    head, slash, member = name.partition("/")
    members = _OPEN.get(head + slash)
    return members is not None and members.fullmatch(member) is not None


def present_name(name: str) -> str | None:
    """Return the name of a sum in a saved state, of this release or an earlier one; None where it is none."""
    name = _FORMER.get(name, name)
    return name if is_declared(name) else None


class UndeclaredSumError(KeyError):
    """A sum was read or written under a name that is not declared."""


class Totals(dict[str, float]):
    """Sums by name: seconds of a state (`queue/empty`), figure x seconds (`running`), counts (`retraction_events`)."""

    def __missing__(self, name: str) -> float:
        if not is_declared(name):
            raise UndeclaredSumError(f"{name} is not declared in core/sums.py")
        return 0.0

    def add(self, other: Totals) -> None:
        """Add another one."""
        if not self:
            self.update(other)
            return
        get = self.get
        for name, value in other.items():
            before = get(name)
            if before is None:
                self[name] = value
            elif name not in _MOST:
                self[name] = before + value
            elif value > before:
                self[name] = value

    def observe(self, name: str, value: float) -> None:
        """Add a value of which the mean is asked: `name` over `name:n`."""
        self[name] += value
        self[f"{name}:n"] += 1

    def most(self, name: str, value: float) -> None:
        """Keep the largest."""
        self[name] = max(self[name], value)

    def under(self, head: str) -> dict[str, float]:
        """Return what is named `head/…`, by the rest of its name."""
        return {name[len(head) + 1 :]: value for name, value in self.items() if name.startswith(head + "/")}

    def known(self, signal: str) -> float:
        """Return the seconds in which something ran or waited and a signal was known."""
        return sum(self.get(f"{signal}/{state}", 0.0) for state in STATES[signal])

    def share(self, signal: str, *states: str) -> float | None:
        """Return the share of states in the known serving time; None without any."""
        known = self.known(signal)
        return sum(self[f"{signal}/{state}"] for state in states) / known if known > 0 else None

    def mean(self, figure: str, when: str = "") -> float | None:
        """Return the mean of a figure over the serving time, or over one state of admission."""
        name = f"{figure}@{when}" if when else figure
        seconds = self[f"{name}:s"]
        return self[name] / seconds if seconds > 0 else None


def merged(buckets: Iterable[Totals]) -> Totals:
    """Return the sum of buckets."""
    whole = Totals()
    for totals in buckets:
        whole.add(totals)
    return whole


class Window:
    """The sum of the last buckets while its begin moves on: each bucket is added about twice, however often one asks.

    `_older` has a sum for each of its buckets, of this one and all later ones of that part, the oldest last. Newer
    buckets are added to one sum. The oldest bucket leaves with its sum. Once `_older` is empty, it is made of the
    newer ones.
    """

    def __init__(self, since: float) -> None:
        self.since = since
        self._last = since  # the begin of the newest bucket that it has
        self._older: list[tuple[float, Totals]] = []
        self._newer: list[tuple[float, Totals]] = []
        self._sum = Totals()  # of the newer ones

    def move(self, buckets: deque[tuple[float, Totals]], since: float, open_at: float) -> Totals:
        """Return the sum of the buckets that began after `since`; the one that began at `open_at` may still change."""
        self.since = since
        recent = takewhile(lambda bucket: bucket[0] > max(since, self._last), reversed(buckets))
        added = [bucket for bucket in recent if bucket[0] < open_at]
        for begin, totals in reversed(added):
            self._newer.append((begin, totals))
            self._sum.add(totals)
            self._last = begin
        while self._older and self._older[-1][0] <= since:
            self._older.pop()
        if not self._older and self._newer and self._newer[0][0] <= since:
            self._turn()
        total = Totals(self._older[-1][1]) if self._older else Totals()
        total.add(self._sum)
        return total

    def _turn(self) -> None:
        """Make the older part of the newer buckets that are still in the window."""
        total = Totals()
        for begin, totals in reversed(self._newer):
            if begin <= self.since:
                break
            total = Totals(total)
            total.add(totals)
            self._older.append((begin, total))
        self._newer, self._sum = [], Totals()


class Sums:
    """What is summed of one server: in buckets of ten seconds, of the present start, and since the beginning.

    Any stretch of time is a sum of buckets. Schedulers collect what their lines add to a bucket, so whoever asks for
    sums settles them first.
    """

    def __init__(self) -> None:
        self.buckets: deque[tuple[float, Totals]] = deque()  # by their first second
        self.of_start = Totals()  # without the last bucket
        self.counted = Totals()  # since the beginning: they never fall
        self.last: dict[str, float] = {}  # when something happened last
        self.by_page: set[str] = set()  # what pages count, so that lines need not
        self.logged_steps = 0.0  # decode steps by the log since the last page
        self._open, self._begin, self._end = Totals(), -inf, -inf  # the last bucket
        self._windows: dict[float, Window] = {}  # by their seconds; they have the buckets that are over
        self._unsettled: list[Callable[[], None]] = []

    def at(self, now: float) -> Totals:
        """Return the bucket of a time."""
        if self._begin <= now < self._end:
            return self._open
        begin = now // BUCKET_SECONDS * BUCKET_SECONDS
        if begin > self._begin:
            self.settle()
            self.of_start.add(self._open)
            self._open, self._begin, self._end = Totals(), begin, begin + BUCKET_SECONDS
            self.buckets.append((begin, self._open))
            return self._open
        self._windows.clear()
        for start, totals in reversed(self.buckets):  # a rank whose lines come late
            if start <= begin:
                return totals
        return self._open

    def settle_later(self, settle: Callable[[], None]) -> None:
        """Have collected sums added to their bucket before anybody asks for it."""
        self._unsettled.append(settle)

    def settle(self) -> None:
        """Add what schedulers have collected."""
        while self._unsettled:
            self._unsettled.pop()()

    def take_logged_steps(self) -> float:
        """Return the decode steps by the log since this was last asked."""
        self.settle()
        steps, self.logged_steps = self.logged_steps, 0.0
        return steps

    def begin_start(self) -> None:
        """Begin the sums of a new start."""
        self.settle()
        self.of_start = Totals()

    def window(self, seconds: float, end: float) -> Totals:
        """Return the sums of some seconds up to a time."""
        self.settle()
        since = end - seconds - BUCKET_SECONDS
        if end < self._begin:
            return merged(totals for begin, totals in self.buckets if since < begin <= end)
        window = self._windows.get(seconds)
        if window is None or since < window.since:
            if len(self._windows) >= MOST_WINDOWS:
                self._windows.clear()
            window = self._windows[seconds] = Window(since)
        total = window.move(self.buckets, since, self._begin)
        if since < self._begin:
            total.add(self._open)
        return total

    def forget(self, before: float) -> None:
        """Drop the buckets from before a time, but the last one."""
        while self.buckets and self.buckets[0][0] < before and len(self.buckets) > 1:
            self.buckets.popleft()
