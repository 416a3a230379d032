"""The report as text for a terminal. Pure: a document in, lines out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_tuning_exporter.guide.advice import shown
from sglang_tuning_exporter.guide.findings import HEALTHY, IDLE, NO_CLEAR_BOTTLENECK, NOT_ENOUGH_DATA
from sglang_tuning_exporter.guide.table import BY_ID

if TYPE_CHECKING:
    from sglang_tuning_exporter.guide.document import Document

_WORDS = {
    HEALTHY: "Nothing limits this server: most of the time nothing waits, and nothing needs to be changed.",
    IDLE: "This server had nothing to do.",
    NO_CLEAR_BOTTLENECK: "There was load, but the log does not show one thing that limits this server.",
    NOT_ENOUGH_DATA: "There is too little load in this log to judge the server.",
}


def sentence(verdict: str) -> str:
    """Say a verdict in words."""
    return _WORDS.get(verdict) or BY_ID[verdict].summary


def render(document: Document) -> str:
    """Write the document as text, 30 lines or so."""
    parts = [_head(document), *(_finding(number, item) for number, item in enumerate(document["findings"], 1))]
    parts += [_command(document), _figures(document)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(document: Document) -> str:
    span, sources = document["span"], document["sources"]
    lines = [sentence(document["verdict"])]
    if span["start"] is None:
        when = "times without a date" if span["seconds"] else "no times in the log"
    else:
        when = f"{span['start']} to {span['end']} as printed"
    lines.append(
        f"{', '.join(sources[:3])}{' and more' if len(sources) > 3 else ''}: {when}, {_seconds(span['seconds'])},"
        f" serving {_seconds(span['serving_seconds'])}; profile {document['profile']}"
    )
    return "\n".join(lines)


def _seconds(seconds: float) -> str:
    if seconds < 180:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _finding(number: int, finding: dict[str, Any]) -> str:
    row = BY_ID[finding["diagnosis"]]
    lines = [f"{number}. {row.summary} [{finding['severity']}, confidence {finding['confidence']}]"]
    lines += [f"   {item['name']}: {_figure(item)}" for item in finding["evidence"]]
    for advice in finding["advice"]:
        lines.append("   " + _turn(advice))
        lines.append(f"   why: {advice['why']}")
        if advice["cost"]:
            lines.append(f"   it costs: {advice['cost'][:1].lower()}{advice['cost'][1:]}")
        lines.append(f"   will not help if {advice['will_not_help_if']}")
    lines.append(f"   guide: {finding['guide']}")
    if finding["first_seen"] is not None:
        lines.append(f"   seen: {finding['first_seen']} to {finding['last_seen']}")
    return "\n".join(lines)


def _figure(evidence: dict[str, Any]) -> str:
    if evidence["unit"] == "share":
        return f"{100 * evidence['value']:.0f} % (threshold {100 * evidence['threshold']:.0f} %)"
    unit = {"GB": " GB", "seconds": " s"}.get(evidence["unit"], "")
    return f"{evidence['value']:.4g}{unit} (threshold {evidence['threshold']:g}{unit})"


def _turn(advice: dict[str, Any]) -> str:
    if advice["flag"] is None:
        return f"change: {advice['suggested']}"
    now = f" (now {shown(advice['current'])})" if advice["current"] is not None else ""
    gain = f"; {advice['gain']}" if advice["gain"] else ""
    said = "" if advice["typed"] != advice["flag"] else f" {advice['suggested']}"
    return f"change: {advice['typed']}{said}{now}{gain}"


def _command(document: Document) -> str:
    command = document["command"]
    if command is None:
        return ""
    changes = ", ".join(f"{each['flag']} {each['current']} -> {each['suggested']}" for each in command["changes"])
    secrets = (
        f"\n   (secrets are never read: add {', '.join(command['secrets'])} where set)" if command["secrets"] else ""
    )
    return f"The command line with {changes}:\n   {command['text']}{secrets}"


def _figures(document: Document) -> str:
    counts, last = document["counts"], document["last"]
    failures = {phase: count for phase, count in counts["out_of_memory"].items() if count}
    batches = f"decode batches {counts['decode_batches']}, prefill batches {counts['prefill_batches']}"
    lines = [
        f"lines {counts['lines']}, {batches}, starts {counts['server_starts']}, unrecognised {counts['unrecognised']}",
        f"retractions {counts['retraction_events']} ({counts['retracted_requests']} requests), out of memory "
        + (", ".join(f"{phase} {count}" for phase, count in failures.items()) or "never"),
    ]
    told = [f"{name.replace('_', ' ')} {_word(value)}" for name, value in last.items() if value is not None]
    if told:
        lines.append("at the end: " + ", ".join(told))
    for signal, states in document["shares"].items():
        shown = [f"{state} {100 * share:.0f} %" for state, share in states.items() if share > 0]
        if shown and signal != "activity":
            lines.append(f"{signal}: {', '.join(shown)} of the serving time")
    return "\n".join(lines)


def _word(value: object) -> str:
    return {True: "replayed", False: "not replayed"}[value] if isinstance(value, bool) else f"{value}"
