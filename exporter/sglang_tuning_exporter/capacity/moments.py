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
        return total((self, other))

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
    # Written out: a fit asks for some hundred of these, and a report for a fit at each evaluation of the alerts.
    steps = batch = seconds = batch_squared = batch_seconds = tokens = 0.0
    for part in parts:
        steps += part[0]
        batch += part[1]
        seconds += part[2]
        batch_squared += part[3]
        batch_seconds += part[4]
        tokens += part[5]
    return Moments(steps, batch, seconds, batch_squared, batch_seconds, tokens)


def windows(parts: Sequence[Moments], most: int) -> list[Moments]:
    """Cut consecutive parts into at most `most` windows of about as many steps each; parts without steps are left out."""
    steps = sum([part[0] for part in parts])
    found: list[Moments] = []
    begin, seen = 0, 0.0
    for place, part in enumerate(parts):
        if not part[0]:
            continue
        seen += part[0]
        if seen >= steps * (len(found) + 1) / most:
            found.append(_with_steps(parts[begin : place + 1]))
            begin = place + 1
    last = _with_steps(parts[begin:])
    if last.steps:
        found.append(last)
    return found[:most]


def _with_steps(parts: Sequence[Moments]) -> Moments:
    return total(part for part in parts if part[0])
