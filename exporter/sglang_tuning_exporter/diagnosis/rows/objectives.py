"""Rows about latency objectives: alerts on the burn rate of an error budget over two windows.

The error budget is the share that may miss the objective (0.01 for 0.99). At 14.4 times the allowed rate 2 % of a
month's budget are gone in an hour, at 6 times 5 % in six hours. The short window, a twelfth of the long one, shows
that it continues, and ends the alert soon after the trouble.
"""

from __future__ import annotations

from functools import partial

from sglang_tuning_exporter.diagnosis.conditions.latency import BurnRate, Judged
from sglang_tuning_exporter.diagnosis.interruption import SLOW_BURN_TIMES
from sglang_tuning_exporter.diagnosis.row import Diagnosis, Remedy, Title, look

FAST, SLOW = 14.4, SLOW_BURN_TIMES
# Their causes have no alert, so they hide nothing.
FIRST_TOKEN_CAUSES = ("latency_queue", "latency_long_prompts")
INTER_TOKEN_CAUSES = ("latency_batch_too_large", "latency_prefill_between")


_FIRST_TOKEN = look(
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


def _burn_rates(
    latency: Judged, name: str, short: str, *, of: str, seen: str, causes: tuple[str, ...], remedy: Remedy
) -> tuple[Diagnosis, Diagnosis]:
    """Return the two rows of a latency: for the fast and for the slow burn rate."""
    id_ = name.lower().replace(" ", "_").replace("-", "_") + "_burning"
    alert = "SGLang" + "".join(word.capitalize() for word in id_.split("_"))
    row = partial(Diagnosis, guide=_GUIDE, remedy=remedy, uses_advice_of_causes=True, scale_out="replica")
    fast = row(
        id=f"{id_}_fast",
        alert=f"{alert}Fast",
        severity="critical",
        condition=BurnRate(latency, FAST, "1h", "5m", "10m"),
        summary=f"{name} misses its objective for far too many {of}.",
        seen=seen.format(value="{value}", span="hour"),
        label=f"{short} far above objective",
        title=Title(f"{short} too long for", f"of {of} (1 h)"),
        hold="2m",
        causes=causes,
    )
    slow = row(
        id=f"{id_}_slow",
        alert=f"{alert}Slow",
        severity="warning",
        condition=BurnRate(latency, SLOW, "6h", "30m", "1h"),
        summary=f"{name} misses its objective for more {of} than the error budget allows.",
        seen=seen.format(value="{value}", span="six hours"),
        label=f"{short} above objective",
        title=Title(f"{short} too long for", f"of {of} (6 h)"),
        hold="15m",
        causes=(fast.id, *causes),
        superseded_by=fast.id,
    )
    return fast, slow


OBJECTIVE_DIAGNOSES: tuple[Diagnosis, ...] = (
    # SGLangTimeToFirstTokenBurningFast, SGLangTimeToFirstTokenBurningSlow
    *_burn_rates(
        "time_to_first_token",
        "Time to first token",
        "TTFT",
        of="requests",
        seen="{value} of the first tokens in the last {span} came later than the objective, and still do",
        causes=FIRST_TOKEN_CAUSES,
        remedy=_FIRST_TOKEN,
    ),
    # SGLangInterTokenLatencyBurningFast, SGLangInterTokenLatencyBurningSlow
    *_burn_rates(
        "inter_token",
        "Inter-token latency",
        "ITL",
        of="tokens",
        seen="{value} of the inter-token gaps in the last {span} were longer than the objective, and still are",
        causes=INTER_TOKEN_CAUSES,
        remedy=_NEXT_TOKEN,
    ),
)
