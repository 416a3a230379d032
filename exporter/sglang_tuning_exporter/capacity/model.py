"""What each scheduler of a server can do: its measured speeds, and what the KV cache and the running limit allow. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import floor, inf
from operator import itemgetter
from typing import NamedTuple

from sglang_tuning_exporter.capacity.estimate import Estimate
from sglang_tuning_exporter.capacity.readings import Counters, Prefill, Readings, measure
from sglang_tuning_exporter.capacity.step_time import LEAST_LINES, StepSums, StepTime, fit, total
from sglang_tuning_exporter.sglang.server_info import Load
from sglang_tuning_exporter.state.decode_samples import DecodeSample
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.rank import RankState
from sglang_tuning_exporter.state.server import ServerState

STALE_SECONDS = 120.0  # older counters say nothing about now
MOST_SCHEDULERS = 384
MOST_FITS = 64
LEAST_SERVING_SECONDS = 20.0
_NOT_MEASURED = Prefill(None, None)


@dataclass(frozen=True, slots=True)
class RankCapacity:
    """The speed of one scheduler; an unknown figure is None.

    `tokens_per_request`: KV cache tokens that a running request holds. `most_requests`: how many such requests fit and may run.
    `prefill_per_token`: prompt tokens computed for each generated token, in the present mix.
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
    no_step: str = ""  # why the step time is unknown

    @property
    def backlog_seconds(self) -> Estimate | None:
        """Seconds of prefill that the waiting prompts need."""
        speed, waiting = self.prefill.tokens_per_second, self.waiting_tokens
        return None if speed is None or waiting is None or speed.low <= 0 else speed.dividing(waiting)

    @property
    def decode_limit(self) -> Estimate | None:
        """Generated tokens a second with as many requests as fit and may run, without prefill."""
        return None if self.most_requests is None else self.decode_speed(self.most_requests)

    def decode_speed(self, batch: float) -> Estimate | None:
        """Return the generated tokens a second at a batch, without prefill."""
        step = None if self.step is None else self.step.at(batch)
        return None if step is None or self.step is None else step.dividing(batch * self.step.tokens_per_request)


class Speeds(NamedTuple):
    """What one scheduler's counters show: step time, prefill, and prompt tokens computed for each generated token."""

    step: StepTime | None
    prefill: Prefill
    per_token: float | None


class _Scheduler:
    """One scheduler's readings, with the fit of them and the last line that could be fitted."""

    def __init__(self, window_seconds: float) -> None:
        self.readings = Readings(window_seconds)
        self.seen_at = -inf
        self.waiting: float | None = None
        self._fitted: tuple[float, StepTime] | None = None
        self._known: tuple[float | None, Speeds] | None = None  # the last reading's time, and the fit up to it

    def speeds(self, now: float) -> Speeds:
        """Return the present fit, made once for each new reading.

        At a running limit the batch does not vary, and no line can be fitted. Then the line of the time when it varied is used: it answers
        what a larger batch would bring.
        """
        last = None if self.readings.last is None else self.readings.last.at
        if self._known is not None and self._known[0] == last:
            return self._known[1]
        if self.readings.restarted:
            self.readings.restarted, self._fitted = False, None
        intervals = list(self.readings.intervals)
        step, generated = fit([each.decode for each in intervals]), total(each.decode for each in intervals).tokens
        if step is not None and step.line is not None:
            self._fitted = (now, step)
        elif step is not None and self._fitted is not None:
            at, earlier = self._fitted
            step = step.with_line_of(earlier, now - at)
        prefilled = sum(each.prefill_tokens for each in intervals)
        found = Speeds(step, measure(intervals), prefilled / generated if step is not None and generated else None)
        self._known = (last, found)
        return found


class Measured:
    """The counters of `/v1/loads` of one server, by DP rank."""

    def __init__(self, window_seconds: float) -> None:
        self._length = window_seconds
        self._ranks: dict[int | None, _Scheduler] = {}

    def observe(self, loads: Sequence[Load], now: float) -> None:
        """Add one answer; each scheduler in it has a time stamp of its own, and a snapshot seen before is ignored."""
        for load in loads:
            counted = Counters.of(load)
            if counted is None or (load.dp not in self._ranks and len(self._ranks) >= MOST_SCHEDULERS):
                continue
            rank = self._ranks.setdefault(load.dp, _Scheduler(self._length))
            if rank.readings.take(counted):
                waiting = load.waiting_uncached_tokens
                rank.seen_at, rank.waiting = now, None if waiting is None else float(waiting)

    def forget(self) -> None:
        """Remove everything: another server runs, or the same one with other arguments."""
        self._ranks.clear()

    def scheduler(self, dp: int | None, now: float, *, only: bool) -> _Scheduler | None:
        """Return one scheduler; a server's only scheduler is rank 0 in `/v1/loads`. None where its counters are old or absent."""
        rank = self._ranks.get(0 if dp is None and only and None not in self._ranks else dp)
        return None if rank is None or now - rank.seen_at >= STALE_SECONDS else rank


def capacities(state: ServerState, measured: Measured | None, now: float) -> list[RankCapacity]:
    """Return the capacity of each scheduler, from `/v1/loads` where the release counts steps, else from the log's decode lines."""
    ranks = state.schedulers
    counted = [None if measured is None else measured.scheduler(each.dp, now, only=len(ranks) == 1) for each in ranks]
    of_lines = logged(state, now) if None in counted else ""
    return [_rank(rank, state.facts, each, of_lines, now) for rank, each in zip(ranks, counted, strict=True)]


def _rank(
    rank: RankState, facts: ServerFacts, counted: _Scheduler | None, of_lines: StepTime | str, now: float
) -> RankCapacity:
    if counted is not None:
        speeds, waiting = counted.speeds(now), counted.waiting
        no_step = "" if speeds.step else "too few decode steps were seen: watch for longer, under load"
    else:
        step, no_step = (None, of_lines) if isinstance(of_lines, str) else (of_lines, "")
        speeds, waiting = Speeds(step, _NOT_MEASURED, None), None
    pool, limit = facts.kv_pool_tokens.get(rank.dp), facts.running_limit(rank.dp)
    recent = rank.window.recent(now, rank.totals)
    running, usage = recent.mean("running"), recent.mean("usage")
    tokens_held = None
    if pool and running and usage and recent.serving_seconds() >= LEAST_SERVING_SECONDS:
        tokens_held = usage * pool / running
    return RankCapacity(
        dp=rank.dp,
        step=speeds.step,
        prefill=speeds.prefill,
        waiting_tokens=waiting,
        prefill_per_token=speeds.per_token,
        running=running,
        tokens_per_request=tokens_held,
        most_requests=_most_requests(pool, tokens_held, limit),
        pool_tokens=pool,
        running_limit=limit,
        no_step=no_step,
    )


def _most_requests(pool: float | None, tokens_held: float | None, limit: float | None) -> int | None:
    fitting = None if pool is None or not tokens_held else pool / tokens_held
    bounds = [each for each in (fitting, limit) if each is not None]
    # With the limit alone nothing is known: the KV cache may hold far fewer.
    return None if fitting is None else max(floor(min(bounds)), 1)


def logged(state: ServerState, now: float) -> StepTime | str:
    """Return the step time from the decode lines of all schedulers, or why there is none.

    It is less exact than counters: a line is the mean of some forty steps. The schedulers run the same model on the same kind of GPU,
    and with DP attention each step together. A speculative step gives each request several tokens, so a line must show how many.
    """
    if state.facts.role == "prefill":
        return "the prefill side of disaggregation decodes nothing"
    if not any(rank.totals.counts["decoded"] for rank in state.schedulers):
        return "no decode steps were seen: /v1/loads counts them from 0.5.18 on, and a log shows them under load"
    begin = now - state.profile.window_seconds
    lines = sorted((each for rank in state.schedulers for each in rank.samples.since(begin)), key=itemgetter(0))
    speculates = bool(state.facts.args.get("speculative_algorithm"))
    samples = [line for line in lines if line.accept_length or not speculates]
    if lines and not samples:
        return "the decode lines do not show how many tokens a speculative step gives (accept len)"
    if samples and samples[-1].at < now - STALE_SECONDS:
        samples = []
    return _fit_of_lines(tuple(samples)) or (
        f"{len(samples)} decode lines of the last ten minutes show the time of a step (one a second at most, and none after a prefill or"
        f" another batch), and {LEAST_LINES} are needed: give a longer log, or ask the server itself (--sglang-url, from 0.5.18 on)"
    )


@lru_cache(maxsize=MOST_FITS)
def _fit_of_lines(samples: tuple[DecodeSample, ...]) -> StepTime | None:
    """Return the fit of decode lines; cached, because one page needs the same fit several times."""
    lines = []
    for _, batch, speed, accepted in samples:
        tokens = accepted or 1.0
        lines.append(StepSums.of_line(batch, batch * tokens / speed, tokens))
    return fit(lines, least=LEAST_LINES, source="log")
