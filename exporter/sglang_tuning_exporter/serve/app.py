"""The HTTP application of a `Sidecar`. It answers GET and HEAD alone, and no parameter reaches a file or a socket.

Starlette alone answers scrapes and health checks. FastAPI answers pages and API: it takes 15 MB, and most sidecars are
only scraped, so it is loaded at the first request for a page.
"""

from __future__ import annotations

import gzip
import re
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from prometheus_client.exposition import generate_latest
from prometheus_client.process_collector import ProcessCollector
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_tuning_exporter.collect.sidecar import FRESH_SECONDS, Sidecar, passed_on
from sglang_tuning_exporter.serve.guard import Guard, Lane, ended
from sglang_tuning_exporter.serve.metrics import collect, serving
from sglang_tuning_exporter.serve.metrics.families import text_format

if TYPE_CHECKING:
    from sglang_tuning_exporter.serve.web_config import ActiveConfig

TIMEOUT_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"
# The part of the scraper's timeout that is kept for rendering and for the way back.
MARGIN_SECONDS = 0.5
MARGIN_SHARE = 0.1
# How many scrapes and pages may wait for the thread that writes them. A connection has one request at a time, so that
# no more scrapes than connections wait.
MOST_SCRAPES, MOST_PAGES = 1024, 16


def scrape_timeout(announced: str | None, most: float) -> float:
    """Return the seconds to wait for SGLang: the timeout that the scraper announced less a margin, at most `most`.

    An invalid timeout counts as none.
    """
    try:
        seconds = float(announced or "")
    except ValueError:
        return most
    if not seconds > 0:
        return most
    return min(most, max(seconds - min(MARGIN_SECONDS, MARGIN_SHARE * seconds), 0.05))


def make_app(sidecar: Sidecar, web_config: ActiveConfig | None = None) -> ASGIApp:
    """Return the application; a `web_config` adds authentication and rate limits.

    One thread writes scrapes, another one pages, and the event loop answers health checks: none waits for another.
    """
    is_tls, process = web_config is not None and web_config.is_tls, ProcessCollector(registry=None)
    answered: Counter[int] = Counter()
    scrapes = Lane("scrapes", MOST_SCRAPES)

    def written(series: str, headers: Mapping[str, str]) -> Response:
        is_up = None if web_config is None else web_config.is_up
        own = serving(sidecar.config.external_url, answered, is_tls=is_tls, is_up=is_up)
        families = [*collect(sidecar), *(family for family in own if family.samples)]
        return response(text_format(families) + generate_latest(process).decode() + series, headers)

    async def metrics(request: Request) -> Response:
        patience = scrape_timeout(request.headers.get(TIMEOUT_HEADER), sidecar.config.scrape_timeout)
        series = await _scraped(sidecar, patience)
        return await scrapes.run(lambda: written(series, request.headers))

    async def healthy(_: Request) -> Response:
        return PlainTextResponse("sglang-tuning-exporter is healthy.\n")

    async def ready(_: Request) -> Response:
        if sidecar.running:
            return PlainTextResponse("sglang-tuning-exporter is ready.\n")
        return PlainTextResponse("sglang-tuning-exporter is starting or ending.\n", status_code=503)

    routes = [
        Route("/metrics", metrics),
        Route("/-/healthy", healthy),
        Route("/-/ready", ready),
        Mount("", _pages(sidecar)),
    ]
    return Guard(Router(routes, redirect_slashes=False), web_config, answered)


def _pages(sidecar: Sidecar) -> ASGIApp:
    """Return an application that loads the one of the pages at the first request for a page."""
    lane, made = Lane("pages", MOST_PAGES), list[ASGIApp]()

    def make() -> None:
        from sglang_tuning_exporter.serve.pages import make_pages

        made[:] = made or [make_pages(sidecar, lane)]

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if not made:
            await lane.run(make)
        await made[0](scope, receive, send)

    return answer


async def _scraped(sidecar: Sidecar, patience: float) -> str:
    """Return SGLang's series as `Sidecar.scrape` does, but wait in the event loop and not in a thread."""
    begin = time.monotonic()
    read, asked = sidecar.refresh()
    if asked is not None:
        await ended(asked, patience)
    if read is not None:
        await ended(read, max(begin + min(FRESH_SECONDS, patience) - time.monotonic(), 0.0))
    return passed_on(asked)


TEXT = "text/plain; version=0.0.4; charset=utf-8"
_WEIGHT = re.compile(r"[01](?:\.\d{0,3})?")


def response(page: str, headers: Mapping[str, str]) -> Response:
    """Return a metrics page as text 0.0.4, compressed where the request headers accept gzip.

    Text 0.0.4 is what every version of Prometheus reads, so `Accept` is not asked.
    """
    body, answer = page.encode(), {"Content-Type": TEXT, "Vary": "Accept-Encoding"}
    if _accepts_gzip(headers.get("Accept-Encoding", "")):
        body = gzip.compress(body, compresslevel=1, mtime=0)
        answer["Content-Encoding"] = "gzip"
    return Response(body, headers=answer)


def _accepts_gzip(header: str) -> bool:
    """Whether an `Accept-Encoding` header names gzip with a weight above 0. A weight that is no number counts as 0."""
    for item in header.lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        if name == "gzip":
            weight = next((text[2:] for text in parameters if text.startswith("q=")), "1")
            return _WEIGHT.fullmatch(weight) is not None and float(weight) > 0
    return False
