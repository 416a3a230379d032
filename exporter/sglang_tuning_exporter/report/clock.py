"""When the lines of a log were printed: the printed times, a clock that never runs backwards, and blocks cut by it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from math import inf

from sglang_tuning_exporter.report.samples import EVALUATION_SECONDS
from sglang_tuning_exporter.sglang.log.forms import LINES_SEARCHED, OwnTimes, own_times, printed_time, unwrap
from sglang_tuning_exporter.sglang.log.prefix import DAY, FIRST_DATED_SECOND
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.sglang.log.terminal import LONGEST_LINE, strip_terminal

# Processes write one log a little out of order; a time further back is of another clock (docs/decisions.md, "Reports").
JITTER_SECONDS = 60.0
# No server is silent for so long and then prints: a time further ahead is of another clock (docs/decisions.md, "Reports").
FAR_SECONDS = 30 * DAY
# So many lines with times of another clock are strays if the first clock comes back (docs/decisions.md, "Reports").
STRAY_LINES = 16
LINES_TRIED = 256
_LOOKED_AT = 1 << 16  # bytes that are searched for a line with a time


def _times(block: bytes, *, own: OwnTimes) -> Iterator[tuple[float | None, float | None]]:
    for line in block.split(b"\n", LINES_SEARCHED)[:LINES_SEARCHED]:
        time, clock = printed_time(line, own)
        if time is not None or clock is not None:
            yield time, clock


def first_time(block: bytes, *, own: OwnTimes) -> float | None:
    """Return the time of the first line that has one, as `printed_time` reads it."""
    for time, clock in _times(block, own=own):
        return time if time is not None else clock
    if own:
        return None
    for line in block.split(b"\n", LINES_SEARCHED)[:LINES_SEARCHED]:
        if (found := unwrap(strip_terminal(line[:LONGEST_LINE]))) is not None and found.time is not None:
            return found.time
    return None


def begin_of(block: bytes) -> float | None:
    """Return when a log begins: its first time, unless the next times show that it is a stray."""
    own = own_times(block)
    first = first_time(block, own=own)
    if first is None:
        return None
    dated = [time for time, _ in islice(_times(block, own=own), 3) if time is not None]
    if len(dated) > 1 and dated[0] == first:
        is_late = all(later < first - JITTER_SECONDS for later in dated[1:])
        if is_late or all(later > first + FAR_SECONDS for later in dated[1:]):
            return dated[1]
    return first


def last_time(block: bytes, before: float, *, own: OwnTimes) -> float | None:
    """Return the time of the last line that has one; `before` is the last known time, for a time without a date."""
    for line in reversed(block.rsplit(b"\n", LINES_SEARCHED)):
        time, clock = printed_time(line, own)
        if time is not None:
            return time
        if clock is not None:
            if before == -inf:
                return clock
            time = before // DAY * DAY + clock
            return time + DAY if time < before - DAY / 2 else time
    return None


def day_of(time: float | None, before: float | None) -> float | None:
    """Return a time without a date on the day of the last known time, as `last_time` does."""
    if time is None or before is None or time >= FIRST_DATED_SECOND:
        return time
    found = before // DAY * DAY + time
    return found + DAY if found < before - DAY / 2 else found


class Clock:
    """The printed times of one log as seconds that never run backwards.

    A single line with a time of another clock changes nothing. After the clock was set, time goes on from where it was.
    `ahead`: how far the log's clock is ahead of the report's.
    """

    def __init__(self, ahead: float = 0.0) -> None:
        self.now = -inf
        self.printed: float | None = None  # the last time that moved the clock, as printed
        self.set_back = self.set_forward = 0  # how often
        self.strays = 0  # lines with the time of another clock
        self._shift = -ahead
        self._former: float | None = None  # the shift before the last change
        self._lines = 0  # since the last change
        self._was_back = False

    def is_near(self, time: float | None) -> bool:
        """Whether a time follows within the jitter, so that no later line can be before it."""
        return time is not None and 0 <= time + self._shift - self.now <= JITTER_SECONDS

    def follow(self, time: float | None) -> float | None:
        """Take the printed time of the next line as `read` does if it simply follows, as most do; else return None."""
        if time is None:
            return self.now
        ahead = time + self._shift - self.now
        if 0 <= ahead <= JITTER_SECONDS and self._former is None:
            self.now, self.printed = self.now + ahead, time
            return self.now
        return None

    def leaps(self, time: float | None) -> bool:
        """Whether `read` needs the time of the next line to understand this one."""
        return time is not None and self.now > -inf and time + self._shift - self.now > JITTER_SECONDS

    def read(self, time: float | None, following: float | None = None) -> float:
        """Take the printed time of the next line and return the clock's time; `None` is the time of the line before.

        `following` is the printed time of the line after it, needed where the time `leaps`.
        """
        if time is None or self.follow(time) is not None:
            return self.now
        if self.now == -inf:
            self.now, self.printed = time + self._shift, time
            return self.now
        if following is not None and self._returns(time, following):
            self.strays += 1
            return self.now
        if self._former is not None and self._is_former(time):
            self._go_back()
        elif not -JITTER_SECONDS <= time + self._shift - self.now <= FAR_SECONDS:
            self._change(time)
            return self.now
        if self._former is not None:
            self._lines += 1
            if self._lines == 2:
                self._count(1)
        self.printed = time
        self.now = max(self.now, time + self._shift)
        return self.now

    def end(self) -> None:
        """End the log: a last line that nothing confirmed is a stray."""
        if self._former is not None and self._lines == 1:
            self._go_back()

    def _returns(self, time: float, following: float) -> bool:
        ahead, then = time + self._shift - self.now, following + self._shift - self.now
        return ahead > JITTER_SECONDS and -JITTER_SECONDS <= then < ahead - JITTER_SECONDS

    def _is_former(self, time: float) -> bool:
        """Whether the former clock goes on, so that a few lines of another one were strays."""
        assert self._former is not None
        limit = JITTER_SECONDS if self._lines <= STRAY_LINES else FAR_SECONDS
        if -JITTER_SECONDS <= time + self._shift - self.now <= limit:
            return False
        return -JITTER_SECONDS <= time + self._former - self.now <= limit

    def _go_back(self) -> None:
        assert self._former is not None
        if self._lines <= STRAY_LINES:
            self.strays += self._lines
            if self._lines > 1:
                self._count(-1)
            self._shift, self._former = self._former, None
            return
        self._shift, self._former, self._lines = self._former, self._shift, 1
        self._was_back = not self._was_back

    def _change(self, time: float) -> None:
        if self._former is not None and self._lines == 1:
            self.strays += 1
        else:
            self._former = self._shift
        self._was_back = time + self._former < self.now
        self._shift, self._lines = self.now - time, 1

    def _count(self, times: int) -> None:
        if self._was_back:
            self.set_back += times
        else:
            self.set_forward += times


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
