"""What each start of a server was like, and whether what was changed before it helped. Pure; moments in seconds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_tuning_exporter.guide.evidence import Past
from sglang_tuning_exporter.guide.findings import judge
from sglang_tuning_exporter.report.comparison import Arguments, RunFigures, changed_args, compare, figures_of
from sglang_tuning_exporter.report.phases import Course, Run, memory_trail
from sglang_tuning_exporter.sglang.events import OUT_OF_MEMORY_PHASES
from sglang_tuning_exporter.window import Totals

if TYPE_CHECKING:
    from sglang_tuning_exporter.guide.profiles import Profile
    from sglang_tuning_exporter.report.sampling import Sampler
    from sglang_tuning_exporter.state import ServerState


@dataclass(slots=True)
class _Base:
    """What had been added up when a run began."""

    at: float = 0.0
    served: float = 0.0
    rejected: float = 0.0
    generated: float = 0.0
    generated_for: float = 0.0
    totals: dict[int | None, Totals] = field(default_factory=dict)
    marks: Counter[str] = field(default_factory=Counter)


class Runs:
    """Sums up each run when it ends: what was added up since it began."""

    def __init__(self, state: ServerState, profile: Profile, sampler: Sampler, course: Course) -> None:
        self._state, self._profile, self._sampler, self._course = state, profile, sampler, course
        self._base = _Base()
        self._last: Run | None = None

    def begin(self, now: float, served: float) -> None:
        """A run begins; `served`: seconds of serving time until now."""
        state, sampler = self._state, self._sampler
        self._base = _Base(
            now,
            served,
            state.server_totals.counts["rejected_requests"],
            sampler.generated,
            sampler.generated_for,
            {dp: rank.totals.copy() for dp, rank in state.ranks.items()},
            state.out_of_memory + state.liveness,
        )

    def end(self, last: float, served: float, *, restarted: bool) -> None:
        """The run ends, its last line printed at `last`."""
        run = self._course.close(last, restarted=restarted)
        if run is None:
            return
        facts = self._state.facts
        by_rank = self._gained()
        totals = sum(by_rank.values(), Totals())
        marks = self._state.out_of_memory + self._state.liveness
        marks.subtract(self._base.marks)
        run.memory = memory_trail(facts)
        run.is_cpu = facts.is_cpu
        run.args = Arguments.of(facts)
        run.figures = self._figures(totals, served - self._base.served, marks, self._base)
        past = Past(
            totals,
            +marks,
            last - self._base.at,
            facts,
            self._profile.for_edition(first=facts.is_first_edition),
            by_rank,
            1,
            fullest_pool=self._state.fullest_pool,
            troubles=frozenset({"server_down"} if self._state.died else ()),
            now=last,
            last_seen=lambda what: self._state.last_seen(what, last),
        )
        run.verdict = judge(past).verdict
        earlier, self._last = self._last, run
        if earlier is not None and earlier.figures is not None:
            run.changed = changed_args(earlier.args, run.args)
            known = bool(earlier.args.printed and run.args.printed)
            run.against_last = compare(earlier.figures, run.figures, run.changed, earlier.verdict, known=known)

    def _gained(self) -> dict[int | None, Totals]:
        """Give what each scheduler added that had anything to do; those of other starts had not."""
        before = self._base.totals
        gained = {
            rank.dp: rank.totals - before[rank.dp] if rank.dp in before else rank.totals.copy()
            for rank in self._state.schedulers
        }
        return {dp: totals for dp, totals in gained.items() if totals.counts["observations"]} or gained

    def sum_up(self, totals: Totals, served: float) -> RunFigures:
        """Give the figures of the whole log."""
        return self._figures(totals, served, self._state.out_of_memory, _Base())

    def _figures(self, totals: Totals, served: float, marks: Counter[str], base: _Base) -> RunFigures:
        sampler = self._sampler
        totals.counts["rejected_requests"] = self._state.server_totals.counts["rejected_requests"] - base.rejected
        seconds = sampler.generated_for - base.generated_for
        return figures_of(
            totals,
            served,
            throughput=(sampler.generated - base.generated) / seconds if seconds > 0 else None,
            out_of_memory=sum(marks[phase] for phase in OUT_OF_MEMORY_PHASES),
            has_graphs=not self._state.facts.without_graph,
        )
