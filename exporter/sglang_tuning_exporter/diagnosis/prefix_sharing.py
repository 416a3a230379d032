"""How much of the prompts is shared between requests, without what retracted requests find of their own. Pure.

A request that was retracted, or preempted by one of higher priority, starts again and may find its own tokens in the
cache. They look like a shared prefix. So does the prompt of a request for several answers (`n`): SGLang computes it
once, and each answer is a request that finds all of it (_handle_batch_request, srt/managers/tokenizer_manager.py).
These follow each other in any order of the queue.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_tuning_exporter.diagnosis.demand import held_tokens, mean_prompt
from sglang_tuning_exporter.diagnosis.evidence import Past
from sglang_tuning_exporter.sglang.args.flags import is_before

# From here on cached_tokens_total omits requests that start again (retracted_stain, srt/managers/schedule_batch.py).
COUNTED_ONCE = (0, 5, 9)
# Requests that end for each that came over HTTP: two answers to a prompt are three requests, as SGLang computes the prompt first.
SEVERAL_ANSWERS = 2.0
# Share of the cached tokens in batches of such answers alone; above it the rest is put down to mixed batches.
REPEATED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class PrefixSharing:
    """Shares of all prompt tokens: from the cache, and at most this part from requests' own prompts (None: not known)."""

    cached: float
    from_own_runs: float | None

    @property
    def proven(self) -> float | None:
        """The least share of prefixes that other requests computed; None if not known."""
        return None if self.from_own_runs is None else max(self.cached - self.from_own_runs, 0.0)


def sharing(past: Past) -> PrefixSharing | None:
    """Return it for the requests that ended, else for the log's prefill lines; None without prompts or radix cache."""
    if past.facts.arg("disable_radix_cache"):
        return None
    counts, release = past.recent.counts, past.facts.release
    prompts, cached = counts.get("finished_prompt_tokens"), counts.get("finished_cached_tokens")
    ended = (past.finished_requests or 0.0) >= past.profile.enough_observations and cached is not None
    if not ended:
        prompts, cached = counts["cached_tokens"] + counts["computed_tokens"], counts["cached_tokens"]
    if not prompts or cached is None:
        return None
    share = min(cached / prompts, 1.0)
    repeated = share * _repeated(past)
    if ended and release is not None and not is_before(release, COUNTED_ONCE):
        return PrefixSharing(share, repeated)
    came_back = _restarted_requests(past)
    length = _restarted_tokens(past) if came_back else 0.0
    if came_back is None or length is None:
        return PrefixSharing(share, None)
    return PrefixSharing(share, min(repeated + came_back * length / prompts, share))


def _repeated(past: Past) -> float:
    """Return the share of cached prompt tokens that further answers to one prompt found, at most.

    In the log they compute one token of each prompt, unless a batch has other prompts too. Metrics alone: more requests
    ended than came over HTTP.
    """
    counts, ended = past.recent.counts, past.finished_requests
    if counts["cached_tokens"]:
        repeated = counts["repeated_tokens"] / counts["cached_tokens"]
        return 1.0 if repeated > REPEATED_SHARE else repeated
    posted = counts.get("posted_requests")
    return 1.0 if ended and posted is not None and ended >= SEVERAL_ANSWERS * posted else 0.0


def _restarted_requests(past: Past) -> float | None:
    """Return how many requests started again, at most; None if nothing counts them."""
    counts, facts = past.recent.counts, past.facts
    retracted = max(counts["log_retracted_requests"], counts["native_retracted_requests"])
    if not facts.arg("enable_priority_scheduling") or facts.arg("disable_priority_preemption"):
        return retracted
    # Preemptions are neither logged nor counted: more requests were prefilled than started.
    started = past.started_requests
    if started is None or not counts["new_sequences"]:
        return None
    return max(counts["new_sequences"] - started, retracted)


def _restarted_tokens(past: Past) -> float | None:
    """Return the tokens that a request may find of its own: prompt and answer so far, as the KV cache held them."""
    counts, started = past.recent.counts, past.recent.counts["new_sequences"]
    logged = (counts["cached_tokens"] + counts["computed_tokens"]) / started if started else None
    prompts = [each for each in (mean_prompt(past), logged) if each is not None]
    return max(*prompts, held_tokens(past, past.recent.mean) or 0.0) if prompts else None
