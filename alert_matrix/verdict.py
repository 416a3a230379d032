"""Whether an alert did what its row promises: in time, without a break to the end, and never without its trouble."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from alert_matrix.columns import LONG_GAP, MISSES, OFTEN_LOST, Run
from alert_matrix.play import Fired
from alert_matrix.troubles import OF_THE_EXPORTER
from sglang_tuning_exporter.diagnosis.table import ALERTS

Fault: TypeAlias = Literal["never", "late", "broken", "ended early", "too long", "false", "error"]

ROWS = {row.alert: row for row in ALERTS}
# An exporter whose scrapes fail more often than this share may be reported as down.
FLAPPING = 0.25


@dataclass(frozen=True)
class Verdict:
    """The result of one run; `fault` is empty if the alert was right."""

    run: Run
    alert: str
    fault: Fault | Literal[""]
    expected: str = ""
    got: str = ""


def judge(run: Run, alert: str, fired: Fired | None) -> Verdict:
    """Compare what one alert did with what it had to do."""
    if fired is not None and fired.error:
        return Verdict(run, alert, "error", "evaluated", fired.error)
    if run.level != "present":
        if fired is None or _may(run, alert):
            return Verdict(run, alert, "")
        return Verdict(run, alert, "false", "silent", _span(run, fired))
    by = f"firing by {run.deadline - run.begin:.0f} s"
    if fired is None:
        return Verdict(run, alert, "never", by, "silent")
    allowance = 2 * run.interval + 2 * run.column.evaluation
    until, latest = _until(run), _latest(run)
    is_free = _may(run, alert)
    holes = fired.holes(run.column.evaluation)
    faults: tuple[tuple[bool, Fault, str], ...] = (
        (fired.first < run.begin and not is_free, "false", "silent before the trouble"),
        (fired.first > run.deadline, "late", by),
        (fired.last < until - allowance, "ended early", f"firing until {until - run.begin:.0f} s"),
        (fired.last > latest + allowance and not is_free, "too long", f"over by {latest - run.begin:.0f} s"),
        (holes > 0 and not is_free, "broken", f"no break ({holes} evaluations)"),
    )
    found = next((each for each in faults if each[0]), None)
    return Verdict(run, alert, *found[1:], _span(run, fired)) if found else Verdict(run, alert, "")


def _may(run: Run, alert: str) -> bool:
    """Whether the alert may fire for a healthy server: failed scrapes are a trouble of the exporter."""
    share = MISSES[run.column.misses]
    # Away for half of its time and failing one time in five besides is more than half of its time.
    is_away = run.has_long_gap or share > FLAPPING or (run.level == "below" and share >= FLAPPING / 2)
    # Of scrapes two minutes apart, two that fail one after the other are most of five minutes.
    is_away = is_away or share * run.column.scrape >= OFTEN_LOST
    return ROWS[alert].id in OF_THE_EXPORTER and is_away


def _until(run: Run) -> float:
    """Until when it must fire: the end of the trouble, and what its row keeps it firing after that."""
    if run.case.seen_for is not None and run.away is not None:
        # What happened while nobody looked is seen when it is over.
        return run.deadline
    return run.end + run.case.keep


def _latest(run: Run) -> float:
    gap = LONG_GAP if run.away is not None else 0.0
    return run.end + run.case.tail + run.case.keep + gap


def _span(run: Run, fired: Fired) -> str:
    return f"fired from {fired.first - run.begin:.0f} s to {fired.last - run.begin:.0f} s ({fired.count} evaluations)"
