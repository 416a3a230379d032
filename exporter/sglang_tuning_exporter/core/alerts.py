"""What is said over time: conditions, alerts that last, words that stand. Pure; times are the caller's.

An alert is 1 once its condition was above the limit for `after`, 0 once it was not for `until`, between them the last word. A consequence
does not begin while its cause holds, for at most another `after`; once begun, it stays until its own condition ends.

Words become labels of series, so they hold no measured figure and change rarely: figures are in the conditions and on the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core.advice import figures_of, fill
from sglang_tuning_exporter.core.diagnoses import ALL, BY_ID, Diagnosis, causes_of
from sglang_tuning_exporter.core.events import is_count
from sglang_tuning_exporter.core.findings import Alert, Change, Figure, Finding, Judgement, typed_value
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

UNKNOWN_SECONDS = 60.0  # a break of knowledge of more than this is a start
KEPT_SECONDS = 600.0  # in which advice keeps its words, unless the flag was set or its alert begins
LONGEST_TEXT = 200
TOO_LITTLE = "Too little was seen for a verdict."
# The words of the first change of a diagnosis, as labels: why, when it will not help and what it costs are the last three.
ADVICE = ("flag", "current", "suggested", "text", "not_if", "cost")


# Conditions


def conditions(measured: Measured) -> Iterator[tuple[str, float, float]]:
    """Give the figure and the limit of each row with an alert that was measured, turned so that above the limit is bad."""
    for row in ALL:
        figure = measured.figures.get(row.id)
        if row.id in measured.view.profile.accepts:
            continue
        if row.alert and figure is not None and figure.limit is not None:
            # What another row explains better is not above its limit.
            explained = figure.holds and row.id not in measured.holding
            value, limit = turned(figure)
            yield row.id, min(value, limit) if explained else value, limit


def turned(figure: Figure) -> tuple[float, float]:
    """Return value and limit so that above the limit is bad: a share below its limit as the rest, other figures as what is missing."""
    limit = figure.limit or 0.0
    if figure.side != "below":
        return figure.value, limit
    return (1.0 - figure.value, 1.0 - limit) if figure.unit in {"share", "ratio"} else (limit - figure.value, 0.0)


def scale_out_helps(judgement: Judgement) -> bool | None:
    """Return whether another replica would take load off this server; None if not known."""
    row = BY_ID.get(judgement.verdict)
    if row is None:
        return None if judgement.verdict in {NOT_ENOUGH, STARTING, STOPPED} else False
    if row.replica == "after a flag":
        return not any(change.flag for change in (judgement.own.changes if judgement.own is not None else ()))
    return None if row.replica == "unknown" else row.replica == "helps"


# Alerts


@dataclass(slots=True)
class Clock:
    """The alert of one row. `value`: True, False, or None while it is not known; times are those of the caller."""

    row: Diagnosis
    factor: float = 1.0  # times `until`
    after: float | None = None  # in place of the row's
    since: float | None = None  # above the limit
    calm: float | None = None  # at or below it
    known: float | None = None  # measured last
    firing: float | None = None  # since when it is True
    value: bool | None = None

    def pass_on(self, now: float, begun: float, *, holds: bool | None, hindered: bool) -> Alert | None:
        """Move on to `now`, where the condition holds or not; return the alert that ends.

        holds: None where nothing was measured. begun: when the event of the diagnosis happened. hindered: a cause
        holds, so the alert begins only after another `after`.
        """
        if holds is None:
            return None
        self._forget_before_break(now)
        self.known = now
        if not holds:
            return self._calm_down(now)
        self._begin(now, begun, hindered=hindered)
        return None

    def _forget_before_break(self, now: float) -> None:
        """Start anew after a time in which nothing was measured; an alert that fires goes on."""
        if self.known is not None and now - self.known > UNKNOWN_SECONDS:
            self.since = self.calm = None
            self.value = True if self.firing is not None else None

    def _begin(self, now: float, begun: float, *, hindered: bool) -> None:
        """Fire the alert once its condition has held for `after`."""
        self.calm, self.since = None, begun if self.since is None else self.since
        after = self.factor * self.row.after if self.after is None else self.after
        wait = after * (2 if hindered else 1)
        if self.firing is None and now - self.since >= wait:
            self.firing, self.value = self.since + wait, True

    def _calm_down(self, now: float) -> Alert | None:
        """End the alert once its condition has not held for `until`; return the alert that ends."""
        self.since, self.calm = None, now if self.calm is None else self.calm
        if now - self.calm < self.factor * self.row.until:
            return None
        self.value = False
        if self.firing is None:
            return None
        alert, self.firing = self.alert(self.calm + self.factor * self.row.until), None
        return alert

    def alert(self, until: float | None) -> Alert:
        """Return what is or was notified."""
        return Alert(self.row.alert, self.row.id, self.row.severity, self.firing or 0.0, until)


class Clocks:
    """The clocks of all rows that have an alert, but of those that the user accepts."""

    def __init__(self, profile: profiles.Profile) -> None:
        self.by_row = {
            row.id: Clock(row, profile.alert_wait, profile.wait_of(row.id, row.after))
            for row in ALL
            if row.alert and row.id not in profile.accepts
        }

    def pass_on(self, measured: Measured, server: Server, now: float) -> list[Alert]:
        """Take what was measured; return the alerts that end."""
        holding = set(measured.diagnoses)
        firing = {clock.row for clock in self.by_row.values() if clock.firing is not None} & holding
        ended = []
        for name, clock in self.by_row.items():
            row, figure = clock.row, measured.figures.get(name)
            causes = () if holding.isdisjoint(causes_of(row)) else measured.causes(row)
            hindered = not holding.isdisjoint(causes) and not row.notified_beside_causes
            if clock.firing is None and hindered and not firing.isdisjoint(causes):
                continue  # somebody has been called for the cause
            holds = None if figure is None else row in holding
            alert = clock.pass_on(now, _event_at(row, server, now), holds=holds, hindered=hindered)
            if alert is not None:
                ended.append(alert)
        return ended

    def saved(self, now: float) -> dict[str, list[float | bool | None]]:
        """Return the clocks that run as plain JSON, times as ages in seconds."""
        return {
            name: [
                *(None if at is None else now - at for at in (each.since, each.calm, each.known, each.firing)),
                each.value,
            ]
            for name, each in self.by_row.items()
            if each.known is not None
        }

    def restore(self, saved: object, now: float) -> None:
        """Go on from what `saved` returned; what cannot be read is left out."""
        for name, entry in saved.items() if isinstance(saved, dict) else ():
            clock = self.by_row.get(name)
            if clock is not None and _is_saved_clock(entry):
                *ages, clock.value = entry
                clock.since, clock.calm, clock.known, clock.firing = (
                    None if age is None else now - age for age in ages
                )

    @property
    def firing(self) -> list[Alert]:
        """The alerts that have not ended."""
        return [clock.alert(None) for clock in self.by_row.values() if clock.firing is not None]


def _is_saved_clock(entry: object) -> bool:
    """Whether a saved clock can be read: four ages, each a number or None, and the value of the alert."""
    if not isinstance(entry, list) or len(entry) != 5 or not isinstance(entry[4], bool | None):
        return False
    return all(age is None or is_count(age) for age in entry[:4])


def _event_at(row: Diagnosis, server: Server, now: float) -> float:
    """Return when the event of a row happened or a hang began, `now` for a state."""
    if row.began is not None:
        return row.began(server, now)
    if row.when.kind != "event":
        return now
    return max((server.last[name] for name in row.when.counts if name in server.last), default=now)


# Words


class Words:
    """The words that stand now, each with the time since when they do: `advice` by diagnosis, and the verdict."""

    def __init__(self) -> None:
        self.advice: dict[str, tuple[tuple[str, ...], float]] = {}
        self.verdict = self.level = self.sentence = ""  # the sentence has no figures
        self.since = 0.0
        self._seen: dict[str, float] = {}  # when a diagnosis last held

    def take(self, judgement: Judgement, view: View, now: float, firing: Mapping[str, float]) -> None:
        """Take a judgement; `firing`: since when alerts are, by diagnosis."""
        for finding in judgement.findings:
            if finding.alert and finding.changes:
                self._advise(finding, now, firing.get(finding.diagnosis, -inf))
        for gone in [name for name, at in self._seen.items() if now - at > KEPT_SECONDS]:
            self.advice.pop(gone, None)
            del self._seen[gone]
        sentence = _sentence(judgement, view)
        if self.verdict != judgement.verdict:
            self.verdict, self.level, self.sentence, self.since = judgement.verdict, judgement.severity, sentence, now
        elif self.verdict in BY_ID:  # it may be over now, or go on again
            self.sentence = sentence

    def _advise(self, finding: Finding, now: float, firing: float) -> None:
        name, new = finding.diagnosis, _words_of(finding.changes[0])
        held, since = self.advice.get(name, (None, 0.0))
        self._seen[name] = now
        if held == new:
            return
        is_set = held is not None and held[0] == new[0] and held[1] != new[1]  # the flag has another value now
        # What is sent when the alert begins is what the page says then: little was seen when the diagnosis first held.
        if held is None or is_set or since < firing or now - since >= KEPT_SECONDS:
            self.advice[name] = new, now

    def saved(self, now: float) -> dict[str, object]:
        """Return it as plain JSON, times as ages in seconds."""
        return {
            "advice": {name: [*words, now - since] for name, (words, since) in self.advice.items()},
            "verdict": [self.verdict, self.level, self.sentence, now - self.since] if self.verdict else None,
        }

    def restore(self, saved: object, now: float) -> None:
        """Go on from what `saved` returned; what cannot be read is left out."""
        document = saved if isinstance(saved, Mapping) else {}
        advice = document.get("advice")
        for name, entry in advice.items() if isinstance(advice, Mapping) else ():
            match entry:
                case [*words, int() | float() as age] if name in BY_ID and len(words) == len(ADVICE) and is_count(age):
                    self.advice[name], self._seen[name] = (tuple(map(str, words)), now - age), now
        match document.get("verdict"):
            case [str(verdict), str(level), str(sentence), int() | float() as age] if is_count(age):
                self.verdict, self.level, self.sentence, self.since = verdict, level, sentence, now - age


def _sentence(judgement: Judgement, view: View) -> str:
    """Return the verdict in a sentence without measured figures."""
    row = BY_ID.get(judgement.verdict)
    if row is None:
        return BUT_MUTED if judgement.sentence == BUT_MUTED else SENTENCES.get(judgement.verdict, TOO_LITTLE)
    is_over = judgement.own is not None and judgement.own.over
    return row.over("a few minutes ago") if is_over else fill(row.summary, figures_of(view))


def _words_of(change: Change) -> tuple[str, ...]:
    """Return a change as `ADVICE` has it."""
    suggested = typed_value(change.target) or change.words
    last = map(_whole, (suggested, change.why, change.not_if, change.cost))
    return change.flag, typed_value(change.now), *last


def _whole(text: str) -> str:
    """Return as many whole sentences as fit, else whole words."""
    if len(text) <= LONGEST_TEXT:
        return text
    sentences, _, _ = text[: LONGEST_TEXT + 1].rpartition(". ")
    return f"{sentences}." if sentences else text[:LONGEST_TEXT].rpartition(" ")[0] + " …"
