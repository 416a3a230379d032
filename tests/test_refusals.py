"""What a release would refuse or ignore: a release, flag values and changes in, an objection out.

The expected answers are those of the releases' own parsers and argument checks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sglang_tuning_exporter.sglang.args.flags import flag_of, releases
from sglang_tuning_exporter.sglang.args.refusals import checks, objection

if TYPE_CHECKING:
    from collections.abc import Mapping


def kind(release: str, values: Mapping[str, object], **changes: object) -> str:
    found = objection(release, values, changes)
    return "" if found is None else found.kind


@pytest.mark.parametrize(
    ("release", "policy", "expected"),
    [("0.5.23", "lpm", "refused"), ("0.5.3.post3", "lpm", "refused"), ("0.5.23", "lof", ""), ("0.5.23", "fcfs", "")],
)
def test_with_priority_scheduling_only_two_orders_are_accepted(release: str, policy: str, expected: str) -> None:
    assert kind(release, {"enable_priority_scheduling": True}, schedule_policy=policy) == expected


@pytest.mark.parametrize(
    ("release", "expected"),
    [("0.3.0", "refused"), ("0.4.0.post2", "refused"), ("0.4.1.post7", ""), ("0.5.23", "")],
)
def test_the_first_releases_have_one_kind_of_8_bit_cache(release: str, expected: str) -> None:
    assert kind(release, {}, kv_cache_dtype="fp8_e4m3") == expected
    assert kind(release, {}, kv_cache_dtype="fp8_e5m2") == ""


@pytest.mark.parametrize(
    ("release", "method", "expected"),
    [
        ("0.5.7", "total_requests", "refused"),
        ("0.5.8", "total_requests", ""),
        ("0.4.9.post6", "shortest_queue", "refused"),  # the parser takes it, and the first request fails
        ("0.5.3.post3", "shortest_queue", ""),
        ("0.5.8", "shortest_queue", "refused"),
    ],
)
def test_how_ranks_can_be_balanced_differs_by_release(release: str, method: str, expected: str) -> None:
    assert kind(release, {"dp_size": 2}, load_balance_method=method) == expected


@pytest.mark.parametrize(
    ("release", "dp", "expected"),
    [("0.4.9.post6", 1, "refused"), ("0.5.9", 1, "ignored"), ("0.4.9.post6", 8, ""), ("0.5.9", 3, "refused")],
)
def test_attention_data_parallelism_needs_ranks_that_divide_the_gpus(release: str, dp: int, expected: str) -> None:
    assert kind(release, {"tp_size": 8}, enable_dp_attention=True, dp_size=dp) == expected


def test_a_check_that_the_running_server_fails_already_is_ignored() -> None:
    odd: dict[str, object] = {"page_size": 64, "chunked_prefill_size": 100}
    assert kind("0.5.9", odd, chunked_prefill_size=200) == ""


def test_every_check_is_about_arguments_that_its_releases_have() -> None:
    known = releases()
    for check in checks():
        assert check.first <= check.last
        assert flag_of(check.arg, known[check.last]) or flag_of(check.arg, known[check.first]), check
