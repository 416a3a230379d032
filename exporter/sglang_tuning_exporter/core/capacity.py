"""How long a decode step takes at each batch size, and how many requests fit, by the decode lines of a log. Pure.

The seconds of a step are fixed + per request x batch, by least squares over the decode lines, each of which is the mean
of some forty steps. Where they do not lie on a line, the reason is given, and the mean step remains. The limits and
their reasons are in docs/capacity.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from statistics import correlation, fmean, linear_regression, pstdev
from typing import TypeAlias

from sglang_tuning_exporter.core.server import Server

# A decode line: its time, the requests in its batch, the seconds of its mean step, a step's tokens for each request.
Line: TypeAlias = "tuple[float, float, float, float]"
_LEAST_LINES = 40
# Standard deviation of the batch: below it, any change of the machine's speed would give any slope.
_LEAST_DEVIATION, _LEAST_DEVIATION_SHARE = 0.3, 0.05
# Share of the variance of the steps' seconds that the batch must explain: where it explains less, something else slows
# the steps down more.
_LEAST_EXPLAINED = 0.5
_LEAST_SERVING_SECONDS = 20.0
_STALE_SECONDS = 120.0  # older lines say nothing about the end of the log


@dataclass(frozen=True, slots=True)
class StepTime:
    """The mean decode step, and the line through the steps; `refused` says why there is no line."""

    batch: float  # the mean one
    deviation: float  # of the batch
    seconds: float  # of the mean step
    tokens_per_request: float  # of a step: 1 without speculative decoding
    seen: tuple[float, float]  # the smallest and the largest batch
    line: tuple[float, float] | None = None  # seconds: fixed, and for each request
    refused: str = ""

    def at(self, batch: float) -> float | None:
        """Return the seconds of a step of `batch` requests; without a line only batches near the mean one are known."""
        if self.line is None:
            return self.seconds if abs(batch - self.batch) <= max(self.deviation, 0.5) else None
        fixed, per_request = self.line
        return fixed + per_request * batch

    def tokens_per_second(self, batch: float) -> float | None:
        """Return the generated tokens a second at a batch, without prefill."""
        seconds = self.at(batch)
        return None if seconds is None else batch * self.tokens_per_request / seconds


def step_time(server: Server, now: float) -> StepTime | str:
    """Return the step time by the decode lines of the last ten minutes of all schedulers, or why it is not known.

    All schedulers share one step time: they run the same model on the same kind of GPU, and with DP attention each step
    together.
    """
    schedulers = server.schedulers.values()
    if not schedulers:
        return "no scheduler was seen"
    if server.facts.role == "prefill":
        return "the prefill side of disaggregation decodes nothing"
    if not any(each.pace.decoded_at is not None for each in schedulers):
        return "no decode steps were seen: a log shows them under load"
    begin = now - server.profile.window_seconds
    lines = sorted(line for each in schedulers for line in each.pace.steps if line[0] >= begin)
    if not lines and server.facts.is_on("speculative_algorithm") and server.totals["accepted:n"] == 0:
        return "the decode lines do not show how many tokens a speculative step gives (accept len)"
    if lines and lines[-1][0] < now - _STALE_SECONDS:
        lines = []
    if len(lines) < _LEAST_LINES:
        return (
            f"{len(lines)} decode lines of the last ten minutes show the time of a step (one a second at most, and none"
            f" after a prefill or another batch), and {_LEAST_LINES} are needed: give a longer log"
        )
    return fit(lines)


def fit(lines: Sequence[Line]) -> StepTime:
    """Return the step time by decode lines, of which there is at least one."""
    _, batches, seconds, tokens = zip(*lines, strict=True)
    per_request = sum(batch * each for batch, each in zip(batches, tokens, strict=True)) / sum(batches)
    line, refused = _line_through(batches, seconds)
    seen = min(batches), max(batches)
    return StepTime(fmean(batches), pstdev(batches), fmean(seconds), per_request, seen, line, refused)


def _line_through(batches: Sequence[float], seconds: Sequence[float]) -> tuple[tuple[float, float] | None, str]:
    """Return the fixed seconds of a step and those for each request, or None and why they are not known."""
    mean, deviation = fmean(batches), pstdev(batches)
    if deviation < max(_LEAST_DEVIATION, _LEAST_DEVIATION_SHARE * mean):
        return None, f"the batch hardly varied ({mean:.1f} ± {deviation:.2f} requests)"
    per_request, fixed = linear_regression(batches, seconds)
    if per_request <= 0:
        slower = f"{1e3 * per_request:.2f} ms for each request"
        return None, f"larger batches were not slower ({slower}): something else slowed the steps down"
    explained = correlation(batches, seconds) ** 2
    if explained < _LEAST_EXPLAINED:
        return (
            None,
            f"the batch explains {100 * explained:.0f} % of how the steps differ: something else slowed them down more",
        )
    if fixed <= 0:
        return (
            None,
            f"a step without requests would take {1e3 * fixed:.2f} ms: something else slowed the steps down",
        )
    return (fixed, per_request), ""


@dataclass(frozen=True, slots=True)
class Room:
    """What one scheduler has room for; an unknown figure is None."""

    pool_tokens: float | None = None  # of the KV cache
    running_limit: float | None = None
    tokens_per_request: float | None = None  # of the KV cache, for each request that runs

    @property
    def most_requests(self) -> int | None:
        """How many requests like the present ones fit and may run; with the limit alone it is not known."""
        return self.requests_in(self.pool_tokens)

    def requests_in(self, pool_tokens: float | None) -> int | None:
        """Return how many requests like the present ones fit into a KV cache of so many tokens, and may run."""
        if not pool_tokens or not self.tokens_per_request:
            return None
        fit_in = pool_tokens / self.tokens_per_request
        return max(floor(min(fit_in, self.running_limit or fit_in)), 1)


def rooms(server: Server, now: float) -> list[Room]:
    """Return the room of each scheduler, by the last ten minutes; the tokens of a request are a mean over all."""
    totals, facts = server.window(server.profile.window_seconds, now), server.facts
    running, usage = totals.mean("running"), totals.mean("usage")
    found = []
    for dp in server.schedulers:
        pool, is_known = facts.pool(dp), totals[f"serves/{dp}"] >= _LEAST_SERVING_SECONDS
        tokens = usage * pool / running if is_known and pool and running and usage else None
        found.append(Room(pool, facts.limit(dp), tokens))
    return found
