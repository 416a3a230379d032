"""Latencies that miss the profile's objective: as the exporter sees them (`ObjectiveMissed`), and as an error budget (`BurnRate`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from sglang_tuning_exporter.diagnosis.conditions.condition import Condition, Resource
from sglang_tuning_exporter.diagnosis.conditions.share import PERCENT
from sglang_tuning_exporter.diagnosis.evidence import Evidence, Past
from sglang_tuning_exporter.diagnosis.interruption import LONG_PREFILL, pause_share, tokens_for_each_late_gap
from sglang_tuning_exporter.diagnosis.promql import ON, OUTAGE_LOOKBACK, above, largest_before, threshold
from sglang_tuning_exporter.diagnosis.suspects import LATE_TIMES, late_share
from sglang_tuning_exporter.state.journal import START
from sglang_tuning_exporter.state.latency import RecentLatency
from sglang_tuning_exporter.state.profiles import Profile

_NAMES = {"time_to_first_token": "time to first token", "inter_token": "inter-token latency"}
_CAUSES = {
    "queue": "the queue",
    "prompts": "long prompts",
    "batch": "a large batch",
    "prefill": "prefill between decode steps",
}
Judged: TypeAlias = Literal["time_to_first_token", "inter_token"]
# With fewer requests in the long window one slow request is a large share. Not required of the short window: a server
# whose throughput collapses answers few. Tokens are not counted: one slow request has thousands of slow ones.
ENOUGH_REQUESTS = 20
# A budget of 10 % cannot burn 14.4 times too fast, so half of the observations are enough.
MOST_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class ObjectiveMissed(Condition):
    """More observations than `times` the error budget miss the objective, `because` of this."""

    is_whole_cause = False

    latency: Judged
    because: Literal["queue", "prompts", "batch", "prefill"]
    times: float = LATE_TIMES

    @property
    def needs(self) -> str:
        return f"load, SGLang's metrics, and an objective of the profile for the {_NAMES[self.latency]}"

    @property
    def protects(self) -> Resource | None:
        return "requests" if self.because == "batch" else None

    def measure(self, past: Past) -> Evidence | None:
        profile, recent = past.profile, past.latency.get(self.latency)
        late = late_share(self.latency, past, self.times)
        # Only when the causes can be judged. While the server hung, late answers had no other cause.
        if past.hung or recent is None or late is None or not past.has_enough_load:
            return None
        empty = past.recent.share("queue", "empty")
        if empty is None and self.latency == "time_to_first_token":
            return None
        waited = empty is not None and (1.0 - empty > profile.frequent_share or _is_mostly_waiting(past, recent))
        # A large batch slows every step. If some tokens are in time, something else interrupts: most often prefill.
        usual = recent.p50_seconds if recent.quarter_seconds is None else recent.quarter_seconds
        prompts = (tokens_for_each_late_gap(past) or 0.0) >= LONG_PREFILL
        # With mixed chunks every step may have a chunk, and be slow whatever the batch.
        each = usual > (profile.inter_token_seconds or 0.0) and not (prompts and past.facts.arg("enable_mixed_chunk"))
        between = prompts and not each
        because = {"queue": waited, "prompts": not waited, "batch": each, "prefill": between}[self.because]
        return late if because else replace(late, value=min(late.value, late.threshold))

    def supporting(self, past: Past) -> list[Evidence]:
        gaps, objective = past.latency.get("inter_token"), past.profile.inter_token_seconds
        still, tokens = pause_share(past), tokens_for_each_late_gap(past)
        if self.because != "prefill" or gaps is None or objective is None or still is None or tokens is None:
            return []
        return [
            Evidence("prompt tokens prefilled for each late gap", round(tokens), LONG_PREFILL, "count"),
            Evidence("median inter-token latency", gaps.p50_seconds, objective, "seconds"),
            Evidence(
                "share of the time in which running requests get no token", still, past.profile.frequent_share, "share"
            ),
        ]

    @property
    def description(self) -> str:
        return f"more than {self.times:g} times the error budget of the {_NAMES[self.latency]} missed, because of {_CAUSES[self.because]}"


def _is_mostly_waiting(past: Past, first_tokens: RecentLatency) -> bool:
    """Return whether requests spend most of the time to their first token in the queue; after a burst it is empty again."""
    wait, mean = past.queue_wait_seconds, first_tokens.mean_seconds
    return wait is not None and mean is not None and wait > past.profile.frequent_share * mean


@dataclass(frozen=True, slots=True)
class BurnRate(Condition):
    """An error budget is used up `times` too fast over both windows of the rule.

    The value is the share of observations in the `long` window that missed the objective, 0-1. `settled` is twice the
    `short` window: the first minutes after a start (kernels compiled, caches filled) are not judged, nor is a start
    that a new exporter did not see. The exporter measures its own window: a server that misses its objective now is
    not healthy.
    """

    is_event = True
    is_in_logs = False
    figure = PERCENT
    needs = "a Prometheus with hours of samples"

    latency: Judged
    times: float
    long: str
    short: str
    settled: str

    def measure(self, past: Past) -> Evidence | None:
        requests, late = past.latency.get("time_to_first_token"), late_share(self.latency, past, self.times)
        if late is None or requests is None or requests.observations < ENOUGH_REQUESTS:
            return None
        started = past.last_seen(START)
        settling = started is not None and past.now - started < past.profile.window_seconds
        if settling or past.watched_seconds < past.profile.window_seconds or past.hung:
            return None
        return late

    def promql(self) -> list[str]:
        of = f'{{latency="{self.latency}"}}'
        missed = "instance:sglang_tuning_latency_breaches:ratio"
        budget = f"clamp_max({self.times:g} * (1 - {threshold('latency', 'objective')}), {MOST_SHARE:g})"
        asked = f"instance:sglang_tuning_latency_observations:increase{self.long}"
        return [
            f"{missed}{self.long}{of} {above(budget)}",
            f"and {ON} ({missed}{self.short}{of} {above(budget)})",
            f'and {ON} {asked}{{latency="time_to_first_token"}} >= {ENOUGH_REQUESTS}',
            f"and {ON} {largest_before('sglang_tuning_latency_observations_total' + of, self.settled, OUTAGE_LOOKBACK)}",
            f"unless {ON} increase(sglang_tuning_server_starts_total[{self.settled}]) > 0",
        ]

    @property
    def description(self) -> str:
        return f"error budget of the {_NAMES[self.latency]} used up {self.times:g} times too fast, over {self.long} and {self.short}"

    def bound(self, profile: Profile) -> tuple[str, str]:
        share = min(self.times * (1 - profile.latency_objective), MOST_SHARE)
        return f"more than {100 * share:.3g} %", ""
