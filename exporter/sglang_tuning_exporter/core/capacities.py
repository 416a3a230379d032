"""What each scheduler of a server can do: its measured speeds, and what the KV cache and the running limit allow. Pure."""

from __future__ import annotations

from sglang_tuning_exporter.capacity.model import (
    DECODES_NOTHING,
    LEAST_SERVING_SECONDS,
    NO_ACCEPT_LENGTH,
    NO_DECODE_STEPS,
    NOT_MEASURED,
    STALE_SECONDS,
    Measured,
    RankCapacity,
    Speeds,
    fit_of_lines,
    most_requests,
)
from sglang_tuning_exporter.capacity.step_time import StepTime
from sglang_tuning_exporter.core.server import Server

TOO_FEW_STEPS = "too few decode steps were seen: watch for longer, under load"


def capacities(server: Server, measured: Measured | None, now: float) -> list[RankCapacity]:
    """Return the capacity of each scheduler, from `/v1/loads` where the release counts steps, else from the log's decode lines.

    Tokens held and running requests are means over all schedulers, in the window of the profile.
    """
    only, of_lines = len(server.schedulers) == 1, step_of_lines(server, now)
    totals = server.window(server.profile.window_seconds, now)
    running, usage = totals.mean("running"), totals.mean("usage")
    found = []
    for dp in server.schedulers:
        counted = None if measured is None else measured.scheduler(dp, now, only=only)
        if counted is not None:
            speeds, waiting, no_step = counted.speeds(now), counted.waiting, TOO_FEW_STEPS
        else:
            step, no_step = (None, of_lines) if isinstance(of_lines, str) else (of_lines, "")
            speeds, waiting = Speeds(step, NOT_MEASURED, None), None
        pool, limit, held = server.facts.pool(dp), server.facts.limit(dp), None
        if pool and running and usage and totals[f"serves/{dp}"] >= LEAST_SERVING_SECONDS:
            held = usage * pool / running
        found.append(
            RankCapacity(
                dp=dp,
                step=speeds.step,
                prefill=speeds.prefill,
                waiting_tokens=waiting,
                prefill_per_token=speeds.per_token,
                running=running,
                tokens_per_request=held,
                most_requests=most_requests(pool, held, limit),
                pool_tokens=pool,
                running_limit=limit,
                no_step="" if speeds.step else no_step,
            )
        )
    return found


def step_of_lines(server: Server, now: float) -> StepTime | str:
    """Return the step time from the decode lines of all schedulers, or why there is none.

    It is less exact than counters: a line is the mean of some forty steps. The schedulers run the same model on the same kind of GPU,
    and with DP attention each step together. A speculative step gives each request several tokens, so a line must show how many.
    """
    schedulers = server.schedulers.values()
    if server.facts.role == "prefill":
        return DECODES_NOTHING
    if not any(each.decoded_at is not None for each in schedulers):
        return NO_DECODE_STEPS
    begin = now - server.profile.window_seconds
    steps = sorted((step for each in schedulers for step in each.steps if step[0] >= begin), key=lambda step: step[0])
    if not steps and server.facts.is_on("speculative_algorithm") and server.totals["accepted:n"] == 0:
        return NO_ACCEPT_LENGTH
    if steps and steps[-1][0] < now - STALE_SECONDS:
        steps = []
    return fit_of_lines(tuple(sums for _, sums in steps))
