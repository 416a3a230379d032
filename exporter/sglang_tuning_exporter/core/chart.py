"""Figures over time as inline SVG: a line with its range, the healthy band, a limit, marks, and stretches of time. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import TypeAlias

from markupsafe import Markup, escape

WIDTH, HEIGHT, LANE_HEIGHT = 1000, 90, 20
_ABOVE = 6  # room over the highest value
_COLUMNS = 400  # at most, each with the mean, lowest and highest value of its time
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)  # seconds
_TICKS = 8  # at most, so that their labels fit
_NEAR = 2.0  # times the highest value: a bound beyond it is not on the scale


Value: TypeAlias = "tuple[float, float | None]"  # a time and a figure; None where it is not known, and the line breaks


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time; `kind` is its class in the style sheet."""

    begin: float
    end: float
    kind: str
    words: str = ""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is healthy (None: open on that side), and a limit that cannot be passed."""

    lower: float | None = None
    upper: float | None = None
    limit: float | None = None
    least: float = 0.0  # the scale is at least so high


@dataclass(frozen=True, slots=True)
class Axis:
    """The time that a chart shows, unix seconds; without dates seconds since the first midnight."""

    begin: float
    end: float
    dated: bool = True

    @property
    def seconds(self) -> float:
        """The length of the axis."""
        return max(self.end - self.begin, 1.0)

    def x(self, time: float) -> float:
        """Return the horizontal place of a time."""
        return round(WIDTH * min(max((time - self.begin) / self.seconds, 0.0), 1.0), 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Return round times: their place in percent, and their labels."""
        wanted = self.seconds / _TICKS
        step = next((step for step in _STEPS if step >= wanted), ceil(wanted / 86400) * 86400)
        first = (-self.begin) % step if self.dated else 0.0
        places = (first + number * step for number in range(floor((self.seconds - first) / step) + 1))
        return [(round(100 * at / self.seconds, 2), self._label(at, step)) for at in places]

    def _label(self, at: float, step: float) -> str:
        if not self.dated:
            return f"+{int(at) // 3600}:{int(at) // 60 % 60:02}" + (f":{int(at) % 60:02}" if step < 60 else "")
        when = dt.datetime.fromtimestamp(self.begin + at, dt.timezone.utc)
        if step >= 86400 or (when.hour == when.minute == when.second == 0):
            return f"{when:%d %b}"
        return f"{when:%H:%M:%S}" if step < 60 else f"{when:%H:%M}"


def nice(value: float) -> float:
    """Round up to 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** floor(log10(value)) if value > 0 else 1.0
    return next((step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value), power)


def top_of(values: Iterable[Value], bounds: Bounds) -> float:
    """Return the top of the scale: bounds are on it only where the values come near them."""
    highest = max((value for _, value in values if value is not None), default=0.0)
    near = [each for each in (bounds.lower, bounds.upper, bounds.limit) if each is not None and each <= _NEAR * highest]
    return max([highest, *near, bounds.least]) if bounds.least >= highest > 0 else nice(max([highest, *near]))


def strip(
    values: Sequence[Value],
    axis: Axis,
    words: str,
    bounds: Bounds = Bounds(),
    *,
    spans: Iterable[Span] = (),
    marks: Iterable[float] = (),
    bars: bool = False,
) -> Markup:
    """Draw a figure; `words` describe the picture for a screen reader, `spans` are shaded, `marks` are ticks at the upper edge."""
    top = top_of(values, bounds)

    def y(value: float) -> float:
        return round(HEIGHT - (HEIGHT - _ABOVE) * min(max(value / top, 0.0), 1.0), 1)

    parts = [_block(axis, span, HEIGHT, "shade") + "/>" for span in spans]
    if bounds.lower is not None or bounds.upper is not None:
        high = y(top if bounds.upper is None else bounds.upper)
        low = y(bounds.lower or 0.0)
        parts.append(f'<rect class="band" x="0" y="{high}" width="{WIDTH}" height="{max(low - high, 0.0):.1f}"/>')
    parts += [f'<path class="grid" d="M{WIDTH * place / 100:g} 0V{HEIGHT}"/>' for place, _ in axis.ticks()]
    parts.append(f'<path class="base" d="M0 {HEIGHT - 0.5}H{WIDTH}"/>')
    if bounds.limit is not None and bounds.limit <= top:
        parts.append(f'<path class="limit" d="M0 {y(bounds.limit)}H{WIDTH}"/>')
    for piece in _pieces(values, axis):
        if bars:
            parts += [f'<path class="mark" d="M{x} {HEIGHT}V{y(max(found))}"/>' for x, found in piece if max(found)]
            continue
        there = [f"{x} {y(sum(found) / len(found))}" for x, found in piece]
        if any(min(found) < max(found) for _, found in piece):
            edge = [f"{x} {y(max(found))}" for x, found in piece]
            edge += [f"{x} {y(min(found))}" for x, found in reversed(piece)]
            parts.append(f'<path class="area" d="M{"L".join(edge)}Z"/>')
        parts.append(f'<path class="line" d="M{"L".join(there)}{"h2" if len(there) == 1 else ""}"/>')
    parts += [f'<path class="mark" d="M{axis.x(time)} 0v8"/>' for time in marks]
    return _svg(parts, HEIGHT, words)


def lane(spans: Iterable[Span], axis: Axis, words: str) -> Markup:
    """Draw stretches of time as blocks in a row."""
    blocks = (
        f"{_block(axis, each, LANE_HEIGHT, 'block')}><title>{escape(each.words)}</title></rect>" for each in spans
    )
    return _svg(blocks, LANE_HEIGHT, words)


def _svg(parts: Iterable[str], height: int, words: str) -> Markup:
    return Markup(  # noqa: S704 # nosec B704 # numbers, and words that are escaped
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" preserveAspectRatio="none"><title>{escape(words)}</title>{"".join(parts)}</svg>'
    )


def _block(axis: Axis, span: Span, height: int, kind: str) -> str:
    left = axis.x(span.begin)
    width = round(max(axis.x(span.end) - left, 2.0), 1)  # a short one stays visible
    return f'<rect class="{kind} {span.kind}" x="{left}" y="0" width="{width}" height="{height}"'


def _pieces(values: Sequence[Value], axis: Axis) -> list[list[tuple[float, list[float]]]]:
    """Return unbroken pieces of the line: places, each with the values there."""
    pieces: list[list[tuple[float, list[float]]]] = [[]]
    for time, value in values:
        x = round(axis.x(time) * _COLUMNS / WIDTH) * WIDTH / _COLUMNS
        if value is None:
            if pieces[-1]:
                pieces.append([])
        elif pieces[-1] and pieces[-1][-1][0] == x:
            pieces[-1][-1][1].append(value)
        else:
            pieces[-1].append((x, [value]))
    return [piece for piece in pieces if piece]
