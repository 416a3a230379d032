"""Follow a server's log by polling: whole lines, each once, across rotation, truncation, holes and overlong lines.

Nothing here waits, and no state of a file raises an exception; `LogFollower.status` describes it.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sglang_tuning_exporter.collect import rotation
from sglang_tuning_exporter.collect.chain import Chain
from sglang_tuning_exporter.collect.lines import Lines
from sglang_tuning_exporter.collect.positions import dump_positions, load_positions
from sglang_tuning_exporter.collect.selection import Candidate, Selection, most_files
from sglang_tuning_exporter.collect.stream import Key, Stdin, Stream, reason_of

_COPY_BYTES = 4096  # equal text of a copy: two servers may print the same first warnings, but not the same arguments
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


class LogFollower:
    """Reads files, globs and stdin ("-") as they grow; the caller polls about every 0.1 s.

    Files that exist at the start are read from their end, later ones from their start; `from_start` reads all from the
    start. `positions` (from `positions()` of an earlier process) continues exactly there, across renames. `clock` returns
    monotonic seconds. Globs follow the `most` files that were written last; `left_out` counts the others.
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
        most: int | None = None,
    ) -> None:
        self._patterns = [pattern for pattern in dict.fromkeys(patterns) if pattern != "-"]
        self._limit = max_line_bytes
        self._from_start = from_start
        self._saved = load_positions(positions)
        self._clock = clock
        self._stdin: Stdin | None = None
        if "-" in patterns:
            source = stdin if stdin is not None else getattr(sys.stdin, "buffer", None)
            self._stdin = Stdin(source, max_line_bytes)
        self._chains: dict[str, Chain] = {}
        self._most = most_files() if most is None else most
        self._selection = Selection(self._patterns, self._most, self._saved, from_start=from_start)
        self._next_glob = 0.0
        now = clock()
        self._expand(now, at_start=True)
        self._check_names(now)
        for chain in self._chains.values():
            marks = self._saved.of(chain.path)
            if marks and chain.current is None and not chain.is_alias and not chain.links:
                with _reported(chain):
                    chain.resume_after(marks, None, now)

    def poll(self) -> Iterator[Block]:
        """Yield the new lines; never wait, and read a bounded amount of each file."""
        if self._stdin is not None:
            yield from (Block("-", data) for data in self._stdin.read() if data)
        now = self._clock()
        if now >= self._next_glob:
            self._expand(now, at_start=False)
        self._check_names(now)
        chains = list(self._chains.values())
        for chain in chains:
            for link in chain.links:
                if link.look_back_from and (text := link.look_back()):
                    yield Block(chain.path, text, historical=True)
        crowded = sum(len(chain.links) for chain in chains) > self._most
        for chain in chains:
            with _reported(chain):
                yield from self._read(chain, now, crowded=crowded)
                chain.last_poll_at = now

    @staticmethod
    def _read(chain: Chain, now: float, *, crowded: bool) -> Iterator[Block]:
        """Yield the new lines of one log, each file after those before it."""
        rewound = False
        links = list(chain.links)
        while links:
            link = links.pop(0)
            if not rewound:
                chain.check_rewritten(link)
            if not link.rewritten:
                begins = not link.has_lines
                for data in filter(None, chain.read(link, now)):
                    yield Block(chain.path, data, begins=begins)
                    begins = False
            if link.rewritten and not rewound:
                chain.reread(now)
                rewound = True
                links = [each for each in chain.links if each.joined or each is link] + links
            elif not link.at_end:
                return
        for link in list(chain.links):
            if link.at_end and (rest := chain.close_quiet(link, now, crowded=crowded)):
                yield Block(chain.path, rest)

    def status(self) -> list[FileStatus]:
        """Return the status of every file, and of every pattern that matches none."""
        found = []
        if self._stdin is not None:
            found.append(FileStatus("-", self._stdin.reason, self._stdin.position, self._stdin.dropped.lines))
        for chain in self._chains.values():
            if not chain.is_alias:
                reason = chain.reason or (chain.current.reason if chain.current else "")
                position = chain.current.position if chain.current else 0
                figures = position, chain.dropped.lines, chain.lost, chain.last_lost
                found.append(FileStatus(chain.path, reason, *figures))
        used = {chain.pattern for chain in self._chains.values()}
        return found + [
            FileStatus(pattern, "missing", 0, 0) for pattern in self._selection.unmatched if pattern not in used
        ]

    def paths(self) -> set[str]:
        """Return every path that may still yield blocks."""
        return set(self._chains) if self._stdin is None else {"-", *self._chains}

    def positions(self) -> dict[str, object]:
        """Return how far each file has been read, as plain JSON; every yielded block counts as read."""
        marks = [*self._selection.marks(), *(mark for chain in self._chains.values() for mark in chain.marks())]
        return dump_positions(self._patterns, marks)

    def close(self) -> None:
        """Close every file; stdin belongs to the caller."""
        for chain in self._chains.values():
            for link in chain.links:
                link.close()
        self._chains.clear()

    @property
    def left_out(self) -> int:
        """How many files match a glob and are not followed because there are too many."""
        return self._selection.left_out

    def _expand(self, now: float, *, at_start: bool) -> None:
        begin = time.thread_time()  # CPU time: on a busy machine new files must not wait longer
        for file in self._selection.files_to_follow(self._chains, self._make_room, at_start=at_start):
            self._chains[file.path] = Chain(
                file.path,
                file.pattern,
                self._limit,
                at_start,
                resume_mark=file.mark,
                modified=file.modified,
                last_poll_at=now,
            )
        self._next_glob = now + max(_GLOB_SECONDS, _GLOB_REST * (time.thread_time() - begin))

    def _make_room(self, file: Candidate) -> bool:
        """Stop following the file with the oldest last write, if it was read and is older than `file`."""
        quiet = [
            chain
            for chain in self._chains.values()
            if chain.is_glob_match
            and chain.modified < file.modified
            and all(link.at_end and link is chain.current and link.gone_at is None for link in chain.links)
        ]
        if not quiet:
            return False
        chain = min(quiet, key=lambda each: each.modified)
        del self._chains[chain.path]
        for link in chain.links:
            size = os.fstat(link.fd).st_size
            self._selection.leave_out(Candidate(chain.path, chain.pattern, link.key, size, chain.modified, link.mark()))
            link.close()
        return True

    def _check_names(self, now: float) -> None:
        found: dict[str, os.stat_result] = {}
        for path, chain in self._chains.items():
            chain.reason, status = _stat_of(path)
            if status is not None:
                found[path] = status
        owners: dict[Key, str] = {}
        for path, status in found.items():
            key = (status.st_dev, status.st_ino)
            current = self._chains[path].current
            mine = current is not None and current.key == key
            owners[key] = path if mine else owners.get(key, path)
            self._chains[path].modified, self._chains[path].owners = status.st_mtime_ns, owners
        for path, chain in list(self._chains.items()):
            with _reported(chain):
                self._check_name(chain, found.get(path), owners, now)

    def _check_name(self, chain: Chain, status: os.stat_result | None, owners: Mapping[Key, str], now: float) -> None:
        if status is None:
            self._name_is_gone(chain, now)
            return
        key = (status.st_dev, status.st_ino)
        chain.is_alias = owners[key] != chain.path
        if chain.is_alias:
            self._name_is_reused(chain, now)
        elif chain.current is None or chain.current.key != key:
            self._follow(chain, status, now)
        else:
            chain.current.gone_at = None

    def _name_is_gone(self, chain: Chain, now: float) -> None:
        chain.is_alias = False
        chain.existed_at_start = chain.existed_at_start and chain.reason == "permission denied"
        if not chain.links and chain.is_glob_match and chain.path not in self._selection.matched:
            del self._chains[chain.path]
        elif chain.current is not None and chain.current.gone_at is None and chain.reason in _GONE:
            chain.current.gone_at = now
            chain.open_rotated(now, None)

    def _name_is_reused(self, chain: Chain, now: float) -> None:
        if chain.current is not None:
            chain.leave(now)
            self._next_glob = now  # its new name may match a pattern

    def _follow(self, chain: Chain, status: os.stat_result, now: float) -> None:
        """Follow the file with the chain's name."""
        key = (status.st_dev, status.st_ino)
        for other in self._chains.values():
            held = next((link for link in other.links if link.key == key), None)
            if held is not None:  # renamed to another followed name, or back
                if other.current is held:
                    other.current = None
                other.links.remove(held)
                held.path, held.gone_at = chain.path, None
                self._name_is_reused(chain, now)
                chain.links.append(held)
                chain.current, chain.existed_at_start = held, False
                return
        link = self._open(chain, key, status.st_size, now)
        if link is not None:
            self._name_is_reused(chain, now)
            chain.links.append(link)
            chain.current, chain.existed_at_start = link, False

    def _open(self, chain: Chain, key: Key, size: int, now: float) -> Stream | None:
        fd = None
        try:
            fd = os.open(chain.path, rotation.OPEN)
            link = Stream(chain.path, fd, Lines(self._limit, chain.dropped))
            # Another key: it was replaced at this moment; see the next poll.
            if link.key == key and self._start(chain, link, now):
                link.grown_at = now
                return link
        except OSError as error:
            chain.reason = reason_of(error)
            if chain.existed_at_start and chain.unopened_at_start is None:
                chain.unopened_at_start = (key, size)
        if fd is not None:
            os.close(fd)
        return None

    def _start(self, chain: Chain, link: Stream, now: float) -> bool:
        """Move to the first position; False to wait until earlier files have been read."""
        size = os.fstat(link.fd).st_size
        if chain.resume_mark is not None:
            if chain.resume_mark.matches(link.fd):
                link.start_at(chain.resume_mark.position)
        elif link.seekable and not chain.existed_at_start:
            if read := self._read_in_original(chain, link):
                link.continue_at(read)
                return True
            return chain.open_rotated(now, link)
        elif link.seekable:
            self._start_existing(chain, link, size, now)
        return True

    def _start_existing(self, chain: Chain, link: Stream, size: int, now: float) -> None:
        """Move to the first position of a file that existed when the exporter started."""
        if marks := self._saved.of(chain.path):
            chain.resume_after(marks, link, now)
        elif mark := self._saved.mark_of_open_file(link.fd):
            link.continue_at(mark.position)
        elif chain.pattern in self._saved.patterns:
            # It was created while no exporter ran: all of it is new, or of a copy the rest.
            link.continue_at(self._read_in_original(chain, link))
        elif chain.unopened_at_start is not None and not self._from_start:
            if chain.unopened_at_start[0] == link.key and chain.unopened_at_start[1] <= size:
                link.start_at(chain.unopened_at_start[1])
        elif not self._from_start:
            link.start_at(size)

    def _read_in_original(self, chain: Chain, link: Stream) -> int:
        """Return how many bytes of a file that a glob matches were read for another log, in this file or in the one it is a copy of."""
        if not chain.is_glob_match:
            return 0
        others = (each for each in self._chains.values() if each is not chain)
        marks = [
            mark for each in others for mark in (*each.finished_marks, *(of.mark_of_read_text() for of in each.links))
        ]
        marks += [mark for mark in self._saved.marks if mark.path != chain.path]
        copied = (
            mark.position
            for mark in marks
            if (mark.inode == link.key[1] or mark.position >= _COPY_BYTES) and mark.matches(link.fd)
        )
        return max(copied, default=0)


@contextmanager
def _reported(chain: Chain) -> Iterator[None]:
    """Note a failing file system as the reason why the log is not read; the next poll tries again."""
    try:
        yield
    except OSError as error:
        chain.reason = reason_of(error)


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
