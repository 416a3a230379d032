"""The *form* of a line: the layers around it, the outermost first, found from SGLang's words in it."""

from __future__ import annotations

from typing import Any, TypeAlias

from sglang_tuning_exporter.sglang.events import NO_RANK
from sglang_tuning_exporter.sglang.log.json_lines import (
    Path,
    json_of,
    leaves_of,
    quoted_text,
    records_of,
    text_of,
    value_at,
)
from sglang_tuning_exporter.sglang.log.layers import (
    BYTES,
    CRI,
    HEAD,
    LEVELS,
    Before,
    Cri,
    Csv,
    Json,
    Line,
    Quoted,
    again,
    row_of,
)
from sglang_tuning_exporter.sglang.log.stamps import value_seconds

_LAYERS = 4
_TIMES = ("timestamp", "time", "@timestamp", "ts", "asctime", "__REALTIME_TIMESTAMP", "datetime", "date", "eventTime")
_SERVERS_OWN = ("obj", "text", "prompt", "messages", "out", "content", "input", "body")  # of a request's log

_SHIPPERS = ("stringValue", "message", "line")  # of the body or content that a shipper writes

Layer: TypeAlias = "Cri | Before | Json | Quoted | Csv"
Form: TypeAlias = tuple[Layer, ...]


def find(text: bytes) -> Line | None:
    """Return one line without its wrapping, the stream not known; `None` where it has no words of SGLang's."""
    form = form_of(text)
    return None if form is None else taken_off(form, text)


def taken_off(form: Form, text: bytes) -> Line | None:
    """Take a form off one line."""
    line: Line | None = Line(text, None, NO_RANK)
    for layer in form:
        line = layer.take_off(line) if line is not None else None
    return line


def form_of(text: bytes, layers: int = _LAYERS) -> Form | None:
    """Return the layers around a line, as few as possible; `None` where it has no words of SGLang's or no form."""
    head = HEAD.search(text)
    if not layers or (head is None and BYTES not in text):
        return None
    start = len(text) if head is None else head.start() or again(text)
    if not start:
        return ()
    if (match := CRI.match(text)) is not None:
        inner = form_of(text[match.end() :], layers - 1)
        return None if inner is None else (Cri(), *inner)
    return _form_before(text, head is not None, start, layers)


def _form_before(text: bytes, headed: bool, start: int, layers: int) -> Form | None:  # noqa: FBT001 - found by a caller
    brace = text.find(b"{", 0, start)
    if brace >= 0 and (entry := json_of(text[brace:])) is not None:
        field = _field(entry, layers)
        before = Before.of(text[:brace]) if brace else None
        if field is None or (brace and before is None):
            return None
        return ((before, *field) if before else field) if brace else field
    if (quoted := quoted_text(text)) is not None:
        inner = form_of(quoted, layers - 1)
        return None if inner is None else (Quoted(), *inner)
    if text[:1] == b'"' or b',"' in text[:start] or text[start - 1 : start] == b",":
        column = _column(row_of(text), layers)
        if column is not None:
            return column
    before = Before.of(text[:start]) if headed else None
    return None if before is None else (before,)


def split_records(text: bytes) -> list[bytes]:
    """Split a JSON document with several records, one of them with words of SGLang's; empty for any other document."""
    entry = json_of(text)
    paths = (
        path
        for path, value in leaves_of(entry or {}, ())
        if any(isinstance(name, int) for name in path) and HEAD.search(text_of(value) or b"")
    )
    found = next(paths, None)
    records = [] if entry is None or found is None else records_of(entry, found)
    return records if len(records) > 1 else []


def _field(entry: dict[str, Any], layers: int) -> Form | None:
    if str(entry.get("event", "")).startswith("request."):
        return None
    leaves = list(leaves_of(entry, ()))
    for path, value in leaves:
        text = text_of(value)
        if text is None or (path[-1] not in _SHIPPERS and any(name in _SERVERS_OWN for name in path)):
            continue
        inner = form_of(text.split(b"\n", 1)[0], layers - 1)
        if inner is None:
            continue
        times = _times(leaves, path)
        told = any(other[-1] in LEVELS for other, _ in leaves)
        return Json(path, times[0] if times else None, sure=bool(times) or told), *inner
    return None


def time_within(entry: dict[str, Any]) -> float | None:
    """Return the time of a structured line."""
    leaves = list(leaves_of(entry, ()))
    return next((value_seconds(value_at(entry, path)) for path in _times(leaves, ())), None)


def _times(leaves: list[tuple[Path, Any]], text: Path) -> list[Path]:
    """Return the names of fields that hold times, the most likely first."""
    found = [path for path, value in leaves if path != text and value_seconds(value) is not None]
    return sorted(found, key=lambda path: _TIMES.index(path[-1]) if path[-1] in _TIMES else len(_TIMES))


def _column(row: list[str], layers: int) -> Form | None:
    for column, value in enumerate(row):
        inner = form_of(value.encode("utf-8", "surrogateescape"), layers - 1)
        if inner is not None and (len(row) > 1 or inner == ()):
            times = [place for place, other in enumerate(row) if place != column and value_seconds(other) is not None]
            return Csv(column, times[0] if times else None), *inner
    return None
