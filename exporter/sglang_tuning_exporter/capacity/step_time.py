"""The time of a decode step by its batch: seconds = fixed + per request x batch, from sums over steps as SGLang counts them. Pure.

SGLang sums no squared seconds, so residuals are unknown, and intervals come from the spread over windows. No line is given, with the
reason, where the batch hardly varied, where the slope or the intercept is not positive, and where windows disagree. The mean step
remains. Values and reasons: docs/capacity.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import fsum, isfinite, log2, sqrt
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


MOST_WINDOWS, LEAST_WINDOWS = 10, 4
LEAST_STEPS = 200
LEAST_LINES = 40  # of a log
# Standard deviation of the batch: below it, any change of the machine's speed would give any slope.
LEAST_DEVIATION, LEAST_DEVIATION_SHARE = 0.3, 0.05
# Half the slope's interval, relative to the slope.
MOST_HALF_WIDTH = 0.6
# Between the mean step and an earlier line at the same batch: above it the earlier line does not describe this server.
MOST_LINE_ERROR = 0.25
# For each doubling beyond the batches seen: steps of a real engine grew faster than the line.
GROWTH_BEYOND_SEEN = 0.1
# Share of the batch's spread within windows from which on the windows share a slope: a slowdown between two of them does not tilt it.
SPREAD_WITHIN_WINDOWS = 0.5


@dataclass(frozen=True, slots=True)
class StepLine:
    """A fitted line: seconds = fixed + per_request x batch."""

    fixed: Estimate
    per_request: Estimate


@dataclass(frozen=True, slots=True)
class StepTime:
    """The mean step at the mean batch, and the line where one could be fitted; `refused` is why there is none."""

    steps: float
    batch: float
    deviation: float
    seconds: Estimate
    tokens_per_request: float  # per step: 1 without speculative decoding
    line: StepLine | None = None
    refused: str = ""
    source: str = "v1_loads"

    @property
    def largest_seen(self) -> float:
        """The largest batch seen often: mean plus two standard deviations."""
        return self.batch + 2 * self.deviation

    @property
    def smallest_seen(self) -> float:
        """The smallest batch seen often: mean less two standard deviations, at least one."""
        return max(self.batch - 2 * self.deviation, 1.0)

    def with_line_of(self, earlier: StepTime) -> StepTime:
        """Return this step time with the line of an earlier fit of the same server, if the present mean step lies on it."""
        predicted = None if self.line is not None else earlier.at(self.batch)
        if predicted is None or abs(self.seconds.value / predicted.value - 1.0) > MOST_LINE_ERROR:
            return self
        return replace(self, line=earlier.line, refused="")

    def at(self, batch: float) -> Estimate | None:
        """Return the seconds of a step of `batch` requests; None where unknown, or where its interval reaches zero.

        The interval grows with the distance from the batches seen.
        """
        if batch <= 0:
            return None
        away = batch - self.batch
        if self.line is None:
            return self.seconds if abs(away) <= max(self.deviation, 0.5) and self.seconds.low > 0 else None
        slope = self.line.per_request
        value = self.seconds.value + slope.value * away
        own, of_slope = (self.seconds.high - self.seconds.low) / 2, (slope.high - slope.low) / 2 * away
        half = sqrt(own * own + of_slope * of_slope)
        beyond = max(log2(batch / self.largest_seen), 0.0)
        low, high = value - half, value * (1 + GROWTH_BEYOND_SEEN * beyond) + half
        return Estimate(value, low, high) if low > 0 else None


def fit(parts: Sequence[StepSums], *, least: float = LEAST_STEPS, source: str = "v1_loads") -> StepTime | None:
    """Return the step time from the moments of consecutive intervals; None where there are too few steps."""
    together = total(parts)
    cut = windows(parts, MOST_WINDOWS)
    if together.steps < least or len(cut) < LEAST_WINDOWS or not together.seconds or not together.batch:
        return None
    seconds = _estimated(cut, lambda each: total(each).mean_seconds)
    if seconds is None:
        return None
    line, refused = _line(together, cut)
    return StepTime(
        together.steps,
        together.mean_batch,
        sqrt(together.spread / together.steps),
        seconds,
        together.tokens / together.batch,
        line,
        refused,
        source,
    )


def _line(together: StepSums, cut: Sequence[StepSums]) -> tuple[StepLine | None, str]:
    deviation = sqrt(together.spread / together.steps)
    if deviation < max(LEAST_DEVIATION, LEAST_DEVIATION_SHARE * together.mean_batch):
        return None, f"the batch hardly varied ({together.mean_batch:.1f} ± {deviation:.2f} requests)"
    within = sum(window.spread for window in cut)
    slope = _slope_within if within >= SPREAD_WITHIN_WINDOWS * together.spread else _slope_overall
    per_request, fixed = _estimated(cut, slope), _estimated(cut, lambda each: _intercept(each, slope))
    if per_request is None or fixed is None:
        return None, "the batch varied in too few windows"
    if per_request.value <= 0:
        ms = 1e3 * per_request.value
        return None, f"larger batches were not slower ({ms:.2f} ms a request): something else slowed it down"
    if per_request.half_width > MOST_HALF_WIDTH:
        return None, f"its windows disagree (± {100 * per_request.half_width:.0f} % of the slope)"
    if fixed.low <= 0:
        ms = 1e3 * fixed.value
        return None, f"its start may lie below zero ({ms:.2f} ms): something else than the batch slowed it down"
    return StepLine(fixed, per_request), ""


def _slope_within(cut: Sequence[StepSums]) -> float:
    """Return the slope that all windows share, each with its own intercept."""
    spread = sum(window.spread for window in cut)
    return sum(window.joint_spread for window in cut) / spread if spread else float("nan")


def _slope_overall(cut: Sequence[StepSums]) -> float:
    together = total(cut)
    return together.joint_spread / together.spread if together.spread else float("nan")


def _intercept(cut: Sequence[StepSums], slope: Callable[[Sequence[StepSums]], float]) -> float:
    together = total(cut)
    return together.mean_seconds - slope(cut) * together.mean_batch


def _estimated(cut: Sequence[StepSums], figure: Callable[[Sequence[StepSums]], float]) -> Estimate | None:
    """Return a figure of the windows with its jackknife interval."""
    without = [figure([*cut[:left_out], *cut[left_out + 1 :]]) for left_out in range(len(cut))]
    return jackknife(figure(cut), without)
