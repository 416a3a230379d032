"""The text around SGLang's lines, and SGLang's own stamp: `[2025-11-20 11:40:13 DP0 TP3] `.

Container runtimes and log followers are known by their form (`_RUNTIMES`). Any other text around a line is a `Layer` that is learned from
lines with SGLang's stamp or words in it: at once where it cannot be a sentence, after `_ENOUGH` lines where it can, and after `_ENOUGH_MORE`
in a row where the stream has another form already. What was learned is not unlearned by lines that do not have it.
"""

from __future__ import annotations

import csv
import datetime as dt
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import NamedTuple, TypeAlias

from sglang_tuning_exporter.core.events import NO_RANK, Rank
from sglang_tuning_exporter.sglang.metrics.figures import MOST_RANKS

LONGEST = 262_144  # bytes read of a line; `server_args=` has about 20 kB
DAY = 86_400
FIRST_DATED = 1e9  # seconds; a smaller time is one of the day
_LONGEST_BEFORE = 300
_ENOUGH, _ENOUGH_MORE = 3, 16
_HELD_FORMS, _HELD_LENGTH = 16, 65_536
_FORMS_KEPT = 8
_LAYERS = 4
_RECORDS = 4096  # of one JSON document
_EPOCH_DAY = dt.date(1970, 1, 1).toordinal()

# SGLang's own stamp: configure_logger, sglang/srt/utils.py, later srt/utils/common.py. 0.3.0 has no date; milliseconds with SGLANG_LOG_MS
# (0.5.6); `gpu_id=0` before 0.3.
_RANKS = rb"(?:[ ]+(?:[A-Z_]{2,12}\d{1,5}|gpu(?:_id)?=\d{1,5}))*"
_STAMP = re.compile(
    rb"(?:\[?(?:(\d{4}-\d\d-\d\d)[ T])?([0-2]\d):([0-5]\d):([0-6]\d)(?:[.,](\d{1,9}))?(" + _RANKS + rb")[ ]*\]"
    rb"|\[((?:gpu(?:_id)?=\d{1,5}|(?:DP|TP|PP|EP|ATTN_CP|MOE_DP)\d{1,5})" + _RANKS + rb")\])[ ]?"
)
_RANK = re.compile(rb"(?<![A-Z_])(DP|TP|PP|gpu|gpu_id)=?(\d{1,5})")
_RANK_WORD = rb"(?<![\w.-])(?:DP|TP|PP|EP|ATTN_CP|MOE_DP)\d{1,5}(?![\w.-])"


class Stamp(NamedTuple):
    """When and by which ranks a line was printed."""

    time: float | None  # unix seconds, read as UTC
    clock: float | None  # seconds since midnight, where there is no date
    rank: Rank


def stamp_of(text: bytes, start: int = 0) -> tuple[Stamp, int] | None:
    """Read SGLang's stamp at `start`; also return where the message begins."""
    match = _STAMP.match(text, start)
    return None if match is None else (_read_stamp(match[0]), match.end())


@lru_cache(maxsize=4096)
def _read_stamp(text: bytes) -> Stamp:
    match = _STAMP.match(text)
    assert match is not None
    date, hours, minutes, seconds, fraction, ranks, alone = match.groups()
    rank = rank_of(ranks or alone or b"")
    if hours is None:
        return Stamp(None, None, rank)
    clock = int(hours) * 3600 + int(minutes) * 60 + int(seconds) + (float(b"0." + fraction) if fraction else 0.0)
    if date is None:
        return Stamp(None, clock, rank)
    day = _day(int(date[:4]), int(date[5:7]), int(date[8:]))
    return Stamp(None if day is None else day + clock, None, rank)


def rank_of(text: bytes) -> Rank:
    """Read the ranks in ` DP1 PP0 TP3` or `gpu_id=0` (0.2: the GPU is the TP rank)."""
    found = {name: int(number) for name, number in _RANK.findall(text) if int(number) < MOST_RANKS}
    tp = found.get(b"TP", found.get(b"gpu_id", found.get(b"gpu")))
    return Rank(found.get(b"DP"), tp, found.get(b"PP")) if found else NO_RANK


def _day(year: int, month: int, day: int) -> int | None:
    """Return the unix seconds of a date's midnight."""
    try:
        return (dt.date(year, month, day).toordinal() - _EPOCH_DAY) * DAY
    except ValueError:
        return None


# Times as others print them.
_MONTHS = b"Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_CLOCK = rb"(?P<hours>[0-2]\d):(?P<minutes>[0-5]\d):(?P<seconds>[0-6]\d)(?:[.,](?P<fraction>\d{1,9}))?"
_YEAR, _MONTH, _DATE = rb"(?P<year>20\d\d)", rb"(?P<month>[01]\d)", rb"(?P<day>[0-3]\d)"
_NAME = rb"(?P<name>%b)" % _MONTHS
_ZONE = rb"(?: ?(?P<zone>Z|UTC|GMT|[+-]\d\d:?\d\d))?"
_TIMES = (
    _YEAR + rb"[-/.]" + _MONTH + rb"[-/.]" + _DATE + rb"(?:[ T_]|, )" + _CLOCK + _ZONE,
    _YEAR + _MONTH + _DATE + rb"[-T ]?" + _CLOCK.replace(b":(?P", b":?(?P") + rb"(?!\d)" + _ZONE,
    _NAME + rb" (?P<day>[ \d]\d) (?:(?P<year>\d{4}) )?" + _CLOCK,  # syslog
    rb"[DIWEFC]" + _MONTH + _DATE + rb" " + _CLOCK,  # glog
    _DATE + rb"[ /-]" + _NAME + rb"[ /-](?P<year>\d{4})[ :]" + _CLOCK + _ZONE,
    _DATE + rb"\." + _MONTH + rb"\." + _YEAR + rb",? " + _CLOCK,
    _MONTH + rb"/" + _DATE + rb"/" + _YEAR + rb",? " + _CLOCK + rb"(?: (?P<half>[AP]M))?",
    _MONTH + rb"[-/]" + _DATE + rb" " + _CLOCK,
    _CLOCK + rb"(?![\w:])",
    rb"(?P<epoch>(?:1[4-9]|2[01])\d{8}(?:\.\d{1,9}|\d{3}|\d{6}|\d{9})?)(?![\w.:-])",  # 2014 to 2040, in any unit
)
_TIME = b"(?:%b)" % b"|".join(re.sub(rb"\?P<\w+>", b"?:", form) for form in _TIMES)
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
    if half := found.get("half"):
        clock = clock % (DAY / 2) + (DAY / 2 if half == b"PM" else 0.0)
    if "day" not in found:
        return clock
    month = _MONTHS.split(b"|").index(found["name"]) + 1 if found.get("name") else int(found["month"])
    today = dt.datetime.now(dt.timezone.utc).date()
    years = (int(found["year"]),) if found.get("year") else (today.year, today.year - 1)
    days = (_day(year, month, int(found["day"])) for year in years)
    limit = (today.toordinal() - _EPOCH_DAY + 1) * DAY  # a day without a year is the last one that has begun anywhere
    day = next((day for day in days if day is not None and (len(years) == 1 or day <= limit)), None)
    zone = (found.get("zone") or b"Z").replace(b":", b"")
    ahead = (int(zone[1:3]) * 3600 + int(zone[3:5]) * 60) * (-1 if zone[:1] == b"-" else 1) if zone[:1] in b"+-" else 0
    return None if day is None else day + clock - ahead


class Line(NamedTuple):
    """A line without the text around it."""

    text: bytes  # from SGLang's stamp on; where another text replaces it, the message
    time: float | None = None  # as printed around it: unix seconds, or seconds since midnight
    rank: Rank = NO_RANK
    more: tuple[bytes, ...] = ()  # further lines of the same record
    stream: str = ""  # of a container, whose lines are cut
    partial: bool = False  # the stream's next line goes on with this one
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
    rb"(?:\[?[A-Z]{3,8}\]?[ :|-]+|[\[({][\w ./:={}-]{0,60}[\])}]:? ?|[\w./-]{1,60}\.py:\d{1,6}:? ?|[ \t|-]|[A-Z]:[ \t])"
)
# Another time in brackets before SGLang's stamp or words.
_SECOND = re.compile(rb"%b(?:%b{0,12}?(?=%b)|%b{1,12}?(?=%b))" % (_OWN, _BETWEEN, _OWN, _BETWEEN, _WORDS))

_ISO = rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d) "
_RUNTIMES = re.compile(
    rb"(?P<journald>(?:"
    + _ISO
    + rb"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)? )[^\s:\[]{1,255} [^\s:\[\]]{1,100}\[\d+\]: ?)"
    rb"|(?P<docker>" + _ISO + rb")|(?P<compose>[A-Za-z0-9][\w.-]{0,100} *\| ?)|(?P<kubectl>\[pod/[^\]\s]{1,300}\] )"
    rb"|(?P<ray>\((?:[^()\n]{1,100} )?pid=\d+(?:, ?ip=[\w.:]+)?\) ?)"
)
_CRI = re.compile(rb"(" + _TIME + rb") (stdout|stderr) ([PF])(?::\S*)?(?: |$)")
_REPEATED = re.compile(rb" \[repeated \d+x across (?:cluster|actors)\].*$")  # by Ray
_DOCKER_CUTS = 16_000  # bytes; it cuts at 16,384, or a little before so that no character is cut

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


@dataclass(frozen=True)
class Layer:
    """One text around lines. `remove` returns what is inside; nothing where a line does not have it."""

    key: tuple[object, ...]
    remove: Callable[[Line], list[Line]] = field(compare=False)
    sure: bool = field(compare=False, default=True)  # no sentence looks like it: one line is enough


Form: TypeAlias = tuple[Layer, ...]


def without(form: Form, line: Line) -> list[Line]:
    """Return a line, or the records in it, without these layers."""
    lines = [line]
    for layer in form:
        lines = [inner for line in lines for inner in layer.remove(line)]
    return lines


def form_of(text: bytes, layers: int = _LAYERS) -> Form | None:
    """Return the layers around a line; None where it has no stamp or words of SGLang's, or nothing that can be a layer."""
    head = _HEAD.search(text)
    if not layers or (head is None and b'MESSAGE":[' not in text):
        return None
    start = len(text) if head is None else head.start()
    if (second := _SECOND.match(text, start)) is not None:
        start = second.end()
    if start == 0:
        return ()
    value = _json_of(text)
    if value is not None or (form := _csv_form(text, start, layers)) is not None:
        return form if value is None else _field_form(value, _json_of, layers)
    layer: Layer | None = None
    inner: Form | None = ()
    brace, quoted = text.find(b"{", 0, start), re.search(rb'=(")\{\\"', text[:start])
    if brace > 0 and isinstance(value := _json_of(text[brace:]), dict):
        layer, inner = _text_layer(text[:brace]), _field_form(value, _json_of, layers)
    elif quoted is not None:
        layer, inner = _text_layer(text[: quoted.end(1)]), form_of(_unquoted(text[quoted.end(1) :], b'"'), layers - 1)
    elif head is not None:
        layer = _text_layer(text[:start], replaces=_STAMP.match(text, start) is None)
    return None if layer is None or inner is None else (layer, *inner)


# A text before a line: times, quoted fields, groups in brackets and words vary, all else is fixed.
_LABELS = rb"\{[\w.-]+ ?[=:] ?\"[^\"\n]*\"(?:, ?[\w.-]+ ?[=:] ?\"[^\"\n]*\")*\}"
_TOKENS: dict[str, bytes] = {
    "time": rb"(?<![\w.-])" + _TIME,
    "labels": _LABELS,
    "grep": rb"(?:[\w./+-]{1,200}[:-])?\d{1,9}[:-]",
    "quoted": rb"\"[^\"\n]*\"(?=[ ,:;=}\t])",
    "apostrophes": rb"'[^'\n]*'(?=[ ,:;=}\t])",
    "square": rb"\[[^\]\[\n]{0,120}\]",
    "round": rb"\([^()\n]{0,120}\)",
    "angle": rb"<[^<>\n]{0,60}>",
    "curly": rb"\{[\w./:=-]{0,80}\}",
    "rank": _RANK_WORD,
    "word": rb"[\w./@%+:#~*-]*\w[/@%+*-]*",
    "space": rb"[ \t]+",
    "other": rb"[^\w\n]",
}
# While a form is learned: grep's number ends the text, and a bracket around a time is not one token.
_ONLY_IF = {"grep": rb"(?=(?:[\w./+-]{1,200}[:-])?\d{1,9}[:-]\Z)", "square": rb"(?!\[" + _TIME + rb")"}
_TOKEN = re.compile(b"|".join(b"(?P<%b>%b%b)" % (n.encode(), _ONLY_IF.get(n, b""), p) for n, p in _TOKENS.items()))
_OF_REQUESTS = re.compile(
    rb"obj=|text=|ReqInput|Model attempted|\brid=|prompt|content|\"(?:obj|text|messages|input)\"|\\"
)
_ENDS = b" \t]:|>-\"';+`,(=\x1e\xbf\xa0\x8b"  # the last three end a byte order mark and spaces of Unicode's
_QUOTES = (b'"', b"'")
_STRUCTURE = ("labels", "square", "round", "angle", "grep")
_WORDS_AT_MOST, _WORDS_SURE = 24, 6
_VALUES = {b'"': re.compile(rb'(?:[^"\\]|\\.)*'), b"'": re.compile(rb"(?:[^'\\]|\\.|'')*")}


def _tokens_of(text: bytes) -> list[tuple[str, bytes]]:
    """Cut a text into tokens of known kinds; empty where it has quotation marks that are no field's."""
    tokens: list[tuple[str, bytes]] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or (match.lastgroup == "other" and match[0] in _QUOTES):
            return []
        tokens.append((match.lastgroup or "", match[0]))
        position = match.end()
    return tokens


def _text_layer(before: bytes, *, replaces: bool = False) -> Layer | None:
    """Learn the text before a line; None where it may be part of a request. `replaces`: it stands in place of SGLang's stamp."""
    if not before or len(before) > _LONGEST_BEFORE or before[-1] not in _ENDS or _OF_REQUESTS.search(before):
        return None
    quote = before[-1:] if before.endswith(_QUOTES) else b""
    rest = before.removesuffix(quote)
    tokens = _tokens_of(rest)
    kinds = [kind for kind, _ in tokens]
    words, timed = kinds.count("word"), "time" in kinds
    if (rest and not tokens) or words > _WORDS_AT_MOST:
        return None
    # Fixed are the last space, since the indentation of a traceback follows it, the name of a field, and all words that stand for a stamp
    # without a time. A rank that only some lines have is no part of the form.
    named = re.search(rb"[^\W\d]\w*(?:=|: )[\"']?\Z", before) is not None
    last_word = max((place for place, kind in enumerate(kinds) if kind == "word"), default=-1)
    fixed = {
        place for place, kind in enumerate(kinds) if kind == "other" or (kind == "word" and replaces and not timed)
    }
    fixed |= {len(kinds) - 1} if kinds[-1:] == ["space"] else set()
    fixed |= {last_word} if named else set()
    parts = [re.escape(text) if place in fixed else _TOKENS[kind] for place, (kind, text) in enumerate(tokens)]
    key = b"".join(part for part, kind in zip(parts, kinds, strict=True) if kind not in ("rank", "space"))
    if timed:
        parts[kinds.index("time")] = b"(?P<time>%b)" % _TIME
    pattern = re.compile(b"".join(parts) + (rb"[\"']" if quote else b""))

    def remove(line: Line) -> list[Line]:
        match = pattern.match(line.text, 0, 2 * _LONGEST_BEFORE)
        if match is None:
            return []
        before, rest = match[0], line.text[match.end() :]
        rest = _unquoted(rest, before[-1:]) if quote else rest
        rest = _REPEATED.sub(b"", rest) if b"pid=" in before else rest
        rest = rest.removesuffix(b"`") if before[-1:] == b"`" else rest
        time = time_of(match["time"]) if timed and line.time is None else line.time
        ranks = b" ".join(re.findall(_RANK_WORD, before))
        rank, around = rank_of(ranks) if ranks else line.rank, f"{line.around}, text before it"
        return [line._replace(text=rest, time=time, rank=rank, headed=replaces, around=around)]

    is_value = bool(quote) or rest.endswith(b"=") or b"{" in rest or b"}" in rest
    is_structured = words == 0 or rest.endswith(b":") or any(kind in kinds for kind in _STRUCTURE)
    sure = not is_value and words <= (_WORDS_SURE if timed else 2) and (timed or is_structured)
    return Layer((key, replaces, bool(quote)), remove, sure)


def _unquoted(rest: bytes, quote: bytes) -> bytes:
    """Read the value of a field up to its closing quotation mark."""
    match = _VALUES[quote].match(rest)
    value = rest if match is None else match[0]
    if quote == b"'":
        value = value.removesuffix(b"\\n").removesuffix(b"\\r")
        return value.replace(b"\\'", b"'").replace(b"''", b"'")
    loaded = _json_of(b'"' + value + b'"')
    return loaded.encode("utf-8", "replace") if isinstance(loaded, str) else value


# Fields of JSON and columns of CSV.
_TIME_FIELDS = ("timestamp", "time", "@timestamp", "ts", "asctime", "__REALTIME_TIMESTAMP", "datetime", "date")
_LEVEL_FIELDS = ("level", "levelname", "severity", "lvl", "log.level", "PRIORITY", "stream")
_REQUEST_FIELDS = ("obj", "prompt", "messages", "input")
_OFTEN_OF_REQUESTS = ("text", "out", "content", "body")  # of a shipper as well
_SHIPPERS_FIELDS = ("stringValue", "message", "line")  # inside a body or content that a shipper writes
_DEPTH, _LEAVES, _PLACES = 10, 256, 64  # an OpenTelemetry record is eight levels deep
_DELIMITER = re.compile(rb'"(?:[^"]|"")*"([,;\t|])|[^"\n]*?([,;\t|])"')
Parser: TypeAlias = Callable[[bytes], object]
Field: TypeAlias = tuple[
    str | int | None, ...
]  # the name of what holds it, None for a list or nothing, and its own; (): the whole value


def _json_of(text: bytes) -> object:
    """Read a line that is an object, a list or a string of JSON; None for any other."""
    if text[:1] not in (b"{", b"[", b'"'):
        return None
    try:
        return json.loads(text.rstrip().removesuffix(b","))
    except (ValueError, RecursionError):
        return None


def _leaves(value: object) -> Iterator[tuple[tuple[str | int, ...], object]]:
    """Return texts and numbers with their places, those nearest to the root first."""
    level: list[tuple[tuple[str | int, ...], object]] = [((), value)]
    for _ in range(_DEPTH):
        below: list[tuple[tuple[str | int, ...], object]] = []
        for path, found in level:
            if isinstance(found, dict):
                below += [((*path, name), inner) for name, inner in found.items()]
            elif isinstance(found, list) and _text_of(found) is None:
                below += [((*path, place), inner) for place, inner in enumerate(found[:_PLACES])]
            else:
                yield path, found
        level = below[:_LEAVES]


def _texts(
    value: object, field: Field, holder: str | None = None, depth: int = _DEPTH
) -> Iterator[tuple[bytes, object]]:
    """Return the texts in a field, in as many records as there are, each with what holds it."""
    if not field and (text := _text_of(value)) is not None:
        yield text, value
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        text = _text_of(inner)
        if text is not None and field == (holder, key):
            yield text, value
        elif depth and text is None and isinstance(inner, (dict, list)):
            yield from _texts(inner, field, key if isinstance(key, str) else None, depth - 1)


def _text_of(value: object) -> bytes | None:
    """Read a text, or the list of bytes that journald writes for one."""
    if isinstance(value, str):
        return without_terminal(value.encode("utf-8", "replace"))
    if isinstance(value, list) and len(value) > 6 and all(isinstance(byte, int) for byte in value):
        return bytes(byte & 255 for byte in value)
    return None


def _field_form(value: object, parse: Parser, layers: int, kind: tuple[object, ...] = ("JSON",)) -> Form | None:
    """Find the field with SGLang's line in what `parse` read."""
    if isinstance(value, dict) and str(value.get("event", "")).startswith("request."):
        return None  # SGLang's own log of requests as JSON
    leaves = list(_leaves(value))
    for path, leaf in leaves:
        text, name = _text_of(leaf), path[-1] if path else None
        of_requests = name not in _SHIPPERS_FIELDS and any(
            each in _REQUEST_FIELDS + _OFTEN_OF_REQUESTS for each in path[:-1]
        )
        if text is None or name in _REQUEST_FIELDS or of_requests:
            continue
        inner = form_of(text.split(b"\n", 1)[0], layers - 1)
        if inner is not None:
            dated = any(_json_time(other) is not None or at[-1] in _LEVEL_FIELDS for at, other in leaves if at != path)
            sure = name is None or ((dated or kind != ("JSON",)) and name not in _OFTEN_OF_REQUESTS)
            holder = path[-2] if len(path) > 1 and isinstance(path[-2], str) else None
            return _field_layer(parse, (holder, name) if path else (), kind, sure=sure), *inner
    return None


def _field_layer(parse: Parser, field: Field, kind: tuple[object, ...], *, sure: bool) -> Layer:
    def remove(line: Line) -> list[Line]:
        value, lines = parse(line.text), []
        for text, scope in islice(_texts(value, field), _RECORDS):
            first, *more = text.rstrip(b"\r\n").split(b"\n")[:200]
            time = line.time
            if time is None and _STAMP.match(first) is None:
                time = _time_in(scope, value)
            lines.append(line._replace(text=first, time=time, more=tuple(more), around=f"{line.around}, {kind[0]}"))
        return lines

    return Layer((*kind, field), remove, sure)


def _json_time(value: object) -> float | None:
    """Read a time with a date; without one it may as well be a duration."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    time = time_of(str(value).encode("utf-8", "replace"))
    return time if time is not None and time >= FIRST_DATED else None


def _time_in(*scopes: object) -> float | None:
    """Return the time of a record: of the field most often used for it, in the innermost object that has one."""
    for scope in scopes:
        found = ((path[-1] if path else "", _json_time(value)) for path, value in _leaves(scope))
        times = {name: time for name, time in found if time is not None}
        if times:
            return next((times[name] for name in _TIME_FIELDS if name in times), next(iter(times.values())))
    return None


def _csv_form(text: bytes, start: int, layers: int) -> Form | None:
    match = _DELIMITER.match(text, 0, len(text) if text[:1] == b'"' else start + 1)
    delimiter = text[start - 1 : start] if match is None else match[1] or match[2]
    # Without quotation marks: a comma of SGLang's has a space behind it, and SGLang prints no tabs.
    rest = text[start:]
    if match is None and not (delimiter == b"," and b", " not in rest) and not (delimiter == b"\t" and b"\t" in rest):
        return None
    row = _row_of(text, delimiter.decode())

    def parse(text: bytes) -> object:
        found = _row_of(text, delimiter.decode())
        return found if len(found) == len(row) else None

    return _field_form(row, parse, layers, ("CSV", delimiter, len(row))) if len(row) > 1 else None


def _row_of(text: bytes, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([text.decode("utf-8", "replace")], delimiter=delimiter), [])
    except csv.Error:
        return []


class Wrapping:
    """The text around the lines of one stream."""

    def __init__(self) -> None:
        self.waits = "other"  # where a line gives nothing yet: `cut` by a container runtime, or `other` in a form that is not accepted
        self.unread = b""  # the first line, cut, with words of SGLang's in a form that was not accepted
        self._forms: list[Form] = []
        self._current: Form | None = None  # of the last line of SGLang's
        self.is_bare_now = False  # the last line of SGLang's had nothing around it
        self._proven: set[Form] = set()  # had SGLang's words directly behind them; (): nothing around
        self._brackets = False  # a form begins with a time in brackets, as SGLang's stamp
        self._runtimes: set[str] = set()  # seen around a line of SGLang's
        self._held: dict[Form, list[Line]] = {}  # lines in forms that are not accepted yet
        self._cut: dict[str, bytes] = {}  # the parts so far of lines that a container runtime cut

    def lines(self, raw: bytes, *, open_text: bool = False) -> list[Line]:
        """Return the lines in a physical line: usually one; none while a line is cut or held, several when held ones are released.

        `open_text`: a traceback is open, so text before a stamp is the exception's.
        """
        text = without_terminal(raw.lstrip(b"\x00")[:LONGEST])
        if text[:1] == b" " and _STAMP.match(pasted := text.lstrip(b" ")):
            text = pasted  # with blanks before the line
        line = Line(text)
        for _ in range(_LAYERS):
            inner = self._without_runtime(line)
            if inner is None:
                break
            if inner.partial:
                self.waits = "cut"
                return []
            line = inner._replace(text=without_terminal(inner.text))
        return self._inner(line, open_text=open_text)

    def begin_file(self) -> None:
        """Forget the first part of a line whose rest was in a file that is gone."""
        self._cut.clear()

    def _without_runtime(self, line: Line) -> Line | None:
        text = line.text
        if (cri := _CRI.match(text)) is not None:
            time = time_of(cri[1]) if line.time is None else line.time
            stream, partial = "cri " + cri[2].decode(), cri[3] == b"P"
            return self._joined(
                line._replace(text=text[cri.end() :], time=time, around=line.around + ", CRI"), stream, partial=partial
            )
        if text[:1] == b"{" and b'"stream"' in text and b'"log"' in text and isinstance(entry := _json_of(text), dict):
            log, output = entry.get("log"), entry.get("stream")
            if isinstance(log, str) and isinstance(output, str):
                inner = log.encode("utf-8", "replace")
                first, *more = inner.rstrip(b"\r\n").split(b"\n")[:200]
                partial = not inner.endswith(b"\n") and len(inner) >= _DOCKER_CUTS
                time = _time_in(entry) if line.time is None and _STAMP.match(first) is None else line.time
                whole = line._replace(
                    text=first, time=time, more=tuple(more), around=line.around + ", container's JSON"
                )
                return self._joined(whole, "docker " + output[:20], partial=partial)
        match = _RUNTIMES.match(text)
        if match is None or match.lastgroup is None:
            return None
        rest = text[match.end() :]
        name = match.lastgroup
        if (_GLUED.match(rest) or _FRAME.match(rest)) and not (name == "docker" and _SECOND.match(rest)):
            self._runtimes.add(name)
        elif (name not in self._runtimes and not (_RUNTIMES.match(rest) or _CRI.match(rest))) or any(
            without(form, line) for form in self._forms
        ):
            return None
        time = time_of(match[0]) if line.time is None else line.time
        if name == "ray":
            rest = _REPEATED.sub(b"", rest)
        return line._replace(text=rest, time=time, around=f"{line.around}, {name}")

    def _joined(self, line: Line, stream: str, *, partial: bool) -> Line:
        """Join the parts of a line."""
        begun = self._cut.pop(stream, b"")
        if begun and len(self._cut) < _HELD_FORMS:
            line = line._replace(text=(begun + line.text)[:LONGEST])
        if partial:
            self._cut[stream] = line.text
        return line._replace(partial=partial)

    def _inner(self, line: Line, *, open_text: bool) -> list[Line]:
        """Return what is in a line without the text of container runtimes."""
        ways = (self._bare, self._in_known_form, self._behind_bar, self._in_new_form, self._behind_words)
        for way in (self._bare, self._in_known_form, self._in_new_form) if open_text else ways:
            lines = way(line)
            if lines is not None:
                return lines
        return [line]

    def _bare(self, line: Line) -> list[Line] | None:
        if not _STAMP.match(line.text) or (not self.is_bare and (self._brackets or _SECOND.match(line.text))):
            return None
        self._accept((), [line])
        return [line]

    def _in_known_form(self, line: Line) -> list[Line] | None:
        for form in [self._current, *self._forms] if self._current else self._forms:
            found = without(form, line)
            stamped = any(_STAMP.match(each.text) or each.headed for each in found)
            if not found or (not stamped and form is not self._current):
                continue
            if form not in self._proven and any(_SECOND.match(each.text) for each in found):
                continue  # more stands before SGLang's words
            if form is self._current or any(_STAMP.match(each.text) or WORDS.match(each.text) for each in found):
                if stamped:
                    self._accept(form, found)
                return found
        return None

    def _behind_bar(self, line: Line) -> list[Line] | None:
        """Return what a progress bar without a newline stands before."""
        before, carriage_return, rest = line.text.rpartition(b"\r")
        if carriage_return and all(not part.strip() or _BAR.match(part) for part in before.split(b"\r")):
            return self._inner(line._replace(text=rest), open_text=False)
        glued = _GLUED.search(line.text, 1, _GLUED_WITHIN)
        if glued is None or not _BAR.match(line.text[: glued.start()]):
            return None
        return [line._replace(text=line.text[glued.start() :])]

    def _in_new_form(self, line: Line) -> list[Line] | None:
        form = form_of(line.text)
        if not form:
            return None
        found = without(form, line)
        return self._learn(form, found, line.text) if found and not (self.is_bare and _STAMP.match(line.text)) else None

    def _behind_words(self, line: Line) -> list[Line] | None:
        """Return a line directly behind words of another program, such as an address, without a newline."""
        glued = _GLUED.search(line.text, 1, _GLUED_WITHIN)
        before = b"" if glued is None else line.text[: glued.start()]
        if not before[-1:].isalnum() or _QUOTING.search(before):
            return None
        return [line._replace(text=line.text[len(before) :], glued=True)]

    @property
    def is_bare(self) -> bool:
        """Whether SGLang's lines came without any text around them."""
        return () in self._proven

    def is_usual(self) -> None:
        """Note a usual line of SGLang's without any text around it."""
        self._proven.add(())
        self._current, self.is_bare_now = None, True
        self._held.clear()

    def _accept(self, form: Form, found: list[Line]) -> None:
        """Note a line with SGLang's stamp, or the text that replaces it, in this form."""
        for line in found:
            stamp = _STAMP.match(line.text)
            if WORDS.match(line.text, stamp.end() if stamp else 0) is not None:
                self._proven.add(form)
        if form or self.is_bare:
            self._current, self.is_bare_now = form or None, not form
        if form in self._proven:
            self._held.clear()

    def _learn(self, form: Form, found: list[Line], text: bytes) -> list[Line]:
        """Accept a form, or hold its lines."""
        known = bool(self._proven or self._runtimes)
        sure = all(layer.sure for layer in form) and not (_SECOND.match(text) and _STAMP.match(found[0].text))
        enough = 1 if form in self._forms or (sure and not known) else _ENOUGH_MORE if known else _ENOUGH
        held = self._held.setdefault(form, [])
        held += found
        if len(held) < enough:
            self.unread = self.unread or text[:_LONGEST_BEFORE]
            if len(self._held) > _HELD_FORMS or sum(len(each.text) for each in held) > _HELD_LENGTH * _ENOUGH_MORE:
                self._held.clear()
            self.waits, self.is_bare_now = "other", False
            return []
        self._forms = [form, *self._forms[: _FORMS_KEPT - 1]]
        self._brackets = self._brackets or _STAMP.match(text) is not None
        self._accept(form, held)
        return held
