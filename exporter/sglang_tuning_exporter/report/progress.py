"""How much of a long input has been read, as a line that overwrites itself. Only for a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from sglang_tuning_exporter.report.inputs import Logs

# A smaller log is read before a progress line helps.
WORTH_BYTES = 64 << 20
_EVERY_SECONDS = 0.2
_BAR = 30


class Progress:
    """Bytes read of `total` (0: not known, as of a pipe). Writes nothing where `stream` is no terminal."""

    def __init__(self, stream: IO[str], total: int, *, piped: bool = False, worth: int = WORTH_BYTES) -> None:
        self._stream, self._total = stream, 0 if piped else total
        self._shown = stream.isatty() and (piped or total >= worth)
        self._begin = self._last = time.monotonic()
        self._read = 0

    def add(self, number: int) -> None:
        """Count `number` more bytes as read."""
        self._read += number
        now = time.monotonic()
        if self._shown and now - self._last >= _EVERY_SECONDS:
            self._last = now
            self._stream.write(f"\r\x1b[K{progress_line(self._read, self._total, now - self._begin)}")
            self._stream.flush()

    def clear(self) -> None:
        """Remove the line."""
        if self._shown and self._last > self._begin:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


@contextmanager
def watched(logs: Logs, worth: int = WORTH_BYTES) -> Iterator[None]:
    """Show how much of logs of at least `worth` bytes is read."""
    progress = Progress(sys.stderr, logs.size, piped=logs.is_piped, worth=worth)
    logs.watch(progress.add)
    try:
        yield
    finally:
        progress.clear()


def progress_line(read: int, total: int, seconds: float) -> str:
    """Return the line: a bar and the time left where the total is known, else how much was read."""
    speed = read / seconds if seconds > 0 else 0.0
    size = f"{read / (1 << 20):.0f} MB"
    if not total:
        return f"{size} read, {speed / (1 << 20):.0f} MB/s"
    share = min(read / total, 1.0)
    bar = "#" * int(_BAR * share)
    left = f", {(total - read) / speed:.0f} s left" if speed > 0 and read < total else ""
    return f"[{bar:<{_BAR}}] {100 * share:3.0f} %  {size} of {total / (1 << 20):.0f}{left}"
