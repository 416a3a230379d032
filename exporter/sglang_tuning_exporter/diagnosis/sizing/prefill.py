"""Values for `--chunked-prefill-size`, as a flag: with DP attention SGLang divides it by the ranks. Pure."""

from __future__ import annotations

from dataclasses import replace
from math import floor, log2

from sglang_tuning_exporter.diagnosis.demand import mean_prompt
from sglang_tuning_exporter.diagnosis.interruption import (
    decode_steps_per_chunk,
    first_token_with_steps_between,
    prefill_pace,
)
from sglang_tuning_exporter.diagnosis.sizing.advised_value import AdvisedValue, SizingInput, in_words

# For one rank: the guide's sizes, and SGLang's largest default. Reasons: docs/decisions.md.
LARGEST_CHUNK, SMALL_CHUNK, LEAST_CHUNK = 16384, 4096, 2048
SHORT_PROMPT = 0.125  # of a chunk: at most one prompt in eight fills it
CERTAIN_PACE_SHARE = 0.5  # of the estimated pace, which assumes full chunks
LEAST_USEFUL_CHUNK = 1024  # tokens: a smaller chunk takes about as long
NO_SMALLER = "separate prefill and decode (disaggregation), or add a replica"
ELSEWHERE = "reuse more prefixes, separate prefill and decode, or add a replica"
ELSEWHERE_ON_PREFILL_SIDE = "add prefill servers, or reuse more prefixes"
NO_MEMORY = "lower --mem-fraction-static first: a larger chunk needs memory that is not left"


def ranks_sharing(basis: SizingInput) -> int:
    """Return the number of ranks that share the chunk."""
    return max(round(1 / basis.factor("chunked_prefill_size")), 1)


def chunks(basis: SizingInput) -> list[AdvisedValue]:
    """Double the chunk, up to 16384 for each rank, if memory allows."""
    current, ranks = basis.flag("chunked_prefill_size"), ranks_sharing(basis)
    reserve = basis.facts.reserve_gb
    elsewhere = in_words(ELSEWHERE_ON_PREFILL_SIDE if basis.facts.role == "prefill" else ELSEWHERE, "prefill_elsewhere")
    if current is not None and (current <= 0 or current >= LARGEST_CHUNK * ranks):
        return [elsewhere]
    if reserve is not None and reserve < basis.profile.reserve_lower_gb:
        # A larger chunk takes memory that is not there.
        return [in_words(NO_MEMORY, "memory_first")]
    if current is None:
        return [AdvisedValue(None)]
    wanted = max(min(2 * int(current), LARGEST_CHUNK * ranks), SMALL_CHUNK * ranks)
    suggested = _whole_pages(basis, wanted, ranks)
    return [AdvisedValue(suggested, current, _for_each_rank(wanted, ranks), otherwise=(elsewhere,))]


def _for_each_rank(chunk: int, ranks: int) -> str:
    return f"{chunk // ranks:,} for each of the {ranks} ranks" if ranks > 1 else ""


def smaller_chunk(basis: SizingInput) -> AdvisedValue | None:
    """Lower the chunk to 4096, then 2048 for each rank, then to the guide's flag values; None if it is that small."""
    current, ranks = basis.flag("chunked_prefill_size"), ranks_sharing(basis)
    # -1 disables chunks.
    if current is None or current <= 0:
        return AdvisedValue(float(SMALL_CHUNK * ranks), current)
    last = max(int(current) // 2, SMALL_CHUNK) if ranks > 1 else SMALL_CHUNK
    step = next((step for step in (SMALL_CHUNK * ranks, LEAST_CHUNK * ranks, last) if current > step), None)
    return None if step is None else AdvisedValue(float(step), current, _for_each_rank(step, ranks))


def interleave_decode(basis: SizingInput) -> list[AdvisedValue]:
    """Let decode steps run between the chunks of prompts.

    With `--prefill-decode-interval`: as many after each chunk as keep late gaps rare, if first tokens stay in time. In
    releases without it: one with each chunk, and chunks that meet the objective.
    """
    elsewhere = in_words(NO_SMALLER, "decode_elsewhere")
    shorter = _chunk_within_objective(basis)
    if basis.facts.arg("enable_mixed_chunk"):
        return [replace(shorter, otherwise=(elsewhere,)) if shorter else elsewhere]
    mixed = AdvisedValue(1.0, 0.0, arg="enable_mixed_chunk", is_switch=True)
    together = replace(mixed, set_together=() if shorter is None else (shorter,))
    steps, current = decode_steps_per_chunk(basis.profile), basis.facts.arg("prefill_decode_interval") or 0.0
    if current >= steps or _delays_first_tokens(basis, steps - current):
        return [elsewhere]  # shorter chunks, mixed or not, delay first tokens as well
    return [AdvisedValue(steps, current, arg="prefill_decode_interval", otherwise=(together, mixed, elsewhere))]


def _delays_first_tokens(basis: SizingInput, steps: float) -> bool:
    """Return whether so many more decode steps after each chunk of a prompt make first tokens late."""
    chunk, objective = basis.flag("chunked_prefill_size"), basis.profile.time_to_first_token_seconds
    if chunk is None or objective is None:
        return False
    expected = first_token_with_steps_between(basis.past, steps, chunk / ranks_sharing(basis))
    return expected is not None and expected > objective


def _chunk_within_objective(basis: SizingInput) -> AdvisedValue | None:
    """Return the largest power of two that is computed within the inter-token objective.

    None if the chunk is that small, if only a chunk would do that takes as long as a larger one, or if the pace is not known.
    """
    current, ranks, pace = basis.flag("chunked_prefill_size"), ranks_sharing(basis), prefill_pace(basis.past)
    objective = basis.profile.inter_token_seconds
    if current is None or pace is None or objective is None:
        return None
    fits = 2.0 ** floor(log2(max(CERTAIN_PACE_SHARE * pace * objective, 1.0)))
    if fits < LEAST_USEFUL_CHUNK or 0 < current <= fits * ranks:
        return None
    return AdvisedValue(_whole_pages(basis, int(fits * ranks), ranks), current, arg="chunked_prefill_size")


def long_prompts(basis: SizingInput) -> list[AdvisedValue]:
    """Double the chunk if prompts are long enough to fill it."""
    chunk, prompt = basis.facts.arg("chunked_prefill_size"), mean_prompt(basis.past)
    if chunk is not None and prompt is not None and prompt < SHORT_PROMPT * chunk:
        return []  # hardly any prompt fills a chunk
    if basis.facts.arg("enable_mixed_chunk") and "latency_prefill_between" in basis.holding:
        return [in_words(NO_SMALLER, "decode_elsewhere")]  # a larger chunk would delay tokens even more
    return chunks(basis)


def _whole_pages(basis: SizingInput, chunk: int, ranks: int) -> float:
    """Round a chunk up to whole pages for each rank: SGLang refuses others."""
    page = max(int(basis.facts.arg("page_size") or 1), 1)
    return float(-(-chunk // (page * ranks)) * page * ranks)
