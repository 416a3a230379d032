"""The logs a report is made of, as events in time order: files, globs, standard input, gzip, rotation sets, many ranks.

Every log is read in blocks, so memory does not grow with its size. Printed times are read as UTC.
"""

from __future__ import annotations

import glob
import heapq
import os
import re
import stat
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import IO, TYPE_CHECKING

from sglang_tuning_exporter.config import UsageError
from sglang_tuning_exporter.guide.document import FIRST_DATED_SECOND
from sglang_tuning_exporter.report.alarms import EVALUATION_SECONDS
from sglang_tuning_exporter.report.blocks import BLOCK, GZIP, Damaged, unzip, whole_lines
from sglang_tuning_exporter.sglang.lines import LogReader
from sglang_tuning_exporter.sglang.prefix import DAY, parse_own_prefix, parse_plain_prefix
from sglang_tuning_exporter.sglang.wrappers import LONGEST_LINE, unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from sglang_tuning_exporter.sglang.events import Event
    from sglang_tuning_exporter.sglang.usual import BatchRun

STDIN = "-"
# Processes write one log a little out of order; what jumps back further was set by somebody.
JITTER_SECONDS = 60.0

_LINES_SEARCHED = 4096
_LOOKED_AT = 1 << 16  # bytes that are looked through for a line with a time
_ROTATED = re.compile(r"(?:\.(?P<number>\d{1,4})|[-._](?P<date>\d{8}(?:[-._]?\d{1,10})?))?(?:\.gz)?$")
_SGLANG_KINDS = ("decode", "prefill", "retraction", "out_of_memory", "startup", "liveness")
_SERVED_KINDS = ("access", "request")


def shown(name: str) -> str:
    """Write a file's name on one line, whatever its characters."""
    return "".join(char if char.isprintable() else "?" for char in name)


def printed_time(line: bytes) -> tuple[float | None, float | None]:
    """Read when a line was printed: unix seconds, and seconds since midnight where it has a time without a date.

    A container runtime's time is not used: its clock may be in another zone than the one the server prints.
    """
    text = line[:LONGEST_LINE]
    prefix = parse_plain_prefix(text)
    if prefix is None:
        text = unwrap(text).text
        prefix = parse_plain_prefix(text) or parse_own_prefix(text)
    return (None, None) if prefix is None else (prefix.time, prefix.clock)


def _first_time(block: bytes) -> float | None:
    outer = None
    for line in block.split(b"\n", _LINES_SEARCHED)[:_LINES_SEARCHED]:
        time, clock = printed_time(line)
        if time is not None or clock is not None:
            return time if time is not None else clock
        if outer is None and line[:1] in b"{0123456789":
            outer = unwrap(line).time
    return outer


def _paced(block: bytes, pace: float) -> Iterator[bytes]:
    """Cut a block of whole lines where the printed time passes a multiple of `pace` seconds."""
    start, size, last = 0, 1024, _last_time(block, -inf)
    while start < len(block):
        first = _first_time(block[start : start + _LOOKED_AT])
        if first is None or last is None or first // pace == last // pace:
            break
        # Lines before `low` lie in this stretch of time; times rise, so the next stretch is found by halving.
        low, high = start, len(block)
        reach = start + 2 * size
        while reach < high and (line := block.find(b"\n", reach) + 1) and line < high:
            if (time := _time_at(block, low, line)) is not None and time // pace != first // pace:
                high = line
            else:
                low, reach = line, line + 2 * (line - start)
        while True:
            middle = block.find(b"\n", (low + high) // 2) + 1
            if not low < middle < high:
                break
            time = _time_at(block, low, middle)
            if time is None or time // pace == first // pace:
                low = middle
            else:
                high = middle
        following = block.find(b"\n", low) + 1
        end = following if start < following < high else high
        yield block[start:end]
        start, size = end, end - start
    if start < len(block):
        yield block[start:]


def _time_at(block: bytes, low: int, start: int) -> float | None:
    """Read the time of the line at `start`: nearly always its own, else that of the line before that has one, from `low` on."""
    time, clock = printed_time(block[start : start + 200].partition(b"\n")[0])
    if time is None and clock is None:
        return _last_time(block[max(low, start - _LOOKED_AT) : start], -inf)
    return clock if time is None else time


def _drifts(block: bytes, known: Mapping[str, int], before: float | None) -> list[tuple[float, Counter[str]]]:
    """Find when lines were printed that could not be read: from which time on the tally stands so. A reader of its own looks again."""
    found: list[tuple[float, Counter[str]]] = []
    reader, seen = LogReader(), 0
    for part in _paced(block, EVALUATION_SECONDS):
        reader.feed_runs(part)
        now, time = sum(reader.unrecognised.values()), _day_of(_last_time(part, -inf), before)
        if now != seen and time is not None:
            found.append(((time // EVALUATION_SECONDS + 1) * EVALUATION_SECONDS, _sum([known, reader.unrecognised])))
        seen = now
    return found


def _day_of(time: float | None, before: float | None) -> float | None:
    """Give a time without a date the day of the last time known, as `_last_time` does."""
    if time is None or before is None or time >= FIRST_DATED_SECOND:
        return time
    found = before // DAY * DAY + time
    return found + DAY if found < before - DAY / 2 else found


def _sum(tallies: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for tally in tallies:
        total.update(tally)
    return total


def _last_time(block: bytes, before: float) -> float | None:
    """Find the time of the last line that has one; `before` is the last time known, for a time without a date."""
    for line in reversed(block.rsplit(b"\n", _LINES_SEARCHED)):
        time, clock = printed_time(line)
        if time is not None:
            return time
        if clock is not None:
            if before == -inf:
                return clock
            time = before // DAY * DAY + clock
            return time + DAY if time < before - DAY / 2 else time
    return None


class Clock:
    """One log's printed times as a time that never runs backwards, seconds.

    After the clock was set back, time goes on from where it was; one line with an old time changes nothing.
    """

    def __init__(self) -> None:
        self.now = -inf
        self.jumps = 0  # how often it was set back
        self._shift = self._shift_before = 0.0

    def is_near(self, time: float | None) -> bool:
        """Say whether a time follows within the jitter: nothing that is read afterwards can have been before it."""
        return time is not None and 0 <= time + self._shift - self.now <= JITTER_SECONDS

    def read(self, time: float | None) -> float:
        """Take the printed time of the next line; `None` is the time of the line before."""
        if time is None:
            return self.now
        if time + self._shift_before >= self.now - JITTER_SECONDS:
            self._shift = self._shift_before
        elif time + self._shift < self.now - JITTER_SECONDS:
            self._shift_before = self._shift
            self._shift = self.now - time
            self.jumps += 1
        self.now = max(self.now, time + self._shift)
        return self.now


@dataclass(slots=True)
class Source:
    """One file or stream. A pipe can be read once, so its first block is kept."""

    name: str
    stream: IO[bytes] | None = None  # of a pipe
    first: float | None = None  # the first line's printed time
    empty: bool = False
    notes: list[str] = field(default_factory=list)
    told: Callable[[int], None] | None = None  # of how many more bytes were read
    _held: Iterator[bytes] | None = None
    _head: bytes = b""

    def look(self) -> None:
        """Read the start. Raises `UsageError` when it cannot be read."""
        with _told(self.name):
            blocks = self._read()
            self._head = next(blocks, b"")
            self.first = _first_time(self._head)
            self.empty = not self._head
            if self.stream is not None:
                self._held = blocks
            else:
                blocks.close()
                self._head = b""

    def blocks(self) -> Iterator[bytes]:
        """Give everything in blocks of whole lines. Raises `UsageError` when it cannot be read."""
        with _told(self.name):
            if self._held is None:
                yield from self._read()
                return
            yield self._head
            self._head = b""
            yield from self._held
            if self.stream is not None and self.name != STDIN:
                self.stream.close()

    def _read(self) -> Generator[bytes, None, None]:
        if self.stream is not None:
            yield from whole_lines(self._chunks(_Watched(self.stream, self)))
        else:
            with Path(self.name).open("rb") as stream:
                yield from whole_lines(self._chunks(_Watched(stream, self)))

    def _chunks(self, stream: _Watched) -> Iterator[bytes]:
        first = stream.read(BLOCK)
        if not first.startswith(GZIP):
            yield first
            while chunk := stream.read(BLOCK):
                yield chunk
            return
        rest = b""
        try:
            for chunk in unzip(first, stream):
                # The last line may be cut: half a figure is a wrong figure.
                end = chunk.rfind(b"\n") + 1
                if rest:
                    yield rest
                yield chunk[:end]
                rest = chunk[end:]
        except Damaged as reason:
            note = f"{shown(self.name)}: {reason}; only what comes before it was read"
            if note not in self.notes:
                self.notes.append(note)
        else:
            yield rest


@dataclass(frozen=True, slots=True)
class _Watched:
    """A stream that tells its source how much was read of it."""

    stream: IO[bytes]
    source: Source

    def read(self, size: int) -> bytes:
        data = self.stream.read(size)
        if self.source.told is not None:
            self.source.told(len(data))
        return data


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Turn what the system says about a file into one line."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{shown(name)}: {error.strerror or error}; give a log that can be read") from None


def _because(sources: Sequence[Source]) -> str:
    """Give the notes, to stand behind an error."""
    return "".join(f" ({note})" for source in sources for note in source.notes)


def _files(arguments: Sequence[str], stdin: IO[bytes] | None) -> list[Source]:
    found: list[Source] = []
    known: set[tuple[int, int]] = set()
    for argument in arguments:
        if argument == STDIN:
            if stdin is None:
                raise UsageError("-: there is no standard input; give a file")
            if not any(source.name == STDIN for source in found):
                found.append(Source(STDIN, stdin))
            continue
        names = [argument]
        if glob.has_magic(argument) and not Path(argument).exists():
            matches = sorted(glob.glob(argument, recursive=True))  # noqa: PTH207 - Path takes no absolute pattern
            names = [name for name in matches if not Path(name).is_dir()]
            if not names:
                raise UsageError(f"{shown(argument)}: no file matches; give a path, a glob, or -")
        for name in names:
            with _told(name):
                status = os.stat(name)  # noqa: PTH116 - the name stays as it was given
            if (status.st_dev, status.st_ino) in known:
                continue
            known.add((status.st_dev, status.st_ino))
            if stat.S_ISDIR(status.st_mode):
                raise UsageError(f"{shown(name)}: is a directory; give its files, such as {shown(name).rstrip('/')}/*")
            with _told(name):
                pipe = None if stat.S_ISREG(status.st_mode) else Path(name).open("rb")  # noqa: SIM115 - closed once read
            found.append(Source(name, pipe))
    return found


def _rotation_order(name: str) -> tuple[int, int]:
    match = _ROTATED.search(name)
    if match is None or not (match["date"] or match["number"]):
        return (2, 0)
    return (0, int(re.sub(r"\D", "", match["date"]))) if match["date"] else (1, -int(match["number"]))


def _logs(sources: Sequence[Source]) -> list[list[Source]]:
    """Group the files that one reader takes one after the other, in time order.

    A file with dates is a log by itself. Without dates only the names tell how a rotation set goes on.
    """
    logs: list[list[Source]] = []
    rotations: dict[str, list[Source]] = {}
    for source in sources:
        if source.stream is None and (source.first is None or source.first < FIRST_DATED_SECOND):
            rotations.setdefault(_ROTATED.sub("", source.name, count=1), []).append(source)
        else:
            logs.append([source])
    logs.extend(sorted(group, key=lambda source: _rotation_order(source.name)) for group in rotations.values())
    return sorted(logs, key=lambda log: -inf if log[0].first is None else log[0].first)


class Logs:
    """All logs of one report. `readers` hold their counts once `events` has been read to its end."""

    def __init__(self, arguments: Sequence[str], stdin: IO[bytes] | None = None, *, pace: float | None = None) -> None:
        """Look at every log's start. Raises `UsageError` for what is missing, a directory, unreadable or empty.

        With a `pace` a log is not read on, beyond a multiple of so many seconds, before all events up to it have been taken:
        `lines_taken` is then that of the moment. `unrecognised_taken` is so in any case.
        """
        if stdin is None and STDIN in arguments and sys.stdin is not None:
            stdin = sys.stdin.buffer
        sources = _files(arguments, stdin)
        for source in sources:
            source.look()
        self._told = [source for source in sources if not source.empty]
        if not self._told:
            reason = "is empty" if len(sources) == 1 else "all are empty"
            raise UsageError(f"{self._names(sources)}: {reason}{_because(sources)}")
        self._logs = _logs(self._told)
        self.readers = [LogReader() for _ in self._logs]
        self.ends: list[float] = []  # the last printed time of each log
        self._clocks = [Clock() for _ in self._logs]
        self._pace = pace
        self._taken: list[tuple[dict[str, int], dict[str, int]]] = [({}, {}) for _ in self._logs]

    @staticmethod
    def _names(sources: Sequence[Source]) -> str:
        return ", ".join(shown(source.name) for source in sources[:3]) + (", …" if len(sources) > 3 else "")

    @property
    def names(self) -> list[str]:
        """What was read, in time order."""
        return [shown(source.name) for log in self._logs for source in log]

    def read_from(self, path: Path) -> bool:
        """Whether `path` is one of the files."""
        return path.exists() and any(source.stream is None and path.samefile(source.name) for source in self._told)

    @property
    def notes(self) -> list[str]:
        """What could not be read of a log that was read."""
        return [note for source in self._told for note in source.notes]

    @property
    def remarks(self) -> list[str]:
        """What a reader must know about the times; said once `events` has been read to its end."""
        remarks = []
        if self.first is None:
            remarks.append(
                "no line has a time: starts, counts, start-up memory and the last figures are told;"
                " shares, rates, phases and alerts are not"
            )
        elif self.first < FIRST_DATED_SECOND:
            remarks.append("times have no date: a day is taken to follow where they begin again")
        jumps = sum(clock.jumps for clock in self._clocks)
        if jumps:
            often = "once" if jumps == 1 else f"{jumps} times"
            remarks.append(
                f"the clock was set back {often}: time goes on from where it was, so later times are not those printed"
            )
        return remarks

    @property
    def size(self) -> int:
        """Bytes of the regular files, packed as they are."""
        return sum(Path(source.name).stat().st_size for source in self._told if source.stream is None)

    @property
    def is_piped(self) -> bool:
        """Whether a part comes from a pipe, whose size nobody knows."""
        return any(source.stream is not None for source in self._told)

    def watch(self, told: Callable[[int], None]) -> None:
        """Have `told` called with the number of bytes whenever some were read."""
        for source in self._told:
            source.told = told

    @property
    def first(self) -> float | None:
        """The first printed time, unix seconds (below `FIRST_DATED_SECOND`: since a midnight)."""
        return min((log[0].first for log in self._logs if log[0].first is not None), default=None)

    @property
    def lines(self) -> int:
        """Physical lines read."""
        return sum(sum(reader.counts.values()) for reader in self.readers)

    @property
    def unrecognised(self) -> int:
        """Lines and fields that look like SGLang's and could not be read."""
        return sum(sum(reader.unrecognised.values()) for reader in self.readers)

    @property
    def lines_taken(self) -> Counter[str]:
        """Lines by kind, up to the last event given."""
        return _sum(lines for lines, _ in self._taken)

    @property
    def unrecognised_taken(self) -> Counter[str]:
        """What could not be read by kind, up to the last event given."""
        return _sum(unrecognised for _, unrecognised in self._taken)

    def events(self) -> Iterator[tuple[float, Event | BatchRun | None]]:
        """Give every event with its time, seconds, in time order; lines without a time follow the line before.

        Each log's first and last printed time come with no event. The time is `-inf` while none was printed.
        Raises `UsageError` when the input cannot be read, or, at its end, is no log of SGLang.
        """
        waiting = list(range(len(self._logs)))[::-1]
        heap: list[tuple[float, int, Event | BatchRun | None, Iterator[tuple[float, Event | BatchRun | None]]]] = []
        while heap or waiting:
            while waiting and (not heap or self._first_of(waiting[-1]) <= heap[0][0]):
                index = waiting.pop()
                events = self._read(index)
                moment, event = next(events)
                heapq.heappush(heap, (moment, index, event, events))
            moment, index, event, events = heap[0]
            yield moment, event
            following = next(events, None)
            if following is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (following[0], index, following[1], events))
        self._check()

    def _first_of(self, index: int) -> float:
        first = self._logs[index][0].first
        return -inf if first is None else first

    def _read(self, index: int) -> Iterator[tuple[float, Event | BatchRun | None]]:
        clock, reader = self._clocks[index], self.readers[index]
        last = self._logs[index][0].first
        yield clock.read(last), None
        end: float | None = None
        for source in self._logs[index]:
            before = block = b""
            for following in source.blocks():
                before, block = block, following
                for part in (block,) if self._pace is None else _paced(block, self._pace):
                    known = reader.unrecognised.copy()
                    events = reader.feed_runs(part)
                    drifts = [] if self._pace or known == reader.unrecognised else _drifts(part, known, last)
                    if not events and self._pace is not None:
                        # Nothing but access lines, perhaps for hours: they move the time, if only by little at once.
                        printed = _day_of(_first_time(part), last)
                        if clock.is_near(printed):
                            yield clock.read(printed), None
                    for event in events:
                        last = event.time if event.time is not None else last
                        while drifts and last is not None and last >= drifts[0][0]:
                            self._taken[index] = (self._taken[index][0], drifts.pop(0)[1])
                        yield clock.read(event.time), event
                    self._taken[index] = (reader.counts.copy(), reader.unrecognised.copy())
            if last is not None:
                # The last block may be a single line without its end.
                found = [_last_time(part, last) for part in (block, before)]
                end = next((time for time in found if time is not None), end)
        if last is not None:
            self.ends.append(last if end is None else end)
            yield clock.read(self.ends[-1]), None

    def _check(self) -> None:
        found = sum(reader.counts[kind] for reader in self.readers for kind in _SGLANG_KINDS)
        served = sum(reader.counts[kind] for reader in self.readers for kind in _SERVED_KINDS)
        # Any web server's log has access lines; only SGLang's puts its own prefix before them.
        if not found and not (served and self.first is not None):
            raise UsageError(
                f"{self._names(self._told)}: no line of SGLang's in it; give a server's log{_because(self._told)}"
            )
