"""Pages of one server in a row: a read with the cached line structure gives the same as a full parse of the page.

The reference is the full parse, by `facts.read` and `exposition.passthrough`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tuning_exporter.sglang.metrics import exposition
from sglang_tuning_exporter.sglang.metrics import page_figures as facts
from sglang_tuning_exporter.sglang.metrics.page_figures import PageReader, ParsedPage

if TYPE_CHECKING:
    pass

PAGES = sorted((Path(__file__).parent / "data" / "metrics").glob("*.prom"))
VALUES = re.compile(r"^((?!#).*) (\S+)$", re.MULTILINE)


def afresh(text: str) -> ParsedPage:
    passed = exposition.passthrough(exposition.scan(text))
    return ParsedPage(facts.read(text), passed.text, passed.left_out)


def after(*texts: str) -> ParsedPage:
    """The result of one reader for the last of these pages."""
    reader = PageReader()
    return [reader.read(text) for text in texts][-1]


def moved(text: str, by: float) -> str:
    """The page with every figure that much larger."""
    return VALUES.sub(lambda line: f"{line[1]} {float(line[2]) + by!r}".replace("inf", "+Inf"), text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_next_page_of_every_release_is_read_as_if_it_were_the_first(page: Path) -> None:
    text = page.read_text()
    following = moved(text, 3.5)
    assert following != text
    assert after(text, following) == afresh(following)


LINES = st.sampled_from(
    [
        "# HELP sglang:num_queue_reqs waiting 3",
        "# HELP sglang:num_queue_reqs waiting 4",
        "# TYPE sglang:num_queue_reqs gauge",
        "sglang:num_queue_reqs 1",
        "sglang:num_queue_reqs 2.0",
        'sglang:num_queue_reqs{dp_rank="0"} 5',
        'sglang:num_queue_reqs{dp_rank="0"} 6',
        'sglang:num_queue_reqs{dp_rank="1",x="} 3"} 6',
        "sglang_num_queue_reqs 8",
        "process_open_fds 1",
        "sglang:num_running_reqs NaN",
        "sglang:num_running_reqs 1e3",
        "sglang:num_running_reqs 1 2",
        "# sglang:num_running_reqs 1",
        "",
        "x 1",
    ]
)


@given(st.lists(st.lists(LINES, max_size=6).map(lambda lines: "\n".join([*lines, ""])), min_size=1, max_size=4))
def test_any_pages_in_any_order_are_read_as_if_each_were_the_first(texts: list[str]) -> None:
    reader = PageReader()
    # NaN is not itself, and a figure may be one.
    assert [repr(reader.read(text)) for text in texts] == [repr(afresh(text)) for text in texts]
