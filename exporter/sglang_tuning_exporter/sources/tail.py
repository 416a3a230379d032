"""Following a server's log by polling: whole lines, each once, through rotation, truncation, holes and giant lines.

Nothing here waits and nothing raises for what the world does to a file; `LogFollower.status` says it in words.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO

from sglang_tuning_exporter.sources import positions as places
from sglang_tuning_exporter.sources.selection import Candidate, Selection, most_files
from sglang_tuning_exporter.sources.stream import OTHER_KINDS, Dropped, Key, Stdin, Stream, look_at, why

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

_GLOB_SECONDS = 1.0
_GLOB_REST = 20  # a directory so large that it takes longer is looked through as much less often
_LINGER_SECONDS = 10.0  # logrotate creates the new file before the writer is told; some of its processes come later
_DELETED_SECONDS = 60.0  # a quiet deleted file is let go, since holding it keeps its disk space
_GONE = ("missing", *(words for _, words in OTHER_KINDS))  # after another error the same file may be back
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY  # a FIFO without a writer opens at once


@dataclass(frozen=True, slots=True)
class Block:
    r"""Some whole lines of one file, each ending in `\n`, without the NUL bytes of holes.

    `historical` text was in the file before the exporter started: start-up facts may be taken from it, nothing counted.
    """

    path: str
    data: bytes
    historical: bool = False


@dataclass(frozen=True, slots=True)
class FileStatus:
    """One followed file, or a pattern that nothing matches; `path` is "-" for stdin.

    `reason` is "" when up, else "missing", "permission denied", "is a directory", "is a device", "is a socket",
    "unreadable: …" or "ended" (stdin).
    `position` is in bytes; `dropped` counts lines longer than the limit, `dropped_bytes` their bytes.
    """

    path: str
    up: bool
    reason: str
    position: int
    dropped: int
    dropped_bytes: int = 0


@dataclass(slots=True)
class _Watch:
    """A path that is looked at every poll."""

    path: str
    pattern: str
    first: bool  # there when the exporter started
    stream: Stream | None = None
    reason: str = ""
    other_name: bool = False  # what is here is followed under another path, or is a rotation's copy
    closed: tuple[Key, int] | None = None  # a file and its size, there at the start, that could not be opened
    resume: places.Mark | None = None  # up to where it was read before it was left out
    modified: int = 0  # nanoseconds
    dropped: Dropped = field(default_factory=Dropped)

    @property
    def is_glob_match(self) -> bool:
        return self.path != self.pattern


class LogFollower:
    """Reads files, globs and stdin ("-") as they grow; the caller polls, every 0.1 s or so.

    Files that exist now are read from their end, later ones from their start; `from_start` reads all from the start.
    `positions` (of an earlier follower's `positions()`) continues exactly there, through renames in between. `clock`
    gives monotonic seconds. Of what globs match, `most` files are followed, those written last; `left_out` counts the
    others.
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
        self._saved = places.load(positions)
        self._clock = clock
        self._stdin: Stdin | None = None
        if "-" in patterns:
            source = stdin if stdin is not None else getattr(sys.stdin, "buffer", None)
            self._stdin = Stdin(source, max_line_bytes)
        self._watches: dict[str, _Watch] = {}
        self._streams: dict[Key, Stream] = {}
        self._copies: set[Key] = set()
        self._most = most_files() if most is None else most
        self._selection = Selection(self._patterns, self._most, self._saved, from_start=from_start)
        self._next_glob = 0.0
        now = clock()
        self._expand(now, first=True)
        self._look(now)
        for watch in list(self._watches.values()):
            if watch.stream is None and not watch.other_name:
                self._open_rotated(watch, self._saved.of(watch.path), now)

    def poll(self) -> Iterator[Block]:
        """Yield the lines that are there now: never waits, and reads a bounded amount of each file."""
        if self._stdin is not None:
            yield from _blocks("-", self._stdin.read())
        now = self._clock()
        if now >= self._next_glob:
            self._expand(now, first=False)
        self._look(now)
        for stream in list(self._streams.values()):
            if stream.look_back_from:
                yield from _blocks(stream.path, [stream.look_back()], historical=True)
        for stream in list(self._streams.values()):
            if stream.after is None or stream.after.at_end:
                stream.after = None
                # Asked before reading: whatever a writer put here before it went on is then read below.
                moved_on = stream.successor is not None and stream.successor.has_text()
                yield from _blocks(stream.path, stream.read(now))
                if stream.at_end:
                    yield from _blocks(stream.path, [self._finish(stream, moved_on=moved_on, now=now)])

    def status(self) -> list[FileStatus]:
        """Say of every file, and of every pattern without one, whether it is read, and if not why."""
        found = []
        if self._stdin is not None:
            found.append(_status("-", self._stdin.reason, self._stdin.position, self._stdin.dropped))
        for watch in self._watches.values():
            if not watch.other_name:
                reason = watch.reason or (watch.stream.reason if watch.stream else "")
                position = watch.stream.position if watch.stream else 0
                found.append(_status(watch.path, reason, position, watch.dropped))
        used = {watch.pattern for watch in self._watches.values()}
        found += [
            _status(pattern, "missing", 0, Dropped()) for pattern in self._selection.barren if pattern not in used
        ]
        return found

    def paths(self) -> set[str]:
        """Return every path that blocks may still come from."""
        paths = {stream.path for stream in self._streams.values()} | self._watches.keys()
        return paths if self._stdin is None else paths | {"-"}

    def positions(self) -> dict[str, object]:
        """Return, as plain JSON, how far each file has been read; every block yielded counts as read."""
        marks = [*self._selection.marks(), *(stream.mark() for stream in self._streams.values())]
        return places.dump(self._patterns, [mark for mark in marks if mark is not None])

    def close(self) -> None:
        """Close every file; stdin belongs to the caller."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._watches.clear()

    @property
    def left_out(self) -> int:
        """How many files are matched by a glob and not followed, because there are too many."""
        return self._selection.left_out

    def _expand(self, now: float, *, first: bool) -> None:
        begin = time.thread_time()  # a machine that is busy with others must not make new files wait
        for file in self._selection.choose(self._watches, self._make_room, first=first):
            self._watches[file.path] = _Watch(
                file.path, file.pattern, first=first, resume=file.mark, modified=file.modified
            )
        self._next_glob = now + max(_GLOB_SECONDS, _GLOB_REST * (time.thread_time() - begin))

    def _make_room(self, file: Candidate) -> bool:
        """Leave out the file that was written to longest ago, if that is longer ago than `file` was and it has been read."""
        quiet = [
            watch
            for watch in self._watches.values()
            if watch.is_glob_match
            and watch.modified < file.modified
            and (watch.stream is None or (watch.stream.at_end and watch.stream.gone_at is None))
        ]
        if not quiet:
            return False
        watch = min(quiet, key=lambda each: each.modified)
        del self._watches[watch.path]
        stream = watch.stream
        if stream is not None:
            size = os.fstat(stream.fd).st_size
            self._selection.leave_out(
                Candidate(watch.path, watch.pattern, stream.key, size, watch.modified, stream.mark())
            )
            del self._streams[stream.key]
            stream.close()
        return True

    def _look(self, now: float) -> None:
        found: dict[str, os.stat_result] = {}
        for path, watch in self._watches.items():
            watch.reason, status = look_at(path)
            if status is not None:
                found[path] = status
        owners: dict[Key, str] = {}
        for path, status in found.items():
            key = (status.st_dev, status.st_ino)
            stream = self._streams.get(key)
            mine = stream is not None and stream.path == path and self._watches[path].stream is stream
            owners[key] = path if mine else owners.get(key, path)
            self._watches[path].modified = status.st_mtime_ns
        self._copies.intersection_update(owners)
        for path, watch in list(self._watches.items()):
            if path not in found:
                self._miss(watch, now)
                continue
            key = (found[path].st_dev, found[path].st_ino)
            watch.other_name = owners[key] != path
            if watch.other_name:
                self._leave(watch, None, now)
            elif watch.stream is None or watch.stream.key != key:
                self._take(watch, found[path], now)
            else:
                watch.stream.gone_at = None

    def _miss(self, watch: _Watch, now: float) -> None:
        watch.other_name = False
        watch.first = watch.first and watch.reason == "permission denied"
        if watch.stream is None and watch.is_glob_match and watch.path not in self._selection.matched:
            del self._watches[watch.path]
        elif watch.stream is not None and watch.stream.gone_at is None and watch.reason in _GONE:
            watch.stream.gone_at = now

    def _take(self, watch: _Watch, status: os.stat_result, now: float) -> None:
        key = (status.st_dev, status.st_ino)
        stream = self._streams.get(key)
        if stream is not None:
            for other in self._watches.values():
                if other.stream is stream:
                    other.stream = None
            stream.path, stream.gone_at = watch.path, None
        elif key in self._copies:
            watch.other_name = True
            return
        else:
            stream = self._open(watch, status, now)
            if stream is None:
                return
        self._leave(watch, stream, now)
        watch.stream, watch.first = stream, False

    def _leave(self, watch: _Watch, successor: Stream | None, now: float) -> None:
        old, watch.stream = watch.stream, None
        if old is not None:
            old.gone_at = now
            old.successor = successor
            if successor is not None:
                successor.after = old
            self._next_glob = now  # its new name may be one of ours

    def _open(self, watch: _Watch, status: os.stat_result, now: float) -> Stream | None:
        key, size = (status.st_dev, status.st_ino), status.st_size
        try:
            fd = os.open(watch.path, _FLAGS)
        except OSError as error:
            watch.reason = why(error)
            if watch.first and watch.closed is None:
                watch.closed = (key, size)
            return None
        stream = Stream(watch.path, fd, self._limit, watch.dropped)
        if stream.key != key:  # replaced this very moment; the next poll sees what it is
            os.close(fd)
            return None
        if self._is_copy(watch, fd):
            os.close(fd)
            self._copies.add(key)
            watch.other_name = True
            return None
        try:
            self._start(watch, stream, os.fstat(fd).st_size, now)
        except OSError as error:
            os.close(fd)
            watch.reason = why(error)
            return None
        self._streams[key] = stream
        stream.grown_at = now
        return stream

    def _is_copy(self, watch: _Watch, fd: int) -> bool:
        """Say whether this is a copytruncate's copy of a followed file: a renamed one would have a known inode."""
        if not watch.is_glob_match or (watch.first and watch.pattern not in self._saved.patterns):
            return False
        known = self._saved.fitting(fd) if watch.first else None
        return known is None and any(places.is_rotated_name(watch.path, other) for other in self._watches)

    def _start(self, watch: _Watch, stream: Stream, size: int, now: float) -> None:
        if watch.resume is not None:
            if watch.resume.fits(stream.fd):
                stream.start_at(watch.resume.position)
            return
        if not watch.first or not stream.seekable:
            return
        marks = self._saved.of(watch.path)
        mark = self._saved.fitting(stream.fd)
        if mark is not None:
            stream.go_on_at(mark.position)
            self._open_rotated(watch, [other for other in marks if other != mark], now, stream)
        elif watch.pattern in self._saved.patterns:  # it came while nobody looked: all of it is news
            self._open_rotated(watch, marks, now, stream)
        elif watch.closed is not None:
            if watch.closed[0] == stream.key and watch.closed[1] <= size:
                stream.start_at(watch.closed[1])
        elif not self._from_start:
            stream.start_at(size)

    def _open_rotated(
        self, watch: _Watch, marks: Sequence[places.Mark], now: float, successor: Stream | None = None
    ) -> None:
        """Open what an earlier follower left unread under this path and a rotation has renamed since."""
        last: Stream | None = None
        for at, place in enumerate(places.rotated(marks[-1])[: self._most] if marks else []):
            try:
                fd = os.open(place, _FLAGS)
            except OSError:
                continue
            stream = Stream(watch.path, fd, self._limit, watch.dropped)
            if stream.key in self._streams:
                os.close(fd)
                continue
            if at == 0:
                stream.go_on_at(marks[-1].position)
            stream.gone_at = stream.grown_at = now
            stream.after = last
            if last is not None:
                last.successor = stream
            self._streams[stream.key] = last = stream
        if last is not None and successor is not None:
            last.successor, successor.after = successor, last

    def _finish(self, stream: Stream, *, moved_on: bool, now: float) -> bytes:
        """Return the last, unended line of a file that was rotated away, and let the file go once it is quiet."""
        rest = stream.rest() if moved_on else b""
        if stream.gone_at is None:
            return rest
        watch = next((watch for watch in self._watches.values() if watch.stream is stream), None)
        if stream.is_deleted():
            patience = _DELETED_SECONDS if watch is not None else _LINGER_SECONDS
        elif watch is not None:
            if not watch.is_glob_match:
                return rest  # renamed, and nothing has taken its place: its writer is still at it
            patience = _DELETED_SECONDS
        elif stream.successor is not None and not moved_on:
            return rest  # the new file is there, but nobody writes to it yet
        else:
            patience = _LINGER_SECONDS
        crowded = len(self._streams) > self._most and watch is None
        if now - max(stream.gone_at, stream.grown_at) < patience and not crowded:
            return rest
        if watch is not None:
            self._leave(watch, None, now)
        del self._streams[stream.key]
        return rest + stream.close()


def _blocks(path: str, pieces: Iterable[bytes], *, historical: bool = False) -> Iterator[Block]:
    return (Block(path, data, historical) for data in pieces if data)


def _status(path: str, reason: str, position: int, dropped: Dropped) -> FileStatus:
    return FileStatus(path, not reason, reason, position, dropped.lines, dropped.bytes)
