"""Values for `--mem-fraction-static`, until the GPU memory left after the start is in its range. Pure."""

from __future__ import annotations

from sglang_tuning_exporter.diagnosis.sizing.advised_value import AdvisedValue, SizingInput
from sglang_tuning_exporter.diagnosis.sizing.graphs import graph_growth_gb, tokens_gained, whole_percents

LEAST_FRACTION, LARGEST_FRACTION = 0.1, 0.95
LEAST_POOL = 0.01
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
    suggested = min(max(whole_percents(current + step), LEAST_FRACTION), LARGEST_FRACTION)
    if (suggested <= current) if too_large else (suggested >= current):
        return []
    gained = tokens_gained(facts, (suggested - current) * capacity if capacity else None)
    unusual = UNUSUAL if suggested > USUAL_MOST else ""
    return [AdvisedValue(suggested, current, "; ".join(filter(None, (gained, unusual))))]


def pool_after_reserve(basis: SizingInput) -> float:
    """Return what is left of the KV cache, 0.01 to 1, if the memory for a reserve that is too small is taken from it."""
    facts, capacity = basis.facts, basis.facts.memory_before_weights_gb
    advised = reserve(basis, too_large=False) if "memory_reserve_too_small" in basis.holding else []
    current, suggested = (advised[0].current, advised[0].suggested) if advised else (None, None)
    if not isinstance(suggested, float) or not isinstance(current, float) or not capacity or not facts.pools_gb:
        return 1.0
    return max(1.0 + (suggested - current) * capacity / facts.pools_gb, LEAST_POOL)
