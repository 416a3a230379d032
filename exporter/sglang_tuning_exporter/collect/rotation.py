"""The files that a rotation has laid beside a log: which they are by name, in which order they were written, and which one is which."""

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
        """What can be found again by its identity and its text."""

        @property
        def inode(self) -> int:
            """Its identity."""

        @property
        def held(self) -> bool:
            """Whether it is open, so that its identity is sure."""

        @property
        def modified(self) -> int:
            """When it was written last, in nanoseconds."""

        @property
        def is_empty(self) -> bool:
            """Whether it had no text and could still get some."""

        def fits(self, fd: int, name: str = "") -> bool:
            """Say whether the open file has this text."""


MOST_FILES = 512
"""Rotated files that are looked at, the newest of a log; a directory may hold thousands."""
DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""What a compressed file raises that is cut or damaged."""
OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY  # a FIFO without a writer opens at once
_VOTERS = 32  # numbered files whose times are compared to see which way the numbers run
_EMPTY_BYTES = 512  # no compressed empty file is larger: a header, which may hold a name, and a checksum
_UNPACK: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
READABLE = tuple(_UNPACK)
"""Extensions of compressed files that can be read; Python reads no `.zst` before 3.14."""
_COMPRESSED = (*_UNPACK, ".zst", ".lz4", ".zip")
# logrotate's .1 and -20260131, Docker's .1, the kubelet's .20260318-112205, RotatingFileHandler's .2026-01-31_23
_SUFFIX = re.compile(r"[.-]\d[\dT:._Z+-]*")
_INFIX = re.compile(
    r"[._-]\d{4}-?\d\d-?\d\d[\dT:._Z+-]*"
)  # server-20260131.log; a plain number would be another server's
_MULTILOG = re.compile(r"@[0-9a-f]{24}\.[su]")  # beside `current`: multilog, svlogd and s6-log
_COUNT = re.compile(r"[.-]\d{1,5}")


@dataclass(frozen=True, slots=True)
class Place:
    """A rotated file: where it is, and what it was when it was looked at."""

    path: str
    inode: int
    device: int
    size: int  # 0 also of a compressed file without text
    modified: int  # nanoseconds
    suffix: str  # what the rotation added to the name
    inside: bool = False  # added before the extension

    @property
    def count(self) -> int | None:
        """The number in a name like server.log.3; None for a date."""
        return int(self.suffix[1:]) if _COUNT.fullmatch(self.suffix) else None


def packing(path: str) -> str:
    """Give the extension of a compressed file, empty for any other."""
    return next((end for end in _COMPRESSED if path.endswith(end)), "")


def is_readable(path: str) -> bool:
    """Whether a file is not compressed, or in a form that Python can read."""
    return packing(path) in ("", *READABLE)


@contextmanager
def unpacked(fd: int, name: str) -> Iterator[IO[bytes]]:
    """Open the text of a compressed file. Raises `OSError` for a packing that Python cannot open."""
    opener = _UNPACK.get(packing(name))
    if opener is None:
        raise OSError(f"{packing(name)} files cannot be read")
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        with opener(file) as text:
            yield text


def bases(path: str) -> Iterator[str]:
    """Give the names whose rotated file `path` may be, by its name: server.log of server.log.1 and of server.log-20260131.gz."""
    plain = path.removesuffix(packing(path))
    start = plain.rfind("/") + 1
    for at in range(start + 1, len(plain)):
        if plain[at] in ".-" and _SUFFIX.fullmatch(plain, at):
            yield plain[:at]


def folder_modified(path: str) -> int:
    """Say when a file was last made, renamed or deleted beside the log, in nanoseconds; 0 where that cannot be told."""
    try:
        return os.stat(os.path.dirname(os.path.realpath(path))).st_mtime_ns  # noqa: PTH116, PTH120 -- ten times a second
    except (OSError, ValueError):  # a name that no file can have
        return 0


def beside(path: str) -> list[Place]:
    """Return the rotated files of the log at `path`, the oldest first."""
    folder, base = os.path.split(os.path.realpath(path))
    found: dict[str, Place] = {}
    try:
        with os.scandir(folder) as entries:
            names = [(entry.name, *_added(entry.name, base)) for entry in entries]
        for name, suffix, inside in names:
            if suffix and (packing(name) == "" or suffix not in found):  # while it is compressed both are there
                with suppress(OSError):
                    path = os.path.join(folder, name)  # noqa: PTH118 -- thousands of them
                    found[suffix] = _place(path, suffix, inside=inside)
    except (OSError, ValueError):
        return []
    return _newest(list(found.values()))


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
    """Return at most `MOST_FILES` places in the order in which they were written; empty files give way first."""
    ordered = _in_order(places)
    room = max(0, MOST_FILES - sum(place.size > 0 for place in places))
    empty = [place for place in ordered if not place.size]
    left_out = set(empty[: max(0, len(empty) - room)])
    return [place for place in ordered if place not in left_out][-MOST_FILES:]


def _in_order(places: list[Place]) -> list[Place]:
    """Sort by the dates or the numbers in the names. The times of most files say whether numbers rise or fall with age."""
    numbered = sorted((place for place in places if place.count is not None), key=lambda each: each.count or 0)
    if not numbered:
        return sorted(places, key=lambda each: (re.sub(r"\D", "", each.suffix), each.modified))
    if len(numbered) < len(places):
        return sorted(places, key=lambda each: (each.modified, -(each.count or 0), each.suffix))
    # Anybody may create thousands of empty files, and one may get its first text late: those with text decide.
    pairs = list(itertools.combinations([place.modified for place in numbered if place.size][:_VOTERS], 2))
    up, down = sum(before < after for before, after in pairs), sum(before > after for before, after in pairs)
    if pairs and up == down:
        return sorted(places, key=lambda each: (each.modified, -(each.count or 0)))
    # Not by the times alone: one process of a server may write on in a file when another one has begun the next.
    return numbered if up > down else numbered[::-1]


def assign(marks: Sequence[Marked], places: Sequence[Place]) -> dict[int, int]:
    """Return which mark (by index) is of which place, both oldest first: by identity first, then by text. Each place once.

    A copy has the text of a file that is not there any more, or has been truncated; while a file is there itself, another
    of the same text is another file.
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
    """Return the same for the marks of an earlier process.

    A file that was empty has no text to be found by. Where its inode is gone it is the file just before its successor,
    unless that one is another mark's or was written earlier.
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
