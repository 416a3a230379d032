"""What a notification says of a diagnosis: one flag, its present value and the value to try, from one piece of advice."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import requests

from conftest import Page, config, watched_retractions, web
from sglang_tuning_exporter.capacity.estimate import Estimate
from sglang_tuning_exporter.capacity.prediction import Prediction
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.diagnosis.advice import Advice, SizingInput, advise
from sglang_tuning_exporter.diagnosis.evidence import Evidence, Past
from sglang_tuning_exporter.diagnosis.expectation import Expected
from sglang_tuning_exporter.diagnosis.findings import Finding
from sglang_tuning_exporter.diagnosis.recommendation import Recommendation, RecommendedSince, recommendation, since
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.totals import Totals, batch_size_bucket
from test_metrics import page_of

NAME = "sglang_tuning_recommendation_timestamp_seconds"


def case(ran: float | None = None, limits: dict[int | None, float] | None = None, /, **args: object) -> SizingInput:
    recent = Totals()
    if ran is not None:
        recent.running_seconds[batch_size_bucket(ran)] = 100.0
    facts = ServerFacts(args=args, running_limits=limits or {})
    return SizingInput(Past(recent, {}, 600.0, facts, PROFILES["online"]))


def found(diagnosis: str, advice: list[Advice]) -> Finding:
    return Finding(BY_ID[diagnosis], (Evidence("x", 1.0, 0.0, "count"),), "high", tuple(advice))


def said(diagnosis: str, of: SizingInput) -> Recommendation:
    return recommendation(found(diagnosis, advise(diagnosis, of)), of.facts)


def test_a_value_is_shown_as_it_is_typed() -> None:
    words = said("retracting_too_often", case(schedule_conservativeness=0.05))
    assert words == ("retracting_too_often", "--schedule-conservativeness", "0.05", "1.3", "raise")


def test_of_two_flags_that_of_the_row_is_shown_with_its_values() -> None:
    of = case(20, mem_fraction_static=0.88, cuda_graph_max_bs=160)
    assert [advice.flag for advice in advise("graph_memory_short", of)] == [
        "--cuda-graph-max-bs",
        "--mem-fraction-static",
    ]
    assert said("graph_memory_short", of)[1:] == ("--mem-fraction-static", "0.88", "0.83", "lower")


def test_a_flag_that_figures_prove_to_be_the_cause_comes_before_that_of_the_row() -> None:
    own = advise("retracting_too_often", case(schedule_conservativeness=0.05))
    cause = Advice("--max-total-tokens", "max_total_tokens", 4096.0, None, "leave it out", "", "", direction="drop")
    assert recommendation(found("retracting_too_often", [cause, *own]), ServerFacts()).suggested == "1.3"
    shown = Advice(**{name: getattr(cause, name) for name in Advice.__slots__} | {"explains": True})
    words = recommendation(found("retracting_too_often", [shown, *own]), ServerFacts())
    assert words[1:] == ("--max-total-tokens", "4096", "leave it out", "drop")


@pytest.mark.parametrize(
    ("diagnosis", "args", "words"),
    [
        ("cuda_graph_off", {"disable_cuda_graph": True}, ("--disable-cuda-graph", "set", "drop", "drop")),
        ("torch_compile_candidate", {"model_path": "m"}, ("--enable-torch-compile", "not set", "add", "add")),
        (
            "metrics_disabled",
            {"enable_metrics": False},
            ("--enable-metrics", "not set", "add --enable-metrics --enable-cache-report", "add"),
        ),
    ],
)
def test_a_switch_is_described_in_words(diagnosis: str, args: dict[str, object], words: tuple[str, ...]) -> None:
    assert said(diagnosis, case(**args))[1:] == words


def test_advice_to_people_names_no_flag() -> None:
    words = said("server_down", case())
    assert (words.flag, words.current, words.suggested, words.direction) == (
        "",
        "",
        "save the log, read its last lines, and restart the server",
        "look",
    )


def test_a_flag_that_is_not_set_says_so() -> None:
    assert said("retracting_too_often", case(model_path="m")).current == "not set"


def test_an_unknown_flag_has_no_present_value() -> None:
    cut = case(model_path="m")
    cut.facts.args_are_cut = True
    assert said("retracting_too_often", case()).current == ""
    assert said("retracting_too_often", cut).current == ""
    assert said("torch_compile_candidate", cut).current == ""


@pytest.mark.parametrize(
    ("limits", "args", "current"),
    [
        ({None: 2048.0}, {"tp_size": 1}, "2048 (default)"),
        ({0: 64.0, 1: 64.0}, {"dp_size": 2, "tp_size": 2, "enable_dp_attention": True}, "128 (default)"),
        ({None: 64.0}, {"max_running_requests": 64}, "64"),
    ],
)
def test_a_limit_in_force_that_nobody_set_is_the_default(
    limits: dict[int | None, float], args: dict[str, object], current: str
) -> None:
    assert said("running_at_limit", case(None, limits, **args)).current == current


def test_a_recommendation_keeps_its_time_for_as_long_as_its_words() -> None:
    first, other = Recommendation("a", "--x", "1", "2", "raise"), Recommendation("a", "--x", "1", "3", "raise")
    before = since({}, {first: None}, 100.0)
    assert since(before, {first: None}, 200.0) == {first: RecommendedSince(100.0, None)}
    assert since(before, {other: None}, 200.0) == {other: RecommendedSince(200.0, None)}
    assert since(since(before, {}, 200.0), {first: None}, 300.0) == {first: RecommendedSince(300.0, None)}


def expectation(then: float) -> Expected:
    now, after = (
        Prediction(2.0, Estimate(speed, speed, speed), Estimate(0.004, 0.004, 0.004), 0.004) for speed in (400.0, then)
    )
    return Expected(now, after, "the last 10 minutes' step times")


def test_the_expected_effect_keeps_its_words_until_its_figure_changes() -> None:
    advice = Recommendation("retracting_too_often", "--schedule-conservativeness", "0.05", "1.3", "raise")
    first, alike, other = expectation(800.0), expectation(830.0), expectation(1000.0)
    said = since({}, {advice: first}, 100.0)
    assert since(said, {advice: alike}, 110.0)[advice].expected is first
    assert since(said, {advice: None}, 110.0)[advice].expected is first
    assert since(said, {advice: other}, 110.0)[advice].expected is other
    assert since(since({}, {advice: None}, 100.0), {advice: first}, 110.0) == {advice: RecommendedSince(100.0, first)}


def at_most(requests: int, rate: float) -> Recommendation:
    words = f"send at most {requests:,} requests at once, or add a replica: SGLang starts about {rate:g} requests/s"
    return Recommendation("latency_queue", "", "", words, "slow down")


@pytest.mark.parametrize(
    ("now", "is_kept"), [(at_most(1_100, 3.2), True), (at_most(1_000, 2.3), False), (at_most(700, 3.0), False)]
)
def test_advice_to_people_keeps_its_words_while_its_figures_hardly_change(now: Recommendation, is_kept: bool) -> None:  # noqa: FBT001 - a case
    first = at_most(1_000, 3.0)
    said = since({}, {first: None}, 100.0)
    expected = {first: RecommendedSince(100.0, None)} if is_kept else {now: RecommendedSince(110.0, None)}
    assert since(said, {now: None}, 110.0) == expected


def test_the_value_of_a_flag_changes_its_series_however_little_it_changes() -> None:
    first, other = (
        Recommendation("running_at_limit", "--max-running-requests", "3", value, "raise") for value in ("20", "21")
    )
    assert since(since({}, {first: None}, 100.0), {other: None}, 110.0) == {other: RecommendedSince(110.0, None)}


def test_the_page_has_one_series_for_each_finding_with_advice(tmp_path: Path) -> None:
    sidecar = watched_retractions(tmp_path)
    begin = time.time()
    with web(sidecar) as url:
        page = Page(requests.get(url + "/metrics", timeout=10).text)
    labels = page.labels(NAME)
    assert {
        "diagnosis": "retracting_too_often",
        "flag": "--schedule-conservativeness",
        "current": "0.1",
        "suggested": "1.3",
        "direction": "raise",
        "expected": "",
    } in labels
    assert len({each["diagnosis"] for each in labels}) == len(labels)
    active = {
        s.labels["diagnosis"] for s in page.samples if s.name == "sglang_tuning_diagnosis_active" and s.value == 1
    }
    assert {each["diagnosis"] for each in labels} <= active
    at = page.value(NAME, diagnosis="retracting_too_often")
    assert at is not None
    assert begin - 2 <= at <= time.time()


def test_words_of_the_server_are_cut_and_do_not_cost_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    word = '"}\n\udcff' + "x" * 9000
    hostile = Recommendation("server_down", "--x", word, word, "set")
    monkeypatch.setattr("sglang_tuning_exporter.collect.sidecar.recommendations", lambda _: {hostile: None})
    (labels,) = page_of(Sidecar(config(sglang_url="http://127.0.0.1:9"))).labels(NAME)
    assert len(labels["current"]) < 600 > len(labels["suggested"])
