"""Values for hybrid models: how their two caches share the memory, and the running limit that the mamba cache sets. Pure."""

from __future__ import annotations

from dataclasses import replace

from sglang_tuning_exporter.diagnosis.sizing.advised_value import AdvisedValue, SizingInput, in_words

POOL_STEP = 1.25
LARGEST_MAMBA_RATIO = 4.0
_MAMBA_RATIO = "mamba_full_memory_ratio"
STATES = "the mamba cache has {states:g} states, {each} for each running request: whatever --max-running-requests is, no more than {limit:g} run"


def fuller_second_cache(basis: SizingInput) -> list[AdvisedValue]:
    """Name the cache that is full, and the flag that gives it more memory if this release has one."""
    pool = basis.past.fullest_pool
    words = f"the {pool} cache is full: give it more of the memory"
    if pool == "mamba":
        return _larger(basis, _MAMBA_RATIO, LARGEST_MAMBA_RATIO, words)
    return _larger(basis, "swa_full_tokens_ratio" if pool == "swa" else "", 1.0, words)


def more_states(basis: SizingInput) -> list[AdvisedValue] | None:
    """Enlarge the mamba cache where its states decide how many requests run; None where they do not.

    SGLang runs no more requests than that cache has states for (resolve_max_num_reqs, srt/mem_cache/kv_cache_configurator.py in
    0.5.23), so a higher --max-running-requests alone has no effect.
    """
    facts = basis.facts
    each, states = facts.states_per_request, facts.state_slots
    if each is None or states is None:
        return None
    words = STATES.format(states=states, each=each, limit=states // each)
    typed = facts.arg("max_mamba_cache_size")
    if typed is None:
        return _larger(basis, _MAMBA_RATIO, LARGEST_MAMBA_RATIO, words)
    limit = facts.arg("max_running_requests")
    more = AdvisedValue(float(int(POOL_STEP * typed)), typed, words, "max_mamba_cache_size")
    if limit is None:
        return [more]
    higher = AdvisedValue(float(int(POOL_STEP * limit)), limit, arg="max_running_requests")
    return [replace(more, set_together=(higher,))]


def _larger(basis: SizingInput, arg: str, most: float, words: str) -> list[AdvisedValue]:
    current = basis.facts.arg(arg)
    if current is None:
        return [in_words(words)]
    suggested = min(round(POOL_STEP * current, 2), most)
    return [AdvisedValue(suggested, current, words, arg, otherwise=(in_words(words),))] if suggested > current else []
