"""Shared prefixes: an order of the queue that uses them, or searches for them in vain. Pure."""

from __future__ import annotations

from sglang_tuning_exporter.core.diagnoses.base import Beside, chance, fact, mostly, waits_often
from sglang_tuning_exporter.core.diagnoses.steps import set_flag
from sglang_tuning_exporter.core.findings import Change
from sglang_tuning_exporter.core.view import SHARING, View

NO_SHARING = 0.02  # of the prompt tokens
SEVERAL_EACH = 1.5  # requests of the scheduler for each over HTTP
MOST_SORTED = 128  # a longer queue is served in order of arrival under lpm; srt/managers/schedule_policy.py


def _sharing(view: View) -> float | None:
    """Return the cached share of prompt tokens, without what retracted requests and
    further answers find of their own.
    """
    totals, cached, posts = view.totals, view.cached_share, view.totals["generation_posts"]
    # Preempted requests find their own prompts, and nothing counts them; several answers to one prompt find it cached.
    preempts = view.facts.is_on("enable_priority_scheduling")
    several = posts and totals["admitted_requests"] > SEVERAL_EACH * posts
    if not waits_often(view) or cached is None or preempts or several:
        return None
    own = totals["repeated"] / totals["cached_tokens"] if totals["cached_tokens"] else 0.0
    came_back = (
        totals["retracted_requests"]
        * (view.prompt or 0.0)
        / max(totals["computed_tokens"] + totals["cached_tokens"], 1.0)
    )
    return max(cached * (1.0 - (1.0 if own > 0.5 else own)) - came_back, 0.0)


def _recomputes(view: View) -> bool:
    """Whether SGLang computes prefixes again and again because the cache loses them."""
    return waits_often(view) and not mostly(view, "queue", "in_range") and mostly(view, "admission", "pool_full")


def _shared_prefixes(view: View) -> float | None:
    """The share of the prompt tokens that were cached under fcfs."""
    cannot_gain = (view.cached_share or 0.0) >= SHARING[1]
    return None if view.facts.arguments.get("schedule_policy") != "fcfs" or cannot_gain else _sharing(view)


def _no_prefixes(view: View) -> float | None:
    """The share of the prompt tokens that were cached under a policy that sorts by prefixes."""
    sorts = view.facts.arguments.get("schedule_policy") in ("lpm", "dfs-weight")
    return view.cached_share if sorts and _sharing(view) is not None else None


def _sort_by_prefix(view: View, _: Beside) -> list[Change]:
    queued = view.mean("queued")
    is_long = queued is not None and queued > MOST_SORTED and view.profile.queue_lower is None
    return [] if is_long else [set_flag(view, "schedule_policy", "lpm")]


SHARED_PREFIXES_UNUSED = chance(
    id="shared_prefixes_unused",
    limits=_recomputes,
    when=fact(measure=_shared_prefixes, limit=SHARING[0], name="share of prompt tokens from the prefix cache"),
    summary="Waiting requests share prefixes, but --schedule-policy fcfs does not group them.",
    seen="{value} of the prompt tokens came from the prefix cache under fcfs",
    guide="with many shared prefixes set --schedule-policy lpm (the default of early releases)",
    remedy=Change(
        arg="schedule_policy",
        direction="set",
        words="lpm",
        why="Longest prefix match (lpm) runs requests with the same prefix together while the prefix is cached.",
        not_if=(
            "requests of one prefix come together anyway, which is not in a log; or the KV cache already holds all"
            " prefixes"
        ),
        cost="Scheduling overhead grows with the queue; requests without a common prefix wait longer.",
    ),
    advise=_sort_by_prefix,
    replica="after a flag",
)


PREFIX_POLICY_WASTED = chance(
    id="prefix_policy_wasted",
    when=fact(
        measure=_no_prefixes, side="below", limit=NO_SHARING, name="share of prompt tokens from the prefix cache"
    ),
    summary="--schedule-policy lpm orders requests by shared prefixes, but they share none.",
    seen="{value} of the prompt tokens came from the prefix cache under lpm",
    guide="first edition: without shared prefixes fcfs costs less than lpm",
    remedy=Change(
        arg="schedule_policy",
        direction="set",
        words="fcfs",
        why="Searching the longest common prefix costs time for every waiting request.",
        not_if="prefixes will be shared later in the day",
        to="fcfs",
    ),
    shade=1,
)
