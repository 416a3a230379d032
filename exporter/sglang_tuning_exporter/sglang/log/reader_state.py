"""What a log's reader remembers at the end of a line, so that another reader can go on from there.

The readers of two processes take turns with one log (`report.ahead`). Everything that a reader keeps is handed over
unless it is named here: an attribute that is added later is handed over, and compared, without a change in this file.
"""

# ruff: noqa: SLF001 - it belongs to the reader, and stands apart because only reports ask for it

from __future__ import annotations

import pickle  # nosec B403 # what our own processes tell each other
import re
from math import isnan, nan
from typing import TYPE_CHECKING, Any, TypeAlias

from sglang_tuning_exporter.sglang.log.raw_text import RawLine

if TYPE_CHECKING:
    from sglang_tuning_exporter.sglang.log.reader import LogReader

Words: TypeAlias = tuple[int | None, float | None]  # how many lines before, if they are still near, and their time
Asked: TypeAlias = tuple[int, float | None]  # a line and its time
Mark: TypeAlias = object  # what is remembered, as values that can be compared

_QUICK = {"_usual", "_prefixes"}  # only makes it quick
_COUNTED = {"counts", "unrecognised", "suspicious"}
_PASSING = {"_line", "_last_time"}  # differs from line to line
_ASKED_AT_MOST = 256  # more than a server retracts before it prints anything else
_LINES_AFTER_HEAD = 4  # at least as many as `failure_lines` looks back to the line that announced a traceback


def mark_of(reader: LogReader) -> Mark | None:
    """Give what the meaning of the next line depends on, beside the time last printed; `None` amid something.

    Amid a traceback, a line that was cut, or the words of others, and where times have no date, each line
    depends on the one before. So it does in a log that is followed.
    """
    failures = reader._failures
    if reader._strict or reader._surroundings.joins or reader._clock is not None or reader._suspicion.active:
        return None
    line = reader._line + 1
    if any(traceback is not None and line <= traceback.expires for traceback in (failures._open, failures._closed)):
        return None
    if failures._announced is not None and line - failures._announced[0] <= _LINES_AFTER_HEAD:
        return None
    # What is left of failures long ago: whether there was one.
    rest = _without(failures, {"_open", "_began", "_announced", "_closed"})
    apart = {"_failures", "_suspicion", *_QUICK, *_COUNTED, *_PASSING}
    return failures._closed is not None, _plain(rest), _plain(_without(reader, apart))


def _without(kept: object, names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in vars(kept).items() if name not in names}


def _plain(value: Any) -> Any:
    """Give an object as what it is made of."""
    if isinstance(value, dict):
        return tuple((_plain(key), _plain(inner)) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if isinstance(value, re.Pattern):
        return value.pattern, value.flags
    parts = _parts(value)
    return value if parts is None else (type(value), _plain(parts))


def _parts(value: Any) -> dict[str, Any] | None:
    """Give the attributes of an object, but for those that its class calls `PASSING`; None of a plain value."""
    if hasattr(value, "__dict__"):
        return _without(value, getattr(type(value), "PASSING", set()))
    names = getattr(type(value), "__slots__", ())
    return {name: getattr(value, name) for name in names} if names else None


def packed(reader: LogReader) -> bytes:
    """Give what the reader remembers, for `unpack` in another process of ours."""
    return pickle.dumps(_without(reader, _QUICK | _COUNTED))


def unpack(reader: LogReader, remembered: bytes) -> None:
    """Let the reader go on from what another one remembered; what it has counted stays, and where words of others stood."""
    counts, words, line = reader.suspicious, reader._suspicion._words, reader._line
    vars(reader).update(pickle.loads(remembered))  # noqa: S301 # nosec B301 # from a process of ours, over a socket pair that nobody else has
    reader._suspicion.counts, reader._suspicion._words = counts, words
    if words.line is not None:
        words.line += reader._line - line


class _NotKnown(RawLine):
    """Words of others that may have stood before what is read: taken as far away, and what was asked about them is kept."""

    __slots__ = ("asked", "known")

    def __init__(self) -> None:
        super().__init__()
        self.known = False
        self.asked: list[Asked] = []

    def put(self, line: int, time: float | None, arrived: float | None) -> None:
        self.known = True
        super().put(line, time, arrived)

    def is_near(self, line: int, time: float | None, arrived: float | None) -> bool:
        if not self.known and len(self.asked) < _ASKED_AT_MOST:
            self.asked.append((line, time))
        return super().is_near(line, time, arrived)


def begin_unknown(reader: LogReader) -> None:
    """Let the reader begin a block without knowing what time was printed last before it, and where words of others stood."""
    reader._last_time = nan
    reader._suspicion._words = _NotKnown()


def time_printed(reader: LogReader) -> float | None:
    """Give the time last printed; None where none was since `begin_unknown`."""
    time = reader._last_time
    return None if time is None or isnan(time) else time


def words_near(reader: LogReader) -> Words | None:
    """Give where words of others stood last, in lines from the end, and their time; None where none did since `begin_unknown`."""
    words = reader._suspicion._words
    if words.line is None:
        return (None, None) if isinstance(words, _NotKnown) and words.known else None
    return reader._line - words.line, words.time


def place_of(reader: LogReader) -> int:
    """Give how many lines the reader has come through."""
    return reader._line


def asked_of(reader: LogReader, begin: int) -> list[Asked]:
    """Give the lines, counted from the `begin`-th, that words of others before that one could have made suspect."""
    words = reader._suspicion._words
    return [(line - begin, time) for line, time in words.asked] if isinstance(words, _NotKnown) else []


def has_words_near(reader: LogReader, asked: list[Asked]) -> bool:
    """Say whether words of others, where this reader is, make any of those lines suspect."""
    words, line = reader._suspicion._words, reader._line
    return len(asked) >= _ASKED_AT_MOST or any(words.is_near(line + place, time, None) for place, time in asked)


def needs_more(reader: LogReader, events: list[Any]) -> bool:
    """Say whether what was read since `begin_unknown` depends on the time that is not known."""
    if any(event.time is not None and isnan(event.time) for event in events):
        return True
    return _holds_nan(_without(reader, _QUICK | _PASSING))


def _holds_nan(value: Any) -> bool:
    if isinstance(value, float):
        return isnan(value)
    if isinstance(value, dict):
        return any(_holds_nan(inner) for pair in value.items() for inner in pair)
    if isinstance(value, (list, tuple)):
        return any(map(_holds_nan, value))
    parts = _parts(value)
    return parts is not None and _holds_nan(parts)


def follow(reader: LogReader, lines: int, printed: float | None, words: Words | None) -> None:
    """Go on behind so many lines that another reader has read, with the last time printed and the last words of others in them."""
    reader._line += lines
    reader._last_time = reader._last_time if printed is None else printed
    if words is not None:
        mark = reader._suspicion._words
        mark.line, mark.time = None if words[0] is None else reader._line - words[0], words[1]
