"""SGLang's log lines: the text around them, their kinds as a table, and `Reader`, which turns a stream of lines into
events.

To add a line, add a row to `MESSAGES`: the kind of its event, a pattern of the message behind the stamp, the first
release that prints it, and the event's word. A group of the pattern is a figure by its name. Wordings are those of the
wheels 0.3.0 to 0.5.23.

SGLang's stamp, `[2025-11-20 11:40:13 DP0 TP3] `, or its words are searched in a line. What stands around them is a
form: layers of text and of fields of JSON, the outer ones first. A form that cannot be a sentence counts at once, any
other when `_ENOUGH` lines in a row have it; lines without a stamp, such as a traceback's, do not end the row, and are
read in the form of the line before.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from operator import itemgetter
from signal import Signals
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from sglang_tuning_exporter.core.events import LONGEST_TEXT, NO_RANK, Event, Rank, class_of, quoted
from sglang_tuning_exporter.sglang.advices import recognise
from sglang_tuning_exporter.sglang.flags import parse_server_args
from sglang_tuning_exporter.sglang.metrics import MOST_RANKS

LONGEST = 262_144  # bytes read of a line; `server_args=` has about 20 kB
DAY = 86_400
FIRST_DATED = 1e9  # seconds; a smaller time is one of the day
_LONGEST_BEFORE = 300
_ENOUGH = 3
_MOST_STREAMS, _HELD_LENGTH = 16, 1 << 20
_FORMS_KEPT, _LAYERS = 8, 6
_RECORDS, _PLACES, _MOST_LINES = 4096, 256, 200  # of one JSON document
_DEPTH = 10  # an OpenTelemetry record is eight levels deep
_DAY_OF_1970 = dt.date(1970, 1, 1).toordinal()

# SGLang's own stamp: configure_logger, sglang/srt/utils.py, later srt/utils/common.py. 0.3.0 has no date; milliseconds
# with SGLANG_LOG_MS (0.5.6).
_RANKS = rb"(?:[ ]+[A-Z_]{2,12}\d{1,5})*"
_STAMP = re.compile(
    rb"(?:\[?((?:\d{4}-\d\d-\d\d[ T])?[0-2]\d:[0-5]\d:[0-6]\d(?:[.,]\d{1,9})?)(" + _RANKS + rb")[ ]*\]"
    rb"|\[((?:DP|TP|PP|EP|ATTN_CP|MOE_DP)\d{1,5}" + _RANKS + rb")\])[ ]?"
)
_RANK = re.compile(rb"(?<![A-Z_])(DP|TP|PP)(\d{1,5})")


def stamp_of(text: bytes) -> tuple[float | None, Rank, int] | None:
    """Read SGLang's stamp at the beginning of a line: its time, as UTC, of the day where it has no date; its ranks;
    where the message begins.
    """
    match = _STAMP.match(text)
    return None if match is None else (*_read_stamp(match[1], match[2] or match[3] or b""), match.end())


_PLAIN_STAMP = re.compile(rb"\[(20\d\d-\d\d-\d\d) ([0-2]\d):([0-5]\d):([0-5]\d)\] ?")


@lru_cache(maxsize=64)
def _midnight(date: bytes) -> float | None:
    """Return the midnight (UTC) that begins a date such as 2025-11-13, in unix seconds; None where no such day is."""
    return time_of(date + b" 00:00:00")


@lru_cache(maxsize=4096)
def _dated(stamp: bytes) -> tuple[float, Rank] | None:
    """Read a whole stamp; None where it is none, or has no date."""
    plain = _PLAIN_STAMP.fullmatch(stamp)
    if plain is not None and (midnight := _midnight(plain[1])) is not None:
        return midnight + int(plain[2]) * 3600 + int(plain[3]) * 60 + int(plain[4]), NO_RANK
    found = stamp_of(stamp)
    if found is None or found[0] is None or found[0] < FIRST_DATED or found[2] != len(stamp):
        return None
    return found[0], found[1]


@lru_cache(maxsize=4096)
def _read_stamp(time: bytes | None, ranks: bytes) -> tuple[float | None, Rank]:
    return time_of(time) if time else None, _rank_of(ranks)


def _rank_of(text: bytes) -> Rank:
    """Read the ranks in ` DP1 PP0 TP3`."""
    found = {name: int(number) for name, number in _RANK.findall(text) if int(number) < MOST_RANKS}
    return Rank(found.get(b"DP"), found.get(b"TP"), found.get(b"PP")) if found else NO_RANK


# Times as others print them.
_MONTHS = b"Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_CLOCK = rb"(?P<hours>[0-2]\d):(?P<minutes>[0-5]\d):(?P<seconds>[0-6]\d)(?:[.,](?P<fraction>\d{1,9}))?"
_YEAR, _MONTH, _DATE = rb"(?P<year>\d{4})", rb"(?P<month>[01]\d)", rb"(?P<day>[0-3]\d)"
_NAME = rb"(?P<name>%b)" % _MONTHS
_ZONE = rb"(?: ?(?P<zone>Z|UTC|GMT|[+-]\d\d:?\d\d))?"
_TIMES = (
    _YEAR + rb"[-/.]" + _MONTH + rb"[-/.]" + _DATE + rb"(?:[ T_]|, )" + _CLOCK + _ZONE,
    _YEAR + _MONTH + _DATE + rb"[-T ]?" + _CLOCK.replace(b":(?P", b":?(?P") + rb"(?!\d)" + _ZONE,
    _NAME + rb" (?P<day>[ \d]\d) (?:(?P<year>\d{4}) )?" + _CLOCK,  # syslog
    rb"[DIWEFC]" + _MONTH + _DATE + rb" " + _CLOCK,  # glog
    _DATE + rb"[ /-]" + _NAME + rb"[ /-](?P<year>\d{4})[ :]" + _CLOCK + _ZONE,
    _MONTH + rb"[-/]" + _DATE + rb" " + _CLOCK,
    _CLOCK + rb"(?![\w:])",
    rb"(?P<epoch>(?:1[4-9]|2[01])\d{8}(?:\.\d{1,9}|\d{3}|\d{6}|\d{9})?)(?![\w.:-])",  # 2014 to 2040, in any unit
)
_TIME = b"(?:%b)" % b"|".join(re.sub(rb"\?P<\w+>", b"?:", form) for form in _TIMES)
_TIMED = re.compile(rb"(?<![\w.-])" + _TIME)
_TIME_READERS = tuple(map(re.compile, _TIMES))


def time_of(text: bytes) -> float | None:
    """Read the time that begins a text: unix seconds, without a zone as UTC; seconds since midnight where there is no
    date.
    """
    match = next((match for form in _TIME_READERS if (match := form.match(text)) is not None), None)
    if match is None:
        return None
    found = match.groupdict()
    if epoch := found.get("epoch"):
        whole, _, fraction = epoch.partition(b".")
        return float(epoch) if fraction else int(whole) / 10.0 ** (len(whole) - 10)
    fraction = found["fraction"]
    clock: float = int(found["hours"]) * 3600 + int(found["minutes"]) * 60 + int(found["seconds"])
    clock += float(b"0." + fraction) if fraction else 0.0
    if "day" not in found:
        return clock
    month = _MONTHS.split(b"|").index(found["name"]) + 1 if found.get("name") else int(found["month"])
    today = dt.datetime.now(dt.timezone.utc).date()
    try:
        day = dt.date(int(found.get("year") or today.year), month, int(found["day"])).toordinal()
        if (
            not found.get("year") and day > today.toordinal() + 1
        ):  # without a year it is the last one that has begun anywhere
            day = dt.date(today.year - 1, month, int(found["day"])).toordinal()
    except ValueError:
        return None
    zone = (found.get("zone") or b"Z").replace(b":", b"")
    ahead = (int(zone[1:3]) * 3600 + int(zone[3:5]) * 60) * (-1 if zone[:1] == b"-" else 1) if zone[:1] in b"+-" else 0
    return (day - _DAY_OF_1970) * DAY + clock - ahead


class Line(NamedTuple):
    """A line without the text around it."""

    text: bytes  # from SGLang's stamp on; where another text replaces it, the message
    time: float | None = None  # as printed around it: unix seconds, or seconds since midnight
    rank: Rank = NO_RANK
    headed: bool = False  # another text stands in place of SGLang's stamp
    glued: bool = False  # behind another text without an end of line
    around: str = ""  # names of the layers around it


# Words of SGLang's that begin a message, with what follows them: a sentence about them does not match.
_WORDS = (
    rb"(?:Decode|Prefill) batch(?: ?\[\d{1,12}\])?(?:\([^)\n]{1,40}\))?[.,] ?#|new fill batch\. #"
    rb"|#running-req: \d|KV cache pool is full\.|[Dd]ecode out of memory happened|Testing retraction"
    rb"|server_args=(?:ServerArgs\(|\{)|max_total_num_tokens=\d|Memory pool end\.|KV Cache is allocated\."
    rb"|Load weight (?:begin|end)|Capture [\w -]{0,40}[Gg]raph (?:begin|end)|Mamba Cache is allocated\."
    rb"|The server is fired up and ready to roll!|[A-Z]\w{1,40} hit an exception: Traceback"
)
_OWN = rb"\[(?:20\d\d-\d\d-\d\d[ T])?[0-2]\d:[0-5]\d:[0-6]\d(?:[.,]\d{1,9})?(?: +[A-Z_]{2,12}\d{1,5})*\] ?(?=\S)"
_HEAD, WORDS = re.compile(_OWN + rb"|" + _WORDS), re.compile(_WORDS)
_BETWEEN = (
    rb"(?:\[?[A-Z]{3,8}\]?[ :|-]+|\[[\w ./:={}-]{0,60}\]:? ?|[({][\w ./:={}-]{0,60}[)}]:? ?|[\w./-]{1,60}\.py:\d{1,6}:?"
    rb" ?|[ \t|-]|[A-Z]:[ \t])"
)
# Another time in brackets before SGLang's stamp or words.
_SECOND = re.compile(rb"%b(?:%b{0,12}?(?=%b)|%b{1,12}?(?=%b))" % (_OWN, _BETWEEN, _OWN, _BETWEEN, _WORDS))

_CRI = re.compile(rb"(" + _TIME + rb") (stdout|stderr) ([PF])(?::\S*)?(?: |$)")
_DOCKER_CUTS = 16_000  # bytes; it cuts at 16,384, or a little before so that no character is cut
_REPEATED = re.compile(rb" \[repeated \d+x across (?:cluster|actors)\].*$")  # by Ray
_ANSI = re.compile(rb"\x1b\[[0-9;:?]*[A-Za-z]|\x1b\([A-Z0-9]|\x1b[=>78]|\x1b[\]_P^][^\x07\x1b\n]{0,300}(?:\x07|\x1b\\)")
_BAR = re.compile(rb"\s*(?:[A-Z][\w /-]{0,60}(?:\([^()\n]{0,80}\))?: *)?\d{1,3}%\|[^|\n]{0,200}\|[^\"'{}\\\n]{0,120}$")
_GLUED = re.compile(rb"\[20\d\d-[01]\d-[0-3]\d [0-2]\d:[0-5]\d:[0-5]\d")
_GLUED_WITHIN = 600
_QUOTING = re.compile(rb"[\"'{}\\]|obj=|text=|ReqInput|Model attempted|rid=|prompt")


def _without_terminal(line: bytes) -> bytes:
    """Return a line without colours, carriage returns at its ends, and NULs or a byte order mark at its start."""
    line = line.strip(b"\r")
    if b"\x1b" in line:
        line = _ANSI.sub(b"", line)
    if line[:1] in (b"\x00", b"\xef"):
        line = line.lstrip(b"\x00").removeprefix(b"\xef\xbb\xbf")
    return line


# The name of what holds it, None for a list or nothing, and its own: a number in a row, None in a list of lines.
Field: TypeAlias = tuple[str | None, str | int | None]


class Layer(NamedTuple):
    """One text around lines: before them a text, or in a field of JSON."""

    name: str
    before: re.Pattern[bytes] | None = None
    field: Field = (None, None)
    headed: bool = False  # it stands in place of SGLang's stamp


Form: TypeAlias = tuple[Layer, ...]


def without(form: Form, line: Line) -> list[Line]:
    """Return a line, or the records in it, without these layers; nothing where it does not have them."""
    lines = [line]
    for layer in form:
        lines = [inner for line in lines for inner in _peeled(layer, line)]
    return lines


def _peeled(layer: Layer, line: Line) -> list[Line]:
    around = f"{line.around}, {layer.name}"
    if layer.before is None:
        return [
            line._replace(text=each, time=time if line.time is None else line.time, around=around)
            for time, lines in islice(records_at(parsed(line.text), layer.field), _RECORDS)
            for each in lines[:_MOST_LINES]
        ]
    match = layer.before.match(line.text, 0, 2 * _LONGEST_BEFORE)
    if match is None:
        return []
    before, text = match[0], _value(match[0], line.text[match.end() :])
    printed = _TIMED.search(before) if line.time is None else None
    return [
        line._replace(
            text=_without_terminal(_REPEATED.sub(b"", text) if b"pid=" in before else text),
            time=line.time if printed is None else time_of(printed[0]),
            rank=_rank_of(before) if layer.headed else line.rank,
            headed=layer.headed,
            around=around,
        )
    ]


def _value(before: bytes, text: bytes) -> bytes:
    """Return what a field, a quotation or a column of CSV holds; any other text unchanged."""
    quote, is_column = text[:1], before.endswith(_DELIMITERS) or not before
    values = _COLUMN if is_column and quote == b'"' else _VALUES.get(quote)
    match = None if values is None else values.match(text, 1)
    if match is None:  # a comma of SGLang's has a space behind it, and SGLang prints no tabs
        ends = _COLUMN_ENDS.get(before[-1:])
        return text if ends is None or quote == b"{" else ends.split(text, 1)[0]
    if quote == b"'":
        return match[0].removesuffix(b"\\n").replace(b"\\'", b"'").replace(b"''", b"'")
    if is_column:
        return match[0].replace(b'""', b'"')
    loaded = parsed(b'"' + match[0] + b'"')
    return loaded.encode("utf-8", "replace") if isinstance(loaded, str) else match[0]


def _form_of(text: bytes, layers: int = _LAYERS) -> tuple[Form, bool] | None:
    """Return the layers around a line, and whether no sentence looks like them; None without SGLang's stamp or words,
    or such layers.
    """
    head = _HEAD.search(text)
    if head is None:
        return _form_of_frame(text)
    if not layers:
        return None
    second = _SECOND.match(text, head.start())
    start = head.start() if second is None else second.end()
    if start == 0:
        return (), True
    document = parsed(text)
    learned = _text_layer(text, start) if document is None else _field_layer(document, layers)
    if learned is None:
        return None
    layer, is_sure = learned
    for line in _peeled(layer, Line(text)):
        if (inner := _form_of(line.text, layers - 1)) is not None:
            return (layer, *inner[0]), is_sure and inner[1]
    return None


def _form_of_frame(text: bytes) -> tuple[Form, bool] | None:
    """Return the known text before a frame of a traceback; None before anything else."""
    known = _KNOWN_BEFORE.match(text) if b'  File "' in text else None
    if known is None or _FRAME.match(text, known.end()) is None:
        return None
    return (_KNOWN[known.lastgroup or ""],), True


# What is known before lines: container runtimes, followers of logs, and the numbers of lines.
_ISO = rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d) "
_OF_JOURNALD = rb"[^\s:\[]{1,255} [^\s:\[\]]{1,100}\[\d+\]: ?"
_KNOWN_TEXTS = {
    "journald": _ISO + _OF_JOURNALD,
    "syslog": rb"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)? " + _OF_JOURNALD,
    "docker": _ISO,
    "compose": rb"[A-Za-z0-9][\w.-]{0,100} *\| ?",
    "kubectl": rb"\[pod/[^\]\s]{1,300}\] ",
    "ray": rb"\((?:[^()\n]{1,100} )?pid=\d+(?:, ?ip=[\w.:]+)?\) ?",
    "grep": rb"(?:[\w./+-]{1,200}[:-])?\d{1,9}[:-](?!\d)",
}
_KNOWN = {name: Layer(name, re.compile(pattern)) for name, pattern in _KNOWN_TEXTS.items()}
_KNOWN_BEFORE = re.compile(b"|".join(b"(?P<%b>%b)" % (name.encode(), text) for name, text in _KNOWN_TEXTS.items()))
# What Rust's tracing prints, in Dynamo in place of SGLang's stamp; the function's name is another one in each kind of
# line.
_TRACING = re.compile(_ISO + rb" {0,2}(?:TRACE|DEBUG|INFO|WARN|ERROR) [A-Za-z_][\w.:<>]{0,120}: ")
_OF_REQUESTS = re.compile(  # before words of SGLang's that a client or a model may have written
    rb"obj=|text=|ReqInput|Model attempted|\brid=|prompt|content|\"(?:obj|text|messages|input)\"|\\"
)
_ENDS = b" \t]:|>-;+(=`,\x1e\xbf\xa0\x8b"  # the last three end a byte order mark and spaces of Unicode's
_DELIMITERS = (b",", b";", b"\t", b"|")
_WORDS_AT_MOST, _WORDS_SURE = 24, 6
_VALUES = {
    b'"': re.compile(rb'(?:[^"\\]|\\.)*'),
    b"'": re.compile(rb"(?:[^'\\]|\\.|'')*"),
    b"`": re.compile(rb"[^`]*"),
}
_COLUMN = re.compile(rb'(?:[^"]|"")*')
_COLUMN_ENDS = {b",": re.compile(rb",(?! )"), b"\t": re.compile(rb"\t")}
_WORD = rb"[\w./:@%+#~*-]*\w"
_PART = re.compile(rb"(" + _WORD + rb")|([ \t]+)|.", re.DOTALL)
_IN_BRACKETS = rb"\[[^\]\[\n]{0,120}\]|\([^()\n]{0,120}\)|<[^<>\n]{0,60}>|\{[^{}\n]{0,300}\}"
_IN_QUOTES = rb"\"[^\"\n]*\"(?=[ ,:;=}>\])\t])|'[^'\n]*'(?=[ ,:;=}>\])\t])"
_NO_WORDS = re.compile(rb"|".join((_TIMED.pattern, _IN_BRACKETS, _IN_QUOTES, rb"\b(?:DP|TP|PP|EP)\d{1,5}")))
_CLOSED = re.compile(rb"(?:[^\"'`\n]|" + _IN_QUOTES + rb")*")


def without_known(line: bytes) -> bytes:
    """Return a line of anybody without the text that a container runtime, Ray or a follower of logs puts before it."""
    text = _without_terminal(line).lstrip()
    known = _KNOWN_BEFORE.match(text)
    return text if known is None else text[known.end() :]


def _text_layer(text: bytes, start: int) -> tuple[Layer, bool] | None:
    """Return the layer of the text before SGLang's line, and whether no sentence looks like it; None for any other
    text.

    The layer ends at a quotation, a document or SGLang's line itself.
    """
    brace = text.find(b"{", 0, start)
    if brace > 0 and isinstance(parsed(text[brace:]), dict):
        start = brace
    start = _CLOSED.match(text, 0, start).end()  # type: ignore[union-attr]  # it always matches
    before, first, is_quoted = text[:start], text[start : start + 1], text[start : start + 1] in _VALUES
    if len(before) > _LONGEST_BEFORE or _OF_REQUESTS.search(before) or not (is_quoted or before[-1] in _ENDS):
        return None
    headed = not is_quoted and first != b"{" and _STAMP.match(text, start) is None
    if headed and _TRACING.fullmatch(before):
        return Layer("tracing", _TRACING, headed=True), True
    known = None if is_quoted else _KNOWN_BEFORE.match(before)
    # A time may begin like the number of a line.
    if known is not None and (known["grep"] is None or known.end() == start):
        return _KNOWN[known.lastgroup or ""], True
    words, timed = len(re.findall(_WORD, _NO_WORDS.sub(b"", before))), _TIMED.search(before) is not None
    if words > _WORDS_AT_MOST:
        return None
    is_value = before.endswith(b"=") or (is_quoted and before != b"" and not before.endswith(_DELIMITERS))
    is_sure = not is_value and words <= (_WORDS_SURE if timed else 2) and (timed or _is_structured(before, words))
    return Layer("text before it", _pattern_of(before, headed=headed, timed=timed), headed=headed), is_sure


def _is_structured(before: bytes, words: int) -> bool:
    return words == 0 or before.endswith(b":") or before.rstrip()[-1:] in b"]})>"


def _pattern_of(before: bytes, *, headed: bool, timed: bool) -> re.Pattern[bytes]:
    """Return a pattern of a text with other words and blanks. The name of a field at its end stays as it is.

    Nothing varies in a text without a time that stands in place of SGLang's stamp.
    """
    if headed and not timed:
        return re.compile(re.escape(before))
    name = re.search(rb"[^\W\d]\w*(?:=|: )\Z", before)
    fixed = len(before if headed else before.rstrip(b" \t")) if name is None else name.start()
    parts = (
        re.escape(part[0]) if part.start() >= fixed or not part.lastindex else _WORD if part[1] else rb"[ \t]+"
        for part in _PART.finditer(before)
    )
    return re.compile(b"".join(parts))


# Fields of JSON.
_TIME_FIELDS = ("timestamp", "time", "@timestamp", "ts", "asctime", "__REALTIME_TIMESTAMP", "datetime", "date")
_REQUEST_FIELDS = ("obj", "prompt", "messages", "input")
_OFTEN_OF_REQUESTS = ("text", "out", "content", "body")  # of a shipper as well
_SHIPPERS_FIELDS = ("stringValue", "message", "line")  # inside a body or content that a shipper writes


def parsed(text: bytes) -> Any:
    """Read a text that is an object, a list or a string of JSON; None for any other.

    Nothing is read of SGLang's own log of requests: it quotes what clients sent and models said.
    """
    if text[:1] not in (b"{", b"[", b'"'):
        return None
    try:
        document = json.loads(text.rstrip().removesuffix(b","))
    except (ValueError, RecursionError):
        return None
    is_request = isinstance(document, dict) and str(document.get("event", "")).startswith("request.")
    return {} if is_request else document


def _leaves(
    value: Any, holder: Any = None, place: Field = (None, None), depth: int = _DEPTH
) -> Iterator[tuple[Field, Any, Any]]:
    """Return texts and numbers with their places and what holds each."""
    if not isinstance(value, (dict, list)) or not depth:
        yield place, value, holder
        return
    name = place[1] if isinstance(place[1], str) else None
    if (
        isinstance(value, list)
        and value
        and all(isinstance(each, dict) and {*each} == {"field", "value"} for each in value)
    ):
        value = {each["field"]: each["value"] for each in value}  # a row of CloudWatch Logs Insights
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        is_line = isinstance(value, list) and name is not None and not isinstance(inner, (dict, list))
        yield from _leaves(inner, value, (name, None if is_line else key), depth - 1)


def field_of(document: Any, layers: int = _LAYERS) -> Field | None:
    """Return where a document has SGLang's line; None where nowhere, or where words of requests stand."""
    for place, leaf, _ in islice(_leaves(document), _PLACES):
        holder, name = place
        of_request = holder in _REQUEST_FIELDS + _OFTEN_OF_REQUESTS and name not in _SHIPPERS_FIELDS
        if name in _REQUEST_FIELDS or of_request or not isinstance(leaf, str):
            continue
        lines = leaf.encode("utf-8", "replace").split(b"\n", _MOST_LINES)[:_MOST_LINES]
        if any(_form_of(_without_terminal(line), layers - 1) is not None for line in lines):
            return place
    return None


def records_at(document: Any, field: Field) -> Iterator[tuple[float | None, list[bytes]]]:
    """Return the texts at one place of a document with the time of each, line by line."""
    for place, leaf, holder in _leaves(document):
        if place == field and isinstance(leaf, str):
            lines = leaf.encode("utf-8", "replace").rstrip(b"\r\n").split(b"\n")
            yield _time_in(holder, document), [*map(_without_terminal, lines)]


def _field_layer(document: Any, layers: int) -> tuple[Layer, bool] | None:
    """Learn which field of a document has SGLang's line."""
    field = field_of(document, layers)
    if field is None:
        return None
    dated = any(place != field for place, _ in _times(document))
    return Layer("JSON", field=field), field == (None, None) or (dated and field[1] not in _OFTEN_OF_REQUESTS)


def _times(scope: Any) -> Iterator[tuple[Field, float]]:
    """Return the times in a record with their places, those that have a date; another may as well be a duration."""
    for place, value, _ in islice(_leaves(scope), _PLACES):
        time = time_of(str(value).encode("utf-8", "replace"))
        if time is not None and time >= FIRST_DATED:
            yield place, time


def _time_in(*scopes: Any) -> float | None:
    """Return the time of a record: of the field most often used for it, in the innermost object that has one."""
    for scope in scopes:
        if times := {place[1]: time for place, time in _times(scope)}:
            return next((times[name] for name in _TIME_FIELDS if name in times), next(iter(times.values())))
    return None


class Wrapping:
    """The text around the lines of one stream."""

    def __init__(self) -> None:
        # where a line gives nothing yet: `cut` by a container runtime, or `other` in a form that is not accepted
        self.waits = "other"
        self.form: Form | None = None  # of the last line of SGLang's; (): nothing stood around it
        self.forms: list[Form] = []  # accepted, the last one first
        self._proven: set[Form] = set()  # had SGLang's words directly behind them; (): nothing around
        self._candidate: Form = ()  # not accepted yet
        self.held: list[Line] = []  # its lines in a row
        self.cut: dict[str, bytes] = {}  # by stream: the parts so far of a line that a container runtime cut

    def lines(self, raw: bytes, *, open_text: bool = False) -> list[Line]:
        """Return the lines in a physical line: usually one; none while a line is cut or held, several when held ones
        are released.

        `open_text`: a traceback is open, so text before a stamp is the exception's.
        """
        text = _without_terminal(raw.lstrip(b"\x00")[:LONGEST])
        if text[:1] == b" " and (_STAMP.match(pasted := text.lstrip(b" ")) or pasted.startswith(b"(")):
            text = pasted
        lines = self._uncut(Line(text))
        if not lines:
            self.waits = "cut"
        return [inner for line in lines for inner in self._inner(line, open_text=open_text)]

    def _uncut(self, line: Line) -> list[Line]:
        """Return the lines that a container runtime wrote into one of its own; nothing while it has cut them."""
        text, entry = line.text, None
        if (cri := _CRI.match(text)) is not None:
            stream, is_cut, inner = cri[2].decode(), cri[3] == b"P", text[cri.end() :]
            line = line._replace(time=time_of(cri[1]), around=", CRI")
        elif (entry := _docker_entry(text)) is not None:
            stream, inner = entry["stream"], entry["log"].encode("utf-8", "replace")
            is_cut = not inner.endswith(b"\n") and len(inner) >= _DOCKER_CUTS
            line = line._replace(around=", container's JSON")
        else:
            return [line]
        begun = self.cut.pop(stream[:20], b"")
        inner = (begun + inner)[:LONGEST] if len(self.cut) < _MOST_STREAMS else inner
        if is_cut:
            self.cut[stream[:20]] = inner
            return []
        lines = [*map(_without_terminal, inner.rstrip(b"\r\n").split(b"\n")[:_MOST_LINES])]
        if line.time is None and not _STAMP.match(lines[0]):
            line = line._replace(time=_time_in(entry))
        return [line._replace(text=text) for text in lines]

    def _inner(self, line: Line, *, open_text: bool) -> list[Line]:
        """Return the lines inside one without a container runtime's text: in no form, a known one, or a new one."""
        stamp = _STAMP.match(line.text)
        if stamp is not None and (self.is_bare or WORDS.match(line.text, stamp.end()) is not None):
            return self._accept((), [line])
        if lines := self._in_known_form(line):
            return lines
        # Another time in brackets may stand before SGLang's own stamp.
        if stamp is not None and _SECOND.match(line.text) is None:
            return self._accept((), [line])
        behind = None if open_text else self._behind_text(line)
        return self._in_new_form(line) if behind is None else behind

    def _in_known_form(self, line: Line) -> list[Line]:
        """Return the lines inside one in an accepted form; without a stamp only in the form of the line before."""
        for form in filter(None, (self.form, *self.forms)):
            lines = without(form, line)
            if any(inner.headed or _STAMP.match(inner.text) for inner in lines):
                return self._accept(form, lines)
            if lines and form is self.form:
                return lines
        return []

    def _behind_text(self, line: Line) -> list[Line] | None:
        """Return a line behind progress bars without a newline, or directly behind words of another program, such as an
        address.
        """
        before, carriage_return, rest = line.text.rpartition(b"\r")
        if carriage_return and all(not part.strip() or _BAR.match(part) for part in before.split(b"\r")):
            return self._inner(line._replace(text=rest), open_text=False)
        glued = _GLUED.search(line.text, 1, _GLUED_WITHIN)
        if glued is None:
            return None
        before, is_bar = line.text[: glued.start()], _BAR.match(line.text[: glued.start()]) is not None
        if not is_bar and (not before[-1:].isalnum() or _QUOTING.search(before)):
            return None
        return [line._replace(text=line.text[len(before) :], glued=not is_bar)]

    def _in_new_form(self, line: Line) -> list[Line]:
        """Accept a form, or hold its lines; a line in none stays as it is."""
        form, sure = _form_of(line.text) or ((), False)
        lines = without(form, line) if form else []
        if not lines:
            return [line]
        at_once = form in self.forms or (sure and (not self._proven or all(layer.name in _KNOWN for layer in form)))
        if form != self._candidate:
            self._candidate, self.held = form, []
        self.held += lines
        if len(self.held) < _ENOUGH and not at_once:
            if sum(len(inner.text) for inner in self.held) > _HELD_LENGTH:
                self.held = []
            self.waits, self.form = "other", None if self.form == () else self.form
            return []
        lines, self.held = self.held, []
        self.forms = [form, *self.forms[: _FORMS_KEPT - 1]]
        return self._accept(form, lines)

    @property
    def is_bare(self) -> bool:
        """Whether SGLang's lines came without any text around them."""
        return () in self._proven

    def accepts_again(self, form: Form) -> bool:
        """Return whether SGLang's batches came in this form before; if so, note that one more came."""
        if form not in self._proven:
            return False
        self.form, self.held = form, []
        return True

    def _accept(self, form: Form, lines: list[Line]) -> list[Line]:
        """Note that lines have SGLang's stamp, or the text that replaces it, in this form; return them."""
        for line in lines:
            stamp = _STAMP.match(line.text)
            if WORDS.match(line.text, stamp.end() if stamp else 0) is not None:
                self._proven.add(form)
        if form or self.is_bare:
            self.form = form
        if form in self._proven:
            self.held = []
        return lines


def _docker_entry(text: bytes) -> dict[str, Any] | None:
    """Return the entry of a container's log, as Docker writes it, that a text is; None for any other text."""
    if text[:1] != b"{" or b'"stream"' not in text or b'"log"' not in text:
        return None
    entry = parsed(text)
    is_entry = isinstance(entry, dict) and isinstance(entry.get("log"), str) and isinstance(entry.get("stream"), str)
    return entry if is_entry else None


# What lines say

_LONGEST_BATCH, _LONGEST_MEMORY = 4096, 16_384
_KEPT = 4096  # stamps
LONGEST_UNREAD = 400  # bytes of a line that is quoted
_RECENT, _LONGEST_RECENT = 10, 300  # lines before an end that are kept, and of each so many characters


class Message(NamedTuple):
    """One line of SGLang's. There is no event of a kind in `SILENT`."""

    kind: str
    pattern: bytes
    since: str
    word: str = ""
    figures: Mapping[str, float] = MappingProxyType({})  # besides those of the pattern
    bare: bool = False  # it stands without a stamp between lines that have one: a library or Python printed it


_BATCH = rb"(?: ?\[[^\]]{0,24}\])?(?:\((?:mixed )?#running-req: ?(?P<mixed>\d+)\))?[ ]?[.,:]?[ ]?(?=[#\w]|$)"
_ALLOCATED = rb"(?:RuntimeError: |ValueError: )?"
_TOKENS, _MOST = rb"(?P<tokens>\d{1,9})", rb"(?P<most>\d{1,9})"
_LIMIT_TO = rb"(?P<max_running_requests>\d{1,12})\b"
_RID = rb", self\.rid='[\w-]{1,80}'$"
_DEVICES = rb"(?:CUDA|HIP|NPU|MUSA|XPU)"
_GPU = b"(?i:cuda|hip|npu|musa|xpu|hpu)"
SILENT = ("request", "known")
_QUOTED = ("hicache", "no_pool")  # their events have the line
_ABORT, _CONTEXT = "aborted", "context"
# fmt: off
MESSAGES = (
    # Batches: srt/managers/tp_worker.py in 0.3.0, scheduler.py, scheduler_metrics_mixin.py; srt/observability later.
    Message("decode", rb"Decode batch" + _BATCH, "0.3.0"),
    Message("prefill", rb"Prefill batch" + _BATCH, "0.3.0"),
    Message("retraction",
        rb"(?:[Dd]ecode out of memory happened|KV cache pool is full\b[\w .]{0,40})[ ]?[.,:]?[ ]?(?=#)", "0.3.0"),
    Message("retraction", rb"Testing retraction\b[\w .]{0,40}[ ]?[.,:]?[ ]?(?=#)", "0.4.0", "", {"testing": 1}),
    # The start: model_runner.py, memory_pool.py, the graph runners, scheduler.py.
    Message("arguments", rb"server_args=", "0.3.0"),
    Message("pool", rb"KV Cache is allocated\.(?: dtype: [^,]{1,60},)? #tokens: (?P<tokens>\d{1,15})", "0.4.3"),
    Message("pool",
        rb"Post-capture KV sizing: KV cache allocated\.(?: dtype: [^,]{1,60},)? #tokens: (?P<tokens>\d{1,15})",
        "0.5.16", "",
        {"resized": 1}),
    Message("limits", rb"max_total_num_tokens=(?=\d{1,15}(?:,|$))", "0.3.0"),
    Message("limits", rb"max_running_requests was reduced from the requested \d{1,12} to " + _LIMIT_TO, "0.5.16"),
    Message("limits", rb"Post-capture KV sizing: max_running_requests \d{1,12} -> " + _LIMIT_TO, "0.5.16"),
    Message("limits", rb"max_running_requests is capped to " + _LIMIT_TO, "0.5.16"),
    Message("memory", rb"Load weight begin\.", "0.3.0", "weights_begin"),
    Message("memory", rb"Load weight end\.", "0.3.0", "weights"),
    Message("memory", rb"Mamba Cache is allocated\.", "0.5.3", "state_cache"),
    Message("memory", rb"Memory pool end\.", "0.3.0", "pool"),
    Message("memory", rb"Capture (?:[\w -]{0,60}?)" + _GPU + rb" graph begin\.", "0.3.0", "graph_begin"),
    Message("memory", rb"Capture (?:[\w -]{0,60}?)" + _GPU + rb" graph end\.", "0.4.3", "graph"),
    Message("memory", rb"Capture " + _GPU + rb" graph bs \[", "0.4.3", "graph_sizes"),
    Message("known", rb"KV Cache |Post-capture KV sizing: |max_running_requests ", "0.5.16"),
    Message("ready", rb"The server is fired up and ready to roll!", "0.3.0"),
    # Life: srt/utils, srt/managers, srt/entrypoints/http_server.py, engine.py.
    Message("hang",
        rb"(?:(?P<by>[A-Z]\w{0,40}) )?[Ww]atchdog timeout \((?:self\.)?watchdog_timeout=(?P<seconds>\d{1,9})?", "0.3.0",
            "scheduler"),
    Message("health", rb"Health check failed\. Server couldn't get a response from detokenizer", "0.4.3"),
    Message("end", rb"(?:Subp|P)rocess [^'\"\n]{0,120}\bcrashed with exit code -?\d+", "0.5.7", "process_died"),
    Message("end", rb"Received sigquit from a child pro", "0.4.0", "process_died"),  # up to 0.4.3 with one letter s
    Message("end", rb"SIGQUIT received\. signum=", "0.5.5.post3", "process_died"),
    Message("end", rb"Child process unexpectedly failed with ", "0.4.3", "process_died"),
    Message("end", rb"(?:RuntimeError: )?Rank \d+ scheduler (?:died during initialization|is dead)", "0.4.3",
        "launch_failed"),
    Message("end", rb"Initialization failed\. ", "0.3.0", "launch_failed"),
    Message("end", rb"[A-Z]\w{0,40}(?: [a-z]\w{0,20})? hit an exception: ", "0.3.6", "scheduler_exception"),
    Message("end", rb"Exception in (?:ModelTpServer|run_tp_server|ControllerMulti|ControllerSingle)\b", "0.3.0",
        "scheduler_exception"),
    # Aborts that no traceback explains, as Python, glibc, the shell, PyTorch, HIP and Ascend print them. They need no
    # stamp.
    Message("end",
        rb"Fatal Python error: |!{3,} Segfault encountered|\*{3} (?:SIG[A-Z]{3,5}|Aborted)\b"
        rb"|Memory access fault by GPU",
        "0.1.0", _ABORT),
    Message("end", rb" {0,4}what\(\):  |terminate called after throwing |double free or corruption|free\(\):"
        rb" |malloc\(\): |corrupted (?:size|double)",
        "0.1.0", _ABORT),
    Message("end", rb"(?:\S{1,80}: line \d{1,5}: *)?(?:\d{1,9} )?(?:Killed|Segmentation fault|Bus error|Aborted"
        rb"|Illegal instruction)"
        rb"(?: \(core dumped\))?(?=\s*$|  |\t| +(?:python|sglang|/))", "0.1.0", _ABORT),
    Message("end", rb":\d:[\w.]{1,40}[^\n]{0,200}abort(?:ing|ed) with error ", "0.1.0", _ABORT),
    Message("end", rb"\[rank\d{1,5}\]:\[[EF][^\]\n]{1,120}\][^\n]{0,400}(?:terminated with exception|[Tt]aking the"
        rb" entire process down)", "0.3.0", _ABORT),
    Message("words",
        rb"\[rank\d{1,5}\]:\[[EF][^\]\n]{1,120}\] |(?:\[PID: \d{1,9}\] \S{10,40} \w{1,40}\()?E[A-Z]?\d{4,5}"
        rb"\)?: [A-Z\[]",
        "0.3.0"),
    Message("words", rb"- (?:Import|OS)Error: (?=\S{1,100}\.so)", "0.5.4"),  # the attempts to load SGLang's kernels
    # What NCCL and NVSHMEM say of a connection before PyTorch or SGLang says that it failed; NCCL warns of settings
    # too.
    Message("words", rb"\S{1,200}:\d{1,9}:\d{1,9} \[\d{1,4}\] (?:\S{1,60}:\d{1,6} )?NCCL WARN "
        rb"(?=[^\n]{0,400}(?i:fail|error|refused|no route|not found|timed? ?out|unreachable|mismatch|closed by))",
        "0.3.0"),
    Message("words", rb"\S{1,200}/nvshmem\S{0,200}:\d{1,6}: non-zero status: \d{1,4} (?=[a-z])", "0.4.6"),
    Message("end", rb"nvshmem initialization failed, exiting|\S{1,200}/nvshmem\S{0,200}: NVSHMEM API called before"
        rb" NVSHMEM initialization", "0.4.6", _ABORT),
    Message("draining", rb"SIGTERM received\. ", "0.4.4"),
    # every 5 s, until none is left
    Message("draining", rb"Gracefully exiting\.\.\. [Rr]emaining number of requests (?P<remaining>\d{1,9})", "0.3.6"),
    # Failed allocations; of the last one the frames of the traceback show the phase.
    Message("out_of_memory", rb"(?:RuntimeError: )?Prefill out of memory\. (?:Please )?[Tt]ry to lower", "0.3.0",
        "prefill"),
    Message("out_of_memory", rb"(?:RuntimeError: )?Decode out of memory\. (?:Please )?[Tt]ry to lower", "0.3.0",
        "decode"),
    Message("out_of_memory", rb"ValueError: Failed to retract any request\. No space left", "0.4.0", "decode"),
    Message("out_of_memory", rb"ValueError: Out of memory even after retracting all other requests", "0.5.3", "decode"),
    Message("out_of_memory", rb"ValueError: Loaded weights leave no GPU memory for the KV cache\b", "0.5.20",
        "startup"),
    Message("out_of_memory", _ALLOCATED + rb"Not enough memory[.;] [Pp]lease try to increase --mem-fraction-static",
        "0.3.0", "startup"),
    Message("out_of_memory",
        rb"(?:\w+: )?Capture (?:[\w -]{0,40})?" + _GPU + rb" graph failed: (?=.{0,1000}(?i:out of memory))", "0.3.0",
        "graph_capture"),
    Message("out_of_memory",
        rb"(?:torch\.(?:cuda\.)?)?OutOfMemoryError: |(?:torch\.AcceleratorError|RuntimeError): " + _DEVICES
        + rb" (?:error: )?out of memory", "0.3.0"),
    # Prompts: validate_input_length, srt/managers/utils.py; _validate_one_request, tokenizer_manager.py.
    Message("too_long",
        rb"Input length \(" + _TOKENS + rb" tokens\) exceeds the maximum allowed length \(" + _MOST + rb" tokens\)\.",
        "0.4.3"),
    Message("too_long", rb"Request length is longer than the KV cache pool size or the max context length\."
        rb" Truncated\. len\(req\.origin_input_ids\)="
        + _TOKENS + rb", (?:self\.)?max_req_input_len=" + _MOST + rb"\.", "0.3.6"),
    Message("too_long",
        rb"(?:\[http_server\] Error: )?The input \(" + _TOKENS + rb" tokens\) is longer than the model's context"
            rb" length \(" + _MOST
        + rb" tokens\)\.(?: Truncating the input\.)?$", "0.4.6", _CONTEXT),
    Message("too_long",
        rb"\[http_server\] Error: Requested token count exceeds the model's maximum context length of " + _MOST
        + rb" tokens\. You requested a total of " + _TOKENS + rb" tokens: [\w ,.]{0,200}limit\.$", "0.4.9", _CONTEXT),
    # Req.set_finish_with_abort, srt/managers/schedule_batch.py; srt/constrained/grammar_manager.py.
    Message("refused", rb"Grammar-based generation \([\w, ]{1,80}\) is not supported when the server is launched"
        rb" with --grammar-backend none" + _RID,
        "0.5.7", "", {"grammar": 1}),
    Message("refused", rb"(?!Aborted by AbortReq)[A-Z][^\n]{8,2000}?" + _RID, "0.4.3"),
    # The pair of a disaggregated server: srt/disaggregation/{decode,prefill}.py, */conn.py, common/staging_handler.py.
    # The first is of one request.
    Message("transfer", rb"(?:Decode|Prefill) (?:transfer|handshake|bootstrap) failed for request rank=", "0.4.9"),
    Message("transfer",
        rb"Some requests (?:fail to receive KV Cache transfer done signal|timed out when bootstrapping)", "0.4.9"),
    Message("transfer", rb"Could not fetch (?:prefill (?:parallel info|dp_size)|bootstrap info) f", "0.4.6"),
    Message("transfer", rb"Prefill (?:instance )?[Ff]ailed to (?:connect|register) to bootstrap server", "0.4.6"),
    Message("transfer", rb"\[S(?:taging|TAGING)\] [^\n]{1,200}failing (?:affected requests|the request)\.", "0.5.16"),
    Message("transfer", rb"(?:Context corruption detected|KV checksum mismatch)\b", "0.5.9"),
    Message("transfer", rb"(?:Failed to get prefill (?:parallel|server) info: |Error fetching prefill (?:parallel"
        rb" |server )?info from bootstrap: )", "0.4.6",
        "", {"attempt": 1}),
    Message("transfer",
        rb"(?:Losing|Lost) connection with prefill instance \(bootstrap_addr: [^)\n]{1,200}\), (?:affected )?\d",
        "0.4.9", "", {"attempt": 1}),
    Message("transfer",
        rb"(?:Session \S{1,200} failed\.$|NIXL transport error for room |Mori (?:KV )?transfer submission failed )",
        "0.4.9", "",
        {"attempt": 1}),
    # HiCache: jit_kernel/hicache.py, srt/mem_cache, srt/managers/cache_controller.py.
    Message("hicache", rb"(?:Unsupported element_size = \d{1,9} for|Failed to load) (?:staged )?JIT HiCache kernel",
        "0.5.9", "kernel"),
    Message("hicache", rb"write_back: (?:KV (?:cache on device are|subtree) dropped without backup|backup failed)"
        rb" (?:due to|under) host memory pressure",
        "0.5.16", "host"),
    Message("hicache", rb"(?:Not enough host memory for request |HiCache write backlog cap hit )", "0.5.9", "host"),
    Message("hicache", rb"HiCache (?:buffer prefetch declined|staged prefetch dropped) ", "0.5.23", "host"),
    Message("hicache",
        rb"(?:Write page to storage: \d{1,9} pages failed\.|Failed to write page \S{1,100} to storage\.)", "0.4.9",
        "storage"),
    Message("hicache", rb"Prefetch operation \S{1,100} (?:failed to retrieve page |failed or partially failed)",
        "0.4.9", "storage"),
    Message("hicache", rb"HiCache (?:backup failed after \d|(?:sidecar )?prefetch(?: transfer)? failed for request"
        rb" |storage query failed |L3 prefetch failed )",
        "0.5.16", "storage"),
    Message("hicache", rb"(?:Failed to attach storage backend|Failed to create dynamic storage backend|Failed to"
        rb" fetch \S{1,200} from HiCacheFile storage)",
        "0.5.2", "storage"),
    Message("hicache", rb"(?:Failed to register buffer to (?:Mooncake Store|SiMM|Ascend MemCache Store)|HiCacheFile:"
        rb" [^\n]{1,300}(?:not caching|refusing) )",
        "0.5.2", "storage"),
    Message("hicache", rb"(?:\[Rank \d{1,5}\](?:\[Pool \w{1,40}\])? HiCacheHF3FS (?:get|set) [^\n]{1,300} failed"
        rb"|SeaweedFS (?:get|set) \S{1,200} failed: )",
        "0.5.2", "storage"),
    Message("hicache", rb"TensorCast L3 unavailable: ", "0.5.23", "storage"),
    Message("hicache",
        rb"E\d{4}(?:\d{4})? [\d:.]{8,20} +\d{1,9} (?:\w{0,20}client\w{0,20}|store_py)\.cpp:\d{1,6}\] (?=[A-Z])",
        "0.4.9", "storage",
        bare=True),  # the Mooncake Store's own words
    # What memory allows where --max-total-tokens asks for more: mem_cache/kv_cache_configurator.py, before
    # model_runner.py. No pool is a failure.
    Message("no_pool", rb"max_total_tokens=\d{1,15} is larger than the profiled value (?P<tokens>-\d{1,15}|0)\. Use"
        rb" the profiled value instead\.", "0.4.6"),
    Message("known", rb"max_total_tokens=\d{1,15} is larger than the profiled value ", "0.4.6"),
    # uvicorn's lines, and others without a text of anybody.
    Message("words",
        rb"(?:ERROR: +)?\[Errno \d{1,3}\] (?=error while attempting to bind on address|(?i:address already in use))",
        "0.3.0"),
    Message("end", rb"Application startup failed\. Exiting\.", "0.3.0", "launch_failed"),
    Message("known", rb"(?:Started server process|Waiting for application |Application (?:startup|shutdown) complete"
        rb"|Uvicorn running on|Shutting down$|Finished server|Waiting for (?:connections to close|background tasks)"
        rb"|Invalid HTTP request received)", "0.3.0"),
    Message("known", rb"Endpoint '/\w{1,40}' is deprecated|Sleeping \d+ seconds before crash diagnostics", "0.5.7"),
    # Lines with text of a request or a model.
    Message("request", rb"(?:Receive|Finish)(?: \w{1,20})?: obj=|in=[\w.<>]{0,60}(?:ReqInput|Req)\(", "0.3.0"),
    Message("request", rb"\{[^\n]{0,200}\"event\": ?\"request\.", "0.5.12"),
    Message("request", rb"Received output for rid=|Req Time Stats\(|Req\(rid=", "0.4.3"),
    Message("request", rb"Model attempted to call undefined function:|Tool '|Parsed value '|Failed to parse JSON"
        rb"|Error in detect_and_parse:", "0.4.6"),
)
_FIGURES = {key: name for name, keys in (
    ("running", b"#running-req"), ("queued", b"#queue-req"),
    ("tokens", b"#token,#full token,#gpu token,#new-token"), ("sequences", b"#new-seq"),
    ("cached", b"#cached-token"), ("pending", b"#pending-token"), ("usage",
        b"token usage,full token usage,gpu token usage"),
    ("swa_usage", b"swa token usage"), ("mamba_usage", b"mamba usage"), ("throughput", b"gen throughput (token/s)"),
    ("accept_length", b"accept len"), ("prealloc", b"#prealloc-req"), ("transfer", b"#transfer-req"), ("retracted",
        b"#retracted-req"),
    ("bootstrap", b"#bootstrap-req"), ("inflight", b"#inflight-req"), ("unbootstrapped", b"#unbootstrapped-req"),
    ("transferring", b"#transferring-req"), ("host_receive", b"#host-receive-req"), ("requests",
        b"#retracted_reqs,#retracted_req"),
    ("aborted", b"#aborted_retracted_reqs"), ("gained", b"#new_tokens_gained"),
) for key in keys.split(b",")}
# fmt: on
_FRACTIONS = ("usage", "swa_usage", "mamba_usage", "throughput", "accept_length")
_OTHER_FIGURES = frozenset(
    b"input throughput (token/s),#cpu token,#mamba num,#remaining-req,#replay-token,#swa token,accept rate,block"
    b" accept len,cap len,"
    b"cache hit rate,cpu token usage,est. decode TFLOPS/s (per GPU),est. prefill TFLOPS/s (per GPU),est. read BW"
    b" (GB/s per GPU),mamba num,"
    b"est. write BW (GB/s per GPU),fwd occupancy,fwd+idle occupancy,hit_tokens,largest-len,pre-allocated usage,"
    b"#optimistic-req,waiting-image-req,#waiting-image-req".split(b",")
)  # fmt: skip
_NEEDED = {"decode": {"running", "tokens"}, "prefill": {"sequences", "tokens"}, "retraction": {"requests"}}
_PATTERNS = tuple((row, re.compile(row.pattern)) for row in MESSAGES)
# Which of them a message is, in one look: the first group that matched. Their own groups are for the row's pattern
# alone.
_ANY = re.compile(
    b"|".join(b"(" + re.sub(rb"(?<!\\)\((?!\?)|\(\?P<\w+>", b"(?:", row.pattern) + b")" for row in MESSAGES)
)
_RECOGNISED = frozenset(
    {"decode", "prefill", "retraction", "pool", "limits", "memory", "ready", "hang", "health", "end", "draining"}
)
_BARE = re.compile(
    b"|".join(b"(?:" + row.pattern + b")" for row in MESSAGES if row.bare or row.word == _ABORT or row.kind == "words")
)
_WATCHED = {b"DetokenizerManager": "detokenizer", b"TokenizerManager": "tokenizer"}  # 0.5.7
_OF_EACH_RANK = re.compile(
    rb"[Dd]ecode out of memory happened|KV cache pool is full|Load weight |Memory pool end|Capture |KV Cache is|Mamba"
    rb" Cache"
)
_ELAPSED, _RANKS_WITHIN = re.compile(rb" Time elapsed: [\d.]+ s\."), 0.5
_UNKNOWN_BATCH = re.compile(rb"[A-Z]\w{2,20} batch(?: ?\[\d{1,12}\])?[.,] ?#[\w-]{1,40}: ?\d")

_FIELD = re.compile(rb"\s*([^,:]{1,60}?)\s*:\s*([^,]*?)\s*(?:,|$)")
_GRAPH = re.compile(rb"(cuda|cpu|npu|musa|xpu|hpu|hip) graph$")
# What may follow the last value: marks of HTML and tables, closing quotation marks, other fields.
_END = rb"(?=$|[ \t]*[<|)\]}\"'`]|[ \t]+[\w.]+=)"
_NUMBER = re.compile(rb"(-?\d{1,18}(?:\.\d{1,18})?(?:[eE][+-]?\d{1,3})?)[ ]?(%?)" + _END)
_PLAIN = re.compile(rb"\d{1,15}(?:\.\d{1,9})?")
_NO_NUMBER = (b"nan", b"nan%", b"-nan", b"inf", b"-inf", b"inf%", b"None")
_RATIO = re.compile(rb"(\d+(?:\.\d+)?)[ ]?->[ ]?(\d+(?:\.\d+)?)" + _END)
_LARGEST = 2.0**53  # above, a float cannot count
_OTHER_LINE = re.compile(rb"\[20\d\d-\d\d-\d\d ")  # another process wrote into this line
_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_SHAPES_KEPT, _SHAPE_LENGTH = 4096, 768
_USUAL = ("access", "decode", "prefill")


@lru_cache(maxsize=16384)
def _number_of(text: bytes) -> float:
    return int(text) if text.isdigit() else float(text)


class _Numbers(dict[bytes, float]):
    """The numbers of batch lines by their texts: most are printed again and again."""

    def __missing__(self, text: bytes) -> float:
        number = _number_of(text)
        if len(text) <= _NUMBER_LENGTH and len(self) < _NUMBERS_KEPT:
            self[text] = number
        return number


_NUMBERS_KEPT, _NUMBER_LENGTH = 1 << 14, 5  # entries, bytes
_NUMBERS = _Numbers()

_ACCESS = re.compile(rb'(?:INFO: +)?(?:\S{1,80} - )?"(GET|POST|PUT|DELETE|HEAD|OPTIONS|PATCH) ')
_ANSWERED = re.compile(rb'[^"\n]{1,2000} HTTP/\d(?:\.\d)?" (\d{3})\b')
_PAUSED = re.compile(rb"/(pause|continue)_generation HTTP/")
_ASGI = re.compile(rb"(?:ERROR: *)?Exception in ASGI application\s*$")
# With --tokenizer-worker-num above 1 uvicorn's level stands between the stamp and SGLang's words.
_LEVEL = re.compile(rb"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL): +")


@dataclass(slots=True)
class _Traceback:
    """A traceback with those that it is chained to, and what its frames show."""

    at: tuple[float | None, Rank]
    begin: int  # the line with which its chain begins
    until: int  # the last line that can belong to it
    is_open: bool = True
    announced: bool = False  # by a line of SGLang's
    counted: bool = False  # an exception of the chain is an event already
    goes_on: bool = False  # after "During handling of the above exception…", or a line that announces one
    texts: list[str] = field(default_factory=list)  # the exceptions of its chain so far
    place: str = ""  # the deepest frame inside SGLang
    stamped: bool = False  # a line of SGLang's logged it
    indent: int = 0  # of a log pasted with blanks before each line
    headless: bool = False  # a log begins inside of it, or its head is lost
    phase: str = ""
    inside: set[str] = field(default_factory=set)  # names of `_INSIDE`

    def read_frame(self, frame: re.Match[bytes], number: int) -> None:
        """Note the phase of a frame: the deepest one counts, but all inside a capture is capture, and an encoder is no
        phase.
        """
        self.until, self.indent = number + _OTHERS_BETWEEN, len(frame[1] or b"")
        function, inside = frame[4], frame[2].rpartition(b"/sglang/")
        if inside[1]:
            file = inside[2] if inside[2].startswith(b"srt/") else b"sglang/" + inside[2]
            self.place = (b"%b:%b in %b" % (file, frame[3], function)).decode("utf-8", "replace")
        where = b"%b in %b" % (frame[2], function)
        self.inside |= {name for name, pattern in _INSIDE if pattern.search(where)}
        phase = next((name for name, pattern in _PHASES if pattern.search(function)), "")
        if phase and (phase in _WHOLE_PHASES or self.phase not in _WHOLE_PHASES):
            self.phase = phase

    @property
    def is_sure(self) -> bool:
        """Whether it ends a process of SGLang's."""
        return self.announced or not self.inside.isdisjoint(("process", "main"))

    def phase_of(self, *, starting: bool, serving: bool) -> str:
        """Return in which phase of the server an allocation failed."""
        if self.phase != "graph_capture" and starting and not serving:
            return "startup"
        is_start = "start" in self.inside and "loop" not in self.inside and not serving
        return self.phase or ("startup" if is_start else "unknown")


TRACEBACK = b"Traceback (most recent call last):"
_OTHERS_BETWEEN = 60  # lines of other processes in a traceback
# Some pastes have lost the blanks.
_FRAME = re.compile(rb'(?: {2}( {0,8}))?File "([^"\n]{0,1000})", line (\d{1,9}), in (\S{1,200})')
_INSIDE = tuple((name, re.compile(pattern)) for name, pattern in (  # by a frame's file and function
    ("process", rb" in (?:run_\w{1,40}_process$|run_tp_server$|launch_server$|start_controller_process)"),
    ("main", rb"/sglang/(?:launch_server|cli/\w{1,20})\.py in "),
    ("test", rb"/sglang/test/"),  # SGLang's tests start servers, and their own failures stand in the same log
    ("loop", rb" in \S*(?:event_loop|forward_loop|process_input_requests|handle_request|forward_step)"),
    ("storage", rb" in (?:backup|prefetch)_\w{0,20}_func$"),  # threads of HiCache: SGLang goes on without
    ("start", rb" in \S*(?:__init__|init_|load_model|load_weights|alloc_memory_pool|profile_max_num_token|launch_)"),
))  # fmt: skip
_PHASES = (
    ("graph_capture", re.compile(rb"(?i:capture|init_(?:device|cuda)_graphs|init_piecewise)")),
    # The encoder takes all images of a request at once, however small the chunk of its prompt is.
    ("unknown", re.compile(rb"embed_mm_inputs|get_(?:image|img|video|audio)_features?$|encode_images")),
    ("prefill", re.compile(rb"(?i:prefill|extend)")),
    ("decode", re.compile(rb"(?i:decode|update_running_batch)")),
)
_WHOLE_PHASES = ("graph_capture", "unknown")  # whatever is called inside
# The lines below a failed allocation of tokens. If more were free than asked for, no memory is short.
_ASKED = re.compile(rb"Try to allocate \d|Available |\w{0,20}(?:available|evictable)_size")
_ASKED_TOKENS = re.compile(rb"Try to allocate (\d{1,12}) tokens[^\0]{0,2000}?Available (?:full )?tokens: (\d{1,12})")
# What is no part of an exception's text: a warning of Python's own, what PyTorch prints below each error of a GPU, and
# the general advice that SGLang prints below each failed capture of graphs, whatever its cause.
_WARNED = re.compile(
    rb"\S{1,400}\.py:\d{1,9}: \w|(?:CUDA|HIP|XPU) kernel errors might be|For debugging consider passing|Compile with"
    rb" `TORCH_USE|Search for `(?:cuda|hip)|"
    rb"Device-side assertion tracking|Exception raised from |Possible solutions:"
)
# Words that only SGLang uses, in an error that was copied without anything around it.
_OWN_WORDS = re.compile(
    rb"sglang|sgl[_-]kernel|hierarchical cache|HiCache|[Rr]adix ?[Cc]ache|req_to_token|mem-fraction-static"
)
_LINES_OF_MESSAGE = 12  # of an exception's text
_EXCEPTION = re.compile(rb"(?:[A-Z]\w{0,200}|\w{1,100}(?:\.\w{1,100}){1,9})(?:: |$)")
_CHAINED = (b"During handling of the above exception", b"The above exception was the direct cause")
_USAGE_ERROR = re.compile(rb"(?:sglang(?: serve)?|launch_server\.py): error: [^\n]{1,1000}")
_UNRECOGNIZED = re.compile(rb"([^\n]{0,40}: error: unrecognized arguments: )([^\n]*)")
_BY_SOMEBODY = (b"KeyboardInterrupt", b"SystemExit")
_KILLED = re.compile(rb"(?:\S{1,80}: line \d{1,5}: *)?(?:\d{1,9} )?Killed\b[^\n]*")
_CRASHED = re.compile(
    rb"(?:Subp|P)rocess ([A-Za-z][\w.:-]{0,60})(?: [^'\"\n]{0,60})? crashed with exit code (-?\d{1,5})\b"
)
_CHECK = re.compile(
    rb"Health check failed\. [^\n]{0,80}for last (\d{1,5}) seconds\."
    rb" tic start time: (\d\d):(\d\d):(\d\d)\. last_heartbeat time: (\d\d):(\d\d):(\d\d)\s*$"
)
_FAILED_REQUEST = re.compile(
    rb"(?:Decode|Prefill) \w{1,20} failed for request rank=\d{1,6} [^\n]{0,600}?bootstrap_room=(?P<room>\w{1,40})"
    rb"(?: with exception (?:KVTransferError\(bootstrap_room=\w{1,40}\): )?(?P<reason>[^\n]*))?"
)
_GIVEN_UP = re.compile(
    rb"Aborted by (?:AbortReq|decode-side abort notification)\b"
)  # by a client, or by the other side for one


# PyTorch lists the processes on the GPU. Without "this process" they cannot be distinguished, as in a container.
_OWN_MEMORY = re.compile(rb"this process has \d{1,9}(?:\.\d+)? [KMGT]iB memory in use")
_HELD = re.compile(rb"Process \d{1,9} has (\d{1,9}(?:\.\d{1,4})?) ([MG])iB memory in use")


def _held_elsewhere(text: bytes) -> dict[str, float]:
    """Return the GB that other processes hold, by the words of a failed allocation; empty where they name none."""
    words = text[: 4 * LONGEST_TEXT]
    held = sum(float(size) / (1 if unit == b"G" else 1024) for size, unit in _HELD.findall(words))
    return {"held_elsewhere_gb": held} if held and _OWN_MEMORY.search(words) else {}


@lru_cache(maxsize=64)  # the last lines hardly change between the lines of one end
def _recent_words(line: bytes) -> str:
    return quoted(line.decode("utf-8", "replace"), _LONGEST_RECENT)


def _words(text: bytes) -> str:
    return quoted(text[: 4 * LONGEST_TEXT].decode("utf-8", "replace"))


def _silence(text: bytes, time: float | None) -> float | None:
    """Return the seconds since the last heartbeat; None unless the check began as long before its line as the line
    says, and later (0.4.3).
    """
    match = _CHECK.match(text)
    if match is None or time is None:
        return None
    last, *clocks = map(int, match.groups())
    began, beat = (clocks[at] * 3600 + clocks[at + 1] * 60 + clocks[at + 2] for at in (0, 3))
    off = (time % DAY - began - last + DAY / 2) % DAY - DAY / 2
    return last + (began - beat) % DAY if abs(off) <= 2.0 and (began - beat) % DAY < DAY / 2 else None


def _crash(text: bytes) -> str:
    """Say which process crashed and how; empty where the line does not."""
    match = _CRASHED.match(text)
    if match is None:
        return ""
    code = int(match[2])
    by = Signals(-code).name if -code in {known.value for known in Signals} else ""
    by = "killed from outside, often by the kernel's OOM killer" if by == "SIGKILL" else by
    return f"{match[1].decode('ascii')} crashed with exit code {code}" + (f" ({by})" if by else "")


def _launch_failure(text: bytes) -> str:
    """Say why a launch failed, without the values of arguments: one may be a key."""
    text = _without_values(text)
    return _words(text).rstrip(".") if b": " in text else ""


def _without_values(text: bytes) -> bytes:
    """Return an error about a command line without the values of unknown arguments."""
    match = _UNRECOGNIZED.match(text)
    return (
        text
        if match is None
        else match[1] + b" ".join(word.partition(b"=")[0] for word in match[2].split() if word[:1] == b"-")
    )


_SIZES = re.compile(rb"\bbs[= ]\[([\d, ]{0,12000})\]")
_GRAPH_OF = re.compile(rb"Capture ([\w -]{0,60}?)" + _GPU + b" graph")
_OF_PREFILL = re.compile(rb"prefill|piecewise|breakable", re.IGNORECASE)
_OF_DECODE = (b"", b"target decode", b"target verify", b"decode")
# The figures of the start: `avail mem=12.25 GB`, `K size: 19.5 GB`.
_FIGURE = re.compile(rb"(\w[\w ]{0,60}?)(?:=|: ?)(-?\d{1,15}(?:\.\d{1,9})?)(?: ?GB)?(?=[\s,.<)\]|\"'`]|$)")
_START_FIGURES = {
    b"avail mem": "available", b"mem usage": "used", b"max_mamba_cache_size": "states",
    **dict.fromkeys((b"K size", b"V size", b"KV size"), "gigabytes"),
    **{name.encode(): name for name in ("max_total_num_tokens", "max_running_requests", "chunked_prefill_size",
        "max_prefill_tokens", "context_len")},
}  # fmt: skip
_AVAILABLE = re.compile(rb"available_(\w{1,14})_mem")


LINES = 64
SECONDS = 2.0
MOST_LINES = 4096  # where the clock was set back, or a line has a time that never comes
CARRIERS = {
    "request": "SGLang prints a request's text in it",
    "exception": "an exception's words can quote a request",
    "glued": "other text stands before it in the same line",
    "other": "it is no known line of SGLang's",
}
OF_REQUESTS = ("decode", "prefill", "retraction", "request", "too_long", "refused", "server_error")


class Trust:
    """Marks the events of one stream, line by line: text of a client or a model was printed close before them.

    SGLang prints such text raw. A newline in it ends the line, and what follows can look like any line of SGLang's.
    Whether it is one does not follow from a log alone. So every line in SGLang's form counts, at once; but within
    `LINES` lines or `SECONDS` of printed time after a line that can carry such text, it is marked. The rest of the
    program says how many of its events are, and advises nothing that only they support.

    Lines that can carry text of others are the kinds in `CARRIERS`. Batch lines, access lines (their paths are
    percent-encoded), frames of a traceback and all other lines in SGLang's known form carry none, and do not end the
    time after one that does. Between a start, or the beginning of a log, and the first line about a request no text of
    others can have been printed.
    """

    def __init__(self) -> None:
        self.carrier = ""  # kind of the last line that could carry text of others
        self.carrier_line = 0  # its number
        self._carrier_time: float | None = None
        self.serves = False  # there was a line about a request since the last start

    def is_near(self, number: int, time: float | None) -> bool:
        """Whether the line with this number and time stands close behind text of others."""
        if not self.carrier:
            return False
        lines = number - self.carrier_line
        same_time = time is not None and self._carrier_time is not None and time < self._carrier_time + SECONDS
        if lines > LINES and not (same_time and lines <= MOST_LINES):
            self.carrier = ""
        return bool(self.carrier)

    def mark(self, kind: str, number: int, time: float | None, events: Iterable[Event]) -> None:
        """Mark the events of a line, and remember the line if it can carry text of others.

        `time`: the last one printed.
        """
        marked = self.is_near(number, time)
        for event in events:
            event.marked = event.marked or marked
        if kind == "arguments" and not marked:
            self.serves = False
        elif kind in OF_REQUESTS:
            self.serves = True
        if kind in CARRIERS and self.serves:
            self.carrier, self.carrier_line, self._carrier_time = kind, number, time


_Usual: TypeAlias = Callable[[bytes], "tuple[Event, ...] | None"]  # reads a line of a form; None for an unusual one


class Reader:
    """Turns the lines of one stream into events.

    `kind` is that of the last line, `lines` counts lines by kind, `unreadable` what only a newer release can print:
    `batch_line`, `retraction_line` and `server_args` whose text is not understood, `batch_key` for each field of an
    unknown name.
    """

    def __init__(self) -> None:
        self.kind = "other"
        self.lines: Counter[str] = Counter()
        self.unreadable: Counter[str] = Counter()
        self.unread = b""  # the first line, cut, with words of SGLang's in a form that is not known
        self.number = 0  # of the last line
        self.around = ""  # what stood around it
        self.wrapping = Wrapping()
        self.trust = Trust()
        # Last printed: unix seconds, or those since the first midnight where the log has no dates.
        self.time: float | None = None
        # The first of a line of SGLang's: those around lines before it may be of another zone.
        self.begin: float | None = None
        self.names_ranks = False  # a stamp named a rank, as only SGLang's do
        self._events: list[Event] = []
        self._released: list[Event] = []  # events that are about a line before, with its mark
        self._usual: dict[bytes, _Usual] = {}  # by a line with zeros for all digits
        self._places: dict[str, tuple[int, int]] = {}  # of plain figures in the message of the last batch
        self._clock: float | None = None
        self._day = 0
        self._stamped = False  # SGLang prints stamps in this stream
        self._starting = self._serving = False
        self._capturing = False  # a capture of CUDA graphs has begun, and not ended
        self._exceptions_due = 0  # answers with 500 whose exception was not printed yet
        # Sizes of captured graphs: on a line of their own, or with begin or end of the capture.
        self._sizes: tuple[int, ...] = ()
        self._cut: tuple[Event, bytes] | None = None  # arguments that may go on in the next line
        self._traceback: _Traceback | None = None  # the last one
        self._ended = False  # SGLang said that it ends itself, which it does with a kill of its processes
        self._go_on: Callable[[bytes], str] | None = None  # reads a further line of what may explain an end
        self._at: tuple[float | None, Rank] = (None, NO_RANK)  # when the line that is read was printed, and by whom
        self._printed: dict[bytes, float] = {}  # when, of lines without ranks
        self._recent: deque[bytes] = deque(maxlen=_RECENT)  # the last recognised lines

    def read(self, line: bytes) -> tuple[Event, ...]:
        """Return the events of a line without its newline. Never raises."""
        self.number += 1
        usual = self._usual.get(line.translate(_ZEROS))
        events = None if usual is None or self._cut is not None or self.wrapping.cut else usual(line)
        return self._read_unusual(line) if events is None else events

    def _read_unusual(self, raw: bytes) -> tuple[Event, ...]:
        self._events, self._released = [], []
        unreadable = self.unreadable.total()
        lines = self.wrapping.lines(raw, open_text=self._in_traceback() is not None)
        kind = self.wrapping.waits
        for line in lines:
            kind = self._read(line)
            if kind in _RECOGNISED:
                self._recent.append(line.text)
        self.kind = kind
        self.lines[kind] += 1
        if kind == "other" and not self.unread and self.wrapping.form != () and WORDS.search(raw):
            self.unread = raw[:LONGEST_UNREAD]
        self.trust.mark(kind, self.number, self.time, self._events)
        if kind in _USUAL and len(lines) == 1 and len(raw) <= _SHAPE_LENGTH and self.unreadable.total() == unreadable:
            self._learn(raw, lines[0])
        return (*self._released, *self._events)

    def _learn(self, raw: bytes, line: Line) -> None:
        """Remember how to read a usual line: a batch with plain figures, or a request that was answered.

        Another line that differs from it only in digits has its figures at the same places.
        """
        stamp, is_answer = stamp_of(line.text), self.kind == "access"
        start = 0 if stamp is None else stamp[2]
        at = raw.find(line.text[: start + 8] if is_answer else line.text)
        is_plain = at >= 0 and not line.headed and not line.glued and b"%|" not in raw  # or a bar
        form, usual = self.wrapping.form, None
        if not is_plain or form is None or (start and _dated(raw[at : at + start]) is None):
            return
        if not is_answer:
            usual = self._usual_batch(form, at, start, len(line.text))
        elif not self._events and b" 200 OK" in raw:
            usual = self._usual_answer(form, at, start)
        if usual is not None:
            self._usual[raw.translate(_ZEROS)] = usual
            if len(self._usual) > _SHAPES_KEPT:
                self._usual.clear()

    def _usual_answer(self, form: Form, at: int, start: int) -> _Usual:
        """Return how to read lines like the last one, an answered request: a stamp of `start` bytes at a place."""
        stamp, wrapping, around = slice(at, at + start), self.wrapping, self.around

        def usual(line: bytes) -> tuple[Event, ...] | None:
            if form is not wrapping.form or wrapping.held:
                return None
            if start:
                origin = _dated(line[stamp])
                if origin is None:
                    return None
                self.time = origin[0]
            self.kind, self.around = "access", around
            self.lines["access"] += 1
            return ()

        return usual

    def _usual_batch(self, form: Form, at: int, start: int, length: int) -> _Usual | None:
        """Return how to read lines like the last one, a batch; None where more than its plain figures can vary."""
        places, kind, around, wrapping = self._places, self.kind, self.around, self.wrapping
        if len(self._events) != 1 or len(places) < 2 or not start:
            return None
        word, figures = self._events[0].word, self._events[0].figures
        others = {name: figures[name] for name in figures.keys() - places.keys()}  # figures that are words
        if others.keys() - {"graph"}:
            return None
        stamp, message = slice(at, at + start), slice(at, at + length)
        names, usages = tuple(places), tuple(name for name in places if name.endswith("usage"))
        texts = itemgetter(*(slice(at + start + begin, at + start + end) for begin, end in places.values()))
        recent, trust, number_of = self._recent, self.trust, _NUMBERS.__getitem__

        def usual(line: bytes) -> tuple[Event, ...] | None:
            origin = _dated(line[stamp])
            is_other = form is not wrapping.form or wrapping.held
            if origin is None or (is_other and not wrapping.accepts_again(form)):
                return None
            self.kind, self.around = kind, around
            self.lines[kind] += 1
            self.time, rank = origin
            figures = dict(zip(names, map(number_of, texts(line))))  # noqa: B905 - of one length
            for name in usages:
                if figures[name] > 2:  # no usage of a cache
                    del figures[name]
            figures.update(others)
            event = Event(kind, origin[0], rank, figures, word)
            if trust.carrier:
                event.marked = trust.is_near(self.number, self.time)
            self._serving = self._stamped = trust.serves = True
            self._go_on = None
            recent.append(line[message])
            return (event,)

        return usual

    def end(self) -> tuple[Event, ...]:
        """Return what waits for a further line: arguments that were cut."""
        cut, self._cut = self._cut, None
        return () if cut is None else (cut[0],)

    def _add(self, kind: str, figures: dict[str, float] | None = None, word: str = "", text: str = "") -> Event:
        event = Event(kind, *self._at, {} if figures is None else figures, word, text)
        self._events.append(event)
        return event

    def _read(self, line: Line) -> str:
        """Read a line without the text around it; return its kind."""
        text, self.around = line.text, line.around
        stamp = None if line.headed else stamp_of(text)
        if line.glued:
            self.trust.mark("glued", self.number, self.time, ())
        if stamp is None and not line.headed:
            return self._read_unstamped(line)
        self._events.extend(self.end())
        printed, rank, start = (None, NO_RANK, 0) if stamp is None else stamp
        self.names_ranks |= rank is not NO_RANK
        if stamp is not None and printed is None and self._stamped:
            return "other"
        time = self._with_date(line.time if printed is None else printed)
        self.time = self.time if time is None else time
        self.begin = time if self.begin is None else self.begin
        if line.around.endswith("tracing") and self._is_of_another_rank(text, time or 0.0):
            return "known"
        self._at = time, line.rank if rank is NO_RANK else rank
        kind = self._read_message(text[start:])
        if stamp is not None and time is not None and kind not in ("other", "access", "traceback"):
            self._stamped = True
        return kind

    def _with_date(self, time: float | None) -> float | None:
        """Return a printed time; one without a date as seconds since the midnight of the first day."""
        return self._since_first_midnight(time) if time is not None and time < FIRST_DATED else time

    def _is_of_another_rank(self, text: bytes, time: float) -> bool:
        """Whether a line without ranks repeats one of a moment ago that every rank prints."""
        key = _ELAPSED.sub(b"", text)
        if _OF_EACH_RANK.match(key) is None:
            return False
        last, self._printed[key] = self._printed.get(key, 0.0), time
        if len(self._printed) > _KEPT:
            self._printed.clear()
        return 0 <= time - last <= _RANKS_WITHIN

    def _since_first_midnight(self, clock: float) -> float:
        """Return a time without a date (0.3.0) as seconds since the midnight of the first day."""
        last = self._clock
        if last is not None:
            if clock < last - DAY / 2:
                self._day += 1
            elif last < 120 and clock > DAY - 120 and self._day:  # processes write out of order
                return (self._day - 1) * DAY + clock
        self._clock = clock
        return self._day * DAY + clock

    def _read_unstamped(self, line: Line) -> str:
        """Read a line without a stamp: arguments that go on, a part of a traceback, an access line, or of a log without
        stamps.

        The text around it may have the time of another zone than SGLang's stamps: those come first.
        """
        text, time = line.text, line.time
        if self._cut is not None and self._read_rest(text, *self._cut):
            return "arguments"
        self._events.extend(self.end())
        time = self.time if self._stamped else self._with_date(time)
        self._at = time, line.rank
        kind = self._read_bare(text)
        if not kind and not self._stamped:
            self.time = self.time if time is None else time
            kind = self._read_message(text, stamped=False)
            self.begin = self.time if self.begin is None and kind != "other" else self.begin
        return kind or ("other" if text.strip() else "empty")

    def _read_bare(self, text: bytes) -> str:
        """Read a line that needs no stamp; return its kind, empty for any other line."""
        if _ACCESS.match(text):
            return self._read_access(text)
        row = _row_of(text) if _BARE.match(text) else None
        kind = self._read_traceback(text) if row is None else self._read_row(*row)
        return kind or ("" if self._go_on is None else self._go_on(text))

    def _read_message(self, text: bytes, *, stamped: bool = True) -> str:
        """Read a message by the table. What SGLang advises has its stamp."""
        self._go_on = None
        if _ACCESS.match(text):
            return self._read_access(text)
        text = _without_level(text)
        opens, is_of_request = text.rstrip().endswith(TRACEBACK), _ASGI.match(text) is not None
        if opens or is_of_request:
            self._traceback = _Traceback(self._at, self.number, self.number + _OTHERS_BETWEEN, stamped=True)
        if (row := _row_of(text)) is not None:
            return self._read_row(*row)
        if stamped and self._read_advice(text):
            return "advice"
        if is_of_request:  # uvicorn, of a request that an exception ended; that of a stream has status 200
            if not self._exceptions_due:
                self._add("server_error")
            self._exceptions_due = max(self._exceptions_due - 1, 0)
            return "server_error"
        if _UNKNOWN_BATCH.match(text):
            self.unreadable["batch_line"] += 1
        return "traceback" if opens else "other"

    def _read_advice(self, text: bytes) -> bool:
        """Add the event of a line with which SGLang advises or decides about a flag, before the first request."""
        if self.trust.serves or (b"_" not in text and b"--" not in text):
            return False
        words = text[: 4 * LONGEST_TEXT].decode("utf-8", "replace")
        advice = recognise(words)
        if advice is None or advice.role not in ("recommends", "decision"):
            return False
        self._add("advice", {"line": self.number}, advice.pattern, _words(text))
        return True

    def _read_row(self, row: Message, match: re.Match[bytes]) -> str:
        """Read a message by its row; return its kind."""
        text, kind = match.string, row.kind
        if kind in _NEEDED:
            return self._read_batch(row, match)
        if kind == "arguments":
            return self._read_arguments(text[match.end() :])
        if kind == "words":
            self._explain(_without_level(text))
        elif kind in ("known", "limits") and not text.startswith(b"max_total_num_tokens="):
            self._read_advice(text)
        return kind if kind in SILENT or kind == "words" else self._read_event(row, match)

    def _read_event(self, row: Message, match: re.Match[bytes]) -> str:
        """Add the event of a message by its row, with what only some kinds have; return its kind."""
        text, kind = match.string, row.kind
        self._serving = self._serving or kind == "ready"
        figures = {name: _number_of(value) for name, value in match.groupdict().items() if value and name != "by"}
        event = self._add(kind, figures | dict(row.figures), row.word)
        if kind in ("pool", "limits", "memory"):
            return self._read_start(event, text)
        if kind == "health" and (silent := _silence(text, event.time)) is not None:
            event.figures["silent"] = silent
        if kind in _QUOTED:
            event.text = _words(text)
        elif kind in ("end", "hang", "out_of_memory", "transfer"):
            return self._read_trouble(event, match)
        return "request" if kind == "refused" and not event.figures else kind  # an error may quote its request

    def _read_batch(self, row: Message, match: re.Match[bytes]) -> str:
        """Read a batch or retraction line by the names of its fields."""
        text = match.string[:_LONGEST_BATCH].rstrip()
        torn = _OTHER_LINE.search(text)
        text = text if torn is None else text[: torn.start()]
        event = Event(row.kind, *self._at, dict(row.figures))
        if mixed := match.groupdict().get("mixed"):
            event.figures["running"] = int(mixed)
        fields = self._read_fields(event, text, match.end())
        # Every release ends the line about a full pool with the ratio: one without it is a text of somebody else's.
        is_short = row.kind == "retraction" and not row.figures and torn is None and b"#new_token_ratio" not in fields
        if is_short or not event.figures.keys() & _NEEDED[row.kind]:
            self.unreadable["retraction_line" if row.kind == "retraction" else "batch_line"] += 1
            return "other"
        if row.kind != "retraction":
            self._count_unreadable(fields, is_torn=torn is not None)
            self._serving = True
        self._events.append(event)
        return row.kind

    def _count_unreadable(self, fields: Mapping[bytes, bytes], *, is_torn: bool) -> None:
        """Count the fields of a batch line with an unknown name, and the line where a value is no number."""
        known = {key: value for key, value in fields.items() if key in _FIGURES or key in _OTHER_FIGURES}
        unknown = sum(not _GRAPH.match(key) for key in fields if key not in known)
        is_odd = any(value not in _NO_NUMBER and not _NUMBER.match(value) for value in known.values())
        self.unreadable += Counter(batch_key=min(unknown, 8), batch_line=int(is_odd or is_torn))

    def _read_fields(self, event: Event, text: bytes, start: int) -> Mapping[bytes, bytes]:
        """Add the figures of a batch or retraction line to its event; return its fields by name."""
        fields: dict[bytes, bytes] = {}
        self._places = {}
        for field_match in islice(_FIELD.finditer(text, start), 64):
            key, value = field_match.groups()
            if key not in fields:
                fields[key] = value
                self._read_field(event, key, value, field_match.start(2))
        return fields

    def _read_field(self, event: Event, key: bytes, value: bytes, start: int) -> None:
        name = _FIGURES.get(key, "")
        match = _NUMBER.match(value) if name and name not in event.figures else None
        if match is not None:
            self._read_figure(event, name, match, start)
        elif event.kind == "decode" and value in (b"True", b"False") and (graph := _GRAPH.match(key)):
            event.figures["graph"], event.word = value == b"True", graph[1].decode()
        elif key == b"#new_token_ratio" and (ratio := _RATIO.match(value)):
            event.figures["ratio_before"], event.figures["ratio_after"] = float(ratio[1]), float(ratio[2])

    def _read_figure(self, event: Event, name: str, match: re.Match[bytes], start: int) -> None:
        """Add a figure that can be true to a batch's event, and note where it stands."""
        number = float(match[1]) / (100 if match[2] else 1)
        if 0 <= number <= _LARGEST and (number <= 2 or not name.endswith("usage")):
            event.figures[name] = number if name in _FRACTIONS else int(number)
            if not match[2] and _PLAIN.fullmatch(match[1]):
                self._places[name] = start, start + match.end(1)

    def _read_arguments(self, text: bytes) -> str:
        self._traceback = None
        self._starting, self._serving, self._capturing, self._ended, self._sizes = True, False, False, False, ()
        parsed_arguments = parse_server_args(text.decode("utf-8", "replace"))
        if parsed_arguments is None:
            self.unreadable["server_args"] += 1
            return "known"
        arguments, is_cut = parsed_arguments
        event = Event("arguments", *self._at, arguments=arguments)
        if is_cut:
            event.figures["cut"] = 1
            self._cut = (event, text)
        else:
            self._events.append(event)
        return "arguments"

    def _read_rest(self, rest: bytes, event: Event, before: bytes) -> bool:
        """Add the arguments that a shipper put into a line of their own: Docker cuts lines at 16 KiB."""
        joined = (before.rstrip(b"\r") + rest)[:LONGEST]
        arguments, is_cut = parse_server_args(joined.decode("utf-8", "replace")) or ({}, True)
        if len(arguments) <= len(event.arguments) and not (arguments and is_cut and len(rest) > _LONGEST_BATCH):
            return False
        event.arguments, self._cut = arguments, (event, joined)
        if not is_cut:
            del event.figures["cut"]
            self._events.extend(self.end())
        return True

    def _read_start(self, event: Event, text: bytes) -> str:
        """Read the figures of a line of the start: sizes, limits, what is left after a stage."""
        text = text[:_LONGEST_MEMORY]
        self._starting = True
        if event.word == "graph_sizes":
            self._events.remove(event)
            self._sizes = _sizes_in(text)
            return "known"
        for key, value in _FIGURE.findall(text):
            if available := _AVAILABLE.fullmatch(key):
                event.figures["available_gb"], event.word = float(value), available[1].decode()
            elif name := _START_FIGURES.get(key) or ("used" if key.endswith((b"_state size", b"_cache size")) else ""):
                is_sum = name == "gigabytes" or key not in _START_FIGURES
                event.figures[name] = _number_of(value) + (event.figures.get(name, 0) if is_sum else 0)
        if (graph := _GRAPH_OF.match(text)) is not None:
            self._read_capture(event, text, graph[1])
        return event.kind

    def _read_capture(self, event: Event, text: bytes, graph: bytes) -> None:
        """Read the begin or the end of a capture of CUDA graphs: of which graphs, and their sizes."""
        if event.word in ("graph_begin", "graph"):
            self._capturing = event.word == "graph_begin"
        if _OF_PREFILL.search(graph):
            event.figures["prefill"] = 1
        if graph.strip().lower() in _OF_DECODE:
            self._sizes = _sizes_in(text) or self._sizes
            event.sizes = self._sizes if event.word == "graph" else ()

    def _read_trouble(self, event: Event, match: re.Match[bytes]) -> str:
        """Read the line of an end, a hang, a failed allocation or transfer, which may explain an end."""
        text, kind = match.string, event.kind
        if kind == "end":
            self._read_end(event, text, match.end())
        elif kind == "hang":
            event.word = _WATCHED.get(match.groupdict().get("by") or b"", event.word)
            if b"soft=True" not in text:  # that one only warns
                self._explain(text, ending="hang")
        elif kind == "out_of_memory":
            unserved = "graph_capture" if self._capturing else "startup"
            event.word = event.word or (unserved if self._starting and not self._serving else "unknown")
            event.figures, event.text = _held_elsewhere(text), _words(text)
            self._explain(text, ending="memory", sure=False, kind=kind)
        else:
            return self._read_transfer(event, text)
        return kind

    def _read_end(self, event: Event, text: bytes, begin: int) -> None:
        if event.word == _ABORT:
            if self._ended and _KILLED.fullmatch(text):
                self._events.remove(event)
                return
        else:
            self._ended = True
        event.text, opens = _crash(text), TRACEBACK in text
        if event.word == "scheduler_exception" or opens:
            if self._traceback is None or self._traceback.begin != self.number:
                self._traceback = _Traceback(self._at, self.number, self.number + 2, is_open=False, goes_on=True)
            self._traceback.announced = True
        text = text[begin:] if event.word == "scheduler_exception" else text
        ending = "" if event.word in (_ABORT, "scheduler_exception") or b"exit code" in text else "unknown"
        if not opens:
            self._explain(text, ending=ending)

    def _read_transfer(self, event: Event, text: bytes) -> str:
        """Read a failed bootstrap or transfer: its request, where the line has one, and the reason; a client that gave
        up is none.
        """
        reason = text
        if (request := _FAILED_REQUEST.match(text)) is not None:
            reason = request["reason"] or b""
            if _GIVEN_UP.search(reason):
                self._events.remove(event)
                return "known"
            if request["room"].isdigit():
                event.figures["room"] = float(request["room"])
        side = text.partition(b" ")[0].lower()
        event.word, event.text = side.decode() if side in (b"decode", b"prefill") else "", _words(reason)
        if b"from another rank" not in reason:
            self._explain(reason, ending="transfer", sure=False)
        return event.kind

    def _explain(
        self, text: bytes, *, ending: str = "", sure: bool = True, kind: str = "", of: _Traceback | None = None
    ) -> None:
        """Add the event of a line that may explain an end; of a traceback, or where it has a kind, the next lines can
        go on with it.
        """
        chain, place, before = (self.number, "", []) if of is None else (of.begin, of.place, [*of.texts])
        figures: dict[str, float] = {"line": self.number, "chain": chain}
        if not sure:
            figures["unsure"] = 1
        lines, around, at, recent = [text], self.around, self._at, tuple(map(_recent_words, self._recent))

        def explanation() -> Event:
            text = b"\n".join(lines)
            words, asked = _words(text), _ASKED_TOKENS.search(text)
            is_check = asked is not None and 0 < int(asked[1]) <= int(asked[2])
            word = "check" if is_check else ending or class_of([*before, words], place)
            return Event("words", *at, figures.copy(), word, words, place=place[:LONGEST_TEXT], before=recent)

        def go_on(text: bytes) -> str:
            """Read a further line of it. It ends with an empty line, or a line of SGLang's in a log without stamps."""
            text = text.removeprefix(b" " * (self._traceback.indent if self._traceback is not None else 0))
            is_over = not text.strip() or self.around != around or len(lines) >= _LINES_OF_MESSAGE
            is_over = is_over or any(pattern.match(text) for pattern in (_WARNED, _ANY, _ACCESS))
            if is_over or (kind == "out_of_memory" and _ASKED.match(text) is None):
                self._go_on = None
                return ""
            lines.append(text)
            self._released.append(explanation())
            self._released[-1].marked = first.marked
            return kind or "exception"

        first = explanation()
        self._events.append(first)
        if of is not None or kind:
            self._go_on = go_on

    def _read_access(self, text: bytes) -> str:
        """Read an access line: a request that failed, or a pause. Health checks and scrapes are no requests."""
        access = _ACCESS.match(text)
        answer = None if access is None else _ANSWERED.match(text, access.end())
        if access is None or answer is None:
            return "access"
        self._exceptions_due += answer[1] == b"500"
        if access[1] == b"POST":
            if kind := {b"500": "server_error", b"503": "rejected"}.get(answer[1]):
                self._add(kind)
            elif answer[1] == b"200" and (pause := _PAUSED.match(text, access.end())):
                self._add("pause" if pause[1] == b"pause" else "resume")
        return "access"

    def _in_traceback(self) -> _Traceback | None:
        last = self._traceback
        return last if last is not None and last.is_open and self.number <= last.until else None

    def _read_traceback(self, text: bytes) -> str:
        """Read a line without a stamp as part of a traceback; return its kind, empty where it belongs to none."""
        traceback = self._in_traceback()
        if not self._serving and _USAGE_ERROR.match(text):
            self._add("end", word="launch_failed", text=_launch_failure(text))
            self._explain(_without_values(text), ending="argument")
            return "end"
        if text.startswith(TRACEBACK):
            self._open_traceback()
        elif (frame := _FRAME.match(text)) is not None:
            self._read_frame(traceback or self._open_traceback(headless=True), frame)
        elif self._traceback is not None and not self._traceback.is_open and text.startswith(_CHAINED):
            self._traceback.goes_on = True
            self._go_on = None
        elif traceback is None:
            if self._stamped or not _EXCEPTION.match(text) or not _OWN_WORDS.search(text):
                return ""
            self._explain(text)
            return "exception"
        elif text[traceback.indent : traceback.indent + 1] != b" " and text.strip():
            if not _EXCEPTION.match(text := text[traceback.indent :]):
                return ""
            self._close_traceback(traceback, text)
            return "exception"
        return "traceback"

    def _read_frame(self, traceback: _Traceback, frame: re.Match[bytes]) -> None:
        place = traceback.place
        traceback.read_frame(frame, self.number)
        if traceback.is_sure and traceback.place != place and not traceback.texts:  # a log may end before its last line
            self._at = traceback.at
            self._explain(frame.string.strip(), ending="cut", of=traceback)
        self._go_on = None

    def _open_traceback(self, *, headless: bool = False) -> _Traceback:
        """Open a traceback: one that goes on, or that of another process."""
        last, until = self._traceback, self.number + _OTHERS_BETWEEN
        if last is not None and last.goes_on and self.number <= last.until:
            self._traceback = replace(last, until=until, is_open=True, goes_on=False, place="", indent=0)
        else:
            self._traceback = _Traceback(self._at, self.number, until, headless=headless)
        self._go_on = None
        return self._traceback

    def _close_traceback(self, traceback: _Traceback, text: bytes) -> None:
        """Read the exception at the end of a traceback."""
        traceback.is_open = False
        time, rank = traceback.at
        self._at = traceback.at = self._at[0] if time is None else time, rank
        row = _row_of_exception(text)
        by_somebody = text.startswith(_BY_SOMEBODY) or "test" in traceback.inside
        in_thread = "storage" in traceback.inside and not traceback.is_sure
        uncaught = bool(traceback.place) and not traceback.stamped and not in_thread
        if in_thread:
            self._add("hicache", word="storage", text=_words(text))
        elif row is not None and row.kind == "end":
            self._add("end", word=row.word)
        elif row is None and not by_somebody:
            self._add_end_of(traceback, text, uncaught=uncaught)
        if (traceback.is_sure or uncaught or row is not None) and not by_somebody:
            self._explain(text, sure=traceback.is_sure, of=traceback)
            traceback.texts.append(_words(text))
        if row is not None and row.kind != "end" and not traceback.counted:
            word = row.word or traceback.phase_of(starting=self._starting, serving=self._serving)
            self._add("out_of_memory", _held_elsewhere(text), word, _words(text))
            traceback.counted = True

    def _add_end_of(self, traceback: _Traceback, text: bytes, *, uncaught: bool) -> None:
        """Add the end of a server whose launch failed, or whose process ended, by an exception of no row."""
        if not self._serving and ("main" in traceback.inside or uncaught):
            is_start = not traceback.headless or "start" in traceback.inside
            word, why = ("launch_failed", _launch_failure(text)) if is_start else ("scheduler_exception", "")
            self._add("end", word=word, text=why)
        elif "process" in traceback.inside and not traceback.announced:
            self._add("end", word="scheduler_exception")


def _without_level(text: bytes) -> bytes:
    """Return a message without the level that uvicorn puts before it."""
    level = _LEVEL.match(text)
    return text if level is None else text[level.end() :]


def _row_of_exception(text: bytes) -> Message | None:
    """Return the row of a failed launch or allocation, by the exception at the end of a
    traceback; None for any other.
    """
    found = _row_of(text)
    if found is None or (found[0].word != "launch_failed" and found[0].kind != "out_of_memory"):
        return None
    return found[0]


def _row_of(text: bytes) -> tuple[Message, re.Match[bytes]] | None:
    """Return the row of a message, and what it matches."""
    first = _ANY.match(text)
    if first is None:
        return None
    row, pattern = _PATTERNS[(first.lastindex or 0) - 1]
    match = pattern.match(text)
    return None if match is None else (row, match)


def _sizes_in(text: bytes) -> tuple[int, ...]:
    match = _SIZES.search(text)
    sizes = match[1].split(b",")[:1024] if match is not None else []
    return tuple(int(size) for size in sizes if size.strip().isdigit() and len(size) < 12)
