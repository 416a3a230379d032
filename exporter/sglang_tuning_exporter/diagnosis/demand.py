"""What requests use of the tokens they ask for, from the balance at which SGLang stops admitting, and what they wait for. Pure.

While requests wait, the next one just does not fit: the free KV cache is what SGLang reserves for running requests
(new-token ratio x what each may still generate) and what the next one asks for (PrefillAdder.add_one_req,
srt/managers/schedule_policy.py, 0.4.9 to 0.5.23). So the KV cache's size, its usage, the batch and the ratio give
what requests ask for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from sglang_tuning_exporter.diagnosis.evidence import Past
from sglang_tuning_exporter.diagnosis.interruption import prefill_takes_most

CONSTANT_BATCH_SHARE = 0.8  # of the time with one batch size; docs/decisions.md
# Times the duration of the slowest answers. Answers are counted when they end, so before that the long ones are
# missing.
LEAST_ANSWER_DURATIONS = 2.0
# Share of max_new_tokens that requests use. Above it a retraction raises the ratio beyond where 0.3 starts (0.7 x
# 0.3), so a low flag leads to bursts of retractions and slow recovery.
USED_LITTLE = 0.21
# How close answers of one length must be to the full reservation.
SIMILAR_LENGTH = 1.5
# Share of prompt tokens from the prefix cache. Above it a request's own tokens are not known.
MOSTLY_SHARED = 0.5
# Estimates with bounds further apart are not shown.
PRECISE = 1.5
# SGLang reserves at most so many tokens for one request (CLIP_MAX_NEW_TOKENS, srt/managers/schedule_policy.py).
MOST_RESERVED = 4096.0
# After a request does not fit, SGLang tries the next one only when a running request has ended (batch_is_full,
# srt/managers/scheduler.py, 0.4.9 to 0.5.23). So up to two requests' KV cache can be free while others wait for it.
FREE_BESIDE_A_QUEUE = 2.0
# Answers are longer than the log counts by so much at most: their last tokens come after their last decode line.
COUNTED_SHORT = 1.25


def mean_prompt(past: Past) -> float | None:
    """Return the tokens of a mean prompt, cached ones included; None if not known.

    From the requests that ended, if any: in the log a prompt counts again after a retraction.
    """
    counts = past.recent.counts
    if past.finished_requests and counts["finished_prompt_tokens"]:
        return counts["finished_prompt_tokens"] / past.finished_requests
    tokens, started = counts["cached_tokens"] + counts["computed_tokens"], past.started_requests
    # The log's prefill lines count a retracted request again.
    requests = counts["new_sequences"] if started is None else started
    return tokens / requests if requests and tokens else None


def held_tokens(past: Past, mean: Callable[[Literal["usage", "running"]], float | None]) -> float | None:
    """Return the KV cache tokens of one running request, by a mean of figures; None if not known."""
    running, usage, pools = mean("running"), mean("usage"), past.facts.kv_pool_tokens.values()
    return usage * (sum(pools) / len(pools)) / running if running and usage and pools else None


def longest_answer(past: Past) -> float | None:
    """Return the 99th percentile of answer tokens; None if not known, or if long answers may still be running."""
    slowest = past.latency.get("request")
    waited = past.latency.get("time_to_first_token") or past.latency.get("queue")  # without streaming: the longer one
    if slowest is None:
        return None
    if past.served_seconds < LEAST_ANSWER_DURATIONS * (slowest.p99_seconds - (waited.p50_seconds if waited else 0.0)):
        return None
    return past.longest_answer


@dataclass(frozen=True, slots=True)
class Demand:
    """Tokens of the mean running request: generated so far (`used`), and allowed (`asked` to `most`).

    At `asked` the next request just does not fit, at `most` the last one just did. Both are at most 4,096: SGLang
    reserves no more.
    """

    used: float
    asked: float
    most: float

    @property
    def share(self) -> float:
        """The used share of max_new_tokens, 0-1: what SGLang sets the ratio to after a retraction."""
        return min(self.used / self.asked, 1.0)

    @property
    def is_precise(self) -> bool:
        """Whether the bounds are close enough to show a figure."""
        return self.most <= PRECISE * self.asked


def demand(past: Past, ratio: float | None = None) -> Demand | None:
    """Return the demand at admission's balance, with the server's new-token ratio or another `ratio`.

    None without the new-token ratio (before 0.5.5), the KV cache's size or prompts, or if most prompt tokens are
    shared.
    """
    counts, facts, ratio = past.recent.counts, past.facts, past.new_token_ratio if ratio is None else ratio
    running, usage, prompt = past.mean_while_held_back("running"), past.mean_while_held_back("usage"), mean_prompt(past)
    pools, tokens = facts.kv_pool_tokens.values(), counts["cached_tokens"] + counts["computed_tokens"]
    shared = counts["cached_tokens"] / tokens if tokens else 0.0
    if ratio is None or not running or not usage or not pools or prompt is None or shared > MOSTLY_SHARED:
        return None
    pool, own = sum(pools) / len(pools), (1.0 - shared) * prompt
    used = usage * pool / (running * facts.micro_batches) - own
    if used <= 0:
        return None
    free, kept_for = (1.0 - usage) * pool, ratio * running  # in requests; other micro batches reserve nothing here
    kept_before = ratio * max(running - 1.0, 0.0)
    asked = (free - own + kept_for * used) / (1.0 + kept_for)
    most = (free + kept_before * used) / (1.0 + kept_before)
    return Demand(used, max(asked, used), max(most, used))


def is_reserved_in_full(past: Past) -> bool:
    """Return whether SGLang reserves all that requests may still generate, whatever the new-token ratio.

    It does so for requests with `ignore_eos` (`_get_running_request_total_token_offset`,
    srt/managers/schedule_policy.py). Then answers have one length, and the balance without the ratio gives that
    length.
    """
    length, by_ratio, in_full = past.fixed_answer_tokens, demand(past), demand(past, 1.0)
    if length is None or by_ratio is None or in_full is None:
        return False
    return _is_near(in_full, length) and not _is_near(by_ratio, length)


def is_used_later(past: Past) -> bool:
    """Return whether running requests will fill what is free: on average they are halfway through their answers.

    For a server of which only the log is read: it shows no length of an answer, but how many tokens were decoded for each
    request that started. Then requests wait for the KV cache, whatever SGLang reserves by.
    """
    counts, facts = past.recent.counts, past.facts
    running, usage = past.mean_while_held_back("running"), past.mean_while_held_back("usage")
    prompt, pools, started = mean_prompt(past), facts.kv_pool_tokens.values(), counts["new_sequences"]
    if past.finished_requests is not None or facts.args.get("speculative_algorithm"):
        return False
    if not running or usage is None or prompt is None or not pools or not started:
        return False
    batch = past.recent.mean("running") or 0.0
    answer = (counts["replayed"] + counts["eager"]) * batch / started
    used = running * facts.micro_batches * answer / 2 + FREE_BESIDE_A_QUEUE * (prompt + answer)
    return (1.0 - usage) * min(pools) <= COUNTED_SHORT * used


def could_not_reserve(past: Past) -> bool:
    """Return whether more is free than SGLang can reserve for running requests and the next ones: then they wait for another reason."""
    running, usage, prompt = past.mean_while_held_back("running"), past.mean_while_held_back("usage"), mean_prompt(past)
    pools = past.facts.kv_pool_tokens.values()
    if not running or usage is None or not pools or prompt is None:
        return False
    kept = (past.new_token_ratio or 1.0) * running * past.facts.micro_batches * MOST_RESERVED
    return (1.0 - usage) * min(pools) > kept + FREE_BESIDE_A_QUEUE * (prompt + MOST_RESERVED)


def _is_near(found: Demand, length: float) -> bool:
    return found.asked / SIMILAR_LENGTH <= length <= found.most * SIMILAR_LENGTH


def with_waits_explained(past: Past) -> Past:
    """Return the past with the waits explained that one moment alone cannot explain.

    If all free KV cache is reserved for running requests that will use it, the KV cache is full. If the running limit
    is not known, a batch of nearly constant size is at a limit.
    """
    if is_reserved_in_full(past) or is_used_later(past):
        return _held_back_counted_as(past, "pool_full")
    if prefill_takes_most(past):
        return _held_back_counted_as(past, "prefill_bound")
    if could_not_reserve(past):
        return _held_back_counted_as(past, "unknown")
    sizes = past.recent.running_seconds
    unknown = all(past.facts.running_limit(dp) is None for dp in past.by_rank or (None,))
    if unknown and sizes and max(sizes.values()) > CONSTANT_BATCH_SHARE * sum(sizes.values()):
        return _held_back_counted_as(past, "unknown")
    return past


def _held_back_counted_as(past: Past, state: str) -> Past:
    recent = past.recent.copy()
    recent.seconds["admission", state] += recent.seconds.pop(("admission", "held_back"), 0.0)
    return replace(past, recent=recent)
