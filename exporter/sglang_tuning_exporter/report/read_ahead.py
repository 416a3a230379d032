"""The lines of one log as events: read here, or by another process that reads ahead while this one evaluates.

A log has one reader in either case, so what is read does not depend on where it is read. The other process reads block after block
until its socket closes, so it ends with this one. Blocks and what was read of them pass through files that both have open: neither
process waits for the other to receive, and neither needs a second thread.
"""

from __future__ import annotations

import copyreg
import errno
import marshal  # nosec B403 # data of our own processes
import os
import pickle  # nosec B403 # data of our own processes
import signal
import socket
import subprocess  # nosec B404 # starts this program
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import accumulate, cycle
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.report.clock import paced
from sglang_tuning_exporter.sglang.events import NO_RANK, Event, Rank
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
from sglang_tuning_exporter.sglang.log.reader import LogReader

MOST_JOBS = 64
BLOCKS_AHEAD = 6  # sent to the other process and not taken back: a MiB each
_LENGTH = 8  # bytes that say how long a message is
_CHILD = "import sys; sys.path[:] = {path!r}; from sglang_tuning_exporter.report.read_ahead import work; work({number}, {files!r}, {pace!r})"
_QUOTA = Path("/sys/fs/cgroup/cpu.max")

_Events: TypeAlias = "list[Event | BatchRun]"


class LogPart(NamedTuple):
    """A part of a log: its text, that of the part after it, and what reads it."""

    text: bytes
    following: bytes
    events: Callable[[], _Events]


class _ReadPart(NamedTuple):
    """What the other process read of one part."""

    length: int
    counted: tuple[dict[str, int], dict[str, int]]  # more of `counts` and `unrecognised`
    runs: bytes  # their fields, one list for each, with a place in `ranks`: objects take ten times as long
    ranks: list[Rank]
    others: list[tuple[int, Event]]  # events that are no runs, each with its place among all
    unread: bytes | None


def read_here(blocks: Iterable[bytes], reader: LogReader, pace: float | None) -> Iterator[LogPart]:
    """Return the parts of blocks of whole lines, read in this process; with a `pace` cut where alerts are evaluated."""
    part = b""
    for block in blocks:
        for following in _cut(block, pace):
            if part:
                yield LogPart(part, following, partial(reader.feed_runs, part))
            part = following
    if part:
        yield LogPart(part, b"", partial(reader.feed_runs, part))


class ReadAhead:
    """Reads a log in another process."""

    def __init__(self, pace: float | None) -> None:
        tallies = LogReader()
        self.counts, self.unrecognised = tallies.counts, tallies.unrecognised
        self.unread: bytes | None = None  # the first line with words of SGLang's that could not be read
        self._pace = pace
        self._ranks = {NO_RANK: NO_RANK}  # the same object for the same ranks
        try:
            self._process = self._start()
        except OSError as error:
            raise UsageError(
                f"cannot read the log in another process: {error.strerror or error}; give --jobs 1"
            ) from None

    def _start(self) -> subprocess.Popen[bytes]:
        self._files: list[int] = []
        with ExitStack() as opened:
            self._socket, theirs = map(opened.enter_context, socket.socketpair())
            for _ in range(BLOCKS_AHEAD):
                self._files.append(_shared_file())
                opened.callback(os.close, self._files[-1])
            child = _CHILD.format(path=sys.path, number=theirs.fileno(), files=self._files, pace=self._pace)
            process = subprocess.Popen(  # noqa: S603 # nosec B603 # this program, with a text of ours
                [sys.executable, "-c", child],
                pass_fds=[theirs.fileno(), *self._files],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            opened.pop_all()
        theirs.close()
        self._next_file = cycle(self._files)
        return process

    def close(self) -> None:
        """End the other process, whatever it does."""
        self._process.kill()
        self._process.wait()
        self._socket.close()
        for file in self._files:
            os.close(file)

    def parts(self, blocks: Iterable[bytes]) -> Iterator[LogPart]:
        """Return the parts of blocks of whole lines as `read_here` does. Raises `UsageError` where the other process has ended."""
        rest, sent = iter(blocks), deque[tuple[int, bytes]]()
        try:
            while True:
                while len(sent) < BLOCKS_AHEAD and (block := next(rest, None)) is not None:
                    sent.append((next(self._next_file), block))
                    _send(self._socket, *sent[-1])
                if not sent:
                    return
                file, block = sent.popleft()
                read: list[_ReadPart] = pickle.loads(_receive(self._socket, file))  # noqa: S301 # nosec B301 # data of our own process, in a file that nobody else has
                ends = accumulate(part.length for part in read)
                texts = [block[end - part.length : end] for part, end in zip(read, ends, strict=True)]
                after = next(_cut(sent[0][1], self._pace)) if sent else b""
                for text, following, part in zip(texts, [*texts[1:], after], read, strict=True):
                    yield LogPart(text, following, partial(self._take, part))
        except OSError:  # of the socket: `blocks` raises `UsageError`
            raise UsageError(
                "a process that was reading the log has ended, perhaps for want of memory; give --jobs 1"
            ) from None

    def _take(self, part: _ReadPart) -> _Events:
        for tally, more in zip((self.counts, self.unrecognised), part.counted, strict=True):
            for name, count in more.items():
                tally[name] += count
        self.unread = part.unread
        fields = marshal.loads(part.runs)  # noqa: S302 # nosec B302 # data of our own process, as above
        ranks = [self._ranks.setdefault(rank, rank) for rank in part.ranks]
        if fields:
            fields[1] = [ranks[place] for place in fields[1]]
        events: _Events = list(map(BatchRun._make, zip(*fields, strict=True)))
        for place, event in part.others:
            events.insert(place, event)
        return events


def available() -> int:
    """Return how many cores this process may use: by its affinity, and by its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        cores = min(cores, max(1, int(quota) // int(period)))  # "max" is no number: no quota
    return min(cores, MOST_JOBS)


def work(number: int, files: Sequence[int], pace: float | None) -> None:
    """Read the blocks that are announced on the socket with this number, each in the next of `files`, until it closes."""
    copyreg.pickle(  # nosec B403 # data of our own process
        MappingProxyType,  # a batch without other queues has one
        lambda queues: (dict, (dict(queues),)),  # type: ignore[return-value,arg-type]
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both: the other process ends this one
    with socket.socket(fileno=number) as asked, suppress(OSError):
        reader = LogReader()
        for file in cycle(files):
            parts = [_read(reader, text) for text in _cut(_receive(asked, file), pace)]
            _send(asked, file, pickle.dumps(parts, pickle.HIGHEST_PROTOCOL))


def _read(reader: LogReader, text: bytes) -> _ReadPart:
    before = reader.counts.copy(), reader.unrecognised.copy()
    events = reader.feed_runs(text)
    others = [(place, event) for place, event in enumerate(events) if not isinstance(event, BatchRun)]
    runs = [run._replace(lines=_batch_lines(run)) for run in events if isinstance(run, BatchRun)]
    fields: list[Sequence[object]] = list(zip(*runs, strict=True))
    ranks: dict[object, int] = {}
    if fields:
        fields[1] = [ranks.setdefault(rank, len(ranks)) for rank in fields[1]]
    counted = _more(reader.counts, before[0]), _more(reader.unrecognised, before[1])
    return _ReadPart(len(text), counted, marshal.dumps(fields), list(ranks), others, reader.unread)  # type: ignore[arg-type]


def _batch_lines(run: BatchRun) -> list[bytes]:
    """Return the lines without the access lines between."""
    heads = run.prefix + b"Decode batch", run.prefix + b"Prefill batch"
    return [line for line in run.lines if line.startswith(heads)]


def _more(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in now.items() if count != before.get(name, 0)}


def _cut(block: bytes, pace: float | None) -> Iterator[bytes]:
    return iter((block,)) if pace is None else paced(block, pace)


def _shared_file() -> int:
    """Return the descriptor of a file without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("log")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _send(to: socket.socket, file: int, data: bytes) -> None:
    """Write a message into `file`, and its length to the other end. Raises `OSError` where that has ended, or memory has."""
    if os.pwrite(file, data, 0) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    to.sendall(len(data).to_bytes(_LENGTH, "big"))


def _receive(of: socket.socket, file: int) -> bytes:
    """Return the next message, in `file`. Raises `ConnectionError` where the other end has closed."""
    length = of.recv(_LENGTH, socket.MSG_WAITALL)
    if len(length) < _LENGTH:
        raise ConnectionError("closed")
    return os.pread(file, int.from_bytes(length, "big"), 0)
