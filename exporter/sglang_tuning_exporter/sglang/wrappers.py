"""What other programs put around a server's log line: container runtimes, journald, compose, Ray, terminals, bars.

Each line is recognised by itself, without configuration. Only what stands at the start of a physical line is taken for
a wrapper, never what stands inside one: a request's text could hold anything.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from sglang_tuning_exporter.sglang.prefix import clock_seconds, day_seconds, zone_seconds
from sglang_tuning_exporter.sglang.stamps import stamp_seconds

LONGEST_LINE = 262_144  # bytes read of one line; the longest line that matters, `server_args=`, is about 20 kB
_LAYERS = 4  # for example container runtime, compose, Ray

_ISO = rb"(\d{4}-\d\d-\d\d)T(\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)"
_CRI = re.compile(_ISO + rb" (stdout|stderr) ([PF])(?::\S*)?(?: |$)")
_STAMPED = re.compile(_ISO + rb" ")  # docker logs --timestamps, kubectl logs --timestamps
_ISO_TIME = re.compile(_ISO)
_JOURNALD = re.compile(
    rb"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)? [^\s:\[]{1,255} [^\s:\[\]]{1,100}(?:\[\d+\])?: ?"
)
_JOURNALD_ISO = re.compile(_ISO + rb" [^\s:]{1,255} [^\s:\[\]]{1,100}\[\d+\]: ?")
_COMPOSE = re.compile(rb"[A-Za-z0-9][\w.-]{0,100} *\| ?")
_KUBECTL = re.compile(rb"\[pod/[^\]\s]{1,300}\] ")
_RAY = re.compile(rb"\((?:[^()\n]{1,100} )?pid=\d+(?:, ?ip=[\w.:]+)?\) ?")
_RAY_REPEATED = re.compile(rb" \[repeated \d+x across (?:cluster|actors)\].*$")
_DOCKER = (b'{"log"', b'{ "log"', b'{"stream"', b'{"time":')
_DOCKER_CUTS = 16_000  # bytes; it cuts at 16,384, a little before where a character would be cut
_JSON = re.compile(rb"\{ ?\"")
_MESSAGES = ("message", "msg")
_TIMES = ("timestamp", "time", "asctime", "ts", "@timestamp", "datetime")
_LEVELS = ("level", "levelname", "severity", "lvl", "log.level")
_JSON_TIME = re.compile(rb"(\d{4}-\d\d-\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")
_MILLISECONDS_ABOVE = 1e11  # a number of seconds so large would be in the year 5138
_LINES_OF_MESSAGE = 200
_TIMED = (_CRI, _STAMPED, _JOURNALD_ISO)
_ANSI = re.compile(rb"\x1b\[[0-9;:?]*[A-Za-z]|\x1b\([A-Z0-9]|\x1b[=>78]")

# What a program printed without an end of line, with SGLang's line glued behind it: a progress bar or a sentence, but
# nothing that could quote a request.
_GLUED = re.compile(rb"\[20\d\d-[01]\d-[0-3]\d [0-2]\d:[0-5]\d:[0-5]\d")
_GLUE_AT_MOST = 600
_QUOTING = re.compile(rb"[\"'{}\\]|obj=|text=|ReqInput|Model attempted|rid=|prompt")
_WHOLE_BAR = re.compile(
    rb"\s*(?:[A-Z][\w /-]{0,60}(?:\([^()\n]{0,80}\))?: *)?\d{1,3}%\|[^|\n]{0,200}\|[^\"'{}\\\n]{0,120}"
)
_BAR = re.compile(rb"\d+%\||it/s|s/it|\?it\]")


class Unwrapped(NamedTuple):
    """A line without its wrappers."""

    text: bytes
    time: float | None  # the wrapper's own, unix seconds
    stream: str | None = None  # of a container
    partial: bool = False  # the stream's next line continues this one
    more: tuple[bytes, ...] = ()  # further lines of one message: a traceback's


def _iso_seconds(match: re.Match[bytes], group: int = 1) -> float | None:
    day = day_seconds(match[group])
    if day is None:
        return None
    clock = clock_seconds(match[group + 1], match[group + 2], match[group + 3], match[group + 4])
    return day + clock - zone_seconds(match[group + 5])


def _unwrap_docker(line: bytes) -> Unwrapped | None:
    """Read a line of Docker's json-file or of a shipper's that took off the end of line; Docker cuts a line at 16 kB."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("log"), str) or "time" not in entry:
        return None
    text = entry["log"].encode("utf-8", "replace")
    when = entry.get("time")
    stamp = _ISO_TIME.match(when.encode("utf-8", "replace")) if isinstance(when, str) else None
    cut = not text.endswith(b"\n") and len(text) >= _DOCKER_CUTS
    return Unwrapped(
        strip_terminal(text.split(b"\n", 1)[0]),
        _iso_seconds(stamp) if stamp else None,
        str(entry.get("stream", "")),
        partial=cut,
    )


def _unwrap_json(line: bytes) -> Unwrapped | None:
    """Read a line of a structured logger: an object with a message and a time or a level, and not a request's log."""
    if _JSON.match(line) is None or not any(b'"%b"' % key.encode() in line for key in _MESSAGES):
        return None
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    message = next((entry[key] for key in _MESSAGES if isinstance(entry.get(key), str)), None)
    when = next((entry[key] for key in _TIMES if key in entry), None)
    if message is None or (when is None and not any(key in entry for key in _LEVELS)):
        return None
    if str(entry.get("event", "")).startswith("request."):
        return None
    first, *more = message.encode("utf-8", "replace").split(b"\n")[:_LINES_OF_MESSAGE]
    return Unwrapped(strip_terminal(first), _json_seconds(when), more=tuple(more))


def _json_seconds(when: object) -> float | None:
    if isinstance(when, (int, float)) and not isinstance(when, bool) and 0 < when < _MILLISECONDS_ABOVE * 1000:
        return when / 1000 if when > _MILLISECONDS_ABOVE else float(when)
    match = _JSON_TIME.match(when.encode("utf-8", "replace")) if isinstance(when, str) else None
    return None if match is None else _iso_seconds(match)


def strip_terminal(line: bytes) -> bytes:
    """Take off colour codes, the carriage return at the end, and NUL bytes or a byte order mark at the start."""
    line = line.rstrip(b"\r")
    if b"\x1b" in line:
        line = _ANSI.sub(b"", line)
    if line[:1] in (b"\x00", b"\xef"):
        line = line.lstrip(b"\x00").removeprefix(b"\xef\xbb\xbf")
    return line


def _match_wrapper(text: bytes) -> re.Match[bytes] | None:
    """Match what wraps a line without changing it: the message is what follows the match."""
    first = text[:1]
    if first.isdigit():
        return _CRI.match(text) or _JOURNALD_ISO.match(text) or _STAMPED.match(text) or _COMPOSE.match(text)
    if first == b"(":
        return _RAY.match(text)
    if first == b"[":
        return _KUBECTL.match(text)
    return _JOURNALD.match(text) or _COMPOSE.match(text) if first.isalpha() else None


def unwrap(line: bytes) -> Unwrapped:
    """Take the wrappers off one physical line, however they are nested."""
    found = Unwrapped(strip_terminal(line), None)
    if found.text.startswith(_DOCKER):
        found = _unwrap_docker(found.text) or found
    for _ in range(_LAYERS):
        text, time, stream, partial, _ = found
        match = _match_wrapper(text)
        if match is None:
            break
        rest = text[match.end() :]
        if match.re in _TIMED:
            time = _iso_seconds(match) if time is None else time
        elif match.re is _JOURNALD:
            time = stamp_seconds(text) if time is None else time
        if match.re is _CRI and stream is None:
            stream, partial = match[7].decode(), match[8] == b"P"
        elif match.re is _RAY:
            rest = _RAY_REPEATED.sub(b"", rest)
        found = Unwrapped(strip_terminal(rest), time, stream, partial=partial)
    if found.text[:1] == b"{" and not found.partial and (inner := _unwrap_json(found.text)) is not None:
        time = inner.time if inner.time is not None else found.time
        found = inner._replace(time=time, stream=found.stream)
    return found


def after_last_return(text: bytes, *, strict: bool = False) -> bytes:
    """Keep what a terminal would still show: what follows the last carriage return.

    `strict`: only behind progress bars, since any other text could be somebody's words.
    """
    before, found, rest = text.rpartition(b"\r")
    if not found or (strict and not all(_is_bar(part) for part in before.split(b"\r"))):
        return text
    return rest


def glued_line(text: bytes, *, strict: bool = False) -> int:
    """Find where SGLang's line starts that is glued behind a text without an end of line; 0 where none is.

    `strict`: only behind progress bars.
    """
    match = _GLUED.search(text, 1, _GLUE_AT_MOST)
    if match is None:
        return 0
    start = match.start()
    before = text[:start]
    if strict and not _is_bar(before):
        return 0
    if _QUOTING.search(before) or (before[-1:].isspace() and not _BAR.search(before)):
        return 0
    return start


def _is_bar(text: bytes) -> bool:
    return not text.strip() or _WHOLE_BAR.match(text) is not None
