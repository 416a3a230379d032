"""Traces of terminals and progress bars in a log, and the line starts of container runtimes."""

from __future__ import annotations

import re

LONGEST_LINE = 262_144  # bytes read of one line; the longest line that matters, `server_args=`, is about 20 kB

_ISO = rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d) "
_WELL_KNOWN = re.compile(
    rb"(?:"
    + _ISO
    + rb"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)? )[^\s:\[]{1,255} [^\s:\[\]]{1,100}(?:\[\d+\])?: ?"  # journald
    rb"|" + _ISO + rb"(?:(?:stdout|stderr) [PF](?::\S*)? )?"  # docker logs --timestamps, Kubernetes
    rb"|[A-Za-z0-9][\w.-]{0,100} *\| ?"  # compose
    rb"|\[pod/[^\]\s]{1,300}\] |\((?:[^()\n]{1,100} )?pid=\d+(?:, ?ip=[\w.:]+)?\) ?"  # kubectl, Ray
)
_WELL_KNOWN_JSON = re.compile(rb"\{[^\n]{0,4096}\"(?:log|message|msg)\" ?:")  # Docker, structured loggers
_ANSI = re.compile(rb"\x1b\[[0-9;:?]*[A-Za-z]|\x1b\([A-Z0-9]|\x1b[=>78]|\x1b[\]_P^][^\x07\x1b\n]{0,300}(?:\x07|\x1b\\)")

# Text without a newline before SGLang's line: a progress bar or a sentence, but nothing that could quote a request.
_GLUED = re.compile(rb"\[20\d\d-[01]\d-[0-3]\d [0-2]\d:[0-5]\d:[0-5]\d")
_GLUE_AT_MOST = 600
_SEPARATORS = (b";", b",", b"`", b"+")  # of columns and pastes
_QUOTING = re.compile(rb"[\"'{}\\]|obj=|text=|ReqInput|Model attempted|rid=|prompt")
_WHOLE_BAR = re.compile(
    rb"\s*(?:[A-Z][\w /-]{0,60}(?:\([^()\n]{0,80}\))?: *)?\d{1,3}%\|[^|\n]{0,200}\|[^\"'{}\\\n]{0,120}"
)
_BAR = re.compile(rb"\d+%\||it/s|s/it|\?it\]")


def strip_terminal(line: bytes) -> bytes:
    """Return a line without colour codes, carriage returns at both ends, and NUL bytes or a byte order mark at the start."""
    line = line.strip(b"\r")
    if b"\x1b" in line:
        line = _ANSI.sub(b"", line)
    if line[:1] in (b"\x00", b"\xef"):
        line = line.lstrip(b"\x00").removeprefix(b"\xef\xbb\xbf")
    return line


def strip_colours(text: bytes) -> bytes:
    """Return a text without colour codes."""
    return _ANSI.sub(b"", text)


def well_known(text: bytes) -> int:
    """Return the length of a well-known wrapping of runtimes and log followers, which needs no confirmation."""
    end = 0
    while (match := _WELL_KNOWN.match(text, end)) is not None:
        end = match.end()
    return end


def is_well_known_json(text: bytes) -> bool:
    """Whether it is a JSON object as Docker and structured loggers write."""
    return _WELL_KNOWN_JSON.match(text) is not None


def after_last_return(text: bytes, *, strict: bool = False) -> bytes:
    """Return what a terminal would still show: the text after the last carriage return.

    `strict`: only after progress bars, since any other text could be raw.
    """
    before, found, rest = text.rpartition(b"\r")
    if not found or (strict and not all(_is_bar(part) for part in before.split(b"\r"))):
        return text
    return rest


def line_after_text(text: bytes, *, strict: bool = False) -> int:
    """Return where SGLang's line starts after a text without a newline; 0 where there is none.

    `strict`: only after progress bars.
    """
    match = _GLUED.search(text, 1, _GLUE_AT_MOST)
    if match is None:
        return 0
    start = match.start()
    before = text[:start]
    if before.endswith(_SEPARATORS) or (strict and not _is_bar(before)):
        return 0
    if _QUOTING.search(before) or (before[-1:].isspace() and not _BAR.search(before)):
        return 0
    return start


def _is_bar(text: bytes) -> bool:
    return not text.strip() or _WHOLE_BAR.match(text) is not None
