"""Texts that are not a server's lines in time order, made such before they are read.

JSON documents of log stores, UTF-16, lines that a terminal cut at its width, and texts with the newest line first.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, pairwise
from typing import Any

from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.sglang.events import DecodeBatch, PrefillBatch, ServerArgs
from sglang_tuning_exporter.sglang.log.forms import own_times, printed_time, time_within
from sglang_tuning_exporter.sglang.log.layers import HEAD
from sglang_tuning_exporter.sglang.log.reader import LogReader

LONGEST_DOCUMENT = 32 << 20  # bytes; what a store answers at once is a few megabytes
_STARTS = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\[\s*(?:[\[{]|$)|\{)")
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_DEPTH = 7  # the outputs of a notebook's cells are that deep
_FEWEST_LINES = 64  # a message of one record, such as a traceback, has fewer
_LISTS_SEARCHED = 1024  # items of a list that are searched for lists of their own

_WIDTH_LOOKED_AT = 1 << 18  # bytes
_WIDTHS = range(40, 401)  # columns
_BLOCK = 4096  # lines
_FEWEST_CUT = 8  # lines of the whole width
# A line that begins here was not cut off from the one before it.
_BEGINS = re.compile(rb"[^\n]{0,60}?(?:\[?20\d\d-\d\d-\d\d[ T]\d\d:|\[\d\d:\d\d:\d\d|INFO: |Traceback \(most)")

_LOOKED_AT = 1 << 20  # bytes
_SAMPLE = 200  # lines of them
_FALLS = 2  # at least: a clock that was set back falls once
_FALLS_PER_RISE = 4  # ranks print a little out of order


def _peeked(chunks: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """Return the first chunk, and all."""
    first = next(chunks, b"")
    return first, chain([first], chunks)


def unfolded(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Return the text of a file as lines of one record each; any other text unchanged."""
    first, chunks = _peeked(chunks)
    if first.startswith(_UTF_16):
        first, chunks = _peeked(_decoded(chunks))
    if _STARTS.match(first) is None:
        yield from chunks
        return
    begin = first.split(b"\n", 1)[0]
    entry = _parsed(begin)
    if entry is not None and len(_records(entry)) < 2 and _log_in(entry) is None:  # a document on each line
        yield from chunks
        return
    text = _gathered(chunks)
    value = _parsed(text)
    found = _log_in(value) or _json_lines(_records(value))  # the one text of a document that is a log, or its records
    if found is None and entry is not None:
        found = b"".join(_json_lines(_records(_parsed(line))) or line for line in text.splitlines(keepends=True))
    yield text if found is None else found
    yield from chunks


def _gathered(chunks: Iterator[bytes]) -> bytes:
    """Return all of a text, or a little more than `LONGEST_DOCUMENT` bytes of it: the rest stays in `chunks`."""
    pieces: list[bytes] = []
    size = 0
    for chunk in chunks:
        pieces.append(chunk)
        size += len(chunk)
        if size > LONGEST_DOCUMENT:
            break
    return b"".join(pieces)


def _log_in(value: Any) -> bytes | None:
    texts = (each.encode("utf-8", "replace") for each in _inner(value) if isinstance(each, str))
    return next((text for text in texts if text.count(b"\n") >= _FEWEST_LINES and HEAD.search(text)), None)


def _json_lines(records: list[dict[str, Any]]) -> bytes | None:
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


def rejoined(chunks: Iterator[bytes], note: Callable[[str], None]) -> Iterator[bytes]:
    """Return a text whose lines were cut at one width with its lines as they were, which is noted; any other text unchanged."""
    first, chunks = _peeked(chunks)
    width = _width_of(first[:_WIDTH_LOOKED_AT])
    if width is None:
        yield from chunks
        return
    note(f"its lines were cut at {width} columns, as a terminal does; they were joined again")
    lines = _joined(_lines(chunks), width)
    while some := list(islice(lines, _BLOCK)):
        yield b"\n".join(some) + b"\n"


def _width_of(text: bytes) -> int | None:
    """Return the width at which the lines were cut; None where joining them does not make more of their figures readable."""
    lines = text.splitlines()
    widths = [_columns(line) for line in lines]
    width = max(widths, default=0)
    if width not in _WIDTHS or widths.count(width) < _FEWEST_CUT:
        return None
    return width if _figures(_joined(lines, width)) > _figures(lines) else None


def _figures(lines: Iterable[bytes]) -> int:
    """Return how many events there are, known figures of batches, and arguments."""
    found = 0
    for event in LogReader().feed(b"\n".join(lines)):
        if isinstance(event, (DecodeBatch, PrefillBatch)):
            found += sum(figure is not None for figure in (event.running, event.queued, event.full_usage))
        else:
            found += 1 if not isinstance(event, ServerArgs) else len(event.args)
    return found


def _columns(line: bytes) -> int:
    return len(line.expandtabs())


def _joined(lines: Iterable[bytes], width: int) -> Iterator[bytes]:
    held = b""
    for line in lines:
        if held and _BEGINS.match(line):
            yield held.rstrip(b" ")
            held = b""
        held += line
        columns = _columns(line)
        if columns == width - 1:
            held += b" "  # a terminal leaves out a space at the end of a line
        elif columns < width:
            yield held
            held = b""
    if held:
        yield held


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.removesuffix(b"\r") for line in lines)
    if rest:
        yield rest


def oldest_first(chunks: Iterator[bytes], name: str) -> Iterator[bytes]:
    """Return the lines of a text, the oldest first. Raises `UsageError` where it must be reversed and is too large."""
    first, chunks = _peeked(chunks)
    if not _falls(first[:_LOOKED_AT]):
        yield from chunks
        return
    text = _gathered(chunks)
    if len(text) > LONGEST_DOCUMENT:
        raise UsageError(
            f"{name}: its newest line comes first, and it is larger than {LONGEST_DOCUMENT >> 20} MiB;"
            " give it with the oldest line first, as tac writes it"
        )
    yield b"".join(line + b"\n" for line in reversed(text.removesuffix(b"\n").split(b"\n")))


def _falls(text: bytes) -> bool:
    """Whether times fall from line to line."""
    lines = text.split(b"\n")
    sample = lines[:: len(lines) // _SAMPLE + 1]
    own = own_times(text)
    times = [time for line in sample for time in printed_time(line, own) if time is not None]
    falls = sum(later < earlier for earlier, later in pairwise(times))
    rises = sum(later > earlier for earlier, later in pairwise(times))
    return falls >= _FALLS and falls > _FALLS_PER_RISE * rises
