"""The runbooks: for each alert a page, as Markdown.

The prose is in `diagnosis/runbooks/<diagnosis>.md`, a template over the thresholds in force. The table adds when the alert fires, which flag
to change, and the causes.
"""

from __future__ import annotations

import re
from functools import cache

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, TemplateNotFound

from sglang_tuning_exporter.diagnosis.alerting import query
from sglang_tuning_exporter.diagnosis.expectation import is_predictable
from sglang_tuning_exporter.diagnosis.row import Diagnosis
from sglang_tuning_exporter.diagnosis.sizing.admission import TOLERATED
from sglang_tuning_exporter.diagnosis.table import ALERTS, BY_ALERT, BY_ID
from sglang_tuning_exporter.state.profiles import DEFAULT, PROFILES, Profile

SECTIONS = ("Meaning", "Impact", "Diagnosis", "Mitigation")
FOLDER = "alerts/runbooks"
_COMPUTED = (
    "<!-- Made by `sglang-tuning-exporter generate` from the table of diagnoses and diagnosis/runbooks/{id}.md. -->\n\n"
)
_URGENCY = {
    "critical": "critical: requests fail or will fail soon; act now",
    "warning": "warning: clients wait longer than necessary, or will soon; act today",
    "info": "info: nothing is broken, something can be improved; act when there is time",
}
# SGLang's tuning guide, which the rows summarise.
GUIDE_URL = "https://docs.sglang.io/docs/advanced_features/hyperparameter_tuning"
# What `grep -E` must look for in a log of any release, from 0.3.0 on.
_GREPS = {
    "crash_lines": "hit an exception|Exception in (ModelTp|run_tp|Controller)|crashed with exit code|[Rr]eceived sigquit"
    "|Child process unexpectedly failed|scheduler (died|is dead)|Initialization failed",
    "out_of_memory_lines": "OutOfMemoryError|out of memory",
    "last_request_lines": "Failed to retract any request|even after retracting all other requests",
    "hang_lines": "[Ww]atchdog timeout|Health check failed",
}
_UNITS = {"s": "second", "m": "minute", "h": "hour"}
_FLAG = re.compile(r"(?<![\w`-])--[a-z][a-z0-9-]+")
# Code stays unchanged: readers paste it.
_CODE_OR_NAME = re.compile(r"```.*?```|`[^`\n]+`|\b(SGLang[A-Z]\w+)\b", re.DOTALL)
_ENVIRONMENT = Environment(
    loader=ChoiceLoader([PackageLoader(__package__), PackageLoader(__package__, "runbooks")]),
    autoescape=False,  # noqa: S701 # nosec B701 # Markdown, made from the table and the package's own pages
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.globals["guide_url"] = GUIDE_URL
_ENVIRONMENT.filters["coded"] = lambda text: _FLAG.sub(r"`\g<0>`", text)


def prose(diagnosis: str, profile: Profile | None = None) -> str:
    """Return the prose of a diagnosis with the profile's thresholds. `FileNotFoundError` where there is none."""
    profile = _profile_of(BY_ID[diagnosis], profile)
    figures = {
        **profile.figures,
        "latency_budget": f"{100 * (1 - profile.latency_objective):.3g} %",
        "latency_objective": f"{100 * profile.latency_objective:.4g} %",
        "retractions_ignored": f"{100 * TOLERATED:.0f} %",
    }
    try:
        return _ENVIRONMENT.get_template(f"{diagnosis}.md").render(**figures, **_GREPS)
    except TemplateNotFound as error:
        raise FileNotFoundError(diagnosis) from error


def _profile_of(row: Diagnosis, profile: Profile | None) -> Profile:
    """Return the profile to write a row's page for: that of the server, where the row is used with it."""
    if profile is not None and (not row.profiles or profile.name in row.profiles):
        return profile
    return PROFILES[row.profiles[0]] if row.profiles else DEFAULT


@cache
def page(alert: str, profile: Profile | None = None) -> str:
    """Return the runbook of an alert with the profile's thresholds. `KeyError` where the table has no such alert."""
    row = BY_ALERT[alert]
    in_force = _profile_of(row, profile)
    text = _ENVIRONMENT.get_template("runbook.md.j2").render(
        row=row,
        remedy=row.remedy.with_figures(in_force.figures),
        query=query(row),
        urgency=_URGENCY[row.severity],
        when=when(row, in_force),
        hold=_in_words(row.hold),
        keep_firing=_in_words(row.keep_firing),
        causes=[BY_ID[cause].alert for cause in row.causes if BY_ID[cause].alert],
        unless=[BY_ID[other].alert or BY_ID[other].summary for other in row.unless],
        prose=prose(row.id, profile).strip(),
        is_predictable=is_predictable(row),
    )
    return linked(text, alert)


@cache
def index() -> str:
    """Return the list of all runbooks, most urgent first."""
    rows = [(row, row.remedy.with_figures(DEFAULT.figures)) for row in ALERTS]
    groups = [(words, [each for each in rows if each[0].severity == severity]) for severity, words in _URGENCY.items()]
    text = _ENVIRONMENT.get_template("runbooks.md.j2").render(groups=[group for group in groups if group[1]])
    return linked(text, "")


def files() -> dict[str, str]:
    """Return every page and the index: repository path → text."""
    pages = {f"{FOLDER}/{alert}.md": _COMPUTED.format(id=row.id) + page(alert) for alert, row in BY_ALERT.items()}
    return {**pages, f"{FOLDER}/README.md": _COMPUTED.format(id="*") + index()}


def linked(text: str, alert: str) -> str:
    """Return the text with a link at every other alert that is named outside code."""

    def link(match: re.Match[str]) -> str:
        name = match[1]
        return f"[{name}]({name}.md)" if name and name != alert and name in BY_ALERT else match[0]

    return _CODE_OR_NAME.sub(link, text)


def when(row: Diagnosis, profile: Profile | None = None) -> str:
    """Return in words when the rule's condition holds."""
    profile = _profile_of(row, profile)
    value, over = row.condition.bound(profile)
    return row.sentence(value, profile.figures) + over


def _in_words(duration: str) -> str:
    """Spell a rule's duration: 5m → 5 minutes; empty for none."""
    number, unit = duration[:-1], duration[-1:]
    if not number or int(number) == 0:
        return ""
    return f"{number} {_UNITS[unit]}{'' if number == '1' else 's'}"
