"""Throughput and inter-token latency with more or fewer requests at once, each with its interval. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_tuning_exporter.capacity.estimate import Estimate
from sglang_tuning_exporter.capacity.model import RankCapacity

LEAST_OF_PREFILL = 0.1  # of the measured speed: the lower end of its interval may lie below zero


@dataclass(frozen=True, slots=True)
class Prediction:
    """All schedulers together with `requests` running at once.

    `inter_token_p50_seconds` is the step time, because more than half of the tokens come from steps that no prefill delays. The mean
    includes prefill.
    """

    requests: float
    tokens_per_second: Estimate
    inter_token_p50_seconds: Estimate
    inter_token_mean_seconds: float


def throughput(rank: RankCapacity, batch: float) -> Estimate | None:
    """Return generated tokens a second at a batch, with the prefill of the present mix.

    Each generated token takes its share of a step and of the prefill that comes with it:
    1 / (step / (batch x tokens per step) + prompt tokens per generated token / prefill speed).
    """
    speed = rank.decode_speed(batch)
    if speed is None:
        return None
    prefill, mix = rank.prefill.tokens_per_second, rank.prefill_per_token or 0.0
    if prefill is None or not mix:
        return speed
    ends = zip(speed, (prefill.value, max(prefill.low, LEAST_OF_PREFILL * prefill.value), prefill.high), strict=True)
    return Estimate(*(1 / (1 / generated + mix / computed) for generated, computed in ends))


def predict(ranks: Sequence[RankCapacity], times: float = 1.0) -> Prediction | None:
    """Return the prediction for `times` as many running requests as now; None unless every scheduler can be predicted."""
    if not ranks or not all(rank.running for rank in ranks):
        return None
    return predict_batches(ranks, [times * (rank.running or 0.0) for rank in ranks])


def predict_batches(ranks: Sequence[RankCapacity], batches: Sequence[float]) -> Prediction | None:
    """Return the prediction for these batches, one per scheduler; None unless each can be predicted."""
    speeds = [throughput(rank, batch) for rank, batch in zip(ranks, batches, strict=True)]
    steps = [None if rank.step is None else rank.step.at(batch) for rank, batch in zip(ranks, batches, strict=True)]
    known = [each for each in speeds if each is not None]
    requests = sum(batches)
    if len(known) < len(ranks) or not requests:
        return None
    together = Estimate(*(sum(part) for part in zip(*known, strict=True)))
    weighted = [
        step.times(batch / requests / (rank.step.tokens_per_request or 1.0))
        for rank, batch, step in zip(ranks, batches, steps, strict=True)
        if step is not None and rank.step is not None
    ]
    token = Estimate(*(sum(part) for part in zip(*weighted, strict=True)))
    return Prediction(requests, together, token, requests / together.value)


def largest_batch_within(rank: RankCapacity, seconds: float) -> float | None:
    """Return the largest batch whose step takes at most `seconds`; 0 where even one request takes longer, None without a line."""
    step = rank.step
    if step is None or step.line is None:
        return None
    left = seconds * step.tokens_per_request - (step.seconds.value - step.line.per_request.value * step.batch)
    return max(left / step.line.per_request.value, 0.0)
