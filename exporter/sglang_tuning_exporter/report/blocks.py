"""A log's bytes in blocks of whole lines, however it is packed, with bounded memory."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Protocol

from sglang_tuning_exporter.sglang.wrappers import LONGEST_LINE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

BLOCK = 1 << 20
COMPRESSED_BLOCK = 1 << 14
GZIP = b"\x1f\x8b"


class Readable(Protocol):
    """What can be read piece by piece."""

    def read(self, size: int, /) -> bytes:
        """Give the next bytes, at most `size`; none at the end."""


class Damaged(Exception):  # noqa: N818 - what can be read has been read: an answer, not an error
    """A gzip file ends early or holds something else behind what was read."""


def unzip(first: bytes, stream: Readable) -> Iterator[bytes]:
    """Decompress the members of a gzip file. Raises `Damaged` after everything that can be read."""
    member, fresh = zlib.decompressobj(wbits=31), False
    data = first
    while data or (data := stream.read(COMPRESSED_BLOCK)):
        if member.eof:
            data = data.lstrip(b"\0")  # tape padding
            if not data:
                continue
            member, fresh = zlib.decompressobj(wbits=31), True
        whole = member.copy()
        try:
            text = member.decompress(data, BLOCK)
        except zlib.error as error:
            if not fresh:
                yield from _salvage(whole, data)
            raise Damaged("is damaged" if not fresh else "holds more than gzip") from error
        fresh = False
        if text:
            yield text
        data = member.unused_data if member.eof else member.unconsumed_tail
    while not member.eof and (text := member.decompress(member.unconsumed_tail, BLOCK)):
        yield text
    if not member.eof:
        raise Damaged("ends in the middle of a gzip member")


def _salvage(member: zlib._Decompress, data: bytes) -> Iterator[bytes]:
    found = bytearray()
    try:
        for position in range(len(data)):
            found += member.decompress(data[position : position + 1])
            if len(found) >= BLOCK:
                yield bytes(found)
                found.clear()
    except zlib.error:
        pass
    yield bytes(found)


def whole_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Cut chunks at ends of lines. Of a line longer than `LONGEST_LINE` the start is kept; NUL bytes before a line
    (what a truncated file starts with) are left out.
    """
    rest, skipping = b"", False
    for data in chunks:
        chunk = data
        if skipping:
            end = chunk.find(b"\n")
            if end < 0:
                continue
            chunk, skipping = chunk[end:], False
        chunk = rest + chunk
        end = chunk.rfind(b"\n") + 1
        if end:
            yield chunk[:end]
        rest = chunk[end:]
        if rest[:1] == b"\0":
            rest = rest.lstrip(b"\0")
        if len(rest) > LONGEST_LINE:
            rest, skipping = rest[:LONGEST_LINE], True
    if rest:
        yield rest
