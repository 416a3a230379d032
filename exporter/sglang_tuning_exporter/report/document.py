"""The report as a JSON document, schema version "1" (docs/report.schema.json). Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tuning_exporter.diagnosis.json_findings import (
    SCHEMA_VERSION,
    Document,
    command_document,
    finding_document,
    iso,
    number,
    plain,
    shares,
)
from sglang_tuning_exporter.report.alarms import FiredAlert
from sglang_tuning_exporter.report.phases import Run, stretch
from sglang_tuning_exporter.report.runs import other_starts
from sglang_tuning_exporter.sglang.events import OUT_OF_MEMORY_PHASES

if TYPE_CHECKING:
    from sglang_tuning_exporter.report.report import ReadLogs


def build(reading: ReadLogs, against: Document | None = None) -> Document:
    """Return the document, with the comparison `against` other logs; every key is there, `null` where the log does not show a figure."""
    analysis, logs, (start, end) = reading.analysis, reading.logs, reading.span
    judged, state, begin, last = analysis.conclude(), analysis.state, analysis.begin, analysis.last
    judgement, counts, run = judged.judgement, state.totals().counts, judged.run
    judged_from, judged_to = (run.begin, run.end) if run else (begin or 0.0, (begin or 0.0) + analysis.seconds)
    run_number = run.number if run else None
    return {
        "schema_version": SCHEMA_VERSION,
        "sources": logs.names,
        "profile": analysis.profile.name,
        "span": {
            "start": iso(start),
            "end": iso(end),
            "seconds": number(round(analysis.seconds, 3)),
            "serving_seconds": number(round(state.served_seconds, 3)),
        },
        "server": {"version": state.facts.version, "args": plain(state.facts.args)},
        "counts": {
            "lines": logs.lines,
            "decode_batches": analysis.batches("decode"),
            "prefill_batches": analysis.batches("prefill"),
            "retraction_events": int(counts["retraction_events"]),
            "retracted_requests": int(counts["log_retracted_requests"]),
            "out_of_memory": {phase: state.out_of_memory.get(phase, 0) for phase in OUT_OF_MEMORY_PHASES},
            "server_starts": state.starts,
            "unrecognised": logs.unrecognised,
        },
        "last": {**last, "cuda_graph": analysis.graph},
        "available_gpu_memory_gb": analysis.available_gb,
        "shares": shares(judgement.past.recent),
        "verdict": judgement.verdict,
        "command": command_document(judgement, judged.facts),
        "starts": [_start(each, begin) for each in analysis.course.runs],
        "phases": list(analysis.course.phases),
        "alerts": [_alert(span, begin) for span in reading.alarms.spans()],
        "comparison": against,
        "notes": reading.notes,
        "judged": {
            "run": run_number,
            **stretch(judged_from, judged_to, begin),
            "serving_seconds": number(round(judged.figures.serving_seconds, 3)),
        },
        "earlier": other_starts(analysis.course.runs, judged),
        "findings": [
            {**finding_document(each, *judged.sightings.of(each)), "run": run_number} for each in judgement.findings
        ],
    }


def _start(run: Run, begin: float | None) -> Document:
    """Return what a start was like; the first may have begun before the log."""
    start_up = None if run.ready is None or run.start is None else number(round(run.ready - run.start, 3))
    return {
        "run": run.number,
        **stretch(run.begin, max(run.end, run.begin), begin),
        "start": iso(run.start),
        "end": iso(run.end),
        "started_in_log": run.start is not None,
        "ready_after_seconds": start_up,
        "ending": run.ending,
        "memory": run.memory,
        "verdict": run.verdict,
        "figures": None if run.figures is None else run.figures.document,
        "changed_args": run.changed,
        "against_last": run.against_last,
    }


def _alert(span: FiredAlert, begin: float | None) -> Document:
    names = {"alert": span.alert, "diagnosis": span.diagnosis, "severity": span.severity}
    return {**names, **stretch(span.start, span.end, begin), "ongoing": span.ongoing}
