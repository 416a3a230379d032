"""Which of the files that globs match are followed, where there are more than may be open: those written last.

What is not followed is looked at by name at every look for new files. When it grows it takes the place of the quietest
one, and is read on from where it was left.
"""

from __future__ import annotations

import glob
import os
import resource
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sglang_tuning_exporter.collect import positions as places
from sglang_tuning_exporter.collect import rotation

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from sglang_tuning_exporter.collect.stream import Key

MOST_FILES = 256
"""Files that are open at once; half of what the process may open where that is less."""
MOST_REMEMBERED = 512
"""Files not followed whose positions outlive a restart."""
_NO_KEY = (0, 0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file that wants to be followed. Without a `mark` all of it is news, unless it was there at the start."""

    path: str
    pattern: str
    key: Key = _NO_KEY  # of a name that leads nowhere: whoever follows it says what is wrong with it
    size: int = 0
    modified: int = 0  # nanoseconds
    mark: places.Mark | None = None


class Selection:
    """Finds files, and remembers what is not followed: how large it was, and up to where it has been read."""

    def __init__(self, patterns: Sequence[str], most: int, saved: places.Saved, *, from_start: bool) -> None:
        self.matched: set[str] = set()  # by a glob, whether followed or not
        self.barren: list[str] = []  # globs that match nothing
        self._patterns = patterns
        self._most = most
        self._saved = saved
        self._from_start = from_start
        self._left: dict[Key, Candidate] = {}

    @property
    def left_out(self) -> int:
        """How many files are matched by a glob and not followed."""
        return len(self._left)

    def choose(
        self, followed: Collection[str], make_room: Callable[[Candidate], bool], *, first: bool
    ) -> list[Candidate]:
        """Say which files to follow besides those that are, oldest first: the facts of the newest are told last.

        `make_room` ends following a quieter file, or says that there is none.
        """
        chosen: list[Candidate] = []
        fresh = {path: pattern for path, pattern in self._found(followed).items() if path not in followed}
        for file in self._candidates(fresh):
            room = len(followed) + len(chosen) < self._most
            if file.pattern == file.path or room or (not first and make_room(file)):
                self._left.pop(file.key, None)
                chosen.append(file)
            elif first:
                self.leave_out(replace(file, mark=self._read_before(file)))
            else:
                self.leave_out(replace(file, size=-1))  # it is offered again next time
        return chosen[::-1]

    def leave_out(self, file: Candidate) -> None:
        """Do not follow it until it changes."""
        if file.key != _NO_KEY:
            self._left[file.key] = file

    def marks(self) -> Iterator[places.Mark]:
        """Give the positions of what is not followed, of those written last."""
        for file in sorted(self._left.values(), key=lambda each: each.modified, reverse=True)[:MOST_REMEMBERED]:
            if file.mark is not None:
                yield file.mark

    def _found(self, followed: Collection[str]) -> dict[str, str]:
        """Give the pattern of every path that is listed or matched."""
        self.matched, self.barren = set(), []
        found: dict[str, str] = {}
        for pattern in self._patterns:
            if not glob.has_magic(pattern) or os.path.lexists(pattern):
                found.setdefault(pattern, pattern)
                continue
            everything = glob.glob(pattern, recursive=True)  # noqa: PTH207 -- pathlib refuses absolute patterns
            known = {*everything, *followed}
            # A rotated file is read with the log whose it is.
            paths = [
                path for path in everything if not rotation.packing(path) and known.isdisjoint(rotation.bases(path))
            ]
            self.matched.update(paths)
            for path in paths:
                found.setdefault(path, pattern)
            if not paths:
                self.barren.append(pattern)
        return found

    def _candidates(self, fresh: dict[str, str]) -> list[Candidate]:
        """Give those that are new or have changed, the one written last first; forget those that have gone."""
        found, left = [], {}
        for path, pattern in fresh.items():
            try:
                status = os.stat(path)  # noqa: PTH116 -- thousands a second
            except (OSError, ValueError):  # ValueError: a NUL byte in the name
                found.append(Candidate(path, pattern))
                continue
            seen = Candidate(path, pattern, (status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns)
            before = self._left.get(seen.key)
            if before is not None:
                left[seen.key] = before
            if before is None or (before.size, before.modified) != (seen.size, seen.modified):
                found.append(replace(seen, mark=before.mark if before is not None else None))
        self._left = left
        return sorted(found, key=lambda each: each.modified)[::-1]

    def _read_before(self, file: Candidate) -> places.Mark | None:
        """Say up to where a file that was there at the start counts as read."""
        if file.pattern in self._saved.patterns:
            return next((mark for mark in self._saved.of(file.path) if mark.inode == file.key[1]), None)
        return None if self._from_start else places.make_mark(file.path, file.key[1], file.size, b"", b"")


def most_files() -> int:
    """Say how many files may be followed at once: connections, scrapes and the state file need room as well."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if soft == resource.RLIM_INFINITY else max(1, min(MOST_FILES, soft // 2))
