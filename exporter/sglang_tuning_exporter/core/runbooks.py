"""The runbooks: a page of Markdown for each alert, and the alerts in the order of their urgency.

The prose is in `core/diagnoses/prose/<diagnosis>.md`, a template over the thresholds in force. The diagnosis adds when
its alert fires, which flag to change, and the causes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core.advice import figures_of, fill
from sglang_tuning_exporter.core.diagnoses import (
    ALL,
    EXPORTER,
    Diagnosis,
    better_explained_by,
    causes_of,
    held_back_by,
)
from sglang_tuning_exporter.core.facts import Facts
from sglang_tuning_exporter.core.findings import URGENCY
from sglang_tuning_exporter.core.sums import Totals
from sglang_tuning_exporter.core.view import View

SECTIONS = ("Meaning", "Impact", "Diagnosis", "Mitigation")
FOLDER = "alerts/runbooks"
# SGLang's tuning guide, which the diagnoses summarise.
GUIDE_URL = "https://docs.sglang.io/docs/advanced_features/hyperparameter_tuning"

ALERTS: tuple[Diagnosis, ...] = (*(diagnosis for diagnosis in ALL if diagnosis.alert), *EXPORTER)
BY_ALERT: dict[str, Diagnosis] = {diagnosis.alert: diagnosis for diagnosis in ALERTS}
# Causes stay before their consequences.
MOST_SEVERE_FIRST: tuple[Diagnosis, ...] = tuple(sorted(ALERTS, key=lambda diagnosis: -URGENCY[diagnosis.severity]))


def _inhibitions() -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Give the labels in which two alerts agree, the alerts that hold others back, and those others."""
    for diagnosis in ALERTS:
        if diagnosis.silences == "target":
            yield diagnosis.silences, (diagnosis.alert,), tuple(name for name in BY_ALERT if name != diagnosis.alert)
    consequences: dict[Diagnosis, list[str]] = {}
    for diagnosis in ALERTS:
        for cause in held_back_by(diagnosis):
            consequences.setdefault(cause, []).append(diagnosis.alert)
    # Causes that hold back the same alerts stand in one rule.
    causes: dict[tuple[str, ...], list[str]] = {}
    for cause, alerts in consequences.items():
        causes.setdefault(tuple(alerts), []).append(cause.alert)
    for alerts_held_back, holding in causes.items():
        yield "server", tuple(holding), alerts_held_back
    for diagnosis in ALERTS:
        if diagnosis.silences == "pool and diagnosis":
            yield diagnosis.silences, (diagnosis.alert,), tuple(other.alert for other in ALL if other.alert)


# While one of the first alerts fires, Alertmanager does not notify of the others that agree with it in these labels.
# The exporter itself delays every other consequence before its alert begins. The alert of a dead exporter has no label
# of a server.
INHIBITIONS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = tuple(_inhibitions())

_COMPUTED = (
    "<!-- Made by `sglang-tuning-exporter generate` from the table of diagnoses and core/diagnoses/prose/{id}.md. -->"
    "\n\n"
)
_URGENCY = {
    "critical": "critical: requests fail or will fail soon; act now",
    "warning": "warning: clients wait longer than necessary, or will soon; act today",
    "info": "info: nothing is broken, something can be improved; act when there is time",
}
# Patterns for `grep -E` that match in a log of any release from 0.3.0 on.
_GREPS = {
    "crash_lines": "hit an exception|Exception in (ModelTp|run_tp|Controller)|crashed with exit code"
    "|[Rr]eceived sigquit|SIGQUIT received"
    "|Child process unexpectedly failed|scheduler (died|is dead)|Initialization failed",
    "out_of_memory_lines": "OutOfMemoryError|out of memory",
    "last_request_lines": "Failed to retract any request|even after retracting all other requests",
    "hang_lines": "[Ww]atchdog timeout|Health check failed",
}
_FLAG = re.compile(r"(?<![\w`-])--[a-z][a-z0-9-]+")
_ONE = re.compile(r"(more than 1 \w+)s/min")
# Code stays unchanged: readers paste it.
_CODE_OR_NAME = re.compile(r"```.*?```|`[^`\n]+`|\b(SGLang[A-Z]\w+)\b", re.DOTALL)
_ENVIRONMENT = Environment(
    loader=ChoiceLoader([PackageLoader(__package__), PackageLoader("sglang_tuning_exporter.core.diagnoses", "prose")]),
    autoescape=False,  # noqa: S701 # nosec B701 # Markdown, made from the table and the package's own pages
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.globals["guide_url"] = GUIDE_URL
_ENVIRONMENT.filters["coded"] = lambda text: _FLAG.sub(r"`\g<0>`", text)


def _unseen(profile: profiles.Profile) -> View:
    """Return the view of a server of which nothing was measured."""
    return View(Totals(), Facts(), profile, 0.0)


def figures(profile: profiles.Profile) -> dict[str, str]:
    """Return the thresholds of a profile in words, for texts that are about no particular server."""
    return {
        **figures_of(_unseen(profile)),
        "given_up_after": "at the same age",
        "latency_budget": f"{100 * (1 - profile.latency_objective):.3g} %",
        "latency_objective": f"{100 * profile.latency_objective:.4g} %",
    }


def prose(name: str, profile: profiles.Profile | None = None) -> str:
    """Return the prose of the diagnosis with this name, with the thresholds of the profile."""
    diagnosis = next(diagnosis for diagnosis in ALERTS if diagnosis.id == name)
    return _ENVIRONMENT.get_template(f"{name}.md").render(**figures(_profile_of(diagnosis, profile)), **_GREPS)


def _profile_of(diagnosis: Diagnosis, profile: profiles.Profile | None) -> profiles.Profile:
    """Return the profile for the page of a diagnosis: that of the server if the diagnosis is used with it."""
    if profile is not None and (not diagnosis.profiles or profile.name in diagnosis.profiles):
        return profile
    return profiles.PROFILES[diagnosis.profiles[0]] if diagnosis.profiles else profiles.DEFAULT


@cache
def page(alert: str, profile: profiles.Profile | None = None) -> str:
    """Return the runbook of an alert with the thresholds of the profile. Raise `KeyError` for an unknown alert."""
    diagnosis = BY_ALERT[alert]
    in_force = _profile_of(diagnosis, profile)
    text = _ENVIRONMENT.get_template("runbook.md.j2").render(
        diagnosis=diagnosis,
        summary=summary(diagnosis),
        advice=advice(diagnosis, in_force),
        guide=fill(diagnosis.guide, figures(in_force)),
        will_not_help_if=fill(diagnosis.remedy.not_if, figures(in_force)),
        urgency=_URGENCY[diagnosis.severity],
        when=_when(diagnosis, in_force),
        after=_in_words(diagnosis.after),
        until=_in_words(diagnosis.until),
        is_of_an_end=_is_of_an_end(diagnosis),
        causes=[cause.alert for cause in causes_of(diagnosis) if cause.alert and _holds_back(cause, diagnosis)],
        unless=[other.alert or other.summary for other in better_explained_by(diagnosis)],
        inhibited_by=[name for _, causes, held_back in INHIBITIONS if alert in held_back for name in causes],
        by_prometheus=diagnosis in EXPORTER,
        prose=prose(diagnosis.id, profile).strip(),
    )
    return _linked(text, alert)


@cache
def index() -> str:
    """Return the list of all runbooks, most urgent first."""
    groups = [
        (words, [(other, advice(other, profiles.DEFAULT)) for other in ALERTS if other.severity == severity])
        for severity, words in _URGENCY.items()
    ]
    text = _ENVIRONMENT.get_template("runbooks.md.j2").render(groups=groups, summary=summary)
    return _linked(text, "")


def files() -> dict[str, str]:
    """Return every page and the index: repository path → text."""
    pages = {
        f"{FOLDER}/{alert}.md": _COMPUTED.format(id=diagnosis.id) + page(alert) for alert, diagnosis in BY_ALERT.items()
    }
    return {**pages, f"{FOLDER}/README.md": _COMPUTED.format(id="*") + index()}


def _linked(text: str, alert: str) -> str:
    """Return the text with a link for every other alert that it names outside code."""

    def link(match: re.Match[str]) -> str:
        name = match[1]
        return f"[{name}]({name}.md)" if name and name != alert and name in BY_ALERT else match[0]

    return _CODE_OR_NAME.sub(link, text)


def advice(diagnosis: Diagnosis, profile: profiles.Profile) -> str:
    """Return the advice without a server, such as `raise --schedule-conservativeness: 1.3`."""
    flag, words = diagnosis.remedy.flag, fill(diagnosis.remedy.words, figures(profile))
    if not flag or words.startswith("add --"):
        return words
    if "add it" in words:
        return words.replace("add it", f"add {flag}")
    return f"{diagnosis.remedy.direction} {flag}: {words}"


def summary(diagnosis: Diagnosis) -> str:
    """Return the summary of a diagnosis, without figures of a server."""
    return fill(diagnosis.summary, figures(profiles.DEFAULT))


def past(diagnosis: Diagnosis) -> str:
    """Return the words for an alert that is over, without times and figures."""
    words = fill(diagnosis.over(), figures(profiles.DEFAULT))
    return f"{words} The server answers again." if _is_of_an_end(diagnosis) or diagnosis.death == "down" else words


def _holds_back(cause: Diagnosis, diagnosis: Diagnosis) -> bool:
    """Whether the alert of a diagnosis does not begin while this cause holds: a milder one holds back nothing."""
    return not diagnosis.notified_beside_causes and URGENCY[cause.severity] >= URGENCY[diagnosis.severity]


def _is_of_an_end(diagnosis: Diagnosis) -> bool:
    """Whether the alert is about a failure by which a server ends."""
    return diagnosis.is_end(_unseen(profiles.DEFAULT)) and diagnosis.when.kind == "event"


def _when(diagnosis: Diagnosis, profile: profiles.Profile) -> str:
    """Return the condition of a diagnosis in words."""
    if diagnosis.sign:
        return diagnosis.sign
    limit = _bound(diagnosis, profile)
    words = {**figures(profile), "value": limit, "s": "" if limit == "at least one" else "s"}
    over = {"share": ", over ten minutes", "rate": ", over ten minutes"}.get(diagnosis.when.kind, "")
    return _ONE.sub(r"\1/min", fill(diagnosis.seen, words)) + over


def _bound(diagnosis: Diagnosis, profile: profiles.Profile) -> str:
    """Return the limit of a condition in words, such as `more than 50 %`."""
    if diagnosis.when.kind == "event":
        return "at least one"
    limit = diagnosis.when.bound(_unseen(profile)) or 0.0
    word = "less than" if diagnosis.when.side == "below" else "more than"
    unit = {"GB": " GB", "seconds": " s"}.get(diagnosis.when.unit, "")
    return f"{word} {100 * limit:.3g} %" if diagnosis.when.unit == "share" else f"{word} {limit:g}{unit}"


def _in_words(seconds: float) -> str:
    """Return a duration in words: 300 → 5 minutes; empty for 0."""
    minutes = round(seconds / 60)
    return f"{minutes} minute{'' if minutes == 1 else 's'}" if minutes else ""
