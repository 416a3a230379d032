"""A block of a log cut where the alerts are evaluated, so that no figure is known before its time. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import inf

from sglang_tuning_exporter.report.clock import day_of, first_time, last_time
from sglang_tuning_exporter.report.samples import EVALUATION_SECONDS
from sglang_tuning_exporter.sglang.log.forms import OwnTimes, own_times, printed_time
from sglang_tuning_exporter.sglang.log.reader import LogReader

LINES_TRIED = 256
_LOOKED_AT = 1 << 16  # bytes that are searched for a line with a time


def paced(block: bytes, pace: float) -> Iterator[bytes]:
    """Cut a block of whole lines where the printed time passes a multiple of `pace` seconds."""
    own = own_times(block, LINES_TRIED)
    start, size, last = 0, 1024, last_time(block, -inf, own=own)
    while start < len(block):
        first = first_time(block[start : start + _LOOKED_AT], own=own)
        if first is None or last is None or first // pace == last // pace:
            break
        # Lines before `low` are within this multiple; times rise, so the next one is found by bisection.
        low, high = start, len(block)
        reach = start + 2 * size
        while reach < high and (line := block.find(b"\n", reach) + 1) and line < high:
            if (time := _time_at(block, low, line, own=own)) is not None and time // pace != first // pace:
                high = line
            else:
                low, reach = line, line + 2 * (line - start)
        while True:
            middle = block.find(b"\n", (low + high) // 2) + 1
            if not low < middle < high:
                break
            time = _time_at(block, low, middle, own=own)
            if time is None or time // pace == first // pace:
                low = middle
            else:
                high = middle
        following = block.find(b"\n", low) + 1
        end = following if start < following < high else high
        yield block[start:end]
        start, size = end, end - start
    if start < len(block):
        yield block[start:]


def _time_at(block: bytes, low: int, start: int, *, own: OwnTimes) -> float | None:
    """Return the time of the line at `start`: nearly always its own, else that of the last line before it, from `low` on."""
    time, clock = printed_time(block[start : start + 200].partition(b"\n")[0], own)
    if time is None and clock is None:
        return last_time(block[max(low, start - _LOOKED_AT) : start], -inf, own=own)
    return clock if time is None else time


def drifts(block: bytes, known: Mapping[str, int], before: float | None) -> list[tuple[float, Counter[str]]]:
    """Return from which times on which counts of unreadable lines hold; a new reader reads the block again."""
    found: list[tuple[float, Counter[str]]] = []
    reader, seen, own = LogReader(), 0, own_times(block, LINES_TRIED)
    for part in paced(block, EVALUATION_SECONDS):
        reader.feed_runs(part)
        now, time = sum(reader.unrecognised.values()), day_of(last_time(part, -inf, own=own), before)
        if now != seen and time is not None:
            found.append(((time // EVALUATION_SECONDS + 1) * EVALUATION_SECONDS, add_up([known, reader.unrecognised])))
        seen = now
    return found


def add_up(tallies: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Return the sum of counts."""
    total: Counter[str] = Counter()
    for tally in tallies:
        total.update(tally)
    return total
