"""Rotated files in the directory of a log: find them by name, order them by age, recognise known ones."""

from __future__ import annotations

import bz2
import gzip
import itertools
import lzma
import os
import re
import zlib
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Protocol

    class Marked(Protocol):
        """A file that can be found again by inode and text."""

        @property
        def inode(self) -> int:
            """Its inode number."""

        @property
        def held(self) -> bool:
            """Whether it is open, so that its inode cannot have been reused."""

        @property
        def modified(self) -> int:
            """Its last modification, in nanoseconds."""

        @property
        def is_empty(self) -> bool:
            """Whether it had no text and could still get some."""

        def fits(self, fd: int, name: str = "") -> bool:
            """Return whether the open file has this text."""


MOST_FILES = 512
"""The newest rotated files of a log that are considered; a directory may hold thousands."""
MOST_FOLDERS = 64
"""Directories beside a log that are searched for rotated files; those that changed last."""
DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""Exceptions that a truncated or damaged compressed file raises."""
OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY  # opening a FIFO without a writer must not block
_VOTERS = 32  # numbered files whose times decide whether numbers rise or fall with age
_MOST_EMPTY = 8  # empty files that are considered: one may get its first text late, but anybody may create thousands
_EMPTY_BYTES = 512  # a compressed empty file is smaller: a header with a file name, and a checksum
_UNPACK: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
READABLE = tuple(_UNPACK)
"""Extensions of compressed files that can be read; Python cannot read `.zst` before 3.14."""
_COMPRESSED = (*_UNPACK, ".zst", ".lz4", ".zip")
# logrotate's .1 and -20260131, Docker's .1, the kubelet's .20260318-112205, RotatingFileHandler's .2026-01-31_23
_SUFFIX = re.compile(r"[.-]\d[\dT:._Z+-]*")
_INFIX = re.compile(
    r"[._-]\d{4}-?\d\d-?\d\d[\dT:._Z+-]*"
)  # server-20260131.log; a plain number would belong to another server
_MULTILOG = re.compile(r"@[0-9a-f]{24}\.[su]")  # multilog, svlogd and s6-log, whose log is `current`
_COUNT = re.compile(r"[.-]\d{1,5}")


@dataclass(frozen=True, slots=True)
class Place:
    """A rotated file: its path and its status when the directory was read."""

    path: str
    inode: int
    device: int
    size: int  # 0 also of a compressed file without text
    modified: int  # nanoseconds
    suffix: str  # what the rotation added to the name
    inside: bool = False  # added before the extension

    @property
    def is_spent(self) -> bool:
        """Whether it has no text and cannot get any."""
        return not self.size and packing(self.path) != ""

    @property
    def count(self) -> int | None:
        """The number in a name like server.log.3; None for a date."""
        return int(self.suffix[1:]) if _COUNT.fullmatch(self.suffix) else None


def packing(path: str) -> str:
    """Return the extension of a compressed file, empty for any other."""
    return next((end for end in _COMPRESSED if path.endswith(end)), "")


def is_readable(path: str) -> bool:
    """Return whether a file is uncompressed or in a format that Python can read."""
    return packing(path) in ("", *READABLE)


@contextmanager
def unpacked(fd: int, name: str) -> Iterator[IO[bytes]]:
    """Open the text of a compressed file. Raise `OSError` for a format that Python cannot read."""
    opener = _UNPACK.get(packing(name))
    if opener is None:
        raise OSError(f"{packing(name)} files cannot be read")
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        with opener(file) as text:
            yield text


def bases(path: str) -> Iterator[str]:
    """Yield the log names that `path` may belong to: server.log for server.log.1, server.log-20260131.gz and old/server.log.1."""
    plain = path.removesuffix(packing(path))
    folder, slash, name = plain.rpartition("/")
    above = folder[: folder.rfind("/") + 1]
    for at in range(1, len(name)):
        if name[at] in ".-" and _SUFFIX.fullmatch(name, at):
            yield folder + slash + name[:at]
            yield above + name[:at]


class Folders:
    """The directory of a log and those directly in it, to one of which rotated files may be moved (logrotate's `olddir`)."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._below: list[str] = []
        self._modified: list[int] = []
        self.changed()

    def changed(self) -> bool:
        """Return whether a file was created, renamed or deleted in one of them since the last call."""
        try:
            folder = os.path.dirname(os.path.realpath(self._path))  # noqa: PTH120 -- ten times a second
            modified = os.stat(folder).st_mtime_ns  # noqa: PTH116
            if self._modified[:1] != [modified]:
                self._below = _directories(folder)
        except (OSError, ValueError):  # a name with a NUL byte
            self._below, modified = [], 0
        before, self._modified = self._modified, [modified, *map(_modified, self._below)]
        return before != self._modified

    def beside(self, marks: Sequence[Marked]) -> list[Place]:
        """Return the rotated files of the log, oldest first, also of a directory in which one of the marked files is.

        Directories are searched if the newest marked file is not beside the log.
        """
        folder, base = os.path.split(os.path.realpath(self._path))
        found = _rotated(folder, base)
        if not marks or not assign(marks[-1:], found):
            self.changed()
            for below in self._below:
                # A directory with a log of this name has the files of another server.
                there = [] if os.path.lexists(os.path.join(below, base)) else _rotated(below, base)  # noqa: PTH118
                if assign(marks, there):
                    found += there
        return _newest(found)


def _modified(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns  # noqa: PTH116 -- ten times a second
    except OSError:
        return 0


def _directories(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        found = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted(found, key=_modified, reverse=True)[:MOST_FOLDERS]


def _rotated(folder: str, base: str) -> list[Place]:
    """Return the files of one directory that belong to the log of this name."""
    found: dict[str, Place] = {}
    with suppress(OSError, ValueError), os.scandir(folder) as entries:
        for name, suffix, inside in [(entry.name, *_added(entry.name, base)) for entry in entries]:
            if suffix and (packing(name) == "" or suffix not in found):  # both exist while a file is being compressed
                with suppress(OSError):
                    path = os.path.join(folder, name)  # noqa: PTH118 -- thousands of them
                    found[suffix] = _place(path, suffix, inside=inside)
    return list(found.values())


def _place(path: str, suffix: str, *, inside: bool) -> Place:
    status = os.stat(path)  # noqa: PTH116 -- thousands of them
    size = status.st_size
    if 0 < size <= _EMPTY_BYTES and packing(path) and _unpacks_to_nothing(path):
        size = 0
    return Place(path, status.st_ino, status.st_dev, size, status.st_mtime_ns, suffix, inside)


def _unpacks_to_nothing(path: str) -> bool:
    try:
        fd = os.open(path, OPEN)
    except OSError:
        return False
    try:
        with unpacked(fd, path) as text:
            return not text.read(1)
    except DAMAGE:
        return False
    finally:
        os.close(fd)


def _added(name: str, base: str) -> tuple[str, bool]:
    plain = name.removesuffix(packing(name))
    if plain == base:
        return "", False
    if plain.startswith(base) and _SUFFIX.fullmatch(plain, len(base)):
        return plain[len(base) :], False
    if base == "current" and _MULTILOG.fullmatch(name):
        return name, False
    stem, dot, extension = base.rpartition(".")
    if stem and plain.startswith(stem) and plain.endswith(dot + extension):
        middle = plain[len(stem) : len(plain) - len(extension) - 1]
        if _INFIX.fullmatch(middle):
            return middle, True
    return "", False


def _newest(places: list[Place]) -> list[Place]:
    """Return at most `MOST_FILES` places, oldest first, of which `_MOST_EMPTY` are empty."""
    ordered = _in_order(places)
    room = min(_MOST_EMPTY, max(0, MOST_FILES - sum(place.size > 0 for place in places)))
    empty = [place.path for place in ordered if not place.size]
    left_out = set(empty[: max(0, len(empty) - room)])
    return [place for place in ordered if place.path not in left_out][-MOST_FILES:]


def _in_order(places: list[Place]) -> list[Place]:
    """Sort by the dates or the numbers in the names. The times of most files say whether numbers rise or fall with age."""
    numbered = sorted((place for place in places if place.count is not None), key=lambda each: each.count or 0)
    if not numbered:
        return sorted(places, key=lambda each: (re.sub(r"\D", "", each.suffix), each.modified))
    if len(numbered) < len(places):
        return sorted(places, key=lambda each: (each.modified, -(each.count or 0), each.suffix))
    # Files with text decide: anybody may create thousands of empty files, and one may get its first text late.
    pairs = list(itertools.combinations([place.modified for place in numbered if place.size][:_VOTERS], 2))
    up, down = sum(before < after for before, after in pairs), sum(before > after for before, after in pairs)
    if pairs and up == down:
        return sorted(places, key=lambda each: (each.modified, -(each.count or 0)))
    # Times alone are not enough: one process may still write to a file when another one has begun the next.
    return numbered if up > down else numbered[::-1]


def assign(marks: Sequence[Marked], places: Sequence[Place]) -> dict[int, int]:
    """Return the place of each mark that was found, as indices; both lists are oldest first. Each place is used once.

    A mark is found by its inode, else by its text: a copy of a file that is gone or was truncated has the same text.
    While the file itself exists, another one with the same text is a different file.
    """
    found: dict[int, int] = {}
    for at, mark in enumerate(marks):
        same = (i for i, place in enumerate(places) if place.inode == mark.inode and (mark.held or _fits(mark, place)))
        if (place := next(same, None)) is not None and place not in found.values():
            found[at] = place
    for at, mark in enumerate(marks):
        if at not in found:
            low = max((place for before, place in found.items() if before < at), default=-1)
            copies = (i for i in range(low + 1, len(places)) if i not in found.values() and _fits(mark, places[i]))
            if (place := next(copies, None)) is not None:
                found[at] = place
    return found


def assign_saved(marks: Sequence[Marked], places: Sequence[Place]) -> dict[int, int]:
    """Return the same for marks of an earlier process, whose files are not open.

    An empty file cannot be found by text. If its inode is gone, it is the file just before its successor,
    unless that file belongs to another mark or is older.
    """
    found = assign(marks, places)
    for at, mark in reversed([*enumerate(marks)]):
        if at not in found and mark.is_empty:
            before = min((place for after, place in found.items() if after > at), default=0) - 1
            if before >= 0 and before not in found.values() and places[before].modified >= mark.modified:
                found[at] = before
    return found


def _fits(mark: Marked, place: Place) -> bool:
    try:
        fd = os.open(place.path, OPEN)
    except OSError:
        return False
    try:
        return mark.fits(fd, place.path)
    finally:
        os.close(fd)
