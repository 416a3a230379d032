"""Tests whether figures of a server show that a flag, set away from its default, explains the trouble. Pure.

Thresholds: docs/decisions.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal, TypeAlias

from sglang_tuning_exporter.diagnosis.demand import USED_LITTLE, demand, held_tokens, mean_prompt
from sglang_tuning_exporter.diagnosis.evidence import Past
from sglang_tuning_exporter.diagnosis.interruption import LONG_PREFILL, chunks_of_a_prompt, decode_steps_per_chunk
from sglang_tuning_exporter.diagnosis.sizing.pools import IN_FORCE
from sglang_tuning_exporter.diagnosis.sizing.prefill import LEAST_USEFUL_CHUNK
from sglang_tuning_exporter.sglang.args.flags import flag_of
from sglang_tuning_exporter.state.profiles import Trouble

PROMPTS_HELD = 0.25
SHORT_PROMPT = 64.0
TINY_CHUNK = 512.0
USUAL_CHUNK = 4096.0
LONG_PROMPT = 1024.0
FEW_PROMPTS = 4.0  # in one prefill batch
EMPTY_PAGE_SHARE = 0.25
CAPPED = "the KV cache has all that this flag allows; where less fits into memory, SGLang takes what fits"
PAGE_SIZES = (64, 32, 16, 1)
EMPTY_PAGE_SHARE_ALLOWED = 0.1
LEAST_HELD = 0.5
LARGE_BATCH = 32.0
MOST_CONSERVATIVE = 1.3  # the guide's value against retractions
NEARLY_MOST_CONSERVATIVE = MOST_CONSERVATIVE - 0.01  # 4.33 x 0.3 under DP attention is 1.299

_NEED_KV_CACHE: frozenset[Trouble] = frozenset({"pool", "held_back", "retracting", "waiting"})
_WAITING_ROWS = frozenset({"queue_too_long", "latency_queue"})
_POOL_ROWS = _WAITING_ROWS | {"running_far_below_limit", "conservativeness_ineffective"}
_PREFILL_ROWS = _WAITING_ROWS | {"prefill_bound", "admission_too_conservative", "latency_long_prompts"}


Side: TypeAlias = Callable[[object], bool]


def is_on(value: object) -> bool:
    """Return whether a switch is set."""
    return value is True


def above(bound: float) -> Side:
    """Return the side of numbers above this."""
    return between(bound, inf)


def between(least: float, most: float) -> Side:
    """Return the side of numbers between these."""
    return lambda value: (
        isinstance(value, (int, float)) and not isinstance(value, bool) and least < value and (value < most)
    )


def among(*words: str) -> Side:
    """Return the side of these words."""
    return lambda value: value in words if isinstance(value, str) else False


def other_than(*words: str) -> Side:
    """Return the side of all words but these."""
    return lambda value: value not in words if isinstance(value, str) else False


# What figures of a server show of a suspect with this value.
Proof: TypeAlias = Callable[["Suspect", "float | str", "ObservedLoad"], "NamedSuspect | None"]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A flag, the side on which it is suspicious, and what it can cause.

    `is_suspicious`: whether a value is on the suspicious side. `proof`: a test of `suspect_proofs`; an `only_proven` suspect
    needs one. `suggested` None: the release's default. `forced_by`: arguments (with these values, or any) for which
    SGLang sets the flag by itself. `only_with`: counts that must be above 1.
    """

    arg: str
    is_suspicious: Side
    troubles: tuple[Trouble, ...]
    why: str
    will_not_help_if: str
    cost: str
    source: str
    proof: Proof | None = None
    only_proven: bool = False
    suggested: float | str | None = None
    forced_by: tuple[tuple[str, tuple[object, ...]], ...] = ()
    only_with: tuple[str, ...] = ()
    gpu_only: bool = False

    @property
    def is_switch(self) -> bool:
        """Whether the flag is set without a value."""
        return self.is_suspicious is is_on


Place: TypeAlias = Literal["instead", "before"]


@dataclass(frozen=True, slots=True)
class NamedSuspect:
    """A suspect of this server with the value to set; `suggested` None: remove the flag.

    `rows`: the diagnoses that it explains by figures. `place`: before their own advice, or instead of it. `gain`: the
    figures.
    """

    suspect: Suspect
    current: float | str
    suggested: float | str | None
    gain: str = ""
    rows: frozenset[str] = frozenset()
    place: Place = "before"

    @property
    def words(self) -> str:
        """What to do if there is no value to type."""
        return "start without it" if self.suspect.is_switch or self.suggested is None else ""


@dataclass(frozen=True, slots=True)
class ObservedLoad:
    """What a test looks at: the past, the trouble in it, and the typed arguments."""

    past: Past
    seen: frozenset[Trouble]
    typed: Mapping[str, object]


def default_value(suspect: Suspect, release: str) -> float | str | None:
    """Return the flag's value if it is not set; None if that is no value to type."""
    if suspect.is_switch:
        return 0.0
    if suspect.suggested is not None:
        return suspect.suggested
    flag = flag_of(suspect.arg, release)
    default = flag.default if flag is not None else None
    if isinstance(default, (int, float)) and not isinstance(default, bool):
        return float(default)
    return default if isinstance(default, str) else None


def admission_share(past: Past, *states: str) -> float:
    """Return the share of the serving time in these states of admission."""
    return past.recent.share_of("admission", states) or 0.0


def radix_cache(suspect: Suspect, current: float | str, load: ObservedLoad) -> NamedSuspect | None:
    """Without the radix cache each request computes and holds its whole prompt, shared or not."""
    prompt, tokens_held, seen = mean_prompt(load.past), held_tokens(load.past, load.past.recent.mean), load.seen
    if prompt is not None and prompt < SHORT_PROMPT:
        return None
    rows: frozenset[str] = frozenset()
    gain = ""
    share = prompt / tokens_held if prompt is not None and tokens_held else None
    if "pool" in seen and (share is None or share >= PROMPTS_HELD):
        rows |= _POOL_ROWS
        if share is not None and share < 1:  # larger shares mix means of different moments
            gain = f"prompts take about {100 * share:.0f} % of the KV cache, each request its own copy"
    if "prefill" in seen or ("first_tokens" in seen and (prompt or 0.0) >= LONG_PROMPT):
        rows |= _PREFILL_ROWS - {"admission_too_conservative"}
        gain = gain or (f"a mean prompt has {prompt:,.0f} tokens, all computed" if prompt is not None else "")
    return NamedSuspect(suspect, current, 0.0, gain, rows) if rows else None


def prefill_limit(suspect: Suspect, current: float | str, load: ObservedLoad) -> NamedSuspect | None:
    """A prefill batch ends at this many tokens, so it is the limit beside a larger chunk."""
    chunk = load.typed.get("chunked_prefill_size")
    default = default_value(suspect, load.past.facts.release or "")
    if not isinstance(current, float) or not isinstance(default, float):
        return None
    wanted = float(chunk) if isinstance(chunk, (int, float)) and chunk > 0 else default
    prompt = mean_prompt(load.past)
    # If many prompts fit into a batch, this limit is not the cause.
    fit = current / (LEAST_USEFUL_CHUNK if prompt is None else max(prompt, 1.0))
    late = not {"tokens", "first_tokens"}.isdisjoint(load.seen) and fit <= FEW_PROMPTS
    if current >= wanted or not (
        "prefill" in load.seen or late or ("held_back" in load.seen and fit <= FEW_PROMPTS / 2)
    ):
        return None
    gain = f"a prefill batch ends at {current:,.0f} tokens, a chunk has {wanted:,.0f}"
    return NamedSuspect(
        suspect, current, max(wanted, default), gain, _PREFILL_ROWS | {"latency_batch_too_large"}, "instead"
    )


def small_chunk(suspect: Suspect, current: float | str, load: ObservedLoad) -> NamedSuspect | None:
    """A prompt takes several passes through the model, one for each small chunk."""
    ranks = _ranks(load.typed)
    prompt, reserve = mean_prompt(load.past), load.past.facts.reserve_gb
    if not isinstance(current, float) or (reserve is not None and reserve < load.past.profile.reserve_lower_gb):
        return None
    chunk, seen = current / ranks, load.seen
    is_tiny = chunk < TINY_CHUNK
    late = {"prefill", "first_tokens", "tokens"} if is_tiny else {"prefill", "first_tokens"}
    if chunk >= LEAST_USEFUL_CHUNK or late.isdisjoint(seen):
        return None
    taken = chunks_of_a_prompt(load.past, chunk)
    if taken is None and prompt is not None:
        taken = ceil(prompt / chunk)
    if taken == 1:
        return None
    gain = f"a mean prompt takes {taken} chunks" if taken is not None else ""
    # Running requests pause while a prompt is computed in chunks.
    rows = _PREFILL_ROWS - {"admission_too_conservative"} | {"latency_batch_too_large"}
    if is_tiny:  # a larger chunk takes no longer, so decode steps between more of them only delay the prompts
        rows |= {"latency_prefill_between"}
    return NamedSuspect(suspect, current, float(LEAST_USEFUL_CHUNK) * ranks, gain, rows, "instead")


def no_chunks(suspect: Suspect, current: float | str, load: ObservedLoad) -> NamedSuspect | None:
    """Without chunks every running request waits for a long prompt to be computed in one piece."""
    prompt, seen = mean_prompt(load.past), load.seen
    if prompt is None or prompt < LONG_PROMPT or not ({"tokens", "prefill", "first_tokens"} & seen):
        return None
    gain = f"running requests pause for whole prompts, {prompt:,.0f} tokens on average"
    rows = _PREFILL_ROWS - {"admission_too_conservative"} | {"latency_batch_too_large"}
    return NamedSuspect(suspect, current, USUAL_CHUNK * _ranks(load.typed), gain, rows)


def _ranks(typed: Mapping[str, object]) -> float:
    """Return the ranks of DP attention, by which SGLang divides the chunk."""
    for arg in ("attn_dp_size", "dp_size" if typed.get("enable_dp_attention") else ""):
        ranks = typed.get(arg)
        if isinstance(ranks, int) and ranks > 1:
            return float(ranks)
    return 1.0


def empty_page_share(page: float, request: float) -> float:
    """Return the share of its pages that a request of so many tokens leaves empty, 0-1."""
    return 1.0 - request / (ceil(request / page) * page) if request > 0 else 0.0


def pages(suspect: Suspect, current: float | str, load: ObservedLoad) -> NamedSuspect | None:
    """Requests leave much of their last pages empty."""
    request = _request_tokens(load.past)
    wants_room = bool(_NEED_KV_CACHE & load.seen)
    # At the running limit a smaller page helps only after the limit was raised.
    if not isinstance(current, float) or request is None or not (wants_room or "limit" in load.seen):
        return None
    # Lengths differ: the last page of a request is half empty on average.
    wasted = max(empty_page_share(current, request), current / 2 / (request + current / 2))
    if wasted < EMPTY_PAGE_SHARE:
        return None
    smaller = [
        size for size in PAGE_SIZES if size < current and size / 2 / (request + size / 2) <= EMPTY_PAGE_SHARE_ALLOWED
    ]
    gain = (
        f"about {100 * wasted:.0f} % of the KV cache is empty space in pages: a request has some {request:,.0f} tokens"
    )
    rows = _POOL_ROWS | {"admission_too_conservative", "retracting_too_often"} if wants_room else frozenset()
    return NamedSuspect(suspect, current, float(smaller[0] if smaller else 1), gain, rows, "instead")


def _request_tokens(past: Past) -> float | None:
    """Return the mean tokens of a running request: its prompt, and half of its answer if known."""
    prompt, ended = mean_prompt(past), past.finished_requests
    answers = past.recent.counts.get("finished_answer_tokens")
    answer = answers / ended if answers and ended else 0.0
    return prompt + answer / 2 if prompt is not None else None


def pool_cap(suspect: Suspect, current: float | str, load: ObservedLoad) -> NamedSuspect | None:
    """The KV cache is as large as the flag allows, and is full or reserved."""
    pool = max(load.past.facts.kv_pool_tokens.values(), default=None)
    seen, past = load.seen, load.past
    is_full = "pool" in seen or ("held_back" in seen and _will_use_reservation(past))
    # Some requests wait while others are retracted, and the flag is as high as it helps.
    if (
        "retracting" in seen
        and {"held_back", "waiting"} & seen
        and (past.facts.conservativeness or 0.0) > NEARLY_MOST_CONSERVATIVE
    ):
        is_full = True
    if not isinstance(current, float) or pool is None or pool < IN_FORCE * current or not is_full:
        return None
    return NamedSuspect(suspect, current, 2 * current, CAPPED, _POOL_ROWS)


def _will_use_reservation(past: Past) -> bool:
    """Return whether running requests will use what is reserved for them, and the flag is at most 1.3.

    Halfway through their answers, requests that will fill the KV cache hold at least half of it.
    """
    kept, asking, usage = past.facts.conservativeness, demand(past), past.mean_while_held_back("usage")
    if kept is None or kept > MOST_CONSERVATIVE or asking is None or usage is None:
        return False
    return usage >= LEAST_HELD and asking.share > USED_LITTLE


def adapters(suspect: Suspect, current: float | str, load: ObservedLoad) -> NamedSuspect | None:
    """Requests of an adapter without a slot wait, whatever is free."""
    paths = load.typed.get("lora_paths")
    adapters = len(paths) if isinstance(paths, (list, dict)) else 0
    if not isinstance(current, float) or adapters + 1 <= current or not ({"held_back", "waiting"} & load.seen):
        return None
    rows = _WAITING_ROWS | {"admission_too_conservative"}
    gain = f"{adapters} adapters share {current:g} slots"
    return NamedSuspect(suspect, current, float(adapters + 1), gain, rows, "instead")


def prefill_requests(suspect: Suspect, current: float | str, load: ObservedLoad) -> NamedSuspect | None:
    """A prefill batch starts no more requests than this."""
    if not isinstance(current, float) or "held_back" not in load.seen:
        return None
    gain = f"at most {current:g} {'requests start' if current > 1 else 'request starts'} together"
    return NamedSuspect(suspect, current, None, gain, _WAITING_ROWS, "instead")


def decode_interval(suspect: Suspect, current: float | str, load: ObservedLoad) -> NamedSuspect | None:
    """After long prompts the decode steps that the objective needs are not suspicious."""
    if not isinstance(current, float) or "held_back" not in load.seen:
        return None
    if (mean_prompt(load.past) or 0.0) >= LONG_PREFILL and current <= decode_steps_per_chunk(load.past.profile):
        return None
    gain = f"after each prefill batch no request starts for {current:g} decode steps"
    return NamedSuspect(suspect, current, 0.0, gain, _WAITING_ROWS, "instead")


def reserve(suspect: Suspect, current: float | str, load: ObservedLoad) -> NamedSuspect | None:
    """A smaller reserve is advised only without retractions."""
    return None if load.past.retractions else NamedSuspect(suspect, current, suspect.suggested)


def padding(suspect: Suspect, current: float | str, load: ObservedLoad) -> NamedSuspect | None:
    """Without padding most batches have no CUDA graph of their size."""
    if "eager" not in load.seen:
        return None
    return NamedSuspect(suspect, current, 0.0, "", frozenset({"cuda_graph_off"}), "instead")


def queue_limit(suspect: Suspect, current: float | str, load: ObservedLoad) -> NamedSuspect | None:
    """Only bursts are rejected."""
    # While the running limit holds requests back, raising that limit helps more.
    if not isinstance(current, float) or {"rejected"} != load.seen - {"tokens", "first_tokens"}:
        return None
    # Nothing else keeps requests waiting, so only bursts are rejected.
    return NamedSuspect(suspect, current, 4 * max(current, 1.0), "", frozenset({"requests_rejected"}), "instead")


def watchdog(suspect: Suspect, current: float | str, load: ObservedLoad) -> NamedSuspect | None:
    """The watchdog ended the server."""
    if "hang" not in load.seen:
        return None
    return NamedSuspect(
        suspect, current, default_value(suspect, load.past.facts.release or ""), "", frozenset({"scheduler_stuck"})
    )


def speculation(suspect: Suspect, current: float | str, load: ObservedLoad) -> NamedSuspect | None:
    """No row of its own: only a suspect in large batches."""
    running = load.past.recent.mean("running")
    return NamedSuspect(suspect, current, None) if running is not None and running >= LARGE_BATCH else None


def warmup(suspect: Suspect, current: float | str, load: ObservedLoad) -> NamedSuspect | None:
    """No row of its own: only the first requests after a start are slow."""
    return NamedSuspect(suspect, current, 0.0) if load.past.starts else None
