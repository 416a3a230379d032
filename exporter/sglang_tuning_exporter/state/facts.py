"""What is known of one server since its start: arguments, limits, memory, captured graphs.

Pure; filled from start-up lines, scrapes and `/server_info`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from sglang_tuning_exporter.sglang.args.values import number
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
from sglang_tuning_exporter.sglang.server_info import RankInfo
from sglang_tuning_exporter.state.arguments import Arguments
from sglang_tuning_exporter.state.start_memory import StartMemory

MOST_STATES = 5  # of the mamba cache for each running request; docs/decisions.md


def _most(figures: Iterable[float | None]) -> float | None:
    """Return the largest figure above zero: memory is a difference, which can be negative for a small model."""
    return max((figure for figure in figures if figure is not None and figure > 0), default=None)


@dataclass(slots=True)
class ServerFacts(Arguments):
    """All that is constant between two starts. Memory in GB as SGLang prints it; sizes in requests."""

    model_name: str | None = None
    running_limits: dict[int | None, float] = field(default_factory=dict)  # by DP rank
    kv_pool_tokens: dict[int | None, float] = field(default_factory=dict)  # by DP rank
    logged_pool_tokens: dict[int | None, float] = field(default_factory=dict)  # from the start-up line
    scraped_pool_tokens: dict[int | None, float] = field(default_factory=dict)  # from the metrics
    # Memory is that of one GPU, of the rank with most; a draft model's is separate.
    kv_pool_gb: float | None = None  # of all pools: full attention, sliding windows, states of linear layers
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
    state_slots: float | None = None  # of one scheduler's mamba cache, from the log
    memory_device: str | None = None
    graph_device: str | None = None
    ready: bool = False
    # The typed arguments, kept by `diagnosis.command`: of which arguments, at which revision.
    typed: tuple[Mapping[str, object], int, Mapping[str, object]] | None = field(
        default=None, compare=False, repr=False
    )

    def of_next_start(self) -> ServerFacts:
        """Return the facts of a new start: release, model and role are taken over until it shows its own."""
        return ServerFacts(version=self.version, model_name=self.model_name, engine_type=self.engine_type)

    def apply(self, event: Event) -> None:
        """Take one log event; events without a lasting fact are ignored."""
        self.revision += 1
        if isinstance(event, ServerArgs):
            self.args, self.args_are_cut = dict(event.args), event.is_cut
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
            self.args_are_cut = self.args_are_cut or not self.args
            self.args["chunked_prefill_size"] = event.chunked_prefill_size
        self.memory_device = event.memory_device or self.memory_device
        # Up to 0.4.6 this line has no memory; the memory after the stage before it is the same figure.
        available = event.available_gb if event.available_gb is not None else self.left_gb.get(event.rank)
        if available is not None:
            self.available_gb[event.rank.dp] = min(self.available_gb.get(event.rank.dp, available), available)

    def _apply_memory(self, event: Memory) -> None:
        self._memory.of(event.rank).take(event)
        self._sum_up()
        if event.states:
            self.state_slots = min(event.states, self.state_slots or event.states)
        if event.stage in {"pool", "graph"} and event.available_gb is not None:
            if len(self.left_gb) < MOST_RANKS or event.rank in self.left_gb:
                self.left_gb[event.rank] = event.available_gb
        elif event.stage == "graph_begin":
            self.left_gb.pop(event.rank, None)  # up to 0.4.0 the end of the capture has no memory
        if event.stage in {"graph_begin", "graph"}:
            self.graph_sizes = event.graph_sizes or self.graph_sizes

    def _sum_up(self) -> None:
        """Take over what the ranks have printed so far; figures from the metrics alone stay."""
        for name, gigabytes in self._memory.figures().items():
            if gigabytes:
                setattr(self, name, gigabytes)

    @property
    def rank_weights_gb(self) -> float | None:
        """The weights on one GPU, with those of a draft model."""
        return None if self.weights_gb is None else self.weights_gb + (self.draft_weights_gb or 0.0)

    @property
    def model_gb(self) -> float | None:
        """The weights of the whole model, with those of a draft model, on all GPUs that share one copy."""
        return None if self.rank_weights_gb is None else self.rank_weights_gb * self.shards

    @property
    def pools_gb(self) -> float | None:
        """The KV cache on one GPU, with a draft model's: each token has a place in both."""
        return None if self.kv_pool_gb is None else self.kv_pool_gb + (self.draft_pool_gb or 0.0)

    @property
    def has_room(self) -> bool:
        """Whether another rank's start-up line can be kept; only a hostile log has too many."""
        sizes = (len(self.kv_pool_tokens), len(self.running_limits), len(self.available_gb), len(self.left_gb))
        return max(sizes) < MOST_RANKS

    def apply_figures(self, figures: RankFigures) -> None:
        """Take the constants of a scrape."""
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
        """Take the version, the resolved arguments and the running limit in force from `/server_info`."""
        self.revision += 1
        self.version = version or self.version
        if args:
            chunk = self.args.get("chunked_prefill_size")
            self.args, self.args_are_cut = dict(args), False
            if self.args.get("chunked_prefill_size") is None and chunk is not None:
                self.args["chunked_prefill_size"] = chunk  # from the scheduler's line
        if running_limit_per_dp is not None:
            for dp in set(self.running_limits) | set(self.kv_pool_tokens) or {None}:
                self.running_limits[dp] = running_limit_per_dp

    def apply_ranks(self, ranks: Sequence[RankInfo]) -> None:
        """Take the schedulers' figures of `/server_info` (0.4.9 on) where neither log nor metrics have them.

        They are not labelled with DP ranks: of different figures the limiting one is taken.
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
        """Take a scheduler's running limit from `/v1/loads`, which has its DP rank."""
        if running_limit:
            self.revision += 1
            self.running_limits[dp if dp in self.kv_pool_tokens else None] = running_limit

    @property
    def pools_disagree(self) -> bool | None:
        """Whether log and metrics have KV caches of different sizes, and so are not of one server; None unless both have one."""
        both = self.logged_pool_tokens.keys() & self.scraped_pool_tokens.keys()
        if not both:
            return None
        return any(self.logged_pool_tokens[dp] != self.scraped_pool_tokens[dp] for dp in both)

    @property
    def is_cpu(self) -> bool:
        """Whether SGLang runs on the CPU: it has no graphs, and its "available memory" is the host's.

        0.5.23 prints `available_cpu_mem`, 0.4.9 prints `available_gpu_mem` there too, so the argument `device` is first.
        """
        device = self.args.get("device")
        if isinstance(device, str) and device:
            return device == "cpu"
        # A log from the middle has neither; its batch lines have `cpu graph:` (0.5.1 on).
        return "cpu" in (self.memory_device, self.graph_device)

    @property
    def without_graph(self) -> str:
        """Why no decode batch runs with a graph: `unsupported` by the device or the role, `disabled` by an argument, else empty.

        The prefill side of disaggregation decodes nothing.
        """
        if self.is_cpu or self.role == "prefill":
            return "unsupported"
        if self.arg("disable_cuda_graph") or self.arg("disable_decode_cuda_graph"):
            return "disabled"
        return "disabled" if self._decode_graph_config.get("backend") == "disabled" else ""

    @property
    def _decode_graph_config(self) -> dict[str, object]:
        config = self.args.get("cuda_graph_config")
        decode = config.get("decode") if isinstance(config, dict) else None
        return decode if isinstance(decode, dict) else {}

    @property
    def largest_captured(self) -> int | None:
        """The largest decode batch with a captured graph, from the capture lines or the arguments."""
        if self.graph_sizes:
            return max(self.graph_sizes)
        args = (self.arg("cuda_graph_max_bs_decode"), self.arg("cuda_graph_max_bs"))
        largest = number(self._decode_graph_config.get("max_bs")) or args[0] or args[1]
        return int(largest) if largest else None

    def scheduler_limit(self, dp: int | None) -> float | None:
        """Return how many requests one scheduler may run in all its micro batches: from its own line, else its share of the argument.

        None for a scheduler of an earlier start that this one does not have.
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
        """Return the most that `#running-req` of one scheduler can be: its limit, or one micro batch's share of it."""
        limit = self.scheduler_limit(dp)
        if limit is None:
            return None
        share = max(limit // self.micro_batches, 1.0)
        return min(share, self.arg(self.micro_batch_arg) or share)

    @property
    def states_per_request(self) -> int | None:
        """How many states of the mamba cache SGLang reserves for a running request, where they set the running limit; else None.

        1 without a radix cache, 3 with one, up to 5 with further buffers (`_calculate_mamba_ratio`).
        """
        limit, states = max(self.running_limits.values(), default=None), self.state_slots
        if not limit or not states or not limit <= states < (MOST_STATES + 1) * limit:
            return None
        if self.arg("disable_radix_cache") and self.arg("max_running_requests"):
            return None  # then the cache follows the limit
        each = int(states // limit)
        return each if states // each == limit else None

    @property
    def room_for_micro_batch(self) -> float | None:
        """The largest useful value of `micro_batch_arg`, above which `max_running_requests` limits; None where it does not limit now."""
        limit, size = max(self.running_limits.values(), default=None), self.arg(self.micro_batch_arg)
        limit = self.arg("max_running_requests") if limit is None else limit
        if not limit or not size or size >= limit // self.micro_batches:
            return None
        return limit // self.micro_batches

    @property
    def reserve_gb(self) -> float | None:
        """GPU memory left after the start, on the rank with least; None on a CPU server."""
        return None if self.is_cpu or not self.available_gb else min(self.available_gb.values())
