"""A server that makes no progress."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_tuning_exporter.diagnosis.conditions.condition import WINDOW, Condition, Samples
from sglang_tuning_exporter.diagnosis.conditions.failures import logged
from sglang_tuning_exporter.diagnosis.evidence import WATCHDOG, Evidence, Past
from sglang_tuning_exporter.diagnosis.promql import ON, firing, if_found, last_known, query_in_template
from sglang_tuning_exporter.state.profiles import Profile

_HANGS = 'the {{ . | first | label "stage" }} hangs: requests are there, and it has done nothing for a minute'
_SPOKEN = "a watchdog saw no progress for --watchdog-timeout seconds"


@dataclass(frozen=True, slots=True)
class Stuck(Condition):
    """Requests run or wait and nothing moves, or SGLang's own watchdog timed out within the window."""

    description = "`stuck_stage` of the tokenizer, scheduler or detokenizer, or a watchdog timeout in the log"
    counted = ((WATCHDOG, WINDOW),)
    measured_by = (WATCHDOG,)
    figure = if_found(query_in_template("sglang_tuning_stuck_stage", comparison=" == 1"), _HANGS, _SPOKEN)
    is_event = True
    has_figure = False
    needs = "a log or metrics"

    def measure(self, past: Past) -> Evidence | None:
        hang, timed_out = past.hang, past.event_counts.get(WATCHDOG, 0)
        name, words, headline = "processes that hang, or whose watchdog timed out", "", ""
        if hang is not None:
            words = hang.sentence
            headline = f"{words[:1].upper()}{words[1:]}."
        elif timed_out:
            words = f"the watchdog of the {past.watchdog or 'scheduler'} saw no progress for --watchdog-timeout seconds"
        last = past.last_seen(WATCHDOG) if hang is None else None
        return Evidence(
            name, float(hang is not None) + timed_out, 0.0, "count", last_seen=last, text=words, headline=headline
        )

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
