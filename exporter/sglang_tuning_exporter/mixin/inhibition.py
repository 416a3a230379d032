"""Inhibition: an alert is not notified while its cause fires."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_tuning_exporter.diagnosis.row import URGENCY, Diagnosis
from sglang_tuning_exporter.diagnosis.table import ALERTS


def is_hidden_by(row: Diagnosis, other: Diagnosis) -> bool:
    """Whether `row` is not notified while `other` fires for the same server.

    Only by its cause, or by an alert that explains everything else about a server (`Diagnosis.hides`). Never by its own
    consequence, nor by a less urgent alert, which may go to nobody. An alert about a job has no server: it hides no alert
    and is hidden by none.
    """
    if "job" in {row.about, other.about}:
        return False
    if row is other or row.id in other.causes or URGENCY[other.severity] < URGENCY[row.severity]:
        return False
    if other.id in row.causes:
        return not row.notified_beside
    return other.inhibits is not None and row.inhibits is None and URGENCY[row.severity] <= URGENCY[other.inhibits]


def inhibitions() -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield the alerts that hide and those that they hide, each pair once."""
    hidden: dict[tuple[str, ...], list[str]] = {}
    for row in ALERTS:
        sources = tuple(other.alert for other in ALERTS if is_hidden_by(row, other))
        if sources:
            hidden.setdefault(sources, []).append(row.alert)
    for sources, targets in hidden.items():
        yield sources, tuple(targets)
