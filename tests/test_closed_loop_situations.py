"""Situations of the closed loop: their table, their loads, and that each has its truth."""

from __future__ import annotations

import pytest

from closed_loop.load import Load
from closed_loop.situations import BY_NAME, SITUATIONS, Act, Situation
from truth.cases import data

CAPTURES = data("situations.yaml")["captures"]


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda each: each.name)
def test_the_question_and_the_actions_of_a_situation_are_within_its_length(situation: Situation) -> None:
    length = sum(max(load.seconds for load in step) for step in situation.steps)
    truth = CAPTURES[situation.name]
    assert all(act.at < length for act in situation.acts)
    assert truth.get("asked_at", truth.get("load_seconds")) <= length


def test_each_situation_has_its_own_name_and_its_truth() -> None:
    assert len(BY_NAME) == len(SITUATIONS)
    assert BY_NAME.keys() == CAPTURES.keys()
    assert all(situation.truth and situation.right and situation.profile for situation in SITUATIONS)


def test_every_stopped_process_goes_on_before_the_load_ends() -> None:
    for situation in SITUATIONS:
        stops = [act for act in situation.acts if act.signal == "STOP"]
        assert [Act(170, "CONT", act.process) for act in stops] == [a for a in situation.acts if a.signal == "CONT"]


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
