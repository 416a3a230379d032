"""A server that makes no progress, or keeps restarting."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_tuning_exporter.diagnosis.conditions.condition import WINDOW, Condition, Samples
from sglang_tuning_exporter.diagnosis.conditions.memory import COUNT
from sglang_tuning_exporter.diagnosis.evidence import RESTART_LOOP_SECONDS, WATCHDOG, Evidence, Past
from sglang_tuning_exporter.diagnosis.promql import (
    ON,
    events_increased,
    firing,
    if_found,
    last_known,
    one_of,
    query_in_template,
)
from sglang_tuning_exporter.sglang.events import LivenessKind
from sglang_tuning_exporter.state.journal import START
from sglang_tuning_exporter.state.profiles import Profile

_HANGS = 'the {{ . | first | label "stage" }} hangs: requests are there, and it has done nothing for a minute'
_SPOKEN = "a watchdog saw no progress for --watchdog-timeout seconds"


def logged(*events: LivenessKind) -> list[str]:
    """Return PromQL: one of these liveness events was logged."""
    counter = f"sglang_tuning_liveness_events_total{{{one_of('event', events)}}}"
    return events_increased(counter, "sglang_tuning_liveness_event_age_seconds", "event")


@dataclass(frozen=True, slots=True)
class Stuck(Condition):
    """Requests run or wait and nothing moves, or SGLang's own watchdog timed out within the window."""

    description = "`stuck_stage` of the tokenizer, scheduler or detokenizer, or a watchdog timeout in the log"
    counted = ((WATCHDOG, WINDOW),)
    figure = if_found(query_in_template("sglang_tuning_stuck_stage", comparison=" == 1"), _HANGS, _SPOKEN)
    is_event = True
    has_figure = False
    needs = "a log or metrics"

    def measure(self, past: Past) -> Evidence | None:
        name, timed_out = "processes that hang, or whose watchdog timed out", past.event_counts.get(WATCHDOG, 0)
        if past.hang is not None:
            words = past.hang.sentence
            headline = f"{words[:1].upper()}{words[1:]}."
            return Evidence(name, 1.0 + timed_out, 0.0, "count", text=words, headline=headline)
        words = f"the watchdog of the {past.watchdog or 'scheduler'} saw no progress for --watchdog-timeout seconds"
        last, text = past.last_seen(WATCHDOG), words if timed_out else ""
        return Evidence(name, float(timed_out), 0.0, "count", last_seen=last, text=text)

    def promql(self) -> list[str]:
        timed_out, *rest = logged(WATCHDOG)
        # A server that hung and then died has not recovered: the alert fires until the one about its end does.
        fired = f"max without (alertname, alertstate, severity, diagnosis) ({firing('SGLangSchedulerStuck')})"
        died = f"{fired} and {ON} {last_known('sglang_tuning_up')} == 0"
        return [
            f"max without (stage) ({last_known('sglang_tuning_stuck_stage')}) == 1",
            "or " + timed_out,
            *rest,
            f"or ({died} unless {ON} {firing('SGLangServerDown')})",
        ]

    def fires(self, samples: Samples) -> bool:
        return samples.hangs or self.has_happened(samples)

    def bound(self, profile: Profile) -> tuple[str, str]:
        return "a stage made no progress for a minute while requests waited, or SGLang's watchdog timed out", ""


_LOOP_WINDOW = f"{RESTART_LOOP_SECONDS / 60:.0f}m"


@dataclass(frozen=True, slots=True)
class Starts(Condition):
    """The server started at least so many times within half an hour."""

    counted = ((START, _LOOP_WINDOW),)
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
        counted, often = f"sglang_tuning_server_starts_total[{_LOOP_WINDOW}]", f"> {self.at_least - 0.5:g}"
        rose = f"max_over_time({counted}) - min_over_time({counted})"
        return [f"increase({counted}) {often}", f"and ({rose} {often} or resets({counted}) > 0)"]

    def fires(self, samples: Samples) -> bool:
        return samples.increase(START, _LOOP_WINDOW) > self.at_least - 0.5

    @property
    def description(self) -> str:
        return f"{self.at_least} starts in 30 minutes"

    def bound(self, profile: Profile) -> tuple[str, str]:
        return f"at least {self.at_least}", ""
