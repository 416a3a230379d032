"""Sizes for CUDA graphs. Pure."""

from __future__ import annotations

from math import floor
from typing import TYPE_CHECKING

from sglang_tuning_exporter.guide.sizing.case import Value
from sglang_tuning_exporter.guide.sizing.pools import tokens_gained

if TYPE_CHECKING:
    from sglang_tuning_exporter.guide.sizing.case import Case

USUAL_GRAPH_SIZES = (
    *(8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256),
    *(320, 384, 448, 512, 640, 768),
)


def graphs_off(case: Case) -> list[Value]:
    """Remove the switch that keeps graphs off; without one, ask for a backend that can be captured."""
    for arg in ("disable_cuda_graph", "disable_decode_cuda_graph"):
        if case.facts.arg(arg):
            return [Value(0.0, 1.0, arg=arg, words="start without it", is_switch=True)]
    backend = case.facts.args.get("attention_backend")
    told = f" (now {backend})" if isinstance(backend, str) else ""
    return [
        Value(
            None,
            backend if isinstance(backend, str) else None,
            arg="attention_backend",
            words=f"one that can be captured{told}",
        )
    ]


def graph_memory(case: Case) -> list[Value]:
    """Less for the pool, in the guide's steps; and no graphs for batches that never run."""
    current = case.facts.arg("mem_fraction_static")
    suggested = None if current is None else max(round(current - 0.05, 2), 0.1)
    advised = [Value(suggested, current)]
    largest, ran = case.facts.largest_captured, case.recent.running_quantile(0.99)
    if largest and ran:
        enough = next((size for size in USUAL_GRAPH_SIZES if size >= ran), largest)
        if 2 * enough <= largest:
            gain = f"99 % of the time at most {ran} requests run together"
            advised.insert(0, Value(float(enough), float(largest), gain, case.facts.graph_flag_arg))
    return advised


def _larger_graph(case: Case) -> tuple[float | None, float | None, int | None]:
    """Give the present and the next largest captured batch, and the batch that is not exceeded 99 % of the time."""
    current = case.facts.arg(case.facts.graph_flag_arg) or (
        float(case.facts.largest_captured) if case.facts.largest_captured else None
    )
    batch = case.recent.running_quantile(0.99)
    if batch is None:
        return current, None, None
    # Useful to 512, with much tensor parallelism to 768 (E5).
    most = 768 if (case.facts.arg("tp_size") or 1) >= 8 else 512
    return current, float(min(next((size for size in USUAL_GRAPH_SIZES if size >= batch), most), most)), batch


def graph_growth_gb(case: Case) -> float | None:
    """Estimate the memory that larger graphs take beyond the present ones: in proportion to the largest batch."""
    current, suggested, _ = _larger_graph(case)
    graphs = case.facts.graph_gb if case.facts.decode_graph_gb is None else case.facts.decode_graph_gb
    if suggested is None or not current or graphs is None:
        return None
    return graphs * max(suggested / current - 1.0, 0.0)


def graphs(case: Case) -> list[Value]:
    """The smallest usual size that covers the batch, and what its memory costs the pool where the reserve cannot pay for it."""
    arg = case.facts.graph_flag_arg
    current, suggested, batch = _larger_graph(case)
    if suggested is None:
        return [Value(None, current, arg=arg, row="cuda_graph_not_covering")]
    if current is not None and suggested <= current:
        return []
    gain = f"covers batches up to {suggested:g}; 99 % of the time they were at most {batch}"
    return [Value(suggested, current, gain, arg, row="cuda_graph_not_covering"), *_paid_by_pool(case)]


def _paid_by_pool(case: Case) -> list[Value]:
    facts, reserve, profile = case.facts, case.facts.reserve_gb, case.profile
    fraction, capacity = facts.arg("mem_fraction_static"), facts.memory_before_weights_gb
    if fraction is None or reserve is None:
        return []
    if not profile.reserve_lower_gb <= reserve <= profile.reserve_upper_gb:
        return []  # the finding of a reserve too small or too large accounts for the larger graphs
    growth = graph_growth_gb(case)
    if growth is None or not capacity:
        suggested, told = round(fraction - 0.01, 2), ""
    elif reserve - growth >= profile.reserve_lower_gb:
        return []
    else:
        suggested = floor((fraction - (profile.reserve_aim_gb - reserve + growth) / capacity) * 100 + 1e-6) / 100
        told = (
            f"the larger graphs take about {growth:.1f} GB; {tokens_gained(facts, (suggested - fraction) * capacity)}"
        )
    if not 0.1 <= suggested < fraction:
        return []
    return [Value(suggested, fraction, told.removesuffix("; "), "mem_fraction_static", row="memory_reserve_too_small")]
