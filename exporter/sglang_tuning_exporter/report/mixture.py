"""Whether one log has the lines of several servers, as `docker compose logs`, `kubectl logs --prefix`, `stern` and Ray write them. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.report.servers import OVERLAP_SECONDS
from sglang_tuning_exporter.sglang.clean import clean
from sglang_tuning_exporter.sglang.log.json_lines import json_of, leaves_of
from sglang_tuning_exporter.sglang.log.stamps import STAMP, stamp_seconds
from sglang_tuning_exporter.sglang.log.terminal import strip_terminal

# Reasons: docs/decisions.md, "Constants by name".
ENOUGH_LINES = 10  # batch lines of a rank in one frame
MOST_FRAMES = 64  # with more, what stands around the lines is no name
LINES_LOOKED_AT = 200  # of each of the first blocks, about
BLOCKS_LOOKED_AT = 10  # of each block after so many, a tenth of these lines
_LINE = re.compile(rb"\] (?:(?:Decode|Prefill) batch\b|(server_args=))")
_STAMP = re.compile(STAMP)
_NUMBER = re.compile(rb"(?<![\w=./-])\d+(?![\w=./-])")  # a length or a count; numbers of names are parts of words
_SHOWN = 60  # characters


@dataclass(slots=True)
class _Seen:
    """The batch lines of one rank in one frame."""

    first: float
    last: float
    lines: int = 0


class Mixture:
    """What stands around the batch lines of one log, its *frame*: one server has one for each rank at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._blocks = 0
        self.has_frames = False  # something stands around the lines
        self._ranks: dict[bytes, dict[bytes, _Seen]] = {}
        self._started: set[bytes] = set()  # the frames of starts
        self._alternate: tuple[bytes, bytes] | None = None  # two frames of one rank at the same time

    @property
    def note(self) -> str:
        """What is to be said of the log: its figures may be those of two servers together; empty otherwise."""
        return (
            ""
            if self._alternate is None
            else f"{self._name}: {self._words('may hold')}: then the figures are of both together"
        )

    def see(self, text: bytes) -> None:
        """Take some lines. Raises `UsageError` where two servers, each with its start, print at the same time."""
        first = _LINE.search(text)
        if first is None or _bracket(text, first) == text.rfind(b"\n", 0, first.start()) + 1:
            return  # SGLang's own lines, with nothing around them
        self.has_frames = True
        found = list(_LINE.finditer(text))
        most = LINES_LOOKED_AT if self._blocks < BLOCKS_LOOKED_AT else LINES_LOOKED_AT // BLOCKS_LOOKED_AT
        step = len(found) // most | 1  # odd: the lines of two servers may alternate
        self._blocks += 1
        for place, match in enumerate(found):
            if place % step and match[1] is None:
                continue
            begin, bracket = text.rfind(b"\n", 0, match.start()) + 1, _bracket(text, match)
            stamp = text[bracket + 1 : match.start()]
            moment = stamp_seconds(stamp)
            if moment is None:
                continue
            frame = _frame(text[begin : text.find(b"\n", match.end())], bracket - begin)
            if match[1] is not None:
                self._started.add(frame)
            else:
                self._add(_STAMP.sub(b"", stamp, count=1).strip(), frame, moment)
            if self._alternate is not None and self._started.issuperset(self._alternate):
                raise UsageError(
                    f"{self._name}: {self._words('holds')}; give one server's lines, for example with grep -F"
                )

    def _words(self, holds: str) -> str:
        names = " and ".join(
            repr(clean(name.decode("utf-8", "replace"))[:_SHOWN]) for name in sorted(self._alternate or ())
        )
        return f"{holds} the lines of two servers, or the same lines twice: the same rank prints batches behind {names}"

    def _add(self, rank: bytes, frame: bytes, moment: float) -> None:
        frames = self._ranks.setdefault(rank, {})
        seen = frames.get(frame)
        if seen is None:
            if len(frames) >= MOST_FRAMES:
                return
            seen = frames[frame] = _Seen(moment, moment)
        seen.last, seen.lines = max(seen.last, moment), seen.lines + 1
        if seen.lines % ENOUGH_LINES == 0 and len(frames) < MOST_FRAMES:
            self._compare(frames, frame, seen)

    def _compare(self, frames: dict[bytes, _Seen], frame: bytes, seen: _Seen) -> None:
        for other, its in frames.items():
            # Text of a request that looks like another server's line has the frame of this one around it.
            if frame.startswith(other) or other.startswith(frame) or its.lines < ENOUGH_LINES:
                continue
            if min(seen.last, its.last) - max(seen.first, its.first) > OVERLAP_SECONDS:
                self._alternate = (frame, other)


def _bracket(text: bytes, match: re.Match[bytes]) -> int:
    """Return where SGLang's prefix begins."""
    return text.rfind(b"[", 0, match.start())


def _frame(line: bytes, length: int) -> bytes:
    """Return what stands around SGLang's line, without times and counts: before it, and for JSON what else names its source."""
    entry = json_of(line) if line.startswith(b"{") else None
    around = strip_terminal(line[:length])
    if entry is not None:
        texts = ((path, leaf) for path, leaf in leaves_of(entry, ()) if isinstance(leaf, str) and "] " not in leaf)
        around = ", ".join(f"{'.'.join(map(str, path))}={leaf}" for path, leaf in texts).encode("utf-8", "replace")
    return _NUMBER.sub(b"", _STAMP.sub(b"", around)).lstrip()
