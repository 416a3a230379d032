"""Requests that SGLang rejected, counted from uvicorn's access lines alone (SGLang logs nothing when its queue is full)."""

from __future__ import annotations

import pytest

from sglang_tuning_exporter.sglang.events import Rejection
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

STAMP = b"[2026-01-02 03:04:05] "
POST = b'127.0.0.1:40000 - "POST /v1/chat/completions HTTP/1.1" 503 Service Unavailable'
RAW = STAMP + b"Model attempted to call undefined function: x\n"


def rejections(text: bytes, *, runs: bool = False) -> int:
    reader = LogReader()
    events = reader.feed_runs(text) if runs else reader.feed(text)
    return sum(isinstance(event, Rejection) for event in events)


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize(
    "line",
    [
        STAMP + b"INFO:     " + POST,
        b"INFO:     " + POST,
        STAMP + POST,
        b"sglang-1  | " + STAMP + b"INFO:     " + POST,
        STAMP + b'INFO:     10.0.0.1:1 - "POST /generate HTTP/1.1" 503 Service Unavailable',
    ],
)
def test_a_post_answered_with_503_is_a_rejection_however_it_is_printed(line: bytes, *, runs: bool) -> None:
    assert rejections(line + b"\n", runs=runs) == 1


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize(
    "line",
    [
        b'INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 503 Service Unavailable',
        b'INFO:     127.0.0.1:1 - "POST /generate HTTP/1.1" 200 OK',
        b'INFO:     127.0.0.1:1 - "POST /generate HTTP/1.1" 500 Internal Server Error',
        b'INFO:     127.0.0.1:1 - "POST /503 Service Unavailable HTTP/1.1" 404 Not Found',
        b'Receive: text="POST /generate HTTP/1.1" 503 Service Unavailable',
    ],
)
def test_probes_other_answers_and_quotations_do_not_count(line: bytes, *, runs: bool) -> None:
    assert rejections(STAMP + line + b"\n", runs=runs) == 0


def test_an_access_line_stays_an_access_line() -> None:
    reader = LogReader()
    list(reader.feed(STAMP + b"INFO:     " + POST + b"\n"))
    assert reader.counts["access"] == 1


def test_each_counts_once_among_batch_lines_of_the_same_second() -> None:
    decode = STAMP + (
        b"Decode batch, #running-req: 4, #token: 925, token usage: 0.50, cuda graph: True, "
        b"gen throughput (token/s): 71.50, #queue-req: 9\n"
    )
    state, reader = ServerState(PROFILES["online"], 0.0), LogReader()
    state.observe_all(reader.feed_runs((decode + STAMP + b"INFO:     " + POST + b"\n") * 3), 1.0)
    assert state.server_totals.counts["rejected_requests"] == 3
    assert state.totals().counts["rejected_requests"] == 3


def test_one_that_a_tools_name_could_have_printed_is_counted_as_a_suspicion_only() -> None:
    state, reader = ServerState(PROFILES["online"], 0.0), LogReader()
    state.observe_all(reader.feed_runs(RAW + STAMP + b"INFO:     " + POST + b"\n"), 1.0)
    assert state.server_totals.counts["rejected_requests"] == 0
    assert state.forgeries.suspicious["rejection"] == 1


def test_they_outlive_the_exporter() -> None:
    state = ServerState(PROFILES["online"], 0.0)
    state.observe(Rejection(None, next(iter(LogReader().feed(STAMP + POST + b"\n"))).rank), 1.0)
    later = ServerState(PROFILES["online"], 2.0)
    later.restore(state.saved(1.0), 2.0)
    assert later.server_totals.counts["rejected_requests"] == 1
