"""Families about what each scheduler can do: measured speed of prefill and decode, and what follows from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from sglang_tuning_exporter.capacity.model import capacities
from sglang_tuning_exporter.serve.metrics.families import counter, gauge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.core import Metric

    from sglang_tuning_exporter.capacity.estimate import Estimate
    from sglang_tuning_exporter.capacity.model import RankCapacity
    from sglang_tuning_exporter.serve.metrics.view import SidecarView

# Name, HELP with the formula, and the figure; docs/capacity.md has them all. Over the last ten minutes.
_Figure: TypeAlias = "Callable[[RankCapacity], Estimate | float | None]"
GAUGES: dict[str, tuple[str, _Figure]] = {
    "prefill_tokens_per_second": (
        "Prompt tokens computed per second of prefill: increase of total_prefill_uncached_tokens / of total_prefill_busy_us (/v1/loads).",
        lambda c: c.prefill.tokens_per_second,
    ),
    "prefill_share_ratio": (
        "Share of wall time spent in prefill, 0-1: increase of total_prefill_busy_us / time between the snapshots.",
        lambda c: c.prefill.share,
    ),
    "prefill_backlog_seconds": (
        "Seconds of prefill that wait in the queue: num_waiting_uncached_tokens / sglang_tuning_prefill_tokens_per_second.",
        lambda c: c.backlog_seconds,
    ),
    "decode_step_mean_seconds": (
        "Mean duration of a decode step that follows another one, at the batch sizes of the last 10 minutes.",
        lambda c: None if c.step is None else c.step.seconds,
    ),
    "tokens_per_decode_step": (
        "Tokens that a decode step generates for each request: 1 without speculative decoding, else the accepted length.",
        lambda c: None if c.step is None or c.step.source == "log" else c.step.tokens_per_request,
    ),
    "decode_tokens_per_second_limit": (
        "Generation throughput without prefill with as many requests as fit and may run: batch x tokens per step / (fixed + per_request x batch).",
        lambda c: c.decode_limit,
    ),
}


def capacity(sidecar: SidecarView, now: float) -> Iterable[Metric]:
    """Return the measured figures of each scheduler; an unknown figure has no series."""
    has_ranks = sidecar.state.has_dp_ranks
    labels = ("dp_rank",) if has_ranks else ()
    found = sorted(
        capacities(sidecar.state, sidecar.measured, now), key=lambda each: -1 if each.dp is None else each.dp
    )
    for name, (words, figure) in GAUGES.items():
        family = gauge(name, words, *labels)
        for each in found:
            value = figure(each)
            if value is not None:
                family.add_metric(
                    _rank(each, has_ranks=has_ranks), value if isinstance(value, (int, float)) else value.value
                )
        yield family
    yield from _steps(found, labels, has_ranks=has_ranks)
    failures = counter("loads_failures", "Times that /v1/loads gave no answer, by reason.", "reason")
    if sidecar.loads.counts_steps:
        for reason in sorted({"timeout", *sidecar.loads.failures}):
            failures.add_metric([reason], sidecar.loads.failures[reason])
    yield failures


def _steps(found: list[RankCapacity], labels: tuple[str, ...], *, has_ranks: bool) -> Iterable[Metric]:
    parts = gauge(
        "decode_step_seconds",
        "Duration of a decode step = fixed + per_request x batch, by least squares over the steps of the last 10 minutes;"
        " source: v1_loads (0.5.18 on), else the log's decode lines.",
        "part",
        "source",
        *labels,
    )
    bounds = gauge(
        "decode_step_bound_seconds",
        "The ends of the 95 % interval of sglang_tuning_decode_step_seconds, from the spread over windows (jackknife).",
        "part",
        "bound",
        *labels,
    )
    for each in found:
        if each.step is None or each.step.line is None:
            continue
        own = _rank(each, has_ranks=has_ranks)
        for part, estimate in (("fixed", each.step.line.fixed), ("per_request", each.step.line.per_request)):
            parts.add_metric([part, each.step.source, *own], estimate.value)
            bounds.add_metric([part, "low", *own], estimate.low)
            bounds.add_metric([part, "high", *own], estimate.high)
    yield parts
    yield bounds


def _rank(each: RankCapacity, *, has_ranks: bool) -> list[str]:
    return [str(each.dp)] if has_ranks else []
