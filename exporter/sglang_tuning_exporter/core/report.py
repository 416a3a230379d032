"""`report`: reads logs, and writes what limited the server and what to change, as text, JSON or a page."""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_tuning_exporter.config import FAIL_ON, profiles
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.core import answer
from sglang_tuning_exporter.core.course import Course
from sglang_tuning_exporter.core.diagnoses import BY_ID, adapted
from sglang_tuning_exporter.core.findings import (
    FIRST_DATED_SECOND,
    URGENCY,
    Alert,
    Change,
    Figure,
    Finding,
    Judgement,
    Value,
)
from sglang_tuning_exporter.core.inputs import Logs
from sglang_tuning_exporter.sglang.clean import clean, cleaned

SCHEMA_VERSION = "2"
_COUNTS = (
    "lines",
    "decode_batches",
    "prefill_batches",
    "retraction_events",
    "retracted_requests",
    "out_of_memory.prefill",
    "out_of_memory.decode",
    "out_of_memory.graph_capture",
    "out_of_memory.startup",
    "out_of_memory.unknown",
    "server_starts",
    "unrecognised",
)
_LAST = ("running_requests", "queued_requests", "token_usage")
_MANY_BYTES = 64 << 20  # of logs: reading them takes seconds, and a terminal shows how far it is
_Document = dict[str, Any]


def run(
    logs: Sequence[str],
    *,
    format: str = "text",  # noqa: A002 - the flag's name
    output: Path | None = None,
    profile: str = "online",
    threshold: Mapping[str, float] | None = None,
    accept: Mapping[str, str] | None = None,
    wait: Mapping[str, float] | None = None,
    against: Sequence[str] = (),
    most: int | None = None,
    fail_on: str = "warning",
) -> int:
    """Write the report of `logs` and return the exit status. Raise `UsageError`."""
    if fail_on not in FAIL_ON:
        raise UsageError(f"--fail-on={fail_on}: give {', '.join(FAIL_ON[:-1])} or {FAIL_ON[-1]}")
    used = adapted(profile, threshold, accept, wait)
    given = Logs(logs, most=most)
    before = Logs(against, most=most) if against else None
    if output is not None:
        _check_output(output, *(source.paths for source in (given, before) if source is not None))
    judged, applied = judge_logs(given, used)
    compared = None if before is None else answer.compare(judge_logs(before, used)[0], judged)
    if format == "json":
        text = json.dumps(document(judged, compared), indent=2, allow_nan=False) + "\n"
    elif format == "html":
        from sglang_tuning_exporter.core.page import page  # noqa: PLC0415 - templates are for this format alone

        text = page(judged, applied, compared)
    else:
        text = answer.text(judged, applied, compared, _style() if output is None else answer.Style())
    write(text, output)
    sys.stderr.writelines(f"sglang-tuning-exporter: {note}\n" for note in given.damage)
    return exit_status(judged, fail_on)


def judge_logs(logs: Logs, profile: profiles.Profile) -> tuple[Judgement, profiles.Profile]:
    """Return the judgement of past logs, and the profile as it was applied to their server.

    Raise `UsageError` for input that cannot be read or is no log of SGLang.
    """
    course = Course(profile)
    with _progress(logs):
        for event in logs.events():
            course.take_line(event)
    judged = course.end(logs.end)
    begin = judged.begin
    if logs.first is not None and begin is not None and begin - logs.first > 0:
        begin = logs.first
    counts = {**judged.counts, "lines": logs.lines, "unrecognised": logs.tally[1].total()}
    remarks, facts = logs.notes, course.server.facts
    if facts.cut:
        remarks.append(
            f"the log has only {len(facts.arguments)} of the server's arguments, the others were cut off or not"
            " printed: values in force may be unknown, and no command line is given"
        )
    judged = replace(judged, begin=begin, counts=counts, sources=logs.names, notes=(*remarks, *judged.notes))
    return cleaned(judged), course.server.profile


def exit_status(judged: Judgement, fail_on: str) -> int:
    """Return 1 where a finding is at least as urgent as `fail_on`, else 0; an opportunity counts as an info."""
    if fail_on == "never":
        return 0
    least = URGENCY[fail_on]  # type: ignore[index]
    urgencies = [URGENCY[finding.severity if finding.is_limit else "info"] for finding in judged.findings]
    return int(any(urgency >= least for urgency in urgencies))


# The document


def document(judged: Judgement, against: answer.Comparison | None = None) -> _Document:
    """Return the report as JSON (docs/report.schema.json) with every key; `null` where the log shows no figure."""
    own, begin, last = judged.own, judged.begin or 0.0, judged.starts[-1] if judged.starts else None
    first_run = 1 if not judged.starts or judged.starts[0].arguments else 0  # 0: it began before the log
    release, seconds = last.release if last else None, _stretch(begin, judged.end, begin)["seconds"]
    made: _Document = plain(
        {
            "schema_version": SCHEMA_VERSION,
            "sources": judged.sources,
            "profile": judged.profile,
            "span": {
                "start": _iso(judged.begin),
                "end": _iso(judged.end),
                "seconds": seconds,
                "serving_seconds": judged.serving_seconds,
                "idle_seconds": judged.idle_seconds,
            },
            "server": {"version": release, "args": last.arguments if last else {}},
            "verdict": judged.verdict,
            "sentence": judged.sentence,
            "severity": judged.severity,
            "confidence": own.confidence if own else None,
            "mostly": {"verdict": judged.mostly[0], "share": judged.mostly[1]} if judged.mostly else None,
            "findings": [_finding(finding, begin, judged.sources) for finding in judged.findings],
            "command": _command(judged, release),
            "alerts": [_alert(alert, judged.end, begin) for alert in judged.alerts],
            "course": [
                {"what": stretch.what, **_stretch(stretch.begin, stretch.end, begin), "words": stretch.words}
                for stretch in judged.course
            ],
            "shares": judged.shares,
            "counts": _nested(
                dict.fromkeys(_COUNTS, 0) | {name: count for name, count in judged.counts.items() if count}
            ),
            "marked": _nested(judged.marked),
            "last": {name: judged.last.get(name) for name in _LAST}
            | {"cuda_graph": _switch(judged.last.get("cuda_graph"))},
            "available_gpu_memory_gb": judged.available_gb,
            "facts": judged.facts,
            "starts": [_start(judged, place, first_run + place) for place in range(len(judged.starts))],
            "checks": [
                {"diagnosis": name, "evidence": figure and _figure(figure), "needs": BY_ID[name].when.needs or None}
                for name, figure in judged.checks.items()
            ],
            "comparison": against,
            "notes": answer.notes(judged),
        }
    )
    return made


def plain(value: object, depth: int = 16) -> Any:
    """Return a value as JSON can hold it; collections below `depth` levels are cut to "…"."""
    if isinstance(value, Mapping):
        return {str(key): plain(item, depth - 1) for key, item in value.items()} if depth else "…"
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, depth - 1) for item in value] if depth else "…"
    return _plain_number(value) if isinstance(value, float) else _plain_word(value)


def _plain_number(value: float) -> float | None:
    """Return a whole number as int, another one with six digits after the point, and None for NaN and infinity."""
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else round(value, 6)


def _plain_word(value: object) -> object:
    """Return a word, a whole number, a switch or None as it is, and the text of every other value."""
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _iso(time: float | None) -> str | None:
    """Return unix seconds as `2025-11-20T11:40:00Z`; None if the log has no dates."""
    if time is None or not FIRST_DATED_SECOND <= time < 253402300800:
        return None
    moment = dt.datetime.fromtimestamp(round(time, 3), dt.timezone.utc)
    return moment.isoformat(timespec="milliseconds" if moment.microsecond else "seconds").replace("+00:00", "Z")


def _stretch(start: float, end: float | None, begin: float) -> _Document:
    """Return a stretch of time; `at`: seconds since the log begins."""
    until = max(start if end is None else end, start)
    return {"start": _iso(start), "end": _iso(until), "at": max(start - begin, 0.0), "seconds": round(until - start, 3)}


def _finding(finding: Finding, begin: float, sources: Sequence[str]) -> _Document:
    """Return a finding with its times, evidence and advice."""
    stretch = (
        _stretch(finding.since, finding.until, begin)
        if finding.since is not None
        else dict.fromkeys(("start", "end", "at"))
    )
    return {
        "diagnosis": finding.diagnosis,
        "alert": finding.alert or None,
        "severity": finding.severity,
        "confidence": finding.confidence,
        "is_limit": finding.is_limit,
        "summary": finding.headline,
        "headline": finding.headline,
        "sentence": finding.sentence,
        "because": finding.because,
        "evidence": [_figure(figure) for figure in finding.evidence],
        "advice": [_advice(change) for change in finding.changes],
        "guide": finding.guide,
        "first_seen": stretch["start"],
        "last_seen": stretch["end"],
        "at": stretch["at"],
        "seconds": finding.seconds,
        "notes": finding.notes,
        "explained_by": _explained_by(finding, sources),
    }


def _command(judged: Judgement, release: str | None) -> _Document | None:
    """Return the command line with its changes; None where the present one is not known."""
    if not judged.command:
        return None
    names = ("flag", "current", "suggested")
    changes = [dict(zip(names, change, strict=True)) for change in judged.command_changes]
    return {"text": " ".join(judged.command), "release": release, "changes": changes, "notes": judged.command_notes}


def _alert(alert: Alert, end: float | None, begin: float) -> _Document:
    """Return a notification that would have been sent; one that still fires lasts to the end of the log."""
    is_ongoing = alert.until is None
    times = _stretch(alert.at, end if is_ongoing else alert.until, begin)
    named = {"alert": alert.alert, "diagnosis": alert.diagnosis, "severity": alert.severity}
    return {**named, **times, "ongoing": is_ongoing}


def _explained_by(finding: Finding, sources: Sequence[str]) -> _Document | None:
    """Return the line of the log that explains an end; None where no line does."""
    line, only = finding.explained_by, sources[0] if len(sources) == 1 else None
    if line is None:
        return None
    return {
        "text": line.text,
        "class": line.word,
        "rank": line.rank.words or None,
        "line": line.figures.get("line") or None,
        "file": line.file or only,
        "time": _iso(line.time),
        "raised_at": line.place or None,
        "beside_text_of_others": line.marked,
        "before": line.before,
    }


def _figure(figure: Figure) -> _Document:
    """Return a figure beside its threshold."""
    return {
        "name": figure.name,
        "value": figure.value,
        "threshold": figure.limit,
        "unit": figure.unit,
        "side": figure.side or None,
        "holds": figure.holds,
    }


def _advice(change: Change) -> _Document:
    """Return a change: flag, values and reasons."""
    return {
        "flag": change.flag or None,
        "current": _setting(change.now),
        "suggested": change.words if change.target is None else _setting(change.target),
        "suggestion": change.words or None,
        "direction": change.direction or None,
        "action": change.verb or None,
        "typed": change.typed or None,
        "why": change.why,
        "will_not_help_if": change.not_if,
        "gain": change.gain or None,
        "cost": change.cost or None,
    }


def _setting(value: Value) -> Value:
    """Return the value of a flag; `on` or `off` for a switch."""
    return value if not isinstance(value, bool) else "on" if value else "off"


def _switch(value: float | None) -> bool | None:
    """Return 1 and 0 as true and false."""
    return None if value is None else bool(value)


def _nested(counts: Mapping[str, float]) -> _Document:
    """Return counts with an object for each name before a point: `a.b` → `{"a": {"b": …}}`."""
    nested: _Document = {}
    for name, value in counts.items():
        above, _, below = name.rpartition(".")
        (nested.setdefault(above, {}) if above else nested)[below] = value
    return nested


def _start(judged: Judgement, place: int, run: int) -> _Document:
    """Return a start of the server and the time until the next one; `run`: its number in the report."""
    start, later, begin = judged.starts[place], judged.starts[place + 1 :], judged.begin or 0.0
    end = later[0].time if later else judged.end
    return {
        "run": run,
        **_stretch(begin if start.time is None else start.time, end, begin),
        "started_in_log": bool(start.arguments),
        "version": start.release,
        "changed_args": answer.changed_args(start.changed),
        "figures": start.figures,
        "memory": start.memory or None,
        "ending": start.end or None,
    }


# Writing


def _style() -> answer.Style:
    """Return a style with colours on a terminal, unless its user asked for none (https://no-color.org)."""
    if not sys.stdout.isatty():
        return answer.Style()
    colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return answer.Style(colour, shutil.get_terminal_size().columns)


def _check_output(output: Path, *read: Iterable[Path]) -> None:
    """Check that the file to write has a directory and is none of the logs that are read. Raise `UsageError`."""
    name = f"--output={clean(str(output))}"
    if output.is_dir():
        raise UsageError(f"{name}: is a directory; give a file")
    if not output.parent.is_dir():
        raise UsageError(f"{name}: there is no such directory; give a file in one that exists")
    if output.exists() and any(output.samefile(path) for paths in read for path in paths):
        raise UsageError(f"{name}: is one of the logs; give another file")


def write(text: str, output: Path | None = None) -> None:
    """Write text as UTF-8, whatever the locale.

    Raise `UsageError` where it cannot be written, and `BrokenPipeError` where the reader of a pipe has ended.
    """
    data = text.encode("utf-8", "replace")
    try:
        if output is not None:
            output.write_bytes(data)
        else:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        name = "standard output" if output is None else f"--output={clean(str(output))}"
        raise UsageError(f"{name}: {error.strerror or error}; give a file that can be written") from None


@contextmanager
def _progress(logs: Logs) -> Iterator[None]:
    """Show on a terminal how many bytes of the logs are read, where they are many or nobody knows their number."""
    of = f" of {logs.size >> 20:,}" if logs.size else ""
    is_shown = sys.stderr.isatty() and (not logs.size or logs.size >= _MANY_BYTES)
    read, last = 0, time.monotonic()

    def show(number: int) -> None:
        nonlocal read, last
        read += number
        if time.monotonic() - last >= 0.2:
            last = time.monotonic()
            sys.stderr.write(f"\r\x1b[K{read >> 20:,}{of} MB read")
            sys.stderr.flush()

    for source in logs.sources if is_shown else ():
        source.on_read = show
    try:
        yield
    finally:
        if is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
