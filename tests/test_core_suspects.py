"""Flags away from SGLang's defaults: the first advice where figures show them to be the cause, else silence."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_tuning_exporter.core.diagnoses.suspects import SUSPECTS, proven
from sglang_tuning_exporter.core.judge import judge
from sglang_tuning_exporter.core.view import View
from sglang_tuning_exporter.sglang.flags import flag_of, releases
from views import Load, late, seen

RELEASE = "0.5.23"
POOL = 400_000.0
FULL_OF_MANY = Load(running=100, why="pool_full", usage=0.95, prompt=1200)
HELD = Load(why="held_back", usage=0.5, prompt=300)
SLOW_STARTS = Load(running=4, why="held_back", queued=28, usage=0.02, prompt=300)
LATE_TOKENS = Load(running=6, more={**late("inter_token", 0.3), "throughput": 20 * 200.0, "throughput:s": 200.0})


def of(load: Load, profile: str = "online", **arguments: Any) -> View:
    return seen(load, profile, RELEASE, **{"POOL": POOL, **arguments})


def by_row(view: View) -> dict[str, list[tuple[str, object]]]:
    return {found.diagnosis: [(each.flag, each.to) for each in found.changes] for found in judge(view).findings}


def suspected(view: View) -> dict[str, object]:
    return {change.arg: change.to for change in proven(view)}


# Proven: the first advice of what they cause


@pytest.mark.parametrize(
    ("load", "args", "row", "first"),
    [
        (Load(more={"rejected_requests": 20.0}), {"max_queued_requests": 4}, "requests_rejected",
            ("--max-queued-requests", 16)),
        (SLOW_STARTS, {"prefill_decode_interval": 16}, "admission_too_conservative", ("--prefill-decode-interval", 0)),
        (SLOW_STARTS, {"enable_prefill_delayer": True}, "admission_too_conservative",
            ("--enable-prefill-delayer", False)),
        (FULL_OF_MANY, {"max_total_tokens": 400_000, "LIMIT": 4096.0}, "running_far_below_limit",
            ("--max-total-tokens", 800_000)),
    ],
)  # fmt: skip
def test_a_flag_that_figures_show_to_be_the_cause_is_the_first_advice(
    load: Load, args: dict[str, Any], row: str, first: tuple[str, object]
) -> None:
    assert by_row(of(load, **args))[row][0] == first


# Beside what holds


@pytest.mark.parametrize(
    ("load", "args"),
    [
        (Load(), {"max_prefill_tokens": 256, "prefill_decode_interval": 16}),  # nothing is wrong
        (Load(seconds=15, running=6, why="held_back"), {"prefill_decode_interval": 16}),  # too little load
        (HELD, {}),
        (Load(), {"enable_prefill_delayer": True}),
        (FULL_OF_MANY, {"enable_prefill_delayer": True}),  # the cache makes them wait
        (Load(running=8, why="running_limit"), {"enable_prefill_delayer": True, "LIMIT": 8.0}),
        (LATE_TOKENS, {"disable_overlap_schedule": True, "log_level": "debug"}),  # no figure shows that it is the cause
    ],
)
def test_without_a_trouble_that_it_causes_no_flag_is_named(load: Load, args: dict[str, Any]) -> None:
    assert suspected(of(load, **args)) == {}


# The table


def test_each_suspect_is_a_flag_of_a_release_with_its_reasons() -> None:
    for suspect in SUSPECTS:
        assert any(flag_of(suspect.change.arg, release) for release in releases()), suspect.change.arg
        assert suspect.change.why.endswith(".")
        assert suspect.change.not_if


def test_no_default_of_any_release_is_a_suspect() -> None:
    for suspect in SUSPECTS:
        for release in releases():
            flag = flag_of(suspect.change.arg, release)
            assert flag is None or not suspect.is_suspicious(flag.default), (suspect.change.arg, release)
