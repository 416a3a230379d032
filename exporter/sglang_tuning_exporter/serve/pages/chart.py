"""Figures over time as inline SVG, for pages and reports: a line with its range, the healthy band, marks, and stretches of time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, inf, isfinite, log10
from typing import NamedTuple

from markupsafe import Markup, escape

from sglang_tuning_exporter.state.history import LENGTH_SECONDS

_NEAR = 2.0  # times the highest figure: a bound beyond it is not on the scale


class Point(NamedTuple):
    """A figure at a time, seconds since the left edge: its mean, lowest and highest value."""

    at: float
    mean: float
    low: float
    high: float


class MarkedSpan(NamedTuple):
    """A part of the time that is marked, seconds since the left edge; `kind` is its class in the style sheet."""

    at: float
    seconds: float
    kind: str
    words: str = ""


@dataclass(frozen=True, slots=True)
class Scale:
    """The vertical scale of a chart: from 0 to `top`, with a healthy band (None: open on that side) and a limit."""

    top: float
    lower: float | None = None
    upper: float | None = None
    limit: float | None = None


class ChartSize(NamedTuple):
    """The size of a picture, and the seconds that it shows; `above` is room over the highest value."""

    width: int
    height: int
    seconds: float
    margin: int = 0
    above: int = 0

    def x(self, at: float) -> float:
        """Return the horizontal place of a time."""
        share = min(max(at / self.seconds, 0.0), 1.0)
        return round(self.margin + (self.width - 2 * self.margin) * share, 1)

    def y(self, value: float, top: float) -> float:
        """Return the vertical place of a value on a scale that ends at `top`."""
        share = min(max(value / top, 0.0), 1.0) if top else 0.0
        return round(self.height - self.margin - (self.height - 2 * self.margin - self.above) * share, 1)

    def svg(self, parts: Iterable[str], words: str, kind: str = "") -> Markup:
        """Return an SVG of these parts; `words` are its title for screen readers, `kind` its CSS class."""
        styled = f'class="{kind}" ' if kind else ""
        return Markup(  # noqa: S704 # nosec B704 # numbers, and words that are escaped
            f'<svg {styled}viewBox="0 0 {self.width} {self.height}" role="img" preserveAspectRatio="none">'
            f"<title>{escape(words)}</title>{''.join(parts)}</svg>"
        )

    def block(self, stretch: MarkedSpan, kind: str) -> str:
        """Return the start of a rectangle as wide as a stretch; a short one stays visible."""
        left = self.x(stretch.at)
        width = round(max(self.x(stretch.at + stretch.seconds) - left, 2.0), 1)
        return f'<rect class="{kind} {stretch.kind}" x="{left}" y="0" width="{width}" height="{self.height}"'


SPARK = ChartSize(240, 44, LENGTH_SECONDS, margin=2)
_SPARK_GAP_SECONDS = 20.0  # longer than that the exporter did not run, and the line breaks


def scale(
    points: Sequence[Point],
    *,
    least: float = 0.0,
    lower: float | None = None,
    upper: float | None = None,
    limit: float | None = None,
) -> Scale:
    """Return a scale that is at least `least` high. It holds a bound only if the points come near it: a queue of 3 is not drawn on a scale of 2000."""
    highest = max((point.high for point in points), default=0.0)
    near = [bound for bound in (lower, upper, limit) if bound is not None and bound <= _NEAR * highest]
    return Scale(max([highest, least, *near]), lower, upper, limit if limit in near else None)


def nice(value: float) -> float:
    """Round up to 1, 2, 2.5 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** floor(log10(value))
    return next((step * power for step in (1, 2, 2.5, 5) if step * power >= value), 10 * power)


def chart(
    points: Iterable[Point | None],
    box: ChartSize,
    of: Scale,
    words: str,
    *,
    gap: float,
    ticks: Iterable[float] = (),
    spans: Iterable[MarkedSpan] = (),
    marks: Iterable[Point] = (),
    bars: bool = False,
    kind: str = "",
) -> Markup:
    """Draw the points of a figure; `words` describe the picture for a screen reader. The line breaks where none comes for `gap` seconds.

    `ticks` are lines across, in percent of the width, `spans` are shaded, `marks` are ticks at the upper edge, `bars` draws bars instead
    of a line.
    """
    left, right, base = box.margin, box.width - box.margin, box.y(0, of.top)
    parts = [f"{box.block(span, 'shade')}/>" for span in spans]
    if of.lower is not None or of.upper is not None:
        high, low = box.y(of.top if of.upper is None else of.upper, of.top), box.y(of.lower or 0.0, of.top)
        parts.append(
            f'<rect class="band" x="{left}" y="{high}" width="{right - left}" height="{max(low - high, 0.0):.1f}"/>'
        )
    across = [f'<path class="grid" d="M{box.width * tick / 100:g} 0V{box.height}"/>' for tick in ticks]
    if across:
        parts += [*across, f'<path class="grid" d="M{left} {box.y(of.top / 2, of.top)}H{right}"/>']
    if of.limit is not None:
        parts.append(f'<path class="limit" d="M{left} {box.y(of.limit, of.top)}H{right}"/>')
    if bars:
        shown = (point for point in points if point is not None and point.mean)
        parts += [f'<path class="mark" d="M{box.x(point.at)} {base}V{box.y(point.mean, of.top)}"/>' for point in shown]
    if bars or across:
        parts.append(f'<path class="base" d="M{left} {base}H{right}"/>')
    for piece in [] if bars else _unbroken(points, gap):
        parts += _line(piece, box, of.top)
    parts += [f'<path class="mark" d="M{box.x(mark.at)} 0v8"/>' for mark in marks]
    return box.svg(parts, words, kind)


def lane(stretches: Iterable[MarkedSpan], seconds: float, words: str) -> Markup:
    """Draw stretches of time as blocks in a row."""
    box = ChartSize(1000, 20, seconds)
    return box.svg((f"{box.block(s, 'block')}><title>{escape(s.words)}</title></rect>" for s in stretches), words)


def sparkline(
    points: Iterable[tuple[float, float | None]],
    words: str,
    *,
    band: tuple[float | None, float | None] = (None, None),
    least: float = 0.0,
    bars: bool = False,
) -> Markup:
    """Draw the last 15 minutes of a figure from (seconds, value), where seconds are 0 or less: relative to now.

    Empty where no value is known. A value that is not known breaks the line. `band`: the healthy bounds.
    """
    shown = [
        Point(min(at, 0.0) + LENGTH_SECONDS, value, value, value) if value is not None and isfinite(value) else None
        for at, value in points
        if at >= -LENGTH_SECONDS
    ]
    known = [point for point in shown if point is not None]
    if not known:
        return Markup()
    of = scale(known, least=least, lower=band[0], upper=band[1])
    return chart(shown, SPARK, of, words, gap=_SPARK_GAP_SECONDS, bars=bars, kind="spark")


def _unbroken(points: Iterable[Point | None], gap: float) -> list[list[Point]]:
    """Split points at gaps longer than `gap` seconds, and where one is not known."""
    pieces: list[list[Point]] = []
    last = -inf
    for point in points:
        if point is not None:
            if point.at - last > gap:
                pieces.append([])
            pieces[-1].append(point)
        last = -inf if point is None else point.at
    return pieces


def _line(piece: Sequence[Point], box: ChartSize, top: float) -> list[str]:
    if len(piece) == 1:
        (point,) = piece
        low = box.y(point.low, top)
        return [f'<path class="dot" d="M{box.x(point.at)} {low}V{min(box.y(point.high, top), low - 2):.1f}"/>']
    line = f'<path class="line" d="M{_joined((box.x(point.at), box.y(point.mean, top)) for point in piece)}"/>'
    if all(point.low == point.high for point in piece):
        return [line]
    there = [(box.x(point.at), box.y(point.high, top)) for point in piece]
    back = [(box.x(point.at), box.y(point.low, top)) for point in reversed(piece)]
    return [f'<path class="area" d="M{_joined(there + back)}Z"/>', line]


def _joined(corners: Iterable[tuple[float, float]]) -> str:
    return "L".join(f"{x} {y}" for x, y in corners)
