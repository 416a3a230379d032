"""A disk or a network file system that fails at any one moment: the follower raises nothing and loses no line.

A file that cannot be compared with one that was read may be read twice.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from sglang_tuning_exporter.collect.follower import LogFollower
from test_tail import append

LINES = [b"%04d decode line of a server, long enough to be known again\n" % number for number in range(10)]
CALLS = ("pread", "fstat", "open")


def new_lines(follower: LogFollower) -> list[bytes]:
    follower.status()
    new = (block.data for block in follower.poll() if not block.historical)
    found = [line for data in new for line in data.splitlines(keepends=True)]
    follower.positions()
    return found


def scenario(log: Path) -> Iterator[bytes]:
    """Yield the lines that are read of a log that is written, renamed, copied and
    truncated, emptied, and gone on with.
    """
    append(log, b"".join(LINES[:2]))
    follower = LogFollower([str(log)], from_start=True)
    yield from new_lines(follower)
    append(log, LINES[2] + LINES[3])
    yield from new_lines(follower)
    log.rename(log.with_name("server.log.1"))
    append(log, LINES[4] + LINES[5])
    yield from new_lines(follower)
    append(log, LINES[6])
    log.with_name("server.log.2").write_bytes(log.read_bytes())
    os.truncate(log, 0)
    append(log, LINES[7])
    yield from new_lines(follower)
    saved = follower.positions()
    follower.close()
    append(log, LINES[8])
    follower = LogFollower([str(log)], positions=saved)
    yield from new_lines(follower)
    log.unlink()
    yield from new_lines(follower)
    append(log, LINES[9])
    for _ in range(3):
        yield from new_lines(follower)
    follower.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("call", CALLS)
def test_one_failing_system_call_at_any_moment_raises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    real = getattr(os, call)
    for at in count():
        made = 0

        def failing(*given: object, at: int = at, **named: object) -> object:
            nonlocal made
            made += 1
            if made == at:
                raise OSError(error, os.strerror(error))
            return real(*given, **named)

        (folder := tmp_path / f"{at}").mkdir()
        with monkeypatch.context() as patched:
            patched.setattr(os, call, failing)
            assert set(scenario(folder / "server.log")) == set(LINES), f"call {at}"
        if made < at:
            break
    assert at > 5
