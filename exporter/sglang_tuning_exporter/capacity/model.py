"""What each scheduler of a server can do: its measured speeds, and what the KV cache and the running limit allow. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import itemgetter
from typing import NamedTuple

from sglang_tuning_exporter.capacity.ranks import (
    DECODES_NOTHING,
    LEAST_SERVING_SECONDS,
    NO_ACCEPT_LENGTH,
    NO_DECODE_STEPS,
    NOT_MEASURED,
    STALE_SECONDS,
    RankCapacity,
    fit_of_lines,
    most_requests,
)
from sglang_tuning_exporter.capacity.readings import Counters, Prefill, Readings, measure
from sglang_tuning_exporter.capacity.step_time import StepSums, StepTime, fit, total
from sglang_tuning_exporter.sglang.server_info import Load
from sglang_tuning_exporter.state.decode_samples import DecodeSample
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.rank import RankState
from sglang_tuning_exporter.state.server import ServerState

MOST_SCHEDULERS = 384


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
        speeds, waiting = Speeds(step, NOT_MEASURED, None), None
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
        most_requests=most_requests(pool, tokens_held, limit),
        pool_tokens=pool,
        running_limit=limit,
        no_step=no_step,
    )


def logged(state: ServerState, now: float) -> StepTime | str:
    """Return the step time from the decode lines of all schedulers, or why there is none.

    It is less exact than counters: a line is the mean of some forty steps. The schedulers run the same model on the same kind of GPU,
    and with DP attention each step together. A speculative step gives each request several tokens, so a line must show how many.
    """
    if state.facts.role == "prefill":
        return DECODES_NOTHING
    if not any(rank.totals.counts["decoded"] for rank in state.schedulers):
        return NO_DECODE_STEPS
    begin = now - state.profile.window_seconds
    lines = sorted((each for rank in state.schedulers for each in rank.samples.since(begin)), key=itemgetter(0))
    speculates = bool(state.facts.args.get("speculative_algorithm"))
    samples = [line for line in lines if line.accept_length or not speculates]
    if lines and not samples:
        return NO_ACCEPT_LENGTH
    if samples and samples[-1].at < now - STALE_SECONDS:
        samples = []
    return fit_of_lines(tuple(_sums(sample) for sample in samples))


def _sums(sample: DecodeSample) -> StepSums:
    tokens = sample.accept_length or 1.0
    return StepSums.of_line(sample.batch, sample.batch * tokens / sample.tokens_per_second, tokens)
