"""Alert rules, Alertmanager configuration and notification templates, from the table of diagnoses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from sglang_tuning_exporter.config.profiles import DEFAULT
from sglang_tuning_exporter.core.rows import CHANCES, FAILURES, LIMITS, OBJECTIVES, Row
from sglang_tuning_exporter.core.runbooks import ALERTS, INHIBITIONS, MOST_SEVERE_FIRST, PROMETHEUS, figures, filled
from sglang_tuning_exporter.mixin import native
from sglang_tuning_exporter.mixin.annotations import DEFAULT_LINKS, Links, alert_annotations
from sglang_tuning_exporter.mixin.identity import POOL, SERVER, TARGET, listed
from sglang_tuning_exporter.mixin.rendering import render

WINDOW = (
    "15m"  # an exporter's last word holds for so long: longer than SGLangTuningExporterDown needs, and than a restart
)
MOST_RULES = 14  # of a group, which is evaluated one rule after the other
_SECONDS_IN = {"s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(?<![\w.])(\d+)([smh])(?![\w.])")
_OF_RULES = re.compile(r"(?<=\[)\d+[smh](?=\])|(?<=\boffset )\d+[smh]|(?<= for: )\d+[smh]")  # the rest is prose


def scaled(text: str, time_scale: float) -> str:
    """Return `text` with every duration divided by `time_scale`, in milliseconds where that is not a whole second."""
    if time_scale == 1:
        return text

    def shorter(match: re.Match[str]) -> str:
        milliseconds = round(1000 * int(match[1]) * _SECONDS_IN[match[2]] / time_scale)
        return f"{milliseconds // 1000}s" if milliseconds % 1000 == 0 else f"{milliseconds}ms"

    return _DURATION.sub(shorter, text)


def groups() -> dict[str, list[Row]]:
    """Return the rows that have an alert by the name of their group."""
    found: dict[str, list[Row]] = {}
    for name, rows in {"failures": FAILURES, "limits": LIMITS, "objectives": (*OBJECTIVES, *CHANCES)}.items():
        notified = [row for row in rows if row.alert]
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


def files(time_scale: float = 1.0, links: Links = DEFAULT_LINKS) -> dict[str, str]:
    """Return rules, Alertmanager configuration and notification templates: repository path → text."""
    values = {
        "scaled": partial(scaled, time_scale=time_scale),
        "seconds": lambda number: f"{number / time_scale:g}",
        "groups": groups(),
        "prometheus": {row.id: row for row in PROMETHEUS},
        "annotations": lambda row: alert_annotations(row, links),
        "filled": lambda text: filled(text, figures(DEFAULT)),
        "quoted": lambda text: "'" + text.replace("'", "''") + "'",
        "severe": MOST_SEVERE_FIRST,
        "inhibitions": list(_inhibitions()),
        "pool": listed(POOL),
        "server": listed(SERVER),
    }
    rules = render("rules.yml.j2", **values)
    return {
        "alerts/rules/sglang-tuning.rules.yml": _OF_RULES.sub(lambda match: scaled(match[0], time_scale), rules),
        native.FILE: native.text(),
        "alerts/alertmanager.yml": render("alertmanager.yml.j2", **values),
        "alerts/templates/sglang-tuning.tmpl": render("notification.tmpl.j2", **values),
    }
