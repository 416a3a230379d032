"""The runbooks: for each alert a page, as Markdown; and the alerts in the order of their urgency.

The prose is in `core/diagnoses/prose/<diagnosis>.md`, a template over the thresholds in force. The table adds when the alert fires, which flag to change,
and the causes.
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
# SGLang's tuning guide, which the rows summarise.
GUIDE_URL = "https://docs.sglang.io/docs/advanced_features/hyperparameter_tuning"

ALERTS: tuple[Diagnosis, ...] = (*(row for row in ALL if row.alert), *EXPORTER)
BY_ALERT: dict[str, Diagnosis] = {row.alert: row for row in ALERTS}
# Causes stay before their consequences.
MOST_SEVERE_FIRST: tuple[Diagnosis, ...] = tuple(sorted(ALERTS, key=lambda row: -URGENCY[row.severity]))


def _inhibitions() -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Give the labels in which two alerts agree, the alerts that hold back, and those that are held back."""
    for row in ALERTS:
        if row.silences == "target":
            yield row.silences, (row.alert,), tuple(name for name in BY_ALERT if name != row.alert)
    held: dict[tuple[Diagnosis, ...], list[Diagnosis]] = {}
    for row in ALERTS:
        for cause in held_back_by(row):
            held.setdefault((cause,), []).append(row)
    # Causes that hold back the same alerts stand in one rule.
    causes: dict[tuple[str, ...], list[str]] = {}
    for (cause,), rows in held.items():
        causes.setdefault(tuple(row.alert for row in rows), []).append(cause.alert)
    for names, holding in causes.items():
        yield "server", tuple(holding), names
    for row in ALERTS:
        if row.silences == "pool and diagnosis":
            yield row.silences, (row.alert,), tuple(each.alert for each in ALL if each.alert)


# While one of the first alerts fires, Alertmanager does not notify of the others that agree in these labels. Everything else the exporter
# leaves out itself, before it begins. An exporter's own death has no label of one of its servers.
INHIBITIONS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = tuple(_inhibitions())

_COMPUTED = "<!-- Made by `sglang-tuning-exporter generate` from the table of diagnoses and core/diagnoses/prose/{id}.md. -->\n\n"
_URGENCY = {
    "critical": "critical: requests fail or will fail soon; act now",
    "warning": "warning: clients wait longer than necessary, or will soon; act today",
    "info": "info: nothing is broken, something can be improved; act when there is time",
}
# What `grep -E` must look for in a log of any release, from 0.3.0 on.
_GREPS = {
    "crash_lines": "hit an exception|Exception in (ModelTp|run_tp|Controller)|crashed with exit code|[Rr]eceived sigquit|SIGQUIT received"
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
    """Return a server that nothing was seen of."""
    return View(Totals(), Facts(), profile, 0.0)


def figures(profile: profiles.Profile) -> dict[str, str]:
    """Return the thresholds of a profile as words, for the table's texts and the prose: without a server at hand."""
    return {
        **figures_of(_unseen(profile)),
        "given_up_after": "at the same age",
        "latency_budget": f"{100 * (1 - profile.latency_objective):.3g} %",
        "latency_objective": f"{100 * profile.latency_objective:.4g} %",
    }


def prose(diagnosis: str, profile: profiles.Profile | None = None) -> str:
    """Return the prose of a diagnosis with the profile's thresholds."""
    row = next(row for row in ALERTS if row.id == diagnosis)
    return _ENVIRONMENT.get_template(f"{diagnosis}.md").render(**figures(_profile_of(row, profile)), **_GREPS)


def _profile_of(row: Diagnosis, profile: profiles.Profile | None) -> profiles.Profile:
    """Return the profile to write a row's page for: that of the server, where the row is used with it."""
    if profile is not None and (not row.profiles or profile.name in row.profiles):
        return profile
    return profiles.PROFILES[row.profiles[0]] if row.profiles else profiles.DEFAULT


@cache
def page(alert: str, profile: profiles.Profile | None = None) -> str:
    """Return the runbook of an alert with the profile's thresholds. `KeyError` where the table has no such alert."""
    row = BY_ALERT[alert]
    in_force = _profile_of(row, profile)
    text = _ENVIRONMENT.get_template("runbook.md.j2").render(
        row=row,
        summary=summary(row),
        advice=advice(row, in_force),
        guide=fill(row.guide, figures(in_force)),
        will_not_help_if=fill(row.remedy.not_if, figures(in_force)),
        urgency=_URGENCY[row.severity],
        when=when(row, in_force),
        after=_in_words(row.after),
        until=_in_words(row.until),
        causes=[cause.alert for cause in causes_of(row) if cause.alert and not row.notified_beside_causes],
        unless=[other.alert or other.summary for other in better_explained_by(row)],
        inhibited_by=[name for _, causes, held in INHIBITIONS if alert in held for name in causes],
        by_prometheus=row in EXPORTER,
        prose=prose(row.id, profile).strip(),
    )
    return linked(text, alert)


@cache
def index() -> str:
    """Return the list of all runbooks, most urgent first."""
    groups = [
        (words, [(row, advice(row, profiles.DEFAULT)) for row in ALERTS if row.severity == severity])
        for severity, words in _URGENCY.items()
    ]
    text = _ENVIRONMENT.get_template("runbooks.md.j2").render(groups=groups, summary=summary)
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


def advice(row: Diagnosis, profile: profiles.Profile) -> str:
    """Return what to change where no value is computed: `raise --schedule-conservativeness: 1.3`."""
    flag, words = row.remedy.flag, fill(row.remedy.words, figures(profile))
    if not flag or words.startswith("add --"):
        return words
    return words.replace("add it", f"add {flag}") if "add it" in words else f"{row.remedy.direction} {flag}: {words}"


def summary(row: Diagnosis) -> str:
    """Return what has happened, without a figure."""
    return fill(row.summary, figures(profiles.DEFAULT))


def past(row: Diagnosis) -> str:
    """Return what had happened, without a time or a figure: of an alert that is over."""
    return fill(row.over(), figures(profiles.DEFAULT))


def when(row: Diagnosis, profile: profiles.Profile) -> str:
    """Return in words when the condition of a row holds."""
    if row.sign:
        return row.sign
    limit = bound(row, profile)
    words = {**figures(profile), "value": limit, "s": "" if limit == "at least one" else "s"}
    over = {"share": ", over ten minutes", "rate": ", over ten minutes"}.get(row.when.kind, "")
    return _ONE.sub(r"\1/min", fill(row.seen, words)) + over


def bound(row: Diagnosis, profile: profiles.Profile) -> str:
    """Return the limit of a row's condition in words, such as `more than 50 %`."""
    if row.when.kind == "event":
        return "at least one"
    limit = row.when.bound(_unseen(profile)) or 0.0
    word = "less than" if row.when.side == "below" else "more than"
    unit = {"GB": " GB", "seconds": " s"}.get(row.when.unit, "")
    return f"{word} {100 * limit:.3g} %" if row.when.unit == "share" else f"{word} {limit:g}{unit}"


def _in_words(seconds: float) -> str:
    """Spell a duration: 300 → 5 minutes; empty for none."""
    minutes = round(seconds / 60)
    return f"{minutes} minute{'' if minutes == 1 else 's'}" if minutes else ""
