"""The FastAPI application of a `Sidecar`. Read-only: GET and HEAD; no parameter reaches a file or a socket."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse
from prometheus_client.process_collector import ProcessCollector

from sglang_tuning_exporter import __version__
from sglang_tuning_exporter.collect.sidecar import FRESH_SECONDS, Sidecar, passed_on
from sglang_tuning_exporter.serve import formats
from sglang_tuning_exporter.serve.metrics import collect
from sglang_tuning_exporter.serve.metrics.families import text_format
from sglang_tuning_exporter.serve.metrics.sources import answers, web, web_config_up
from sglang_tuning_exporter.serve.security.guard import Guard
from sglang_tuning_exporter.serve.security.lane import Lane

if TYPE_CHECKING:
    from sglang_tuning_exporter.serve.security.active_config import ActiveConfig

TIMEOUT_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"
# Kept of the scraper's timeout for rendering and the way back.
MARGIN_SECONDS = 0.5
MARGIN_SHARE = 0.1
# That wait for the thread that writes them. Each connection has one request at a time, so no more scrapes than connections can wait.
MOST_SCRAPES, MOST_PAGES = 1024, 16
_Endpoint = TypeVar("_Endpoint", bound="Callable[..., Any]")


def scrape_timeout(announced: str | None, most: float) -> float:
    """Return the seconds that a scraper waits for SGLang: its announced timeout less a margin, at most `most`.

    An invalid value counts as not announced.
    """
    try:
        seconds = float(announced or "")
    except ValueError:
        return most
    if not seconds > 0:
        return most
    return min(most, max(seconds - min(MARGIN_SECONDS, MARGIN_SHARE * seconds), 0.05))


def make_app(sidecar: Sidecar, web_config: ActiveConfig | None = None) -> FastAPI:
    """Return the application; a `web_config` adds authentication and rate limits.

    Scrapes and pages are written in a thread each, and health in the event loop, so that none of them waits for another.
    """
    app = FastAPI(title="sglang-tuning-exporter", version=__version__, openapi_url=None, redirect_slashes=False)
    is_tls, process = web_config is not None and web_config.is_tls, ProcessCollector(registry=None)
    answered: Counter[int] = Counter()
    app.add_middleware(Guard, web_config=web_config, answered=answered)
    scrapes, pages = Lane("scrapes", MOST_SCRAPES), Lane("pages", MOST_PAGES)

    def written(series: str, headers: Mapping[str, str]) -> Response:
        families = [
            *collect(sidecar),
            web(sidecar.config.external_url, is_tls=is_tls),
            answers(answered),
            *process.collect(),
        ]
        if web_config is not None:
            families.append(web_config_up(is_up=web_config.is_up))
        return formats.response(text_format(families) + series, headers)

    @get_or_head(app, "/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        patience = scrape_timeout(request.headers.get(TIMEOUT_HEADER), sidecar.config.scrape_timeout)
        series = await _scraped(sidecar, patience)
        return await scrapes.run(lambda: written(series, request.headers))

    @get_or_head(app, "/api/v1/findings")
    async def findings(request: Request) -> Response:
        def write() -> bytes:
            from sglang_tuning_exporter.serve.api import render  # the report's words, which /metrics does not need

            return render(sidecar, whole=_wants_all(request))

        return Response(await pages.run(write), media_type="application/json")

    @get_or_head(app, "/-/healthy", response_class=PlainTextResponse)
    async def healthy() -> Response:
        # For a plain str FastAPI would build a model, which loads Pydantic v1: a megabyte.
        return PlainTextResponse("sglang-tuning-exporter is healthy.\n")

    @get_or_head(app, "/-/ready", response_class=PlainTextResponse, responses={503: {"content": {"text/plain": {}}}})
    async def ready() -> Response:
        if sidecar.running:
            return PlainTextResponse("sglang-tuning-exporter is ready.\n")
        return PlainTextResponse("sglang-tuning-exporter is starting or ending.\n", status_code=503)

    app.include_router(_pages(sidecar, pages))
    return app


def get_or_head(routes: FastAPI | APIRouter, path: str, **described: Any) -> Callable[[_Endpoint], _Endpoint]:
    """Decorate a function that answers GET and HEAD; `described` are the arguments of FastAPI's `get`."""

    def decorate(endpoint: _Endpoint) -> _Endpoint:
        # In the schema, two methods would need two operation names.
        routes.api_route(path, methods=["HEAD"], **{**described, "include_in_schema": False})(endpoint)
        return routes.get(path, **described)(endpoint)

    return decorate


async def _scraped(sidecar: Sidecar, patience: float) -> str:
    """Return SGLang's series as `Sidecar.scrape` does, without a thread that waits."""
    begin = time.monotonic()
    read, asked = sidecar.refresh()
    if asked is not None:
        await asyncio.wait({asyncio.wrap_future(asked)}, timeout=patience)
    if read is not None:
        left = begin + min(FRESH_SECONDS, patience) - time.monotonic()
        await asyncio.wait({asyncio.wrap_future(read)}, timeout=max(left, 0.0))
    return passed_on(asked)


def _wants_all(request: Request) -> bool:
    return request.query_params.get("all") == "1"


def _pages(sidecar: Sidecar, pages: Lane) -> APIRouter:
    """Return the routes of the HTML pages.

    Templates and Markdown take 5 MB and are loaded at the first request: most sidecars are only scraped.
    """
    routes = APIRouter()
    # Declared here: a parameter of the function would add a 422 response that cannot happen.
    named = {"name": "alert", "in": "path", "required": True, "schema": {"type": "string"}}
    absent = {"description": "No such alert", "content": {"application/json": {}}}

    @get_or_head(routes, "/", response_class=HTMLResponse)
    async def page(request: Request) -> Response:
        def write() -> str:
            from sglang_tuning_exporter.serve.pages.page import render

            return render(sidecar, still="still" in request.query_params, whole=_wants_all(request))

        return _html(await pages.run(write))

    @get_or_head(routes, "/runbooks", status_code=307, response_class=RedirectResponse)
    async def folder() -> Response:
        return RedirectResponse("runbooks/")  # the links there are relative to it

    @get_or_head(routes, "/runbooks/", response_class=HTMLResponse)
    async def index(request: Request) -> Response:
        def write() -> str:
            from sglang_tuning_exporter.serve.pages.runbooks import render_index

            return render_index(request.headers.get("Host", ""))

        return _html(await pages.run(write))

    @get_or_head(
        routes,
        "/runbooks/{alert}",
        response_class=HTMLResponse,
        responses={404: absent},
        openapi_extra={"parameters": [named]},
    )
    async def runbook(request: Request) -> Response:
        def write() -> str | None:
            from sglang_tuning_exporter.serve.pages.runbooks import render

            return render(sidecar, str(request.path_params["alert"]), request.headers.get("Host", ""))

        text = await pages.run(write)
        if text is None:
            raise HTTPException(404)
        return _html(text)

    return routes


def _html(text: str) -> Response:
    return HTMLResponse(text.encode("utf-8", "backslashreplace"))  # names and paths may hold lone surrogates
