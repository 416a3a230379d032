"""The results as a Markdown table with the text around it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], *, figures: bool = False) -> str:
    """Write a table; `figures`: all columns but the first are aligned to the right."""
    ruler = ["---", *["---:" if figures else "---"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ruler, *rows))


@dataclass
class Table:
    """A title, how it was measured, rows under columns, and notes."""

    title: str
    how: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return it as Markdown."""
        table = markdown(self.columns, self.rows, figures=True)
        return "\n".join([f"## {self.title}", "", self.how, "", table, *(f"\n{note}" for note in self.notes), ""])

    def brief(self) -> list[Sequence[str]]:
        """Return it as rows of one table for all parts, under `BRIEF`: the title with what the figures are, then each
        row.
        """
        kinds = [self._kind(place) for place in range(1, len(self.columns))]
        rows = [[f"**{self.title}**", *self.columns[1:]], *self.rows]
        return [[row[0], *(_joined(row[1:], kinds, kind) for kind in ("figure", "ratio", "aim"))] for row in rows]

    def _kind(self, place: int) -> str:
        if self.columns[place].startswith("aim"):
            return "aim"
        return "ratio" if any(row[place].endswith("x") for row in self.rows) else "figure"


BRIEF = ("what", "figures", "ratios", "aim")


def _joined(cells: Sequence[str], kinds: Sequence[str], wanted: str) -> str:
    return " · ".join(cell for cell, kind in zip(cells, kinds, strict=True) if kind == wanted and cell)


def verdict(figure: float, aim: float) -> str:
    """Return whether a figure is above its aim, in words."""
    return "met" if figure <= aim else "**missed**"


def quantile(figures: Sequence[float], share: float) -> float:
    """Return the figure that `share` (0-1) of the figures do not exceed."""
    return sorted(figures)[min(int(share * len(figures)), len(figures) - 1)]
