"""One scheduler over time: batch lines and pages in, seconds in each state and counts out. Pure; times are unix seconds.

A line says what holds until the next one. All lines of one time are one moment, because printed times are whole seconds: its prefill batches
take the time that their tokens need, the rest is decoding. Where the next line is overdue (`OVERDUE` intervals), the scheduler is idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from math import ceil, inf
from typing import TYPE_CHECKING, NamedTuple

from sglang_tuning_exporter.core.counters import RankGains
from sglang_tuning_exporter.core.events import Event, Rank
from sglang_tuning_exporter.core.progress import Hang
from sglang_tuning_exporter.core.reasons import AT_LIMIT, EARLY, STUCK_SECONDS, Sample, reason
from sglang_tuning_exporter.core.sums import (
    BUCKET_SECONDS,
    IDLE,
    SIGNALS,
    UNKNOWN,
    WAITS,
    Totals,
)
from sglang_tuning_exporter.sglang.metrics import RankFigures

if TYPE_CHECKING:
    from sglang_tuning_exporter.core.server import Server

OVERDUE = 2.5  # intervals between two lines; then nothing is decoded any more
LEAST_HOLD_SECONDS = 2.0  # printed times are whole seconds
MOST_HOLD_SECONDS = 300.0
USUAL_MOMENTS = 10  # with lines, between two silences that may be hangs
MOST_SILENCES = 64  # that are noted
MANY_RUNNING = 8  # a silence that began with so many is worth a note
USUAL_STEP_SECONDS = 0.05  # until the log shows it
USUAL_PREFILL_RATE = 1000.0  # tokens a second, until the log shows it
FULL_PREFILL = 0.9  # of the most tokens that a prefill batch may have
CHUNK_STEP = 64  # sizes of chunks are multiples of it
SAME_CHUNK = 3  # lines with exactly the most tokens show the size of a chunk
ASSUMED_CAPTURED = 160.0  # the largest captured batch, where the start is not known: the smallest default on large GPUs
USUAL_CAPTURED = "160 to 256 (8 to 80 on a small GPU)"
RATE_SECONDS = 60.0  # over which admissions are counted for the wait
LEAST_RATE_SECONDS = 5.0
# After a request does not fit, SGLang tries the next one only when a running one has ended (batch_is_full, srt/managers/scheduler.py).
BESIDE = 2.0
LEAST_USAGE = 0.05  # printed with two decimals: less says too little of the cache's size
MOST_RESERVED = 4096.0  # tokens that SGLang reserves for one request, at most (CLIP_MAX_NEW_TOKENS, srt/managers/schedule_policy.py)
COARSE = 0.05  # of the pool: smaller requests fill it smoothly, and usage alone says whether it is full
SHARED_PREFIXES = 0.2
LOGGED_SECONDS = 60.0  # since the last batch line: what the log counts is not taken from the counters
SHORT_WAIT_SECONDS = 1.0  # of a queue that only scrapes show
SHOWN_SECONDS = 60.0  # that a scrape's gauges hold at most
LEAST_STEPS, LEAST_COMPUTED = (
    40.0,
    1024.0,
)  # decode steps, prompt tokens between two scrapes of an idle scheduler: less are health checks
STEP_SECONDS = 1.0  # between two step times: SGLang prints whole seconds
NEARLY_SAME = 0.1  # of the mean batch, between two decode lines: the mean is off by half as much at most
MANY_ELSEWHERE = 0.25  # of the running requests: fewer are always on their way between the two sides
ELSEWHERE = ("bootstrap", "unbootstrapped", "prealloc", "transfer", "transferring", "inflight", "host_receive")
_ELSEWHERE = frozenset(ELSEWHERE)


class Moment(NamedTuple):
    """What a scheduler does: one word for each of `SIGNALS`."""

    queue: str
    token_usage: str
    admission: str
    cuda_graph: str

    @property
    def activity(self) -> str:
        """Whether it serves: `serving`, `idle` or `unknown`."""
        return IDLE if self == _ALL_IDLE else UNKNOWN if self == _ALL_UNKNOWN else "serving"


_ALL_IDLE = Moment(IDLE, IDLE, IDLE, IDLE)
_ALL_UNKNOWN = Moment(UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)


class Scheduler:
    """One DP rank, or the whole server without."""

    def __init__(self, dp: int | None, server: Server) -> None:
        self.dp = dp
        self._serves, self._waits, self._waited = f"serves/{dp}", f"waits/{dp}", f"waited/{dp}"
        self._admitted, self._batches = f"admitted_requests/{dp}", (f"eager_batches/{dp}", f"replayed_batches/{dp}")
        self._server = server
        self._life = server.life(dp)
        self.speaker: Rank | None = None  # of the ranks that print the same batch, the one that counts
        self.printed: tuple[str, dict[str, float]] = ("", {})  # the last batch line
        self.running: float | None = None
        self.queued: float | None = None
        self.usages: dict[str, float] = {}
        self.graph: bool | None = None
        self.queues: dict[str, float] = {}
        self.grammar_queued: float | None = None
        self._printed: set[str] = set()  # pools and queues that lines show: others are of the present page alone
        self._is_of_page = self._is_ratio_of_page = False  # what is said to run and wait; new_token_ratio
        self.pending: tuple[float, float] | None = None  # tokens that wait, and of how many requests
        self.new_token_ratio: float | None = None  # the last one that was shown
        self.throughput: float | None = None
        self.at: float | None = None  # the moment
        self.spent = -inf  # up to when time is counted
        self._tokens = self._joined = 0.0  # of the moment's prefill batches
        self._full = False
        self._decoded = False  # the moment's last line is of decoding
        self._goes_on = False  # the last prompt continues in the next batch
        self._steps: deque[float] = deque(maxlen=5)  # seconds between decode lines, as the throughput has it
        self.decoded_at: float | None = None
        self.prefilled_at = -inf
        self._gaps: deque[float] = deque(maxlen=5)
        self._rate = USUAL_PREFILL_RATE  # most prompt tokens in a second
        self._second = (-inf, 0.0)
        # Tokens of the largest prefill batch, how many were as large, and after how many of these a prompt continued.
        self._largest, self._as_large, self._continued = 0.0, 0, 0
        self._fell_at: float | None = None  # a request ended since the last one was admitted
        self._begun = 0.0  # requests that began since it was idle
        self._is_early = False  # requests wait, and too few have ended to show why
        self._woke = True  # it was idle, or nothing is known, since the last decode line
        self._was_empty = False  # a prompt came to an empty batch since then
        self._moments = 0  # since the last long silence
        self._pool: float | None = None  # tokens of the KV cache, by tokens and usage of a line
        self._waits_elsewhere = False  # most requests wait for the other side of a pair
        self._nothing_since = -inf  # since when requests wait and none is started
        self._at_limit_at = -inf  # the batch last had as many requests as the limit allows
        # Decode lines that show the time of a step, of the last ten minutes at most: time, batch, seconds, tokens per request.
        self.steps: deque[tuple[float, float, float, float]] = deque(maxlen=600)
        self._step_due = -inf
        self._retracted_at = -inf  # the last retraction line
        # Scrapes
        self.logged_at = -inf  # the last batch line
        self._shown_at = -inf  # a scrape last showed that something had changed
        self._scraped_at = -inf
        self._computing: float | None = None  # seconds of prefill between two scrapes
        # Requests of a prefill batch, on average: a gauge of that moment does not count them as running.
        self._joining = 0.0
        self._counts_admissions = False

    # A line

    def repeats(self, event: Event) -> bool:
        """Whether a batch line is of another rank than the lowest: every pipeline stage, and some tensor-parallel ranks, print every batch."""
        rank, known = event.rank, self.speaker
        if rank.tp is None and rank.pp is None:
            return False
        if known is not None and _place(rank) >= _place(known):
            return _place(rank) > _place(known)
        self.speaker = rank
        return known is not None and (event.kind, event.figures) == self.printed  # a higher rank printed it first

    def take(self, event: Event, now: float) -> None:
        """Take a batch line."""
        figures = event.figures
        is_first = self.at is None or now != self.at
        if is_first:
            self._proceed(now, event)
            self._computing = None
        self.logged_at = now
        for name, figure in (("full", "usage"), ("swa", "swa_usage"), ("mamba", "mamba_usage")):
            if figure in figures:
                self.usages[name] = figures[figure]
                self._printed.add(name)
        if not _ELSEWHERE.isdisjoint(figures):
            self.queues.update({name: figures[name] for name in ELSEWHERE if name in figures})
            self._printed.update(self.queues.keys() & figures.keys())
        before = self.running
        self.running, self.queued = figures.get("running", self.running), figures.get("queued", self.queued)
        self._is_of_page = False
        if before is not None and self.running is not None and self.running < before:
            self._fell_at = now
        if not self.queued or (self.running or 0.0) > (before or 0.0):
            self._nothing_since = now
        if event.kind == "decode":
            if is_first:
                self._add_step(figures, now)
            self._decode(event, now)
        else:
            self._prefill(event, now)
        self.printed = (event.kind, figures)
        self._note_load(1.0, now)

    def _note_load(self, lines: float, now: float) -> None:
        bucket = self._server.bucket(now)
        bucket["lines"] += lines
        running = (self.running or 0.0) + self._joined
        bucket.most("most_running", running)
        bucket.most("most_queued", self.queued or 0.0)
        # Where most of those that run were not seen to begin, the load is older than what was read of it.
        self._begun = inf if running > 2 * self._begun else max(self._begun, running)
        bucket.most("most_usage", self.usage or 0.0)

    def _admit(self, requests: float, now: float) -> None:
        self._server.bucket(now)[self._admitted] += requests
        self._begun += requests
        self._fell_at, self._nothing_since = None, now

    def _add_step(self, figures: dict[str, float], now: float) -> None:
        """Add the step time that a decode line shows: its throughput is over the time since a decode line with nearly the same batch."""
        running, speed, accepted = figures.get("running"), figures.get("throughput"), figures.get("accept_length")
        before = self.printed[1].get("running") if self.printed[0] == "decode" else None
        if now < self._step_due or not running or not before or not speed:
            return
        batch = (before + running) / 2
        if abs(before - running) > NEARLY_SAME * batch:
            return
        since, ranks = self.decoded_at or now, self._server.facts.attention_ranks
        if self._woke or (ranks > 1 and self._server.prefilled_elsewhere(self.dp, since)):
            return  # it paused, or waited for another rank's prefill
        self._step_due = now + STEP_SECONDS
        if accepted or not self._server.facts.is_on("speculative_algorithm"):
            tokens = accepted or 1.0
            self.steps.append((now, batch, batch * tokens / speed, tokens))

    def _decode(self, event: Event, now: float) -> None:
        figures, bucket, facts = event.figures, self._server.bucket(now), self._server.facts
        running, steps = self.running or 0.0, facts.steps_between_lines
        throughput, accepted = figures.get("throughput"), figures.get("accept_length", 1.0)
        self.throughput = throughput if throughput is not None else self.throughput
        # The throughput is over the time since the line before, pauses included.
        # Where no prompt came to an empty batch since the decode line before, it decoded on.
        paused = self._woke and (facts.role == "decode" or self.decoded_at is None or self._was_empty)
        if self.decoded_at is None:
            self._gaps.clear()  # those of prefill lines
        if throughput and running and not paused:
            self._steps.append(steps * max(accepted, 1.0) * running / throughput)
        if self.decoded_at is not None and now > self.decoded_at and not paused:
            self._gaps.append(now - self.decoded_at)
        self.decoded_at, self._decoded, self._woke, self._joined, self._was_empty = now, True, False, 0.0, False
        bucket["decode_lines"] += 1
        self._server.counted["decode_lines"] += 1
        self._server.logged_steps += steps
        if figures.get("usage", 0.0) >= LEAST_USAGE and "tokens" in figures:
            self._pool = figures["tokens"] / figures["usage"]
        bucket["decoded_tokens"] += steps * max(accepted, 1.0) * running
        if "accept_length" in figures:
            bucket.observe("accepted", accepted)  # tokens of a verified step, the one that needs no draft included
        if "graph" in figures:
            self.graph = bool(figures["graph"])
            if "replayed_batches" not in self._server.by_page:
                self._count_batches(now, *((steps, 0.0) if self.graph else (0.0, steps)))
            facts.graph_device = "" if self.graph else event.word or facts.graph_device
            name, size = ("replayed_most", running) if self.graph else ("eager_inverse", 1.0 / max(running, 1.0))
            bucket.most(name, size)
            if not self.graph and self._server.another_decides(self.dp, running, now):
                self.graph = None

    def _prefill(self, event: Event, now: float) -> None:
        figures, bucket, facts = event.figures, self._server.bucket(now), self._server.facts
        tokens, sequences = figures.get("tokens", 0.0), figures.get("sequences", 0.0)
        bucket["prefill_lines"] += 1
        self._server.counted["prefill_lines"] += 1
        if tokens <= 1 and not (self.running or self.queued or figures.get("cached")):
            self.running = self.queued = 0.0  # a health probe is no load
            self._tokens = self._joined = 0.0
            return
        most = facts.prefill_tokens or self._chunk(tokens, bucket)
        counted = tokens + (self.running or 0.0 if facts.is_on("enable_mixed_chunk") else 0.0)
        ended_by_requests = sequences >= (facts.size("prefill_max_requests") or inf) and counted < (most or 0.0)
        full = most is not None and counted >= FULL_PREFILL * most and not ended_by_requests
        started = max(sequences - self._goes_on, 0.0)
        chunk = facts.size("chunked_prefill_size")
        self._goes_on = full and (
            counted >= FULL_PREFILL * chunk if chunk else facts.number("chunked_prefill_size") != -1
        )
        self._full = full  # of the moment's last prefill batch
        self._tokens += tokens
        self._decoded = False
        self._was_empty = self._was_empty or not self.running
        self._joined = sequences  # which the next line's running requests have, but for a prompt that goes on
        printed = int(now if event.time is None else event.time)  # late or not
        second = self._second[1] + tokens if printed == self._second[0] else tokens
        self._second = (printed, second)
        self._rate = max(self._rate, second)
        bucket["peak"] = self._rate  # the same in every bucket: a window takes the largest
        if self.decoded_at is None and -inf < self.prefilled_at < now:
            self._gaps.append(now - self.prefilled_at)
        self.prefilled_at = now
        if started:
            self._admit(started, now)
        bucket["full_lines"] += full
        bucket["computed_tokens"] += tokens
        bucket["cached_tokens"] += figures.get("cached", 0.0)
        if "computed_tokens" not in self._server.by_page:
            self._life["computed_tokens"] += tokens
            self._life["cached_tokens"] += figures.get("cached", 0.0)
        bucket["sequences"] += sequences
        bucket["admitted_requests"] += started
        if tokens <= sequences:  # several answers to one prompt: each finds all of it
            bucket["repeated"] += figures.get("cached", 0.0)
        if "pending" in figures:
            self.pending = (figures["pending"], figures.get("queued", 0.0))

    def _chunk(self, tokens: float, bucket: Totals) -> float | None:
        """Return the most tokens of a batch where only the log shows them: a size that returns and that nothing exceeds.

        The size is that of a chunk where prompts continue after such batches: fewer run than joined. Whole prompts of one length may
        only not fill the rest of a batch.
        """
        if tokens > self._largest:
            self._largest, self._as_large, self._continued = tokens, 0, 0
        self._as_large += tokens == self._largest
        bucket.most("most_prefill", self._largest)
        kind, before = self.printed
        if kind == "prefill" and before.get("tokens") == self._largest:
            sequences = before.get("sequences", 0.0)
            may_be_whole = sequences > 1 and self._largest % sequences == 0
            self._continued += not may_be_whole and (self.running or 0.0) < before.get("running", 0.0) + sequences
        if self._as_large < SAME_CHUNK or self._largest % CHUNK_STEP:
            return None
        if self._continued >= SAME_CHUNK:
            bucket.most("chunk_seen", self._largest)
        return self._largest

    def retract(self, event: Event, now: float) -> None:
        """Take a retraction of this scheduler; one that waited brings the usage of its moment."""
        self.advance(now)
        usage = event.figures.get("usage", self.usage)
        if usage is not None:
            self._server.bucket(now).observe("usage_before", usage)
        after, at = event.figures.get("ratio_after"), now if event.time is None else event.time
        if after is not None and at >= self._retracted_at:
            self._retracted_at = at
            self.new_token_ratio, self._is_ratio_of_page = after, False

    @property
    def usage(self) -> float | None:
        """The usage of the fullest pool, 0 to 1."""
        return max(self.usages.values(), default=None)

    # A scrape

    def take_page(self, gains: RankGains, counted: Iterable[str], now: float) -> None:
        """Take what a page shows. Its gauges hold until the next line or scrape; lines of the log, where they come, say more.

        SGLang refreshes a gauge when it prints a batch line, and when it is idle: unchanged figures are the old observation.
        counted: what the page counts of this scheduler; the log is not needed for it from then on.
        """
        figures, logged = gains.figures, now - self.logged_at <= LOGGED_SECONDS
        interval = now - self._scraped_at if self._scraped_at > -inf else 0.0
        self._count(gains, interval, counted, now, logged=logged)
        serving = bool(figures.running or figures.queued or figures.grammar_queued or any(figures.queues.values()))
        if logged and self.at is not None and now < self.at + self.hold_seconds:
            if serving:
                self._shown_at = self._scraped_at = now
                self.throughput = figures.generation_throughput if self.throughput is None else self.throughput
                self._see_queues(figures)
                return
            if self._tokens:
                return  # a prefill, which the gauges do not show
        was_idle = not (self.running or self.queued)
        self.advance(now)
        if was_idle and not logged and interval:
            self._serve_between(gains, interval, now, serving=serving)
        self._see_queues(figures)
        if figures.running is None and figures.queued is None:
            self._scraped_at = now
            if self._is_of_page:
                self.rest()
            return
        self.running, self.queued, self._is_of_page = figures.running, figures.queued, True
        self.usages.update(_usages(figures))
        self.throughput = figures.generation_throughput
        self._shown_at = now if gains.is_fresh or not serving else self._shown_at
        self.at, self.spent, self._scraped_at = now, max(now, self.spent), now
        self._tokens = self._joined = 0.0
        if logged:
            self._full, self._computing = False, 0.0
        if serving:
            if not logged and figures.accept_length and gains.is_fresh:
                self._server.bucket(now).observe("accepted", figures.accept_length)
            self._note_load(max(1.0 - gains.lines, 0.0), now)

    def _see_queues(self, figures: RankFigures) -> None:
        """Take the queues of a page; those and pools that only earlier pages showed are gone."""
        self.grammar_queued, pools = figures.grammar_queued, _usages(figures)
        self.queues = {name: each for name, each in self.queues.items() if name in self._printed} | figures.queues
        self.usages = {name: each for name, each in self.usages.items() if name in self._printed or name in pools}
        ratio = figures.new_token_ratio
        if ratio is not None or self._is_ratio_of_page:
            self.new_token_ratio, self._is_ratio_of_page = ratio, True

    def _count(self, gains: RankGains, interval: float, counted: Iterable[str], now: float, *, logged: bool) -> None:
        """Count what the server's own counters gained since the scrape before, and, where no line is logged, what it did meanwhile."""
        gained, facts, bucket = gains.gained, self._server.facts, self._server.bucket(now)
        by_page = self._server.by_page
        by_page.update({"computed_tokens", "replayed_batches"}.intersection(counted))
        if "computed_tokens" in counted or not (logged or "computed_tokens" in by_page):
            for name in gained.keys() & {"computed_tokens", "cached_tokens"}:
                self._life[name] += gained[name]
        if "replayed_batches" in gained or "eager_batches" in gained:
            self._count_batches(now, gained.get("replayed_batches", 0.0), gained.get("eager_batches", 0.0))
        if logged:
            return
        steps, passes = gains.steps, gained.get("prefill_passes", 0.0)
        for name in ("computed_tokens", "cached_tokens", "admitted_requests", "decoded_tokens"):
            bucket[name] += gained.get(name, 0.0)
        bucket["lines"] += gains.lines
        bucket["decode_lines"] += steps / facts.steps_between_lines
        bucket["prefill_lines"] += passes
        bucket["sequences"] += gained.get("admitted_requests", 0.0)
        self._counts_admissions = self._counts_admissions or "admitted_requests" in gained
        if gained.get("admitted_requests"):
            self._admit(gained["admitted_requests"], now)
        tokens, most = gained.get("computed_tokens", 0.0), facts.prefill_tokens
        if not gains.is_fresh:
            return  # nothing has changed: what the scrape before showed holds
        self._full = bool(most and tokens >= FULL_PREFILL * most * max(passes, 1.0))
        bucket["full_lines"] += passes if self._full else 0.0
        self._joining = gained.get("admitted_requests", 0.0) / passes if passes else 0.0
        self._computing = (
            interval * passes / (passes + steps) if passes else interval if tokens and not steps and interval else 0.0
        )
        if steps or passes:
            eager = gained.get("eager_batches", 0.0) > gained.get("replayed_batches", 0.0)
            known = bool(facts.arguments) or bool(
                gains.figures.replayed_batches
            )  # else it may be a server without a GPU
            self.graph = None if not steps or not known else not eager
        if interval and tokens:
            self._rate = max(self._rate, tokens / interval)
            bucket["peak"] = self._rate

    def _count_batches(self, now: float, replayed: float, eager: float) -> None:
        bucket = self._server.bucket(now)
        for name, key, number in (
            ("eager_batches", self._batches[0], eager),
            ("replayed_batches", self._batches[1], replayed),
        ):
            self._life[name] += number
            bucket[key] += number

    def coverage(self, recent: Totals) -> float | None:
        """Return the share of the decode batches of some time that replayed a graph; None without any."""
        eager, replayed = (recent[name] for name in self._batches)
        return replayed / (replayed + eager) if replayed + eager else None

    def rest(self) -> None:
        """Forget the present figures: nothing answers any more."""
        self.at = self.running = self.queued = self.throughput = self.pending = self.graph = None
        self.new_token_ratio = None
        self.grammar_queued = None
        self.usages.clear()
        self.queues.clear()

    def _serve_between(self, gains: RankGains, interval: float, now: float, *, serving: bool) -> None:
        """Count the time since the scrape before as serving where only the counters show work, and neither scrape found something to do.

        Those that wait now came on average in the middle of it.
        """
        if serving:
            self._server.bucket(now)[self._waited] += (gains.figures.queued or 0.0) * min(interval, SHOWN_SECONDS) / 2
            return
        steps, decoded = gains.steps, gains.gained.get("decoded_tokens", 0.0)
        if steps < LEAST_STEPS and gains.gained.get("computed_tokens", 0.0) < LEAST_COMPUTED:
            return
        begin = max(now - min(interval, SHOWN_SECONDS), self.spent - interval)
        self.spent, self.running, self.queued = begin, decoded / steps if steps and decoded else 0.0, 0.0
        self._spend(now, Moment("empty", UNKNOWN, "no_queue", self._graphs()))

    # Time

    def _are_the_same(self, event: Event) -> bool:
        """Whether the requests of a batch line can be those of the line before: a prefill line shows who joins.

        The decode server of a pair prints none: there as many must hold the tokens of before, and at most those of one line's steps more.
        """
        facts, figures, before = self._server.facts, event.figures, self.printed[1]
        if event.kind == "prefill" or not (facts.role == "decode" or "prealloc" in figures):
            return True
        grown = figures.get("tokens", 0.0) - before.get("tokens", inf)
        each = facts.steps_between_lines * max(figures.get("accept_length", 1.0), 1.0) + (
            facts.size("page_size") or 1.0
        )
        return figures.get("running") == before.get("running") and 0 <= grown <= each * figures.get("running", 0.0)

    def _proceed(self, now: float, event: Event) -> None:
        """Begin a moment with its first line."""
        self.advance(now)
        runs = event.figures.get("running")
        if self.at is not None and runs is not None:
            gap, ran = now - self.at, (self.running or 0.0) + self._joined
            moments, self._moments = self._moments, self._moments + 1
            if gap > max(STUCK_SECONDS, self.hold_seconds):
                self._moments = 0
                broke_off = max(self._server.last.get(name, -inf) for name in ("server_starts", "pause", "ends"))
                if moments < USUAL_MOMENTS or ran < 1 or self._server.stopping or broke_off > self.at:
                    pass  # a log that is silent again and again shows its rhythm, no hang
                elif runs >= ran / 2 and self._are_the_same(event):
                    self._server.hung(Hang(self.at, gap, ran, runs), now)
                elif ran >= MANY_RUNNING and len(self._server.silences) < MOST_SILENCES:
                    self._server.silences.append(Hang(self.at, gap, ran, runs))
        self.at, self.spent = now, max(now, self.spent)
        self._tokens = self._joined = 0.0
        self._full = self._decoded = False

    @property
    def hold_seconds(self) -> float:
        """How long the last moment is valid."""
        known = min(self._steps, default=None)
        gap = min(self._gaps, default=None)
        due = min(filter(None, (known, gap)), default=self._server.facts.steps_between_lines * USUAL_STEP_SECONDS)
        if known is None and gap is not None:
            due = max(self._gaps)
        return min(max(OVERDUE * (due + self.prefill_seconds), LEAST_HOLD_SECONDS), MOST_HOLD_SECONDS)

    @property
    def prefill_seconds(self) -> float:
        """How long the moment's prompts take to compute."""
        return self._tokens / self._rate

    def advance(self, now: float) -> None:
        """Count the time up to `now`."""
        while self.at is not None and self.spent < now:
            moment, until, prefilling = self._does(self.at, self.spent, now)
            if prefilling:
                self._server.bucket(self.spent)["prefilling"] += min(now, until) - self.spent
            self._spend(min(now, until), moment)

    def moment(self, now: float) -> Moment:
        """Return what it does now, as far as the last line or scrape shows it."""
        return _ALL_UNKNOWN if self.at is None else self._does(self.at, now, now)[0]

    def _does(self, at: float, time: float, now: float) -> tuple[Moment, float, bool]:
        """Return what it does at a time, until when, and whether it prefills, by what was shown at `at`: afterwards nothing is known."""
        if self._is_idle():
            return _ALL_IDLE, inf, False
        computes = self.prefill_seconds if self._computing is None else self._computing
        if time < (until := at + min(computes, STUCK_SECONDS)):
            return self._states(prefilling=True), until, True
        until = at + self.hold_seconds if self._computing is None else at
        if now - self._scraped_at <= SHOWN_SECONDS:  # scrapes show when it is idle
            until = max(until, self._shown_at + SHOWN_SECONDS)
        if time < until:
            return self._states(prefilling=False), until, False
        waits = self.queued is None or self.queued > 0 or any(self.queues.values()) or self._computing is not None
        return (_ALL_UNKNOWN if waits else _ALL_IDLE), inf, False

    def _is_idle(self) -> bool:
        return (
            self.running == 0
            and not self.queued
            and not self._joined
            and not any(self.queues.values())
            and not self.grammar_queued
        )

    def _spend(self, until: float, moment: Moment) -> None:  # noqa: C901, PLR0912 - one loop over all sums
        """Count the time up to `until` as this."""
        activity, states = _state_keys(moment)
        if until > self.spent:
            life, lived = self._life, until - self.spent
            for key in (activity, *states):
                life[key] += lived
        serves = moment is not _ALL_IDLE and moment is not _ALL_UNKNOWN
        self._woke = self._woke or not serves
        if moment is _ALL_IDLE:
            self._begun = 0.0
        running = None if self.running is None else self.running + self._joined
        waiting = sum(self.queues.values()) if self._waits_elsewhere else self.queued
        while self.spent < until:
            bucket = self._server.bucket(self.spent)
            end = min(until, (self.spent // BUCKET_SECONDS + 1) * BUCKET_SECONDS) if serves else until
            seconds, self.spent = end - self.spent, end
            for key in states:
                bucket[key] += seconds
            if not serves:
                continue
            self._server.last["requests"] = end
            bucket[self._serves] += seconds
            if self.queued:
                bucket[self._waited] += self.queued * seconds
            if self._is_early:
                bucket["early"] += seconds
            if self._waits_elsewhere:
                bucket["elsewhere"] += seconds
            if moment.queue not in {"empty", UNKNOWN}:
                bucket[self._waits] += seconds
            if moment.admission == "hybrid_pool_full" and self.usages.get("mamba", 0.0) >= (self.usage or 0.0):
                bucket["mamba"] += seconds
            # Between two scrapes that found nothing to do, what runs is known, and not what it holds.
            usage = None if moment.token_usage == UNKNOWN else self.usage
            figures = (running, waiting, usage, self.throughput)
            for value, keys in zip(figures, _figure_keys(moment.admission), strict=True):
                if value is None:
                    continue
                product = value * seconds
                for weighed, timed in keys:
                    bucket[weighed] += product
                    bucket[timed] += seconds
            if running:
                bucket[f"batch/{_binned(running)}"] += seconds
                if moment.admission == "held_back":
                    bucket[f"held/{_binned(running)}"] += seconds
                    bucket["usage2@held_back"] += (self.usage or 0.0) ** 2 * seconds

    # States

    def wait(self, recent: Totals) -> float | None:
        """Estimate the mean wait in some time: requests waiting over requests started, retracted ones again; None where neither was seen."""
        waited, started = recent[self._waited], recent[self._admitted]
        return waited / started if started else inf if waited else None

    def _last_minute(self) -> Totals:
        """Return what waited, started and served in the last minute of this start; nothing where it is too little to be a rate."""
        names, recent = (self._waited, self._admitted, self._serves), Totals()
        since = max(self.spent - RATE_SECONDS, self._server.last.get("server_starts", -inf)) - BUCKET_SECONDS
        for begin, totals in reversed(self._server.buckets):
            if begin <= since:
                break
            for name in names:
                recent[name] += totals.get(name, 0.0)
        return recent if recent[self._serves] >= LEAST_RATE_SECONDS else Totals()

    def _present_wait(self) -> float | None:
        """Estimate the wait in the last minute; None where it is not known: who starts is in the prefill lines."""
        known = self.prefilled_at > -inf or self._counts_admissions
        return self.wait(self._last_minute()) if self.queued and known else None

    def _states(self, *, prefilling: bool) -> Moment:
        profile, self._is_early = self._server.profile, False
        usage, queued = self.usage, self.queued
        running = None if self.running is None else self.running + self._joined
        target = profile.token_usage_target
        at_usage = UNKNOWN if usage is None else "at_target" if usage >= target else "below_target"
        elsewhere = sum(self.queues.values()) if self.queues else 0.0
        slow = self._waits_elsewhere = elsewhere > (queued or 0.0) and self._other_side_is_slow(elsewhere, running)
        compiles = (self.grammar_queued or 0.0) > max(queued or 0.0, elsewhere) and (usage is None or usage < target)
        wait = self._present_wait() if queued else None
        queue = self._queue(elsewhere if slow else queued, wait)
        limit = self._server.facts.limit(self.dp)
        if running is not None and limit is not None and running >= AT_LIMIT * limit:
            self._at_limit_at = self.spent
        if not (queued or slow or compiles):
            return Moment(queue, at_usage, UNKNOWN if queued is None else "no_queue", self._graphs())
        full_batch = self._full and (prefilling or not self._decoded)
        sample = self._sample(running, limit, wait, for_grammar=compiles, elsewhere=slow, full_batch=full_batch)
        why = reason(sample)
        self._is_early = why is EARLY
        return Moment(queue, at_usage, why.state, self._graphs())

    def _graphs(self) -> str:
        """Return how its decode batches run."""
        facts = self._server.facts
        if facts.without_graph or self.graph is not False:
            return facts.without_graph or ("replayed" if self.graph else UNKNOWN)
        is_larger = (self.running or 0.0) > (facts.largest_captured or ASSUMED_CAPTURED)
        return "beyond_captured" if is_larger else "eager"

    def _queue(self, queued: float | None, wait: float | None) -> str:
        profile = self._server.profile
        if not queued:
            return UNKNOWN if queued is None else "empty"
        if queued > profile.queue_upper:
            return "above_range"
        if profile.queue_wait_seconds is not None:
            if wait is None and self.prefilled_at == -inf and self._computing is None:
                return UNKNOWN  # a log of decode lines alone: the queue is judged by its wait
            if wait is not None and wait > profile.queue_wait_seconds:
                return "above_range"
        return "below_range" if queued < (profile.queue_lower or -inf) else "in_range"

    def _sample(
        self,
        running: float | None,
        limit: float | None,
        wait: float | None,
        *,
        for_grammar: bool,
        elsewhere: bool,
        full_batch: bool,
    ) -> Sample:
        """Return the figures by which one can say why requests wait."""
        facts, usage, target = self._server.facts, self.usage, self._server.profile.token_usage_target
        # A scrape sees a queue that the next batch takes. Where no admissions are counted, the queue is taken as it is seen.
        is_short = self._counts_admissions if wait is None else wait < SHORT_WAIT_SECONDS
        # Until as many requests have ended as run, it is not known how much of its reservation one uses.
        counts = self.prefilled_at > -inf or self._counts_admissions
        return Sample(
            running=running,
            joining=0.0 if self._computing is None else self._joining,
            limit=limit,
            at_limit_seconds=self.spent - self._at_limit_at,
            full_batch=full_batch,
            continues=self._goes_on,
            usage=usage,
            full_usage=self.usages.get("full", usage or 0.0),
            target=target,
            free=self._free,
            reserved=self._most_reserved,
            fits=running is None or usage is None or self._next_fits(running, usage, target),
            for_grammar=for_grammar,
            elsewhere=elsewhere,
            waits_by=facts.waits_by,
            passes=self._computing is not None and is_short,
            idle_seconds=self.spent - self._nothing_since,
            ended_seconds=-inf if self._fell_at is None else self._fell_at - self._nothing_since,
            early=counts and self._begun < 2 * (self.running or 0.0) * facts.micro_batches,
        )

    @property
    def _free(self) -> float:
        """Tokens of the KV cache that are free; 0 where its size is not known."""
        pool = self._server.facts.pool(self.dp) or self._pool
        return (1.0 - (self.usage or 0.0)) * pool if pool else 0.0

    @property
    def _most_reserved(self) -> float:
        """The most tokens that SGLang can have reserved for the running requests and the next ones."""
        return MOST_RESERVED * ((self.running or 0.0) + BESIDE)

    def _other_side_is_slow(self, elsewhere: float, running: float | None) -> bool:
        """Whether requests wait long for the other side of a pair: some always do, while their KV cache is transferred."""
        objective, recent = self._server.profile.queue_wait_seconds, self._last_minute()
        started, served = recent[self._admitted], recent[self._serves]
        if objective is None or not started:
            return elsewhere > MANY_ELSEWHERE * (running or 0.0)
        return elsewhere > started / served * objective

    def _next_fits(self, running: float, usage: float, target: float) -> bool:
        """Return whether one more request would leave the KV cache below its target.

        Small requests fill it smoothly: usage alone decides. A large one needs its prompt in whole pages and a page to decode into, and,
        where few prefixes are shared, what the mean running request has.
        """
        facts, totals = self._server.facts, self._server.totals
        pool, computed, cached = facts.pool(self.dp), totals["computed_tokens"], totals["cached_tokens"]
        shared = cached / (cached + computed) if cached else 0.0
        need = 0.0 if running <= 0 or shared > SHARED_PREFIXES else usage / (running * facts.micro_batches)
        answer = totals["decoded_tokens"] / totals["admitted_requests"] if totals["admitted_requests"] else 0.0
        tokens, requests = self.pending or (0.0, 0.0)
        prompt = (
            (1 - shared) * tokens / requests
            if tokens and requests
            else computed / max(totals["admitted_requests"], 1.0)
        )
        if pool and prompt:
            page = max(facts.size("page_size") or 1.0, 1.0)
            need = max(need, page * (ceil(prompt / page) + 1) / pool)
            whole = page * ceil((max(prompt, computed / max(totals["admitted_requests"], 1.0)) + answer) / page)
            if (
                facts.may_reserve_in_full
                and whole >= COARSE * pool
                and (running * facts.micro_batches + BESIDE) * whole > target * pool
            ):
                return False  # those that run will use what is free
        return need < COARSE or usage + need <= target


def _usages(figures: RankFigures) -> dict[str, float]:
    """Return the usage of each pool on a page."""
    usages = {"full": figures.full_usage, "swa": figures.swa_usage, "mamba": figures.mamba_usage}
    return {name: usage for name, usage in usages.items() if usage is not None}


@lru_cache(maxsize=1024)
def _state_keys(moment: Moment) -> tuple[str, tuple[str, ...]]:
    """Return the names of its activity, and of its state of each signal."""
    states = tuple(f"{signal}/{state}" for signal, state in zip(SIGNALS, moment, strict=True))
    return f"activity/{moment.activity}", states


@lru_cache
def _figure_keys(admission: str) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Return the names under which each of running, queued, usage and throughput is summed, with its seconds."""
    names = ("running", "queued", "usage", "throughput")
    return tuple(
        tuple((each, f"{each}:s") for each in ((name, f"{name}@{admission}") if admission in WAITS else (name,)))
        for name in names
    )


def _binned(running: float) -> str:
    return f"{running:.0f}" if running <= 256 else f"{ceil(running / 8) * 8}"


def _place(rank: Rank) -> tuple[int, int]:
    return rank.pp or 0, rank.tp or 0
