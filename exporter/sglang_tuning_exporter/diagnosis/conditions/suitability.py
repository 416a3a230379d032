"""Changes of set-up that would suit a server: the condition, and its tests. Pure.

Each test returns its evidence, or None if it does not apply to this server or a figure is not known.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from sglang_tuning_exporter.diagnosis.conditions.condition import Condition
from sglang_tuning_exporter.diagnosis.evidence import Evidence, Past
from sglang_tuning_exporter.diagnosis.prefix_sharing import PrefixSharing, sharing
from sglang_tuning_exporter.diagnosis.suspects import late_share

# Under fcfs: with less from the cache, ordering is not worth it; with more, nothing is left to gain.
SHARING = (0.1, 0.9)
NO_SHARING = 0.02
SMALL_MODEL_GB = 20.0  # of weights on all GPUs
SMALL_BATCH = 32.0  # default of --torch-compile-max-bs
ROOM_FOR_POOL = 0.3  # of a GPU's memory that the KV cache should have
USUAL_FRACTION = 0.88  # default of --mem-fraction-static; docs/decisions.md
LARGE_WEIGHTS = 0.3  # of a GPU's memory
MANY_REFUSED = 0.05  # of the requests
DP_ATTENTION_GPUS = 8
_MOE = re.compile(r"moe|mixtral|deepseek-?_?(?:v[23]|r1)|-a\d+(?:\.\d+)?b\b|kimi-k2|gpt-oss|grok|dbrx", re.IGNORECASE)
_LATENT = re.compile(r"deepseek-?_?(?:v[23]|r1)|kimi-k2", re.IGNORECASE)
_QUANTIZED = re.compile(
    r"fp8|fp4|awq|gptq|int[48]|w[48]a\d|bnb|gguf|marlin|quant|deepseek-?_?(?:v3|r1)|kimi-k2|gpt-oss", re.IGNORECASE
)


_FROM_CACHE = "share of prompt tokens from the prefix cache"


@dataclass(frozen=True, slots=True)
class Suitability(Condition):
    """A change of set-up would suit this server, by a test. `figures` returns what the test is based on."""

    kind = "chance"
    needs = "the server's arguments, and load"

    test: Callable[[Past], Evidence | None]
    figures: Callable[[Past], list[Evidence]] | None = None

    def measure(self, past: Past) -> Evidence | None:
        return self.test(past)

    def supporting(self, past: Past) -> list[Evidence]:
        return self.figures(past) if self.figures is not None else []


def _model(past: Past) -> str:
    return f"{past.facts.model_name or ''} {past.facts.args.get('model_path') or ''}"


def _sharing(past: Past) -> PrefixSharing | None:
    """Return what prompts share, if requests wait in an order that matters."""
    empty = past.recent.share("queue", "empty")
    if not past.has_enough_load or empty is None or 1.0 - empty <= past.profile.frequent_share:
        return None
    return sharing(past)


def shared_prefixes_unused(past: Past) -> Evidence | None:
    """Prompts share prefixes, and the queue's order does not use them."""
    shared = _sharing(past)
    if past.facts.args.get("schedule_policy") != "fcfs" or shared is None or shared.cached >= SHARING[1]:
        return None
    if shared.proven is None:
        return None
    name = _FROM_CACHE + (", computed by other requests" if shared.from_own_runs else "")
    return Evidence(name, shared.proven, SHARING[0], "share")


def prefix_policy_wasted(past: Past) -> Evidence | None:
    """The queue is ordered by prefixes that prompts do not share."""
    shared = _sharing(past)
    # A tuple, because an argument may be a list, which no set can look up.
    if past.facts.args.get("schedule_policy") not in ("lpm", "dfs-weight") or shared is None:
        return None
    # Of all tokens from the cache: without what requests find of their own the share is even smaller.
    return Evidence(_FROM_CACHE, shared.cached, NO_SHARING, "share", below=True)


def own_prefixes(past: Past) -> list[Evidence]:
    """Return what came from the cache, and how much of it requests had left there themselves."""
    shared = _sharing(past)
    if shared is None or not shared.from_own_runs:
        return []
    name = "share from their own earlier run (retracted) or first answer (n above 1), at most"
    cached = Evidence(_FROM_CACHE, shared.cached, SHARING[0], "share")
    return [cached, Evidence(name, shared.from_own_runs, 0.0, "share")]


def data_parallel_would_fit(past: Past) -> Evidence | None:
    """The whole model would fit on one GPU."""
    facts = past.facts
    shards = facts.arg("tp_size") or 1.0
    if shards <= 1 or (facts.arg("pp_size") or 1.0) > 1 or facts.is_cpu:
        return None
    if facts.model_gb is None or not facts.memory_before_weights_gb:
        return None
    if not _pool_of_one_gpu_suffices(past, facts.model_gb):
        return None
    room = (USUAL_FRACTION - ROOM_FOR_POOL) * facts.memory_before_weights_gb
    return Evidence("weights of the whole model", facts.model_gb, room, "GB", below=True)


def _pool_of_one_gpu_suffices(past: Past, model_gb: float) -> bool:
    """Whether the KV caches of replicas would hold the tokens in use: each loses what the rest of the weights takes."""
    facts, usage = past.facts, past.recent.mean("usage")
    if usage is None or facts.rank_weights_gb is None or not facts.pools_gb:
        return True
    left = 1.0 - (model_gb - facts.rank_weights_gb) / facts.pools_gb
    return usage <= past.profile.token_usage_target * left


def router_candidate(past: Past) -> Evidence | None:
    """One server has several replicas that a router could serve."""
    facts = past.facts
    if facts.is_cpu or facts.arg("enable_dp_attention") or (facts.arg("attn_dp_size") or 1.0) > 1:
        return None
    replicas = facts.arg("dp_size")
    return None if replicas is None else Evidence("replicas in one server", replicas, 1.0, "count")


def prefill_graph_candidate(past: Past) -> Evidence | None:
    """First tokens are late with an empty queue: 0.5.3 to 0.5.9 have prefill graphs, disabled by default."""
    facts, empty = past.facts, past.recent.share("queue", "empty")
    if facts.is_cpu or facts.without_graph or facts.arg("enable_piecewise_cuda_graph") != 0:
        return None
    late = late_share("time_to_first_token", past)
    return None if empty is None or empty <= past.profile.frequent_share else late


def torch_compile_candidate(past: Past) -> Evidence | None:
    """A small model runs small batches."""
    facts = past.facts
    batch = past.recent.running_quantile(0.99)
    if facts.is_cpu or facts.without_graph or facts.arg("enable_torch_compile") != 0:
        return None
    if not past.has_enough_load or batch is None or facts.model_gb is None or facts.model_gb >= SMALL_MODEL_GB:
        return None
    if facts.is_first_edition and facts.args.get("quantization"):
        return None
    return Evidence("requests running together, 99 % of the time", float(batch), SMALL_BATCH + 1, "count", below=True)


def _is_short(past: Past) -> bool:
    """Return whether the KV cache is too small for the load."""
    is_full = (past.recent.share("admission", "pool_full") or 0.0) > past.profile.frequent_share
    return past.has_enough_load and (is_full or past.retractions_per_minute > past.profile.retractions_tolerated)


def prompts_beyond_kv_cache(past: Past) -> Evidence | None:
    """Prompts are longer than the whole KV cache."""
    count = past.recent.counts.get("too_long_prompts")
    return Evidence("prompts refused or truncated", count, 0.0, "count") if count else None


def prompts_beyond_context(past: Past) -> Evidence | None:
    """Requests are longer than the context to which the operator limits this server."""
    count = past.recent.counts.get("beyond_context_prompts")
    if not count or past.facts.flag_value("context_length") is None:
        return None
    return Evidence("requests refused or truncated", count, 0.0, "count")


def requests_refused(past: Past) -> Evidence | None:
    """The scheduler answers many requests with an error, for another reason than their length."""
    refused, name = past.recent.counts.get("refused_requests", 0.0), "share of the requests that were refused"
    # One that is refused is prefilled with a single token.
    asked = max(past.recent.counts.get("new_sequences", 0.0), refused)
    return Evidence(name, refused / asked, MANY_REFUSED, "share") if refused else None


def requests_failed(past: Past) -> Evidence | None:
    """Many requests end in an exception of SGLang."""
    counts, name = past.recent.counts, "share of the requests that ended in an exception"
    posted = counts.get("generation_posts", 0.0)
    if posted:  # text can forge lines of the access log, but not SGLang's own counters
        failed = counts.get("server_errors", 0.0) + counts.get("failed_requests", 0.0)
    else:
        failed = counts.get("logged_server_errors", 0.0)
        posted = counts.get("new_sequences", 0.0) + failed  # most of them fail before they get to a scheduler
    return Evidence(name, failed / posted, MANY_REFUSED, "share") if failed > 0 else None


def quantization_candidate(past: Past) -> Evidence | None:
    """The weights take much of the memory that the KV cache lacks."""
    facts = past.facts
    if facts.is_cpu or facts.args.get("quantization", "not known") is not None or _QUANTIZED.search(_model(past)):
        return None
    if facts.weights_gb is None or not facts.memory_before_weights_gb or not _is_short(past):
        return None
    share = facts.weights_gb / facts.memory_before_weights_gb
    return Evidence("share of a GPU's memory taken by its part of the weights", share, LARGE_WEIGHTS, "share")


def expert_parallel_candidate(past: Past) -> Evidence | None:
    """Each expert is split over all GPUs."""
    facts = past.facts
    if facts.is_cpu or not _MOE.search(_model(past)) or "tp_size" not in facts.args:
        return None
    if (facts.arg("ep_size") or 1.0) > 1 or facts.arg("enable_ep_moe") or facts.arg("enable_deepep_moe"):
        return None
    return Evidence("GPUs that share every expert", facts.arg("tp_size") or 1.0, 1.0, "count")


def dp_attention_candidate(past: Past) -> Evidence | None:
    """Tensor parallelism stores a compressed KV cache on each GPU, and it is full."""
    facts = past.facts
    if facts.is_cpu or not _LATENT.search(_model(past)) or (facts.arg("tp_size") or 1.0) < DP_ATTENTION_GPUS:
        return None
    full = past.recent.share("admission", "pool_full")
    if facts.arg("enable_dp_attention") or not past.has_enough_load or full is None:
        return None
    return Evidence("serving time with a full KV cache", full, past.profile.frequent_share, "share")
