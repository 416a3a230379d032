"""Prometheus text: its samples, and a page that is safe to append to the exporter's own.

The reference is the parser of prometheus_client. How the pages were made: data/metrics/README.md.
"""

from __future__ import annotations

import gzip
import math
import re
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Counter as ClientCounter
from prometheus_client import Histogram as ClientHistogram
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from sglang_tuning_exporter.recordings.replay import packaged
from sglang_tuning_exporter.sglang import exposition
from sglang_tuning_exporter.sglang.metrics import ON_BOARDS, PageReader

ROOT = Path(__file__).parents[1]


def passthrough(text: str) -> str:
    return exposition.passthrough(exposition.scan(text))[0]


PAGES = sorted((Path(__file__).parent / "data" / "metrics").glob("*.prom"))
Known = Counter[tuple[str, tuple[tuple[str, str], ...], str]]


def known_to_the_client(text: str) -> Known:
    return Counter(
        (sample.name, tuple(sorted(sample.labels.items())), repr(float(sample.value)))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    )


def types_of(text: str) -> dict[str, str]:
    return {line.split()[2]: line.split()[3] for line in text.splitlines() if line.startswith("# TYPE ")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_of_a_server_passes_through_with_every_sample_and_type(page: Path) -> None:
    text = page.read_text().replace("sglang_", "sglang:")
    passed = passthrough(page.read_text())
    assert known_to_the_client(passed) == known_to_the_client(text)
    assert types_of(passed) == types_of(text)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("x NaN", math.nan),
        ("x +Inf", math.inf),
        ("x -Inf", -math.inf),
        ("x 1.04e+06", 1_040_000.0),
        ("x{} 1", 1.0),
        ('x { a = "b" , } 1', 1.0),
        ('x{a="b"}1', 1.0),
        ("x\t1\t1395066363000", 1.0),
        ("  x 1  ", 1.0),
        ("x 1\r", 1.0),
        ("x 1 1395066363.123", 1.0),
        ('x_bucket{le="1"} 1 # {trace_id="}"} 0.5 1395066363.1', 1.0),
        ('x_bucket{le="1"} 1 # {trace_id="a"} 0.5', 1.0),
    ],
)
def test_a_sample_is_read_in_every_spelling_of_the_two_formats(line: str, value: float) -> None:
    page = exposition.scan(line + "\n")
    assert page.broken == 0
    assert [repr(sample[2]) for sample in page.samples] == [repr(value)]


@pytest.mark.parametrize(
    "line",
    [
        "x",
        "x{",
        'x{a="b} 1',
        'x{a="b" c="d"} 1',
        "x{a=b} 1",
        'x{a="b",a="c"} 1',
        'x{a="\\q"} 1',
        "x 1.2.3",
        "x 1_000",
        "x 0x10",
        "x one",
        "x 1 2 3",
        "1x 1",
        "x-y 1",
        'x{a="\x00"} 1',
        'x{a="\ud800"} 1',
        "x 1\x0bx 2",
    ],
)
def test_a_broken_line_is_skipped_and_counted(line: str) -> None:
    page = exposition.scan(f"before 1\n{line}\nafter 2\n")
    assert [sample[0] for sample in page.samples] == ["before", "after"]
    assert page.broken == 1


def test_an_openmetrics_page_passes_through_as_the_same_page_in_the_older_format() -> None:
    registry = CollectorRegistry()
    counter = ClientCounter("sglang:num_requests", "Requests.", ["model_name"], registry=registry)
    for model in ("a", "b"):
        counter.labels(model).inc(3, exemplar={"trace_id": "abc"})
    histogram = ClientHistogram(
        "sglang:queue_time_seconds", "Wait.", ["dp_rank"], registry=registry, buckets=(1.0, 2.0)
    )
    for dp in ("0", "1"):
        histogram.labels(dp).observe(1.5, exemplar={"trace_id": "abc"})
    passed = passthrough(generate_openmetrics(registry).decode())  # type: ignore[no-untyped-call]
    older = [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
    assert sorted(passed.splitlines()) == sorted(older)
    assert types_of(passed) == {"sglang:num_requests_total": "counter", "sglang:queue_time_seconds": "histogram"}


def test_a_family_in_two_pieces_comes_together_under_one_type_and_one_help() -> None:
    page = (
        '# HELP sglang:a A.\n# TYPE sglang:a counter\nsglang:a{r="0"} 1\nsglang:b 1\n'
        '# HELP sglang:a Again.\n# TYPE sglang:a counter\nsglang:a{r="1"} 2\nsglang:a{r="0"} 9\n'
    )
    assert passthrough(page) == (
        '# HELP sglang:a A.\n# TYPE sglang:a counter\nsglang:a{r="0"} 1\nsglang:a{r="1"} 2\nsglang:b 1\n'
    )


def test_of_a_lean_page_the_families_that_boards_read_are_passed_on_whole() -> None:
    read = {
        name for path in (ROOT / "dashboards").glob("*.json") for name in re.findall(r"sglang:(\w+)", path.read_text())
    }
    assert {re.sub(r"_(?:bucket|sum|count)$", "", name) for name in read} == ON_BOARDS
    text = gzip.decompress(max((packaged("retract")).glob("metrics-*.gz")).read_bytes()).decode()
    whole, lean = (PageReader(only=only).read(text)[1] for only in (None, ON_BOARDS))
    samples = [[line for line in page.splitlines() if not line.startswith("#")] for page in (whole, lean)]
    assert samples[1] == [
        line for line in samples[0] if re.sub(r"_(?:bucket|sum|count)$", "", re.split(r"[:{ ]", line)[1]) in ON_BOARDS
    ]
    assert 0 < len(samples[1]) < len(samples[0])
    assert PageReader(passthrough=False, only=ON_BOARDS).read(text)[1] == ""
