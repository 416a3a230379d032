"""A server's log as events.

This module finds the lines in a block, reads the usual ones at once, and removes what surrounds the others; `messages` reads these.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias

from sglang_tuning_exporter.sglang.events import (
    LINE_KINDS,
    NO_RANK,
    Event,
)
from sglang_tuning_exporter.sglang.log.failure_lines import TRACEBACK
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun, FastPath
from sglang_tuning_exporter.sglang.log.forms import split_records
from sglang_tuning_exporter.sglang.log.layers import HEAD, UnwrappedLine, second_prefix
from sglang_tuning_exporter.sglang.log.messages import ACCESS, MessageReader
from sglang_tuning_exporter.sglang.log.prefix import Prefix, parse_plain_prefix
from sglang_tuning_exporter.sglang.log.stamps import STAMP, dated
from sglang_tuning_exporter.sglang.log.terminal import LONGEST_LINE, after_last_return, line_after_text, strip_terminal
from sglang_tuning_exporter.sglang.log.wrapping import Learned, Wrapping

_Any: TypeAlias = Any  # an `Event`, or also a `BatchRun` where the caller asked for runs

_STRETCH = 64 << 10  # bytes read at once: together with their events they fit into a core's cache
_IGNORED_KEPT, _IGNORED_LENGTH = 64, 400
_ENOUGH_LINES = 16
_SAME_CLOCK_SECONDS = 60.0  # between SGLang's time and that of a shipper
_SGLANG_KINDS = ("decode", "prefill", "retraction", "startup", "liveness")  # kinds of lines that only SGLang prints
_SURROUNDINGS_KEPT, _SURROUNDING_LENGTH = 64, 200
_STAMPED, _NUMBERS = re.compile(STAMP), re.compile(rb"\d+")
# The name of a field of a record that is printed over several lines, or what stands before and after a record.
_FIELD = re.compile(rb"[ \t]*(?:\"?[\w@./-]{1,60}\"?[ \t]?[:=]|[{}\[\]-]{1,3},?\s*$)")


class LogReader(MessageReader):
    """Turns a server's log into events, with the memory that is needed between lines.

    `counts` are lines by kind (`events.LINE_KINDS`). `strict`: for a log that is followed, whose form does not change from line to line;
    pastes are read leniently.
    """

    def __init__(self, *, strict: bool = False) -> None:
        super().__init__()
        self.counts: dict[str, int] = dict.fromkeys(LINE_KINDS, 0)
        self._strict = strict
        self.wrapping = Wrapping(strict=strict)
        self._fast_path = FastPath(self.wrapping.accepts_scheduler if strict else None)
        self._is_reading_held = False  # reading lines that waited
        self._surroundings: set[bytes] = set()  # of lines around the server's, as the next
        self._message_fields: set[bytes] = set()  # names of fields of records with the server's lines
        self._has_supervisor = False
        # The times around the lines are of another time zone than SGLang's own: they say nothing of lines without such a time.
        self._other_clock_differs = False
        # A line of SGLang's was read that nothing surrounded: a second prefix in a line is raw text.
        self._has_unwrapped_lines = False

    def feed(self, block: bytes, arrived: float | None = None) -> list[Event]:
        """Return the events of a block of whole lines, in order; the last line may lack its newline. Never raises.

        `arrived`: when the block was read, on any clock, for a log that is followed.
        """
        runs = self.feed_runs(block, arrived)
        return [event for each in runs for event in (each.events() if isinstance(each, BatchRun) else (each,))]

    def feed_runs(self, block: bytes, arrived: float | None = None) -> list[Event | BatchRun]:
        """Return the events as `feed` does, with consecutive usual batch lines as one event.

        They are of one scheduler and of one printed second, without another event between them.
        """
        events = self.release_held(arrived)
        self._scan(block, events)
        return events

    def release_held(self, arrived: float | None) -> list[Event | BatchRun]:
        """Return the events of lines that waited too long for others like them, as suspect. To be called while no lines come."""
        events: list[Event | BatchRun] = []
        self._suspicion.arrived = arrived
        self.wrapping.release_expired(arrived)
        self._read_released(events)
        return events

    @property
    def unread(self) -> bytes | None:
        """The first line, cut, with words of SGLang's and a wrapping that could not be learned."""
        return self.wrapping.unread

    @property
    def is_unreadable(self) -> bool:
        """Whether enough lines came to learn their form, some have words of SGLang's, and none could be read."""
        return self.wrapping.unread is not None and not self._form_is_known and self._line >= _ENOUGH_LINES

    def _scan(self, block: bytes, events: list[_Any]) -> None:
        """Read the usual lines a second at a time, and all others one by one."""
        position = 0
        while position < len(block):
            end = block.find(b"\n", position + _STRETCH) + 1 or len(block)
            stretch = block[position:end]
            position = end
            bare = self.wrapping.strip(stretch)
            if bare is None:
                for line in stretch.removesuffix(b"\n").split(b"\n"):
                    self._read_alone(line, events)
                continue
            self._fast_path.take(bare)
            lines = self._fast_path.lines
            whole = lines if bare is stretch else stretch.split(b"\n")
            done, last = 0, len(lines) - 1
            while True:
                if not self._suspicion.after_sink and not self.wrapping.has_partial_line:
                    done = self._read_fast(done, events)
                    self._has_unwrapped_lines = self._has_unwrapped_lines or (
                        bare is stretch and self._fast_path.decodes + self._fast_path.prefills > 0
                    )
                if done == last:
                    break
                self._read_alone(whole[done], events)
                done += 1

    def _read_alone(self, line: bytes, events: list[_Any]) -> None:
        self._line += 1
        if self._suspicion.after_sink:
            self._suspicion.advance_to(None, self._line)
        known = len(events)
        kind = self._read(line, events)
        self.counts[kind] += 1
        # A line about a request that is an event has SGLang's own words and figures alone.
        is_own = kind == "request" and len(events) > known
        self._read_released(events)
        if not is_own and not self._is_of_surroundings(line, kind):
            self._suspicion.note(kind, self._last_time, self._line)

    def _is_of_surroundings(self, line: bytes, kind: str) -> bool:
        """Whether this line is of what surrounds the server's lines: a supervisor's, an empty one, or another field of a record.

        Such lines are learned until the first batch: no request can print text before.
        """
        field = _FIELD.match(line)
        learns = not (self.counts["decode"] or self.counts["prefill"])
        if learns and field and (kind != "other" or HEAD.search(line)):
            self._message_fields.add(field[0])  # raw text has it as well
        if kind != "other" or len(line) > _SURROUNDING_LENGTH or not (not line or field or _STAMPED.match(line)):
            return not self._may_hold_raw_text
        form = field[0] if field else _NUMBERS.sub(b"0", line)
        if learns and len(self._surroundings) < _SURROUNDINGS_KEPT:
            self._surroundings.add(form)
            self._has_supervisor = self._has_supervisor or bool(line and not field)
        # Around records no raw text has an empty line: it stands in a field.
        is_around = bool(form or self._message_fields or self._has_supervisor)
        return not self._may_hold_raw_text or (is_around and form in self._surroundings - self._message_fields)

    def _ignore_later(self, line: bytes, prefix: Prefix) -> None:
        """Remember a message without meaning here, to skip it next time."""
        # A second prefix in the line belongs to another line, whose time must be read.
        if prefix.time is None or len(line) > _IGNORED_LENGTH or b"[" in line[prefix.end :] or TRACEBACK in line:
            return
        if len(self._fast_path.ignored) >= _IGNORED_KEPT:
            self._fast_path.ignored.clear()
        self._fast_path.ignored.add(line[prefix.end :])

    def _read_fast(self, begin: int, events: list[_Any]) -> int:
        """Read usual lines from the `begin`-th on; return the first line that is none."""
        lines = self._fast_path
        done = lines.read(begin, events)
        number, decodes, prefills, others = done - begin, lines.decodes, lines.prefills, lines.others
        noted = others and (self._may_hold_raw_text or lines.other_after_batch)
        if number:
            self._line += number
            self.counts["decode"] += decodes
            self.counts["prefill"] += prefills
            self.counts["other"] += others
            self.counts["access"] += number - decodes - prefills - others
        if decodes or prefills:
            self.wrapping.count_known_lines(decodes + prefills)
            self._failures.serving = self._has_times = self._form_is_known = self._may_hold_raw_text = True
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
        if (
            prefix is not None
            and (
                self._has_unwrapped_lines
                or not (b"\x1b" in line or second_prefix(line) or self.wrapping.begins_with_time)
            )
            and self.wrapping.accepts(line)
        ):
            kind = self._read_with_prefix(line, prefix, None, events)
            self._has_unwrapped_lines = self._has_unwrapped_lines or kind in _SGLANG_KINDS
            return kind
        return self._read_text(strip_terminal(line), events)

    def _read_with_prefix(self, text: bytes, prefix: Prefix, outer_time: float | None, events: list[_Any]) -> str:
        """Read a line from its prefix on, and remember one without meaning here."""
        known = (len(events), *self.unrecognised.values())
        kind = self._read_prefixed(text, prefix, outer_time, events)
        if kind == "other" and not self._suspicion.after_sink and known == (len(events), *self.unrecognised.values()):
            self._ignore_later(text, prefix)
        return kind

    def _read_text(self, text: bytes, events: list[_Any]) -> str:
        """Read a line that does not begin as SGLang's lines of this stream do: without its wrapping, if it has one."""
        unwrapped = self.wrapping.remove(text)
        # A time in brackets before SGLang's own is not SGLang's.
        is_around = not self._has_unwrapped_lines and (
            second_prefix(text) or (self.wrapping.begins_with_time and unwrapped)
        )
        prefix = None if is_around else parse_plain_prefix(text)
        if isinstance(unwrapped, UnwrappedLine) and (prefix is None or self._strict):
            return self._read_entry(unwrapped, events)
        # The last line of a traceback contains the exception's text raw: nothing is read from the middle of such a line.
        is_in_traceback = self._failures.is_in_traceback(self._line)
        if (
            unwrapped is None
            and prefix is None
            and not is_in_traceback
            and (rest := self._without_text_before(text)) != text
            and not second_prefix(rest)
        ):
            unwrapped = self.wrapping.learn_text_before(text, rest)
            text, prefix = rest, parse_plain_prefix(rest)
        if isinstance(unwrapped, Learned):
            return self._read_held(unwrapped.lines, events)
        return self._read_unwrapped(text, prefix, events, learns=unwrapped is None and not is_in_traceback)

    def _read_unwrapped(self, text: bytes, prefix: Prefix | None, events: list[_Any], *, learns: bool) -> str:
        """Read a line that has none of the known wrappings; `learns`: it may show a new one."""
        if prefix is None and ACCESS.match(text):
            self._read_access(text, None, NO_RANK, events)
            return "access"
        if prefix is not None and not self.wrapping.accepts(text):
            prefix = None
        if learns and prefix is None:
            if records := split_records(text):
                return [self._read_text(record, events) for record in records][-1]
            if (learned := self.wrapping.learn(text, settled=self._form_is_known)) is not None:
                return self._read_held(learned.lines, events)
        if prefix is not None:
            return self._read_prefixed(text, prefix, None, events)
        if self.wrapping.is_around_every_line:
            return "other"
        return self._read_bare(text, None, events) or self._read_message(text, None, NO_RANK, events, timed=False)

    def _without_text_before(self, text: bytes) -> bytes:
        """Return the line without the text that another program left before it; unchanged near raw text."""
        if self._suspicion.after_sink or (self._strict and self._is_suspect(None)):
            return text
        whole = text
        if b"\r" in text:
            text = after_last_return(text, strict=self._strict)
        if parse_plain_prefix(text) is None and ACCESS.match(text) is None:
            text = text[line_after_text(text, strict=self._strict) :]
        if len(text) < len(whole) and self._may_hold_raw_text:
            self._suspicion.note("other", self._last_time, self._line)  # the text before the line may be raw
        return text

    def _read_held(self, held: list[bytes], events: list[_Any]) -> str:
        """Read the lines that waited for their shape; return the kind of the last one, which is the present line."""
        kind = "other"
        if self._is_reading_held:
            return kind
        self._is_reading_held = True
        for number, text in enumerate(held, 1):
            kind = self._read(text, events)
            if number < len(held) and not self._strict:
                self.counts["other"] -= 1
                self.counts[kind] += 1
        self._is_reading_held = False
        return kind

    def _read_released(self, events: list[_Any]) -> None:
        """Read lines of an unknown process: a new one, or a text that imitates one."""
        held, time = self.wrapping.released, self._last_time
        if not held:
            return
        self.wrapping.released = []
        self._is_reading_held = self.wrapping.is_reading_released = self._suspicion.doubtful = True
        for text in held:
            self._read(text, events)
        self._is_reading_held = self.wrapping.is_reading_released = self._suspicion.doubtful = False
        self._last_time = time

    def _read_entry(self, line: UnwrappedLine, events: list[_Any]) -> str:
        """Read a line without its wrapping, then the other records of the same JSON document."""
        kind = "other" if line.partial else self._read_inner(line, events)
        for record in line.records:
            self._read_text(record, events)
        return kind

    def _read_inner(self, line: UnwrappedLine, events: list[_Any]) -> str:
        """Read a line without its wrapping."""
        text, time = strip_terminal(line.text), line.time
        prefix = parse_plain_prefix(text)
        if time is not None and prefix is not None and prefix.time is not None:
            self._other_clock_differs = abs(time - prefix.time) > _SAME_CLOCK_SECONDS
        elif self._other_clock_differs:
            time = None
        if prefix is None and ACCESS.match(text):
            self._read_access(text, time, NO_RANK, events)
            return "access"
        kind = self._read_bare(text, time, events) if prefix is None else None
        if kind is None and prefix is not None:
            kind = self._read_with_prefix(text, prefix, time, events)
        elif kind is None:
            # Where SGLang prints its own time, a line without one is not SGLang's, even if the wrapping has a time.
            prefix = Prefix(*dated(None if line.prefixed else time), line.rank, 0)
            kind = self._read_prefixed(text, prefix, time, events)
        # Of further lines of one message only those of a traceback are read: any other text may be raw.
        for more in line.more:
            self._read_bare(more, time, events)
        return kind
