"""The guide's figures over time, each with the healthy range of the profile in force."""

from __future__ import annotations

from sglang_tuning_exporter.mixin.board import Shelf
from sglang_tuning_exporter.mixin.boards.common import GUIDE
from sglang_tuning_exporter.mixin.panels import (
    BAD,
    GOOD,
    NOT_REPORTED,
    WATCH,
    Json,
    Query,
    bound_line,
    measured,
    painted,
    timeseries,
)
from sglang_tuning_exporter.mixin.queries import drawn_threshold, own, per_rank, ranked, rate, ratio, while_there
from sglang_tuning_exporter.mixin.queries import retractions as every_retraction

NO_LOG = "No log is read"


def shelves() -> tuple[Shelf, Shelf]:
    """Return the guide's figures over time, and the estimated wait beside the queue."""
    return Shelf(7, (queue(), wait(), usage())), Shelf(7, (running(), retractions(), coverage()))


def _edge(expr: str, name: str) -> Query:
    """Return an invisible line at the end of the scale, the edge of a band."""
    hidden = {"legend": True, "tooltip": True, "viz": False}
    return Query(expr, name, painted(GOOD, lineWidth=0, fillOpacity=0) | {"custom.hideFrom": hidden})


def queue() -> Json:
    """Queued requests and the limit in force: the profile's range, or the queue that is admitted within the longest wait."""
    queued, wait = (ranked(f"sglang_tuning_{name}") for name in ("queued_requests", "queue_wait_seconds"))
    longest, upper = drawn_threshold("queue", "wait_seconds"), drawn_threshold("queue", "upper")
    by_wait = f"unless on () {longest}"
    near = f"and on () 5 * max({queued}) > {upper}"  # a limit far above would flatten the curve
    admitted = f"sum by (dp_rank) ({queued}) / (sum by (dp_rank) ({wait} < Inf) > 0)"
    by_rank = per_rank(f"{admitted} * on () group_left () {longest}")
    return timeseries(
        "Queued requests",
        Query(f"{drawn_threshold('queue', 'lower')} {by_wait}", "healthy from", bound_line(GOOD)),
        Query(f"{upper} {near} {by_wait} or {by_rank}", "limit{{rank}}", bound_line(WATCH)),
        Query(per_rank(queued), "queued{{rank}}", measured(fillOpacity=0)),
        unit="short",
        metric="sglang_tuning_queued_requests",
        no_value=NOT_REPORTED,
        description="Requests that wait, and the limit in force. Where throughput counts it is a range (the guide's"
        f" {GUIDE.queue_lower:.0f} to {GUIDE.queue_upper:.0f}): below the lower line the client is the bottleneck; above the upper one,"
        " drawn when the queue comes near it, scheduling costs too much. A profile for interactive clients limits the wait:"
        " then the line is the queue that is admitted within it.",
    )


def usage() -> Json:
    """Token usage of every pool against the target."""
    target = drawn_threshold("token_usage", "target")
    return timeseries(
        "Token usage by pool",
        Query(target, "well used from", bound_line(GOOD)),
        Query(
            f"{target} * 0 + 1",
            "all of it",
            painted(GOOD, lineWidth=0, fillOpacity=12, fillBelowTo="well used from")
            | {"custom.hideFrom": {"legend": True, "tooltip": True, "viz": False}},
        ),
        Query(per_rank(ranked("sglang_tuning_token_usage_ratio"), by=("pool",)), "{{pool}}{{rank}}", measured()),
        unit="percentunit",
        ceiling=1,
        metric="sglang_tuning_token_usage_ratio",
        no_value=NOT_REPORTED,
        description=f"Share of each KV cache in use. The guide wants it above {GUIDE.token_usage_target} while requests"
        " wait; below it, look for what holds them back.",
    )


def retractions() -> Json:
    """Retractions per minute against what is tolerated."""
    return timeseries(
        "Retractions per minute",
        Query(drawn_threshold("retractions_per_minute", "upper"), "tolerated", bound_line(WATCH)),
        Query(
            while_there(f"(sum(increase({own('sglang_tuning_retracted_requests_total')}[10m])) / 10)", ""),
            "requests",
            painted("purple", lineWidth=1),
        ),
        Query(while_there(f"({every_retraction()})", ""), "retractions", painted(BAD)),
        unit="short",
        metric="sglang_tuning_retraction_events_total",
        no_value=NO_LOG,
        description="Times the KV cache was full and running requests went back to the queue, and how many requests"
        f" that were, over 10 minutes and all DP ranks. The guide tolerates about {GUIDE.retractions_per_minute:.0f} a minute; when more,"
        " admit more cautiously.",
    )


def coverage() -> Json:
    """Share of decode batches that replayed a graph, against the least that is healthy."""
    batches = ranked("sglang_tuning_decode_batches_total")
    replayed = ranked("sglang_tuning_decode_batches_total", 'graph="replayed"')
    judged = ranked(
        "sglang_tuning_state_seconds_total", 'signal="cuda_graph"', 'state!~"idle|unknown|disabled|unsupported"'
    )
    lower = f"{drawn_threshold('cuda_graph', 'lower')} and on () (sum({rate(judged)}) > 0)"
    return timeseries(
        "CUDA graph coverage",
        Query(lower, "covered from", bound_line(GOOD)),
        Query(
            f"0 * {lower} + 1",
            "all of it",
            painted(GOOD, lineWidth=0, fillOpacity=12, fillBelowTo="covered from")
            | {"custom.hideFrom": {"legend": True, "tooltip": True, "viz": False}},
        ),
        Query(ratio(rate(replayed), rate(batches)), "replayed", measured()),
        unit="percentunit",
        ceiling=1,
        metric="sglang_tuning_decode_batches_total",
        no_value=NOT_REPORTED,
        description="Share of decode batches that replayed a captured graph. The guide raises the largest captured"
        " batch when batches outgrow it, and lowers the static memory share with it.",
    )


def wait() -> Json:
    """The estimated wait against the profile's limit."""
    objective = drawn_threshold("queue", "wait_seconds")
    return timeseries(
        "Estimated wait in the queue",
        _edge(f"0 * {objective}", "at once"),
        Query(
            objective,
            "in time up to",
            bound_line(GOOD) | {"custom.fillBelowTo": "at once", "custom.fillOpacity": 12},
        ),
        Query(per_rank(f"{ranked('sglang_tuning_queue_wait_seconds')} < Inf"), "wait{{rank}}", measured()),
        unit="suffix: s",
        metric="sglang_tuning_queue_wait_seconds",
        no_value=NOT_REPORTED,
        description="Requests waiting divided by requests admitted per second. The guide counts requests; an online"
        " server is judged by this wait. A gap means that requests wait and none is admitted.",
    )


def running() -> Json:
    """Running requests and their limit; it is drawn only near the curve, which it would flatten otherwise."""
    limit, running = (ranked(f"sglang_tuning_running_requests{end}") for end in ("_limit", ""))
    near = f"{limit} and on () 4 * max({running}) > max({limit})"
    return timeseries(
        "Running requests and their limit",
        Query(per_rank(near), "limit{{rank}}", bound_line(WATCH)),
        Query(per_rank(ranked("sglang_tuning_running_requests")), "running{{rank}}", measured()),
        unit="short",
        metric="sglang_tuning_running_requests",
        no_value=NOT_REPORTED,
        description="Requests in the running batch against the most that may run (drawn where they come near it). Where the guide sees usage below"
        " its target with a queue, a batch at this line means that the limit holds them back, not"
        " admission.",
    )
