"""docs/diagnoses.md: each row of the table, from what is seen to the state, the alert, the advice and the test, as Markdown."""

from __future__ import annotations

from sglang_tuning_exporter.diagnosis.row import Diagnosis
from sglang_tuning_exporter.diagnosis.table import BY_ID, DIAGNOSES
from sglang_tuning_exporter.state.profiles import DEFAULT, PROFILES, THRESHOLDS, Setting


def page() -> str:
    """Write the page."""
    lines = [
        "# Every diagnosis",
        "",
        "Made by `sglang-tuning-exporter generate` from the table of diagnoses (`diagnosis/`). A share is of the serving time of the last ten minutes, ",
        "and its limit is `frequent_share`. Thresholds are the profile's ([all of them](reference/profiles.md)). Rows are in order of urgency:",
        "the first that holds is the verdict. Every row has its tests: `pytest tests/test_guide_rows.py -k ID`, and its rule's in `alerts/tests/`.",
        "",
        "| diagnosis | evidence | alert | change | cost | not while |",
        "|---|---|---|---|---|---|",
        *(_row(row) for row in DIAGNOSES),
        "",
        "## Why some rows have no alert",
        "",
        *(f"- `{row.id}`: {row.why_no_alert}." for row in DIAGNOSES if not row.alert),
    ]
    return "\n".join(lines) + "\n"


# What a workload must be like for a profile to suit it.
_SUITS = {
    "online": "Users or programs wait for each answer. An empty queue is good; the limit of a queue is its estimated wait.",
    "offline": "Batch jobs: throughput matters, latency does not. An empty queue wastes capacity.",
    "long_context": "As `online`, with prompts of tens of thousands of tokens: time to first token may be longer.",
    "multi_turn": "As `online`, with conversations or agents that send the same prefix again: the prefix cache matters.",
}
assert _SUITS.keys() == PROFILES.keys()


def profiles_page() -> str:
    """Write what each profile is for, its thresholds and SGLang's settings for it, as Markdown."""
    lines = [
        "# Profiles and thresholds",
        "",
        "Made by `sglang-tuning-exporter generate` from the exporter's profiles. `--profile NAME` chooses one,",
        "`--threshold NAME=VALUE` replaces one of its thresholds. Rules and boards follow, because they read the thresholds from the exporter.",
        "",
        "| profile | for |",
        "|---|---|",
        *(f"| `{name}` | {_SUITS[name]} |" for name in PROFILES),
        "",
        "## Thresholds by profile",
        "",
        "For a release before 0.4.3 the first edition of SGLang's guide applies: a queue of 50 to 500 is healthy.",
        "",
        "| threshold | " + " | ".join(PROFILES) + " |",
        "|---" * (len(PROFILES) + 1) + "|",
        *(
            f"| `{name}` | " + " | ".join(_figure(getattr(of, name)) for of in PROFILES.values()) + " |"
            for name in THRESHOLDS
        ),
        "",
        "## Settings by profile",
        "",
        "What SGLang's tuning guide recommends for each workload. Other settings can be right too. Settings marked **needed** are required for the",
        "profile's purpose.",
        "",
        "| profile | setting | it |",
        "|---|---|---|",
        *(_setting(name, setting) for name, of in PROFILES.items() for setting in of.settings),
    ]
    return "\n".join(lines) + "\n"


def _row(row: Diagnosis) -> str:
    turn = row.turn.filled(DEFAULT.figures)
    advice = f"{turn.direction} `--{turn.arg.replace('_', '-')}`: {turn.fallback}" if turn.arg else turn.fallback
    alert = (
        f"[{row.alert}](../alerts/runbooks/{row.alert}.md) ({row.severity})" if row.alert else f"none ({row.severity})"
    )
    profiles = f" (profile {', '.join(row.profiles)})" if row.profiles else ""
    others = ", ".join(f"`{other}`" for other in row.unless)
    return f"| `{row.id}` | {row.condition.described}{profiles} | {alert} | {advice} | {turn.cost or '-'} | {others or '-'} |"


def _setting(profile: str, setting: Setting) -> str:
    flag = "--" + setting.arg.replace("_", "-")
    if setting.is_switch:
        typed = f"`{flag}`" if setting.value else f"no `{flag}`"
    else:
        typed = f"`{flag} {setting.value if isinstance(setting.value, str) else f'{setting.value:g}'}`"
    return f"| {profile} | {typed}{' (**needed**)' if setting.needed else ''} | {setting.why} |"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


assert all(other in BY_ID for row in DIAGNOSES for other in (*row.unless, *row.causes)), (
    "a row speaks of one that is not there"
)
