"""Sizes for `--max-running-requests`: what is in force of it, and fewer at once. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_tuning_exporter.capacity.prediction import largest_within, predict
from sglang_tuning_exporter.diagnosis.sizing.case import Value

if TYPE_CHECKING:
    from sglang_tuning_exporter.diagnosis.sizing.case import Case
    from sglang_tuning_exporter.state.facts import ServerFacts

LOWERED_LIMIT = 0.8  # of the batch that runs, where the pool is too small for it
SMALL_BATCH = 8
LEAST_SHARE = 0.25  # of the batch, at once


@dataclass(frozen=True, slots=True)
class _RunningLimit:
    """`--max-running-requests`: its value as a flag, and what of it is in force, both for all that share it."""

    flag: float | None
    in_force: float | None
    shared_by: float

    @property
    def is_cut_short(self) -> bool:
        """Whether the KV pool allows fewer than the flag asks for: then raising the flag changes nothing."""
        return self.flag is not None and self.in_force is not None and self.in_force + self.shared_by <= self.flag


def running_limit(facts: ServerFacts) -> _RunningLimit:
    """Give the limit as a flag, and what of it is in force."""
    shared_by = facts.limit_shared_by
    flag = facts.arg("max_running_requests")
    told = max(filter(None, map(facts.running_limit, facts.running_limits)), default=None)
    return _RunningLimit(flag, flag if told is None else told * shared_by, shared_by)


def batch_within_objective(case: Case) -> float | None:
    """Return the largest batch with which tokens come within the objective, by the measured step times; None where they are not known.

    What the server's histogram has beyond the model's mean (output that waits, prompts between) is taken to stay in proportion.
    """
    objective, ranks = case.profile.inter_token_seconds, case.past.capacities()
    now, recent = predict(ranks), case.past.latency.get("inter_token")
    if objective is None or now is None:
        return None
    mean = None if recent is None else recent.mean_seconds
    slower = max(mean / now.inter_token_mean_seconds, 1.0) if mean else 1.0
    fitting = [largest_within(rank, objective / slower) for rank in ranks]
    return min((each for each in fitting if each is not None), default=None)


def run_fewer(case: Case, quantile: float, share: float) -> Value | None:
    """Run only `share` of the batch that ran; None where one request for each that shares the limit is all there is."""
    limit = running_limit(case.facts)
    ran = case.recent.running_quantile(quantile)
    known = [figure for figure in (limit.in_force, ran * limit.shared_by if ran else None) if figure]
    current = limit.flag or limit.in_force
    if not known:
        return Value(None, current, arg="max_running_requests")
    least = float(limit.shared_by)
    if min(known) <= least:
        return None
    suggested = max(least, float(int(share * min(known))))
    if current is not None and suggested >= current:
        return None
    return Value(suggested, current, arg="max_running_requests")


def smaller_batch(case: Case) -> list[Value]:
    """Bring the step time to the objective: by the measured line where there is one, else as if it grew in proportion to the batch."""
    batch = case.recent.running_quantile(0.5)
    if batch is not None and batch <= SMALL_BATCH:
        return []  # it is not the batch that makes each step slow
    recent, objective = case.past.latency.get("inter_token"), case.profile.inter_token_seconds
    mean = None if recent is None else recent.mean_seconds
    share = 0.5 if not mean or not objective or mean <= objective else max(objective / mean, LEAST_SHARE)
    fits = batch_within_objective(case)
    if fits is not None and batch and fits < batch:
        share = max(fits / batch, LEAST_SHARE)
    fewer = run_fewer(case, 0.5, share)
    return [] if fewer is None else [fewer]
