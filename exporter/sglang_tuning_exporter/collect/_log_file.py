"""One file of a log: what identifies it, how far it has been read, and its whole lines.

A file is identified by device and inode, and by digests of its first text and of the text before the position: so it is
found again under another name, compressed, or as a copy, and is not mistaken for one that got its inode. They are
digests because the text may contain secrets of the server's arguments, and marks are written to the state file.
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
from dataclasses import dataclass, fields
from typing import Any

from sglang_tuning_exporter.collect import _rotation as rotation
from sglang_tuning_exporter.core import inputs

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
_GET_VERSION = 0x80007601 | struct.calcsize("l") << 16  # FS_IOC_GETVERSION of linux/fs.h

STDIN = "-"  # its path
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
            # A copy is known by its text alone: of a file that is still there the start is not enough.
            enough = SURE_BYTES if self.inode else 1
            if not self.tail_bytes and self.head_bytes < enough and not self.is_same_file(fd):
                return False
            if rotation.packing_of(fd, name):
                with rotation.unpacked(fd, name) as file:
                    return self._has_text(lambda size, at: file.read(size) if file.seek(at) == at else b"")
            return self._has_text(lambda size, at: os.pread(fd, size, at))
        except inputs.DAMAGE:
            return False

    def is_shorter(self, place: rotation.RotatedFile) -> bool:
        """Return whether the marked file has grown since it was read to its end."""
        return self.has_key(place.key) and place.size > self.position and not self.joined

    def _has_text(self, pread: Callable[[int, int], bytes]) -> bool:
        is_head = digest(pread(self.head_bytes, 0)) == self.head
        return is_head and digest(pread(self.tail_bytes, self.position - self.tail_bytes)) == self.tail


def mark_from(entry: object) -> Mark | None:
    """Return the mark in a state file, which may be damaged."""
    if not isinstance(entry, Mapping):
        return None
    kinds: dict[Any, type] = {"str": str, "int": int, "bool": bool}
    found: dict[str, Any] = {each.name: entry.get(each.name, each.default) for each in fields(Mark)}
    if not all(isinstance(found[each.name], kinds[each.type]) for each in fields(Mark)):
        return None
    mark = Mark(**found)
    fits = mark.head_bytes <= HEAD_BYTES and mark.tail_bytes <= min(TAIL_BYTES, mark.position)
    fits = fits and all(number >= 0 for number in found.values() if isinstance(number, int))
    return mark if fits and mark.position < _NEVER else None  # no file offset is larger


def make_mark(path: str, key: Key, position: int, head: bytes, tail: bytes, **more: Any) -> Mark:
    """Return the mark of a file whose first bytes are `head` and whose bytes before `position` are `tail`."""
    return Mark(path, key[1], position, len(head), digest(head), len(tail), digest(tail), device=key[0], **more)


def generation(fd: int) -> int:
    """Return the generation of an open file's inode, which differs for later files with
    the same number; 0 if unknown.
    """
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
        self._overlong = False  # the incomplete line is too long, and its text is dropped

    def skip_line(self) -> None:
        """Drop the incomplete line: it is already too long."""
        self._partial.clear()
        self._overlong = True

    def take(self, data: bytes) -> bytes:
        """Return the lines that `data` completes."""
        data = data.replace(b"\0", b"")
        end = data.rfind(b"\n") + 1
        whole = data[:end]
        if whole:
            if self._overlong:
                whole = whole[whole.find(b"\n") + 1 :]
                self._counts["dropped"] += 1
            if self._partial:
                whole = bytes(self._partial) + whole
            self._partial.clear()
            self._overlong = False
        if len(whole) > self.limit:
            lines = [line + b"\n" for line in whole[:-1].split(b"\n")]
            kept = [line for line in lines if len(line) <= self.limit]
            self._counts["dropped"] += len(lines) - len(kept)
            whole = b"".join(kept)
        if not self._overlong:
            self._partial += data[end:]
            if len(self._partial) > self.limit:
                self.skip_line()
        return whole

    @property
    def has_partial_line(self) -> bool:
        """Whether an incomplete line is pending."""
        return bool(self._partial or self._overlong)

    def flush(self) -> bytes:
        """Return the last incomplete line with a line end; empty if there is none."""
        return self.take(b"\n") if self.has_partial_line else b""


class LogFile:
    """One open file, read across truncation and holes of NUL bytes.

    A compressed one is complete; positions are offsets in its text.

    Standard input is read as a pipe, whatever it is.
    """

    def __init__(self, path: str, fd: int, lines: Lines, name: str = "") -> None:
        """`name`: of a rotated file, which may be compressed. Raise one of `DAMAGE`."""
        status = os.fstat(fd)
        self.path, self.fd, self.lines, self.name = path, fd, lines, name
        # Standard input is no file that has a name too.
        self.key: Key = (0, 0) if path == STDIN else (status.st_dev, status.st_ino)
        self.is_regular = stat.S_ISREG(status.st_mode) and path != STDIN
        self.has_ended = False  # standard input that its writers have closed
        self.position = 0
        self.look_back_from = 0  # not 0: start-up facts before this offset have not been looked for yet
        self.reason = ""
        self.at_end = False
        self.rewritten = False  # the text that was read is not in the file any more
        self.joined = False  # a copy made by copytruncate: its last line continues in the log's next file
        self.grown_at = 0.0
        self.gone_at: float | None = None  # when it lost its followed path
        self.size, self.modified = status.st_size, status.st_mtime_ns  # at the last read
        self._generation = generation(fd) if self.is_regular else 0
        self._line_start = 0
        self._line_tail = self._tail = b""  # text before `_line_start` and before `position`, for the mark
        self._opened = ExitStack()
        self._text = None
        self._ready = select.poll()
        self._ready.register(fd, select.POLLIN)
        try:
            if name and rotation.packing_of(fd, name):
                self._text = self._opened.enter_context(rotation.unpacked(fd, name))
                self.size = 1  # more than was read, until its end was reached
            self._head = self._first_text()
        except inputs.DAMAGE:
            self._opened.close()
            raise

    @property
    def is_packed(self) -> bool:
        """Whether it is compressed."""
        return self._text is not None

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
        self.size = position + 1 if self.is_packed else self.size
        length = min(position, TAIL_BYTES)
        self._tail = self._line_tail = _after_nul(self._pread(length, position - length))

    def take_over(self, former: LogFile) -> None:
        """Continue the incomplete line of another one, of which this is a copy."""
        self.lines, self._line_start, self._line_tail = former.lines, former._line_start, former._line_tail

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
        return self._mark(self._line_start, self._line_tail, joined=self.joined)

    def mark_of_read(self) -> Mark:
        """Return a mark that fits any file that begins with what was read."""
        return self._mark(self.position, self._tail)

    def _mark(self, position: int, tail: bytes, **more: bool) -> Mark:
        key = (0, 0) if self.rewritten else self.key  # what was read is in a copy, if anywhere
        looked = {"size": self.size, "modified": self.modified, "generation": 0 if self.rewritten else self._generation}
        return make_mark(self.path, key, position, self._head, tail, **looked, **more)

    def as_found(self) -> rotation.RotatedFile:
        """Return this file as one that was found under the log's name."""
        return rotation.RotatedFile(self.path, self.key, self.size, self.modified, "")

    def note_start(self) -> None:
        """Note the start of a renamed file that has not been read yet, so that it is found again when compressed."""
        if not (self.position or self.rewritten or self.is_packed):
            with suppress(OSError):  # then it is known by what was noted before
                self._head, self.size = self._first_text(), os.fstat(self.fd).st_size

    def has_text(self) -> bool:
        """Return whether the file has, or had, text; a compressed empty file is larger than 0 bytes."""
        return self.position > 0 or (bool(self._head) if self.is_packed else os.fstat(self.fd).st_size > 0)

    def is_deleted(self) -> bool:
        """Return whether the file has no name left."""
        return os.fstat(self.fd).st_nlink == 0

    def close(self) -> bytes:
        """Close the file and return its last incomplete line."""
        self._opened.close()
        os.close(self.fd)
        return b"" if self.joined else self.lines.flush()

    def look_back(self) -> bytes:
        """Return lines before the first position: those from the last server start on, and the last 64 KiB; of a
        compressed file these alone.

        The file is read, not mapped: if a mapped file were truncated, the process would die of SIGBUS.
        """
        end, self.look_back_from = self.look_back_from, 0
        try:
            found = None if self.is_packed else self._rfind(_START_UP, max(0, end - _LOOK_BACK), end)
            facts_end, start = 0, b""
            if found is not None:
                begin = self._line_begin(found) or 0
                facts_end = min(begin + _LOOK_BACK_TEXT, end)
                start = self._pread(facts_end - begin, begin)
            last = max(end - _LAST_WORDS, facts_end)
            text = self._pread(end - last, last)
        except inputs.DAMAGE:
            return b""
        if last and last != facts_end:  # `text` starts inside a line
            start, text = start[: start.rfind(b"\n") + 1], text[text.find(b"\n") + 1 :]
        return Lines(self.lines.limit, Counter()).take(start + text)

    def read(self, now: float) -> Iterator[bytes]:
        """Yield new lines, at most the budget; `at_end` is True if that was all."""
        budget = BUDGET
        self.at_end = self.has_ended
        self.reason = "ended" if self.has_ended else ""
        try:
            while budget > 0 and not self.at_end:
                raw = self._next() if self.is_regular and not self.is_packed else self._next_of_stream()
                budget -= len(raw) or CHUNK
                if raw:
                    self.grown_at = now
                    yield self.lines.take(raw)
            if self.has_ended and not self.reason:
                self.reason = "ended"
                yield self.lines.flush()
        except inputs.DAMAGE as error:
            self.reason = f"unreadable: {getattr(error, 'strerror', None) or error}"
            self.at_end = True

    def _pread(self, size: int, at: int) -> bytes:
        if self._text is None:
            return os.pread(self.fd, size, at)
        self._text.seek(at)
        return self._text.read(size)

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

    def _next_of_stream(self) -> bytes:
        """Read on in a pipe or in the text of a compressed file."""
        raw = b""
        if self._text is not None:
            raw = self._pread(CHUNK, self.position)
        elif self._ready.poll(0):  # the blocking mode of standard input is not ours to change
            with suppress(BlockingIOError):
                raw = os.read(self.fd, CHUNK)
                self.has_ended = not raw and self.path == STDIN
        self.at_end = not raw
        self._advance(raw)
        self.size = self.position + (not self.at_end)
        return raw

    def _next(self) -> bytes:
        # One read returns the text before the position and the new text: nothing can change between check and use.
        known = len(self._tail)
        got = os.pread(self.fd, known + CHUNK, self.position - known)
        head, status = self._first_text(), os.fstat(self.fd)
        if got[:known] != self._tail or not head.startswith(self._head) or status.st_size < self.position:
            self.rewritten = self.at_end = True
            return b""
        self._head, self.size, self.modified = head, status.st_size, status.st_mtime_ns
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


def _last(before: bytes, text: bytes, end: int) -> bytes:
    return _after_nul((before + text[max(0, end - TAIL_BYTES) : end])[-TAIL_BYTES:])


def _after_nul(text: bytes) -> bytes:
    return text[text.rfind(b"\0") + 1 :]  # bytes that are NUL now may be text later
