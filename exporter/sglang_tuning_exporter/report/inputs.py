"""The logs a report is made of, as events in time order: files, globs, standard input, gzip, rotation sets, many ranks.

Every log is read in blocks, so memory does not grow with its size. Printed times are read as UTC.
"""

from __future__ import annotations

import heapq
import sys
from contextlib import ExitStack, closing
from math import inf
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias

from sglang_tuning_exporter.config import UsageError
from sglang_tuning_exporter.report.clock import FAR_SECONDS, Clock, day_of, first_time, last_time
from sglang_tuning_exporter.report.files import STDIN, align, because, find, in_order, shown
from sglang_tuning_exporter.report.pacing import add_up, drifts
from sglang_tuning_exporter.report.read_ahead import ReadAhead, read_here
from sglang_tuning_exporter.report.servers import Servers
from sglang_tuning_exporter.sglang.events import Event
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
from sglang_tuning_exporter.sglang.log.prefix import FIRST_DATED_SECOND
from sglang_tuning_exporter.sglang.log.reader import LogReader

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Generator, Iterator, Sequence

    from sglang_tuning_exporter.report.files import LogSource
    from sglang_tuning_exporter.report.read_ahead import LogPart

_SGLANG_KINDS = ("decode", "prefill", "retraction", "out_of_memory", "startup", "liveness")
_SERVED_KINDS = ("access", "request")
LARGE = 8 << 20  # bytes: a smaller log is read before another process has started
_PACKS_TO = 0.1  # of its size, a gzip file's usual share
_Timed: TypeAlias = tuple[float, Event | BatchRun | None]


class Logs:
    """All logs of one report. `readers` hold their counts once `events` has been read to its end."""

    def __init__(
        self,
        arguments: Sequence[str],
        stdin: IO[bytes] | None = None,
        *,
        pace: float | None = None,
        jobs: int = 1,
        most: int | None = None,
    ) -> None:
        """Look at every log's start. Raises `UsageError` for what is missing, a directory, unreadable or empty.

        Of what is piped or packed `most` bytes are read of each; without it, what a log looks like.

        With a `pace` a log is not read on, beyond a multiple of so many seconds, before all events up to it have been taken:
        `lines_taken` is then that of the moment. `unrecognised_taken` is so in any case. Large logs are read by other
        processes, one for each, and `jobs` processes at most together with this one.
        """
        if stdin is None and STDIN in arguments and sys.stdin is not None:
            stdin = sys.stdin.buffer
        sources = find(arguments, stdin)
        for source in sources:
            source.most = most
            source.look()
        self._told = [source for source in sources if not source.empty]
        if not self._told:
            reason = "is empty" if len(sources) == 1 else "all are empty"
            raise UsageError(f"{self._names(sources)}: {reason}{because(sources)}")
        self._zones = align(self._told)
        self._logs = in_order(self._told)
        # A log that begins where another one ended goes on with its reader and its clock.
        self._lanes = list(range(len(self._logs)))
        self.readers: list[LogReader | ReadAhead] = [LogReader() for _ in self._logs]
        self.ends: list[float] = []  # the last printed time of each log
        self._clocks = [Clock(log[0].ahead) for log in self._logs]
        self._pace, self._jobs = pace, jobs
        self._taken: list[tuple[dict[str, int], dict[str, int]]] = [({}, {}) for _ in self._logs]
        self._open = {number: log[0] for number, log in enumerate(self._logs)}

    @staticmethod
    def _names(sources: Sequence[LogSource]) -> str:
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
        for way, times in (
            ("back", sum(clock.set_back for clock in self._clocks)),
            ("forward", sum(clock.set_forward for clock in self._clocks)),
        ):
            if times:
                often = "once" if times == 1 else f"{times} times"
                remarks.append(
                    f"the clock was set {way} {often}: time goes on from where it was, so later times are not those printed"
                )
        strays = sum(clock.strays for clock in self._clocks)
        if strays:
            lines = "1 line has a time" if strays == 1 else f"{strays} lines have times"
            remarks.append(f"{lines} far from those around it: taken as printed with the line before")
        remarks += self._zones
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
        return add_up(lines for lines, _ in self._taken)

    @property
    def unrecognised_taken(self) -> Counter[str]:
        """What could not be read by kind, up to the last event given."""
        return add_up(unrecognised for _, unrecognised in self._taken)

    def events(self) -> Generator[_Timed, None, None]:
        """Give every event with its time, seconds, in time order; lines without a time follow the line before.

        Each log's first and last printed time come with no event. The time is `-inf` while none was printed.
        Raises `UsageError` when the input cannot be read, or is of several servers, or, at its end, is no log of SGLang.
        """
        with ExitStack() as stack:
            large = [lane for lane, log in enumerate(self._logs) if _size(log) >= LARGE]
            for lane in large[: self._jobs - 1]:
                self.readers[lane] = stack.enter_context(closing(ReadAhead(self._pace)))
            yield from self._in_order()

    def _in_order(self) -> Generator[_Timed, None, None]:
        waiting = list(range(len(self._logs)))[::-1]
        servers = Servers(lambda lane: shown(self._open[lane].name)) if len(waiting) > 1 else None
        heap: list[tuple[float, int, Event | BatchRun | None, Iterator[_Timed]]] = []
        ended: list[int] = []
        while heap or waiting:
            while waiting and (not heap or self._first_of(waiting[-1]) < heap[0][0]):
                index = waiting.pop()
                self._go_on(index, ended)
                events = self._read(index)
                moment, event = next(events)
                heapq.heappush(heap, (moment, index, event, events))
            moment, index, event, events = heap[0]
            if servers is None:  # a single log: nothing is to be merged
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
        """Let a log go on where another one ended, the last one if there are several."""
        begin = self._logs[index][0]
        for before in reversed(ended):
            lane = self._lanes[before]
            last = self._clocks[lane].printed
            is_near = begin.first is not None and last is not None and begin.first + begin.ahead - last <= FAR_SECONDS
            if is_near and self._logs[before][0].ahead == begin.ahead:
                self._lanes[index] = lane
                ended.remove(before)
                return

    def _first_of(self, index: int) -> float:
        first = self._logs[index][0].first
        return -inf if first is None else first

    def _read(self, index: int) -> Iterator[_Timed]:
        lane = self._lanes[index]
        clock, reader = self._clocks[lane], self.readers[lane]
        first = self._logs[index][0]
        last = None if first.first is None else first.first + first.ahead
        yield clock.read(last), None
        for source in self._logs[index]:
            self._open[lane] = source
            before = block = b""
            for part, following, read in self._pieces(lane, source):
                before, block = block, part
                if source.is_endless and not self._is_sglangs(reader):
                    self._check()
                known = reader.unrecognised.copy()
                events = read()
                drifted = [] if self._pace or known == reader.unrecognised else drifts(part, known, last)
                if not events and self._pace is not None:
                    # Nothing but access lines, perhaps for hours: they move the time, if only by little at once.
                    printed = day_of(first_time(part), last)
                    if clock.is_near(printed):
                        yield clock.read(printed), None
                for place, event in enumerate(events):
                    last = event.time if event.time is not None else last
                    while drifted and last is not None and last >= drifted[0][0]:
                        self._taken[lane] = (self._taken[lane][0], drifted.pop(0)[1])
                    then = _next_time(events, place, following) if clock.leaps(event.time) else None
                    yield clock.read(event.time, then), event
                self._taken[lane] = (reader.counts.copy(), reader.unrecognised.copy())
            if last is not None:
                # The last block may be a single line without its end.
                found = [last_time(part, last) for part in (block, before)]
                end = next((time for time in found if time is not None), last)
                moment = clock.now if end == last else clock.read(end)
                if clock.printed is not None:
                    self.ends.append(clock.printed)
                yield moment, None

    def _pieces(self, lane: int, source: LogSource) -> Iterator[LogPart]:
        """Give a log's blocks, cut where they are to be taken by the clock, each with the one that follows."""
        reader = self.readers[lane]
        if isinstance(reader, ReadAhead):
            return reader.parts(source.blocks())
        return read_here(source.blocks(), reader, self._pace)

    @staticmethod
    def _is_sglangs(reader: LogReader | ReadAhead) -> bool:
        return any(reader.counts[kind] for kind in (*_SGLANG_KINDS, *_SERVED_KINDS))

    def _check(self) -> None:
        found = sum(reader.counts[kind] for reader in self.readers for kind in _SGLANG_KINDS)
        served = sum(reader.counts[kind] for reader in self.readers for kind in _SERVED_KINDS)
        # Any web server's log has access lines; only SGLang's puts its own prefix before them.
        if not found and not (served and self.first is not None):
            unread = next((reader.unread for reader in self.readers if reader.unread is not None), None)
            if unread is not None:
                raise UsageError(
                    f"{self._names(self._told)}: holds words of SGLang's, in lines whose form cannot be read; the first: "
                    f"{shown(unread.decode('utf-8', 'replace'))}{because(self._told)}"
                )
            raise UsageError(
                f"{self._names(self._told)}: no line of SGLang's in it; give a server's log{because(self._told)}"
            )


def _size(log: Sequence[LogSource]) -> float:
    """Return the bytes of a log's files, unpacked; nothing of a pipe."""
    files = [Path(source.name) for source in log if source.stream is None]
    return sum(path.stat().st_size / (_PACKS_TO if path.suffix == ".gz" else 1.0) for path in files)


def _next_time(events: Sequence[Event | BatchRun], place: int, following: bytes) -> float | None:
    """Find when the line after the event at `place` was printed."""
    times = (events[later].time for later in range(place + 1, len(events)))
    found = next((time for time in times if time is not None), None)
    return day_of(first_time(following), events[place].time) if found is None else found
