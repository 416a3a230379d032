"""Requests that SGLang answers with HTTP 500: from its access log or its counter to the finding."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from scenarios import Story, decoding, repeated
from sglang_tuning_exporter.cli import main
from sglang_tuning_exporter.diagnosis.findings import judge
from sglang_tuning_exporter.sglang.events import NO_RANK, PrefillBatch, RankFigures, Scrape, ServerError
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.sglang.metrics import page_figures
from test_chances import END, found, lived

if TYPE_CHECKING:
    from pathlib import Path

STAMP = b"[2026-11-23 10:26:28] "
POST = b'INFO:     127.0.0.1:40000 - "POST /v1/chat/completions HTTP/1.1" 500 Internal Server Error\n'
DECODE = b"Decode batch, #running-req: 4, #token: 925, token usage: 0.50, cuda graph: True, gen throughput (token/s): 71.50, #queue-req: 9\n"
ROW = "requests_failed"
HEALTHY = decoding(0.0, END, running=20)
ADMITTED = repeated(PrefillBatch(None, NO_RANK, new_sequences=10, new_tokens=1000, cached_tokens=0), 2.0, end=END)


def errors(every: float = 2.0, *, suspect: bool = False) -> Story:
    return repeated(ServerError(None, NO_RANK, suspect), every, end=END)


def counted(answered: float, failed: float = 0.0, *, with_500: float = 0.0, opened: float = 0.0) -> Story:
    """Scrapes of a server that gets so many requests a second: those that an exception ends have no response in its counters."""
    return [
        (
            float(at),
            Scrape(
                [RankFigures(running=20, queued=0)],
                generation_posts=(answered + failed + with_500 + opened) * at,
                generation_responses=(answered + with_500) * at,
                server_errors=with_500 * at,
                open_requests=opened * at,
            ),
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


def test_many_in_the_log_are_the_verdict_of_a_server_that_nothing_else_limits() -> None:
    past = lived(HEALTHY + ADMITTED + errors())
    finding = found(past, ROW)
    assert finding is not None
    assert finding.evidence[0].value == pytest.approx(1 / 11)
    assert judge(past).verdict == ROW


@pytest.mark.parametrize("story", [counted(0.0, 2.0), counted(2.0, 0.5), counted(2.0, with_500=0.5)])
def test_counters_alone_show_them_with_a_response_or_without(story: Story) -> None:
    finding = found(lived(story), ROW)
    assert finding is not None
    assert finding.evidence[0].value == pytest.approx(1.0 if story == counted(0.0, 2.0) else 0.2)


@pytest.mark.parametrize(
    "story", [[], errors(suspect=True), errors(every=60.0) + ADMITTED, counted(2.0, 0.05), counted(2.0, opened=1.0)]
)
def test_nothing_is_found_where_few_fail_or_many_only_wait(story: Story) -> None:
    assert found(lived(HEALTHY + story), ROW) is None


def test_lines_of_the_log_that_the_counters_contradict_count_nothing() -> None:
    assert found(lived(HEALTHY + counted(2.0) + errors()), ROW) is None


def test_a_restart_between_two_scrapes_makes_no_failed_request() -> None:
    again = [(at + END / 2, scrape) for at, scrape in counted(2.0) if at < END / 2]
    assert found(lived([each for each in counted(2.0, opened=0.2) if each[0] < END / 2] + again), ROW) is None


def test_the_page_of_a_real_server_has_requests_and_responses_of_endpoints_that_generate() -> None:
    page = "".join(
        f'sglang:http_{name}{{endpoint="/generate",method="POST"{status}}} {value}\n'
        for name, status, value in (
            ("requests_total", "", 83.0),
            ("responses_total", ',status_code="200"', 53.0),
            ("responses_total", ',status_code="400"', 29.0),
            ("requests_active", "", 0.0),
        )
    )
    scrape = page_figures.read(page + 'sglang:http_requests_total{endpoint="/health",method="GET"} 5.0\n')
    assert (scrape.generation_posts, scrape.generation_responses, scrape.open_requests) == (83.0, 82.0, 0.0)


def test_the_report_of_a_log_names_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "server.log"
    lines = (
        (STAMP + DECODE + STAMP + POST).replace(b"10:26:28", b"10:%02d:%02d" % divmod(at, 60)) for at in range(900)
    )
    log.write_bytes(b"".join(lines))
    main(["report", "--format", "json", str(log)])
    assert ROW in [finding["diagnosis"] for finding in json.loads(capfd.readouterr().out)["findings"]]


EXCEPTION = STAMP + b"ERROR:    Exception in ASGI application\nTraceback (most recent call last):\n"


@pytest.mark.parametrize(
    ("lines", "failed"),
    [
        (STAMP + POST.replace(b"500 Internal Server Error", b"200 OK") + EXCEPTION, 1),  # a stream
        (STAMP + POST + EXCEPTION, 1),
        (STAMP + POST + STAMP + POST + EXCEPTION + EXCEPTION, 2),
        (STAMP + POST.replace(b"POST /v1/chat/completions", b"GET /v1/loads") + EXCEPTION, 0),
        (STAMP + b"INFO:     Exception in ASGI application was said\n", 0),
    ],
)
def test_an_exception_counts_once_for_its_request(lines: bytes, failed: int) -> None:
    events = LogReader().feed_runs(3 * lines)
    assert sum(isinstance(event, ServerError) for event in events) == 3 * failed
