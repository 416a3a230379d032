"""Findings as JSON (`/api/v1/findings`): docs/findings.schema.json. Pure."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

from sglang_tuning_exporter.capacity.estimate import Estimate
from sglang_tuning_exporter.diagnosis.advice import Advice
from sglang_tuning_exporter.diagnosis.command import command_line
from sglang_tuning_exporter.diagnosis.evidence import Evidence
from sglang_tuning_exporter.diagnosis.expectation import Expected
from sglang_tuning_exporter.diagnosis.findings import Finding, Judgement
from sglang_tuning_exporter.sglang.log.prefix import FIRST_DATED_SECOND
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.signals import IDLE, SIGNALS, STATES, UNKNOWN
from sglang_tuning_exporter.state.totals import Totals

SCHEMA_VERSION = "1"
_DEPTH = 16
Document = dict[str, Any]


def iso(time: float | None) -> str | None:
    """Return unix seconds as `2025-11-20T11:40:00Z`; None if the log has no dates."""
    if time is None or time < FIRST_DATED_SECOND:
        return None
    try:
        moment = dt.datetime.fromtimestamp(time, dt.timezone.utc)
    except (OverflowError, ValueError, OSError):
        return None
    return moment.isoformat(timespec="milliseconds" if moment.microsecond else "seconds").replace("+00:00", "Z")


def number(value: float | None) -> float | None:
    """Return a whole number as int; None for what JSON cannot hold."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() else round(value, 6)


def plain(value: object, depth: int = _DEPTH) -> Any:
    """Return a printed argument as JSON can hold it."""
    if isinstance(value, dict):
        return {str(key): plain(item, depth - 1) for key, item in value.items()} if depth else "…"
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item, depth - 1) for item in value] if depth else "…"
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)


def shares(totals: Totals) -> Document:
    """Return the share of serving time in each state; empty without any."""
    if totals.serving_seconds() <= 0:
        return {}
    known: Document = {}
    for signal in SIGNALS:
        found = {state: totals.share(signal, state) for state in STATES[signal] if state not in {IDLE, UNKNOWN}}
        known[signal] = {state: round(share, 6) for state, share in found.items() if share is not None}
    return known


def finding_document(finding: Finding, first: float | None, last: float | None) -> Document:
    """Return a finding; `first` and `last` are when it was seen, in unix seconds."""
    return {
        "diagnosis": finding.diagnosis.id,
        "summary": finding.summary(last),
        "because": list(finding.because),
        "severity": finding.diagnosis.severity,
        "confidence": finding.confidence,
        "evidence": [_evidence(evidence) for evidence in finding.evidence],
        "advice": [_advice(advice) for advice in finding.advice],
        "guide": finding.diagnosis.guide,
        "first_seen": iso(first),
        "last_seen": iso(last),
    }


def checks_document(judgement: Judgement) -> list[Document]:
    """Return every row that was checked, passed or not."""
    return [
        {
            "diagnosis": check.diagnosis.id,
            "passed": check.passed,
            "evidence": None if check.evidence is None else _evidence(check.evidence),
        }
        for check in judgement.checks
    ]


def command_document(judgement: Judgement, facts: ServerFacts) -> Document | None:
    """Return the new command line; None if no flag is advised, or the arguments are not known."""
    changes = judgement.changes
    command = command_line(facts, changes) if changes else None
    if command is None or not command.changes:
        return None
    return {
        "text": command.text,
        "release": command.release,
        "secrets": list(command.secrets),
        "changes": [{"flag": each.flag, "current": each.old, "suggested": each.new} for each in command.changes],
    }


def _evidence(evidence: Evidence) -> Document:
    return {
        "name": evidence.name,
        "value": number(evidence.value),
        "threshold": number(evidence.threshold),
        "unit": evidence.unit,
    }


def _setting(advice: Advice, value: float | str | None) -> float | str | None:
    if advice.is_switch and value is not None:
        return "on" if value else "off"
    return value if isinstance(value, str) else number(value)


def _advice(advice: Advice) -> Document:
    return {
        "flag": advice.flag or None,
        "current": _setting(advice, advice.current),
        "suggested": _setting(advice, advice.suggested) if advice.suggested is not None else advice.suggestion,
        "why": advice.why,
        "will_not_help_if": advice.will_not_help_if,
        "gain": advice.gain or None,
        "cost": advice.cost or None,
        "typed": advice.typed or None,
        "expected": None if advice.expected is None else _expected(advice.expected),
    }


def _expected(expected: Expected) -> Document:
    """Return the expected effect of a change: each figure before and after, with its interval, and the basis."""
    now, then = expected.now, expected.then
    return {
        "tokens_per_second": _predicted(now.tokens_per_second, then.tokens_per_second),
        "inter_token_p50_seconds": _predicted(now.inter_token_p50_seconds, then.inter_token_p50_seconds),
        "gain": number(expected.gain),
        "basis": expected.basis,
    }


def _predicted(now: Estimate, then: Estimate) -> Document:
    low, high = then.with_drift.low, then.with_drift.high
    return {"now": number(now.value), "value": number(then.value), "interval": [number(low), number(high)]}
