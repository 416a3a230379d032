"""The time axis of a report's charts: round times and their labels. Pure."""

from __future__ import annotations

import datetime as dt
from math import ceil, floor

from sglang_tuning_exporter.sglang.log.prefix import FIRST_DATED_SECOND

_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_DAY = 86400
_TICKS = 8  # at most, so that their labels fit


def ticks(begin: float, seconds: float) -> list[tuple[float, str]]:
    """Return round times in `seconds` from `begin` on (unix, or since a midnight): their place in percent, and their labels."""
    wanted = seconds / _TICKS
    step = next((step for step in _STEPS if step >= wanted), ceil(wanted / _DAY) * _DAY)
    first = (-begin) % step if begin >= FIRST_DATED_SECOND else 0.0
    found = []
    for number in range(floor((seconds - first) / step) + 1 if first <= seconds else 0):
        at = first + number * step
        found.append((round(100 * at / seconds, 2), _words(begin, at, step, first=not number)))
    return found


def _words(begin: float, at: float, step: float, *, first: bool) -> str:
    if begin < FIRST_DATED_SECOND:
        return f"+{int(at) // 3600}:{int(at) // 60 % 60:02}" + (f":{int(at) % 60:02}" if step < 60 else "")
    when = dt.datetime.fromtimestamp(begin + at, dt.timezone.utc)
    if step >= _DAY:
        return f"{when:%d %b}"
    clock = f"{when:%H:%M:%S}" if step < 60 else f"{when:%H:%M}"
    is_midnight = when.hour == when.minute == when.second == 0
    return f"{when:%d %b} {clock}" if is_midnight and not first else clock
