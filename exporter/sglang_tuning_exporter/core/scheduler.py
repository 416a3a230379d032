"""One scheduler over time: what it does by its batch lines and pages. Pure; times are unix seconds.

A line says what holds until the next one. All lines of one time are one moment, because printed times are whole
seconds: its prefill batches take the time that their tokens need, the rest is decoding. Where the next line is
overdue, the scheduler is idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil, inf
from typing import NamedTuple

from sglang_tuning_exporter.config.profiles import Profile
from sglang_tuning_exporter.core.account import ALL_IDLE, ALL_UNKNOWN, NO_LOAD, Account, Load, Moment
from sglang_tuning_exporter.core.counters import RankGains
from sglang_tuning_exporter.core.events import Event, Rank
from sglang_tuning_exporter.core.facts import Facts, Settings
from sglang_tuning_exporter.core.pace import ChunkSize, Pace
from sglang_tuning_exporter.core.progress import Hang
from sglang_tuning_exporter.core.reasons import EARLY, STUCK_SECONDS, Sample, reason
from sglang_tuning_exporter.core.shown import Shown, Starts
from sglang_tuning_exporter.core.sums import UNKNOWN, Totals
from sglang_tuning_exporter.sglang.metrics import RankFigures

USUAL_MOMENTS = 10  # with lines, between two silences that may be hangs
FULL_PREFILL = 0.9  # of the most tokens that a prefill batch may have
# The largest captured batch, where the start is not known: the smallest default on large GPUs.
ASSUMED_CAPTURED = 160.0
USUAL_CAPTURED = "160 to 256 (8 to 80 on a small GPU)"
# After a request does not fit, SGLang tries the next one only when a running one has ended (batch_is_full,
# srt/managers/scheduler.py).
BESIDE = 2.0
# Tokens that SGLang reserves for one request, at most (CLIP_MAX_NEW_TOKENS, srt/managers/schedule_policy.py).
MOST_RESERVED = 4096.0
COARSE = 0.05  # of the pool: smaller requests fill it smoothly, and usage alone says whether it is full
SHARED_PREFIXES = 0.2
LOGGED_SECONDS = 60.0  # since the last batch line: what the log counts is not taken from the counters
SHORT_WAIT_SECONDS = 1.0  # of a queue that only scrapes show
SHOWN_SECONDS = 60.0  # that a scrape's gauges hold at most
# Decode steps, prompt tokens between two scrapes of an idle scheduler: less are health checks.
LEAST_STEPS, LEAST_COMPUTED = 40.0, 1024.0
MANY_ELSEWHERE = 0.25  # of the running requests: fewer are always on their way between the two sides
PREFILLED_SECONDS = 2.0  # in which the prefill of another DP rank is why a step ran without a graph


class Silence(NamedTuple):
    """A time without a line, longer than a moment lasts, that began with requests running."""

    hang: Hang
    is_hang: bool  # the same requests run after it


class Scheduler:
    """One DP rank, or the whole server without."""

    def __init__(
        self,
        dp: int | None,
        *,
        facts: Facts,
        profile: Profile,
        account: Account,
        peers: Mapping[int | None, Scheduler],
    ) -> None:
        self.dp = dp
        self.profile, self.facts = profile, facts
        self._peers = peers  # those of the same start, this one among them
        self._account, self.shown = account, Shown()
        self.pace, self._starts, self._chunk_size = Pace(), Starts(), ChunkSize()
        self.speaker: Rank | None = None  # of the ranks that print the same batch, the one that counts
        self._printed: tuple[str, Mapping[str, float]] = ("", {})  # the last batch line
        # The moment
        self.at: float | None = None
        self.spent = -inf  # up to when time is counted
        self._tokens = self._joined = 0.0  # of its prefill batches
        self._is_full = False  # its last prefill batch
        self._continues = False  # the last prompt continues in the next batch
        self._decoded = False  # its last line is of decoding
        self._is_early = False  # requests wait, and too few have ended to show why
        self._waits_elsewhere = False  # most requests wait for the other side of a pair
        # Since the last decode line
        self._woke = True  # the scheduler was idle, or nothing is known
        self._was_empty = False  # a prompt came to an empty batch
        # Lines and pages
        self.logged_at = -inf  # the last batch line
        self._shown_at = -inf  # a scrape last showed that something had changed
        self._scraped_at = -inf
        self._moments = 0  # since the last long silence
        self._computing: float | None = None  # seconds of prefill between two scrapes
        # Requests of a prefill batch, on average: a gauge of that moment does not count them as running.
        self._joining = 0.0

    @property
    def _settings(self) -> Settings:
        return self.facts.settings(self.dp)

    # A line

    def repeats(self, event: Event) -> bool:
        """Whether a batch line is of another rank than the lowest.

        Every pipeline stage, and some tensor-parallel ranks, print every batch.
        """
        rank, known = event.rank, self.speaker
        if rank.tp is None and rank.pp is None:
            return False
        if known is not None and _place(rank) >= _place(known):
            return _place(rank) > _place(known)
        self.speaker = rank
        return known is not None and (event.kind, event.figures) == self._printed  # a higher rank printed it first

    def take_batch(self, event: Event, now: float) -> Silence | None:
        """Take a batch line; return the silence before it, if that was too long."""
        figures, shown, silence, is_first = event.figures, self.shown, None, now != self.at
        if is_first:
            silence = self._begin_moment(now, event)
            self._computing = None
        self._account.open(now)
        self.logged_at = now
        ran = shown.running
        shown.take_line(figures)
        self._starts.take_batch(ran, shown.running, shown.queued, now)
        if event.kind == "decode":
            if is_first:
                self._add_step(figures, now)
            self._take_decode(event, now)
        else:
            self._take_prefill(event, now)
        self._printed = (event.kind, figures)
        running = (shown.running or 0.0) + self._joined
        self._account.count_line(running, shown.queued, shown.usage)
        self._starts.note_running(running)
        return silence

    def _add_step(self, figures: Mapping[str, float], now: float) -> None:
        """Add the time of a step that a decode line shows, unless it paused, or waited for another rank's prefill."""
        kind, before = self._printed
        if kind != "decode" or self._woke or not self.pace.is_step_due(now):
            return
        since, settings = self.pace.decoded_at or now, self._settings
        if settings.attention_ranks > 1 and self._prefilled_elsewhere(since):
            return
        self.pace.add_step(now, figures, before, speculates=settings.speculates)

    def _take_decode(self, event: Event, now: float) -> None:
        figures, settings, shown, pace = event.figures, self._settings, self.shown, self.pace
        running, throughput, accepted = shown.running or 0.0, figures.get("throughput"), figures.get("accept_length")
        steps = settings.steps_between_lines
        tokens = steps * max(accepted or 1.0, 1.0) * running  # generated since the line before
        if throughput is not None:
            shown.throughput = throughput
        # The throughput is over the time since the line before, pauses included.
        # Where no prompt came to an empty batch since the decode line before, it decoded on.
        paused = self._woke and (settings.role == "decode" or pace.decoded_at is None or self._was_empty)
        pace.take_decode(now, tokens / throughput if throughput and running else None, paused=paused)
        self._decoded, self._woke, self._joined, self._was_empty = True, False, 0.0, False
        shown.take_pool(figures)
        self._account.count_decode(steps, tokens, accepted)
        if "graph" in figures:
            self._take_graph(event, steps, now)

    def _take_graph(self, event: Event, steps: float, now: float) -> None:
        """Take whether a decode batch replayed a CUDA graph; unknown where another rank decided that."""
        is_replayed, running = bool(event.figures["graph"]), self.shown.running or 0.0
        self.facts.take_graph_device("" if is_replayed else event.word or self.facts.graph_device)
        self._account.count_graph(steps, running, is_replayed=is_replayed)
        self.shown.graph = None if not is_replayed and self._another_decides(running, now) else is_replayed

    def _take_prefill(self, event: Event, now: float) -> None:
        figures, shown, pace = event.figures, self.shown, self.pace
        get = figures.get
        tokens, sequences, cached = get("tokens", 0.0), get("sequences", 0.0), get("cached", 0.0)
        if tokens <= 1 and not (shown.running or shown.queued or cached):
            self._account.count_probe()
            shown.note_empty()  # a health probe is no load
            self._tokens = self._joined = 0.0
            return
        started = max(sequences - self._continues, 0.0)
        self._take_size(tokens, sequences)
        self._tokens += tokens
        self._decoded = False
        self._was_empty = self._was_empty or not shown.running
        self._joined = sequences  # which the next line's running requests have, but for a prompt that goes on
        pace.take_prefill(now, int(now if event.time is None else event.time), tokens)
        if started:
            self._starts.note_start(started, now)
        self._account.count_prompts(tokens, cached, sequences, started=started, is_full=self._is_full, rate=pace.rate)
        if "pending" in figures:
            shown.pending = (figures["pending"], figures.get("queued", 0.0))

    def _take_size(self, tokens: float, sequences: float) -> None:
        """Take whether a prefill batch was full, and whether its last prompt continues in the next one."""
        settings = self._settings
        most = settings.prefill_tokens
        if most is None:
            most = self._take_chunk(tokens)
        counted = tokens + (self.shown.running or 0.0) if settings.mixes_chunks else tokens
        if most is None or counted < FULL_PREFILL * most or (sequences >= settings.prefill_requests and counted < most):
            self._is_full = self._continues = False
            return
        self._is_full = True
        self._continues = counted >= FULL_PREFILL * settings.chunk if settings.chunk else settings.chunks_prompts

    def _take_chunk(self, tokens: float) -> float | None:
        """Take the size of a prefill batch where the start is not known; return the most that one may have."""
        size, (kind, before) = self._chunk_size, self._printed
        size.take_batch(tokens, self.shown.running or 0.0, before if kind == "prefill" else None)
        self._account.note_sizes(size.largest, size.seen)
        return size.most

    def take_retraction(self, event: Event, now: float) -> None:
        """Take a retraction of this scheduler; one that waited brings the usage of its moment."""
        self.advance(now)
        usage, ratio = event.figures.get("usage", self.shown.usage), event.figures.get("ratio_after")
        if usage is not None:
            self._account.note_retraction(now, usage)
        if ratio is not None:
            self.shown.take_retraction(ratio, now if event.time is None else event.time)

    # Other schedulers of the server

    def _another_decides(self, running: float, now: float) -> bool:
        """Whether a step ran without a graph because another rank of DP attention prefilled, or has a larger batch."""
        settings = self._settings
        if self.dp is None or (self.facts.knows_arguments and settings.attention_ranks < 2):
            return False
        largest = settings.largest_captured or ASSUMED_CAPTURED
        others = max((peer.shown.running or 0.0 for peer in self._peers.values() if peer.dp != self.dp), default=0.0)
        return self._prefilled_elsewhere(now - PREFILLED_SECONDS) or running <= largest < others

    def _prefilled_elsewhere(self, since: float) -> bool:
        """Whether another rank has prefilled since: with DP attention all ranks wait for it."""
        return any(peer.dp != self.dp and peer.pace.prefilled_at >= since for peer in self._peers.values())

    # A page

    def take_page(self, gains: RankGains, counted: Iterable[str], now: float) -> None:
        """Take what a page shows. Its gauges hold until the next line or scrape; lines of the log say more.

        SGLang refreshes a gauge when it prints a batch line, and when it is idle: unchanged figures are the old
        observation. `counted`: what the page counts of this scheduler; the log is not needed for it from then on.
        """
        figures, logged = gains.figures, now - self.logged_at <= LOGGED_SECONDS
        interval = now - self._scraped_at if self._scraped_at > -inf else 0.0
        self._account.count_gains(gains.gained, counted, now, logged=logged)
        if not logged:
            self._take_gains(gains, interval, now)
        serving = bool(figures.running or figures.queued or figures.grammar_queued or any(figures.queues.values()))
        lines_hold = logged and self.at is not None and now < self.at + self.hold_seconds
        if lines_hold and serving:
            self._take_beside_lines(figures, now)
        elif not (lines_hold and self._tokens):  # a prefill, which the gauges do not show
            self._take_gauges(gains, interval, now, serving=serving, logged=logged)

    def _take_beside_lines(self, figures: RankFigures, now: float) -> None:
        """Take what lines do not show."""
        self._shown_at = self._scraped_at = now
        if self.shown.throughput is None:
            self.shown.throughput = figures.generation_throughput
        self.shown.take_queues(figures)

    def _take_gauges(self, gains: RankGains, interval: float, now: float, *, serving: bool, logged: bool) -> None:
        """Begin a moment with the gauges of a page, after the time up to it is counted."""
        figures, shown = gains.figures, self.shown
        was_idle = not shown.serves
        self.advance(now)
        if was_idle and not logged and interval:
            self._count_between(gains, interval, now, serving=serving)
        shown.take_queues(figures)
        self._scraped_at = now
        if figures.running is None and figures.queued is None:
            if shown.is_of_page:
                self.rest()
            return
        shown.take_page(figures)
        if gains.is_fresh or not serving:
            self._shown_at = now
        self.at, self.spent = now, max(now, self.spent)
        self._tokens = self._joined = 0.0
        if logged:
            self._is_full, self._computing = False, 0.0
        if serving:
            self._count_shown(gains, now, logged=logged)

    def _count_shown(self, gains: RankGains, now: float, *, logged: bool) -> None:
        """Count the load of a page as that of a batch line, unless its counters stand for one."""
        shown, accepted = self.shown, gains.figures.accept_length
        if not logged and accepted and gains.is_fresh:
            self._account.note_accepted(now, accepted)
        running, lines = shown.running or 0.0, max(1.0 - gains.lines, 0.0)
        self._account.count_shown(now, lines, running, shown.queued or 0.0, shown.usage or 0.0)
        self._starts.note_running(running)

    def _take_gains(self, gains: RankGains, interval: float, now: float) -> None:
        """Take what the counters gained since the scrape before, where no line is logged."""
        gained, settings = gains.gained, self._settings
        passes, admitted = gained.get("prefill_passes", 0.0), gained.get("admitted_requests", 0.0)
        tokens, most = gained.get("computed_tokens", 0.0), settings.prefill_tokens
        self._account.count_unlogged(gains, settings.steps_between_lines, now)
        self._starts.are_counted = self._starts.are_counted or "admitted_requests" in gained
        if admitted:
            self._starts.note_start(admitted, now)
        if not gains.is_fresh:
            return  # nothing has changed: what the scrape before showed holds
        self._is_full = bool(most and tokens >= FULL_PREFILL * most * max(passes, 1.0))
        self._account.count_full(now, passes if self._is_full else 0.0)
        self._joining = admitted / passes if passes else 0.0
        self._computing = _prefill_seconds(interval, gains.steps, passes, tokens)
        if gains.steps or passes:
            self.shown.graph = self._graph_between(gains)
        if interval and tokens:
            self.pace.take_page(tokens / interval)
            self._account.note_peak(now, self.pace.rate)

    def _graph_between(self, gains: RankGains) -> bool | None:
        """Return whether most decode steps between two scrapes replayed a CUDA graph; None where that is not known."""
        # A server whose arguments are not known, and that never replayed a graph, may have no GPU.
        is_known = bool(self.facts.arguments) or bool(gains.figures.replayed_batches)
        eager, replayed = gains.gained.get("eager_batches", 0.0), gains.gained.get("replayed_batches", 0.0)
        return eager <= replayed if gains.steps and is_known else None

    def _count_between(self, gains: RankGains, interval: float, now: float, *, serving: bool) -> None:
        """Count the time since an idle scrape as serving where the counters show work and the present scrape none.

        Requests that wait now came on average in the middle of that time.
        """
        if serving:
            self._account.count_waited(now, gains.figures.queued or 0.0, min(interval, SHOWN_SECONDS) / 2)
            return
        steps, decoded = gains.steps, gains.gained.get("decoded_tokens", 0.0)
        if steps < LEAST_STEPS and gains.gained.get("computed_tokens", 0.0) < LEAST_COMPUTED:
            return
        self.spent = max(now - min(interval, SHOWN_SECONDS), self.spent - interval)
        self.shown.running, self.shown.queued = decoded / steps if steps and decoded else 0.0, 0.0
        self._spend(now, Moment("empty", UNKNOWN, "no_queue", self._graphs(self._settings)))

    def stop(self, now: float, *, rest: bool) -> None:
        """End the moment; `rest`: its figures are over, too."""
        self.advance(now)
        self.at = None
        if rest:
            self.rest()

    def rest(self) -> None:
        """Forget the present figures: nothing answers any more."""
        self.at = None
        self.shown.forget()

    # Time

    def _begin_moment(self, now: float, event: Event) -> Silence | None:
        """Begin a moment with its first line; return the silence before it, if that was too long."""
        self.advance(now)
        silence, runs = None, event.figures.get("running")
        if self.at is not None and runs is not None:
            silence = self._silence_since(self.at, now, runs, event)
        self.at, self.spent = now, max(now, self.spent)
        self._tokens = self._joined = 0.0
        self._is_full = self._decoded = False
        return silence

    def _silence_since(self, begin: float, now: float, runs: float, event: Event) -> Silence | None:
        """Return the silence before a line. A log that is silent again and again shows its rhythm, no hang."""
        ran, moments = (self.shown.running or 0.0) + self._joined, self._moments
        self._moments += 1
        if now - begin <= STUCK_SECONDS or now - begin <= self.hold_seconds:
            return None
        self._moments = 0
        if moments < USUAL_MOMENTS or ran < 1:
            return None
        return Silence(Hang(begin, now - begin, ran, runs), is_hang=runs >= ran / 2 and self._are_the_same(event))

    def _are_the_same(self, event: Event) -> bool:
        """Whether a batch line can be about the requests of the line before it.

        A prefill line shows who joins. The decode server of a pair prints none: there as many requests must hold the
        tokens of before, and at most those of one line's steps more.
        """
        settings, figures, before = self._settings, event.figures, self._printed[1]
        if event.kind == "prefill" or not (settings.role == "decode" or "prealloc" in figures):
            return True
        grown = figures.get("tokens", 0.0) - before.get("tokens", inf)
        steps = settings.steps_between_lines * max(figures.get("accept_length", 1.0), 1.0)
        most = (steps + settings.page_size) * figures.get("running", 0.0)
        return figures.get("running") == before.get("running") and 0 <= grown <= most

    @property
    def hold_seconds(self) -> float:
        """How long the last moment is valid."""
        return self.pace.hold_seconds(self._tokens, self._settings.steps_between_lines)

    def advance(self, now: float) -> None:
        """Count the time up to `now`."""
        while self.at is not None and self.spent < now:
            moment, until, prefilling = self._does(self.at, self.spent, now)
            until = min(now, until)
            if prefilling:
                self._account.spend_prefilling(self.spent, until - self.spent)
            self._spend(until, moment)

    def moment(self, now: float) -> Moment:
        """Return what the scheduler does now, as far as the last line or scrape shows it."""
        return ALL_UNKNOWN if self.at is None else self._does(self.at, now, now)[0]

    def _does(self, at: float, time: float, now: float) -> tuple[Moment, float, bool]:
        """Return the moment at a time, until when it lasts, and whether prompts are computed, by what `at` showed."""
        if self._is_idle():
            return ALL_IDLE, inf, False
        computes = self._tokens / self.pace.rate if self._computing is None else self._computing
        if time < (until := at + min(computes, STUCK_SECONDS)):
            return self._states(prefilling=True), until, True
        until = at + self.hold_seconds if self._computing is None else at
        if now - self._scraped_at <= SHOWN_SECONDS:  # scrapes show when it is idle
            until = max(until, self._shown_at + SHOWN_SECONDS)
        if time < until:
            return self._states(prefilling=False), until, False
        shown = self.shown
        waits = shown.queued is None or shown.queued > 0 or any(shown.queues.values()) or self._computing is not None
        return (ALL_UNKNOWN if waits else ALL_IDLE), inf, False

    def _is_idle(self) -> bool:
        shown = self.shown
        if shown.running != 0 or shown.queued or self._joined or shown.grammar_queued:
            return False
        return not any(shown.queues.values())

    def _spend(self, until: float, moment: Moment) -> None:
        """Count the time up to `until` as this moment."""
        load = NO_LOAD
        if moment is ALL_IDLE:
            self._starts.begun, self._woke = 0.0, True
        elif moment is ALL_UNKNOWN:
            self._woke = True
        else:
            load = self._load(moment)
        if self.spent < until:
            begin, self.spent = self.spent, until
            self._account.spend(begin, until, moment, load)

    def _load(self, moment: Moment) -> Load:
        """Return the figures of the moment."""
        shown = self.shown
        usage, usages = shown.usage, shown.usages
        return Load(
            running=self._running,
            waiting=shown.elsewhere if self._waits_elsewhere else shown.queued,
            # Between two scrapes that found nothing to do, the counters show what runs, and not what it holds.
            usage=None if moment.token_usage == UNKNOWN else usage,
            throughput=shown.throughput,
            queued=shown.queued,
            is_early=self._is_early,
            is_elsewhere=self._waits_elsewhere,
            is_mamba="mamba" in usages and usages["mamba"] >= (usage or 0.0),
        )

    # States

    @property
    def _running(self) -> float | None:
        """Requests that run, with those that the moment's last prefill batch added."""
        return None if self.shown.running is None else self.shown.running + self._joined

    def wait(self, recent: Totals) -> float | None:
        """Estimate the mean wait in some time: requests waiting over requests started; None if there were neither."""
        return self._account.wait(recent)

    def coverage(self, recent: Totals) -> float | None:
        """Return the share of the decode batches of some time that replayed a CUDA graph; None without any."""
        return self._account.coverage(recent)

    @property
    def _shows_starts(self) -> bool:
        """Whether prefill lines or pages show which requests start."""
        return self.pace.prefilled_at > -inf or self._starts.are_counted

    def _states(self, *, prefilling: bool) -> Moment:
        shown, settings = self.shown, self._settings
        self._is_early = self._waits_elsewhere = False
        self._starts.note_limit(self._running, settings.limit, self.spent)
        usage, graphs = shown.usage, self._graphs(settings)
        at_target = usage is not None and usage >= self.profile.token_usage_target
        at_usage = UNKNOWN if usage is None else "at_target" if at_target else "below_target"
        if shown.queued or shown.queues or shown.grammar_queued:
            queue, admission = self._waiting(settings, prefilling=prefilling, at_target=at_target)
        elif shown.queued is None:
            queue = admission = UNKNOWN
        else:
            queue, admission = "empty", "no_queue"
        return Moment(queue, at_usage, admission, graphs)

    def _waiting(self, settings: Settings, *, prefilling: bool, at_target: bool) -> tuple[str, str]:
        """Return the states of the queue and of admission; requests may wait in the main queue or elsewhere."""
        shown, queued = self.shown, self.shown.queued
        elsewhere = shown.elsewhere
        slow = self._waits_elsewhere = elsewhere > (queued or 0.0) and self._other_side_is_slow(elsewhere)
        compiles = (shown.grammar_queued or 0.0) > max(queued or 0.0, elsewhere) and not at_target
        wait = self._account.present_wait(self.spent) if queued and self._shows_starts else None
        queue = self._queue(elsewhere if slow else queued, wait)
        if not (queued or slow or compiles):
            return queue, UNKNOWN if queued is None else "no_queue"
        is_full = self._is_full and (prefilling or not self._decoded)
        why = reason(self._sample(settings, wait, for_grammar=compiles, elsewhere=slow, full_batch=is_full))
        self._is_early = why is EARLY
        return queue, why.state

    def _graphs(self, settings: Settings) -> str:
        """Return how its decode batches run."""
        if settings.without_graph or self.shown.graph is not False:
            return settings.without_graph or ("replayed" if self.shown.graph else UNKNOWN)
        is_larger = (self.shown.running or 0.0) > (settings.largest_captured or ASSUMED_CAPTURED)
        return "beyond_captured" if is_larger else "eager"

    def _queue(self, queued: float | None, wait: float | None) -> str:
        """Return the state of the queue, by its length, and by its wait where the profile has an objective for it."""
        profile = self.profile
        if not queued:
            return UNKNOWN if queued is None else "empty"
        if queued > profile.queue_upper:
            return "above_range"
        if profile.queue_wait_seconds is not None:
            if wait is None and self.pace.prefilled_at == -inf and self._computing is None:
                return UNKNOWN  # a log of decode lines alone: the queue is judged by its wait
            if wait is not None and wait > profile.queue_wait_seconds:
                return "above_range"
        return "below_range" if queued < (profile.queue_lower or -inf) else "in_range"

    def _sample(
        self, settings: Settings, wait: float | None, *, for_grammar: bool, elsewhere: bool, full_batch: bool
    ) -> Sample:
        """Return the figures by which one can say why requests wait."""
        shown, starts, running = self.shown, self._starts, self._running
        usage, target = shown.usage, self.profile.token_usage_target
        # A scrape sees a queue that the next batch takes. Where no page counts starts, the queue is taken as it is.
        is_short = starts.are_counted if wait is None else wait < SHORT_WAIT_SECONDS
        # Until as many requests have ended as run, it is not known how much of its reservation one uses.
        is_early = self._shows_starts and starts.begun < 2 * (shown.running or 0.0) * settings.micro_batches
        return Sample(
            running=running,
            joining=0.0 if self._computing is None else self._joining,
            limit=settings.limit,
            at_limit_seconds=starts.at_limit_seconds(self.spent),
            full_batch=full_batch,
            continues=self._continues,
            usage=usage,
            full_usage=shown.usages.get("full", usage or 0.0),
            target=target,
            free=self._free(settings),
            reserved=MOST_RESERVED * ((shown.running or 0.0) + BESIDE),
            fits=running is None or usage is None or self._next_fits(settings, running, usage, target),
            for_grammar=for_grammar,
            elsewhere=elsewhere,
            waits_by=settings.waits_by,
            passes=self._computing is not None and is_short,
            idle_seconds=self.spent - starts.idle_since,
            ended_seconds=starts.ended_seconds,
            early=is_early,
        )

    def _free(self, settings: Settings) -> float:
        """Return the tokens of the KV cache that are free; 0 where its size is not known."""
        pool = settings.pool or self.shown.pool
        return (1.0 - (self.shown.usage or 0.0)) * pool if pool else 0.0

    def _other_side_is_slow(self, elsewhere: float) -> bool:
        """Whether requests wait long for the other side of a pair: some always do, while their KV cache is sent."""
        objective = self.profile.queue_wait_seconds
        rate = self._account.present_rate(self.spent)
        if objective is None or rate is None:
            return elsewhere > MANY_ELSEWHERE * (self._running or 0.0)
        return elsewhere > rate * objective

    def _next_fits(self, settings: Settings, running: float, usage: float, target: float) -> bool:
        """Return whether one more request would leave the KV cache below its target.

        Small requests fill it smoothly: usage alone decides. A large one needs its prompt in whole pages and a page to
        decode into, and, where few prefixes are shared, what the mean running request has.
        """
        totals = self._account.of_start
        pool, computed, cached = settings.pool, totals["computed_tokens"], totals["cached_tokens"]
        admitted, batches = totals["admitted_requests"], running * settings.micro_batches
        shared = cached / (cached + computed) if cached else 0.0
        need = 0.0 if running <= 0 or shared > SHARED_PREFIXES else usage / batches
        answer = totals["decoded_tokens"] / admitted if admitted else 0.0
        mean = computed / max(admitted, 1.0)
        tokens, requests = self.shown.pending or (0.0, 0.0)
        prompt = (1 - shared) * tokens / requests if tokens and requests else mean
        if pool and prompt:
            page = settings.page_size
            need = max(need, page * (ceil(prompt / page) + 1) / pool)
            reserved = page * ceil((max(prompt, mean) + answer) / page)
            is_coarse = settings.reserves_in_full and reserved >= COARSE * pool
            if is_coarse and (batches + BESIDE) * reserved > target * pool:
                return False  # those that run will use what is free
        return need < COARSE or usage + need <= target


def _prefill_seconds(interval: float, steps: float, passes: float, tokens: float) -> float:
    """Return the seconds of prefill between two scrapes: its share of the batches, or all where nothing is decoded."""
    if passes:
        return interval * passes / (passes + steps)
    return interval if tokens and not steps else 0.0


def _place(rank: Rank) -> tuple[int, int]:
    return rank.pp or 0, rank.tp or 0
