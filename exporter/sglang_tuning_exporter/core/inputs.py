"""The logs of a report as events in time order: files, globs, standard input, packed, rotated, of several nodes.

Logs are read in chunks, so memory does not grow with their size. Printed times are read as UTC. Three kinds of text are
rewritten as lines in time order first: JSON documents of log stores, UTF-16, and texts with the newest line first.
"""

from __future__ import annotations

import bz2
import codecs
import glob
import gzip
import heapq
import io
import json
import lzma
import os
import re
import stat
import sys
import zlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from itertools import chain, islice, pairwise
from math import inf
from pathlib import Path
from typing import IO, Any, TypeAlias

from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.core.events import CAUSE, ENDINGS, Event, Rank, class_of, quoted, shortened
from sglang_tuning_exporter.core.findings import FIRST_DATED_SECOND
from sglang_tuning_exporter.core.lines import Reader, field_of, parsed, records_at, time_of, without_known
from sglang_tuning_exporter.sglang.clean import clean

LONGEST_DOCUMENT = 32 << 20  # bytes; what a store answers at once is a few megabytes
_DOCUMENT = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\[\s*(?:[\[{]|$)|\{)")
_LOOKED_AT, _SAMPLE = 1 << 20, 200  # bytes and lines that are searched for times
_TIME = re.compile(rb"\[?(20\d\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d|(?<=\[)\d\d:\d\d:\d\d)|\b(1[4-9]\d{8,17})\b")
STDIN = "-"
CHUNK, PACKED_CHUNK, MIB = 1 << 20, 1 << 14, 1 << 20
LONGEST_LINE = 1 << 18  # bytes; more of a line is left out
MOST_WITHOUT_A_LINE = 32 * MIB  # of an input of unknown size, before the first line of SGLang's
MOST_WITHOUT_END = 128 * MIB  # a line of 100 MB is cut, and the rest is read
MOST_OF_UNKNOWN_SIZE = 8 << 30
# A log packs to a tenth or a thirtieth of its size. A file that unpacks to a hundred times its size can fill a disk.
MOST_UNPACKED, MOST_RATIO = 64 * MIB, 100
_SHORT_LINE = 64  # bytes that a line counts at least towards MOST_WITHOUT_A_LINE
_HEAD_LINES = 2000  # that are searched for the first time and start
DAY = 86400.0
# Reasons of the next four: docs/decisions.md, "How a log is read".
JITTER_SECONDS = 60.0  # processes write one log a little out of order; a time further back is of another clock
FAR_SECONDS = 30 * DAY  # no server is silent for so long and then prints: a time further ahead is of another clock
STRAY_LINES = 16  # so many lines with times of another clock are strays if the first clock comes back
OVERLAP_SECONDS = 10.0  # the last lines of one file and the first of the next may overlap by so much
ENOUGH_LINES, MOST_FRAMES = 10, 64  # batch lines of a rank behind one name; names, above which they are none
# Answers of any web server, not only SGLang's.
_ANSWERS = frozenset({"rejected", "server_error", "pause", "resume", "too_long", "refused"})
_BATCHES = frozenset({"decode", "prefill"})
_OF_A_SERVER = _BATCHES | {"arguments", "ready", "end", "draining"}  # kinds that show which servers print
_STAMP = re.compile(rb"\[20\d\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d")
# What varies around the lines of one server: times, lengths and counts. Numbers of names are parts of words.
_VARYING = re.compile(
    rb"\x1b\[[0-9;]*[A-Za-z]|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,]?\d*[^\s\"]*|(?<![\w=./-])\d+(?![\w=./-])"
)
_TEXT_OF_JSON = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*')
_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)

# Packed logs

# Functions that open a compressed file, by its extension, and what they raise where the file is truncated or damaged.
OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
DAMAGE: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError)
MAGIC = {  # the first bytes of compressed files
    b"\x1f\x8b": ".gz",
    b"BZh": ".bz2",
    b"\xfd7zXZ\0": ".xz",
    b"(\xb5/\xfd": ".zst",
    b"PK\x03\x04": ".zip",
    b"7z\xbc\xaf\x27\x1c": ".7z",
    b"\x04\x22\x4d\x18": ".lz4",
}
REMEDIES = {  # what to do with files that cannot be read here
    ".zst": "install sglang-tuning-exporter[zstd], or unpack it with zstd -d",
    ".zip": "unpack it, or give its text: unzip -p",
    ".7z": "unpack it, or give its text: 7z e -so",
    ".lz4": "unpack it, or give its text: lz4 -dc",
}

with suppress(ImportError):
    try:  # from Python 3.14 on
        _zstd: Any = import_module("compression.zstd")
    except ImportError:
        _zstd = import_module("backports.zstd")
    OPENERS[".zst"] = _zstd.open
    DAMAGE += (_zstd.ZstdError,)


def packing(first: bytes) -> str:
    """Return the extension that belongs to the first bytes of a compressed file; empty for any other."""
    return next((extension for magic, extension in MAGIC.items() if first.startswith(magic)), "")


# Texts that are not lines in time order


def _gathered(chunks: Iterator[bytes]) -> bytes:
    """Return all of a text, or a little more than `LONGEST_DOCUMENT` bytes of it: the rest stays in `chunks`."""
    text = bytearray()
    for chunk in chunks:
        text += chunk
        if len(text) > LONGEST_DOCUMENT:
            break
    return bytes(text)


def _unfolded(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Give the text of a file in UTF-8, one record on each line. Raise `ValueError` where it has no lines of text."""
    first = next(filter(None, chunks), b"")
    if reason := _no_lines(first):
        raise ValueError(reason)
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        decoder, encoded = codecs.getincrementaldecoder("utf-16")("replace"), chain([first], chunks)
        chunks = (decoder.decode(chunk).encode() for chunk in encoded)
        first = next(filter(None, chunks), b"")
    chunks, line = chain([first], chunks), first.split(b"\n", 1)[0]
    has_documents = _DOCUMENT.match(first) is not None
    is_document = has_documents and parsed(line) is not None
    if has_documents and (not is_document or len(_records(line)) > 1):  # else every line is already one record
        text = _gathered(chunks)
        by_line = text.splitlines(keepends=True) if is_document else ()
        records = _records(text) or [record for line in by_line for record in _records(line) or [line]]
        yield b"".join(records) or text
    yield from chunks


def _no_lines(first: bytes) -> str:
    """Return why a file that begins so has no lines of text, and what to do; empty where it may have lines."""
    if first[257:262] == b"ustar":
        return "is a tar archive; unpack it, and give its logs"
    if packing(first):
        return "was compressed twice; unpack it once"
    if b"\n" not in first and first.count(b"\r[20") > 1:
        return "its lines end in carriage returns alone; convert it: tr '\\r' '\\n'"
    return ""


def _records(text: bytes) -> list[bytes]:
    """Return the records of a document that have SGLang's lines, the oldest first, each as a line of JSON."""
    document = parsed(text)
    place = None if document is None else field_of(document)
    if place is None:
        return []
    timed, last = list[tuple[float, bytes]](), 0.0
    for time, lines in records_at(document, place):
        last = last if time is None else time  # a record without a time stays behind the one before it
        timed += [(last, line) for line in lines]
    if timed and timed[0][0] > timed[-1][0]:
        timed.reverse()
    timed.sort(key=lambda record: record[0])
    return [
        json.dumps(({"timestamp": time} if time else {}) | {"line": line.decode("utf-8", "replace")}).encode() + b"\n"
        for time, line in timed
    ]


def _oldest_first(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Give the lines of a text, the oldest first. Raise `ValueError` where the text is too large to be reversed."""
    first = next(chunks, b"")
    chunks, lines = chain([first], chunks), first[:_LOOKED_AT].split(b"\n")
    matches = (_TIME.search(line[:1000]) for line in lines[:: len(lines) // _SAMPLE + 1])
    times = [time_of(match[1] or match[2]) or 0.0 for match in matches if match is not None]
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


# One file or stream


@dataclass(slots=True)
class Source:
    """One file or stream. A pipe can be read only once, so its first chunk is kept."""

    name: str
    stdin: IO[bytes] | None = None
    is_pipe: bool = False
    most: int | None = None  # the most bytes of an input of unknown size
    on_read: Callable[[int], None] | None = None  # called with the number of bytes that were read
    first: float = -inf  # when the log begins, where that is known
    empty: bool = False
    is_sized: bool = False
    notes: list[str] = field(default_factory=list)
    _unread: Iterator[bytes] | None = None  # the chunks of a pipe after a look at its first ones, those included

    @property
    def label(self) -> str:
        """The name as one line without control characters."""
        return clean(self.name)

    @property
    def is_undated(self) -> bool:
        """Whether it has no dates; of a pipe that is not asked."""
        return not self.is_pipe and self.first < FIRST_DATED_SECOND

    def look(self) -> None:
        """Read the beginning. Raise `UsageError` where it cannot be read."""
        chunks, head = self._text(), b""
        reader, times = Reader(), list[float]()
        for chunk in chunks:  # the first one of a pipe may be a line
            head += chunk
            _read_times(reader, chunk.split(b"\n", _HEAD_LINES)[:_HEAD_LINES], times)
            if len(head) >= CHUNK or reader.number >= _HEAD_LINES or (reader.begin is not None and len(times) > 2):
                break
        begin = first_of(times)
        self.empty, self.first = not head, -inf if begin is None else begin
        if self.is_pipe:
            self._unread = chain([head], chunks)
        else:
            chunks.close()

    def blocks(self) -> Iterator[bytes]:
        """Give blocks of whole lines, each without its last end. Raise `UsageError` where it cannot be read."""
        chunks, self._unread = self._unread or self._text(), None
        for chunk in chunks:
            yield chunk.replace(b"\r\n", b"\n").removesuffix(b"\n")

    def lines(self) -> Iterator[bytes]:
        """Give every line without its end."""
        return chain.from_iterable(block.split(b"\n") for block in self.blocks())

    def _text(self) -> Generator[bytes, None, None]:
        """Give the text in chunks of whole lines, the oldest first."""
        try:
            with readable(self.name):
                yield from whole_lines(_oldest_first(_unfolded(self._chunks())))
        except ValueError as problem:
            raise UsageError(f"{self.label}: {problem}") from None

    def _chunks(self) -> Iterator[bytes]:
        """Give the unpacked bytes of the file or stream. Raise `ValueError` where they cannot be those of a log."""
        with nullcontext(self.stdin) if self.stdin is not None else Path(self.name).open("rb") as opened:
            counted = _Counted(opened, self.on_read)
            stream = io.BufferedReader(counted, PACKED_CHUNK)
            extension = packing(stream.peek())
            self.is_sized = not self.is_pipe and not extension
            if extension and extension not in OPENERS:
                raise ValueError(f"is a {extension} file, which cannot be read here; {REMEDIES[extension]}")
            try:
                with OPENERS[extension](stream) if extension else nullcontext(stream) as text:
                    if self.is_sized:
                        yield from iter(lambda: text.read1(CHUNK), b"")
                    else:
                        yield from self._checked(text, counted if extension else None)
            except DAMAGE as error:
                if not extension:
                    raise
                reason = _damage_of(extension, error)
                self.notes = [f"{self.label}: {reason}; only what comes before it was read"]

    def _checked(self, stream: Any, packed: _Counted | None) -> Iterator[bytes]:
        """Give the lines of a pipe or of a `packed` file. Raise `ValueError` where they cannot be those of a log."""
        total, unended, rest = 0, 0, b""
        while chunk := stream.read1(CHUNK):  # `read` loses the bytes that it has when a file ends early
            end = chunk.rfind(b"\n") + 1
            total, unended = total + len(chunk), len(chunk) - end + (0 if end else unended)
            self._check_size(total, unended, total if packed is None else packed.taken)
            yield rest + chunk[:end]
            rest = chunk[end:]
        yield rest

    def _check_size(self, total: int, unended: int, taken: int) -> None:
        most, problem = self.most or MOST_OF_UNKNOWN_SIZE, ""
        if total > most:
            problem = f"is larger than {most / (1 << 30):g} GiB"
        elif self.most is None and unended > MOST_WITHOUT_END:
            problem = f"has no end of a line in {MOST_WITHOUT_END // MIB} MiB"
        elif self.most is None and total > max(MOST_UNPACKED, MOST_RATIO * taken):
            problem = f"unpacks to more than {MOST_RATIO} times its size"
        if problem:
            raise ValueError(f"{problem}; give a log, or how much to read at most with --max-gb")


def _read_times(reader: Reader, lines: Iterable[bytes], times: list[float]) -> None:
    """Add the times of the first lines of a log. Once SGLang prints a time, the times before it are forgotten."""
    for line in lines:
        had_begun = reader.begin is not None
        reader.read(line[:LONGEST_LINE].rstrip(b"\r"))
        if reader.begin is not None and not had_begun:
            times[:] = [reader.begin]
        if reader.time is not None and reader.time != (times[-1] if times else None):
            times.append(reader.time)


def _damage_of(extension: str, error: Exception) -> str:
    """Return what is wrong with a packed file, by the error with which unpacking it ended."""
    if extension != ".gz":
        return "is damaged or ends early"
    if isinstance(error, EOFError):
        return "ends in the middle of a gzip member"
    return "holds more than gzip" if "Not a gzipped file" in str(error) else "is damaged"


class _Counted(io.RawIOBase):
    """A stream that counts the bytes read of it. It gives few at once: at damage, the rest of a piece is lost."""

    def __init__(self, stream: IO[bytes], on_read: Callable[[int], None] | None) -> None:
        self._stream, self._on_read, self.taken = stream, on_read, 0

    def readable(self) -> bool:
        """Return True: `io.BufferedReader` asks."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer."""
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self.taken += len(data)
        if self._on_read is not None:
            self._on_read(len(data))
        return len(data)


def whole_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Cut chunks at line ends, without the rest of a very long line.

    NUL bytes before a line are left out: a truncated file begins with them.
    """
    rest, skipping = b"", False
    for chunk in chunks:
        if skipping and b"\n" not in chunk:
            continue
        text = rest + (chunk[chunk.find(b"\n") :] if skipping else chunk)
        end = text.rfind(b"\n") + 1
        if end:
            yield text[:end]
        rest = text[end:].lstrip(b"\0") if text[end : end + 1] == b"\0" else text[end:]
        skipping = len(rest) > LONGEST_LINE
        rest = rest[:LONGEST_LINE]
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
    """Return the files that the arguments name, each once. Raise `UsageError` where an argument names none.

    An argument is a path, a glob, or - for standard input.
    """
    sources: dict[str | tuple[int, int], Source] = {}  # by device and inode
    for argument in arguments:
        if argument != STDIN:
            for name in _matching(argument):
                with readable(name):
                    status = os.stat(name)  # noqa: PTH116 - the name stays as it was given
                sources.setdefault((status.st_dev, status.st_ino), _file(name, status.st_mode))
        elif stdin is None:
            raise UsageError("-: there is no standard input; give a file")
        else:
            sources.setdefault(STDIN, Source(STDIN, stdin, is_pipe=True))
    return [*sources.values()]


def _file(name: str, mode: int) -> Source:
    if stat.S_ISDIR(mode):
        raise UsageError(f"{clean(name)}: is a directory; give its files, such as {clean(name).rstrip('/')}/*")
    if stat.S_ISBLK(mode) or stat.S_ISCHR(mode):
        raise UsageError(f"{clean(name)}: is a device; give a file, or - for standard input")
    return Source(name, is_pipe=not stat.S_ISREG(mode))


def _matching(argument: str) -> list[str]:
    if not glob.has_magic(argument) or Path(argument).exists():
        return [argument]
    matches = sorted(glob.glob(argument, recursive=True))  # noqa: PTH207 - Path takes no absolute pattern
    if names := [name for name in matches if not Path(name).is_dir()]:
        return names
    raise UsageError(f"{clean(argument)}: no file matches; give a path, a glob, or -")


def _in_order(sources: Sequence[Source]) -> list[list[Source]]:
    """Return the files in groups that one reader reads one after the other, in time order.

    A file with dates is a log by itself. One without, such as the rest of a traceback, continues the file whose name
    sorts before it.
    """
    logs: list[list[Source]] = []
    for source in sorted(sources, key=lambda source: (source.is_undated, source.name)):
        before = [log for log in logs if source.is_undated and log[-1].name < source.name]
        if before:
            max(before, key=lambda log: log[-1].name).append(source)
        else:
            logs.append([source])
    return sorted(logs, key=lambda log: (log[0].first, log[0].name))


# The clock of a log


def first_of(times: Sequence[float]) -> float | None:
    """Return when a log begins, by its first times: the first one may be of another clock than those after it."""
    is_stray = len(times) > 1 and all(not -JITTER_SECONDS <= time - times[0] <= FAR_SECONDS for time in times[1:3])
    return times[1] if is_stray else times[0] if times else None


@dataclass(slots=True, eq=False)
class Lane:
    """A reader and a clock that never runs backwards; a log that begins where another ended continues them.

    A line with a time of another clock changes nothing if the first clock comes back within a few lines. After the
    clock was set, time goes on from where it was.
    """

    number: int
    now: float = -inf  # at its beginning: its first time
    name: str = ""
    reader: Reader = field(default_factory=Reader)
    printed: float | None = None  # the last time that moved the clock, as printed
    odd: Counter[str] = field(default_factory=Counter)  # how often it was set `back` or `forward`; `stray` lines
    _shift: float = 0.0

    def steady(self, events: Iterable[Event]) -> Iterator[Event]:
        """Give the events with the times of this clock."""
        waiting: deque[Event] = deque()  # since a time that is far from the one before
        for event in events:
            if not waiting and self._set_time((event,), is_followed=False):
                yield event
                continue
            waiting.append(event)
            while waiting and self._set_time(waiting, is_followed=len(waiting) > STRAY_LINES):
                yield waiting.popleft()
        while waiting and self._set_time(waiting, is_followed=True):
            yield waiting.popleft()

    def _set_time(self, events: Sequence[Event], *, is_followed: bool) -> bool:
        """Set the time of the first event; False while only the events that follow can show which clock it is of.

        A time far from the one before is the next after a silence, the first since the clock was set, or a stray.
        """
        event = events[0]
        if event.time is None:
            event.time = self.now if self.now > -inf else None
            return True
        ahead = 0.0 if self.now == -inf else event.time + self._shift - self.now
        if not -JITTER_SECONDS <= ahead <= JITTER_SECONDS:
            if not is_followed:
                return False
            is_silence = 0 <= ahead <= FAR_SECONDS
            if self._is_stray(ahead, islice(events, 1, None), after_silence=is_silence):
                event.time = self.now
                self.odd["stray"] += 1
                return True
            if not is_silence:
                self._shift = self.now - event.time
                self.odd["back" if ahead < 0 else "forward"] += 1
        self.printed = event.time
        event.time = self.now = max(self.now, event.time + self._shift)
        return True

    def _is_stray(self, ahead: float, following: Iterable[Event], *, after_silence: bool) -> bool:
        """Return whether a time so far ahead is of another clock, because the first clock comes back after it."""
        later = [event.time + self._shift - self.now for event in following if event.time is not None]
        come_back = max(JITTER_SECONDS, min(ahead - JITTER_SECONDS, FAR_SECONDS))
        return any(-JITTER_SECONDS <= time <= come_back for time in later) or not (later or after_silence)


# Whether all lines are one server's


Name: TypeAlias = tuple[Lane, bytes]  # a log, and what stands around lines in it


class Voices:
    """The servers that print into the logs, each known by its log and the text around its lines.

    Two servers at a time are refused: their figures must not be added up.
    """

    def __init__(self) -> None:
        self.started: set[Name] = set()  # behind which a start was printed
        self.notes: dict[str, str] = {}  # by log
        self._starts: dict[Name, list[Mapping[str, object]]] = {}  # arguments of those that may be running
        self._ready: Counter[Name] = Counter()  # since the last start
        self._batches: dict[tuple[Name, Rank], list[float]] = {}  # since it: first, last, number

    def take_event(self, lane: Lane, frame: bytes, event: Event) -> None:
        """Note what an event shows about its server. Raise `UsageError` where two servers print.

        `frame`: the text around its line. A marked event shows nothing.
        """
        kind, name = event.kind, (lane, frame)
        if kind not in _OF_A_SERVER or event.marked or event.time is None:
            return
        if name not in self._starts:
            if sum(log is lane for log, _ in self._starts) >= MOST_FRAMES:
                return
            self._starts[name] = []
        if kind in _BATCHES:
            span = self._batches.get((name, event.rank))
            if span is None:
                span = self._batches[name, event.rank] = [lane.now, lane.now, 0]
            span[1] = lane.now
            span[2] += 1
            if len(self._starts) > 1:
                self._compare(name, event.rank)
        elif kind == "arguments":
            self._take_start(name, event.arguments)
        elif kind == "ready":
            self._take_ready(name)
        else:
            del self._starts[name][:-1]  # nothing shows which of them ends

    def _take_start(self, name: Name, arguments: Mapping[str, object]) -> None:
        """Note a start. Servers that were ready before it have ended; the others may be starting beside it."""
        starting = [] if self._ready[name] else self._starts[name][-MOST_FRAMES:]
        self._starts[name] = [*(other for other in starting if other != arguments), arguments]
        self._ready[name] = 0
        self._batches = {key: span for key, span in self._batches.items() if key[0] != name}

    def _take_ready(self, name: Name) -> None:
        """Note that a server is ready. Raise `UsageError` where another one is, too."""
        self._ready[name] += 1
        starts = self._starts[name]
        # With several tokenizers each of them prints the line.
        has_one_tokenizer = all(arguments.get("tokenizer_worker_num", 1) == 1 for arguments in starts)
        if self._ready[name] > 1 and len(starts) > 1 and has_one_tokenizer:
            ports = ", ".join(sorted({str(arguments.get("port", "?")) for arguments in starts}))
            raise UsageError(
                f"{name[0].name}: several servers print into this log together (--port {ports}): more than one is ready"
                " after the last start; nothing shows whose each line is, so let each server write a log of its own"
            )

    def _compare(self, name: Name, rank: Rank) -> None:
        """Look for another name behind which batches of the same rank were printed at the same time."""
        begin, end, number = self._batches[name, rank]
        for (other, its_rank), (its_begin, its_end, its_number) in self._batches.items():
            at_once = min(end, its_end) - max(begin, its_begin) > OVERLAP_SECONDS
            if other == name or its_rank != rank or not at_once or min(number, its_number) < ENOUGH_LINES:
                continue
            (lane, frame), (its_lane, its_frame) = sorted((name, other), key=lambda pair: (pair[0].number, pair[1]))
            if lane is not its_lane:
                raise UsageError(
                    f"{lane.name} and {its_lane.name}: logs of two servers, or the same lines twice: both print"
                    " batches of the same rank at the same time; give one server's logs at a time, or compare two with"
                    " --against"
                )
            if its_frame.startswith(frame):
                continue  # text of a request that looks like another server's line has the frame of this one around it
            shown = " and ".join(repr(clean(text.decode("utf-8", "replace"))[:60]) for text in (frame, its_frame))
            two = f"the lines of two servers, or the same lines twice: the same rank prints batches behind {shown}"
            if self.started >= {name, other}:
                raise UsageError(f"{lane.name}: holds {two}; give one server's lines, for example with grep -F")
            self.notes[lane.name] = f"{lane.name}: may hold {two}: then the figures are of both together"


def _frame(line: bytes) -> bytes:
    """Return what stands around SGLang's line, without times and counts: before it, and in JSON also behind it."""
    stamped = _STAMP.search(line)
    if stamped is None or stamped.start() == 0:
        return b""
    around = line[: stamped.start()]
    if line[:1] == b"{" and (text := _TEXT_OF_JSON.match(line, stamped.start())) is not None:
        around += line[text.end() :]
    known = _without_varying(around.translate(_ZEROS))
    return _VARYING.sub(b"", around).lstrip() if b"0" in known else known  # numbers that are parts of names


@lru_cache(maxsize=4096)
def _without_varying(zeros: bytes) -> bytes:
    return _VARYING.sub(b"", zeros).lstrip()


class Logs:
    """All logs of one report. Counts are complete when `events` is exhausted."""

    def __init__(self, arguments: Sequence[str], stdin: IO[bytes] | None = None, most: int | None = None) -> None:
        """Read the beginning of every log. Raise `UsageError` for what is missing, a directory, unreadable or empty.

        `most`: the most bytes read of each pipe or packed file; without it, as long as they look like a log.
        """
        if stdin is None and STDIN in arguments and sys.stdin is not None:
            stdin = sys.stdin.buffer
        named = find(arguments, stdin)
        for source in named:
            source.most = most
            source.look()
        self.sources = [source for source in named if not source.empty]
        if not self.sources:
            raise _refusal(named, "is empty" if len(named) == 1 else "all are empty")
        self._logs = _in_order(self.sources)
        self._lanes: list[Lane] = []
        self._voices = Voices()
        self._is_sglangs = False  # an event came that only SGLang prints
        self._errors = 0  # lines with an error before the first line of SGLang's
        self._error = ""  # of those lines, the one that explains most
        self._given = 0  # bytes of lines, each at least `_SHORT_LINE`
        self.first = min((log[0].first for log in self._logs if log[0].first > -inf), default=None)
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
    def tally(self) -> tuple[Counter[str], Counter[str]]:
        """The lines read so far by kind, and by kind the lines and fields of SGLang's that could not be read."""
        readers = [lane.reader for lane in self._lanes]
        return sum((one.lines for one in readers), Counter()), sum((one.unreadable for one in readers), Counter())

    @property
    def end(self) -> float | None:
        """The last printed time, with or without an event, on the clock of the report."""
        ends = []
        for lane in self._lanes:
            if lane.printed is not None:
                later = (lane.reader.time or 0.0) - lane.printed
                ends.append(lane.now + (later if 0.0 < later <= FAR_SECONDS else 0.0))
        return max(ends, default=None)

    @property
    def damage(self) -> list[str]:
        """Notes about parts that could not be read."""
        return [note for source in self.sources for note in source.notes]

    @property
    def notes(self) -> list[str]:
        """Notes about parts that could not be read, and about times."""
        notes = [*self.damage, *self._voices.notes.values()]
        if self.first is None:
            notes.append(
                "no line has a time: the report has starts, counts, start-up memory and the last figures,"
                " but no shares, rates, course and alerts"
            )
        elif self.first < FIRST_DATED_SECOND:
            notes.append("times have no date: where they begin again, the next day is assumed")
        odd = sum((lane.odd for lane in self._lanes), Counter[str]())
        for way in ("back", "forward"):
            if count := odd[way]:
                often = "once" if count == 1 else f"{count} times"
                notes.append(
                    f"the clock was set {way} {often}: time goes on from where it was, so later times are not"
                    " those printed"
                )
        if strays := odd["stray"]:
            lines = "1 line has a time" if strays == 1 else f"{strays} lines have times"
            notes.append(f"{lines} far from those around it: taken as printed with the line before")
        return notes

    def events(self) -> Generator[Event, None, None]:
        """Give every event in time order, with times that never run backwards.

        Raise `UsageError` where the input cannot be read, is of several servers or, at its end, is no log of SGLang.
        """
        waiting, ended = deque(self._logs), list[Lane]()
        heap: list[_Next] = []
        while waiting or heap:
            while waiting and (not heap or waiting[0][0].first < heap[0][0]):
                log = waiting.popleft()
                lane = self._lane(log[0].first, ended)
                _push(heap, ended, lane, lane.steady(self._read(lane, log)))
            if heap:
                _, _, event, lane, events = heapq.heappop(heap)
                yield event
                if len(self._logs) == 1:
                    yield from events
                _push(heap, ended, lane, events)
        self._check()

    def _lane(self, begin: float, ended: list[Lane]) -> Lane:
        """Return the last log that ended where this one begins, else a new one."""
        for lane in reversed(ended):
            if begin > -inf and lane.printed is not None and begin - lane.printed <= FAR_SECONDS:
                ended.remove(lane)
                return lane
        self._lanes.append(Lane(len(self._lanes), begin))
        return self._lanes[-1]

    def _read(self, lane: Lane, log: list[Source]) -> Iterator[Event]:
        """Give the events of a log's files as printed."""
        for source in log:
            lane.name, before = source.label, lane.reader.number
            for block in source.blocks():
                yield from self._read_block(lane, source, block, before)
            yield from lane.reader.end()

    def _read_block(self, lane: Lane, source: Source, block: bytes, before: int) -> Iterator[Event]:
        """Give the events of a block of lines."""
        read, has_start, lines = lane.reader.read, b"server_args=" in block, block.split(b"\n")
        self.lines += len(lines)
        for line in lines:
            if events := read(line):
                self._note_origin(lane, line, events, before)
                yield from events
            if has_start and line.find(b"server_args=", 0, 1000) >= 0:
                self._voices.started.add((lane, _frame(line)))
            if not self._is_sglangs:
                self._give_up_late(source, line)

    def _note_origin(self, lane: Lane, line: bytes, events: Iterable[Event], before: int) -> None:
        """Note in events where their line stands, and what they show of its server.

        `before`: lines before this file.
        """
        frame = b"" if line[:3] == b"[20" else _frame(line)
        for event in events:
            self._voices.take_event(lane, frame, event)
            self._is_sglangs = self._is_sglangs or event.kind not in _ANSWERS
            if event.kind == "words":
                event.figures["line"] -= before
                event.file = lane.name if len(self.sources) > 1 else ""

    def _give_up_late(self, source: Source, line: bytes) -> None:
        """Raise `UsageError` after `MOST_WITHOUT_A_LINE` bytes of a pipe or packed file without a line of SGLang's."""
        if self._errors < _ERRORS_AT_MOST and _ERROR.search(line):
            self._errors += 1
            if not self._error or class_of([self._error]) == "unknown":
                self._error = quoted(without_known(line).decode("utf-8", "replace"))
        self._given += max(len(line), _SHORT_LINE)
        if self._given > MOST_WITHOUT_A_LINE and not source.is_sized and source.most is None:
            self._check()

    def _check(self) -> None:
        # Any web server's log has access lines; only SGLang prints its own prefix before them, and ranks in it.
        served = any(lane.reader.lines["access"] for lane in self._lanes)
        ranked = any(lane.reader.names_ranks for lane in self._lanes)
        if self._is_sglangs or ranked or (served and self.first is not None):
            return
        if unread := next((lane.reader.unread for lane in self._lanes if lane.reader.unread), b""):
            words = clean(unread[:300].decode("utf-8", "replace"))
            reason = f"holds words of SGLang's, in lines whose form cannot be read; the first: {words}"
        else:
            known = ENDINGS[class_of([self._error])]
            helps = f"; {known.what}: {known.do}" if known.weight >= CAUSE else ""
            error = f", but an error: “{shortened(self._error)}”{helps}" if self._error else ""
            reason = f"no line of SGLang's in it{error}; give a server's log, written at --log-level info"
        raise _refusal(self.sources, reason)


_Next: TypeAlias = tuple[float, int, Event, Lane, Iterator[Event]]  # the next event of a log; a lane has one number


def _push(heap: list[_Next], ended: list[Lane], lane: Lane, events: Iterator[Event]) -> None:
    """Put the next event of a log on the heap, or its lane with those that ended."""
    event = next(events, None)
    if event is None:
        ended.append(lane)
    else:
        heapq.heappush(heap, (-inf if event.time is None else event.time, lane.number, event, lane, events))


# An error as Python, a driver or a shell prints it, in a line of any program; or a frame of SGLang's, before its error.
_ERRORS_AT_MOST = 256
_ERROR = re.compile(
    rb"\b[\w.]{0,100}(?:Error|Exception)\b[:(!]|\berror: |out of memory|core dumped"
    rb"|/sglang/[^\"\n]{1,400}\", line \d{1,9}, in ",
    re.IGNORECASE,
)


def _refusal(sources: Sequence[Source], reason: str) -> UsageError:
    names = ", ".join(source.label for source in sources[:3]) + (", …" if len(sources) > 3 else "")
    return UsageError(f"{names}: {reason}" + "".join(f" ({note})" for source in sources for note in source.notes))
