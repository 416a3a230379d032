"""Which metric of which SGLang release has which figure; `page_figures` reads a page with this table. Pure.

`SOURCES` has every figure that this program takes from `/metrics`: its family, the releases that have the family, and how the series of
several processes become one figure. Nothing else in the program reads a metric of SGLang.

What the table takes into account (SGLang 0.3.5 to 0.5.23, `srt/metrics/collector.py`, later `srt/observability/metrics_collector.py`):

* Every TP rank counts the same retraction and the same forward pass, and exposes the same constants; PP ranks repeat running, queued and
  usage. Only DP ranks are different schedulers, so nothing is summed over ranks.
* With priority scheduling `priority=""` is the total and the other values are its parts.
* A child that was never incremented is absent. It is zero only where another family of the same release shows that it can be there.
* `is_cuda_graph`, `utilization` and `num_paused_reqs` are declared and never computed, `num_retracted_reqs` is the last event of one
  process (label `pid`), and the queues of disaggregated servers are declared but not written up to 0.4.10. None of them is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_PASSES, _FIRST_TOKENS = "cuda_graph_passes_total", "time_to_first_token_seconds_count"
# Families that a release writes from its first batch on, in every release that has the counter.
_COUNTS_RETRACTIONS = ("realtime_tokens_total", _PASSES)  # came with the counter, 0.5.7
_COUNTS_ABORTS = ("total_retracted_reqs", "queue_time_seconds_count", "realtime_tokens_total")


@dataclass(frozen=True, slots=True)
class Source:
    """One source of a figure or of a histogram. Of several, the first that a page has is used."""

    fact: str  # a field of `RankFigures` or of `Scrape`, or `queues.<key>`
    metric: str  # the name of a sample, or of a histogram's family, without `sglang:`
    versions: str  # the first and the last examined release that have it
    fold: Literal["max", "min"] = "max"  # over the TP and PP ranks of one scheduler
    where: tuple[str, str] | None = (
        None  # only series with this label, or one of these values; for a histogram, where they have it
    )
    generates: bool = False  # only series of an endpoint that generates
    parts: str | None = None  # label whose values are added up within one rank
    by_rank: bool = False  # of the whole server, but every TP and PP rank counts the same
    zero_with: tuple[str, ...] = ()  # absent means zero where one of these is present
    needs: str | None = None  # without this family on the page the figure is never written
    pool: tuple[str, ...] = ()  # zero means "no such pool" unless one of these is above zero


_SWA_POOL = ("swa_available_tokens", "swa_evictable_tokens", "swa_used_tokens", "max_total_num_tokens_swa")
_MAMBA_POOL = ("mamba_available_tokens", "mamba_evictable_tokens", "mamba_used_tokens")
# Exists since the queues are written; before, it was misspelt `infight`.
_QUEUES_WRITTEN = "num_prefill_inflight_queue_reqs"

# Grows while a request runs, streamed or not: releases with it send the tokens of every request now and then.
OUTPUTS = "inter_token_latency_seconds_count"

SOURCES: tuple[Source, ...] = (
    Source("running", "num_running_reqs", "0.3.5.post2-0.5.23"),
    Source("queued", "num_queue_reqs", "0.3.5.post2-0.5.23"),
    Source("grammar_queued", "num_grammar_queue_reqs", "0.4.6.post5-0.5.23"),
    # From 0.5.11 token_usage is the fullest of all pools, so the full-attention pool is read from its own gauge.
    Source("full_usage", "full_token_usage", "0.5.10.post1-0.5.23"),
    Source("full_usage", "token_usage", "0.3.5.post2-0.5.9"),
    Source("swa_usage", "swa_token_usage", "0.5.3.post3-0.5.23", pool=_SWA_POOL),
    Source("mamba_usage", "mamba_usage", "0.5.5.post3-0.5.23", pool=_MAMBA_POOL),
    Source("used_tokens", "num_used_tokens", "0.3.5.post2-0.5.23"),
    Source("kv_pool_tokens", "max_total_num_tokens", "0.5.6.post2-0.5.23"),
    Source("generation_throughput", "gen_throughput", "0.3.5.post2-0.5.23"),
    Source("new_token_ratio", "new_token_ratio", "0.5.5.post3-0.5.23"),
    # 0 without speculative decoding.
    Source("accept_length", "spec_accept_length", "0.4.3.post4-0.5.23"),
    Source("graph_passes", _PASSES, "0.5.7-0.5.23", where=("mode", "decode_cuda_graph"), zero_with=(_PASSES,)),
    Source("eager_passes", _PASSES, "0.5.7-0.5.23", where=("mode", "decode_none"), zero_with=(_PASSES,)),
    Source(
        "prefill_passes",
        _PASSES,
        "0.5.10.post1-0.5.23",
        where=("mode", "prefill_none|prefill_cuda_graph"),
        parts="mode",
    ),
    Source("decoded_tokens", "realtime_tokens_total", "0.5.7-0.5.23", where=("mode", "decode")),
    Source("computed_tokens", "realtime_tokens_total", "0.5.7-0.5.23", where=("mode", "prefill_compute")),
    Source("cached_tokens", "realtime_tokens_total", "0.5.7-0.5.23", where=("mode", "prefill_cache")),
    Source("retracted_requests", "num_retracted_requests_total", "0.5.7-0.5.23", zero_with=_COUNTS_RETRACTIONS),
    # A gauge by type, cumulative by value, refreshed by decode logs only.
    Source("retracted_requests", "total_retracted_reqs", "0.4.9.post6-0.5.2"),
    # Counted when a request ends, and without a rank label: only for a server without DP ranks.
    Source("retracted_requests", "num_retractions_sum", "0.5.4.post3-0.5.6.post2"),
    # The time from its arrival to the queue is observed once for each request.
    Source(
        "queued_requests", "per_stage_req_latency_seconds_count", "0.5.23-0.5.23", where=("stage", "request_process")
    ),
    Source("admitted_requests", "queue_time_seconds_count", "0.5.3.post3-0.5.23"),
    # The rank with the least memory is the one that runs out.
    Source("available_gpu_memory_gb", "startup_available_gpu_memory_gb", "0.5.11-0.5.23", fold="min"),
    Source("graph_memory_gb", "graph_memory_usage_gb", "0.5.20-0.5.23", parts="phase"),
    Source("weight_memory_gb", "weight_memory_usage_gb", "0.5.20-0.5.23"),
    Source("kv_memory_gb", "kv_cache_memory_usage_gb", "0.5.20-0.5.23"),
    Source("queues.bootstrap", "num_prefill_bootstrap_queue_reqs", "0.5.12-0.5.23"),
    Source("queues.prealloc", "num_decode_prealloc_queue_reqs", "0.5.1.post3-0.5.23", needs=_QUEUES_WRITTEN),
    # A prefill server's queue; gauge and log line call it prealloc up to 0.5.11, bootstrap later. A server has one
    # role, and the other role's queues stay at 0.
    Source("queues.prealloc", "num_prefill_prealloc_queue_reqs", "0.5.1.post3-0.5.11", needs=_QUEUES_WRITTEN),
    Source("queues.inflight", _QUEUES_WRITTEN, "0.5.1.post3-0.5.23"),
    Source("queues.transfer", "num_decode_transfer_queue_reqs", "0.5.1.post3-0.5.23", needs=_QUEUES_WRITTEN),
    Source("queues.host_receive", "num_decode_host_receive_queue_reqs", "0.5.23-0.5.23"),
)

# Of the whole server: written by the tokenizer process, or only compared with itself.
SERVER_SOURCES: tuple[Source, ...] = (
    Source("aborted_requests", "num_aborted_requests_total", "0.4.9.post6-0.5.23", zero_with=_COUNTS_ABORTS),
    # Streamed or not: without streaming, the first tokens that the tokenizer gets. The prefill server of a disaggregated pair has
    # none; there the requests that left the queue are counted instead.
    Source("started_requests", _FIRST_TOKENS, "0.3.5.post2-0.5.23"),
    Source("finished_requests", "e2e_request_latency_seconds_count", "0.3.5.post2-0.5.23"),
    # Added when a request ends, as is the count of requests that ended.
    Source("finished_prompt_tokens", "prompt_tokens_total", "0.3.5.post2-0.5.23"),
    Source("finished_answer_tokens", "generation_tokens_total", "0.3.5.post2-0.5.23"),
    # Absent until the first prompt with a cached prefix.
    Source("finished_cached_tokens", "cached_tokens_total", "0.4.3.post4-0.5.23", zero_with=(_FIRST_TOKENS,)),
    # One for all answers to one prompt (`n`), and for all prompts of one body.
    Source("posted_requests", "http_requests_total", "0.5.7-0.5.23", where=("method", "POST")),
    # A streamed request that is rejected is answered with 200, and never finished.
    Source("answered_requests", "http_responses_total", "0.5.7-0.5.23", where=("status_code", "200"), generates=True),
    Source("refused_requests", "http_responses_total", "0.5.7-0.5.23", where=("status_code", "503"), generates=True),
    Source("server_errors", "http_responses_total", "0.5.7-0.5.23", where=("status_code", "500"), generates=True),
    # Of requests that an exception ends only the first of these counts; uvicorn answers them with status 500.
    *(
        Source(
            fact, metric, "0.5.9-0.5.23", where=("method", "POST"), generates=True, zero_with=("http_requests_active",)
        )
        for fact, metric in (
            ("generation_posts", "http_requests_total"),
            ("generation_responses", "http_responses_total"),
        )
    ),
    # Every TP rank counts the same request. Absent until the first one.
    Source(
        "failed_bootstraps",
        "num_bootstrap_failed_reqs_total",
        "0.4.6.post5-0.5.23",
        by_rank=True,
        zero_with=(_QUEUES_WRITTEN,),
    ),
    Source(
        "failed_transfers",
        "num_transfer_failed_reqs_total",
        "0.4.6.post5-0.5.23",
        by_rank=True,
        zero_with=(_QUEUES_WRITTEN,),
    ),
    Source("pauses", "http_requests_total", "0.5.7-0.5.23", where=("endpoint", "/pause_generation")),
    Source("resumptions", "http_requests_total", "0.5.7-0.5.23", where=("endpoint", "/continue_generation")),
    Source(
        "open_requests",
        "http_requests_active",
        "0.5.9-0.5.23",
        where=("method", "POST"),
        generates=True,
        zero_with=("http_requests_active",),
    ),
)
# These change only with tokens or requests, not with a scrape or a waiting process.
PROGRESS_SOURCES: tuple[Source, ...] = (
    # Written when the detokenizer has sent something.
    Source("sent", "generation_tokens_total", "0.3.5.post2-0.5.23"),
    Source("sent", "prompt_tokens_total", "0.3.5.post2-0.5.23"),
    Source("sent", "num_requests_total", "0.4.3.post4-0.5.23"),
    # The three above change when a request ends. These two change while one runs, the only ones before 0.5.7.
    Source("sent", _FIRST_TOKENS, "0.3.5.post2-0.5.23"),
    Source("sent", OUTPUTS, "0.4.3.post4-0.5.23"),
    # Written by the scheduler.
    Source("scheduled", "queue_time_seconds_count", "0.5.3.post3-0.5.23"),
    Source("scheduled", "realtime_tokens_total", "0.5.7-0.5.23"),
    Source("scheduled", _PASSES, "0.5.7-0.5.23"),
    Source("scheduled", "prefill_effective_tokens_total", "0.5.20-0.5.23"),
)

# Histograms of the whole server, in seconds except the tokens of answers.
HISTOGRAM_SOURCES: tuple[Source, ...] = (
    # Without streaming the tokenizer gets the first tokens after fifty (SGLANG_FORCE_STREAM_INTERVAL) or at the end, and nobody waits
    # for them. The label came with 0.5.18; before, both are in one series.
    Source("time_to_first_token", "time_to_first_token_seconds", "0.3.5.post2-0.5.23", where=("is_streaming", "true")),
    Source("inter_token", "inter_token_latency_seconds", "0.4.3.post4-0.5.23"),
    # The mean since the first token, observed with every output: smoother than the inter-token latency.
    Source("inter_token", "time_per_output_token_seconds", "0.3.5.post2-0.4.3.post4"),
    Source("request_latency", "e2e_request_latency_seconds", "0.3.5.post2-0.5.23"),
    Source("queue_time", "queue_time_seconds", "0.5.3.post3-0.5.23"),
    # Up to 0.5.9 with --collect-tokens-histogram only.
    Source("answer_tokens", "generation_tokens_histogram", "0.4.6.post5-0.5.23"),
)
HISTOGRAM_MEMBERS = frozenset(
    f"{source.metric}_{member}" for source in HISTOGRAM_SOURCES for member in ("bucket", "count", "sum")
)


WANTED = frozenset(
    name
    for source in SOURCES + SERVER_SOURCES + PROGRESS_SOURCES
    for name in (source.metric, *source.zero_with, *source.pool, source.needs)
    if name
)
# Counters of the whole server, added up from scrape to scrape.
SERVER_COUNTS = (
    *("aborted_requests", "started_requests", "finished_requests"),
    *("finished_prompt_tokens", "finished_answer_tokens", "finished_cached_tokens", "posted_requests"),
    *("answered_requests", "refused_requests", "server_errors", "generation_posts", "generation_responses"),
    *("failed_bootstraps", "failed_transfers"),
)
# The families that the boards read: what --lean-passthrough passes on.
ON_BOARDS = frozenset({
    "e2e_request_latency_seconds", "generation_tokens_histogram", "generation_tokens_total", "inter_token_latency_seconds",
    "per_stage_req_latency_seconds", "prompt_tokens_histogram", "queue_time_seconds", "spec_accept_length", "spec_accept_rate",
    "time_per_output_token_seconds", "time_to_first_token_seconds",
})  # fmt: skip
# All counters; the last one has the name of a gauge.
CUMULATIVE = frozenset(
    name for name in WANTED if name.endswith(("_total", "_count", "_sum")) or name == "total_retracted_reqs"
)


def describe() -> list[tuple[str, str, str, str]]:
    """Return what docs/sources.md says of metrics: fact, metric, label, versions."""
    rows = [(source, source.metric) for source in SOURCES + SERVER_SOURCES + PROGRESS_SOURCES]
    rows += [(source, f"{source.metric}_bucket") for source in HISTOGRAM_SOURCES]
    labels = [f'{{{source.where[0]}="{source.where[1]}"}}' if source.where else "" for source, _ in rows]
    return [
        (source.fact, f"sglang:{name}", label, source.versions)
        for (source, name), label in zip(rows, labels, strict=True)
    ]


# Names of every metric family that an SGLang release declares, without the prefix `sglang:`. Made from the collectors of fifteen released
# wheels, 0.3.0 to 0.5.23 (`srt/metrics/*.py`, later `srt/observability/*.py`, and the names that `/v1/loads?format=prometheus` writes): the
# name of each Counter, Gauge, Histogram, Summary and GaugeHistogram as declared and as exposed. A name that is neither here nor in the
# catalogue is from a later release.


FAMILIES = frozenset(
    """
avg_request_queue_latency backup_bandwidth backup_pgs backuped_tokens_total cache_config_info cache_hit_rate
context_len decode_deferred_kv_release_seconds decode_deferred_kv_release_total decode_sum_seq_lens
disagg_decode_prealloc_queue_reqs disagg_decode_retracted_queue_reqs disagg_decode_transfer_queue_reqs
disagg_kv_transfer_latency_ms disagg_kv_transfer_speed_gb_s disagg_prefill_bootstrap_queue_reqs
disagg_prefill_inflight_queue_reqs disagg_prefill_prealloc_queue_reqs dp_attention_pairs_total
dp_attention_steps_total dp_attention_sync_wait_seconds dp_attention_token_imbalance_ratio dp_attention_tokens_total
dp_cooperation_forward_execution_seconds_total dp_cooperation_gpu_execution_seconds_total
dp_cooperation_realtime_tokens_total encoder_cache_entries encoder_cache_evictions_total encoder_cache_hit_files_total
encoder_cache_hit_tokens_total encoder_cache_size_mb encoder_cache_total_files_total encoder_cache_total_tokens_total
encoder_dp_pending_requests encoder_mm_items_per_batch encoder_mm_items_per_request encoder_model_forward_seconds
encoder_preprocess_seconds encoder_queue_wait_seconds encoder_request_e2e_latency_seconds
encoder_requests_received_total encoder_requests_total encoder_transfer_seconds engine_load_weights_time
engine_startup_time eplb_balancedness eplb_gpu_physical_count estimated_flops_per_gpu_total
estimated_read_bytes_per_gpu_total estimated_write_bytes_per_gpu_total evicted_tokens_total eviction_duration_seconds
failed_session_recoveries_total forward_execution_seconds_total func_latency_seconds fwd_occupancy
get_loads_duration_seconds gpu_execution_seconds_total grammar_compilation_time_seconds grammar_ebnf_size
grammar_schema_count grammar_tree_traversal_time_avg grammar_tree_traversal_time_max hicache_backup_bytes_total
hicache_backup_dropped_tokens_total hicache_backup_duration_seconds hicache_backup_tokens_total
hicache_dropped_tokens_total hicache_host_mamba_total_states hicache_host_mamba_used_states hicache_host_total_tokens
hicache_host_used_tokens hicache_prefetch_aux_alloc_failed_tokens_total is_cuda_graph kv_available_tokens
kv_evictable_tokens kv_transfer_alloc_ms kv_transfer_bootstrap_ms kv_transfer_latency_ms kv_transfer_speed_gb_s
kv_transfer_total_mb kv_used_tokens load_back_bytes_total load_back_duration_seconds load_back_tokens_total
lora_pool_slots_total lora_pool_slots_used lora_pool_utilization max_running_requests max_running_requests_under_SLO
memory_graph_gb memory_kv_cache_gb memory_token_capacity memory_weight_gb num_aborted_requests num_active_tokens
num_bootstrap_failed_reqs num_bootstrap_failed_reqs_total num_decode_deferred_kv_release_reqs
num_decode_host_receive_reqs_total num_grammar_aborted_total num_grammar_cache_hit_total num_grammar_timeout_total
num_grammar_total num_pages num_paused_reqs num_prealloc_ready_tokens num_prefill_infight_queue_reqs
num_prefill_retries_total num_retracted_input_tokens_total num_retracted_output_tokens_total num_retracted_reqs
num_retractions num_running_reqs_offline_batch num_so_requests_total num_streaming_sessions num_total_tokens
num_transfer_failed_reqs num_transfer_failed_reqs_total num_unique_running_routing_keys num_waiting_reqs
num_waiting_uncached_tokens page_size pending_prealloc_token_usage per_stage_req_latency_seconds
prealloc_full_token_usage prealloc_swa_token_usage prefetch_bandwidth prefetch_pgs prefetched_tokens_total
prefill_delayer_outcomes_total prefill_delayer_wait_forward_passes prefill_delayer_wait_seconds
process_cpu_seconds_total prompt_tokens_histogram queues_grammar queues_paused queues_prealloc_ready queues_retracted
queues_waiting request_time_per_output_token_seconds routing_key_all_req_count routing_key_running_req_count
routing_keys_active scheduler_idle_seconds_total scheduler_process_cpu_seconds_total scheduler_stage_seconds_total
spec_accept_length spec_accept_rate spec_block_accept_length spec_cap_length spec_num_draft_tokens spec_num_steps
spec_verify_calls_total startup_cuda_graph_time_seconds startup_latency_breakdown_seconds_max startup_time_seconds
storage_prefetch_deferred_tokens_total storage_prefetch_hit_tokens_total storage_prefetch_unfulfilled_tokens_total
streaming_session_held_tokens timestamp total_prefill_busy_us total_prefill_uncached_tokens
uncached_prompt_tokens_histogram utilization weight_load_duration_seconds
""".split()  # noqa: SIM905 - a list of strings would take a line each
).union(
    (source.metric for source in HISTOGRAM_SOURCES),
    (name for name in WANTED if not name.endswith(("_count", "_sum"))),  # samples of histograms
)
