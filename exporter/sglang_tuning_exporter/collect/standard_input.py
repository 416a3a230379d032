"""Standard input as whole lines, without waiting."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from typing import BinaryIO

from sglang_tuning_exporter.collect.lines import Dropped, Lines
from sglang_tuning_exporter.collect.stream import BUDGET, CHUNK


class Stdin:
    """Standard input, a pipe shared with other processes: its blocking mode is not changed."""

    def __init__(self, stream: BinaryIO | None, limit: int) -> None:
        self.dropped = Dropped()
        self.lines = Lines(limit, self.dropped)
        self.position = 0
        self.reason = "ended" if stream is None else ""  # empty while there may be more
        self._stream = stream
        self._ready = select.poll()
        try:
            self._fd = stream.fileno() if stream is not None else -1
            if self._fd >= 0:
                self._ready.register(self._fd, select.POLLIN)
        except (OSError, ValueError):
            self._fd = -1

    def read(self) -> Iterator[bytes]:
        """Yield new lines, at most the budget."""
        budget = BUDGET
        while budget > 0 and not self.reason and (self._fd < 0 or self._ready.poll(0)):
            try:
                raw = self._read()
            except BlockingIOError:
                return
            except (OSError, ValueError) as error:
                self.reason = f"unreadable: {getattr(error, 'strerror', None) or error}"
                break
            budget -= len(raw)
            self.position += len(raw)
            if not raw:
                self.reason = "ended"
            yield self.lines.feed(raw) if raw else self.lines.flush()

    def _read(self) -> bytes:
        if self._fd >= 0:
            return os.read(self._fd, CHUNK)
        return self._stream.read(CHUNK) if self._stream is not None else b""
