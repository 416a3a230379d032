"""Parts of the line charts of pages and reports, as inline SVG. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from markupsafe import Markup, escape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_T = TypeVar("_T")


def svg(parts: Sequence[str], words: str, width: int, height: int, kind: str = "") -> Markup:
    """Return an SVG of these parts; `words` are its title for screen readers, `kind` its CSS class."""
    styled = f'class="{kind}" ' if kind else ""
    return Markup(  # noqa: S704 # nosec B704 # numbers, and words that are escaped
        f'<svg {styled}viewBox="0 0 {width} {height}" role="img" preserveAspectRatio="none">'
        f"<title>{escape(words)}</title>{''.join(parts)}</svg>"
    )


def band(
    bounds: tuple[float | None, float | None], top: float, y: Callable[[float], float], *, left: int, right: int
) -> str:
    """Draw the healthy band from the lower to the upper bound; None: open on that side."""
    lower, upper = bounds
    high, low = y(top if upper is None else min(upper, top)), y(min(lower or 0.0, top))
    return f'<rect class="band" x="{left}" y="{high:g}" width="{right - left}" height="{max(low - high, 0):.1f}"/>'


def line(corners: Iterable[tuple[float, float]]) -> str:
    """Draw a line from corner to corner."""
    return f'<path class="line" d="M{_joined(corners)}"/>'


def area(corners: Iterable[tuple[float, float]]) -> str:
    """Fill the area between the corners."""
    return f'<path class="area" d="M{_joined(corners)}Z"/>'


def _joined(corners: Iterable[tuple[float, float]]) -> str:
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)


def unbroken(points: Iterable[_T], gap: float, moment: Callable[[_T], float | None]) -> list[list[_T]]:
    """Split points at gaps longer than `gap` seconds, and at points without a time."""
    pieces: list[list[_T]] = []
    last: float | None = None
    for point in points:
        at = moment(point)
        if at is not None:
            if last is None or at - last > gap:
                pieces.append([])
            pieces[-1].append(point)
        last = at
    return pieces
