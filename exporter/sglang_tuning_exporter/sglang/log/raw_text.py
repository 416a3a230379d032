"""Which lines raw text of a model or a client could have produced.

SGLang prints such text raw: a request's text, the name of a tool that the model invented, the text of an exception. A newline in it ends
the line, and the next line can look like any line. Which messages do so differs between releases, so none is listed: every line that does
not consist of SGLang's own words and figures may contain raw text. Failures, starts and retractions soon after such a line are suspect.
Suspect lines are still events: the state accepts them only with other evidence.

After the few messages that are known to contain text of a model or a client (`_SINK`), batch lines are suspect as well, and a retraction
needs stronger evidence.

"Soon" is measured by the arrival of lines in a log that is followed: no text can forge that. In a log of the past it is measured by printed
times and by the number of lines, which a text can forge.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Without arrival times both must have passed, because the text after such a message can forge printed times and lines.
LINES = 64
SECONDS = 2.0
# Lines that may contain raw text are forgotten after this time, even if few lines follow.
FORGET_SECONDS = 30.0
# More than the pause between two reads of a quiet log: lines read so much later were not written together.
ARRIVED_SECONDS = 3.0
_MOST_LINES = 4096  # where the clock was set back, or no time is printed any more
_BYTES_SEARCHED = 16_384

_SINK = re.compile(
    rb"Model attempted to call undefined function:|Error in detect_and_parse:|Tool '|Parsed value '|Failed to parse JSON"
    rb"|Req Time Stats\(rid=(?![^\n]*, input[ _]len=)|[^\n]*?\bReq\(rid="
)


@dataclass(slots=True)
class RawLine:
    """The last line of a kind that may contain raw text."""

    line: int | None = None
    time: float | None = None
    arrived: float | None = None

    def is_near(self, line: int, time: float | None, arrived: float | None) -> bool:
        """Whether it is so soon before the `line`-th line that both may have been written at once."""
        if self.line is None:
            return False
        if arrived is not None and self.arrived is not None:
            near = arrived - self.arrived <= ARRIVED_SECONDS
        else:
            lines = line - self.line
            elapsed = self.time is None or (time is not None and time >= self.time + SECONDS)
            near = lines <= LINES or not (elapsed or lines > _MOST_LINES)
        if not near:
            self.line = None
        return near


class SuspectText:
    """Which lines of one log are suspect, line by line."""

    def __init__(self) -> None:
        self.doubtful = False  # it is not known which process wrote the present lines
        self.after_sink = False  # a message with text of a model was printed not long ago
        self.arrived: float | None = None  # when the present lines arrived, of a log that is followed
        self._sink, self._other_text = RawLine(), RawLine()

    @property
    def after_known_sink(self) -> bool:
        """Whether even batch lines are suspect."""
        return self.doubtful or self.after_sink

    def note_message(self, message: bytes, time: float | None, line: int) -> None:
        """Note whether this message, the `line`-th of the log, is known to contain raw text."""
        if _SINK.match(message, 0, _BYTES_SEARCHED):
            self.after_sink = True
            self._sink = RawLine(line, time, self.arrived)

    def advance_to(self, time: float | None, line: int) -> None:
        """Go on to the `line`-th line, printed at `time`: the last such message may be far enough behind."""
        self.after_sink = self._sink.is_near(line, time, self.arrived)

    def note(self, kind: str, time: float | None, line: int) -> None:
        """Note a line that may contain raw text."""
        if kind in ("other", "traceback", "request"):
            self._other_text = RawLine(line, time, self.arrived)

    def is_suspect(self, time: float | None, line: int) -> bool:
        """Whether raw text may have produced the `line`-th line."""
        words = self._other_text
        if self.arrived is None and words.time is not None and time is not None and time > words.time + FORGET_SECONDS:
            words.line = None
        return self.after_known_sink or words.is_near(line, time, self.arrived)
