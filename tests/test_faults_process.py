"""Faults of the exporter's own process: killed, without file descriptors, disk or terminal, its clock changed.

During, and after.
"""

from __future__ import annotations

import json
import os
import pty
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from conftest import PROGRAM, FakeSGLang, complaint, environment, hang, wait_for
from faults import (
    AS_ANY_OWNER,
    EVENTS,
    LINES,
    STATE_FILE_UP,
    Server,
    counted,
    decode,
    end_seconds,
    following,
    mounted,
    of,
    open_files,
    unmounted,
)
from sglang_tuning_exporter.core.facts import DECODE_LOG_INTERVAL
from web_access import basic, hashed

AS_ROOT = os.geteuid() == 0
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
SPENT = "sglang_tuning_state_seconds_total"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "server.log")
    yield server
    server.close()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state.json"


def with_state(state: Path) -> tuple[str, str]:
    return "--state-file", str(state)


def test_it_ends_in_time_with_a_scrape_under_way_and_a_reader_that_does_not_read(
    server: Server, sglang: FakeSGLang
) -> None:
    sglang.answers["/metrics"] = hang
    with following(*of(server), "--sglang-url", sglang.url) as exporter, ExitStack() as clients:
        port = exporter.port
        for request in (
            b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 30,
            b"GET /",
        ):
            client = socket.socket()
            clients.callback(client.close)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect(("127.0.0.1", port))
            client.sendall(request)
        wait_for(lambda: sglang.count("/metrics") > 0)
        begin = time.monotonic()
        assert exporter.end() == 0
        assert time.monotonic() - begin < end_seconds()


def test_it_ends_in_time_while_it_is_far_behind_and_goes_on_where_it_was(server: Server, state: Path) -> None:
    lines = 120_000
    with following(*of(server), *with_state(state)) as exporter:
        server.raw(decode())
        wait_for(lambda: exporter.page().value(LINES, kind="decode") == 1)
        server.raw(decode() * (lines - 1))
        begin = time.monotonic()
        assert exporter.end() == 0
        assert time.monotonic() - begin < end_seconds()
    assert json.loads(state.read_bytes())["lines"]["decode"] < lines
    with following(*of(server), *with_state(state)) as exporter:
        wait_for(lambda: exporter.page().value(LINES, kind="decode") == lines, 240)
        assert (
            exporter.page().value("sglang_tuning_decode_batches_total", graph="replayed") == DECODE_LOG_INTERVAL * lines
        )


@pytest.mark.parametrize("rotation", ["rename", "copytruncate"])
def test_kills_while_a_log_is_written_and_rotated_count_each_event_once(
    server: Server, state: Path, rotation: str
) -> None:
    dice, seen = random.Random(rotation), [0.0]
    server.raw(b"[2025-11-20 11:40:00] server_args={'tp_size': 1, 'dp_size': 1}\n")
    for start in range(3):
        with following(*of(server), "--from-start", *with_state(state)) as exporter:
            until = time.monotonic() + 0.2 + dice.random() / 3
            while time.monotonic() < until:
                server.write(dice.randrange(40))
                shown = exporter.page().value(EVENTS)  # absent while older lines are read
                seen += [] if shown is None else [shown]
            if start == 2:
                counted(exporter, server.events)
                assert exporter.page().value("sglang_tuning_server_starts_total") == 1
            server.write(dice.randrange(40))
            exporter.process.kill()
            exporter.process.wait()
        if start == 1 and rotation == "rename":
            server.path.rename(f"{server.path}.1")
            server.reopen()
        elif start == 1:
            shutil.copyfile(server.path, f"{server.path}.1")
            os.truncate(server.path, 0)
    assert seen == sorted(seen)
    assert seen[-1] > 100


@pytest.fixture
def hangups() -> Iterator[None]:
    """Reset hang-ups as a shell has them: tests run under nohup would pass on that they are ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangups")
def test_a_hangup_does_not_end_a_service_and_is_answered_in_words(server: Server) -> None:
    with following(*of(server), start_new_session=True) as exporter:
        exporter.page()
        exporter.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "SIGHUP: ignored; restart to change settings" in "".join(exporter.said))
        server.write()
        counted(exporter, 1)


@pytest.mark.usefixtures("hangups")
def test_a_terminal_that_is_closed_ends_it_in_order(server: Server, state: Path) -> None:
    child, terminal = pty.fork()
    if child == 0:
        flags = ["--listen-address", "127.0.0.1:0", *of(server), *with_state(state)]
        os.execve(sys.executable, [*PROGRAM, "serve", *flags], environment())
    said = b""
    while b"Started server" not in said:
        said += os.read(terminal, 4096)
    os.close(terminal)
    wait_for(lambda: os.waitpid(child, os.WNOHANG)[0] == child if Path(f"/proc/{child}").exists() else True, 10)
    assert json.loads(state.read_bytes())["schema"] == 1


def test_without_file_descriptors_it_still_reports_and_recovers(server: Server, state: Path) -> None:
    limited = ("bash", "-c", 'ulimit -n 30; exec "$@"', "bash")
    with following(*of(server), *with_state(state), before=limited) as exporter:
        server.write()
        counted(exporter, 1)
        with ExitStack() as clients:
            port = exporter.port
            for _ in range(40):
                clients.enter_context(socket.create_connection(("127.0.0.1", port)))
            wait_for(
                lambda: any("cannot accept a connection: Too many open files" in line for line in exporter.said), 10
            )
            server.write(4)
            time.sleep(0.5)
        counted(exporter, 5)
        wait_for(lambda: exporter.page().value(STATE_FILE_UP) == 1)
        assert sum("cannot accept a connection" in line for line in exporter.said) == 1
        assert open_files(exporter) < 30


@pytest.fixture
def pids() -> Iterator[Path]:
    """A control group whose number of threads can be limited."""
    group = Path("/sys/fs/cgroup/pids") if Path("/sys/fs/cgroup/pids").is_dir() else Path("/sys/fs/cgroup")
    group /= f"sglang-tuning-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "pids.max").write_text("max")
    except OSError:
        pytest.skip("no control group of processes can be made here")
    yield group
    wait_for(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def test_five_seconds_without_threads_break_neither_scrapes_nor_files_for_good(
    server: Server, state: Path, sglang: FakeSGLang, tmp_path: Path, pids: Path
) -> None:
    guard, key, right = tmp_path / "web.yml", tmp_path / "key", {"Authorization": basic("prometheus", "right")}
    guard.write_text(f"basic_auth_users: {{prometheus: '{hashed('right')}'}}")
    key.write_text("k")
    more = ("--sglang-url", sglang.url, "--web-config", str(guard), "--api-key-file", str(key))
    with following(*of(server), *with_state(state), *more) as exporter:
        up = "sglang_tuning_up 1.0"
        assert up in exporter.get("/metrics", right).text
        (pids / "cgroup.procs").write_text(str(exporter.process.pid))
        (pids / "pids.max").write_text("1")
        until = time.monotonic() + 5
        while time.monotonic() < until:
            server.write()
            assert up in exporter.get("/metrics", right).text, "SGLang is asked without a thread more"
            time.sleep(0.5)
        assert f"{STATE_FILE_UP} 0.0" in exporter.get("/metrics", right).text
        (pids / "pids.max").write_text("max")
        server.write()
        wait_for(lambda: f"{STATE_FILE_UP} 1.0" in exporter.get("/metrics", right).text, 10)
        wait_for(lambda: "sglang_tuning_web_config_up 1.0" in exporter.get("/metrics", right).text, 10)
        assert json.loads(state.read_bytes())["lines"]["decode"] == server.events
        said = "".join(exporter.said)
        assert "the exporter can start no thread: raise its limit" in said


def test_within_half_a_gigabyte_of_address_space_it_works(server: Server) -> None:
    limited = ("bash", "-c", 'ulimit -v 1000000; exec "$@"', "bash")
    with following(*of(server), before=limited) as exporter:
        server.write(1000)
        counted(exporter, 1000)


def test_two_exporters_with_one_state_file_stay_right_and_the_second_warns(server: Server, state: Path) -> None:
    with following(*of(server), *with_state(state)) as first, following(*of(server), *with_state(state)) as second:
        assert "another exporter uses it; give each exporter a --state-file of its own" in "".join(second.said)
        server.write(3)
        counted(first, 3)
        counted(second, 3)
        assert (first.page().value(STATE_FILE_UP), second.page().value(STATE_FILE_UP)) == (1, 0)
        first.process.kill()
        first.process.wait()
        with following(*of(server), *with_state(state)) as third:  # the lock went with its holder
            counted(third, 3)
            assert third.page().value(STATE_FILE_UP) == 1


def test_a_state_file_on_a_full_disk_is_reported_stays_whole_and_is_written_again(
    server: Server, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    if not mounted(disk, "64k"):
        pytest.skip("no file system can be mounted here")
    state = disk / "state.json"
    try:
        with following(*of(server), *with_state(state), cwd="/") as exporter:
            server.write(2)
            counted(exporter, 2)
            with (disk / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
                while ballast.write(b"x" * 4096):
                    pass
            server.write(3)
            counted(exporter, 5)
            wait_for(lambda: exporter.page().value(STATE_FILE_UP) == 0)
            wait_for(lambda: "cannot be written: No space left on device" in "".join(exporter.said))
            assert json.loads(state.read_bytes())["lines"]["decode"] == 2
            assert not Path(f"{state}.new").exists()
            (disk / "ballast").unlink()
            wait_for(lambda: exporter.page().value(STATE_FILE_UP) == 1)
            assert json.loads(state.read_bytes())["lines"]["decode"] == 5
    finally:
        unmounted(disk)


def test_a_state_file_that_may_not_be_written_is_reported_and_serving_goes_on(server: Server, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with following(*of(server), *with_state(closed / "state.json"), before=AS_ANY_OWNER) as exporter:
        assert (
            "cannot be used: Permission denied; let this user read and write it and its directory; continuing"
            " without it" in "".join(exporter.said)
        )
        assert exporter.page().value(STATE_FILE_UP) == 0
        server.write(2)
        counted(exporter, 2)


# What Python cannot write it keeps, and tries again at its exit; with PYTHONUNBUFFERED it keeps nothing.
@pytest.mark.parametrize(
    ("streams", "unbuffered"),
    [("<&- >&- 2>&-", ""), ("2>&-", "1"), ("</dev/null >/dev/full 2>/dev/full", ""), ("2>/dev/full", "1"),
     ("2> >(exec <&-; sleep 0.1)", ""), ("2> >(exec <&-; sleep 0.1)", "1")],
    ids=["closed", "closed for errors", "a full disk", "a full disk for errors", "a broken pipe",
        "a broken pipe at once"],
)  # fmt: skip
def test_whatever_its_standard_streams_are_it_serves_and_ends_with_status_zero(
    server: Server, state: Path, streams: str, unbuffered: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = [*of(server), *with_state(state), "--listen-address", f"127.0.0.1:{port}"]
    command = ["bash", "-c", f'exec "$@" {streams}', "bash", *PROGRAM, "serve"]
    with subprocess.Popen([*command, *flags], env=environment(PYTHONUNBUFFERED=unbuffered)) as process:
        try:
            wait_for(state.exists, 30)  # written when the log has been opened
            server.write(2)
            wait_for(lambda: state.exists() and json.loads(state.read_bytes())["lines"].get("decode") == 2, 30)
            for number in range(3):
                stream = str(Path(f"/proc/{process.pid}/fd/{number}").readlink())
                assert not stream.startswith(("socket:", str(state), str(server.path)))
            process.terminate()
            assert process.wait(timeout=10) == 0
        finally:
            process.kill()


def test_started_twice_the_second_says_that_the_port_is_taken_and_the_first_goes_on(server: Server) -> None:
    with following(*of(server)) as exporter:
        address = exporter.url.removeprefix("http://")
        said = complaint("serve", *of(server), "--listen-address", address)
        assert f"--listen-address={address}: Address already in use; give another port" in said
        server.write()
        counted(exporter, 1)


@pytest.mark.parametrize(
    "variables",
    [
        {"TZ": "Nowhere/Atlantis", "HOME": "/nonexistent", "LANG": "xx_YY.none", "PYTHONDEVMODE": "1"},
        {"TZ": "A" * 3000, "PYTHONOPTIMIZE": "2", "PYTHONWARNINGS": "error", "PYTHONUTF8": "0", "LC_ALL": "C"},
        {"TZ": ":", "PYTHONIOENCODING": "ascii:strict", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "LC_ALL": "C"},
    ],
    ids=["no such zone, home or language", "optimised, warnings are errors", "ascii alone"],
)
def test_an_odd_environment_changes_nothing(tmp_path: Path, variables: dict[str, str]) -> None:
    server = Server(tmp_path / "sërver-日本.log")
    with following(*of(server), variables=variables) as exporter:
        server.write(3)
        counted(exporter, 3)
    server.close()


@pytest.mark.skipif(not AS_ROOT, reason="only root may run it as somebody else")
def test_a_user_without_a_name_or_a_home_may_run_it(server: Server) -> None:
    may_read = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")  # this Python may lie in root's home
    nameless = ("env", "-u", "HOME", "-u", "USER", "setpriv", "--reuid=54321", "--regid=54321", "--clear-groups")
    with following(*of(server), before=(*nameless, *may_read), cwd="/") as exporter:
        server.write(2)
        counted(exporter, 2)


def test_a_stopped_process_counts_no_more_seconds_than_have_passed(server: Server) -> None:
    with following(*of(server)) as exporter:
        begin = time.monotonic()  # what is counted so far reaches to the second that these lines print
        server.write(2)
        counted(exporter, 2)
        before = spent(exporter)
        exporter.process.send_signal(signal.SIGSTOP)
        server.write(3)
        time.sleep(1.5)
        exporter.process.send_signal(signal.SIGCONT)
        counted(exporter, 5)
        after, took = spent(exporter), time.monotonic() - begin
        assert 1.5 <= sum(after.values()) - sum(before.values()) <= took + 1


def spent(exporter: object) -> dict[str, float]:
    """The seconds in each state of `activity`, which add up to wall time."""
    page = exporter.page()  # type: ignore[attr-defined]
    found = [s for s in page.samples if s.name == SPENT and s.labels["signal"] == "activity"]
    return {sample.labels["state"]: sample.value for sample in found}


def moved_clock(offset: Path) -> dict[str, str]:
    """Environment variables that shift the wall clock of a process by the number in the file `offset`."""
    offset.write_text("+0\n")
    return {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }


@pytest.mark.skipif(not FAKETIME.exists(), reason="libfaketime is not installed")
def test_a_wall_clock_set_an_hour_back_and_forth_moves_no_counter_and_no_second(server: Server, tmp_path: Path) -> None:
    offset = tmp_path / "offset"
    with following(*of(server), variables=moved_clock(offset)) as exporter:
        begin = time.monotonic()  # what is counted so far reaches to the second that the line prints
        server.write()
        counted(exporter, 1)
        before = spent(exporter)
        for words, hours in (("-3600\n", -1), ("+3600\n", 1), ("+0\n", 0)):
            offset.write_text(words)
            server.write()
            counted(exporter, server.events)
            last = exporter.page().value("sglang_tuning_log_last_line_timestamp_seconds")
            assert last is not None
            assert abs(last - time.time() - 3600 * hours) < 60
        assert sum(spent(exporter).values()) - sum(before.values()) <= time.monotonic() - begin + 1
