"""Markdown tables made of the program's own tables: alerts and settings for the README, sources of facts for docs/sources.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sglang_tuning_exporter.config import OPTIONS, Option
from sglang_tuning_exporter.diagnosis.row import Diagnosis
from sglang_tuning_exporter.diagnosis.table import ALERTS
from sglang_tuning_exporter.state.profiles import DEFAULT

# The alerts and the settings that the README shows.
MOST_IMPORTANT = (
    "SGLangServerDown",
    "SGLangSchedulerStuck",
    "SGLangOutOfMemoryDecode",
    "SGLangRetractingTooOften",
    "SGLangQueueTooLong",
    "SGLangTimeToFirstTokenBurningFast",
)
EVERYDAY = ("sglang_url", "log_file", "profile", "listen_address", "threshold", "state_file", "web_config")


def inserts() -> dict[str, dict[str, str]]:
    """Return the text for each marked place: file → name of the place → text."""
    rows = {row.alert: row for row in ALERTS}
    alerts = [(link(rows[name], "alerts"), when(rows[name]), advice(rows[name])) for name in MOST_IMPORTANT]
    options = {option.name: option for option in OPTIONS}
    # a help text without its list of names
    settings = [
        (f"`{option.flag}`", default(option), option.help.partition(": ")[0])
        for option in (options[name] for name in EVERYDAY)
    ]
    return {
        "README.md": {
            "alerts": _table(("alert", "when", "what to change"), alerts),
            "settings": _table(("flag", "default", "meaning"), settings),
        }
    }


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)])


def default(option: Option) -> str:
    """Return a setting's default for a table."""
    return f"`{option.default_text}`" if option.default_text else "-"


def link(row: Diagnosis, alerts: str) -> str:
    """Return an alert's name as a link to its runbook; `alerts` is the path to that folder."""
    return f"[{row.alert}]({alerts}/runbooks/{row.alert}.md)"


def when(row: Diagnosis) -> str:
    """Return when an alert fires."""
    return row.summary.removesuffix(".") + (f" (profile {', '.join(row.profiles)})" if row.profiles else "")


def advice(row: Diagnosis) -> str:
    """Return what to change, where no figure can be computed."""
    remedy = row.remedy.with_figures(DEFAULT.figures)
    flag = "`--" + remedy.arg.replace("_", "-") + "`" if remedy.arg else ""
    return f"{remedy.direction} {flag}: {remedy.fallback}" if flag else remedy.fallback


def inserted(text: str, places: dict[str, str]) -> str:
    """Return `text` with the part between each pair of markers replaced."""
    for name, content in places.items():
        begin, end = f"<!-- generated: {name} -->", "<!-- /generated -->"
        before, found, rest = text.partition(begin)
        if found and end in rest:
            text = before + begin + "\n" + content + "\n" + end + rest.partition(end)[2]
    return text
