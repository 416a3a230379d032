"""The summary of each start of a server, and whether the arguments changed before it helped. Pure; times in seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from sglang_tuning_exporter.diagnosis.evidence import RESTART_LOOP_SECONDS, past_of
from sglang_tuning_exporter.diagnosis.findings import Finding, Judgement, judge
from sglang_tuning_exporter.diagnosis.json_findings import Document, number
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.report.comparison import (
    RunFigures,
    StartArgs,
    changed,
    changed_args,
    compare,
    figures_of,
    is_of,
)
from sglang_tuning_exporter.report.phases import PhaseTracker, Run
from sglang_tuning_exporter.report.series import Sampler
from sglang_tuning_exporter.sglang.events import OUT_OF_MEMORY_PHASES
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.journal import START, WORK
from sglang_tuning_exporter.state.server import ServerState
from sglang_tuning_exporter.state.signals import States, named
from sglang_tuning_exporter.state.stages import Hang
from sglang_tuning_exporter.state.totals import Totals


class Sightings:
    """The events and states of one start, and when they were first and last seen."""

    def __init__(self) -> None:
        self._first: dict[Hashable, float] = {}
        self._last: dict[Hashable, float] = {}
        self._together: dict[States, tuple[float, float]] = {}  # states of all signals together: first and last seen
        self._latest: dict[int | None, States] = {}  # of each DP rank at the last batch line of the present time
        self._now = 0.0
        self._states: States | None = None  # those seen last; most often the next ones are the same
        self._since = self._until = 0.0

    def see(self, what: Hashable, now: float) -> None:
        """Note an event printed at `now`, perhaps out of order."""
        self._first[what] = min(self._first.get(what, now), now)
        self._last[what] = max(self._last.get(what, now), now)

    def see_states(self, dp: int | None, states: States, now: float) -> None:
        """Note the states of a scheduler at a batch line. Those before another line of the same time held for no time."""
        if now != self._now:
            self._take_latest()
            self._now = now
        self._latest[dp] = states

    def _take_latest(self) -> None:
        for states in self._latest.values():
            if states is not self._states:
                self._keep()
                self._states, self._since = states, self._now
            self._until = self._now
        self._latest.clear()

    def _keep(self) -> None:
        if self._states is not None:
            first = self._together.get(self._states, (self._since, 0.0))[0]
            self._together[self._states] = (first, self._until)
            self._states = None

    def _take_apart(self) -> None:
        """Note when each signal's state was seen: there are dozens of combinations and millions of lines."""
        self._take_latest()
        self._keep()
        for states, (first, last) in self._together.items():
            for item in (*named(states).items(), WORK):
                self.see(item, first)
                self.see(item, last)
        self._together.clear()

    def last(self, what: Hashable) -> float | None:
        """Return when an event, by its name, or a state, by signal and state, was last seen; None where it never was."""
        self._take_apart()
        return self._last.get(what)

    def of(self, finding: Finding) -> tuple[float | None, float | None]:
        """Return when the evidence of a finding was first and last printed."""
        self._take_apart()
        keys = finding.diagnosis.condition.measured_by
        first = [self._first[key] for key in keys if key in self._first]
        last = [self._last[key] for key in keys if key in self._last]
        return min(first, default=None), max(last, default=None)


@dataclass(slots=True)
class _Base:
    """The totals at the beginning of a run."""

    at: float = 0.0
    served: float = 0.0
    server: Totals = field(default_factory=Totals)
    generated: float = 0.0
    generated_for: float = 0.0
    totals: dict[int | None, Totals] = field(default_factory=dict)
    event_counts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """The start that the report judges, from its own figures."""

    run: Run | None  # None where the log shows none
    judgement: Judgement
    figures: RunFigures
    sightings: Sightings

    @property
    def facts(self) -> ServerFacts:
        """The facts of the server as they were then."""
        return self.judgement.past.facts

    @property
    def decides(self) -> bool:
        """Whether it can represent the whole log: it had enough load, or failed."""
        return self.judgement.past.has_enough_load or self.judgement.severity == "critical"


class Runs:
    """The summary of each run when it ends, from the totals since it began."""

    def __init__(self, state: ServerState, sampler: Sampler, course: PhaseTracker) -> None:
        self._state, self._sampler, self._course = state, sampler, course
        self._base = _Base()
        self._last: Run | None = None
        self._hang: Hang | None = None  # the longest of the run
        self.judged: JudgedRun | None = None

    def begin(self, now: float, served: float) -> None:
        """Begin a run; `served`: seconds of serving time until now."""
        state, sampler = self._state, self._sampler
        self._hang = None
        self._base = _Base(
            now,
            served,
            state.server_totals.copy(),
            sampler.generated,
            sampler.generated_for,
            {dp: rank.totals.copy() for dp, rank in state.ranks.items()},
            state.out_of_memory + state.liveness,
        )

    def see_hang(self, hang: Hang) -> None:
        """Note which stage hangs: at the end of the run it may be over."""
        if self._hang is None or hang.stage == self._hang.stage:
            self._hang = hang

    def end(self, last: float, served: float, sightings: Sightings, *, restarted: bool) -> None:
        """End the run, whose last line was printed at `last`."""
        run = self._course.close(last, restarted=restarted)
        if run is None:
            return
        judged = self._judge(run, last, served, sightings, restarted=restarted)
        run.memory, run.args = _memory(judged.facts), StartArgs.of(judged.facts)
        run.figures, run.verdict = judged.figures, judged.judgement.verdict
        run.limits = {
            found.diagnosis.id: {advice.arg for advice in found.advice}
            for found in judged.judgement.findings
            if found.diagnosis.is_limit and found.diagnosis.severity != "info"
        }
        if run.ending == "crash" and not run.limits:
            run.limits = {None: ()}
        if self.judged is None or judged.decides or not self.judged.decides:
            self.judged = judged
        earlier, self._last = self._last, run
        if earlier is not None and earlier.figures is not None:
            run.changed = changed_args(earlier.args, run.args)
            known = bool(earlier.args.printed and run.args.printed)
            run.against_last = compare(earlier.figures, judged.figures, run.changed, earlier.verdict, known=known)

    def whole(self, last: float, served: float, sightings: Sightings) -> JudgedRun:
        """Judge a log without any run."""
        self._base = _Base()
        return self._judge(None, last, served, sightings, restarted=False)

    def _judge(
        self, run: Run | None, last: float, served: float, sightings: Sightings, *, restarted: bool
    ) -> JudgedRun:
        state, base = self._state, self._base
        served -= base.served
        by_rank = self._gained()
        totals = sum(by_rank.values(), state.server_totals - base.server)
        totals.counts["served_seconds"] = served
        event_counts = state.out_of_memory + state.liveness
        event_counts.subtract(base.event_counts)
        seconds = self._sampler.generated_for - base.generated_for
        rate = (self._sampler.generated - base.generated) / seconds if seconds > 0 else None
        failures = sum(event_counts[phase] for phase in OUT_OF_MEMORY_PHASES)
        figures = figures_of(totals, served, rate, failures, has_graphs=not state.facts.without_graph)
        past = replace(
            past_of(state, last, starting=not restarted and state.life.starts(last)),
            recent=totals,
            event_counts=+event_counts,
            watched_seconds=last - base.at,
            by_rank=by_rank,
            starts=self._starts_before(last) if not restarted else 0,
            hang=self._hang or (state.hang(last) if not restarted else None),
            troubles=frozenset({"server_down"} if state.life.died and not restarted else ()),
            last_seen=sightings.last,
            serves=False,
        )
        return JudgedRun(run, judge(past), figures, sightings)

    def _starts_before(self, end: float) -> int:
        """Return the starts of the half hour up to the last one; none if that one has lasted for longer."""
        began = None if self._course.run is None else self._course.run.start
        if began is None or (end - began > RESTART_LOOP_SECONDS and not self._state.life.died):
            return 0
        return self._state.recent_marks(began, RESTART_LOOP_SECONDS)[START]

    def _gained(self) -> dict[int | None, Totals]:
        """Return the totals of this run for each scheduler that had work; those of other starts had none."""
        before = self._base.totals
        gained = {
            rank.dp: rank.totals - before[rank.dp] if rank.dp in before else rank.totals.copy()
            for rank in self._state.schedulers
        }
        return {dp: totals for dp, totals in gained.items() if totals.counts["observations"]} or gained


def _memory(facts: ServerFacts) -> Document | None:
    """Return the GPU memory of a start by use (on a CPU: host memory), in GB, of one rank, as far as its lines show it.

    A figure below 0 comes from rounding and is written as 0.
    """
    used = {
        "before_weights_gb": facts.memory_before_weights_gb,
        "weights_gb": facts.rank_weights_gb,
        "kv_pool_gb": facts.pools_gb,
        "graphs_gb": facts.graph_gb,
        "left_gb": min((facts.available_gb or facts.left_gb).values(), default=None),
    }
    if all(figure is None for name, figure in used.items() if name != "graphs_gb"):
        return None
    written = {name: None if figure is None else number(max(figure, 0.0)) for name, figure in used.items()}
    return {"device": "cpu" if facts.is_cpu else "gpu", **written}


def other_starts(runs: Iterable[Run], judged: JudgedRun) -> list[Document]:
    """Return what limited each start except the judged one, or several in a row, and whether that is over."""
    found: list[Document] = []
    in_order = list(runs)
    for run, following in zip_longest(in_order, in_order[1:]):
        for trouble in _troubles(run, following, judged) if run is not judged.run else ():
            is_alike = (each for each in found if each["diagnosis"] == trouble["diagnosis"])
            before = next((each for each in is_alike if each["last_run"] == run.number - 1), None)
            if before is not None and not before["fixed_by"] and before["over"] == trouble["over"]:
                before |= {"last_run": run.number, "fixed_by": trouble["fixed_by"]}
            else:
                found.append(trouble)
    return [{**each, "words": _words(each)} for each in found]


def _troubles(run: Run, following: Run | None, judged: JudgedRun) -> Iterator[Document]:
    """Return what limited one start; without a diagnosis, that it crashed."""
    now = {finding.diagnosis.id for finding in judged.judgement.findings}
    later = judged.run is not None and judged.run.number > run.number and judged.judgement.past.has_enough_load
    for diagnosis, args in run.limits.items():
        is_over = later and diagnosis not in now
        changes = following.changed if following is not None and is_over and diagnosis not in following.limits else ()
        yield {
            "diagnosis": diagnosis,
            "run": run.number,
            "last_run": run.number,
            "over": is_over,
            "fixed_by": [change for change in changes if any(is_of(change, arg) for arg in args)],
        }


def _words(trouble: Document) -> str:
    """Return what limited a start in one line."""
    first, last, diagnosis = trouble["run"], trouble["last_run"], trouble["diagnosis"]
    who = "before the first start" if not last else f"start {first}"
    who += f" to {last}" if last != first else ""
    text = f"{who}: {'a process of the server died.' if diagnosis is None else BY_ID[diagnosis].summary}"
    if trouble["fixed_by"]:
        return f"{text} Fixed by {', '.join(map(changed, trouble['fixed_by']))}."
    return f"{text} Not seen again." if trouble["over"] else text
