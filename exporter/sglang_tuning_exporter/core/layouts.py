"""Texts that are not a server's lines in time order, made such before they are read. Pure.

JSON documents of log stores, UTF-16, lines that a terminal cut at its width, and texts with the newest line first.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, pairwise
from typing import Any

from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.wrapping import WORDS, time_of

LONGEST_DOCUMENT = 32 << 20  # bytes; what a store answers at once is a few megabytes
_DOCUMENT = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\[\s*(?:[\[{]|$)|\{)")
_DEPTH = 7  # the outputs of a notebook's cells are that deep
_FEWEST_LINES = 64  # of a text that is a log: a message of one record, such as a traceback, has fewer
_LISTS_SEARCHED = 1024  # items of a list that are searched for lists of their own
_WIDTHS, _FEWEST_CUT = range(40, 401), 8  # columns of a terminal; lines of the whole width
_LOOKED_AT, _SAMPLE = 1 << 20, 200  # bytes and lines that are searched for times
# A line that begins here was not cut off from the one before it.
_BEGINS = re.compile(rb"[^\n]{0,60}?(?:\[?20\d\d-\d\d-\d\d[ T]\d\d:|\[\d\d:\d\d:\d\d|INFO: |Traceback \(most)")
_TIME = re.compile(rb"\[?(20\d\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d|(?<=\[)\d\d:\d\d:\d\d)|\b(1[4-9]\d{8,17})\b")


def _peeked(chunks: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """Return the first chunk, and all."""
    first = next(chunks, b"")
    return first, chain([first], chunks)


def _gathered(chunks: Iterator[bytes]) -> bytes:
    """Return all of a text, or a little more than `LONGEST_DOCUMENT` bytes of it: the rest stays in `chunks`."""
    text = bytearray()
    for chunk in chunks:
        text += chunk
        if len(text) > LONGEST_DOCUMENT:
            break
    return bytes(text)


# JSON documents


def unfolded(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Return the text of a file as lines of one record each; any other text unchanged."""
    first, chunks = _peeked(chunks)
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        decoder = codecs.getincrementaldecoder("utf-16")("replace")
        first, chunks = _peeked(decoder.decode(chunk).encode() for chunk in chunks)
    entry = _parsed(first.split(b"\n", 1)[0]) if _DOCUMENT.match(first) else None
    is_of_lines = entry is not None and len(_records(entry)) < 2 and _log_in(entry) is None  # a document on each line
    if _DOCUMENT.match(first) and not is_of_lines:
        text = _gathered(chunks)
        value = _parsed(text)
        found = _log_in(value) or _json_lines(_records(value))  # a text in the document that is a log, or its records
        if not found and entry is not None:
            found = b"".join(_json_lines(_records(_parsed(line))) or line for line in text.splitlines(keepends=True))
        yield found or text
    yield from chunks


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _log_in(value: Any) -> bytes | None:
    texts = (each.encode("utf-8", "replace") for each in inner(value) if isinstance(each, str))
    return next((text for text in texts if text.count(b"\n") >= _FEWEST_LINES and WORDS.search(text)), None)


def _json_lines(records: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def _records(value: Any) -> list[Any]:
    """Return the records in a document: Loki's of all streams, or the longest list of records, or all lists of texts."""
    within = list(inner(value))
    lists = [[_row(item) for item in each] for each in within if isinstance(each, list) and len(each) > 1]
    texts = [text.rstrip("\n") for each in lists if all(isinstance(item, str) for item in each) for text in each]
    streams = [each for each in within if isinstance(each, dict) and isinstance(each.get("values"), list)]
    found = [
        {"timestamp": line[0], "labels": each.get("stream"), "line": line[1]}
        for each in streams
        for line in _in_order(each["values"])
        if isinstance(line, list) and len(line) > 1
    ] or max((each for each in lists if all(isinstance(item, dict) for item in each)), key=len, default=[])
    return _in_order(found) if len(found) >= len(texts) else [{"line": text} for text in texts]


def inner(value: Any) -> Iterator[Any]:
    """Return a JSON value and what it holds, level by level; of a list in a list nothing, because it is a row."""
    level = [value]
    for _ in range(_DEPTH):
        yield from level
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += each.values()
            elif isinstance(each, list):
                below += [item for item in each[:_LISTS_SEARCHED] if not isinstance(item, list)]
        level = below


def _row(item: Any) -> Any:
    """Return a row of a table as one record: in CloudWatch Logs Insights a list of fields, in other answers a list of values."""
    if not isinstance(item, list) or not item:
        return item
    if all(isinstance(cell, dict) and {*cell} == {"field", "value"} for cell in item):
        return {cell["field"]: cell["value"] for cell in item}
    is_row = any(isinstance(cell, str) for cell in item) and not any(isinstance(cell, dict | list) for cell in item)
    return {str(place): cell for place, cell in enumerate(item)} if is_row else item


def _in_order(records: list[Any]) -> list[Any]:
    """Return the records with the oldest first; one without a time stays behind the one before it."""
    times: list[float] = []
    for record in records:
        values = record.values() if isinstance(record, dict) else record if isinstance(record, list) else ()
        found = (
            time_of(str(each).encode("utf-8", "replace")) for each in values if isinstance(each, str | int | float)
        )
        times.append(next((time for time in found if time is not None and time > 1e9), times[-1] if times else 0.0))
    if times and times[0] > times[-1]:
        records, times = records[::-1], times[::-1]
    return [records[place] for place in sorted(range(len(records)), key=times.__getitem__)]


# Lines that a terminal cut


def rejoined(chunks: Iterator[bytes], note: Callable[[str], None]) -> Iterator[bytes]:
    """Return a text whose lines were cut at one width with its lines as they were, which is noted; any other text unchanged."""
    first, chunks = _peeked(chunks)
    lines = first[: _LOOKED_AT // 4].splitlines()
    widths = [len(line.expandtabs()) for line in lines]
    width = max(widths, default=0)
    is_cut = width in _WIDTHS and widths.count(width) >= _FEWEST_CUT
    if not is_cut or _figures(_joined(lines, width)) <= _figures(lines):
        yield from chunks
        return
    note(f"its lines were cut at {width} columns, as a terminal does; they were joined again")
    whole = _joined(_lines(chunks), width)
    while some := list(islice(whole, 4096)):
        yield b"\n".join(some) + b"\n"


def _figures(lines: Iterable[bytes]) -> int:
    """Return how many events, figures and arguments can be read."""
    reader = Reader()
    events = [event for line in lines for event in reader.read(line)] + [*reader.end()]
    return sum(1 + len(event.figures) + len(event.arguments) for event in events)


def _joined(lines: Iterable[bytes], width: int) -> Iterator[bytes]:
    held = b""
    for line in lines:
        if held and _BEGINS.match(line):
            yield held.rstrip(b" ")
            held = b""
        held += line
        columns = len(line.expandtabs())
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


# The newest line first


def oldest_first(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Return the lines of a text, the oldest first. Raise `ValueError` where it must be reversed and is too large."""
    first, chunks = _peeked(chunks)
    lines = first[:_LOOKED_AT].split(b"\n")
    found = (_TIME.search(line[:1000]) for line in lines[:: len(lines) // _SAMPLE + 1])
    times = [time_of(match[1] or match[2]) or 0.0 for match in found if match is not None]
    falls = sum(later < earlier for earlier, later in pairwise(times))  # a clock that was set back falls once
    rises = sum(later > earlier for earlier, later in pairwise(times))  # ranks print a little out of order
    if falls < 2 or falls <= 4 * rises:
        yield from chunks
        return
    text = _gathered(chunks)
    if len(text) > LONGEST_DOCUMENT:
        raise ValueError(
            f"its newest line comes first, and it is larger than {LONGEST_DOCUMENT >> 20} MiB;"
            " give it with the oldest line first, as tac writes it"
        )
    yield b"".join(line + b"\n" for line in reversed(text.removesuffix(b"\n").split(b"\n")))
