"""The table of diagnoses as Prometheus rules and Alertmanager configuration."""

from __future__ import annotations

import re

from sglang_tuning_exporter.diagnosis.advice import REASONS
from sglang_tuning_exporter.diagnosis.alerting import query
from sglang_tuning_exporter.diagnosis.conditions.condition import SERVING_SECONDS
from sglang_tuning_exporter.diagnosis.promql import SECONDS_IN
from sglang_tuning_exporter.diagnosis.row import URGENCY, Diagnosis
from sglang_tuning_exporter.diagnosis.table import ALERTS, MOST_SEVERE_FIRST
from sglang_tuning_exporter.mixin.annotations import DEFAULT_LINKS, Links, alert_annotations
from sglang_tuning_exporter.mixin.records import records
from sglang_tuning_exporter.mixin.rendering import render

_DURATION = re.compile(r"(?<![\w.])(\d+)([smh])(?![\w.])")


def scaled(text: str, time_scale: float) -> str:
    """Return `text` with every duration divided by `time_scale`, in milliseconds where that is not a whole second."""
    if time_scale == 1:
        return text

    def shorter(match: re.Match[str]) -> str:
        milliseconds = round(1000 * int(match[1]) * SECONDS_IN[match[2]] / time_scale)
        return f"{milliseconds // 1000}s" if milliseconds % 1000 == 0 else f"{milliseconds}ms"

    return _DURATION.sub(shorter, text)


def is_inhibited_by(row: Diagnosis, other: Diagnosis) -> bool:
    """Return whether `row` is not notified while `other` fires for the same server.

    Only by its cause, or by an alert that explains everything else about a server (`Diagnosis.inhibits`). Never by its own
    consequence, nor by a less urgent alert, which may go to nobody. An alert about a job has no server: it inhibits no alert
    and is inhibited by none.
    """
    if "job" in {row.about, other.about}:
        return False
    if row is other or row.id in other.causes or URGENCY[other.severity] < URGENCY[row.severity]:
        return False
    if other.id in row.causes:
        return not row.notified_as_well
    return other.inhibits is not None and row.inhibits is None and URGENCY[row.severity] <= URGENCY[other.inhibits]


def _inhibitions() -> dict[tuple[str, ...], list[str]]:
    """Return the alerts that others inhibit, by those that inhibit them."""
    inhibited: dict[tuple[str, ...], list[str]] = {}
    for row in ALERTS:
        if sources := tuple(other.alert for other in ALERTS if is_inhibited_by(row, other)):
            inhibited.setdefault(sources, []).append(row.alert)
    return inhibited


def files(time_scale: float = 1.0, links: Links = DEFAULT_LINKS) -> dict[str, str]:
    """Return rules, Alertmanager configuration and notification templates: repository path → text."""
    values = {
        "records": tuple(records()),
        "alerts": ALERTS,
        "expression": lambda row: scaled(query(row, SERVING_SECONDS / time_scale), time_scale),
        "annotations": lambda row: alert_annotations(row, links),
        "severe": MOST_SEVERE_FIRST,
        "inhibitions": _inhibitions(),
        "scaled": lambda text: scaled(text, time_scale),
        "reasons": REASONS,
    }
    targets = {
        "alerts/rules/sglang-tuning.rules.yml": "rules.yml.j2",
        "alerts/alertmanager.yml": "alertmanager.yml.j2",
        "alerts/templates/sglang-tuning.tmpl": "notification.tmpl.j2",
    }
    return {path: render(template, **values) for path, template in targets.items()}
