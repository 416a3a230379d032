"""How much prefill interrupts decoding, from the gaps between tokens and the prompt tokens computed. Pure.

SGLang prefills waiting prompts before it decodes again, a long one chunk after chunk (`get_next_batch_to_run`,
srt/managers/scheduler.py), so every running answer pauses. Figures and reasons: docs/decisions.md.
"""

from __future__ import annotations

from math import ceil

from sglang_tuning_exporter.diagnosis.evidence import Past
from sglang_tuning_exporter.state.profiles import Profile

# Prompt tokens for each late gap. Fewer take about as long as a decode step.
LONG_PREFILL = 512.0
# Share of the time in which answers pause for prefill. Above it, prefill is what requests wait for.
MOST_OF_THE_TIME = 0.5
# Times the error budget: of the slow burn-rate alert, and of the row about prefill between decode steps.
SLOW_BURN_TIMES = 6.0


def decode_steps_per_chunk(profile: Profile) -> float:
    """Return the decode steps after each chunk that keep late gaps rare enough; 0 without an objective."""
    return 0.0 if profile.inter_token_seconds is None else float(ceil(1.0 / profile.late_bound(SLOW_BURN_TIMES)))


def prefill_takes_most(past: Past) -> bool:
    """Return whether prefill takes most of the time or of the steps: then waiting requests wait for prefill too."""
    paused = (pause_share(past) or 0.0) > MOST_OF_THE_TIME and (tokens_for_each_late_gap(past) or 0.0) >= LONG_PREFILL
    return paused or (_full_prefill_share(past) or 0.0) > MOST_OF_THE_TIME


def _full_prefill_share(past: Past) -> float | None:
    """Return the share of the steps with as many prompt tokens as fit, 0-1, of the requests that ended; None if not known.

    With small chunks hardly a gap between tokens is without prefill, so gaps alone do not show what prefill takes.
    """
    counts, most, running = past.recent.counts, past.facts.prefill_batch_tokens, past.recent.mean("running")
    prompts = counts.get("finished_prompt_tokens", 0.0) - counts.get("finished_cached_tokens", 0.0)
    decoded = counts.get("finished_answer_tokens", 0.0)
    if not most or not running or not decoded or prompts <= 0:
        return None
    full, steps = prompts / most, decoded / running
    return min(full / steps, 1.0) if past.facts.arg("enable_mixed_chunk") else full / (full + steps)


def pause_share(past: Past) -> float | None:
    """Return the share of the time in which running answers wait longer than a usual step, 0-1; None if not exposed."""
    gaps = past.latency.get("inter_token")
    if gaps is None or not gaps.mean_seconds:
        return None
    return max(1.0 - gaps.p50_seconds / gaps.mean_seconds, 0.0)


def computed_tokens(past: Past) -> float:
    """Return the prompt tokens that were computed, not cached: as logged, else of the requests that ended."""
    counts = past.recent.counts
    return counts["computed_tokens"] or max(
        counts.get("finished_prompt_tokens", 0.0) - counts.get("finished_cached_tokens", 0.0), 0.0
    )


def chunks_of_a_prompt(past: Past, chunk: float) -> int | None:
    """Return the chunks in which a mean prompt is computed, without its cached tokens; None if not known."""
    tokens, started = computed_tokens(past), past.started_requests
    return ceil(tokens / started / chunk) if tokens and started and chunk > 0 else None


def first_token_with_steps_between(past: Past, steps: float, chunk: float) -> float | None:
    """Return the 99th percentile of the time to first token, seconds, if so many decode steps follow each chunk; None if not known."""
    first, gaps = past.latency.get("time_to_first_token"), past.latency.get("inter_token")
    chunks = chunks_of_a_prompt(past, chunk)
    if first is None or gaps is None or chunks is None:
        return None
    return first.p99_seconds + chunks * steps * gaps.p50_seconds


def tokens_for_each_late_gap(past: Past) -> float | None:
    """Return the prompt tokens computed for each gap that missed its objective; None if not known."""
    gaps, steps = past.latency.get("inter_token"), _decode_steps(past)
    if gaps is None or not gaps.breach_share or not steps:
        return None
    return computed_tokens(past) / (gaps.breach_share * steps)


def prefill_pace(past: Past) -> float | None:
    """Return the prompt tokens a scheduler computes per second, if it prefills in all pauses of the answers.

    Other causes of pauses make this a lower bound.
    """
    still, tokens = pause_share(past), computed_tokens(past)
    seconds = past.recent.serving_seconds() * (still or 0.0)
    return tokens / seconds if tokens and seconds > 0 else None


def _decode_steps(past: Past) -> float | None:
    counts, running = past.recent.counts, past.recent.mean("running")
    counted = counts["replayed"] + counts["eager"]
    if counted or not running:
        return counted or None
    return counts.get("finished_answer_tokens", 0.0) / running or None
