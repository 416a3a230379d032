"""Decode steps that wait while prompts are computed, read off the gaps between tokens and the tokens of prompts. Pure.

SGLang computes waiting prompts before it decodes again, a long one chunk after chunk (`get_next_batch_to_run`,
srt/managers/scheduler.py), so each stops every running answer. Figures and reasons: docs/decisions.md.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_tuning_exporter.diagnosis.evidence import Past
    from sglang_tuning_exporter.state.profiles import Profile

# Prompt tokens for each late gap: fewer are computed in about the time of a decode step.
LONG_PREFILL = 512.0


# Of the time that answers stand still for prompts: with more, prefill is what requests wait for.
MOSTLY = 0.5


# Times the budget of the objective at which the slow burn-rate alert fires, and the row about prompts in between holds.
SLOW_BURN_TIMES = 6.0


def steps_between(profile: Profile) -> float:
    """Give the decode steps after each chunk with which gaps that have a chunk in them are few enough; 0 without an objective."""
    return 0.0 if profile.inter_token_seconds is None else float(ceil(1.0 / profile.late_bound(SLOW_BURN_TIMES)))


def prefill_takes_most(past: Past) -> bool:
    """Say whether answers stand still most of the time, and for prompts: then those that wait do it for prefill as well."""
    return (standing_still(past) or 0.0) > MOSTLY and (tokens_for_each_late_gap(past) or 0.0) >= LONG_PREFILL


def standing_still(past: Past) -> float | None:
    """Give the share of the time in which running answers wait for longer than one usual step, 0-1; None where gaps are not told."""
    gaps = past.latency.get("inter_token")
    if gaps is None or not gaps.mean_seconds:
        return None
    return max(1.0 - gaps.p50_seconds / gaps.mean_seconds, 0.0)


def computed_tokens(past: Past) -> float:
    """Count the prompt tokens that were computed, not found in the cache: as logged, else of the requests that ended."""
    counts = past.recent.counts
    return counts["computed_tokens"] or max(
        counts.get("finished_prompt_tokens", 0.0) - counts.get("finished_cached_tokens", 0.0), 0.0
    )


def tokens_for_each_late_gap(past: Past) -> float | None:
    """Give how many prompt tokens were computed for each gap that missed its objective; None where too little is told."""
    gaps, steps = past.latency.get("inter_token"), _decode_steps(past)
    if gaps is None or not gaps.breach_share or not steps:
        return None
    return computed_tokens(past) / (gaps.breach_share * steps)


def prefill_pace(past: Past) -> float | None:
    """Estimate the prompt tokens that one scheduler computes in a second, taking all the time that answers stand still for it.

    Something else may have held some of them up, so it computes at least as many.
    """
    still, tokens = standing_still(past), computed_tokens(past)
    seconds = past.recent.serving_seconds() * (still or 0.0)
    return tokens / seconds if tokens and seconds > 0 else None


def _decode_steps(past: Past) -> float | None:
    counts, running = past.recent.counts, past.recent.mean("running")
    told = counts["replayed"] + counts["eager"]
    if told or not running:
        return told or None
    return counts.get("finished_answer_tokens", 0.0) / running or None
