"""One scheduler over time: what it does now, for how long it has done what, and what it counts. Pure; `now` as in `state`."""

from __future__ import annotations

from collections import Counter
from math import ceil, inf
from typing import TYPE_CHECKING, TypeAlias

from sglang_tuning_exporter.sglang.events import DecodeBatch, PrefillBatch, RankFigures
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
from sglang_tuning_exporter.state.admission import OtherQueues
from sglang_tuning_exporter.state.cadence import DECODE_LOG_INTERVAL, DRAFTED_TOKENS, LEAST_SECONDS, Cadence
from sglang_tuning_exporter.state.decode_samples import DecodeSamples
from sglang_tuning_exporter.state.forgeries import PoolMemory
from sglang_tuning_exporter.state.signals import (
    ALL_IDLE,
    ALL_STUCK,
    ALL_UNKNOWN,
    HOLD_SECONDS,
    NO_OTHER_WAITS,
    SIGNALS,
    STATES,
    UNTOLD_CAPTURED,
    Classifier,
    Signal,
    named,
)
from sglang_tuning_exporter.state.totals import HELD_BACK, AdmissionRate, Held, Totals, Window

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sglang_tuning_exporter.sglang.events import Event
    from sglang_tuning_exporter.state.dp_attention import AttentionRanks
    from sglang_tuning_exporter.state.facts import ServerFacts
    from sglang_tuning_exporter.state.profiles import Profile
    from sglang_tuning_exporter.state.signals import States

# A health probe's generation moves the work counters by a few tokens; a long prompt in prefill, which the gauges do not
# show, by thousands.
PREFILL_PROGRESS = 1024.0
# A scheduler that decoded this much between two scrapes was serving, though it had nothing to do when it was asked.
DECODE_PROGRESS = 40.0
_NOTHING: Held = (ALL_UNKNOWN, None, None, None)
_STUCK: Held = (ALL_STUCK, None, None, None)
_IDLE: Held = (ALL_IDLE, 0.0, None, 0.0)
# With more of the prompt tokens from the cache than this, what a request has in the KV cache is not its own alone.
SHARED_PREFIXES = 0.2
COARSE = 0.05  # of the KV cache: requests of this size leave room that none of them fits into
_LINES_KEPT = 16  # unread: a decode line ends them, but a server that only prefills prints none
_Lines: TypeAlias = "DecodeBatch | PrefillBatch | BatchRun"


class RankState:
    """One scheduler: what it does now, and for how long it has done what."""

    # Asked for a dozen of these by every line of a log; a plain object with more than thirty looks each one up.
    __slots__ = (
        "_admitted_told",
        "_cadence",
        "_classified_by",
        "_facts",
        "_fullest",
        "_held",
        "_holds_until",
        "_integrated_to",
        "_interval",
        "_joined",
        "_most",
        "_native",
        "_observed_before",
        "_others",
        "_passes_logged",
        "_pending",
        "_pending_at",
        "_pending_for",
        "_pending_in",
        "_planned",
        "_pool",
        "_pool_lines",
        "_profile",
        "_progress",
        "_retracted",
        "_samples",
        "_scraped_at",
        "_stages",
        "_stood_since",
        "_thresholds",
        "_throughput",
        "_throughput_in",
        "_told_at",
        "_told_by_log",
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
        "served_seconds",
        "totals",
        "usages",
        "window",
    )

    def __init__(
        self,
        dp: int | None,
        profile: Profile,
        facts: ServerFacts,
        now: float,
        others: AttentionRanks | None = None,
    ) -> None:
        self.dp = dp
        self._others = others if dp is not None else None  # where other ranks' batches decide with this one's
        self.alone = False
        self._observed_before = 0.0  # observations of the starts before
        self.running: float | None = None
        self.queued: float | None = None
        self.usages: dict[str, float] = {}
        self._fullest = ("", 0.0)  # the pool that requests wait for, and since when
        self.graph: bool | None = None
        self._throughput: float | None = None
        self._throughput_in: BatchRun | None = None  # not read yet
        self.new_token_ratio: float | None = None
        self._pending: float | None = None
        self._pending_in = b""  # not read yet
        self._pending_at = -inf  # when that was told
        self._pending_for = 0.0  # and how many requests waited at that moment
        self.prompts_told = False
        self.beside = OtherQueues()
        self._held = _NOTHING
        # Up to here the state held goes on without a look at anything else; never past the first of `_stages`.
        self._holds_until = -inf
        self._stages: list[tuple[float, Held]] = []  # what is held until when, once `_planned`
        self._planned = True
        self._most: float | None = None  # prompt tokens in one prefill batch
        self._told_by_log = False  # a batch line said what is held
        self._scraped_at = -inf
        self._cadence = Cadence()
        self._interval = int(DECODE_LOG_INTERVAL)
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
        self.served_seconds = 0.0  # also in `totals`, which are added up only when they are read
        self._native: RankFigures | None = None
        self._told_at: float | None = None  # when the gauges were last told, if only again
        self._progress: float | None = None
        self._classified_by: tuple[ServerFacts, int] | None = None
        self._thresholds = Classifier(profile, None, None)
        self._stood_since: float | None = None  # when what held before nothing did was seen
        self._works_unmoved = False  # the last scrape told of work, and of nothing that moved
        self._samples = DecodeSamples()
        self._pool = PoolMemory()
        self._pool_lines: list[tuple[_Lines, float]] = []  # not read yet: only a retraction asks
        self.native_retractions_told = self.passes_told = self._admitted_told = False
        self._passes_logged: Counter[str] = Counter()
        self._retracted = (0.0, 0.0)  # requests by log and by metrics when they were last compared

    @property
    def states(self) -> dict[Signal, str]:
        """What it does now: one state for each signal."""
        return named(self._held[0])

    @property
    def states_now(self) -> States:
        """What it does now: the states in the order of `SIGNALS`."""
        return self._held[0]

    @property
    def stuck_since(self) -> float | None:
        """Since when it has work and does none of it; None while it does."""
        return self._stood_since if self._held is _STUCK else None

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

    @property
    def window_seconds(self) -> float:
        """How long what happened counts as lately."""
        return self._profile.window_seconds

    def decode_samples(self, begin: float) -> list[tuple[float, float]]:
        """Return batch and tokens a second of decode lines from `begin` on, between which nothing else was done."""
        return self._samples.since(begin)

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
    def serves_until(self) -> float | None:
        """Until when it serves, by what was seen last; None where it does not."""
        if self.seen_at is None or self._held[0][0] != "serving":
            return None
        if not self._planned:
            self._plan()
        return max((until for until, held in self._stages if held[0][0] == "serving"), default=self.seen_at)

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
        """Give the time since the last call to what is held in it; past the last observation's hold that is `unknown`."""
        seconds = now - self._integrated_to
        if seconds >= 0 and now <= self._holds_until:
            # Nearly every line of a log: what was seen last still holds.
            if seconds:
                self._integrated_to = now
                self.totals.pending.append((seconds, self._held))
                self.served_seconds += seconds
            if now >= self.window.due:
                self.window.mark(now, self.totals)
            return
        begin, self._integrated_to = self._integrated_to, max(now, self._integrated_to)
        if not self._planned:
            self._plan()
        while self._stages:
            until, held = self._stages[0]
            if held is _IDLE and self._held is not _IDLE:
                self._rest()
                self.running = self.queued = 0.0
                self.usages = dict.fromkeys(self.usages, 0.0)
            self._held = held
            begin = self._spend(begin, min(until, now))
            if until >= now:
                self._holds_until = until if held[0][0] == "serving" else -inf
                break
            self.window.mark(begin, self.totals)
            del self._stages[0]
        else:
            if self.seen_at is not None:
                self.forget()
            self._spend(begin, now)
        if self._told_at is not None and now - self._told_at > HOLD_SECONDS:
            self._clear_gauges()
        self.window.mark(now, self.totals)

    def _spend(self, begin: float, end: float) -> float:
        """Give the time between to what is held; returns where it ends."""
        if end <= begin:
            return begin
        self.totals.pending.append((end - begin, self._held))
        if self._held[0][0] == "serving":
            self.served_seconds += end - begin
        if self._held[0] is ALL_IDLE or self.seen_at is None:
            self.admission.pause(end - begin)  # nobody waited, as far as anybody knows
        return end

    def _plan(self) -> None:
        """Lay out what the last observation says about the time after it, until it says nothing any more.

        A scrape holds until the next one. So does a line where scrapes tell when the server is idle; from the log alone a
        server whose next line is overdue is idle, or unknown where requests were waiting. A full prefill batch is full for
        as long as it is computed; what the scheduler does afterwards is told by its batch.
        """
        self._planned = True
        seen, held = self.seen_at, self._held
        if seen is None:
            self._stages = []
            return
        last = seen + HOLD_SECONDS
        if not self._told_by_log or held[0] is ALL_IDLE:
            self._stages = [(last, held)]
            return
        stages = []
        if self._cadence.full:
            stages.append((seen + min(self._cadence.prefill_seconds, HOLD_SECONDS), held))
            held = (self._serving(seen, prefill_full=False), *held[1:])
        if seen - self._scraped_at > HOLD_SECONDS:
            stages.append((seen + min(self._cadence.hold_seconds(), HOLD_SECONDS), held))
            after = _NOTHING if self.queued is None or self.queued > 0 else _IDLE
        else:
            after = held
        self._stages = [*stages, (last, after)]

    def _hear(self, now: float, printed: float | None) -> None:
        """Note that a batch line came at `now`: after a pause something runs again."""
        if printed is not None and printed != now:
            self._cadence.delivered(now, printed)
        if self._held[0][0] != "serving":
            self._cadence.woke(now)

    def forget(self) -> None:
        """Let go of what was seen: nothing has been heard for too long, or the server started anew."""
        self._stood_since, self.seen_at = self.seen_at, None
        self._stages, self._planned = [], True
        self._held, self._holds_until = _STUCK if self._works_unmoved else _NOTHING, -inf

    def reset(self) -> None:
        """Start again with a new server: its gauges are gone and its counters begin again."""
        self._works_unmoved = False
        self._observed_before = self.totals.counts["observations"]
        self.forget()
        self._clear_gauges()
        self.admission = AdmissionRate()
        self._cadence = Cadence()
        self._samples = DecodeSamples()
        # Whether the new one counts its decode batches must be told anew; until then its log does.
        self.passes_told = False
        self._passes_logged.clear()

    def counters_began_again(self) -> None:
        """Count the server's own counters from 0: one may have passed what it was before the restart."""
        if self._native is not None:
            self._native = RankFigures(self.dp)

    def count_retracted(self, *, by_log: bool) -> None:
        """Add the requests retracted since the last call, as the log or the server's own counter tells them.

        Never both: when one takes over from the other the total goes on without a jump.
        """
        counts = self.totals.counts
        retracted = (counts["log_retracted_requests"], counts["native_retracted_requests"])
        if retracted == self._retracted:
            return
        (logged, native), self._retracted = self._retracted, retracted
        by_log = by_log or not self.native_retractions_told
        counts["retracted_requests"] += self._retracted[0] - logged if by_log else self._retracted[1] - native

    def saved(self) -> dict[str, float]:
        """Give the counters that only the log tells, and that it would tell twice if they were forgotten."""
        names = ["retraction_events", "log_retracted_requests", "retracted_requests"]
        if not self.passes_told:
            names += ["replayed", "eager"]
        return {name: self.totals.counts[name] for name in names}

    def restore(self, counts: Mapping[str, float]) -> None:
        """Put back what `saved` gave to an earlier process; none of it is recent."""
        for name in ("retraction_events", "log_retracted_requests", "replayed", "eager"):
            self.totals.counts[name] += counts.get(name, 0)
        logged = counts.get("log_retracted_requests", 0)
        self.totals.counts["retracted_requests"] += counts.get("retracted_requests", logged)
        self._retracted = (self._retracted[0] + logged, self._retracted[1])
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
        self._cadence.ended(0.0, None)
        self._told_at = None

    def _see(self, now: float, *, serving: bool) -> None:
        self.seen_at = self._told_at = now
        # A quick line of a log looks no further; what holds longer is laid out when somebody looks later.
        self._holds_until = now + LEAST_SECONDS if serving and not self._cadence.full else -inf
        self._planned = False
        self._works_unmoved = False
        usage = self.usage
        states = ALL_IDLE
        if serving:
            self.totals.counts["observations"] += 1
            states = self._serving(now, prefill_full=self._cadence.full)
        else:
            self._rest()
        self._held = (states, self.queued, usage, self.running)

    def _rest(self) -> None:
        """Nothing runs or waits: other queues and prompts that waited are gone with it."""
        self.beside.idle()
        self._fullest = ("", 0.0)
        self.pending_tokens = None if self.pending_tokens is None else 0.0

    def _serving(self, now: float, *, prefill_full: bool) -> States:
        running = None if self.running is None else self.running + self._joined
        states = self._classifier().serving(
            running,
            self.queued,
            self.usage,
            self.graph,
            prefill_full,
            self.queue_wait_seconds,
            now,
            self.beside.elsewhere(self.usages, self._facts),
            self.next_fits,
        )
        if len(self.usages) > 1:
            self._weigh_pools(states[3] == "hybrid_pool_full", now)
        return states

    def _weigh_pools(self, limits: bool, now: float) -> None:
        """Count the seconds in which requests waited for a pool beside the main one, by pool: one of two is advised on."""
        pool, since = self._fullest
        if pool:
            self.totals.counts[f"{pool}_pool_seconds"] += min(max(now - since, 0.0), HOLD_SECONDS)
        self._fullest = (max(self.usages, key=self.usages.__getitem__) if limits else "", now)

    def next_fits(self, running: float, usage: float, target: float) -> bool | None:
        """Say whether one more request like those that wait or run would leave the KV cache below `target`.

        Small requests fill it smoothly, and usage alone decides. A large one needs its prompt, in whole pages and one more to
        decode into; where requests hardly share prefixes also what the mean running request has. None where nothing is known.
        """
        facts, counts = self._facts, self.totals.counts
        pool = facts.kv_pool_tokens.get(self.dp) or max(facts.kv_pool_tokens.values(), default=None)
        computed, cached = counts["computed_tokens"], counts["cached_tokens"]
        shared = cached / (cached + computed) if cached else 0.0
        need = None if running <= 0 or shared > SHARED_PREFIXES else usage / (running * facts.micro_batches)
        waiting = self.pending_tokens
        if waiting and self._pending_for:
            prompt = (1.0 - shared) * waiting / self._pending_for
        else:
            prompt = computed / counts["new_sequences"] if counts["new_sequences"] else 0.0
        if pool and prompt:
            page = max(facts.arg("page_size") or 1.0, 1.0)
            need = max(need or 0.0, page * (ceil(prompt / page) + 1) / pool)
        if need is None:
            return None
        return need < COARSE or usage + need <= target

    def _classifier(self) -> Classifier:
        """Give the thresholds in force; what the facts say changes at a start and hardly ever else."""
        facts, known = self._facts, self._classified_by
        if known is None or known[0] is not facts or known[1] != facts.revision:
            self._classified_by = (facts, facts.revision)
            self._most = facts.prefill_batch_tokens
            chunk = facts.arg("chunked_prefill_size")
            self._cadence.chunk = chunk if chunk is not None and chunk > 0 else None
            self._interval = int(facts.decode_log_interval)
            drafted = facts.arg("speculative_num_draft_tokens") or DRAFTED_TOKENS
            self._cadence.interval = self._interval * (drafted if facts.args.get("speculative_algorithm") else 1.0)
            self._thresholds = Classifier(
                self._profile.for_edition(first=facts.is_first_edition),
                facts.running_limit(self.dp),
                facts.largest_captured,
                facts.without_graph,
                facts.waits_by,
            )
        return self._thresholds

    def _set_graph(self, graph: bool, device: str | None) -> None:
        self.graph = graph
        if self._facts.graph_device != device:
            self._facts.graph_device = device
            self._facts.revision += 1

    def _blame_graph(self, now: float, running: float, *, since_scrape: bool = False) -> None:
        """Say nothing of steps without a graph where another rank of DP attention can be the cause.

        A decode line speaks of one step after the line before, a scrape of all steps since the scrape before.
        """
        assert self._others is not None
        before = self._others.decoded(self.dp, running, now)
        if self.graph is False and running <= (self._facts.largest_captured or UNTOLD_CAPTURED):
            since = self._scraped_at if since_scrape else before
            if self._others.explain_eager(self.dp, self._facts, now, since):
                self.graph = None

    def _set_usages(self, full: float | None, swa: float | None, mamba: float | None) -> None:
        for pool, usage in (("full", full), ("swa", swa), ("mamba", mamba)):
            if usage is not None:
                self.usages[pool] = usage

    def see_decode(self, line: DecodeBatch, now: float) -> None:
        """Take a decode line."""
        self.advance(now)
        self._hear(now, line.time)
        self._cadence.decoded(now, 1, line)
        self._told_by_log = True
        self._pool_lines = [(line, now)]
        self._samples.see(line, now)
        self.running = line.running if line.running is not None else self.running
        self.queued = line.queued if line.queued is not None else self.queued
        self._count_waiting(now)
        self._set_usages(line.full_usage, line.swa_usage, line.mamba_usage)
        self.generation_throughput = line.generation_throughput
        self.beside.see_queues(line.queues)
        self.beside.decoded(1, self._facts)
        self._joined = 0.0
        self._cadence.ended(0.0, None)
        self._classifier()
        if line.graph is not None:
            self._set_graph(line.graph, line.graph_device)
            if self._others is not None:
                self._blame_graph(now, self.running or 0.0)
            if not self.passes_told:
                kind = "replayed" if line.graph else "eager"
                self.totals.counts[kind] += self._interval
                self._passes_logged[kind] += self._interval
        self.totals.counts["decoded"] += line.running or 0
        self._see(now, serving=True)

    def see_prefill(self, line: PrefillBatch, now: float) -> None:
        """Take a prefill line. A health probe's prefill is not load: a probed idle server is idle."""
        self.advance(now)
        self._hear(now, line.time)
        self._told_by_log = True
        self._keep_prefill(line, now)
        self._samples.see(line, now)
        self.running = line.running if line.running is not None else self.running
        self.queued = line.queued if line.queued is not None else self.queued
        self._set_usages(line.full_usage, line.swa_usage, line.mamba_usage)
        if line.cached_tokens is not None:
            self.prompts_told = True
            self.totals.counts["cached_tokens"] += line.cached_tokens
            self.totals.counts["computed_tokens"] += line.new_tokens or 0
        self.beside.see_queues(line.queues)
        if line.pending_tokens is not None:
            self.pending_tokens, self._pending_at = line.pending_tokens, now
        self._count_waiting(now)
        self._joined = line.new_sequences or 0
        self._classifier()
        tokens = float(line.new_tokens or 0)
        if self._others is not None:
            self._others.prefilled(self.dp, now)
        self._prefilled(now, now if line.time is None else line.time, tokens, self._joined, 1)
        self._ends(tokens, self.running or 0.0)
        self.totals.counts["joined"] += line.new_sequences or 0
        self._see(now, serving=not line.is_health_probe)

    def _count_waiting(self, now: float) -> None:
        """Remember how many requests the tokens are of that wait: as many as waited at the end of that moment."""
        if now == self._pending_at and self.queued is not None:
            self._pending_for = self.queued

    def _ends(self, tokens: float, running: float) -> bool:
        """Say whether the last line is a full prefill batch; a mixed one has a token of each running request in it.

        Where it has all the requests that one may start, only the last page may be empty of one that tokens have ended.
        """
        args = self._facts.args
        mixed = running if tokens and args.get("enable_mixed_chunk") else 0.0
        requests = args.get("prefill_max_requests") if tokens else None
        if isinstance(requests, int) and 0 < requests <= self._joined:
            page = self._facts.arg("page_size") or 1.0
            if tokens + mixed <= (self._most or inf) - page:
                tokens = mixed = 0.0
        return self._cadence.ended(tokens + mixed, self._most)

    def _prefilled(self, now: float, printed: float, tokens: float, sequences: float, lines: int) -> None:
        """Count the requests that prefill lines started."""
        started = self._cadence.prefilled(now, printed, tokens, sequences, lines)
        self.totals.counts["new_sequences"] += started
        if not self._admitted_told:
            self.admission.add(now, started)

    def see_runs(  # noqa: C901, PLR0912, PLR0915 - one loop, written out, not called: once for every second of a log
        self, run: BatchRun, rest: Iterator[Event | BatchRun], now: float | None
    ) -> Event | BatchRun | None:
        """Take `run` and those that follow it in `rest`; give the first event that is no run of this scheduler.

        All at `now`, or each at its printed time. No time passes between the lines of a run: all count, and the last of
        them says what holds. Does what `see_decode` and `see_prefill` do, line by line, in one go.
        """
        totals, window, facts, of_rank = self.totals, self.window, self._facts, run.rank
        counts, add_seconds = totals.counts, totals.pending.append
        classifier = self._classifier()
        event: Event | BatchRun | None = run
        while isinstance(event, BatchRun):
            (
                time, rank, running, queued, usage, joined, new_tokens, decodes, prefills, sequences, computed, cached,
                pending, device, graph, _, _,
            ) = event  # fmt: skip
            if rank is not of_rank:
                break
            printed = time
            if now is not None:
                time = now
            seconds = time - self._integrated_to
            if seconds < 0 or time > self._holds_until or time >= window.due:
                self.advance(time)
            elif seconds:
                self._integrated_to = time
                self.served_seconds += seconds
                add_seconds((seconds, self._held))
            if now is not None or self._held[0][0] != "serving":
                self._hear(time, printed)
            if prefills:
                if pending:
                    self._pending_in, self._pending_at = pending, time
                self._prefilled(time, printed, computed, sequences, prefills)
                if self._others is not None:
                    self._others.prefilled(self.dp, time)
            if decodes:
                self._cadence.decoded(time, decodes, event)
                if self.beside.matters:
                    self.beside.decoded(decodes, facts)
                self._pool_lines = [(event, time)]
                self._throughput_in = event
                if graph is not None:
                    self.graph = graph
                    if facts.graph_device != device:
                        self._set_graph(graph, device)
                        classifier = self._classifier()
                    if self._others is not None:
                        self._blame_graph(time, running)
                    if not self.passes_told:
                        kind = "replayed" if graph else "eager"
                        counts[kind] += decodes * self._interval
                        self._passes_logged[kind] += decodes * self._interval
            else:
                self._keep_prefill(event, time)
            self._samples.see(event, time)
            counts["observations"] += decodes + prefills
            counts["decoded"] += decodes * running
            counts["joined"] += sequences
            self.running, self.queued, self._joined = running, queued, joined
            if time == self._pending_at:
                self._pending_for = queued
            usages = self.usages
            usages["full"] = usage
            if len(usages) > 1:
                usage = max(usages.values())
            full = self._ends(new_tokens, running) if new_tokens or self._cadence.full else False
            if prefills:
                counts["cached_tokens"] += cached
                counts["computed_tokens"] += computed
                self.prompts_told = True
            self.seen_at = self._told_at = time
            self._holds_until = -inf if full else time + LEAST_SECONDS
            self._planned = False
            self._told_by_log = True
            self._works_unmoved = False
            if self.beside.matters or len(usages) > 1:
                states = self._serving(time, prefill_full=full)
            elif queued:
                states = classifier.serving(
                    running + joined,
                    queued,
                    usage,
                    self.graph,
                    full,
                    self.queue_wait_seconds,
                    time,
                    NO_OTHER_WAITS,
                    self.next_fits,
                )
            else:
                states = classifier.unqueued(running + joined, usage, self.graph)
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

        A gauge is refreshed only by a batch line's printing or by idling (`log_decode_stats`, `self_check_during_idle`), so figures equal to the last ones
        are the old observation, not a new one; only zeros are believed again and again. Work that stays as it is while
        nothing of the whole server moves (it `stands`) is a hang; releases that tell the grammar queue (0.4.6 on) would
        set the gauges of an idle server to zero.
        """
        old = self._native or base
        moved = None if progress is None or self._progress is None else progress - self._progress
        queues = sum(new.queues.values()) + (new.grammar_queued or 0)
        serving = bool(new.running or new.queued or queues)
        worked = _passes(old, new) >= DECODE_PROGRESS or (moved is not None and moved >= PREFILL_PROGRESS)
        if not serving and worked and now - self._cadence.heard_at > HOLD_SECONDS:
            self._was_busy(now)
        self.advance(now)
        self._count(old, new, now)
        self._scraped_at = now
        self._native, self._progress = new, progress
        if new.running is None and new.queued is None:
            return
        fresh = old is None or bool(moved) or _evidence(old) != _evidence(new)
        if not serving and self._log_speaks(now):
            return  # a prefill, which the gauges do not show
        if serving and not fresh:
            if self._told_at is not None:
                self._told_at = now
                # Requests that wait for a grammar or for the other half of a pair keep no scheduler busy.
                self._works_unmoved = stands and new.grammar_queued is not None and bool(new.running or new.queued)
                if self.seen_at is None:
                    self._held = _STUCK if self._works_unmoved else _NOTHING
            return
        self.running, self.queued = new.running, new.queued
        self._set_usages(new.full_usage, new.swa_usage, new.mamba_usage)
        self.generation_throughput = new.generation_throughput
        if new.new_token_ratio is not None:
            self.new_token_ratio = new.new_token_ratio
        self.beside.see_figures(new)
        self._joined = 0.0
        self._cadence.ended(0.0, None)
        self._told_by_log = False
        self._see(now, serving=serving)
        if serving and new.new_token_ratio is not None:
            self._count_ratio(new.new_token_ratio)

    def _count_ratio(self, ratio: float) -> None:
        """Add up the new-token ratio over the scrapes under load, and over those at which requests were held back."""
        counts = self.totals.counts
        for name in (
            ("new_token_ratio", "held_back_new_token_ratio") if self._held[0][3] == HELD_BACK else ("new_token_ratio",)
        ):
            counts[name] += ratio
            counts[f"{name}_told"] += 1

    def _was_busy(self, now: float) -> None:
        """Count the time since the last scrape as serving where only the counters say so: both found nothing to do."""
        self.advance(max(self._integrated_to, now - HOLD_SECONDS))
        if self._held[0][0] == "serving":
            return
        states = self._classifier().serving(0.0, 0.0, None, self.graph, False, self.queue_wait_seconds, now)
        self._stages, self._planned, self._holds_until = [(now, (states, 0.0, None, None))], True, -inf
        self.totals.counts["observations"] += 1

    def _log_speaks(self, now: float) -> bool:
        """Whether the last thing that was heard is a prefill line, and the next line is not overdue yet."""
        heard = self._told_by_log and self._joined > 0 and self._held[0][0] == "serving"
        return heard and self.seen_at is not None and now < self.seen_at + self._cadence.hold_seconds()

    def _count(self, old: RankFigures | None, new: RankFigures, now: float) -> None:
        """Add what the server's own counters gained since the last scrape. The first one only gives the base."""
        passes_told_now = not self.passes_told and (new.graph_passes is not None or new.eager_passes is not None)
        self.passes_told = self.passes_told or passes_told_now
        self._admitted_told = self._admitted_told or new.admitted_requests is not None
        self.native_retractions_told = self.native_retractions_told or new.retracted_requests is not None
        if old is None:
            if self._admitted_told:
                self.admission.add(now, 0)
            return
        replayed = gained(old.graph_passes, new.graph_passes)
        eager = gained(old.eager_passes, new.eager_passes)
        # What the server counted from its first batch on holds the batches that were counted from the log until now.
        logged = self._passes_logged if passes_told_now else Counter[str]()
        self.totals.counts["replayed"] += max(int(replayed) - logged["replayed"], 0)
        self.totals.counts["eager"] += max(int(eager) - logged["eager"], 0)
        if replayed or eager:
            self.graph = replayed >= eager
            if self._others is not None:
                self._blame_graph(now, new.running or 0.0, since_scrape=True)
        self.totals.counts["native_retracted_requests"] += int(gained(old.retracted_requests, new.retracted_requests))
        if self._admitted_told:
            self.admission.add(now, gained(old.admitted_requests, new.admitted_requests))


def _passes(old: RankFigures | None, new: RankFigures) -> float:
    """Count the decode batches between two scrapes."""
    if old is None:
        return 0.0
    return gained(old.graph_passes, new.graph_passes) + gained(old.eager_passes, new.eager_passes)


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
