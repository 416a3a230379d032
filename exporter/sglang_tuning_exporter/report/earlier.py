"""What limited the starts other than the judged one, and whether that is over. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from sglang_tuning_exporter.diagnosis.table import BY_ID

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sglang_tuning_exporter.report.comparison import ArgChange
    from sglang_tuning_exporter.report.phases import Run
    from sglang_tuning_exporter.report.runs import JudgedRun

CRASH = "crash"


@dataclass(frozen=True, slots=True)
class EarlierProblem:
    """What limited one start, or several in a row. `what` is a diagnosis, or `crash`."""

    what: str
    first: int  # run
    last: int
    is_over: bool
    fixed_by: tuple[ArgChange, ...]

    @property
    def words(self) -> str:
        """The trouble in one line."""
        who = "before the first start" if not self.last else f"start {self.first}"
        who += f" to {self.last}" if self.last != self.first else ""
        text = f"{who}: " + ("a process of the server died." if self.what == CRASH else BY_ID[self.what].summary)
        if self.fixed_by:
            flags = ", ".join(f"{change.flag} {change.before} → {change.after}" for change in self.fixed_by)
            return f"{text} Fixed by {flags}."
        return f"{text} Not seen again." if self.is_over else text


def troubles(runs: Iterable[Run], judged: JudgedRun) -> list[EarlierProblem]:
    """Return the troubles of all starts except the judged one, in their order."""
    found: list[EarlierProblem] = []
    in_order = list(runs)
    for run, following in zip_longest(in_order, in_order[1:]):
        if run is judged.run:
            continue
        for trouble in _of(run, following, judged):
            before = next((each for each in found if each.what == trouble.what and each.last == run.number - 1), None)
            if before is not None and not before.fixed_by and before.is_over == trouble.is_over:
                found[found.index(before)] = EarlierProblem(
                    trouble.what, before.first, run.number, trouble.is_over, trouble.fixed_by
                )
            else:
                found.append(trouble)
    return found


def _of(run: Run, following: Run | None, judged: JudgedRun) -> Iterator[EarlierProblem]:
    now = {finding.diagnosis.id for finding in judged.judgement.findings}
    later = judged.run is not None and judged.run.number > run.number and judged.judgement.past.has_enough_load
    for each in run.found:
        is_over = later and each.diagnosis not in now
        changed = () if following is None else following.changed
        fixed = tuple(change for change in changed if any(_is_of(change, arg) for arg in each.args))
        recurred = following is not None and any(other.diagnosis == each.diagnosis for other in following.found)
        yield EarlierProblem(each.diagnosis, run.number, run.number, is_over, fixed if is_over and not recurred else ())
    if run.ending == CRASH and not run.found:
        yield EarlierProblem(CRASH, run.number, run.number, later, ())


def _is_of(change: ArgChange, arg: str) -> bool:
    return bool(arg) and (change.arg == arg or change.arg.startswith(arg + "_"))
