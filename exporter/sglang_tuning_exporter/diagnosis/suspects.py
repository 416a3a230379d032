"""Suspects: flags that the operator set away from SGLang's defaults, and what they can explain. Pure.

A flag is a suspect if its value is on the side of the default that `suspect_flags` names. If figures show that it
explains a finding, it is that finding's first advice. If nothing explains the trouble, suspects are named as a
chance.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf

from sglang_tuning_exporter.diagnosis.command import typed_args
from sglang_tuning_exporter.diagnosis.evidence import WATCHDOG, Evidence, Past
from sglang_tuning_exporter.diagnosis.suspect_flags import SUSPECTS
from sglang_tuning_exporter.diagnosis.suspect_proofs import NamedSuspect, Suspect, TypedFlag, admission_share
from sglang_tuning_exporter.sglang.args.values import number
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.latency import Latency
from sglang_tuning_exporter.state.profiles import Trouble
from sglang_tuning_exporter.state.signals import AT_LIMIT_SHARE

MOST_NAMED = 3
OFTEN = 0.25  # of the serving time; less than for a finding

_ADMISSION: dict[Trouble, tuple[str, ...]] = {
    "pool": ("pool_full",),
    "prefill": ("prefill_bound",),
    "held_back": ("held_back", "recovering"),
    "limit": ("running_limit",),
}
# A latency is bad if this many times its error budget is missed.
LATE_TIMES = 10.0


def suspects_explaining(row: str, past: Past) -> list[NamedSuspect]:
    """Return the suspects that explain a row by its figures, most likely first."""
    return _only_decisive([named for named in suspects(past, troubles(past)) if row in named.rows])


def replaces_advice(row: str, past: Past) -> bool:
    """Return whether a suspect explains the row so well that its flag is advised instead of the row's own."""
    return any(named.place == "instead" for named in suspects_explaining(row, past))


def likely_suspects(past: Past) -> list[NamedSuspect]:
    """Return the suspects that can cause the trouble seen, most likely first; empty without trouble."""
    seen = troubles(past)
    if _is_healthy(past, seen):
        return []
    named = [each for each in suspects(past, seen) if each.rows or not seen.isdisjoint(each.suspect.troubles)]
    return _only_decisive(sorted(named, key=lambda each: not each.rows))[:MOST_NAMED]


def _only_decisive(named: list[NamedSuspect]) -> list[NamedSuspect]:
    """Leave out suspects that have no effect while another one is set."""
    first = [each for each in named if each.rows and each.place == "instead"]
    return first or named


@lru_cache(maxsize=2)  # every row of a judgement asks
def suspects(past: Past, seen: frozenset[Trouble]) -> tuple[NamedSuspect, ...]:
    """Return every flag that was typed with a suspicious value; `seen` is the trouble."""
    facts = past.facts
    typed = typed_args(facts)
    if typed is None or facts.release is None:
        return ()
    found = []
    for suspect in SUSPECTS:
        value = typed.get(suspect.arg)
        if not isinstance(value, (int, float, str)) or not suspect.is_suspicious(value):
            continue
        if _is_forced(suspect, facts) or facts.flag(suspect.arg) is None:
            continue
        current = value if isinstance(value, str) else number(value)
        if current is None:  # an integer of hundreds of digits
            continue
        flag = TypedFlag(suspect, current, past, seen, typed)
        proven = None if suspect.proof is None else suspect.proof(flag)
        if proven is not None:
            found.append(proven)
        elif not suspect.only_proven:
            found.append(NamedSuspect(suspect, current, flag.default))
    return tuple(found)


@lru_cache(maxsize=2)  # likewise
def troubles(past: Past) -> frozenset[Trouble]:
    """Return what is wrong with the load."""
    hangs: frozenset[Trouble] = frozenset({"hang"} if past.event_counts.get(WATCHDOG) else ())
    if not past.has_enough_load:
        return hangs
    profile, bound = past.profile, min(OFTEN, past.profile.frequent_share)
    because = {trouble for trouble, states in _ADMISSION.items() if admission_share(past, *states) > bound}
    first_tokens, tokens = late_share("time_to_first_token", past, 1.0), late_share("inter_token", past, 1.0)
    beside_room = waits_beside_room(past)
    signs: dict[Trouble, bool] = {
        "first_tokens": first_tokens is not None and first_tokens.holds,
        "tokens": tokens is not None and tokens.holds,
        "held_back": beside_room,
        "waiting": not because and not beside_room and _unhealthy_queue(past) > bound,
        "eager": (past.recent.share("cuda_graph", "eager") or 0.0) > bound,
        "retracting": past.retractions_per_minute > profile.retractions_tolerated,
        "rejected": past.per_minute(past.recent.counts["rejected_requests"]) > profile.rejections_per_minute,
    }
    return hangs | because | {trouble for trouble, is_seen in signs.items() if is_seen}


def waits_beside_room(past: Past) -> bool:
    """Return whether requests wait although more could run, where a flag limits how fast they start.

    Their reason is not known at a moment (`ServerFacts.waits_by`), so means of the window decide.
    """
    running, usage = past.recent.mean("running"), past.recent.mean("usage")
    if not past.facts.starts_slowly or running is None or usage is None or usage >= past.profile.token_usage_target:
        return False
    limits = [limit for dp in past.by_rank or (None,) if (limit := past.facts.running_limit(dp)) is not None]
    waited = 1.0 - (past.recent.share("queue", "empty") or 0.0)
    is_known = past.recent.serving_seconds("queue") > 0
    return is_known and waited > past.profile.frequent_share and running < AT_LIMIT_SHARE * min(limits, default=inf)


def _is_healthy(past: Past, seen: frozenset[Trouble]) -> bool:
    """Return whether nothing is wrong: a full KV cache with a healthy queue is normal under load."""
    return not seen or (seen == {"pool"} and _unhealthy_queue(past) <= past.profile.frequent_share)


def _unhealthy_queue(past: Past) -> float:
    """Return the share of the time with a queue that is not healthy."""
    if not past.recent.serving_seconds("queue"):
        return 0.0
    return 1.0 - (past.recent.share_of("queue", past.healthy_queue_states) or 0.0)


def suspects_evidence(past: Past) -> Evidence | None:
    """Count the suspects for the trouble seen; None without trouble."""
    if _is_healthy(past, troubles(past)):
        return None
    return Evidence("flags that differ from SGLang's defaults", float(len(likely_suspects(past))), 0.0, "count")


def late_share(latency: Latency, past: Past, budgets: float = LATE_TIMES) -> Evidence | None:
    """Return the share of late observations against `budgets` error budgets; None if not known."""
    recent, profile = past.latency.get(latency), past.profile
    if recent is None or recent.breach_share is None or recent.observations < profile.enough_observations:
        return None
    name = f"share of {latency.replace('_', ' ')} observations above the objective"
    return Evidence(name, recent.breach_share, profile.late_bound(budgets), "share")


def _is_forced(suspect: Suspect, facts: ServerFacts) -> bool:
    """Return whether SGLang sets this by itself, so that removing the flag has no effect."""
    if suspect.gpu_only and facts.is_cpu:
        return True
    for arg, values in suspect.forced_by:
        value = facts.args.get(arg)
        if (value in values) if values else bool(value):
            return True
    return any((facts.arg(arg) or 1.0) <= 1 for arg in suspect.only_with)
