"""Builder of whole Grafana boards from their files: rows of panels, variables, annotations, links. Pure.

The JSON is that of schema 39, which Grafana 10.4 and newer read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sglang_tuning_exporter.core.runbooks import GUIDE_URL
from sglang_tuning_exporter.mixin.boards.definition import load
from sglang_tuning_exporter.mixin.boards.looks import Json
from sglang_tuning_exporter.mixin.boards.panel import DATASOURCE, panel

FLEET = "sglang-tuning-fleet"  # the board of all servers
SCHEMA_VERSION = 39  # Grafana 10.4
COLUMNS = 24  # width of Grafana's grid
TAG = "sglang-tuning"  # to search for the boards of this project


def boards(names: Iterable[str]) -> list[Json]:
    """Return the boards of these files, linked with each other."""
    common, defined = load("common"), [load(name) for name in names]
    titles = {board["uid"]: board["title"] for board in defined}
    return [_board(board, common, titles) for board in defined]


def _board(board: Json, common: Json, titles: Mapping[str, str]) -> Json:
    is_fleet = board["uid"] == FLEET
    variables = {
        name: variable
        for name, variable in common["variables"].items()
        if name != ("instance" if is_fleet else "instances")
    }
    single = [name for name, variable in variables.items() if "allValue" not in variable]
    made: Json = {
        "uid": board["uid"],
        "title": board["title"],
        "description": board["description"],
        "tags": [TAG, "sglang"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "timepicker": {},
        "fiscalYearStartMonth": 0,
        "liveNow": False,
        "links": _links(board["uid"], titles),
        "annotations": {"list": [_annotation(is_shown=not is_fleet, **each) for each in common["annotations"]]},
        "templating": {
            "list": [_DATASOURCES, *(_variable(**({"name": name} | each)) for name, each in variables.items())]
        },
        "panels": _panels(board["chapters"]),
    }
    # `=` for variables with one value: Grafana does not escape them, and `[2001:db8::1]:9741` would be a pattern.
    text = json.dumps(made)
    for name in single:
        text = text.replace(json.dumps(f'{name}=~"${name}"')[1:-1], json.dumps(f'{name}="${name}"')[1:-1])
    exact: Json = json.loads(text)
    return exact


_UNCHOSEN: Json = {"options": [], "hide": 0, "skipUrlSync": False, "current": {}}
_DATASOURCES: Json = {
    "type": "datasource",
    "name": "datasource",
    "label": "Data source",
    "query": "prometheus",
    "regex": "",
    "refresh": 1,
    "multi": False,
    "includeAll": False,
    **_UNCHOSEN,
}


def _variable(*, name: str, label: str, query: str, description: str, multi: bool = False, **more: str) -> Json:
    """Build a variable filled from Prometheus; with `allValue` (a regular expression) it starts at All."""
    everything: tuple[Any, Any] = (["All"], ["$__all"]) if multi else ("All", "$__all")
    return {
        "type": "query",
        "name": name,
        "label": label,
        "description": description,
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": f"variable-{name}"},
        "refresh": 2,
        "sort": 1,
        "regex": "",
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
        "hide": False,
        "iconColor": colour,
        "target": {"refId": "Anno", "expr": expr},
        "titleFormat": title,
        "tagKeys": tags,
    }


def _links(here: str, titles: Mapping[str, str]) -> list[Json]:
    """Return the links to the other boards and to the guide. Between boards of one server, they keep the chosen one."""
    made = []
    for uid, title in titles.items():
        names = ("datasource", "job") if FLEET in (uid, here) else ("datasource", "job", "instance", "model", "dp_rank")
        url = f"/d/{uid}?" + "&".join(f"${{{name}:queryparam}}" for name in names)
        if uid != here:
            made.append(_link(title.rpartition(" / ")[2], url, is_board=True))
    return [*made, _link("The tuning guide", GUIDE_URL, is_board=False)]


def _link(title: str, url: str, *, is_board: bool) -> Json:
    """Build a link to another board of ours, keeping the time range, or to a document in a new tab."""
    return {
        "type": "link",
        "title": title,
        "url": url,
        "icon": "dashboard" if is_board else "doc",
        "keepTime": is_board,
        "includeVars": False,  # they are in the URL: a fleet's "All" servers make no sense on one server's board
        "targetBlank": not is_board,
        "tooltip": "",
        "tags": [],
        "asDropdown": False,
    }


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
