"""A recording of a live server gives the server's verdict, and does not reveal who runs it."""

from __future__ import annotations

import gzip
import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conftest import (
    DECODE,
    PROGRAM,
    RETRACTION,
    SERVING,
    Answer,
    FakeSGLang,
    config,
    environment,
    hang,
    program,
    reply,
    wait_for,
)
from faults import end_seconds
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.recordings.record import Recorder
from sglang_tuning_exporter.recordings.recording import Recording, load
from sglang_tuning_exporter.recordings.replay import ReplayServer, packaged
from watched import end_of, watched

HERE = Path(__file__).parent
SECRETS = {
    "key": "sk-live-0123456789",
    "admin": "admin-hunter2",
    "model": "/models/acme/chat-70b",
    "served": "acme-chat",
    "host": "node7.acme.internal",
    "address": "10.77.1.9",
    "client": "203.0.113.77",
    "tenant": "tenant-of-ours",
    "request": "Minka the cat",
    "folder": "/home/jo",
    "machine": (
        socket.gethostname() if len(socket.gethostname()) > 3 else "a-longer-name.internal"
    ),  # else it is in every word
}


def printed(text: str) -> bytes:
    return f"[{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())}{text}\n".encode()


def log_text() -> bytes:
    s = SECRETS
    return b"".join(
        (
            printed(
                f"] server_args={{'model_path': '{s['model']}', 'served_model_name': '{s['served']}', 'api_key':"
                f" '{s['key']}', 'host': '{s['host']}', 'schedule_conservativeness': 0.3, 'dist_init_addr':"
                f" '{s['address']}:5000'}}"
            ),
            printed(" TP0] max_total_num_tokens=1040384, max_running_requests=4096, available_gpu_mem=9.87 GB"),
            printed("] The server is fired up and ready to roll!"),
        )
    )


def grown_log() -> bytes:
    s = SECRETS
    frame = f'  File "{s["folder"]}/sglang/scheduler.py", line 3, in forward_decode\n'.encode()
    return b"".join(
        (
            printed(f"] Receive: obj=GenerateReqInput(text='{s['request']}")
            + f"{s['request']} goes on', rid='1')\n".encode(),
            printed(f'] INFO:     {s["client"]}:9999 - "POST /generate?api_key={s["key"]} HTTP/1.1" 200 OK'),
            printed(f"] Using {s['model']} of {s['served']} at {s['host']} ({s['address']}) with {s['admin']}"),
            printed(f" TP0] Load weight end. type={s['served']}, avail mem=62.25 GB, mem usage=16.46 GB."),
            b"[" + printed("")[1:20] + DECODE[20:],
            b"[" + printed("")[1:20] + RETRACTION[20:],
            printed(" TP0] Scheduler hit an exception: Traceback (most recent call last):"),
            frame,
            f"ValueError: {s['request']} on {s['machine']}\n".encode(),
        )
    )


@pytest.fixture
def server(sglang: FakeSGLang) -> FakeSGLang:
    s = SECRETS
    page = SERVING.replace(b'tp_rank="0"', f'tp_rank="0",tenant="{s["tenant"]}"'.encode())
    page = page.replace(b"meta-llama/Llama-3.1-70B-Instruct", s["served"].encode())
    info = {
        "model_path": s["model"],
        "served_model_name": s["served"],
        "api_key": s["key"],
        "admin_api_key": s["admin"],
        "host": s["host"],
        "version": "0.5.23",
        "schedule_conservativeness": 0.3,
        "launch_command": f"sglang serve --api-key {s['key']}",
        "internal_states": [{"api_key": s["key"], "model_path": s["model"], "max_total_num_tokens": 1040384}],
    }
    sglang.answers["/metrics"] = reply(page)
    sglang.answers["/server_info"] = reply(json.dumps(info).encode(), content_type="application/json")
    return sglang


def recorder(server: FakeSGLang, log: Path, output: Path, *, keep_request_text: bool = False) -> Recorder:
    settings = config(sglang_url=server.url, log_file=(str(log),))
    return Recorder(settings, output, every=0.05, keep_request_text=keep_request_text)


@contextmanager
def recording(made: Recorder) -> Iterator[None]:
    """Record while the block runs."""
    thread = threading.Thread(target=made.run)
    thread.start()
    try:
        yield
    finally:
        made.stop()
        thread.join(timeout=20)


def recorded(server: FakeSGLang, directory: Path, *, keep_request_text: bool = False) -> tuple[Path, Recorder]:
    log, output = directory / "server.log", directory / "out"
    log.write_bytes(log_text())
    made = recorder(server, log, output, keep_request_text=keep_request_text)
    with recording(made):
        wait_for(lambda: server.count("/metrics") > 2)
        with log.open("ab") as file:
            file.write(grown_log())
        wait_for(lambda: b"#retracted_reqs" in (output / "server.log").read_bytes())
    return output, made


def everything(directory: Path) -> bytes:
    packed = (path.read_bytes() for path in directory.iterdir() if path.suffix == ".gz")
    plain = (path.read_bytes() for path in directory.iterdir() if path.suffix != ".gz")
    return b"\n".join([*map(gzip.decompress, packed), *plain, *(path.name.encode() for path in directory.iterdir())])


def retractions(kept: Recording) -> int:
    return sum(b"] KV cache pool is full. Retract requests." in line.text for line in kept.lines)


def verdict(kept: Recording) -> str:
    """The verdict from log and scrapes together, at the recording's own times."""
    return watched(kept).judge(end_of(kept)).verdict


@pytest.mark.parametrize("name", ["retract", "big_queue"])
def test_a_recorded_replay_is_judged_as_the_recording_it_was_made_of(tmp_path: Path, name: str) -> None:
    original = load(packaged(name) if name == "retract" else HERE / "recordings" / name)
    log, output = tmp_path / "server.log", tmp_path / "out"
    replay = ReplayServer(original, log_path=log, speed=12)
    replay.start()
    try:
        made = Recorder(config(sglang_url=replay.url, log_file=(str(log),)), output, every=0.05)
        with recording(made):
            wait_for(lambda: replay.finished, seconds=60)
            time.sleep(0.3)  # its last lines are read
    finally:
        replay.stop()
    again = load(output)
    assert verdict(again) == verdict(original)
    assert retractions(again) == retractions(original)
    assert json.loads((output / "recording.json").read_text())["sglang_version"] == "0.5.23"


def test_no_secret_and_no_name_is_anywhere_in_the_folder(server: FakeSGLang, tmp_path: Path) -> None:
    output, _ = recorded(server, tmp_path)
    whole = everything(output)
    assert [name for name, secret in SECRETS.items() if secret.encode() in whole] == []
    assert f"127.0.0.1:{server.port}".encode() not in whole


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_recording_that_is_interrupted_or_killed_can_be_loaded(
    number: signal.Signals, server: FakeSGLang, tmp_path: Path
) -> None:
    log, output = tmp_path / "server.log", tmp_path / "out"
    log.write_bytes(log_text())
    command = [*PROGRAM, "record", "--sglang-url", server.url, "--log-file", str(log), "--output", str(output)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment()) as process:
        wait_for(lambda: any(output.glob("*.prom.gz")), seconds=20)
        process.send_signal(number)
        said = process.communicate(timeout=20)[1].decode()
    assert len(load(output).scrapes) >= 1
    if number == signal.SIGINT:
        assert process.returncode == 0, said
        assert f"replay {output}" in said
        assert not [path for path in output.iterdir() if path.suffix == ".part"]


@pytest.mark.parametrize("path", ["/server_info", "/metrics"])
def test_a_recording_ends_in_time_whatever_the_server_leaves_unanswered(
    server: FakeSGLang, tmp_path: Path, path: str
) -> None:
    server.answers[path] = hang
    log, output = tmp_path / "server.log", tmp_path / "out"
    log.write_bytes(log_text())
    begin = 0.0
    with recording(recorder(server, log, output)):
        wait_for(lambda: server.count(path) > 0)
        begin = time.monotonic()
    assert time.monotonic() - begin < end_seconds()
    assert not (output / "server.log").exists()


def test_a_folder_that_is_not_empty_is_left_alone(server: FakeSGLang, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.touch()
    with pytest.raises(UsageError, match="is not empty; give a new directory"):
        recorder(server, log, tmp_path).run()


@pytest.mark.parametrize(
    ("page", "status"), [(reply(SERVING), 0), (reply(b"", "404 Not Found"), 1)], ids=["with metrics", "without"]
)
def test_a_recording_without_one_scrape_is_a_failure_that_says_why(
    page: Answer, status: int, sglang: FakeSGLang, tmp_path: Path
) -> None:
    sglang.answers["/metrics"] = page
    log = tmp_path / "server.log"
    log.write_bytes(printed("] " + DECODE.decode().partition("] ")[2]))
    flags = ["--sglang-url", sglang.url, "--log-file", str(log), "--output", str(tmp_path / "new"), "--seconds", "1"]
    ended = program("record", *flags)
    assert ended.returncode == status, ended.stderr
    assert ("no scrape of" in ended.stderr and "--enable-metrics" in ended.stderr) is (status == 1)
