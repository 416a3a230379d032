"""A log of the past, judged as its time passes: lines in, the judgement of the whole log out.

Pure; times are unix seconds.

A report says the worst that held for long enough, of the last start first. The same rows judge a server that runs
(`core/watch`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core import answer, judge
from sglang_tuning_exporter.core.alerts import Clocks
from sglang_tuning_exporter.core.diagnoses import BY_ID, Diagnosis, place
from sglang_tuning_exporter.core.events import Event
from sglang_tuning_exporter.core.findings import URGENCY, Alert, Finding, Judgement, Severity, Start, Stretch
from sglang_tuning_exporter.core.server import Server
from sglang_tuning_exporter.core.sums import BUCKET_SECONDS, merged
from sglang_tuning_exporter.core.times import Span
from sglang_tuning_exporter.core.view import View, view_of, with_outage
from sglang_tuning_exporter.sglang.flags import VARYING_ARGS, are_same_settings

STEP_SECONDS = 30.0
# of silence, after which nothing changes: starts count for half an hour, and no alert waits for longer than the rest
CALM_SECONDS = 2700.0
# In a run shorter than the window, what held in stretches of this length for so much of it is said as well: two causes
# in turn.
PHASE_SECONDS, LEAST_PHASE_SECONDS, PHASE_SHARE = 60.0, 60.0, 0.35
ENOUGH_SHARE = 0.5  # of the serving time: in a log shorter than a row's `after`
STRETCH_SECONDS = 15.0  # shorter pauses do not divide a load
MOSTLY_HUNG = 0.5  # of a stretch without batches
MOST_SILENCES = 3  # that are noted


@dataclass(slots=True)
class Episode:
    """How long a row held in a run, and the view in which it was clearest."""

    run: Run
    row: Diagnosis
    measured: judge.Measured
    excess: float  # of its figure over the limit, in that view
    seconds: float = 0.0

    def finding(self, also: frozenset[str]) -> Finding | None:
        """Return the finding of this row; None where it has none, because its advice is left to another."""
        worded = judge.findings(self.measured, also)
        return next((finding for finding in worded if finding.diagnosis == self.row.id), None)


@dataclass(slots=True)
class Run:
    """One start of the server, until the next."""

    begin: float
    view: View  # all of it, once it has ended
    is_start: bool = False  # its arguments are in the log
    episodes: dict[str, Episode] = field(default_factory=dict)  # by row
    phases: dict[str, Episode] = field(default_factory=dict)  # of the last minute, in a run shorter than the window
    verdicts: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds of serving time

    @property
    def ended(self) -> str:
        """How it ended; empty where it did not."""
        return self.view.ended if self.view.has_ended else ""


class Course:
    """Takes the events of a log in order of time; `end` says what the whole shows.

    Every `STEP_SECONDS` of the log the last ten minutes are weighed. A start begins anew: a run shorter than that is
    weighed once, at its end.
    """

    def __init__(self, profile: profiles.Profile) -> None:
        self.server = Server(profile)
        self.runs: list[Run] = []
        self._profile = profile
        self._step: float | None = None  # the next one
        self._credited: dict[int | None, float] = {}  # serving seconds of each scheduler that are credited to rows
        self._clocks = Clocks(profile, shown=False)
        self._alerts: list[Alert] = []
        self._last_line: float | None = None

    def take_line(self, event: Event) -> None:
        """Take a line of the log."""
        server, now = self.server, event.time
        if not self.runs:
            self._begin_run(now or 0.0)
        if now is not None:
            if self._step is None:  # what has no time before it is of the same run
                self._step, self.runs[-1].begin = now + STEP_SECONDS, now
            if now >= self._step:
                self._pass_until(now)
            self._last_line = now
        if event.kind == "arguments":
            self._end_run()
        server.take_line(event)
        if event.kind == "arguments":
            self._begin_run(server.now or 0.0, is_start=True)

    def _begin_run(self, begin: float, *, is_start: bool = False) -> None:
        self.runs.append(Run(begin, view_of(self.server, 0.0), is_start))

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
        measured = judge.weigh(view_of(self.server, min(window, now - run.begin)))
        self._pass_clocks(measured, now)
        if now - run.begin >= window:
            run.phases.clear()
            self._credit(run, measured)
            return
        phase = judge.weigh(view_of(self.server, min(PHASE_SECONDS, now - run.begin)))
        for name in phase.holding if phase.view.has_enough_load else ():
            _extend(run, run.phases, name, phase, min(STEP_SECONDS, phase.view.served))

    def _pass_clocks(self, measured: judge.Measured, now: float) -> None:
        """Let the clocks of the alerts go on; while the server is away, its failures stay in sight, of any run."""
        view = with_outage(measured.view, self.server)
        in_sight = measured if view is measured.view else judge.weigh(view)
        self._alerts += self._clocks.pass_on(in_sight, self.server, now)

    def _credit(self, run: Run, measured: judge.Measured, *, is_end: bool = False) -> None:
        """Credit the serving time since the last step to the rows that hold."""
        served = {dp: life["activity/serving"] for dp, life in self.server.lives.items()}
        seconds = max((now - self._credited.get(dp, 0.0) for dp, now in served.items()), default=0.0)
        self._credited = served
        if measured.view.has_enough_load or is_end:
            run.verdicts[measured.verdict] += seconds
        for name in measured.holding:
            _extend(run, run.episodes, name, measured, seconds)

    def _end_run(self) -> judge.Measured:
        """Weigh what is left of a run at its end, and return that."""
        server, run = self.server, self.runs[-1]
        now = server.now or 0.0
        server.advance(now)
        run.view = view_of(server, now - run.begin)
        last = judge.weigh(view_of(server, min(self._profile.window_seconds, now - run.begin)))
        self._credit(run, last, is_end=True)
        if run.view.has_enough_load and set(run.verdicts) <= {judge.NOT_ENOUGH, judge.IDLE}:
            measured = judge.weigh(run.view)  # too little in any ten minutes, enough in all
            run.verdicts = {measured.verdict: run.view.served}
            for name in measured.holding:
                _extend(run, run.episodes, name, measured, run.view.served)
        _leave_out(run)
        return last

    # The whole

    def end(self, now: float | None = None) -> Judgement:
        """Return what the log says; `now` is the time of its last line."""
        server = self.server
        if now is not None and server.now is not None and now > server.now:
            self._pass_until(now)
            server.advance(now)
        if not self.runs:
            self._begin_run(0.0)
        server.settle()
        last, end = self._end_run(), server.now or 0.0
        if server.begin is not None:
            self._pass_clocks(last, end)
        self._alerts += self._clocks.firing
        judgement, totals = self._judgement(end), merged(bucket for _, bucket in server.buckets)
        is_shown = [run.is_start or run.view.served or len(self.runs) == 1 for run in self.runs]
        return answer.with_figures(
            judgement, server, totals, profile=self._profile.name, begin=server.begin,
            end=server.now if server.begin is not None else None,
            serving_seconds=self._served, idle_seconds=View(totals, server.facts, server.profile, end).idle,
            mostly=self._mostly(judgement), alerts=tuple(sorted(self._alerts, key=lambda alert: alert.at)),
            course=self._stretches(),
            starts=tuple(self._start(number) for number, shown in enumerate(is_shown) if shown),
            counts={name: totals[count] for name, count in answer.COUNTED.items()},
            available_gb=tuple(gigabytes for run in self.runs for gigabytes in run.view.facts.left.values()),
        )  # fmt: skip

    @property
    def _served(self) -> float:
        """Serving seconds of all runs, once they have ended."""
        return sum(run.view.served for run in self.runs)

    @property
    def _ends_with_enough(self) -> bool:
        """Whether the last run served for long enough to be judged by itself."""
        return self.runs[-1].view.served >= self._profile.enough_serving_seconds

    def _mostly(self, judgement: Judgement) -> tuple[str, float] | None:
        """Return the verdict that held for most of the serving time, and its share; None where nothing was served."""
        verdicts, own = defaultdict[str, float](float), judgement.own
        for run in self.runs:
            for verdict, seconds in run.verdicts.items():
                verdicts[verdict] += seconds
        total = sum(verdicts.values())
        if not total:
            return None
        mostly = max(verdicts, key=verdicts.__getitem__)
        if own is not None and judgement.verdict not in verdicts:
            # A part of it, in which something else held.
            verdicts[mostly] -= min(own.seconds, verdicts[mostly])
        return mostly, verdicts[mostly] / total

    def _judgement(self, end: float) -> Judgement:
        """Return the worst verdict that held long enough, with every finding of the log."""
        served, last = self._served, self.runs[-1]
        chosen = [episode for run in self.runs for episode in run.episodes.values() if self._counts(episode, served)]
        chosen += last.phases.values()
        limits = sorted(
            (episode for episode in chosen if episode.row.is_limit(episode.measured.view)),
            key=lambda episode: (
                -URGENCY[self._severity(episode)],
                episode.run is not last,
                place(episode.row),
                -episode.seconds,
            ),
        )
        headed = (self._headed_by(episode, chosen, end) for episode in limits)
        return next((judgement for judgement in headed if judgement is not None), None) or self._without_limit(
            chosen, end
        )

    def _headed_by(self, first: Episode, chosen: list[Episode], end: float) -> Judgement | None:
        """Return the judgement with this verdict; None for a row that is no finding, because its advice is left to
        another.
        """
        name, names = first.row.id, {episode.row.id for episode in chosen}
        also = frozenset(row for row in names if BY_ID[row].protects)
        worded = judge.findings(first.measured, also)
        if all(finding.diagnosis != name for finding in worded):
            return None
        context = [
            self._timed(finding, first.run.episodes.get(finding.diagnosis, first), end)
            for finding in worded
            if finding.diagnosis in names or not finding.is_limit
        ]
        context.sort(key=lambda finding: finding.diagnosis != name)
        findings = sorted(
            [*context, *self._others(chosen, context, end, also)],
            key=lambda finding: (finding.diagnosis != name, not finding.is_limit, -URGENCY[finding.severity]),
        )
        checks, notes = first.measured.checks, self._notes(judge.muted(self._profile, {}))
        return Judgement(name, findings[0].headline, findings[0].severity, tuple(findings), checks, notes)

    def _without_limit(self, chosen: list[Episode], end: float) -> Judgement:
        """Return the judgement where nothing limited the server for long enough."""
        run = max(
            self.runs,
            key=lambda run: (
                run.view.served >= self._profile.enough_serving_seconds,
                run is self.runs[-1],
                run.view.served,
            ),
        )
        base = judge.judge(run.view)
        context = [finding for finding in base.findings if not finding.is_limit]
        findings = (*context, *self._others(chosen, context, end))
        checks, notes = base.checks, self._notes(base.notes)
        first = next((finding for finding in findings if finding.is_limit), None)
        if first is not None:
            return Judgement(first.diagnosis, first.headline, first.severity, findings, checks, notes)
        verdict = base.verdict if base.verdict not in BY_ID else judge.NO_LIMIT
        sentence = base.sentence if verdict == base.verdict else judge.SENTENCES[verdict]
        if verdict == judge.NOT_ENOUGH:
            sentence = judge.leading_fact(verdict, findings) or judge.short_load(run.view)
        if verdict == judge.STARTING:
            sentence = (
                "The log ends before the server is ready: it does not say whether it still starts, or why it ended."
            )
        return Judgement(verdict, sentence, "none", findings, checks, notes)

    def _severity(self, episode: Episode) -> Severity:
        """Return how urgent the finding of a row is once the log has ended: the server may have come back."""
        run, row = episode.run, episode.row
        return row.severity_in(run.view) if run is self.runs[-1] else row.severity_over or row.severity

    def _counts(self, episode: Episode, served: float) -> bool:
        """Whether a row held long enough to be reported; of a run before other settings only failures are."""
        run, row, last = episode.run, episode.row, self.runs[-1]
        if row.any_load:
            return row.chance is False or run is last or run.view.served > 0
        is_old = run is not last and self._ends_with_enough and row.severity != "critical"
        if is_old and not are_same_settings(run.view.facts.arguments, last.view.facts.arguments):
            return False
        runs = [run] if run is last and self._ends_with_enough else self.runs
        judged = sum(sum(run.verdicts.values()) for run in runs) or served  # a start begins another server
        return episode.seconds >= min(row.after, ENOUGH_SHARE * judged) and episode.seconds > 0

    def _others(
        self, chosen: list[Episode], context: list[Finding], end: float, also: frozenset[str] = frozenset()
    ) -> list[Finding]:
        """Return the findings of other times; a flag that is set already is not set again."""
        names, more = {finding.diagnosis for finding in context}, list[Finding]()
        flags = {arg: value for finding in context for arg, value in _flags_of(finding)}
        for episode in sorted(chosen, key=lambda episode: -episode.seconds):
            finding = None if episode.row.id in names else _beside(episode.finding(also), flags)
            if finding is None:
                continue
            names.add(episode.row.id)
            flags.update(_flags_of(finding))
            more.append(self._timed(finding, episode, end))
        return more

    def _timed(self, finding: Finding, episode: Episode, end: float) -> Finding:
        """Add when a finding was seen, and say one that is over in the past tense."""
        run = episode.run
        timed = Span(self.server, run.begin, run.view.now, run.view.totals).timed(finding, end)
        if timed is None:
            always = BY_ID[finding.diagnosis].any_load
            timed = replace(finding, since=run.begin if always else None, until=run.view.now if always else None)
        return replace(timed, severity=self._severity(episode), seconds=episode.seconds)

    # Notes

    def _notes(self, muted: tuple[str, ...]) -> tuple[str, ...]:
        """Return what is muted, the silences of the log, and the figures outside the guide's range of which no finding
        speaks.
        """
        return (*muted, *self._silences(), *self._beside_the_guide())

    def _silences(self) -> Iterator[str]:
        server, ranks = self.server, self.server.schedulers.values()
        for silence in server.silences[:MOST_SILENCES]:
            yield (
                f"Nothing was logged for {silence.seconds:.0f} s from {_clock(silence.begin)} on, while"
                f" {silence.before:.0f} requests ran; afterwards {silence.after:.0f} ran."
            )
        running = sum(rank.shown.running or 0.0 for rank in ranks)
        if running >= 1 and self._last_line is not None and not server.stopping and not server.ended:
            silent = self._last_line - max(rank.logged_at for rank in ranks)
            if silent <= 1.2 * max(rank.hold_seconds for rank in ranks):
                yield f"The log ends while {running:.0f} ran; whether they were answered is not in it."

    def _beside_the_guide(self) -> Iterator[str]:
        view = max((run.view for run in self.runs), key=lambda view: view.served)
        profile, reserve = view.profile, view.facts.reserve_gb
        if reserve is not None and profile.reserve_good_gb < reserve <= profile.reserve_upper_gb:
            good, upper = f"the guide's good range (5 to {profile.reserve_good_gb:g} GB)", profile.reserve_upper_gb
            known = f"neither in {good} nor too much (more than {upper:g} GB)" if upper < inf else f"above {good}"
            yield f"{reserve:.4g} GB of GPU memory were left after the start: {known}."
        if view.facts.is_on("disable_radix_cache") and view.has_enough_load and view.facts.role != "decode":
            yield (
                "The prefix cache is off (--disable-radix-cache): prompts that share a prefix are computed whole, each"
                " time."
            )
        lower, queued = profile.queue_lower, view.sum("queued")
        is_short = view.has_enough_load and (view.share("queue", "below_range") or 0.0) > profile.frequent_share
        if lower and queued and is_short:
            yield (
                f"{queued:.0f} requests waited on average; the guide's range is {lower:g} to"
                f" {profile.queue_upper:,.0f}."
            )

    # What is shown beside it

    def _start(self, number: int) -> Start:
        run, earlier = self.runs[number], self.runs[number - 1] if number else None
        facts, before = run.view.facts, earlier.view.facts.arguments if earlier and earlier.is_start else {}
        changed = {
            arg: (before.get(arg), value)
            for arg, value in facts.arguments.items()
            if before and arg not in VARYING_ARGS and before.get(arg) != value and not isinstance(value, dict)
        }  # fmt: skip
        return Start(
            run.begin if run.is_start and self.server.begin is not None else None, facts.shown_release, facts.arguments,
            changed,
            answer.figures_of(run.view), run.ended, answer.memory(facts),
        )  # fmt: skip

    def _stretches(self) -> tuple[Stretch, ...]:
        """Return the course of the log: starting, serving, idle, silent, stopped."""
        if self.server.begin is None:
            return ()
        return tuple(stretch for run in self.runs for stretch in self._stretches_of(run))

    def _stretches_of(self, run: Run) -> Iterable[Stretch]:
        stretches, serving = list[Stretch](), self._serving(run)
        begin, end = run.begin, run.view.now
        if run.is_start:
            first = serving[0][0] if serving else end
            words = ", ".join(answer.memory_words(answer.memory(run.view.facts), "CUDA graphs"))
            stretches.append(Stretch("starting", begin, first, words))
            begin = first
        for start, stop in serving:
            if start - begin > STRETCH_SECONDS:
                stretches.append(self._without_work(begin, start))
                begin = start
            if stretches and stretches[-1].what == "serving" and start - stretches[-1].end <= STRETCH_SECONDS:
                stretches[-1] = replace(stretches[-1], end=stop)
            else:
                stretches.append(Stretch("serving", min(begin, start), stop))
            begin = max(begin, stop)
        if run.ended:
            stretches.append(Stretch("stopped", begin, end, run.ended))
        elif end - begin > 1.0:
            stretches.append(self._without_work(begin, end))
        return stretches

    def _serving(self, run: Run) -> list[tuple[float, float]]:
        """Return begin and end of each bucket of a run in which it served."""
        begin, end = run.begin, run.view.now
        return [
            (max(at, begin), min(at + BUCKET_SECONDS, end))
            for at, totals in self.server.buckets
            if begin - BUCKET_SECONDS < at <= end and any(totals.under("serves").values())
        ]

    def _without_work(self, begin: float, end: float) -> Stretch:
        """Return a stretch in which no batch was logged: silent where requests waited most of the time, or were
        retracted.
        """
        buckets = [totals for at, totals in self.server.buckets if begin - BUCKET_SECONDS < at < end]
        idle, unknown = (sum(totals[f"queue/{state}"] for totals in buckets) for state in ("idle", "unknown"))
        hung = sum(max(min(hang.until, end) - max(hang.begin, begin), 0.0) for hang in self.server.hangs)
        if hung > MOSTLY_HUNG * (end - begin):
            return Stretch("silent", begin, end, "SGLang hung")
        worked = unknown > idle or any(totals["retraction_events"] for totals in buckets)
        return Stretch("silent" if worked else "idle", begin, end)


# Rows over time


def _extend(run: Run, episodes: dict[str, Episode], name: str, measured: judge.Measured, seconds: float) -> None:
    """Credit seconds to a row, and keep the view in which it was clearest."""
    figure = measured.figures[name]
    excess = (figure.value - (figure.limit or 0.0)) * (1 if figure.side == "above" else -1)
    episode = episodes.get(name)
    if episode is None:
        episode = episodes[name] = Episode(run, BY_ID[name], measured, excess)
    elif excess > episode.excess:
        episode.excess, episode.measured = excess, measured
    episode.seconds += seconds
    if episode.measured is measured:
        measured.figures.measure_all()  # later the facts of its view may be others


def _leave_out(run: Run) -> None:
    """Drop from a run that has ended the rows that its whole explains, and the phases that were too short."""
    least = max(LEAST_PHASE_SECONDS, PHASE_SHARE * run.view.served)
    run.phases = {
        name: episode
        for name, episode in run.phases.items()
        if name not in run.episodes and episode.seconds >= least and not episode.row.chance
    }
    run.phases = {name: episode for name, episode in run.phases.items() if not episode.row.denied_in_part(run.view)}
    beside = frozenset(episode.row for episode in run.episodes.values())
    for episodes in (run.episodes, run.phases):
        for name in [name for name, episode in episodes.items() if episode.row.denied(run.view, beside)]:
            del episodes[name]


def _flags_of(finding: Finding) -> Iterator[tuple[str, object]]:
    """Give the arguments that a finding sets, where it limits the server."""
    return ((change.arg, change.to) for change in finding.changes if change.arg and finding.is_limit)


def _beside(finding: Finding | None, flags: dict[str, object]) -> Finding | None:
    """Return a finding without the changes that others set otherwise; None where nothing is left of it."""
    if finding is None:
        return None
    kept = tuple(change for change in finding.changes if change.arg not in flags or flags[change.arg] == change.to)
    if not kept and BY_ID[finding.diagnosis].needs_advice and not finding.is_limit:
        return None
    return replace(finding, changes=kept)


def _clock(moment: float) -> str:
    minutes = int(moment // 60) % (24 * 60)
    return f"{minutes // 60:02}:{minutes % 60:02}"
