"""False alarms: what is kept of a course of healthy loads."""

from __future__ import annotations

import json
from pathlib import Path

from closed_loop.quiet import HEALTHY, Course, written


def test_seven_kinds_of_healthy_load_are_sent() -> None:
    assert set(HEALTHY) == {"chat", "agents", "rag", "whole", "tenth-streamed", "bursts", "probes"}
    assert all(situation.profile == "online" for situation in HEALTHY.values())


def test_an_alert_belongs_to_the_load_that_was_sent_when_it_came() -> None:
    course = Course(loads=[(0.0, "chat"), (60.0, "rag")])
    assert [course.load_at(moment) for moment in (0.0, 59.9, 60.0, 500.0)] == ["chat", "chat", "rag", "rag"]


def test_a_pending_alert_is_not_quiet() -> None:
    assert Course().is_quiet
    assert not Course(alerts=[(10.0, "SGLangQueueTooLong", "pending")]).is_quiet


def test_a_course_is_kept_as_json(tmp_path: Path) -> None:
    written(Course(loads=[(0.0, "chat")], seconds=60.0, requests=9, answered=9), tmp_path / "new" / "quiet.json")
    kept = json.loads((tmp_path / "new" / "quiet.json").read_text(encoding="utf-8"))
    assert (kept["loads"], kept["requests"], kept["alerts"]) == ([[0.0, "chat"]], 9, [])
