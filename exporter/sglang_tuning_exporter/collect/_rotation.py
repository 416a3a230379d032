"""Rotated files in the directory of a log: find them by name, order them by age, recognise known ones."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from sglang_tuning_exporter.core import inputs

MOST_FILES = 512  # the newest rotated files of a log that are considered; a directory may hold thousands
MOST_FOLDERS = 64  # directories beside a log that are searched for rotated files; those that changed last
OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY  # opening a FIFO without a writer must not block
_VOTERS = 32  # numbered files whose times decide whether numbers rise or fall with age
_MOST_EMPTY = 8  # empty files that are considered: one may get its first text late, but anybody may create thousands
_MAGIC_BYTES = max(map(len, inputs.MAGIC))
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
# logrotate's .1 and -20260131, Docker's .1, the kubelet's .20260318-112205, RotatingFileHandler's .2026-01-31_23
_SUFFIX = re.compile(r"[.-]\d[\dT:._Z+-]*")
_INFIX = re.compile(
    r"[._-]\d{4}-?\d\d-?\d\d[\dT:._Z+-]*"
)  # server-20260131.log; a plain number would belong to another server
# multilog, svlogd and s6-log, whose log is `current`; a processor such as gzip leaves the name as it is
_MULTILOG = re.compile(r"@[0-9a-f]{24}\.[su]")
_NUMBER = re.compile(r"[0-9]{1,20}")
_DATE_DIGITS = 6
_COUNT = re.compile(r"[.-]\d{1,5}")


@dataclass(frozen=True, slots=True)
class RotatedFile:
    """A rotated file: its path and its status when the directory was read."""

    path: str
    key: tuple[int, int]  # device and inode
    size: int
    modified: int  # nanoseconds
    suffix: str  # what the rotation added to the name
    inside: bool = False  # added before the extension

    @property
    def count(self) -> int | None:
        """The number in a name like server.log.3; None for a date."""
        return int(self.suffix[1:]) if _COUNT.fullmatch(self.suffix) else None


def packing(path: str) -> str:
    """Return the extension of a compressed file, empty for any other."""
    return next((end for end in _COMPRESSED if path.endswith(end)), "")


def packing_of(fd: int, path: str) -> str:
    """Return the extension that belongs to a compressed file, empty for any other; `multilog` and `compressext` give it
    another name.
    """
    if named := packing(path):
        return named
    found = inputs.packing(os.pread(fd, _MAGIC_BYTES, 0))
    is_text = found == ".bz2" and _MULTILOG.fullmatch(path.rpartition("/")[2]) is None  # it begins with letters
    return "" if is_text else found


@contextmanager
def opened(path: str) -> Iterator[int]:
    """Open a file for reading, and close it."""
    fd = os.open(path, OPEN)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def unpacked(fd: int, name: str) -> Iterator[IO[bytes]]:
    """Open the text of a compressed file. Raise `OSError` for a format that Python cannot read."""
    extension = packing_of(fd, name)
    opener = inputs.OPENERS.get(extension)
    if opener is None:
        raise OSError(f"{extension} files cannot be read")
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        with opener(file) as text:
            yield text


def log_names(path: str) -> Iterator[str]:
    """Yield the log names that `path` may belong to: server.log for server.log.1, server.log-20260131.gz and
    old/server.log.1.
    """
    plain = path.removesuffix(packing(path))
    folder, slash, name = plain.rpartition("/")
    above = folder[: folder.rfind("/") + 1]
    for at in range(1, len(name)):
        if name[at] in ".-" and _SUFFIX.fullmatch(name, at):
            yield folder + slash + name[:at]
            yield above + name[:at]


def modified(folder: str) -> int:
    """Return when a directory was last changed, in nanoseconds; 0 if unknown."""
    try:
        return os.stat(folder).st_mtime_ns  # noqa: PTH116 -- ten times a second
    except OSError:
        return 0


def directories(folder: str) -> list[str]:
    """Return the directories in one that changed last; none if it cannot be read."""
    found = [entry.path for entry in _entries(folder) if entry.is_dir(follow_symlinks=False)]
    return sorted(found, key=modified, reverse=True)[:MOST_FOLDERS]


def rotated(folder: str, base: str) -> list[RotatedFile]:
    """Return the files of one directory that belong to the log of this name, oldest first."""
    found: dict[str, RotatedFile] = {}
    for entry in _entries(folder):
        suffix, inside = _added(entry.name, base)
        if suffix and (packing(entry.name) == "" or suffix not in found):  # both exist while a file is being compressed
            with suppress(OSError):
                found[suffix] = _rotated_file(entry.path, suffix, inside=inside)
    return newest(list(found.values()))


def alike(path: str, inode: int) -> Iterator[list[RotatedFile]]:
    """Yield groups of files whose names differ only in their numbers, oldest first; one of them may hold the files
    before `path`.

    logrotate's `extension .log` renames server.log to server.1.log. rotatelogs, cronolog and glog write to
    server.20261123.log and move a link called server.log, whose real target is `path`: of those only files with smaller
    numbers are before it. The numbers may also be those of the directory. `inode`: of a file that is looked for.
    """
    folder, base = os.path.split(path)
    entries = _entries(folder, links=False)
    number = next((entry.inode() for entry in entries if entry.path == path), None)
    targets = [entry.path for entry in entries if entry.inode() == number]  # a hard link has several names
    stem = os.path.join(folder, _NUMBER.split(base.split(".")[0])[0])  # noqa: PTH118 -- as the entries
    shapes = dict.fromkeys(
        _shape(entry.path)
        for entry in entries
        if entry.inode() in (inode, number) or (stem != folder + "/" and entry.path.startswith(stem))
    )
    for shape in shapes:
        yield _group([entry for entry in entries if _shape(entry.path) == shape], targets, folder)
    above, own = os.path.split(folder)
    if _NUMBER.search(own):
        shape = _shape(own)
        others = [below for below in directories(above) if _shape(os.path.basename(below)) == shape]  # noqa: PTH119
        yield _group(
            [entry for below in others for entry in _entries(below, links=False) if entry.name == base], targets, above
        )


def _group(entries: list[os.DirEntry[str]], targets: list[str], folder: str) -> list[RotatedFile]:
    """Return the files of one shape that are not later than a target of this shape."""
    numbers_of_target = max(
        (_numbers(each) for each in targets if entries and _shape(each) == _shape(entries[0].path)), default=None
    )
    found = []
    for entry in entries:
        plain = entry.path.removesuffix(packing(entry.path))
        is_later = numbers_of_target is not None and _numbers(plain) >= numbers_of_target
        if _NUMBER.search(plain, len(folder)) and entry.path not in targets and not is_later:
            with suppress(OSError):
                found.append(_rotated_file(entry.path, _suffix(plain[len(folder) :]), inside=False))
    return newest(found)


def _suffix(name: str) -> str:
    """Return what orders a file among others of its shape: its only number, or a name with a date; empty where only
    times do.
    """
    numbers = _NUMBER.findall(name)
    if sum(map(len, numbers)) >= _DATE_DIGITS:
        return name
    return f".{numbers[0]}" if len(numbers) == 1 else ""


def _entries(folder: str, *, links: bool = True) -> list[os.DirEntry[str]]:
    with suppress(OSError, ValueError), os.scandir(folder) as entries:
        return [entry for entry in entries if links or not entry.is_symlink()]
    return []


def _shape(path: str) -> str:
    return _NUMBER.sub("0", path.removesuffix(packing(path)))


def _numbers(name: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(name)]


def _rotated_file(path: str, suffix: str, *, inside: bool) -> RotatedFile:
    status = os.stat(path)  # noqa: PTH116 -- thousands of them
    return RotatedFile(path, (status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns, suffix, inside)


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


def newest(files: list[RotatedFile]) -> list[RotatedFile]:
    """Return at most `MOST_FILES` files, oldest first, of which `_MOST_EMPTY` are empty."""
    ordered = _in_order(files)
    room = min(_MOST_EMPTY, max(0, MOST_FILES - sum(file.size > 0 for file in files)))
    empty = [file.path for file in ordered if not file.size]
    left_out = set(empty[: max(0, len(empty) - room)])
    return [file for file in ordered if file.path not in left_out][-MOST_FILES:]


def _digits(suffix: str) -> str:
    """Return what orders files by the time in their names: all digits of a date, or the hexadecimal number of
    `multilog`.
    """
    return suffix if suffix.startswith("@") else re.sub(r"\D", "", suffix)


def _in_order(files: list[RotatedFile]) -> list[RotatedFile]:
    """Sort by the dates or the numbers in the names.

    The times of most files say whether numbers rise or fall with age.
    """
    numbered = sorted((file for file in files if file.count is not None), key=lambda each: each.count or 0)
    if not numbered:
        return sorted(files, key=lambda each: (_digits(each.suffix), each.modified))
    # Files with text decide: anybody may create thousands of empty files, and one may get its first text late.
    pairs = list(itertools.combinations([file.modified for file in numbered if file.size][:_VOTERS], 2))
    up, down = sum(before < after for before, after in pairs), sum(before > after for before, after in pairs)
    if len(numbered) < len(files) or (pairs and up == down):
        return sorted(files, key=lambda each: (each.modified, -(each.count or 0), each.suffix))
    # Times alone are not enough: one process may still write to a file when another one has begun the next.
    return numbered if up > down else numbered[::-1]
