"""The start of a log line: when it was printed and by which scheduler.

SGLang prints `[<time><ranks>] <message>` (`configure_logger`: sglang/srt/utils.py, later srt/utils/common.py). The time
is `HH:MM:SS` in 0.3.0, `YYYY-MM-DD HH:MM:SS` later, with `.mmm` under SGLANG_LOG_MS (0.5.6 on); the ranks are
` DP0 PP0 ATTN_CP0 MOE_DP0 TP0 EP0` in an order that changed (0.5.5).
A server with its own logging configuration prints `<date time> <level> <pid> [<file>:<line>] <message>` or the like.
"""

from __future__ import annotations

import datetime as dt
import re
from functools import lru_cache
from typing import NamedTuple

from sglang_tuning_exporter.sglang.events import MOST_RANKS, NO_RANK, Rank

DAY = 86400
FIRST_DATED_SECOND = 1e9  # smaller times are seconds since a midnight: the log prints no dates
_EPOCH = dt.date(1970, 1, 1).toordinal()
_DAYS: dict[bytes, int | None] = {}
_DAYS_KEPT = 512


class Prefix(NamedTuple):
    """The text before the message."""

    time: float | None  # unix seconds, the printed time read as UTC
    clock: float | None  # seconds since midnight where the line prints a time without a date
    rank: Rank
    end: int  # where the message starts
    plain: bool  # SGLang's own prefix


_RANKS = rb"(?:[ ]+(?:[A-Z_]{2,12}\d{1,5}|gpu(?:_id)?=\d{1,5}))*"
_DATE = rb"(\d{4}-\d\d-\d\d)[ T]"
_CLOCK = rb"([0-2]\d):([0-5]\d):([0-6]\d)(?:[.,](\d{1,9}))?"
_PLAIN = re.compile(rb"\[?(?:" + _DATE + rb")?" + _CLOCK + rb"(" + _RANKS + rb")[ ]*\][ ]?")
_RANK_ONLY = re.compile(rb"\[(gpu(?:_id)?=\d{1,5}|(?:DP|TP|PP|EP|ATTN_CP|MOE_DP)\d{1,5}" + _RANKS + rb")\][ ]?")
_RANK = re.compile(rb"(?<![A-Z_])(DP|TP|PP|gpu|gpu_id)=?(\d{1,5})")

# A logging configuration of the operator's own: a time without brackets, then level, process id, [file:line] and
# logger name in any order.
_OWN_TIME = re.compile(rb"[\[(<]?(\d{4})[-/](\d\d)[-/](\d\d)[ T]" + _CLOCK + rb"[ ]?(Z|[+-]\d\d:?\d\d)?[\])>]?[ :|-]*")
_LEVEL = rb"(?:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL)"
_OWN_PART = re.compile(
    rb"(?:\[?" + _LEVEL + rb"\]?(?![\w.])"
    rb"|\d{1,10}(?=[ ]|$)"  # a process id
    rb"|\d\d-\d\d[ ]\d\d:\d\d:\d\d"  # a date without a year is not used
    rb"|\[(?!\d\d:\d\d:)[^\]\s]{1,80}\]"  # [scheduler.py:287]
    rb"|(?:pid|tid|rank|thread)[=:]\d+"
    rb"|[\w./-]{1,120}\.py(?::\d+)?"
    rb"|[\w.]{1,80}(?::[\w<>]{1,80})?:\d{1,6}(?=[ ]+[-|])"  # module:function:line
    rb"|sglang(?:\.\w+)*(?=[ ]*[:|-])"
    rb"|\w+(?:\.\w+)+(?=[ ]*[:|-])"
    rb"|(?:[\w-]{1,40})(?=[ ]+[-|][ ])"
    rb"|((?:DP|TP|PP|EP|ATTN_CP|MOE_DP)\d{1,5})(?=[ \]])"
    rb")[ ]*[:|-]{0,2}[ ]*"
)
_OWN_START = re.compile(rb"\[?(?:" + _LEVEL + rb")\b|[\[(<]?\d{4}[-/]\d\d[-/]\d\d[ T]\d\d:")
_OWN_PARTS_READ = 8


def day_seconds(date: bytes) -> int | None:
    """Return the unix seconds of midnight UTC of `YYYY-MM-DD`, `None` for a date that does not exist."""
    if date in _DAYS:
        return _DAYS[date]
    try:
        seconds: int | None = (dt.date(int(date[:4]), int(date[5:7]), int(date[8:10])).toordinal() - _EPOCH) * DAY
    except ValueError:
        seconds = None
    if len(_DAYS) >= _DAYS_KEPT:
        _DAYS.clear()
    _DAYS[date] = seconds
    return seconds


def clock_seconds(hours: bytes, minutes: bytes, seconds: bytes, fraction: bytes | None) -> float:
    """Return the seconds since midnight."""
    whole = int(hours) * 3600 + int(minutes) * 60 + int(seconds)
    return whole + int(fraction) / 10 ** len(fraction) if fraction else float(whole)


def zone_seconds(zone: bytes | None) -> int:
    """Return what is to be subtracted from a time printed in zone `+08:00`, `-0500`, `Z` or none (UTC) to get UTC."""
    if not zone or zone in (b"Z", b"z"):
        return 0
    digits = zone[1:].replace(b":", b"")
    return (-1 if zone[:1] == b"-" else 1) * (int(digits[:2]) * 3600 + int(digits[2:4]) * 60)


@lru_cache(maxsize=4 * MOST_RANKS)
def _rank(dp: int | None, tp: int | None, pp: int | None) -> Rank:
    """Return the same object for the same ranks, so that they can be compared with `is`."""
    return NO_RANK if dp is None and tp is None and pp is None else Rank(dp=dp, tp=tp, pp=pp)


def parse_rank(text: bytes) -> Rank:
    """Read the ranks of ` DP1 PP0 TP3 EP0` or `gpu_id=0` (0.2: the GPU is the tensor parallel rank)."""
    dp = tp = pp = None
    for match in _RANK.finditer(text):
        name, number = match[1], int(match[2])
        if number >= MOST_RANKS:
            continue
        if name == b"DP":
            dp = number
        elif name == b"PP":
            pp = number
        else:
            tp = number
    return _rank(dp, tp, pp)


def parse_plain_prefix(line: bytes, start: int = 0) -> Prefix | None:
    """Read SGLang's own prefix at `start`, with or without date, ranks or first bracket; `None` where there is none."""
    match = _PLAIN.match(line, start)
    if match is None:
        match = _RANK_ONLY.match(line, start)
        return Prefix(None, None, parse_rank(match[1]), match.end(), plain=True) if match else None
    date, hours, minutes, seconds, fraction, ranks = match.groups()
    clock = clock_seconds(hours, minutes, seconds, fraction)
    rank = parse_rank(ranks) if ranks else NO_RANK
    if date is None:
        return Prefix(None, clock, rank, match.end(), plain=True)
    day = day_seconds(date)
    return Prefix(None if day is None else day + clock, None, rank, match.end(), plain=True)


def parse_own_prefix(line: bytes, start: int = 0) -> Prefix | None:
    """Read the prefix of an operator's own logging configuration; `None` where there is none."""
    if _OWN_START.match(line, start) is None:
        return None
    time = None
    position = start
    ranks = b""
    for _ in range(_OWN_PARTS_READ):
        match = _OWN_TIME.match(line, position) if time is None else None
        if match is not None:
            year, month, day_of_month, hours, minutes, seconds, fraction, zone = match.groups()
            day = day_seconds(b"-".join((year, month, day_of_month)))
            if day is not None:
                time = day + clock_seconds(hours, minutes, seconds, fraction) - zone_seconds(zone)
        else:
            match = _OWN_PART.match(line, position)
            if match is None:
                break
            ranks += b" " + match[1] if match[1] else b""
        position = match.end()
    return Prefix(time, None, parse_rank(ranks), position, plain=False)


def strip_own_parts(line: bytes, start: int) -> int:
    """Return where the message starts if level, file and logger name are between SGLang's prefix and the message
    (`[…] WARNING server_args.py:9: …`).
    """
    if _OWN_START.match(line, start) is None:
        return start
    for _ in range(_OWN_PARTS_READ):
        match = _OWN_PART.match(line, start)
        if match is None:
            break
        start = match.end()
    return start
