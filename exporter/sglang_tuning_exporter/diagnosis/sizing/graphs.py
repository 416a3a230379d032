"""Values for CUDA graphs. Pure."""

from __future__ import annotations

from math import floor

from sglang_tuning_exporter.diagnosis.sizing.advised_value import AdvisedValue, SizingInput, in_words
from sglang_tuning_exporter.state.facts import ServerFacts

USUAL_GRAPH_SIZES = (8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768)
LARGEST_GRAPH = USUAL_GRAPH_SIZES[-1]  # the guide names no larger one
BEYOND = (
    "leave it, or run at most {most} at once: 99 % of the time batches hold up to {batch} requests, and the guide calls CUDA graphs"
    " useful up to {most}; in larger batches the launches matter less"
)


def usual_size(batch: float) -> float | None:
    """Return the next usual size that covers a batch; None above the largest."""
    return next((float(size) for size in USUAL_GRAPH_SIZES if size >= batch), None)


def graphs_off(basis: SizingInput) -> list[AdvisedValue]:
    """Remove the switch that disables CUDA graphs, else name a backend that can be captured."""
    backend = basis.facts.args.get("attention_backend")
    name = backend if isinstance(backend, str) else None
    words = "one that can be captured" + (f" (now {name})" if name else "")
    other = AdvisedValue(None, name, arg="attention_backend", words=words)
    for arg in ("disable_cuda_graph", "disable_decode_cuda_graph"):
        if basis.facts.arg(arg):
            return [AdvisedValue(0.0, 1.0, arg=arg, is_switch=True, otherwise=(other,))]
    return [other]


def graph_memory(basis: SizingInput) -> list[AdvisedValue]:
    """Less memory for the KV cache, and no graphs for batches that never run."""
    current = basis.facts.arg("mem_fraction_static")
    suggested = None if current is None else max(round(current - 0.05, 2), 0.1)
    advised = [AdvisedValue(suggested, current)]
    largest, ran = basis.facts.largest_captured, basis.recent.running_quantile(0.99)
    if largest and ran:
        enough = usual_size(ran) or largest
        if 2 * enough <= largest:
            gain = f"99 % of the time at most {ran} requests run together"
            advised.insert(0, AdvisedValue(float(enough), float(largest), gain, basis.facts.graph_flag_arg))
    return advised


def largest_covered(basis: SizingInput) -> float | None:
    """Return the largest batch of one rank with a CUDA graph; None if not known."""
    captured, flag = basis.facts.largest_captured, basis.facts.arg(basis.facts.graph_flag_arg)
    return max(filter(None, (float(captured) if captured else None, flag)), default=None)


def _larger_graph(basis: SizingInput) -> tuple[float | None, float | None, int | None]:
    """Return the present and the next largest captured batch, and the 99th percentile of the batch."""
    facts = basis.facts
    current = facts.arg(facts.graph_flag_arg) or (float(facts.largest_captured) if facts.largest_captured else None)
    batch = basis.recent.running_quantile(0.99)
    if batch is None:
        return current, None, None
    covering, half = usual_size(batch), basis.recent.running_quantile(0.5)
    if covering is None and half is not None and half <= LARGEST_GRAPH:
        covering = float(LARGEST_GRAPH)  # covers more than half of the batches
    return current, covering, batch


def graph_growth_gb(basis: SizingInput) -> float | None:
    """Return the memory that larger graphs take in addition: in proportion to the largest batch."""
    current, suggested, _ = _larger_graph(basis)
    return None if suggested is None or not current else growth_to(basis, suggested / current)


def growth_to(basis: SizingInput, times: float) -> float | None:
    """Return the memory that graphs `times` as large take in addition; None if not known."""
    taken = basis.facts.graph_gb if basis.facts.decode_graph_gb is None else basis.facts.decode_graph_gb
    return None if taken is None else taken * max(times - 1.0, 0.0)


def graphs(basis: SizingInput) -> list[AdvisedValue]:
    """Return the smallest usual size that covers the batch, with less KV cache if the memory left is not enough."""
    arg = basis.facts.graph_flag_arg
    current, suggested, batch = _larger_graph(basis)
    if batch is None:
        return [AdvisedValue(None, current, arg=arg)]
    beyond = in_words(BEYOND.format(most=LARGEST_GRAPH, batch=batch), "graphs_beyond")
    if suggested is None:
        return [beyond]
    if current is not None and suggested <= current:
        return [] if batch <= current else [beyond]
    covers = f"covers batches up to {suggested:g}; 99 % of the time they were at most {batch}"
    paid = _smaller_kv_cache(basis)
    cost = "" if paid else cost_of_growth(basis, graph_growth_gb(basis))
    return [AdvisedValue(suggested, current, covers, arg, cost=cost, set_together=tuple(paid))]


def cost_of_growth(basis: SizingInput, growth: float | None) -> str:
    """Return what larger graphs take of the memory left, in words; empty if not known, or if they leave too little."""
    left = basis.facts.reserve_gb
    if growth is None or left is None or left - growth < basis.profile.reserve_lower_gb:
        return ""
    return f"Larger graphs take about {growth:.1f} GB of the {left:.1f} GB of GPU memory left at start-up."


def _smaller_kv_cache(basis: SizingInput) -> list[AdvisedValue]:
    facts, left, profile = basis.facts, basis.facts.reserve_gb, basis.profile
    fraction, capacity = facts.arg("mem_fraction_static"), facts.memory_before_weights_gb
    if fraction is None or left is None:
        return []
    if not profile.reserve_lower_gb <= left <= profile.reserve_upper_gb:
        return []  # the finding about the memory left includes the larger graphs
    growth = graph_growth_gb(basis)
    if growth is None or not capacity:
        suggested, gain = round(fraction - 0.01, 2), ""
    elif left - growth >= profile.reserve_lower_gb:
        return []
    else:
        suggested = whole_percents(fraction - (profile.reserve_aim_gb - left + growth) / capacity)
        tokens = tokens_gained(facts, (suggested - fraction) * capacity)
        gain = "; ".join(filter(None, (f"the larger graphs take about {growth:.1f} GB", tokens)))
    if not 0.1 <= suggested < fraction:
        return []
    return [AdvisedValue(suggested, fraction, gain, "mem_fraction_static", variant="graphs_take_memory")]


def whole_percents(fraction: float) -> float:
    """Return a memory fraction in the guide's steps of 0.01, rounded away from out of memory."""
    return floor(fraction * 100 + 1e-6) / 100  # 1e-6 corrects for binary fractions


def tokens_gained(facts: ServerFacts, gigabytes: float | None) -> str:
    """Return gigabytes in tokens, in words; empty if not known."""
    tokens = sum(facts.kv_pool_tokens.values()) / max(len(facts.kv_pool_tokens), 1)
    if gigabytes is None or not facts.pools_gb or not tokens:
        return ""
    gained = gigabytes / facts.pools_gb * tokens
    return f"{gigabytes:+.1f} GB for the KV cache: {gained:+,.0f} tokens, {100 * gained / tokens:+.0f} %"
