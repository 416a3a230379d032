"""The report as one HTML file: no script, no font, no request. Every word from the log is escaped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_tuning_exporter import __version__
from sglang_tuning_exporter.diagnosis.advice import shown
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.report.chart import Axis, Stretch, chart, lane, scale
from sglang_tuning_exporter.report.wording import (
    CHANGES,
    ENDINGS,
    PHASES,
    after_the_end,
    confidence,
    duration,
    figure,
    in_part,
    is_measured,
    judged_words,
    memory_words,
    moment,
    no_alert,
    sentence,
    span_words,
    summary,
    verdict_time,
)
from sglang_tuning_exporter.serve.pages.page import WORDS, flags, pieces
from sglang_tuning_exporter.serve.pages.page import sentence as as_sentence
from sglang_tuning_exporter.serve.pages.rendering import environment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markupsafe import Markup

    from sglang_tuning_exporter.diagnosis.json_findings import Document
    from sglang_tuning_exporter.report.analysis import Analysis
    from sglang_tuning_exporter.report.chart import Scale
    from sglang_tuning_exporter.report.series import Point, Series
    from sglang_tuning_exporter.serve.pages.page import FlagWord
    from sglang_tuning_exporter.state.profiles import Profile

# Nothing is fetched, run, framed or sent; styles are in the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_ENVIRONMENT = environment("report")
_ENVIRONMENT.filters.update(flags=flags, sentence=as_sentence)
_MEMORY = (("weights_gb", "weights"), ("kv_pool_gb", "KV cache"), ("graphs_gb", "graphs"), ("left_gb", "left"))


@dataclass(frozen=True, slots=True)
class Strip:
    """One figure over time: its picture and its words."""

    name: str
    value: str
    healthy: str
    top: str  # the highest value on the scale
    picture: Markup


@dataclass(frozen=True, slots=True)
class Lane:
    """Phases or alerts over time, as blocks in a row."""

    name: str
    picture: Markup


def render(document: Document, analysis: Analysis) -> str:
    """Return the page."""
    begin, seconds, tone, part = analysis.begin, analysis.seconds, _tone(document), in_part(document)
    axis = Axis(begin, seconds) if begin is not None and seconds > 0 else None
    findings = document["findings"]
    return _ENVIRONMENT.get_template("report.html").render(
        policy=POLICY,
        version=__version__,
        document=document,
        title=sentence(document),
        tone="warn" if part else tone,
        word=f"{WORDS[tone]}, in part" if part else WORDS[tone],
        pieces=_command(document),
        confidence=confidence(document),
        is_measured=is_measured,
        span_words=span_words(document),
        judged_words=judged_words(document),
        part=part,
        verdict_time=verdict_time(document),
        after_the_end=after_the_end(document),
        no_alert=no_alert(document),
        model=analysis.state.facts.model_name,
        findings=[finding for finding in findings if not BY_ID[finding["diagnosis"]].is_chance],
        chances=[finding for finding in findings if BY_ID[finding["diagnosis"]].is_chance],
        rows=BY_ID,
        summary=summary,
        shown=shown,
        figure=figure,
        duration=duration,
        moment=moment,
        memory_words=memory_words,
        memory_parts=_memory_parts,
        phases=PHASES,
        endings=ENDINGS,
        changes=CHANGES,
        ticks=axis.ticks() if axis is not None else [],
        lanes=_lanes(document, axis) if axis is not None else [],
        strips=_strips(document, analysis, axis) if axis is not None else [],
        shares=[
            (signal, state, share)
            for signal, states in document["shares"].items()
            if signal != "activity"
            for state, share in sorted(states.items(), key=lambda item: -item[1])
            if round(100 * share) > 0
        ],
    )


def _tone(document: Document) -> str:
    row = BY_ID.get(document["verdict"])
    if row is not None:
        return {"critical": "bad", "warning": "warn"}.get(row.severity, "info")
    return "good" if document["verdict"] == "healthy" else "calm"


def _command(document: Document) -> list[FlagWord]:
    command = document["command"]
    return pieces(command["text"], frozenset(each["flag"] for each in command["changes"])) if command else []


def _memory_parts(memory: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Return the parts of a start's memory: name, GB, and percent of the memory that was free before; empty where that is not known."""
    whole = memory["before_weights_gb"]
    if not whole:
        return []
    parts = [(name, memory[key], 100 * memory[key] / whole) for key, name in _MEMORY if memory[key]]
    # One part alone shows nothing, and parts that add up to more than the whole were measured at different times.
    return parts if len(parts) > 1 and sum(percent for _, _, percent in parts) <= 101 else []


def _lanes(document: Document, axis: Axis) -> list[Lane]:
    phases = [
        Stretch(
            phase["at"],
            phase["seconds"],
            phase["phase"],
            f"{PHASES[phase['phase']]}, {moment(phase)}, {duration(phase['seconds'])}",
        )
        for phase in document["phases"]
    ]
    lanes = [Lane("Phases", lane(phases, axis, "The phases of the run"))] if phases else []
    for alert in dict.fromkeys(alert["alert"] for alert in document["alerts"]):
        fired = _spans(document, alert)
        lanes.append(Lane(alert, lane(fired, axis, f"When {alert} would have fired")))
    return lanes


def _spans(document: Document, name: str = "") -> list[Stretch]:
    return [
        Stretch(
            alert["at"],
            alert["seconds"],
            alert["severity"],
            f"{alert['alert']}, {moment(alert)}, for {duration(alert['seconds'])}",
        )
        for alert in document["alerts"]
        if name in {"", alert["alert"]}
    ]


def _strips(document: Document, analysis: Analysis, axis: Axis) -> list[Strip]:
    facts, series = analysis.state.facts, analysis.series
    profile = analysis.profile.for_edition(first=facts.is_first_edition)
    # Information alerts often hold for the whole log and would only tint the page; the lanes show them.
    shades = [span for span in _spans(document) if span.kind != "info"]
    now = [rank for rank in analysis.state.schedulers if rank.served]  # without those of earlier starts
    limits = [facts.running_limit(rank.dp) for rank in now]
    limit = sum(known for known in limits if known is not None) or None
    strips = [
        _queue(series, axis, profile, shades),
        _strip(
            "Token usage", series.line("usage"), series, axis, shades,
            healthy=f"{profile.token_usage_target:g} or more while requests wait",
            of=scale(series.line("usage"), top=1.0, lower=profile.token_usage_target),
            marks=series.retractions(),
            decimals=2,
        ),
        _strip(
            "Running requests", series.line("running"), series, axis, shades,
            healthy=f"close to {limit:.0f} under load" if limit else "",
            of=scale(series.line("running"), limit=limit),
        ),
        _strip("Generated tokens a second", series.line("throughput"), series, axis, shades),
    ]  # fmt: skip
    if not facts.without_graph:
        points = series.coverage()
        strips.append(
            _strip(
                "CUDA graph coverage", points, series, axis, shades,
                healthy="most decode batches replay a graph",
                of=scale(points, top=1.0, lower=1 - profile.frequent_share),
                decimals=2,
            )
        )  # fmt: skip
    strips.append(_retractions(document, series, axis, profile, shades))
    return [strip for strip in strips if strip is not None]


def _queue(series: Series, axis: Axis, profile: Profile, shades: Sequence[Stretch]) -> Strip | None:
    points = series.line("queued")
    if profile.queue_wait_seconds is not None:
        # A queue that is judged by its wait has no healthy length.
        healthy = f"a wait up to {profile.queue_wait_seconds:g} s"
        return _strip("Queued requests", points, series, axis, shades, healthy=healthy)
    lower, upper = profile.queue_lower, profile.queue_upper
    healthy = f"{lower:.0f} to {upper:.0f}" if lower else f"up to {upper:.0f}"
    of = scale(points, lower=lower, upper=upper)
    return _strip("Queued requests", points, series, axis, shades, healthy=healthy, of=of)


def _strip(
    name: str,
    points: list[Point],
    series: Series,
    axis: Axis,
    shades: Sequence[Stretch],
    *,
    healthy: str = "",
    of: Scale | None = None,
    marks: Sequence[Point] = (),
    decimals: int = 0,
) -> Strip | None:
    if not points:
        return None
    of = of if of is not None else scale(points)
    mean = sum(point.mean for point in points) / len(points)
    highest = max(point.high for point in points)
    value, most = f"{mean:,.{decimals}f}", f"{highest:,.{decimals}f}"
    value = f"{value} throughout" if value == most else f"{value} on average, {most} at most"
    words = f"{name} over the run: {value}" + ("; ticks at the upper edge are retractions" if marks else "")
    picture = chart(points, axis, of, words, width=series.width, spans=shades, marks=marks)
    return Strip(name, value, healthy, f"{of.top:,g}", picture)


def _retractions(
    document: Document, series: Series, axis: Axis, profile: Profile, shades: Sequence[Stretch]
) -> Strip | None:
    points = series.retractions()
    if not points:
        return None
    of, count = scale(points), document["counts"]["retraction_events"]
    value = f"{count:,} in all"
    picture = chart(points, axis, of, f"Retractions over the run: {value}", width=series.width, spans=shades, bars=True)
    healthy = f"up to {profile.retractions_per_minute:g} a minute"
    return Strip("Retractions", value, healthy, f"{of.top:,g} in {duration(series.width)}", picture)
