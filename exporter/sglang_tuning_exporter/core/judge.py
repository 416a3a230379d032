"""What limits a server over a stretch of time, and what to change. Pure.

A pipeline, read top down: measure every diagnosis -> leave out those that another one explains -> rank -> advise ->
word. Nothing downstream measures again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Literal

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core import advice
from sglang_tuning_exporter.core.diagnoses import (
    ALL,
    BY_ID,
    Diagnosis,
    Group,
    better_explained_by,
    causes_of,
    place,
)
from sglang_tuning_exporter.core.diagnoses.steps import typed_settings
from sglang_tuning_exporter.core.diagnoses.suspects import explained_by_flag
from sglang_tuning_exporter.core.events import CAUSE, Event
from sglang_tuning_exporter.core.findings import (
    URGENCY,
    Change,
    Confidence,
    Figure,
    Finding,
    Judgement,
    Severity,
    amount,
)
from sglang_tuning_exporter.core.server import SURVIVED_SECONDS, Server
from sglang_tuning_exporter.core.sums import BUCKET_SECONDS, WAITS, Totals
from sglang_tuning_exporter.core.view import View, explained
from sglang_tuning_exporter.sglang.flags import have_effect

NO_LIMIT, IDLE, NOT_ENOUGH, STARTING = "no_limit_in_log", "idle", "not_enough_data", "starting"
HEALTHY, UNEXPLAINED, STOPPED = "healthy", "unexplained", "stopped"
SENTENCES = {
    HEALTHY: "Nothing limits this server: requests end with their answers, and none waits longer than it should.",
    UNEXPLAINED: "Most requests are given up by their clients; the cause is not known.",
    NO_LIMIT: "Nothing limits this server as far as its log shows; whether clients got their answers is not in a log.",
    IDLE: "The server is idle: no request comes.",
    STARTING: "The server is starting.",
    STOPPED: "The server was stopped: its log says that it was asked to end.",
}
BUT_MUTED = "Nothing limits this server but what is muted."
PAST_SECONDS = 120.0  # without a sign of a diagnosis, after which it is over
HIGH, MEDIUM = 120.0, 60.0  # seconds of serving time for this confidence
NEARLY_ALL_GIVEN_UP = 0.5  # of the requests that ended
LEAST_WAITED = 10.0  # seconds of waiting that show what requests wait for
MOST_QUOTED = 2  # decisions of SGLang's, in one finding


def judge(view: View) -> Judgement:
    """Return the findings of one stretch, and what limits the server in it."""
    measured = weigh(view)
    return judgement_of(measured, findings(measured))


def weigh(view: View) -> Measured:
    """Return the figures, and the diagnoses that hold without those that another one explains: enough for alerts."""
    view = explained_by_flag(explained(view))
    figures = Figures(view)
    left = _unexplained(_holding(view, figures), view.profile)
    others = {diagnosis: tuple(other for other in left if other is not diagnosis) for diagnosis in left}
    return Measured(
        view, figures, tuple(diagnosis.id for diagnosis in left if diagnosis.matters(view, others[diagnosis]))
    )


@lru_cache
def _of_profile(name: str) -> tuple[Diagnosis, ...]:
    """Return the diagnoses that are measured with a profile."""
    return tuple(diagnosis for diagnosis in ALL if not diagnosis.profiles or name in diagnosis.profiles)


def _holding(view: View, figures: Figures) -> set[Diagnosis]:
    """Return the diagnoses whose figure is on the bad side of its limit; none of a server that was stopped.

    If the line that explains a crash denies that memory ran out, the diagnoses that say so do not hold.
    """
    if view.stopped:
        return set()
    asked = (diagnosis for diagnosis in _of_profile(view.profile.name) if diagnosis.when.is_possible(view))
    holds = {diagnosis for diagnosis in asked if figures.holds(diagnosis)}
    denies = view.explanation is not None and view.explanation.denies_memory
    if denies and any(diagnosis.death == "crash" for diagnosis in holds):
        return {diagnosis for diagnosis in holds if not diagnosis.deniable}
    return holds


def _unexplained(holds: set[Diagnosis], profile: profiles.Profile) -> list[Diagnosis]:
    """Return the diagnoses that hold, causes first, without muted ones and those that another one explains better."""
    heard = (diagnosis for diagnosis in ALL if diagnosis in holds and diagnosis.id not in profile.accepts)
    return [diagnosis for diagnosis in heard if holds.isdisjoint(better_explained_by(diagnosis))]


def judgement_of(measured: Measured, worded: tuple[Finding, ...]) -> Judgement:
    """Return the judgement with these findings."""
    profile, figures = measured.view.profile, measured.figures
    return Judgement(*_verdict(measured, worded), worded, measured.checks, muted(profile, figures))


def _measure(diagnosis: Diagnosis, view: View) -> Figure | None:
    """Return the figure that decides a diagnosis; None where nothing shows it, or the load was too little."""
    when = diagnosis.when
    if diagnosis.profiles and view.profile.name not in diagnosis.profiles:
        return None
    if not (diagnosis.any_load or (view.has_enough_load if diagnosis.enough is None else diagnosis.enough(view))):
        return None
    value, limit = when.measure(view), when.bound(view)
    return None if value is None or limit is None else Figure(when.name, value, when.unit, limit, when.side)


class Figures(Mapping[str, Figure]):
    """The figures of all diagnoses that can be measured over a view, by the names of the diagnoses.

    A figure is measured when somebody asks for it first: while time passes, few are asked for.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._measured: dict[str, Figure | None] = {}

    def of(self, diagnosis: Diagnosis) -> Figure | None:
        """Return the figure of a diagnosis; None where it cannot be measured."""
        name = diagnosis.id
        if name not in self._measured:
            self._measured[name] = _measure(diagnosis, self._view)
        return self._measured[name]

    def holds(self, diagnosis: Diagnosis) -> bool:
        """Whether the figure of a diagnosis is on the bad side of its limit."""
        figure = self.of(diagnosis)
        return figure is not None and figure.holds

    def measure_all(self) -> None:
        """Measure every diagnosis now."""
        for diagnosis in ALL:
            self.of(diagnosis)

    def __getitem__(self, name: str) -> Figure:
        figure = self.of(BY_ID[name])
        if figure is None:
            raise KeyError(name)
        return figure

    def __iter__(self) -> Iterator[str]:
        return (diagnosis.id for diagnosis in ALL if self.of(diagnosis) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True, slots=True)
class Measured:
    """Every diagnosis that holds over a view, causes first, without those that another one explains."""

    view: View
    figures: Figures
    holding: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """The diagnosis that limits the server, or the word for why there is none."""
        limits = [diagnosis for diagnosis in self.diagnoses if diagnosis.is_limit(self.view)]
        return min(limits, key=self.place).id if limits else self.without_limit

    @property
    def without_limit(self) -> str:
        """The word for why nothing limits the server."""
        view = self.view
        if view.starting or view.stopped:
            return STARTING if view.starting else STOPPED
        if not view.has_enough_load:
            return IDLE if _is_idle(view) else NOT_ENOUGH
        if view.waits_unexplained_yet:
            return NOT_ENOUGH
        if not view.scraped:
            return NO_LIMIT
        if _is_served(view):
            return HEALTHY
        return NOT_ENOUGH if view.hung else UNEXPLAINED

    @property
    def checks(self) -> Mapping[str, Figure | None]:
        """The figure of every diagnosis of the profile; None where it was not measured."""
        return {diagnosis.id: self.figures.of(diagnosis) for diagnosis in _of_profile(self.view.profile.name)}

    @property
    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """The diagnoses that hold, causes first."""
        return tuple(BY_ID[name] for name in self.holding)

    def causes(self, diagnosis: Diagnosis) -> tuple[Diagnosis, ...]:
        """Return the diagnoses that can cause this one here.

        A failure that was only predicted, or that the server survived, is not the cause of its end.
        """
        if not diagnosis.death:
            return causes_of(diagnosis)
        return tuple(cause for cause in causes_of(diagnosis) if not self._is_harmless(cause, diagnosis))

    def _is_harmless(self, failure: Diagnosis, death: Diagnosis) -> bool:
        """Whether a failure was only predicted, or the server worked on after it."""
        if failure.feared(self.view):
            return True
        failed, worked = failure.when.last_at(self.view.last), self.view.last.get(death.worked, -inf)
        return Group.FAILURE in failure.groups and failed is not None and worked - failed >= SURVIVED_SECONDS

    def place(self, diagnosis: Diagnosis) -> tuple[bool, int, int]:
        """Return the rank of a diagnosis.

        If the server is down, its end ranks first; failures that are not proven to have caused it rank last.
        """
        down = next((other for other in self.diagnoses if other.death == "down"), None)
        crash = next((other for other in self.diagnoses if other.death == "crash"), None)
        death = down or (crash if self.view.has_ended else None)
        unproven = death is not None and Group.FAILURE in diagnosis.groups and diagnosis not in self.causes(death)
        return unproven, -URGENCY[diagnosis.severity_in(self.view)], place(diagnosis)


def _is_idle(view: View) -> bool:
    """Whether no request came for at least half of the time."""
    idle = view.idle > 0 and view.idle >= view.served and not view.busy
    return idle and view.served < view.profile.enough_serving_seconds


def _is_served(view: View) -> bool:
    """Whether clients get answers: requests end, and most are not given up; or tokens are sent while requests run."""
    share, totals = view.given_up_share, view.totals
    if view.silent_seconds or (share is not None and share > NEARLY_ALL_GIVEN_UP and not view.cancels):
        return False
    ends = totals["finished_requests"] > totals["aborted_requests"]
    return ends or totals["decoded_tokens"] > 0 or "finished_requests" not in totals


# The verdict in words


def _verdict(measured: Measured, worded: tuple[Finding, ...]) -> tuple[str, str, Severity | Literal["none"]]:
    """Return the verdict, its sentence and its severity."""
    first = next((finding for finding in worded if finding.is_limit), None)
    if first is not None:
        return first.diagnosis, first.headline, first.severity
    view, figures, verdict = measured.view, measured.figures, measured.without_limit
    if verdict in {HEALTHY, NO_LIMIT} and any(figures[name].holds for name in view.profile.accepts & figures.keys()):
        return verdict, BUT_MUTED, "none"
    sentence = SENTENCES.get(verdict)
    if verdict == IDLE and view.served >= 1 and not view.scraped:
        sentence = f"The server was idle most of the time: requests ran for {view.served:.0f} s."
    if verdict == NO_LIMIT and sentence and (retracted := _retracted(view)):
        sentence = f"{sentence} {retracted}."
    return verdict, leading_fact(verdict, worded) or sentence or short_load(view), "none"


def muted(profile: profiles.Profile, figures: Mapping[str, Figure]) -> tuple[str, ...]:
    """Return a sentence for each diagnosis that the user accepts: why, and whether it holds now."""
    return tuple(
        f"Muted: {BY_ID[name].summary} Why: {reason}."
        + (" It is so now." if name in figures and figures[name].holds else "")
        for name, reason in profile.accepted
    )


def leading_fact(verdict: str, worded: tuple[Finding, ...]) -> str:
    """Return the headline that opens the answer to too little load; empty where there is none."""
    facts = (finding.headline for finding in worded if BY_ID[finding.diagnosis].at_once)
    return next(facts, "") if verdict == NOT_ENOUGH else ""


def short_load(view: View) -> str:
    """Return a sentence about a load that was too short for a verdict."""
    totals = view.totals
    if view.silent_seconds:
        return f"Requests run, and no token has been sent for {view.silent_seconds:.0f} s."
    if not view.served and view.scraped:
        return "There was no load in the last ten minutes."
    if not totals["decode_lines"] and not totals["prefill_lines"]:
        words = "There is no batch line in this log" + (", though the server is ready" if view.facts.ready else "")
    elif not view.served and not view.now:
        words = "Its batches have no time, so their load cannot be judged"
    else:
        words = _short_load_with_figures(view)
    retracted = _retracted(view)
    return f"{words}, and {retracted}." if retracted else f"{words}."


def _short_load_with_figures(view: View) -> str:
    """Return how long a short load was, how long requests waited in it, and how full the KV cache became."""
    served, totals = f"{view.served:.0f} s" if view.served >= 1 else "less than 1 s", view.totals
    figures = []
    if totals["most_queued"]:
        figures = [f"mean wait {view.wait:.1f} s"] if view.wait else []
        figures.append(f"queue up to {totals['most_queued']:,.0f}")
    if totals["most_usage"] >= view.profile.token_usage_target:
        figures.append(f"the KV cache up to {100 * totals['most_usage']:.0f} % full")
    return f"The load of {served} was too short for a verdict{': ' if figures else ''}{', '.join(figures)}"


def _retracted(view: View) -> str:
    """Return how often SGLang retracted running requests, in words; empty where it did not."""
    number = view.totals["retraction_events"]
    times = f"{number:,.0f} times" if number > 1 else "once"
    return f"SGLang retracted running requests {times}" if number else ""


# Findings and their changes


def _stands_alone(diagnosis: Diagnosis, measured: Measured) -> bool:
    """True if the finding is reported even when no change can be advised."""
    return not diagnosis.needs_advice or (diagnosis.chance and diagnosis.any_load and diagnosis.is_limit(measured.view))


def findings(measured: Measured, also: frozenset[str] = frozenset()) -> tuple[Finding, ...]:
    """Return the findings of the diagnoses that hold, with their changes: limits first, opportunities last.

    No flag is set two ways. `also`: names of diagnoses that held at other times; they protect what they need as well.
    """
    advised = _Changes(measured, frozenset(map(BY_ID.__getitem__, {*measured.holding, *also})))
    for diagnosis in sorted(measured.diagnoses, key=lambda diagnosis: (diagnosis.chance, place(diagnosis))):
        advised.add_changes_of(diagnosis)
    reported = {
        diagnosis
        for diagnosis, changes in advised.by_diagnosis.items()
        if changes or _stands_alone(diagnosis, measured)
    }
    order = sorted(
        reported,
        key=lambda diagnosis: (diagnosis.chance, not diagnosis.is_limit(measured.view), measured.place(diagnosis)),
    )
    because = {
        diagnosis: tuple(cause.id for cause in measured.causes(diagnosis) if cause in reported) for diagnosis in order
    }
    return tuple(
        _worded(diagnosis, measured, advised.by_diagnosis[diagnosis], because[diagnosis]) for diagnosis in order
    )


class _Changes:
    """The changes of all findings; earlier findings win over later ones."""

    def __init__(self, measured: Measured, beside: frozenset[Diagnosis]) -> None:
        self.measured, self.view, self.beside = measured, measured.view, beside
        self.by_diagnosis: dict[Diagnosis, tuple[Change, ...]] = {}
        self.values: dict[str, object] = {}  # by argument

    def add_changes_of(self, diagnosis: Diagnosis) -> None:
        """Add the changes of a diagnosis: those of its causes where it borrows, else its own.

        Changes of flags that other findings set or protect are left out.
        """
        if diagnosis.borrows == "as well":
            self.by_diagnosis[diagnosis] = (
                *self._borrowed(diagnosis, self.measured.causes(diagnosis)),
                *self._own(diagnosis),
            )
        else:
            self.by_diagnosis[diagnosis] = self._instead(diagnosis) if diagnosis.borrows else self._own(diagnosis)

    def _instead(self, diagnosis: Diagnosis) -> tuple[Change, ...]:
        """Return the changes of a cause, else those of the reason why requests waited, else its own."""
        if borrowed := self._borrowed(diagnosis, causes_of(diagnosis), flags_only=False):
            return borrowed
        reason = self._reason_of_waits()
        own = self._own(reason) if reason is not None and reason not in self.beside else ()
        return tuple(change for change in own if change.flag) or self._own(diagnosis)

    def _borrowed(
        self, diagnosis: Diagnosis, causes: tuple[Diagnosis, ...], *, flags_only: bool = True
    ) -> tuple[Change, ...]:
        """Return the changes of the first cause that has a flag; else those of the first that has any.

        With `flags_only` they are empty where no cause has a flag.
        """
        lenders = [cause for cause in causes if self.by_diagnosis.get(cause) and not cause.chance]
        flagged = {cause: tuple(change for change in self.by_diagnosis[cause] if change.flag) for cause in lenders}
        cause = next((cause for cause in lenders if flagged[cause]), None)
        if cause is None:
            return () if flags_only or not lenders else self._lent(lenders[0], self.by_diagnosis[lenders[0]], diagnosis)
        return self._lent(cause, flagged[cause], diagnosis)

    def _lent(self, cause: Diagnosis, changes: tuple[Change, ...], diagnosis: Diagnosis) -> tuple[Change, ...]:
        return (*changes, *self._own(diagnosis)) if cause.lends_beside else changes

    def _reason_of_waits(self) -> Diagnosis | None:
        """Return the diagnosis that explains most of the waits, even if it held too seldom for a finding."""
        seconds = {reason: self.view.totals[f"admission/{reason}"] for reason in WAITS}
        most, waited = max(seconds, key=seconds.__getitem__), sum(seconds.values())
        if waited < LEAST_WAITED or seconds[most] <= self.view.profile.frequent_share * waited:
            return None
        return next((diagnosis for diagnosis in ALL if diagnosis.wait == most), None)

    def _own(self, diagnosis: Diagnosis) -> tuple[Change, ...]:
        """Return the changes that a diagnosis advises, without those that are not allowed beside the others."""
        offered = advice.advise(diagnosis, self.view, self.beside)
        kept: dict[str, Change] = {}
        for change in offered:
            if self._is_allowed(diagnosis, change):
                kept.setdefault(change.arg or f"words {len(kept)}", change)
        if offered and not kept and not diagnosis.needs_advice:
            kept[""] = Change(words="change nothing for it yet: what another finding asks for comes first")
        if not diagnosis.chance:
            self.values.update(
                {
                    arg: change.to
                    for arg, change in kept.items()
                    if change.arg and (change.to is not None or change.removes)
                }
            )
        return tuple(kept.values())

    def _is_allowed(self, diagnosis: Diagnosis, change: Change) -> bool:
        """Whether a change agrees with the others.

        No finding before it sets the flag to another value, no finding protects what the change takes, and the release
        accepts its value beside the others.
        """
        arg, view = change.arg, self.view
        if not arg:
            return True
        # A finding repeats the change of another one where the flag is its own.
        is_repeated = diagnosis.borrows == "instead" or arg == diagnosis.remedy.arg
        if arg in self.values and not (is_repeated and self.values[arg] == change.to):
            return False
        takes = _TAKES.get((arg, change.direction), frozenset())
        if any(other.protects in takes for other in self.beside if other is not diagnosis):
            return False
        if view.facts.release is None or (change.to is None and not change.removes):
            return True
        return have_effect(view.facts.release, {**self.values, arg: change.to}, typed_settings(view))


# What each change takes. After an out-of-memory failure no change takes memory; while SGLang retracts requests, no
# change adds requests.
_MEMORY, _REQUESTS = frozenset({"memory"}), frozenset({"requests"})
_TAKES = {
    ("mem_fraction_static", "raise"): _MEMORY,
    ("max_total_tokens", "raise"): _MEMORY,
    ("chunked_prefill_size", "raise"): _MEMORY,
    ("max_prefill_tokens", "raise"): _MEMORY,
    ("cuda_graph_max_bs", "raise"): _MEMORY,
    ("cuda_graph_max_bs_decode", "raise"): _MEMORY,
    ("disable_cuda_graph", "drop"): _MEMORY,
    ("disable_decode_cuda_graph", "drop"): _MEMORY,
    ("enable_torch_compile", "add"): _MEMORY,
    ("max_running_requests", "raise"): _MEMORY | _REQUESTS,
    ("schedule_conservativeness", "lower"): _REQUESTS,
}


# A finding in words


def _confidence_of(view: View) -> Confidence:
    """Return the confidence in a judgement over so much serving time."""
    return "high" if view.served >= HIGH else "medium" if view.served >= MEDIUM else "low"


def _worded(diagnosis: Diagnosis, measured: Measured, changes: tuple[Change, ...], because: tuple[str, ...]) -> Finding:
    """Return a diagnosis that holds as a finding, with its words and figures."""
    view, figure = measured.view, measured.figures[diagnosis.id]
    figures, line = advice.figures_of(view), _explanation_of(diagnosis, measured)
    usual: Confidence = "high" if diagnosis.any_load and not diagnosis.chance else _confidence_of(view)
    guide = advice.fill(diagnosis.guide, figures)
    opposite = {"raise", "lower"} - {diagnosis.remedy.direction}
    if any(change.arg == diagnosis.remedy.arg and {change.direction} == opposite for change in changes):
        guide = "not in SGLang's guide, which says the opposite: here SGLang's own error names the change"
    elif not guide.startswith(("not in", "the guide has")):
        guide = f"SGLang's tuning guide, {guide}"
    return Finding(
        diagnosis.id,
        diagnosis.alert,
        diagnosis.severity_in(view),
        diagnosis.is_limit(view),
        _in_its_words(diagnosis, diagnosis.headline(view) or advice.fill(diagnosis.summary, figures), line),
        _sentence(diagnosis, view, figure, line),
        guide,
        diagnosis.confidence(view) or usual,
        (replace(figure, name=advice.fill(figure.name, figures)), *diagnosis.supporting(view)),
        changes,
        because,
        notes=tuple(_notes(diagnosis, view)),
        explained_by=line,
    )


def _explanation_of(diagnosis: Diagnosis, measured: Measured) -> Event | None:
    """Return the line of the log that explains a finding about an end.

    None where no line does, or the line belongs to a failure that is a finding as well.
    """
    view, line = measured.view, measured.view.explanation
    if line is None or diagnosis.feared(view):  # then the line is about another failure
        return None
    if Group.FAILURE in diagnosis.groups:
        return line if line.word == diagnosis.ends_as else None
    if not diagnosis.death:
        return None
    failures = {cause for cause in measured.causes(diagnosis) if Group.FAILURE in cause.groups} & {*measured.diagnoses}
    if any(_explanation_of(failure, measured) is not None for failure in failures):
        return None
    if diagnosis.death == "down":
        return view.explains_now
    return line if view.has_ended or view.totals["ends"] else None


def _in_its_words(diagnosis: Diagnosis, headline: str, line: Event | None) -> str:
    """Return the headline of an end with the words of the line that explains it, if they name a cause."""
    if line is None or diagnosis.death not in {"crash", "down"} or line.ending.weight < CAUSE:
        return headline
    words = line.short
    words = words if words.endswith(("?", "!", "…")) else words.rstrip(".") + "."
    return f"{headline.rstrip('.')}: {words}"


def _sentence(diagnosis: Diagnosis, view: View, figure: Figure, line: Event | None) -> str:
    """Return the sentence of a finding with its figure."""
    if own := diagnosis.sentence(view, line):
        return own
    value = (
        view.troubles.get(diagnosis.trouble)
        or diagnosis.says(view)
        or amount(figure.value, "count" if figure.unit == "per_minute" else figure.unit)
    )
    words = advice.fill(diagnosis.seen, advice.figures_of(view))
    return words.replace("{value}", value).replace("{s}", "" if value in {"1", "at least one"} else "s")


def _notes(diagnosis: Diagnosis, view: View) -> list[str]:
    """Return what speaks against a finding, and what SGLang decided itself about its flag."""
    decided = view.facts.recommended(diagnosis.remedy.arg, "decision")[:MOST_QUOTED] if diagnosis.remedy.arg else []
    words = [f"SGLang decided at its start: “{decision.words.rstrip('.')}”" for decision in decided]
    return [*filter(None, [diagnosis.remark(view)]), *words]


# Times


def first_and_last(diagnosis: Diagnosis, server: Server, begin: float, end: float) -> tuple[float, float] | None:
    """Return the first and the last time at which a stretch shows a diagnosis; None where it does not."""
    if (span := diagnosis.span(server, begin, end)) is not None:
        return span
    buckets = [bucket for bucket in server.buckets if begin - BUCKET_SECONDS <= bucket[0] <= end]
    # A diagnosis without sums of its own, or whose sums another state has taken, held while the server served.
    for names in (diagnosis.when.counts, ("lines",)):
        times = [at for at, totals in buckets if any(totals[name] > 0 for name in names)]
        if times:
            return max(times[0], begin), min(times[-1] + BUCKET_SECONDS, end)
    return None


def timed(finding: Finding, server: Server, begin: float, end: float, *, now: float, counts: Totals) -> Finding | None:
    """Return a finding with the times at which a stretch shows it; None where it does not.

    The headline of a finding that is over by `now` is in the past tense. `counts`: those of the stretch.
    """
    diagnosis = BY_ID[finding.diagnosis]
    times = first_and_last(diagnosis, server, begin, end)
    if times is None:
        return None
    since, until = times
    over, headline = "{until}" in diagnosis.past and now - until > PAST_SECONDS, finding.headline
    if over:
        number, minutes = sum(counts[name] for name in diagnosis.when.counts), int(until // 60) % (24 * 60)
        often = f"{number:,.0f} times" if number != 1 else "once"
        words = diagnosis.over(f"{minutes // 60:02}:{minutes % 60:02}", often)
        headline = _in_its_words(diagnosis, words, finding.explained_by)
    return replace(finding, headline=headline, since=since, until=until, over=over)


def going_on_first(worded: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Return findings with those that still hold before those that are over; opportunities stay last."""

    def order(finding: Finding) -> tuple[bool, bool, bool]:
        return BY_ID[finding.diagnosis].chance, not finding.is_limit, finding.over

    return tuple(sorted(worded, key=order))
