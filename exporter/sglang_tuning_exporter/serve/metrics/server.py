"""Families about the server as a whole: what runs, its memory, its failures, its latencies, and what is healthy for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from sglang_tuning_exporter.serve.metrics.families import brief, counter, gauge, info
from sglang_tuning_exporter.sglang.events import OUT_OF_MEMORY_PHASES, LivenessKind
from sglang_tuning_exporter.state.latency import Latency
from sglang_tuning_exporter.state.profiles import GIGABYTE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from sglang_tuning_exporter.serve.metrics.view import SidecarView

JUDGED: tuple[Latency, ...] = ("time_to_first_token", "inter_token")  # the latencies that profiles have objectives for


def server(sidecar: SidecarView, now: float) -> Iterable[Metric]:
    """What runs, and what happened to it."""
    state, facts = sidecar.state, sidecar.state.facts
    yield info(
        "server",
        "Release, model and engine as the server reports them (empty: not reported), and the profile in force.",
        {
            "version": brief(facts.version),
            "model_name": brief(facts.model_name),
            "engine_type": brief(facts.engine_type),
            "profile": sidecar.profile.name,
        },
    )
    args = gauge(
        "server_arg", "A numeric argument of the running server, as resolved by it (switches are 0 or 1).", "arg"
    )
    for name, value in sorted(facts.shown_args.items()):
        args.add_metric([name], value)
    yield args
    starts = counter("server_starts", "Starts of the server seen by this exporter.")
    starts.add_metric([], state.starts)
    yield starts
    yield from _counts(sidecar, now)


def memory(sidecar: SidecarView) -> Iterable[Metric]:
    """Where the GPU's memory went, as told at the start."""
    state, facts = sidecar.state, sidecar.state.facts
    reserve = gauge(
        "available_gpu_memory_bytes",
        "GPU memory left when the server had started (available_gpu_mem); absent on a CPU server.",
        *(("dp_rank",) if state.has_dp_ranks else ()),
    )
    told = {
        str(dp): gb for dp, gb in sorted(facts.available_gb.items(), key=str) if dp is not None and state.has_dp_ranks
    }
    if facts.reserve_gb is not None:
        for dp_rank, gigabytes in (told or {"": facts.reserve_gb}).items():
            reserve.add_metric([dp_rank] if state.has_dp_ranks else [], gigabytes * GIGABYTE)
    yield reserve
    memories: tuple[tuple[str, str, float | None], ...] = (
        (
            "gpu_memory",
            "GPU memory free before the weights were loaded (avail mem).",
            facts.memory_before_weights_gb,
        ),
        (
            "weights",
            "GPU memory that one rank's part of the weights takes, a draft model's included.",
            facts.rank_weights_gb,
        ),
        ("kv_pool", "GPU memory of one rank's KV cache, a draft model's included.", facts.pools_gb),
        ("cuda_graph_memory", "GPU memory that captured graphs take on one rank.", facts.graph_gb),
    )
    for name, words, told_gb in memories:
        memory = gauge(f"{name}_bytes", words)
        if told_gb is not None and not facts.is_cpu:
            memory.add_metric([], told_gb * GIGABYTE)
        yield memory
    captured = gauge("cuda_graph_max_batch_size", "The largest decode batch with a captured graph.")
    if facts.largest_captured is not None and not facts.without_graph:
        captured.add_metric([], facts.largest_captured)
    yield captured
    off = gauge(
        "cuda_graph_off",
        "1 where decode batches run without a CUDA graph by an argument, or on a device without graphs.",
    )
    off.add_metric([], float(bool(facts.without_graph)))
    yield off


def _counts(sidecar: SidecarView, now: float) -> Iterable[Metric]:
    state = sidecar.state
    for name, words in (
        ("aborted_requests", "Requests that their clients gave up, as the server counts them."),
        ("started_requests", "Requests, streamed or not, that got their first token, as the server counts them."),
        ("finished_requests", "Requests that ended, as the server counts them."),
    ):
        requests, counted = counter(name, words), state.server_count(name)
        if counted is not None:
            requests.add_metric([], counted)
        yield requests
    rejected = counter(
        "rejected_requests", "Requests answered with 503, from the access log, where a rejected stream is a 200."
    )
    liveness = counter(
        "liveness_events",
        "Liveness events in the log: ready, draining, failed starts, crashes, watchdog timeouts, failed health checks.",
        "event",
    )
    if sidecar.config.log_file:
        rejected.add_metric([], state.server_totals.counts["rejected_requests"])
        for event in get_args(LivenessKind):
            liveness.add_metric([event], state.liveness[event])
    yield rejected
    yield liveness
    yield _ages(sidecar, now, "liveness_event_age_seconds", "Seconds since this event was last in the log.", "event")
    observed = counter("latency_observations", "Latencies that the server observed since the exporter came.", "latency")
    missed = counter(
        "latency_breaches",
        "Those above the profile's objective (estimated inside a histogram's bucket).",
        "latency",
    )
    for latency in JUDGED:
        observations, breaches = state.latency.observations(latency), state.latency.breaches(latency)
        if observations is not None:
            observed.add_metric([latency], observations)
        if breaches is not None:
            missed.add_metric([latency], breaches)
    yield observed
    yield missed


def failures(sidecar: SidecarView, now: float) -> Iterable[Metric]:
    """Out-of-memory failures by phase, where a log tells them."""
    family = counter(
        "out_of_memory",
        "Fatal out-of-memory failures in the log, by phase. A recoverable retraction is none.",
        "phase",
    )
    if sidecar.config.log_file:
        for phase in OUT_OF_MEMORY_PHASES:
            family.add_metric([phase], sidecar.state.out_of_memory[phase])
    yield family
    yield _ages(
        sidecar, now, "out_of_memory_age_seconds", "Seconds since the last out-of-memory failure in the log.", "phase"
    )


def _ages(sidecar: SidecarView, now: float, name: str, words: str, label: str) -> Metric:
    """How long ago each event that was counted last happened; absent for one that never did.

    A counter that is first seen above 0 cannot say whether its events are fresh.
    """
    family, state = gauge(name, words, label), sidecar.state
    if sidecar.config.log_file:
        for event in OUT_OF_MEMORY_PHASES if label == "phase" else get_args(LivenessKind):
            age = state.age(event, now)
            if age is not None:
                family.add_metric([event], age)
    return family


def thresholds(sidecar: SidecarView) -> Iterable[Metric]:
    """What the profile in force calls healthy, for panels and rules."""
    profile = sidecar.profile.for_edition(first=sidecar.state.facts.is_first_edition)
    family = gauge("threshold", "What the profile in force calls healthy.", "signal", "bound")
    for signal, bound, value in profile.bounds:
        family.add_metric([signal, bound], value)
    yield family
