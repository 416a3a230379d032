"""The tuning guide's workload profiles, with their thresholds and settings.

Reasons and sources: docs/decisions.md, "Thresholds of the profiles" and "Constants"; "the guide" is SGLang's
hyperparameter tuning guide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import inf
from typing import Literal

GIGABYTE = 1 << 30  # SGLang prints GB as bytes / (1 << 30): get_available_gpu_memory, srt/utils/common.py
LONG_WAIT, LONG_QUEUE = "an estimated wait above {} s", "more than {} requests waiting"
FIRST_EDITION_QUEUE = (50.0, 500.0)  # healthy queues in the guide's first edition


@dataclass(frozen=True, slots=True)
class Setting:
    """One argument as the guide sets it for a workload; `arg` and `value` as SGLang prints them, 0 and 1 for switches.

    `why` completes "it …". `needed`: with another value the profile makes no sense. `direction`: the only one in which
    the value does what `why` says; a server that is beyond it has no need of it.
    """

    arg: str
    value: float | str
    why: str
    direction: Literal["", "raise", "lower"] = ""
    is_switch: bool = False
    needed: bool = False

    def is_needed_beside(self, now: object) -> bool:
        """Whether a server with another value is not beyond this one already."""
        if now == self.value or not self.direction or isinstance(self.value, str) or not isinstance(now, int | float):
            return now != self.value
        return now < self.value if self.direction == "raise" else now > self.value


@dataclass(frozen=True)
class Profile:
    """The thresholds in force: queues in requests, waits and latencies in seconds, memory in GB as SGLang prints it,
    usage and shares 0-1.
    """

    name: str
    queue_lower: float | None = None  # below it the client limits; None where an empty queue is good
    queue_upper: float = 2000  # above it scheduling overhead grows
    queue_wait_seconds: float | None = None  # longest wait within the latency objective; None where nobody waits
    time_to_first_token_seconds: float | None = None  # None: nobody waits for it
    inter_token_seconds: float | None = None
    latency_objective: float = 0.99  # share of observations within the two above
    token_usage_target: float = 0.9
    retractions_per_minute: float = 1.0  # the guide: "about once a minute" is fine
    rejections_per_minute: float = 1.0
    aborted_share: float = 0.05  # of the requests that got their first token or were given up
    reserve_lower_gb: float = 5.0  # below it out-of-memory failures are likely
    reserve_upper_gb: float = 10.0  # the guide: 10-20 GB is too much, 5-8 GB good; 8-10 GB is neither
    reserve_aim_gb: float = 6.5  # the middle of 5-8 GB
    reserve_least_gb: float = 1.0  # below it the next allocation may fail
    frequent_share: float = 0.5  # "frequently": more than half of the serving time of the window
    alert_wait: float = 1.0  # times as long must a condition hold, and be over, until its alert begins and ends
    window_seconds: float = 600.0
    enough_serving_seconds: float = 20.0
    enough_observations: int = 10
    overridden: frozenset[str] = frozenset()  # thresholds that the user set
    accepted: tuple[tuple[str, str], ...] = ()  # diagnoses that the user accepts, each with the reason
    waits: tuple[tuple[str, float], ...] = ()  # diagnoses whose alert waits for so many seconds
    settings: tuple[Setting, ...] = ()

    def with_thresholds(self, values: Mapping[str, float]) -> Profile:
        """Return the profile with the user's own thresholds, checked by `threshold_problem`.

        The aim stays inside the range: where it is outside of a new range, it is the middle.
        """
        known = {name: int(value) if name == "enough_observations" else value for name, value in values.items()}
        made = replace(self, **known, overridden=self.overridden.union(known))  # type: ignore[arg-type]
        lower, upper = made.reserve_lower_gb, made.reserve_upper_gb
        if "reserve_aim_gb" in made.overridden or lower < made.reserve_aim_gb < upper:
            return made
        return replace(made, reserve_aim_gb=(lower + upper) / 2)

    def adapted(self, accepted: Mapping[str, str], waits: Mapping[str, float]) -> Profile:
        """Return the profile with what the user accepts, and how long alerts of the user's choice wait."""
        return replace(self, accepted=tuple(accepted.items()), waits=tuple(waits.items()))

    @cached_property
    def accepts(self) -> frozenset[str]:
        """The diagnoses that are neither said nor notified."""
        return frozenset(name for name, _ in self.accepted)

    def wait_of(self, diagnosis: str, usual: float) -> float:
        """Return the seconds that a diagnosis must hold before its alert begins."""
        return self.alert_wait * dict(self.waits).get(diagnosis, usual)

    def late_bound(self, times: float) -> float:
        """Return the share of observations that may miss the objective at so many times the error budget."""
        return min(times * (1 - self.latency_objective), self.frequent_share)

    @cached_property
    def figures(self) -> dict[str, str]:
        """The thresholds as text, by name, and what follows from them."""
        names = (*THRESHOLDS, "reserve_good_gb")
        shown = {name: "-" if getattr(self, name) is None else f"{getattr(self, name):g}" for name in names}
        return {**shown, "queue_limit": self._queue_limit}

    @property
    def healthy(self) -> dict[str, str]:
        """What is healthy, in words, by figure."""
        queue = f"{self.queue_lower:g} to {self.queue_upper:g}" if self.queue_lower else f"up to {self.queue_upper:g}"
        return {
            "queue": queue if self.queue_wait_seconds is None else f"a wait up to {self.queue_wait_seconds:g} s",
            "usage": f"{self.token_usage_target:g} or more while requests wait",
            "coverage": f"above {100 * (1 - self.frequent_share):.0f} % of decode batches",
            "retractions": f"up to about {self.retractions_per_minute:g}",
        }

    @property
    def _queue_limit(self) -> str:
        """The limit of a queue: its estimated wait, else its length."""
        if self.queue_wait_seconds is not None:
            return LONG_WAIT.format(f"{self.queue_wait_seconds:g}")
        return LONG_QUEUE.format(f"{self.queue_upper:g}")

    @property
    def reserve_good_gb(self) -> float:
        """The most memory left that is good; between it and the upper bound the guide says nothing."""
        return min(max(GOOD_RESERVE_GB, self.reserve_aim_gb), self.reserve_upper_gb)

    @property
    def bounds(self) -> list[tuple[str, str, float]]:
        """The thresholds as exposed by `sglang_tuning_threshold`: signal, bound and figure; memory in bytes."""
        bounds: tuple[tuple[str, str, float | None], ...] = (
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
        return [(signal, bound, value) for signal, bound, value in bounds if value is not None]

    @property
    def contradiction(self) -> str:
        """How the thresholds contradict each other, and what to do; empty where they do not."""
        for low, high in _ASCENDING:
            lower, upper = getattr(self, low), getattr(self, high)
            if lower is not None and upper is not None and lower >= upper:
                if low in self.overridden:
                    return f"{low}={lower:g}: give a number below {high}={upper:g}, or change both"
                return f"{high}={upper:g}: give a number above {low}={lower:g}, or change both"
        return ""

    def for_server(self, *, is_first_edition: bool, role: str) -> Profile:
        """Return the thresholds for a server: those of the guide's edition for its release, and those of its side of
        disaggregation, if any.

        The guide's reserve of memory is for the activations of prompts, which the decode side of disaggregation does
        not compute. What is left beyond it is for requests that run and for prefixes: the prefill side holds each
        prompt only until it is transferred.
        """
        changed = self._for_first_edition() if is_first_edition else self
        bound, value = {
            "decode": ("reserve_lower_gb", self.reserve_least_gb),
            "prefill": ("reserve_upper_gb", inf),
        }.get(role, ("", 0.0))
        return replace(changed, **{bound: value}) if bound and bound not in self.overridden else changed  # type: ignore[arg-type]

    def _for_first_edition(self) -> Profile:
        lower, upper = FIRST_EDITION_QUEUE
        older: dict[str, float] = {}
        if self.queue_lower is not None and "queue_lower" not in self.overridden:
            older["queue_lower"] = lower
        if "queue_upper" not in self.overridden:
            older["queue_upper"] = upper
        changed = replace(self, **older)  # type: ignore[arg-type]
        return self if changed.contradiction else changed


GOOD_RESERVE_GB = 8.0
# Each pair: the lower and the higher threshold.
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
    ),
    Setting(
        "hicache_ratio",
        2.0,
        "makes the host's cache twice as large as the GPU's",
    ),
)

# The guide is about `offline`; most servers are `online`: an empty queue is good, and a queue is judged by its wait.
PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            "online",
            queue_wait_seconds=5.0,
            time_to_first_token_seconds=2.0,
            inter_token_seconds=0.1,
            settings=(
                Setting("max_running_requests", 128.0, "keeps batches small, so that each token comes soon", "lower"),
                Setting("cuda_graph_max_bs", 256.0, "covers every batch with a CUDA graph", "raise"),
                Setting("schedule_conservativeness", 1.2, "avoids retractions, which delay answers", "raise"),
            ),
        ),
        Profile(
            "offline",
            queue_lower=100,
            settings=(
                Setting("mem_fraction_static", 0.9, "leaves more memory for the KV cache", "raise"),
                Setting("max_running_requests", 4096.0, "lets the KV cache decide how many requests run", "raise"),
                Setting("schedule_conservativeness", 0.3, "admits more requests at once", "lower"),
                Setting("chunked_prefill_size", 16384.0, "computes prompts in fewer, larger batches", "raise"),
            ),
        ),
        Profile(
            "long_context",
            queue_wait_seconds=30.0,
            time_to_first_token_seconds=15.0,
            inter_token_seconds=0.1,
            settings=(
                *_HICACHE,
                Setting(
                    "page_size",
                    64.0,
                    "makes copies between the two caches larger and fewer",
                    "raise",
                ),
                Setting("schedule_policy", "lpm", "serves requests with a common prefix together"),
                Setting("chunked_prefill_size", 16384.0, "computes long prompts in fewer chunks", "raise"),
            ),
        ),
        Profile(
            "multi_turn",
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
                Setting("page_size", 1.0, "reuses a prefix to its last token", "lower"),
                *_HICACHE,
            ),
        ),
    )
}
DEFAULT_PROFILE = "online"
DEFAULT = PROFILES[DEFAULT_PROFILE]
_SHARES = frozenset({"latency_objective", "token_usage_target", "aborted_share", "frequent_share"})
# The rules have the window and the least serving time built in: ten minutes, one minute.
_FIXED = frozenset(
    {
        "name",
        "overridden",
        "accepted",
        "waits",
        "settings",
        "window_seconds",
        "enough_serving_seconds",
        "enough_observations",
    }
)
THRESHOLDS: tuple[str, ...] = tuple(field.name for field in fields(Profile) if field.name not in _FIXED)


def threshold_problem(name: str, value: float) -> str:
    """Return what is wrong with a user's threshold; empty where nothing is."""
    if name not in THRESHOLDS:
        return f"known thresholds are {', '.join(THRESHOLDS)}"
    if name in _SHARES and not 0 < value < 1:
        return "give a share above 0 and below 1"
    if not 0 <= value < float("inf"):
        return "give a number from 0 up"
    return ""
