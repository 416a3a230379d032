"""Throughput and inter-token latency at other batches, by the measured step times, each with its interval."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_tuning_exporter.capacity import Estimate, Speeds, StepLine, StepTime
from sglang_tuning_exporter.core.capacities import RankCapacity
from sglang_tuning_exporter.core.plan import throughput


def around(value: float, half: float = 0.02) -> Estimate:
    return Estimate(value, value * (1 - half), value * (1 + half))


def measured(
    *,
    fixed: float = 0.004,
    per_request: float = 0.0002,
    batch: float = 2.0,
    tokens: float = 1.0,
    prefill: float | None = None,
    mix: float | None = None,
    half: float = 0.02,
    source: str = "v1_loads",
) -> RankCapacity:
    """A scheduler of known speed."""
    step = StepTime(
        9000,
        batch,
        1.0,
        around(fixed + per_request * batch, half),
        tokens,
        StepLine(around(fixed), around(per_request, half)),
        source=source,
    )
    speed = None if prefill is None else around(prefill)
    return RankCapacity(None, Speeds(step, speed, per_token=mix), running=batch)


def test_more_requests_at_once_share_a_step() -> None:
    rank = measured()
    assert throughput(rank, 2) == pytest.approx(Estimate(2 / 0.0044, 0, 0), abs=1e3)
    more = throughput(rank, 16)
    assert more is not None
    assert more.value == pytest.approx(16 / 0.0072)
    assert more.low < more.value < more.high


def test_prefill_takes_its_share_of_every_token() -> None:
    plain, beside = throughput(measured(), 8), throughput(measured(prefill=1000.0, mix=2.0), 8)
    assert plain is not None
    assert beside is not None
    assert 1 / beside.value == pytest.approx(1 / plain.value + 0.002)


def test_an_unsure_prefill_speed_makes_the_throughput_unsure() -> None:
    sure, unsure = (measured(prefill=1000.0, mix=2.0) for _ in range(2))
    unsure = replace(unsure, speeds=unsure.speeds._replace(prefill=around(1000.0, 0.5)))
    first, second = throughput(sure, 8), throughput(unsure, 8)
    assert first is not None
    assert second is not None
    assert second.value == pytest.approx(first.value)
    assert second.low < first.low < first.high < second.high
