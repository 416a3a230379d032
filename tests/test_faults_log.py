"""Faults of a log that is followed, such as rotation, deletion or a full disk.

Every event is counted, and none twice.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import requests

from conftest import Page, config, wait_for, web
from faults import (
    AS_ANY_OWNER,
    EVENTS,
    LINES,
    UP,
    Server,
    check_log_status,
    counted,
    cpu_seconds,
    decode,
    following,
    hanging,
    mounted,
    of,
    open_files,
    resident,
    silent,
    slowdown,
    unmounted,
    up,
)
from sglang_tuning_exporter.collect import log as logs
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.config import files
from sglang_tuning_exporter.core.facts import DECODE_LOG_INTERVAL


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "logs").mkdir()
    server = Server(tmp_path / "logs" / "server.log")
    yield server
    server.close()


@pytest.mark.usefixtures("_soon_late")
def test_a_file_system_that_hangs_is_reported_and_what_was_written_is_read_later(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    sidecar = Sidecar(config(log_file=(str(server.path),)))
    book = sidecar.log
    assert book is not None
    sidecar.start()
    with web(sidecar) as url:

        def page() -> Page:
            return Page(requests.get(url + "/metrics", timeout=60).text)

        wait_for(lambda: page().value(UP, file=str(server.path)) == 1)
        with hanging(server.path.parent):
            wait_for(lambda: book.is_late(0.0))
            server.write(3)
            wait_for(lambda: page().value(UP, file=str(server.path)) == 0)
            found = requests.get(url + "/api/v1/findings", timeout=60).json()["findings"]
            assert "log_silent" in {each["diagnosis"] for each in found}
            assert "no answer; its file system hangs" in requests.get(url, timeout=60).text
            for _ in range(100):
                page()
            assert sidecar._looks.qsize() <= 1, "all who ask share the look that waits"
        wait_for(lambda: page().value(LINES, kind="decode") == 3)
        assert page().value(UP, file=str(server.path)) == 1
    assert [line for line in caplog.messages if "no answer" in line] == [
        f"log {server.path}: no answer; its file system hangs; check the mount"
    ]


@pytest.fixture
def _soon_late(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (logs.LATE_SECONDS, files.SECONDS) == (30.0, 2.0), "as docs/faults.md says"
    monkeypatch.setattr(logs, "LATE_SECONDS", 0.5)
    monkeypatch.setattr(files, "SECONDS", 0.2)


def test_a_file_system_that_hangs_at_the_start_does_not_keep_the_port_closed(server: Server) -> None:
    with hanging(server.path.parent), following(*of(server)) as exporter:
        assert exporter.get("/-/ready").status_code == 200
        assert exporter.page().value(UP, file=str(server.path)) in {None, 0}


def test_a_start_beside_a_file_system_that_hangs_loses_no_position(server: Server, tmp_path: Path) -> None:
    flags = of(server, "--state-file", str(tmp_path / "state.json"))
    with following(*flags) as exporter:
        server.write(2)
        counted(exporter, 2)
    server.write(3)
    with hanging(server.path.parent), following(*flags) as exporter:
        assert exporter.page().value(EVENTS) == 2
    with following(*flags) as exporter:
        counted(exporter, 5)


def test_a_file_system_that_answers_late_is_followed_from_then_on(server: Server) -> None:
    with ExitStack() as hang:
        hang.enter_context(hanging(server.path.parent))
        with following(*of(server)) as exporter:
            hang.close()
            wait_for(lambda: up(exporter, server) == 1, 30)
            server.write(2)
            counted(exporter, 2)


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        here = Path.cwd()
        os.chdir(path.parent)  # an address is at most 108 bytes long
        try:
            one.bind(path.name)
        finally:
            os.chdir(here)


# What comes in the place of a log that was renamed, by the words that are said of it.
NO_LOGS: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: shutil.rmtree(path.parent),
    "is a directory": Path.mkdir,
    "is a socket": socket_at,
    "is a device": lambda path: path.symlink_to("/dev/zero"),
    "Too many levels of symbolic links": lambda path: path.symlink_to(path.name),
}


def test_a_missing_log_is_reported_and_old_and_new_file_are_read_in_order(server: Server) -> None:
    with following(*of(server)) as exporter:
        for words, put in NO_LOGS.items():
            server.write()
            counted(exporter, server.events)
            server.path.rename(f"{server.path}.1")
            put(server.path)
            server.write(2)
            check_log_status(exporter, server, is_up=False, words=f"log {server.path}: ")
            wait_for(lambda words=words: words in "".join(exporter.said))  # type: ignore[misc]
            counted(exporter, server.events)
            before = cpu_seconds(exporter)
            time.sleep(0.5)
            assert cpu_seconds(exporter) - before < 0.4, words
            if server.path.is_dir():
                server.path.rmdir()
            else:
                server.path.unlink(missing_ok=True)
            server.path.parent.mkdir(exist_ok=True)
            server.reopen()
            server.write(2)
            check_log_status(exporter, server, is_up=True)
            counted(exporter, server.events)


def test_a_pipe_in_the_logs_place_is_read_and_never_waited_for(server: Server) -> None:
    with following(*of(server)) as exporter:
        server.write()
        counted(exporter, 1)
        server.path.rename(f"{server.path}.1")
        os.mkfifo(server.path)
        time.sleep(0.3)
        check_log_status(exporter, server, is_up=True)
        server.reopen()
        server.write(2)
        counted(exporter, 3)
        server.path.unlink()
        server.reopen()
        server.write()
        counted(exporter, 4)


def test_a_log_that_may_not_be_read_for_a_while_is_reported_and_read_on(server: Server) -> None:
    directory = server.path.parent
    with following(*of(server), before=AS_ANY_OWNER, cwd="/") as exporter:
        server.write()
        counted(exporter, 1)
        directory.chmod(0)
        server.write(2)
        check_log_status(exporter, server, is_up=False, words="permission denied")
        directory.chmod(0o755)
        check_log_status(exporter, server, is_up=True)
        counted(exporter, 3)
        server.path.rename(f"{server.path}.1")
        server.reopen()
        server.path.chmod(0)
        server.write(2)
        check_log_status(exporter, server, is_up=False)
        server.path.chmod(0o644)
        counted(exporter, 5)
        check_log_status(exporter, server, is_up=True)


def test_a_log_on_a_full_disk_ends_in_half_a_line_and_goes_on_with_the_next(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    if not mounted(disk, "64k"):
        pytest.skip("no file system can be mounted here")
    server = Server(disk / "server.log")
    try:
        with following(*of(server), cwd="/") as exporter:
            server.write(100)
            ballast = (disk / "ballast").open("wb", buffering=0)
            with suppress(OSError):
                while ballast.write(b"x" * 4096):
                    pass
            with pytest.raises(OSError, match="No space left"):
                server.raw(decode() * 1000)
            written = server.path.read_bytes()
            assert not written.endswith(b"\n")
            whole = written.count(b"Decode batch") - 1
            wait_for(lambda: exporter.page().value(LINES, kind="decode") == whole)
            check_log_status(exporter, server, is_up=True)
            ballast.close()
            (disk / "ballast").unlink()
            server.raw(b"\n" + decode() * 3)
            wait_for(lambda: exporter.page().value(LINES, kind="decode") in {whole + 3, whole + 4})
            assert exporter.page().value(EVENTS) == 100
    finally:
        server.close()
        unmounted(disk)


def test_a_log_that_grows_faster_than_it_is_read_costs_constant_memory(server: Server) -> None:
    text = decode() * 4000
    with following(*of(server)) as exporter:
        server.raw(text)
        wait_for(lambda: exporter.page().value(LINES, kind="decode") == 4000)
        before, written = resident(exporter), 4000
        while written < 200_000:
            server.raw(text)
            written += 4000
        assert server.path.stat().st_size > 28_000_000
        exporter.page()  # answers meanwhile
        wait_for(lambda: exporter.page().value(LINES, kind="decode") == written, 60 * slowdown())
        assert (
            exporter.page().value("sglang_tuning_decode_batches_total", graph="replayed")
            == DECODE_LOG_INTERVAL * written
        )
        assert resident(exporter) - before < 8
        os.truncate(server.path, 0)


def test_a_line_of_a_hundred_megabytes_is_dropped_whole_and_counted(server: Server) -> None:
    with following(*of(server)) as exporter:
        server.write()
        counted(exporter, 1)
        before = resident(exporter)
        piece = (b"x" * 100 + decode()[:-1]) * 5000
        for _ in range(100_000_000 // len(piece) + 1):
            server.raw(piece)
        assert exporter.page().value("sglang_tuning_log_dropped_lines_total") == 0
        server.raw(b"\n")
        server.write(2)
        counted(exporter, 3)
        assert exporter.page().value("sglang_tuning_log_dropped_lines_total") == 1
        assert resident(exporter) - before < 8


def test_of_hundreds_of_matching_files_the_newest_and_any_that_grows_are_followed(tmp_path: Path) -> None:
    old = time.time() - 10_000
    for number in range(400):
        path = tmp_path / f"start-{number:03}.log"
        path.write_bytes(decode())
        os.utime(path, (old + number, old + number))
    with following(*of(tmp_path / "*.log"), "--state-file", str(tmp_path / "state.json")) as exporter:
        # A start does not wait for files that take long to open.
        wait_for(lambda: len(exporter.page().labels("sglang_tuning_log_up")) == 256, seconds=60)
        assert open_files(exporter) < 300
        assert exporter.page().value("sglang_tuning_log_files_left_out") == 400 - 256
        assert not silent(exporter)
        assert up(exporter, tmp_path / "start-399.log") == 1
        newest, oldest = Server(tmp_path / "start-A00.log"), Server(tmp_path / "start-000.log")
        newest.write(3)
        counted(exporter, 3, seconds=90)  # a listing that costs more is repeated less often
        oldest.events = 100
        oldest.write(2)
        counted(exporter, 5, seconds=90)
        assert open_files(exporter) < 300
        assert len(exporter.page().labels("sglang_tuning_log_up")) == 256
        (said,) = (line for line in exporter.said if "files too many" in line)
        assert "matches 144 files too many" in said
    oldest.write(2)
    again = Server(tmp_path / "start-390.log")
    again.events = 200
    again.write(2)
    third = Server(tmp_path / "start-100.log")  # that was never followed
    third.events = 300
    third.write(2)
    with following(*of(tmp_path / "*.log"), "--state-file", str(tmp_path / "state.json")) as exporter:
        counted(exporter, 11, seconds=90)
    for one in (newest, oldest, again, third):
        one.close()


def test_many_rotations_lose_nothing_and_thousands_of_old_files_do_not_matter(server: Server) -> None:
    for number in range(3_000):
        Path(f"{server.path}.{number + 100}").touch()
    state = str(server.path.parent / "state.json")
    with following(*of(server), "--state-file", state) as exporter:
        for number in range(10):
            server.write(5)
            server.path.rename(f"{server.path}.{number}")
            server.reopen()
            server.write(1)
            wait_for(lambda: exporter.page().value(LINES, kind="decode") == server.events, 20 * slowdown())
        counted(exporter, 60)
        assert open_files(exporter) < 60
    server.write()
    server.path.rename(f"{server.path}.11")
    server.reopen()
    server.write()
    with following(*of(server), "--state-file", state) as exporter:
        counted(exporter, 62)


def test_one_file_under_two_names_is_counted_once(server: Server, tmp_path: Path) -> None:
    os.link(server.path, tmp_path / "other.log")
    with following(*of(server), *of(tmp_path / "other.log")) as exporter:
        server.write(3)
        counted(exporter, 3)
        server.path.unlink()
        server.write(2)
        counted(exporter, 5)
        assert up(exporter, tmp_path / "other.log") == 1


STAMPS = ("11:40:10", "10:40:10", "12:40:10")  # an hour back and forth


def test_a_log_whose_clock_jumps_is_counted_at_the_time_it_arrives(server: Server) -> None:
    begin = time.monotonic()
    with following(*of(server)) as exporter:
        for stamp in (*(f"2025-11-20 {each}" for each in STAMPS), "2199-01-01 00:00:00", "1970-01-01 00:00:00"):
            server.write(4, stamp)
            counted(exporter, server.events)
        page = exporter.page()
        last = page.value("sglang_tuning_log_last_line_timestamp_seconds")
        assert last is not None
        assert abs(last - time.time()) < 5
        assert page.labels("sglang_tuning_log_doubtful_total") == []
        spent = [s.value for s in page.samples if s.name == "sglang_tuning_state_seconds_total"]
        assert min(spent) >= 0
        assert max(spent) < time.monotonic() - begin
