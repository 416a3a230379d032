"""Times as loggers, shippers and runtimes print them: dates in many orders, a time of day alone, and seconds since 1970 in any unit."""

from __future__ import annotations

import datetime as dt
import re

from sglang_tuning_exporter.sglang.log.prefix import (
    DAY,
    FIRST_DATED_SECOND,
    clock_seconds,
    day_seconds,
    zone_seconds,
)

_MONTHS = b"Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_CLOCK = rb"(?P<hours>[0-2]\d):(?P<minutes>[0-5]\d):(?P<seconds>[0-6]\d)(?:[.,](?P<fraction>\d{1,9}))?"
_YEAR, _MONTH, _DAY = rb"(?P<year>20\d\d)", rb"(?P<month>[01]\d)", rb"(?P<day>[0-3]\d)"
_NAME = rb"(?P<name>%b)" % _MONTHS
_ZONE = rb"(?: ?(?P<zone>Z|UTC|GMT|[+-]\d\d:?\d\d))?"
# No log is older than 2014 or later than 2040: other numbers are no times.
_EPOCH = rb"(?P<epoch>(?:1[4-9]|2[01])\d{8}(?:\.\d{1,9}|\d{3}|\d{6}|\d{9})?)(?![\w.:-])"
_FORMS = (
    _YEAR + rb"[-/.]" + _MONTH + rb"[-/.]" + _DAY + rb"(?:[ T]|, )" + _CLOCK + _ZONE,
    _YEAR + _MONTH + _DAY + rb"[-T ]?" + _CLOCK.replace(b":(?P", b":?(?P") + rb"(?!\d)" + _ZONE,
    _NAME + rb" (?P<day>[ \d]\d) (?:(?P<year>\d{4}) )?" + _CLOCK,  # syslog
    rb"[DIWEFC]" + _MONTH + _DAY + rb" " + _CLOCK,  # glog
    _DAY + rb"[ /-]" + _NAME + rb"[ /-](?P<year>\d{4})[ :]" + _CLOCK + _ZONE,  # 20/Nov/2026:19:25:37 +0000
    _DAY + rb"\." + _MONTH + rb"\." + _YEAR + rb",? " + _CLOCK,
    _MONTH + rb"/" + _DAY + rb"/" + _YEAR + rb",? " + _CLOCK + rb"(?: (?P<half>[AP]M))?",
    _MONTH + rb"[-/]" + _DAY + rb" " + _CLOCK,
    _CLOCK + rb"(?![\w:])",
    _EPOCH,
)
STAMP = b"(?:%b)" % b"|".join(re.sub(rb"\?P<\w+>", b"?:", form) for form in _FORMS)
_READERS = tuple(map(re.compile, _FORMS))
_SECONDS_DIGITS = 10


def stamp_seconds(text: bytes) -> float | None:
    """Read a time that begins `text`; `None` for anything else.

    Unix seconds, of a time without a zone as UTC; of a time of day without a date the seconds since midnight.
    """
    match = next((match for form in _READERS if (match := form.match(text)) is not None), None)
    if match is None:
        return None
    found = match.groupdict()
    if (number := found.get("epoch")) is not None:
        whole, _, fraction = number.partition(b".")
        return float(number) if fraction else float(int(whole)) / 10.0 ** (len(whole) - _SECONDS_DIGITS)
    clock = clock_seconds(found["hours"], found["minutes"], found["seconds"], found["fraction"])
    if (half := found.get("half")) is not None:
        clock = clock % (DAY / 2) + (DAY / 2 if half == b"PM" else 0.0)
    if "day" not in found:
        return clock
    name, zone, year = found.get("name"), found.get("zone"), found.get("year")
    month = int(found["month"]) if name is None else _MONTHS.split(b"|").index(name) + 1
    day = _day_in_year(None if year is None else int(year), month, int(found["day"]))
    return None if day is None else day + clock - zone_seconds(None if zone in (b"UTC", b"GMT") else zone)


def dated(seconds: float | None) -> tuple[float | None, float | None]:
    """Return what `stamp_seconds` read as unix seconds, or else as seconds since midnight."""
    return (None, seconds) if seconds is not None and seconds < FIRST_DATED_SECOND else (seconds, None)


def value_seconds(value: object) -> float | None:
    """Read a time in a structured line: a text or a number. Without a date it may as well be a duration: `None`."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    return dated(stamp_seconds(str(value).encode("utf-8", "replace")))[0]


def _day_in_year(year: int | None, month: int, day_of_month: int) -> int | None:
    """Return the unix seconds of a date's midnight; without a year it is the last such day that has begun in any time zone."""
    today = dt.datetime.now(dt.timezone.utc).date()
    for candidate in (today.year, today.year - 1) if year is None else (year,):
        day = day_seconds(b"%04d-%02d-%02d" % (candidate, month, day_of_month))
        if day is not None and (year is not None or day <= (today - dt.date(1970, 1, 1)).days * DAY + DAY):
            return day
    return None
