"""Sizes for what limits the KV cache and the pools beside it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tuning_exporter.diagnosis.sizing.case import Value, people, person
from sglang_tuning_exporter.diagnosis.sizing.limits import running_limit

if TYPE_CHECKING:
    from sglang_tuning_exporter.diagnosis.sizing.case import Case
    from sglang_tuning_exporter.state.facts import ServerFacts

EIGHT_BITS = ("fp8_e4m3", "fp8_e5m2")  # the first that a release takes
SHORTER = "enlarge the KV cache (--mem-fraction-static, more GPUs), or send shorter requests"
IN_FORCE = 0.95  # a pool is whole pages, so a little less than its cap
POOL_STEP = 1.25
LARGEST_MAMBA_RATIO = 4.0


def larger_pool(case: Case) -> Value | None:
    """Raise the flag that alone keeps the pool small; None where it does not.

    SGLang takes the least of it and of what fits (init_memory_pool, srt/model_executor/model_runner.py in 0.4.9;
    srt/mem_cache/kv_cache_configurator.py in 0.5.23), so too high a value does no harm.
    """
    cap, pool = case.facts.arg("max_total_tokens"), max(case.facts.kv_pool_tokens.values(), default=None)
    if not cap or (pool is not None and pool < IN_FORCE * cap):
        return None
    return Value(2 * cap, cap, "twice the tokens, if the memory holds them", "max_total_tokens")


def eight_bits(case: Case) -> str:
    """Name the 8-bit KV cache of this server's release; empty where it has none, or has one already."""
    if case.facts.is_cpu or case.facts.args.get("kv_cache_dtype") not in ("auto", None):
        return ""
    choices = case.choices("kv_cache_dtype")
    return next((kind for kind in EIGHT_BITS if choices is None or kind in choices), "")


def larger_pool_flags(case: Case) -> str:
    """Name the flags that make the KV cache larger, for a sentence."""
    kind = eight_bits(case)
    return f"--mem-fraction-static, --kv-cache-dtype {kind}" if kind else "--mem-fraction-static"


def hybrid(case: Case) -> list[Value]:
    """Name the pool that is full, and the argument that gives it more where this release has one."""
    pool = case.past.fullest_pool
    arg = {"swa": "swa_full_tokens_ratio", "mamba": "mamba_full_memory_ratio"}.get(pool, "")
    current = case.facts.arg(arg)
    words = f"the {pool} pool is full: give it more of the memory"
    if current is None:
        return people(words)
    most = 1.0 if pool == "swa" else LARGEST_MAMBA_RATIO
    suggested = min(round(POOL_STEP * current, 2), most)
    return [Value(suggested, current, words, arg, otherwise=(person(words),))] if suggested > current else []


def pool_short(case: Case) -> list[Value]:
    """Many fewer run than may, because the pool is full: nothing to say where they are close."""
    limit = running_limit(case.facts)
    running = case.recent.mean("running")
    if not limit.in_force or running is None or running * limit.shared_by * 2 >= limit.in_force:
        return []
    larger = larger_pool(case)
    if larger is not None:
        return [larger]
    kind, shorter = eight_bits(case), person(SHORTER, "shorter_requests")
    return [Value(kind, case.present("kv_cache_dtype"), otherwise=(shorter,)) if kind else shorter]


def tokens_gained(facts: ServerFacts, gigabytes: float | None) -> str:
    """Say what so many gigabytes are in tokens; empty where that is not known."""
    tokens = sum(facts.kv_pool_tokens.values()) / max(len(facts.kv_pool_tokens), 1)
    if gigabytes is None or not facts.pools_gb or not tokens:
        return ""
    gained = gigabytes / facts.pools_gb * tokens
    return f"{gigabytes:+.1f} GB for the KV cache: {gained:+,.0f} tokens, {100 * gained / tokens:+.0f} %"
