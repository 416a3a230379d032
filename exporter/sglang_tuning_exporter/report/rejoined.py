"""Lines that a terminal cut at its width, as text copied from one has them, joined again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

from sglang_tuning_exporter.sglang.events import DecodeBatch, PrefillBatch, ServerArgs
from sglang_tuning_exporter.sglang.log.reader import LogReader

_LOOKED_AT = 1 << 18  # bytes
_WIDTHS = range(40, 401)  # columns
_BLOCK = 4096  # lines
_FEWEST_LINES = 8  # of the whole width
# A line that begins here was not cut off from the one before it.
_BEGINS = re.compile(rb"[^\n]{0,60}?(?:\[?20\d\d-\d\d-\d\d[ T]\d\d:|\[\d\d:\d\d:\d\d|INFO: |Traceback \(most)")


def rejoined(chunks: Iterator[bytes], note: Callable[[str], None]) -> Iterator[bytes]:
    """Return a text whose lines were cut at one width with its lines as they were, which is noted; any other text unchanged."""
    first = next(chunks, b"")
    chunks = chain([first], chunks)
    width = _width_of(first[:_LOOKED_AT])
    if width is None:
        return chunks
    note(f"its lines were cut at {width} columns, as a terminal does; they were joined again")
    return _joined_chunks(chunks, width)


def _width_of(text: bytes) -> int | None:
    """Return the width at which the lines were cut; None where joining them does not make more of their figures readable."""
    lines = text.splitlines()
    widths = [_columns(line) for line in lines]
    width = max(widths, default=0)
    if width not in _WIDTHS or widths.count(width) < _FEWEST_LINES:
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


def _joined_chunks(chunks: Iterable[bytes], width: int) -> Iterator[bytes]:
    lines = _joined(_lines(chunks), width)
    while some := list(islice(lines, _BLOCK)):
        yield b"\n".join(some) + b"\n"


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.removesuffix(b"\r") for line in lines)
    if rest:
        yield rest
