"""Answers of log stores, one JSON document with many lines, as one line of JSON for each, oldest first; and UTF-16."""

from __future__ import annotations

import codecs
import json
import re
from itertools import chain
from typing import TYPE_CHECKING, Any

from sglang_tuning_exporter.sglang.log.forms import time_within

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST_DOCUMENT = 32 << 20  # bytes; what a store answers at once is a few megabytes
_STARTS = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\[\s*(?:[\[{]|$)|\{)")
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_DEPTH = 3


def unfolded(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Return the text of a file as lines of one record each; any other text unchanged."""
    first = next(chunks, b"")
    chunks = chain([first], chunks)
    if first.startswith(_UTF_16):
        chunks = _decoded(chunks)
        first = next(chunks, b"")
        chunks = chain([first], chunks)
    if _STARTS.match(first) is None:
        yield from chunks
        return
    begin = first.split(b"\n", 1)[0]
    if (entry := _parsed(begin)) is not None and len(_records(entry)) < 2:  # a document on each line
        yield from chunks
        return
    text = gathered(chunks)
    found = lines_of(text)
    if found is None and entry is not None:
        found = b"".join(lines_of(line) or line for line in text.splitlines(keepends=True))
    yield text if found is None else found
    yield from chunks


def gathered(chunks: Iterator[bytes]) -> bytes:
    """Return all of a text, or a little more than `LONGEST_DOCUMENT` bytes of it: the rest stays in `chunks`."""
    pieces: list[bytes] = []
    size = 0
    for chunk in chunks:
        pieces.append(chunk)
        size += len(chunk)
        if size > LONGEST_DOCUMENT:
            break
    return b"".join(pieces)


def lines_of(document: bytes) -> bytes | None:
    """Return a document's records as lines of JSON, oldest first; `None` where it has none."""
    records = _records(_parsed(document))
    return b"".join(json.dumps(record).encode() + b"\n" for record in records) or None


def _decoded(chunks: Iterator[bytes]) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-16")("replace")
    for chunk in chunks:
        yield decoder.decode(chunk).encode()


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _records(value: Any) -> list[dict[str, Any]]:
    """Return the longest list of records in a document."""
    found: list[dict[str, Any]] = []
    level = [value]
    for _ in range(_DEPTH):
        for each in level:
            rows = [_row(item) for item in each] if isinstance(each, list) and len(each) > len(found) else []
            if rows and all(isinstance(row, dict) for row in rows):
                found = rows
        level = [inner for each in level if isinstance(each, dict) for inner in each.values()]
    streams = found or [value]
    if all(isinstance(each, dict) and isinstance(each.get("values"), list) for each in streams):
        found = [line for each in streams for line in _in_order(list(_of_loki(each)))]
    return _in_order(found)


def _row(item: Any) -> Any:
    """Return a row of CloudWatch Logs Insights, a list of fields, as one record; anything else unchanged."""
    if (
        isinstance(item, list)
        and item
        and all(isinstance(cell, dict) and {*cell} == {"field", "value"} for cell in item)
    ):
        return {cell["field"]: cell["value"] for cell in item}
    return item


def _of_loki(stream: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for value in stream["values"]:
        if isinstance(value, list) and len(value) > 1:
            yield {"timestamp": value[0], "labels": stream.get("stream"), "line": value[1]}


def _in_order(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records with the oldest first; one without a time stays behind the one before it."""
    times: list[float] = []
    for record in records:
        time = time_within(record)
        times.append(time if time is not None else times[-1] if times else 0.0)
    if times and times[0] > times[-1]:
        records, times = records[::-1], times[::-1]
    return [record for _, record in sorted(zip(times, records, strict=True), key=lambda pair: pair[0])]
