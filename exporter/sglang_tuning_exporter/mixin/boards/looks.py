"""How series, values and words look, the same on every panel: colours, signs, lines; words of verdicts, states and
queues. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core import judge, runbooks, sums
from sglang_tuning_exporter.core.answer import GOOD as FINE
from sglang_tuning_exporter.core.diagnoses import ALL, EXPORTER

Json: TypeAlias = dict[str, Any]

# Steps of urgency. They differ in luminance, so that people who see red and green alike can distinguish them, and each
# has a sign.
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
    """Return the look of a table's column.

    `wrap`: text on as many lines as it needs, for Grafana before 12.2, and since.

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

# What admission waited for -> words and colour.
ADMISSION: dict[str, tuple[str, str]] = {
    "no_queue": ("queue empty", GOOD),
    "pool_full": ("KV cache full", "#f9b934"),
    "held_back": ("held back", "#8f3f08"),
    "running_limit": ("running limit reached", "#a352cc"),
    "prefill_bound": ("prefill fills the batches", NEUTRAL),
    "hybrid_pool_full": ("second KV cache full", "#c2570c"),
    "grammar_queue": ("grammars compile", "#0f9a96"),
    "pd_queue": ("prefill/decode peer or transfer", "#e0559d"),
    "standing_still": ("admission stands still", "#d0103a"),
}
assert ADMISSION.keys() == set(sums.STATES["admission"])
ADMISSION_LOOKS = {state: renamed(*look) for state, look in ADMISSION.items()}
_QUEUES = {
    "grammar": "grammar",
    "bootstrap": "bootstrap (prefill side)",
    "inflight": "in flight (prefill side)",
    "prealloc": "pre-allocation (decode side)",
    "transfer": "transfer (decode side)",
    "host_receive": "host receive (decode side)",
    "retracted": "retracted (decode side)",
}
QUEUE_LOOKS = {queue: renamed(words, colour) for (queue, words), colour in zip(_QUEUES.items(), COLOURS, strict=True)}

_WITHOUT = {
    judge.HEALTHY: "Nothing to change",
    judge.NO_LIMIT: "No limit in the log",
    judge.IDLE: "Idle",
    judge.STARTING: "Starting",
    judge.STOPPED: "Stopped",
    judge.NOT_ENOUGH: "Not enough seen yet",
}


# Every verdict in a few words, and its level.
HEADLINES = {row.id: row.short for row in (*ALL, *EXPORTER)} | _WITHOUT
_LEVELS = {row.id: row.severity for row in (*ALL, *EXPORTER)} | {
    name: "good" if name in FINE else "none" for name in _WITHOUT
}
HEADLINE_CELLS = value_mappings(HEADLINES)


_WITHOUT_SHADES = {judge.NO_LIMIT: 1, judge.STARTING: 1, judge.STOPPED: 2}
_SHADES = {row.id: row.shade for row in (*ALL, *EXPORTER)} | {name: _WITHOUT_SHADES.get(name, 0) for name in _WITHOUT}


def _on_a_strip() -> dict[str, Json]:
    """Return overrides for series named by their verdict: its level's sign, and its shade of the level's colours."""
    return {
        name: {
            "displayName": f"{LEVELS[_LEVELS[name]][0]} {words}",
            **fixed_colour(SHADES[_LEVELS[name]][_SHADES[name]]),
        }
        for name, words in HEADLINES.items()
    }


VERDICT_LOOKS = _on_a_strip()


# What to do about each diagnosis where no value can be computed: "raise --flag: words".
ADVICE_IN_WORDS = {row.id: runbooks.advice(row, profiles.DEFAULT) for row in (*ALL, *EXPORTER)}
