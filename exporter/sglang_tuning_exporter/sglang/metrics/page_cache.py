"""Caches the line structure of one server's pages between scrapes, so that only the values are parsed. Pure; nothing here raises.

Until a new series comes only the values change, and to compare the rest takes a small part of the time of parsing it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang_tuning_exporter.sglang.metrics import exposition, page_figures
from sglang_tuning_exporter.sglang.metrics.figures import Scrape

# A larger page is not cached; a page of eight ranks has 0.4 MB.
MOST_CHARACTERS = 8 << 20
# A figure at the end of a line, in the spellings that both float() and the format accept.
_FIGURE = re.compile(r" ([+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|NaN|[+-]?Inf)\n")


class ParsedPage(NamedTuple):
    """The figures of a page, and the page itself, safe to append to ours (empty without pass-through)."""

    scrape: Scrape
    native: str
    left_out: int = 0  # lines not in `native` because Prometheus would reject them


@dataclass(frozen=True, slots=True)
class _Layout:
    """The structure of a page."""

    text_between: list[str]  # text before, between and after the figures
    samples: Sequence[int]  # which of the figures are values of samples, in order
    places: page_figures.Places
    native: Sequence[int] | None  # which lines are passed through, in which order; None: the page unchanged
    left_out: int


class PageReader:
    """Reads the pages of one server; not thread-safe."""

    def __init__(self, *, passthrough: bool = True, only: frozenset[str] | None = None) -> None:
        self._passthrough, self._only = passthrough, only if passthrough else frozenset()
        self._layout: _Layout | None = None

    def read(self, text: str) -> ParsedPage:
        """Read one page."""
        parts = _FIGURE.split(text) if len(text) <= MOST_CHARACTERS else []
        text_between, figures = parts[0::2], parts[1::2]
        if self._layout is None or self._layout.text_between != text_between:
            self._layout = _layout(text, text_between, self._only)
            if self._layout is not None:  # without a structure, the next page needs them again
                exposition.clear_caches()
        layout = self._layout
        values = [float(figures[place]) for place in layout.samples] if layout is not None else []
        if layout is None or _has_overflow(layout, values, figures):
            passed = (
                exposition.passthrough(exposition.scan(text), self._only)
                if self._passthrough
                else exposition.SafePage("")
            )
            return ParsedPage(page_figures.read(text), passed.text, passed.left_out)
        native = text
        if layout.native is not None:
            lines = text.split("\n") if layout.native else []
            native = "".join([lines[place] + "\n" for place in layout.native])
        return ParsedPage(layout.places.figures(values), native, layout.left_out)


def _has_overflow(layout: _Layout, values: list[float], figures: list[str]) -> bool:
    """Return whether a figure is now too large for a float."""
    return any(map(math.isinf, values)) and any(
        exposition.overflows_float(value, figures[place]) for place, value in zip(layout.samples, values, strict=True)
    )


def _layout(text: str, text_between: list[str], only: frozenset[str] | None) -> _Layout | None:
    """Return the structure of a page of which `only` these families are passed on; None where it may depend on more than the values."""
    page = exposition.scan(text) if text_between else exposition.Page()
    if not page.canonical or not page.samples or any(name.startswith("sglang_") for name, *_ in page.samples):
        return None
    # A comment may end with a number.
    values = [place for place, part in enumerate(text_between[:-1]) if not part.rpartition("\n")[2].startswith("#")]
    if len(values) != len(page.samples):
        return None
    passed = exposition.passthrough(page, only) if only != frozenset() else exposition.SafePage("")
    native_lines = None
    if passed.text != text:
        lines, passed_lines = text.split("\n"), passed.text.splitlines()
        first_places = dict(zip(reversed(lines), reversed(range(len(lines))), strict=True))
        if not first_places.keys() >= set(passed_lines):  # a line was changed
            return None
        native_lines = [first_places[line] for line in passed_lines]
    return _Layout(text_between, values, page_figures.Places(page), native_lines, passed.left_out)
