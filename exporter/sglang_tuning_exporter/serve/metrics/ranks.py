"""Families about the schedulers, one series for each DP rank: queues, KV cache, batches, retractions, states."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_tuning_exporter.serve.metrics.families import Family, PerRank, counter, gauge
from sglang_tuning_exporter.serve.metrics.view import SidecarView
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.rank import RankState
from sglang_tuning_exporter.state.signals import SIGNALS, STATES, UNKNOWN


def schedulers(sidecar: SidecarView, now: float) -> Iterable[Family]:
    """Return the families of each scheduler."""
    state = sidecar.state
    ranks = PerRank(state.schedulers)
    yield from _waiting(ranks, state.facts, now)
    yield from _pools(ranks, state.facts)
    yield from _batches(ranks, now)
    yield from _retractions(ranks, sidecar)
    yield from _states(ranks)


def _waiting(ranks: PerRank[RankState], facts: ServerFacts, now: float) -> Iterable[Family]:
    doc = "Requests waiting (#queue-req, num_queue_reqs)."
    yield ranks.one(gauge("queued_requests", doc), lambda r: r.queued)
    doc = "Requests running (#running-req, num_running_reqs); with pipeline parallelism those of one micro batch."
    yield ranks.one(gauge("running_requests", doc), lambda r: r.running)
    doc = "Requests that may run at once (max_running_requests); with pipeline parallelism a micro batch's share."
    yield ranks.one(gauge("running_requests_limit", doc), lambda r: facts.running_limit(r.dp))
    doc = "Estimated wait of the last request in the queue: queued / admitted per second over the last minute."
    yield ranks.one(gauge("queue_wait_seconds", doc, source="computed"), lambda r: r.queue_wait_seconds(now))
    doc = "Requests waiting elsewhere than in the main queue: for a grammar, or in a queue of disaggregation."
    yield ranks.several(gauge("waiting_requests", doc, "queue"), lambda r: sorted(r.other_queues.queues.items()))
    doc = "Prompt tokens that wait to be computed (#pending-token)."
    yield ranks.one(gauge("pending_tokens", doc), lambda r: r.pending_tokens)


def _pools(ranks: PerRank[RankState], facts: ServerFacts) -> Iterable[Family]:
    yield ranks.several(
        gauge("token_usage_ratio", "Used share of the KV cache, 0-1 (token usage).", "pool"),
        lambda r: r.usages.items() if r.states["activity"] != UNKNOWN else (),
    )
    doc = "Capacity of the KV cache in tokens (max_total_num_tokens)."
    yield ranks.one(gauge("kv_pool_tokens", doc), lambda r: facts.kv_pool_tokens.get(r.dp))
    doc = "Share of max_new_tokens that admission keeps room for (#new_token_ratio)."
    yield ranks.one(gauge("new_token_ratio", doc, source="log, else metrics"), lambda r: r.new_token_ratio)
    yield ranks.several(
        counter(
            "prompt_tokens", "Prompt tokens, by where they came from: computed, or from the prefix cache.", "source"
        ),
        lambda r: (
            (source, r.totals.counts[f"{source}_tokens"]) for source in ("computed", "cached") if r.prompts.are_logged
        ),
    )


def _batches(ranks: PerRank[RankState], now: float) -> Iterable[Family]:
    doc = "Generation throughput as last logged (gen throughput)."
    yield ranks.one(gauge("generation_tokens_per_second", doc), lambda r: r.generation_throughput)
    doc = "Share of decode batches of the last 10 minutes that replayed a captured graph, 0-1 (cuda graph)."
    family = gauge("cuda_graph_coverage_ratio", doc, source="computed")
    yield ranks.one(family, lambda r: r.window.recent(now, r.totals).coverage)
    doc = (
        "Decode batches by use of a captured graph: all where the server counts them (cuda_graph_passes_total),"
        " else logged ones."
    )
    yield ranks.several(
        counter("decode_batches", doc, "graph"),
        lambda r: (
            (graph, r.totals.counts[graph])
            for graph in ("replayed", "eager")
            if r.graph is not None or r.totals.counts[graph]
        ),
    )


def _retractions(ranks: PerRank[RankState], sidecar: SidecarView) -> Iterable[Family]:
    has_log = bool(sidecar.config.log_file)
    is_read = has_log and sidecar.state.log_is_read
    counted = "retracted_requests" if has_log else "native_retracted_requests"
    doc = "Retraction events (KV cache full), TP ranks counted once; absent while the log is unreadable."
    events = counter("retraction_events", doc, source="log")
    ranks.one(events, lambda r: r.totals.counts["retraction_events"] if is_read else None)
    doc = "Requests retracted because the KV cache was full: from the log, else from the server's counter."
    requests = counter("retracted_requests", doc, source="log, else metrics")
    ranks.one(requests, lambda r: r.totals.counts[counted] if is_read or r.counters.has_retractions else None)
    if is_read and not sidecar.state.ranks:
        events.add_metric([], 0)
        requests.add_metric([], 0)
    yield events
    yield requests


def _states(ranks: PerRank[RankState]) -> Iterable[Family]:
    every = [(signal, state) for signal in SIGNALS for state in STATES[signal]]
    doc = "1 for the state that each signal is in."
    yield ranks.several(
        gauge("state", doc, "signal", "state", source="computed"),
        lambda r: [(signal, state, float(r.states[signal] == state)) for signal, state in every],
    )
    doc = (
        "Seconds spent in each state. Serving time of a signal is all but idle and unknown; a share is"
        " increase / increase of serving time."
    )
    yield ranks.several(
        counter("state_seconds", doc, "signal", "state", source="computed"),
        lambda r: [(*each, r.totals.seconds[each]) for each in every],
    )
