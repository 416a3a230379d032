"""Rows about latency objectives: alerts on the burn rate of an error budget over two windows.

The error budget is the share that may miss the objective (0.01 for 0.99). At 14.4 times the allowed rate 2 % of a
month's budget are gone in an hour, at 6 times 5 % in six hours. The short window, a twelfth of the long one, shows
that it continues, and ends the alert soon after the trouble.
"""

from __future__ import annotations

from sglang_tuning_exporter.diagnosis.conditions import BurnRate
from sglang_tuning_exporter.diagnosis.interruption import SLOW_BURN_TIMES
from sglang_tuning_exporter.diagnosis.row import Diagnosis, Remedy, Title

FAST, SLOW = 14.4, SLOW_BURN_TIMES
# Their causes have no alert, so they hide nothing.
FIRST_TOKEN_CAUSES = ("latency_queue", "latency_long_prompts")
INTER_TOKEN_CAUSES = ("latency_batch_too_large", "latency_prefill_between")


_FIRST_TOKEN = Remedy(
    "",
    "look",
    "open the exporter's page: it shows what requests wait for",
    "Time to first token is the time in the queue plus the prefill time. If the queue is long, send fewer requests at once or add a"
    " replica. If prompts are long, change --chunked-prefill-size.",
    "prompts are too long for this objective on any server: then use --profile long_context",
)
_NEXT_TOKEN = Remedy(
    "max_running_requests",
    "lower",
    "about three quarters of the running batch",
    "A decode step takes longer with a larger batch, and every request in the batch waits for the whole step.",
    "the batch is small: then prefill between decode steps is the cause (the exporter names the flag), or decoding without a CUDA graph",
    cost="Fewer requests run at once; the others wait in the queue.",
)
_GUIDE = (
    "SGLang's tuning guide: where requests are slow, lower --max-running-requests, send fewer requests at once, or change"
    " --chunked-prefill-size; the objective comes from the profile"
)

OBJECTIVE_DIAGNOSES: tuple[Diagnosis, ...] = (
    Diagnosis(
        id="time_to_first_token_burning_fast",
        alert="SGLangTimeToFirstTokenBurningFast",
        severity="critical",
        condition=BurnRate("time_to_first_token", FAST, "1h", "5m", "10m"),
        summary="Time to first token misses its objective for far too many requests.",
        seen="{value} of the first tokens in the last hour came later than the objective, and still do",
        guide=_GUIDE,
        label="TTFT far above objective",
        title=Title("TTFT too long for", "of requests (1 h)"),
        remedy=_FIRST_TOKEN,
        hold="2m",
        causes=FIRST_TOKEN_CAUSES,
        uses_advice_of_causes=True,
        scale_out="replica",
    ),
    Diagnosis(
        id="time_to_first_token_burning_slow",
        alert="SGLangTimeToFirstTokenBurningSlow",
        severity="warning",
        condition=BurnRate("time_to_first_token", SLOW, "6h", "30m", "1h"),
        summary="Time to first token misses its objective for more requests than the error budget allows.",
        seen="{value} of the first tokens in the last six hours came later than the objective, and still do",
        guide=_GUIDE,
        label="TTFT above objective",
        title=Title("TTFT too long for", "of requests (6 h)"),
        remedy=_FIRST_TOKEN,
        hold="15m",
        causes=("time_to_first_token_burning_fast", *FIRST_TOKEN_CAUSES),
        uses_advice_of_causes=True,
        superseded_by="time_to_first_token_burning_fast",
        scale_out="replica",
    ),
    Diagnosis(
        id="inter_token_latency_burning_fast",
        alert="SGLangInterTokenLatencyBurningFast",
        severity="critical",
        condition=BurnRate("inter_token", FAST, "1h", "5m", "10m"),
        summary="Inter-token latency misses its objective for far too many tokens.",
        seen="{value} of the inter-token gaps in the last hour were longer than the objective, and still are",
        guide=_GUIDE,
        label="ITL far above objective",
        title=Title("ITL too long for", "of tokens (1 h)"),
        remedy=_NEXT_TOKEN,
        hold="2m",
        causes=INTER_TOKEN_CAUSES,
        uses_advice_of_causes=True,
        scale_out="replica",
    ),
    Diagnosis(
        id="inter_token_latency_burning_slow",
        alert="SGLangInterTokenLatencyBurningSlow",
        severity="warning",
        condition=BurnRate("inter_token", SLOW, "6h", "30m", "1h"),
        summary="Inter-token latency misses its objective for more tokens than the error budget allows.",
        seen="{value} of the inter-token gaps in the last six hours were longer than the objective, and still are",
        guide=_GUIDE,
        label="ITL above objective",
        title=Title("ITL too long for", "of tokens (6 h)"),
        remedy=_NEXT_TOKEN,
        hold="15m",
        causes=("inter_token_latency_burning_fast", *INTER_TOKEN_CAUSES),
        uses_advice_of_causes=True,
        superseded_by="inter_token_latency_burning_fast",
        scale_out="replica",
    ),
)
