"""The values that advice names: computed from the facts of the running server and from its load. Pure.

A value that is set already, or that would change nothing, is not given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tuning_exporter.diagnosis.clients import at_least, at_most
from sglang_tuning_exporter.diagnosis.sizing.admission import (
    at_once,
    by_prefix,
    grammar,
    ineffective,
    recovering,
    retracting,
    tolerated,
    too_conservative,
)
from sglang_tuning_exporter.diagnosis.sizing.case import Case, Value, switch_on, word
from sglang_tuning_exporter.diagnosis.sizing.graphs import graph_memory, graphs, graphs_off
from sglang_tuning_exporter.diagnosis.sizing.layout import balance, behind_a_router, dp_attention, experts, one_gpu
from sglang_tuning_exporter.diagnosis.sizing.limits import smaller_batch
from sglang_tuning_exporter.diagnosis.sizing.memory import oom_any, oom_decode, oom_prefill, reserve
from sglang_tuning_exporter.diagnosis.sizing.pools import hybrid, pool_short
from sglang_tuning_exporter.diagnosis.sizing.prefill import between, chunks, long_prompts
from sglang_tuning_exporter.diagnosis.sizing.room import at_limit
from sglang_tuning_exporter.diagnosis.sizing.settings import profile_settings

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SIZERS", "Case", "Value", "tolerated"]

SIZERS: dict[str, Callable[[Case], list[Value]]] = {
    "client_too_slow": at_once(at_least),
    "queue_too_long": at_once(at_most),
    "latency_queue": at_once(at_most),
    "retracting_too_often": retracting,
    "conservativeness_ineffective": ineffective,
    "admission_too_conservative": too_conservative,
    "admission_recovering": recovering,
    "hybrid_pool_full": hybrid,
    "running_at_limit": at_limit,
    "prefill_bound": chunks,
    "latency_long_prompts": long_prompts,
    "latency_batch_too_large": smaller_batch,
    "latency_prefill_between": between,
    "dp_imbalanced": balance,
    "grammar_queue": grammar,
    "running_far_below_limit": pool_short,
    "memory_reserve_too_large": reserve("above"),
    "memory_reserve_too_small": reserve("below"),
    "graph_memory_short": graph_memory,
    "out_of_memory_prefill": oom_prefill,
    "out_of_memory_decode": oom_decode,
    "out_of_memory_any": oom_any,
    "cuda_graph_not_covering": graphs,
    "cuda_graph_off": graphs_off,
    "shared_prefixes_unused": by_prefix,
    "prefix_policy_wasted": word("schedule_policy", "fcfs"),
    "quantization_candidate": word("quantization", "fp8"),
    "data_parallel_would_fit": one_gpu,
    "router_candidate": behind_a_router,
    "prefill_graph_candidate": switch_on("enable_piecewise_cuda_graph"),
    "profile_settings": profile_settings,
    "expert_parallel_candidate": experts,
    "torch_compile_candidate": switch_on("enable_torch_compile"),
    "dp_attention_candidate": dp_attention,
}
