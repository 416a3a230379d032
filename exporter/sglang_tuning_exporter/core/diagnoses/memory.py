"""GPU memory: failures for want of it, and too much or too little of it left. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import ceil, floor
from typing import Any

from sglang_tuning_exporter.config.profiles import DEFAULT
from sglang_tuning_exporter.core.diagnoses.base import (
    CHUNK,
    FRACTION,
    LIMIT,
    Advise,
    Beside,
    Diagnosis,
    Group,
    Offer,
    Side,
    When,
    chance,
    event,
    fact,
    failure,
    hint,
    limit,
    mostly,
)
from sglang_tuning_exporter.core.diagnoses.graphs import CUDA_GRAPH_NOT_COVERING
from sglang_tuning_exporter.core.diagnoses.native import Native, by_server, series
from sglang_tuning_exporter.core.diagnoses.own_words import ASKS_FOR_MORE
from sglang_tuning_exporter.core.diagnoses.steps import (
    CAPPED,
    GRAPH_SIZES,
    LEAST_FRACTION,
    MOST_FRACTION,
    USUAL_FRACTION,
    eight_bits,
    fewer_decoding,
    graph_growth,
    graph_size,
    larger_pool,
    percents,
    pool_tokens,
    say,
    set_flag,
    smaller_chunk,
)
from sglang_tuning_exporter.core.events import shortened
from sglang_tuning_exporter.core.findings import Change
from sglang_tuning_exporter.core.view import View

_FAILURES = frozenset({Group.OUT_OF_MEMORY, Group.FAILURE})
LARGE_WEIGHTS = 0.3  # of a GPU's memory
_QUANTIZED = re.compile(
    r"fp8|fp4|awq|gptq|int[48]|w[48]a\d|bnb|gguf|marlin|quant|deepseek-?_?(?:v3|r1)|kimi-k2|gpt-oss", re.IGNORECASE
)
LEAST_POOL_GB = 1.0  # for a KV cache that is worth a start
MUCH_ELSEWHERE_GB = 1.0  # less is a context that does not hinder
PREFILL_GRAPH = 2048.0  # what SGLang itself suggests where the graphs of prefill do not fit
# By the allocator of the KV cache, not of the GPU:
# https://github.com/sgl-project/sglang/blob/v0.5.9/python/sglang/srt/mem_cache/common.py
_POOL_IS_FULL = re.compile(r"(?:Prefill|Decode) out of memory\. (?:Please )?[Tt]ry to lower")
_FULL_POOL = (
    "SGLang's own error: the KV cache had no room for the batch. GPU memory was not short, so a lower"
    " --mem-fraction-static makes it worse."
)
_LEAKS = (
    "few requests run when it comes back: then the release does not give all tokens back; search SGLang's issues for"
    " this error"
)
_ASKED = re.compile(
    r"Tried to allocate ([\d.]{1,8}) GiB.{0,200}?(?:([\d.]{1,8}) GiB total capacity|total capacity of ([\d.]{1,8}) GiB)"
)
_ABOVE = re.compile(r"mem-fraction-static\W{0,3} (?:above|to) (0\.\d{1,4})")


def _start(limit: str, side: Side = "above") -> When:
    """Return the condition of the memory that is free once a server has started."""
    return fact(
        measure=lambda view: view.facts.reserve_gb,
        side=side,
        limit=limit,
        name="available_gpu_mem at start-up",
        unit="GB",
        needs="the start",
    )


def _graph_memory(view: View) -> float | None:
    """GB that are missing after graph capture: all of it where the capture failed."""
    least, reserve = view.profile.reserve_least_gb, view.facts.reserve_gb
    if view.totals["out_of_memory.graph_capture"]:
        return least
    return 0.0 if reserve is None or view.facts.without_graph else max(least - reserve, 0.0)


def _without_room(view: View) -> str:
    """Say what SGLang computes for the KV cache, and what leaves it no room."""
    facts, weights, left = view.facts, view.facts.weights_gb, view.facts.beside_weights_gb
    if facts.no_pool is None:
        return ""
    rest = f", which leaves {left:.4g} GB" if left is not None else ""
    taken = f": the weights take {weights:.5g} GB of each GPU{rest}" if weights is not None else ""
    return f"SGLang computes a KV cache of {facts.no_pool:,.0f} tokens{taken}"


def _out_of_memory(phase: str, **own: Any) -> Diagnosis:
    """Return the diagnosis of out-of-memory failures under load, in one phase."""
    failed = f"SGLang ran out of memory during {phase}."
    return failure(
        id=f"out_of_memory_{phase}",
        title=f"out of memory in {phase}",
        past=failed,
        summary=failed,
        when=event(f"out_of_memory.{phase}", name=f"out-of-memory failures in {phase}"),
        seen=f"{{value}} out-of-memory failure{{s}} in {phase}",
        groups=_FAILURES,
        protects="memory",
        ends_as="memory",
        deniable=True,
        fleet=2,
        **own,
    )


def _large_weights(view: View) -> float | None:
    """The share of a GPU's memory that unquantized weights take, where the KV cache is short of it."""
    facts, weights, capacity = view.facts, view.facts.weights_gb, view.facts.capacity_gb
    if facts.is_cpu or facts.arguments.get("quantization", "?") is not None or _QUANTIZED.search(facts.model):
        return None
    is_short = mostly(view, "admission", "pool_full") or view.retractions_a_minute > view.retractions_tolerated
    return weights / capacity if weights is not None and capacity and is_short else None


def _other_process_first(advise: Callable[[View], Iterable[Change]]) -> Advise:
    """If SGLang's error names another process on the GPU, advise ending that first."""

    def made(view: View, _: Beside) -> Iterator[Offer]:
        if (others := view.totals["held_elsewhere_gb"]) >= MUCH_ELSEWHERE_GB:
            yield say(
                words=f"end or move the other process that holds {others:.1f} GB of this GPU's memory",
                why="SGLang's own error lists it; no flag brings that memory back.",
                not_if="it belongs there, such as a second server: then the flags of this finding",
            )
        yield from advise(view)

    return made


def _under_load(first: Callable[[View], list[Change]]) -> Advise:
    """Give `first` where an allocation failed under load; where the KV cache itself was full, nothing that frees GPU
    memory helps.
    """

    def made(view: View, beside: Beside) -> Iterator[Offer]:
        if _POOL_IS_FULL.search(_error(view)):
            changes = first(view) or fewer_decoding(view)
            yield from (replace(change, why=_FULL_POOL, not_if=_LEAKS) for change in changes)
            return
        yield from _other_process_first(lambda view: first(view) or _lower_fraction(view))(view, beside)
        if kind := eight_bits(view):
            words = f"further: an FP8 KV cache (--kv-cache-dtype {kind}) or FP8 weights, smaller CUDA graphs"
            yield say(
                words=words,
                why="They need less of the GPU's memory.",
                not_if="answers must not lose any accuracy",
                cost="A little accuracy.",
            )

    return made


def _error(view: View) -> str:
    """Return the words of the error that explains the end; none where a part of them can be a client's."""
    line = view.explanation
    return line.text if line is not None and not line.marked else ""


def _lower_fraction(view: View) -> list[Change]:
    """Lower the fraction, unless SGLang's own error asks for the opposite or shows that no fraction helps."""
    text, facts, now = _error(view), view.facts, view.facts.number(FRACTION)
    if (asked := _ASKED.search(text)) and float(asked[1]) > float(asked[2] or asked[3]):
        return [
            say(
                words=(
                    "lower --max-total-tokens where it is set; else search SGLang's issues for this error: one"
                    f" allocation of {asked[1]} GiB is more than the {asked[2] or asked[3]} GiB of the GPU"
                ),
                why="No share of the memory makes room for it: the size was computed wrongly, or set.",
                not_if="another GPU model was expected here",
            )
        ]
    if "mem-fraction-static" in text and ASKS_FOR_MORE.search(text):
        return [_raised_as_asked(view, text)]
    if view.totals["out_of_memory.startup"] and facts.capacity_gb and facts.weights_gb is None:
        return [
            say(
                words="use more GPUs (--tp-size), or smaller weights (--quantization fp8, a quantized model)",
                why="Memory ran out while the weights were loaded; --mem-fraction-static only divides what they leave.",
                not_if="another process holds the memory: end or move it first",
            )
        ]
    to = 0.8 if now is None or now > 0.8 else 0.7 if now > 0.7 else round(now - 0.05, 2)
    less = [set_flag(view, FRACTION, to, direction="lower")] if to >= LEAST_FRACTION else []
    return [*_fewer_sampled(view), *less]


def _raised_as_asked(view: View, text: str) -> Change:
    """Raise the fraction where the weights leave too little for the KV cache, to the value that the error names, or to
    the usual reserve.
    """
    now, weights, free = view.facts.number(FRACTION), view.facts.weights_gb, view.facts.capacity_gb
    named = _ABOVE.search(text)
    least = float(named[1]) if named else weights / free if weights and free else 1.0
    gain = "" if named or least >= 1.0 else f"the weights alone take {weights:.4g} of {free:.4g} GB, {least:.3f} of it"
    wanted = ceil(100 * least + 0.01) / 100
    if free and not named:  # as much as leaves the usual reserve
        wanted = max(wanted, min(percents(1.0 - view.profile.reserve_aim_gb / free), MOST_FRACTION))
    to = wanted if least < MOST_FRACTION and wanted > (now or 0.0) else None
    words, direction = "raise it: SGLang's own error asks for it", "" if to and now else "raise"
    return replace(
        set_flag(view, FRACTION, to, gain, words, direction=direction),
        why=f"SGLang ended with: {shortened(text, 300)}",
        not_if="the weights leave nothing of the GPU: then more GPUs",
    )


def _fewer_sampled(view: View) -> list[Change]:
    """Run fewer requests where memory ran out while tokens were sampled."""
    line = view.explanation
    if line is None or not line.place.startswith("srt/layers/sampler.py"):
        return []
    why = (
        "It ran out while tokens were sampled: that takes memory for the whole vocabulary, for every request of a"
        " batch."
    )
    not_if = "requests ask for logprobs of many tokens: then those take it"
    return [replace(fewer, why=why, not_if=not_if, cost="More requests wait.") for fewer in fewer_decoding(view)]


def _raise_fraction(view: View, _: Beside) -> list[Change]:
    """Raise the fraction where the GPU has room for it, by the figures of the start; else there is no room."""
    facts = view.facts
    weights, left, now = facts.weights_gb, facts.beside_weights_gb, facts.number(FRACTION)
    total = facts.capacity_gb or (weights + left if weights and left is not None else None)
    if not weights or not total:
        return [say()]
    most = min(MOST_FRACTION, floor(100 * (1.0 - view.profile.reserve_lower_gb / total)) / 100)
    room = most * total - weights
    if room < LEAST_POOL_GB or (now is not None and most <= now):
        return [say()]
    gain = (
        f"the weights alone take {weights / total:.3f} of the memory; at {most:g} about {room:.1f} GB are left for the"
        f" KV cache, and {(1.0 - most) * total:.1f} GB for everything else"
    )
    return [
        replace(
            set_flag(view, FRACTION, most, gain, direction="raise"),
            why="Weights and KV cache share this part of the GPU's memory, and the weights take all of it.",
            not_if="the activations of long prompts need what is left beside it: then use more GPUs or smaller weights",
            cost="Less GPU memory stays free for peaks.",
        ),
        say(),
    ]


def _smaller_graphs(view: View) -> list[Change]:
    """Leave room for the graphs: a smaller KV cache, or graphs of the batches that run."""
    facts, now = view.facts, view.facts.number(FRACTION)
    less = None if now is None else max(round(now - 0.05, 2), LEAST_FRACTION)
    smaller = [] if now is not None and less is not None and less >= now else [set_flag(view, FRACTION, less)]
    if facts.capturing == "prefill":
        return [*smaller, *_smaller_prefill_graphs(view)]
    largest, ran = facts.largest_captured, view.batch()
    half = next((size for size in reversed(GRAPH_SIZES) if 2 * size <= (largest or 0)), GRAPH_SIZES[0])
    to = (graph_size(view, ran) or largest) if ran else half
    if not largest or not to or (ran and 2 * to > largest):
        return smaller
    gain = f"99 % of the time at most {ran:g} requests run together" if ran else "half of the present size"
    fewer = set_flag(view, facts.graph_arg, float(to), gain)
    return [fewer, *smaller] if ran else [*smaller, fewer]


def _smaller_prefill_graphs(view: View) -> list[Change]:
    """Capture graphs of smaller prefill batches, by the name that the release has."""
    facts, config = view.facts, view.facts.arguments.get("cuda_graph_config")
    prefill = config.get("prefill") if isinstance(config, dict) else None
    most = prefill.get("max_bs") if isinstance(prefill, dict) else None
    known = ("cuda_graph_max_bs_prefill", "piecewise_cuda_graph_max_tokens")
    arg = next((name for name in known if facts.flag(name)), "")
    now = facts.size(arg) or (float(most) if isinstance(most, int) else None)
    to = PREFILL_GRAPH if now is None or now > PREFILL_GRAPH else now // 2
    return [set_flag(view, arg, to, now=now, direction="lower")] if arg and to >= 1 else []


def _fraction_for(view: View, now: float, left: float) -> float:
    """Return the fraction that leaves the middle of the good range where `now` leaves so many GB."""
    profile, capacity = view.profile, view.facts.capacity_gb
    spare = left - max(min(profile.reserve_aim_gb, profile.reserve_upper_gb), profile.reserve_lower_gb)
    step = spare / capacity if capacity else (0.01 if spare > 0 else -0.01)
    return min(max(percents(now + step), LEAST_FRACTION), MOST_FRACTION)


def aim_at_reserve(view: View, beside: Beside, *, too_large: bool) -> list[Change]:
    """Change the memory fraction until the middle of the good range is left."""
    facts, left = view.facts, view.facts.reserve_gb
    capped = larger_pool(view) if too_large else []
    if capped:  # a larger fraction changes nothing while the flag holds
        gain = f"{capped[0].gain}; without the flag SGLang takes what --mem-fraction-static allows"
        not_if = MEMORY_RESERVE_TOO_LARGE.remedy.not_if
        return [replace(capped[0], gain=gain, why=CAPPED.why, not_if=not_if, cost=CAPPED.cost)]
    now = facts.number(FRACTION)
    if left is None or now is None:
        return [set_flag(view, FRACTION)]
    growth = graph_growth(view) if CUDA_GRAPH_NOT_COVERING in beside else 0.0
    if growth is None and too_large:
        return []
    capacity = facts.capacity_gb
    to = _fraction_for(view, now, left - (growth or 0.0))
    if (to <= now) if too_large else (to >= now):
        words = (
            f"{left:.4g} GB are left, and --mem-fraction-static is {now:g}: raise it by 0.01 at a time, and watch for"
            " out-of-memory failures"
        )
        return [say(words=words)] if too_large and growth == 0.0 else []
    unusual = "more than the usual 0.7 to 0.9: raise it by 0.01 at a time and watch for out-of-memory failures"
    gains = (pool_tokens(view, (to - now) * capacity if capacity else None), unusual if to > USUAL_FRACTION else "")
    return [set_flag(view, FRACTION, to, "; ".join(filter(None, gains)))]


NO_KV_CACHE = failure(
    id="no_kv_cache",
    title="no room for the KV cache",
    past="The weights left no room for the KV cache.",
    when=event("no_pool", name="starts whose memory has no room for a KV cache"),
    summary="The weights leave no room for the KV cache.",
    seen="{value}",
    sign="its log shows a start whose memory has no room for a KV cache",
    says=_without_room,
    guide='"Tune --mem-fraction-static": weights and KV cache share this part of the memory',
    remedy=Change(
        direction="make room",
        words="use more GPUs (--tp-size), or smaller weights (--quantization fp8, a quantized model)",
        why=(
            "The KV cache gets what --mem-fraction-static leaves beside the weights, and that is nothing. Without a KV"
            " cache no request can run."
        ),
        not_if="another process holds the memory: check nvidia-smi",
    ),
    advise=_raise_fraction,
    groups=_FAILURES,
    protects="memory",
    ends_as="memory",
    fleet=2,
    deniable=True,
)


OUT_OF_MEMORY_PREFILL = _out_of_memory(
    "prefill",
    guide='"Avoid out-of-memory errors": on OOM in prefill lower --chunked-prefill-size to 4096, then 2048',
    remedy=Change(
        arg="chunked_prefill_size",
        direction="lower",
        words="4096, then 2048",
        why="SGLang prefills prompts in chunks of this many tokens. A larger chunk needs more memory.",
        not_if="the value is already 2048: then lower --mem-fraction-static",
        cost="Time to first token of long prompts rises.",
    ),
    advise=_under_load(smaller_chunk),
    lends=((CHUNK, "lower"),),
    shade=1,
)


OUT_OF_MEMORY_DECODE = _out_of_memory(
    "decode",
    guide='"Avoid out-of-memory errors": on OOM in decode lower --max-running-requests',
    remedy=Change(
        arg=LIMIT,
        direction="lower",
        words="about three quarters of the last batch",
        why="Fewer requests at once need less memory for activations.",
        not_if="a single request does not fit: then lower --mem-fraction-static or --context-length",
        cost="Fewer requests run at once.",
    ),
    advise=_under_load(fewer_decoding),
)


GRAPH_MEMORY_SHORT = failure(
    id="graph_memory_short",
    title="CUDA graphs leave no GPU memory",
    past="CUDA graphs left too little GPU memory free, or did not fit.",
    when=fact(
        measure=_graph_memory,
        counts=("out_of_memory.graph_capture",),
        name="GPU memory missing after graph capture, all of it where the capture failed",
        unit="GB",
        needs="a log",
    ),
    summary="CUDA graphs leave too little GPU memory free, or do not fit.",
    seen="graph capture ran out of memory, or left less than {reserve_least_gb} GB free",
    sign="graph capture ran out of memory, or left too little of the GPU's memory free",
    guide='"Avoid out-of-memory errors": lower --mem-fraction-static, or capture fewer or smaller CUDA graphs',
    remedy=Change(
        arg=FRACTION,
        direction="lower",
        words="0.05 less, or lower --cuda-graph-max-bs",
        why=(
            "SGLang captures CUDA graphs after it has allocated weights and KV cache; the graphs need memory of their"
            " own."
        ),
        not_if="the captured batch sizes never run: then lower --cuda-graph-max-bs instead",
        cost="The KV cache gets smaller.",
    ),
    advise=_other_process_first(_smaller_graphs),
    groups=_FAILURES,
    protects="memory",
    ends_as="memory",
    fleet=2,
    feared=lambda view: not view.totals["out_of_memory.graph_capture"],
    shade=1,
)


OUT_OF_MEMORY_ANY = failure(
    id="out_of_memory_any",
    unless=(NO_KV_CACHE,),
    title="out of GPU memory",
    past="SGLang ran out of GPU memory.",
    alert="SGLangOutOfMemory",
    when=event("out_of_memory.startup", "out_of_memory.unknown", name="out-of-memory failures"),
    summary="SGLang ran out of GPU memory.",
    seen="{value} out-of-memory failure{s}",
    guide=(
        '"Avoid out-of-memory errors": lower --mem-fraction-static to 0.8 or 0.7; capture fewer CUDA graphs; use an FP8'
        " KV cache or FP8 weights"
    ),
    remedy=Change(
        arg=FRACTION,
        direction="lower",
        words="0.8, then 0.7",
        why="Weights and KV cache take this share of GPU memory; the rest must hold CUDA graphs and activations.",
        not_if=(
            "the weights alone do not fit: then use more GPUs (--tp-size) or --quantization fp8; or a request has too"
            " many images: then send fewer at once"
        ),
        cost="The KV cache gets smaller.",
    ),
    advise=_other_process_first(_lower_fraction),
    groups=_FAILURES,
    protects="memory",
    ends_as="memory",
    fleet=2,
    deniable=True,
    short="Out of memory",
    lends=((FRACTION, "lower"),),
)


MEMORY_RESERVE_TOO_SMALL = limit(
    id="memory_reserve_too_small",
    title="memory reserve too small",
    past="SGLang started with too little free GPU memory.",
    after=600.0,
    any_load=True,
    when=_start("reserve_lower_gb", "below"),
    summary="SGLang started with too little free GPU memory: it may run out of memory.",
    seen="{value} free on the GPU at start-up",
    guide='"Tune --mem-fraction-static": lower it where available_gpu_mem at start-up is below 5 GB; 5-8 GB is good',
    remedy=Change(
        arg=FRACTION,
        direction="lower",
        words="0.01 less; repeat until {reserve_lower_gb} to {reserve_good_gb} GB stay free",
        why="Activations of long prompts and large batches need this memory.",
        not_if="another process holds the memory: check nvidia-smi",
        cost="The KV cache gets smaller.",
    ),
    unless=(GRAPH_MEMORY_SHORT,),
    causes=(Group.OUT_OF_MEMORY,),
    needs_advice=True,
    advise=lambda view, beside: aim_at_reserve(view, beside, too_large=False),
    notified="{value} less left on the GPU at start-up than its profile asks for",
    shade=1,
    native=Native(
        alert="SGLangMemoryLeftTooSmall",
        expr=f"{by_server('min', series('startup_available_gpu_memory_gb'))}",
        limit=f"< {DEFAULT.reserve_lower_gb:g}",
        seen=f"{{value}} GB were free on the GPU after the start, less than {DEFAULT.reserve_lower_gb:g}",
        form='printf "%.1f"',
    ),
)


MEMORY_RESERVE_TOO_LARGE = hint(
    id="memory_reserve_too_large",
    title="memory reserve too large",
    past="GPU memory stayed unused that the KV cache could have used.",
    after=600.0,
    any_load=True,
    when=_start("reserve_upper_gb"),
    summary="GPU memory stays unused that the KV cache could use.",
    seen="{value} free on the GPU at start-up",
    guide=(
        '"Tune --mem-fraction-static": 5-8 GB of available_gpu_mem at start-up is good; with 10-20 GB raise it in steps'
        " of 0.01"
    ),
    remedy=Change(
        arg=FRACTION,
        direction="raise",
        words="0.01 more; repeat until {reserve_lower_gb} to {reserve_good_gb} GB stay free",
        why="A larger KV cache holds more requests and more cached prefixes.",
        not_if=(
            "token usage stays low and prompts share no prefixes, other processes share the GPU, the CPU shares its"
            " memory (DGX Spark, Jetson), or the activations of long prompts or images need it"
        ),
        cost="Less GPU memory stays free for peaks: watch for out-of-memory failures afterwards.",
    ),
    advise=lambda view, beside: aim_at_reserve(view, beside, too_large=True),
    lends=((FRACTION, "raise"),),
    native=Native(
        alert="SGLangMemoryLeftTooLarge",
        expr=f"{by_server('min', series('startup_available_gpu_memory_gb'))}",
        limit=f"> {DEFAULT.reserve_upper_gb:g}",
        seen=f"{{value}} GB were free on the GPU after the start, more than {DEFAULT.reserve_upper_gb:g}",
        form='printf "%.1f"',
    ),
)


QUANTIZATION_CANDIDATE = chance(
    id="quantization_candidate",
    when=fact(
        measure=_large_weights,
        limit=LARGE_WEIGHTS,
        name="share of a GPU's memory taken by its part of the weights",
    ),
    summary="The KV cache is short of memory, and the weights are not quantized.",
    seen="the weights take {value} of each GPU's memory",
    guide='"Try other options": where memory is short, use --quantization fp8',
    remedy=Change(
        arg="quantization",
        direction="set",
        words="fp8",
        why="8-bit weights take half the memory; the KV cache gets the other half.",
        not_if="the GPU has no FP8 (Ada, Hopper and newer have it), or answers must not lose any accuracy",
        cost="A little accuracy.",
        to="fp8",
    ),
    shade=1,
)
