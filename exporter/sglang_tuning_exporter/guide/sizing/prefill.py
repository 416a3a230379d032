"""Sizes for `--chunked-prefill-size`. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tuning_exporter.guide.demand import mean_prompt
from sglang_tuning_exporter.guide.sizing.case import Value, people

if TYPE_CHECKING:
    from sglang_tuning_exporter.guide.sizing.case import Case

SMALL_CHUNK = 4096.0  # what the guide falls back to where memory is short: less is needed hardly ever


SHORT_PROMPT = 0.125  # of a chunk: with this mean at most one prompt in eight fills it


LARGEST_CHUNK = 16384  # the guide's for throughput and long context (E5)


def chunks(case: Case) -> list[Value]:
    """Double the chunk, up to 16384, where memory allows."""
    current = case.facts.arg("chunked_prefill_size")
    reserve = case.facts.reserve_gb
    if current is not None and (current <= 0 or current >= LARGEST_CHUNK):
        return people("reuse more prefixes, separate prefill and decode, or add a replica")
    if reserve is not None and reserve < case.profile.reserve_lower_gb:
        # A larger chunk takes memory that is not there.
        return people("lower --mem-fraction-static first: a larger chunk needs memory that is not left")
    if current is None:
        return [Value(None)]
    return [Value(float(max(min(2 * int(current), LARGEST_CHUNK), SMALL_CHUNK)), current)]


def long_prompts(case: Case) -> list[Value]:
    """Double the chunk where prompts are long enough to fill it."""
    chunk, prompt = case.facts.arg("chunked_prefill_size"), mean_prompt(case.past)
    if chunk is not None and prompt is not None and prompt < SHORT_PROMPT * chunk:
        return []  # hardly one is as long as a chunk: a larger one would change nothing
    return chunks(case)
