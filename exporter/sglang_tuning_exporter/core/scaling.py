"""Whether to tune a server or to add a replica, by its verdict. Pure."""

from __future__ import annotations

from sglang_tuning_exporter.core.findings import Judgement
from sglang_tuning_exporter.core.judge import NOT_ENOUGH, STARTING, STOPPED

# Verdicts with which another replica takes load off this server.
REPLICA = frozenset({"queue_too_long", "requests_rejected", "clients_time_out", "latency_queue", "latency_batch_too_large"})  # fmt: skip
# The same, unless a flag is left to set: that comes first.
FLAG_FIRST = frozenset({
    "conservativeness_ineffective", "retracting_too_often", "hybrid_pool_full", "running_at_limit", "running_far_below_limit",
    "prefill_bound", "admission_too_conservative", "cuda_graph_not_covering", "cuda_graph_off",
    "latency_prefill_between", "latency_long_prompts", "shared_prefixes_unused", "flags_away_from_defaults",
})  # fmt: skip
# Verdicts with which nothing is known. With every other verdict a replica does not help.
UNKNOWN = frozenset({NOT_ENOUGH, STARTING, STOPPED, "server_down", "scheduler_stuck"})


def scale_out_helps(judgement: Judgement) -> bool | None:
    """Return whether another replica would take load off this server; None if not known."""
    verdict = judgement.verdict
    if verdict in UNKNOWN:
        return None
    if verdict in FLAG_FIRST:
        changes = next((found.changes for found in judgement.findings if found.diagnosis == verdict), ())
        return not any(change.flag for change in changes)
    return verdict in REPLICA
