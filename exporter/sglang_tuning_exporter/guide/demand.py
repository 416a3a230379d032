"""What requests use of the tokens they ask for, read off the balance at which SGLang stops admitting. Pure.

While requests wait and the pool has room, the next one just does not fit: what is free is what is kept for those that run
(new-token ratio x what each may still ask for) and all that the next asks for (PrefillAdder.add_one_req,
srt/managers/schedule_policy.py, 0.4.9 to 0.5.23). So what they ask for follows from pool, usage, batch and ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_tuning_exporter.guide.evidence import Past


def mean_prompt(past: Past) -> float | None:
    """Give the tokens of a mean prompt, cached ones included; None where prompts or requests are not told.

    Of the requests that ended, where any did: the log's prompts are counted again when a request is taken back.
    """
    counts = past.recent.counts
    if past.finished_requests and counts["finished_prompt_tokens"]:
        return counts["finished_prompt_tokens"] / past.finished_requests
    tokens, started = counts["cached_tokens"] + counts["computed_tokens"], past.started_requests
    return tokens / started if started and tokens else None


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


@dataclass(frozen=True, slots=True)
class Demand:
    """Tokens of the mean running request: what it has answered so far, and what it may answer at most."""

    used: float
    asked: float  # 4096 where clients ask for more: SGLang keeps no more free

    @property
    def share(self) -> float:
        """The part of max_new_tokens that is used, 0-1: what SGLang sets the ratio to after a retraction."""
        return min(self.used / self.asked, 1.0)


def demand(past: Past) -> Demand | None:
    """Read the demand off the balance.

    None where the server does not tell enough: without its ratio (before 0.5.5), its pool or its prompts.
    """
    running, usage, ratio = past.recent.mean("running"), past.recent.mean("usage"), past.new_token_ratio
    pools, prompt = past.facts.kv_pool_tokens.values(), mean_prompt(past)
    if not running or not usage or ratio is None or not pools or prompt is None:
        return None
    pool = sum(pools) / len(pools)
    used = usage * pool / (running * past.facts.micro_batches) - prompt
    kept_for = ratio * running  # requests, of which all would be kept free; other micro batches keep nothing free here
    asked = ((1.0 - usage) * pool - prompt + kept_for * used) / (1.0 + kept_for)
    return Demand(used, asked) if used > 0 and asked > 0 else None
