"""When the alert of a row holds: as PromQL for Prometheus, and over the samples of a report. Both have the same meaning."""

from __future__ import annotations

from typing import Protocol

from sglang_tuning_exporter.diagnosis.conditions.condition import SERVING_SECONDS, WINDOW, Samples
from sglang_tuning_exporter.diagnosis.promql import ON, last_known, one_of
from sglang_tuning_exporter.diagnosis.row import Diagnosis
from sglang_tuning_exporter.diagnosis.table import BY_ID


class JudgedSamples(Samples, Protocol):
    """Samples, and what the exporter found."""

    def found(self, row: Diagnosis) -> bool:
        """Return whether a row was a finding within the window, or is not used with the profile."""


def expression(row: Diagnosis) -> list[str]:
    """Return the PromQL of the rule, as lines."""
    lines = row.condition.promql()
    if row.profiles:
        served = last_known(f"sglang_tuning_server_info{{{one_of('profile', row.profiles)}}}")
        lines.append(f"and {ON} {served}")
    if row.needs_advice:
        # If the flag already has its best value, or a more urgent finding changes it, there is nothing to notify.
        active = f'max_over_time(sglang_tuning_diagnosis_active{{diagnosis="{row.id}"}}[{WINDOW}])'
        lines.append(f"unless {ON} {active} == 0")
    causes = dict.fromkeys(tuple(BY_ID[other].condition.promql_as_cause(row.condition)) for other in row.unless)
    return lines + [line for cause in causes for line in (f"unless {ON} (", *("  " + each for each in cause), ")")]


def query(row: Diagnosis, serving_seconds: float = SERVING_SECONDS) -> str:
    """Return the PromQL of the rule; `serving_seconds` is the least serving time for a share."""
    return "\n".join(expression(row)).replace("SERVING_SECONDS", f"{serving_seconds:g}")


def is_evaluated(row: Diagnosis, profile: str) -> bool:
    """Return whether a log alone can show that it holds."""
    return row.condition.is_in_logs and (not row.profiles or profile in row.profiles)


def fires(row: Diagnosis, samples: JudgedSamples) -> bool:
    """Evaluate the rule over the samples of a log."""
    if not row.condition.fires(samples):
        return False
    if any(BY_ID[other].condition.holds_as_cause(row.condition, samples) for other in row.unless):
        return False
    return not row.needs_advice or samples.found(row)  # a full judgement costs the most
