"""Decode lines whose throughput gives the time of a step: nothing else ran since the line before. Pure."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import NamedTuple

from sglang_tuning_exporter.sglang.events import DecodeBatch, PrefillBatch
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun, throughput

SAMPLE_SECONDS = 1.0  # between two samples: SGLang prints whole seconds
NEARLY_SAME = 0.1  # of the mean batch, between the ends of an interval: the mean is off by half as much at most
_KEPT = 600


class DecodeSample(NamedTuple):
    """One decode line: its time, the mean batch since the line before, tokens per second, and those of a speculative step per request."""

    at: float
    batch: float
    tokens_per_second: float
    accept_length: float | None


class DecodeSamples:
    """Samples of decode lines: at most one per second, the last ten minutes of them.

    The throughput of a decode line is over the time since the line before. So a line is a sample only after a decode line with nearly
    the same batch: otherwise that time also has prefill, or the mean batch is not known. Of the lines with one time only the first can
    be a sample, so that a run of lines gives the same samples as its lines one by one.
    """

    def __init__(self) -> None:
        # A line is read when it is asked for: until then its time and mean batch stand beside it.
        self._samples: deque[DecodeSample | tuple[float, float, bytes]] = deque(maxlen=_KEPT)
        self._due = -inf
        self.at = -inf  # time of the last line
        self.batch = 0.0  # of the last line, 0 where that was a prefill line

    def begin(self, lines: DecodeBatch | PrefillBatch | BatchRun, at: float) -> None:
        """Add the first of the lines of a time."""
        self.at = at
        if not self.batch or at < self._due:
            return
        if isinstance(lines, BatchRun):
            running, line = lines.first_decode or (0, b"")
        elif isinstance(lines, DecodeBatch) and lines.generation_throughput:
            running, line = lines.running or 0, b""
        else:
            return
        batch = (self.batch + running) / 2
        if not running or abs(self.batch - running) > NEARLY_SAME * batch:
            return
        self._due = at + SAMPLE_SECONDS
        if isinstance(lines, DecodeBatch):
            self._samples.append(DecodeSample(at, batch, lines.generation_throughput or 0.0, lines.accept_length))
        else:
            self._samples.append((at, batch, line))

    def since(self, begin: float) -> list[DecodeSample]:
        """Return the samples from `begin` on; each line is read once."""
        found = []
        for place, kept in enumerate(self._samples):
            if isinstance(kept, DecodeSample):
                sample = kept
            else:
                at, batch, line = kept
                sample = self._samples[place] = DecodeSample(at, batch, throughput(line), None)
            if sample.at >= begin and sample.tokens_per_second:
                found.append(sample)
        return found
