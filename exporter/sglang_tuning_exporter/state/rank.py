"""One scheduler over time: its gauges, what it does, for how long, and what it counts. Pure; `now` is seconds on the caller's clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import inf

from sglang_tuning_exporter.sglang.events import DecodeBatch, Event, PrefillBatch, RankFigures
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
from sglang_tuning_exporter.state.cadence import LEAST_SECONDS, Cadence
from sglang_tuning_exporter.state.counters import Increases, SchedulerCounters
from sglang_tuning_exporter.state.decode_samples import DecodeSamples
from sglang_tuning_exporter.state.dp_attention import AttentionRanks
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.gauges import Gauges
from sglang_tuning_exporter.state.kv_cache import PoolMemory, Prompts
from sglang_tuning_exporter.state.profiles import Profile
from sglang_tuning_exporter.state.signals import ALL_IDLE, HOLD_SECONDS, Signal, States, named
from sglang_tuning_exporter.state.thresholds import Thresholds
from sglang_tuning_exporter.state.timeline import IDLE, NOTHING, Timeline
from sglang_tuning_exporter.state.totals import HELD_BACK, AdmissionRate, Snapshot, Window


class RankState(Gauges):
    """One scheduler: its gauges, and what it did."""

    def __init__(
        self,
        dp: int | None,
        profile: Profile,
        facts: ServerFacts,
        now: float,
        *,
        others: AttentionRanks,
        on_first_work: Callable[[], None],
    ) -> None:
        self.dp = dp
        self.alone = False  # without DP rank, and counts although there are DP ranks
        self.time = Timeline(now, profile.window_seconds, self._plan, self.become_idle, self._forget_gauges)
        self.advance = self.time.advance  # counts the seconds up to a time
        self.window: Window = self.time.window
        self.thresholds = Thresholds(dp, profile, facts)
        super().__init__(self.time.totals, Prompts(self.thresholds, self.time.totals))
        self.counters = SchedulerCounters(dp, self.totals)
        self.pool = PoolMemory()
        self._others = others if dp is not None else None  # where batches of other ranks decide with this one's
        self.samples = DecodeSamples()
        self._cadence = Cadence()
        self._seen_in_log = False  # a batch line, not a scrape, was seen last
        self._scraped_at = -inf
        self.served = False  # it was seen at work since the server started
        self._on_first_work = on_first_work

    @property
    def states(self) -> dict[Signal, str]:
        """What it does now: one state for each signal."""
        return named(self.time.snapshot[0])

    def queue_wait_seconds(self, now: float) -> float | None:
        """Estimate the wait of the last request in the queue from the present rate of admission; inf where none is admitted."""
        if not self.queued:
            return 0.0 if self.queued is not None else None
        rate = 0.0 if self.time.hangs else self.time.admission.per_second(now)
        if rate is None:
            return None
        return self.queued / rate if rate > 0 else inf

    def reset(self) -> None:
        """Forget the server before: the gauges of a new one are not known and its counters begin again."""
        self.time.is_stalled = False
        self.served = False
        self.time.forget()
        self._forget_gauges()
        self.time.admission = AdmissionRate()
        self._cadence = Cadence()
        self.samples = DecodeSamples()
        self.counters.reset()

    def retract(self, requests: int, ratio: float | None, now: float) -> None:
        """Count a retraction that the log shows; `ratio` is the new-token ratio after it."""
        self.advance(now)
        counts = self.totals.counts
        counts["retraction_events"] += 1
        counts["log_retracted_requests"] += requests
        if self.usage is not None:
            counts["usage_before_retractions"] += self.usage
            counts["retractions_with_usage"] += 1
        self.new_token_ratio = self.new_token_ratio if ratio is None else ratio
        self.other_queues.retracted(ratio)

    def restore(self, counts: Mapping[str, float]) -> None:
        """Add what `saved` returned to an earlier process; none of it is recent."""
        self.counters.restore(counts)
        self.window.begin(self.totals)

    def see_runs(self, run: BatchRun, rest: Iterator[Event | BatchRun], now: float | None) -> Event | BatchRun | None:
        """Take `run` and the runs of this scheduler that follow in `rest`; return the first event that is none of them.

        All are taken at `now`, or each at its printed time.
        """
        event: Event | BatchRun | None = run
        while isinstance(event, BatchRun) and event.rank is run.rank:
            self._see_run(event, event.time if now is None else now)
            event = next(rest, None)
        return event

    def _see_run(self, run: BatchRun, now: float) -> None:
        """Take a run: no time passes between its lines, so all of them count and the last one says what holds."""
        (
            printed, _, running, queued, usage, joined, tokens, decodes, prefills, sequences, computed, cached, repeated, pending, device, graph,
            _, _,
        ) = run  # fmt: skip
        self._begin_batch(run, now, printed, decodes)
        if prefills:
            if pending:
                self.prompts.wait(pending, now)
            self._count_prefills(now, printed, prefills, sequences, computed, cached)
            self.totals.counts["repeated_tokens"] += repeated
        if decodes:
            self._count_decodes(run, now, decodes, running, graph, device)
        self.running, self.queued = running, queued
        usages = self.usages
        usages["full"] = usage
        self.usage = usage if len(usages) == 1 else max(usages.values())
        self._end_batch(now, joined, tokens, decodes + prefills)

    def see_line(self, line: DecodeBatch | PrefillBatch, now: float) -> None:
        """Take one line: a run of one, and what only other layouts have: more pools and queues, or fewer figures.

        The prefill of a health probe is no load.
        """
        printed = now if line.time is None else line.time
        self._begin_batch(line, now, printed, isinstance(line, DecodeBatch))
        self._set_usages(line.full_usage, line.swa_usage, line.mamba_usage)
        self.other_queues.see_queues(line.queues)
        self.running = self.running if line.running is None else line.running
        self.queued = self.queued if line.queued is None else line.queued
        if isinstance(line, DecodeBatch):
            self._count_decodes(line, now, 1, self.running or 0, line.graph, line.graph_device)
            self._end_batch(now, 0, 0, 1)
            return
        tokens, sequences = line.new_tokens or 0, line.new_sequences or 0
        if line.pending_tokens is not None:
            self.prompts.wait(line.pending_tokens, now)
        self._count_prefills(now, printed, 1, sequences, tokens, line.cached_tokens)
        if tokens <= sequences:
            self.totals.counts["repeated_tokens"] += line.cached_tokens or 0
        self._end_batch(now, sequences, tokens, 1, serving=not line.is_health_probe)

    def _begin_batch(
        self, lines: DecodeBatch | PrefillBatch | BatchRun, now: float, printed: float, decodes: int
    ) -> None:
        """Count the time up to batch lines, and note that they came."""
        self.advance(now)
        if printed != now:
            self._cadence.delivered(now, printed)
        if self.time.snapshot[0][0] != "serving":
            self._cadence.woke(now)
            self.samples.batch = 0.0  # the line's throughput is also over the pause
        if now != self.samples.at:
            if self._others is not None and self._others.has_prefilled(self.dp, self.thresholds.facts, self.samples.at):
                self.samples.batch = 0.0
            self.samples.begin(lines, now)
        if self.thresholds.revision != self.thresholds.facts.revision:
            self._renew()
        self.pool.see(lines, now, decodes=decodes)

    def _count_decodes(  # noqa: PLR0917 - called for every line, by position
        self,
        lines: DecodeBatch | BatchRun,
        now: float,
        decodes: int,
        running: float,
        graph: bool | None,
        device: str | None,
    ) -> None:
        """Count decode lines, and whether their batches replayed a captured graph."""
        self._cadence.decoded(now, decodes, lines)
        self._last_decode = lines
        self.totals.counts["decoded"] += decodes * running
        facts = self.thresholds.facts
        if self.other_queues.may_hold_back:
            self.other_queues.decoded(decodes * self.thresholds.interval, self.thresholds.initial_ratio)
        if graph is None:
            return
        self.graph = graph
        if facts.graph_device != device:
            facts.graph_device = device
            facts.revision += 1
        if self._others is not None:
            self._excuse_eager(now, running)
        if not self.counters.has_passes:
            self.totals.counts["replayed" if graph else "eager"] += decodes * self.thresholds.interval

    def _count_prefills(  # noqa: PLR0917 - called for every line, by position
        self, now: float, printed: float, prefills: int, sequences: int, computed: int, cached: int | None
    ) -> None:
        """Count prefill lines, their prompt tokens and the requests that they start."""
        counts = self.totals.counts
        if cached is not None:
            self.prompts.are_logged = True
            counts["cached_tokens"] += cached
            counts["computed_tokens"] += computed
        if self._others is not None:
            self._others.prefilled(self.dp, now)
        started = self._cadence.prefilled(now, printed, computed, sequences, prefills)
        counts["joined"] += sequences
        counts["new_sequences"] += started
        if not self.counters.has_admitted:
            self.time.admission.add(now, started)

    def _end_batch(self, now: float, joined: int, tokens: int, lines: int, *, serving: bool = True) -> None:
        """Set what holds after batch lines: `joined` and `tokens` are those of the last one, 0 of a decode line."""
        self._joined = joined
        self.samples.batch = 0.0 if joined or tokens else self.running or 0.0
        if now == self.prompts.pending_at and self.queued is not None:
            self.prompts.pending_of = self.queued
        if tokens or self._cadence.full:
            self._cadence.ended(self.thresholds.filling(tokens, self.running or 0.0, joined), self.thresholds.most)
        self._seen_in_log = True
        self._see(now, lines if serving else 0)

    def see_figures(
        self,
        new: RankFigures,
        progress: float | None,
        now: float,
        base: RankFigures | None = None,
        *,
        is_stalled: bool = False,
    ) -> None:
        """Take the figures of a scrape; `base` are those to count from where no scrape came before.

        SGLang refreshes a gauge only when it prints a batch line or is idle (`log_decode_stats`, `self_check_during_idle`, later `on_idle`). So
        unchanged figures are the old observation, except zeros. Work that does not change while nothing of the whole server moves
        (`is_stalled`) is a hang: releases with a grammar queue (0.4.6 on) set the gauges of an idle server to zero.
        """
        found = self.counters.take(new, progress, base)
        if self.thresholds.revision != self.thresholds.facts.revision:
            self._renew()
        elsewhere = sum(new.queues.values()) + (new.grammar_queued or 0)
        serving = bool(new.running or new.queued or elsewhere)
        if not serving and found.has_worked and now - self._cadence.heard_at > HOLD_SECONDS:
            self._serve_before(now)
        self.advance(now)
        self._count_gained(new, found, now)
        self._scraped_at = now
        if new.running is None and new.queued is None:
            return
        if not serving and self._log_goes_on(now):
            return  # a prefill, which the gauges do not show
        if not serving or found.is_fresh:
            self._set_gauges(new, now, serving=serving)
        elif self.time.updated_at is not None:
            # Requests that wait for a grammar or for the other half of a pair keep no scheduler busy.
            self.time.see_again(
                now, is_stalled=is_stalled and new.grammar_queued is not None and bool(new.running or new.queued)
            )

    def _set_gauges(self, new: RankFigures, now: float, *, serving: bool) -> None:
        self.running, self.queued = new.running, new.queued
        self._set_usages(new.full_usage, new.swa_usage, new.mamba_usage)
        self._set_throughput(new.generation_throughput)
        if new.new_token_ratio is not None:
            self.new_token_ratio = new.new_token_ratio
        self.other_queues.see_figures(new)
        self._joined = 0
        self._cadence.ended(0.0, None)
        self._seen_in_log = False
        self._see(now, int(serving))
        if serving and new.new_token_ratio is not None:
            self._count_ratio(new.new_token_ratio)

    def _count_ratio(self, ratio: float) -> None:
        """Add up the new-token ratio over the scrapes under load, and over those at which requests were held back."""
        counts, is_held_back = self.totals.counts, self.time.snapshot[0][3] == HELD_BACK
        for name in ("new_token_ratio", "held_back_new_token_ratio")[: 1 + is_held_back]:
            counts[name] += ratio
            counts[f"{name}_samples"] += 1

    def _serve_before(self, now: float) -> None:
        """Count the time since the scrape before as serving: only the counters show work, both scrapes found nothing to do."""
        self.advance(max(self.time.counted_to, now - HOLD_SECONDS))
        if not self.time.serves:
            states = self.thresholds.classifier.serving(0.0, 0.0, None, self.graph, False, self.queue_wait_seconds, now)
            self.time.see_before((states, 0.0, None, None), now)
            self.totals.counts["observations"] += 1
            self._begin_work()

    @property
    def overdue_seconds(self) -> float:
        """How long after its last batch line a scheduler at work has surely printed another one."""
        return self._cadence.overdue_seconds()

    def _log_goes_on(self, now: float) -> bool:
        """Whether a prefill line was seen last, and the next line is not overdue."""
        if not self._seen_in_log or self._joined <= 0 or not self.time.serves:
            return False
        return self.time.seen_at is not None and now < self.time.seen_at + self._cadence.hold_seconds()

    def _count_gained(self, new: RankFigures, found: Increases, now: float) -> None:
        """Count what the server's own counters gained."""
        self.counters.count(new, found)
        if found.replayed or found.eager:
            self.graph = found.replayed >= found.eager
            if self._others is not None:
                self._excuse_eager(now, new.running or 0.0, since=self._scraped_at)
        if self.counters.has_admitted:
            self.time.admission.add(now, found.admitted)

    def _see(self, now: float, observations: int) -> None:
        """Set what the gauges say from `now` on; without `observations` the scheduler is idle."""
        is_full = self._cadence.full
        states = ALL_IDLE
        if observations:
            self.totals.counts["observations"] += observations
            if not self.served:
                self._begin_work()
            states = self._serving(now, is_full)
        else:
            self.rest()
        snapshot = (states, self.queued, self.usage, self.running)
        # The next line nearly always comes within this time: until then nothing else is looked at.
        self.time.see(snapshot, now, now + LEAST_SECONDS if observations and not is_full else -inf)

    def _begin_work(self) -> None:
        self.served = True
        self._on_first_work()

    def _serving(self, now: float, prefill_full: bool) -> States:
        """Return the states while something runs or waits."""
        running = None if self.running is None else self.running + self._joined
        usages, other_queues, thresholds = self.usages, self.other_queues, self.thresholds
        if thresholds.revision != thresholds.facts.revision:
            self._renew()
        if self.queued == 0 and not other_queues.may_hold_back and len(usages) < 2:
            return thresholds.classifier.unqueued(running, self.usage, self.graph)
        states = thresholds.classifier.serving(
            running,
            self.queued,
            self.usage,
            self.graph,
            prefill_full,
            self.queue_wait_seconds,
            now,
            other_queues.waits(usages, thresholds.initial_ratio, self.time.admission, now),
            self.prompts.next_fits,
        )
        if len(usages) > 1:
            self._weigh_pools(now, limits=states[3] == "hybrid_pool_full")
        return states

    def _plan(self) -> list[tuple[float, Snapshot]]:
        """Return what the last observation says about the time after it, as pairs of (until, what holds).

        A scrape holds until the next one, as does a line where scrapes show when the server is idle. From the log alone, a server
        whose next line is overdue is idle, or unknown where requests were waiting. A full prefill batch is full while it is
        computed; afterwards the state follows from its batch.
        """
        seen, snapshot = self.time.seen_at or 0.0, self.time.snapshot
        last = seen + HOLD_SECONDS
        if not self._seen_in_log or snapshot[0] is ALL_IDLE:
            return [(last, snapshot)]
        stages = []
        if self._cadence.full:
            stages.append((seen + min(self._cadence.prefill_seconds, HOLD_SECONDS), snapshot))
            snapshot = (self._serving(seen, False), *snapshot[1:])
        after = snapshot
        if seen - self._scraped_at > HOLD_SECONDS:
            stages.append((seen + min(self._cadence.hold_seconds(), HOLD_SECONDS), snapshot))
            after = NOTHING if self.queued is None or self.queued > 0 else IDLE
        return [*stages, (last, after)]

    def _forget_gauges(self) -> None:
        """Forget the gauges: nothing was seen for too long, or the server started again."""
        self.clear()
        self._cadence.ended(0.0, None)
        self.time.expire()

    def _renew(self) -> None:
        """Take over what the facts have changed."""
        self.thresholds.renew()
        self._cadence.chunk, self._cadence.interval = self.thresholds.chunk, self.thresholds.tokens_per_interval

    def _excuse_eager(self, now: float, running: float, since: float | None = None) -> None:
        """Forget that steps ran without a graph where another rank of DP attention can be the cause.

        `since` is when the first of these steps may have been: the decode line before, or the scrape before.
        """
        assert self._others is not None
        before, facts = self._others.decoded(self.dp, running, now), self.thresholds.facts
        if self.graph is not False or running > self.thresholds.largest_captured:
            return
        if self._others.explain_eager(self.dp, facts, now, before if since is None else since):
            self.graph = None
