"""Conditions, alerts and advice of a server over time. Pure; times are the caller's.

An alert is 1 once its condition has been above the limit for `after`, and 0 once it has not been for `until`; in
between it keeps its last value. While an equally urgent cause holds, the alert of its consequence begins later, by at
most another `after`; while the alert of that cause fires, it does not begin, and begins at once when that ends. Once it
has begun, it lasts until its own condition ends. The alert of a failure by which a server ends lasts until the server
has started again and answers; then it is over at once.

Words become labels of series. They hold no measured figure and change rarely: figures are in the conditions and on the
page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core.advice import figures_of, fill
from sglang_tuning_exporter.core.diagnoses import ALL, BY_ID, Diagnosis, causes_of
from sglang_tuning_exporter.core.events import is_count
from sglang_tuning_exporter.core.findings import URGENCY, Alert, Change, Figure, Finding, Judgement, typed_value
from sglang_tuning_exporter.core.judge import (
    BUT_MUTED,
    NOT_ENOUGH,
    SENTENCES,
    STARTING,
    STOPPED,
    Measured,
)
from sglang_tuning_exporter.core.server import Server
from sglang_tuning_exporter.core.view import View

UNKNOWN_SECONDS = 60.0  # without a measurement, after which a clock starts anew
KEPT_SECONDS = 600.0  # for which advice keeps its words, unless the flag was set or its alert begins
LONGEST_TEXT = 200
_TOO_LITTLE = "Too little was seen for a verdict."
# The first change of a diagnosis as labels: `text` is why, `not_if` when it will not help.
ADVICE = ("flag", "current", "suggested", "text", "not_if", "cost")


# Conditions


def conditions(measured: Measured) -> Iterator[tuple[str, float, float]]:
    """Give name, figure and limit of each measured diagnosis with an alert, turned so that above the limit is bad."""
    for diagnosis in ALL:
        figure = measured.figures.get(diagnosis.id)
        if diagnosis.id in measured.view.profile.accepts:
            continue
        if diagnosis.alert and figure is not None and figure.limit is not None:
            # A diagnosis that another one explains better is not above its limit.
            is_explained = figure.holds and diagnosis.id not in measured.holding
            value, limit = turned(figure)
            yield diagnosis.id, min(value, limit) if is_explained else value, limit


def turned(figure: Figure) -> tuple[float, float]:
    """Return value and limit so that above the limit is bad.

    Of a figure that is bad below its limit the caller gets the rest to 1 if it is a share, else what is missing.
    """
    limit = figure.limit or 0.0
    if figure.side != "below":
        return figure.value, limit
    return (1.0 - figure.value, 1.0 - limit) if figure.unit in {"share", "ratio"} else (limit - figure.value, 0.0)


def scale_out_helps(judgement: Judgement) -> bool | None:
    """Return whether another replica would take load off this server; None if that is not known."""
    diagnosis = BY_ID.get(judgement.verdict)
    if diagnosis is None:
        return None if judgement.verdict in {NOT_ENOUGH, STARTING, STOPPED} else False
    if diagnosis.replica == "after a flag":
        return not any(change.flag for change in (judgement.own.changes if judgement.own is not None else ()))
    return None if diagnosis.replica == "unknown" else diagnosis.replica == "helps"


# Alerts


class State(NamedTuple):
    """Whether the condition of a diagnosis holds, and what its causes do."""

    holds: bool | None  # None where nothing was measured
    hindered: bool = False  # a cause holds: the alert begins only after another `after`
    held_back: bool = False  # the alert of a cause fires: this one does not begin
    is_back: bool = False  # the server ended by it, has started again and answers: the alert is over at once


@dataclass(slots=True)
class Clock:
    """The alert of one diagnosis over time.

    `value`: whether it fires; None until enough time was measured.
    """

    diagnosis: Diagnosis
    factor: float = 1.0  # by which the times of the diagnosis are multiplied
    after: float | None = None  # in place of that of the diagnosis
    since: float | None = None  # when the condition began to hold
    calm: float | None = None  # when it ceased to hold
    known: float | None = None  # when it was measured last
    firing: float | None = None  # when the alert began
    value: bool | None = None
    held_back: float | None = None  # when it last was due and did not begin, because the alert of a cause fired

    def pass_on(self, now: float, begun: float, *, state: State) -> Alert | None:
        """Move on to `now`; return the alert that ends. begun: when the event of the diagnosis happened."""
        if state.holds is None:
            return None
        self._forget_before_break(now)
        self.known = now
        if not state.holds:
            return self._calm_down(now, at_once=state.is_back)
        self._rise(now, begun, state)
        return None

    def _forget_before_break(self, now: float) -> None:
        """Start anew after a time in which nothing was measured; an alert that fires goes on."""
        if self.known is not None and now - self.known > UNKNOWN_SECONDS:
            self.since = self.calm = None
            self.value = True if self.firing is not None else None

    def _rise(self, now: float, begun: float, state: State) -> None:
        """Fire the alert once its condition has held for `after`, and no alert of a cause fires."""
        self.calm, self.since = None, begun if self.since is None else self.since
        after = self.factor * self.diagnosis.after if self.after is None else self.after
        due = self.since + after * (2 if state.hindered else 1)
        if self.firing is not None or now < due:
            return
        if state.held_back:
            self.held_back = now
        else:
            self.firing, self.value = max(due, self.held_back or due), True

    def _calm_down(self, now: float, *, at_once: bool) -> Alert | None:
        """End the alert once its condition has not held for `until`, or at once; return the alert that ends."""
        self.since, self.calm, self.held_back = None, now if self.calm is None else self.calm, None
        span = 0.0 if at_once and self.firing is not None else self.factor * self.diagnosis.until
        if now - self.calm < span:
            return None
        self.value = False
        if self.firing is None:
            return None
        alert, self.firing = self.alert(self.calm + span), None
        return alert

    @property
    def rests(self) -> bool:
        """Whether its condition does not hold, and no alert fires."""
        return self.since is None and self.firing is None

    def alert(self, until: float | None) -> Alert:
        """Return the notification that was sent; `until`: when it ended, None while it fires."""
        diagnosis = self.diagnosis
        return Alert(diagnosis.alert, diagnosis.id, diagnosis.severity, self.firing or 0.0, until)


class Clocks:
    """The clocks of all diagnoses that have an alert, without those that the user accepts.

    shown: somebody reads the values of the clocks in between. In a log of the past only the alerts are read, and a
    clock that rests is passed over.
    """

    def __init__(self, profile: profiles.Profile, *, shown: bool = True) -> None:
        self._shown = shown
        self.by_diagnosis = {
            diagnosis.id: Clock(diagnosis, profile.alert_wait, profile.wait_of(diagnosis.id, diagnosis.after))
            for diagnosis in ALL
            if diagnosis.alert and diagnosis.id not in profile.accepts
        }

    def pass_on(self, measured: Measured, server: Server, now: float) -> list[Alert]:
        """Move all clocks on to `now`; return the alerts that end."""
        holding, ended = set(measured.diagnoses), list[Alert | None]()
        for clock in self.by_diagnosis.values():
            if clock.rests and clock.diagnosis not in holding and not self._shown:
                continue
            begun = _event_at(clock.diagnosis, server, now)
            ended.append(clock.pass_on(now, begun, state=self._state(clock, measured, holding, server)))
        return [alert for alert in ended if alert is not None]

    def _state(self, clock: Clock, measured: Measured, holding: set[Diagnosis], server: Server) -> State:
        """Return the state of a diagnosis; the clocks of its causes stand before its own."""
        diagnosis, view = clock.diagnosis, measured.view
        holds = None if measured.figures.of(diagnosis) is None else diagnosis in holding
        if diagnosis.is_end(view):
            if _has_come_back(diagnosis, view, clock.firing):
                return State(holds=False, is_back=True)
            is_away = view.is_away or (server.starting and "metrics_disabled" not in view.troubles)
            holds = True if is_away and clock.firing is not None else holds
        if not holds:
            return State(holds)
        called = {other.diagnosis for other in self.by_diagnosis.values() if other.firing is not None}
        causes = _delaying(diagnosis, measured, holding | called)
        return State(holds, hindered=not holding.isdisjoint(causes), held_back=not called.isdisjoint(causes))

    def saved(self, now: float) -> dict[str, list[float | bool | None]]:
        """Return the clocks that run as plain JSON, times as ages in seconds."""
        return {
            name: [
                *(None if at is None else now - at for at in (clock.since, clock.calm, clock.known, clock.firing)),
                clock.value,
            ]
            for name, clock in self.by_diagnosis.items()
            if clock.known is not None
        }

    def restore(self, saved: object, now: float) -> None:
        """Continue from the result of `saved`; entries that cannot be read are left out."""
        for name, entry in saved.items() if isinstance(saved, dict) else ():
            clock = self.by_diagnosis.get(name)
            if clock is not None and _is_saved_clock(entry):
                *ages, clock.value = entry
                clock.since, clock.calm, clock.known, clock.firing = (
                    None if age is None else now - age for age in ages
                )

    @property
    def firing(self) -> list[Alert]:
        """The alerts that have not ended."""
        return [clock.alert(None) for clock in self.by_diagnosis.values() if clock.firing is not None]


def _delaying(diagnosis: Diagnosis, measured: Measured, present: set[Diagnosis]) -> tuple[Diagnosis, ...]:
    """Return the causes that delay the alert of a diagnosis: none that is milder.

    None where none is present, or the diagnosis is notified beside its causes.
    """
    if diagnosis.notified_beside_causes or present.isdisjoint(causes_of(diagnosis)):
        return ()
    least = URGENCY[diagnosis.severity]
    return tuple(cause for cause in measured.causes(diagnosis) if URGENCY[cause.severity] >= least)


def _has_come_back(diagnosis: Diagnosis, view: View, fired: float | None) -> bool:
    """Whether the server has answered again since the failure of a diagnosis; `fired`: when its alert began."""
    last = diagnosis.when.last_at(view.last)
    failed = fired if last is None else last
    return failed is not None and view.last.get("back", -inf) > failed


def _is_saved_clock(entry: object) -> bool:
    """Whether a saved clock can be read: four ages, each a number or None, and the value of the alert."""
    if not isinstance(entry, list) or len(entry) != 5 or not isinstance(entry[4], bool | None):
        return False
    return all(age is None or is_count(age) for age in entry[:4])


def _event_at(diagnosis: Diagnosis, server: Server, now: float) -> float:
    """Return when the event of a diagnosis happened or a hang began; `now` for a state."""
    if diagnosis.began is not None:
        return diagnosis.began(server, now)
    if diagnosis.when.kind != "event":
        return now
    last = diagnosis.when.last_at(server.last)
    return now if last is None else last


# Words


class Words:
    """The advice of each diagnosis and the verdict, as labels of series have them, with the times of their changes."""

    def __init__(self) -> None:
        self.advice: dict[str, tuple[tuple[str, ...], float]] = {}
        self.verdict = self.level = self.sentence = ""  # the sentence has no figures
        self.since = 0.0
        self._last_held: dict[str, float] = {}  # by diagnosis

    def take_judgement(self, judgement: Judgement, view: View, now: float, firing: Mapping[str, float]) -> None:
        """Change the words as a judgement asks; `firing`: when the alerts that fire began, by diagnosis."""
        for finding in judgement.findings:
            if finding.alert and finding.changes:
                self._advise(finding, now, firing.get(finding.diagnosis, -inf))
        for gone in [name for name, at in self._last_held.items() if now - at > KEPT_SECONDS and name not in firing]:
            self.advice.pop(gone, None)
            del self._last_held[gone]
        sentence = _sentence(judgement, view)
        if self.verdict != judgement.verdict:
            self.verdict, self.level, self.sentence, self.since = judgement.verdict, judgement.severity, sentence, now
        elif self.verdict in BY_ID:  # the finding may be over now, or hold again
            self.sentence = sentence

    def _advise(self, finding: Finding, now: float, firing: float) -> None:
        """Replace the advice of a diagnosis where it differs and may change; `firing`: when its alert began."""
        name, new = finding.diagnosis, _words_of(finding.changes[0])
        old, since = self.advice.get(name, (None, 0.0))
        self._last_held[name] = now
        if old == new:
            return
        is_set = old is not None and old[0] == new[0] and old[1] != new[1]  # the flag has another value now
        # A notification has the advice of the page: little was measured when the diagnosis first held.
        if old is None or is_set or since < firing or now - since >= KEPT_SECONDS:
            self.advice[name] = new, now

    def saved(self, now: float) -> dict[str, object]:
        """Return advice and verdict as plain JSON, times as ages in seconds."""
        return {
            "advice": {name: [*words, now - since] for name, (words, since) in self.advice.items()},
            "verdict": [self.verdict, self.level, self.sentence, now - self.since] if self.verdict else None,
        }

    def restore(self, saved: object, now: float) -> None:
        """Continue from the result of `saved`; entries that cannot be read are left out."""
        document = saved if isinstance(saved, Mapping) else {}
        advice = document.get("advice")
        for name, entry in advice.items() if isinstance(advice, Mapping) else ():
            match entry:
                case [*words, int() | float() as age] if name in BY_ID and len(words) == len(ADVICE) and is_count(age):
                    self.advice[name], self._last_held[name] = (tuple(map(str, words)), now - age), now
        match document.get("verdict"):
            case [str(verdict), str(level), str(sentence), int() | float() as age] if is_count(age):
                self.verdict, self.level, self.sentence, self.since = verdict, level, sentence, now - age


def _sentence(judgement: Judgement, view: View) -> str:
    """Return the verdict in a sentence without measured figures."""
    diagnosis = BY_ID.get(judgement.verdict)
    if diagnosis is None:
        return BUT_MUTED if judgement.sentence == BUT_MUTED else SENTENCES.get(judgement.verdict, _TOO_LITTLE)
    is_over = judgement.own is not None and judgement.own.over
    return diagnosis.over("a few minutes ago") if is_over else fill(diagnosis.summary, figures_of(view))


def _words_of(change: Change) -> tuple[str, ...]:
    """Return the values of the labels in `ADVICE` for a change."""
    suggested = typed_value(change.target) or change.words
    last = map(_cut, (suggested, change.why, change.not_if, change.cost))
    return change.flag, typed_value(change.now), *last


def _cut(text: str) -> str:
    """Return as many whole sentences of a text as a label may hold, else as many whole words."""
    if len(text) <= LONGEST_TEXT:
        return text
    sentences, _, _ = text[: LONGEST_TEXT + 1].rpartition(". ")
    return f"{sentences}." if sentences else text[:LONGEST_TEXT].rpartition(" ")[0] + " …"
