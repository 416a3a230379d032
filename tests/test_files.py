"""A file that a setting names is read within limits of kind, size and time; one that does not answer is asked again
when it has.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conftest import wait_for
from sglang_tuning_exporter.config import files, resolve
from sglang_tuning_exporter.config.values import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def test_a_regular_file_is_read_also_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    assert files.read(tmp_path / "file") == files.read(tmp_path / "link") == b"text"


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, "not a regular file"),
        (Path.mkdir, "Is a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (listening, "not a regular file"),
        (lambda path: path.write_bytes(b"x" * (files.MOST_BYTES + 1)), "larger than 1024 KiB"),
        (lambda _: None, "No such file or directory"),
    ],
    ids=["a FIFO", "a directory", "a device", "a socket", "too large", "nothing"],
)
def test_what_is_no_file_of_a_usual_size_is_refused_at_once(
    make: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    make(tmp_path / "it")
    with pytest.raises(OSError, match=words) as refused:
        files.read(tmp_path / "it")
    assert refused.value.strerror == words


class Mount:
    """A file system that answers `open` only while it is let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers, self.asked = threading.Event(), 0
        real = os.open

        def opened(name: object, *rest: object, **more: object) -> int:
            if "hung" in str(name):
                self.asked += 1
                self.answers.wait(60)
            return real(name, *rest, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "open", opened)


@pytest.fixture
def mount(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mount]:
    made = Mount(monkeypatch)
    yield made
    made.answers.set()


def test_a_file_that_does_not_answer_costs_its_time_once_and_is_read_when_it_answers(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(files.within, "__defaults__", (0.2,))
    file = tmp_path / "hung"
    file.write_bytes(b"text")
    for _ in range(3):
        with pytest.raises(OSError, match="no answer for") as late:
            files.read(file)
        assert late.value.errno == errno.ETIMEDOUT
    assert mount.asked == 1, "nobody is sent after a thread that has not returned"
    mount.answers.set()
    wait_for(lambda: not files._asked)
    monkeypatch.setattr(files.within, "__defaults__", (60.0,))  # a busy machine may not start a thread in 0.2 s
    assert files.read(file) == b"text"


def test_two_who_ask_at_once_share_the_answer(mount: Mount, tmp_path: Path) -> None:
    file = tmp_path / "hung"
    file.write_bytes(b"text")
    found: list[bytes] = []
    askers = [threading.Thread(target=lambda: found.append(files.read(file))) for _ in range(2)]
    for asker in askers:
        asker.start()
    wait_for(lambda: mount.asked == 1)
    time.sleep(0.05)
    mount.answers.set()
    for asker in askers:
        asker.join(5)
    assert found == [b"text", b"text"]


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no thread start while it is not set, as in a pod whose limit of processes is reached."""
    start, goes_on = threading.Thread.start, threading.Event()

    def limited(thread: threading.Thread) -> None:
        if not goes_on.is_set():
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    return goes_on


def test_a_moment_without_threads_is_the_exporters_want_and_leaves_no_file_unread(
    no_thread: threading.Event, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"text")
    with pytest.raises(files.NoThreadError, match="the exporter can start no thread: raise its limit"):
        files.read(file)
    no_thread.set()
    assert files.read(file) == b"text"


@pytest.mark.parametrize("what", ["a file system that hangs", "no thread"])
def test_a_file_that_is_late_is_as_it_was_for_ten_minutes_and_that_is_said_once(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    late = files.NoThreadError() if what == "no thread" else OSError(errno.ETIMEDOUT, "no answer for 2 s")
    file = tmp_path / "file"
    file.write_bytes(b"old")
    assert files.read_or_last(file) == b"old"
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(files, "read", lambda _: fails(late))
        assert [files.read_or_last(file) for _ in range(3)] == [b"old"] * 3
        assert [
            f"{late.strerror}; its last content is used, for at most 600 s" in line for line in caplog.messages
        ] == [True]
        assert file in files.late
        meanwhile.setattr(files, "KEPT_SECONDS", 0.0)
        with pytest.raises(OSError, match=str(late.strerror).partition(":")[0]):
            files.read_or_last(file)
    file.write_bytes(b"new")
    assert files.read_or_last(file) == b"new"
    assert file not in files.late


def fails(error: OSError) -> bytes:
    raise error


def test_a_file_that_answers_and_is_none_any_more_has_no_last_content(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    assert files.read_or_last(file) == b"old"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(OSError, match="not a regular file"):
        files.read_or_last(file)


@pytest.mark.parametrize("setting", ["api_key_file", "web_config", "config"])
def test_a_setting_that_names_a_fifo_is_a_mistake_of_the_user_and_does_not_wait(setting: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    begin = time.monotonic()
    with pytest.raises(UsageError, match=r"not a regular file; give a") as refused:
        resolve({"log_file": ["x"], setting: str(tmp_path / "fifo")}, {})
    assert "\n" not in str(refused.value)
    assert time.monotonic() - begin < 30


def test_a_file_that_does_not_answer_stops_the_start_except_the_state_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(files.within, "__defaults__", (0.2,))
    answers = threading.Event()
    monkeypatch.setattr(Path, "is_dir", lambda _: answers.wait(60))
    monkeypatch.setattr(files, "opened", lambda *_: answers.wait(60))
    assert resolve({"log_file": ["x"], "state_file": "state"}, {}).state_file == Path("state")
    with pytest.raises(UsageError, match="no answer for 0 s; give a file that holds the key"):
        resolve({"log_file": ["x"], "api_key_file": str(tmp_path / "key")}, {})
    answers.set()
