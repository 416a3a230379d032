"""The *form* of a line: the layers around it, the outermost first, found from SGLang's words in it."""

from __future__ import annotations

import re
from typing import Any, Literal, TypeAlias

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
    OFTEN_REQUEST_FIELDS,
    WORDS,
    Cri,
    Csv,
    Json,
    Layer,
    LeadingText,
    Quoted,
    UnwrappedLine,
    row_of,
    second_prefix,
    unquoted,
)
from sglang_tuning_exporter.sglang.log.prefix import parse_plain_prefix
from sglang_tuning_exporter.sglang.log.stamps import dated, stamp_seconds, value_seconds
from sglang_tuning_exporter.sglang.log.terminal import LONGEST_LINE, strip_terminal

LINES_SEARCHED = 4096  # for a time
_LAYERS = 4
_TIME_FIELDS = (
    "timestamp",
    "time",
    "@timestamp",
    "ts",
    "asctime",
    "__REALTIME_TIMESTAMP",
    "datetime",
    "date",
    "eventTime",
)
_REQUEST_FIELDS = ("obj", "prompt", "messages", "input")
_SHIPPER_FIELDS = ("stringValue", "message", "line")  # of the body or content that a shipper writes
_DELIMITER = re.compile(rb'"(?:[^"]|"")*"([,;\t|])|[^"\n]*?([,;\t|])"')  # after the first quoted column, or before it
_QUOTED_JSON = re.compile(rb'=(")\{\\"')

OwnTimes: TypeAlias = Literal["", "first", "behind others"]
"""Where SGLang's own times stand in the lines of a log; empty: nowhere."""
Form: TypeAlias = tuple[Layer, ...]


def unwrap(text: bytes) -> UnwrappedLine | None:
    """Return one line without its wrapping, the stream not known; `None` where it has no words of SGLang's."""
    form = form_of(text)
    return None if form is None else remove_form(form, text)


def printed_time(line: bytes, own: OwnTimes = "") -> tuple[float | None, float | None]:
    """Return when a line was printed: unix seconds, or else seconds since midnight where it prints no date.

    `own`: where SGLang prints its times in this log. If it does, no other times are used, also for lines without its own: the time zone
    of a container runtime may differ from the server's.
    """
    text = line[:LONGEST_LINE]
    prefix = parse_plain_prefix(text)
    if prefix is None or own == "behind others":
        text = strip_terminal(text)
        found = unwrap(text)
        bare = text if found is None else found.text
        prefix = None if own == "behind others" and bare == text else parse_plain_prefix(bare)
        if prefix is None:
            return (None, None) if own else dated(stamp_seconds(text) if found is None else found.time)
    return prefix.time, prefix.clock


def own_times(block: bytes, lines: int = LINES_SEARCHED) -> OwnTimes:
    """Return where SGLang prints its times in the first lines of a text: the first line with words of SGLang's decides."""
    place: OwnTimes = ""
    for line in block.split(b"\n", lines)[:lines]:
        if printed_time(line, "first") != (None, None):
            place = "first"
            if second_prefix(strip_terminal(line[:LONGEST_LINE])):
                return "behind others"
            if WORDS.search(line):
                return place
    return place


def remove_form(form: Form, text: bytes) -> UnwrappedLine | None:
    """Take a form off one line."""
    line = UnwrappedLine(text)
    for layer in form:
        inner = layer.remove(line)
        if inner is None:
            return None
        line = inner
    return line


def form_of(text: bytes, layers: int = _LAYERS) -> Form | None:
    """Return the layers around a line, as few as possible; `None` where it has no words of SGLang's or no form."""
    head = HEAD.search(text)
    if not layers or (head is None and BYTES not in text):
        return None
    start = len(text) if head is None else head.start() + second_prefix(text[head.start() :])
    if not start:
        return ()
    if (match := CRI.match(text)) is not None:
        inner = form_of(text[match.end() :], layers - 1)
        return None if inner is None else (Cri(), *inner)
    return _form_with_wrapping(text, head is not None, start, layers)


def _form_with_wrapping(text: bytes, headed: bool, start: int, layers: int) -> Form | None:  # noqa: FBT001 - found by a caller
    brace = 0 if text[:1] == b"[" and text.rstrip()[-1:] == b"]" and json_of(text) else text.find(b"{", 0, start)
    if brace >= 0 and (entry := json_of(text[brace:])) is not None:
        field = _json_form(entry, layers)
        before = LeadingText.learn(text[:brace]) if brace else None
        if field is None or (brace and before is None):
            return None
        return ((before, *field) if before else field) if brace else field
    if (quoted := quoted_text(text)) is not None:
        inner = form_of(quoted, layers - 1)
        return None if inner is None else (Quoted(), *inner)
    if (column := _csv_form(text, start, layers)) is not None:
        return column
    if (match := _QUOTED_JSON.search(text, 0, start)) is not None:
        inner = form_of(unquoted(text[match.end(1) :], match[1]), layers - 1)
        before = LeadingText.learn(text[: match.end(1)])
        return None if inner is None or before is None else (before, *inner)
    before = LeadingText.learn(text[:start]) if headed else None
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


def _json_form(entry: Any, layers: int) -> Form | None:
    if isinstance(entry, dict) and str(entry.get("event", "")).startswith("request."):
        return None
    leaves = list(leaves_of(entry, ()))
    for path, value in leaves:
        text = text_of(value)
        request_fields = (*_REQUEST_FIELDS, *OFTEN_REQUEST_FIELDS)
        if text is None or (path[-1] not in _SHIPPER_FIELDS and any(name in request_fields for name in path[:-1])):
            continue
        if path[-1] in _REQUEST_FIELDS:
            continue
        inner = form_of(text.split(b"\n", 1)[0], layers - 1)
        if inner is None:
            continue
        times = _times(leaves, path)
        has_level = any(other[-1] in LEVELS for other, _ in leaves)
        return Json(path, times[0] if times else None, sure=bool(times) or has_level), *inner
    return None


def time_within(entry: dict[str, Any]) -> float | None:
    """Return the time of a structured line."""
    leaves = list(leaves_of(entry, ()))
    return next((value_seconds(value_at(entry, path)) for path in _times(leaves, ())), None)


def _times(leaves: list[tuple[Path, Any]], text: Path) -> list[Path]:
    """Return the names of fields that hold times, the most likely first."""
    found = [path for path, value in leaves if path != text and value_seconds(value) is not None]
    return sorted(
        found, key=lambda path: _TIME_FIELDS.index(path[-1]) if path[-1] in _TIME_FIELDS else len(_TIME_FIELDS)
    )


def _csv_form(text: bytes, start: int, layers: int) -> Form | None:
    match = _DELIMITER.match(text, 0, len(text) if text[:1] == b'"' else start + 1)
    delimiter = text[start - 1 : start] if match is None else match[1] or match[2]
    # Without quotation marks: a comma that SGLang prints has a space behind it, and it prints no tabs.
    if (
        match is None
        and not (delimiter == b"," and b", " not in text[start:])
        and not (delimiter == b"\t" and b"\t" in text[start:])
    ):
        return None
    row = row_of(text, delimiter.decode())
    for column, value in enumerate(row):
        inner = form_of(value.encode("utf-8", "surrogateescape"), layers - 1)
        if inner is not None and (len(row) > 1 or inner == ()):
            times = [place for place, other in enumerate(row) if place != column and value_seconds(other) is not None]
            return Csv(column, times[0] if times else None, len(row), delimiter.decode()), *inner
    return None
