"""Values for GPU memory: `--mem-fraction-static`, the KV cache, and what to lower after a failure. Pure."""

from __future__ import annotations

from dataclasses import replace

from sglang_tuning_exporter.diagnosis.sizing.advised_value import AdvisedValue, SizingInput, in_words
from sglang_tuning_exporter.diagnosis.sizing.limits import run_fewer, running_limit
from sglang_tuning_exporter.diagnosis.sizing.prefill import smaller_chunk
from sglang_tuning_exporter.diagnosis.sizing.reserve import LEAST_FRACTION

EIGHT_BITS = ("fp8_e4m3", "fp8_e5m2")  # the first one that a release accepts
SHORTER = "enlarge the KV cache (--mem-fraction-static, more GPUs), or send shorter requests"
IN_FORCE = 0.95  # the KV cache has whole pages, so a little less than its cap
FEWER_DECODING = 0.75  # of the running batch, after a failure in decode


def larger_pool(basis: SizingInput) -> AdvisedValue | None:
    """Raise the flag that keeps the KV cache small; None if it does not.

    SGLang uses the smaller of it and what fits (init_memory_pool, srt/model_executor/model_runner.py in 0.4.9;
    srt/mem_cache/kv_cache_configurator.py in 0.5.23), so too large a value does no harm.
    """
    cap, pool = basis.facts.arg("max_total_tokens"), max(basis.facts.kv_pool_tokens.values(), default=None)
    if not cap or (pool is not None and pool < IN_FORCE * cap):
        return None
    return AdvisedValue(2 * cap, cap, "twice the tokens, if the memory holds them", "max_total_tokens")


def hold_longest_prompts(basis: SizingInput) -> list[AdvisedValue]:
    """Enlarge the KV cache beyond the prompts that it could not hold."""
    counts = basis.recent.counts
    mean = counts["too_long_tokens"] / max(counts["too_long_prompts"], 1.0)
    larger = larger_pool(basis)
    if larger is not None:
        return [replace(larger, suggested=_doubled_to(mean, float(larger.suggested or 1.0)))]
    words = f"enlarge the KV cache ({larger_pool_flags(basis)}), or send shorter prompts: those refused have {mean:,.0f} tokens on average"
    return [in_words(words, "larger_pool")]


def hold_longest_requests(basis: SizingInput) -> list[AdvisedValue]:
    """Raise the limit of the context beyond the requests that were refused."""
    counts, current = basis.recent.counts, basis.flag("context_length")
    mean = counts["beyond_context_tokens"] / max(counts["beyond_context_prompts"], 1.0)
    gain = f"those refused have {mean:,.0f} tokens on average"
    return [AdvisedValue(_doubled_to(mean, 2 * current) if current else None, current, gain)]


def _doubled_to(tokens: float, size: float) -> float:
    while size < tokens:
        size *= 2
    return size


def eight_bits(basis: SizingInput) -> str:
    """Return the 8-bit KV cache type of this server's release; empty if it has none, or uses one already."""
    if basis.facts.is_cpu or basis.facts.args.get("kv_cache_dtype") not in ("auto", None):
        return ""
    choices = basis.choices("kv_cache_dtype")
    return next((kind for kind in EIGHT_BITS if choices is None or kind in choices), "")


def larger_pool_flags(basis: SizingInput) -> str:
    """Return the flags that enlarge the KV cache, in words."""
    kind = eight_bits(basis)
    return f"--mem-fraction-static, --kv-cache-dtype {kind}" if kind else "--mem-fraction-static"


def pool_short(basis: SizingInput) -> list[AdvisedValue]:
    """Enlarge the KV cache if far fewer requests run than the limit allows."""
    limit = running_limit(basis.facts)
    running = basis.recent.mean("running")
    if not limit.in_force or running is None or running * limit.shared_by * 2 >= limit.in_force:
        return []
    larger = larger_pool(basis)
    if larger is not None:
        return [larger]
    kind, shorter = eight_bits(basis), in_words(SHORTER, "shorter_requests")
    return [AdvisedValue(kind, basis.present("kv_cache_dtype"), otherwise=(shorter,)) if kind else shorter]


def oom_prefill(basis: SizingInput) -> list[AdvisedValue]:
    """Lower the chunk; if it is small already, the memory fraction."""
    return _else_less_memory(smaller_chunk(basis), basis)


def oom_decode(basis: SizingInput) -> list[AdvisedValue]:
    """Run three quarters of the batch; with one running request, lower the memory fraction."""
    return _else_less_memory(run_fewer(basis, 0.99, FEWER_DECODING), basis)


def _else_less_memory(first: AdvisedValue | None, basis: SizingInput) -> list[AdvisedValue]:
    return oom_any(basis) if first is None else [replace(first, otherwise=tuple(oom_any(basis)))]


def oom_any(basis: SizingInput) -> list[AdvisedValue]:
    """Lower the memory fraction to 0.8, then 0.7, then in steps of 0.05."""
    current = basis.facts.arg("mem_fraction_static")
    suggested = 0.8 if current is None or current > 0.8 else 0.7 if current > 0.7 else round(current - 0.05, 2)
    return [AdvisedValue(suggested, current, arg="mem_fraction_static")] if suggested >= LEAST_FRACTION else []
