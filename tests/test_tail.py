"""Following real files through real renames, truncations, holes, pipes and permissions."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_tuning_exporter.collect.follower import FileStatus, LogFollower

if TYPE_CHECKING:
    from collections.abc import Iterator


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


def live(follower: LogFollower) -> list[bytes]:
    return b"".join(block.data for block in follower.poll() if not block.historical).splitlines(keepends=True)


def live_until_quiet(follower: LogFollower) -> list[bytes]:
    found: list[bytes] = []
    while lines := live(follower):
        found += lines
    return found


def append(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


@contextlib.contextmanager
def forbidden(path: Path) -> Iterator[None]:
    """Remove the permission to read `path`; root, who may read everything, becomes the user nobody meanwhile."""
    mode = path.stat().st_mode
    path.chmod(0)
    if os.geteuid() == 0:
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)
            path.chmod(mode)
    else:
        yield
        path.chmod(mode)


def status_of(follower: LogFollower) -> FileStatus:
    (status,) = follower.status()
    return status


# First sight


def test_a_file_that_exists_is_followed_from_its_end(log: Path) -> None:
    log.write_bytes(b"old\n")
    follower = LogFollower([str(log)])
    append(log, b"new\n")
    assert live(follower) == [b"new\n"]


def test_a_missing_file_is_waited_for_and_read_from_its_start(log: Path) -> None:
    follower = LogFollower([str(log)])
    assert live(follower) == []
    assert status_of(follower) == FileStatus(str(log), reason="missing", position=0, dropped=0)
    log.write_bytes(b"first\n")
    assert live(follower) == [b"first\n"]
    assert status_of(follower) == FileStatus(str(log), reason="", position=6, dropped=0)


def test_the_last_server_start_before_the_end_is_given_once_as_history(log: Path) -> None:
    log.write_bytes(b"before\nserver_args=first\nserver_args=ServerArgs(x)\nafter\nhalf")
    follower = LogFollower([str(log)])
    append(log, b" line\n")
    blocks = list(follower.poll())
    assert [(block.data, block.historical) for block in blocks] == [
        (b"server_args=ServerArgs(x)\nafter\n", True),
        (b"half line\n", False),
    ]
    assert list(follower.poll()) == []


def test_a_server_start_is_found_across_the_blocks_that_the_look_back_reads(log: Path) -> None:
    for padding in range((64 << 10) - 30, (64 << 10) + 10):
        log.write_bytes(b"x\nserver_args=1\n" + b"." * padding + b"\n")
        follower = LogFollower([str(log)])
        (block,) = follower.poll()
        assert block.data.startswith(b"server_args=1\n.")
        follower.close()


def test_history_is_little_more_than_four_mebibytes_of_whole_lines(log: Path) -> None:
    log.write_bytes(b"server_args=1\n" + b"word word word word\n" * 300_000)
    (block,) = LogFollower([str(log)]).poll()
    assert (4 << 20) < len(block.data) <= (4 << 20) + (64 << 10)
    assert block.data.endswith(b"\n")


# Lines


def test_the_end_of_a_giant_line_that_was_there_at_the_start_is_no_line(log: Path) -> None:
    log.write_bytes(b"x" * 100)
    follower = LogFollower([str(log)], max_line_bytes=10)
    append(log, b"tail\nfine\n")
    assert live(follower) == [b"fine\n"]


def test_one_poll_reads_a_bounded_amount_of_each_file(tmp_path: Path) -> None:
    big, small = tmp_path / "a.log", tmp_path / "b.log"
    follower = LogFollower([str(big), str(small)])
    big.write_bytes(b"0123456789abcde\n" * (1 << 20))
    small.write_bytes(b"small\n")
    blocks = list(follower.poll())
    assert sum(len(block.data) for block in blocks if block.path == str(big)) == 8 << 20
    assert blocks[-1].data == b"small\n"
    assert max(len(block.data) for block in blocks) <= 1 << 20
    assert len(live_until_quiet(follower)) == 1 << 19


@settings(max_examples=60)
@example(text=b"12345\n123456\n", cuts=[])
@example(text=b"1234567\nfine\n", cuts=[7])
@given(
    text=st.lists(st.sampled_from([b"a", b"x" * 5, b"x" * 6, b"\n", b"\0", b"\xff\r"])).map(b"".join),
    cuts=st.lists(st.integers(0, 30), max_size=12),
)
def test_lines_up_to_the_limit_come_whole_and_longer_ones_are_counted(text: bytes, cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        follower = LogFollower([str(log)], max_line_bytes=6)
        found = b""
        for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(text)], strict=True):
            append(log, text[begin : max(begin, end)])
            found += b"".join(block.data for block in follower.poll())
        status = status_of(follower)
        follower.close()
    whole = text[: text.rfind(b"\n") + 1].replace(b"\0", b"").split(b"\n")[:-1]
    assert found == b"".join(line + b"\n" for line in whole if len(line) < 6)
    assert status.dropped == sum(len(line) >= 6 for line in whole)


# Rotation


def test_deleted_and_rotated_files_without_news_are_closed(log: Path) -> None:
    clock = Clock()
    follower = LogFollower([str(log)], clock=clock)
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    for name in ("a", "b"):
        append(log, b"line\nunended " + name.encode())
        assert live(follower)
        log.rename(log.with_suffix("." + name))
    append(log, b"new\n")
    assert live(follower)
    log.unlink()
    assert live(follower) == []
    clock.now += 61
    assert live(follower) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


def test_a_neighbour_of_a_truncated_log_that_is_no_copy_of_it_is_not_read(log: Path) -> None:
    Path(f"{log}.1").write_bytes(b"2025-12-31 00:00:00 another night, just as long as the line of today\nolder\n")
    follower = LogFollower([str(log)])
    append(log, b"2026-01-01 00:00:00 a first line, long enough to be known again....\n")
    assert len(live(follower)) == 1
    os.truncate(log, 0)
    append(log, b"new\n")
    assert live(follower) == [b"new\n"]


@pytest.mark.parametrize(
    ("first", "count"), [(100, 3), (100, 40), (0, 12)], ids=["shorter", "longer", "a part of itself"]
)
def test_new_content_in_a_log_is_read_from_its_start_also_where_it_is_longer_already(
    log: Path, first: int, count: int
) -> None:
    follower = LogFollower([str(log)])
    append(log, b"".join(b"%d " % number + LONG for number in range(20)))
    assert len(live(follower)) == 20
    text = b"".join(b"%d " % number + LONG for number in range(first, first + count))
    with log.open("r+b") as file:
        file.truncate(0 if first else len(text))
        file.write(text)
    assert len(live(follower)) == count


def test_the_hole_that_a_writer_without_append_leaves_is_skipped(log: Path) -> None:
    follower = LogFollower([str(log)])
    with log.open("wb", buffering=0) as writer:
        writer.write(b"1\n")
        assert live(follower) == [b"1\n"]
        writer.seek(1 << 40)
        os.truncate(log, 0)
        writer.write(b"2\n")
        assert live(follower) == [b"2\n"]
        assert status_of(follower).position == (1 << 40) + 2
        writer.write(b"3\n")
        assert live(follower) == [b"3\n"]


def test_nul_bytes_at_the_end_wait_until_text_has_come(log: Path) -> None:
    follower = LogFollower([str(log)])
    log.write_bytes(b"1\n")
    os.truncate(log, 1 << 30)
    assert live(follower) == [b"1\n"]
    with log.open("r+b") as writer:
        writer.seek(2)
        writer.write(b"2\n")
    assert live(follower) == [b"2\n"]


# Permission, kinds of files, patterns


def test_a_directory_that_may_not_be_entered_for_a_while_doubles_nothing(tmp_path: Path) -> None:
    clock = Clock()
    (tmp_path / "d").mkdir()
    log = tmp_path / "d" / "a.log"
    follower = LogFollower([str(tmp_path / "d" / "*.log")], clock=clock)
    append(log, b"1\n")
    clock.now += 2
    assert live(follower) == [b"1\n"]
    with forbidden(tmp_path / "d"):
        for _ in range(3):
            clock.now += 100
            assert live(follower) == []
    append(log, b"2\n")
    clock.now += 2
    assert live(follower) == [b"2\n"]


def test_stdin_is_read_without_waiting_and_its_end_is_reported() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as source:
        follower = LogFollower(["-"], stdin=source)
        assert live(follower) == []
        os.write(writing, b"1\nunended")
        assert live(follower) == [b"1\n"]
        assert status_of(follower) == FileStatus("-", reason="", position=9, dropped=0)
        os.close(writing)
        assert live(follower) == [b"unended\n"]
        assert status_of(follower).reason == "ended"
        assert live(follower) == []


def test_a_glob_takes_up_files_that_appear_from_their_start_within_a_second(tmp_path: Path) -> None:
    clock = Clock()
    pattern = str(tmp_path / "*.log")
    follower = LogFollower([pattern], clock=clock)
    assert status_of(follower) == FileStatus(pattern, reason="missing", position=0, dropped=0)
    (tmp_path / "a.log").write_bytes(b"a\n")
    assert live(follower) == []
    clock.now += 1
    assert live(follower) == [b"a\n"]
    assert status_of(follower).path == str(tmp_path / "a.log")


def test_a_compressed_archive_under_a_glob_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "server.log.2.gz").write_bytes(b"\x1f\x8b\n")
    follower = LogFollower([str(tmp_path / "server.log*")], from_start=True)
    assert live(follower) == []


# Where an earlier follower stopped

LONG = b"2026-01-01 00:00:00 a line that is long enough to be told from others\n"


def read_and_stop(pattern: Path) -> dict[str, object]:
    """Read everything and return what a state file would contain, after a round trip through JSON."""
    follower = LogFollower([str(pattern)], from_start=True)
    live(follower)
    saved: dict[str, object] = json.loads(json.dumps(follower.positions()))
    follower.close()
    return saved


def go_on(pattern: Path, saved: dict[str, object]) -> list[bytes]:
    follower = LogFollower([str(pattern)], positions=saved)
    found = live(follower) + live(follower)
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
    assert live(follower) == [LONG]
    log.rename(tmp_path / "server.log.1")
    append(log, b"new\n")
    assert sorted(live(follower) + live(follower)) == [b"new\n", b"unended\n"]
    saved = json.loads(json.dumps(follower.positions()))
    follower.close()
    assert go_on(tmp_path / pattern, saved) == []
    append(tmp_path / "server.log.1", b" and ended\nlate\n")
    append(log, b"newer\n")
    assert sorted(go_on(tmp_path / pattern, saved)) == [b" and ended\n", b"late\n", b"newer\n"]


def test_the_rest_of_a_giant_line_is_no_line_for_the_next_follower(log: Path) -> None:
    append(log, LONG + b"x" * 5000)
    follower = LogFollower([str(log)], max_line_bytes=1000)
    live(follower)
    saved = follower.positions()
    follower.close()
    append(log, b"x" * 50 + b"\nnew\n")
    assert live(LogFollower([str(log)], max_line_bytes=1000, positions=saved)) == [b"new\n"]


MARK = {"path": "LOG", "inode": 1, "position": 1, "head_bytes": 0, "head": "", "tail_bytes": 0, "tail": ""}


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"files": None, "patterns": 3},
        {"files": [None, {}, {"path": 1}], "patterns": [1]},
        {"files": [MARK | {"path": "x", "inode": -1}]},
        {"files": [MARK | {"position": 1 << 63, "tail_bytes": 9}]},
    ],
)
def test_damaged_positions_are_ignored(log: Path, damaged: dict[str, object]) -> None:
    append(log, LONG)
    damaged = json.loads(json.dumps(damaged).replace("LOG", str(log)))
    follower = LogFollower([str(log)], positions=damaged)
    append(log, b"new\n")
    assert live(follower) == [b"new\n"]
