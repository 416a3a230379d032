"""The shape of a stream: the wrapping of its lines, and which of its fields never change."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from sglang_tuning_exporter.sglang.log.forms import Form, remove_form
from sglang_tuning_exporter.sglang.log.layers import Json, UnwrappedLine, second_prefix
from sglang_tuning_exporter.sglang.log.prefix import parse_plain_prefix

# So many lines, of so many sorts, show which fields never change.
_LINES_WATCHED, _MESSAGE_KINDS = 64, 3
_MOST_LINES_WATCHED = 1024
_VALUES_KEPT = 8  # of one field; a field with more values is a counter
_LONGEST_EXAMPLE = 4096
_PREFIXES = 16  # batch lines that show how SGLang's own prefix looks
# The lines of all schedulers of a server have the same kinds of ranks in their prefix.
_SCHEDULERS = (b"Decode batch", b"Prefill batch", b"KV cache pool is full", b"Testing retraction", b"Decode out of")
_RANKS = re.compile(rb"[ ]+([A-Za-z_]{2,12})=?\d{1,5}")
_DIGITS = bytes(ord("0") if ord("0") <= byte <= ord("9") else byte for byte in range(256))

Ranks: TypeAlias = tuple[bytes, ...]  # names of ranks


class Deviation(NamedTuple):
    """How a line differs from those before it."""

    shape: Shape
    fields: tuple[Any, ...]  # names
    layout: bytes | None
    ranks: Ranks | None

    @property
    def may_be_real(self) -> bool:
        """Whether only the process differs: one that had not printed yet may be real."""
        return self.layout is None and self.ranks is None


@dataclass(eq=False)
class Shape:
    """The wrapping that all lines of a stream have in common."""

    form: Form
    prefixed: bool  # SGLang's own prefix follows
    has_words: bool = False  # and SGLang's words directly after it, as far as is known
    layouts: set[bytes] = field(default_factory=set)  # of that prefix
    ranks: set[Ranks] = field(default_factory=set)  # names of the ranks of a scheduler's lines
    prefixes: int = 0  # seen while they were learned
    fields: dict[Any, set[Any]] | None = None  # fields with one value so far; once settled, the required ones
    message_kinds: set[bytes] = field(default_factory=set)
    lines_seen: int = 0
    settled: bool = False
    pattern: re.Pattern[bytes] | None = None  # of the whole line, as `strip` removes it
    is_json: bool = False
    mismatches: int = 0  # stretches that the pattern did not fit

    def learn_fields(self, line: UnwrappedLine) -> None:
        """Note which fields keep their value."""
        prefix = parse_plain_prefix(line.text)
        self.message_kinds.add(line.text[prefix.end if prefix else 0 :][:6])
        self.lines_seen += 1
        found = dict(line.fields)
        if self.fields is None:
            self.fields = {key: {value} for key, value in found.items()}
        else:
            self.fields = {key: values for key, values in self.fields.items() if found.get(key) in values}
        self.settled = self.lines_seen >= _LINES_WATCHED and len(self.message_kinds) >= _MESSAGE_KINDS
        if self.lines_seen >= _MOST_LINES_WATCHED and not self.settled:
            self.settled, self.fields = True, {}

    def deviating_fields(self, line: UnwrappedLine) -> tuple[Any, ...]:
        """Return the fields that have another value than in all lines before."""
        found = dict(line.fields)
        return tuple(name for name, values in (self.fields or {}).items() if found.get(name) not in values)

    def accept(self, deviation: Deviation, lines: list[bytes]) -> None:
        """Accept the layout and the fields of these lines too."""
        for text in lines:
            line = remove_form(self.form, text)
            found = {} if line is None else dict(line.fields)
            for name in deviation.fields:
                if self.fields is not None and name in self.fields:
                    self.fields[name].add(found.get(name))
        self.fields = {name: values for name, values in (self.fields or {}).items() if len(values) <= _VALUES_KEPT}
        self.learn_prefix(deviation.layout, deviation.ranks)
        self.pattern = None

    def learn_prefix(self, layout: bytes | None, ranks: Ranks | None) -> None:
        """Accept a layout of SGLang's own prefix."""
        if layout is not None:
            self.layouts.add(layout)
        if ranks is not None:
            self.ranks.add(ranks)

    def fits(self, layout: bytes | None, ranks: Ranks | None) -> bool:
        """Whether SGLang's own prefix has a known layout; the first ones are learned."""
        if self.prefixes < _PREFIXES:
            self.prefixes += ranks is not None
            self.learn_prefix(layout, ranks)
        return (layout is None or layout in self.layouts) and (ranks is None or ranks in self.ranks)

    @property
    def form_key(self) -> tuple[Any, ...]:
        """The key by which forms are compared."""
        return tuple(layer.key for layer in self.form)

    def learn_pattern(self, text: bytes) -> None:
        """Make the pattern of a whole line from this one, if possible."""
        self.is_json = isinstance(self.form[-1], Json)
        if len(text) > _LONGEST_EXAMPLE or any(isinstance(layer, Json) for layer in self.form[:-1]):
            return
        parts, line = [], UnwrappedLine(text)
        for layer in self.form:
            part, inner = layer.pattern(line.text, self.fields or {}), layer.remove(line)
            if part is None or inner is None:
                return
            parts.append(part)
            line = inner
        # After a time in brackets, SGLang's own must follow: the pattern would match that as well.
        end = b"$" if self.is_json else rb"(?=\[)" if self.prefixed and second_prefix(text) else b""
        self.pattern = re.compile(b"^" + b"".join(parts) + end, re.MULTILINE)


def layout_of(text: bytes, *, scheduler: bool | None = None) -> tuple[bytes | None, Ranks | None]:
    """Return the layout of SGLang's own prefix, and the names of its ranks if a scheduler printed it."""
    prefix = parse_plain_prefix(text)
    if prefix is None or (prefix.time is None and prefix.clock is None):
        return None, None
    start, end = text[: prefix.end], prefix.end
    if scheduler is None:
        scheduler = text.startswith(_SCHEDULERS, end)
    layout = _RANKS.sub(b"", start).translate(_DIGITS).rstrip()
    return layout, tuple(_RANKS.findall(start)) if scheduler else None
