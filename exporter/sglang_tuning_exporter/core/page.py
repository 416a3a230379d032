"""The report of a log and the page of a running server as HTML, without scripts, fonts and requests.

Both use one template and one kind of chart. Every word from outside is escaped.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Any, TypeAlias

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from sglang_tuning_exporter import __version__
from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core import answer as words
from sglang_tuning_exporter.core.diagnoses import BY_ID
from sglang_tuning_exporter.core.findings import URGENCY, Finding, Judgement, Start, ended
from sglang_tuning_exporter.sglang.clean import clean_for_page

# Figures over time as inline SVG: a line with its range, the healthy band, a limit, marks, and stretches of time.

WIDTH, HEIGHT, LANE_HEIGHT = 1000, 90, 20
_ABOVE = 6  # room over the highest value
_COLUMNS = 400  # at most; a column has the mean, the lowest and the highest value of its time
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)  # seconds
_TICKS = 8  # at most, so that their labels fit
_NEAR = 2.0  # times the highest value: a bound beyond it is not on the scale

Value: TypeAlias = "tuple[float, float | None]"  # a time and a figure; None where it is not known: the line breaks
_Piece: TypeAlias = "list[tuple[float, list[float]]]"  # an unbroken part of a line: places, with the values there
_Span: TypeAlias = "tuple[float, float, str, str]"  # a stretch of time, its class in the style sheet, its words


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure: its value, the healthy range in words, and its past.

    `tone` is good, bad or empty; `share` says for how much of the time it was bad; `note` stands after the value.
    """

    name: str
    value: str
    healthy: str = ""
    tone: str = ""
    note: str = ""
    share: str = ""
    picture: str = ""  # markup
    past: str = ""  # the words for the picture
    top: str = ""  # the highest value on its scale


@dataclass(frozen=True, slots=True)
class Chart:
    """The time that pictures show: unix seconds, without dates seconds since the first midnight.

    `shades`: stretches of time that are drawn behind every figure.
    """

    begin: float
    end: float
    dated: bool = True
    shades: tuple[_Span, ...] = ()

    @property
    def seconds(self) -> float:
        """The length of the axis."""
        return max(self.end - self.begin, 1.0)

    def x(self, time: float) -> float:
        """Return the horizontal place of a time."""
        return round(WIDTH * min(max((time - self.begin) / self.seconds, 0.0), 1.0), 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Return round times: the place of each in percent, and its label."""
        wanted = self.seconds / _TICKS
        step = next((step for step in _STEPS if step >= wanted), ceil(wanted / 86400) * 86400)
        first = (-self.begin) % step if self.dated else 0.0
        places = (first + number * step for number in range(floor((self.seconds - first) / step) + 1))
        return [(round(100 * at / self.seconds, 2), self._label(at, step)) for at in places]

    def _label(self, at: float, step: float) -> str:
        """Return the label of a time, as exact as ticks `step` seconds apart need."""
        if not self.dated:
            return f"+{int(at) // 3600}:{int(at) // 60 % 60:02}" + (f":{int(at) % 60:02}" if step < 60 else "")
        when = dt.datetime.fromtimestamp(self.begin + at, dt.timezone.utc)
        if step >= 86400 or (when.hour == when.minute == when.second == 0):
            return f"{when:%d %b}"
        return f"{when:%H:%M:%S}" if step < 60 else f"{when:%H:%M}"

    def strip(
        self,
        values: Sequence[Value],
        words: str,
        band: tuple[float | None, float | None] = (None, None),
        *,
        limit: float | None = None,
        least: float = 0.0,
        marks: Iterable[float] = (),
        bars: bool = False,
    ) -> tuple[Markup, float]:
        """Return the picture of a figure over time, and the top of its scale.

        words: describe the picture for a screen reader. band: the healthy range (None: open on that side). limit: a
        value that cannot be passed. least: the least top of the scale. marks: times of ticks at the upper edge. bars:
        a bar for each value in place of a line.
        """
        top = _top(values, (*band, limit), least)
        parts = [self._block(span, HEIGHT, "shade") + "/>" for span in self.shades]
        parts += _band(*band, top)
        parts += [f'<path class="grid" d="M{WIDTH * place / 100:g} 0V{HEIGHT}"/>' for place, _ in self.ticks()]
        parts.append(f'<path class="base" d="M0 {HEIGHT - 0.5}H{WIDTH}"/>')
        if limit is not None and limit <= top:
            parts.append(f'<path class="limit" d="M0 {_y(limit, top)}H{WIDTH}"/>')
        draw = _bars if bars else _line
        for piece in self._pieces(values):
            parts += draw(piece, top)
        parts += [f'<path class="mark" d="M{self.x(time)} 0v8"/>' for time in marks]
        return _svg(parts, HEIGHT, words), top

    def lane(self, spans: Iterable[_Span], words: str) -> Markup:
        """Draw stretches of time as blocks in a row."""
        blocks = (
            f"{self._block(span, LANE_HEIGHT, 'block')}><title>{escape(span[3])}</title></rect>" for span in spans
        )
        return _svg(blocks, LANE_HEIGHT, words)

    def _block(self, span: _Span, height: int, kind: str) -> str:
        """Return the open tag of a rectangle for a stretch of time."""
        begin, end, style, _ = span
        left = self.x(begin)
        width = round(max(self.x(end) - left, 2.0), 1)  # a short one stays visible
        return f'<rect class="{kind} {style}" x="{left}" y="0" width="{width}" height="{height}"'

    def _pieces(self, values: Sequence[Value]) -> list[_Piece]:
        """Return the unbroken pieces of the line."""
        pieces: list[_Piece] = [[]]
        for time, value in values:
            x = round(self.x(time) * _COLUMNS / WIDTH) * WIDTH / _COLUMNS
            if value is None:
                if pieces[-1]:
                    pieces.append([])
            elif pieces[-1] and pieces[-1][-1][0] == x:
                pieces[-1][-1][1].append(value)
            else:
                pieces[-1].append((x, [value]))
        return [piece for piece in pieces if piece]


def _y(value: float, top: float) -> float:
    """Return the vertical place of a value on a scale from 0 to `top`."""
    return round(HEIGHT - (HEIGHT - _ABOVE) * min(max(value / top, 0.0), 1.0), 1)


def _band(lower: float | None, upper: float | None, top: float) -> list[str]:
    """Draw the healthy range behind a line; nothing where there is none."""
    if lower is None and upper is None:
        return []
    high, low = _y(top if upper is None else upper, top), _y(lower or 0.0, top)
    return [f'<rect class="band" x="0" y="{high}" width="{WIDTH}" height="{max(low - high, 0.0):.1f}"/>']


def _bars(piece: _Piece, top: float) -> list[str]:
    """Draw a bar at each place whose highest value is above 0."""
    highest = [(x, max(values)) for x, values in piece]
    return [f'<path class="mark" d="M{x} {HEIGHT}V{_y(value, top)}"/>' for x, value in highest if value]


def _line(piece: _Piece, top: float) -> list[str]:
    """Draw the line of means over the area between the lowest and the highest values."""
    means = [f"{x} {_y(sum(values) / len(values), top)}" for x, values in piece]
    line = f'<path class="line" d="M{"L".join(means)}{"h2" if len(means) == 1 else ""}"/>'
    if all(min(values) == max(values) for _, values in piece):
        return [line]
    edge = [f"{x} {_y(max(values), top)}" for x, values in piece]
    edge += [f"{x} {_y(min(values), top)}" for x, values in reversed(piece)]
    return [f'<path class="area" d="M{"L".join(edge)}Z"/>', line]


def _top(values: Iterable[Value], bounds: Iterable[float | None], least: float) -> float:
    """Return the top of the scale: bounds are on it only where the values come near them."""
    highest = max((value for _, value in values if value is not None), default=0.0)
    top = max([highest, *(bound for bound in bounds if bound is not None and bound <= _NEAR * highest)])
    if least >= highest > 0:
        return max(top, least)
    power = 10.0 ** floor(log10(top)) if top > 0 else 1.0
    return next((step * power for step in (1, 2, 2.5, 5, 10) if step * power >= top), power)


def _svg(parts: Iterable[str], height: int, words: str) -> Markup:
    """Return a picture of these parts, with words for screen readers."""
    opening = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" preserveAspectRatio="none">'
    title = f"<title>{escape(words)}</title>"
    return Markup(f"{opening}{title}{''.join(parts)}</svg>")  # noqa: S704 # nosec B704 # numbers, and escaped words


# A browser fetches, runs, frames and sends nothing; styles are in the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_FLAG = re.compile(r"(--[a-z][a-z0-9-]*[a-z0-9])")


def flags(text: str) -> Markup:
    """Return a text as HTML in which a browser breaks no line inside a flag."""
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
_ENVIRONMENT.filters["ended"] = ended
_ENVIRONMENT.globals.update(version=__version__, words=words)


def render(template: str, **shown: object) -> str:
    """Return a page made of one of the templates."""
    return _ENVIRONMENT.get_template(template).render(**shown)


def page(
    judged: Judgement,
    profile: profiles.Profile,
    against: words.Comparison | None = None,
    live: Mapping[str, object] | None = None,
) -> str:
    """Return the page of a judgement; `live`: values that only the page of a running server has, by template name."""
    chart = _chart(judged) if live is None else None
    last = judged.starts[-1] if judged.starts else None
    arguments = last.arguments if last else {}
    sections, follows, chances = _findings_of_log(judged) if live is None else _findings_of_server(judged)
    return render(
        "report.html",
        policy=POLICY,
        judged=judged,
        live=live,
        tone=words.tone(judged),
        sections=sections,
        follows=follows,
        chances=chances,
        model=str(arguments.get("served_model_name") or arguments.get("model_path") or "SGLang"),
        release=last.release if last else None,
        against=against,
        shares=[] if live is not None and live["is_away"] else words.shares(judged, profile),
        ticks=[] if chart is None else chart.ticks(),
        lanes=[] if chart is None else _lanes(judged, chart),
        strips=[] if chart is None else _strips(judged, profile, chart),
        memory_parts=_memory_parts,
        shows_memory=last is not None and "device" not in last.memory and bool(_memory_parts(last)),
    )


def _chart(judged: Judgement) -> Chart | None:
    """Return the time that the pictures of a log show; None where the log has no times."""
    if judged.begin is None or judged.end is None or judged.end <= judged.begin:
        return None
    # An info often holds for the whole log, and would only tint the page.
    alerts = [alert for alert in judged.alerts if alert.severity != "info"]
    shades = tuple(
        (alert.at, judged.end if alert.until is None else alert.until, alert.severity, "") for alert in alerts
    )
    return Chart(judged.begin, judged.end, judged.is_dated, shades)


def _findings_of_log(judged: Judgement) -> tuple[list[Finding], list[Finding], list[Finding]]:
    """Return the main findings, no findings that only follow from others, and the opportunities."""
    sections = [finding for finding in judged.findings if finding.is_main]
    return sections, [], [finding for finding in judged.findings if not finding.is_main]


def _findings_of_server(judged: Judgement) -> tuple[list[Finding], list[Finding], list[Finding]]:
    """Return the main findings, the verdict first, then the most urgent; their consequences; and the opportunities.

    A consequence has the advice of its cause. After a failure no opportunity is shown: nothing could also be better.
    """
    main, _, chances = _findings_of_log(judged)
    follows = [finding for finding in main if finding.because and finding is not judged.own]
    sections = [finding for finding in main if finding not in follows]
    sections.sort(key=lambda finding: (finding is not judged.own, -URGENCY[finding.severity]))
    diagnosis = BY_ID.get(judged.verdict)
    is_failure = diagnosis is not None and diagnosis.any_load and diagnosis.severity == "critical"
    return sections, follows, [] if is_failure else chances


def _lanes(judged: Judgement, chart: Chart) -> list[tuple[str, Markup]]:
    """Return the course of the run and the times of each alert, as pictures with their names."""
    course = [(stretch.begin, stretch.end, stretch.what, stretch.line) for stretch in judged.course]
    lanes = [("Course", chart.lane(course, "The course of the run"))] if course else []
    for name in dict.fromkeys(alert.alert for alert in judged.alerts):
        spans = [
            (alert.at, chart.end if alert.until is None else alert.until, alert.severity, alert.alert)
            for alert in judged.alerts
            if alert.alert == name
        ]
        lanes.append((name, chart.lane(spans, f"When {name} would have been firing")))
    return lanes


def _strips(judged: Judgement, profile: profiles.Profile, chart: Chart) -> list[Tile]:
    """Return queue, token usage, running requests and retractions over time."""
    healthy, series = profile.healthy, judged.series
    queue = (profile.queue_lower, profile.queue_upper)
    retracted = tuple(time for time, number in series["retractions"] if number)
    # A queue that is judged by its wait has no healthy length.
    queue_bounds: dict[str, Any] = {"band": queue} if profile.queue_wait_seconds is None else {}
    usage_bounds: dict[str, Any] = {"band": (profile.token_usage_target, None), "least": 1.0, "marks": retracted[:1000]}
    shown: list[tuple[str, str, str, str, dict[str, Any]]] = [
        ("Queued requests", "queued", healthy["queue"], ",.0f", queue_bounds),
        ("Token usage", "usage", healthy["usage"], ",.2f", usage_bounds),
        ("Running requests", "running", "", ",.0f", {"limit": judged.running_limit}),
    ]
    strips = []
    for name, figure, good, form, bounds in shown:
        known = [value for _, value in series[figure] if value is not None]
        if known:
            value = f"{sum(known) / len(known):{form}} on average, {max(known):{form}} at most"
            picture, top = chart.strip(series[figure], f"{name} over time: {value}", **bounds)
            strips.append(Tile(name, value, good, picture=picture, top=f"{top:,g}"))
    if retracted:
        count = f"{judged.counts.get('retraction_events', len(retracted)):,.0f} in all"
        picture, top = chart.strip(series["retractions"], f"Retractions over time: {count}", bars=True)
        good = f"{healthy['retractions']} a minute"
        strips.append(Tile("Retractions", count, good, picture=picture, top=f"{top:,g} in 10 s"))
    return strips


def _memory_parts(start: Start) -> list[tuple[str, float]]:
    """Return the uses of GPU memory in percent; empty where they are more than was free before the weights."""
    figures = {name: value for name, value in start.memory.items() if isinstance(value, int | float)}
    free = figures.get("before_weights_gb", 0.0)
    parts = [
        (name, 100 * figures[key] / free)
        for key, name in words.MEMORY.items()
        if key != "before_weights_gb" and free and figures.get(key)
    ]
    return parts if len(parts) > 1 and sum(percent for _, percent in parts) <= 101 else []
