"""Decode lines that say how long a step took: those whose whole interval was decoding one batch. Pure."""

from __future__ import annotations

from collections import deque

SAMPLE_SECONDS = 1.0  # between two samples: a log prints whole seconds
_KEPT = 600
UNSTEADY = -1.0  # no batch: prompts were computed since the last decode line


class DecodeSamples:
    """Batch and tokens a second of decode lines, at most one every few seconds, the last ten minutes of them.

    A decode line's throughput is over the time since the one before. Only a line after another decode line with the same
    batch is taken: prompts computed in between, or requests that ended, are in its time as well.
    """

    __slots__ = ("_samples", "batch", "due")

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=_KEPT)
        self.batch = UNSTEADY  # of the last line, where that was a decode line
        self.due = float("-inf")

    def add(self, at: float, batch: float, tokens_per_second: float | None) -> None:
        """Take a line that qualifies."""
        if batch > 0 and tokens_per_second:
            self.due = at + SAMPLE_SECONDS
            self._samples.append((at, batch, tokens_per_second))

    def since(self, begin: float) -> list[tuple[float, float]]:
        """Return batch and tokens a second of the lines from `begin` on."""
        return [(batch, speed) for at, batch, speed in self._samples if at >= begin]
