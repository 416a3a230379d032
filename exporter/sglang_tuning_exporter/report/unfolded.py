"""Answers of log stores, one JSON document with many lines, as one line of JSON for each, oldest first; and UTF-16."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

from sglang_tuning_exporter.sglang.log.forms import time_within
from sglang_tuning_exporter.sglang.log.layers import HEAD

LONGEST_DOCUMENT = 32 << 20  # bytes; what a store answers at once is a few megabytes
_STARTS = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\[\s*(?:[\[{]|$)|\{)")
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_DEPTH = 7  # the outputs of a notebook's cells are that deep
_FEWEST_LINES = 64  # a message of one record, such as a traceback, has fewer
_LISTS_SEARCHED = 1024  # items of a list that are searched for lists of their own


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
    entry = _parsed(begin)
    if entry is not None and len(_records(entry)) < 2 and _log_in(entry) is None:  # a document on each line
        yield from chunks
        return
    text = gathered(chunks)
    found = lines_of(text)
    if found is None and entry is not None:
        found = b"".join(_lines(_records(_parsed(line))) or line for line in text.splitlines(keepends=True))
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
    """Return the one text of a document that is a log, or its records as lines of JSON, oldest first; `None` where it has neither."""
    value = _parsed(document)
    return _log_in(value) or _lines(_records(value))


def _log_in(value: Any) -> bytes | None:
    texts = (each.encode("utf-8", "replace") for each in _inner(value) if isinstance(each, str))
    return next((text for text in texts if text.count(b"\n") >= _FEWEST_LINES and HEAD.search(text)), None)


def _lines(records: list[dict[str, Any]]) -> bytes | None:
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
    """Return the records in a document: Loki's of all streams, or the longest list of records, or all lists of texts."""
    within = list(_inner(value))
    streams = [each for each in within if isinstance(each, dict) and isinstance(each.get("values"), list)]
    lists = [[_row(item) for item in each] for each in within if isinstance(each, list) and len(each) > 1]
    texts = [text for each in lists if all(isinstance(item, str) for item in each) for text in each]
    found = max((each for each in lists if all(isinstance(item, dict) for item in each)), key=len, default=[])
    if streams:
        found = [line for each in streams for line in _in_order(list(_of_loki(each)))]
    return _in_order(found) if len(found) >= len(texts) else [{"line": text.rstrip("\n")} for text in texts]


def _inner(value: Any) -> Iterator[Any]:
    """Return a JSON value and what it holds, level by level; of a list in a list nothing, because it is a row."""
    level = [value]
    for _ in range(_DEPTH):
        yield from level
        level = [
            inner
            for each in level
            for inner in (
                each.values()
                if isinstance(each, dict)
                else [item for item in each[:_LISTS_SEARCHED] if not isinstance(item, list)]
                if isinstance(each, list)
                else ()
            )
        ]


def _row(item: Any) -> Any:
    """Return a row of a table as one record; anything else unchanged.

    In CloudWatch Logs Insights a row is a list of fields, in other answers a list of values.
    """
    if not isinstance(item, list) or not item:
        return item
    if all(isinstance(cell, dict) and {*cell} == {"field", "value"} for cell in item):
        return {cell["field"]: cell["value"] for cell in item}
    is_row = any(isinstance(cell, str) for cell in item) and not any(isinstance(cell, (dict, list)) for cell in item)
    return {str(place): cell for place, cell in enumerate(item)} if is_row else item


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
