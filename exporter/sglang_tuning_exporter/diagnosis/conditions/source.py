"""Troubles with the data sources."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from sglang_tuning_exporter.diagnosis.conditions.condition import WINDOW, Condition
from sglang_tuning_exporter.diagnosis.evidence import RANKS_OUTLIVE_SECONDS, Evidence, Past
from sglang_tuning_exporter.diagnosis.promql import if_found, query_in_template
from sglang_tuning_exporter.sglang.events import ENDS
from sglang_tuning_exporter.state.journal import START, WORK
from sglang_tuning_exporter.state.profiles import Profile


@dataclass(frozen=True, slots=True)
class SourceTrouble(Condition):
    """A data source has a problem.

    Prometheus uses the expression. `trouble` is the exporter's word for it, if it can see it; `words` say what is
    seen. `events` are what a log alone can count, within `window`.
    """

    measured_by = ENDS
    kind = "remark"
    is_event = True
    fires_on = "events"
    is_advice_fixed = True
    has_figure = False

    expression: str
    trouble: str = ""
    words: str = ""
    events: tuple[str, ...] = ()
    is_end: bool = False
    window: str = WINDOW

    @property
    def description(self) -> str:
        return self.words

    @property
    def needs(self) -> str:
        return "a sidecar beside the server" if self.trouble else "a Prometheus"

    @property
    def is_measured(self) -> bool:
        return bool(self.trouble)

    @property
    def is_in_logs(self) -> bool:
        return bool(self.events)

    @property
    def annotation_value(self) -> str:
        if not self.is_end:
            return self.words
        return if_found(query_in_template("sglang_tuning_end_info"), '{{ . | first | label "how" }}', self.words)

    def measure(self, past: Past) -> Evidence | None:
        if not self.trouble:
            return None
        worked = max(filter(None, (past.last_seen(WORK), past.last_seen(START))), default=None)
        since = -inf if worked is None else worked - RANKS_OUTLIVE_SECONDS
        words = past.words.get(self.trouble) or self.words
        crash = f"SGLang has ended: {past.crash}." if past.crash and self.is_end else ""
        held = float(self.trouble in past.troubles)
        return Evidence(words or self.trouble, held, 0.0, "count", since=since, text=words, headline=crash)

    def promql(self) -> list[str]:
        return self.expression.splitlines()

    @property
    def counted(self) -> tuple[tuple[str, str], ...]:
        return tuple((event, self.window) for event in self.events)

    def bound(self, profile: Profile) -> tuple[str, str]:
        return self.words, ""
