"""What a scheduler can do: the time of a decode step by its batch and the speed of prefill, each with its interval, and what memory allows. Pure.

seconds of a step = fixed + per request x batch, by least squares from sums over steps as SGLang counts them (`/v1/loads`), or as decode lines
show them. SGLang sums no squared seconds, so residuals are unknown, and intervals come from the spread over windows. No line is given, with
the reason, where the batch hardly varied, where the slope or the intercept is not positive, and where windows disagree; the mean step remains.
Values and reasons: docs/capacity.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import floor, fsum, inf, isfinite, log2, nan, sqrt
from typing import NamedTuple

from sglang_tuning_exporter.core.server import Server
from sglang_tuning_exporter.sglang.metrics import RankFigures

# Student's t for a two-sided interval of 95 %, by degrees of freedom.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
_T_MANY = 1.96
# Relative standard error between a figure and its measurement some minutes later: the machine and the mix of requests change, and the
# windows of one ten-minute fit cannot show it (docs/capacity.md, "Other batches").
_BETWEEN = 0.07
_MOST_WINDOWS, _LEAST_WINDOWS = 10, 4
_LEAST_STEPS = 200
_LEAST_LINES = 40  # of a log
# Standard deviation of the batch: below it, any change of the machine's speed would give any slope.
_LEAST_DEVIATION, _LEAST_DEVIATION_SHARE = 0.3, 0.05
# Half the slope's interval, relative to the slope.
_MOST_HALF_WIDTH = 0.6
# Between the mean step and an earlier line at the same batch: above it the earlier line does not describe this server.
_MOST_LINE_ERROR = 0.25
# For each doubling beyond the batches seen: steps of a real engine grew faster than the line.
_GROWTH_BEYOND_SEEN = 0.1
# Share of the batch's spread within windows from which on the windows share a slope: a slowdown between two of them does not tilt it.
_SPREAD_WITHIN_WINDOWS = 0.5
_LEAST_SECONDS = 1.0  # between two readings
_BACKWARDS_SECONDS = 5.0  # a snapshot that much older than the last one is from another clock or another server
_LEAST_BUSY_SECONDS = 0.5
_LEAST_SHARE_SECONDS = 20.0
_LEAST_SERVING_SECONDS = 20.0
_STALE_SECONDS = 120.0  # older figures say nothing about now
_MOST_SCHEDULERS = 384
_MOST_FITS = 64
_MICROSECONDS = frozenset({2, 5, 7})  # places in `Sums` that SGLang counts so


class Estimate(NamedTuple):
    """A figure and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def with_drift(self) -> Estimate:
        """The figure with the interval for a measurement some minutes later."""
        value, drift = self.value, _T_MANY * _BETWEEN * self.value
        low, high = sqrt((value - self.low) ** 2 + drift**2), sqrt((self.high - value) ** 2 + drift**2)
        return Estimate(value, max(value - low, 0.0), value + high)

    def times(self, factor: float) -> Estimate:
        """Return the figure times a positive `factor`."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)

    def dividing(self, amount: float) -> Estimate:
        """Return `amount` over this positive figure."""
        return Estimate(amount / self.value, amount / self.high, amount / self.low)


def _estimated(windows: Sequence[Sums], figure: Callable[[Sequence[Sums]], float]) -> Estimate | None:
    """Return a figure of windows with its jackknife interval; None below two windows, or where it is no number without one of them.

    Consecutive steps are alike, so an interval from single steps would be far too narrow.
    """
    number, value = len(windows), figure(windows)
    without = [figure([*windows[:left_out], *windows[left_out + 1 :]]) for left_out in range(number)]
    if number < 2 or not all(map(isfinite, (value, *without))):
        return None
    mean = fsum(without) / number
    error = sqrt((number - 1) / number * fsum((each - mean) ** 2 for each in without))
    half = (_T[number - 2] if number <= len(_T) + 1 else _T_MANY) * error
    return Estimate(value, value - half, value + half)


# The time of a decode step


class Sums(NamedTuple):
    """What a scheduler counts: sums since its start, or the difference of two readings."""

    clock: float = 0.0  # its own, in unix seconds; of a difference the seconds between both
    prefill_tokens: float = 0.0
    prefill_seconds: float = 0.0
    steps: float = 0.0  # of decoding; the other sums are over these
    batch: float = 0.0
    seconds: float = 0.0
    batch_squared: float = 0.0
    batch_seconds: float = 0.0
    tokens: float = 0.0

    @classmethod
    def counted(cls, load: RankFigures) -> Sums | None:
        """Return what `/v1/loads` says that a scheduler counted; None where the release counts nothing, or the values are impossible."""
        if load.counted is None:
            return None
        found = cls(*(each / 1e6 if place in _MICROSECONDS else each for place, each in enumerate(load.counted)))
        return found if found.are_possible else None

    @classmethod
    def of_line(cls, batch: float, seconds: float, tokens_per_request: float = 1.0) -> Sums:
        """Return the mean step of a decode line as one step."""
        tokens = batch * tokens_per_request
        return cls(0.0, 0.0, 0.0, 1.0, batch, seconds, batch * batch, batch * seconds, tokens)

    def since(self, earlier: Sums) -> Sums:
        """Return what was done since an earlier reading."""
        gained = Sums(*(mine - theirs for mine, theirs in zip(self, earlier, strict=True)))
        # After months of uptime the sums lose their last digits, and the spread of a few steps may be negative.
        return gained if gained.are_possible else Sums(*gained[:3])

    def fell_since(self, earlier: Sums) -> bool:
        """Whether any counter is lower than before."""
        return any(after < before for before, after in zip(earlier[1:], self[1:], strict=True))

    @property
    def are_possible(self) -> bool:
        """Whether decode steps can have these sums: no sum and no variance is negative, but for a rounding error of large ones."""
        is_known = all(isfinite(each) and each >= 0 for each in self[3:])
        return is_known and self.batch * self.batch <= self.batch_squared * self.steps * (1 + 1e-9)

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


def total(parts: Iterable[Sums]) -> Sums:
    """Return the sum of all."""
    return Sums(*map(sum, zip(*parts, strict=True)))


def _windows_of(parts: Sequence[Sums]) -> list[Sums]:
    """Return consecutive parts as at most ten windows of about equally many steps; parts without steps are left out."""
    counted = [part for part in parts if part.steps]
    share, seen = sum(part.steps for part in counted) / _MOST_WINDOWS, 0.0
    found: list[list[Sums]] = [[]]
    for part in counted:
        seen += part.steps
        found[-1].append(part)
        if seen >= share * len(found) and len(found) < _MOST_WINDOWS:
            found.append([])
    return [total(each) for each in found if each]


@dataclass(frozen=True, slots=True)
class StepTime:
    """The mean step at the mean batch, and the line where one could be fitted; `refused` is why there is none."""

    batch: float
    deviation: float
    seconds: Estimate
    tokens_per_request: float  # per step: 1 without speculative decoding
    line: tuple[Estimate, Estimate] | None = None  # fixed, per request: seconds = fixed + per request x batch
    refused: str = ""
    source: str = "v1_loads"

    @property
    def seen(self) -> tuple[float, float]:
        """The smallest and the largest batch seen often: mean and two standard deviations, at least one."""
        return max(self.batch - 2 * self.deviation, 1.0), self.batch + 2 * self.deviation

    def with_line_of(self, earlier: StepTime) -> StepTime:
        """Return this step time with the line of an earlier fit of the same server, if the present mean step lies on it."""
        predicted = None if self.line is not None else earlier.at(self.batch)
        if predicted is None or abs(self.seconds.value / predicted.value - 1.0) > _MOST_LINE_ERROR:
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
        slope = self.line[1]
        value = self.seconds.value + slope.value * away
        own, of_slope = (self.seconds.high - self.seconds.low) / 2, (slope.high - slope.low) / 2 * away
        half = sqrt(own * own + of_slope * of_slope)
        beyond = max(log2(batch / self.seen[1]), 0.0)
        low, high = value - half, value * (1 + _GROWTH_BEYOND_SEEN * beyond) + half
        return Estimate(value, low, high) if low > 0 else None


def fit(parts: Sequence[Sums], *, least: float = _LEAST_STEPS, source: str = "v1_loads") -> StepTime | None:
    """Return the step time from the moments of consecutive intervals; None where there are too few steps."""
    windows = _windows_of(parts)
    together = total(windows)
    if together.steps < least or len(windows) < _LEAST_WINDOWS or not together.seconds or not together.batch:
        return None
    seconds = _estimated(windows, lambda each: total(each).mean_seconds)
    if seconds is None:
        return None
    deviation = sqrt(together.spread / together.steps)
    line = _line(together, windows, deviation)
    refused, found = (line, None) if isinstance(line, str) else ("", line)
    tokens = together.tokens / together.batch
    return StepTime(together.mean_batch, deviation, seconds, tokens, found, refused, source)


def _line(together: Sums, windows: Sequence[Sums], deviation: float) -> tuple[Estimate, Estimate] | str:
    """Return the line of the windows, or why there is none."""
    if deviation < max(_LEAST_DEVIATION, _LEAST_DEVIATION_SHARE * together.mean_batch):
        return f"the batch hardly varied ({together.mean_batch:.1f} ± {deviation:.2f} requests)"
    is_shared = sum(window.spread for window in windows) >= _SPREAD_WITHIN_WINDOWS * together.spread

    def slope(cut: Sequence[Sums]) -> float:
        """Give the slope that all windows share, each with its own intercept, or the one of all steps together."""
        parts = cut if is_shared else [total(cut)]
        spread = sum(part.spread for part in parts)
        return sum(part.joint_spread for part in parts) / spread if spread else nan

    def intercept(cut: Sequence[Sums]) -> float:
        whole = total(cut)
        return whole.mean_seconds - slope(cut) * whole.mean_batch

    per_request, fixed = _estimated(windows, slope), _estimated(windows, intercept)
    if per_request is None or fixed is None:
        return "the batch varied in too few windows"
    if per_request.value <= 0:
        return f"larger batches were not slower ({1e3 * per_request.value:.2f} ms a request): something else slowed it down"
    half_width = (per_request.high - per_request.low) / 2 / per_request.value
    if half_width > _MOST_HALF_WIDTH:
        return f"its windows disagree (± {100 * half_width:.0f} % of the slope)"
    if fixed.low <= 0:
        return (
            f"its start may lie below zero ({1e3 * fixed.value:.2f} ms): something else than the batch slowed it down"
        )
    return fixed, per_request


@dataclass(frozen=True, slots=True)
class RankCapacity:
    """What one scheduler can do; an unknown figure is None.

    `tokens_per_request`: KV cache tokens that a running request holds. `most_requests`: how many such requests fit and may run.
    """

    dp: int | None = None
    step: StepTime | None = None
    prefill: Estimate | None = None  # prompt tokens a second while prefill runs
    prefill_share: float | None = None  # of wall time
    per_token: float | None = None  # prompt tokens computed for each generated token
    waiting_tokens: float | None = None  # of prompts
    running: float | None = None
    tokens_per_request: float | None = None
    most_requests: int | None = None
    pool_tokens: float | None = None
    running_limit: float | None = None
    no_step: str = ""  # why the step time is unknown

    @property
    def backlog_seconds(self) -> Estimate | None:
        """Seconds of prefill that the waiting prompts need."""
        waiting = self.waiting_tokens
        return None if self.prefill is None or waiting is None else self.prefill.dividing(waiting)

    @property
    def decode_limit(self) -> Estimate | None:
        """Generated tokens a second with as many requests as fit and may run, without prefill."""
        return None if self.most_requests is None else self.decode_speed(self.most_requests)

    def decode_speed(self, batch: float) -> Estimate | None:
        """Return the generated tokens a second at a batch, without prefill."""
        seconds = None if self.step is None else self.step.at(batch)
        return None if self.step is None or seconds is None else seconds.dividing(batch * self.step.tokens_per_request)


# Readings of `/v1/loads` over ten minutes


def _speeds_of(intervals: Sequence[Sums]) -> RankCapacity:
    """Return the speeds over intervals between readings."""
    watched, busy = sum(each.clock for each in intervals), sum(each.prefill_seconds for each in intervals)
    # SGLang counts a prefill when it ends, so the busy time of a long one may exceed a short interval.
    share = min(busy / watched, 1.0) if watched >= _LEAST_SHARE_SECONDS else None
    computing = [each for each in intervals if each.prefill_seconds > 0]
    size = -(-len(computing) // _MOST_WINDOWS)
    cut = [total(computing[first : first + size]) for first in range(0, len(computing), size)] if size else []
    is_enough = busy >= _LEAST_BUSY_SECONDS and len(computing) >= _LEAST_WINDOWS
    speed = _estimated(cut, _prefill_speed) if is_enough else None
    step, generated = fit(intervals), sum(each.tokens for each in intervals)
    prefilled = sum(each.prefill_tokens for each in intervals)
    per_token = prefilled / generated if step is not None and generated else None
    return RankCapacity(
        step=step,
        prefill=speed if speed is not None and speed.low > 0 else None,
        prefill_share=share,
        per_token=per_token,
    )


def _prefill_speed(cut: Sequence[Sums]) -> float:
    seconds = sum(each.prefill_seconds for each in cut)
    return sum(each.prefill_tokens for each in cut) / seconds if seconds > 0 else nan


class Readings:
    """One scheduler's readings in the last `length` seconds of its clock, and the fit of them."""

    def __init__(self, length: float) -> None:
        self._length = length
        self._kept: deque[Sums] = deque()
        self.seen_at = -inf
        self.waiting: float | None = None  # prompt tokens
        self._fitted: StepTime | None = None  # the last one with a line
        self._speeds: RankCapacity | None = None  # of the readings up to the last

    def take(self, reading: Sums) -> bool:
        """Add a reading; return False for a snapshot that was read before.

        Counters that fall belong to a restarted server, so the readings before them are removed.
        """
        last = self._kept[-1] if self._kept else reading._replace(clock=-inf)
        if reading.fell_since(last) or reading.clock < last.clock - _BACKWARDS_SECONDS:
            self._kept.clear()
            self._fitted = None
        elif reading.clock < last.clock + _LEAST_SECONDS:
            return reading.clock > last.clock
        self._kept.append(reading)
        self._speeds = None
        while self._kept[0].clock < reading.clock - self._length:
            self._kept.popleft()
        return True

    @property
    def intervals(self) -> list[Sums]:
        """What was done between each two readings."""
        return [later.since(earlier) for earlier, later in pairwise(self._kept)]

    @property
    def speeds(self) -> RankCapacity:
        """The present speeds, computed once for each new reading.

        At a running limit the batch does not vary, and no line can be fitted. Then the line of the time when it varied is used: it answers
        what a larger batch would bring.
        """
        if self._speeds is None:
            found = _speeds_of(self.intervals)
            if found.step is not None and found.step.line is not None:
                self._fitted = found.step
            elif found.step is not None and self._fitted is not None:
                found = replace(found, step=found.step.with_line_of(self._fitted))
            self._speeds = found
        return self._speeds


class Measured:
    """The counters of `/v1/loads` of one server, by DP rank."""

    def __init__(self, window_seconds: float) -> None:
        self._length = window_seconds
        self._ranks: dict[int | None, Readings] = {}

    def take(self, loads: Sequence[RankFigures], now: float) -> None:
        """Add one answer; each scheduler in it has a time stamp of its own, and a snapshot seen before is ignored."""
        for load in loads:
            counted = Sums.counted(load)
            if counted is None or (load.dp not in self._ranks and len(self._ranks) >= _MOST_SCHEDULERS):
                continue
            rank = self._ranks.setdefault(load.dp, Readings(self._length))
            if rank.take(counted):
                rank.seen_at, rank.waiting = now, load.waiting_tokens

    def forget(self) -> None:
        """Remove everything: another server runs, or the same one with other arguments."""
        self._ranks.clear()

    def scheduler(self, dp: int | None, now: float, *, only: bool) -> Readings | None:
        """Return one scheduler; a server's only scheduler is rank 0 in `/v1/loads`. None where its counters are old or absent."""
        rank = self._ranks.get(0 if dp is None and only and None not in self._ranks else dp)
        return None if rank is None or now - rank.seen_at >= _STALE_SECONDS else rank


# Of a server


def capacities(server: Server, measured: Measured | None, now: float) -> list[RankCapacity]:
    """Return the capacity of each scheduler, from `/v1/loads` where the release counts steps, else from the log's decode lines.

    Tokens held and running requests are means over all schedulers, in the window of the profile.
    """
    only, of_lines = len(server.schedulers) == 1, _step_of_lines(server, now)
    totals = server.window(server.profile.window_seconds, now)
    running, usage = totals.mean("running"), totals.mean("usage")
    ranks = []
    for dp in server.schedulers:
        counted = None if measured is None else measured.scheduler(dp, now, only=only)
        if counted is not None:
            found, waiting, no_step = (
                counted.speeds,
                counted.waiting,
                "too few decode steps were seen: watch for longer, under load",
            )
        else:
            found, waiting, no_step = (
                RankCapacity(step=None if isinstance(of_lines, str) else of_lines),
                None,
                str(of_lines),
            )
        pool, limit, held, most = server.facts.pool(dp), server.facts.limit(dp), None, None
        if pool and running and usage and totals[f"serves/{dp}"] >= _LEAST_SERVING_SECONDS:
            held = usage * pool / running
            most = max(floor(min(pool / held, limit or pool)), 1)  # with the limit alone nothing is known
        ranks.append(
            replace(
                found, dp=dp, waiting_tokens=waiting, running=running, tokens_per_request=held, most_requests=most,
                pool_tokens=pool, running_limit=limit, no_step="" if found.step else no_step,
            )
        )  # fmt: skip
    return ranks


def _step_of_lines(server: Server, now: float) -> StepTime | str:
    """Return the step time from the decode lines of all schedulers, or why there is none.

    It is less exact than counters: a line is the mean of some forty steps. The schedulers run the same model on the same kind of GPU,
    and with DP attention each step together. A speculative step gives each request several tokens, so a line must show how many.
    """
    schedulers = server.schedulers.values()
    if server.facts.role == "prefill":
        return "the prefill side of disaggregation decodes nothing"
    if not any(each.decoded_at is not None for each in schedulers):
        return "no decode steps were seen: /v1/loads counts them from 0.5.18 on, and a log shows them under load"
    begin = now - server.profile.window_seconds
    lines = sorted((line for each in schedulers for line in each.steps if line[0] >= begin), key=lambda line: line[0])
    if not lines and server.facts.is_on("speculative_algorithm") and server.totals["accepted:n"] == 0:
        return "the decode lines do not show how many tokens a speculative step gives (accept len)"
    if lines and lines[-1][0] < now - _STALE_SECONDS:
        lines = []
    return _fit_of_lines(tuple(line[1:] for line in lines))


@lru_cache(maxsize=_MOST_FITS)
def _fit_of_lines(lines: tuple[tuple[float, float, float], ...]) -> StepTime | str:
    """Return the step time from decode lines, each as one step, or why there is none; cached, because one page needs a fit several times."""
    least = _LEAST_LINES
    return fit([Sums.of_line(*line) for line in lines], least=least, source="log") or (
        f"{len(lines)} decode lines of the last ten minutes show the time of a step (one a second at most, and none after a prefill or"
        f" another batch), and {least} are needed: give a longer log, or ask the server itself (--sglang-url, from 0.5.18 on)"
    )
