"""Causes before consequences: which finding becomes the verdict, and which findings follow from it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scenarios import Story, decoding, failed, repeated, retraction, started
from sglang_tuning_exporter.diagnosis.evidence import Evidence, past_of
from sglang_tuning_exporter.diagnosis.findings import Judgement, causes_of, judge
from sglang_tuning_exporter.diagnosis.table import ALERTS, BY_ID, DIAGNOSES, causes_first
from sglang_tuning_exporter.sglang.events import NO_RANK, Liveness, Rejection
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

DIED = Liveness(None, NO_RANK, "process_died")


def judged(story: Story, end: float, *, profile: str = "online", down: bool = False) -> Judgement:
    state = ServerState(PROFILES[profile], 0.0)
    for at, event in sorted(story, key=lambda pair: pair[0]):
        state.observe(event, at)  # type: ignore[arg-type]  # the stories here have events alone
    state.settle(end)
    return judge(past_of(state, end, troubles=frozenset({"server_down"} if down else ())))


def found(judgement: Judgement) -> list[str]:
    return [finding.diagnosis.id for finding in judgement.findings]


@pytest.mark.parametrize(
    ("phase", "row"),
    [
        ("graph_capture", "graph_memory_short"),
        ("unknown", "out_of_memory_any"),
        ("startup", "out_of_memory_any"),
        ("prefill", "out_of_memory_prefill"),
        ("decode", "out_of_memory_decode"),
    ],
)
def test_the_verdict_of_a_server_that_ran_out_of_memory_and_ended_is_the_memory_failure(phase: str, row: str) -> None:
    story = [*started(), *decoding(0.0, 100.0), (101.0, failed(phase)), (102.0, DIED)]
    judgement = judged(story, 130.0)
    assert judgement.verdict == row
    assert found(judgement)[:2] == [row, "server_down"]
    assert judgement.findings[1].because == (row,)


def test_the_verdict_of_a_server_that_its_watchdog_ended_is_the_hang() -> None:
    stopped = Liveness(None, NO_RANK, "watchdog_timeout")
    judgement = judged([*started(), *decoding(0.0, 100.0), (400.0, stopped), (401.0, DIED)], 420.0)
    assert found(judgement)[:2] == ["scheduler_stuck", "server_down"]


@pytest.mark.parametrize("again", [started(300.0) + decoding(320.0, 500.0), decoding(110.0, 500.0)])
def test_a_failure_that_the_server_survived_is_not_the_cause_of_a_later_end(again: Story) -> None:
    story = [*started(), *decoding(0.0, 100.0), (101.0, failed("decode")), *again, (510.0, DIED)]
    judgement = judged(story, 520.0)
    assert judgement.verdict == "server_down"
    assert judgement.findings[0].because == ()


def test_little_memory_left_at_the_start_is_not_the_cause_of_a_server_that_is_down() -> None:
    judgement = judged([*started(reserve=0.6), *decoding(0.0, 100.0), (101.0, DIED)], 130.0)
    assert judgement.verdict == "server_down"
    assert "graph_memory_short" in found(judgement)


def test_the_verdict_of_a_server_that_fails_to_start_without_memory_is_the_memory_failure() -> None:
    story = [
        pair for at in (0.0, 60.0, 120.0, 180.0) for pair in ((at, started()[0][1]), (at + 20, failed("graph_capture")))
    ]
    judgement = judged(story, 230.0)
    assert found(judgement)[:2] == ["graph_memory_short", "restart_loop"]


def test_the_imbalance_comes_before_the_running_limit_of_its_full_rank() -> None:
    story = started(dp_size=2, load_balance_method="round_robin")
    story += decoding(0.0, 200.0, running=64, queued=20, usage=0.3, dp=0) + decoding(
        0.0, 200.0, running=2, usage=0.02, dp=1
    )
    judgement = judged(story, 200.0)
    assert judgement.verdict == "dp_imbalanced"
    limits = [finding for finding in judgement.findings if finding.diagnosis.id == "running_at_limit"]
    assert all(finding.because == ("dp_imbalanced",) for finding in limits)


def test_refused_requests_name_the_flag_that_lets_more_run_and_no_replica() -> None:
    # Seen on a real engine: four may run, the KV cache is 3 % full, and requests are answered with 503.
    story = started(max_running_requests=4) + decoding(0.0, 200.0, running=4, queued=8, usage=0.03)
    judgement = judged(story + repeated(Rejection(None, NO_RANK), 5.0, end=200.0), 200.0)
    assert found(judgement)[:2] == ["running_at_limit", "requests_rejected"]
    assert judgement.verdict == "running_at_limit"
    rejected = judgement.findings[1]
    assert [(each.flag, each.current, each.suggested) for each in rejected.advice] == [
        ("--max-running-requests", 4, 32)
    ]
    assert "replica" not in " ".join(each.suggestion for finding in judgement.findings for each in finding.advice)


def test_clients_of_refused_requests_that_no_flag_would_save_are_advised_to_send_more_slowly() -> None:
    story = started() + decoding(0.0, 200.0, running=20, queued=0, usage=0.5)
    judgement = judged(story + repeated(Rejection(None, NO_RANK), 5.0, end=200.0), 200.0)
    assert judgement.verdict == "requests_rejected"
    assert [each.suggestion for each in judgement.findings[0].advice] == [
        "send fewer requests at once, or add a replica"
    ]


def test_a_long_queue_names_the_flag_that_shortens_it() -> None:
    story = started() + decoding(0.0, 200.0, running=64, queued=3000, usage=0.3)
    judgement = judged(story, 200.0)
    assert found(judgement) == ["running_at_limit", "queue_too_long"]
    assert judgement.findings[0].advice == judgement.findings[1].advice


def test_the_advice_for_refused_requests_of_a_hung_scheduler_is_about_the_hang() -> None:
    stopped = Liveness(None, NO_RANK, "watchdog_timeout")
    story = (
        started() + decoding(0.0, 200.0, queued=3000, usage=0.5) + repeated(Rejection(None, NO_RANK), 5.0, end=200.0)
    )
    judgement = judged([*story, (190.0, stopped)], 200.0)
    rejected = next(finding for finding in judgement.findings if finding.diagnosis.id == "requests_rejected")
    assert judgement.verdict == "scheduler_stuck"
    assert rejected.advice == judgement.findings[0].advice


def test_no_diagnosis_is_its_own_cause() -> None:
    order = causes_first(BY_ID, lambda row: BY_ID[row].causes)
    places = {row: place for place, row in enumerate(order)}
    assert all(places[cause] < places[row.id] for row in DIAGNOSES for cause in row.causes)


def test_alerts_are_notified_causes_first() -> None:
    places = {row.id: place for place, row in enumerate(ALERTS)}
    pairs = [(cause, row.id) for row in ALERTS for cause in row.causes if cause in places]
    assert pairs
    assert all(places[cause] < places[row] for cause, row in pairs)


@settings(max_examples=100)
@given(st.sets(st.sampled_from(sorted(BY_ID)), min_size=1))
def test_rows_come_after_their_causes_and_otherwise_in_the_order_of_the_table(rows: set[str]) -> None:
    holding = {row: Evidence("share", 1.0, 0.5, "share") for row in BY_ID if row in rows}
    order = causes_first(holding, lambda row: causes_of(row, holding))
    assert sorted(order) == sorted(holding)
    for earlier, later in pairwise(order):
        assert later not in BY_ID[earlier].causes


def test_retractions_come_before_the_waits_that_they_cause() -> None:
    story = started(max_running_requests=20) + decoding(0.0, 200.0, running=20, queued=9, usage=0.5)
    judgement = judged(story + repeated(retraction(), 15.0, end=200.0), 200.0)
    assert judgement.verdict == "retracting_too_often"


# 2025-11-20 07:00 UTC
SEVEN = 1_763_622_000.0


def at(seconds: float, story: Story) -> Story:
    return [(seconds + moment, event) for moment, event in story]


def test_retractions_of_minutes_ago_are_in_the_past_tense_with_their_time() -> None:
    story = at(SEVEN, started() + decoding(0.0, 500.0, usage=0.8) + repeated(retraction(), 9.0, end=118.0))
    (finding,) = judged(story, SEVEN + 500.0).findings
    assert finding.ago is not None
    assert finding.summary(SEVEN + 500.0 - finding.ago) == (
        "SGLang retracted running requests 13 times until 07:01: the KV cache was full."
    )


def test_retractions_that_go_on_are_in_the_present_tense() -> None:
    story = started() + decoding(0.0, 500.0, usage=0.95) + repeated(retraction(), 30.0, end=500.0)
    (finding,) = judged(story, 500.0).findings
    assert finding.summary(1.0) == BY_ID["retracting_too_often"].summary


def test_a_wait_that_ended_minutes_ago_is_in_the_past_tense() -> None:
    story = (
        started()
        + decoding(0.0, 200.0, running=64, queued=20, usage=0.3)
        + decoding(200.0, 350.0, running=8, usage=0.1)
    )
    (finding,) = judged(story, 350.0).findings
    assert (
        finding.summary(SEVEN)
        == "Until 07:00 requests waited because SGLang ran as many as --max-running-requests allows."
    )


def test_ongoing_findings_come_before_past_ones() -> None:
    story = (
        started() + decoding(0.0, 500.0, running=64, queued=3000, usage=0.92) + repeated(retraction(), 5.0, end=200.0)
    )
    judgement = judged(story, 500.0, profile="offline")
    assert [(finding.diagnosis.id, finding.is_over) for finding in judgement.findings][:2] == [
        ("queue_too_long", False),
        ("retracting_too_often", True),
    ]
    assert judgement.verdict == "queue_too_long"


def test_only_findings_with_a_known_time_are_in_the_past_tense() -> None:
    for row in DIAGNOSES:
        assert bool(row.summary_past) <= bool(row.condition.measured_by), row.id
        assert "{until}" in (row.summary_past or "{until}"), row.id
