"""A healthy, busy server as its exporter shows it, with every series that an alert rule reads. A test holds it against a real page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias, get_args

from alert_matrix.series import Key, Page, growing, key, shown
from sglang_tuning_exporter.diagnosis.table import DIAGNOSES
from sglang_tuning_exporter.sglang.events import OUT_OF_MEMORY_PHASES, LivenessKind
from sglang_tuning_exporter.state.profiles import GIGABYTE, PROFILES, Profile
from sglang_tuning_exporter.state.signals import STATES, Signal
from sglang_tuning_exporter.state.stages import STAGES

Shares: TypeAlias = dict[str, float]
# What a busy server with enough room does most of the time, and where the rest of the time goes.
USUAL: dict[Signal, str] = {
    "activity": "serving",
    "queue": "in_range",
    "token_usage": "below_target",
    "admission": "no_queue",
    "cuda_graph": "replayed",
}
SECOND: dict[Signal, str] = {
    "activity": "serving",
    "queue": "empty",
    "token_usage": "at_target",
    "admission": "pool_full",
    "cuda_graph": "beyond_captured",
}
REQUESTS, TOKENS = 1.0, 100.0  # a second
SLOW = 0.002  # of them
# Series that a page of one scheduler has without, and that of several with the label dp_rank.
OF_RANKS = frozenset(
    "sglang_tuning_" + name
    for name in (
        "state", "state_seconds_total", "retraction_events_total", "retracted_requests_total", "available_gpu_memory_bytes",
        "running_requests_limit",
    )
)  # fmt: skip
# Facts of the present start, which the next one takes away until it has loaded.
OF_THE_START = frozenset(
    {
        "sglang_tuning_available_gpu_memory_bytes",
        "sglang_tuning_server_arg",
        "sglang_tuning_running_requests_limit",
    }
)
LOG_FILE = "/var/log/sglang.log"
# How long ago a counter of events last grew, where the page says so.
AGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "sglang_tuning_out_of_memory_total": ("sglang_tuning_out_of_memory_age_seconds", ("phase",)),
    "sglang_tuning_liveness_events_total": ("sglang_tuning_liveness_event_age_seconds", ("event",)),
}
ABSENT: dict[str, tuple[str, ...]] = {
    # Only on the page of a server in trouble.
    "sglang_tuning_scrape_error_info": ("reason",),
    **dict(AGES.values()),
}


def mixed(signal: Signal, states: Iterable[str] = (), share: float = 0.0) -> Shares:
    """Split a signal's time: `share` in these states, a twentieth of the rest in the second most usual one, all else in the most usual."""
    chosen = tuple(states)
    split = dict.fromkeys(chosen, share / len(chosen)) if chosen else {}
    rest = 1.0 - (share if chosen else 0.0)
    usual = [state for state in (USUAL[signal], SECOND[signal]) if state not in chosen]
    if not usual:
        usual = [next(state for state in STATES[signal] if state not in chosen)]
    parts = (0.95, 0.05) if len(usual) == 2 and usual[0] != usual[1] else (1.0,)
    for state, part in zip(usual, parts, strict=False):
        split[state] = split.get(state, 0.0) + rest * part
    return split


def thresholds(profile: Profile) -> Page:
    """Give the threshold series of a profile."""
    return {key("threshold", signal=signal, bound=bound): shown(value) for signal, bound, value in profile.bounds}


def healthy(profile: str, shares: Mapping[Signal, Shares] | None = None) -> Page:
    """Give the page of a healthy server, its time split as given or as usual."""
    page: Page = {
        key("build_info", version="1.0.0"): shown(1),
        key("sources_info", metrics="yes", log="yes"): shown(1),
        key("up"): shown(1),
        key("scrape_duration_seconds"): shown(0.01),
        key("metrics_unrecognised_families"): shown(0),
        key("server_info", version="0.5.9", model_name="m", engine_type="unified", profile=profile): shown(1),
        key("server_starts_total"): growing(0, initial=1),
        key("log_up", file=LOG_FILE): shown(1),
        key("log_silent_seconds"): shown(0),
        key("available_gpu_memory_bytes"): shown(6.5 * GIGABYTE),
        key("running_requests_limit"): shown(256),
        key("retraction_events_total"): growing(0),
        key("retracted_requests_total"): growing(0),
        key("rejected_requests_total"): growing(0),
        key("aborted_requests_total"): growing(0.5 / 60, initial=7),
        key("started_requests_total"): growing(REQUESTS, initial=100),
        key("finished_requests_total"): growing(REQUESTS, initial=90),
        **thresholds(PROFILES[profile]),
    }
    page |= _numbered()
    for signal, states in STATES.items():
        split = (shares or {}).get(signal) or mixed(signal)
        for state in states:
            page[seconds(signal, state)] = growing(split.get(state, 0.0), is_whole=False)
            page[key("state", signal=signal, state=state)] = shown(float(state == USUAL[signal]))
    return page


def _numbered() -> Page:
    """Give the series that there is one of for each argument, latency, event and so on."""
    page: Page = {}
    for arg, value in (
        ("schedule_conservativeness", 1.0),
        ("max_running_requests", 256.0),
    ):
        page[key("server_arg", arg=arg)] = shown(value)
    page[key("cuda_graph_off")] = shown(0)
    for latency, rate in (("time_to_first_token", REQUESTS), ("inter_token", TOKENS)):
        page[key("latency_observations_total", latency=latency)] = growing(rate, is_whole=False)
        page[key("latency_breaches_total", latency=latency)] = growing(rate * SLOW, is_whole=False)
    still: tuple[tuple[str, str, tuple[str, ...]], ...] = (
        ("log_unrecognised_total", "kind", ("batch_key", "batch_line", "retraction_line", "server_args")),
        ("liveness_events_total", "event", get_args(LivenessKind)),
        ("out_of_memory_total", "phase", OUT_OF_MEMORY_PHASES),
        ("sources_disagree", "fact", ("kv_pool_tokens", "retracted_requests")),
        ("stuck_stage", "stage", STAGES),
    )
    for name, label, every in still:
        for each in every:
            page[key(name, **{label: each})] = growing(0) if name.endswith("_total") else shown(0)
    for row in DIAGNOSES:
        if row.condition.is_measured:
            page[key("diagnosis_active", diagnosis=row.id)] = shown(0)
    return page


def seconds(signal: str, state: str) -> Key:
    """Name the counter of a state's seconds."""
    return key("state_seconds_total", signal=signal, state=state)
