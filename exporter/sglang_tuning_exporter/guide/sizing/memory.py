"""Sizes for `--mem-fraction-static`, and what is lowered after an out-of-memory failure. Pure."""

from __future__ import annotations

from math import floor
from typing import TYPE_CHECKING

from sglang_tuning_exporter.guide.sizing.case import Value
from sglang_tuning_exporter.guide.sizing.graphs import graph_growth_gb
from sglang_tuning_exporter.guide.sizing.limits import run_fewer
from sglang_tuning_exporter.guide.sizing.pools import tokens_gained

if TYPE_CHECKING:
    from sglang_tuning_exporter.guide.sizing.case import Case

# The guide's Chinese edition calls 0.7 to 0.9 usual.
USUAL_MOST = 0.9
UNUSUAL = "more than the usual 0.7 to 0.9: raise it by 0.01 at a time and watch for out-of-memory failures"


def reserve(case: Case) -> list[Value]:
    """Move the memory fraction until the middle of the good range is left."""
    facts, reserve = case.facts, case.facts.reserve_gb
    too_large = (reserve or 0) > case.profile.reserve_upper_gb
    current = facts.arg("mem_fraction_static")
    if reserve is None or current is None:
        return [Value(None, current)]
    # Larger graphs that are advised beside it take their memory first.
    growth = graph_growth_gb(case) if "cuda_graph_not_covering" in case.held else 0.0
    if growth is None and too_large:
        return []
    capacity = facts.memory_before_weights_gb
    spare = reserve - (growth or 0.0) - case.profile.reserve_aim_gb
    step = spare / capacity if capacity else (0.01 if spare > 0 else -0.01)
    # Round away from OOM, in the guide's steps of 0.01; the small term undoes what binary fractions lose.
    suggested = min(max(floor((current + step) * 100 + 1e-6) / 100, 0.1), 0.95)
    if (suggested <= current) if too_large else (suggested >= current):
        return []
    gained = tokens_gained(facts, (suggested - current) * capacity if capacity else None)
    unusual = UNUSUAL if suggested > USUAL_MOST else ""
    return [Value(suggested, current, "; ".join(filter(None, (gained, unusual))))]


def oom_prefill(case: Case) -> list[Value]:
    """Lower the chunk to 4096, then 2048; then the memory fraction."""
    current = case.facts.arg("chunked_prefill_size")
    # -1 is no chunking at all.
    if current is None or current <= 0 or current > 4096:
        return [Value(4096.0, current)]
    if current > 2048:
        return [Value(2048.0, current)]
    return oom_any(case)


def oom_decode(case: Case) -> list[Value]:
    """Run three quarters of the batch that ran; else lower the memory fraction."""
    fewer = run_fewer(case, 0.99, 0.75)
    return oom_any(case) if fewer is None else [fewer]


def oom_any(case: Case) -> list[Value]:
    """Lower the memory fraction to 0.8, then 0.7, then in steps of 0.05."""
    current = case.facts.arg("mem_fraction_static")
    if current is None or current > 0.7:
        suggested = 0.8 if current is None or current > 0.8 else 0.7
    else:
        suggested = round(current - 0.05, 2)
    if suggested < 0.1:
        return []
    return [Value(suggested, current, arg="mem_fraction_static", row="out_of_memory_any")]
