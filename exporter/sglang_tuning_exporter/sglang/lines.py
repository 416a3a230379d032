"""A server's log as events.

A message counts only when it stands directly behind the line's prefix: request logs, tool names and tracebacks may
quote any line of SGLang's. Once lines with a printed time have been seen, one without is somebody else's text.
"""

from __future__ import annotations

import re
from typing import Literal

from sglang_tuning_exporter.sglang import batch_lines
from sglang_tuning_exporter.sglang.events import (
    LINE_KINDS,
    NO_RANK,
    DecodeBatch,
    Event,
    Liveness,
    PrefillBatch,
    Rank,
    ServerArgs,
)
from sglang_tuning_exporter.sglang.failure_lines import TRACEBACK, FailureLines
from sglang_tuning_exporter.sglang.memory_lines import MemoryLines, parse_limits, parse_pool
from sglang_tuning_exporter.sglang.prefix import DAY, Prefix, parse_own_prefix, parse_plain_prefix, strip_own_parts
from sglang_tuning_exporter.sglang.serverargs import parse_server_args
from sglang_tuning_exporter.sglang.wrappers import LONGEST_LINE, after_last_return, glued_line, strip_terminal, unwrap

_PREFIXES_KEPT = 4096
_PREFIX_LENGTH = 64
_STREAMS = ("stdout", "stderr")
_NOON = DAY / 2
_JITTER = 120.0  # seconds around midnight within which processes may write out of order

_ACCESS = re.compile(rb'(?:INFO: +)?(?:\S{1,80} - )?"(?:GET|POST|PUT|DELETE|HEAD|OPTIONS|PATCH) ')
_REQUEST = re.compile(
    rb"(?:Receive|Finish)(?: \w{1,20})?: obj=|in=[\w.<>]{0,60}(?:ReqInput|Req)\(|\{[^\n]{0,200}\"event\": ?\"request\."
)
_OTHER_BATCH = re.compile(rb"[A-Z]\w{2,20} batch(?: ?\[\d{1,12}\])?[.,] ?#[\w-]{1,40}: ?\d")

_TERMINAL = (b"\x1b", b"\x00")
_Part = Literal["decode", "prefill", "retraction", "pool", "memory", "limits", "args"]
_HEADS: dict[bytes, tuple[_Part, bytes]] = {
    b"Decode": ("decode", b"Decode batch"),
    b"#runni": ("decode", b"#running-req: "),
    b"Prefil": ("prefill", b"Prefill batch"),
    b"decode": ("retraction", b"decode out of memory happened"),
    b"KV cac": ("retraction", b"KV cache pool is full"),
    b"Testin": ("retraction", b"Testing retraction"),
    b"KV Cac": ("pool", b"KV Cache "),
    b"Post-c": ("pool", b"Post-capture KV sizing: "),
    b"Memory": ("memory", b"Memory pool end."),
    b"Load w": ("memory", b"Load weight "),
    b"Captur": ("memory", b"Capture "),
    b"max_to": ("limits", b"max_total_num_tokens="),
    b"server": ("args", b"server_args="),
}
_NO_HEAD: tuple[_Part, bytes] = ("memory", b"\n")
_USUAL_DECODE = batch_lines.usual_decode
_USUAL_PREFILL = batch_lines.usual_prefill
# Uvicorn's lines carry no rank: `[YYYY-MM-DD HH:MM:SS] INFO:     1.2.3.4:5 - "GET …`.
_ACCESS_PLACE = slice(22, 32)
_ACCESS_START = b"INFO:     "
_DEVICES = {b"cuda": "cuda", b"cpu": "cpu", b"npu": "npu", b"musa": "musa"}


class LogReader:
    """Turns a server's log into events; keeps what must be remembered between lines.

    `counts` are lines by kind (`events.LINE_KINDS`). `unrecognised` counts what could not be read: `batch_key` (a field
    no release of the census has), `batch_line` and `retraction_line` (a known head whose body cannot be read, or a
    batch line of an unknown sort), `server_args`.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = dict.fromkeys(LINE_KINDS, 0)
        self.unrecognised: dict[str, int] = {"batch_key": 0, "batch_line": 0, "retraction_line": 0, "server_args": 0}
        self._prefixes: dict[bytes, tuple[float | None, Rank]] = {}
        self._partial: dict[str, tuple[bytearray, float | None]] = {}
        self._failures = FailureLines()
        self._memory = MemoryLines()
        self._line = 0
        self._timed = False
        self._day = 0
        self._clock: float | None = None
        self._last_time: float | None = None

    def feed(self, block: bytes) -> list[Event]:
        """Read a block of whole lines (the last may lack its newline): its events, in order. Never raises."""
        events: list[Event] = []
        append = events.append
        prefixes = self._prefixes
        before = self._line
        access = decodes = prefills = 0
        lines = block.split(b"\n")
        if not lines[-1]:
            lines.pop()
        # The usual lines are read here without a call: half of a busy log is access lines, most others are batches.
        for number, line in enumerate(lines, before + 1):
            if line[_ACCESS_PLACE] == _ACCESS_START and line[:1] == b"[" and b' - "' in line and b"] " in line[:24]:
                access += 1
                continue
            start = line.find(b"] ", 0, _PREFIX_LENGTH) + 2
            known = prefixes.get(line[:start]) or self._learn(line, start)
            if known is not None:
                self._last_time = time = known[0]
                if match := _USUAL_DECODE(line, start):
                    running, tokens, usage, device, graph, throughput, queued = match.groups()
                    decode = DecodeBatch(time, known[1], int(running), int(queued), int(tokens), float(usage))
                    if graph:
                        decode.graph = graph == b"True"
                        decode.graph_device = _DEVICES[device]
                    decode.generation_throughput = float(throughput)
                    append(decode)
                    decodes += 1
                    self._failures.serving = self._timed = True
                    continue
                if match := _USUAL_PREFILL(line, start):
                    sequences, new, cached, usage, running, queued, pending, throughput = match.groups()
                    prefill = PrefillBatch(
                        time, known[1], int(sequences), int(new), int(cached), int(running), int(queued)
                    )
                    prefill.full_usage = float(usage)
                    if pending:
                        prefill.pending_tokens = int(pending)
                    if throughput:
                        prefill.input_throughput = float(throughput)
                    append(prefill)
                    prefills += 1
                    self._failures.serving = self._timed = True
                    continue
            self._line = number
            self.counts[self._read(line, events)] += 1
        self._line = before + len(lines)
        self.counts["access"] += access
        self.counts["decode"] += decodes
        self.counts["prefill"] += prefills
        return events

    def _learn(self, line: bytes, start: int) -> tuple[float | None, Rank] | None:
        """Remember what a prefix that ends at `start` means, where it is SGLang's own and carries its date."""
        if line[:1] != b"[" or start < 2:
            return None
        prefix = parse_plain_prefix(line)
        if prefix is None or prefix.end != start or prefix.time is None:
            return None
        if len(self._prefixes) >= _PREFIXES_KEPT:
            self._prefixes.clear()
        known = self._prefixes[line[:start]] = (prefix.time, prefix.rank)
        return known

    def _read(self, line: bytes, events: list[Event]) -> str:
        """One physical line, slowly: its kind, and its events appended."""
        if len(line) > LONGEST_LINE:
            line = line.lstrip(b"\x00") if line[:1] == b"\x00" else line
            line = line[:LONGEST_LINE]
        prefix = parse_plain_prefix(line)
        if prefix is not None:
            return self._read_prefixed(line, prefix, None, events)
        unwrapped = unwrap(line)
        text, time = unwrapped.text, unwrapped.time
        if unwrapped.stream is not None:
            stream = unwrapped.stream if unwrapped.stream in _STREAMS else ""
            held = self._partial.pop(stream, None)
            if held is not None:
                held[0].extend(text[: LONGEST_LINE - len(held[0])])
                text, time = bytes(held[0]), held[1]
            if unwrapped.partial:
                self._partial[stream] = (bytearray(text), time)
                return "other"
        return self._read_text(text, time, events)

    def _read_text(self, text: bytes, outer_time: float | None, events: list[Event]) -> str:
        prefix = parse_plain_prefix(text)
        if prefix is None and b"\r" in text:
            text = after_last_return(text)
            prefix = parse_plain_prefix(text)
        if prefix is None and _ACCESS.match(text):
            return "access"
        if prefix is None:
            prefix = parse_own_prefix(text)
        if prefix is None and (start := glued_line(text)):
            text = text[start:]
            prefix = parse_plain_prefix(text)
        if prefix is not None:
            return self._read_prefixed(text, prefix, outer_time, events)
        kind, event = self._failures.parse_bare(
            text, outer_time if outer_time is not None else self._last_time, self._line
        )
        if event is not None:
            events.append(event)
        if kind is not None:
            return kind
        return self._read_message(text, outer_time, NO_RANK, events, timed=False)

    def _read_prefixed(self, text: bytes, prefix: Prefix, outer_time: float | None, events: list[Event]) -> str:
        time = prefix.time
        if prefix.clock is not None:
            time = self._roll(prefix.clock)
        elif time is None:
            time = outer_time
        if time is not None:
            self._last_time = time
        timed = prefix.time is not None or prefix.clock is not None
        return self._read_message(text[prefix.end :], time, prefix.rank, events, timed=timed)

    def _roll(self, clock: float) -> float:
        """Count a time without a date (0.3.0) from the first day's midnight, seconds."""
        last = self._clock
        if last is not None:
            if clock < last - _NOON:
                self._day += 1
            elif last < _JITTER and clock > DAY - _JITTER and self._day:
                return (self._day - 1) * DAY + clock
        self._clock = clock
        return self._day * DAY + clock

    def _read_message(self, message: bytes, time: float | None, rank: Rank, events: list[Event], *, timed: bool) -> str:
        """Read what stands behind a prefix, or a line without one."""
        if message[:1] in _TERMINAL:
            message = strip_terminal(message)
        if message[:6] not in _HEADS:
            if _ACCESS.match(message):
                return "access"
            message = message[strip_own_parts(message, 0) :]
            if _REQUEST.match(message):
                return "request"
        if self._timed and not timed:
            return "other"
        kind = self._read_part(message, time, rank, events)
        if kind is None:
            return self._read_failure(message, time, rank, events)
        self._timed = self._timed or (timed and kind != "other")
        return kind

    def _read_part(self, message: bytes, time: float | None, rank: Rank, events: list[Event]) -> str | None:
        """Read a message with a known head; `None` where it has none, or what follows the head is something else."""
        part, head = _HEADS.get(message[:6], _NO_HEAD)
        if not message.startswith(head):
            return (
                "retraction"
                if message.startswith(b"Decode out") and self._retract(message, time, rank, events)
                else None
            )
        match part:
            case "decode" | "prefill":
                return self._read_batch(part, message, time, rank, events)
            case "retraction":
                return "retraction" if self._retract(message, time, rank, events) else "other"
            case "args":
                return self._read_args(message, time, rank, events)
            case _:
                return self._read_start(part, message, time, rank, events)

    def _read_start(
        self, part: _Part, message: bytes, time: float | None, rank: Rank, events: list[Event]
    ) -> str | None:
        event: Event | None
        if part == "limits":
            event = parse_limits(message, time, rank)
        elif part == "pool":
            event = parse_pool(message, time, rank)
        else:
            event = self._memory.parse(message, time, rank)
            if event is None and b"failed" in message[:80]:
                return None
        self._failures.starting = True
        if event is not None:
            events.append(event)
        return "startup"

    def _read_failure(self, message: bytes, time: float | None, rank: Rank, events: list[Event]) -> str:
        event = self._failures.parse_message(message, time, rank, self._line)
        if event is not None:
            events.append(event)
            return "liveness" if isinstance(event, Liveness) else "out_of_memory"
        if message.rstrip().endswith(TRACEBACK):
            return "traceback"
        if _OTHER_BATCH.match(message):
            self.unrecognised["batch_line"] += 1
        return "other"

    def _read_batch(
        self, part: Literal["decode", "prefill"], message: bytes, time: float | None, rank: Rank, events: list[Event]
    ) -> str:
        message = strip_terminal(message)
        event: DecodeBatch | PrefillBatch
        try:
            if part == "decode":
                event = batch_lines.parse_decode(message, time, rank)
            else:
                event = batch_lines.parse_prefill(message, time, rank)
        except batch_lines.BatchLineError:
            self.unrecognised["batch_line"] += 1
            return "other"
        self.unrecognised["batch_key"] += len(event.unknown_keys)
        if batch_lines.has_unreadable_value(message):
            self.unrecognised["batch_line"] += 1
        self._failures.serving = True
        events.append(event)
        return part

    def _retract(self, message: bytes, time: float | None, rank: Rank, events: list[Event]) -> bool:
        message = strip_terminal(message)
        if not batch_lines.is_retraction(message):
            return False
        try:
            events.append(batch_lines.parse_retraction(message, time, rank))
        except batch_lines.BatchLineError:
            self.unrecognised["retraction_line"] += 1
            return False
        return True

    def _read_args(self, message: bytes, time: float | None, rank: Rank, events: list[Event]) -> str:
        self._failures.restart()
        self._memory.restart()
        arguments = parse_server_args(message.decode("utf-8", "replace"))
        if arguments is None:
            self.unrecognised["server_args"] += 1
        else:
            events.append(ServerArgs(time, rank, arguments))
        return "startup"
