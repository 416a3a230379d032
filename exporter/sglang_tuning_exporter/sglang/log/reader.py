"""A server's log as events.

A message counts only directly after the line's prefix: request logs, tool names and tracebacks may quote any line of SGLang's. Once
lines have a printed time, a line without one is not SGLang's.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeAlias

from sglang_tuning_exporter.sglang.args.printed import parse_server_args
from sglang_tuning_exporter.sglang.events import (
    LINE_KINDS,
    NO_RANK,
    DecodeBatch,
    Event,
    Liveness,
    OutOfMemory,
    PrefillBatch,
    Rank,
    Rejection,
    ServerArgs,
)
from sglang_tuning_exporter.sglang.log import batch_lines
from sglang_tuning_exporter.sglang.log import fast_path as usual
from sglang_tuning_exporter.sglang.log.failure_lines import TRACEBACK, FailureLines
from sglang_tuning_exporter.sglang.log.forms import split_records
from sglang_tuning_exporter.sglang.log.layers import Line, again, begins
from sglang_tuning_exporter.sglang.log.memory_lines import MemoryLines, parse_limits, parse_pool
from sglang_tuning_exporter.sglang.log.prefix import DAY, Prefix, parse_own_prefix, parse_plain_prefix, strip_own_parts
from sglang_tuning_exporter.sglang.log.raw_text import Kind, Suspicion
from sglang_tuning_exporter.sglang.log.surroundings import Surroundings, Taught
from sglang_tuning_exporter.sglang.log.wrappers import LONGEST_LINE, after_last_return, glued_line, strip_terminal

_Any: TypeAlias = Any  # an `Event`, or also a `BatchRun` where the caller asked for runs

_STRETCH = 64 << 10  # bytes read at once: together with their events they fit into a core's cache
_DULL_KEPT, _DULL_LENGTH = 64, 400
_ENOUGH_LINES = 16
_NOON = DAY / 2
_JITTER = 120.0  # seconds around midnight within which processes may write out of order

_REJECTED = re.compile(rb'(?:INFO: +)?(?:\S{1,80} - )?"POST [^"\n]{1,2000} HTTP/\d(?:\.\d)?" 503\b')
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


class LogReader:
    """Turns a server's log into events, with the memory that is needed between lines.

    `counts` are lines by kind (`events.LINE_KINDS`). `unrecognised` counts what could not be read: `batch_key` (a field
    no release of the census has), `batch_line` and `retraction_line` (a known head whose body cannot be read, or a
    batch line of an unknown sort), `server_args`. `suspicious` counts the events with `suspect` set, by kind.
    `strict`: for a log that is followed, whose form does not change from line to line; pastes are read leniently.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.counts: dict[str, int] = dict.fromkeys(LINE_KINDS, 0)
        self.unrecognised: dict[str, int] = {"batch_key": 0, "batch_line": 0, "retraction_line": 0, "server_args": 0}
        self._failures = FailureLines()
        self._memory = MemoryLines()
        self._suspicion = Suspicion()
        self._strict = strict
        self._surroundings = Surroundings(strict=strict)
        self._usual = usual.UsualLines(self._surroundings.admits_scheduler if strict else None)
        self.suspicious = self._suspicion.counts
        self._line = 0
        self._timed = False
        self._replays = False  # reading lines that waited
        self._served = False  # a batch was printed, so requests may have put raw text into the log
        self._settled = False  # a line of SGLang's was read, so the form of the stream is known
        self._day = 0
        self._clock: float | None = None
        self._last_time: float | None = None

    def feed(self, block: bytes, arrived: float | None = None) -> list[Event]:
        """Return the events of a block of whole lines, in order; the last line may lack its newline. Never raises.

        `arrived`: when the block was read, on any clock, for a log that is followed.
        """
        events: list[Event] = []
        self._begin(arrived, events)
        self._scan(block, events, singly=True)
        return events

    def feed_runs(self, block: bytes, arrived: float | None = None) -> list[Event | usual.BatchRun]:
        """Return the events as `feed` does, with consecutive usual batch lines as one event.

        They are of one scheduler and of one printed second, without another event between them.
        """
        events: list[Event | usual.BatchRun] = []
        self._begin(arrived, events)
        self._scan(block, events, singly=False)
        return events

    def let_go(self, arrived: float) -> list[Event | usual.BatchRun]:
        """Return the events of lines that waited too long for others like them, as suspect. To be called while no lines come."""
        events: list[Event | usual.BatchRun] = []
        self._begin(arrived, events)
        return events

    def begin_file(self) -> None:
        """Note that another file begins: a line that a container runtime cut may not be continued."""
        self._surroundings.begin_file()

    def _begin(self, arrived: float | None, events: list[_Any]) -> None:
        self._suspicion.arrived = arrived
        self._surroundings.look(arrived)
        self._read_doubtful(events)

    @property
    def unread(self) -> bytes | None:
        """The first line, cut, with words of SGLang's and a wrapping that could not be learned."""
        return self._surroundings.unread

    @property
    def is_unreadable(self) -> bool:
        """Whether enough lines came to learn their form, some have words of SGLang's, and none could be read."""
        return self.unread is not None and not self._settled and self._line >= _ENOUGH_LINES

    def _scan(self, block: bytes, events: list[_Any], *, singly: bool) -> None:
        """Read the usual lines a second at a time, and all others one by one."""
        position = 0
        while position < len(block):
            end = block.find(b"\n", position + _STRETCH) + 1 or len(block)
            stretch = block[position:end]
            position = end
            bare = self._surroundings.strip(stretch)
            if bare is None:
                for line in stretch.removesuffix(b"\n").split(b"\n"):
                    self._read_alone(line, events)
                continue
            self._usual.take(bare)
            lines = self._usual.lines
            whole = lines if bare is stretch else stretch.split(b"\n")
            done, last = 0, len(lines) - 1
            while True:
                if not self._suspicion.active and not self._surroundings.joins:
                    done = self._read_usual(done, events, singly=singly)
                if done == last:
                    break
                self._read_alone(whole[done], events)
                done += 1

    def _read_alone(self, line: bytes, events: list[_Any]) -> None:
        self._line += 1
        if self._suspicion.active:
            self._suspicion.move_on(None, self._line)
        kind = self._read(line, events)
        self.counts[kind] += 1
        self._read_doubtful(events)
        if self._served:
            self._suspicion.note(kind, self._last_time, self._line)

    def _doubts(self, time: float | None) -> bool:
        """Whether raw text may have produced this line."""
        return self._suspicion.doubts(time, self._line)

    def _remember(self, line: bytes, prefix: Prefix) -> None:
        """Remember a message without meaning here, to skip it next time."""
        # A second prefix in the line belongs to another line, whose time must be read.
        if prefix.time is None or len(line) > _DULL_LENGTH or b"[" in line[prefix.end :] or TRACEBACK in line:
            return
        if len(self._usual.dull) >= _DULL_KEPT:
            self._usual.dull.clear()
        self._usual.dull.add(line[prefix.end :])

    def _read_usual(self, begin: int, events: list[_Any], *, singly: bool) -> int:
        """Read usual lines from the `begin`-th on; return the first line that is none."""
        lines = self._usual
        done = lines.read(begin, events, singly=singly)
        number, decodes, prefills, others = done - begin, lines.decodes, lines.prefills, lines.others
        noted = others and (self._served or lines.other_after_batch)
        if number:
            self._line += number
            self.counts["decode"] += decodes
            self.counts["prefill"] += prefills
            self.counts["other"] += others
            self.counts["access"] += number - decodes - prefills - others
        if decodes or prefills:
            self._surroundings.passed(decodes + prefills)
            self._failures.serving = self._timed = self._settled = self._served = True
        if decodes or prefills or others:
            self._last_time = lines.time
        if noted:
            self._suspicion.note("other", lines.last_other_time, self._line - (done - lines.last_other) + 1)
        return done

    def _read(self, line: bytes, events: list[_Any]) -> str:
        """Read one line; append its events and return its kind."""
        if len(line) > LONGEST_LINE:
            line = line.lstrip(b"\x00") if line[:1] == b"\x00" else line
            line = line[:LONGEST_LINE]
        prefix = parse_plain_prefix(line)
        if prefix is not None and not again(line) and self._surroundings.admits(line):
            return self._read_dated(line, prefix, None, events)
        return self._read_text(strip_terminal(line), events)

    def _read_dated(self, text: bytes, prefix: Prefix, outer_time: float | None, events: list[_Any]) -> str:
        """Read a line from its prefix on, and remember one without meaning here."""
        known = (len(events), *self.unrecognised.values())
        kind = self._read_prefixed(text, prefix, outer_time, events)
        if kind == "other" and not self._suspicion.active and known == (len(events), *self.unrecognised.values()):
            self._remember(text, prefix)
        return kind

    def _read_more(self, lines: tuple[bytes, ...], time: float | None, events: list[_Any]) -> None:
        """Read further lines of one message, only those of a traceback: any other text may be raw."""
        for line in lines:
            self._read_bare(line, time, events)

    def _read_text(self, text: bytes, events: list[_Any]) -> str:
        """Read a line that does not begin as SGLang's lines of this stream do: without its wrapping, if it has one."""
        around = self._surroundings.take_off(text)
        # A time in brackets before SGLang's own is not SGLang's.
        prefix = None if again(text) else parse_plain_prefix(text)
        if isinstance(around, Line) and (prefix is None or self._strict):
            return self._read_entry(around, events)
        # The last line of a traceback contains the exception's text raw: nothing is read from the middle of such a line.
        inside = self._failures.inside(self._line)
        if around is None and prefix is None and not inside and (rest := self._unglued(text)) != text:
            around = self._surroundings.learn_glued(text, rest)
            text, prefix = rest, parse_plain_prefix(rest)
        if isinstance(around, Taught):
            return self._read_held(around.held, events)
        return self._read_unwrapped(text, prefix, events, learns=around is None and not inside)

    def _read_unwrapped(self, text: bytes, prefix: Prefix | None, events: list[_Any], *, learns: bool) -> str:
        """Read a line that has none of the known wrappings; `learns`: it may show a new one."""
        if prefix is None and _ACCESS.match(text):
            self._read_access(text, None, NO_RANK, events)
            return "access"
        if prefix is not None and not self._surroundings.admits(text):
            prefix = None
        elif prefix is None and not self._strict:
            prefix = parse_own_prefix(text)
        if learns and (prefix is None or not (prefix.plain or begins(text[prefix.end :]))):
            if records := split_records(text):
                return [self._read_text(record, events) for record in records][-1]
            if (taught := self._surroundings.learn(text, settled=self._settled)) is not None:
                return self._read_held(taught.held, events)
        if prefix is not None:
            return self._read_prefixed(text, prefix, None, events)
        if self._surroundings.wraps_every_line:
            return "other"
        return self._read_bare(text, None, events) or self._read_message(text, None, NO_RANK, events, timed=False)

    def _unglued(self, text: bytes) -> bytes:
        """Return the line without the text that another program left before it; unchanged near raw text."""
        if self._suspicion.active or (self._strict and self._doubts(None)):
            return text
        whole = text
        if b"\r" in text:
            text = after_last_return(text, strict=self._strict)
        if parse_plain_prefix(text) is None and _ACCESS.match(text) is None:
            text = text[glued_line(text, strict=self._strict) :]
        if len(text) < len(whole) and self._served:
            self._suspicion.note("other", self._last_time, self._line)  # the text before the line may be raw
        return text

    def _read_held(self, held: list[bytes], events: list[_Any]) -> str:
        """Read the lines that waited for their shape; return the kind of the last one, which is the present line."""
        kind = "other"
        if self._replays:
            return kind
        self._replays = True
        for number, text in enumerate(held, 1):
            kind = self._read(text, events)
            if number < len(held) and not self._strict:
                self.counts["other"] -= 1
                self.counts[kind] += 1
        self._replays = False
        return kind

    def _read_doubtful(self, events: list[_Any]) -> None:
        """Read lines of an unknown process: a new one, or a text that imitates one."""
        held, time = self._surroundings.let_go, self._last_time
        if not held:
            return
        self._surroundings.let_go = []
        self._replays = self._surroundings.takes_doubtful = self._suspicion.doubtful = True
        for text in held:
            self._read(text, events)
        self._replays = self._surroundings.takes_doubtful = self._suspicion.doubtful = False
        self._last_time = time

    def _read_entry(self, line: Line, events: list[_Any]) -> str:
        """Read a line without its wrapping, then the other records of the same JSON document."""
        kind = "other" if line.partial else self._read_surrounded(line, events)
        for record in line.records:
            self._read_text(record, events)
        return kind

    def _read_surrounded(self, line: Line, events: list[_Any]) -> str:
        """Read a line without its wrapping."""
        text, time = strip_terminal(line.text), line.time
        prefix = parse_plain_prefix(text)
        if prefix is None and _ACCESS.match(text):
            self._read_access(text, time, NO_RANK, events)
            return "access"
        kind = self._read_bare(text, time, events) if prefix is None else None
        if kind is None and prefix is not None:
            kind = self._read_dated(text, prefix, time, events)
        elif kind is None:
            if (prefix := parse_own_prefix(text)) is None or not begins(text[prefix.end :]):
                # Where SGLang prints its own time, a line without one is not SGLang's, even if the wrapping has a time.
                prefix = Prefix(None if line.prefixed else time, None, line.rank, 0, plain=False)
            kind = self._read_prefixed(text, prefix, time, events)
        self._read_more(line.more, time, events)
        return kind

    def _read_bare(self, text: bytes, outer_time: float | None, events: list[_Any]) -> str | None:
        """Read a line without a prefix as part of a traceback; `None` where it belongs to none."""
        kind, event = self._failures.parse_bare(
            text, outer_time if outer_time is not None else self._last_time, self._line
        )
        if event is not None:
            event.suspect = event.suspect and self._served
            kind_of: Kind = "out_of_memory" if isinstance(event, OutOfMemory) else "startup"
            event.suspect = self._suspicion.count(kind_of, suspect=event.suspect)
            events.append(event)
        return kind

    def _read_prefixed(self, text: bytes, prefix: Prefix, outer_time: float | None, events: list[_Any]) -> str:
        """Read a line from its prefix on, and the line that another process wrote into its end, if any."""
        start = prefix.end
        second = start + behind if (behind := batch_lines.second_line(text[start:])) else len(text)
        kind = self._read_one(text[start:second], prefix, outer_time, events)
        if behind and (other := parse_plain_prefix(text, second)) is not None:
            self._read_one(text[other.end :], other, outer_time, events)
        return kind

    def _read_one(self, message: bytes, prefix: Prefix, outer_time: float | None, events: list[_Any]) -> str:
        time = prefix.time
        if prefix.clock is not None:
            time = self._roll(prefix.clock)
        elif time is None:
            time = outer_time
        if time is not None:
            self._last_time = time
        if self._suspicion.active:
            self._suspicion.move_on(time, self._line)
        timed = prefix.time is not None or prefix.clock is not None
        return self._read_message(message, time, prefix.rank, events, timed=timed)

    def _roll(self, clock: float) -> float:
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
        if message[:1] in _TERMINAL:
            message = strip_terminal(message)
        if message[:6] not in _HEADS:
            if _ACCESS.match(message):
                self._read_access(message, time, rank, events)
                return "access"
            message = message[strip_own_parts(message, 0) :]
            if _REQUEST.match(message):
                return "request"
            self._suspicion.look(message, time, self._line)
        if self._timed and not timed:
            return "other"
        kind = self._read_part(message, time, rank, events)
        if kind is None:
            return self._read_failure(message, time, rank, events)
        self._timed = self._timed or (timed and kind != "other")
        self._settled = self._settled or kind != "other"
        return kind

    def _read_access(self, message: bytes, time: float | None, rank: Rank, events: list[_Any]) -> None:
        """Read an access line: an event for a rejected request; health checks and scrapes are no requests."""
        if _REJECTED.match(message):
            events.append(Rejection(time, rank, self._suspicion.active or self._suspicion.doubtful))

    def _read_part(self, message: bytes, time: float | None, rank: Rank, events: list[_Any]) -> str | None:
        """Read a message with a known head; `None` where it has none, or where other words follow the head."""
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
        self, part: _Part, message: bytes, time: float | None, rank: Rank, events: list[_Any]
    ) -> str | None:
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
            event.suspect = self._suspicion.count("startup", suspect=self._doubts(time))
            events.append(event)
        elif part == "limits":
            self._suspicion.note("other", time, self._line)  # cut, so it may contain raw text
        return "startup"

    def _read_failure(self, message: bytes, time: float | None, rank: Rank, events: list[_Any]) -> str:
        doubt = self._doubts(time)
        event = self._failures.parse_message(message, time, rank, self._line, sure=not doubt)
        if event is not None:
            kind: Kind = "out_of_memory" if isinstance(event, OutOfMemory) else "startup"
            event.suspect = self._suspicion.count(kind, suspect=doubt)
            events.append(event)
            return "liveness" if isinstance(event, Liveness) else "out_of_memory"
        if message.rstrip().endswith(TRACEBACK):
            return "traceback"
        if _OTHER_BATCH.match(message):
            self.unrecognised["batch_line"] += 1
        return "other"

    def _read_batch(
        self, part: Literal["decode", "prefill"], message: bytes, time: float | None, rank: Rank, events: list[_Any]
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
        self._failures.serving = self._served = True
        event.suspect = self._suspicion.count(part, suspect=self._suspicion.active)
        events.append(event)
        return part

    def _retract(self, message: bytes, time: float | None, rank: Rank, events: list[_Any]) -> bool:
        message = strip_terminal(message)
        if not batch_lines.is_retraction(message):
            return False
        try:
            event = batch_lines.parse_retraction(message, time, rank)
        except batch_lines.BatchLineError:
            self.unrecognised["retraction_line"] += 1
            return False
        event.suspect = self._suspicion.count("retraction", suspect=self._suspicion.active)
        event.beside_words = self._doubts(time)
        events.append(event)
        return True

    def _read_args(self, message: bytes, time: float | None, rank: Rank, events: list[_Any]) -> str:
        doubt = self._doubts(time)
        self._served = self._served and doubt
        self._failures.restart()
        self._memory.restart()
        arguments = parse_server_args(message.decode("utf-8", "replace"))
        if arguments is None:
            self.unrecognised["server_args"] += 1
        else:
            events.append(ServerArgs(time, rank, arguments, suspect=self._suspicion.count("startup", suspect=doubt)))
        return "startup"
