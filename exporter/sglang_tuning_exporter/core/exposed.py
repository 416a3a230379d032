"""What rules and boards read: conditions turned so that above the limit is bad, the advice that stands, the verdict. Pure; times are unix seconds.

Every word here becomes a label of a series, so it holds no measured figure and changes rarely: figures are in the conditions and on the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from typing import NamedTuple

from sglang_tuning_exporter.core import rows
from sglang_tuning_exporter.core.advice import figures_of, fill
from sglang_tuning_exporter.core.events import is_count
from sglang_tuning_exporter.core.findings import Change, Figure, Finding, Judgement
from sglang_tuning_exporter.core.judge import (
    BUT_MUTED,
    NOT_ENOUGH,
    SENTENCES,
    STARTING,
    STOPPED,
    Measured,
    past_without_figures,
)
from sglang_tuning_exporter.core.text import typed_value
from sglang_tuning_exporter.core.view import View

KEPT_SECONDS = 600.0  # in which advice keeps its words, unless the flag was set or its alert begins
LONGEST_TEXT = 200
TOO_LITTLE = "Too little was seen for a verdict."


class Condition(NamedTuple):
    """The figure of a row over its window, and its limit; above the limit is bad. `value` None: not measured."""

    diagnosis: str
    value: float | None
    limit: float


class Advice(NamedTuple):
    """The first change of a diagnosis, in words: why, when it will not help, what it costs; and since when it stands."""

    flag: str
    current: str
    suggested: str
    text: str
    not_if: str
    cost: str
    since: float

    @property
    def words(self) -> tuple[str, ...]:
        """All but the time."""
        return self[:-1]


class Verdict(NamedTuple):
    """What limits the server, in a sentence without figures."""

    verdict: str
    level: str
    sentence: str
    since: float


def conditions(measured: Measured) -> Iterator[Condition]:
    """Give the condition of each row with an alert that was measured."""
    for row in rows.ROWS:
        figure = measured.figures.get(row.id)
        if row.id in measured.view.profile.accepts:
            continue
        if row.alert and figure is not None and figure.limit is not None:
            # What another row explains better is not above its limit.
            explained = figure.holds and row.id not in measured.holding
            value, limit = turned(figure)
            yield Condition(row.id, min(value, limit) if explained else value, limit)


def turned(figure: Figure) -> tuple[float, float]:
    """Return value and limit so that above the limit is bad: a share below its limit as the rest, other figures as what is missing."""
    limit = figure.limit or 0.0
    if figure.side != "below":
        return figure.value, limit
    return (1.0 - figure.value, 1.0 - limit) if figure.unit in {"share", "ratio"} else (limit - figure.value, 0.0)


def scale_out_helps(judgement: Judgement) -> bool | None:
    """Return whether another replica would take load off this server; None if not known."""
    verdict = judgement.verdict
    if verdict in {NOT_ENOUGH, STARTING, STOPPED, "server_down", "scheduler_stuck"}:
        return None
    if verdict in rows.REPLICA_HELPS_AFTER_A_FLAG:
        changes = next((found.changes for found in judgement.findings if found.diagnosis == verdict), ())
        return not any(change.flag for change in changes)
    return verdict in rows.REPLICA_HELPS


class Words:
    """The words that stand now: advice by diagnosis, and the verdict."""

    def __init__(self) -> None:
        self.advice: dict[str, Advice] = {}
        self.verdict: Verdict | None = None
        self._seen: dict[str, float] = {}  # when a diagnosis last held

    def take(self, judgement: Judgement, view: View, now: float, firing: Mapping[str, float]) -> None:
        """Take a judgement; `firing`: since when alerts are, by diagnosis."""
        for finding in judgement.findings:
            if finding.alert and finding.changes:
                self._advise(finding, now, firing.get(finding.diagnosis, -inf))
        for gone in [name for name, at in self._seen.items() if now - at > KEPT_SECONDS]:
            self.advice.pop(gone, None)
            del self._seen[gone]
        name, before = judgement.verdict, self.verdict
        sentence = _sentence(judgement, view)
        if before is None or before.verdict != name:
            self.verdict = Verdict(name, judgement.severity, sentence, now)
        elif before.sentence != sentence and name in rows.BY_ID:  # it is over now, or goes on again
            self.verdict = before._replace(sentence=sentence)

    def _advise(self, finding: Finding, now: float, firing: float) -> None:
        name, change = finding.diagnosis, finding.changes[0]
        held, new = self.advice.get(name), advice_of(change, now)
        self._seen[name] = now
        if held is not None and held.words == new.words:
            return
        is_set = held is not None and held.flag == new.flag and held.current != new.current
        # What is sent when the alert begins is what the page says then: little was seen when the diagnosis first held.
        if held is None or is_set or held.since < firing or now - held.since >= KEPT_SECONDS:
            self.advice[name] = new

    def saved(self, now: float) -> dict[str, object]:
        """Return it as plain JSON, times as ages in seconds."""
        return {
            "advice": {name: [*each.words, now - each.since] for name, each in self.advice.items()},
            "verdict": None if self.verdict is None else [*self.verdict[:3], now - self.verdict.since],
        }

    def restore(self, saved: object, now: float) -> None:
        """Go on from what `saved` returned; what cannot be read is left out."""
        document = saved if isinstance(saved, Mapping) else {}
        advice = document.get("advice")
        for name, entry in advice.items() if isinstance(advice, Mapping) else ():
            if name in rows.BY_ID and isinstance(entry, list) and len(entry) == 7 and is_count(entry[6]):
                flag, current, suggested, text, not_if, cost = map(str, entry[:6])
                self.advice[name] = Advice(flag, current, suggested, text, not_if, cost, now - entry[6])
                self._seen[name] = now
        match document.get("verdict"):
            case [str(verdict), str(level), str(sentence), int() | float() as since]:
                self.verdict = Verdict(verdict, level, sentence, now - since)


def _sentence(judgement: Judgement, view: View) -> str:
    """Return the verdict in a sentence without measured figures."""
    row = rows.BY_ID.get(judgement.verdict)
    if row is None:
        if judgement.sentence == BUT_MUTED:
            return BUT_MUTED
        return SENTENCES.get(judgement.verdict, TOO_LITTLE)
    over = any(each.over for each in judgement.findings if each.diagnosis == row.id)
    return past_without_figures(row) if over else fill(row.summary, figures_of(view))


def advice_of(change: Change, now: float) -> Advice:
    """Return a change in words."""
    to = False if change.removes and change.to is None else change.to
    suggested = typed_value(to) or change.words
    suggested, text, not_if, cost = map(_whole, (suggested, change.why, change.will_not_help_if, change.cost))
    return Advice(change.flag, typed_value(change.now), suggested, text, not_if, cost, now)


def _whole(text: str) -> str:
    """Return as many whole sentences as fit, else whole words."""
    if len(text) <= LONGEST_TEXT:
        return text
    sentences, _, _ = text[: LONGEST_TEXT + 1].rpartition(". ")
    return f"{sentences}." if sentences else text[:LONGEST_TEXT].rpartition(" ")[0] + " …"
