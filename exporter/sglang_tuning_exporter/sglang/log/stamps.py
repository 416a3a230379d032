"""Times as loggers, shippers and runtimes print them: ISO, syslog, and seconds since 1970 in any unit."""

from __future__ import annotations

import datetime as dt
import re

from sglang_tuning_exporter.sglang.log.prefix import DAY, clock_seconds, day_seconds, zone_seconds

_CLOCK = rb"[0-2]\d:[0-5]\d:[0-6]\d(?:[.,]\d{1,9})?"
_MONTHS = b"Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
# No log is older than 2014 or later than 2040: other numbers are no times.
_EPOCH = rb"(?:1[4-9]|2[01])\d{8}(?:\.\d{1,9}|\d{3}|\d{6}|\d{9})?"
STAMP = (
    rb"(?:\d{4}[-/]\d\d[-/]\d\d(?:[ T]|, )%b(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?"
    rb"|(?:%b) [ \d]\d (?:\d{4} )?%b|[DIWEFC][01]\d[0-3]\d %b|%b(?![\w.:-]))"
) % (_CLOCK, _MONTHS, _CLOCK, _CLOCK, _EPOCH)
_DATED = re.compile(
    rb"(\d{4})[-/](\d\d)[-/](\d\d)(?:[ T]|, )([0-2]\d):([0-5]\d):([0-6]\d)(?:[.,](\d{1,9}))?(?: ?(Z|UTC|[+-]\d\d:?\d\d))?"
)
_SYSLOG = re.compile(rb"(" + _MONTHS + rb") ([ \d]\d) (?:(\d{4}) )?(\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_GLOG = re.compile(rb"[DIWEFC](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_NUMBER = re.compile(_EPOCH + rb"$")
_SECONDS_DIGITS = 10


def stamp_seconds(text: bytes) -> float | None:
    """Read a time that begins `text`: unix seconds, one without a zone as UTC; `None` for anything else."""
    if (match := _DATED.match(text)) is not None:
        year, month, day_of_month, hours, minutes, seconds, fraction, zone = match.groups()
        day = day_seconds(b"-".join((year, month, day_of_month)))
        shift = 0 if zone == b"UTC" else zone_seconds(zone)
        return None if day is None else day + clock_seconds(hours, minutes, seconds, fraction) - shift
    if (match := _SYSLOG.match(text)) is not None:
        month, day_of_month, year_given, *clock = match.groups()
        number = _MONTHS.split(b"|").index(month) + 1
        return _in_year(int(year_given) if year_given else None, number, int(day_of_month), clock_seconds(*clock))
    if (match := _GLOG.match(text)) is not None:
        month, day_of_month, *clock = match.groups()
        return _in_year(None, int(month), int(day_of_month), clock_seconds(*clock))
    if _NUMBER.match(text) is None:
        return None
    whole, _, fraction = text.partition(b".")
    if fraction:
        return float(text)
    return float(int(whole)) / 10.0 ** (len(whole) - _SECONDS_DIGITS)


def value_seconds(value: object) -> float | None:
    """Read a time in a structured line: a text or a number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return stamp_seconds(value.encode("utf-8", "replace"))
    return stamp_seconds(b"%r" % value) if isinstance(value, (int, float)) else None


def _in_year(year: int | None, month: int, day_of_month: int, clock: float) -> float | None:
    """Return unix seconds of a date and time; without a year it is the last such day that has begun in any time zone."""
    today = dt.datetime.now(dt.UTC).date()
    for candidate in (today.year, today.year - 1) if year is None else (year,):
        day = day_seconds(b"%04d-%02d-%02d" % (candidate, month, day_of_month))
        if day is not None and (year is not None or day <= (today - dt.date(1970, 1, 1)).days * DAY + DAY):
            return day + clock
    return None
