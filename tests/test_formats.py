"""A scraper gets the format that it accepts: text or OpenMetrics, plain or gzip, with the same samples in each."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import parser as text_parser
from prometheus_client.openmetrics import parser as openmetrics_parser

from conftest import SERVING, FakeSGLang, reply, running_exporter
from sglang_tuning_exporter.serve.app import openmetrics, qualities, response
from sglang_tuning_exporter.sglang.exposition import passthrough, scan

PAGES = sorted((Path(__file__).parent / "data" / "metrics").glob("*.prom"))
PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
OPEN = "application/openmetrics-text; version=1.0.0"


# Neither parser of prometheus_client has annotations.
strict: Callable[[str], Iterable[Any]] = openmetrics_parser.text_string_to_metric_families
lenient: Callable[[str], Iterable[Any]] = text_parser.text_string_to_metric_families


def samples(families: Iterable[Any]) -> set[tuple[str, str, str]]:
    return {(s.name, str(sorted(s.labels.items())), str(s.value)) for family in families for s in family.samples}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_of_every_release_has_the_same_samples_in_strict_openmetrics(page: Path) -> None:
    text = passthrough(scan(page.read_text()))[0]
    assert text
    assert samples(strict(openmetrics(text))) == samples(lenient(text))


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain"),
        ("*/*", "text/plain"),
        (PROMETHEUS_2, "text/plain"),
        (OPEN, "application/openmetrics-text"),
        (OPEN + ", text/plain;q=0", "application/openmetrics-text"),
        ("text/html", "text/plain"),
    ],
)
def test_openmetrics_is_sent_to_scrapers_that_do_not_accept_plain_text(accept: str, content_type: str) -> None:
    assert response("a 1\n", {"Accept": accept}).headers["Content-Type"].startswith(content_type)


@pytest.mark.parametrize(
    ("accepted", "is_packed"),
    [("gzip", True), ("gzip, deflate, br", True), ("", False), ("gzip;q=0", False), ("br", False), ("gzip;q=x", False)],
)
def test_a_page_is_compressed_for_scrapers_that_accept_gzip(accepted: str, is_packed: bool) -> None:  # noqa: FBT001 - a row of the table above
    answer = response("a 1\n" * 1000, {"Accept-Encoding": accepted})
    assert (answer.headers.get("Content-Encoding") == "gzip") is is_packed
    assert (gzip.decompress(answer.body) if is_packed else answer.body) == b"a 1\n" * 1000


@given(st.text())
def test_no_header_breaks_the_answer(header: str) -> None:
    assert all(0 <= weight <= 2 for weight in qualities(header).values())
    assert response("a 1\n", {"Accept": header, "Accept-Encoding": header}).status_code == 200


def test_the_series_of_a_histogram_come_together_with_their_buckets() -> None:
    """Several processes of a server write their sums first."""
    page = (
        "# TYPE h histogram\n"
        'h_sum{rank="0"} 1\nh_sum{rank="1"} 2\n'
        'h_bucket{rank="0",le="1.0"} 1\nh_bucket{rank="1",le="1.0"} 1\n'
        'h_bucket{rank="0",le="+Inf"} 2\nh_bucket{rank="1",le="+Inf"} 2\n'
        'h_count{rank="0"} 2\nh_count{rank="1"} 2\n'
        "# TYPE after gauge\nafter 1\n"
    )
    assert samples(strict(openmetrics(page))) == samples(lenient(page))


def test_a_live_page_has_the_same_series_in_both_formats(
    sglang: FakeSGLang,
) -> None:
    sglang.answers["/metrics"] = reply(SERVING)
    with running_exporter("--sglang-url", sglang.url) as exporter:
        plain = exporter.get("/metrics", {"Accept-Encoding": "identity"})
        packed = exporter.get("/metrics", {"Accept-Encoding": "gzip"})
        other = exporter.get("/metrics", {"Accept": OPEN})
    assert [each.headers.get("Content-Encoding") for each in (plain, packed)] == [None, "gzip"]
    pages = lenient(plain.text), lenient(packed.text), strict(other.text)
    names, *others = [{name for name, _, _ in samples(families)} for families in pages]
    assert others == [names, names]
    assert {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_start_time_seconds"} <= names
    assert "sglang:num_queue_reqs" in names
