"""`plan`: what a server would do with 1, 2, 4 … requests at once, of a log and of a live server."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from conftest import FakeSGLang, reply
from sglang_tuning_exporter.cli import commands, main
from sglang_tuning_exporter.config.profiles import DEFAULT
from sglang_tuning_exporter.core.capacity import Estimate, RankCapacity, StepTime
from sglang_tuning_exporter.core.plan import plan_rows, throughput

if TYPE_CHECKING:
    from pathlib import Path


def around(value: float, half: float = 0.02) -> Estimate:
    return Estimate(value, value * (1 - half), value * (1 + half))


def measured(
    *,
    batch: float = 2.0,
    prefill: float | None = None,
    mix: float | None = None,
) -> RankCapacity:
    """A scheduler of known speed."""
    step = StepTime(
        batch,
        1.0,
        around(0.004 + 0.0002 * batch),
        1.0,
        (around(0.004), around(0.0002)),
        source="v1_loads",
    )
    speed = None if prefill is None else around(prefill)
    return RankCapacity(step=step, prefill=speed, per_token=mix, running=batch)


WITHOUT_OBJECTIVES = replace(DEFAULT, time_to_first_token_seconds=None, inter_token_seconds=None)
FULL = replace(
    measured(batch=8.0, prefill=10_000.0, mix=1.0),
    tokens_per_request=500.0,
    pool_tokens=16_000.0,
    most_requests=24,
    running_limit=24.0,
)


def test_more_at_once_give_more_tokens_each_of_them_later() -> None:
    found = plan_rows([FULL], WITHOUT_OBJECTIVES, 100.0)
    speeds = [row["tokens_per_second"]["value"] for row in found]
    gaps = [row["inter_token_p50_seconds"]["value"] for row in found]
    assert speeds == sorted(speeds)
    assert gaps == sorted(gaps)
    assert [row["kv_cache"] for row in found][-1] == pytest.approx(0.75)


def test_a_row_names_the_objectives_that_break() -> None:
    found = plan_rows([FULL], replace(DEFAULT, time_to_first_token_seconds=0.0105, inter_token_seconds=0.006), 100.0)
    assert found[0]["breaks"] == []
    assert found[-1]["breaks"] == ["inter_token", "first_token"]


def test_an_unsure_prefill_speed_makes_the_throughput_unsure() -> None:
    sure, unsure = (measured(prefill=1000.0, mix=2.0) for _ in range(2))
    unsure = replace(unsure, prefill=around(1000.0, 0.5))
    first, second = throughput(sure, 8), throughput(unsure, 8)
    assert first is not None
    assert second is not None
    assert second.value == pytest.approx(first.value)
    assert second.low < first.low < first.high < second.high


def test_prefill_takes_its_share_of_every_token() -> None:
    plain, beside = throughput(measured(), 8), throughput(measured(prefill=1000.0, mix=2.0), 8)
    assert plain is not None
    assert beside is not None
    assert 1 / beside.value == pytest.approx(1 / plain.value + 0.002)


def log_of(path: Path, *, batches: tuple[int, ...] = (2, 4, 6, 8)) -> Path:
    """A log of ten minutes whose batch changes every six seconds, at 4 ms and 0.5 ms a request; the lines are 0.5.23's."""
    lines = ["[2026-11-20 10:00:00] max_total_num_tokens=16384, max_running_requests=64"]
    for second in range(600):
        batch = batches[second // 6 % len(batches)]
        at = f"[2026-11-20 10:{second // 60:02}:{second % 60:02}]"
        speed = batch / (0.004 + 0.0005 * batch)
        lines.append(
            f"{at} Decode batch, #running-req: {batch}, #token: {400 * batch}, token usage: {400 * batch / 16384:.2f}, cuda graph: True,"
            f" gen throughput (token/s): {speed:.2f}, #queue-req: 0"
        )
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_log_gives_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = str(log_of(tmp_path / "server.log"))
    assert main(["plan", log, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["basis"] == ["log"]
    speeds = {row["requests"]: row["tokens_per_second"]["value"] for row in document["rows"]}
    assert speeds[16] == pytest.approx(16 / 0.012, rel=0.02)
    assert main(["plan", log]) == 0
    text = capsys.readouterr().out
    assert "at once" in text
    assert "One more replica" in text


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
        ([], "give logs or --sglang-url"),
        (["a.log", "--sglang-url", "http://127.0.0.1:1"], "one of both"),
        (["--sglang-url", "http://127.0.0.1:1", "--seconds", "1"], "--seconds=1: give 30"),
        (["--sglang-url", "http://127.0.0.1:1", "--format", "xml"], "--format=xml"),
        (["/nowhere/server.log"], "/nowhere/server.log"),
    ],
)
def test_a_usage_error_is_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *flags]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_live_server_is_asked_for_a_while(
    sglang: FakeSGLang, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "LEAST_SECONDS", 0.1)
    info = {"model_path": "tiny", "version": "0.5.23", "internal_states": [{}]}
    load = {
        "timestamp": time.time(),
        "dp_rank": 0,
        "total_prefill_uncached_tokens": 1,
        "total_prefill_busy_us": 1,
        "decode_moments": None,
    }
    answers: dict[str, Any] = {"/server_info": info, "/v1/loads": {"loads": [load]}}
    sglang.answers |= {
        path: reply(json.dumps(answer).encode(), content_type="application/json") for path, answer in answers.items()
    }
    assert main(["plan", "--sglang-url", sglang.url, "--seconds", "2"]) == 1
    assert "too few decode steps" in capsys.readouterr().out
    assert sglang.count("/v1/loads")


def test_a_server_that_does_not_answer_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "LEAST_SECONDS", 0.1)
    assert main(["plan", "--sglang-url", "http://127.0.0.1:1", "--seconds", "1"]) == 2
    assert "connection refused" in capsys.readouterr().err
