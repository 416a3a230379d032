"""Families about the server as a whole: release, arguments, GPU memory, failures, latencies, thresholds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sglang_tuning_exporter.config.profiles import GIGABYTE
from sglang_tuning_exporter.core.events import OUT_OF_MEMORY_PHASES
from sglang_tuning_exporter.core.server import LIVENESS, Server
from sglang_tuning_exporter.serve.metrics.families import Family, counter, gauge, info, shortened, single
from sglang_tuning_exporter.serve.metrics.view import SidecarView

JUDGED = ("time_to_first_token", "inter_token")  # the latencies that profiles have objectives for
# Arguments with a series of their own: numbers and switches only, since text may be secret.
SHOWN = (
    "schedule_conservativeness", "mem_fraction_static", "max_running_requests", "max_queued_requests", "max_total_tokens",
    "chunked_prefill_size", "max_prefill_tokens", "cuda_graph_max_bs", "cuda_graph_max_bs_decode", "tp_size", "dp_size", "pp_size",
    "page_size", "context_length", "disable_cuda_graph", "disable_decode_cuda_graph", "disable_radix_cache", "enable_dp_attention",
    "enable_torch_compile", "enable_mixed_chunk", "decode_log_interval", "stream_interval", "num_continuous_decode_steps",
    "swa_full_tokens_ratio",
)  # fmt: skip
_COUNTED = {
    "aborted_requests": "Requests that their clients gave up, as the server counts them.",
    "started_requests": "Requests, streamed or not, that got their first token, as the server counts them.",
    "finished_requests": "Requests that ended, as the server counts them.",
}


def server(sidecar: SidecarView, now: float) -> Iterable[Family]:
    """Return the families about release, arguments, requests, liveness and latencies."""
    state, facts = sidecar.watch.server, sidecar.watch.server.facts
    page, counted = state.page, state.counted
    shown = {
        "version": facts.version or facts.release,
        "model_name": _model(state),
        "engine_type": facts.role or facts.role_seen,
    }
    yield info(
        "server",
        "Release, model and engine as the server reports them (empty: not reported), and the profile in force.",
        {name: shortened(word) for name, word in shown.items()} | {"profile": state.profile.name},
    )
    doc = "A numeric argument of the running server, as resolved by it (switches are 0 or 1)."
    arguments = gauge("server_arg", doc, "arg", source="log, else `/server_info`")
    yield arguments.with_samples((arg, value) for arg in sorted(SHOWN) if (value := facts.number(arg)) is not None)
    doc = "Starts of the server seen by this exporter."
    yield counter("server_starts", doc, source="log, else metrics").with_samples([(counted["starts"],)])
    for name, doc in _COUNTED.items():
        known = page is not None and getattr(page, name) is not None
        yield counter(name, doc, source="metrics").with_samples([(counted[name],)] if known or name in counted else [])
    doc = (
        "Requests that SGLang rejected because its queue was full, or they waited for SGLANG_REQ_WAITING_TIMEOUT:"
        " answered with 503, or, by a full queue, with a stream that has an error."
    )
    is_counted = bool(sidecar.config.log_file) or (page is not None and page.answered_requests is not None)
    yield counter("rejected_requests", doc, source="metrics, else log").with_samples(
        [(counted["rejected"],)] if is_counted else []
    )
    doc = "Requests answered with 500, and streams that an exception ended; absent before the first one."
    failed = [(counted["server_errors"],)] if counted["server_errors"] else []
    yield counter("server_errors", doc, source="metrics, else log").with_samples(failed)
    doc = (
        "Liveness events in the log: ready, draining, failed starts, crashes, watchdog timeouts, failed health checks."
    )
    yield from _events(
        sidecar,
        now,
        counter("liveness_events", doc, "event", source="log"),
        gauge("liveness_event_age_seconds", "Seconds since this event was last in the log.", "event", source="log"),
        {event: f"liveness.{event}" for event in LIVENESS},
    )
    doc = "Latencies that the server observed since the exporter started."
    seen = counter("latency_observations", doc, "latency", source="metrics")
    # From the first scrape on: a family that the first page did not have had no observations then.
    observed = JUDGED if page is not None else ()
    yield seen.with_samples([(each, counted[f"{each}_observed"]) for each in observed])
    doc = "Those above the profile's objective (estimated inside a histogram's bucket)."
    missed = counter("latency_breaches", doc, "latency", source="metrics")
    judged = [each for each in observed if state.objectives[each] is not None]
    yield missed.with_samples([(each, counted[f"{each}_late"]) for each in judged])
    doc = "When a request last ran or waited, in unix seconds."
    yield single("last_request_timestamp_seconds", doc, _last_request(sidecar))


def _model(state: Server) -> str:
    page = state.page
    named = page.model_name if page is not None else None
    return named or state.facts.word("served_model_name") or state.facts.word("model_path")


def _last_request(sidecar: SidecarView) -> float | None:
    at = sidecar.watch.server.last.get("requests")
    return None if at is None else sidecar.unix(at)


def memory(sidecar: SidecarView) -> Iterable[Family]:
    """Return the families about GPU memory, as reported at the start."""
    facts = sidecar.watch.server.facts
    doc = "GPU memory left when the server had started (available_gpu_mem); absent on a CPU server."
    left = gauge("available_gpu_memory_bytes", doc)
    by_rank: dict[int | None, float] = {dp: gb for dp, gb in facts.left.items() if dp is not None}
    known = facts.reserve_gb
    for dp, each in sorted(by_rank.items(), key=str) if known is not None else ():
        left.add_metric([], each * GIGABYTE, dp)
    if known is not None and not by_rank:
        left.add_metric([], known * GIGABYTE)
    yield left
    for name, doc, gigabytes in (
        ("gpu_memory", "GPU memory free before the weights were loaded (avail mem).", facts.capacity_gb),
        ("weights", "GPU memory of one rank's part of the weights, a draft model's included.", facts.weights_gb),
        ("kv_pool", "GPU memory of one rank's KV cache, a draft model's included.", facts.pools_gb),
        ("cuda_graph_memory", "GPU memory of the captured graphs on one rank.", facts.gigabytes("graph")),
    ):
        size = None if gigabytes is None or facts.is_cpu else gigabytes * GIGABYTE
        yield single(f"{name}_bytes", doc, size)
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
        {phase: f"out_of_memory.{phase}" for phase in OUT_OF_MEMORY_PHASES},
    )


def _events(
    sidecar: SidecarView, now: float, counts: Family, ages: Family, named: Mapping[str, str]
) -> Iterable[Family]:
    """Fill how often each event of the log happened, and how long ago the last one was.

    A counter that is first seen above 0 cannot show whether its events are recent.
    """
    state = sidecar.watch.server
    names = named.items() if sidecar.config.log_file else ()
    yield counts.with_samples((event, state.counted[name]) for event, name in names)
    yield ages.with_samples((event, max(now - state.last[name], 0.0)) for event, name in names if name in state.last)


def thresholds(sidecar: SidecarView) -> Iterable[Family]:
    """Return the family of the thresholds in force, for boards and rules."""
    profile = sidecar.watch.server.profile
    yield gauge("threshold", "What the profile in force calls healthy.", "signal", "bound").with_samples(profile.bounds)
