"""One recording, every way in: equal or within a tenth; else the poorer source is silent or less certain, never
different.

Compared with what the richest way in says (log and metrics): the verdict (the headline of `report` beside the worst
that was said live), since when, the advice, and over the load until its end the mean wait, the mean token usage and the
retractions.
"""

from __future__ import annotations

from calendar import timegm
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, product
from math import sqrt
from operator import eq
from statistics import fmean, stdev
from time import strptime
from typing import Any

from truth import ways
from truth.cases import SILENT, WAYS, Answer, Case, Checks
from truth.recording import ROOT, Recording, read

RECORDINGS = (
    *sorted((ROOT / "tests" / "captures").glob("*.tar.xz"))[::2],
    *sorted(path for path in (ROOT / "tests" / "recordings").iterdir() if path.is_dir()),
)
HELD_SECONDS = 20.0  # a verdict that was said for less is a moment
SINCE_SECONDS = 15.0  # a tenth of the longest loads
WAIT_SECONDS = 0.5  # a log has whole seconds: a shorter wait is not in it
ERRORS = 2.0  # standard errors, of a mean of samples: a page has the usage of one moment
SEVERITIES, CONFIDENCES = ("", "info", "warning", "critical"), ("", "low", "medium", "high")
USAGE, WAIT = 'sglang_tuning_token_usage_ratio{pool="full"}', "sglang_tuning_queue_wait_seconds"
AT_THE_END = "both, at the end of the load"
USAGE_ERROR = "standard error of the token usage"
RETRACTED = "sglang_tuning_retracted_requests_total"


@dataclass(frozen=True, slots=True)
class Said:
    """The figures of one way in; None where it says nothing of it."""

    verdict: str | None = None
    confidence: str = ""
    since: float | None = None
    wait: float | None = None
    usage: float | None = None
    usage_error: float = 0.0  # standard error, where it is a mean of samples
    retractions: float | None = None
    advice: str | None = None


def cases() -> Iterator[Case]:
    """Give a case for each recording."""
    for number, path in enumerate(RECORDINGS):
        name = path.name.removesuffix(".tar.xz")
        profile = ("online", "offline")[number % 2]
        yield Case(name, partial(read, path), check, ("every",), profile, ask=ask)


def ask(case: Case) -> list[Answer]:
    """Return an answer by each way in: the one at the end, or the worst said live; and all that the richest said.

    `text` names way or verdict.
    """
    recording, answers = case.recording(), list[Answer]()
    _, until = _load(recording)
    cut = replace(recording, log=tuple(chunk for chunk in recording.log if chunk[0] <= until))
    under_load = replace(case, recording=lambda: cut)  # a report is of the same time as what is said live
    for way in WAYS:
        said = ways.ask(under_load if way == "report" else case, way)
        answers.append(replace(_worst(recording, said, logged=way != "metrics"), text=way))
        if way == "both":
            figures = answers[-1].metrics
            last = {each.verdict: replace(each, metrics=figures, text=f"both: {each.verdict}") for each in said}
            held = Counter(each.verdict for each in said)
            then = [each for each in said if each.at <= until] or said
            answers.append(replace(then[-1], metrics=figures, text=AT_THE_END))
            answers += [each for name, each in last.items() if held[name] >= HELD_SECONDS or name == said[-1].verdict]
    return answers


def check(_way: str, answers: Sequence[Answer]) -> Checks:
    """Compare each way with the richest: with what that said of the same where it said several things in turn."""
    said = {answer.text: _said(answer) for answer in answers}
    checks: Checks = {}
    for way, (figure, same) in product(("report", "log", "metrics"), _COMPARED.items()):
        richest, verdict = said["both"], said[way].verdict
        if way == "report" and verdict == said[AT_THE_END].verdict:  # of the log until then
            richest = said[AT_THE_END]
        richest = richest if verdict in {None, richest.verdict} else said.get(f"both: {verdict}", richest)
        rich, poor = getattr(richest, figure), getattr(said[way], figure)
        less = CONFIDENCES.index(said[way].confidence) < CONFIDENCES.index(richest.confidence)
        alike = rich is None or poor is None or same(rich, poor) or (less and figure != "verdict")
        alike = alike or (figure == "usage" and abs(rich - poor) <= ERRORS * said[way].usage_error)
        checks[f"{figure} by {way}"] = "" if alike else f"{poor}, with log and metrics {rich}"
    return checks


def _load(recording: Recording) -> tuple[float, float]:
    """From when to when there is load, over which figures are compared."""
    loads = recording.loads or ((recording.ready, recording.end),)
    return loads[0][0], loads[-1][1]


def _worst(recording: Recording, answers: Sequence[Answer], *, logged: bool) -> Answer:
    """Return the last answer with the worst verdict that was said for a while under load, with the figures of the
    load's end.
    """
    begin, until = _load(recording)
    under = [each for each in answers if begin <= each.at <= until] or list(answers)
    held: dict[str, float] = {}
    for verdict, group in groupby(under, key=lambda each: each.verdict):
        held[verdict] = max(held.get(verdict, 0.0), float(len(list(group))))
    long = [
        each for each in under if len(under) == 1 or held[each.verdict] >= min(HELD_SECONDS, len(under) / 2)
    ] or under
    worst = max(long, key=lambda each: (_severity(each), held[each.verdict], each.at))
    end, pages = under[-1], [next(group).metrics for _, group in groupby(under, key=lambda each: id(each.metrics))]
    sampled = {} if logged else _sampled([page[USAGE] for page in pages if USAGE in page])
    metrics = {**answers[-1].metrics, **sampled}
    figures = {WAIT: end.metrics.get(WAIT), USAGE: end.document["starts"][-1]["figures"].get("token_usage")}
    metrics.update({name: value for name, value in figures.items() if value is not None})
    return replace(worst, metrics=metrics, counts=answers[-1].counts)


def _sampled(usages: Sequence[float]) -> dict[str, float]:
    """Return the mean of samples of the token usage, and its standard error: what stays as it is was seen once."""
    seen = [usage for usage, _ in groupby(usages)]
    error = {USAGE_ERROR: stdev(seen) / sqrt(len(seen))} if len(seen) > 1 else {}
    return {USAGE: fmean(usages), **error} if usages else {}


def _severity(answer: Answer) -> int:
    return next((SEVERITIES.index(each.severity) for each in answer.findings if each.diagnosis == answer.verdict), 0)


def _said(answer: Answer) -> Said:
    found: Mapping[str, Any] = next(
        (f for f in answer.document.get("findings", ()) if f["diagnosis"] == answer.verdict), {}
    )
    change = answer.changes[0] if answer.changes and found else None
    shown = {each["name"]: each["value"] for each in found.get("evidence", ())}
    return Said(
        None if not answer.verdict or answer.verdict in SILENT else answer.verdict,
        answer.confidence,
        timegm(strptime(found["first_seen"][:19], "%Y-%m-%dT%H:%M:%S")) if found.get("first_seen") else None,
        answer.metrics.get(WAIT) or shown.get("mean wait in the queue"),
        answer.metrics.get(USAGE),
        answer.metrics.get(USAGE_ERROR, 0.0),
        answer.metrics.get(RETRACTED, answer.counts.get("retracted_requests")),
        f"{change.flag} {change.to}" if change and change.flag else None,
    )


def _near(rich: float, poor: float) -> bool:
    return abs(rich - poor) <= max(0.1 * max(abs(rich), abs(poor)), 0.02)


def _alike(rich: str, poor: str) -> bool:
    """Whether two changes are the same flag, with values within a tenth."""
    (flag, _, to), (other, _, value) = rich.partition(" "), poor.partition(" ")
    numbers = [float(each) for each in (to, value) if each.replace(".", "", 1).isdigit()]
    return rich == poor or (flag == other and len(numbers) == 2 and _near(*numbers))


_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "verdict": eq, "since": lambda rich, poor: abs(rich - poor) <= SINCE_SECONDS,
    "wait": lambda rich, poor: _near(rich, poor) or abs(rich - poor) <= WAIT_SECONDS, "usage": _near, "retractions": eq,
    "advice": _alike,
}  # fmt: skip
