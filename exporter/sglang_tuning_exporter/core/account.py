"""What is summed of one scheduler: its batch lines, the gains of its pages, and the seconds in each state. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import ceil, inf
from typing import NamedTuple

from sglang_tuning_exporter.core.counters import RankGains
from sglang_tuning_exporter.core.sums import BUCKET_SECONDS, IDLE, SIGNALS, UNKNOWN, WAITS, Sums, Totals

RATE_SECONDS = 60.0  # over which admissions are counted for the wait
LEAST_RATE_SECONDS = 5.0
LARGEST_BATCH = 256.0  # up to this size each batch size has its own sum; above, eight sizes share one


class Moment(NamedTuple):
    """What a scheduler does: one word for each of `SIGNALS`."""

    queue: str
    token_usage: str
    admission: str
    cuda_graph: str

    @property
    def activity(self) -> str:
        """Whether the scheduler serves: `serving`, `idle` or `unknown`."""
        return IDLE if self == ALL_IDLE else UNKNOWN if self == ALL_UNKNOWN else "serving"


ALL_IDLE = Moment(IDLE, IDLE, IDLE, IDLE)
ALL_UNKNOWN = Moment(UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)


class Load(NamedTuple):
    """The load of a scheduler while a moment lasts; a figure that nothing shows is None."""

    running: float | None
    waiting: float | None  # in the queue where most requests wait
    usage: float | None
    throughput: float | None
    queued: float | None  # in the main queue
    is_early: bool  # requests wait, and too few have ended to show why
    is_elsewhere: bool  # most requests wait for the other side of a pair
    is_mamba: bool  # the mamba cache is the fullest pool


NO_LOAD = Load(None, None, None, None, None, is_early=False, is_elsewhere=False, is_mamba=False)


class _Names(NamedTuple):
    """The names of the sums that each scheduler has for itself."""

    serves: str
    waits: str
    waited: str
    admitted: str
    eager: str
    replayed: str


class _Lines:
    """What the batch lines of one bucket add up to; None where no line showed the figure."""

    __slots__ = (
        "accepted", "accepted_lines", "admitted", "cached", "chunk", "computed", "decode_lines", "decoded",
        "eager_inverse", "eager_steps", "full_lines", "largest_prefill", "lines", "most_queued", "most_running",
        "most_usage", "peak", "prefill_lines", "prompt_lines", "repeated", "replayed_most", "replayed_steps",
        "sequences", "steps",
    )  # fmt: skip

    def __init__(self) -> None:
        self.lines = self.decode_lines = self.prefill_lines = 0
        self.prompt_lines = 0  # of the prefill lines, those that are no health probes
        self.full_lines = self.accepted_lines = 0
        self.computed = self.cached = self.repeated = self.sequences = self.admitted = 0.0
        self.decoded = self.steps = self.replayed_steps = self.eager_steps = self.accepted = 0.0
        self.most_running = self.most_queued = self.most_usage = self.peak = 0.0
        self.replayed_most: float | None = None
        self.eager_inverse: float | None = None
        self.largest_prefill: float | None = None
        self.chunk: float | None = None

    def add_decode_to(self, bucket: Totals) -> None:
        """Add the sums of the decode lines to a bucket."""
        bucket["decode_lines"] += self.decode_lines
        bucket["decoded_tokens"] += self.decoded
        if self.accepted_lines:
            bucket["accepted"] += self.accepted
            bucket["accepted:n"] += self.accepted_lines
        _keep_most(bucket, "replayed_most", self.replayed_most)
        _keep_most(bucket, "eager_inverse", self.eager_inverse)

    def add_prompts_to(self, bucket: Totals) -> None:
        """Add the sums of the prefill lines to a bucket, health probes left out."""
        bucket.most("peak", self.peak)
        bucket["full_lines"] += self.full_lines
        bucket["computed_tokens"] += self.computed
        bucket["cached_tokens"] += self.cached
        bucket["sequences"] += self.sequences
        bucket["admitted_requests"] += self.admitted
        if self.repeated:
            bucket["repeated"] += self.repeated
        _keep_most(bucket, "most_prefill", self.largest_prefill)
        _keep_most(bucket, "chunk_seen", self.chunk)


class _Weighed:
    """Running, waiting, usage and throughput, each weighed with the seconds in which it held."""

    __slots__ = ("products", "seconds")

    def __init__(self) -> None:
        self.products, self.seconds = [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]

    def add(self, load: Load, seconds: float) -> None:
        """Add a load that held for some seconds."""
        for place in (0, 1, 2, 3):
            figure = load[place]
            if figure is not None:
                self.products[place] += figure * seconds
                self.seconds[place] += seconds

    def add_to(self, bucket: Totals, reason: str) -> None:
        """Add the sums to a bucket, under the names of a reason for waiting, or of the whole time without one."""
        for product, seconds, (weighed, timed) in zip(self.products, self.seconds, _figure_keys(reason), strict=True):
            if seconds:
                bucket[weighed] += product
                bucket[timed] += seconds


class _Time:
    """The seconds of one bucket, by what the scheduler did and under which load."""

    __slots__ = (
        "_by_reason", "_by_size", "_flagged", "_held_by_size", "_squares", "_total", "moments", "served",
        "waited", "waits",
    )  # fmt: skip

    def __init__(self) -> None:
        self.moments: dict[Moment, float] = {}
        self._total, self._by_reason = _Weighed(), dict[str, _Weighed]()
        self._by_size, self._held_by_size = dict[float, float](), dict[float, float]()  # by running requests
        self._squares = 0.0  # of the usage, while the new-token ratio holds requests back
        self.served = self.waits = 0.0  # seconds in which something ran or waited; in which requests waited
        self.waited = 0.0  # requests x seconds in the queue
        self._flagged: dict[str, float] = {}

    def add(self, moment: Moment, load: Load, seconds: float) -> None:
        """Add serving time."""
        admission, running = moment.admission, load.running
        self.served += seconds
        if moment.queue not in _NOTHING_WAITS:
            self.waits += seconds
        self._total.add(load, seconds)
        if running:
            self._by_size[running] = self._by_size.get(running, 0.0) + seconds
        if load.queued:
            self.waited += load.queued * seconds
        if admission in _WAITS:
            self._add_wait(admission, load, seconds)
        if load.is_early:
            self.add_flagged("early", seconds)
        if load.is_elsewhere:
            self.add_flagged("elsewhere", seconds)

    def _add_wait(self, admission: str, load: Load, seconds: float) -> None:
        weighed = self._by_reason.get(admission)
        if weighed is None:
            weighed = self._by_reason[admission] = _Weighed()
        weighed.add(load, seconds)
        if admission == "held_back" and load.running:
            self._held_by_size[load.running] = self._held_by_size.get(load.running, 0.0) + seconds
            self._squares += (load.usage or 0.0) ** 2 * seconds
        if admission == "hybrid_pool_full" and load.is_mamba:
            self.add_flagged("mamba", seconds)

    def add_flagged(self, name: str, seconds: float) -> None:
        """Add time in which something was the case that has a name."""
        self._flagged[name] = self._flagged.get(name, 0.0) + seconds

    def add_to(self, bucket: Totals, names: _Names) -> None:
        """Add the sums of serving time to a bucket. `names`: those of the scheduler's own sums."""
        bucket[names.serves] += self.served
        if self.waits:
            bucket[names.waits] += self.waits
        if self.waited:
            bucket[names.waited] += self.waited
        self._total.add_to(bucket, "")
        for reason, weighed in self._by_reason.items():
            weighed.add_to(bucket, reason)
        for running, seconds in self._by_size.items():
            bucket[f"batch/{_size(running)}"] += seconds
        for running, seconds in self._held_by_size.items():
            bucket[f"held/{_size(running)}"] += seconds
        if self._held_by_size:
            bucket["usage2@held_back"] += self._squares
        for name, seconds in self._flagged.items():
            bucket[name] += seconds


class Account:
    """The sums of one scheduler. Those of the present bucket are collected first, and added to it once."""

    def __init__(self, dp: int | None, sums: Sums, life: Totals) -> None:
        self._names = _Names(
            f"serves/{dp}", f"waits/{dp}", f"waited/{dp}", f"admitted_requests/{dp}",
            f"eager_batches/{dp}", f"replayed_batches/{dp}",
        )  # fmt: skip
        self._sums, self._life = sums, life
        self._begin = self._end = -inf  # of the bucket
        self._is_open = False  # something is collected for it
        self._lines, self._time = _Lines(), _Time()

    def open(self, now: float) -> None:
        """Collect what follows for the bucket of this time."""
        if self._is_open and self._begin <= now < self._end:
            return
        self._sums.at(now)  # a new bucket closes the accounts of all schedulers
        self.close()
        self._begin = now // BUCKET_SECONDS * BUCKET_SECONDS
        self._end = self._begin + BUCKET_SECONDS
        self._is_open = True
        self._sums.settle_later(self.close)

    def close(self) -> None:
        """Add what was collected to its bucket."""
        if not self._is_open:
            return
        self._is_open = False
        bucket = self._sums.at(self._begin)
        if self._lines.lines:
            self._close_lines(bucket, self._lines)
            self._lines = _Lines()
        if self._time.moments:
            self._close_time(bucket, self._time)
            self._time = _Time()

    def _close_lines(self, bucket: Totals, lines: _Lines) -> None:
        sums, life = self._sums, self._life
        _add_load(bucket, lines.lines, lines.most_running, lines.most_queued, lines.most_usage)
        if lines.decode_lines:
            lines.add_decode_to(bucket)
            sums.counted["decode_lines"] += lines.decode_lines
            sums.logged_steps += lines.steps
            if (lines.replayed_steps or lines.eager_steps) and "replayed_batches" not in sums.by_page:
                self._count_batches(bucket, lines.replayed_steps, lines.eager_steps)
        if lines.prefill_lines:
            bucket["prefill_lines"] += lines.prefill_lines
            sums.counted["prefill_lines"] += lines.prefill_lines
        if lines.prompt_lines:
            lines.add_prompts_to(bucket)
            if lines.admitted:
                bucket[self._names.admitted] += lines.admitted
            if "computed_tokens" not in sums.by_page:
                life["computed_tokens"] += lines.computed
                life["cached_tokens"] += lines.cached

    def _close_time(self, bucket: Totals, time: _Time) -> None:
        life = self._life
        for moment, seconds in time.moments.items():
            activity, states = _state_keys(moment)
            life[activity] += seconds
            for state in states:
                life[state] += seconds
                bucket[state] += seconds
        if time.served:
            time.add_to(bucket, self._names)

    # Batch lines of the open bucket

    def count_decode(self, steps: float, tokens: float, accepted: float | None) -> None:
        """Count a decode line. `accepted`: tokens of a verified step, with the one that needs no draft."""
        lines = self._lines
        lines.decode_lines += 1
        lines.steps += steps
        lines.decoded += tokens
        if accepted is not None:
            lines.accepted += accepted
            lines.accepted_lines += 1

    def count_graph(self, steps: float, running: float, *, is_replayed: bool) -> None:
        """Count the steps of a decode line that names whether they replayed a CUDA graph."""
        lines = self._lines
        if is_replayed:
            lines.replayed_steps += steps
            if lines.replayed_most is None or running > lines.replayed_most:
                lines.replayed_most = running
        else:
            lines.eager_steps += steps
            lines.eager_inverse = max(lines.eager_inverse or 0.0, 1.0 / max(running, 1.0))

    def count_probe(self) -> None:
        """Count the prefill line of a health probe."""
        self._lines.prefill_lines += 1

    def count_prompts(
        self, tokens: float, cached: float, sequences: float, *, started: float, is_full: bool, rate: float
    ) -> None:
        """Count a prefill line. `rate`: the most prompt tokens of any second so far."""
        lines = self._lines
        lines.prefill_lines += 1
        lines.prompt_lines += 1
        lines.full_lines += is_full
        lines.computed += tokens
        lines.cached += cached
        lines.sequences += sequences
        lines.admitted += started
        lines.peak = rate
        if tokens <= sequences:  # several answers to one prompt: each finds all of it
            lines.repeated += cached

    def note_sizes(self, largest: float, chunk: float | None) -> None:
        """Note the largest prefill batch so far, and the size of a chunk if it is known."""
        self._lines.largest_prefill = largest
        if chunk is not None:
            self._lines.chunk = chunk

    def count_line(self, running: float, queued: float | None, usage: float | None) -> None:
        """Count a batch line and the load that it shows."""
        lines = self._lines
        lines.lines += 1
        lines.most_running = max(lines.most_running, running)
        if queued and queued > lines.most_queued:
            lines.most_queued = queued
        if usage and usage > lines.most_usage:
            lines.most_usage = usage

    def note_retraction(self, now: float, usage: float) -> None:
        """Note the usage just before a retraction."""
        self._sums.at(now).observe("usage_before", usage)

    # Pages

    def count_gains(self, gained: Mapping[str, float], counted: Iterable[str], now: float, *, logged: bool) -> None:
        """Count what a page's counters gained. `counted`: what the page counts; its lines in the log count no more."""
        by_page = self._sums.by_page
        by_page.update({"computed_tokens", "replayed_batches"}.intersection(counted))
        if "computed_tokens" in counted or not (logged or "computed_tokens" in by_page):
            for name in gained.keys() & {"computed_tokens", "cached_tokens"}:
                self._life[name] += gained[name]
        if "replayed_batches" in gained or "eager_batches" in gained:
            replayed, eager = gained.get("replayed_batches", 0.0), gained.get("eager_batches", 0.0)
            self._count_batches(self._sums.at(now), replayed, eager)

    def count_unlogged(self, gains: RankGains, steps_between_lines: float, now: float) -> None:
        """Count the batches that a page's counters show, where no line of them is logged."""
        gained, bucket = gains.gained, self._sums.at(now)
        for name in ("computed_tokens", "cached_tokens", "admitted_requests", "decoded_tokens"):
            bucket[name] += gained.get(name, 0.0)
        admitted = gained.get("admitted_requests", 0.0)
        bucket["lines"] += gains.lines
        bucket["decode_lines"] += gains.steps / steps_between_lines
        bucket["prefill_lines"] += gained.get("prefill_passes", 0.0)
        bucket["sequences"] += admitted
        if admitted:
            bucket[self._names.admitted] += admitted

    def count_full(self, now: float, passes: float) -> None:
        """Count prefill batches that a page shows to be full."""
        self._sums.at(now)["full_lines"] += passes

    def note_peak(self, now: float, rate: float) -> None:
        """Note the most prompt tokens in a second, by pages."""
        self._sums.at(now).most("peak", rate)

    def note_accepted(self, now: float, accepted: float) -> None:
        """Note the tokens of a verified step that a page shows."""
        self._sums.at(now).observe("accepted", accepted)

    def count_shown(self, now: float, lines: float, running: float, queued: float, usage: float) -> None:
        """Count the load that a page shows, as that of so many batch lines."""
        _add_load(self._sums.at(now), lines, running, queued, usage)

    def count_waited(self, now: float, requests: float, seconds: float) -> None:
        """Count requests that waited before a page."""
        self._sums.at(now)[self._names.waited] += requests * seconds

    def _count_batches(self, bucket: Totals, replayed: float, eager: float) -> None:
        self._life["eager_batches"] += eager
        self._life["replayed_batches"] += replayed
        bucket[self._names.eager] += eager
        bucket[self._names.replayed] += replayed

    # Time

    def spend(self, begin: float, until: float, moment: Moment, load: Load) -> None:
        """Count a time as spent in a moment."""
        serves = moment is not ALL_IDLE and moment is not ALL_UNKNOWN
        while begin < until:
            self.open(begin)
            # Time without work is counted in the bucket where it begins.
            end = min(until, self._end) if serves else until
            seconds, begin = end - begin, end
            time = self._time
            time.moments[moment] = time.moments.get(moment, 0.0) + seconds
            if serves:
                time.add(moment, load, seconds)
        if serves:
            self._sums.last["requests"] = until

    def spend_prefilling(self, begin: float, seconds: float) -> None:
        """Count a time in which prompts are computed."""
        self.open(begin)
        self._time.add_flagged("prefilling", seconds)

    # What the sums say

    @property
    def of_start(self) -> Totals:
        """The sums of the server's present start, without the last bucket."""
        return self._sums.of_start

    def present_wait(self, now: float) -> float | None:
        """Estimate the mean wait in the last minute; None if nothing waited and nothing started."""
        waited, started, _ = self._last_minute(now)
        return _mean_wait(waited, started)

    def present_rate(self, now: float) -> float | None:
        """Return how many requests started in a second of serving in the last minute; None if none did."""
        _, started, served = self._last_minute(now)
        return started / served if started else None

    def _last_minute(self, now: float) -> tuple[float, float, float]:
        """Return what waited, started and served in the last minute of this start; zeros if that is no rate."""
        names, sums, waited, started, served = self._names, self._sums, 0.0, 0.0, 0.0
        since = max(now - RATE_SECONDS, sums.last.get("server_starts", -inf)) - BUCKET_SECONDS
        for begin, totals in reversed(sums.buckets):
            if begin <= since:
                break
            waited += totals.get(names.waited, 0.0)
            started += totals.get(names.admitted, 0.0)
            served += totals.get(names.serves, 0.0)
        if self._is_open and self._begin > since:
            waited += self._time.waited
            started += self._lines.admitted
            served += self._time.served
        return (waited, started, served) if served >= LEAST_RATE_SECONDS else (0.0, 0.0, 0.0)

    def wait(self, recent: Totals) -> float | None:
        """Estimate the mean wait: requests x seconds in the queue over requests started; None if there were neither.

        A retracted request that starts again counts again.
        """
        return _mean_wait(recent[self._names.waited], recent[self._names.admitted])

    def coverage(self, recent: Totals) -> float | None:
        """Return the share of the decode batches that replayed a CUDA graph; None if there were none."""
        eager, replayed = recent[self._names.eager], recent[self._names.replayed]
        return replayed / (replayed + eager) if replayed + eager else None


_NOTHING_WAITS = frozenset({"empty", UNKNOWN})
_WAITS = frozenset(WAITS)


def _mean_wait(waited: float, started: float) -> float | None:
    return waited / started if started else inf if waited else None


def _keep_most(bucket: Totals, name: str, value: float | None) -> None:
    if value is not None:
        bucket.most(name, value)


def _add_load(bucket: Totals, lines: float, running: float, queued: float, usage: float) -> None:
    bucket["lines"] += lines
    bucket.most("most_running", running)
    bucket.most("most_queued", queued)
    bucket.most("most_usage", usage)


@lru_cache(maxsize=1024)
def _state_keys(moment: Moment) -> tuple[str, tuple[str, ...]]:
    """Return the names of the seconds of an activity, and of the state of each signal."""
    states = tuple(f"{signal}/{state}" for signal, state in zip(SIGNALS, moment, strict=True))
    return f"activity/{moment.activity}", states


@lru_cache
def _figure_keys(reason: str) -> tuple[tuple[str, str], ...]:
    """Return the names of each figure of a load, and of its seconds, for a reason for waiting or for none."""
    end = f"@{reason}" if reason else ""
    return tuple((f"{figure}{end}", f"{figure}{end}:s") for figure in ("running", "queued", "usage", "throughput"))


@lru_cache(maxsize=1024)
def _size(running: float) -> str:
    """Return the size under which the seconds of a batch are summed."""
    return f"{running:.0f}" if running <= LARGEST_BATCH else f"{ceil(running / 8) * 8}"
