"""One open log file, or standard input, as whole lines; a file across truncation and holes of NUL bytes."""

from __future__ import annotations

import errno
import os
import select
import stat
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import BinaryIO

from sglang_tuning_exporter.collect import positions, rotation
from sglang_tuning_exporter.collect.compression import DAMAGE
from sglang_tuning_exporter.collect.lines import Dropped, Lines

CHUNK = 256 << 10
BUDGET = 8 << 20  # per file and poll: 80 MB/s at ten polls a second; then it is the next file's turn
_STEP = 64 << 10
_LOOK_BACK, _LOOK_BACK_TEXT = 256 << 20, 4 << 20
_LAST_WORDS = 64 << 10  # the last lines say how a server ended
_START_UP = b"server_args="

Key = tuple[int, int]  # device and inode: identify a file whatever its name is


class Stream:
    """One open file, identified by device and inode."""

    _look_back_bytes = _LOOK_BACK  # searched for the last server start

    def __init__(self, path: str, fd: int, lines: Lines) -> None:
        status = os.fstat(fd)
        self.path = path
        self.fd = fd
        self.key: Key = (status.st_dev, status.st_ino)
        self.seekable = stat.S_ISREG(status.st_mode)
        self._generation = positions.generation(fd) if self.seekable else 0
        self.lines = lines
        self.position = 0
        self.look_back_from = 0  # not 0: start-up facts before this offset have not been looked for yet
        self.reason = ""
        self.at_end = False
        self.rewritten = False  # the text that was read is not in the file any more
        self.joined = False  # a copy made by copytruncate: its last line continues in the log's next file
        self.closed = False
        self.grown_at = 0.0
        self.gone_at: float | None = None  # when it lost its followed path
        self.size, self.modified = status.st_size, status.st_mtime_ns  # at the last read
        self._line_start = 0
        self._line_tail = b""  # text before _line_start, for the mark
        self._head = self._first_text()
        self._tail = b""

    def start_at(self, position: int) -> None:
        """Start with the line that contains the byte before `position`, or after it if that byte ends the line."""
        begin = self._line_begin(position)
        self.continue_at(position if begin is None else begin)

    def continue_at(self, position: int) -> None:
        """Start at byte `position` of a mark; inside an overlong line, start with the line after it."""
        if self._line_begin(position) is None:
            self.lines.skip_line()
        self.look_back_from = position
        self.position = self._line_start = position
        length = min(position, positions.TAIL_BYTES)
        self._tail = self._line_tail = _after_nul(self._pread(length, position - length))

    def flush(self) -> bytes:
        """Return the last incomplete line as a line, and count it as read; empty if there is none."""
        if not self.lines.has_partial_line:
            return b""
        self.count_all_as_read()
        return self.lines.flush()

    def count_all_as_read(self) -> None:
        """Count all text as read: the last line has ended, here or in the next file."""
        self._line_start, self._line_tail = self.position, self._tail

    @property
    def is_complete(self) -> bool:
        """Whether no incomplete line is pending that a restart would have to read again."""
        return self._line_start == self.position

    @property
    def has_lines(self) -> bool:
        """Whether a complete line was read from this file."""
        return self._line_start > 0

    def mark(self) -> positions.Mark | None:
        """Return how far this file has been read; None for a pipe, which cannot be read again."""
        if not self.seekable:
            return None
        return self._mark(self._line_start, self._head, self._line_tail, joined=self.joined)

    def mark_of_text(self) -> positions.Mark:
        """Return a mark that fits any file with the same text: all of an intact file, what was read of a rewritten one."""
        if not self.rewritten:
            return replace(positions.mark_of_all(self.path, self.fd), modified=self.modified)
        return self.mark_of_read_text()

    def mark_of_read_text(self) -> positions.Mark:
        """Return a mark that fits any file that begins with what was read."""
        return self._mark(self.position, self._head[: self.position], self._tail, least=1)

    def _mark(self, position: int, head: bytes, tail: bytes, **more: int) -> positions.Mark:
        looked = {"size": self.size, "modified": self.modified, "generation": self._generation}
        return positions.make_mark(self.path, self.key[1], position, head, tail, **looked, **more)

    def has_text(self) -> bool:
        """Return whether the file has, or had, text."""
        return self.position > 0 or self.closed or os.fstat(self.fd).st_size > 0

    def is_deleted(self) -> bool:
        """Return whether the file has no name left."""
        return os.fstat(self.fd).st_nlink == 0

    def close(self) -> bytes:
        """Close the file and return its last incomplete line."""
        if not self.closed:
            os.close(self.fd)
        self.closed = True
        return b"" if self.joined else self.lines.flush()

    def look_back(self) -> bytes:
        """Return lines before the first position: those from the last server start on, and the last 64 KiB.

        The file is read, not mapped: if a mapped file were truncated, the process would die of SIGBUS.
        """
        end, self.look_back_from = self.look_back_from, 0
        try:
            found = self._rfind(_START_UP, max(0, end - self._look_back_bytes), end)
            facts_end, start = 0, b""
            if found is not None:
                begin = self._line_begin(found) or 0
                facts_end = min(begin + _LOOK_BACK_TEXT, end)
                start = self._pread(facts_end - begin, begin)
            last = max(end - _LAST_WORDS, facts_end)
            text = self._pread(end - last, last)
        except DAMAGE:
            return b""
        if last and last != facts_end:  # `text` starts inside a line
            start, text = start[: start.rfind(b"\n") + 1], text[text.find(b"\n") + 1 :]
        return Lines(self.lines.limit, Dropped()).feed(start + text)

    def read(self, now: float) -> Iterator[bytes]:
        """Yield new lines, at most the budget; `at_end` is True if that was all."""
        budget = BUDGET
        self.at_end = False
        self.reason = ""
        try:
            while budget > 0 and not self.at_end:
                raw = self._next()
                budget -= len(raw) or CHUNK
                if raw:
                    self.grown_at = now
                    yield self.lines.feed(raw)
        except OSError as error:
            self.reason = f"unreadable: {error.strerror or error}"
            self.at_end = True

    def _pread(self, size: int, at: int) -> bytes:
        return os.pread(self.fd, size, at)

    def _rfind(self, needle: bytes, low: int, high: int) -> int | None:
        """Return the offset of the last `needle` within [low, high)."""
        while high > low:
            begin = max(low, high - _STEP)
            at = self._pread(high - begin, begin).rfind(needle)
            if at >= 0:
                return begin + at
            high = begin + len(needle) - 1 if begin > low else low
        return None

    def _line_begin(self, position: int) -> int | None:
        """Return the start of the line at `position`, or None if it is farther back than the limit of a line."""
        low = max(0, position - self.lines.limit - 1)
        newline = self._rfind(b"\n", low, position)
        if newline is not None:
            return newline + 1
        return None if low else 0

    def _next(self) -> bytes:
        if not self.seekable:
            try:
                raw = os.read(self.fd, CHUNK)
            except BlockingIOError:
                raw = b""
            self.at_end = not raw
            self.position += len(raw)
            return raw
        # One read returns the text before the position and the new text: nothing can change between check and use.
        known = len(self._tail)
        got = os.pread(self.fd, known + CHUNK, self.position - known)
        status = os.fstat(self.fd)
        if got[:known] != self._tail or not self._same_head() or status.st_size < self.position:
            self.rewritten = self.at_end = True
            return b""
        self.size, self.modified = status.st_size, status.st_mtime_ns
        raw = got[known:]
        self.at_end = len(raw) < CHUNK
        # NUL bytes at the end may be a hole, or text written on another machine that has not arrived yet: wait.
        text = raw.rstrip(b"\0")
        if text:
            self._advance(text)
        elif raw and not self.at_end:
            self._skip_hole(len(raw))
        return text

    def take_over(self, other: Stream) -> None:
        """Continue at the position of `other`, which has the same text."""
        self.position, self._line_start = other.position, other._line_start
        self._head, self._tail, self._line_tail = other._head, other._tail, other._line_tail
        self.lines = other.lines

    def restart(self) -> None:
        """Continue at the start of the file, which was rewritten."""
        # The incomplete line is kept: after a copytruncate its writer continues inside it.
        self.rewritten = False
        self.position = self._line_start = 0
        self._head, self._tail, self._line_tail = self._first_text(), b"", b""

    def known_text(self) -> int:
        """Return how many bytes of a rewritten file's start were read before; 0 if its text is new."""
        text, size = self._first_text(), os.fstat(self.fd).st_size
        if b"\n" in text[positions.SURE_BYTES :] and len(text) == size < self.position and self._head.startswith(text):
            return size
        return replace(self.mark_of_text(), least=positions.SURE_BYTES).known_text(self.fd)

    def _first_text(self) -> bytes:
        return self._pread(positions.HEAD_BYTES, 0).partition(b"\0")[0] if self.seekable else b""

    def note_start(self) -> None:
        """Note the start of a renamed file that has not been read yet, so that it is found again when compressed."""
        if not self.position and not self.rewritten:
            with suppress(OSError):  # then it is known by what was noted before
                self._head, self.size = self._first_text(), os.fstat(self.fd).st_size

    def _same_head(self) -> bool:
        head = self._first_text()
        same = head.startswith(self._head)
        if same:
            self._head = head
        return same

    def _advance(self, raw: bytes) -> None:
        cut = raw.rfind(b"\n") + 1
        if cut:
            self._line_start = self.position + cut
            self._line_tail = _last(self._tail, raw, cut)
        self._tail = _last(self._tail, raw, len(raw))
        self.position += len(raw)

    def _skip_hole(self, length: int) -> None:
        after = self.position + length
        try:
            self.position = os.lseek(self.fd, after, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to the end
                self.at_end = True
                return
            self.position = after  # the file system does not support SEEK_DATA
        self._tail = b""


class CompressedStream(Stream):
    """A compressed file, which is complete; positions are offsets in its text. An earlier server start is not looked for."""

    _look_back_bytes = 0

    def __init__(self, path: str, fd: int, lines: Lines, name: str) -> None:
        self.name = name
        self._open = ExitStack()
        self._file = self._open.enter_context(rotation.unpacked(fd, name))
        try:
            super().__init__(path, fd, lines)
        except DAMAGE:
            self._open.close()
            raise
        self.size = 1  # more than was read, until its end was reached

    def continue_at(self, position: int) -> None:
        """Start at byte `position` of a mark; inside an overlong line, start with the line after it."""
        super().continue_at(position)
        self.size = position + 1

    def take_over(self, other: Stream) -> None:
        """Continue at the position of `other`, which has the same text."""
        super().take_over(other)
        self.size = self.position + 1

    def mark_of_text(self) -> positions.Mark:
        """Return a mark of this file; it is not compressed again."""
        return self.mark() or positions.make_mark(self.path, self.key[1], 0, b"", b"")

    def has_text(self) -> bool:
        """Return whether it has text: a compressed empty file is larger than 0 bytes."""
        return bool(self._head)

    def close(self) -> bytes:
        """Close the file and return its last incomplete line."""
        self._open.close()
        return super().close()

    def note_start(self) -> None:
        """Do nothing: a compressed file does not change."""

    def _pread(self, size: int, at: int) -> bytes:
        self._file.seek(at)
        return self._file.read(size)

    def _next(self) -> bytes:
        try:
            raw = self._pread(CHUNK, self.position)
        except DAMAGE as error:
            raise OSError(errno.EIO, str(error)) from error
        self.at_end = not raw
        self._advance(raw)
        self.size = self.position + (not self.at_end)
        return raw


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


def _last(before: bytes, text: bytes, end: int) -> bytes:
    return _after_nul((before + text[max(0, end - positions.TAIL_BYTES) : end])[-positions.TAIL_BYTES :])


def _after_nul(text: bytes) -> bytes:
    return text[text.rfind(b"\0") + 1 :]  # bytes that are NUL now may be text later


def reason_of(error: OSError) -> str:
    """Return in a few words why a path cannot be read."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "missing"
    if isinstance(error, PermissionError):
        return "permission denied"
    if isinstance(error, IsADirectoryError):
        return "is a directory"
    return f"unreadable: {error.strerror or error}"
