"""docs/diagnoses.md: each row of the table, from what is seen to the state, the alert, the advice and the test, as Markdown."""

from __future__ import annotations

from sglang_tuning_exporter.guide.diagnosis import (
    BurnRate,
    Condition,
    Diagnosis,
    Failures,
    GraphMemory,
    Rejections,
    Reserve,
    RetractionRate,
    Share,
    Slow,
    Source,
    Spread,
    Starts,
    Stuck,
    Suits,
)
from sglang_tuning_exporter.guide.profiles import PROFILES, THRESHOLDS, Setting
from sglang_tuning_exporter.guide.table import BY_ID, DIAGNOSES

_WORDS: tuple[tuple[type[Condition] | tuple[type[Condition], ...], str], ...] = (
    (Reserve, "`available_gpu_memory_bytes` against `reserve_lower_gb`, `reserve_upper_gb`"),
    (GraphMemory, "failures in graph capture, or `available_gpu_memory_bytes` below `reserve_least_gb`"),
    (Rejections, "requests rejected or given up a minute above `rejections_per_minute`, five minutes"),
    (Stuck, "`stuck_stage` of the tokenizer, scheduler or detokenizer, or a watchdog timeout in the log"),
    (
        Spread,
        "share of the time with requests waiting: fullest DP rank above `frequent_share`, emptiest below a tenth; ten minutes",
    ),
    (Suits, "a test of the server's set-up and load: `guide/suitability.py`"),
    (Source, "told by where the figures come from"),
    (BurnRate, "an objective's error budget, two windows"),
)


def page() -> str:
    """Write the page."""
    lines = [
        "# Every diagnosis",
        "",
        "Made by `sglang-tuning-exporter generate` from the table of diagnoses (`guide/`). A share is of the serving time of the last ten minutes, more than",
        "`frequent_share`. Thresholds are the profile's; each can be set: `--threshold NAME=VALUE`. Rows are in order of urgency: the first that holds is",
        "the verdict. Every row has its tests: `pytest tests/test_guide_rows.py -k ID`, and its rule's in `alerts/tests/`.",
        "",
        "| diagnosis | what must be seen | alert | what to turn | it costs | not while |",
        "|---|---|---|---|---|---|",
        *(_row(row) for row in DIAGNOSES),
        "",
        "## Why some rows have no alert",
        "",
        *(f"- `{row.id}`: {row.no_alert}." for row in DIAGNOSES if not row.alert),
        "",
        "## Thresholds by profile",
        "",
        "A server older than 0.4.3 gets the guide's first edition: a queue of 50 to 500 is healthy there.",
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
        "What SGLang's tuning guide sets for each workload. A server that is set otherwise is not wrong; where **needed** stands, it defeats what the",
        "profile is for.",
        "",
        "| profile | setting | it |",
        "|---|---|---|",
        *(_setting(name, setting) for name, of in PROFILES.items() for setting in of.settings),
    ]
    return "\n".join(lines) + "\n"


def _row(row: Diagnosis) -> str:
    turn = row.turn
    advice = f"{turn.direction} `--{turn.arg.replace('_', '-')}`: {turn.fallback}" if turn.arg else turn.fallback
    alert = (
        f"[{row.alert}](../alerts/runbooks/{row.alert}.md) ({row.severity})" if row.alert else f"none ({row.severity})"
    )
    profiles = f" (profile {', '.join(row.profiles)})" if row.profiles else ""
    others = ", ".join(f"`{other}`" for other in row.unless)
    return (
        f"| `{row.id}` | {_seen(row.condition)}{profiles} | {alert} | {advice} | {turn.cost or '-'} | {others or '-'} |"
    )


def _seen(condition: Condition) -> str:
    if isinstance(condition, Share):
        return f"share of `{condition.signal}` in {' or '.join(f'`{state}`' for state in condition.states)}"
    if isinstance(condition, RetractionRate):
        beyond = " with conservativeness above 1.43" if condition.capped else ""
        return f"more than `retractions_per_minute`{beyond}, five minutes"
    if isinstance(condition, Failures):
        return f"out of memory in {', '.join(condition.phases)}, ten minutes"
    if isinstance(condition, Starts):
        return f"{condition.at_least} starts in half an hour"
    if isinstance(condition, Slow):
        return f"more than {condition.times:g} times the budget of {condition.latency.replace('_', ' ')} missed, because of the {condition.because}"
    return next(words for kind, words in _WORDS if isinstance(condition, kind))


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
