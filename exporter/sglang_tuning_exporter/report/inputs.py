"""Logs as events in time order: files, globs, standard input, gzip, rotated files, many ranks.

Logs are read in blocks, so memory does not grow with their size. Printed times are read as UTC.
"""

from __future__ import annotations

import heapq
import sys
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from math import inf
from pathlib import Path
from typing import IO, TypeAlias

from sglang_tuning_exporter.collect.compression import OPENERS
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.report.clock import FAR_SECONDS, Clock, add_up, day_of, drifts, first_time, last_time
from sglang_tuning_exporter.report.files import STDIN, LogSource, align, because, find, in_order, shown
from sglang_tuning_exporter.report.read_ahead import LogPart, ReadAhead, read_here
from sglang_tuning_exporter.report.servers import Mixture, Servers, SharedLog
from sglang_tuning_exporter.sglang.events import Event
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
from sglang_tuning_exporter.sglang.log.forms import OwnTimes
from sglang_tuning_exporter.sglang.log.reader import LogReader

_SGLANG_KINDS = ("decode", "prefill", "retraction", "out_of_memory", "startup", "liveness")
_SERVED_KINDS = ("access", "request")
LARGE = 8 << 20  # bytes: smaller logs are read before another process has started
LARGE_PART = 0.1  # of it: a log of that size has another process to read it, and the logs that continue it
_PACKS_TO = 0.1  # the usual size of a gzip file against its text
_Timed: TypeAlias = tuple[float, Event | BatchRun | None]


class Logs:
    """All logs that are read together. The counts of `readers` are complete when `events` is exhausted."""

    def __init__(
        self,
        arguments: Sequence[str],
        stdin: IO[bytes] | None = None,
        *,
        pace: float | None = None,
        jobs: int = 1,
        most: int | None = None,
    ) -> None:
        """Read the beginning of every log. Raises `UsageError` for what is missing, a directory, unreadable or empty.

        `most`: the most bytes read of each pipe or packed file; without it, as long as they look like a log. `pace`: seconds; a log
        is not read beyond a multiple of them before all events up to it were taken, so that `lines_taken` is that of this time.
        `jobs`: the most processes; beside this one, one reads each large log.
        """
        if stdin is None and STDIN in arguments and sys.stdin is not None:
            stdin = sys.stdin.buffer
        sources = find(arguments, stdin)
        for source in sources:
            source.most = most
            source.look()
        self._sources = [source for source in sources if not source.empty]
        if not self._sources:
            reason = "is empty" if len(sources) == 1 else "all are empty"
            raise UsageError(f"{self._names(sources)}: {reason}{because(sources)}")
        align(self._sources)
        self._logs = in_order(self._sources)
        self._begins = [-inf if log[0].first is None else log[0].first for log in self._logs]
        # A log that begins where another one ended continues its reader and its clock.
        self._lanes = list(range(len(self._logs)))
        self.readers: list[LogReader | ReadAhead] = [LogReader() for _ in self._logs]
        self._shared = [SharedLog(shown(log[0].name)) for log in self._logs]
        self._clocks = [Clock(log[0].ahead) for log in self._logs]
        self._pace, self._jobs = pace, jobs
        self._size = sum(map(_size, self._logs))
        self._taken: list[tuple[dict[str, int], dict[str, int]]] = [({}, {}) for _ in self._logs]
        self._open = {number: log[0] for number, log in enumerate(self._logs)}

    @staticmethod
    def _names(sources: Sequence[LogSource]) -> str:
        return ", ".join(shown(source.name) for source in sources[:3]) + (", …" if len(sources) > 3 else "")

    @property
    def names(self) -> list[str]:
        """The names of the files, in time order."""
        return [shown(source.name) for log in self._logs for source in log]

    @property
    def paths(self) -> list[Path]:
        """The regular files."""
        return [Path(source.name) for source in self._sources if source.stream is None]

    @property
    def notes(self) -> list[str]:
        """Notes about parts that could not be read."""
        return [note for source in self._sources for note in source.notes]

    @property
    def size(self) -> int:
        """Size in bytes, as on disk; 0 where a part comes from a pipe."""
        is_piped = len(self.paths) < len(self._sources)
        return 0 if is_piped else sum(path.stat().st_size for path in self.paths)

    def watch(self, on_read: Callable[[int], None]) -> None:
        """Call `on_read` with the number of bytes whenever some were read."""
        for source in self._sources:
            source.on_read = on_read

    @property
    def first(self) -> float | None:
        """The first printed time, unix seconds (below `FIRST_DATED_SECOND`: since a midnight)."""
        return min((log[0].first for log in self._logs if log[0].first is not None), default=None)

    @property
    def lines_taken(self) -> Counter[str]:
        """Lines by kind, up to the last event given."""
        return add_up(lines for lines, _ in self._taken)

    @property
    def unrecognised_taken(self) -> Counter[str]:
        """What could not be read by kind, up to the last event given."""
        return add_up(unrecognised for _, unrecognised in self._taken)

    def events(self) -> Generator[_Timed, None, None]:
        """Return every event with its time, seconds, in time order; a line without a time has that of the line before.

        The first and the last printed time of each log come without an event. The time is `-inf` while none was printed.
        Raises `UsageError` when the input cannot be read, or is of several servers, or, at its end, is no log of SGLang.
        """
        with ExitStack() as self._processes:
            yield from self._in_order()

    def _in_order(self) -> Generator[_Timed, None, None]:
        waiting = list(range(len(self._logs)))[::-1]
        servers = Servers(lambda lane: shown(self._open[lane].name)) if len(waiting) > 1 else None
        heap: list[tuple[float, int, Event | BatchRun | None, Iterator[_Timed]]] = []
        ended: list[int] = []
        while heap or waiting:
            while waiting and (not heap or self._begins[waiting[-1]] < heap[0][0]):
                index = waiting.pop()
                self._go_on(index, ended)
                events = self._read(index)
                moment, event = next(events)
                heapq.heappush(heap, (moment, index, event, events))
            moment, index, event, events = heap[0]
            if servers is None:  # a single log needs no merging
                yield moment, event
                yield from events
                break
            if event is not None:
                servers.see(self._lanes[index], moment, event)
            yield moment, event
            following = next(events, None)
            if following is None:
                heapq.heappop(heap)
                ended.append(index)
            else:
                heapq.heapreplace(heap, (following[0], index, following[1], events))
        for clock in self._clocks:
            clock.end()
        self._check()

    def _go_on(self, index: int, ended: list[int]) -> None:
        """Continue the last log that ended where this one begins, if there is one."""
        begin = self._logs[index][0]
        for before in reversed(ended):
            lane = self._lanes[before]
            last = self._clocks[lane].printed
            is_near = begin.first is not None and last is not None and begin.first + begin.ahead - last <= FAR_SECONDS
            if is_near and self._logs[before][0].ahead == begin.ahead:
                self._lanes[index] = lane
                ended.remove(before)
                return

    def _read(self, index: int) -> Iterator[_Timed]:
        lane = self._lanes[index]
        is_large = self._size >= LARGE and _size(self._logs[lane]) >= LARGE * LARGE_PART
        if lane == index and is_large and self._jobs > 1:  # another process reads a large part of large logs
            self._jobs -= 1
            self.readers[lane] = self._processes.enter_context(closing(ReadAhead(self._pace)))
        clock, first, reader = self._clocks[lane], self._logs[index][0], self.readers[lane]
        last = None if first.first is None else first.first + first.ahead
        yield clock.read(last), None
        for source in self._logs[index]:
            self._open[lane] = source
            texts = deque[bytes](maxlen=2)  # the last block may be a single line without its end
            mixture = Mixture(shown(source.name))
            text = source.blocks()
            for part in reader.parts(text) if isinstance(reader, ReadAhead) else read_here(text, reader, self._pace):
                mixture.see(part.text)
                self._shared[lane].has_frames |= mixture.has_frames
                texts.appendleft(part.text)
                if source.is_endless and not any(reader.counts[kind] for kind in (*_SGLANG_KINDS, *_SERVED_KINDS)):
                    self._check()
                last = yield from self._take(lane, part, last, own=source.own_times)
            if last is not None:
                found = (last_time(text, last, own=source.own_times) for text in texts)
                end = next((time for time in found if time is not None), last)
                moment = clock.now if end == last else clock.read(end)
                yield moment, None

    def _take(
        self, lane: int, part: LogPart, last: float | None, *, own: OwnTimes
    ) -> Generator[_Timed, None, float | None]:
        """Yield the events of a part; return the last printed time."""
        clock, reader = self._clocks[lane], self.readers[lane]
        known = reader.unrecognised.copy()
        events = part.events()
        self._shared[lane].see(events)
        drifted = [] if self._pace or known == reader.unrecognised else drifts(part.text, known, last)
        if not events and self._pace is not None:
            # Access lines alone, perhaps for hours: they move the time, but only by little at once.
            printed = day_of(first_time(part.text, own=own), last)
            if clock.is_near(printed):
                yield clock.read(printed), None
        for place, event in enumerate(events):
            time = event.time
            if time is not None:
                last = time
                while drifted and last >= drifted[0][0]:
                    self._taken[lane] = (self._taken[lane][0], drifted.pop(0)[1])
            moment = clock.follow(time)
            if moment is None:
                then = _next_time(events, place, part.following, own=own) if clock.leaps(time) else None
                moment = clock.read(time, then)
            yield moment, event
        self._taken[lane] = (reader.counts.copy(), reader.unrecognised.copy())
        return last

    def _check(self) -> None:
        found = sum(reader.counts[kind] for reader in self.readers for kind in _SGLANG_KINDS)
        served = sum(reader.counts[kind] for reader in self.readers for kind in _SERVED_KINDS)
        # Any web server's log has access lines; only SGLang prints its own prefix before them.
        if not found and not (served and self.first is not None):
            unread = next((reader.unread for reader in self.readers if reader.unread is not None), None)
            if unread is not None:
                raise UsageError(
                    f"{self._names(self._sources)}: holds words of SGLang's, in lines whose form cannot be read; the first: "
                    f"{shown(unread.decode('utf-8', 'replace'))}{because(self._sources)}"
                )
            raise UsageError(
                f"{self._names(self._sources)}: no line of SGLang's in it; give a server's log, written at --log-level info{because(self._sources)}"
            )


def _size(log: Sequence[LogSource]) -> float:
    """Return the bytes of a log's files, unpacked; nothing of a pipe."""
    files = [Path(source.name) for source in log if source.stream is None]
    return sum(path.stat().st_size / (_PACKS_TO if path.suffix in OPENERS else 1.0) for path in files)


def _next_time(events: Sequence[Event | BatchRun], place: int, following: bytes, *, own: OwnTimes) -> float | None:
    """Return when the line after the event at `place` was printed."""
    times = (events[later].time for later in range(place + 1, len(events)))
    found = next((time for time in times if time is not None), None)
    return day_of(first_time(following, own=own), events[place].time) if found is None else found
