"""The results as a Markdown table with the text around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class Table:
    """A title, how it was measured, rows under columns (the first one left-aligned), and notes."""

    title: str
    how: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return it as Markdown."""
        ruler = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = [_row(cells) for cells in (self.columns, ruler, *self.rows)]
        return "\n".join([f"## {self.title}", "", self.how, "", *lines, *(f"\n{note}" for note in self.notes), ""])

    def brief(self) -> list[str]:
        """Return it as rows of one table for all parts, under `BRIEF`: the title with what the figures are, then each row."""
        kinds = [self._kind(place) for place in range(1, len(self.columns))]
        rows = [[f"**{self.title}**", *self.columns[1:]], *self.rows]
        return [_row([row[0], *(_joined(row[1:], kinds, kind) for kind in ("figure", "ratio", "aim"))]) for row in rows]

    def _kind(self, place: int) -> str:
        if self.columns[place].startswith("aim"):
            return "aim"
        return "ratio" if any(row[place].endswith("x") for row in self.rows) else "figure"


BRIEF = ["| what | figures | ratios | aim |", "| --- | ---: | ---: | ---: |"]


def _joined(cells: Sequence[str], kinds: Sequence[str], wanted: str) -> str:
    return " · ".join(cell for cell, kind in zip(cells, kinds, strict=True) if kind == wanted and cell)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def verdict(figure: float, aim: float) -> str:
    """Return whether a figure is above its aim, in words."""
    return "met" if figure <= aim else "**missed**"


def quantile(figures: Sequence[float], share: float) -> float:
    """Return the figure that `share` (0-1) of the figures do not exceed."""
    return sorted(figures)[min(int(share * len(figures)), len(figures) - 1)]
