"""Lines that are JSON: their texts, numbers and records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeAlias

from sglang_tuning_exporter.sglang.log.terminal import strip_terminal

Path: TypeAlias = tuple[str | int, ...]
_LEAVES = 256
_DEPTH = 10  # an OpenTelemetry record is eight levels deep
_FEWEST_BYTES = 6  # numbers that can be the bytes of a text
_RECORDS_SEARCHED = 8  # for the first line of SGLang
_RECORDS = 4096  # of one JSON document


def leaves_of(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Return the texts and numbers of a JSON value, those nearest to its root first."""
    level: list[tuple[Path, Any]] = [(path, value)]
    given = 0
    for _ in range(_DEPTH):
        below: list[tuple[Path, Any]] = []
        for place, found in level:
            if isinstance(found, dict):
                below += [((*place, name), inner) for name, inner in found.items()]
            elif isinstance(found, list) and text_of(found) is None:
                below += [((*place, number), inner) for number, inner in enumerate(found[:_RECORDS_SEARCHED])]
            elif given < _LEAVES:
                given += 1
                yield place, found
        level = below[:_LEAVES]


def records_of(entry: dict[str, Any] | list[Any], path: Path) -> list[bytes]:
    """Split a JSON document whose `path` leads through lists of records: one document for each record."""
    if not any(isinstance(name, int) for name in path):
        return [b""]
    documents: list[Any] = [entry]
    for depth, name in enumerate(path):
        if isinstance(name, int) and isinstance(value_at(entry, path[: depth + 1]), dict):
            documents = [
                _with_value(document, path[:depth], [record])
                for document in documents
                for record in (value_at(document, path[:depth]) or [])[:_RECORDS]
            ][:_RECORDS]
    return [json.dumps(document).encode() for document in documents]


def _with_value(value: Any, path: Path, replaced: Any) -> Any:
    """Return a copy of a JSON value with another value at `path`."""
    if not path:
        return replaced
    name, *rest = path
    if isinstance(value, list):
        return [
            _with_value(inner, tuple(rest), replaced) if place == name else inner for place, inner in enumerate(value)
        ]
    return value | {name: _with_value(value[name], tuple(rest), replaced)}


def quoted_text(text: bytes) -> bytes | None:
    """Read a line that is one string of JSON; `None` where it is none."""
    if text[:1] != b'"':
        return None
    try:
        value = json.loads(text.rstrip())
    except ValueError:
        return None
    return strip_terminal(value.encode("utf-8", "replace")) if isinstance(value, str) else None


def value_at(value: Any, path: Path) -> Any:
    """Return the value at a path; `None` where there is none."""
    for name in path:
        try:
            value = value[name]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def text_of(value: Any) -> bytes | None:
    """Read a text, or a list of bytes that holds one."""
    if isinstance(value, str):
        return strip_terminal(value.encode("utf-8", "replace"))
    if isinstance(value, list) and len(value) > _FEWEST_BYTES and all(isinstance(byte, int) for byte in value):
        return bytes(byte & 255 for byte in value)
    return None


def json_of(text: bytes) -> dict[str, Any] | list[Any] | None:
    """Read a line of JSON; `None` where it is none."""
    if text[:1] not in (b"{", b"["):
        return None
    try:
        entry = json.loads(text.rstrip().removesuffix(b","))
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, (dict, list)) else None


def scalar_of(token: bytes) -> Any:
    """Read a text or a number; `None` for what has no value of its own."""
    try:
        value = json.loads(token)
    except ValueError:
        return None
    return value if isinstance(value, (str, int, float)) and not isinstance(value, bool) else None
