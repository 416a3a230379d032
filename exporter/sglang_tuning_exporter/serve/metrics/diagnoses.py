"""Families about what limits the server: the verdict, the diagnoses that hold, and what to change."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_tuning_exporter.diagnosis.evidence import Past
from sglang_tuning_exporter.diagnosis.findings import Judgement
from sglang_tuning_exporter.diagnosis.scaling import DEMAND_SECONDS, capacity_ratio, demands, scale_out_helps
from sglang_tuning_exporter.serve.metrics.families import Family, gauge, shortened, single
from sglang_tuning_exporter.serve.metrics.view import SidecarView
from sglang_tuning_exporter.state.stages import STAGES


def findings(sidecar: SidecarView, now: float) -> Iterable[Family]:
    """Return the families of the verdict, and of everything that it rests on."""
    judgement = sidecar.judge(now)
    doc = "1 for what limits the server now: a diagnosis, or why there is none."
    yield gauge("verdict", doc, "verdict", "severity").with_samples([(judgement.verdict, judgement.severity, 1.0)])
    yield from _scaling(judgement, sidecar.past(now, DEMAND_SECONDS))
    stuck = gauge("stuck_stage", "1 for the stage that hangs: requests wait for it, and it makes no progress.", "stage")
    yield stuck.with_samples((stage, float(stage == judgement.past.stage)) for stage in STAGES)
    end = gauge("end_info", "How the log says that the server ended; absent while the server may run.", "how")
    how = judgement.past.words.get("server_down") if sidecar.state.life.died else None
    yield end.with_samples([(shortened(how), 1.0)] if how else [])
    doc = (
        "Since when the first advice of a diagnosis that holds has been the same, in unix seconds. Flag as typed for the running"
        " release (empty: advice to people), its present value, the value to try, and what that is expected to bring (docs/capacity.md)."
    )
    labels = ("diagnosis", "flag", "current", "suggested", "direction", "expected")
    recommended = gauge("recommendation_timestamp_seconds", doc, *labels)
    for values, given in sidecar.recommended_since.items():
        expected = "" if given.expected is None else given.expected.words
        recommended.add_metric([shortened(word) for word in (*values, expected)], given.since)
    yield recommended
    active = gauge("diagnosis_active", "1 while this diagnosis holds over the last 10 minutes.", "diagnosis")
    found = {finding.diagnosis.id for finding in judgement.findings}
    measured = [check.diagnosis.id for check in judgement.checks if check.diagnosis.condition.is_measured]
    yield active.with_samples((diagnosis, float(diagnosis in found)) for diagnosis in measured)
    yield from _figures(judgement)
    yield from _advised(judgement)


def _figures(judgement: Judgement) -> Iterable[Family]:
    """Return the families of the evidence for each finding, and of what its advice is expected to bring."""
    doc = "The figure that decides a diagnosis that holds, in its unit: share (0-1), ratio, per_minute, GB, seconds or count."
    evidence = gauge("diagnosis_evidence", doc, "diagnosis", "unit")
    doc = "Expected relative change of generation throughput (0.39: 39 % more) from a diagnosis's first advice, by the measured step times."
    gains = gauge("expected_gain_ratio", doc, "diagnosis")
    for finding in judgement.findings:
        first = finding.evidence[0]
        if finding.diagnosis.condition.has_figure and not first.text:
            evidence.add_metric([finding.diagnosis.id, first.unit], first.value)
        predicted = (each.expected.gain for each in finding.advice if each.expected is not None)
        gains.add_metric([finding.diagnosis.id], next(predicted, None))
    return evidence, gains


def _advised(judgement: Judgement) -> Iterable[Family]:
    """Return the families of the values to try: numbers, words, and advice to people."""
    doc = "What that argument is set to, as its flag (the printed conservativeness is 0.3 of the flag under DP attention)."
    now_set = gauge("recommended_arg_current", doc, "arg", "diagnosis")
    doc = "The value to try for an argument, while a diagnosis that sets it holds."
    advised = gauge("recommended_arg", doc, "arg", "diagnosis")
    doc = "The word to try for an argument that takes words; without `arg`, what people should do instead of setting a flag."
    words = gauge("recommended_setting_info", doc, "arg", "value", "diagnosis")
    for finding in judgement.findings:
        row = finding.diagnosis
        for advice in finding.advice if row.condition.is_measured else ():
            if isinstance(advice.suggested, str):
                words.add_metric([advice.arg, advice.suggested, row.id], 1.0)
            elif advice.arg and advice.suggested is not None:
                advised.add_metric([advice.arg, row.id], advice.suggested)
                if isinstance(advice.current, (int, float)):
                    now_set.add_metric([advice.arg, row.id], advice.current)
            elif (row.remedy.arg or finding.because) and not advice.arg:
                words.add_metric(["", advice.suggestion, row.id], 1.0)
    return advised, now_set, words


def _scaling(judgement: Judgement, lately: Past) -> Iterable[Family]:
    """Return the families for autoscalers; without samples for a server that is down, stuck or starting."""
    doc = (
        "Demand of the last 2 minutes over what this server can do within its objectives: the greatest of prefill backlog / first-token"
        " objective, inter-token time / its objective, KV cache asked for / KV cache."
    )
    yield single("capacity_ratio", doc, capacity_ratio(lately))
    demanded = gauge("demand_ratio", "The parts of sglang_tuning_capacity_ratio, each where it is known.", "of")
    yield demanded.with_samples((each.of, each.ratio) for each in demands(lately))
    helps = scale_out_helps(judgement)
    doc = "1 where a further replica would help, by the verdict; 0 where a flag comes first, or neither helps (clients, grammar, imbalance)."
    yield single("scale_out_helps", doc, None if helps is None else float(helps))
