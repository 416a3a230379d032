"""The files of a report: found, opened, unpacked, and in the order in which their lines were printed."""

from __future__ import annotations

import glob
import io
import os
import re
import stat
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from pathlib import Path
from typing import IO, BinaryIO

from sglang_tuning_exporter.collect.compression import MAGIC, OPENERS, REMEDIES, packing
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.report.blocks import (
    BLOCK,
    Counted,
    DamagedFileError,
    InputTooLargeError,
    unpack,
    whole_lines,
    within,
    without_holes,
)
from sglang_tuning_exporter.report.clock import begin_of
from sglang_tuning_exporter.report.servers import are_nodes, start_of, zone_between
from sglang_tuning_exporter.report.texts import oldest_first, rejoined, unfolded
from sglang_tuning_exporter.sglang.clean import clean
from sglang_tuning_exporter.sglang.events import ServerArgs
from sglang_tuning_exporter.sglang.log.forms import OwnTimes, own_times
from sglang_tuning_exporter.sglang.log.prefix import FIRST_DATED_SECOND

STDIN = "-"
MOST_WITHOUT_A_LINE = 32 << 20
_SHORT_LINE_BYTES = 64  # bytes that a line counts at least towards that: a short one takes as long to read
_TAR, _TAR_AT = b"ustar", 257
_ROTATED = re.compile(r"(?:\.(?P<number>\d{1,4})|[-._](?P<date>\d{8}(?:[-._]?\d{1,10})?))?(?:\.(?:gz|bz2|xz|zst))?$")


def shown(name: str) -> str:
    """Return a file's name as one line without control characters."""
    return clean(name)


@dataclass(slots=True)
class LogSource:
    """One file or stream. A pipe can be read only once, so its first block is kept."""

    name: str
    stream: IO[bytes] | None = None  # of a pipe
    first: float | None = None  # when the log begins, on the clock of the report
    own_times: OwnTimes = ""  # where SGLang prints its times
    start: ServerArgs | None = None  # the first start in its beginning, if there is one
    ahead: float = 0.0  # how far the clock of this log is ahead, seconds
    empty: bool = False
    notes: list[str] = field(default_factory=list)
    on_read: Callable[[int], None] | None = None  # called with the number of bytes that were read
    most: int | None = None  # the most bytes of an input of unknown size
    _held: Iterator[bytes] | None = None
    _taken: int = 0  # bytes, packed or not
    _given: int = 0  # bytes of whole lines, each at least `_SHORT_LINE_BYTES`
    _is_sized: bool = False

    def look(self) -> None:
        """Read the beginning. Raises `UsageError` when it cannot be read."""
        with self._telling():
            blocks = self._read()
            head = next(blocks, b"")
            self.first, self.own_times, self.start = begin_of(head), own_times(head), start_of(head)
            self.empty = not head
            if self.stream is not None:
                self._held = chain([head], blocks)
            else:
                blocks.close()

    def blocks(self) -> Iterator[bytes]:
        """Return everything in blocks of whole lines. Raises `UsageError` when it cannot be read."""
        with self._telling():
            blocks, self._held = self._held or self._read(), None
            for block in blocks:
                self._given += max(len(block), _SHORT_LINE_BYTES * block.count(b"\n"))
                yield block
            self._close()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Turn an error of the system into a `UsageError`, and close a pipe that cannot be read on."""
        try:
            with _readable(self.name):
                yield
        except UsageError:
            self._close()
            raise

    def _close(self) -> None:
        if self.stream is not None and self.name != STDIN:
            self.stream.close()

    @property
    def is_endless(self) -> bool:
        """Whether its size is not known, and too much was read to go on without a line of SGLang's."""
        return not self._is_sized and self.most is None and self._given > MOST_WITHOUT_A_LINE

    def take(self, number: int) -> None:
        """Count `number` more bytes as read."""
        self._taken += number
        if self.on_read is not None:
            self.on_read(number)

    def _read(self) -> Generator[bytes, None, None]:
        self._taken = 0
        if self.stream is not None:
            yield from self._lines(self._chunks(self.stream))
            return
        with Path(self.name).open("rb") as stream:
            self._is_sized = not packing(os.pread(stream.fileno(), max(map(len, MAGIC)), 0))
            yield from self._lines(self._plain(stream) if self._is_sized else self._chunks(stream))

    def _lines(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        return whole_lines(oldest_first(rejoined(unfolded(self._of_a_log(chunks)), self._note), shown(self.name)))

    def _of_a_log(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Return the chunks. Raises `UsageError` when they are those of something known that only contains a log."""
        first = next(filter(None, chunks), b"")
        if first[_TAR_AT : _TAR_AT + len(_TAR)] == _TAR:
            raise UsageError(f"{shown(self.name)}: is a tar archive; unpack it, and give its logs")
        if packing(first):
            raise UsageError(f"{shown(self.name)}: was compressed twice; unpack it once")
        if b"\n" not in first and first.count(b"\r[20") > 1:
            raise UsageError(f"{shown(self.name)}: its lines end in carriage returns alone; convert it: tr '\\r' '\\n'")
        yield first
        yield from chunks

    def _note(self, what: str) -> None:
        note = f"{shown(self.name)}: {what}"
        if note not in self.notes:
            self.notes.append(note)

    def _plain(self, stream: BinaryIO) -> Iterator[bytes]:
        for chunk in without_holes(stream):
            self.take(len(chunk))
            yield chunk

    def _chunks(self, of: IO[bytes]) -> Iterator[bytes]:
        """Return what a pipe or a packed file has, unpacked."""
        stream = io.BufferedReader(Counted(of, self.take), BLOCK)
        extension = packing(stream.peek())
        if not extension:
            yield from within(iter(lambda: stream.read(BLOCK), b""), self.most, None)
            return
        if extension not in OPENERS:
            remedy = REMEDIES[extension]
            raise UsageError(f"{shown(self.name)}: is a {extension} file, which cannot be read here; {remedy}")
        rest = b""
        try:
            for chunk in within(unpack(extension, stream), self.most, lambda: self._taken):
                # The last line may be cut, and a cut figure is wrong.
                end = chunk.rfind(b"\n") + 1
                if rest:
                    yield rest
                yield chunk[:end]
                rest = chunk[end:]
        except DamagedFileError as reason:
            self._note(f"{reason}; only what comes before it was read")
        else:
            yield rest


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Turn an error of the system about a file into a `UsageError`."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{shown(name)}: {error.strerror or error}; give a log that can be read") from None
    except InputTooLargeError as reason:
        raise UsageError(f"{shown(name)}: {reason}; give a log, or how much to read at most with --max-gb") from None


def because(sources: Sequence[LogSource]) -> str:
    """Return the notes as the end of an error message."""
    return "".join(f" ({note})" for source in sources for note in source.notes)


def find(arguments: Sequence[str], stdin: IO[bytes] | None) -> list[LogSource]:
    """Return the files that the arguments name: paths, globs, and - for standard input. Raises `UsageError` where one names none."""
    found: list[LogSource] = []
    known: set[tuple[int, int]] = set()
    for argument in arguments:
        if argument == STDIN:
            if stdin is None:
                raise UsageError("-: there is no standard input; give a file")
            if not any(source.name == STDIN for source in found):
                found.append(LogSource(STDIN, stdin))
            continue
        names = [argument]
        if glob.has_magic(argument) and not Path(argument).exists():
            matches = sorted(glob.glob(argument, recursive=True))  # noqa: PTH207 - Path takes no absolute pattern
            names = [name for name in matches if not Path(name).is_dir()]
            if not names:
                raise UsageError(f"{shown(argument)}: no file matches; give a path, a glob, or -")
        for name in names:
            with _readable(name):
                status = os.stat(name)  # noqa: PTH116 - the name stays as it was given
            if (status.st_dev, status.st_ino) not in known:
                known.add((status.st_dev, status.st_ino))
                found.append(_opened(name, status))
    return found


def _opened(name: str, status: os.stat_result) -> LogSource:
    if stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{shown(name)}: is a directory; give its files, such as {shown(name).rstrip('/')}/*")
    if stat.S_ISBLK(status.st_mode) or stat.S_ISCHR(status.st_mode):
        raise UsageError(f"{shown(name)}: is a device; give a file, or - for standard input")
    with _readable(name):
        pipe = None if stat.S_ISREG(status.st_mode) else Path(name).open("rb")  # noqa: SIM115 - closed once read
    return LogSource(name, pipe)


def _rotation_order(name: str) -> tuple[int, int]:
    match = _ROTATED.search(name)
    if match is None or not (match["date"] or match["number"]):
        return (2, 0)
    return (0, int(re.sub(r"\D", "", match["date"]))) if match["date"] else (1, -int(match["number"]))


def _by_name(source: LogSource) -> tuple[tuple[int, int], list[str | int]]:
    parts = re.split(r"(\d+)", _ROTATED.sub("", source.name, count=1))
    return _rotation_order(source.name), [int(part) if part.isdigit() else part for part in parts]


def in_order(sources: Sequence[LogSource]) -> list[list[LogSource]]:
    """Return the files in groups that one reader reads one after the other, in time order.

    A file with dates is a log by itself; a file without any time continues the file whose name sorts before it. Without dates only
    the names give the order of rotated files.
    """
    logs = [[source] for source in sources if source.stream or (source.first or 0.0) >= FIRST_DATED_SECOND]
    rotations: dict[str, list[LogSource]] = {}
    for source in sorted((each for each in sources if [each] not in logs), key=_by_name):
        before = [log for log in logs if source.first is None and _by_name(log[-1]) < _by_name(source)]
        if before:
            max(before, key=lambda log: _by_name(log[-1])).append(source)
        else:
            rotations.setdefault(_ROTATED.sub("", source.name, count=1), []).append(source)
    logs.extend(rotations.values())
    return sorted(logs, key=lambda log: (-inf if log[0].first is None else log[0].first, _by_name(log[0])))


def align(sources: Sequence[LogSource]) -> None:
    """Put the logs of one server's nodes on one clock."""
    starts = [(source, source.start) for source in sources if source.start is not None]
    for source, start in starts:
        _, base = min(starts, key=lambda each: (not are_nodes(start.args, each[1].args), _node_rank(each[1])))
        ahead = zone_between(base, start) if _node_rank(base) < _node_rank(start) else 0.0
        if ahead and source.first is not None:
            source.ahead, source.first = ahead, source.first - ahead


def _node_rank(start: ServerArgs) -> int:
    rank = start.args.get("node_rank")
    return rank if isinstance(rank, int) else 0
