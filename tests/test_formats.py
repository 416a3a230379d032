"""A scraper gets plain text, packed where it accepts that, with the exporter's own process beside the server's series."""

from __future__ import annotations

import gzip

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from conftest import SERVING, FakeSGLang, reply, running_exporter
from sglang_tuning_exporter.serve.app import accepts_gzip


@pytest.mark.parametrize(
    ("accepted", "is_packed"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=0.5, br", True),
        ("gzip;q=1.0", True),
        ("", False),
        ("gzip;q=0", False),
        ("gzip; q=0.0", False),
        ("br", False),
    ],
)
def test_a_page_is_compressed_for_scrapers_that_accept_gzip(accepted: str, is_packed: bool) -> None:  # noqa: FBT001 - a row of the table above
    assert accepts_gzip(accepted) is is_packed


def test_a_live_page_is_the_same_packed_and_holds_the_exporters_process(sglang: FakeSGLang) -> None:
    sglang.answers["/metrics"] = reply(SERVING)
    with running_exporter("--sglang-url", sglang.url) as exporter:
        pages = {}
        for accepted in ("identity", "gzip"):
            answer = requests.get(
                exporter.url + "/metrics", headers={"Accept-Encoding": accepted}, timeout=12, stream=True
            )
            raw = answer.raw.read()
            assert (answer.headers.get("Content-Encoding") == "gzip") is (accepted == "gzip")
            pages[accepted] = (gzip.decompress(raw) if accepted == "gzip" else raw).decode()
    names = [{family.name for family in text_string_to_metric_families(page)} for page in pages.values()]
    assert names[0] == names[1]
    assert {"process_cpu_seconds", "process_resident_memory_bytes", "process_start_time_seconds"} <= names[0]
    assert "sglang:num_queue_reqs" in names[0]
