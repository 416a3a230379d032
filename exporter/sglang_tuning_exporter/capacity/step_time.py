"""The time of a decode step as a line over its batch: seconds = fixed + per request x batch. Pure.

The server counts no squared seconds, so a residual is not known: an interval comes from the spread of the estimates over
windows. A fit is refused, with the reason, where the batch hardly varied, where the line falls or starts below zero, and
where the windows disagree. The mean step at the present batch remains.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2, sqrt
from typing import TYPE_CHECKING

from sglang_tuning_exporter.capacity.estimate import Estimate, jackknife
from sglang_tuning_exporter.capacity.moments import Moments, total, windows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MOST_WINDOWS, LEAST_WINDOWS = 10, 4
LEAST_STEPS = 200
LEAST_LINES = 40  # of the log: each is the mean of some forty steps
# The batch's standard deviation: below it a line has no length, and any change of the step time gives any slope.
LEAST_DEVIATION, LEAST_DEVIATION_SHARE = 0.3, 0.05
# Half of the interval relative to the slope. Above it not even the sign is sure.
MOST_HALF_WIDTH = 0.6
# Between the mean step and an earlier fit's line at the same batch: above it the server is not the one that was fitted.
MOST_OFF = 0.25
# Of a step at a batch beyond those seen, for each doubling: on a real engine steps grew faster than the line (docs/capacity.md).
BEYOND = 0.1
# Of the batch's spread: where that much lies within windows, a machine that became slower between two of them is left out of the slope.
MOSTLY_WITHIN = 0.5


@dataclass(frozen=True, slots=True)
class Line:
    """A fitted line through the step times, each figure with its interval."""

    fixed: Estimate
    per_request: Estimate


@dataclass(frozen=True, slots=True)
class StepTime:
    """What is known of a decode step: its mean at the mean batch, and the line where one could be fitted.

    `refused` says why there is no line; empty where there is one.
    """

    steps: float
    batch: float
    deviation: float
    seconds: Estimate
    tokens_per_request: float  # in a step: 1 without speculative decoding
    line: Line | None = None
    refused: str = ""
    source: str = "v1_loads"
    line_age_seconds: float = 0.0  # since the line's own steps, where the present ones carry none

    @property
    def largest_seen(self) -> float:
        """The largest batch that was seen often: the mean and two standard deviations."""
        return self.batch + 2 * self.deviation

    def with_line_of(self, earlier: StepTime, age: float) -> StepTime:
        """Return this with the line of an earlier fit of the same server, where the present steps lie on it; else itself."""
        foretold = earlier.at(self.batch)
        if self.line is not None or foretold is None:
            return self
        off = abs(self.seconds.value / foretold.value - 1.0)
        if off > MOST_OFF:
            return self
        return replace(self, line=earlier.line, refused="", line_age_seconds=age)

    def at(self, batch: float) -> Estimate | None:
        """Return the seconds of a step of `batch` requests; None where that cannot be known.

        Far from the batches that were seen, the slope's error makes the interval wide.
        """
        if batch <= 0:
            return None
        away = batch - self.batch
        if self.line is None:
            return self.seconds if abs(away) <= max(self.deviation, 0.5) else None
        slope = self.line.per_request
        value = self.seconds.value + slope.value * away
        own, of_slope = (self.seconds.high - self.seconds.low) / 2, (slope.high - slope.low) / 2 * away
        half = sqrt(own * own + of_slope * of_slope)
        beyond = max(log2(batch / self.largest_seen), 0.0)
        low, high = value - half, value * (1 + BEYOND * beyond) + half
        return Estimate(value, low, high) if low > 0 else None


def fit(parts: Sequence[Moments], *, least: float = LEAST_STEPS, source: str = "v1_loads") -> StepTime | None:
    """Return the step time of consecutive intervals' moments; None where there were too few steps to say anything."""
    together = total(parts)
    cut = windows(parts, MOST_WINDOWS)
    if together.steps < least or len(cut) < LEAST_WINDOWS or not together.seconds or not together.batch:
        return None
    seconds = _judged(cut, lambda each: total(each).mean_seconds)
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


def _line(together: Moments, cut: Sequence[Moments]) -> tuple[Line | None, str]:
    deviation = sqrt(together.spread / together.steps)
    if deviation < max(LEAST_DEVIATION, LEAST_DEVIATION_SHARE * together.mean_batch):
        return None, f"the batch hardly varied ({together.mean_batch:.1f} ± {deviation:.2f} requests)"
    slope = _slope_of(together, cut)
    per_request = _judged(cut, slope)
    fixed = _judged(cut, lambda each: _start(each, slope))
    if per_request is None or fixed is None:
        return None, "the batch varied in too few windows"
    if per_request.value <= 0:
        return (
            None,
            f"larger batches were not slower ({1e3 * per_request.value:.2f} ms a request): something else slowed it down",
        )
    if per_request.half_width > MOST_HALF_WIDTH:
        return None, f"its windows disagree (± {100 * per_request.half_width:.0f} % of the slope)"
    if fixed.low <= 0:
        return (
            None,
            f"its start may lie below zero ({1e3 * fixed.value:.2f} ms): something else than the batch slowed it down",
        )
    return Line(fixed, per_request), ""


def _slope_of(together: Moments, cut: Sequence[Moments]) -> Callable[[Sequence[Moments]], float]:
    within = sum(window.spread for window in cut)
    return _slope_within if within >= MOSTLY_WITHIN * together.spread else _slope_overall


def _slope_within(cut: Sequence[Moments]) -> float:
    """Return the slope that all windows share, each with a start of its own."""
    spread = sum(window.spread for window in cut)
    return sum(window.joint_spread for window in cut) / spread if spread else float("nan")


def _slope_overall(cut: Sequence[Moments]) -> float:
    together = total(cut)
    return together.joint_spread / together.spread if together.spread else float("nan")


def _start(cut: Sequence[Moments], slope: Callable[[Sequence[Moments]], float]) -> float:
    together = total(cut)
    return together.mean_seconds - slope(cut) * together.mean_batch


def _judged(cut: Sequence[Moments], figure: Callable[[Sequence[Moments]], float]) -> Estimate | None:
    """Return a figure of the windows with its interval."""
    without = [figure([*cut[:left_out], *cut[left_out + 1 :]]) for left_out in range(len(cut))]
    return jackknife(figure(cut), without)
