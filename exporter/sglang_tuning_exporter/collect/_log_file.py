"""One file of a log: what identifies it, how far it has been read, and its whole lines.

A file is identified by device and inode, and by digests of its first text and of the text before the position: so it is found again
under another name, compressed, or as a copy, and is not mistaken for one that got its inode. They are digests because the text may
contain secrets of the server's arguments, and marks are written to the state file.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import select
import stat
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from sglang_tuning_exporter.collect import _rotation as rotation
from sglang_tuning_exporter.core.compression import DAMAGE

HEAD_BYTES = 1024  # of a file's start that are remembered: several lines
TAIL_BYTES = 256  # before a position that are remembered: one or two log lines
SURE_BYTES = 32  # of a file's start that another file is unlikely to have too
CHUNK = 256 << 10
BUDGET = 8 << 20  # per file and poll: 80 MB/s at ten polls a second; then it is the next file's turn
_STEP = 64 << 10
_LOOK_BACK, _LOOK_BACK_TEXT = 256 << 20, 4 << 20
_LAST_WORDS = 64 << 10  # the last lines say how a server ended
_START_UP = b"server_args="
_NEVER = 1 << 63
# Of a mark in a state file, with what an older one lacks.
_NUMBERS = dict.fromkeys(("inode", "position", "head_bytes", "tail_bytes")) | {
    "device": 0,
    "size": 0,
    "modified": _NEVER,
    "generation": 0,
}
_GET_VERSION = 0x80007601 | struct.calcsize("l") << 16  # FS_IOC_GETVERSION of linux/fs.h

Key = tuple[int, int]  # device and inode


@dataclass(frozen=True, slots=True)
class Mark:
    """A file and how far it has been read. In a compressed file bytes are those of the text."""

    path: str  # the name of its log
    inode: int  # 0: the file has another text now, and a copy of this one is looked for
    position: int  # in bytes: the start of a line, or the end of an incomplete last line
    head_bytes: int
    head: str
    tail_bytes: int
    tail: str
    size: int = 0  # at the last look
    modified: int = _NEVER  # nanoseconds
    joined: bool = False  # its last line continues in the next file of the log
    device: int = 0  # 0: unknown; after a reboot a disk may have another one, and then its text identifies the file
    generation: int = 0  # of the inode, whose number is reused after deletion; 0: unknown
    held: bool = False  # the file is open, and `position` is its end: its inode is no other file's, and a copy ends there as well

    def json(self) -> dict[str, object]:
        """Return the mark as an object for a state file."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "held"}

    @property
    def is_empty(self) -> bool:
        """Whether the file had no text at the last read and could still get some; a copy cannot."""
        return not self.head_bytes and not self.position and not self.joined

    def has_key(self, key: Key) -> bool:
        """Return whether a file with this device and inode may be the marked one."""
        return self.inode == key[1] and self.device in (0, key[0])

    def is_same_file(self, fd: int) -> bool:
        """Return whether the open file is the marked one, whatever its text."""
        status = os.fstat(fd)
        known = self.has_key((status.st_dev, status.st_ino))
        return known and (not self.generation or generation(fd) in (self.generation, 0))

    def fits(self, fd: int, name: str = "") -> bool:
        """Return whether the open file is the marked one or a copy of it, and was not rewritten."""
        try:
            same = self.is_same_file(fd)
            if not same and not self.tail_bytes and self.head_bytes < (SURE_BYTES if self.inode else 1):
                return False
            if rotation.packing_of(fd, name):
                with rotation.unpacked(fd, name) as file:
                    return self._has_same_text(
                        lambda size, at: file.read(size) if file.seek(at) == at else b"", same=same
                    )
            return self._has_same_text(lambda size, at: os.pread(fd, size, at), same=same)
        except DAMAGE:
            return False

    def _has_same_text(self, pread: Callable[[int, int], bytes], *, same: bool) -> bool:
        if digest(pread(self.head_bytes, 0)) != self.head:
            return False
        tail = pread(self.tail_bytes + (self.held and not same), self.position - self.tail_bytes)
        return len(tail) == self.tail_bytes and digest(tail) == self.tail

    def is_surely(self, fd: int) -> bool:
        """Return whether the open file is the marked one, and neither was rewritten nor is too short to be certain."""
        return self.head_bytes >= SURE_BYTES and self.is_same_file(fd) and self.fits(fd)


def mark_from(entry: object) -> Mark | None:
    """Return the mark in a state file, which may be damaged."""
    if not isinstance(entry, Mapping):
        return None
    texts: dict[str, Any] = {name: entry.get(name) for name in ("path", "head", "tail")}
    numbers: dict[str, Any] = {name: entry.get(name, default) for name, default in _NUMBERS.items()}
    if not all(isinstance(text, str) for text in texts.values()):
        return None
    if not all(isinstance(number, int) and number >= 0 for number in numbers.values()):
        return None
    mark = Mark(**texts, **numbers, joined=entry.get("joined") is True)
    fits = mark.head_bytes <= HEAD_BYTES and mark.tail_bytes <= min(TAIL_BYTES, mark.position)
    return mark if fits and mark.position < _NEVER else None  # no file offset is larger


class SavedPositions:
    """Patterns and marks of an earlier process, from a state file; invalid parts are left out, since it may be damaged."""

    def __init__(self, positions: Mapping[str, object]) -> None:
        patterns, files = positions.get("patterns"), positions.get("files")
        known = patterns if isinstance(patterns, list) else []
        self.patterns = frozenset(pattern for pattern in known if isinstance(pattern, str))
        found = map(mark_from, files) if isinstance(files, list) else []
        self.marks = [mark for mark in found if mark is not None]

    def of(self, path: str) -> list[Mark]:
        """Return the marks made under `path`, oldest first; the last one is of the file with that name."""
        return [mark for mark in self.marks if mark.path == path]


def make_mark(path: str, inode: int, position: int, head: bytes, tail: bytes, **more: Any) -> Mark:
    """Return the mark of a file whose first bytes are `head` and whose bytes before `position` are `tail`."""
    return Mark(path, inode, position, len(head), digest(head), len(tail), digest(tail), **more)


def generation(fd: int) -> int:
    """Return the generation of an open file's inode, which differs for later files with the same number; 0 if unknown."""
    try:
        number: int = struct.unpack("=I4x", fcntl.ioctl(fd, _GET_VERSION, bytes(8)))[0]
    except OSError:  # tmpfs, which never reuses an inode number, or a network file system
        return 0
    return number


def digest(text: bytes) -> str:
    """Return a short digest of `text` that reveals nothing about it."""
    return hashlib.blake2b(text, digest_size=16).hexdigest()


class Lines:
    """Converts bytes to whole lines; keeps at most one line in memory. `counts["dropped"]` is of overlong ones."""

    def __init__(self, limit: int, counts: Counter[str]) -> None:
        self.limit = limit
        self._counts = counts
        self._partial = bytearray()
        self._overlong = False  # the incomplete line is too long

    def skip_line(self) -> None:
        """Drop the incomplete line: it is already too long."""
        self._partial.clear()
        self._overlong = True

    def take(self, data: bytes) -> bytes:
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
            lines = [line + b"\n" for line in whole[:-1].split(b"\n")]
            kept = [line for line in lines if len(line) <= self.limit]
            self._counts["dropped"] += len(lines) - len(kept)
            whole = b"".join(kept)
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
        self._counts["dropped"] += self._overlong
        self._overlong = False
        return line


class LogFile:
    """One open file, read across truncation and holes of NUL bytes."""

    _look_back_bytes = _LOOK_BACK  # searched for the last server start

    def __init__(self, path: str, fd: int, lines: Lines) -> None:
        status = os.fstat(fd)
        self.path, self.fd, self.lines = path, fd, lines
        self.key: Key = (status.st_dev, status.st_ino)
        self.is_regular = stat.S_ISREG(status.st_mode)
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
        self._generation = generation(fd) if self.is_regular else 0
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
        length = min(position, TAIL_BYTES)
        self._tail = self._line_tail = _after_nul(self._pread(length, position - length))

    def take_over(self, former: LogFile) -> None:
        """Continue at the position of another one, of which this is a copy."""
        self.position, self._line_start, self.lines = former.position, former._line_start, former.lines
        self._head, self._tail, self._line_tail = former._head, former._tail, former._line_tail

    def anew(self) -> LogFile:
        """Return a reader of the present text of this file, which was rewritten. Its writer may continue inside the incomplete line."""
        return LogFile(self.path, self.fd, self.lines)

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

    def mark(self) -> Mark:
        """Return how far this file has been read in whole lines."""
        return self._mark(self._line_start, self._head, self._line_tail, joined=self.joined)

    def mark_of_read(self) -> Mark:
        """Return a mark that fits any file that begins with what was read."""
        return self._mark(self.position, self._head[: self.position], self._tail)

    def mark_of_former(self) -> Mark:
        """Return a mark that fits no file but a copy of what was read of this one, which is rewritten."""
        return replace(self.mark_of_read(), inode=0, device=0, generation=0)

    def mark_of_all(self) -> Mark:
        """Return the mark of the whole present text, which a compressed copy has as well."""
        status = os.fstat(self.fd)
        length = min(status.st_size, TAIL_BYTES)
        head = self._pread(HEAD_BYTES, 0)[: status.st_size]
        tail = self._pread(length, status.st_size - length)
        return replace(self._mark(status.st_size, head, tail, held=True), size=status.st_size)

    def _mark(self, position: int, head: bytes, tail: bytes, **more: bool) -> Mark:
        looked = {"size": self.size, "modified": self.modified, "generation": self._generation}
        return make_mark(self.path, self.key[1], position, head, tail, device=self.key[0], **looked, **more)

    def as_found(self) -> rotation.RotatedFile:
        """Return this file as one that was found under the log's name."""
        return rotation.RotatedFile(self.path, self.key, self.size, self.modified, "")

    def note_start(self) -> None:
        """Note the start of a renamed file that has not been read yet, so that it is found again when compressed."""
        if not self.position and not self.rewritten:
            with suppress(OSError):  # then it is known by what was noted before
                self._head, self.size = self._first_text(), os.fstat(self.fd).st_size

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
        return Lines(self.lines.limit, Counter()).take(start + text)

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
                    yield self.lines.take(raw)
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
        if not self.is_regular:
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

    def _first_text(self) -> bytes:
        return self._pread(HEAD_BYTES, 0).partition(b"\0")[0] if self.is_regular else b""

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


class PackedFile(LogFile):
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

    def take_over(self, former: LogFile) -> None:
        """Continue at the position of another one, of which this is a copy."""
        super().take_over(former)
        self.size = self.position + 1

    def mark_of_all(self) -> Mark:
        """Return a mark of this file; it is not compressed again."""
        return replace(self.mark(), held=True)

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
        self.counts: Counter[str] = Counter()
        self.lines = Lines(limit, self.counts)
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
            yield self.lines.take(raw) if raw else self.lines.flush()

    def _read(self) -> bytes:
        if self._fd >= 0:
            return os.read(self._fd, CHUNK)
        return self._stream.read(CHUNK) if self._stream is not None else b""


def _last(before: bytes, text: bytes, end: int) -> bytes:
    return _after_nul((before + text[max(0, end - TAIL_BYTES) : end])[-TAIL_BYTES:])


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
