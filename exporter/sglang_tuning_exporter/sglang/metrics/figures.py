"""The figures of a scrape, as objects. Pure data.

Times are unix seconds (float); memory is in GB as SGLang prints it (1 GB = 2**30 bytes). `None` means that this release does not show the
figure, never zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_tuning_exporter.sglang.metrics.histograms import Histogram

MOST_RANKS = 1024
"""Ranks are numbered below this; a greater number is none."""


@dataclass(slots=True)
class RankFigures:
    """The figures of one scheduler in one scrape (one DP rank, or the whole server without DP).

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
    graph_passes: float | None = None  # decode passes that replayed a captured graph, cumulative
    eager_passes: float | None = None  # decode passes that did not, cumulative
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
    # Cumulative, of the whole server. Time to first token is that of streamed requests where the release separates them.
    time_to_first_token: Histogram | None = None
    inter_token: Histogram | None = None
    request_latency: Histogram | None = None
    queue_time: Histogram | None = None
    answer_tokens: Histogram | None = None  # its "seconds" are tokens of an answer
    unrecognised: int = 0  # sglang families that no release of the census has
    counters_invalid: bool = False  # a counter is NaN or negative: the counters of this page are not used
