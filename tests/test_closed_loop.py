"""The closed loop without an engine: its table of starts, its measurements, how it follows the exporter's JSON, its page, and kept captures."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from closed_loop.captures import ARCHIVES, MOST_BYTES
from closed_loop.engine import PROGRAM, arguments_of
from closed_loop.results import KEPT, PAGE, collected, page, problems, spread
from closed_loop.side import Side, measure
from closed_loop.starts import BY_NAME, STARTS, Start
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.core.rows import BY_ID
from sglang_tuning_exporter.recordings.recording import from_files
from sglang_tuning_exporter.sglang.args.flags import flag_of

ROOT = Path(__file__).parent.parent
BEGIN = 1_763_712_000.0  # 2025-11-21 08:00:00 UTC


def finding(diagnosis: str, *advice: dict[str, Any]) -> dict[str, Any]:
    return {"diagnosis": diagnosis, "confidence": "high", "evidence": [{"value": 1}], "advice": list(advice)}


def turn(flag: str | None, current: object, suggested: object) -> dict[str, Any]:
    return {
        "flag": flag,
        "current": current,
        "suggested": suggested,
        "typed": f"{flag} {suggested}" if flag else None,
        "action": "Try" if flag else None,
    }


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


# --- what the exporter's JSON says ----------------------------------------------------------------------------------------


def test_a_command_line_of_another_program_is_refused() -> None:
    assert arguments_of(" ".join([*PROGRAM, "--port", "1"])) == ["--port", "1"]
    with pytest.raises(UsageError, match="does not start SGLang"):
        arguments_of("sh -c true")


# --- results ----------------------------------------------------------------------------------------------------------

LIMIT = finding("running_at_limit", turn("--max-running-requests", 2, 16))


def test_a_run_is_as_it_must_be_where_the_start_is_found_notified_and_better_afterwards() -> None:
    first = side("running_at_limit", LIMIT, notified="SGLangRunningAtLimit", running=2.0, latency_p50=9.0)
    last = side("healthy", running=12.0, latency_p50=3.0, tokens_per_cpu_second=2.0)
    assert problems(BY_NAME["running-limit"], [first, last]) == []


def test_what_a_run_lacks_is_named() -> None:
    advice = turn("--schedule-conservativeness", 1.0, 0.3)
    first = side("queue_too_long", finding("queue_too_long", advice), running=2.0, latency_p50=9.0)
    assert problems(BY_NAME["running-limit"], [first, side("healthy", running=2.0, latency_p50=10.0)]) == [
        "no running_at_limit, but ['queue_too_long']",
        "no notification SGLangRunningAtLimit",
        "advises --schedule-conservativeness down",
        "tokens_per_cpu_second 1.0 -> 1.0",
        "running 2.0 -> 2.0",
        "latency_p50 9.0 -> 10.0",
    ]
    assert problems(BY_NAME["chunks"], [side("healthy")])[-1] == "no advice to follow"


def test_a_control_with_a_finding_or_a_notification_has_failed() -> None:
    control = BY_NAME["healthy"]
    assert problems(control, [side("healthy")]) == []
    assert problems(control, [side("queue_too_long", finding("queue_too_long"))]) == ["queue_too_long in a control"]
    assert problems(control, [side("healthy", notified="SGLangQueueTooLong")]) == ["SGLangQueueTooLong in a control"]


def test_the_page_compares_a_path_with_the_setting_by_hand_and_keeps_what_a_folder_lacks(tmp_path: Path) -> None:
    changed = [{"what": "--max-running-requests", "old": "2", "new": "16"}]
    for number in (10, 9):
        steps = [
            {**side("running_at_limit", tokens_per_cpu_second=100.0).as_json(), "changes": changed},
            {**side("healthy", tokens_per_cpu_second=950.0 + number).as_json(), "changes": []},
        ]
        by_hand = {**side("healthy", tokens_per_cpu_second=1000.0).as_json(), "flags": ""}
        result = json.dumps({"steps": steps, "by_hand": by_hand, "problems": []})
        (tmp_path / f"everything-small.{number}.json").write_text(result)
    known = json.loads(KEPT.read_text(encoding="utf-8"))
    data = collected(tmp_path, known)
    assert data["starts"].keys() == known["starts"].keys() | {"everything-small"}
    row = next(line for line in page(data, PAGE.read_text()).splitlines() if "two requests at once" in line)
    assert "| `--max-running-requests` 2 → 16 | 100 → 960 (959 to 960) | 1,000 with none of these flags | 96 % |" in row


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


# --- captures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("archive", sorted(ARCHIVES.glob("*.tar.xz")), ids=lambda path: path.name)
def test_a_kept_capture_is_small_can_be_replayed_and_has_no_path_of_its_machine(archive: Path) -> None:
    assert archive.stat().st_size <= MOST_BYTES
    with tarfile.open(archive) as packed:
        files = {member.name: file.read() for member in packed if (file := packed.extractfile(member))}
    recording = from_files(files, name=archive.name)
    assert recording.lines
    assert recording.length_seconds > 5  # of one that ends at its start
    assert not [name for name, text in files.items() if b"/root/" in text or b"/home/" in text]


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
