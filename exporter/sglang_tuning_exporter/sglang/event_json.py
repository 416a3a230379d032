"""Failures and start-up lines as plain JSON and back, for a state file; anything else in the file is no event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from json import dumps
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, TypeGuard, Union, get_args, get_origin, get_type_hints

from sglang_tuning_exporter.sglang.args.printed import is_argument
from sglang_tuning_exporter.sglang.events import (
    MOST_RANKS,
    KvPool,
    Limits,
    Liveness,
    Memory,
    OutOfMemory,
    Rank,
    ServerArgs,
)

SavedEvent: TypeAlias = "OutOfMemory | Liveness | ServerArgs | KvPool | Memory | Limits"

_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (OutOfMemory, Liveness, ServerArgs, KvPool, Memory, Limits)}
# Printed times are of the server's clock, or of a process that has ended; the text of a failure may contain private words.
_LEFT_OUT = {"time", "text"}
_MOST = 2**53
_TEXT_LENGTH = 400
_ARGUMENTS = 2000


def to_json(event: SavedEvent) -> list[Any]:
    """Return the kind and the fields of an event."""
    document = {field.name: getattr(event, field.name) for field in fields(event) if field.name not in _LEFT_OUT}
    document["rank"] = [event.rank.dp, event.rank.tp, event.rank.pp]
    if isinstance(event, ServerArgs):
        document["args"] = {name: value for name, value in event.args.items() if _is_plain(value)}
    return [type(event).__name__, document]


def from_json(kind: object, document: object) -> SavedEvent | None:
    """Return the event that `to_json` returned; None where it cannot be one."""
    known = _KINDS.get(kind) if isinstance(kind, str) else None
    if known is None or not isinstance(document, dict):
        return None
    hints = _hints(known)
    if not document.keys() <= hints.keys() - _LEFT_OUT or not all(
        _fits_type(value, hints[name]) for name, value in document.items()
    ):
        return None
    figures = {name: tuple(value) if isinstance(value, list) else value for name, value in document.items()}
    try:
        event: SavedEvent = known(**(figures | {"time": None, "rank": Rank(*document["rank"])}))
    except (KeyError, TypeError):  # a field is missing
        return None
    return event


def is_figure(value: object) -> TypeGuard[float]:
    """Whether it is a number that a server can print."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _MOST and isfinite(value)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits_type(value: object, hint: Any) -> bool:
    """Whether a value of a JSON document fits the type of a field."""
    origin = get_origin(hint)
    if origin in {Union, UnionType}:
        return any(_fits_type(value, each) for each in get_args(hint))
    check = _CHECKS.get(origin if origin in _CHECKS else hint)
    return check is not None and check(value) and (origin is not Literal or value in get_args(hint))


def _is_plain(value: object) -> bool:
    """Whether an argument can be written as JSON: bytes and infinities cannot."""
    try:
        dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def is_rank(value: object) -> bool:
    """Whether it is the number of a rank, or None for no rank."""
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_RANKS)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and is_figure(value)


_CHECKS: dict[Any, Callable[[Any], bool]] = {
    Literal: lambda value: isinstance(value, str),
    tuple: lambda value: isinstance(value, list) and len(value) <= _ARGUMENTS and all(map(_is_whole, value)),
    dict: lambda value: isinstance(value, dict) and len(value) <= _ARGUMENTS and all(map(is_argument, value)),
    Rank: lambda value: isinstance(value, list) and len(value) == 3 and all(map(is_rank, value)),
    int: _is_whole,
    float: is_figure,
    str: lambda value: isinstance(value, str) and len(value) <= _TEXT_LENGTH,
    bool: lambda value: isinstance(value, bool),
    NoneType: lambda value: value is None,
}
