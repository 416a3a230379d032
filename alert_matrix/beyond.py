"""What no rule can do: combinations that may fail, each with its reason. One that passes is reported as well, so that the list stays short."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from alert_matrix.columns import AT_THE_START, HALF, LATER, MISSES, OFTEN_LOST, Run
from alert_matrix.verdict import Fault, Verdict

# Scrapes so far apart, in seconds, that a few misses in a row empty a window.
SELDOM = 60


@dataclass(frozen=True)
class Beyond:
    """Runs with faults that no rule can avoid."""

    reason: str
    faults: frozenset[Fault]
    holds: Callable[[Run], bool]


BEYOND: tuple[Beyond, ...] = (
    Beyond(
        "A server that was away twice and is restarted has been away three times, so SGLangOftenDown fires.",
        frozenset({"false"}),
        lambda run: run.case.row.id == "often_down" and run.column.disturbance == "server restarts",
    ),
    Beyond(
        "A share of two hours is one of what was stored: under new labels and without 12 minutes, what is left weighs more.",
        frozenset({"false"}),
        lambda run: (
            run.case.row.id == "often_down" and run.column.disturbance == "target relabelled" and run.has_long_gap
        ),
    ),
    Beyond(
        "Half an hour of scrapes cannot be counted within 12 minutes in which Prometheus stores nothing.",
        frozenset({"late"}),
        lambda run: run.column.misses == AT_THE_START and run.case.row.id == "scraped_too_seldom",
    ),
    Beyond(
        "Prometheus stores nothing for 12 minutes and so has nothing to look at: the alert ends and comes again.",
        frozenset({"broken"}),
        lambda run: run.column.misses == LATER and run.case.seen_for is None,
    ),
    Beyond(
        "The half hour in which starts are counted begins within 12 minutes without a sample: how many it holds is not known.",
        frozenset({"ended early"}),
        lambda run: run.column.misses == LATER and run.case.counts_starts,
    ),
    Beyond(
        "A DP rank that has just come needs two scrapes before its counter counts: long where half of them fail, or two minutes lie between.",
        frozenset({"late"}),
        lambda run: (
            run.column.disturbance == "DP ranks come and go"
            and (run.column.misses == HALF or run.column.scrape > SELDOM)
        ),
    ),
    Beyond(
        "An exporter that starts anew while the alert is pending must see the silence of a minute again, and the alert waits again.",
        frozenset({"late"}),
        lambda run: run.case.row.id == "log_silent" and run.column.disturbance == "exporter restarts",
    ),
    Beyond(
        "The exporter starts anew, and counts from 0, before Prometheus has seen the event: it needs a --state-file.",
        frozenset({"never", "late"}),
        lambda run: (
            run.column.disturbance == "exporter restarts"
            and (run.case.seen_for is not None or run.case.counts_starts or run.case.row.id == "metrics_disabled")
            and (
                run.is_unseen_before_restart or run.column.misses in {AT_THE_START, HALF} or run.column.scrape >= SELDOM
            )
        ),
    ),
    Beyond(
        "With half of the scrapes failing a minute apart, or one in five two minutes apart, none may come within five minutes.",
        frozenset({"never", "late", "broken", "ended early"}),
        lambda run: MISSES[run.column.misses] * run.column.scrape >= OFTEN_LOST,
    ),
    Beyond(
        "Alerts keep the labels of their target, by which notifications are routed: under other labels an alert begins anew, and the old one ends.",
        frozenset({"never", "late", "broken", "ended early"}),
        lambda run: run.column.disturbance == "target relabelled",
    ),
    Beyond(
        "The target gets other labels while Prometheus is away: its counters are new series, and an event of the last half hour notifies again.",
        frozenset({"broken"}),
        lambda run: (
            run.column.misses == LATER
            and run.case.seen_for is not None
            and run.column.disturbance == "target relabelled"
        ),
    ),
)


def idle(failed: Iterable[str]) -> list[str]:
    """Give the reasons that no combination of a whole matrix needed: `failed` are those that its outcomes have."""
    needed = set(failed)
    return [each.reason for each in BEYOND if each.reason not in needed]


def reason(verdict: Verdict) -> str:
    """Return why no rule can avoid a fault; empty where the rules are at fault."""
    for each in BEYOND:
        if verdict.fault and verdict.fault in each.faults and each.holds(verdict.run):
            return each.reason
    return ""
