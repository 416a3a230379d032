"""Decode lines whose throughput gives the time of a step: nothing else ran since the line before. Pure."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING

from sglang_tuning_exporter.sglang.events import DecodeBatch
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun

if TYPE_CHECKING:
    from sglang_tuning_exporter.sglang.events import PrefillBatch

SAMPLE_SECONDS = 1.0  # between two samples: SGLang prints whole seconds
_KEPT = 600


class DecodeSamples:
    """Batch and tokens per second of decode lines: at most one per second, the last ten minutes of them.

    The throughput of a decode line is over the time since the line before. So a line is a sample only after a decode line with the
    same batch: otherwise that time also has prefill or requests that ended. Of the lines with one time only the first can be a
    sample, so that a run of lines gives the same samples as its lines one by one.
    """

    __slots__ = ("_at", "_batch", "_due", "_samples")

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=_KEPT)
        self._batch = 0  # of the last line, if that was a decode line
        self._at = self._due = -inf

    def see(self, lines: DecodeBatch | PrefillBatch | BatchRun, at: float) -> None:
        """Add a line or a run."""
        before, is_first = self._batch, at != self._at
        self._at = at
        first: DecodeBatch | None = None
        if isinstance(lines, BatchRun):
            self._batch = lines.running if not lines.new_tokens and lines.ends_with_decode else 0
            if before and is_first and at >= self._due:
                first = lines.first_decode_of(before)
        elif isinstance(lines, DecodeBatch):
            self._batch = lines.running or 0
            if before == lines.running and is_first and at >= self._due:
                first = lines
        else:
            self._batch = 0
        if first is not None and before and first.generation_throughput:
            self._due = at + SAMPLE_SECONDS
            self._samples.append((at, before, first.generation_throughput))

    def since(self, begin: float) -> list[tuple[float, float]]:
        """Return batch and tokens per second of the samples from `begin` on."""
        return [(batch, speed) for at, batch, speed in self._samples if at >= begin]
