"""What to say of a change that is not its row's own: why it helps, what it costs, and when it will not help. Data.

A row's `turn` speaks of the row's own argument. Advice for another argument, or to people, has its text here: by the argument
and the direction, or by the name that the size gives.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Variant:
    """The text of one kind of change."""

    why: str
    will_not_help_if: str
    cost: str = ""


BY_CHANGE: dict[tuple[str, str], Variant] = {
    ("max_total_tokens", "raise"): Variant(
        "This flag keeps the KV cache smaller than GPU memory allows.",
        "no more fits into GPU memory: SGLang then takes what fits",
        "Less GPU memory is left for peaks.",
    ),
    ("mem_fraction_static", "lower"): Variant(
        "Weights and KV cache take this share of GPU memory; what they leave must hold activations and CUDA graphs.",
        "the weights alone do not fit: then use more GPUs (--tp-size) or --quantization fp8",
        "The KV cache shrinks with it.",
    ),
    ("mem_fraction_static", "raise"): Variant(
        "A larger KV cache holds more requests and more cached prefixes.",
        "other processes share the GPU, or prompts are so long that their activations need the room",
        "Less is left for peaks: watch for out-of-memory failures afterwards.",
    ),
    ("max_running_requests", "lower"): Variant(
        "Fewer requests at once need less of the KV cache and less GPU memory.",
        "a single request is too long for the KV cache: then lower --context-length",
        "Fewer requests are served at once, and the queue may grow.",
    ),
    ("max_running_requests", "raise"): Variant(
        "The limit holds requests back while the KV cache has room.",
        "token usage is at {token_usage_target} or more: then the KV cache is the limit",
        "Each request gets its tokens more slowly as more run together.",
    ),
    ("pp_max_micro_batch_size", "raise"): Variant(
        "This flag limits each micro batch of the pipeline below its share of --max-running-requests.",
        "the batches of the pipeline are not full",
        "Each request gets its tokens more slowly as more run together.",
    ),
    ("prefill_decode_interval", "raise"): Variant(
        "SGLang computes all prompts that wait, chunk after chunk, before it decodes again. With this flag so many decode steps come after each chunk.",
        "few long prompts come: each holds up what runs once, whatever the flag",
        "Prompts take longer until their first token.",
    ),
    ("enable_mixed_chunk", "add"): Variant(
        "SGLang computes all prompts that wait, chunk after chunk, before it decodes again. With this switch each chunk carries a decode step of"
        " the running requests.",
        "a single chunk takes longer than the objective: lower --chunked-prefill-size as well; or requests ask for logprobs, which are never mixed",
        "A step that carries a chunk takes longer than one that only decodes.",
    ),
    ("cuda_graph_max_bs", "raise"): Variant(
        "A batch beyond the captured sizes runs without a CUDA graph, kernel by kernel.",
        "graphs are switched off, or the attention backend cannot capture",
        "Larger graphs take GPU memory.",
    ),
    ("cuda_graph_max_bs", "lower"): Variant(
        "Graphs are captured for batches that never run, and each captured size takes GPU memory.",
        "larger batches run at other times",
        "Batches beyond it run without a CUDA graph.",
    ),
    ("disable_decode_cuda_graph", "drop"): Variant(
        "At small batches the time to launch the kernels one by one is longer than the time to run them.",
        "the attention backend, a LoRA adapter or a speculative set-up cannot be captured",
        "Graphs take GPU memory, about 1 GB at usual sizes.",
    ),
    ("attention_backend", "set"): Variant(
        "Not every attention backend can be captured in a CUDA graph.",
        "another part of the set-up cannot be captured: LoRA, speculation, expert communication",
        "Another backend may be faster or slower at long prompts: measure both.",
    ),
    ("mamba_full_memory_ratio", "raise"): Variant(
        "Hybrid models keep two kinds of state. The pool that fills first decides how many requests run.",
        "both pools are full: then the GPU's memory is the limit",
        "The main KV pool shrinks by what the other gains.",
    ),
    ("kv_cache_dtype", "set"): Variant(
        "An 8-bit KV cache holds twice as many tokens in the same memory.",
        "answers must not lose any accuracy, or the GPU is older than FP8",
        "A little accuracy.",
    ),
    ("enable_ep_moe", "add"): Variant(
        "With this switch each GPU holds whole experts, and --ep-size follows --tp-size.",
        "batches are small, or some experts are used far more than others",
        "Requests wait for the GPU whose experts are used most.",
    ),
    ("dp_size", "raise"): Variant(
        "DP attention needs its number of ranks; as many as GPUs stores each KV cache entry once.",
        "few requests run at once: latency gets worse then",
        "The chunk is divided by the ranks: multiply --chunked-prefill-size by them to keep it.",
    ),
    ("attn_dp_size", "raise"): Variant(
        "Its compressed KV cache cannot be split over GPUs, so tensor parallelism stores it on each; DP attention stores it once."
        " This release switches it on by the number of ranks.",
        "few requests run at once: latency gets worse then",
        "It multiplies --schedule-conservativeness by 0.3 and divides --chunked-prefill-size by the ranks: set both anew.",
    ),
}

BY_NAME: dict[str, Variant] = {
    "larger_pool": Variant(
        "The KV cache is too small for what runs at once, and a larger one ends retractions at their cause.",
        "no GPU memory is left for it",
        "An 8-bit cache costs a little accuracy; a larger share leaves less memory for peaks.",
    ),
    "shorter_requests": Variant(
        "Each running request keeps its tokens in the KV cache, so the KV cache decides how many run.",
        "the queue is short: then a full KV cache is what a well-loaded server looks like",
    ),
    "smaller_requests": Variant(
        "SGLang starts a request only if its whole max_new_tokens fits, 4096 at most, beside what it keeps for those that run.",
        "clients need the answers that long",
        "Longer answers are cut off.",
    ),
    "above_the_ceiling": Variant(
        "Requests use most of what they ask for, so lowering further would lead to retractions; above 1.43 the flag has no effect.",
        "retractions appear: then raise it again, to 1.3 at most",
        "A few retractions may appear.",
    ),
    "wait": Variant(
        "The new-token ratio falls with every decode step, and admission follows it.",
        "retractions go on: each sets the ratio back",
    ),
    "prefill_elsewhere": Variant(
        "The chunk is as large as it is useful: the GPU is busy with prefill.",
        "prompts share no prefixes, and there is no second GPU",
    ),
    "decode_elsewhere": Variant(
        "Chunks are as small as they are useful, and decode steps come between them: prefill and decode disturb each other on one GPU.",
        "there is no second GPU",
        "Another server to run, and the KV cache is sent from one to the other.",
    ),
    "memory_first": Variant(
        "A larger chunk needs memory for its activations, and hardly any is left.",
        "another process holds the memory: look at nvidia-smi",
        "The KV cache shrinks with it.",
    ),
    "router": Variant(
        "This release cannot spread requests over its ranks by their load; a router that asks each rank can.",
        "long prompts of one client must stay on the rank that has their prefix cached",
        "Requests with a common prefix may be spread over more ranks.",
    ),
    "graphs_beyond": Variant(
        "In a large batch the GPU is busy with the computation itself, so launching kernels one by one costs little.",
        "the batches are this large for a short time only",
    ),
    "graphs_take_memory": Variant(
        "Larger CUDA graphs take GPU memory that must come from the KV cache.",
        "the graphs turn out smaller than estimated: then raise it again",
        "The KV cache shrinks with it.",
    ),
}

# Changes that take GPU memory: none is made while the server runs out of it.
TAKES_MEMORY: frozenset[tuple[str, str]] = frozenset(
    {
        ("mem_fraction_static", "raise"),
        ("max_total_tokens", "raise"),
        ("max_running_requests", "raise"),
        ("pp_max_micro_batch_size", "raise"),
        ("schedule_conservativeness", "lower"),
        ("chunked_prefill_size", "raise"),
        ("max_prefill_tokens", "raise"),
        ("prefill_max_requests", "raise"),
        ("cuda_graph_max_bs", "raise"),
        ("cuda_graph_max_bs_decode", "raise"),
        ("disable_cuda_graph", "drop"),
        ("disable_decode_cuda_graph", "drop"),
        ("disable_cuda_graph_padding", "drop"),
        ("max_loras_per_batch", "raise"),
        ("cpu_offload_gb", "lower"),
        ("cpu_offload_gb", "drop"),
        ("offload_group_size", "lower"),
        ("offload_group_size", "drop"),
        ("enable_paged_experts", "drop"),
    }
)


def variant(arg: str, direction: str, name: str, figures: Mapping[str, str]) -> Variant | None:
    """Give the text by its name, else by the argument and direction, with the thresholds in it; None where there is none."""
    # `cuda_graph_max_bs_decode` is `cuda_graph_max_bs` by its newer name, `max_micro_batch_size` the older one of its kind.
    known = {"cuda_graph_max_bs_decode": "cuda_graph_max_bs", "max_micro_batch_size": "pp_max_micro_batch_size"}
    found = BY_NAME[name] if name else BY_CHANGE.get((known.get(arg, arg), direction))
    return None if found is None else Variant(*(text.format(**figures) for text in astuple(found)))
