"""The tuning guide's example of a healthy server is healthy in every profile, from log lines of every edition's releases.

The guide's first edition belongs to releases up to 0.4.2, the newest to 0.5.x, the others to the releases between them.
Each log is a release's own start and its own batch lines, with the guide's figures in them.
"""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from sglang_tuning_exporter.cli import main
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.state.profiles import PROFILES

LOGS = sorted((Path(__file__).parent / "data" / "logs").glob("*.log"))
BEGIN = datetime(2025, 11, 20, 11, 41, 0)  # noqa: DTZ001 - printed without a zone
SECONDS = 150


def figures(line: str, at: datetime, **changed: object) -> str:
    """Put a time and figures into a line of a release; `running` is `#running-req`, and so on."""
    names = {
        "running": "#running-req",
        "queued": "#queue-req",
        "usage": "token usage",
        "new": "#new-seq",
        "graph": "cuda graph",
    }
    for name, value in changed.items():
        line = re.sub(rf"({names[name]}: )[\w.]+", rf"\g<1>{value}", line)
    stamp = at.strftime("%Y-%m-%d %H:%M:%S") if line.startswith("[2") else at.strftime("%H:%M:%S")
    return re.sub(r"^\[[\d :-]*\d", f"[{stamp}", line)


def log(
    release: Path,
    *,
    running: int = 233,
    queued: int = 300,
    usage: float = 0.95,
    reserve: float = 6.5,
    per_second: int = 40,
) -> str:
    """Write a log of a start and two and a half minutes of load."""
    text = release.read_text()
    ready = text.index("ready to roll!") + len("ready to roll!")
    start = re.sub(r"available_gpu_mem=[\d.]+", f"available_gpu_mem={reserve:.2f}", text[:ready])
    decode = next(line for line in text[ready:].splitlines() if "Decode batch" in line)
    prefill = next(line for line in text[ready:].splitlines() if "Prefill batch" in line)
    lines = [start]
    for second in range(SECONDS):
        at = BEGIN + timedelta(seconds=second)
        lines.append(figures(prefill, at, running=running, queued=queued, usage=usage, new=per_second))
        lines.append(figures(decode, at, running=running, queued=queued, usage=usage, graph=True))
    return "\n".join(lines) + "\n"


def reported(
    text: str, profile: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any]]:
    (directory / "server.log").write_text(text)
    status = main(["report", str(directory / "server.log"), "--profile", profile, "--format", "json"])
    return status, json.loads(capsys.readouterr().out)


def wrong(document: dict[str, Any]) -> list[str]:
    return [each["diagnosis"] for each in document["findings"] if not BY_ID[each["diagnosis"]].is_chance]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("release", LOGS, ids=lambda path: path.stem)
def test_a_full_kv_cache_with_a_healthy_queue_is_healthy(
    release: Path, profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, document = reported(log(release), profile, tmp_path, capsys)
    # Forty a second start, so 300 wait for eight seconds: the profiles that answer people allow five.
    waits_too_long = PROFILES[profile].queue_wait_seconds == 5.0
    if waits_too_long:
        status, document = reported(log(release, queued=100), profile, tmp_path, capsys)
    assert (document["verdict"], wrong(document), status) == ("no_limit_in_log", [], 0)
    assert document["command"] is None


@pytest.mark.parametrize("running", [3900, 4096])
def test_close_to_the_running_limit_with_a_full_kv_cache_is_healthy(
    running: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release = next(path for path in LOGS if path.stem == "0.4.9.post6")
    text = log(release, running=running).replace("cuda_graph_max_bs=256", "cuda_graph_max_bs=4096")
    text = re.sub(r"Capture cuda graph bs \[.*\]", "Capture cuda graph bs [1, 2, 4096]", text)
    status, document = reported(text, "offline", tmp_path, capsys)
    assert (document["verdict"], wrong(document), status) == ("no_limit_in_log", [], 0)


def test_an_order_by_prefixes_is_an_optional_improvement_beside_the_healthy_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release = next(path for path in LOGS if path.stem == "0.5.23")
    _, document = reported(log(release), "offline", tmp_path, capsys)
    (chance,) = [each for each in document["findings"] if each["diagnosis"] == "shared_prefixes_unused"]
    assert chance["advice"]
    assert document["command"] is None


@pytest.mark.parametrize(("queued", "usage"), [(27, 0.95), (99, 0.95)])
def test_below_the_guides_range_a_full_cache_names_what_wastes_it_and_calls_nobody(
    queued: int, usage: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release = next(path for path in LOGS if path.stem == "0.5.23")
    status, document = reported(log(release, queued=queued, usage=usage), "offline", tmp_path, capsys)
    assert (document["verdict"], status) == ("shared_prefixes_unused", 0)
    assert any("100 to 2,000" in note for note in document["notes"])


@pytest.mark.parametrize("reserve", [8.5, 9.87])
def test_eight_to_ten_gigabytes_are_in_no_editions_range_and_no_finding(
    reserve: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release = next(path for path in LOGS if path.stem == "0.5.23")
    status, document = reported(log(release, reserve=reserve), "offline", tmp_path, capsys)
    assert (document["verdict"], wrong(document), status) == ("no_limit_in_log", [], 0)
