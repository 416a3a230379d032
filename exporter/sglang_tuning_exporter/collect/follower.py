"""Follow a server's log by polling: whole lines, each once, across rotation, truncation, holes and overlong lines.

A log is a chain of files, oldest first: the one with its name, and the rotated ones before it. Each is read to its end before the next. Whatever
happened (the name belongs to another file, the file was rewritten, the exporter was restarted), the answer is the same: look at the files
beside the log, recognise those that are known by their marks, go on in each where it was read to, and read the others that are later.

Nothing here waits, and no state of a file raises an exception; `LogFollower.status` describes it.
"""

from __future__ import annotations

import glob
import itertools
import os
import resource
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import BinaryIO

from sglang_tuning_exporter.collect import _rotation as rotation
from sglang_tuning_exporter.collect._log_file import (
    SURE_BYTES,
    Key,
    Lines,
    LogFile,
    Mark,
    PackedFile,
    SavedPositions,
    Stdin,
    make_mark,
    reason_of,
)
from sglang_tuning_exporter.collect._rotation import RotatedFile
from sglang_tuning_exporter.core.compression import DAMAGE

LINGER_SECONDS = 10.0  # logrotate creates the new file before it signals the writer; some processes reopen it later
DELETED_SECONDS = 60.0  # then a quiet deleted file is closed: an open one keeps its disk space
_FAR_APART_SECONDS = 5.0  # between two polls: whole files may have been created and deleted
_REMEMBERED = 8  # files read to their end: a copy of one is not read again
_COPY_BYTES = 4096  # equal text of a copy: two servers may print the same first warnings, but not the same arguments
MOST_FILES = 256  # of globs, open at once; at most half of the process's limit of open files
MOST_REMEMBERED = 512  # files not followed whose positions survive a restart
_GLOB_SECONDS = 1.0
_GLOB_REST = 20  # a directory that takes long to search is searched less often
_REMEDIES = {
    "missing": "waiting for it",
    "permission denied": "let this user read it (chmod, or a group of the exporter's) and enter its directories",
    "is a directory": "name the file in it, or a pattern such as DIR/*.log",
    "is a device": "give a regular file, or - for standard input",
    "is a socket": "give a regular file, or - for standard input",
    "unreadable": "give a path to a file on a disk that can be read",
}
_OTHER_KINDS = (
    (stat.S_ISDIR, "is a directory"),
    (stat.S_ISCHR, "is a device"),
    (stat.S_ISBLK, "is a device"),
    (stat.S_ISSOCK, "is a socket"),
)
_GONE = ("missing", *(words for _, words in _OTHER_KINDS))  # after other errors the same file may come back


@dataclass(frozen=True, slots=True)
class Block:
    r"""Some whole lines of one file, each ending in `\n`, without the NUL bytes of holes."""

    path: str
    data: bytes
    historical: bool = False  # from before the exporter started: start-up facts are taken from it, nothing is counted
    begins: bool = False  # the first block of another file of the log


@dataclass(frozen=True, slots=True)
class FileStatus:
    """One followed file, or a pattern that nothing matches; `path` is "-" for stdin."""

    path: str
    reason: str  # "" when up, else a key of `_REMEDIES` (and more, after a colon), or "ended" (stdin)
    position: int  # in bytes
    dropped: int  # lines longer than the limit
    lost: int = 0  # files that were gone, or may have been, before they were read to their end
    last_lost: str = ""  # the last of them, and why
    unread: str = ""  # the first line that looks like SGLang's, if no such line could be parsed; set by their parser

    @property
    def up(self) -> bool:
        """Whether it is followed."""
        return not self.reason

    @property
    def words(self) -> str:
        """Whether it is followed, if not why, and the remedy."""
        remedy = _REMEDIES.get(self.reason.partition(":")[0])
        return f"{self.reason}; {remedy}" if remedy else self.reason or "following"


@dataclass(frozen=True, slots=True)
class _Known:
    """The files that a log is known to have had, and the files that there are now."""

    marks: list[Mark]  # oldest first
    held: dict[int, LogFile]  # the open files, by the index of their marks
    saved: (
        int  # so many of the marks, the newest, are of an earlier process, or of the text before the log was rewritten
    )
    former: LogFile | None  # what was read of the log before it was rewritten, as the newest mark has it
    beside: list[RotatedFile]  # the log, oldest first
    found: dict[
        int, int
    ]  # the index of the file of each mark, where found; that of the followed one comes after the others

    @property
    def at_name(self) -> int | None:
        """The index of the mark of the file with the name."""
        return next((at for at, to in self.found.items() if to == len(self.beside)), None)

    @property
    def newest_is_found(self) -> bool:
        """Whether there is a file with the text that was read last."""
        return len(self.marks) - 1 in self.found


@dataclass(slots=True)
class Log:
    """A followed path and the files that have had this name."""

    path: str
    pattern: str
    limit: int  # of a line, in bytes
    existed_at_start: bool  # of the exporter
    resume_mark: Mark | None = None  # how far it was read before it was left out
    polled_at: float = 0.0
    files: list[LogFile] = field(default_factory=list)  # open, oldest first
    current: LogFile | None = None  # the one with the name now
    finished: list[Mark] = field(default_factory=list)  # of closed files
    reason: str = ""
    is_alias: bool = False  # the same file is followed under another path
    unopened_at_start: tuple[Key, int] | None = None  # file and size at the start, if it could not be opened
    counts: Counter[str] = field(default_factory=Counter)  # `dropped` lines, and `lost` files
    last_lost: str = ""  # the last of them, and why
    owners: dict[Key, str] = field(default_factory=dict)  # of each file that is followed, the path under which it is
    _folders: list[str] = field(default_factory=list)  # in the log's directory
    _folders_modified: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Note the state of the directory."""
        self._has_changed()

    @property
    def is_glob_match(self) -> bool:
        """Whether the path was found by a glob."""
        return self.path != self.pattern

    def marks(self) -> Iterator[Mark]:
        """Yield the marks of its files, oldest first; a pipe has none, since it cannot be read again."""
        yield from self.finished
        for at, file in enumerate(self.files):
            if file.joined and file.at_end and any(each.has_lines for each in self.files[at + 1 :]):
                file.count_all_as_read()
            if file is not self.current:  # the log itself may have been copied and truncated since the last poll
                file.note_start()
            if file.is_regular:
                yield file.mark()

    def leave(self, now: float) -> None:
        """Note that the name belongs to another file now, or to none."""
        if self.current is not None:
            self.current.gone_at = now
            self.current = None

    def poll(self, now: float) -> Iterator[Block]:
        """Yield the new lines, each file after those before it."""
        queue, may_rewind = list(self.files), True
        while queue:
            file = queue.pop(0)
            if may_rewind:
                self._check_rewritten(file)
            if not file.rewritten:
                begins = not file.has_lines
                for data in filter(None, self._read(file, now)):
                    yield Block(self.path, data, begins=begins)
                    begins = False
            if file.rewritten and may_rewind:
                before, may_rewind = set(map(id, self.files)), False
                self._reread(file, now)
                queue = [each for each in self.files if id(each) not in before] + queue
            elif not file.at_end:
                return
        for file in list(self.files):
            if file.at_end and (rest := self._close_quiet(file, now)):
                yield Block(self.path, rest)

    def arrange(
        self, following: LogFile | None, now: float, saved: Sequence[Mark] = (), former: LogFile | None = None
    ) -> None:
        """Put the files of the log in order: known ones go on where they were read to, later ones begin.

        Known are those of this process, and those `saved` by an earlier one, newest last. `following` is about to be the file with the name;
        `former` is what was read of it before it was rewritten.
        """
        if following is not None and len(saved) == 1 and saved[0].is_surely(following.fd):
            following.continue_at(saved[0].position)  # nothing was written elsewhere since
            return
        marks = [*self.finished, *(file.mark_of_all() for file in self.files if file.is_regular), *saved]
        marks += [] if former is None else [former.mark_of_former()]
        if not marks:
            return
        beside = [file for file in rotated_files(self.path, marks) if following is None or file.key != following.key]
        held = dict(enumerate((file for file in self.files if file.is_regular), len(self.finished)))
        found = assign(marks, beside if following is None else [*beside, following.as_found()])
        known = _Known(marks, held, len(saved), former, beside, found)
        is_far = now - self.polled_at >= _FAR_APART_SECONDS or bool(saved)
        # `is_copied`: it was copied and truncated, so a line may begin in the copy and end here. `is_over`: it is the newest known file.
        is_copied, is_over = former is not None, False
        if following is not None:
            is_over = known.at_name == len(marks) - 1 and marks[-1].head_bytes >= SURE_BYTES
            is_copied = is_copied or (bool(saved) and not is_over and marks[-1].is_same_file(following.fd))
            if known.at_name is not None:
                following.continue_at(marks[known.at_name].position)
        self._count_gone(known, is_far=is_far)
        by_time = is_far or former is None or not marks[-1].head_bytes
        later = [] if is_over or not (by_time or known.newest_is_found) else self._later(known)
        for number in _missing(known, later):
            self._count_lost(f"{self.path}.{number} is gone")
        before = set(map(id, self.files))
        self._open_known_and_later(known, later, now, is_copied=is_copied)
        if following is not None and former is not None and not known.newest_is_found and former.size > former.position:
            following.lines = Lines(self.limit, self.counts)  # the rest of the incomplete line is gone
        for file, after in itertools.pairwise([*self.files, *(() if following is None else (following,))]):
            if file.joined and id(after) not in before:
                after.lines = file.lines

    def _count_gone(self, known: _Known, *, is_far: bool) -> None:
        """Count known files that are gone, and that were not read to their end or may have had a successor."""
        last = len(known.marks) - 1
        with_text = max((at for at, mark in enumerate(known.marks) if mark.size), default=0)
        for at, mark in enumerate(known.marks):
            file = known.held.get(at)
            is_here = at in known.found or (file is not None and not file.is_deleted())
            if is_here or (at == last and known.former is not None and not mark.head_bytes):
                continue
            is_unread = at > last - known.saved - (known.former is not None) and (
                mark.size > mark.position or mark.joined
            )
            if is_unread or (is_far and at >= with_text):
                self._count_lost(f"a file that was read to byte {mark.position} is gone or was changed")

    def _later(self, known: _Known) -> list[RotatedFile]:
        """Return the files written after the known ones; of an earlier process also unknown ones between two of them."""
        places = [to for to in known.found.values() if to < len(known.beside)]
        if places:
            first, newest = min(places) if known.saved else inf, max(places)
            is_inside = known.beside[newest].inside
            later = [
                file
                for at, file in enumerate(known.beside)
                if (at > newest and file.inside == is_inside)
                or (first < at < newest and at not in places and rotation.is_readable(file.path))
            ]
        else:
            later = [file for file in known.beside if file.modified > known.marks[-1].modified and not file.inside]
        open_now = {file.key for file in self.files}
        return [file for file in later if file.key not in open_now]

    def _open_known_and_later(
        self, known: _Known, later: Sequence[RotatedFile], now: float, *, is_copied: bool
    ) -> None:
        """Open known files that are not read to their end, and later ones."""
        last, open_now = len(known.marks) - 1, {file.key for file in self.files}
        at_file = {to: at for at, to in known.found.items()}
        opened: set[int] = set()  # of the known ones
        files = list(self.files)
        for to, file in enumerate(known.beside):
            at, made = at_file.get(to), None
            if file.key in open_now or at in known.held:  # open, or the compressed copy of an open one
                continue
            if at is not None:
                mark = known.marks[at]
                is_longer = mark.has_key(file.key) and file.size > mark.position and not mark.joined
                if at < len(self.finished) and not is_longer:  # it was read to its end, and has not grown since
                    continue
                opened.add(at)
                made = self._open(file, now, mark.position, joined=mark.joined or (is_copied and at == last))
                if made is not None and not known.saved:
                    made.look_back_from = 0  # this process has read what it says
                if made is not None and at == last and known.former is not None:
                    made.take_over(known.former)
            elif file in later:
                made = self._open(file, now, 0, joined=is_copied or (bool(files) and files[-1].joined))
            files += [] if made is None else [made]
        self.finished = [
            mark
            for at, mark in enumerate(known.marks)
            if at not in known.held
            and at not in opened
            and at != known.at_name
            and (at in known.found or at == len(self.finished) - 1)
        ]
        self.files = files

    def _open(self, file: RotatedFile, now: float, position: int, *, joined: bool) -> LogFile | None:
        if self.owners.get(file.key, self.path) != self.path:
            return None  # followed under its own name
        fd = None
        try:
            fd = os.open(file.path, rotation.OPEN)
            lines = Lines(self.limit, self.counts)
            is_packed = rotation.packing_of(fd, file.path) != ""
            made = PackedFile(self.path, fd, lines, file.path) if is_packed else LogFile(self.path, fd, lines)
            if position:
                made.continue_at(position)
        except DAMAGE as error:  # deleted at this moment, or not readable
            if fd is not None:
                os.close(fd)
            self._count_lost(f"{file.path}: {reason_of(error) if fd is None and isinstance(error, OSError) else error}")
            return None
        made.gone_at = made.grown_at = now
        made.joined = joined
        return made

    def _check_rewritten(self, file: LogFile) -> None:
        """Mark a file of which little was read as rewritten if its directory has changed.

        It may have been written, copied and truncated meanwhile, and its start may be the same again.
        """
        if file is not self.current or not file.is_regular or file.position >= SURE_BYTES or not self._has_changed():
            return
        file.rewritten = True
        if file.position:
            marks = [*self.finished, file.mark_of_former()]
            beside = rotated_files(self.path, marks)
            copy = assign(marks, beside).get(len(marks) - 1)
            file.rewritten = copy is not None and beside[copy].key != file.key and beside[copy].modified > file.modified

    def _reread(self, file: LogFile, now: float) -> None:
        """Continue a rewritten file as one that has just got the name: what was read of it is looked for in its copies."""
        anew, at = file.anew(), self.files.index(file)
        if file is not self.current:  # it was renamed since
            if file.size > file.position or (file.position and now - self.polled_at >= _FAR_APART_SECONDS):
                self._count_lost(f"a file that was read to byte {file.position} is gone or was changed")
            anew.gone_at, anew.grown_at = file.gone_at, file.grown_at
            self.files[at] = anew
            return
        self.files.remove(file)
        self.current = None  # until the files before it are open
        try:
            self.arrange(anew, now, former=file)
        except OSError:
            self.finished = [*self.finished, file.mark_of_former()]
            os.close(file.fd)
            raise
        anew.look_back_from = 0
        self.files.append(anew)
        self.current = anew

    def _read(self, file: LogFile, now: float) -> Iterator[bytes]:
        """Yield the new text of a file, and its last incomplete line once the writer uses a later file."""
        later = self.files[self.files.index(file) + 1 :]
        # Checked before reading: all that the writer wrote here before it changed files is then read below.
        moved_on = any(each.has_text() for each in later)
        yield from file.read(now)
        if file.reason and isinstance(file, PackedFile) and file.size > file.position:
            self._count_lost(f"{file.name}: {file.reason}")
            file.size = file.position
        if file.at_end and not file.rewritten and not file.joined and moved_on:
            yield file.flush()

    def _close_quiet(self, file: LogFile, now: float) -> bytes:
        """Close a file that was read and is quiet, and return its last incomplete line."""
        later = self.files[self.files.index(file) + 1 :]
        if file.joined:
            if file is not self.files[0] or (not file.is_complete and not any(each.has_lines for each in later)):
                return b""  # a restart would have to read its incomplete line again, or that of an earlier copy
        elif file.gone_at is None:
            return b""
        else:
            deleted = file.is_deleted()
            if file is self.current:
                if not deleted and not self.is_glob_match:
                    return b""  # renamed without a successor: the writer still uses it
                quiet_seconds = DELETED_SECONDS
            elif later and not deleted and not any(each.has_text() for each in later):
                return b""  # the new file exists, but nobody has written to it yet
            else:
                quiet_seconds = LINGER_SECONDS
            if now - max(file.gone_at, file.grown_at) < quiet_seconds:
                return b""
        if file is self.current:
            self.leave(now)
        self.files.remove(file)
        rest = b"" if file.joined else file.flush()
        if file.is_regular:
            self.finished = [*self.finished, file.mark()][-_REMEMBERED:]
        return rest + file.close()

    def _count_lost(self, what: str) -> None:
        self.counts["lost"] += 1
        self.last_lost = what

    def _has_changed(self) -> bool:
        """Return whether a file was created, renamed or deleted beside the log, or in a directory there, since the last call."""
        try:
            folder = os.path.dirname(os.path.realpath(self.path))  # noqa: PTH120 -- ten times a second
            modified = os.stat(folder).st_mtime_ns  # noqa: PTH116 -- ten times a second
            if self._folders_modified[:1] != [modified]:
                self._folders = rotation.directories(folder)
        except (OSError, ValueError):  # a name with a NUL byte
            self._folders, modified = [], 0
        before, self._folders_modified = self._folders_modified, [modified, *map(rotation.modified, self._folders)]
        return before != self._folders_modified


class LogFollower:
    """Reads files, globs and stdin ("-") as they grow; the caller polls about every 0.1 s.

    Files that exist at the start are read from their end, later ones from their start; `from_start` reads all from the
    start. `positions` (from `positions()` of an earlier process) continues exactly there, across renames. `clock` returns
    monotonic seconds. Globs follow the files that were written last; `left_out` counts the others.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        *,
        stdin: BinaryIO | None = None,
        from_start: bool = False,
        max_line_bytes: int = 1 << 20,
        positions: Mapping[str, object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._patterns = [pattern for pattern in dict.fromkeys(patterns) if pattern != "-"]
        self._limit = max_line_bytes
        self._from_start = from_start
        self._saved = SavedPositions(positions or {})
        self._clock = clock
        self._stdin: Stdin | None = None
        if "-" in patterns:
            source = stdin if stdin is not None else getattr(sys.stdin, "buffer", None)
            self._stdin = Stdin(source, max_line_bytes)
        self._logs: dict[str, Log] = {}
        self._most = most_files()
        self._matched: dict[str, str] = {}  # the pattern of every path that is listed or matched
        self._unmatched: list[str] = []  # globs that match nothing
        self._left_out: dict[Key, Mark] = {}  # how far files that match a glob and are not followed count as read
        self.left_out = 0  # how many there are of them
        self._next_glob = 0.0
        now = clock()
        self._expand(now, at_start=True)
        self._check_names(now)
        for log in self._logs.values():
            marks = self._saved.of(log.path)
            if marks and log.current is None and not log.is_alias and not log.files:
                with _reported(log):
                    log.arrange(None, now, marks)

    def poll(self) -> Iterator[Block]:
        """Yield the new lines; never wait, and read a bounded amount of each file."""
        if self._stdin is not None:
            yield from (Block("-", data) for data in self._stdin.read() if data)
        now = self._clock()
        if now >= self._next_glob:
            self._expand(now, at_start=False)
        self._check_names(now)
        logs = list(self._logs.values())
        for log in logs:
            for file in log.files:
                if file.look_back_from and (text := file.look_back()):
                    yield Block(log.path, text, historical=True)
        for log in logs:
            with _reported(log):
                yield from log.poll(now)
                log.polled_at = now

    def status(self) -> list[FileStatus]:
        """Return the status of every file, and of every pattern that matches none."""
        found = []
        if self._stdin is not None:
            found.append(FileStatus("-", self._stdin.reason, self._stdin.position, self._stdin.counts["dropped"]))
        for log in self._logs.values():
            if not log.is_alias:
                reason = log.reason or (log.current.reason if log.current else "")
                position = log.current.position if log.current else 0
                counted = log.counts["dropped"], log.counts["lost"], log.last_lost
                found.append(FileStatus(log.path, reason, position, *counted))
        used = {log.pattern for log in self._logs.values()}
        return found + [FileStatus(pattern, "missing", 0, 0) for pattern in self._unmatched if pattern not in used]

    def paths(self) -> set[str]:
        """Return every path that may still yield blocks."""
        return set(self._logs) if self._stdin is None else {"-", *self._logs}

    def positions(self) -> dict[str, object]:
        """Return how far each file has been read, as plain JSON; every yielded block counts as read."""
        left_out = sorted(self._left_out.values(), key=lambda mark: mark.modified)[-MOST_REMEMBERED:]
        marks = [*left_out, *(mark for log in self._logs.values() for mark in log.marks())]
        return {"patterns": self._patterns, "files": [mark.json() for mark in marks]}

    def close(self) -> None:
        """Close every file; stdin belongs to the caller."""
        for log in self._logs.values():
            for file in log.files:
                file.close()
        self._logs.clear()

    def _expand(self, now: float, *, at_start: bool) -> None:
        """Follow what is listed, and of what a glob matches the files that were written last, oldest first: facts of the newest are read last."""
        begin = time.thread_time()  # CPU time: on a busy machine new files must not wait longer
        self._matched = self._found()
        globbed = {
            path: status
            for path, pattern in self._matched.items()
            if path != pattern and (status := _stat_of(path)[1]) is not None
        }
        listed = [path for path, pattern in self._matched.items() if path not in globbed]
        ordered = sorted(globbed, key=lambda path: globbed[path].st_mtime_ns)
        most = max(len(ordered) - max(self._most - len(listed), 0), 0)
        there = {(status.st_dev, status.st_ino) for status in globbed.values()}
        self._left_out = {key: mark for key, mark in self._left_out.items() if key in there}
        for path in ordered[:most]:
            self._leave_out(path, globbed[path], at_start=at_start)
        for path in [*listed, *ordered[most:]]:
            if path not in self._logs:
                status = globbed.get(path)
                mark = None if status is None else self._left_out.pop((status.st_dev, status.st_ino), None)
                self._logs[path] = Log(path, self._matched[path], self._limit, at_start, mark, polled_at=now)
        self.left_out = len(globbed.keys() - self._logs.keys())
        self._next_glob = now + max(_GLOB_SECONDS, _GLOB_REST * (time.thread_time() - begin))

    def _found(self) -> dict[str, str]:
        """Return the pattern of every path that is listed or matched."""
        found: dict[str, str] = {}
        self._unmatched = []
        for pattern in self._patterns:
            if not glob.has_magic(pattern) or os.path.lexists(pattern):
                found.setdefault(pattern, pattern)
                continue
            everything = glob.glob(pattern, recursive=True)  # noqa: PTH207 -- pathlib refuses absolute patterns
            known = {*everything, *self._logs}
            # A rotated file is read with its log.
            logs = [
                path for path in everything if not rotation.packing(path) and known.isdisjoint(rotation.log_names(path))
            ]
            found = dict.fromkeys(logs, pattern) | found
            self._unmatched += [] if logs else [pattern]
        return found

    def _leave_out(self, path: str, status: os.stat_result, *, at_start: bool) -> None:
        """Do not follow a file while so many others were written later, unless more of it is to be read."""
        key, log = (status.st_dev, status.st_ino), self._logs.get(path)
        if log is not None and all(each.at_end and each is log.current and each.gone_at is None for each in log.files):
            del self._logs[path]
            for each in log.files:
                if each.is_regular:
                    self._left_out[each.key] = each.mark()
                each.close()
        elif at_start:
            mark = None
            if self._matched[path] in self._saved.patterns:
                mark = next((mark for mark in self._saved.of(path) if mark.has_key(key)), None)
            elif not self._from_start:
                mark = make_mark(path, key[1], status.st_size, b"", b"", modified=status.st_mtime_ns)
            if mark is not None:
                self._left_out[key] = mark

    def _check_names(self, now: float) -> None:
        found: dict[str, os.stat_result] = {}
        for path, log in self._logs.items():
            log.reason, status = _stat_of(path)
            if status is not None:
                found[path] = status
        owners: dict[Key, str] = {}
        for path, status in found.items():
            key = (status.st_dev, status.st_ino)
            current = self._logs[path].current
            mine = current is not None and current.key == key
            owners[key] = path if mine else owners.get(key, path)
            self._logs[path].owners = owners
        for path, log in list(self._logs.items()):
            with _reported(log):
                self._check_name(log, found.get(path), owners, now)

    def _check_name(self, log: Log, status: os.stat_result | None, owners: Mapping[Key, str], now: float) -> None:
        if status is None:
            self._name_is_gone(log, now)
            return
        key = (status.st_dev, status.st_ino)
        log.is_alias = owners[key] != log.path
        if log.is_alias:
            self._name_is_reused(log, now)
        elif log.current is None or log.current.key != key:
            self._follow(log, status, now)
        else:
            log.current.gone_at = None

    def _name_is_gone(self, log: Log, now: float) -> None:
        log.is_alias = False
        log.existed_at_start = log.existed_at_start and log.reason == "permission denied"
        if not log.files and log.is_glob_match and log.path not in self._matched:
            del self._logs[log.path]
        elif log.current is not None and log.current.gone_at is None and log.reason in _GONE:
            log.current.gone_at = now
            log.arrange(None, now)

    def _name_is_reused(self, log: Log, now: float) -> None:
        if log.current is not None:
            log.leave(now)
            self._next_glob = now  # its new name may match a pattern

    def _follow(self, log: Log, status: os.stat_result, now: float) -> None:
        """Follow the file with the log's name."""
        key = (status.st_dev, status.st_ino)
        for other in self._logs.values():
            held = next((file for file in other.files if file.key == key), None)
            if held is not None:  # renamed to another followed name, or back
                if other.current is held:
                    other.current = None
                other.files.remove(held)
                held.path, held.gone_at = log.path, None
                self._name_is_reused(log, now)
                log.files.append(held)
                log.current, log.existed_at_start = held, False
                return
        file = self._open(log, key, status.st_size, now)
        if file is not None:
            self._name_is_reused(log, now)
            log.files.append(file)
            log.current, log.existed_at_start = file, False

    def _open(self, log: Log, key: Key, size: int, now: float) -> LogFile | None:
        fd = None
        try:
            fd = os.open(log.path, rotation.OPEN)
            file = LogFile(log.path, fd, Lines(self._limit, log.counts))
            # Another key: it was replaced at this moment; see the next poll.
            if file.key == key:
                self._start(log, file, now)
                file.grown_at = now
                return file
        except OSError as error:
            log.reason = reason_of(error)
            if log.existed_at_start and log.unopened_at_start is None:
                log.unopened_at_start = (key, size)
        if fd is not None:
            os.close(fd)
        return None

    def _start(self, log: Log, file: LogFile, now: float) -> None:
        """Move to the first position."""
        size = os.fstat(file.fd).st_size
        if log.resume_mark is not None:
            if log.resume_mark.fits(file.fd):
                file.start_at(log.resume_mark.position)
        elif file.is_regular and not log.existed_at_start:
            if read := self._read_in_original(log, file):
                file.continue_at(read)
            else:
                log.arrange(file, now)
        elif file.is_regular:
            self._start_existing(log, file, size, now)

    def _start_existing(self, log: Log, file: LogFile, size: int, now: float) -> None:
        """Move to the first position of a file that existed when the exporter started."""
        if log.files or log.finished:
            log.arrange(file, now)  # it could not be read until now
        elif marks := self._saved.of(log.path):
            log.arrange(file, now, marks)
        elif mark := next(
            (mark for mark in self._saved.marks if mark.is_same_file(file.fd) and mark.fits(file.fd)), None
        ):
            file.continue_at(mark.position)
        elif log.pattern in self._saved.patterns:
            # It was created while no exporter ran: all of it is new, or of a copy the rest.
            file.continue_at(self._read_in_original(log, file))
        elif log.unopened_at_start is not None and not self._from_start:
            if log.unopened_at_start[0] == file.key and log.unopened_at_start[1] <= size:
                file.start_at(log.unopened_at_start[1])
        elif not self._from_start:
            file.start_at(size)

    def _read_in_original(self, log: Log, file: LogFile) -> int:
        """Return how many bytes of a file that a glob matches were read for another log, in this file or in the one it is a copy of."""
        if not log.is_glob_match:
            return 0
        others = (each for each in self._logs.values() if each is not log)
        marks = [
            mark
            for each in others
            for mark in (*each.finished, *(of.mark_of_read() for of in each.files if of.is_regular))
        ]
        marks += [mark for mark in self._saved.marks if mark.path != log.path]
        copied = (
            mark.position
            for mark in marks
            if (mark.has_key(file.key) or mark.position >= _COPY_BYTES) and mark.fits(file.fd)
        )
        return max(copied, default=0)


def most_files() -> int:
    """Return how many files of globs may be followed; connections, scrapes and the state file need file descriptors too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if soft == resource.RLIM_INFINITY else max(1, min(MOST_FILES, soft // 2))


def rotated_files(path: str, marks: Sequence[Mark]) -> list[RotatedFile]:
    """Return the rotated files of a log, oldest first, also of a directory in which one of the marked files is.

    Directories, and files with other names, are searched if the newest marked file is not beside the log.
    """
    target = os.path.realpath(path)
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

    A mark is found by its inode, else by its text: a copy of a file that is gone or was truncated has the same text. While the file itself
    exists, another one with the same text is a different file. An empty file has no text: if its inode is gone, it is the file just before
    its successor, unless that file belongs to another mark or is older.
    """
    found: dict[int, int] = {}
    for at, mark in enumerate(marks):
        same = (i for i, file in enumerate(files) if mark.has_key(file.key) and (mark.held or _fits(mark, file)))
        if (index := next(same, None)) is not None and index not in found.values():
            found[at] = index
    for at, mark in enumerate(marks):
        if at not in found:
            low = max((index for before, index in found.items() if before < at), default=-1)
            copies = (i for i in range(low + 1, len(files)) if i not in found.values() and _fits(mark, files[i]))
            if (index := next(copies, None)) is not None:
                found[at] = index
    for at, mark in reversed([*enumerate(marks)]):
        if at not in found and mark.is_empty:
            before = min((index for after, index in found.items() if after > at), default=0) - 1
            if before >= 0 and before not in found.values() and files[before].modified >= mark.modified:
                found[at] = before
    return found


def _fits(mark: Mark, file: RotatedFile) -> bool:
    with suppress(OSError), rotation.opened(file.path) as fd:
        return mark.fits(fd, file.path)
    return False


def _missing(known: _Known, later: Sequence[RotatedFile]) -> list[int]:
    """Return the missing numbers between the last known file (server.log.5) and the log."""
    places = [to for to in known.found.values() if to < len(known.beside)]
    if not places:
        return []
    last, counts = known.beside[max(places)].count, [file.count for file in later]
    if last is None or not counts or any(count is None or count > last for count in counts):
        return []
    there = {file.count for file in known.beside}
    lowest = min(1, *(count for count in counts if count is not None))
    return [number for number in range(lowest, last) if number not in there]


@contextmanager
def _reported(log: Log) -> Iterator[None]:
    """Note a failing file system as the reason why the log is not read; the next poll tries again."""
    try:
        yield
    except OSError as error:
        log.reason = reason_of(error)


def _stat_of(path: str) -> tuple[str, os.stat_result | None]:
    """Return what is wrong with a path, or its status."""
    try:
        status = Path(path).stat()
    except OSError as error:
        return reason_of(error), None
    except ValueError:  # a NUL byte in the name
        return "missing", None
    # Checked before opening: opening a device may have effects, and /dev/zero has no end.
    wrong = next((words for is_kind, words in _OTHER_KINDS if is_kind(status.st_mode)), "")
    return wrong, None if wrong else status
