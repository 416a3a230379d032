"""The report as one HTML file: no script, no font, no request. Every word from the log is escaped."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from sglang_tuning_exporter import __version__
from sglang_tuning_exporter.core import text as words
from sglang_tuning_exporter.core.against import Comparison
from sglang_tuning_exporter.core.chart import Axis, Bounds, Span, Value, lane, strip, top_of
from sglang_tuning_exporter.core.findings import Judged, Start
from sglang_tuning_exporter.state.profiles import Profile

# Nothing is fetched, run, framed or sent; styles are in the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_FLAG = re.compile(r"(--[a-z][a-z0-9-]*[a-z0-9])")


def flags(text: str) -> Markup:
    """Return prose as HTML in which a browser breaks no line inside a flag."""
    parts = _FLAG.split(text)
    return Markup("").join(
        Markup('<span class="flag">{}</span>').format(part) if place % 2 else escape(part)
        for place, part in enumerate(parts)
    )


_ENVIRONMENT = Environment(
    loader=PackageLoader("sglang_tuning_exporter.core"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters["flags"] = flags


@dataclass(frozen=True, slots=True)
class Strip:
    """One figure over time: its picture and its words."""

    name: str
    value: str
    healthy: str
    top: str  # the highest value on the scale
    picture: Markup


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a start's memory: its name, and percent of what was free before."""

    name: str
    percent: float


def page(judged: Judged, profile: Profile, against: Comparison | None = None) -> str:
    """Return the page."""
    times = words.Times(judged.begin, judged.end)
    axis = None
    if judged.begin is not None and judged.end is not None and judged.end > judged.begin:
        axis = Axis(judged.begin, judged.end, times.is_dated)
    last = judged.starts[-1] if judged.starts else None
    arguments = last.arguments if last else {}
    return _ENVIRONMENT.get_template("report.html").render(
        policy=POLICY,
        version=__version__,
        judged=judged,
        words=words,
        times=times,
        tone=words.tone(judged),
        findings=words.findings_words(judged),
        changed_flags={change.split(" ")[0] for change in judged.command_changes},
        model=str(arguments.get("served_model_name") or arguments.get("model_path") or "SGLang"),
        release=last.release if last else None,
        against=against,
        shares=words.shares(judged, profile),
        ticks=axis.ticks() if axis else [],
        lanes=_lanes(judged, axis) if axis else [],
        strips=list(filter(None, _strips(judged, profile, axis))) if axis else [],
        memory_parts=_memory_parts,
    )


def _lanes(judged: Judged, axis: Axis) -> list[tuple[str, Markup]]:
    course = [Span(each.begin, each.end, each.what, words.stretch_words(each)) for each in judged.course]
    lanes = [("Course", lane(course, axis, "The course of the run"))] if course else []
    for name in dict.fromkeys(alert.alert for alert in judged.alerts):
        spans = [
            Span(each.at, axis.end if each.until is None else each.until, each.severity, each.alert)
            for each in judged.alerts
            if each.alert == name
        ]
        lanes.append((name, lane(spans, axis, f"When {name} would have been firing")))
    return lanes


def _strips(judged: Judged, profile: Profile, axis: Axis) -> list[Strip | None]:
    points, healthy = judged.points, profile.healthy
    shades = [
        Span(each.at, axis.end if each.until is None else each.until, each.severity)
        for each in judged.alerts
        if each.severity != "info"  # it often holds for the whole log, and would only tint the page
    ]
    limit = judged.facts.get("max_running_requests")
    has_length = profile.queue_wait_seconds is None  # a queue that is judged by its wait has no healthy length
    queue = Bounds(profile.queue_lower, profile.queue_upper) if has_length else Bounds()
    usage = Bounds(lower=profile.token_usage_target, least=1.0)
    running = Bounds(limit=limit if isinstance(limit, int | float) else None)

    def figure(
        name: str, good: str, values: list[Value], bounds: Bounds, marks: tuple[float, ...] = ()
    ) -> Strip | None:
        known = [value for _, value in values if value is not None]
        if not known:
            return None
        decimals = 2 if bounds.least else 0
        value = f"{sum(known) / len(known):,.{decimals}f} on average, {max(known):,.{decimals}f} at most"
        picture = strip(values, axis, f"{name} over time: {value}", bounds, spans=shades, marks=marks)
        return Strip(name, value, good, f"{top_of(values, bounds):,g}", picture)

    retracted: list[Value] = [(each.time, each.retractions) for each in points]
    beside = tuple(time for time, value in retracted if value)
    strips = [
        figure("Queued requests", healthy["queue"], [(each.time, each.queued) for each in points], queue),
        figure("Token usage", healthy["usage"], [(each.time, each.usage) for each in points], usage, beside[:1000]),
        figure("Running requests", "", [(each.time, each.running) for each in points], running),
    ]
    if beside:
        count = f"{judged.counts.get('retraction_events', len(beside)):,.0f} in all"
        picture = strip(retracted, axis, f"Retractions over time: {count}", Bounds(), spans=shades, bars=True)
        top = f"{top_of(retracted, Bounds()):,g} in 10 s"
        strips.append(Strip("Retractions", count, f"{healthy['retractions']} a minute", top, picture))
    return strips


def _memory_parts(start: Start) -> list[Part]:
    """Return the parts of a start's memory; empty where they do not add up to what was free before."""
    figures = {name: value for name, value in start.memory.items() if isinstance(value, int | float)}
    whole = figures.get("before_weights_gb", 0.0)
    parts = [
        Part(name, 100 * figures[key] / whole)
        for key, name in words.MEMORY.items()
        if key != "before_weights_gb" and whole and figures.get(key)
    ]
    return parts if len(parts) > 1 and sum(part.percent for part in parts) <= 101 else []
