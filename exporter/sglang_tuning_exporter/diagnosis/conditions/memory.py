"""GPU memory: it ran out, CUDA graphs leave too little, or too little or too much is left after the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sglang_tuning_exporter.diagnosis.conditions.condition import WINDOW, Condition, Samples
from sglang_tuning_exporter.diagnosis.evidence import RESERVE, Evidence, Past
from sglang_tuning_exporter.diagnosis.promql import ON, events_increased, last_known, one_of, threshold
from sglang_tuning_exporter.sglang.events import OutOfMemoryPhase
from sglang_tuning_exporter.state.profiles import Profile

COUNT = '{{ $value | printf "%.0f" }}'


def out_of_memory(*phases: OutOfMemoryPhase) -> list[str]:
    """Return PromQL: memory ran out in one of these phases."""
    counter = f"sglang_tuning_out_of_memory_total{{{one_of('phase', phases)}}}"
    return events_increased(counter, "sglang_tuning_out_of_memory_age_seconds", "phase")


@dataclass(frozen=True, slots=True)
class Failures(Condition):
    """The server ran out of memory in one of these phases within the window."""

    protects = "memory"
    figure = COUNT
    is_event = True
    fires_on = "events"
    needs = "a log"

    phases: tuple[OutOfMemoryPhase, ...]

    def measure(self, past: Past) -> Evidence | None:
        count = sum(past.event_counts.get(phase, 0) for phase in self.phases)
        return Evidence("out-of-memory failures", float(count), 0.0, "count", last_seen=self.last_seen(past))

    def promql(self) -> list[str]:
        return out_of_memory(*self.phases)

    @property
    def counted(self) -> tuple[tuple[str, str], ...]:
        return tuple((event, WINDOW) for event in self.phases)

    @property
    def description(self) -> str:
        return f"out of memory in {', '.join(self.phases)}, ten minutes"

    def bound(self, profile: Profile) -> tuple[str, str]:
        return "at least one", " in the last ten minutes"


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


MEMORY = last_known("sglang_tuning_available_gpu_memory_bytes")


def memory_limit(bound: str) -> str:
    """Return PromQL: a threshold of this memory, beside series of any labels."""
    return f"{ON} group_left () {threshold('available_gpu_memory_bytes', bound)}"


@dataclass(frozen=True, slots=True)
class Reserve(Condition):
    """GPU memory left after the start is on this side of the profile's range."""

    description = "`available_gpu_memory_bytes` against `reserve_lower_gb`, `reserve_upper_gb`"
    measured_by = (RESERVE,)
    figure = "{{ $value | humanize1024 }}B"
    needs = "the start in the log, or its memory in SGLang's /server_info"

    side: Literal["above", "below"]

    def measure(self, past: Past) -> Evidence | None:
        reserve, profile, name = past.facts.reserve_gb, past.profile, "available_gpu_mem at start-up"
        if reserve is None:
            return None
        if self.side == "below":
            return Evidence(name, reserve, profile.reserve_lower_gb, "GB", below=True)
        return Evidence(name, reserve, profile.reserve_upper_gb, "GB", good=profile.reserve_good_gb)

    def promql(self) -> list[str]:
        if self.side == "above":
            return [f"max without (dp_rank) ({MEMORY})", f"> {memory_limit('upper')}"]
        return [f"min without (dp_rank) ({MEMORY})", f"< {memory_limit('lower')}"]

    def fires(self, samples: Samples) -> bool:
        if not samples.reserves:
            return False
        if self.side == "above":
            return max(samples.reserves) > samples.limits.reserve_upper_gb
        return min(samples.reserves) < samples.limits.reserve_lower_gb

    def bound(self, profile: Profile) -> tuple[str, str]:
        if self.side == "above":
            return f"more than {profile.reserve_upper_gb:g} GB", ""
        return f"less than {profile.reserve_lower_gb:g} GB", ""
