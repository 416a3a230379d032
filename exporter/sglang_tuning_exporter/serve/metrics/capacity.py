"""Families about what each scheduler can do: measured speed of prefill and decode, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

from sglang_tuning_exporter.capacity.step_time import Estimate
from sglang_tuning_exporter.core.capacities import RankCapacity, capacities
from sglang_tuning_exporter.serve.metrics.families import Family, PerRank, counter, gauge
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


def capacity(sidecar: SidecarView, now: float) -> Iterable[Family]:
    """Return the measured figures of each scheduler; an unknown figure has no series."""
    ranks = PerRank(capacities(sidecar.watch.server, sidecar.measured, now))
    for name, (doc, figure) in GAUGES.items():
        yield ranks.one(gauge(name, doc), partial(_value, figure))
    doc = (
        "Duration of a decode step = fixed + per_request x batch, by least squares over the steps of the last 10 minutes;"
        " source: v1_loads (0.5.18 on), else the log's decode lines."
    )
    yield ranks.several(
        gauge("decode_step_seconds", doc, "part", "source"),
        lambda c: ((part, source, estimate.value) for part, source, estimate in _parts(c)),
    )
    doc = (
        "The ends of the 95 % interval of sglang_tuning_decode_step_seconds, from the spread over windows (jackknife)."
    )
    yield ranks.several(
        gauge("decode_step_bound_seconds", doc, "part", "bound"),
        lambda c: (
            (part, bound, value)
            for part, _, estimate in _parts(c)
            for bound, value in (("low", estimate.low), ("high", estimate.high))
        ),
    )
    failures = counter("loads_failures", "Times that /v1/loads gave no answer, by reason.", "reason", source="metrics")
    reasons = sorted({"timeout", *sidecar.loads.failures}) if sidecar.loads.counts_steps else ()
    yield failures.with_samples((reason, sidecar.loads.failures[reason]) for reason in reasons)


def _value(figure: _Figure, scheduler: RankCapacity) -> float | None:
    found = figure(scheduler)
    return found if found is None or isinstance(found, (int, float)) else found.value


def _parts(scheduler: RankCapacity) -> list[tuple[str, str, Estimate]]:
    """Return name, source and estimate of both parts of the decode step's duration; none where it is not known."""
    step = scheduler.step
    if step is None or step.line is None:
        return []
    return [("fixed", step.source, step.line.fixed), ("per_request", step.source, step.line.per_request)]
