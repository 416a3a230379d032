"""Text copied from a terminal, which cut its lines at its width, is read as the log it was."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sglang_tuning_exporter.report.inputs import Logs
from sglang_tuning_exporter.report.report import ReadLogs, report
from sglang_tuning_exporter.report.terminal import Style, render
from sglang_tuning_exporter.report.texts import rejoined
from sglang_tuning_exporter.state.profiles import PROFILES

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORDINGS = Path(__file__).parent / "recordings"
RETRACT = RECORDINGS / "v0.5.9-retract" / "server.log.gz"


@cache
def recorded(path: Path = RETRACT) -> bytes:
    return gzip.decompress(path.read_bytes())


def cut(text: bytes, width: int) -> Iterator[bytes]:
    """Cut the lines of a text at a width of a terminal."""
    for line in text.splitlines():
        yield from (line[at : at + width] for at in range(0, max(len(line), 1), width))


def figures(path: Path, text: bytes) -> tuple[dict[str, Any], list[str]]:
    path.write_bytes(text)
    document: dict[str, Any] = report(Logs([str(path)]), PROFILES["online"])
    document["counts"].pop("lines")  # an empty line may be the rest of one
    return {key: value for key, value in document.items() if key not in {"sources", "notes"}}, document["notes"]


@pytest.mark.parametrize(
    "before", [b"", b"server-1  | ", b"2026-11-20T19:25:10.123Z "], ids=["bare", "compose", "kubectl"]
)
@pytest.mark.parametrize("spaces", ["kept", "left out at the end of a line"])
@pytest.mark.parametrize("width", [80, 120, 132, 200, 237])
def test_the_report_of_cut_lines_is_that_of_the_log(tmp_path: Path, width: int, spaces: str, before: bytes) -> None:
    log = b"".join(before + line + b"\n" for line in recorded().splitlines())
    lines = (line if spaces == "kept" else line.rstrip(b" ") for line in cut(log, width))
    found, notes = figures(tmp_path / "server.log", b"\n".join(lines) + b"\n")
    assert found == figures(tmp_path / "server.log", log)[0]
    # Wider ones cut only the line with the arguments, whose rest is read with it.
    words = f"{tmp_path}/server.log: its lines were cut at {width} columns, as a terminal does; they were joined again"
    assert (words in notes) or width >= 200


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*/server.log.gz")), ids=lambda path: path.parent.name)
@pytest.mark.parametrize(
    "part", [slice(None), slice(-20_000, None), slice(-2_000, None)], ids=["whole", "end", "last lines"]
)
def test_a_log_whose_lines_are_whole_stays_as_it_is(path: Path, part: slice) -> None:
    text = recorded(path)[part]
    notes: list[str] = []
    assert b"".join(rejoined(iter([text]), notes.append)) == text
    assert notes == []


@pytest.mark.parametrize("kept", [1_024, 8_096], ids=["logger", "rsyslog"])
def test_arguments_that_a_shipper_cut_off_are_not_taken_for_unset(tmp_path: Path, kept: int) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(b"".join(line[:kept] + b"\n" for line in recorded().splitlines()))
    document = report(Logs([str(log)]), PROFILES["online"])
    assert document["command"] is None
    assert any(note.startswith("the log has only ") for note in document["notes"])
    advised = {
        advice.get("flag"): advice["current"] for finding in document["findings"] for advice in finding["advice"]
    }
    assert advised
    text = render(document, ReadLogs(Logs([str(log)]), PROFILES["online"]).read().analysis, Style())
    assert "now not set" not in text
    assert "The command line" not in text


def test_lines_of_one_length_stay_lines_of_their_own() -> None:
    line = b"[2026-11-20 19:25:46] Decode batch, #running-req: 8, #token: 1500, token usage: 0.97, gen throughput (token/s): 87.00, #queue-req: 7\n"
    assert b"".join(rejoined(iter([line * 100]), print)) == line * 100
