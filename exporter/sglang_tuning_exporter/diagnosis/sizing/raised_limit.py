"""A higher `--max-running-requests`: as far as the KV cache allows, and the largest CUDA graph with it. Pure."""

from __future__ import annotations

from math import ceil

from sglang_tuning_exporter.diagnosis.sizing.advised_value import AdvisedValue, SizingInput
from sglang_tuning_exporter.diagnosis.sizing.graphs import growth_to, largest_covered, usual_size
from sglang_tuning_exporter.diagnosis.sizing.limits import (
    LOWERED_LIMIT,
    SMALL_BATCH,
    batch_within_objective,
    running_limit,
)
from sglang_tuning_exporter.sglang.args.flags import is_before

MOST_TIMES = 8.0  # in one step; larger ones were never measured
WORTH_IT = 2.0  # times the present limit, without larger graphs


def at_limit(basis: SizingInput) -> list[AdvisedValue]:
    """Raise the limit as far as the KV cache allows, and the largest graph with it."""
    limit = running_limit(basis.facts)
    current = limit.flag or limit.in_force
    usage = basis.recent.mean("usage")
    if not current or usage is None:
        return [AdvisedValue(None, current)]
    # Token usage grows with the running requests.
    room = min(MOST_TIMES, basis.profile.token_usage_target / usage) if usage > 0 else MOST_TIMES
    running, in_time = basis.recent.mean("running"), batch_within_objective(basis)
    if running and in_time is not None:
        room = min(room, max(in_time / running, 1.0))
    if "latency_batch_too_large" in basis.holding:
        room = min(room, max(SMALL_BATCH * limit.shared_by / current, 1.0))  # a larger batch would be lowered again
    share, size = basis.facts.room_for_micro_batch, basis.facts.arg(basis.facts.micro_batch_arg)
    if share and size:
        suggested = min(float(_round_down(size * room)), share)
        gain = _room(usage, suggested / size, " of each micro batch")
        return [AdvisedValue(suggested, size, gain, basis.facts.micro_batch_arg)] if suggested > size else []
    suggested = float(_round_down(current * room))
    # A limit that was lowered because of retractions leaves this much free, and must not be raised again for it.
    if limit.is_cut_short or suggested <= current or LOWERED_LIMIT * suggested <= current + 1:
        return []
    suggested, graph, note = _within_graphs(basis, suggested, current, limit.shared_by)
    gain = _room(usage, suggested / current, "") + note
    return [AdvisedValue(suggested, current, gain), *graph]


def _room(usage: float, times: float, of: str) -> str:
    return f"token usage is {usage:.2f} at this limit{of}, about {min(usage * times, 1.0):.2f} at the new one"


def _within_graphs(
    basis: SizingInput, suggested: float, current: float, shared_by: float
) -> tuple[float, list[AdvisedValue], str]:
    """Keep the larger batch within the captured graphs, or raise those too; say so if neither is possible."""
    facts, batch = basis.facts, ceil(suggested / shared_by)
    largest = largest_covered(basis)
    if largest is None or batch <= largest or facts.without_graph or _graphs_follow(basis, current, shared_by):
        return suggested, [], ""
    if largest * shared_by >= WORTH_IT * current:
        return largest * shared_by, [], f"; CUDA graphs cover batches up to {largest:g}"
    size, left = usual_size(batch), facts.reserve_gb
    growth = None if size is None else growth_to(basis, size / largest)
    pays = left is not None and growth is not None and left - growth >= basis.profile.reserve_lower_gb
    if size is None or not pays:
        return suggested, [], f"; batches beyond {largest:g} will run without CUDA graphs"
    gain = f"covers batches up to {size:g}, {batch} will run"
    cost = f"Larger graphs take about {growth:.1f} GB of the {left:.1f} GB of GPU memory left at start-up."
    return suggested, [AdvisedValue(size, largest, gain, facts.graph_flag_arg, cost=cost)], ""


def _graphs_follow(basis: SizingInput, current: float, shared_by: float) -> bool:
    """Return whether the largest graph follows the running limit (0.5.14 on, if it was not typed)."""
    release = basis.facts.release
    if release is None or is_before(release, (0, 5, 14)) or basis.facts.arg(basis.facts.graph_flag_arg):
        return False
    return basis.facts.largest_captured in (int(current), int(current // shared_by))


def _round_down(value: float) -> int:
    step = 1 if value < 32 else 8 if value < 256 else 64
    return max(int(value) // step * step, 1)
