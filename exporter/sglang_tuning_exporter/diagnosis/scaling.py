"""Whether to tune a server or to add a replica: its demand over its capacity, and whether a replica helps. Pure.

Demand is the largest of prefill, tokens per second, inter-token latency and KV cache, each over what the server can
do within its objectives. Tokens per second grow in proportion to the requests; running requests and KV cache grow
faster near the limit, so a fleet scaled by these alone shrinks too far. Whether a replica helps is in the verdict's
row (`scale_out`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from sglang_tuning_exporter.capacity.prediction import largest_batch_within, predict, predict_batches
from sglang_tuning_exporter.diagnosis.evidence import Past
from sglang_tuning_exporter.diagnosis.findings import HEALTHY, IDLE, NO_CLEAR_BOTTLENECK, Judgement
from sglang_tuning_exporter.diagnosis.table import BY_ID

DEMAND_SECONDS = 120.0  # of the present, unlike a diagnosis: a fleet should follow it
LEAST_KNOWN_SHARE = 0.5  # of those seconds

# Verdicts without a row for which a replica does not help.
_NO_HELP = (HEALTHY, IDLE, NO_CLEAR_BOTTLENECK)


class DemandRatio(NamedTuple):
    """One kind of demand over the server's capacity: 1 is all it can do."""

    of: Literal["prefill", "generation", "inter_token", "kv_cache"]
    ratio: float


def scale_out_helps(judgement: Judgement) -> bool | None:
    """Return whether another replica would take load off this server; None if not known."""
    if is_away(judgement.past):
        return None
    if judgement.verdict in _NO_HELP:
        return False
    row = BY_ID.get(judgement.verdict)
    if row is None or row.scale_out is None:
        return None
    if row.scale_out != "flag_first":
        return row.scale_out == "replica"
    advice = next((found.advice for found in judgement.findings if found.diagnosis is row), ())
    return not any(each.is_set or each.flag for each in advice)


def is_away(past: Past) -> bool:
    """Return whether the server is down, stuck or starting: then its demand is not known, and no replica helps."""
    return past.starting or bool(past.stage) or "server_down" in past.troubles


def demands(past: Past) -> list[DemandRatio]:
    """Return each demand that is known of the past; all are 0 for an idle server."""
    known = past.recent.seconds["activity", "idle"] + past.recent.serving_seconds()
    seconds = known + past.recent.seconds["activity", "unknown"]
    if is_away(past) or not known or known < LEAST_KNOWN_SHARE * seconds:
        return []
    busy = past.recent.serving_seconds() / known
    found = [_kv_cache(past, busy)]
    if busy:
        found += [_prefill(past, busy), _generation(past, busy), _inter_token(past, busy)]
    return [each for each in found if each is not None]


def capacity_ratio(past: Past) -> float | None:
    """Return the largest demand over capacity; None if none is known."""
    return max((each.ratio for each in demands(past)), default=None)


def _kv_cache(past: Past, busy: float) -> DemandRatio | None:
    """KV cache needed if waiting requests held as much as running ones, over the KV cache."""
    if not busy:
        return DemandRatio("kv_cache", 0.0)
    usage, running, queued = (past.recent.mean(figure) for figure in ("usage", "running", "queued"))
    if usage is None or running is None or queued is None:
        return None
    if not running:
        # Only a prefill was seen, such as that of a health check: nothing was decoded, so what a request holds is not known.
        return None if queued else DemandRatio("kv_cache", 0.0)
    return DemandRatio("kv_cache", busy * usage * (running + queued) / running)


def _prefill(past: Past, busy: float) -> DemandRatio | None:
    """The longest prefill backlog over the objective for the first token."""
    objective = past.profile.time_to_first_token_seconds
    backlogs = [each.backlog_seconds for each in past.capacities()]
    longest = max((each.value for each in backlogs if each is not None), default=None)
    return None if objective is None or longest is None else DemandRatio("prefill", busy * longest / objective)


def _generation(past: Past, busy: float) -> DemandRatio | None:
    """Tokens per second over those with as many requests as fit, may run and meet the objective, by the step times."""
    ranks, objective = past.capacities(), past.profile.inter_token_seconds
    running = [past.by_rank[rank.dp].mean("running") if rank.dp in past.by_rank else None for rank in ranks]
    most: list[float] = []
    for rank in ranks:
        in_time = None if objective is None else largest_batch_within(rank, objective)
        if rank.most_requests is None or in_time == 0:
            return None
        most.append(min(rank.most_requests, in_time or rank.most_requests))
    now, best = predict_batches(ranks, [each or 0.0 for each in running]), predict_batches(ranks, most)
    if now is None or best is None:
        return None
    return DemandRatio("generation", busy * now.tokens_per_second.value / best.tokens_per_second.value)


def _inter_token(past: Past, busy: float) -> DemandRatio | None:
    """Mean inter-token latency over its objective: the server's own, else the model's at the present batch."""
    objective, seconds = past.profile.inter_token_seconds, past.mean_seconds("inter_token")
    if seconds is None:
        model = predict(past.capacities())
        seconds = None if model is None else model.inter_token_mean_seconds
    return None if objective is None or seconds is None else DemandRatio("inter_token", busy * seconds / objective)
