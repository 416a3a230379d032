"""Profiles: thresholds that agree with each other, and the settings that the guide has for each workload."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.facts import Facts
from sglang_tuning_exporter.core.judge import judge
from sglang_tuning_exporter.core.view import View
from sglang_tuning_exporter.sglang.flags import flag_of, releases
from views import Load, seen


def server(version: str, role: str = "null") -> Any:
    return Facts({"disaggregation_mode": role}, version=version)


def left(gigabytes: float, **thresholds: float) -> View:
    """A server with so much memory left, judged by the operator's own thresholds."""
    view = seen(Load(), "online", "0.5.9", LEFT=gigabytes, BEFORE=80.0, mem_fraction_static=0.85)
    return replace(view, profile=view.profile.with_thresholds(thresholds))


@pytest.mark.parametrize(
    ("profile", "thresholds", "contradiction"),
    [
        ("online", {"reserve_lower_gb": 12.0}, "reserve_lower_gb=12: give a number below reserve_upper_gb=10"),
        ("online", {"reserve_upper_gb": 4.0}, "reserve_upper_gb=4: give a number above reserve_lower_gb=5"),
        ("online", {"reserve_aim_gb": 11.0}, "reserve_aim_gb=11: give a number below reserve_upper_gb=10"),
        ("online", {"reserve_least_gb": 5.0}, "reserve_least_gb=5: give a number below reserve_lower_gb=5"),
        ("offline", {"queue_upper": 50.0}, "queue_upper=50: give a number above queue_lower=100"),
        (
            "offline",
            {"queue_lower": 300.0, "queue_upper": 300.0},
            "queue_lower=300: give a number below queue_upper=300",
        ),
        ("online", {"queue_upper": 50.0}, ""),
        ("online", {"reserve_lower_gb": 8.0}, ""),
        ("offline", {"queue_lower": 200.0, "queue_upper": 300.0}, ""),
    ],
)
def test_thresholds_that_contradict_each_other_are_named_with_the_bound(
    profile: str, thresholds: dict[str, float], contradiction: str
) -> None:
    assert PROFILES[profile].with_thresholds(thresholds).contradiction.startswith(contradiction)
    assert bool(PROFILES[profile].with_thresholds(thresholds).contradiction) is bool(contradiction)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("version", ["0.3.6", "0.5.23"])
def test_no_profile_contradicts_itself_in_any_edition(profile: str, version: str) -> None:
    assert not PROFILES[profile].for_server(is_first_edition=server(version).is_first_edition, role="").contradiction


@given(st.floats(0.5, 40.0), st.floats(0.5, 40.0), st.floats(0.1, 60.0))
def test_memory_advice_lies_within_the_range_in_force(lower: float, width: float, reserve: float) -> None:
    thresholds = {"reserve_least_gb": 0.05, "reserve_lower_gb": lower, "reserve_upper_gb": lower + width}
    of = left(reserve, **thresholds)
    assert lower < of.profile.reserve_aim_gb < lower + width
    for finding in judge(of).findings:
        for change in finding.changes:
            if change.arg != "mem_fraction_static" or not isinstance(change.to, float):
                continue
            assert isinstance(change.now, float)
            assert (change.to > change.now) is (finding.diagnosis == "memory_reserve_too_large")


@pytest.mark.parametrize("profile", PROFILES)
def test_every_setting_of_a_profile_is_an_argument_of_a_release(profile: str) -> None:
    known = [[flag_of(setting.arg, release) for release in releases()] for setting in PROFILES[profile].settings]
    assert known
    assert all(any(flags) for flags in known)
