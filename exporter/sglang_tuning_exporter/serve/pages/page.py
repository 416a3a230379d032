"""What limits the server now: in words, as a page that needs no Prometheus, no script, no asset from elsewhere; and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import TYPE_CHECKING, TypeAlias

from sglang_tuning_exporter.core import arguments
from sglang_tuning_exporter.core import text as words
from sglang_tuning_exporter.core.findings import URGENCY, Judged
from sglang_tuning_exporter.core.judge import HEALTHY, IDLE, NOT_ENOUGH, STARTING, STOPPED
from sglang_tuning_exporter.core.page import Axis, Bounds, Live, Source, Span, Tile, Value, page, strip
from sglang_tuning_exporter.core.report import document
from sglang_tuning_exporter.core.server import BUCKET_SECONDS, Scheduler, Totals
from sglang_tuning_exporter.core.summary import last_figures
from sglang_tuning_exporter.core.text import duration
from sglang_tuning_exporter.core.view import View
from sglang_tuning_exporter.core.watch import Watch

if TYPE_CHECKING:
    from sglang_tuning_exporter.collect.sidecar import Sidecar

REFRESH_SECONDS = 10
_LEVEL_HINT = "no batch line yet (SGLang prints them at --log-level info)"
# What a verdict without a finding rests on.
_REMARKS = {
    HEALTHY: "Seen over {seconds} under load in the last {minutes:.0f} minutes.",
    IDLE: "Its limits show under load.",
    STARTING: "It answers when the model is loaded.",
    STOPPED: "Nothing was found wrong before. It is not called down until it starts again.",
    NOT_ENOUGH: "A verdict needs {least:.0f} s under load and {fewest} batch lines, or scrapes that show new figures;"
    " there are {served:.0f} s and {seen:.0f} in the last {minutes:.0f} minutes.",
}


def render(sidecar: Sidecar, *, still: bool = False, whole: bool = False) -> str:
    """Return the page as HTML. The browser reloads it unless it is `still` or shows the `whole` of the arguments."""
    with sidecar.view() as now:
        judged = sidecar.judged(now)
        shown = live(sidecar, judged, now, still=still or whole, whole=whole)
        profile = sidecar.watch.server.profile
    return page(judged, profile, live=shown)


def as_json(sidecar: Sidecar, *, whole: bool = False) -> bytes:
    """Return the findings in the report's schema (docs/report.schema.json), `null` where a value is not known."""
    with sidecar.view() as now:
        judged = sidecar.judged(now)
    found = document(judged)
    found["server"]["args"] = arguments.shown(found["server"]["args"], whole=whole)
    return (json.dumps(found, indent=2, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")


def live(sidecar: Sidecar, judged: Judged, now: float, *, still: bool, whole: bool) -> Live:
    """Return what the page shows beside what a report would have."""
    watch = sidecar.watch
    view = watch.measured.view if watch.measured is not None else watch.view(now)
    away = bool(view.down) or view.stopped or view.starting or bool(watch.server.ended)
    passed, not_judged = words.checks(judged.judgement)
    return Live(
        now,
        None if watch.words.verdict is None else watch.words.verdict.since,
        None if still else REFRESH_SECONDS,
        remark(judged.judgement.verdict, view),
        away,
        tiles(watch, view, now, away=away),
        () if away else ranks(watch),
        tuple(sources(sidecar)),
        {} if away else passed,
        not_judged,
        arguments.shown(judged.starts[-1].arguments if judged.starts else {}, whole=whole),
        whole,
    )


def remark(verdict: str, view: View) -> str:
    """Return what a verdict without a finding rests on."""
    profile = view.profile
    return _REMARKS.get(verdict, "").format(
        served=view.served,
        seconds=words.duration(min(view.served, profile.window_seconds)),
        least=profile.enough_serving_seconds,
        seen=view.totals["lines"],
        fewest=profile.enough_observations,
        minutes=profile.window_seconds / 60,
    )


def sources(sidecar: Sidecar) -> Iterator[Source]:
    """Give the metrics and each log, with their health."""
    config, watch = sidecar.config, sidecar.watch
    name = config.metrics_url or "metrics"
    if config.sglang_url is None:
        yield Source(name, "not configured (--sglang-url)")
    elif watch.failure is not None:
        yield Source(name, trouble=watch.failure.message)
    elif watch.is_up is None:
        yield Source(name, "not scraped yet")
    else:
        yield Source(name, f"scraped in {1000 * (sidecar.health.scrape_seconds or 0):.0f} ms")
    if sidecar.log is None:
        yield Source("log", "not configured (--log-file)")
        return
    has_batches = any(each.logged_at > -inf for each in watch.server.schedulers.values())
    for file in sidecar.log.files:
        troubles = [
            "" if file.up else file.words,
            f"{file.lost} of its rotated files gone unread" if file.lost else "",
            "no line can be read: SGLang's words are in an unknown format" if file.unread else "",
        ]
        health = "" if not file.up else "following" if has_batches else f"following; {_LEVEL_HINT}"
        yield Source(file.path, health, "; ".join(filter(None, troubles)), file.unread)


Words: TypeAlias = Callable[[float], str]

NOT_REPORTED = "not reported"
MOST_SECONDS, LEAST_SECONDS = 3600.0, 120.0  # that the pictures show
UNBOUNDED = Bounds()
GAP_SECONDS = 120.0  # without a sum: the exporter did not run, and the line breaks
NOW_SECONDS = 10.0  # in which a state is a present one
_BAD_QUEUES = frozenset({"above_range", "below_range"})


def count(figure: float | None) -> str:
    """Return a count as text."""
    return NOT_REPORTED if figure is None else f"{figure:,.0f}"


def ratio(figure: float | None) -> str:
    """Return a share of the KV cache as text."""
    return NOT_REPORTED if figure is None else f"{figure:.2f}"


def percent(share: float) -> str:
    """Return a share as text."""
    return f"{100 * share:.0f} %"


@dataclass(frozen=True, slots=True)
class _Past:
    """The sums of the last hour, and when alerts fired in it."""

    axis: Axis
    sums: list[tuple[float, Totals]]
    shades: tuple[Span, ...]

    def values(self, of: Callable[[Totals], float | None]) -> list[Value]:
        """Return a figure over time; not known where the exporter did not run."""
        found: list[Value] = []
        last = inf
        for begin, totals in self.sums:
            if begin - last > GAP_SECONDS:
                found.append((last + BUCKET_SECONDS, None))
            found.append((begin + BUCKET_SECONDS / 2, of(totals)))
            last = begin
        return found

    def drawn(self, tile: Tile, values: list[Value], words: Words = count, bounds: Bounds = UNBOUNDED) -> Tile:
        """Return the tile with the picture of its past, where anything is known of it."""
        known = [(at, value) for at, value in values if value is not None and isfinite(value)]
        if not known:
            return tile
        low, high = (words(end(value for _, value in known)) for end in (min, max))
        past = f"{self.length(known[0][0])}: {low}{f' to {high}' if low != high else ''}"
        picture = strip(values, self.axis, f"{tile.name}, {past}", bounds, spans=self.shades)
        return replace(tile, picture=picture, past=past)

    def counted(self, tile: Tile, values: list[Value]) -> Tile:
        """Return the tile with a bar for each ten seconds with events."""
        if not values:
            return tile
        past = f"{self.length(values[0][0])}: {sum(value or 0.0 for _, value in values):,.0f} in all"
        picture = strip(values, self.axis, f"Retractions, {past}", spans=self.shades, bars=True)
        return replace(tile, picture=picture, past=past)

    def length(self, first: float) -> str:
        """Return since when something is known, as text."""
        return f"last {duration(max(self.axis.end - first + BUCKET_SECONDS / 2, 1.0))}"


def tiles(watch: Watch, view: View, now: float, *, away: bool) -> tuple[Tile, ...]:
    """Return the figures in reading order. Where the server is `away` they are those of before: no value, and not judged."""
    server = watch.server
    last, states = last_figures(server), _present(watch)
    is_idle = bool(states["queue"]) and states["queue"] <= {"idle"}
    past = _past(watch, now)
    shown = (
        _queue(view, server.schedulers.values(), 0.0 if is_idle else last["queued_requests"], states, past),
        _usage(view, last["token_usage"], states, past),
        _running(watch, 0.0 if is_idle else last["running_requests"], past),
        _throughput(view, server.schedulers.values(), past, is_idle=is_idle),
        _coverage(view, past),
        _retractions(view, past),
        *([] if view.given_up_share is None else [Tile("Requests given up", percent(view.given_up_share))]),
        _reserve(view),
    )
    return tuple(replace(tile, value=NOT_REPORTED, tone="", note="") for tile in shown) if away else shown


def ranks(watch: Watch) -> tuple[tuple[str, ...], ...]:
    """Return each data-parallel rank's name, queue, running requests, limit and token usage; empty where there is one scheduler."""
    server = watch.server
    if len(server.schedulers) < 2:
        return ()
    ordered = sorted(server.schedulers.items(), key=lambda each: -1 if each[0] is None else each[0])
    return tuple(
        (
            NOT_REPORTED if dp is None else f"DP{dp}",
            *map(count, (rank.queued, rank.running, server.facts.limit(dp))),
            ratio(rank.usage),
        )
        for dp, rank in ordered
    )


def _present(watch: Watch) -> dict[str, frozenset[str]]:
    """Return the states of the last ten seconds, by signal."""
    totals = watch.server.window(NOW_SECONDS)
    return {
        signal: frozenset(state for state, seconds in totals.under(signal).items() if seconds > 0)
        for signal in ("queue", "admission")
    }


def _past(watch: Watch, now: float) -> _Past:
    sums = [(begin, totals) for begin, totals in watch.server.buckets if begin > now - MOST_SECONDS]
    first = sums[0][0] if sums else now
    axis = Axis(min(max(first, now - MOST_SECONDS), now - LEAST_SECONDS), now)
    firing = [alert for alert in watch.clocks.firing if alert.severity != "info"]
    shades = (
        [
            Span(
                max(min(alert.at for alert in firing), axis.begin),
                now,
                max((alert.severity for alert in firing), key=URGENCY.__getitem__),
            )
        ]
        if firing
        else []
    )
    return _Past(axis, sums, tuple(shades))


def _of_all(figure: str) -> Callable[[Totals], float | None]:
    """Return a figure of all schedulers together; an idle server has none running or waiting."""

    def of(totals: Totals) -> float | None:
        mean = totals.mean(figure)
        if mean is None:
            return 0.0 if totals["queue/idle"] else None
        return mean * max(len(totals.under("serves")), 1)

    return of


def _queue(
    view: View,
    schedulers: Iterable[Scheduler],
    queued: float | None,
    states: dict[str, frozenset[str]],
    past: _Past,
) -> Tile:
    profile = view.profile
    waits = [wait for each in schedulers if (wait := each.wait_seconds()) is not None and isfinite(wait)]
    bad = _BAD_QUEUES | ({"empty"} if profile.queue_lower else frozenset())
    tone = "bad" if states["queue"] & bad else "good" if states["queue"] & {"in_range", "empty"} else ""
    note = f"~{max(waits):.0f} s wait" if queued and waits else ""
    tile = Tile("Queued requests", count(queued), profile.healthy["queue"], tone, note)
    # Where the wait is judged, the queue has no healthy length.
    bounds = Bounds(profile.queue_lower, profile.queue_upper) if profile.queue_wait_seconds is None else UNBOUNDED
    return past.drawn(tile, past.values(_of_all("queued")), bounds=bounds)


def _usage(view: View, usage: float | None, states: dict[str, frozenset[str]], past: _Past) -> Tile:
    target, seen = view.profile.token_usage_target, states["admission"] - {"idle", "unknown"}
    tone = ""
    if usage is not None and seen & {"held_back", "standing_still"}:
        tone = "bad"
    elif usage is not None and seen and not seen & {"pool_full", "hybrid_pool_full"}:
        tone = "good" if usage >= target or seen == {"no_queue"} else ""
    tile = Tile("Token usage", ratio(usage), view.profile.healthy["usage"], tone)
    return past.drawn(tile, past.values(lambda totals: totals.mean("usage")), ratio, Bounds(target, least=1.0))


def _running(watch: Watch, running: float | None, past: _Past) -> Tile:
    server, batches = watch.server, watch.server.facts.micro_batches
    limits = [limit for dp in server.schedulers if (limit := server.facts.limit(dp)) is not None]
    limit = sum(limits) if limits else None
    of = f", in one of {batches} micro batches" if batches > 1 else ""
    note = f"of {limit:,.0f}{of}" if running is not None and limit else ""
    near = f"near {limit:,.0f} while requests wait" if limit else "near the limit while requests wait"
    return past.drawn(Tile("Running requests", count(running), near, note=note), past.values(_of_all("running")))


def _throughput(view: View, schedulers: Iterable[Scheduler], past: _Past, *, is_idle: bool) -> Tile:
    each = [rank.throughput for rank in schedulers if rank.throughput is not None]
    now = 0.0 if is_idle or view.stuck is not None else sum(each) if each else None
    return past.drawn(Tile("Generated tokens/s", count(now)), past.values(_of_all("throughput")))


def _coverage(view: View, past: _Past) -> Tile:
    name, healthy, facts = "CUDA graph coverage", view.profile.healthy["coverage"], view.facts
    if facts.without_graph == "unsupported":
        return Tile(name, "decodes nothing" if facts.role == "prefill" else "none on this device")
    if facts.without_graph:
        return Tile(name, "off", healthy, "bad")
    share, least = view.share("cuda_graph", "replayed"), 1 - view.profile.frequent_share
    tile = Tile(name, NOT_REPORTED, healthy)
    if share is not None:
        tile = Tile(name, percent(share), healthy, "good" if share > least else "bad")
    values = past.values(lambda totals: totals.share("cuda_graph", "replayed"))
    return past.drawn(tile, values, percent, Bounds(least, least=1.0))


def _retractions(view: View, past: _Past) -> Tile:
    rate, healthy = view.retractions_a_minute, view.profile.healthy["retractions"]
    tone = "" if not view.served else "good" if rate <= view.retractions_tolerated else "bad"
    value = f"{rate:.1f}" if past.sums else NOT_REPORTED
    return past.counted(
        Tile("Retractions a minute", value, healthy, tone), past.values(lambda totals: totals["retractions"])
    )


def _reserve(view: View) -> Tile:
    reserve, profile, name = view.facts.reserve_gb, view.profile, "GPU memory left at start"
    healthy = f"{profile.reserve_lower_gb:g} to {profile.reserve_good_gb:g} GB"
    if reserve is None:
        return Tile(name, "no GPU") if view.facts.is_cpu else Tile(name, NOT_REPORTED, healthy)
    tone = "bad"
    if profile.reserve_lower_gb <= reserve <= profile.reserve_upper_gb:
        tone = "good" if reserve <= profile.reserve_good_gb else ""  # between good and too much: not judged
    return Tile(name, f"{reserve:.1f} GB", healthy, tone)
