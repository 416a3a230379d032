"""One scheduler over time: what it does now, for how long it has done what, and what it counts. Pure; `now` as in `state`."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING, TypeAlias

from sglang_tuning_exporter.admission import Beside
from sglang_tuning_exporter.credibility import PoolMemory
from sglang_tuning_exporter.sglang.events import DecodeBatch, PrefillBatch, RankFigures
from sglang_tuning_exporter.sglang.usual import BatchRun
from sglang_tuning_exporter.signals import (
    ALL_IDLE,
    ALL_STUCK,
    ALL_UNKNOWN,
    HOLD_SECONDS,
    SIGNALS,
    STATES,
    Judge,
    Signal,
    named,
)
from sglang_tuning_exporter.window import AdmissionRate, Held, Totals, Window

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sglang_tuning_exporter.guide.profiles import Profile
    from sglang_tuning_exporter.server import ServerFacts
    from sglang_tuning_exporter.sglang.events import Event
    from sglang_tuning_exporter.signals import States

# A health probe's generation moves the work counters by a few tokens; a long prompt in prefill, which the gauges do not
# show, by thousands.
PREFILL_PROGRESS = 1024.0
# A scheduler that decoded this much between two scrapes was serving, though it had nothing to do when it was asked.
DECODE_PROGRESS = 40.0
# A prefill batch this close to the most that fits is full: whole pages are filled, and the last one may not fit.
FULL_PREFILL_SHARE = 0.9
_NOTHING: Held = (ALL_UNKNOWN, None, None, None)
_STUCK: Held = (ALL_STUCK, None, None, None)
_LINES_KEPT = 16  # unread: a decode line ends them, but a server that only prefills prints none
_Lines: TypeAlias = "DecodeBatch | PrefillBatch | BatchRun"


class RankState:
    """One scheduler: what it does now, and for how long it has done what."""

    # Asked for a dozen of these by every line of a log; a plain object with more than thirty looks each one up.
    __slots__ = (
        "_admitted_told",
        "_facts",
        "_held",
        "_holds_until",
        "_integrated_to",
        "_joined",
        "_judged_by",
        "_most",
        "_native",
        "_observed_before",
        "_passes_logged",
        "_pending",
        "_pending_in",
        "_pool",
        "_pool_lines",
        "_prefill_full",
        "_profile",
        "_progress",
        "_thresholds",
        "_throughput",
        "_throughput_in",
        "_told_at",
        "_works_unmoved",
        "admission",
        "alone",
        "beside",
        "dp",
        "graph",
        "native_retractions_told",
        "new_token_ratio",
        "passes_told",
        "prompts_told",
        "queued",
        "running",
        "seen_at",
        "totals",
        "usages",
        "window",
    )

    def __init__(self, dp: int | None, profile: Profile, facts: ServerFacts, now: float) -> None:
        self.dp = dp
        self.alone = False
        self._observed_before = 0.0  # observations of the starts before
        self.running: float | None = None
        self.queued: float | None = None
        self.usages: dict[str, float] = {}
        self.graph: bool | None = None
        self._throughput: float | None = None
        self._throughput_in: BatchRun | None = None  # not read yet
        self.new_token_ratio: float | None = None
        self._pending: float | None = None
        self._pending_in = b""  # not read yet
        self.prompts_told = False
        self.beside = Beside()
        self._held = _NOTHING
        self._holds_until = -inf
        self.totals = Totals()
        for signal in SIGNALS:
            for state in STATES[signal]:
                self.totals.seconds[signal, state] = 0.0
        self.window = Window(profile.window_seconds)
        self.admission = AdmissionRate()
        self._joined = 0.0
        self._profile = profile
        self._facts = facts
        self.seen_at: float | None = None  # when what holds was seen; None: nothing does
        self._integrated_to = now
        self._native: RankFigures | None = None
        self._told_at: float | None = None  # when the gauges were last told, if only again
        self._progress: float | None = None
        self._prefill_full = False
        self._judged_by: tuple[ServerFacts, int] | None = None
        self._most: float | None = None  # prompt tokens in one prefill batch
        self._thresholds = Judge(profile, None, None)
        self._works_unmoved = False  # the last scrape told of work, and of nothing that moved
        self._pool = PoolMemory()
        self._pool_lines: list[tuple[_Lines, float]] = []  # not read yet: only a retraction asks
        self.native_retractions_told = False
        self.passes_told = False
        self._admitted_told = False
        self._passes_logged: Counter[str] = Counter()

    @property
    def states(self) -> dict[Signal, str]:
        """What it does now: one state for each signal."""
        return named(self._held[0])

    @property
    def generation_throughput(self) -> float | None:
        """Generated tokens per second, of the last decode line or scrape."""
        if self._throughput_in is not None:
            line, self._throughput_in = self._throughput_in.decode, None
            self._throughput = None if line is None else line.generation_throughput
        return self._throughput

    @generation_throughput.setter
    def generation_throughput(self, figure: float | None) -> None:
        self._throughput, self._throughput_in = figure, None

    @property
    def pending_tokens(self) -> float | None:
        """Tokens of prompts that wait, as the last prefill line told."""
        if self._pending_in:
            self._pending, self._pending_in = float(self._pending_in), b""
        return self._pending

    @pending_tokens.setter
    def pending_tokens(self, figure: float | None) -> None:
        self._pending, self._pending_in = figure, b""

    @property
    def pool(self) -> PoolMemory:
        """What is known of its pool since its last decode line."""
        unread, self._pool_lines = self._pool_lines, []
        for lines, now in unread:
            if isinstance(lines, PrefillBatch):
                self._pool.see_prefill(lines)
                continue
            decode = lines if isinstance(lines, DecodeBatch) else lines.decode
            if decode is not None:
                self._pool.see_decode(decode, now)
            for line in () if isinstance(lines, DecodeBatch) else lines.joined:
                self._pool.see_prefill(line)
        return self._pool

    def _keep_prefill(self, lines: PrefillBatch | BatchRun, now: float) -> None:
        self._pool_lines.append((lines, now))
        if len(self._pool_lines) > _LINES_KEPT:
            _ = self.pool

    @property
    def usage(self) -> float | None:
        """Usage of the fullest pool, 0-1."""
        return max(self.usages.values(), default=None)

    @property
    def was_scraped(self) -> bool:
        """Whether a scrape has told of this scheduler."""
        return self._native is not None

    @property
    def served(self) -> bool:
        """Whether it was seen at work since the server started."""
        return self.totals.counts["observations"] > self._observed_before

    @property
    def native_retracted(self) -> float | None:
        """Give the server's own count of retracted requests at the last scrape."""
        return self.last_told("retracted_requests")

    def last_told(self, counter: str) -> float | None:
        """Give one of the server's own counters, a field of `RankFigures`, as the last scrape told it."""
        figure: float | None = getattr(self._native, counter, None)
        return figure

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
        seconds = now - self._integrated_to
        if seconds >= 0 and now <= self._holds_until:
            # Nearly every line of a log: what was seen last still holds.
            if seconds:
                self._integrated_to = now
                self.totals.pending.append((seconds, self._held))
            if now >= self.window.due:
                self.window.mark(now, self.totals)
            return
        begin, self._integrated_to = self._integrated_to, max(now, self._integrated_to)
        holds_until = begin if self.seen_at is None else self.seen_at + HOLD_SECONDS
        known = max(0.0, min(now, holds_until) - begin)
        beyond = max(0.0, now - begin) - known
        if known > 0:
            self.totals.pending.append((known, self._held))
        if now > holds_until and self.seen_at is not None:
            self.forget()
        if self._told_at is not None and now - self._told_at > HOLD_SECONDS:
            self._clear_gauges()
        if known > 0 and beyond > 0:
            self.window.mark(begin + known, self.totals)
        if beyond > 0:
            self.totals.pending.append((beyond, self._held))
        self.window.mark(now, self.totals)

    def forget(self) -> None:
        """Let go of what was seen: nothing has been heard for too long, or the server started anew."""
        self.seen_at = None
        self._held, self._holds_until = _STUCK if self._works_unmoved else _NOTHING, -inf

    def reset(self) -> None:
        """Start again with a new server: its gauges are gone and its counters begin again."""
        self._works_unmoved = False
        self._observed_before = self.totals.counts["observations"]
        self.forget()
        self._clear_gauges()
        self.admission = AdmissionRate()
        # Whether the new one counts its decode batches must be told anew; until then its log does.
        self.passes_told = False
        self._passes_logged.clear()

    def counters_began_again(self) -> None:
        """Count the server's own counters from 0: one may have passed what it was before the restart."""
        if self._native is not None:
            self._native = RankFigures(self.dp)

    def saved(self) -> dict[str, float]:
        """Give the counters that only the log tells, and that it would tell twice if they were forgotten."""
        names = ["retraction_events", "log_retracted_requests"]
        if not self.passes_told:
            names += ["replayed", "eager"]
        return {name: self.totals.counts[name] for name in names}

    def restore(self, counts: Mapping[str, float]) -> None:
        """Put back what `saved` gave to an earlier process; none of it is recent."""
        for name in ("retraction_events", "log_retracted_requests", "replayed", "eager"):
            self.totals.counts[name] += counts.get(name, 0)
        self.window.begin(self.totals)

    def _clear_gauges(self) -> None:
        self.running = self.queued = self.generation_throughput = self.new_token_ratio = self.pending_tokens = None
        self.beside.clear()
        if self._works_unmoved:
            self._works_unmoved = False
            self._held = _NOTHING
        self.usages = {}
        self.graph = None
        self._joined = 0.0
        self._prefill_full = False
        self._told_at = None

    def _see(self, now: float, *, serving: bool) -> None:
        self.seen_at = self._told_at = now
        self._holds_until = now + HOLD_SECONDS
        self._works_unmoved = False
        usage = self.usage
        states = ALL_IDLE
        if serving:
            self.totals.counts["observations"] += 1
            states = self._serving(now)
        else:
            self.beside.idle()
            self.pending_tokens = None if self.pending_tokens is None else 0.0
        self._held = (states, self.queued, usage, self.running)

    def _serving(self, now: float) -> States:
        running = None if self.running is None else self.running + self._joined
        return self._judge().serving(
            running,
            self.queued,
            self.usage,
            self.graph,
            self._prefill_full,
            self.queue_wait_seconds,
            now,
            self.beside.elsewhere(self.usages, self._facts),
        )

    def _judge(self) -> Judge:
        """Give the thresholds in force; what the facts say changes at a start and hardly ever else."""
        facts, known = self._facts, self._judged_by
        if known is None or known[0] is not facts or known[1] != facts.revision:
            self._judged_by = (facts, facts.revision)
            self._most = facts.prefill_batch_tokens
            self._thresholds = Judge(
                self._profile.for_edition(first=facts.is_first_edition),
                facts.running_limit(self.dp),
                facts.largest_captured,
                facts.without_graph,
            )
        return self._thresholds

    def _set_graph(self, graph: bool, device: str | None) -> None:  # noqa: FBT001
        self.graph = graph
        if self._facts.graph_device != device:
            self._facts.graph_device = device
            self._facts.revision += 1

    def _set_usages(self, full: float | None, swa: float | None, mamba: float | None) -> None:
        for pool, usage in (("full", full), ("swa", swa), ("mamba", mamba)):
            if usage is not None:
                self.usages[pool] = usage

    def see_decode(self, line: DecodeBatch, now: float) -> None:
        """Take a decode line."""
        self.advance(now)
        self._pool_lines = [(line, now)]
        self.running = line.running if line.running is not None else self.running
        self.queued = line.queued if line.queued is not None else self.queued
        self._set_usages(line.full_usage, line.swa_usage, line.mamba_usage)
        self.generation_throughput = line.generation_throughput
        self.beside.see_queues(line.queues)
        self.beside.decoded(1, self._facts)
        self._joined = 0.0
        self._prefill_full = False
        if line.graph is not None:
            self._set_graph(line.graph, line.graph_device)
            if not self.passes_told:
                kind = "replayed" if line.graph else "eager"
                self.totals.counts[kind] += 1
                self._passes_logged[kind] += 1
        self._see(now, serving=True)

    def see_prefill(self, line: PrefillBatch, now: float) -> None:
        """Take a prefill line. A health probe's prefill is not load: a probed idle server is idle."""
        self.advance(now)
        self._keep_prefill(line, now)
        self.running = line.running if line.running is not None else self.running
        self.queued = line.queued if line.queued is not None else self.queued
        self._set_usages(line.full_usage, line.swa_usage, line.mamba_usage)
        if line.cached_tokens is not None:
            self.prompts_told = True
            self.totals.counts["cached_tokens"] += line.cached_tokens
            self.totals.counts["computed_tokens"] += line.new_tokens or 0
        self.beside.see_queues(line.queues)
        self.pending_tokens = line.pending_tokens if line.pending_tokens is not None else self.pending_tokens
        self._joined = line.new_sequences or 0
        self._judge()
        self._prefill_full = self._most is not None and (line.new_tokens or 0) >= FULL_PREFILL_SHARE * self._most
        if not self._admitted_told:
            self.admission.add(now, line.new_sequences or 0)
        self._see(now, serving=not line.is_health_probe)

    def see_runs(  # noqa: C901, PLR0912, PLR0915 - one loop, written out, not called: once for every second of a log
        self, run: BatchRun, rest: Iterator[Event | BatchRun], now: float | None
    ) -> Event | BatchRun | None:
        """Take `run` and those that follow it in `rest`; give the first event that is no run of this scheduler.

        All at `now`, or each at its printed time. No time passes between the lines of a run: all count, and the last of
        them says what holds. Does what `see_decode` and `see_prefill` do, line by line, in one go.
        """
        totals, window, facts, of_rank = self.totals, self.window, self._facts, run.rank
        counts, add_seconds = totals.counts, totals.pending.append
        judge = self._judge()
        event: Event | BatchRun | None = run
        while isinstance(event, BatchRun):
            (
                time, rank, running, queued, usage, joined, new_tokens, decodes, prefills, sequences, computed, cached,
                pending, device, graph, _, _,
            ) = event  # fmt: skip
            if rank is not of_rank:
                break
            if now is not None:
                time = now
            seconds = time - self._integrated_to
            if seconds < 0 or time > self._holds_until or time >= window.due:
                self.advance(time)
            elif seconds:
                self._integrated_to = time
                add_seconds((seconds, self._held))
            if decodes:
                if self.beside.matters:
                    self.beside.decoded(decodes, facts)
                self._pool_lines = [(event, time)]
                self._throughput_in = event
                if graph is not None:
                    self.graph = graph
                    if facts.graph_device != device:
                        self._set_graph(graph, device)
                        judge = self._judge()
                    if not self.passes_told:
                        kind = "replayed" if graph else "eager"
                        counts[kind] += decodes
                        self._passes_logged[kind] += decodes
            else:
                self._keep_prefill(event, time)
            counts["observations"] += decodes + prefills
            self.running, self.queued, self._joined = running, queued, joined
            usages = self.usages
            usages["full"] = usage
            if len(usages) > 1:
                usage = max(usages.values())
            full = new_tokens > 0 and self._most is not None and new_tokens >= FULL_PREFILL_SHARE * self._most
            self._prefill_full = full
            if prefills:
                counts["cached_tokens"] += cached
                counts["computed_tokens"] += computed
                self.prompts_told = True
                if pending:
                    self._pending_in = pending
                if not self._admitted_told:
                    self.admission.add(time, sequences)
            self.seen_at = self._told_at = time
            self._holds_until = time + HOLD_SECONDS
            self._works_unmoved = False
            if self.beside.matters or len(usages) > 1:
                states = self._serving(time)
            elif queued:
                states = judge.serving(running + joined, queued, usage, self.graph, full, self.queue_wait_seconds, time)
            else:
                states = judge.unqueued(running + joined, usage, self.graph)
            self._held = (states, queued, usage, running)
            event = next(rest, None)
        return event

    def see_figures(
        self,
        new: RankFigures,
        progress: float | None,
        now: float,
        base: RankFigures | None = None,
        *,
        stands: bool = False,
    ) -> None:
        """Take what a scrape says about this scheduler; `base` are the figures to count from at its first word.

        A gauge is refreshed only by a batch line's printing or by idling (CENSUS §1), so figures equal to the last ones
        are the old observation, not a new one; only zeros are believed again and again. Work that stays as it is while
        nothing of the whole server moves (it `stands`) is a hang; releases that tell the grammar queue (0.4.6 on) would
        set the gauges of an idle server to zero (CENSUS §1).
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
                self._works_unmoved = stands and new.grammar_queued is not None
                if self.seen_at is None:
                    self._held = _STUCK if self._works_unmoved else _NOTHING
            return
        self.running, self.queued = new.running, new.queued
        self._set_usages(new.full_usage, new.swa_usage, new.mamba_usage)
        self.generation_throughput = new.generation_throughput
        if new.new_token_ratio is not None:
            self.new_token_ratio = new.new_token_ratio
            if serving:
                self.totals.counts["new_token_ratio"] += new.new_token_ratio
                self.totals.counts["new_token_ratio_told"] += 1
        self.beside.see_figures(new)
        self._joined = 0.0
        self._see(now, serving=serving)

    def _count(self, old: RankFigures | None, new: RankFigures, now: float) -> float:
        """Add what the server's own counters gained since the last scrape: how many decode batches ran since.

        The first scrape only gives the base.
        """
        passes_told_now = not self.passes_told and (new.graph_passes is not None or new.eager_passes is not None)
        self.passes_told = self.passes_told or passes_told_now
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
