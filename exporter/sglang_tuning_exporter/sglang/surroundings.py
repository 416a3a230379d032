"""What surrounds the lines of one stream, learned from the lines with SGLang's own heads.

Loggers, shippers and terminals put a text before every line, or the line into a field of JSON or CSV. Whatever it is,
it is the same for the lines of a stream: a sequence of steps, each of which takes off one layer.
The first line teaches its surroundings at once where they look like nobody's words. Where they do not, and where the
stream already has a form, they must come again: lines that wait meanwhile are given back and read.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from sglang_tuning_exporter.sglang.events import NO_RANK, Rank
from sglang_tuning_exporter.sglang.prefix import parse_plain_prefix, parse_rank
from sglang_tuning_exporter.sglang.stamps import STAMP, stamp_seconds, value_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

_FORMS_KEPT = 8  # of one stream: a paste may hold several
_CONFIRMED, _CONFIRMED_AGAIN = 3, 16  # lines; of a stream that is followed and had another form before
_HELD = 16  # forms that wait to be confirmed
_HELD_LENGTH = 65_536  # `server_args=` is about 20 kB
_LONGEST_BEFORE = 300
_LAYERS = 4
_LEAVES = 256
_DEPTH = 6

# SGLang's prefix, or the words of a line that has none: with what follows them, so that a sentence about them is none.
_PREFIX = rb"\[(?:20\d\d-\d\d-\d\d[ T])?[0-2]\d:[0-5]\d:[0-6]\d(?:[.,]\d{1,9})?(?: +[A-Z_]{2,12}\d{1,5})*\] ?(?=\S)"
_WORDS = (
    rb"(?:Decode|Prefill) batch(?: ?\[\d{1,12}\])?(?:\([^)\n]{1,40}\))?[.,] ?#|new fill batch\. #"
    rb"|#running-req: \d|KV cache pool is full\.|[Dd]ecode out of memory happened|Testing retraction"
    rb"|server_args=(?:ServerArgs\(|\{)|max_total_num_tokens=\d|Memory pool end\.|KV Cache is allocated\."
    rb"|Load weight (?:begin|end)|Capture [\w -]{0,40}[Gg]raph (?:begin|end)|Mamba Cache is allocated\."
    rb"|The server is fired up and ready to roll!"
)
_HEAD = re.compile(_PREFIX + rb"|" + _WORDS)
_BARE = re.compile(_WORDS)
_RANK_TOKEN = re.compile(rb"(?<![\w.-])(?:(?:DP|TP|PP|EP|ATTN_CP|MOE_DP)\d{1,5})(?![\w.-])")

# The text before a line as a pattern: times, fields in quotes, groups in brackets and words vary, all else is fixed.
_LABELS = rb"\{[\w.-]+ ?[=:] ?\"[^\"\n]*\"(?:, ?[\w.-]+ ?[=:] ?\"[^\"\n]*\")*\}"
_TOKEN = re.compile(
    rb"(?P<stamp>(?<![\w.-])" + STAMP + rb")|(?P<labels>" + _LABELS + rb")"
    rb"|(?P<quoted>\"[^\"\n]*\")(?=[ ,:\t])|(?P<apostrophes>'[^'\n]*')(?=[ ,:\t])|(?P<bracket>\[(?!"
    + STAMP
    + rb")[^\]\[\n]{0,120}\])"
    rb"|(?P<round>\([^()\n]{0,120}\))|(?P<angle><[^<>\n]{0,60}>)"
    rb"|(?P<word>[\w./@%+:#~*-]*\w[/@%+*-]*)|(?P<space>[ \t]+)|(?P<other>[^\w\n])"
)
_PATTERNS = {
    "stamp": rb"(" + STAMP + rb")",
    "labels": _LABELS,
    "quoted": rb"\"[^\"\n]*\"",
    "apostrophes": rb"'[^'\n]*'",
    "bracket": rb"\[[^\]\[\n]{0,120}\]",
    "round": rb"\([^()\n]{0,120}\)",
    "angle": rb"<[^<>\n]{0,60}>",
    "word": rb"[\w./@%+:#~*-]*\w[/@%+*-]*",
    "space": rb"[ \t]+",
}
_WORDS_AT_MOST, _WORDS_SURE = 12, 6
_QUOTES = re.compile(rb"obj=|text=|ReqInput|Model attempted|\brid=|prompt|content|\\")
_LOGGED = (rb'="', rb'": "', rb'":"')  # the line is the value of a field
_ENDS = b" \t]:|>-\"'"
_LEVELS = ("level", "levelname", "severity", "lvl", "log.level", "PRIORITY", "stream")
_TIMES = ("timestamp", "time", "@timestamp", "ts", "asctime", "__REALTIME_TIMESTAMP", "datetime", "date", "eventTime")
_SERVERS_OWN = ("obj", "text", "prompt", "messages", "out", "content", "input", "body")  # of a request's log

_BYTES = b'MESSAGE":['  # journald gives a message that is no UTF-8 as a list of bytes

Path: TypeAlias = tuple[str | int, ...]


class Line(NamedTuple):
    """A line without what surrounds it."""

    text: bytes
    time: float | None  # as the surroundings print it
    rank: Rank
    more: tuple[bytes, ...] = ()  # further lines of one message
    prefixed: bool = True  # SGLang's own prefix follows what surrounds the stream's lines


def begins(text: bytes) -> bool:
    """Say whether a text begins with a message of SGLang's, without its prefix."""
    return _BARE.match(text) is not None


class Before:
    """A text before the line."""

    def __init__(self, form: bytes, *, sure: bool) -> None:
        self.key = form
        self.sure = sure
        self._pattern = re.compile(form)
        self._closes = form.endswith(b'"')

    @classmethod
    def of(cls, before: bytes) -> Before | None:
        """Learn it from one line's; `None` where it could be part of a request or of a sentence."""
        if not before or len(before) > _LONGEST_BEFORE or _QUOTES.search(before) or before[-1] not in _ENDS:
            return None
        field = before.endswith(_LOGGED)
        parts, words, position, rest = [], 0, 0, before[:-1] if field else before
        while position < len(rest):
            match = _TOKEN.match(rest, position)
            if match is None or match.lastgroup is None:
                return None
            position = match.end()
            kind = match.lastgroup
            if kind == "other" and match[0] in b"\"'{}":
                return None
            words += kind == "word"
            # The last space is kept as it is: a traceback's own indentation follows it.
            varies = kind in _PATTERNS and not (kind == "space" and position == len(rest))
            parts.append(_PATTERNS[kind] if varies else re.escape(match[0]))
        if words > _WORDS_AT_MOST:
            return None
        return cls(b"".join(parts) + (b'"' if field else b""), sure=not field and words <= _WORDS_SURE)

    def take_off(self, line: Line) -> Line | None:
        """Take it off."""
        match = self._pattern.match(line.text, 0, 2 * _LONGEST_BEFORE)
        if match is None:
            return None
        before, rest = match[0], line.text[match.end() :]
        if self._closes:
            rest = _unquoted(rest)
        time = line.time
        for stamp in match.groups():
            time = stamp_seconds(stamp) if time is None else time
        return line._replace(text=rest, time=time, rank=_rank(before) or line.rank)


class Json:
    """A field of JSON."""

    def __init__(self, path: Path, time: Path | None, *, sure: bool) -> None:
        self.key = (path, time)
        self.sure = sure
        self._path, self._time = path, time

    def take_off(self, line: Line) -> Line | None:
        """Take it off."""
        entry = _json(line.text)
        text = None if entry is None else _text(_at(entry, self._path))
        if text is None or entry is None:
            return None
        time = None if self._time is None else value_seconds(_at(entry, self._time))
        first, *more = text.rstrip(b"\r\n").split(b"\n")
        return line._replace(text=first, time=line.time if time is None else time, more=tuple(more))


class Csv:
    """A column of CSV."""

    def __init__(self, column: int, time: int | None) -> None:
        self.key = (column, time)
        self.sure = True
        self._column, self._time = column, time

    def take_off(self, line: Line) -> Line | None:
        """Take it off."""
        row = _row(line.text)
        if len(row) <= self._column:
            return None
        time = None if self._time is None else value_seconds(row[self._time])
        text = row[self._column].encode("utf-8", "surrogateescape")
        return line._replace(text=text, time=line.time if time is None else time)


Form: TypeAlias = tuple["Before | Json | Csv", ...]


class Taught(NamedTuple):
    """What a line has taught: what was held of the lines with its form, if there are enough, which can be read now."""

    held: list[Any]


class Surroundings:
    """What surrounds the lines of one stream."""

    def __init__(self, *, strict: bool = False) -> None:
        self._again = _CONFIRMED_AGAIN if strict else _CONFIRMED
        self.unread: bytes | None = None  # the first line with a head of SGLang's in no form that could be learned
        self._forms: list[tuple[Form, bool]] = []  # with whether SGLang's own prefix follows
        self._seen: Counter[Any] = Counter()
        self._held: dict[Any, list[Any]] = {}

    def take_off(self, text: bytes) -> Line | None:
        """Take off what the stream's lines are known to be surrounded by; `None` where this one is not."""
        for form, prefixed in self._forms:
            found = _taken_off(form, text)
            if found is not None and (prefixed or parse_plain_prefix(found.text) is None):
                return found._replace(prefixed=prefixed)
        return None

    def learn(self, text: bytes, held: Any, *, settled: bool) -> Taught | None:
        """Learn from a line of no known form; `None` where it teaches nothing.

        A form is believed at once only where the stream has none yet; `settled`: lines that need none have been read.
        """
        if _HEAD.search(text) is None and _BYTES not in text:
            return None
        form = _form_of(text)
        found = _taken_off(form, text) if form else None
        if not form or found is None:
            self.unread = self.unread if form == () else self.unread or text[:_LONGEST_BEFORE]
            return None
        prefixed = parse_plain_prefix(found.text) is not None
        key = (prefixed, *(step.key for step in form))
        if key not in self._seen and len(self._seen) >= _HELD:
            self._seen.clear()
            self._held.clear()
        self._seen[key] += 1
        if settled or self._forms:
            enough = self._again
        else:
            enough = 1 if all(step.sure for step in form) else _CONFIRMED
        if len(text) <= _HELD_LENGTH or self._seen[key] >= enough:
            self._held.setdefault(key, []).append(held)
        if self._seen[key] < enough:
            self.unread = self.unread or text[:_LONGEST_BEFORE]
            return Taught([])
        self._forms.insert(0, (form, prefixed))
        del self._forms[_FORMS_KEPT:], self._seen[key]
        return Taught(self._held.pop(key))


def find(text: bytes) -> Line | None:
    """Take off what surrounds one line, without knowing its stream; `None` where it has no head of SGLang's."""
    form = _form_of(text)
    return None if form is None else _taken_off(form, text)


def _taken_off(form: Form, text: bytes) -> Line | None:
    line: Line | None = Line(text, None, NO_RANK)
    for step in form:
        line = step.take_off(line) if line is not None else None
    return line


def _form_of(text: bytes, layers: int = _LAYERS) -> Form | None:
    """Find what surrounds a line: the fewest steps to its head; `None` where it has no head or no form."""
    head = _HEAD.search(text)
    start = len(text) if head is None else head.start()
    if not layers or (head is None and _BYTES not in text):
        return None
    if not start:
        return ()
    brace = text.find(b"{", 0, start)
    if brace >= 0 and (entry := _json(text[brace:])) is not None:
        field = _field(entry, layers)
        before = Before.of(text[:brace]) if brace else None
        if field is None or (brace and before is None):
            return None
        return ((before, *field) if before else field) if brace else field
    if text[:1] == b'"' or b',"' in text[:start]:
        column = _column(_row(text), layers)
        if column is not None:
            return column
    before = Before.of(text[:start]) if head is not None else None
    return None if before is None else (before,)


def _field(entry: dict[str, Any], layers: int) -> Form | None:
    if str(entry.get("event", "")).startswith("request."):
        return None
    leaves = list(_leaves(entry, ()))
    for path, value in leaves:
        text = _text(value)
        if text is None or any(name in _SERVERS_OWN for name in path):
            continue
        inner = _form_of(text.split(b"\n", 1)[0], layers - 1)
        if inner is None:
            continue
        times = [other for other, found in leaves if other != path and value_seconds(found) is not None]
        times.sort(key=lambda other: _TIMES.index(other[-1]) if other[-1] in _TIMES else len(_TIMES))
        told = any(other[-1] in _LEVELS for other, _ in leaves)
        return Json(path, times[0] if times else None, sure=bool(times) or told), *inner
    return None


def _column(row: list[str], layers: int) -> Form | None:
    for column, value in enumerate(row):
        inner = _form_of(value.encode("utf-8", "surrogateescape"), layers - 1)
        if inner is not None and (len(row) > 1 or inner == ()):
            times = [place for place, other in enumerate(row) if place != column and value_seconds(other) is not None]
            return Csv(column, times[0] if times else None), *inner
    return None


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Give the texts and numbers of a JSON value, those nearest to its root first."""
    level: list[tuple[Path, Any]] = [(path, value)]
    given = 0
    for _ in range(_DEPTH):
        below: list[tuple[Path, Any]] = []
        for place, found in level:
            if isinstance(found, dict):
                below += [((*place, name), inner) for name, inner in found.items()]
            elif isinstance(found, list) and _text(found) is None:
                below += [((*place, number), inner) for number, inner in enumerate(found[:2])]
            elif given < _LEAVES:
                given += 1
                yield place, found
        level = below[:_LEAVES]


def _at(value: Any, path: Path) -> Any:
    for name in path:
        try:
            value = value[name]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _text(value: Any) -> bytes | None:
    if isinstance(value, str):
        return value.encode("utf-8", "replace")
    if isinstance(value, list) and len(value) > _DEPTH and all(isinstance(byte, int) for byte in value):
        return bytes(byte & 255 for byte in value)
    return None


def _json(text: bytes) -> dict[str, Any] | None:
    if text[:1] != b"{":
        return None
    try:
        entry = json.loads(text.rstrip().removesuffix(b","))
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def _row(text: bytes) -> list[str]:
    try:
        return next(csv.reader([text.decode("utf-8", "surrogateescape")]), [])
    except csv.Error:
        return []


def _unquoted(rest: bytes) -> bytes:
    """Read the value of a field up to its closing quotation mark."""
    rest = rest.rstrip().removesuffix(b",")
    try:
        return str(json.loads(b'"' + rest.removesuffix(b'"') + b'"')).encode("utf-8", "replace")
    except ValueError:
        return rest.removesuffix(b'"')


def _rank(before: bytes) -> Rank | None:
    found = _RANK_TOKEN.findall(before)
    return parse_rank(b" " + b" ".join(found)) if found else None
