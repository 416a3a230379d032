"""The values that advice names: computed from what the running server told of itself and of its load. Pure.

A value that is set already, or that would change nothing, is not given. Sources: the tuning guide for the steps, GUIDE's
second part for what it leaves out (CENSUS §6 has versions and lines).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor
from typing import TYPE_CHECKING, Literal

from sglang_tuning_exporter.guide.clients import at_least, at_most
from sglang_tuning_exporter.guide.demand import demand, longest_answer, mean_prompt
from sglang_tuning_exporter.guide.measurement import CONSERVATIVENESS_CEILING
from sglang_tuning_exporter.sglang.flags import DP_ATTENTION_FACTOR

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tuning_exporter.guide.evidence import Past
    from sglang_tuning_exporter.guide.profiles import Profile
    from sglang_tuning_exporter.server import ServerFacts
    from sglang_tuning_exporter.window import Totals

RAISED_CONSERVATIVENESS, LOWERED_CONSERVATIVENESS, USUAL_CONSERVATIVENESS = 1.3, 0.3, 1.0  # the guide's values to try
# Of what they ask for, running requests may have used this much before a retraction leaves the ratio higher than 0.3 starts at
# (0.7 x 0.3): from there on a low flag means bursts of retractions and long over-care after each.
USED_LITTLE = 0.21
LOWERED_LIMIT = 0.8  # of the batch that runs, where the pool is too small for it
PEAKS = (
    "enlarge the pool (--mem-fraction-static, --kv-cache-dtype fp8_e4m3): it is full at peaks only (token usage is {:.2f}), and fewer"
    " requests at once would cost more than what is computed again"
)
FEW = (
    "enlarge the pool (--mem-fraction-static, --kv-cache-dtype fp8_e4m3): {:.0f} % of the requests are taken back, and fewer requests"
    " at once would cost more than what is computed again"
)
CHEAP = (
    "enlarge the pool (--mem-fraction-static, --kv-cache-dtype fp8_e4m3): {:.1f} retractions for each request, but of prompts of {:.0f}"
    " tokens it is cheap to compute them again, and fewer requests at once would cost more"
)
CAPPED = "the pool holds no more than this flag allows; where less fits into memory, SGLang takes what fits"
# Retractions for each request that is started. Up to the first they are the price of a pool that is full: what is computed again
# is a prefill, which costs a few per cent of the decoding it repeats. Below the second, running fewer costs more than it saves.
TOLERATED, OFTEN_TAKEN_BACK = 0.05, 0.5
# On a real engine four retractions for each request with prompts of 24 tokens cost less than running a fifth fewer: a tenth of the
# throughput, and first tokens 2.6 times as late. Of longer prompts nobody has measured it.
LONG_PROMPT = 1000.0
IN_FORCE = 0.95  # a pool is whole pages, so a little less than its cap
RECOVERS = (
    "admission was over-careful after retractions for {:.0f} % of the time: expect more throughput and shorter waits, but not"
    " fewer retractions"
)
SMALLER_REQUESTS = (
    "ask for {}: the flag is low enough, and a new request waits until all that it asks for fits beside what is kept for"
    " those that run"
)
FEWER_TOKENS = "fewer max_new_tokens"
TOKENS_ENOUGH = "at most {:,} max_new_tokens (now about {:,}{}; 99 % of the answers end within {:,.0f})"
TOKENS_STEP = 64
MOST_KEPT = 4096  # no more is kept free, whatever a request asks for
# Of what is asked for: where answers need more, asking for less gains nothing that is worth an answer cut short.
MOSTLY_NEEDED = 0.8
SMALL_BATCH = 8
USUAL_GRAPH_SIZES = (
    *(8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256),
    *(320, 384, 448, 512, 640, 768),
)
SMALL_CHUNK = 4096.0  # what the guide falls back to where memory is short: less is needed hardly ever
SHORT_PROMPT = 0.125  # of a chunk: with this mean at most one prompt in eight fills it
LARGEST_CHUNK = 16384  # the guide's for throughput and long context (E5)


@dataclass(frozen=True, slots=True)
class Case:
    """What advice may look at: the past, and the ids of all rows that hold in it."""

    past: Past
    held: frozenset[str] = frozenset()

    @property
    def facts(self) -> ServerFacts:
        """What is known of the server."""
        return self.past.facts

    @property
    def recent(self) -> Totals:
        """What happened lately."""
        return self.past.recent

    @property
    def profile(self) -> Profile:
        """The thresholds in force."""
        return self.past.profile

    def present(self, arg: str) -> float | str | None:
        """Give what an argument is set to; None when it is not told or not set."""
        value = self.facts.args.get(arg) if arg else None
        return value if isinstance(value, str) and value else self.facts.arg(arg)


@dataclass(frozen=True, slots=True)
class Value:
    """What to set an argument to; `arg` where it is not the row's own (empty: none at all), `words` where words say it better."""

    suggested: float | str | None
    current: float | str | None = None
    gain: str = ""
    arg: str | None = None
    words: str = ""
    row: str = ""  # whose words to use where it is another row's advice
    is_switch: bool = False

    @property
    def changes(self) -> bool:
        """Whether the suggestion is anything but the present value."""
        return self.current is None or self.suggested != self.current


def _people(words: str) -> list[Value]:
    """Advise people, not a flag."""
    return [Value(None, arg="", words=words)]


def _conservativeness(case: Case) -> tuple[float | None, float]:
    """Give the flag's own value and the factor that the server multiplies it by."""
    printed = case.facts.arg("schedule_conservativeness")
    factor = DP_ATTENTION_FACTOR if case.facts.arg("enable_dp_attention") else 1.0
    return (None if printed is None else round(printed / factor, 4)), factor


@dataclass(frozen=True, slots=True)
class _RunningLimit:
    """`--max-running-requests`: its value as a flag, and what of it is in force, both for all that share it."""

    flag: float | None
    in_force: float | None
    shared_by: float

    @property
    def is_cut_short(self) -> bool:
        """Whether the KV pool allows fewer than the flag asks for: then raising the flag changes nothing."""
        return self.flag is not None and self.in_force is not None and self.in_force + self.shared_by <= self.flag


def _running_limit(facts: ServerFacts) -> _RunningLimit:
    shared_by = facts.limit_shared_by
    flag = facts.arg("max_running_requests")
    told = max(facts.running_limits.values(), default=None)
    return _RunningLimit(flag, flag if told is None else told * shared_by, shared_by)


def _fewer(case: Case, quantile: float, share: float) -> Value | None:
    """Run only `share` of the batch that ran; None where one request is all there is."""
    limit = _running_limit(case.facts)
    ran = case.recent.running_quantile(quantile)
    known = [figure for figure in (limit.in_force, ran * limit.shared_by if ran else None) if figure]
    current = limit.flag or limit.in_force
    if not known:
        return Value(None, current)
    suggested = max(1.0, float(int(share * min(known))))
    return None if current is not None and suggested >= current else Value(suggested, current)


def _retracting(case: Case) -> list[Value]:
    current, factor = _conservativeness(case)
    # 4.33 x 0.3 is 1.299: who followed the advice is there.
    if current is None or current * factor < RAISED_CONSERVATIVENESS - 0.01:
        recovering = case.recent.share("admission", "recovering") or 0.0
        gain = RECOVERS.format(100 * recovering) if recovering > case.profile.frequent_share else ""
        return [Value(round(RAISED_CONSERVATIVENESS / factor, 2), current, gain)]
    return _ineffective(case)


def _why_not_fewer(case: Case) -> str:
    """Say why running fewer at once would cost more than it saves; empty where it may help."""
    usage, share, prompt = case.recent.mean("usage"), _taken_back(case), mean_prompt(case.past)
    if usage is not None and usage < case.profile.token_usage_target:
        # It would end what happens at peaks only, and then be itself what requests wait for.
        return PEAKS.format(usage)
    if share is not None and share < OFTEN_TAKEN_BACK:
        return FEW.format(100 * share)
    if share is not None and prompt is not None and prompt < LONG_PROMPT:
        return CHEAP.format(share, prompt)
    return ""


def tolerated(case: Case) -> bool:
    """Say whether retractions are the price of a full pool: hardly a request is taken back, and the flag is where advice put it.

    That is high enough already, or lowered to 0.3, whose cost a few retractions are said to be: raised again for them, it
    would be lowered again for want of room.
    """
    current, factor = _conservativeness(case)
    share = _taken_back(case)
    if current is None or share is None or share >= TOLERATED:
        return False
    flag = current * factor + 0.01
    return flag >= RAISED_CONSERVATIVENESS or LOWERED_CONSERVATIVENESS <= flag < USUAL_CONSERVATIVENESS


def _larger_pool(case: Case) -> Value | None:
    """Raise the flag that alone keeps the pool small; None where it does not.

    SGLang takes the least of it and of what fits (init_memory_pool, srt/model_executor/model_runner.py in 0.4.9;
    srt/mem_cache/kv_cache_configurator.py in 0.5.23), so too high a value does no harm.
    """
    cap, pool = case.facts.arg("max_total_tokens"), max(case.facts.kv_pool_tokens.values(), default=None)
    if not cap or (pool is not None and pool < IN_FORCE * cap):
        return None
    return Value(2 * cap, cap, CAPPED, "max_total_tokens")


def _taken_back(case: Case) -> float | None:
    """Give retractions for each request that is started; None where nothing tells of those."""
    started = case.past.latency.get("time_to_first_token")
    if started is None or not started.observations:
        return None
    return case.past.retractions_per_minute / case.past.per_minute(started.observations)


def _ineffective(case: Case) -> list[Value]:
    if tolerated(case):
        return []
    larger = _larger_pool(case)
    if larger is not None:
        return [larger]
    words = _why_not_fewer(case)
    if words:
        return _people(words)
    fewer = _fewer(case, 0.5, LOWERED_LIMIT)
    if fewer is None:
        return []
    gain = f"above {CONSERVATIVENESS_CEILING} conservativeness changes nothing"
    return [Value(fewer.suggested, fewer.current, gain, "max_running_requests", row="conservativeness_ineffective")]


def _too_conservative(case: Case) -> list[Value]:
    current, factor = _conservativeness(case)
    target = round(LOWERED_CONSERVATIVENESS / factor, 2)
    if current is not None and current <= target:
        # Whatever the flag, a request is admitted only where the whole of its max_new_tokens fits, 4096 at most
        # (PrefillAdder.add_one_req, srt/managers/schedule_policy.py, 0.4.9 to 0.5.23).
        return _smaller_requests(case)
    asking = demand(case.past)
    if current is not None and asking is not None and asking.share > USED_LITTLE:
        # They do not end early, which is what lowering is for. Above the ceiling the flag does nothing but mislead.
        above = current * factor > CONSERVATIVENESS_CEILING
        return [Value(round(USUAL_CONSERVATIVENESS / factor, 2), current)] if above else []
    return [Value(target, current)]


def _smaller_requests(case: Case) -> list[Value]:
    """Say how many max_new_tokens are enough; nothing where clients ask for little more than they use."""
    asking, longest = demand(case.past), longest_answer(case.past)
    if longest is None or asking is None:
        return _people(SMALLER_REQUESTS.format(FEWER_TOKENS))
    enough = TOKENS_STEP * ceil(longest / TOKENS_STEP)
    if enough > MOSTLY_NEEDED * asking.asked:
        return []
    asked = min(TOKENS_STEP * round(asking.asked / TOKENS_STEP), MOST_KEPT)
    told = TOKENS_ENOUGH.format(enough, asked, " or more" if asked >= MOST_KEPT else "", longest)
    return _people(SMALLER_REQUESTS.format(told))


def _at_limit(case: Case) -> list[Value]:
    limit = _running_limit(case.facts)
    current = limit.flag or limit.in_force
    usage = case.recent.mean("usage")
    if not current or usage is None:
        return [Value(None, current)]
    # Usage grows with the requests that run; no more than eightfold at once: nobody has seen how they behave together.
    room = min(8.0, case.profile.token_usage_target / usage) if usage > 0 else 8.0
    suggested = float(_round_down(current * room))
    # A limit that was lowered because of retractions leaves this much room, and is not to be raised again for it.
    if limit.is_cut_short or suggested <= current or LOWERED_LIMIT * suggested <= current + 1:
        return []
    return [Value(suggested, current, f"token usage is {usage:.2f} at this limit")]


def _round_down(value: float) -> int:
    step = 1 if value < 32 else 8 if value < 256 else 64
    return max(int(value) // step * step, 1)


def _recovering(case: Case) -> list[Value]:
    current, factor = _conservativeness(case)
    if current is not None and current * factor >= USUAL_CONSERVATIVENESS - 0.01:
        return _people("wait: it comes down by itself within minutes")
    return [Value(round(USUAL_CONSERVATIVENESS / factor, 2), current)]


def _hybrid(case: Case) -> list[Value]:
    """Name the pool that is full, and the argument that gives it more where this release has one."""
    pool = case.past.fullest_pool
    arg = {"swa": "swa_full_tokens_ratio", "mamba": "mamba_full_memory_ratio"}.get(pool, "")
    current = case.facts.arg(arg)
    words = f"the {pool} pool is full: give it more of the memory"
    if current is None:
        return _people(words)
    if pool == "swa" and current >= 1.0:
        return []
    return [Value(min(round(1.25 * current, 2), 1.0 if pool == "swa" else 4.0), current, words, arg)]


def _chunks(case: Case) -> list[Value]:
    current = case.facts.arg("chunked_prefill_size")
    reserve = case.facts.reserve_gb
    if current is not None and (current <= 0 or current >= LARGEST_CHUNK):
        return _people("reuse more prefixes, separate prefill and decode, or add a replica")
    if reserve is not None and reserve < case.profile.reserve_lower_gb:
        # A larger chunk takes memory that is not there.
        return _people("lower --mem-fraction-static first: a larger chunk needs memory that is not left")
    if current is None:
        return [Value(None)]
    return [Value(float(max(min(2 * int(current), LARGEST_CHUNK), SMALL_CHUNK)), current)]


def _long_prompts(case: Case) -> list[Value]:
    chunk, prompt = case.facts.arg("chunked_prefill_size"), mean_prompt(case.past)
    if chunk is not None and prompt is not None and prompt < SHORT_PROMPT * chunk:
        return []  # hardly one is as long as a chunk: a larger one would change nothing
    return _chunks(case)


def _balance(case: Case) -> list[Value]:
    method = case.facts.args.get("load_balance_method")
    if method in ("round_robin", "auto"):
        return [Value("total_requests", str(method))]
    return _people("put a router in front that knows the ranks' load")


def _graphs_off(case: Case) -> list[Value]:
    for arg in ("disable_cuda_graph", "disable_decode_cuda_graph"):
        if case.facts.arg(arg):
            return [Value(0.0, 1.0, arg=arg, words="start without it", is_switch=True)]
    backend = case.facts.args.get("attention_backend")
    told = f" (now {backend})" if isinstance(backend, str) else ""
    return [
        Value(
            None,
            backend if isinstance(backend, str) else None,
            arg="attention_backend",
            words=f"one that can be captured{told}",
        )
    ]


def _word(arg: str, value: str) -> Callable[[Case], list[Value]]:
    return lambda case: [] if case.present(arg) == value else [Value(value, case.present(arg))]


def _pool_short(case: Case) -> list[Value]:
    """Many fewer run than may, because the pool is full: nothing to say where they are close."""
    limit = _running_limit(case.facts)
    running = case.recent.mean("running")
    if not limit.in_force or running is None or running * limit.shared_by * 2 >= limit.in_force:
        return []
    larger = _larger_pool(case)
    if larger is not None:
        return [larger]
    if case.facts.is_cpu or case.facts.args.get("kv_cache_dtype") not in ("auto", None):
        return _people("enlarge the pool (--mem-fraction-static, more GPUs), or send shorter requests")
    return _word("kv_cache_dtype", "fp8_e4m3")(case)


def _one_gpu(case: Case) -> list[Value]:
    return [Value(1.0, case.facts.arg("tp_size"))]


def _experts(case: Case) -> list[Value]:
    shards = case.facts.arg("tp_size")
    if "ep_size" in case.facts.args and shards:
        return [Value(shards, case.facts.arg("ep_size"))]
    return _people("use expert parallelism, by the flag that this release has for it")


def _switch_on(arg: str) -> Callable[[Case], list[Value]]:
    return lambda case: [] if case.facts.arg(arg) else [Value(1.0, 0.0, words="add it", is_switch=True)]


def _smaller_batch(case: Case) -> list[Value]:
    """Bring the step time to the objective: it grows with the batch, at most in proportion."""
    batch = case.recent.running_quantile(0.5)
    if batch is not None and batch <= SMALL_BATCH:
        return []  # it is not the batch that makes each step slow
    recent, objective = case.past.latency.get("inter_token"), case.profile.inter_token_seconds
    mean = None if recent is None else recent.mean_seconds
    share = 0.5 if not mean or not objective or mean <= objective else max(objective / mean, 0.25)
    fewer = _fewer(case, 0.5, share)
    return [] if fewer is None else [fewer]


def _reserve(side: Literal["above", "below"]) -> Callable[[Case], list[Value]]:
    return lambda case: _reserve_to(case, too_large=side == "above")


def _reserve_to(case: Case, *, too_large: bool) -> list[Value]:
    facts, reserve = case.facts, case.facts.reserve_gb
    current = facts.arg("mem_fraction_static")
    if reserve is None or current is None:
        return [Value(None, current)]
    # Larger graphs that are advised beside it take their memory first.
    growth = _graph_growth_gb(case) if "cuda_graph_not_covering" in case.held else 0.0
    if growth is None and too_large:
        return []
    capacity = facts.memory_before_weights_gb
    spare = reserve - (growth or 0.0) - case.profile.reserve_aim_gb
    step = spare / capacity if capacity else (0.01 if spare > 0 else -0.01)
    # Round away from OOM, in the guide's steps of 0.01; the small term undoes what binary fractions lose.
    suggested = min(max(floor((current + step) * 100 + 1e-6) / 100, 0.1), 0.95)
    if (suggested <= current) if too_large else (suggested >= current):
        return []
    return [Value(suggested, current, _tokens_gained(facts, (suggested - current) * capacity if capacity else None))]


def _tokens_gained(facts: ServerFacts, gigabytes: float | None) -> str:
    tokens = sum(facts.kv_pool_tokens.values()) / max(len(facts.kv_pool_tokens), 1)
    if gigabytes is None or not facts.kv_pool_gb or not tokens:
        return ""
    gained = gigabytes / facts.kv_pool_gb * tokens
    return f"{gigabytes:+.1f} GB for the KV pool: {gained:+,.0f} tokens, {100 * gained / tokens:+.0f} %"


def _oom_prefill(case: Case) -> list[Value]:
    current = case.facts.arg("chunked_prefill_size")
    # -1 is no chunking at all.
    if current is None or current <= 0 or current > 4096:
        return [Value(4096.0, current)]
    if current > 2048:
        return [Value(2048.0, current)]
    return _oom_any(case)


def _oom_decode(case: Case) -> list[Value]:
    fewer = _fewer(case, 0.99, 0.75)
    return _oom_any(case) if fewer is None else [fewer]


def _oom_any(case: Case) -> list[Value]:
    current = case.facts.arg("mem_fraction_static")
    if current is None or current > 0.7:
        suggested = 0.8 if current is None or current > 0.8 else 0.7
    else:
        suggested = round(current - 0.05, 2)
    if suggested < 0.1:
        return []
    return [Value(suggested, current, arg="mem_fraction_static", row="out_of_memory_any")]


def _graph_memory(case: Case) -> list[Value]:
    """Less for the pool, in the guide's steps; and no graphs for batches that never run."""
    current = case.facts.arg("mem_fraction_static")
    suggested = None if current is None else max(round(current - 0.05, 2), 0.1)
    advised = [Value(suggested, current)]
    largest, ran = case.facts.largest_captured, case.recent.running_quantile(0.99)
    if largest and ran:
        enough = next((size for size in USUAL_GRAPH_SIZES if size >= ran), largest)
        if 2 * enough <= largest:
            gain = f"99 % of the time at most {ran} requests run together"
            advised.insert(0, Value(float(enough), float(largest), gain, case.facts.graph_flag_arg))
    return advised


def _larger_graph(case: Case) -> tuple[float | None, float | None, int | None]:
    """Give the present and the next largest captured batch, and the batch that is not exceeded 99 % of the time."""
    current = case.facts.arg(case.facts.graph_flag_arg) or (
        float(case.facts.largest_captured) if case.facts.largest_captured else None
    )
    batch = case.recent.running_quantile(0.99)
    if batch is None:
        return current, None, None
    # Useful to 512, with much tensor parallelism to 768 (E5).
    most = 768 if (case.facts.arg("tp_size") or 1) >= 8 else 512
    return current, float(min(next((size for size in USUAL_GRAPH_SIZES if size >= batch), most), most)), batch


def _graph_growth_gb(case: Case) -> float | None:
    """Estimate the memory that larger graphs take beyond the present ones: in proportion to the largest batch."""
    current, suggested, _ = _larger_graph(case)
    if suggested is None or not current or case.facts.graph_gb is None:
        return None
    return case.facts.graph_gb * max(suggested / current - 1.0, 0.0)


def _graphs(case: Case) -> list[Value]:
    """The smallest usual size that covers the batch, and what its memory costs the pool where the reserve cannot pay for it."""
    arg = case.facts.graph_flag_arg
    current, suggested, batch = _larger_graph(case)
    if suggested is None:
        return [Value(None, current, arg=arg, row="cuda_graph_not_covering")]
    if current is not None and suggested <= current:
        return []
    gain = f"covers batches up to {suggested:g}; 99 % of the time they were at most {batch}"
    return [Value(suggested, current, gain, arg, row="cuda_graph_not_covering"), *_paid_by_pool(case)]


def _paid_by_pool(case: Case) -> list[Value]:
    facts, reserve, profile = case.facts, case.facts.reserve_gb, case.profile
    fraction, capacity = facts.arg("mem_fraction_static"), facts.memory_before_weights_gb
    if fraction is None or reserve is None:
        return []
    if not profile.reserve_lower_gb <= reserve <= profile.reserve_upper_gb:
        return []  # the finding of a reserve too small or too large accounts for the larger graphs
    growth = _graph_growth_gb(case)
    if growth is None or not capacity:
        suggested, told = round(fraction - 0.01, 2), ""
    elif reserve - growth >= profile.reserve_lower_gb:
        return []
    else:
        suggested = floor((fraction - (profile.reserve_aim_gb - reserve + growth) / capacity) * 100 + 1e-6) / 100
        told = (
            f"the larger graphs take about {growth:.1f} GB; {_tokens_gained(facts, (suggested - fraction) * capacity)}"
        )
    if not 0.1 <= suggested < fraction:
        return []
    return [Value(suggested, fraction, told.removesuffix("; "), "mem_fraction_static", row="memory_reserve_too_small")]


def _at_once(words: Callable[[Past], str]) -> Callable[[Case], list[Value]]:
    """Advise clients, with a figure where there is one."""
    return lambda case: _people(words(case.past))


SIZERS: dict[str, Callable[[Case], list[Value]]] = {
    "client_too_slow": _at_once(at_least),
    "queue_too_long": _at_once(at_most),
    "latency_queue": _at_once(at_most),
    "retracting_too_often": _retracting,
    "conservativeness_ineffective": _ineffective,
    "admission_too_conservative": _too_conservative,
    "admission_recovering": _recovering,
    "hybrid_pool_full": _hybrid,
    "running_at_limit": _at_limit,
    "prefill_bound": _chunks,
    "latency_long_prompts": _long_prompts,
    "latency_batch_too_large": _smaller_batch,
    "dp_imbalanced": _balance,
    "running_far_below_limit": _pool_short,
    "memory_reserve_too_large": _reserve("above"),
    "memory_reserve_too_small": _reserve("below"),
    "graph_memory_short": _graph_memory,
    "out_of_memory_prefill": _oom_prefill,
    "out_of_memory_decode": _oom_decode,
    "out_of_memory_any": _oom_any,
    "cuda_graph_not_covering": _graphs,
    "cuda_graph_off": _graphs_off,
    "shared_prefixes_unused": _word("schedule_policy", "lpm"),
    "prefix_policy_wasted": _word("schedule_policy", "fcfs"),
    "quantization_candidate": _word("quantization", "fp8"),
    "data_parallel_would_fit": _one_gpu,
    "expert_parallel_candidate": _experts,
    "torch_compile_candidate": _switch_on("enable_torch_compile"),
    "dp_attention_candidate": _switch_on("enable_dp_attention"),
}
