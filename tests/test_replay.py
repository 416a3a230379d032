"""Recordings, and a replayed server: it answers over real HTTP, and its log grows in a real file."""

from __future__ import annotations

import gzip
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import requests

from conftest import wait_for
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.recordings.recording import MAX_FILE_BYTES, Recording, from_files, load
from sglang_tuning_exporter.recordings.replay import ReplayServer

RECORDINGS = Path(__file__).parent / "recordings"
NOON = 1738324800  # 2025-01-31 12:00:00 UTC
START_UP = b"[2025-01-31 11:59:00] server_args={}\n[2025-01-31 12:00:00] The server is fired up and ready to roll!\n"
TEN_SECONDS = START_UP + b"".join(b"[2025-01-31 12:00:%02d] line %d\n" % (n, n) for n in range(1, 11))


def made(log: bytes = TEN_SECONDS, **files: bytes) -> Recording:
    return from_files({"server.log": log} | files, name="made")


@contextmanager
def replayed(recording: Recording, log_path: Path, **options: Any) -> Iterator[ReplayServer]:
    server = ReplayServer(recording, log_path=log_path, **options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def get(url: str) -> requests.Response:
    return requests.get(url, timeout=5)


def health(url: str) -> str:
    try:
        return str(get(url + "/health").status_code)
    except requests.ConnectionError:
        return "nobody"


def test_the_log_has_the_start_up_at_once_and_nothing_of_the_future(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with replayed(made(), log, speed=0.001):
        assert log.read_bytes() == START_UP


def test_the_log_grows_to_the_recorded_bytes(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    sizes = []

    def is_finished() -> bool:
        sizes.append(log.stat().st_size)
        return server.finished

    with replayed(made(), log, speed=10) as server:
        wait_for(is_finished, 20)
    assert log.read_bytes() == TEN_SECONDS
    assert len(set(sizes)) > 2


def test_a_killed_server_answers_nobody_until_it_is_back(tmp_path: Path) -> None:
    events = [(0, "ready"), (2, "SIGKILL_main"), (3, "start"), (8, "ready"), (9, "exit")]
    text = b"".join(json.dumps({"t": NOON + at, "event": name}).encode() + b"\n" for at, name in events)
    recording = made(**{"events.jsonl": text, f"metrics-0001-{NOON * 1000}.prom": b"n 1\n"})
    heard: list[str] = []
    with replayed(recording, tmp_path / "log", speed=10) as server:
        while not server.finished:
            heard.append(health(server.url))
        heard.append(str(get(server.url + "/metrics").status_code))
    changes = [what for what, _ in groupby(heard)]
    assert changes == ["200", "nobody", "200"]


def test_counters_go_on_from_round_to_round_of_a_loop(tmp_path: Path) -> None:
    late = b"# TYPE late_total counter\nlate_total 7\n"  # of the first request
    pages = {
        f"metrics-{at:04}-{(NOON + at) * 1000}.prom": b"# TYPE n_total counter\nn_total %d\n# TYPE g gauge\ng %d\n%b"
        % (5 + at, at, late if at else b"")
        for at in (0, 10)
    }
    counted: list[float] = []
    lates: list[float] = []
    begin = time.monotonic()
    with replayed(made(TEN_SECONDS, **pages), tmp_path / "log", speed=50, loop=True) as server:
        while not counted or counted[-1] < 35:
            assert time.monotonic() < begin + 20, counted
            page = dict(line.split() for line in get(server.url + "/metrics").text.splitlines() if line[0] != "#")
            assert float(page["g"]) in (0.0, 10.0)
            counted.append(float(page["n_total"]))
            lates.append(float(page.get("late_total", 0.0)))
    assert counted == sorted(counted)
    assert lates == sorted(lates)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_the_command_says_what_to_pass_to_serve_and_ends_cleanly(tmp_path: Path, how: signal.Signals) -> None:
    log = tmp_path / "server.log"
    code = (
        "import sys; from pathlib import Path; from sglang_tuning_exporter.recordings.replay import run; "
        "sys.exit(run(sys.argv[1], speed=50, listen_address='127.0.0.1:0', "
        "log_file=Path(sys.argv[2]), loop=False))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(RECORDINGS / "big_queue"), str(log)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert select.select([process.stdout], [], [], 20)[0]
            line = process.stdout.readline().decode()
            _, url, _, path = line.split()
            assert path == str(log)
            assert get(url + "/metrics").status_code == 200
            os.kill(process.pid, how)
            assert process.wait(timeout=20) == 0
            assert process.stderr.read() == b""
        finally:
            process.kill()


# Recordings

READY = b"[2025-01-31 12:00:00] The server is fired up and ready to roll!\n"


def test_a_log_in_local_time_is_moved_to_utc() -> None:
    scrape = {f"metrics-0001-{NOON * 1000 + 3000}.prom": b"up 1\n"}
    log = READY.replace(b"12:00", b"14:00") + b"[2025-01-31 14:00:10] x\n"
    about = {"recording.json": b'{"log_utc_offset_seconds": 7200}'}
    recording = made(log, **scrape, **about)
    assert [s.at for s in recording.scrapes] == [3.0]
    with pytest.raises(UsageError, match="log_utc_offset_seconds"):
        made(log, **scrape)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no server.log"),
        ({"server.log": b""}, "no line of server.log"),
        ({"server.log": b"\x00" * 100 + b"nothing\n"}, "no line of server.log"),
        ({"server.log": b"[2025-13-45 12:00:00] x\n"}, "no line of server.log"),
        ({"server.log.gz": b"not gzip"}, "whole gzip"),
        ({"server.log.gz": gzip.compress(READY)[:-9]}, "whole gzip"),
        ({"server.log": READY, "recording.json": b"{"}, "not valid JSON"),
        ({"server.log": READY, "recording.json": b"[" * 100_000}, "not valid JSON"),
        ({"server.log": READY, "recording.json": b"[]"}, "one JSON object"),
        ({"server.log": READY, "recording.json": b'{"log_utc_offset_seconds": NaN}'}, "log_utc_offset_seconds=nan"),
        ({"server.log": READY, "recording.json": b'{"log_utc_offset_seconds": "UTC"}'}, "log_utc_offset_seconds=UTC"),
        ({"server.log": READY, "server_info.json": b"null"}, "one JSON object"),
        ({"server.log": READY, "events.jsonl": b"ready\n"}, "not valid JSON"),
        ({"server.log": READY, "events.jsonl": b'{"t": "noon"}\n'}, "unix seconds"),
        ({"server.log": READY, "events.jsonl": b'{"t": 1e999}\n'}, "unix seconds"),
    ],
)
def test_a_directory_that_is_no_recording_is_one_line_of_complaint(
    tmp_path: Path, files: dict[str, bytes], message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_small_file_that_unpacks_to_a_giant_is_refused(tmp_path: Path) -> None:
    (tmp_path / "server.log.gz").write_bytes(gzip.compress(b"\0" * (MAX_FILE_BYTES + 1), 1))
    with pytest.raises(UsageError, match="larger than 64 MiB"):
        load(tmp_path)
