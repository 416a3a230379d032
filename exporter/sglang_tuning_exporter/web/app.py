"""The FastAPI application over a `Watcher`. Reads only: GET and HEAD, no parameter reaches a file or a socket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse
from starlette.datastructures import MutableHeaders

from sglang_tuning_exporter import __version__
from sglang_tuning_exporter.metrics import page as own_page
from sglang_tuning_exporter.metrics import registry
from sglang_tuning_exporter.web.findings import render as render_findings

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from sglang_tuning_exporter.watcher import Watcher

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
TIMEOUT_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"
# What is kept back of the scraper's patience for rendering and the way home.
MARGIN_SECONDS = 0.5
MARGIN_SHARE = 0.1
_SAFE = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "Cache-Control": "no-store",
}


def patience(announced: str | None, most: float) -> float:
    """Give the seconds that a scrape of SGLang may take: what the scraper announced less a margin, at most `most`.

    Nonsense counts as not announced.
    """
    try:
        seconds = float(announced or "")
    except ValueError:
        return most
    if not seconds > 0:
        return most
    return min(most, max(seconds - min(MARGIN_SECONDS, MARGIN_SHARE * seconds), 0.05))


def exposition(watcher: Watcher, families: CollectorRegistry, timeout: float) -> bytes:
    """One page for Prometheus: SGLang scraped now, our families, and SGLang's own series behind them."""
    native = watcher.scrape(timeout)
    return (own_page(families) + native).encode()


class SafeHeaders:
    """Adds the headers of `_SAFE` to every answer. FastAPI's own way to say so runs a task and a queue for each request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and its answer back."""

        async def safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_SAFE)
            await send(message)

        await self._app(scope, receive, safely)


def make_app(watcher: Watcher) -> FastAPI:
    """Make the application.

    What waits for a scrape or for the state is a plain function and holds a thread; health is told by the loop itself.
    """
    app = FastAPI(title="sglang-tuning-exporter", version=__version__, openapi_url=None, redirect_slashes=False)
    families = registry(watcher)

    app.add_middleware(SafeHeaders)

    @app.api_route("/metrics", methods=["GET", "HEAD"], response_class=PlainTextResponse)
    def metrics(request: Request) -> Response:
        timeout = patience(request.headers.get(TIMEOUT_HEADER), watcher.config.scrape_timeout)
        return Response(exposition(watcher, families, timeout), media_type=TEXT_FORMAT)

    @app.api_route("/api/v1/findings", methods=["GET", "HEAD"])
    def findings() -> Response:
        return Response(render_findings(watcher), media_type="application/json")

    @app.api_route("/-/healthy", methods=["GET", "HEAD"], response_class=PlainTextResponse)
    async def healthy() -> str:
        return "sglang-tuning-exporter is healthy.\n"

    @app.api_route("/-/ready", methods=["GET", "HEAD"], response_class=PlainTextResponse)
    async def ready() -> Response:
        if watcher.running:
            return PlainTextResponse("sglang-tuning-exporter is ready.\n")
        return PlainTextResponse("sglang-tuning-exporter is starting or ending.\n", status_code=503)

    app.include_router(_pages(watcher))
    return app


def _pages(watcher: Watcher) -> APIRouter:
    """Make the routes that people read.

    What writes them is loaded with the first reader: templates and Markdown take 5 MB, and most sidecars are only scraped.
    """
    routes = APIRouter()

    @routes.api_route("/", methods=["GET", "HEAD"])
    def page(request: Request) -> Response:
        from sglang_tuning_exporter.web.page import render  # noqa: PLC0415

        return _html(render(watcher, still="still" in request.query_params))

    @routes.api_route("/runbooks", methods=["GET", "HEAD"])
    async def folder() -> Response:
        return RedirectResponse("runbooks/")  # the links there are relative to it

    @routes.api_route("/runbooks/", methods=["GET", "HEAD"])
    def index(request: Request) -> Response:
        from sglang_tuning_exporter.web.runbooks import render_index  # noqa: PLC0415

        return _html(render_index(request.headers.get("Host", "")))

    @routes.api_route("/runbooks/{alert}", methods=["GET", "HEAD"])
    def runbook(alert: str, request: Request) -> Response:
        from sglang_tuning_exporter.web.runbooks import render  # noqa: PLC0415

        text = render(watcher, alert, request.headers.get("Host", ""))
        if text is None:
            raise HTTPException(404)
        return _html(text)

    return routes


def _html(text: str) -> Response:
    return HTMLResponse(text.encode("utf-8", "backslashreplace"))  # names and paths may hold lone surrogates
