"""What a reader in another process found in a block of a log, as bytes: batch lines are most of it, so they are compact."""

from __future__ import annotations

import marshal  # nosec B403 # what our own processes tell each other
import pickle  # nosec B403 # what our own processes tell each other
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from sglang_tuning_exporter.report.pacing import paced
from sglang_tuning_exporter.sglang.events import NO_RANK, DecodeBatch, Event, PrefillBatch, Rank
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
from sglang_tuning_exporter.sglang.log.reader_state import (
    Asked,
    Mark,
    Words,
    asked_of,
    begin_unknown,
    mark_of,
    needs_more,
    packed,
    place_of,
    time_printed,
    unpack,
    words_near,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_tuning_exporter.sglang.log.reader import LogReader

_RUN, _DECODES, _PREFILLS = range(3)
_FIGURES = {
    kind: tuple(field.name for field in fields(batch) if field.name not in {"time", "rank", "queues"})
    for kind, batch in ((_DECODES, DecodeBatch), (_PREFILLS, PrefillBatch))
}
_DECODE, _PREFILL = (attrgetter("time", "rank", *_FIGURES[kind]) for kind in (_DECODES, _PREFILLS))
_BATCHES = (BatchRun, DecodeBatch, PrefillBatch)

_Events: TypeAlias = "list[Event | BatchRun]"
_Tallies: TypeAlias = tuple[dict[str, int], dict[str, int], dict[str, int]]


class Part(NamedTuple):
    """What was read of one part of a block."""

    length: int
    counted: _Tallies  # more of `counts`, `unrecognised` and `suspicious`
    lines: int
    printed: float | None  # the last time
    words: Words | None  # of others
    batches: bytes  # one entry for each event
    others: list[Event]  # that are no batches

    def events(self) -> _Events:
        """Give the events as the other reader did."""
        rest = iter(self.others)
        return [
            next(rest) if entry is None else _event(*entry)
            for entry in marshal.loads(self.batches)  # noqa: S302 # nosec B302 # from a process of ours, over a socket pair that nobody else has
        ]


class Answer(NamedTuple):
    """What was read of one block; without parts where it must be read by who knows what came before it."""

    parts: list[Part]
    asked: list[Asked]  # lines that words of others before the block could make suspect: taken as if there were none
    remembered: bytes = b""  # by the reader at its end, where that is not what it was at its beginning


def cut(block: bytes, pace: float | None) -> Iterator[bytes]:
    """Cut a block into the parts that are read at once."""
    return iter((block,)) if pace is None else paced(block, pace)


def read(reader: LogReader, remembered: bytes, block: bytes, pace: float | None) -> Answer:
    """Read a block as a reader that remembers so much would."""
    unpack(reader, remembered)
    before = mark_of(reader)
    begin_unknown(reader)
    begin, parts = place_of(reader), []
    for text in cut(block, pace):
        tallies, place = _tallies(reader), place_of(reader)
        events = reader.feed_runs(text)
        if needs_more(reader, events):
            return Answer([], [])
        entries = [_entry(event) for event in events]
        others: list[Event] = [event for event in events if not isinstance(event, _BATCHES)]
        counted, lines = _more(_tallies(reader), tallies), place_of(reader) - place
        parts.append(
            Part(len(text), counted, lines, time_printed(reader), words_near(reader), marshal.dumps(entries), others)
        )
    return Answer(parts, asked_of(reader, begin), b"" if _same(before, mark_of(reader)) else packed(reader))


def _same(before: Mark | None, after: Mark | None) -> bool:
    return before is not None and before == after


def _tallies(reader: LogReader) -> _Tallies:
    return reader.counts.copy(), reader.unrecognised.copy(), reader.suspicious.copy()


def _more(now: _Tallies, before: _Tallies) -> _Tallies:
    first, second, third = (
        {name: count - then.get(name, 0) for name, count in tally.items() if count != then.get(name, 0)}
        for tally, then in zip(now, before, strict=True)
    )
    return first, second, third


def _entry(event: Event | BatchRun) -> tuple[object, ...] | None:
    """Give a batch as plain values, which take a tenth of the time that an object does; None for any other event."""
    if isinstance(event, BatchRun):
        prefix = event.prefix
        heads = prefix + b"Decode batch", prefix + b"Prefill batch"
        lines = b"\n".join([line for line in event.lines if line.startswith(heads)])  # those between mean nothing
        return (_RUN, event.time, _ranks(event.rank), *event[2:-1], lines)
    if isinstance(event, DecodeBatch):
        time, rank, *figures = _DECODE(event)
    elif isinstance(event, PrefillBatch):
        time, rank, *figures = _PREFILL(event)
    else:
        return None
    kind = _DECODES if isinstance(event, DecodeBatch) else _PREFILLS
    return (kind, time, _ranks(rank), *figures, dict(event.queues) or None)


def _event(kind: int, time: Any, ranks: tuple[int | None, int | None, int | None], *figures: Any) -> Event | BatchRun:
    *rest, last = figures
    if kind == _RUN:
        return BatchRun._make((time, _rank(ranks), *rest, last.split(b"\n")))
    event = (DecodeBatch if kind == _DECODES else PrefillBatch)(time, _rank(ranks))
    for name, value in zip(_FIGURES[kind], rest, strict=True):
        if value is not None:
            setattr(event, name, value)
    if last is not None:
        event.queues = last
    return event


def _ranks(rank: Rank) -> tuple[int | None, int | None, int | None]:
    return rank.dp, rank.tp, rank.pp


@lru_cache(maxsize=4096)
def _rank(of: tuple[int | None, int | None, int | None]) -> Rank:
    """Give the same object for the same ranks."""
    return NO_RANK if of == (None, None, None) else Rank(*of)


def written(answer: Answer) -> bytes:
    """Write an answer as bytes."""
    return pickle.dumps(tuple(answer))


def answered(data: bytes) -> Answer:
    """Read what `written` wrote."""
    return Answer(*pickle.loads(data))  # noqa: S301 # nosec B301 # from a process of ours, over a socket pair that nobody else has
