"""Rows about latency objectives: multi-window, multi-burn-rate alerts on the share of observations that miss one.

The error budget is the share that may miss it (0.01 for an objective of 0.99). Burnt 14.4 times too fast, two per cent of a
month's budget are gone in an hour; burnt six times too fast, five per cent in six hours. The short window, a twelfth of the
long one, says that it is still going on, and lets the alert end soon after the trouble.
"""

from __future__ import annotations

from sglang_tuning_exporter.diagnosis.conditions import BurnRate
from sglang_tuning_exporter.diagnosis.interruption import SLOW_BURN_TIMES
from sglang_tuning_exporter.diagnosis.row import Diagnosis, Turn

FAST, SLOW = 14.4, SLOW_BURN_TIMES
# Rows that say why; none of them has an alert, so they hide nothing.
FIRST_TOKEN_CAUSES = ("latency_queue", "latency_long_prompts")
INTER_TOKEN_CAUSES = ("latency_batch_too_large", "latency_prefill_between")


_FIRST_TOKEN = Turn(
    "",
    "look",
    "look at the exporter's page: it names what requests wait for",
    "A request waits for its first token in the queue and while its prompt is computed. Is it the queue, submit more slowly or add a"
    " replica; is it long prompts, --chunked-prefill-size decides how they take turns with everything else.",
    "prompts are so long that no server would keep the objective: then use --profile long_context",
)
_NEXT_TOKEN = Turn(
    "max_running_requests",
    "lower",
    "about three quarters of the batch that runs",
    "A decode step takes the longer the larger its batch is, and every request in it waits for the next token as long.",
    "the batch is small: then prompts computed between two steps hold it up (the exporter names the flag for it), or it runs without a CUDA graph",
    cost="Fewer requests are served at once; those that do not fit wait in the queue.",
)
_GUIDE = "requests slow: lower --max-running-requests, submit more slowly, or look at --chunked-prefill-size (E5); the objective is the profile's"

OBJECTIVE_DIAGNOSES: tuple[Diagnosis, ...] = (
    Diagnosis(
        id="time_to_first_token_burning_fast",
        alert="SGLangTimeToFirstTokenBurningFast",
        severity="critical",
        condition=BurnRate("time_to_first_token", FAST, "1h", "5m", "10m"),
        summary="Far too many requests wait too long for their first token.",
        seen="{value} of the requests of the last hour waited for their first token longer than the objective, and it goes on",
        guide=_GUIDE,
        turn=_FIRST_TOKEN,
        hold="2m",
        causes=FIRST_TOKEN_CAUSES,
    ),
    Diagnosis(
        id="time_to_first_token_burning_slow",
        alert="SGLangTimeToFirstTokenBurningSlow",
        severity="warning",
        condition=BurnRate("time_to_first_token", SLOW, "6h", "30m", "1h"),
        summary="More requests wait too long for their first token than the objective allows.",
        seen="{value} of the requests of the last six hours waited for their first token longer than the objective, and it goes on",
        guide=_GUIDE,
        turn=_FIRST_TOKEN,
        hold="15m",
        causes=("time_to_first_token_burning_fast", *FIRST_TOKEN_CAUSES),
    ),
    Diagnosis(
        id="inter_token_latency_burning_fast",
        alert="SGLangInterTokenLatencyBurningFast",
        severity="critical",
        condition=BurnRate("inter_token", FAST, "1h", "5m", "10m"),
        summary="Answers come far too slowly, token by token.",
        seen="{value} of the tokens of the last hour came later after the one before than the objective, and it goes on",
        guide=_GUIDE,
        turn=_NEXT_TOKEN,
        hold="2m",
        causes=INTER_TOKEN_CAUSES,
    ),
    Diagnosis(
        id="inter_token_latency_burning_slow",
        alert="SGLangInterTokenLatencyBurningSlow",
        severity="warning",
        condition=BurnRate("inter_token", SLOW, "6h", "30m", "1h"),
        summary="Answers come more slowly, token by token, than the objective allows.",
        seen="{value} of the tokens of the last six hours came later after the one before than the objective, and it goes on",
        guide=_GUIDE,
        turn=_NEXT_TOKEN,
        hold="15m",
        causes=("inter_token_latency_burning_fast", *INTER_TOKEN_CAUSES),
    ),
)
