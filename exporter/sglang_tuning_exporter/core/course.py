"""A log, judged as its time passes: which diagnosis held when, which alerts would have been sent, and what the whole says. Pure.

Every `STEP_SECONDS` of the log the last ten minutes are weighed. A start begins anew: a run shorter than that is weighed once, at its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core import judge, summary
from sglang_tuning_exporter.core.alerts import Clocks
from sglang_tuning_exporter.core.events import Event
from sglang_tuning_exporter.core.facts import Facts
from sglang_tuning_exporter.core.findings import URGENCY, Alert, Finding, Judgement, Start, Stretch
from sglang_tuning_exporter.core.rows import BY_ID, ROWS, Row
from sglang_tuning_exporter.core.server import BUCKET_SECONDS, Server, Totals, merged
from sglang_tuning_exporter.core.text import memory_words
from sglang_tuning_exporter.core.view import View, explained, view_of
from sglang_tuning_exporter.sglang.flags import VARYING_ARGS, are_same_settings

STEP_SECONDS = 30.0
PAUSE_SECONDS = 60.0  # between two steps; beyond it nothing was known
CALM_SECONDS = 2700.0  # of silence, after which nothing changes: starts count for half an hour, and no alert waits for longer than the rest
# In a run shorter than the window, what held in stretches of this length for so much of it is said as well: two causes in turn.
PHASE_SECONDS, LEAST_PHASE_SECONDS, PHASE_SHARE = 60.0, 60.0, 0.35
ENOUGH_SHARE = 0.5  # of the serving time: in a log shorter than a row's `after`
STRETCH_SECONDS = 15.0  # shorter pauses do not divide a load


@dataclass(slots=True)
class Held:
    """How long a row held in a run, and the view in which it was clearest."""

    run: Run
    row: Row
    measured: judge.Measured
    excess: float
    seconds: float = 0.0

    @property
    def is_limit(self) -> bool:
        """Whether it can be the verdict."""
        return judge.is_limit(self.row.id, self.measured)


@dataclass(slots=True)
class Run:
    """One start of the server, until the next."""

    facts: Facts
    begin: float
    end: float = 0.0
    totals: Totals = field(default_factory=Totals)
    held: dict[str, Held] = field(default_factory=dict)
    phases: dict[str, Held] = field(default_factory=dict)  # of the last minute, in a run shorter than the window
    verdicts: dict[str, float] = field(default_factory=dict)  # seconds of serving time
    whole: View | None = None
    ended: str = ""
    served: float = 0.0
    is_start: bool = False  # its arguments are in the log


class Course:
    """Takes the events of a log in order of time; `end` says what the whole shows."""

    def __init__(self, profile: profiles.Profile) -> None:
        self.server = Server(profile)
        self.runs: list[Run] = []
        self._profile = profile
        self._step: float | None = None  # the next one
        self._counted = 0.0  # serving seconds that are credited to rows
        self._clocks = Clocks(profile)
        self._alerts: list[Alert] = []
        self._last_batch: float | None = None
        self._last_line: float | None = None

    def take(self, event: Event) -> None:
        """Take an event."""
        server, now = self.server, event.time
        if now is not None:
            if self._step is None:
                self._step = now + STEP_SECONDS
                self.runs.append(Run(server.facts, now))
            self._pass_until(now)
            self._last_line = now
        elif not self.runs:
            self.runs.append(Run(server.facts, 0.0))
        if event.kind == "arguments":
            self._end_run()
            server.take(event)
            self.runs.append(Run(server.facts, server.now or 0.0, is_start=True))
            return
        server.take(event)
        if event.kind in {"decode", "prefill"}:
            self._last_batch = now
            server.bucket(server.now or 0.0).most("most_queued", event.figures.get("queued", 0.0))

    # As time passes

    def _pass_until(self, now: float) -> None:
        """Weigh at each step up to a time."""
        while self._step is not None and self._step <= now:
            self._pass(self._step)
            silent = self._step - (self._last_line or self._step)
            quiet = silent > CALM_SECONDS and now - self._step > 2 * self._profile.window_seconds
            self._step = now - self._profile.window_seconds if quiet else self._step + STEP_SECONDS

    def _pass(self, now: float) -> None:
        """Weigh the last ten minutes at a step."""
        self.server.advance(now)
        run, window = self.runs[-1], self._profile.window_seconds
        view = view_of(self.server, min(window, now - run.begin))
        measured = judge.weigh(view)
        self._alerts += self._clocks.pass_on(measured, self.server, now, PAUSE_SECONDS)
        if now - run.begin >= window:
            run.phases.clear()
            self._credit(run, measured)
        else:
            phase = judge.weigh(view_of(self.server, min(PHASE_SECONDS, now - run.begin)))
            for name in phase.holding if phase.view.has_enough_load else ():
                self._hold(run, run.phases, name, phase, min(STEP_SECONDS, phase.view.served))

    def _credit(self, run: Run, measured: judge.Measured, *, whole: bool = False) -> None:
        """Count the serving time since the last step for what holds."""
        total = self._served()
        seconds, self._counted = max(total - self._counted, 0.0), total
        if measured.view.has_enough_load or whole:
            run.verdicts[measured.verdict] = run.verdicts.get(measured.verdict, 0.0) + seconds
        for name in measured.holding:
            self._hold(run, run.held, name, measured, seconds)

    @staticmethod
    def _hold(run: Run, rows: dict[str, Held], name: str, measured: judge.Measured, seconds: float) -> None:
        """Credit seconds to a row, and keep the view in which it was clearest."""
        figure = measured.figures[name]
        excess = (figure.value - (figure.limit or 0.0)) * (1 if figure.side == "above" else -1)
        held = rows.setdefault(name, Held(run, BY_ID[name], measured, excess))
        held.seconds += seconds
        if excess > held.excess:
            held.excess, held.measured = excess, measured

    def _served(self) -> float:
        """Return the serving seconds of this run."""
        return max(self.server.since_start.under("serves").values(), default=0.0)

    def _end_run(self) -> None:
        """Weigh what is left of a run at its end."""
        server, run = self.server, self.runs[-1]
        now = server.now or 0.0
        server.advance(now)
        run.end, run.facts, run.ended = now, server.facts, server.ended
        run.totals = server.since_start
        run.served = self._served()
        window = self._profile.window_seconds
        run.whole = view_of(self.server, now - run.begin + 1.0)
        self._credit(run, judge.weigh(view_of(self.server, min(window, now - run.begin + 1.0))), whole=True)
        if run.whole.has_enough_load and set(run.verdicts) <= {judge.NOT_ENOUGH, judge.IDLE}:
            whole = judge.weigh(run.whole)  # too little in any ten minutes, enough in all
            run.verdicts = {whole.verdict: run.served}
            for name in whole.holding:
                self._hold(run, run.held, name, whole, run.served)
        least = max(LEAST_PHASE_SECONDS, PHASE_SHARE * run.served)
        run.phases = {
            name: held
            for name, held in run.phases.items()
            if name not in run.held and held.seconds >= least and not BY_ID[name].chance
        }
        if not explained(run.whole).totals["admission/held_back"]:  # what the whole explains is no cause of a part
            run.phases.pop("admission_too_conservative", None)
        if "cuda_graph_not_covering" in run.held and run.facts.largest_captured is None:
            for seen in (run.held, run.phases):  # later batches show what was captured, and explain the earlier ones
                seen.pop("cuda_graph_off", None)
        self._counted = 0.0

    # The whole

    def end(self, now: float | None = None) -> Judgement:
        """Return what the log says; `now` is the time of its last line."""
        server = self.server
        if now is not None and server.now is not None and now > server.now:
            self._pass_until(now)
            server.advance(now)
        if not self.runs:
            self.runs.append(Run(server.facts, 0.0))
        server.settle()
        self._end_run()
        end = server.now or 0.0
        if server.begin is not None:
            last = judge.weigh(view_of(server, min(self._profile.window_seconds, end - self.runs[-1].begin + 1.0)))
            self._alerts += self._clocks.pass_on(last, server, end, PAUSE_SECONDS)
        self._alerts += self._clocks.firing
        judgement = self._judgement(end)
        totals = merged(bucket for _, bucket in server.buckets)
        served = sum(run.served for run in self.runs)
        verdicts: dict[str, float] = {}
        for run in self.runs:
            for verdict, seconds in run.verdicts.items():
                verdicts[verdict] = verdicts.get(verdict, 0.0) + seconds
        mostly = max(verdicts, key=verdicts.__getitem__) if sum(verdicts.values()) else None
        return summary.beside(
            judgement, server, totals, profile=self._profile.name, begin=server.begin, end=server.now if server.begin is not None else None,
            serving_seconds=served, idle_seconds=View(totals, server.facts, server.profile, end).idle,
            mostly=None if mostly is None else (mostly, verdicts[mostly] / sum(verdicts.values())),
            alerts=tuple(sorted(self._alerts, key=lambda alert: alert.at)), course=self._stretches(),
            starts=tuple(self._start(number, run) for number, run in enumerate(self.runs) if run.is_start or run.served or len(self.runs) == 1),
            counts={name: totals[count] for name, count in summary.COUNTS.items()},
            available_gb=tuple(gigabytes for run in self.runs for gigabytes in run.facts.left.values()),
        )  # fmt: skip

    def _judgement(self, end: float) -> Judgement:
        """Return the worst verdict that held long enough, with every finding of the log."""
        served, last = sum(run.served for run in self.runs), self.runs[-1]
        chosen = [held for run in self.runs for held in run.held.values() if self._counts(held, served)]
        chosen += last.phases.values()
        order = {row.id: place for place, row in enumerate(ROWS)}
        names = {each.row.id for each in chosen}
        also = frozenset(name for name in names if BY_ID[name].protects)
        limits = sorted(
            (held for held in chosen if held.is_limit),
            key=lambda each: (-URGENCY[each.row.severity], each.run is not last, order[each.row.id], -each.seconds),
        )
        for held in limits:
            run, name, found = held.run, held.row.id, judge.findings(held.measured, also)
            if all(each.diagnosis != name for each in found):
                continue  # a row whose advice is left to another is no finding
            context = [
                self._timed(each, run.held.get(each.diagnosis, held), end)
                for each in found
                if each.diagnosis in names or not each.is_limit
            ]
            context.sort(key=lambda each: each.diagnosis != name)
            every = sorted(
                [*context, *self._others(chosen, context, end, also)],
                key=lambda each: (each.diagnosis != name, not each.is_limit, -URGENCY[each.severity]),
            )
            checks, notes = held.measured.checks, self._notes(None)
            return Judgement(name, every[0].headline, every[0].severity, tuple(every), checks, notes)
        return self._without_limit(chosen, end)

    def _without_limit(self, chosen: list[Held], end: float) -> Judgement:
        """Return the judgement where nothing limited the server for long enough."""
        run = max(
            self.runs,
            key=lambda each: (each.served >= self._profile.enough_serving_seconds, each is self.runs[-1], each.served),
        )
        view = run.whole if run.whole is not None else view_of(self.server, inf)
        base = judge.judge(view)
        kept = [each for each in base.findings if not each.is_limit]
        others = self._others(chosen, kept, end)
        found = (*kept, *others)
        first = next((each for each in found if each.is_limit), None)
        if first is not None:
            return Judgement(first.diagnosis, first.headline, first.severity, found, base.checks, self._notes(base))
        verdict = base.verdict if base.verdict not in BY_ID else judge.NO_LIMIT
        sentence = base.sentence if verdict == base.verdict else judge.SENTENCES[verdict]
        if verdict == judge.NOT_ENOUGH:
            sentence = judge.said_at_once(verdict, found) or judge.short_load(view)
        return Judgement(verdict, sentence, "none", found, base.checks, self._notes(base))

    def _counts(self, held: Held, served: float) -> bool:
        """Whether a row held long enough to be reported; of a run before other settings only failures are."""
        run, row, last = held.run, held.row, self.runs[-1]
        if row.any_load:
            return row.chance is False or run is last or run.served > 0
        is_old = run is not last and last.served >= self._profile.enough_serving_seconds and row.severity != "critical"
        if is_old and not are_same_settings(run.facts.arguments, last.facts.arguments):
            return False
        runs = [run] if run is last and run.served >= self._profile.enough_serving_seconds else self.runs
        judged = sum(sum(each.verdicts.values()) for each in runs) or served  # a start begins another server
        return held.seconds >= min(row.after, ENOUGH_SHARE * judged) and held.seconds > 0

    def _others(
        self, chosen: list[Held], found: list[Finding], end: float, also: frozenset[str] = frozenset()
    ) -> list[Finding]:
        """Return the findings of other times; a flag that is set already is not set again."""
        names = {each.diagnosis for each in found}
        flags = {change.arg: change.to for each in found for change in each.changes if change.arg and each.is_limit}
        more: list[Finding] = []
        for held in sorted(chosen, key=lambda each: -each.seconds):
            name = held.row.id
            if name in names:
                continue
            own = next((each for each in judge.findings(held.measured, also) if each.diagnosis == name), None)
            if own is None:
                continue
            kept = tuple(change for change in own.changes if change.arg not in flags or flags[change.arg] == change.to)
            if not kept and held.row.needs_advice and not own.is_limit:
                continue
            names.add(name)
            flags.update({change.arg: change.to for change in kept if change.arg and own.is_limit})
            more.append(self._timed(replace(own, changes=kept), held, end))
        return more

    def _timed(self, finding: Finding, held: Held, end: float) -> Finding:
        """Add when a finding was seen; one that is over is said in the past tense."""
        run = held.run
        found = judge.timed(finding, self.server, run.begin, run.end, now=end, counts=run.totals)
        if found is None:
            always = BY_ID[finding.diagnosis].any_load
            found = replace(finding, since=run.begin if always else None, until=run.end if always else None)
        return replace(found, seconds=held.seconds)

    def _notes(self, base: Judgement | None) -> tuple[str, ...]:
        notes = list(base.notes) if base is not None else []
        server = self.server
        notes += [
            f"Nothing was logged for {silence.seconds:.0f} s from {_clock(silence.begin)} on, while {silence.before:.0f} requests ran; afterwards"
            f" {silence.after:.0f} ran."
            for silence in server.silences[:3]
        ]  # fmt: skip
        running = sum(each.running or 0.0 for each in server.schedulers.values())
        hold = max((each.hold_seconds for each in server.schedulers.values()), default=0.0)
        silent = inf if self._last_batch is None or self._last_line is None else self._last_line - self._last_batch
        if running >= 1 and silent <= 1.2 * hold and not server.stopping and not server.ended:
            notes.append(f"The log ends while {running:.0f} ran; whether they were answered is not in it.")
        notes += [note for note in judge.muted(self._profile, {}) if base is None]  # else it is among those of `base`
        notes += self._range_notes()
        return tuple(notes)

    def _range_notes(self) -> list[str]:
        """Say which range of the guide a figure lies outside of, where no finding does."""
        run = max(self.runs, key=lambda each: each.served)
        view, notes = run.whole or view_of(self.server, inf), list[str]()
        profile, reserve, lower, queued = (
            view.profile,
            view.facts.reserve_gb,
            view.profile.queue_lower,
            view.sum("queued"),
        )
        if reserve is not None and profile.reserve_good_gb < reserve <= profile.reserve_upper_gb:
            notes.append(
                f"{reserve:.4g} GB of GPU memory were left after the start: neither in the guide's good range (5 to {profile.reserve_good_gb:g} GB) nor too"
                f" much (more than {profile.reserve_upper_gb:g} GB)."
            )
        if view.facts.is_on("disable_radix_cache") and view.has_enough_load and view.facts.role != "decode":
            notes.append(
                "The prefix cache is off (--disable-radix-cache): prompts that share a prefix are computed whole, each time."
            )
        is_short = view.has_enough_load and (view.share("queue", "below_range") or 0.0) > profile.frequent_share
        if lower and queued and is_short:
            notes.append(
                f"{queued:.0f} requests waited on average; the guide's range is {lower:g} to {profile.queue_upper:,.0f}."
            )
        return notes

    # What is shown beside it

    def _start(self, number: int, run: Run) -> Start:
        before = self.runs[number - 1].facts.arguments if number and self.runs[number - 1].is_start else {}
        now = run.facts.arguments
        changed = {
            arg: (before.get(arg), value)
            for arg, value in now.items()
            if before and arg not in VARYING_ARGS and before.get(arg) != value and not isinstance(value, dict)
        }  # fmt: skip
        view = run.whole or View(run.totals, run.facts, self._profile, run.end)
        return Start(
            run.begin if run.is_start and self.server.begin is not None else None, run.facts.shown_release, run.facts.arguments, changed,
            summary.figures_of(view), run.ended, summary.memory(run.facts),
        )  # fmt: skip

    def _stretches(self) -> tuple[Stretch, ...]:
        """Return the course of the run: starting, serving, idle, silent, stopped."""
        if self.server.begin is None:
            return ()
        stretches: list[Stretch] = []
        for run in self.runs:
            begin = run.begin
            serving = [
                (at, totals)
                for at, totals in self.server.buckets
                if run.begin - 10 <= at <= run.end and any(totals.under("serves").values())
            ]
            if run.is_start:
                first = max(serving[0][0], run.begin) if serving else run.end
                stretches.append(
                    Stretch(
                        "starting", run.begin, first, ", ".join(memory_words(summary.memory(run.facts), "CUDA graphs"))
                    )
                )
                begin = first
            for at, _ in serving:
                start, stop = max(at, run.begin), min(at + 10.0, run.end)
                if start - begin > STRETCH_SECONDS:
                    stretches.append(self._without_work(begin, start))
                    begin = start
                if stretches and stretches[-1].what == "serving" and start - stretches[-1].end <= STRETCH_SECONDS:
                    stretches[-1] = replace(stretches[-1], end=stop)
                else:
                    stretches.append(Stretch("serving", min(begin, start), stop))
                begin = max(begin, stop)
            if run.ended:
                stretches.append(Stretch("stopped", begin, run.end, run.ended))
            elif run.end - begin > 1.0:
                stretches.append(self._without_work(begin, run.end))
        return tuple(stretches)

    def _without_work(self, begin: float, end: float) -> Stretch:
        """Return a stretch in which no batch was logged: silent where requests waited most of the time, or were retracted."""
        totals = [totals for at, totals in self.server.buckets if begin - BUCKET_SECONDS < at < end]
        idle, unknown = (sum(each[f"queue/{state}"] for each in totals) for state in ("idle", "unknown"))
        worked = unknown > idle or any(each["retractions"] for each in totals)
        return Stretch("silent" if worked else "idle", begin, end)


def _clock(moment: float) -> str:
    minutes = int(moment // 60) % (24 * 60)
    return f"{minutes // 60:02}:{minutes % 60:02}"
