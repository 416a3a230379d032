"""The report as one HTML file: no script, no font, no request. Every word from the log is escaped."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor
from typing import Any

from markupsafe import Markup

from sglang_tuning_exporter import __version__
from sglang_tuning_exporter.diagnosis.json_findings import Document
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.diagnosis.wording import duration, figure, state_shares
from sglang_tuning_exporter.report import wording
from sglang_tuning_exporter.report.analysis import Analysis
from sglang_tuning_exporter.report.wording import MEMORY, PHASES, in_part, moment
from sglang_tuning_exporter.serve.pages.chart import ChartSize, MarkedSpan, Point, Scale, chart, lane, nice, scale
from sglang_tuning_exporter.serve.pages.figures import near_limit
from sglang_tuning_exporter.serve.pages.rendering import environment
from sglang_tuning_exporter.sglang.log.prefix import FIRST_DATED_SECOND

# Nothing is fetched, run, framed or sent; styles are in the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_ENVIRONMENT = environment("report")
_HOLDS_SECONDS = 60.0  # a figure holds so long after its line; then the curve breaks
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)  # of the time axis
_DAY = 86400
_TICKS = 8  # at most, so that their labels fit


@dataclass(frozen=True, slots=True)
class Strip:
    """One figure over time: its picture and its words."""

    name: str
    value: str
    healthy: str
    top: str  # the highest value on the scale
    picture: Markup


def render(document: Document, analysis: Analysis) -> str:
    """Return the page."""
    text, part, seconds = wording.text_of(document, analysis), in_part(document), analysis.seconds
    has_axis = analysis.begin is not None and seconds > 0
    return _ENVIRONMENT.get_template("report.html").render(
        policy=POLICY,
        version=__version__,
        document=document,
        words=wording,
        duration=duration,
        figure=figure,
        text=text._replace(tone="warn", word=f"{text.word}, in part") if part else text,
        part=part,
        model=analysis.state.facts.model_name,
        rows=BY_ID,
        memory_parts=_memory_parts,
        ticks=ticks(analysis.begin or 0.0, seconds) if has_axis else [],
        lanes=_lanes(document, seconds) if has_axis else [],
        strips=_Strips(document, analysis).all() if has_axis else [],
        shares=state_shares(document["shares"]),
    )


def _memory_parts(memory: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Return the parts of a start's memory: name, GB, and percent of the memory that was free before; empty where that is not known."""
    whole = memory["before_weights_gb"]
    if not whole:
        return []
    parts = [(name, memory[key], 100 * memory[key] / whole) for key, name in MEMORY[1:] if memory[key]]
    # One part alone shows nothing, and parts that add up to more than the whole were measured at different times.
    return parts if len(parts) > 1 and sum(percent for _, _, percent in parts) <= 101 else []


def _lanes(document: Document, seconds: float) -> list[tuple[str, Markup]]:
    phases = [
        _span(phase, phase["phase"], f"{PHASES[phase['phase']]}, {moment(phase)}, {duration(phase['seconds'])}")
        for phase in document["phases"]
    ]
    lanes = [("Phases", lane(phases, seconds, "The phases of the run"))] if phases else []
    names = dict.fromkeys(alert["alert"] for alert in document["alerts"])
    fired = ((name, lane(_spans(document, name), seconds, f"When {name} would have fired")) for name in names)
    return [*lanes, *fired]


def _spans(document: Document, name: str = "") -> list[MarkedSpan]:
    return [
        _span(alert, alert["severity"], f"{alert['alert']}, {moment(alert)}, for {duration(alert['seconds'])}")
        for alert in document["alerts"]
        if name in {"", alert["alert"]}
    ]


def _span(stretch: Document, kind: str, words: str) -> MarkedSpan:
    return MarkedSpan(stretch["at"], stretch["seconds"], kind, words)


class _Strips:
    """The figures of a log over time, on one axis."""

    def __init__(self, document: Document, analysis: Analysis) -> None:
        self._analysis, self._document, self._series = analysis, document, analysis.series
        self._box = ChartSize(1000, 90, analysis.seconds, above=6)
        self._ticks = [left for left, _ in ticks(analysis.begin or 0.0, analysis.seconds)]
        # Information alerts often hold for the whole log and would only tint the page; the lanes show them.
        self._shades = [span for span in _spans(document) if span.kind != "info"]
        self._profile = analysis.profile.for_server(analysis.state.facts)

    def all(self) -> list[Strip]:
        """Return those that the log shows."""
        facts, series, profile = self._analysis.state.facts, self._series, self._profile
        now = [rank for rank in self._analysis.state.schedulers if rank.served]  # without those of earlier starts
        limit = sum(known for rank in now if (known := facts.running_limit(rank.dp)) is not None) or None
        healthy, retractions = profile.healthy, series.retractions()
        has_length = profile.queue_wait_seconds is None  # a queue that is judged by its wait has no healthy length
        lower, upper = (profile.queue_lower, profile.queue_upper) if has_length else (None, None)
        strips = [
            self._strip("Queued requests", series.line("queued"), healthy["queue"], lower=lower, upper=upper),
            self._strip(
                "Token usage", series.line("usage"), healthy["usage"], retractions, least=1.0, lower=profile.token_usage_target
            ),
            self._strip("Running requests", series.line("running"), near_limit(limit), limit=limit),
            self._strip("Generated tokens a second", series.line("throughput")),
            None if facts.without_graph else self._strip(
                "CUDA graph coverage", series.coverage(), healthy["coverage"], least=1.0, lower=1 - profile.frequent_share
            ),
            self._retractions(retractions),
        ]  # fmt: skip
        return [strip for strip in strips if strip is not None]

    def _strip(
        self,
        name: str,
        points: list[Point],
        healthy: str = "",
        marks: Sequence[Point] = (),
        *,
        least: float = 0.0,
        **bounds: float | None,
    ) -> Strip | None:
        """Return a figure over time. A share has `least` 1: its scale need not end at a round figure."""
        if not points:
            return None
        decimals, of = 2 if least else 0, scale(points, least=least, **bounds)
        of = of if least else _rounded_up(of)
        mean = sum(point.mean for point in points) / len(points)
        value, most = f"{mean:,.{decimals}f}", f"{max(point.high for point in points):,.{decimals}f}"
        value = f"{value} throughout" if value == most else f"{value} on average, {most} at most"
        words = f"{name} over the run: {value}" + ("; ticks at the upper edge are retractions" if marks else "")
        return Strip(name, value, healthy, f"{of.top:,g}", self._chart(points, of, words, marks=marks))

    def _retractions(self, points: list[Point]) -> Strip | None:
        if not points:
            return None
        value, of = f"{self._document['counts']['retraction_events']:,} in all", _rounded_up(scale(points))
        picture = self._chart(points, of, f"Retractions over the run: {value}", bars=True)
        healthy = f"{self._profile.healthy['retractions']} a minute"
        return Strip("Retractions", value, healthy, f"{of.top:,g} in {duration(self._series.width)}", picture)

    def _chart(
        self, points: list[Point], of: Scale, words: str, *, marks: Sequence[Point] = (), bars: bool = False
    ) -> Markup:
        gap = _HOLDS_SECONDS + self._series.width
        return chart(
            points, self._box, of, words, gap=gap, ticks=self._ticks, spans=self._shades, marks=marks, bars=bars
        )


def _rounded_up(of: Scale) -> Scale:
    return replace(of, top=nice(of.top))


def ticks(begin: float, seconds: float) -> list[tuple[float, str]]:
    """Return round times in `seconds` from `begin` on (unix, or since a midnight): their place in percent, and their labels."""
    wanted = seconds / _TICKS
    step = next((step for step in _STEPS if step >= wanted), ceil(wanted / _DAY) * _DAY)
    first = (-begin) % step if begin >= FIRST_DATED_SECOND else 0.0
    found = []
    for number in range(floor((seconds - first) / step) + 1 if first <= seconds else 0):
        at = first + number * step
        found.append((round(100 * at / seconds, 2), _words(begin, at, step, first=not number)))
    return found


def _words(begin: float, at: float, step: float, *, first: bool) -> str:
    if begin < FIRST_DATED_SECOND:
        return f"+{int(at) // 3600}:{int(at) // 60 % 60:02}" + (f":{int(at) % 60:02}" if step < 60 else "")
    when = dt.datetime.fromtimestamp(begin + at, dt.timezone.utc)
    if step >= _DAY:
        return f"{when:%d %b}"
    clock = f"{when:%H:%M:%S}" if step < 60 else f"{when:%H:%M}"
    is_midnight = when.hour == when.minute == when.second == 0
    return f"{when:%d %b} {clock}" if is_midnight and not first else clock
