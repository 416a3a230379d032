"""One server's state over time: events and scrapes in, gauges, counters and seconds in each state out.

Pure: no I/O and no clock; `now` is seconds on one monotonic clock (live: the moment of arrival; offline: the line's
own time). An observation holds until the next one, at most 60 s; after that the state is `unknown` and its seconds go
there.
"""

from __future__ import annotations

from collections import Counter, deque
from math import inf
from typing import TYPE_CHECKING

from sglang_tuning_exporter.ledgers import OutOfMemoryLedger, RetractionLedger, StatsRanks
from sglang_tuning_exporter.server import ServerFacts
from sglang_tuning_exporter.sglang.events import (
    DecodeBatch,
    Event,
    Liveness,
    OutOfMemory,
    PrefillBatch,
    RankFigures,
    Retraction,
    Scrape,
    ServerArgs,
)
from sglang_tuning_exporter.signals import ALL_UNKNOWN, HOLD_SECONDS, SIGNALS, STATES, Observation, Signal, classify
from sglang_tuning_exporter.window import AdmissionRate, Totals, Window, batch_size_bucket

if TYPE_CHECKING:
    from sglang_tuning_exporter.guide.profiles import Profile

# A health probe's generation moves the work counters by a few tokens; a long prompt in prefill, which the gauges do not
# show, by thousands.
PREFILL_PROGRESS = 1024.0
# A scheduler that decoded this much between two scrapes was serving, though it had nothing to do when it was asked.
DECODE_PROGRESS = 40.0
# A prefill batch this close to the most that fits is full: whole pages are filled, and the last one may not fit.
FULL_PREFILL_SHARE = 0.9


class RankState:
    """One scheduler: what it does now, and for how long it has done what."""

    def __init__(self, dp: int | None, profile: Profile, facts: ServerFacts, now: float) -> None:
        self.dp = dp
        self.running: float | None = None
        self.queued: float | None = None
        self.usages: dict[str, float] = {}
        self.graph: bool | None = None
        self.generation_throughput: float | None = None
        self.new_token_ratio: float | None = None
        self.states: dict[Signal, str] = dict(ALL_UNKNOWN)
        self.totals = Totals()
        for signal in SIGNALS:
            for state in STATES[signal]:
                self.totals.seconds[signal, state] = 0.0
        self.window = Window(profile.window_seconds)
        self.admission = AdmissionRate()
        self._joined = 0.0
        self._profile = profile
        self._facts = facts
        self._seen_at: float | None = None
        self._integrated_to = now
        self._native: RankFigures | None = None
        self._told_at: float | None = None  # when the gauges were last told, if only again
        self._progress: float | None = None
        self._prefill_full = False
        self.native_retractions_told = False
        self._passes_told = False
        self._admitted_told = False
        self._passes_logged: Counter[str] = Counter()

    @property
    def usage(self) -> float | None:
        """Usage of the fullest pool, 0-1."""
        return max(self.usages.values(), default=None)

    def queue_wait_seconds(self, now: float) -> float | None:
        """Estimate the wait of the last in the queue at the present rate of admission; inf when nothing is admitted."""
        if not self.queued:
            return 0.0 if self.queued is not None else None
        rate = self.admission.per_second(now)
        if rate is None:
            return None
        return self.queued / rate if rate > 0 else inf

    def advance(self, now: float) -> None:
        """Give the time since the last call to the state held, and what lies past the hold to `unknown`."""
        begin, self._integrated_to = self._integrated_to, max(now, self._integrated_to)
        holds_until = begin if self._seen_at is None else self._seen_at + HOLD_SECONDS
        known = max(0.0, min(now, holds_until) - begin)
        beyond = max(0.0, now - begin) - known
        if known > 0:
            self._give(known)
        if now > holds_until and self._seen_at is not None:
            self.forget()
        if self._told_at is not None and now - self._told_at > HOLD_SECONDS:
            self._clear_gauges()
        if known > 0 and beyond > 0:
            self.window.mark(begin + known, self.totals)
        if beyond > 0:
            for signal in SIGNALS:
                self.totals.seconds[signal, "unknown"] += beyond
        self.window.mark(now, self.totals)

    def _give(self, seconds: float) -> None:
        for signal, state in self.states.items():
            self.totals.seconds[signal, state] += seconds
        if self.states["activity"] == "serving":
            for name, figure in (("queued", self.queued), ("usage", self.usage), ("running", self.running)):
                if figure is not None:
                    self.totals.integrals[name] += figure * seconds
                    self.totals.integrals[name + "_seconds"] += seconds
            if self._prefill_full and self.states["admission"] == "held_back":
                self.totals.integrals["prefill_bound"] += seconds
            if self.running:
                self.totals.running_seconds[batch_size_bucket(self.running)] += seconds

    def forget(self) -> None:
        """Let go of what was seen: nothing has been heard for too long, or the server started anew."""
        self._seen_at = None
        self.states = dict(ALL_UNKNOWN)

    def reset(self) -> None:
        """Start again with a new server: its gauges are gone and its counters begin again."""
        self.forget()
        self._clear_gauges()
        self.admission = AdmissionRate()
        # Whether the new one counts its decode batches must be told anew; until then its log does.
        self._passes_told = False
        self._passes_logged.clear()

    def _clear_gauges(self) -> None:
        self.running = self.queued = self.generation_throughput = self.new_token_ratio = None
        self.usages = {}
        self.graph = None
        self._joined = 0.0
        self._prefill_full = False
        self._told_at = None

    def _see(self, now: float, *, serving: bool) -> None:
        self._seen_at = self._told_at = now
        self.totals.counts["observations"] += serving
        running = None if self.running is None else self.running + self._joined
        self.states = classify(
            Observation(
                serving=serving,
                running=running,
                queued=self.queued,
                usage=self.usage,
                graph=self.graph,
                queue_wait_seconds=self.queue_wait_seconds(now),
                running_limit=self._facts.running_limit(self.dp),
                largest_captured=self._facts.largest_captured,
                graphs_disabled=self._facts.graphs_disabled,
            ),
            self._profile,
        )

    def _set_usages(self, full: float | None, swa: float | None, mamba: float | None) -> None:
        for pool, usage in (("full", full), ("swa", swa), ("mamba", mamba)):
            if usage is not None:
                self.usages[pool] = usage

    def see_decode(self, line: DecodeBatch, now: float) -> None:
        """Take a decode line."""
        self.advance(now)
        self.running = line.running if line.running is not None else self.running
        self.queued = line.queued if line.queued is not None else self.queued
        self._set_usages(line.full_usage, line.swa_usage, line.mamba_usage)
        self.generation_throughput = line.generation_throughput
        self._joined = 0.0
        self._prefill_full = False
        if line.graph is not None:
            self.graph = line.graph
            self._facts.graph_device = line.graph_device
            if not self._passes_told:
                kind = "replayed" if line.graph else "eager"
                self.totals.counts[kind] += 1
                self._passes_logged[kind] += 1
        self._see(now, serving=True)

    def see_prefill(self, line: PrefillBatch, now: float) -> None:
        """Take a prefill line. A health probe's prefill is not load: a probed idle server is idle."""
        self.advance(now)
        self.running = line.running if line.running is not None else self.running
        self.queued = line.queued if line.queued is not None else self.queued
        self._set_usages(line.full_usage, line.swa_usage, line.mamba_usage)
        self._joined = line.new_sequences or 0
        most = self._facts.prefill_batch_tokens
        self._prefill_full = most is not None and (line.new_tokens or 0) >= FULL_PREFILL_SHARE * most
        if not self._admitted_told:
            self.admission.add(now, line.new_sequences or 0)
        self._see(now, serving=not line.is_health_probe)

    def see_figures(
        self, new: RankFigures, progress: float | None, now: float, base: RankFigures | None = None
    ) -> None:
        """Take what a scrape says about this scheduler; `base` are the figures to count from at its first word.

        A gauge is refreshed only by a batch line's printing or by idling (CENSUS §1), so figures equal to the last ones
        are the old observation, not a new one; only zeros are believed again and again.
        """
        self.advance(now)
        old = self._native or base
        passes = self._count(old, new, now)
        moved = None if progress is None or self._progress is None else progress - self._progress
        self._native, self._progress = new, progress
        if new.running is None and new.queued is None:
            return
        fresh = old is None or bool(moved) or _evidence(old) != _evidence(new)
        queues = sum(new.queues.values()) + (new.grammar_queued or 0)
        worked = passes >= DECODE_PROGRESS or (moved is not None and moved >= PREFILL_PROGRESS)
        serving = bool(new.running or new.queued or queues or worked)
        if serving and not fresh:
            if self._told_at is not None:
                self._told_at = now
            return
        self.running, self.queued = new.running, new.queued
        self._set_usages(new.full_usage, new.swa_usage, new.mamba_usage)
        self.generation_throughput = new.generation_throughput
        self.new_token_ratio = new.new_token_ratio if new.new_token_ratio is not None else self.new_token_ratio
        self._joined = 0.0
        self._see(now, serving=serving)

    def _count(self, old: RankFigures | None, new: RankFigures, now: float) -> float:
        """Add what the server's own counters gained since the last scrape: how many decode batches ran since.

        The first scrape only gives the base.
        """
        passes_told_now = not self._passes_told and (new.graph_passes is not None or new.eager_passes is not None)
        self._passes_told = self._passes_told or passes_told_now
        self._admitted_told = self._admitted_told or new.admitted_requests is not None
        self.native_retractions_told = self.native_retractions_told or new.retracted_requests is not None
        if old is None:
            if self._admitted_told:
                self.admission.add(now, 0)
            return 0.0
        replayed = gained(old.graph_passes, new.graph_passes)
        eager = gained(old.eager_passes, new.eager_passes)
        # What the server counted from its first batch on holds the batches that were counted from the log until now.
        logged = self._passes_logged if passes_told_now else Counter[str]()
        self.totals.counts["replayed"] += max(int(replayed) - logged["replayed"], 0)
        self.totals.counts["eager"] += max(int(eager) - logged["eager"], 0)
        if replayed or eager:
            self.graph = replayed >= eager
        self.totals.counts["native_retracted_requests"] += int(gained(old.retracted_requests, new.retracted_requests))
        if self._admitted_told:
            self.admission.add(now, gained(old.admitted_requests, new.admitted_requests))
        return replayed + eager


def _evidence(figures: RankFigures) -> tuple[float | None, ...]:
    return (
        figures.running,
        figures.queued,
        figures.full_usage,
        figures.used_tokens,
        figures.generation_throughput,
        figures.graph_passes,
        figures.eager_passes,
    )


def gained(old: float | None, new: float | None) -> float:
    """Say how much a cumulative figure grew.

    It counts from 0 when it was absent (created on first use) or fell (the server was restarted).
    """
    if new is None:
        return 0.0
    return new if old is None or new < old else new - old


class ServerState:
    """One server: its facts, its schedulers, and what happened to it."""

    def __init__(self, profile: Profile, now: float) -> None:
        self.profile = profile
        self.facts = ServerFacts()
        self.ranks: dict[int | None, RankState] = {}
        self.out_of_memory: Counter[str] = Counter()
        self.starts = 0
        self.liveness: Counter[str] = Counter()
        self.log_tells_retractions = False
        self._retractions = RetractionLedger()
        self._failures = OutOfMemoryLedger()
        self._stats_ranks = StatsRanks()
        self._progress: float | None = None
        self._log_tells_starts = False
        self._scraped = False
        self._failure_marks: deque[tuple[float, str]] = deque(maxlen=256)
        self.begun = now

    def rank(self, dp: int | None, now: float) -> RankState:
        """Give the scheduler of this DP rank; it is made at its first word."""
        if dp not in self.ranks:
            self.ranks[dp] = RankState(dp, self.profile, self.facts, now)
        return self.ranks[dp]

    def observe(self, event: Event, now: float) -> None:
        """Take one event of the log."""
        if isinstance(event, DecodeBatch):
            if self._stats_ranks.counts(event.rank):
                self.rank(event.rank.dp, now).see_decode(event, now)
        elif isinstance(event, PrefillBatch):
            if self._stats_ranks.counts(event.rank):
                self.rank(event.rank.dp, now).see_prefill(event, now)
        elif isinstance(event, Retraction):
            self._retract(event, now)
        elif isinstance(event, OutOfMemory):
            self._fail(event, now)
        else:
            if isinstance(event, ServerArgs):
                self._log_tells_starts = True
                self._start(now)
            self.facts.apply(event)
            if isinstance(event, Liveness):
                self.liveness[event.what] += 1

    def recall(self, event: Event) -> None:
        """Take an event from before the exporter came: only what lasts is learned, nothing is counted."""
        if isinstance(event, ServerArgs):
            self._log_tells_starts = True
            self.facts = self._fresh_facts()
        if not isinstance(event, (DecodeBatch, PrefillBatch, Retraction, OutOfMemory)):
            self.facts.apply(event)

    def _retract(self, event: Retraction, now: float) -> None:
        rank = self.rank(event.rank.dp, now)
        if event.testing or not self._retractions.is_new(event, now):
            return
        rank.advance(now)
        rank.totals.counts["retraction_events"] += 1
        rank.totals.counts["log_retracted_requests"] += event.requests
        rank.new_token_ratio = event.ratio_after if event.ratio_after is not None else rank.new_token_ratio

    def _fail(self, event: OutOfMemory, now: float) -> None:
        judged = self._failures.judge(event, now)
        if judged == "repeated":
            return
        if judged == "explained":
            # Another rank's or the raised line tells where the failure happened that was counted as unknown.
            self.out_of_memory["unknown"] -= 1
            self._failure_marks.pop()
        self.out_of_memory[event.phase] += 1
        self._failure_marks.append((now, event.phase))

    def _fresh_facts(self) -> ServerFacts:
        old = self.facts
        facts = ServerFacts(version=old.version, model_name=old.model_name, engine_type=old.engine_type)
        for rank in self.ranks.values():
            rank._facts = facts  # noqa: SLF001 - the facts of a server and of its ranks are one object
        return facts

    def _start(self, now: float) -> None:
        self.advance(now)
        self.starts += 1
        self.facts = self._fresh_facts()
        for rank in self.ranks.values():
            rank.reset()
        self._failures.forget()
        self._stats_ranks.forget()

    def observe_scrape(self, scrape: Scrape, now: float) -> None:
        """Take one successful scrape."""
        self.facts.model_name = scrape.model_name or self.facts.model_name
        self.facts.engine_type = scrape.engine_type or self.facts.engine_type
        restarted = scrape.progress is not None and self._progress is not None and scrape.progress < self._progress
        if restarted and not self._log_tells_starts:
            self._start(now)
        self._progress = scrape.progress if scrape.progress is not None else self._progress
        # 0.4.3-0.4.8 have no rank labels: all DP ranks share one series and only the last writer is seen (CENSUS §1),
        # so the log's ranks win.
        blurred = [r.dp for r in scrape.ranks] == [None] and self.has_dp_ranks
        # Progress is the whole server's: with several schedulers it says nothing of one.
        progress = scrape.progress if len(scrape.ranks) == 1 else None
        for figures in scrape.ranks:
            if not blurred:
                self.facts.apply_figures(figures)
                # A scheduler that an earlier scrape did not show had done nothing then: its counters count from 0.
                base = RankFigures(figures.dp) if self._scraped else None
                self.rank(figures.dp, now).see_figures(figures, progress, now, base)
        self._scraped = True

    def advance(self, now: float) -> None:
        """Bring the seconds up to `now`."""
        for rank in self.ranks.values():
            rank.advance(now)

    def totals(self) -> Totals:
        """Add all schedulers together, since the exporter came."""
        total = Totals()
        for rank in self.schedulers:
            total += rank.totals
        return total

    def recent(self, now: float, seconds: float | None = None) -> Totals:
        """Add all schedulers together, over the last `seconds` (the profile's window unless told)."""
        total = Totals()
        for rank in self.schedulers:
            total += rank.window.recent(now, rank.totals, seconds)
        return total

    def recent_failures(self, now: float, seconds: float) -> Counter[str]:
        """Count the out-of-memory failures of the last `seconds` by phase."""
        return Counter(phase for at, phase in self._failure_marks if at >= now - seconds)

    @property
    def schedulers(self) -> list[RankState]:
        """The schedulers that count: where there are DP ranks, what was told without a rank belongs to none of them."""
        return [rank for rank in self.ranks.values() if rank.dp is not None or not self.has_dp_ranks]

    @property
    def has_dp_ranks(self) -> bool:
        """Whether the server has DP ranks of its own."""
        return any(dp is not None for dp in self.ranks)
