"""From the times that a log prints to unix time: a server prints its local time, mostly without a zone."""

from __future__ import annotations

import os
from contextlib import suppress

from sglang_tuning_exporter.sglang.events import NO_RANK
from sglang_tuning_exporter.sglang.log.forms import find
from sglang_tuning_exporter.sglang.log.layers import Line
from sglang_tuning_exporter.sglang.log.prefix import parse_own_prefix, parse_plain_prefix
from sglang_tuning_exporter.sglang.log.wrappers import strip_terminal

LOOK_BACK_BYTES = 64 << 10
LINES_TRIED = 256  # a traceback's lines print no time
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


def offset_of(path: str) -> float | None:
    """Give the seconds to add to the times that this file prints; None where its last lines print none.

    The last line was printed when the file was written last.
    """
    with suppress(OSError):
        fd = os.open(path, _READ)
        try:
            status = os.fstat(fd)
            tail = os.pread(fd, LOOK_BACK_BYTES, max(status.st_size - LOOK_BACK_BYTES, 0))
        finally:
            os.close(fd)
        printed = last_printed(tail)
        return None if printed is None else status.st_mtime - printed
    return None


def last_printed(text: bytes) -> float | None:
    """Give the time that the last dated line of `text` prints."""
    for line in reversed(text.splitlines()[-LINES_TRIED:]):
        text = strip_terminal(line)
        found = find(text) or Line(text, None, NO_RANK)
        prefix = parse_plain_prefix(found.text) or parse_own_prefix(found.text)
        printed = prefix.time if prefix is not None and prefix.time is not None else found.time
        if printed is not None:
            return printed
    return None
