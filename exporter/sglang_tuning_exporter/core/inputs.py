"""The logs of a report as events in time order: files, globs, standard input, packed, rotated, of several nodes.

Logs are read in chunks, so memory does not grow with their size. Printed times are read as UTC. Texts that are not a server's lines in time
order are made such before they are read: JSON documents of log stores, UTF-16, lines that a terminal cut at its width, and texts with the
newest line first.
"""

from __future__ import annotations

import codecs
import errno
import glob
import heapq
import io
import json
import os
import re
import stat
import sys
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from math import inf
from pathlib import Path
from typing import IO, Any

from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.core.compression import DAMAGE, OPENERS, REMEDIES, packing
from sglang_tuning_exporter.core.endings import CAUSE, CLASSES, class_of, quoted, shortened
from sglang_tuning_exporter.core.events import Event, Rank
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.text import FIRST_DATED_SECOND
from sglang_tuning_exporter.core.wrapping import WORDS, time_of, without_known
from sglang_tuning_exporter.sglang.clean import clean

LONGEST_DOCUMENT = 32 << 20  # bytes; what a store answers at once is a few megabytes
_DOCUMENT = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\[\s*(?:[\[{]|$)|\{)")
_DEPTH = 7  # the outputs of a notebook's cells are that deep
_FEWEST_LINES = 64  # of a text that is a log: a message of one record, such as a traceback, has fewer
_LISTS_SEARCHED = 1024  # items of a list that are searched for lists of their own
_WIDTHS, _FEWEST_CUT = range(40, 401), 8  # columns of a terminal; lines of the whole width
_LOOKED_AT, _SAMPLE = 1 << 20, 200  # bytes and lines that are searched for times
# A line that begins here was not cut off from the one before it.
_BEGINS = re.compile(rb"[^\n]{0,60}?(?:\[?20\d\d-\d\d-\d\d[ T]\d\d:|\[\d\d:\d\d:\d\d|INFO: |Traceback \(most)")
_TIME = re.compile(rb"\[?(20\d\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d|(?<=\[)\d\d:\d\d:\d\d)|\b(1[4-9]\d{8,17})\b")


def _peeked(chunks: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """Return the first chunk, and all."""
    first = next(chunks, b"")
    return first, chain([first], chunks)


def _gathered(chunks: Iterator[bytes]) -> bytes:
    """Return all of a text, or a little more than `LONGEST_DOCUMENT` bytes of it: the rest stays in `chunks`."""
    text = bytearray()
    for chunk in chunks:
        text += chunk
        if len(text) > LONGEST_DOCUMENT:
            break
    return bytes(text)


# JSON documents


def unfolded(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Return the text of a file as lines of one record each; any other text unchanged."""
    first, chunks = _peeked(chunks)
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        decoder = codecs.getincrementaldecoder("utf-16")("replace")
        first, chunks = _peeked(decoder.decode(chunk).encode() for chunk in chunks)
    entry = _parsed(first.split(b"\n", 1)[0]) if _DOCUMENT.match(first) else None
    is_of_lines = entry is not None and len(_records(entry)) < 2 and _log_in(entry) is None  # a document on each line
    if _DOCUMENT.match(first) and not is_of_lines:
        text = _gathered(chunks)
        value = _parsed(text)
        found = _log_in(value) or _json_lines(_records(value))  # a text in the document that is a log, or its records
        if not found and entry is not None:
            found = b"".join(_json_lines(_records(_parsed(line))) or line for line in text.splitlines(keepends=True))
        yield found or text
    yield from chunks


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _log_in(value: Any) -> bytes | None:
    texts = (each.encode("utf-8", "replace") for each in inner(value) if isinstance(each, str))
    return next((text for text in texts if text.count(b"\n") >= _FEWEST_LINES and WORDS.search(text)), None)


def _json_lines(records: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def _records(value: Any) -> list[Any]:
    """Return the records in a document: Loki's of all streams, or the longest list of records, or all lists of texts."""
    within = list(inner(value))
    lists = [[_row(item) for item in each] for each in within if isinstance(each, list) and len(each) > 1]
    texts = [text.rstrip("\n") for each in lists if all(isinstance(item, str) for item in each) for text in each]
    streams = [each for each in within if isinstance(each, dict) and isinstance(each.get("values"), list)]
    found = [
        {"timestamp": line[0], "labels": each.get("stream"), "line": line[1]}
        for each in streams
        for line in _in_order(each["values"])
        if isinstance(line, list) and len(line) > 1
    ] or max((each for each in lists if all(isinstance(item, dict) for item in each)), key=len, default=[])
    return _in_order(found) if len(found) >= len(texts) else [{"line": text} for text in texts]


def inner(value: Any) -> Iterator[Any]:
    """Return a JSON value and what it holds, level by level; of a list in a list nothing, because it is a row."""
    level = [value]
    for _ in range(_DEPTH):
        yield from level
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += each.values()
            elif isinstance(each, list):
                below += [item for item in each[:_LISTS_SEARCHED] if not isinstance(item, list)]
        level = below


def _row(item: Any) -> Any:
    """Return a row of a table as one record: in CloudWatch Logs Insights a list of fields, in other answers a list of values."""
    if not isinstance(item, list) or not item:
        return item
    if all(isinstance(cell, dict) and {*cell} == {"field", "value"} for cell in item):
        return {cell["field"]: cell["value"] for cell in item}
    is_row = any(isinstance(cell, str) for cell in item) and not any(isinstance(cell, dict | list) for cell in item)
    return {str(place): cell for place, cell in enumerate(item)} if is_row else item


def _in_order(records: list[Any]) -> list[Any]:
    """Return the records with the oldest first; one without a time stays behind the one before it."""
    times: list[float] = []
    for record in records:
        values = record.values() if isinstance(record, dict) else record if isinstance(record, list) else ()
        found = (
            time_of(str(each).encode("utf-8", "replace")) for each in values if isinstance(each, str | int | float)
        )
        times.append(next((time for time in found if time is not None and time > 1e9), times[-1] if times else 0.0))
    if times and times[0] > times[-1]:
        records, times = records[::-1], times[::-1]
    return [records[place] for place in sorted(range(len(records)), key=times.__getitem__)]


# Lines that a terminal cut


def rejoined(chunks: Iterator[bytes], note: Callable[[str], None]) -> Iterator[bytes]:
    """Return a text whose lines were cut at one width with its lines as they were, which is noted; any other text unchanged."""
    first, chunks = _peeked(chunks)
    lines = first[: _LOOKED_AT // 4].splitlines()
    widths = [len(line.expandtabs()) for line in lines]
    width = max(widths, default=0)
    is_cut = width in _WIDTHS and widths.count(width) >= _FEWEST_CUT
    if not is_cut or _figures(_joined(lines, width)) <= _figures(lines):
        yield from chunks
        return
    note(f"its lines were cut at {width} columns, as a terminal does; they were joined again")
    whole = _joined(_lines(chunks), width)
    while some := list(islice(whole, 4096)):
        yield b"\n".join(some) + b"\n"


def _figures(lines: Iterable[bytes]) -> int:
    """Return how many events, figures and arguments can be read."""
    reader = Reader()
    events = [event for line in lines for event in reader.read(line)] + [*reader.end()]
    return sum(1 + len(event.figures) + len(event.arguments) for event in events)


def _joined(lines: Iterable[bytes], width: int) -> Iterator[bytes]:
    held = b""
    for line in lines:
        if held and _BEGINS.match(line):
            yield held.rstrip(b" ")
            held = b""
        held += line
        columns = len(line.expandtabs())
        if columns == width - 1:
            held += b" "  # a terminal leaves out a space at the end of a line
        elif columns < width:
            yield held
            held = b""
    if held:
        yield held


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.removesuffix(b"\r") for line in lines)
    if rest:
        yield rest


# The newest line first


def oldest_first(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Return the lines of a text, the oldest first. Raise `ValueError` where it must be reversed and is too large."""
    first, chunks = _peeked(chunks)
    lines = first[:_LOOKED_AT].split(b"\n")
    found = (_TIME.search(line[:1000]) for line in lines[:: len(lines) // _SAMPLE + 1])
    times = [time_of(match[1] or match[2]) or 0.0 for match in found if match is not None]
    falls = sum(later < earlier for earlier, later in pairwise(times))  # a clock that was set back falls once
    rises = sum(later > earlier for earlier, later in pairwise(times))  # ranks print a little out of order
    if falls < 2 or falls <= 4 * rises:
        yield from chunks
        return
    text = _gathered(chunks)
    if len(text) > LONGEST_DOCUMENT:
        raise ValueError(
            f"its newest line comes first, and it is larger than {LONGEST_DOCUMENT >> 20} MiB;"
            " give it with the oldest line first, as tac writes it"
        )
    yield b"".join(line + b"\n" for line in reversed(text.removesuffix(b"\n").split(b"\n")))


STDIN = "-"
CHUNK, PACKED_CHUNK, MIB = 1 << 20, 1 << 14, 1 << 20
LONGEST_LINE = 1 << 18  # bytes; more of a line is left out
MOST_WITHOUT_A_LINE = 32 * MIB  # of an input of unknown size, before the first line of SGLang's
MOST_WITHOUT_END = 128 * MIB  # a line of 100 MB is cut, and the rest is read
MOST_OF_UNKNOWN_SIZE = 8 << 30
# A log packs to a tenth or a thirtieth of its size. A file that unpacks to a hundred times its size is made to fill a disk.
MOST_UNPACKED, MOST_RATIO = 64 * MIB, 100
_SHORT_LINE = 64  # bytes that a line counts at least towards MOST_WITHOUT_A_LINE
_HEAD_LINES, _TAIL_LINES = 2000, 200  # that are searched for the first time and start, and for the last time
DAY = 86400.0
# Reasons of the next five: docs/decisions.md, "How a log is read".
JITTER_SECONDS = 60.0  # processes write one log a little out of order; a time further back is of another clock
FAR_SECONDS = 30 * DAY  # no server is silent for so long and then prints: a time further ahead is of another clock
STRAY_LINES = 16  # so many lines with times of another clock are strays if the first clock comes back
MOST_UNDATED = 256  # events before the first that has a time
OVERLAP_SECONDS = 10.0  # the last lines of one file and the first of the next may overlap by so much
ZONE_SECONDS = 1800.0  # time zones differ by whole half hours; the nodes of one server start within less
ENOUGH_LINES, MOST_FRAMES = 10, 64  # batch lines of a rank behind one name; names, above which they are none
# Answers of any web server, not only SGLang's.
_ANSWERS = frozenset({"rejected", "server_error", "pause", "resume", "too_long", "refused"})
_BATCHES = frozenset({"decode", "prefill"})
_STAMP = re.compile(rb"\[(20\d\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d)")
_NUMBER = re.compile(rb"(?<![\w=./-])\d+(?![\w=./-])")  # a length or a count; numbers of names are parts of words
_ROTATED = re.compile(r"(?:\.(?P<number>\d{1,4})|[-._](?P<date>\d{8}(?:[-._]?\d{1,10})?))?(?:\.(?:gz|bz2|xz|zst))?$")


class DamagedError(Exception):
    """A packed file ends early, or other data follows it."""


# One file or stream


@dataclass(slots=True)
class Source:
    """One file or stream. A pipe can be read only once, so its first chunk is kept."""

    name: str
    stdin: IO[bytes] | None = None
    is_pipe: bool = False
    most: int | None = None  # the most bytes of an input of unknown size
    on_read: Callable[[int], None] | None = None  # called with the number of bytes that were read
    first: float | None = None  # when the log begins, on the clock of the report
    start: Event | None = None  # the first start in its beginning
    ahead: float = 0.0  # how far its clock is ahead, seconds
    empty: bool = False
    is_sized: bool = False
    notes: list[str] = field(default_factory=list)
    _held: Iterator[bytes] | None = None
    _taken: int = 0  # bytes, packed or not

    @property
    def label(self) -> str:
        """The name as one line without control characters."""
        return clean(self.name)

    def look(self) -> None:
        """Read the beginning. Raise `UsageError` where it cannot be read."""
        chunks = self._text()
        head = next(chunks, b"")
        self.empty = not head
        self._look_at(head)
        if self.is_pipe:
            self._held = chain([head], chunks)
        else:
            chunks.close()

    def _look_at(self, head: bytes) -> None:
        reader, times = Reader(), list[float]()
        for line in head.split(b"\n", _HEAD_LINES)[:_HEAD_LINES]:
            for event in reader.read(line[:LONGEST_LINE].rstrip(b"\r")):
                if event.kind == "arguments" and event.time is not None and self.start is None:
                    self.start = event
                if event.time is not None:
                    times.append(event.time)
            if not times and self.first is None:
                self.first = stamp(line)
        if times and (self.first is None or not 0 <= times[0] - self.first < DAY):
            self.first = times[0]
            if len(times) > 1 and (
                all(time < times[0] - JITTER_SECONDS for time in times[1:3])
                or all(time > times[0] + FAR_SECONDS for time in times[1:3])
            ):
                self.first = times[1]  # the first is a stray

    def blocks(self) -> Iterator[list[bytes]]:
        """Give every line without its end, many at once. Raise `UsageError` where it cannot be read."""
        chunks, self._held = self._held or self._text(), None
        for chunk in chunks:
            yield chunk.replace(b"\r\n", b"\n").removesuffix(b"\n").split(b"\n")

    def lines(self) -> Iterator[bytes]:
        """Give every line without its end."""
        return chain.from_iterable(self.blocks())

    def _note(self, what: str) -> None:
        if (note := f"{self.label}: {what}") not in self.notes:
            self.notes.append(note)

    def _text(self) -> Generator[bytes, None, None]:
        """Give the text in chunks of whole lines, the oldest first."""
        self._taken = 0
        try:
            with readable(self.name):
                yield from whole_lines(oldest_first(rejoined(unfolded(self._of_a_log(self._chunks())), self._note)))
        except ValueError as problem:
            raise UsageError(f"{self.label}: {problem}") from None

    def _of_a_log(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        first = next(filter(None, chunks), b"")
        problem = ""
        if first[257:262] == b"ustar":
            problem = "is a tar archive; unpack it, and give its logs"
        elif packing(first):
            problem = "was compressed twice; unpack it once"
        elif b"\n" not in first and first.count(b"\r[20") > 1:
            problem = "its lines end in carriage returns alone; convert it: tr '\\r' '\\n'"
        if problem:
            raise UsageError(f"{self.label}: {problem}")
        yield first
        yield from chunks

    def _chunks(self) -> Iterator[bytes]:
        with nullcontext(self.stdin) if self.stdin is not None else Path(self.name).open("rb") as stream:
            self.is_sized = not self.is_pipe and not packing(os.pread(stream.fileno(), 8, 0))
            yield from self._plain(stream.fileno()) if self.is_sized else self._unpacked(stream)

    def take(self, number: int) -> None:
        """Count `number` more bytes as read."""
        self._taken += number
        if self.on_read is not None:
            self.on_read(number)

    def _plain(self, descriptor: int) -> Iterator[bytes]:
        """Read a regular file; a hole is a single NUL byte."""
        at = 0
        while True:
            try:
                data = os.lseek(descriptor, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # a hole to the end, or the end
                    return
                data = at  # a file system without SEEK_DATA
            if data > at:
                yield b"\0"
            if not (chunk := os.pread(descriptor, CHUNK, data)):  # reading the stream would ignore the moved position
                return
            at = data + len(chunk)
            self.take(len(chunk))
            yield chunk

    def _unpacked(self, of: IO[bytes]) -> Iterator[bytes]:
        """Give what a pipe or a packed file has, while it looks like a log; the last line may be cut, and a cut figure is wrong."""
        stream = io.BufferedReader(_Counted(of, self.take), PACKED_CHUNK)
        extension = packing(stream.peek())
        if extension and extension not in OPENERS:
            problem = f"is a {extension} file, which cannot be read here; {REMEDIES[extension]}"
            raise UsageError(f"{self.label}: {problem}")
        total = unended = 0
        rest = b""
        try:
            for chunk in unpack(extension, stream) if extension else iter(lambda: stream.read1(CHUNK), b""):
                end = chunk.rfind(b"\n") + 1
                total, unended = total + len(chunk), len(chunk) - end + (0 if end else unended)
                self._check_size(total, unended, packed=bool(extension))
                yield rest + chunk[:end]
                rest = chunk[end:]
        except DamagedError as reason:
            self._note(f"{reason}; only what comes before it was read")
        else:
            yield rest

    def _check_size(self, total: int, unended: int, *, packed: bool) -> None:
        problem = ""
        if total > (self.most or MOST_OF_UNKNOWN_SIZE):
            problem = f"is larger than {(self.most or MOST_OF_UNKNOWN_SIZE) / (1 << 30):g} GiB"
        elif self.most is None and unended > MOST_WITHOUT_END:
            problem = f"has no end of a line in {MOST_WITHOUT_END // MIB} MiB"
        elif self.most is None and packed and total > max(MOST_UNPACKED, MOST_RATIO * self._taken):
            problem = f"unpacks to more than {MOST_RATIO} times its size"
        if problem:
            raise UsageError(f"{self.label}: {problem}; give a log, or how much to read at most with --max-gb")


class _Counted(io.RawIOBase):
    """A stream that says how many bytes were read of it, and gives few at once: of a damaged file the rest of a piece is lost."""

    def __init__(self, stream: IO[bytes], take: Callable[[int], None]) -> None:
        self._stream, self._take = stream, take

    def readable(self) -> bool:
        """Return True: `io.BufferedReader` asks."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer."""
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self._take(len(data))
        return len(data)


def unpack(extension: str, stream: IO[bytes]) -> Iterator[bytes]:
    """Decompress a file. Raise `DamagedError` after everything that can be read."""
    try:
        with OPENERS[extension](stream) as text:
            while chunk := text.read1(CHUNK):  # what `read` had when the file ends early would be lost
                yield chunk
    except DAMAGE as error:
        if extension != ".gz":
            raise DamagedError("is damaged or ends early") from error
        reason = "holds more than gzip" if "Not a gzipped file" in str(error) else "is damaged"
        raise DamagedError("ends in the middle of a gzip member" if isinstance(error, EOFError) else reason) from error


def whole_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Cut chunks at line ends; leave out the end of a very long line, and NUL bytes before one, with which a truncated file begins."""
    rest, skipping = b"", False
    for data in chunks:
        chunk = data
        if skipping:
            if (end := chunk.find(b"\n")) < 0:
                continue
            chunk, skipping = chunk[end:], False
        chunk = rest + chunk
        end = chunk.rfind(b"\n") + 1
        if end:
            yield chunk[:end]
        rest = chunk[end:]
        if rest[:1] == b"\0":
            rest = rest.lstrip(b"\0")
        if len(rest) > LONGEST_LINE:
            rest, skipping = rest[:LONGEST_LINE], True
    if rest:
        yield rest


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Turn an error of the system about a file into a `UsageError`."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{clean(name)}: {error.strerror or error}; give a log that can be read") from None


# Several files


def find(arguments: Sequence[str], stdin: IO[bytes] | None) -> list[Source]:
    """Return the files that the arguments name: paths, globs, and - for standard input. Raise `UsageError` where one names none."""
    found: list[Source] = []
    known: set[tuple[int, int]] = set()
    for argument in arguments:
        if argument == STDIN:
            if stdin is None:
                raise UsageError("-: there is no standard input; give a file")
            if not any(source.name == STDIN for source in found):
                found.append(Source(STDIN, stdin, is_pipe=True))
            continue
        for name in _named(argument):
            with readable(name):
                status = os.stat(name)  # noqa: PTH116 - the name stays as it was given
            if (status.st_dev, status.st_ino) not in known:
                known.add((status.st_dev, status.st_ino))
                if stat.S_ISDIR(status.st_mode):
                    raise UsageError(
                        f"{clean(name)}: is a directory; give its files, such as {clean(name).rstrip('/')}/*"
                    )
                if stat.S_ISBLK(status.st_mode) or stat.S_ISCHR(status.st_mode):
                    raise UsageError(f"{clean(name)}: is a device; give a file, or - for standard input")
                found.append(Source(name, is_pipe=not stat.S_ISREG(status.st_mode)))
    return found


def _named(argument: str) -> list[str]:
    if not glob.has_magic(argument) or Path(argument).exists():
        return [argument]
    matches = sorted(glob.glob(argument, recursive=True))  # noqa: PTH207 - Path takes no absolute pattern
    if names := [name for name in matches if not Path(name).is_dir()]:
        return names
    raise UsageError(f"{clean(argument)}: no file matches; give a path, a glob, or -")


def _by_name(source: Source) -> tuple[tuple[int, int], list[str | int]]:
    """Return what rotated files sort by, the oldest first: `-20251120` by date, then `.2` before `.1`, then the file itself."""
    match = _ROTATED.search(source.name)
    order = (2, 0)
    if match is not None and match["date"]:
        order = (0, int(re.sub(r"\D", "", match["date"])))
    elif match is not None and match["number"]:
        order = (1, -int(match["number"]))
    parts = re.split(r"(\d+)", _ROTATED.sub("", source.name, count=1))
    return order, [int(part) if part.isdigit() else part for part in parts]


def in_order(sources: Sequence[Source]) -> list[list[Source]]:
    """Return the files in groups that one reader reads one after the other, in time order.

    A file with dates is a log by itself; a file without any time continues the file whose name sorts before it. Without dates only
    the names give the order of rotated files.
    """
    logs = [[source] for source in sources if source.is_pipe or (source.first or 0.0) >= FIRST_DATED_SECOND]
    rotations: dict[str, list[Source]] = {}
    for source in sorted((each for each in sources if [each] not in logs), key=_by_name):
        before = [log for log in logs if source.first is None and _by_name(log[-1]) < _by_name(source)]
        if before:
            max(before, key=lambda log: _by_name(log[-1])).append(source)
        else:
            rotations.setdefault(_ROTATED.sub("", source.name, count=1), []).append(source)
    logs.extend(rotations.values())
    return sorted(logs, key=lambda log: (-inf if log[0].first is None else log[0].first, _by_name(log[0])))


def align(sources: Sequence[Source]) -> list[str]:
    """Put the logs of one server's nodes on one clock; return notes about it."""
    notes = []
    starts = [(source, source.start) for source in sources if source.start is not None]
    for source, start in starts:
        base, first = min(starts, key=lambda each: (not are_nodes(start.arguments, each[1].arguments), _node(each[1])))
        is_other = _node(first) < _node(start) and are_nodes(start.arguments, first.arguments)
        ahead = ZONE_SECONDS * round(
            ((start.time or 0.0) - (first.time or 0.0)) / ZONE_SECONDS
        )  # not by its later start
        if is_other and ahead and source.first is not None:
            source.ahead, source.first = ahead, source.first - ahead
            way = "ahead of" if ahead > 0 else "behind"
            notes.append(
                f"{source.label}: its clock is {abs(ahead) / 3600:g} h {way} that of {base.label},"
                " another node in another time zone: its times are moved by that"
            )
    return notes


def _node(start: Event) -> int:
    rank = start.arguments.get("node_rank")
    return rank if isinstance(rank, int) else 0


# The clock of a log, and whether all lines are one server's


@dataclass(slots=True)
class _Begun:
    """The batches of one rank behind one name: when the first and the last line came, and how many."""

    first: float
    last: float
    lines: int = 1


@dataclass(slots=True)
class Lane:
    """A reader and a clock that never runs backwards; a log that begins where another ended continues them.

    A line with a time of another clock changes nothing if the first clock comes back within a few lines. After the clock was set,
    time goes on from where it was.
    """

    number: int
    name: str = ""
    ahead: float = 0.0
    reader: Reader = field(default_factory=Reader)
    now: float = -inf
    printed: float | None = None  # the last time that moved the clock, as printed
    last: float | None = None  # the last time that any line has
    set_back: int = 0
    set_forward: int = 0
    strays: int = 0
    events: Iterator[Event] = field(default_factory=lambda: iter(()))
    started: float | None = None  # the last start, and its arguments
    arguments: Mapping[str, object] = field(default_factory=dict)
    printing: dict[Rank, _Begun] = field(default_factory=dict)  # batches of each rank since a start
    starts: list[Mapping[str, object]] = field(default_factory=list)  # of the servers that may be running
    ready: int = 0  # since the last start
    frames: dict[Rank, dict[bytes, _Begun]] = field(default_factory=dict)  # what stands around batch lines
    started_behind: set[bytes] = field(default_factory=set)  # what stands around starts
    two: str = ""  # that one rank prints behind two names
    tallies: deque[tuple[Counter[str], Counter[str]]] = field(default_factory=deque)  # with each event that was read
    tally: tuple[Counter[str], Counter[str]] = field(default_factory=lambda: (Counter(), Counter()))
    _shift: float | None = None
    _former: float | None = None  # the shift before the last change

    def steady(self, events: Iterable[Event]) -> Iterator[Event]:
        """Give the events with the times of this clock."""
        held: deque[Event] = deque()
        for event in events:
            if not held and self._shift is not None and event.time is not None:
                ahead = event.time + self._shift - self.now
                if -JITTER_SECONDS <= ahead <= JITTER_SECONDS:  # nearly every line
                    self.now, self.printed = self.now + max(ahead, 0.0), event.time
                    event.time = self.now
                    yield event
                    continue
            held.append(event)
            while held and self._set(held, ended=False):
                yield held.popleft()
        while held:
            self._set(held, ended=True)
            yield held.popleft()

    def _set(self, held: deque[Event], *, ended: bool) -> bool:
        """Set the time of the first event; False where the next ones must be known for that."""
        event, printed = held[0], held[0].time
        if printed is None and self.now == -inf and not ended and len(held) <= MOST_UNDATED:
            later = next((each.time for each in held if each.time is not None), None)
            if later is None:
                return False
            event.time = later - self.ahead  # before the first stamp of the log
        elif printed is None:
            event.time = self.now if self.now > -inf else None
        elif self._shift is not None and -JITTER_SECONDS <= printed + self._shift - self.now <= JITTER_SECONDS:
            self._move(event, printed)
        elif not ended and len(held) <= STRAY_LINES:
            return False
        else:
            self._leap(event, printed, [each.time for each in islice(held, 1, None) if each.time is not None])
        return True

    def _leap(self, event: Event, printed: float, later: list[float]) -> None:
        """Take a time far from the one before, or the first."""
        if self._shift is None:
            self._shift = -self.ahead
            if later and all(not -JITTER_SECONDS <= time - printed <= FAR_SECONDS for time in later[:2]):
                self.strays += 1
                printed = later[0]
            self._move(event, printed)
            return
        ahead = printed + self._shift - self.now
        back = max(
            JITTER_SECONDS, min(ahead - JITTER_SECONDS, FAR_SECONDS)
        )  # nearer than this the first clock has come back
        is_possible = 0 <= ahead <= FAR_SECONDS
        if any(-JITTER_SECONDS <= time + self._shift - self.now <= back for time in later) or not (
            later or is_possible
        ):
            self.strays += 1
            event.time = self.now
            return
        if self._former is not None and abs(printed + self._former - self.now) <= JITTER_SECONDS:
            self._shift, self._former = self._former, self._shift
        elif not is_possible:
            self._former, self._shift = self._shift, self.now - printed
            self.set_back, self.set_forward = self.set_back + (ahead < 0), self.set_forward + (ahead > 0)
        self._move(event, printed)

    def _move(self, event: Event, printed: float) -> None:
        self.now, self.printed = max(self.now, printed + (self._shift or 0.0)), printed
        event.time = self.now

    # Whether one server prints into this log

    def look(self, line: bytes, events: Sequence[Event]) -> None:
        """Take a line with what stands around SGLang's. Raise `UsageError` where two servers print at the same time."""
        stamped = _STAMP.search(line)
        if stamped is None or stamped.start() == 0:
            return
        if b"server_args=" in line:
            self.started_behind.add(_frame(line, stamped.start()))
        event = next((each for each in events if each.kind in _BATCHES and each.time is not None), None)
        if event is None or event.time is None:
            return
        frame, frames = _frame(line, stamped.start()), self.frames.setdefault(event.rank, {})
        if frame not in frames and len(frames) >= MOST_FRAMES:
            return
        seen = frames.setdefault(frame, _Begun(event.time, event.time, 0))
        seen.last, seen.lines = max(seen.last, event.time), seen.lines + 1
        if seen.lines % ENOUGH_LINES == 0 and len(frames) < MOST_FRAMES:
            self._compare(frames, frame, seen)

    def _compare(self, frames: dict[bytes, _Begun], frame: bytes, seen: _Begun) -> None:
        for other, its in frames.items():
            # Text of a request that looks like another server's line has the frame of this one around it.
            if frame.startswith(other) or other.startswith(frame) or its.lines < ENOUGH_LINES:
                continue
            if min(seen.last, its.last) - max(seen.first, its.first) > OVERLAP_SECONDS:
                names = " and ".join(
                    repr(clean(each.decode("utf-8", "replace"))[:60]) for each in sorted((frame, other))
                )
                self.two = (
                    f"the lines of two servers, or the same lines twice: the same rank prints batches behind {names}"
                )
                if self.started_behind >= {frame, other}:
                    raise UsageError(
                        f"{self.name}: holds {self.two}; give one server's lines, for example with grep -F"
                    )

    def take(self, event: Event) -> None:
        """Raise `UsageError` where several servers print into this log with nothing around their lines."""
        if self.frames or (event.kind in _BATCHES and len(self.starts) < 2):
            return
        if event.kind == "arguments":
            sides = {each.get("disaggregation_mode") for each in (event.arguments, *self.starts)}
            if self.ready and not sides >= {"prefill", "decode"}:
                self.starts.clear()
            self.ready = 0
            if not event.marked and all(
                each != event.arguments and not are_nodes(each, event.arguments) for each in self.starts
            ):
                self.starts.append(event.arguments)
        elif event.kind in {"end", "draining"}:
            self.starts.clear()  # whose end it is, is not known
        elif event.kind == "ready":
            self.ready += not event.marked
            # With several tokenizers each of them says so.
            single = all(each.get("tokenizer_worker_num", 1) == 1 for each in self.starts)
            if self.ready > 1 and len(self.starts) > 1 and single:
                raise self._refusal("more than one is ready after the last start")
        elif event.kind in _BATCHES:
            side = self.starts[-1].get("disaggregation_mode")
            if side in _BATCHES and side != event.kind:
                raise self._refusal("a prefill and a decode server print batches")

    def _refusal(self, reason: str) -> UsageError:
        ports = ", ".join(sorted({str(each.get("port", "?")) for each in self.starts}))
        return UsageError(
            f"{self.name}: several servers print into this log together (--port {ports}): {reason}; nothing shows whose each line is,"
            " so let each server write a log of its own"
        )


def _frame(line: bytes, length: int) -> bytes:
    """Return what stands around SGLang's line, without times and counts: before it, and in JSON what else names its source."""
    around = re.sub(rb"\x1b\[[0-9;]*[A-Za-z]", b"", line[:length])
    if line.startswith(b"{"):
        with suppress(ValueError, RecursionError):
            texts = (each for each in inner(json.loads(line)) if isinstance(each, str) and "] " not in each)
            around = ", ".join(texts).encode("utf-8", "replace")
    return _NUMBER.sub(b"", re.sub(rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,]?\d*\S*", b"", around)).lstrip()


def are_nodes(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Whether two starts are of two nodes of one server."""
    nodes = one.get("nnodes")
    if not isinstance(nodes, int) or nodes < 2 or one.get("node_rank") == other.get("node_rank"):
        return False
    return all(one.get(name) == other.get(name) for name in ("nnodes", "model_path", "dist_init_addr"))


def check_together(lanes: Iterable[Lane], lane: Lane, event: Event) -> None:
    """Raise `UsageError` where the logs are of two servers; a marked line proves none."""
    if event.kind == "arguments":
        if not event.marked:
            lane.started, lane.arguments = event.time, event.arguments
        for each in lanes:
            each.printing.clear()
    now = event.time or 0.0
    for other in lanes:
        if other is lane or lane.started is None or other.started is None or are_nodes(lane.arguments, other.arguments):
            continue
        if lane.started <= other.started < now - OVERLAP_SECONDS:
            raise _together(lane, other, "one goes on after the start in the other")
    if event.kind not in _BATCHES:
        return
    mine = lane.printing.setdefault(event.rank, _Begun(now, now))
    mine.last = now
    for other in lanes:
        its = other.printing.get(event.rank)
        if other is not lane and its and min(mine.last, its.last) - max(mine.first, its.first) > OVERLAP_SECONDS:
            raise _together(lane, other, "both print batches of the same rank at the same time")


def _together(lane: Lane, other: Lane, reason: str) -> UsageError:
    names = " and ".join(each.name for each in sorted((lane, other), key=lambda each: each.number))
    return UsageError(
        f"{names}: logs of two servers, or the same lines twice: {reason}; give one server's logs at a time, or compare two with --against"
    )


def stamp(line: bytes) -> float | None:
    """Return the time in SGLang's own stamp, of any line; None without a date."""
    found = _STAMP.search(line, 0, 400)
    return None if found is None else time_of(found[1])


class Logs:
    """All logs of one report. Counts are complete when `events` is exhausted."""

    def __init__(self, arguments: Sequence[str], stdin: IO[bytes] | None = None, most: int | None = None) -> None:
        """Read the beginning of every log. Raise `UsageError` for what is missing, a directory, unreadable or empty.

        `most`: the most bytes read of each pipe or packed file; without it, as long as they look like a log.
        """
        if stdin is None and STDIN in arguments and sys.stdin is not None:
            stdin = sys.stdin.buffer
        found = find(arguments, stdin)
        for source in found:
            source.most = most
            source.look()
        self.sources = [source for source in found if not source.empty]
        if not self.sources:
            raise UsageError(f"{_names(found)}: {'is empty' if len(found) == 1 else 'all are empty'}{_because(found)}")
        self._zones = align(self.sources)
        self._logs = in_order(self.sources)
        self._lanes: list[Lane] = []
        self._found = False  # an event that only SGLang prints
        self._error = ""  # the line of no form of SGLang's that says most about an error
        self._given = 0  # bytes of lines, each at least `_SHORT_LINE`
        self.first = min((log[0].first for log in self._logs if log[0].first is not None), default=None)
        self.lines = 0  # physical lines read

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the files, in time order."""
        return tuple(source.label for log in self._logs for source in log)

    @property
    def paths(self) -> list[Path]:
        """The regular files."""
        return [Path(source.name) for source in self.sources if not source.is_pipe]

    @property
    def size(self) -> int:
        """Bytes on disk; 0 where a part comes from a pipe."""
        if any(source.is_pipe for source in self.sources):
            return 0
        return sum(Path(source.name).stat().st_size for source in self.sources)

    @property
    def unreadable(self) -> int:
        """Lines and fields that look like SGLang's and could not be read."""
        return sum(sum(lane.reader.unreadable.values()) for lane in self._lanes)

    @property
    def end(self) -> float | None:
        """The last printed time, with or without an event, on the clock of the report."""
        ends = []
        for lane in self._lanes:
            if lane.printed is not None:
                later = (lane.last or 0.0) - lane.printed
                ends.append(lane.now + (later if 0.0 < later <= FAR_SECONDS else 0.0))
        return max(ends, default=None)

    @property
    def damage(self) -> list[str]:
        """Notes about parts that could not be read."""
        return [note for source in self.sources for note in source.notes]

    @property
    def notes(self) -> list[str]:
        """Notes about parts that could not be read, and about times."""
        notes = self.damage
        notes += [
            f"{lane.name}: may hold {lane.two}: then the figures are of both together"
            for lane in self._lanes
            if lane.two
        ]
        if self.first is None:
            notes.append(
                "no line has a time: the report has starts, counts, start-up memory and the last figures,"
                " but no shares, rates, course and alerts"
            )
        elif self.first < FIRST_DATED_SECOND:
            notes.append("times have no date: where they begin again, the next day is assumed")
        for way in ("back", "forward"):
            if count := sum(getattr(lane, f"set_{way}") for lane in self._lanes):
                often = "once" if count == 1 else f"{count} times"
                notes.append(
                    f"the clock was set {way} {often}: time goes on from where it was, so later times are not those printed"
                )
        if strays := sum(lane.strays for lane in self._lanes):
            lines = "1 line has a time" if strays == 1 else f"{strays} lines have times"
            notes.append(f"{lines} far from those around it: taken as printed with the line before")
        return notes + self._zones

    @property
    def tally(self) -> tuple[Counter[str], Counter[str]]:
        """Lines by kind, and what is unreadable by kind, up to the last event given; with `events(tallied=True)`."""
        first, *others = self._lanes
        lines, unreadable = first.tally
        for lane in others:
            lines, unreadable = lines + lane.tally[0], unreadable + lane.tally[1]
        return lines, unreadable

    def events(self, *, tallied: bool = False) -> Generator[Event, None, None]:
        """Give every event in time order, with times that never run backwards; `tallied`: keep `tally` for each.

        Raise `UsageError` where the input cannot be read, is of several servers or, at its end, is no log of SGLang.
        """
        waiting, heap = deque(self._logs), list[tuple[float, int, Event]]()
        ended: list[Lane] = []
        while waiting or heap:
            while waiting and (not heap or (-inf if waiting[0][0].first is None else waiting[0][0].first) < heap[0][0]):
                lane = self._lane(waiting[0][0], ended)
                read = self._read(lane, waiting.popleft())
                lane.events = lane.steady(_tallied(lane, read) if tallied else read)
                _push(heap, lane, ended)
            if not heap:
                continue
            _, number, event = heapq.heappop(heap)
            lane = self._lanes[number]
            for each in chain((event,), lane.events) if len(self._logs) == 1 else (event,):
                lane.take(each)
                if tallied:
                    lane.tally = lane.tallies.popleft()
                if len(self._logs) > 1:
                    check_together(self._lanes, lane, each)
                yield each
            _push(heap, lane, ended)
        for lane in self._lanes:
            lane.tally = (lane.reader.lines, lane.reader.unreadable)
        self._check()

    def _lane(self, begin: Source, ended: list[Lane]) -> Lane:
        """Return the last log that ended where this one begins, else a new one."""
        for lane in reversed(ended):
            last = lane.printed if lane.ahead == begin.ahead else None
            if begin.first is not None and last is not None and begin.first + begin.ahead - last <= FAR_SECONDS:
                ended.remove(lane)
                return lane
        self._lanes.append(Lane(len(self._lanes), ahead=begin.ahead))
        return self._lanes[-1]

    def _read(self, lane: Lane, log: list[Source]) -> Iterator[Event]:
        """Give the events of a log's files as printed."""
        read = lane.reader.read
        for source in log:
            lane.name, before = source.label, lane.reader.number
            for lines in source.blocks():
                self.lines += len(lines)
                for line in lines:
                    if events := read(line):
                        if line[:3] != b"[20":
                            lane.look(line, events)
                        for event in events:
                            if event.kind == "words":
                                event.figures["line"] -= before
                                event.file = source.label if len(self.sources) > 1 else ""
                        self._found = self._found or any(event.kind not in _ANSWERS for event in events)
                        yield from events
                    elif b"server_args=" in line[:1000]:
                        lane.look(line, ())
                    if not self._found:
                        self._missing(source, line)
                stamps = (stamp(line) for line in reversed(lines[-_TAIL_LINES:]))
                lane.last = next((time for time in stamps if time is not None), lane.last)
            yield from lane.reader.end()

    def _missing(self, source: Source, line: bytes) -> None:
        """Give up an input of unknown size in which no line is SGLang's."""
        if _ERROR.search(line) and (not self._error or class_of([self._error]) == "unknown"):
            self._error = quoted(without_known(line).decode("utf-8", "replace"))
        self._given += max(len(line), _SHORT_LINE)
        if self._given > MOST_WITHOUT_A_LINE and not source.is_sized and source.most is None:
            self._check()

    def _check(self) -> None:
        # Any web server's log has access lines; only SGLang prints its own prefix before them, and ranks in it.
        served = any(lane.reader.lines["access"] for lane in self._lanes)
        ranked = any(lane.reader.names_ranks for lane in self._lanes)
        if self._found or ranked or (served and self.first is not None):
            return
        if unread := next((lane.reader.unread for lane in self._lanes if lane.reader.unread), b""):
            words = clean(unread[:300].decode("utf-8", "replace"))
            reason = f"holds words of SGLang's, in lines whose form cannot be read; the first: {words}"
        else:
            reason = f"no line of SGLang's in it{self._said_error()}; give a server's log, written at --log-level info"
        raise UsageError(f"{_names(self.sources)}: {reason}{_because(self.sources)}")

    def _said_error(self) -> str:
        """Quote the error in an input that has no line of SGLang's, with what helps against it."""
        known = CLASSES[class_of([self._error])]
        told = f"; {known.what}: {known.do}" if known.weight >= CAUSE else ""
        return f", but an error: “{shortened(self._error)}”{told}" if self._error else ""


# An error as Python, a driver or a shell prints it, in a line of anybody.
_ERROR = re.compile(rb"\b[\w.]{0,100}(?:Error|Exception)\b[:(!]|\berror: |out of memory|core dumped", re.IGNORECASE)


def _tallied(lane: Lane, events: Iterator[Event]) -> Iterator[Event]:
    """Keep the reader's counts with each event: events are given later than they are read."""
    for event in events:
        lane.tallies.append((lane.reader.lines.copy(), lane.reader.unreadable.copy()))
        yield event


def _push(heap: list[tuple[float, int, Event]], lane: Lane, ended: list[Lane]) -> None:
    event = next(lane.events, None)
    if event is None:
        ended.append(lane)
    else:
        heapq.heappush(heap, (-inf if event.time is None else event.time, lane.number, event))


def _names(sources: Sequence[Source]) -> str:
    return ", ".join(source.label for source in sources[:3]) + (", …" if len(sources) > 3 else "")


def _because(sources: Sequence[Source]) -> str:
    return "".join(f" ({note})" for source in sources for note in source.notes)
