"""Which lines somebody else's text could have put into the log.

SGLang prints words of others raw: a request's text, the name of a tool that the model made up, what an exception says. A newline in
them ends the line, and what follows can look like any line. Which messages do so differs from release to release, so none is listed: every
line that SGLang does not print whole from figures of its own may hold such words. What comes soon after it is suspect: failures, starts,
retractions. Suspect lines are still events: whoever takes them asks for a second witness.

After messages of which it is known that they hold what a model or a client wrote (`_SINK`), which are rare, batch lines are suspect as well,
and a retraction needs more than that it may be one.

Soon is told by when lines arrive, where they are read as they are written: no text can forge that. Of a log of the past it is told by the
printed times and by the number of lines, which a text can forge.
"""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal["decode", "prefill", "retraction", "out_of_memory", "startup"]

# Both must have passed where only the text tells: the printed times behind such a message may be forged like the rest, and so may the lines.
LINES = 64
SECONDS = 2.0
# Words that may be anybody's, but of which nothing is known, are not remembered longer than this, however few lines come.
FORGET_SECONDS = 30.0
# More than the pause between two looks at a quiet log: what is read so much later was not written at once with it.
ARRIVED_SECONDS = 3.0
_LINES_AT_MOST = 4096  # where the clock was put back, or no time is printed any more
_LOOKED_AT = 16_384

_SINK = re.compile(
    rb"Model attempted to call undefined function:|Error in detect_and_parse:|Tool '|Parsed value '|Failed to parse JSON"
    rb"|Req Time Stats\(rid=(?![^\n]*, input[ _]len=)|[^\n]*?\bReq\(rid="
)


class RawLine:
    """The last line of a kind that may hold raw words."""

    __slots__ = ("arrived", "line", "time")

    def __init__(self) -> None:
        self.line: int | None = None
        self.time: float | None = None
        self.arrived: float | None = None

    def put(self, line: int, time: float | None, arrived: float | None) -> None:
        """Note the newest such line."""
        self.line, self.time, self.arrived = line, time, arrived

    def is_near(self, line: int, time: float | None, arrived: float | None) -> bool:
        """Say whether it lies so shortly before the `line`-th line that both may have been written at once."""
        if self.line is None:
            return False
        if arrived is not None and self.arrived is not None:
            near = arrived - self.arrived <= ARRIVED_SECONDS
        else:
            passed = line - self.line
            elapsed = self.time is None or (time is not None and time >= self.time + SECONDS)
            near = passed <= LINES or not (elapsed or passed > _LINES_AT_MOST)
        if not near:
            self.line = None
        return near


class Suspicion:
    """Follows one log line by line. `counts` are suspect events by kind."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {"decode": 0, "prefill": 0, "retraction": 0, "out_of_memory": 0, "startup": 0}
        self.doubtful = False  # who has written the lines that are being read is not known
        self.active = False  # a message that holds what a model wrote was printed not long ago
        self.arrived: float | None = (
            None  # when the lines that are being read came, where they are read as they are written
        )
        self._sink, self._words = RawLine(), RawLine()

    def look(self, message: bytes, time: float | None, line: int) -> None:
        """See whether this message, the `line`-th of the log, holds a model's words raw."""
        if _SINK.match(message, 0, _LOOKED_AT):
            self.active = True
            self._sink.put(line, time, self.arrived)

    def move_on(self, time: float | None, line: int) -> None:
        """Come to the `line`-th line of the log, printed at `time`: perhaps the last such message is far enough behind."""
        self.active = self._sink.is_near(line, time, self.arrived)

    def note(self, kind: str, time: float | None, line: int) -> None:
        """Note a line that SGLang does not print whole from figures of its own."""
        if kind in ("other", "traceback", "request"):
            self._words.put(line, time, self.arrived)

    def doubts(self, time: float | None, line: int) -> bool:
        """Say whether words of somebody else's may have been printed with the `line`-th line."""
        words = self._words
        if self.arrived is None and words.time is not None and time is not None and time > words.time + FORGET_SECONDS:
            words.line = None
        return self.doubtful or self.active or words.is_near(line, time, self.arrived)

    def count(self, kind: Kind, *, suspect: bool) -> bool:
        """Count an event if it is suspect, and give whether it is."""
        suspect = suspect or self.doubtful
        self.counts[kind] += suspect
        return suspect
