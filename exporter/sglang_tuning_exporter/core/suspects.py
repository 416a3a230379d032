"""Flags that the operator set away from SGLang's defaults, and what they can explain. Data, with one rule.

A flag is a suspect where its value is on the side of the default that its row names, and the trouble is one that it can cause. Where figures
show that it is the cause (a proof), it is the first change of that diagnosis. `source` is the module of 0.5.23 that uses the flag.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import TypeAlias

from sglang_tuning_exporter.core.findings import Change, Value
from sglang_tuning_exporter.core.view import View, counted
from sglang_tuning_exporter.sglang.args.flags import flag_of, number

MOST_NAMED = 3
OFTEN = 0.25  # of the serving time: less than for a finding
EMPTY_PAGES, EMPTY_PAGES_ALLOWED, PAGE_SIZES = 0.25, 0.1, (64, 32, 16, 1)
PROMPTS_HELD = 0.25  # of the KV cache, above which prompts that share nothing fill it
SHORT_PROMPT = 64.0
FEW_PROMPTS = 4.0  # in one prefill batch
# Tokens of a chunk: a smaller one takes about as long; with this one or less, decode steps in between only delay the prompts.
LEAST_USEFUL_CHUNK, TINY_CHUNK = 1024.0, 512.0
LATE_TIMES, SLOW_BURN_TIMES = 10.0, 6.0  # error budgets above which first tokens, and gaps between tokens, are late
LARGE_BATCH = 32.0
# While one of these is set, no other flag helps.
INSTEAD = frozenset({"page_size", "max_prefill_tokens", "prefill_decode_interval", "prefill_max_requests"})
_STATES = {"pool": "pool_full", "prefill": "prefill_bound", "held_back": "held_back", "limit": "running_limit"}
_WAITING = frozenset({"queue_too_long", "unexplained", "latency_queue"})
_POOL = _WAITING | {
    "running_far_below_limit",
    "conservativeness_ineffective",
    "admission_too_conservative",
    "retracting_too_often",
}
_PROMPTS = _WAITING | {"prefill_bound", "latency_long_prompts"}
_ADMITS = _WAITING | {"admission_too_conservative", "prefill_bound"}
_NEEDED = "it is needed for what this server does"


@dataclass(frozen=True, slots=True)
class Suspect:
    """A flag with a suspicious side: numbers strictly between `least` and `most`, one of `words`, or a switch that is on."""

    arg: str
    troubles: str  # pool prefill held_back limit waiting eager retracting rejected hang tokens, with blanks between
    why: str
    not_if: str
    source: str
    least: float = inf
    most: float = inf
    words: tuple[str, ...] = ()
    to: Value = None  # the release's default where None
    cost: str = ""
    gpu_only: bool = False
    only_proven: bool = False
    forced_by: tuple[str, ...] = ()  # arguments, or `argument=value`, for which SGLang sets the flag by itself
    is_shared: bool = False  # by the ranks of DP attention
    only_with: str = ""  # a count that must be above 1

    def is_suspicious(self, value: object, ranks: int = 1) -> bool:
        """Whether a typed value is on the suspicious side; `ranks` of DP attention share it."""
        if self.words:
            return value in self.words
        if self.least == inf:
            return value is True
        return (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and self.least < value < self.most * (ranks if self.is_shared else 1)
        )


_NO_RADIX = (
    "disaggregation_mode=decode",
    "is_embedding",
    "enable_mis",
    "enable_deterministic_inference",
    "prefill_only_disable_kv_cache",
)
_PAGED = (
    "flashmla",
    "cutlass_mla",
    "trtllm_mla",
    "trtllm_mha",
    "fa4",
    "ascend",
    "intel_amx",
    "dsa",
    "nsa",
    "aiter",
    "dsv4",
    "tokenspeed_mla",
)
SUSPECTS: tuple[Suspect, ...] = (
    Suspect(
        "disable_radix_cache",
        "pool prefill retracting waiting",
        "Without the radix cache each request computes and holds its whole prompt. If prompts share prefixes, the cache computes and holds each prefix once.",
        "prompts share no prefixes, or the model cannot use the cache: then SGLang switches it off again",
        "srt/mem_cache/radix_cache.py",
        cost="A little scheduling time; cached prefixes fill the KV cache and are evicted when room is needed.",
        forced_by=_NO_RADIX,
    ),
    Suspect(
        "page_size",
        "pool held_back retracting waiting limit",
        "The KV cache is given out in whole pages, and a request leaves its last page partly empty. Shared prefixes are reused in whole pages only.",
        "the attention backend needs this page size: then SGLang sets it again",
        "srt/mem_cache/allocator",
        least=16,
        only_proven=True,
        cost="Larger pages make transfers to host memory or to a decode server faster.",
        forced_by=tuple(f"attention_backend={name}" for name in _PAGED),
    ),
    Suspect(
        "max_prefill_tokens",
        "prefill held_back waiting",
        "A prefill batch takes no further prompt after this many tokens, so prompts are computed one after another although a chunk has room for several.",
        "prompts are computed one at a time anyway, because few requests come at once",
        "srt/managers/schedule_policy.py, PrefillAdder",
        least=0,
        most=16384,
        only_proven=True,
        cost="Larger prefill batches take more GPU memory, and running requests pause longer.",
    ),
    Suspect(
        "chunked_prefill_size",
        "first_tokens tokens pool",
        "Each chunk takes a pass through the model, and a small one takes about as long as one of 1,024 tokens.",
        "prompts fit into one chunk",
        "srt/managers/schedule_policy.py, PrefillAdder",
        least=0,
        most=LEAST_USEFUL_CHUNK,
        is_shared=True,
        only_proven=True,
        cost="Running requests pause longer for each chunk.",
    ),
    Suspect(
        "prefill_decode_interval",
        "held_back waiting unknown",
        "Requests that wait cannot start until this many decode steps have passed.",
        "running requests would pause too often without it",
        "srt/managers/scheduler.py, prefill_decode_interval",
        least=0,
        to=0,
        cost="Running requests pause more often.",
        only_proven=True,
    ),
    Suspect(
        "prefill_max_requests",
        "held_back waiting unknown",
        "No prefill batch starts more requests than this, so short prompts cannot share a batch.",
        "prompts are long enough to fill a batch alone",
        "srt/managers/schedule_policy.py, PrefillAdder",
        least=0,
        most=64,
        cost="Running requests pause longer for each prefill batch.",
    ),
    Suspect(
        "max_queued_requests",
        "rejected",
        "SGLang answers 503 to each request that finds the queue full. A longer queue takes bursts.",
        "requests always come faster than they are served: then they wait instead, and more of them give up",
        "srt/managers/scheduler.py, _abort_on_queued_limit",
        least=0,
        most=1e9,
        cost="Requests wait longer instead of being rejected.",
        only_proven=True,
    ),
    Suspect(
        "watchdog_timeout",
        "hang",
        "SGLang ends itself when a single step takes longer than this. A long prompt or a compilation can take that long.",
        "the server hung for other reasons: its log shows where each process stood",
        "srt/utils/watchdog.py",
        least=0,
        most=60,
        cost="A real hang is noticed later.",
    ),
    Suspect(
        "cpu_offload_gb",
        "waiting tokens",
        "Weights in host memory are copied to the GPU in every step.",
        "the weights do not fit on the GPU otherwise",
        "srt/utils/offloader.py",
        least=0,
        gpu_only=True,
        cost="The weights take GPU memory, and the KV cache becomes smaller.",
    ),
    Suspect(
        "offload_group_size",
        "waiting tokens",
        "Weights in host memory are copied to the GPU in every step.",
        "the weights do not fit on the GPU otherwise",
        "srt/utils/offloader.py",
        least=0,
        gpu_only=True,
        cost="The weights take GPU memory, and the KV cache becomes smaller.",
    ),
    Suspect(
        "enable_paged_experts",
        "waiting tokens",
        "Experts in host memory are copied to the GPU when a token needs them.",
        "the experts do not fit on the GPU otherwise",
        "srt/layers/moe",
        gpu_only=True,
        cost="The experts take GPU memory, and the KV cache becomes smaller.",
    ),
    Suspect(
        "attention_backend",
        "waiting tokens eager",
        "This backend computes requests one by one and without CUDA graphs. SGLang chooses a faster one when the flag is not given: fa3 on Hopper,"
        " trtllm_mha or trtllm_mla on Blackwell, flashinfer on Ampere and Ada.",
        "the GPU or the model works with no other backend",
        "srt/layers/attention/torch_native_backend.py",
        words=("torch_native", "flex_attention"),
        gpu_only=True,
    ),
    Suspect(
        "disable_flashinfer",
        "waiting tokens",
        "Without FlashInfer the slower Triton kernels compute attention.",
        "FlashInfer does not work with this GPU",
        "srt/server_args.py in 0.3.4",
        gpu_only=True,
    ),
    Suspect(
        "disable_mla",
        "pool retracting tokens",
        "DeepSeek's compressed KV cache is many times smaller than the full one.",
        "the model has no latent attention",
        "srt/server_args.py in 0.4.4",
        gpu_only=True,
    ),
    Suspect(
        "disable_overlap_schedule",
        "waiting tokens",
        "The GPU waits after each step until the CPU has scheduled the next one. With overlap both work at once.",
        "another flag needs it off: then SGLang switches it off again",
        "srt/managers/scheduler.py, event_loop_overlap",
        forced_by=("speculative_algorithm", "is_embedding", "device=cpu", "device=mps"),
    ),
    Suspect(
        "max_total_tokens",
        "pool retracting",
        "The KV cache holds no more than this, also where memory for more is free.",
        "no more fits into the GPU's memory: then SGLang takes what fits",
        "srt/mem_cache/kv_cache_configurator.py",
        least=0,
        only_proven=True,
    ),
    Suspect(
        "mem_fraction_static",
        "pool retracting",
        "The KV cache gets what this share of the GPU's memory leaves beside the weights. SGLang chooses 0.7 to 0.9 by itself.",
        "other processes use the GPU's memory, or the server ran out of memory with more",
        "srt/arg_groups/memory_hook.py",
        least=0,
        most=0.7,
        gpu_only=True,
        cost="Less memory is left for peaks: raise it in steps of 0.01, and watch for out-of-memory failures.",
    ),
    Suspect(
        "dtype",
        "pool retracting tokens",
        "Weights and KV cache of 32 bits take twice the memory and time of 16 bits.",
        "the answers need this precision",
        "srt/configs/model_config.py",
        words=("float32", "float"),
        to="auto",
    ),
    Suspect(
        "disable_hybrid_swa_memory",
        "pool retracting",
        "Layers with a sliding window then keep every token instead of the window's.",
        "the model has no sliding-window layers",
        "srt/configs/model_config.py, is_hybrid_swa",
        gpu_only=True,
    ),
    Suspect(
        "min_free_slots_delay",
        "held_back waiting unknown",
        "Requests that wait cannot start until this many running ones have ended.",
        "each start is costly, as with a separate draft model",
        "srt/arg_groups/fields/schedule.py",
        least=1,
        to=1,
    ),
    Suspect(
        "enable_prefill_delayer",
        "held_back waiting unknown",
        "Prefill waits until several DP ranks have prompts.",
        "most of the time all DP ranks have prompts",
        "srt/managers/prefill_delayer.py",
        cost="DP ranks without prompts idle while another one computes a prompt.",
    ),
    Suspect(
        "num_continuous_decode_steps",
        "held_back",
        "New requests can start only every few decode steps.",
        "first tokens are late because requests wait for room",
        "srt/arg_groups/fields/schedule.py",
        least=1,
        cost="A little scheduling time for each step.",
    ),
    Suspect(
        "hicache_storage_prefetch_policy",
        "held_back waiting unknown",
        "A request waits until its whole prefix has come from the storage.",
        "computing the prefix again takes longer than fetching it",
        "srt/mem_cache/unified_radix_cache.py",
        words=("wait_complete",),
        to="timeout",
        cost="Part of a prefix may be computed again.",
    ),
    Suspect(
        "schedule_policy",
        "waiting",
        "Requests do not start in the order in which they came, so some wait far longer than others.",
        "the clients need that order",
        "srt/managers/schedule_policy.py",
        words=("random", "lof", "dfs-weight", "routing-key"),
        to="fcfs",
    ),
    Suspect(
        "pp_max_micro_batch_size",
        "limit waiting",
        "Under pipeline parallelism no stage runs more requests at once than this.",
        "the KV cache is full",
        "srt/managers/scheduler.py",
        least=0,
        only_with="pp_size",
        cost="Inter-token latency rises as more requests run together.",
    ),
    Suspect(
        "disable_custom_all_reduce",
        "tokens waiting",
        "NCCL is slower than SGLang's own kernel for the small messages of a decode step.",
        "the GPUs have no fast links, or are on several machines",
        "srt/distributed/device_communicators/custom_all_reduce.py",
        only_with="tp_size",
        gpu_only=True,
        forced_by=("enable_deterministic_inference", "device=npu"),
    ),
    Suspect(
        "enable_deterministic_inference",
        "waiting tokens",
        "Equal answers for equal requests need slower kernels, and most backends then have no radix cache.",
        _NEEDED,
        "srt/arg_groups/attention_hook.py",
        gpu_only=True,
        cost="The same request may get slightly different answers.",
    ),
    Suspect(
        "tokenizer_mode",
        "waiting",
        "The slow tokenizer runs in Python, in the one process that receives all requests.",
        "the model has no fast tokenizer",
        "srt/utils/hf_transformers_utils.py",
        words=("slow",),
        to="auto",
    ),
    Suspect(
        "log_level",
        "waiting tokens",
        "Every step writes lines that the step waits for.",
        _NEEDED,
        "srt/managers/scheduler.py",
        words=("debug", "trace"),
        to="info",
    ),
    Suspect(
        "decode_log_interval",
        "waiting tokens",
        "The scheduler writes a line and refreshes its metrics every few steps.",
        "each step takes far longer than writing a line",
        "srt/managers/scheduler_components/metrics_reporter.py",
        least=0,
        most=10,
        cost="Figures in log and metrics are refreshed less often.",
    ),
    Suspect(
        "enable_nan_detection",
        "tokens",
        "Each step is checked for NaN, and the GPU waits for the check.",
        _NEEDED,
        "srt/layers/sampler.py in 0.5.12",
        gpu_only=True,
        cost="NaN in the logits is not found.",
    ),
    Suspect(
        "debug_tensor_dump_output_folder",
        "waiting tokens",
        "It is meant for debugging and slows every step.",
        _NEEDED,
        "srt/debug_utils",
        words=("",),
        only_proven=True,
    ),
)


def troubles(view: View) -> frozenset[str]:
    """Return what is wrong with the load."""
    if not view.has_enough_load:
        return frozenset({"hang"} if view.totals["watchdogs"] else ())
    bound = min(OFTEN, view.profile.frequent_share)
    seen = {trouble for trouble, state in _STATES.items() if (view.share("admission", state) or 0.0) > bound}
    if view.prefill_share > bound:
        seen.add("prefill")
    unknown = 1.0 - (view.share("queue", "empty") or 0.0) > view.profile.frequent_share and view.facts.starts_slowly
    healthy = ("empty", "in_range") if view.profile.queue_lower is None else ("empty", "in_range", "below_range")
    profile = view.profile
    late_gaps = view.late_share("inter_token", profile.inter_token_seconds) > profile.late_bound(SLOW_BURN_TIMES)
    late_first = view.late_share("time_to_first_token", profile.time_to_first_token_seconds) > profile.late_bound(
        LATE_TIMES
    )
    late = late_gaps or (
        view.step_seconds is not None
        and view.profile.inter_token_seconds is not None
        and view.step_seconds > view.profile.inter_token_seconds
    )
    signs = {
        "unknown": unknown, "hang": bool(view.totals["watchdogs"]), "tokens": late, "first_tokens": late_first,
        "waiting": not seen and 1.0 - (view.share("queue", *healthy) or 0.0) > bound,
        "eager": (view.share("cuda_graph", "eager") or 0.0) > bound,
        "retracting": view.retractions_a_minute > view.retractions_tolerated,
        "rejected": view.per_minute(view.totals["rejected"]) > view.profile.rejections_per_minute,
    }  # fmt: skip
    return frozenset(seen | {trouble for trouble, is_seen in signs.items() if is_seen})


def named(view: View) -> list[tuple[Change, frozenset[str]]]:
    """Return every flag that was typed with a suspicious value and can cause the trouble, with the rows that figures show it to cause."""
    facts, seen = view.facts, troubles(view)
    typed = facts.typed_arguments
    if typed is None or not seen:
        return []
    found = []
    for suspect in SUSPECTS:
        value = typed.get(suspect.arg)
        if (
            suspect.arg not in typed
            or not suspect.is_suspicious(value, facts.attention_ranks)
            or _is_forced(suspect, view)
            or not facts.flag(suspect.arg)
        ):
            continue
        proof = PROOFS.get(suspect.arg)
        proven = proof(view, seen, number(value) or 0.0) if proof else None
        can = not seen.isdisjoint(suspect.troubles.split())
        if proven is None and (suspect.only_proven or not can):
            continue
        now: Value = value if isinstance(value, (str, bool, int, float)) else None
        rows, to, gain = proven if proven is not None else (frozenset(), _default(suspect, view), "")
        found.append((_change(suspect, view, now, to, gain), rows))
    return found


def explaining(row: str, view: View) -> list[Change]:
    """Return the changes of the suspects that figures show to cause a row."""
    return [change for change, rows in named(view) if row in rows]


def likely(view: View) -> list[Change] | None:
    """Return the changes of the likeliest suspects for the trouble seen; None without trouble."""
    seen = troubles(view)
    if not seen or seen == {"pool"}:
        return None
    return [change for change, _ in sorted(named(view), key=lambda each: not each[1])][:MOST_NAMED]


def explained(view: View) -> View:
    """Return the view with waits explained by a flag: while each prefill batch ends at --max-prefill-tokens, requests wait for prefill."""
    if view.totals["admission/held_back"] and any(
        change.arg == "max_prefill_tokens" and rows for change, rows in named(view)
    ):
        return replace(view, totals=counted(view.totals, "held_back", "prefill_bound"))
    return view


def _change(suspect: Suspect, view: View, now: Value, to: Value, gain: str) -> Change:
    removes = to is None or to is False
    words = "start without it" if to is None else ""
    if isinstance(to, float) and to.is_integer():
        to = int(to)
    direction = (
        "drop"
        if removes
        else "set"
        if isinstance(to, str)
        else "raise"
        if float(to or 0) > float(now or 0)
        else "lower"
    )
    return Change(
        suspect.arg, view.facts.flag(suspect.arg), now, to, words, direction, suspect.why, suspect.cost, gain, suspect.not_if, removes=removes,
    )  # fmt: skip


def _default(suspect: Suspect, view: View) -> Value:
    if suspect.least == inf and not suspect.words:
        return False
    if suspect.to is not None:
        return suspect.to
    flag = flag_of(suspect.arg, view.facts.release or "")
    default = flag.default if flag is not None else None
    return default if isinstance(default, (str, int, float)) and not isinstance(default, bool) else None


def _is_forced(suspect: Suspect, view: View) -> bool:
    """Whether SGLang sets this by itself, so that removing the flag has no effect."""
    facts = view.facts
    if suspect.gpu_only and facts.is_cpu:
        return True
    if suspect.only_with and (facts.number(suspect.only_with) or 1.0) <= 1:
        return True
    for condition in suspect.forced_by:
        arg, _, value = condition.partition("=")
        if facts.word(arg) == value if value else facts.is_on(arg):
            return True
    return False


# Proofs


# What figures show: the rows that the flag causes, the value to set, and what is gained.
Proven: TypeAlias = tuple[frozenset[str], Value, str]


def _radix_cache(view: View, seen: frozenset[str], _: float) -> Proven | None:
    """Each request computes and holds its whole prompt, shared or not."""
    prompt, running, usage, pool = view.prompt, view.mean("running"), view.mean("usage"), view.facts.pool()
    if prompt is None or prompt < SHORT_PROMPT:
        return None
    rows: frozenset[str] = frozenset()
    gain = ""
    held = usage * pool / running if usage and pool and running else None
    share = prompt / held if held else None
    if "pool" in seen and (share is None or share >= PROMPTS_HELD):
        rows |= _POOL
        gain = (
            f"prompts take about {100 * share:.0f} % of the KV cache, each request its own copy"
            if share is not None and share < 1
            else ""
        )
    if "prefill" in seen:
        rows |= _PROMPTS
        gain = gain or f"a mean prompt has {prompt:,.0f} tokens, all computed"
    return (rows, False, gain) if rows else None


def _pages(view: View, seen: frozenset[str], page: float) -> Proven | None:
    """Requests leave much of their last pages empty."""
    prompt = view.prompt
    wants_room = not seen.isdisjoint({"pool", "held_back", "retracting", "waiting"})
    if prompt is None or not wants_room:
        return None
    request = prompt + (view.answer or 0.0) / 2
    wasted = max(1.0 - request / (ceil(request / page) * page), page / 2 / (request + page / 2))
    if wasted < EMPTY_PAGES:
        return None
    smaller = next(
        (size for size in PAGE_SIZES if size < page and size / 2 / (request + size / 2) <= EMPTY_PAGES_ALLOWED), 1
    )
    gain = (
        f"about {100 * wasted:.0f} % of the KV cache is empty space in pages: a request has some {request:,.0f} tokens"
    )
    return (_POOL, float(smaller), gain)


def _prefill_tokens(view: View, seen: frozenset[str], most: float) -> Proven | None:
    """A prefill batch ends at this many tokens, beside a larger chunk."""
    chunk, prompt = view.facts.number("chunked_prefill_size"), view.prompt
    wanted = float(chunk) if chunk is not None and chunk > 0 else 16384.0
    fit = most / max(prompt or 1024.0, 1.0)
    if most >= wanted or not (
        "prefill" in seen or (not seen.isdisjoint({"held_back", "waiting"}) and fit <= FEW_PROMPTS)
    ):
        return None
    return (_ADMITS, max(wanted, 16384.0), f"a prefill batch ends at {most:,.0f} tokens, a chunk has {wanted:,.0f}")


def _small_chunk(view: View, seen: frozenset[str], chunk: float) -> Proven | None:
    """A prompt takes several passes through the model, one for each small chunk: first tokens are late, or a full cache costs throughput twice."""
    reserve, prompt = view.facts.reserve_gb, view.prompt
    chunk /= view.facts.attention_ranks
    is_tiny = chunk < TINY_CHUNK
    late = {"first_tokens", "tokens"} if is_tiny else {"first_tokens"}
    is_late = not late.isdisjoint(seen)
    is_slow = "pool" in seen and view.profile.time_to_first_token_seconds is None and prompt is not None
    if not (is_late or is_slow) or (reserve is not None and reserve < view.profile.reserve_lower_gb):
        return None
    taken = ceil(prompt / chunk) if prompt else None
    if taken == 1:
        return None
    rows = frozenset({"running_far_below_limit"} if is_slow else ())
    if is_late:
        rows |= _PROMPTS | {"latency_batch_too_large"} | ({"latency_prefill_between"} if is_tiny else frozenset())
    gain = f"a mean prompt takes {taken} chunks" if taken is not None else ""
    return (rows, LEAST_USEFUL_CHUNK * view.facts.attention_ranks, gain)


def _decode_interval(_: View, seen: frozenset[str], steps: float) -> Proven | None:
    """Between prefill batches requests wait for decode steps."""
    if seen.isdisjoint({"held_back", "unknown", "waiting"}):
        return None
    return (_ADMITS, 0.0, f"after each prefill batch no request starts for {steps:g} decode steps")


def _queue_limit(_: View, seen: frozenset[str], most: float) -> Proven | None:
    """Only bursts are rejected: nothing else keeps requests waiting."""
    return (frozenset({"requests_rejected"}), 4 * max(most, 1.0), "") if seen - {"tokens"} == {"rejected"} else None


PROOFS: dict[str, Callable[[View, frozenset[str], float], Proven | None]] = {
    "disable_radix_cache": _radix_cache, "page_size": _pages, "max_prefill_tokens": _prefill_tokens,
    "chunked_prefill_size": _small_chunk, "prefill_decode_interval": _decode_interval,
    "max_queued_requests": _queue_limit,
}  # fmt: skip
