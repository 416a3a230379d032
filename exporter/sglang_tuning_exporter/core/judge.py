"""What limits a server over a stretch of time, and what to change. A pipeline, read top down:

measure every row -> leave out what another row explains -> rank -> advise -> word. Nothing downstream measures again. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core import advice
from sglang_tuning_exporter.core.events import CAUSE, Event
from sglang_tuning_exporter.core.findings import (
    URGENCY,
    Change,
    Confidence,
    Figure,
    Finding,
    Judgement,
    Severity,
    Unit,
    amount,
)
from sglang_tuning_exporter.core.rows import (
    BY_ID,
    KILLS,
    OUT_OF_MEMORY,
    RETRACTING,
    ROWS,
    WHY_REQUESTS_WAIT,
    Row,
    explained_by_flag,
)
from sglang_tuning_exporter.core.server import BUCKET_SECONDS, WAITS, Server, Totals
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
RECOMMENDS = "sglang_recommends"
DEATHS = frozenset({"crashed", "server_down", "often_down", "restart_loop"})
_ORDER = {row.id: place for place, row in enumerate(ROWS)}


def judge(view: View) -> Judgement:
    """Return the findings of one stretch, and what limits the server in it."""
    measured = weigh(view)
    return judgement_of(measured, findings(measured))


def weigh(view: View) -> Measured:
    """Measure every row and leave out what another one explains: all that the passing of time needs."""
    view = explained_by_flag(explained(view))
    figures = {row.id: figure for row in ROWS if (figure := measure(row, view)) is not None}
    holds = {name for name, figure in figures.items() if figure.holds} if not view.stopped else set()
    if view.explanation is not None and view.explanation.denies_memory and "crashed" in holds:
        holds -= {*OUT_OF_MEMORY} - {"graph_memory_short"}
    left = [row.id for row in ROWS if row.id in holds - view.profile.accepts and holds.isdisjoint(row.unless)]
    measured = Measured(view, figures, tuple(left))
    if RECOMMENDS in left and view.has_enough_load:  # what SGLang recommends matters under a load that something limits
        others = [BY_ID[each] for each in left if each != RECOMMENDS]
        about = (row.remedy.arg and view.facts.recommended(row.remedy.arg) for row in others)
        if not any(row.is_limit(view) for row in others) and not any(about):
            return replace(measured, holding=tuple(row.id for row in others))
    return measured


def judgement_of(measured: Measured, found: tuple[Finding, ...]) -> Judgement:
    """Return the judgement with these findings."""
    profile, figures = measured.view.profile, measured.figures
    return Judgement(*_verdict(measured, found), found, measured.checks, muted(profile, figures))


def measure(row: Row, view: View) -> Figure | None:
    """Return the figure that decides a row; None where the log does not show it, or too little was seen."""
    when, is_enough = row.when, row.any_load or view.has_enough_load
    if row.id == "cuda_graph_off" and view.facts.without_graph == "disabled" and view.facts.knows_arguments:
        is_enough = view.served > 0 and view.totals["lines"] >= view.profile.enough_observations  # a flag says it
    if (row.profiles and view.profile.name not in row.profiles) or not is_enough:
        return None
    value, limit = when.measure(view), when.bound(view)
    return None if value is None or limit is None else Figure(when.name, value, when.unit, limit, when.side)


@dataclass(frozen=True, slots=True)
class Measured:
    """Every row that holds over a view, causes first, without those that another one explains."""

    view: View
    figures: Mapping[str, Figure]  # of all rows that were measured
    holding: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """The diagnosis that limits the server, or the word for why there is none."""
        limits = [name for name in self.holding if BY_ID[name].is_limit(self.view)]
        return min(limits, key=self.place) if limits else self.without_limit

    @property
    def without_limit(self) -> str:
        """The word for why nothing limits the server."""
        view = self.view
        if view.starting or view.stopped:
            return STARTING if view.starting else STOPPED
        if view.has_enough_load and view.waits_unexplained_yet:
            return NOT_ENOUGH
        if view.has_enough_load and view.scraped:
            return HEALTHY if _is_served(view) else NOT_ENOUGH if view.hung else UNEXPLAINED
        idle = view.idle > 0 and view.idle >= view.served and not view.busy
        is_idle = idle and view.served < view.profile.enough_serving_seconds
        return NO_LIMIT if view.has_enough_load else IDLE if is_idle else NOT_ENOUGH

    @property
    def checks(self) -> Mapping[str, Figure | None]:
        """Every row of the profile with its figure; None where it was not measured."""
        name = self.view.profile.name
        return {row.id: self.figures.get(row.id) for row in ROWS if not row.profiles or name in row.profiles}

    def causes(self, row: Row) -> tuple[str, ...]:
        """Return the rows that this one can follow from, here: no failure ends a server that is only feared, or that it survived."""
        if row.id not in DEATHS:
            return row.causes
        return tuple(each for each in row.causes if not self._is_harmless(each, row.id))

    def _is_harmless(self, failure: str, death: str) -> bool:
        last, counts = self.view.last, BY_ID[failure].when.counts
        if failure == "graph_memory_short":
            return not self.view.totals[counts[0]]
        failed = max((last[name] for name in counts if name in last), default=inf)
        worked = last.get({"crashed": "work before the end", "server_down": "work"}.get(death, ""), -inf)
        return failure in KILLS and worked - failed >= SURVIVED_SECONDS

    def place(self, row: str) -> tuple[bool, int, int]:
        """Return what rows are ranked by: a server that is down has its end first, beside what is not known to have ended it."""
        death = "server_down" if "server_down" in self.holding else "crashed" if self.view.has_ended else ""
        unproven = death in self.holding and row in KILLS and row not in self.causes(BY_ID[death])
        return unproven, -URGENCY[BY_ID[row].severity], _ORDER[row]


def _is_served(view: View) -> bool:
    """Whether clients get their answers: requests end without being given up, or tokens are delivered while requests run."""
    share, totals = view.given_up_share, view.totals
    if view.silent_seconds or (share is not None and share > NEARLY_ALL_GIVEN_UP and not view.cancels):
        return False
    ends = totals["finished_requests"] > totals["aborted_requests"]
    return ends or totals["decoded"] > 0 or "finished_requests" not in totals


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
    """Say what a load too short for a verdict showed."""
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
        served = f"{view.served:.0f} s" if view.served >= 1 else "less than 1 s"
        figures = []
        if totals["most_queued"]:
            figures = [f"mean wait {view.wait:.1f} s"] if view.wait else []
            figures.append(f"queue up to {totals['most_queued']:,.0f}")
        if totals["most_usage"] >= view.profile.token_usage_target:
            figures.append(f"the KV cache up to {100 * totals['most_usage']:.0f} % full")
        words = f"The load of {served} was too short for a verdict{': ' if figures else ''}{', '.join(figures)}"
    retracted = _retracted(view)
    return f"{words}, and {retracted}." if retracted else f"{words}."


def _retracted(view: View) -> str:
    number = view.totals["retractions"]
    times = f"{number:,.0f} times" if number > 1 else "once"
    return f"SGLang retracted running requests {times}" if number else ""


# Findings and their changes


def _is_said_alone(row: Row, measured: Measured) -> bool:
    """Whether a row is said without a change: one that needs none, or a hint that needs no load and is the verdict."""
    return not row.needs_advice or (row.chance and row.any_load and row.is_limit(measured.view))


def findings(measured: Measured, also: frozenset[str] = frozenset()) -> tuple[Finding, ...]:
    """Advise and word what holds: causes first, chances last, no flag set two ways. `also` held at other times, and protects as well."""
    advised = _Advised(measured, frozenset(measured.holding) | also)
    for name in sorted(measured.holding, key=lambda each: (BY_ID[each].chance, _ORDER[each])):
        advised.take(BY_ID[name])
    said = {name for name, changes in advised.changes.items() if changes or _is_said_alone(BY_ID[name], measured)}
    order = sorted(
        said, key=lambda each: (BY_ID[each].chance, not BY_ID[each].is_limit(measured.view), measured.place(each))
    )
    because = {name: tuple(each for each in measured.causes(BY_ID[name]) if each in said) for name in order}
    return tuple(_worded(BY_ID[name], measured, advised.changes[name], because[name]) for name in order)


class _Advised:
    """The changes of rows, each in sight of those before it."""

    def __init__(self, measured: Measured, holding: frozenset[str]) -> None:
        self.measured, self.view, self.holding = measured, measured.view, holding
        self.changes: dict[str, tuple[Change, ...]] = {}
        self.values: dict[str, object] = {}  # by argument

    def take(self, row: Row) -> None:
        """Add the changes of a row: of its causes where it borrows, else its own, without what others set or protect."""
        self.changes[row.id] = (*self._borrowed(row), *self._own(row)) if row.id == "server_down" else self._of(row)

    def _of(self, row: Row) -> tuple[Change, ...]:
        if not row.borrows:
            return self._own(row)
        if taken := self._borrowed(row):
            return taken
        reason = self._reason_of_waits()
        own = self._own(reason) if reason is not None and reason.id not in self.holding else ()
        return tuple(change for change in own if change.flag) or self._own(row)

    def _borrowed(self, row: Row) -> tuple[Change, ...]:
        """Return the changes of the first cause that has a flag; where it borrows, else of the first that has any."""
        causes = row.causes if row.borrows else self.measured.causes(row)
        given = [(each, self.changes[each]) for each in causes if self.changes.get(each) and not BY_ID[each].chance]
        named = ((each, tuple(change for change in changes if change.flag)) for each, changes in given)
        flagged = [(each, changes) for each, changes in named if changes]
        cause, taken = next(iter(flagged or (given if row.borrows else [])), ("", ()))
        if cause == "running_far_below_limit":  # where memory is short, fewer requests help as well
            return (*taken, *self._own(row))
        return taken

    def _reason_of_waits(self) -> Row | None:
        """Return the row of the reason for most of the time in which requests waited, though they waited too seldom for a finding of its own."""
        seconds = {reason: self.view.totals[f"admission/{reason}"] for reason in WAITS}
        most, waited = max(seconds, key=seconds.__getitem__), sum(seconds.values())
        if waited < LEAST_WAITED or seconds[most] <= self.view.profile.frequent_share * waited:
            return None
        return next((row for row in ROWS if row.when.counts == (f"admission/{most}",)), BY_ID.get(most))

    def _own(self, row: Row) -> tuple[Change, ...]:
        offered = advice.advise(row, self.view, self.holding)
        kept: dict[str, Change] = {}
        for change in offered:
            if self._is_right(row, change):
                kept.setdefault(change.arg or f"words {len(kept)}", change)
        if offered and not kept and not row.needs_advice:
            kept[""] = Change("", "", "change nothing for it yet: what another finding asks for comes first")
        if not row.chance:
            self.values.update(
                {arg: each.to for arg, each in kept.items() if each.arg and (each.to is not None or each.removes)}
            )
        return tuple(kept.values())

    def _is_right(self, row: Row, change: Change) -> bool:
        """Whether a change is not set otherwise by a row before, is protected by no finding, and is accepted beside the others."""
        arg, view = change.arg, self.view
        if not arg:
            return True
        is_said_again = row.borrows or arg == row.remedy.arg  # by a finding whose own flag it is
        if arg in self.values and not (is_said_again and self.values[arg] == change.to):
            return False
        takes = _TAKES.get((arg, change.direction), frozenset())
        if any(BY_ID[name].protects in takes for name in self.holding if name != row.id):
            return False
        if view.facts.release is None or (change.to is None and not change.removes):
            return True
        return have_effect(view.facts.release, {**self.values, arg: change.to}, advice.typed_settings(view))


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


def _worded(row: Row, measured: Measured, changes: tuple[Change, ...], because: tuple[str, ...]) -> Finding:
    view, figure = measured.view, measured.figures[row.id]
    figures, said = advice.figures_of(view), _explanation_of(row.id, measured)
    confidence = "high" if row.any_load and not row.chance else _confidence_of(view)
    if row.id == "admission_too_conservative" and view.facts.may_reserve_in_full:
        confidence = "low"
    guide = advice.fill(row.guide, figures)
    opposite = {"raise", "lower"} - {row.remedy.direction}
    if any(change.arg == row.remedy.arg and {change.direction} == opposite for change in changes):
        guide = "not in SGLang's guide, which says the opposite: here SGLang's own error names the change"
    elif not guide.startswith(("not in", "the guide has")):
        guide = f"SGLang's tuning guide, {guide}"
    return Finding(
        row.id, row.alert, row.severity, row.is_limit(view), _headline(row, view, said), _sentence(row, view, figure, said), guide,
        confidence, (replace(figure, name=advice.fill(figure.name, figures)), *_supporting(row, view)), changes, because,
        notes=tuple(_notes(row, view)), explained_by=said,
    )  # fmt: skip


def _explanation_of(row: str, measured: Measured) -> Event | None:
    """Return the line of the log that explains a finding about an end; None where none does, or a failure beside it has it."""
    view, said = measured.view, measured.view.explanation
    if said is None or row not in {*DEATHS, *KILLS}:
        return None
    if row == "graph_memory_short" and not view.totals["out_of_memory.graph_capture"]:
        return None  # what is left is short, and the line is about another failure
    if row in KILLS:
        return said if said.word == ("hang" if row == "scheduler_stuck" else "memory") else None
    failures = {*KILLS} & {*measured.holding} & {*measured.causes(BY_ID[row])}
    if any(_explanation_of(each, measured) is not None for each in failures):
        return None
    if row == "server_down":
        return view.explains_now
    return said if view.has_ended or view.totals["ends"] else None


def _headline(row: Row, view: View, said: Event | None) -> str:
    """Return the summary of a row; a server that ended while it started did not start."""
    served = view.facts.ready or view.scraped or view.down or "work" in view.last or view.totals["retractions"]
    line = view.explanation
    of_start = line is not None and (line.is_of_a_start or _IN_START.search(line.place))
    if row.id == "crashed" and not served and (view.starting or view.facts.memory or of_start):
        return _in_its_words(row, "SGLang did not start.", said)
    return _in_its_words(row, advice.fill(row.summary, advice.figures_of(view)), said)


_IN_START = re.compile(r" in (?:__init__|initialize|_?init_\w+|load_\w+|_?launch_\w+|_wait_for_\w+|main)$")  # a frame


def _in_its_words(row: Row, headline: str, said: Event | None) -> str:
    """Add to the headline of an end the words of the line that explains it, if that is more than that it ended."""
    if said is None or row.id not in {"crashed", "server_down"} or said.ending.weight < CAUSE:
        return headline
    words = said.short
    words = words if words.endswith(("?", "!", "…")) else words.rstrip(".") + "."
    return f"{headline.rstrip('.')}: {words}"


def _sentence(row: Row, view: View, figure: Figure, said: Event | None) -> str:
    """Say what was seen, with its figure or with more than that."""
    if row.id == "scheduler_stuck" and view.stuck is not None:
        return view.stuck.sentence
    if row.id == "crashed" and said is not None and said.word != "unknown":
        return f"{said.ending.what}{f' ({said.where})' if said.where else ''}"
    value = (
        view.troubles.get(row.id)
        or row.says(view)
        or amount(figure.value, "count" if figure.unit == "per_minute" else figure.unit)
    )
    words = advice.fill(row.seen, advice.figures_of(view))
    return words.replace("{value}", value).replace("{s}", "" if value in {"1", "at least one"} else "s")


def _supporting(row: Row, view: View) -> list[Figure]:
    """Return the figures beside the one that decided, also those that speak against it."""
    target, facts, totals = view.profile.token_usage_target, view.facts, view.totals
    shown: list[tuple[str, float | None, Unit, float | None]] = []
    usage: tuple[str, float | None, Unit, float | None] = ("mean token usage", view.mean("usage"), "ratio", target)
    if row.id in RETRACTING:
        known = totals["usage_before:n"]
        name = f"token usage just before retractions, mean of {known:.0f} of {totals['retractions']:.0f}"
        shown = [(name, totals["usage_before"] / known, "ratio", target) if known else usage]
    elif row.id in {*WHY_REQUESTS_WAIT, "queue_too_long", "unexplained", "requests_rejected"}:
        wait = view.profile.queue_wait_seconds
        shown = [
            ("requests waiting, mean", view.sum("queued"), "count", None),
            ("mean wait in the queue", view.wait, "seconds", wait),
            usage,
        ]
    if row.id == "running_at_limit":
        limit = facts.least_limit or totals["limit_seen"] or None
        shown.append(("running requests, mean", view.mean("running"), "count", limit))
    return [Figure(name, value, unit, limit) for name, value, unit, limit in shown if value is not None]


def _notes(row: Row, view: View) -> list[str]:
    decided = view.facts.recommended(row.remedy.arg, "decision")[:MOST_QUOTED] if row.remedy.arg else []
    words = [f"SGLang decided at its start: “{each.words.rstrip('.')}”" for each in decided]
    return [*filter(None, [row.remark(view)]), *words]


# Times


def seen(row: Row, server: Server, begin: float, end: float) -> tuple[float, float] | None:
    """Return when what a row is about was first and last seen in a stretch; None where it was not."""
    buckets = [each for each in server.buckets if begin - BUCKET_SECONDS <= each[0] <= end]
    if row.id == "scheduler_stuck":
        signs = [at for at, totals in buckets if totals["watchdogs"] or totals["health_failures"]]
        spans = [(max(at, begin), min(at + BUCKET_SECONDS, end)) for at in signs]
        spans += [(each.begin, until) for each in server.hangs if (until := each.until) >= begin]
        if spans:  # a hang that lines name lasts until it works again
            worked = not signs or any(totals["lines"] for at, totals in buckets if at > signs[-1])
            return min(spans)[0], max(until for _, until in spans) if worked else end
    for names in (
        row.when.counts,
        ("lines",),
    ):  # of figures of the whole, and what was explained otherwise: while it served
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
