"""Requests that SGLang answers with HTTP 500: from its access log or its counter to the finding."""

from __future__ import annotations

import pytest

from scenarios import Story, decoding, repeated
from sglang_tuning_exporter.diagnosis.findings import judge
from sglang_tuning_exporter.sglang.events import NO_RANK, PrefillBatch, RankFigures, Scrape, ServerError
from sglang_tuning_exporter.sglang.log.reader import LogReader
from test_chances import END, found, lived

STAMP = b"[2026-11-23 10:26:28] "
POST = b'INFO:     127.0.0.1:40000 - "POST /v1/chat/completions HTTP/1.1" 500 Internal Server Error\n'
DECODE = b"Decode batch, #running-req: 4, #token: 925, token usage: 0.50, cuda graph: True, gen throughput (token/s): 71.50, #queue-req: 9\n"
ROW = "requests_failed"
HEALTHY = decoding(0.0, END, running=20)
ADMITTED = repeated(PrefillBatch(None, NO_RANK, new_sequences=10, new_tokens=1000, cached_tokens=0), 2.0, end=END)


def errors(every: float = 2.0, *, suspect: bool = False) -> Story:
    return repeated(ServerError(None, NO_RANK, suspect), every, end=END)


def counted(answered: float, failed: float) -> Story:
    """Scrapes at which the server's counters have so many answers a second with status 200 and 500."""
    return [
        (
            float(at),
            Scrape([RankFigures(running=20, queued=0)], answered_requests=answered * at, server_errors=failed * at),
        )
        for at in range(0, int(END), 15)
    ]


@pytest.mark.parametrize("runs", [False, True])
def test_each_line_is_an_event_among_batch_lines_of_the_same_second(*, runs: bool) -> None:
    reader, text = LogReader(), 3 * (STAMP + DECODE + STAMP + POST)
    events = reader.feed_runs(text) if runs else reader.feed(text)
    assert sum(isinstance(event, ServerError) for event in events) == 3
    assert reader.counts["access"] == 3


@pytest.mark.parametrize(
    "line",
    [
        b'INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 500 Internal Server Error\n',
        b'INFO:     127.0.0.1:1 - "POST /generate HTTP/1.1" 200 OK\n',
        b'INFO:     127.0.0.1:1 - "POST /500 Internal Server Error HTTP/1.1" 404 Not Found\n',
        b'Receive: text="POST /generate HTTP/1.1" 500 Internal Server Error\n',
    ],
)
def test_probes_other_answers_and_quotations_do_not_count(line: bytes) -> None:
    assert LogReader().feed_runs(STAMP + line) == []


def test_many_in_the_log_are_named_and_the_limits_of_the_server_stay_as_they_are() -> None:
    past = lived(HEALTHY + ADMITTED + errors())
    finding = found(past, ROW)
    assert finding is not None
    assert finding.evidence[0].value == pytest.approx(1 / 11, rel=0.1)
    assert judge(past).verdict == "healthy"


def test_where_all_fail_so_does_the_counter_alone_show_it() -> None:
    assert found(lived(counted(0.0, 2.0)), ROW) is not None


@pytest.mark.parametrize(
    "story", [[], errors(suspect=True), errors(every=60.0) + ADMITTED, counted(2.0, 0.05), counted(2.0, 0.0) + errors()]
)
def test_nothing_is_said_of_few_of_forged_lines_or_of_lines_that_the_counter_does_not_have(story: Story) -> None:
    assert found(lived(HEALTHY + story), ROW) is None
