"""The guide's settings for a profile, where this server differs. Pure."""

from __future__ import annotations

from sglang_tuning_exporter.diagnosis.evidence import Evidence, Past
from sglang_tuning_exporter.diagnosis.sizing.advised_value import AdvisedValue, SizingInput
from sglang_tuning_exporter.diagnosis.suspect_flags import PAGED_BACKENDS
from sglang_tuning_exporter.diagnosis.suspects import troubles
from sglang_tuning_exporter.state.profiles import Setting


def differing_settings(past: Past) -> list[Setting]:
    """Return the settings that differ and that the profile needs, or that can cure the trouble seen."""
    facts, seen = past.facts, troubles(past)
    found = []
    for setting in past.profile.settings:
        current = facts.args.get(setting.arg) if isinstance(setting.value, str) else facts.arg(setting.arg)
        if current is None or current == setting.value or not facts.flag(setting.arg):
            continue
        if not setting.needed and (seen.isdisjoint(setting.helps) or facts.is_cpu):
            continue
        if setting.requires and not facts.arg(setting.requires):
            continue
        if setting.arg == "page_size" and facts.args.get("attention_backend") in PAGED_BACKENDS:
            continue
        found.append(setting)
    return found


def differing_evidence(past: Past) -> Evidence | None:
    """Count the settings that differ; None if the server's arguments are not known."""
    if not past.facts.args:
        return None
    count = float(len(differing_settings(past)))
    return Evidence("settings that differ from the guide's for this profile", count, 0.0, "count")


def values(basis: SizingInput) -> list[AdvisedValue]:
    """Return the guide's value for each setting that differs."""
    return [
        AdvisedValue(
            setting.value,
            basis.present(setting.arg),
            f"it {setting.why}",
            setting.arg,
            is_switch=setting.is_switch,
        )
        for setting in differing_settings(basis.past)
    ]
