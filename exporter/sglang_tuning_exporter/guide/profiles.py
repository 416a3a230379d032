"""What a server is for, and so what its figures mean: the guide's workload profiles and their thresholds."""

from __future__ import annotations

from dataclasses import dataclass

GIGABYTE = 1 << 30  # SGLang prints GB as bytes / (1 << 30): get_available_gpu_memory, srt/utils/common.py


@dataclass(frozen=True, slots=True)
class Profile:
    """The thresholds in force. Queue figures are requests, waits seconds, memory GB as SGLang prints it, usage and shares 0-1."""

    name: str
    queue_lower: float | None  # below it the client is the bottleneck; None where an empty queue is good
    queue_upper: float  # above it scheduling overhead grows
    queue_wait_seconds: float | None  # the longest wait that still keeps the latency objective; None where nobody waits
    token_usage_target: float = 0.9
    retractions_per_minute: float = 1.0  # "about once a minute is fine" (editions E5 and C)
    reserve_lower_gb: float = 5.0  # below: OOM threatens (editions E3-E5, C)
    reserve_upper_gb: float = 10.0  # 10-20 GB is too much; 8-10 GB is in no edition's range and so judged by nobody
    reserve_aim_gb: float = 6.5  # the middle of the 5-8 GB the guide calls good
    frequent_share: float = 0.5  # "frequently": more than half of the serving time of the window
    window_seconds: float = 600.0
    enough_serving_seconds: float = 20.0
    enough_observations: int = 10


# The guide speaks of `offline`; most servers are `online`, where an empty queue is what one wants and a queue is judged by the wait it means.
PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("online", queue_lower=None, queue_upper=2000, queue_wait_seconds=5.0),
        Profile("offline", queue_lower=100, queue_upper=2000, queue_wait_seconds=None),
        Profile("long_context", queue_lower=None, queue_upper=2000, queue_wait_seconds=30.0),
        Profile("multi_turn", queue_lower=None, queue_upper=2000, queue_wait_seconds=5.0),
    )
}
DEFAULT_PROFILE = "online"
