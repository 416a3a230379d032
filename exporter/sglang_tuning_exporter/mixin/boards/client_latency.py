"""The latencies that SGLang measures, as lines beside their objective and as heat maps."""

from __future__ import annotations

from sglang_tuning_exporter.mixin import panels as p
from sglang_tuning_exporter.mixin import queries as q
from sglang_tuning_exporter.mixin.board import PanelRow

QUANTILES = (("0.5", "p50", "light-blue"), ("0.9", "p90", p.NEUTRAL), ("0.99", "p99", "purple"))

FIRST = ("sglang:time_to_first_token_seconds",)
BETWEEN = ("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds")  # the older name: until 0.4.3
WHOLE = ("sglang:e2e_request_latency_seconds",)
QUEUED = ("sglang:queue_time_seconds",)
SECONDS = "suffix: s"  # Grafana's own unit turns 80 s into 1.33 min


def _quantiles(
    title: str,
    metric: tuple[str, ...],
    says: str,
    *,
    objective: str = "",
    no_value: str = p.NO_TRAFFIC,
    unit: str = SECONDS,
) -> p.Json:
    queries = [
        p.Query(q.quantile(share, *metric), name, p.painted(colour, fillOpacity=0)) for share, name, colour in QUANTILES
    ]
    if objective:
        # no line without latencies: the panel then shows its words for no value
        objective_line = f"{q.threshold(objective, 'upper')} and on () ({q.quantile('0.5', *metric)})"
        queries.insert(0, p.Query(objective_line, "objective", p.bound_line(p.WATCH)))
    return p.timeseries(title, *queries, unit=unit, metric=metric[0], description=says, no_value=no_value)


def first_token() -> p.Json:
    """Quantiles of the time to the first token."""
    return _quantiles(
        "Time to first token (TTFT)",
        FIRST,
        "Wait until the first token, queue included. When it is long the guide looks at the queue first, then at long"
        " prompts.",
        objective="time_to_first_token_seconds",
    )


def between_tokens() -> p.Json:
    """Quantiles of the time between two tokens."""
    return _quantiles(
        "Inter-token latency (ITL)",
        BETWEEN,
        "Time from one token to the next. It grows with the running batch: the guide lowers the running limit when it"
        " is too long.",
        objective="inter_token_latency_seconds",
        unit="s",
    )


def whole_request() -> p.Json:
    """Quantiles of whole requests."""
    return _quantiles(
        "End-to-end latency",
        WHOLE,
        "From arrival to the last token. The guide trades this for throughput: more running requests finish more, each"
        " one later.",
    )


def time_queued() -> p.Json:
    """Quantiles of the time in the queue."""
    return _quantiles(
        "Queue time",
        QUEUED,
        "Measured wait of the requests that left the queue; those still waiting do not count. The guide's healthy"
        " queue is one that this wait allows.",
        no_value="No requests, or not reported by this version",
    )


def _map(title: str, metric: tuple[str, ...], says: str, no_value: str = p.NO_TRAFFIC) -> p.Json:
    return p.heatmap(
        title,
        p.Query(q.buckets(*metric), "{{le}}"),
        axis_unit=SECONDS,
        metric=metric[0],
        description=says,
        no_value=no_value,
    )


def first_token_map() -> p.Json:
    """Heat map of the time to the first token."""
    return _map(
        "TTFT, all requests",
        FIRST,
        "Requests per second by how long their first token took. Two separate bands are two kinds of requests, often"
        " short and long prompts, which the guide treats apart.",
    )


def between_tokens_map() -> p.Json:
    """Heat map of the time between two tokens."""
    return _map(
        "ITL, all tokens",
        BETWEEN,
        "Tokens per second by how long they took after the one before. A faint upper band is where a prompt was"
        " computed in between: the guide's --chunked-prefill-size.",
    )


def lines() -> PanelRow:
    """Return the three latencies of a request, for the server's board."""
    return PanelRow(7, (first_token(), between_tokens(), whole_request()))
