"""The last 15 minutes of a figure as inline SVG: a line, the healthy band behind it, and a title for screen readers. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from markupsafe import Markup

from sglang_tuning_exporter.serve.pages import drawing
from sglang_tuning_exporter.state.history import LENGTH_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT, MARGIN = 240, 44, 2
_GAP_SECONDS = 20.0  # longer than that the exporter did not run, and the line breaks


@dataclass(frozen=True, slots=True)
class Band:
    """The healthy range; None: no bound on that side."""

    lower: float | None = None
    upper: float | None = None


def sparkline(
    points: Sequence[tuple[float, float | None]],
    words: str,
    *,
    band: Band | None = None,
    top: float | None = None,
    marks: bool = False,
) -> Markup:
    """Draw points of (seconds, value), where seconds are 0 or less: relative to now. Empty where no value is known.

    `words` are the title, `top` is the least height of the scale; `marks` draws bars instead of a line.
    """
    shown = [
        (min(at, 0.0), value if value is not None and isfinite(value) else None)
        for at, value in points
        if at >= -LENGTH_SECONDS
    ]
    known = [value for _, value in shown if value is not None]
    if not known:
        return Markup()
    highest = max([*known, top or 0.0, *_bounds(band, known)])
    if highest <= 0:
        highest = 1.0

    def x(at: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * (1 + at / LENGTH_SECONDS)

    def y(value: float) -> float:
        return round(HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * min(max(value / highest, 0.0), 1.0), 1)

    parts = []
    if band is not None:
        parts.append(drawing.band((band.lower, band.upper), highest, y, left=MARGIN, right=WIDTH - MARGIN))
    if marks:
        parts += [f'<path class="mark" d="M{x(at):.1f} {y(0)}V{y(value)}"/>' for at, value in shown if value]
        parts.append(f'<path class="base" d="M{MARGIN} {y(0)}H{WIDTH - MARGIN}"/>')
    else:
        for piece in drawing.unbroken(shown, _GAP_SECONDS, lambda point: None if point[1] is None else point[0]):
            parts.append(_stroke([(x(at), y(value)) for at, value in piece if value is not None]))
    return drawing.svg(parts, words, WIDTH, HEIGHT, "spark")


def _bounds(band: Band | None, known: list[float]) -> list[float]:
    """Return the bounds near the line; a queue of 3 is not drawn on a scale of 2000."""
    near = 4 * max(known)
    return [bound for bound in (band.lower, band.upper) if bound is not None and bound <= near] if band else []


def _stroke(piece: list[tuple[float, float]]) -> str:
    if len(piece) == 1:
        ((x, y),) = piece
        return f'<path class="dot" d="M{x:.1f} {y:.1f}h0"/>'  # a line with round ends: a circle would be stretched
    return drawing.line(piece)
