"""Every capture, recording and log with a known count: retractions, failures, starts, HTTP 5xx.

Truth: `cases/counts.yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from truth.cases import WAYS, Answer, Case, Checks, data
from truth.recording import ROOT, read

# The check: the name of the count in the file, in the JSON of `report`, and on the exporter's page.
KINDS = {
    "retractions": ("retraction_events", "retraction_events", "sglang_tuning_retraction_events_total"),
    "retracted requests": ("retracted_requests", "retracted_requests", "sglang_tuning_retracted_requests_total"),
    "failures": ("out_of_memory", r"out_of_memory\.\w+", "sglang_tuning_out_of_memory_total"),
    "starts": ("server_starts", "server_starts", "sglang_tuning_server_starts_total"),
}
# A full queue's 503 have a count of their own.
STATUSES = {
    500: (
        r"\w*(server_errors|failed_requests|5xx)\w*",
        r"sglang_tuning_\w*(server_errors|failed_requests|5xx)\w*_total",
    ),
    503: (r"rejected_requests", "sglang_tuning_rejected_requests_total"),
}


def cases() -> list[Case]:
    """One case for each input of which a count is known."""
    made = []
    for name, known in data("counts.yaml").items():
        place = ROOT / name
        ways = ("report", "log") if place.suffix in {".log", ".gz"} else WAYS
        made.append(Case(name, partial(read, place), partial(check, known), ways))
    return made


def check(known: Mapping[str, Any], way: str, answers: Sequence[Answer]) -> Checks:
    """Compare each known count with the last answer."""
    last, checks = answers[-1], {}
    for kind, (name, in_report, on_page) in KINDS.items():
        # Metrics alone show no events: only how many requests were retracted.
        if known[name] is not None and (way != "metrics" or kind == "retracted requests"):
            checks[kind] = _compare(_said(last, way, in_report, on_page), known[name])
    if way != "metrics" and known["responses_5xx"] is not None:
        wrong = [
            f"{compared} with {status}"
            for status, count in (known["responses_5xx"] or {}).items()
            if (compared := _compare(_said(last, way, *STATUSES[status]), count))
        ]
        checks["5xx"] = "; ".join(wrong)
    return checks


def _said(answer: Answer, way: str, in_report: str, on_page: str) -> float:
    """Return the count that is given, over all ranks and phases; 0 where none is."""
    if way == "report":
        return sum(value for name, value in answer.counts.items() if re.fullmatch(in_report, name))
    return sum(value for name, value in answer.metrics.items() if re.fullmatch(on_page, name.partition("{")[0]))


def _compare(said: float, right: float) -> str:
    return "" if said == right else f"{said:g} of {right:g}"
