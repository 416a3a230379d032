"""One server as its log shows it: starts, ends, failures, retractions and batch lines. Pure; `now` is seconds on one monotonic clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import inf

from sglang_tuning_exporter.sglang.events import (
    ENDS,
    DecodeBatch,
    Event,
    KvPool,
    Limits,
    Liveness,
    Memory,
    OutOfMemory,
    Pause,
    PrefillBatch,
    Rank,
    Refusal,
    Rejection,
    Retraction,
    ServerArgs,
    ServerError,
    TooLong,
)
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
from sglang_tuning_exporter.state.arguments import is_whole
from sglang_tuning_exporter.state.confirmation import FATAL, Confirmed, StartLine, Unconfirmed
from sglang_tuning_exporter.state.counters import Rejections
from sglang_tuning_exporter.state.deduplication import OutOfMemoryLedger, RetractionLedger, StatsRanks
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.forgeries import ForgeryFilter
from sglang_tuning_exporter.state.journal import REJECTION, RETRACTION, START, WORK, Journal
from sglang_tuning_exporter.state.lifecycle import Lifecycle, StartCount
from sglang_tuning_exporter.state.profiles import Profile
from sglang_tuning_exporter.state.rank import RankState
from sglang_tuning_exporter.state.schedulers import Schedulers
from sglang_tuning_exporter.state.stages import Stages

# A failure whose line has no phase waits so long for another rank's line that has one: a counter cannot go back.
EXPLAIN_SECONDS = 0.4
OF_KV_CACHE = 0.9  # SGLang accepts prompts of up to the KV cache's size less 6 tokens


class LoggedServer:
    """One server from its log alone."""

    def __init__(self, profile: Profile, now: float) -> None:
        self.profile = profile
        self.facts = ServerFacts()
        self.capped: Counter[str] = Counter()  # what was dropped because there was too much of it
        self._schedulers = Schedulers(profile, self.facts, self.capped)
        self.ranks = self._schedulers.ranks
        self.server_totals = self._schedulers.server_totals
        self.journal = Journal()
        self.life = Lifecycle(self.journal)
        self.stages = Stages()
        self._starts = StartCount()
        self.liveness: Counter[str] = Counter()
        self.out_of_memory: Counter[str] = Counter()
        self._unexplained: tuple[float, OutOfMemory] | None = None  # a failure without phase
        self.forgeries = ForgeryFilter()
        self.unconfirmed = Unconfirmed(self.forgeries.suspicious)
        self._recalled = Unconfirmed(Counter())  # a start from before the exporter started
        self._retractions = RetractionLedger()
        self._failures = OutOfMemoryLedger()
        self._stats_ranks = StatsRanks()
        self._rejections = Rejections()
        self.log_is_read = True  # its files can be read, and lines come
        self._counts_by_log = True  # as it was at the last `advance`
        self.begun = self._now = self._printed = now  # `_printed`: the last printed time

    @property
    def starts(self) -> int:
        """Starts of the server since the exporter started, or an earlier process that saved its state."""
        return self._starts.count

    def observe(self, event: Event | BatchRun, now: float) -> bool:
        """Take one event of the log; return False for a batch line that is taken for forged."""
        if isinstance(event, BatchRun):
            self._see_runs(event, iter(()), now)
        elif isinstance(event, (DecodeBatch, PrefillBatch)):
            return self._see_line(event, now)
        elif isinstance(event, Retraction):
            self._retract(event, now)
        elif isinstance(event, OutOfMemory):
            if self.unconfirmed.fatal(event, now, sure=self._is_sure(event)):
                self._fail(event, now)
        elif isinstance(event, Rejection):
            self._reject(event, now)
        elif isinstance(event, ServerError):
            self.server_totals.counts["logged_server_errors"] += not event.suspect
        elif isinstance(event, Pause):
            self.stages.see_pause(event, now)
        elif isinstance(event, (TooLong, Refusal)):
            self._refuse(event, now)
        else:
            self._see_start_line(event, now)
        return True

    def observe_all(self, events: Iterable[Event | BatchRun], now: float | None = None) -> None:
        """Take events as `observe` does: all at `now`, or each at its printed time, which is then the caller's clock.

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
        """Take `run`, and of `rest` what can be taken with it; return the first event that was not taken."""
        rank, at = run.rank, run.time if now is None else now
        if not self._stats_ranks.counts(rank):
            return next(rest, None)
        self._work(rank, at, run.time)
        known = self.ranks.get(rank.dp) or self.rank(rank.dp, at)
        if self.life.started_at is None and not self.unconfirmed.wait:
            event = known.see_runs(run, rest, now)
            self._printed = known.time.seen_at or at
        else:
            if run.decodes:
                self.life.decodes()
            known.see_runs(run, iter(()), now)
            event = next(rest, None)
        self.journal.see(WORK, known.time.seen_at or at)
        return event

    def _see_line(self, line: DecodeBatch | PrefillBatch, now: float) -> bool:
        known = self.ranks.get(line.rank.dp)
        queued, usage = (known.queued, known.usage) if known is not None else (None, None)
        if not self.forgeries.accepts_batch(line, self.facts, queued=queued, usage=usage):
            if known is not None:
                known.pool.forget()
            return False
        if self._stats_ranks.counts(line.rank):
            self._work(line.rank, now, line.time)
            if isinstance(line, DecodeBatch):
                self.life.decodes()
            self.rank(line.rank.dp, now).see_line(line, now)
            self.journal.see(WORK, now)
        return True

    def _work(self, rank: Rank, now: float, printed: float | None) -> None:
        """Note that a scheduler works: it prints batch lines."""
        if self.unconfirmed.wait or self.unconfirmed.is_gone:
            self._confirm(self.unconfirmed.worked(rank, now, printed))
        if self._recalled.wait:
            self._confirm_recalled(self._recalled.worked(rank, now, printed))
        self.life.works()
        self.stages.batch(now)

    def rank(self, dp: int | None, now: float) -> RankState:
        """Return the scheduler of a DP rank, made on first use."""
        return self._schedulers.of(dp, now)

    def _see_start_line(self, event: StartLine, now: float) -> None:
        """Take a line of a start, or of the server's end; one that may be forged waits for what must follow it."""
        if isinstance(event, Liveness) and event.what in FATAL:
            if self.unconfirmed.fatal(event, now, sure=self._is_sure(event)):
                self._take_start_line(event, now)
        elif isinstance(event, ServerArgs):
            if not is_whole(event):
                self.forgeries.suspicious["startup"] += 1
            elif self.unconfirmed.start(event, now, sure=self._is_sure(event)):
                self._take_start_line(event, now)
        elif self.unconfirmed.start_waits:
            self._confirm(self.unconfirmed.follow(event, now))
        elif self._recalled.start_waits:
            self._confirm_recalled(self._recalled.follow(event, now))
        elif self._accepts(event, now):
            self._take_start_line(event, now)
        else:
            self.forgeries.suspicious["startup"] += 1

    def _take_start_line(self, event: StartLine, now: float) -> None:
        if not isinstance(event, (ServerArgs, Liveness)) and not self.facts.has_room:
            self.capped["dp_ranks"] += 1
            return
        if isinstance(event, Liveness) and event.what in ENDS and self.life.is_stopping:
            return
        if isinstance(event, ServerArgs):
            self._confirm(self.unconfirmed.restarted(now))
            self._recalled = Unconfirmed(Counter())
            is_new = self._starts.logged()
            self.advance(now)
            self._restart(now, is_new=is_new)
        self.life.take(event, now)
        self._learn(event)
        if isinstance(event, ServerArgs):
            self._compare_settings(now)
        elif isinstance(event, Liveness):
            self.liveness[event.what] += 1
            self.journal.mark(event.what, now)
            self.life.watchdog = event.stage or self.life.watchdog
            if event.what == "health_check_failed":
                self.stages.fail_health_check(now)

    def _restart(self, now: float, *, is_new: bool) -> None:
        """Begin with a new server; a start that is not new was counted before."""
        if is_new:
            self.journal.mark(START, now)
        self.life.restarted()
        self.facts = self.facts.of_next_start()
        self._schedulers.restart(self.facts)
        self._count_retractions(self.forgeries.restarted(), now)
        self._failures.forget()
        self._stats_ranks.forget()
        self.stages.restarted()

    def _learn(self, event: StartLine) -> None:
        if isinstance(event, (KvPool, Memory, Limits)):
            self._stats_ranks.exists(event.rank)  # every rank prints these before its first batch
        self.facts.apply(event)

    def _compare_settings(self, now: float) -> None:
        """Begin a new window for a server with other arguments: what the one before did is no ground to advise on its flags."""
        if self._starts.compare(self.facts.args, now):
            self.begin_window(now)

    def _confirm(self, confirmed: Confirmed) -> None:
        """Take what waited for its confirmation."""
        for at, event in confirmed:
            if isinstance(event, OutOfMemory):
                self._fail(event, at)
            else:
                self._take_start_line(event, at)

    def _is_sure(self, event: OutOfMemory | StartLine) -> bool:
        """Whether no raw text can be the line: none is near, or the server has not served yet, or it has ended."""
        return not event.suspect or not self.life.has_served or bool(self.life.died)

    def _accepts(self, event: StartLine, now: float) -> bool:
        """Whether a line of a start is one: near raw text, only of a server that may be starting."""
        ready = isinstance(event, Liveness) and event.what == "ready" and not self.facts.ready
        return not event.suspect or not self.life.has_served or ready or self.life.starts(now)

    def recall(self, event: Event | BatchRun, now: float) -> None:
        """Take an event from before the exporter started: facts are learned, nothing is counted.

        `now` is when it was printed, as far as is known. A start that is under way, or an end, is still true.
        """
        if isinstance(event, (BatchRun, DecodeBatch, PrefillBatch)):
            if self._recalled.wait:
                self._confirm_recalled(self._recalled.worked(event.rank, now, event.time))
            self.life.recall_work()
        elif isinstance(event, (Retraction, OutOfMemory, Rejection, ServerError, Pause, TooLong, Refusal)):
            return
        elif isinstance(event, ServerArgs):
            if is_whole(event) and self._recalled.start(event, now, sure=self._is_sure(event)):
                self._learn_past(event, now)
        elif self._recalled.start_waits and not (isinstance(event, Liveness) and event.what in FATAL):
            self._confirm_recalled(self._recalled.follow(event, now))
        elif self._accepts(event, now):
            self._learn_past(event, now)

    def _confirm_recalled(self, confirmed: Confirmed) -> None:
        for at, event in confirmed:
            if not isinstance(event, OutOfMemory):
                self._learn_past(event, at)

    def _learn_past(self, event: StartLine, now: float) -> None:
        if isinstance(event, ServerArgs):
            self._starts.in_log = True
            self.facts = self.facts.of_next_start()
            self._schedulers.use(self.facts)
        self.life.recall(event, now)
        self._learn(event)
        if isinstance(event, ServerArgs):
            self._starts.remember(self.facts.args)

    def _reject(self, event: Rejection, now: float) -> None:
        if event.suspect:
            self.forgeries.suspicious["rejection"] += 1
            return
        self._count_rejections(self._rejections.log(now), now)

    def _count_rejections(self, rejected: int, now: float) -> None:
        if rejected:
            self.server_totals.counts["rejected_requests"] += rejected
            self.journal.see(REJECTION, now)

    def _refuse(self, event: Refusal | TooLong, now: float) -> None:
        """Count a request that the scheduler refused; each TP rank logs a prompt that is truncated."""
        if event.suspect or event.rank.tp:
            return
        counts = self.rank(event.rank.dp, now).totals.counts
        if isinstance(event, Refusal):
            counts["refused_requests"] += 1
            counts["refused_for_grammar"] += event.grammar
            return
        # Far below the KV cache's size it is the context that is too short.
        fits = event.most < OF_KV_CACHE * min(self.facts.kv_pool_tokens.values(), default=0.0)
        counts["beyond_context_prompts" if fits else "too_long_prompts"] += 1
        counts["beyond_context_tokens" if fits else "too_long_tokens"] += event.tokens

    def _retract(self, event: Retraction, now: float) -> None:
        if event.testing:
            return
        if self._retractions.is_new(event, now):
            rank = self.ranks.get(event.rank.dp)  # not made here: a forged line must not add a scheduler
            pool = None if rank is None else rank.pool
            self._count_retractions(self.forgeries.retraction(event, pool=pool, facts=self.facts, now=now), now)
        else:
            self._count_retractions(self.forgeries.repeated(event, self.facts), now)

    def _count_retractions(self, accepted: list[Retraction], now: float) -> None:
        for event in accepted:
            self.rank(event.rank.dp, now).retract(event.requests, event.ratio_after, now)
            self.journal.see(RETRACTION, now)

    def _fail(self, event: OutOfMemory, now: float) -> None:
        judged = self._failures.classify(event, now)
        if judged == "repeated":
            return
        self._unexplained = (now, event) if event.phase == "unknown" else None
        if event.phase != "unknown":
            self._count_failure(event.phase, now)

    def _count_failure(self, phase: str, now: float) -> None:
        self.out_of_memory[phase] += 1
        self.journal.mark(phase, now)

    def settle(self, now: float) -> None:
        """Decide on what still waits for a confirmation: the log has ended and nothing more will come."""
        self._confirm(self.unconfirmed.settle())
        self._end_waits(inf)
        self.advance(now)

    def _end_waits(self, now: float) -> None:
        """Count what waited long enough and nothing contradicted."""
        if self._unexplained is not None and now - self._unexplained[0] >= EXPLAIN_SECONDS:
            at, self._unexplained = self._unexplained[0], None
            self._count_failure("unknown", at)
        if self.unconfirmed.wait:
            self._confirm(self.unconfirmed.tick(min(now, self._now)))
        if self.forgeries.waits:
            self.forgeries.tick(now)

    def advance(self, now: float) -> None:
        """Count the seconds up to `now`."""
        self._now = max(now, self._now)
        self._end_waits(now)
        if self._starts.has_new_settings(self.facts.args):
            self._compare_settings(now)
        self._schedulers.advance(now, by_log=self._counts_by_log)
        self._counts_by_log = self.log_is_read
        self._starts.wait(now, log_is_read=self.log_is_read)
        self._schedulers.mark(now)

    @property
    def is_steady(self) -> bool:
        """Whether nothing waits for a confirmation, and at most one scheduler works: its own lines show all that happens."""
        waits = self._unexplained is not None or self.unconfirmed.wait or self.forgeries.waits
        return not waits and sum(rank.served for rank in self.ranks.values()) < 2

    def begin_window(self, now: float) -> None:
        """Look at what comes from now on: what was counted before stays in the counters and is not recent.

        Failures, starts and signs of life keep their times.
        """
        self.begun = now
        self._schedulers.count_retracted(by_log=self._counts_by_log)
        self._schedulers.begin_window()

    @property
    def schedulers(self) -> list[RankState]:
        """The schedulers that count, those of earlier starts among them."""
        return self._schedulers.counting()
