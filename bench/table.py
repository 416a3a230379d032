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


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def verdict(figure: float, aim: float) -> str:
    """Return whether a figure is above its aim, in words."""
    return "met" if figure <= aim else "**missed**"


def quantile(figures: Sequence[float], share: float) -> float:
    """Return the figure that `share` (0-1) of the figures do not exceed."""
    return sorted(figures)[min(int(share * len(figures)), len(figures) - 1)]
