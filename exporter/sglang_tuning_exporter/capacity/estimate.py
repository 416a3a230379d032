"""A figure with the interval in which it lies, and how intervals are found. Pure."""

from __future__ import annotations

from math import fsum, isfinite, sqrt
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

# Student's t for a two-sided interval of 95 %, by degrees of freedom.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
_T_MANY = 1.96


class Estimate(NamedTuple):
    """A figure, and the ends of its interval of 95 %."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval, relative to the figure."""
        return (self.high - self.low) / 2 / abs(self.value) if self.value else float("inf")

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
