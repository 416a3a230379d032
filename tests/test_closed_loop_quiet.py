"""The closed loop's search for false alarms: which loads it sends, in which order, and which results it keeps."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_a_course_is_kept_as_json(tmp_path: Path) -> None:
    written(course(), tmp_path)
    kept = json.loads((tmp_path / "quiet" / "chat.json").read_text(encoding="utf-8"))
    assert (kept["load"], kept["requests"], kept["alerts"]) == ("chat", 1200, [])


def test_the_table_names_alerts_by_their_states_and_the_time_by_the_rules_clocks() -> None:
    alerts: list[object] = [(10.0, "SGLangQueueTooLong", "pending", []), (40.0, "SGLangQueueTooLong", "", [])]
    [row] = table([course(verdicts=[(2.0, "idle"), (30.0, "healthy")], alerts=alerts).as_json()])[2:]
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert cells == [
        "`online`", "10 times as fast", "15", "1,200", "1,000", "200", "18", "`idle`, `healthy`", "SGLangQueueTooLong", "none",
    ]  # fmt: skip
