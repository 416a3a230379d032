"""Throughput and inter-token latency with more or fewer requests at once, each with its interval, and a table for planning. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_tuning_exporter.capacity.model import RankCapacity
from sglang_tuning_exporter.capacity.step_time import Estimate
from sglang_tuning_exporter.config.profiles import Profile

MOST_BATCH = 4096


@dataclass(frozen=True, slots=True)
class Prediction:
    """All schedulers together with `requests` running at once.

    `inter_token_p50_seconds` is the step time, because more than half of the tokens come from steps that no prefill delays.
    """

    requests: float
    tokens_per_second: Estimate
    inter_token_p50_seconds: Estimate


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
    return Estimate(*(1 / (1 / generated + mix / computed) for generated, computed in zip(speed, prefill, strict=True)))


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
    return Prediction(requests, together, token)


@dataclass(frozen=True, slots=True)
class PlanRow:
    """All schedulers together with `requests` at once; an unknown figure is None.

    `exceeded`: what is exceeded, of inter_token, first_token, kv_cache, running_limit.
    """

    requests: int
    tokens_per_second: Estimate
    inter_token_p50_seconds: Estimate
    kv_cache: float | None
    first_token_seconds: float | None
    exceeded: tuple[str, ...]


def plan_rows(ranks: Sequence[RankCapacity], profile: Profile, prompt: float | None) -> list[PlanRow]:
    """Return a row for 1, 2, 4 … requests per scheduler, up to as many as fit; no rows without step times.

    Without a line only batches near the mean one are known, so that has a row. `prompt`: uncached tokens of the mean prompt.
    """
    most = min((rank.most_requests or MOST_BATCH for rank in ranks), default=0)
    means = {round(rank.step.batch) for rank in ranks if rank.step is not None and rank.step.line is None}
    batches = sorted({*(1 << power for power in range(13) if 1 << power < most), most, *means})
    found = (_row(ranks, batch, profile, prompt) for batch in batches if batch)
    return [row for row in found if row is not None]


def _row(ranks: Sequence[RankCapacity], batch: int, profile: Profile, prompt: float | None) -> PlanRow | None:
    predicted = predict_batches(ranks, [float(batch)] * len(ranks))
    if predicted is None:
        return None
    cache = _kv_cache(ranks, batch)
    first = _first_token(ranks[0], predicted.tokens_per_second.value / len(ranks), prompt)
    limits = [rank.running_limit for rank in ranks if rank.running_limit is not None]
    broken = {
        "inter_token": _above(predicted.inter_token_p50_seconds.value, profile.inter_token_seconds),
        "first_token": _above(first, profile.time_to_first_token_seconds),
        "kv_cache": _above(cache, 1.0),
        "running_limit": _above(float(batch), min(limits, default=None)),
    }
    return PlanRow(
        batch * len(ranks),
        predicted.tokens_per_second,
        predicted.inter_token_p50_seconds,
        cache,
        first,
        tuple(name for name, holds in broken.items() if holds),
    )


def _above(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit


def _kv_cache(ranks: Sequence[RankCapacity], batch: int) -> float | None:
    shares = [
        batch * rank.tokens_per_request / rank.pool_tokens
        for rank in ranks
        if rank.tokens_per_request and rank.pool_tokens
    ]
    return max(shares) if len(shares) == len(ranks) else None


def _first_token(rank: RankCapacity, tokens_per_second: float, prompt: float | None) -> float | None:
    """Return the time to the first token: the prompt's own prefill and that of the prompts before it.

    For prompts of equal length that arrive at random, the wait before it is use / (2 (1 - use)) of one prefill.
    """
    speed, mix = rank.prefill.tokens_per_second, rank.prefill_per_token
    if speed is None or mix is None or prompt is None:
        return None
    use = tokens_per_second * mix / speed.value
    return None if use >= 1 else prompt / speed.value * (1 + use / (2 * (1 - use)))


def larger_cache(ranks: Sequence[RankCapacity], times: float) -> tuple[int, Estimate] | None:
    """Return requests and tokens a second with a KV cache `times` as large and the same step time; None where unknown."""
    batches = []
    for rank in ranks:
        if not rank.pool_tokens or not rank.tokens_per_request:
            return None
        fits = times * rank.pool_tokens / rank.tokens_per_request
        batches.append(float(int(min(fits, rank.running_limit or fits))))
    predicted = predict_batches(ranks, batches)
    return None if predicted is None else (int(sum(batches)), predicted.tokens_per_second)
