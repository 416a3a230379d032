"""Continuing where an earlier follower stopped, whatever happened to the files in between."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from sglang_tuning_exporter.collect.follower import LogFollower

if TYPE_CHECKING:
    from pathlib import Path

LONG = b"2026-01-01 00:00:00 a line that is long enough to be told from others\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


def append(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


def lines(follower: LogFollower) -> list[bytes]:
    return b"".join(block.data for block in follower.poll() if not block.historical).splitlines(keepends=True)


def read_and_stop(pattern: Path) -> dict[str, object]:
    """Read everything and return what a state file would contain, after a round trip through JSON."""
    follower = LogFollower([str(pattern)], from_start=True)
    lines(follower)
    saved: dict[str, object] = json.loads(json.dumps(follower.positions()))
    follower.close()
    return saved


def go_on(pattern: Path, saved: dict[str, object]) -> list[bytes]:
    follower = LogFollower([str(pattern)], positions=saved)
    found = lines(follower) + lines(follower)
    follower.close()
    return found


def test_a_file_that_nobody_followed_before_is_followed_from_its_end(log: Path, tmp_path: Path) -> None:
    append(log, LONG)
    saved = read_and_stop(tmp_path / "other")
    assert go_on(log, saved) == []


def test_start_up_facts_before_the_position_are_read_again(log: Path) -> None:
    append(log, b"server_args=1\n" + LONG)
    saved = read_and_stop(log)
    append(log, b"new\n")
    blocks = list(LogFollower([str(log)], positions=saved).poll())
    assert [(block.data, block.historical) for block in blocks] == [
        (b"server_args=1\n" + LONG, True),
        (b"new\n", False),
    ]


@pytest.mark.parametrize("pattern", ["server.log", "server.log*"])
def test_an_incomplete_last_line_that_was_read_after_a_rotation_is_not_read_again(
    log: Path, tmp_path: Path, pattern: str
) -> None:
    append(log, LONG + b"unended")
    follower = LogFollower([str(tmp_path / pattern)], from_start=True)
    assert lines(follower) == [LONG]
    log.rename(tmp_path / "server.log.1")
    append(log, b"new\n")
    assert sorted(lines(follower) + lines(follower)) == [b"new\n", b"unended\n"]
    saved = json.loads(json.dumps(follower.positions()))
    follower.close()
    assert go_on(tmp_path / pattern, saved) == []
    append(tmp_path / "server.log.1", b" and ended\nlate\n")
    append(log, b"newer\n")
    assert sorted(go_on(tmp_path / pattern, saved)) == [b" and ended\n", b"late\n", b"newer\n"]


def test_the_rest_of_a_giant_line_is_no_line_for_the_next_follower(log: Path) -> None:
    append(log, LONG + b"x" * 5000)
    follower = LogFollower([str(log)], max_line_bytes=1000)
    lines(follower)
    saved = follower.positions()
    follower.close()
    append(log, b"x" * 50 + b"\nnew\n")
    assert lines(LogFollower([str(log)], max_line_bytes=1000, positions=saved)) == [b"new\n"]


def test_positions_hold_no_text_of_the_log(log: Path) -> None:
    append(log, b"server_args=ServerArgs(api_key='hunter2')\n")
    assert "hunter2" not in json.dumps(read_and_stop(log))


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"files": None, "patterns": 3},
        {"files": [None, {}, {"path": 1}], "patterns": [1]},
        {
            "files": [
                {"path": "x", "inode": -1, "position": 1, "head_bytes": 0, "head": "", "tail_bytes": 0, "tail": ""}
            ]
        },
        {
            "files": [
                {
                    "path": "LOG",
                    "inode": 1,
                    "position": 1 << 63,
                    "head_bytes": 0,
                    "head": "",
                    "tail_bytes": 9,
                    "tail": "",
                }
            ]
        },
    ],
)
def test_damaged_positions_are_ignored(log: Path, damaged: dict[str, object]) -> None:
    append(log, LONG)
    damaged = json.loads(json.dumps(damaged).replace("LOG", str(log)))
    follower = LogFollower([str(log)], positions=damaged)
    append(log, b"new\n")
    assert lines(follower) == [b"new\n"]
