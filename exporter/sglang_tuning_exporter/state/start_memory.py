"""GPU memory of one start by rank, of the target and of a draft model. Pure.

With speculative decoding a server loads a draft model after the target, with the same lines: `Load weight begin`, `Load weight end`,
`KV Cache is allocated`, `Memory pool end` (srt/model_executor/model_runner.py; a draft's pool has a label from 0.5.20 on). Each rank
prints the target's first.
"""

from __future__ import annotations

from sglang_tuning_exporter.sglang.events import MOST_RANKS, KvPool, Memory, Rank

# The figures of a rank, as they are named in `ServerFacts`; of several ranks the largest one counts.
_FIGURES = ("weights_gb", "draft_weights_gb", "kv_pool_gb", "draft_pool_gb", "graph_gb", "decode_graph_gb")


class RankMemory:
    """The memory lines of one rank, in GB."""

    def __init__(self) -> None:
        self.before_weights: float | None = None
        self.gigabytes: dict[str, float] = {}  # by name in `_FIGURES`
        self._before_load: float | None = None  # free before the last load, a draft's included
        self._pool_ended = False

    def take(self, event: Memory) -> None:
        """Take a memory line."""
        if event.stage == "weights_begin":
            self.before_weights = event.available_gb if self.before_weights is None else self.before_weights
            self._before_load = event.available_gb
        elif event.stage == "pool":
            self._pool_ended = True
        used = self._loaded(event) if event.stage == "weights" else event.used_gb
        if used is None:
            return
        if event.stage == "weights":
            self._add("draft_weights_gb" if "weights_gb" in self.gigabytes else "weights_gb", used)
        elif event.stage == "state_cache":
            self._add_pool(used)
        elif event.stage == "graph":
            self._add("graph_gb", used)
            if not event.of_prefill:
                self._add("decode_graph_gb", used)

    def _loaded(self, event: Memory) -> float | None:
        """Return the memory of the weights; up to 0.4.0 it is the difference of the memory free before and after the load."""
        if event.used_gb is not None or self._before_load is None or event.available_gb is None:
            return event.used_gb
        return max(round(self._before_load - event.available_gb, 2), 0.0)

    def take_pool(self, event: KvPool) -> None:
        """Take a pool line; up to the first `Memory pool end` they are the target's."""
        if event.gigabytes is None:
            return
        if event.resized or (self._pool_ended and "kv_pool_gb" not in self.gigabytes):
            self.gigabytes["kv_pool_gb"] = event.gigabytes
        else:
            self._add_pool(event.gigabytes)

    def _add_pool(self, gigabytes: float) -> None:
        self._add("draft_pool_gb" if self._pool_ended else "kv_pool_gb", gigabytes)

    def _add(self, name: str, gigabytes: float) -> None:
        self.gigabytes[name] = self.gigabytes.get(name, 0.0) + gigabytes


class StartMemory:
    """All ranks of one start."""

    def __init__(self) -> None:
        self._ranks: dict[Rank, RankMemory] = {}

    def of(self, rank: Rank) -> RankMemory:
        """Return the memory of a rank; beyond the ranks that are kept, one that nobody reads."""
        known = self._ranks.get(rank)
        if known is None:
            known = RankMemory()
            if len(self._ranks) < MOST_RANKS:
                self._ranks[rank] = known
        return known

    def figures(self) -> dict[str, float]:
        """Return the most of each figure, and the least memory that was free before the weights, as named in `ServerFacts`.

        SGLang sizes the pools of all ranks by the latter (`get_available_gpu_memory(distributed=True)`).
        """
        ranks = self._ranks.values()
        free = [rank.before_weights for rank in ranks if rank.before_weights is not None]
        known = {name: [rank.gigabytes[name] for rank in ranks if name in rank.gigabytes] for name in _FIGURES}
        most = {name: max(figures) for name, figures in known.items() if figures}
        return {**most, "memory_before_weights_gb": min(free, default=0.0)}
