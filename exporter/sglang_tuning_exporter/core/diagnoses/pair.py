"""A prefill/decode pair: transfers that fail, and the other side. Pure."""

from __future__ import annotations

from sglang_tuning_exporter.core.diagnoses.base import (
    NOT_IN_GUIDE,
    Beside,
    Group,
    fact,
    limit,
    look,
    waiting_figures,
    waits,
)
from sglang_tuning_exporter.core.diagnoses.life import SCHEDULER_STUCK
from sglang_tuning_exporter.core.diagnoses.steps import say
from sglang_tuning_exporter.core.events import of_transfer, relaxed
from sglang_tuning_exporter.core.findings import Change, amount
from sglang_tuning_exporter.core.view import View

TRANSFERS_A_MINUTE, RARELY_FAILED = 0.5, 0.01  # failed ones; of the requests


def _failed_transfers(view: View) -> str:
    """Say how many requests failed, on which side, and what SGLang printed of one."""
    failed, line = view.failed_transfers, view.transfer
    why = f", with: {line.short.rstrip('.')}" if line is not None and line.text else ""
    side = f" on this {line.word} server" if line is not None and line.word else ""
    return (
        f"{failed:,.0f} request{'' if failed == 1 else 's'} failed{side}{why};"
        f" {amount(view.per_minute(failed), 'per_minute')}"
    )


def _transfers(view: View) -> float | None:
    """Requests that failed between the two servers of a pair, by the minute."""
    totals, failed = view.totals, view.failed_transfers
    if not failed and not view.facts.role:
        return None
    requests = max(totals["finished_requests"], totals["admitted_requests"], failed)
    value = view.per_minute(failed)
    return value if failed > RARELY_FAILED * requests else min(value, TRANSFERS_A_MINUTE)


def _other_side(view: View, _: Beside) -> list[Change]:
    role, usage = view.facts.role, view.mean("usage")
    words = {
        "": "",
        "prefill": (
            "add decode servers, let each run more requests (its --max-running-requests), or make the transfer faster"
        ),
        "decode": (
            "add prefill servers, or make the transfer faster; if the prealloc queue is the long one, add decode"
            " servers"
        ),
    }[role]
    if role == "decode" and usage is not None and usage >= view.profile.token_usage_target:
        words = "add decode servers, or enlarge the KV cache: it is full, so no request of the prefill side gets in"
    return [say(words=words)] if words else []


def _look_at_transfers(view: View, _: Beside) -> list[Change]:
    """Return what to check, by SGLang's own words about the transfer; then the variable that gives it more time."""
    text = view.transfer.text if view.transfer is not None else ""
    cause = of_transfer(text)
    longer = relaxed(cause, text)
    why = "A longer time-out helps a slow pair, and only delays the error of one that is broken."
    return [
        say(words=cause.do, why=cause.why, not_if=cause.not_if),
        *([say(words=longer, why=why, not_if=cause.not_if)] if longer else []),
    ]


KV_TRANSFER_FAILING = limit(
    id="kv_transfer_failing",
    title="KV transfers fail, {value}",
    any_load=True,
    when=fact(
        measure=_transfers,
        limit=TRANSFERS_A_MINUTE,
        counts=("failed_transfers",),
        name="requests per minute of serving time that failed between prefill and decode server",
        unit="per_minute",
        needs="a prefill or decode server",
    ),
    summary="Requests fail because their KV cache does not get from the prefill to the decode server.",
    past="Until {until} requests failed because their KV cache did not get from the prefill to the decode server.",
    seen="{value}",
    says=_failed_transfers,
    guide=NOT_IN_GUIDE + "no transfer fails in a healthy pair",
    remedy=look(
        words="read the logs of both servers of the pair at the same time",
        why="A request of a disaggregated pair fails when either side ends, hangs, or is not reached.",
        not_if="the other server was stopped on purpose, or is still starting",
    ),
    causes=(SCHEDULER_STUCK,),
    advise=_look_at_transfers,
    notified="{value} requests/min failed between prefill and decode server",
)


PD_QUEUE = limit(
    id="pd_queue",
    title="the other side holds requests up {value} of the time",
    alert="SGLangDisaggregationQueue",
    when=waits(
        "pd_queue",
        name="serving time with most requests in a bootstrap, prealloc, transfer or inflight queue",
    ),
    summary="Requests wait for the other server of a prefill/decode pair, or for the KV cache transfer between them.",
    past=(
        "Until {until} requests waited for the other server of a prefill/decode pair, or for the KV cache transfer"
        " between them."
    ),
    guide=NOT_IN_GUIDE + "with disaggregation the other server or the transfer is the limit",
    remedy=Change(
        direction="balance",
        words="add servers on the slower side, or make the transfer faster",
        why=(
            "The bootstrap and inflight queues of a prefill server wait for decode servers. The prealloc and transfer"
            " queues of a decode server wait for free memory or for the KV cache to arrive."
        ),
        not_if="one of the servers is down: then restart it",
    ),
    causes=(KV_TRANSFER_FAILING,),
    advise=_other_side,
    groups=frozenset({Group.WAIT}),
    supporting=waiting_figures,
    wait="pd_queue",
    short="Other server of the pair is slow",
    shade=1,
)
