"""Values for `--max-running-requests`: the limit in force, fewer requests at once, and as many more as the KV cache allows. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from sglang_tuning_exporter.capacity.prediction import largest_batch_within, predict
from sglang_tuning_exporter.diagnosis.sizing.advised_value import AdvisedValue, SizingInput, in_words
from sglang_tuning_exporter.diagnosis.sizing.graphs import cost_of_growth, growth_to, largest_covered, usual_size
from sglang_tuning_exporter.diagnosis.sizing.hybrid import more_states
from sglang_tuning_exporter.diagnosis.sizing.reserve import pool_after_reserve
from sglang_tuning_exporter.sglang.args.flags import is_before
from sglang_tuning_exporter.state.facts import ServerFacts

GRAPHS_FIRST = (
    "first make room for CUDA graphs of {size:g} requests, by a lower --mem-fraction-static: batches beyond {largest:g} would run without"
    " them; then raise both limits"
)
LOWERED_LIMIT = 0.8  # of the running batch, if the KV cache is too small for it
SMALL_BATCH = 8
LEAST_SHARE = 0.25  # of the batch, in one step
MOST_TIMES = 8.0  # in one step; larger ones were never measured
WORTH_IT = 2.0  # times the present limit, without larger graphs


@dataclass(frozen=True, slots=True)
class _RunningLimit:
    """`--max-running-requests` as a flag, and what is in force, both for all ranks that share it."""

    flag: float | None
    in_force: float | None
    shared_by: float

    @property
    def is_cut_short(self) -> bool:
        """Whether the KV cache allows fewer than the flag: then a higher flag has no effect."""
        return self.flag is not None and self.in_force is not None and self.in_force + self.shared_by <= self.flag


def running_limit(facts: ServerFacts) -> _RunningLimit:
    """Return the limit as a flag, and what is in force."""
    shared_by = facts.limit_shared_by
    flag = facts.arg("max_running_requests")
    limit = max(filter(None, map(facts.running_limit, facts.running_limits)), default=None)
    return _RunningLimit(flag, flag if limit is None else limit * shared_by, shared_by)


def batch_within_objective(basis: SizingInput) -> float | None:
    """Return the largest batch that meets the inter-token objective, by the measured step times; None if not known.

    What the server's histogram has beyond the model's mean (output that waits, prefill between) stays in proportion.
    """
    objective, ranks = basis.profile.inter_token_seconds, basis.past.capacities()
    now, mean = predict(ranks), basis.past.mean_seconds("inter_token")
    if objective is None or now is None:
        return None
    slower = max(mean / now.inter_token_mean_seconds, 1.0) if mean else 1.0
    fitting = [largest_batch_within(rank, objective / slower) for rank in ranks]
    return min((each for each in fitting if each is not None), default=None)


def run_fewer(basis: SizingInput, quantile: float, share: float) -> AdvisedValue | None:
    """Run only `share` of the batch; None if there is one request for each rank."""
    limit = running_limit(basis.facts)
    ran = basis.recent.running_quantile(quantile)
    known = [figure for figure in (limit.in_force, ran * limit.shared_by if ran else None) if figure]
    current = limit.flag or limit.in_force
    if not known:
        return AdvisedValue(None, current, arg="max_running_requests")
    suggested = float(max(limit.shared_by, int(share * min(known))))
    if min(known) <= limit.shared_by or (current is not None and suggested >= current):
        return None
    return AdvisedValue(suggested, current, arg="max_running_requests")


def smaller_batch(basis: SizingInput) -> list[AdvisedValue]:
    """Lower the batch to meet the objective: by the measured step times, else in proportion to the batch."""
    batch = basis.recent.running_quantile(0.5)
    if batch is not None and batch <= SMALL_BATCH:
        return []  # a small batch does not slow the steps
    mean, objective = basis.past.mean_seconds("inter_token"), basis.profile.inter_token_seconds
    share = 0.5 if not mean or not objective or mean <= objective else max(objective / mean, LEAST_SHARE)
    fits = batch_within_objective(basis)
    if fits is not None and batch and fits < batch:
        share = max(fits / batch, LEAST_SHARE)
    fewer = run_fewer(basis, 0.5, share)
    return [] if fewer is None else [fewer]


def at_limit(basis: SizingInput) -> list[AdvisedValue]:
    """Raise the limit as far as the KV cache allows, and the largest graph with it."""
    limit = running_limit(basis.facts)
    current = limit.flag or limit.in_force
    usage = basis.recent.mean("usage")
    if not current or usage is None:
        return [AdvisedValue(None, current)]
    states = more_states(basis)
    if states is not None:
        return states
    # Token usage grows with the running requests, and with what the same advice takes from the KV cache.
    pool = pool_after_reserve(basis)
    room = min(MOST_TIMES, basis.profile.token_usage_target * pool / usage) if usage > 0 else MOST_TIMES
    running, in_time = basis.recent.mean("running"), batch_within_objective(basis)
    if running and in_time is not None:
        room = min(room, max(in_time / running, 1.0))
    if "latency_batch_too_large" in basis.holding:
        room = min(room, max(SMALL_BATCH * limit.shared_by / current, 1.0))  # a larger batch would be lowered again
    share, size = basis.facts.room_for_micro_batch, basis.facts.arg(basis.facts.micro_batch_arg)
    if share and size:
        suggested = min(float(_round_down(size * room)), share)
        gain = _room(usage, suggested / size / pool, " of each micro batch")
        return [AdvisedValue(suggested, size, gain, basis.facts.micro_batch_arg)] if suggested > size else []
    suggested = float(_round_down(current * room))
    # A limit that was lowered because of retractions leaves this much free, and must not be raised again for it.
    if limit.is_cut_short or suggested <= current or LOWERED_LIMIT * suggested <= current + 1:
        return []
    suggested, graph, note = _within_graphs(basis, suggested, current, limit.shared_by)
    if suggested <= current:
        return graph
    gain = _room(usage, suggested / current / pool, "") + note
    return [AdvisedValue(suggested, current, gain), *graph]


def _room(usage: float, times: float, of: str) -> str:
    return f"token usage is {usage:.2f} at this limit{of}, about {min(usage * times, 1.0):.2f} at the new one"


def _within_graphs(
    basis: SizingInput, suggested: float, current: float, shared_by: float
) -> tuple[float, list[AdvisedValue], str]:
    """Keep the larger batch within the captured graphs, or raise those too; `current` if their memory must be found first."""
    facts, batch = basis.facts, ceil(suggested / shared_by)
    largest = largest_covered(basis)
    if largest is None or batch <= largest or facts.without_graph or _graphs_follow(basis, current, shared_by):
        return suggested, [], ""
    if largest * shared_by >= WORTH_IT * current:
        return largest * shared_by, [], f"; CUDA graphs cover batches up to {largest:g}"
    size = usual_size(batch)
    if size is None:
        return suggested, [], f"; batches beyond {largest:g} will run without CUDA graphs"
    cost = cost_of_growth(basis, growth_to(basis, size / largest))
    if not cost:
        return current, [in_words(GRAPHS_FIRST.format(size=size, largest=largest), "graphs_first")], ""
    gain = f"covers batches up to {size:g}, {batch} will run"
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
