"""What is known of one server since its start: arguments, limits, memory, captured graphs.

Pure; filled by start-up lines, scrapes and `/server_info`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import TYPE_CHECKING

from sglang_tuning_exporter.sglang.args.flags import flag_of, is_before, release_of
from sglang_tuning_exporter.sglang.args.values import attention_ranks, flag_value
from sglang_tuning_exporter.sglang.events import (
    MOST_RANKS,
    Event,
    KvPool,
    Limits,
    Liveness,
    Memory,
    Rank,
    RankFigures,
    ServerArgs,
)
from sglang_tuning_exporter.state.cadence import DECODE_LOG_INTERVAL
from sglang_tuning_exporter.state.start_memory import StartMemory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sglang_tuning_exporter.sglang.server_info import RankInfo

# Arguments worth a series of their own. Numbers and switches only: a series has no room for words, and words may be
# secrets.
SHOWN_ARGS = (
    "schedule_conservativeness",
    "mem_fraction_static",
    "max_running_requests",
    "max_queued_requests",
    "max_total_tokens",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "cuda_graph_max_bs",
    "cuda_graph_max_bs_decode",
    "tp_size",
    "dp_size",
    "pp_size",
    "page_size",
    "context_length",
    "disable_cuda_graph",
    "disable_decode_cuda_graph",
    "disable_radix_cache",
    "enable_dp_attention",
    "enable_torch_compile",
    "enable_mixed_chunk",
    "decode_log_interval",
    "stream_interval",
    "num_continuous_decode_steps",
    "swa_full_tokens_ratio",
)

# With one of these a request may also wait for an adapter's slot, for its prefix to be loaded, or for a batch to be worth its
# while (`get_new_batch_prefill`, srt/managers/scheduler.py, 0.4.9 to 0.5.23).
_WAITS_BY = (
    "enable_lora",
    "lora_paths",
    "hicache_storage_backend",
    "enable_lmcache",
    "enable_prefill_delayer",
    "min_free_slots_delay",
    "dllm_algorithm",
)
# And these let requests start a few at a time, or only after so many decode steps (PrefillAdder, `_should_defer_prefill`).
_STARTS_BY = ("prefill_max_requests", "prefill_decode_interval")

# The oldest release prints some fifty arguments, the newest several hundred; a name that a model makes up has a few.
WHOLE_ARGS = 30
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")


def version_tuple(version: str | None) -> tuple[int, int, int] | None:
    """Read `0.5.10.post1` as (0, 5, 10); None when it is no release number."""
    match = _VERSION.match(version or "")
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def number(value: object) -> float | None:
    """Give a figure or a switch as a float, or None for words, lists, absent values and what is no finite float."""
    if not isinstance(value, (int, float)):
        return None
    try:
        figure = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return figure if isfinite(figure) else None


def _most(figures: Iterable[float | None]) -> float | None:
    """Give the largest figure above zero: memory is a difference, and a small model's can come out below it."""
    return max((figure for figure in figures if figure is not None and figure > 0), default=None)


@dataclass(slots=True)
class ServerFacts:
    """Everything that stays the same between two starts. Memory in GB as SGLang prints it; sizes in requests."""

    version: str | None = None
    model_name: str | None = None
    engine_type: str | None = None
    args: dict[str, object] = field(default_factory=dict)
    running_limits: dict[int | None, float] = field(default_factory=dict)  # by DP rank
    kv_pool_tokens: dict[int | None, float] = field(default_factory=dict)  # by DP rank
    logged_pool_tokens: dict[int | None, float] = field(default_factory=dict)  # as the start-up line told them
    scraped_pool_tokens: dict[int | None, float] = field(default_factory=dict)  # as the metrics tell them
    # Memory is that of one GPU, of the rank with most; without a draft model's, which stands apart.
    kv_pool_gb: float | None = None
    draft_pool_gb: float | None = None
    graph_sizes: tuple[int, ...] = ()
    graph_gb: float | None = None  # all captures
    decode_graph_gb: float | None = None  # those that grow with the largest captured decode batch
    weights_gb: float | None = None
    draft_weights_gb: float | None = None
    memory_before_weights_gb: float | None = None  # of the rank with least, by which SGLang sizes the pools of all
    _memory: StartMemory = field(default_factory=StartMemory, compare=False, repr=False)
    available_gb: dict[int | None, float] = field(default_factory=dict)  # by DP rank; the smallest of its TP ranks
    left_gb: dict[Rank, float] = field(default_factory=dict)  # by the rank that printed it, after its last stage
    memory_device: str | None = None
    graph_device: str | None = None
    ready: bool = False
    revision: int = field(default=0, compare=False)  # moves with every change, for those who remember what they derived
    _release: tuple[int, str | None] = field(default=(-1, None), compare=False, repr=False)
    # What was typed, once found out (`guide.command.typed_args`): of which arguments, at which revision.
    typed: tuple[Mapping[str, object], int, Mapping[str, object]] | None = field(
        default=None, compare=False, repr=False
    )

    def of_next_start(self) -> ServerFacts:
        """Return the facts of a new start: release, model and role are taken over until it shows its own."""
        return ServerFacts(version=self.version, model_name=self.model_name, engine_type=self.engine_type)

    def apply(self, event: Event) -> None:
        """Learn from one log event; events that say nothing lasting are ignored."""
        self.revision += 1
        if isinstance(event, ServerArgs):
            self.args = dict(event.args)
            served = event.args.get("served_model_name") or event.args.get("model_path")
            self.model_name = str(served) if served else self.model_name
        elif isinstance(event, Limits):
            self._apply_limits(event)
        elif isinstance(event, KvPool):
            self.kv_pool_tokens[event.rank.dp] = event.tokens
            self._memory.of(event.rank).take_pool(event)
            self._sum_up()
        elif isinstance(event, Memory):
            self._apply_memory(event)
        elif isinstance(event, Liveness) and event.what == "ready":
            self.ready = True

    def _apply_limits(self, event: Limits) -> None:
        if event.max_total_num_tokens is not None:
            self.kv_pool_tokens[event.rank.dp] = event.max_total_num_tokens
            self.logged_pool_tokens[event.rank.dp] = event.max_total_num_tokens
        if event.max_running_requests is not None:
            self.running_limits[event.rank.dp] = event.max_running_requests
        if event.chunked_prefill_size is not None and self.args.get("chunked_prefill_size") is None:
            self.args["chunked_prefill_size"] = event.chunked_prefill_size
        self.memory_device = event.memory_device or self.memory_device
        # Up to 0.4.6 this line tells no memory; what the last stage before it left is the same figure.
        available = event.available_gb if event.available_gb is not None else self.left_gb.get(event.rank)
        if available is not None:
            self.available_gb[event.rank.dp] = min(self.available_gb.get(event.rank.dp, available), available)

    def _apply_memory(self, event: Memory) -> None:
        self._memory.of(event.rank).take(event)
        self._sum_up()
        if event.stage in {"pool", "graph"} and event.available_gb is not None:
            if len(self.left_gb) < MOST_RANKS or event.rank in self.left_gb:
                self.left_gb[event.rank] = event.available_gb
        elif event.stage == "graph_begin":
            self.left_gb.pop(event.rank, None)  # and up to 0.4.0 the end of the capture tells no memory
        if event.stage in {"graph_begin", "graph"}:
            self.graph_sizes = event.graph_sizes or self.graph_sizes

    def _sum_up(self) -> None:
        """Take over what the ranks told so far; what only the metrics tell stays."""
        told = self._memory.figures()
        self.memory_before_weights_gb = told.before_weights or self.memory_before_weights_gb
        self.weights_gb = told.weights or self.weights_gb
        self.draft_weights_gb = told.draft_weights or self.draft_weights_gb
        self.kv_pool_gb = told.pool or self.kv_pool_gb
        self.draft_pool_gb = told.draft_pool or self.draft_pool_gb
        self.graph_gb = told.graphs or self.graph_gb
        self.decode_graph_gb = told.decode_graphs or self.decode_graph_gb

    @property
    def rank_weights_gb(self) -> float | None:
        """The weights on one GPU, those of a draft model included."""
        return None if self.weights_gb is None else self.weights_gb + (self.draft_weights_gb or 0.0)

    @property
    def model_gb(self) -> float | None:
        """The weights of the whole model, those of a draft model included: of all GPUs over which one copy is spread."""
        return None if self.rank_weights_gb is None else self.rank_weights_gb * self.shards

    @property
    def pools_gb(self) -> float | None:
        """What the KV pool's tokens take on one GPU, a draft model's part included: each token has a place in both."""
        return None if self.kv_pool_gb is None else self.kv_pool_gb + (self.draft_pool_gb or 0.0)

    @property
    def has_room(self) -> bool:
        """Whether another rank's start-up line can be kept: those of a server are few, those of a hostile log are not."""
        told = (len(self.kv_pool_tokens), len(self.running_limits), len(self.available_gb), len(self.left_gb))
        return max(told) < MOST_RANKS

    def apply_figures(self, figures: RankFigures) -> None:
        """Learn the constants that a scrape tells."""
        self.revision += 1
        if figures.kv_pool_tokens is not None:
            self.kv_pool_tokens[figures.dp] = self.scraped_pool_tokens[figures.dp] = figures.kv_pool_tokens
        if figures.available_gpu_memory_gb is not None:
            self.available_gb[figures.dp] = figures.available_gpu_memory_gb
        if figures.kv_memory_gb is not None:
            self.kv_pool_gb = figures.kv_memory_gb
        self.weights_gb = self.weights_gb if figures.weight_memory_gb is None else figures.weight_memory_gb
        self.graph_gb = self.graph_gb if figures.graph_memory_gb is None else figures.graph_memory_gb

    def apply_info(self, version: str | None, args: Mapping[str, object], running_limit_per_dp: float | None) -> None:
        """Learn from `/server_info`: the version, the resolved arguments and the limit that is really in force."""
        self.revision += 1
        self.version = version or self.version
        if args:
            chunk = self.args.get("chunked_prefill_size")
            self.args = dict(args)
            if self.args.get("chunked_prefill_size") is None and chunk is not None:
                self.args["chunked_prefill_size"] = chunk  # as the scheduler printed it
        if running_limit_per_dp is not None:
            for dp in set(self.running_limits) | set(self.kv_pool_tokens) or {None}:
                self.running_limits[dp] = running_limit_per_dp

    def apply_ranks(self, ranks: Sequence[RankInfo]) -> None:
        """Learn what the schedulers say of themselves in `/server_info` (0.4.9 on), where neither log nor metrics tell it.

        The list has no DP ranks in it: of figures that differ the one that binds is taken.
        """
        if not ranks:
            return
        self.revision += 1
        tokens = [rank.token_capacity for rank in ranks if rank.token_capacity]
        if tokens and not self.kv_pool_tokens:
            self.kv_pool_tokens[None] = float(min(tokens))
        left = [rank.startup_available_gb for rank in ranks if rank.startup_available_gb is not None]
        if left and not self.available_gb:
            self.available_gb[None] = min(left)
        if self.weights_gb is None:
            self.weights_gb = _most(rank.weight_gb for rank in ranks)
        if self.kv_pool_gb is None:
            self.kv_pool_gb = _most(rank.kv_cache_gb for rank in ranks)
        if self.graph_gb is None:
            self.graph_gb = _most(rank.graph_gb for rank in ranks)
        self.graph_sizes = self.graph_sizes or max((rank.graph_batch_sizes for rank in ranks), key=len)

    def apply_load(self, dp: int | None, running_limit: float | None) -> None:
        """Learn a scheduler's own limit from `/v1/loads`, which names its DP rank as `/server_info` does not."""
        if running_limit:
            self.revision += 1
            self.running_limits[dp if dp in self.kv_pool_tokens else None] = running_limit

    @property
    def pools_disagree(self) -> bool | None:
        """Whether log and metrics tell pools of different sizes: then they are not of one server. None unless both tell."""
        both = self.logged_pool_tokens.keys() & self.scraped_pool_tokens.keys()
        if not both:
            return None
        return any(self.logged_pool_tokens[dp] != self.scraped_pool_tokens[dp] for dp in both)

    def arg(self, name: str) -> float | None:
        """Give a numeric argument or switch, None when unset or not told."""
        return number(self.args.get(name))

    def flag_value(self, name: str) -> float | None:
        """Give a numeric argument as somebody would type it, None when unset or not known: some are printed multiplied or divided."""
        return number(flag_value(name, self.args, self.release))

    @property
    def shown_args(self) -> dict[str, float]:
        """The numeric arguments that get a series."""
        found = {name: number(self.args.get(name)) for name in SHOWN_ARGS}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def is_cpu(self) -> bool:
        """An SGLang on the CPU: it has no graphs, and its "available memory" is the host's.

        0.5.23 prints `available_cpu_mem`; 0.4.9 prints `available_gpu_mem` there too, so the argument `device` decides
        first.
        """
        device = self.args.get("device")
        if isinstance(device, str) and device:
            return device == "cpu"
        # Followed from the middle, a log tells neither; its batch lines say `cpu graph:` (0.5.1 on).
        return "cpu" in (self.memory_device, self.graph_device)

    @property
    def without_graph(self) -> str:
        """Why decode batches run without a graph by intent: `unsupported` by the device, `disabled` by an argument, else empty."""
        if self.is_cpu:
            return "unsupported"
        if self.arg("disable_cuda_graph") or self.arg("disable_decode_cuda_graph"):
            return "disabled"
        config = self.args.get("cuda_graph_config")
        decode = config.get("decode") if isinstance(config, dict) else None
        return "disabled" if isinstance(decode, dict) and decode.get("backend") == "disabled" else ""

    @property
    def is_first_edition(self) -> bool:
        """Whether the guide's first edition is this server's: it calls `lpm` the default, which it was up to 0.4.1 (srt/server_args.py)."""
        release = self.release
        return release is not None and is_before(release, (0, 4, 3))

    @property
    def release(self) -> str | None:
        """The known release whose flags this server takes, by its version or by the names of its arguments; None when neither tells."""
        if self._release[0] != self.revision:
            self._release = (self.revision, release_of(self.version, self.args))
        return self._release[1]

    def flag(self, arg: str) -> str | None:
        """Spell an argument as this server's flag; None where its release rejects it."""
        release = self.release
        if release is None:
            return "--" + arg.replace("_", "-")
        found = flag_of(arg, release)
        return found.flag if found is not None and found.flag else None

    @property
    def conservativeness(self) -> float | None:
        """What is in force of `schedule_conservativeness`, DP attention's factor included; None when not told."""
        return self.arg("schedule_conservativeness")

    @property
    def initial_new_token_ratio(self) -> float | None:
        """Where the new-token ratio starts and to where it returns when idle: `min(0.7 x conservativeness, 1)` (srt/managers/scheduler.py, from 0.3.6 on)."""
        return None if self.conservativeness is None else min(0.7 * self.conservativeness, 1.0)

    @property
    def largest_captured(self) -> int | None:
        """The largest decode batch with a captured graph: from the capture lines, else from the arguments."""
        if self.graph_sizes:
            return max(self.graph_sizes)
        config = self.args.get("cuda_graph_config")
        decode = config.get("decode") if isinstance(config, dict) else None
        for value in (
            decode.get("max_bs") if isinstance(decode, dict) else None,
            self.args.get("cuda_graph_max_bs_decode"),
            self.args.get("cuda_graph_max_bs"),
        ):
            figure = number(value)
            if figure:
                return int(figure)
        return None

    @property
    def attention_ranks(self) -> int:
        """Ranks of attention data parallelism, 1 without it."""
        return attention_ranks(self.args)

    @property
    def dp_ranks(self) -> int | None:
        """Schedulers of the whole server, plain data parallelism and DP attention alike; None when not told."""
        if "dp_size" not in self.args:
            return None
        return max(int(self.arg("dp_size") or 1), self.attention_ranks)

    @property
    def pipeline_stages(self) -> int:
        """Pipeline-parallel ranks, 1 without: each prints what the others print."""
        return max(int(self.arg("pp_size") or 1), 1)

    @property
    def micro_batches(self) -> int:
        """The batches that one scheduler runs in turn, 1 without pipeline parallelism.

        Queue, usage and throughput are those of the scheduler; `#running-req` and the batch of a captured graph are those of one
        micro batch.
        """
        return self.pipeline_stages + (int(self.arg("pp_async_batch_depth") or 0) if self.pipeline_stages > 1 else 0)

    @property
    def shards(self) -> int:
        """GPUs over which one copy of the weights is spread: tensor and pipeline parallelism. DP attention does not copy the experts."""
        return max(int(self.arg("tp_size") or 1), 1) * self.pipeline_stages

    def scheduler_limit(self, dp: int | None) -> float | None:
        """Give how many requests one scheduler may run, all its micro batches together: its own line, else its share of the argument.

        A scheduler of an earlier start, beyond this one's ranks, may run none: there is no figure for it.
        """
        if dp in self.running_limits:
            return self.running_limits[dp]
        if dp is not None and dp >= (self.dp_ranks or inf):
            return None
        total = self.arg("max_running_requests")
        if total is None:
            return self.running_limits.get(None)
        return total // self.attention_ranks if dp is not None else total

    def running_limit(self, dp: int | None) -> float | None:
        """Give the most that `#running-req` of one scheduler may show: its limit, or one micro batch's share of it."""
        limit = self.scheduler_limit(dp)
        if limit is None:
            return None
        share = max(limit // self.micro_batches, 1.0)
        return min(share, self.arg(self.micro_batch_arg) or share)

    @property
    def micro_batch_arg(self) -> str:
        """The argument that limits one micro batch, as this release spells it; it counts without pipeline parallelism, too."""
        return "max_micro_batch_size" if "max_micro_batch_size" in self.args else "pp_max_micro_batch_size"

    @property
    def room_for_micro_batch(self) -> float | None:
        """How far that argument can be raised before `max_running_requests` is the limit; None where it is no limit now."""
        limit, size = max(self.running_limits.values(), default=None), self.arg(self.micro_batch_arg)
        limit = self.arg("max_running_requests") if limit is None else limit
        if not limit or not size or size >= limit // self.micro_batches:
            return None
        return limit // self.micro_batches

    @property
    def limit_shared_by(self) -> int:
        """How many batches like the printed one share `--max-running-requests`: `running_limit` times this is the flag's value.

        DP attention divides the flag by its ranks, a pipeline by its micro batches; under plain data parallelism each scheduler has
        all of it.
        """
        return self.attention_ranks * self.micro_batches

    @property
    def prefill_batch_tokens(self) -> float | None:
        """The most tokens in one prefill batch: the smaller of the chunk, where prompts are chunked, and `max_prefill_tokens`.

        Both end a batch (`PrefillAdder.rem_chunk_tokens`, `rem_input_tokens`, srt/managers/schedule_policy.py, 0.4.9 to 0.5.23).
        """
        bounds = (self.arg("chunked_prefill_size"), self.arg("max_prefill_tokens"))
        return min((bound for bound in bounds if bound is not None and bound > 0), default=None)

    @property
    def decode_log_interval(self) -> float:
        """Decode steps between two decode lines."""
        return self.arg("decode_log_interval") or DECODE_LOG_INTERVAL

    @property
    def waits_by(self) -> str:
        """What else than the new-token ratio decides when a waiting request starts.

        `prefill`: the prefill side of disaggregation, where nothing is decoded. `other`: an argument of `_WAITS_BY` or
        `_STARTS_BY` is set, or this is the decode side, which admits by `--max-running-requests` and by what has arrived.
        Empty on all other servers.
        """
        mode = self.args.get("disaggregation_mode")
        if "prefill" in (mode, self.engine_type):
            return "prefill"
        if "decode" in (mode, self.engine_type):
            return "other"
        return "other" if any(self.args.get(arg) for arg in (*_WAITS_BY, *_STARTS_BY)) else ""

    @property
    def starts_slowly(self) -> bool:
        """Whether a flag limits how fast requests start, and nothing else beside the new-token ratio decides it."""
        mode = self.args.get("disaggregation_mode")
        beside = {"prefill", "decode"} & {mode, self.engine_type} or any(self.args.get(arg) for arg in _WAITS_BY)
        return not beside and any(self.args.get(arg) for arg in _STARTS_BY)

    @property
    def reserve_gb(self) -> float | None:
        """What was left of the GPU's memory at start-up on the rank with least; None on a CPU server."""
        return None if self.is_cpu or not self.available_gb else min(self.available_gb.values())

    @property
    def adds_up_batches(self) -> bool:
        """Whether the batches of all ranks of DP attention together must not exceed the largest captured: 0.4.4 to 0.4.8; the largest else."""
        release = self.release
        return release is not None and not is_before(release, (0, 4, 4)) and is_before(release, (0, 4, 9))

    @property
    def graph_flag_arg(self) -> str:
        """The argument that sets the largest captured decode batch, spelled for this version.

        `--cuda-graph-max-bs` became `--cuda-graph-max-bs-decode` in 0.5.14 and is an argparse error from 0.5.20
        (srt/server_args.py).
        """
        # The running server's own arguments know best: the version may still be that of the server before an upgrade.
        for name in ("cuda_graph_max_bs_decode", "cuda_graph_max_bs"):
            if name in self.args:
                return name
        version = version_tuple(self.version)
        return "cuda_graph_max_bs" if version is not None and version < (0, 5, 14) else "cuda_graph_max_bs_decode"
