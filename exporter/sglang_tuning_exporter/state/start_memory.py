"""GPU memory of one start by rank, of the target and of a draft model. Pure.

With speculative decoding a server loads a draft model after the target, with the same lines: `Load weight begin`, `Load weight end`,
`KV Cache is allocated`, `Memory pool end` (srt/model_executor/model_runner.py; a draft's pool has a label from 0.5.20 on). Each rank
prints the target's first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_tuning_exporter.sglang.events import MOST_RANKS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_tuning_exporter.sglang.events import KvPool, Memory, Rank


@dataclass(slots=True)
class RankMemory:
    """The memory lines of one rank, in GB; None is unknown."""

    before_weights: float | None = None
    before_load: float | None = None  # free before the last load, a draft's included
    weights: float | None = None
    draft_weights: float | None = None
    pool: float | None = None  # of all pools: full attention, sliding windows, states of linear layers
    draft_pool: float | None = None
    graphs: float | None = None  # all captures
    decode_graphs: float | None = None  # those that grow with the largest captured decode batch, a draft's among them
    pool_ended: bool = False

    def take(self, event: Memory) -> None:
        """Take a memory line."""
        if event.stage == "weights_begin":
            self.before_weights = event.available_gb if self.before_weights is None else self.before_weights
            self.before_load = event.available_gb
        elif event.stage == "pool":
            self.pool_ended = True
        used = self._loaded(event) if event.stage == "weights" else event.used_gb
        if used is None:
            return
        if event.stage == "weights":
            if self.weights is None:
                self.weights = used
            else:
                self.draft_weights = (self.draft_weights or 0.0) + used
        elif event.stage == "state_cache":
            self._add_pool(used)
        elif event.stage == "graph":
            self.graphs = (self.graphs or 0.0) + used
            if not event.of_prefill:
                self.decode_graphs = (self.decode_graphs or 0.0) + used

    def _loaded(self, event: Memory) -> float | None:
        """Return the memory of the weights; up to 0.4.0 it is the difference of the memory free before and after the load."""
        if event.used_gb is not None or self.before_load is None or event.available_gb is None:
            return event.used_gb
        return max(round(self.before_load - event.available_gb, 2), 0.0)

    def take_pool(self, event: KvPool) -> None:
        """Take a pool line; up to the first `Memory pool end` they are the target's."""
        if event.gigabytes is None:
            return
        if event.resized or (self.pool_ended and self.pool is None):
            self.pool = event.gigabytes
        else:
            self._add_pool(event.gigabytes)

    def _add_pool(self, gigabytes: float) -> None:
        if self.pool_ended:
            self.draft_pool = (self.draft_pool or 0.0) + gigabytes
        else:
            self.pool = (self.pool or 0.0) + gigabytes


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

    def figures(self) -> RankMemory:
        """Return the most of each figure, and the least memory that was free before the weights.

        SGLang sizes the pools of all ranks by the latter (`get_available_gpu_memory(distributed=True)`).
        """
        ranks = self._ranks.values()

        def most(figures: Iterable[float | None]) -> float | None:
            return max((figure for figure in figures if figure is not None), default=None)

        return RankMemory(
            before_weights=min((r.before_weights for r in ranks if r.before_weights is not None), default=None),
            weights=most(rank.weights for rank in ranks),
            draft_weights=most(rank.draft_weights for rank in ranks),
            pool=most(rank.pool for rank in ranks),
            draft_pool=most(rank.draft_pool for rank in ranks),
            graphs=most(rank.graphs for rank in ranks),
            decode_graphs=most(rank.decode_graphs for rank in ranks),
        )
