"""A server that keeps restarting."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_tuning_exporter.diagnosis.conditions.condition import Condition, Samples
from sglang_tuning_exporter.diagnosis.conditions.failures import COUNT
from sglang_tuning_exporter.diagnosis.evidence import RESTART_LOOP_SECONDS, Evidence, Past
from sglang_tuning_exporter.state.journal import START
from sglang_tuning_exporter.state.profiles import Profile

_WINDOW = f"{RESTART_LOOP_SECONDS / 60:.0f}m"


@dataclass(frozen=True, slots=True)
class Starts(Condition):
    """The server started at least so many times within half an hour."""

    counted = ((START, _WINDOW),)
    measured_by = (START,)
    figure = COUNT
    is_event = True
    fires_on = "events"
    needs = "a log or metrics"

    at_least: int

    def measure(self, past: Past) -> Evidence | None:
        since = past.now - RESTART_LOOP_SECONDS
        return Evidence("starts in 30 minutes", past.starts, self.at_least - 1, "count", since=since)

    def promql(self) -> list[str]:
        """Return PromQL: the counter rose at least so far.

        `increase` extrapolates: with missed scrapes it returns three for two starts. So the plain difference must
        agree, unless the counter was reset.
        """
        counted, often = f"sglang_tuning_server_starts_total[{_WINDOW}]", f"> {self.at_least - 0.5:g}"
        rose = f"max_over_time({counted}) - min_over_time({counted})"
        return [f"increase({counted}) {often}", f"and ({rose} {often} or resets({counted}) > 0)"]

    def fires(self, samples: Samples) -> bool:
        return samples.increase(START, _WINDOW) > self.at_least - 0.5

    @property
    def description(self) -> str:
        return f"{self.at_least} starts in 30 minutes"

    def bound(self, profile: Profile) -> tuple[str, str]:
        return f"at least {self.at_least}", ""
