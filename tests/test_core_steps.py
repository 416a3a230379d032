"""A log of the past is weighed in steps; no report changes by the work that a step leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core import judge
from sglang_tuning_exporter.core.alerts import Clocks
from sglang_tuning_exporter.core.course import Course
from sglang_tuning_exporter.core.diagnoses import ALL, Diagnosis
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.report import document
from sglang_tuning_exporter.core.server import Server
from sglang_tuning_exporter.core.sums import BUCKET_SECONDS, Totals, merged
from sglang_tuning_exporter.core.view import View
from test_core_course import decode, load, prefill, retraction, stamp, start

MEASURED = [row for row in ALL if row.when.kind != "fact"]
weigh = judge.weigh
CRASH = "Subprocess scheduler_0 (pid=77) crashed with exit code -9. Triggering SIGQUIT for cleanup..."


def weighed_in_full(view: View) -> judge.Measured:
    """Weigh a view as a step does, and measure every diagnosis."""
    measured = weigh(view)
    measured.figures.measure_all()
    passed_over = [diagnosis for diagnosis in ALL if not diagnosis.when.is_possible(measured.view)]
    assert not any(measured.figures.holds(diagnosis) for diagnosis in passed_over)
    return measured


def reported_in_full(profile: str, lines: Iterable[str]) -> dict[str, Any]:
    """Return the report of a course that measures every diagnosis at each step, and lets every clock go on."""
    course = Course(PROFILES[profile])
    course._clocks = Clocks(PROFILES[profile])
    with patch.object(judge, "weigh", weighed_in_full):
        return reported(course, lines)


def reported(course: Course, lines: Iterable[str]) -> dict[str, Any]:
    reader = Reader()
    for line in lines:
        for event in reader.read(line.encode()):
            course.take_line(event)
    return document(course.end())


def served(at: float, seconds: float, running: int, queue: int, usage: float) -> list[str]:
    return load(at, seconds, every=5.0, running=running, queue=queue, usage=usage)


# What happens in a part of a log, of so many seconds.
PARTS: dict[str, Callable[[float, float], list[str]]] = {
    "load": lambda at, seconds: served(at, seconds, 60, 0, 0.5),
    "few": lambda at, seconds: served(at, seconds, 2, 0, 0.05),
    "full": lambda at, seconds: served(at, seconds, 60, 40, 0.97),
    "held": lambda at, seconds: served(at, seconds, 20, 40, 0.4),
    "long queue": lambda at, seconds: served(at, seconds, 60, 4000, 0.8),
    "eager": lambda at, seconds: [decode(at + 4 * step, graph=False) for step in range(int(seconds / 4))],
    "retracts": lambda at, seconds: [
        line
        for step in range(int(seconds / 8))
        for line in (decode(at + 8 * step, usage=0.98), retraction(at + 8 * step))
    ],
    "probes": lambda at, seconds: [prefill(at + 30 * step, 1, running=0) for step in range(int(seconds / 30))],
    "silence": lambda _at, _seconds: [],
    "restart": lambda at, _seconds: start(at),
    "other start": lambda at, _seconds: start(at, limit=64, chunked_prefill_size=2048),
    "crash": lambda at, _seconds: [stamp(at) + CRASH],
}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(PARTS)), st.sampled_from([20, 45, 200, 700, 1900, 4000])),
        min_size=1,
        max_size=7,
    ),
    st.sampled_from(["online", "offline"]),
)
def test_a_report_is_that_of_every_step_weighed_in_full(parts: list[tuple[str, int]], profile: str) -> None:
    at, lines = 15.0, start()
    for name, seconds in parts:
        lines += PARTS[name](at, seconds)
        at += seconds + 1
    assert reported(Course(PROFILES[profile]), lines) == reported_in_full(profile, lines)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 45), st.integers(0, 100)), min_size=1, max_size=120),
    st.sampled_from([5.0, 60.0, 600.0]),
)
def test_the_sum_of_a_window_is_that_of_its_buckets(counts: list[tuple[int, int, int]], seconds: float) -> None:
    """Whatever was asked for before, and however late some lines come.

    Each count comes so many seconds after the one before, and belongs so many seconds back.
    """
    server, now = Server(PROFILES["online"]), 1000.0
    for after, late, number in counts:
        now += after
        server.advance(now)
        server.bucket(now)["lines"] += 1
        server.bucket(now - min(late, now - 1000.0))["retraction_events"] += number
        server.bucket(now).most("most_running", number)
        window = merged(totals for begin, totals in server.buckets if begin > now - seconds - BUCKET_SECONDS)
        assert server.window(seconds) == window


@pytest.mark.parametrize("row", MEASURED, ids=repr)
def test_a_diagnosis_of_sums_is_bad_above_a_limit_that_is_not_negative(row: Diagnosis) -> None:
    """So none of them holds where all of its sums are 0."""
    assert row.when.counts
    assert row.when.side == "above"
    assert all((row.when.bound(VIEWS[name]) or 0.0) >= 0 for name in VIEWS)


VIEWS = {name: View(Totals(), Server(profile).facts, profile, 0.0) for name, profile in PROFILES.items()}
