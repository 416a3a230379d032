"""The usual lines of a whole block at once: access lines, and batch lines in the layouts that most servers print.

The kind of a line does not depend on its digits. With all digits replaced by 0, the lines of a log are a few hundred *shapes*; a
regular expression matches each shape once, and gives the places of its figures. Lines of no known shape are read one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

from sglang_tuning_exporter.sglang.events import DecodeBatch, PrefillBatch, Rank
from sglang_tuning_exporter.sglang.log import batch_lines
from sglang_tuning_exporter.sglang.log.prefix import parse_plain_prefix

_Any: TypeAlias = Any  # an `Event`, or also a `BatchRun` where the caller asked for runs
Origin: TypeAlias = tuple[float, Rank]
_Graph: TypeAlias = tuple[str | None, bool | None]  # device; whether a captured graph was replayed
_KEPT = 4096
_SECOND, _RANKS = 18, 20  # where these stand in `[YYYY-MM-DD HH:MM:SS TP0] `
_AFTER_SECOND = (b" ", b"]")  # a time without fraction
_SECONDS = {b"%02d" % second: float(second) for second in range(60)}
_SHAPES_KEPT, _SHAPE_LENGTH = 4096, 512
_DIGITS_AS_ZERO = bytes(ord("0") if ord("0") <= byte <= ord("9") else byte for byte in range(256))
_BATCH = len(b"Decode batch, #running-req: ")
_THROUGHPUT = b"gen throughput (token/s): "
_NO_GRAPH: _Graph = (None, None)

_PREFIX = rb"\[[-0-9 :]{19}[^\]\n]{0,40}\] "
# A rejected request, a server error and a pause are events, so they are no usual lines. A shape keeps the words of the status, not its digits.
_ACCESS = re.compile(
    _PREFIX + rb'INFO:     [^ \n]{1,80} - "(?![^\n]*(?:Service Unavailable|Internal Server|e_generation HTTP))[^\n:]*'
)
_DECODE = re.compile(rb"(" + _PREFIX + rb")" + batch_lines.USUAL_DECODE)
_PREFILL = re.compile(rb"(" + _PREFIX + rb")" + batch_lines.USUAL_PREFILL)
# A health probe is no load, so it is an event of its own (`PrefillBatch.is_health_probe`).
_PROBE = re.compile(rb"#new-token: 1, #cached-token: 0, token usage: ...., #running-req: 0, #queue-req: 0\b")
_GRAPHS: dict[bytes, _Graph] = {b"": _NO_GRAPH} | {
    f"{device} graph: {flag}, ".encode(): (device, flag)
    for device in ("cuda", "cpu", "npu", "musa")
    for flag in (True, False)
}
_SHARES = {b"%d.%02d" % divmod(share, 100): share / 100 for share in range(201)}  # a higher share is no usage


class _Numbers(dict[bytes, int]):
    """Numbers by their text: a look-up of the small ones is faster than `int`."""

    def __missing__(self, text: bytes) -> int:
        return int(text)


_NUMBERS = _Numbers({b"%d" % number: number for number in range(4096)})


# What lines of one shape have in common: the place of the prefix; the graph of a decode line, always the same object for the
# same graph, `None` for a prefill line; whether the digits can make it a health probe; the place of a prefill line's waiting
# tokens, or `None`; the getter of the figures that are added up (new sequences, new tokens, cached tokens of a prefill line); and
# the getter of those that the last line sets (running, usage, queued).
# A plain tuple: every batch line of a log unpacks one, and a named tuple takes four times as long.
_Figures: TypeAlias = "Callable[[bytes], tuple[bytes, ...]]"
Shape: TypeAlias = tuple[slice, "_Graph | None", bool, "slice | None", _Figures, _Figures]

_NO_FIGURES: Final[_Figures] = lambda _: ()  # noqa: E731 - what is never asked
ACCESS: Final[Shape] = (slice(0), None, False, None, _NO_FIGURES, _NO_FIGURES)  # none of its fields is used


class _Shapes(dict[bytes, Shape | None]):
    """The shapes seen so far; `None` for lines that are read one by one."""

    def __missing__(self, shape: bytes) -> Shape | None:
        found = _shape(shape)
        if found is not None and len(shape) <= _SHAPE_LENGTH:
            if len(self) >= _SHAPES_KEPT:
                self.clear()
            self[shape] = found
        return found


def _shape(line: bytes) -> Shape | None:
    if (match := _DECODE.fullmatch(line)) is not None:
        return slice(match.end(1)), _GRAPHS[match[4]], False, None, _NO_FIGURES, _figures(match, 2, 3, 5)
    if (match := _PREFILL.fullmatch(line)) is not None:
        probe = all(len(match[group]) == 1 for group in (3, 4, 6, 7))
        pending = None if match[8] is None else slice(*match.span(8))
        return slice(match.end(1)), None, probe, pending, _figures(match, 2, 3, 4), _figures(match, 6, 5, 7)
    return None if _ACCESS.fullmatch(line) is None else ACCESS


def _figures(match: re.Match[bytes], *groups: int) -> _Figures:
    return itemgetter(*(slice(*match.span(group)) for group in groups))


def throughput(line: bytes) -> float:
    """Read the tokens per second of a decode line in its usual layout."""
    return float(line[line.index(_THROUGHPUT) + len(_THROUGHPUT) :].partition(b",")[0])


class Prefixes:
    """Time and ranks of prefixes; most prefixes repeat, or differ from a known one only in the second.

    `accepts`: whether a line of this stream may begin with a prefix; called for each new one.
    """

    def __init__(self, accepts: Callable[[bytes], bool] | None = None) -> None:
        self._accepts = accepts
        self._others: dict[bytes, Origin] = {}
        self._minutes: dict[bytes, float] = {}
        self._ends: dict[bytes, Origin] = {}  # from the second on

    def __len__(self) -> int:
        return len(self._others) + len(self._minutes) + len(self._ends)

    def origin_of(self, start: bytes) -> Origin | None:
        """Return the time and ranks of a line that begins with SGLang's own prefix and a date."""
        minute, end = self._minutes.get(start[:_SECOND]), self._ends.get(start[_SECOND:])
        if minute is not None and end is not None:
            return minute + end[0], end[1]
        return self._others.get(start) or self._read(start)

    def _read(self, start: bytes) -> Origin | None:
        prefix = parse_plain_prefix(start)
        if prefix is None or prefix.end != len(start) or prefix.time is None:
            return None
        if self._accepts is not None and not self._accepts(start):
            return None
        if len(self) > _KEPT - 2:
            self.forget()
        second = _SECONDS.get(start[_SECOND:_RANKS])
        if second is not None and start[_RANKS : _RANKS + 1] in _AFTER_SECOND:
            self._ends[start[_SECOND:]] = (second, prefix.rank)
            self._minutes[start[:_SECOND]] = prefix.time - second
        else:
            self._others[start] = (prefix.time, prefix.rank)
        return prefix.time, prefix.rank

    def forget(self) -> None:
        """Forget all prefixes, to bound memory."""
        self._others.clear()
        self._minutes.clear()
        self._ends.clear()


_PARSERS = {b"Decode ": batch_lines.parse_decode, b"Prefill": batch_lines.parse_prefill}


class BatchRun(NamedTuple):
    """Batch lines of one scheduler in one printed second, with only access lines between, none of them a health probe.

    The figures of the last line are read at once, all others when they are needed. Figures that are weighted by time lose nothing:
    no time passes between lines of the same printed second.
    """

    time: float
    rank: Rank
    running: int  # of the last line, as the next four
    queued: int
    usage: float
    joined_sequences: int  # 0 where the last is a decode line
    new_tokens: int  # likewise
    decodes: int  # lines
    prefills: int  # lines
    new_sequences: int  # of all prefill lines, as the next two
    computed_tokens: int
    cached_tokens: int
    repeated_tokens: int  # cached ones of prefill lines with at most one computed token for each request
    pending: bytes  # waiting prompt tokens of the last prefill line that prints them; empty where none does
    graph_device: str | None  # of all decode lines
    graph: bool | None  # likewise
    prefix: bytes
    lines: list[bytes]  # with the access lines between

    def __repr__(self) -> str:
        return f"BatchRun({self.time}, {self.rank}, decode={self.decode}, prefill={self.prefill})"

    @property
    def first_decode(self) -> tuple[int, bytes] | None:
        """The running requests of the first line, and that line, if it is a decode line."""
        line, start = self.lines[0], len(self.prefix)
        if not line.startswith(b"Decode", start):
            return None
        return int(line[start + _BATCH : line.index(b",", start + _BATCH)]), line

    def _last(self, head: bytes) -> bytes | None:
        start = self.prefix + head
        return next((line for line in reversed(self.lines) if line.startswith(start)), None)

    @property
    def generation_throughput(self) -> float | None:
        """The tokens per second of the last decode line."""
        return self.decoding[1]

    @property
    def decoding(self) -> tuple[int, float] | tuple[None, None]:
        """The running requests and the tokens per second of the last decode line: `decode` takes seven times as long."""
        line, start = self._last(b"Decode batch"), len(self.prefix) + _BATCH
        return (None, None) if line is None else (int(line[start : line.index(b",", start)]), throughput(line))

    @property
    def decode(self) -> DecodeBatch | None:
        """The last decode line."""
        line = self._last(b"Decode batch")
        return None if line is None else batch_lines.parse_decode(line[len(self.prefix) :], self.time, self.rank)

    @property
    def prefill(self) -> PrefillBatch | None:
        """The last prefill line."""
        line = self._last(b"Prefill batch")
        return None if line is None else batch_lines.parse_prefill(line[len(self.prefix) :], self.time, self.rank)

    @property
    def joined(self) -> list[PrefillBatch]:
        """The prefill lines after the last decode line: they join the batch of that line."""
        found: list[PrefillBatch] = []
        for line in self.events():
            if isinstance(line, DecodeBatch):
                found.clear()
            else:
                found.append(line)
        return found

    def events(self) -> Iterator[DecodeBatch | PrefillBatch]:
        """Return the batch lines one by one."""
        return batch_events(self.lines, self.prefix, self.time, self.rank)


def batch_events(lines: list[bytes], prefix: bytes, time: float, rank: Rank) -> Iterator[DecodeBatch | PrefillBatch]:
    """Return the batch lines of a run one by one, without the access lines between."""
    end = len(prefix)
    for line in lines:
        parse = _PARSERS.get(line[end : end + 7])
        event = None if parse is None or not line.startswith(prefix) else parse(line[end:], time, rank)
        if event is not None:
            yield event


class FastPath:
    """Reads the usual lines of a stretch of a log.

    `decodes`, `prefills` and `others` count lines since `read` was last called; `time` is that of the last one.
    """

    def __init__(self, accepts: Callable[[bytes], bool] | None = None) -> None:
        self.lines: list[bytes] = [b""]  # of the stretch; the last is empty and no line
        self.ignored: set[bytes] = set()  # messages without meaning here
        self.decodes = self.prefills = self.others = 0
        self.time: float | None = None
        self.last_other = 0  # index of the last line without meaning here
        self.last_other_time: float | None = None
        self.other_after_batch = False  # whether a batch line was read before it
        self._prefixes = Prefixes()
        self._schedulers = self._prefixes if accepts is None else Prefixes(accepts)
        self._shapes: list[Shape | None] = [None]
        self._known_shapes = _Shapes()

    def take(self, stretch: bytes) -> None:
        """Take the next lines; the last may lack its newline."""
        if stretch[-1:] != b"\n":
            stretch += b"\n"
        self.lines = stretch.split(b"\n")
        self._shapes = list(map(self._known_shapes.__getitem__, stretch.translate(_DIGITS_AS_ZERO).split(b"\n")))

    def read(self, begin: int, events: list[_Any]) -> int:
        """Read from the `begin`-th line on; return the line that must be read alone, `len(lines) - 1` when there is none.

        Appends a `BatchRun` for the batch lines of one scheduler and second.
        """
        self.decodes = self.prefills = self.others = 0
        lines, shapes = self.lines, self._shapes
        index = begin
        while True:
            shape = shapes[index]
            if shape is ACCESS:
                index += 1
            elif shape is not None:
                prefix_place, _, may_be_probe, waiting, added, figures = shape
                line = lines[index]
                start = line[prefix_place]
                origin = self._schedulers.origin_of(start)
                if origin is None:
                    return index
                self.time = origin[0]
                if may_be_probe and _PROBE.search(line) is not None:
                    pending = None if waiting is None else int(line[waiting])
                    usage = _SHARES.get(figures(line)[1])
                    events.append(PrefillBatch(*origin, _NUMBERS[added(line)[0]], 1, 0, 0, 0, pending, usage))
                    self.prefills += 1
                    index += 1
                else:
                    index = self._read_run(index, start, origin, events)
            elif self._is_ignored(lines[index]):
                self.last_other, self.last_other_time = index, self.time
                self.other_after_batch = self.decodes + self.prefills > 0
                index += 1
            else:
                return index

    def _is_ignored(self, line: bytes) -> bool:
        start = line.find(b"] ") + 2
        origin = self._prefixes.origin_of(line[:start]) if line[start:] in self.ignored else None
        if origin is None:
            return False
        self.time = origin[0]
        self.others += 1
        return True

    def _read_run(self, first: int, prefix: bytes, origin: Origin, events: list[_Any]) -> int:  # noqa: C901 - all batch lines pass here
        """Read the run that begins with the `first` line; return the index of the first line after it."""
        lines, shapes, numbers = self.lines, self._shapes, _NUMBERS
        last = index = first
        decodes = prefills = sequences = computed = cached = repeated = joined = new_tokens = 0
        pending = b""
        graph: _Graph | None = None
        for index in range(first, len(lines)):
            shape = shapes[index]
            if shape is ACCESS:
                continue
            if shape is None:
                break
            line = lines[index]
            prefix_place, line_graph, may_be_probe, waiting, added, _ = shape
            if line[prefix_place] != prefix:
                break
            if line_graph is not None:
                if line_graph is not graph:
                    if graph is not None:
                        break
                    graph = line_graph
                decodes += 1
                joined = new_tokens = 0
            elif may_be_probe and _PROBE.search(line) is not None:
                break
            else:
                prefills += 1
                new, tokens, held = added(line)
                joined, new_tokens = numbers[new], numbers[tokens]
                sequences += joined
                computed += new_tokens
                cached += numbers[held]
                repeated += numbers[held] * (new_tokens <= joined)
                if waiting is not None:
                    pending = line[waiting]
            last = index
        self.decodes += decodes
        self.prefills += prefills
        running, usage, queued = (shapes[last] or ACCESS)[-1](lines[last])
        share, (device, replayed), (time, rank) = _SHARES.get(usage), graph or _NO_GRAPH, origin
        if share is None:
            events.extend(batch_events(lines[first : last + 1], prefix, *origin))
            return index
        # By position: a call with names takes twice as long.
        events.append(tuple.__new__(BatchRun, (
            time, rank, numbers[running], numbers[queued], share, joined, new_tokens, decodes, prefills, sequences, computed,
            cached, repeated, pending, device, replayed, prefix, lines[first : last + 1],
        )))  # fmt: skip
        return index
