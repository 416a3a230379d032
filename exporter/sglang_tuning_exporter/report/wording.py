"""The report's sentences, the same on a terminal and as a page. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from sglang_tuning_exporter.diagnosis.evidence import RESERVE, WATCHDOG
from sglang_tuning_exporter.diagnosis.findings import (
    HEALTHY,
    IDLE,
    NO_CLEAR_BOTTLENECK,
    NOT_ENOUGH_DATA,
    STARTING,
    confidence_of,
)
from sglang_tuning_exporter.diagnosis.promql import duration as parsed_duration
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.report.samples import EVALUATION_SECONDS
from sglang_tuning_exporter.state.journal import START

if TYPE_CHECKING:
    from sglang_tuning_exporter.diagnosis.json_findings import Document

_VERDICTS = {
    HEALTHY: "Nothing limits this server: most of the time nothing waits for long, and nothing needs to be changed.",
    IDLE: "This server had nothing to do.",
    NO_CLEAR_BOTTLENECK: "There was load, but the log does not show one thing that limits this server.",
    STARTING: "The server was still starting.",
    NOT_ENOUGH_DATA: "There is too little load in this log to judge the server.",
}
PHASES = {
    "start_up": "starting",
    "load": "load",
    "idle": "idle",
    "crash": "crash",
    "stop": "stop",
    "silence": "silence",
}
ENDINGS = {
    "crash": "it crashed",
    "stop": "it was asked to end",
    "silence": "it ended without a message",
    "log_ends": "the log ends",
}
CHANGES = {
    "better": "better",
    "worse": "worse",
    "mixed": "better in part, worse in part",
    "same": "no clear difference",
    "not_comparable": "not comparable",
}
# A finding whose evidence ended so long before the end of the log is over: its alert would be resolved.
OVER_SECONDS = 300.0
HANG_OVER_SECONDS = 30.0  # a hang is checked every 15 s
_LASTING = frozenset({RESERVE, START})  # printed once, at a start
_UNITS = {"GB": " GB", "seconds": " s", "per_minute": "/min", "per_second": "/s"}


def sentence(document: Document) -> str:
    """Return the verdict in words."""
    verdict = document["verdict"]
    for finding in document["findings"]:
        if finding["diagnosis"] == verdict:
            return summary(document, finding)
    return _VERDICTS.get(verdict) or BY_ID[verdict].summary


def summary(document: Document, finding: Document) -> str:
    """Return a finding in words: how the server ended, or when its evidence was last seen if it is over."""
    row, said = BY_ID[finding["diagnosis"]], str(finding["summary"])
    if row.condition.is_end:
        crash = next((each for each in reversed(document["phases"]) if each["phase"] == "crash"), None)
        return said if crash is None else f"SGLang crashed at {moment(crash)}: {crash['detail']}."
    last, end, rests_on = finding["last_seen"], document["judged"]["end"], row.condition.measured_by
    is_past = bool(row.summary_past) and said != row.summary
    if is_past or last is None or end is None or not _LASTING.isdisjoint(rests_on):
        return said
    since = (_parsed(end) - _parsed(last)).total_seconds()
    if since < (HANG_OVER_SECONDS if WATCHDOG in rests_on else OVER_SECONDS):
        return said
    return f"{said} Last seen at {_printed(last)}, {duration(since)} before the end."


def _parsed(time: str) -> datetime:
    return datetime.fromisoformat(time.replace("Z", "+00:00"))


def _printed(time: str) -> str:
    return time.replace("T", " ").rstrip("Z")[:19]


def is_measured(finding: Document) -> bool:
    """Whether a finding has a figure and a threshold; that a server is down has neither, and no confidence."""
    return BY_ID[finding["diagnosis"]].condition.has_figure


def first_with(advice: Document, document: Document) -> int:
    """Return the number of the first finding with this advice, from 1 on: several can share one."""
    return next(number for number, each in enumerate(document["findings"], 1) if advice in each["advice"])


def confidence(document: Document) -> str:
    """Return the confidence of the verdict; empty where it has no figure."""
    for finding in document["findings"]:
        if finding["diagnosis"] == document["verdict"]:
            return str(finding["confidence"]) if is_measured(finding) else ""
    if document["verdict"] in {IDLE, NOT_ENOUGH_DATA}:
        return "high" if document["verdict"] == IDLE and document["judged"]["seconds"] >= 120 else "low"
    return confidence_of(document["judged"]["serving_seconds"])


def judged_words(document: Document) -> str:
    """Return which start the verdict is about, if there are several."""
    judged, starts = document["judged"], document["starts"]
    if len(starts) < 2 or judged["run"] is None:
        return ""
    name = f"start {judged['run']} of {starts[-1]['run']}" if judged["run"] else "what ran before the first start"
    return f"This is of {name}: from {moment(judged)}, {duration(judged['seconds'])}, serving {duration(judged['serving_seconds'])}."


def in_part(document: Document) -> str:
    """Return what was wrong for a part of the time, if the whole is good; else nothing."""
    begin, end = document["judged"]["at"], document["judged"]["at"] + document["judged"]["seconds"]
    of_start = [alert for alert in document["alerts"] if begin <= alert["at"] <= end + EVALUATION_SECONDS]
    alerts = [alert for alert in of_start if alert["severity"] != "info"]
    if document["verdict"] in BY_ID or not alerts:
        return ""
    names = sorted({BY_ID[alert["diagnosis"]].summary.rstrip(".") for alert in alerts})
    more = f", and {len(names) - 2} more" if len(names) > 2 else ""
    return f"But for a part of the time alerts would have fired: {'; '.join(names[:2])}{more}."


def verdict_time(document: Document) -> str:
    """Return the time of the verdict: the end of the log, or of the start that it is about."""
    judged, starts = document["judged"], document["starts"]
    if not document["span"]["seconds"]:
        return ""
    is_last = judged["run"] is None or not starts or judged["run"] == starts[-1]["run"]
    end = moment({"start": judged["end"], "at": judged["at"] + judged["seconds"]})
    return f"at {end}, the end of {'the log' if is_last else 'that start'}"


def after_the_end(document: Document) -> str:
    """Return which alert would have fired after a log that ends with a crash; else nothing."""
    if not document["phases"] or document["phases"][-1]["phase"] != "crash":
        return ""
    down = BY_ID["server_down"]
    minutes = parsed_duration(down.hold) / 60
    return f"The log ends with the crash; {down.alert} would have fired {minutes:.0f} minutes later."


def no_alert(document: Document) -> str:
    """Return why no alert would have fired, where one might be expected."""
    expected = any(BY_ID[each["diagnosis"]].alert and each["severity"] != "info" for each in document["findings"])
    if not document["span"]["seconds"]:
        return "The log has no times, so it is not known which alerts would have fired."
    return "What was found did not last long enough for an alert." if expected else ""


def duration(seconds: float) -> str:
    """Return seconds in words, such as `15 min`."""
    if seconds < 180:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def moment(stretch: dict[str, Any]) -> str:
    """Return when something began: the printed time, or the time since the log's begin where no date is printed."""
    start = stretch["start"]
    if start is not None:
        return _printed(str(start))
    seconds = int(stretch["at"])
    return f"+{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def figure(value: float, unit: str) -> str:
    """Return a figure with its unit."""
    if unit == "share":
        return f"{100 * value:.0f} %"
    if unit == "ratio":
        return f"{value:.2f}"
    digits = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}".removesuffix(".0")
    return digits + _UNITS.get(unit, "")


def memory_words(memory: dict[str, Any]) -> str:
    """Return the memory of a start by use."""
    names = (
        ("before_weights_gb", "free before weights"),
        ("weights_gb", "weights"),
        ("kv_pool_gb", "KV cache"),
        ("graphs_gb", "graphs"),
        ("left_gb", "left"),
    )
    parts = [f"{memory[key]:.2f} GB {words}" for key, words in names if memory[key] is not None]
    return ("host memory: " if memory["device"] == "cpu" else "memory: ") + ", ".join(parts)


def span_words(document: Document) -> str:
    """Return which logs these are, and from when to when."""
    span, sources = document["span"], document["sources"]
    when = "no date in the log" if span["start"] is None else f"{span['start']} to {span['end']} as printed"
    return (
        f"{', '.join(sources[:3])}{' and more' if len(sources) > 3 else ''}: {when}, {duration(span['seconds'])},"
        f" serving {duration(span['serving_seconds'])}; profile {document['profile']}"
    )
