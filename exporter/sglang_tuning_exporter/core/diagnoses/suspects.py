"""Flags that cause the trouble of a load, each with its proof by figures. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import TypeAlias

from sglang_tuning_exporter.core.diagnoses.base import Group
from sglang_tuning_exporter.core.diagnoses.steps import SLOW_BURN_TIMES
from sglang_tuning_exporter.core.findings import Change, Value
from sglang_tuning_exporter.core.view import View, counted
from sglang_tuning_exporter.sglang import flags

TROUBLED_SHARE = 0.25  # of the serving time; a finding needs more
EMPTY_PAGES, EMPTY_PAGES_ALLOWED, PAGE_SIZES = 0.25, 0.1, (64, 32, 16, 1)
PROMPTS_HELD = 0.25  # of the KV cache; above it, prompts that share no prefix fill the cache
SHORT_PROMPT = 64.0
FEW_PROMPTS = 4.0  # in one prefill batch
LARGEST_PREFILL = 16384.0  # tokens of a batch: SGLang's default
# Attention backends that need their own page size (srt/arg_groups/overrides.py).
PAGED_BACKENDS = (
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
# While one of these is set, no other flag helps.
INSTEAD = frozenset({"page_size", "max_prefill_tokens", "prefill_decode_interval", "enable_prefill_delayer"})
_Effects: TypeAlias = "frozenset[Group]"  # the groups whose diagnoses a flag causes
_Proof: TypeAlias = "tuple[_Effects, Value, str]"  # the effects that figures show, the value to set, the gain in words
_FILLS = frozenset({Group.QUEUES, Group.FILLS})
_PREFILLS = frozenset({Group.QUEUES, Group.PREFILLS})
_ADMITS = frozenset({Group.QUEUES, Group.ADMITS})
_NO_EFFECT: _Effects = frozenset()


@dataclass(frozen=True, slots=True)
class _Suspect:
    """A flag that is suspicious with some values, and the proof that it causes a trouble.

    Suspicious are a switch that is on, and numbers strictly between `least` and `most`. The proof is a function of the
    view, the troubles of the load and the value of the flag. It returns the groups whose diagnoses the flag causes
    (none where no figure shows it), the value to set, and the gain.
    """

    change: Change
    proof: Callable[[View, frozenset[str], float], _Proof]
    least: float = inf
    most: float = inf
    forced_by: tuple[str, ...] = ()  # arguments, or `argument=value`, for which SGLang sets the flag by itself

    def is_suspicious(self, value: object) -> bool:
        """Whether a typed value is suspicious."""
        if isinstance(value, bool):
            return value and self.least == inf
        return isinstance(value, (int, float)) and self.least < value < self.most

    def is_forced(self, view: View) -> bool:
        """Whether SGLang sets the flag by itself, so that removing it has no effect."""
        conditions = (condition.partition("=") for condition in self.forced_by)
        return any(view.facts.word(arg) == value if value else view.facts.is_on(arg) for arg, _, value in conditions)


def _load_troubles(view: View) -> frozenset[str]:
    """Return the troubles of the load.

    They are pool_full, prefill_bound, held_back, waiting, starts, limit, retracting and rejected.
    """
    if not view.has_enough_load:
        return frozenset()
    often = view.profile.frequent_share
    bound = min(TROUBLED_SHARE, often)
    reasons = {
        state
        for state in ("pool_full", "prefill_bound", "held_back")
        if (view.share("admission", state) or 0.0) > bound
    }
    reasons |= {"prefill_bound"} if view.prefill_share > bound else set()
    healthy = ("empty", "in_range") if view.profile.queue_lower is None else ("empty", "in_range", "below_range")
    at_limit = (view.share("admission", "running_limit") or 0.0) > bound
    signs = {
        "starts": 1.0 - (view.share("queue", "empty") or 0.0) > often and view.facts.starts_slowly,
        "waiting": not reasons and not at_limit and 1.0 - (view.share("queue", *healthy) or 0.0) > bound,
        "limit": at_limit,
        "retracting": view.retractions_a_minute > view.retractions_tolerated,
        "rejected": view.per_minute(view.totals["rejected_requests"]) > view.profile.rejections_per_minute,
    }
    return frozenset(reasons | {trouble for trouble, holds in signs.items() if holds})


def proven(view: View) -> dict[Change, _Effects]:
    """Return the changes of the flags that figures show to cause a trouble, each with the groups that it causes."""
    facts, changes = view.facts, dict[Change, _Effects]()
    typed = facts.typed_arguments or {}
    suspects = [suspect for suspect in SUSPECTS if suspect.is_suspicious(typed.get(suspect.change.arg))]
    troubles = _load_troubles(view) if suspects else frozenset[str]()
    for suspect in suspects if troubles else ():
        arg = suspect.change.arg
        if facts.flag(arg) and not suspect.is_forced(view):
            effects, to, gain = suspect.proof(view, troubles, flags.number(typed[arg]) or 0.0)
            if effects:
                changes[replace(suspect.change, to=to, gain=gain)] = effects
    return changes


def proven_beside(view: View) -> dict[Change, _Effects]:
    """Return the changes of all proven flags; none where the only trouble is a cache that is full at times."""
    changes = proven(view)
    return {} if not changes or _load_troubles(view) <= {"pool_full"} else changes


def explained_by_flag(view: View) -> View:
    """Return the view with waits explained by a flag.

    While each prefill batch ends at --max-prefill-tokens, requests wait for prefill.
    """
    if view.totals["admission/held_back"] and any(change.arg == "max_prefill_tokens" for change in proven(view)):
        return replace(view, totals=counted(view.totals, "held_back", "prefill_bound"))
    return view


def _radix_cache(view: View, troubles: frozenset[str], _: float) -> _Proof:
    """Return the proof that each request computes and holds its whole prompt, shared or not."""
    prompt, running, usage, pool = view.prompt or 0.0, view.mean("running"), view.mean("usage"), view.facts.pool()
    share = prompt * running / usage / pool if usage and pool and running else None  # of what a request holds
    effects, gain = _NO_EFFECT, ""
    if "prefill_bound" in troubles:
        effects, gain = _PREFILLS, f"a mean prompt has {prompt:,.0f} tokens, all computed"
    if "pool_full" in troubles and (share is None or share >= PROMPTS_HELD):
        effects |= _FILLS
        if share is not None and share < 1:
            gain = f"prompts take about {100 * share:.0f} % of the KV cache, each request its own copy"
    return effects if prompt >= SHORT_PROMPT else _NO_EFFECT, False, gain


def _pages(view: View, troubles: frozenset[str], page: float) -> _Proof:
    """Return the proof that requests leave much of their last pages empty."""
    request = (view.prompt or 0.0) + (view.answer or 0.0) / 2
    wasted = max(1.0 - request / (ceil(request / page) * page), page / 2 / (request + page / 2)) if request else 0.0
    fitting = (size for size in PAGE_SIZES if size < page and size / 2 / (request + size / 2) <= EMPTY_PAGES_ALLOWED)
    gain = (
        f"about {100 * wasted:.0f} % of the KV cache is empty space in pages: a request has some {request:,.0f} tokens"
    )
    is_short = not troubles.isdisjoint({"pool_full", "held_back", "retracting", "waiting"})
    return _FILLS if view.prompt and is_short and wasted >= EMPTY_PAGES else _NO_EFFECT, float(next(fitting, 1)), gain


def _prefill_tokens(view: View, troubles: frozenset[str], most: float) -> _Proof:
    """Return the proof that prefill batches end at fewer tokens than a chunk has."""
    chunk = view.facts.size("chunked_prefill_size")
    wanted = chunk or LARGEST_PREFILL
    few = not troubles.isdisjoint({"held_back", "waiting"}) and most <= FEW_PROMPTS * max(view.prompt or 1024.0, 1.0)
    effects = _ADMITS if most < wanted and ("prefill_bound" in troubles or few) else _NO_EFFECT
    beside = f"a chunk has {wanted:,.0f}" if chunk else f"by SGLang's default at {wanted:,.0f}"
    return effects, max(wanted, LARGEST_PREFILL), f"a prefill batch ends at {most:,.0f} tokens, {beside}"


def _decode_interval(view: View, troubles: frozenset[str], steps: float) -> _Proof:
    """Return the proof that requests wait for decode steps between prefill batches.

    There is none while inter-token latency misses its objective: a smaller interval would lengthen it.
    """
    late = view.late_share("inter_token", view.profile.inter_token_seconds) > view.profile.late_bound(SLOW_BURN_TIMES)
    waits = not late and not troubles.isdisjoint({"held_back", "starts", "waiting"})
    return (
        _ADMITS if waits else _NO_EFFECT,
        0.0,
        f"after each prefill batch no request starts for {steps:g} decode steps",
    )


def _delayer(view: View, troubles: frozenset[str], _: float) -> _Proof:
    """Return the proof that requests wait beside a cache and a limit that have room, and no prompt keeps SGLang busy.

    The delayer then waits for prompts on the other DP ranks.
    """
    waits = not troubles.isdisjoint({"held_back", "starts", "waiting"})
    others = troubles.isdisjoint({"pool_full", "prefill_bound", "limit", "retracting"})
    most = view.facts.size("prefill_delayer_max_delay_passes")
    passes = f"{most:,.0f} forward passes" if most else "many forward passes"
    return _ADMITS if waits and others else _NO_EFFECT, False, f"it lets a request wait for up to {passes}"


def _queue_limit(_: View, troubles: frozenset[str], most: float) -> _Proof:
    """Return the proof that only bursts are rejected: nothing else keeps requests waiting."""
    return frozenset({Group.REJECTS} if troubles == {"rejected"} else ()), 4 * max(most, 1.0), ""


SUSPECTS: tuple[_Suspect, ...] = (
    _Suspect(
        change=Change(
            arg="disable_radix_cache",
            why="Without the radix cache each request computes and holds its whole prompt. If prompts share prefixes,"
            " the cache computes and holds each prefix once.",
            not_if="prompts share no prefixes, or the model cannot use the cache: then SGLang switches it off again",
            cost="A little scheduling time; cached prefixes fill the KV cache and are evicted when room is needed.",
        ),
        proof=_radix_cache,
        forced_by=(
            "disaggregation_mode=decode",
            "is_embedding",
            "enable_mis",
            "enable_deterministic_inference",
            "prefill_only_disable_kv_cache",
        ),
    ),
    _Suspect(
        change=Change(
            arg="page_size",
            why="The KV cache is given out in whole pages, and a request leaves its last page partly empty. Shared"
            " prefixes are reused in whole pages only.",
            not_if="the attention backend needs this page size: then SGLang sets it again",
            cost="Larger pages make transfers to host memory or to a decode server faster.",
        ),
        proof=_pages,
        least=16,
        forced_by=tuple(f"attention_backend={name}" for name in PAGED_BACKENDS),
    ),
    _Suspect(
        change=Change(
            arg="max_prefill_tokens",
            why="A prefill batch takes no further prompt after this many tokens, so prompts are computed one after"
            " another although several could be at once.",
            not_if="prompts are computed one at a time anyway, because few requests come at once",
            cost="Larger prefill batches take more GPU memory, and running requests pause longer.",
        ),
        proof=_prefill_tokens,
        least=0,
        most=LARGEST_PREFILL,
    ),
    _Suspect(
        change=Change(
            arg="prefill_decode_interval",
            why="Requests that wait cannot start until this many decode steps have passed.",
            not_if="running requests would pause too often without it",
            cost="Running requests pause more often.",
        ),
        proof=_decode_interval,
        least=0,
    ),
    _Suspect(
        change=Change(
            arg="enable_prefill_delayer",
            why="The delayer holds a request back until enough DP ranks have a prompt to compute, or until"
            " --prefill-delayer-max-delay-passes (default 30) have passed.",
            not_if="all DP ranks get prompts at the same time: then lower --prefill-delayer-max-delay-passes instead",
            cost="Decoding on the DP ranks without a prompt pauses more often.",
        ),
        proof=_delayer,
    ),
    _Suspect(
        change=Change(
            arg="max_queued_requests",
            why="SGLang answers 503 to each request that finds the queue full. A longer queue takes bursts.",
            not_if="requests always come faster than they are served: then they wait instead, and more of them give up",
            cost="Requests wait longer instead of being rejected.",
        ),
        proof=_queue_limit,
        least=0,
        most=1e9,
    ),
)
