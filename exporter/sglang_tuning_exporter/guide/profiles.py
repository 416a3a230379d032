"""What a server is for, and so what its figures mean: the guide's workload profiles and their thresholds."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

GIGABYTE = 1 << 30  # SGLang prints GB as bytes / (1 << 30): get_available_gpu_memory, srt/utils/common.py
# The guide's oldest edition (E1) calls a queue of 50 to 500 healthy, the newest 100 to 2000.
FIRST_EDITION_QUEUE = (50.0, 500.0)


@dataclass(frozen=True, slots=True)
class Profile:
    """The thresholds in force. Queue figures are requests, waits and latencies seconds, memory GB as SGLang prints it, usage and shares 0-1."""

    name: str
    queue_lower: float | None  # below it the client is the bottleneck; None where an empty queue is good
    queue_upper: float  # above it scheduling overhead grows
    queue_wait_seconds: float | None  # the longest wait that still keeps the latency objective; None where nobody waits
    time_to_first_token_seconds: float | None = None  # None: nobody waits for it
    inter_token_seconds: float | None = None
    latency_objective: float = 0.99  # share of observations that must keep to the two above
    token_usage_target: float = 0.9
    retractions_per_minute: float = 1.0  # "about once a minute is fine" (editions E5 and C)
    rejections_per_minute: float = 1.0
    aborted_share: float = 0.05  # of the requests that got their first token
    reserve_lower_gb: float = 5.0  # below: OOM threatens (editions E3-E5, C)
    reserve_upper_gb: float = 10.0  # 10-20 GB is too much; 8-10 GB is in no edition's range and so judged by nobody
    reserve_aim_gb: float = 6.5  # the middle of the 5-8 GB the guide calls good
    reserve_least_gb: float = 1.0  # almost nothing: the next allocation fails
    frequent_share: float = 0.5  # "frequently": more than half of the serving time of the window
    window_seconds: float = 600.0
    enough_serving_seconds: float = 20.0
    enough_observations: int = 10
    overridden: frozenset[str] = frozenset()  # thresholds that the user set: no edition of the guide changes them

    def with_thresholds(self, values: Mapping[str, float]) -> Profile:
        """Put the user's own figures, checked by `threshold_problem`, in place of the guide's."""
        known = {name: int(value) if name == "enough_observations" else value for name, value in values.items()}
        return replace(self, **known, overridden=self.overridden | known.keys())  # type: ignore[arg-type]

    def for_edition(self, *, first: bool) -> Profile:
        """Give the figures of the guide's edition that belongs to the server: its `first`, or the newest."""
        if not first:
            return self
        lower, upper = FIRST_EDITION_QUEUE
        older: dict[str, float] = {}
        if self.queue_lower is not None and "queue_lower" not in self.overridden:
            older["queue_lower"] = lower
        if "queue_upper" not in self.overridden:
            older["queue_upper"] = upper
        return replace(self, **older) if older else self  # type: ignore[arg-type]


# The guide speaks of `offline`; most servers are `online`, where an empty queue is what one wants and a queue is judged by the wait it means.
PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            "online",
            queue_lower=None,
            queue_upper=2000,
            queue_wait_seconds=5.0,
            time_to_first_token_seconds=2.0,
            inter_token_seconds=0.1,
        ),
        Profile("offline", queue_lower=100, queue_upper=2000, queue_wait_seconds=None),
        Profile(
            "long_context",
            queue_lower=None,
            queue_upper=2000,
            queue_wait_seconds=30.0,
            time_to_first_token_seconds=15.0,
            inter_token_seconds=0.1,
        ),
        Profile(
            "multi_turn",
            queue_lower=None,
            queue_upper=2000,
            queue_wait_seconds=5.0,
            time_to_first_token_seconds=1.0,
            inter_token_seconds=0.1,
        ),
    )
}
DEFAULT_PROFILE = "online"
_SHARES = frozenset({"latency_objective", "token_usage_target", "aborted_share", "frequent_share"})
# How far back is looked, and how much is enough, is built into the rules: ten minutes, a minute of serving time.
_FIXED = frozenset({"name", "overridden", "window_seconds", "enough_serving_seconds", "enough_observations"})
THRESHOLDS: tuple[str, ...] = tuple(field.name for field in fields(Profile) if field.name not in _FIXED)


def threshold_problem(name: str, value: float) -> str:
    """Say what is wrong with a user's threshold, empty when nothing is."""
    if name not in THRESHOLDS:
        return f"known thresholds are {', '.join(THRESHOLDS)}"
    if name in _SHARES and not 0 < value < 1:
        return "give a share above 0 and below 1"
    if not 0 <= value < float("inf"):
        return "give a number from 0 up"
    return ""
