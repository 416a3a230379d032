"""The landing page: what limits the server now, in words; needs no Prometheus, no script, no asset from elsewhere."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from sglang_tuning_exporter import __version__
from sglang_tuning_exporter.diagnosis.advice import shown
from sglang_tuning_exporter.diagnosis.conditions.share import STATE_WORDS
from sglang_tuning_exporter.diagnosis.findings import HEALTHY, IDLE, NO_CLEAR_BOTTLENECK, STARTING, Finding, Judgement
from sglang_tuning_exporter.diagnosis.json_findings import command_document
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.serve.pages.figures import figures, of_before, ranks
from sglang_tuning_exporter.serve.pages.rendering import environment
from sglang_tuning_exporter.state.signals import STATES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang_tuning_exporter.collect.sidecar import Sidecar
    from sglang_tuning_exporter.diagnosis.evidence import Evidence, Past
    from sglang_tuning_exporter.diagnosis.findings import Check

REFRESH_SECONDS = 10
_ENVIRONMENT = environment()
_NO_FINDING = {
    STARTING: "SGLang is starting.",
    HEALTHY: "Nothing limits this server now.",
    IDLE: "The server is idle.",
    NO_CLEAR_BOTTLENECK: "No clear bottleneck: nothing in the tuning guide explains these figures.",
}
_NO_SUMMARIES: Mapping[str, str] = {}
# Over the headline, for readers who cannot see its colour.
WORDS = {"bad": "Critical", "warn": "Warning", "info": "Hint", "good": "Healthy", "calm": "No verdict"}
# A word of a command line, with what is quoted in it.
_WORD = re.compile(r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\])+""", re.DOTALL)

_FLAG = re.compile(r"(--[a-z][a-z0-9-]*[a-z0-9])")


@dataclass(frozen=True, slots=True)
class FlagWord:
    """A flag of a command line with its value, on one line. `changed`: by the advice."""

    text: str
    changed: bool


def headline(word: str, summaries: Mapping[str, str] = _NO_SUMMARIES) -> str:
    """Return the verdict as a sentence; `summaries` are those of the findings."""
    if word in BY_ID:
        return summaries.get(word, BY_ID[word].summary)
    return _NO_FINDING.get(word, "Not enough has been seen yet to say what limits this server.")


def healthy(evidence: Evidence) -> str:
    """Return what the figure of a finding would be on a healthy server."""
    bound = evidence.words(evidence.threshold if evidence.good is None else evidence.good)
    if evidence.unit == "count" and evidence.threshold == 0:
        return "none"
    return f"{bound} or more" if evidence.below else f"up to {bound}"


def pieces(command: str, changed: frozenset[str]) -> list[FlagWord]:
    """Cut a command line before each flag; the pieces joined with blanks are the line again."""
    groups: list[list[str]] = [[]]
    for word in _WORD.findall(command):
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    cut = [FlagWord(" ".join(group), group[0] in changed) for group in groups if group]
    return cut if " ".join(piece.text for piece in cut) == command else [FlagWord(command, changed=False)]


def remark(judgement: Judgement, past: Past) -> str:
    """Return what a verdict without a finding rests on; empty for the others."""
    minutes = f"the last {past.profile.window_seconds / 60:.0f} minutes"
    if judgement.verdict in BY_ID:
        return ""
    if judgement.verdict == HEALTHY:
        return f"Seen over {past.served_seconds:.0f} s under load in {minutes}."
    if judgement.verdict == IDLE:
        return f"It had almost nothing to do in {minutes}. Its limits show under load."
    if judgement.verdict == NO_CLEAR_BOTTLENECK:
        return "Requests wait, or another figure is not healthy, and no diagnosis explains it. The figures below show more."
    if judgement.verdict == STARTING:
        return "It answers when the model is loaded."
    least = past.profile.enough_serving_seconds
    return f"A verdict needs {least:.0f} s under load; so far {past.served_seconds:.0f} s in {minutes}."


def sentence(words: str) -> str:
    """Return the words with a capital first letter."""
    return words[:1].upper() + words[1:]


def flags(words: str) -> Markup:
    """Return prose as HTML in which a browser breaks no line inside a flag."""
    parts = _FLAG.split(words)
    return Markup("").join(
        Markup('<span class="flag">{}</span>').format(part) if place % 2 else escape(part)
        for place, part in enumerate(parts)
    )


_ENVIRONMENT.filters.update(flags=flags, sentence=sentence)


def seen(finding: Finding) -> str:
    """Return the figures of a finding beside the healthy ones, as sentences; the first one has no capital."""
    first, *others = finding.evidence
    words = finding.sentence
    if finding.diagnosis.condition.has_figure:
        words += f"; healthy: {healthy(first)}"
    return f"{words}." + "".join(f" {sentence(other.name)}: {other.words()}." for other in others)


@dataclass(frozen=True, slots=True)
class ShownFindings:
    """The findings of a judgement, by their place on the page."""

    judgement: Judgement

    @property
    def is_down(self) -> bool:
        """Whether the server has ended: then figures of before are not judged."""
        return any(finding.diagnosis.condition.is_end for finding in self.judgement.findings)

    @property
    def chances(self) -> list[Finding]:
        """Opportunities, to be tried one at a time; none while the verdict is a failure."""
        verdict = BY_ID.get(self.judgement.verdict)
        if verdict is not None and verdict.comes_first:
            return []
        return [finding for finding in self.judgement.findings if finding.diagnosis.is_chance]

    @property
    def follow(self) -> list[Finding]:
        """Consequences of another finding."""
        return [finding for finding in self.judgement.findings if finding.because]

    @property
    def main(self) -> list[Finding]:
        """All others."""
        return [
            finding
            for finding in self.judgement.findings
            if not finding.diagnosis.is_chance and finding not in self.follow
        ]

    @property
    def passed(self) -> list[tuple[str, str]]:
        """The checks that found nothing: headline, and the figure beside its limit or "no"."""
        return [
            (check.diagnosis.headline, _figure(check))
            for check in ([] if self.is_down else self.judgement.checks)
            if check.passed and not check.diagnosis.is_chance
        ]

    @property
    def not_judged(self) -> dict[str, list[str]]:
        """The rows with an alert that cannot be judged here, by what is needed to judge them."""
        found: dict[str, list[str]] = {}
        for check in self.judgement.checks:
            if check.passed is None and not check.diagnosis.is_chance and check.diagnosis.alert:
                found.setdefault(check.diagnosis.condition.needs, []).append(check.diagnosis.headline)
        return found

    @property
    def shares(self) -> list[tuple[str, float]]:
        """What the serving time of the window was spent with, where it shows."""
        recent = [] if self.is_down else [signal for signal in STATES if signal in ("queue", "admission", "cuda_graph")]
        shares = (
            (words, self.judgement.past.recent.share(signal, state))
            for signal in recent
            for state in STATES[signal]
            if (words := STATE_WORDS.get(state)) is not None and state != "no_queue"
        )
        return [(words, share) for words, share in shares if share is not None and round(100 * share) > 0]


def _figure(check: Check) -> str:
    evidence = check.evidence
    if evidence is None or not check.diagnosis.condition.has_figure or evidence.text:
        return "no"
    if evidence.unit == "count" and evidence.threshold == 0:
        return "none"
    limit = evidence.words(evidence.threshold)
    return f"{evidence.words()} ({'at least' if evidence.below else 'limit'} {limit})"


def render(sidecar: Sidecar, *, still: bool = False) -> str:
    """Return the page as HTML. The browser reloads it unless it is `still`. Every word from outside is escaped."""
    with sidecar.view() as now:
        judgement = sidecar.judge(now)
        command = command_document(judgement, sidecar.state.facts)
        tiles, rows = figures(sidecar.state, judgement.past, sidecar.history, now), ranks(sidecar.state)
    findings = ShownFindings(judgement)
    summaries = {f.diagnosis.id: f.summary(sidecar.unix(now - (f.ago or 0.0))) for f in judgement.findings}
    return _ENVIRONMENT.get_template("index.html").render(
        title=headline(judgement.verdict, summaries),
        summaries=summaries,
        tone=_tone(judgement),
        word=_word(judgement),
        remark=remark(judgement, judgement.past),
        refresh=None if still else REFRESH_SECONDS,
        clock=datetime.fromtimestamp(time.time(), timezone.utc),
        verdict=judgement.verdict,
        findings=findings,
        command=command,
        pieces=pieces(command["text"], frozenset(change["flag"] for change in command["changes"])) if command else [],
        seen=seen,
        shown=shown,
        figures=of_before(tiles) if findings.is_down else tiles,
        ranks=rows,
        facts=sidecar.state.facts,
        health=sidecar.health,
        files=sidecar.log.files if sidecar.log is not None else [],
        config=sidecar.config,
        profile=sidecar.profile,
        served=judgement.past.served_seconds,
        version=__version__,
    )


def _tone(judgement: Judgement) -> str:
    if any(finding.diagnosis.severity == "critical" for finding in judgement.findings):
        return "bad"
    if judgement.verdict in BY_ID:
        return "warn" if judgement.severity == "warning" else "info"
    return "good" if judgement.verdict == HEALTHY else "calm"


def _word(judgement: Judgement) -> str:
    return "Idle" if judgement.verdict == IDLE else WORDS[_tone(judgement)]
