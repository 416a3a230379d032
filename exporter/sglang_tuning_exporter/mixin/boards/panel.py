"""Builder of a Grafana panel from its row in a board's file and its type's row in `panel_types.yml`. Pure.

A row has `title`, `type`, `description`, `metric` (the description ends with it) and `queries`; then what differs from its
type, in Grafana's words. The JSON is that of schema 39, which Grafana 10.4 and newer read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from sglang_tuning_exporter.mixin.boards.definition import load
from sglang_tuning_exporter.mixin.boards.looks import NEUTRAL, QUIET, Json, column, look, threshold_steps

DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
# $__rate_interval is four times this, whatever the data source's scrape interval.
SMALLEST_STEP = "$step"
TYPES: Mapping[str, Json] = load("panel_types")
_FIELD_DEFAULTS = ("unit", "noValue", "decimals", "max", "mappings")
_KEYS = {"title", "type", "description", "metric", "queries", "names", "custom", "options", "instant", *_FIELD_DEFAULTS}
_KEYS_OF_TABLES = {"columns", "labels_as_rows", "worst_first"}


def panel(row: Json) -> Json:
    """Return a panel without its id and position. Raises ValueError for a key that no panel has, and without queries."""
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
    `columns` gives the order of what is shown; anything else is left out. `worst_first` names the columns whose sum is sorted by.
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
