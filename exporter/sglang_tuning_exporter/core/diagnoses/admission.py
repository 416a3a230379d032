"""Why requests wait although SGLang runs others: limits, caches, reservations, unbalanced ranks. Pure."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from sglang_tuning_exporter.config.profiles import DEFAULT
from sglang_tuning_exporter.core.diagnoses.base import (
    CONSERVATIVENESS,
    FRACTION,
    LIMIT,
    NOT_IN_GUIDE,
    OFTEN,
    QUEUES,
    Beside,
    Diagnosis,
    Group,
    Offer,
    fact,
    figures,
    limit,
    look,
    mostly,
    waiting_figures,
    waits,
)
from sglang_tuning_exporter.core.diagnoses.life import SCHEDULER_STUCK
from sglang_tuning_exporter.core.diagnoses.memory import MEMORY_RESERVE_TOO_LARGE, aim_at_reserve
from sglang_tuning_exporter.core.diagnoses.native import Native, is_so
from sglang_tuning_exporter.core.diagnoses.prefixes import SHARED_PREFIXES_UNUSED
from sglang_tuning_exporter.core.diagnoses.retraction import RETRACTING_TOO_OFTEN
from sglang_tuning_exporter.core.diagnoses.steps import (
    LOWERED_LIMIT,
    SMALL_BATCH,
    eight_bits,
    first_accepted,
    graph_size,
    larger_graphs,
    larger_pool,
    running_limit,
    say,
    set_flag,
    setting,
)
from sglang_tuning_exporter.core.diagnoses.suspects import proven
from sglang_tuning_exporter.core.findings import Change, Figure
from sglang_tuning_exporter.core.view import LOWERED, View, explained

RARE_WAIT = 0.1  # of the time, on the least busy DP rank
MOST_TIMES, MOST_WITHOUT_GRAPHS = 8.0, 2.0  # the present limit, in one step
POOL_STEP = 1.25  # of a second cache


def _limit_figures(view: View) -> list[Figure]:
    """Return the figures of waiting requests, and how many run beside their limit."""
    limit = view.facts.least_limit or view.totals["limit_seen"] or None
    return [*waiting_figures(view), *figures(("running requests, mean", view.mean("running"), "count", limit))]


def _lacks_memory(view: View) -> bool:
    """Whether a full KV cache limits: not where its queue is what the profile calls good."""
    if any(Group.FILLS in effects for effects in proven(view).values()):
        return True
    if view.totals["elsewhere"] > view.profile.frequent_share * view.known["queue"]:  # of the other side of a pair
        return True
    if view.known["queue"] == 0:  # how long they wait is not in a log of decode lines alone
        return True
    return (
        view.totals["retraction_events"] > 1
        if view.profile.queue_lower is None
        else mostly(view, "queue", "below_range")
    )


def _imbalance(view: View) -> float | None:
    """The share of the time in which the busiest DP rank made requests wait, while another hardly ever did."""
    waited = view.waited()
    return max(waited.values()) if len(waited) > 1 and min(waited.values()) < RARE_WAIT else None


def _in_full(view: View) -> str:
    """Say that a release may reserve in full what requests ask for."""
    if not view.facts.may_reserve_in_full:
        return ""
    which = ", which this release" if view.facts.release else " and the release"
    since = "reserves in full" if view.facts.release else "reserves those in full (0.5.22 on)"
    return f"It does nothing where requests set ignore_eos{which} {since}: then more memory is the cure."


def _too_conservative(view: View, _: Beside) -> list[Offer]:
    """Lower the conservativeness; where it is low already, shorter answers are the only way."""
    now, target = view.facts.typed(CONSERVATIVENESS), round(LOWERED / view.facts.factor(CONSERVATIVENESS), 2)
    if now is None or now > target + 0.005:
        return [set_flag(view, CONSERVATIVENESS, target)]
    return [
        say(
            words=(
                "ask for fewer max_new_tokens: the flag is low enough; a new request waits until its whole"
                " max_new_tokens fits beside what SGLang reserves for running requests"
            ),
            why=(
                "SGLang starts a request only if its max_new_tokens (4096 at most) fits beside what it reserves for"
                " running requests."
            ),
            not_if="clients need the answers that long",
            cost="Longer answers are truncated.",
        )
    ]


def _at_limit(view: View, _: Beside) -> list[Offer]:  # noqa: PLR0911 - one for each thing that limits
    """Raise the limit as far as memory and the objective allow, by what else keeps it where it is."""
    flag, force = running_limit(view)
    now, usage = flag or force, view.mean("usage", "running_limit") or view.mean("usage")
    if not now or usage is None:
        return [set_flag(view, LIMIT)]
    if states := _more_states(view):
        return states
    if view.facts.reduced:
        return [_reduced_by_sglang(view, now)]
    room = _room(view, now, usage)
    if room <= 1.0 and _is_slow(view):
        words = (
            f"nothing: a token takes {view.step_seconds:.3g} s already, and more requests at once would make it longer"
        )
        return [say(words=words)]
    if (micro_batch := _larger_micro_batch(view, room)) is not None:
        return micro_batch
    if flag is not None and force is not None and force + view.facts.shared_by <= flag:
        return []  # the KV cache allows fewer than the flag
    to = float(_rounded(now * room))
    if to <= now or LOWERED_LIMIT * to <= now + 1:
        words = (
            f"nothing, or a little more memory for the KV cache: at a token usage of {usage:.2f} hardly more than"
            f" {now:g} fit"
        )
        return [say(words=words)]
    return _within_graphs(view, _raised_limit(view, to, now, usage), to, now, usage)


def _raised_limit(view: View, to: float, now: float, usage: float) -> Change:
    """Raise the limit; where the start is not in the log, the present value is the batch that stays."""
    gain = _gain_at_limit(view, to, now, usage)
    if view.facts.limits or running_limit(view)[0] is not None:
        return set_flag(view, LIMIT, to, gain, now=now, direction="raise")
    gain += f"; the start is not in this log: the batch stays at {now:g}"
    return set_flag(view, LIMIT, to, gain, now=now if view.totals["limit_seen"] else None, direction="raise")


def _reduced_by_sglang(view: View, now: float) -> Change:
    """Return what to do where SGLang itself reduced the limit at its start."""
    return say(
        words=(
            "make room for more requests (more memory for the KV cache): SGLang itself reduced the limit to"
            f" {view.facts.least_limit or now:g} for want of capacity, whatever --max-running-requests says"
        ),
        why="Its line in the start says so. A higher flag is reduced again.",
        not_if="memory is free for nothing else",
        cost="Less GPU memory stays free for peaks.",
    )


def _room(view: View, now: float, usage: float) -> float:
    """Return how many times the present limit fits: by the token usage, and by the objective where tokens are late
    already.
    """
    room = min(MOST_TIMES, view.profile.token_usage_target / usage) if usage > 0 else MOST_TIMES
    return min(room, SMALL_BATCH * view.facts.shared_by / now) if _is_slow(view) else room


def _is_slow(view: View) -> bool:
    """Whether a token already takes longer than the objective."""
    step, objective = view.step_seconds, view.profile.inter_token_seconds
    return bool(step and objective and step > objective and view.mean("running"))


def _larger_micro_batch(view: View, room: float) -> list[Offer] | None:
    """Return a larger micro batch where that flag is the limit of a pipeline; None where it is not."""
    facts = view.facts
    arg = next((name for name in ("pp_max_micro_batch_size", "max_micro_batch_size") if facts.size(name)), "")
    micro, total = facts.size(arg), max(facts.limits.values(), default=None) or facts.size(LIMIT)
    if not micro or not total or micro >= total // facts.micro_batches:
        return None
    to = min(float(_rounded(micro * room)), total // facts.micro_batches)
    return [set_flag(view, arg, to)] if to > micro else []


def _gain_at_limit(view: View, to: float, now: float, usage: float) -> str:
    """Say how full the KV cache is at the limit, and would be with as many requests as clients send."""
    offered = ((view.mean("running") or 0.0) + (view.mean("queued") or 0.0)) * view.facts.shared_by
    ran = min(to, max(offered, now))
    more = f", about {min(usage * ran / now, 1.0):.2f} with {ran:,.0f} at once" if ran > now else ""
    return f"token usage is {usage:.2f} at this limit{more}"


def _within_graphs(view: View, raised: Change, to: float, now: float, usage: float) -> list[Offer]:
    """Keep the larger batch within the captured graphs, or enlarge the graphs as well if the remaining KV cache still
    fits the batch.
    """
    facts, gain = view.facts, raised.gain
    largest, batch = facts.largest_captured, ceil(to / facts.shared_by)
    unset = not facts.is_before(0, 5, 14) and facts.number(facts.graph_arg) is None
    follows = unset and largest in {now, now // facts.shared_by}
    if largest is None or batch <= largest or facts.without_graph or follows:
        return [raised]
    if largest * facts.shared_by >= MOST_WITHOUT_GRAPHS * now:
        gain = f"{gain}; CUDA graphs cover batches up to {largest:g}"
        return [replace(raised, to=setting(largest * facts.shared_by), gain=gain)]
    size = graph_size(view, batch)
    if size is None or size <= largest:
        return [replace(raised, gain=f"{gain}; batches beyond {largest:g} will run without CUDA graphs")]
    graphs = larger_graphs(view, size, largest, f"covers batches up to {size:g}, {batch} will run")
    fraction, lowered = facts.number(FRACTION), graphs[-1].to if isinstance(graphs, tuple) else None
    if fraction and isinstance(lowered, float) and facts.pools_gb and facts.capacity_gb:
        taken = (fraction - lowered) * facts.capacity_gb / facts.pools_gb
        if usage * to / now > view.profile.token_usage_target * (1.0 - taken):
            share = f"{100 * taken:.0f} %" if taken < 1 else "all"
            words = (
                f"nothing, or add a server: CUDA graphs for {batch} requests take {share} of the KV cache that these"
                " would need"
            )
            return [say(words=words)]
    return [raised, graphs]


def _more_states(view: View) -> list[Offer]:
    """Enlarge the mamba cache where its states decide how many requests run."""
    of_a_request, states = view.facts.states_a_request, view.facts.states
    if of_a_request is None or states is None:
        return []
    gain = (
        f"the mamba cache has {states:g} states, {of_a_request:g} for each running request: whatever"
        f" --max-running-requests is, no more than {states // of_a_request:g} run"
    )
    typed, limit = view.facts.size("max_mamba_cache_size"), view.facts.size(LIMIT)
    if typed is None:
        return _second_cache(view, "mamba_full_memory_ratio", 4.0, gain)
    more = set_flag(view, "max_mamba_cache_size", float(int(POOL_STEP * typed)), gain)
    return [(more, set_flag(view, LIMIT, float(int(POOL_STEP * limit)))) if limit else more]


def _second_cache(view: View, arg: str, most: float, gain: str) -> list[Offer]:
    """Raise the share of the second cache by a step, to `most` at most."""
    now = view.facts.number(arg)
    to = most if now is None else min(round(POOL_STEP * now, 2), most)
    if now is None:
        return [say(words=gain)]
    return first_accepted(view, set_flag(view, arg, to, gain), say(words=gain)) if to > now else []


def _larger_second_cache(view: View, _: Beside) -> list[Offer]:
    """Enlarge the cache that is full: of mamba states, or of the sliding window."""
    is_mamba = view.facts.states is not None or view.totals["mamba"] > view.totals["admission/hybrid_pool_full"] / 2
    name, arg, most = (
        ("mamba", "mamba_full_memory_ratio", 4.0) if is_mamba else ("sliding-window", "swa_full_tokens_ratio", 1.0)
    )
    return _second_cache(view, arg, most, f"the {name} cache is full: give it more of the memory")


def _rounded(value: float) -> int:
    """Return a limit as people set it: in steps of 8 from 32 on, of 64 from 256 on."""
    step = 1 if value < 32 else 8 if value < 256 else 64
    return max(int(value) // step * step, 1)


def _pool_full(view: View, beside: Beside) -> list[Offer]:
    """Enlarge the KV cache by the first means that this server has: its cap, unused memory, an 8-bit type."""
    limit, running, elsewhere = view.facts.least_limit, view.mean("running"), view.totals["elsewhere"]
    if limit and running and 2 * running >= limit:
        return []  # the limit is as near as the memory
    larger, kind = larger_pool(view), eight_bits(view)
    if elsewhere:
        words = (
            "enlarge the KV cache of this decode server, or add decode servers: requests wait in its prealloc queue for"
            " room"
        )
        return [*larger, say(words=words)]
    unused = aim_at_reserve(view, beside, too_large=True) if MEMORY_RESERVE_TOO_LARGE in beside else []
    if more := larger or [change for change in unused if change.to is not None][:1]:
        return [*more]
    if not view.facts.arguments:
        words = "raise it in steps of 0.01 (its value is not in this log), or set --kv-cache-dtype fp8_e4m3"
        return [set_flag(view, FRACTION, words=words, direction="raise")]
    other = say(
        words="enlarge the KV cache (--mem-fraction-static, more GPUs), or send shorter requests",
        why="Each running request keeps its tokens in the KV cache, so the KV cache limits how many run.",
        not_if="the queue is short: then a full KV cache is normal for a well-loaded server",
    )
    return first_accepted(view, set_flag(view, "kv_cache_dtype", kind), other) if kind else [other]


def _balance(view: View, _: Beside) -> list[Offer]:
    """Balance by load, in SGLang where the release can, else by a router."""
    router = say(
        words="put a router in front that balances by the load of the ranks",
        why="This release cannot balance requests over its ranks by load; a router can.",
        not_if="long prompts of one client must stay on the rank that has their prefix cached",
        cost="One more process to run.",
    )
    is_blind = view.facts.word("load_balance_method") in {"round_robin", "auto"}
    methods = ("total_requests", "shortest_queue") if is_blind else ()
    return first_accepted(view, *(set_flag(view, "load_balance_method", method) for method in methods), router)


HYBRID_POOL_FULL = limit(
    id="hybrid_pool_full",
    title="second KV cache full {value} of the time",
    when=waits(
        "hybrid_pool_full",
        name="serving time with a full sliding-window or mamba cache and requests waiting",
    ),
    summary="Requests wait because the sliding-window or mamba cache is full while the main KV cache has free space.",
    past=(
        "Until {until} requests waited because the sliding-window or mamba cache was full while the main KV cache had"
        " free space."
    ),
    guide=NOT_IN_GUIDE + "the cache that fills up first is the limit; token usage is that of the fullest cache",
    remedy=Change(
        arg="swa_full_tokens_ratio",
        direction="raise",
        words="a larger share for the cache that is full",
        why="Hybrid models have two caches. The one that fills up first limits how many requests run.",
        not_if="both caches are full: then GPU memory is the limit",
        cost="The main KV cache gets smaller by as much as the other gains.",
    ),
    causes=(Group.RETRACTION,),
    advise=_larger_second_cache,
    groups=frozenset({Group.WAIT}),
    supporting=waiting_figures,
    wait="hybrid_pool_full",
    replica="after a flag",
    lends=(("swa_full_tokens_ratio", "raise"), ("mamba_full_memory_ratio", "raise"), ("max_mamba_cache_size", "raise")),
)


DP_IMBALANCED = limit(
    id="dp_imbalanced",
    title="DP ranks imbalanced",
    when=fact(
        measure=_imbalance,
        limit=OFTEN,
        counts=QUEUES,
        name="time in which requests waited on the busiest DP rank",
        unit="share",
        needs="load on several DP ranks",
    ),
    summary="Requests wait on one DP rank while another has free capacity: the load is unbalanced.",
    past="Until {until} requests waited on one DP rank while another had free capacity.",
    seen="requests waited {value} of the time on the busiest DP rank, and almost never on the least busy one",
    guide=NOT_IN_GUIDE + "the cause is routing, not capacity",
    remedy=Change(
        arg="load_balance_method",
        direction="set",
        words="total_requests, or use a router that balances by load",
        why="Round robin gives each rank the same number of requests, not the same amount of work.",
        not_if="long prompts of one client must stay on the rank that has their prefix cached",
        cost="Requests with a common prefix may be spread over more ranks.",
    ),
    unless=(RETRACTING_TOO_OFTEN,),
    causes=(Group.RETRACTION,),
    advise=_balance,
    groups=frozenset({Group.WAIT}),
    supporting=waiting_figures,
    short="DP ranks unbalanced",
    shade=1,
)


RUNNING_AT_LIMIT = limit(
    id="running_at_limit",
    title="running limit reached {value} of the time",
    when=waits("running_limit", name="serving time at the running limit with requests waiting"),
    summary="Requests wait because SGLang runs as many as --max-running-requests allows.",
    past="Until {until} requests waited because SGLang ran as many as --max-running-requests allows.",
    seen="{value} of the serving time at --max-running-requests with requests waiting",
    guide=(
        "under load #running-req should be close to --max-running-requests; a queue at that limit is caused by the"
        " limit"
    ),
    remedy=Change(
        arg=LIMIT,
        direction="raise",
        words="as far as token usage stays below {token_usage_target}, at most eight times the present value",
        why="The limit makes requests wait while the KV cache has free space.",
        not_if="token usage is {token_usage_target} or more: then the KV cache is the limit",
        cost="Inter-token latency rises as more requests run together.",
    ),
    causes=(Group.RETRACTION, DP_IMBALANCED),
    advise=_at_limit,
    groups=frozenset({Group.WAIT}),
    supporting=_limit_figures,
    wait="running_limit",
    replica="after a flag",
    lends=((LIMIT, "raise"),),
    shade=2,
)


GRAMMAR_QUEUE = limit(
    id="grammar_queue",
    title="grammars hold requests up {value} of the time",
    when=waits(
        "grammar_queue",
        name="serving time with more requests waiting for a grammar than in the queue",
        needs="metrics",
        in_log=False,
    ),
    summary="Requests wait for their grammar (JSON schema, regex, EBNF) to be compiled, not for the GPU.",
    past="Until {until} requests waited for their grammar (JSON schema, regex, EBNF) to be compiled.",
    guide=NOT_IN_GUIDE + "requests wait in the grammar queue while token usage is low",
    remedy=Change(
        arg="grammar_backend",
        direction="try",
        words="another backend (xgrammar, llguidance), or fewer distinct schemas",
        why="SGLang compiles each new schema on the CPU before its request can run, and caches the result.",
        not_if="the CPU is busy: then give the server more cores",
    ),
    groups=frozenset({Group.WAIT}),
    supporting=waiting_figures,
    wait="grammar_queue",
)


ADMISSION_STANDING_STILL = limit(
    id="admission_standing_still",
    title="no request starts though there is room {value} of the time",
    when=waits(
        "standing_still",
        name="serving time in which the next requests fit and none of them started",
    ),
    summary="SGLang starts no waiting request although the next ones fit.",
    past="Until {until} SGLang started no waiting request although the next ones fit.",
    guide=NOT_IN_GUIDE + "a scheduler that admits nothing is a fault, not a lack of memory",
    remedy=look(
        words=(
            "save a stack dump (py-spy dump --pid of the scheduler), look for known bugs of this release, then restart"
            " the server"
        ),
        why=(
            "Places and memory are free, and still none of the waiting requests starts. A larger KV cache would not"
            " change that."
        ),
        not_if="generation is paused (/pause_generation), or weights are being updated",
    ),
    groups=frozenset({Group.WAIT}),
    supporting=waiting_figures,
    wait="standing_still",
    shade=2,
)


ADMISSION_TOO_CONSERVATIVE = limit(
    id="admission_too_conservative",
    title="requests wait beside free KV cache {value} of the time",
    when=waits("held_back", name="serving time with requests waiting and free KV cache"),
    summary="Requests wait although the KV cache has free space: SGLang reserves too much for running requests.",
    past="Until {until} requests waited although the KV cache had free space.",
    seen="{value} of the serving time with requests waiting and token usage below {token_usage_target}",
    remark=_in_full,
    guide=(
        '"Achieve a high token usage": with low token usage and frequent #queue-req above 0, lower'
        " --schedule-conservativeness to about 0.3; the usual cause is a large max_new_tokens of requests that end"
        " early by EOS or stop strings"
    ),
    remedy=Change(
        arg=CONSERVATIVENESS,
        direction="lower",
        words="0.3",
        why=(
            "Requests set a large max_new_tokens and end early (EOS, stop strings), so SGLang reserves KV cache that"
            " they never use."
        ),
        not_if=(
            "requests run to their max_new_tokens, prompts are very long, or retractions appear: then raise it"
            " towards 1.0"
        ),
        cost="The slowest requests may take longer, and a few retractions may appear.",
    ),
    unless=(Group.RETRACTION, SCHEDULER_STUCK, DP_IMBALANCED),
    causes=(Group.RETRACTION, RUNNING_AT_LIMIT),
    advise=_too_conservative,
    groups=frozenset({Group.WAIT, Group.FILLS, Group.ADMITS}),
    supporting=waiting_figures,
    wait="held_back",
    replica="after a flag",
    confidence=lambda view: "low" if view.facts.may_reserve_in_full else None,
    denied_in_part=lambda view: not explained(view).totals["admission/held_back"],
    shade=1,
    native=Native(
        alert="SGLangKVCacheUnderused",
        expr=(
            f"avg_over_time((\n  ({is_so('num_queue_reqs', '> bool 0')})\n"
            f"  * ({is_so('(full_)?token_usage', f'< bool {DEFAULT.token_usage_target:g}')})\n)[10m:30s])"
        ),
        limit=f"> {DEFAULT.frequent_share:g}",
        seen=f"{{value}} of the time requests waited and token usage was below {DEFAULT.token_usage_target:g}",
    ),
)


RUNNING_FAR_BELOW_LIMIT = Diagnosis(
    id="running_far_below_limit",
    limits=_lacks_memory,
    severity="info",
    when=waits("pool_full", name="serving time with a full KV cache and requests waiting"),
    summary="The KV cache is full while requests wait: memory is the limit.",
    past="Until {until} the KV cache was full while requests waited: memory was the limit.",
    guide="under load #running-req should be close to --max-running-requests; find what limits it",
    remedy=Change(
        arg="kv_cache_dtype",
        direction="set",
        words="fp8_e4m3, or more memory for the KV cache",
        why=(
            "Each running request keeps its tokens in the KV cache. An FP8 KV cache holds twice as many in the same"
            " memory."
        ),
        not_if="answers must not lose any accuracy, or the GPU has no FP8",
        cost="A little accuracy.",
    ),
    unless=(Group.RETRACTION, SHARED_PREFIXES_UNUSED),  # in another order the same cache holds more
    causes=(Group.RETRACTION, DP_IMBALANCED),
    needs_advice=True,
    advise=_pool_full,
    groups=frozenset({Group.WAIT, Group.FILLS}),
    supporting=waiting_figures,
    wait="pool_full",
    replica="after a flag",
    lends_beside=True,
)
