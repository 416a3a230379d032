"""A figure with its 95 % interval. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, isfinite, sqrt
from typing import NamedTuple

# Student's t for a two-sided interval of 95 %, by degrees of freedom.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
_T_MANY = 1.96
# Relative standard error between a figure and its measurement some minutes later: the machine and the mix of requests change, and the
# windows of one ten-minute fit cannot show it (docs/capacity.md, "Other batches").
BETWEEN = 0.07


class Estimate(NamedTuple):
    """A figure and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval's width, relative to the figure."""
        return (self.high - self.low) / 2 / abs(self.value) if self.value else float("inf")

    @property
    def with_drift(self) -> Estimate:
        """The figure with the interval for a measurement some minutes later."""
        value, drift = self.value, _T_MANY * BETWEEN * self.value
        low, high = sqrt((value - self.low) ** 2 + drift**2), sqrt((self.high - value) ** 2 + drift**2)
        return Estimate(value, max(value - low, 0.0), value + high)

    def times(self, factor: float) -> Estimate:
        """Return the figure times a positive `factor`."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)

    def dividing(self, amount: float) -> Estimate:
        """Return `amount` over this positive figure."""
        return Estimate(amount / self.value, amount / self.high, amount / self.low)


def jackknife(value: float, without: Sequence[float]) -> Estimate | None:
    """Return `value` with its jackknife interval, from the estimates without one window each; None below two windows.

    Consecutive steps are alike, so an interval from single steps would be far too narrow.
    """
    windows = len(without)
    if windows < 2 or not all(map(isfinite, (value, *without))):
        return None
    mean = fsum(without) / windows
    error = sqrt((windows - 1) / windows * fsum((each - mean) ** 2 for each in without))
    half = (_T[windows - 2] if windows <= len(_T) + 1 else _T_MANY) * error
    return Estimate(value, value - half, value + half)
