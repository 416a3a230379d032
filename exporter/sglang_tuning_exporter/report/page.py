"""The report as one HTML file: no script, no font, no request. Every word from the log is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from sglang_tuning_exporter import __version__
from sglang_tuning_exporter.diagnosis.json_findings import Document
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.diagnosis.wording import duration, figure, state_shares
from sglang_tuning_exporter.report import wording
from sglang_tuning_exporter.report.analysis import Analysis
from sglang_tuning_exporter.report.axis import ticks
from sglang_tuning_exporter.report.wording import MEMORY, PHASES, in_part, moment
from sglang_tuning_exporter.serve.pages.chart import ChartSize, MarkedSpan, Point, Scale, chart, lane, nice, scale
from sglang_tuning_exporter.serve.pages.figures import near_limit
from sglang_tuning_exporter.serve.pages.rendering import environment

# Nothing is fetched, run, framed or sent; styles are in the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_ENVIRONMENT = environment("report")
_HOLDS_SECONDS = 60.0  # a figure holds so long after its line; then the curve breaks


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
    begin, seconds, text, part = (
        analysis.begin, analysis.seconds, wording.text_of(document, analysis), in_part(document)
    )  # fmt: skip
    has_axis = begin is not None and seconds > 0
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
        ticks=ticks(begin, seconds) if begin is not None and has_axis else [],
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
        MarkedSpan(
            phase["at"],
            phase["seconds"],
            phase["phase"],
            f"{PHASES[phase['phase']]}, {moment(phase)}, {duration(phase['seconds'])}",
        )
        for phase in document["phases"]
    ]
    lanes = [("Phases", lane(phases, seconds, "The phases of the run"))] if phases else []
    names = dict.fromkeys(alert["alert"] for alert in document["alerts"])
    fired = ((name, lane(_spans(document, name), seconds, f"When {name} would have fired")) for name in names)
    return [*lanes, *fired]


def _spans(document: Document, name: str = "") -> list[MarkedSpan]:
    return [
        MarkedSpan(
            alert["at"],
            alert["seconds"],
            alert["severity"],
            f"{alert['alert']}, {moment(alert)}, for {duration(alert['seconds'])}",
        )
        for alert in document["alerts"]
        if name in {"", alert["alert"]}
    ]


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
        facts, series, target = self._analysis.state.facts, self._series, self._profile.token_usage_target
        now = [rank for rank in self._analysis.state.schedulers if rank.served]  # without those of earlier starts
        limit = sum(known for rank in now if (known := facts.running_limit(rank.dp)) is not None) or None
        healthy = self._profile.healthy
        usage, running, coverage = series.line("usage"), series.line("running"), series.coverage()
        strips = [
            self._queue(series.line("queued")),
            self._strip(
                "Token usage", usage, scale(usage, least=1.0, lower=target), healthy["usage"],
                marks=series.retractions(), decimals=2,
            ),
            self._strip(
                "Running requests", running, _nice(running, limit=limit), near_limit(limit)
            ),
            self._strip("Generated tokens a second", series.line("throughput")),
            None if facts.without_graph else self._strip(
                "CUDA graph coverage", coverage, scale(coverage, least=1.0, lower=1 - self._profile.frequent_share),
                healthy["coverage"], decimals=2,
            ),
            self._retractions(series.retractions()),
        ]  # fmt: skip
        return [strip for strip in strips if strip is not None]

    def _queue(self, points: list[Point]) -> Strip | None:
        profile = self._profile
        # A queue that is judged by its wait has no healthy length.
        lower, upper = (
            (profile.queue_lower, profile.queue_upper) if profile.queue_wait_seconds is None else (None, None)
        )
        return self._strip("Queued requests", points, _nice(points, lower=lower, upper=upper), profile.healthy["queue"])

    def _strip(
        self,
        name: str,
        points: list[Point],
        of: Scale | None = None,
        healthy: str = "",
        *,
        marks: Sequence[Point] = (),
        decimals: int = 0,
    ) -> Strip | None:
        if not points:
            return None
        mean = sum(point.mean for point in points) / len(points)
        value, most = f"{mean:,.{decimals}f}", f"{max(point.high for point in points):,.{decimals}f}"
        value = f"{value} throughout" if value == most else f"{value} on average, {most} at most"
        words = f"{name} over the run: {value}" + ("; ticks at the upper edge are retractions" if marks else "")
        of = of or _nice(points)
        return Strip(name, value, healthy, f"{of.top:,g}", self._chart(points, of, words, marks=marks))

    def _retractions(self, points: list[Point]) -> Strip | None:
        if not points:
            return None
        value, of = f"{self._document['counts']['retraction_events']:,} in all", _nice(points)
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


def _nice(
    points: list[Point], lower: float | None = None, upper: float | None = None, limit: float | None = None
) -> Scale:
    """Return a scale that ends at a round figure."""
    of = scale(points, lower=lower, upper=upper, limit=limit)
    return replace(of, top=nice(of.top))
