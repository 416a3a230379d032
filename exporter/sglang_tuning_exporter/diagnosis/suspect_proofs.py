"""Tests whether figures of a server show that a flag, set away from its default, explains the trouble. Pure.

Thresholds: docs/decisions.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal, TypeAlias

from sglang_tuning_exporter.diagnosis.demand import USED_LITTLE, demand, held_tokens, mean_prompt
from sglang_tuning_exporter.diagnosis.evidence import Past
from sglang_tuning_exporter.diagnosis.interruption import (
    LONG_PREFILL,
    MOST_OF_THE_TIME,
    chunks_of_a_prompt,
    decode_steps_per_chunk,
    pause_share,
)
from sglang_tuning_exporter.diagnosis.sizing.memory import IN_FORCE
from sglang_tuning_exporter.diagnosis.sizing.prefill import LEAST_USEFUL_CHUNK
from sglang_tuning_exporter.sglang.args.flags import flag_of
from sglang_tuning_exporter.sglang.args.values import attention_ranks, number
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
_PROMPT_ROWS = _WAITING_ROWS | {"prefill_bound", "latency_long_prompts"}
_PREFILL_ROWS = _PROMPT_ROWS | {"admission_too_conservative"}
_LARGE_BATCH = frozenset({"latency_batch_too_large"})  # running requests pause while a prompt is computed


Side: TypeAlias = Callable[[object], bool]


def is_on(value: object) -> bool:
    """Return whether a switch is set."""
    return value is True


def above(bound: float) -> Side:
    """Return the side of numbers above this."""
    return between(bound, inf)


def between(least: float, most: float) -> Side:
    """Return the side of numbers between these."""
    return lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and least < value < most


def among(*words: str) -> Side:
    """Return the side of these words."""
    return lambda value: value in words if isinstance(value, str) else False


def other_than(*words: str) -> Side:
    """Return the side of all words but these."""
    return lambda value: value not in words if isinstance(value, str) else False


# What figures of a server show of a suspect.
Proof: TypeAlias = Callable[["TypedFlag"], "NamedSuspect | None"]


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
    source: str
    proof: Proof | None = None
    cost: str = ""  # empty where the change costs nothing
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
class TypedFlag:
    """A suspect that was typed with `value`, and what its proof looks at: the past, the trouble in it, all typed arguments."""

    suspect: Suspect
    value: float | str
    past: Past
    seen: frozenset[Trouble]
    typed: Mapping[str, object]

    @property
    def number(self) -> float:
        """The value of a flag that is suspicious by its number."""
        assert isinstance(self.value, float)
        return self.value

    @property
    def default(self) -> float | str | None:
        """The value to set, else that of the flag if it is not set; None if that is no value to type."""
        if self.suspect.is_switch:
            return 0.0
        if self.suspect.suggested is not None:
            return self.suspect.suggested
        flag = flag_of(self.suspect.arg, self.past.facts.release or "")
        default = flag.default if flag is not None else None
        return default if isinstance(default, str) else None if isinstance(default, bool) else number(default)

    def explains(
        self, rows: Collection[str], suggested: float | str | None, gain: str = "", place: Place = "instead"
    ) -> NamedSuspect:
        """Return the suspect as the cause of these rows."""
        return NamedSuspect(self.suspect, self.value, suggested, gain, frozenset(rows), place)


def on_trouble(trouble: Trouble, row: str, place: Place) -> Proof:
    """Return the proof of a suspect that explains a row wherever this trouble is seen."""
    return lambda flag: flag.explains({row}, flag.default, place=place) if trouble in flag.seen else None


def only_if(holds: Callable[[Past], bool]) -> Proof:
    """Return the proof of a suspect that explains no row, and is a suspect only if this holds."""
    return lambda flag: flag.explains((), flag.default) if holds(flag.past) else None


def admission_share(past: Past, *states: str) -> float:
    """Return the share of the serving time in these states of admission."""
    return past.recent.share_of("admission", states) or 0.0


def radix_cache(flag: TypedFlag) -> NamedSuspect | None:
    """Without the radix cache each request computes and holds its whole prompt, shared or not."""
    prompt, tokens_held, seen = mean_prompt(flag.past), held_tokens(flag.past, flag.past.recent.mean), flag.seen
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
        rows |= _PROMPT_ROWS
        gain = gain or (f"a mean prompt has {prompt:,.0f} tokens, all computed" if prompt is not None else "")
    return flag.explains(rows, 0.0, gain, "before") if rows else None


def prefill_limit(flag: TypedFlag) -> NamedSuspect | None:
    """A prefill batch ends at this many tokens, so it is the limit beside a larger chunk."""
    chunk, default, seen = flag.typed.get("chunked_prefill_size"), flag.default, flag.seen
    if not isinstance(default, float):
        return None
    wanted = float(chunk) if isinstance(chunk, (int, float)) and chunk > 0 else default
    prompt = mean_prompt(flag.past)
    # If many prompts fit into a batch, this limit is not the cause.
    fit = flag.number / (LEAST_USEFUL_CHUNK if prompt is None else max(prompt, 1.0))
    late = not {"tokens", "first_tokens"}.isdisjoint(seen) and fit <= FEW_PROMPTS
    held_back = "held_back" in seen and fit <= FEW_PROMPTS / 2
    if flag.number >= wanted or not ("prefill" in seen or late or held_back):
        return None
    gain = f"a prefill batch ends at {flag.number:,.0f} tokens, a chunk has {wanted:,.0f}"
    return flag.explains(_PREFILL_ROWS | _LARGE_BATCH, max(wanted, default), gain)


def small_chunk(flag: TypedFlag) -> NamedSuspect | None:
    """A prompt takes several passes through the model, one for each small chunk."""
    ranks, prompt, reserve = attention_ranks(flag.typed), mean_prompt(flag.past), flag.past.facts.reserve_gb
    if reserve is not None and reserve < flag.past.profile.reserve_lower_gb:
        return None
    chunk = flag.number / ranks
    is_tiny = chunk < TINY_CHUNK
    late = {"prefill", "first_tokens", "tokens"} if is_tiny else {"prefill", "first_tokens"}
    if chunk >= LEAST_USEFUL_CHUNK or late.isdisjoint(flag.seen):
        return None
    taken = chunks_of_a_prompt(flag.past, chunk)
    if taken is None and prompt is not None:
        taken = ceil(prompt / chunk)
    if taken == 1:
        return None
    gain = f"a mean prompt takes {taken} chunks" if taken is not None else ""
    # A larger chunk takes no longer than a tiny one, so decode steps between more of them only delay the prompts.
    rows = _PROMPT_ROWS | _LARGE_BATCH | ({"latency_prefill_between"} if is_tiny else frozenset())
    return flag.explains(rows, float(LEAST_USEFUL_CHUNK) * ranks, gain)


def no_chunks(flag: TypedFlag) -> NamedSuspect | None:
    """Without chunks every running request waits for a long prompt to be computed in one piece."""
    prompt = mean_prompt(flag.past)
    if prompt is None or prompt < LONG_PROMPT or flag.seen.isdisjoint({"tokens", "prefill", "first_tokens"}):
        return None
    gain = f"running requests pause for whole prompts, {prompt:,.0f} tokens on average"
    return flag.explains(_PROMPT_ROWS | _LARGE_BATCH, USUAL_CHUNK * attention_ranks(flag.typed), gain, "before")


def empty_page_share(page: float, request: float) -> float:
    """Return the share of its pages that a request of so many tokens leaves empty, 0-1."""
    return 1.0 - request / (ceil(request / page) * page) if request > 0 else 0.0


def pages(flag: TypedFlag) -> NamedSuspect | None:
    """Requests leave much of their last pages empty."""
    page, request = flag.number, _request_tokens(flag.past)
    wants_room = not _NEED_KV_CACHE.isdisjoint(flag.seen)
    # At the running limit a smaller page helps only after the limit was raised.
    if request is None or not (wants_room or "limit" in flag.seen):
        return None
    # Lengths differ: the last page of a request is half empty on average.
    wasted = max(empty_page_share(page, request), page / 2 / (request + page / 2))
    if wasted < EMPTY_PAGE_SHARE:
        return None
    most = EMPTY_PAGE_SHARE_ALLOWED
    smaller = next((size for size in PAGE_SIZES if size < page and size / 2 / (request + size / 2) <= most), 1)
    gain = (
        f"about {100 * wasted:.0f} % of the KV cache is empty space in pages: a request has some {request:,.0f} tokens"
    )
    rows = _POOL_ROWS | {"admission_too_conservative", "retracting_too_often"} if wants_room else ()
    return flag.explains(rows, float(smaller), gain)


def _request_tokens(past: Past) -> float | None:
    """Return the mean tokens of a running request: its prompt, and half of its answer if known."""
    prompt, ended = mean_prompt(past), past.finished_requests
    answers = past.recent.counts.get("finished_answer_tokens")
    answer = answers / ended if answers and ended else 0.0
    return prompt + answer / 2 if prompt is not None else None


def pool_cap(flag: TypedFlag) -> NamedSuspect | None:
    """The KV cache is as large as the flag allows, and is full or reserved."""
    seen, facts = flag.seen, flag.past.facts
    pool = max(facts.kv_pool_tokens.values(), default=None)
    is_full = "pool" in seen or ("held_back" in seen and _will_use_reservation(flag.past))
    # Some requests wait while others are retracted, and the flag is as high as it helps.
    both = "retracting" in seen and not seen.isdisjoint({"held_back", "waiting"})
    is_full = is_full or (both and (facts.conservativeness or 0.0) > NEARLY_MOST_CONSERVATIVE)
    if pool is None or pool < IN_FORCE * flag.number or not is_full:
        return None
    return flag.explains(_POOL_ROWS, 2 * flag.number, CAPPED, "before")


def _will_use_reservation(past: Past) -> bool:
    """Return whether running requests will use what is reserved for them, and the flag is at most 1.3.

    Halfway through their answers, requests that will fill the KV cache hold at least half of it.
    """
    kept, asking, usage = past.facts.conservativeness, demand(past), past.mean_while_held_back("usage")
    if kept is None or kept > MOST_CONSERVATIVE or asking is None or usage is None:
        return False
    return usage >= LEAST_HELD and asking.share > USED_LITTLE


def adapters(flag: TypedFlag) -> NamedSuspect | None:
    """Requests of an adapter without a slot wait, whatever is free."""
    paths = flag.typed.get("lora_paths")
    adapters = len(paths) if isinstance(paths, (list, dict)) else 0
    if adapters + 1 <= flag.number or flag.seen.isdisjoint({"held_back", "waiting"}):
        return None
    gain = f"{adapters} adapters share {flag.number:g} slots"
    return flag.explains(_WAITING_ROWS | {"admission_too_conservative"}, float(adapters + 1), gain)


def prefill_requests(flag: TypedFlag) -> NamedSuspect | None:
    """A prefill batch starts no more requests than this."""
    gain = f"at most {flag.number:g} {'requests start' if flag.number > 1 else 'request starts'} together"
    return flag.explains(_WAITING_ROWS, None, gain) if "held_back" in flag.seen else None


def decode_interval(flag: TypedFlag) -> NamedSuspect | None:
    """After long prompts the decode steps that the objective needs are not suspicious.

    Where prefill takes little of the time, full prefill batches are too few, and larger ones start hardly more requests.
    """
    past = flag.past
    needed = decode_steps_per_chunk(past.profile) if (mean_prompt(past) or 0.0) >= LONG_PREFILL else 0.0
    if "held_back" not in flag.seen or flag.number <= needed:
        return None
    paused = pause_share(past)
    rows = _WAITING_ROWS if (paused or 0.0) > MOST_OF_THE_TIME else _WAITING_ROWS | {"prefill_bound"}
    gain = f"after each prefill batch no request starts for {flag.number:g} decode steps"
    return flag.explains(rows, needed, gain)


def queue_limit(flag: TypedFlag) -> NamedSuspect | None:
    """Only bursts are rejected: nothing else keeps requests waiting."""
    # While the running limit holds requests back, raising that limit helps more.
    only_bursts = flag.seen - {"tokens", "first_tokens"} == {"rejected"}
    return flag.explains({"requests_rejected"}, 4 * max(flag.number, 1.0)) if only_bursts else None


def in_large_batches(past: Past) -> bool:
    """Return whether decode batches are large."""
    return (past.recent.mean("running") or 0.0) >= LARGE_BATCH
