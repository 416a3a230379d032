"""Builders of whole Grafana boards: chapters, rows of panels, variables, annotations, links. Pure.

No board's content is here. The JSON is that of schema 39, which Grafana 10.4 and newer read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_tuning_exporter.mixin.panels import DATASOURCE, Json

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMA_VERSION = 39  # Grafana 10.4
COLUMNS = 24  # width of Grafana's grid
TAG = "sglang-tuning"  # to search for the boards of this project


@dataclass(frozen=True, slots=True)
class PanelRow:
    """Panels side by side, `height` grid units tall. Without `widths` (of 24 columns) they are equally wide."""

    height: int
    panels: tuple[Json, ...]
    widths: tuple[int, ...] = ()

    def places(self) -> list[tuple[int, int]]:
        """Return column and width of each panel. Raises ValueError unless they fill the 24 columns exactly."""
        widths = self.widths or (COLUMNS // len(self.panels),) * len(self.panels)
        if len(widths) != len(self.panels) or sum(widths) != COLUMNS:
            raise ValueError(f"widths={widths}: give {len(self.panels)} widths that add up to {COLUMNS}")
        return [(sum(widths[:index]), width) for index, width in enumerate(widths)]


@dataclass(frozen=True, slots=True)
class Chapter:
    """A titled row of the board and the panels under it; `closed` until somebody opens it. Without a title there is no row."""

    title: str
    panel_rows: tuple[PanelRow, ...]
    closed: bool = False


def choice(
    name: str,
    label: str,
    query: str,
    description: str,
    *,
    all_value: str | None = None,
    multi: bool = False,
) -> Json:
    """Build a variable filled from Prometheus; with `all_value` (a regular expression) it starts at All."""
    everything = (
        {"selected": True, "text": "All", "value": "$__all"}
        if not multi
        else {"selected": True, "text": ["All"], "value": ["$__all"]}
    )
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
        "includeAll": all_value is not None,
        "options": [],
        "hide": 0,
        "skipUrlSync": False,
        "current": everything if all_value is not None else {},
    } | ({"allValue": all_value} if all_value is not None else {})


def annotation(name: str, expr: str, colour: str, *, title: str, tags: str = "", shown: bool = True) -> Json:
    """Build an annotation at the times at which `expr` has a sample; its title may hold labels (`{{label}}`)."""
    return {
        "name": name,
        "datasource": DATASOURCE,
        "enable": shown,
        "hide": False,
        "iconColor": colour,
        "target": {"refId": "Anno", "expr": expr},
        "titleFormat": title,
        "tagKeys": tags,
    }


def link(title: str, url: str, *, is_board: bool) -> Json:
    """Build a link of a board: to another board of ours, keeping the time range, or to a document in a new tab."""
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


def _source() -> Json:
    return {
        "type": "datasource",
        "name": "datasource",
        "label": "Data source",
        "query": "prometheus",
        "regex": "",
        "refresh": 1,
        "multi": False,
        "includeAll": False,
        "options": [],
        "hide": 0,
        "skipUrlSync": False,
        "current": {},
    }


def _laid_out(chapters: Sequence[Chapter]) -> list[Json]:
    """Return rows and panels with ids in reading order and positions; panels of a closed row lie inside it, as Grafana stores them."""
    panels: list[Json] = []
    number, top = 0, 0
    for chapter in chapters:
        row: Json = {
            "id": number + 1,
            "type": "row",
            "title": chapter.title,
            "collapsed": chapter.closed,
            "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1},
            "panels": [],
        }
        if chapter.title:
            panels.append(row)
            number, top = number + 1, top + 1
        inside = row["panels"] if chapter.closed else panels
        below = top
        for panel_row in chapter.panel_rows:
            for panel, (left, width) in zip(panel_row.panels, panel_row.places(), strict=True):
                number += 1
                place = {"x": left, "y": below, "w": width, "h": panel_row.height}
                inside.append({"id": number, "gridPos": place, **panel})
            below += panel_row.height
        top = top if chapter.closed else below
    return panels


def _exactly(node: Any, names: Sequence[str]) -> Any:
    """Match single-value variables with `=`: Grafana does not escape them, and `[2001:db8::1]:9741` would be a pattern."""
    if isinstance(node, dict):
        return {key: _exactly(value, names) for key, value in node.items()}
    if isinstance(node, list):
        return [_exactly(value, names) for value in node]
    if isinstance(node, str):
        for name in names:
            node = node.replace(f'{name}=~"${name}"', f'{name}="${name}"')
    return node


def board(
    uid: str,
    title: str,
    *,
    description: str,
    chapters: Sequence[Chapter],
    variables: Sequence[Json],
    annotations: Sequence[Json] = (),
    links: Sequence[Json] = (),
) -> Json:
    """Build a whole board; ids and positions follow from chapters and their rows."""
    single = [choice["name"] for choice in variables if not (choice["multi"] or choice["includeAll"])]
    made: Json = {
        "uid": uid,
        "title": title,
        "description": description,
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
        "links": list(links),
        "annotations": {"list": list(annotations)},
        "templating": {"list": [_source(), *variables]},
        "panels": _laid_out(chapters),
    }
    exact: Json = _exactly(made, single)
    return exact
