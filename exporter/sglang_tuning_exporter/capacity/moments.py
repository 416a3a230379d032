"""Sums over decode steps, as SGLang counts them and as they can be added, subtracted and cut into windows. Pure."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Moments(NamedTuple):
    """Sums over decode steps: of one, the batch, the step's seconds, their products, and the tokens generated."""

    steps: float = 0.0
    batch: float = 0.0
    seconds: float = 0.0
    batch_squared: float = 0.0
    batch_seconds: float = 0.0
    tokens: float = 0.0

    @classmethod
    def of_line(cls, batch: float, seconds: float) -> Moments:
        """Return one decode line's mean step, counted as a single step of one token for each request."""
        return cls(1.0, batch, seconds, batch * batch, batch * seconds, batch)

    def plus(self, other: Moments) -> Moments:
        """Return both together."""
        return Moments(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def minus(self, earlier: Moments) -> Moments:
        """Return what came after `earlier`."""
        return Moments(*(mine - theirs for mine, theirs in zip(self, earlier, strict=True)))

    @property
    def are_possible(self) -> bool:
        """Whether steps can have these sums: none is negative, and no variance is."""
        if not all(isfinite(each) and each >= 0 for each in self):
            return False
        # A relative rounding error of sums that large is nothing to object to.
        return self.batch * self.batch <= self.batch_squared * self.steps * (1 + 1e-9)

    @property
    def mean_batch(self) -> float:
        """Requests in a step; there must be one."""
        return self.batch / self.steps

    @property
    def mean_seconds(self) -> float:
        """Seconds of a step; there must be one."""
        return self.seconds / self.steps

    @property
    def spread(self) -> float:
        """Sum of squared deviations of the batch from its mean."""
        return max(self.batch_squared - self.batch * self.batch / self.steps, 0.0) if self.steps else 0.0

    @property
    def joint_spread(self) -> float:
        """Sum of the products of the deviations of batch and seconds from their means."""
        return self.batch_seconds - self.batch * self.seconds / self.steps if self.steps else 0.0


NONE = Moments()


def total(parts: Iterable[Moments]) -> Moments:
    """Return all together."""
    together = NONE
    for part in parts:
        together = together.plus(part)
    return together


def windows(parts: Sequence[Moments], most: int) -> list[Moments]:
    """Cut consecutive parts into at most `most` windows of about as many steps each; parts without steps are left out."""
    steps = sum(part.steps for part in parts)
    found: list[Moments] = []
    open_window, seen = NONE, 0.0
    for part in parts:
        if not part.steps:
            continue
        open_window = open_window.plus(part)
        seen += part.steps
        if seen >= steps * (len(found) + 1) / most:
            found.append(open_window)
            open_window = NONE
    if open_window.steps:
        found.append(open_window)
    return found[:most]
