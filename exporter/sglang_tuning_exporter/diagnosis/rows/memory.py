"""Rows about GPU memory.

GPU memory = weights + KV cache + CUDA graphs + activations; mem_fraction_static = (weights + KV cache) / GPU memory.
"""

from __future__ import annotations

from functools import partial

from sglang_tuning_exporter.diagnosis.conditions.memory import Failures, GraphMemory, Reserve
from sglang_tuning_exporter.diagnosis.conditions.share import Share
from sglang_tuning_exporter.diagnosis.row import Diagnosis, Remedy, Title
from sglang_tuning_exporter.diagnosis.sizing import graphs, memory, reserve

MEM_FRACTION = "mem_fraction_static"
_FAILURES = ("out_of_memory_prefill", "out_of_memory_decode", "graph_memory_short", "out_of_memory_any")

_failure = partial(Diagnosis, severity="critical", hold="0m", scale_out="neither")
_graphs = partial(Diagnosis, severity="warning", keep_firing="5m", scale_out="flag_first")

FAILURE_DIAGNOSES: tuple[Diagnosis, ...] = (
    _failure(
        id="out_of_memory_prefill",
        alert="SGLangOutOfMemoryPrefill",
        condition=Failures(("prefill",)),
        summary="SGLang ran out of GPU memory during prefill.",
        seen="{value} out-of-memory failure{s} in prefill",
        guide='SGLang\'s tuning guide, "Avoid out-of-memory errors": on OOM in prefill lower --chunked-prefill-size to 4096, then 2048',
        title=Title("out of GPU memory in prefill"),
        remedy=Remedy(
            "chunked_prefill_size",
            "lower",
            "4096, then 2048",
            "SGLang prefills prompts in chunks of this many tokens. A larger chunk needs more memory.",
            "the value is already 2048: then lower --mem-fraction-static",
            cost="Time to first token of long prompts rises.",
        ),
        sizes=memory.oom_prefill,
    ),
    _failure(
        id="out_of_memory_decode",
        alert="SGLangOutOfMemoryDecode",
        condition=Failures(("decode",)),
        summary="SGLang ran out of GPU memory during decode.",
        seen="{value} out-of-memory failure{s} in decode",
        guide='SGLang\'s tuning guide, "Avoid out-of-memory errors": on OOM in decode lower --max-running-requests',
        title=Title("out of GPU memory in decode"),
        remedy=Remedy(
            "max_running_requests",
            "lower",
            "about three quarters of the last batch",
            "Fewer requests at once need less memory for activations.",
            "a single request does not fit: then lower --mem-fraction-static or --context-length",
            cost="Fewer requests run at once.",
        ),
        sizes=memory.oom_decode,
    ),
    _failure(
        id="graph_memory_short",
        alert="SGLangGraphMemoryShort",
        condition=GraphMemory(),
        summary="CUDA graphs leave too little GPU memory free, or do not fit.",
        seen="graph capture ran out of memory, or left less than {reserve_least_gb} GB free",
        guide='SGLang\'s tuning guide, "Avoid out-of-memory errors": lower --mem-fraction-static, or capture fewer or smaller CUDA graphs',
        title=Title("CUDA graphs leave no GPU memory"),
        remedy=Remedy(
            MEM_FRACTION,
            "lower",
            "0.05 less, or lower --cuda-graph-max-bs",
            "SGLang captures CUDA graphs after it has allocated weights and KV cache; the graphs need memory of their own.",
            "the captured batch sizes never run: then lower --cuda-graph-max-bs instead",
            cost="The KV cache gets smaller.",
        ),
        sizes=graphs.graph_memory,
    ),
    _failure(
        id="out_of_memory_any",
        alert="SGLangOutOfMemory",
        condition=Failures(("startup", "unknown")),
        summary="SGLang ran out of GPU memory.",
        seen="{value} out-of-memory failure{s}",
        guide='SGLang\'s tuning guide, "Avoid out-of-memory errors": lower --mem-fraction-static to 0.8 or 0.7; capture fewer CUDA graphs; use'
        " an FP8 KV cache or FP8 weights",
        label="Out of memory",
        title=Title("out of GPU memory"),
        remedy=Remedy(
            MEM_FRACTION,
            "lower",
            "0.8, then 0.7",
            "Weights and KV cache take this share of GPU memory; the rest must hold CUDA graphs and activations.",
            "the weights alone do not fit: then use more GPUs (--tp-size) or --quantization fp8; or a request has too many images: then send fewer at once",
            cost="The KV cache gets smaller.",
        ),
        sizes=memory.oom_any,
    ),
)

GRAPH_DIAGNOSES: tuple[Diagnosis, ...] = (
    _graphs(
        id="cuda_graph_not_covering",
        alert="SGLangCudaGraphNotCovering",
        condition=Share("cuda_graph", ("beyond_captured",)),
        summary="Decode batches are larger than the largest captured CUDA graph, so they run without a graph.",
        summary_past="Until {until} decode batches were larger than the largest captured CUDA graph.",
        seen="{value} of the serving time in decode batches larger than the largest captured size",
        guide='SGLang\'s tuning guide, "Tune --cuda-graph-max-bs": raise it to 512 or 768 for large batches, and lower --mem-fraction-static at'
        " the same time",
        remedy=Remedy(
            "cuda_graph_max_bs",
            "raise",
            "the next usual size that covers the running batch, at most 768",
            "For a batch larger than the captured sizes SGLang launches each kernel separately, which takes longer.",
            "CUDA graphs are disabled, or the attention backend cannot be captured",
            cost="Larger CUDA graphs take GPU memory.",
        ),
        sizes=graphs.graphs,
    ),
    _graphs(
        id="cuda_graph_off",
        alert="SGLangCudaGraphOff",
        condition=Share("cuda_graph", ("eager", "disabled")),
        summary="SGLang decodes small batches without CUDA graphs.",
        summary_past="Until {until} SGLang decoded small batches without CUDA graphs.",
        seen="{value} of the serving time in decode batches without a CUDA graph",
        guide='SGLang\'s tuning guide, "Tune --cuda-graph-max-bs": small batches should run with CUDA graphs; check --disable-cuda-graph and'
        " --attention-backend",
        remedy=Remedy(
            "disable_cuda_graph",
            "drop",
            "remove the flag, or set another --attention-backend",
            "At small batches launching the kernels one by one takes longer than running them.",
            "the attention backend, LoRA or speculative decoding cannot be captured",
            cost="CUDA graphs take GPU memory, about 1 GB at usual sizes.",
        ),
        sizes=graphs.graphs_off,
    ),
)

RESERVE_DIAGNOSES: tuple[Diagnosis, ...] = (
    Diagnosis(
        id="memory_reserve_too_small",
        alert="SGLangMemoryReserveTooSmall",
        severity="warning",
        condition=Reserve("below"),
        summary="SGLang started with too little free GPU memory: it may run out of memory.",
        seen="{value} free on the GPU at start-up",
        guide='SGLang\'s tuning guide, "Tune --mem-fraction-static": lower it where available_gpu_mem at start-up is below 5 GB',
        remedy=Remedy(
            MEM_FRACTION,
            "lower",
            "0.01 less; repeat until {reserve_lower_gb} to {reserve_good_gb} GB stay free",
            "Activations of long prompts and large batches need this memory.",
            "another process holds the memory: check nvidia-smi",
            cost="The KV cache gets smaller.",
        ),
        hold="10m",
        unless=("graph_memory_short",),
        causes=_FAILURES,
        sizes=partial(reserve.reserve, too_large=False),
        scale_out="neither",
    ),
    Diagnosis(
        id="memory_reserve_too_large",
        alert="SGLangMemoryReserveTooLarge",
        condition=Reserve("above"),
        summary="GPU memory stays unused that the KV cache could use.",
        seen="{value} free on the GPU at start-up",
        guide='SGLang\'s tuning guide, "Tune --mem-fraction-static": 5-8 GB of available_gpu_mem at start-up is good; with 10-20 GB raise it in'
        " steps of 0.01",
        remedy=Remedy(
            MEM_FRACTION,
            "raise",
            "0.01 more; repeat until {reserve_lower_gb} to {reserve_good_gb} GB stay free",
            "A larger KV cache holds more requests and more cached prefixes.",
            "token usage stays low and prompts share no prefixes, other processes share the GPU, the CPU shares its memory (DGX Spark, Jetson), or the"
            " activations of long prompts or images need it",
            cost="Less GPU memory stays free for peaks: watch for out-of-memory failures afterwards.",
        ),
        hold="10m",
        kind="remark",
        sizes=partial(reserve.reserve, too_large=True),
    ),
)
