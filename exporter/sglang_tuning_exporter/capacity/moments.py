"""Sums over decode steps as SGLang counts them: added, subtracted, cut into windows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import NamedTuple


class StepSums(NamedTuple):
    """Sums over decode steps: steps, batch, seconds, batch squared, batch x seconds, generated tokens."""

    steps: float = 0.0
    batch: float = 0.0
    seconds: float = 0.0
    batch_squared: float = 0.0
    batch_seconds: float = 0.0
    tokens: float = 0.0

    @classmethod
    def of_line(cls, batch: float, seconds: float, tokens_per_request: float = 1.0) -> StepSums:
        """Return the mean step of a decode line as one step."""
        return cls(1.0, batch, seconds, batch * batch, batch * seconds, batch * tokens_per_request)

    def minus(self, earlier: StepSums) -> StepSums:
        """Return the sums since `earlier`."""
        return StepSums(*(mine - theirs for mine, theirs in zip(self, earlier, strict=True)))

    @property
    def are_possible(self) -> bool:
        """Whether steps can have these sums: no sum and no variance is negative."""
        if not all(isfinite(each) and each >= 0 for each in self):
            return False
        # Large sums have a relative rounding error.
        return self.batch * self.batch <= self.batch_squared * self.steps * (1 + 1e-9)

    @property
    def mean_batch(self) -> float:
        """Mean requests per step; needs at least one step."""
        return self.batch / self.steps

    @property
    def mean_seconds(self) -> float:
        """Mean seconds of a step; needs at least one step."""
        return self.seconds / self.steps

    @property
    def spread(self) -> float:
        """Sum of squared deviations of the batch from its mean."""
        return max(self.batch_squared - self.batch * self.batch / self.steps, 0.0) if self.steps else 0.0

    @property
    def joint_spread(self) -> float:
        """Sum of the products of the deviations of batch and seconds from their means."""
        return self.batch_seconds - self.batch * self.seconds / self.steps if self.steps else 0.0


NONE = StepSums()


def total(parts: Iterable[StepSums]) -> StepSums:
    """Return the sum of all."""
    # Unrolled for speed: a fit needs some hundred sums, and a report fits at each evaluation of the alerts.
    steps = batch = seconds = batch_squared = batch_seconds = tokens = 0.0
    for part in parts:
        steps += part[0]
        batch += part[1]
        seconds += part[2]
        batch_squared += part[3]
        batch_seconds += part[4]
        tokens += part[5]
    return StepSums(steps, batch, seconds, batch_squared, batch_seconds, tokens)


def windows(parts: Sequence[StepSums], most: int) -> list[StepSums]:
    """Return consecutive parts as at most `most` windows of about equally many steps; parts without steps are left out."""
    steps = sum([part[0] for part in parts])
    found: list[StepSums] = []
    begin, seen = 0, 0.0
    for place, part in enumerate(parts):
        if not part[0]:
            continue
        seen += part[0]
        if seen >= steps * (len(found) + 1) / most:
            found.append(total(each for each in parts[begin : place + 1] if each[0]))
            begin = place + 1
    last = total(each for each in parts[begin:] if each[0])
    if last.steps:
        found.append(last)
    return found[:most]
