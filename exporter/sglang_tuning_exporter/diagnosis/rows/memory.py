"""Rows about GPU memory: total = weights + KV pool + CUDA graph buffers + activations; mem_fraction_static = (weights + KV pool) / capacity (the guide)."""

from __future__ import annotations

from sglang_tuning_exporter.diagnosis.conditions import Failures, GraphMemory, Reserve, Share
from sglang_tuning_exporter.diagnosis.row import Diagnosis, Turn

MEM_FRACTION = "mem_fraction_static"
_FAILURES = ("out_of_memory_prefill", "out_of_memory_decode", "graph_memory_short", "out_of_memory_any")

FAILURE_DIAGNOSES: tuple[Diagnosis, ...] = (
    Diagnosis(
        id="out_of_memory_prefill",
        alert="SGLangOutOfMemoryPrefill",
        severity="critical",
        condition=Failures(("prefill",)),
        summary="SGLang ran out of GPU memory while it was computing prompts.",
        seen="{value} out-of-memory failure(s) in prefill",
        guide="OOM in prefill: lower --chunked-prefill-size to 4096, then 2048 (all editions)",
        turn=Turn(
            "chunked_prefill_size",
            "lower",
            "4096, then 2048",
            "Prompts are computed in chunks of this many tokens, and the memory of one chunk grows with its size.",
            "it is already 2048: then lower --mem-fraction-static",
            cost="Long prompts take longer to start.",
        ),
        hold="0m",
    ),
    Diagnosis(
        id="out_of_memory_decode",
        alert="SGLangOutOfMemoryDecode",
        severity="critical",
        condition=Failures(("decode",)),
        summary="SGLang ran out of GPU memory while it was generating.",
        seen="{value} out-of-memory failure(s) in decode",
        guide="OOM in decode: lower --max-running-requests (all editions)",
        turn=Turn(
            "max_running_requests",
            "lower",
            "about three quarters of the batch that ran",
            "Fewer requests at once need less memory for activations and slots.",
            "one request alone does not fit: then lower --mem-fraction-static or --context-length",
            cost="Fewer requests are served at once.",
        ),
        hold="0m",
    ),
    Diagnosis(
        id="graph_memory_short",
        alert="SGLangGraphMemoryShort",
        severity="critical",
        condition=GraphMemory(),
        summary="CUDA graphs leave SGLang no GPU memory, or do not fit at all.",
        seen="graph capture ran out of memory, or left less than {reserve_least_gb} GB",
        guide="any OOM: lower --mem-fraction-static (all editions), or capture fewer or smaller graphs (E5)",
        turn=Turn(
            MEM_FRACTION,
            "lower",
            "0.05 less, or a smaller largest captured batch",
            "Graphs are captured after weights and KV pool have taken their share, and need room of their own.",
            "graphs for batches are captured that never run: then lower the largest captured batch instead",
            cost="The KV pool shrinks with it.",
        ),
        hold="0m",
    ),
    Diagnosis(
        id="out_of_memory_any",
        alert="SGLangOutOfMemory",
        severity="critical",
        condition=Failures(("startup", "unknown")),
        summary="SGLang ran out of GPU memory.",
        seen="{value} out-of-memory failure(s)",
        guide="any OOM: lower --mem-fraction-static to 0.8 or 0.7 (all editions); fewer or smaller graphs, an FP8 KV cache or FP8 weights (E5)",
        turn=Turn(
            MEM_FRACTION,
            "lower",
            "0.8, then 0.7",
            "Weights and KV pool take this share of the GPU; what they leave must hold graphs and activations.",
            "the weights alone do not fit: then use more GPUs (--tp-size) or --quantization fp8",
            cost="The KV pool shrinks with it.",
        ),
        hold="0m",
    ),
)

GRAPH_DIAGNOSES: tuple[Diagnosis, ...] = (
    Diagnosis(
        id="cuda_graph_not_covering",
        alert="SGLangCudaGraphNotCovering",
        severity="warning",
        condition=Share("cuda_graph", ("beyond_captured",)),
        summary="Decode batches are larger than the largest captured CUDA graph, so they run without one.",
        summary_past="Until {until} decode batches were larger than the largest captured CUDA graph.",
        seen="{value} of the serving time in decode batches beyond the largest captured size",
        guide="cuda graph: False with a large batch: raise --cuda-graph-max-bs (useful to 512 or 768) and lower --mem-fraction-static with it (E3-E5, C)",
        turn=Turn(
            "cuda_graph_max_bs",
            "raise",
            "the next usual size that covers the running batch, 768 at most",
            "A batch beyond the captured sizes is launched kernel by kernel.",
            "graphs are switched off, or the attention backend cannot capture",
            cost="Larger graphs take GPU memory.",
        ),
        keep_firing="5m",
    ),
    Diagnosis(
        id="cuda_graph_off",
        alert="SGLangCudaGraphOff",
        severity="warning",
        condition=Share("cuda_graph", ("eager", "disabled")),
        summary="SGLang decodes without CUDA graphs although the batches are small enough for them.",
        summary_past="Until {until} SGLang decoded without CUDA graphs although the batches were small enough for them.",
        seen="{value} of the serving time in decode batches without a graph",
        guide="cuda graph should be True at small batches: check that it is not disabled, and the attention backend (E5)",
        turn=Turn(
            "disable_cuda_graph",
            "drop",
            "start without it, or with another --attention-backend",
            "At small batches the time to launch the kernels one by one is longer than the time to run them.",
            "the attention backend, a LoRA or a speculative set-up cannot be captured",
            cost="Graphs take GPU memory, about 1 GB at usual sizes.",
        ),
        keep_firing="5m",
    ),
)

RESERVE_DIAGNOSES: tuple[Diagnosis, ...] = (
    Diagnosis(
        id="memory_reserve_too_small",
        alert="SGLangMemoryReserveTooSmall",
        severity="warning",
        condition=Reserve("below"),
        summary="SGLang started with so little GPU memory left that it may run out of it.",
        seen="{value} left on the GPU at start-up",
        guide="available_gpu_mem below 5 GB at start-up: lower --mem-fraction-static (E3-E5, C)",
        turn=Turn(
            MEM_FRACTION,
            "lower",
            "0.01 less, again until {reserve_lower_gb} to {reserve_good_gb} GB are left",
            "Activations of long prompts and of large batches need this memory.",
            "another process holds the memory: look at nvidia-smi",
            cost="The KV pool shrinks with it.",
        ),
        hold="10m",
        unless=("graph_memory_short",),
        causes=_FAILURES,
    ),
    Diagnosis(
        id="memory_reserve_too_large",
        alert="SGLangMemoryReserveTooLarge",
        severity="info",
        condition=Reserve("above"),
        summary="SGLang leaves GPU memory unused that its KV pool could have.",
        seen="{value} left on the GPU at start-up",
        guide="available_gpu_mem of 10-20 GB at start-up is too much, 5-8 GB good: raise --mem-fraction-static in steps of 0.01 (E3-E5, C)",
        turn=Turn(
            MEM_FRACTION,
            "raise",
            "0.01 more, again until {reserve_lower_gb} to {reserve_good_gb} GB are left",
            "A larger KV pool holds more requests and more cached prefixes.",
            "other processes share the GPU, or prompts are so long that their activations need the room",
            cost="Less is left for peaks: watch for out-of-memory failures afterwards.",
        ),
        hold="10m",
        kind="remark",
    ),
)
