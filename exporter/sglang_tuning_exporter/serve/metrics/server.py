"""Families about the server as a whole: release, arguments, GPU memory, failures, latencies, thresholds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import get_args

from sglang_tuning_exporter.serve.metrics.families import Family, counter, gauge, info, shortened, single
from sglang_tuning_exporter.serve.metrics.view import SidecarView
from sglang_tuning_exporter.sglang.events import OUT_OF_MEMORY_PHASES, LivenessKind
from sglang_tuning_exporter.state.latency import Latency
from sglang_tuning_exporter.state.profiles import GIGABYTE

JUDGED: tuple[Latency, ...] = ("time_to_first_token", "inter_token")  # the latencies that profiles have objectives for
_COUNTED = {
    "aborted_requests": "Requests that their clients gave up, as the server counts them.",
    "started_requests": "Requests, streamed or not, that got their first token, as the server counts them.",
    "finished_requests": "Requests that ended, as the server counts them.",
}


def server(sidecar: SidecarView, now: float) -> Iterable[Family]:
    """Return the families about release, arguments, requests, liveness and latencies."""
    state, facts = sidecar.state, sidecar.state.facts
    yield info(
        "server",
        "Release, model and engine as the server reports them (empty: not reported), and the profile in force.",
        {name: shortened(getattr(facts, name)) for name in ("version", "model_name", "engine_type")}
        | {"profile": sidecar.profile.name},
    )
    doc = "A numeric argument of the running server, as resolved by it (switches are 0 or 1)."
    yield gauge("server_arg", doc, "arg", source="log, else `/server_info`").with_samples(
        sorted(facts.shown_args.items())
    )
    doc = "Starts of the server seen by this exporter."
    yield counter("server_starts", doc, source="log, else metrics").with_samples([(state.starts,)])
    for name, doc in _COUNTED.items():
        yield counter(name, doc, source="metrics").with_samples([(state.server_count(name),)])
    doc = (
        "Requests that SGLang rejected because its queue was full, or they waited for SGLANG_REQ_WAITING_TIMEOUT:"
        " answered with 503, or a stream with an error."
    )
    is_counted = sidecar.config.log_file or state.server_count("answered_requests") is not None
    rejected = [(state.server_totals.counts["rejected_requests"],)] if is_counted else []
    yield counter("rejected_requests", doc, source="metrics, else log").with_samples(rejected)
    doc = (
        "Liveness events in the log: ready, draining, failed starts, crashes, watchdog timeouts, failed health checks."
    )
    yield from _events(
        sidecar,
        now,
        counter("liveness_events", doc, "event", source="log"),
        gauge("liveness_event_age_seconds", "Seconds since this event was last in the log.", "event", source="log"),
        {event: state.liveness[event] for event in get_args(LivenessKind)},
    )
    doc = "Latencies that the server observed since the exporter started."
    seen = counter("latency_observations", doc, "latency", source="metrics")
    yield seen.with_samples([(each, state.latency.observations(each)) for each in JUDGED])
    doc = "Those above the profile's objective (estimated inside a histogram's bucket)."
    missed = counter("latency_breaches", doc, "latency", source="metrics")
    yield missed.with_samples([(each, state.latency.breaches(each)) for each in JUDGED])


def memory(sidecar: SidecarView) -> Iterable[Family]:
    """Return the families about GPU memory, as reported at the start."""
    state, facts = sidecar.state, sidecar.state.facts
    doc = "GPU memory left when the server had started (available_gpu_mem); absent on a CPU server."
    left = gauge("available_gpu_memory_bytes", doc)
    ranks = {dp: gb for dp, gb in sorted(facts.available_gb.items(), key=str) if dp is not None}
    by_rank = ranks if state.has_dp_ranks and ranks else {None: facts.reserve_gb}
    for dp, gigabytes in by_rank.items() if facts.reserve_gb is not None else ():
        left.add_metric([], (gigabytes or 0.0) * GIGABYTE, dp)
    yield left
    for name, doc, gigabytes in (
        ("gpu_memory", "GPU memory free before the weights were loaded (avail mem).", facts.memory_before_weights_gb),
        ("weights", "GPU memory of one rank's part of the weights, a draft model's included.", facts.rank_weights_gb),
        ("kv_pool", "GPU memory of one rank's KV cache, a draft model's included.", facts.pools_gb),
        ("cuda_graph_memory", "GPU memory of the captured graphs on one rank.", facts.graph_gb),
    ):
        known = gigabytes is not None and not facts.is_cpu
        yield single(f"{name}_bytes", doc, (gigabytes or 0.0) * GIGABYTE if known else None)
    doc = "The largest decode batch with a captured graph."
    yield single("cuda_graph_max_batch_size", doc, None if facts.without_graph else facts.largest_captured)
    doc = "1 where decode batches run without a CUDA graph because of an argument or of the device."
    yield single("cuda_graph_off", doc, float(bool(facts.without_graph)))


def failures(sidecar: SidecarView, now: float) -> Iterable[Family]:
    """Return the families about out-of-memory failures in the log, by phase."""
    doc = "Fatal out-of-memory failures in the log, by phase. A retraction is none."
    yield from _events(
        sidecar,
        now,
        counter("out_of_memory", doc, "phase"),
        gauge("out_of_memory_age_seconds", "Seconds since the last out-of-memory failure in the log.", "phase"),
        {phase: sidecar.state.out_of_memory[phase] for phase in OUT_OF_MEMORY_PHASES},
    )


def _events(
    sidecar: SidecarView, now: float, counts: Family, ages: Family, counted: Mapping[str, int]
) -> Iterable[Family]:
    """Fill how often each event of the log happened, and how long ago the last one was.

    A counter that is first seen above 0 cannot show whether its events are recent.
    """
    if not sidecar.config.log_file:
        counted = {}
    yield counts.with_samples(counted.items())
    yield ages.with_samples((event, sidecar.state.journal.age(event, now)) for event in counted)


def thresholds(sidecar: SidecarView) -> Iterable[Family]:
    """Return the family of the thresholds in force, for boards and rules."""
    profile = sidecar.profile.for_server(sidecar.state.facts)
    yield gauge("threshold", "What the profile in force calls healthy.", "signal", "bound").with_samples(profile.bounds)
