"""A log's bytes in blocks of whole lines, packed or not, with bounded memory."""

from __future__ import annotations

import errno
import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, BinaryIO

from sglang_tuning_exporter.collect.compression import DAMAGE, OPENERS
from sglang_tuning_exporter.sglang.log.terminal import LONGEST_LINE

BLOCK = 1 << 20
COMPRESSED_BLOCK = 1 << 14
MIB = 1 << 20
# A log packs to a tenth or a thirtieth of its size. A file that unpacks to a hundred times its size is made to fill a disk.
MOST_UNPACKED, MOST_RATIO = 64 * MIB, 100
MOST_WITHOUT_END = 128 * MIB  # a line of 100 MB is dropped, and the rest is read
MOST_OF_UNKNOWN_SIZE = 8 << 30


class InputTooLargeError(Exception):
    """An input of unknown size is larger than a log would be; the message names the limit."""


class DamagedFileError(Exception):
    """A compressed file ends early, or other data follows it."""


class Counted(io.RawIOBase):
    """A stream that says how many bytes were read of it."""

    def __init__(self, stream: IO[bytes], on_read: Callable[[int], None]) -> None:
        self._stream, self._on_read = stream, on_read

    def readable(self) -> bool:
        """Return True: `io.BufferedReader` asks."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer, and count what was read."""
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self._on_read(len(data))
        return len(data)


def unpack(packing: str, stream: IO[bytes]) -> Iterator[bytes]:
    """Decompress a file in the format of an extension. Raises `DamagedFileError` after everything that can be read."""
    if packing == ".gz":
        yield from _unzip(stream)
        return
    try:
        with OPENERS[packing](stream) as text:
            while chunk := text.read1(BLOCK):  # what `read` had when the file ends early would be lost
                yield chunk
    except DAMAGE as error:
        raise DamagedFileError("is damaged or ends early") from error


def _unzip(stream: IO[bytes]) -> Iterator[bytes]:
    """Decompress the members of a gzip file. Raises `DamagedFileError` after everything that can be read."""
    member, fresh = zlib.decompressobj(wbits=31), False
    data = stream.read(BLOCK)
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
            raise DamagedFileError("is damaged" if not fresh else "holds more than gzip") from error
        fresh = False
        if text:
            yield text
        data = member.unused_data if member.eof else member.unconsumed_tail
    while not member.eof and (text := member.decompress(member.unconsumed_tail, BLOCK)):
        yield text
    if not member.eof:
        raise DamagedFileError("ends in the middle of a gzip member")


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


def within(chunks: Iterable[bytes], most: int | None, packed: Callable[[], int] | None) -> Iterator[bytes]:
    """Return the chunks of an input of unknown size while it looks like a log; `packed` returns how many packed bytes were read.

    With `most`, only that size is the limit. Raises `InputTooLargeError`.
    """
    total = unended = 0
    for chunk in chunks:
        total += len(chunk)
        end = chunk.rfind(b"\n")
        unended = unended + len(chunk) if end < 0 else len(chunk) - end - 1
        if total > (most or MOST_OF_UNKNOWN_SIZE):
            raise InputTooLargeError(f"is larger than {(most or MOST_OF_UNKNOWN_SIZE) / (1 << 30):g} GiB")
        if most is None and unended > MOST_WITHOUT_END:
            raise InputTooLargeError(f"has no end of a line in {MOST_WITHOUT_END // MIB} MiB")
        if most is None and packed is not None and total > max(MOST_UNPACKED, MOST_RATIO * packed()):
            raise InputTooLargeError(f"unpacks to more than {MOST_RATIO} times its size")
        yield chunk


def without_holes(stream: BinaryIO) -> Iterator[bytes]:
    """Read a regular file; a hole is a single NUL byte."""
    descriptor, at = stream.fileno(), 0
    while True:
        try:
            data = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole to the end, or the end
                return
            data = at  # a file system without SEEK_DATA
        if data > at:
            yield b"\0"
        chunk = os.pread(descriptor, BLOCK, data)  # reading the stream would ignore the moved position
        if not chunk:
            return
        at = data + len(chunk)
        yield chunk


def whole_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Cut chunks at line ends. Only the start of a line longer than `LONGEST_LINE` is kept; NUL bytes before a line, with
    which a truncated file begins, are left out.
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
