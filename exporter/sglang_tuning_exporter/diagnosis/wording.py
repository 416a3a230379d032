"""A judgement in words, the same on a terminal, on the exporter's pages and in a report. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from sglang_tuning_exporter.diagnosis.advice import REASONS, Advice
from sglang_tuning_exporter.diagnosis.conditions.share import STATE_WORDS, WAITS
from sglang_tuning_exporter.diagnosis.evidence import RESERVE, WATCHDOG, Evidence, Past, amount
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
from sglang_tuning_exporter.diagnosis.json_findings import Document, iso
from sglang_tuning_exporter.diagnosis.recommendation import NOT_SET, current_words
from sglang_tuning_exporter.diagnosis.row import Diagnosis
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.sglang.clean import cleaned
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.journal import START

SeenAt: TypeAlias = Callable[[Finding], tuple[float | None, float | None]]
# A verdict without a finding, in a sentence: of now, and of a log.
_SENTENCES = {
    HEALTHY: (
        "Nothing limits this server now.",
        "Nothing limits this server: most of the time nothing waits for long.",
    ),
    IDLE: ("The server is idle.", "The server was idle."),
    NO_CLEAR_BOTTLENECK: ("No clear bottleneck: nothing in the tuning guide explains these figures.",) * 2,
    STARTING: ("SGLang is starting.", "SGLang was still starting."),
    NOT_ENOUGH_DATA: (
        "Too little load was seen yet to say what limits this server.",
        "There is too little load in this log to say what limits this server.",
    ),
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
# A finding whose evidence ended so long before the end of the log is over: its alert would be resolved.
OVER_SECONDS = 300.0
HANG_OVER_SECONDS = 30.0  # a hang is checked every 15 s
_LASTING = frozenset({RESERVE, START})  # printed once, at a start
LEAST_SHARE = 0.05  # of the serving time, for a reason to wait to be named
_RATES = {"per_minute": "/min", "per_second": "/s"}
_TOGETHER = (
    "These changes go together: each answers another finding, and this release accepts them all."
    " Chances are tried one at a time."
)
# A word of a command line, with what is quoted in it.
_WORD = re.compile(r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\])+""", re.DOTALL)


class PastLog(NamedTuple):
    """The log of a judgement that is not about now."""

    end: float  # of the judged start, unix seconds
    crash: str  # the sentence of how the server crashed; empty where the log shows none
    start: int | None  # the number of the judged start


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
    """A finding. `seen` is a paragraph, `figures` the same figures as a list with their bounds; `confidence` is empty without a figure."""

    row: Diagnosis
    headline: str
    confidence: str
    seen: str
    figures: tuple[str, ...]
    changes: tuple[ChangeText, ...]
    period: str
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


def verdict_text(
    judgement: Judgement, command: Document | None, seen_at: SeenAt, log: PastLog | None = None
) -> VerdictText:
    """Return a judgement in words, of now or of a `log`; `seen_at`: when a finding was first and last seen, in unix seconds."""
    verdict, past = judgement.verdict, judgement.past
    findings = _findings(judgement, seen_at, log)
    own = next((each for each in findings if each.row.id == verdict), None)
    remark = "" if own is not None or (log is not None and verdict == HEALTHY) else _REMARKS[verdict]
    span = f"the last {past.profile.window_seconds / 60:.0f} minutes" if log is None else "this log"
    tone = _tone(judgement)
    headline = own.headline if own is not None else _SENTENCES[verdict][log is not None]
    if verdict == NO_CLEAR_BOTTLENECK and (reasons := _reasons_to_wait(past)):
        headline, remark = _why_unclear(reasons, past)
    if log is not None and verdict == HEALTHY:
        headline += " Some things could be better." if findings else " Nothing needs to be changed."
    text = VerdictText(
        verdict,
        headline,
        remark.format(
            served=past.served_seconds,
            least=past.profile.enough_serving_seconds,
            seen=past.observations,
            fewest=past.profile.enough_observations,
            span=span,
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


def _findings(judgement: Judgement, seen_at: SeenAt, log: PastLog | None) -> tuple[FindingText, ...]:
    shown: dict[ChangeText, int] = {}
    texts = []
    for number, finding in enumerate(judgement.findings, 1):
        changes = [_change(advice, judgement.past.facts) for advice in finding.advice]
        # The page of now lists consequences without their changes.
        if log is not None or not finding.because:
            for change in changes:
                shown.setdefault(change, number)
        again = tuple(
            change._replace(as_in=shown[change]) if shown.get(change, number) < number else change for change in changes
        )
        texts.append(_finding(finding, again, seen_at(finding), log))
    return tuple(texts)


def _finding(
    finding: Finding, changes: tuple[ChangeText, ...], at: tuple[float | None, float | None], log: PastLog | None
) -> FindingText:
    row, (first, last) = finding.diagnosis, at
    decided, *others = finding.evidence
    is_measured = row.condition.has_figure and not row.is_chance
    seen = finding.sentence
    if is_measured:
        seen += f"; {bounds_of(decided)}"
    further = [f"{capitalised(each.name)}: {_value(each)} (threshold {_bound(each)})" for each in others]
    figures = []
    if row.condition.has_figure:
        bounds = f"threshold {_bound(decided)}" if row.is_chance else bounds_of(decided)
        figures = [f"{capitalised(decided.name)}: {_value(decided)} ({bounds})", *further]
    return FindingText(
        row,
        _headline(finding, last, log),
        finding.confidence if is_measured else "",
        " ".join(f"{each}." for each in (seen, *(further if not row.is_chance else ()))),
        tuple(figures),
        changes,
        _period(first, last, log),
        bool(finding.because),
    )


def _headline(finding: Finding, last: float | None, log: PastLog | None) -> str:
    """Return a finding in a sentence: in a log, how the server ended, or when the evidence was last seen if it is over."""
    said, rests_on, seen = finding.summary(last), finding.diagnosis.condition.measured_by, iso(last)
    if log is None or (finding.diagnosis.condition.is_end and not log.crash):
        return said
    if finding.diagnosis.condition.is_end:
        return log.crash
    if finding.is_over or last is None or seen is None or not _LASTING.isdisjoint(rests_on):
        return said
    since = log.end - last
    if since < (HANG_OVER_SECONDS if WATCHDOG in rests_on else OVER_SECONDS):
        return said
    return f"{said} Last seen at {printed(seen)}, {duration(since)} before the end."


def _period(first: float | None, last: float | None, log: PastLog | None) -> str:
    begin, end = iso(first), iso(last)
    if log is None or begin is None or end is None:
        return ""
    return f"Seen from {printed(begin)} to {printed(end)}{f', start {log.start}' if log.start else ''}."


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


def duration(seconds: float) -> str:
    """Return seconds in words, such as `15 min`."""
    if seconds < 180:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def printed(time: str) -> str:
    """Return a document's time as SGLang prints it, without a fraction."""
    return time.replace("T", " ").rstrip("Z")[:19]


def capitalised(words: str) -> str:
    """Return the words with a capital first letter."""
    return words[:1].upper() + words[1:]


def _value(evidence: Evidence) -> str:
    return evidence.text or figure(evidence.value, evidence.unit)


def _bound(evidence: Evidence) -> str:
    return evidence.bound or figure(evidence.threshold, evidence.unit)
