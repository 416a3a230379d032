"""The text around SGLang's lines, and SGLang's own stamp: `[2025-11-20 11:40:13 DP0 TP3] `.

SGLang's stamp or words are searched in a line. What stands around them is a form: layers of text and of fields of JSON, the outer ones
first. A form that cannot be a sentence counts at once, any other when `_ENOUGH` lines in a row have it; lines without a stamp, such as a
traceback's, do not end the row, and are read in the form of the line before.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from sglang_tuning_exporter.core.events import NO_RANK, Rank
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

# SGLang's own stamp: configure_logger, sglang/srt/utils.py, later srt/utils/common.py. 0.3.0 has no date; milliseconds with SGLANG_LOG_MS
# (0.5.6).
_RANKS = rb"(?:[ ]+[A-Z_]{2,12}\d{1,5})*"
_STAMP = re.compile(
    rb"(?:\[?((?:\d{4}-\d\d-\d\d[ T])?[0-2]\d:[0-5]\d:[0-6]\d(?:[.,]\d{1,9})?)(" + _RANKS + rb")[ ]*\]"
    rb"|\[((?:DP|TP|PP|EP|ATTN_CP|MOE_DP)\d{1,5}" + _RANKS + rb")\])[ ]?"
)
_RANK = re.compile(rb"(?<![A-Z_])(DP|TP|PP)(\d{1,5})")


class Origin(NamedTuple):
    """When and by which ranks a line was printed."""

    time: float | None  # unix seconds, read as UTC; seconds since midnight where there is no date
    rank: Rank


def stamp_of(text: bytes, start: int = 0) -> tuple[Origin, int] | None:
    """Read SGLang's stamp at `start`; also return where the message begins."""
    match = _STAMP.match(text, start)
    return None if match is None else (_read_stamp(match[1], match[2] or match[3] or b""), match.end())


@lru_cache(maxsize=4096)
def origin_of(stamp: bytes) -> Origin | None:
    """Read a whole stamp; None where it is none, or has no date."""
    found = stamp_of(stamp)
    return found[0] if found is not None and found[1] == len(stamp) and (found[0].time or 0.0) >= FIRST_DATED else None


@lru_cache(maxsize=4096)
def _read_stamp(time: bytes | None, ranks: bytes) -> Origin:
    return Origin(time_of(time) if time else None, rank_of(ranks))


def rank_of(text: bytes) -> Rank:
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
    """Read the time that begins a text: unix seconds, without a zone as UTC; seconds since midnight where there is no date."""
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
_BETWEEN = rb"(?:\[?[A-Z]{3,8}\]?[ :|-]+|\[[\w ./:={}-]{0,60}\]:? ?|[({][\w ./:={}-]{0,60}[)}]:? ?|[\w./-]{1,60}\.py:\d{1,6}:? ?|[ \t|-]|[A-Z]:[ \t])"
# Another time in brackets before SGLang's stamp or words.
_SECOND = re.compile(rb"%b(?:%b{0,12}?(?=%b)|%b{1,12}?(?=%b))" % (_OWN, _BETWEEN, _OWN, _BETWEEN, _WORDS))

_CRI = re.compile(rb"(" + _TIME + rb") (stdout|stderr) ([PF])(?::\S*)?(?: |$)")
_DOCKER_CUTS = 16_000  # bytes; it cuts at 16,384, or a little before so that no character is cut
_REPEATED = re.compile(rb" \[repeated \d+x across (?:cluster|actors)\].*$")  # by Ray
_ANSI = re.compile(rb"\x1b\[[0-9;:?]*[A-Za-z]|\x1b\([A-Z0-9]|\x1b[=>78]|\x1b[\]_P^][^\x07\x1b\n]{0,300}(?:\x07|\x1b\\)")
_BAR = re.compile(rb"\s*(?:[A-Z][\w /-]{0,60}(?:\([^()\n]{0,80}\))?: *)?\d{1,3}%\|[^|\n]{0,200}\|[^\"'{}\\\n]{0,120}$")
_GLUED = re.compile(rb"\[20\d\d-[01]\d-[0-3]\d [0-2]\d:[0-5]\d:[0-5]\d")
_GLUED_WITHIN = 600
_FRAME = re.compile(rb' {2}File "[^"\n]{1,1000}", line \d{1,9}, in \S')  # of a traceback
_QUOTING = re.compile(rb"[\"'{}\\]|obj=|text=|ReqInput|Model attempted|rid=|prompt")


def without_terminal(line: bytes) -> bytes:
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
            text=without_terminal(_REPEATED.sub(b"", text) if b"pid=" in before else text),
            time=line.time if printed is None else time_of(printed[0]),
            rank=rank_of(before) if layer.headed else line.rank,
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


def form_of(text: bytes, layers: int = _LAYERS) -> tuple[Form, bool] | None:
    """Return the layers around a line, and whether no sentence looks like them; None without SGLang's stamp or words, or such layers."""
    head = _HEAD.search(text)
    if head is None and b'  File "' in text:
        known = _KNOWN_BEFORE.match(text)
        return (
            None if known is None or not _FRAME.match(text, known.end()) else ((_KNOWN[known.lastgroup or ""],), True)
        )
    if not layers or head is None:
        return None
    second = _SECOND.match(text, head.start())
    start = head.start() if second is None else second.end()
    if start == 0:
        return (), True
    document = parsed(text)
    learned = _text_layer(text, start) if document is None else _field_layer(document, layers)
    for line in _peeled(learned[0], Line(text)) if learned is not None else ():
        if learned is not None and (inner := form_of(line.text, layers - 1)) is not None:
            return (learned[0], *inner[0]), learned[1] and inner[1]
    return None


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
# What Rust's tracing prints, in Dynamo in place of SGLang's stamp; the function's name is another one in each kind of line.
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
_QUOTED = rb"\"[^\"\n]*\"(?=[ ,:;=}>\])\t])|'[^'\n]*'(?=[ ,:;=}>\])\t])"
_NO_WORDS = re.compile(rb"|".join((_TIMED.pattern, _IN_BRACKETS, _QUOTED, rb"\b(?:DP|TP|PP|EP)\d{1,5}")))
_CLOSED = re.compile(rb"(?:[^\"'`\n]|" + _QUOTED + rb")*")


def without_known(line: bytes) -> bytes:
    """Return a line of anybody without the text that a container runtime, Ray or a follower of logs puts before it."""
    text = without_terminal(line).lstrip()
    known = _KNOWN_BEFORE.match(text)
    return text if known is None else text[known.end() :]


def _text_layer(text: bytes, start: int) -> tuple[Layer, bool] | None:
    """Learn the text before a line up to a quotation, a document or SGLang's line itself; None where it may be anything.

    Its words vary from line to line, but not the name of a field, and none where they stand for a stamp without a time.
    """
    brace = text.find(b"{", 0, start)
    if brace > 0 and isinstance(parsed(text[brace:]), dict):
        start = brace
    start = _CLOSED.match(text, 0, start).end()  # type: ignore[union-attr]  # it always matches
    before, first = text[:start], text[start : start + 1]
    if len(before) > _LONGEST_BEFORE or _OF_REQUESTS.search(before):
        return None
    if first not in _VALUES and before[-1] not in _ENDS:
        return None
    headed = first not in _VALUES and first != b"{" and _STAMP.match(text, start) is None
    if headed and _TRACING.fullmatch(before):
        return Layer("tracing", _TRACING, headed=True), True
    known = None if first in _VALUES else _KNOWN_BEFORE.match(before)
    if known is not None and (
        known["grep"] is None or known.end() == start
    ):  # a time may begin like a number of a line
        return _KNOWN[known.lastgroup or ""], True
    words, timed = len(re.findall(_WORD, _NO_WORDS.sub(b"", before))), _TIMED.search(before) is not None
    name = re.search(rb"[^\W\d]\w*(?:=|: )\Z", before)
    fixed = 0 if headed and not timed else len(before) if name is None else name.start()
    parts = [
        re.escape(part[0])
        if part.start() >= fixed or not part.lastindex or (part[2] and part.end() == start and not headed)
        else _WORD
        if part[1]
        else rb"[ \t]+"
        for part in _PART.finditer(before)
    ]
    is_value = before.endswith(b"=") or (first in _VALUES and before != b"" and not before.endswith(_DELIMITERS))
    is_structured = words == 0 or before.endswith(b":") or before.rstrip()[-1:] in b"]})>"
    sure = not is_value and words <= (_WORDS_SURE if timed else 2) and (timed or is_structured)
    return (
        None if words > _WORDS_AT_MOST else (Layer("text before it", re.compile(b"".join(parts)), headed=headed), sure)
    )


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
        if any(form_of(without_terminal(line), layers - 1) is not None for line in lines):
            return place
    return None


def records_at(document: Any, field: Field) -> Iterator[tuple[float | None, list[bytes]]]:
    """Return the texts at one place of a document with the time of each, line by line."""
    for place, leaf, holder in _leaves(document):
        if place == field and isinstance(leaf, str):
            lines = leaf.encode("utf-8", "replace").rstrip(b"\r\n").split(b"\n")
            yield _time_in(holder, document), [*map(without_terminal, lines)]


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
        self.waits = "other"  # where a line gives nothing yet: `cut` by a container runtime, or `other` in a form that is not accepted
        self.form: Form | None = None  # of the last line of SGLang's; (): nothing stood around it
        self.forms: list[Form] = []  # accepted, the last one first
        self._proven: set[Form] = set()  # had SGLang's words directly behind them; (): nothing around
        self._candidate: Form = ()  # not accepted yet
        self.held: list[Line] = []  # its lines in a row
        self.cut: dict[str, bytes] = {}  # by stream: the parts so far of a line that a container runtime cut

    def lines(self, raw: bytes, *, open_text: bool = False) -> list[Line]:
        """Return the lines in a physical line: usually one; none while a line is cut or held, several when held ones are released.

        `open_text`: a traceback is open, so text before a stamp is the exception's.
        """
        text = without_terminal(raw.lstrip(b"\x00")[:LONGEST])
        if text[:1] == b" " and (_STAMP.match(pasted := text.lstrip(b" ")) or pasted.startswith(b"(")):
            text = pasted
        if self.is_bare and _STAMP.match(text):
            self._accept((), [Line(text)])
            return [Line(text)]
        lines = self._whole(Line(text))
        if not lines:
            self.waits = "cut"
        return [inner for line in lines for inner in self._inner(line, open_text=open_text)]

    def begin_file(self) -> None:
        """Forget the first part of a line whose rest was in a file that is gone."""
        self.cut.clear()

    def _whole(self, line: Line) -> list[Line]:
        """Return a line without a container runtime's text around it; nothing while the runtime has cut it."""
        text, entry = line.text, None
        if (cri := _CRI.match(text)) is not None:
            stream, partial, inner = cri[2].decode(), cri[3] == b"P", text[cri.end() :]
            line = line._replace(time=time_of(cri[1]), around=", CRI")
        else:
            entry = parsed(text) if text[:1] == b"{" and b'"stream"' in text and b'"log"' in text else None
            log, stream = (entry.get("log"), entry.get("stream")) if isinstance(entry, dict) else (None, None)
            if not isinstance(log, str) or not isinstance(stream, str):
                return [line]
            inner = log.encode("utf-8", "replace")
            partial = not inner.endswith(b"\n") and len(inner) >= _DOCKER_CUTS
            line = line._replace(around=", container's JSON")
        begun = self.cut.pop(stream[:20], b"")
        inner = (begun + inner)[:LONGEST] if len(self.cut) < _MOST_STREAMS else inner
        if partial:
            self.cut[stream[:20]] = inner
            return []
        lines = [*map(without_terminal, inner.rstrip(b"\r\n").split(b"\n")[:_MOST_LINES])]
        if line.time is None and not _STAMP.match(lines[0]):
            line = line._replace(time=_time_in(entry))
        return [line._replace(text=each) for each in lines]

    def _inner(self, line: Line, *, open_text: bool) -> list[Line]:
        """Return what is in a line without the text of container runtimes: as it is, in a known form, behind other text, or in a new form."""
        stamp = _STAMP.match(line.text)
        known = self._in_known_form(line)
        if stamp is not None:
            # Another time in brackets may stand before SGLang's own stamp.
            may_be_another = not self.is_bare and (known is not None or _SECOND.match(line.text) is not None)
            if not may_be_another or WORDS.match(line.text, stamp.end()) is not None:
                self._accept((), [line])
                return [line]
        if known is not None:
            form, found = known
            if any(_STAMP.match(each.text) or each.headed for each in found):
                self._accept(form, found)
            return found
        behind = None if open_text else self._behind_text(line)
        return self._in_new_form(line) if behind is None else behind

    def _in_known_form(self, line: Line) -> tuple[Form, list[Line]] | None:
        """Return the lines in an accepted form; without a stamp only in that of the line before."""
        for form in [self.form, *self.forms] if self.form else self.forms:
            found = without(form, line)
            if found and (form is self.form or any(_STAMP.match(each.text) or each.headed for each in found)):
                return form, found
        return None

    def _behind_text(self, line: Line) -> list[Line] | None:
        """Return a line behind progress bars without a newline, or directly behind words of another program, such as an address."""
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
        form, sure = form_of(line.text) or ((), False)
        found = without(form, line) if form else []
        if not found:
            return [line]
        at_once = form in self.forms or (sure and (not self._proven or all(layer.name in _KNOWN for layer in form)))
        if form != self._candidate:
            self._candidate, self.held = form, []
        self.held += found
        if len(self.held) < _ENOUGH and not at_once:
            if sum(len(each.text) for each in self.held) > _HELD_LENGTH:
                self.held = []
            self.waits, self.form = "other", None if self.form == () else self.form
            return []
        held, self.held = self.held, []
        self.forms = [form, *self.forms[: _FORMS_KEPT - 1]]
        self._accept(form, held)
        return held

    @property
    def is_bare(self) -> bool:
        """Whether SGLang's lines came without any text around them."""
        return () in self._proven

    def is_again(self, form: Form, *, alone: bool) -> bool:
        """Whether SGLang's lines came in this form before, and a line that shows it `alone` is one more: note it."""
        if not alone or form not in self._proven:
            return False
        self.form, self.held = form, []
        return True

    def _accept(self, form: Form, found: list[Line]) -> None:
        """Note a line with SGLang's stamp, or the text that replaces it, in this form."""
        for line in found:
            stamp = _STAMP.match(line.text)
            if WORDS.match(line.text, stamp.end() if stamp else 0) is not None:
                self._proven.add(form)
        if form or self.is_bare:
            self.form = form
        if form in self._proven:
            self.held = []
