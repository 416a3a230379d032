"""The figures that decide the rows of the table, each a function of a stretch of time: None where the log does not show it. Pure.

A row says beside which limit its figure is bad, and whether it needs load: what is measured here has enough of it, unless the row is for any.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import TypeAlias

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core import suspects
from sglang_tuning_exporter.core.findings import Value
from sglang_tuning_exporter.core.suspects import LATE_TIMES, PAGED_BACKENDS, SLOW_BURN_TIMES
from sglang_tuning_exporter.core.view import MOSTLY_PREFILL, SHARING, SHORTEST_TIMEOUT, View
from sglang_tuning_exporter.sglang.metrics import Histogram

Measure: TypeAlias = Callable[[View], float | None]
CEILING = 1.43  # min(0.7 x conservativeness, 1): above it the flag has no effect
USUAL_WATCHDOG_SECONDS = 300.0  # --watchdog-timeout
HEALTH_CHECK_SECONDS = 20.0  # SGLANG_HEALTH_CHECK_TIMEOUT
MANY_OUTAGES = 3  # of two hours
RARE_WAIT = 0.1  # of the time, on the least busy DP rank
TRANSFERS_A_MINUTE, RARELY_FAILED = 0.5, 0.01  # failed ones; of the requests
LEAST_DRAFTED, DRAFT_COST, USUAL_DRAFTS = 0.99, 0.014, 3.0  # tokens a step; of a pass for each draft step; draft steps
FEW = 5  # requests that failed for other reasons are no finding
SMALL_MODEL_GB = 20.0  # of all weights
SEVERAL_EACH = 1.5  # requests of the scheduler for each over HTTP
LONG_PREFILL = 512.0  # prompt tokens for each late gap, from which on prefill makes it
MANY_GIVEN_UP = 0.333  # of the requests that ended
LARGE_BATCH, RARELY = 32.0, 0.25  # requests; of the time
ROOM_FOR_POOL, USUAL_FRACTION = 0.3, 0.88  # of a GPU's memory
DP_ATTENTION_GPUS = 8
FULL_BATCHES = 0.25  # of the prefill batches, at least, for a larger chunk to matter
TINY_CHUNK, SMALL_CHUNK = 512.0, 4096  # a chunk takes about as long as one of 1,024 tokens; what to set in its place
_MOE = re.compile(r"moe|mixtral|deepseek-?_?(?:v[23]|r1)|-a\d+(?:\.\d+)?b\b|kimi-k2|gpt-oss|grok|dbrx", re.IGNORECASE)
_LATENT = re.compile(r"deepseek-?_?(?:v[23]|r1)|kimi-k2", re.IGNORECASE)
_QUANTIZED = re.compile(
    r"fp8|fp4|awq|gptq|int[48]|w[48]a\d|bnb|gguf|marlin|quant|deepseek-?_?(?:v3|r1)|kimi-k2|gpt-oss", re.IGNORECASE
)


# Failures


def graph_memory(view: View) -> float | None:
    """GB that are missing after graph capture: all of it where the capture failed."""
    least, reserve = view.profile.reserve_least_gb, view.facts.reserve_gb
    if view.totals["out_of_memory.graph_capture"]:
        return least
    return 0.0 if reserve is None or view.facts.without_graph else max(least - reserve, 0.0)


def hang(view: View) -> float | None:
    """Seconds in which requests were there and nothing moved: each line of a watchdog or a health check stands for those that it waited."""
    if view.stuck is not None:
        return view.stuck.seconds
    totals = view.totals
    longest = max((hang.seconds for hang in view.hangs), default=0.0) if totals["hangs"] else 0.0
    if totals["watchdogs"] and not longest:
        each = view.facts.size("watchdog_timeout") or USUAL_WATCHDOG_SECONDS
        return (HEALTH_CHECK_SECONDS if totals["health_failures"] else each) * totals["watchdogs"]
    return max(longest, view.silent_seconds if totals["health_failures"] else 0.0)


def down(view: View) -> float | None:
    """Whether it does not answer."""
    return float(bool(view.down)) if view.down or view.scraped else None


def often_down(view: View) -> float | None:
    """The share of two hours in which it was down, where that was again and again."""
    return view.down_share if view.down_share is None or view.outages >= MANY_OUTAGES else 0.0


def transfers(view: View) -> float | None:
    """Requests that failed between the two servers of a pair, by the minute."""
    totals, failed = view.totals, view.failed_transfers
    if not failed and not view.facts.role:
        return None
    requests = max(totals["finished_requests"], totals["started"], failed)
    value = view.per_minute(failed)
    return value if failed > RARELY_FAILED * requests else min(value, TRANSFERS_A_MINUTE)


def requests_failed(view: View) -> float | None:
    """The share of the requests that ended in an exception."""
    posts, failed = view.totals["generation_posts"], view.totals["server_errors"]
    return failed / (posts or view.totals["sequences"] + failed) if failed >= FEW else None


def requests_refused(view: View) -> float | None:
    """The share of the requests that SGLang ended before their first token, by its log or by the page; not by a client, nor for their length."""
    totals = view.totals
    others = totals["aborted_requests"] + totals["too_long"] + totals["beyond_context"]
    found = (
        (totals["refused"], totals["sequences"]),
        (totals["tokenless_requests"] - others, totals["finished_requests"]),
    )
    return max((refused / max(all_, refused) for refused, all_ in found if refused >= FEW), default=None)


def trouble(name: str) -> Measure:
    """Give whether a source is in trouble."""
    return lambda view: float(name in view.troubles)


# Why requests wait


def retractions_at_ceiling(view: View) -> float | None:
    """Retractions a minute where a higher conservativeness has no effect."""
    above = (view.facts.number("schedule_conservativeness") or 0.0) > CEILING
    return view.retractions_a_minute if above else None


def prefill(view: View) -> float | None:
    """Requests wait while prompts are computed. Where throughput counts, an empty queue beside them is no sign of slow clients."""
    value, waits = view.share("admission", "prefill_bound") or 0.0, view.waited_share > view.profile.frequent_share
    if view.profile.queue_lower is not None or waits:
        value = max(value, view.full_steps)
        if not waits or view.facts.is_on("disable_radix_cache"):  # else what they wait for is known better
            value = max(value, view.prefill_share)
    return value


def imbalance(view: View) -> float | None:
    """The share of the time in which the busiest DP rank made requests wait, while another hardly ever did."""
    waited = view.waited()
    return max(waited.values()) if len(waited) > 1 and min(waited.values()) < RARE_WAIT else None


def unexplained(view: View) -> float | None:
    """Requests wait most of the time, and longer than the profile allows; priorities let some wait by design."""
    if view.facts.is_on("enable_priority_scheduling"):
        return None
    healthy = ("empty", "in_range") if view.profile.queue_lower is None else ("empty", "in_range", "below_range")
    waited = 1.0 - (view.share("queue", *healthy) or 0.0)
    if view.profile.queue_lower is not None:  # the guide's range is about a full cache
        early = view.totals["early"] / (view.known["admission"] or inf)  # the reason of these is not known yet
        waited = max(waited, (view.share("admission", "held_back", "unknown") or 0.0) - early)
    return waited


# Latency


def late_bound(times: float) -> Callable[[View], float]:
    """Give the share that may be late at so many times the error budget."""
    return lambda view: view.profile.late_bound(times)


def burning(latency: str, rate: str) -> Measure:
    """Give the share of the observations that missed the objective, in both windows of a burn rate."""

    def of(view: View) -> float | None:
        share = view.burning.get((latency, rate))
        return 0.0 if share is not None and view.hung else share

    return of


def _late(
    view: View, latency: str, objective: float | None, budgets: float, because: Callable[[Histogram], bool]
) -> float | None:
    """Return the share of observations above the objective; at its limit at most where something else is the reason."""
    seen = view.latency(latency)
    if objective is None or seen is None or view.hung or seen.observations < view.profile.enough_observations:
        return None
    share = view.late_share(latency, objective)
    return share if because(seen) else min(share, view.profile.late_bound(budgets))


def _is_waiting(view: View, first_tokens: Histogram) -> bool:
    """Whether requests wait most of the time, or spend most of the time to their first token in the queue."""
    wait, mean, share = view.wait, first_tokens.mean_seconds, view.profile.frequent_share
    return view.waited_share > share or (wait is not None and mean is not None and wait > share * mean)


def late_by_queue(view: View) -> float | None:
    """First tokens that are late because requests wait."""
    objective = view.profile.time_to_first_token_seconds
    return _late(view, "time_to_first_token", objective, LATE_TIMES, lambda seen: _is_waiting(view, seen))


def late_by_prompts(view: View) -> float | None:
    """First tokens that are late without a queue, by the prompts."""
    objective = view.profile.time_to_first_token_seconds

    def because(seen: Histogram) -> bool:
        tokens, late = view.totals["computed"], seen.above(objective or 0.0)
        # One batch may be late for another reason, as the first one after a start, while kernels are compiled.
        several = late > view.totals["most_running"]
        return several and not _is_waiting(view, seen) and (not tokens or tokens >= LONG_PREFILL * late)

    return _late(view, "time_to_first_token", objective, LATE_TIMES, because)


def late_between(view: View) -> float | None:
    """Gaps between tokens that are late by the prompts computed in between."""
    objective = view.profile.inter_token_seconds

    def because(seen: Histogram) -> bool:
        late, steps = seen.above(objective or 0.0) / seen.observations, view.steps
        is_long = bool(late and steps) and view.totals["computed"] / (late * steps) >= LONG_PREFILL
        return is_long and (seen.quantile(0.25) or 0.0) <= (objective or 0.0)

    return _late(view, "inter_token", objective, SLOW_BURN_TIMES, because)


def step_of_a_large_batch(view: View) -> float | None:
    """Seconds between two tokens, where decoding alone takes them: the batch is large and prompts take little of the time."""
    prefills = view.totals["prefilling"] > RARELY * view.known["queue"]
    return None if (view.batch(0.5) or 0.0) < LARGE_BATCH or prefills else view.step_seconds


def many_given_up(view: View) -> float:
    """Return the share of requests that may be given up."""
    return view.profile.aborted_share if "aborted_share" in view.profile.overridden else MANY_GIVEN_UP


def given_up(view: View) -> float | None:
    """The share of the ended requests that clients gave up."""
    share = view.given_up_share
    if share is None or view.totals["finished_requests"] < view.profile.enough_observations:
        return None
    return 0.0 if view.hung else share  # then clients have a reason


def timeouts(view: View) -> float | None:
    """The same, where nearly all end at the age of a time-out."""
    share, ages = given_up(view), view.given_up_ages
    is_timeout = ages is not None and ages[1] >= SHORTEST_TIMEOUT and not view.cancels
    return share if share is None or is_timeout else min(share, many_given_up(view))


# What can be better


def speculation(view: View) -> float | None:
    """Tokens of a verified step; below 0.99 it is another figure than the mean with the token that needs no draft.

    Even the smallest draft takes a part of a pass for each draft step: what is left of a token after that is at or below 1 where it does
    not pay.
    """
    lines = view.totals["accepted:n"]
    length = view.totals["accepted"] / lines if lines >= view.profile.enough_observations else 0.0
    return None if length < LEAST_DRAFTED else length


def least_accepted(view: View) -> float:
    """Return the tokens that a verified step must give to pay for its drafts."""
    return 1.0 + DRAFT_COST * (view.facts.size("speculative_num_steps") or USUAL_DRAFTS)


def hicache(view: View) -> float | None:
    """Lines about what HiCache could not do."""
    if view.hicache is None:
        return None
    stays = view.hicache.word == "kernel"  # it was printed once, and holds until the next start
    return view.totals["hicache"] or float(stays)


def costly_settings(view: View) -> list[tuple[str, Value, Value, str]]:
    """Return the settings of a start that slow every load down: the argument, its value, a better one, and what it does in words."""
    facts, found = view.facts, list[tuple[str, Value, Value, str]]()
    for arg in ("disable_cuda_graph", "disable_decode_cuda_graph"):
        if facts.is_on(arg) and not facts.role:
            found.append((arg, True, False, "CUDA graphs are switched off"))
    chunk = facts.typed("chunked_prefill_size")
    if chunk is not None and 0 < chunk <= TINY_CHUNK:
        words = f"prompts are computed in chunks of {chunk:g} tokens, and a chunk takes about as long as one of 1,024"
        found.append(("chunked_prefill_size", chunk, float(SMALL_CHUNK), words))
    return found


def slowed_at_once(view: View) -> float | None:
    """Count the costly settings. Under load graphs have a row of their own, and chunks count where prompts fill them."""
    if view.has_enough_load:
        fills = view.totals["full_lines"] >= FULL_BATCHES * view.totals["prefill_lines"] > 0
        return float(fills and any(arg == "chunked_prefill_size" for arg, *_ in costly_settings(view)))
    return None if not view.facts.arguments or view.facts.is_cpu else float(len(costly_settings(view)))


def _sharing(view: View) -> float | None:
    """Return the cached share of prompt tokens, without what retracted requests and further answers find of their own."""
    totals, cached, posts = view.totals, view.cached_share, view.totals["generation_posts"]
    # Preempted requests find their own prompts, and nothing counts them; several answers to one prompt find it cached.
    preempts = view.facts.is_on("enable_priority_scheduling")
    several = posts and totals["started"] > SEVERAL_EACH * posts
    if view.waited_share <= view.profile.frequent_share or cached is None or preempts or several:
        return None
    own = totals["repeated"] / totals["cached"] if totals["cached"] else 0.0
    came_back = totals["retracted"] * (view.prompt or 0.0) / max(totals["computed"] + totals["cached"], 1.0)
    return max(cached * (1.0 - (1.0 if own > 0.5 else own)) - came_back, 0.0)


def shared_prefixes(view: View) -> float | None:
    """The share of the prompt tokens that were cached under fcfs."""
    cannot_gain = (view.cached_share or 0.0) >= SHARING[1]
    return None if view.facts.arguments.get("schedule_policy") != "fcfs" or cannot_gain else _sharing(view)


def no_prefixes(view: View) -> float | None:
    """The share of the prompt tokens that were cached under a policy that sorts by prefixes."""
    sorts = view.facts.arguments.get("schedule_policy") in ("lpm", "dfs-weight")
    return view.cached_share if sorts and _sharing(view) is not None else None


def proven_flags(view: View) -> float | None:
    """Flags away from their defaults that figures show to be the cause."""
    return float(len(suspects.beside(view)))


def fits_one_gpu(view: View) -> float | None:
    """GB of the weights of the whole model, where tensor parallelism alone splits them and the load would fit as well."""
    facts, weights, usage = view.facts, view.facts.weights_gb, view.mean("usage")
    other = ("dp_size", "ep_size", "moe_dense_tp_size", "enable_ep_moe", "pp_size")
    spread = facts.attention_ranks > 1 or any((facts.number(each) or 0.0) > (each != "enable_ep_moe") for each in other)
    if (facts.number("tp_size") or 1.0) <= 1 or spread or facts.is_cpu or not weights or not facts.capacity_gb:
        return None
    model = weights * facts.shards
    left = 1.0 - (model - weights) / facts.pools_gb if facts.pools_gb else 1.0  # of a KV cache
    return None if usage is not None and usage > view.profile.token_usage_target * left else model


def one_gpu_gb(view: View) -> float:
    """Return the GB of weights that leave a GPU room for its KV cache."""
    return (USUAL_FRACTION - ROOM_FOR_POOL) * (view.facts.capacity_gb or 0.0)


def replicas(view: View) -> float | None:
    """Replicas that one server runs by itself."""
    facts = view.facts
    is_other = facts.is_cpu or facts.is_on("enable_dp_attention") or facts.attention_ranks > 1
    return None if is_other else facts.number("dp_size")


def small_batches(view: View) -> float | None:
    """The batch of a small model without torch.compile."""
    facts, weights = view.facts, view.facts.weights_gb
    if facts.is_cpu or facts.without_graph or facts.number("enable_torch_compile") != 0:
        return None
    is_quantized = facts.is_first_edition and facts.word("quantization")
    return None if weights is None or weights * facts.shards >= SMALL_MODEL_GB or is_quantized else view.batch()


def large_weights(view: View) -> float | None:
    """The share of a GPU's memory that unquantized weights take, where the KV cache is short of it."""
    facts, weights, capacity = view.facts, view.facts.weights_gb, view.facts.capacity_gb
    if facts.is_cpu or facts.arguments.get("quantization", "?") is not None or _QUANTIZED.search(facts.model):
        return None
    full = (view.share("admission", "pool_full") or 0.0) > view.profile.frequent_share
    is_short = full or view.retractions_a_minute > view.retractions_tolerated
    return weights / capacity if weights is not None and capacity and is_short else None


def experts(view: View) -> float | None:
    """GPUs that share every expert of a mixture of experts."""
    facts = view.facts
    if facts.is_cpu or not _MOE.search(facts.model) or "tp_size" not in facts.arguments:
        return None
    if (facts.number("ep_size") or 1.0) > 1 or facts.is_on("enable_ep_moe") or facts.is_on("enable_deepep_moe"):
        return None
    return facts.number("tp_size") or 1.0


def latent_pool_full(view: View) -> float | None:
    """The share of the time with a full KV cache that every GPU stores."""
    facts = view.facts
    if facts.is_cpu or not _LATENT.search(facts.model) or (facts.number("tp_size") or 1.0) < DP_ATTENTION_GPUS:
        return None
    split = facts.is_on("enable_dp_attention") or facts.attention_ranks > 1
    return None if split else view.share("admission", "pool_full")


def recommended(view: View) -> float | None:
    """What SGLang itself recommends in the lines of its start, for a flag that this release has."""
    return float(len(view.facts.recommended()))


def settings(view: View) -> float | None:
    """Settings other than the guide's for this workload."""
    return float(len(differing(view))) if view.facts.knows_arguments else None


def differing(view: View) -> list[profiles.Setting]:
    """Return the guide's settings for the profile's workload that this server has not, where nothing that was seen speaks against them."""
    facts, found = view.facts, []
    for setting in view.profile.settings if facts.knows_arguments else ():
        arg = facts.graph_arg if setting.arg == "cuda_graph_max_bs" else setting.arg
        now: object = facts.typed(arg) if isinstance(setting.value, float) else facts.arguments.get(arg)
        if setting.is_switch:
            now = float(facts.is_on(arg))
        elif arg == facts.graph_arg:
            now = facts.largest_captured
        elif arg == "max_running_requests":
            now = facts.least_limit if now is None else now
        is_other = now is not None and now != setting.value and (setting.needed or not facts.is_cpu)
        if is_other and facts.flag(arg) and _fits_evidence(setting, view):
            found.append(replace(setting, arg=arg))
    return found


def _fits_evidence(setting: profiles.Setting, view: View) -> bool:
    """Whether what was seen does not speak against the guide's setting; where a row of its own decides, it is left to that."""
    online, batch = view.profile.queue_lower is None, view.batch() or 0.0
    tests: dict[str, bool] = {
        "mem_fraction_static": view.facts.reserve_gb is None and online,
        "max_running_requests": isinstance(setting.value, float) and online and batch > setting.value,
        "schedule_conservativeness": online
        and (view.share("admission", "no_queue") or 0.0) > view.profile.frequent_share,
        "chunked_prefill_size": view.prefill_share > MOSTLY_PREFILL / 2,
        "schedule_policy": (view.cached_share or 0.0) >= SHARING[0],
        # SGLang captures no size above the running limit.
        "cuda_graph_max_bs": (view.facts.largest_captured or 0.0) < (view.facts.least_limit or inf),
        "page_size": view.facts.word("attention_backend") not in PAGED_BACKENDS,
    }
    return tests.get(setting.arg, True)
