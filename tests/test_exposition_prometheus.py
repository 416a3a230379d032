"""Nothing on SGLang's page makes Prometheus refuse the exporter's: checked with a real Prometheus, promtool and prometheus_client.

`python -m fuzz --target scraped` does the same for any length of time.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest

from fuzz.prometheus import Prometheus, prometheus, unreadable
from fuzz.promtool import PRESENT
from fuzz.scraped import LABELS, LINES, NUMBERS, TEXTS, exported, refused
from sglang_tuning_exporter.recordings.stack import program
from sglang_tuning_exporter.sglang.metrics import exposition
from sglang_tuning_exporter.sglang.metrics.page_cache import PageReader

pytestmark = pytest.mark.skipif(program("prometheus") is None or not PRESENT, reason="needs prometheus and promtool")
# What was found once: each of them had Prometheus or promtool refuse the whole page.
FOUND = (
    "sglang:x 1e400",
    "sglang:x -1e999",
    f"sglang:x {'9' * 4000}",
    "sglang:x +NaN",
    "sglang:x -nan",
    'sglang:x{__name__="y"} 1',
    '# TYPE sglang:h histogram\nsglang:h_bucket{le="foo"} 1',
    '# TYPE sglang:h histogram\nsglang:h_bucket{le="1e400"} 1',
    '# TYPE sglang:h summary\nsglang:h{quantile="foo"} 1',
    '# TYPE sglang:a histogram\nsglang:a_bucket{le="1"} 1\n# TYPE sglang:a_bucket counter\nsglang:a_bucket{le="2"} 2',
)


@pytest.fixture(scope="module")
def running() -> Iterator[Prometheus]:
    logging.getLogger("sglang_tuning_exporter").setLevel(logging.CRITICAL)
    with prometheus() as started:
        yield started


def page(line: str) -> str:
    return f"sglang:before 1\n{line}\nsglang:after 2\n"


def test_lines_found_by_fuzzing_are_refused_as_they_are_but_not_as_passed_on(running: Prometheus) -> None:
    raw = [page(line).encode() for line in FOUND]
    assert (running.refused(raw).keys() | unreadable(raw).keys()) == set(range(len(FOUND)))
    passed = [exposition.passthrough(exposition.scan(page(line))).text for line in FOUND]
    assert all("sglang:before 1\n" in each and "sglang:after 2\n" in each for each in passed)
    encoded = [each.encode() for each in passed]
    assert running.refused(encoded) == {}
    assert unreadable(encoded) == {}


def test_no_odd_number_label_or_line_blinds_prometheus(running: Prometheus) -> None:
    lines = [
        *(f"sglang:x {number}" for number in NUMBERS),
        *(f"sglang:x{{{label}}} 1" for label in LABELS),
        *(f"# TYPE sglang:h {kind}\nsglang:h{{{label}}} 1" for kind in ("histogram", "summary") for label in LABELS),
        *(f"# HELP sglang:x {text}\nsglang:x 1" for text in TEXTS),
        *LINES,
    ]
    pages = [exported(random.Random(0), [page(line)]) for line in lines]
    assert [lines[place] for place in running.refused(pages)] == []
    assert [lines[place] for place in unreadable(pages)] == []


def test_no_spoiled_page_blinds_prometheus(running: Prometheus) -> None:
    assert [said for _, said in refused(random.Random(17), 100, running)] == []


@pytest.mark.parametrize("figure", ["1e400", "-1e999", "9" * 400])
def test_a_figure_that_grows_beyond_any_float_is_left_out_and_counted_where_it_stood_before(figure: str) -> None:
    reader = PageReader()
    assert reader.read(page("sglang:x 1")).native == page("sglang:x 1")
    reading = reader.read(page(f"sglang:x {figure}"))
    assert (reading.native, reading.left_out) == ("sglang:before 1\nsglang:after 2\n", 1)
    assert reader.read(page("sglang:x 3")).native == page("sglang:x 3")


def test_infinity_stays_on_the_page() -> None:
    reader = PageReader()
    for figure in ("1", "+Inf", "-Inf", "NaN"):
        assert reader.read(page(f"sglang:x {figure}"))[1:] == (page(f"sglang:x {figure}"), 0)


@pytest.mark.parametrize(
    ("line", "left_out"),
    [
        ("sglang:x 1e400", 1),
        ('sglang:x{__name__="y"} 1', 1),
        ('{"sglang:x.y"} 1', 1),
        ("sglang:x 1\nsglang:x 2", 1),
        ('sglang:x{a="1",b="2"} 1\nsglang:x{b="2",a="1",c=""} 2', 1),
        ('sglang:x 1 # {trace="a"} 1', 0),
        ("process_x 1", 0),
        ("# any remark\n\n  \t\n#\n", 0),
    ],
)
def test_lines_left_out_because_prometheus_would_refuse_them_are_counted(line: str, left_out: int) -> None:
    for _ in range(2):
        assert PageReader().read(page(line)).left_out == left_out


@pytest.mark.parametrize(
    ("printed", "passed"),
    [("-nan", "NaN"), ("+NaN", "NaN"), ("infinity", "+Inf"), ("-Infinity", "-Inf"), ("inf", "+Inf"), ("1.50", "1.50")],
)
def test_nan_and_infinity_are_passed_on_in_one_spelling(printed: str, passed: str) -> None:
    assert exposition.passthrough(exposition.scan(f"sglang:x {printed}\n")).text == f"sglang:x {passed}\n"
