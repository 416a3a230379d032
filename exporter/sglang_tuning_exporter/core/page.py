"""A judged log, or a server that runs, as one HTML page: no script, no font, no request. Every word from outside is escaped.

The report and the exporter's own page are one template; `Live` is what only the page of a running server has.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log10
from typing import TypeAlias

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from sglang_tuning_exporter import __version__
from sglang_tuning_exporter.config.profiles import Profile
from sglang_tuning_exporter.core import text as words
from sglang_tuning_exporter.core.against import Comparison
from sglang_tuning_exporter.core.findings import Judged, Start
from sglang_tuning_exporter.core.rows import BY_ID
from sglang_tuning_exporter.sglang.clean import clean_for_page

# Figures over time as inline SVG: a line with its range, the healthy band, a limit, marks, and stretches of time.


WIDTH, HEIGHT, LANE_HEIGHT = 1000, 90, 20
_ABOVE = 6  # room over the highest value
_COLUMNS = 400  # at most, each with the mean, lowest and highest value of its time
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)  # seconds
_TICKS = 8  # at most, so that their labels fit
_NEAR = 2.0  # times the highest value: a bound beyond it is not on the scale


Value: TypeAlias = "tuple[float, float | None]"  # a time and a figure; None where it is not known, and the line breaks


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time; `kind` is its class in the style sheet."""

    begin: float
    end: float
    kind: str
    words: str = ""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is healthy (None: open on that side), and a limit that cannot be passed."""

    lower: float | None = None
    upper: float | None = None
    limit: float | None = None
    least: float = 0.0  # the scale is at least so high


@dataclass(frozen=True, slots=True)
class Axis:
    """The time that a chart shows, unix seconds; without dates seconds since the first midnight."""

    begin: float
    end: float
    dated: bool = True

    @property
    def seconds(self) -> float:
        """The length of the axis."""
        return max(self.end - self.begin, 1.0)

    def x(self, time: float) -> float:
        """Return the horizontal place of a time."""
        return round(WIDTH * min(max((time - self.begin) / self.seconds, 0.0), 1.0), 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Return round times: their place in percent, and their labels."""
        wanted = self.seconds / _TICKS
        step = next((step for step in _STEPS if step >= wanted), ceil(wanted / 86400) * 86400)
        first = (-self.begin) % step if self.dated else 0.0
        places = (first + number * step for number in range(floor((self.seconds - first) / step) + 1))
        return [(round(100 * at / self.seconds, 2), self._label(at, step)) for at in places]

    def _label(self, at: float, step: float) -> str:
        if not self.dated:
            return f"+{int(at) // 3600}:{int(at) // 60 % 60:02}" + (f":{int(at) % 60:02}" if step < 60 else "")
        when = dt.datetime.fromtimestamp(self.begin + at, dt.timezone.utc)
        if step >= 86400 or (when.hour == when.minute == when.second == 0):
            return f"{when:%d %b}"
        return f"{when:%H:%M:%S}" if step < 60 else f"{when:%H:%M}"


def nice(value: float) -> float:
    """Round up to 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** floor(log10(value)) if value > 0 else 1.0
    return next((step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value), power)


def top_of(values: Iterable[Value], bounds: Bounds) -> float:
    """Return the top of the scale: bounds are on it only where the values come near them."""
    highest = max((value for _, value in values if value is not None), default=0.0)
    near = [each for each in (bounds.lower, bounds.upper, bounds.limit) if each is not None and each <= _NEAR * highest]
    return max([highest, *near, bounds.least]) if bounds.least >= highest > 0 else nice(max([highest, *near]))


def strip(
    values: Sequence[Value],
    axis: Axis,
    words: str,
    bounds: Bounds = Bounds(),
    *,
    spans: Iterable[Span] = (),
    marks: Iterable[float] = (),
    bars: bool = False,
) -> Markup:
    """Draw a figure; `words` describe the picture for a screen reader, `spans` are shaded, `marks` are ticks at the upper edge."""
    top = top_of(values, bounds)

    def y(value: float) -> float:
        return round(HEIGHT - (HEIGHT - _ABOVE) * min(max(value / top, 0.0), 1.0), 1)

    parts = [_block(axis, span, HEIGHT, "shade") + "/>" for span in spans]
    if bounds.lower is not None or bounds.upper is not None:
        high = y(top if bounds.upper is None else bounds.upper)
        low = y(bounds.lower or 0.0)
        parts.append(f'<rect class="band" x="0" y="{high}" width="{WIDTH}" height="{max(low - high, 0.0):.1f}"/>')
    parts += [f'<path class="grid" d="M{WIDTH * place / 100:g} 0V{HEIGHT}"/>' for place, _ in axis.ticks()]
    parts.append(f'<path class="base" d="M0 {HEIGHT - 0.5}H{WIDTH}"/>')
    if bounds.limit is not None and bounds.limit <= top:
        parts.append(f'<path class="limit" d="M0 {y(bounds.limit)}H{WIDTH}"/>')
    for piece in _pieces(values, axis):
        if bars:
            parts += [f'<path class="mark" d="M{x} {HEIGHT}V{y(max(found))}"/>' for x, found in piece if max(found)]
            continue
        there = [f"{x} {y(sum(found) / len(found))}" for x, found in piece]
        if any(min(found) < max(found) for _, found in piece):
            edge = [f"{x} {y(max(found))}" for x, found in piece]
            edge += [f"{x} {y(min(found))}" for x, found in reversed(piece)]
            parts.append(f'<path class="area" d="M{"L".join(edge)}Z"/>')
        parts.append(f'<path class="line" d="M{"L".join(there)}{"h2" if len(there) == 1 else ""}"/>')
    parts += [f'<path class="mark" d="M{axis.x(time)} 0v8"/>' for time in marks]
    return _svg(parts, HEIGHT, words)


def lane(spans: Iterable[Span], axis: Axis, words: str) -> Markup:
    """Draw stretches of time as blocks in a row."""
    blocks = (
        f"{_block(axis, each, LANE_HEIGHT, 'block')}><title>{escape(each.words)}</title></rect>" for each in spans
    )
    return _svg(blocks, LANE_HEIGHT, words)


def _svg(parts: Iterable[str], height: int, words: str) -> Markup:
    return Markup(  # noqa: S704 # nosec B704 # numbers, and words that are escaped
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" preserveAspectRatio="none"><title>{escape(words)}</title>{"".join(parts)}</svg>'
    )


def _block(axis: Axis, span: Span, height: int, kind: str) -> str:
    left = axis.x(span.begin)
    width = round(max(axis.x(span.end) - left, 2.0), 1)  # a short one stays visible
    return f'<rect class="{kind} {span.kind}" x="{left}" y="0" width="{width}" height="{height}"'


def _pieces(values: Sequence[Value], axis: Axis) -> list[list[tuple[float, list[float]]]]:
    """Return unbroken pieces of the line: places, each with the values there."""
    pieces: list[list[tuple[float, list[float]]]] = [[]]
    for time, value in values:
        x = round(axis.x(time) * _COLUMNS / WIDTH) * WIDTH / _COLUMNS
        if value is None:
            if pieces[-1]:
                pieces.append([])
        elif pieces[-1] and pieces[-1][-1][0] == x:
            pieces[-1][-1][1].append(value)
        else:
            pieces[-1].append((x, [value]))
    return [piece for piece in pieces if piece]


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
    finalize=clean_for_page,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters["flags"] = flags
_ENVIRONMENT.globals.update(version=__version__, words=words)


def render(template: str, **shown: object) -> str:
    """Return a page made of one of the templates."""
    return _ENVIRONMENT.get_template(template).render(**shown)


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


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure as it is now, what would be healthy, and its past. `tone` is good, bad or empty; `note` stands after the value."""

    name: str
    value: str
    healthy: str = ""
    tone: str = ""
    note: str = ""
    picture: Markup = field(default_factory=Markup)
    past: str = ""  # what the picture shows


@dataclass(frozen=True, slots=True)
class Source:
    """Where figures come from, and how it is; `trouble` is what is wrong with it."""

    name: str
    health: str = ""
    trouble: str = ""
    first_line: str = ""  # that nobody can read


@dataclass(frozen=True, slots=True)
class Live:
    """What the page of a running server has beside a report."""

    now: float  # unix seconds
    since: float | None  # since when the verdict stands
    refresh: int | None  # seconds; None: the page is paused
    remark: str  # what a verdict without a finding rests on
    is_away: bool  # it does not serve now, so no figure is of now
    tiles: tuple[Tile, ...]
    ranks: tuple[tuple[str, ...], ...]
    sources: tuple[Source, ...]
    passed: Mapping[str, str]
    not_judged: Mapping[str, tuple[str, ...]]  # by what it needs
    arguments: Mapping[str, object]  # of the last start: those that a row reads, or all
    shows_all: bool

    @property
    def clock(self) -> dt.datetime:
        """The time of the figures."""
        return dt.datetime.fromtimestamp(self.now, dt.timezone.utc)


def page(judged: Judged, profile: Profile, against: Comparison | None = None, live: Live | None = None) -> str:
    """Return the page."""
    times = words.Times(judged.begin, judged.end)
    axis = None
    if judged.begin is not None and judged.end is not None and judged.end > judged.begin:
        axis = Axis(judged.begin, judged.end, times.is_dated)
    last = judged.starts[-1] if judged.starts else None
    arguments = last.arguments if last else {}
    findings = words.findings_words(judged)
    follows = [each for each in findings if live is not None and words.follows(each, judged)]
    sections = [each for each in findings if each.is_main and each not in follows]
    shows_past = live is None
    return render(
        "report.html",
        policy=POLICY,
        judged=judged,
        live=live,
        times=times,
        tone=words.tone(judged),
        findings=findings,
        sections=sorted(sections, key=lambda each: words.order(each, judged)) if live is not None else sections,
        follows=follows,
        chances=[] if live is not None and _fails(judged) else [each for each in findings if not each.is_main],
        changed_flags={change.split(" ")[0] for change in judged.command_changes},
        model=str(arguments.get("served_model_name") or arguments.get("model_path") or "SGLang"),
        release=last.release if last else None,
        against=against,
        shares=[] if live is not None and live.is_away else words.shares(judged, profile),
        ticks=axis.ticks() if axis is not None and shows_past else [],
        lanes=_lanes(judged, axis) if axis is not None and shows_past else [],
        strips=list(filter(None, _strips(judged, profile, axis))) if axis is not None and shows_past else [],
        memory_parts=_memory_parts,
        shows_memory=last is not None and "device" not in last.memory and bool(_memory_parts(last)),
    )


def _fails(judged: Judged) -> bool:
    """Whether the verdict is a failure: then nothing is offered that could also be better."""
    row = BY_ID.get(judged.judgement.verdict)
    return row is not None and row.any_load and row.severity == "critical"


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
