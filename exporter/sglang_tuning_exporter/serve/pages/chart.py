"""A figure's last 15 minutes as inline SVG: a line or bars, with the healthy band. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isfinite
from typing import NamedTuple

from markupsafe import Markup, escape

from sglang_tuning_exporter.state.history import LENGTH_SECONDS

_NEAR = 2.0  # times the highest figure: a bound beyond it is not on the scale
_GAP_SECONDS = 20.0  # longer than that the exporter did not run, and the line breaks


class ChartSize(NamedTuple):
    """The size of a picture, and the seconds that it shows."""

    width: int
    height: int
    seconds: float
    margin: int

    def x(self, at: float) -> float:
        """Return the horizontal place of a time."""
        share = min(max(at / self.seconds, 0.0), 1.0)
        return round(self.margin + (self.width - 2 * self.margin) * share, 1)

    def y(self, value: float, top: float) -> float:
        """Return the vertical place of a value on a scale that ends at `top`."""
        share = min(max(value / top, 0.0), 1.0) if top else 0.0
        return round(self.height - self.margin - (self.height - 2 * self.margin) * share, 1)


SPARK = ChartSize(240, 44, LENGTH_SECONDS, margin=2)


def sparkline(
    points: Iterable[tuple[float, float | None]],
    words: str,
    *,
    band: tuple[float | None, float | None] = (None, None),
    least: float = 0.0,
    bars: bool = False,
) -> Markup:
    """Draw the last 15 minutes of a figure from (seconds, value), where seconds are 0 or less: relative to now.

    Empty where no value is known. A value that is not known breaks the line. `band`: the healthy bounds; the scale holds one only if
    the figure comes near it. It is at least `least` high. `words` describe the picture for a screen reader.
    """
    shown = [
        (min(at, 0.0) + LENGTH_SECONDS, value if value is not None and isfinite(value) else None)
        for at, value in points
        if at >= -LENGTH_SECONDS
    ]
    known = [(at, value) for at, value in shown if value is not None]
    if not known:
        return Markup()
    highest = max(value for _, value in known)
    lower, upper = band
    top = max([highest, least, *(bound for bound in band if bound is not None and bound <= _NEAR * highest)])
    left, right, base = SPARK.margin, SPARK.width - SPARK.margin, SPARK.y(0, top)
    parts = []
    if lower is not None or upper is not None:
        high, low = SPARK.y(top if upper is None else upper, top), SPARK.y(lower or 0.0, top)
        parts.append(
            f'<rect class="band" x="{left}" y="{high}" width="{right - left}" height="{max(low - high, 0.0):.1f}"/>'
        )
    if bars:
        parts += [
            f'<path class="mark" d="M{SPARK.x(at)} {base}V{SPARK.y(value, top)}"/>' for at, value in known if value
        ]
        parts.append(f'<path class="base" d="M{left} {base}H{right}"/>')
    else:
        parts += [_line(piece, top) for piece in _unbroken(shown)]
    return Markup(  # noqa: S704 # nosec B704 # numbers, and words that are escaped
        f'<svg class="spark" viewBox="0 0 {SPARK.width} {SPARK.height}" role="img" preserveAspectRatio="none">'
        f"<title>{escape(words)}</title>{''.join(parts)}</svg>"
    )


def _unbroken(points: Iterable[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """Split points at gaps, and where one is not known."""
    pieces: list[list[tuple[float, float]]] = []
    last = -inf
    for at, value in points:
        if value is not None:
            if at - last > _GAP_SECONDS:
                pieces.append([])
            pieces[-1].append((at, value))
        last = -inf if value is None else at
    return pieces


def _line(piece: list[tuple[float, float]], top: float) -> str:
    if len(piece) == 1:
        ((at, value),) = piece
        low = SPARK.y(value, top)
        return f'<path class="dot" d="M{SPARK.x(at)} {low}V{low - 2:.1f}"/>'
    corners = "L".join(f"{SPARK.x(at)} {SPARK.y(value, top)}" for at, value in piece)
    return f'<path class="line" d="M{corners}"/>'
