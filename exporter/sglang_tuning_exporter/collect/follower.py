"""Follow a server's log by polling: whole lines, each once, across rotation, truncation, holes and overlong lines.

A log is a chain of files, oldest first: the one with its name, and the rotated ones before it. Each is read to its end
before the next. Whatever happened (the name belongs to another file, the file was rewritten, the exporter was
restarted), the answer is the same: look at the files beside the log, recognise those that are known by their marks, go
on in each where it was read to, and read the others that are later.

Nothing here waits, and no state of a file raises an exception; `LogFollower.status` describes it.
"""

from __future__ import annotations

import glob
import itertools
import os
import resource
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

from sglang_tuning_exporter.collect import _rotation as rotation
from sglang_tuning_exporter.collect._log_file import STDIN, SURE_BYTES, Key, Lines, LogFile, Mark, make_mark, mark_from
from sglang_tuning_exporter.collect._rotation import RotatedFile
from sglang_tuning_exporter.core import inputs

LINGER_SECONDS = 10.0  # logrotate creates the new file before it signals the writer; some processes reopen it later
DELETED_SECONDS = 60.0  # then a quiet deleted file is closed: an open one keeps its disk space
_FAR_APART_SECONDS = 5.0  # between two polls: whole files may have been created and deleted
_REMEMBERED = 8  # files read to their end: a copy of one is not read again
_COPY_BYTES = 4096  # equal text of a copy: two servers may print the same first warnings, but not the same arguments
MOST_FILES = 256  # of globs, open at once; at most half of the process's limit of open files
MOST_REMEMBERED = 512  # files not followed whose positions survive a restart
_GLOB_SECONDS = 1.0
_GLOB_REST = 20  # a directory that takes long to search is searched less often
NO_ANSWER = "no answer"
_REMEDIES = {
    NO_ANSWER: "its file system hangs; check the mount",
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
_REASONS: tuple[tuple[tuple[type[OSError], ...], str], ...] = (
    ((FileNotFoundError, NotADirectoryError), "missing"),
    ((PermissionError,), "permission denied"),
    ((IsADirectoryError,), "is a directory"),
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
    """The known files of a log, oldest first, and those beside the log that they are now."""

    marks: Sequence[Mark]
    closed: int  # how many of them this process has closed: the first ones
    open: Mapping[int, LogFile]  # by the index of their marks: those that it reads
    beside: Sequence[RotatedFile]
    found: Mapping[
        int, int
    ]  # by the index of a mark: the index of its file; one beyond `beside` is the file with the log's name
    following: LogFile | None  # that one
    former: LogFile | None  # what was read of it before it was rewritten
    is_resumed: bool  # some are of an earlier process

    @property
    def newest(self) -> Mark:
        return self.marks[-1]

    @property
    def last(self) -> int:
        """The index of the newest mark."""
        return len(self.marks) - 1

    @property
    def at_name(self) -> int | None:
        """The index of the mark of the file with the log's name; None where that one is not known."""
        return next((at for at, to in self.found.items() if to == len(self.beside)), None)

    @property
    def is_over(self) -> bool:
        """Whether the file with the name is the newest known one, so that there is no later one."""
        return self.at_name == self.last and self.newest.head_bytes >= SURE_BYTES

    @property
    def is_copied(self) -> bool:
        """Whether the file with the name was copied and truncated, so that a line may
        begin in the copy and end here.
        """
        return self.former is not None or (
            self.is_resumed
            and not self.is_over
            and self.following is not None
            and self.newest.is_same_file(self.following.fd)
        )

    def gone(self) -> Iterator[tuple[int, Mark]]:
        """Yield the marks whose files have no name any more, each with its index."""
        for at, mark in enumerate(self.marks):
            if at not in self.found and (at not in self.open or self.open[at].is_deleted()):
                yield at, mark

    def later(self, *, is_far: bool) -> set[int]:
        """Return the files beside the log that were written after the known ones."""
        is_by_hand = (
            self.former is not None and bool(self.newest.head_bytes) and self.last not in self.found and not is_far
        )
        return set() if self.is_over or is_by_hand else _later(self.beside, self.found, self.newest)

    def unread(self, later: set[int], keys: set[Key]) -> list[tuple[RotatedFile, int | None]]:
        """Return the files to open, each with the index of its mark: the `later` ones, and known ones that are not read
        to their end.

        Neither one that is open, with one of these `keys`, nor the compressed copy of one, nor one of another time.
        """
        at_file = {to: at for at, to in self.found.items()}
        places = [(to, place, at_file.get(to)) for to, place in enumerate(self.beside) if place.key not in keys]
        return [(place, at) for to, place, at in places if at not in self.open and self._is_due(to, at, later)]

    def _is_due(self, to: int, at: int | None, later: set[int]) -> bool:
        if at is None:
            return to in later
        return at >= self.closed or self.marks[at].is_shorter(self.beside[to])

    def finished(self, unread: Sequence[tuple[RotatedFile, int | None]]) -> list[Mark]:
        """Return the marks of files that are there and not read on; the last one that was closed stays in any case."""
        goes_on = {self.at_name, *self.open, *(at for _, at in unread)}
        kept = {*self.found, self.closed - 1} - goes_on
        return [mark for at, mark in enumerate(self.marks) if at in kept]


@dataclass(slots=True)
class Log:
    """A followed path and the files that have had this name."""

    path: str
    pattern: str
    limit: int  # of a line, in bytes
    existed_at_start: bool  # of the exporter
    polled_at: float = 0.0
    files: list[LogFile] = field(default_factory=list)  # open, oldest first
    current: LogFile | None = None  # the one with the name now
    finished: list[Mark] = field(default_factory=list)  # of closed files
    reason: str = ""
    is_alias: bool = False  # the same file is followed under another path
    unopened_at_start: tuple[Key, int] | None = None  # file and size at the start, if it was not opened then
    counts: Counter[str] = field(default_factory=Counter)  # `dropped` lines, and `lost` files
    last_lost: str = ""  # the last of them, and why
    owners: dict[Key, str] = field(default_factory=dict)  # of each file that is followed, the path under which it is
    _folders: list[str] = field(default_factory=list)  # in the log's directory
    _changed: list[int] = field(default_factory=list)  # when the log's directory was changed, and those in it

    @property
    def is_glob_match(self) -> bool:
        """Whether the path was found by a glob."""
        return self.path != self.pattern

    def marks(self) -> Iterator[Mark]:
        """Yield the marks of its files, oldest first; a pipe has none, since it cannot be read again."""
        yield from self.finished
        if self.unopened_at_start is not None and not (self.finished or self.files):
            yield make_mark(self.path, *self.unopened_at_start, b"", b"")
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

    def rest(self) -> bool:
        """Close the file, which is read again when it grows; False where more is to be read now."""
        if not all(each.at_end and each is self.current and each.gone_at is None for each in self.files):
            return False
        for file in list(self.files):
            self._close(file)
        self.current = None
        return True

    def poll(self, now: float) -> Iterator[Block]:
        """Yield the new lines, each file after those before it."""
        queue, may_rewind = list(self.files), True
        while queue:
            file = queue.pop(0)
            if may_rewind:
                self._check_rewritten(file)
            if not file.rewritten:
                yield from self._blocks(file, now)
            if file.rewritten and may_rewind:
                before, may_rewind = set(map(id, self.files)), False
                self._reread(file, now)
                queue = [each for each in self.files if id(each) not in before] + queue
            elif not file.at_end:
                return
        for file in [each for each in self.files if each.at_end]:
            if rest := self._close_quiet(file, now):
                yield Block(self.path, rest)

    def _blocks(self, file: LogFile, now: float) -> Iterator[Block]:
        begins = not file.has_lines
        for data in filter(None, self._read(file, now)):
            yield Block(self.path, data, begins=begins)
            begins = False

    def arrange(
        self, following: LogFile | None, now: float, saved: Sequence[Mark] = (), former: LogFile | None = None
    ) -> None:
        """Put the files of the log in order: known ones go on where they were read to, later ones begin.

        Known are those of this process, and those `saved` by an earlier one, newest last. `following` is about to be
        the file with the name; `former` is what was read of it before it was rewritten.
        """
        for file in self.files:
            file.note_start()
        known, before = self._look_up(following, saved, former), list(self.files)
        if not known.marks:
            return
        if following is not None and known.at_name is not None:
            following.continue_at(known.marks[known.at_name].position)
        # Whole files may have been created and deleted since the last look.
        is_far = now - self.polled_at >= _FAR_APART_SECONDS or bool(saved)
        self._count_gone(known, is_far=is_far)
        later = known.later(is_far=is_far)
        self._count_missing(known.beside, known.found, later)
        unread = known.unread(later, {file.key for file in before})
        for place, at in unread:
            self._open_known(place, at, known, now)
        self.finished = known.finished(unread)
        self._join_lines(known, before)

    def _look_up(self, following: LogFile | None, saved: Sequence[Mark], former: LogFile | None) -> _Known:
        """Return the known files, and those beside the log that they are now."""
        regular, closed = [file for file in self.files if file.is_regular], len(self.finished)
        marks = [*self.finished, *(file.mark_of_read() for file in regular), *saved]
        marks += [] if former is None else [former.mark_of_read()]
        beside = rotated_files(self.path, marks) if marks else []
        beside = [file for file in beside if following is None or file.key != following.key]
        found = assign(marks, beside if following is None else [*beside, following.as_found()])
        opened = dict(enumerate(regular, closed))
        return _Known(marks, closed, opened, beside, found, following, former, bool(saved))

    def _open_known(self, place: RotatedFile, at: int | None, known: _Known, now: float) -> None:
        """Open a file beside the log: the known one with this index, or a later one."""
        joined = known.is_copied and at in (None, known.last)
        made = self._open(place, now, None if at is None else known.marks[at], joined=joined)
        if made is not None and at == known.last and known.former is not None:
            made.take_over(known.former)
        if made is not None and not known.is_resumed:
            made.look_back_from = 0  # this process has read what it says

    def _join_lines(self, known: _Known, before: Sequence[LogFile]) -> None:
        """Let a line that begins in a copy go on in the file after it."""
        following, former = known.following, known.former
        if (
            following is not None
            and former is not None
            and known.last not in known.found
            and former.size > former.position
        ):
            following.lines = Lines(self.limit, self.counts)  # the rest of the incomplete line is gone
        for file, after in itertools.pairwise([*self.files, *([] if following is None else [following])]):
            if file.joined and after not in before:
                after.lines = file.lines

    def _count_gone(self, known: _Known, *, is_far: bool) -> None:
        """Count the known files that are gone, and that were not read to their end or may have had a successor."""
        with_text = max((at for at, mark in enumerate(known.marks) if mark.size), default=0)
        for at, mark in known.gone():
            is_nothing = not mark.inode and not mark.head_bytes  # a log without text that was rewritten
            is_unread = at >= known.closed + len(known.open) and (mark.size > mark.position or mark.joined)
            if not is_nothing and (is_unread or (is_far and at >= with_text)):
                self._count_lost(f"a file that was read to byte {mark.position} is gone or was changed")

    def _open(self, place: RotatedFile, now: float, mark: Mark | None, *, joined: bool) -> LogFile | None:
        """Open a rotated file, known by its mark or not; None where it is followed under its own name, or cannot be
        read.
        """
        if self.owners.get(place.key, self.path) != self.path:
            return None
        fd = None
        try:
            fd = os.open(place.path, rotation.OPEN)
            made = LogFile(self.path, fd, Lines(self.limit, self.counts), place.path)
            if mark is not None and mark.position:
                made.continue_at(mark.position)
        except inputs.DAMAGE as error:  # deleted at this moment, or not readable
            if fd is not None:
                os.close(fd)
            self._count_lost(
                f"{place.path}: {reason_of(error) if fd is None and isinstance(error, OSError) else error}"
            )
            return None
        made.gone_at = made.grown_at = now
        made.joined = joined or (mark.joined if mark is not None else any(file.joined for file in self.files[-1:]))
        self.files.append(made)
        return made

    def _close(self, file: LogFile) -> bytes:
        """Close a file that was read to its end, and return its last incomplete line."""
        self.files.remove(file)
        if file.is_regular:
            self.finished = [*self.finished, file.mark()][-_REMEMBERED:]
        return file.close()

    def _check_rewritten(self, file: LogFile) -> None:
        """Mark a file of which little was read as rewritten if its directory has changed.

        It may have been written, copied and truncated meanwhile, and its start may be the same again.
        """
        if file is not self.current or not file.is_regular or file.position >= SURE_BYTES or not self.has_changed():
            return
        file.rewritten = True
        if file.position:
            marks = [*self.finished, file.mark_of_read()]
            beside = rotated_files(self.path, marks)
            copy = assign(marks, beside).get(len(marks) - 1)
            file.rewritten = copy is not None and beside[copy].key != file.key and beside[copy].modified > file.modified

    def _reread(self, file: LogFile, now: float) -> None:
        """Continue a rewritten file as one that has just got the name: what was read of it
        is looked for in its copies.
        """
        # Its writer may continue inside the incomplete line.
        anew, at = LogFile(file.path, file.fd, file.lines), self.files.index(file)
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
            self.finished = [*self.finished, file.mark_of_read()]
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
        if file.reason and file.is_packed and file.size > file.position:
            self._count_lost(f"{file.name}: {file.reason}")
            file.size = file.position
        if file.at_end and not file.rewritten and not file.joined and moved_on:
            yield file.flush()

    def _close_quiet(self, file: LogFile, now: float) -> bytes:
        """Close a file that was read to its end and has had its time; return its last incomplete line."""
        if not self._has_had_its_time(file, now):
            return b""
        if file is self.current:
            self.leave(now)
        return (b"" if file.joined else file.flush()) + self._close(file)

    def _has_had_its_time(self, file: LogFile, now: float) -> bool:
        later = self.files[self.files.index(file) + 1 :]
        if file.joined:  # else a restart would have to read its incomplete line again, or that of an earlier copy
            return file is self.files[0] and (file.is_complete or any(each.has_lines for each in later))
        if file.gone_at is None:
            return False
        if file is self.current:  # renamed without a successor, the writer still uses it
            is_left, seconds = file.is_deleted() or self.is_glob_match, DELETED_SECONDS
        else:  # the new file may exist, and nobody have written to it yet
            is_left = not later or file.is_deleted() or any(each.has_text() for each in later)
            seconds = LINGER_SECONDS
        return is_left and now - max(file.gone_at, file.grown_at) >= seconds

    def _count_lost(self, what: str) -> None:
        self.counts["lost"] += 1
        self.last_lost = what

    def _count_missing(self, beside: Sequence[RotatedFile], found: Mapping[int, int], later: set[int]) -> None:
        """Count the missing numbers between the last known file (server.log.5) and the log as lost files."""
        last = max((to for to in found.values() if to < len(beside)), default=-1)
        there, after = {file.count for file in beside}, [beside[to].count for to in later]
        highest = beside[last].count if after and last >= 0 else None
        if highest is not None and all(count is not None and count <= highest for count in after):
            for number in range(1, highest):
                if number not in there:
                    self._count_lost(f"{self.path}.{number} is gone")

    def has_changed(self) -> bool:
        """Return whether a file was created, renamed or deleted beside the log, or in a directory there, since the last
        call.
        """
        folder = os.path.dirname(os.path.realpath(self.path))  # noqa: PTH120 -- ten times a second
        before, modified = self._changed, rotation.modified(folder)
        if before[:1] != [modified]:  # else it has the same directories: a large one is not listed at each poll
            self._folders = rotation.directories(folder)
        self._changed = [modified, *map(rotation.modified, self._folders)]
        return before != self._changed


class LogFollower:
    """Reads files, globs and stdin ("-") as they grow; the caller polls about every 0.1 s.

    Files that exist at the start are read from their end, later ones from their start; `from_start` reads all from the
    start. `positions` (from `positions()` of an earlier process) continues exactly there, across renames. `clock`
    returns monotonic seconds. Globs follow the files that were written last; `left_out` counts the others.
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
        self._patterns = [pattern for pattern in dict.fromkeys(patterns) if pattern != STDIN]
        self._limit = max_line_bytes
        self._from_start = from_start
        known, files = ((positions or {}).get(name) for name in ("patterns", "files"))  # a state file may be damaged
        self._saved_patterns = known if isinstance(known, list) else []
        self._saved = [mark for mark in map(mark_from, files) if mark is not None] if isinstance(files, list) else []
        self._clock = clock
        self._logs: dict[str, Log] = {}
        if STDIN in patterns:
            log = self._logs[STDIN] = Log(STDIN, STDIN, max_line_bytes, existed_at_start=False)
            fd = os.dup(0 if stdin is None else stdin.fileno())
            log.current = LogFile(STDIN, fd, Lines(max_line_bytes, log.counts))
            log.files.append(log.current)
        self._resting: dict[str, Log] = {}  # that match a glob and are not followed, as others were written later
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Connections, scrapes and the state file need file descriptors too.
        self._most = MOST_FILES if soft == resource.RLIM_INFINITY else max(1, min(MOST_FILES, soft // 2))
        self._matched: dict[str, str] = {}  # the pattern of every path that is listed or matched
        self._unmatched: list[str] = []  # globs that match nothing
        self.left_out = 0  # how many files match a glob and are not followed
        self._next_glob = 0.0
        now = clock()
        self._expand(now, at_start=True)
        self._check_names(now)
        self._go_on_without_names(now)

    def _go_on_without_names(self, now: float) -> None:
        """Go on in the rotated files of logs that have none with their name at the start."""
        for log in self._logs.values():
            marks = self._saved_of(log)
            if marks and log.current is None and not log.is_alias and not log.files:
                with _reported(log):
                    log.arrange(None, now, marks)

    def poll(self) -> Iterator[Block]:
        """Yield the new lines; never wait, and read a bounded amount of each file."""
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
        return set(self._logs)

    def positions(self) -> dict[str, object]:
        """Return how far each file has been read, as plain JSON; every yielded block counts as read."""
        resting = sorted(
            (mark for log in self._resting.values() for mark in log.marks()), key=lambda mark: mark.modified
        )
        marks = [*resting[-MOST_REMEMBERED:], *(mark for log in self._logs.values() for mark in log.marks())]
        return {"patterns": self._patterns, "files": [asdict(mark) for mark in marks]}

    def close(self) -> None:
        """Close every file; standard input itself belongs to the caller."""
        for log in self._logs.values():
            for file in log.files:
                file.close()
        self._logs.clear()

    def _saved_of(self, log: Log) -> list[Mark]:
        """Return the marks that an earlier process made under the path of a log, oldest first; the last one is of the
        file with that name.
        """
        return [mark for mark in self._saved if mark.path == log.path]

    def _reads_all(self, log: Log) -> bool:
        """Return whether all text of a log is new that no earlier process has read: with a saved pattern it came while
        no exporter ran.
        """
        return self._from_start or log.pattern in self._saved_patterns

    def _expand(self, now: float, *, at_start: bool) -> None:
        """Follow what is listed, and of what a glob matches the files that were written last, oldest first: facts of
        the newest are read last.
        """
        begin = time.thread_time()  # CPU time: on a busy machine new files must not wait longer
        self._matched = self._found()
        globbed = {
            path: status
            for path, pattern in self._matched.items()
            if path != pattern and (status := _stat_of(path)[1]) is not None
        }
        listed = [path for path in self._matched if path not in globbed]
        ordered = sorted(globbed, key=lambda path: globbed[path].st_mtime_ns)
        most = max(len(ordered) - max(self._most - len(listed), 0), 0)
        self._resting = {path: log for path, log in self._resting.items() if path in globbed}
        for path in ordered[:most]:
            self._rest(path, globbed[path], at_start=at_start)
        for path in [*listed, *ordered[most:]]:
            if path not in self._logs:
                fresh = Log(path, self._matched[path], self._limit, at_start)
                self._logs[path] = self._resting.pop(path, fresh)
                self._logs[path].polled_at = now
        self.left_out = len(globbed.keys() - self._logs.keys())
        self._next_glob = now + max(_GLOB_SECONDS, _GLOB_REST * (time.thread_time() - begin))

    def _rest(self, path: str, status: os.stat_result, *, at_start: bool) -> None:
        """Follow a file no more, or not yet: others were written later."""
        if path in self._logs and self._logs[path].rest():
            self._resting[path] = self._logs.pop(path)
        elif path not in self._logs and at_start:
            log = self._resting[path] = Log(path, self._matched[path], self._limit, at_start)
            log.finished = self._saved_of(log)
            if not self._reads_all(log):
                log.unopened_at_start = (status.st_dev, status.st_ino), status.st_size

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

    def _check_names(self, now: float) -> None:
        found: dict[str, tuple[Key, int]] = {}
        named = {path: log for path, log in self._logs.items() if path != STDIN}
        for path, log in named.items():
            log.reason, status = _stat_of(path)
            if status is not None:
                found[path] = (status.st_dev, status.st_ino), status.st_size
        owners: dict[Key, str] = {}
        for path, (key, _) in found.items():
            current = self._logs[path].current
            mine = current is not None and current.key == key
            owners[key] = path if mine else owners.get(key, path)
        for path, log in named.items():
            log.owners = owners
            with _reported(log):
                self._check_name(log, found.get(path), now)

    def _check_name(self, log: Log, found: tuple[Key, int] | None, now: float) -> None:
        """Take note of the file that has the log's name now, or that none has."""
        log.is_alias = found is not None and log.owners[found[0]] != log.path
        if found is None:
            self._miss_name(log, now)
        elif log.current is not None and log.current.key == found[0] and not log.is_alias:
            log.current.gone_at = None
        else:
            self._take_name(log, found, now)

    def _miss_name(self, log: Log, now: float) -> None:
        log.existed_at_start = log.existed_at_start and log.reason == "permission denied"
        if not log.files and log.is_glob_match and log.path not in self._matched:
            del self._logs[log.path]
        elif log.current is not None and log.current.gone_at is None and log.reason in _GONE:
            log.current.gone_at = now
            log.arrange(None, now)

    def _take_name(self, log: Log, found: tuple[Key, int], now: float) -> None:
        """Follow the file that has the name now."""
        log.has_changed()  # from now on
        file = None if log.is_alias else self._taken(log, found[0]) or self._open(log, *found, now)
        if log.current is not None and (log.is_alias or file is not None):
            log.leave(now)
            self._next_glob = now  # its new name may match a pattern
        if file is not None:
            log.files.append(file)
            log.current, log.existed_at_start = file, False

    def _taken(self, log: Log, key: Key) -> LogFile | None:
        """Return the file if it was followed under another name: it was renamed to this one, or back."""
        for other in self._logs.values():
            for file in other.files:
                if file.key == key:
                    if other.current is file:
                        other.current = None
                    other.files.remove(file)
                    file.path, file.gone_at = log.path, None
                    return file
        return None

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
            if log.existed_at_start and log.unopened_at_start is None and not self._reads_all(log):
                log.unopened_at_start = (key, size)
        if fd is not None:
            os.close(fd)
        return None

    def _start(self, log: Log, file: LogFile, now: float) -> None:
        """Move to the first position."""
        saved = self._saved_of(log) if log.existed_at_start and not (log.files or log.finished) else []
        if not file.is_regular:
            return
        is_known = bool(log.files or log.finished or saved)
        if read := 0 if is_known and log.existed_at_start else self._read_elsewhere(log, file):
            file.continue_at(read)
        elif is_known:
            log.arrange(file, now, saved)
        elif log.existed_at_start and not self._reads_all(log):
            then, size = log.unopened_at_start or (file.key, file.size)
            if then == file.key and size <= file.size:
                file.start_at(size)

    def _read_elsewhere(self, log: Log, file: LogFile) -> int:
        """Return how many bytes of a file were read under another name, in this file or, where a glob matches it, in
        the one it is a copy of.
        """
        marks = [mark for mark in self._saved if mark.path != log.path]
        for other in self._logs.values():
            if other is not log:
                marks += [*other.finished, *(each.mark_of_read() for each in other.files if each.is_regular)]
        found = (
            mark.position
            for mark in marks
            if (mark.is_same_file(file.fd) or (log.is_glob_match and mark.position >= _COPY_BYTES))
            and mark.fits(file.fd)
        )
        return max(found, default=0)


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
    """Return the index of the file of each mark, by the index of the mark, where found; both lists are oldest first.

    Each file is used once.

    A mark is found by its inode, else by its text: a copy of a file that is gone or was truncated has the same text.
    While the file itself exists, another one with the same text is a different file.
    """
    found: dict[int, int] = {}
    for by_key in (True, False):
        for at, mark in enumerate(marks):
            to = None if at in found else _place_of(at, mark, files, found, by_key=by_key)
            found |= {} if to is None else {at: to}
    return found


def _place_of(
    at: int, mark: Mark, files: Sequence[RotatedFile], found: Mapping[int, int], *, by_key: bool
) -> int | None:
    # A copy is in the order of the others.
    low = -1 if by_key else max((to for before, to in found.items() if before < at), default=-1)
    free = [to for to in range(low + 1, len(files)) if to not in found.values()]
    return next((to for to in free if (not by_key or mark.has_key(files[to].key)) and _fits(mark, files[to])), None)


def _fits(mark: Mark, file: RotatedFile) -> bool:
    with suppress(OSError), rotation.opened(file.path) as fd:
        return mark.fits(fd, file.path)
    return False


def _later(beside: Sequence[RotatedFile], found: Mapping[int, int], newest: Mark) -> set[int]:
    """Return the files written after the known ones."""
    places = {to for to in found.values() if to < len(beside)}
    if not places:
        return {to for to, file in enumerate(beside) if file.modified > newest.modified and not file.inside}
    last = max(places)
    return {to for to in range(last + 1, len(beside)) if beside[to].inside == beside[last].inside}


@contextmanager
def _reported(log: Log) -> Iterator[None]:
    """Note a failing file system as the reason why the log is not read; the next poll tries again."""
    try:
        yield
    except OSError as error:
        log.reason = reason_of(error)


def reason_of(error: OSError) -> str:
    """Return in a few words why a path cannot be read."""
    words = (words for kinds, words in _REASONS if isinstance(error, kinds))
    return next(words, f"unreadable: {error.strerror or error}")


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
