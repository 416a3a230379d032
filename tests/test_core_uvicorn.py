"""Lines of SGLang's web server: uvicorn's own, and SGLang's behind uvicorn's level."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.events import Event
from sglang_tuning_exporter.core.inputs import Logs
from sglang_tuning_exporter.core.judge import STARTING
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.report import judge_logs

STAMP = "[2026-06-01 10:00:10] "
START = STAMP + "server_args=ServerArgs(model_path='/models/m', tokenizer_worker_num=4, port=30000)"
IN_USE = "[Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use"
WARM_UP = (
    "[2026-06-01 10:02:10] Initialization failed. warmup error: Traceback (most recent call last):",
    '  File "/srv/sglang/srt/entrypoints/http_server.py", line 7, in _execute_server_warmup',
)
REFUSED = "requests.exceptions.ConnectionError: HTTPConnectionPool(host='127.0.0.1', port=30000): Connection refused"
LINES = {
    "ready": "The server is fired up and ready to roll!",
    "health": "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds.",
    "too_long": "Input length (9000 tokens) exceeds the maximum allowed length (8186 tokens). Use a shorter input.",
    "end": "Initialization failed. warmup error: it had no answer",
    "draining": "SIGTERM received. signum=None frame=None. Draining requests and shutting down...",
}


def read(*lines: str) -> list[Event]:
    reader = Reader()
    return [event for line in lines for event in reader.read(line.encode())]


def ended_by(tmp_path: Path, *lines: str) -> Event | None:
    log = tmp_path / "server.log"
    log.write_text("\n".join((START, *lines)) + "\n")
    judged = judge_logs(Logs([str(log)]), PROFILES["online"])[0]
    return next((each.explained_by for each in judged.findings if each.diagnosis == "crashed"), None)


@pytest.mark.parametrize("level", ["INFO:     ", "WARNING:  ", "ERROR:    "])
@pytest.mark.parametrize("kind", LINES)
def test_a_line_behind_a_level_of_uvicorn_is_read_like_one_without(kind: str, level: str) -> None:
    with_level, without = (read(START, STAMP + before + LINES[kind])[1:] for before in (level, ""))
    assert kind in [event.kind for event in with_level]
    assert with_level == without


def test_a_level_before_words_of_nobody_gives_no_event() -> None:
    assert read(START, STAMP + "INFO:     The server said that it is ready to roll")[1:] == []


def test_a_server_that_is_ready_behind_a_level_starts_no_longer(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("\n".join((START, STAMP + "INFO:     " + LINES["ready"])) + "\n")
    assert judge_logs(Logs([str(log)]), PROFILES["online"])[0].verdict != STARTING


@pytest.mark.parametrize("line", [IN_USE, "[Errno 98] Address already in use"])
@pytest.mark.parametrize("before", [STAMP + "ERROR:    ", "ERROR:    "])
@pytest.mark.parametrize("last", [REFUSED, "AssertionError: res=<Response [404]>, res.text='not found'"])
def test_a_port_in_use_explains_a_failed_warm_up(last: str, before: str, line: str, tmp_path: Path) -> None:
    said = ended_by(tmp_path, before + line, *WARM_UP, last)
    assert said is not None
    assert (said.word, said.text) == ("port", line)
    assert "--port" in said.ending.do


def test_a_warm_up_that_fails_without_a_port_in_use_says_so(tmp_path: Path) -> None:
    said = ended_by(tmp_path, *WARM_UP, REFUSED)
    assert said is not None
    assert said.word == "network"


def test_an_address_that_this_host_does_not_have_is_a_refused_argument(tmp_path: Path) -> None:
    cannot = "ERROR:    [Errno 99] error while attempting to bind on address ('9.9.9.9', 80): cannot assign requested"
    said = ended_by(tmp_path, STAMP + cannot + " address", *WARM_UP, REFUSED)
    assert said is not None
    assert said.word == "argument"


def test_an_address_of_another_part_of_the_server_is_not_its_port(tmp_path: Path) -> None:
    zmq = "zmq.error.ZMQError: Address already in use (addr='tcp://*:5557')"
    said = ended_by(tmp_path, *WARM_UP, zmq)
    assert said is not None
    assert said.word == "address"


def test_an_error_of_a_request_in_uvicorn_s_words_ends_no_server(tmp_path: Path) -> None:
    assert ended_by(tmp_path, STAMP + LINES["ready"], STAMP + "ERROR:    Exception in ASGI application") is None
