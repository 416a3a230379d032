"""A server's log as events.

A message counts only when it stands directly behind the line's prefix: request logs, tool names and tracebacks may quote any line of SGLang's. Once batch lines with a printed time
have been seen, one without is somebody else's text.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from sglang_tuning_exporter.sglang import batch_lines
from sglang_tuning_exporter.sglang.events import (
    LINE_KINDS,
    NO_RANK,
    DecodeBatch,
    Event,
    Limits,
    PrefillBatch,
    Rank,
    ServerArgs,
)
from sglang_tuning_exporter.sglang.failure_lines import FailureLines
from sglang_tuning_exporter.sglang.memory_lines import MemoryLines, parse_limits, parse_pool
from sglang_tuning_exporter.sglang.prefix import DAY, Prefix, parse_own_prefix, parse_plain_prefix, strip_own_parts
from sglang_tuning_exporter.sglang.serverargs import parse_server_args
from sglang_tuning_exporter.sglang.wrappers import LONGEST_LINE, after_last_return, glued_line, strip_terminal, unwrap

if TYPE_CHECKING:
    from collections.abc import Callable

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
_DEVICES = {b"cuda": "cuda", b"cpu": "cpu", b"npu": "npu", b"musa": "musa"}


class LogReader:
    """Turns a server's log into events; keeps what must be remembered between lines.

    `counts` are lines by kind (`events.LINE_KINDS`), `unrecognised` counts what a known line holds and this version does not know: `batch_key` (a field), `batch_line`
    and `retraction_line` (a head whose body cannot be read), `server_args`.
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
        """The events of a block of whole lines (the last may lack its newline), in order. Any bytes; never raises."""
        events: list[Event] = []
        append = events.append
        prefixes = self._prefixes
        failures = self._failures
        usual_decode, usual_prefill = batch_lines.usual_decode, batch_lines.usual_prefill
        devices = _DEVICES
        access = decodes = prefills = 0
        lines = block.split(b"\n")
        if not lines[-1]:
            lines.pop()
        before = self._line
        last_time = self._last_time
        for number, line in enumerate(lines, before + 1):
            start = line.find(b"] ", 0, _PREFIX_LENGTH) + 2
            known = prefixes.get(line[:start])
            if known is not None:
                last_time = known[0]
                head = line[start : start + 6]
                if head == b"INFO: ":
                    if b' - "' in line:
                        access += 1
                        continue
                elif head == b"Decode":
                    match = usual_decode(line, start)
                    if match is not None:
                        running, tokens, usage, device, graph, throughput, queued = match.groups()
                        append(
                            DecodeBatch(
                                known[0],
                                known[1],
                                int(running),
                                int(queued),
                                int(tokens),
                                float(usage),
                                None,
                                None,
                                graph == b"True" if graph else None,
                                devices[device] if device else None,
                                float(throughput),
                            )
                        )
                        decodes += 1
                        failures.serving = self._timed = True
                        continue
                elif head == b"Prefil":
                    match = usual_prefill(line, start)
                    if match is not None:
                        sequences, new, cached, usage, running, queued, pending, throughput = match.groups()
                        append(
                            PrefillBatch(
                                known[0],
                                known[1],
                                int(sequences),
                                int(new),
                                int(cached),
                                int(running),
                                int(queued),
                                int(pending) if pending else None,
                                float(usage),
                                None,
                                None,
                                float(throughput) if throughput else None,
                            )
                        )
                        prefills += 1
                        failures.serving = self._timed = True
                        continue
            self._line = number
            self._last_time = last_time
            self.counts[self._read(line, events)] += 1
            last_time = self._last_time
        self._line = before + len(lines)
        self._last_time = last_time
        self.counts["access"] += access
        self.counts["decode"] += decodes
        self.counts["prefill"] += prefills
        return events

    def _read(self, line: bytes, events: list[Event]) -> str:
        """One physical line, slowly: its kind, and its events appended."""
        if len(line) > LONGEST_LINE:
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
        elif prefix.plain:
            key = text[: prefix.end]
            if key[-2:] == b"] " and len(key) <= _PREFIX_LENGTH:
                if len(self._prefixes) >= _PREFIXES_KEPT:
                    self._prefixes.clear()
                self._prefixes[key] = (time, prefix.rank)
        if time is not None:
            self._last_time = time
        timed = prefix.time is not None or prefix.clock is not None
        return self._read_message(text[prefix.end :], time, prefix.rank, events, timed=timed)

    def _roll(self, clock: float) -> float:
        """A time without a date (0.3.0) as seconds since the first day's midnight."""
        last = self._clock
        if last is not None:
            if clock < last - _NOON:
                self._day += 1
            elif last < _JITTER and clock > DAY - _JITTER and self._day:
                return (self._day - 1) * DAY + clock
        self._clock = clock
        return self._day * DAY + clock

    def _read_message(self, message: bytes, time: float | None, rank: Rank, events: list[Event], *, timed: bool) -> str:
        if message[:1] in (b"\x1b", b"\x00"):
            message = strip_terminal(message)
        if _ACCESS.match(message):
            return "access"
        if _REQUEST.match(message):
            return "request"
        known = _HEADS.get(message[:6])
        if known is None and (start := strip_own_parts(message, 0)):
            message = message[start:]
            known = _HEADS.get(message[:6])
            if _REQUEST.match(message):
                return "request"
        if self._timed and not timed:
            return "other"
        if known is not None and message.startswith(known[1]):
            kind = self._read_part(known[0], message, time, rank, events)
            if kind is not None:
                self._timed = self._timed or (timed and kind != "other")
                return kind
        elif message.startswith(b"Decode out") and batch_lines.is_retraction(message):
            self._timed = self._timed or timed
            return self._read_retraction(message, time, rank, events)
        event = self._failures.parse_message(message, time, rank, self._line)
        if event is not None:
            events.append(event)
            return "liveness" if hasattr(event, "what") else "out_of_memory"
        if message.rstrip().endswith(b"Traceback (most recent call last):"):
            return "traceback"
        if _OTHER_BATCH.match(message):
            self.unrecognised["batch_line"] += 1
        return "other"

    def _read_part(
        self, part: _Part, message: bytes, time: float | None, rank: Rank, events: list[Event]
    ) -> str | None:
        """The kind of a message with a known head; `None` where what follows the head is something else."""
        if part == "decode":
            return self._read_batch(batch_lines.parse_decode, "decode", message, time, rank, events)
        if part == "prefill":
            return self._read_batch(batch_lines.parse_prefill, "prefill", message, time, rank, events)
        if part == "retraction":
            return self._read_retraction(message, time, rank, events)
        event: Event | None
        if part == "args":
            return self._read_args(message, time, rank, events)
        if part == "limits":
            event = parse_limits(message, time, rank)
        elif part == "pool":
            event = parse_pool(message, time, rank)
        else:
            event = self._memory.parse(message, time, rank)
            if event is None and b"failed" in message[:80]:
                return None
        if not self._failures.serving:
            self._failures.starting = True
        if event is None:
            return None if isinstance(event, Limits) else "startup"
        events.append(event)
        return "startup"

    def _read_batch(
        self,
        parse: Callable[[bytes, float | None, Rank], DecodeBatch | PrefillBatch],
        kind: str,
        message: bytes,
        time: float | None,
        rank: Rank,
        events: list[Event],
    ) -> str:
        message = strip_terminal(message)
        try:
            event = parse(message, time, rank)
        except batch_lines.BatchLineError:
            self.unrecognised["batch_line"] += 1
            return "other"
        self.unrecognised["batch_key"] += len(event.unknown_keys)
        if batch_lines.has_unreadable_value(message):
            self.unrecognised["batch_line"] += 1
        self._failures.serving = True
        events.append(event)
        return kind

    def _read_retraction(self, message: bytes, time: float | None, rank: Rank, events: list[Event]) -> str:
        try:
            events.append(batch_lines.parse_retraction(strip_terminal(message), time, rank))
        except batch_lines.BatchLineError:
            self.unrecognised["retraction_line"] += 1
            return "other"
        return "retraction"

    def _read_args(self, message: bytes, time: float | None, rank: Rank, events: list[Event]) -> str:
        self._failures.restart()
        self._memory.restart()
        arguments = parse_server_args(message.decode("utf-8", "replace"))
        if arguments is None:
            self.unrecognised["server_args"] += 1
        else:
            events.append(ServerArgs(time, rank, arguments))
        return "startup"
