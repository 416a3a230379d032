"""How series and values look: colours, signs, lines. Grafana's override properties and mappings. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]

# Steps of urgency. They differ in luminance, so that people who see red and green alike can distinguish them, and each has a sign.
BAD, WATCH, NEUTRAL, GOOD, QUIET = "#d0103a", "#f9b934", "#2f6fde", "#5bb578", "#6e7280"
# Level of a verdict, with `good` for a server that needs nothing -> sign, words, colour; the most urgent first.
LEVELS: dict[str, tuple[str, str, str]] = {
    "critical": ("✖", "Critical", BAD),
    "warning": ("▲", "Limited", WATCH),
    "info": ("■", "Could be better", NEUTRAL),
    "none": ("○", "No verdict", QUIET),
    "good": ("●", "Fine", GOOD),
}
# Shades of the levels that several verdicts have: they lie side by side on the strip.
SHADES = {
    "critical": (BAD, "#8f0a28"),
    "warning": (WATCH, "#b9770a", "#ffe3a6"),
    "info": (NEUTRAL, "#7fa8f0", "#1d4ba3"),
    "none": (QUIET, "#9a9da8", "#4c4f58"),
    "good": (GOOD, "#8fd0a4"),
}
# For lines side by side that are not judged.
COLOURS = (NEUTRAL, "#a352cc", "#0f9a96", "#b8782c", "#e0559d", "#8ab8ff", "#7a6a58")


def fixed_colour(colour: str, **custom: Any) -> Json:
    """Set a fixed colour and custom properties of the panel type (`lineWidth=2`)."""
    return {
        "color": {"mode": "fixed", "fixedColor": colour},
        **{f"custom.{key}": value for key, value in custom.items()},
    }


def column(how: Json) -> Json:
    """Return the look of a table's column. `wrap`: text on as many lines as it needs, for Grafana before 12.2, and since.

    Words for no value are those of an empty table, not of an empty cell.
    """
    wrapped = {"custom.cellOptions": {"type": "auto", "wrapText": True}, "custom.wrapText": True}
    return {"noValue": " ", **(wrapped if how.get("wrap") else {}), **{key: how[key] for key in how if key != "wrap"}}


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


def limit(**custom: Any) -> Json:
    """Draw the thin dashed line of a limit or a target."""
    dashed = {"lineWidth": 1, "fillOpacity": 0, "lineStyle": {"fill": "dash", "dash": [8, 6]}}
    return fixed_colour(QUIET, **(dashed | custom))


def value_mappings(mapping: Mapping[str, str | tuple[str, str]]) -> list[Json]:
    """Map exact values to words, or to words and a colour."""
    looks = {
        value: {"text": words} if isinstance(words, str) else {"text": words[0], "color": words[1]}
        for value, words in mapping.items()
    }
    return [{"type": "value", "options": looks}]


def threshold_steps(lowest: str, *higher: tuple[float, str]) -> Json:
    """Thresholds: the colour below the first figure, then each (figure, colour)."""
    return {
        "mode": "absolute",
        "steps": [{"color": colour, "value": value} for value, colour in ((None, lowest), *higher)],
    }


# What a tile shows while its figure is not known.
NO_FIGURE: list[Json] = [{"type": "special", "options": {"match": "null+nan", "result": {"text": "-", "color": QUIET}}}]


def link(title: str, url: str) -> Json:
    """Link a cell; `log` leads to Loki where one is named."""
    return {"title": title, "url": url, "targetBlank": True}


PAGE = "${page:raw}"  # the exporter of a board of one server
LOG = link("Log", "log")


# A narrow cell with the sign of a level, on its colour.
SIGN_CELL: Json = {
    "displayName": " ",
    "custom.width": 38,
    "custom.align": "center",
    "custom.cellOptions": {"type": "color-background", "mode": "basic"},
    "mappings": value_mappings({level: (sign, colour) for level, (sign, _, colour) in LEVELS.items()}),
}
# A column that only links and the order of the rows need, likewise.
HIDDEN: Json = {"custom.hidden": True, "custom.hideFrom.viz": True}
