"""What requests use of the tokens they ask for, read off the balance at which SGLang stops admitting. Pure.

While requests wait and the pool has room, the next one just does not fit: what is free is what is kept for those that run
(new-token ratio x what each may still ask for) and all that the next asks for (PrefillAdder.add_one_req,
srt/managers/schedule_policy.py, 0.4.9 to 0.5.23). So what they ask for follows from pool, usage, batch and ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_tuning_exporter.diagnosis.evidence import Past


def mean_prompt(past: Past) -> float | None:
    """Give the tokens of a mean prompt, cached ones included; None where prompts or requests are not told.

    Of the requests that ended, where any did: the log's prompts are counted again when a request is taken back.
    """
    counts = past.recent.counts
    if past.finished_requests and counts["finished_prompt_tokens"]:
        return counts["finished_prompt_tokens"] / past.finished_requests
    tokens, started = counts["cached_tokens"] + counts["computed_tokens"], past.started_requests
    # The log's prefill lines begin a request again that was taken back.
    requests = counts["new_sequences"] if started is None else started
    return tokens / requests if requests and tokens else None


# Of the time that the slowest answers take. They are told of when they end: watched for less, the long ones are missing.
WATCHED_LONG = 2.0


def longest_answer(past: Past) -> float | None:
    """Give the tokens that 99 % of the answers end within; None where that is not told, or the long ones may still be under way."""
    slowest = past.latency.get("request")
    waited = past.latency.get("time_to_first_token") or past.latency.get("queue")  # nothing is streamed: the longer one
    if slowest is None:
        return None
    if past.served_seconds < WATCHED_LONG * (slowest.p99_seconds - (waited.p50_seconds if waited else 0.0)):
        return None
    return past.longest_answer


# Of what they ask for, running requests may have used this much before a retraction leaves the ratio higher than 0.3 starts at
# (0.7 x 0.3): from there on a low flag means bursts of retractions and long over-care after each.
USED_LITTLE = 0.21
# Answers of one length this close to what a request would ask for if all of it were kept free: then all of it is.
ALIKE = 1.5
# Of the prompt tokens from the prefix cache: with more of them nobody knows what a request has for itself.
MOSTLY_SHARED = 0.5
# Estimates whose bounds are further apart than this are no figure to show.
SHARP = 1.5


@dataclass(frozen=True, slots=True)
class Demand:
    """Tokens of the mean running request: what it has answered so far, and what it may answer at most.

    `asked` and `most` are the bounds of the latter: at `asked` the next request just does not fit, at `most` the last one just
    did. Where clients ask for more than 4,096 they are 4,096: SGLang keeps no more free.
    """

    used: float
    asked: float
    most: float

    @property
    def share(self) -> float:
        """The part of max_new_tokens that is used, 0-1: what SGLang sets the ratio to after a retraction."""
        return min(self.used / self.asked, 1.0)

    @property
    def is_sharp(self) -> bool:
        """Whether the bounds are close enough for a figure."""
        return self.most <= SHARP * self.asked


def demand(past: Past) -> Demand | None:
    """Read the demand off the balance.

    None where the server does not expose enough: without its ratio (before 0.5.5), its KV cache's size or its prompts, or where
    most of the prompt tokens are shared, so that nobody knows what a request has for itself.
    """
    ratio = past.new_token_ratio
    return None if ratio is None else _balance(past, ratio)


def is_reserved_in_full(past: Past) -> bool:
    """Say whether all of what requests may still answer is kept free, whatever the new-token ratio: they ignore the end of sequence.

    SGLang does so for requests with `ignore_eos` (`_get_running_request_total_token_offset`, srt/managers/schedule_policy.py).
    Then answers are of one length, and that length is what the balance gives without the ratio.
    """
    length, by_ratio, in_full = past.fixed_answer, demand(past), _balance(past, 1.0)
    if length is None or by_ratio is None or in_full is None:
        return False
    return _near(in_full, length) and not _near(by_ratio, length)


# SGLang keeps at most so many tokens free for one request (CLIP_MAX_NEW_TOKENS, srt/managers/schedule_policy.py).
MOST_RESERVED = 4096.0


# Once a request does not fit, SGLang tries the next one only when a running one has ended (batch_is_full, srt/managers/scheduler.py,
# 0.4.9 to 0.5.23). Where one fits then, the batch stays as it is, so up to two requests' room is free while others wait for room.
FREE_BESIDE_A_QUEUE = 2.0


def could_not_reserve(past: Past) -> bool:
    """Return whether more is free than SGLang can be keeping for running requests and the next ones: requests wait for another reason."""
    running, usage, prompt = past.at_balance("running"), past.at_balance("usage"), mean_prompt(past)
    pools = past.facts.kv_pool_tokens.values()
    if not running or usage is None or not pools or prompt is None:
        return False
    kept = (past.new_token_ratio or 1.0) * running * past.facts.micro_batches * MOST_RESERVED
    return (1.0 - usage) * min(pools) > kept + FREE_BESIDE_A_QUEUE * (prompt + MOST_RESERVED)


def _near(found: Demand, length: float) -> bool:
    return found.asked / ALIKE <= length <= found.most * ALIKE


def _balance(past: Past, ratio: float) -> Demand | None:
    counts, facts = past.recent.counts, past.facts
    running, usage, prompt = past.at_balance("running"), past.at_balance("usage"), mean_prompt(past)
    pools, tokens = facts.kv_pool_tokens.values(), counts["cached_tokens"] + counts["computed_tokens"]
    shared = counts["cached_tokens"] / tokens if tokens else 0.0
    if not running or not usage or not pools or prompt is None or shared > MOSTLY_SHARED:
        return None
    pool, own = sum(pools) / len(pools), (1.0 - shared) * prompt
    used = usage * pool / (running * facts.micro_batches) - own
    if used <= 0:
        return None
    free, kept_for = (1.0 - usage) * pool, ratio * running  # requests; other micro batches keep nothing free here
    kept_before = ratio * max(running - 1.0, 0.0)
    asked = (free - own + kept_for * used) / (1.0 + kept_for)
    most = (free + kept_before * used) / (1.0 + kept_before)
    return Demand(used, max(asked, used), max(most, used))
