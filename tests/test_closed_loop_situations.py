"""Situations of the closed loop: their table, their loads, and how the exporter's verdicts are compared with the known cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from closed_loop.load import Load
from closed_loop.situations import SITUATIONS, Act, Situation
from closed_loop.verdicts import advised, render, seen

SITUATION = Situation(
    name="small",
    what="a small pool",
    flags="--max-total-tokens 600",
    steps=((Load(4, 50.0),),),
    truth="One request fits.",
    right="A larger pool.",
    verdicts=("running_far_below_limit",),
    cures=("--max-total-tokens up",),
    never=("--schedule-conservativeness", "replica"),
)
RAISED = {"flag": "--max-total-tokens", "current": 600, "suggested": 1200}


def capture(verdict: str, *advice: dict[str, Any], before: str = "healthy") -> dict[str, Any]:
    finding = {"diagnosis": verdict, "severity": "warning", "alert": "", "advice": list(advice)}
    last = {"at": 50.0, "verdict": verdict, "findings": [finding]}
    times = {"times": [{"at": 10.0, "verdict": before, "findings": []}, last]}
    return {"both": times, "log": times, "metrics": times, "report": last, "events": [["load_begin", 3.0]]}


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda each: each.name)
def test_the_question_and_the_actions_of_a_situation_are_within_its_length(situation: Situation) -> None:
    length = sum(max(load.seconds for load in step) for step in situation.steps)
    assert all(act.at < length for act in situation.acts)
    assert situation.asked_at is None or situation.asked_at <= length


def test_the_names_of_situations_are_their_own() -> None:
    assert len({situation.name for situation in SITUATIONS}) == len(SITUATIONS)


def test_every_stopped_process_goes_on_before_the_load_ends() -> None:
    for situation in SITUATIONS:
        stops = [act for act in situation.acts if act.signal == "STOP"]
        assert [Act(170, "CONT", act.process) for act in stops] == [a for a in situation.acts if a.signal == "CONT"]


def test_no_change_is_both_a_cure_and_forbidden_in_one_situation() -> None:
    for situation in SITUATIONS:
        assert not {*situation.cures, *(cure.split()[0] for cure in situation.cures)} & set(situation.never)


def test_a_right_headline_with_its_cure_is_not_wrong() -> None:
    found = seen(SITUATION, capture("running_far_below_limit", RAISED))
    assert found["both"].wrong == ()
    assert found["both"].advice == ("--max-total-tokens 600 → 1200",)


def test_a_verdict_without_a_finding_is_not_wrong_but_a_missing_cure_is() -> None:
    assert seen(SITUATION, capture("no_clear_bottleneck"))["log"].wrong == ()
    (missed,) = seen(SITUATION, capture("no_clear_bottleneck"))["both"].wrong
    assert missed == "does not name `--max-total-tokens up`"


def test_a_change_of_the_right_flag_in_the_wrong_direction_is_no_cure() -> None:
    lowered = {**RAISED, "suggested": 300}
    assert seen(SITUATION, capture("running_far_below_limit", lowered))["both"].wrong


def test_a_cure_that_comes_after_asking_people_for_less_is_late() -> None:
    fewer = {"flag": "", "suggestion": "send at most 5 requests at once"}
    (late,) = seen(SITUATION, capture("no_clear_bottleneck", fewer, RAISED))["both"].wrong
    assert late == "--max-total-tokens 600 → 1200 comes after: send at most 5 requests at once"
    assert seen(SITUATION, capture("no_clear_bottleneck", RAISED, fewer))["both"].wrong == ()


def test_a_healthy_headline_over_a_full_pool_is_wrong() -> None:
    assert "`healthy` is false" in seen(SITUATION, capture("healthy", RAISED))["report"].wrong


def test_a_false_headline_earlier_is_wrong_although_the_last_one_is_right() -> None:
    found = seen(SITUATION, capture("running_far_below_limit", RAISED, before="client_too_slow"))
    assert found["both"].wrong == ("`client_too_slow` for 50% of the time",)


@pytest.mark.parametrize(
    "advice",
    [
        {"flag": "--schedule-conservativeness", "current": 1.0, "suggested": 0.3},
        {"flag": "", "suggestion": "send fewer requests at once, or add a replica"},
    ],
)
def test_an_advice_that_must_never_be_given_is_wrong_beside_the_right_one(advice: dict[str, Any]) -> None:
    assert len(seen(SITUATION, capture("running_far_below_limit", RAISED, advice))["metrics"].wrong) == 1


def test_a_switch_is_added_or_dropped() -> None:
    drop = {"flag": "--disable-radix-cache", "current": 1, "suggested": 0, "is_switch": True}
    assert advised({"advice": [drop]}) == ["--disable-radix-cache drop"]
    situation = replace(SITUATION, cures=("--disable-radix-cache drop",))
    assert seen(situation, capture("running_far_below_limit", drop))["both"].wrong == ()


def test_the_page_counts_what_is_wrong_at_each_revision() -> None:
    wrong, right = seen(SITUATION, capture("healthy")), seen(SITUATION, capture("running_far_below_limit", RAISED))
    page = render([(SITUATION, {"old": wrong, "new": right})], ["old", "new"])
    assert "At old, 1 of 1 situations" in page
    assert "At new, 0 of 1 situations" in page


def test_a_share_of_the_requests_streams() -> None:
    load = Load(clients=1, streamed=0.1)
    streams = [load.request(number)["stream"] for number in range(300)]
    assert 0 < sum(streams) < 60


def test_a_share_of_the_clients_closes_the_connection_in_the_middle_of_an_answer() -> None:
    load = Load(clients=1, stopped=1 / 6, most_new_tokens=100)
    stops = [load.stops_after(number) for number in range(300)]
    after = [tokens for tokens in stops if tokens is not None]
    assert 20 < len(after) < 80
    assert all(2 <= tokens <= 50 for tokens in after)


def test_a_request_has_only_the_fields_that_its_load_sets() -> None:
    assert {"priority", "routed_dp_rank"} & Load(clients=1).request(0).keys() == set()
    both = Load(clients=1, priorities=(3,), dp_rank=1).request(0)
    assert (both["priority"], both["routed_dp_rank"]) == (3, 1)
