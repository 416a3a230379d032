"""Families about the schedulers, one series for each DP rank: queues, KV cache, batches, retractions, states."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from sglang_tuning_exporter.serve.metrics.families import counter, gauge
from sglang_tuning_exporter.state.signals import SIGNALS, STATES, UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

    from sglang_tuning_exporter.serve.metrics.view import SidecarView
    from sglang_tuning_exporter.state.rank import RankState


class _Schedulers:
    """The schedulers at one moment, and the labels of their samples."""

    def __init__(self, sidecar: SidecarView, now: float) -> None:
        self.state, self.now, self.has_log = sidecar.state, now, bool(sidecar.config.log_file)
        self.has_dp_ranks = sidecar.state.has_dp_ranks
        self.ranks: list[RankState] = sorted(self.state.schedulers, key=_place)

    def labels(self, *names: str) -> tuple[str, ...]:
        return (*names, "dp_rank") if self.has_dp_ranks else names

    def values(self, rank: RankState) -> list[str]:
        return [str(rank.dp)] if self.has_dp_ranks else []

    def each(self, name: str, words: str, figure: Callable[[RankState], float | None]) -> Metric:
        family = gauge(name, words, *self.labels())
        for rank in self.ranks:
            value = figure(rank)
            if value is not None and isfinite(value):
                family.add_metric(self.values(rank), value)
        return family

    def split(
        self,
        family: CounterMetricFamily | GaugeMetricFamily,
        figures: Callable[[RankState], Iterable[tuple[str, float]]],
    ) -> Metric:
        for rank in self.ranks:
            for label, value in figures(rank):
                family.add_metric([label, *self.values(rank)], value)
        return family


def _place(rank: RankState) -> int:
    return -1 if rank.dp is None else rank.dp


def schedulers(sidecar: SidecarView, now: float) -> Iterable[Metric]:
    """Return the families of each scheduler."""
    of = _Schedulers(sidecar, now)
    yield from _waiting(of)
    yield from _pools(of)
    yield from _batches(of)
    yield from _retractions(of)
    yield from _states(of)


def _waiting(of: _Schedulers) -> Iterable[Metric]:
    facts = of.state.facts
    yield of.each("queued_requests", "Requests waiting (#queue-req, num_queue_reqs).", lambda r: r.queued)
    yield of.each(
        "running_requests",
        "Requests running (#running-req, num_running_reqs); with pipeline parallelism those of one micro batch.",
        lambda r: r.running,
    )
    yield of.each(
        "running_requests_limit",
        "Requests that may run at once (max_running_requests); with pipeline parallelism a micro batch's share.",
        lambda r: facts.running_limit(r.dp),
    )
    yield of.each(
        "queue_wait_seconds",
        "Estimated wait of the last request in the queue: queued / admitted per second over the last minute.",
        lambda r: r.queue_wait_seconds(of.now),
    )
    yield of.split(
        gauge(
            "waiting_requests",
            "Requests waiting elsewhere than in the main queue: for a grammar, or in a queue of disaggregation.",
            *of.labels("queue"),
        ),
        lambda r: sorted(r.beside.queues.items()),
    )
    yield of.each(
        "pending_tokens", "Prompt tokens that wait to be computed (#pending-token).", lambda r: r.pending_tokens
    )


def _pools(of: _Schedulers) -> Iterable[Metric]:
    facts = of.state.facts
    yield of.split(
        gauge("token_usage_ratio", "Used share of the KV cache, 0-1 (token usage).", *of.labels("pool")),
        lambda r: r.usages.items() if r.states["activity"] != UNKNOWN else (),
    )
    yield of.each(
        "kv_pool_tokens",
        "Capacity of the KV cache in tokens (max_total_num_tokens).",
        lambda r: facts.kv_pool_tokens.get(r.dp),
    )
    yield of.each(
        "new_token_ratio",
        "Share of max_new_tokens that admission keeps room for (#new_token_ratio).",
        lambda r: r.new_token_ratio,
    )
    yield of.split(
        counter(
            "prompt_tokens",
            "Prompt tokens, by where they came from: computed, or from the prefix cache.",
            *of.labels("source"),
        ),
        lambda r: (
            [(source, r.totals.counts[f"{source}_tokens"]) for source in ("computed", "cached")]
            if r.prompts.are_logged
            else ()
        ),
    )


def _batches(of: _Schedulers) -> Iterable[Metric]:
    yield of.each(
        "generation_tokens_per_second",
        "Generation throughput as last logged (gen throughput).",
        lambda r: r.generation_throughput,
    )
    yield of.each(
        "cuda_graph_coverage_ratio",
        "Share of decode batches of the last 10 minutes that replayed a captured graph, 0-1 (cuda graph).",
        lambda r: r.window.recent(of.now, r.totals).coverage,
    )
    yield of.split(
        counter(
            "decode_batches",
            "Decode batches by use of a captured graph: all where the server counts them (cuda_graph_passes_total),"
            " else logged ones.",
            *of.labels("graph"),
        ),
        lambda r: [
            (graph, r.totals.counts[graph])
            for graph in ("replayed", "eager")
            if r.graph is not None or r.totals.counts[graph]
        ],
    )


def _retractions(of: _Schedulers) -> Iterable[Metric]:
    read = of.has_log and of.state.log_is_read
    events = counter(
        "retraction_events",
        "Retraction events (KV cache full), TP ranks counted once; absent while the log is unreadable.",
        *of.labels(),
    )
    requests = counter(
        "retracted_requests",
        "Requests retracted because the KV cache was full: from the log, else from the server's counter.",
        *of.labels(),
    )
    for rank in of.ranks:
        counts, values = rank.totals.counts, of.values(rank)
        if read:
            events.add_metric(values, counts["retraction_events"])
        if read or rank.counters.has_retractions:
            requests.add_metric(values, counts["retracted_requests" if of.has_log else "native_retracted_requests"])
    if read and not of.state.ranks:
        events.add_metric([], 0)
        requests.add_metric([], 0)
    yield events
    yield requests


def _states(of: _Schedulers) -> Iterable[Metric]:
    now = gauge("state", "1 for the state that each signal is in.", *of.labels("signal", "state"))
    seconds = counter(
        "state_seconds",
        "Seconds spent in each state. Serving time of a signal is all but idle and unknown; a share is"
        " increase / increase of serving time.",
        *of.labels("signal", "state"),
    )
    for rank in of.ranks:
        held, spent = rank.states, rank.totals.seconds
        for signal in SIGNALS:
            for state in STATES[signal]:
                labels = [signal, state, *of.values(rank)]
                now.add_metric(labels, float(held[signal] == state))
                seconds.add_metric(labels, spent[signal, state])
    yield now
    yield seconds
