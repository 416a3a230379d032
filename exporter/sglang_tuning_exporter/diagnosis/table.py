"""The table of diagnoses: what is seen, how often, which flag to change, what it costs, and when it does not help.

Alerts, recording rules, live findings, reports, notifications and runbooks come from it. The most urgent row is
first. `guide` summarises SGLang's tuning guide, with the section's heading where it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sglang_tuning_exporter.diagnosis.row import URGENCY, Diagnosis
from sglang_tuning_exporter.diagnosis.rows.candidates import CANDIDATE_DIAGNOSES, LATENCY_DIAGNOSES
from sglang_tuning_exporter.diagnosis.rows.data_sources import SOURCE_DIAGNOSES
from sglang_tuning_exporter.diagnosis.rows.liveness import LIVENESS_DIAGNOSES
from sglang_tuning_exporter.diagnosis.rows.memory import FAILURE_DIAGNOSES, GRAPH_DIAGNOSES, RESERVE_DIAGNOSES
from sglang_tuning_exporter.diagnosis.rows.objectives import OBJECTIVE_DIAGNOSES
from sglang_tuning_exporter.diagnosis.rows.scheduling import CLIENT_DIAGNOSES, SCHEDULING_DIAGNOSES

DIAGNOSES: tuple[Diagnosis, ...] = (
    *LIVENESS_DIAGNOSES,
    *FAILURE_DIAGNOSES,
    *SCHEDULING_DIAGNOSES,
    *GRAPH_DIAGNOSES,
    *RESERVE_DIAGNOSES,
    *LATENCY_DIAGNOSES,
    *CLIENT_DIAGNOSES,
    *CANDIDATE_DIAGNOSES,
    *SOURCE_DIAGNOSES,
    *OBJECTIVE_DIAGNOSES,
)
BY_ID: dict[str, Diagnosis] = {row.id: row for row in DIAGNOSES}


def causes_first(rows: Iterable[str], causes_of: Callable[[str], Iterable[str]]) -> list[str]:
    """Return rows in their order, but each after its causes."""
    order: dict[str, None] = {}
    begun: set[str] = set()

    def add(row: str) -> None:
        if row not in begun:
            begun.add(row)
            for cause in causes_of(row):
                add(cause)
            order[row] = None

    for row in rows:
        add(row)
    return list(order)


ALERTS: tuple[Diagnosis, ...] = tuple(
    BY_ID[row] for row in causes_first(BY_ID, lambda row: BY_ID[row].causes) if BY_ID[row].alert
)
BY_ALERT: dict[str, Diagnosis] = {row.alert: row for row in ALERTS}
# Causes stay before their consequences.
MOST_SEVERE_FIRST: tuple[Diagnosis, ...] = tuple(sorted(ALERTS, key=lambda row: -URGENCY[row.severity]))
