"""The events of a log and the figures of a scrape, as objects.

Pure data. Times are unix seconds (float); memory is in GB as SGLang prints it (1 GB = 2**30 bytes: `get_available_gpu_memory` divides by `1 << 30`).
`None` means that this line or this release does not show the figure, never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from sglang_tuning_exporter.sglang.metrics.histograms import Histogram

OutOfMemoryPhase = Literal["prefill", "decode", "graph_capture", "startup", "unknown"]
LivenessKind = Literal[
    "ready",
    "watchdog_timeout",
    "health_check_failed",
    "process_died",
    "scheduler_exception",
    "draining",
    "launch_failed",
]
OUT_OF_MEMORY_PHASES: tuple[OutOfMemoryPhase, ...] = ("prefill", "decode", "graph_capture", "startup", "unknown")


@dataclass(frozen=True, slots=True)
class Rank:
    """The scheduler that printed a line: the ranks in its prefix, `None` where the prefix has none."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None


NO_RANK = Rank()
MOST_RANKS = 1024
"""Ranks are numbered below this; a greater number is none. Each one is remembered for as long as the exporter runs."""


@dataclass(slots=True)
class DecodeBatch:
    """`Decode batch…`: printed by the stats rank every `decode_log_interval` (40) decode steps."""

    time: float | None
    rank: Rank
    running: int | None = None
    queued: int | None = None
    tokens: int | None = None
    full_usage: float | None = None  # 0-1; `token usage` or `full token usage`
    swa_usage: float | None = None
    mamba_usage: float | None = None
    graph: bool | None = None  # a captured graph was replayed
    graph_device: str | None = None  # cuda, cpu, npu or musa: the word before `graph:`
    generation_throughput: float | None = None  # tokens per second
    accept_length: float | None = None  # tokens that a speculative step gives each request
    queues: Mapping[str, int] = field(default_factory=dict)  # PD and others: prealloc, transfer, retracted, …
    unknown_keys: tuple[str, ...] = ()
    suspect: bool = False  # raw text of a model or a client may have produced this line (`sglang.log.raw_text`)


@dataclass(slots=True)
class PrefillBatch:
    """`Prefill batch…`: one line for each prefill batch; `running` is the decode batch before the new sequences join."""

    time: float | None
    rank: Rank
    new_sequences: int | None = None
    new_tokens: int | None = None
    cached_tokens: int | None = None
    running: int | None = None
    queued: int | None = None
    pending_tokens: int | None = None
    full_usage: float | None = None
    swa_usage: float | None = None
    mamba_usage: float | None = None
    queues: Mapping[str, int] = field(default_factory=dict)  # bootstrap, prealloc, inflight, …
    unknown_keys: tuple[str, ...] = ()
    suspect: bool = False

    @property
    def is_health_probe(self) -> bool:
        """Whether this is a health probe (one new token, nothing running or queued), which is no load."""
        return self.new_tokens == 1 and not self.running and not self.queued and not self.cached_tokens


@dataclass(slots=True)
class Retraction:
    """The KV cache was full and running requests were put back into the queue: no failure, never an OOM."""

    time: float | None
    rank: Rank
    requests: int
    aborted: int | None = None
    new_tokens_gained: int | None = None
    ratio_before: float | None = None
    ratio_after: float | None = None
    testing: bool = False  # `Testing retraction.` (SGLANG_TEST_RETRACT): the KV cache was not full
    suspect: bool = False
    near_raw_text: bool = False  # raw text may be near


@dataclass(slots=True)
class OutOfMemory:
    """A fatal allocation failure. `text` is its line, cut to 200 characters."""

    time: float | None
    rank: Rank
    phase: OutOfMemoryPhase
    text: str = ""
    suspect: bool = False


@dataclass(slots=True)
class ServerArgs:
    """`server_args=…`: the arguments as printed at start-up, secrets removed before this object exists."""

    time: float | None
    rank: Rank
    args: dict[str, object]
    is_cut: bool = False  # by what carried the log: more arguments were printed
    suspect: bool = False


@dataclass(slots=True)
class KvPool:
    """`KV Cache is allocated…` (or the post-capture sizing line, which gives the real figure)."""

    time: float | None
    rank: Rank
    tokens: int
    gigabytes: float | None = None  # K + V, or KV
    resized: bool = False  # after the graphs were captured (0.5.16 on): in place of what was printed before
    suspect: bool = False


@dataclass(slots=True)
class Memory:
    """`avail mem=` during the start: the memory left after a stage (weights, pool, graph), and the memory that the stage took."""

    time: float | None
    rank: Rank
    stage: Literal["weights_begin", "weights", "state_cache", "pool", "graph_begin", "graph"]
    available_gb: float | None = None
    used_gb: float | None = None
    graph_sizes: tuple[int, ...] = ()  # captured decode batch sizes, with stage graph
    of_prefill: bool = False  # with stage graph: of prefill batches
    states: int | None = None  # with stage state_cache: of requests and prefixes together
    suspect: bool = False


@dataclass(slots=True)
class Limits:
    """`max_total_num_tokens=…, max_running_requests=…[, available_gpu_mem=… GB]`, or one of the lines that lower
    `max_running_requests` alone (0.5.16 on).
    """

    time: float | None
    rank: Rank
    max_total_num_tokens: int | None = None
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    available_gb: float | None = None
    memory_device: str | None = None  # gpu, cpu, …: the word in `available_gpu_mem`
    suspect: bool = False


# After these no process of the server goes on (srt/entrypoints/engine.py, srt/utils: the parent is killed).
ENDS: tuple[LivenessKind, ...] = ("process_died", "scheduler_exception", "launch_failed")


@dataclass(slots=True)
class Liveness:
    """The server is ready, hangs, drains or has lost a process."""

    time: float | None
    rank: Rank
    what: LivenessKind
    suspect: bool = False
    stage: str = ""  # whose watchdog it was: tokenizer, scheduler or detokenizer
    detail: str = ""  # which process crashed, and how
    timely: bool = False  # the times in a failed health check's text agree with the line's own


@dataclass(slots=True)
class Rejection:
    """A request answered with 503, from the access log: the queue is full, or the server is not ready for it."""

    time: float | None
    rank: Rank
    suspect: bool = False


@dataclass(slots=True)
class ServerError:
    """A request that an exception in SGLang ended: answered with status 500, or a stream that broke off."""

    time: float | None
    rank: Rank
    suspect: bool = False


@dataclass(slots=True)
class Pause:
    """A request to /pause_generation or /continue_generation, from the access log."""

    time: float | None
    rank: Rank
    ends: bool  # generation continues
    suspect: bool = False


@dataclass(slots=True)
class TooLong:
    """A prompt that the KV cache, or the context, can never hold: refused, or truncated (`--allow-auto-truncate`)."""

    time: float | None
    rank: Rank
    tokens: int  # of the prompt; with its answer where the context is too short for both
    most: int  # that are allowed
    suspect: bool = False


@dataclass(slots=True)
class Refusal:
    """A request that the scheduler answered with an error at once."""

    time: float | None
    rank: Rank
    grammar: bool  # it asks for structured output, and --grammar-backend is none
    suspect: bool = False


Event: TypeAlias = (
    DecodeBatch | PrefillBatch | Retraction | OutOfMemory | ServerArgs | KvPool | Memory | Limits | Liveness | Rejection
    | ServerError | Pause | TooLong | Refusal
)  # fmt: skip

LINE_KINDS = (
    "decode", "prefill", "retraction", "out_of_memory", "startup", "liveness", "access", "request", "traceback", "other",
)  # fmt: skip


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
