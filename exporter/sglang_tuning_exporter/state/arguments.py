"""The launch arguments of one server, and what follows from them alone. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_tuning_exporter.sglang.args.flags import flag_of, is_before, release_of, version_tuple
from sglang_tuning_exporter.sglang.args.values import attention_ranks, flag_value, number
from sglang_tuning_exporter.sglang.events import ServerArgs
from sglang_tuning_exporter.state.cadence import DECODE_LOG_INTERVAL

# Arguments with a series of their own: numbers and switches only, since text may be secret.
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

# With one of these a request may also wait for an adapter's slot, for its prefix, or for a larger batch (`get_new_batch_prefill`,
# srt/managers/scheduler.py, 0.4.9 to 0.5.23).
_WAITS_BY = (
    "enable_lora",
    "lora_paths",
    "hicache_storage_backend",
    "enable_lmcache",
    "enable_prefill_delayer",
    "min_free_slots_delay",
    "dllm_algorithm",
)
# These let few requests start at a time, or only after some decode steps (`PrefillAdder`, `_should_defer_prefill`).
_STARTS_BY = ("prefill_max_requests", "prefill_decode_interval")

# The oldest release prints about fifty arguments, the newest several hundred; a forged line has a few.
WHOLE_ARGS = 30


def is_whole(event: ServerArgs) -> bool:
    """Return whether a start has enough arguments: near raw text, their number shows that it is one."""
    return not event.suspect or len(event.args) >= WHOLE_ARGS


@dataclass(slots=True)
class Arguments:
    """Arguments as SGLang prints them."""

    version: str | None = None
    engine_type: str | None = None
    args: dict[str, object] = field(default_factory=dict)
    args_are_cut: bool = False  # some of those that were printed are not known
    revision: int = field(default=0, compare=False)  # changes with every fact, for whoever keeps what follows from them
    _release: tuple[int, str | None] = field(default=(-1, None), compare=False, repr=False)

    def arg(self, name: str) -> float | None:
        """Return a numeric argument or switch; None where it is unset or unknown."""
        return number(self.args.get(name))

    def knows(self, name: str) -> bool:
        """Whether it is known if, and to what, an argument is set."""
        return name in self.args or (bool(self.args) and not self.args_are_cut)

    def flag_value(self, name: str) -> float | None:
        """Return a numeric argument as it is typed; None where unset or unknown. Some are printed multiplied or divided."""
        return number(flag_value(name, self.args, self.release))

    @property
    def shown_args(self) -> dict[str, float]:
        """The numeric arguments with a series."""
        found = {name: number(self.args.get(name)) for name in SHOWN_ARGS}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def release(self) -> str | None:
        """The known release whose flags this server has, by its version or the names of its arguments; None where neither is known."""
        if self._release[0] != self.revision:
            self._release = (self.revision, release_of(self.version, self.args))
        return self._release[1]

    def flag(self, arg: str) -> str | None:
        """Return an argument as this server's flag; None where its release rejects it."""
        release = self.release
        if release is None:
            return "--" + arg.replace("_", "-")
        found = flag_of(arg, release)
        return found.flag if found is not None and found.flag else None

    @property
    def is_first_edition(self) -> bool:
        """Whether the tuning guide's first edition was written for this release: it calls `lpm` the default, as it was up to 0.4.1."""
        release = self.release
        return release is not None and is_before(release, (0, 4, 3))

    @property
    def conservativeness(self) -> float | None:
        """The `schedule_conservativeness` in force, with DP attention's factor; None where unknown."""
        return self.arg("schedule_conservativeness")

    @property
    def initial_new_token_ratio(self) -> float | None:
        """The new-token ratio at the start and when idle: `min(0.7 x conservativeness, 1)` (srt/managers/scheduler.py, from 0.3.6 on)."""
        return None if self.conservativeness is None else min(0.7 * self.conservativeness, 1.0)

    @property
    def attention_ranks(self) -> int:
        """Ranks of attention data parallelism, 1 without it."""
        return attention_ranks(self.args)

    @property
    def dp_ranks(self) -> int | None:
        """Schedulers of the whole server, with plain data parallelism or DP attention; None where unknown."""
        if "dp_size" not in self.args:
            return None
        return max(int(self.arg("dp_size") or 1), self.attention_ranks)

    @property
    def pipeline_stages(self) -> int:
        """Pipeline-parallel ranks, 1 without; all print the same lines."""
        return max(int(self.arg("pp_size") or 1), 1)

    @property
    def micro_batches(self) -> int:
        """The batches that one scheduler runs in turn, 1 without pipeline parallelism.

        `#running-req` and the batch of a captured graph are those of one micro batch; queue, usage and throughput the scheduler's.
        """
        return self.pipeline_stages + (int(self.arg("pp_async_batch_depth") or 0) if self.pipeline_stages > 1 else 0)

    @property
    def shards(self) -> int:
        """GPUs that share one copy of the weights: tensor and pipeline parallelism. DP attention does not copy the experts."""
        return max(int(self.arg("tp_size") or 1), 1) * self.pipeline_stages

    @property
    def micro_batch_arg(self) -> str:
        """The argument that limits one micro batch, as this release spells it; it also limits without pipeline parallelism."""
        return "max_micro_batch_size" if "max_micro_batch_size" in self.args else "pp_max_micro_batch_size"

    @property
    def limit_shared_by(self) -> int:
        """How many batches share `--max-running-requests`: `running_limit` times this is the flag's value.

        DP attention divides the flag by its ranks, a pipeline by its micro batches; plain data parallelism does not divide it.
        """
        return self.attention_ranks * self.micro_batches

    @property
    def prefill_batch_tokens(self) -> float | None:
        """The most tokens in one prefill batch: the smaller of `chunked_prefill_size` and `max_prefill_tokens`.

        Both end a batch (`PrefillAdder.rem_chunk_tokens`, `rem_input_tokens`, srt/managers/schedule_policy.py, 0.4.9 to 0.5.23).
        """
        bounds = (self.arg("chunked_prefill_size"), self.arg("max_prefill_tokens"))
        return min((bound for bound in bounds if bound is not None and bound > 0), default=None)

    @property
    def decode_log_interval(self) -> float:
        """Decode steps between two decode lines."""
        return self.arg("decode_log_interval") or DECODE_LOG_INTERVAL

    @property
    def role(self) -> str:
        """The side of disaggregation, `prefill` or `decode`; empty for a server that does both."""
        return next(
            (
                side
                for side in ("prefill", "decode")
                if side in (self.args.get("disaggregation_mode"), self.engine_type)
            ),
            "",
        )

    @property
    def waits_by(self) -> str:
        """What decides, beside the new-token ratio, when a waiting request starts.

        `prefill`: the prefill side of disaggregation, which decodes nothing. `other`: an argument of `_WAITS_BY` or `_STARTS_BY` is
        set, or this is the decode side, which admits by `--max-running-requests` and by what has arrived. Empty otherwise.
        """
        if self.role == "prefill":
            return "prefill"
        return "other" if self.role or any(self.args.get(arg) for arg in (*_WAITS_BY, *_STARTS_BY)) else ""

    @property
    def starts_slowly(self) -> bool:
        """Whether a flag limits how fast requests start, and nothing but it and the new-token ratio decides that."""
        waits_for_other = self.role or any(self.args.get(arg) for arg in _WAITS_BY)
        return not waits_for_other and any(self.args.get(arg) for arg in _STARTS_BY)

    @property
    def adds_up_batches(self) -> bool:
        """Whether DP attention compares the sum of all ranks' batches with the largest captured batch (0.4.4 to 0.4.8), not the largest."""
        release = self.release
        return release is not None and not is_before(release, (0, 4, 4)) and is_before(release, (0, 4, 9))

    @property
    def graph_flag_arg(self) -> str:
        """The argument that sets the largest captured decode batch, spelled for this version.

        `--cuda-graph-max-bs` became `--cuda-graph-max-bs-decode` in 0.5.14 and is an argparse error from 0.5.20
        (srt/server_args.py).
        """
        # The printed arguments come first: the version may still be that of the server before an upgrade.
        for name in ("cuda_graph_max_bs_decode", "cuda_graph_max_bs"):
            if name in self.args:
                return name
        version = version_tuple(self.version)
        return "cuda_graph_max_bs" if version is not None and version < (0, 5, 14) else "cuda_graph_max_bs_decode"
