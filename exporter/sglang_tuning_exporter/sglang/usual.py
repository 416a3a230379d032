"""The usual lines of a whole block at once: access lines, and batch lines in the layouts that most servers print.

One expression takes everything that one scheduler prints in one second as one row, and what it does not know line by
line. Between two batch lines of one scheduler with the same printed time nothing happens that time could weigh, so only
the last one's figures are read; of the others it is enough to count.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeAlias

from sglang_tuning_exporter.sglang.events import DecodeBatch, PrefillBatch, Rank
from sglang_tuning_exporter.sglang.prefix import parse_plain_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# All lines of a stretch, their scheduler's prefix, the last batch line behind it, `cuda graph: True, ` of its decode
# lines; or one other line, and nothing else. A stretch of access lines has no batch line.
Row: TypeAlias = tuple[bytes, bytes, bytes, bytes, bytes]
Origin: TypeAlias = tuple[float, Rank]
_KEPT = 4096
_SECOND, _RANKS = 18, 20  # where these stand in `[YYYY-MM-DD HH:MM:SS TP0] `
_AFTER_SECOND = (b" ", b"]")  # no fraction of the second
_SECONDS = {b"%02d" % second: float(second) for second in range(60)}
TEXT, PREFIX, BODY, GRAPH, OTHER = range(5)

# Few groups, and `(?:…|)` for what may be missing: each group and each `(?:…)?` costs time at every line.
_PREFIX = rb"\[[-0-9 :]{19}[^\]\n]{0,40}\] "
# No colon in what is requested, so that what is counted below cannot stand there.
_ACCESS = rb'INFO:     [^ \n]{1,80} - "[^\n:]*'
_GRAPH = rb"(?:cuda|cpu|npu|musa) graph: (?:True|False)"
_DECODE = (
    rb"Decode batch[.,] #running-req: [0-9]{1,9}, #token: [0-9]{1,15}, token usage: [01]\.[0-9][0-9], "
    # All decode lines of a stretch have the same graph: either this is the first one, or it repeats that.
    rb"(?:(?(4)(?!)|(" + _GRAPH + rb", |))|\4)"
    rb"gen throughput \(token/s\): [0-9]{1,9}\.[0-9][0-9], #queue-req: [0-9]{1,9},? ?"
)
# A health probe is no load, so it stands alone: it must not hide in the sums (`PrefillBatch.is_health_probe`).
_PROBE = rb"1, #cached-token: 0, token usage: ...., #running-req: 0, #queue-req: 0\b"
_PREFILL_HEAD = rb"Prefill batch[.,] #new-seq: [0-9]{1,9}, #new-token: "
_PREFILL_TAIL = (
    rb"[0-9]{1,9}, #cached-token: [0-9]{1,12}, token usage: [01]\.[0-9][0-9], #running-req: [0-9]{1,9}, #queue-req: [0-9]{1,9}"
    rb"(?:, #pending-token: [0-9]{1,12}|)(?:, " + _GRAPH + rb"|)"
    rb"(?:, input throughput \(token/s\): [0-9]{1,9}\.[0-9][0-9]|),? ?"
)
_PREFILL = _PREFILL_HEAD + rb"(?!" + _PROBE + rb")" + _PREFILL_TAIL
_ROW = re.compile(
    rb"((?=(" + _PREFIX + rb"))(?:(?:\2(?:(" + _DECODE + rb"|" + _PREFILL + rb")|" + _ACCESS + rb")"
    rb"|" + _PREFIX + _ACCESS + rb")\r?\n)+)|([^\n]*\n)"
)
_PROBE_LINE = re.compile(
    rb"(" + _PREFIX + rb")(" + _PREFILL_HEAD + rb"(?=" + _PROBE + rb")" + _PREFILL_TAIL + rb")\r?\n"
)
# What only a decode line, and only a prefill line, has once.
_DECODE_MARK = b"gen throughput (token/s): "
_PREFILL_MARK = b"#new-seq: "

_DECODE_FIGURES = re.compile(
    rb"Decode batch[.,] #running-req: (\d+), #token: (\d+), token usage: ([\d.]+), (?:(\w+) graph: (\w+), )?"
    rb"gen throughput \(token/s\): ([\d.]+), #queue-req: (\d+)"
)
_PREFILL_FIGURES = re.compile(
    rb"Prefill batch[.,] #new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+), token usage: ([\d.]+), "
    rb"#running-req: (\d+), #queue-req: (\d+)(?:, #pending-token: (\d+))?(?:, \w+ graph: \w+)?"
    rb"(?:, input throughput \(token/s\): ([\d.]+))?"
)
# The figures that say what a scheduler does now.
_DECODE_NOW = re.compile(
    rb"Decode batch[.,] #running-req: (\d+), #token: \d+, token usage: ([\d.]+), [^\n]*#queue-req: (\d+)"
)
_PREFILL_NOW = re.compile(
    rb"Prefill batch[.,] #new-seq: (\d+), #new-token: (\d+), #cached-token: \d+, token usage: ([\d.]+), "
    rb"#running-req: (\d+), #queue-req: (\d+)"
)
_decode_now: Callable[[bytes], re.Match[bytes] | None] = _DECODE_NOW.match
_prefill_now: Callable[[bytes], re.Match[bytes] | None] = _PREFILL_NOW.match
_SEQUENCES = re.compile(_PREFILL_MARK + rb"(\d+)")
_DEVICES = {b"cuda": "cuda", b"cpu": "cpu", b"npu": "npu", b"musa": "musa"}
_GRAPHS: dict[bytes, tuple[str | None, bool | None]] = {b"": (None, None)} | {
    b"%b graph: %b, " % (device, flag): (name, flag == b"True")
    for device, name in _DEVICES.items()
    for flag in (b"True", b"False")
}
_SHARES = {b"%d.%02d" % divmod(share, 100): share / 100 for share in range(200)}
_NUMBERS = {b"%d" % number: number for number in range(4096)}  # looked up faster than read
_DECODE_INITIAL = ord("D")


def split(block: bytes) -> list[Row]:
    """Give the rows of a block, in order; the last line may lack its newline."""
    return _ROW.findall(block if block[-1:] == b"\n" or not block else block + b"\n")


def lines(row: Row) -> Iterator[bytes]:
    """Give each line of a row, without its newline."""
    yield from (row[OTHER] or row[TEXT])[:-1].split(b"\n")


def probe(row: Row) -> tuple[bytes, bytes] | None:
    """Give prefix and body of a health probe's prefill line in the usual layout; `None` for any other line."""
    match = _PROBE_LINE.fullmatch(row[OTHER])
    return None if match is None else (match[1], match[2])


def number(text: bytes) -> int:
    """Read a figure without sign."""
    found = _NUMBERS.get(text)
    return int(text) if found is None else found


def decode_batch(body: bytes, time: float, rank: Rank) -> DecodeBatch:
    """Read a decode line in its usual layout, from behind its prefix on."""
    match = _DECODE_FIGURES.match(body)
    assert match is not None
    running, tokens, usage, device, graph, throughput, queued = match.groups()
    event = DecodeBatch(time, rank, int(running), int(queued), int(tokens), _SHARES[usage])
    if graph:
        event.graph = graph == b"True"
        event.graph_device = _DEVICES[device]
    event.generation_throughput = float(throughput)
    return event


def prefill_batch(body: bytes, time: float, rank: Rank) -> PrefillBatch:
    """Read a prefill line in its usual layout, from behind its prefix on."""
    match = _PREFILL_FIGURES.match(body)
    assert match is not None
    sequences, new, cached, usage, running, queued, pending, throughput = match.groups()
    event = PrefillBatch(time, rank, int(sequences), int(new), int(cached), int(running), int(queued))
    event.full_usage = _SHARES[usage]
    if pending:
        event.pending_tokens = int(pending)
    if throughput:
        event.input_throughput = float(throughput)
    return event


class Prefixes:
    """Says what lines' starts mean, each of which comes again and again or differs from one known in its second only."""

    def __init__(self) -> None:
        self._odd: dict[bytes, Origin] = {}
        self._minutes: dict[bytes, float] = {}
        self._ranks: dict[bytes, Rank] = {}

    def __len__(self) -> int:
        return len(self._odd) + len(self._minutes) + len(self._ranks)

    def of(self, start: bytes) -> Origin | None:
        """Say when and by whom a line was printed, where it starts with SGLang's own prefix and date."""
        minute, rank = self._minutes.get(start[:_SECOND]), self._ranks.get(start[_RANKS:])
        if minute is not None and rank is not None:
            second = _SECONDS.get(start[_SECOND:_RANKS])
            if second is not None:
                return minute + second, rank
        return self._odd.get(start) or self._read(start)

    def _read(self, start: bytes) -> Origin | None:
        prefix = parse_plain_prefix(start)
        if prefix is None or prefix.end != len(start) or prefix.time is None:
            return None
        if len(self) > _KEPT - 2:
            self.forget()
        second = _SECONDS.get(start[_SECOND:_RANKS])
        if second is not None and start[_RANKS : _RANKS + 1] in _AFTER_SECOND:
            self._ranks[start[_RANKS:]] = prefix.rank
            self._minutes[start[:_SECOND]] = prefix.time - second
        else:
            self._odd[start] = (prefix.time, prefix.rank)
        return prefix.time, prefix.rank

    def forget(self) -> None:
        """Forget it all: there is no end to what a log may hold."""
        self._odd.clear()
        self._minutes.clear()
        self._ranks.clear()


class BatchRun:
    """Batch lines of one scheduler in one printed second with nothing but access lines between, none a health probe.

    The last line's figures are read at once, everything else when it is asked for. Nothing that is weighed by time is
    lost: between lines of the same printed second no time passes.
    """

    __slots__ = (
        "_prefix", "decodes", "graph", "graph_device", "joined_sequences", "new_tokens", "prefills", "queued", "rank",
        "running", "text", "time", "usage",
    )  # fmt: skip

    def __init__(self, time: float, rank: Rank, row: Row) -> None:
        self.time = time
        self.rank = rank
        self.text, self._prefix, body, graph, _ = row
        # Of the last line; sequences and new tokens are 0 where that is a decode line.
        self.joined_sequences = self.new_tokens = 0
        self.decodes = self.text.count(_DECODE_MARK)  # lines
        self.prefills = self.text.count(_PREFILL_MARK)  # lines
        self.graph_device, self.graph = _GRAPHS[graph]  # of all decode lines
        if body[0] == _DECODE_INITIAL:
            match = _decode_now(body)
            assert match is not None
            running, usage, queued = match.groups()
        else:
            match = _prefill_now(body)
            assert match is not None
            sequences, tokens, usage, running, queued = match.groups()
            self.joined_sequences = number(sequences)
            self.new_tokens = number(tokens)
        # Written out, not called: this is done for every second of a log.
        found = _NUMBERS.get(running)
        self.running = int(running) if found is None else found
        found = _NUMBERS.get(queued)
        self.queued = int(queued) if found is None else found
        self.usage = _SHARES[usage]

    def __repr__(self) -> str:
        return f"BatchRun({self.time}, {self.rank}, decode={self.decode}, prefill={self.prefill})"

    @property
    def decode(self) -> DecodeBatch | None:
        """The last decode line."""
        start = self._last(b"Decode batch")
        return None if start is None else decode_batch(self._line(start), self.time, self.rank)

    @property
    def prefill(self) -> PrefillBatch | None:
        """The last prefill line."""
        start = self._last(b"Prefill batch")
        return None if start is None else prefill_batch(self._line(start), self.time, self.rank)

    @property
    def joined(self) -> list[PrefillBatch]:
        """The prefill lines after the last decode line: what joins the batch that it printed."""
        text = self.text[self._last(b"Decode batch") or 0 :]
        start = self._prefix + b"Prefill batch"
        found = [line for line in text.split(b"\n") if line.startswith(start)]
        return [prefill_batch(line[len(self._prefix) :], self.time, self.rank) for line in found]

    @property
    def new_sequences(self) -> int:
        """`#new-seq` of all prefill lines."""
        if self.prefills == 1 and self.joined_sequences:
            return self.joined_sequences
        found = _SEQUENCES.findall(self.text)
        try:
            return sum(map(_NUMBERS.__getitem__, found))
        except KeyError:
            return sum(map(int, found))

    def events(self) -> Iterator[DecodeBatch | PrefillBatch]:
        """Give the batch lines one by one."""
        yield from singly(self.text, self._prefix, self.time, self.rank)

    def _last(self, head: bytes) -> int | None:
        """Find the last line that has this head behind the prefix."""
        start = self._prefix + head
        if (found := self.text.rfind(b"\n" + start)) >= 0:
            return found + 1 + len(self._prefix)
        return len(self._prefix) if self.text.startswith(start) else None

    def _line(self, start: int) -> bytes:
        return self.text[start : self.text.index(b"\n", start)]


def singly(text: bytes, prefix: bytes, time: float, rank: Rank) -> Iterator[DecodeBatch | PrefillBatch]:
    """Give the batch lines of a row's text one by one."""
    decode, prefill, end = prefix + b"Decode batch", prefix + b"Prefill batch", len(prefix)
    for line in text.split(b"\n"):
        if line.startswith(decode):
            yield decode_batch(line[end:], time, rank)
        elif line.startswith(prefill):
            yield prefill_batch(line[end:], time, rank)
