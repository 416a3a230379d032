"""The runbooks: for each alert a page for whoever it wakes, as Markdown.

The prose is in `diagnosis/runbooks/<diagnosis>.md`. The table adds when the alert fires, which flag to change, and the causes.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files as packaged

from jinja2 import Environment, PackageLoader, StrictUndefined

from sglang_tuning_exporter.diagnosis.alerting import query
from sglang_tuning_exporter.diagnosis.row import Diagnosis
from sglang_tuning_exporter.diagnosis.table import ALERTS, BY_ID
from sglang_tuning_exporter.state.profiles import DEFAULT, DEFAULT_PROFILE, PROFILES

SECTIONS = ("Meaning", "Impact", "Diagnosis", "Mitigation")
FOLDER = "alerts/runbooks"
_MADE = (
    "<!-- Made by `sglang-tuning-exporter generate` from the table of diagnoses and diagnosis/runbooks/{id}.md. -->\n\n"
)
_URGENCY = {
    "critical": "critical: requests fail or will fail soon; act now",
    "warning": "warning: clients wait longer than necessary, or will soon; act today",
    "info": "info: nothing is broken, something can be improved; act when there is time",
}
# The tuning guide of SGLang, whose advice the rows repeat.
GUIDE_URL = "https://docs.sglang.io/docs/advanced_features/hyperparameter_tuning"
_UNITS = {"s": "second", "m": "minute", "h": "hour"}
_FLAG = re.compile(r"(?<![\w`-])--[a-z][a-z0-9-]+")
# Code stays unchanged: readers paste it.
_CODE_OR_NAME = re.compile(r"```.*?```|`[^`\n]+`|\b(SGLang[A-Z]\w+)\b", re.DOTALL)
_ENVIRONMENT = Environment(
    loader=PackageLoader("sglang_tuning_exporter.diagnosis"),
    autoescape=False,  # noqa: S701 # nosec B701 # Markdown, made from the table and the package's own pages
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.globals["guide_url"] = GUIDE_URL
_ENVIRONMENT.globals["turn"] = lambda row: row.turn.filled(DEFAULT.figures)
_ENVIRONMENT.filters["coded"] = lambda text: _FLAG.sub(r"`\g<0>`", text)


def with_alerts() -> dict[str, Diagnosis]:
    """Give the rows that notify: alert → row, most urgent first."""
    return {row.alert: row for row in ALERTS}


def prose(diagnosis: str) -> str:
    """Return the prose of a diagnosis: the four sections. `FileNotFoundError` where there is none."""
    page = packaged("sglang_tuning_exporter.diagnosis") / "runbooks" / f"{diagnosis}.md"
    return page.read_text(encoding="utf-8")


@cache
def page(alert: str) -> str:
    """Write the runbook of an alert. `KeyError` where the table has no such alert."""
    row = with_alerts()[alert]
    text = _ENVIRONMENT.get_template("runbook.md.j2").render(
        row=row,
        query=query(row),
        urgency=_URGENCY[row.severity],
        when=when(row),
        hold=_in_words(row.hold),
        keep_firing=_in_words(row.keep_firing),
        flag="--" + row.turn.arg.replace("_", "-") if row.turn.arg else "",
        causes=[BY_ID[cause].alert for cause in row.causes if BY_ID[cause].alert],
        unless=[BY_ID[other].alert or BY_ID[other].summary for other in row.unless],
        prose=prose(row.id).strip(),
    )
    return linked(text, alert)


@cache
def index() -> str:
    """Write the list of all runbooks, most urgent first."""
    rows = list(with_alerts().values())
    groups = [(word, [row for row in rows if row.severity == word]) for word in _URGENCY]
    text = _ENVIRONMENT.get_template("runbooks.md.j2").render(
        groups=[(_URGENCY[word], found) for word, found in groups if found]
    )
    return linked(text, "")


def files() -> dict[str, str]:
    """Every page and the index: repository path → text."""
    pages = {f"{FOLDER}/{alert}.md": _MADE.format(id=row.id) + page(alert) for alert, row in with_alerts().items()}
    return {**pages, f"{FOLDER}/README.md": _MADE.format(id="*") + index()}


def linked(text: str, alert: str) -> str:
    """Link every other alert that is named outside code; other words stay as they are."""

    def link(match: re.Match[str]) -> str:
        name = match[1]
        return f"[{name}]({name}.md)" if name and name != alert and name in with_alerts() else match[0]

    return _CODE_OR_NAME.sub(link, text)


def when(row: Diagnosis) -> str:
    """Say in words when the rule's condition holds, with the default profile's thresholds."""
    profile = PROFILES[row.profiles[0] if row.profiles else DEFAULT_PROFILE]
    value, over = row.condition.bound(profile)
    return row.sentence(value, profile.figures) + over


def _in_words(duration: str) -> str:
    """Spell a rule's duration: 5m → 5 minutes; empty for none."""
    number, unit = duration[:-1], duration[-1:]
    if not number or int(number) == 0:
        return ""
    return f"{number} {_UNITS[unit]}{'' if number == '1' else 's'}"
