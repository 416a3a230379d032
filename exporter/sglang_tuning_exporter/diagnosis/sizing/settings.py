"""The guide's values for a profile's settings. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tuning_exporter.diagnosis.profile_settings import differing
from sglang_tuning_exporter.diagnosis.sizing.case import Value

if TYPE_CHECKING:
    from sglang_tuning_exporter.diagnosis.sizing.case import Case


def profile_settings(case: Case) -> list[Value]:
    """Set each as the guide does for this workload."""
    return [
        Value(
            setting.value,
            case.present(setting.arg),
            f"it {setting.why}",
            setting.arg,
            ("add it" if setting.value else "start without it") if setting.is_switch else "",
            is_switch=setting.is_switch,
        )
        for setting in differing(case.past)
    ]
