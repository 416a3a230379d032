"""Latency objectives that are missed: tokens, first tokens, and their error budgets. Pure."""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang_tuning_exporter.core.diagnoses.base import (
    LIMIT,
    NOT_IN_GUIDE,
    ONLINE,
    Beside,
    Diagnosis,
    Group,
    Measure,
    fact,
    limit,
    look,
)
from sglang_tuning_exporter.core.diagnoses.life import RESTART_LOOP, SCHEDULER_STUCK, SERVER_DOWN
from sglang_tuning_exporter.core.diagnoses.prefill import LATENCY_LONG_PROMPTS, LATENCY_PREFILL_BETWEEN, PREFILL_BOUND
from sglang_tuning_exporter.core.diagnoses.steps import (
    LATE_TIMES,
    SLOW_BURN_TIMES,
    SMALL_BATCH,
    by_queue,
    fewer_requests,
    late,
    late_rule,
    run_fewer,
)
from sglang_tuning_exporter.core.diagnoses.waiting import QUEUE_TOO_LONG
from sglang_tuning_exporter.core.findings import Change
from sglang_tuning_exporter.core.view import BURN_RATES, View

LARGE_BATCH, RARELY = 32.0, 0.25  # requests; of the time
LEAST_SHARE = 0.25  # of the batch, in one step


def _burning(latency: str, rate: str) -> Measure:
    """Give the share of the observations that missed the objective, in both windows of a burn rate."""

    def of(view: View) -> float | None:
        share = view.burning.get((latency, rate))
        return 0.0 if share is not None and view.hung else share

    return of


def _step_of_a_large_batch(view: View) -> float | None:
    """Seconds between two tokens, where decoding alone takes them: the batch is large and prompts take little of the
    time.
    """
    prefills = view.totals["prefilling"] > RARELY * view.known["queue"]
    return None if (view.batch(0.5) or 0.0) < LARGE_BATCH or prefills else view.step_seconds


def _smaller_batch(view: View, _: Beside) -> list[Change]:
    batch, step, objective = view.batch(0.5), view.step_seconds, view.profile.inter_token_seconds
    if batch is None or batch <= SMALL_BATCH or not step or not objective:
        return []
    return run_fewer(view, batch, max(objective / step, LEAST_SHARE))


LATENCY_BATCH_TOO_LARGE = limit(
    id="latency_batch_too_large",
    title="tokens slow, {value} apart",
    profiles=ONLINE,
    when=fact(
        measure=_step_of_a_large_batch,
        counts=("decode_lines",),
        limit="inter_token_seconds",
        name="seconds between two tokens of a request, by the decode lines",
        unit="seconds",
    ),
    summary="Inter-token latency is too high: decode batches are large.",
    past="Until {until} inter-token latency was too high: decode batches were large.",
    seen="{value} between two tokens of a request",
    guide="where requests are slow, lower --max-running-requests",
    remedy=Change(
        arg=LIMIT,
        direction="lower",
        words="about half of the running batch",
        why="A decode step takes longer with a larger batch, and every request in the batch waits for the whole step.",
        not_if="the batch is already small: then the model is too slow for this GPU",
        cost="Throughput falls, and requests may queue.",
    ),
    unless=(PREFILL_BOUND,),
    protects="requests",
    advise=_smaller_batch,
    replica="helps",
    shade=2,
    native=late_rule(
        "SGLangInterTokenLatencyHigh",
        "inter_token_latency",
        SLOW_BURN_TIMES,
        "gaps between two tokens were {value} or longer",
    ),
)


LATENCY_QUEUE = limit(
    id="latency_queue",
    title="TTFT too long by the queue for {value} of requests",
    profiles=ONLINE,
    when=late("time_to_first_token", LATE_TIMES, "first tokens", by_queue),
    summary="Time to first token is too high: requests wait in the queue.",
    past="Until {until} time to first token was too high: requests waited in the queue.",
    seen="{value} of the first tokens came later than the objective",
    guide="where requests are slow, send fewer requests at once",
    remedy=Change(
        direction="slow down",
        words="send fewer requests at once, or add a replica",
        why="Time to first token includes the time in the queue.",
        not_if="another finding names why requests wait: change its flag first",
    ),
    causes=(Group.WAIT, QUEUE_TOO_LONG),
    borrows="instead",
    advise=fewer_requests,
    groups=frozenset({Group.QUEUES}),
    replica="helps",
    native=late_rule(
        "SGLangTimeToFirstTokenHigh", "time_to_first_token", LATE_TIMES, "first tokens came after {value} or later"
    ),
)


# Burn rates of the error budgets

_CRITICAL = (RESTART_LOOP, SERVER_DOWN, Group.FAILURE)


def _burn_rate(
    latency: str, words: str, of: str, late: str, *, short: str, fast: Diagnosis | None = None, **own: Any
) -> Diagnosis:
    """Return the diagnosis of a burn rate, the slow one beside the `fast` one.

    Its alert has no `after`: the ledger's windows are the wait.

    of: the observations that miss the objective.
    """
    rate, span, much = ("fast", "hour", "far too many") if fast is None else ("slow", "six hours", "more")
    more = "" if fast is None else " than the error budget allows"
    others = () if fast is None else (fast,)
    return Diagnosis(
        id=f"{words.lower().replace(' ', '_').replace('-', '_')}_burning_{rate}",
        title=f"{short} too long for {{value}} of {of} ({'1 h' if fast is None else '6 h'})",
        summary=f"{words} misses its objective for {much} {of}{more}.",
        past=f"{words} missed its objective for {much} {of}{more}.",
        seen=f"{{value}} of the {late} in the last {span}, and the short window shows that it goes on",
        severity="critical" if fast is None else "warning",
        profiles=ONLINE,
        after=0.0,
        any_load=True,
        chance=True,
        when=fact(
            measure=_burning(latency, rate),
            limit=lambda view: view.profile.late_bound(BURN_RATES[rate][0]),
            name=f"share of {of} that missed the objective",
            needs="hours of metrics",
        ),
        guide=NOT_IN_GUIDE + "the objective comes from the profile",
        borrows="instead",
        unless=(SCHEDULER_STUCK, *others),
        held_back_by=(*_CRITICAL, *others),
        **own,
    )


_first_tokens = partial(
    _burn_rate,
    "time_to_first_token",
    "Time to first token",
    "requests",
    "first tokens came later than the objective",
    short="TTFT",
    causes=(LATENCY_QUEUE, LATENCY_LONG_PROMPTS),
    remedy=look(
        words="open the exporter's page: it shows what requests wait for",
        why="Time to first token is the time in the queue plus the prefill time.",
        not_if="prompts are too long for this objective on any server: then use --profile long_context",
    ),
)
_next_tokens = partial(
    _burn_rate,
    "inter_token",
    "Inter-token latency",
    "tokens",
    "gaps between tokens were longer than the objective",
    short="ITL",
    causes=(LATENCY_BATCH_TOO_LARGE, LATENCY_PREFILL_BETWEEN),
    remedy=Change(
        arg=LIMIT,
        direction="lower",
        words="about three quarters of the running batch",
        why="A decode step takes longer with a larger batch, and every request in the batch waits for the whole step.",
        not_if="the batch is small: then prefill between decode steps is the cause, or decoding without a CUDA graph",
        cost="Fewer requests run at once; the others wait in the queue.",
    ),
)
TIME_TO_FIRST_TOKEN_BURNING_FAST = _first_tokens()
TIME_TO_FIRST_TOKEN_BURNING_SLOW = _first_tokens(
    fast=TIME_TO_FIRST_TOKEN_BURNING_FAST,
    shade=2,
)
INTER_TOKEN_LATENCY_BURNING_FAST = _next_tokens(shade=1)
INTER_TOKEN_LATENCY_BURNING_SLOW = _next_tokens(
    fast=INTER_TOKEN_LATENCY_BURNING_FAST,
)
