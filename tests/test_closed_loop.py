"""The closed loop without an engine: its table of starts, its measurements, how it follows the exporter's JSON, its page, and kept captures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from closed_loop.results import KEPT, PAGE, page, spread
from closed_loop.side import Side, measure
from closed_loop.starts import STARTS, Start
from sglang_tuning_exporter.core.rows import BY_ID
from sglang_tuning_exporter.sglang.args.flags import flag_of

ROOT = Path(__file__).parent.parent
BEGIN = 1_763_712_000.0  # 2025-11-21 08:00:00 UTC


def findings(*found: dict[str, Any], command: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"verdict": found[0]["diagnosis"] if found else "healthy", "command": command, "findings": list(found)}


def side(verdict: str, *found: dict[str, Any], notified: str = "", **figures: float) -> Side:
    document = {**findings(*found), "verdict": verdict}
    measured = {**measure([], [], BEGIN, BEGIN + 10, 1.0), "tokens_per_cpu_second": 1.0, **figures}
    return Side(measured, document, [(notified, 41.0)] if notified else [])


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.name)
def test_every_start_expects_a_row_with_its_alert_and_sets_flags_that_the_release_has(start: Start) -> None:
    if start.expected not in {"", "healthy"}:
        row = BY_ID[start.expected]
        assert start.alert in {row.alert, ""}
        assert not row.profiles or start.profile in row.profiles
    for word in f"{start.fixed} {start.right} {start.wrong} {start.by_hand or ''}".split():
        if word.startswith("--"):
            found = flag_of(word[2:].replace("-", "_"), "0.5.23")
            assert found is not None, word
            assert found.flag == word


# --- results ----------------------------------------------------------------------------------------------------------


def test_the_committed_page_is_what_the_committed_figures_say_and_one_screen() -> None:
    committed = PAGE.read_text(encoding="utf-8")
    assert committed == page(json.loads(KEPT.read_text(encoding="utf-8")), committed)
    assert len(committed.splitlines()) <= 50


KNOWN = json.loads(KEPT.read_text(encoding="utf-8"))["starts"]


@pytest.mark.parametrize("name", KNOWN)
def test_the_committed_advice_ends_within_a_tenth_of_the_setting_by_hand(name: str) -> None:
    reached = spread(run["steps"][-1] for run in KNOWN[name])
    by_hand = spread(run["by_hand"] for run in KNOWN[name])
    assert reached is not None
    assert by_hand is not None
    assert reached[0] >= 0.9 * by_hand[0]


# --- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "--only", "nothing"), "--only=nothing: give all, or some of conservative"),
        (("--results", "nowhere", "document"), "--results=nowhere: no such folder"),
        (("capture", "SITUATION"), "SITUATION: steps.0.0.client: "),
        (("capture", "nowhere.yaml"), "nowhere.yaml: "),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    situation = tmp_path / "a.yaml"
    situation.write_text("{name: idle, what: x, steps: [[{clients: 1, client: 2}]]}")
    command = [sys.executable, "-m", "closed_loop", *(each.replace("SITUATION", str(situation)) for each in arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(words.replace("SITUATION", str(situation)))
    assert done.stderr.count("\n") == 1
