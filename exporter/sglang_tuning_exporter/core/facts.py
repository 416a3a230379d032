"""What is known of a server since its start: arguments, limits, the KV cache, GPU memory. Pure.

Memory is in GB as SGLang prints it (2**30 bytes). None is not known; -1, 0 and None among the arguments are no sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import ClassVar, NamedTuple

from sglang_tuning_exporter.core.events import NO_RANK, Event, Rank
from sglang_tuning_exporter.sglang import flags
from sglang_tuning_exporter.sglang.advices import Advice, recognise
from sglang_tuning_exporter.sglang.metrics import RankFigures, Scrape
from sglang_tuning_exporter.sglang.server_info import ServerInfo

DECODE_LOG_INTERVAL = 40.0  # decode steps between two decode lines, the default of --decode-log-interval
# With one of these a request may also wait for an adapter's slot, its prefix or a larger batch; or few start at a time
# (`get_new_batch_prefill`, srt/managers/scheduler.py; `PrefillAdder`, srt/managers/schedule_policy.py).
WAITS_BY = (
    "enable_lora", "lora_paths", "hicache_storage_backend", "enable_lmcache", "min_free_slots_delay",
    "dllm_algorithm",
)  # fmt: skip
STARTS_BY = ("prefill_max_requests", "prefill_decode_interval", "enable_prefill_delayer")
_STATES_A_REQUEST = 5  # of the mamba cache, at most
# What follows from a start's lines is computed again after each of them.
_FOLLOWING = (
    "release", "typed_arguments", "attention_ranks", "micro_batches", "largest_captured", "steps_between_lines",
    "prefill_tokens",
)  # fmt: skip
_MOST_SAID = 64  # texts of a start about flags
_MOST_RANKS = 1024  # whose memory is kept
_SHOWN_GB = {"pool": "kv_memory_gb", "weights": "weight_memory_gb", "graph": "graph_memory_gb"}  # by a page
_WITHOUT_GRAPHS = ("cpu", "mps", "hpu", "xpu")


class Settings(NamedTuple):
    """The facts that each line of a scheduler needs; None where a fact is not known, or off."""

    limit: float | None  # running requests of one batch
    pool: float | None  # tokens of the KV cache
    page_size: float
    steps_between_lines: float
    prefill_tokens: float | None  # the most of one prefill batch
    chunk: float | None
    chunks_prompts: bool  # --chunked-prefill-size is not -1
    prefill_requests: float  # the most of one prefill batch
    mixes_chunks: bool
    reserves_in_full: bool
    without_graph: str
    largest_captured: float | None
    micro_batches: int
    attention_ranks: int
    role: str
    waits_by: str
    speculates: bool


@dataclass  # no slots, because of `cached_property`
class Facts:
    """One start of a server. Sizes by DP rank are those of one scheduler."""

    arguments: dict[str, object] = field(default_factory=dict)
    cut: bool = False  # some of the printed arguments are not known
    version: str | None = None
    ready: bool = False
    limits: dict[int | None, float] = field(default_factory=dict)  # max_running_requests in force
    pools: dict[int | None, float] = field(default_factory=dict)  # tokens of the KV cache
    available: dict[int | None, float] = field(default_factory=dict)  # available_gpu_mem, least of the TP ranks
    # GB by rank: `before` the weights, `beside` them, `left` after the last stage, and what each stage took: `weights`,
    # `pool`, `graph` (of these `decode_graph`); a draft model's are `draft_weights`, `draft_pool`.
    memory: dict[Rank, dict[str, float]] = field(default_factory=dict)
    page: Mapping[int | None, RankFigures] = field(default_factory=dict)  # of the present page, which wins
    graph_sizes: tuple[int, ...] = ()
    context_seen: float | None = None  # tokens of the longest request, as the scheduler's line prints it
    states: float | None = None  # of a scheduler's mamba cache
    no_pool: float | None = None  # tokens that the memory beside the weights has room for, where that is none
    reduced: bool = False  # SGLang lowered max_running_requests itself, for want of capacity
    memory_device: str = ""
    # Named by decode batches that replayed no graph: 0.5.7 on Ascend prints `cpu graph: True` of those that did.
    graph_device: str = ""
    role_seen: str = ""  # unified, prefill or decode, by the labels of the metrics
    first_form: bool = False  # lines of the first edition's releases: no `#pending-token`, no graph
    said: dict[str, Advice] = field(default_factory=dict)  # what SGLang itself said about flags, by its text
    # By DP rank, until a fact changes.
    _settings: dict[int | None, Settings] = field(default_factory=dict, repr=False, compare=False)
    _with_pool: set[Rank] = field(default_factory=set)  # the target's KV cache is complete
    # The phase, prefill or decode, of a capture of graphs that has begun and not ended.
    _capturing: dict[Rank, str] = field(default_factory=dict)

    def take_load(self, load: RankFigures) -> None:
        """Take a scheduler's limit, of an answer of `/v1/loads`."""
        if load.running_limit is not None:
            self.limits[load.dp] = load.running_limit
            self._settings.clear()

    def take_page(self, page: Scrape) -> None:
        """Take the sizes and the role that a page shows."""
        self.role_seen = page.engine_type or self.role_seen
        self.page = {rank.dp: rank for rank in page.ranks}
        self._settings.clear()

    def take_graph_device(self, device: str) -> None:
        """Take the device that a decode batch without a graph names; empty where it names none or had one."""
        if device != self.graph_device:
            self.graph_device = device
            self._settings.clear()

    def settings(self, dp: int | None) -> Settings:
        """Return the facts that each line of a scheduler needs, looked up once until a fact changes."""
        known = self._settings.get(dp)
        if known is None:
            known = self._settings[dp] = Settings(
                limit=self.limit(dp),
                pool=self.pool(dp),
                page_size=max(self.size("page_size") or 1.0, 1.0),
                steps_between_lines=self.steps_between_lines,
                prefill_tokens=self.prefill_tokens,
                chunk=self.size("chunked_prefill_size"),
                chunks_prompts=self.number("chunked_prefill_size") != -1,
                prefill_requests=self.size("prefill_max_requests") or inf,
                mixes_chunks=self.is_on("enable_mixed_chunk"),
                reserves_in_full=self.may_reserve_in_full,
                without_graph=self.without_graph,
                largest_captured=self.largest_captured,
                micro_batches=self.micro_batches,
                attention_ranks=self.attention_ranks,
                role=self.role,
                waits_by=self.waits_by,
                speculates=self.is_on("speculative_algorithm"),
            )
        return known

    def take_line(self, event: Event) -> None:
        """Take a line of the start."""
        take = self._LINES.get(event.kind)
        if take is not None:
            self._forget()
            take(self, event)

    def _take_arguments(self, event: Event) -> None:
        self.arguments, self.cut = dict(event.arguments), bool(event.figures.get("cut"))

    def _take_no_pool(self, event: Event) -> None:
        self.no_pool = min(event.figures["tokens"], self.no_pool or 0.0)

    def _take_pool(self, event: Event) -> None:
        figures = event.figures
        self.pools[event.rank.dp] = figures["tokens"]
        (at, rank), gigabytes = self._rank(event), figures.get("gigabytes")
        if figures.get("resized") and gigabytes is not None:
            rank["pool"] = gigabytes
        else:
            _add(rank, "pool", gigabytes, draft=at in self._with_pool and "pool" in rank)

    def _take_ready(self, _: Event) -> None:
        self.ready = True

    def _take_advice(self, event: Event) -> None:
        """Take an advice or a decision of SGLang about a flag: one entry for a text, with its count."""
        known, advice = self.said.get(event.word), recognise(event.text)
        if known is not None:
            self.said[event.word] = replace(known, count=known.count + 1)
        elif advice is not None and len(self.said) < _MOST_SAID and not event.marked:
            self.said[event.word] = advice

    def _take_limits(self, event: Event) -> None:
        figures, dp, known = event.figures, event.rank.dp, self.memory.get(event.rank)
        if "max_total_num_tokens" in figures:
            self.pools[dp] = figures["max_total_num_tokens"]
        if "max_running_requests" in figures:
            self.limits[dp] = figures["max_running_requests"]
            self.reduced = self.reduced or len(figures) == 1
        self.context_seen = figures.get("context_len", self.context_seen)
        if "chunked_prefill_size" in figures and self.arguments.get("chunked_prefill_size") is None:
            self.arguments["chunked_prefill_size"] = int(figures["chunked_prefill_size"])
            self.cut = self.cut or len(self.arguments) == 1
        self.memory_device = event.word or self.memory_device
        left = figures.get("available_gb", known.get("left") if known else None)
        if left is not None:
            self.available[dp] = min(self.available.get(dp, left), left)

    def take_info(self, answer: ServerInfo) -> None:
        """Take an answer of `/server_info`: what the log has not shown."""
        self._forget()
        self.version = answer.version or self.version
        if answer.args and not self.knows_arguments:
            chunk = self.arguments.get("chunked_prefill_size")  # from the scheduler's line
            self.arguments, self.cut = dict(answer.args), False
            if self.arguments.get("chunked_prefill_size") is None and chunk is not None:
                self.arguments["chunked_prefill_size"] = chunk
        self._take_sizes(answer.ranks)
        self._take_gigabytes(answer.ranks)
        self.graph_sizes = self.graph_sizes or answer.graph_batch_sizes

    def _take_sizes(self, ranks: Sequence[RankFigures]) -> None:
        """Take the running limit of an answer, and the KV cache's tokens if nothing else shows them."""
        limit = min((rank.running_limit for rank in ranks if rank.running_limit is not None), default=None)
        if limit is not None:
            self.limits |= dict.fromkeys({*self.limits, *self.pools, *self.page} or {None}, limit)
        tokens = min(filter(None, (rank.kv_pool_tokens for rank in ranks)), default=None)
        if tokens is not None and self.pool() is None:
            self.pools[None] = float(tokens)

    def _take_gigabytes(self, ranks: Sequence[RankFigures]) -> None:
        """Take the GPU memory of an answer if nothing else shows it."""
        left = (rank.available_gpu_memory_gb for rank in ranks if rank.available_gpu_memory_gb is not None)
        least = min(left, default=None)
        if least is not None and not self.left:
            self.available[None] = least
        for name, shown in _SHOWN_GB.items():
            if self.gigabytes(name) is None and (largest := most(getattr(rank, shown) for rank in ranks)):
                self.memory.setdefault(NO_RANK, {})[name] = largest

    def recommended(self, arg: str = "", role: str = "recommends") -> list[Advice]:
        """Return what SGLang recommends in its start, or decided (`role` decision); `arg`: about one argument."""
        return [advice for advice in self.said.values() if advice.role == role and (not arg or advice.is_about(arg))]

    def _forget(self) -> None:
        for name in _FOLLOWING:
            self.__dict__.pop(name, None)
        self._settings.clear()

    def _take_memory(self, event: Event) -> None:
        """Take what a stage of the start took of a rank's GPU memory, and what it left."""
        (at, rank), figures, stage = self._rank(event), event.figures, event.word
        take, free = self._STAGES.get(stage), figures.get("available")
        first = {"weights_begin": "before", "weights": "beside"}.get(stage)  # of the target, whose lines come first
        if first is not None and free is not None:
            rank.setdefault(first, free)
        if take is not None:
            take(self, event, at, rank)
        if "states" in figures:
            self.states = min(figures["states"], self.states or figures["states"])
        if stage in {"graph_begin", "graph"}:
            self.graph_sizes = event.sizes or self.graph_sizes
        if stage in {"pool", "graph"} and free is not None:
            rank["left"] = free

    def _begin_weights(self, event: Event, _: Rank, rank: dict[str, float]) -> None:
        if "available" in event.figures:
            rank["begin"] = event.figures["available"]

    def _end_weights(self, event: Event, _: Rank, rank: dict[str, float]) -> None:
        used, free = event.figures.get("used"), event.figures.get("available")
        if used is None and "begin" in rank and free is not None:  # up to 0.4.0
            used = max(round(rank["begin"] - free, 2), 0.0)
        _add(rank, "weights", used, draft="weights" in rank)

    def _end_state_cache(self, event: Event, at: Rank, rank: dict[str, float]) -> None:
        _add(rank, "pool", event.figures.get("used"), draft=at in self._with_pool)

    def _end_pool(self, _: Event, at: Rank, __: dict[str, float]) -> None:
        self._with_pool.add(at)

    def _begin_graphs(self, event: Event, at: Rank, rank: dict[str, float]) -> None:
        rank.pop("left", None)  # up to 0.4.0 the end of the capture has no memory
        self._capturing[at] = "prefill" if event.figures.get("prefill") else "decode"

    def _end_graphs(self, event: Event, at: Rank, rank: dict[str, float]) -> None:
        used = event.figures.get("used")
        _add(rank, "graph", used)
        _add(rank, "decode_graph", None if event.figures.get("prefill") else used)
        self._capturing.pop(at, None)

    # What is done with a line of the start, by its kind, and with a line about memory, by the stage that it names.
    _LINES: ClassVar[Mapping[str, Callable[[Facts, Event], None]]] = {
        "arguments": _take_arguments,
        "limits": _take_limits,
        "no_pool": _take_no_pool,
        "pool": _take_pool,
        "memory": _take_memory,
        "ready": _take_ready,
        "advice": _take_advice,
    }
    _STAGES: ClassVar[Mapping[str, Callable[[Facts, Event, Rank, dict[str, float]], None]]] = {
        "weights_begin": _begin_weights,
        "weights": _end_weights,
        "state_cache": _end_state_cache,
        "pool": _end_pool,
        "graph_begin": _begin_graphs,
        "graph": _end_graphs,
    }

    def _rank(self, event: Event) -> tuple[Rank, dict[str, float]]:
        rank = event.rank if event.rank in self.memory or len(self.memory) < _MOST_RANKS else NO_RANK
        return rank, self.memory.setdefault(rank, {})

    # Arguments

    def number(self, arg: str) -> float | None:
        """Return a numeric argument or switch as printed; None where unset or unknown."""
        return flags.number(self.arguments.get(arg))

    def size(self, arg: str) -> float | None:
        """Return an argument that is a size; None where it is off (-1, 0) or unknown."""
        figure = self.number(arg)
        return figure if figure is not None and figure > 0 else None

    def typed(self, arg: str) -> float | None:
        """Return a numeric argument as it is typed: SGLang prints some multiplied or divided."""
        return flags.number(flags.flag_value(arg, self.arguments, self.release))

    def word(self, arg: str) -> str:
        """Return an argument that is text; empty where it is none."""
        value = self.arguments.get(arg)
        return value if isinstance(value, str) else ""

    def is_on(self, arg: str) -> bool:
        """Whether a switch is on, or an argument is set."""
        return bool(self.arguments.get(arg))

    def factor(self, arg: str) -> float:
        """Return the printed value for a typed one of 1."""
        return flags.print_factor(arg, self.arguments, self.release)

    @property
    def knows_arguments(self) -> bool:
        """Whether the start is in the log."""
        return bool(self.arguments) and not self.cut

    @cached_property
    def release(self) -> str | None:
        """The known release whose arguments these are; None where it is not known."""
        return flags.release_of(self.version, self.arguments)

    @property
    def shown_release(self) -> str | None:
        """The release as it may be named: None where arguments that somebody shortened fit several."""
        if self.version or not self.arguments:
            return self.release
        fitting = flags.infer_version(self.arguments)
        return self.release if fitting is not None and fitting[0] == fitting[1] else None

    def is_before(self, *version: int) -> bool:
        """Whether the release is known to be older."""
        return self.release is not None and flags.is_before(self.release, (version[0], version[1], version[2]))

    def flag(self, arg: str) -> str:
        """Return an argument as this release's flag; empty where it has none."""
        if self.release is None:
            return "--" + arg.replace("_", "-")
        found = flags.flag_of(arg, self.release)
        return found.flag if found is not None else ""

    @cached_property
    def typed_arguments(self) -> dict[str, object] | None:
        """The arguments that were typed, by name; None where the start is not in the log."""
        return flags.typed_args(self.release, self.arguments) if self.knows_arguments else None

    @property
    def is_first_edition(self) -> bool:
        """Whether the guide's first edition is about this release (up to 0.4.1).

        If the log has no start, the form of its lines shows that.
        """
        return self.is_before(0, 4, 3) if self.release is not None else self.first_form

    # What follows from arguments

    @cached_property
    def attention_ranks(self) -> int:
        """Ranks of attention data parallelism, 1 without it."""
        return flags.attention_ranks(self.arguments)

    @property
    def pipeline_stages(self) -> int:
        """Pipeline-parallel ranks, 1 without."""
        return max(int(self.number("pp_size") or 1), 1)

    @cached_property
    def micro_batches(self) -> int:
        """Batches that one scheduler runs in turn: `#running-req` is that of one."""
        return self.pipeline_stages + (int(self.number("pp_async_batch_depth") or 0) if self.pipeline_stages > 1 else 0)

    @property
    def shards(self) -> int:
        """GPUs that share one copy of the weights."""
        return max(int(self.number("tp_size") or 1), 1) * self.pipeline_stages

    @property
    def shared_by(self) -> int:
        """How many batches share --max-running-requests."""
        return self.attention_ranks * self.micro_batches

    @property
    def role(self) -> str:
        """The side of disaggregation, `prefill` or `decode`; empty for both."""
        mode = self.word("disaggregation_mode") or self.role_seen
        return mode if mode in {"prefill", "decode"} else ""

    @property
    def waits_by(self) -> str:
        """What decides when a waiting request starts, beside the new-token ratio: `prefill`, `other` or empty."""
        if self.role == "prefill":
            return "prefill"
        return "other" if self.role or any(self.arguments.get(arg) for arg in (*WAITS_BY, *STARTS_BY)) else ""

    @property
    def starts_slowly(self) -> bool:
        """Whether only a flag limits how fast requests start."""
        return not (self.role or any(map(self.is_on, WAITS_BY))) and any(map(self.is_on, STARTS_BY))

    @property
    def is_cpu(self) -> bool:
        """Whether the server runs without a GPU."""
        return self.word("device") in _WITHOUT_GRAPHS or self.memory_device == "cpu"

    @property
    def without_graph(self) -> str:
        """`disabled` or `unsupported` where decode batches have no graphs at all; empty where they may."""
        if self.is_cpu or self.graph_device == "cpu" or self.role == "prefill" or self.is_on("is_embedding"):
            return "unsupported"
        off = self._decode_graphs.get("backend") == "disabled"
        return "disabled" if off or self.is_on("disable_cuda_graph") or self.is_on("disable_decode_cuda_graph") else ""

    @property
    def _decode_graphs(self) -> Mapping[str, object]:
        config = self.arguments.get("cuda_graph_config")
        decode = config.get("decode") if isinstance(config, dict) else None
        return decode if isinstance(decode, dict) else {}

    @property
    def capturing(self) -> str:
        """Of which phase a capture of graphs has begun, and not ended; empty where none has."""
        return next(iter(self._capturing.values()), "")

    @property
    def graph_arg(self) -> str:
        """The argument of the largest captured decode batch: renamed in 0.5.14, the old name refused from 0.5.20 on."""
        for name in ("cuda_graph_max_bs_decode", "cuda_graph_max_bs"):
            if name in self.arguments:
                return name
        version = flags.version_tuple(self.version or self.release)
        return "cuda_graph_max_bs" if version is None or version < (0, 5, 14) else "cuda_graph_max_bs_decode"

    @cached_property
    def largest_captured(self) -> float | None:
        """The largest decode batch with a CUDA graph: of the log, else of the arguments."""
        listed = self.arguments.get("cuda_graph_bs") or self.arguments.get("cuda_graph_bs_decode")
        named = [each for each in listed if isinstance(each, int)] if isinstance(listed, list) else ()
        largest = (
            max(self.graph_sizes or named, default=0)
            or self.size(self.graph_arg)
            or flags.number(self._decode_graphs.get("max_bs"))
        )
        return float(largest or 0.0) or None

    @cached_property
    def steps_between_lines(self) -> float:
        """Decode steps between two decode lines."""
        return self.size("decode_log_interval") or DECODE_LOG_INTERVAL

    @cached_property
    def prefill_tokens(self) -> float | None:
        """The most tokens of one prefill batch: the smaller of chunked_prefill_size and max_prefill_tokens."""
        return min(filter(None, (self.size("chunked_prefill_size"), self.size("max_prefill_tokens"))), default=None)

    @property
    def may_reserve_in_full(self) -> bool:
        """Whether requests with ignore_eos are reserved in full: from 0.5.22 on, before only with the radix cache off.

        `_get_running_request_total_token_offset`, `add_one_req_ignore_eos` (srt/managers/schedule_policy.py).
        """
        return self.release is None or not self.is_before(0, 5, 22) or self.is_on("disable_radix_cache")

    # Sizes

    def limit(self, dp: int | None) -> float | None:
        """Return the running limit of one scheduler's batch; None where unknown."""
        known = self.limits.get(dp, self.limits.get(None)) or max(self.limits.values(), default=None)
        micro = self.size("max_micro_batch_size") or self.size("pp_max_micro_batch_size")
        if known is None:
            flag = self.size("max_running_requests")
            known = None if flag is None else max(flag // self.attention_ranks, 1.0)
        if known is None:
            return micro
        share = max(known // self.micro_batches, 1.0)
        return min(share, micro) if micro else share

    @property
    def context(self) -> float | None:
        """Tokens of the longest request, prompt and answer together; None where unknown."""
        return self.size("context_length") or self.context_seen

    @property
    def least_limit(self) -> float | None:
        """The smallest running limit of a scheduler's batch."""
        return min(filter(None, map(self.limit, self.limits or (None,))), default=None)

    def pool(self, dp: int | None = None) -> float | None:
        """Return the tokens of one scheduler's KV cache; None where unknown."""
        shown = self.page.get(dp)
        known = (shown.kv_pool_tokens if shown is not None else None) or self.pools.get(dp)
        return known or most((*self.pools.values(), *(each.kv_pool_tokens for each in self.page.values())))

    def gigabytes(self, name: str) -> float | None:
        """Return what a stage took on the rank with most; None where unknown or nothing."""
        shown = _SHOWN_GB.get(name)
        of_page = (getattr(each, shown) for each in self.page.values()) if shown else ()
        return most(each.get(name) for each in self.memory.values()) or most(of_page)

    @property
    def left(self) -> dict[int | None, float]:
        """GPU memory left after the start, by DP rank."""
        shown = {dp: each.available_gpu_memory_gb for dp, each in self.page.items()}
        return self.available | {dp: gigabytes for dp, gigabytes in shown.items() if gigabytes is not None}

    @property
    def capacity_gb(self) -> float | None:
        """GPU memory free before the weights, on the rank with least: SGLang sizes all pools by it.

        Without the lines of the start it is the sum of weights, KV cache, graphs and what was left that a page shows:
        about 1 GB less.
        """
        if printed := [rank["before"] for rank in self.memory.values() if rank.get("before")]:
            return min(printed)
        shown = (self.weights_gb, self.pools_gb, self.reserve_gb)
        return None if None in shown else sum(map(float, filter(None, (*shown, self.gigabytes("graph")))))

    @property
    def beside_weights_gb(self) -> float | None:
        """GPU memory free after the weights, on the rank with least."""
        return min((rank["beside"] for rank in self.memory.values() if "beside" in rank), default=None)

    @property
    def reserve_gb(self) -> float | None:
        """GPU memory left after the start, on the rank with least; None on a CPU server."""
        return None if self.is_cpu else min(self.left.values(), default=None)

    @property
    def pools_gb(self) -> float | None:
        """The KV cache of one GPU, a draft model's included."""
        return self._with_draft("pool")

    @property
    def weights_gb(self) -> float | None:
        """The weights on one GPU, a draft model's included."""
        return self._with_draft("weights")

    def _with_draft(self, name: str) -> float | None:
        gigabytes = self.gigabytes(name)
        return None if gigabytes is None else gigabytes + (self.gigabytes(f"draft_{name}") or 0.0)

    @property
    def states_a_request(self) -> float | None:
        """States of the mamba cache for each running request, where they set the running limit (0.5.5 on)."""
        limit = max(self.limits.values(), default=None)
        if not self.states or not limit or self.states < limit or self.states > _STATES_A_REQUEST * (limit + 1):
            return None
        if self.is_on("disable_radix_cache") and self.number("max_running_requests") is not None:
            return None  # then the cache follows the limit
        each = int(self.states // limit)
        return float(each) if self.states // each == limit else None

    @property
    def model(self) -> str:
        """The model's name and path."""
        return f"{self.word('served_model_name')} {self.word('model_path')}"


def _add(rank: dict[str, float], name: str, gigabytes: float | None, *, draft: bool = False) -> None:
    """Add to what a stage took, of the target or of its draft model."""
    if gigabytes is not None:
        name = f"draft_{name}" if draft else name
        rank[name] = rank.get(name, 0.0) + gigabytes


def most(figures: Iterable[float | None]) -> float | None:
    """Return the largest figure above zero."""
    return max((figure for figure in figures if figure is not None and figure > 0), default=None)
