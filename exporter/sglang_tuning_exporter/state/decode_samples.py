"""Decode lines whose throughput gives the time of a step: nothing else ran since the line before. Pure."""

from __future__ import annotations

from collections import deque
from math import inf

from sglang_tuning_exporter.sglang.events import DecodeBatch, PrefillBatch
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun, throughput

SAMPLE_SECONDS = 1.0  # between two samples: SGLang prints whole seconds
_KEPT = 600


class DecodeSamples:
    """Batch and tokens per second of decode lines: at most one per second, the last ten minutes of them.

    The throughput of a decode line is over the time since the line before. So a line is a sample only after a decode line with the
    same batch: otherwise that time also has prefill or requests that ended. Of the lines with one time only the first can be a
    sample, so that a run of lines gives the same samples as its lines one by one.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float, float | bytes]] = deque(maxlen=_KEPT)  # a line is read when asked for
        self._due = -inf
        self.at = -inf  # time of the last line
        self.batch = 0.0  # of the last line, 0 where that was a prefill line

    def begin(self, lines: DecodeBatch | PrefillBatch | BatchRun, at: float) -> None:
        """Add the first of the lines of a time."""
        self.at = at
        if not self.batch or at < self._due:
            return
        first: float | bytes | None = None
        if isinstance(lines, BatchRun):
            first = None if not lines.decodes else lines.first_decode_of(int(self.batch))
        elif isinstance(lines, DecodeBatch) and lines.running == self.batch:
            first = lines.generation_throughput
        if first:
            self._due = at + SAMPLE_SECONDS
            self._samples.append((at, self.batch, first))

    def since(self, begin: float) -> list[tuple[float, float]]:
        """Return batch and tokens per second of the samples from `begin` on; each line is read once."""
        for place, (at, batch, speed) in enumerate(self._samples):
            if isinstance(speed, bytes):
                self._samples[place] = (at, batch, throughput(speed))
        return [
            (batch, speed) for at, batch, speed in self._samples if at >= begin and isinstance(speed, float) and speed
        ]
