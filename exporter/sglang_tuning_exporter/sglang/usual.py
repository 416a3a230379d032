"""The usual lines of a whole block at once: access lines, and batch lines in the layouts that most servers print.

One expression reads the block and gives one row a line; what it does not know it hands out whole. Between two batch
lines of one scheduler with the same printed time nothing happens that time could weigh, so only the last of each kind
is read field by field; of all others it is enough to count.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeAlias

from sglang_tuning_exporter.sglang.events import BatchRun, DecodeBatch, PrefillBatch, Rank

if TYPE_CHECKING:
    from collections.abc import Callable

# prefix, decode body, `True|False`, prefill body, #new-seq, #new-token, #cached-token, any other line with the newline
# before it. An access line has a prefix and nothing else.
Row: TypeAlias = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes]
Origin: TypeAlias = tuple[float, Rank]
PREFIX, OTHER = 0, 7

_GRAPH = rb"(?:cuda|cpu|npu|musa) graph: "
_ROW = re.compile(
    rb"\n(?:(\[[^\]\n]{19,60}\] )(?:"
    rb'INFO:     [^"\n]{0,200} - "[^\n]*'
    rb"|(Decode batch[.,] #running-req: \d{1,9}, #token: \d{1,15}, token usage: [01]\.\d\d, "
    rb"(?:" + _GRAPH + rb"(True|False), )?"
    rb"gen throughput \(token/s\): \d{1,9}\.\d\d, #queue-req: \d{1,9}(?:, ?)?)\r?"
    rb"|(Prefill batch[.,] #new-seq: (\d{1,9}), #new-token: (\d{1,9}), #cached-token: (\d{1,12}), "
    rb"token usage: [01]\.\d\d, #running-req: \d{1,9}, #queue-req: \d{1,9}"
    rb"(?:, #pending-token: \d{1,12})?(?:, " + _GRAPH + rb"(?:True|False))?"
    rb"(?:, input throughput \(token/s\): \d{1,9}\.\d\d)?(?:, ?)?)\r?"
    rb"))$|(\n[^\n]*)",
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


class _Sums:
    """What is kept of a scheduler's lines with one printed time until the last of them is known."""

    __slots__ = (
        "decode", "decodes", "eager", "origin", "prefill", "prefill_last", "prefills", "probes", "replayed",
        "sequences", "sequences_before", "tokens", "tokens_before",
    )  # fmt: skip

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.decode = self.prefill = b""
        self.prefill_last = False
        self.decodes = self.replayed = self.eager = self.prefills = self.probes = 0
        self.sequences = self.tokens = 0
        self.sequences_before = self.tokens_before = 0  # until the last decode line

    def event(self) -> BatchRun:
        time, rank = self.origin
        joined = self.prefill_last
        return BatchRun(
            time,
            rank,
            decode_batch(self.decode, time, rank) if self.decode else None,
            prefill_batch(self.prefill, time, rank) if self.prefill else None,
            joined,
            self.decodes,
            self.replayed,
            self.eager,
            self.prefills,
            self.probes,
            self.sequences,
            self.sequences - self.sequences_before if joined else 0,
            self.tokens - self.tokens_before if joined else 0,
        )


def runs(rows: list[Row], origin_of: Callable[[bytes], Origin | None]) -> tuple[list[BatchRun], int]:
    """Put rows that are no other lines together: the runs in the order in which they began, and how many rows were read.

    Stops at the first batch line whose prefix tells no time or whose ranks are not the server's.
    """
    found: dict[bytes, _Sums] = {}
    sums = _Sums((0.0, Rank()))
    last = b""
    read = 0
    for prefix, decode, graph, prefill, sequences, new, cached, _ in rows:
        if decode or prefill:
            if prefix != last:
                known = found.get(prefix)
                if known is None:
                    origin = origin_of(prefix)
                    if origin is None:
                        break
                    known = found[prefix] = _Sums(origin)
                sums, last = known, prefix
            if decode:
                sums.decodes += 1
                sums.decode = decode
                sums.prefill_last = False
                if graph == b"True":
                    sums.replayed += 1
                elif graph:
                    sums.eager += 1
            else:
                if not sums.prefill_last:
                    sums.prefill_last = True
                    sums.sequences_before, sums.tokens_before = sums.sequences, sums.tokens
                sums.prefills += 1
                sums.prefill = prefill
                sums.sequences += int(sequences)
                sums.tokens += int(new) + int(cached)
                if new == b"1" and cached == b"0" and _IDLE in prefill:
                    sums.probes += 1
        read += 1
    return [each.event() for each in found.values()], read
