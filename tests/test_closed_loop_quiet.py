"""The closed loop's search for false alarms: which loads it sends, in which order, and which results it keeps."""

from __future__ import annotations

import json
from pathlib import Path

from closed_loop.collection import beside, collect
from closed_loop.document import render
from closed_loop.quiet import HEALTHY, Course, plans, table, written


def course(load: str = "chat", **more: object) -> Course:
    usual: dict[str, object] = {
        "seconds": 90.0,
        "requests": 1200,
        "answered": 1000,
        "stopped": 200,
        "probes": 18,
        **more,
    }
    return Course(load, HEALTHY[load].profile, 10.0, **usual)  # type: ignore[arg-type]  # fields by name


def test_at_least_eight_kinds_of_healthy_load_are_sent_under_their_own_profiles() -> None:
    kinds = {"chat", "agents", "batch", "rag", "long", "whole", "tenth-streamed", "bursts", "probes"}
    assert set(HEALTHY) == kinds
    assert {name: HEALTHY[name].profile for name in ("batch", "long", "chat")} == {
        "batch": "offline",
        "long": "long_context",
        "chat": "online",
    }


def test_loads_of_one_profile_and_one_pace_of_clocks_follow_each_other() -> None:
    made = plans(["chat", "batch", "rag", "long", "probes"], 8.0, true=["rag"])
    assert [(plan.name, plan.time_scale) for plan in made] == [
        ("rag", 1.0),
        ("chat", 8.0),
        ("probes", 8.0),
        ("long", 8.0),
        ("batch", 8.0),
    ]


def test_a_pending_alert_is_not_quiet() -> None:
    assert Course("chat", "online", 1.0).is_quiet
    assert not course(alerts=[(10.0, "SGLangQueueTooLong", "pending", [])]).is_quiet


def test_a_course_is_kept_as_json_and_collected(tmp_path: Path) -> None:
    written(course(), tmp_path)
    [kept] = collect(tmp_path)["quiet"]
    assert (kept["load"], kept["requests"], kept["alerts"]) == ("chat", 1200, [])


def test_a_load_that_was_not_sent_again_keeps_its_result(tmp_path: Path) -> None:
    written(course("rag", requests=7), tmp_path)
    known = json.loads(json.dumps({"quiet": [course("rag", requests=1).as_json(), course("chat").as_json()]}))
    merged = beside(collect(tmp_path), known)["quiet"]
    assert [(each["load"], each["requests"]) for each in merged] == [("chat", 1200), ("rag", 7)]


def test_the_table_names_alerts_by_their_states_and_the_time_by_the_rules_clocks() -> None:
    alerts: list[object] = [(10.0, "SGLangQueueTooLong", "pending", []), (40.0, "SGLangQueueTooLong", "", [])]
    [row] = table([course(verdicts=[(2.0, "idle"), (30.0, "healthy")], alerts=alerts).as_json()])[2:]
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert cells == [
        "`online`", "10 times as fast", "15", "1,200", "1,000", "200", "18", "`idle`, `healthy`", "SGLangQueueTooLong", "none",
    ]  # fmt: skip


def test_the_page_has_the_length_of_the_healthy_loads_and_the_number_of_false_alarms(tmp_path: Path) -> None:
    written(course(), tmp_path)
    page = render(collect(tmp_path))
    assert "0.2 hours by the rules' clocks, 1,200\nrequests" in page
    assert "No false alert was pending or firing." in page


def test_the_page_distinguishes_a_false_alert_from_one_that_is_explained(tmp_path: Path) -> None:
    written(course("batch", alerts=[(13.0, "SGLangClientTooSlow", "firing", [])]), tmp_path)
    assert "No false alert was pending or firing." in render(collect(tmp_path))
    written(course("rag", alerts=[(13.0, "SGLangQueueTooLong", "pending", [])]), tmp_path)
    assert "False alerts came under rag." in render(collect(tmp_path))
