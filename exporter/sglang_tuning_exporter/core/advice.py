"""Which flag to set to what: a function for each row, from the facts and the load of the running server, and one table of reasons. Pure.

Values are flag values as typed. A function gives changes, the best first, and a tuple of changes that are made together; `advise` leaves out
what the release has not, refuses or ignores, and adds the reasons.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import ceil, floor, inf, log2
from typing import TypeAlias

from sglang_tuning_exporter.core import rows
from sglang_tuning_exporter.core.events import ENDINGS, of_transfer, relaxed, shortened
from sglang_tuning_exporter.core.findings import Change, Value
from sglang_tuning_exporter.core.server import USUAL_CAPTURED
from sglang_tuning_exporter.core.view import LOWERED, View
from sglang_tuning_exporter.sglang import flags
from sglang_tuning_exporter.sglang.advices import Advice, recognise

# The guide's values.
RAISED = 1.3
FULL_LENGTH = 0.8  # new-token ratio after retractions, above which answers use most of their max_new_tokens
LOWERED_LIMIT, FEWER_DECODING = 0.8, 0.75  # of the running batch
MOST_TIMES, MOST_WITHOUT_GRAPHS = 8.0, 2.0  # the present limit, in one step
SMALL_BATCH = 8
LEAST_SHARE = 0.25  # of the batch, in one step
LARGEST_CHUNK, LEAST_CHUNK = 16384, 2048
LEAST_USEFUL_CHUNK = 1024.0  # tokens: a smaller chunk takes about as long
SHORT_OF_A_CHUNK = 0.125  # at most one prompt in eight fills it
CERTAIN_PACE = 0.5  # of the estimated pace of prefill, which assumes full chunks
GRAPH_SIZES = (8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768)
# The guide: 512 or 768, the larger at large tensor parallelism.
MOST_GRAPH, MOST_GRAPH_AT_LARGE_TP, LARGE_TP = 512, 768, 8
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

Offer: TypeAlias = "Change | tuple[Change, ...]"
Advise: TypeAlias = Callable[[View, frozenset[str]], Iterable[Offer]]
CONSERVATIVENESS, LIMIT, FRACTION, CHUNK = (
    "schedule_conservativeness", "max_running_requests", "mem_fraction_static", "chunked_prefill_size",
)  # fmt: skip
_PRESENT = "the present value"


def _set(
    view: View,
    arg: str,
    to: Value = None,
    gain: str = "",
    words: str = "",
    *,
    now: Value = _PRESENT,
    direction: str = "",
) -> Change:
    """Return a change of a flag; without a value `words` say what to try. `now` and `direction` only where the arguments do not show them."""
    now = _now(view, arg, to) if now is _PRESENT else now
    if isinstance(to, bool):
        direction = direction or ("add" if to else "drop")
    elif isinstance(now, (int, float)) and isinstance(to, (int, float)) and not isinstance(now, bool):
        before = inf if arg == CHUNK and now < 0 else now  # without chunks a prompt is computed whole
        direction = direction or ("raise" if to > before else "lower")
    removes = to is False and now is True
    return Change(arg, direction, words, flag=view.facts.flag(arg), now=now, to=setting(to), gain=gain, removes=removes)


# Advice to people; with the row's own reasons where none are given.
_say = partial(Change, "", "")


def _in_words(change: Change, words: str) -> Change:
    """Return advice to people with the reasons of a change."""
    return replace(change, arg="", direction="", words=words)


def _now(view: View, arg: str, to: Value) -> Value:
    facts = view.facts
    if isinstance(to, bool) or isinstance(facts.arguments.get(arg), bool):
        return facts.is_on(arg)
    if arg == facts.graph_arg:
        return facts.largest_captured
    if arg == LIMIT:
        flag, force = _limit(view)
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


def _can(view: View, offer: Offer) -> bool:
    """Whether these changes change something, the release has their flags, and accepts their values together."""
    release, changes = view.facts.release, offer if isinstance(offer, tuple) else (offer,)
    named = [each for each in changes if each.arg]
    if any(each.to is not None and each.to == each.now for each in named):
        return False
    if release is None or not named:
        return True
    values = {each.arg: each.to for each in named if each.to is not None}
    return all(each.flag for each in named) and flags.have_effect(release, values, typed_settings(view))


def _first(view: View, *offers: Offer) -> list[Offer]:
    """Return the first offer that the release accepts."""
    return [each for each in offers if _can(view, each)][:1]


# Retractions and admission


def _retracting(view: View, holding: frozenset[str]) -> list[Offer]:
    facts, totals = view.facts, view.totals
    now, factor = facts.typed(CONSERVATIVENESS), facts.factor(CONSERVATIVENESS)
    if now is not None and now * factor >= RAISED - 0.01:
        return _ineffective(view, holding)
    raised = _set(view, CONSERVATIVENESS, round(RAISED / factor, 2))
    larger = _larger_pool(view) if holding.isdisjoint(rows.OUT_OF_MEMORY) else []  # else memory is short
    share = totals["ratio_after"] / totals["ratio_after:n"] if totals["ratio_after:n"] else 0.0
    if share >= FULL_LENGTH:
        gain = f"answers use about {100 * min(share, 1.0):.0f} % of their max_new_tokens: a higher conservativeness alone retracts on"
        return [*(replace(each, gain=gain) for each in larger or _fit(view)), raised]
    words = "or enlarge the KV cache: raise --max-total-tokens, now {now:g}, to {to:g}, or remove it"  # one flag is changed at a time
    return [raised, *(_in_words(_CAPPED, words.format(now=each.now, to=each.to)) for each in larger)]


def _fit(view: View) -> list[Change]:
    """Run as many requests as the KV cache holds to their end."""
    pool, prompt, answer, batch = view.facts.pool(), view.prompt, view.answer, view.batch(0.5)
    if not pool or not prompt or not answer or not batch:
        return []
    fits, limit = max(int(pool / (prompt + answer)), 1), view.facts.least_limit
    return [] if fits >= min(batch, limit or inf) else [_set(view, LIMIT, float(fits * view.facts.shared_by))]


def _ineffective(view: View, _: frozenset[str]) -> list[Offer]:
    if larger := _larger_pool(view):
        return [*larger]
    gain = f"above {rows.CEILING} conservativeness changes nothing"
    return [
        *(replace(each, gain=gain) for each in _run_fewer(view, view.batch(0.5), LOWERED_LIMIT)),
        _say(
            f"enlarge the KV cache ({_pool_flags(view)})",
            "The KV cache is too small for the running requests; a larger one removes the cause of the retractions.", "no GPU memory is free",
            "An 8-bit KV cache costs a little accuracy; a larger one leaves less memory for peaks.",
        ),
    ]  # fmt: skip


def _too_conservative(view: View, _: frozenset[str]) -> list[Offer]:
    now, target = view.facts.typed(CONSERVATIVENESS), round(LOWERED / view.facts.factor(CONSERVATIVENESS), 2)
    if now is None or now > target + 0.005:
        return [_set(view, CONSERVATIVENESS, target)]
    return [_say(
        "ask for fewer max_new_tokens: the flag is low enough; a new request waits until its whole max_new_tokens fits beside what SGLang"
        " reserves for running requests",
        "SGLang starts a request only if its max_new_tokens (4096 at most) fits beside what it reserves for running requests.",
        "clients need the answers that long", "Longer answers are truncated.",
    )]  # fmt: skip


# The running limit


def _limit(view: View) -> tuple[float | None, float | None]:
    """Return --max-running-requests as typed, and what is in force for all ranks that share it."""
    facts = view.facts
    least, seen = facts.least_limit, view.totals["limit_seen"] or None
    return facts.size(LIMIT), (least * facts.shared_by if least is not None else seen)


def _run_fewer(view: View, ran: float | None, share: float) -> list[Change]:
    """Run only a share of the batch; nothing where one request runs for each rank."""
    flag, force = _limit(view)
    shared_by, now = view.facts.shared_by, flag or force
    known = [figure for figure in (force, ran * shared_by if ran else None) if figure]
    if not known:
        return [_set(view, LIMIT, words=f"about {100 * share:.0f} % of the batch that runs", direction="lower")]
    to = float(max(shared_by, int(share * min(known))))
    return [] if min(known) <= shared_by or (now and to >= now) else [_set(view, LIMIT, to, direction="lower")]


def _fewer_decoding(view: View) -> list[Change]:
    """Run fewer than when memory ran out in decode."""
    return _run_fewer(view, view.totals["failed_batch"] or view.batch(), FEWER_DECODING)


def _smaller_batch(view: View, _: frozenset[str]) -> list[Change]:
    batch, step, objective = view.batch(0.5), view.step_seconds, view.profile.inter_token_seconds
    if batch is None or batch <= SMALL_BATCH or not step or not objective:
        return []
    return _run_fewer(view, batch, max(objective / step, LEAST_SHARE))


def _at_limit(view: View, _: frozenset[str]) -> list[Offer]:  # noqa: PLR0911 - one for each thing that limits
    facts = view.facts
    flag, force = _limit(view)
    now, usage = flag or force, view.mean("usage", "running_limit") or view.mean("usage")
    if not now or usage is None:
        return [_set(view, LIMIT)]
    if states := _more_states(view):
        return states
    if facts.reduced:
        return [_say(
            f"make room for more requests (more memory for the KV cache): SGLang itself reduced the limit to {facts.least_limit or now:g}"
            " for want of capacity, whatever --max-running-requests says",
            "Its line in the start says so. A higher flag is reduced again.", "memory is free for nothing else", "Less GPU memory stays free for peaks.",
        )]  # fmt: skip
    room = min(MOST_TIMES, view.profile.token_usage_target / usage) if usage > 0 else MOST_TIMES
    step, objective, running = view.step_seconds, view.profile.inter_token_seconds, view.mean("running")
    if step and objective and step > objective and running:
        room = min(room, SMALL_BATCH * facts.shared_by / now)
        if room <= 1.0:
            words = f"nothing: a token takes {step:.3g} s already, and more requests at once would make it longer"
            return [_say(words)]
    arg = next((each for each in ("pp_max_micro_batch_size", "max_micro_batch_size") if facts.size(each)), "")
    micro, total = facts.size(arg), max(facts.limits.values(), default=None) or facts.size(LIMIT)
    if micro and total and micro < total // facts.micro_batches:
        to = min(float(_rounded(micro * room)), total // facts.micro_batches)
        return [_set(view, arg, to)] if to > micro else []
    if flag is not None and force is not None and force + facts.shared_by <= flag:
        return []  # the KV cache allows fewer than the flag
    to = float(_rounded(now * room))
    if to <= now or LOWERED_LIMIT * to <= now + 1:
        words = f"nothing, or a little more memory for the KV cache: at a token usage of {usage:.2f} hardly more than {now:g} fit"
        return [_say(words)]
    offered = ((running or 0.0) + (view.mean("queued") or 0.0)) * facts.shared_by
    ran = min(to, max(offered, now))  # no more than clients send
    more = f", about {min(usage * ran / now, 1.0):.2f} with {ran:,.0f} at once" if ran > now else ""
    gain = f"token usage is {usage:.2f} at this limit{more}"
    shown: Value = now
    if not facts.limits and flag is None:
        gain += f"; the start is not in this log: the batch stays at {now:g}"
        shown = now if view.totals["limit_seen"] else None
    return _within_graphs(view, _set(view, LIMIT, to, gain, now=shown, direction="raise"), to, now, usage)


def _within_graphs(view: View, raised: Change, to: float, now: float, usage: float) -> list[Offer]:
    """Keep the larger batch within the captured graphs, or raise those too, where what they leave of the KV cache holds it."""
    facts, gain = view.facts, raised.gain
    largest, batch = facts.largest_captured, ceil(to / facts.shared_by)
    unset = not facts.is_before(0, 5, 14) and facts.number(facts.graph_arg) is None
    follows = unset and largest in {now, now // facts.shared_by}
    if largest is None or batch <= largest or facts.without_graph or follows:
        return [raised]
    if largest * facts.shared_by >= MOST_WITHOUT_GRAPHS * now:
        gain = f"{gain}; CUDA graphs cover batches up to {largest:g}"
        return [replace(raised, to=setting(largest * facts.shared_by), gain=gain)]
    size = _graph_size(view, batch)
    if size is None or size <= largest:
        return [replace(raised, gain=f"{gain}; batches beyond {largest:g} will run without CUDA graphs")]
    graphs = _larger_graphs(view, size, largest, f"covers batches up to {size:g}, {batch} will run")
    fraction, lowered = facts.number(FRACTION), graphs[-1].to if isinstance(graphs, tuple) else None
    if fraction and isinstance(lowered, float) and facts.pools_gb and facts.capacity_gb:
        taken = (fraction - lowered) * facts.capacity_gb / facts.pools_gb
        if usage * to / now > view.profile.token_usage_target * (1.0 - taken):
            share = f"{100 * taken:.0f} %" if taken < 1 else "all"
            words = f"nothing, or add a server: CUDA graphs for {batch} requests take {share} of the KV cache that these would need"
            return [_say(words)]
    return [raised, graphs]


def _more_states(view: View) -> list[Offer]:
    """Enlarge the mamba cache where its states decide how many requests run."""
    each, states = view.facts.states_a_request, view.facts.states
    if each is None or states is None:
        return []
    gain = (
        f"the mamba cache has {states:g} states, {each:g} for each running request: whatever --max-running-requests is, no more than"
        f" {states // each:g} run"
    )
    typed, limit = view.facts.size("max_mamba_cache_size"), view.facts.size(LIMIT)
    if typed is None:
        return _second_cache(view, "mamba_full_memory_ratio", 4.0, gain)
    more = _set(view, "max_mamba_cache_size", float(int(POOL_STEP * typed)), gain)
    return [(more, _set(view, LIMIT, float(int(POOL_STEP * limit)))) if limit else more]


def _second_cache(view: View, arg: str, most: float, gain: str) -> list[Offer]:
    now = view.facts.number(arg)
    to = most if now is None else min(round(POOL_STEP * now, 2), most)
    if now is None:
        return [_say(gain)]
    return _first(view, _set(view, arg, to, gain), _say(gain)) if to > now else []


def _hybrid(view: View, _: frozenset[str]) -> list[Offer]:
    is_mamba = view.facts.states is not None or view.totals["mamba"] > view.totals["admission/hybrid_pool_full"] / 2
    name, arg, most = (
        ("mamba", "mamba_full_memory_ratio", 4.0) if is_mamba else ("sliding-window", "swa_full_tokens_ratio", 1.0)
    )
    return _second_cache(view, arg, most, f"the {name} cache is full: give it more of the memory")


def _rounded(value: float) -> int:
    step = 1 if value < 32 else 8 if value < 256 else 64
    return max(int(value) // step * step, 1)


# The KV cache


def _larger_pool(view: View, tokens: float = 0.0) -> list[Change]:
    """Raise the flag that keeps the KV cache small, where it does, at least to so many tokens: SGLang takes the smaller of it and what fits."""
    cap, pool = view.facts.size("max_total_tokens"), view.facts.pool()
    if not cap or (pool is not None and pool < CAP_IN_FORCE * cap):
        return []
    return [_set(view, "max_total_tokens", _doubled(2 * cap, tokens), "twice the tokens, if the memory holds them")]


def _eight_bits(view: View) -> str:
    facts = view.facts
    if facts.is_cpu or not facts.arguments or facts.arguments.get("kv_cache_dtype") not in ("auto", None):
        return ""
    choices = flags.choices_of("kv_cache_dtype", facts.release) if facts.release else None
    return next((kind for kind in EIGHT_BITS if choices is None or kind in choices), "")


def _pool_flags(view: View) -> str:
    kind = _eight_bits(view)
    return f"--mem-fraction-static, --kv-cache-dtype {kind}" if kind else "--mem-fraction-static"


def _pool_full(view: View, holding: frozenset[str]) -> list[Offer]:
    limit, running, elsewhere = view.facts.least_limit, view.mean("running"), view.totals["elsewhere"]
    if limit and running and 2 * running >= limit:
        return []  # the limit is as near as the memory
    larger, kind = _larger_pool(view), _eight_bits(view)
    if elsewhere:
        words = "enlarge the KV cache of this decode server, or add decode servers: requests wait in its prealloc queue for room"
        return [*larger, _say(words)]
    unused = _reserve(view, holding, too_large=True) if "memory_reserve_too_large" in holding else []
    if more := larger or [each for each in unused if each.to is not None][:1]:
        return [*more]
    if not view.facts.arguments:
        words = "raise it in steps of 0.01 (its value is not in this log), or set --kv-cache-dtype fp8_e4m3"
        return [_set(view, FRACTION, words=words, direction="raise")]
    other = _say(
        "enlarge the KV cache (--mem-fraction-static, more GPUs), or send shorter requests",
        "Each running request keeps its tokens in the KV cache, so the KV cache limits how many run.",
        "the queue is short: then a full KV cache is normal for a well-loaded server",
    )
    return _first(view, _set(view, "kv_cache_dtype", kind), other) if kind else [other]


def _longest_prompts(view: View, _: frozenset[str]) -> list[Change]:
    mean = view.totals["too_long_tokens"] / max(view.totals["too_long"], 1.0)
    words = f"enlarge the KV cache ({_pool_flags(view)}), or send shorter prompts: those refused have {mean:,.0f} tokens on average"
    return _larger_pool(view, mean) or [_say(words)]


def _longest_requests(view: View, _: frozenset[str]) -> list[Change]:
    now = view.facts.size("context_length")
    mean = view.totals["beyond_context_tokens"] / max(view.totals["beyond_context"], 1.0)
    gain = f"those refused have {mean:,.0f} tokens on average"
    return [_set(view, "context_length", _doubled(2 * now, mean), gain)] if now else []


def _doubled(size: float, tokens: float) -> float:
    while size < tokens:
        size *= 2
    return size


# GPU memory


def _memory(advise: Callable[[View], Iterable[Change]]) -> Advise:
    """Put another process that holds memory of the GPU, by SGLang's own error, before any flag."""

    def made(view: View, _: frozenset[str]) -> Iterator[Offer]:
        if (held := view.totals["held_elsewhere_gb"]) >= MUCH_ELSEWHERE_GB:
            yield _say(
                f"end or move the other process that holds {held:.1f} GB of this GPU's memory",
                "SGLang's own error lists it; no flag brings that memory back.",
                "it belongs there, such as a second server: then the flags of this finding",
            )
        yield from advise(view)

    return made


def _under_load(first: Callable[[View], list[Change]]) -> Advise:
    """Advise where an allocation failed under load: `first`; a KV cache without room needs no GPU memory, which everything else frees."""

    def made(view: View, holding: frozenset[str]) -> Iterator[Offer]:
        if _POOL_IS_FULL.search(_error(view)):
            changes = first(view) or _fewer_decoding(view)
            yield from (replace(each, why=_FULL_POOL, not_if=_LEAKS) for each in changes)
            return
        yield from _memory(lambda view: first(view) or _out_of_memory(view))(view, holding)
        if kind := _eight_bits(view):
            words = f"further: an FP8 KV cache (--kv-cache-dtype {kind}) or FP8 weights, smaller CUDA graphs"
            yield _say(
                words, "They need less of the GPU's memory.", "answers must not lose any accuracy", "A little accuracy."
            )

    return made


def _error(view: View) -> str:
    """Return the words of the error that explains the end; none where a part of them can be a client's."""
    said = view.explanation
    return said.text if said is not None and not said.marked else ""


def _out_of_memory(view: View) -> list[Change]:
    facts, now, said, text = view.facts, view.facts.number(FRACTION), view.explanation, _error(view)
    if (asked := _ASKED.search(text)) and float(asked[1]) > float(asked[2] or asked[3]):
        return [_say(
            f"lower --max-total-tokens where it is set; else search SGLang's issues for this error: one allocation of {asked[1]} GiB is more than"
            f" the {asked[2] or asked[3]} GiB of the GPU",
            "No share of the memory makes room for it: the size was computed wrongly, or set.", "another GPU model was expected here",
        )]  # fmt: skip
    if "mem-fraction-static" in text and _MORE.search(text):  # the weights leave too little for the KV cache
        weights, free, named = facts.weights_gb, facts.capacity_gb, _ABOVE.search(text)
        least = float(named[1]) if named else weights / free if weights and free else 1.0
        beside = (
            "" if named or least >= 1.0 else f"the weights alone take {weights:.4g} of {free:.4g} GB, {least:.3f} of it"
        )
        wanted = ceil(100 * least + 0.01) / 100
        if free and not named:  # as much as leaves the usual reserve
            wanted = max(wanted, min(_percents(1.0 - view.profile.reserve_aim_gb / free), MOST_FRACTION))
        to = wanted if least < MOST_FRACTION and wanted > (now or 0.0) else None
        words, way = "raise it: SGLang's own error asks for it", "" if to and now else "raise"
        why, not_if = (
            f"SGLang ended with: {shortened(text, 300)}",
            "the weights leave nothing of the GPU: then more GPUs",
        )
        return [replace(_set(view, FRACTION, to, beside, words, direction=way), why=why, not_if=not_if)]
    if view.totals["out_of_memory.startup"] and facts.capacity_gb and facts.weights_gb is None:
        return [_say(
            "use more GPUs (--tp-size), or smaller weights (--quantization fp8, a quantized model)",
            "Memory ran out while the weights were loaded; --mem-fraction-static only divides what they leave.",
            "another process holds the memory: end or move it first",
        )]  # fmt: skip
    to = 0.8 if now is None or now > 0.8 else 0.7 if now > 0.7 else round(now - 0.05, 2)
    less = [_set(view, FRACTION, to, direction="lower")] if to >= LEAST_FRACTION else []
    is_sampling = said is not None and said.place.startswith("srt/layers/sampler.py")
    why, not_if = (
        "It ran out while tokens were sampled: that takes memory for the whole vocabulary, for every request of a batch.",
        "requests ask for logprobs of many tokens: then those take it",
    )
    fewer = _fewer_decoding(view) if is_sampling else []
    return [*(replace(each, why=why, not_if=not_if, cost="More requests wait.") for each in fewer), *less]


def _no_kv_cache(view: View, _: frozenset[str]) -> list[Change]:
    """Raise the fraction where the GPU has room for it, by the figures of the start; else there is no room."""
    facts = view.facts
    weights, left, now = facts.weights_gb, facts.beside_weights_gb, facts.number(FRACTION)
    total = facts.capacity_gb or (weights + left if weights and left is not None else None)
    if not weights or not total:
        return [_say("")]
    most = min(MOST_FRACTION, floor(100 * (1.0 - view.profile.reserve_lower_gb / total)) / 100)
    room = most * total - weights
    if room < LEAST_POOL_GB or (now is not None and most <= now):
        return [_say("")]
    gain = (
        f"the weights alone take {weights / total:.3f} of the memory; at {most:g} about {room:.1f} GB are left for the KV cache, and"
        f" {(1.0 - most) * total:.1f} GB for everything else"
    )
    return [replace(
        _set(view, FRACTION, most, gain, direction="raise"),
        why="Weights and KV cache share this part of the GPU's memory, and the weights take all of it.",
        not_if="the activations of long prompts need what is left beside it: then use more GPUs or smaller weights",
        cost="Less GPU memory stays free for peaks.",
    ), _say("")]  # fmt: skip


def _graph_memory(view: View) -> list[Change]:
    facts, now = view.facts, view.facts.number(FRACTION)
    less = None if now is None else max(round(now - 0.05, 2), LEAST_FRACTION)
    smaller = [] if now is not None and less is not None and less >= now else [_set(view, FRACTION, less)]
    if facts.capturing == "prefill":
        return [*smaller, *_smaller_prefill_graphs(view)]
    largest, ran = facts.largest_captured, view.batch()
    half = next((each for each in reversed(GRAPH_SIZES) if 2 * each <= (largest or 0)), GRAPH_SIZES[0])
    to = (_graph_size(view, ran) or largest) if ran else half
    if not largest or not to or (ran and 2 * to > largest):
        return smaller
    gain = f"99 % of the time at most {ran:g} requests run together" if ran else "half of the present size"
    fewer = _set(view, facts.graph_arg, float(to), gain)
    return [fewer, *smaller] if ran else [*smaller, fewer]


def _smaller_prefill_graphs(view: View) -> list[Change]:
    """Capture graphs of smaller prefill batches, by the name that the release has."""
    facts, config = view.facts, view.facts.arguments.get("cuda_graph_config")
    prefill = config.get("prefill") if isinstance(config, dict) else None
    most = prefill.get("max_bs") if isinstance(prefill, dict) else None
    known = ("cuda_graph_max_bs_prefill", "piecewise_cuda_graph_max_tokens")
    arg = next((each for each in known if facts.flag(each)), "")
    now = facts.size(arg) or (float(most) if isinstance(most, int) else None)
    to = PREFILL_GRAPH if now is None or now > PREFILL_GRAPH else now // 2
    return [_set(view, arg, to, now=now, direction="lower")] if arg and to >= 1 else []


def _reserve(view: View, holding: frozenset[str], *, too_large: bool) -> list[Change]:
    """Change the memory fraction until the middle of the good range is left."""
    facts, profile, left = view.facts, view.profile, view.facts.reserve_gb
    capped = _larger_pool(view) if too_large else []
    if capped:  # a larger fraction changes nothing while the flag holds
        gain = f"{capped[0].gain}; without the flag SGLang takes what --mem-fraction-static allows"
        not_if = rows.BY_ID["memory_reserve_too_large"].remedy.not_if
        return [replace(capped[0], gain=gain, why=_CAPPED.why, not_if=not_if, cost=_CAPPED.cost)]
    now = facts.number(FRACTION)
    if left is None or now is None:
        return [_set(view, FRACTION)]
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
    unusual = "more than the usual 0.7 to 0.9: raise it by 0.01 at a time and watch for out-of-memory failures"
    gains = (_tokens(view, (to - now) * capacity if capacity else None), unusual if to > USUAL_FRACTION else "")
    return [_set(view, FRACTION, to, "; ".join(filter(None, gains)))]


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


def _most_graph(view: View) -> int:
    """Return the largest batch for which the guide calls graphs useful."""
    return MOST_GRAPH_AT_LARGE_TP if (view.facts.number("tp_size") or 1) >= LARGE_TP else MOST_GRAPH


def _graph_size(view: View, batch: float) -> float | None:
    return next((float(size) for size in GRAPH_SIZES if batch <= size <= _most_graph(view)), None)


def _graphs(view: View, _: frozenset[str]) -> list[Offer]:
    facts, most = view.facts, _most_graph(view)
    now, batch, half = facts.largest_captured or view.totals["replayed_most"] or None, view.batch(), view.batch(0.5)
    if batch is None or half is None:
        return [_set(view, facts.graph_arg, now=now)]
    to = _graph_size(view, batch) or (float(most) if half <= most else None)  # at least more than half of the batches
    if to is None:
        return [_say(
            f"leave it, or run at most {most} at once: 99 % of the time batches hold up to {batch:g} requests, and the guide calls CUDA graphs"
            f" useful up to {most}; in larger batches the launches matter less",
            "The guide names no larger graph for this number of GPUs.", "most batches are smaller at other times",
        )]  # fmt: skip
    gain = f"covers batches up to {to:g}; 99 % of the time they were at most {batch:g}"
    if now is None:
        gain += f"; the start is not in this log, and SGLang captures up to {USUAL_CAPTURED} by itself"
    return [] if now is not None and to <= now else [_larger_graphs(view, to, now, gain)]


def _larger_graphs(view: View, size: float, now: float | None, gain: str) -> Offer:
    """Capture graphs up to a larger size, with less memory for the KV cache where they need it."""
    facts, profile, left = view.facts, view.profile, view.facts.reserve_gb
    raised = _set(view, facts.graph_arg, size, gain, now=now, direction="raise")
    fraction, capacity = facts.number(FRACTION), facts.capacity_gb
    growth = _graph_growth(view, size / now if now else 1.0)
    if fraction is None or left is None or left > profile.reserve_upper_gb:
        return raised
    if growth is None or not capacity:
        to, words = round(fraction - 0.01, 2), ""
    elif left - growth >= profile.reserve_lower_gb:
        return raised
    else:
        to = _percents(fraction - (profile.reserve_aim_gb - left + growth) / capacity)
        tokens = _tokens(view, (to - fraction) * capacity)
        words = "; ".join(filter(None, (f"the larger graphs take about {growth:.1f} GB", tokens)))
    return (raised, _set(view, FRACTION, to, words)) if LEAST_FRACTION <= to < fraction else raised


def _graph_growth(view: View, times: float | None = None) -> float | None:
    """Return the GB that graphs `times` as large take in addition (None: as large as the batch needs)."""
    taken = view.facts.gigabytes("decode_graph") or view.facts.gigabytes("graph")
    now, batch = view.facts.largest_captured, view.batch()
    if times is None:
        size = _graph_size(view, batch) if batch else None
        times = size / now if size and now else None
    return None if taken is None or times is None else taken * max(times - 1.0, 0.0)


def _graphs_off(view: View, _: frozenset[str]) -> list[Change]:
    facts, backend = view.facts, view.facts.word("attention_backend")
    for arg in ("disable_cuda_graph", "disable_decode_cuda_graph", "disable_cuda_graph_padding"):
        if facts.is_on(arg):
            return [_set(view, arg, to=False)]
    if backend in UNCAPTURED_BACKENDS:
        return [_set(view, "attention_backend", words=f"one that can be captured (now {backend})", direction="set")]
    if facts.arguments:
        return []
    return [_say(
        "look into the start of the log: graphs are switched off, the batch is larger than the captured ones (SGLang captures up to"
        f" {USUAL_CAPTURED} by itself; --cuda-graph-max-bs, --cuda-graph-max-bs-decode from 0.5.14 on), or the backend cannot be captured",
        "The start is not in this log, so what was captured is an assumption.", "LoRA or speculative decoding cannot be captured",
    )]  # fmt: skip


# Prefill


def _chunk(view: View) -> tuple[float | None, int]:
    """Return the chunk as typed, and the ranks that share it."""
    return view.facts.typed(CHUNK), max(round(1 / view.facts.factor(CHUNK)), 1)


def _larger_chunk(view: View, _: frozenset[str]) -> list[Offer]:
    facts, totals = view.facts, view.totals
    now, ranks = _chunk(view)
    where = (
        "add prefill servers, or reuse more prefixes"
        if facts.role == "prefill"
        else "reuse more prefixes, separate prefill and decode, or add a replica"
    )
    why, not_if = (
        "A larger chunk would not help: the GPU is busy with prefill.",
        "prompts share no prefixes, and there is no second GPU",
    )
    elsewhere = _say(where, why, not_if)
    is_large = now is not None and (now <= 0 or now >= LARGEST_CHUNK * ranks)
    if is_large or totals["full_lines"] < rows.FULL_BATCHES * totals["prefill_lines"]:  # or hardly ever full
        return [elsewhere]
    if facts.reserve_gb is not None and facts.reserve_gb < view.profile.reserve_lower_gb:
        return [_say(
            "lower --mem-fraction-static first: a larger chunk needs memory that is not left",
            "A larger chunk needs memory for its activations, and almost none is free.", "another process holds the memory: check nvidia-smi",
            "The KV cache gets smaller.",
        )]  # fmt: skip
    if now is None:
        size = totals["chunk_seen"]
        gain = f"prefill batches end at {size:,.0f} tokens" if size else ""
        to = float(max(2 * size, rows.SMALL_CHUNK)) if 0 < size < LARGEST_CHUNK else None
        return [_set(view, CHUNK, to, gain, now=size or None)]
    wanted = max(min(2 * int(now), LARGEST_CHUNK * ranks), rows.SMALL_CHUNK * ranks)
    page = max(int(facts.size("page_size") or 1), 1) * ranks
    gain = f"{wanted // ranks:,} for each of the {ranks} ranks" if ranks > 1 else ""
    return _first(view, _set(view, CHUNK, float(-(-wanted // page) * page), gain), elsewhere)


def _smaller_chunk(view: View) -> list[Change]:
    """Lower the chunk to 4096, then 2048 for each rank, where it is not that small. -1 and unknown are no chunk at all."""
    now, ranks = _chunk(view)
    last = max(int(now or 0) // 2, rows.SMALL_CHUNK) if ranks > 1 else rows.SMALL_CHUNK
    present = now if now and now > 0 else inf
    step = next((step for step in (rows.SMALL_CHUNK * ranks, LEAST_CHUNK * ranks, last) if present > step), None)
    return [] if step is None else [_set(view, CHUNK, float(step), direction="lower")]


def _interleave(view: View, _: frozenset[str]) -> list[Offer]:
    """Let decode steps run between the chunks of prompts.

    With --prefill-decode-interval as many after each chunk as keep late gaps rare, if first tokens stay in time. In releases without it one with
    each chunk (--enable-mixed-chunk), and chunks that meet the objective.
    """
    facts, chunk, ranks = view.facts, view.facts.typed(CHUNK) or 0.0, view.facts.attention_ranks
    elsewhere = _say(
        "separate prefill and decode (disaggregation), or add a replica",
        "Prompts and answers share the GPU: what one takes the other waits for.", "prompts are short",
    )  # fmt: skip
    if 0 < chunk < LEAST_USEFUL_CHUNK * ranks:  # decode steps between such chunks only delay the prompts
        return [_set(view, CHUNK, LEAST_USEFUL_CHUNK * ranks)]
    shorter = _chunk_within(view, view.profile.inter_token_seconds)
    if facts.is_on("enable_mixed_chunk"):
        return _first(view, *shorter, elsewhere)
    mixed = _set(view, "enable_mixed_chunk", to=True)
    steps = float(ceil(1.0 / view.profile.late_bound(rows.SLOW_BURN_TIMES)))
    now = facts.size("prefill_decode_interval") or 0.0
    if now >= steps or _delays_first_tokens(view, steps - now):
        return [elsewhere]  # shorter chunks, mixed or not, delay first tokens as well
    interval = _set(view, "prefill_decode_interval", steps, now=now)
    return _first(view, interval, (mixed, *shorter), mixed, elsewhere)


def _delays_first_tokens(view: View, steps: float) -> bool:
    """Whether so many more decode steps after each chunk of a prompt make first tokens late."""
    first, gaps = view.latency("time_to_first_token"), view.latency("inter_token")
    objective = view.profile.time_to_first_token_seconds
    chunk, computed, started = view.facts.size(CHUNK), view.totals["computed"], view.totals["started"]
    longest = first.quantile(0.99) if first is not None else None
    usual = gaps.quantile(0.5) if gaps is not None else None
    if longest is None or usual is None or objective is None or not chunk or not computed or not started:
        return False
    return longest + ceil(computed / started / chunk) * steps * usual > objective


def _chunk_within(view: View, objective: float | None) -> list[Change]:
    """Lower the chunk to the largest power of two that is computed within the objective, where it is not that small and the pace is known."""
    now, ranks, paused = view.facts.typed(CHUNK), view.facts.attention_ranks, view.paused_share
    if now is None or objective is None or not paused or not view.served or not view.totals["computed"]:
        return []
    pace = view.totals["computed"] / (view.served * paused)
    fits = 2.0 ** floor(log2(max(CERTAIN_PACE * pace * objective, 1.0)))
    is_small = fits < LEAST_USEFUL_CHUNK or 0 < now <= fits * ranks
    return [] if is_small else [_set(view, CHUNK, fits * ranks, direction="lower")]


def _long_prompts(view: View, holding: frozenset[str]) -> list[Offer]:
    """Enlarge the chunk if prompts are long enough to fill it, and tokens are not late by mixed chunks already."""
    chunk, prompt = view.facts.size(CHUNK), view.prompt
    is_short = chunk is not None and prompt is not None and prompt < SHORT_OF_A_CHUNK * chunk
    delays = view.facts.is_on("enable_mixed_chunk") and "latency_prefill_between" in holding
    return [] if is_short or delays else _larger_chunk(view, holding)


# Clients


def _two_digits(requests: float) -> int:
    digit = 10.0 ** max(len(f"{requests:.0f}") - 2, 0)
    return int(requests // digit * digit)


def _more(view: View, _: frozenset[str]) -> list[Change]:
    running, usage, lowest, facts = view.sum("running"), view.mean("usage"), view.profile.queue_lower, view.facts
    if not running or not usage or lowest is None:
        return []
    fit = max(running, running * view.profile.token_usage_target / usage)
    if facts.least_limit is not None:
        fit = min(fit, view.serving_ranks * facts.micro_batches * facts.least_limit)
    waiting = view.serving_ranks * min(lowest, facts.size("max_queued_requests") or lowest)
    ran, now = _two_digits(fit), round(running + (view.sum("queued") or 0.0))
    wanted = ran + round(waiting)
    gain = f"now {now:,}; about {ran:,} can run, {waiting:,.0f} more keep the queue filled"
    return [replace(_say(f"send about {wanted:,} requests at once"), gain=gain)] if wanted > now else []


def _fewer(view: View, _: frozenset[str]) -> list[Change]:
    running, queued, profile = view.sum("running"), view.sum("queued"), view.profile
    if running is None or not queued or not view.served:
        return []
    waiting, because = view.serving_ranks * profile.queue_upper, f"the queue limit is {profile.queue_upper:,.0f}"
    if (longest := profile.queue_wait_seconds) is not None:
        rate = view.totals["started"] / view.served
        wait = ALLOWED_WAIT * min(longest, profile.time_to_first_token_seconds or longest)
        waiting, because = (
            rate * wait,
            f"SGLang starts about {rate:.2g} requests/s, and none should wait longer than {wait:g} s",
        )
        if not rate:
            return []
    wanted, now = _two_digits(round(running)) + int(waiting), round(running + queued)
    words = f"send at most {wanted:,} request{'s' if wanted > 1 else ''} at once, or add a replica"
    return [replace(_say(words), gain=f"now about {now:,}; {because}")] if 0 < wanted < now else []


# Other flags


def _by_prefix(view: View, _: frozenset[str]) -> list[Change]:
    queued = view.mean("queued")
    is_long = queued is not None and queued > MOST_SORTED and view.profile.queue_lower is None
    return [] if is_long else [_set(view, "schedule_policy", "lpm")]


def _balance(view: View, _: frozenset[str]) -> list[Offer]:
    router = _say(
        "put a router in front that balances by the load of the ranks", "This release cannot balance requests over its ranks by load; a router can.",
        "long prompts of one client must stay on the rank that has their prefix cached", "One more process to run.",
    )  # fmt: skip
    is_blind = view.facts.word("load_balance_method") in {"round_robin", "auto"}
    methods = ("total_requests", "shortest_queue") if is_blind else ()
    return _first(view, *(_set(view, "load_balance_method", each) for each in methods), router)


def _other_side(view: View, _: frozenset[str]) -> list[Change]:
    role, usage = view.facts.role, view.mean("usage")
    words = {
        "": "",
        "prefill": "add decode servers, let each run more requests (its --max-running-requests), or make the transfer faster",
        "decode": "add prefill servers, or make the transfer faster; if the prealloc queue is the long one, add decode servers",
    }[role]
    if role == "decode" and usage is not None and usage >= view.profile.token_usage_target:
        words = "add decode servers, or enlarge the KV cache: it is full, so no request of the prefill side gets in"
    return [_say(words)] if words else []


def _transfers(view: View, _: frozenset[str]) -> list[Change]:
    """What to look at, by SGLang's own words; then the variable that relaxes it."""
    text = view.transfer.text if view.transfer is not None else ""
    cause = of_transfer(text)
    longer = relaxed(cause, text)
    why = "A longer time-out helps a slow pair, and only delays the error of one that is broken."
    return [_say(cause.do, cause.why, cause.not_if), *([_say(longer, why, cause.not_if)] if longer else [])]


def _hicache(view: View, _: frozenset[str]) -> list[Change]:
    facts, row = view.facts, rows.BY_ID["hicache_degraded"].remedy
    kind, ratio = view.hicache.word if view.hicache is not None else "", facts.number("hicache_ratio")
    if kind == "kernel":
        return [_say(
            row.words + ": if a hit is not faster, run without --enable-hierarchical-cache",
            "Without its JIT kernel SGLang copies between host and GPU in another way, which may be slower than computing the prefix again.",
            row.not_if,
        )]  # fmt: skip
    if kind == "host":
        words = "give the cache more host memory: raise --hicache-ratio or --hicache-size, or use --hicache-write-policy write_through"
        if ratio and not facts.size("hicache_size"):
            return [_set(view, "hicache_ratio", 2 * ratio)]
        return [_in_words(_OTHERS["hicache_ratio", "raise"], words)]
    backend = facts.word("hicache_storage_backend")
    return [_say(
        f"look at the storage behind the cache{f' ({backend})' if backend else ''}: its service, its space and its own log",
        "A prefix that the storage does not give is computed again, and a request may wait for it first (--hicache-storage-prefetch-policy).",
        "it happened once, while the storage restarted",
    )]  # fmt: skip


def _experts(view: View, _: frozenset[str]) -> list[Offer]:
    facts, shards = view.facts, view.facts.number("tp_size")
    own, offers = _say("use expert parallelism, by the flag that this release has for it"), list[Offer]()
    if facts.release and flags.flag_of("enable_ep_moe", facts.release) is not None:
        offers = [_set(view, "enable_ep_moe", to=True)]
    elif "ep_size" in facts.arguments and shards:
        offers = [_set(view, "ep_size", shards)]
    return _first(view, *offers, own)


def _dp_attention(view: View, _: frozenset[str]) -> list[Offer]:
    facts = view.facts
    gpus, replicas = facts.number("tp_size"), facts.number("dp_size") or 1.0
    if not gpus or replicas > 1 or facts.attention_ranks > 1:
        return []
    if facts.release and flags.flag_of("attn_dp_size", facts.release) is not None:
        return [_set(view, "attn_dp_size", gpus, now=1.0)]
    return [(_set(view, "enable_dp_attention", to=True), _set(view, "dp_size", gpus, now=replicas))]


def _refusals(view: View, _: frozenset[str]) -> list[Change]:
    if view.facts.word("grammar_backend") == "none" and view.totals["refused_for_grammar"] > view.totals["refused"] / 2:
        return [_set(view, "grammar_backend", "xgrammar")]
    if not view.totals["refused"]:
        return []  # by the page alone: the reason is in the log, which the guide's words name
    return [_say(
        "read the reason in the log, before self.rid= at the end of its lines", "SGLang ends such a request at once and prints the reason.",
        "a client sends such requests by mistake: then nothing needs to change",
    )]  # fmt: skip


def _settings(view: View, _: frozenset[str]) -> list[Change]:
    changes = []
    for each in rows.differing(view):
        to, now = (
            bool(each.value) if each.is_switch else each.value,
            view.facts.typed(LIMIT) if each.arg == LIMIT else _PRESENT,
        )
        is_cache = each.arg == "enable_hierarchical_cache"
        gain = "with --hicache-ratio 2: a cache of twice the size in host memory" if is_cache else ""
        why = f"The guide sets it for this workload: it {each.why}."
        changes.append(replace(_set(view, each.arg, to, gain, now=now), why=why, not_if="the workload is another one"))
    return changes


# SGLang's own words

_FLAG = re.compile(r"--[a-z][a-z0-9_-]{2,60}[a-z0-9]")
# By the allocator of the KV cache, not of the GPU: https://github.com/sgl-project/sglang/blob/v0.5.9/python/sglang/srt/mem_cache/common.py
_POOL_IS_FULL = re.compile(r"(?:Prefill|Decode) out of memory\. (?:Please )?[Tt]ry to lower")
_FULL_POOL = "SGLang's own error: the KV cache had no room for the batch. GPU memory was not short, so a lower --mem-fraction-static makes it worse."
_LEAKS = "few requests run when it comes back: then the release does not give all tokens back; search SGLang's issues for this error"
_ASKED = re.compile(
    r"Tried to allocate ([\d.]{1,8}) GiB.{0,200}?(?:([\d.]{1,8}) GiB total capacity|total capacity of ([\d.]{1,8}) GiB)"
)
_UNRECOGNIZED = re.compile(r"unrecognized arguments: ([^\n]+)")
_ABOVE = re.compile(r"mem-fraction-static\W{0,3} (?:above|to) (0\.\d{1,4})")
_LESS = re.compile(r"smaller|lower|reduc|decrease|fewer", re.IGNORECASE)
_MORE = re.compile(r"larger|higher|increase|raise|raising", re.IGNORECASE)
_WAYS = {"increase": "raise", "decrease": "lower", "set": "set", "unset": "drop"}
_FAILURES_OF = {"memory": rows.OUT_OF_MEMORY, "hang": ("scheduler_stuck",)}  # by the class of an end


def _arg_of(flag: str) -> str:
    return flag[2:].replace("-", "_")


def _by_explanation(view: View, holding: frozenset[str]) -> list[Change]:
    """SGLang's own words first: an error that names a flag says what to change; then what ends of its class have in common."""
    said = view.explanation
    if said is not None and any(row in holding for row in _FAILURES_OF.get(said.word, ())):
        return []  # the failure beside it has the advice
    ending = ENDINGS[said.word if said is not None else "unknown"]
    do = _say(ending.do, ending.why, ending.not_if)
    if said is None:
        return [*_named(view, view.ended), do]
    if refused := _UNRECOGNIZED.search(said.text):
        return [*map(_unknown, _FLAG.findall(refused[1])), do]
    named = [] if said.marked else _named(view, said.text)
    return [*named, *(_smaller_chunk(view) + _fewer_decoding(view) if said.word == "memory" else []), do]


def _down(view: View, holding: frozenset[str]) -> list[Change]:
    is_last = view.last.get("ends", -inf) >= view.last.get("starts", -inf)  # it has not started again since
    if view.explains_now is not None:
        return _by_explanation(view, holding)
    return [*_named(view, view.ended if is_last else ""), _say("")]


def _unknown(flag: str) -> Change:
    """Say what to do with a flag that SGLang refuses."""
    spelled = flag.replace("_", "-")
    words = f"drop {flag}: no release up to {flags.releases()[-1]} has this flag"
    if _arg_of(spelled) in flags.argument_names():
        words = f"drop {flag}, or install a release that has it: other releases of SGLang have this flag"
        words = words if spelled == flag else f"spell it {spelled}: SGLang's flags have hyphens"
    why, not_if = (
        "SGLang refuses a command line with a flag that its release does not have.",
        "the flag belongs to another program",
    )
    return _say(words, why, not_if)


def _named(view: View, words: str) -> list[Change]:
    """Return the flags that an error of SGLang's names."""
    known = recognise(words)
    ways, changes = known.ways if known is not None else {}, list[Change]()
    for flag in list(dict.fromkeys(_FLAG.findall(words)))[:2]:
        flag_known = flags.nearest_flag(_arg_of(flag), flags.releases()[-1])
        is_switch = flag_known is not None and flag_known.kind in {"switch", "either"}  # nothing about it can be lower
        guessed = "set" if is_switch else "lower" if _LESS.search(words) else "raise" if _MORE.search(words) else "set"
        way = _WAYS.get(ways.get(flag, ""), guessed)
        change = _set(view, _arg_of(flag), words=f"{way} it: SGLang's own error names it", direction=way)
        why, not_if = f"SGLang ended with: {shortened(words, 300)}", "another error came before this one"
        changes.append(replace(change, why=why, not_if=not_if))
    return changes


def _by_sglang(view: View, said: Advice) -> list[Change]:
    """Return what SGLang recommends as a change of the first flag that this release has; nothing where it has none."""
    ways = {each: way for each, way in said.ways.items() if way}
    flag = next((each for each in ways if each.startswith("--") and view.facts.flag(_arg_of(each))), None)
    times = f", {said.count:,} times" if said.count > 1 else ""
    why, not_if = (
        f"SGLang printed at its start{times}: “{said.words.rstrip('.')}”",
        "what the line is about does not matter for this load",
    )
    if flag is not None:
        way = _WAYS[ways[flag]]
        change = _set(view, _arg_of(flag), words=f"{way} it: SGLang itself recommends it", direction=way)
        return [replace(change, why=why, not_if=not_if)]
    variables = ", ".join(each for each in ways if not each.startswith("--"))
    return [_say(f"set {variables} as SGLang's own line says", why, not_if)] if variables else []


def _sglang_first(row: rows.Row, view: View, offered: list[Change]) -> list[Change]:
    """Put what SGLang itself recommends in its start about a row's flag before the row's own change, and leave out what it contradicts.

    Where it recommends the same, ours stands: it has a value.
    """
    arg = row.remedy.arg
    ours = {change.direction for change in offered if change.arg == arg}
    about = view.facts.recommended(arg) if arg else []
    other = [said for said in about if _WAYS.get(said.ways.get(row.remedy.flag, ""), "") not in ours]
    says = [_reasoned(row, view, change) for said in other for change in _by_sglang(view, said)]
    against = {(each.arg, _OTHER_WAY.get(each.direction)) for each in _all_by_sglang(view)}
    own = [change for change in offered if (change.arg, change.direction) not in against]
    return [*says, *(change for change in own if not says or change.arg != arg)]


_OTHER_WAY = {"raise": "lower", "lower": "raise", "add": "drop", "drop": "add"}


def _all_by_sglang(view: View, _: frozenset[str] = frozenset()) -> list[Change]:
    return [change for said in view.facts.recommended() for change in _by_sglang(view, said)]


ADVICE: Mapping[str, Advise] = {
    "sglang_recommends": _all_by_sglang,
    "no_kv_cache": _no_kv_cache,
    "kv_transfer_failing": _transfers,
    "hicache_degraded": _hicache,
    "costly_settings": lambda view, _: [
        _set(view, arg, to) for arg, (to, _words) in rows.costly_settings(view).items()
    ],
    "crashed": _by_explanation,
    "server_down": _down,
    "out_of_memory_prefill": _under_load(_smaller_chunk),
    "out_of_memory_decode": _under_load(_fewer_decoding),
    "graph_memory_short": _memory(_graph_memory),
    "out_of_memory_any": _memory(_out_of_memory),
    "conservativeness_ineffective": _ineffective,
    "retracting_too_often": _retracting,
    "hybrid_pool_full": _hybrid,
    "dp_imbalanced": _balance,
    "running_at_limit": _at_limit,
    "pd_queue": _other_side,
    "prefill_bound": _larger_chunk,
    "admission_too_conservative": _too_conservative,
    "cuda_graph_not_covering": _graphs,
    "cuda_graph_off": _graphs_off,
    "memory_reserve_too_small": lambda view, holding: _reserve(view, holding, too_large=False),
    "memory_reserve_too_large": lambda view, holding: _reserve(view, holding, too_large=True),
    "latency_batch_too_large": _smaller_batch,
    "latency_prefill_between": _interleave,
    "latency_long_prompts": _long_prompts,
    **dict.fromkeys(("latency_queue", "clients_time_out", "requests_rejected", "queue_too_long"), _fewer),
    "running_far_below_limit": _pool_full,
    "client_too_slow": _more,
    "shared_prefixes_unused": _by_prefix,
    "prompts_beyond_kv_cache": _longest_prompts,
    "prompts_beyond_context": _longest_requests,
    "requests_refused": _refusals,
    "profile_settings": _settings,
    "expert_parallel_candidate": _experts,
    "dp_attention_candidate": _dp_attention,
}


# The reasons of a change of a flag that is not the row's own.
_CAPPED = Change(
    "max_total_tokens", "raise", "",
    "--max-total-tokens keeps the KV cache smaller than GPU memory allows, and a small KV cache fills up with few requests.",
    "no more fits into GPU memory: then SGLang uses what fits", "Less GPU memory stays free for peaks.",
)  # fmt: skip
_RANKS = Change(
    "dp_size", "raise", "",
    "DP attention needs its number of ranks. With as many ranks as GPUs each KV cache entry is stored once.",
    "few requests run at once: then latency gets worse",
    "SGLang then multiplies --schedule-conservativeness by 0.3 and divides --chunked-prefill-size by the number of ranks: set both again.",
)  # fmt: skip
_MICRO = Change(
    "pp_max_micro_batch_size", "raise", "",
    "This flag limits each micro batch of the pipeline below its share of --max-running-requests.", "the batches of the pipeline are not full",
    "Inter-token latency rises as more requests run together.",
)  # fmt: skip
_PREFILL_GRAPHS = Change(
    "cuda_graph_max_bs_prefill", "lower", "",
    "It ran out while graphs of prefill were captured; the largest of them takes most of it.",
    "it still does not fit: then --cuda-graph-backend-prefill=disabled, as SGLang's own error says", "Larger prefill batches run without a CUDA graph.",
)  # fmt: skip
_OTHERS: Mapping[tuple[str, str], Change] = {(each.arg, each.direction): each for each in (
    *(rows.BY_ID[row].remedy for row in (
        "running_at_limit", "memory_reserve_too_large", "out_of_memory_any", "prefill_bound", "out_of_memory_prefill", "cuda_graph_not_covering",
        "cuda_graph_off",
    )),
    replace(rows.BY_ID["cuda_graph_off"].remedy, arg="disable_decode_cuda_graph"),
    *(replace(rows.BY_ID["hybrid_pool_full"].remedy, arg=arg) for arg in ("mamba_full_memory_ratio", "max_mamba_cache_size")),
    replace(rows.BY_ID["expert_parallel_candidate"].remedy, arg="enable_ep_moe", direction="add"),
    _CAPPED, _RANKS, replace(_RANKS, arg="attn_dp_size"), _MICRO, replace(_MICRO, arg="max_micro_batch_size"),
    _PREFILL_GRAPHS, replace(_PREFILL_GRAPHS, arg="piecewise_cuda_graph_max_tokens"),
    Change(
        LIMIT, "lower", "", "Fewer requests at once need less of the KV cache and less GPU memory.",
        "a single request is too long for the KV cache: then lower --context-length", "Fewer requests run at once, and the queue may grow.",
    ),
    Change(
        "cuda_graph_max_bs", "lower", "", "SGLang captures CUDA graphs for batch sizes that never run, and each size takes GPU memory.",
        "larger batches run at other times", "Larger batches run without a CUDA graph.",
    ),
    Change(
        "disable_cuda_graph_padding", "drop", "",
        "Only batches of exactly a captured size use a CUDA graph; with padding every smaller batch does.",
        "the batch has a captured size all the time",
    ),
    Change(
        "attention_backend", "set", "", "This attention backend cannot be captured in a CUDA graph.",
        "LoRA, speculative decoding or expert communication cannot be captured",
        "Another backend may be faster or slower at long prompts: measure both.",
    ),
    Change(
        "hicache_ratio", "raise", "", "The host's memory for the cache is full, so what leaves the GPU is dropped instead of kept.",
        "the host has no more memory", "Host memory.",
    ),
)}  # fmt: skip


# Words


def advise(row: rows.Row, view: View, holding: frozenset[str]) -> list[Change]:
    """Return the changes of a row, best first: what SGLang itself recommends, of flags that figures show to cause it, then its own."""
    changes = _changes(row, view, holding)
    return changes if row.any_load else _sglang_first(row, view, changes)


def _changes(row: rows.Row, view: View, holding: frozenset[str]) -> list[Change]:
    """Return the changes of a row by what was seen; without a function the row's own."""
    is_about_them = row.id == "flags_away_from_defaults"
    found = rows.beside(view) if is_about_them else rows.proven(view)
    known = [change for change, causes in found.items() if row.id in causes or is_about_them]
    first = [
        _reasoned(
            row,
            view,
            replace(_set(view, each.arg, each.to, each.gain), why=each.why, not_if=each.not_if, cost=each.cost),
        )
        for each in known
    ]
    if is_about_them or any(change.arg in rows.INSTEAD for change in first):
        return first  # while such a flag is set, nothing else helps
    made = ADVICE.get(row.id)
    offers = (
        [_set(view, row.remedy.arg, row.remedy.to) if row.remedy.arg else _say("")]
        if made is None
        else [*made(view, holding)]
    )
    if not offers and not row.needs_advice:
        offers = [_say("no change of a flag is known that helps here" if row.remedy.arg else "")]
    accepted = (each if isinstance(each, tuple) else (each,) for each in offers if _can(view, each))
    return [*first, *(_reasoned(row, view, change) for group in accepted for change in group)]


def _reasoned(row: rows.Row, view: View, change: Change) -> Change:
    """Return a change with its reasons: those that it has, of the row where it is its flag or none, else of the table."""
    own, figures = row.remedy, figures_of(view)
    name = change.arg.removesuffix("_decode") if change.arg == view.facts.graph_arg else change.arg
    is_own = not name or (name == own.arg and change.direction in {"", own.direction})
    said = change if change.why else own if is_own else _OTHERS.get((name, change.direction), own)
    gain = change.gain + (_spellings(view, change) if change.arg else "")
    words = change.words or (own.words if change.to is None else "")
    direction = change.direction or ("" if change.why and not change.arg else own.direction)
    return replace(
        change, words=fill(words, figures), direction=direction, why=fill(said.why, figures), not_if=fill(said.not_if, figures),
        cost=fill(said.cost, figures), gain=fill(gain, figures),
    )  # fmt: skip


def _spellings(view: View, change: Change) -> str:
    """Say the two names of the graph flag where the release is not known."""
    if view.facts.release is not None or not change.arg.startswith("cuda_graph_max_bs"):
        return ""
    value = f" {change.to}" if isinstance(change.to, int) else ""
    return f"; --cuda-graph-max-bs{value} up to SGLang 0.5.13, --cuda-graph-max-bs-decode{value} from 0.5.14 to {flags.releases()[-1]}"


def figures_of(view: View) -> dict[str, str]:
    """Return the thresholds as words, for texts."""
    profile, ages = view.profile, view.given_up_ages
    lower = profile.queue_lower or (50 if view.facts.is_first_edition else 100)
    after = (
        "of every age" if ages is None else "within a second" if view.cancels else f"after {ages[0]:g} to {ages[1]:g} s"
    )
    return {
        **profile.figures,
        "given_up_after": after,
        "queue_range": f"{lower:g} to {profile.queue_upper:,.0f}",
        "most_graph": str(_most_graph(view)),
    }


_TEMPLATE = re.compile(r"\{([a-z_]+)\}")


def fill(text: str, figures: Mapping[str, str]) -> str:
    """Fill thresholds into a text; what is no name of one stays."""
    return _TEMPLATE.sub(lambda name: figures.get(name[1], name[0]), text)
