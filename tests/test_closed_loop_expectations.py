"""Expected and measured effects of advice: from results to comparisons, and from comparisons to the page. No engine is started here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from closed_loop.expectations import CONVERGENCES, EXPECTED, KEPT, Comparison, compared, summary, with_section
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.sglang.args.flags import flag_of

ROOT = Path(__file__).parent.parent


def side(speed: float | None, flag: str | None = None, brings: float | None = None) -> dict[str, Any]:
    """One side with its speed per CPU second, and advice that brings so many times the throughput."""
    expected = None
    if brings is not None:
        tokens = {"now": 400.0, "value": 400.0 * brings, "interval": [300.0 * brings, 500.0 * brings]}
        expected = {"tokens_per_second": tokens}
    return {
        "measures": {"tokens_per_cpu_second": speed},
        "findings": [{"advice": [[flag, 2, 16]], "expected": [expected]}],
        "advice": {
            "changes": [{"what": flag or "requests at once", "old": "2", "new": "16"}] if brings or flag else []
        },
    }


def test_a_change_is_compared_with_the_side_after_it() -> None:
    (change,) = compared("limit", 1, [side(500.0, "--max-running-requests", 2.0), side(900.0)])
    assert change.expected == pytest.approx((2.0, 1.5, 2.5))
    assert (change.measured, change.error) == pytest.approx((1.8, 2.0 / 1.8 - 1))
    assert change.has_direction
    assert change.is_inside


def test_each_step_of_a_convergence_is_a_change() -> None:
    steps = [side(500.0, "--a", 2.0), side(1000.0, "--b", 1.5), side(900.0)]
    found = compared("path", 2, steps)
    assert [(each.step, each.measured) for each in found] == [(0, 2.0), (1, 0.9)]
    assert [each.has_direction for each in found] == [True, False]


def test_a_change_without_a_prediction_has_no_error() -> None:
    (change,) = compared("chunks", 1, [side(500.0, "--chunked-prefill-size"), side(900.0)])
    assert (change.expected, change.error, change.is_inside) == (None, None, None)


@pytest.mark.parametrize("speeds", [(None, 500.0), (500.0, None), (0.0, 500.0)])
def test_a_side_without_generated_tokens_is_not_compared(speeds: tuple[float | None, float | None]) -> None:
    assert compared("limit", 1, [side(speeds[0], "--a", 2.0), side(speeds[1])]) == []


def test_the_summary_counts_errors_directions_and_intervals() -> None:
    changes = [
        Comparison("a", 1, 0, "--x", 2.0, (2.2, 1.5, 2.5)),
        Comparison("b", 1, 0, "--x", 0.9, (1.2, 1.1, 1.3)),
        Comparison("c", 1, 0, "--x", 2.0, None),
    ]
    assert summary(changes) == (
        "Median error 22 %, worst 33 %, direction right in 1 of 2, 1 of 2 inside the interval; 1 change had no figure."
    )


@pytest.mark.parametrize("loop", EXPECTED.values(), ids=lambda loop: loop.name)
def test_a_loop_expects_a_diagnosis_of_the_table_and_sets_flags_of_sglang(loop: Any) -> None:
    assert loop.expected in BY_ID
    known = [flag_of(word[2:].replace("-", "_"), "0.5.23") for word in loop.flags.split()[::2]]
    assert all(known)


def test_the_page_has_what_is_kept() -> None:
    data, page = json.loads(KEPT.read_text()), (ROOT / "docs" / "capacity.md").read_text()
    assert with_section(page, data) == page
    assert summary([Comparison(**each) for each in data["changes"]]) in page


def test_every_kept_change_is_of_a_loop_that_is_there() -> None:
    names = {each["name"] for each in json.loads(KEPT.read_text())["changes"]}
    assert names == {*EXPECTED, *CONVERGENCES}
