"""The Grafana boards: one YAML file each, where a panel is one row.

`files` gives the exact text of every committed board. Pure.

The JSON is that of schema 39, which Grafana 10.4 and newer read. A row of a panel has `title`, `type`, `description`,
`metric` (the description ends with it) and `queries`; then what differs from its type (`panel_types.yml`), in Grafana's
words. Each `[[ expression ]]` in a text is Jinja's; it may use every public name of `queries` and `looks`, and a
panel's own names (`with`). A text that is one expression alone becomes its value, such as a mapping or a list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from string import ascii_uppercase
from types import ModuleType
from typing import Any
from urllib.parse import quote

import yaml
from jinja2 import TemplateError

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.mixin._rendering import expression, rendered
from sglang_tuning_exporter.mixin.boards import looks, queries
from sglang_tuning_exporter.mixin.boards.looks import NEUTRAL, QUIET, Json, column, look, threshold_steps

LONGEST_LINE = 150


def files(loki: str = "") -> dict[str, str]:
    """Return every board as text, by its path in the repository.

    `loki`: a data source that has the servers' logs, and how to find them.
    """
    common = load("common")
    made = (_board(load(name), common, loki) for name in ("fleet", "server", "latency"))
    return {f"dashboards/{board['uid']}.json": _written(board) + "\n" for board in made}


def _written(node: Any, indent: str = "") -> str:
    """Write JSON with everything on one line that fits on it, so that boards are short
    and their changes can be read.
    """
    line = json.dumps(node, ensure_ascii=False)
    if len(indent) + len(line) <= LONGEST_LINE or not isinstance(node, dict | list):
        return line
    deeper = indent + "  "
    if isinstance(node, dict):
        parts, (begin, end) = [f"{json.dumps(key)}: {_written(value, deeper)}" for key, value in node.items()], "{}"
    else:
        parts, (begin, end) = [_written(value, deeper) for value in node], "[]"
    return begin + ",".join(f"\n{deeper}{part}" for part in parts) + f"\n{indent}{end}"


# GUIDE is the guide's profile: its figures appear in descriptions, never in queries.
_NAMES: dict[str, Any] = {
    name: value
    for module in (queries, looks)
    for name, value in vars(module).items()
    if not (name.startswith("_") or isinstance(value, ModuleType))
} | {
    "GUIDE": profiles.PROFILES["offline"],
    "GIGABYTE": profiles.GIGABYTE,
}
_ALONE = re.compile(r"\[\[((?:(?!\]\]).)*)\]\]", re.DOTALL)


def load(name: str) -> Any:
    """Return the content of `<name>.yml`."""
    text = (resources.files(__package__) / f"{name}.yml").read_text(encoding="utf-8")
    return filled(yaml.safe_load(text), _NAMES)


def filled(node: Any, names: Mapping[str, Any]) -> Any:
    """Return a node of a YAML file with its expressions replaced. Raises ValueError for one that is wrong."""
    if isinstance(node, dict):
        for name, text in node.get("with", {}).items():
            names = {**names, name: filled(text, names)}
        return {key: filled(value, names) for key, value in node.items() if key != "with"}
    if isinstance(node, list):
        return [filled(each, names) for each in node]
    if not isinstance(node, str) or "[[" not in node:
        return node
    alone = _ALONE.fullmatch(node)
    try:
        return expression(alone[1], names) if alone else rendered(node, names)
    except (TypeError, TemplateError) as error:
        raise ValueError(f"{node}: {error}") from error


DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
FLEET = "sglang-tuning-fleet"  # the board of all servers
SCHEMA_VERSION = 39  # Grafana 10.4
COLUMNS = 24  # width of Grafana's grid
LOG_SELECTOR = '{instance="${__data.fields.instance}"}'  # what a log in Loki is found by, unless it is said otherwise
TAG = "sglang-tuning"  # to search for the boards of this project
# What selects the series of a board. `=` for variables with one value: Grafana does not escape them, and
# `[2001:db8::1]:9741` would be a pattern. A label that no series has is an empty variable, which matches.
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
# One menu of the other boards. The Fleet has no variable `instance`: so it takes everybody's time and job, and keeps
# its servers.
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
    """Build a variable filled from Prometheus, or one with this text; with `allValue` (a regular expression) it starts
    at All.
    """
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
    """Return the address of a log in Grafana's Explore.

    `loki` is the uid of a data source, and a colon and a selector where it is another one.
    """
    uid, _, selector = loki.partition(":")
    asked = {"refId": "A", "expr": selector or LOG_SELECTOR}
    pane = {"datasource": uid, "queries": [asked], "range": {"from": "${__from}", "to": "${__to}"}}
    written = quote(json.dumps({"log": pane}, separators=(",", ":")), safe="${}_.")
    return f"/explore?schemaVersion=1&panes={written}"


def _panels(chapters: Sequence[Json]) -> list[Json]:
    """Return rows and panels with ids in reading order and positions; panels of a closed row lie inside it, as Grafana
    stores them.
    """
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


# $__rate_interval is four times this, whatever the data source's scrape interval.
SMALLEST_STEP = "$step"
TYPES: Mapping[str, Json] = load("panel_types")
_FIELD_DEFAULTS = ("unit", "noValue", "decimals", "max", "mappings")
_KEYS = {"title", "type", "description", "metric", "queries", "names", "custom", "options", "instant", *_FIELD_DEFAULTS}
_KEYS_OF_TABLES = {"columns", "labels_as_rows", "worst_first"}


def panel(row: Json) -> Json:
    """Return a panel without its id and position.

    Raises ValueError for a key that no panel has, and without queries.
    """
    kind, is_table = TYPES[row["type"]], row["type"] == "table"
    if unknown := row.keys() - _KEYS - (_KEYS_OF_TABLES if is_table else set()):
        raise ValueError(f"{row['title']}: {', '.join(sorted(unknown))}: no key of a {row['type']} panel")
    if "queries" not in row:
        raise ValueError(f"{row['title']}: has no queries")
    queries, names = row["queries"], row.get("names", {})
    if is_table:
        names = {name: column(how) for name, how in row["columns"].items()}
    made = {
        "type": row["type"],
        "title": row["title"],
        "description": f"{row['description']} `{row['metric']}`",
        "datasource": DATASOURCE,
        "targets": _targets(
            queries, kind | row, "time_series" if row.get("labels_as_rows") else kind.get("format", "time_series")
        ),
        "fieldConfig": {
            "defaults": {
                "unit": "none",
                "noValue": "Not reported",  # by this release, by this kind of server, or because it is down
                # boards have no thresholds of their own; words for no value are grey
                "thresholds": threshold_steps(QUIET, (0, NEUTRAL)),
                "custom": kind.get("custom", {}) | row.get("custom", {}),
                **kind["defaults"],
                **{key: row[key] for key in _FIELD_DEFAULTS if key in row},
            },
            "overrides": _overrides(queries, names),
        },
        "options": kind["options"] | row.get("options", {}),
    }
    return made | {"transformations": _transformations(row)} if is_table else made


def _targets(queries: Sequence[Json], kind: Json, form: str) -> list[Json]:
    is_instant = kind.get("instant", False)
    return [
        {
            "refId": reference,
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": query["expr"],
            "legendFormat": query.get("legend", "__auto"),
            "format": form,
            "instant": is_instant,
            "range": not is_instant,
            "interval": SMALLEST_STEP,
        }
        for reference, query in zip(ascii_uppercase, queries, strict=False)
    ]


def _overrides(queries: Sequence[Json], names: Mapping[str, Any]) -> list[Json]:
    """Return the looks of queries, then those of series, or of a table's columns, by their names."""
    referred = zip(ascii_uppercase, queries, strict=False)
    matched = [("byFrameRefID", reference, query["look"]) for reference, query in referred if "look" in query]
    matched += [("byName", name, style) for name, style in names.items()]
    return [
        {
            "matcher": {"id": matcher, "options": options},
            "properties": [{"id": key, "value": value} for key, value in look(style).items()],
        }
        for matcher, options, style in matched
    ]


def _transformations(row: Json) -> list[Json]:
    """Show labels as the columns of a table, or those of one series as rows (columns `label` and `value`).

    Several queries become one row where the labels that all of them have are equal; their values are `Value #A`, ….
    `columns` gives the order of what is shown; anything else is left out. `worst_first` names the columns whose sum is
    sorted by.
    """
    columns = row["columns"]
    made: list[Json] = []
    if row.get("labels_as_rows"):
        made.append({"id": "labelsToFields", "options": {"mode": "rows"}})
    else:
        if len(row["queries"]) > 1:
            made.append({"id": "merge", "options": {}})
        if "worst_first" in row:
            summed = {"reducer": "sum", "include": row["worst_first"]}
            made.append(
                {
                    "id": "calculateField",
                    "options": {"alias": "order", "mode": "reduceRow", "reduce": summed, "timeSeries": False},
                }
            )
            made.append({"id": "sortBy", "options": {"fields": {}, "sort": [{"field": "order", "desc": True}]}})
        made.append({"id": "filterFieldsByName", "options": {"include": {"pattern": f"^({'|'.join(columns)})$"}}})
    places = {name: index for index, name in enumerate(columns)}
    made.append({"id": "organize", "options": {"excludeByName": {}, "indexByName": places, "renameByName": {}}})
    return made
