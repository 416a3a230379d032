"""A server that runs, as its time passes: lines of its log and pages of its metrics in, judgements and alerts out.

Pure; times are unix seconds.

With the log alone a line counts at once. With metrics SGLang's own counters have the last word: a line about a
retraction, an end or a start waits for the next scrape. Nothing that was counted is taken back; a line that a scrape
refutes is counted in `doubtful` alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from typing import ClassVar, Literal, NamedTuple, TypeAlias

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core import answer, judge
from sglang_tuning_exporter.core.alerts import Clocks, Words
from sglang_tuning_exporter.core.diagnoses import BY_ID
from sglang_tuning_exporter.core.events import OUT_OF_MEMORY_PHASES, Event, aged, is_count, lists, to_json
from sglang_tuning_exporter.core.findings import Finding, Judgement, Start
from sglang_tuning_exporter.core.ledger import REQUESTS, RETRACTED, SETTLED_SECONDS, UNSETTLED_SECONDS
from sglang_tuning_exporter.core.server import WORKS_ON_SECONDS, Server
from sglang_tuning_exporter.core.sums import LATENCIES_JUDGED, present_name
from sglang_tuning_exporter.core.times import Span
from sglang_tuning_exporter.core.view import BURN_RATES, View, view_of, with_outage
from sglang_tuning_exporter.sglang.metrics import RANK_COUNTS, RankFigures, Scrape
from sglang_tuning_exporter.sglang.server_info import ServerInfo

KEPT_SECONDS = 6 * 3600.0  # of sums, for the chart
READ_SECONDS = 2.0  # after which all lines of a printed second are read: the log is read every second
ASKED_SECONDS = 10.0  # in which a line that waits is a reason to ask
MOST_WAITING, MOST_HELD = 1024, 4096
DEAD_SECONDS = 30.0  # without progress, busy: what a line says of an end is true
STARTING_SECONDS = 1800.0  # a large model loads for minutes
UNSEEN_SECONDS = 900.0  # a server that was never seen may be starting for so long
# No batch line for so long, with work shown by the metrics for so long after it.
SILENT_SECONDS, WORKED_SECONDS = 120.0, 60.0
QUIET_LEVELS = ("warning", "error", "critical")  # of --log-level: without batch lines
POOL_TOLERANCE = 0.02  # between the KV cache's size in log and metrics
UNKNOWN_AGE = 300.0  # of saved alert clocks: older ones begin anew
MINUTE, KEPT_MINUTES = 60.0, 360  # of what burn rates are judged by
ENOUGH_REQUESTS = 20.0  # in the long window: one slow request of fewer is a large share
BUDGETED = tuple(f"latency_{what}.{latency}" for latency in LATENCIES_JUDGED for what in ("observations", "breaches"))
OUTAGE_SECONDS = 7200.0  # over which outages are counted
FATAL = frozenset({"end", "out_of_memory", "hang"})
OF_A_START = frozenset({"arguments", "pool", "memory", "limits", "ready"})
NO_METRICS = frozenset({"metrics_disabled", "not_sglang"})  # it answers, and shows no figures
NOT_DOWN = NO_METRICS | {"not_ready", "own_limit"}  # the last: the exporter could not ask
AWAY = frozenset({"connection_refused", "unreachable", "not_ready"})  # nothing answers, or a proxy in its place
FIRST_WITH_FIGURES = (0, 5, 0)  # from this release on a page has figures before the first request
# Each of these lines has a request of its own, so there are not more of them than requests, where a page counts those.
OF_A_REQUEST = frozenset({"too_long", "refused"})
# What a page counts by itself, if it counts it: such a line is needed only while no page comes.
BY_PAGE = frozenset({"rejected", "server_error", "transfer"})
_POSTS = ("generation_posts", "posted_requests")
# Kinds of lines of which a page counts the same: the account in `core/ledger`, and the figures of a page of which one
# is enough.
COUNTED_BY_BOTH = {
    "retraction": (RETRACTED, ("retracted_requests",)),
    "too_long": (REQUESTS, _POSTS),
    "refused": (REQUESTS, _POSTS),
    "rejected": ("rejected_requests", ("refused_requests", "answered_requests")),
    "server_error": ("server_errors", ("server_errors", "answered_requests", "generation_posts")),
    "transfer": ("failed_transfers", ("failed_transfers",)),
}
WAITING = FATAL | {"health"} | BY_PAGE  # whatever the page counts
# Why a line is not counted: the counter did not gain it, the server works on, or too many lines wait. A label of
# `log_doubtful_total`.
Doubt: TypeAlias = Literal["counter", "works_on", "too_many"]


class Line(NamedTuple):
    """A line of the log, and when it was written."""

    at: float
    event: Event


@dataclass(frozen=True, slots=True)
class Failure:
    """A scrape that failed: a label value, a sentence, whether the server may be starting, and whether it answered at
    all.
    """

    reason: str
    message: str
    starting: bool = False
    serves: bool = False


class BurnRates:
    """How many observations of each latency missed its objective, minute by minute for six hours: a window is the
    difference to now.
    """

    def __init__(self) -> None:
        self._minutes: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=KEPT_MINUTES)

    def begin_minute(self, counted: Mapping[str, float], now: float) -> None:
        """Begin a new minute if one is due, before the gains of a page are counted."""
        begin = now // MINUTE * MINUTE
        if not self._minutes or begin > self._minutes[-1][0]:
            self._minutes.append((begin, {name: counted.get(name, 0.0) for name in BUDGETED}))

    def burning(self, counted: Mapping[str, float], latency: str, rate: str, now: float, begun: float) -> float | None:
        """Return the share that missed the objective, the smaller of both windows of a rate; None where that is not
        known yet.

        begun: when the server or the exporter started: for as long as the short window nothing is said.
        """
        _, *windows = BURN_RATES[rate]
        before = [self._counted_before(now - seconds, counted) for seconds in windows]

        def gained(name: str) -> list[float]:
            return [max(counted.get(name, 0.0) - earlier.get(name, 0.0), 0.0) for earlier in before]

        observed = gained(f"latency_observations.{latency}")
        enough = gained("latency_observations.time_to_first_token")[0] >= ENOUGH_REQUESTS
        if not enough or not all(observed) or now - begun < windows[-1]:
            return None
        return min(late / number for late, number in zip(gained(f"latency_breaches.{latency}"), observed, strict=True))

    def _counted_before(self, time: float, counted: Mapping[str, float]) -> Mapping[str, float]:
        return next((earlier for begin, earlier in self._minutes if begin + MINUTE > time), counted)

    def saved(self, now: float) -> list[list[object]]:
        """Return it as plain JSON: ages in seconds, and the counts of then."""
        return [[round(now - begin), counted] for begin, counted in self._minutes]

    def restore(self, saved: object, now: float) -> None:
        """Go on from what `saved` returned; what cannot be read is left out."""
        minutes: list[tuple[float, Mapping[str, float]]] = []
        for entry in lists(saved):
            match entry:
                case [age, dict() as counted] if is_count(age) and age <= KEPT_MINUTES * MINUTE:
                    minutes.append(((now - age) // MINUTE * MINUTE, _counts(counted)))
        self._minutes.extend(sorted(minutes, key=lambda minute: minute[0]))


class Watch:
    """One server over time. `reads`: its log is read; `scrapes`: its metrics are."""

    def __init__(self, profile: profiles.Profile, now: float, *, reads: bool, scrapes: bool) -> None:
        self.server = Server(profile, late=READ_SECONDS if reads else 0.0)
        self.begin = now
        self.doubtful: Counter[tuple[str, str]] = Counter()  # lines that a scrape refuted, by kind and reason
        self.clocks = Clocks(profile)
        self.words = Words()
        self.measured: judge.Measured | None = None  # at the last judgement
        self.of_alerts: judge.Measured | None = None  # the same, with the failures of a server that starts again
        self.since: dict[str, float] = {}  # since when each row holds
        self.failure: Failure | None = None  # the last scrape's; None if it was answered
        self.log_trouble = ""  # why the log cannot be read
        self._reads, self._scrapes = reads, scrapes
        self._answered_at: float | None = None  # the last scrape that was answered
        self._failed_since: float | None = None
        self._answers_otherwise: bool | None = None  # a server without metrics answers other requests; None: not known
        self._waiting: deque[Line] = deque()  # lines on which a page decides
        self._behind_start: list[Line] = []  # a start that waits, and all lines after it
        self._stands_since: float | None = None  # busy without progress
        self._moves: deque[float] = deque(maxlen=8)  # when pages were asked for that showed progress
        self._sendings: deque[float] = deque(maxlen=8)  # when pages were asked for that showed that tokens were sent
        self._disagreed: dict[str, float] = {}  # when log and metrics last disagreed about a fact that both show
        self._worked_at = -inf  # metrics last showed work
        self._served_starts: int | None = None  # how many starts were known when a page last came
        self._hung_at = -inf
        self.burn_rates = BurnRates()
        self._outages: deque[tuple[float, float]] = deque(maxlen=256)

    # Lines

    def take_line(self, event: Event, *, past: bool = False) -> None:
        """Take a line of the log. `past`: it was there before the exporter, so nothing can be asked about it."""
        line = Line(event.time if event.time is not None else (self.server.now or self.begin), event)
        self.server.ledger.catch_up()
        if event.kind in {"decode", "prefill"}:
            self.server.last["batch"] = line.at
        if event.kind == "transfer":
            self.server.explain_transfer(event, line.at)  # even if the counter, not the log, counts it
        if self._counts_at_once(line, past=past):
            if self._behind_start:  # of the exporter before this one: older lines come first
                self._release(accept=True)
            self._accept(line)
            return
        settle = next(settle for applies, settle in self._FATES if applies(self, line))
        settle(self, line)

    def take_facts(self, facts: ServerInfo | RankFigures) -> None:
        """Take an answer of `/server_info`, or one scheduler's of `/v1/loads`."""
        if isinstance(facts, ServerInfo):
            self.server.take_info(facts)
        else:
            self.server.facts.take_load(facts)

    def _counts_at_once(self, line: Line, *, past: bool) -> bool:
        """Whether a line can be counted now because no later scrape can confirm or refute it."""
        server, kind = self.server, line.event.kind
        if kind not in COUNTED_BY_BOTH:
            return past or self.failure is not None or self._answered_at is None
        if self.failure is not None or server.counters.whole is None or server.ledger.is_of_another_time(line.at):
            return True
        return kind == "retraction" and self._page_counts(kind) and server.ledger.can_be_before(line.at)

    def _shows_a_start_of_pages(self, line: Line) -> bool:
        return line.event.kind == "arguments" and self.server.ledger.is_shown(line.at)

    def _follows_a_start(self, line: Line) -> bool:
        return bool(self._behind_start) or line.event.kind == "arguments"

    def _hold(self, line: Line) -> None:
        """Keep a line behind the start that waits, in its order."""
        if len(self._behind_start) >= MOST_HELD:
            self._release(accept=False)
            self.take_line(line.event)
        else:
            self._behind_start.append(line)

    def _is_of_another_rank(self, line: Line) -> bool:
        """Whether another TP rank has printed this retraction: the counter is charged once."""
        is_counted = line.event.kind == "retraction" and self._page_counts("retraction")
        return is_counted and self.server.is_repeated(line.event, line.at)

    def _leave_out(self, line: Line) -> None:
        """Count nothing: another rank's line does."""

    def _needs_a_page(self, line: Line) -> bool:
        kind = line.event.kind
        return kind in WAITING or (kind in COUNTED_BY_BOTH and self._page_counts(kind))

    def _wait(self, line: Line) -> None:
        at, event = line
        is_frequent = event.kind in OF_A_REQUEST | BY_PAGE
        if len(self._waiting) >= (MOST_WAITING // 2 if is_frequent else MOST_WAITING):
            self._drop(line, "too_many")
            return
        self._waiting.append(Line(at, self.server.with_moment(event) if event.kind == "retraction" else event))

    def _is_of_no_start(self, line: Line) -> bool:
        """Whether a line that only a start prints comes from a server that works."""
        return line.event.kind in OF_A_START - {"ready"} and not self.server.starting

    def _refute(self, line: Line) -> None:
        self._drop(line, "works_on")

    def _drop(self, line: Line, reason: Doubt) -> None:
        """Count a line as doubtful alone; one of what the page counts is only not needed."""
        if line.event.kind not in BY_PAGE:
            self.doubtful[line.event.kind, reason] += 1

    def _accept(self, line: Line) -> None:
        event = line.event
        if event.kind == "arguments":
            self._accept_of_the_start_before()
            self._served_starts = self.server.starts if self._served_starts is None else self._served_starts
            # A start that was saved has no arguments: the log's past was read again for them.
            event = event if event.arguments else replace(event, arguments=self.server.facts.arguments)
        self.server.take_line(event)

    # What becomes of a line on which a page has the last word: the first row that applies. The order is the rule.
    _FATES: ClassVar[tuple[tuple[Callable[[Watch, Line], bool], Callable[[Watch, Line], None]], ...]] = (
        (_shows_a_start_of_pages, _accept),
        (_follows_a_start, _hold),
        (_is_of_another_rank, _leave_out),
        (_needs_a_page, _wait),
        (_is_of_no_start, _refute),
        (lambda *_: True, _accept),
    )

    def recall(self, events: Iterable[Event], now: float) -> None:
        """Take lines from before the exporter: what they say of the server holds, and nothing of them is counted.

        With metrics, ends and retractions among them are left out: nothing can settle them any more.
        """
        server = self.server
        started, known = list(server.started_at), dict(server.last)
        waiting, self._waiting = self._waiting, deque()
        with server.uncounted(now):
            for event in events:
                if not self._scrapes or (event.kind not in WAITING and event.kind != "retraction"):
                    self.take_line(event, past=True)
        self._waiting = waiting
        if started:  # restored: the same starts
            server.started_at.clear()
            server.started_at.extend(started)
            server.last.update({name: at for name, at in known.items() if name == "server_starts"})

    def drift(self, lines: int, now: float) -> None:
        """Note lines of known kinds whose words no known release prints."""
        self.server.bucket(now)["unreadable"] += lines
        self.server.last["unreadable"] = now

    @property
    def read_to(self) -> float:
        """Until when everything written in the log is taken."""
        return self.server.ledger.read_to

    @read_to.setter
    def read_to(self, time: float) -> None:
        self.server.ledger.read_to = time

    @property
    def start_waits(self) -> bool:
        """Whether a start waits for a scrape."""
        return bool(self._behind_start)

    def counts(self) -> object:
        """Return what was counted so far, to be compared."""
        return (
            dict(self.server.counted),
            dict(self.doubtful),
            {dp: dict(life) for dp, life in self.server.lives.items()},
        )

    def _page_counts(self, kind: str) -> bool:
        """Whether pages count what a kind of line says: a status that never came has no counter yet."""
        page, (_, figures) = self.server.counters.whole or self.server.page, COUNTED_BY_BOTH[kind]
        parts = () if page is None else (page, *page.ranks)
        return any(getattr(part, figure, None) is not None for part in parts for figure in figures)

    def waits(self, now: float) -> bool:
        """Whether a line waits for a scrape that is to be made at once."""
        lines = (*self._waiting, *self._behind_start)
        return any(now - line.at <= ASKED_SECONDS and line.event.kind not in OF_A_REQUEST | BY_PAGE for line in lines)

    # Scrapes

    def take_page(self, page: Scrape, now: float, begun: float | None = None) -> None:
        """Take a page of SGLang's metrics at `now`, that was asked for at `begun`."""
        server, counters, before = self.server, self.server.counters, self.server.page
        begun = now if begun is None else begun
        if self._behind_start and counters.fell(page):
            self._release(accept=True)
        self.burn_rates.begin_minute(server.counted, now)
        server.take_page(page, now)
        if server.ledger.first_page is None and counters.whole is not None:
            server.ledger.begin(begun)
        if server.ledger.log_is_behind:
            self._accept_of_the_start_before()
            server.ledger.catch_up()
        if self._failed_since is not None and self._answered_at is not None:
            self._outages.append((self._failed_since, now))
        self.failure, self._answered_at, self._failed_since = None, now, None
        if self._reads and self._page_counts("retraction"):
            self._disagreed.setdefault("retracted_requests", -inf)
        if not counters.is_set_aside:
            self._note_progress(page, before, now, begun)
            self._compare_pools(page, now)
        self._settle(now, begun)
        if counters.are_used:
            server.ledger.settle(begun)
        self._served_starts = server.starts

    def _accept_of_the_start_before(self) -> None:
        """Count the lines that wait for a counter of the start before: no page shows it any more."""
        waiting = [line for line in self._waiting if line.event.kind in COUNTED_BY_BOTH]
        self._waiting = deque(line for line in self._waiting if line.event.kind not in COUNTED_BY_BOTH)
        for line in waiting:
            self._accept(line)

    def _note_progress(self, page: Scrape, before: Scrape | None, now: float, begun: float) -> None:
        """Note whether the server works, stands still or sends tokens, as a page and the one before show it."""
        counters = self.server.counters
        busy = any((rank.running or 0) + (rank.queued or 0) > 0 for rank in page.ranks)
        moved = bool(counters.moved) or counters.restarted
        if moved or not busy:
            self._stands_since = None
        elif self._stands_since is None:
            self._stands_since = now
        if moved or (busy and counters.moved is None):
            self._worked_at = now
        if moved:
            self._moves.append(begun)
        if before is None or page.sent != before.sent:
            self._sendings.append(begun)

    def _down_time(self, now: float) -> tuple[float | None, int]:
        """Return the share of the last two hours in which it was down, and in how many outages; None where half of them
        are not known.
        """
        if self._answered_at is None or now - self.begin < OUTAGE_SECONDS / 2:
            return None, 0
        since, present = now - OUTAGE_SECONDS, [] if self._failed_since is None else [(self._failed_since, now)]
        spans = [(begin, end) for begin, end in (*self._outages, *present) if end > since]
        return sum(end - max(begin, since) for begin, end in spans) / OUTAGE_SECONDS, len(spans)

    def _settle(self, now: float, begun: float) -> None:
        """Decide on the lines that waited, by what the page shows that was asked for at `begun`."""
        stands = self._stands_since is not None and now - self._stands_since >= DEAD_SECONDS
        # Few requests first, then lines that clients cannot have written: this order loses the fewest real lines if
        # some are forged.
        waiting = sorted(self._waiting, key=lambda line: (line.event.figures.get("requests", 1.0), line.event.marked))
        self._waiting.clear()
        for line in waiting:
            is_true = self._is_true(line, now, begun, stands=stands)
            if is_true:
                self._accept(line)
            elif is_true is None:
                self._waiting.append(line)
            else:
                self._drop(line, "counter" if line.event.kind in COUNTED_BY_BOTH else "works_on")
        if self._behind_start and self._is_settled(self._behind_start[0].at, now):
            self._release(accept=False)
        self._count_overdue(now)

    def _is_true(self, line: Line, now: float, begun: float, *, stands: bool) -> bool | None:
        """Return whether a line is true and counts; None while that is not known."""
        kind, page, settled = line.event.kind, self.server.page, self._is_settled(line.at, now)
        if kind in COUNTED_BY_BOTH and (kind not in BY_PAGE or self._page_counts(kind)):
            return self._is_shown(line, begun)
        if kind in BY_PAGE:
            return True if settled else None
        if kind == "health" and page is not None and page.sent is not None:
            return self._sends_nothing(line.at, now)
        if stands:
            return True
        return False if settled and self._stands_since is None else None

    def _is_shown(self, line: Line, begun: float) -> bool | None:
        """Return whether a counter gained what a line says, and the line counts; None while it still may."""
        ledger, event, (account, _) = self.server.ledger, line.event, COUNTED_BY_BOTH[line.event.kind]
        if event.kind == "retraction":
            is_gained = ledger.covers(account, event.figures.get("requests", 1.0), event.rank.dp)
        else:
            is_gained = ledger.pay(account)
        if is_gained:
            return event.kind not in BY_PAGE
        return False if self.server.counters.are_used and begun - line.at > UNSETTLED_SECONDS else None

    def _sends_nothing(self, at: float, now: float) -> bool | None:
        """Return whether no token has been sent since a health check failed; None while that is not known."""
        if sum(begun >= at + SETTLED_SECONDS for begun in self._sendings) > 1:
            return False
        last = max(at, self.server.progress.sent_at or -inf)
        return True if now - last > DEAD_SECONDS else None

    def _is_settled(self, at: float, now: float) -> bool:
        """Whether two pages with progress have come since, each asked for some time after: the first may have been made
        before.
        """
        return sum(begun >= at + SETTLED_SECONDS for begun in self._moves) > 1 or now - at > UNSETTLED_SECONDS

    def _count_overdue(self, now: float) -> None:
        """Count the retracted requests of the counter whose lines have not come."""
        logged = self._reads and now - self.server.last.get("batch", -inf) <= SILENT_SECONDS
        waiting: dict[str, dict[int | None, float]] = {}
        for line in (*self._waiting, *self._behind_start):
            if line.event.kind in COUNTED_BY_BOTH:
                numbers = waiting.setdefault(COUNTED_BY_BOTH[line.event.kind][0], {})
                dp = line.event.rank.dp
                numbers[dp] = numbers.get(dp, 0.0) + line.event.figures.get("requests", 1.0)
        for gain in self.server.ledger.overdue(now, waiting, reads=self._reads):
            self.server.count_retracted(gain.number, min(gain.at, now), gain.dp)
            if logged and self.server.starts == self._served_starts:
                self._disagreed["retracted_requests"] = now

    def _release(self, *, accept: bool) -> None:
        """Take a start that waited with the lines after it, or these without it."""
        released, self._behind_start = self._behind_start, []
        if accept:
            waiting, self._waiting = self._waiting, deque()
            for line in (*waiting, *released):
                self._accept(line)
        elif released:
            self._refute(released[0])
            for line in released:
                if line.event.kind not in OF_A_START:
                    self.take_line(line.event)

    def _compare_pools(self, page: Scrape, now: float) -> None:
        for rank in page.ranks if self._reads else ():
            logged = self.server.facts.pools.get(rank.dp)
            if logged and rank.kv_pool_tokens:
                differs = abs(rank.kv_pool_tokens - logged) > POOL_TOLERANCE * logged
                self._disagreed["kv_pool_tokens"] = now if differs else self._disagreed.get("kv_pool_tokens", -inf)

    def lose(self, reason: str, message: str, now: float, *, serves: bool = False) -> Failure:
        """Take a scrape that failed; return why, as far as what was seen before explains it."""
        self._failed_since = now if self._failed_since is None else self._failed_since
        if reason in AWAY or self._behind_start:
            self._release(accept=True)  # it is gone, as its log says
        self._stands_since = None
        if reason in AWAY or reason == "not_sglang":
            self.server.lose(now)
        if reason == "metrics_disabled":
            self.server.count_by_log()
        self.failure = self._explained(reason, message, now, serves=serves)
        return self.failure

    def _explained(self, reason: str, message: str, now: float, *, serves: bool) -> Failure:
        """Return a failure as the time before explains it."""
        server, seconds = self.server, now - (self._failed_since or now)
        if reason == "metrics_disabled":
            return self._without_metrics(message)
        self._answers_otherwise = None
        if reason == "no_series":  # before SGLang ever answered it is another server; afterwards a proxy in its place
            known = self._answered_at is not None or server.counters.whole is not None
            return Failure("invalid" if known else "not_sglang", message)
        if serves:
            return self._without_figures(message, seconds)
        if reason in AWAY and self._may_start(reason, now, seconds):
            return Failure("not_ready", f"{message} (it may still be starting)", starting=True)
        if reason == "not_ready":
            return Failure("http_503", f"{message}, and nothing shows that it starts")
        return Failure(reason, message)

    def _without_figures(self, message: str, seconds: float) -> Failure:
        """Return why a page was empty for so long: before the first request some releases have no figures."""
        empty_at_first = self.server.facts.is_before(*FIRST_WITH_FIGURES)
        if not self.server.ended and (seconds < STARTING_SECONDS or empty_at_first):
            return Failure("not_ready", message, serves=True)
        return Failure("invalid", f"its page has been empty for {seconds / 60:.0f} minutes", serves=True)

    def _without_metrics(self, message: str) -> Failure:
        """Return why an answer was 404: the server has no metrics, or a proxy answers in its place."""
        had = self._served_starts is not None and self._served_starts == self.server.starts
        gone = had or self._answers_otherwise is False or bool(self.server.ended)
        if self._answers_otherwise or not gone:
            return Failure("metrics_disabled", message)
        before = ", and had metrics before" if had else ", as a proxy does for a server that is gone"
        return Failure("http_404", f"it answers 404{before}")

    def _may_start(self, reason: str, now: float, seconds: float) -> bool:
        """Whether a server that is away may be starting: its log shows a start, or nothing
        shows that it ever served.
        """
        server = self.server
        if server.ended:
            return False
        if server.starting:
            return now - (server.started_at[-1] if server.started_at else now) < STARTING_SECONDS
        if self._served_starts is not None and self._answered_at is not None:
            return False
        if server.schedulers:
            return False
        return seconds < (STARTING_SECONDS if reason == "not_ready" else UNSEEN_SECONDS)

    def answered(self, *, answered: bool) -> None:
        """Note whether a server without metrics answered another request."""
        if answered or self._answers_otherwise:
            self._answers_otherwise = answered

    # Judgements

    def advance(self, now: float) -> None:
        """Let time pass."""
        self.server.advance(now)
        self.server.forget(now - KEPT_SECONDS)
        self.server.ledger.catch_up()
        first = min((at for at, _ in (*self._waiting, *self._behind_start)), default=now)
        if now - first > UNSETTLED_SECONDS and (self._answered_at or -inf) < first + SETTLED_SECONDS:
            self._release(accept=True)
        self._count_overdue(now)

    @property
    def is_up(self) -> bool | None:
        """Whether the last scrape was answered; None before the first."""
        if self.failure is not None:
            return False
        return None if self._answered_at is None else True

    def view(self, now: float, seconds: float | None = None) -> View:
        """Return the last ten minutes, or `seconds`."""
        self.advance(now)
        server, failure, answered = self.server, self.failure, self._answered_at is not None
        view = self._since_start(seconds or server.profile.window_seconds, now)
        stopped = self._was_stopped(now)
        down = "" if stopped else self._down()
        down_share, outages = self._down_time(now)
        silent_seconds = server.progress.silence(now) if failure is None else 0.0
        stuck = server.progress.stuck(now) if failure is None and answered else None
        if stuck is not None:
            server.hangs_on(stuck, now)
        if stuck is not None or (failure is not None and failure.reason == "timeout" and down):
            self._hung_at = now
        hung = now - self._hung_at <= server.profile.window_seconds or server.progress.gave_up > 0
        return replace(
            view,
            stopped=stopped,
            scraped=answered and failure is None,
            down=down,
            stuck=stuck,
            burning=self._burning(now),
            down_share=down_share,
            outages=outages,
            silent_seconds=silent_seconds,
            hung=hung or silent_seconds > 0,
            busy=any(rank.shown.serves for rank in server.schedulers.values()),
            troubles=self._troubles(now),
            starting=self._starts(now),
        )

    def _was_stopped(self, now: float) -> bool:
        """Whether it was asked to end, and has: nothing answers, or, with the log alone, it does not work on."""
        server, reason = self.server, "" if self.failure is None else self.failure.reason
        # With the log alone: once it says no more that requests remain, and does not work on.
        is_silent = not self._scrapes and now - server.last.get("liveness_events.draining", now) > WORKS_ON_SECONDS
        return server.stopping and (reason in AWAY - {"not_ready"} or is_silent)

    def _down(self) -> str:
        """Return why the server could not be scraped, if that means that it is down; empty if not."""
        failure = self.failure
        if failure is None or failure.reason in NOT_DOWN:
            return ""
        if failure.reason == "timeout":
            return (
                f"it takes connections and does not answer ({failure.message}): its HTTP server or its tokenizer hangs"
            )
        return f"its /metrics could not be scraped ({failure.message})"

    def _troubles(self, now: float) -> dict[str, str]:
        """Return what is wrong with log or metrics, in words, by diagnosis."""
        failure, troubles = self.failure, dict[str, str]()
        if failure is not None and failure.reason in NO_METRICS:
            troubles[failure.reason] = failure.message
        if silent := self.silence(now):
            troubles["log_silent"] = silent
        if any(self.disagreements(now).values()):
            troubles["sources_disagree"] = "log and metrics disagree"
        return troubles

    def _starts(self, now: float) -> bool:
        """Whether the server is starting; with the log alone for as long as a start may take."""
        server = self.server
        if self.failure is not None:
            starting = self.failure.starting
        else:
            starting = self._answered_at is None and server.starting
        if self._scrapes or not starting:
            return starting
        return now - server.last.get("server_starts", now) < STARTING_SECONDS

    def _since_start(self, seconds: float, now: float) -> View:
        """Return the last `seconds`, or those since the last start: it has other settings.

        How it ended before stays in sight.
        """
        window = self.server.window(seconds)
        view = view_of(self.server, min(seconds, max(now - self.server.last.get("server_starts", -inf), 0.0)))
        for name in ("ends", *(f"out_of_memory.{phase}" for phase in OUT_OF_MEMORY_PHASES)):
            if window[name]:
                view.totals[name] = window[name]
        if self.server.ended and not view.totals["ends"]:
            view.totals["ends"] = 1.0  # longer ago, and nothing has come since
        return view

    def _burning(self, now: float) -> dict[tuple[str, str], float]:
        begun = max(self.server.last.get("server_starts", -inf), self.begin)
        shares = {
            (latency, rate): self.burn_rates.burning(self.server.counted, latency, rate, now, begun)
            for latency, objective in self.server.objectives.items()
            if objective is not None
            for rate in BURN_RATES
        }
        return {key: share for key, share in shares.items() if share is not None}

    def silence(self, now: float) -> str:
        """Return what is wrong with the log, empty if nothing."""
        if not self._reads:
            return ""
        if self.log_trouble:
            return f"the log cannot be read: {self.log_trouble}"
        last = self.server.last.get("batch", self.begin)
        if self._worked_at - last <= WORKED_SECONDS or now - last < SILENT_SECONDS:
            return ""
        level = self.server.facts.word("log_level")
        why = f"; the server runs with --log-level {level}" if level in QUIET_LEVELS else ""
        return (
            f"no batch line has come from the log for {(now - last) / 60:.0f} minutes, and tokens were generated{why}"
        )

    def silent_log_seconds(self, now: float) -> float | None:
        """Return how long after the last batch line the metrics showed work; None where not both are read."""
        if not (self._reads and self._scrapes):
            return None
        last = self.server.last.get("batch", self.begin)
        return max(min(self._worked_at, now) - last, 0.0)

    def disagreements(self, now: float) -> dict[str, bool]:
        """Return whether log and metrics disagree about a fact, for each that both show; of the last ten minutes."""
        window = self.server.profile.window_seconds
        return {fact: now - at <= window for fact, at in self._disagreed.items()}

    def measure(self, now: float) -> judge.Measured:
        """Weigh the last ten minutes, and let the alert clocks go on."""
        view = self.view(now)
        in_sight = with_outage(view, self.server)
        # A server that starts again is judged by its start; the alert of its failure goes on until it is ready.
        measured = judge.weigh(view if view.starting else in_sight)
        self.of_alerts = judge.weigh(in_sight) if view.starting and in_sight is not view else measured
        self.clocks.pass_on(self.of_alerts, self.server, now)
        self.since = {
            name: self.since.get(name) or self._first_seen(name, measured.view, now) for name in measured.holding
        }
        return measured

    def _first_seen(self, name: str, view: View, now: float) -> float:
        """Return when what a row is about was first seen in the last ten minutes; now where only metrics or sources
        show it.
        """
        row = BY_ID[name]
        if (since := row.since(view)) is not None:
            return since
        if not row.when.in_log:
            return (self._failed_since if view.down else None) or now
        first_seen = Span.recent(self.server, now, view.totals).first_seen(row)
        return now if first_seen is None else first_seen

    def judge(self, now: float) -> Judgement:
        """Return what limits the server, and let the words that stand follow."""
        self.measured = measured = self.measure(now)
        findings = tuple(self._timed(finding, measured.view, now) for finding in judge.findings(measured))
        judgement = judge.judgement_of(measured, judge.going_on_first(findings))
        self.words.take_judgement(
            judgement, measured.view, now, {alert.diagnosis: alert.at for alert in self.clocks.firing}
        )
        return judgement

    def _timed(self, finding: Finding, view: View, now: float) -> Finding:
        """Add since when a finding holds, and say one that is over in the past tense."""
        timed = None
        if not BY_ID[finding.diagnosis].goes_on(view):
            timed = Span.recent(self.server, now, view.totals).timed(finding, now)
        since = self.since.get(finding.diagnosis)
        return replace(finding if timed is None or not timed.over else timed, since=since)

    def report(self, judgement: Judgement, now: float) -> Judgement:
        """Return a judgement with all that a report has, of a server that runs: its window, its present start, its
        counts so far.
        """
        server, measured = self.server, self.measured
        view = measured.view if measured is not None else self.view(now)
        facts, window = server.facts, server.profile.window_seconds
        counts = {name: server.counted[count] for name, count in answer.COUNTED.items()}
        if not counts["server_starts"] and (server.started_at or facts.arguments):
            del counts["server_starts"]  # that no start was counted says nothing where one is known from before
        started = server.started_at[-1] if server.started_at else None
        return answer.with_figures(
            judgement, server, view.totals, profile=server.profile.name,
            # Lines from before the exporter are in the window too.
            begin=max(now - window, min(self.begin, server.begin or self.begin)), end=now,
            serving_seconds=view.served, idle_seconds=view.idle,
            alerts=tuple(sorted(self.clocks.firing, key=lambda alert: alert.at)),
            starts=(Start(started, facts.shown_release, facts.arguments, {}, answer.figures_of(view), server.ended,
                answer.memory(facts)),),
            counts=counts, available_gb=tuple(facts.left.values()) if not facts.is_cpu else (),
        )  # fmt: skip

    # A restart of the exporter

    def saved(self, now: float) -> dict[str, object]:
        """Return what was counted and decided, and the lines that wait, as plain JSON; times are ages in seconds."""
        return {
            "counted": {name: value for name, value in self.server.counts_by_now().items() if value},
            "ranks": [
                [dp, {name: value for name, value in life.items() if value}] for dp, life in self.server.lives.items()
            ],
            "doubtful": [[*key, number] for key, number in self.doubtful.items()],
            "ledger": self.burn_rates.saved(now),
            "waiting": [[now - at, to_json(event)] for at, event in self._waiting],
            "behind_start": [[now - at, to_json(event)] for at, event in self._behind_start],
            "counters": self.server.counters.saved(),
            "by_page": sorted(self.server.by_page),
            "accounts": self.server.ledger.saved(now),
            "clocks": self.clocks.saved(now),
            "words": self.words.saved(now),
            "starts": [now - at for at in self.server.started_at],
            "outages": [[now - begin, now - end] for begin, end in self._outages],
            "end": [
                [now - (end.time or now), to_json(end)] for end in (self.server.end_explanation,) if end is not None
            ],
        }

    def restore(self, saved: object, now: float, age: float) -> None:
        """Go on from what an exporter saved `age` seconds ago; what cannot be read is left out.

        No present figure is restored.
        """
        document, then = saved if isinstance(saved, dict) else {}, now - age
        self.server.counted.update(_counts(document.get("counted")))
        self._restore_ranks(document.get("ranks"))
        for entry in lists(document.get("doubtful")):
            match entry:
                case [str(kind), str(reason), int() as number] if number >= 0:
                    self.doubtful[kind, reason] = number
        self.burn_rates.restore(document.get("ledger"), then)
        self._waiting.extend(Line(*line) for line in islice(aged(document.get("waiting"), then), MOST_WAITING))
        self._behind_start += [Line(*line) for line in islice(aged(document.get("behind_start"), then), MOST_HELD)]
        self.server.counters.restore(document.get("counters"))
        if self.server.counters.whole is not None:
            self.server.ledger.restore(document.get("accounts"), then)
            by_page = document.get("by_page")
            self.server.by_page.update(name for name in RANK_COUNTS if isinstance(by_page, list) and name in by_page)
        if age <= UNKNOWN_AGE:
            self.clocks.restore(document.get("clocks"), then)
        self.words.restore(document.get("words"), then)
        starts = document.get("starts")
        self.server.started_at.extend(then - at for at in (starts if isinstance(starts, list) else ()) if is_count(at))
        ends = (replace(event, time=at) for at, event in aged(document.get("end"), then) if event.kind == "words")
        self.server.end_explanation = next(ends, None)
        for entry in lists(document.get("outages")):
            if len(entry) == 2 and all(map(is_count, entry)):
                self._outages.append((then - entry[0], then - entry[1]))

    def _restore_ranks(self, saved: object) -> None:
        for entry in lists(saved):
            match entry:
                case [None | int() as dp, dict() as counts]:
                    self.server.life(dp).update(_counts(counts))
                    if dp is not None and self._scrapes:  # pages say which ranks there are
                        self.server.absent.add(dp)


def _counts(saved: object) -> dict[str, float]:
    """Return saved counts under the names of this release, without those that are none."""
    items = saved.items() if isinstance(saved, dict) else ()
    named = ((present_name(str(name)), float(value)) for name, value in items if is_count(value))
    return {name: value for name, value in named if name is not None}
