"""The flags of SGLang 0.3.0 to 0.5.23 that can limit throughput or latency, most likely first.

All arguments of 0.4.9.post6 and 0.5.23 were read (srt/server_args.py; srt/arg_groups/fields/ in 0.5.23); others are
never named. `source` is the module that uses the flag in 0.5.23, or in the last release that has it.
"""

from __future__ import annotations

from sglang_tuning_exporter.diagnosis import suspect_proofs as proofs
from sglang_tuning_exporter.diagnosis.suspect_proofs import Suspect, above, among, between, is_on, other_than
from sglang_tuning_exporter.state.profiles import Trouble

_DECODE: tuple[Trouble, ...] = ("tokens", "waiting")
_PROMPTS: tuple[Trouble, ...] = ("first_tokens", "prefill", "waiting")
_ADMISSION: tuple[Trouble, ...] = ("first_tokens", "held_back", "waiting")
_POOL: tuple[Trouble, ...] = ("pool", "retracting")
_ALL: tuple[Trouble, ...] = ("first_tokens", "tokens", "waiting")
_NO_RADIX_CACHE = (
    ("disaggregation_mode", ("decode",)), ("is_embedding", ()), ("enable_mis", ()),
    ("enable_deterministic_inference", ()), ("prefill_only_disable_kv_cache", ()),
)  # fmt: skip
_NO_OVERLAP = (
    ("speculative_algorithm", ()),
    ("pp_size", (2, 3, 4, 5, 6, 7, 8, 16)),
    ("is_embedding", ()),
    ("device", ("cpu", "mps")),
)
# Attention backends that need their own page size (srt/arg_groups/overrides.py).
PAGED_BACKENDS = (
    *("flashmla", "cutlass_mla", "trtllm_mla", "trtllm_mha", "fa4", "ascend", "intel_amx", "dsa", "nsa", "aiter"),
    *("dsv4", "tokenspeed_mla"),
)
_NEEDED = "it is needed for what this server does"
_DEBUGGING = "It is meant for debugging and slows every step."

SUSPECTS: tuple[Suspect, ...] = (
    Suspect(
        "disable_radix_cache", is_on, ("pool", "prefill", "first_tokens", "retracting", "waiting"),
        "Without the radix cache each request computes and holds its whole prompt. If prompts share prefixes, the cache computes and"
        " holds each prefix once.",
        "prompts share no prefixes, or the model cannot use the cache: then SGLang switches it off again",
        "srt/mem_cache/radix_cache.py", proofs.radix_cache, forced_by=_NO_RADIX_CACHE,
        cost="A little scheduling time; cached prefixes fill the KV cache and are evicted when room is needed.",
    ),
    Suspect(
        "page_size", above(16), ("pool", "held_back", "retracting", "waiting", "limit"),
        "The KV cache is given out in whole pages, and a request leaves its last page partly empty. Shared prefixes are reused in"
        " whole pages only.",
        "the attention backend needs this page size: then SGLang sets it again",
        "srt/mem_cache/allocator", proofs.pages, only_proven=True,
        forced_by=(("attention_backend", PAGED_BACKENDS), ("decode_attention_backend", PAGED_BACKENDS)),
        cost="Larger pages make transfers to host memory or to a decode server faster.",
    ),
    Suspect(
        "max_prefill_tokens", between(0, 16384), _PROMPTS,
        "A prefill batch takes no further prompt after this many tokens, so prompts are computed one after another although a chunk has"
        " room for several.",
        "prompts are computed one at a time anyway, because few requests come at once",
        "srt/managers/schedule_policy.py, PrefillAdder", proofs.prefill_limit,
        cost="Larger prefill batches take more GPU memory, and running requests pause longer.",
    ),
    Suspect(
        "chunked_prefill_size", between(0, 8192), ("prefill", "first_tokens", "tokens"),
        "Each chunk costs a whole pass through the model, so very small chunks repeat that cost for every prompt.",
        "prompts are shorter than a chunk already",
        "srt/managers/schedule_policy.py, add_chunked_req", proofs.small_chunk, only_proven=True,
        cost="Running requests pause longer for each chunk, and a chunk needs more memory.",
    ),
    Suspect(
        "chunked_prefill_size", between(-2, 1), ("tokens", "prefill", "first_tokens"),
        "Without chunks a long prompt is computed in one piece: running requests wait for all of it, and it needs the most memory.",
        "the model cannot compute prompts in chunks: then SGLang switches chunks off again",
        "srt/managers/scheduler.py, chunked_prefill_size", proofs.no_chunks,
        suggested=4096.0, forced_by=(("is_embedding", ()), ("enable_mis", ())),
        cost="A single long prompt takes a little longer.",
    ),
    Suspect(
        "max_loras_per_batch", between(0, 8), ("held_back", "waiting"),
        "Requests run together only if their adapters fit these slots; the others wait, whatever room the KV cache has.",
        "requests use no more adapters than there are slots",
        "srt/managers/scheduler.py, get_new_batch_prefill", proofs.adapters, only_proven=True,
        cost="Each slot takes GPU memory for one adapter.",
    ),
    Suspect(
        "prefill_max_requests", between(0, 64), _ADMISSION,
        "No prefill batch starts more requests than this, so short prompts cannot share a batch.",
        "prompts are long enough to fill a batch alone",
        "srt/managers/schedule_policy.py, PrefillAdder", proofs.prefill_requests,
        cost="Running requests pause longer for each prefill batch.",
    ),
    Suspect(
        "disable_cuda_graph_padding", is_on, ("eager", "tokens"),
        "Only batches of exactly a captured size use a CUDA graph; with padding every smaller batch does.",
        "the batch has one of the captured sizes all the time",
        "srt/model_executor/runner/decode_cuda_graph_runner.py", proofs.on_trouble("eager", "cuda_graph_off", "instead"), gpu_only=True,
    ),
    Suspect(
        "max_queued_requests", between(0, 1e9), ("rejected",),
        "SGLang answers 503 to each request that finds the queue full. A longer queue takes bursts.",
        "requests always come faster than they are served: then they wait instead, and more of them give up",
        "srt/managers/scheduler.py, _abort_on_queued_limit", proofs.queue_limit,
        cost="Requests wait longer instead of being rejected.",
    ),
    Suspect(
        "watchdog_timeout", between(0, 60), ("hang",),
        "SGLang ends itself when a single step takes longer than this. A long prompt or a compilation can take that long.",
        "the server hung for other reasons: its log shows where each process stood",
        "srt/utils/watchdog.py", proofs.on_trouble("hang", "scheduler_stuck", "before"), only_proven=True,
        cost="A real hang is noticed later.",
    ),
    *(
        Suspect(
            arg, above(0), _ALL,
            "Weights in host memory are copied to the GPU in every step.",
            "the weights do not fit on the GPU otherwise",
            "srt/utils/offloader.py", gpu_only=True,
            cost="The weights take GPU memory, and the KV cache becomes smaller.",
        )
        for arg in ("cpu_offload_gb", "offload_group_size")
    ),
    Suspect(
        "enable_paged_experts", is_on, _ALL,
        "Experts in host memory are copied to the GPU when a token needs them.",
        "the experts do not fit on the GPU otherwise",
        "srt/layers/moe", gpu_only=True,
        cost="The experts take GPU memory, and the KV cache becomes smaller.",
    ),
    Suspect(
        "attention_backend", among("torch_native", "flex_attention"), _ALL,
        "This backend computes requests one by one and without CUDA graphs. SGLang chooses a faster one when the flag is not given: fa3 on"
        " Hopper, trtllm_mha or trtllm_mla on Blackwell, flashinfer on Ampere and Ada.",
        "the GPU or the model works with no other backend",
        "srt/layers/attention/torch_native_backend.py", gpu_only=True,
    ),
    Suspect(
        "disable_flashinfer", is_on, _ALL,
        "Without FlashInfer the slower Triton kernels compute attention.",
        "FlashInfer does not work with this GPU",
        "srt/server_args.py in 0.3.4", gpu_only=True,
    ),
    Suspect(
        "disable_mla", is_on, ("pool", "retracting", "tokens"),
        "DeepSeek's compressed KV cache is many times smaller than the full one.",
        "the model has no latent attention",
        "srt/server_args.py in 0.4.4", gpu_only=True,
    ),
    Suspect(
        "disable_overlap_schedule", is_on, _ALL,
        "The GPU waits after each step until the CPU has scheduled the next one. With overlap both work at once.",
        "another flag needs it off: then SGLang switches it off again",
        "srt/managers/scheduler.py, event_loop_overlap", forced_by=_NO_OVERLAP,
    ),
    Suspect(
        "max_total_tokens", above(0), _POOL,
        "The KV cache holds no more than this, also where memory for more is free.",
        "no more fits into the GPU's memory: then SGLang takes what fits",
        "srt/mem_cache/kv_cache_configurator.py", proofs.pool_cap,
    ),
    Suspect(
        "mem_fraction_static", between(0, 0.7), _POOL,
        "The KV cache gets what this share of the GPU's memory leaves beside the weights. SGLang chooses 0.7 to 0.9 by itself.",
        "other processes use the GPU's memory, or the server ran out of memory with more",
        "srt/arg_groups/memory_hook.py", gpu_only=True,
        cost="Less memory is left for peaks: raise it in steps of 0.01, and watch for out-of-memory failures.",
    ),
    Suspect(
        "schedule_conservativeness", above(1.3), ("held_back", "waiting", "first_tokens"),
        "Above 1 SGLang keeps more of the KV cache free for running requests, and starts fewer.",
        "requests were retracted often with 1",
        "srt/managers/scheduler_components/new_token_ratio_tracker.py", proofs.only_if(lambda past: not past.retractions), only_proven=True, suggested=1.0,
        cost="Requests may be retracted.",
    ),
    Suspect(
        "schedule_conservativeness", between(0, 1.0), ("retracting",),
        "Below 1 SGLang starts requests for which the KV cache may have no room later.",
        "requests ask for far more tokens than they use",
        "srt/managers/scheduler_components/new_token_ratio_tracker.py", suggested=1.0,
        cost="Fewer requests run at once.",
    ),
    Suspect(
        "dtype", among("float32", "float"), (*_POOL, "tokens"),
        "Weights and KV cache of 32 bits take twice the memory and time of 16 bits.",
        "the answers need this precision",
        "srt/configs/model_config.py", suggested="auto",
    ),
    Suspect(
        "disable_hybrid_swa_memory", is_on, _POOL,
        "Layers with a sliding window then keep every token instead of the window's.",
        "the model has no sliding-window layers",
        "srt/configs/model_config.py, is_hybrid_swa", gpu_only=True,
    ),
    Suspect(
        "prefill_decode_interval", above(0), _ADMISSION,
        "Requests that wait cannot start until this many decode steps have passed.",
        "running requests would pause too often without it",
        "srt/managers/scheduler.py, prefill_decode_interval", proofs.decode_interval, suggested=0.0, only_proven=True,
        cost="Running requests pause more often.",
    ),
    Suspect(
        "min_free_slots_delay", above(1), _ADMISSION,
        "Requests that wait cannot start until this many running ones have ended.",
        "each start is costly, as with a separate draft model",
        "srt/arg_groups/fields/schedule.py", suggested=1.0,
    ),
    Suspect(
        "enable_prefill_delayer", is_on, _ADMISSION,
        "Prefill waits until several DP ranks have prompts.",
        "most of the time all DP ranks have prompts",
        "srt/managers/prefill_delayer.py",
        cost="DP ranks without prompts idle while another one computes a prompt.",
    ),
    Suspect(
        "num_continuous_decode_steps", above(1), ("first_tokens", "held_back"),
        "New requests can start only every few decode steps.",
        "first tokens are late because requests wait for room",
        "srt/arg_groups/fields/schedule.py",
        cost="A little scheduling time for each step.",
    ),
    Suspect(
        "scheduler_recv_interval", above(1), ("first_tokens",),
        "The scheduler looks for new requests only every few steps.",
        "each step is short",
        "srt/managers/scheduler_components/request_receiver.py",
        cost="A little scheduling time for each step.",
    ),
    Suspect(
        "disaggregation_decode_polling_interval", above(1), ("first_tokens",),
        "The decode server looks for requests that the prefill server has finished only every few steps.",
        "each step is short",
        "srt/disaggregation/decode.py",
        cost="A little time for each step.",
    ),
    Suspect(
        "hicache_storage_prefetch_policy", among("wait_complete"), _ADMISSION,
        "A request waits until its whole prefix has come from the storage.",
        "computing the prefix again takes longer than fetching it",
        "srt/mem_cache/unified_radix_cache.py", suggested="timeout",
        cost="Part of a prefix may be computed again.",
    ),
    Suspect(
        "schedule_policy", among("random", "lof", "dfs-weight", "routing-key"), ("first_tokens", "waiting"),
        "Requests do not start in the order in which they came, so some wait far longer than others.",
        "the clients need that order",
        "srt/managers/schedule_policy.py", suggested="fcfs",
    ),
    *(
        Suspect(
            arg, above(0), ("limit", "waiting"),
            "Under pipeline parallelism no stage runs more requests at once than this.",
            "the KV cache is full",
            source, only_with=("pp_size",),
            cost="Inter-token latency rises as more requests run together.",
        )
        for arg, source in (("max_micro_batch_size", "srt/managers/scheduler.py in 0.5.2"), ("pp_max_micro_batch_size", "srt/managers/scheduler.py"))
    ),
    *(
        Suspect(
            arg, is_on, ("first_tokens", "prefill"),
            "Short prompts are launched kernel by kernel, which takes longer than computing them.",
            "the model or the attention backend cannot be captured",
            source, gpu_only=True, forced_by=(("disaggregation_mode", ("decode",)),),
            cost="Graphs take GPU memory.",
        )
        for arg, source in (
            ("disable_prefill_cuda_graph", "srt/arg_groups/cuda_graph_hook.py"),
            ("disable_piecewise_cuda_graph", "srt/server_args.py in 0.5.13"),
        )
    ),
    Suspect(
        "disable_custom_all_reduce", is_on, _DECODE,
        "NCCL is slower than SGLang's own kernel for the small messages of a decode step.",
        "the GPUs have no fast links, or are on several machines",
        "srt/distributed/device_communicators/custom_all_reduce.py", only_with=("tp_size",), gpu_only=True,
        forced_by=(("enable_deterministic_inference", ()), ("device", ("npu",)), ("nnodes", tuple(range(2, 65)))),
    ),
    Suspect(
        "enable_deterministic_inference", is_on, _ALL,
        "Equal answers for equal requests need slower kernels, and most backends then have no radix cache.",
        "answers must be repeatable",
        "srt/arg_groups/attention_hook.py", gpu_only=True,
        cost="The same request may get slightly different answers.",
    ),
    Suspect(
        "speculative_algorithm", other_than("none", "null", ""), _DECODE,
        "Draft tokens that are not accepted are wasted work. In large batches that work delays everybody.",
        "most draft tokens are accepted (accept length well above 1)",
        "srt/speculative", proofs.only_if(proofs.in_large_batches), only_proven=True, gpu_only=True,
        cost="Single requests get their tokens more slowly.",
    ),
    Suspect(
        "tokenizer_mode", among("slow"), ("first_tokens", "waiting"),
        "The slow tokenizer runs in Python, in the one process that receives all requests.",
        "the model has no fast tokenizer",
        "srt/utils/hf_transformers_utils.py", suggested="auto",
    ),
    Suspect(
        "disable_tokenizer_batch_decode", is_on, ("tokens",),
        "The detokenizer handles the answers of a batch one by one.",
        "few requests run at once",
        "srt/managers/detokenizer_manager.py",
    ),
    Suspect(
        "disable_fast_image_processor", is_on, ("first_tokens",),
        "Images are prepared by the slower processor.",
        "requests have no images",
        "srt/utils/hf_transformers_utils.py",
    ),
    Suspect(
        "stream_interval", above(8), ("tokens", "first_tokens"),
        "Tokens reach the clients in blocks of this many.",
        "the clients do not show tokens as they come",
        "srt/managers/scheduler_components/output_streamer.py",
        cost="More messages between the processes: at large batches that costs throughput.",
    ),
    Suspect(
        "skip_server_warmup", is_on, ("first_tokens",),
        "The first requests after a start then wait for kernels to be compiled and loaded.",
        "the server started long ago",
        "srt/entrypoints/http_server.py", proofs.only_if(lambda past: past.starts > 0), only_proven=True,
        cost="The start takes a little longer.",
    ),
    Suspect(
        "log_level", among("debug", "trace"), _ALL,
        "Every step writes lines that the step waits for.",
        _NEEDED, "srt/managers/scheduler.py", suggested="info",
    ),
    Suspect(
        "decode_log_interval", between(0, 10), _ALL,
        "The scheduler writes a line and refreshes its metrics every few steps.",
        "each step takes far longer than writing a line",
        "srt/managers/scheduler_components/metrics_reporter.py",
        cost="Figures in log and metrics are refreshed less often.",
    ),
    Suspect(
        "log_requests", is_on, _ALL,
        "Each request and answer is written to the log by the process that receives all requests.",
        "few requests come, or the level is 0",
        "srt/managers/tokenizer_manager.py",
        cost="Requests are not in the log.",
    ),
    Suspect(
        "enable_nan_detection", is_on, _DECODE,
        "Each step is checked for NaN, and the GPU waits for the check.",
        _NEEDED, "srt/layers/sampler.py in 0.5.12", gpu_only=True,
        cost="NaN in the logits is not found.",
    ),
    *(
        Suspect(arg, is_on, _ALL, _DEBUGGING, _NEEDED, "srt/arg_groups/fields/exec_.py", gpu_only=True)
        for arg in ("debug_cuda_graph", "enable_layerwise_nvtx_marker", "enable_torch_compile_debug_mode")
    ),
    Suspect(
        "debug_tensor_dump_output_folder", other_than(""), _ALL, _DEBUGGING, _NEEDED, "srt/debug_utils/tensor_dump_forward_hook.py",
    ),
    Suspect(
        "kv_canary", other_than("none"), _ALL, _DEBUGGING, _NEEDED, "srt/kv_canary", suggested="none",
    ),
    Suspect(
        "enable_fp32_lm_head", is_on, ("tokens",),
        "The last layer is computed with 32 bits in every step.",
        "the answers need this precision",
        "srt/layers/logits_processor.py", gpu_only=True,
        cost="Slightly different answers.",
    ),
    Suspect(
        "triton_attention_reduce_in_fp32", is_on, ("tokens",),
        "Triton's attention then adds up with 32 bits.",
        "it crashes with 16 bits, or another attention backend is used",
        "srt/layers/attention/triton_backend.py", gpu_only=True,
    ),
    Suspect(
        "attention_backend", among("triton"), ("tokens", "first_tokens"),
        "Other backends are faster on most NVIDIA GPUs: fa3 on Hopper, trtllm_mha or trtllm_mla on Blackwell, flashinfer on Ampere and"
        " Ada.",
        "SGLang chose it itself, as it does on AMD GPUs and where the model works with no other",
        "srt/arg_groups/attention_hook.py", gpu_only=True,
    ),
)  # fmt: skip
