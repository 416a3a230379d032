"""The FastAPI application of a `Sidecar`. Read-only: GET and HEAD; no parameter reaches a file or a socket."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse
from prometheus_client.process_collector import ProcessCollector

from sglang_tuning_exporter import __version__
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.serve import formats
from sglang_tuning_exporter.serve.api import render as render_findings
from sglang_tuning_exporter.serve.metrics import collect
from sglang_tuning_exporter.serve.metrics.families import text_format
from sglang_tuning_exporter.serve.metrics.sources import web, web_config_up
from sglang_tuning_exporter.serve.security.guard import Guard

if TYPE_CHECKING:
    from sglang_tuning_exporter.serve.security.active_config import ActiveConfig

TIMEOUT_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"
# Kept of the scraper's timeout for rendering and the way back.
MARGIN_SECONDS = 0.5
MARGIN_SHARE = 0.1
_Endpoint = TypeVar("_Endpoint", bound="Callable[..., Any]")


def scrape_timeout(announced: str | None, most: float) -> float:
    """Return the seconds that a scrape of SGLang may take: the scraper's announced timeout less a margin, at most `most`.

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

    Handlers that wait for a scrape or for the state are plain functions and run in a thread; health runs in the event loop.
    """
    app = FastAPI(title="sglang-tuning-exporter", version=__version__, openapi_url=None, redirect_slashes=False)
    is_tls, process = web_config is not None and web_config.is_tls, ProcessCollector(registry=None)
    app.add_middleware(Guard, web_config=web_config)

    @get_or_head(app, "/metrics", response_class=PlainTextResponse)
    def metrics(request: Request) -> Response:
        timeout = scrape_timeout(request.headers.get(TIMEOUT_HEADER), sidecar.config.scrape_timeout)
        native = sidecar.scrape(timeout)
        families = [*collect(sidecar), web(sidecar.config.external_url, is_tls=is_tls), *process.collect()]
        if web_config is not None:
            families.append(web_config_up(is_up=web_config.is_up))
        return formats.response(text_format(families) + native, request.headers)

    @get_or_head(app, "/api/v1/findings")
    def findings() -> Response:
        return Response(render_findings(sidecar), media_type="application/json")

    @get_or_head(app, "/-/healthy", response_class=PlainTextResponse)
    async def healthy() -> Response:
        # For a plain str FastAPI would build a model, which loads Pydantic v1: a megabyte.
        return PlainTextResponse("sglang-tuning-exporter is healthy.\n")

    @get_or_head(app, "/-/ready", response_class=PlainTextResponse, responses={503: {"content": {"text/plain": {}}}})
    async def ready() -> Response:
        if sidecar.running:
            return PlainTextResponse("sglang-tuning-exporter is ready.\n")
        return PlainTextResponse("sglang-tuning-exporter is starting or ending.\n", status_code=503)

    app.include_router(_pages(sidecar))
    return app


def get_or_head(routes: FastAPI | APIRouter, path: str, **described: Any) -> Callable[[_Endpoint], _Endpoint]:
    """Decorate a function that answers GET and HEAD; `described` are the arguments of FastAPI's `get`."""

    def decorate(endpoint: _Endpoint) -> _Endpoint:
        # In the schema, two methods would need two operation names.
        routes.api_route(path, methods=["HEAD"], **{**described, "include_in_schema": False})(endpoint)
        return routes.get(path, **described)(endpoint)

    return decorate


def _pages(sidecar: Sidecar) -> APIRouter:
    """Return the routes of the HTML pages.

    Templates and Markdown take 5 MB and are loaded at the first request: most sidecars are only scraped.
    """
    routes = APIRouter()
    # Declared here: a parameter of the function would add a 422 response that cannot happen.
    named = {"name": "alert", "in": "path", "required": True, "schema": {"type": "string"}}
    absent = {"description": "No such alert", "content": {"application/json": {}}}

    @get_or_head(routes, "/", response_class=HTMLResponse)
    def page(request: Request) -> Response:
        from sglang_tuning_exporter.serve.pages.page import render

        return _html(render(sidecar, still="still" in request.query_params))

    @get_or_head(routes, "/runbooks", status_code=307, response_class=RedirectResponse)
    async def folder() -> Response:
        return RedirectResponse("runbooks/")  # the links there are relative to it

    @get_or_head(routes, "/runbooks/", response_class=HTMLResponse)
    def index(request: Request) -> Response:
        from sglang_tuning_exporter.serve.pages.runbooks import render_index

        return _html(render_index(request.headers.get("Host", "")))

    @get_or_head(
        routes,
        "/runbooks/{alert}",
        response_class=HTMLResponse,
        responses={404: absent},
        openapi_extra={"parameters": [named]},
    )
    def runbook(request: Request) -> Response:
        from sglang_tuning_exporter.serve.pages.runbooks import render

        text = render(sidecar, str(request.path_params["alert"]), request.headers.get("Host", ""))
        if text is None:
            raise HTTPException(404)
        return _html(text)

    return routes


def _html(text: str) -> Response:
    return HTMLResponse(text.encode("utf-8", "backslashreplace"))  # names and paths may hold lone surrogates
