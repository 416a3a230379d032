"""The report as a JSON document, schema version "1" (docs/report.schema.json). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from sglang_tuning_exporter.report.analysis import Analysis
from sglang_tuning_exporter.report.chapters import (
    alerts_document,
    earlier_document,
    judged_document,
    phases_document,
    starts_document,
)
from sglang_tuning_exporter.sglang.events import OUT_OF_MEMORY_PHASES


@dataclass(frozen=True, slots=True)
class Input:
    """The inputs of a report. `start` and `end` are printed times, unix seconds; `spans` are the alerts."""

    sources: list[str]
    lines: int
    unrecognised: int
    start: float | None
    end: float | None
    notes: Sequence[str] = ()
    spans: Sequence[FiredAlert] = ()


def build(given: Input, analysis: Analysis, against: Document | None = None) -> Document:
    """Return the document, with the comparison `against` other logs; every key is there, `null` where the log does not show a figure."""
    judged = analysis.conclude()
    judgement, totals, facts, last = judged.judgement, analysis.totals, analysis.state.facts, analysis.last
    return {
        "schema_version": SCHEMA_VERSION,
        "sources": given.sources,
        "profile": analysis.profile.name,
        "span": {
            "start": iso(given.start),
            "end": iso(given.end),
            "seconds": number(round(analysis.seconds, 3)),
            "serving_seconds": number(round(analysis.serving_seconds, 3)),
        },
        "server": {"version": facts.version, "args": plain(facts.args)},
        "counts": {
            "lines": given.lines,
            "decode_batches": analysis.batches("decode"),
            "prefill_batches": analysis.batches("prefill"),
            "retraction_events": int(totals.counts["retraction_events"]),
            "retracted_requests": int(totals.counts["log_retracted_requests"]),
            "out_of_memory": {phase: analysis.state.out_of_memory.get(phase, 0) for phase in OUT_OF_MEMORY_PHASES},
            "server_starts": analysis.state.starts,
            "unrecognised": given.unrecognised,
        },
        "last": {
            "running_requests": last.running,
            "queued_requests": last.queued,
            "token_usage": last.usage,
            "cuda_graph": analysis.graph,
        },
        "available_gpu_memory_gb": analysis.available_gb,
        "shares": shares(judgement.past.recent),
        "verdict": judgement.verdict,
        "command": command_document(judgement, judged.facts),
        "starts": starts_document(analysis),
        "phases": phases_document(analysis),
        "alerts": alerts_document(given.spans, analysis.begin),
        "comparison": against,
        "notes": list(given.notes),
        "judged": judged_document(judged, analysis),
        "earlier": earlier_document(judged, analysis),
        "findings": [
            {
                **finding_document(each, *judged.sightings.of(each)),
                "run": None if judged.run is None else judged.run.number,
            }
            for each in judgement.findings
        ],
    }
