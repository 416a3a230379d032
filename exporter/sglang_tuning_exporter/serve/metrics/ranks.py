"""Families about the schedulers, one series for each DP rank: queues, KV cache, batches, retractions, states."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_tuning_exporter.core.server import COVERAGE_SECONDS, IDLE, STATES, UNKNOWN, Scheduler, Server, Totals
from sglang_tuning_exporter.serve.metrics.families import Family, Life, PerRank, counter, gauge
from sglang_tuning_exporter.serve.metrics.view import SidecarView


def schedulers(sidecar: SidecarView, now: float) -> Iterable[Family]:
    """Return the families of each scheduler."""
    server = sidecar.watch.server
    ranks = PerRank(server.schedulers.values())
    lives = PerRank(Life(dp, server.life(dp)) for dp in server.lives.keys() - server.absent)
    yield from _waiting(ranks, server)
    yield from _pools(ranks, lives, server, now)
    yield from _batches(ranks, lives, server.window(COVERAGE_SECONDS, now))
    yield from _retractions(lives, sidecar)
    yield from _states(ranks, lives, now)


def _waiting(ranks: PerRank[Scheduler], server: Server) -> Iterable[Family]:
    doc = "Requests waiting (#queue-req, num_queue_reqs)."
    yield ranks.one(gauge("queued_requests", doc), lambda r: r.queued)
    doc = "Requests running (#running-req, num_running_reqs); with pipeline parallelism those of one micro batch."
    yield ranks.one(gauge("running_requests", doc), lambda r: r.running)
    doc = "Requests that may run at once (max_running_requests); with pipeline parallelism a micro batch's share."
    yield ranks.one(gauge("running_requests_limit", doc), lambda r: server.facts.limit(r.dp))
    doc = "Estimated wait of the last request in the queue: queued / admitted per second over the last minute."
    yield ranks.one(gauge("queue_wait_seconds", doc, source="computed"), lambda r: r.wait_seconds())
    doc = "Requests waiting elsewhere than in the main queue: for a grammar, or in a queue of disaggregation."
    waiting = gauge("waiting_requests", doc, "queue")
    yield ranks.several(waiting, _elsewhere)
    doc = "Prompt tokens that wait to be computed (#pending-token)."
    yield ranks.one(gauge("pending_tokens", doc), lambda r: r.pending[0] if r.pending is not None else None)


def _elsewhere(rank: Scheduler) -> list[tuple[str, float]]:
    grammar = {} if rank.grammar_queued is None else {"grammar": rank.grammar_queued}
    return sorted((rank.queues | grammar).items())


def _pools(ranks: PerRank[Scheduler], lives: PerRank[Life], server: Server, now: float) -> Iterable[Family]:
    doc = "Used share of the KV cache, 0-1 (token usage)."
    yield ranks.several(
        gauge("token_usage_ratio", doc, "pool"), lambda r: r.usages.items() if r.moment(now).activity != UNKNOWN else ()
    )
    doc = "Capacity of the KV cache in tokens (max_total_num_tokens)."
    yield ranks.one(gauge("kv_pool_tokens", doc), lambda r: server.facts.pool(r.dp))
    doc = "Share of max_new_tokens that admission keeps room for (#new_token_ratio)."
    yield ranks.one(gauge("new_token_ratio", doc, source="log, else metrics"), lambda r: r.new_token_ratio)
    doc = "Prompt tokens, by where they came from: computed, or from the prefix cache."
    yield lives.several(counter("prompt_tokens", doc, "source"), lambda each: each.known("computed", "cached"))


def _batches(ranks: PerRank[Scheduler], lives: PerRank[Life], recent: Totals) -> Iterable[Family]:
    doc = "Generation throughput as last logged (gen throughput)."
    yield ranks.one(gauge("generation_tokens_per_second", doc), lambda r: r.throughput)
    doc = "Share of decode batches of the last 10 minutes that replayed a captured graph, 0-1 (cuda graph)."
    yield ranks.one(gauge("cuda_graph_coverage_ratio", doc, source="computed"), lambda r: r.coverage(recent))
    doc = (
        "Decode batches by use of a captured graph: all where the server counts them (cuda_graph_passes_total),"
        " else logged ones."
    )
    yield lives.several(counter("decode_batches", doc, "graph"), lambda each: each.known("replayed", "eager"))


def _retractions(lives: PerRank[Life], sidecar: SidecarView) -> Iterable[Family]:
    is_read = sidecar.counts_log
    page = sidecar.watch.server.page
    counted = {rank.dp for rank in page.ranks if rank.retracted_requests is not None} if page is not None else set()
    doc = "Retraction events (KV cache full), TP ranks counted once; absent while the log is unreadable."
    events = counter("retraction_events", doc, source="log")
    lives.one(events, lambda each: each.counts.get("retraction_events", 0.0) if is_read else None)
    doc = "Requests retracted because the KV cache was full: from the log, and from the server's counter what the log does not show."
    requests = counter("retracted_requests", doc, source="log, else metrics")
    lives.one(requests, lambda each: each.counts.get("retracted", 0.0 if is_read or each.dp in counted else None))
    if is_read and not events.samples:
        events.add_metric([], 0)
        requests.add_metric([], 0)
    yield events
    yield requests


def _states(ranks: PerRank[Scheduler], lives: PerRank[Life], now: float) -> Iterable[Family]:
    names = {
        f"{signal}/{state}": (signal, state) for signal, states in STATES.items() for state in (*states, IDLE, UNKNOWN)
    }

    def present(rank: Scheduler) -> list[tuple[str, str, float]]:
        activity = rank.moment(now).activity
        states = [(signal, state, float(activity == state)) for signal, state in names.values() if signal == "activity"]
        return states if rank.dp is None else states[:1]  # of each of many ranks: whether it serves

    def spent(life: Life) -> list[tuple[str, str, float]]:
        times = ((*names[key], seconds) for key, seconds in life.counts.items() if key in names)
        # Of each of many ranks, only the states that it was in: others would be most of its series.
        return [each for each in times if each[-1] or life.dp is None]

    doc = "1 for what the scheduler does now: it serves, is idle, or nothing is known."
    yield ranks.several(gauge("state", doc, "signal", "state", source="computed"), present)
    doc = (
        "Seconds spent in each state; of a DP rank, in those that it was in. Serving time of a signal is all but idle and unknown; a share is"
        " increase / increase of serving time."
    )
    seconds = counter("state_seconds", doc, "signal", "state", source="computed")
    yield lives.several(seconds, spent)
