"""Bytes to whole lines; overlong lines are dropped and counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Dropped:
    """How many lines were longer than the limit."""

    lines: int = 0


class Lines:
    """Converts bytes to whole lines; keeps at most one line in memory."""

    def __init__(self, limit: int, dropped: Dropped) -> None:
        self.limit = limit
        self._dropped = dropped
        self._partial = bytearray()
        self._overlong = False  # the incomplete line is too long

    def skip_line(self) -> None:
        """Drop the incomplete line: it is already too long."""
        self._partial.clear()
        self._overlong = True

    def feed(self, data: bytes) -> bytes:
        """Return the lines that `data` completes."""
        data = data.replace(b"\0", b"")
        end = data.rfind(b"\n") + 1
        if not end:
            self._extend(data)
            return b""
        first = data.find(b"\n") + 1 if self._partial or self._overlong else 0
        self._extend(data[:first])
        completed = self._finish() if first else b""
        whole = data[first:end]
        if len(whole) > self.limit:
            whole = self._without_overlong(whole)
        self._extend(data[end:])
        return completed + whole

    @property
    def has_partial_line(self) -> bool:
        """Whether an incomplete line is pending."""
        return bool(self._partial or self._overlong)

    def flush(self) -> bytes:
        """Return the last incomplete line with a line end; empty if there is none."""
        if self._overlong:
            self._finish()
        if not self._partial:
            return b""
        self._partial += b"\n"
        return self._finish()

    def _extend(self, data: bytes) -> None:
        self._overlong = self._overlong or len(self._partial) + len(data) > self.limit
        if self._overlong:
            self._partial.clear()
        else:
            self._partial += data

    def _finish(self) -> bytes:
        line = bytes(self._partial)
        self._partial.clear()
        self._dropped.lines += self._overlong
        self._overlong = False
        return line

    def _without_overlong(self, whole: bytes) -> bytes:
        lines = [line + b"\n" for line in whole[:-1].split(b"\n")]
        kept = [line for line in lines if len(line) <= self.limit]
        self._dropped.lines += len(lines) - len(kept)
        return b"".join(kept)
