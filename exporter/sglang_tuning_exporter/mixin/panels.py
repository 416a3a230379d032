"""Builders of Grafana panels as JSON. Pure.

No board's content is here. Every builder requires a title, a description, the metric at its end, a unit and the words for
"No data". Positions and ids come from `board.board`. The JSON is that of schema 39, which Grafana 10.4 and newer read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Required, Unpack

Json: TypeAlias = dict[str, Any]
Style: TypeAlias = "Mapping[str, Any]"

DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}

# $__rate_interval is four times this, whatever the data source's scrape interval: scrapes two minutes apart still
# give a rate.
SMALLEST_STEP = "1m"
NO_TRAFFIC = "No request answered, or only the log is read"  # a log has no latencies
TILE: Json = {"titleSize": 14, "valueSize": 30}  # pixels
NOT_REPORTED = "Not reported"  # by this release, by this kind of server, or because it is down

# Green: fine. Amber: requests are held back. Red: act. Blue: information. Grey: idle or unknown.
# White text on each, and each as text on white, has a contrast of at least 4.5 : 1 (WCAG AA); as large text on Grafana's dark
# background 3 : 1.
GOOD, WATCH, BAD, NEUTRAL, QUIET = "#37872d", "#c2570c", "#d42a3f", "#3274d9", "#6e7280"
# A column of sentences: for Grafana before 12.2, and since.
WRAPPED: Style = {"custom.cellOptions": {"type": "auto", "wrapText": True}, "custom.wrapText": True}
# For lines side by side that are not judged.
COLOURS = (NEUTRAL, "#a352cc", "#0f9a96", "#b8782c", "#e0559d", "#8ab8ff", "#7a6a58")


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression of a panel, the name of its series, and its look (override property -> value)."""

    expr: str
    legend: str = "__auto"
    style: Style = field(default_factory=dict)


class PanelOptions(TypedDict, total=False):
    """What every panel has. `names` are overrides by the name of a series."""

    description: Required[str]
    metric: Required[str]
    unit: str
    no_value: str
    names: Mapping[str, Style] | None


# --- looks -----------------------------------------------------------------------------------------------------------


def painted(colour: str, **custom: Any) -> Json:
    """Set a fixed colour and custom properties of the panel type (`lineWidth=2`)."""
    return {
        "color": {"mode": "fixed", "fixedColor": colour},
        **{f"custom.{key}": value for key, value in custom.items()},
    }


def measured(colour: str = NEUTRAL, **custom: Any) -> Json:
    """Draw the panel's main series in shades of one colour, one for each DP rank or pool."""
    return painted(colour, **custom) | {"color": {"mode": "shades", "fixedColor": colour}}


def named(text: str, colour: str) -> Json:
    """Show a series under other words and in a fixed colour."""
    return {"displayName": text, **painted(colour)}


def bound_line(colour: str, **custom: Any) -> Json:
    """Draw the thin dashed line of a threshold."""
    dashed = {"lineWidth": 1, "fillOpacity": 0, "lineStyle": {"fill": "dash", "dash": [8, 6]}}
    return painted(colour, **(dashed | custom))


def _look(words: str | tuple[str, str]) -> Json:
    return {"text": words} if isinstance(words, str) else dict(zip(("text", "color"), words, strict=True))


def texts(mapping: Mapping[str, str] | Mapping[str, tuple[str, str]]) -> list[Json]:
    """Map exact values to words, or to words and a colour."""
    return [{"type": "value", "options": {value: _look(words) for value, words in mapping.items()}}]


def ranges(mapping: Mapping[str, tuple[str, str]]) -> list[Json]:
    """Map values from each whole number up to the next one to words and a colour."""
    return [
        {"type": "range", "options": {"from": int(value), "to": int(value) + 0.999, "result": _look(words)}}
        for value, words in mapping.items()
    ]


def steps(lowest: str, *higher: tuple[float, str]) -> Json:
    """Thresholds: the colour below the first figure, then each (figure, colour)."""
    return {
        "mode": "absolute",
        "steps": [{"color": colour, "value": value} for value, colour in ((None, lowest), *higher)],
    }


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
    # one step for all lines of a panel, so that their points align
    step = {"interval": SMALLEST_STEP} if any("$__rate_interval" in query.expr for query in queries) else {}
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
            **step,
        }
        for index, query in enumerate(queries)
    ]


def _panel(
    kind: str,
    title: str,
    queries: Sequence[Query],
    *,
    options: Json,
    targets: list[Json],
    defaults: Json | None = None,
    custom: Json | None = None,
    **facts: Unpack[PanelOptions],
) -> Json:
    return {
        "type": kind,
        "title": title,
        "description": f"{facts['description']} `{facts['metric']}`",
        "datasource": DATASOURCE,
        "targets": targets,
        "fieldConfig": {
            "defaults": {
                "unit": facts.get("unit", "none"),
                "noValue": facts.get("no_value", NOT_REPORTED),
                # boards have no thresholds of their own; words for no value are grey
                "thresholds": steps(QUIET, (0, NEUTRAL)),
                "custom": custom or {},
                **(defaults or {}),
            },
            "overrides": _overrides(queries, facts.get("names") or {}),
        },
        "options": options,
    }


# --- panels ----------------------------------------------------------------------------------------------------------


def stat(
    title: str,
    *queries: Query,
    text: str = "value_and_name",
    fill: bool = False,
    decimals: int | None = None,
    mappings: list[Json] | None = None,
    sizes: Json = TILE,
    **facts: Unpack[PanelOptions],
) -> Json:
    """Show the newest value of each series as a tile; `text` is value, name or value_and_name, `fill` colours the background."""
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
        "wideLayout": False,  # the name stands above the value, however wide the tile is
        "text": sizes,
    }
    return _panel(
        "stat",
        title,
        queries,
        options=options,
        defaults=defaults,
        targets=_targets(queries, instant=True),
        **facts,
    )


def timeseries(
    title: str,
    *queries: Query,
    stacked: bool = False,
    ceiling: float | None = None,
    fill: int = 8,
    **facts: Unpack[PanelOptions],
) -> Json:
    """Draw lines over time from 0 (to `ceiling`)."""
    custom: Json = {
        "drawStyle": "line",
        "lineInterpolation": "stepBefore" if stacked else "linear",  # a share is of the interval before its point
        "lineWidth": 0 if stacked else 2,
        "fillOpacity": 75 if stacked else fill,
        "showPoints": "never",
        "spanNulls": False,
    }
    if stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    defaults: Json = {"color": {"mode": "palette-classic"}, "min": 0}
    if ceiling is not None:
        defaults["max"] = ceiling
    facts = {"unit": "short", **facts}
    return _panel(
        "timeseries",
        title,
        queries,
        options={
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        defaults=defaults,
        custom=custom,
        targets=_targets(queries, instant=False),
        **facts,
    )


def heatmap(title: str, query: Query, *, axis_unit: str, **facts: Unpack[PanelOptions]) -> Json:
    """Draw the buckets of a histogram (series by `le`) over time, `axis_unit` on the left."""
    facts = {"unit": "short", **facts}
    return _panel(
        "heatmap",
        title,
        (query,),
        options={
            "calculate": False,
            "cellGap": 1,
            # the square root makes a few slow requests visible beside many fast ones
            "color": {"mode": "scheme", "scheme": "Blues", "exponent": 0.5, "scale": "exponential", "steps": 64},
            "exemplars": {"color": "rgba(255,0,255,0.7)"},
            "filterValues": {"le": 1e-9},
            "legend": {"show": False},
            "rowsFrame": {"layout": "auto", "value": "requests per second"},
            "tooltip": {"mode": "single", "showColorScale": False, "yHistogram": False},
            "yAxis": {"axisPlacement": "left", "reverse": False, "unit": axis_unit},
        },
        custom={"hideFrom": {"legend": False, "tooltip": False, "viz": False}},
        targets=_targets((query,), instant=False, form="heatmap"),
        **facts,
    )


def bars(
    title: str,
    *queries: Query,
    decimals: int | None = None,
    **facts: Unpack[PanelOptions],
) -> Json:
    """Show the newest value of each series as a horizontal bar on one scale from 0."""
    defaults: Json = {"color": {"mode": "fixed", "fixedColor": NEUTRAL}, "min": 0}
    if decimals is not None:
        defaults["decimals"] = decimals
    return _panel(
        "bargauge",
        title,
        queries,
        options={
            "displayMode": "basic",
            "maxVizHeight": 300,
            "minVizHeight": 16,
            "minVizWidth": 8,
            "namePlacement": "auto",
            "orientation": "horizontal",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "showUnfilled": True,
            "sizing": "auto",
            "valueMode": "color",
        },
        defaults=defaults,
        targets=_targets(queries, instant=True),
        **facts,
    )


def table(
    title: str,
    *queries: Query,
    columns: Mapping[str, Style],
    header: bool = True,
    labels_as_rows: bool = False,
    worst_first: str = "",
    **facts: Unpack[PanelOptions],
) -> Json:
    """Show the labels of instant queries as columns, or those of one series as rows (columns `label` and `value`).

    Several queries become one row where the labels that all of them have are equal; their values are `Value #A`, ….
    `columns` gives the order of what is shown and its look; anything else is left out. `worst_first` names the column to sort by.
    """
    if labels_as_rows:
        steps: list[Json] = [{"id": "labelsToFields", "options": {"mode": "rows"}}]
    else:
        steps = [{"id": "merge", "options": {}}] if len(queries) > 1 else []
        if worst_first:
            steps.append({"id": "sortBy", "options": {"fields": {}, "sort": [{"field": worst_first, "desc": True}]}})
        shown = "|".join(columns)
        steps.append({"id": "filterFieldsByName", "options": {"include": {"pattern": f"^({shown})$"}}})
    facts = {"unit": "string", **facts, "names": columns}
    order = {name: index for index, name in enumerate(columns)}
    steps.append({"id": "organize", "options": {"excludeByName": {}, "indexByName": order, "renameByName": {}}})
    panel = _panel(
        "table",
        title,
        queries,
        options={"cellHeight": "sm", "showHeader": header},
        defaults={"color": {"mode": "thresholds"}},
        custom={"align": "left", "cellOptions": {"type": "auto"}, "inspect": False},
        **facts,
        targets=_targets(queries, instant=True, form="time_series" if labels_as_rows else "table"),
    )
    return panel | {"transformations": steps}


def state_timeline(
    title: str,
    *queries: Query,
    mappings: list[Json],
    words_inside: bool = True,
    **facts: Unpack[PanelOptions],
) -> Json:
    """Show which state each series was in, in the colours of the mappings or of `names`.

    With threshold colours Grafana 12.2 merges by range and drops the words.
    """
    return _panel(
        "state-timeline",
        title,
        queries,
        options={
            "alignValue": "left",
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False, "calcs": []},
            "mergeValues": True,
            "rowHeight": 0.85,
            "showValue": "auto" if words_inside else "never",
            "tooltip": {"mode": "single", "sort": "none"},
        },
        defaults={"color": {"mode": "fixed", "fixedColor": QUIET}, "mappings": mappings},
        custom={"fillOpacity": 80, "lineWidth": 0},
        targets=_targets(queries, instant=False),
        **facts,
    )
