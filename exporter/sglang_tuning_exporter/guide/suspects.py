"""Flags that the operator set away from SGLang's defaults, and what they can explain. Pure.

A flag is a suspect where its value lies away from the default on the side that `suspect_flags` names. Where figures of this
server show that it explains a finding, it is that finding's first advice. Where nothing explains the trouble, the suspects
are named as a chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Literal, TypeAlias

from sglang_tuning_exporter.guide.command import typed_args
from sglang_tuning_exporter.guide.demand import mean_prompt
from sglang_tuning_exporter.guide.evidence import WATCHDOG, Evidence, Past
from sglang_tuning_exporter.guide.suspect_flags import SUSPECTS
from sglang_tuning_exporter.sglang.flags import flag_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sglang_tuning_exporter.guide.suspect import Suspect, Trouble
    from sglang_tuning_exporter.latency import Latency
    from sglang_tuning_exporter.server import ServerFacts

MOST_NAMED = 3
BUDGETS_LATE = 10.0  # times the error budget: as the latency rows
# Reasons for these: docs/decisions.md, "Suspects".
PROMPTS_HELD = 0.25
SHORT_PROMPT = 64.0
SMALL_CHUNK = 1024.0
USUAL_CHUNK = 4096.0
LONG_PROMPT = 2048.0
AIR = 0.25
PAGE_SIZES = (64, 32, 16, 1)
AIR_ALLOWED = 0.1
LARGE_BATCH = 32.0
SHORT_WATCHDOG = 60.0

Place: TypeAlias = Literal["instead", "before"]

_WAITING_ROWS = frozenset({"queue_too_long", "latency_queue"})
_POOL_ROWS = _WAITING_ROWS | {"running_far_below_limit", "conservativeness_ineffective"}
_PREFILL_ROWS = _WAITING_ROWS | {"prefill_bound", "admission_too_conservative", "latency_long_prompts"}


@dataclass(frozen=True, slots=True)
class Named:
    """A suspect of this server with what to set it to; `suggested` None where dropping the flag is all there is to do.

    `rows` are the diagnoses that figures show it to explain, empty where nothing shows it; `place` is where it stands beside their
    own advice; `gain` has the figures.
    """

    suspect: Suspect
    current: float | str
    suggested: float | str | None
    gain: str = ""
    rows: frozenset[str] = frozenset()
    place: Place = "before"

    @property
    def words(self) -> str:
        """What to do where there is no value to type."""
        return "start without it" if self.suspect.is_switch or self.suggested is None else ""


def explaining(row: str, past: Past) -> list[Named]:
    """Give the suspects that figures show to explain a row, most likely first."""
    return [named for named in suspects(past) if row in named.rows]


def unexplained(past: Past) -> list[Named]:
    """Give the suspects that can cause the trouble there is, most likely first; empty without trouble."""
    seen = troubles(past)
    if seen <= {"pool"}:
        return []  # a full KV cache with a queue in its range is a healthy server's
    named = [each for each in suspects(past) if not seen.isdisjoint(each.suspect.troubles)]
    return sorted(named, key=lambda each: not each.rows)[:MOST_NAMED]


def suspects(past: Past) -> list[Named]:
    """Give every flag that was typed and lies away from its default on the suspicious side."""
    facts = past.facts
    typed = typed_args(facts)
    if typed is None or facts.release is None:
        return []
    found = []
    for suspect in SUSPECTS:
        value = typed.get(suspect.arg)
        if not isinstance(value, (int, float, str)) or not suspect.suits(value):
            continue
        if _is_forced(suspect, facts) or facts.flag(suspect.arg) is None:
            continue
        current = value if isinstance(value, str) else float(value)
        if suspect.proof in _PROOFS:
            proven = _PROOFS[suspect.proof](suspect, current, past, typed)
            if proven is not None:
                found.append(proven)
                continue
        if not suspect.only_proven:
            found.append(Named(suspect, current, _usual(suspect, facts.release)))
    return found


def troubles(past: Past) -> frozenset[Trouble]:
    """Name what can be seen of a load that is not served well: nothing of it is a fault by itself."""
    seen: set[Trouble] = {"hang"} if past.marks.get(WATCHDOG) else set()
    if not past.enough:
        return frozenset(seen)
    profile, recent = past.profile, past.recent
    shares: tuple[tuple[Trouble, float], ...] = (
        ("pool", _share(past, "pool_full")),
        ("prefill", _share(past, "prefill_bound")),
        ("held", _share(past, "held_back", "recovering")),
        ("limit", _share(past, "running_limit")),
        ("waiting", _unhealthy_queue(past)),
        ("eager", recent.share("cuda_graph", "eager") or 0.0),
    )
    seen |= {trouble for trouble, share in shares if share > profile.frequent_share}
    if past.retractions_per_minute > profile.retractions_tolerated:
        seen.add("retracting")
    if past.per_minute(recent.counts["rejected_requests"]) > profile.rejections_per_minute:
        seen.add("rejected")
    late: tuple[tuple[Trouble, Latency], ...] = (("first_tokens", "time_to_first_token"), ("tokens", "inter_token"))
    for trouble, latency in late:
        share = late_share(latency, past)
        if share is not None and share.holds:
            seen.add(trouble)
    return frozenset(seen)


def _unhealthy_queue(past: Past) -> float:
    """Give the share of the time with a queue that the verdict does not call healthy."""
    good = ("empty",) if past.profile.queue_lower is None else ("empty", "in_range")
    if not past.recent.serving_seconds("queue"):
        return 0.0
    return 1.0 - sum(past.recent.share("queue", state) or 0.0 for state in good)


def how_many(past: Past) -> Evidence | None:
    """Count the suspects for the trouble there is; None without trouble."""
    if troubles(past) <= {"pool"}:
        return None
    return Evidence("flags away from SGLang's defaults", float(len(unexplained(past))), 0.0, "count")


def late_share(latency: Latency, past: Past) -> Evidence | None:
    """Give the share of a latency's observations beyond the objective, against what the latency rows allow; None where it is not known."""
    recent, profile = past.latency.get(latency), past.profile
    if recent is None or recent.breach_share is None or recent.observations < profile.enough_observations:
        return None
    bound = min(BUDGETS_LATE * (1 - profile.latency_objective), profile.frequent_share)
    return Evidence(f"share of {latency.replace('_', ' ')} above the objective", recent.breach_share, bound, "share")


def _is_forced(suspect: Suspect, facts: ServerFacts) -> bool:
    """Say whether the server sets this by itself, so that dropping the flag changes nothing."""
    if suspect.gpu_only and facts.is_cpu:
        return True
    for arg, values in suspect.forced_by:
        value = facts.args.get(arg)
        if (value in values) if values else bool(value):
            return True
    return any((facts.arg(arg) or 1.0) <= 1 for arg in suspect.only_with)


def _usual(suspect: Suspect, release: str) -> float | str | None:
    if suspect.is_switch:
        return 0.0
    if suspect.suggested is not None:
        return suspect.suggested
    flag = flag_of(suspect.arg, release)
    default = flag.default if flag is not None else None
    if isinstance(default, (int, float)) and not isinstance(default, bool):
        return float(default)
    return default if isinstance(default, str) else None


def _share(past: Past, *states: str) -> float:
    return sum(past.recent.share("admission", state) or 0.0 for state in states)


def _held_tokens(past: Past) -> float | None:
    """Give the tokens of the pool that one running request takes; None where that is not known."""
    running, usage = past.recent.mean("running"), past.recent.mean("usage")
    pools = past.facts.kv_pool_tokens.values()
    if not running or not usage or not pools:
        return None
    return usage * (sum(pools) / len(pools)) / running


def _radix_cache(suspect: Suspect, current: float | str, past: Past, typed: Mapping[str, object]) -> Named | None:
    """Without the radix cache each request holds and computes its whole prompt, also what others share."""
    del typed
    prompt, held, seen = mean_prompt(past), _held_tokens(past), troubles(past)
    if prompt is not None and prompt < SHORT_PROMPT:
        return None
    rows: frozenset[str] = frozenset()
    gain = ""
    share = prompt / held if prompt is not None and held else None
    if "pool" in seen and (share is None or share >= PROMPTS_HELD):
        rows |= _POOL_ROWS
        if share is not None:
            gain = f"prompts take about {100 * min(share, 1.0):.0f} % of the KV cache, each request its own copy"
    if "prefill" in seen or ("first_tokens" in seen and (prompt or 0.0) >= LONG_PROMPT):
        rows |= _PREFILL_ROWS - {"admission_too_conservative"}
        gain = gain or (f"a mean prompt has {prompt:,.0f} tokens, all computed" if prompt is not None else "")
    return Named(suspect, current, 0.0, gain, rows) if rows else None


def _prefill_limit(suspect: Suspect, current: float | str, past: Past, typed: Mapping[str, object]) -> Named | None:
    """A prefill batch ends at this many tokens, so beside a larger chunk it is the limit."""
    chunk = typed.get("chunked_prefill_size")
    usual = _usual(suspect, past.facts.release or "")
    if not isinstance(current, float) or not isinstance(usual, float):
        return None
    wanted = float(chunk) if isinstance(chunk, (int, float)) and chunk > 0 else usual
    prompt = mean_prompt(past)
    if current >= wanted or _share(past, "prefill_bound", "held_back") <= past.profile.frequent_share:
        return None
    if _share(past, "prefill_bound") <= past.profile.frequent_share and current > 2 * (prompt or SMALL_CHUNK):
        return None  # several prompts fit each batch: something else holds requests back
    gain = f"a prefill batch ends at {current:,.0f} tokens, a chunk has {wanted:,.0f}"
    return Named(suspect, current, max(wanted, usual), gain, _PREFILL_ROWS, "instead")


def _small_chunk(suspect: Suspect, current: float | str, past: Past, typed: Mapping[str, object]) -> Named | None:
    ranks = _ranks(typed)
    prompt, reserve = mean_prompt(past), past.facts.reserve_gb
    if not isinstance(current, float) or (reserve is not None and reserve < past.profile.reserve_lower_gb):
        return None
    chunk, seen = current / ranks, troubles(past)
    if chunk >= SMALL_CHUNK or not ({"prefill", "first_tokens"} & seen):
        return None
    if prompt is not None and prompt <= chunk:
        return None
    gain = f"a mean prompt takes {ceil(prompt / chunk)} chunks" if prompt is not None else ""
    rows = _PREFILL_ROWS - {"admission_too_conservative"}
    return Named(suspect, current, SMALL_CHUNK * ranks, gain, rows, "instead")


def _no_chunks(suspect: Suspect, current: float | str, past: Past, typed: Mapping[str, object]) -> Named | None:
    """Without chunks a long prompt is computed in one piece, and every running request waits for it."""
    prompt, seen = mean_prompt(past), troubles(past)
    if prompt is None or prompt < LONG_PROMPT or not ({"tokens", "prefill", "first_tokens"} & seen):
        return None
    gain = f"running requests pause for whole prompts, {prompt:,.0f} tokens on average"
    rows = _PREFILL_ROWS - {"admission_too_conservative"} | {"latency_batch_too_large"}
    return Named(suspect, current, USUAL_CHUNK * _ranks(typed), gain, rows)


def _ranks(typed: Mapping[str, object]) -> float:
    """Give the ranks of attention data parallelism, over which SGLang divides the chunk."""
    for arg in ("attn_dp_size", "dp_size" if typed.get("enable_dp_attention") else ""):
        ranks = typed.get(arg)
        if isinstance(ranks, int) and ranks > 1:
            return float(ranks)
    return 1.0


def air(page: float, request: float) -> float:
    """Give the share of its pages that a request of so many tokens leaves empty, 0-1."""
    return 1.0 - request / (ceil(request / page) * page) if request > 0 else 0.0


def _pages(suspect: Suspect, current: float | str, past: Past, typed: Mapping[str, object]) -> Named | None:
    del typed
    request = _request_tokens(past)
    if not isinstance(current, float) or request is None or not ({"pool", "held", "retracting"} & troubles(past)):
        return None
    # Requests differ in length: the last page of each is half empty on average, and never less than half of one page.
    wasted = max(air(current, request), current / 2 / (request + current / 2))
    if wasted < AIR:
        return None
    smaller = [size for size in PAGE_SIZES if size < current and size / 2 / (request + size / 2) <= AIR_ALLOWED]
    gain = (
        f"about {100 * wasted:.0f} % of the KV cache is empty space in pages: a request has some {request:,.0f} tokens"
    )
    rows = _POOL_ROWS | {"admission_too_conservative", "retracting_too_often"}
    return Named(suspect, current, float(smaller[0] if smaller else 1), gain, rows, "instead")


def _request_tokens(past: Past) -> float | None:
    """Give the tokens that a running request has on average: its prompt, and half of its answer where that is known."""
    prompt = mean_prompt(past)
    answers, ended = past.recent.counts.get("finished_answer_tokens"), past.recent.counts.get("finished_requests")
    answer = answers / ended if answers and ended else 0.0
    return prompt + answer / 2 if prompt is not None else None


def _adapters(suspect: Suspect, current: float | str, past: Past, typed: Mapping[str, object]) -> Named | None:
    """Requests of an adapter that has no slot wait, whatever room there is."""
    paths = typed.get("lora_paths")
    adapters = len(paths) if isinstance(paths, (list, dict)) else 0
    if not isinstance(current, float) or adapters + 1 <= current or not ({"held", "waiting"} & troubles(past)):
        return None
    rows = _WAITING_ROWS | {"admission_too_conservative"}
    gain = f"{adapters} adapters share {current:g} slots"
    return Named(suspect, current, float(adapters + 1), gain, rows, "instead")


def _prefill_requests(suspect: Suspect, current: float | str, past: Past, typed: Mapping[str, object]) -> Named | None:
    del typed
    if not isinstance(current, float) or "held" not in troubles(past):
        return None
    gain = f"at most {current:g} requests start together"
    return Named(suspect, current, None, gain, _WAITING_ROWS | {"admission_too_conservative"}, "instead")


def _padding(suspect: Suspect, current: float | str, past: Past, typed: Mapping[str, object]) -> Named | None:
    del typed
    if "eager" not in troubles(past):
        return None
    return Named(suspect, current, 0.0, "", frozenset({"cuda_graph_off"}), "instead")


def _queue_limit(suspect: Suspect, current: float | str, past: Past, typed: Mapping[str, object]) -> Named | None:
    del typed
    # While the running limit holds requests back, raising that one is what lets more be answered.
    if not isinstance(current, float) or {"rejected"} != troubles(past) - {"tokens", "first_tokens"}:
        return None
    return Named(suspect, current, 4 * max(current, 1.0), "", frozenset({"requests_rejected"}))


def _watchdog(suspect: Suspect, current: float | str, past: Past, typed: Mapping[str, object]) -> Named | None:
    del typed
    if "hang" not in troubles(past):
        return None
    return Named(suspect, current, _usual(suspect, past.facts.release or ""), "", frozenset({"scheduler_stuck"}))


def _speculation(suspect: Suspect, current: float | str, past: Past, typed: Mapping[str, object]) -> Named | None:
    """No row of its own: only a large batch makes it a suspect."""
    del typed
    running = past.recent.mean("running")
    return Named(suspect, current, None) if running is not None and running >= LARGE_BATCH else None


def _warmup(suspect: Suspect, current: float | str, past: Past, typed: Mapping[str, object]) -> Named | None:
    """No row of its own: only the first requests after a start are slow for want of it."""
    del typed
    return Named(suspect, current, 0.0) if past.starts else None


_PROOFS: dict[str, Callable[[Suspect, float | str, Past, Mapping[str, object]], Named | None]] = {
    "radix_cache": _radix_cache,
    "prefill_limit": _prefill_limit,
    "small_chunk": _small_chunk,
    "no_chunks": _no_chunks,
    "pages": _pages,
    "adapters": _adapters,
    "prefill_requests": _prefill_requests,
    "padding": _padding,
    "queue_limit": _queue_limit,
    "watchdog": _watchdog,
    "speculation": _speculation,
    "warmup": _warmup,
}
