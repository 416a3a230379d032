"""Bytes in each compression that a log may have."""

from __future__ import annotations

import bz2
import gzip
import lzma
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

COMPRESS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def compressed(text: bytes, extension: str) -> bytes:
    """Compress a text; zstd by Python itself from 3.14 on, else by its backport of the extra `zstd`."""
    if extension in COMPRESS:
        return COMPRESS[extension](text)
    try:
        zstd = import_module("compression.zstd")
    except ImportError:
        zstd = import_module("backports.zstd")
    return bytes(zstd.compress(text))
