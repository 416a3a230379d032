"""A route that is only read: GET and HEAD by one function, described once in the schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import APIRouter, FastAPI

_Endpoint = TypeVar("_Endpoint", bound="Callable[..., Any]")


def reading(routes: FastAPI | APIRouter, path: str, **described: Any) -> Callable[[_Endpoint], _Endpoint]:
    """Decorate a function that answers both; `described` is what FastAPI's `get` takes."""

    def decorate(endpoint: _Endpoint) -> _Endpoint:
        # Under two methods in the schema one name would stand for two operations.
        routes.api_route(path, methods=["HEAD"], **{**described, "include_in_schema": False})(endpoint)
        return routes.get(path, **described)(endpoint)

    return decorate
