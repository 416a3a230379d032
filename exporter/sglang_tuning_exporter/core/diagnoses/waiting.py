"""Too many requests, or too few: queues, rejections, idle servers. Pure."""

from __future__ import annotations

from dataclasses import replace

from sglang_tuning_exporter.config.profiles import DEFAULT
from sglang_tuning_exporter.core.diagnoses.base import (
    NOT_IN_GUIDE,
    OFTEN,
    QUEUES,
    Beside,
    Diagnosis,
    Group,
    When,
    fact,
    limit,
    look,
    share,
    waiting_figures,
)
from sglang_tuning_exporter.core.diagnoses.graphs import CUDA_GRAPH_NOT_COVERING, CUDA_GRAPH_OFF
from sglang_tuning_exporter.core.diagnoses.life import SCHEDULER_STUCK
from sglang_tuning_exporter.core.diagnoses.native import Native, by_server, series, total
from sglang_tuning_exporter.core.diagnoses.prefill import PREFILL_BOUND
from sglang_tuning_exporter.core.diagnoses.retraction import RETRACTING_TOO_OFTEN
from sglang_tuning_exporter.core.diagnoses.start import FLAGS_AWAY_FROM_DEFAULTS
from sglang_tuning_exporter.core.diagnoses.steps import FEWER, fewer_requests, say, two_digits
from sglang_tuning_exporter.core.findings import STATE_WORDS, Change
from sglang_tuning_exporter.core.sums import STATES
from sglang_tuning_exporter.core.view import View


def _unexplained(view: View) -> float | None:
    """Return the share of the time in which requests wait longer than the profile allows; with priorities some wait by
    design.
    """
    if view.facts.is_on("enable_priority_scheduling"):
        return None
    healthy = ("empty", "in_range") if view.profile.queue_lower is None else ("empty", "in_range", "below_range")
    waited = 1.0 - (view.share("queue", *healthy) or 0.0)
    if view.profile.queue_lower is not None:  # the guide's range is about a full cache
        waited = max(waited, _without_reason(view))
    return waited


def _without_reason(view: View) -> float:
    """Return the share of the time in which SGLang held requests back, or did so for a reason that is not known.

    Seconds whose reason is not known yet, because too few requests have ended, do not count.
    """
    unknown = view.totals["admission/unknown"]
    seconds = view.known["admission"] + unknown
    waited = view.totals["admission/held_back"] + unknown - view.totals["early"]
    return max(waited, 0.0) / seconds if seconds else 0.0


def _shares(view: View) -> str:
    """Say in which states admission was."""
    seen = ((view.share("admission", state) or 0.0, STATE_WORDS[state]) for state in STATES["admission"])
    shares = [f"{100 * share:.0f} % {words}" for share, words in seen if share >= 0.1]
    return f"Seen: {', '.join(shares)}." if shares else "No reason was seen for most of the time."


def _more_requests(view: View, _: Beside) -> list[Change]:
    running, usage, lowest, facts = view.sum("running"), view.mean("usage"), view.profile.queue_lower, view.facts
    if not running or not usage or lowest is None:
        return []
    fit = max(running, running * view.profile.token_usage_target / usage)
    if facts.least_limit is not None:
        fit = min(fit, view.serving_ranks * facts.micro_batches * facts.least_limit)
    waiting = view.serving_ranks * min(lowest, facts.size("max_queued_requests") or lowest)
    ran, now = two_digits(fit), round(running + (view.sum("queued") or 0.0))
    wanted = ran + round(waiting)
    gain = f"now {now:,}; about {ran:,} can run, {waiting:,.0f} more keep the queue filled"
    return [replace(say(words=f"send about {wanted:,} requests at once"), gain=gain)] if wanted > now else []


def _estimated_wait() -> str:
    """Return how long a request that comes now waits in the queue, in PromQL: queued requests over those that start."""
    queued = total(f"avg_over_time({series('num_queue_reqs')}[5m])")
    started = total(f"rate({series('queue_time_seconds_count')}[5m])")
    older = by_server("sum", f"rate({series('time_to_first_token_seconds_count')}[5m])")
    return f"{queued}\n/ ({started}\n   or {older})"


REQUESTS_REJECTED = limit(
    id="requests_rejected",
    title="requests rejected, {value}/min",
    when=When(
        kind="rate",
        measure=lambda view: view.per_minute(view.totals["rejected_requests"]),
        counts=("rejected_requests",),
        side="above",
        limit="rejections_per_minute",
        name="rejected requests/min",
        unit="per_minute",
    ),
    summary="SGLang rejects requests.",
    past="Until {until} SGLang rejected requests.",
    seen="{value} requests/min rejected",
    guide=NOT_IN_GUIDE + "rejected requests mean too little capacity or too many requests",
    remedy=Change(
        direction="slow down",
        words="send fewer requests at once, or add a replica",
        why=(
            "SGLang answers 503 while its queue is full (--max-queued-requests), or after SGLANG_REQ_WAITING_TIMEOUT"
            " seconds of waiting."
        ),
        not_if="clients retry rejected requests without a pause",
    ),
    causes=(SCHEDULER_STUCK, Group.WAIT, CUDA_GRAPH_NOT_COVERING, CUDA_GRAPH_OFF),
    borrows="instead",
    advise=fewer_requests,
    groups=frozenset({Group.REJECTS}),
    supporting=waiting_figures,
    replica="helps",
    notified_beside_causes=True,
)


QUEUE_TOO_LONG = limit(
    id="queue_too_long",
    title="queue too long {value} of the time",
    when=share("queue", "above_range", name="serving time with {queue_limit}"),
    summary="More requests wait than SGLang can start in time.",
    past="Until {until} more requests waited than SGLang could start in time.",
    guide=(
        '"Adjust the request submission speed": a healthy #queue-req is {queue_range}; above it send fewer requests at'
        " once, because scheduling overhead grows, most under lpm"
    ),
    remedy=FEWER,
    causes=(Group.WAIT,),
    borrows="instead",
    advise=fewer_requests,
    groups=frozenset({Group.QUEUES}),
    supporting=waiting_figures,
    replica="helps",
    shade=1,
    native=Native(
        alert="SGLangQueueWait",
        expr=_estimated_wait(),
        limit=f"> {DEFAULT.queue_wait_seconds:g}",
        seen=f"a request that comes now waits {{value}}, more than {DEFAULT.queue_wait_seconds:g} s",
        form="humanizeDuration",
    ),
)


CLIENT_TOO_SLOW = Diagnosis(
    id="client_too_slow",
    title="client too slow {value} of the time",
    severity="info",
    profiles=("offline",),
    when=share("queue", "empty", name="serving time with an empty queue"),
    summary="SGLang's queue is empty: the clients are the bottleneck, not the server.",
    past="Until {until} SGLang's queue was empty: the clients were the bottleneck, not the server.",
    guide=(
        '"Adjust the request submission speed": with #queue-req frequently 0 send requests faster; {queue_range} is'
        " healthy"
    ),
    remedy=Change(
        direction="speed up",
        words="send more requests at once",
        why=(
            "With an empty queue SGLang cannot form full batches. Send more requests in parallel; no server flag helps."
        ),
        not_if="latency matters more than throughput: then use --profile online, which expects an empty queue",
    ),
    unless=(REQUESTS_REJECTED, SCHEDULER_STUCK, RETRACTING_TOO_OFTEN, PREFILL_BOUND),
    advise=_more_requests,
    shade=1,
)


UNEXPLAINED = limit(
    id="unexplained",
    title="requests wait for no known reason {value} of the time",
    after=600.0,
    when=fact(
        measure=_unexplained,
        limit=OFTEN,
        counts=QUEUES,
        name="serving time in which requests waited for no known reason",
    ),
    summary="Requests wait; the cause is not known.",
    past="Until {until} requests waited; the cause is not known.",
    seen="requests waited {value} of the serving time",
    remark=_shares,
    guide="the guide has no row for what this log shows",
    remedy=look(
        words="let the exporter read /metrics as well (--enable-metrics), and keep the log from the server's start",
        why="The lines of this log fit none of the causes that the guide or SGLang's code names.",
        not_if="the clients send in bursts on purpose, and nobody waits for the answers",
    ),
    unless=(
        Group.WAIT,
        QUEUE_TOO_LONG,
        REQUESTS_REJECTED,
        SCHEDULER_STUCK,
        CLIENT_TOO_SLOW,
        Group.OUT_OF_MEMORY,
        FLAGS_AWAY_FROM_DEFAULTS,
    ),
    groups=frozenset({Group.QUEUES}),
    supporting=waiting_figures,
    short="Requests wait, cause not known",
)
