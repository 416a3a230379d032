"""The net around the product: a sample of each family holds, and a mute product, a lost entry or a hang is noticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from truth import __main__ as net
from truth import situations, ways
from truth.cases import Answer, Case, Change
from truth.recording import HANGS, REFUSES, Page, Recording, of_files, of_log
from truth.stand_in import StandIn

ROOT = Path(__file__).parent.parent
LINE = b"[2026-01-01 00:00:%02d] The server is fired up and ready to roll!\n"


@pytest.mark.parametrize("family", net.FAMILIES)
def test_a_sample_of_each_family_holds(family: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "truth", family, "--sample"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " 0 unexpected" in done.stdout


def test_a_product_that_says_nothing_is_right_in_no_situation_that_has_a_verdict() -> None:
    mute = [Answer(1e12, 0, "not_enough_data")]
    found = {case.name: case.check("report", mute) for case in situations.cases() if "report" in case.ways}
    named = [name for name, checks in found.items() if "verdict" in checks and not checks["verdict"]]
    assert len(named) < len(found) / 10, named


def test_a_wrong_check_that_is_not_listed_is_unexpected() -> None:
    assert list(net.unexpected([net.Result("guide", "8/a", "report", "verdict", "healthy")], {}))


def test_a_right_check_that_is_still_listed_must_leave_the_list() -> None:
    result = net.Result("guide", "8/a", "report", "verdict", "")
    assert "take it off" in next(net.unexpected([result], {"guide": {"8/a report verdict": "reason"}}))


def test_a_listed_failure_is_expected() -> None:
    result = net.Result("guide", "8/a", "report", "verdict", "healthy")
    assert not list(net.unexpected([result], {"guide": {"8/a report verdict": "reason"}}))


def test_an_input_at_which_the_product_ends_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: Any) -> list[Answer]:
        raise RuntimeError("the process ended with wait status 9")

    monkeypatch.setattr(ways, "ask", end)
    case = Case("a", lambda: Recording(()), lambda _way, _answers: {})
    assert [each.wrong for each in net.ask("guide", case, "report")] == ["the process ended with wait status 9"]


def test_the_log_of_a_recording_is_appended_at_its_printed_seconds() -> None:
    recording = of_log(LINE % 5 + LINE % 5 + b"without a time\n" + LINE % 8)
    first = recording.begin + 1
    assert [round(at - first, 2) for at, _ in recording.log] == [0.17, 0.5, 0.83, 3.5]


def test_the_answers_of_a_capture_are_those_that_its_server_gave() -> None:
    files = {
        "server.log": LINE % 5,
        "metrics-000-1767225601000.prom": b"one",
        "scrapes.tsv": b"1767225600.000\tClientConnectorError\t1\n1767225601.000\t200\t1\n1767225602.000\tTimeoutError\t5000\n",
    }
    now = [0.0]
    pages = of_files(files).pages
    stand_in = StandIn(pages, lambda: now[0])
    seen = []
    for at in (1767225600.5, 1767225601.5, 1767225602.5):
        now[0] = at
        seen.append(stand_in.answer("/metrics")[0])
    assert seen == [REFUSES, 200, HANGS]


def test_a_live_exporter_is_asked_at_every_second_of_the_moved_clock() -> None:
    recording = Recording(((100.0, LINE % 1),), (Page(0.0, "/metrics", 503),), begin=90.0, ready=100.0, end=110.0)
    answers = ways.ask(Case("a", lambda: recording, lambda _way, _answers: {}), "both")
    assert [answer.at for answer in answers] == [91.0 + second for second in range(20)]
    assert answers[-1].metrics["sglang_tuning_up"] == 0.0


@pytest.mark.parametrize(
    ("now", "to", "direction"),
    [(1.0, 0.3, "down"), (6, 32, "up"), (True, False, "drop"), (False, True, "add"), (None, "lpm", "set")],
)
def test_a_change_has_a_direction(now: Any, to: Any, direction: str) -> None:
    assert Change("--flag", now, to, "").direction == direction
