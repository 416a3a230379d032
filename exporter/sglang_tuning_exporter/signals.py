"""What a server is doing at one moment, as one state for each signal.

Pure: an observation and what is known of the server in, names out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from sglang_tuning_exporter.guide.profiles import Profile

Signal: TypeAlias = Literal["activity", "queue", "token_usage", "admission", "cuda_graph"]

IDLE, UNKNOWN = "idle", "unknown"
# Every signal also has `idle` (nothing running or queued) and `unknown` (nothing observed for HOLD_SECONDS), so that
# its seconds add up to wall time and its serving time is all the others.
STATES: dict[Signal, tuple[str, ...]] = {
    "activity": ("serving", IDLE, UNKNOWN),
    "queue": ("empty", "below_range", "in_range", "above_range", IDLE, UNKNOWN),
    "token_usage": ("below_target", "at_target", IDLE, UNKNOWN),
    "admission": ("no_queue", "held_back", "running_limit", "pool_full", "prefill_bound", IDLE, UNKNOWN),
    "cuda_graph": ("replayed", "beyond_captured", "eager", "disabled", IDLE, UNKNOWN),
}
SIGNALS: tuple[Signal, ...] = tuple(STATES)
HOLD_SECONDS = 60.0

# `#running-req` this close to its limit is at it: finished requests are replaced between two observations.
AT_LIMIT_SHARE = 0.95


@dataclass(slots=True)
class Observation:
    """What is known of one scheduler now. Usages are 0-1; `running` counts sequences that a prefill is just adding."""

    serving: bool
    running: float | None = None
    queued: float | None = None
    usage: float | None = None  # of the fullest pool
    prefill_full: bool = False  # the last batch was a prefill batch as large as they get
    graph: bool | None = None  # the last decode batch replayed a captured graph
    queue_wait_seconds: float | None = None  # estimate; inf when nothing was admitted for a whole window
    running_limit: float | None = None
    largest_captured: int | None = None  # largest captured decode batch size
    graphs_disabled: bool = False


ALL_UNKNOWN: dict[Signal, str] = dict.fromkeys(SIGNALS, UNKNOWN)
ALL_IDLE: dict[Signal, str] = dict.fromkeys(SIGNALS, IDLE)


def classify(seen: Observation, profile: Profile) -> dict[Signal, str]:
    """Give one state for each signal; `unknown` where this server does not tell."""
    if not seen.serving:
        return dict(ALL_IDLE)
    return {
        "activity": "serving",
        "queue": _queue(seen, profile),
        "token_usage": _token_usage(seen, profile),
        "admission": _admission(seen, profile),
        "cuda_graph": _cuda_graph(seen),
    }


def _queue(seen: Observation, profile: Profile) -> str:
    if seen.queued is None:
        return UNKNOWN
    if seen.queued <= 0:
        return "empty"
    wait, objective = seen.queue_wait_seconds, profile.queue_wait_seconds
    if seen.queued > profile.queue_upper or (objective is not None and wait is not None and wait > objective):
        return "above_range"
    if profile.queue_lower is not None and seen.queued < profile.queue_lower:
        return "below_range"
    return "in_range"


def _token_usage(seen: Observation, profile: Profile) -> str:
    if seen.usage is None:
        return UNKNOWN
    return "at_target" if seen.usage >= profile.token_usage_target else "below_target"


def _admission(seen: Observation, profile: Profile) -> str:
    if seen.queued is None:
        return UNKNOWN
    if seen.queued <= 0:
        return "no_queue"
    if (seen.running or 0) >= AT_LIMIT_SHARE * (seen.running_limit or inf):
        return "running_limit"
    if seen.usage is None:
        return UNKNOWN
    if seen.usage >= profile.token_usage_target:
        return "pool_full"
    # Prompts fill every batch, so requests wait for their turn, not for room (GUIDE, `prefill_bound`).
    return "prefill_bound" if seen.prefill_full else "held_back"


def _cuda_graph(seen: Observation) -> str:
    if seen.graphs_disabled:
        return "disabled"
    if seen.graph is None:
        return UNKNOWN
    if seen.graph:
        return "replayed"
    if seen.largest_captured is not None and (seen.running or 0) > seen.largest_captured:
        return "beyond_captured"
    return "eager"
