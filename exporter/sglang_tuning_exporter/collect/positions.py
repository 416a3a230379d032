"""How far a log has been read, in a form that survives truncation, rotation and restart.

A mark is an offset with digests of the text at the file's start and just before the offset. It holds digests because
the text may contain secrets of the server's arguments, and marks are written to the state file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sglang_tuning_exporter.collect import rotation
from sglang_tuning_exporter.collect.compression import DAMAGE
from sglang_tuning_exporter.collect.rotation import RotatedFile

HEAD_BYTES = 1024  # of a file's start that are remembered: several lines
TAIL_BYTES = 256  # before a position that are remembered: one or two log lines
SURE_BYTES = 32  # equal before the offset, or at the start, that prove a copy with another inode
_SEARCHED = 16 << 20  # bytes of a file that are searched for the text that was read last
_NEVER = 1 << 63
# Of a mark in a state file, with what an older one lacks.
_NUMBERS = dict.fromkeys(("inode", "position", "head_bytes", "tail_bytes")) | {
    "size": 0,
    "modified": _NEVER,
    "generation": 0,
}
_GET_VERSION = 0x80007601 | struct.calcsize("l") << 16  # FS_IOC_GETVERSION of linux/fs.h


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a file has been read. In a compressed file bytes are those of the text."""

    path: str  # the name of its log
    inode: int
    position: int  # in bytes: the start of a line, or the end of an incomplete last line
    head_bytes: int
    head: str
    tail_bytes: int
    tail: str
    size: int = 0  # at the last look
    modified: int = _NEVER  # nanoseconds
    joined: bool = False  # its last line continues in the next file of the log
    generation: int = 0  # of the inode, whose number is reused after deletion; 0: unknown
    held: bool = False  # the file is open and `position` is its end: a copy ends there as well
    least: int = SURE_BYTES  # bytes before the offset that prove a copy

    def json(self) -> dict[str, object]:
        """Return the mark as an object for a state file."""
        return {name: getattr(self, name) for name in self.__slots__ if name not in ("held", "least")}

    @property
    def is_sure(self) -> bool:
        """Whether another file is unlikely to have the same text at the same places."""
        return self.tail_bytes >= self.least or self.head_bytes >= SURE_BYTES

    @property
    def is_empty(self) -> bool:
        """Whether the file had no text at the last read and could still get some; a copy cannot."""
        return not self.head_bytes and not self.position and not self.joined

    def matches(self, fd: int, name: str = "") -> bool:
        """Return whether the open file is the marked one or a copy of it, and was not rewritten."""
        try:
            same = self.is_same_file(fd)
            if not same and not self.tail_bytes and not self.is_sure:
                return False
            if rotation.packing_of(fd, name):
                with rotation.unpacked(fd, name) as file:
                    return self._has_same_text(
                        lambda size, at: file.read(size) if file.seek(at) == at else b"", same=same
                    )
            return self._has_same_text(lambda size, at: os.pread(fd, size, at), same=same)
        except DAMAGE:
            return False

    def is_same_file(self, fd: int) -> bool:
        """Return whether the open file is the marked one, whatever its text: the same inode and generation."""
        if os.fstat(fd).st_ino != self.inode:
            return False
        return not self.generation or generation(fd) in (self.generation, 0)

    def is_surely(self, fd: int) -> bool:
        """Return whether the open file is the marked one, and neither was rewritten nor is too short to be certain."""
        return self.head_bytes >= SURE_BYTES and self.is_same_file(fd) and self.matches(fd)

    def _has_same_text(self, pread: Callable[[int, int], bytes], *, same: bool) -> bool:
        if digest(pread(self.head_bytes, 0)) != self.head:
            return False
        more = not same and (self.held or not self.is_sure)  # so little text must be all of it
        tail = pread(self.tail_bytes + more, self.position - self.tail_bytes)
        return len(tail) == self.tail_bytes and digest(tail) == self.tail

    def known_text(self, fd: int) -> int:
        """Return how many bytes of a file's start were read under this mark, although it does not fit; 0 if none.

        The file was cut to its own beginning or to its own end.
        """
        size = os.fstat(fd).st_size
        if not self.is_sure or not 0 < size < self.position:
            return 0
        text = os.pread(fd, min(size, _SEARCHED), 0)
        if size >= self.head_bytes and digest(text[: self.head_bytes]) == self.head:
            return size
        at = len(text)
        while (at := text.rfind(b"\n", 0, at) + 1) >= self.tail_bytes and at:
            # At least one whole line: long lines may end alike.
            if digest(text[at - self.tail_bytes : at]) == self.tail and b"\n" in text[at - self.tail_bytes : at - 1]:
                return at
            at -= 1
        return 0


@dataclass(frozen=True, slots=True)
class SavedPositions:
    """Patterns and marks of an earlier process; marks of a path are oldest first."""

    patterns: frozenset[str]
    marks: tuple[Mark, ...]

    def of(self, path: str) -> list[Mark]:
        """Return the marks made under `path`; the last one is of the file with that name."""
        return [mark for mark in self.marks if mark.path == path]

    def mark_of_open_file(self, fd: int) -> Mark | None:
        """Return the mark of the open file, whatever its name was, or None."""
        return next((mark for mark in self.marks if mark.is_same_file(fd) and mark.matches(fd)), None)


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


def make_mark(path: str, inode: int, position: int, head: bytes, tail: bytes, **more: Any) -> Mark:
    """Return the mark of a file whose first bytes are `head` and whose bytes before `position` are `tail`."""
    return Mark(path, inode, position, len(head), digest(head), len(tail), digest(tail), **more)


def mark_of_all(path: str, fd: int) -> Mark:
    """Return the mark of a whole file."""
    status = os.fstat(fd)
    length = min(status.st_size, TAIL_BYTES)
    head, tail = os.pread(fd, HEAD_BYTES, 0), os.pread(fd, length, status.st_size - length)
    looked = {"size": status.st_size, "modified": status.st_mtime_ns, "generation": generation(fd)}
    return make_mark(path, status.st_ino, status.st_size, head[: status.st_size], tail, **looked, held=True, least=1)


def dump_positions(patterns: Iterable[str], marks: Iterable[Mark]) -> dict[str, object]:
    """Return the document that `load_positions` reads, as plain JSON."""
    return {"patterns": list(patterns), "files": [mark.json() for mark in marks]}


def load_positions(positions: Mapping[str, object] | None) -> SavedPositions:
    """Read the document of `dump_positions`; invalid parts are left out, since a state file may be damaged."""
    patterns, files = (positions or {}).get("patterns"), (positions or {}).get("files")
    marks = (_mark(entry) for entry in files) if isinstance(files, list) else ()
    return SavedPositions(
        frozenset(p for p in patterns if isinstance(p, str)) if isinstance(patterns, list) else frozenset(),
        tuple(mark for mark in marks if mark is not None),
    )


def _mark(entry: object) -> Mark | None:
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


class LogDirectories:
    """The directory of a log and those directly in it, to one of which rotated files may be moved (logrotate's `olddir`)."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._subdirectories: list[str] = []
        self._modified: list[int] = []
        self.changed()

    def changed(self) -> bool:
        """Return whether a file was created, renamed or deleted in one of them since the last call."""
        try:
            folder = os.path.dirname(os.path.realpath(self._path))  # noqa: PTH120 -- ten times a second
            modified = os.stat(folder).st_mtime_ns  # noqa: PTH116 -- ten times a second
            if self._modified[:1] != [modified]:
                self._subdirectories = rotation.directories(folder)
        except (OSError, ValueError):  # a name with a NUL byte
            self._subdirectories, modified = [], 0
        before, self._modified = self._modified, [modified, *map(rotation.modified, self._subdirectories)]
        return before != self._modified

    def rotated_files(self, marks: Sequence[Mark]) -> list[RotatedFile]:
        """Return the rotated files of the log, oldest first, also of a directory in which one of the marked files is.

        Directories, and files with other names, are searched if the newest marked file is not beside the log.
        """
        target = os.path.realpath(self._path)
        folder, base = os.path.split(target)
        found = rotation.rotated(folder, base)
        if marks and not assign(marks[-1:], found):
            for there in rotation.alike(target, marks[-1].inode):
                if assign(marks, there):
                    return there
            for below in rotation.directories(folder):
                # A directory with a log of this name has the files of another server.
                there = [] if os.path.lexists(f"{below}/{base}") else rotation.rotated(below, base)
                if assign(marks, there):
                    found = rotation.newest(found + there)
        return found


def assign(marks: Sequence[Mark], files: Sequence[RotatedFile]) -> dict[int, int]:
    """Return the index of the file of each mark, by the index of the mark, where found; both lists are oldest first. Each file is used once.

    A mark is found by its inode, else by its text: a copy of a file that is gone or was truncated has the same text.
    While the file itself exists, another one with the same text is a different file.
    """
    found: dict[int, int] = {}
    for at, mark in enumerate(marks):
        same = (i for i, file in enumerate(files) if file.inode == mark.inode and (mark.held or _matches(mark, file)))
        if (index := next(same, None)) is not None and index not in found.values():
            found[at] = index
    for at, mark in enumerate(marks):
        if at not in found:
            low = max((index for before, index in found.items() if before < at), default=-1)
            copies = (i for i in range(low + 1, len(files)) if i not in found.values() and _matches(mark, files[i]))
            if (index := next(copies, None)) is not None:
                found[at] = index
    return found


def assign_saved(marks: Sequence[Mark], files: Sequence[RotatedFile]) -> dict[int, int]:
    """Return the same for marks of an earlier process, whose files are not open.

    An empty file cannot be found by text. If its inode is gone, it is the file just before its successor,
    unless that file belongs to another mark or is older.
    """
    found = assign(marks, files)
    for at, mark in reversed([*enumerate(marks)]):
        if at not in found and mark.is_empty:
            before = min((index for after, index in found.items() if after > at), default=0) - 1
            if before >= 0 and before not in found.values() and files[before].modified >= mark.modified:
                found[at] = before
    return found


def _matches(mark: Mark, file: RotatedFile) -> bool:
    with suppress(OSError), rotation.opened(file.path) as fd:
        return mark.matches(fd, file.path)
    return False
