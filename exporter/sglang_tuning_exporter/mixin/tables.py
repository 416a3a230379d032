"""Markdown tables made of the program's own tables: alerts and settings for the README, sources of facts for docs/sources.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tuning_exporter.config import OPTIONS, Option
from sglang_tuning_exporter.diagnosis.row import Diagnosis
from sglang_tuning_exporter.diagnosis.table import ALERTS
from sglang_tuning_exporter.state.profiles import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Sequence


def inserts() -> dict[str, dict[str, str]]:
    """Return the text for each marked place: file → name of the place → text."""
    return {"README.md": {"alerts": alerts_table(MOST_IMPORTANT), "settings": settings_table(EVERYDAY)}}


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


def alerts_table(names: Sequence[str]) -> str:
    """Return these alerts with their advice as a Markdown table."""
    rows = {row.alert: row for row in ALERTS}
    head = ["| alert | when | what to change |", "|---|---|---|"]
    return "\n".join(
        [*head, *(f"| {link(rows[name], 'alerts')} | {when(rows[name])} | {advice(rows[name])} |" for name in names)]
    )


def settings_table(names: Sequence[str]) -> str:
    """Return these settings of `serve` as a Markdown table."""
    options = {option.name: option for option in OPTIONS}
    head = ["| flag | default | meaning |", "|---|---|---|"]
    return "\n".join(
        [
            *head,
            *(
                f"| `{options[name].flag}` | {default(options[name])} | {_brief(options[name].help)} |"
                for name in names
            ),
        ]
    )


def _brief(text: str) -> str:
    """Return a help text without its list of names."""
    return text.partition(": ")[0]


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
