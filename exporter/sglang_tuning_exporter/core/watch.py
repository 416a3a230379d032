"""A server as it is watched: lines of its log and scrapes of its metrics in, judgements and alerts out. Pure; times are unix seconds.

With the log alone a line counts at once. With metrics SGLang's own counters have the last word: what a line says of a retraction, an end or
a start waits for the next scrape. Nothing that was counted is taken back; what a scrape refutes is counted in `doubtful`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from typing import TypeAlias

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core.alerts import Clocks
from sglang_tuning_exporter.core.events import OUT_OF_MEMORY_PHASES, Event, aged, is_count, lists, to_json
from sglang_tuning_exporter.core.exposed import Words
from sglang_tuning_exporter.core.findings import Finding, Judgement
from sglang_tuning_exporter.core.judge import Measured, findings, going_on_first, judgement_of, seen, timed, weigh
from sglang_tuning_exporter.core.rows import BY_ID
from sglang_tuning_exporter.core.server import LATENCIES_JUDGED, WORKS_ON_SECONDS, Server, Totals
from sglang_tuning_exporter.core.view import BURN_RATES, View, view_of
from sglang_tuning_exporter.sglang import server_info
from sglang_tuning_exporter.sglang.metrics import RankFigures, Scrape

KEPT_SECONDS = 6 * 3600.0  # of sums, for the chart
SETTLED_SECONDS = 2.0  # after which a scrape shows what a line says
UNSETTLED_SECONDS = 30.0  # without any scrape: as with the log alone
READ_SECONDS = 2.0  # after which all lines of a printed second are read: the log is read every second
ASKED_SECONDS = 10.0  # in which a line that waits is a reason to ask
MOST_WAITING, MOST_HELD = 1024, 4096
REQUESTED_SECONDS = 60.0  # after a request, in which the line that it causes may come
LATE_LINES_SECONDS = 10.0  # in which the lines of what a counter gained may still be written
UNREAD_SECONDS = 600.0  # at most, in which a log that is read late, or not at all, is waited for
DEAD_SECONDS = 30.0  # without progress, busy: what a line says of an end is true
STARTING_SECONDS = 1800.0  # a large model loads for minutes
UNSEEN_SECONDS = 900.0  # a server that was never seen may be starting for so long
SILENT_SECONDS, WORKED_SECONDS = (
    120.0,
    60.0,
)  # no batch line for so long, with work shown by the metrics for so long after it
QUIET_LEVELS = ("warning", "error", "critical")  # of --log-level: without batch lines
POOL_TOLERANCE = 0.02  # between the KV cache's size in log and metrics
UNKNOWN_AGE = 300.0  # of saved alert clocks: older ones begin anew
MINUTE, KEPT_MINUTES = 60.0, 360  # of what burn rates are judged by
ENOUGH_REQUESTS = 20.0  # in the long window: one slow request of fewer is a large share
BUDGETED = tuple(f"{latency}_{what}" for latency in LATENCIES_JUDGED for what in ("observed", "late"))
OUTAGE_SECONDS = 7200.0  # over which outages are counted
FATAL = frozenset({"end", "out_of_memory", "hang"})
OF_A_START = frozenset({"arguments", "pool", "memory", "limits", "ready"})
NO_METRICS = frozenset({"metrics_disabled", "not_sglang"})  # it answers, and shows no figures
AWAY = frozenset({"connection_refused", "unreachable", "not_ready"})  # nothing answers, or a proxy in its place
FIRST_WITH_FIGURES = (0, 5, 0)  # from this release on a page has figures before the first request
# Kinds of a log that a page counts itself where it has one of these.
COUNTED_BY_PAGE = {
    "rejected": ("refused_requests", "answered_requests"),
    "server_error": ("server_errors", "answered_requests", "generation_posts"),
    "transfer": ("failed_transfers",),
}
# Each of these lines has a request of its own, so there are not more of them than requests, where a page counts those.
OF_A_REQUEST = frozenset({"too_long", "refused"})
REQUESTS = ("generation_posts", "posted_requests")
WAITING = FATAL | {"health"} | COUNTED_BY_PAGE.keys()
Budget: TypeAlias = "deque[tuple[float, float, int | None]]"  # when a counter gained how many, of which DP rank


@dataclass(frozen=True, slots=True)
class Failure:
    """A scrape that failed: a label value, a sentence, whether the server may be starting, and whether it answered at all."""

    reason: str
    message: str
    starting: bool = False
    serves: bool = False


class Ledger:
    """How many observations of each latency missed its objective, minute by minute for six hours: a window is the difference to now."""

    def __init__(self) -> None:
        self._minutes: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=KEPT_MINUTES)

    def turn(self, counted: Mapping[str, float], now: float) -> None:
        """Begin a new minute, before what a page gained is counted."""
        begin = now // MINUTE * MINUTE
        if not self._minutes or begin > self._minutes[-1][0]:
            self._minutes.append((begin, {name: counted.get(name, 0.0) for name in BUDGETED}))

    def burning(self, counted: Mapping[str, float], latency: str, rate: str, now: float, begun: float) -> float | None:
        """Return the share that missed the objective, the smaller of both windows of a rate; None where that is not known yet.

        begun: when the server or the exporter started: for as long as the short window nothing is said.
        """
        _, *windows = BURN_RATES[rate]

        def gained(name: str) -> list[float]:
            then = [
                next((each for begin, each in self._minutes if begin + MINUTE > now - seconds), counted)
                for seconds in windows
            ]
            return [max(counted.get(name, 0.0) - each.get(name, 0.0), 0.0) for each in then]

        observed = gained(f"{latency}_observed")
        enough = gained("time_to_first_token_observed")[0] >= ENOUGH_REQUESTS
        if not enough or not all(observed) or now - begun < windows[-1]:
            return None
        return min(late / number for late, number in zip(gained(f"{latency}_late"), observed, strict=True))

    def saved(self, now: float) -> list[list[object]]:
        """Return it as plain JSON: ages in seconds, and what was counted then."""
        return [[round(now - begin), then] for begin, then in self._minutes]

    def restore(self, saved: object, now: float) -> None:
        """Go on from what `saved` returned; what cannot be read is left out."""
        found: list[tuple[float, Mapping[str, float]]] = []
        for entry in lists(saved):
            match entry:
                case [age, dict() as then] if is_count(age) and age <= KEPT_MINUTES * MINUTE:
                    known = {str(name): float(value) for name, value in then.items() if is_count(value)}
                    found.append(((now - age) // MINUTE * MINUTE, known))
        self._minutes.extend(sorted(found, key=lambda each: each[0]))


class Watch:
    """One server over time. `reads`: its log is read; `scrapes`: its metrics are."""

    def __init__(self, profile: profiles.Profile, now: float, *, reads: bool, scrapes: bool) -> None:
        self.server = Server(profile, late=READ_SECONDS if reads else 0.0)
        self.begin = now
        self.doubtful: Counter[tuple[str, str]] = Counter()  # lines that a scrape refuted, by kind and reason
        self.clocks = Clocks(profile)
        self.words = Words()
        self.measured: Measured | None = None  # at the last judgement
        self.since: dict[str, float] = {}  # since when each row holds
        self.failure: Failure | None = None  # the last scrape's; None if it was answered
        self.log_trouble = ""  # why the log cannot be read
        self.read_to = inf  # what was written in the log until then is taken
        self._reads, self._scrapes = reads, scrapes
        self._answered_at: float | None = None  # the last scrape that was answered
        self._failed_since: float | None = None
        self._answers_otherwise: bool | None = None  # a server without metrics answers other requests; None: not known
        self._waiting: deque[tuple[float, Event]] = deque()  # retractions and ends
        self._held: list[tuple[float, Event]] = []  # a start that waits, and all lines after it
        self._stands_since: float | None = None  # busy without progress
        self._moves: deque[float] = deque(maxlen=8)  # when pages were asked for that showed progress
        self._retracted: Budget = deque()  # requests by the counters, without a line so far
        self._requests: Budget = deque()  # the same of all that came
        self._settled_later = WAITING  # kinds of lines that a page confirms or refutes
        self._first_page: float | None = None  # when it was asked for
        self._unsure: list[Event] = []  # lines that the first page may have counted already
        self._sendings: deque[float] = deque(
            maxlen=8
        )  # when pages were asked for that showed that tokens had been sent
        self._sent: float | None = None
        self._disagreed: dict[str, float] = {}  # when log and metrics last disagreed about a fact that both show
        self._worked_at = -inf  # metrics last showed work
        self._counts_retractions = False
        self._served_starts: int | None = None  # how many starts were known when a page last came
        self._hung_at = -inf
        self.ledger = Ledger()
        self._outages: deque[tuple[float, float]] = deque(maxlen=256)

    def take(
        self,
        seen: Event | Scrape | server_info.ServerInfo | server_info.Load,
        now: float = 0.0,
        begun: float | None = None,
        *,
        past: bool = False,
    ) -> None:
        """Take what was seen: a line, a page at `now` that was asked for at `begun`, or an answer of `/server_info` or `/v1/loads`.

        `past`: a line was there before the exporter, so nothing can be asked about it.
        """
        if isinstance(seen, Event):
            self._take_line(seen, past=past)
        elif isinstance(seen, Scrape):
            self._take_page(seen, now, now if begun is None else begun)
        else:
            self.server.facts.take(seen)

    # Lines

    def _take_line(self, event: Event, *, past: bool) -> None:
        now = event.time if event.time is not None else (self.server.now or self.begin)
        if event.kind in {"decode", "prefill"}:
            self.server.last["batch"] = now
        if event.kind == "transfer":
            self.server.explain_transfer(event, now)  # by whom ever it is counted
        is_counted = event.kind == "retraction" and self._counts_retractions
        if self._counts_at_once(event, now, past=past):
            self._accept(event)
        elif self._held or event.kind == "arguments":
            if len(self._held) >= MOST_HELD:
                self._release(accept=False)
                self._take_line(event, past=past)
            else:
                self._held.append((now, event))
        elif event.kind in COUNTED_BY_PAGE and self._counts(event.kind):
            return
        elif is_counted and self.server.is_repeated(event, now):
            return  # what every TP rank prints is paid for once
        elif is_counted or self.server.counters.former is not None or event.kind in self._settled_later:
            self._wait(event, now)
        elif event.kind in OF_A_START - {"ready"} and not self.server.starting:
            self.doubtful[event.kind, "works_on"] += 1
        else:
            self._accept(event)

    def _counts_at_once(self, event: Event, now: float, *, past: bool) -> bool:
        """Whether a line counts as with the log alone, because no page can say more."""
        counters = self.server.counters
        if event.kind == "retraction" and counters.former is not None:
            return False
        if self.failure is not None or self._answered_at is None:
            return True
        is_newer = counters.is_continued or now > (self._first_page or -inf) - 1.0  # SGLang prints whole seconds
        return past and not (event.kind == "retraction" and self._counts_retractions and is_newer)

    def _wait(self, event: Event, now: float) -> None:
        most = MOST_WAITING // 2 if event.kind in OF_A_REQUEST else MOST_WAITING
        if len(self._waiting) >= most:
            self.doubtful[event.kind, "too_many"] += 1
            return
        event = self.server.with_moment(event) if event.kind == "retraction" else event
        self._waiting.append((now, event))
        is_continued = self.server.counters.is_continued
        if self._first_page is not None and not is_continued and now < self._first_page + SETTLED_SECONDS:
            self._unsure.append(event)

    def recall(self, events: Iterable[Event], now: float) -> None:
        """Take lines from before the exporter: what they say of the server holds, and nothing of them is counted.

        With metrics, ends and retractions among them are left out: nothing can settle them any more.
        """
        server = self.server
        counted, started, known = Totals(server.counted), list(server.started_at), dict(server.last)
        lived = {dp: Totals(life) for dp, life in server.lives.items()}
        for event in events:
            if not self._scrapes or (event.kind not in WAITING and event.kind != "retraction"):
                self.take(event, past=True)
        server.advance(now)
        server.counted = counted
        server.recalled()
        for dp, life in server.lives.items():
            life.clear()
            life.update(lived.get(dp, {}))
        if started:  # restored: the same starts
            server.started_at.clear()
            server.started_at.extend(started)
            server.last.update({name: at for name, at in known.items() if name == "starts"})

    def drift(self, lines: int, now: float) -> None:
        """Note lines of known kinds whose words no known release prints."""
        self.server.bucket(now)["unreadable"] += lines
        self.server.last["unreadable"] = now

    @property
    def start_waits(self) -> bool:
        """Whether a start waits for a scrape."""
        return bool(self._held)

    def counts(self) -> object:
        """Return what was counted so far, to be compared."""
        return (
            dict(self.server.counted),
            dict(self.doubtful),
            {dp: dict(life) for dp, life in self.server.lives.items()},
        )

    def _counts(self, kind: str) -> bool:
        """Whether the page counts the same: a status that never came has no counter yet."""
        page = self.server.page
        return page is not None and any(getattr(page, name) is not None for name in COUNTED_BY_PAGE[kind])

    def _accept(self, event: Event) -> None:
        if event.kind == "arguments":
            self._served_starts = self.server.starts if self._served_starts is None else self._served_starts
        self.server.take(event)

    def waits(self, now: float) -> bool:
        """Whether a line waits for a scrape that is to be made at once."""
        lines = (*self._waiting, *self._held)
        return any(now - at <= ASKED_SECONDS and event.kind not in OF_A_REQUEST for at, event in lines)

    # Scrapes

    def _take_page(self, page: Scrape, now: float, begun: float) -> None:
        server, counters = self.server, self.server.counters
        busy = any((rank.running or 0) + (rank.queued or 0) > 0 for rank in page.ranks)
        if self._held and counters.fell(page):
            self._release(accept=True)
        self.ledger.turn(server.counted, now)
        server.take(page, now)
        if self._first_page is None and counters.whole is not None:
            self._first_page = begun
            self._unsure += [] if counters.is_continued else [event for _, event in self._waiting]
        if self._failed_since is not None and self._answered_at is not None:
            self._outages.append((self._failed_since, now))
        self.failure, self._answered_at, self._failed_since = None, now, None
        whole = counters.whole or page  # a counter that one page lacks still counts
        self._counts_retractions = any(rank.retracted_requests is not None for rank in whole.ranks)
        counts_requests = any(getattr(whole, name) is not None for name in REQUESTS)
        self._settled_later = WAITING | OF_A_REQUEST if counts_requests else WAITING
        if self._reads and self._counts_retractions:
            self._disagreed.setdefault("retracted_requests", -inf)
        moved = bool(counters.moved) or counters.restarted
        self._stands_since = None if moved or not busy else now if self._stands_since is None else self._stands_since
        if moved or (busy and counters.moved is None):
            self._worked_at = now
        if moved:
            self._moves.append(begun)
        if page.sent != self._sent:
            self._sent = page.sent
            self._sendings.append(begun)
        self._compare_pools(page, now)
        self._settle(now)
        self._served_starts = server.starts

    def _down_time(self, now: float) -> tuple[float | None, int]:
        """Return the share of the last two hours in which it was down, and in how many outages; None where half of them are not known."""
        if self._answered_at is None or now - self.begin < OUTAGE_SECONDS / 2:
            return None, 0
        since, present = now - OUTAGE_SECONDS, [] if self._failed_since is None else [(self._failed_since, now)]
        spans = [(begin, end) for begin, end in (*self._outages, *present) if end > since]
        return sum(end - max(begin, since) for begin, end in spans) / OUTAGE_SECONDS, len(spans)

    def _settle(self, now: float) -> None:
        """Decide on the lines that waited, by what the page shows."""
        counters = self.server.counters
        for rank in counters.ranks:
            if rank.gained.get("retracted"):
                self._retracted.append((now, rank.gained["retracted"], rank.figures.dp))
        if requests := next((counters.counts[name] for name in REQUESTS if name in counters.counts), 0.0):
            self._requests.append((now, requests, None))
        while self._requests and self._requests[0][0] < self._read_until(now) - REQUESTED_SECONDS:
            self._requests.popleft()
        stands = self._stands_since is not None and now - self._stands_since >= DEAD_SECONDS
        # Few requests first, then what clients cannot have written: so the fewest real lines are lost beside forged ones.
        waiting = sorted(self._waiting, key=lambda each: (each[1].figures.get("requests", 1.0), each[1].marked))
        self._waiting.clear()
        for at, event in waiting:
            is_true = self._is_true(event, at, now, stands=stands)
            if is_true:
                self._accept(event)
            elif is_true is None:
                self._waiting.append((at, event))
            elif event.kind not in COUNTED_BY_PAGE:
                by_counter = event.kind == "retraction" or event.kind in OF_A_REQUEST
                self.doubtful[event.kind, "counter" if by_counter else "works_on"] += 1
        if self._held and self._is_settled(self._held[0][0], now):
            self._release(accept=False)
        self._count_unlogged(now)

    def _is_true(self, event: Event, at: float, now: float, *, stands: bool) -> bool | None:
        """Return whether a line is true; None while that is not known. A line of what the page counts is not needed."""
        settled = self._is_settled(at, now)
        if event.kind in COUNTED_BY_PAGE:
            return False if self._counts(event.kind) else True if settled else None
        if event.kind == "retraction" or event.kind in OF_A_REQUEST:
            retracts = event.kind == "retraction"
            number, dp = (event.figures.get("requests", 1.0), event.rank.dp) if retracts else (1.0, None)
            if self._pay(self._retracted if retracts else self._requests, number, dp):
                return True
            return any(each is event for each in self._unsure) if now - at > UNSETTLED_SECONDS else None
        if event.kind == "health" and self._sent is not None:
            return self._sends_nothing(at, now)
        if stands:
            return True
        return False if settled and self._stands_since is None else None

    def _sends_nothing(self, at: float, now: float) -> bool | None:
        """Return whether no token has been sent since a health check failed; None while that is not known."""
        if sum(begun >= at + SETTLED_SECONDS for begun in self._sendings) > 1:
            return False
        last = max(at, self.server.progress.sent_at or -inf)
        return True if now - last > DEAD_SECONDS else None

    def _is_settled(self, at: float, now: float) -> bool:
        """Whether two pages with progress have come since, each asked for some time after: the first may have been made before."""
        return sum(begun >= at + SETTLED_SECONDS for begun in self._moves) > 1 or now - at > UNSETTLED_SECONDS

    @staticmethod
    def _pay(budget: Budget, requests: float, dp: int | None = None) -> bool:
        """Take requests from those that a counter gained, of a scheduler where it is known, the oldest first; whether it gained so many."""
        mine = [place for place, each in enumerate(budget) if dp is None or each[2] is None or each[2] == dp]
        if requests > sum(budget[place][1] for place in mine) + 1e-9:
            return False
        for place in mine:
            at, number, of = budget[place]
            taken = min(number, requests)
            budget[place], requests = (at, number - taken, of), requests - taken
        for place in reversed(mine):
            if budget[place][1] <= 0:
                del budget[place]
        return True

    def _read_until(self, now: float) -> float:
        """Return until when all lines that were written are here: a busy machine may read them much later."""
        return max(min(now, self.read_to), now - UNREAD_SECONDS)

    def _count_unlogged(self, now: float) -> None:
        """Count what the counter gained and no line shows."""
        logged = self._reads and now - self.server.last.get("batch", -inf) <= SILENT_SECONDS
        waiting = (event for _, event in (*self._waiting, *self._held) if event.kind == "retraction")
        owed = sum(event.figures.get("requests", 1.0) for event in waiting)
        while sum(number for _, number, _ in self._retracted) > owed and (
            not self._reads or self._read_until(now) - self._retracted[0][0] > LATE_LINES_SECONDS
        ):
            at, number, dp = self._retracted.popleft()
            self.server.count_retracted(number, min(at, now), dp)
            if logged and self.server.starts == self._served_starts:
                self._disagreed["retracted_requests"] = now

    def _release(self, *, accept: bool) -> None:
        """Take a start that waited with the lines after it, or these without it."""
        held, self._held = self._held, []
        if accept:
            self.server.counters.former = None
            waiting, self._waiting = self._waiting, deque()
            for _, event in waiting:
                if event.kind not in COUNTED_BY_PAGE or not self._counts(event.kind):
                    self._accept(event)
            for _, event in held:
                self._accept(event)
            return
        if not held:
            return
        self.doubtful["arguments", "works_on"] += 1
        for _, event in held:
            if event.kind not in OF_A_START:
                self.take(event)

    def _compare_pools(self, page: Scrape, now: float) -> None:
        for rank in page.ranks if self._reads else ():
            logged = self.server.facts.pools.get(rank.dp)
            if logged and rank.kv_pool_tokens:
                differs = abs(rank.kv_pool_tokens - logged) > POOL_TOLERANCE * logged
                self._disagreed["kv_pool_tokens"] = now if differs else self._disagreed.get("kv_pool_tokens", -inf)

    def lose(self, reason: str, message: str, now: float, *, serves: bool = False) -> Failure:
        """Take a scrape that failed; return why, as far as what was seen before explains it."""
        self._failed_since = now if self._failed_since is None else self._failed_since
        if reason in AWAY or self._held:
            self._release(accept=True)  # it is gone, as its log says
        self._stands_since = None
        if reason in AWAY or reason == "not_sglang":
            self.server.lose(now)
        if reason == "metrics_disabled":
            self.server.by_page.clear()  # from now on the log counts
        self.failure = self._explained(reason, message, now, serves=serves)
        return self.failure

    def _explained(self, reason: str, message: str, now: float, *, serves: bool) -> Failure:  # noqa: PLR0911 - one for each way to fail
        server, seconds = self.server, now - (self._failed_since or now)
        had = self._served_starts is not None and self._served_starts == server.starts
        if reason == "metrics_disabled":
            gone = had or self._answers_otherwise is False or bool(server.ended)
            if self._answers_otherwise or not gone:
                return Failure(reason, message)
            before = ", and had metrics before" if had else ", as a proxy does for a server that is gone"
            return Failure("http_404", f"it answers 404{before}")
        self._answers_otherwise = None
        if reason == "no_series":  # before SGLang ever answered it is another server; afterwards a proxy in its place
            known = self._answered_at is not None or server.counters.former is not None
            return Failure("invalid" if known else "not_sglang", message)
        if serves:
            empty_at_first = server.facts.is_before(*FIRST_WITH_FIGURES)
            if not server.ended and (seconds < STARTING_SECONDS or empty_at_first):
                return Failure("not_ready", message, serves=True)
            return Failure("invalid", f"its page has been empty for {seconds / 60:.0f} minutes", serves=True)
        if reason in AWAY and self._may_start(reason, now, seconds):
            return Failure("not_ready", f"{message} (it may still be starting)", starting=True)
        return Failure("http_503", f"{message}, and nothing shows that it starts") if reason == "not_ready" else Failure(reason, message)  # fmt: skip

    def _may_start(self, reason: str, now: float, seconds: float) -> bool:
        """Whether a server that is away may be starting: its log shows a start, or nothing shows that it ever served."""
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
        first = min((at for at, _ in (*self._waiting, *self._held)), default=now)
        if now - first > UNSETTLED_SECONDS and (self._answered_at or -inf) < first + SETTLED_SECONDS:
            self._release(accept=True)
        self._count_unlogged(now)

    @property
    def is_up(self) -> bool | None:
        """Whether the last scrape was answered; None before the first."""
        if self.failure is not None:
            return False
        return None if self._answered_at is None else True

    def view(self, now: float, seconds: float | None = None) -> View:
        """Return the last ten minutes, or `seconds`."""
        self.advance(now)
        server = self.server
        whole = self._since_start(seconds or server.profile.window_seconds, now)
        failure, answered = self.failure, self._answered_at is not None
        reason, message = ("", "") if failure is None else (failure.reason, failure.message)
        troubles = {reason: message} if reason in NO_METRICS else {}
        if silent := self.silence(now):
            troubles["log_silent"] = silent
        if any(self.disagreements(now).values()):
            troubles["sources_disagree"] = "log and metrics disagree"
        # With the log alone: once it says no more that requests remain, and does not work on.
        is_silent = not self._scrapes and now - server.last.get("liveness.draining", now) > WORKS_ON_SECONDS
        stopped = server.stopping and (reason in AWAY - {"not_ready"} or is_silent)
        down = (
            ""
            if stopped or reason in NO_METRICS | {"", "not_ready"}
            else f"its /metrics could not be scraped ({message})"
        )
        if down and reason == "timeout":
            down = f"it takes connections and does not answer ({message}): its HTTP server or its tokenizer hangs"
        down_share, outages = self._down_time(now)
        silent_seconds = server.progress.silence(now) if failure is None else 0.0
        stuck = server.progress.stuck(now) if failure is None and answered else None
        if stuck is not None:
            server.hangs_on(now - stuck.seconds, now)
        if stuck is not None or "takes connections" in down:
            self._hung_at = now
        starting = failure.starting if failure is not None else not answered and server.starting
        if starting and not self._scrapes:
            starting = now - server.last.get("starts", now) < STARTING_SECONDS
        return replace(
            whole,
            stopped=stopped,
            scraped=answered and failure is None,
            down=down,
            stuck=stuck,
            burning=self._burning(now),
            down_share=down_share,
            outages=outages,
            silent_seconds=silent_seconds,
            hung=now - self._hung_at <= server.profile.window_seconds
            or server.progress.gave_up > 0
            or silent_seconds > 0,
            busy=any((each.running or 0) + (each.queued or 0) > 0 for each in server.schedulers.values()),
            troubles=troubles,
            starting=starting,
        )

    def _since_start(self, seconds: float, now: float) -> View:
        """Return the last `seconds`, or those since the last start: it has other settings. How it ended before stays in sight."""
        window = self.server.window(seconds)
        whole = view_of(self.server, min(seconds, max(now - self.server.last.get("starts", -inf), 0.0)))
        for name in ("ends", *(f"out_of_memory.{phase}" for phase in OUT_OF_MEMORY_PHASES)):
            if window[name]:
                whole.totals[name] = window[name]
        if self.server.ended and not whole.totals["ends"]:
            whole.totals["ends"] = 1.0  # longer ago, and nothing has come since
        return whole

    def _burning(self, now: float) -> dict[tuple[str, str], float]:
        begun = max(self.server.last.get("starts", -inf), self.begin)
        shares = {
            (latency, rate): self.ledger.burning(self.server.counted, latency, rate, now, begun)
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

    def measure(self, now: float) -> Measured:
        """Weigh the last ten minutes, and let the alert clocks go on."""
        measured = weigh(self.view(now))
        self.clocks.pass_on(measured, self.server, now)
        self.since = {
            name: self.since.get(name) or self._first_seen(name, measured.view, now) for name in measured.holding
        }
        return measured

    def _first_seen(self, name: str, view: View, now: float) -> float:
        """Return when what a row is about was first seen in the last ten minutes; now where only metrics or sources show it."""
        row = BY_ID[name]
        if view.stuck is not None and name == "scheduler_stuck":
            return now - view.stuck.seconds
        if row.when.needs in {"metrics", "a sidecar"}:
            return (self._failed_since if view.down else None) or now
        begin = max(self.server.last.get("starts", -inf), now - self.server.profile.window_seconds)
        times = seen(row, self.server, begin, now)
        return times[0] if times is not None else now

    def judge(self, now: float) -> Judgement:
        """Return what limits the server, and let the words that stand follow."""
        self.measured = measured = self.measure(now)
        found = tuple(self._timed(each, measured.view, now) for each in findings(measured))
        judgement = judgement_of(measured, going_on_first(found))
        self.words.take(judgement, measured.view, now, {each.diagnosis: each.at for each in self.clocks.firing})
        return judgement

    def _timed(self, finding: Finding, view: View, now: float) -> Finding:
        """Add since when a finding holds, and say one that is over in the past tense."""
        server, name, since = self.server, finding.diagnosis, self.since.get(finding.diagnosis)
        goes_on = name == "server_down" or (name == "scheduler_stuck" and view.stuck) or (name == "crashed" and server.ended)  # fmt: skip
        begin = max(server.last.get("starts", -inf), now - server.profile.window_seconds)
        found = None if goes_on else timed(finding, server, begin, now, now=now, counts=view.totals)
        return replace(finding, since=since) if found is None or not found.over else replace(found, since=since)

    # A restart of the exporter

    def saved(self, now: float) -> dict[str, object]:
        """Return what was counted and decided, and the lines that wait, as plain JSON; times are ages in seconds."""
        return {
            "counted": {name: value for name, value in self.server.counts_by_now().items() if value},
            "ranks": [
                [dp, {name: value for name, value in life.items() if value}] for dp, life in self.server.lives.items()
            ],
            "doubtful": [[*key, number] for key, number in self.doubtful.items()],
            "ledger": self.ledger.saved(now),
            "waiting": [[now - at, to_json(event)] for at, event in self._waiting],
            "retracted": self._retracted_so_far(),
            "clocks": self.clocks.saved(now),
            "words": self.words.saved(now),
            "starts": [now - at for at in self.server.started_at],
            "outages": [[now - begin, now - end] for begin, end in self._outages],
            "end": [
                [now - (end.time or now), to_json(end)] for end in (self.server.end_explanation,) if end is not None
            ],
        }

    def restore(self, saved: object, now: float, age: float) -> None:
        """Go on from what an exporter saved `age` seconds ago; what cannot be read is left out. No present figure is restored."""
        document, then = saved if isinstance(saved, dict) else {}, now - age
        counted = document.get("counted")
        for name, value in counted.items() if isinstance(counted, dict) else ():
            if is_count(value):
                self.server.counted[str(name)] = float(value)
        self._restore_ranks(document.get("ranks"))
        for entry in lists(document.get("doubtful")):
            match entry:
                case [str(kind), str(reason), int() as number] if number >= 0:
                    self.doubtful[kind, reason] = number
        self.ledger.restore(document.get("ledger"), then)
        self._waiting.extend(islice(aged(document.get("waiting"), then), MOST_WAITING))
        if age <= UNKNOWN_AGE:
            self.server.counters.former = self._former(document.get("retracted"))
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
                    known = {str(name): float(value) for name, value in counts.items() if is_count(value)}
                    self.server.life(dp).update(known)
                    if dp is not None and self._scrapes:  # pages say which ranks there are
                        self.server.absent.add(dp)

    def _retracted_so_far(self) -> list[object] | None:
        """Return what the last page counted and no line has used, for the next exporter."""
        page, unused = self.server.counters.whole, Counter[int | None]()
        if page is None or page.progress is None or self.failure is not None or page.counters_invalid:
            return None
        for _, number, dp in self._retracted:
            unused[dp] += int(number)
        counted = [(rank.dp, rank.retracted_requests) for rank in page.ranks]
        return [page.progress, [[dp, number - unused[dp]] for dp, number in counted if number is not None]]

    @staticmethod
    def _former(saved: object) -> Scrape | None:
        """Return the page that `_retracted_so_far` saved; None where it cannot be one."""
        match saved:
            case [int() | float() as progress, list() as ranks] if ranks:
                return Scrape(
                    [
                        RankFigures(dp, retracted_requests=float(number))
                        for dp, number in (each for each in lists(ranks) if len(each) == 2)
                        if isinstance(dp, int | None) and is_count(number)
                    ],
                    progress=float(progress),
                )
        return None
