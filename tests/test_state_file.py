"""The state file on real disks: replaced whole or not at all, and nothing that happens to it stops the exporter."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import wait_for
from sglang_tuning_exporter.collect import _state_file as state_file
from sglang_tuning_exporter.collect._state_file import MOST_BYTES, StateFile
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.events import from_json, to_json
from sglang_tuning_exporter.core.watch import Watch

AS_ROOT = os.geteuid() == 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.json"


@pytest.fixture
def file(path: Path) -> Iterator[StateFile]:
    """A state file that this process has taken."""
    file = StateFile(path)
    assert file.acquire()
    yield file
    file.release()


def taken(path: Path) -> StateFile:
    file = StateFile(path)
    file.acquire()
    return file


def test_only_its_owner_may_read_it(file: StateFile, path: Path) -> None:
    file.save({})
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_concurrent_reader_sees_a_whole_document(file: StateFile, path: Path) -> None:
    file.save({"number": 0, "text": ""})
    stop = threading.Event()

    def write() -> None:
        for number in range(1, 600):
            file.save({"number": number, "text": "x" * (number % 7 * 9000)})
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    while not stop.is_set():
        seen.append(json.loads(path.read_bytes())["number"])
    writer.join()
    assert seen == sorted(seen)
    assert json.loads(path.read_bytes())["number"] == 599


def test_what_is_saved_while_an_earlier_save_is_late_is_in_the_file_afterwards(
    file: StateFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.save({"number": 0})
    asked, answers, replace = threading.Event(), threading.Event(), os.replace

    def late(*names: Any, **more: Any) -> None:
        asked.set()
        answers.wait(60)
        replace(*names, **more)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(os, "replace", late)
        meanwhile.setattr(state_file, "SECONDS", 0.05)
        assert not file.save({"number": 1})
        assert asked.is_set()
        meanwhile.setattr(state_file, "SECONDS", 60.0)
        saving = threading.Thread(target=file.save, args=({"number": 2},))
        saving.start()
        answers.set()
        saving.join()
    assert json.loads(path.read_bytes())["number"] == 2


OURS = b'{"schema": 1, "program": "sglang-tuning-exporter", "lines": '


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\x00" * 4096,
        OURS,
        OURS + b"\x00" * 4096,
        OURS.replace(b"1", b"2", 1) + b"{}}",
        OURS + b"\xff\xfe",
        OURS + b"[" * 200_000,
        OURS + b"9" * 10_000 + b"}",
        OURS + b'"' + b"x" * MOST_BYTES + b'"}',
    ],
    ids=["empty", "nul", "cut", "cut by a crash", "newer", "not utf-8", "deep", "giant number", "huge"],
)
def test_a_damaged_state_file_is_reported_and_replaced_by_the_next_save(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    file = taken(path)
    assert file.load() == {}
    assert file.problem == "is damaged or of another version: starting as if it were not there"
    assert file.save({"lines": {}})
    assert (file.problem, file.load()) == ("", {"schema": 1, "lines": {}})
    file.release()


FOREIGN = [
    b"precious",
    b"{",
    b"[1, 2]",
    b"{}",
    b'{"schema": 1}',
    b'{"schema": 1, "name": "mine"}',
    b'{"version": 3, "entries": []}',
    b'{"schema": 1, "program": "another"}',
    b"\xff\xfe",
    b"#!/bin/sh\n",
    b"\x00" * 4095 + b"x",
]


@pytest.mark.parametrize("text", FOREIGN)
def test_a_file_of_another_program_is_not_used_and_stays_as_it_is(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    file = taken(path)
    assert (file.held, file.load(), file.save({"lines": {}})) == (False, {}, False)
    assert file.problem == "cannot be used: state.json is no state file of an exporter; give another path"
    assert path.read_bytes() == text
    assert [each.name for each in path.parent.iterdir()] == ["state.json"]


@pytest.mark.parametrize("text", FOREIGN)
def test_a_file_of_another_program_that_appears_later_stays_as_it_is(file: StateFile, path: Path, text: bytes) -> None:
    assert file.save({"lines": {}})
    path.write_bytes(text)
    assert not file.save({"lines": {"decode": 1}})
    assert file.problem == "cannot be written: state.json is no state file of an exporter; give another path"
    assert path.read_bytes() == text
    path.unlink()
    assert file.save({"lines": {"decode": 1}})
    assert (file.problem, file.load()) == ("", {"schema": 1, "lines": {"decode": 1}})


@pytest.mark.skipif(not AS_ROOT, reason="only root may give a file away")
@pytest.mark.parametrize("name", ["state.json", "state.json.lock", "state.json.new"])
def test_a_file_of_another_user_is_neither_read_nor_touched(path: Path, name: str) -> None:
    planted = path.with_name(name)
    planted.touch()
    os.chown(planted, 12345, 12345)
    file = taken(path)
    assert not file.save({})
    assert file.problem.endswith(f": {name} belongs to another user; give another path")
    assert planted.stat().st_uid == 12345
    file.release()


def _link(place: Path) -> None:
    precious = place.with_name("precious")
    precious.write_text("as it was")
    place.symlink_to(precious)


def _hard_link(place: Path) -> None:
    precious = place.with_name("precious")
    precious.write_text("as it was")
    os.link(precious, place)


def _words(place: Path) -> None:
    place.write_text("precious")


IN_THE_WAY: dict[str, Callable[[Path], None]] = {
    "link": _link,
    "dangling link": lambda place: place.symlink_to("nowhere"),
    "directory": Path.mkdir,
    "pipe": os.mkfifo,
    "words": _words,
    "hard link": _hard_link,
}


@pytest.mark.parametrize("suffix", ["", ".new", ".lock"])
@pytest.mark.parametrize("kind", IN_THE_WAY)
def test_a_file_that_is_laid_in_its_way_is_reported_and_left_as_it_is(tmp_path: Path, suffix: str, kind: str) -> None:
    place = tmp_path / f"state.json{suffix}"
    IN_THE_WAY[kind](place)
    before = {path.name: path.lstat() for path in tmp_path.iterdir()}
    file = taken(tmp_path / "state.json")
    assert not file.save({"lines": {}})
    assert re.match(rf"cannot be (used|written): state\.json{suffix} is ", file.problem), file.problem
    for name, was in before.items():
        now = (tmp_path / name).lstat()
        assert (now.st_ino, now.st_mode, now.st_size, now.st_mtime_ns) == (
            was.st_ino,
            was.st_mode,
            was.st_size,
            was.st_mtime_ns,
        )
    assert not (tmp_path / "nowhere").exists()
    if (tmp_path / "precious").exists():
        assert (tmp_path / "precious").read_text() == "as it was"
    file.release()


def test_a_second_exporter_cannot_take_it_until_the_first_lets_go(file: StateFile, path: Path) -> None:
    file.save({"first": 1})
    other = taken(path)
    assert (other.held, other.problem) == (
        False,
        "another exporter uses it; give each exporter a --state-file of its own",
    )
    assert (other.load(), other.save({"second": 2})) == ({}, False)
    assert file.load() == {"schema": 1, "first": 1}
    file.release()
    assert other.acquire()
    assert other.load() == {"schema": 1, "first": 1}
    other.release()


def test_one_that_does_not_answer_at_the_start_is_tried_again_and_used_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "SECONDS", 0.1)
    path, answers, real = tmp_path / "hung" / "state.json", threading.Event(), os.open
    path.parent.mkdir()

    def opened(name: object, *rest: object, **more: object) -> int:
        if name == path.parent:
            answers.wait(60)
        return real(name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", opened)
    file = taken(path)
    assert not file.is_usable()
    assert file.problem == "cannot be used: its file system does not answer; it is tried again"
    answers.set()
    wait_for(file.is_usable)
    assert file.save({"lines": 3})
    assert (file.problem, json.loads(path.read_text())["lines"]) == ("", 3)
    assert not taken(path).is_usable(), "it is locked once"
    file.release()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing/state.json", "cannot be used: No such file or directory; create its directory, or give another path"),
        ("a-file/state.json", "cannot be used: Not a directory; give another path"),
        ("x" * 300, "cannot be used: File name too long; give another path"),
        ("nul\0byte", "cannot be used: no file has a name with a NUL byte in it; give another path"),
    ],
)
def test_a_path_that_cannot_be_a_state_file_is_reported(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "a-file").touch()
    file = taken(tmp_path / name)
    assert (file.load(), file.save({})) == ({}, False)
    assert (file.problem, file.held) == (problem, False)


def test_a_device_is_not_replaced_by_a_file() -> None:
    file = taken(Path("/dev/null"))
    assert (file.held, file.problem) == (False, "cannot be used: null is not a regular file; give another path")
    assert Path("/dev/null").is_char_device()
    assert not Path("/dev/null.lock").exists()


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(
    st.sampled_from(
        ["counted", "ranks", "doubtful", "ledger", "waiting", "retracted", "clocks", "words", "starts", "outages"]
    ),
    JSON,
)
def test_any_value_in_a_state_file_is_read_or_left_out(name: str, value: object) -> None:
    watch = Watch(PROFILES["online"], 1000.0, reads=True, scrapes=False)
    watch.restore({name: value}, 1000.0, 1.0)
    watch.judge(1001.0)
    assert json.dumps(watch.saved(1002.0), allow_nan=False)


@given(JSON)
def test_any_value_in_place_of_an_event_is_one_or_left_out(value: object) -> None:
    for saved in (
        value,
        {"kind": value, "rank": [None] * 3},
        {"kind": "arguments", "rank": [None] * 3, "arguments": value},
    ):
        event = from_json(saved)
        assert event is None or json.dumps(to_json(event))
