"""`explain FILE[:LINE]`: the kind and the events of a log or of one line, and why a line does not count."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core.events import Event
from sglang_tuning_exporter.core.findings import FIRST_DATED_SECOND
from sglang_tuning_exporter.core.lines import CARRIERS, LINES, SECONDS, WORDS, Reader
from sglang_tuning_exporter.core.server import REPEAT_SECONDS, Server
from sglang_tuning_exporter.sglang.clean import clean

_SHOWN = 160  # characters of a line
# Kinds of events that several ranks or lines report, and that count once.
_COUNTED_ONCE = frozenset({"retraction", "out_of_memory", "end", "transfer", "hicache", "no_pool"})
# Why a line has no event, by its kind.
_SILENT = {
    "access": "an access line of a request that was answered, or of a health check",
    "request": "a line of SGLang's about one request, with its text",
    "traceback": "a part of a traceback",
    "exception": "the end of a traceback that is no event: another line says it, or no process of SGLang's ended by it",
    "advice": "a line in which SGLang advises or decides about a flag",
    "known": "a line of SGLang's without a figure that is used",
    "empty": "an empty line",
    "cut": "a part of a line that the container runtime cut; it counts with its last part",
    "arguments": "arguments that the next line goes on with",
}


def explain(lines: Iterable[bytes], number: int | None = None) -> str:
    """Return what the line with this number was read as; without a number, what all lines were read as."""
    reader = Reader()
    if number is None:
        return _log(reader, lines)
    carrier = ""
    for line, events, again in _read(reader, lines):
        if reader.number == number:
            return _line(reader, line, events, again, carrier)
        if reader.trust.carrier_line == reader.number:
            where = f"line {reader.number}, within {LINES} lines or {SECONDS:g} s before it"
            carrier = f"{where}: {CARRIERS[reader.trust.carrier]}\n  {_shown(line)}"
    return f"there is no line {number}: the log has {reader.number}\n"


def _read(reader: Reader, lines: Iterable[bytes]) -> Iterator[tuple[bytes, tuple[Event, ...], list[Event]]]:
    """Give each line with its events, and those of its events that a server has counted before."""
    server = Server(profiles.DEFAULT)
    for line in lines:
        events, again = reader.read(line), list[Event]()
        for event in events:
            before = server.counts_by_now() if event.kind in _COUNTED_ONCE else None
            server.take_line(event)
            if before is not None and server.counts_by_now() == before:
                again.append(event)
        yield line, events, again


def _line(reader: Reader, line: bytes, events: tuple[Event, ...], again: list[Event], carrier: str) -> str:
    """Return what one line was read as, and whether it counts.

    carrier: a line shortly before it that can hold text of others, with the reason.
    """
    text = [f"line {reader.number}: {_shown(line)}"]
    if reader.around:
        text.append(f"around it: {reader.around.lstrip(', ')}")
    text.append(f"read as: {reader.kind}")
    text += [f"event: {_event(event)}" for event in events]
    if not events:
        text.append(f"not counted: {_reason(reader, line)}")
    elif again and again[0].figures.get("testing"):
        text.append("not counted: SGLang retracts to test it")
    elif again:
        text.append(f"not counted: another line said the same within {REPEAT_SECONDS:g} s before it, as each rank does")
    elif any(event.marked for event in events):
        text.append(f"counted, and marked: {carrier or CARRIERS['glued']}")
    else:
        text.append("counted, not marked")
    return "\n".join(text) + "\n"


@dataclass(slots=True)
class _Counts:
    """The counts of a log: events by kind, lines by the text around them, and lines that can carry text of others."""

    events: Counter[str] = field(default_factory=Counter)
    marked: Counter[str] = field(default_factory=Counter)
    around: Counter[str] = field(default_factory=Counter)
    carriers: dict[str, list[int]] = field(default_factory=dict)  # numbers of lines by the kind of their text
    uncounted: int = 0  # events that repeat another one


def _log(reader: Reader, lines: Iterable[bytes]) -> str:
    """Return what a log was read as: a table of its kinds of lines, and what was not counted."""
    counts = _counted(reader, lines)
    events, marked = counts.events, counts.marked
    text = [f"{reader.number} lines", "", f"{'lines read as':<16}{'lines':>9}{'events':>9}{'marked':>9}"]
    kinds = sorted(reader.lines | events, key=lambda kind: -reader.lines[kind])
    text += [f"{kind:<16}{reader.lines[kind]:>9}{events[kind] or '':>9}{marked[kind] or '':>9}" for kind in kinds]
    return "\n".join([*text, "", *_remarks(reader, counts)]) + "\n"


def _counted(reader: Reader, lines: Iterable[bytes]) -> _Counts:
    """Read a log to its end and count its events."""
    counts = _Counts()
    for _, events, again in _read(reader, lines):
        counts.uncounted += len(again)
        counts.events.update(event.kind for event in events)
        counts.marked.update(event.kind for event in events if event.marked)
        counts.around[reader.around.lstrip(", ")] += reader.kind in counts.events
        if reader.trust.carrier_line == reader.number:
            counts.carriers.setdefault(reader.trust.carrier, []).append(reader.number)
    counts.events.update(event.kind for event in reader.end())
    return counts


def _remarks(reader: Reader, counts: _Counts) -> Iterator[str]:
    """Give what stood around SGLang's lines, and the lines that were not understood, not counted or not trusted."""
    yield from (f"around {count} of SGLang's lines: {name}" for name, count in counts.around.most_common(4) if name)
    unreadable = [(name, count) for name, count in sorted(reader.unreadable.items()) if count]
    yield from (f"{count} x {name} not understood: printed by a newer release?" for name, count in unreadable)
    if counts.uncounted:
        why = "another rank or line said the same before, or SGLang retracts to test it"
        yield f"{counts.uncounted} x not counted: {why}"
    for kind, numbers in counts.carriers.items():
        yield f"{len(numbers)} lines can carry text of others, first line {numbers[0]}: {CARRIERS[kind]}"
    if reader.unread:
        yield f"not counted at once, in a form that was not known: {_shown(reader.unread)}"


def _reason(reader: Reader, line: bytes) -> str:
    """Return why a line is no event."""
    alone = Reader()
    alone.read(line)
    if alone.unreadable:
        return "it begins as a line of SGLang's and goes on otherwise: cut, or printed by a newer release"
    if reader.kind in _SILENT:
        return _SILENT[reader.kind]
    if WORDS.search(line):
        return (
            "SGLang's words stand in it, but behind text that is no known wrapper's, or without the stamp that other"
            " lines have"
        )
    return "no known line of SGLang's"


def _shown(line: bytes) -> str:
    """Return a line without control characters, cut where it is long."""
    text = clean(line[: 4 * _SHOWN].decode("utf-8", "replace"))
    return text if len(text) <= _SHOWN else text[:_SHOWN] + " …"


def _event(event: Event) -> str:
    """Return an event on one line."""
    if event.time is None:
        when = "without a time"
    elif event.time < FIRST_DATED_SECOND:
        when = f"{dt.timedelta(seconds=event.time)} after the first midnight"
    else:
        when = f"{dt.datetime.fromtimestamp(event.time, dt.timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    figures = ", ".join(f"{name} {value:g}" for name, value in event.figures.items())
    more = f"{len(event.arguments)} arguments" if event.arguments else clean(event.text[:_SHOWN])
    return ", ".join(filter(None, (f"{event.kind} {event.word}".strip(), when, event.rank.words, figures, more)))
