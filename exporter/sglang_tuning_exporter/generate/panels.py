"""Builders of Grafana panels: a few facts in, the JSON of a panel or of a whole board out. Pure.

No board's content is known here. Every builder asks for a title, a description, the metric the description ends with,
a unit and the words to show instead of "No data", so that a panel without them cannot be written. Positions and ids are
given by `board`. The JSON is that of schema 39, which Grafana 10.4 and newer read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Json: TypeAlias = dict[str, Any]
Style: TypeAlias = "Mapping[str, Any]"

SCHEMA_VERSION = 39  # Grafana 10.4
COLUMNS = 24  # width of Grafana's grid
DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
TAG = "sglang-tuning"  # what the boards of this project find each other by

NO_TRAFFIC = "No traffic"
NOT_TOLD = "The server does not tell"

# Judged figures take these; a figure nobody judges is NEUTRAL, so that colour always means something.
GOOD, WATCH, BAD, NEUTRAL, QUIET = "green", "orange", "red", "blue", "#6e7280"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression of a panel, the name of its series, and its look (override property -> value)."""

    expr: str
    legend: str = "__auto"
    style: Style = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shelf:
    """Panels side by side, `height` grid units tall. Without `widths` (of 24 columns) they are equally wide."""

    height: int
    panels: tuple[Json, ...]
    widths: tuple[int, ...] = ()

    def places(self) -> list[tuple[int, int]]:
        """Return column and width of each panel. ValueError when they do not fill the 24 columns exactly."""
        widths = self.widths or (COLUMNS // len(self.panels),) * len(self.panels)
        if len(widths) != len(self.panels) or sum(widths) != COLUMNS:
            raise ValueError(f"widths={widths}: give {len(self.panels)} widths that add up to {COLUMNS}")
        return [(sum(widths[:index]), width) for index, width in enumerate(widths)]


@dataclass(frozen=True, slots=True)
class Chapter:
    """A titled row of the board and the shelves under it."""

    title: str
    shelves: tuple[Shelf, ...]


# --- selectors -------------------------------------------------------------------------------------------------------


def own(metric: str, *matchers: str) -> str:
    """Select a series of the exporter for the chosen server."""
    chosen = ", ".join(('job=~"$job"', 'instance=~"$instance"', *matchers))
    return f"{metric}{{{chosen}}}"


def ranked(metric: str, *matchers: str) -> str:
    """Select a series that carries `dp_rank` where there are DP ranks; "All" also matches one without the label."""
    return own(metric, *matchers, 'dp_rank=~"$dp_rank"')


def native(metric: str, *matchers: str) -> str:
    """Select a series of SGLang that the exporter passes through, for the chosen model."""
    return own(metric, *matchers, 'model_name=~"$model_name"')


def threshold(signal: str, bound: str) -> str:
    """Ask what the profile in force calls healthy; no sample where the profile has no such bound."""
    series = own("sglang_tuning_threshold", f'signal="{signal}"', f'bound="{bound}"')
    return f"max({series})"


def per_rank(expr: str, *, by: Sequence[str] = (), of: str = "max") -> str:
    """Split `expr` by DP rank, with a label `rank` for legends that stays away where the server has no ranks."""
    labels = ", ".join((*by, "dp_rank"))
    return f'label_replace({of} by ({labels}) ({expr}), "rank", " on rank $1", "dp_rank", "(.+)")'


def words(value: str, *cases: tuple[str, str], otherwise: str) -> str:
    """Give `value` a label `verdict`: the words of the first case (condition, words) whose condition has a sample."""
    said = [f'label_replace({value} and on () ({condition}), "verdict", "{text}", "", "")' for condition, text in cases]
    return " or on () ".join([*said, f'label_replace({value}, "verdict", "{otherwise}", "", "")'])


# --- looks -----------------------------------------------------------------------------------------------------------


def painted(colour: str, **custom: Any) -> Json:
    """Fix a colour and, by name, custom properties of the panel type (`lineWidth=2`)."""
    return {
        "color": {"mode": "fixed", "fixedColor": colour},
        **{f"custom.{key}": value for key, value in custom.items()},
    }


def measured(colour: str = NEUTRAL, **custom: Any) -> Json:
    """Draw what the panel is about in shades of one colour: DP ranks and pools stay apart and none looks judged."""
    return painted(colour, **custom) | {"color": {"mode": "shades", "fixedColor": colour}}


def named(text: str, colour: str) -> Json:
    """Show a series under other words and in a fixed colour."""
    return {"displayName": text, **painted(colour)}


def bound_line(colour: str, **custom: Any) -> Json:
    """Draw the thin dashed line of a threshold."""
    return painted(colour, lineWidth=1, fillOpacity=0, lineStyle={"fill": "dash", "dash": [8, 6]}, **custom)


def texts(mapping: Mapping[str, tuple[str, str | None]]) -> list[Json]:
    """Map values: exact value -> (words, colour or none)."""
    options = {
        value: {"index": index, "text": text} | ({"color": colour} if colour else {})
        for index, (value, (text, colour)) in enumerate(mapping.items())
    }
    return [{"type": "value", "options": options}]


def _overrides(queries: Sequence[Query], names: Mapping[str, Style]) -> list[Json]:
    matched: list[tuple[Json, Style]] = [
        ({"id": "byFrameRefID", "options": _reference(index)}, query.style)
        for index, query in enumerate(queries)
        if query.style
    ]
    matched += [({"id": "byName", "options": name}, style) for name, style in names.items()]
    return [
        {"matcher": matcher, "properties": [{"id": key, "value": value} for key, value in style.items()]}
        for matcher, style in matched
    ]


def _reference(index: int) -> str:
    return chr(ord("A") + index)


def _targets(queries: Sequence[Query], *, instant: bool, form: str = "time_series") -> list[Json]:
    return [
        {
            "refId": _reference(index),
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": query.expr,
            "legendFormat": query.legend,
            "format": form,
            "instant": instant,
            "range": not instant,
        }
        for index, query in enumerate(queries)
    ]


def _panel(
    kind: str,
    title: str,
    queries: Sequence[Query],
    *,
    description: str,
    metric: str,
    unit: str,
    no_value: str,
    options: Json,
    defaults: Json | None = None,
    custom: Json | None = None,
    names: Mapping[str, Style] | None = None,
    targets: list[Json],
) -> Json:
    return {
        "type": kind,
        "title": title,
        "description": f"{description} `{metric}`",
        "datasource": DATASOURCE,
        "targets": targets,
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "noValue": no_value,
                # one step without a value: what judges is what the exporter exposes, never a figure in the board
                "thresholds": {"mode": "absolute", "steps": [{"color": NEUTRAL, "value": None}]},
                "custom": custom or {},
                **(defaults or {}),
            },
            "overrides": _overrides(queries, names or {}),
        },
        "options": options,
    }


# --- panels ----------------------------------------------------------------------------------------------------------


def stat(
    title: str,
    *queries: Query,
    description: str,
    metric: str,
    unit: str,
    no_value: str,
    text: str = "value_and_name",
    fill: bool = False,
    decimals: int | None = None,
    names: Mapping[str, Style] | None = None,
    mappings: list[Json] | None = None,
    sizes: Json | None = None,
) -> Json:
    """Show the newest value of each series as a tile; `text` is value, name or value_and_name, `fill` colours it."""
    defaults: Json = {"color": {"mode": "thresholds"}}
    if decimals is not None:
        defaults["decimals"] = decimals
    if mappings:
        defaults["mappings"] = mappings
    options: Json = {
        "colorMode": "background_solid" if fill else "value",
        "graphMode": "none",
        "justifyMode": "center" if fill else "auto",
        "orientation": "horizontal" if fill else "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": text,
        "wideLayout": True,
    }
    if sizes:
        options["text"] = sizes
    return _panel(
        "stat",
        title,
        queries,
        description=description,
        metric=metric,
        unit=unit,
        no_value=no_value,
        options=options,
        defaults=defaults,
        names=names,
        targets=_targets(queries, instant=True),
    )


def timeseries(
    title: str,
    *queries: Query,
    description: str,
    metric: str,
    unit: str,
    no_value: str = NO_TRAFFIC,
    stacked: bool = False,
    bars: bool = False,
    log_scale: bool = False,
    ceiling: float | None = None,
    smallest_step: str = "",
    names: Mapping[str, Style] | None = None,
) -> Json:
    """Draw lines over time from 0 (to `ceiling`); `smallest_step` is the least a point stands for, such as `1m`."""
    custom: Json = {
        "drawStyle": "bars" if bars else "line",
        "lineInterpolation": "stepBefore" if stacked else "linear",  # a share is that of the interval before its point
        "lineWidth": 0 if stacked or bars else 2,
        "fillOpacity": 75 if stacked or bars else 8,
        "showPoints": "never",
        "spanNulls": False,
    }
    if stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    if log_scale:
        custom["scaleDistribution"] = {"type": "symlog", "log": 10, "linearThreshold": 1}
    defaults: Json = {"color": {"mode": "palette-classic"}, "min": 0}
    if ceiling is not None:
        defaults["max"] = ceiling
    panel = _panel(
        "timeseries",
        title,
        queries,
        description=description,
        metric=metric,
        unit=unit,
        no_value=no_value,
        options={
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        defaults=defaults,
        custom=custom,
        names=names,
        targets=_targets(queries, instant=False),
    )
    return panel | ({"interval": smallest_step} if smallest_step else {})


def table(
    title: str,
    query: Query,
    *,
    description: str,
    metric: str,
    no_value: str,
    columns: Mapping[str, Style],
    unit: str = "string",
    header: bool = True,
    labels_as_rows: bool = False,
) -> Json:
    """Show the labels of an instant query as columns, or of its one series as rows (columns `label` and `value`).

    `columns` gives their order and their look.
    """
    steps: list[Json] = [{"id": "labelsToFields", "options": {"mode": "rows"}}] if labels_as_rows else []
    hidden = {} if labels_as_rows else {"Time": True, "Value": True}
    order = {name: index for index, name in enumerate(columns)}
    steps.append({"id": "organize", "options": {"excludeByName": hidden, "indexByName": order, "renameByName": {}}})
    panel = _panel(
        "table",
        title,
        (query,),
        description=description,
        metric=metric,
        unit=unit,
        no_value=no_value,
        options={"cellHeight": "sm", "showHeader": header},
        defaults={"color": {"mode": "thresholds"}},
        custom={"align": "left", "cellOptions": {"type": "auto"}, "inspect": False},
        names=columns,
        targets=_targets((query,), instant=True, form="time_series" if labels_as_rows else "table"),
    )
    return panel | {"transformations": steps}


def state_timeline(
    title: str, *queries: Query, description: str, metric: str, mappings: list[Json], no_value: str, unit: str = "none"
) -> Json:
    """Show which state each series was in, in the colours of the mappings.

    With threshold colours Grafana 12.2 merges by range and drops the words.
    """
    return _panel(
        "state-timeline",
        title,
        queries,
        description=description,
        metric=metric,
        unit=unit,
        no_value=no_value,
        options={
            "alignValue": "left",
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False, "calcs": []},
            "mergeValues": True,
            "rowHeight": 0.85,
            "showValue": "auto",
            "tooltip": {"mode": "single", "sort": "none"},
        },
        defaults={"color": {"mode": "fixed", "fixedColor": QUIET}, "mappings": mappings},
        custom={"fillOpacity": 80, "lineWidth": 0},
        targets=_targets(queries, instant=False),
    )


# --- the board -------------------------------------------------------------------------------------------------------


def choice(
    name: str, label: str, query: str, description: str, *, all_value: str | None = None, multi: bool = False
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


def annotation(name: str, expr: str, colour: str) -> Json:
    """Mark the times at which `expr` has a sample."""
    return {
        "name": name,
        "datasource": DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": colour,
        "target": {"refId": "Anno", "expr": expr},
    }


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
    """Build a whole board: ids count from 1 in reading order, positions follow from chapters and shelves."""
    panels: list[Json] = []
    top = 0
    for chapter in chapters:
        row = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": chapter.title,
                "collapsed": False,
                "gridPos": row,
                "panels": [],
            }
        )
        top += 1
        for shelf in chapter.shelves:
            for panel, (left, width) in zip(shelf.panels, shelf.places(), strict=True):
                place = {"x": left, "y": top, "w": width, "h": shelf.height}
                panels.append({"id": len(panels) + 1, "gridPos": place, **panel})
            top += shelf.height
    source = {
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
    others = {
        "type": "dashboards",
        "title": "More boards",
        "tags": [TAG],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
        "icon": "external link",
        "targetBlank": False,
        "tooltip": "",
        "url": "",
    }
    return {
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
        "links": [others, *links],
        "annotations": {"list": list(annotations)},
        "templating": {"list": [source, *variables]},
        "panels": panels,
    }
