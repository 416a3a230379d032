"""The whole matrix: all runs, split into parts for as many promtools as there are cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product

from alert_matrix import beyond, rules
from alert_matrix.columns import DISTURBANCES, EVALUATIONS, MISSES, SCRAPES, Column, Level, Run
from alert_matrix.play import Fired, RuleError, play
from alert_matrix.troubles import MINUTE, Case, Trouble, cases
from alert_matrix.verdict import Verdict, judge
from sglang_tuning_exporter.diagnosis.table import ALERTS

HEALTHY = "a healthy server"
# In seconds: a run that lasts longer would keep all others of its promtool waiting.
LONG = 6000.0


@dataclass(frozen=True)
class Outcome:
    """The verdict of one run in words, as it is written down."""

    alert: str
    words: str
    level: Level
    column: Column
    fault: str
    expected: str
    got: str
    beyond: str

    def __str__(self) -> str:
        case = f"{self.alert}{': ' if self.words else ''}{self.words}"
        return f"{case} | {self.level} | {self.column} | {self.fault} | expected: {self.expected} | got: {self.got}"


def every_case() -> list[Case]:
    """Give the cases of every row that has an alert. Raises `UndescribedError`."""
    return [case for row in ALERTS for case in cases(row)]


def healthy_case() -> Case:
    """Give the healthy server, on which no alert may fire."""
    return Case(ALERTS[0], HEALTHY, Trouble(), None, window=10 * MINUTE, tail=5 * MINUTE)


def runs(case: Case, scrape: int, evaluation: int) -> Iterator[Run]:
    """Give every run of a case at these intervals."""
    levels: tuple[Level, ...] = ("absent",) if case.words == HEALTHY else ("present", "below")
    for level, misses, disturbance in product(levels, MISSES, DISTURBANCES):
        if level == "below" and case.below is None:
            continue
        if level == "below" and case.counts_starts and disturbance == "server restarts":
            continue  # one more start is what it waits for
        yield Run(case, level, Column(scrape, evaluation, misses, disturbance))


@dataclass(frozen=True)
class Part:
    """The work of one promtool: one case at one pair of intervals; runs with long gaps are separate because they last longer."""

    case: Case
    scrape: int
    evaluation: int
    with_long_gaps: bool

    def __str__(self) -> str:
        return f"{self.case.words if self.case.words == HEALTHY else self.case.name}, scrape {self.scrape} s, evaluation {self.evaluation} s"


def parts(
    chosen: Iterable[Case], scrapes: Iterable[int] = SCRAPES, evaluations: Iterable[int] = EVALUATIONS
) -> list[Part]:
    """Give every part for these cases."""
    return [Part(*each) for each in product(chosen, scrapes, evaluations, (False, True))]


def outcomes(part: Part, text: str) -> list[Outcome]:
    """Run a part against the rules of a file and judge the result."""
    is_healthy = part.case.words == HEALTHY
    alerts = [row.alert for row in ALERTS] if is_healthy else [part.case.row.alert]
    mine = [run for run in runs(part.case, part.scrape, part.evaluation) if run.has_long_gap == part.with_long_gaps]
    return [
        _outcome(judge(run, alert, fired.get(alert)))
        for run, fired in zip(mine, _fired(mine, alerts, text), strict=True)
        for alert in alerts
    ]


def _fired(mine: list[Run], alerts: list[str], text: str) -> list[dict[str, Fired]]:
    """Play runs; if a rule fails, each run alone, because it fails for all servers of one promtool."""
    groups = rules.load(text)
    try:
        return play(mine, rules.choose(groups, alerts), [group["name"] for group in groups])
    except RuleError as error:
        failed = error
    if len(mine) > 1:
        disturbances = {run.column.disturbance for run in mine}
        found: dict[int, dict[str, Fired]] = {}
        for chosen in disturbances if len(disturbances) > 1 else range(len(mine)):
            places = [place for place, run in enumerate(mine) if chosen in (place, run.column.disturbance)]
            found |= zip(places, _fired([mine[place] for place in places], alerts, text), strict=True)
        return [found[place] for place in range(len(mine))]
    if failed.name not in alerts:
        return [dict.fromkeys(alerts, Fired(error=str(failed)))]
    rest = [alert for alert in alerts if alert != failed.name]
    return [{**(_fired(mine, rest, text)[0] if rest else {}), failed.name: Fired(error=failed.words)}]


def together(mine: list[Run], text: str) -> list[Outcome]:
    """Play runs of several cases in few promtools, long runs separately. Each server has only the series that its own alert reads."""
    groups = rules.load(text)
    own = {alert: rules.choose(groups, [alert]) for alert in {run.case.row.alert for run in mine}}
    order = [group["name"] for group in groups]
    found: list[Outcome] = []
    for is_long in (False, True):
        some = [run for run in mine if (run.stop > LONG) == is_long]
        if some:
            chosen = rules.choose(groups, {run.case.row.alert for run in some})
            played = play(some, chosen, order, lambda run, shown: own[run.case.row.alert].reads(shown))
            found += [
                _outcome(judge(run, run.case.row.alert, fired.get(run.case.row.alert)))
                for run, fired in zip(some, played, strict=True)
            ]
    return found


def play_all(todo: list[Part], text: str, jobs: int, report: Callable[[Part, list[Outcome]], None]) -> list[Outcome]:
    """Play parts, the longest first, and report each as it is done."""
    order = sorted(todo, key=lambda part: (part.scrape, part.evaluation))
    found: list[Outcome] = []
    with ProcessPoolExecutor(jobs) as pool:
        for part, outcome in zip(order, pool.map(outcomes, order, [text] * len(order)), strict=True):
            report(part, outcome)
            found += outcome
    return found


def _outcome(verdict: Verdict) -> Outcome:
    run = verdict.run
    return Outcome(
        verdict.alert,
        run.case.words,
        run.level,
        run.column,
        verdict.fault,
        verdict.expected,
        verdict.got,
        beyond.reason(verdict),
    )
