"""The landing page: what limits the server now, in words; needs no Prometheus, no script, no asset from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isfinite
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sglang_tuning_exporter import __version__
from sglang_tuning_exporter.guide.advice import shown
from sglang_tuning_exporter.guide.document import command_document
from sglang_tuning_exporter.guide.findings import (
    HEALTHY,
    IDLE,
    NO_CLEAR_BOTTLENECK,
    Judgement,
)
from sglang_tuning_exporter.guide.table import BY_ID
from sglang_tuning_exporter.signals import IDLE as IDLE_STATE
from sglang_tuning_exporter.signals import UNKNOWN
from sglang_tuning_exporter.web.sparkline import Band, sparkline

if TYPE_CHECKING:
    from sglang_tuning_exporter.guide.evidence import Evidence, Past
    from sglang_tuning_exporter.guide.profiles import Profile
    from sglang_tuning_exporter.scheduler import RankState
    from sglang_tuning_exporter.signals import Signal
    from sglang_tuning_exporter.state import ServerState
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
SHARES: tuple[tuple[Signal, str], ...] = (
    ("queue", "empty"),
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
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One of the guide's figures as the page shows it; `judgement` is good, bad or empty."""

    name: str
    value: str
    healthy: str
    judgement: str = ""
    spark: Markup = field(default_factory=Markup)


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
        judgement = watcher.judge(now)
        facts, health = watcher.state.facts, watcher.health
        command = command_document(judgement, facts)
        figures = _figures(watcher, past, now)
    held = {finding.diagnosis.id for finding in judgement.findings}
    follow = [finding for finding in judgement.findings if not held.isdisjoint(finding.diagnosis.causes)]
    return _ENVIRONMENT.get_template("index.html").render(
        title=headline(judgement.verdict),
        tone=_tone(judgement),
        verdict=judgement.verdict,
        findings=[
            finding for finding in judgement.findings if not finding.diagnosis.is_chance and finding not in follow
        ],
        follow=follow,
        chances=[finding for finding in judgement.findings if finding.diagnosis.is_chance],
        passed=[check for check in judgement.checks if check.passed and not check.diagnosis.is_chance],
        untold=[
            check
            for check in judgement.checks
            if check.passed is None and not check.diagnosis.is_chance and check.diagnosis.alert
        ],
        command=command,
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
            for signal, state in SHARES
            if (share := past.recent.share(signal, state)) is not None and round(100 * share) > 0
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
    state, profile, history = watcher.state, past.profile, watcher.history
    ranks = state.schedulers
    return [
        _with_line(
            _queue(ranks, profile, now),
            sparkline(
                history.line(lambda moment: moment.queued),
                "Queued requests over the last 15 minutes",
                # Judged by the wait that it means, a queue has no healthy length.
                band=Band(profile.queue_lower, profile.queue_upper) if profile.queue_wait_seconds is None else None,
            ),
        ),
        _with_line(
            _usage(ranks, profile),
            sparkline(
                history.line(lambda moment: moment.usage),
                "Token usage over the last 15 minutes",
                band=Band(profile.token_usage_target),
                top=1.0,
            ),
        ),
        _with_line(
            _running(state),
            sparkline(history.line(lambda moment: moment.running), "Running requests over the last 15 minutes"),
        ),
        _with_line(
            _coverage(past),
            sparkline(
                history.line(lambda moment: moment.replayed),
                "Share of decode batches with a graph over the last 15 minutes",
                band=Band(1 - profile.frequent_share),
                top=1.0,
            )
            if not state.facts.without_graph
            else Markup(),
        ),
        _with_line(
            _retractions(past),
            sparkline(history.retractions(), "Retractions over the last 15 minutes", marks=True),
        ),
        _reserve(past),
        Figure(
            "Generated tokens a second",
            _count(_sum([rank.generation_throughput for rank in ranks])),
            "",
            "",
            sparkline(
                history.line(lambda moment: moment.throughput), "Generated tokens a second over the last 15 minutes"
            ),
        ),
    ]


def _with_line(figure: Figure, spark: Markup) -> Figure:
    return replace(figure, spark=spark)


def _running(state: ServerState) -> Figure:
    running = _sum([rank.running for rank in state.schedulers])
    limit = _sum([state.facts.running_limit(rank.dp) for rank in state.schedulers])
    words = _count(running) + (f" of {limit:.0f}" if limit else "")
    return Figure("Running requests", words, "close to its limit under load")


def _coverage(past: Past) -> Figure:
    coverage, name, healthy = past.recent.coverage, "CUDA graph coverage", "most decode batches replay a graph"
    if past.facts.without_graph == "unsupported":
        return Figure(name, "none on this device", healthy)
    if past.facts.without_graph:
        return Figure(name, "off", healthy, "bad")
    if coverage is None:
        return Figure(name, _NOT_TOLD, healthy)
    good = coverage > past.profile.frequent_share
    return Figure(name, f"{100 * coverage:.0f} %", healthy, "good" if good else "bad")


def _retractions(past: Past) -> Figure:
    rate, tolerated = past.retractions_per_minute, past.profile.retractions_per_minute
    return Figure("Retractions a minute", f"{rate:.1f}", f"up to {tolerated:g}", "good" if rate <= tolerated else "bad")


def _reserve(past: Past) -> Figure:
    reserve, profile = past.facts.reserve_gb, past.profile
    healthy = f"{profile.reserve_lower_gb:g} to {profile.reserve_upper_gb:g} GB"
    if reserve is None:
        return Figure("GPU memory left at start", _NOT_TOLD, healthy)
    good = profile.reserve_lower_gb <= reserve <= profile.reserve_upper_gb
    return Figure("GPU memory left at start", f"{reserve:.1f} GB", healthy, "good" if good else "bad")


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
