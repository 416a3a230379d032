"""Families about the schedulers, one series for each DP rank: queues, KV cache, batches, retractions, states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tuning_exporter.serve.metrics.families import PerRank, counter, gauge
from sglang_tuning_exporter.state.signals import SIGNALS, STATES, UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_tuning_exporter.serve.metrics.families import Family
    from sglang_tuning_exporter.serve.metrics.view import SidecarView
    from sglang_tuning_exporter.state.facts import ServerFacts
    from sglang_tuning_exporter.state.rank import RankState


def schedulers(sidecar: SidecarView, now: float) -> Iterable[Family]:
    """Return the families of each scheduler."""
    state = sidecar.state
    of = PerRank(state.schedulers, has_dp_ranks=state.has_dp_ranks)
    yield from _waiting(of, state.facts, now)
    yield from _pools(of, state.facts)
    yield from _batches(of, now)
    yield from _retractions(of, sidecar)
    yield from _states(of)


def _waiting(of: PerRank[RankState], facts: ServerFacts, now: float) -> Iterable[Family]:
    yield of.gauge_per_rank("queued_requests", "Requests waiting (#queue-req, num_queue_reqs).", lambda r: r.queued)
    yield of.gauge_per_rank(
        "running_requests",
        "Requests running (#running-req, num_running_reqs); with pipeline parallelism those of one micro batch.",
        lambda r: r.running,
    )
    yield of.gauge_per_rank(
        "running_requests_limit",
        "Requests that may run at once (max_running_requests); with pipeline parallelism a micro batch's share.",
        lambda r: facts.running_limit(r.dp),
    )
    yield of.gauge_per_rank(
        "queue_wait_seconds",
        "Estimated wait of the last request in the queue: queued / admitted per second over the last minute.",
        lambda r: r.queue_wait_seconds(now),
    )
    yield of.family_per_rank(
        gauge,
        "waiting_requests",
        "Requests waiting elsewhere than in the main queue: for a grammar, or in a queue of disaggregation.",
        ("queue",),
        lambda r: [((queue,), waiting) for queue, waiting in sorted(r.beside.queues.items())],
    )
    yield of.gauge_per_rank(
        "pending_tokens", "Prompt tokens that wait to be computed (#pending-token).", lambda r: r.pending_tokens
    )


def _pools(of: PerRank[RankState], facts: ServerFacts) -> Iterable[Family]:
    yield of.family_per_rank(
        gauge,
        "token_usage_ratio",
        "Used share of the KV cache, 0-1 (token usage).",
        ("pool",),
        lambda r: [((pool,), used) for pool, used in r.usages.items() if r.states["activity"] != UNKNOWN],
    )
    yield of.gauge_per_rank(
        "kv_pool_tokens",
        "Capacity of the KV cache in tokens (max_total_num_tokens).",
        lambda r: facts.kv_pool_tokens.get(r.dp),
    )
    yield of.gauge_per_rank(
        "new_token_ratio",
        "Share of max_new_tokens that admission keeps room for (#new_token_ratio).",
        lambda r: r.new_token_ratio,
    )
    yield of.family_per_rank(
        counter,
        "prompt_tokens",
        "Prompt tokens, by where they came from: computed, or from the prefix cache.",
        ("source",),
        lambda r: (
            [((source,), r.totals.counts[f"{source}_tokens"]) for source in ("computed", "cached")]
            if r.prompts.are_logged
            else ()
        ),
    )


def _batches(of: PerRank[RankState], now: float) -> Iterable[Family]:
    yield of.gauge_per_rank(
        "generation_tokens_per_second",
        "Generation throughput as last logged (gen throughput).",
        lambda r: r.generation_throughput,
    )
    yield of.gauge_per_rank(
        "cuda_graph_coverage_ratio",
        "Share of decode batches of the last 10 minutes that replayed a captured graph, 0-1 (cuda graph).",
        lambda r: r.window.recent(now, r.totals).coverage,
    )
    yield of.family_per_rank(
        counter,
        "decode_batches",
        "Decode batches by use of a captured graph: all where the server counts them (cuda_graph_passes_total),"
        " else logged ones.",
        ("graph",),
        lambda r: [
            ((graph,), r.totals.counts[graph])
            for graph in ("replayed", "eager")
            if r.graph is not None or r.totals.counts[graph]
        ],
    )


def _retractions(of: PerRank[RankState], sidecar: SidecarView) -> Iterable[Family]:
    has_log = bool(sidecar.config.log_file)
    is_read = has_log and sidecar.state.log_is_read
    counted = "retracted_requests" if has_log else "native_retracted_requests"
    events = of.family_per_rank(
        counter,
        "retraction_events",
        "Retraction events (KV cache full), TP ranks counted once; absent while the log is unreadable.",
        (),
        lambda r: [((), r.totals.counts["retraction_events"])] if is_read else (),
    )
    requests = of.family_per_rank(
        counter,
        "retracted_requests",
        "Requests retracted because the KV cache was full: from the log, else from the server's counter.",
        (),
        lambda r: [((), r.totals.counts[counted])] if is_read or r.counters.has_retractions else (),
    )
    if is_read and not sidecar.state.ranks:
        events.add_metric([], 0)
        requests.add_metric([], 0)
    yield events
    yield requests


def _states(of: PerRank[RankState]) -> Iterable[Family]:
    every = [(signal, state) for signal in SIGNALS for state in STATES[signal]]
    yield of.family_per_rank(
        gauge,
        "state",
        "1 for the state that each signal is in.",
        ("signal", "state"),
        lambda r: [((signal, state), float(r.states[signal] == state)) for signal, state in every],
    )
    yield of.family_per_rank(
        counter,
        "state_seconds",
        "Seconds spent in each state. Serving time of a signal is all but idle and unknown; a share is"
        " increase / increase of serving time.",
        ("signal", "state"),
        lambda r: [(each, r.totals.seconds[each]) for each in every],
    )
