"""Each kind of condition measured over a past: the figure that decides it, against its threshold. Pure."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from sglang_tuning_exporter.guide.diagnosis import (
    BurnRate,
    Condition,
    Failures,
    GraphMemory,
    Rejections,
    Reserve,
    RetractionRate,
    Share,
    Slow,
    Source,
    Spread,
    Starts,
    Stuck,
    Suits,
)
from sglang_tuning_exporter.guide.evidence import (
    AFTERLIFE_SECONDS,
    LOOP_SECONDS,
    RESERVE,
    WATCHDOG,
    Evidence,
    Past,
)
from sglang_tuning_exporter.guide.suitability import beside, suits
from sglang_tuning_exporter.sglang.events import ENDS
from sglang_tuning_exporter.state import ABORTED, REJECTION, RETRACTION, START, WORK

if TYPE_CHECKING:
    from collections.abc import Hashable

    from sglang_tuning_exporter.guide.profiles import Profile

# The admission ratio starts at min(0.7 x conservativeness, 1): above 1 / 0.7 the flag changes nothing (srt/managers/scheduler.py, since 0.3.6).
CONSERVATIVENESS_CEILING = 1.43


def measure(condition: Condition, past: Past) -> Evidence | None:  # noqa: C901, PLR0911, PLR0912 - one case for each kind
    """Give the figure that decides a condition, or None where it is not told or too little was seen."""
    profile = past.profile
    if isinstance(condition, Share):
        return _share(condition, past)
    if isinstance(condition, RetractionRate):
        return _retractions(condition, past)
    if isinstance(condition, Rejections):
        return _rejections(condition, past)
    if isinstance(condition, Reserve):
        return _reserve(condition, past)
    if isinstance(condition, GraphMemory):
        failed = past.marks.get("graph_capture", 0)
        reserve = past.facts.reserve_gb
        if failed or reserve is None or past.facts.without_graph:
            last = past.last_seen("graph_capture")
            return Evidence("out-of-memory failures in graph capture", failed, 0, "count", last_seen=last)
        return Evidence("available_gpu_mem after graph capture", reserve, profile.reserve_least_gb, "GB", below=True)
    if isinstance(condition, Failures):
        count = sum(past.marks.get(phase, 0) for phase in condition.phases)
        return Evidence("out-of-memory failures", float(count), 0.0, "count", last_seen=last_seen(condition, past))
    if isinstance(condition, Stuck):
        return _stuck(past)
    if isinstance(condition, Starts):
        since = past.now - LOOP_SECONDS
        return Evidence("starts in half an hour", past.starts, condition.at_least - 1, "count", since=since)
    if isinstance(condition, Spread):
        return _spread(condition, past)
    if isinstance(condition, Slow):
        return _slow(condition, past)
    if isinstance(condition, BurnRate):
        return None
    if isinstance(condition, Source):
        if not condition.trouble:
            return None
        worked = max(filter(None, (past.last_seen(WORK), past.last_seen(START))), default=None)
        since = -inf if worked is None else worked - AFTERLIFE_SECONDS
        words = past.words.get(condition.trouble) or condition.words
        return Evidence("troubles", float(condition.trouble in past.troubles), 0.0, "count", since=since, text=words)
    assert isinstance(condition, Suits)
    return suits(condition.test, past)


def traces(condition: Condition) -> tuple[Hashable, ...]:  # noqa: PLR0911 - one case for each kind
    """Name what a condition rests on, as `Past.last_seen` knows it: events by name, states by signal and state."""
    if isinstance(condition, Share):
        return tuple((condition.signal, state) for state in condition.states)
    if isinstance(condition, RetractionRate):
        return (RETRACTION,)
    if isinstance(condition, Rejections):
        return (REJECTION, ABORTED)
    if isinstance(condition, Reserve):
        return (RESERVE,)
    if isinstance(condition, Failures):
        return condition.phases
    if isinstance(condition, GraphMemory):
        return ("graph_capture", RESERVE)
    if isinstance(condition, Stuck):
        return (WATCHDOG,)
    if isinstance(condition, Starts):
        return (START,)
    return ENDS if isinstance(condition, Source) else ()


def last_seen(condition: Condition, past: Past) -> float | None:
    """Give when what a condition rests on was last seen, on the past's clock; None where that is not known."""
    seen = (past.last_seen(trace) for trace in traces(condition))
    return max((at for at in seen if at is not None), default=None)


def supporting(condition: Condition, past: Past) -> list[Evidence]:
    """Give the other figures that a person asks for next."""
    profile, recent, found = past.profile, past.recent, []
    usage = recent.mean("usage")
    if usage is not None and isinstance(condition, (Share, RetractionRate)):
        found.append(Evidence("mean token usage", usage, profile.token_usage_target, "ratio"))
    queued = recent.mean("queued")
    by_length = profile.queue_wait_seconds is None  # else a queue is judged by the wait that it means
    if by_length and queued is not None and isinstance(condition, Share) and condition.signal in {"queue", "admission"}:
        lower = profile.queue_lower or 0.0
        lowest = queued < lower or condition.states == ("empty",)
        found.append(
            Evidence("mean queued requests", queued, lower if lowest else profile.queue_upper, "count", below=lowest)
        )
    limit = sum(filter(None, (past.facts.running_limit(dp) for dp in past.by_rank)))
    running = past.total("running")
    if running is not None and limit and isinstance(condition, Share) and condition.signal == "admission":
        of = " of one micro batch" if past.facts.micro_batches > 1 else ""
        found.append(Evidence(f"mean running requests{of}", running, limit, "count"))
    if isinstance(condition, Suits):
        found += beside(condition.test, past)
    return found


def _reserve(condition: Reserve, past: Past) -> Evidence | None:
    reserve, profile, name = past.facts.reserve_gb, past.profile, "available_gpu_mem at start-up"
    if reserve is None:
        return None
    if condition.side == "below":
        return Evidence(name, reserve, profile.reserve_lower_gb, "GB", below=True)
    return Evidence(name, reserve, profile.reserve_upper_gb, "GB", good=profile.reserve_good_gb)


def _stuck(past: Past) -> Evidence:
    hang, spoken = past.hang, past.marks.get(WATCHDOG, 0)
    name, words, headline = "stages that hang, or of which a watchdog spoke", "", ""
    if hang is not None:
        words = hang.sentence
        headline = f"{words[:1].upper()}{words[1:]}."
    elif spoken:
        words = f"the watchdog of the {past.watchdog or 'scheduler'} saw no progress for --watchdog-timeout seconds"
    last = past.last_seen(WATCHDOG) if hang is None else None
    return Evidence(name, float(hang is not None) + spoken, 0.0, "count", last_seen=last, text=words, headline=headline)


def _share(condition: Share, past: Past) -> Evidence | None:
    if not past.enough:
        return None
    share = past.recent.share_of(condition.signal, condition.states)
    if share is None:
        return None
    bound = past.profile.frequent_share
    if any((past.recent.share_of(other.signal, other.states) or 0.0) > other.above for other in condition.unless):
        share = min(share, bound)
    name = f"share of serving time {condition.signal} was {' or '.join(condition.states)}"
    return Evidence(name, share, bound, "share")


def _retractions(condition: RetractionRate, past: Past) -> Evidence | None:
    if not past.enough:
        return None
    rate = past.retractions_per_minute
    if condition.capped and (past.facts.conservativeness or 0.0) <= CONSERVATIVENESS_CEILING:
        return None
    name, limit = "retractions per minute of serving time", past.profile.retractions_tolerated
    return Evidence(name, rate, limit, "per_minute", times=past.retractions)


def _rejections(condition: Rejections, past: Past) -> Evidence | None:
    profile, counts = past.profile, past.recent.counts
    if not past.enough:
        return None
    limit = profile.rejections_per_minute
    rejected, given_up = (past.per_minute(counts[name]) for name in ("rejected_requests", "aborted_requests"))
    if past.hung:
        pass  # those who gave up on a server that hung had no other reason
    elif rejected <= limit and (past.given_up_share or 0.0) > profile.aborted_share and _gave_reason(condition, past):
        return Evidence("requests given up a minute", given_up, limit, "per_minute")
    return Evidence("requests rejected a minute", rejected, limit, "per_minute")


def _gave_reason(condition: Rejections, past: Past) -> bool:
    """Say whether the server gave its clients a reason to give up: people who stop an answer have none."""
    profile, recent = past.profile, past.latency.get("time_to_first_token")
    waited = past.recent.share("queue", "above_range") or 0.0
    if profile.queue_wait_seconds is None:  # no wait is too long for this profile, so any may be for its clients
        waited = 1.0 - (past.recent.share("queue", "empty") or 0.0)
    late = (recent.breach_share if recent is not None else None) or 0.0
    return waited > profile.frequent_share or late > _late_share(condition.times, profile)


def _late_share(times: float, profile: Profile) -> float:
    """Give the share of observations that may miss their objective before a latency is bad."""
    return min(times * (1 - profile.latency_objective), profile.frequent_share)


def _spread(condition: Spread, past: Past) -> Evidence | None:
    waited = past.waited_by_rank
    if len(waited) < 2 or not past.enough:
        return None
    fullest, emptiest = max(waited.values()), min(waited.values())
    name = "share of the time with requests waiting on the fullest DP rank"
    # A rank that has requests waiting itself is no room for those of another.
    value = fullest if emptiest < condition.hardly else min(fullest, past.profile.frequent_share)
    return Evidence(name, value, past.profile.frequent_share, "share")


def _slow(condition: Slow, past: Past) -> Evidence | None:
    profile, recent = past.profile, past.latency.get(condition.latency)
    breaches = recent.breach_share if recent is not None else None
    # Not before what could be the cause can be judged; what was late while the server hung had no other reason.
    if (
        past.hung
        or recent is None
        or breaches is None
        or recent.observations < profile.enough_observations
        or not past.enough
    ):
        return None
    name = f"share of {condition.latency.replace('_', ' ')} observations above the objective"
    bound = _late_share(condition.times, profile)
    empty = past.recent.share("queue", "empty")
    if empty is None and condition.because != "batch":
        return None
    waited = empty is not None and 1.0 - empty > profile.frequent_share
    # A large batch makes every step slow. Where most tokens are in time, something else comes between: prompts, most often.
    each = recent.p50_seconds > (profile.inter_token_seconds or 0.0)
    because = {"queue": waited, "prompts": not waited, "batch": each}[condition.because]
    return Evidence(name, breaches if because else min(breaches, bound), bound, "share")
