"""The gauges of one scheduler: what it showed last, in the log or in a scrape. Pure."""

from __future__ import annotations

from sglang_tuning_exporter.sglang.events import DecodeBatch
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
from sglang_tuning_exporter.state.admission import OtherQueues
from sglang_tuning_exporter.state.kv_cache import Prompts
from sglang_tuning_exporter.state.signals import HOLD_SECONDS
from sglang_tuning_exporter.state.totals import Totals


class Gauges:
    """Requests, usage, graph, throughput and queues; None where nothing is known."""

    def __init__(self, totals: Totals, prompts: Prompts) -> None:
        self.totals = totals
        self.prompts = prompts
        self.other_queues = OtherQueues()
        self.clear()

    def clear(self) -> None:
        """Forget all: nothing was seen for too long, or the server started again."""
        self.running: float | None = None
        self.queued: float | None = None
        self.usages: dict[str, float] = {}  # by pool, 0-1
        self.usage: float | None = None  # of the fullest pool
        self.graph: bool | None = None  # the last batches replayed a captured graph
        self.new_token_ratio: float | None = None
        self._throughput: float | None = None
        self._last_decode: DecodeBatch | BatchRun | None = None  # whose throughput was not read yet
        self._joined: float = 0  # requests in the last prefill batch: they run, and `running` does not contain them
        self._fullest = ("", 0.0)  # the pool that requests wait for, and since when
        self.prompts.forget()
        self.other_queues.clear()

    def rest(self) -> None:
        """Set the queues and prompts of an idle scheduler."""
        self.other_queues.idle()
        self._fullest = ("", 0.0)
        self.prompts.rest()

    def become_idle(self) -> None:
        """Set the gauges of a scheduler of which nothing was seen, and that is therefore idle."""
        self.rest()
        self.running = self.queued = 0.0
        self.usages = dict.fromkeys(self.usages, 0.0)
        self.usage = 0.0 if self.usages else None

    @property
    def generation_throughput(self) -> float | None:
        """Generated tokens per second, of the last decode line or scrape."""
        if self._last_decode is not None:
            self._throughput, self._last_decode = self._last_decode.generation_throughput, None
        return self._throughput

    @property
    def pending_tokens(self) -> float | None:
        """Tokens of prompts that wait, of the last prefill line that has them."""
        return self.prompts.pending_tokens

    def _set_throughput(self, figure: float | None) -> None:
        self._throughput, self._last_decode = figure, None

    def _set_usages(self, full: float | None, swa: float | None, mamba: float | None) -> None:
        for pool, usage in (("full", full), ("swa", swa), ("mamba", mamba)):
            if usage is not None:
                self.usages[pool] = usage
        self.usage = max(self.usages.values(), default=None)

    def _weigh_pools(self, now: float, *, limits: bool) -> None:
        """Count the seconds in which requests waited for a pool beside the main one, by pool: the advice is for one of them."""
        pool, since = self._fullest
        if pool:
            self.totals.counts[f"{pool}_pool_seconds"] += min(max(now - since, 0.0), HOLD_SECONDS)
        self._fullest = (max(self.usages, key=self.usages.__getitem__) if limits else "", now)
