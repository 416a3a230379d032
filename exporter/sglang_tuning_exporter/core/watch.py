"""A server as its time passes: lines and pages in, judgements and alerts out. Pure; times are unix seconds. `Watch` lives beside it, `Course` judges
a log of the past.

With the log alone a line counts at once. With metrics SGLang's own counters have the last word: what a line says of a retraction, an end or
a start waits for the next scrape. Nothing that was counted is taken back; what a scrape refutes is counted in `doubtful`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import TypeAlias

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core import answer, diagnoses, judge
from sglang_tuning_exporter.core.alerts import Clocks, Words
from sglang_tuning_exporter.core.diagnoses import BY_ID, Diagnosis
from sglang_tuning_exporter.core.events import OUT_OF_MEMORY_PHASES, Event, aged, is_count, lists, to_json
from sglang_tuning_exporter.core.findings import URGENCY, Alert, Finding, Judgement, Start, Stretch
from sglang_tuning_exporter.core.server import (
    BUCKET_SECONDS,
    LATENCIES_JUDGED,
    WORKS_ON_SECONDS,
    Server,
    Totals,
    merged,
)
from sglang_tuning_exporter.core.view import BURN_RATES, View, view_of
from sglang_tuning_exporter.sglang.flags import VARYING_ARGS, are_same_settings
from sglang_tuning_exporter.sglang.metrics import RankFigures, Scrape
from sglang_tuning_exporter.sglang.server_info import ServerInfo

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
        self.measured: judge.Measured | None = None  # at the last judgement
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
        self._settled = WAITING  # kinds of lines that a page confirms or refutes
        self._first_page: float | None = None  # when it was asked for
        self._unsure: list[Event] = []  # lines that the first page may have counted already
        self._sendings: deque[float] = deque(
            maxlen=8
        )  # when pages were asked for that showed that tokens had been sent
        self._disagreed: dict[str, float] = {}  # when log and metrics last disagreed about a fact that both show
        self._worked_at = -inf  # metrics last showed work
        self._served_starts: int | None = None  # how many starts were known when a page last came
        self._hung_at = -inf
        self.ledger = Ledger()
        self._outages: deque[tuple[float, float]] = deque(maxlen=256)

    def take(
        self,
        seen: Event | Scrape | ServerInfo | RankFigures,
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
        is_settled = event.kind in self._settled
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
        elif is_settled and event.kind == "retraction" and self.server.is_repeated(event, now):
            return  # what every TP rank prints is paid for once
        elif is_settled or self.server.counters.former is not None:
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
        return past and not (event.kind == "retraction" and event.kind in self._settled and is_newer)

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
        server.counted, server.unexplained = counted, None
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
        server, counters, before = self.server, self.server.counters, self.server.page
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
        counts_retractions = any(rank.retracted_requests is not None for rank in whole.ranks)
        counts_requests = any(getattr(whole, name) is not None for name in REQUESTS)
        self._settled = (
            WAITING | (OF_A_REQUEST if counts_requests else set()) | ({"retraction"} if counts_retractions else set())
        )
        if self._reads and counts_retractions:
            self._disagreed.setdefault("retracted_requests", -inf)
        moved = bool(counters.moved) or counters.restarted
        self._stands_since = None if moved or not busy else now if self._stands_since is None else self._stands_since
        if moved or (busy and counters.moved is None):
            self._worked_at = now
        if moved:
            self._moves.append(begun)
        if before is None or page.sent != before.sent:
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
        if event.kind == "health" and self.server.page is not None and self.server.page.sent is not None:
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
            server.hangs_on(stuck, now)
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

    def measure(self, now: float) -> judge.Measured:
        """Weigh the last ten minutes, and let the alert clocks go on."""
        measured = judge.weigh(self.view(now))
        self.clocks.pass_on(measured, self.server, now)
        self.since = {
            name: self.since.get(name) or self._first_seen(name, measured.view, now) for name in measured.holding
        }
        return measured

    def _first_seen(self, name: str, view: View, now: float) -> float:
        """Return when what a row is about was first seen in the last ten minutes; now where only metrics or sources show it."""
        row = BY_ID[name]
        if (since := row.since(view)) is not None:
            return since
        if not row.when.in_log:
            return (self._failed_since if view.down else None) or now
        begin = max(self.server.last.get("starts", -inf), now - self.server.profile.window_seconds)
        times = judge.seen(row, self.server, begin, now)
        return times[0] if times is not None else now

    def judge(self, now: float) -> Judgement:
        """Return what limits the server, and let the words that stand follow."""
        self.measured = measured = self.measure(now)
        found = tuple(self._timed(each, measured.view, now) for each in judge.findings(measured))
        judgement = judge.judgement_of(measured, judge.going_on_first(found))
        self.words.take(judgement, measured.view, now, {each.diagnosis: each.at for each in self.clocks.firing})
        return judgement

    def _timed(self, finding: Finding, view: View, now: float) -> Finding:
        """Add since when a finding holds, and say one that is over in the past tense."""
        server, since = self.server, self.since.get(finding.diagnosis)
        goes_on = BY_ID[finding.diagnosis].goes_on(view)
        begin = max(server.last.get("starts", -inf), now - server.profile.window_seconds)
        found = None if goes_on else judge.timed(finding, server, begin, now, now=now, counts=view.totals)
        return replace(finding, since=since) if found is None or not found.over else replace(found, since=since)

    def whole(self, judgement: Judgement, now: float) -> Judgement:
        """Return what a report would have, of a server that runs: its window, its present start, its counts since the beginning."""
        server, measured = self.server, self.measured
        view = measured.view if measured is not None else self.view(now)
        facts, window = server.facts, server.profile.window_seconds
        counts = {name: server.counted[count] for name, count in answer.COUNTED.items()}
        if not counts["server_starts"] and (server.started_at or facts.arguments):
            del counts["server_starts"]  # that no start was counted says nothing where one is known from before
        started = server.started_at[-1] if server.started_at else None
        return answer.beside(
            judgement, server, view.totals, profile=server.profile.name,
            # Lines from before the exporter are in the window too.
            begin=max(now - window, min(self.begin, server.begin or self.begin)), end=now,
            serving_seconds=view.served, idle_seconds=view.idle, alerts=tuple(sorted(self.clocks.firing, key=lambda alert: alert.at)),
            starts=(Start(started, facts.shown_release, facts.arguments, {}, answer.figures_of(view), server.ended, answer.memory(facts)),),
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


# A log of the past

STEP_SECONDS = 30.0
CALM_SECONDS = 2700.0  # of silence, after which nothing changes: starts count for half an hour, and no alert waits for longer than the rest
# In a run shorter than the window, what held in stretches of this length for so much of it is said as well: two causes in turn.
PHASE_SECONDS, LEAST_PHASE_SECONDS, PHASE_SHARE = 60.0, 60.0, 0.35
ENOUGH_SHARE = 0.5  # of the serving time: in a log shorter than a row's `after`
STRETCH_SECONDS = 15.0  # shorter pauses do not divide a load


@dataclass(slots=True)
class Held:
    """How long a row held in a run, and the view in which it was clearest."""

    run: Run
    row: Diagnosis
    measured: judge.Measured
    excess: float
    seconds: float = 0.0


@dataclass(slots=True)
class Run:
    """One start of the server, until the next."""

    begin: float
    whole: View  # all of it, once it has ended
    is_start: bool = False  # its arguments are in the log
    held: dict[str, Held] = field(default_factory=dict)
    phases: dict[str, Held] = field(default_factory=dict)  # of the last minute, in a run shorter than the window
    verdicts: Totals = field(default_factory=Totals)  # seconds of serving time

    @property
    def ended(self) -> str:
        """How it ended; empty where it did not."""
        return self.whole.ended if self.whole.has_ended else ""


class Course:
    """Takes the events of a log in order of time; `end` says what the whole shows.

    Every `STEP_SECONDS` of the log the last ten minutes are weighed. A start begins anew: a run shorter than that is weighed once, at its end.
    """

    def __init__(self, profile: profiles.Profile) -> None:
        self.server = Server(profile)
        self.runs: list[Run] = []
        self._profile = profile
        self._step: float | None = None  # the next one
        self._credited: dict[int | None, float] = {}  # serving seconds of each scheduler that are credited to rows
        self._clocks = Clocks(profile)
        self._alerts: list[Alert] = []
        self._last_line: float | None = None

    def take(self, event: Event) -> None:
        """Take an event."""
        server, now = self.server, event.time
        if not self.runs:
            self._begin_run(now or 0.0)
        if now is not None:
            if self._step is None:  # what has no time before it is of the same run
                self._step, self.runs[-1].begin = now + STEP_SECONDS, now
            self._pass_until(now)
            self._last_line = now
        if event.kind == "arguments":
            self._end_run()
        server.take(event)
        if event.kind == "arguments":
            self._begin_run(server.now or 0.0, is_start=True)

    def _begin_run(self, begin: float, *, is_start: bool = False) -> None:
        self.runs.append(Run(begin, view_of(self.server, 0.0), is_start))

    # As time passes

    def _pass_until(self, now: float) -> None:
        """Weigh at each step up to a time."""
        while self._step is not None and self._step <= now:
            self._pass(self._step)
            silent = self._step - (self._last_line or self._step)
            quiet = silent > CALM_SECONDS and now - self._step > 2 * self._profile.window_seconds
            self._step = now - self._profile.window_seconds if quiet else self._step + STEP_SECONDS

    def _pass(self, now: float) -> None:
        """Weigh the last ten minutes at a step."""
        self.server.advance(now)
        run, window = self.runs[-1], self._profile.window_seconds
        measured = judge.weigh(view_of(self.server, min(window, now - run.begin)))
        self._alerts += self._clocks.pass_on(measured, self.server, now)
        if now - run.begin >= window:
            run.phases.clear()
            self._credit(run, measured)
        else:
            phase = judge.weigh(view_of(self.server, min(PHASE_SECONDS, now - run.begin)))
            for name in phase.holding if phase.view.has_enough_load else ():
                self._hold(run, run.phases, name, phase, min(STEP_SECONDS, phase.view.served))

    def _credit(self, run: Run, measured: judge.Measured, *, whole: bool = False) -> None:
        """Count the serving time since the last step for what holds."""
        served = {dp: life["activity/serving"] for dp, life in self.server.lives.items()}
        seconds = max((now - self._credited.get(dp, 0.0) for dp, now in served.items()), default=0.0)
        self._credited = served
        if measured.view.has_enough_load or whole:
            run.verdicts[measured.verdict] += seconds
        for name in measured.holding:
            self._hold(run, run.held, name, measured, seconds)

    @staticmethod
    def _hold(run: Run, rows: dict[str, Held], name: str, measured: judge.Measured, seconds: float) -> None:
        """Credit seconds to a row, and keep the view in which it was clearest."""
        figure = measured.figures[name]
        excess = (figure.value - (figure.limit or 0.0)) * (1 if figure.side == "above" else -1)
        held = rows.setdefault(name, Held(run, BY_ID[name], measured, excess))
        held.seconds += seconds
        if excess > held.excess:
            held.excess, held.measured = excess, measured

    def _end_run(self) -> judge.Measured:
        """Weigh what is left of a run at its end, and return that."""
        server, run = self.server, self.runs[-1]
        now = server.now or 0.0
        server.advance(now)
        run.whole = whole = view_of(server, now - run.begin)
        last = judge.weigh(view_of(server, min(self._profile.window_seconds, now - run.begin)))
        self._credit(run, last, whole=True)
        if whole.has_enough_load and set(run.verdicts) <= {judge.NOT_ENOUGH, judge.IDLE}:
            measured = judge.weigh(whole)  # too little in any ten minutes, enough in all
            run.verdicts = Totals({measured.verdict: whole.served})
            for name in measured.holding:
                self._hold(run, run.held, name, measured, whole.served)
        least = max(LEAST_PHASE_SECONDS, PHASE_SHARE * whole.served)
        run.phases = {
            name: held
            for name, held in run.phases.items()
            if name not in run.held and held.seconds >= least and not BY_ID[name].chance
        }
        run.phases = {name: held for name, held in run.phases.items() if not held.row.denied_in_part(whole)}
        beside = frozenset(held.row for held in run.held.values())
        for rows in (run.held, run.phases):
            for name in [name for name, held in rows.items() if held.row.denied(whole, beside)]:
                del rows[name]
        return last

    # The whole

    def end(self, now: float | None = None) -> Judgement:
        """Return what the log says; `now` is the time of its last line."""
        server = self.server
        if now is not None and server.now is not None and now > server.now:
            self._pass_until(now)
            server.advance(now)
        if not self.runs:
            self._begin_run(0.0)
        server.settle()
        last, end = self._end_run(), server.now or 0.0
        if server.begin is not None:
            self._alerts += self._clocks.pass_on(last, server, end)
        self._alerts += self._clocks.firing
        judgement = self._judgement(end)
        totals = merged(bucket for _, bucket in server.buckets)
        served = sum(run.whole.served for run in self.runs)
        verdicts, own = merged(run.verdicts for run in self.runs), judgement.own
        total = sum(verdicts.values())
        mostly = max(verdicts, key=verdicts.__getitem__) if total else None
        if mostly is not None and own is not None and judgement.verdict not in verdicts:
            verdicts[mostly] -= min(own.seconds, verdicts[mostly])  # a part of it, in which something else held
        return answer.beside(
            judgement, server, totals, profile=self._profile.name, begin=server.begin, end=server.now if server.begin is not None else None,
            serving_seconds=served, idle_seconds=View(totals, server.facts, server.profile, end).idle,
            mostly=None if mostly is None else (mostly, verdicts[mostly] / total),
            alerts=tuple(sorted(self._alerts, key=lambda alert: alert.at)), course=self._stretches(),
            starts=tuple(self._start(number, run) for number, run in enumerate(self.runs) if run.is_start or run.whole.served or len(self.runs) == 1),
            counts={name: totals[count] for name, count in answer.COUNTED.items()},
            available_gb=tuple(gigabytes for run in self.runs for gigabytes in run.whole.facts.left.values()),
        )  # fmt: skip

    def _judgement(self, end: float) -> Judgement:
        """Return the worst verdict that held long enough, with every finding of the log."""
        served, last = sum(run.whole.served for run in self.runs), self.runs[-1]
        chosen = [held for run in self.runs for held in run.held.values() if self._counts(held, served)]
        chosen += last.phases.values()
        names = {each.row.id for each in chosen}
        also = frozenset(name for name in names if BY_ID[name].protects)
        limits = sorted(
            (held for held in chosen if held.row.is_limit(held.measured.view)),
            key=lambda each: (
                -URGENCY[each.row.severity],
                each.run is not last,
                diagnoses.place(each.row),
                -each.seconds,
            ),
        )
        for held in limits:
            run, name, found = held.run, held.row.id, judge.findings(held.measured, also)
            if all(each.diagnosis != name for each in found):
                continue  # a row whose advice is left to another is no finding
            context = [
                self._timed(each, run.held.get(each.diagnosis, held), end)
                for each in found
                if each.diagnosis in names or not each.is_limit
            ]
            context.sort(key=lambda each: each.diagnosis != name)
            every = sorted(
                [*context, *self._others(chosen, context, end, also)],
                key=lambda each: (each.diagnosis != name, not each.is_limit, -URGENCY[each.severity]),
            )
            checks, notes = held.measured.checks, self._notes(judge.muted(self._profile, {}))
            return Judgement(name, every[0].headline, every[0].severity, tuple(every), checks, notes)
        return self._without_limit(chosen, end)

    def _without_limit(self, chosen: list[Held], end: float) -> Judgement:
        """Return the judgement where nothing limited the server for long enough."""
        run = max(
            self.runs,
            key=lambda each: (
                each.whole.served >= self._profile.enough_serving_seconds,
                each is self.runs[-1],
                each.whole.served,
            ),
        )
        base = judge.judge(run.whole)
        kept = [each for each in base.findings if not each.is_limit]
        others = self._others(chosen, kept, end)
        found = (*kept, *others)
        first = next((each for each in found if each.is_limit), None)
        if first is not None:
            return Judgement(
                first.diagnosis, first.headline, first.severity, found, base.checks, self._notes(base.notes)
            )
        verdict = base.verdict if base.verdict not in BY_ID else judge.NO_LIMIT
        sentence = base.sentence if verdict == base.verdict else judge.SENTENCES[verdict]
        if verdict == judge.NOT_ENOUGH:
            sentence = judge.said_at_once(verdict, found) or judge.short_load(run.whole)
        if verdict == judge.STARTING:
            sentence = (
                "The log ends before the server is ready: it does not say whether it still starts, or why it ended."
            )
        return Judgement(verdict, sentence, "none", found, base.checks, self._notes(base.notes))

    def _counts(self, held: Held, served: float) -> bool:
        """Whether a row held long enough to be reported; of a run before other settings only failures are."""
        run, row, last = held.run, held.row, self.runs[-1]
        if row.any_load:
            return row.chance is False or run is last or run.whole.served > 0
        is_enough = last.whole.served >= self._profile.enough_serving_seconds
        is_old = run is not last and is_enough and row.severity != "critical"
        if is_old and not are_same_settings(run.whole.facts.arguments, last.whole.facts.arguments):
            return False
        runs = [run] if run is last and is_enough else self.runs
        judged = sum(sum(each.verdicts.values()) for each in runs) or served  # a start begins another server
        return held.seconds >= min(row.after, ENOUGH_SHARE * judged) and held.seconds > 0

    def _others(
        self, chosen: list[Held], found: list[Finding], end: float, also: frozenset[str] = frozenset()
    ) -> list[Finding]:
        """Return the findings of other times; a flag that is set already is not set again."""
        names = {each.diagnosis for each in found}
        flags = {change.arg: change.to for each in found for change in each.changes if change.arg and each.is_limit}
        more: list[Finding] = []
        for held in sorted(chosen, key=lambda each: -each.seconds):
            name = held.row.id
            if name in names:
                continue
            own = next((each for each in judge.findings(held.measured, also) if each.diagnosis == name), None)
            if own is None:
                continue
            kept = tuple(change for change in own.changes if change.arg not in flags or flags[change.arg] == change.to)
            if not kept and held.row.needs_advice and not own.is_limit:
                continue
            names.add(name)
            flags.update({change.arg: change.to for change in kept if change.arg and own.is_limit})
            more.append(self._timed(replace(own, changes=kept), held, end))
        return more

    def _timed(self, finding: Finding, held: Held, end: float) -> Finding:
        """Add when a finding was seen; one that is over is said in the past tense."""
        run = held.run
        found = judge.timed(finding, self.server, run.begin, run.whole.now, now=end, counts=run.whole.totals)
        if found is None:
            always = BY_ID[finding.diagnosis].any_load
            found = replace(finding, since=run.begin if always else None, until=run.whole.now if always else None)
        return replace(found, seconds=held.seconds)

    def _notes(self, muted: tuple[str, ...]) -> tuple[str, ...]:
        """Say what was silent, and which range of the guide a figure lies outside of where no finding does."""
        server, ranks = self.server, self.server.schedulers.values()
        notes = [
            f"Nothing was logged for {silence.seconds:.0f} s from {_clock(silence.begin)} on, while {silence.before:.0f} requests ran; afterwards"
            f" {silence.after:.0f} ran."
            for silence in server.silences[:3]
        ]  # fmt: skip
        running = sum(each.running or 0.0 for each in ranks)
        if running >= 1 and self._last_line is not None and not server.stopping and not server.ended:
            silent = self._last_line - max(each.logged_at for each in ranks)
            if silent <= 1.2 * max(each.hold_seconds for each in ranks):
                notes.append(f"The log ends while {running:.0f} ran; whether they were answered is not in it.")
        view = max((run.whole for run in self.runs), key=lambda whole: whole.served)
        profile, reserve, lower, queued = (
            view.profile,
            view.facts.reserve_gb,
            view.profile.queue_lower,
            view.sum("queued"),
        )
        if reserve is not None and profile.reserve_good_gb < reserve <= profile.reserve_upper_gb:
            good, upper = f"the guide's good range (5 to {profile.reserve_good_gb:g} GB)", profile.reserve_upper_gb
            known = f"neither in {good} nor too much (more than {upper:g} GB)" if upper < inf else f"above {good}"
            notes.append(f"{reserve:.4g} GB of GPU memory were left after the start: {known}.")
        if view.facts.is_on("disable_radix_cache") and view.has_enough_load and view.facts.role != "decode":
            notes.append(
                "The prefix cache is off (--disable-radix-cache): prompts that share a prefix are computed whole, each time."
            )
        is_short = view.has_enough_load and (view.share("queue", "below_range") or 0.0) > profile.frequent_share
        if lower and queued and is_short:
            notes.append(
                f"{queued:.0f} requests waited on average; the guide's range is {lower:g} to {profile.queue_upper:,.0f}."
            )
        return (*muted, *notes)

    # What is shown beside it

    def _start(self, number: int, run: Run) -> Start:
        before = self.runs[number - 1].whole.facts.arguments if number and self.runs[number - 1].is_start else {}
        facts = run.whole.facts
        changed = {
            arg: (before.get(arg), value)
            for arg, value in facts.arguments.items()
            if before and arg not in VARYING_ARGS and before.get(arg) != value and not isinstance(value, dict)
        }  # fmt: skip
        return Start(
            run.begin if run.is_start and self.server.begin is not None else None, facts.shown_release, facts.arguments, changed,
            answer.figures_of(run.whole), run.ended, answer.memory(facts),
        )  # fmt: skip

    def _stretches(self) -> tuple[Stretch, ...]:
        """Return the course of the run: starting, serving, idle, silent, stopped."""
        if self.server.begin is None:
            return ()
        stretches: list[Stretch] = []
        for run in self.runs:
            begin, end = run.begin, run.whole.now
            serving = [
                (max(at, begin), min(at + BUCKET_SECONDS, end))
                for at, totals in self.server.buckets
                if begin - BUCKET_SECONDS < at <= end and any(totals.under("serves").values())
            ]
            if run.is_start:
                first = serving[0][0] if serving else end
                words = ", ".join(answer.memory_words(answer.memory(run.whole.facts), "CUDA graphs"))
                stretches.append(Stretch("starting", begin, first, words))
                begin = first
            for start, stop in serving:
                if start - begin > STRETCH_SECONDS:
                    stretches.append(self._without_work(begin, start))
                    begin = start
                if stretches and stretches[-1].what == "serving" and start - stretches[-1].end <= STRETCH_SECONDS:
                    stretches[-1] = replace(stretches[-1], end=stop)
                else:
                    stretches.append(Stretch("serving", min(begin, start), stop))
                begin = max(begin, stop)
            if run.ended:
                stretches.append(Stretch("stopped", begin, end, run.ended))
            elif end - begin > 1.0:
                stretches.append(self._without_work(begin, end))
        return tuple(stretches)

    def _without_work(self, begin: float, end: float) -> Stretch:
        """Return a stretch in which no batch was logged: silent where requests waited most of the time, or were retracted."""
        totals = [totals for at, totals in self.server.buckets if begin - BUCKET_SECONDS < at < end]
        idle, unknown = (sum(each[f"queue/{state}"] for each in totals) for state in ("idle", "unknown"))
        worked = unknown > idle or any(each["retractions"] for each in totals)
        return Stretch("silent" if worked else "idle", begin, end)


def _clock(moment: float) -> str:
    minutes = int(moment // 60) % (24 * 60)
    return f"{minutes // 60:02}:{minutes % 60:02}"
