"""The layers around a line: the text that loggers, shippers and terminals print before it, or the field of JSON or CSV that holds it.

Each layer removes itself from a line, and returns the time and the other fields in it. `forms` finds the layers of a line.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from sglang_tuning_exporter.sglang.events import NO_RANK, Rank
from sglang_tuning_exporter.sglang.log.json_lines import (
    Path,
    json_of,
    leaves_of,
    quoted_text,
    records_of,
    scalar_of,
    text_of,
    value_at,
)
from sglang_tuning_exporter.sglang.log.prefix import parse_rank
from sglang_tuning_exporter.sglang.log.stamps import STAMP, stamp_seconds, value_seconds
from sglang_tuning_exporter.sglang.log.terminal import is_well_known_json, well_known

LONGEST_BEFORE = 300

# SGLang's prefix, or the words of a line without prefix, with what follows them: a sentence about them does not match.
_PREFIX = rb"\[(?:20\d\d-\d\d-\d\d[ T])?[0-2]\d:[0-5]\d:[0-6]\d(?:[.,]\d{1,9})?(?: +[A-Z_]{2,12}\d{1,5})*\] ?(?=\S)"
_WORDS = (
    rb"(?:Decode|Prefill) batch(?: ?\[\d{1,12}\])?(?:\([^)\n]{1,40}\))?[.,] ?#|new fill batch\. #"
    rb"|#running-req: \d|KV cache pool is full\.|[Dd]ecode out of memory happened|Testing retraction"
    rb"|server_args=(?:ServerArgs\(|\{)|max_total_num_tokens=\d|Memory pool end\.|KV Cache is allocated\."
    rb"|Load weight (?:begin|end)|Capture [\w -]{0,40}[Gg]raph (?:begin|end)|Mamba Cache is allocated\."
    rb"|The server is fired up and ready to roll!|[A-Z]\w{1,40} hit an exception: Traceback"
)
HEAD, WORDS = re.compile(_PREFIX + rb"|" + _WORDS), re.compile(_WORDS)
_BETWEEN = rb"(?:\[?[A-Z]{3,8}\]?[ :|-]+|[\[({][\w ./:={}-]{0,60}[\])}]:? ?|[ \t|-]|[A-Z]:[ \t])"
_SECOND_PREFIX = re.compile(rb"%b(?:%b{0,12}?(?=%b)|%b{1,12}?(?=%b))" % (_PREFIX, _BETWEEN, _PREFIX, _BETWEEN, _WORDS))
_RANK = rb"(?<![\w.-])(?:DP|TP|PP|EP|ATTN_CP|MOE_DP)\d{1,5}(?![\w.-])"
_RANK_TOKEN = re.compile(_RANK)

# The text before a line as a pattern: times, fields in quotes, groups in brackets and words vary, all else is fixed.
_LABELS = rb"\{[\w.-]+ ?[=:] ?\"[^\"\n]*\"(?:, ?[\w.-]+ ?[=:] ?\"[^\"\n]*\")*\}"
_GREP = rb"(?:[\w./+-]{1,200}[:-])?\d{1,9}[:-]"  # file and number of a line as grep prints them, around a match with hyphens
_TOKEN = re.compile(
    rb"(?P<stamp>(?<![\w.-])" + STAMP + rb")|(?P<labels>" + _LABELS + rb")|(?P<grep>" + _GREP + rb")(?=\Z)"
    rb"|(?P<quoted>\"[^\"\n]*\")(?=[ ,:;=}\t])|(?P<apostrophes>'[^'\n]*')(?=[ ,:;=}\t])|(?P<bracket>\[(?!"
    + STAMP
    + rb")[^\]\[\n]{0,120}\])"
    rb"|(?P<round>\([^()\n]{0,120}\))|(?P<angle><[^<>\n]{0,60}>)|(?P<curly>\{[\w./:=-]{0,80}\})"
    rb"|(?P<rank>" + _RANK + rb")|(?P<word>[\w./@%+:#~*-]*\w[/@%+*-]*)|(?P<space>[ \t]+)|(?P<other>[^\w\n])"
)
_PATTERNS = {
    "stamp": STAMP,
    "labels": _LABELS,
    "grep": _GREP,
    "quoted": rb"\"[^\"\n]*\"",
    "apostrophes": rb"'[^'\n]*'",
    "bracket": rb"\[[^\]\[\n]{0,120}\]",
    "round": rb"\([^()\n]{0,120}\)",
    "angle": rb"<[^<>\n]{0,60}>",
    "curly": rb"\{[\w./:=-]{0,80}\}",
    "rank": _RANK,
    "word": rb"[\w./@%+:#~*-]*\w[/@%+*-]*",
    "space": rb"[ \t]+",
}
_WORDS_AT_MOST, _WORDS_SURE = 24, 6
_QUOTES = re.compile(rb"obj=|text=|ReqInput|Model attempted|\brid=|prompt|content|\"(?:obj|text|messages|input)\"|\\")
# Before a line that is the value of a field; Python prints whichever the value does not contain.
_QUOTE_MARKS = (b'"', b"'")
_QUOTE = ("fixed", rb"[\"']")
_ENDS = b" \t]:|>-\"';+`,(=\x1e\xbf\xa0\x8b"  # the last three end a byte order mark and spaces of Unicode's
OFTEN_REQUEST_FIELDS = ("text", "out", "content", "body")  # of a request's log as well as of a shipper's
LEVELS = ("level", "levelname", "severity", "lvl", "log.level", "PRIORITY", "stream")

BYTES = b'MESSAGE":['  # journald exports a message that is not UTF-8 as a list of bytes
CRI = re.compile(rb"(" + STAMP + rb") (stdout|stderr) ([PF])(?::\S*)?(?: |$)")
_RAY_REPEATED = re.compile(rb" \[repeated \d+x across (?:cluster|actors)\].*$")
_DOCKER_PATH: tuple[str | int, ...] = ("log",)
_DOCKER_CUTS = 16_000  # bytes; it cuts at 16,384, or a little before so that no character is cut
_LINES_OF_MESSAGE = 200
# Levels and streams differ from line to line of one program.
_NEVER_FIXED = re.compile(
    rb"[\[(<]?(?:trace|debug|debg|info|notice|warn|warning|error|err|critical|crit|fatal|stdout|stderr|[DIWEFCN])[\])>]?[:|]?",
    re.IGNORECASE,
)
_VALUES = {b'"': re.compile(rb'(?:[^"\\]|\\.)*'), b"'": re.compile(rb"(?:[^'\\]|\\.|'')*")}
_JSON_TOKEN = re.compile(rb'("(?:[^"\\]|\\.)*"|[{}\[\],:]|\s+|[^\s"{}\[\],:]+)(?=\s*(:)?)')


class UnwrappedLine(NamedTuple):
    """A line without its wrapping."""

    text: bytes
    time: float | None = None  # as printed around the line
    rank: Rank = NO_RANK
    more: tuple[bytes, ...] = ()  # further lines of one message
    prefixed: bool = True  # SGLang's own prefix follows the wrapping of this stream
    stream: str | None = None  # of a container, whose lines are cut
    partial: bool = False  # the stream's next line continues this one
    fields: tuple[tuple[Any, Any], ...] = ()  # other fields around it: hosts, programs, process ids
    records: tuple[bytes, ...] = ()  # further records of the same JSON document, each as a document of its own


def second_prefix(text: bytes) -> int:
    """Return where SGLang's own prefix or words begin after another time in brackets; 0 where that time is SGLang's."""
    match = _SECOND_PREFIX.match(text)
    return match.end() if match is not None else 0


class Layer:
    """One layer around a line."""

    key: Any  # by which layers are compared
    sure = True  # no raw text looks like it: one line is enough to learn it
    ambiguous = False  # a request's log has such a field too

    def remove(self, line: UnwrappedLine) -> UnwrappedLine | None:
        """Return the line without this layer; `None` where it does not have it."""
        raise NotImplementedError

    def pattern(self, _text: bytes, _fields: dict[Any, set[Any]]) -> bytes | None:
        """Return a pattern of this layer in a whole line like `text`, with these values of its fields; `None` where there is none."""
        return None

    def is_well_known(self, before: bytes, after: bytes) -> bool:
        """Whether container runtimes and log followers write it as in `before`; `after` is the line without it."""
        return well_known(before) >= before.find(after)


class Cri(Layer):
    """The time, stream and mark of unfinished lines that a container runtime prints."""

    key = "cri"

    def remove(self, line: UnwrappedLine) -> UnwrappedLine | None:
        """Return the line without this layer; `None` where it does not have it."""
        match = CRI.match(line.text)
        if match is None:
            return None
        time = stamp_seconds(match[1]) if line.time is None else line.time
        rest = line.text[match.end() :]
        return line._replace(text=rest, time=time, stream=match[2].decode(), partial=match[3] == b"P")

    def pattern(self, _text: bytes, _fields: dict[Any, set[Any]]) -> bytes:
        """Return a pattern of this layer in a whole line; `None` where there is none."""
        return STAMP + rb" (?:stdout|stderr) F(?::\S*)? "


class LeadingText(Layer):
    """A text before the line."""

    def __init__(self, parts: list[tuple[str, bytes]], *, sure: bool) -> None:
        self.sure = sure
        self._parts = parts  # kind of token, and its pattern
        self.key = b"".join(pattern for _, pattern in parts)
        self._kinds = [kind for kind, _ in parts if kind in _PATTERNS]
        self._pattern = re.compile(
            b"".join(b"(%b)" % pattern if kind in _PATTERNS else pattern for kind, pattern in parts)
        )
        self._ends_with_quote = parts[-1] is _QUOTE

    @classmethod
    def learn(cls, before: bytes) -> LeadingText | None:
        """Learn it from the text before one line; `None` where that could be part of a request or of a sentence."""
        if not before or len(before) > LONGEST_BEFORE or _QUOTES.search(before) or before[-1] not in _ENDS:
            return None
        quote = before[-1:] if before.endswith(_QUOTE_MARKS) else b""
        parts: list[tuple[str, bytes]] = []
        words, braces, position, rest = 0, 0, 0, before.removesuffix(quote)
        while position < len(rest):
            match = _TOKEN.match(rest, position)
            if match is None or match.lastgroup is None:
                return None
            position = match.end()
            kind = match.lastgroup
            if kind == "other" and match[0] in _QUOTE_MARKS:
                return None
            words += kind == "word"
            braces += match[0] in (b"{", b"}")
            # The last space is fixed: the indentation of a traceback follows it.
            varies = kind in _PATTERNS and not (kind == "space" and position == len(rest))
            parts.append((kind, _PATTERNS[kind]) if varies else ("fixed", re.escape(match[0])))
        if words > _WORDS_AT_MOST:
            return None
        return cls(
            parts + [_QUOTE] * bool(quote), sure=not (quote or braces or rest.endswith(b"=")) and words <= _WORDS_SURE
        )

    def remove(self, line: UnwrappedLine) -> UnwrappedLine | None:
        """Return the line without this layer; `None` where it does not have it."""
        match = self._pattern.match(line.text, 0, 2 * LONGEST_BEFORE)
        if match is None:
            return None
        before, rest = match[0], line.text[match.end() :]
        if self._ends_with_quote:
            rest = unquoted(rest, before[-1:])
        if b"pid=" in before:
            rest = _RAY_REPEATED.sub(b"", rest)
        if before[-1:] == b"`":
            rest = rest.removesuffix(b"`")
        time, fields = line.time, []
        for place, (kind, value) in enumerate(zip(self._kinds, match.groups(), strict=True)):
            if kind == "stamp":
                time = stamp_seconds(value) if time is None else time
            elif kind not in ("space", "rank") and _NEVER_FIXED.fullmatch(value) is None:
                fields.append(((self.key, place), value))
        return line._replace(text=rest, time=time, rank=_rank(before) or line.rank, fields=(*line.fields, *fields))

    def pattern(self, _text: bytes, fields: dict[Any, set[Any]]) -> bytes | None:
        """Return a pattern of this layer in a whole line; `None` where there is none."""
        if self._ends_with_quote:  # the line is changed, not only cut
            return None
        found, place = [], -1
        for kind, pattern in self._parts:
            place += kind in _PATTERNS
            values = fields.get((self.key, place)) if kind in _PATTERNS else None
            found.append(b"(?:%b)" % b"|".join(map(re.escape, filter(None, values))) if values else pattern)
        return b"".join(found)


class Json(Layer):
    """A field of JSON."""

    def __init__(self, path: Path, time: Path | None, *, sure: bool) -> None:
        self.key = (path, time)
        self.ambiguous = path[-1] in OFTEN_REQUEST_FIELDS
        self.sure = sure and not self.ambiguous
        self.path, self._time = path, time

    def remove(self, line: UnwrappedLine) -> UnwrappedLine | None:
        """Return the line without this layer; `None` where it does not have it."""
        entry = json_of(line.text)
        text = None if entry is None else text_of(value_at(entry, self.path))
        if text is None or entry is None:
            return None
        time = None if self._time is None else value_seconds(value_at(entry, self._time))
        stream, partial = line.stream, line.partial
        if self.path == _DOCKER_PATH and isinstance(entry, dict) and "stream" in entry:
            stream, partial = str(entry["stream"]), not text.endswith(b"\n") and len(text) >= _DOCKER_CUTS
        first, *more = text.rstrip(b"\r\n").split(b"\n")[:_LINES_OF_MESSAGE]
        return line._replace(
            text=first,
            time=line.time if time is None else time,
            more=tuple(more),
            stream=stream,
            partial=partial,
            fields=(*line.fields, *self._fields(entry)),
            records=tuple(records_of(entry, self.path)[1:]),
        )

    def _fields(self, entry: Any) -> Iterator[tuple[Path, Any]]:
        for path, value in leaves_of(entry, ()):
            if path not in (self.path, self._time) and path[-1] not in LEVELS and isinstance(value, (str, int)):
                yield path, value

    def pattern(self, text: bytes, fields: dict[Any, set[Any]]) -> bytes | None:
        """Return a pattern whose first group is the field; `None` for a document of several records."""
        if any(isinstance(name, int) for name in self.path):
            return None
        wanted = json.dumps(value_at(json_of(text), self.path))
        fixed = {value for values in fields.values() for value in values}
        found, taken = [], False
        for token, key in _JSON_TOKEN.findall(text):
            value = None if key else scalar_of(token)
            if isinstance(value, str) and not taken and json.dumps(value) == wanted:
                found.append(rb'"([^"\\\n]*(?:\\"[^"\\\n]*)*)(?:(?:\\r)?\\n)?"')
                taken = True
            elif value is None or value in fixed:
                found.append(re.escape(token))
            else:
                found.append(rb'"[^"\\\n]*"' if isinstance(value, str) else rb"-?[\d.eE+]+")
        return b"".join(found) if taken else None

    def is_well_known(self, before: bytes, _after: bytes) -> bool:
        """Whether it is a JSON object as Docker and structured loggers write."""
        return is_well_known_json(before)


class Quoted(Layer):
    """A line as a string of JSON."""

    key = "quoted"

    def remove(self, line: UnwrappedLine) -> UnwrappedLine | None:
        """Return the line without this layer; `None` where it does not have it."""
        text = quoted_text(line.text)
        return None if text is None else line._replace(text=text.rstrip(b"\n"))


class Csv(Layer):
    """A column of CSV."""

    def __init__(self, column: int, time: int | None, columns: int, delimiter: str) -> None:
        self.key = (column, time, columns, delimiter)
        self._column, self._time, self._columns, self._delimiter = self.key

    def remove(self, line: UnwrappedLine) -> UnwrappedLine | None:
        """Return the line without this layer; `None` where it does not have it."""
        row = row_of(line.text, self._delimiter)
        if len(row) != self._columns:
            return None
        time = None if self._time is None else value_seconds(row[self._time])
        text = row[self._column].encode("utf-8", "surrogateescape")
        others = [(place, value) for place, value in enumerate(row) if place not in (self._column, self._time)]
        fields = (*line.fields, *others)
        return line._replace(text=text, time=line.time if time is None else time, fields=fields)

    def is_well_known(self, _before: bytes, _after: bytes) -> bool:
        """Return False: none of them writes CSV."""
        return False


def row_of(text: bytes, delimiter: str) -> list[str]:
    """Read a line of CSV; empty where it is none."""
    try:
        return next(csv.reader([text.decode("utf-8", "surrogateescape")], delimiter=delimiter), [])
    except csv.Error:
        return []


def unquoted(rest: bytes, quote: bytes) -> bytes:
    """Read the value of a field up to its closing quotation mark."""
    match = _VALUES[quote].match(rest)
    value = rest if match is None else match[0]
    if quote == b"'":
        value = value.removesuffix(b"\\n").removesuffix(b"\\r")  # of a line as Python prints its bytes
        return value.replace(b"\\'", b"'").replace(b"''", b"'")
    try:
        return str(json.loads(b'"' + value + b'"')).encode("utf-8", "replace")
    except ValueError:
        return value


def _rank(before: bytes) -> Rank | None:
    found = _RANK_TOKEN.findall(before)
    return parse_rank(b" " + b" ".join(found)) if found else None
