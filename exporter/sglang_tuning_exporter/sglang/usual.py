"""The usual lines of a whole block at once: access lines, and batch lines in the layouts that most servers print.

One expression reads the block and gives one row a line; what it does not know it hands out whole. Between two batch
lines of one scheduler with the same printed time nothing happens that time could weigh, so only the last of each kind
is read field by field; of all others it is enough to count.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeAlias

from sglang_tuning_exporter.sglang.events import DecodeBatch, PrefillBatch, Rank

if TYPE_CHECKING:
    from collections.abc import Callable

# prefix, decode body, `True|False`, prefill body, #new-seq, any other line with the newline before it. An access line
# has a prefix and nothing else.
Row: TypeAlias = tuple[bytes, bytes, bytes, bytes, bytes, bytes]
Origin: TypeAlias = tuple[float, Rank]
OTHER = 5

_GRAPH = rb"(?:cuda|cpu|npu|musa) graph: "
_ROW = re.compile(
    rb"\n(?:(\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]\n]{0,40}\] )(?:"
    rb'INFO:     [^ \n]{1,80} - "[^\n]*'
    rb"|(Decode batch[.,] #running-req: \d{1,9}, #token: \d{1,15}, token usage: [01]\.\d\d, "
    rb"(?:" + _GRAPH + rb"(True|False), )?"
    rb"gen throughput \(token/s\): \d{1,9}\.\d\d, #queue-req: \d{1,9}(?:, ?)?)"
    rb"|(Prefill batch[.,] #new-seq: (\d{1,9}), #new-token: \d{1,9}, #cached-token: \d{1,12}, "
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
_PROBE = b"#new-token: 1, #cached-token: 0, "
_IDLE = b"#running-req: 0, #queue-req: 0"
_SHARES = {b"%d.%02d" % divmod(share, 100): share / 100 for share in range(101)}


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
    event = DecodeBatch(time, rank, int(running), int(queued), int(tokens), _SHARES.get(usage) or float(usage))
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
    event.full_usage = _SHARES.get(usage) or float(usage)
    if pending:
        event.pending_tokens = int(pending)
    if throughput:
        event.input_throughput = float(throughput)
    return event


class BatchRun:
    """Batch lines of one scheduler in one printed second, as one observation and the sums over all of them.

    Nothing that is weighed by time is lost: between lines of the same printed second no time passes. Only lines in
    their usual layout, none of them suspect, are put together. The last line of each kind is read when it is asked for.
    """

    __slots__ = (
        "_decode", "_decode_body", "_joined", "_prefill", "_prefill_body",
        "decodes", "eager", "new_sequences", "prefills", "probes", "rank", "replayed", "time",
    )  # fmt: skip

    def __init__(self, origin: Origin) -> None:
        self.time, self.rank = origin
        self.decodes = 0  # lines
        self.replayed = 0  # of these with a captured graph
        self.eager = 0  # and without
        self.prefills = 0  # lines
        self.probes = 0  # of these health probes (`PrefillBatch.is_health_probe`)
        self.new_sequences = 0  # `#new-seq` of all prefill lines
        self._decode_body = self._prefill_body = b""
        self._decode: DecodeBatch | None = None
        self._prefill: PrefillBatch | None = None
        self._joined: list[bytes] = []  # bodies of the prefill lines after the last decode line

    def __repr__(self) -> str:
        return f"BatchRun({self.time}, {self.rank}, decode={self.decode}, prefill={self.prefill})"

    @property
    def prefill_last(self) -> bool:
        """Whether the last of all these lines is a prefill line."""
        return bool(self._joined)

    @property
    def decode(self) -> DecodeBatch | None:
        """The last decode line."""
        if self._decode is None and self._decode_body:
            self._decode = decode_batch(self._decode_body, self.time, self.rank)
        return self._decode

    @property
    def prefill(self) -> PrefillBatch | None:
        """The last prefill line."""
        if self._prefill is None and self._prefill_body:
            self._prefill = prefill_batch(self._prefill_body, self.time, self.rank)
        return self._prefill

    @property
    def joined(self) -> list[PrefillBatch]:
        """The prefill lines after the last decode line: what joins the batch that it printed."""
        return [prefill_batch(body, self.time, self.rank) for body in self._joined]

    def add_decode(self, body: bytes, graph: bytes) -> None:
        """Take a row's decode line."""
        self.decodes += 1
        self._decode_body = body
        if self._joined:
            self._joined = []
        if graph == b"True":
            self.replayed += 1
        elif graph:
            self.eager += 1

    def add_prefill(self, body: bytes, sequences: bytes) -> None:
        """Take a row's prefill line."""
        self.prefills += 1
        self.new_sequences += 1 if sequences == b"1" else int(sequences)
        self._prefill_body = body
        self._joined.append(body)
        if _PROBE in body and _IDLE in body:
            self.probes += 1


def runs(rows: list[Row], origin_of: Callable[[bytes], Origin | None]) -> tuple[list[BatchRun], int]:
    """Put rows that are no other lines together: the runs in the order in which they began, and how many rows were read.

    Stops at the first batch line whose prefix tells no time or whose ranks are not the server's.
    """
    found: dict[bytes, BatchRun] = {}
    run: BatchRun | None = None
    last = b""
    read = 0
    for prefix, decode, graph, prefill, sequences, _ in rows:
        if decode or prefill:
            if prefix != last or run is None:
                run = found.get(prefix)
                if run is None:
                    origin = origin_of(prefix)
                    if origin is None:
                        break
                    run = found[prefix] = BatchRun(origin)
                last = prefix
            if decode:
                run.add_decode(decode, graph)
            else:
                run.add_prefill(prefill, sequences)
        read += 1
    return list(found.values()), read
