"""Compressed logs: which formats can be read, by which library."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from contextlib import suppress
from importlib import import_module
from typing import Any

# Functions that open the text of a compressed file, by its extension, and what they raise where it is truncated or damaged.
OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
DAMAGE: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError)
MAGIC = {  # the first bytes of compressed files
    b"\x1f\x8b": ".gz",
    b"BZh": ".bz2",
    b"\xfd7zXZ\0": ".xz",
    b"(\xb5/\xfd": ".zst",
    b"PK\x03\x04": ".zip",
    b"7z\xbc\xaf\x27\x1c": ".7z",
    b"\x04\x22\x4d\x18": ".lz4",
}
REMEDIES = {  # what to do with files that cannot be read here
    ".zst": "install sglang-tuning-exporter[zstd], or unpack it with zstd -d",
    ".zip": "unpack it, or give its text: unzip -p",
    ".7z": "unpack it, or give its text: 7z e -so",
    ".lz4": "unpack it, or give its text: lz4 -dc",
}

with suppress(ImportError):
    try:  # from Python 3.14 on
        _zstd: Any = import_module("compression.zstd")
    except ImportError:
        _zstd = import_module("backports.zstd")
    OPENERS[".zst"] = _zstd.open
    DAMAGE += (_zstd.ZstdError,)
READABLE = tuple(OPENERS)


def packing(first: bytes) -> str:
    """Return the extension that belongs to the first bytes of a compressed file; empty for any other."""
    return next((extension for magic, extension in MAGIC.items() if first.startswith(magic)), "")
