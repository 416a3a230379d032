"""The start of a log line: when it was printed and by which scheduler.

SGLang prints `[<time><ranks>] <message>` (`configure_logger`: sglang/srt/utils.py, later srt/utils/common.py). The time
is `HH:MM:SS` in 0.3.0, `YYYY-MM-DD HH:MM:SS` later, with `.mmm` under SGLANG_LOG_MS (0.5.6 on); the ranks are
` DP0 PP0 ATTN_CP0 MOE_DP0 TP0 EP0` in an order that changed (0.5.5).
What another logging configuration prints is learned, as any wrapping (`forms`).
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


class Prefix(NamedTuple):
    """The text before the message."""

    time: float | None  # unix seconds, the printed time read as UTC
    clock: float | None  # seconds since midnight where the line prints a time without a date
    rank: Rank
    end: int  # where the message starts


_RANKS = rb"(?:[ ]+(?:[A-Z_]{2,12}\d{1,5}|gpu(?:_id)?=\d{1,5}))*"
_DATE = rb"(\d{4}-\d\d-\d\d)[ T]"
_CLOCK = rb"([0-2]\d):([0-5]\d):([0-6]\d)(?:[.,](\d{1,9}))?"
_PLAIN = re.compile(rb"\[?(?:" + _DATE + rb")?" + _CLOCK + rb"(" + _RANKS + rb")[ ]*\][ ]?")
_RANK_ONLY = re.compile(rb"\[(gpu(?:_id)?=\d{1,5}|(?:DP|TP|PP|EP|ATTN_CP|MOE_DP)\d{1,5}" + _RANKS + rb")\][ ]?")
_RANK = re.compile(rb"(?<![A-Z_])(DP|TP|PP|gpu|gpu_id)=?(\d{1,5})")

# What a logging configuration may print between SGLang's prefix and the message: level, process id, [file:line] and logger name in any
# order, the level first.
_LEVEL = rb"\[?(?:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL)\]?(?![\w.])"
_LOGGER_PARTS = re.compile(
    rb"(?=" + _LEVEL + rb")(?:(?:" + _LEVEL + rb"|\d{1,10}(?=[ ]|$)"  # a process id
    rb"|\d\d-\d\d[ ]\d\d:\d\d:\d\d"
    rb"|\[(?!\d\d:\d\d:)[^\]\s]{1,80}\]"  # [scheduler.py:287]
    rb"|(?:pid|tid|rank|thread)[=:]\d+"
    rb"|[\w./-]{1,120}\.py(?::\d+)?"
    rb"|[\w.]{1,80}(?::[\w<>]{1,80})?:\d{1,6}(?=[ ]+[-|])"  # module:function:line
    rb"|sglang(?:\.\w+)*(?=[ ]*[:|-])"
    rb"|\w+(?:\.\w+)+(?=[ ]*[:|-])"
    rb"|[\w-]{1,40}(?=[ ]+[-|][ ])"
    rb"|(?:DP|TP|PP|EP|ATTN_CP|MOE_DP)\d{1,5}(?=[ \]])"
    rb")[ ]*[:|-]{0,2}[ ]*){1,8}"
)


@lru_cache(maxsize=512)
def day_seconds(date: bytes) -> int | None:
    """Return the unix seconds of midnight UTC of `YYYY-MM-DD`, `None` for a date that does not exist."""
    try:
        return (dt.date(int(date[:4]), int(date[5:7]), int(date[8:10])).toordinal() - _EPOCH) * DAY
    except ValueError:
        return None


def clock_seconds(hours: bytes, minutes: bytes, seconds: bytes, fraction: bytes | None = None) -> float:
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
        return Prefix(None, None, parse_rank(match[1]), match.end()) if match else None
    date, hours, minutes, seconds, fraction, ranks = match.groups()
    clock = clock_seconds(hours, minutes, seconds, fraction)
    rank = parse_rank(ranks) if ranks else NO_RANK
    if date is None:
        return Prefix(None, clock, rank, match.end())
    day = day_seconds(date)
    return Prefix(None if day is None else day + clock, None, rank, match.end())


def strip_logger_parts(message: bytes) -> bytes:
    """Return the message without level, file and logger name before it (`[…] WARNING server_args.py:9: …`)."""
    match = _LOGGER_PARTS.match(message)
    return message if match is None else message[match.end() :]
