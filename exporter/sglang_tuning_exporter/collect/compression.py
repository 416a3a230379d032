"""Compressed logs: which formats can be read, by which library."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from contextlib import suppress
from importlib import import_module
from typing import Any

OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
"""Functions that open the text of a compressed file, by the extension of the file."""
DAMAGE: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""Exceptions that a truncated or damaged compressed file raises."""
MAGIC = {
    b"\x1f\x8b": ".gz",
    b"BZh": ".bz2",
    b"\xfd7zXZ\0": ".xz",
    b"(\xb5/\xfd": ".zst",
    b"PK\x03\x04": ".zip",
    b"7z\xbc\xaf\x27\x1c": ".7z",
    b"\x04\x22\x4d\x18": ".lz4",
}
"""The first bytes of compressed files."""
REMEDIES = {
    ".zst": "install sglang-tuning-exporter[zstd], or unpack it with zstd -d",
    ".zip": "unpack it, or give its text: unzip -p",
    ".7z": "unpack it, or give its text: 7z e -so",
    ".lz4": "unpack it, or give its text: lz4 -dc",
}
"""What to do with files that cannot be read here, by extension."""

_STEP = 512  # packed bytes: they unpack to 16 MiB at most


class _ZstdText(io.RawIOBase):
    """The text of a zstd file by the package `zstandard`, whose own reader neither goes back nor notices a file that ends early."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._frame: Any = None
        self._text = self._packed = b""
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._fill()
        text = self._text[: len(buffer)]
        buffer[: len(text)] = text
        self._text = self._text[len(text) :]
        self._at += len(text)
        return len(text)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        wanted = offset + (self._at if whence == io.SEEK_CUR else 0)
        if wanted < self._at:
            self._file.seek(0)
            self.__init__(self._file)  # type: ignore[misc]
        while self._at < wanted and self.readinto(bytearray(min(wanted - self._at, io.DEFAULT_BUFFER_SIZE))):
            pass
        return self._at

    def tell(self) -> int:
        return self._at

    def _fill(self) -> None:
        while not self._text and (data := self._packed or self._file.read(_STEP)):
            if self._frame is None or self._frame.eof:
                self._frame = _zstd.ZstdDecompressor().decompressobj()
            self._text = self._frame.decompress(data)
            self._packed = self._frame.unused_data if self._frame.eof else b""
        if not self._text and self._frame is not None and not self._frame.eof:
            raise EOFError("ends in the middle of a frame")


with suppress(ImportError):
    try:  # from Python 3.14 on
        _zstd: Any = import_module("compression.zstd")
        OPENERS[".zst"] = _zstd.open
    except ImportError:
        _zstd = import_module("zstandard")
        OPENERS[".zst"] = lambda file: io.BufferedReader(_ZstdText(file))
    DAMAGE += (_zstd.ZstdError,)
READABLE = tuple(OPENERS)
"""Extensions of compressed files that can be read."""


def packing(first: bytes) -> str:
    """Return the extension that belongs to the first bytes of a compressed file; empty for any other."""
    return next((extension for magic, extension in MAGIC.items() if first.startswith(magic)), "")
