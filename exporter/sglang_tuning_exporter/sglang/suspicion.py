"""Which lines somebody else's text could have put into the log.

Some of SGLang's messages hold words of others raw: the name of a tool that the model made up, a request's
id. A newline in them ends the line, and what follows can look like any line. So whatever comes soon after such a
message is suspect. Suspect lines are still events: whoever takes them asks for a second witness.

A line of time stats that is whole (its own words follow the id) has been ended by nobody else, and makes nothing
suspect: with `--enable-request-time-stats-logging` every request prints one.

This makes forging hard, not impossible: a text with more than `LINES` lines of its own and times that fit gets past.
"""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal["decode", "prefill", "retraction", "out_of_memory", "startup"]

# Both must have passed: the printed times behind such a message may be forged like the rest, and so may the lines.
LINES = 64
SECONDS = 2.0
_LINES_AT_MOST = 4096  # where the clock was put back, or no time is printed any more
_LOOKED_AT = 16_384

_SINK = re.compile(
    rb"Model attempted to call undefined function:|Error in detect_and_parse:"
    rb"|Req Time Stats\(rid=(?![^\n]*, input[ _]len=)|[^\n]*?\bReq\(rid="
)


class Suspicion:
    """Follows one log line by line. `counts` are suspect events by kind."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {"decode": 0, "prefill": 0, "retraction": 0, "out_of_memory": 0, "startup": 0}
        self.active = False  # a raw message was printed not long ago
        self._line = 0
        self._time: float | None = None

    def look(self, message: bytes, time: float | None, line: int) -> None:
        """See whether this message, the `line`-th of the log, holds somebody else's words raw."""
        if _SINK.match(message, 0, _LOOKED_AT):
            self.active = True
            self._line, self._time = line, time

    def move_on(self, time: float | None, line: int) -> None:
        """Come to the `line`-th line of the log, printed at `time`: perhaps the last raw message is far enough behind."""
        passed = line - self._line
        if passed <= LINES:
            return
        if self._time is None or (time is not None and time >= self._time + SECONDS) or passed > _LINES_AT_MOST:
            self.active = False

    def doubts(self, kind: Kind) -> bool:
        """Say whether an event is suspect, and count it if so."""
        self.counts[kind] += self.active
        return self.active
