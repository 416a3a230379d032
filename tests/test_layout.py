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

from conftest import SERVING_WITH_DP_RANKS
from sglang_tuning_exporter.sglang.metrics import exposition
from sglang_tuning_exporter.sglang.metrics import page_figures as facts
from sglang_tuning_exporter.sglang.metrics.page_figures import PageReader, ParsedPage

if TYPE_CHECKING:
    from collections.abc import Callable

PAGES = sorted((Path(__file__).parent / "data" / "metrics").glob("*.prom"))
PAGE = SERVING_WITH_DP_RANKS.decode()
QUEUED = re.compile(r"^(sglang:num_queue_reqs\{.*\}) \S+$", re.MULTILINE)
VALUES = re.compile(r"^((?!#).*) (\S+)$", re.MULTILINE)
PROCESS = "# TYPE process_open_fds gauge\nprocess_open_fds 7\n"


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


CHANGES: dict[str, Callable[[str], str]] = {
    "a series more": lambda text: text + 'sglang:num_aborted_requests_total{reason="x"} 1\n',
    "a series less": lambda text: "".join(text.splitlines(keepends=True)[:-1]),
    "another label": lambda text: text.replace('dp_rank="1"', 'dp_rank="2"'),
    "another order": lambda text: "\n".join(reversed(text.splitlines())) + "\n",
    "another type": lambda text: text.replace(" gauge\n", " untyped\n"),
    "another number in a comment": lambda text: text.replace("# HELP ", "# HELP sglang:x 5\n# HELP ", 1),
    "no end of the last line": lambda text: text.rstrip("\n"),
    "a value that is none": lambda text: QUEUED.sub(r"\1 1.2.3", text),
    "a value that only Python reads": lambda text: QUEUED.sub(r"\1 1_000", text),
    "no number": lambda text: QUEUED.sub(r"\1 NaN", text),
    "infinity": lambda text: QUEUED.sub(r"\1 +Inf", text),
    "a timestamp": lambda text: QUEUED.sub(r"\1 3 1700000000000", text),
    "an exemplar": lambda text: QUEUED.sub(r'\1 3 # {trace_id="a"} 5', text),
    "a line that is none": lambda text: text.replace("\n", "\n!\n", 1),
    "the same series twice": lambda text: text + QUEUED.search(text)[0] + "9\n",  # type: ignore[index]  # it is there
    "what is not SGLang's": lambda text: PROCESS + text,
    "names without a colon": lambda text: text.replace("sglang:", "sglang_"),
    "both spellings": lambda text: text + text.replace("sglang:", "sglang_"),
    "nothing": lambda _: "",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_page_with_another_line_structure_is_parsed_in_full(change: Callable[[str], str]) -> None:
    other = change(PAGE)
    assert after(PAGE, other) == afresh(other)
    assert after(PAGE, other, moved(PAGE, 1)) == afresh(moved(PAGE, 1))
    assert after(other, other) == afresh(other)


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
