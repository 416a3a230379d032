"""SGLang's `/metrics` as figures, in each release's own names. Pure; nothing here raises.

Times are unix seconds; memory is in GB as SGLang prints it (1 GB = 2**30 bytes). `None` means that this release does
not show the figure, never zero. `_SOURCES` and the tables after it have every figure that this program takes from
`/metrics`: its family, the releases that have the family, and how the series of several processes become one figure.
Nothing else in the program reads a metric of SGLang.

What the tables take into account (SGLang 0.3.5 to 0.5.23, `srt/metrics/collector.py`, later
`srt/observability/metrics_collector.py`):

* Every TP rank counts the same retraction and the same forward pass, and exposes the same constants; PP ranks repeat
  running, queued and
  usage. Only DP ranks are different schedulers, so nothing is summed over ranks.
* With priority scheduling `priority=""` is the total and the other values are its parts.
* A child that was never incremented is absent. It is zero only where another family of the same release shows that it
  can be there.
* `is_cuda_graph`, `utilization` and `num_paused_reqs` are declared and never computed, `num_retracted_reqs` is the last
  event of one
  process (label `pid`), and the queues of disaggregated servers are declared but not written up to 0.4.10. None of them
  is read.

Of histograms:

* A request is observed in one series, that of its own labels. So series are added, those of `priority` too:
  `priority=""` has the
  requests without one, not the total as for gauges.
* TP and PP ranks may each print the same request's `queue_time_seconds` (`--enable-metrics-for-all-schedulers`): of the
  processes of one DP rank the one with most observations is taken.
* Operators choose the bounds (`--bucket-time-to-first-token` and others), so none are assumed.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate
from math import fsum, inf, isnan
from operator import lt
from typing import Any, Literal, NamedTuple, TypeAlias

from sglang_tuning_exporter.sglang import exposition
from sglang_tuning_exporter.sglang.exposition import Page, is_sglang_series, labels, name_with_colon, scan

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
_OUTPUTS = "inter_token_latency_seconds_count"

_SOURCES: tuple[Source, ...] = (
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
    Source("replayed_batches", _PASSES, "0.5.7-0.5.23", where=("mode", "decode_cuda_graph"), zero_with=(_PASSES,)),
    Source("eager_batches", _PASSES, "0.5.7-0.5.23", where=("mode", "decode_none"), zero_with=(_PASSES,)),
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
_SERVER_SOURCES: tuple[Source, ...] = (
    Source("aborted_requests", "num_aborted_requests_total", "0.4.9.post6-0.5.23", zero_with=_COUNTS_ABORTS),
    # Streamed or not: without streaming, the first tokens that the tokenizer gets. The prefill server of a
    # disaggregated pair has none; there the requests that left the queue are counted instead.
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
_PROGRESS_SOURCES: tuple[Source, ...] = (
    # Written when the detokenizer has sent something.
    Source("sent", "generation_tokens_total", "0.3.5.post2-0.5.23"),
    Source("sent", "prompt_tokens_total", "0.3.5.post2-0.5.23"),
    Source("sent", "num_requests_total", "0.4.3.post4-0.5.23"),
    # The three above change when a request ends. These two change while one runs, the only ones before 0.5.7.
    Source("sent", _FIRST_TOKENS, "0.3.5.post2-0.5.23"),
    Source("sent", _OUTPUTS, "0.4.3.post4-0.5.23"),
    # Written by the scheduler.
    Source("scheduled", "queue_time_seconds_count", "0.5.3.post3-0.5.23"),
    Source("scheduled", "realtime_tokens_total", "0.5.7-0.5.23"),
    Source("scheduled", _PASSES, "0.5.7-0.5.23"),
    Source("scheduled", "prefill_effective_tokens_total", "0.5.20-0.5.23"),
)

# Histograms of the whole server, in seconds.
_HISTOGRAM_SOURCES: tuple[Source, ...] = (
    # Without streaming the tokenizer gets the first tokens after fifty (SGLANG_FORCE_STREAM_INTERVAL) or at the end,
    # and nobody waits for them. The label came with 0.5.18; before, both are in one series.
    Source("time_to_first_token", "time_to_first_token_seconds", "0.3.5.post2-0.5.23", where=("is_streaming", "true")),
    Source("inter_token", "inter_token_latency_seconds", "0.4.3.post4-0.5.23"),
    # The mean since the first token, observed with every output: smoother than the inter-token latency.
    Source("inter_token", "time_per_output_token_seconds", "0.3.5.post2-0.4.3.post4"),
    Source("request_latency", "e2e_request_latency_seconds", "0.3.5.post2-0.5.23"),
    Source("queue_time", "queue_time_seconds", "0.5.3.post3-0.5.23"),
)
_WANTED = frozenset(
    name
    for source in _SOURCES + _SERVER_SOURCES + _PROGRESS_SOURCES
    for name in (source.metric, *source.zero_with, *source.pool, source.needs)
    if name
)
_READ = _WANTED.union(
    f"{source.metric}_{member}" for source in _HISTOGRAM_SOURCES for member in ("bucket", "count", "sum")
)
# Counters of the whole server, added up from scrape to scrape.
SERVER_COUNTS = (
    *("aborted_requests", "started_requests", "finished_requests"),
    *("finished_prompt_tokens", "finished_answer_tokens", "finished_cached_tokens", "posted_requests"),
    *("answered_requests", "refused_requests", "server_errors", "generation_posts", "generation_responses"),
    *("failed_bootstraps", "failed_transfers"),
)
# Counters of each scheduler.
RANK_COUNTS = (
    *("replayed_batches", "eager_batches", "prefill_passes", "decoded_tokens", "computed_tokens", "cached_tokens"),
    *("admitted_requests", "retracted_requests"),
)
# The families that the boards read: what --lean-passthrough passes on.
ON_BOARDS = frozenset({
    "e2e_request_latency_seconds", "generation_tokens_histogram", "generation_tokens_total",
    "inter_token_latency_seconds",
    "per_stage_req_latency_seconds", "prompt_tokens_histogram", "queue_time_seconds", "spec_accept_length",
    "spec_accept_rate",
    "time_per_output_token_seconds", "time_to_first_token_seconds",
})  # fmt: skip
# All counters; the last one has the name of a gauge.
_CUMULATIVE = frozenset(
    name for name in _WANTED if name.endswith(("_total", "_count", "_sum")) or name == "total_retracted_reqs"
)


def describe() -> list[tuple[str, str, str, str]]:
    """Return what docs/sources.md says of metrics: fact, metric, label, versions."""
    rows = [(source, source.metric) for source in _SOURCES + _SERVER_SOURCES + _PROGRESS_SOURCES]
    rows += [(source, f"{source.metric}_bucket") for source in _HISTOGRAM_SOURCES]
    labels = [f'{{{source.where[0]}="{source.where[1]}"}}' if source.where else "" for source, _ in rows]
    return [
        (source.fact, f"sglang:{name}", label, source.versions)
        for (source, name), label in zip(rows, labels, strict=True)
    ]


# Names of every metric family that an SGLang release declares, without the prefix `sglang:`. Made from the collectors
# of fifteen released wheels, 0.3.0 to 0.5.23 (`srt/metrics/*.py`, later `srt/observability/*.py`, and the names that
# `/v1/loads?format=prometheus` writes): the name of each Counter, Gauge, Histogram, Summary and GaugeHistogram as
# declared and as exposed. A name that is neither here nor in the tables is from a later release.
_OTHER_FAMILIES = """
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
generation_tokens_histogram get_loads_duration_seconds gpu_execution_seconds_total grammar_compilation_time_seconds
grammar_ebnf_size grammar_schema_count grammar_tree_traversal_time_avg grammar_tree_traversal_time_max
hicache_backup_bytes_total hicache_backup_dropped_tokens_total hicache_backup_duration_seconds
hicache_backup_tokens_total hicache_dropped_tokens_total hicache_host_mamba_total_states
hicache_host_mamba_used_states hicache_host_total_tokens hicache_host_used_tokens
hicache_prefetch_aux_alloc_failed_tokens_total is_cuda_graph kv_available_tokens kv_evictable_tokens
kv_transfer_alloc_ms kv_transfer_bootstrap_ms kv_transfer_latency_ms kv_transfer_speed_gb_s kv_transfer_total_mb
kv_used_tokens load_back_bytes_total load_back_duration_seconds load_back_tokens_total lora_pool_slots_total
lora_pool_slots_used lora_pool_utilization max_running_requests max_running_requests_under_SLO memory_graph_gb
memory_kv_cache_gb memory_token_capacity memory_weight_gb num_aborted_requests num_active_tokens
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
"""
FAMILIES = frozenset(_OTHER_FAMILIES.split()).union(
    (source.metric for source in _HISTOGRAM_SOURCES),
    (name for name in _WANTED if not name.endswith(("_count", "_sum"))),  # samples of histograms
)


# Latency histograms: many series of a family as one histogram.

# A histogram of SGLang has 16 to 40 bounds; a hostile page any number.
MOST_BOUNDS = 512
# Larger floats cannot count by one.
MOST = 2.0**53

_Key: TypeAlias = frozenset[tuple[str, str]]
_PROCESS = frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts of observations: `counts[i]` took `bounds[i]` seconds or less.

    Bounds rise and end with +Inf; counts never fall. `seconds` is the sum of all observations, None where the page has
    none.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    seconds: float | None = None

    @property
    def observations(self) -> float:
        """The number of observations."""
        return self.counts[-1]

    @property
    def mean_seconds(self) -> float | None:
        """Mean of all observations; None without any, and where the sum is unknown."""
        return self.seconds / self.counts[-1] if self.seconds is not None and self.counts[-1] > 0 else None

    def above(self, seconds: float) -> float:
        """Estimate how many took longer than `seconds`, by linear interpolation inside its bucket: the inverse of
        `histogram_quantile`.

        0 for more than the largest finite bound: how much longer an observation took is unknown.
        """
        at = bisect_left(self.bounds, seconds)
        if self.bounds[at] == inf:
            return 0.0
        lower, below = (self.bounds[at - 1], self.counts[at - 1]) if at else (min(0.0, self.bounds[0]), 0.0)
        width = self.bounds[at] - lower
        part = max(0.0, (seconds - lower) / width) if width > 0 else 1.0
        return max(0.0, self.counts[-1] - (below + (self.counts[at] - below) * part))

    def quantile(self, share: float) -> float | None:
        """Estimate the quantile `share` (0-1) in seconds, as `histogram_quantile` does.

        None without observations; the largest finite bound where it is beyond that.
        """
        if self.counts[-1] <= 0:
            return None
        rank = share * self.counts[-1]
        at = bisect_left(self.counts, rank)
        if self.bounds[at] == inf:
            return self.bounds[at - 1]
        if at == 0 and self.bounds[0] <= 0:
            return self.bounds[0]
        lower, below = (self.bounds[at - 1], self.counts[at - 1]) if at else (0.0, 0.0)
        within = self.counts[at] - below
        return lower + (self.bounds[at] - lower) * ((rank - below) / within if within > 0 else 1.0)

    def since(self, earlier: Histogram) -> Histogram | None:
        """Return what came after `earlier`; None where a count fell or the bounds differ: it is a new server."""
        if self.bounds != earlier.bounds or any(map(lt, self.counts, earlier.counts)):
            return None
        seconds = None
        if self.seconds is not None and earlier.seconds is not None and self.seconds >= earlier.seconds:
            seconds = self.seconds - earlier.seconds
        gained = (now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return Histogram(self.bounds, tuple(accumulate(gained, max)), seconds)


def _histogram(series: Mapping[str, _Samples], source: Source) -> Callable[[Sequence[float]], Histogram | None]:
    """Return what reads a histogram: all series of a family as one, None where they cannot be read.

    `where` of the source leaves out series in which that label has another value; series without the label are kept.
    """
    ranks = _buckets_of_ranks(series, source)

    def read(values: Sequence[float]) -> Histogram | None:
        histograms: list[Histogram] = []
        for processes in ranks.values():
            by_process = [[buckets.read(values) for buckets in process] for process in processes.values()]
            # Of the processes of one DP rank that with most observations.
            histograms += max(by_process, key=lambda process: fsum(one.observations for one in process))
        return _sum(histograms)

    return read


class _Buckets(NamedTuple):
    """One series of a histogram: its bounds, and the numbers of its samples on a page."""

    bounds: tuple[float, ...]
    counts: list[int]
    seconds: int | None

    def read(self, values: Sequence[float]) -> Histogram:
        """Return the histogram by the values of a page."""
        counts = tuple(accumulate((values[number] for number in self.counts), max))
        return Histogram(self.bounds, counts, None if self.seconds is None else values[self.seconds])


def _buckets_of_ranks(series: Mapping[str, _Samples], source: Source) -> dict[str, dict[_Key, list[_Buckets]]]:
    """Return the series of a histogram that can be read, by DP rank and process."""
    totals, sums = (
        {_series_and_bound(raw)[0]: number for raw, number in reversed(series.get(f"{source.metric}_{member}", ()))}
        for member in ("count", "sum")
    )
    ranks: dict[str, dict[_Key, list[_Buckets]]] = {}
    for key, numbers in _numbers_by_bound(series.get(f"{source.metric}_bucket", ())).items():
        names, infinite = dict(key), numbers.pop(inf, totals.get(key))
        is_other = source.where is not None and names.get(source.where[0], source.where[1]) != source.where[1]
        if infinite is None or not 0 < len(numbers) <= MOST_BOUNDS or is_other:
            continue
        process, bounds = frozenset(item for item in key if item[0] in _PROCESS), sorted(numbers)
        buckets = _Buckets((*bounds, inf), [*(numbers[bound] for bound in bounds), infinite], sums.get(key))
        ranks.setdefault(names.get("dp_rank", ""), {}).setdefault(process, []).append(buckets)
    return ranks


def _numbers_by_bound(samples: _Samples) -> dict[_Key, dict[float, int]]:
    """Return the numbers of a family's buckets, by series and bound. Of two samples of one bucket the first counts."""
    numbers: dict[_Key, dict[float, int]] = {}
    for raw, number in samples:
        key, bound = _series_and_bound(raw)
        by_bound = numbers.setdefault(key, {}) if bound is not None else {}
        if bound is not None and len(by_bound) <= MOST_BOUNDS:
            by_bound.setdefault(bound, number)
    return numbers


def _series_and_bound(raw: str) -> tuple[_Key, float | None]:
    """Return the series of a sample, and its bound where it is a bucket."""
    by_name = labels(raw)
    series = frozenset(item for item in by_name.items() if item[0] != "le")
    try:
        bound = float(by_name["le"])
    except (KeyError, ValueError):
        return series, None
    return series, None if isnan(bound) or bound == -inf else bound


def _sum(histograms: Sequence[Histogram]) -> Histogram | None:
    """Add series; None where their bounds differ."""
    if len({histogram.bounds for histogram in histograms}) != 1:
        return None
    counts = tuple(fsum(column) for column in zip(*(histogram.counts for histogram in histograms), strict=True))
    sums = [histogram.seconds for histogram in histograms if histogram.seconds is not None]
    return Histogram(histograms[0].bounds, counts, fsum(sums) if len(sums) == len(histograms) else None)


# One page as objects, read with the tables.

MOST_RANKS = 1024
"""Ranks are numbered below this; a greater number is none."""


@dataclass(slots=True)
class RankFigures:
    """The figures of one scheduler in one answer: a scrape, `/server_info` or `/v1/loads` (one DP rank, or the whole
    server without DP).

    Counters are the server's own cumulative values. Repetitions by TP and PP ranks are already removed.
    """

    dp: int | None = None
    running: float | None = None
    queued: float | None = None
    grammar_queued: float | None = None
    full_usage: float | None = None
    swa_usage: float | None = None
    mamba_usage: float | None = None
    used_tokens: float | None = None
    kv_pool_tokens: float | None = None
    generation_throughput: float | None = None
    new_token_ratio: float | None = None
    accept_length: float | None = None  # of speculative decoding: tokens a verified step, at last
    replayed_batches: float | None = None  # decode passes that replayed a captured graph, cumulative
    eager_batches: float | None = None  # decode passes that did not, cumulative
    prefill_passes: float | None = None  # cumulative, from 0.5.10.post1 on
    decoded_tokens: float | None = None  # cumulative
    computed_tokens: float | None = None  # of prompts, cumulative
    cached_tokens: float | None = None  # of prompts, found in the prefix cache, cumulative
    retracted_requests: float | None = None  # cumulative
    queued_requests: float | None = None  # cumulative: entered the queue for the first time
    admitted_requests: float | None = None  # cumulative: left the queue for the first time
    available_gpu_memory_gb: float | None = None  # at start-up; host memory on a CPU server
    graph_memory_gb: float | None = None
    weight_memory_gb: float | None = None
    kv_memory_gb: float | None = None
    running_limit: float | None = None  # in force; in answers, not on a page
    queues: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Scrape:
    """One successful scrape of SGLang's `/metrics`."""

    ranks: list[RankFigures]
    model_name: str | None = None
    engine_type: str | None = None
    progress: float | None = None  # sum of counters that change only with tokens or requests; to compare, not to show
    sent: float | None = None  # the part of it that changes when the detokenizer sends tokens, known while requests run
    scheduled: float | None = None  # the part of it that the schedulers change
    open_requests: float | None = None  # accepted by the HTTP server and not finished
    aborted_requests: float | None = None
    # Streamed or not. Finished requests include those whose client went away.
    started_requests: float | None = None
    finished_requests: float | None = None
    finished_prompt_tokens: float | None = None  # of the requests that ended, as the next two
    finished_answer_tokens: float | None = None
    # Of prompts; up to 0.5.8 counted again when a request is computed again.
    finished_cached_tokens: float | None = None
    posted_requests: float | None = None  # over HTTP
    answered_requests: float | None = None  # over HTTP, with status 200
    refused_requests: float | None = None  # over HTTP, with status 503
    server_errors: float | None = None  # over HTTP, with status 500
    generation_posts: float | None = None  # over HTTP, to endpoints that generate
    generation_responses: float | None = None  # to them, with any status
    # On this side of a pair; clients that gave up are among them.
    failed_bootstraps: float | None = None
    failed_transfers: float | None = None
    pauses: float | None = None  # POSTs to /pause_generation, cumulative
    resumptions: float | None = None  # POSTs to /continue_generation, cumulative
    # Cumulative, of the whole server. Time to first token is that of streamed requests where the release separates
    # them.
    time_to_first_token: Histogram | None = None
    inter_token: Histogram | None = None
    request_latency: Histogram | None = None
    queue_time: Histogram | None = None
    unrecognised: int = 0  # sglang families that no release of the census has
    counters_invalid: bool = False  # a counter is NaN or negative: the counters of this page are not used


_Samples: TypeAlias = "Sequence[tuple[str, int]]"  # raw labels, and the number of the sample in the page's order
_Process: TypeAlias = "tuple[int | None, frozenset[tuple[str, str]]]"  # DP rank, and labels
_Figures: TypeAlias = (
    "Callable[[Sequence[float]], dict[int | None, float]]"  # the values of a page in, one figure by DP rank out
)

# Paths of the HTTP server that generate.
_GENERATES = re.compile(
    r"/(?:generate|completions|embeddings|responses|messages|rerank|score|classify|encode|chat|invocations)$"
)
_MEMBERS = ("_bucket", "_count", "_sum", "_total", "_created")


def _reader(page: Page) -> Callable[[Sequence[float]], Scrape]:
    """Return what reads the figures of a page by the values of its samples, and of later pages with the same labels."""
    series, unrecognised = _series_of(page)
    numbers = {name: [number for _, number in samples] for name, samples in series.items()}
    counters = {number for name in numbers.keys() & _CUMULATIVE for number in numbers[name]}
    # Memory may be negative: a difference during which another process freed some.
    least = {number: -MOST if name.endswith("_gb") else 0.0 for name, of_name in numbers.items() for number in of_name}
    without = lru_cache(maxsize=1)(partial(_reader_without, series, unrecognised))

    def read(values: Sequence[float]) -> Scrape:
        impossible = frozenset(number for number, low in least.items() if not low <= values[number] <= MOST)
        scrape = without(impossible)(values)
        scrape.counters_invalid = not impossible.isdisjoint(counters)
        return scrape

    return read


def _series_of(page: Page) -> tuple[dict[str, list[tuple[str, int]]], int]:
    """Return the samples of a page that are read, by family, and how many families of SGLang's no release has."""
    series: dict[str, list[tuple[str, int]]] = {}  # by family, without prefix
    families: dict[str, str | None] = {}  # printed name -> name without prefix; None for what is not SGLang's
    seen: set[tuple[str, str]] = set()
    for number, (printed, raw, _, _) in enumerate(page.samples):
        if printed not in families:
            families[printed] = name_with_colon(printed)[7:] if is_sglang_series(printed) else None
        family = families[printed]
        # Of two samples of one series the first, as in the pass-through.
        if family is not None and family in _READ and (printed, raw) not in seen:
            seen.add((printed, raw))
            series.setdefault(family, []).append((raw, number))
    return series, _unrecognised(name for name in families.values() if name is not None)


def _reader_without(
    samples: Mapping[str, _Samples], unrecognised: int, impossible: frozenset[int]
) -> Callable[[Sequence[float]], Scrape]:
    """Return what reads a page without the samples whose values cannot be."""
    possible = {name: [one for one in of_name if one[1] not in impossible] for name, of_name in samples.items()}
    series = {name: of_name for name, of_name in possible.items() if of_name}
    of_server: dict[str, Callable[[Sequence[float]], Any]] = {}
    for source in _HISTOGRAM_SOURCES:
        if source.fact not in of_server and f"{source.metric}_bucket" in samples:
            of_server[source.fact] = _histogram(series, source)
    of_server |= {source.fact: _of_server(source, series) for source in _SERVER_SOURCES}
    by_rank = [(source.fact, _by_rank(source, series)) for source in _SOURCES]
    of_server |= _of_progress(series)
    names: dict[str, Any] = {"model_name": _model_name(series), "engine_type": _engine_type(series)}

    def read(values: Sequence[float]) -> Scrape:
        return Scrape(
            _ranks(by_rank, values),
            unrecognised=unrecognised,
            **names,
            **{fact: figure(values) for fact, figure in of_server.items()},
        )

    return read


def _of_progress(series: Mapping[str, _Samples]) -> dict[str, Callable[[Sequence[float]], float | None]]:
    sent, scheduled = (
        [number for source in _PROGRESS_SOURCES if source.fact == fact for _, number in series.get(source.metric, ())]
        for fact in ("sent", "scheduled")
    )
    return {
        "progress": _sum_of([*sent, *scheduled]),
        "sent": _sum_of(sent if _OUTPUTS in series else []),
        "scheduled": _sum_of(scheduled),
    }


def read(text: str) -> Scrape:
    """Return the figures of one page of `/metrics`; without SGLang's series there are no ranks."""
    page = scan(text)
    return _reader(page)(page.values)


def _ranks(readers: Iterable[tuple[str, _Figures]], values: Sequence[float]) -> list[RankFigures]:
    ranks: dict[int | None, RankFigures] = {}
    for fact, read in readers:
        queue = fact.removeprefix("queues.")
        for dp, value in read(values).items():
            if dp not in ranks:
                ranks[dp] = RankFigures(dp=dp)
            rank = ranks[dp]
            if queue != fact:
                rank.queues[queue] = max(value, rank.queues.get(queue, value))
            elif getattr(rank, fact) is None:
                setattr(rank, fact, value)
    # On a page with ranks, a figure without a rank label belongs to none of them.
    return sorted((rank for rank in ranks.values() if rank.dp is not None), key=lambda rank: rank.dp or 0) or list(
        ranks.values()
    )


def _by_rank(source: Source, series: Mapping[str, _Samples]) -> _Figures:
    """Return what reads a source for every DP rank that has it."""
    if source.needs and source.needs not in series:
        return lambda _: {}
    processes = [(dp, numbers) for (dp, _), numbers in _processes(source, series.get(source.metric, ())).items()]
    zeros: dict[int | None, float] = {
        _dp(labels(raw)): 0.0 for sibling in source.zero_with for raw, _ in series.get(sibling, ())
    }
    fold = min if source.fold == "min" else max

    def figures(values: Sequence[float]) -> dict[int | None, float]:
        return zeros | _folded(processes, fold, values)

    return _of_pools(figures, source, series) if source.pool else figures


def _folded(
    processes: Iterable[tuple[int | None, list[int]]], fold: Callable[[float, float], float], values: Sequence[float]
) -> dict[int | None, float]:
    """Return the sum of each process, and of those of one DP rank the largest or smallest."""
    by_rank: dict[int | None, float] = {}
    for dp, numbers in processes:
        value = values[numbers[0]] if len(numbers) == 1 else sum(values[number] for number in numbers)
        by_rank[dp] = fold(by_rank[dp], value) if dp in by_rank else value
    return by_rank


def _of_pools(read: _Figures, source: Source, series: Mapping[str, _Samples]) -> _Figures:
    """Return what reads the figures of the DP ranks that have a pool: one that is empty, or has tokens."""
    pools = [(_dp(labels(raw)), number) for name in source.pool for raw, number in series.get(name, ())]

    def figures(values: Sequence[float]) -> dict[int | None, float]:
        filled = {dp for dp, number in pools if values[number] > 0}
        return {dp: value for dp, value in read(values).items() if value > 0 or dp in filled}

    return figures


def _of_server(source: Source, series: Mapping[str, _Samples]) -> Callable[[Sequence[float]], float | None]:
    """Return what reads a source of the whole server."""
    if source.by_rank:
        by_rank = _by_rank(source, series)
        return lambda values: fsum(figures.values()) if (figures := by_rank(values)) else None
    processes = _processes(source, series.get(source.metric, ())).values()
    absent = 0.0 if any(sibling in series for sibling in source.zero_with) else None
    return _sum_of([number for numbers in processes for number in numbers], absent)


def _sum_of(numbers: Sequence[int], absent: float | None = None) -> Callable[[Sequence[float]], float | None]:
    """Return what adds up samples; `absent` without any."""
    return lambda values: fsum(values[number] for number in numbers) if numbers else absent


def _processes(source: Source, samples: _Samples) -> dict[_Process, list[int]]:
    """Return what adds up to the figure of every process: the total where it is split by
    priority, the sum of `parts`.
    """
    totals: dict[_Process, list[int]] = {}
    split: dict[_Process, list[int]] = {}
    for raw, number in samples:
        label = labels(raw)
        if source.where and label.get(source.where[0], "") not in source.where[1].split("|"):
            continue
        if source.generates and not _GENERATES.search(label.get("endpoint", "")):
            continue
        key = (_dp(label), frozenset(item for item in label.items() if item[0] not in ("priority", source.parts)))
        (split if label.get("priority") else totals).setdefault(key, []).append(number)
    return {**split, **totals}


def _dp(label: Mapping[str, str]) -> int | None:
    rank = label.get("dp_rank", "")
    number = int(rank) if rank.isascii() and rank.isdigit() and len(rank) < 7 else MOST_RANKS
    return number if number < MOST_RANKS else None


def _model_name(series: Mapping[str, _Samples]) -> str | None:
    names = (labels(raw).get("model_name") for samples in series.values() for raw, _ in samples)
    return next(filter(None, names), None)


def _engine_type(series: Mapping[str, _Samples]) -> str | None:
    """Return the role of the server: `unified`, `prefill` or `decode`.

    Before 0.5.9 the label of every server was `unified`, so there the role is None.
    """
    engines = {
        engine
        for name in ("num_running_reqs", "max_total_num_tokens")
        for raw, _ in series.get(name, ())
        if (engine := labels(raw).get("engine_type"))
    }
    if len(engines) != 1:
        return None
    engine = engines.pop()
    # Present since the label is right: `cache_source` came with 0.5.9, the gauges with 0.5.10.post1 and 0.5.11.
    is_right = any(name in series for name in ("full_token_usage", "startup_available_gpu_memory_gb")) or any(
        "cache_source" in labels(raw) for raw, _ in series.get("cached_tokens_total", ())
    )
    return engine if is_right or engine != "unified" else None


def _unrecognised(names: Iterable[str]) -> int:
    unknown = set()
    for name in names:
        base = next((name.removesuffix(member) for member in _MEMBERS if name.endswith(member)), name)
        if not FAMILIES & {name, base, base + "_total"}:
            unknown.add(base)
    return len(unknown)


# A larger page is not cached; a page of eight ranks has 0.4 MB.
_MOST_CHARACTERS = 8 << 20


class PageReader:
    """Reads the pages of one server; not thread-safe.

    Until a new series comes only the values of a page change, so it keeps the structure of the last page: to compare
    the rest takes a small part of the time of parsing it.
    """

    def __init__(self, *, passthrough: bool = True, only: frozenset[str] | None = None) -> None:
        self._passthrough, self._only = passthrough, only if passthrough else frozenset()
        self._figures: Callable[[Sequence[float]], Scrape] | None = (
            None  # None: without a structure that the next page may have
        )
        self._lines: list[str] = []
        self._begins: Sequence[int] = ()  # in each line, where its figure is; 0 for a line without one
        self._samples: Sequence[int] = ()  # the number of each line's sample
        self._values: list[float] = []
        # Which lines are passed through, in which order; None: the page unchanged.
        self._native: Sequence[int] | None = None
        self._refused = 0

    def read(self, text: str) -> tuple[Scrape, str, dict[str, int]]:
        """Return the figures of a page; itself, safe to append to ours (empty without pass-through); and how many lines
        were dropped of it, by why.
        """
        text, lines, dropped = exposition.bounded(text)
        if self._figures is not None and self._goes_on(lines):
            native = text if self._native is None else "".join([lines[place] + "\n" for place in self._native])
            return self._figures(self._values), native, dropped | {"refused_metric_lines": self._refused}
        page = scan(text)
        native, self._refused = exposition.passthrough(page, self._only) if self._passthrough else ("", 0)
        figures = _reader(page)
        scrape = figures(page.values)
        self._figures = figures if len(text) <= _MOST_CHARACTERS and self._keep(page, native, text, lines) else None
        if self._figures is not None:  # without a structure, the next page needs them again
            exposition.clear_caches()
        return scrape, native, dropped | {"refused_metric_lines": self._refused}

    def _goes_on(self, lines: list[str]) -> bool:
        """Take the lines of the next page; False, and the structure is of no use any more, where more than figures
        changed.
        """
        if len(lines) != len(self._lines):
            return False
        changed = [number for number, (line, last) in enumerate(zip(lines, self._lines, strict=True)) if line != last]
        for number in changed:
            begin, line = self._begins[number], lines[number]
            if not begin or line[:begin] != self._lines[number][:begin]:
                return False
            value = exposition.figure(line[begin:])
            if value is None:
                return False
            self._values[self._samples[number]] = value
        self._lines = lines
        return True

    def _keep(self, page: Page, passed: str, text: str, lines: list[str]) -> bool:
        """Keep the structure of a page; False where what is `passed` on may depend on more than the values."""
        if not page.canonical or not page.samples or any(name.startswith("sglang_") for name, *_ in page.samples):
            return False
        self._native = None
        if passed != text:
            passed_lines = passed.splitlines()
            first_places = dict(zip(reversed(lines), reversed(range(len(lines))), strict=True))
            if not first_places.keys() >= set(passed_lines):  # a line was changed
                return False
            self._native = [first_places[line] for line in passed_lines]
        self._begins = [0 if line[:1] in ("", "#") else line.rindex(" ") + 1 for line in lines]
        self._samples = [number - 1 for number in accumulate(map(bool, self._begins))]
        self._lines, self._values = lines, page.values
        return True
