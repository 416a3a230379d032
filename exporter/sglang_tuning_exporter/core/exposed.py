"""What rules and boards read: conditions turned so that above the limit is bad, the advice that stands, the verdict. Pure; times are unix seconds.

Every word here becomes a label of a series, so it holds no measured figure and changes rarely: figures are in the conditions and on the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf

from sglang_tuning_exporter.core import rows
from sglang_tuning_exporter.core.advice import figures_of, fill
from sglang_tuning_exporter.core.events import is_count
from sglang_tuning_exporter.core.findings import Change, Figure, Finding, Judgement, typed_value
from sglang_tuning_exporter.core.judge import (
    BUT_MUTED,
    NOT_ENOUGH,
    SENTENCES,
    STARTING,
    STOPPED,
    Measured,
    past_without_figures,
)
from sglang_tuning_exporter.core.view import View

KEPT_SECONDS = 600.0  # in which advice keeps its words, unless the flag was set or its alert begins
LONGEST_TEXT = 200
TOO_LITTLE = "Too little was seen for a verdict."
# The words of the first change of a diagnosis, as labels: why, when it will not help and what it costs are the last three.
ADVICE = ("flag", "current", "suggested", "text", "not_if", "cost")


def conditions(measured: Measured) -> Iterator[tuple[str, float, float]]:
    """Give the figure and the limit of each row with an alert that was measured, turned so that above the limit is bad."""
    for row in rows.ROWS:
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
    verdict = judgement.verdict
    if verdict in {NOT_ENOUGH, STARTING, STOPPED, "server_down", "scheduler_stuck"}:
        return None
    if verdict in rows.REPLICA_HELPS_AFTER_A_FLAG:
        return not any(change.flag for change in (judgement.own.changes if judgement.own is not None else ()))
    return verdict in rows.REPLICA_HELPS


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
        elif self.verdict in rows.BY_ID:  # it may be over now, or go on again
            self.sentence = sentence

    def _advise(self, finding: Finding, now: float, firing: float) -> None:
        name, new = finding.diagnosis, words_of(finding.changes[0])
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
                case [*words, int() | float() as age] if (
                    name in rows.BY_ID and len(words) == len(ADVICE) and is_count(age)
                ):
                    self.advice[name], self._seen[name] = (tuple(map(str, words)), now - age), now
        match document.get("verdict"):
            case [str(verdict), str(level), str(sentence), int() | float() as age]:
                self.verdict, self.level, self.sentence, self.since = verdict, level, sentence, now - age


def _sentence(judgement: Judgement, view: View) -> str:
    """Return the verdict in a sentence without measured figures."""
    row = rows.BY_ID.get(judgement.verdict)
    if row is None:
        return BUT_MUTED if judgement.sentence == BUT_MUTED else SENTENCES.get(judgement.verdict, TOO_LITTLE)
    is_over = judgement.own is not None and judgement.own.over
    return past_without_figures(row) if is_over else fill(row.summary, figures_of(view))


def words_of(change: Change) -> tuple[str, ...]:
    """Return a change as `ADVICE` has it."""
    suggested = typed_value(change.target) or change.words
    last = map(_whole, (suggested, change.why, change.will_not_help_if, change.cost))
    return change.flag, typed_value(change.now), *last


def _whole(text: str) -> str:
    """Return as many whole sentences as fit, else whole words."""
    if len(text) <= LONGEST_TEXT:
        return text
    sentences, _, _ = text[: LONGEST_TEXT + 1].rpartition(". ")
    return f"{sentences}." if sentences else text[:LONGEST_TEXT].rpartition(" ")[0] + " …"
