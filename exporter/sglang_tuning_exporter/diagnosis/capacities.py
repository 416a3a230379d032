"""Capacities over the old state, until that goes."""

from __future__ import annotations

from operator import itemgetter

from sglang_tuning_exporter.capacity.model import Measured, MeasuredScheduler, Speeds
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
from sglang_tuning_exporter.capacity.step_time import StepSums, StepTime
from sglang_tuning_exporter.state.decode_samples import DecodeSample
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.rank import RankState
from sglang_tuning_exporter.state.server import ServerState


def capacities(state: ServerState, measured: Measured | None, now: float) -> list[RankCapacity]:
    """Return the capacity of each scheduler, from `/v1/loads` where the release counts steps, else from the log's decode lines."""
    ranks = state.schedulers
    counted = [None if measured is None else measured.scheduler(each.dp, now, only=len(ranks) == 1) for each in ranks]
    of_lines = logged(state, now) if None in counted else ""
    return [_rank(rank, state.facts, each, of_lines, now) for rank, each in zip(ranks, counted, strict=True)]


def _rank(
    rank: RankState, facts: ServerFacts, counted: MeasuredScheduler | None, of_lines: StepTime | str, now: float
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
