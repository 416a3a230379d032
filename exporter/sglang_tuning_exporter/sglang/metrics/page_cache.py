"""One server's pages, one after the other: what stands where is found out once, and from then on only figures are read.

From scrape to scrape a page of SGLang changes in its values; names, labels, comments and their order stay until a new
series comes. To see that they are the same takes a small part of the time that it takes to read them. Pure; nothing here
raises. That a page read by its places tells the same as one read afresh is what the tests hold it to.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sglang_tuning_exporter.sglang.metrics import exposition
from sglang_tuning_exporter.sglang.metrics import page_figures as facts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tuning_exporter.sglang.events import Scrape

# Of the text of a larger page nothing is kept: 0.4 MB is a page of eight ranks.
MOST_CHARACTERS = 8 << 20
# A figure at the end of a line, in the spellings that float() and the format agree upon.
_FIGURE = re.compile(r" ([+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|NaN|[+-]?Inf)\n")


class Reading(NamedTuple):
    """What one page tells, and the page itself made safe to append to ours (empty where that is not wanted)."""

    scrape: Scrape
    native: str
    left_out: int = 0  # lines that are not in `native` because Prometheus would refuse them


@dataclass(frozen=True, slots=True)
class _Layout:
    """A page without its figures."""

    between: list[str]  # what stands before, between and behind them
    samples: Sequence[int]  # which of the figures are values of samples, in the page's order
    places: facts.Places
    native: Sequence[int] | None  # which lines are passed on, in which order; None: the page as it is
    left_out: int


class PageReader:
    """Reads the pages of one server. Not for two threads at once."""

    def __init__(self, *, passthrough: bool = True) -> None:
        self._passthrough = passthrough
        self._layout: _Layout | None = None

    def read(self, text: str) -> Reading:
        """Read one page."""
        parts = _FIGURE.split(text) if len(text) <= MOST_CHARACTERS else []
        between, figures = parts[0::2], parts[1::2]
        if self._layout is None or self._layout.between != between:
            self._layout = _layout(text, between, passthrough=self._passthrough)
            if self._layout is not None:  # without one, the next page is read by them again
                exposition.forget()
        layout = self._layout
        values = [float(figures[place]) for place in layout.samples] if layout is not None else []
        if layout is None or _is_any_beyond(layout, values, figures):
            passed = exposition.passthrough(text) if self._passthrough else exposition.Passed("")
            return Reading(facts.read(text), passed.text, passed.left_out)
        return Reading(facts.take(layout.places, values), self._native(layout, text), layout.left_out)

    def _native(self, layout: _Layout, text: str) -> str:
        if not self._passthrough:
            return ""
        if layout.native is None:
            return text
        lines = text.split("\n")
        return "".join([lines[place] + "\n" for place in layout.native])


def _is_any_beyond(layout: _Layout, values: list[float], figures: list[str]) -> bool:
    """Say whether a figure is now too large for a float."""
    return any(map(math.isinf, values)) and any(
        exposition.is_beyond(value, figures[place]) for place, value in zip(layout.samples, values, strict=True)
    )


def _layout(text: str, between: list[str], *, passthrough: bool) -> _Layout | None:
    """Find out where everything stands; None for a page on which more than its figures may decide that."""
    samples = exposition.plain(text) if between else None
    if not samples or any(exposition.native_name(name) != name for name, _ in samples):
        return None
    # A comment may end with a number, too.
    values = [place for place, part in enumerate(between[:-1]) if not part.rpartition("\n")[2].startswith("#")]
    if len(values) != len(samples):
        return None
    passed = exposition.passthrough(text) if passthrough else exposition.Passed(text)
    passed_on = None if passed.text == text else _lines(text, passed.text)
    if passed_on is not None and None in passed_on:
        return None
    return _Layout(
        between,
        values,
        facts.find(samples),
        None if passed_on is None else [at for at in passed_on if at is not None],
        passed.left_out,
    )


def _lines(text: str, native: str) -> list[int | None]:
    """Find each line that is passed on in the page; None for one that is not there as it is."""
    places: dict[str, int] = {}
    for place, line in enumerate(text.split("\n")):
        places.setdefault(line, place)
    return [places.get(line) for line in native.splitlines()]
