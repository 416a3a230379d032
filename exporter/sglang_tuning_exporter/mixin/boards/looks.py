"""How series and values look: colours, lines, words for values. Grafana's override properties and mappings. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]

# Green: fine. Amber: requests are held back. Red: act. Blue: information. Grey: idle or unknown.
# White text on each, and each as text on white, has a contrast of at least 4.5 : 1 (WCAG AA); as large text on Grafana's dark
# background 3 : 1.
GOOD, WATCH, BAD, NEUTRAL, QUIET = "#37872d", "#c2570c", "#d42a3f", "#3274d9", "#6e7280"
# For lines side by side that are not judged.
COLOURS = (NEUTRAL, "#a352cc", "#0f9a96", "#b8782c", "#e0559d", "#8ab8ff", "#7a6a58")


def fixed_colour(colour: str, **custom: Any) -> Json:
    """Set a fixed colour and custom properties of the panel type (`lineWidth=2`)."""
    return {
        "color": {"mode": "fixed", "fixedColor": colour},
        **{f"custom.{key}": value for key, value in custom.items()},
    }


def look(style: str | Json) -> Json:
    """Return a look: a colour, by our name for it or Grafana's, is that of everything."""
    renamed = {"GOOD": GOOD, "WATCH": WATCH, "BAD": BAD, "NEUTRAL": NEUTRAL, "QUIET": QUIET}
    return fixed_colour(renamed.get(style, style)) if isinstance(style, str) else style


def shades(**custom: Any) -> Json:
    """Draw the panel's main series in shades of one colour, one for each DP rank or pool."""
    return fixed_colour(NEUTRAL, **custom) | {"color": {"mode": "shades", "fixedColor": NEUTRAL}}


def renamed(text: str, colour: str) -> Json:
    """Show a series under other words and in a fixed colour."""
    return {"displayName": text, **fixed_colour(colour)}


def threshold_line(colour: str, **custom: Any) -> Json:
    """Draw the thin dashed line of a threshold."""
    dashed = {"lineWidth": 1, "fillOpacity": 0, "lineStyle": {"fill": "dash", "dash": [8, 6]}}
    return fixed_colour(colour, **(dashed | custom))


def _look(words: str | tuple[str, str]) -> Json:
    return {"text": words} if isinstance(words, str) else dict(zip(("text", "color"), words, strict=True))


def value_mappings(mapping: Mapping[str, str] | Mapping[str, tuple[str, str]]) -> list[Json]:
    """Map exact values to words, or to words and a colour."""
    return [{"type": "value", "options": {value: _look(words) for value, words in mapping.items()}}]


def range_mappings(mapping: Mapping[str, tuple[str, str]]) -> list[Json]:
    """Map values from each whole number up to the next one to words and a colour."""
    return [
        {"type": "range", "options": {"from": int(value), "to": int(value) + 0.999, "result": _look(words)}}
        for value, words in mapping.items()
    ]


def threshold_steps(lowest: str, *higher: tuple[float, str]) -> Json:
    """Thresholds: the colour below the first figure, then each (figure, colour)."""
    return {
        "mode": "absolute",
        "steps": [{"color": colour, "value": value} for value, colour in ((None, lowest), *higher)],
    }


def band_edge(**custom: Any) -> Json:
    """Draw an invisible line, the edge of a band."""
    hidden = {"legend": True, "tooltip": True, "viz": False}
    return fixed_colour(GOOD, lineWidth=0, **({"fillOpacity": 0} | custom), hideFrom=hidden)
