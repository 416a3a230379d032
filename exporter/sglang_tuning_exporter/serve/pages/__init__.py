"""What people and their programs read of one server: its page, the runbooks, and `/api/v1/findings`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from sglang_tuning_exporter import __version__
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.serve.guard import Lane
from sglang_tuning_exporter.serve.pages import page, runbooks

__all__ = ["make_pages"]
_Endpoint = TypeVar("_Endpoint", bound="Callable[..., Any]")
# Declared here: a parameter of the function would add a 422 response that cannot happen.
_ALERT = {"parameters": [{"name": "alert", "in": "path", "required": True, "schema": {"type": "string"}}]}
_ABSENT = {404: {"description": "No such alert", "content": {"application/json": {}}}}


def make_pages(sidecar: Sidecar, lane: Lane) -> FastAPI:
    """Return the application; each page is written in the thread of `lane`."""
    app = FastAPI(title="sglang-tuning-exporter", version=__version__, openapi_url=None, redirect_slashes=False)

    def get(path: str, **described: Any) -> Callable[[_Endpoint], _Endpoint]:
        """Decorate a function that answers GET and HEAD. In the schema, two methods would need two operation names."""

        def decorate(endpoint: _Endpoint) -> _Endpoint:
            app.api_route(path, methods=["HEAD"], **{**described, "include_in_schema": False})(endpoint)
            return app.get(path, **described)(endpoint)

        return decorate

    @get("/api/v1/findings")
    async def findings(request: Request) -> Response:
        text = await lane.run(lambda: page.as_json(sidecar, whole=_wants_all(request)))
        return Response(text, media_type="application/json")

    @get("/", response_class=HTMLResponse)
    async def landing(request: Request) -> Response:
        still, whole = "still" in request.query_params, _wants_all(request)
        return _html(await lane.run(lambda: page.render(sidecar, still=still, whole=whole)))

    @get("/runbooks", status_code=307, response_class=RedirectResponse)
    async def folder() -> Response:
        return RedirectResponse("runbooks/")  # the links there are relative to it

    @get("/runbooks/", response_class=HTMLResponse)
    async def index(request: Request) -> Response:
        return _html(await lane.run(lambda: runbooks.render_index(request.headers.get("Host", ""))))

    @get("/runbooks/{alert}", response_class=HTMLResponse, responses=_ABSENT, openapi_extra=_ALERT)
    async def runbook(request: Request) -> Response:
        alert, host = str(request.path_params["alert"]), request.headers.get("Host", "")
        text = await lane.run(lambda: runbooks.render(sidecar, alert, host))
        if text is None:
            raise HTTPException(404)
        return _html(text)

    return app


def _wants_all(request: Request) -> bool:
    return request.query_params.get("all") == "1"


def _html(text: str) -> Response:
    return HTMLResponse(text.encode("utf-8", "backslashreplace"))  # names and paths may hold lone surrogates
