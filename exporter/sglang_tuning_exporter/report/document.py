"""The report as a JSON document, schema version "1" (docs/report.schema.json). Pure."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_tuning_exporter.report.inputs import FIRST_DATED_SECOND
from sglang_tuning_exporter.sglang.events import OUT_OF_MEMORY_PHASES
from sglang_tuning_exporter.signals import IDLE, SIGNALS, STATES, UNKNOWN

if TYPE_CHECKING:
    from sglang_tuning_exporter.guide.advice import Advice
    from sglang_tuning_exporter.guide.findings import Finding
    from sglang_tuning_exporter.report.analysis import Analysis

SCHEMA_VERSION = "1"
_DEPTH = 16
Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Input:
    """What is known of the input as such. `start` and `end` are printed times, unix seconds."""

    sources: list[str]
    lines: int
    unrecognised: int
    start: float | None
    end: float | None


def iso(time: float | None) -> str | None:
    """Write unix seconds as `2025-11-20T11:40:00Z`; `None` where no date was printed."""
    if time is None or time < FIRST_DATED_SECOND:
        return None
    try:
        moment = dt.datetime.fromtimestamp(time, dt.timezone.utc)
    except (OverflowError, ValueError, OSError):
        return None
    return moment.isoformat(timespec="milliseconds" if moment.microsecond else "seconds").replace("+00:00", "Z")


def number(value: float | None) -> float | None:
    """Write a whole figure without its point."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() else round(value, 6)


def plain(value: object, depth: int = _DEPTH) -> Any:
    """Turn a printed argument into what JSON can hold."""
    if isinstance(value, dict):
        return {str(key): plain(item, depth - 1) for key, item in value.items()} if depth else "…"
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item, depth - 1) for item in value] if depth else "…"
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)


def build(given: Input, analysis: Analysis) -> Document:
    """Make the document; every key is there, `null` where the log does not tell."""
    judgement = analysis.conclude()
    totals, facts, last = analysis.totals, analysis.state.facts, analysis.last
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
        "shares": _shares(analysis),
        "verdict": judgement.verdict,
        "findings": [_finding(finding, analysis) for finding in judgement.findings],
    }


def _shares(analysis: Analysis) -> Document:
    totals = analysis.totals
    if totals.serving_seconds() <= 0:
        return {}
    shares: Document = {}
    for signal in SIGNALS:
        told = {state: totals.share(signal, state) for state in STATES[signal] if state not in {IDLE, UNKNOWN}}
        shares[signal] = {state: round(share, 6) for state, share in told.items() if share is not None}
    return shares


def _finding(finding: Finding, analysis: Analysis) -> Document:
    first, last = analysis.seen(finding)
    return {
        "diagnosis": finding.diagnosis.id,
        "severity": finding.diagnosis.severity,
        "confidence": finding.confidence,
        "evidence": [
            {
                "name": evidence.name,
                "value": number(evidence.value),
                "threshold": number(evidence.threshold),
                "unit": evidence.unit,
            }
            for evidence in finding.evidence
        ],
        "advice": [_advice(advice) for advice in finding.advice],
        "guide": finding.diagnosis.guide,
        "first_seen": iso(first),
        "last_seen": iso(last),
    }


def _setting(value: float | str | None) -> float | str | None:
    return value if isinstance(value, str) else number(value)


def _advice(advice: Advice) -> Document:
    return {
        "flag": advice.flag or None,
        "current": _setting(advice.current),
        "suggested": _setting(advice.suggested) if advice.suggested is not None else advice.suggestion,
        "why": advice.why,
        "will_not_help_if": advice.will_not_help_if,
        "gain": advice.gain or None,
        "cost": advice.cost or None,
        "typed": advice.typed or None,
    }
