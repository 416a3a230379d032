"""Alert rules, Alertmanager configuration and notification templates, from the table of diagnoses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from textwrap import indent
from typing import Any

from sglang_tuning_exporter.config.profiles import DEFAULT
from sglang_tuning_exporter.core.rows import CHANCES, FAILURES, LIMITS, OBJECTIVES, Row
from sglang_tuning_exporter.core.runbooks import ALERTS, INHIBITIONS, MOST_SEVERE_FIRST, PROMETHEUS, figures, filled
from sglang_tuning_exporter.mixin import native
from sglang_tuning_exporter.mixin._identity import POOL, SERVER, TARGET, listed
from sglang_tuning_exporter.mixin._rendering import render
from sglang_tuning_exporter.mixin.annotations import DEFAULT_LINKS, Links, alert_annotations
from sglang_tuning_exporter.mixin.wishes import NONE, SEVERITIES, Wishes

WINDOW = (
    "15m"  # an exporter's last word holds for so long: longer than SGLangTuningExporterDown needs, and than a restart
)
MOST_RULES = 14  # of a group, which is evaluated one rule after the other
_SECONDS_IN = {"s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(?<![\w.])(\d+)([smh])(?![\w.])")
_OF_RULES = re.compile(r"(?<=\[)\d+[smh](?=\])|(?<=\boffset )\d+[smh]|(?<=for: )\d+[smh]")  # the rest is prose


def scaled(text: str, time_scale: float) -> str:
    """Return `text` with every duration divided by `time_scale`, in milliseconds where that is not a whole second."""
    if time_scale == 1:
        return text

    def shorter(match: re.Match[str]) -> str:
        milliseconds = round(1000 * int(match[1]) * _SECONDS_IN[match[2]] / time_scale)
        return f"{milliseconds // 1000}s" if milliseconds % 1000 == 0 else f"{milliseconds}ms"

    return _DURATION.sub(shorter, text)


def groups(wishes: Wishes = NONE) -> dict[str, list[Row]]:
    """Return the rows that have an alert by the name of their group."""
    found: dict[str, list[Row]] = {}
    for name, rows in {"failures": FAILURES, "limits": LIMITS, "objectives": (*OBJECTIVES, *CHANCES)}.items():
        notified = [row for row in rows if row.alert and not wishes.of(row.alert).off]
        for begin in range(0, len(notified), MOST_RULES):
            part = notified[begin : begin + MOST_RULES]
            found[f"{name}-{begin // MOST_RULES + 1}" if len(notified) > MOST_RULES else name] = part
    return found


# Two alerts are of the same server where these labels agree; a label that both lack agrees.
_SAME = {"target": TARGET, "server": SERVER, "pool and diagnosis": (*POOL, "diagnosis")}


def _inhibitions() -> Iterator[tuple[str, str, str]]:
    """Give which alerts hold back which: matchers of both, and the labels that agree."""
    exporters = {row.alert for row in PROMETHEUS}
    for each in INHIBITIONS:
        names = set(each.targets)
        matchers = [f'alertname =~ "{"|".join(each.targets)}"']
        if names == {row.alert for row in ALERTS} - set(each.sources):
            matchers = ['alertname =~ "SGLang.+"', f'alertname != "{each.sources[0]}"']
        elif names == {row.alert for row in ALERTS} - exporters:
            matchers = ['alertname =~ "SGLang.+"', 'diagnosis != ""', f'alertname != "{each.sources[0]}"']
        quoted = ", ".join(f"'{matcher}'" for matcher in matchers)
        yield "|".join(each.sources), f"[{quoted}]", listed(_SAME[each.of])


FORMATS = ("prometheus", "prometheusrule", "mimir")
_RULE_FILES = {"sglang-tuning": "alerts/rules/sglang-tuning.rules.yml", "sglang-native": native.FILE}


def _formatted(name: str, text: str, kind: str, metadata: Mapping[str, Any]) -> tuple[str, str]:
    """Return path and text of a rule file in one of the formats; each has a folder of its own, because no program reads another's."""
    if kind == "prometheus":
        return _RULE_FILES[name], text
    comments, _, rules = text.partition("groups:\n")
    if kind == "mimir":
        return f"alerts/mimir/{name}.yml", f"{comments}namespace: {name}\ngroups:\n{rules}"
    own = str(metadata.get("name") or "sglang-tuning")
    named = {**metadata, "name": name.replace("sglang-tuning", own) if name == "sglang-tuning" else f"{own}-native"}
    head = "".join(f"  {key}: {json.dumps(value)}\n" for key, value in named.items())
    document = f"apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n{head}spec:\n  groups:\n"
    return f"alerts/prometheusrule/{name}.yml", f"{comments}{document}{indent(rules, '  ')}"


def files(
    time_scale: float = 1.0, links: Links = DEFAULT_LINKS, wishes: Wishes = NONE, kind: str = "prometheus"
) -> dict[str, str]:
    """Return rules, Alertmanager configuration and notification templates: repository path → text."""
    expected = [wishes.expected[begin : begin + MOST_RULES] for begin in range(0, len(wishes.expected), MOST_RULES)]
    values = {
        "wishes": wishes,
        "expected": expected,
        "json": json.dumps,
        "scaled": partial(scaled, time_scale=time_scale),
        "seconds": lambda number: f"{number / time_scale:g}",
        "groups": groups(wishes),
        "prometheus": {row.id: row for row in PROMETHEUS},
        "annotations": lambda row: alert_annotations(row, links),
        "filled": lambda text: filled(text, figures(DEFAULT)),
        "quoted": lambda text: "'" + text.replace("'", "''") + "'",
        "severe": sorted(MOST_SEVERE_FIRST, key=lambda row: SEVERITIES.index(wishes.severity(row.alert, row.severity))),
        "inhibitions": list(_inhibitions()),
        "pool": listed(POOL),
        "server": listed(SERVER),
    }
    rules = render("rules.yml.j2", **values)
    made = {
        "sglang-tuning": _OF_RULES.sub(lambda match: scaled(match[0], time_scale), rules),
        "sglang-native": native.text(wishes),
    }
    return {
        **dict(_formatted(name, text, kind, wishes.metadata) for name, text in made.items()),
        "alerts/alertmanager.yml": render("alertmanager.yml.j2", **values),
        "alerts/templates/sglang-tuning.tmpl": render("notification.tmpl.j2", **values),
    }
