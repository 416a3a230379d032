"""Load that is unbalanced over DP ranks."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_tuning_exporter.diagnosis.conditions.condition import RECENTLY, SERVING_SECONDS, WINDOW, Condition, Samples
from sglang_tuning_exporter.diagnosis.conditions.share import OFTEN, PERCENT, busy, often
from sglang_tuning_exporter.diagnosis.evidence import Evidence, Past
from sglang_tuning_exporter.diagnosis.promql import ON
from sglang_tuning_exporter.state.profiles import Profile


@dataclass(frozen=True, slots=True)
class Spread(Condition):
    """Requests wait on one DP rank for more than the frequent share of the time, and hardly ever on another."""

    description = "share of the time with requests waiting: fullest DP rank above `frequent_share`, emptiest below a tenth; ten minutes"
    figure = PERCENT
    needs = "load, and two DP ranks or more"

    hardly: float = 0.1

    def measure(self, past: Past) -> Evidence | None:
        waited = past.waited_by_rank
        if len(waited) < 2 or not past.has_enough_load:
            return None
        fullest, emptiest, bound = max(waited.values()), min(waited.values()), past.profile.frequent_share
        name = "share of the time with requests waiting on the fullest DP rank"
        # A rank with a queue of its own has no capacity for another's requests.
        return Evidence(name, fullest if emptiest < self.hardly else min(fullest, bound), bound, "share")

    def promql(self) -> list[str]:
        waited, lately = (f"rank:sglang_tuning_waiting:share{window}" for window in (WINDOW, RECENTLY))
        return [
            f"max by (job, instance) ({waited}) > {ON} {OFTEN}",
            f"and {ON} min by (job, instance) ({waited}) < {self.hardly:g}",
            f"and {ON} max by (job, instance) ({lately}) > {ON} {OFTEN}",
            busy("queue"),
        ]

    def fires(self, samples: Samples) -> bool:
        waited = samples.waiting(WINDOW)
        limit = samples.limits.frequent_share
        if not waited or max(waited) <= limit or min(waited) >= self.hardly or samples.busy("queue") <= SERVING_SECONDS:
            return False
        return max(samples.waiting(RECENTLY), default=0.0) > limit

    def bound(self, profile: Profile) -> tuple[str, str]:
        return often(profile), ", over the last ten minutes"
