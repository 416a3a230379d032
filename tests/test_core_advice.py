"""The advised flag, its present value and the value to try. Arguments are as the server prints them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tuning_exporter.core.advice import advise
from sglang_tuning_exporter.core.diagnoses import ALL, BY_ID
from sglang_tuning_exporter.core.findings import Change
from sglang_tuning_exporter.core.view import View
from views import Load, seen

RANKS: dict[str, Any] = {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}
PREFILLS = {"full_lines": 100.0}  # as many as there are prefill batches


def advised(row: str, view: View, *also: str) -> list[Change]:
    return advise(BY_ID[row], view, frozenset(BY_ID[name] for name in also))


def typed(row: str, view: View, *also: str) -> list[str]:
    """Write changes as a person types them; words without a flag are an empty text."""
    return [
        (
            f"remove {each.flag}"
            if each.removes
            else f"{each.flag} {'' if each.to is True else each.to}".strip()
            if each.flag
            else ""
        )
        for each in advised(row, view, *also)
    ]


def one(row: str, view: View) -> Change:
    (change,) = advised(row, view)
    return change


@pytest.mark.parametrize("row", [row.id for row in ALL if not row.needs_advice])
def test_every_diagnosis_has_advice_even_where_nothing_is_known_of_the_server(row: str) -> None:
    nothing = seen(Load())
    nothing.facts.arguments.clear()
    for change in advised(row, nothing):
        assert change.words or change.to is not None
        assert change.why
        assert change.not_if


# Retractions


def test_a_limit_lowered_for_retractions_is_not_raised_for_the_room_it_left() -> None:
    assert not one("running_at_limit", seen(Load(usage=0.72), max_running_requests=51, LIMIT=51.0)).flag


def test_with_one_running_request_no_lower_limit_is_advised() -> None:
    view = seen(Load(ran=1, usage=0.95, prompt=2000), schedule_conservativeness=2.0, max_running_requests=1)
    assert not any(typed("conservativeness_ineffective", view))


# A mamba cache beside the main one


def test_a_higher_limit_needs_as_many_states_of_the_mamba_cache() -> None:
    args: dict[str, Any] = {"max_running_requests": 64, "max_mamba_cache_size": 192, "disable_radix_cache": False}
    view = seen(Load(usage=0.2, running=64, why="running_limit"), LIMIT=64.0, **args)
    view.facts.states = 192.0
    assert typed("running_at_limit", view) == ["--max-mamba-cache-size 240", "--max-running-requests 80"]


# DP attention prints the product of a flag


def test_a_flag_that_dp_attention_multiplies_is_advised_as_it_is_typed() -> None:
    view = seen(Load(), schedule_conservativeness=0.3, enable_dp_attention=True, dp_size=8)
    assert (one("retracting_too_often", view).now, one("retracting_too_often", view).to) == (1.0, 4.33)
    assert one("admission_too_conservative", view).flag == ""  # the default is at 0.3 already
    raised = seen(Load(ran=40, usage=0.95, prompt=2000), schedule_conservativeness=1.299, dp_size=2, tp_size=2,
                  enable_dp_attention=True, max_running_requests=100)  # fmt: skip
    assert typed("retracting_too_often", raised)[0] == "--max-running-requests 64"


def test_each_rank_keeps_one_request_at_least() -> None:
    args: dict[str, Any] = {"max_running_requests": 16, "mem_fraction_static": 0.9, **RANKS}
    assert typed("out_of_memory_decode", seen(Load(ran=2), version="0.5.9", **args))[0] == "--max-running-requests 12"
    assert typed("out_of_memory_decode", seen(Load(ran=1), version="0.5.9", **args))[0] == "--mem-fraction-static 0.8"


# The running limit


@given(st.integers(1, 5000), st.floats(0.01, 1.0))
def test_a_raised_limit_never_fills_the_cache_beyond_nine_tenths(limit: int, usage: float) -> None:
    for change in advised("running_at_limit", seen(Load(usage=usage), max_running_requests=limit)):
        if isinstance(change.to, int):
            assert limit < change.to <= 8 * limit
            assert usage * change.to / limit <= 0.9 + 1e-9


def test_a_limit_that_the_cache_cut_short_is_not_raised() -> None:
    assert not one("running_at_limit", seen(Load(usage=0.4), max_running_requests=1000, LIMIT=300.0)).flag


@pytest.mark.parametrize(
    ("captured", "memory", "flags"),
    [
        (160, {}, ["--max-running-requests 160"]),  # twice as many as now: within the graphs
        (64, {}, ["--max-running-requests 256", "--cuda-graph-max-bs 256"]),
        (
            64,
            {"LEFT": 5.5},
            ["--max-running-requests 256", "--cuda-graph-max-bs 256", "--mem-fraction-static 0.83"],
        ),  # room for them
        (64, {"GRAPHS": 5.0}, ["--max-running-requests 256", "--cuda-graph-max-bs 256", "--mem-fraction-static 0.71"]),
    ],
)
def test_a_raised_limit_stays_within_graphs_or_raises_them(
    captured: int, memory: dict[str, float], flags: list[str]
) -> None:
    args: dict[str, Any] = {
        "max_running_requests": 64, "cuda_graph_max_bs": captured, "mem_fraction_static": 0.88, "LEFT": 8.0,
        "GRAPHS": 1.0, "BEFORE": 80.0,
    }  # fmt: skip
    assert typed("running_at_limit", seen(Load(usage=0.22), version="0.5.9", **{**args, **memory})) == flags


def test_graphs_that_take_the_room_of_the_requests_they_are_for_are_not_advised() -> None:
    args: dict[str, Any] = {
        "max_running_requests": 64,
        "cuda_graph_max_bs": 64,
        "mem_fraction_static": 0.88,
        "BEFORE": 80.0,
        "GRAPHS": 2.0,
    }
    view = seen(Load(usage=0.6), version="0.5.9", LEFT=5.5, POOL_GB=5.0, POOL=70_000.0, **args)
    (change,) = advised("running_at_limit", view)
    assert (change.flag, change.words[:7]) == ("", "nothing")


# Memory


@given(st.floats(0.5, 4.99) | st.floats(10.01, 40.0), st.floats(24.0, 288.0), st.integers(300, 900))
def test_about_six_and_a_half_gb_remain_within_a_step_and_never_less(
    left: float, before: float, thousandths: int
) -> None:
    fraction = thousandths / 1000
    row = "memory_reserve_too_large" if left > 10 else "memory_reserve_too_small"
    for change in advised(row, seen(Load(), mem_fraction_static=fraction, LEFT=left, BEFORE=before)):
        if not isinstance(change.to, float):
            continue
        assert (change.to > fraction) is (left > 10)
        remains = left - (change.to - fraction) * before
        if 0.1 < change.to < 0.95:
            assert 6.5 - 1e-3 <= remains <= 6.5 + 0.01 * before + 1e-3


@pytest.mark.parametrize(
    ("left", "fraction", "before", "to"),
    [(14.5, 0.47, 80.0, 0.57), (12.0, 0.85, None, 0.86), (4.0, 0.85, None, 0.84), (15.0, 0.95, 80.0, None),
        (15.0, 0.97, 80.0, None)],
)  # fmt: skip
def test_the_fraction_is_computed_or_moves_by_a_hundredth(
    left: float, fraction: float, before: float | None, to: float | None
) -> None:
    row = "memory_reserve_too_large" if left > 10 else "memory_reserve_too_small"
    assert one(row, seen(Load(), mem_fraction_static=fraction, LEFT=left, BEFORE=before)).to == to


@pytest.mark.parametrize(("left", "flags"), [(13.5, []), (9.87, []), (6.0, []), (5.5, ["mem_fraction_static"])])
def test_larger_graphs_are_paid_for_where_too_little_would_be_left(left: float, flags: list[str]) -> None:
    args: dict[str, Any] = {"cuda_graph_max_bs_decode": 160, "mem_fraction_static": 0.85}
    view = seen(Load(ran=300), version="0.5.23", LEFT=left, BEFORE=80.0, GRAPHS=1.0, **args)
    raised, *others = advised("cuda_graph_not_covering", view)
    assert (raised.flag, raised.to) == ("--cuda-graph-max-bs-decode", 320)
    assert [each.arg for each in others] == flags


# What a release accepts


@pytest.mark.parametrize(
    ("row", "release", "args", "expected"),
    [
        ("dp_imbalanced", "0.5.23", {"dp_size": 2, "load_balance_method": "round_robin"}, [("--load-balance-method"
            " total_requests")]),
        ("dp_imbalanced", "0.5.5.post3", {"dp_size": 2, "load_balance_method": "round_robin"},
            ["--load-balance-method shortest_queue"]),
        # its shortest_queue fails at the first request
        ("dp_imbalanced", "0.4.9.post6", {"dp_size": 2, "load_balance_method": "round_robin"}, [""]),
        ("dp_imbalanced", "0.3.0", {"dp_size": 2, "load_balance_method": "round_robin"}, [("--load-balance-method"
            " shortest_queue")]),
        ("running_far_below_limit", "0.4.0.post2", {"kv_cache_dtype": "auto"}, ["--kv-cache-dtype fp8_e5m2"]),
        ("running_far_below_limit", "0.4.1.post7", {"kv_cache_dtype": "auto"}, ["--kv-cache-dtype fp8_e4m3"]),
        ("dp_attention_candidate", "0.5.9", {"tp_size": 8, "dp_size": 1}, ["--enable-dp-attention", "--dp-size 8"]),
        ("dp_attention_candidate", "0.5.23", {"tp_size": 8, "dp_size": 1}, ["--attn-dp-size 8"]),
        ("dp_attention_candidate", "0.5.9", {"tp_size": 8, "dp_size": 2}, []),  # replicas stay
        ("expert_parallel_candidate", "0.4.9.post6", {"tp_size": 8, "ep_size": 1}, ["--enable-ep-moe"]),
        ("expert_parallel_candidate", "0.5.9", {"tp_size": 8, "ep_size": 1}, ["--ep-size 8"]),
        ("shared_prefixes_unused", "0.5.23", {"schedule_policy": "fcfs"}, ["--schedule-policy lpm"]),
        ("shared_prefixes_unused", "0.5.23", {"schedule_policy": "fcfs", "enable_priority_scheduling": True}, []),
        ("shared_prefixes_unused", "0.5.23", {"schedule_policy": "fcfs", "disable_radix_cache": True}, []),
        ("cuda_graph_not_covering", "0.5.12", {"cuda_graph_max_bs": 160}, ["--cuda-graph-max-bs 320"]),
        ("cuda_graph_not_covering", "0.5.14", {"cuda_graph_max_bs_decode": 160}, ["--cuda-graph-max-bs-decode 320"]),
        ("cuda_graph_off", "0.5.9", {"disable_cuda_graph": True}, ["remove --disable-cuda-graph"]),
    ],
)  # fmt: skip
def test_advice_is_spelled_as_the_servers_release_accepts_it(
    row: str, release: str, args: dict[str, Any], expected: list[str]
) -> None:
    assert typed(row, seen(Load(ran=300, usage=0.95), version=release, **args)) == expected


# Late tokens


@pytest.mark.parametrize(("chunk", "flag"), [(4096, ""), (512, "--chunked-prefill-size")])
def test_a_larger_chunk_is_no_advice_where_hardly_a_prompt_fills_the_present_one(chunk: int, flag: str) -> None:
    # As on a real server: 4096 -> 8192 for prompts of 24 tokens, because first tokens came late behind the last of a
    # queue.
    view = seen(Load(prompt=100, more=PREFILLS), version="0.5.23", chunked_prefill_size=chunk, max_prefill_tokens=16384)
    assert [each.flag for each in advised("latency_long_prompts", view)] == [flag]


def test_advice_to_people_goes_in_no_direction_of_a_flag() -> None:
    change = one("prefill_bound", seen(Load(prompt=100), version="0.5.23", chunked_prefill_size=16384))
    assert (change.flag, change.direction) == ("", "")


# Clients


@pytest.mark.parametrize("load", [Load(running=40, queued=2, prompt=1, started=800), Load(running=40, queued=24)])
def test_no_figure_is_invented_where_the_queue_is_short_or_starts_are_not_known(load: Load) -> None:
    assert "at most" not in one("queue_too_long", seen(load)).words
