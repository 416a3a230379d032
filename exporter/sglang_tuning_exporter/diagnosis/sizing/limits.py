"""Values for `--max-running-requests`: the limit in force, and fewer requests at once. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_tuning_exporter.capacity.prediction import largest_batch_within, predict
from sglang_tuning_exporter.diagnosis.sizing.advised_value import AdvisedValue, SizingInput
from sglang_tuning_exporter.state.facts import ServerFacts

LOWERED_LIMIT = 0.8  # of the running batch, if the KV cache is too small for it
SMALL_BATCH = 8
LEAST_SHARE = 0.25  # of the batch, in one step


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
    now, recent = predict(ranks), basis.past.latency.get("inter_token")
    if objective is None or now is None:
        return None
    mean = None if recent is None else recent.mean_seconds
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
    least = float(limit.shared_by)
    if min(known) <= least:
        return None
    suggested = max(least, float(int(share * min(known))))
    if current is not None and suggested >= current:
        return None
    return AdvisedValue(suggested, current, arg="max_running_requests")


def smaller_batch(basis: SizingInput) -> list[AdvisedValue]:
    """Lower the batch to meet the objective: by the measured step times, else in proportion to the batch."""
    batch = basis.recent.running_quantile(0.5)
    if batch is not None and batch <= SMALL_BATCH:
        return []  # a small batch does not slow the steps
    recent, objective = basis.past.latency.get("inter_token"), basis.profile.inter_token_seconds
    mean = None if recent is None else recent.mean_seconds
    share = 0.5 if not mean or not objective or mean <= objective else max(objective / mean, LEAST_SHARE)
    fits = batch_within_objective(basis)
    if fits is not None and batch and fits < batch:
        share = max(fits / batch, LEAST_SHARE)
    fewer = run_fewer(basis, 0.5, share)
    return [] if fewer is None else [fewer]
