"""Bytes to whole lines; overlong lines are dropped and counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Dropped:
    """Lines longer than the limit, and their bytes."""

    lines: int = 0
    bytes: int = 0


class Lines:
    """Converts bytes to whole lines; keeps at most one line in memory."""

    def __init__(self, limit: int, dropped: Dropped) -> None:
        self.limit = limit
        self._dropped = dropped
        self._partial = bytearray()
        self._overlong = 0

    def skip_line(self) -> None:
        """Drop the incomplete line: it is already too long."""
        self._partial.clear()
        self._overlong = self.limit + 1

    def feed(self, data: bytes) -> bytes:
        """Return the lines that `data` completes."""
        data = data.replace(b"\0", b"")
        end = data.rfind(b"\n") + 1
        if not end:
            self._extend(data)
            return b""
        first = data.find(b"\n") + 1 if self._partial or self._overlong else 0
        self._extend(data[:first])
        begun = self._finish() if first else b""
        whole = data[first:end]
        if len(whole) > self.limit:
            whole = self._without_overlong(whole)
        self._extend(data[end:])
        return begun + whole

    @property
    def begun(self) -> bool:
        """Whether an incomplete line is pending."""
        return bool(self._partial or self._overlong)

    def rest(self) -> bytes:
        """Return the last incomplete line with a line end; empty if there is none."""
        if self._overlong:
            self._finish()
        if not self._partial:
            return b""
        self._partial += b"\n"
        return self._finish()

    def _extend(self, data: bytes) -> None:
        length = len(self._partial) + len(data)
        if self._overlong:
            self._overlong += len(data)
        elif length > self.limit:
            self._partial.clear()
            self._overlong = length
        else:
            self._partial += data

    def _finish(self) -> bytes:
        line = bytes(self._partial)
        self._partial.clear()
        if self._overlong:
            self._drop(self._overlong)
            self._overlong = 0
        return line

    def _without_overlong(self, whole: bytes) -> bytes:
        kept = []
        for line in whole[:-1].split(b"\n"):
            if len(line) < self.limit:
                kept.append(line + b"\n")
            else:
                self._drop(len(line) + 1)
        return b"".join(kept)

    def _drop(self, length: int) -> None:
        self._dropped.lines += 1
        self._dropped.bytes += length
