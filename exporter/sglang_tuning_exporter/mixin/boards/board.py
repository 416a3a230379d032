"""Builder of whole Grafana boards from their files: rows of panels, variables, annotations, links. Pure.

The JSON is that of schema 39, which Grafana 10.4 and newer read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from sglang_tuning_exporter.mixin.boards.definition import load
from sglang_tuning_exporter.mixin.boards.looks import Json
from sglang_tuning_exporter.mixin.boards.panel import DATASOURCE, panel

FLEET = "sglang-tuning-fleet"  # the board of all servers
SCHEMA_VERSION = 39  # Grafana 10.4
COLUMNS = 24  # width of Grafana's grid
LOG_SELECTOR = '{instance="${__data.fields.instance}"}'  # what a log in Loki is found by, unless it is said otherwise
TAG = "sglang-tuning"  # to search for the boards of this project
# What selects the series of a board. `=` for variables with one value: Grafana does not escape them, and `[2001:db8::1]:9741` would be a
# pattern. A label that no series has is an empty variable, which matches.
_JOBS, _EXPORTER = 'cluster=~"$cluster", job=~"$job"', 'cluster=~"$cluster", job=~"$job", instance="$instance"'
CHOSEN: Mapping[str, Mapping[bool, str]] = {
    # of the Fleet, of a board of one server
    "$chosen": {True: _JOBS, False: f'{_EXPORTER}, server="$server"'},
    "$alerts": {True: _JOBS, False: f'{_EXPORTER}, server=~"|$server"'},  # those about an exporter have no `server`
    "$exporter": {True: _JOBS, False: _EXPORTER},
    "$target": {
        True: 'job=~"$job"',
        False: 'job=~"$job", instance="$instance"',
    },  # `up` may lack a label of its samples
}


def boards(names: Iterable[str], loki: str = "") -> list[Json]:
    """Return the boards of these files, linked with each other; `loki` is a data source that has the servers' logs, and how to find them."""
    common = load("common")
    return [_board(load(name), common, loki) for name in names]


def _board(board: Json, common: Json, loki: str) -> Json:
    is_fleet = board["uid"] == FLEET
    variables = {
        name: variable for name, variable in common["variables"].items() if not is_fleet or name in _OF_THE_FLEET
    }
    made: Json = {
        "uid": board["uid"],
        "title": board["title"],
        "description": board["description"],
        "tags": [TAG, "sglang"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "1m",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "timepicker": {},
        "fiscalYearStartMonth": 0,
        "liveNow": False,
        "links": [_MENU],
        "annotations": {"list": [_annotation(is_shown=not is_fleet, **each) for each in common["annotations"]]},
        "templating": {"list": [_DATASOURCES, *(_variable(name, **each) for name, each in variables.items())]},
        "panels": _panels(board["chapters"]),
    }
    text = json.dumps(_with_log(made, loki))
    for name, matchers in CHOSEN.items():
        text = text.replace(name, json.dumps(matchers[is_fleet])[1:-1])
    exact: Json = json.loads(text)
    return exact


_OF_THE_FLEET = ("cluster", "job", "step")
_UNCHOSEN: Json = {"options": [], "skipUrlSync": False, "current": {}}
_DATASOURCES: Json = {
    "type": "datasource",
    "name": "datasource",
    "label": "Data source",
    "query": "prometheus",
    "regex": "",
    "refresh": 1,
    "multi": False,
    "includeAll": False,
    "hide": 0,
    **_UNCHOSEN,
}
# One menu of the other boards. The Fleet has no variable `instance`: so it takes everybody's time and job, and keeps its servers.
_MENU: Json = {
    "type": "dashboards",
    "title": "SGLang boards",
    "tags": [TAG],
    "asDropdown": True,
    "keepTime": True,
    "includeVars": True,
    "targetBlank": False,
    "icon": "external link",
    "tooltip": "",
    "url": "",
}


def _variable(
    name: str,
    *,
    label: str,
    description: str,
    query: str = "",
    text: str = "",
    regex: str = "",
    multi: bool = False,
    hidden: bool = False,
    **more: str,
) -> Json:
    """Build a variable filled from Prometheus, or one with this text; with `allValue` (a regular expression) it starts at All."""
    shown: Json = {"name": name, "label": label, "description": description, "hide": 2 if hidden else 0}
    if text:
        return {"type": "textbox", **shown, "query": text, **_UNCHOSEN, "current": {"text": text, "value": text}}
    everything: tuple[Any, Any] = (["All"], ["$__all"]) if multi else ("All", "$__all")
    return {
        "type": "query",
        **shown,
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": f"variable-{name}"},
        "refresh": 2,
        "sort": 1,
        "regex": regex,
        "multi": multi,
        "includeAll": bool(more),
        **_UNCHOSEN,
        "current": {"selected": True, "text": everything[0], "value": everything[1]} if more else {},
        **more,
    }


def _annotation(*, name: str, expr: str, colour: str, title: str, tags: str = "", is_shown: bool) -> Json:
    return {
        "name": name,
        "datasource": DATASOURCE,
        "enable": is_shown,
        "hide": True,  # no switch for each above the board
        "iconColor": colour,
        "target": {"refId": "Anno", "expr": expr},
        "titleFormat": title,
        "tagKeys": tags,
    }


def _with_log(node: Any, loki: str) -> Any:
    """Fill in where a link `log` leads, or leave it out where no Loki is named."""
    if isinstance(node, list):
        kept = [each for each in node if loki or not (isinstance(each, dict) and each.get("url") == "log")]
        return [_with_log(each, loki) for each in kept]
    if not isinstance(node, dict):
        return node
    if node.get("url") == "log":
        return node | {"url": _explore(loki)}
    return {key: _with_log(value, loki) for key, value in node.items()}


def _explore(loki: str) -> str:
    """Return the address of a log in Grafana's Explore. `loki` is the uid of a data source, and a colon and a selector where it is another one."""
    uid, _, selector = loki.partition(":")
    asked = {"refId": "A", "expr": selector or LOG_SELECTOR}
    pane = {"datasource": uid, "queries": [asked], "range": {"from": "${__from}", "to": "${__to}"}}
    written = quote(json.dumps({"log": pane}, separators=(",", ":")), safe="${}_.")
    return f"/explore?schemaVersion=1&panes={written}"


def _panels(chapters: Sequence[Json]) -> list[Json]:
    """Return rows and panels with ids in reading order and positions; panels of a closed row lie inside it, as Grafana stores them."""
    panels: list[Json] = []
    number, top = 0, 0
    for chapter in chapters:
        is_closed = chapter.get("closed", False)
        row: Json = {
            "id": number + 1,
            "type": "row",
            "title": chapter.get("title", ""),
            "collapsed": is_closed,
            "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1},
            "panels": [],
        }
        if row["title"]:
            panels.append(row)
            number, top = number + 1, top + 1
        below = top
        for panel_row in chapter["panel_rows"]:
            left = 0
            for each, width in zip(panel_row["panels"], widths(panel_row), strict=True):
                number += 1
                place = {"x": left, "y": below, "w": width, "h": panel_row["height"]}
                (row["panels"] if is_closed else panels).append({"id": number, "gridPos": place, **panel(each)})
                left += width
            below += panel_row["height"]
        top = top if is_closed else below
    return panels


def widths(panel_row: Json) -> Sequence[int]:
    """Return the width of each panel, by default equal. Raises ValueError unless they fill the 24 columns exactly."""
    count = len(panel_row["panels"])
    given: Sequence[int] = panel_row.get("widths", [COLUMNS // count] * count)
    if len(given) != count or sum(given) != COLUMNS:
        raise ValueError(f"widths={given}: give {count} widths that add up to {COLUMNS}")
    return given
