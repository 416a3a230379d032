"""Texts for changes of an argument that is not the row's own: why, cost, and when it does not help. Data.

A row's `remedy` is about the row's own argument. Other advice has its text here, by argument and direction, or by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_tuning_exporter.diagnosis.row import Remedy
from sglang_tuning_exporter.diagnosis.table import BY_ID


@dataclass(frozen=True, slots=True)
class Variant:
    """The texts of one kind of change."""

    why: str
    will_not_help_if: str
    cost: str = ""


# Changes with the texts of a row's remedy.
ROW_OF_CHANGE: dict[tuple[str, str], str] = {
    ("mem_fraction_static", "lower"): "out_of_memory_any",
    ("mem_fraction_static", "raise"): "memory_reserve_too_large",
    ("max_running_requests", "raise"): "running_at_limit",
    ("cuda_graph_max_bs", "raise"): "cuda_graph_not_covering",
    ("disable_decode_cuda_graph", "drop"): "cuda_graph_off",
    ("mamba_full_memory_ratio", "raise"): "hybrid_pool_full",
    ("max_mamba_cache_size", "raise"): "hybrid_pool_full",
}
BY_CHANGE: dict[tuple[str, str], Variant] = {
    ("max_total_tokens", "raise"): Variant(
        "This flag keeps the KV cache smaller than GPU memory allows.",
        "no more fits into GPU memory: then SGLang uses what fits",
        "Less GPU memory stays free for peaks.",
    ),
    ("max_running_requests", "lower"): Variant(
        "Fewer requests at once need less of the KV cache and less GPU memory.",
        "a single request is too long for the KV cache: then lower --context-length",
        "Fewer requests run at once, and the queue may grow.",
    ),
    ("pp_max_micro_batch_size", "raise"): Variant(
        "This flag limits each micro batch of the pipeline below its share of --max-running-requests.",
        "the batches of the pipeline are not full",
        "Inter-token latency rises as more requests run together.",
    ),
    ("prefill_decode_interval", "raise"): Variant(
        "SGLang prefills all waiting prompts, chunk after chunk, before it decodes again. With this flag it runs that many decode steps after each chunk.",
        "long prompts are rare: each interrupts decoding once, whatever the flag",
        "Time to first token rises.",
    ),
    ("enable_mixed_chunk", "add"): Variant(
        "SGLang prefills all waiting prompts, chunk after chunk, before it decodes again. With this flag each chunk includes a decode step of"
        " the running requests.",
        "a single chunk takes longer than the objective: lower --chunked-prefill-size as well; or requests ask for logprobs: SGLang never mixes those",
        "A step with a chunk takes longer than a decode step.",
    ),
    ("cuda_graph_max_bs", "lower"): Variant(
        "SGLang captures CUDA graphs for batch sizes that never run, and each size takes GPU memory.",
        "larger batches run at other times",
        "Larger batches run without a CUDA graph.",
    ),
    ("attention_backend", "set"): Variant(
        "Not every attention backend can be captured in a CUDA graph.",
        "LoRA, speculative decoding or expert communication cannot be captured",
        "Another backend may be faster or slower at long prompts: measure both.",
    ),
    ("kv_cache_dtype", "set"): Variant(
        "An 8-bit KV cache holds twice as many tokens in the same memory.",
        "answers must not lose any accuracy, or the GPU has no FP8",
        "A little accuracy.",
    ),
    ("enable_ep_moe", "add"): Variant(
        "With this flag each GPU holds whole experts, and --ep-size follows --tp-size.",
        "batches are small, or some experts are used far more than others",
        "Requests wait for the GPU whose experts are used most.",
    ),
    ("dp_size", "raise"): Variant(
        "DP attention needs its number of ranks. With as many ranks as GPUs each KV cache entry is stored once.",
        "few requests run at once: then latency gets worse",
        "SGLang divides the chunk by the number of ranks: multiply --chunked-prefill-size by it to keep the size.",
    ),
    ("attn_dp_size", "raise"): Variant(
        "The model's compressed KV cache cannot be split over GPUs: tensor parallelism stores it on each GPU, DP attention once."
        " This release enables DP attention by the number of ranks.",
        "few requests run at once: then latency gets worse",
        "SGLang then multiplies --schedule-conservativeness by 0.3 and divides --chunked-prefill-size by the number of ranks: set both again.",
    ),
}

BY_NAME: dict[str, Variant] = {
    "refused": Variant(
        "SGLang ends such a request at once and prints the reason.",
        "a client sends such requests by mistake: then nothing needs to change",
    ),
    "larger_pool": Variant(
        "The KV cache is too small for the running requests; a larger one removes the cause of the retractions.",
        "no GPU memory is free",
        "An 8-bit KV cache costs a little accuracy; a larger one leaves less memory for peaks.",
    ),
    "capped_pool": Variant(
        "--max-total-tokens keeps the KV cache smaller than GPU memory allows, and a small KV cache fills up with few requests.",
        "no more fits into GPU memory: then SGLang uses what fits",
        "Less GPU memory stays free for peaks.",
    ),
    "shorter_requests": Variant(
        "Each running request keeps its tokens in the KV cache, so the KV cache limits how many run.",
        "the queue is short: then a full KV cache is normal for a well-loaded server",
    ),
    "smaller_requests": Variant(
        "SGLang starts a request only if its max_new_tokens (4096 at most) fits beside what it reserves for running requests.",
        "clients need the answers that long",
        "Longer answers are truncated.",
    ),
    "above_the_ceiling": Variant(
        "Requests use most of their max_new_tokens, so a lower value would lead to retractions; above 1.43 the flag has no effect.",
        "retractions appear: then raise it again, to 1.3 at most",
        "A few retractions may appear.",
    ),
    "wait": Variant(
        "The new-token ratio falls with every decode step, and admission follows it.",
        "retractions continue: each raises the ratio again",
    ),
    "prefill_elsewhere": Variant(
        "A larger chunk would not help: the GPU is busy with prefill.",
        "prompts share no prefixes, and there is no second GPU",
    ),
    "decode_elsewhere": Variant(
        "Smaller chunks would not help, and decode steps already run between them: prefill and decode compete for one GPU.",
        "there is no second GPU",
        "You run one more server, and each KV cache is transferred between the two.",
    ),
    "decode_side_is_slow": Variant(
        "A request stays in the bootstrap queue of a prefill server until a decode server has room for it, and in the inflight queue until"
        " its KV cache is transferred.",
        "a decode server is down: then restart it",
    ),
    "prefill_side_is_slow": Variant(
        "A request stays in the transfer queue of a decode server until its prompt is computed and its KV cache is transferred, and in the"
        " prealloc queue until this server has room for it.",
        "a prefill server is down: then restart it",
    ),
    "memory_first": Variant(
        "A larger chunk needs memory for its activations, and almost none is free.",
        "another process holds the memory: check nvidia-smi",
        "The KV cache gets smaller.",
    ),
    "router": Variant(
        "This release cannot balance requests over its ranks by load; a router can.",
        "long prompts of one client must stay on the rank that has their prefix cached",
        "Requests with a common prefix may be spread over more ranks.",
    ),
    "graphs_first": Variant(
        "The limit makes requests wait while the KV cache has free space, but it also keeps batches within the captured CUDA graphs. Without"
        " graphs a decode step takes longer, up to several times as long for a small model, and slower steps make batches larger still.",
        "the KV cache has no space to give, or a longer inter-token latency is no harm: then raise the limit alone",
        "The KV cache gets smaller.",
    ),
    "graphs_beyond": Variant(
        "In a large batch the computation takes most of the time, so launching kernels one by one costs little.",
        "the batches are this large only for a short time",
    ),
    "graphs_take_memory": Variant(
        "Larger CUDA graphs need GPU memory that the KV cache has now.",
        "the graphs are smaller than estimated: then raise it again",
        "The KV cache gets smaller.",
    ),
}

# Changes that take GPU memory: never advised after an out-of-memory failure.
TAKES_MEMORY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("mem_fraction_static", "max_total_tokens", "max_running_requests"), ("raise",)),
    **dict.fromkeys(("pp_max_micro_batch_size", "prefill_max_requests", "max_loras_per_batch"), ("raise",)),
    **dict.fromkeys(("chunked_prefill_size", "max_prefill_tokens"), ("raise",)),
    **dict.fromkeys(("cuda_graph_max_bs", "cuda_graph_max_bs_decode"), ("raise",)),
    **dict.fromkeys(("disable_cuda_graph", "disable_decode_cuda_graph", "disable_cuda_graph_padding"), ("drop",)),
    **dict.fromkeys(("cpu_offload_gb", "offload_group_size"), ("lower", "drop")),
    "enable_paged_experts": ("drop",),
    "schedule_conservativeness": ("lower",),
}


def variant(arg: str, direction: str, name: str, figures: Mapping[str, str]) -> Variant | Remedy | None:
    """Return the text by its name, else by argument and direction; None if there is none. Those of rows have thresholds in them."""
    if name:
        return BY_NAME[name]
    # Other names of the same arguments.
    known = {"cuda_graph_max_bs_decode": "cuda_graph_max_bs", "max_micro_batch_size": "pp_max_micro_batch_size"}
    change = (known.get(arg, arg), direction)
    row = ROW_OF_CHANGE.get(change)
    return BY_CHANGE.get(change) if row is None else BY_ID[row].remedy.with_figures(figures)
