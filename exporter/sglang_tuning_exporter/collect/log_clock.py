"""Printed times of a log as unix time: a server prints local time, mostly without a zone."""

from __future__ import annotations

import os
from contextlib import suppress

from sglang_tuning_exporter.collect.rotation import opened
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.wrapping import FIRST_DATED

LOOK_BACK_BYTES = 64 << 10
LINES_TRIED = 256  # the lines of a traceback have no time


def offset_of(path: str) -> float | None:
    """Return the seconds to add to printed times of this file; None if its last lines have none.

    The last line was printed at the time of the last modification.
    """
    with suppress(OSError), opened(path) as fd:
        status = os.fstat(fd)
        printed = last_printed(os.pread(fd, LOOK_BACK_BYTES, max(status.st_size - LOOK_BACK_BYTES, 0)))
        return None if printed is None else status.st_mtime - printed
    return None


def last_printed(text: bytes) -> float | None:
    """Return the time of the last line of `text` that has one; None where it has no date."""
    reader = Reader()
    for line in text.splitlines()[-LINES_TRIED:]:
        reader.read(line)
    return reader.time if reader.time is not None and reader.time >= FIRST_DATED else None
