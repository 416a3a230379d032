"""GPU memory that is left after the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sglang_tuning_exporter.diagnosis.conditions.condition import Condition, Samples
from sglang_tuning_exporter.diagnosis.evidence import RESERVE, Evidence, Past
from sglang_tuning_exporter.diagnosis.promql import ON, last_known, threshold
from sglang_tuning_exporter.state.profiles import Profile

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
