"""Failures in the log. They are counted when they happened, even if nobody scraped meanwhile."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from sglang_tuning_exporter.diagnosis.conditions.condition import WINDOW, Condition
from sglang_tuning_exporter.diagnosis.evidence import Evidence, Past
from sglang_tuning_exporter.diagnosis.promql import events_increased, one_of
from sglang_tuning_exporter.sglang.events import LivenessKind, OutOfMemoryPhase
from sglang_tuning_exporter.state.profiles import Profile

COUNT = '{{ $value | printf "%.0f" }}'


def out_of_memory(*phases: OutOfMemoryPhase) -> list[str]:
    """Return PromQL: memory ran out in one of these phases."""
    counter = f"sglang_tuning_out_of_memory_total{{{one_of('phase', phases)}}}"
    return events_increased(counter, "sglang_tuning_out_of_memory_age_seconds", "phase")


def logged(*events: LivenessKind) -> list[str]:
    """Return PromQL: one of these liveness events was logged."""
    counter = f"sglang_tuning_liveness_events_total{{{one_of('event', events)}}}"
    return events_increased(counter, "sglang_tuning_liveness_event_age_seconds", "event")


@dataclass(frozen=True, slots=True)
class Failures(Condition):
    """The server ran out of memory in one of these phases within the window."""

    protects = "memory"
    figure = COUNT
    is_event = True
    fires_on = "events"
    needs = "a log"

    phases: tuple[OutOfMemoryPhase, ...]

    def measure(self, past: Past) -> Evidence | None:
        count = sum(past.event_counts.get(phase, 0) for phase in self.phases)
        return Evidence("out-of-memory failures", float(count), 0.0, "count", last_seen=self.last_seen(past))

    @property
    def measured_by(self) -> tuple[Hashable, ...]:
        return self.phases

    def promql(self) -> list[str]:
        return out_of_memory(*self.phases)

    @property
    def counted(self) -> tuple[tuple[str, str], ...]:
        return tuple((event, WINDOW) for event in self.phases)

    @property
    def description(self) -> str:
        return f"out of memory in {', '.join(self.phases)}, ten minutes"

    def bound(self, profile: Profile) -> tuple[str, str]:
        return "at least one", " in the last ten minutes"
