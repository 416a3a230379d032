"""CUDA graphs that do not fit, or leave too little memory."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_tuning_exporter.diagnosis.conditions.condition import WINDOW, Condition, Samples
from sglang_tuning_exporter.diagnosis.conditions.failures import out_of_memory
from sglang_tuning_exporter.diagnosis.conditions.reserve import MEMORY, memory_limit
from sglang_tuning_exporter.diagnosis.evidence import RESERVE, Evidence, Past
from sglang_tuning_exporter.diagnosis.promql import ON, last_known
from sglang_tuning_exporter.sglang.events import OutOfMemoryPhase

_CAPTURE: OutOfMemoryPhase = "graph_capture"


@dataclass(frozen=True, slots=True)
class GraphMemory(Condition):
    """Graph capture ran out of memory within the window, or left almost nothing."""

    description = "failures in graph capture, or `available_gpu_memory_bytes` below `reserve_least_gb`"
    counted = ((_CAPTURE, WINDOW),)
    measured_by = (_CAPTURE, RESERVE)
    protects = "memory"
    is_event = True
    needs = "a log"

    def measure(self, past: Past) -> Evidence | None:
        failed = past.event_counts.get(_CAPTURE, 0)
        reserve = past.facts.reserve_gb
        if failed or reserve is None or past.facts.without_graph:
            last = past.last_seen(_CAPTURE)
            return Evidence("out-of-memory failures in graph capture", failed, 0, "count", last_seen=last)
        least = past.profile.reserve_least_gb
        return Evidence("available_gpu_mem after graph capture", reserve, least, "GB", below=True)

    def promql(self) -> list[str]:
        return [
            *out_of_memory(_CAPTURE),
            f"or min without (dp_rank) ({MEMORY})",
            f"  < {memory_limit('least')}",
            # Without CUDA graphs they cannot have taken the memory.
            f"  unless {ON} {last_known('sglang_tuning_cuda_graph_off')} == 1",
        ]

    def fires(self, samples: Samples) -> bool:
        reserves = [] if samples.facts.without_graph else samples.reserves
        return self.has_happened(samples) or (bool(reserves) and min(reserves) < samples.limits.reserve_least_gb)
