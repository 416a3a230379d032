"""Prompts take the time: for the queue, for first tokens, or for running answers. Pure."""

from __future__ import annotations

from math import ceil, floor, log2

from sglang_tuning_exporter.core.diagnoses.admission import DP_IMBALANCED
from sglang_tuning_exporter.core.diagnoses.base import (
    CHUNK,
    OFTEN,
    ONLINE,
    Beside,
    Group,
    Offer,
    fact,
    limit,
    waiting_figures,
    waits_often,
)
from sglang_tuning_exporter.core.diagnoses.retraction import RETRACTING_TOO_OFTEN
from sglang_tuning_exporter.core.diagnoses.steps import (
    FULL_BATCHES,
    LARGEST_CHUNK,
    LATE_TIMES,
    SLOW_BURN_TIMES,
    SMALL_CHUNK,
    by_queue,
    chunk_in_force,
    first_accepted,
    late,
    say,
    set_flag,
)
from sglang_tuning_exporter.core.findings import Change
from sglang_tuning_exporter.core.view import View
from sglang_tuning_exporter.sglang.metrics import Histogram

LONG_PREFILL = 512.0  # prompt tokens for each late gap, from which on prefill makes it
LEAST_USEFUL_CHUNK = 1024.0  # tokens: a smaller chunk takes about as long
SHORT_OF_A_CHUNK = 0.125  # at most one prompt in eight fills it
CERTAIN_PACE = 0.5  # of the estimated pace of prefill, which assumes full chunks


def _prefill(view: View) -> float | None:
    """Return the share of the time in which prompts are computed while requests wait.

    Where throughput counts, an empty queue beside prefill does not show slow clients.
    """
    value, waits = view.share("admission", "prefill_bound") or 0.0, waits_often(view)
    if view.profile.queue_lower is not None or waits:
        value = max(value, view.full_steps)
        if not waits or view.facts.is_on("disable_radix_cache"):  # else what they wait for is known better
            value = max(value, view.prefill_share)
    return value


def _by_prompts(view: View, first_tokens: Histogram, objective: float) -> bool:
    """Whether long prompts make first tokens late, without a queue."""
    tokens, late = view.totals["computed_tokens"], first_tokens.above(objective)
    # One batch may be late for another reason, as the first one after a start, while kernels are compiled.
    several = late > view.totals["most_running"]
    return several and not by_queue(view, first_tokens, objective) and (not tokens or tokens >= LONG_PREFILL * late)


def _by_prefill(view: View, gaps: Histogram, objective: float) -> bool:
    """Whether the prompts computed in between make gaps between tokens late."""
    late, steps = gaps.above(objective) / gaps.observations, view.steps
    is_long = bool(late and steps) and view.totals["computed_tokens"] / (late * steps) >= LONG_PREFILL
    return is_long and (gaps.quantile(0.25) or 0.0) <= objective


def _larger_chunk(view: View, _: Beside) -> list[Offer]:
    facts, totals = view.facts, view.totals
    now, ranks = chunk_in_force(view)
    where = (
        "add prefill servers, or reuse more prefixes"
        if facts.role == "prefill"
        else "reuse more prefixes, separate prefill and decode, or add a replica"
    )
    why, not_if = (
        "A larger chunk would not help: the GPU is busy with prefill.",
        "prompts share no prefixes, and there is no second GPU",
    )
    elsewhere = say(words=where, why=why, not_if=not_if)
    is_large = now is not None and (now <= 0 or now >= LARGEST_CHUNK * ranks)
    if is_large or totals["full_lines"] < FULL_BATCHES * totals["prefill_lines"]:  # or hardly ever full
        return [elsewhere]
    if facts.reserve_gb is not None and facts.reserve_gb < view.profile.reserve_lower_gb:
        return [
            say(
                words="lower --mem-fraction-static first: a larger chunk needs memory that is not left",
                why="A larger chunk needs memory for its activations, and almost none is free.",
                not_if="another process holds the memory: check nvidia-smi",
                cost="The KV cache gets smaller.",
            )
        ]
    if now is None:
        size = view.chunk_seen or 0.0
        gain = f"prefill batches end at {size:,.0f} tokens" if size else ""
        to = float(min(max(2 * size, SMALL_CHUNK), LARGEST_CHUNK)) if 0 < size < LARGEST_CHUNK else None
        return [set_flag(view, CHUNK, to, gain, now=size or None)]
    wanted = max(min(2 * int(now), LARGEST_CHUNK * ranks), SMALL_CHUNK * ranks)
    page = max(int(facts.size("page_size") or 1), 1) * ranks
    gain = f"{wanted // ranks:,} for each of the {ranks} ranks" if ranks > 1 else ""
    return first_accepted(view, set_flag(view, CHUNK, float(-(-wanted // page) * page), gain), elsewhere)


def _interleave(view: View, _: Beside) -> list[Offer]:
    """Let decode steps run between the chunks of prompts.

    With --prefill-decode-interval as many after each chunk as keep late gaps rare, if first tokens stay in time. In
    releases without it one with each chunk (--enable-mixed-chunk), and chunks that meet the objective.
    """
    facts, chunk, ranks = view.facts, view.facts.typed(CHUNK) or 0.0, view.facts.attention_ranks
    elsewhere = say(
        words="separate prefill and decode (disaggregation), or add a replica",
        why="Prompts and answers share the GPU: what one takes the other waits for.",
        not_if="prompts are short",
    )
    if 0 < chunk < LEAST_USEFUL_CHUNK * ranks:  # decode steps between such chunks only delay the prompts
        return [set_flag(view, CHUNK, LEAST_USEFUL_CHUNK * ranks)]
    shorter = _chunk_within(view, view.profile.inter_token_seconds)
    if facts.is_on("enable_mixed_chunk"):
        return first_accepted(view, *shorter, elsewhere)
    mixed = set_flag(view, "enable_mixed_chunk", to=True)
    steps = float(ceil(1.0 / view.profile.late_bound(SLOW_BURN_TIMES)))
    now = facts.size("prefill_decode_interval") or 0.0
    if now >= steps or _delays_first_tokens(view, steps - now):
        return [elsewhere]  # shorter chunks, mixed or not, delay first tokens as well
    interval = set_flag(view, "prefill_decode_interval", steps, now=now)
    return first_accepted(view, interval, (mixed, *shorter), mixed, elsewhere)


def _delays_first_tokens(view: View, steps: float) -> bool:
    """Whether so many more decode steps after each chunk of a prompt make first tokens late."""
    first, gaps = view.latency("time_to_first_token"), view.latency("inter_token")
    objective = view.profile.time_to_first_token_seconds
    chunk, computed, started = view.facts.size(CHUNK), view.totals["computed_tokens"], view.totals["admitted_requests"]
    longest = first.quantile(0.99) if first is not None else None
    usual = gaps.quantile(0.5) if gaps is not None else None
    if longest is None or usual is None or objective is None or not chunk or not computed or not started:
        return False
    return longest + ceil(computed / started / chunk) * steps * usual > objective


def _chunk_within(view: View, objective: float | None) -> list[Change]:
    """Lower the chunk to the largest power of two that is computed within the objective, where it is not that small and
    the pace is known.
    """
    now, ranks, paused = view.facts.typed(CHUNK), view.facts.attention_ranks, view.paused_share
    if now is None or objective is None or not paused or not view.served or not view.totals["computed_tokens"]:
        return []
    pace = view.totals["computed_tokens"] / (view.served * paused)
    fits = 2.0 ** floor(log2(max(CERTAIN_PACE * pace * objective, 1.0)))
    is_small = fits < LEAST_USEFUL_CHUNK or 0 < now <= fits * ranks
    return [] if is_small else [set_flag(view, CHUNK, fits * ranks, direction="lower")]


def _long_prompts(view: View, beside: Beside) -> list[Offer]:
    """Enlarge the chunk if prompts are long enough to fill it, and tokens are not late by mixed chunks already."""
    chunk, prompt = view.facts.size(CHUNK), view.prompt
    is_short = chunk is not None and prompt is not None and prompt < SHORT_OF_A_CHUNK * chunk
    delays = view.facts.is_on("enable_mixed_chunk") and LATENCY_PREFILL_BETWEEN in beside
    return [] if is_short or delays else _larger_chunk(view, beside)


PREFILL_BOUND = limit(
    id="prefill_bound",
    title="prefill bound {value} of the time",
    when=fact(measure=_prefill, limit=OFTEN, name="serving time in which prompts were computed"),
    summary="Requests wait while SGLang prefills long prompts: prefill is the limit.",
    past="Until {until} requests waited while SGLang prefilled long prompts.",
    seen="{value} of the serving time went into the prompts",
    guide=(
        "with long prompts raise --chunked-prefill-size if memory allows, use piecewise CUDA graphs for prefill, reuse"
        " more prefixes, or use prefill/decode disaggregation"
    ),
    remedy=Change(
        arg="chunked_prefill_size",
        direction="raise",
        words="twice the present size, up to 16384",
        why="With long prompts, small chunks use the GPU inefficiently.",
        not_if="the GPU is already busy with prefill: then only prefix reuse, disaggregation or more replicas help",
        cost="Running requests pause longer for each chunk, and a chunk needs more memory.",
    ),
    causes=(Group.RETRACTION, DP_IMBALANCED),
    advise=_larger_chunk,
    groups=frozenset({Group.WAIT, Group.PREFILLS, Group.ADMITS}),
    supporting=waiting_figures,
    wait="prefill_bound",
    replica="after a flag",
    lends=((CHUNK, "raise"),),
)


LATENCY_PREFILL_BETWEEN = limit(
    id="latency_prefill_between",
    title="prefill interrupts decoding, {value} of tokens late",
    profiles=ONLINE,
    when=late("inter_token", SLOW_BURN_TIMES, "inter-token gaps", _by_prefill),
    summary="Inter-token latency is too high: prefill of long prompts interrupts decoding.",
    past="Until {until} inter-token latency was too high: prefill of long prompts interrupted decoding.",
    seen=(
        "{value} of the inter-token gaps are longer than the objective, the median is not, and long prompts are"
        " prefilled in between"
    ),
    guide="where requests are slow, change --chunked-prefill-size or use prefill/decode disaggregation",
    remedy=Change(
        arg="chunked_prefill_size",
        direction="lower",
        words="half of the present size, together with --enable-mixed-chunk",
        why="With mixed chunks a running request waits for one chunk at most, and a smaller chunk takes less time.",
        not_if=(
            "chunks are not mixed: SGLang then prefills all waiting prompts before it decodes again, whatever the chunk"
            " size"
        ),
        cost="Time to first token of long prompts rises, and prefill throughput falls.",
    ),
    unless=(PREFILL_BOUND, RETRACTING_TOO_OFTEN),
    advise=_interleave,
    replica="after a flag",
    shade=1,
)


LATENCY_LONG_PROMPTS = limit(
    id="latency_long_prompts",
    title="TTFT too long by long prompts for {value} of requests",
    profiles=ONLINE,
    when=late("time_to_first_token", LATE_TIMES, "first tokens", _by_prompts),
    summary="Time to first token is too high with an empty queue: prefill of long prompts takes the time.",
    past="Until {until} time to first token was too high with an empty queue: prefill of long prompts took the time.",
    seen="{value} of the first tokens came later than the objective",
    guide="with long prompts raise --chunked-prefill-size or use piecewise CUDA graphs",
    remedy=Change(
        arg="chunked_prefill_size",
        direction="raise",
        words="twice the present size, up to 16384",
        why="SGLang prefills long prompts in chunks; fewer, larger chunks finish sooner.",
        not_if="prompts already fit into one chunk",
        cost="Running requests pause longer for each chunk, and a chunk needs more memory.",
    ),
    causes=(PREFILL_BOUND,),
    advise=_long_prompts,
    groups=frozenset({Group.PREFILLS}),
    replica="after a flag",
    shade=2,
)
