"""The message of a log line as an event: the line without its wrapping, from its prefix on.

A message counts only directly after the line's prefix: request logs, tool names and tracebacks may quote any line of SGLang's. Once
lines have a printed time, a line without one is not SGLang's.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from sglang_tuning_exporter.sglang.args.printed import parse_server_args
from sglang_tuning_exporter.sglang.events import (
    Event,
    Liveness,
    Pause,
    Rank,
    Refusal,
    Rejection,
    ServerArgs,
    ServerError,
    TooLong,
)
from sglang_tuning_exporter.sglang.log import batch_lines
from sglang_tuning_exporter.sglang.log.failure_lines import TRACEBACK, FailureLines
from sglang_tuning_exporter.sglang.log.memory_lines import MemoryLines, parse_limits, parse_pool
from sglang_tuning_exporter.sglang.log.prefix import DAY, Prefix, parse_plain_prefix, strip_logger_parts
from sglang_tuning_exporter.sglang.log.raw_text import SuspectText
from sglang_tuning_exporter.sglang.log.stamps import dated
from sglang_tuning_exporter.sglang.log.terminal import LONGEST_LINE, strip_terminal

_NOON = DAY / 2
_JITTER = 120.0  # seconds around midnight within which processes may write out of order

_FAILED = re.compile(rb'(?:INFO: +)?(?:\S{1,80} - )?"([A-Z]{3,7}) [^"\n]{1,2000} HTTP/\d(?:\.\d)?" 50([03])\b')
_EXCEPTION = b"Exception in ASGI application"  # uvicorn prints it of each request that an exception ended
_PAUSED = re.compile(rb'(?:INFO: +)?(?:\S{1,80} - )?"POST /(pause|continue)_generation HTTP/\d(?:\.\d)?" 200\b')
ACCESS = re.compile(rb'(?:INFO: +)?(?:\S{1,80} - )?"(?:GET|POST|PUT|DELETE|HEAD|OPTIONS|PATCH) ')
_REQUEST = re.compile(
    rb"(?:Receive|Finish)(?: \w{1,20})?: obj=|in=[\w.<>]{0,60}(?:ReqInput|Req)\(|\{[^\n]{0,200}\"event\": ?\"request\."
)
# validate_input_length, srt/managers/utils.py: the first as an error of the request, the second with --allow-auto-truncate.
_TOO_LONG = re.compile(
    rb"Input length \((\d{1,9}) tokens\) exceeds the maximum allowed length \((\d{1,9}) tokens\)\."
    rb"|Request length is longer than the KV cache pool size or the max context length\. Truncated\."
    rb" len\(req\.origin_input_ids\)=(\d{1,9}), (?:self\.)?max_req_input_len=(\d{1,9})\."
    # _validate_one_request, srt/managers/tokenizer_manager.py; as an error it stands behind the place of srt/entrypoints/http_server.py.
    rb"|(?:\[http_server\] Error: )?The input \((\d{1,9}) tokens\) is longer than the model's context length \((\d{1,9}) tokens\)\."
    rb"(?: Truncating the input\.)?$"
    rb"|\[http_server\] Error: Requested token count exceeds the model's maximum context length of (\d{1,9}) tokens\."
    rb" You requested a total of (\d{1,9}) tokens: [\w ,.]{0,200}limit\.$"
)
# Req.set_finish_with_abort, srt/managers/schedule_batch.py: an error of one request; the grammar's is of srt/constrained/grammar_manager.py.
_REFUSED = re.compile(
    rb"(?:(Grammar-based generation \([\w, ]{1,80}\) is not supported when the server is launched with --grammar-backend none)"
    rb"|(?!Aborted by AbortReq)[A-Z][^\n]{8,2000}?), self\.rid='[\w-]{1,80}'$"
)
_OTHER_BATCH = re.compile(rb"[A-Z]\w{2,20} batch(?: ?\[\d{1,12}\])?[.,] ?#[\w-]{1,40}: ?\d")

_TERMINAL = (b"\x1b", b"\x00")
_Part = Literal["decode", "prefill", "retraction", "pool", "memory", "limits", "args"]
_HEADS: dict[bytes, tuple[_Part, bytes]] = {
    b"Decode": ("decode", b"Decode batch"),
    b"#runni": ("decode", b"#running-req: "),
    b"Prefil": ("prefill", b"Prefill batch"),
    b"new fi": ("prefill", b"new fill batch. "),
    b"decode": ("retraction", b"decode out of memory happened"),
    b"KV cac": ("retraction", b"KV cache pool is full"),
    b"Testin": ("retraction", b"Testing retraction"),
    b"KV Cac": ("pool", b"KV Cache "),
    b"Post-c": ("pool", b"Post-capture KV sizing: "),
    b"Memory": ("memory", b"Memory pool end."),
    b"Mamba ": ("memory", b"Mamba Cache is allocated."),
    b"Load w": ("memory", b"Load weight "),
    b"Captur": ("memory", b"Capture "),
    b"max_to": ("limits", b"max_total_num_tokens="),
    b"max_ru": ("limits", b"max_running_requests "),
    b"server": ("args", b"server_args="),
}
_NO_HEAD: tuple[_Part, bytes] = ("memory", b"\n")


class MessageReader:
    """Reads messages, with the memory that is needed between them.

    `unrecognised` counts what could not be read: `batch_key` (a field no release of the census has), `batch_line` and `retraction_line` (a
    known head whose body cannot be read, or a batch line of an unknown sort), `server_args`.
    """

    def __init__(self) -> None:
        self.unrecognised: dict[str, int] = {"batch_key": 0, "batch_line": 0, "retraction_line": 0, "server_args": 0}
        self._failures = FailureLines()
        self._memory = MemoryLines()
        self._cut_args: tuple[ServerArgs, bytes] | None = None  # of the line before: the next one may be the rest
        self._suspicion = SuspectText()
        self._exceptions_due = 0  # access lines with status 500 whose exception was not printed yet
        self._line = 0
        self._has_times = False
        self._may_hold_raw_text = True  # requests may have put raw text into the log: until a start is read, and again from its first batch on
        self._form_is_known = False  # a line of SGLang's was read, so the form of the stream is known
        self._day = 0
        self._clock: float | None = None
        self._last_time: float | None = None

    def _is_suspect(self, time: float | None) -> bool:
        """Whether raw text may have produced this line."""
        return self._suspicion.is_suspect(time, self._line)

    def _read_bare(self, text: bytes, outer_time: float | None, events: list[Any]) -> str | None:
        """Read a line without a prefix as part of a traceback; `None` where it belongs to none."""
        time = dated(outer_time)[0]
        kind, event = self._failures.parse_bare(text, self._last_time if time is None else time, self._line)
        if event is not None:
            event.suspect = (event.suspect and self._may_hold_raw_text) or self._suspicion.doubtful
            events.append(event)
        return kind

    def _read_prefixed(self, text: bytes, prefix: Prefix, outer_time: float | None, events: list[Any]) -> str:
        """Read a line from its prefix on, and the line that another process wrote into its end, if any."""
        start = prefix.end
        second = start + behind if (behind := batch_lines.start_of_next_line(text[start:])) else len(text)
        kind = self._read_one(text[start:second], prefix, outer_time, events)
        if behind and (other := parse_plain_prefix(text, second)) is not None:
            self._read_one(text[other.end :], other, outer_time, events)
        return kind

    def _read_one(self, message: bytes, prefix: Prefix, outer_time: float | None, events: list[Any]) -> str:
        time, clock = prefix.time, prefix.clock
        if time is None and clock is None:
            time, clock = dated(outer_time)
        if clock is not None:
            time = self._since_first_midnight(clock)
        if time is not None:
            self._last_time = time
        if self._suspicion.after_sink:
            self._suspicion.advance_to(time, self._line)
        timed = prefix.time is not None or prefix.clock is not None
        return self._read_message(message, time, prefix.rank, events, timed=timed)

    def _since_first_midnight(self, clock: float) -> float:
        """Return a time without a date (0.3.0) as seconds since the midnight of the first day."""
        last = self._clock
        if last is not None:
            if clock < last - _NOON:
                self._day += 1
            elif last < _JITTER and clock > DAY - _JITTER and self._day:
                return (self._day - 1) * DAY + clock
        self._clock = clock
        return self._day * DAY + clock

    def _read_message(self, message: bytes, time: float | None, rank: Rank, events: list[Event], *, timed: bool) -> str:
        """Read the message after a prefix, or a line without one."""
        cut, self._cut_args = self._cut_args, None
        if cut is not None and not timed and self._read_rest_of_args(message, *cut):
            return "startup"
        if message[:1] in _TERMINAL:
            message = strip_terminal(message)
        if message[:6] not in _HEADS:
            if ACCESS.match(message):
                self._read_access(message, time, rank, events)
                return "access"
            message = strip_logger_parts(message)
            if _REQUEST.match(message):
                return "request"
            self._suspicion.note_message(message, time, self._line)
        if self._has_times and not timed:
            return "other"
        kind = self._read_part(message, time, rank, events)
        if kind is None:
            return self._read_failure(message, time, rank, events)
        self._has_times = self._has_times or (timed and kind != "other")
        self._form_is_known = self._form_is_known or kind != "other"
        return kind

    def _read_access(self, message: bytes, time: float | None, rank: Rank, events: list[Any]) -> None:
        """Read an access line: an event for a request that failed, or a pause; health checks and scrapes are no requests."""
        if failed := _FAILED.match(message):
            is_rejected = failed[2] == b"3"
            self._exceptions_due += not is_rejected
            if failed[1] == b"POST":
                events.append((Rejection if is_rejected else ServerError)(time, rank, self._suspicion.after_known_sink))
        elif pause := _PAUSED.match(message):
            events.append(Pause(time, rank, pause[1] == b"continue", self._suspicion.after_known_sink))

    def _read_exception(self, message: bytes, time: float | None, rank: Rank, events: list[Any]) -> bool:
        """Read uvicorn's line of an exception: a failed request, unless its access line had status 500; that of a stream has 200."""
        if message.rstrip().removeprefix(b"ERROR:").lstrip() != _EXCEPTION:
            return False
        if self._exceptions_due:
            self._exceptions_due -= 1
        else:
            events.append(ServerError(time, rank, self._suspicion.after_known_sink))
        return True

    def _read_part(self, message: bytes, time: float | None, rank: Rank, events: list[Any]) -> str | None:
        """Read a message with a known head; `None` where it has none, or where other words follow the head."""
        part, head = _HEADS.get(message[:6], _NO_HEAD)
        if not message.startswith(head):
            return (
                "retraction"
                if message.startswith(b"Decode out") and self._read_retraction(message, time, rank, events)
                else None
            )
        match part:
            case "decode" | "prefill":
                return self._read_batch(part, message, time, rank, events)
            case "retraction":
                return "retraction" if self._read_retraction(message, time, rank, events) else "other"
            case "args":
                return self._read_args(message, time, rank, events)
            case _:
                return self._read_start(part, message, time, rank, events)

    def _read_start(self, part: _Part, message: bytes, time: float | None, rank: Rank, events: list[Any]) -> str | None:
        event: Event | None
        if part == "limits":
            event = parse_limits(message, time, rank)
        elif part == "pool":
            event = parse_pool(message, time, rank) or parse_limits(message, time, rank)
        else:
            event = self._memory.parse(message, time, rank)
            if event is None and b"failed" in message[:80]:
                return None
        self._failures.starting = True
        if event is not None:
            event.suspect = self._is_suspect(time)
            events.append(event)
        elif part == "limits":
            self._suspicion.note("other", time, self._line)  # cut, so it may contain raw text
        return "startup"

    def _read_failure(self, message: bytes, time: float | None, rank: Rank, events: list[Any]) -> str:
        suspect = self._is_suspect(time)
        event = self._failures.parse_message(message, time, rank, self._line, sure=not suspect)
        if event is not None:
            event.suspect = event.suspect or suspect
            events.append(event)
            return "liveness" if isinstance(event, Liveness) else "out_of_memory"
        if message.rstrip().endswith(TRACEBACK):
            return "traceback"
        if (found := _TOO_LONG.match(message)) is not None:
            most, tokens = sorted(int(number) for number in found.groups() if number is not None)
            events.append(TooLong(time, rank, tokens, most, suspect=suspect))
            return "request"
        if message.endswith(b"'") and (found := _REFUSED.match(message)) is not None:
            events.append(Refusal(time, rank, found[1] is not None, suspect=suspect))
            return "request"
        if self._read_exception(strip_logger_parts(message), time, rank, events):
            return "request"
        if _OTHER_BATCH.match(message):
            self.unrecognised["batch_line"] += 1
        return "other"

    def _read_batch(
        self, part: Literal["decode", "prefill"], message: bytes, time: float | None, rank: Rank, events: list[Any]
    ) -> str:
        message = strip_terminal(message)
        event = (batch_lines.parse_decode if part == "decode" else batch_lines.parse_prefill)(message, time, rank)
        if event is None:
            self.unrecognised["batch_line"] += 1
            return "other"
        self.unrecognised["batch_key"] += len(event.unknown_keys)
        if batch_lines.has_unreadable_value(message):
            self.unrecognised["batch_line"] += 1
        self._failures.serving = self._may_hold_raw_text = True
        event.suspect = self._suspicion.after_known_sink
        events.append(event)
        return part

    def _read_retraction(self, message: bytes, time: float | None, rank: Rank, events: list[Any]) -> bool:
        message = strip_terminal(message)
        if not batch_lines.is_retraction(message):
            return False
        event = batch_lines.parse_retraction(message, time, rank)
        if event is None:
            self.unrecognised["retraction_line"] += 1
            return False
        event.suspect = self._suspicion.after_known_sink
        event.near_raw_text = self._is_suspect(time)
        events.append(event)
        return True

    def _read_args(self, message: bytes, time: float | None, rank: Rank, events: list[Any]) -> str:
        suspect = self._is_suspect(time)
        self._may_hold_raw_text = self._may_hold_raw_text and suspect
        self._failures.restart()
        self._memory.restart()
        arguments = parse_server_args(message.decode("utf-8", "replace"))
        if arguments is None:
            self.unrecognised["server_args"] += 1
        else:
            event = ServerArgs(time, rank, *arguments, suspect=suspect)
            events.append(event)
            self._cut_args = (event, message) if event.is_cut else None
        return "startup"

    def _read_rest_of_args(self, rest: bytes, event: ServerArgs, before: bytes) -> bool:
        """Add the arguments that a shipper put into a line of their own: Docker cuts lines at 16 KiB."""
        whole = (before.rstrip(b"\r") + rest)[:LONGEST_LINE]
        arguments = parse_server_args(whole.decode("utf-8", "replace"))
        if arguments is None or len(arguments.args) <= len(event.args):
            return False
        event.args, event.is_cut = arguments
        self._cut_args = (event, whole) if event.is_cut else None
        return True
