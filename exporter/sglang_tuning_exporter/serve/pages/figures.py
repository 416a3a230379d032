"""The guide's figures as the page shows them: a value, what would be healthy, and the last quarter of an hour. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

from markupsafe import Markup

from sglang_tuning_exporter.diagnosis.evidence import Past
from sglang_tuning_exporter.serve.pages.chart import sparkline
from sglang_tuning_exporter.state.history import LENGTH_SECONDS, History, added_up, tokens_per_second
from sglang_tuning_exporter.state.profiles import Profile
from sglang_tuning_exporter.state.rank import RankState
from sglang_tuning_exporter.state.server import ServerState
from sglang_tuning_exporter.state.signals import IDLE, UNKNOWN

Points = Sequence[tuple[float, float | None]]
Bounds = tuple[float | None, float | None]
Words = Callable[[float], str]

NOT_REPORTED = "not reported"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure. `judgement` is good, bad or empty; `spark_words` says what `spark` draws, both empty without a past.

    `note` stands in small letters after the value.
    """

    name: str
    value: str
    healthy: str = ""
    judgement: str = ""
    note: str = ""
    spark: Markup = field(default_factory=Markup)
    spark_words: str = ""


def figures(state: ServerState, past: Past, history: History, now: float) -> list[Figure]:
    """Return the figures in reading order; `now` is on the state's clock."""
    throughput = Figure("Generated tokens/s", count(tokens_per_second(state.schedulers)))
    return [
        _queue(state.schedulers, past.profile, history, now),
        _usage(state.schedulers, past.profile, history),
        _running(state, history),
        _drawn(throughput, history.line(lambda moment: moment.throughput)),
        _coverage(past, history),
        _retractions(past, history),
        # where the server counts them
        *([] if past.given_up_share is None else [Figure("Requests given up", _percent(past.given_up_share))]),
        _reserve(past),
    ]


def past_only(shown: list[Figure]) -> list[Figure]:
    """Return the figures of a server that is down: only their past, without judgement."""
    return [replace(figure, value=NOT_REPORTED, judgement="", note="") for figure in shown]


def ranks(state: ServerState) -> list[tuple[str, ...]]:
    """Return each data-parallel rank's name, queue, running requests, limit and token usage; empty where there is one scheduler."""
    if len(state.schedulers) < 2:
        return []
    return [
        (
            NOT_REPORTED if rank.dp is None else f"DP{rank.dp}",
            *map(count, (rank.queued, rank.running, state.facts.running_limit(rank.dp))),
            _ratio(rank.usage),
        )
        for rank in sorted(state.schedulers, key=lambda rank: -1 if rank.dp is None else rank.dp)
    ]


def span(points: Points) -> str:
    """Return the age of the first known point of the last 15 minutes, as text."""
    known = [-at for at, value in points if value is not None and at >= -LENGTH_SECONDS]
    seconds = max(known, default=0.0)
    if seconds < 1:
        return "just now"
    return f"last {round(seconds / 60)} min" if seconds >= 90 else f"last {seconds:.0f} s"


def near_limit(limit: float | None) -> str:
    """Return what number of running requests is healthy."""
    return f"near {limit:.0f} while requests wait" if limit else "near the limit while requests wait"


def count(figure: float | None) -> str:
    """Return a count as text."""
    return NOT_REPORTED if figure is None else f"{figure:.0f}"


def _drawn(
    figure: Figure, points: Points, words: Words = count, *, band: Bounds = (None, None), least: float = 0.0
) -> Figure:
    """Return the figure with its past."""
    known = [value for _, value in points if value is not None and isfinite(value)]
    if not known:
        return figure
    low, high = words(min(known)), words(max(known))
    spark_words = f"{span(points)}: {low}" + (f" to {high}" if low != high else "")
    return replace(
        figure,
        spark=sparkline(points, f"{figure.name}, {spark_words}", band=band, least=least),
        spark_words=spark_words,
    )


def _queue(schedulers: list[RankState], profile: Profile, history: History, now: float) -> Figure:
    queued = added_up(rank.queued for rank in schedulers)
    waits = [wait for rank in schedulers if (wait := rank.queue_wait_seconds(now)) is not None and isfinite(wait)]
    states = {rank.states["queue"] for rank in schedulers}
    bad = {"above_range", "below_range"} | ({"empty"} if profile.queue_lower else set())
    judgement = "bad" if states & bad else "good" if states & {"in_range", "empty"} else ""
    # Where the wait is judged, the queue has no healthy length.
    band = (profile.queue_lower, profile.queue_upper) if profile.queue_wait_seconds is None else (None, None)
    figure = Figure(
        "Queued requests",
        count(queued),
        profile.healthy["queue"],
        judgement,
        f"~{max(waits):.0f} s wait" if queued and waits else "",
    )
    return _drawn(figure, history.line(lambda moment: moment.queued), band=band)


def _usage(schedulers: list[RankState], profile: Profile, history: History) -> Figure:
    usages = [rank.usage for rank in schedulers if rank.usage is not None]
    states = {rank.states["admission"] for rank in schedulers} - {IDLE, UNKNOWN}
    usage = max(usages, default=None)
    judgement = ""
    if usage is not None and "held_back" in states:
        judgement = "bad"
    elif usage is not None and states and not states & {"pool_full", "hybrid_pool_full"}:
        judgement = "good" if usage >= profile.token_usage_target or states == {"no_queue"} else ""
    figure = Figure("Token usage", _ratio(usage), profile.healthy["usage"], judgement)
    points = history.line(lambda moment: moment.usage)
    return _drawn(figure, points, _ratio, band=(profile.token_usage_target, None), least=1.0)


def _running(state: ServerState, history: History) -> Figure:
    running = added_up(rank.running for rank in state.schedulers)
    limit = added_up(state.facts.running_limit(rank.dp) for rank in state.schedulers)
    batches = state.facts.micro_batches
    of = f", in one of {batches} micro batches" if batches > 1 else ""
    note = f"of {limit:.0f}{of}" if running is not None and limit else ""
    figure = Figure("Running requests", count(running), near_limit(limit), note=note)
    return _drawn(figure, history.line(lambda moment: moment.running))


def _coverage(past: Past, history: History) -> Figure:
    coverage, name = past.recent.coverage, "CUDA graph coverage"
    least, healthy = 1 - past.profile.frequent_share, past.profile.healthy["coverage"]
    if past.facts.without_graph == "unsupported":
        return Figure(name, "decodes nothing" if past.facts.role else "none on this device")
    if past.facts.without_graph:
        return Figure(name, "off", healthy, "bad")
    figure = Figure(name, NOT_REPORTED, healthy)
    if coverage is not None:
        figure = Figure(name, _percent(coverage), healthy, "good" if coverage > least else "bad")
    return _drawn(figure, history.line(lambda moment: moment.replayed), _percent, band=(least, None), least=1.0)


def _retractions(past: Past, history: History) -> Figure:
    rate = past.retractions_per_minute
    name, points = "Retractions a minute", history.retractions()
    watched = history.line(lambda moment: moment.retractions)  # one step longer than the events in its steps
    spark_words = f"{span(watched)}: {sum(value or 0.0 for _, value in points):.0f} in all" if points else ""
    return Figure(
        name,
        f"{rate:.1f}" if past.served_seconds or rate or points else NOT_REPORTED,
        past.profile.healthy["retractions"],
        "" if not past.served_seconds else "good" if rate <= past.profile.retractions_tolerated else "bad",
        spark=sparkline(points, f"Retractions, {spark_words}", bars=True),
        spark_words=spark_words,
    )


def _reserve(past: Past) -> Figure:
    reserve, profile, name = past.facts.reserve_gb, past.profile, "GPU memory left at start"
    healthy = f"{profile.reserve_lower_gb:g} to {profile.reserve_good_gb:g} GB"
    if reserve is None:
        return Figure(name, "no GPU", "") if past.facts.is_cpu else Figure(name, NOT_REPORTED, healthy)
    judgement = "bad"
    if profile.reserve_lower_gb <= reserve <= profile.reserve_upper_gb:
        judgement = "good" if reserve <= profile.reserve_good_gb else ""  # between good and too much: not judged
    return Figure(name, f"{reserve:.1f} GB", healthy, judgement)


def _ratio(figure: float | None) -> str:
    return NOT_REPORTED if figure is None else f"{figure:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
