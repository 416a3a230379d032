"""The landing page: what limits the server now, in words; needs no Prometheus, no script, no asset from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from sglang_tuning_exporter import __version__
from sglang_tuning_exporter.guide.advice import shown
from sglang_tuning_exporter.guide.findings import (
    HEALTHY,
    IDLE,
    NO_CLEAR_BOTTLENECK,
    Judgement,
    judge,
)
from sglang_tuning_exporter.guide.table import BY_ID
from sglang_tuning_exporter.signals import IDLE as IDLE_STATE
from sglang_tuning_exporter.signals import UNKNOWN

if TYPE_CHECKING:
    from sglang_tuning_exporter.guide.evidence import Evidence, Past
    from sglang_tuning_exporter.guide.profiles import Profile
    from sglang_tuning_exporter.scheduler import RankState
    from sglang_tuning_exporter.signals import Signal
    from sglang_tuning_exporter.watcher import Watcher

_ENVIRONMENT = Environment(
    loader=PackageLoader("sglang_tuning_exporter.web"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_NO_FINDING = {
    HEALTHY: "Nothing limits this server now.",
    IDLE: "The server is idle.",
    NO_CLEAR_BOTTLENECK: "No clear bottleneck: nothing in the guide explains what is seen.",
}
_NOT_TOLD = "not told"
# What the share of serving time is shown of.
_SHARES: tuple[tuple[Signal, str], ...] = (
    ("queue", "empty"),
    ("queue", "above_range"),
    ("admission", "held_back"),
    ("admission", "running_limit"),
    ("admission", "pool_full"),
    ("admission", "prefill_bound"),
    ("cuda_graph", "replayed"),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One of the guide's figures as the page shows it; `judgement` is good, bad or empty."""

    name: str
    value: str
    healthy: str
    judgement: str = ""


def headline(word: str) -> str:
    """Write the verdict as a sentence."""
    if word in BY_ID:
        return BY_ID[word].summary
    return _NO_FINDING.get(word, "Not enough has been seen yet to say what limits this server.")


def healthy(evidence: Evidence) -> str:
    """Say what the figure of a finding would be on a server without it."""
    bound = evidence.words(evidence.threshold)
    if evidence.unit == "count" and evidence.threshold == 0:
        return "none"
    return f"{bound} or more" if evidence.below else f"up to {bound}"


def render(watcher: Watcher) -> str:
    """Write the page as HTML. Every word from outside is escaped."""
    with watcher.view() as now:
        past = watcher.past(now)
        judgement = judge(past)
        facts, health = watcher.state.facts, watcher.health
        figures = _figures(watcher, past, now)
    return _ENVIRONMENT.get_template("index.html").render(
        title=headline(judgement.verdict),
        tone=_tone(judgement),
        verdict=judgement.verdict,
        findings=judgement.findings,
        checks=judgement.checks,
        healthy=healthy,
        shown=shown,
        figures=figures,
        facts=facts,
        health=health,
        files=watcher.log.files if watcher.log is not None else [],
        config=watcher.config,
        profile=watcher.profile,
        served=past.recent.serving_seconds(),
        shares=[
            (signal, state, share)
            for signal, state in _SHARES
            if (share := past.recent.share(signal, state)) is not None
        ],
        version=__version__,
    )


def _tone(judgement: Judgement) -> str:
    if any(finding.diagnosis.severity == "critical" for finding in judgement.findings):
        return "bad"
    if judgement.verdict in BY_ID:
        return "warn" if judgement.severity == "warning" else "info"
    return "good" if judgement.verdict == HEALTHY else "calm"


def _figures(watcher: Watcher, past: Past, now: float) -> list[Figure]:
    state, profile = watcher.state, past.profile
    ranks = list(state.ranks.values())
    rate = past.retractions_per_minute
    figures = [_queue(ranks, profile, now), _usage(ranks, profile)]
    running = _sum([rank.running for rank in ranks])
    limit = _sum([state.facts.running_limit(rank.dp) for rank in ranks])
    figures.append(
        Figure(
            "Running requests", _count(running) + (f" of {limit:.0f}" if limit else ""), "close to its limit under load"
        )
    )
    coverage = past.recent.coverage
    told = coverage is not None and not state.facts.without_graph
    figures.append(
        Figure(
            "CUDA graph coverage",
            f"{100 * coverage:.0f} %"
            if coverage is not None and told
            else "off"
            if state.facts.without_graph
            else _NOT_TOLD,
            "most decode batches replay a graph",
            "" if coverage is None or not told else "good" if coverage > profile.frequent_share else "bad",
        )
    )
    tolerated = profile.retractions_per_minute
    figures.append(
        Figure("Retractions a minute", f"{rate:.1f}", f"up to {tolerated:g}", "good" if rate <= tolerated else "bad")
    )
    reserve = state.facts.reserve_gb
    judgement = (
        "" if reserve is None else "good" if profile.reserve_lower_gb <= reserve <= profile.reserve_upper_gb else "bad"
    )
    figures.append(
        Figure(
            "GPU memory left at start",
            _NOT_TOLD if reserve is None else f"{reserve:.1f} GB",
            f"{profile.reserve_lower_gb:g} to {profile.reserve_upper_gb:g} GB",
            judgement,
        )
    )
    return figures


def _queue(ranks: list[RankState], profile: Profile, now: float) -> Figure:
    queued = _sum([rank.queued for rank in ranks])
    waits = [wait for rank in ranks if (wait := rank.queue_wait_seconds(now)) is not None and isfinite(wait)]
    words = _count(queued) + (f" (about {max(waits):.0f} s)" if queued and waits else "")
    if profile.queue_lower is not None:
        healthy = f"{profile.queue_lower:.0f} to {profile.queue_upper:.0f}"
    else:
        healthy = (
            f"a wait up to {profile.queue_wait_seconds:g} s"
            if profile.queue_wait_seconds
            else f"up to {profile.queue_upper:.0f}"
        )
    states = {rank.states["queue"] for rank in ranks}
    bad = {"above_range", "below_range"} | ({"empty"} if profile.queue_lower else set())
    judgement = "bad" if states & bad else "good" if states & {"in_range", "empty"} else ""
    return Figure("Queued requests", words, healthy, judgement)


def _usage(ranks: list[RankState], profile: Profile) -> Figure:
    usages = [rank.usage for rank in ranks if rank.usage is not None]
    if not usages:
        return Figure("Token usage", _NOT_TOLD, f"{profile.token_usage_target:g} or more while requests wait")
    states = {rank.states["admission"] for rank in ranks} - {IDLE_STATE, UNKNOWN}
    return Figure(
        "Token usage",
        f"{max(usages):.2f}",
        f"{profile.token_usage_target:g} or more while requests wait",
        "bad" if "held_back" in states else "good" if states else "",
    )


def _sum(figures: list[float | None]) -> float | None:
    told = [figure for figure in figures if figure is not None]
    return sum(told) if told else None


def _count(figure: float | None) -> str:
    return _NOT_TOLD if figure is None else f"{figure:.0f}"
