"""What a log's reader remembers at the end of a line, so that another reader can go on from there.

The readers of two processes take turns with one log (`report.ahead`). Everything that a reader keeps is handed over
unless it is named here: an attribute that is added later is handed over, and compared, without a change in this file.
"""

from __future__ import annotations

import pickle
import re
from math import isnan, nan
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from sglang_tuning_exporter.sglang.lines import LogReader

Mark: TypeAlias = object  # what is remembered, as values that can be compared

_QUICK = {"_usual"}  # only makes it quick
_COUNTED = {"counts", "unrecognised", "suspicious"}
_PASSING = {"_line", "_last_time"}  # differs from line to line
_LINES_AFTER_HEAD = 4  # at least as many as `failure_lines` looks back to the line that announced a traceback


def mark_of(reader: LogReader) -> Mark | None:
    """Give what the meaning of the next line depends on, beside the time last printed; `None` amid something.

    Amid a traceback, a line that was cut, or the words of others, and where times have no date, each line
    depends on the one before.
    """
    kept = vars(reader)
    failures, suspicion = vars(kept["_failures"]), kept["_suspicion"]
    if kept["_surroundings"].joins or kept["_clock"] is not None or suspicion.active:
        return None
    line = kept["_line"] + 1
    tracebacks = failures["_open"], failures["_closed"]
    if any(traceback is not None and line <= traceback.expires for traceback in tracebacks):
        return None
    announced = failures["_announced"]
    if announced is not None and line - announced[0] <= _LINES_AFTER_HEAD:
        return None
    # What is left of failures long ago: whether there was one.
    past = {"_open", "_announced", "_closed"}
    rest = {name: value for name, value in failures.items() if name not in past}
    apart = {"_failures", "_suspicion", *_QUICK, *_COUNTED, *_PASSING}
    return (
        failures["_closed"] is not None,
        _plain(rest),
        _plain({name: value for name, value in kept.items() if name not in apart}),
    )


def _plain(value: Any) -> Any:
    """Give an object as what it is made of."""
    if isinstance(value, dict):
        return tuple((_plain(key), _plain(inner)) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, re.Pattern):
        return value.pattern, value.flags
    if hasattr(value, "__dict__"):
        passing = getattr(type(value), "PASSING", ())
        return type(value), _plain({name: inner for name, inner in vars(value).items() if name not in passing})
    return value


def packed(reader: LogReader) -> bytes:
    """Give what the reader remembers, for `unpack` in another process of ours."""
    return pickle.dumps({name: value for name, value in vars(reader).items() if name not in _QUICK | _COUNTED})


def unpack(reader: LogReader, remembered: bytes) -> None:
    """Let the reader go on from what another one remembered; what it has counted stays."""
    known = pickle.loads(remembered)  # noqa: S301 - another process of ours has packed it
    counts = reader.suspicious
    vars(reader).update(known)
    vars(known["_suspicion"])["counts"] = counts


def begin_untimed(reader: LogReader) -> None:
    """Let the reader begin a part of a log without knowing what time was printed last before it."""
    vars(reader)["_last_time"] = nan


def time_printed(reader: LogReader) -> float | None:
    """Give the time last printed; None where none was since `begin_untimed`."""
    time: float | None = vars(reader)["_last_time"]
    return None if time is None or isnan(time) else time


def place_of(reader: LogReader) -> int:
    """Give how many lines the reader has come through."""
    line: int = vars(reader)["_line"]
    return line


def needs_time(reader: LogReader, events: list[Any]) -> bool:
    """Say whether what was read since `begin_untimed` depends on the time that is not known."""
    if any(event.time is not None and isnan(event.time) for event in events):
        return True
    return _holds_nan({name: value for name, value in vars(reader).items() if name not in _QUICK | _PASSING})


def _holds_nan(value: Any) -> bool:
    if isinstance(value, float):
        return isnan(value)
    if isinstance(value, dict):
        return any(_holds_nan(inner) for pair in value.items() for inner in pair)
    if isinstance(value, (list, tuple)):
        return any(map(_holds_nan, value))
    if hasattr(value, "__dict__"):
        return _holds_nan(vars(value))
    return any(_holds_nan(getattr(value, name, None)) for name in getattr(type(value), "__slots__", ()))


def follow(reader: LogReader, lines: int, printed: float | None) -> None:
    """Go on behind so many lines that another reader has read, of which the last time printed is given."""
    kept = vars(reader)
    kept["_line"] += lines
    kept["_last_time"] = kept["_last_time"] if printed is None else printed
