"""Whether to tune a server or to add a replica: its demand over its capacity, and whether a replica helps. Pure.

Demand is the largest of prefill, tokens per second, inter-token latency and KV cache, each over what the server can
do within its objectives. Tokens per second grow in proportion to the requests; running requests and KV cache grow
faster near the limit, so a fleet scaled by these alone shrinks too far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from sglang_tuning_exporter.capacity.prediction import largest_batch_within, predict, predict_batches
from sglang_tuning_exporter.capacity.ranks import RankCapacity
from sglang_tuning_exporter.core.findings import Judgement
from sglang_tuning_exporter.core.judge import NOT_ENOUGH, STARTING, STOPPED
from sglang_tuning_exporter.core.view import View

DEMAND_SECONDS = 120.0  # of the present, unlike a diagnosis: a fleet should follow it
LEAST_KNOWN_SHARE = 0.5  # of those seconds

# Verdicts with which another replica takes load off this server.
REPLICA = frozenset({"queue_too_long", "requests_rejected", "clients_time_out", "latency_queue", "latency_batch_too_large"})  # fmt: skip
# The same, unless a flag is left to set: that comes first.
FLAG_FIRST = frozenset({
    "conservativeness_ineffective", "retracting_too_often", "hybrid_pool_full", "running_at_limit", "running_far_below_limit",
    "admission_recovering", "prefill_bound", "admission_too_conservative", "cuda_graph_not_covering", "cuda_graph_off",
    "latency_prefill_between", "latency_long_prompts", "shared_prefixes_unused", "flags_away_from_defaults",
})  # fmt: skip
# Verdicts of a server whose demand is not known. With every other verdict a replica does not help.
UNKNOWN = frozenset({NOT_ENOUGH, STARTING, STOPPED, "server_down", "scheduler_stuck"})


class DemandRatio(NamedTuple):
    """One kind of demand over the server's capacity: 1 is all it can do."""

    of: Literal["prefill", "generation", "inter_token", "kv_cache"]
    ratio: float


def scale_out_helps(judgement: Judgement) -> bool | None:
    """Return whether another replica would take load off this server; None if not known."""
    verdict = judgement.verdict
    if verdict in UNKNOWN:
        return None
    if verdict in FLAG_FIRST:
        changes = next((found.changes for found in judgement.findings if found.diagnosis == verdict), ())
        return not any(change.flag for change in changes)
    return verdict in REPLICA


def is_away(view: View) -> bool:
    """Return whether the server is down, stopped, stuck or starting: then its demand is not known."""
    return view.starting or view.stopped or bool(view.down) or view.stuck is not None


def demands(view: View, ranks: Sequence[RankCapacity]) -> list[DemandRatio]:
    """Return each demand that is known of the last `DEMAND_SECONDS`; all are 0 for an idle server."""
    serving, idle = sum(view.under("serves").values()), view.totals["queue/idle"]
    known = serving + idle
    if is_away(view) or not known or known < LEAST_KNOWN_SHARE * sum(view.under("queue").values()):
        return []
    busy = serving / known
    found = [_kv_cache(view, busy)]
    if busy:
        found += [_prefill(view, ranks, busy), _generation(view, ranks, busy), _inter_token(view, ranks, busy)]
    return [each for each in found if each is not None]


def capacity_ratio(view: View, ranks: Sequence[RankCapacity]) -> float | None:
    """Return the largest demand over capacity; None if none is known."""
    return max((each.ratio for each in demands(view, ranks)), default=None)


def _kv_cache(view: View, busy: float) -> DemandRatio | None:
    """KV cache needed if waiting requests held as much as running ones, over the KV cache."""
    if not busy:
        return DemandRatio("kv_cache", 0.0)
    usage, running, queued = (view.mean(figure) for figure in ("usage", "running", "queued"))
    if usage is None or running is None or queued is None:
        return None
    if not running:
        # Only a prefill was seen, such as that of a health check: nothing was decoded, so what a request holds is not known.
        return None if queued else DemandRatio("kv_cache", 0.0)
    running *= view.facts.micro_batches
    return DemandRatio("kv_cache", busy * usage * (running + queued) / running)


def _prefill(view: View, ranks: Sequence[RankCapacity], busy: float) -> DemandRatio | None:
    """The longest prefill backlog over the objective for the first token."""
    objective = view.profile.time_to_first_token_seconds
    backlogs = [each.backlog_seconds for each in ranks]
    longest = max((each.value for each in backlogs if each is not None), default=None)
    return None if objective is None or longest is None else DemandRatio("prefill", busy * longest / objective)


def _generation(view: View, ranks: Sequence[RankCapacity], busy: float) -> DemandRatio | None:
    """Tokens per second over those with as many requests as fit, may run and meet the objective, by the step times."""
    objective, running = view.profile.inter_token_seconds, view.mean("running") or 0.0
    most: list[float] = []
    for rank in ranks:
        in_time = None if objective is None else largest_batch_within(rank, objective)
        if rank.most_requests is None or in_time == 0:
            return None
        most.append(min(rank.most_requests, in_time or rank.most_requests))
    now, best = predict_batches(ranks, [running] * len(ranks)), predict_batches(ranks, most)
    if now is None or best is None:
        return None
    return DemandRatio("generation", busy * now.tokens_per_second.value / best.tokens_per_second.value)


def _inter_token(view: View, ranks: Sequence[RankCapacity], busy: float) -> DemandRatio | None:
    """Mean inter-token latency over its objective: the server's own, else the model's at the present batch."""
    objective, seen = view.profile.inter_token_seconds, view.latency("inter_token")
    seconds = None if seen is None else seen.mean_seconds or None  # 0: the sum is not exposed
    if seconds is None:
        model = predict(ranks)
        seconds = None if model is None else model.inter_token_mean_seconds
    return None if objective is None or seconds is None else DemandRatio("inter_token", busy * seconds / objective)
