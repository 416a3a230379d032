"""How far a log has been read, told so that it can be found again: after a truncation, a rotation, or a restart.

A mark is an offset with digests of the text at the file's start and just before the offset. Digests, because the text
itself may hold a secret of the server's arguments and marks are written to the state file.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

HEAD_BYTES = 64
"""How much of a file's start is remembered: a line's timestamp and the beginning of its words."""
TAIL_BYTES = 256
"""How much of the text before a position is remembered: one or two log lines."""
_SURE_BYTES = 32  # this much equal text before the offset proves a copy, whose inode is another
_ROTATED = re.compile(r"[.-]\d[\d.T:_-]*")  # logrotate's .1 and -20260131, RotatingFileHandler's .1, .2026-01-31_23
_COMPRESSED = (".gz", ".xz", ".zst", ".bz2", ".lz4", ".zip")


@dataclass(frozen=True, slots=True)
class Mark:
    """All of inode `inode` before byte `position` has been read and told; `path` was its name then.

    It is the start of a line, or the end of a last line that nobody ended.
    """

    path: str
    inode: int
    position: int
    head_bytes: int
    head: str
    tail_bytes: int
    tail: str

    def json(self) -> dict[str, object]:
        """Return the mark as an object for a state file."""
        return {name: getattr(self, name) for name in self.__slots__}

    def fits(self, fd: int) -> bool:
        """Say whether the open file is the marked one, or a copy of it, and has not been written anew."""
        try:
            status = os.fstat(fd)
            if status.st_size < self.position:
                return False
            head = os.pread(fd, self.head_bytes, 0)
            tail = os.pread(fd, self.tail_bytes, self.position - self.tail_bytes)
        except OSError:
            return False
        same_text = digest(head) == self.head and digest(tail) == self.tail
        return same_text and (status.st_ino == self.inode or self.tail_bytes >= _SURE_BYTES)


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
        inode = os.fstat(fd).st_ino
        return next((mark for mark in self.marks if mark.inode == inode and mark.fits(fd)), None)


def digest(text: bytes) -> str:
    """Return a short digest of `text` that tells nothing about it."""
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def make_mark(path: str, inode: int, position: int, head: bytes, tail: bytes) -> Mark:
    """Return the mark of a file whose first bytes are `head` and whose bytes before `position` are `tail`."""
    return Mark(path, inode, position, len(head), digest(head), len(tail), digest(tail))


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
    if not (isinstance(path, str) and isinstance(head, str) and isinstance(tail, str)):
        return None
    whole = [n for n in numbers if isinstance(n, int) and n >= 0]
    if len(whole) != len(numbers) or whole[3] > whole[1] or whole[2] > HEAD_BYTES or whole[3] > TAIL_BYTES:
        return None
    return Mark(path, whole[0], whole[1], whole[2], head, whole[3], tail)


def is_compressed(path: str) -> bool:
    """Say whether the name is that of a compressed archive, which a followed log never is."""
    return path.endswith(_COMPRESSED)


def is_rotated_name(path: str, base: str) -> bool:
    """Say whether a rotation would call an older `base` so: server.log.1, server.log-20260131."""
    return path.startswith(base) and _ROTATED.fullmatch(path[len(base) :]) is not None


def rotated(mark: Mark) -> list[str]:
    """Return where the text after `mark` is, once its path holds another file: the old file, then those after it.

    The old file is looked for next to its path, by inode and text, or by text alone for the copy that a copytruncate
    makes; the rotations since then are the uncompressed neighbours written later. Empty when it is not there.
    """
    base = Path(mark.path)
    try:
        names = [entry for entry in base.parent.iterdir() if is_rotated_name(entry.name, base.name)]
        aged = sorted((path.stat().st_mtime_ns, path) for path in names if path.is_file())
    except OSError:
        return []
    for at, (_, path) in enumerate(aged):
        if _fits(path, mark):
            return [str(path), *(str(later) for _, later in aged[at + 1 :])]
    return []


def _fits(path: Path, mark: Mark) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return mark.fits(fd)
    finally:
        os.close(fd)
