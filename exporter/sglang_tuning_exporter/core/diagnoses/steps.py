"""Steps of advice that several diagnoses share: how a flag is set, how far, and why. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import floor, inf

from sglang_tuning_exporter.config.profiles import DEFAULT
from sglang_tuning_exporter.core.diagnoses.base import (
    CHUNK,
    CONSERVATIVENESS,
    FRACTION,
    LIMIT,
    Beside,
    Offer,
    When,
    fact,
    waits_often,
)
from sglang_tuning_exporter.core.diagnoses.native import Native, quantile
from sglang_tuning_exporter.core.findings import Change, Value
from sglang_tuning_exporter.core.view import View
from sglang_tuning_exporter.sglang import flags
from sglang_tuning_exporter.sglang.metrics import Histogram

LATE_TIMES, SLOW_BURN_TIMES = 10.0, 6.0  # error budgets above which TTFT, and inter-token latency, are late
FULL_BATCHES = 0.25  # of the prefill batches, at least, for a larger chunk to matter
FEWER = Change(
    direction="slow down",
    words="send fewer requests at once, or add a replica",
    why="Requests arrive faster than SGLang finishes them. Slow the clients down, or add a replica behind the router.",
    not_if="another finding of this server names a flag: change it first",
)
LOWERED_LIMIT, FEWER_DECODING = 0.8, 0.75  # of the running batch
SMALL_BATCH = 8
LARGEST_CHUNK, SMALL_CHUNK, LEAST_CHUNK = 16384, 4096, 2048
GRAPH_SIZES = (8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768)
# The guide: 512 or 768, the larger at large tensor parallelism.
MOST_GRAPH, MOST_GRAPH_AT_LARGE_TP, LARGE_TP = 512, 768, 8
LEAST_FRACTION, MOST_FRACTION, USUAL_FRACTION = 0.1, 0.95, 0.9
CAP_IN_FORCE = 0.95  # the KV cache has whole pages, so a little less than its cap
_EIGHT_BITS = ("fp8_e4m3", "fp8_e5m2")  # the first one that a release accepts
ALLOWED_WAIT = 0.5  # of the longest wait, as the mean wait
PRESENT = "the present value"
# Advice to people. Without reasons it gets those of the diagnosis.
say = Change


def late(latency: str, times: float, name: str, because: Callable[[View, Histogram, float], bool]) -> When:
    """Return the condition that too many observations of a latency are above its objective.

    because: whether the diagnosis is the reason; if it is not, the figure does not pass its limit.
    """

    def measure(view: View) -> float | None:
        objective: float | None = getattr(view.profile, f"{latency}_seconds")
        observed = view.latency(latency)
        if objective is None or observed is None or view.hung:
            return None
        if observed.observations < view.profile.enough_observations:
            return None
        share = view.late_share(latency, objective)
        return share if because(view, observed, objective) else min(share, view.profile.late_bound(times))

    named = f"share of {name} above the objective"
    return fact(
        measure=measure, limit=lambda view: view.profile.late_bound(times), name=named, needs="metrics", in_log=False
    )


def by_queue(view: View, first_tokens: Histogram, _: float) -> bool:
    """Whether requests wait most of the time, or spend most of their time to first token in the queue."""
    wait, mean, often = view.wait, first_tokens.mean_seconds, view.profile.frequent_share
    return waits_often(view) or (wait is not None and mean is not None and wait > often * mean)


def set_flag(
    view: View,
    arg: str,
    to: Value = None,
    gain: str = "",
    words: str = "",
    *,
    now: Value = PRESENT,
    direction: str = "",
) -> Change:
    """Return a change of a flag; without a value, `words` say what to try.

    `now` and `direction` are given only where the arguments of the server do not show them.
    """
    now = _present(view, arg, to) if now is PRESENT else now
    if isinstance(to, bool):
        direction = direction or ("add" if to else "drop")
    elif isinstance(now, (int, float)) and isinstance(to, (int, float)) and not isinstance(now, bool):
        before = inf if arg == CHUNK and now <= 0 else now  # without chunks a prompt is computed at once
        direction = direction or ("raise" if to > before else "lower")
    removes = to is False and now is True
    return Change(
        arg=arg,
        direction=direction,
        words=words,
        flag=view.facts.flag(arg),
        now=now,
        to=setting(to),
        gain=gain,
        removes=removes,
    )


def in_words(change: Change, words: str) -> Change:
    """Return advice to people with the reasons of a change."""
    return replace(change, arg="", direction="", words=words)


def _present(view: View, arg: str, to: Value) -> Value:
    """Return the present value of a flag; None where it is not known."""
    facts = view.facts
    if isinstance(to, bool) or isinstance(facts.arguments.get(arg), bool):
        return facts.is_on(arg)
    if arg == facts.graph_arg:
        return facts.largest_captured
    if arg == LIMIT:
        flag, force = running_limit(view)
        return flag or force
    typed = facts.typed(arg)
    return typed if typed is not None else facts.word(arg) or None


def setting(value: Value) -> Value:
    """Return a value for a command line: whole numbers without a point."""
    return int(value) if isinstance(value, float) and value.is_integer() and not isinstance(value, bool) else value


def typed_settings(view: View) -> dict[str, object]:
    """Return the arguments in force, as typed."""
    arguments = view.facts.arguments
    multiplied = {CONSERVATIVENESS, CHUNK} & arguments.keys()
    return {**arguments, **{arg: view.facts.typed(arg) for arg in multiplied}}


def is_accepted(view: View, offer: Offer) -> bool:
    """Whether the release has the flags of an offer and accepts its values together, and each value is a new one."""
    release, changes = view.facts.release, offer if isinstance(offer, tuple) else (offer,)
    of_flags = [change for change in changes if change.arg]
    if any(change.to is not None and change.to == change.now for change in of_flags):
        return False
    if release is None or not of_flags:
        return True
    values = {change.arg: change.to for change in of_flags if change.to is not None}
    return all(change.flag for change in of_flags) and flags.have_effect(release, values, typed_settings(view))


def first_accepted(view: View, *offers: Offer) -> list[Offer]:
    """Return the first offer that the release accepts; nothing where it accepts none."""
    return [offer for offer in offers if is_accepted(view, offer)][:1]


def running_limit(view: View) -> tuple[float | None, float | None]:
    """Return --max-running-requests as typed, and the limit in force for all ranks that share it."""
    facts = view.facts
    least, observed = facts.least_limit, view.totals["limit_seen"] or None
    return facts.size(LIMIT), (least * facts.shared_by if least is not None else observed)


def run_fewer(view: View, ran: float | None, share: float) -> list[Change]:
    """Return the change to run only a share of the batch; nothing where each rank runs one request."""
    flag, force = running_limit(view)
    shared_by, now = view.facts.shared_by, flag or force
    known = [figure for figure in (force, ran * shared_by if ran else None) if figure]
    if not known:
        return [set_flag(view, LIMIT, words=f"about {100 * share:.0f} % of the batch that runs", direction="lower")]
    to = float(max(shared_by, int(share * min(known))))
    return [] if min(known) <= shared_by or (now and to >= now) else [set_flag(view, LIMIT, to, direction="lower")]


def fewer_decoding(view: View) -> list[Change]:
    """Return the change to run fewer requests than when memory ran out in decode."""
    return run_fewer(view, view.totals["failed_batch"] or view.batch(), FEWER_DECODING)


def larger_pool(view: View, tokens: float = 0.0) -> list[Change]:
    """Return the change to raise --max-total-tokens to at least so many tokens; nothing where it does not limit.

    SGLang uses the smaller of the flag and the tokens that fit into memory.
    """
    cap, pool = view.facts.size("max_total_tokens"), view.facts.pool()
    if not cap or (pool is not None and pool < CAP_IN_FORCE * cap):
        return []
    return [set_flag(view, "max_total_tokens", doubled(2 * cap, tokens), "twice the tokens, if the memory holds them")]


def eight_bits(view: View) -> str:
    """Return the 8-bit type that the release accepts for the KV cache; empty where one is in use or none accepted."""
    facts = view.facts
    if facts.is_cpu or not facts.arguments or facts.arguments.get("kv_cache_dtype") not in ("auto", None):
        return ""
    choices = flags.choices_of("kv_cache_dtype", facts.release) if facts.release else None
    return next((kind for kind in _EIGHT_BITS if choices is None or kind in choices), "")


def pool_flags(view: View) -> str:
    """Return the flags that enlarge the KV cache, as words of a sentence."""
    kind = eight_bits(view)
    return f"--mem-fraction-static, --kv-cache-dtype {kind}" if kind else "--mem-fraction-static"


def doubled(size: float, tokens: float) -> float:
    """Return a size, doubled until it holds so many tokens."""
    while size < tokens:
        size *= 2
    return size


def percents(fraction: float) -> float:
    """Return a fraction in whole percents, rounded down."""
    return floor(fraction * 100 + 1e-6) / 100  # rounded away from out of memory


def pool_tokens(view: View, gigabytes: float | None) -> str:
    """Return gigabytes as tokens of the KV cache, in words; empty where the KV cache is not known."""
    tokens, pools = view.facts.pool(), view.facts.pools_gb
    if gigabytes is None or not pools or not tokens:
        return ""
    gained = gigabytes / pools * tokens
    return f"{gigabytes:+.1f} GB for the KV cache: {gained:+,.0f} tokens, {100 * gained / tokens:+.0f} %"


def most_graph(view: View) -> int:
    """Return the largest batch for which the guide calls graphs useful."""
    return MOST_GRAPH_AT_LARGE_TP if (view.facts.number("tp_size") or 1) >= LARGE_TP else MOST_GRAPH


def graph_size(view: View, batch: float) -> float | None:
    """Return the smallest usual size of graphs that covers a batch; None where the guide calls no such size useful."""
    return next((float(size) for size in GRAPH_SIZES if batch <= size <= most_graph(view)), None)


def larger_graphs(view: View, size: float, now: float | None, gain: str) -> Offer:
    """Return the change to capture larger graphs, with less memory for the KV cache where they need it."""
    facts, profile, left = view.facts, view.profile, view.facts.reserve_gb
    raised = set_flag(view, facts.graph_arg, size, gain, now=now, direction="raise")
    fraction, capacity = facts.number(FRACTION), facts.capacity_gb
    growth = graph_growth(view, size / now if now else 1.0)
    if fraction is None or left is None or left > profile.reserve_upper_gb:
        return raised
    if growth is None or not capacity:
        to, words = round(fraction - 0.01, 2), ""
    elif left - growth >= profile.reserve_lower_gb:
        return raised
    else:
        to = percents(fraction - (profile.reserve_aim_gb - left + growth) / capacity)
        tokens = pool_tokens(view, (to - fraction) * capacity)
        words = "; ".join(filter(None, (f"the larger graphs take about {growth:.1f} GB", tokens)))
    return (raised, set_flag(view, FRACTION, to, words)) if LEAST_FRACTION <= to < fraction else raised


def graph_growth(view: View, times: float | None = None) -> float | None:
    """Return the GB that larger graphs need in addition; None where that is not known.

    times: how much larger the graphs are; None for as large as the batch needs.
    """
    taken = view.facts.gigabytes("decode_graph") or view.facts.gigabytes("graph")
    now, batch = view.facts.largest_captured, view.batch()
    if times is None:
        size = graph_size(view, batch) if batch else None
        times = size / now if size and now else None
    return None if taken is None or times is None else taken * max(times - 1.0, 0.0)


def chunk_in_force(view: View) -> tuple[float | None, int]:
    """Return the chunk as typed, and the number of ranks that share it."""
    return view.facts.typed(CHUNK), max(round(1 / view.facts.factor(CHUNK)), 1)


def smaller_chunk(view: View) -> list[Change]:
    """Return the change to lower the chunk to 4096, then 2048 for each rank; nothing where it is that small already.

    A chunk of -1, or one that is not known, counts as no chunk at all.
    """
    now, ranks = chunk_in_force(view)
    last = max(int(now or 0) // 2, SMALL_CHUNK) if ranks > 1 else SMALL_CHUNK
    present = now if now and now > 0 else inf
    step = next((step for step in (SMALL_CHUNK * ranks, LEAST_CHUNK * ranks, last) if present > step), None)
    return [] if step is None else [set_flag(view, CHUNK, float(step), direction="lower")]


def two_digits(requests: float) -> int:
    """Return a number of requests, rounded down to two digits."""
    digit = 10.0 ** max(len(f"{requests:.0f}") - 2, 0)
    return int(requests // digit * digit)


def fewer_requests(view: View, _: Beside) -> list[Change]:
    """Return how many requests to send at once so that none waits too long; nothing where that is not known."""
    running, queued, profile = view.sum("running"), view.sum("queued"), view.profile
    if running is None or not queued or not view.served:
        return []
    waiting, because = view.serving_ranks * profile.queue_upper, f"the queue limit is {profile.queue_upper:,.0f}"
    if (longest := profile.queue_wait_seconds) is not None:
        rate = view.totals["admitted_requests"] / view.served
        wait = ALLOWED_WAIT * min(longest, profile.time_to_first_token_seconds or longest)
        waiting, because = (
            rate * wait,
            f"SGLang starts about {rate:.2g} requests/s, and none should wait longer than {wait:g} s",
        )
        if not rate:
            return []
    wanted, now = two_digits(round(running)) + int(waiting), round(running + queued)
    words = f"send at most {wanted:,} request{'s' if wanted > 1 else ''} at once, or add a replica"
    return [replace(say(words=words), gain=f"now about {now:,}; {because}")] if 0 < wanted < now else []


# Reasons of a change that is the remedy of no diagnosis

CAPPED = Change(
    arg="max_total_tokens",
    direction="raise",
    why="--max-total-tokens keeps the KV cache smaller than GPU memory allows, and a small KV cache fills up with few"
    " requests.",
    not_if="no more fits into GPU memory: then SGLang uses what fits",
    cost="Less GPU memory stays free for peaks.",
)
HOST_MEMORY = Change(
    arg="hicache_ratio",
    direction="raise",
    why="The host's memory for the cache is full, so what leaves the GPU is dropped instead of kept.",
    not_if="the host has no more memory",
    cost="Host memory.",
)
_RANKS = Change(
    arg="dp_size",
    direction="raise",
    why="DP attention needs its number of ranks. With as many ranks as GPUs each KV cache entry is stored once.",
    not_if="few requests run at once: then latency gets worse",
    cost="SGLang then multiplies --schedule-conservativeness by 0.3 and divides --chunked-prefill-size by the number of"
    " ranks: set both again.",
)
_MICRO = Change(
    arg="pp_max_micro_batch_size",
    direction="raise",
    why="This flag limits each micro batch of the pipeline below its share of --max-running-requests.",
    not_if="the batches of the pipeline are not full",
    cost="Inter-token latency rises as more requests run together.",
)
_PREFILL_GRAPHS = Change(
    arg="cuda_graph_max_bs_prefill",
    direction="lower",
    why="It ran out while graphs of prefill were captured; the largest of them takes most of it.",
    not_if="it still does not fit: then --cuda-graph-backend-prefill=disabled, as SGLang's own error says",
    cost="Larger prefill batches run without a CUDA graph.",
)
REASONS: tuple[Change, ...] = (
    CAPPED,
    HOST_MEMORY,
    _RANKS,
    replace(_RANKS, arg="attn_dp_size"),
    _MICRO,
    replace(_MICRO, arg="max_micro_batch_size"),
    _PREFILL_GRAPHS,
    replace(_PREFILL_GRAPHS, arg="piecewise_cuda_graph_max_tokens"),
    Change(
        arg=LIMIT,
        direction="lower",
        why="Fewer requests at once need less of the KV cache and less GPU memory.",
        not_if="a single request is too long for the KV cache: then lower --context-length",
        cost="Fewer requests run at once, and the queue may grow.",
    ),
    Change(
        arg="cuda_graph_max_bs",
        direction="lower",
        why="SGLang captures CUDA graphs for batch sizes that never run, and each size takes GPU memory.",
        not_if="larger batches run at other times",
        cost="Larger batches run without a CUDA graph.",
    ),
    Change(
        arg="disable_cuda_graph_padding",
        direction="drop",
        why="Only batches of exactly a captured size use a CUDA graph; with padding every smaller batch does.",
        not_if="the batch has a captured size all the time",
    ),
    Change(
        arg="attention_backend",
        direction="set",
        why="This attention backend cannot be captured in a CUDA graph.",
        not_if="LoRA, speculative decoding or expert communication cannot be captured",
        cost="Another backend may be faster or slower at long prompts: measure both.",
    ),
)


def late_rule(alert: str, latency: str, times: float, name: str) -> Native:
    """Return the rule, without the exporter, for a latency that misses its objective by so many error budgets."""
    share = DEFAULT.late_bound(times)
    objective = DEFAULT.time_to_first_token_seconds if latency == "time_to_first_token" else DEFAULT.inter_token_seconds
    return Native(
        alert=alert,
        expr=f"{quantile(1 - share, f'{latency}_seconds')}",
        limit=f"> {objective:g}",
        seen=f"{100 * share:g} % of the {name}, the objective is {objective:g} s",
        form="humanizeDuration",
    )
