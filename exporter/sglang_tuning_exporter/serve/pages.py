"""The exporter's pages: what limits the server now, as HTML and as JSON (`/api/v1/findings`), and the runbooks.

The HTML needs no Prometheus, no script and no file from elsewhere.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from markdown_it import MarkdownIt
from markdown_it.token import Token

from sglang_tuning_exporter import __version__
from sglang_tuning_exporter.collect.sidecar import TWO_SERVERS, Sidecar
from sglang_tuning_exporter.core import answer as words
from sglang_tuning_exporter.core import findings, judge, runbooks, sums
from sglang_tuning_exporter.core import page as pages
from sglang_tuning_exporter.core.report import document
from sglang_tuning_exporter.core.view import View
from sglang_tuning_exporter.core.watch import Watch
from sglang_tuning_exporter.serve.guard import Lane
from sglang_tuning_exporter.serve.metrics.families import by_rank
from sglang_tuning_exporter.sglang import flags

REFRESH_SECONDS = 10
NOT_REPORTED = "not reported"
MOST_SECONDS, LEAST_SECONDS = 3600.0, 120.0  # the time that a picture shows
GAP_SECONDS = 120.0  # a longer time without a sum means that the exporter did not run: the line breaks there
NOW_SECONDS = 10.0  # a state of this time is a present one
_LEVEL_HINT = "no batch line yet (SGLang prints them at --log-level info)"
# The evidence for a verdict that has no finding.
_REMARKS = {
    judge.HEALTHY: "Seen over {seconds} under load in the last {minutes:.0f} minutes.",
    judge.IDLE: "Its limits show under load.",
    judge.STARTING: "It answers when the model is loaded.",
    judge.STOPPED: "Nothing was found wrong before. It is not called down until it starts again.",
    judge.NOT_ENOUGH: "A verdict needs {least:.0f} s under load and {fewest} batch lines, or scrapes that show new"
    " figures; there are {served:.0f} s and {seen:.0f} in the last {minutes:.0f} minutes.",
}


def _states_of(signal: str) -> frozenset[str]:
    """Return the sums of a signal's states."""
    return frozenset(f"{signal}/{state}" for state in sums.STATES[signal])


# The sums and thresholds of the diagnoses that judge a tile.
_QUEUE, _ADMISSION, _GRAPHS = map(_states_of, ("queue", "admission", "cuda_graph"))
_RETRACTIONS, _RESERVE = frozenset({"retraction_events"}), frozenset({"reserve_lower_gb", "reserve_upper_gb"})


def render(sidecar: Sidecar, *, still: bool = False, whole: bool = False) -> str:
    """Return the page as HTML. The browser reloads it, unless it is `still` or shows all arguments (`whole`)."""
    with sidecar.view() as now:
        judged = sidecar.judged(now)
        shown = live(sidecar, judged, now)
        profile = sidecar.watch.server.profile
    last = judged.starts[-1].arguments if judged.starts else {}
    shown |= {
        "refresh": None if still or whole else REFRESH_SECONDS,
        "arguments": flags.sent(last, whole=whole),
        "shows_all": whole,
    }
    return pages.page(judged, profile, live=shown)


def as_json(sidecar: Sidecar, *, whole: bool = False) -> bytes:
    """Return the findings as JSON in the report's schema (docs/report.schema.json); an unknown value is `null`."""
    with sidecar.view() as now:
        judged = sidecar.judged(now)
    found = document(judged)
    found["server"]["args"] = flags.sent(found["server"]["args"], whole=whole)
    return (json.dumps(found, indent=2, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")


def live(sidecar: Sidecar, judged: findings.Judgement, now: float) -> dict[str, Any]:
    """Return the parts of the page that only a running server has. Of a server that is away no figure is shown."""
    watch = sidecar.watch
    view = watch.measured.view if watch.measured is not None else watch.view(now)
    away = bool(view.down) or view.stopped or view.starting or bool(watch.server.ended)
    passed, not_judged = words.checks(judged)
    tiles = _Figures(watch, view, judged, now).tiles()
    return {
        "now": now,
        "clock": dt.datetime.fromtimestamp(now, dt.timezone.utc),
        "since": watch.words.since if watch.words.verdict else None,
        "remark": remark(judged.verdict, view),
        "is_away": away,
        "tiles": [replace(each, value=NOT_REPORTED, tone="", note="", share="") for each in tiles] if away else tiles,
        "ranks": [] if away else ranks(watch),
        "sources": [*sources(sidecar)],
        "passed": {} if away else passed,
        "not_judged": not_judged,  # by the source that is missing
    }


def remark(verdict: str, view: View) -> str:
    """Return the evidence for a verdict that has no finding, in words."""
    profile = view.profile
    return _REMARKS.get(verdict, "").format(
        served=view.served,
        seconds=findings.duration(min(view.served, profile.window_seconds)),
        least=profile.enough_serving_seconds,
        seen=view.totals["lines"],
        fewest=profile.enough_observations,
        minutes=profile.window_seconds / 60,
    )


_UNKNOWN_FORMAT = "SGLang's words are in an unknown format; the exporter's own log has the first line"


def sources(sidecar: Sidecar) -> Iterator[tuple[str, str, str]]:
    """Give the metrics and each log: its name, its health and its trouble."""
    yield _metrics_source(sidecar)
    if sidecar.log is None:
        yield "log", "not configured (--log-file)", ""
        return
    has_batches = any(rank.logged_at > -inf for rank in sidecar.watch.server.schedulers.values())
    following = "following" if has_batches else f"following; {_LEVEL_HINT}"
    for file in sidecar.log.files:
        troubles = [
            "" if file.up else file.words,
            f"{file.lost} of its rotated files gone unread" if file.lost else "",
            # The line itself may have a client's words.
            f"no line can be read: {_UNKNOWN_FORMAT}" if file.unread else "",
        ]
        yield file.path, following if file.up else "", "; ".join(filter(None, troubles))


def _metrics_source(sidecar: Sidecar) -> tuple[str, str, str]:
    config, watch = sidecar.config, sidecar.watch
    health, trouble = f"scraped in {1000 * (sidecar.scrape_seconds or 0):.0f} ms", ""
    if config.sglang_url is None:
        health = "not configured (--sglang-url)"
    elif watch.failure is not None:
        health, trouble = "", watch.failure.message
    elif watch.is_up is None:
        health = "not scraped yet"
    elif watch.server.counters.alternate:
        trouble = TWO_SERVERS
    return config.metrics_url or "metrics", health, trouble


def count(figure: float | None) -> str:
    """Return a count as text."""
    return NOT_REPORTED if figure is None else f"{figure:,.0f}"


def ratio(figure: float | None) -> str:
    """Return a share of the KV cache as text."""
    return NOT_REPORTED if figure is None else f"{figure:.2f}"


def percent(share: float) -> str:
    """Return a share as text."""
    return f"{100 * share:.0f} %"


def ranks(watch: Watch) -> list[tuple[str, ...]]:
    """Return name, queue, running requests, limit and token usage of each DP rank; none for a single scheduler."""
    server = watch.server
    if len(server.schedulers) < 2:
        return []
    return [
        (
            NOT_REPORTED if dp is None else f"DP{dp}",
            *map(count, (rank.shown.queued, rank.shown.running, server.facts.limit(dp))),
            ratio(rank.shown.usage),
        )
        for dp, rank in by_rank(server.schedulers).items()
    ]


@dataclass(frozen=True)
class _Figures:
    """The tiles of the page: each of the guide's figures now and over the last hour, shaded while an alert fires."""

    watch: Watch
    view: View
    judged: findings.Judgement
    now: float

    def tiles(self) -> list[pages.Tile]:
        """Return the tiles in reading order."""
        given_up = self.view.given_up_share
        return [
            self._queue(), self._usage(), self._running(), self._throughput(), self._coverage(), self._retractions(),
            *([] if given_up is None else [pages.Tile("Requests given up", percent(given_up))]), self._reserve(),
        ]  # fmt: skip

    @cached_property
    def _sums(self) -> list[tuple[float, sums.Totals]]:
        return [each for each in self.watch.server.buckets if each[0] > self.now - MOST_SECONDS]

    @cached_property
    def _chart(self) -> pages.Chart:
        now, first = self.now, self._sums[0][0] if self._sums else self.now
        begin = min(max(first, now - MOST_SECONDS), now - LEAST_SECONDS)
        firing = [alert for alert in self.watch.clocks.firing if alert.severity != "info"]
        worst = max((alert.severity for alert in firing), key=findings.URGENCY.__getitem__, default="")
        since = max(min((alert.at for alert in firing), default=now), begin)
        return pages.Chart(begin, now, shades=((since, now, worst, ""),) if firing else ())

    def _past(self, of: Callable[[sums.Totals], float | None]) -> list[pages.Value]:
        """Return a figure over time; it is None where the exporter did not run."""
        values: list[pages.Value] = []
        last = inf
        for begin, totals in self._sums:
            if begin - last > GAP_SECONDS:
                values.append((last + sums.BUCKET_SECONDS, None))
            values.append((begin + sums.BUCKET_SECONDS / 2, of(totals)))
            last = begin
        return values

    def _of_all(self, figure: str) -> list[pages.Value]:
        """Return a figure of all schedulers together over time; on an idle server it is 0."""

        def of(totals: sums.Totals) -> float | None:
            mean = totals.mean(figure)
            if mean is None:
                return 0.0 if totals["queue/idle"] else None
            return mean * max(len(totals.under("serves")), 1)

        return self._past(of)

    def _drawn(
        self, tile: pages.Tile, values: list[pages.Value], words: Callable[[float], str] = count, **bounds: Any
    ) -> pages.Tile:
        """Return the tile with a picture of its past, if any value of the past is known."""
        known = [(at, value) for at, value in values if value is not None and isfinite(value)]
        if not known:
            return tile
        low, high = (words(end(value for _, value in known)) for end in (min, max))
        past = f"{self._length(known[0][0])}: {low}{f' to {high}' if low != high else ''}"
        return replace(tile, picture=self._chart.strip(values, f"{tile.name}, {past}", **bounds)[0], past=past)

    def _length(self, first: float) -> str:
        return f"last {findings.duration(max(self.now - first + sums.BUCKET_SECONDS / 2, 1.0))}"

    def _states(self, signal: str) -> set[str]:
        """Return the states in which a signal is now."""
        recent = self.watch.server.window(NOW_SECONDS).under(signal)
        return {state for state, seconds in recent.items() if seconds > 0}

    def _now(self, figure: str) -> float | None:
        """Return a present figure of all schedulers; on an idle server it is 0."""
        return 0.0 if self._states("queue") == {"idle"} else self.judged.last[figure]

    def _tile(self, name: str, value: str, healthy: str, about: frozenset[str]) -> pages.Tile:
        """Return a tile that is good or bad as the judgement has it, by the diagnoses `about` its figure."""
        tone, share = words.mark(self.judged, about)
        return pages.Tile(name, value, healthy, tone, share=share)

    def _queue(self) -> pages.Tile:
        profile, queued = self.view.profile, self._now("queued_requests")
        note = f"~{self.view.wait:.0f} s wait" if queued and self.view.wait else ""
        # For a queue that is shorter than its range no diagnosis stands: only an empty one shows that clients are slow.
        tone, share = words.mark(self.judged, _QUEUE, between="queue/below_range")
        tile = pages.Tile("Queued requests", count(queued), profile.healthy["queue"], tone, note, share)
        # Where the wait is judged, the queue has no healthy length.
        band = (profile.queue_lower, profile.queue_upper) if profile.queue_wait_seconds is None else (None, None)
        return self._drawn(tile, self._of_all("queued"), band=band)

    def _usage(self) -> pages.Tile:
        target, usage = self.view.profile.token_usage_target, self.judged.last["token_usage"]
        tile = self._tile("Token usage", ratio(usage), self.view.profile.healthy["usage"], _ADMISSION)
        return self._drawn(tile, self._past(lambda totals: totals.mean("usage")), ratio, band=(target, None), least=1.0)

    def _running(self) -> pages.Tile:
        server, running = self.watch.server, self._now("running_requests")
        limit, batches = server.running_limit, server.facts.micro_batches
        of = f", in one of {batches} micro batches" if batches > 1 else ""
        note = f"of {limit:,.0f}{of}" if running is not None and limit else ""
        near = f"near {limit:,.0f} while requests wait" if limit else "near the limit while requests wait"
        return self._drawn(pages.Tile("Running requests", count(running), near, note=note), self._of_all("running"))

    def _throughput(self) -> pages.Tile:
        speeds = [
            speed for rank in self.watch.server.schedulers.values() if (speed := rank.shown.throughput) is not None
        ]
        now = sum(speeds) if speeds else None
        if self._states("queue") == {"idle"} or self.view.stuck is not None:
            now = 0.0
        return self._drawn(pages.Tile("Generated tokens/s", count(now)), self._of_all("throughput"))

    def _coverage(self) -> pages.Tile:
        view, name, healthy = self.view, "CUDA graph coverage", self.view.profile.healthy["coverage"]
        if view.facts.without_graph == "unsupported":
            return pages.Tile(name, "decodes nothing" if view.facts.role == "prefill" else "none on this device")
        if view.facts.without_graph:
            return self._tile(name, "off", healthy, _GRAPHS)
        share, least = view.share("cuda_graph", "replayed"), 1 - view.profile.frequent_share
        tile = self._tile(name, NOT_REPORTED if share is None else percent(share), healthy, _GRAPHS)
        values = self._past(lambda totals: totals.share("cuda_graph", "replayed"))
        return self._drawn(tile, values, percent, band=(least, None), least=1.0)

    def _retractions(self) -> pages.Tile:
        view, values = self.view, self._past(lambda totals: totals["retraction_events"])
        tile = self._tile("Retractions a minute", NOT_REPORTED, view.profile.healthy["retractions"], _RETRACTIONS)
        if not values:
            return tile
        past = f"{self._length(values[0][0])}: {sum(value or 0.0 for _, value in values):,.0f} in all"
        picture, _ = self._chart.strip(values, f"Retractions, {past}", bars=True)
        return replace(tile, value=f"{view.retractions_a_minute:.1f}", picture=picture, past=past)

    def _reserve(self) -> pages.Tile:
        facts, profile, name = self.view.facts, self.view.profile, "GPU memory left at start"
        reserve, upper = facts.reserve_gb, profile.reserve_upper_gb
        healthy = (
            f"{profile.reserve_lower_gb:g} GB or more"
            if upper == inf
            else f"{profile.reserve_lower_gb:g} to {profile.reserve_good_gb:g} GB"
        )
        if reserve is None:
            return pages.Tile(name, "no GPU") if facts.is_cpu else pages.Tile(name, NOT_REPORTED, healthy)
        return self._tile(name, f"{reserve:.1f} GB", healthy, _RESERVE)


# Runbooks, so that the link in a notification works without the internet. Only runbooks of known alerts are served, and
# no part of a request reaches a file.

_PLACEHOLDER = re.compile(r"\b(EXPORTER|SGLANG|LOG)\b")
_HOST = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::\d{1,5})?")
_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")


def _render_runbook(sidecar: Sidecar, alert: str, host: str) -> str | None:
    """Return the runbook of an alert or a diagnosis as HTML, or None for an unknown name.

    Its commands have the addresses and the log of this server. `host` is the address of the request, which Prometheus
    calls `instance`.
    """
    row = runbooks.BY_ALERT.get(alert) or next((each for each in runbooks.ALERTS if each.id == alert), None)
    if row is None:
        return None
    with sidecar.view() as now:
        judged = sidecar.judged(now)
        profile = sidecar.watch.server.profile
    figure = judged.checks.get(row.id)
    present = next((each for each in judged.findings if each.diagnosis == row.id), None)
    return _as_page(
        runbooks.page(row.alert, profile),
        _known(host, sidecar),
        tone=findings.TONES[row.severity],
        sections=runbooks.SECTIONS,
        present=present,
        # It was measured and does not hold. Other diagnoses only Prometheus can see.
        absent=present is None and figure is not None and not figure.holds,
    )


def _render_runbooks(host: str) -> str:
    """Return the list of all runbooks as HTML."""
    return _as_page(runbooks.index(), _known(host), tone="", sections=(), present=None, absent=False)


def _known(host: str, sidecar: Sidecar | None = None) -> dict[str, str]:
    """Return the known values of the placeholders in commands, quoted for a shell."""
    known = {"EXPORTER": host} if _HOST.fullmatch(host) else {}
    if sidecar is None:
        return known
    url = sidecar.config.sglang_url
    if url is not None and "@" not in url:
        known["SGLANG"] = url.rstrip("/")
    paths = [file.path for file in sidecar.log.files] if sidecar.log is not None else []
    if len(paths) == 1 and paths[0] != "-":
        known["LOG"] = shlex.quote(str(Path(paths[0]).absolute()))
    return known


@cache
def _parsed(text: str) -> tuple[Token, ...]:
    return tuple(_MARKDOWN.parse(text))


def _as_page(text: str, known: Mapping[str, str], **shown: object) -> str:
    """Return Markdown as a page: title, first paragraph, the part that is `shown` of the server, and the rest."""
    tokens = [_shown(token, known) for token in _parsed(text)]
    for heading, title in pairwise(tokens):
        if heading.type == "heading_open" and title.content in runbooks.SECTIONS:
            heading.attrSet("id", title.content.lower())
    end = next(number for number, token in enumerate(tokens) if token.type == "paragraph_close") + 1
    if tokens[end].type == "table_open":
        tokens[end].attrSet("class", "facts")
    lead, body = (_MARKDOWN.renderer.render(part, _MARKDOWN.options, {}) for part in (tokens[3:end], tokens[end:]))
    return pages.render("runbook.html", title=tokens[1].content, lead=lead, body=body, **shown)


def _shown(token: Token, known: Mapping[str, str]) -> Token:
    """Return a copy of a token with placeholders filled in and links between pages without `.md`."""
    children = None if token.children is None else [_shown(child, known) for child in token.children]
    changed = token.copy(children=children, attrs=dict(token.attrs))
    if token.type in {"fence", "code_inline"}:
        changed.content = _PLACEHOLDER.sub(lambda match: known.get(match[1], match[1]), token.content)
    elif token.type == "link_open":
        changed.attrSet("href", str(token.attrs["href"]).removesuffix(".md"))
    return changed


# Routes

_Endpoint = TypeVar("_Endpoint", bound="Callable[..., Any]")
# The parameter is declared here: as a parameter of the function it would add a 422 response that cannot happen.
_ALERT = {"parameters": [{"name": "alert", "in": "path", "required": True, "schema": {"type": "string"}}]}
_FULL: dict[int | str, dict[str, Any]] = {503: {"description": "Too many wait already"}}
_ABSENT = {404: {"description": "No such alert", "content": {"application/json": {}}}}


def make_pages(sidecar: Sidecar, lane: Lane) -> FastAPI:
    """Return the application; each page is written in the thread of `lane`."""
    app = FastAPI(
        title="sglang-tuning-exporter", version=__version__, openapi_url=None, redirect_slashes=False, responses=_FULL
    )

    def get(path: str, **described: Any) -> Callable[[_Endpoint], _Endpoint]:
        """Decorate a function that answers GET and HEAD. In the schema, two methods would need two operation names."""

        def decorate(endpoint: _Endpoint) -> _Endpoint:
            app.api_route(path, methods=["HEAD"], **{**described, "include_in_schema": False})(endpoint)
            return app.get(path, **described)(endpoint)

        return decorate

    @get("/api/v1/findings")
    async def findings(request: Request) -> Response:
        text = await lane.run(lambda: as_json(sidecar, whole=_wants_all(request)))
        return Response(text, media_type="application/json")

    @get("/", response_class=HTMLResponse)
    async def landing(request: Request) -> Response:
        still, whole = "still" in request.query_params, _wants_all(request)
        return _html(await lane.run(lambda: render(sidecar, still=still, whole=whole)))

    @get("/runbooks", status_code=307, response_class=RedirectResponse)
    async def folder() -> Response:
        return RedirectResponse("runbooks/")  # the links of the list are relative to this path

    @get("/runbooks/", response_class=HTMLResponse)
    async def index(request: Request) -> Response:
        return _html(await lane.run(lambda: _render_runbooks(request.headers.get("Host", ""))))

    @get("/runbooks/{alert}", response_class=HTMLResponse, responses=_ABSENT, openapi_extra=_ALERT)
    async def runbook(request: Request) -> Response:
        alert, host = str(request.path_params["alert"]), request.headers.get("Host", "")
        text = await lane.run(lambda: _render_runbook(sidecar, alert, host))
        if text is None:
            raise HTTPException(404)
        return _html(text)

    return app


def _wants_all(request: Request) -> bool:
    return request.query_params.get("all") == "1"


def _html(text: str) -> Response:
    return HTMLResponse(text.encode("utf-8", "backslashreplace"))  # names and paths may hold lone surrogates
