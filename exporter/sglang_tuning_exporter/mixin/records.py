"""Recording rules: thresholds as last known, and shares, rates and ratios over the windows of alerts and boards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sglang_tuning_exporter.diagnosis.promql import (
    LONG_WINDOWS,
    LOOKBACK,
    RECENT_WINDOWS,
    SHORT_WINDOWS,
    last_known,
    over_windows,
)

_SECONDS = "sglang_tuning_state_seconds_total"
_SERVING = 'state!~"idle|unknown"'
_REJECTED = (
    ("sglang_tuning_rejected_requests_total", "rejected"),
    ("sglang_tuning_aborted_requests_total", "given_up"),
)


@dataclass(frozen=True, slots=True)
class Record:
    """One recording rule; `comment` is written into the rules file."""

    name: str
    lines: list[str]
    labels: Mapping[str, str] = field(default_factory=dict)
    comment: str = ""

    @property
    def expression(self) -> str:
        """The PromQL, lines joined by newlines."""
        return "\n".join(self.lines)


def records() -> Iterator[Record]:
    """Yield every recording rule, each after those that it uses."""
    yield Record(
        "instance:sglang_tuning_threshold:last5m",
        [f"max by (job, instance, signal, bound) ({last_known('sglang_tuning_threshold')})"],
        comment=f"As last known, for {LOOKBACK} after a missed scrape. One series for each server, whatever other labels its target had.",
    )
    yield Record(
        "instance:sglang_tuning_server_arg:last5m",
        [f"max by (job, instance, arg) ({last_known('sglang_tuning_server_arg')})"],
    )
    for windows, comment in (
        (
            LONG_WINDOWS,
            "Shares of serving time. Where a window has fewer than two samples, the next longer one is taken.",
        ),
        (RECENT_WINDOWS, ""),
    ):
        yield from _shares(windows, comment)
    yield from _rates()
    yield from _latencies()
    yield from _demand()


def _shares(windows: tuple[str, ...], comment: str) -> Iterator[Record]:
    name = windows[0]
    yield Record(
        f"instance:sglang_tuning_state_seconds:increase{name}",
        over_windows(f"sum without (dp_rank) (increase({_SECONDS}[{{window}}]))", windows),
        comment=comment,
    )
    serving = f"instance:sglang_tuning_state_seconds:increase{name}{{{_SERVING}}}"
    yield Record(
        f"instance:sglang_tuning_state:share{name}",
        [serving, f"/ ignoring (state) group_left () (sum without (state) ({serving}) > 0)"],
    )
    if windows == LONG_WINDOWS:
        yield Record(
            f"instance:sglang_tuning_serving_seconds:increase{name}",
            over_windows(
                f"max without (dp_rank) (sum without (state) (increase({_SECONDS}{{{_SERVING}}}[{{window}}])))", windows
            ),
            comment="Seconds in which the busiest DP rank served: eight ranks that are busy for eight seconds are not a minute of load.",
        )
    # Without samples this is NaN, which is above no limit. Without NaN, the next longer window would be used.
    waited = f'{_SECONDS}{{dp_rank!="", signal="queue", state!~"empty|idle|unknown"}}[{{window}}]'
    watched = f'{_SECONDS}{{dp_rank!="", signal="queue", state!="unknown"}}[{{window}}]'
    of_rank = "sum by (job, instance, dp_rank)"
    yield Record(
        f"rank:sglang_tuning_waiting:share{name}",
        over_windows(f"{of_rank} (increase({waited})) / {of_rank} (increase({watched}))", windows),
        comment="Share of the time watched in which requests of a DP rank waited, idle time included: an idle rank has room.",
    )


def _rates() -> Iterator[Record]:
    events, requests = "sglang_tuning_retraction_events_total", "sglang_tuning_retracted_requests_total"
    for windows, comment in (
        (
            LONG_WINDOWS,
            "Per minute. Retraction events from the log; retracted requests where only the metrics have them, or the log is unreadable.",
        ),
        (SHORT_WINDOWS, ""),
        (RECENT_WINDOWS, ""),
    ):
        by_counter = [
            over_windows(f"sum without (dp_rank) (increase({counter}[{{window}}])) / {{minutes}}", windows)
            for counter in (events, requests)
        ]
        yield Record(
            f"instance:sglang_tuning_retractions:rate{windows[0]}",
            [
                "(",
                *("  " + line for line in by_counter[0]),
                ") > 0",
                *("or " + line.removeprefix("or ") for each in reversed(by_counter) for line in each),
            ],
            comment=comment,
        )
        for counter, kind in _REJECTED if windows != SHORT_WINDOWS else ():
            yield Record(
                f"instance:sglang_tuning_rejections:rate{windows[0]}",
                over_windows(f"increase({counter}[{{window}}]) / {{minutes}}", windows),
                {"kind": kind},
                "Refusals (503) come from the access log, requests given up from the server's counter."
                if comment and kind == "rejected"
                else "",
            )
    given_up = "increase(sglang_tuning_aborted_requests_total[{window}])"
    started = "increase(sglang_tuning_started_requests_total[{window}])"
    yield Record(
        "instance:sglang_tuning_given_up:ratio10m",
        over_windows(f"{given_up} / ({given_up} + ({started} or 0 * {given_up}))", LONG_WINDOWS),
        comment="Share of requests that their clients gave up, of all that were given up or got a first token.",
    )


def _latencies() -> Iterator[Record]:
    comment = (
        "Observations above the profile's objective, over the windows of burn rates and findings. No ratio without requests or without an"
        " objective."
    )
    for windows in (SHORT_WINDOWS, LONG_WINDOWS, ("30m",), ("1h",), ("6h",)):
        name = windows[0]
        for counted in ("observations", "breaches"):
            yield Record(
                f"instance:sglang_tuning_latency_{counted}:increase{name}",
                over_windows(f"increase(sglang_tuning_latency_{counted}_total[{{window}}])", windows),
                comment=comment,
            )
            comment = ""
        observed = f"(instance:sglang_tuning_latency_observations:increase{name} > 0)"
        yield Record(
            f"instance:sglang_tuning_latency_breaches:ratio{name}",
            [f"instance:sglang_tuning_latency_breaches:increase{name} / {observed}"],
        )


# Target load of a replica, by which a scaler divides the demand; and the largest demand of one server: requests that piled up
# during a cold start are no lasting demand, so a fleet at most doubles until the new replicas serve.
TARGET_RATIO, MAX_RATIO = 0.8, 1.6


def _demand() -> Iterator[Record]:
    """Yield the demand of each server in replicas, and that of each model and job, for autoscalers."""
    ratio, helps, servers = (
        f"max by (job, instance) ({last_known(f'sglang_tuning_{name}')})"
        for name in ("capacity_ratio", "scale_out_helps", "build_info")
    )
    yield Record(
        "instance:sglang_tuning_demand:last5m",
        [
            f"clamp_max({ratio}, {MAX_RATIO}) and on (job, instance) ({helps} == 1)",
            f"or clamp_max({ratio}, {TARGET_RATIO}) and on (job, instance) ({helps} == 0)",
        ],
        comment=f"Capacity ratio, at most {MAX_RATIO}, and at most {TARGET_RATIO} where no replica helps. Absent of a server that is down, stuck or starting.",
    )
    yield from _replicas("job:sglang_tuning_demand:sum5m", "job", "instance:sglang_tuning_demand:last5m", servers)
    yield Record("job:sglang_tuning_scale_out_helps:max5m", [f"max by (job) ({helps})"])
    selector = 'sglang_tuning_server_info{model_name!=""}'
    named = f"max by (job, instance, model_name) ({last_known(selector)})"
    of_model = f"instance:sglang_tuning_demand:last5m * on (job, instance) group_left (model_name) {named}"
    yield from _replicas("model:sglang_tuning_demand:sum5m", "job, model_name", of_model, named)


def _replicas(name: str, by: str, demand: str, servers: str) -> Iterator[Record]:
    known, all_of_them = f"sum by ({by}) ({demand})", f"{TARGET_RATIO} * count by ({by}) ({servers})"
    few = f"count by ({by}) ({demand}) < count by ({by}) ({servers})"
    yield Record(
        name,
        [f"{known} > {all_of_them}", f"or ({all_of_them}) and ({few})", f"or {known}", f"or {all_of_them}"],
        comment=f"In servers: divided by {TARGET_RATIO} it is the number of replicas (deploy/keda.yml, deploy/hpa.yml). A server that is down, stuck or"
        " starting neither adds a replica nor removes one.",
    )
