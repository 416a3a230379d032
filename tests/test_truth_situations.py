"""How the net judges an answer about a capture or a log: what is false, what is right, and which change comes first."""

from __future__ import annotations

from typing import Any

import pytest

from truth.cases import Answer, Change, Checks, Finding
from truth.recording import Recording
from truth.situations import cases, check

TRUTH = {
    "verdicts": ["running_far_below_limit"], "cures": ["--max-total-tokens up"], "never": ["--schedule-conservativeness", "replica"],
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


def test_a_false_verdict_counts_at_any_time_of_the_load_and_a_healthy_one_when_it_is_asked() -> None:
    last = answer(43, "running_far_below_limit", RAISED)
    assert judged(answer(10, "client_too_slow"), last) == {"nothing false": "client_too_slow for 50% of the time"}
    assert judged(answer(1, "client_too_slow"), last, answer(51, "client_too_slow")) == {}
    assert judged(answer(1, "client_too_slow"), last, from_start=True).keys() == {"nothing false"}
    assert "healthy is false" in judged(answer(43, "healthy", RAISED))["nothing false"]


@pytest.mark.parametrize("change", [LOWERED, FEWER])
def test_a_change_in_the_wrong_direction_or_fewer_requests_first_is_no_cure(change: Change) -> None:
    assert judged(answer(43, "running_far_below_limit", change, RAISED)).keys() == {"cure first"}


def test_no_change_is_both_a_cure_and_forbidden_and_every_entry_names_where_its_truth_is_from() -> None:
    for case in cases():
        entry = case.check.args[0]  # type: ignore[attr-defined]
        rules = {*entry.get("cures", ()), *(cure.split()[0] for cure in entry.get("cures", ()))}
        assert not rules & {*entry.get("never", ())}
        assert entry["from"]
