"""Which flag to set to what: one function a row, from the facts and the load of the running server. Pure.

Values are flag values as typed. A function returns drafts; `advise` spells them for the server's release, leaves out what the release
refuses or ignores, and fills in the reasons.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, floor, inf, log2

from sglang_tuning_exporter.core.endings import CLASSES, shortened
from sglang_tuning_exporter.core.facts import Said
from sglang_tuning_exporter.core.findings import Change, Value
from sglang_tuning_exporter.core.measures import CEILING, SMALL_CHUNK, costly_settings, differing
from sglang_tuning_exporter.core.rows import BY_ID, OUT_OF_MEMORY, Remedy, Row
from sglang_tuning_exporter.core.server import USUAL_CAPTURED
from sglang_tuning_exporter.core.suspects import SLOW_BURN_TIMES
from sglang_tuning_exporter.core.transfers import cause_of, relaxed
from sglang_tuning_exporter.core.view import View
from sglang_tuning_exporter.sglang.advices import recognise
from sglang_tuning_exporter.sglang.args.flags import argument_names, flag_of, nearest_flag, releases
from sglang_tuning_exporter.sglang.args.refusals import choices_of, objection

# The guide's values.
RAISED, LOWERED = 1.3, 0.3
FULL_LENGTH = 0.8  # new-token ratio after retractions, above which answers use most of their max_new_tokens
LOWERED_LIMIT, FEWER_DECODING = 0.8, 0.75  # of the running batch
MOST_TIMES, MOST_WITHOUT_GRAPHS = 8.0, 2.0  # the present limit, in one step
SMALL_BATCH = 8
LEAST_SHARE = 0.25  # of the batch, in one step
FULL_BATCHES = 0.25  # of the prefill batches, at least, for a larger chunk to matter
LARGEST_CHUNK, LEAST_CHUNK = 16384, 2048
LEAST_USEFUL_CHUNK = 1024.0  # tokens: a smaller chunk takes about as long
SHORT_OF_A_CHUNK = 0.125  # at most one prompt in eight fills it
CERTAIN_PACE = 0.5  # of the estimated pace of prefill, which assumes full chunks
GRAPH_SIZES = (8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768)
MOST_GRAPH, MOST_GRAPH_AT_LARGE_TP, LARGE_TP = (
    512,
    768,
    8,
)  # the guide: 512 or 768, the larger at large tensor parallelism
LEAST_POOL_GB = 1.0  # for a KV cache that is worth a start
MUCH_ELSEWHERE_GB = 1.0  # less is a context that does not hinder
PREFILL_GRAPH = 2048.0  # what SGLang itself suggests where the graphs of prefill do not fit
LEAST_FRACTION, MOST_FRACTION, USUAL_FRACTION = 0.1, 0.95, 0.9
CAP_IN_FORCE = 0.95  # the KV cache has whole pages, so a little less than its cap
POOL_STEP = 1.25  # of a second cache
EIGHT_BITS = ("fp8_e4m3", "fp8_e5m2")  # the first one that a release accepts
ALLOWED_WAIT = 0.5  # of the longest wait, for the mean
MOST_SORTED = 128  # a longer queue is served in order of arrival under lpm; srt/managers/schedule_policy.py
UNCAPTURED_BACKENDS = ("torch_native", "flex_attention")


@dataclass(frozen=True, slots=True)
class Draft:
    """A change before it is spelled. `together` is set with it; `otherwise` is tried where the release refuses or ignores it."""

    arg: str = ""
    to: Value = None
    now: Value = None
    gain: str = ""
    words: str = ""
    direction: str = ""  # where the values do not show it
    text: Remedy | None = None  # the reasons, where they are not the row's own
    together: tuple[Draft, ...] = ()
    otherwise: tuple[Draft, ...] = ()


_NOTHING = Draft(words="no change of a flag is known that helps here")
Advise = Callable[[View, frozenset[str]], list[Draft]]


def _say(words: str, why: str = "", not_if: str = "", cost: str = "") -> Draft:
    return Draft(words=words, text=Remedy("", "", words, why, not_if, cost) if why else None)


# Retractions and admission


def _retracting(view: View, _: frozenset[str]) -> list[Draft]:
    facts = view.facts
    now, factor = facts.typed("schedule_conservativeness"), facts.factor("schedule_conservativeness")
    if now is not None and now * factor >= RAISED - 0.01:
        return _ineffective(view, _)
    raised = Draft("schedule_conservativeness", round(RAISED / factor, 2), now)
    larger = _larger_pool(view)
    failed = any(view.totals[f"out_of_memory.{phase}"] for phase in ("prefill", "decode", "startup", "unknown"))
    others = [larger] if larger is not None and not failed else []
    ratios, count = view.totals["ratio_after"], view.totals["ratio_after:n"]
    if count and ratios / count >= FULL_LENGTH:
        fewer = _fit(view)
        gain = f"answers use about {100 * min(ratios / count, 1.0):.0f} % of their max_new_tokens: a higher conservativeness alone retracts on"
        first = [replace(each, gain=gain) for each in (others or ([fewer] if fewer else []))]
        return [*first, raised]
    return [raised, *([_in_words(others[0])] if others else [])]


def _in_words(draft: Draft) -> Draft:
    """Say a change as an alternative: one flag is changed at a time."""
    words = f"or enlarge the KV cache: raise --{draft.arg.replace('_', '-')}, now {draft.now:g}, to {draft.to:g}, or remove it"
    return _say(words, _CAPPED.why, _CAPPED.not_if, _CAPPED.cost)


def _fit(view: View) -> Draft | None:
    """Run as many requests as the KV cache holds to their end."""
    pool, prompt, answer = view.facts.pool(), view.prompt, view.answer
    batch = view.batch(0.5)
    if not pool or not prompt or not answer or not batch:
        return None
    fits = max(int(pool / (prompt + answer)), 1)
    limit = view.facts.typed("max_running_requests") or view.facts.least_limit
    if fits >= batch or (limit is not None and fits >= limit):
        return None
    return Draft("max_running_requests", float(fits * view.facts.shared_by), limit)


def _ineffective(view: View, _: frozenset[str]) -> list[Draft]:
    larger = _larger_pool(view)
    if larger is not None:
        return [larger]
    fewer = _run_fewer(view, view.batch(0.5), LOWERED_LIMIT)
    words = _say(
        f"enlarge the KV cache ({_pool_flags(view)})",
        "The KV cache is too small for the running requests; a larger one removes the cause of the retractions.", "no GPU memory is free",
        "An 8-bit KV cache costs a little accuracy; a larger one leaves less memory for peaks.",
    )  # fmt: skip
    gain = f"above {CEILING} conservativeness changes nothing"
    return [words] if fewer is None else [replace(fewer, gain=gain), words]


def _too_conservative(view: View, _: frozenset[str]) -> list[Draft]:
    facts = view.facts
    now, factor = facts.typed("schedule_conservativeness"), facts.factor("schedule_conservativeness")
    target = round(LOWERED / factor, 2)
    if now is not None and now <= target + 0.005:
        return [_say(
            "ask for fewer max_new_tokens: the flag is low enough; a new request waits until its whole max_new_tokens fits beside what SGLang"
            " reserves for running requests",
            "SGLang starts a request only if its max_new_tokens (4096 at most) fits beside what it reserves for running requests.",
            "clients need the answers that long", "Longer answers are truncated.",
        )]  # fmt: skip
    return [Draft("schedule_conservativeness", target, now)]


# The running limit


def _limit(view: View) -> tuple[float | None, float | None]:
    """Return --max-running-requests as typed, and what is in force for all ranks that share it."""
    facts = view.facts
    flag, least = facts.size("max_running_requests"), facts.least_limit
    seen = view.totals["limit_seen"] or None
    return flag, (least * facts.shared_by if least is not None else seen)


def _run_fewer(view: View, ran: float | None, share: float) -> Draft | None:
    """Run only a share of the batch; None where one request runs for each rank."""
    flag, force = _limit(view)
    shared_by = view.facts.shared_by
    known = [figure for figure in (force, ran * shared_by if ran else None) if figure]
    now = flag or force
    if not known:
        words = f"about {100 * share:.0f} % of the batch that runs"
        return Draft("max_running_requests", None, now, words=words, direction="lower")
    to = float(max(shared_by, int(share * min(known))))
    if min(known) <= shared_by or (now is not None and to >= now):
        return None
    return Draft("max_running_requests", to, now, direction="lower")


def _fewer_decoding(view: View) -> Draft | None:
    """Run fewer than when memory ran out in decode."""
    return _run_fewer(view, view.totals["failed_batch"] or view.batch(), FEWER_DECODING)


def _at_limit(view: View, _: frozenset[str]) -> list[Draft]:  # noqa: PLR0911 - one for each thing that limits
    facts, profile = view.facts, view.profile
    flag, force = _limit(view)
    now, usage = flag or force, view.mean("usage", "running_limit") or view.mean("usage")
    if not now or usage is None:
        return [Draft("max_running_requests", None, now)]
    states = _more_states(view)
    if states:
        return states
    if facts.reduced:
        return [
            _say(
                f"make room for more requests (more memory for the KV cache): SGLang itself reduced the limit to {facts.least_limit or now:g}"
                " for want of capacity, whatever --max-running-requests says",
                "Its line in the start says so. A higher flag is reduced again.", "memory is free for nothing else", "Less GPU memory stays free for peaks.",
            )
        ]  # fmt: skip
    room = min(MOST_TIMES, profile.token_usage_target / usage) if usage > 0 else MOST_TIMES
    step, objective, batch = view.step_seconds, profile.inter_token_seconds, view.mean("running")
    if step and objective and step > objective and batch:
        room = max(min(room, SMALL_BATCH * facts.shared_by / now), 1.0)
        if room <= 1.0:
            words = f"nothing: a token takes {step:.3g} s already, and more requests at once would make it longer"
            return [_say(words)]
    micro = facts.size("pp_max_micro_batch_size") or facts.size("max_micro_batch_size")
    arg = "pp_max_micro_batch_size" if facts.size("pp_max_micro_batch_size") else "max_micro_batch_size"
    total = max(facts.limits.values(), default=None) or facts.size("max_running_requests")
    if micro and total and micro < total // facts.micro_batches:
        to = min(float(_rounded(micro * room)), total // facts.micro_batches)
        return [Draft(arg, to, micro, text=_MICRO)] if to > micro else []
    to = float(_rounded(now * room))
    if flag is not None and force is not None and force + facts.shared_by <= flag:
        return []  # the KV cache allows fewer than the flag
    if to <= now or LOWERED_LIMIT * to <= now + 1:
        return [
            _say(
                f"nothing, or a little more memory for the KV cache: at a token usage of {usage:.2f} hardly more than {now:g} fit"
            )
        ]
    offered = ((view.mean("running") or 0.0) + (view.mean("queued") or 0.0)) * facts.shared_by
    ran = min(to, max(offered, now))  # no more than clients send
    gain = f"token usage is {usage:.2f} at this limit, about {min(usage * ran / now, 1.0):.2f} with {ran:,.0f} at once"
    if not facts.limits and flag is None:
        gain += f"; the start is not in this log: the batch stays at {now:g}"
        now = None if not view.totals["limit_seen"] else now
    return _within_graphs(view, Draft("max_running_requests", to, now, gain), float(now or to))


def _within_graphs(view: View, draft: Draft, now: float) -> list[Draft]:
    """Keep the larger batch within the captured graphs, or raise those too."""
    facts, to = view.facts, float(draft.to or 0.0)
    largest, batch = facts.largest_captured, ceil(to / facts.shared_by)
    follows = (
        not facts.is_before(0, 5, 14)
        and facts.number(facts.graph_arg) is None
        and largest in {now, now // facts.shared_by}
    )
    if largest is None or batch <= largest or facts.without_graph or follows:
        return [draft]
    if largest * facts.shared_by >= MOST_WITHOUT_GRAPHS * now:
        return [
            replace(
                draft, to=largest * facts.shared_by, gain=f"{draft.gain}; CUDA graphs cover batches up to {largest:g}"
            )
        ]
    size = _graph_size(view, batch)
    if size is None or size <= largest:
        return [replace(draft, gain=f"{draft.gain}; batches beyond {largest:g} will run without CUDA graphs")]
    gain = f"covers batches up to {size:g}, {batch} will run"
    paid = tuple(_smaller_pool(view, size / largest))
    return [draft, Draft(facts.graph_arg, size, largest, gain, text=_GRAPHS, together=paid)]


def _more_states(view: View) -> list[Draft]:
    """Enlarge the mamba cache where its states decide how many requests run."""
    facts = view.facts
    each, states = facts.states_a_request, facts.states
    if each is None or states is None:
        return []
    gain = (
        f"the mamba cache has {states:g} states, {each:g} for each running request: whatever --max-running-requests is, no more than"
        f" {states // each:g} run"
    )
    typed = facts.size("max_mamba_cache_size")
    if typed is None:
        return _second_cache(view, "mamba_full_memory_ratio", 4.0, gain)
    limit = facts.size("max_running_requests")
    more = Draft("max_mamba_cache_size", float(int(POOL_STEP * typed)), typed, gain, text=_STATES)
    higher = (Draft("max_running_requests", float(int(POOL_STEP * limit)), limit),) if limit else ()
    return [replace(more, together=higher)]


def _second_cache(view: View, arg: str, most: float, gain: str) -> list[Draft]:
    now = view.facts.number(arg) if arg else None
    if now is None:
        return [_say(gain)]
    to = min(round(POOL_STEP * now, 2), most)
    return (
        [Draft(arg, to, now, gain, text=_STATES if "mamba" in arg else None, otherwise=(_say(gain),))]
        if to > now
        else []
    )


def _hybrid(view: View, _: frozenset[str]) -> list[Draft]:
    is_mamba = view.facts.states is not None or view.totals["mamba"] > view.totals["admission/hybrid_pool_full"] / 2
    gain = f"the {'mamba' if is_mamba else 'sliding-window'} cache is full: give it more of the memory"
    return _second_cache(
        view, "mamba_full_memory_ratio" if is_mamba else "swa_full_tokens_ratio", 4.0 if is_mamba else 1.0, gain
    )


def _smaller_batch(view: View, _: frozenset[str]) -> list[Draft]:
    batch, step, objective = view.batch(0.5), view.step_seconds, view.profile.inter_token_seconds
    if batch is None or batch <= SMALL_BATCH or not step or not objective:
        return []
    fewer = _run_fewer(view, view.batch(0.5), max(objective / step, LEAST_SHARE))
    return [] if fewer is None else [fewer]


def _rounded(value: float) -> int:
    step = 1 if value < 32 else 8 if value < 256 else 64
    return max(int(value) // step * step, 1)


# The KV cache


def _larger_pool(view: View) -> Draft | None:
    """Raise the flag that keeps the KV cache small; None where it does not. SGLang takes the smaller of it and what fits."""
    cap, pool = view.facts.size("max_total_tokens"), view.facts.pool()
    if not cap or (pool is not None and pool < CAP_IN_FORCE * cap):
        return None
    return Draft("max_total_tokens", 2 * cap, cap, "twice the tokens, if the memory holds them", text=_CAPPED)


def _eight_bits(view: View) -> str:
    facts = view.facts
    if facts.is_cpu or not facts.arguments or facts.arguments.get("kv_cache_dtype") not in ("auto", None):
        return ""
    choices = choices_of("kv_cache_dtype", facts.release) if facts.release else None
    return next((kind for kind in EIGHT_BITS if choices is None or kind in choices), "")


def _pool_flags(view: View) -> str:
    kind = _eight_bits(view)
    return f"--mem-fraction-static, --kv-cache-dtype {kind}" if kind else "--mem-fraction-static"


def _unused_memory(view: View, holding: frozenset[str]) -> Draft | None:
    """Give the KV cache memory of the GPU that lies idle; None where none does."""
    row = "memory_reserve_too_large"
    drafts = _reserve(view, holding, too_large=True) if row in holding else []
    return next((replace(each, text=BY_ID[row].remedy) for each in drafts if each.arg and each.to is not None), None)


def _pool_full(view: View, holding: frozenset[str]) -> list[Draft]:
    limit, running = view.facts.least_limit, view.mean("running")
    if limit and running and 2 * running >= limit:
        return []  # the limit is as near as the memory
    larger = _larger_pool(view)
    if larger is not None and not view.totals["elsewhere"]:
        return [larger]
    unused = _unused_memory(view, holding)
    if unused is not None and not view.totals["elsewhere"]:
        return [unused]
    kind = _eight_bits(view)
    words = _say(
        "enlarge the KV cache (--mem-fraction-static, more GPUs), or send shorter requests",
        "Each running request keeps its tokens in the KV cache, so the KV cache limits how many run.",
        "the queue is short: then a full KV cache is normal for a well-loaded server",
    )
    if view.totals["elsewhere"]:
        more = "enlarge the KV cache of this decode server, or add decode servers: requests wait in its prealloc queue for room"
        return [*([larger] if larger else []), _say(more)]
    if not view.facts.arguments:
        more = "raise it in steps of 0.01 (its value is not in this log), or set --kv-cache-dtype fp8_e4m3"
        return [Draft("mem_fraction_static", None, None, words=more, text=BY_ID["memory_reserve_too_large"].remedy)]
    return [
        Draft("kv_cache_dtype", kind, view.facts.word("kv_cache_dtype") or None, otherwise=(words,)) if kind else words
    ]


def _longest_prompts(view: View, _: frozenset[str]) -> list[Draft]:
    mean = view.totals["too_long_tokens"] / max(view.totals["too_long"], 1.0)
    larger = _larger_pool(view)
    if larger is not None:
        return [replace(larger, to=_doubled(mean, float(larger.to or 1.0)))]
    return [
        _say(
            f"enlarge the KV cache ({_pool_flags(view)}), or send shorter prompts: those refused have {mean:,.0f} tokens on average"
        )
    ]


def _longest_requests(view: View, _: frozenset[str]) -> list[Draft]:
    now = view.facts.size("context_length")
    mean = view.totals["beyond_context_tokens"] / max(view.totals["beyond_context"], 1.0)
    gain = f"those refused have {mean:,.0f} tokens on average"
    return [Draft("context_length", _doubled(mean, 2 * now) if now else None, now, gain)] if now else []


def _doubled(tokens: float, size: float) -> float:
    while size < tokens:
        size *= 2
    return size


# GPU memory


def _out_of_memory(view: View, _: frozenset[str]) -> list[Draft]:
    now = view.facts.number("mem_fraction_static")
    said = _said(view)
    if (asked := _ASKED.search(said)) and float(asked[1]) > float(asked[2] or asked[3]):
        return [
            _say(
                f"lower --max-total-tokens where it is set; else search SGLang's issues for this error: one allocation of {asked[1]} GiB is more than"
                f" the {asked[2] or asked[3]} GiB of the GPU",
                "No share of the memory makes room for it: the size was computed wrongly, or set.",
                "another GPU model was expected here",
            )
        ]
    if "mem-fraction-static" in said and _MORE.search(said):
        # The weights leave too little for the KV cache: SGLang's own error asks for more.
        named, weights, free = _ABOVE.search(said), view.facts.weights_gb, view.facts.capacity_gb
        least = float(named[1]) if named else weights / free if weights and free else None
        beside = (
            f"the weights alone take {weights:.4g} of {free:.4g} GB, {least:.3f} of it" if least and not named else ""
        )
        text = Remedy(
            "",
            "raise",
            "raise it: SGLang's own error asks for it",
            f"SGLang ended with: {shortened(said, 300)}",
            "the weights leave nothing of the GPU: then more GPUs",
        )
        return [
            Draft(
                "mem_fraction_static",
                ceil(100 * least + 0.01) / 100 if least is not None and least < MOST_FRACTION else None,
                now,
                beside,
                words=text.words,
                text=text,
            )
        ]
    if view.totals["out_of_memory.startup"] and view.facts.capacity_gb and view.facts.weights_gb is None:
        return [_SMALLER_WEIGHTS]
    to = 0.8 if now is None or now > 0.8 else 0.7 if now > 0.7 else round(now - 0.05, 2)
    less = [Draft("mem_fraction_static", to, now, text=_LESS_MEMORY)] if to >= LEAST_FRACTION else []
    is_sampling = view.explanation is not None and view.explanation.place.startswith("srt/layers/sampler.py")
    fewer = _fewer_decoding(view) if is_sampling else None
    return [replace(fewer, text=_FEWER_SAMPLED), *less] if fewer is not None else less


_SMALLER_WEIGHTS = _say(
    "use more GPUs (--tp-size), or smaller weights (--quantization fp8, a quantized model)",
    "Memory ran out while the weights were loaded; --mem-fraction-static only divides what they leave.",
    "another process holds the memory: end or move it first",
)
_FEWER_SAMPLED = Remedy(
    "max_running_requests", "lower", "", "It ran out while tokens were sampled: that takes memory for the whole vocabulary, for every request of a batch.",
    "requests ask for logprobs of many tokens: then those take it", "More requests wait.",
)  # fmt: skip


def _beside_others(advise: Advise) -> Advise:
    """Put before any flag that another process, which SGLang's own error lists, holds memory of the GPU."""

    def with_others(view: View, holding: frozenset[str]) -> list[Draft]:
        held = view.totals["held_elsewhere_gb"]
        end = _say(
            f"end or move the other process that holds {held:.1f} GB of this GPU's memory",
            "SGLang's own error lists it; no flag brings that memory back.",
            "it belongs there, such as a second server: then the flags of this finding",
        )
        return [end, *advise(view, holding)] if held >= MUCH_ELSEWHERE_GB else advise(view, holding)

    return with_others


def _no_kv_cache(view: View, _: frozenset[str]) -> list[Draft]:
    """Raise the fraction where the GPU has room for it, by the figures of the start; else there is no room."""
    facts, more = view.facts, Draft()
    weights, left, now = facts.weights_gb, facts.beside_weights_gb, facts.number("mem_fraction_static")
    total = facts.capacity_gb or (weights + left if weights and left is not None else None)
    if not weights or not total:
        return [more]
    most = min(MOST_FRACTION, floor(100 * (1.0 - view.profile.reserve_lower_gb / total)) / 100)
    room = most * total - weights
    if room < LEAST_POOL_GB or (now is not None and most <= now):
        return [more]
    gain = (
        f"the weights alone take {weights / total:.3f} of the memory; at {most:g} about {room:.1f} GB are left for the KV cache, and"
        f" {(1.0 - most) * total:.1f} GB for everything else"
    )
    return [Draft("mem_fraction_static", most, now, gain, text=_ROOM), more]


def _transfers(view: View, _: frozenset[str]) -> list[Draft]:
    """What to look at, by SGLang's own words; then the variable that relaxes it."""
    text = view.transfer.text if view.transfer is not None else ""
    cause = cause_of(text)
    longer = relaxed(cause, text)
    return [
        _say(cause.look, cause.why, cause.not_if),
        *(
            [
                _say(
                    longer,
                    "A longer time-out helps a slow pair, and only delays the error of one that is broken.",
                    cause.not_if,
                )
            ]
            if longer
            else []
        ),
    ]


def _hicache(view: View, _: frozenset[str]) -> list[Draft]:
    facts, row = view.facts, BY_ID["hicache_degraded"].remedy
    kind, ratio = view.hicache.word if view.hicache is not None else "", facts.number("hicache_ratio")
    if kind == "kernel":
        return [_say(
            row.words + ": if a hit is not faster, run without --enable-hierarchical-cache",
            "Without its JIT kernel SGLang copies between host and GPU in another way, which may be slower than computing the prefix again.",
            row.not_if,
        )]  # fmt: skip
    if kind == "host":
        words = "give the cache more host memory: raise --hicache-ratio or --hicache-size, or use --hicache-write-policy write_through"
        why = "The host's memory for the cache is full, so what leaves the GPU is dropped instead of kept."
        text = Remedy("hicache_ratio", "raise", words, why, "the host has no more memory", "Host memory.")
        return [
            Draft("hicache_ratio", 2 * ratio, ratio, text=text)
            if ratio and not facts.size("hicache_size")
            else Draft(words=words, text=text)
        ]
    backend = facts.word("hicache_storage_backend")
    return [_say(
        f"look at the storage behind the cache{f' ({backend})' if backend else ''}: its service, its space and its own log",
        "A prefix that the storage does not give is computed again, and a request may wait for it first (--hicache-storage-prefetch-policy).",
        "it happened once, while the storage restarted",
    )]  # fmt: skip


def _costly_settings(view: View, _: frozenset[str]) -> list[Draft]:
    rows = {"chunked_prefill_size": "prefill_bound"}
    found = ((arg, now, to, BY_ID[rows.get(arg, "cuda_graph_off")].remedy) for arg, now, to, _ in costly_settings(view))
    return [Draft(arg, to, now, text=text) for arg, now, to, text in found]


def _else_memory(first: Callable[[View], Draft | None]) -> Advise:
    """Advise the change of the phase in which memory ran out, else what helps in any; then what needs less memory as well."""

    def advise(view: View, holding: frozenset[str]) -> list[Draft]:
        own, kind = first(view), _eight_bits(view)
        words = f"further: an FP8 KV cache (--kv-cache-dtype {kind}) or FP8 weights, smaller CUDA graphs"
        further = _say(
            words, "They need less of the GPU's memory.", "answers must not lose any accuracy", "A little accuracy."
        )
        return [*([own] if own is not None else _out_of_memory(view, holding)), *([further] if kind else [])]

    return advise


def _graph_memory(view: View, _: frozenset[str]) -> list[Draft]:
    facts = view.facts
    now = facts.number("mem_fraction_static")
    less = None if now is None else max(round(now - 0.05, 2), LEAST_FRACTION)
    drafts = [] if now is not None and less is not None and less >= now else [Draft("mem_fraction_static", less, now)]
    if facts.capturing == "prefill":
        return [*drafts, *_smaller_prefill_graphs(view)]
    largest, ran = facts.largest_captured, view.batch()
    if largest and (ran is None or 2 * (_graph_size(view, ran) or largest) <= largest):
        to = float(_graph_size(view, ran) or largest) if ran else float(_half_graph(largest))
        gain = f"99 % of the time at most {ran:g} requests run together" if ran else "half of the present size"
        fewer = Draft(facts.graph_arg, to, largest, gain, text=_FEWER_GRAPHS)
        drafts = [fewer, *drafts] if ran else [*drafts, fewer]
    return drafts


def _smaller_prefill_graphs(view: View) -> list[Draft]:
    """Capture graphs of smaller prefill batches, by the name that the release has."""
    facts = view.facts
    config = facts.arguments.get("cuda_graph_config")
    prefill = config.get("prefill") if isinstance(config, dict) else None
    most = prefill.get("max_bs") if isinstance(prefill, dict) else None
    known = ("cuda_graph_max_bs_prefill", "piecewise_cuda_graph_max_tokens")
    arg = next((each for each in known if facts.flag(each)), "")
    now = facts.size(arg) or (float(most) if isinstance(most, int) else None)
    to = PREFILL_GRAPH if now is None or now > PREFILL_GRAPH else now // 2
    return [Draft(arg, to, now, text=_SMALLER_PREFILL_GRAPHS)] if arg and to >= 1 else []


def _half_graph(largest: float) -> float:
    return next((size for size in reversed(GRAPH_SIZES) if size <= largest / 2), GRAPH_SIZES[0])


def _reserve(view: View, holding: frozenset[str], *, too_large: bool) -> list[Draft]:
    """Change the memory fraction until the middle of the good range is left."""
    facts, profile, left = view.facts, view.profile, view.facts.reserve_gb
    capped = _larger_pool(view) if too_large else None
    if capped is not None:  # a larger fraction changes nothing while the flag holds
        return [_beyond_the_cap(capped)]
    now = facts.number("mem_fraction_static")
    if left is None or now is None:
        return [Draft("mem_fraction_static", None, now)]
    growth = _graph_growth(view) if "cuda_graph_not_covering" in holding else 0.0
    if growth is None and too_large:
        return []
    aim = max(min(profile.reserve_aim_gb, profile.reserve_upper_gb), profile.reserve_lower_gb)
    capacity, spare = facts.capacity_gb, left - (growth or 0.0) - aim
    step = spare / capacity if capacity else (0.01 if spare > 0 else -0.01)
    to = min(max(_percents(now + step), LEAST_FRACTION), MOST_FRACTION)
    if (to <= now) if too_large else (to >= now):
        words = f"{left:.4g} GB are left, and --mem-fraction-static is {now:g}: raise it by 0.01 at a time, and watch for out-of-memory failures"
        return [_say(words)] if too_large and growth == 0.0 else []
    gained = _tokens(view, (to - now) * capacity if capacity else None)
    unusual = (
        "more than the usual 0.7 to 0.9: raise it by 0.01 at a time and watch for out-of-memory failures"
        if to > USUAL_FRACTION
        else ""
    )
    return [Draft("mem_fraction_static", to, now, "; ".join(filter(None, (gained, unusual))))]


def _beyond_the_cap(capped: Draft) -> Draft:
    """Raise --max-total-tokens for the memory that is free, where a larger KV cache helps at all."""
    text = replace(_CAPPED, not_if=BY_ID["memory_reserve_too_large"].remedy.not_if)
    return replace(
        capped, gain=f"{capped.gain}; without the flag SGLang takes what --mem-fraction-static allows", text=text
    )


def _percents(fraction: float) -> float:
    return floor(fraction * 100 + 1e-6) / 100  # rounded away from out of memory


def _tokens(view: View, gigabytes: float | None) -> str:
    """Return gigabytes in tokens of the KV cache, in words; empty where unknown."""
    tokens, pools = view.facts.pool(), view.facts.pools_gb
    if gigabytes is None or not pools or not tokens:
        return ""
    gained = gigabytes / pools * tokens
    return f"{gigabytes:+.1f} GB for the KV cache: {gained:+,.0f} tokens, {100 * gained / tokens:+.0f} %"


# CUDA graphs


def most_graph(view: View) -> int:
    """Return the largest batch for which the guide calls graphs useful."""
    return MOST_GRAPH_AT_LARGE_TP if (view.facts.number("tp_size") or 1) >= LARGE_TP else MOST_GRAPH


def _graph_size(view: View, batch: float) -> float | None:
    return next((float(size) for size in GRAPH_SIZES if batch <= size <= most_graph(view)), None)


def _graphs(view: View, _: frozenset[str]) -> list[Draft]:
    facts, most = view.facts, most_graph(view)
    now, batch, half = facts.largest_captured or view.totals["replayed_most"] or None, view.batch(), view.batch(0.5)
    if batch is None:
        return [Draft(facts.graph_arg, None, now)]
    to = _graph_size(view, batch)
    if to is None and half is not None and half <= most:
        to = float(most)  # covers more than half of the batches
    if to is None:
        return [_say(
            f"leave it, or run at most {most} at once: 99 % of the time batches hold up to {batch:g} requests, and the guide calls CUDA graphs"
            f" useful up to {most}; in larger batches the launches matter less",
            "The guide names no larger graph for this number of GPUs.", "most batches are smaller at other times",
        )]  # fmt: skip
    if now is not None and to <= now:
        return []
    gain = f"covers batches up to {to:g}; 99 % of the time they were at most {batch:g}"
    if now is None:
        gain += f"; the start is not in this log, and SGLang captures up to {USUAL_CAPTURED} by itself"
    paid = tuple(_smaller_pool(view, to / now if now else 1.0))
    return [Draft(facts.graph_arg, to, now, gain, text=_GRAPHS, together=paid)]


def _graph_growth(view: View, times: float | None = None) -> float | None:
    """Return the GB that graphs `times` as large take in addition (None: as large as the batch needs)."""
    taken = view.facts.gigabytes("decode_graph") or view.facts.gigabytes("graph")
    now, batch = view.facts.largest_captured, view.batch()
    if times is None:
        size = _graph_size(view, batch) if batch else None
        times = size / now if size and now else None
    return None if taken is None or times is None else taken * max(times - 1.0, 0.0)


def _smaller_pool(view: View, times: float) -> list[Draft]:
    facts, profile, left = view.facts, view.profile, view.facts.reserve_gb
    fraction, capacity = facts.number("mem_fraction_static"), facts.capacity_gb
    if fraction is None or left is None or left > profile.reserve_upper_gb:
        return []
    growth = _graph_growth(view, times)
    if growth is None or not capacity:
        to, gain = round(fraction - 0.01, 2), ""
    elif left - growth >= profile.reserve_lower_gb:
        return []
    else:
        to = _percents(fraction - (profile.reserve_aim_gb - left + growth) / capacity)
        gain = "; ".join(
            filter(None, (f"the larger graphs take about {growth:.1f} GB", _tokens(view, (to - fraction) * capacity)))
        )
    return (
        [Draft("mem_fraction_static", to, fraction, gain, text=_LESS_MEMORY)] if LEAST_FRACTION <= to < fraction else []
    )


def _graphs_off(view: View, _: frozenset[str]) -> list[Draft]:
    facts, backend = view.facts, view.facts.word("attention_backend")
    for arg in ("disable_cuda_graph", "disable_decode_cuda_graph"):
        if facts.is_on(arg):
            return [Draft(arg, to=False, now=True)]
    if facts.is_on("disable_cuda_graph_padding"):
        words = "Only batches of exactly a captured size use a CUDA graph; with padding every smaller batch does."
        return [
            Draft(
                "disable_cuda_graph_padding",
                to=False,
                now=True,
                text=Remedy("", "drop", "", words, "the batch has a captured size all the time"),
            )
        ]
    if backend in UNCAPTURED_BACKENDS:
        return [
            Draft("attention_backend", None, backend, words=f"one that can be captured (now {backend})", text=_BACKEND)
        ]
    if not facts.arguments:
        return [_say(
            "look into the start of the log: graphs are switched off, the batch is larger than the captured ones (SGLang captures up to"
            f" {USUAL_CAPTURED} by itself; --cuda-graph-max-bs, --cuda-graph-max-bs-decode from 0.5.14 on), or the backend cannot be captured",
            "The start is not in this log, so what was captured is an assumption.", "LoRA or speculative decoding cannot be captured",
        )]  # fmt: skip
    return []


# Prefill


def _chunks(view: View, _: frozenset[str]) -> list[Draft]:
    facts = view.facts
    now, ranks = facts.typed("chunked_prefill_size"), max(round(1 / facts.factor("chunked_prefill_size")), 1)
    where = (
        "add prefill servers, or reuse more prefixes"
        if facts.role == "prefill"
        else ("reuse more prefixes, separate prefill and decode, or add a replica")
    )
    elsewhere = _say(
        where,
        "A larger chunk would not help: the GPU is busy with prefill.",
        "prompts share no prefixes, and there is no second GPU",
    )
    if now is not None and (now <= 0 or now >= LARGEST_CHUNK * ranks):
        return [elsewhere]
    if view.totals["full_lines"] < FULL_BATCHES * view.totals["prefill_lines"]:
        return [elsewhere]  # the chunk is hardly ever full
    if facts.reserve_gb is not None and facts.reserve_gb < view.profile.reserve_lower_gb:
        return [_say(
            "lower --mem-fraction-static first: a larger chunk needs memory that is not left",
            "A larger chunk needs memory for its activations, and almost none is free.", "another process holds the memory: check nvidia-smi",
            "The KV cache gets smaller.",
        )]  # fmt: skip
    if now is None:
        seen = view.totals["chunk_seen"]
        gain = f"prefill batches end at {seen:,.0f} tokens" if seen else ""
        return [
            Draft(
                "chunked_prefill_size",
                float(max(2 * seen, SMALL_CHUNK)) if 0 < seen < LARGEST_CHUNK else None,
                seen or None,
                gain,
            )
        ]
    wanted = max(min(2 * int(now), LARGEST_CHUNK * ranks), SMALL_CHUNK * ranks)
    page = max(int(facts.size("page_size") or 1), 1)
    to = float(-(-wanted // (page * ranks)) * page * ranks)
    gain = f"{wanted // ranks:,} for each of the {ranks} ranks" if ranks > 1 else ""
    return [Draft("chunked_prefill_size", to, now, gain, otherwise=(elsewhere,))]


def smaller_chunk(view: View) -> Draft | None:
    """Lower the chunk to 4096, then 2048 for each rank; None where it is that small. -1 and unknown are no chunk at all."""
    facts = view.facts
    now, ranks = facts.typed("chunked_prefill_size"), max(round(1 / facts.factor("chunked_prefill_size")), 1)
    if now is None or now <= 0:
        return Draft("chunked_prefill_size", float(SMALL_CHUNK * ranks), now)
    last = max(int(now) // 2, SMALL_CHUNK) if ranks > 1 else SMALL_CHUNK
    step = next((step for step in (SMALL_CHUNK * ranks, LEAST_CHUNK * ranks, last) if now > step), None)
    return None if step is None else Draft("chunked_prefill_size", float(step), now)


def _interleave(view: View, _: frozenset[str]) -> list[Draft]:
    """Let decode steps run between the chunks of prompts.

    With --prefill-decode-interval as many after each chunk as keep late gaps rare, if first tokens stay in time. In releases without it one with
    each chunk (--enable-mixed-chunk), and chunks that meet the objective.
    """
    facts, objective = view.facts, view.profile.inter_token_seconds
    elsewhere = _say(
        "separate prefill and decode (disaggregation), or add a replica",
        "Prompts and answers share the GPU: what one takes the other waits for.", "prompts are short",
    )  # fmt: skip
    chunk, ranks = facts.typed("chunked_prefill_size") or 0.0, facts.attention_ranks
    if 0 < chunk < LEAST_USEFUL_CHUNK * ranks:  # decode steps between such chunks only delay the prompts
        return [Draft("chunked_prefill_size", LEAST_USEFUL_CHUNK * ranks, chunk, text=BY_ID["prefill_bound"].remedy)]
    shorter = _chunk_within(view, objective)
    if facts.is_on("enable_mixed_chunk"):
        return [replace(shorter, otherwise=(elsewhere,)) if shorter else elsewhere]
    mixed = Draft("enable_mixed_chunk", to=True, now=False)
    together = replace(mixed, together=() if shorter is None else (shorter,))
    steps, now = (
        float(ceil(1.0 / view.profile.late_bound(SLOW_BURN_TIMES))),
        facts.size("prefill_decode_interval") or 0.0,
    )
    if now >= steps or _delays_first_tokens(view, steps - now):
        return [elsewhere]  # shorter chunks, mixed or not, delay first tokens as well
    return [Draft("prefill_decode_interval", steps, now, otherwise=(together, mixed, elsewhere))]


def _delays_first_tokens(view: View, steps: float) -> bool:
    """Whether so many more decode steps after each chunk of a prompt make first tokens late."""
    first, gaps, objective = (
        view.latency("time_to_first_token"),
        view.latency("inter_token"),
        view.profile.time_to_first_token_seconds,
    )
    chunk, computed, started = view.facts.size("chunked_prefill_size"), view.totals["computed"], view.totals["started"]
    if first is None or gaps is None or objective is None or not chunk or not computed or not started:
        return False
    longest, usual = first.quantile(0.99), gaps.quantile(0.5)
    return (
        longest is not None
        and usual is not None
        and longest + ceil(computed / started / chunk) * steps * usual > objective
    )


def _chunk_within(view: View, objective: float | None) -> Draft | None:
    """Return the largest power of two that is computed within the objective; None where the chunk is that small, or the pace is not known."""
    facts, paused = view.facts, view.paused_share
    now, ranks = facts.typed("chunked_prefill_size"), facts.attention_ranks
    if now is None or objective is None or not paused or not view.served or not view.totals["computed"]:
        return None
    pace = view.totals["computed"] / (view.served * paused)
    fits = 2.0 ** floor(log2(max(CERTAIN_PACE * pace * objective, 1.0)))
    if fits < LEAST_USEFUL_CHUNK or 0 < now <= fits * ranks:
        return None
    return Draft("chunked_prefill_size", fits * ranks, now)


def _long_prompts(view: View, holding: frozenset[str]) -> list[Draft]:
    """Enlarge the chunk if prompts are long enough to fill it."""
    facts = view.facts
    chunk, prompt = facts.size("chunked_prefill_size"), view.prompt
    if chunk is not None and prompt is not None and prompt < SHORT_OF_A_CHUNK * chunk:
        return []
    if facts.is_on("enable_mixed_chunk") and "latency_prefill_between" in holding:
        return []  # a larger chunk would delay tokens even more
    return _chunks(view, holding)


# Clients


def _two_digits(requests: float) -> int:
    digit = 10.0 ** max(len(f"{requests:.0f}") - 2, 0)
    return int(requests // digit * digit)


def _more(view: View, _: frozenset[str]) -> list[Draft]:
    running, usage, lowest, facts = view.sum("running"), view.mean("usage"), view.profile.queue_lower, view.facts
    if not running or not usage or lowest is None:
        return []
    fit = max(running, running * view.profile.token_usage_target / usage)
    limit = facts.least_limit
    if limit is not None:
        fit = min(fit, view.serving_ranks * facts.micro_batches * limit)
    waiting = view.serving_ranks * min(lowest, facts.size("max_queued_requests") or lowest)
    ran, now = _two_digits(fit), round(running + (view.sum("queued") or 0.0))
    wanted = ran + round(waiting)
    if wanted <= now:
        return []
    return [
        Draft(
            words=f"send about {wanted:,} requests at once",
            gain=f"now {now:,}; about {ran:,} can run, {waiting:,.0f} more keep the queue filled",
        )
    ]


def _fewer(view: View, _: frozenset[str]) -> list[Draft]:
    running, queued, profile = view.sum("running"), view.sum("queued"), view.profile
    started = view.totals["started"]
    if running is None or not queued or not view.served:
        return []
    if profile.queue_wait_seconds is None:
        waiting, because = view.serving_ranks * profile.queue_upper, f"the queue limit is {profile.queue_upper:,.0f}"
    elif not started:
        return []
    else:
        rate, longest = started / view.served, profile.queue_wait_seconds
        wait = ALLOWED_WAIT * min(longest, profile.time_to_first_token_seconds or longest)
        waiting, because = (
            rate * wait,
            f"SGLang starts about {rate:.2g} requests/s, and none should wait longer than {wait:g} s",
        )
    wanted, now = _two_digits(round(running)) + int(waiting), round(running + queued)
    if not 0 < wanted < now:
        return []
    s = "s" if wanted > 1 else ""
    words = f"send at most {wanted:,} request{s} at once, or add a replica"
    return [Draft(words=words, gain=f"now about {now:,}; {because}")]


# Other flags


def _set(arg: str, to: Value) -> Advise:
    def advise(view: View, _: frozenset[str]) -> list[Draft]:
        now = view.facts.arguments.get(arg)
        return [] if now == to else [Draft(arg, to, now if isinstance(now, (str, bool, float, int)) else None)]

    return advise


def _by_prefix(view: View, holding: frozenset[str]) -> list[Draft]:
    queued = view.mean("queued")
    busy = queued is not None and queued > MOST_SORTED and view.profile.queue_lower is None
    return [] if busy else _set("schedule_policy", "lpm")(view, holding)


def _balance(view: View, _: frozenset[str]) -> list[Draft]:
    method = view.facts.word("load_balance_method")
    router = _say(
        "put a router in front that balances by the load of the ranks", "This release cannot balance requests over its ranks by load; a router can.",
        "long prompts of one client must stay on the rank that has their prefix cached", "One more process to run.",
    )  # fmt: skip
    if method not in {"round_robin", "auto"}:
        return [router]
    return [
        Draft(
            "load_balance_method",
            "total_requests",
            method,
            otherwise=(Draft("load_balance_method", "shortest_queue", method), router),
        )
    ]


def _other_side(view: View, _: frozenset[str]) -> list[Draft]:
    if view.facts.role == "prefill":
        return [
            _say(
                "add decode servers, let each run more requests (its --max-running-requests), or make the transfer faster"
            )
        ]
    usage = view.mean("usage")
    if view.facts.role == "decode" and usage is not None and usage >= view.profile.token_usage_target:
        return [
            _say("add decode servers, or enlarge the KV cache: it is full, so no request of the prefill side gets in")
        ]
    words = (
        "add prefill servers, or make the transfer faster; if the prealloc queue is the long one, add decode servers"
    )
    return [_say(words)] if view.facts.role else []


def _experts(view: View, _: frozenset[str]) -> list[Draft]:
    facts = view.facts
    own, shards = _say("use expert parallelism, by the flag that this release has for it"), facts.number("tp_size")
    if facts.release and flag_of("enable_ep_moe", facts.release) is not None:
        return [Draft("enable_ep_moe", to=True, now=False, otherwise=(own,))]
    if "ep_size" in facts.arguments and shards:
        return [Draft("ep_size", shards, facts.number("ep_size"), otherwise=(own,))]
    return [own]


def _dp_attention(view: View, _: frozenset[str]) -> list[Draft]:
    facts = view.facts
    gpus, replicas = facts.number("tp_size"), facts.number("dp_size") or 1.0
    if not gpus or replicas > 1 or facts.attention_ranks > 1:
        return []
    if facts.release and flag_of("attn_dp_size", facts.release) is not None:
        return [Draft("attn_dp_size", gpus, 1.0)]
    return [Draft("enable_dp_attention", to=True, now=False, together=(Draft("dp_size", gpus, replicas),))]


def _refusals(view: View, _: frozenset[str]) -> list[Draft]:
    if view.facts.word("grammar_backend") == "none" and view.totals["refused_for_grammar"] > view.totals["refused"] / 2:
        return [Draft("grammar_backend", "xgrammar", "none")]
    return [_say(
        "read the reason in the log, before self.rid= at the end of its lines", "SGLang ends such a request at once and prints the reason.",
        "a client sends such requests by mistake: then nothing needs to change",
    )]  # fmt: skip


def _settings(view: View, _: frozenset[str]) -> list[Draft]:
    drafts = []
    for setting in differing(view):
        facts = view.facts
        to: Value = bool(setting.value) if setting.is_switch else setting.value
        now: Value = (
            facts.is_on(setting.arg) if setting.is_switch else facts.word(setting.arg) or facts.typed(setting.arg)
        )
        now = facts.largest_captured if setting.arg == facts.graph_arg else now
        text = Remedy(
            setting.arg,
            "set",
            "",
            f"The guide sets it for this workload: it {setting.why}.",
            "the workload is another one",
        )
        gain = (
            "with --hicache-ratio 2: a cache of twice the size in host memory"
            if setting.arg == "enable_hierarchical_cache"
            else ""
        )
        drafts.append(Draft(setting.arg, to, now, gain, text=text))
    return drafts


_FLAG = re.compile(r"--[a-z][a-z0-9_-]{2,60}[a-z0-9]")
_ASKED = re.compile(
    r"Tried to allocate ([\d.]{1,8}) GiB.{0,200}?(?:([\d.]{1,8}) GiB total capacity|total capacity of ([\d.]{1,8}) GiB)"
)
_UNRECOGNIZED = re.compile(r"unrecognized arguments: ([^\n]+)")
_ABOVE = re.compile(r"mem-fraction-static\W{0,3} (?:above|to) (0\.\d{1,4})")
_LESS, _MORE = (
    re.compile(r"smaller|lower|reduc|decrease|fewer", re.IGNORECASE),
    re.compile(r"larger|higher|increase|raise|raising", re.IGNORECASE),
)


_FAILURES_OF = {"memory": OUT_OF_MEMORY, "hang": ("scheduler_stuck",)}  # by the class of an end


def _arg_of(flag: str) -> str:
    return flag[2:].replace("-", "_")


def _said(view: View) -> str:
    """Return the words that explain an end, of which no part can be a client's."""
    return view.explanation.text if view.explanation is not None and not view.explanation.marked else ""


def _by_explanation(view: View, holding: frozenset[str]) -> list[Draft]:
    """SGLang's own words first: an error that names a flag says what to change; then what ends of its class have in common."""
    said = view.explanation
    if said is not None and any(row in holding for row in _FAILURES_OF.get(said.ending, ())):
        return []  # the failure beside it has the advice
    ending = CLASSES[said.ending if said is not None else "unknown"]
    if said is None:
        return [*_named(view, view.ended), _say(ending.do, ending.why, ending.not_if)]
    if refused := _UNRECOGNIZED.search(said.text):
        return [*map(_unknown, _FLAG.findall(refused[1])), _say(ending.do, ending.why, ending.not_if)]
    named = [] if said.marked else _named(view, said.text)
    if said.ending == "memory":
        chunk, fewer = smaller_chunk(view), _fewer_decoding(view)
        named += [replace(chunk, text=BY_ID["out_of_memory_prefill"].remedy)] if chunk else []
        named += [fewer] if fewer else []
    return [*named, _say(ending.do, ending.why, ending.not_if)]


def _unknown(flag: str) -> Draft:
    """Say what to do with a flag that SGLang refuses."""
    spelled = flag.replace("_", "-")
    if spelled != flag and _arg_of(spelled) in argument_names():
        words = f"spell it {spelled}: SGLang's flags have hyphens"
    elif _arg_of(spelled) in argument_names():
        words = f"drop {flag}, or install a release that has it: other releases of SGLang have this flag"
    else:
        words = f"drop {flag}: no release up to {releases()[-1]} has this flag"
    return _say(
        words,
        "SGLang refuses a command line with a flag that its release does not have.",
        "the flag belongs to another program",
    )


def _down(view: View, holding: frozenset[str]) -> list[Draft]:
    is_last = view.last.get("ends", -inf) >= view.last.get("starts", -inf)  # it has not started again since
    if view.explains_now is not None:
        return _by_explanation(view, holding)
    return [*_named(view, view.ended if is_last else ""), Draft()]


def _named(view: View, words: str) -> list[Draft]:
    """Return the flags that an error of SGLang's names."""
    flags = list(dict.fromkeys(_FLAG.findall(words)))[:2]
    direction = "lower" if _LESS.search(words) else "raise" if _MORE.search(words) else "set"
    drafts = []
    known = recognise(words)
    ways = dict(known.directions) if known is not None else {}
    for flag in flags:
        arg, way = _arg_of(flag), direction
        known_flag = nearest_flag(arg, releases()[-1])
        if flag in ways:
            way = _WAYS[ways[flag]]
        elif known_flag is not None and known_flag.kind in {"switch", "either"}:
            way = "set"  # nothing about it can be lower
        text = Remedy(
            arg,
            way,
            f"{way} it: SGLang's own error names it",
            f"SGLang ended with: {shortened(words, 300)}",
            "another error came before this one",
        )
        drafts.append(Draft(arg, None, view.facts.typed(arg), words=text.words, text=text))
    return drafts


_WAYS = {"increase": "raise", "decrease": "lower", "set": "set", "unset": "drop"}


def _says(view: View, said: Said) -> Draft | None:
    """Return what SGLang recommends as a change of the first flag that this release has."""
    directions = dict(said.advice.directions)
    known = (flag for flag in said.advice.flags if flag in directions and view.facts.flag(_arg_of(flag)))
    flag = next(known, None)
    times = f", {said.count:,} times" if said.count > 1 else ""
    why, not_if = (
        f"SGLang printed at its start{times}: “{said.text.rstrip('.')}”",
        "what the line is about does not matter for this load",
    )
    if flag is None:
        variables = ", ".join(each for each in said.advice.variables if each in directions)
        return _say(f"set {variables} as SGLang's own line says", why, not_if) if variables else None
    arg, way = _arg_of(flag), _WAYS[directions[flag]]
    return Draft(
        arg,
        None,
        view.facts.typed(arg),
        words=f"{way} it: SGLang itself recommends it",
        text=Remedy(arg, way, "", why, not_if),
        direction=way,
    )


def _recommended(view: View, _: frozenset[str]) -> list[Draft]:
    drafts = (_says(view, said) for said in view.facts.recommended())
    return [draft for draft in drafts if draft is not None]


def way_of(said: Said, arg: str) -> str:
    """Return the direction in which a recommendation of SGLang's goes for an argument; empty where it only names it."""
    return _WAYS.get(dict(said.advice.directions).get(f"--{arg.replace('_', '-')}", ""), "")


def by_sglang(row: Row, view: View, said: Said) -> list[Change]:
    """Return a recommendation of SGLang's as the change of a row; none where this release has no such flag."""
    draft = _says(view, said)
    return [] if draft is None else [spelled(row, view, draft)]


ADVICE: dict[str, Advise] = {
    "sglang_recommends": _recommended,
    "no_kv_cache": _no_kv_cache,
    "kv_transfer_failing": _transfers,
    "hicache_degraded": _hicache,
    "costly_settings": _costly_settings,
    "crashed": _by_explanation,
    "server_down": _down,
    "out_of_memory_prefill": _beside_others(_else_memory(smaller_chunk)),
    "out_of_memory_decode": _beside_others(_else_memory(_fewer_decoding)),
    "graph_memory_short": _beside_others(_graph_memory),
    "out_of_memory_any": _beside_others(_out_of_memory),
    "conservativeness_ineffective": _ineffective,
    "retracting_too_often": _retracting,
    "hybrid_pool_full": _hybrid,
    "dp_imbalanced": _balance,
    "running_at_limit": _at_limit,
    "pd_queue": _other_side,
    "prefill_bound": _chunks,
    "admission_too_conservative": _too_conservative,
    "cuda_graph_not_covering": _graphs,
    "cuda_graph_off": _graphs_off,
    "memory_reserve_too_small": lambda view, holding: _reserve(view, holding, too_large=False),
    "memory_reserve_too_large": lambda view, holding: _reserve(view, holding, too_large=True),
    "latency_batch_too_large": _smaller_batch,
    "latency_queue": _fewer,
    "latency_prefill_between": _interleave,
    "latency_long_prompts": _long_prompts,
    "clients_time_out": _fewer,
    "requests_rejected": _fewer,
    "running_far_below_limit": _pool_full,
    "queue_too_long": _fewer,
    "client_too_slow": _more,
    "shared_prefixes_unused": _by_prefix,
    "prefix_policy_wasted": _set("schedule_policy", "fcfs"),
    "prompts_beyond_kv_cache": _longest_prompts,
    "prompts_beyond_context": _longest_requests,
    "requests_refused": _refusals,
    "profile_settings": _settings,
    "torch_compile_candidate": _set("enable_torch_compile", to=True),
    "quantization_candidate": _set("quantization", "fp8"),
    "expert_parallel_candidate": _experts,
    "dp_attention_candidate": _dp_attention,
}

# The reasons of changes that are not the row's own.
_CAPPED = Remedy(
    "max_total_tokens", "raise", "", "--max-total-tokens keeps the KV cache smaller than GPU memory allows, and a small KV cache fills up with few requests.",
    "no more fits into GPU memory: then SGLang uses what fits", "Less GPU memory stays free for peaks.",
)  # fmt: skip
_LESS_MEMORY = BY_ID["out_of_memory_any"].remedy
_ROOM = Remedy(
    "mem_fraction_static", "raise", "", "Weights and KV cache share this part of the GPU's memory, and the weights take all of it.",
    "the activations of long prompts need what is left beside it: then use more GPUs or smaller weights", "Less GPU memory stays free for peaks.",
)  # fmt: skip
_GRAPHS = BY_ID["cuda_graph_not_covering"].remedy
_STATES = BY_ID["hybrid_pool_full"].remedy
_FEWER_GRAPHS = Remedy(
    "cuda_graph_max_bs", "lower", "", "SGLang captures CUDA graphs for batch sizes that never run, and each size takes GPU memory.",
    "larger batches run at other times", "Larger batches run without a CUDA graph.",
)  # fmt: skip
_SMALLER_PREFILL_GRAPHS = Remedy(
    "cuda_graph_max_bs_prefill", "lower", "", "It ran out while graphs of prefill were captured; the largest of them takes most of it.",
    "it still does not fit: then --cuda-graph-backend-prefill=disabled, as SGLang's own error says", "Larger prefill batches run without a CUDA graph.",
)  # fmt: skip
_MICRO = Remedy(
    "pp_max_micro_batch_size", "raise", "", "This flag limits each micro batch of the pipeline below its share of --max-running-requests.",
    "the batches of the pipeline are not full", "Inter-token latency rises as more requests run together.",
)  # fmt: skip
_BACKEND = Remedy(
    "attention_backend", "set", "", "This attention backend cannot be captured in a CUDA graph.",
    "LoRA, speculative decoding or expert communication cannot be captured", "Another backend may be faster or slower at long prompts: measure both.",
)  # fmt: skip
_EIGHT = Remedy(
    "kv_cache_dtype", "set", "", "An 8-bit KV cache holds twice as many tokens in the same memory.",
    "answers must not lose any accuracy, or the GPU has no FP8", "A little accuracy.",
)  # fmt: skip
_EXPERT = Remedy(
    "enable_ep_moe", "add", "", "With whole experts on each GPU the matrix multiplications are fewer and larger.",
    "batches are small, or some experts are used far more than others", "Requests wait for the GPU whose experts are used most.",
)  # fmt: skip
_RANKS = Remedy(
    "dp_size", "raise", "", "DP attention needs its number of ranks. With as many ranks as GPUs each KV cache entry is stored once.",
    "few requests run at once: then latency gets worse",
    "SGLang then multiplies --schedule-conservativeness by 0.3 and divides --chunked-prefill-size by the number of ranks: set both again.",
)  # fmt: skip
_BY_ARG = {
    "kv_cache_dtype": _EIGHT,
    "enable_ep_moe": _EXPERT,
    "dp_size": _RANKS,
    "attn_dp_size": _RANKS,
    "max_total_tokens": _CAPPED,
}
_LIMIT_TEXTS = {"raise": BY_ID["running_at_limit"].remedy, "lower": Remedy(
    "max_running_requests", "lower", "", "Fewer requests at once need less of the KV cache and less GPU memory.",
    "a single request is too long for the KV cache: then lower --context-length", "Fewer requests run at once, and the queue may grow.",
)}  # fmt: skip


# Spelling


def advise(row: Row, view: View, holding: frozenset[str]) -> list[Change]:
    """Return the changes of a row, best first; without a function of its own the row's words."""
    drafts = ADVICE[row.id](view, holding) if row.id in ADVICE else [Draft(row.remedy.arg)]
    if not drafts and not row.needs_advice:
        drafts = [_NOTHING if row.remedy.arg else Draft()]
    changes: list[Change] = []
    for draft in drafts:
        taken = next((each for each in (draft, *draft.otherwise) if _is_accepted(view, each)), None)
        if taken is not None:
            changes += [spelled(row, view, each) for each in (taken, *taken.together)]
    return changes


def _is_accepted(view: View, draft: Draft) -> bool:
    release = view.facts.release
    if not draft.arg or release is None:
        return True
    if not view.facts.flag(draft.arg):
        return False
    if draft.to is None:
        return True
    changes = {each.arg: setting(each.to) for each in (draft, *draft.together)}
    return objection(release, typed_settings(view), changes) is None


def typed_settings(view: View) -> dict[str, object]:
    """Return the arguments in force, as typed."""
    arguments = view.facts.arguments
    multiplied = {"schedule_conservativeness", "chunked_prefill_size"} & arguments.keys()
    return {**arguments, **{arg: view.facts.typed(arg) for arg in multiplied}}


def setting(value: Value) -> Value:
    """Return a value for a command line: whole numbers without a point."""
    return int(value) if isinstance(value, float) and value.is_integer() and not isinstance(value, bool) else value


def spelled(row: Row, view: View, draft: Draft) -> Change:
    """Return a draft as a change, with its reasons."""
    text = draft.text
    direction = draft.direction or _direction(draft) or (text or row.remedy).direction
    if text is None:
        own = draft.arg == row.remedy.arg or not draft.arg
        text = (
            row.remedy
            if own
            else _LIMIT_TEXTS.get(direction, row.remedy)
            if draft.arg == "max_running_requests"
            else _BY_ARG.get(draft.arg, row.remedy)
        )
    figures = figures_of(view)
    words = draft.words or (row.remedy.words if draft.to is None else "")
    gain = draft.gain + (_spellings(view, draft) if draft.arg else "")
    return Change(
        draft.arg, view.facts.flag(draft.arg) if draft.arg else "", draft.now, setting(draft.to), fill(words, figures),
        direction, fill(text.why, figures), fill(text.cost, figures), fill(gain, figures), fill(text.not_if, figures),
        removes=draft.to is False and draft.now is True,
    )  # fmt: skip


def _spellings(view: View, draft: Draft) -> str:
    """Say the two names of the graph flag where the release is not known."""
    if view.facts.release is not None or not draft.arg.startswith("cuda_graph_max_bs"):
        return ""
    value = f" {draft.to:g}" if isinstance(draft.to, float) else ""
    known = releases()
    return f"; --cuda-graph-max-bs{value} up to SGLang 0.5.13, --cuda-graph-max-bs-decode{value} from 0.5.14 to {known[-1]}"


def _direction(draft: Draft) -> str:
    now, to = draft.now, draft.to
    if isinstance(to, bool):
        return "add" if to else "drop"
    if isinstance(now, (int, float)) and isinstance(to, (int, float)) and not isinstance(now, bool):
        return "raise" if to > now else "lower"
    return ""


def figures_of(view: View) -> dict[str, str]:
    """Return the thresholds as words, for texts."""
    profile, edition = view.profile, view.profile
    lower = edition.queue_lower or (50 if view.facts.is_first_edition else 100)
    upper = profile.queue_upper
    ages = view.given_up_ages
    after = (
        "of every age" if ages is None else "within a second" if view.cancels else f"after {ages[0]:g} to {ages[1]:g} s"
    )
    return {
        **profile.figures,
        "given_up_after": after,
        "queue_range": f"{lower:g} to {upper:,.0f}",
        "most_graph": str(most_graph(view)),
    }


_TEMPLATE = re.compile(r"\{([a-z_]+)\}")


def fill(text: str, figures: dict[str, str]) -> str:
    """Fill thresholds into a text; what is no name of one stays."""
    return _TEMPLATE.sub(lambda name: figures.get(name[1], name[0]), text)
