"""A table for planning: throughput and latency with 1, 2, 4 … requests at once, and with a larger KV cache. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_tuning_exporter.capacity.estimate import Estimate
from sglang_tuning_exporter.capacity.model import RankCapacity
from sglang_tuning_exporter.capacity.prediction import predict_batches
from sglang_tuning_exporter.state.profiles import Profile

MOST_BATCH = 4096


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


def rows(ranks: Sequence[RankCapacity], profile: Profile, prompt: float | None) -> list[PlanRow]:
    """Return a row for 1, 2, 4 … requests per scheduler, up to as many as fit; no rows without step times.

    `prompt`: uncached tokens of the mean prompt.
    """
    most = min((rank.most_requests or MOST_BATCH for rank in ranks), default=0)
    batches = sorted({*(1 << power for power in range(13) if 1 << power < most), most})
    found = (_row(ranks, batch, profile, prompt) for batch in batches if batch)
    return [row for row in found if row is not None]


def _row(ranks: Sequence[RankCapacity], batch: int, profile: Profile, prompt: float | None) -> PlanRow | None:
    predicted = predict_batches(ranks, [float(batch)] * len(ranks))
    if predicted is None:
        return None
    cache, first = (
        _kv_cache(ranks, batch),
        _first_token(ranks[0], predicted.tokens_per_second.value / len(ranks), prompt),
    )
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
