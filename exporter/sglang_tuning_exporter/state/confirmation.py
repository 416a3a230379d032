"""Failures and starts that wait for what must follow them. Pure; times are seconds on the caller's clock.

SGLang prints text of requests and models raw, line ends included, so any line of a server that has served may be forged. A server that
had a fatal failure ends, and one that starts is away for a while. So such a line waits until that is seen, and counts nothing meanwhile:

- With metrics: the server is scraped again. It refuses the connection, or its counters began again: confirmed. It works on: refused.
- With the log alone: a line that no raw text can be counts at once. Any other waits. A batch line of its scheduler refuses it, silence
  confirms it. A start is confirmed by its own next lines, if they come later than it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from sglang_tuning_exporter.sglang.event_json import from_json, is_figure, to_json
from sglang_tuning_exporter.sglang.events import (
    ENDS,
    KvPool,
    Limits,
    Liveness,
    LivenessKind,
    Memory,
    OutOfMemory,
    Rank,
    ServerArgs,
)

# Reasons: docs/decisions.md, "Constants by name".
SURVIVAL_SECONDS = 2.0
ANSWER_SECONDS = 5.0
DECIDE_SECONDS = 30.0
LATE_SECONDS = 60.0
START_SECONDS = 1800.0
ASK_SECONDS = 1.0
MOST_WAITING = 256

_HANGS: tuple[LivenessKind, ...] = ("watchdog_timeout", "health_check_failed")
FATAL: tuple[LivenessKind, ...] = (*ENDS, *_HANGS, "draining")
Fatal: TypeAlias = "OutOfMemory | Liveness"
StartLine: TypeAlias = "ServerArgs | KvPool | Memory | Limits | Liveness"
Confirmed: TypeAlias = "list[tuple[float, Fatal | StartLine]]"
"""What counts now, in the order of the log, with the time at which each line was read."""


@dataclass(slots=True)
class _UnconfirmedEvent:
    """A line that waits."""

    at: float
    event: Fatal | ServerArgs
    asked: bool  # the server answered when the line was read
    before: float | None = None  # its progress at the last answer before
    base: float | None = None  # its progress at the first answer afterwards

    @property
    def what(self) -> str:
        """What happened as `Liveness` names it; empty for a start and for an out-of-memory failure."""
        return self.event.what if isinstance(self.event, Liveness) else ""

    def judge(self, now: float, progress: float | None, *, busy: bool) -> bool | None:
        """Return what an answer of the server shows: the line is true, it is not, or nothing yet."""
        if now < self.at:
            return None
        if self.before is not None and progress is not None:
            if progress < self.before:
                return True  # its counters began again between two scrapes
            if self.what in _HANGS and busy and progress == self.before:
                return True
        moved = self.base is not None and progress is not None and progress > self.base
        if self.base is None:
            self.base = progress or 0.0
        waited = now - self.at
        if waited <= SURVIVAL_SECONDS:
            return None
        if (moved and self.what != "draining") or (self.what in _HANGS and not busy):
            return False
        return busy and not moved if waited > DECIDE_SECONDS else None

    def is_refuted_by(self, rank: Rank, now: float, printed: float | None) -> bool:
        """Whether a batch line of a scheduler shows that the failure did not happen."""
        if self.asked and _is_of_output(self.event):
            return False  # whether something is sent is asked of the server
        event = self.event
        if isinstance(event, Liveness) and (
            event.timely or event.what == "draining" or event.stage not in ("", "scheduler")
        ):
            return False
        return event.rank.dp in {rank.dp, None} and self._is_before(now, printed)

    def _is_before(self, now: float, printed: float | None) -> bool:
        """Whether a process with this failure would have ended by now; in a backlog the printed times decide."""
        if now - self.at > SURVIVAL_SECONDS:
            return True
        time = self.event.time
        return printed is not None and time is not None and printed - time > SURVIVAL_SECONDS

    def saved(self, now: float) -> list[Any]:
        """Return the line as plain JSON."""
        return [now - self.at, *to_json(self.event), self.asked, self.before]


class Unconfirmed:
    """The lines that wait; those refused are counted in `suspicious`."""

    def __init__(self, suspicious: Counter[str]) -> None:
        self._suspicious = suspicious
        self._fatal: list[_UnconfirmedEvent] = []
        self._start: _UnconfirmedEvent | None = None
        self._lines: list[tuple[float, StartLine]] = []  # of that start
        self._answers_since: float | None = None  # each scrape since then was answered
        self._gone_at: float | None = None  # when it was last seen to be away, or to have begun again
        self.is_gone = self._has_answered = False
        self._gone_since: float | None = None  # begin of the present outage
        self._works_on = False  # it prints batch lines although nothing answers: what answered was not the schedulers
        self._progress: float | None = None  # at the last scrape
        self._sent: float | None = None

    @property
    def wait(self) -> bool:
        """Whether anything waits."""
        return bool(self._fatal) or self._start is not None

    @property
    def start_waits(self) -> bool:
        """Whether a start waits."""
        return self._start is not None

    def _answers(self, at: float) -> bool:
        """Whether the server answered at that time; a line from before its first answer is none of this server."""
        return self._answers_since is not None and at >= self._answers_since

    def fatal(self, event: Fatal, now: float, *, sure: bool) -> bool:
        """Return whether a failure counts at once; `sure`: no raw text can be the line."""
        if self.is_gone or (sure and not self._answers(now)):
            return True
        if len(self._fatal) < MOST_WAITING:
            before = self._sent if _is_of_output(event) else self._progress
            self._fatal.append(_UnconfirmedEvent(now, event, self._answers(now), before))
        else:
            self._refuse(event)
        return False

    def start(self, event: ServerArgs, now: float, *, sure: bool) -> bool:
        """Return whether a start counts at once; another one that waits is refused."""
        is_late = self._gone_at is not None and 0 <= now - self._gone_at <= LATE_SECONDS
        self._refuse_start()
        if self.is_gone or is_late or (sure and not self._answers(now)):
            self._gone_at = None
            return True
        self._start = _UnconfirmedEvent(now, event, self._answers(now), self._progress)
        return False

    def follow(self, event: StartLine, now: float) -> Confirmed:
        """Keep a line of the start that waits; one that comes later than the start confirms it."""
        start = self._start
        assert start is not None
        if len(self._lines) >= MOST_WAITING:
            return []
        self._lines.append((now, event))
        return [] if start.asked or now - start.at < SURVIVAL_SECONDS else self._confirm_start()

    def worked(self, rank: Rank, now: float, printed: float | None) -> Confirmed:
        """Take a batch line, printed at `printed`: its scheduler had no failure some seconds ago, and is not starting."""
        if self._gone_since is not None and now - self._gone_since > SURVIVAL_SECONDS:
            self._works_on, self.is_gone, self._gone_at = True, False, None
        start = self._start
        if start is not None and not start.asked:
            if self._is_whole(start, printed):
                return self._confirm_start()
            self._refuse_start()
        self._refuse_all(lambda each: each.is_refuted_by(rank, now, printed))
        return []

    def _is_whole(self, start: _UnconfirmedEvent, printed: float | None) -> bool:
        """Whether the lines that wait are a start that was read in one piece: its stages took time, and nothing is out of order."""
        times = [start.event.time, *(line.time for _, line in self._lines), printed]
        known = [time for time in times if time is not None]
        in_order = len(known) == len(times) and known == sorted(known)
        has_limits = any(isinstance(line, Limits) for _, line in self._lines)
        return has_limits and in_order and known[-2] - known[0] >= SURVIVAL_SECONDS

    def heard(self, now: float) -> None:
        """Take an access line: the HTTP server answered, so it did not end some seconds ago."""
        self._refuse_all(
            lambda each: (
                not each.asked
                and now - each.at > ANSWER_SECONDS
                and (each.what in ENDS or isinstance(each.event, OutOfMemory))
            )
        )

    def scraped(
        self, now: float, progress: float | None, sent: float | None, *, busy: bool, restarted: bool
    ) -> Confirmed:
        """Take an answered scrape: progress of the server, of what it sends, and whether it is busy or restarted since the last one."""
        self.is_gone, self._has_answered = False, True
        self._gone_since, self._works_on = None, False
        if self._answers_since is None and progress is not None:
            self._answers_since = now
        self._progress, self._sent = progress, sent
        if restarted:
            return self._confirm_until(now)
        verdicts = {
            id(each): each.judge(now, sent if _is_of_output(each.event) else progress, busy=busy)
            for each in self._fatal
        }
        self._refuse_all(lambda each: verdicts[id(each)] is False)
        confirmed = self._take(lambda each: verdicts[id(each)] is True)
        start = self._start
        verdict = start.judge(now, progress, busy=False) if start is not None and start.asked else None
        if verdict is False:
            self._refuse_start()
        return [*confirmed, *self._confirm_start()] if verdict else confirmed

    def lost(self, now: float, *, gone: bool) -> Confirmed:
        """Take a failed scrape; `gone`: nothing answers at the address."""
        self._answers_since = None
        if not gone or not self._has_answered or self._works_on:
            return []
        self.is_gone = True
        self._gone_since = now if self._gone_since is None else self._gone_since
        return self._confirm_until(now)

    def tick(self, now: float) -> Confirmed:
        """Decide on what waited long enough without any answer."""
        confirmed = self._take(lambda each: now - each.at > DECIDE_SECONDS and each.base is None)
        start = self._start
        if start is None:
            return confirmed
        if start.base is None and start.asked and now - start.at > DECIDE_SECONDS:
            return [*confirmed, *self._confirm_start()]
        if now - start.at > START_SECONDS:
            self._refuse_start()
        return confirmed

    def settle(self) -> Confirmed:
        """Confirm what still waits, unless the server has answered since: the log has ended."""
        self._refuse_all(lambda each: each.base is not None and each.what != "draining")
        if self._start is not None and self._start.base is not None:
            self._refuse_start()
        return [*self._take(lambda _: True), *self._confirm_start()]

    def restarted(self, now: float) -> Confirmed:
        """Confirm the failures up to `now`: the server has started again, so they ended it; later ones are dropped."""
        confirmed = self._take(lambda each: each.at <= now)
        self._fatal = []
        return confirmed

    def _confirm_until(self, now: float) -> Confirmed:
        """Confirm all that was read up to `now`: the server was away, or has begun again."""
        self._gone_at = None if self.start_waits else now
        return [*self._take(lambda each: each.at <= now), *self._confirm_start()]

    def _take(self, is_due: Callable[[_UnconfirmedEvent], bool]) -> Confirmed:
        """Remove and return the failures that are due."""
        due = [each for each in self._fatal if is_due(each)]
        if due:
            self._fatal = [each for each in self._fatal if all(each is not other for other in due)]
        return [(each.at, each.event) for each in due]

    def _confirm_start(self) -> Confirmed:
        if self._start is None:
            return []
        confirmed: Confirmed = [(self._start.at, self._start.event), *self._lines]
        self._start, self._lines = None, []
        return confirmed

    def _refuse_all(self, is_refuted: Callable[[_UnconfirmedEvent], bool]) -> None:
        for _, event in self._take(is_refuted):
            self._refuse(event)

    def _refuse(self, event: Fatal | StartLine) -> None:
        self._suspicious["out_of_memory" if isinstance(event, OutOfMemory) else "startup"] += 1

    def _refuse_start(self) -> None:
        if self._start is not None:
            self._suspicious["startup"] += 1 + len(self._lines)
            self._start, self._lines = None, []

    def saved(self, now: float) -> dict[str, Any]:
        """Return what waits as plain JSON: how long ago each line was read, what it is, and the progress of the server before it."""
        start = [] if self._start is None else [self._start]
        return {
            "failures": [each.saved(now) for each in self._fatal],
            "start": [each.saved(now) for each in start],
            "lines": [[now - at, *to_json(line)] for at, line in self._lines],
        }

    def restore(self, saved: object, now: float) -> None:
        """Go on from what `saved` returned; what cannot be read is left out."""
        document = saved if isinstance(saved, dict) else {}
        self._fatal += [
            each for each in _waiting(document.get("failures"), now) if not isinstance(each.event, ServerArgs)
        ]
        starts = [each for each in _waiting(document.get("start"), now) if isinstance(each.event, ServerArgs)]
        if not starts:
            return
        self._start = starts[-1]
        read = ((entry[0], from_json(*entry[1:])) for entry in _entries(document.get("lines")) if len(entry) == 3)
        lines = ((now - age, line) for age, line in read if line is not None and not isinstance(line, OutOfMemory))
        self._lines = list(lines)


def _is_of_output(event: Fatal | ServerArgs) -> bool:
    return isinstance(event, Liveness) and (event.what == "health_check_failed" or event.stage not in ("", "scheduler"))


def _waiting(saved: object, now: float) -> Iterator[_UnconfirmedEvent]:
    for entry in _entries(saved):
        event = from_json(*entry[1:3]) if len(entry) == 5 else None
        if event is not None and not isinstance(event, (KvPool, Memory, Limits)):
            before = float(entry[4]) if is_figure(entry[4]) else None
            yield _UnconfirmedEvent(now - entry[0], event, entry[3] is True, before)


def _entries(saved: object) -> list[list[Any]]:
    entries = saved[:MOST_WAITING] if isinstance(saved, list) else []
    return [entry for entry in entries if isinstance(entry, list) and entry and is_figure(entry[0])]
