"""Advice states its expected effect where step times were measured, and is withheld where the effect is negligible."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_tuning_exporter.capacity.estimate import BETWEEN, Estimate
from sglang_tuning_exporter.capacity.prediction import largest_batch_within, predict, predict_batches, throughput
from sglang_tuning_exporter.capacity.ranks import RankCapacity
from sglang_tuning_exporter.capacity.readings import Prefill
from sglang_tuning_exporter.capacity.step_time import StepLine, StepTime
from sglang_tuning_exporter.diagnosis.advice import Advice, advise
from sglang_tuning_exporter.diagnosis.evidence import Past, past_of
from sglang_tuning_exporter.diagnosis.findings import judge
from sglang_tuning_exporter.diagnosis.json_findings import finding_document
from sglang_tuning_exporter.diagnosis.sizing.advised_value import SizingInput
from sglang_tuning_exporter.diagnosis.sizing.limits import batch_within_objective
from sglang_tuning_exporter.sglang.events import DecodeBatch, KvPool, Limits, Rank, ServerArgs
from sglang_tuning_exporter.state.latency import RecentLatency
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState
from test_core_report import faults
from test_web_findings import SCHEMA


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
    return RankCapacity(None, step, Prefill(speed, None), prefill_per_token=mix, running=batch)


def past(
    *ranks: RankCapacity,
    running: int = 2,
    queued: int = 30,
    usage: float = 0.05,
    limit: int = 2,
    profile: str = "offline",
) -> Past:
    """Two minutes in which `running` requests ran and `queued` waited, at the running limit."""
    state = ServerState(PROFILES[profile], 0.0)
    state.observe(ServerArgs(0.0, Rank(), {"model_path": "m", "max_running_requests": limit, "tp_size": 1}), 0.0)
    state.observe(KvPool(0.0, Rank(), 16384), 0.0)
    state.observe(Limits(0.0, Rank(), max_total_num_tokens=16384, max_running_requests=limit), 0.0)
    for second in range(120):
        state.observe(DecodeBatch(float(second), Rank(), running, queued, 800, usage), float(second))
    state.advance(120.0)
    return replace(past_of(state, 120.0), capacities=lambda: ranks)


def advised(given: Past, row: str = "running_at_limit") -> Advice:
    return advise(row, SizingInput(given, frozenset({row})))[0]


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


def test_accepted_drafts_count_as_tokens_of_their_step() -> None:
    one, three = predict([measured()]), predict([measured(tokens=3.0)])
    assert one is not None
    assert three is not None
    assert three.tokens_per_second.value == pytest.approx(3 * one.tokens_per_second.value)
    assert three.inter_token_p50_seconds.value == pytest.approx(one.inter_token_p50_seconds.value / 3)


def test_schedulers_add_up_and_one_unknown_makes_all_unknown() -> None:
    one, two = predict([measured()]), predict([measured(), measured()])
    assert one is not None
    assert two is not None
    assert two.tokens_per_second.value == pytest.approx(2 * one.tokens_per_second.value)
    assert two.inter_token_p50_seconds.value == pytest.approx(one.inter_token_p50_seconds.value)
    assert predict([measured(), RankCapacity(1, running=2.0)]) is None
    assert predict_batches([], []) is None


def test_the_largest_batch_within_a_time_is_on_the_line() -> None:
    rank = measured()
    assert largest_batch_within(rank, 0.0084) == pytest.approx(22.0)
    assert largest_batch_within(rank, 0.001) == 0.0
    assert largest_batch_within(RankCapacity(None), 1.0) is None


def test_the_advice_to_raise_the_limit_has_its_expected_effect() -> None:
    advice = advised(past(measured()))
    assert advice.flag == "--max-running-requests"
    assert advice.expected is not None
    # 16 at once, of 32 requests
    assert advice.expected.then.tokens_per_second.value == pytest.approx(16 / 0.0072)
    assert "expected: 455 → 2,222 tokens/s (+389 %), inter-token p50 4.4 → 7.2 ms" in advice.gain
    assert "the last 10 minutes' step times" in advice.gain


def test_no_more_run_than_want_to() -> None:
    advice = advised(past(measured(), queued=4))
    assert advice.expected is not None
    assert advice.expected.then.requests == pytest.approx(6.0)


def test_a_change_with_hardly_any_gain_is_mentioned_but_not_advised() -> None:
    advice = advised(past(measured(fixed=0.00001, per_request=0.01, half=0.001)))
    assert advice.flag == ""
    assert advice.suggested is None
    assert "leave --max-running-requests as it is" in advice.suggestion
    assert "under 5 %" in advice.suggestion


@pytest.mark.parametrize(
    "ranks",
    [
        (),
        (RankCapacity(None),),
        (replace(measured(), step=replace(measured().step, line=None, refused="hardly varied")),),  # type: ignore[type-var]
    ],
)
def test_without_a_measured_line_there_is_no_figure(ranks: tuple[RankCapacity, ...]) -> None:
    advice = advised(past(*ranks))
    assert advice.flag == "--max-running-requests"
    assert advice.expected is None
    assert "expected" not in advice.gain


def test_a_figure_from_the_log_says_that_prefill_is_left_out() -> None:
    assert "the log's decode lines, prefill left out" in advised(past(measured(source="log"))).gain


def test_advice_to_clients_has_the_expected_effect_of_more_requests_at_once() -> None:
    given = past(measured(batch=1.0), running=1, queued=0, usage=0.2, limit=64)
    advice = advised(given, "client_too_slow")
    assert advice.expected is not None
    assert advice.expected.gain > 1


def test_a_limit_is_raised_no_further_than_tokens_come_in_time() -> None:
    given = past(measured(per_request=0.004), profile="online", limit=2)
    objective = PROFILES["online"].inter_token_seconds
    assert objective is not None
    batch = batch_within_objective(SizingInput(given))
    assert batch == pytest.approx((objective - 0.004) / 0.004)
    advice = advised(given)
    assert advice.suggested == min(16.0, float(int(batch or 0)))


def test_latency_beyond_the_model_counts_in_proportion() -> None:
    model = predict([measured()])
    assert model is not None
    given = past(measured(), profile="online")
    slow = RecentLatency(100.0, 0.0, 2 * model.inter_token_mean_seconds, 0.0, 0.0)
    alone, behind = (
        batch_within_objective(SizingInput(each)) for each in (given, replace(given, latency={"inter_token": slow}))
    )
    assert alone is not None
    assert behind is not None
    assert behind < alone / 1.9


def test_the_document_has_value_interval_and_basis() -> None:
    (finding, *_) = (each for each in judge(past(measured())).findings if each.diagnosis.id == "running_at_limit")
    document = finding_document(finding, 0.0, 120.0)
    (advice, *_) = document["advice"]
    expected = advice["expected"]
    assert expected["tokens_per_second"]["now"] == pytest.approx(454.5, abs=0.1)
    low, high = expected["tokens_per_second"]["interval"]
    assert low < expected["tokens_per_second"]["value"] < high
    assert "step times" in expected["basis"]
    schema = SCHEMA["properties"]["findings"]["items"]["properties"]["advice"]["items"]
    assert faults(advice, schema) == []


def test_a_quiet_time_in_the_window_does_not_make_a_prediction_too_far() -> None:
    """Eight ran at once for a while; the mean over the window shows a third of that."""
    quiet = replace(measured(batch=3.0), step=replace(measured(batch=3.0).step, deviation=2.5))  # type: ignore[type-var]
    given = past(quiet, running=3, queued=0, usage=0.05, limit=64)
    advice = advised(given, "client_too_slow")
    assert advice.expected is not None
    assert advice.expected.then.requests > 8 * 3


def test_a_prediction_ends_at_eight_times_the_largest_batch_seen() -> None:
    advice = advised(past(measured(), running=2, queued=0, usage=0.01, limit=200), "client_too_slow")
    assert advice.expected is None


def test_a_kv_cache_of_twice_the_tokens_runs_twice_the_requests() -> None:
    state = ServerState(PROFILES["offline"], 0.0)
    args = {"model_path": "m", "max_total_tokens": 3000, "schedule_conservativeness": 1.0, "tp_size": 1}
    state.observe(ServerArgs(0.0, Rank(), args), 0.0)
    state.observe(KvPool(0.0, Rank(), 3000), 0.0)
    state.observe(Limits(0.0, Rank(), max_total_num_tokens=3000, max_running_requests=1500), 0.0)
    for second in range(120):
        state.observe(DecodeBatch(float(second), Rank(), 10, 30, 2900, 0.97), float(second))
    state.advance(120.0)
    given = replace(past_of(state, 120.0), capacities=lambda: (measured(batch=10.0),))
    advice = [each for each in advise("running_far_below_limit", SizingInput(given)) if each.arg == "max_total_tokens"]
    assert [each.suggested for each in advice] == [6000.0]
    assert advice[0].expected is not None
    assert advice[0].expected.then.requests == pytest.approx(20.0)


def test_an_exact_fit_is_predicted_no_closer_than_minutes_differ() -> None:
    exact = Estimate(1000.0, 1000.0, 1000.0).with_drift
    assert (exact.low, exact.high) == pytest.approx((1000.0 * (1 - 1.96 * BETWEEN), 1000.0 * (1 + 1.96 * BETWEEN)))


@pytest.mark.parametrize("half", [0.1, 0.5, 3.0])
def test_the_spread_between_minutes_is_added_to_the_fits_own(half: float) -> None:
    own = around(1000.0, half)
    later = own.with_drift
    assert later.low <= own.low or later.low == 0.0
    assert later.high > own.high
    assert later.low >= 0.0


def test_an_unsure_prefill_speed_makes_the_throughput_unsure() -> None:
    sure, unsure = (measured(prefill=1000.0, mix=2.0) for _ in range(2))
    unsure = replace(unsure, prefill=Prefill(around(1000.0, 0.5), None))
    first, second = throughput(sure, 8), throughput(unsure, 8)
    assert first is not None
    assert second is not None
    assert second.value == pytest.approx(first.value)
    assert second.low < first.low < first.high < second.high


def test_under_five_per_cent_is_judged_without_the_spread_between_minutes() -> None:
    """The machine's drift changes both sides alike."""
    flat = advised(past(measured(fixed=0.00001, per_request=0.01, half=0.001)))
    assert flat.expected is not None
    assert flat.expected.gain_interval[1] < 0.05
    then = flat.expected.then.tokens_per_second
    assert then.with_drift.high > 1.1 * then.value
