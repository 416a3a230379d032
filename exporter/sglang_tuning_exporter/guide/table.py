"""The one table of diagnoses: what is seen, how often it must be seen, what to turn, what that costs, and when it will not help.

Alerts, recording rules, live findings, reports, notifications, runbooks and the README's table come from it, most urgent row
first. `guide` names the sentence in SGLang's hyperparameter tuning guide (editions E1 oldest to E5 newest; C the Chinese one) in our
own words.
"""

from __future__ import annotations

from sglang_tuning_exporter.guide.candidates import CANDIDATE_DIAGNOSES, LATENCY_DIAGNOSES
from sglang_tuning_exporter.guide.diagnosis import Diagnosis
from sglang_tuning_exporter.guide.liveness import LIVENESS_DIAGNOSES
from sglang_tuning_exporter.guide.memory import FAILURE_DIAGNOSES, GRAPH_DIAGNOSES, RESERVE_DIAGNOSES
from sglang_tuning_exporter.guide.objectives import OBJECTIVE_DIAGNOSES
from sglang_tuning_exporter.guide.scheduling import CLIENT_DIAGNOSES, SCHEDULING_DIAGNOSES
from sglang_tuning_exporter.guide.telling import SOURCE_DIAGNOSES

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
ALERTS: tuple[Diagnosis, ...] = tuple(row for row in DIAGNOSES if row.alert)
