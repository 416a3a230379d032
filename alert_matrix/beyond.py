"""What no rule can do: combinations that may fail, each with its reason. One that passes is reported as well, so that the list stays short."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from alert_matrix.columns import Run
from alert_matrix.verdict import Fault, Verdict


@dataclass(frozen=True)
class Beyond:
    """Runs in which some faults are nobody's."""

    reason: str
    faults: frozenset[Fault]
    holds: Callable[[Run], bool]


BEYOND: tuple[Beyond, ...] = (
    Beyond(
        "A rule has nothing to look at while Prometheus stores nothing for 12 minutes: the alert ends and comes again.",
        frozenset({"broken"}),
        lambda run: run.column.misses == "12 min without, later" and run.case.seen_for is None,
    ),
)


def reason(verdict: Verdict) -> str:
    """Say why a fault is nobody's; empty where it is the rules'."""
    for each in BEYOND:
        if verdict.fault and verdict.fault in each.faults and each.holds(verdict.run):
            return each.reason
    return ""
