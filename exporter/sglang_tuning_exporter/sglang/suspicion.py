"""Which lines somebody else's text could have put into the log.

Some of SGLang's messages hold words of others raw (CENSUS §5): the name of a tool that the model made up, a request's
id. A newline in them ends the line, and what follows can look like any line. So whatever comes soon after such a
message is suspect, and so is a scheduler's line whose prefix has ranks although this server's have none, or the other
way round. Suspect lines are still events: whoever takes them asks for a second witness.

This makes forging hard, not impossible: a text with more than `LINES` lines of its own and times that fit gets past.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from sglang_tuning_exporter.sglang.events import Rank

Kind = Literal["decode", "prefill", "retraction", "out_of_memory"]
Shape: TypeAlias = tuple[bool, bool, bool]

# Both must have passed: the printed times behind such a message may be forged like the rest, and so may the lines.
LINES = 64
SECONDS = 2.0
_LINES_AT_MOST = 4096  # where the clock was put back, or no time is printed any more
_LOOKED_AT = 16_384

_SINK = re.compile(
    rb"Model attempted to call undefined function:|Error in detect_and_parse:|Req Time Stats\(rid=|[^\n]*?\bReq\(rid="
)


class Suspicion:
    """Follows one log line by line. `counts` are suspect events by kind."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {"decode": 0, "prefill": 0, "retraction": 0, "out_of_memory": 0}
        self.active = False  # a raw message was printed not long ago
        self._line = 0
        self._time: float | None = None
        self._shapes: set[Shape] = set()

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

    def restart(self) -> bool:
        """Forget which ranks the server has, unless the line that says so could be forged; say whether that was done."""
        if self.active:
            return False
        self._shapes.clear()
        return True

    def trust(self, rank: Rank) -> None:
        """Learn from a start-up line which ranks stand in this server's prefixes."""
        if not self.active:
            self._shapes.add(_shape(rank))

    def fits(self, rank: Rank) -> bool:
        """Say whether a prefix of this shape has been seen; the first batch line of a log is believed."""
        if not self._shapes:
            self.trust(rank)
            return True
        return _shape(rank) in self._shapes

    def doubts(self, kind: Kind, rank: Rank, *, prefixed: bool = True) -> bool:
        """Say whether an event is suspect, and count it if so. What has no prefix has no ranks to be wrong about."""
        suspect = self.active or (prefixed and bool(self._shapes) and _shape(rank) not in self._shapes)
        self.counts[kind] += suspect
        return suspect


def _shape(rank: Rank) -> Shape:
    return rank.dp is not None, rank.tp is not None, rank.pp is not None
