"""The wrapping of the lines of one stream: its *shapes*, learned from lines with SGLang's own words.

The first line is enough to learn a form that cannot be raw text. Any other form, and any form of a stream that already has one, must
occur several times; lines that wait meanwhile are returned and read.

In a log that is followed (`strict`) a line must have a known shape: the same layers around it, the same host, container, program and
process id if all lines so far had the same, and SGLang's own prefix in the same layout. A text inside a message has none of this.
Another shape is accepted after many lines. If only a host, a program or a process id is new, and no more lines come, the waiting
lines are returned as doubtful.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from sglang_tuning_exporter.sglang.log.forms import Form, form_of, remove_form
from sglang_tuning_exporter.sglang.log.layers import (
    BYTES,
    HEAD,
    LONGEST_BEFORE,
    WORDS,
    UnwrappedLine,
    second_prefix,
)
from sglang_tuning_exporter.sglang.log.prefix import Prefix, parse_plain_prefix
from sglang_tuning_exporter.sglang.log.shape import Deviation, Shape, layout_of
from sglang_tuning_exporter.sglang.log.terminal import LONGEST_LINE, strip_colours, well_known

_NUMBERS = re.compile(rb"\d+")
_SHAPES_KEPT = 8  # of one stream: a paste may hold several
_CONFIRMED, _CONFIRMED_AGAIN = 3, 16  # lines; the second: of a followed stream that had another form before
_WAITING = 16  # shapes that wait to be confirmed
_WAITING_LINES = 512  # of one shape
_WAITING_LENGTH = 65_536  # `server_args=` is about 20 kB
_LINES_APART = 64  # lines of known shapes between two of a new one: no lasting change
_HELD_SECONDS = 5.0  # after the last line of that shape
_MOST_MISMATCHES = 32  # how often the pattern of a whole stretch is made anew


class Learned(NamedTuple):
    """The result of learning: the lines of this shape, which can be read now; empty while there are not enough."""

    lines: list[bytes]


class _Waiting(NamedTuple):
    """Lines of a shape that is not accepted yet."""

    lines: list[bytes]
    heads: int
    read: int  # lines in known shapes when the last one came
    arrived: float | None  # when the last one came


class Wrapping:
    """The wrapping of the lines of one stream."""

    def __init__(self, *, strict: bool = False) -> None:
        self.unread: bytes | None = None  # the first line with words of SGLang's in a form that could not be learned
        self._current: Shape | None = None  # of the last line; `None`: SGLang's lines as they are
        self._strict = strict
        self.begins_with_time = False  # in brackets, as SGLang's own prefix, with more before SGLang's words
        self._shapes: list[Shape] = []
        self.arrived: float | None = None  # when the present lines came
        self.released: list[bytes] = []  # lines that wait no longer, for the reader to take
        self.is_reading_released = False  # the reader reads those: their process is not checked
        self._waiting: dict[Any, _Waiting] = {}
        self._lines_read = 0  # lines in a known shape
        self._partial: dict[str, tuple[bytes, float | None]] = {}
        self._text_before = b""  # the text directly before the last line
        self._lines_with_text_before = 0  # how many in a row had the same
        self._may_have_ended: set[str] = set()  # streams whose last part ended an earlier file

    @property
    def has_partial_line(self) -> bool:
        """Whether a line that a container runtime cut is unfinished."""
        return bool(self._partial)

    @property
    def is_around_every_line(self) -> bool:
        """Whether the known wrapping is around every physical line, also inside tracebacks."""
        return self._strict and bool(self._shapes) and all(shape.form and shape.prefixed for shape in self._shapes)

    def begin_file(self) -> None:
        """Note that the next line begins another file, of the same container or of the next one."""
        self._may_have_ended = set(self._partial)

    @property
    def held(self) -> list[bytes]:
        """The lines of a new process that wait for others like them."""
        waits = (w for key, w in self._waiting.items() if isinstance(key, Deviation) and key.may_be_real)
        return [line for wait in waits for line in wait.lines]

    def release_expired(self, arrived: float | None) -> None:
        """Release lines that waited long enough; `arrived`: the time, for a log that is followed."""
        self.arrived = arrived
        for key, wait in self._waiting.items():
            silent = arrived is not None and (wait.arrived is None or arrived - wait.arrived > _HELD_SECONDS)
            if silent or self._lines_read - wait.read > _LINES_APART:
                self._waiting[key] = self._release(key, wait)

    def _release(self, key: Any, wait: _Waiting) -> _Waiting:
        """Release the lines that may be real."""
        if not (isinstance(key, Deviation) and key.may_be_real):
            return wait
        self.released += wait.lines
        return wait._replace(lines=[])

    def count_known_lines(self, lines: int) -> None:
        """Count lines that were read in their known shape."""
        self._lines_read += lines
        if self._current is not None:
            self._current.has_words = True

    def strip(self, stretch: bytes) -> bytes | None:
        """Return many lines without their wrapping at once, if they look like those before. A line of another shape stays as it
        is or becomes a NUL byte, which is no line of SGLang's. `None`: each line must be read alone.
        """
        shape = self._current
        if shape is None:
            return stretch
        if shape.pattern is None:
            return None
        text = strip_colours(stretch) if b"\x1b" in stretch else stretch
        number = text.count(b"\n") + (text[-1:] != b"\n")
        if shape.is_json and shape.pattern.groups == 1 and len(bodies := shape.pattern.findall(text)) == number:
            end = b"\n" if text[-1:] == b"\n" else b""
            return (b"\n".join(bodies) + end).replace(b'\\"', b'"')  # a template would cost twice the rest
        template = rb"\1" if shape.is_json else b""
        bare, found = shape.pattern.subn(template, text)
        if found < number and (text[:1] == b"[" or b"\n[" in text):
            lines = (shape.pattern.subn(template, line) for line in text.split(b"\n"))
            bare = b"\n".join(line if is_found else b"\0" * bool(line) for line, is_found in lines)
        if found * 2 < number and shape.mismatches < _MOST_MISMATCHES:
            shape.pattern = None
            shape.mismatches += 1
        return bare.replace(b'\\"', b'"') if shape.is_json else bare

    def accepts_scheduler(self, start: bytes) -> bool:
        """Whether a batch line with the expected wrapping may have this prefix."""
        if not self._strict:
            return True
        if self._current is None:
            return self.accepts(start, scheduler=True)
        return self._current.fits(*layout_of(start, scheduler=True))

    def accepts(self, text: bytes, *, scheduler: bool | None = None) -> bool:
        """Whether a line of this stream may begin with this prefix."""
        if not self._strict:
            self._current = None
            return True
        if not self._shapes:
            self._shapes.append(Shape((), prefixed=True))
        layout, ranks = layout_of(text, scheduler=scheduler)
        if any(not shape.form and shape.fits(layout, ranks) for shape in self._shapes):
            self._lines_read += 1
            self._current = None
            return True
        return False

    def learn_text_before(self, text: bytes, rest: bytes) -> Learned | None:
        """Learn from a line whose `rest` follows other text at once; `None` until several lines in a row had the same text.

        A progress bar without a line end stands before one line; a wrapping such as `[1,0]<stderr>:` stands before each.
        """
        before = _NUMBERS.sub(b"0", text.removesuffix(rest))
        self._lines_with_text_before = self._lines_with_text_before + 1 if before == self._text_before else 1
        self._text_before = before
        if self._strict or self._lines_with_text_before < _CONFIRMED:
            return None
        learned = self.learn(text, enough=1)
        return learned if learned is not None and learned.lines else None

    def remove(self, text: bytes) -> UnwrappedLine | Learned | None:
        """Return the line without the known wrapping of the stream; `None` where it does not have it."""
        found: Learned | None = None
        for shape in self._shapes:
            line = self._remove_form(shape.form, text) if shape.form else None
            if line is None:
                continue
            if line.partial:
                return line
            prefix = parse_plain_prefix(line.text)
            if not self._fits_prefix(shape, text, line.text, prefix):
                continue
            if self._strict and (key := self._deviation(shape, line, prefix)) is not None:
                if self.is_reading_released and key.may_be_real:
                    return line._replace(prefixed=shape.prefixed)
                headed = HEAD.match(line.text) is not None
                if headed or key in self._waiting:
                    found = found or self._wait(key, text, _CONFIRMED_AGAIN, heads=headed)
                else:
                    found = found or Learned([])
                continue
            self._set_current(shape, text, line, prefix)
            return line._replace(prefixed=shape.prefixed)
        return found

    def _fits_prefix(self, shape: Shape, text: bytes, rest: bytes, prefix: Prefix | None) -> bool:
        """Whether SGLang's own prefix begins the `rest` of a line as it does in this shape."""
        if prefix is not None:
            return shape.prefixed and (shape.has_words or not second_prefix(rest))
        return not shape.prefixed or self._strict or not _is_still_wrapped(text, rest)

    def learn(self, text: bytes, *, settled: bool = True, enough: int | None = None) -> Learned | None:
        """Learn from a line of no known shape; `None` where nothing can be learned.

        A shape is accepted at once only if the stream has none yet; `settled`: lines have been read as they are.
        `enough`: how many lines must have the shape, instead of the usual number.
        """
        known = bool(self._shapes) or settled
        readable = self._form_of(text, known=known)
        if readable is None:
            return None
        form, found = readable
        prefixed = parse_plain_prefix(found.text) is not None
        layout, ranks = layout_of(found.text) if self._strict else (None, None)
        names = tuple(layer.key for layer in form)
        shape = self._known_shape(names, layout, prefixed=prefixed)
        key = (prefixed, layout, ranks if shape is not None and layout in shape.layouts else None, names)
        learned = self._wait(key, text, enough or self._lines_needed(form, text, known=known))
        if not learned.lines:
            self._remember_unread(text)
            return learned
        if shape is None:
            shape = Shape(form, prefixed)
            self.begins_with_time = self.begins_with_time or second_prefix(text) > 0
            self._shapes.insert(0, shape)
            del self._shapes[_SHAPES_KEPT:]
        shape.learn_prefix(layout, key[2])
        return learned

    def _form_of(self, text: bytes, *, known: bool) -> tuple[Form, UnwrappedLine] | None:
        """Return the form of a line and what is in it; None, and the line is remembered, where nothing can be learned of it."""
        if HEAD.search(text) is None and BYTES not in text:
            return None
        form = form_of(text)
        found = None if form is None else remove_form(form, text)
        if form is not None and found is not None and (form or self._strict):
            ambiguous = any(layer.ambiguous for layer in form)
            if not (known and ambiguous):
                return form, found
        if form != ():
            self._remember_unread(text)
        return None

    def _known_shape(self, names: tuple[object, ...], layout: object, *, prefixed: bool) -> Shape | None:
        """Return the shape with these layers, preferably one that has had this layout of SGLang's prefix; None where there is none."""
        same = [shape for shape in self._shapes if shape.form_key == names and shape.prefixed == prefixed]
        return next((shape for shape in same if layout in shape.layouts), same[0] if same else None)

    def _remember_unread(self, text: bytes) -> None:
        self.unread = self.unread or text[:LONGEST_BEFORE]

    def _lines_needed(self, form: Form, text: bytes, *, known: bool) -> int:
        """Return how many lines are needed to accept this form."""
        # A time in brackets before SGLang's own may as well be the prefix of a line that another process wrote into.
        sure = all(layer.sure for layer in form) and not second_prefix(text)
        if known:
            if self._strict:
                return _CONFIRMED_AGAIN
            return 1 if sure and _is_well_known(form, text) else _CONFIRMED
        return 1 if sure else _CONFIRMED

    def _wait(self, key: Any, text: bytes, enough: int, *, heads: bool = True) -> Learned:
        """Let a line wait until enough others are like it."""
        wait = self._waiting.pop(key, _Waiting([], 0, self._lines_read, None))
        if self._strict and self._lines_read - wait.read > _LINES_APART:
            wait = self._release(key, wait)._replace(lines=[], heads=0)
        lines, number = wait.lines, wait.heads + heads
        if len(text) <= _WAITING_LENGTH or number >= enough:
            lines.append(text)
        if number >= enough:
            if isinstance(key, Deviation):
                key.shape.accept(key, lines)
            return Learned(lines)
        if len(self._waiting) >= _WAITING:
            for other, waits in self._waiting.items():
                self._release(other, waits)
            self._waiting.clear()
        self._waiting[key] = _Waiting(
            lines[-_WAITING_LINES:], number, self._lines_read if self._strict else 0, self.arrived
        )
        return Learned([])

    def _remove_form(self, form: Form, text: bytes) -> UnwrappedLine | None:
        """Return a line without its form; the parts of a line that a container runtime cut are joined."""
        line = UnwrappedLine(text)
        for layer in form:
            found = layer.remove(line)
            if found is None:
                return None
            line = found
            stream = line.stream
            if stream is None:
                continue
            begun, time = self._partial.pop(stream, (b"", line.time))
            if stream in self._may_have_ended:
                self._may_have_ended.discard(stream)
                if parse_plain_prefix(line.text) is not None:
                    begun = b""  # the first line of another process; within one file cut text can look like that
            if begun:
                line = line._replace(text=(begun + line.text)[:LONGEST_LINE], time=time)
            if line.partial:
                self._partial[stream] = (line.text, line.time)
                return line
            line = line._replace(stream=None)
        return line

    def _deviation(self, shape: Shape, line: UnwrappedLine, prefix: Prefix | None) -> Deviation | None:
        """Return how a line differs from those before it; `None` where it does not."""
        fields = shape.deviating_fields(line) if shape.settled else ()
        layout, ranks = (None, None) if prefix is None else layout_of(line.text)
        if not fields and shape.fits(layout, ranks):
            return None
        # Only what differs: lines without ranks come between those of schedulers.
        return Deviation(
            shape, fields, None if layout in shape.layouts else layout, None if ranks in shape.ranks else ranks
        )

    def _set_current(self, shape: Shape, text: bytes, line: UnwrappedLine, prefix: Prefix | None) -> None:
        """Use this shape for the next lines."""
        if HEAD.match(line.text) is None and prefix is None:
            return
        self._lines_read += 1
        self._current = shape
        shape.has_words = shape.has_words or (prefix is not None and WORDS.match(line.text, prefix.end) is not None)
        if self._strict and not shape.settled:
            shape.learn_fields(line)
        if shape.pattern is None and prefix is not None and (shape.settled or not self._strict):
            shape.learn_pattern(text)


def _is_still_wrapped(text: bytes, rest: bytes) -> bool:
    """Whether a line still has a wrapping."""
    if (end := well_known(text)) > text.find(rest) >= 0 and HEAD.match(text, end):
        return True
    end = well_known(rest)
    return end > 0 and HEAD.match(rest, end) is not None


def _is_well_known(form: Form, text: bytes) -> bool:
    """Whether the whole wrapping of a line is as container runtimes and log followers write it."""
    line = UnwrappedLine(text)
    for layer in form:
        inner = layer.remove(line)
        if inner is None or not layer.is_well_known(line.text, inner.text):
            return False
        line = inner
    return True
