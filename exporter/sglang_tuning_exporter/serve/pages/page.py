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
from sglang_tuning_exporter.diagnosis.document import command_document
from sglang_tuning_exporter.diagnosis.findings import HEALTHY, IDLE, NO_CLEAR_BOTTLENECK, STARTING, Finding, Judgement
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.serve.pages.figures import figures, of_before, ranks
from sglang_tuning_exporter.serve.pages.rendering import environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang_tuning_exporter.collect.sidecar import Sidecar
    from sglang_tuning_exporter.diagnosis.evidence import Evidence, Past
    from sglang_tuning_exporter.state.signals import Signal

REFRESH_SECONDS = 10
_ENVIRONMENT = environment()
_NO_FINDING = {
    STARTING: "SGLang is starting.",
    HEALTHY: "Nothing limits this server now.",
    IDLE: "The server is idle.",
    NO_CLEAR_BOTTLENECK: "No clear bottleneck: nothing in the guide explains what is seen.",
}
_NO_SUMMARIES: Mapping[str, str] = {}
# Over the headline, for those who cannot see its colour.
WORDS = {"bad": "Critical", "warn": "Warning", "info": "Hint", "good": "Healthy", "calm": "No verdict"}
# A word of a shell's line, with what is quoted in it.
_WORD = re.compile(r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\])+""", re.DOTALL)
# What the share of serving time is shown of.
SHARES: tuple[tuple[Signal, str], ...] = (
    ("queue", "empty"),
    ("queue", "below_range"),
    ("queue", "in_range"),
    ("queue", "above_range"),
    ("admission", "held_back"),
    ("admission", "recovering"),
    ("admission", "hybrid_pool_full"),
    ("admission", "grammar_queue"),
    ("admission", "pd_queue"),
    ("admission", "running_limit"),
    ("admission", "pool_full"),
    ("admission", "prefill_bound"),
    ("cuda_graph", "replayed"),
    ("cuda_graph", "beyond_captured"),
    ("cuda_graph", "eager"),
)


_FLAG = re.compile(r"(--[a-z][a-z0-9-]*[a-z0-9])")


@dataclass(frozen=True, slots=True)
class FlagWord:
    """A flag of a command line with its value; a browser does not break the line inside. `changed`: by the advice."""

    text: str
    changed: bool


def headline(word: str, summaries: Mapping[str, str] = _NO_SUMMARIES) -> str:
    """Write the verdict as a sentence; `summaries` are those of what was found."""
    if word in BY_ID:
        return summaries.get(word, BY_ID[word].summary)
    return _NO_FINDING.get(word, "Not enough has been seen yet to say what limits this server.")


def healthy(evidence: Evidence) -> str:
    """Say what the figure of a finding would be on a server without it."""
    bound = evidence.words(evidence.threshold if evidence.good is None else evidence.good)
    if evidence.unit == "count" and evidence.threshold == 0:
        return "none"
    return f"{bound} or more" if evidence.below else f"up to {bound}"


def pieces(command: str, changed: frozenset[str]) -> list[FlagWord]:
    """Cut a shell's line before each flag; joined with blanks they are the line again."""
    groups: list[list[str]] = [[]]
    for word in _WORD.findall(command):
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    cut = [FlagWord(" ".join(group), group[0] in changed) for group in groups if group]
    return cut if " ".join(piece.text for piece in cut) == command else [FlagWord(command, changed=False)]


def remark(judgement: Judgement, past: Past) -> str:
    """Say what a verdict without a finding rests on; empty for the others."""
    minutes = f"the last {past.profile.window_seconds / 60:.0f} minutes"
    if judgement.verdict in BY_ID:
        return ""
    if judgement.verdict == HEALTHY:
        return f"Seen over {past.served_seconds:.0f} s under load in {minutes}."
    if judgement.verdict == IDLE:
        return f"It had next to nothing to do in {minutes}: what limits it shows under load."
    if judgement.verdict == NO_CLEAR_BOTTLENECK:
        return "Requests wait, or something else is not as it should be, and no row of the table explains it: the figures tell more."
    if judgement.verdict == STARTING:
        return "Its address opens when the model is loaded."
    least = past.profile.enough_serving_seconds
    return f"It takes {least:.0f} s under load to judge it; {past.served_seconds:.0f} s in {minutes} so far."


def sentence(words: str) -> str:
    """Begin a sentence."""
    return words[:1].upper() + words[1:]


def flags(words: str) -> Markup:
    """Write prose as HTML in which a browser breaks no line inside a flag, as it would after each hyphen."""
    parts = _FLAG.split(words)
    return Markup("").join(
        Markup('<span class="flag">{}</span>').format(part) if place % 2 else escape(part)
        for place, part in enumerate(parts)
    )


_ENVIRONMENT.filters.update(flags=flags, sentence=sentence)


def seen(finding: Finding) -> str:
    """Say what is seen, and what it would be on a server without the finding, as sentences without a capital."""
    first, *others = finding.evidence
    told = finding.sentence
    if finding.diagnosis.condition.has_figure:
        told += f"; healthy: {healthy(first)}"
    return f"{told}." + "".join(f" {sentence(other.name)}: {other.words()}." for other in others)


def render(sidecar: Sidecar, *, still: bool = False) -> str:
    """Write the page as HTML, to be loaded again by the browser unless it is held `still`. Every word from outside is escaped."""
    with sidecar.view() as now:
        judgement = sidecar.judge(now)
        past = judgement.past
        facts, health = sidecar.state.facts, sidecar.health
        command = command_document(judgement, facts)
        tiles, rows = figures(sidecar.state, past, sidecar.history, now), ranks(sidecar.state)
    is_down = any(finding.diagnosis.condition.is_end for finding in judgement.findings)
    follow = [finding for finding in judgement.findings if finding.because]
    summaries = {f.diagnosis.id: f.summary(sidecar.unix(now - (f.ago or 0.0))) for f in judgement.findings}
    return _ENVIRONMENT.get_template("index.html").render(
        title=headline(judgement.verdict, summaries),
        summaries=summaries,
        tone=_tone(judgement),
        word=_word(judgement),
        remark=remark(judgement, past),
        refresh=None if still else REFRESH_SECONDS,
        clock=datetime.fromtimestamp(time.time(), timezone.utc),
        verdict=judgement.verdict,
        findings=[
            finding for finding in judgement.findings if not finding.diagnosis.is_chance and finding not in follow
        ],
        follow=follow,
        chances=[finding for finding in judgement.findings if finding.diagnosis.is_chance],
        passed=[c for c in judgement.checks if c.passed and not c.diagnosis.is_chance and not is_down],
        untold=_untold(judgement),
        command=command,
        pieces=pieces(command["text"], frozenset(change["flag"] for change in command["changes"])) if command else [],
        seen=seen,
        healthy=healthy,
        shown=shown,
        figures=of_before(tiles) if is_down else tiles,
        ranks=rows,
        facts=facts,
        health=health,
        files=sidecar.log.files if sidecar.log is not None else [],
        config=sidecar.config,
        profile=sidecar.profile,
        served=past.served_seconds,
        shares=[
            (signal, state, share)
            for signal, state in SHARES
            if (share := past.recent.share(signal, state)) is not None and round(100 * share) > 0
        ],
        version=__version__,
    )


def _untold(judgement: Judgement) -> dict[str, list[str]]:
    """Give the rows with an alert that cannot be judged here, by what it takes to judge them."""
    untold: dict[str, list[str]] = {}
    for check in judgement.checks:
        if check.passed is None and not check.diagnosis.is_chance and check.diagnosis.alert:
            untold.setdefault(check.diagnosis.condition.needs, []).append(check.diagnosis.id.replace("_", " "))
    return untold


def _tone(judgement: Judgement) -> str:
    if any(finding.diagnosis.severity == "critical" for finding in judgement.findings):
        return "bad"
    if judgement.verdict in BY_ID:
        return "warn" if judgement.severity == "warning" else "info"
    return "good" if judgement.verdict == HEALTHY else "calm"


def _word(judgement: Judgement) -> str:
    return "Idle" if judgement.verdict == IDLE else WORDS[_tone(judgement)]
