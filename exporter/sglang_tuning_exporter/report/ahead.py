"""One log read part by part: by its own reader, or ahead of it by readers in other processes, with the same outcome.

What is read ahead is taken only where the reader remembers at the block's beginning what the other one was told that it
would; anything else is read again, by the reader itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from sglang_tuning_exporter.report.batches import Answer, Part, cut
from sglang_tuning_exporter.sglang.log.reader_state import (
    Mark,
    follow,
    has_words_near,
    mark_of,
    packed,
    time_printed,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

    from sglang_tuning_exporter.sglang.events import Event
    from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
    from sglang_tuning_exporter.sglang.log.reader import LogReader

_Events: TypeAlias = "list[Event | BatchRun]"
FIRST = 16  # blocks that are read alone
Submit: TypeAlias = "Callable[[bytes, bytes, float | None], Future[bytes]]"
Wait: TypeAlias = "Callable[[Future[bytes]], Answer]"


class LogPart(NamedTuple):
    """A part of a log: its text, that of the part after it, and what reads it."""

    text: bytes
    following: bytes
    events: Callable[[], _Events]


@dataclass(slots=True)
class _Sent:
    """A block, what its reader was expected to remember, and who reads it; nobody where that could not be said."""

    block: bytes
    expected: Mark | None = None
    answer: Future[bytes] | None = None


def alone(blocks: Iterable[bytes], reader: LogReader, pace: float | None) -> Iterator[LogPart]:
    """Read blocks one after the other."""
    part = b""
    for block in blocks:
        for following in cut(block, pace):
            if part:
                yield LogPart(part, following, partial(reader.feed_runs, part))
            part = following
    if part:
        yield LogPart(part, b"", partial(reader.feed_runs, part))


class Ahead:
    """Reads the blocks of one log with the help of others, `depth` blocks ahead of what is taken.

    The first blocks it reads alone: a log that ends with them is not worth any help, and it learns from them what comes.
    """

    def __init__(
        self, reader: LogReader, pace: float | None, submit: Submit, wait: Wait, *, depth: int, first: int = FIRST
    ) -> None:
        self._reader, self._pace, self._depth = reader, pace, depth
        self._submit, self._wait, self._first = submit, wait, first
        self._sent: deque[_Sent] = deque()
        self._mark: Mark | None = None
        self._packed = b""

    def pieces(self, blocks: Iterable[bytes]) -> Iterator[LogPart]:
        """Read blocks: the same pieces as `alone` gives, with the same events."""
        rest = iter(blocks)
        self._fill(rest)
        while self._sent:
            sent = self._sent.popleft()
            self._fill(rest)
            after = next(cut(self._sent[0].block, self._pace)) if self._sent else b""
            answer = self._answer(sent)
            if answer is None:
                texts = list(cut(sent.block, self._pace))
                reading = [partial(self._reader.feed_runs, text) for text in texts]
            else:
                texts = list(_texts(sent.block, answer.parts))
                reading = [partial(self._take, part) for part in answer.parts]
                reading[-1] = partial(self._take, answer.parts[-1], answer.remembered)
            for text, following, events in zip(texts, [*texts[1:], after], reading, strict=True):
                yield LogPart(text, following, events)

    def _fill(self, blocks: Iterator[bytes]) -> None:
        while len(self._sent) < self._depth and (block := next(blocks, None)) is not None:
            self._sent.append(self._send(block))

    def _send(self, block: bytes) -> _Sent:
        mark = mark_of(self._reader) if self._first <= 0 else None
        if mark is None:
            return _Sent(block)
        if mark != self._mark:
            self._mark, self._packed = mark, packed(self._reader)
        return _Sent(block, mark, self._submit(self._packed, block, self._pace))

    def _answer(self, sent: _Sent) -> Answer | None:
        """Wait for what was read ahead; None where it was read with another past than the log has."""
        self._first -= 1
        mark = mark_of(self._reader) if self._first <= 0 else None
        if sent.answer is not None and mark is not None and sent.expected == mark:
            answer = self._wait(sent.answer)
            return answer if answer.parts and not has_words_near(self._reader, answer.asked) else None
        if mark is not None:
            self._send_again(mark)
        return None

    def _send_again(self, mark: Mark) -> None:
        for place, sent in enumerate(self._sent):
            if sent.expected != mark:
                if sent.answer is not None:
                    sent.answer.cancel()
                self._sent[place] = self._send(sent.block)

    def _take(self, part: Part, remembered: bytes = b"") -> _Events:
        """Go on behind a part that another one has read."""
        reader = self._reader
        tallies = reader.counts, reader.unrecognised, reader.suspicious
        for tally, more in zip(tallies, part.counted, strict=True):
            for name, count in more.items():
                tally[name] += count
        follow(reader, part.lines, part.printed, part.words)
        if remembered:
            printed = time_printed(reader)
            unpack(reader, remembered)
            follow(reader, 0, printed, None)
        return part.events()


def _texts(block: bytes, parts: list[Part]) -> Iterator[bytes]:
    start = 0
    for part in parts:
        yield block[start : start + part.length]
        start += part.length
