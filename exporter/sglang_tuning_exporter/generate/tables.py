"""Tables for people, from the same tables that the program runs on: alert → advice for the README, fact → source for docs/sources.md."""

from __future__ import annotations

from sglang_tuning_exporter.guide.table import DIAGNOSES, Diagnosis
from sglang_tuning_exporter.sglang import facts


def inserts() -> dict[str, dict[str, str]]:
    """File → name of its marked place → text that belongs there."""
    return {"README.md": {"alerts": alerts_table()}}


def alerts_table() -> str:
    """Every alert with its advice, as Markdown."""
    head = ["| alert | when | what to turn | it will not help if |", "|---|---|---|---|"]
    return "\n".join([*head, *(_row(row) for row in DIAGNOSES)])


def _row(row: Diagnosis) -> str:
    when = row.summary.removesuffix(".") + (f" (profile {', '.join(row.profiles)})" if row.profiles else "")
    turn = row.turn
    flag = "`--" + turn.arg.replace("_", "-") + "`" if turn.arg else ""
    advice = f"{turn.direction} {flag}: {turn.fallback}" if flag else f"{turn.direction}: {turn.fallback}"
    return f"| **{row.alert}** ({row.severity}) | {when} | {advice} | {turn.will_not_help_if} |"


def sources_page() -> str:
    """Which metric tells which fact in which release, as Markdown."""
    lines = [
        "# Where each fact comes from",
        "",
        "Made by `sglang-tuning-exporter generate` from the table that the exporter reads metrics by. A fact that a release does not expose is taken from",
        "its log, and is absent where the log does not tell it either.",
        "",
        "| fact | metric | releases | over ranks |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {fact} | `{source}` | {versions} | {aggregation} |"
        for fact, source, versions, aggregation in facts.describe()
    ]
    return "\n".join(lines) + "\n"


def inserted(text: str, places: dict[str, str]) -> str:
    """`text` with what lies between each pair of markers replaced."""
    for name, content in places.items():
        begin, end = f"<!-- generated: {name} -->", "<!-- /generated -->"
        before, found, rest = text.partition(begin)
        if found and end in rest:
            text = before + begin + "\n" + content + "\n" + end + rest.partition(end)[2]
    return text
