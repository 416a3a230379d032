"""A scraper gets text 0.0.4, plain or gzip, whatever it accepts, with the same samples in each."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import parser

from conftest import SERVING, FakeSGLang, reply, running_exporter
from sglang_tuning_exporter.serve.app import response

PROMETHEUS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
# The parser of prometheus_client has no annotations.
parsed: Callable[[str], Iterable[Any]] = parser.text_string_to_metric_families


def samples(page: str) -> set[tuple[str, str, str]]:
    return {
        (sample.name, str(sorted(sample.labels.items())), str(sample.value))
        for family in parsed(page)
        for sample in family.samples
    }


@pytest.mark.parametrize("accept", ["", "*/*", PROMETHEUS, "application/openmetrics-text; version=1.0.0", "text/html"])
def test_every_scraper_gets_text(accept: str) -> None:
    assert response("a 1\n", {"Accept": accept}).headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("gzip", "gzip"),
        ("gzip, deflate, br", "gzip"),
        ("br;q=1, GZIP;q=0.5", "gzip"),
        ("", None),
        ("br", None),
        ("gzip;q=0", None),
        ("gzip;q=x", None),
    ],
)
def test_a_page_is_compressed_for_scrapers_that_accept_gzip(accepted: str, encoding: str | None) -> None:
    answer = response("a 1\n" * 1000, {"Accept-Encoding": accepted})
    assert answer.headers.get("Content-Encoding") == encoding
    assert (gzip.decompress(answer.body) if encoding else answer.body) == b"a 1\n" * 1000


@given(st.text())
def test_no_header_breaks_the_answer(header: str) -> None:
    assert response("a 1\n", {"Accept": header, "Accept-Encoding": header}).status_code == 200


def test_a_live_page_has_the_same_series_packed_or_not_and_the_exporters_process(sglang: FakeSGLang) -> None:
    sglang.answers["/metrics"] = reply(SERVING)
    with running_exporter("--sglang-url", sglang.url) as exporter:
        plain = exporter.get("/metrics", {"Accept-Encoding": "identity"})
        packed = exporter.get("/metrics", {"Accept-Encoding": "gzip"})
    assert [each.headers.get("Content-Encoding") for each in (plain, packed)] == [None, "gzip"]
    names, others = ({name for name, _, _ in samples(page.text)} for page in (plain, packed))
    assert names == others
    assert {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_start_time_seconds"} <= names
    assert "sglang:num_queue_reqs" in names
