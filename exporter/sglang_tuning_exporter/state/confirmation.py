"""Failures and starts that wait for what must follow them. Pure; times are seconds on the caller's clock.

SGLang prints words of requests and of models raw, line ends included, so any line of a server that has served can be somebody else's.
A server that had a fatal failure ends, and one that starts is not there for a while. So such a line is a claim until that is seen:

- The server answers scrapes: it is asked again. It refuses the connection, or its counters began again: believed. It goes on working: refused.
- Only the log tells: a line that stands behind nothing raw is believed at once. Any other one waits. A batch line of its scheduler refuses it,
  and silence bears it out. A start is borne out by its own next lines, when they come later than it.

A claim moves nothing while it waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from sglang_tuning_exporter.sglang.event_json import is_figure, packed, unpacked
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

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

# A process that had a fatal failure prints nothing so long afterwards; one that starts takes longer than this.
SURVIVAL_SECONDS = 2.0
# Its HTTP server may answer for a moment longer.
ANSWER_SECONDS = 5.0
# A server that still answers so long after its end was told of did not end; one that nobody heard of did.
DECIDE_SECONDS = 30.0
# The log tells of a start so long at most after the scrapes did.
LATE_SECONDS = 60.0
# The lines of a start may come so late after its arguments.
START_SECONDS = 1800.0
# Between two scrapes of our own while something waits.
ASK_SECONDS = 1.0
MOST_CLAIMS = 256

_HANGS: tuple[LivenessKind, ...] = ("watchdog_timeout", "health_check_failed")
FATAL: tuple[LivenessKind, ...] = (*ENDS, *_HANGS, "draining")
Fatal: TypeAlias = "OutOfMemory | Liveness"
StartLine: TypeAlias = "ServerArgs | KvPool | Memory | Limits | Liveness"
Confirmed: TypeAlias = "list[tuple[float, Fatal | StartLine]]"
"""What is believed now, in the order of the log, with the time at which each was read."""


@dataclass(slots=True)
class _Claim:
    at: float
    event: Fatal | ServerArgs
    asked: bool  # the server answered when it was read
    before: float | None = None  # what it had worked when it last answered before
    base: float | None = None  # and when it first answered afterwards


class Unconfirmed:
    """What waits. Refused claims are counted in `suspicious`."""

    def __init__(self, suspicious: Counter[str]) -> None:
        self._suspicious = suspicious
        self._fatal: list[_Claim] = []
        self._start: _Claim | None = None
        self._lines: list[tuple[float, StartLine]] = []  # of that start
        self._answers_since: float | None = None  # each scrape since then was answered
        self._gone_at: float | None = None  # when it was last seen to be away, or to have begun again
        self._is_gone = False
        self._has_answered = False
        self._worked: float | None = None  # at the last scrape
        self._sent: float | None = None

    @property
    def wait(self) -> bool:
        """Whether anything waits."""
        return bool(self._fatal) or self._start is not None

    @property
    def start_waits(self) -> bool:
        """Whether a start does."""
        return self._start is not None

    def _answers(self, at: float) -> bool:
        """Whether the server answered at that time: lines of before its first answer are none of its business."""
        return self._answers_since is not None and at >= self._answers_since

    def fatal(self, event: Fatal, now: float, *, sure: bool) -> bool:
        """Whether it is believed at once; `sure`: nothing raw can have produced it."""
        if self._is_gone or (sure and not self._answers(now)):
            return True
        if len(self._fatal) < MOST_CLAIMS:
            before = self._sent if _is_of_output(event) else self._worked
            self._fatal.append(_Claim(now, event, self._answers(now), before))
        else:
            self._refuse(event)
        return False

    def start(self, event: ServerArgs, now: float, *, sure: bool) -> bool:
        """Whether a start is believed at once. Another one that waits is given up."""
        late = self._gone_at is not None and 0 <= now - self._gone_at <= LATE_SECONDS
        if self._is_gone or late or (sure and not self._answers(now)):
            self._give_up_start()
            self._gone_at = None
            return True
        self._give_up_start()
        self._start = _Claim(now, event, self._answers(now), self._worked)
        return False

    def follow(self, event: StartLine, now: float) -> Confirmed:
        """Keep a line of the start that waits; it bears the start out when it comes later than that."""
        start = self._start
        assert start is not None
        if len(self._lines) >= MOST_CLAIMS:
            return []
        self._lines.append((now, event))
        return [] if start.asked or now - start.at < SURVIVAL_SECONDS else self._bear_out_start()

    def worked(self, rank: Rank, now: float, printed: float | None) -> Confirmed:
        """A batch line: its scheduler had no failure some seconds ago, and is not starting. `printed` is the line's own time."""
        if self._start is not None and not self._start.asked:
            if self._is_whole_start(printed):
                return self._bear_out_start()
            self._give_up_start()
        kept = []
        for claim in self._fatal:
            others = claim.asked and _is_of_output(claim.event)  # what is given out is asked of the server
            if not others and _concerns(claim.event, rank) and _later(claim, now, printed):
                self._refuse(claim.event)
            else:
                kept.append(claim)
        self._fatal = kept
        return []

    def _is_whole_start(self, printed: float | None) -> bool:
        """Whether the lines that wait are a start that was read in one piece: its stages took time, and nothing was printed before it ended."""
        start = self._start
        assert start is not None
        times = [start.event.time, *(line.time for _, line in self._lines), printed]
        told = [time for time in times if time is not None]
        in_order = len(told) == len(times) and told == sorted(told)
        limits = any(isinstance(line, Limits) for _, line in self._lines)
        return limits and in_order and told[-1] - told[0] >= SURVIVAL_SECONDS

    def heard(self, now: float) -> None:
        """The HTTP server has answered somebody: it did not end some seconds ago."""
        kept = []
        for claim in self._fatal:
            if not claim.asked and now - claim.at > ANSWER_SECONDS and _is_end(claim.event):
                self._refuse(claim.event)
            else:
                kept.append(claim)
        self._fatal = kept

    def scraped(
        self, now: float, progress: float | None, sent: float | None, *, busy: bool, restarted: bool
    ) -> Confirmed:
        """The server answered a scrape: it has worked `progress`, given out `sent`, may be `busy`, or has `restarted` since the last one."""
        self._is_gone, self._has_answered = False, True
        if self._answers_since is None and progress is not None:
            self._answers_since = now
        self._worked, self._sent = progress, sent
        if restarted:
            waits = self.start_waits
            believed = self._bear_out(now)
            self._gone_at = None if waits else now
            return believed
        borne_out: Confirmed = []
        kept = []
        for claim in self._fatal:
            verdict = _verdict_on(claim, now, sent if _is_of_output(claim.event) else progress, busy=busy)
            if verdict is None:
                kept.append(claim)
            elif verdict:
                borne_out.append((claim.at, claim.event))
            else:
                self._refuse(claim.event)
        self._fatal = kept
        start = self._start
        verdict = _verdict_on(start, now, progress, busy=False) if start is not None and start.asked else None
        if verdict is False:
            self._give_up_start()
        return [*borne_out, *self._bear_out_start()] if verdict else borne_out

    def lost(self, now: float, *, gone: bool) -> Confirmed:
        """A scrape failed; `gone`: nobody is there to answer."""
        self._answers_since = None
        if not gone or not self._has_answered:
            return []
        self._is_gone = True
        waits = self.start_waits
        believed = self._bear_out(now)
        self._gone_at = None if waits else now
        return believed

    def tick(self, now: float) -> Confirmed:
        """Decide what waited long enough: of a server that was not heard of any more."""
        if not self.wait:
            return []
        due = [claim for claim in self._fatal if now - claim.at > DECIDE_SECONDS and claim.base is None]
        self._fatal = [claim for claim in self._fatal if all(claim is not each for each in due)]
        found: Confirmed = [(claim.at, claim.event) for claim in due]
        start = self._start
        if start is not None and start.base is None and start.asked and now - start.at > DECIDE_SECONDS:
            return [*found, *self._bear_out_start()]
        if start is not None and now - start.at > START_SECONDS:
            self._give_up_start()
        return found

    def settle(self) -> Confirmed:
        """Believe what still waits, but of what the server has answered since: the log has ended and nothing contradicts the rest."""
        for claim in self._fatal:
            if claim.base is not None and not _is_draining(claim.event):
                self._refuse(claim.event)
        self._fatal = [claim for claim in self._fatal if claim.base is None or _is_draining(claim.event)]
        if self._start is not None and self._start.base is not None:
            self._give_up_start()
        return self._bear_out(None)

    def restarted(self, now: float) -> Confirmed:
        """The server has started anew, so whatever ended it before was so."""
        found: Confirmed = [(claim.at, claim.event) for claim in self._fatal if claim.at <= now]
        self._fatal = []
        return found

    def _bear_out(self, now: float | None) -> Confirmed:
        """Believe all that was read until `now`."""
        due = [claim for claim in self._fatal if now is None or claim.at <= now]
        self._fatal = [claim for claim in self._fatal if all(claim is not each for each in due)]
        found: Confirmed = [(claim.at, claim.event) for claim in due]
        return found if self._start is None else [*found, *self._bear_out_start()]

    def _bear_out_start(self) -> Confirmed:
        assert self._start is not None
        found: Confirmed = [(self._start.at, self._start.event), *self._lines]
        self._start, self._lines = None, []
        return found

    def _give_up_start(self) -> None:
        if self._start is not None:
            self._suspicious["startup"] += 1 + len(self._lines)
            self._start, self._lines = None, []

    def _refuse(self, event: Fatal | ServerArgs) -> None:
        self._suspicious["out_of_memory" if isinstance(event, OutOfMemory) else "startup"] += 1

    def saved(self, now: float) -> dict[str, Any]:
        """Give what waits, as plain JSON: how long ago each was read, what it is, and what the server had worked before."""
        start = [] if self._start is None else [self._start]
        return {
            "failures": [_told(now, claim) for claim in self._fatal],
            "start": [_told(now, claim) for claim in start],
            "lines": [[now - at, *packed(line)] for at, line in self._lines],
        }

    def restore(self, saved: object, now: float) -> None:
        """Go on from what `saved` gave; what cannot be read is left out."""
        document = saved if isinstance(saved, dict) else {}
        for event, claim in _claims(document.get("failures"), now):
            if isinstance(event, (OutOfMemory, Liveness)):
                self._fatal.append(claim)
        for event, claim in _claims(document.get("start"), now):
            if isinstance(event, ServerArgs):
                self._start, self._lines = claim, []
        for entry in _entries(document.get("lines")) if self.start_waits else ():
            line = unpacked(*entry[1:]) if len(entry) == 3 else None
            if line is not None and not isinstance(line, OutOfMemory):
                self._lines.append((now - entry[0], line))


def _verdict_on(claim: _Claim, now: float, progress: float | None, *, busy: bool) -> bool | None:
    """What an answer says of a claim: it is so, it is not, or nothing yet."""
    if now < claim.at:
        return None
    if claim.before is not None and progress is not None and progress < claim.before:
        return True  # its counters began again, while nobody looked
    hangs = isinstance(claim.event, Liveness) and claim.event.what in _HANGS
    if hangs and busy and claim.before is not None and progress == claim.before:
        return True
    moved = claim.base is not None and progress is not None and progress > claim.base
    if claim.base is None:
        claim.base = progress or 0.0
    if now - claim.at <= SURVIVAL_SECONDS:
        return None
    if (moved and not _is_draining(claim.event)) or (hangs and not busy):
        return False
    return busy and not moved if now - claim.at > DECIDE_SECONDS else None


def _is_draining(event: Fatal | ServerArgs) -> bool:
    """Whether it only tells that the server is going to end: it works on until then."""
    return isinstance(event, Liveness) and event.what == "draining"


def _is_end(event: Fatal | ServerArgs) -> bool:
    return isinstance(event, OutOfMemory) or (isinstance(event, Liveness) and event.what in ENDS)


def _is_of_output(event: Fatal | ServerArgs) -> bool:
    """Whether it tells that nothing is given out, whatever the scheduler does."""
    return isinstance(event, Liveness) and (event.what == "health_check_failed" or event.stage not in ("", "scheduler"))


def _told(now: float, claim: _Claim) -> list[Any]:
    return [now - claim.at, *packed(claim.event), claim.asked, claim.before]


def _claims(saved: object, now: float) -> Iterator[tuple[Fatal | StartLine, _Claim]]:
    for entry in _entries(saved):
        event = unpacked(*entry[1:3]) if len(entry) == 5 else None
        if event is not None and not isinstance(event, (KvPool, Memory, Limits)):
            before = float(entry[4]) if is_figure(entry[4]) else None
            yield event, _Claim(now - entry[0], event, entry[3] is True, before)


def _entries(saved: object) -> list[list[Any]]:
    entries = saved[:MOST_CLAIMS] if isinstance(saved, list) else []
    return [entry for entry in entries if isinstance(entry, list) and entry and is_figure(entry[0])]


def _concerns(event: Fatal | ServerArgs, rank: Rank) -> bool:
    """Whether that scheduler's work speaks against a failure: not where it is another one's, or the detokenizer's."""
    if isinstance(event, Liveness) and (
        event.timely or event.what == "draining" or event.stage not in ("", "scheduler")
    ):
        return False
    return event.rank.dp in {rank.dp, None}


def _later(claim: _Claim, now: float, printed: float | None) -> bool:
    """Whether `now` is so long after a failure that a process which had it would be gone.

    Read from a backlog, both arrive at one moment: then the printed times tell.
    """
    if now - claim.at > SURVIVAL_SECONDS:
        return True
    time = claim.event.time
    return printed is not None and time is not None and printed - time > SURVIVAL_SECONDS
