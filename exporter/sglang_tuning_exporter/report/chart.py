"""A run's figures over time as inline SVG on one time axis: mean, lowest to highest, healthy band, and firing alerts. Pure."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from math import ceil, floor, log10
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from sglang_tuning_exporter.serve.pages import drawing
from sglang_tuning_exporter.sglang.log.prefix import FIRST_DATED_SECOND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tuning_exporter.report.series import Point

WIDTH, HEIGHT = 1000, 90
_TOP = 6  # room above the highest value
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_DAY = 86400
_TICKS = 8  # at most, so that their labels fit
_HOLDS_SECONDS = 60.0  # a figure holds so long after its line; then the curve breaks


@dataclass(frozen=True, slots=True)
class Axis:
    """The time axis of all charts: `seconds` from `begin` on, unix seconds or seconds since a midnight."""

    begin: float
    seconds: float

    def x(self, at: float) -> float:
        """Return the horizontal place of a time, seconds since the begin."""
        return round(WIDTH * min(max(at / self.seconds, 0.0), 1.0), 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Return round times: their place in percent of the width, and their labels."""
        wanted = self.seconds / _TICKS
        step = next((step for step in _STEPS if step >= wanted), ceil(wanted / _DAY) * _DAY)
        dated = self.begin >= FIRST_DATED_SECOND
        first = (-self.begin) % step if dated else 0.0
        found = []
        for number in range(floor((self.seconds - first) / step) + 1 if first <= self.seconds else 0):
            at = first + number * step
            found.append((round(100 * at / self.seconds, 2), self._words(at, step, first=not number)))
        return found

    def _words(self, at: float, step: float, *, first: bool) -> str:
        if self.begin < FIRST_DATED_SECOND:
            return f"+{int(at) // 3600}:{int(at) // 60 % 60:02}" + (f":{int(at) % 60:02}" if step < 60 else "")
        when = dt.datetime.fromtimestamp(self.begin + at, dt.timezone.utc)
        if step >= _DAY:
            return f"{when:%d %b}"
        clock = f"{when:%H:%M:%S}" if step < 60 else f"{when:%H:%M}"
        is_midnight = when.hour == when.minute == when.second == 0
        return f"{when:%d %b} {clock}" if is_midnight and not first else clock


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the axis that is marked, seconds since the begin; `kind` is its class in the style sheet."""

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
    has_band: bool = field(default=False)

    def y(self, value: float) -> float:
        """Return the vertical place of a value."""
        share = min(max(value / self.top, 0.0), 1.0) if self.top else 0.0
        return round(HEIGHT - (HEIGHT - _TOP) * share, 1)


def scale(
    points: Sequence[Point],
    *,
    top: float | None = None,
    lower: float | None = None,
    upper: float | None = None,
    limit: float | None = None,
) -> Scale:
    """Return a scale for the points. It holds a bound only if they come near it: a queue of 3 is not drawn on a scale of 2000."""
    highest = max((point.high for point in points), default=0.0)
    near = [bound for bound in (lower, upper, limit) if bound is not None and bound <= 2 * highest]
    chosen = top if top is not None else nice(max([highest, *near]))
    return Scale(chosen, lower, upper, limit if limit in near else None, lower is not None or upper is not None)


def nice(value: float) -> float:
    """Round up to 1, 2, 2.5 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** floor(log10(value))
    return next((step * power for step in (1, 2, 2.5, 5) if step * power >= value), 10 * power)


def chart(
    points: Sequence[Point],
    axis: Axis,
    of: Scale,
    words: str,
    *,
    width: float,
    spans: Sequence[Stretch] = (),
    marks: Sequence[Point] = (),
    bars: bool = False,
) -> Markup:
    """Draw the points of a figure, each `width` seconds wide; `words` describe the picture for a screen reader.

    `spans` are shaded, `marks` are ticks at the upper edge, `bars` draws bars instead of a line.
    """
    parts = [_shade(span, axis) for span in spans]
    if of.has_band:
        parts.append(drawing.band((of.lower, of.upper), of.top, of.y, left=0, right=WIDTH))
    parts += [f'<path class="grid" d="M{10 * left:g} 0V{HEIGHT}"/>' for left, _ in axis.ticks()]
    parts.append(f'<path class="grid" d="M0 {of.y(of.top / 2)}H{WIDTH}"/><path class="base" d="M0 {HEIGHT}H{WIDTH}"/>')
    if of.limit is not None:
        parts.append(f'<path class="limit" d="M0 {of.y(of.limit)}H{WIDTH}"/>')
    if bars:
        parts += [f'<path class="mark" d="M{axis.x(point.at)} {HEIGHT}V{of.y(point.mean)}"/>' for point in points]
    else:
        for piece in drawing.unbroken(points, _HOLDS_SECONDS + width, lambda point: point.at):
            parts += _line(piece, axis, of)
    parts += [f'<path class="mark" d="M{axis.x(mark.at)} 0v8"/>' for mark in marks]
    return drawing.svg(parts, words, WIDTH, HEIGHT)


def lane(stretches: Sequence[Stretch], axis: Axis, words: str) -> Markup:
    """Draw stretches of time as blocks in a row."""
    parts = [
        f'<rect class="block {stretch.kind}" x="{axis.x(stretch.at)}" y="0" '
        f'width="{_wide(stretch, axis)}" height="20"><title>{escape(stretch.words)}</title></rect>'
        for stretch in stretches
    ]
    return drawing.svg(parts, words, WIDTH, 20)


def _wide(stretch: Stretch, axis: Axis) -> float:
    """Return the width of a stretch; a short one stays visible."""
    return round(max(axis.x(stretch.at + stretch.seconds) - axis.x(stretch.at), 2.0), 1)


def _shade(span: Stretch, axis: Axis) -> str:
    return (
        f'<rect class="shade {span.kind}" x="{axis.x(span.at)}" y="0" width="{_wide(span, axis)}" height="{HEIGHT}"/>'
    )


def _line(piece: list[Point], axis: Axis, of: Scale) -> list[str]:
    if len(piece) == 1:
        (point,) = piece
        x = axis.x(point.at)
        return [f'<path class="dot" d="M{x} {of.y(point.low)}V{min(of.y(point.high), of.y(point.low) - 2)}"/>']
    line = drawing.line((axis.x(point.at), of.y(point.mean)) for point in piece)
    if all(point.low == point.high for point in piece):
        return [line]
    there = [(axis.x(point.at), of.y(point.high)) for point in piece]
    back = [(axis.x(point.at), of.y(point.low)) for point in reversed(piece)]
    return [drawing.area(there + back), line]
