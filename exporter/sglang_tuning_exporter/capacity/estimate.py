"""A figure with the interval in which it lies, and how intervals are found. Pure."""

from __future__ import annotations

from math import fsum, isfinite, sqrt
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

# Student's t for a two-sided interval of 95 %, by degrees of freedom.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
_T_MANY = 1.96
# Standard error of a figure measured some minutes later, relative to it: the machine and the mix of requests have changed by then, which
# windows of the same ten minutes cannot show (docs/capacity.md).
BETWEEN = 0.07


class Estimate(NamedTuple):
    """A figure, and the ends of its interval of 95 %."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval, relative to the figure."""
        return (self.high - self.low) / 2 / abs(self.value) if self.value else float("inf")

    @property
    def later(self) -> Estimate:
        """The same figure as a prediction: the interval in which it is measured some minutes later."""
        value, drift = self.value, _T_MANY * BETWEEN * self.value
        low, high = sqrt((value - self.low) ** 2 + drift**2), sqrt((self.high - value) ** 2 + drift**2)
        return Estimate(value, max(value - low, 0.0), value + high)

    def times(self, factor: float) -> Estimate:
        """Return the figure in another unit; `factor` is positive."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


def student(freedom: int) -> float:
    """Return the factor from a standard error to half an interval of 95 %."""
    return _T[freedom - 1] if freedom <= len(_T) else _T_MANY


def jackknife(value: float, without: Sequence[float]) -> Estimate | None:
    """Return `value` with the interval that the estimates without one window each give; None below two windows.

    Steps that follow one another are alike, so single steps would give an interval that is far too narrow.
    """
    windows = len(without)
    if windows < 2 or not all(map(isfinite, (value, *without))):
        return None
    mean = fsum(without) / windows
    error = sqrt((windows - 1) / windows * fsum((each - mean) ** 2 for each in without))
    half = student(windows - 1) * error
    return Estimate(value, value - half, value + half)
