"""The guide's figures over time, each with the healthy range of the profile in force."""

from __future__ import annotations

from sglang_tuning_exporter.mixin import panels as p
from sglang_tuning_exporter.mixin import queries as q
from sglang_tuning_exporter.mixin.board import PanelRow
from sglang_tuning_exporter.mixin.boards.common import GUIDE

NO_LOG = "No log is read"


def panel_rows() -> tuple[PanelRow, PanelRow]:
    """Return the guide's figures over time, and the estimated wait beside the queue."""
    return PanelRow(7, (queue(), wait(), usage())), PanelRow(7, (running(), retractions(), coverage()))


def _edge(expr: str, name: str, **custom: object) -> p.Query:
    """Return an invisible line at the end of the scale, the edge of a band."""
    hidden = {"legend": True, "tooltip": True, "viz": False}
    return p.Query(expr, name, p.painted(p.GOOD, lineWidth=0, **({"fillOpacity": 0} | custom), hideFrom=hidden))


def _band(lower: str, name: str, top: str) -> tuple[p.Query, p.Query]:
    """Return the line of a lower bound, and the band above it."""
    return p.Query(lower, name, p.bound_line(p.GOOD)), _edge(top, "all of it", fillOpacity=12, fillBelowTo=name)


def queue() -> p.Json:
    """Queued requests and the limit in force: the profile's range, or the queue that is admitted within the longest wait."""
    queued, wait = (q.ranked(f"sglang_tuning_{name}") for name in ("queued_requests", "queue_wait_seconds"))
    longest, upper = q.drawn_threshold("queue", "wait_seconds"), q.drawn_threshold("queue", "upper")
    by_wait = f"unless on () {longest}"
    near = f"and on () 2 * max({queued}) > {upper}"  # a limit far above would flatten the curve
    admitted = f"sum by (dp_rank) ({queued}) / (sum by (dp_rank) ({wait} < Inf) > 0)"
    by_rank = q.per_rank(f"{admitted} * on () group_left () {longest}")
    return p.timeseries(
        "Queued requests",
        p.Query(f"{q.drawn_threshold('queue', 'lower')} {by_wait}", "healthy from", p.bound_line(p.GOOD)),
        p.Query(f"{upper} {near} {by_wait} or {by_rank}", "limit{{rank}}", p.bound_line(p.WATCH)),
        p.Query(q.per_rank(queued), "queued{{rank}}", p.measured(fillOpacity=0)),
        metric="sglang_tuning_queued_requests",
        description="Requests that wait, and the limit in force. Where throughput counts it is a range (the guide's"
        f" {GUIDE.queue_lower:.0f} to {GUIDE.queue_upper:.0f}): below the lower line the client is the bottleneck; above the upper one,"
        " drawn when the queue comes near it, scheduling costs too much. A profile for interactive clients limits the wait:"
        " then the line is the queue that is admitted within it.",
    )


def usage() -> p.Json:
    """Token usage of every pool against the target."""
    target = q.drawn_threshold("token_usage", "target")
    return p.timeseries(
        "Token usage by pool",
        *_band(target, "well used from", f"{target} * 0 + 1"),
        p.Query(
            q.per_rank(q.ranked("sglang_tuning_token_usage_ratio"), by=("pool",)), "{{pool}}{{rank}}", p.measured()
        ),
        unit="percentunit",
        ceiling=1,
        metric="sglang_tuning_token_usage_ratio",
        description=f"Share of each KV cache in use. The guide wants it above {GUIDE.token_usage_target} while requests"
        " wait; below it, look for what holds them back.",
    )


def retractions() -> p.Json:
    """Retractions per minute against what is tolerated."""
    return p.timeseries(
        "Retractions per minute",
        p.Query(q.drawn_threshold("retractions_per_minute", "upper"), "tolerated", p.bound_line(p.WATCH)),
        p.Query(
            q.while_there(f"(sum(increase({q.own('sglang_tuning_retracted_requests_total')}[10m])) / 10)", ""),
            "requests",
            p.painted("purple", lineWidth=1),
        ),
        p.Query(q.while_there(f"({q.retractions()})", ""), "retractions", p.painted(p.BAD)),
        metric="sglang_tuning_retraction_events_total",
        no_value=NO_LOG,
        description="Times the KV cache was full and running requests went back to the queue, and how many requests"
        f" that were, over 10 minutes and all DP ranks. The guide tolerates about {GUIDE.retractions_per_minute:.0f} a minute; when more,"
        " admit more cautiously.",
    )


def coverage() -> p.Json:
    """Share of decode batches that replayed a graph, against the least that is healthy."""
    batches = q.ranked("sglang_tuning_decode_batches_total")
    replayed = q.ranked("sglang_tuning_decode_batches_total", 'graph="replayed"')
    judged = q.ranked(
        "sglang_tuning_state_seconds_total", 'signal="cuda_graph"', 'state!~"idle|unknown|disabled|unsupported"'
    )
    lower = f"{q.drawn_threshold('cuda_graph', 'lower')} and on () (sum({q.rate(judged)}) > 0)"
    return p.timeseries(
        "CUDA graph coverage",
        *_band(lower, "covered from", f"0 * {lower} + 1"),
        p.Query(q.ratio(q.rate(replayed), q.rate(batches)), "replayed", p.measured()),
        unit="percentunit",
        ceiling=1,
        metric="sglang_tuning_decode_batches_total",
        description="Share of decode batches that replayed a captured graph. The guide raises the largest captured"
        " batch when batches outgrow it, and lowers the static memory share with it.",
    )


def wait() -> p.Json:
    """The estimated wait against the profile's limit."""
    objective = q.drawn_threshold("queue", "wait_seconds")
    return p.timeseries(
        "Estimated wait in the queue",
        _edge(f"0 * {objective}", "at once"),
        p.Query(objective, "in time up to", p.bound_line(p.GOOD, fillBelowTo="at once", fillOpacity=12)),
        p.Query(q.per_rank(f"{q.ranked('sglang_tuning_queue_wait_seconds')} < Inf"), "wait{{rank}}", p.measured()),
        unit="suffix: s",
        metric="sglang_tuning_queue_wait_seconds",
        description="Requests waiting divided by requests admitted per second. The guide counts requests; an online"
        " server is judged by this wait. A gap means that requests wait and none is admitted.",
    )


def running() -> p.Json:
    """Running requests and their limit; it is drawn only near the curve, which it would flatten otherwise."""
    limit, running = (q.ranked(f"sglang_tuning_running_requests{end}") for end in ("_limit", ""))
    near = f"{limit} and on () 4 * max({running}) > max({limit})"
    return p.timeseries(
        "Running requests and their limit",
        p.Query(q.per_rank(near), "limit{{rank}}", p.bound_line(p.WATCH)),
        p.Query(q.per_rank(q.ranked("sglang_tuning_running_requests")), "running{{rank}}", p.measured()),
        metric="sglang_tuning_running_requests",
        description="Requests in the running batch against the most that may run (drawn where they come near it). Where the guide sees usage below"
        " its target with a queue, a batch at this line means that the limit holds them back, not"
        " admission.",
    )
