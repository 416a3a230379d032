"""One server's state over time: events and scrapes in, gauges, counters and seconds in each state out.

Pure: no I/O and no clock; `now` is seconds on one monotonic clock (live: the moment of arrival; offline: the line's
own time). An observation holds until the next one, at most 60 s; after that the state is `unknown` and its seconds go
there.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, get_args

from sglang_tuning_exporter.sglang.args.printed import are_same_settings
from sglang_tuning_exporter.sglang.events import (
    ENDS,
    MOST_RANKS,
    NO_RANK,
    OUT_OF_MEMORY_PHASES,
    DecodeBatch,
    Event,
    KvPool,
    Limits,
    Liveness,
    LivenessKind,
    Memory,
    OutOfMemory,
    PrefillBatch,
    RankFigures,
    Rejection,
    Retraction,
    Scrape,
    ServerArgs,
)
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
from sglang_tuning_exporter.sglang.metrics.catalogue import SERVER_COUNTS
from sglang_tuning_exporter.state.confirmation import FATAL, Claims
from sglang_tuning_exporter.state.counters import gained
from sglang_tuning_exporter.state.deduplication import OutOfMemoryLedger, RetractionLedger, StatsRanks
from sglang_tuning_exporter.state.dp_attention import AttentionRanks
from sglang_tuning_exporter.state.facts import WHOLE_ARGS, ServerFacts, number
from sglang_tuning_exporter.state.forgeries import ForgeryFilter, counts
from sglang_tuning_exporter.state.latency import LATENCIES, Latency, LatencyLedger, Recent
from sglang_tuning_exporter.state.rank import RankState
from sglang_tuning_exporter.state.stages import Hang, Look, Stages
from sglang_tuning_exporter.state.totals import Totals, Window

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping

    from sglang_tuning_exporter.state.confirmation import Believed
    from sglang_tuning_exporter.state.profiles import Profile

# A failure whose line does not tell its phase waits this long for another rank's line that does: a counter cannot take back.
EXPLAIN_SECONDS = 0.4
# After this long a server that printed its arguments and never became ready is not starting any more.
STARTING_SECONDS = 1800.0
# A log that comes back tells what it missed within so long, or not at all.
LATE_SECONDS = 60.0
# A server whose end is in its log may answer for so long.
ENDING_SECONDS = 60.0

# The largest deployments that were told of have 320 DP ranks; a rank here is sixty series and as many marks of the past.
MOST_SCHEDULERS = 384

# Names of what is remembered beside failures, by their phase, and what `Liveness` tells.
START, WORK, RETRACTION, REJECTION, ABORTED = "start", "work", "retraction", "rejection", "aborted_requests"
HUNG = "hung"
_ALIVE: tuple[str, str] = ("", "")
_WATCHDOG: LivenessKind = "watchdog_timeout"
_AGED = frozenset({*OUT_OF_MEMORY_PHASES, *get_args(LivenessKind)})  # of these it is kept when they last happened
# With speculation several tokens come in a step, and the releases that send every fiftieth token may miss some of these.
SPECULATED_STEPS = 250.0

_Start: TypeAlias = "ServerArgs | KvPool | Memory | Limits | Liveness"


class Listener(Protocol):
    """Is told of the events that are believed, batch lines left out, with the time at which each was read."""

    def starts(self, event: ServerArgs, at: float) -> None:
        """A start is believed; the state is still that of the server before it."""

    def takes(self, event: Event, at: float) -> None:
        """An event has been taken."""


class ServerState:
    """One server: its facts, its schedulers, and what happened to it."""

    def __init__(self, profile: Profile, now: float, listener: Listener | None = None) -> None:
        self.profile = profile
        self._listener = listener
        self.facts = ServerFacts()
        self.ranks: dict[int | None, RankState] = {}
        self.out_of_memory: Counter[str] = Counter()
        self.starts = 0
        self.liveness: Counter[str] = Counter()
        self.witness = ForgeryFilter()
        self.claims = Claims(self.witness.suspicious)
        self._recalled = Claims(Counter())  # a start from before the exporter came, which nothing has borne out yet
        self._retractions = RetractionLedger()
        self._failures = OutOfMemoryLedger()
        self._stats_ranks = StatsRanks()
        self._attention = AttentionRanks()
        self._settings: Mapping[str, object] = {}  # the arguments of the last start that told any
        self._settings_told: Mapping[str, object] = {}  # where they were read
        self._settings_since = -inf
        self._progress: float | None = None
        self.log_is_read = True  # its files can be read, and lines come
        self._counts_by_log = True  # as it was at the last `advance`
        self._unread_at = -inf  # when the log was last found dead
        self._starts_unread = 0  # starts that the metrics showed meanwhile
        self._log_tells_starts = False
        self._scraped = False
        self.stages = Stages()
        self._looked_at: float | None = None  # the last scrape
        self._worked_at: float | None = (
            None  # the beginning of the last interval between scrapes in which tokens came out
        )
        self._decoded: dict[int | None, tuple[float | None, ...]] = {}  # what each scheduler had counted by then
        self.watchdog = ""  # the stage whose watchdog spoke last
        self._marks: deque[tuple[float, str]] = deque(maxlen=1024)  # failures by phase, starts, what `Liveness` tells
        self._died = _ALIVE  # how the log says that the server ended, and of which process
        self._end_recalled = False  # the log said so before the exporter came
        self.has_served = False  # the log has a batch line of this start
        self.latency = LatencyLedger(
            {
                "time_to_first_token": profile.time_to_first_token_seconds,
                "inter_token": profile.inter_token_seconds,
            },
            profile.window_seconds,
        )
        self._served_by: dict[int | None, float] = {}  # serving seconds of each scheduler that are in `served_seconds`
        self.server_totals = Totals()  # `counts` of the whole server: what no scheduler is told of
        self._server_window = Window(profile.window_seconds)
        self._native: dict[str, float | None] = {}  # `SERVER_COUNTS` as last told
        self._last_seen: dict[str, float] = {}  # events by name, and `WORK`
        self._happened: dict[
            str, float
        ] = {}  # failures by phase and what `Liveness` tells, those of before a restart, too
        self._printed = now  # the last time that an event told
        self._unexplained: tuple[float, OutOfMemory] | None = None
        self._started_at: float | None = None
        self.begun = self._now = now
        self.capped: Counter[str] = Counter()  # what was left out because there was too much of it
        self._beyond: RankState | None = None

    def rank(self, dp: int | None, now: float) -> RankState:
        """Give the scheduler of this DP rank; it is made at its first word.

        Past `MOST_SCHEDULERS` all others are one that nobody is told of.
        """
        known = self.ranks.get(dp)
        if known is None and self._has_room(dp):
            known = self.ranks[dp] = RankState(dp, self.profile, self.facts, now, self._attention)
        if known is None:
            known = self._beyond = self._beyond or RankState(dp, self.profile, self.facts, now, self._attention)
        return known

    def _has_room(self, dp: int | None) -> bool:
        """Whether this DP rank has, or may have, a scheduler of its own; the word that is left out is counted."""
        if dp in self.ranks or len(self.ranks) < MOST_SCHEDULERS:
            return True
        self.capped["dp_ranks"] += 1
        return False

    def observe(self, event: Event | BatchRun, now: float) -> bool:
        """Take one event of the log; False for a batch line that is not believed to be one."""
        if isinstance(event, BatchRun):
            self._see_runs(event, iter(()), now)
            return True
        if isinstance(event, (DecodeBatch, PrefillBatch)):
            return self._see_batch(event, now)
        if isinstance(event, Retraction):
            self._retract(event, now)
        elif isinstance(event, OutOfMemory):
            if self.claims.fatal(event, now, sure=self._is_sure(event)):
                self._fail(event, now)
        elif isinstance(event, Rejection):
            if event.suspect:
                self.witness.suspicious["rejection"] += 1
            else:
                self.server_totals.counts["rejected_requests"] += 1
                self._last_seen[REJECTION] = now
                self._tell(event, now)
        else:
            self._live(event, now)
        return True

    def observe_all(self, events: Iterable[Event | BatchRun], now: float | None = None) -> None:
        """Take events as `observe` does: all at `now`, or each when it was printed, which is then the caller's clock.

        An event without a printed time is taken at that of the one before.
        """
        rest = iter(events)
        event = next(rest, None)
        while event is not None:
            if now is None and event.time is not None:
                self._printed = event.time
            moment = self._printed if now is None else now
            if isinstance(event, BatchRun):
                event = self._see_runs(event, rest, now)
            else:
                self.observe(event, moment)
                event = next(rest, None)

    def _see_runs(self, run: BatchRun, rest: Iterator[Event | BatchRun], now: float | None) -> Event | BatchRun | None:
        """Take `run`, and of `rest` what can be taken with it; give the first event that was not taken."""
        rank, at = run.rank, run.time if now is None else now
        if not self._stats_ranks.counts(rank):
            return next(rest, None)
        if self.claims.wait:
            self._believe(self.claims.worked(rank, at, run.time))
        if self._recalled.wait:
            self._believe_recalled(self._recalled.worked(rank, at, run.time))
        known = self.ranks.get(rank.dp) or self.rank(rank.dp, at)
        self._died, self.has_served = _ALIVE, True
        self.stages.batch(at)
        if self._started_at is None and not self.claims.wait:
            event = known.see_runs(run, rest, now)
            self._printed = self._last_seen[WORK] = known.seen_at or at
            return event
        if run.decodes:
            self._started_at = None  # it decodes, so it has started
        known.see_runs(run, iter(()), now)
        self._last_seen[WORK] = at
        return next(rest, None)

    def _see_batch(self, line: DecodeBatch | PrefillBatch, now: float) -> bool:
        known = self.ranks.get(line.rank.dp)
        queued, usage = (known.queued, known.usage) if known is not None else (None, None)
        if not self.witness.believes_batch(line, self.facts, queued=queued, usage=usage):
            if known is not None:
                known.pool.forget()
            return False
        if self._stats_ranks.counts(line.rank):
            if self.claims.wait:
                self._believe(self.claims.worked(line.rank, now, line.time))
            if self._recalled.wait:
                self._believe_recalled(self._recalled.worked(line.rank, now, line.time))
            rank = self.rank(line.rank.dp, now)
            self._last_seen[WORK] = now
            self.has_served = True
            self.stages.batch(now)
            if isinstance(line, DecodeBatch):
                self._started_at = None  # it decodes, so it has started
                self._died = _ALIVE
            rank.see_line(line, now)
        return True

    def _live(self, event: _Start, now: float) -> None:
        if isinstance(event, Liveness) and event.what in FATAL:
            if self.claims.fatal(event, now, sure=self._is_sure(event)):
                self._take_start(event, now)
        elif isinstance(event, ServerArgs):
            if not self._has_mass(event):
                self.witness.suspicious["startup"] += 1
            elif self.claims.start(event, now, sure=self._is_sure(event)):
                self._take_start(event, now)
        elif self.claims.start_waits:
            self._believe(self.claims.follow(event, now))
        elif self._recalled.start_waits:
            self._believe_recalled(self._recalled.follow(event, now))
        elif self._believes_start(event, now):
            self._take_start(event, now)
        else:
            self.witness.suspicious["startup"] += 1

    def _take_start(self, event: _Start, now: float) -> None:
        if not isinstance(event, (ServerArgs, Liveness)) and not self.facts.has_room:
            self.capped["dp_ranks"] += 1
            return
        if isinstance(event, ServerArgs):
            self._believe(self.claims.restarted(now))
            self._log_tells_starts = True
            self._recalled = Claims(Counter())
            if self._listener is not None:
                self._listener.starts(event, now)
            self._start(now, known=self._starts_unread > 0)
        self._take_life(event, now)
        self._learn(event)
        if isinstance(event, ServerArgs):
            self._compare_settings(now)
        elif isinstance(event, Liveness):
            self.liveness[event.what] += 1
            self._mark(now, event.what)
            self.watchdog = event.stage or self.watchdog
            if event.what == "health_check_failed":
                self.stages.vain_check(now)
        self._tell(event, now)

    def _tell(self, event: Event, at: float) -> None:
        if self._listener is not None:
            self._listener.takes(event, at)

    def _believe(self, believed: Believed) -> None:
        """Take what waited for a witness."""
        for at, event in believed:
            if isinstance(event, OutOfMemory):
                self._fail(event, at)
            else:
                self._take_start(event, at)

    def _is_sure(self, event: OutOfMemory | _Start) -> bool:
        """Whether nothing raw can have produced the line: no words of others are near, or the server has not served yet, or has ended."""
        return not event.suspect or not self.has_served or bool(self.died)

    def _learn(self, event: _Start) -> None:
        if isinstance(event, (KvPool, Memory, Limits)):
            self._stats_ranks.exists(event.rank)  # every rank prints these before its first batch
        self.facts.apply(event)

    def _compare_settings(self, now: float) -> None:
        """Look at a server with other arguments as at a new one: what the one before did is no ground to advise on its flags."""
        before = self._remember_settings()
        if not are_same_settings(before, self._settings):
            self._settings_since = now
            self.begin_window(now)

    def _remember_settings(self) -> Mapping[str, object]:
        before, self._settings_told = self._settings, self.facts.args
        self._settings = dict(self.facts.args)  # a start's later lines fill in what its arguments left open
        return before

    def _believes_start(self, event: _Start, now: float) -> bool:
        """Whether a line of a start is one: after raw words only of a server that may be starting."""
        if isinstance(event, ServerArgs):
            return self._has_mass(event)
        ready = isinstance(event, Liveness) and event.what == "ready" and not self.facts.ready
        return not event.suspect or not self.has_served or ready or self.starting(now)

    @staticmethod
    def _has_mass(event: ServerArgs) -> bool:
        """After raw words a start is one for the mass of its arguments."""
        return not event.suspect or len(event.args) >= WHOLE_ARGS

    def starting(self, now: float) -> bool:
        """Say whether the log tells of a start that has neither become ready nor failed: a large model loads for minutes."""
        return self._started_at is not None and now - self._started_at < STARTING_SECONDS

    @property
    def died(self) -> str:
        """How the log says that the server ended; empty while it may run."""
        return self._died[0]

    @property
    def crash(self) -> str:
        """Which process crashed, and how, as the log says."""
        return self._died[1]

    def start_is_overdue(self, now: float) -> bool:
        """Say whether the log tells of a start that neither became ready nor failed in the time that one can take."""
        return self._started_at is not None and not self.starting(now)

    def answered(self, now: float = -inf) -> None:
        """Note that the server answers: its port opens only when the model is loaded, whatever the log has yet to say of it.

        An end that the log told of is that of a run before this one where it was told before the exporter came, or long ago.
        """
        self._started_at = None
        ended = self._happened.get(self.died, now)
        if self._end_recalled or now - ended >= ENDING_SECONDS:
            self._died, self._end_recalled = _ALIVE, False

    def recall(self, event: Event | BatchRun, now: float) -> None:
        """Take an event from before the exporter came: only what lasts is learned, nothing is counted.

        `now` is when it was printed, as far as is known: a start that is under way, or an end, lasts.
        """
        if isinstance(event, (BatchRun, DecodeBatch, PrefillBatch)):
            if self._recalled.wait:
                self._believe_recalled(self._recalled.worked(event.rank, now, event.time))
            self._started_at, self._died, self.has_served = None, _ALIVE, True
            self._last_seen.pop(_WATCHDOG, None)
        elif isinstance(event, (Retraction, OutOfMemory, Rejection)):
            return
        elif isinstance(event, ServerArgs):
            if self._has_mass(event) and self._recalled.start(event, now, sure=self._is_sure(event)):
                self._learn_past(event, now)
        elif self._recalled.start_waits and not (isinstance(event, Liveness) and event.what in FATAL):
            self._believe_recalled(self._recalled.follow(event, now))
        elif self._believes_start(event, now):
            self._learn_past(event, now)

    def _believe_recalled(self, believed: Believed) -> None:
        for at, event in believed:
            if not isinstance(event, OutOfMemory):
                self._learn_past(event, at)

    def _learn_past(self, event: _Start, now: float) -> None:
        if isinstance(event, ServerArgs):
            self._log_tells_starts = True
            self.facts = self._fresh_facts()
        self._take_life(event, now)
        self._end_recalled = bool(self.died)
        if isinstance(event, Liveness) and event.what == _WATCHDOG:
            self._last_seen[_WATCHDOG], self.watchdog = now, event.stage
        self._learn(event)
        if isinstance(event, ServerArgs):
            self._remember_settings()

    def _take_life(self, event: _Start, now: float) -> None:
        """Learn whether the server is starting, or has ended."""
        if isinstance(event, ServerArgs):
            self._started_at, self._died, self.has_served = now, _ALIVE, False
            self._last_seen.pop(_WATCHDOG, None)
        elif isinstance(event, Liveness) and event.what != "health_check_failed":
            self._started_at = None
            if event.what in ENDS:  # a crash is followed by lines that say less
                self._died = (event.what, event.told or self._died[1])

    def _retract(self, event: Retraction, now: float) -> None:
        if event.testing:
            return
        if self._retractions.is_new(event, now):
            rank = self.ranks.get(event.rank.dp)  # not made here: a line that is not believed must not add a scheduler
            pool = None if rank is None else rank.pool
            self._count(self.witness.retraction(event, pool=pool, facts=self.facts, now=now), now)
        else:
            self._count(self.witness.repeated(event, self.facts), now)

    def _count(self, believed: list[Retraction], now: float) -> None:
        for event in believed:
            rank = self.rank(event.rank.dp, now)
            rank.retract(event.requests, event.ratio_after, now)
            self._last_seen[RETRACTION] = now
            self._tell(event, now)

    def _fail(self, event: OutOfMemory, now: float) -> None:
        judged = self._failures.classify(event, now)
        self._tell(event, now)
        if judged == "repeated":
            return
        if event.phase == "unknown":
            self._unexplained = (now, event)
        else:
            self._unexplained = None
            self._count_failure(event.phase, now)

    def _count_failure(self, phase: str, now: float) -> None:
        self.out_of_memory[phase] += 1
        self._mark(now, phase)

    def settle(self, now: float) -> None:
        """Decide what still waits for a confirmation: the log has ended and nothing more will come."""
        self._believe(self.claims.settle())
        self._wait_over(inf)
        self.advance(now)

    def _wait_over(self, now: float) -> None:
        """Count what waited long enough and nothing contradicted."""
        if self._unexplained is not None and now - self._unexplained[0] >= EXPLAIN_SECONDS:
            at, event = self._unexplained
            self._unexplained = None
            self._count_failure(event.phase, at)
        if self.claims.wait:
            self._believe(self.claims.tick(min(now, self._now)))
        self.witness.tick(now)

    def _fresh_facts(self) -> ServerFacts:
        old = self.facts
        facts = ServerFacts(version=old.version, model_name=old.model_name, engine_type=old.engine_type)
        for rank in self.ranks.values():
            rank.thresholds.use(facts)
        return facts

    def _start(self, now: float, *, known: bool = False) -> None:
        """Begin with a new server; `known`: it was counted when the metrics showed it, and the log tells late."""
        self.advance(now)
        if known:
            self._starts_unread -= 1
        else:
            self.starts += 1
            self._mark(now, START)
        self._died = _ALIVE
        self.facts = self._fresh_facts()
        if None in self.ranks and self.ranks[None].served and not self.has_dp_ranks:
            self.ranks[None].alone = True
        for rank in self.ranks.values():
            rank.reset()
        self._count(self.witness.restarted(), now)
        self._failures.forget()
        self._stats_ranks.forget()
        self._attention.forget()
        self.stages.restarted()

    def observe_scrape(self, scrape: Scrape, now: float) -> None:
        """Take one successful scrape."""
        self.facts.model_name = scrape.model_name or self.facts.model_name
        self.facts.engine_type = scrape.engine_type or self.facts.engine_type
        if scrape.spoiled:
            scrape = replace(
                scrape,
                progress=self._progress,
                sent=None,
                aborted_requests=None,
                started_requests=None,
                finished_requests=None,
                finished_prompt_tokens=None,
                finished_answer_tokens=None,
                finished_cached_tokens=None,
            )
        restarted = scrape.progress is not None and self._progress is not None and scrape.progress < self._progress
        busy = bool(scrape.open_requests) or any((each.running or 0) + (each.queued or 0) > 0 for each in scrape.ranks)
        self._believe(self.claims.scraped(now, scrape.progress, scrape.sent, busy=busy, restarted=restarted))
        if restarted:
            if not self._log_tells_starts:
                self._start(now)
            elif not self.log_is_read:
                self._start(now)
                self._starts_unread += 1
            for rank in self.ranks.values():
                rank.counters.begin_again()
            self._native = dict.fromkeys(self._native)
            self.stages.restarted()
        stands = scrape.progress is not None and scrape.progress == self._progress
        self._progress = scrape.progress if scrape.progress is not None else self._progress
        self._count_requests(scrape, now)
        self.latency.observe(scrape, now)
        # 0.4.3-0.4.8 have no rank labels: all DP ranks share one series and only the last writer is seen,
        # so the log's ranks win.
        blurred = [r.dp for r in scrape.ranks] == [None] and self._this_start_has_dp_ranks
        # Progress is the whole server's: with several schedulers it says nothing of one.
        progress = scrape.progress if len(scrape.ranks) == 1 else None
        for figures in scrape.ranks:
            if not blurred and self._has_room(figures.dp):
                if scrape.spoiled:
                    self._keep_counters(figures)
                self.facts.apply_figures(figures)
                # A scheduler that an earlier scrape did not show had done nothing then: its counters count from 0.
                base = RankFigures(figures.dp) if self._scraped else None
                rank = self.rank(figures.dp, now)
                known, before = (
                    self._scraped or rank.counters.last is not None,
                    rank.counters.figure("retracted_requests"),
                )
                rank.see_figures(figures, progress, now, base, stands=stands)
                told = rank.counters.figure("retracted_requests")
                if known and gained(before, told):
                    self._last_seen[RETRACTION] = now
                self._count(
                    self.witness.scraped(
                        figures.dp,
                        now,
                        told,
                        gained(before, told) if known else None,
                        # From 0.5.7 on the counter is written with the line; before, with the next decode log.
                        counts=rank.counters.has_passes,
                    ),
                    now,
                )
        self._scraped = True
        self._look(scrape, now)

    def _look(self, scrape: Scrape, now: float) -> None:
        """Let the stages be seen, each by its own progress."""
        if self.stages.came_out(scrape.sent):
            self._worked_at = self._looked_at
        self._looked_at = now
        interval = self.facts.decode_log_interval
        steps = tokens = joined = 0.0
        before, self._decoded = self._decoded, {}
        for dp, rank in self.ranks.items():
            counts = rank.totals.counts
            of_server = rank.counters.figure("decoded_tokens"), rank.counters.figure("admitted_requests")
            told = (counts["replayed"] + counts["eager"], counts["decoded"], counts["joined"], *of_server)
            batches, lines, sequences, decoded, admitted = map(gained, before.get(dp, told), told)
            self._decoded[dp] = told
            steps = max(steps, batches)
            tokens += lines * interval if of_server[0] is None else decoded
            joined += sequences if of_server[1] is None else admitted
        figures = scrape.ranks
        outside = sum((f.grammar_queued or 0) + sum(f.queues.values()) for f in figures)
        works = sum((f.running or 0) + (f.queued or 0) for f in figures)
        speculates = bool(self.facts.args.get("speculative_algorithm"))
        look = Look(
            scrape.sent,
            scrape.scheduled,
            steps,
            interval,
            tokens,
            joined,
            max(self.facts.arg("stream_interval") or 0.0, SPECULATED_STEPS if speculates else 0.0),
            scrape.aborted_requests,
            scrape.open_requests,
            works,
            tuple(figure for f in figures for figure in (f.running, f.used_tokens, f.generation_throughput)),
            idle=not works and any(f.running is not None for f in figures),
            excused=outside > 0,
        )
        self.stages.see(look, now)
        if self.hang(now) is not None:
            self._last_seen[HUNG] = now

    @property
    def log_silent_seconds(self) -> float:
        """How long after the last batch line the server was still seen at work; 0 where it was not."""
        line = self.begun if self.stages.batch_at is None else max(self.stages.batch_at, self.begun)
        return 0.0 if self._worked_at is None else max(self._worked_at - line, 0.0)

    def hang(self, now: float) -> Hang | None:
        """Say which stage of the server hangs, if any."""
        since = [rank.time.stuck_since for rank in self.schedulers if rank.time.stuck_since is not None]
        return self.stages.hang(now, min(since, default=None))

    def _keep_counters(self, figures: RankFigures) -> None:
        """Put the last believed counters in place of those of a spoiled page: what grew meanwhile is counted at the next."""
        known = self.ranks.get(figures.dp)
        for name in ("graph_passes", "eager_passes", "decoded_tokens", "retracted_requests", "admitted_requests"):
            setattr(figures, name, None if known is None else known.counters.figure(name))

    def _count_requests(self, scrape: Scrape, now: float) -> None:
        """Count what the whole server counts: its first figure is the base; a family that was missing until then counts from 0."""
        for name in SERVER_COUNTS:
            told: float | None = getattr(scrape, name)
            if told is not None:
                first = name not in self._native and not self._scraped
                more = 0.0 if first else gained(self._native.get(name), told)
                self.server_totals.counts[name] += more
                if more:
                    self._last_seen[name] = now
                self._native[name] = told

    def server_count(self, name: str) -> float | None:
        """Give one of `SERVER_COUNTS` since the exporter came; None where the server does not tell it."""
        return self.server_totals.counts[name] if name in self._native else None

    def latencies(self, now: float, seconds: float | None = None) -> dict[Latency, Recent]:
        """Give the latencies of the last `seconds`, those that the server tells."""
        recent = ((latency, self.latency.recent(latency, now, seconds)) for latency in LATENCIES)
        return {latency: told for latency, told in recent if told is not None}

    def longest_answer(self, now: float, seconds: float | None = None) -> float | None:
        """Give the tokens that all but one in a hundred of the last answers end within; None where the server does not tell."""
        return self.latency.longest_answer(now, seconds)

    def fixed_answer(self, now: float, seconds: float | None = None) -> float | None:
        """Give the tokens of an answer where nearly all of the last answers are of one length; None where the server does not show it."""
        return self.latency.fixed_answer(now, seconds)

    def lost_scrape(self, now: float | None = None, *, gone: bool = True) -> None:
        """SGLang could not be scraped; `gone`: nobody is there to answer."""
        now = self._now if now is None else now
        self._count(self.witness.unscraped(), now)
        self._believe(self.claims.lost(now, gone=gone))

    def counted(self) -> tuple[object, ...]:
        """Give everything that `saved` keeps and that can change without a line: two equal ones need not be saved twice."""
        self._count_retracted()
        ranks = tuple((rank.dp, *rank.counters.saved().values()) for rank in self.ranks.values())
        rejected = self.server_totals.counts["rejected_requests"]
        failures, lives = tuple(self.out_of_memory.items()), tuple(self.liveness.items())
        return ranks, failures, lives, tuple(self.witness.suspicious.items()), self.starts, rejected

    def saved(self, now: float) -> dict[str, Any]:
        """Give what a later process must know so that the rest of the log is counted once: plain JSON, read by `restore`."""
        self._count_retracted()
        return {
            "ranks": [{"dp": rank.dp, "counts": rank.counters.saved()} for rank in self.ranks.values()],
            "out_of_memory": dict(self.out_of_memory),
            "unexplained": self._unexplained is not None,
            "starts": self.starts,
            "rejected_requests": self.server_totals.counts["rejected_requests"],
            "liveness": dict(self.liveness),
            "ages": {what: now - at for what, at in self._happened.items()},
            "witness": self.witness.saved(),
            "claims": self.claims.saved(now),
            "retractions": self._retractions.saved(now),
            "failures": self._failures.saved(now),
            "stats_ranks": self._stats_ranks.saved(),
        }

    def restore(self, saved: dict[str, Any], now: float, ago: float = 0.0) -> None:
        """Go on from what an earlier process gave in `saved`, `ago` seconds before now; what cannot be read is left out.

        Restored counts go on in the counters; none of them belongs to the window.
        """
        then = now - ago
        for entry in _dicts(saved.get("ranks")):
            dp = entry.get("dp")
            if dp is None or (isinstance(dp, int) and 0 <= dp < MOST_RANKS):
                self.rank(dp, now).restore(counts(entry.get("counts")))
        failures = counts(saved.get("out_of_memory"))
        self.out_of_memory.update({phase: failures[phase] for phase in OUT_OF_MEMORY_PHASES if phase in failures})
        if saved.get("unexplained") is True:
            self._unexplained = (then, OutOfMemory(None, NO_RANK, "unknown"))
        lives = counts(saved.get("liveness"))
        self.liveness.update({what: lives[what] for what in get_args(LivenessKind) if what in lives})
        ages = saved.get("ages")
        for what, age in ages.items() if isinstance(ages, dict) else ():
            seconds = number(age)
            if what in _AGED and seconds is not None:
                self._happened[what] = min(then - seconds, now)
        self.starts = counts(saved).get("starts", 0)
        self.server_totals.counts["rejected_requests"] += counts(saved).get("rejected_requests", 0)
        self._retractions.restore(saved.get("retractions"), then)
        self._failures.restore(saved.get("failures"), then)
        self._stats_ranks.restore(saved.get("stats_ranks"))
        self.witness.restore(saved.get("witness"), then)
        self.claims.restore(saved.get("claims"), then)
        self.begin_window(now)

    def begin_window(self, now: float) -> None:
        """Watch from now on: what was counted before stays in the counters and is not part of the window.

        Failures, starts and signs of life keep the times at which they happened.
        """
        self.begun = now
        self._count_retracted()
        self._server_window.begin(self.server_totals)
        self.latency.begin_window()
        for rank in self.ranks.values():
            rank.window.begin(rank.totals)

    def advance(self, now: float) -> None:
        """Bring the seconds up to `now`."""
        self._now = max(now, self._now)
        self._wait_over(now)
        if not self._log_tells_starts and self.facts.args and self.facts.args is not self._settings_told:
            self._compare_settings(now)  # `/server_info` told them
        if len(self.ranks) != len(self._served_by):
            self._add_served()  # of those that were there before a new one came
        for rank in self.ranks.values():
            rank.advance(now)
            rank.counters.count_retracted(by_log=self._counts_by_log)
        self._counts_by_log = self.log_is_read
        if not self.log_is_read:
            self._unread_at = now
        elif now - self._unread_at > LATE_SECONDS:
            self._starts_unread = 0  # their lines will not come any more
        if len(self._served_by) > 1:
            self._add_served()
        if now >= self._server_window.due:
            self._server_window.mark(now, self.server_totals)

    def _count_retracted(self) -> None:
        for rank in self.ranks.values():
            rank.counters.count_retracted(by_log=self._counts_by_log)

    def _add_served(self) -> None:
        """Add what the server served since the last call: with several schedulers that is a short interval ago.

        Of those that served in it, each had something to do at its beginning, so the longest covers the others.
        """
        gained = 0.0
        for dp, rank in self.ranks.items():
            served = rank.time.served_seconds
            gained = max(gained, served - self._served_by.get(dp, 0.0))
            self._served_by[dp] = served
        self.server_totals.counts["served_seconds"] += gained

    @property
    def served_seconds(self) -> float:
        """Seconds in which any scheduler served."""
        self._add_served()
        return self.server_totals.counts["served_seconds"]

    def totals(self) -> Totals:
        """Add all schedulers together, since the exporter came."""
        total = self.server_totals.copy()
        for rank in self.schedulers:
            total += rank.totals
        return total

    def recent(self, now: float, seconds: float | None = None) -> Totals:
        """Add all schedulers together, over the last `seconds` (the profile's window unless told)."""
        total = self._server_window.recent(now, self.server_totals, seconds)
        for rank in self.schedulers:
            total += rank.window.recent(now, rank.totals, seconds)
        return total

    def recent_marks(self, now: float, seconds: float) -> Counter[str]:
        """Count what happened in the last `seconds`: out-of-memory failures by phase, `start`, and liveness by its kind.

        A failure that was followed by a start with other arguments is not counted: it says nothing about those.
        """
        since = now - seconds
        found = Counter(
            what
            for at, what in self._marks
            if at >= (max(since, self._settings_since) if what in OUT_OF_MEMORY_PHASES else since)
        )
        if self._watchdog_has_last_word:
            found[_WATCHDOG] = max(found[_WATCHDOG], 1)
        return found

    @property
    def _watchdog_has_last_word(self) -> bool:
        """Whether nothing came after a watchdog's line, of a server that is known by its log alone."""
        spoken = self._last_seen.get(_WATCHDOG)
        return spoken is not None and not self._scraped and spoken > self._last_seen.get(WORK, -inf)

    def _mark(self, now: float, what: str) -> None:
        self._marks.append((now, what))
        self._last_seen[what] = now
        if what in _AGED:
            self._happened[what] = max(self._happened.get(what, -inf), now)  # of two logs one is read first

    def age(self, what: str, now: float) -> float | None:
        """Give how long ago a failure, by its phase, or a `LivenessKind` last happened; None where it never did."""
        at = self._happened.get(what)
        return None if at is None else max(now - at, 0.0)

    def last_seen(self, what: Hashable, now: float) -> float | None:
        """Give when an event, by its name, or a state, by signal and state, was last seen; None where it never was."""
        if not isinstance(what, tuple):
            return self._last_seen.get(str(what))
        seen = (rank.window.last_seen(now, rank.totals, *what) for rank in self.schedulers)
        return max((at for at in seen if at is not None), default=None)

    def knows_waits(self, now: float) -> bool:
        """Whether it is known how fast requests start, on every scheduler, and so how long they wait."""
        return all(rank.time.admission.per_second(now) is not None for rank in self.schedulers)

    @property
    def schedulers(self) -> list[RankState]:
        """The schedulers that count, those of earlier starts among them.

        Where there are DP ranks, what was told without a rank belongs to none of them; unless a start had none.
        """
        if len(self.ranks) < 2:
            return list(self.ranks.values())
        has_dp_ranks = self.has_dp_ranks
        return [rank for rank in self.ranks.values() if rank.dp is not None or rank.alone or not has_dp_ranks]

    @property
    def has_dp_ranks(self) -> bool:
        """Whether the server has DP ranks of its own: a start with fewer GPUs may have none where the one before had."""
        told = [rank.dp for rank in self.ranks.values() if rank.served] or list(self.ranks)
        return any(dp is not None for dp in told)

    @property
    def _this_start_has_dp_ranks(self) -> bool:
        """Whether this start has shown DP ranks: those of the one before must not keep its figures away."""
        told = [rank.dp for rank in self.ranks.values() if rank.served]
        told += [*self.facts.logged_pool_tokens, *self.facts.running_limits]
        return any(dp is not None for dp in told)


def _dicts(saved: object) -> list[dict[str, Any]]:
    return [entry for entry in saved if isinstance(entry, dict)] if isinstance(saved, list) else []
