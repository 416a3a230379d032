"""How far a log has been read, told so that it can be found again: after a truncation, a rotation, or a restart.

A mark is an offset with digests of the text at the file's start and just before the offset. Digests, because the text
itself may hold a secret of the server's arguments and marks are written to the state file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sglang_tuning_exporter.collect import rotation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

HEAD_BYTES = 1024
"""How much of a file's start is remembered: several lines."""
TAIL_BYTES = 256
"""How much of the text before a position is remembered: one or two log lines."""
SURE_BYTES = 32
"""This much equal text before the offset, or at the start, proves a copy, whose inode is another."""
_SEARCHED = 16 << 20  # how far into a file the text is looked for that was read last
_NEVER = 1 << 63
_GET_VERSION = 0x80007601 | struct.calcsize("l") << 16  # FS_IOC_GETVERSION of linux/fs.h


@dataclass(frozen=True, slots=True)
class Mark:
    """All of inode `inode` before byte `position` has been read and told; `path` was its log's name then.

    It is the start of a line, or the end of a last line that nobody ended. Bytes are those of the text where the file is
    compressed. `joined`: its last line goes on in the next file of the log.
    """

    path: str
    inode: int
    position: int
    head_bytes: int
    head: str
    tail_bytes: int
    tail: str
    size: int = 0  # at the last look
    modified: int = _NEVER  # nanoseconds
    joined: bool = False
    generation: int = (
        0  # of the inode, which is given to another file once this one is deleted; 0: the file system has none
    )
    held: bool = False  # the file is open, and `position` is its end: another of the same text ends there as well
    least: int = SURE_BYTES  # text before the offset that proves a copy

    def json(self) -> dict[str, object]:
        """Return the mark as an object for a state file."""
        return {name: getattr(self, name) for name in self.__slots__ if name not in ("held", "least")}

    @property
    def is_sure(self) -> bool:
        """Whether the same text at the same places can hardly be that of another file."""
        return self.tail_bytes >= self.least or self.head_bytes >= SURE_BYTES

    @property
    def is_empty(self) -> bool:
        """Whether the file had no text at the last look, and could still get some: a copy is complete."""
        return not self.head_bytes and not self.position and not self.joined

    def fits(self, fd: int, name: str = "") -> bool:
        """Say whether the open file is the marked one, or a copy of it, and has not been written anew."""
        try:
            same = self.is_of(fd)
            if not same and not self.tail_bytes and not self.is_sure:
                return False
            if rotation.packing(name):
                with rotation.unpacked(fd, name) as file:
                    return self._is_in(lambda size, at: file.read(size) if file.seek(at) == at else b"", same=same)
            return self._is_in(lambda size, at: os.pread(fd, size, at), same=same)
        except rotation.DAMAGE:
            return False

    def is_of(self, fd: int) -> bool:
        """Say whether the open file is the marked one, whatever its text: the same inode, and not given to a later file."""
        if os.fstat(fd).st_ino != self.inode:
            return False
        return not self.generation or generation(fd) in (self.generation, 0)

    def _is_in(self, pread: Callable[[int, int], bytes], *, same: bool) -> bool:
        if digest(pread(self.head_bytes, 0)) != self.head:
            return False
        more = not same and (self.held or not self.is_sure)  # so little text must be all of it
        tail = pread(self.tail_bytes + more, self.position - self.tail_bytes)
        return len(tail) == self.tail_bytes and digest(tail) == self.tail

    def known_text(self, fd: int) -> int:
        """Return how much of a file's start had been read under this mark, although the mark does not fit: 0 if none.

        It was cut to its own beginning, or to its own end.
        """
        size = os.fstat(fd).st_size
        if not self.is_sure or not 0 < size < self.position:
            return 0
        text = os.pread(fd, min(size, _SEARCHED), 0)
        if size >= self.head_bytes and digest(text[: self.head_bytes]) == self.head:
            return size
        at = len(text)
        while (at := text.rfind(b"\n", 0, at) + 1) >= self.tail_bytes and at:
            # At least one whole line: the ends of long lines are alike.
            if digest(text[at - self.tail_bytes : at]) == self.tail and b"\n" in text[at - self.tail_bytes : at - 1]:
                return at
            at -= 1
        return 0


@dataclass(frozen=True, slots=True)
class Saved:
    """What an earlier follower had read: its patterns, and its marks, older ones of a path first."""

    patterns: frozenset[str]
    marks: tuple[Mark, ...]

    def of(self, path: str) -> list[Mark]:
        """Return the marks made under `path`, the file that bore the name last at the end."""
        return [mark for mark in self.marks if mark.path == path]

    def fitting(self, fd: int) -> Mark | None:
        """Return the mark of the open file under whatever name it had, or None."""
        return next((mark for mark in self.marks if mark.is_of(fd) and mark.fits(fd)), None)


def generation(fd: int) -> int:
    """Return the generation of an open regular file's inode, which tells it from later files of the same number; 0 if unknown."""
    try:
        number: int = struct.unpack("=I4x", fcntl.ioctl(fd, _GET_VERSION, bytes(8)))[0]
    except OSError:  # tmpfs, which gives no inode number again, or a file system of the network
        return 0
    return number


def digest(text: bytes) -> str:
    """Return a short digest of `text` that tells nothing about it."""
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def make_mark(path: str, inode: int, position: int, head: bytes, tail: bytes) -> Mark:
    """Return the mark of a file whose first bytes are `head` and whose bytes before `position` are `tail`."""
    return Mark(path, inode, position, len(head), digest(head), len(tail), digest(tail))


def mark_of_all(path: str, fd: int) -> Mark:
    """Return the mark of a whole file."""
    status = os.fstat(fd)
    length = min(status.st_size, TAIL_BYTES)
    head, tail = os.pread(fd, HEAD_BYTES, 0), os.pread(fd, length, status.st_size - length)
    mark = make_mark(path, status.st_ino, status.st_size, head[: status.st_size], tail)
    return replace(
        mark, size=status.st_size, modified=status.st_mtime_ns, generation=generation(fd), held=True, least=1
    )


def dump(patterns: Iterable[str], marks: Iterable[Mark]) -> dict[str, object]:
    """Return what `load` reads, as plain JSON."""
    return {"patterns": list(patterns), "files": [mark.json() for mark in marks]}


def load(positions: Mapping[str, object] | None) -> Saved:
    """Read what `dump` wrote; a part that is not as it should be is left out, since a state file may be damaged."""
    patterns, files = (positions or {}).get("patterns"), (positions or {}).get("files")
    marks = (_mark(entry) for entry in files) if isinstance(files, list) else ()
    return Saved(
        frozenset(p for p in patterns if isinstance(p, str)) if isinstance(patterns, list) else frozenset(),
        tuple(mark for mark in marks if mark is not None),
    )


def _mark(entry: object) -> Mark | None:
    if not isinstance(entry, Mapping):
        return None
    path, head, tail = entry.get("path"), entry.get("head"), entry.get("tail")
    numbers = [entry.get(name) for name in ("inode", "position", "head_bytes", "tail_bytes")]
    numbers += [entry.get("size", 0), entry.get("modified", _NEVER), entry.get("generation", 0)]  # not in older marks
    if not (isinstance(path, str) and isinstance(head, str) and isinstance(tail, str)):
        return None
    whole = [n for n in numbers if isinstance(n, int) and n >= 0]
    if len(whole) != len(numbers) or whole[3] > whole[1] or whole[2] > HEAD_BYTES or whole[3] > TAIL_BYTES:
        return None
    inode, position, head_bytes, tail_bytes, size, modified, number = whole
    joined = entry.get("joined") is True
    return Mark(path, inode, position, head_bytes, head, tail_bytes, tail, size, modified, joined, number)
