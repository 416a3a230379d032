"""A judgement in words, the same for the exporter's pages and their tests. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from sglang_tuning_exporter.diagnosis.advice import REASONS, Advice
from sglang_tuning_exporter.diagnosis.conditions.share import STATE_WORDS, WAITS
from sglang_tuning_exporter.diagnosis.evidence import Evidence, Past, amount
from sglang_tuning_exporter.diagnosis.findings import (
    HEALTHY,
    IDLE,
    NO_CLEAR_BOTTLENECK,
    NOT_ENOUGH_DATA,
    STARTING,
    Check,
    Finding,
    Judgement,
    confidence_of,
)
from sglang_tuning_exporter.diagnosis.json_findings import Document
from sglang_tuning_exporter.diagnosis.recommendation import NOT_SET, current_words
from sglang_tuning_exporter.diagnosis.row import Diagnosis
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.sglang.clean import cleaned
from sglang_tuning_exporter.state.facts import ServerFacts

SeenAt: TypeAlias = Callable[[Finding], float | None]
# A verdict without a finding, in a sentence.
_SENTENCES = {
    HEALTHY: "Nothing limits this server now.",
    IDLE: "The server is idle.",
    NO_CLEAR_BOTTLENECK: "No clear bottleneck: nothing in the tuning guide explains these figures.",
    STARTING: "SGLang is starting.",
    NOT_ENOUGH_DATA: "Too little load was seen yet to say what limits this server.",
}
# What it rests on.
_REMARKS = {
    HEALTHY: "Seen over {served:.0f} s under load in {span}.",
    IDLE: "It had almost nothing to do in {span}. Its limits show under load.",
    NO_CLEAR_BOTTLENECK: "Requests wait, or another figure is not healthy, and no diagnosis explains it. The figures below show more.",
    STARTING: "It answers when the model is loaded.",
    NOT_ENOUGH_DATA: "A verdict needs {least:.0f} s under load and {fewest} observations (batch lines, or scrapes that show new figures);"
    " there are {served:.0f} s and {seen:.0f} in {span}.",
}
TONES = {"critical": "bad", "warning": "warn", "info": "info"}
# Over the headline, for readers who cannot see its colour.
_WORDS = {"bad": "Critical", "warn": "Warning", "info": "Hint", "good": "Healthy", "calm": "No verdict"}
LEAST_SHARE = 0.05  # of the serving time, for a reason to wait to be named
_RATES = {"per_minute": "/min", "per_second": "/s"}
_TOGETHER = (
    "These changes go together: each answers another finding, and this release accepts them all."
    " Chances are tried one at a time."
)
# A word of a command line, with what is quoted in it.
_WORD = re.compile(r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\])+""", re.DOTALL)


class ChangeText(NamedTuple):
    """A change: `typed` is what to type (empty for advice to people), `words` stand after it. `as_in`: the finding, from 1 on, that has it first."""

    verb: str
    typed: str
    words: str
    now: str
    gain: str
    reasons: tuple[tuple[str, str], ...]
    as_in: int = 0


class FindingText(NamedTuple):
    """A finding. `confidence` is empty without a figure."""

    row: Diagnosis
    headline: str
    confidence: str
    seen: str
    changes: tuple[ChangeText, ...]
    follows: bool


class CommandText(NamedTuple):
    """The new command line: its changes, notes, and the words of each flag with whether the advice changes it."""

    title: str
    changes: list[dict[str, str]]  # flag, before, after
    notes: list[str]
    pieces: tuple[tuple[str, bool], ...]


class VerdictText(NamedTuple):
    """A judgement. `remark` is what a verdict without a finding rests on; `tone` is a class of the style sheet, `word` its name."""

    verdict: str
    sentence: str
    remark: str
    tone: str
    word: str
    confidence: str
    findings: tuple[FindingText, ...]
    command: CommandText | None

    @property
    def faults(self) -> list[FindingText]:
        """What is wrong, causes before their consequences."""
        return [each for each in self.findings if not each.row.is_chance]

    @property
    def chances(self) -> list[FindingText]:
        """Opportunities, to be tried one at a time; none while the verdict is a failure."""
        fails = self.verdict in BY_ID and BY_ID[self.verdict].comes_first
        return [] if fails else [each for each in self.findings if each.row.is_chance]


def verdict_text(judgement: Judgement, command: Document | None, seen_at: SeenAt) -> VerdictText:
    """Return a judgement in words; `seen_at`: when a finding was last seen, in unix seconds."""
    verdict, past = judgement.verdict, judgement.past
    findings = _findings(judgement, seen_at)
    own = next((each for each in findings if each.row.id == verdict), None)
    remark = "" if own is not None else _REMARKS[verdict]
    tone = _tone(judgement)
    headline = own.headline if own is not None else _SENTENCES[verdict]
    if verdict == NO_CLEAR_BOTTLENECK and (reasons := _reasons_to_wait(past)):
        headline, remark = _why_unclear(reasons, past)
    text = VerdictText(
        verdict,
        headline,
        remark.format(
            served=past.served_seconds,
            least=past.profile.enough_serving_seconds,
            seen=past.observations,
            fewest=past.profile.enough_observations,
            span=f"the last {past.profile.window_seconds / 60:.0f} minutes",
        ),
        tone,
        "Idle" if verdict == IDLE else _WORDS[tone],
        own.confidence if own is not None else _confidence(judgement),
        findings,
        None if command is None else _command(command, judgement),
    )
    cleaned_text: VerdictText = cleaned(text)
    return cleaned_text


def _reasons_to_wait(past: Past) -> list[tuple[str, float]]:
    """Return the share of the serving time for each reason why requests waited, the longest first."""
    shares = {state: past.recent.share("admission", state) or 0.0 for state in WAITS}
    return [(words, share) for words, share in state_shares({"admission": shares}) if share >= LEAST_SHARE]


def _why_unclear(reasons: list[tuple[str, float]], past: Past) -> tuple[str, str]:
    """Return headline and remark where requests waited, and no diagnosis holds."""
    words, share = reasons[0]
    if share > past.profile.frequent_share:
        return f"No clear bottleneck: most of the time {words}, and no change is known that helps.", ""
    when = "for different reasons at different times" if len(reasons) > 1 else "for part of the time"
    shares = ", ".join(f"{100 * each:.0f} % {why}" for why, each in reasons)
    return f"No clear bottleneck: requests waited {when}.", f"Of the serving time: {shares}."


def _tone(judgement: Judgement) -> str:
    if any(finding.diagnosis.severity == "critical" for finding in judgement.findings):
        return "bad"
    if judgement.verdict in BY_ID:
        return TONES[judgement.severity]
    return "good" if judgement.verdict == HEALTHY else "calm"


def _confidence(judgement: Judgement) -> str:
    if judgement.verdict in {IDLE, NOT_ENOUGH_DATA}:
        return "high" if judgement.verdict == IDLE and judgement.past.watched_seconds >= 120 else "low"
    return confidence_of(judgement.past.served_seconds)


def _findings(judgement: Judgement, seen_at: SeenAt) -> tuple[FindingText, ...]:
    shown: dict[ChangeText, int] = {}
    texts = []
    for number, finding in enumerate(judgement.findings, 1):
        changes = [_change(advice, judgement.past.facts) for advice in finding.advice]
        # The page lists consequences without their changes.
        if not finding.because:
            for change in changes:
                shown.setdefault(change, number)
        again = tuple(
            change._replace(as_in=shown[change]) if shown.get(change, number) < number else change for change in changes
        )
        texts.append(_finding(finding, again, seen_at(finding)))
    return tuple(texts)


def _finding(finding: Finding, changes: tuple[ChangeText, ...], last: float | None) -> FindingText:
    row = finding.diagnosis
    decided, *others = finding.evidence
    is_measured = row.condition.has_figure and not row.is_chance
    seen = finding.sentence
    if is_measured:
        seen += f"; {bounds_of(decided)}"
    further = [f"{capitalised(each.name)}: {_value(each)} (threshold {_bound(each)})" for each in others]
    return FindingText(
        row,
        finding.summary(last),
        finding.confidence if is_measured else "",
        " ".join(f"{each}." for each in (seen, *(further if not row.is_chance else ()))),
        changes,
        bool(finding.because),
    )


def _change(advice: Advice, facts: ServerFacts) -> ChangeText:
    now = "" if advice.is_switch else current_words(advice, facts)
    verb, typed, words = "", "", capitalised(f"{advice.suggestion}.")
    if advice.flag:
        verb, typed, words = "Try", advice.typed, "" if advice.suggested is not None else advice.suggestion
    if advice.removes:
        verb, typed, words = "Remove", advice.flag, ""
    given = ((words, getattr(advice, name), end) for name, words, end in REASONS)
    reasons = tuple((words, capitalised(text) if words.endswith(":") else f"{text}{end}") for words, text, end in given)
    return ChangeText(
        verb,
        typed,
        words,
        f"now {now}" if now else "",
        capitalised(f"{advice.gain}.") if advice.gain else "",
        tuple((label, text) for label, text in reasons if text),
    )


def _command(command: Document, judgement: Judgement) -> CommandText:
    """Return the command line; where SGLang chose the value in force, it stands in place of `not set`."""
    facts, advised = judgement.past.facts, [advice for finding in judgement.findings for advice in finding.advice]
    values = {advice.flag: current_words(advice, facts) for advice in advised if not advice.is_switch}
    in_force = {flag: words for flag, words in values.items() if words not in ("", NOT_SET)}
    changes = [
        {"flag": flag, "before": in_force.get(flag, each["current"]), "after": each["suggested"]}
        for each in command["changes"]
        for flag in (each["flag"],)
    ]
    secrets = ", ".join(command["secrets"])
    notes = (
        _TOGETHER if len(changes) > 1 else "",
        f"Secrets are never read: add {secrets} again where the server has them now." if secrets else "",
    )
    return CommandText(
        f"The command line with {'this change' if len(changes) == 1 else 'these changes'}",
        changes,
        [note for note in notes if note],
        pieces(command["text"], frozenset(each["flag"] for each in changes)),
    )


def pieces(command: str, changed: frozenset[str]) -> tuple[tuple[str, bool], ...]:
    """Cut a command line before each flag; the pieces joined with blanks are the line again."""
    groups: list[list[str]] = [[]]
    for word in _WORD.findall(command):
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    cut = tuple((" ".join(group), group[0] in changed) for group in groups if group)
    return cut if " ".join(text for text, _ in cut) == command else ((command, False),)


def bounds_of(evidence: Evidence) -> str:
    """Return what is healthy, after the limit where that is another."""
    if evidence.unit == "count" and evidence.threshold == 0:
        return "healthy: none"
    bound = _bound(evidence) if evidence.good is None else evidence.words(evidence.good)
    limit = "" if evidence.good is None else f"{limit_of(evidence)}; "
    return f"{limit}healthy: {f'{bound} or more' if evidence.below else f'up to {bound}'}"


def limit_of(evidence: Evidence) -> str:
    """Return the threshold of the figure that decides."""
    return f"{'at least' if evidence.below else 'limit'} {_bound(evidence)}"


def check_text(check: Check) -> str:
    """Return the figure of a check that passed, with its limit; "no" where it has none."""
    evidence = check.evidence
    if evidence is None or not check.diagnosis.condition.has_figure or evidence.text:
        return "no"
    if evidence.unit == "count" and evidence.threshold == 0:
        return "none"
    return f"{_value(evidence)} ({limit_of(evidence)})"


def state_shares(shares: Mapping[str, Mapping[str, float]]) -> list[tuple[str, float]]:
    """Return what the serving time was spent with, the largest share of each signal first, where it shows."""
    return [
        (STATE_WORDS[state], share)
        for signal in ("queue", "admission", "cuda_graph")
        for state, share in sorted(shares.get(signal, {}).items(), key=lambda item: -item[1])
        if state != "no_queue" and round(100 * share) > 0
    ]


def figure(value: float, unit: str) -> str:
    """Return a figure with its unit."""
    return amount(value, unit) + _RATES.get(unit, "")


def capitalised(words: str) -> str:
    """Return the words with a capital first letter."""
    return words[:1].upper() + words[1:]


def _value(evidence: Evidence) -> str:
    return evidence.text or figure(evidence.value, evidence.unit)


def _bound(evidence: Evidence) -> str:
    return evidence.bound or figure(evidence.threshold, evidence.unit)
