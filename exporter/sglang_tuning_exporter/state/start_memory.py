"""Where the GPU memory of one start went, rank by rank, with a draft model told from the target. Pure.

A server that speculates loads a draft model after the target, with the same lines: `Load weight begin`, `Load weight end`,
`KV Cache is allocated`, `Memory pool end` (srt/model_executor/model_runner.py; only from 0.5.20 on has a draft's pool a label).
Each rank prints the target's first.
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
    """What one rank printed, in GB; None is not told."""

    before_weights: float | None = None
    before_load: float | None = None  # free before the load that goes on, a draft's included
    weights: float | None = None
    draft_weights: float | None = None
    pool: float | None = (
        None  # all of a model with several: for full attention, sliding windows, states of linear layers
    )
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
        """Give what the weights took; up to 0.4.0 only what is free before and after the load says so."""
        if event.used_gb is not None or self.before_load is None or event.available_gb is None:
            return event.used_gb
        return max(round(self.before_load - event.available_gb, 2), 0.0)

    def take_pool(self, event: KvPool) -> None:
        """Take a pool line: up to the first end of a memory pool they are the target's."""
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
        """Give the account of a rank; beyond the ranks that are remembered, one that nobody looks at again."""
        known = self._ranks.get(rank)
        if known is None:
            known = RankMemory()
            if len(self._ranks) < MOST_RANKS:
                self._ranks[rank] = known
        return known

    def figures(self) -> RankMemory:
        """Give the rank with most of each figure, and what was free before the weights on the rank with least.

        That is what SGLang sizes the pools of all ranks by (`get_available_gpu_memory(distributed=True)`).
        """
        ranks = self._ranks.values()

        def most(told: Iterable[float | None]) -> float | None:
            return max((figure for figure in told if figure is not None), default=None)

        return RankMemory(
            before_weights=min((r.before_weights for r in ranks if r.before_weights is not None), default=None),
            weights=most(rank.weights for rank in ranks),
            draft_weights=most(rank.draft_weights for rank in ranks),
            pool=most(rank.pool for rank in ranks),
            draft_pool=most(rank.draft_pool for rank in ranks),
            graphs=most(rank.graphs for rank in ranks),
            decode_graphs=most(rank.decode_graphs for rank in ranks),
        )
