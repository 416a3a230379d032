"""Which events are marked: text of a client or a model was printed close before them.

SGLang prints such text raw. A newline in it ends the line, and what follows can look like any line of SGLang's. Whether it is one does not
follow from a log alone. So every line in SGLang's form counts, at once; but within `LINES` lines or `SECONDS` of printed time after a line
that can carry such text, it is marked. The rest of the program says how many of its events are, and advises nothing that only they support.

Lines that can carry text of others are the kinds in `CARRIERS`. Batch lines, access lines (their paths are percent-encoded), frames of a
traceback and all other lines in SGLang's known form carry none, and do not end the time after one that does. Between a start, or the
beginning of a log, and the first line about a request no text of others can have been printed.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglang_tuning_exporter.core.events import Event

LINES = 64
SECONDS = 2.0
MOST_LINES = 4096  # where the clock was set back, or a line has a time that never comes
CARRIERS = {
    "request": "SGLang prints a request's text in it",
    "exception": "an exception's words can quote a request",
    "glued": "other text stands before it in the same line",
    "other": "it is no known line of SGLang's",
}
OF_REQUESTS = ("decode", "prefill", "retraction", "request", "too_long", "refused", "server_error")


class Trust:
    """Marks the events of one stream, line by line."""

    def __init__(self) -> None:
        self.carrier = ""  # kind of the last line that could carry text of others
        self.carrier_line = 0  # its number
        self._carrier_time: float | None = None
        self.serves = False  # there was a line about a request since the last start

    def is_near(self, number: int, time: float | None) -> bool:
        """Whether the line with this number and time stands close behind text of others."""
        if not self.carrier:
            return False
        lines = number - self.carrier_line
        same_time = time is not None and self._carrier_time is not None and time < self._carrier_time + SECONDS
        if lines > LINES and not (same_time and lines <= MOST_LINES):
            self.carrier = ""
        return bool(self.carrier)

    def mark(self, kind: str, number: int, time: float | None, events: Iterable[Event]) -> None:
        """Mark the events of a line, and remember the line if it can carry text of others. `time`: the last one printed."""
        marked = self.is_near(number, time)
        for event in events:
            event.marked = event.marked or marked
        if kind == "arguments" and not marked:
            self.serves = False
        elif kind in OF_REQUESTS:
            self.serves = True
        if kind in CARRIERS and self.serves:
            self.carrier, self.carrier_line, self._carrier_time = kind, number, time
