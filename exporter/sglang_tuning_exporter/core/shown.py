"""What the last batch lines and pages show of a scheduler now, and which of its requests started. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from sglang_tuning_exporter.core.reasons import AT_LIMIT
from sglang_tuning_exporter.sglang.metrics import RankFigures

LEAST_USAGE = 0.05  # printed with two decimals: less says too little of the cache's size
ELSEWHERE = ("bootstrap", "unbootstrapped", "prealloc", "transfer", "transferring", "inflight", "host_receive")
_MORE_POOLS = {"swa": "swa_usage", "mamba": "mamba_usage"}  # beside `full`, by the figure of a line
_RARE = frozenset({*ELSEWHERE, *_MORE_POOLS.values()})  # figures that most lines lack


class Shown:
    """The figures of a scheduler as its last line or page has them; None is not known."""

    def __init__(self) -> None:
        self.running: float | None = None
        self.queued: float | None = None  # in the main queue
        self.usages: dict[str, float] = {}  # of each pool, 0 to 1
        self.usage: float | None = None  # of the fullest pool
        self.graph: bool | None = None  # decode batches replay a CUDA graph
        self.queues: dict[str, float] = {}  # of disaggregation
        self.grammar_queued: float | None = None
        self.pending: tuple[float, float] | None = None  # tokens that wait, and of how many requests
        self.throughput: float | None = None
        self.new_token_ratio: float | None = None
        self.pool: float | None = None  # tokens of the KV cache, by tokens and usage of a line
        self.is_of_page = False  # a page showed what runs and waits
        self._of_lines: set[str] = set()  # pools and queues that lines show; only the present page shows others
        self._is_ratio_of_page = False
        self._ratio_at = -inf  # the time of the last retraction line with a ratio

    @property
    def serves(self) -> bool:
        """Whether requests run or wait."""
        return bool(self.running or self.queued)

    @property
    def elsewhere(self) -> float:
        """How many requests wait for the other side of a pair."""
        return sum(self.queues.values()) if self.queues else 0.0

    def take_line(self, figures: Mapping[str, float]) -> None:
        """Take the figures of a batch line."""
        self.running = figures.get("running", self.running)
        self.queued = figures.get("queued", self.queued)
        self.is_of_page = False
        usages, usage = self.usages, figures.get("usage")
        if not _RARE.isdisjoint(figures):
            self._take_rare(figures)
        if usage is not None:
            usages["full"] = usage
            self._of_lines.add("full")
            if len(usages) == 1:
                self.usage = usage
                return
        self.usage = max(usages.values(), default=None)

    def _take_rare(self, figures: Mapping[str, float]) -> None:
        """Take the pools and queues of a line that most servers do not have."""
        pools = {pool: figures[name] for pool, name in _MORE_POOLS.items() if name in figures}
        queues = {name: figures[name] for name in ELSEWHERE if name in figures}
        self.usages.update(pools)
        self.queues.update(queues)
        self._of_lines |= pools.keys() | queues.keys()

    def take_pool(self, figures: Mapping[str, float]) -> None:
        """Take the size of the KV cache that a decode line shows by its tokens and usage."""
        if figures.get("usage", 0.0) >= LEAST_USAGE and "tokens" in figures:
            self.pool = figures["tokens"] / figures["usage"]

    def take_retraction(self, ratio: float, at: float) -> None:
        """Take the new-token ratio of a retraction line; a line that comes late changes nothing."""
        if at >= self._ratio_at:
            self._ratio_at = at
            self.new_token_ratio, self._is_ratio_of_page = ratio, False

    def take_page(self, figures: RankFigures) -> None:
        """Take the gauges of a page."""
        self.running, self.queued, self.is_of_page = figures.running, figures.queued, True
        self.usages.update(_usages(figures))
        self.usage = max(self.usages.values(), default=None)
        self.throughput = figures.generation_throughput

    def take_queues(self, figures: RankFigures) -> None:
        """Take the queues of a page, and drop those and pools that only earlier pages showed."""
        kept, pools = self._of_lines, _usages(figures)
        self.grammar_queued = figures.grammar_queued
        self.queues = {name: size for name, size in self.queues.items() if name in kept} | figures.queues
        self.usages = {name: usage for name, usage in self.usages.items() if name in kept or name in pools}
        self.usage = max(self.usages.values(), default=None)
        if figures.new_token_ratio is not None or self._is_ratio_of_page:
            self.new_token_ratio, self._is_ratio_of_page = figures.new_token_ratio, True

    def note_empty(self) -> None:
        """Note that nothing runs and nothing waits in the main queue."""
        self.running = self.queued = 0.0

    def forget(self) -> None:
        """Forget the present figures: nothing answers any more."""
        self.running = self.queued = self.usage = self.throughput = self.pending = self.graph = None
        self.grammar_queued = self.new_token_ratio = None
        self.usages.clear()
        self.queues.clear()


class Starts:
    """Which requests started and ended: by these one can say why others wait. Times are those of the last such line."""

    def __init__(self) -> None:
        self.begun = 0.0  # requests that began since the scheduler was idle
        self.are_counted = False  # pages count them
        self.idle_since = -inf  # since when requests wait and none is started
        self._ended_at: float | None = None  # a request ended since the last one was started
        self._at_limit_at = -inf  # the batch had as many requests as the limit allows

    def take_batch(self, ran: float | None, running: float | None, queued: float | None, now: float) -> None:
        """Take what a batch line shows to run and wait. `ran`: what ran before."""
        if running is not None and ran is not None and running < ran:
            self._ended_at = now
        if not queued or (running or 0.0) > (ran or 0.0):
            self.idle_since = now

    def note_start(self, requests: float, now: float) -> None:
        """Note that requests started."""
        self.begun += requests
        self._ended_at, self.idle_since = None, now

    def note_running(self, running: float) -> None:
        """Note a batch. If most of its requests were not seen to begin, the load is older than what was read of it."""
        if running > self.begun:
            self.begun = inf if running > 2 * self.begun else running

    def note_limit(self, running: float | None, limit: float | None, now: float) -> None:
        """Note whether a batch has as many requests as the limit allows."""
        if running is not None and limit is not None and running >= AT_LIMIT * limit:
            self._at_limit_at = now

    def at_limit_seconds(self, now: float) -> float:
        """Return how long ago the batch last reached the limit."""
        return now - self._at_limit_at

    @property
    def ended_seconds(self) -> float:
        """How long after the last start a request ended; -inf if none has ended since."""
        return -inf if self._ended_at is None else self._ended_at - self.idle_since


def _usages(figures: RankFigures) -> dict[str, float]:
    """Return the usage of each pool on a page."""
    usages = {"full": figures.full_usage, "swa": figures.swa_usage, "mamba": figures.mamba_usage}
    return {name: usage for name, usage in usages.items() if usage is not None}
