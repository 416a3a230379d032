"""Which files of a glob are followed if there are too many: those that were written last.

The status of the others is read at every search for new files. One that grows replaces the quietest followed file, and
reading continues where it ended.
"""

from __future__ import annotations

import glob
import os
import resource
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from sglang_tuning_exporter.collect import rotation
from sglang_tuning_exporter.collect.log_file import Key, Mark, SavedPositions, make_mark

MOST_FILES = 256  # open at once; at most half of the process's limit of open files
MOST_REMEMBERED = 512  # files not followed whose positions survive a restart
_NO_KEY = (0, 0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file that could be followed. Without a `mark` all of it is new, unless it existed at the start."""

    path: str
    pattern: str
    key: Key = _NO_KEY  # of a name without a file: the follower reports what is wrong
    size: int = 0
    modified: int = 0  # nanoseconds
    mark: Mark | None = None


class Selection:
    """Finds files; keeps size and read position of those that are not followed."""

    def __init__(self, patterns: Sequence[str], most: int, saved: SavedPositions, *, from_start: bool) -> None:
        self.matched: set[str] = set()  # by a glob, followed or not
        self.unmatched: list[str] = []  # globs that match nothing
        self._patterns = patterns
        self._most = most
        self._saved = saved
        self._from_start = from_start
        self._not_followed: dict[Key, Candidate] = {}

    @property
    def left_out(self) -> int:
        """How many files match a glob and are not followed."""
        return len(self._not_followed)

    def files_to_follow(
        self, followed: Collection[str], make_room: Callable[[Candidate], bool], *, at_start: bool
    ) -> list[Candidate]:
        """Return more files to follow, oldest first, so that facts of the newest are read last.

        `make_room` stops following a quieter file, or returns False if there is none.
        """
        chosen: list[Candidate] = []
        fresh = {path: pattern for path, pattern in self._found(followed).items() if path not in followed}
        for file in self._candidates(fresh):
            room = len(followed) + len(chosen) < self._most
            if file.pattern == file.path or room or (not at_start and make_room(file)):
                self._not_followed.pop(file.key, None)
                chosen.append(file)
            elif at_start:
                self.leave_out(replace(file, mark=self._read_before(file)))
            else:
                self.leave_out(replace(file, size=-1))  # considered again at the next search
        return chosen[::-1]

    def leave_out(self, file: Candidate) -> None:
        """Ignore a file until it changes."""
        if file.key != _NO_KEY:
            self._not_followed[file.key] = file

    def marks(self) -> Iterator[Mark]:
        """Yield the positions of files that are not followed, those written last."""
        for file in sorted(self._not_followed.values(), key=lambda each: each.modified, reverse=True)[:MOST_REMEMBERED]:
            if file.mark is not None:
                yield file.mark

    def _found(self, followed: Collection[str]) -> dict[str, str]:
        """Return the pattern of every path that is listed or matched."""
        self.matched, self.unmatched = set(), []
        found: dict[str, str] = {}
        for pattern in self._patterns:
            if not glob.has_magic(pattern) or os.path.lexists(pattern):
                found.setdefault(pattern, pattern)
                continue
            everything = glob.glob(pattern, recursive=True)  # noqa: PTH207 -- pathlib refuses absolute patterns
            known = {*everything, *followed}
            # A rotated file is read with its log.
            paths = [
                path for path in everything if not rotation.packing(path) and known.isdisjoint(rotation.log_names(path))
            ]
            self.matched.update(paths)
            for path in paths:
                found.setdefault(path, pattern)
            if not paths:
                self.unmatched.append(pattern)
        return found

    def _candidates(self, fresh: dict[str, str]) -> list[Candidate]:
        """Return files that are new or have changed, last written first; forget deleted ones."""
        found, left = [], {}
        for path, pattern in fresh.items():
            try:
                status = os.stat(path)  # noqa: PTH116 -- thousands a second
            except (OSError, ValueError):  # ValueError: a NUL byte in the name
                found.append(Candidate(path, pattern))
                continue
            seen = Candidate(path, pattern, (status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns)
            before = self._not_followed.get(seen.key)
            if before is not None:
                left[seen.key] = before
            if before is None or (before.size, before.modified) != (seen.size, seen.modified):
                found.append(replace(seen, mark=before.mark if before is not None else None))
        self._not_followed = left
        return sorted(found, key=lambda each: each.modified)[::-1]

    def _read_before(self, file: Candidate) -> Mark | None:
        """Return up to where a file that existed at the start counts as read."""
        if file.pattern in self._saved.patterns:
            return next((mark for mark in self._saved.of(file.path) if mark.has_key(file.key)), None)
        return None if self._from_start else make_mark(file.path, file.key[1], file.size, b"", b"")


def most_files() -> int:
    """Return how many files may be followed; connections, scrapes and the state file need file descriptors too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if soft == resource.RLIM_INFINITY else max(1, min(MOST_FILES, soft // 2))
