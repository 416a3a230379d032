"""The arguments of SGLang that a row, its advice or a suspect reads. Of 539 that a server prints, API and page send these."""

from __future__ import annotations

from collections.abc import Mapping

READ_ARGUMENTS = frozenset({
    "attention_backend", "attn_dp_size", "chunked_prefill_size", "context_length", "cuda_graph_bs", "cuda_graph_bs_decode",
    "cuda_graph_config", "cuda_graph_max_bs", "cuda_graph_max_bs_decode", "cuda_graph_max_bs_prefill",
    "decode_log_interval", "device",
    "disable_cuda_graph", "disable_cuda_graph_padding", "disable_decode_cuda_graph",
    "disable_radix_cache", "disaggregation_mode", "dllm_algorithm", "dp_size",
    "enable_deepep_moe", "enable_deterministic_inference", "enable_dp_attention", "enable_ep_moe", "enable_hierarchical_cache",
    "enable_lmcache", "enable_lora", "enable_metrics", "enable_mis", "enable_mixed_chunk",
    "enable_prefill_delayer", "enable_priority_scheduling", "enable_torch_compile", "ep_size", "grammar_backend", "hicache_ratio", "hicache_size",
    "hicache_storage_backend", "is_embedding", "kv_cache_dtype", "load_balance_method", "log_level", "lora_paths",
    "mamba_full_memory_ratio", "max_mamba_cache_size", "max_micro_batch_size", "max_prefill_tokens", "max_queued_requests",
    "max_running_requests", "max_total_tokens", "mem_fraction_static", "min_free_slots_delay", "model_path", "moe_dense_tp_size",
    "page_size", "piecewise_cuda_graph_max_tokens",
    "pp_async_batch_depth", "pp_max_micro_batch_size", "pp_size",
    "prefill_decode_interval", "prefill_max_requests", "prefill_only_disable_kv_cache", "quantization", "schedule_conservativeness",
    "schedule_policy", "served_model_name", "speculative_algorithm", "speculative_num_draft_tokens", "speculative_num_steps", "stream_interval",
    "swa_full_tokens_ratio", "tokenizer_worker_num", "tp_size", "trust_remote_code", "watchdog_timeout",
})  # fmt: skip


def shown(arguments: Mapping[str, object], *, whole: bool) -> dict[str, object]:
    """Return the arguments that are sent: those that are read, or the `whole` of them."""
    return {name: value for name, value in arguments.items() if whole or name in READ_ARGUMENTS}
