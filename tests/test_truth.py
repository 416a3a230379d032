"""The net around the product: a sample of each family holds, and a mute product, a lost entry or a hang is noticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from truth import __main__ as net
from truth import situations, ways
from truth.cases import Answer, Case, Change, Checks, Finding
from truth.recording import Page, Recording
from truth.situations import cases, check

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


def test_a_live_exporter_is_asked_at_every_second_of_the_moved_clock() -> None:
    recording = Recording(((100.0, LINE % 1),), (Page(0.0, "/metrics", 503),), begin=90.0, ready=100.0, end=110.0)
    answers = ways.ask(Case("a", lambda: recording, lambda _way, _answers: {}), "both")
    assert [answer.at for answer in answers] == [91.0 + second for second in range(20)]
    assert answers[-1].metrics["sglang_tuning_up"] == 0.0


# How an answer is judged

TRUTH = {
    "verdicts": ["running_far_below_limit"], "cures": ["--max-total-tokens up"],
    "never": ["--schedule-conservativeness", "replica"],
    "load_seconds": 40.0,
}  # fmt: skip
RECORDING = Recording(((0.0, b"x\n"),), ready=0.0, end=60.0, loads=((3.0, 50.0),))
RAISED = Change("--max-total-tokens", 600, 1200, "")
LOWERED = Change("--max-total-tokens", 600, 300, "")
FEWER = Change("", None, "send at most 5 requests at once", "")


def answer(at: float, verdict: str, *changes: Change) -> Answer:
    return Answer(at, 200, verdict, (Finding(verdict, "warning", "high", "", changes),))


def judged(*answers: Answer, way: str = "both", **more: Any) -> Checks:
    return {name: wrong for name, wrong in check({**TRUTH, **more}, lambda: RECORDING, way, answers).items() if wrong}


def test_the_right_verdict_with_its_cure_is_right() -> None:
    assert judged(answer(10, "healthy"), answer(43, "running_far_below_limit", RAISED)) == {}


def test_silence_is_never_false_and_right_only_by_a_way_in_that_is_silent() -> None:
    assert judged(answer(43, "no_clear_bottleneck")).keys() == {"verdict", "cure first"}
    assert judged(answer(43, "no_clear_bottleneck"), silent=["both"]) == {}
    assert judged(answer(43, "healthy"), silent=["both"]) == {}


def test_a_false_verdict_counts_at_any_time_a_healthy_one_when_asked() -> None:
    last = answer(43, "running_far_below_limit", RAISED)
    assert judged(answer(10, "client_too_slow"), last) == {"nothing false": "client_too_slow for 50% of the time"}
    assert judged(answer(1, "client_too_slow"), last, answer(51, "client_too_slow")) == {}
    assert judged(answer(1, "client_too_slow"), last, from_start=True).keys() == {"nothing false"}
    assert "healthy is false" in judged(answer(43, "healthy", RAISED))["nothing false"]


@pytest.mark.parametrize("change", [LOWERED, FEWER])
def test_a_change_in_the_wrong_direction_or_fewer_requests_first_is_no_cure(change: Change) -> None:
    assert judged(answer(43, "running_far_below_limit", change, RAISED)).keys() == {"cure first"}


def test_no_change_is_both_cure_and_forbidden_and_every_entry_has_a_source() -> None:
    for case in cases():
        entry = case.check.args[0]  # type: ignore[attr-defined]
        rules = {*entry.get("cures", ()), *(cure.split()[0] for cure in entry.get("cures", ()))}
        assert not rules & {*entry.get("never", ())}
        assert entry["from"]
