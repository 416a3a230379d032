"""The usual lines of a whole block at once: access lines, and batch lines in the layouts that most servers print.

One expression reads the block and gives one row a line; what it does not know it hands out whole. Between two batch
lines of one scheduler with the same printed time nothing happens that time could weigh, so only the last of each kind
is read field by field; of all others it is enough to count.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeAlias

from sglang_tuning_exporter.sglang.events import NO_RANK, BatchRun, DecodeBatch, PrefillBatch, Rank

if TYPE_CHECKING:
    from collections.abc import Callable

# prefix, decode body, `True|False`, prefill body, #new-seq, #new-token, #cached-token, any other line with the newline
# before it. An access line has a prefix and nothing else.
Row: TypeAlias = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes]
Origin: TypeAlias = tuple[float, Rank]
PREFIX, OTHER = 0, 7

_GRAPH = rb"(?:cuda|cpu|npu|musa) graph: "
_ROW = re.compile(
    rb"\n(?:(\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]\n]{0,40}\] )(?:"
    rb'INFO:     [^ \n]{1,80} - "[^\n]*'
    rb"|(Decode batch[.,] #running-req: \d{1,9}, #token: \d{1,15}, token usage: [01]\.\d\d, "
    rb"(?:" + _GRAPH + rb"(True|False), )?"
    rb"gen throughput \(token/s\): \d{1,9}\.\d\d, #queue-req: \d{1,9}(?:, ?)?)"
    rb"|(Prefill batch[.,] #new-seq: (\d{1,9}), #new-token: (\d{1,9}), #cached-token: (\d{1,12}), "
    rb"token usage: [01]\.\d\d, #running-req: \d{1,9}, #queue-req: \d{1,9}"
    rb"(?:, #pending-token: \d{1,12})?(?:, " + _GRAPH + rb"(?:True|False))?"
    rb"(?:, input throughput \(token/s\): \d{1,9}\.\d\d)?(?:, ?)?)"
    rb"))\r?$|(\n[^\n]*)",
    re.MULTILINE,
)
# The figures of a body that the expression above has found.
_DECODE = re.compile(
    rb"Decode batch[.,] #running-req: (\d+), #token: (\d+), token usage: ([\d.]+), (?:(\w+) graph: (\w+), )?"
    rb"gen throughput \(token/s\): ([\d.]+), #queue-req: (\d+)"
)
_PREFILL = re.compile(
    rb"Prefill batch[.,] #new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+), token usage: ([\d.]+), "
    rb"#running-req: (\d+), #queue-req: (\d+)(?:, #pending-token: (\d+))?(?:, \w+ graph: \w+)?"
    rb"(?:, input throughput \(token/s\): ([\d.]+))?"
)
_match_decode: Callable[[bytes], re.Match[bytes] | None] = _DECODE.match
_match_prefill: Callable[[bytes], re.Match[bytes] | None] = _PREFILL.match
_DEVICES = {b"cuda": "cuda", b"cpu": "cpu", b"npu": "npu", b"musa": "musa"}
_IDLE = b"#running-req: 0, #queue-req: 0"


def split(block: bytes) -> list[Row]:
    """Give one row for each line of a block; the last line may lack its newline."""
    if not block:
        return []
    return _ROW.findall(b"\n" + (block[:-1] if block[-1:] == b"\n" else block))


def line(row: Row) -> bytes:
    """Give the line back that a row was made of; an access line's prefix stands for all of it."""
    return row[OTHER][1:] or row[0] + row[1] + row[3]


def decode_batch(body: bytes, time: float, rank: Rank) -> DecodeBatch:
    """Read a row's decode body."""
    match = _match_decode(body)
    assert match is not None
    running, tokens, usage, device, graph, throughput, queued = match.groups()
    event = DecodeBatch(time, rank, int(running), int(queued), int(tokens), float(usage))
    if graph:
        event.graph = graph == b"True"
        event.graph_device = _DEVICES[device]
    event.generation_throughput = float(throughput)
    return event


def prefill_batch(body: bytes, time: float, rank: Rank) -> PrefillBatch:
    """Read a row's prefill body."""
    match = _match_prefill(body)
    assert match is not None
    sequences, new, cached, usage, running, queued, pending, throughput = match.groups()
    event = PrefillBatch(time, rank, int(sequences), int(new), int(cached), int(running), int(queued))
    event.full_usage = float(usage)
    if pending:
        event.pending_tokens = int(pending)
    if throughput:
        event.input_throughput = float(throughput)
    return event


def runs(rows: list[Row], origin_of: Callable[[bytes], Origin | None]) -> tuple[list[BatchRun], int]:
    """Put rows that are no other lines together: the runs in the order in which they began, and how many rows were read.

    Stops at the first batch line whose prefix tells no time or whose ranks are not the server's.
    """
    found: dict[bytes, _Open] = {}
    run = _NOTHING
    last = b""
    read = 0
    for row in rows:
        prefix, decode, graph, prefill, sequences, new, _, _ = row
        if decode or prefill:
            if prefix != last:
                known = found.get(prefix)
                if known is None:
                    origin = origin_of(prefix)
                    if origin is None:
                        break
                    known = found[prefix] = _Open(origin)
                run, last = known, prefix
            if decode:
                run.decodes += 1
                run.decode = decode
                if run.joined:
                    run.joined = []
                if graph == b"True":
                    run.replayed += 1
                elif graph:
                    run.eager += 1
            else:
                run.prefills += 1
                run.sequences += 1 if sequences == b"1" else int(sequences)
                run.prefill = prefill
                run.joined.append(row)
                if new == b"1" and _IDLE in prefill:
                    run.probes += row[6] == b"0"
        read += 1
    return [each.run() for each in found.values()], read


class _Open:
    """What is kept of a scheduler's lines with one printed time until the last of them is known."""

    __slots__ = (
        "decode", "decodes", "eager", "joined", "prefill", "prefills", "probes", "rank", "replayed", "sequences", "time",
    )  # fmt: skip

    def __init__(self, origin: Origin) -> None:
        self.time, self.rank = origin
        self.decode = self.prefill = b""
        self.decodes = self.replayed = self.eager = self.prefills = self.probes = self.sequences = 0
        self.joined: list[Row] = []  # prefill lines after the last decode line

    def run(self) -> BatchRun:
        time, rank, joined = self.time, self.rank, self.joined
        return BatchRun(
            time,
            rank,
            decode_batch(self.decode, time, rank) if self.decode else None,
            prefill_batch(self.prefill, time, rank) if self.prefill else None,
            bool(joined),
            self.decodes,
            self.replayed,
            self.eager,
            self.prefills,
            self.probes,
            self.sequences,
            sum([int(row[4]) for row in joined]),
            sum([int(row[5]) + int(row[6]) for row in joined]),
        )


_NOTHING = _Open((0.0, NO_RANK))
