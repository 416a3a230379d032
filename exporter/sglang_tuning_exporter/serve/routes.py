"""Routes for GET and HEAD by one function, described once in the schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import APIRouter, FastAPI

_Endpoint = TypeVar("_Endpoint", bound="Callable[..., Any]")


def reading(routes: FastAPI | APIRouter, path: str, **described: Any) -> Callable[[_Endpoint], _Endpoint]:
    """Decorate a function that answers both; `described` are the arguments of FastAPI's `get`."""

    def decorate(endpoint: _Endpoint) -> _Endpoint:
        # In the schema, two methods would need two operation names.
        routes.api_route(path, methods=["HEAD"], **{**described, "include_in_schema": False})(endpoint)
        return routes.get(path, **described)(endpoint)

    return decorate
