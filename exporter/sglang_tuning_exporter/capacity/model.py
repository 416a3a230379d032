"""What one server's schedulers can do: measured speeds beside what the KV cache and the running limit allow. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import floor
from typing import TYPE_CHECKING, NamedTuple

from sglang_tuning_exporter.capacity.moments import Moments, total
from sglang_tuning_exporter.capacity.prefill import Prefill, measure
from sglang_tuning_exporter.capacity.readings import Reading, Readings
from sglang_tuning_exporter.capacity.step_time import LEAST_LINES, StepTime, fit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tuning_exporter.capacity.estimate import Estimate
    from sglang_tuning_exporter.sglang.server_info import Load
    from sglang_tuning_exporter.state.facts import ServerFacts
    from sglang_tuning_exporter.state.rank import RankState
    from sglang_tuning_exporter.state.server import ServerState

STALE_SECONDS = 120.0  # a scheduler whose last reading is older may do something else by now
MOST_SCHEDULERS = 384
MOST_FITS = 64  # of logs, kept until other lines come
LEAST_SERVING_SECONDS = 20.0
_NOT_MEASURED = Prefill(None, None)


@dataclass(frozen=True, slots=True)
class RankCapacity:
    """What is known of one scheduler's speed; each figure None where it is not known.

    `tokens_per_request` is what a running request holds of the KV cache, `most_requests` how many of them fit beside each other
    and may run, `prefill_per_token` the prompt tokens computed for each generated token: the present mix.
    """

    dp: int | None
    step: StepTime | None = None
    prefill: Prefill = _NOT_MEASURED
    waiting_tokens: float | None = None
    prefill_per_token: float | None = None
    running: float | None = None
    tokens_per_request: float | None = None
    most_requests: int | None = None
    pool_tokens: float | None = None
    running_limit: float | None = None

    @property
    def backlog_seconds(self) -> Estimate | None:
        """Seconds that computing the prompts takes that wait."""
        speed, waiting = self.prefill.tokens_per_second, self.waiting_tokens
        if speed is None or waiting is None or speed.low <= 0:
            return None
        return type(speed)(waiting / speed.value, waiting / speed.high, waiting / speed.low)

    @property
    def decode_limit(self) -> Estimate | None:
        """Generated tokens a second with as many requests as fit, while no prefill runs."""
        return None if self.most_requests is None else self.decode_speed(self.most_requests)

    def decode_speed(self, batch: float) -> Estimate | None:
        """Return the generated tokens a second at a batch while no prefill runs."""
        step = None if self.step is None else self.step.at(batch)
        if step is None or self.step is None:
            return None
        tokens = batch * self.step.tokens_per_request
        return type(step)(tokens / step.value, tokens / step.high, tokens / step.low)


class Speeds(NamedTuple):
    """What the readings up to one say: step time, prefill, and prompt tokens computed for each generated token."""

    at: float | None
    step: StepTime | None
    prefill: Prefill
    per_token: float | None


class Measured:
    """The readings of `/v1/loads` of one server, by DP rank."""

    def __init__(self, window_seconds: float) -> None:
        self._length = window_seconds
        self._ranks: dict[int | None, Readings] = {}
        self._waiting: dict[int | None, float | None] = {}
        self._seen: dict[int | None, float] = {}
        self._fitted: dict[int | None, tuple[float, StepTime]] = {}  # the last line of each, and when
        self._speeds: dict[int | None, Speeds] = {}

    def observe(self, loads: Sequence[Load], now: float) -> None:
        """Take one answer, whose schedulers each have a time stamp of their own; a repeated snapshot says nothing new."""
        for load in loads:
            reading = Reading.of(load)
            if reading is None or (load.dp not in self._ranks and len(self._ranks) >= MOST_SCHEDULERS):
                continue
            if self._ranks.setdefault(load.dp, Readings(self._length)).take(reading):
                self._seen[load.dp] = now
                waiting = load.waiting_uncached_tokens
                self._waiting[load.dp] = None if waiting is None else float(waiting)

    def forget(self) -> None:
        """Drop everything: another server is there, or the same one with other arguments."""
        self._ranks.clear()
        self._waiting.clear()
        self._seen.clear()
        self._fitted.clear()
        self._speeds.clear()

    def readings(self, dp: int | None, now: float, *, only: bool) -> Readings | None:
        """Return one scheduler's readings; the server's one scheduler counts as rank 0 there. None where they are stale."""
        key = 0 if dp is None and only and None not in self._ranks else dp
        if now - self._seen.get(key, -STALE_SECONDS) >= STALE_SECONDS:
            return None
        return self._ranks[key]

    def speeds(self, dp: int | None, readings: Readings, now: float) -> Speeds:
        """Return the present fit, made once for each new reading.

        While the batch stands still, it has the line of the time when it varied: at a running limit the batch is always the same, and that
        is when somebody wants to know what a larger one brings.
        """
        last = None if readings.last is None else readings.last.at
        known = self._speeds.get(dp)
        if known is not None and known.at == last:
            return known
        if readings.restarted:
            readings.restarted = False
            self._fitted.pop(dp, None)
        intervals = list(readings.intervals)
        step, generated = fit([each.decode for each in intervals]), total(each.decode for each in intervals).tokens
        if step is not None and step.line is not None:
            self._fitted[dp] = (now, step)
        elif step is not None and dp in self._fitted:
            at, earlier = self._fitted[dp]
            step = step.with_line_of(earlier, now - at)
        per_token = (
            sum(each.prefill_tokens for each in intervals) / generated if step is not None and generated else None
        )
        found = self._speeds[dp] = Speeds(last, step, measure(intervals), per_token)
        return found

    def waiting(self, dp: int | None, *, only: bool) -> float | None:
        """Return the prompt tokens that wait and are in no cache, as last read."""
        return self._waiting.get(0 if dp is None and only and None not in self._ranks else dp)


def capacities(state: ServerState, measured: Measured | None, now: float) -> list[RankCapacity]:
    """Return what is known of each scheduler of a server, from `/v1/loads` where it counts, else from the log's decode lines."""
    ranks = state.schedulers
    return [_rank(rank, state.facts, measured, now, only=len(ranks) == 1) for rank in ranks]


def _rank(rank: RankState, facts: ServerFacts, measured: Measured | None, now: float, *, only: bool) -> RankCapacity:
    readings = None if measured is None else measured.readings(rank.dp, now, only=only)
    per_token = waiting = None
    prefill = _NOT_MEASURED
    if measured is not None and readings is not None:
        _, step, prefill, per_token = measured.speeds(rank.dp, readings, now)
        waiting = measured.waiting(rank.dp, only=only)
    else:
        step = logged(rank, facts, now)
    pool, limit = facts.kv_pool_tokens.get(rank.dp), facts.running_limit(rank.dp)
    recent = rank.window.recent(now, rank.totals)
    running, usage = recent.mean("running"), recent.mean("usage")
    held = None
    if pool and running and usage and recent.serving_seconds() >= LEAST_SERVING_SECONDS:
        held = usage * pool / running
    return RankCapacity(
        rank.dp, step, prefill, waiting, per_token, running, held, _most_requests(pool, held, limit), pool, limit
    )


def _most_requests(pool: float | None, held: float | None, limit: float | None) -> int | None:
    fitting = None if pool is None or not held else pool / held
    bounds = [each for each in (fitting, limit) if each is not None]
    # Where only the limit is known, the KV cache may hold far fewer.
    return None if fitting is None else max(floor(min(bounds)), 1)


def logged(rank: RankState, facts: ServerFacts, now: float) -> StepTime | None:
    """Return the step time by decode lines: coarser, since each is the mean of some forty steps.

    With speculative decoding a line's throughput is not one token for each request and step: nothing is said then.
    """
    if facts.args.get("speculative_algorithm"):
        return None
    if not rank.decode_samples(now - STALE_SECONDS):
        return None
    return _fit_of_lines(tuple(rank.decode_samples(now - rank.window_seconds)))


@lru_cache(maxsize=MOST_FITS)
def _fit_of_lines(lines: tuple[tuple[float, float], ...]) -> StepTime | None:
    """Return the fit of decode lines' batch and tokens per second: one page of metrics asks for the same one several times."""
    return fit([Moments.of_line(running, running / speed) for running, speed in lines], least=LEAST_LINES, source="log")
