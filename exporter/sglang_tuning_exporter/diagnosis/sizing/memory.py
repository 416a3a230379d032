"""Values for `--mem-fraction-static`, and what to lower after an out-of-memory failure. Pure."""

from __future__ import annotations

from dataclasses import replace
from math import floor

from sglang_tuning_exporter.diagnosis.sizing.advised_value import AdvisedValue, SizingInput
from sglang_tuning_exporter.diagnosis.sizing.graphs import graph_growth_gb
from sglang_tuning_exporter.diagnosis.sizing.limits import run_fewer
from sglang_tuning_exporter.diagnosis.sizing.pools import tokens_gained
from sglang_tuning_exporter.diagnosis.sizing.prefill import smaller_chunk

LEAST_FRACTION, LARGEST_FRACTION = 0.1, 0.95
FEWER_DECODING = 0.75  # of the running batch, after a failure in decode
# The Chinese edition of SGLang's guide calls 0.7 to 0.9 usual.
USUAL_MOST = 0.9
UNUSUAL = "more than the usual 0.7 to 0.9: raise it by 0.01 at a time and watch for out-of-memory failures"


def reserve(basis: SizingInput, *, too_large: bool) -> list[AdvisedValue]:
    """Change the memory fraction until the middle of the good range is left; `too_large`: more than that is left now."""
    facts, left, profile = basis.facts, basis.facts.reserve_gb, basis.profile
    current = facts.arg("mem_fraction_static")
    if left is None or current is None:
        return [AdvisedValue(None, current)]
    # Larger graphs that are advised as well take their memory first.
    growth = graph_growth_gb(basis) if "cuda_graph_not_covering" in basis.holding else 0.0
    if growth is None and too_large:
        return []
    # The user's own range may differ from the guide's.
    aim = max(min(profile.reserve_aim_gb, profile.reserve_upper_gb), profile.reserve_lower_gb)
    capacity = facts.memory_before_weights_gb
    spare = left - (growth or 0.0) - aim
    step = spare / capacity if capacity else (0.01 if spare > 0 else -0.01)
    # Round away from out of memory, in the guide's steps of 0.01; 1e-6 corrects for binary fractions.
    suggested = min(max(floor((current + step) * 100 + 1e-6) / 100, LEAST_FRACTION), LARGEST_FRACTION)
    if (suggested <= current) if too_large else (suggested >= current):
        return []
    gained = tokens_gained(facts, (suggested - current) * capacity if capacity else None)
    unusual = UNUSUAL if suggested > USUAL_MOST else ""
    return [AdvisedValue(suggested, current, "; ".join(filter(None, (gained, unusual))))]


def oom_prefill(basis: SizingInput) -> list[AdvisedValue]:
    """Lower the chunk; if it is small already, the memory fraction."""
    smaller = smaller_chunk(basis)
    return oom_any(basis) if smaller is None else [replace(smaller, otherwise=tuple(oom_any(basis)))]


def oom_decode(basis: SizingInput) -> list[AdvisedValue]:
    """Run three quarters of the batch; with one running request, lower the memory fraction."""
    fewer = run_fewer(basis, 0.99, FEWER_DECODING)
    return oom_any(basis) if fewer is None else [replace(fewer, otherwise=tuple(oom_any(basis)))]


def oom_any(basis: SizingInput) -> list[AdvisedValue]:
    """Lower the memory fraction to 0.8, then 0.7, then in steps of 0.05."""
    current = basis.facts.arg("mem_fraction_static")
    if current is None or current > 0.7:
        suggested = 0.8 if current is None or current > 0.8 else 0.7
    else:
        suggested = round(current - 0.05, 2)
    if suggested < LEAST_FRACTION:
        return []
    return [AdvisedValue(suggested, current, arg="mem_fraction_static")]
