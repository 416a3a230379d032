"""Families about what limits the server: conditions with their limits, alerts, advice, the verdict, and figures for autoscalers."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_tuning_exporter.core.exposed import Advice, conditions, scale_out_helps
from sglang_tuning_exporter.core.rows import BY_ID
from sglang_tuning_exporter.core.scrapes import STAGES
from sglang_tuning_exporter.serve.metrics.families import Family, gauge, info, shortened, single
from sglang_tuning_exporter.serve.metrics.view import SidecarView


def findings(sidecar: SidecarView, now: float) -> Iterable[Family]:
    """Return the families of the verdict, and of everything that it rests on."""
    judgement, watch = sidecar.judge(now), sidecar.watch
    assert watch.measured is not None
    shown = list(conditions(watch.measured))
    doc = (
        "The figure that decides a diagnosis over its window, turned so that above its limit is bad; one unit for each diagnosis"
        " (docs/diagnoses.md). Absent while it is not measured."
    )
    values = gauge("condition", doc, "diagnosis")
    yield values.with_samples((each.diagnosis, each.value) for each in shown if each.value is not None)
    doc = "The limit in force for sglang_tuning_condition, in the same unit."
    yield gauge("condition_limit", doc, "diagnosis").with_samples((each.diagnosis, each.limit) for each in shown)
    doc = (
        "1 once a condition was above its limit for its wait without a break, 0 once it was not for five minutes or as long as its row says;"
        " absent while neither is known."
    )
    clocks = watch.clocks.by_row.items()
    alerts = gauge("alert", doc, "diagnosis")
    alerts.with_samples((name, float(clock.value)) for name, clock in clocks if clock.value is not None)
    # Never absent: a rule would hold the last 1 for a while.
    accepted = dict(sidecar.watch.server.profile.accepted)
    yield alerts.with_samples((muted, 0.0) for muted in accepted if BY_ID[muted].alert)
    doc = "1 for each diagnosis that --accept mutes, and why: it is not in verdict, alerts and conditions."
    yield gauge("accepted_info", doc, "diagnosis", "reason").with_samples(
        (muted, shortened(reason), 1.0) for muted, reason in accepted.items()
    )
    doc = (
        "Since when this advice stands, in unix seconds. Flag as typed for the running release (empty: advice to people), its present value,"
        " the value to try, why, when it will not help, and what it costs."
    )
    advice = gauge("advice_timestamp_seconds", doc, "diagnosis", *Advice._fields[:-1])
    for diagnosis, each in watch.words.advice.items():
        if diagnosis in accepted:
            continue
        advice.add_metric(map(shortened, (diagnosis, *each.words)), sidecar.unix(each.since))
    yield advice
    verdict = watch.words.verdict
    assert verdict is not None
    doc = "What limits the server now: a diagnosis, or why there is none; how urgent it is, and a sentence without figures."
    yield info(
        "verdict", doc, {"verdict": verdict.verdict, "level": verdict.level, "sentence": shortened(verdict.sentence)}
    )
    doc = "Since when the verdict is the same, in unix seconds."
    yield single("verdict_since_timestamp_seconds", doc, sidecar.unix(verdict.since))
    helps = scale_out_helps(judgement)
    doc = "1 where a further replica would help, by the verdict; 0 where a flag comes first, or neither helps (clients, grammar, imbalance)."
    yield single("scale_out_helps", doc, None if helps is None else float(helps))
    stuck = watch.measured.view.stuck
    stage = gauge("stuck_stage", "1 for the stage that hangs: requests wait for it, and it makes no progress.", "stage")
    yield stage.with_samples((each, float(stuck is not None and each == stuck.stage)) for each in STAGES)
    doc = "Why the server ended: the class of the line of its log that explains it, and its words, without secrets. Absent while the server may run."
    end, said = gauge("end_info", doc, "class", "words"), watch.server.end_explanation
    words = ("unknown", watch.server.ended) if said is None else (said.ending, said.words)
    yield end.with_samples([(*map(shortened, words), 1.0)] if watch.server.ended else [])
