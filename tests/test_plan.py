"""`plan`: what a server would do with 1, 2, 4 … requests at once, by its log."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from sglang_tuning_exporter.cli import main
from sglang_tuning_exporter.config.profiles import DEFAULT
from sglang_tuning_exporter.core.capacity import Room, StepTime
from sglang_tuning_exporter.core.plan import plan_rows, table

if TYPE_CHECKING:
    from pathlib import Path

STEP = StepTime(8.0, 3.0, 0.0056, 1.0, seen=(2.0, 16.0), line=(0.004, 0.0002))
FULL = Room(pool_tokens=16_000.0, running_limit=24.0, tokens_per_request=500.0)


def test_more_at_once_give_more_tokens_each_of_them_later() -> None:
    rows = plan_rows(STEP, [FULL], DEFAULT)
    assert [row["requests"] for row in rows] == [1, 2, 4, 8, 16, 24]
    assert [row["tokens_per_second"] for row in rows][-1] == pytest.approx(24 / 0.0088)
    gaps = [row["inter_token_p50_seconds"] for row in rows]
    assert gaps == sorted(gaps)
    assert [row["kv_cache"] for row in rows][-1] == pytest.approx(0.75)


def test_a_row_names_the_objective_that_breaks() -> None:
    rows = plan_rows(STEP, [FULL], replace(DEFAULT, inter_token_seconds=0.006))
    assert rows[0]["breaks"] == []
    assert rows[-1]["breaks"] == ["inter_token"]


def test_a_row_says_whether_its_batch_was_seen() -> None:
    rows = plan_rows(STEP, [FULL], DEFAULT)
    assert {row["requests"] for row in rows if not row["seen"]} == {1, 24}


def test_two_schedulers_serve_twice_as_many_requests_with_steps_as_long() -> None:
    (alone, *_), (together, *_) = (plan_rows(STEP, ranks, DEFAULT) for ranks in ([FULL], [FULL, FULL]))
    assert together["requests"] == 2 * alone["requests"]
    assert together["tokens_per_second"] == 2 * alone["tokens_per_second"]
    assert together["inter_token_p50_seconds"] == alone["inter_token_p50_seconds"]


def test_an_fp8_cache_holds_twice_as_many_requests_up_to_the_running_limit() -> None:
    larger = table(STEP, [replace(FULL, running_limit=None)], DEFAULT)["with_fp8_kv_cache"]
    assert larger["requests"] == 64
    assert table(STEP, [FULL], DEFAULT)["with_fp8_kv_cache"]["requests"] == 24


def test_a_speculative_step_gives_each_request_several_tokens_at_once() -> None:
    (row, *_) = plan_rows(replace(STEP, tokens_per_request=2.0), [FULL], DEFAULT)
    (plain, *_) = plan_rows(STEP, [FULL], DEFAULT)
    assert row["tokens_per_second"] == 2 * plain["tokens_per_second"]
    assert row["inter_token_p50_seconds"] == plain["inter_token_p50_seconds"] / 2


def log_of(path: Path, *, batches: tuple[int, ...] = (2, 4, 6, 8)) -> Path:
    """A log of ten minutes, as 0.5.23 prints it: a new batch every six seconds, at 4 ms + 0.5 ms a request."""
    lines = ["[2026-11-20 10:00:00] max_total_num_tokens=16384, max_running_requests=64"]
    for second in range(600):
        batch = batches[second // 6 % len(batches)]
        at = f"[2026-11-20 10:{second // 60:02}:{second % 60:02}]"
        speed = batch / (0.004 + 0.0005 * batch)
        lines.append(
            f"{at} Decode batch, #running-req: {batch}, #token: {400 * batch}, token usage: {400 * batch / 16384:.2f},"
            f" cuda graph: True, gen throughput (token/s): {speed:.2f}, #queue-req: 0"
        )
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_log_gives_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = str(log_of(tmp_path / "server.log"))
    assert main(["plan", log, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["seen"] == {"least": 2, "most": 8}
    speeds = {row["requests"]: row["tokens_per_second"] for row in document["rows"]}
    assert speeds[16] == pytest.approx(16 / 0.012, rel=0.02)


def test_the_table_in_words_promises_nothing_for_batches_that_were_not_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(log_of(tmp_path / "server.log"))]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "From the log's decode lines, prefill left out, with 2 to 8 requests at once."
    rows = {line.split()[0]: line for line in lines if line[:8].strip().isdecimal()}
    assert " 1,000 " in rows["8"]
    assert "up to 1,3" in rows["16"]
    assert {name for name, row in rows.items() if "not seen" in row} == {"1", "16", "32", "40"}
    assert any(line.startswith("One more replica: up to ") for line in lines)


def test_a_log_without_a_line_says_why_and_shows_the_present_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(log_of(tmp_path / "server.log", batches=(11,))), "--format", "json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [row["requests"] for row in document["rows"]] == [11]
    assert "hardly varied" in document["refused"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "the following arguments are required: LOG"),
        (["a.log", "--sglang-url", "http://127.0.0.1:1"], "unrecognized arguments: --sglang-url"),
        (["a.log", "--format", "xml"], "--format=xml: give one of text, json"),
        (["/nowhere/server.log"], "/nowhere/server.log"),
    ],
)
def test_a_usage_error_is_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *flags]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
