"""What limits the server now: in words, as a page that needs no Prometheus, no script, no asset from elsewhere; and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING

from sglang_tuning_exporter.core import arguments
from sglang_tuning_exporter.core import text as words
from sglang_tuning_exporter.core.findings import Judged
from sglang_tuning_exporter.core.judge import HEALTHY, IDLE, NOT_ENOUGH, STARTING, STOPPED
from sglang_tuning_exporter.core.page import Live, Source, page
from sglang_tuning_exporter.core.report import document
from sglang_tuning_exporter.core.view import View
from sglang_tuning_exporter.serve.pages.figures import ranks, tiles

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
