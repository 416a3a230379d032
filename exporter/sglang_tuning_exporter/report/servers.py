"""Whether the logs, and the lines of one log, are of one server: nodes and ranks may have files of their own. Two servers are refused. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.sglang.clean import clean
from sglang_tuning_exporter.sglang.events import (
    ENDS,
    DecodeBatch,
    Event,
    Liveness,
    PrefillBatch,
    Rank,
    ServerArgs,
)
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
from sglang_tuning_exporter.sglang.log.json_lines import json_of, leaves_of
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.sglang.log.stamps import STAMP, stamp_seconds
from sglang_tuning_exporter.sglang.log.terminal import strip_terminal

# The last lines of one file and the first of the next may overlap by so much (docs/decisions.md, "Reports").
OVERLAP_SECONDS = 10.0
# Time zones differ by whole half hours; the nodes of one server start within less.
ZONE_SECONDS = 1800.0
_ARGS = b"server_args="
# Reasons: docs/decisions.md, "Constants by name".
ENOUGH_LINES = 10  # batch lines of a rank in one frame
MOST_FRAMES = 64  # with more, what stands around the lines is no name
LINES_LOOKED_AT = 200  # of each of the first blocks, about
BLOCKS_LOOKED_AT = 10  # of each block after so many, a tenth of these lines
_LINE = re.compile(rb"\] (?:(?:Decode|Prefill) batch\b|(server_args=))")
_STAMP = re.compile(STAMP)
_NUMBER = re.compile(rb"(?<![\w=./-])\d+(?![\w=./-])")  # a length or a count; numbers of names are parts of words
_SHOWN = 60  # characters


def start_of(head: bytes) -> ServerArgs | None:
    """Return the first start in the beginning of a log, if it has a time."""
    place = head.find(_ARGS)
    if place < 0:
        return None
    end = head.find(b"\n", place)
    line = head[head.rfind(b"\n", 0, place) + 1 : end if end >= 0 else len(head)]
    found = [event for event in LogReader().feed(line) if isinstance(event, ServerArgs) and event.time is not None]
    return found[0] if found else None


def are_nodes(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Whether two starts are of two nodes of one server."""
    nodes = one.get("nnodes")
    if not isinstance(nodes, int) or nodes < 2 or one.get("node_rank") == other.get("node_rank"):
        return False
    return all(one.get(name) == other.get(name) for name in ("nnodes", "model_path", "dist_init_addr"))


def zone_between(base: ServerArgs, other: ServerArgs) -> float:
    """Return how far the clock of another node is ahead, seconds, by its time zone, not by its later start."""
    if base.time is None or other.time is None or not are_nodes(base.args, other.args):
        return 0.0
    return ZONE_SECONDS * round((other.time - base.time) / ZONE_SECONDS)


@dataclass(slots=True)
class _Log:
    """The ranks and starts of one log."""

    number: int
    started: float | None = None
    args: Mapping[str, object] = field(default_factory=dict)
    printing: dict[Rank, list[float]] = field(default_factory=dict)  # when each rank's batches began and were last seen


class Servers:
    """The events of all logs in time order. Raises `UsageError` where they are of several servers.

    Lines that raw text may have produced prove no second server.
    """

    def __init__(self, name_of: Callable[[int], str]) -> None:
        self._name_of = name_of
        self._logs: dict[int, _Log] = {}
        self._starts = 0

    def see(self, number: int, now: float, event: Event | BatchRun) -> None:
        """Take an event of the log with this number."""
        log = self._logs.get(number)
        if log is None:
            log = self._logs[number] = _Log(number)
        if isinstance(event, ServerArgs):
            if not event.suspect:
                log.started, log.args = now, event.args
                self._starts += 1
            for each in self._logs.values():
                each.printing.clear()
        if self._starts > 1 and log.started is not None:
            self._check_starts(log, log.started, now)
        if isinstance(event, (BatchRun, DecodeBatch, PrefillBatch)):
            seen = log.printing.get(event.rank)
            if seen is None:
                log.printing[event.rank] = [now, now]
            else:
                seen[1] = now
            if len(self._logs) > 1:
                self._check_ranks(log, event.rank)

    def _check_starts(self, log: _Log, started: float, now: float) -> None:
        """Refuse a log that goes on after another log shows a start."""
        for other in self._logs.values():
            if other.started is None or other is log or are_nodes(log.args, other.args):
                continue
            if started <= other.started < now - OVERLAP_SECONDS:
                raise self._refusal(log, other, "one goes on after the start in the other")

    def _check_ranks(self, log: _Log, rank: Rank) -> None:
        """Refuse a rank that prints its batches into two logs at once."""
        begun, last = log.printing[rank]
        for other in self._logs.values():
            seen = other.printing.get(rank)
            if seen is not None and other is not log and min(last, seen[1]) - max(begun, seen[0]) > OVERLAP_SECONDS:
                raise self._refusal(log, other, "both print batches of the same rank at the same time")

    def _refusal(self, log: _Log, other: _Log, reason: str) -> UsageError:
        names = " and ".join(self._name_of(number) for number in sorted((log.number, other.number)))
        return UsageError(
            f"{names}: logs of two servers, or the same lines twice: {reason}; give one server's logs at a time, or compare two with --against"
        )


class SharedLog:
    """The starts in one log. Raises `UsageError` where several servers print into it together, with nothing before their lines.

    As above, suspect lines prove nothing.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._starts: list[Mapping[str, object]] = []  # of the servers that may be running
        self._ready = 0  # since the last start
        self.has_frames = False  # what stands around the lines names their server: `Mixture` looks at it

    def see(self, events: Iterable[Event | BatchRun]) -> None:
        """Take the next events of the log."""
        for event in () if self.has_frames else events:
            if isinstance(event, ServerArgs):
                self._start(event)
            elif isinstance(event, Liveness):
                self._note_life(event)
            elif len(self._starts) > 1 and isinstance(event, (BatchRun, DecodeBatch, PrefillBatch)):
                self._check_role(event)

    def _start(self, event: ServerArgs) -> None:
        """Keep the servers that this one does not replace: those not yet ready, and the other side of a prefill/decode pair."""
        if event.suspect:
            self._ready = 0
            return
        sides = [each.get("disaggregation_mode") for each in (event.args, *self._starts)]
        if self._ready and not {"prefill", "decode"} <= set(sides):
            self._starts.clear()
        self._ready = 0
        if all(each != event.args and not are_nodes(each, event.args) for each in self._starts):
            self._starts.append(event.args)

    def _note_life(self, event: Liveness) -> None:
        if event.what == "ready":
            self._ready += not event.suspect
            # With several tokenizers each of them says so.
            single = all(each.get("tokenizer_worker_num", 1) == 1 for each in self._starts)
            if self._ready > 1 and len(self._starts) > 1 and single:
                raise self._refusal("more than one is ready after the last start")
        elif event.what in ENDS or event.what == "draining":
            self._starts.clear()  # whose end it is, is not known

    def _check_role(self, event: BatchRun | DecodeBatch | PrefillBatch) -> None:
        """Refuse decode lines after the start of a prefill server, and the other way round, where both have started."""
        side = self._starts[-1].get("disaggregation_mode")
        decodes = event.decodes if isinstance(event, BatchRun) else isinstance(event, DecodeBatch)
        prefills = event.prefills if isinstance(event, BatchRun) else isinstance(event, PrefillBatch)
        if (side == "prefill" and decodes) or (side == "decode" and prefills):
            raise self._refusal("a prefill and a decode server print batches")

    def _refusal(self, reason: str) -> UsageError:
        ports = ", ".join(sorted({str(each.get("port", "?")) for each in self._starts}))
        return UsageError(
            f"{self._name}: several servers print into this log together (--port {ports}): {reason}; nothing shows whose each line is,"
            " so let each server write a log of its own"
        )


@dataclass(slots=True)
class _Seen:
    """The batch lines of one rank in one frame."""

    first: float
    last: float
    lines: int = 0


class Mixture:
    """What stands around the batch lines of one log, its *frame*: one server has one for each rank at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._blocks = 0
        self.has_frames = False  # something stands around the lines
        self._ranks: dict[bytes, dict[bytes, _Seen]] = {}
        self._started: set[bytes] = set()  # the frames of starts
        self._alternate: tuple[bytes, bytes] | None = None  # two frames of one rank at the same time

    def see(self, text: bytes) -> None:
        """Take some lines. Raises `UsageError` where two servers, each with its start, print at the same time."""
        first = _LINE.search(text)
        if first is None or _bracket(text, first) == text.rfind(b"\n", 0, first.start()) + 1:
            return  # SGLang's own lines, with nothing around them
        self.has_frames = True
        found = list(_LINE.finditer(text))
        most = LINES_LOOKED_AT if self._blocks < BLOCKS_LOOKED_AT else LINES_LOOKED_AT // BLOCKS_LOOKED_AT
        step = len(found) // most | 1  # odd: the lines of two servers may alternate
        self._blocks += 1
        for place, match in enumerate(found):
            if place % step and match[1] is None:
                continue
            begin, bracket = text.rfind(b"\n", 0, match.start()) + 1, _bracket(text, match)
            stamp = text[bracket + 1 : match.start()]
            moment = stamp_seconds(stamp)
            if moment is None:
                continue
            frame = _frame(text[begin : text.find(b"\n", match.end())], bracket - begin)
            if match[1] is not None:
                self._started.add(frame)
            else:
                self._add(_STAMP.sub(b"", stamp, count=1).strip(), frame, moment)
            if self._alternate is not None and self._started.issuperset(self._alternate):
                raise UsageError(
                    f"{self._name}: {self._words('holds')}; give one server's lines, for example with grep -F"
                )

    def _words(self, holds: str) -> str:
        names = " and ".join(
            repr(clean(name.decode("utf-8", "replace"))[:_SHOWN]) for name in sorted(self._alternate or ())
        )
        return f"{holds} the lines of two servers, or the same lines twice: the same rank prints batches behind {names}"

    def _add(self, rank: bytes, frame: bytes, moment: float) -> None:
        frames = self._ranks.setdefault(rank, {})
        seen = frames.get(frame)
        if seen is None:
            if len(frames) >= MOST_FRAMES:
                return
            seen = frames[frame] = _Seen(moment, moment)
        seen.last, seen.lines = max(seen.last, moment), seen.lines + 1
        if seen.lines % ENOUGH_LINES == 0 and len(frames) < MOST_FRAMES:
            self._compare(frames, frame, seen)

    def _compare(self, frames: dict[bytes, _Seen], frame: bytes, seen: _Seen) -> None:
        for other, its in frames.items():
            # Text of a request that looks like another server's line has the frame of this one around it.
            if frame.startswith(other) or other.startswith(frame) or its.lines < ENOUGH_LINES:
                continue
            if min(seen.last, its.last) - max(seen.first, its.first) > OVERLAP_SECONDS:
                self._alternate = (frame, other)


def _bracket(text: bytes, match: re.Match[bytes]) -> int:
    """Return where SGLang's prefix begins."""
    return text.rfind(b"[", 0, match.start())


def _frame(line: bytes, length: int) -> bytes:
    """Return what stands around SGLang's line, without times and counts: before it, and for JSON what else names its source."""
    entry = json_of(line) if line.startswith(b"{") else None
    around = strip_terminal(line[:length])
    if entry is not None:
        texts = ((path, leaf) for path, leaf in leaves_of(entry, ()) if isinstance(leaf, str) and "] " not in leaf)
        around = ", ".join(f"{'.'.join(map(str, path))}={leaf}" for path, leaf in texts).encode("utf-8", "replace")
    return _NUMBER.sub(b"", _STAMP.sub(b"", around)).lstrip()
