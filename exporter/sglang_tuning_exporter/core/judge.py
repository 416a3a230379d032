"""What limits a server over a stretch of time, and what to change. A pipeline, read top down:

measure every row -> leave out what another row explains -> rank -> advise -> word. Nothing downstream measures again. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from sglang_tuning_exporter.core.server import BUCKET_SECONDS, Server
from sglang_tuning_exporter.core.sums import WAITS, Totals
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
SURVIVED_SECONDS = 60.0  # of work after a failure: it did not end by it
PAST_SECONDS = 120.0  # what was not seen for so long is over
HIGH, MEDIUM = 120.0, 60.0  # seconds of serving time for this confidence
NEARLY_ALL_GIVEN_UP = 0.5  # of the requests that ended
LEAST_WAITED = 10.0  # seconds of waiting that show what requests wait for
MOST_QUOTED = 2  # decisions of SGLang's, in one finding


def judge(view: View) -> Judgement:
    """Return the findings of one stretch, and what limits the server in it."""
    measured = weigh(view)
    return judgement_of(measured, findings(measured))


def weigh(view: View) -> Measured:
    """Return every figure, and the diagnoses that hold without those that another one explains: enough for alerts."""
    view = explained_by_flag(explained(view))
    figures = {diagnosis.id: figure for diagnosis in ALL if (figure := measure(diagnosis, view)) is not None}
    left = _unexplained(_holding(view, figures), view.profile)
    others = {diagnosis: tuple(other for other in left if other is not diagnosis) for diagnosis in left}
    return Measured(
        view, figures, tuple(diagnosis.id for diagnosis in left if diagnosis.matters(view, others[diagnosis]))
    )


def _holding(view: View, figures: Mapping[str, Figure]) -> set[Diagnosis]:
    """Return the diagnoses whose figure is on the bad side of its limit; none of a server that was stopped.

    If the line that explains a crash denies that memory ran out, the diagnoses that say so do not hold.
    """
    if view.stopped:
        return set()
    holds = {diagnosis for diagnosis in ALL if diagnosis.id in figures and figures[diagnosis.id].holds}
    denies = view.explanation is not None and view.explanation.denies_memory
    if denies and any(diagnosis.death == "crash" for diagnosis in holds):
        return {diagnosis for diagnosis in holds if not diagnosis.deniable}
    return holds


def _unexplained(holds: set[Diagnosis], profile: profiles.Profile) -> list[Diagnosis]:
    """Return the diagnoses that hold, causes first, without muted ones and those that another one explains better."""
    heard = (diagnosis for diagnosis in ALL if diagnosis in holds and diagnosis.id not in profile.accepts)
    return [diagnosis for diagnosis in heard if holds.isdisjoint(better_explained_by(diagnosis))]


def judgement_of(measured: Measured, found: tuple[Finding, ...]) -> Judgement:
    """Return the judgement with these findings."""
    profile, figures = measured.view.profile, measured.figures
    return Judgement(*_verdict(measured, found), found, measured.checks, muted(profile, figures))


def measure(row: Diagnosis, view: View) -> Figure | None:
    """Return the figure that decides a diagnosis; None where the log does not show it, or too little was seen."""
    when = row.when
    if row.profiles and view.profile.name not in row.profiles:
        return None
    if not (row.any_load or (view.has_enough_load if row.enough is None else row.enough(view))):
        return None
    value, limit = when.measure(view), when.bound(view)
    return None if value is None or limit is None else Figure(when.name, value, when.unit, limit, when.side)


@dataclass(frozen=True, slots=True)
class Measured:
    """Every diagnosis that holds over a view, causes first, without those that another one explains."""

    view: View
    figures: Mapping[str, Figure]  # of all rows that were measured
    holding: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """The diagnosis that limits the server, or the word for why there is none."""
        limits = [row for row in self.diagnoses if row.is_limit(self.view)]
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
        """Every diagnosis of the profile with its figure; None where it was not measured."""
        name = self.view.profile.name
        return {row.id: self.figures.get(row.id) for row in ALL if not row.profiles or name in row.profiles}

    @property
    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """The diagnoses that hold, causes first."""
        return tuple(BY_ID[name] for name in self.holding)

    def causes(self, row: Diagnosis) -> tuple[Diagnosis, ...]:
        """Return what a diagnosis can follow from, here: a failure that was only predicted, or that the server survived, ends no server."""
        if not row.death:
            return causes_of(row)
        return tuple(cause for cause in causes_of(row) if not self._is_harmless(cause, row))

    def _is_harmless(self, failure: Diagnosis, death: Diagnosis) -> bool:
        if failure.feared(self.view):
            return True
        last, counts = self.view.last, failure.when.counts
        failed = max((last[name] for name in counts if name in last), default=inf)
        worked = last.get(death.worked, -inf)
        return Group.FAILURE in failure.groups and worked - failed >= SURVIVED_SECONDS

    def place(self, row: Diagnosis) -> tuple[bool, int, int]:
        """Return the rank of a diagnosis: if the server is down, its end goes first, and failures not proven to have caused it go last."""
        down = next((other for other in self.diagnoses if other.death == "down"), None)
        crash = next((other for other in self.diagnoses if other.death == "crash"), None)
        death = down or (crash if self.view.has_ended else None)
        unproven = death is not None and Group.FAILURE in row.groups and row not in self.causes(death)
        return unproven, -URGENCY[row.severity], place(row)


def _is_idle(view: View) -> bool:
    """Whether no request came for at least half of the time."""
    idle = view.idle > 0 and view.idle >= view.served and not view.busy
    return idle and view.served < view.profile.enough_serving_seconds


def _is_served(view: View) -> bool:
    """Whether clients get their answers: requests end without being given up, or tokens are delivered while requests run."""
    share, totals = view.given_up_share, view.totals
    if view.silent_seconds or (share is not None and share > NEARLY_ALL_GIVEN_UP and not view.cancels):
        return False
    ends = totals["finished_requests"] > totals["aborted_requests"]
    return ends or totals["decoded_tokens"] > 0 or "finished_requests" not in totals


# The verdict in words


def _verdict(measured: Measured, found: tuple[Finding, ...]) -> tuple[str, str, Severity | Literal["none"]]:
    first = next((each for each in found if each.is_limit), None)
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
    return verdict, said_at_once(verdict, found) or sentence or short_load(view), "none"


def muted(profile: profiles.Profile, figures: Mapping[str, Figure]) -> tuple[str, ...]:
    """Say what the user accepts and why, and whether it is so."""
    return tuple(
        f"Muted: {BY_ID[name].summary} Why: {reason}."
        + (" It is so now." if name in figures and figures[name].holds else "")
        for name, reason in profile.accepted
    )


def said_at_once(verdict: str, found: tuple[Finding, ...]) -> str:
    """Return the fact that heads what is said of too little load; empty where there is none."""
    facts = (each.headline for each in found if BY_ID[each.diagnosis].at_once)
    return next(facts, "") if verdict == NOT_ENOUGH else ""


def short_load(view: View) -> str:
    """Return a sentence about a load that was too short for a verdict."""
    totals = view.totals
    if view.silent_seconds:
        return f"Requests run, and no token has been sent for {view.silent_seconds:.0f} s."
    if not view.served and view.scraped:
        return "There was no load in the last ten minutes."
    if not totals["decode_lines"] and not totals["prefill_lines"]:
        words = "There is no batch line in this log"
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
    number = view.totals["retraction_events"]
    times = f"{number:,.0f} times" if number > 1 else "once"
    return f"SGLang retracted running requests {times}" if number else ""


# Findings and their changes


def _stands_alone(row: Diagnosis, measured: Measured) -> bool:
    """True if the finding is reported even when no change can be advised."""
    return not row.needs_advice or (row.chance and row.any_load and row.is_limit(measured.view))


def findings(measured: Measured, also: frozenset[str] = frozenset()) -> tuple[Finding, ...]:
    """Advise and word what holds: causes first, chances last, no flag set two ways. `also` held at other times, and protects as well."""
    advised = _Advised(measured, frozenset(map(BY_ID.__getitem__, {*measured.holding, *also})))
    for row in sorted(measured.diagnoses, key=lambda row: (row.chance, place(row))):
        advised.add(row)
    reported = {row for row, changes in advised.changes.items() if changes or _stands_alone(row, measured)}
    order = sorted(reported, key=lambda row: (row.chance, not row.is_limit(measured.view), measured.place(row)))
    because = {row: tuple(cause.id for cause in measured.causes(row) if cause in reported) for row in order}
    return tuple(_worded(row, measured, advised.changes[row], because[row]) for row in order)


class _Advised:
    """The changes of all findings; earlier findings win over later ones."""

    def __init__(self, measured: Measured, beside: frozenset[Diagnosis]) -> None:
        self.measured, self.view, self.beside = measured, measured.view, beside
        self.changes: dict[Diagnosis, tuple[Change, ...]] = {}
        self.values: dict[str, object] = {}  # by argument

    def add(self, row: Diagnosis) -> None:
        """Add the changes of a diagnosis: of its causes where it borrows, else its own, without what others set or protect."""
        if row.borrows == "as well":
            self.changes[row] = (*self._borrowed(row, self.measured.causes(row)), *self._own(row))
        else:
            self.changes[row] = self._instead(row) if row.borrows else self._own(row)

    def _instead(self, row: Diagnosis) -> tuple[Change, ...]:
        if borrowed := self._borrowed(row, causes_of(row), flags_only=False):
            return borrowed
        reason = self._reason_of_waits()
        own = self._own(reason) if reason is not None and reason not in self.beside else ()
        return tuple(change for change in own if change.flag) or self._own(row)

    def _borrowed(
        self, row: Diagnosis, causes: tuple[Diagnosis, ...], *, flags_only: bool = True
    ) -> tuple[Change, ...]:
        """Return the changes of the first cause that has a flag; else, unless `flags_only`, of the first that has any."""
        lenders = [cause for cause in causes if self.changes.get(cause) and not cause.chance]
        flagged = {cause: tuple(change for change in self.changes[cause] if change.flag) for cause in lenders}
        cause = next((cause for cause in lenders if flagged[cause]), None)
        if cause is None:
            return () if flags_only or not lenders else self._lent(lenders[0], self.changes[lenders[0]], row)
        return self._lent(cause, flagged[cause], row)

    def _lent(self, cause: Diagnosis, changes: tuple[Change, ...], row: Diagnosis) -> tuple[Change, ...]:
        return (*changes, *self._own(row)) if cause.lends_beside else changes

    def _reason_of_waits(self) -> Diagnosis | None:
        """Return the reason for most of the time in which requests waited, though they waited too seldom for a finding of its own."""
        seconds = {reason: self.view.totals[f"admission/{reason}"] for reason in WAITS}
        most, waited = max(seconds, key=seconds.__getitem__), sum(seconds.values())
        if waited < LEAST_WAITED or seconds[most] <= self.view.profile.frequent_share * waited:
            return None
        return next((row for row in ALL if row.wait == most), None)

    def _own(self, row: Diagnosis) -> tuple[Change, ...]:
        offered = advice.advise(row, self.view, self.beside)
        kept: dict[str, Change] = {}
        for change in offered:
            if self._is_right(row, change):
                kept.setdefault(change.arg or f"words {len(kept)}", change)
        if offered and not kept and not row.needs_advice:
            kept[""] = Change(words="change nothing for it yet: what another finding asks for comes first")
        if not row.chance:
            self.values.update(
                {arg: each.to for arg, each in kept.items() if each.arg and (each.to is not None or each.removes)}
            )
        return tuple(kept.values())

    def _is_right(self, row: Diagnosis, change: Change) -> bool:
        """Whether a change is not set otherwise by a row before, is protected by no finding, and is accepted beside the others."""
        arg, view = change.arg, self.view
        if not arg:
            return True
        is_said_again = row.borrows == "instead" or arg == row.remedy.arg  # by a finding whose own flag it is
        if arg in self.values and not (is_said_again and self.values[arg] == change.to):
            return False
        takes = _TAKES.get((arg, change.direction), frozenset())
        if any(other.protects in takes for other in self.beside if other is not row):
            return False
        if view.facts.release is None or (change.to is None and not change.removes):
            return True
        return have_effect(view.facts.release, {**self.values, arg: change.to}, typed_settings(view))


# What a change takes: after an out-of-memory failure nothing takes memory, while requests are retracted none are added.
_MEMORY, _REQUESTS = frozenset({"memory"}), frozenset({"requests"})
_TAKES = {
    **dict.fromkeys((
        ("mem_fraction_static", "raise"), ("max_total_tokens", "raise"), ("chunked_prefill_size", "raise"), ("max_prefill_tokens", "raise"),
        ("cuda_graph_max_bs", "raise"), ("cuda_graph_max_bs_decode", "raise"), ("disable_cuda_graph", "drop"),
        ("disable_decode_cuda_graph", "drop"), ("enable_torch_compile", "add"),
    ), _MEMORY),
    ("max_running_requests", "raise"): _MEMORY | _REQUESTS,
    ("schedule_conservativeness", "lower"): _REQUESTS,
}  # fmt: skip


# A finding in words


def _confidence_of(view: View) -> Confidence:
    """Return the confidence in a judgement over so much serving time."""
    return "high" if view.served >= HIGH else "medium" if view.served >= MEDIUM else "low"


def _worded(row: Diagnosis, measured: Measured, changes: tuple[Change, ...], because: tuple[str, ...]) -> Finding:
    view, figure = measured.view, measured.figures[row.id]
    figures, line = advice.figures_of(view), _explanation_of(row, measured)
    usual: Confidence = "high" if row.any_load and not row.chance else _confidence_of(view)
    guide = advice.fill(row.guide, figures)
    opposite = {"raise", "lower"} - {row.remedy.direction}
    if any(change.arg == row.remedy.arg and {change.direction} == opposite for change in changes):
        guide = "not in SGLang's guide, which says the opposite: here SGLang's own error names the change"
    elif not guide.startswith(("not in", "the guide has")):
        guide = f"SGLang's tuning guide, {guide}"
    return Finding(
        row.id,
        row.alert,
        row.severity,
        row.is_limit(view),
        _in_its_words(row, row.headline(view) or advice.fill(row.summary, figures), line),
        _sentence(row, view, figure, line),
        guide,
        row.confidence(view) or usual,
        (replace(figure, name=advice.fill(figure.name, figures)), *row.supporting(view)),
        changes,
        because,
        notes=tuple(_notes(row, view)),
        explained_by=line,
    )


def _explanation_of(row: Diagnosis, measured: Measured) -> Event | None:
    """Return the line of the log that explains a finding about an end; None where none does, or a failure beside it has it."""
    view, line = measured.view, measured.view.explanation
    if line is None or row.feared(view):  # then the line is about another failure
        return None
    if Group.FAILURE in row.groups:
        return line if line.word == row.ends_as else None
    if not row.death:
        return None
    failures = {cause for cause in measured.causes(row) if Group.FAILURE in cause.groups} & {*measured.diagnoses}
    if any(_explanation_of(failure, measured) is not None for failure in failures):
        return None
    if row.death == "down":
        return view.explains_now
    return line if view.has_ended or view.totals["ends"] else None


def _in_its_words(row: Diagnosis, headline: str, line: Event | None) -> str:
    """Add to the headline of an end the words of the line that explains it, if that is more than that it ended."""
    if line is None or row.death not in {"crash", "down"} or line.ending.weight < CAUSE:
        return headline
    words = line.short
    words = words if words.endswith(("?", "!", "…")) else words.rstrip(".") + "."
    return f"{headline.rstrip('.')}: {words}"


def _sentence(row: Diagnosis, view: View, figure: Figure, line: Event | None) -> str:
    """Say what was seen, with its figure or with more than that."""
    if own := row.sentence(view, line):
        return own
    value = (
        view.troubles.get(row.trouble)
        or row.says(view)
        or amount(figure.value, "count" if figure.unit == "per_minute" else figure.unit)
    )
    words = advice.fill(row.seen, advice.figures_of(view))
    return words.replace("{value}", value).replace("{s}", "" if value in {"1", "at least one"} else "s")


def _notes(row: Diagnosis, view: View) -> list[str]:
    decided = view.facts.recommended(row.remedy.arg, "decision")[:MOST_QUOTED] if row.remedy.arg else []
    words = [f"SGLang decided at its start: “{decision.words.rstrip('.')}”" for decision in decided]
    return [*filter(None, [row.remark(view)]), *words]


# Times


def seen(row: Diagnosis, server: Server, begin: float, end: float) -> tuple[float, float] | None:
    """Return when a diagnosis was first and last seen in a stretch; None where it was not."""
    if (span := row.span(server, begin, end)) is not None:
        return span
    buckets = [bucket for bucket in server.buckets if begin - BUCKET_SECONDS <= bucket[0] <= end]
    # Figures of the whole, and what was explained otherwise: while it served.
    for names in (row.when.counts, ("lines",)):
        times = [at for at, totals in buckets if any(totals[name] > 0 for name in names)]
        if times:
            return max(times[0], begin), min(times[-1] + BUCKET_SECONDS, end)
    return None


def timed(finding: Finding, server: Server, begin: float, end: float, *, now: float, counts: Totals) -> Finding | None:
    """Return a finding with the times at which it was seen in a stretch; None where it was not.

    One that is over by `now` is said in the past tense; `counts` are those of the stretch.
    """
    row = BY_ID[finding.diagnosis]
    times = seen(row, server, begin, end)
    if times is None:
        return None
    since, until = times
    over, headline = "{until}" in row.past and now - until > PAST_SECONDS, finding.headline
    if over:
        number, minutes = sum(counts[name] for name in row.when.counts), int(until // 60) % (24 * 60)
        often = f"{number:,.0f} times" if number != 1 else "once"
        words = row.over(f"{minutes // 60:02}:{minutes % 60:02}", often)
        headline = _in_its_words(row, words, finding.explained_by)
    return replace(finding, headline=headline, since=since, until=until, over=over)


def going_on_first(found: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Return findings with those that go on before those that are over; what can only be better stays last."""
    return tuple(sorted(found, key=lambda each: (BY_ID[each.diagnosis].chance, not each.is_limit, each.over)))
