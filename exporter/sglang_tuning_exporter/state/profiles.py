"""What a server is for, and so what its figures mean: the guide's workload profiles, their thresholds and their settings."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

# What a flag can cause. Late is past the profile's objective; waiting, a queue that is not healthy.
Trouble: TypeAlias = Literal[
    "pool", "prefill", "held", "limit", "retracting", "first_tokens", "tokens", "rejected", "waiting", "eager", "hang"
]
GIGABYTE = 1 << 30  # SGLang prints GB as bytes / (1 << 30): get_available_gpu_memory, srt/utils/common.py
# A rate a minute with one event more within the ten minutes that a rule looks at: what sampling can add.
ONE_MORE = 0.1
# "About one a minute is fine": one every 50 seconds is about one.
ABOUT = 0.2
LONG_WAIT, LONG_QUEUE = "an estimated wait above {} s", "more than {} requests waiting"
# Healthy queue in the first edition of SGLang's tuning guide; 100 to 2000 in the newest.
FIRST_EDITION_QUEUE = (50.0, 500.0)


@dataclass(frozen=True, slots=True)
class Setting:
    """One argument as the guide sets it for a workload; `arg` and `value` as SGLang prints them, 0 and 1 for switches.

    `why` completes "it …". `needed`: set otherwise, it defeats what the profile is for. `helps` is what it can cure where it
    is set otherwise, empty where rows of their own advise it; `beside` is a switch without which it does nothing.
    """

    arg: str
    value: float | str
    why: str
    is_switch: bool = False
    needed: bool = False
    helps: tuple[Trouble, ...] = ()
    beside: str = ""


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
    retractions_per_minute: float = 1.0  # the guide: about one a minute is fine
    rejections_per_minute: float = 1.0
    aborted_share: float = 0.05  # of the requests that got their first token or were given up
    reserve_lower_gb: float = 5.0  # below: risk of running out of memory
    reserve_upper_gb: float = 10.0  # 10-20 GB is too much; 8-10 GB is in no edition's range and so judged by nobody
    reserve_aim_gb: float = 6.5  # the middle of the 5-8 GB the guide calls good
    reserve_least_gb: float = 1.0  # almost nothing: the next allocation fails
    frequent_share: float = 0.5  # "frequently": more than half of the serving time of the window
    window_seconds: float = 600.0
    enough_serving_seconds: float = 20.0
    enough_observations: int = 10
    overridden: frozenset[str] = frozenset()  # thresholds that the user set: no edition of the guide changes them
    settings: tuple[Setting, ...] = ()

    def with_thresholds(self, values: Mapping[str, float]) -> Profile:
        """Put the user's own figures, checked by `threshold_problem`, in place of the guide's.

        What to aim for stays inside the range: it moves to the middle of one that leaves it out.
        """
        known = {name: int(value) if name == "enough_observations" else value for name, value in values.items()}
        made = replace(self, **known, overridden=self.overridden.union(known))  # type: ignore[arg-type]
        lower, upper = made.reserve_lower_gb, made.reserve_upper_gb
        if "reserve_aim_gb" in made.overridden or lower < made.reserve_aim_gb < upper:
            return made
        return replace(made, reserve_aim_gb=(lower + upper) / 2)

    def late_bound(self, times: float) -> float:
        """Give the share of observations that may miss their objective, so many times the budget, before a latency is bad."""
        return min(times * (1 - self.latency_objective), self.frequent_share)

    @property
    def figures(self) -> dict[str, str]:
        """The thresholds as they are written, by name, and what follows from them."""
        names = (*THRESHOLDS, "reserve_good_gb")
        shown = {name: "-" if getattr(self, name) is None else f"{getattr(self, name):g}" for name in names}
        return {**shown, "queue_limit": self._queue_limit}

    @property
    def _queue_limit(self) -> str:
        """What a queue that is too long means: its estimated wait, else its length."""
        if self.queue_wait_seconds is not None:
            return LONG_WAIT.format(f"{self.queue_wait_seconds:g}")
        return LONG_QUEUE.format(f"{self.queue_upper:g}")

    @property
    def reserve_good_gb(self) -> float:
        """The most memory left that is good; up to the upper bound no edition of the guide judges it."""
        return min(max(GOOD_RESERVE_GB, self.reserve_aim_gb), self.reserve_upper_gb)

    @property
    def retractions_tolerated(self) -> float:
        """The most retractions a minute that are about as many as the threshold."""
        return self.retractions_per_minute + ABOUT

    @property
    def bounds(self) -> list[tuple[str, str, float]]:
        """The thresholds as they are exposed: signal, bound and figure (`sglang_tuning_threshold`); memory in bytes."""
        told: tuple[tuple[str, str, float | None], ...] = (
            ("queue", "lower", self.queue_lower),
            ("queue", "upper", self.queue_upper),
            ("queue", "wait_seconds", self.queue_wait_seconds),
            ("token_usage", "target", self.token_usage_target),
            ("retractions_per_minute", "upper", self.retractions_per_minute),
            ("rejections_per_minute", "upper", self.rejections_per_minute),
            ("aborted_share", "upper", self.aborted_share),
            ("available_gpu_memory_bytes", "least", self.reserve_least_gb * GIGABYTE),
            ("available_gpu_memory_bytes", "lower", self.reserve_lower_gb * GIGABYTE),
            ("available_gpu_memory_bytes", "upper", self.reserve_upper_gb * GIGABYTE),
            ("cuda_graph", "lower", 1 - self.frequent_share),
            ("share", "upper", self.frequent_share),
            ("time_to_first_token_seconds", "upper", self.time_to_first_token_seconds),
            ("inter_token_latency_seconds", "upper", self.inter_token_seconds),
            ("latency", "objective", self.latency_objective),
        )
        return [(signal, bound, value) for signal, bound, value in told if value is not None]

    @property
    def contradiction(self) -> str:
        """What the thresholds say against each other, and what to do; empty where they agree."""
        for low, high in _ASCENDING:
            lower, upper = getattr(self, low), getattr(self, high)
            if lower is not None and upper is not None and lower >= upper:
                if low in self.overridden:
                    return f"{low}={lower:g}: give a number below {high}={upper:g}, or change both"
                return f"{high}={upper:g}: give a number above {low}={lower:g}, or change both"
        return ""

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
        changed = replace(self, **older)  # type: ignore[arg-type]
        return self if changed.contradiction else changed


# The guide calls 5 to 8 GB left at the start good, and 10 to 20 too much.
GOOD_RESERVE_GB = 8.0
# From the lower to the higher of each pair.
_ASCENDING = (
    ("queue_lower", "queue_upper"),
    ("reserve_least_gb", "reserve_lower_gb"),
    ("reserve_lower_gb", "reserve_upper_gb"),
    ("reserve_lower_gb", "reserve_aim_gb"),
    ("reserve_aim_gb", "reserve_upper_gb"),
)
_HICACHE = (
    Setting(
        "enable_hierarchical_cache",
        1.0,
        "keeps prefixes in host memory that do not fit the KV cache",
        is_switch=True,
        helps=("pool", "prefill", "first_tokens", "retracting"),
    ),
    Setting(
        "hicache_ratio",
        2.0,
        "makes the host's cache twice as large as the GPU's",
        helps=("pool", "prefill", "first_tokens", "retracting"),
        beside="enable_hierarchical_cache",
    ),
)

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
            settings=(
                Setting("max_running_requests", 128.0, "keeps batches small, so that each token comes soon"),
                Setting("cuda_graph_max_bs", 256.0, "covers every batch with a CUDA graph"),
                Setting("schedule_conservativeness", 1.2, "avoids retractions, which delay answers"),
            ),
        ),
        Profile(
            "offline",
            queue_lower=100,
            queue_upper=2000,
            queue_wait_seconds=None,
            settings=(
                Setting("mem_fraction_static", 0.9, "leaves more memory for the KV cache"),
                Setting("max_running_requests", 4096.0, "lets the KV cache decide how many requests run"),
                Setting("schedule_conservativeness", 0.3, "admits more requests at once"),
                Setting("chunked_prefill_size", 16384.0, "computes prompts in fewer, larger batches"),
            ),
        ),
        Profile(
            "long_context",
            queue_lower=None,
            queue_upper=2000,
            queue_wait_seconds=30.0,
            time_to_first_token_seconds=15.0,
            inter_token_seconds=0.1,
            settings=(
                *_HICACHE,
                Setting(
                    "page_size",
                    64.0,
                    "makes copies between the two caches larger and fewer",
                    helps=("prefill", "first_tokens"),
                    beside="enable_hierarchical_cache",
                ),
                Setting("schedule_policy", "lpm", "serves requests with a common prefix together"),
                Setting("chunked_prefill_size", 16384.0, "computes long prompts in fewer chunks"),
            ),
        ),
        Profile(
            "multi_turn",
            queue_lower=None,
            queue_upper=2000,
            queue_wait_seconds=5.0,
            time_to_first_token_seconds=1.0,
            inter_token_seconds=0.1,
            settings=(
                Setting(
                    "disable_radix_cache",
                    0.0,
                    "reuses the earlier turns instead of computing them again",
                    is_switch=True,
                    needed=True,
                ),
                Setting("page_size", 1.0, "reuses a prefix to its last token", helps=("prefill", "first_tokens")),
                *_HICACHE,
            ),
        ),
    )
}
DEFAULT_PROFILE = "online"
DEFAULT = PROFILES[DEFAULT_PROFILE]
_SHARES = frozenset({"latency_objective", "token_usage_target", "aborted_share", "frequent_share"})
# How far back is looked, and how much is enough, is built into the rules: ten minutes, a minute of serving time.
_FIXED = frozenset(
    {"name", "overridden", "settings", "window_seconds", "enough_serving_seconds", "enough_observations"}
)
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
