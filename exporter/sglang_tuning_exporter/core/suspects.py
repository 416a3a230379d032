"""Flags that the operator set away from SGLang's defaults, where figures show that they are the cause: each is then the first change.

A suspect has the values that are suspicious, and a proof: the rows that it causes under the trouble seen, the value to set, and what is
gained. Read in SGLang 0.5.23, srt/managers/schedule_policy.py and scheduler.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import TypeAlias

from sglang_tuning_exporter.core.findings import Change, Value
from sglang_tuning_exporter.core.view import View, counted
from sglang_tuning_exporter.sglang.args.flags import number

OFTEN = 0.25  # of the serving time: less than for a finding
EMPTY_PAGES, EMPTY_PAGES_ALLOWED, PAGE_SIZES = 0.25, 0.1, (64, 32, 16, 1)
PROMPTS_HELD = 0.25  # of the KV cache, above which prompts that share nothing fill it
SHORT_PROMPT = 64.0
FEW_PROMPTS = 4.0  # in one prefill batch
LATE_TIMES, SLOW_BURN_TIMES = 10.0, 6.0  # error budgets above which first tokens, and gaps between tokens, are late
# Attention backends that need their own page size (srt/arg_groups/overrides.py).
PAGED_BACKENDS = (
    "flashmla", "cutlass_mla", "trtllm_mla", "trtllm_mha", "fa4", "ascend", "intel_amx", "dsa", "nsa", "aiter", "dsv4", "tokenspeed_mla",
)  # fmt: skip
# While one of these is set, no other flag helps.
INSTEAD = frozenset({"page_size", "max_prefill_tokens", "prefill_decode_interval"})
_STATES = {"pool": "pool_full", "prefill": "prefill_bound", "held_back": "held_back"}
_WAITING = frozenset({"queue_too_long", "unexplained", "latency_queue"})
_POOL = _WAITING | {
    "running_far_below_limit", "conservativeness_ineffective", "admission_too_conservative", "retracting_too_often",
}  # fmt: skip
_PROMPTS = _WAITING | {"prefill_bound", "latency_long_prompts"}
_ADMITS = _WAITING | {"admission_too_conservative", "prefill_bound"}

# The rows that the flag causes, the value to set, and what is gained.
Proven: TypeAlias = tuple[frozenset[str], Value, str]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A flag with a suspicious side, a switch that is on or numbers strictly between `least` and `most`, and its proof."""

    arg: str
    proof: Callable[[View, frozenset[str], float], Proven | None]
    why: str
    not_if: str
    cost: str
    least: float = inf
    most: float = inf
    forced_by: tuple[str, ...] = ()  # arguments, or `argument=value`, for which SGLang sets the flag by itself

    def is_suspicious(self, value: object) -> bool:
        """Whether a typed value is on the suspicious side."""
        if isinstance(value, bool):
            return value and self.least == inf
        return isinstance(value, (int, float)) and self.least < value < self.most


def troubles(view: View) -> frozenset[str]:
    """Return what is wrong with the load: pool, prefill, held_back, waiting, unknown, retracting, rejected."""
    if not view.has_enough_load:
        return frozenset()
    often = view.profile.frequent_share
    bound = min(OFTEN, often)
    seen = {trouble for trouble, state in _STATES.items() if (view.share("admission", state) or 0.0) > bound}
    if view.prefill_share > bound:
        seen.add("prefill")
    healthy = ("empty", "in_range") if view.profile.queue_lower is None else ("empty", "in_range", "below_range")
    at_limit = (view.share("admission", "running_limit") or 0.0) > bound
    signs = {
        "unknown": 1.0 - (view.share("queue", "empty") or 0.0) > often and view.facts.starts_slowly,
        "waiting": not seen and not at_limit and 1.0 - (view.share("queue", *healthy) or 0.0) > bound,
        "limit": at_limit,
        "retracting": view.retractions_a_minute > view.retractions_tolerated,
        "rejected": view.per_minute(view.totals["rejected"]) > view.profile.rejections_per_minute,
    }
    return frozenset(seen | {trouble for trouble, is_seen in signs.items() if is_seen})


def proven(view: View) -> list[tuple[Change, frozenset[str]]]:
    """Return the change of every flag that figures show to cause the trouble, with the rows that it causes."""
    facts, seen = view.facts, troubles(view)
    typed = facts.typed_arguments
    found = []
    for suspect in SUSPECTS if typed and seen else ():
        value = typed.get(suspect.arg) if typed else None
        if not suspect.is_suspicious(value) or not facts.flag(suspect.arg) or _is_forced(suspect, view):
            continue
        shown = suspect.proof(view, seen, number(value) or 0.0)
        if shown is not None:
            rows, to, gain = shown
            found.append((_change(suspect, view, value, to, gain), rows))
    return found


def explaining(row: str, view: View) -> list[Change]:
    """Return the changes of the flags that figures show to cause a row."""
    return [change for change, rows in proven(view) if row in rows]


def beside(view: View) -> list[Change]:
    """Return every proven change; none where all that is wrong is a cache that is full for a part of the time."""
    return [] if troubles(view) <= {"pool"} else [change for change, _ in proven(view)]


def explained(view: View) -> View:
    """Return the view with waits explained by a flag: while each prefill batch ends at --max-prefill-tokens, requests wait for prefill."""
    if view.totals["admission/held_back"] and any(change.arg == "max_prefill_tokens" for change, _ in proven(view)):
        return replace(view, totals=counted(view.totals, "held_back", "prefill_bound"))
    return view


def _change(suspect: Suspect, view: View, now: object, to: Value, gain: str) -> Change:
    direction = "drop" if to is False else "raise" if float(to or 0) > (number(now) or 0.0) else "lower"
    return Change(
        suspect.arg, view.facts.flag(suspect.arg), now if isinstance(now, (bool, int, float)) else None,
        int(to) if isinstance(to, float) else to, "", direction, suspect.why, suspect.cost, gain, suspect.not_if, removes=to is False,
    )  # fmt: skip


def _is_forced(suspect: Suspect, view: View) -> bool:
    """Whether SGLang sets this by itself, so that removing the flag has no effect."""
    conditions = (each.partition("=") for each in suspect.forced_by)
    return any(view.facts.word(arg) == value if value else view.facts.is_on(arg) for arg, _, value in conditions)


# Proofs


def _radix_cache(view: View, seen: frozenset[str], _: float) -> Proven | None:
    """Each request computes and holds its whole prompt, shared or not."""
    prompt, running, usage, pool = view.prompt, view.mean("running"), view.mean("usage"), view.facts.pool()
    if prompt is None or prompt < SHORT_PROMPT:
        return None
    rows: frozenset[str] = frozenset()
    gain = ""
    held = usage * pool / running if usage and pool and running else None
    share = prompt / held if held else None
    if "pool" in seen and (share is None or share >= PROMPTS_HELD):
        rows |= _POOL
        gain = (
            f"prompts take about {100 * share:.0f} % of the KV cache, each request its own copy"
            if share is not None and share < 1
            else ""
        )
    if "prefill" in seen:
        rows |= _PROMPTS
        gain = gain or f"a mean prompt has {prompt:,.0f} tokens, all computed"
    return (rows, False, gain) if rows else None


def _pages(view: View, seen: frozenset[str], page: float) -> Proven | None:
    """Requests leave much of their last pages empty."""
    prompt = view.prompt
    if prompt is None or seen.isdisjoint({"pool", "held_back", "retracting", "waiting"}):
        return None
    request = prompt + (view.answer or 0.0) / 2
    wasted = max(1.0 - request / (ceil(request / page) * page), page / 2 / (request + page / 2))
    if wasted < EMPTY_PAGES:
        return None
    smaller = next(
        (size for size in PAGE_SIZES if size < page and size / 2 / (request + size / 2) <= EMPTY_PAGES_ALLOWED), 1
    )
    gain = (
        f"about {100 * wasted:.0f} % of the KV cache is empty space in pages: a request has some {request:,.0f} tokens"
    )
    return (_POOL, float(smaller), gain)


def _prefill_tokens(view: View, seen: frozenset[str], most: float) -> Proven | None:
    """A prefill batch ends at this many tokens, beside a larger chunk."""
    chunk, prompt = view.facts.number("chunked_prefill_size"), view.prompt
    wanted = float(chunk) if chunk is not None and chunk > 0 else 16384.0
    fit = most / max(prompt or 1024.0, 1.0)
    if most >= wanted or not (
        "prefill" in seen or (not seen.isdisjoint({"held_back", "waiting"}) and fit <= FEW_PROMPTS)
    ):
        return None
    return (_ADMITS, max(wanted, 16384.0), f"a prefill batch ends at {most:,.0f} tokens, a chunk has {wanted:,.0f}")


def _decode_interval(view: View, seen: frozenset[str], steps: float) -> Proven | None:
    """Between prefill batches requests wait for decode steps; not while gaps between tokens are late, which a smaller interval lengthens."""
    late = view.late_share("inter_token", view.profile.inter_token_seconds)
    if late > view.profile.late_bound(SLOW_BURN_TIMES) or seen.isdisjoint({"held_back", "unknown", "waiting"}):
        return None
    return (_ADMITS, 0.0, f"after each prefill batch no request starts for {steps:g} decode steps")


def _queue_limit(_: View, seen: frozenset[str], most: float) -> Proven | None:
    """Only bursts are rejected: nothing else keeps requests waiting."""
    return (frozenset({"requests_rejected"}), 4 * max(most, 1.0), "") if seen == {"rejected"} else None


SUSPECTS: tuple[Suspect, ...] = (
    Suspect(
        "disable_radix_cache",
        _radix_cache,
        "Without the radix cache each request computes and holds its whole prompt. If prompts share prefixes, the cache computes and holds each prefix once.",
        "prompts share no prefixes, or the model cannot use the cache: then SGLang switches it off again",
        "A little scheduling time; cached prefixes fill the KV cache and are evicted when room is needed.",
        forced_by=(
            "disaggregation_mode=decode", "is_embedding", "enable_mis", "enable_deterministic_inference", "prefill_only_disable_kv_cache",
        ),
    ),
    Suspect(
        "page_size",
        _pages,
        "The KV cache is given out in whole pages, and a request leaves its last page partly empty. Shared prefixes are reused in whole pages only.",
        "the attention backend needs this page size: then SGLang sets it again",
        "Larger pages make transfers to host memory or to a decode server faster.",
        least=16,
        forced_by=tuple(f"attention_backend={name}" for name in PAGED_BACKENDS),
    ),
    Suspect(
        "max_prefill_tokens",
        _prefill_tokens,
        "A prefill batch takes no further prompt after this many tokens, so prompts are computed one after another although a chunk has room for several.",
        "prompts are computed one at a time anyway, because few requests come at once",
        "Larger prefill batches take more GPU memory, and running requests pause longer.",
        least=0,
        most=16384,
    ),
    Suspect(
        "prefill_decode_interval",
        _decode_interval,
        "Requests that wait cannot start until this many decode steps have passed.",
        "running requests would pause too often without it",
        "Running requests pause more often.",
        least=0,
    ),
    Suspect(
        "max_queued_requests",
        _queue_limit,
        "SGLang answers 503 to each request that finds the queue full. A longer queue takes bursts.",
        "requests always come faster than they are served: then they wait instead, and more of them give up",
        "Requests wait longer instead of being rejected.",
        least=0,
        most=1e9,
    ),
)  # fmt: skip
