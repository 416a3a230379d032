"""The report's sentences, the same on a terminal and as a page. Pure."""

from __future__ import annotations

from typing import Any

from sglang_tuning_exporter.diagnosis.json_findings import Document
from sglang_tuning_exporter.diagnosis.promql import duration as parsed_duration
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.diagnosis.wording import (
    PastLog,
    VerdictText,
    capitalised,
    duration,
    figure,
    printed,
    verdict_text,
)
from sglang_tuning_exporter.report.analysis import Analysis
from sglang_tuning_exporter.report.samples import EVALUATION_SECONDS

_START_FIGURES = (
    ("Generated tokens/s", "generated_tokens_per_second", "count"),
    ("Retractions/min", "retractions_per_minute", "count"),
    ("With requests waiting", "share_waiting", "share"),
)
MEMORY = (
    ("before_weights_gb", "free before weights"),
    ("weights_gb", "weights"),
    ("kv_pool_gb", "KV cache"),
    ("graphs_gb", "graphs"),
    ("left_gb", "left"),
)
PHASES = {"start_up": "starting", **{kind: kind for kind in ("load", "idle", "crash", "stop", "silence")}}
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


def text_of(document: Document, analysis: Analysis) -> VerdictText:
    """Return the verdict and its findings in words."""
    judged = analysis.conclude()
    crash = next((each for each in reversed(document["phases"]) if each["phase"] == "crash"), None)
    ended = "" if crash is None else f"SGLang crashed at {moment(crash)}: {crash['detail']}."
    about = document["judged"]
    log = PastLog((analysis.begin or 0.0) + about["at"] + about["seconds"], ended, about["run"])
    return verdict_text(judged.judgement, document["command"], judged.sightings.of, log)


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
    if document["span"]["start"] is None and not document["span"]["seconds"]:
        return "The log has no times, so it is not known which alerts would have fired."
    return "What was found did not last long enough for an alert." if expected else ""


def moment(stretch: dict[str, Any]) -> str:
    """Return when something began: the printed time, or the time since the log's begin where no date is printed."""
    start = stretch["start"]
    if start is not None:
        return printed(str(start))
    seconds = int(stretch["at"])
    return f"+{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def lasted(alert: Document) -> str:
    """Return for how long an alert would have fired."""
    return f"{duration(alert['seconds'])}{', until the log ends' if alert['ongoing'] else ''}"


def label(verdict: str) -> str:
    """Return a verdict in a few words."""
    return BY_ID[verdict].headline if verdict in BY_ID else capitalised(verdict.replace("_", " "))


def start_figures(start: Document) -> list[tuple[str, str]]:
    """Return the figures of a start by name; empty where nothing was served."""
    figures = start["figures"]
    if not figures or not figures["serving_seconds"]:
        return []
    measured = [(name, figures[key], unit) for name, key, unit in _START_FIGURES if figures[key] is not None]
    served = ("Served", duration(figures["serving_seconds"]))
    return [served, *((name, figure(value, unit)) for name, value, unit in measured)]


def counted(document: Document) -> list[tuple[str, str]]:
    """Return what was counted in the logs, by name."""
    counts, interval = document["counts"], document["server"]["args"].get("decode_log_interval")
    each = f" (one for {interval} batches)" if isinstance(interval, int) and interval > 1 else ""
    failures = ", ".join(f"{phase} {count}" for phase, count in counts["out_of_memory"].items() if count)
    return [
        ("Lines", f"{counts['lines']:,}"),
        ("Decode lines", f"{counts['decode_batches']:,}{each}"),
        ("Prefill batches", f"{counts['prefill_batches']:,}"),
        ("Starts", f"{counts['server_starts']}"),
        ("Unrecognised", f"{counts['unrecognised']:,}"),
        ("Retractions", f"{counts['retraction_events']:,} ({counts['retracted_requests']:,} requests)"),
        ("Out of memory", failures or "never"),
    ]


def memory_words(memory: dict[str, Any]) -> str:
    """Return the memory of a start by use."""
    parts = [f"{memory[key]:.2f} GB {words}" for key, words in MEMORY if memory[key] is not None]
    return ("host memory: " if memory["device"] == "cpu" else "memory: ") + ", ".join(parts)


def span_words(document: Document) -> str:
    """Return which logs these are, and from when to when."""
    span, sources = document["span"], document["sources"]
    when = "no date in the log"
    if span["start"] is not None:
        when = f"{printed(span['start'])} to {printed(span['end'])} as printed"
    served = f"{duration(span['seconds'])}, serving {duration(span['serving_seconds'])}"
    return f"{few(sources)}: {when}, {served}; profile {document['profile']}"


def few(names: list[str]) -> str:
    """Return the first names."""
    return ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")
