"""What a scheduler does, and why requests wait, by lines of its log: graphs, DP attention, pipelines, hybrid caches, disaggregation, settings that changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.course import Course
from sglang_tuning_exporter.core.findings import Judged
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.sglang.server_info import ServerInfo
from test_core_course import ARGUMENTS, decode, finding, found, judged, load, prefill, retraction, stamp, start

MINUTES = 200


def mostly(lines: Iterable[str], signal: str, profile: str = "online") -> str:
    """Return the state of a signal that held for most of the time."""
    shares = judged(lines, profile).shares.get(signal, {})
    return max(shares, key=shares.__getitem__, default="unknown")


# Why requests wait


@pytest.mark.parametrize(
    ("figures", "why"),
    [
        ({"queue": 0}, "no_queue"),
        ({"usage": 0.5}, "held_back"),
        ({"usage": 0.89}, "held_back"),
        ({"usage": 0.9}, "pool_full"),
        ({"running": 64}, "running_limit"),
        ({"running": 61}, "running_limit"),  # the next one is about to start
        ({"running": 59}, "held_back"),
        ({"running": 64, "usage": 0.95}, "pool_full"),  # then a higher limit would let no more run
    ],
)
def test_the_reason_why_requests_wait_is_named(figures: dict[str, Any], why: str) -> None:
    lines = load(20, MINUTES, **{"running": 40, "queue": 30, "usage": 0.5, **figures})
    assert mostly([*start(limit=64), *lines], "admission") == why


@pytest.mark.parametrize(
    ("queue", "profile", "state"),
    [
        (0, "offline", "empty"),
        (99, "offline", "below_range"),
        (100, "offline", "in_range"),
        (2000, "offline", "in_range"),
        (2001, "offline", "above_range"),
        (2, "online", "in_range"),  # one starts each two seconds
        (20, "online", "above_range"),
    ],
)
def test_a_queue_is_judged_by_its_length_or_by_the_wait_that_it_means(queue: int, profile: str, state: str) -> None:
    assert mostly([*start(), *load(20, MINUTES, queue=queue)], "queue", profile) == state


def test_a_prefill_batch_that_a_limit_of_requests_has_ended_is_not_full() -> None:
    lines = [prefill(20 + second, 60, 8, running=8, queue=20) for second in range(120)]
    assert mostly([*start(chunked_prefill_size=64), *lines], "admission") == "prefill_bound"
    assert mostly([*start(chunked_prefill_size=64, prefill_max_requests=8), *lines], "admission") != "prefill_bound"


# Graphs


def graphs(lines: Iterable[str]) -> set[str]:
    return {state for state, share in judged(lines).shares.get("cuda_graph", {}).items() if share > 0.05}


@pytest.mark.parametrize(
    ("running", "arguments", "state"),
    [
        (256, {}, "eager"),
        (257, {}, "beyond_captured"),
        (257, {"disable_cuda_graph": True}, "disabled"),
        (257, {"device": "cpu"}, "unsupported"),
        (100, {"cuda_graph_max_bs": 80}, "beyond_captured"),
    ],
)
def test_a_batch_without_a_graph_has_its_reason(running: int, arguments: dict[str, Any], state: str) -> None:
    assert graphs([*start(**arguments), *load(20, 60, running=running, graph=False)]) == {state}


@pytest.mark.parametrize(("running", "state"), [(160, "eager"), (161, "beyond_captured")])
def test_without_a_start_in_the_log_the_largest_captured_batch_is_taken_to_be_160(running: int, state: str) -> None:
    assert graphs(load(20, 60, running=running, graph=False)) == {state}


ATTENTION: dict[str, Any] = {"tp_size": 4, "dp_size": 4, "enable_dp_attention": True, "cuda_graph_max_bs": 160}


def rank(dp: int) -> str:
    return f"DP{dp} TP{dp}"


def beside(other: str, running: int = 8) -> list[str]:
    """A small batch without a graph on rank 0, beside what rank 3 prints."""
    lines = []
    for at in range(20, 320, 2):
        lines += [
            prefill(at, 900, running=8, usage=0.3, ranks=rank(3))
            if other == "prefill"
            else decode(at, 200, usage=0.3, graph=False, ranks=rank(3)),
            decode(at + 1, running, usage=0.3, graph=False, ranks=rank(0)),
        ]
    return lines


@pytest.mark.parametrize(
    ("arguments", "other", "seen"),
    [
        (ATTENTION, "prefill", False),  # all ranks run each step together, and a prefill has no graph
        (ATTENTION, "large batch", False),
        ({**ATTENTION, "enable_dp_attention": False, "tp_size": 1}, "prefill", True),  # replicas: each alone
        (None, "prefill", False),  # without its start it may be DP attention
    ],
)
def test_a_small_batch_without_a_graph_can_have_its_cause_on_another_rank(
    arguments: dict[str, Any] | None,
    other: str,
    seen: bool,  # noqa: FBT001 - a case
) -> None:
    begin = [] if arguments is None else start(**arguments)
    assert ("eager" in graphs([*begin, *beside(other)])) is seen


def test_small_batches_on_all_ranks_without_a_graph_are_a_finding() -> None:
    lines = [decode(at, 8, usage=0.3, graph=False, ranks=rank(dp)) for at in range(20, 320, 2) for dp in range(4)]
    assert "cuda_graph_off" in found(judged([*start(**ATTENTION), *lines]))


# Pipelines: every stage prints every batch, and a printed batch is one of several


@pytest.mark.parametrize(
    ("arguments", "running", "why"),
    [
        ({"pp_size": 4}, 16, "running_limit"),
        ({"pp_size": 4}, 12, "held_back"),
        ({"pp_size": 4, "pp_async_batch_depth": 2}, 10, "running_limit"),
        ({"pp_size": 4, "pp_max_micro_batch_size": 8}, 8, "running_limit"),
        ({"pp_size": 4, "max_micro_batch_size": 8}, 8, "running_limit"),  # 0.4.6 to 0.5.2
        ({"pp_size": 4, "pp_max_micro_batch_size": 64}, 12, "held_back"),  # all together run no more
        ({"tp_size": 8}, 16, "held_back"),
    ],
)
def test_a_micro_batch_has_its_share_of_the_running_limit(arguments: dict[str, Any], running: int, why: str) -> None:
    lines = load(20, MINUTES, running=running, queue=20, usage=0.3)
    assert mostly([*start(limit=64, max_running_requests=64, **arguments), *lines], "admission") == why


def history(pp: int, tp: int, order: list[int]) -> list[str]:
    """A minute of one load, printed by every rank of a pipeline in this order."""
    stages = [f"PP{stage}" for stage in range(pp)] if pp > 1 else [""]
    ranks = [f"{stage} TP{number}".strip() for stage in stages for number in range(tp)] if tp > 1 else stages
    lines = [
        *start(pp_size=pp, tp_size=tp),
        *(f"{stamp(11, each)}Load weight begin. avail mem=78.00 GB" for each in reversed(ranks)),
    ]
    speakers = [f"{stage} TP0".strip() for stage in stages] if tp > 1 else stages
    for at in range(20, 80, 4):
        for speaker in (speakers[place] for place in order if place < len(speakers)):
            lines += [prefill(at, 900, running=8, ranks=speaker), decode(at + 1, 8, ranks=speaker)]
        if at % 20 == 0:
            lines += [retraction(at + 2, 5, ranks=ranks[place]) for place in order if place < len(ranks)]
    return lines


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(1, 3), st.permutations(range(12)))
def test_counts_do_not_change_when_stages_and_tensor_parallel_ranks_repeat_lines(
    pp: int, tp: int, order: list[int]
) -> None:
    counts = judged(history(pp, tp, order)).counts
    alone = judged(history(1, 1, [0])).counts
    assert {name: counts[name] for name in ("retraction_events", "retracted_requests", "prefill_batches")} == {
        name: alone[name] for name in ("retraction_events", "retracted_requests", "prefill_batches")
    }


# Hybrid caches


def hybrid(at: float, usage: float, other: str, queue: int, running: int = 237) -> str:
    return (
        f"{stamp(at)}Decode batch, #running-req: {running}, #full token: {int(200_000 * usage)}, full token usage: {usage:.2f}, {other}, cuda graph: True,"
        f" gen throughput (token/s): 4471.70, #queue-req: {queue}"
    )


def mamba(usage: float) -> str:
    return f"mamba num: {int(450 * usage)}, mamba usage: {usage:.2f}"


def mamba_cache(states: int) -> str:
    return f"{stamp(8)}Mamba Cache is allocated. max_mamba_cache_size: {states}, conv_state size: 0.40GB, ssm_state size: 21.00GB"


def swa(usage: float) -> str:
    return f"#swa token: {int(130_000 * usage)}, swa token usage: {usage:.2f}"


@pytest.mark.parametrize(
    ("other", "flag"), [(mamba(0.97), "--mamba-full-memory-ratio"), (swa(0.97), "--swa-full-tokens-ratio")]
)
def test_the_cache_that_was_full_is_named_with_its_flag(other: str, flag: str) -> None:
    lines = [hybrid(at, 0.62, other, 20) for at in range(20, 400, 2)]
    begin = start(mamba_full_memory_ratio=0.9, swa_full_tokens_ratio=0.5)
    begin[2:2] = [mamba_cache(186)] if "mamba" in flag else []
    answer = judged([*begin, *lines])
    assert answer.judgement.verdict == "hybrid_pool_full"
    assert finding(answer, "hybrid_pool_full").changes[0].flag == flag


def test_a_cache_that_is_full_while_no_request_waits_is_not_named() -> None:
    lines = [hybrid(at, 0.4, mamba(0.97), 0) for at in range(20, 400, 2)]
    assert "hybrid_pool_full" not in found(judged([*start(mamba_full_memory_ratio=0.9), *lines]))


@pytest.mark.parametrize(
    ("arguments", "states", "limit", "changes"),
    [
        ({}, 186, 62, ["--mamba-full-memory-ratio 1.12"]),
        ({}, 311, 62, ["--mamba-full-memory-ratio 1.12"]),  # with two further buffers for each request
        ({"max_running_requests": 40}, 186, 40, ["--max-running-requests 176"]),  # the limit was typed
    ],
)  # fmt: skip
def test_a_limit_that_the_states_of_the_mamba_cache_set_is_raised_by_a_larger_cache(
    arguments: dict[str, Any], states: int, limit: int, changes: list[str]
) -> None:
    begin = start(limit=limit, mamba_full_memory_ratio=0.9, cuda_graph_max_bs=512, **arguments)
    begin.insert(2, mamba_cache(states))
    lines = [hybrid(at, 0.2, mamba(0.2), 30, limit) for at in range(20, 400, 2)]
    found_changes = finding(judged([*begin, *lines]), "running_at_limit").changes
    assert [f"{each.flag} {each.to}" for each in found_changes] == changes


# Disaggregation: what one side of a pair does usually is no finding


def pair(role: str, running: int = 20, sequences: int = 0, **queues: int) -> Judged:
    """Judge one side of a pair. Of a prefill side, so many prompts of 1,000 tokens start each second."""
    also = "".join(f", #{name}-req: {number}" for name, number in queues.items())
    lines = []
    for at in range(20, 320):
        if sequences:
            lines.append(prefill(at, 1000 * sequences, sequences, running=0, usage=0.05) + also)
        else:
            lines.append(decode(at, running, usage=0.3) + also)
    return judged([*start(disaggregation_mode=role), *lines])


@pytest.mark.parametrize(
    ("answer", "verdict", "words"),
    [
        (pair("prefill", sequences=4, prealloc=0, inflight=4), "no_limit_in_log", ""),
        (pair("prefill", sequences=4, prealloc=40, inflight=4), "pd_queue", "add decode servers"),  # ten seconds at four a second
        (pair("decode", prealloc=0, transfer=0), "no_limit_in_log", ""),
        (pair("decode", prealloc=0, transfer=5), "no_limit_in_log", ""),
        (pair("decode", running=7, prealloc=0, transfer=16), "pd_queue", "add prefill servers"),
        (pair("null", running=7, prealloc=0, transfer=16), "pd_queue", "add servers on the slower side"),
    ],
)  # fmt: skip
def test_requests_that_wait_long_for_the_other_side_name_it(answer: Judged, verdict: str, words: str) -> None:
    assert answer.judgement.verdict == verdict
    if words:
        assert finding(answer, "pd_queue").changes[0].words.startswith(words)


@pytest.mark.parametrize(
    ("role", "row", "left", "is_found"),
    [
        ("prefill", "memory_reserve_too_small", 2.7, True),
        ("decode", "memory_reserve_too_small", 2.7, False),  # the guide's reserve is for the activations of prompts
        ("null", "memory_reserve_too_large", 23.0, True),
        ("prefill", "memory_reserve_too_large", 23.0, False),  # it keeps no request
        ("decode", "graph_memory_short", 0.4, True),
    ],
)
def test_the_reserve_of_memory_is_judged_by_what_a_side_does(role: str, row: str, left: float, is_found: bool) -> None:  # noqa: FBT001 - a case
    assert (row in found(judged([*start(left=left, disaggregation_mode=role), *load(20, 60)]))) is is_found


def test_the_prefill_side_lacks_no_graphs() -> None:
    eager = [prefill(at, 4000, 4, running=0, usage=0.05) for at in range(20, 200)]
    assert "cuda_graph_off" not in found(
        judged([*start(disaggregation_mode="prefill", disable_cuda_graph=True), *eager])
    )


# A DP rank that does nothing


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([2, 5]), st.integers(0, 64), st.sampled_from([0, 0, 1, 30, 500]), st.sampled_from([0.02, 0.3, 0.6, 0.95])),
        min_size=10,
        max_size=60,
    ),
    st.sampled_from(sorted(PROFILES)),
)  # fmt: skip
def test_an_idle_rank_changes_no_finding(steps: list[tuple[int, int, int, float]], profile: str) -> None:
    def told(*, twin: bool) -> set[str]:
        lines, at = start(dp_size=2), 20
        for step, running, queue, usage in steps:
            at += step
            lines += [
                prefill(at, running=running, queue=queue, usage=usage, ranks="DP0"),
                decode(at, running, queue, usage, ranks="DP0"),
            ]
            lines += [decode(at, 0, 0, 0.0, ranks="DP1")] if twin else []
        return found(judged(lines, profile))

    beside_it, alone = told(twin=True), told(twin=False)
    if "dp_imbalanced" not in beside_it:  # which may be why requests wait
        assert beside_it == alone


# A start with other settings


def restarted(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Ten minutes at the limit, a start, and a little load."""
    at_limit = {"running": 32, "queue": 40, "usage": 0.23}
    first = [*start(limit=32, max_running_requests=32, **before), *load(20, 600, every=5, **at_limit)]
    return [*first, *start(640, limit=32, **{"max_running_requests": 32, **after}), *load(660, 60, running=20)]


@pytest.mark.parametrize(
    ("after", "is_found"),
    [
        ({}, True),
        ({"random_seed": 2}, True),
        ({"max_running_requests": 256}, False),  # what was seen under the lower limit says nothing of the higher one
        ({"kv_cache_dtype": "fp8_e4m3"}, False),
    ],
)
def test_what_was_seen_under_other_settings_is_no_finding(after: dict[str, Any], is_found: bool) -> None:  # noqa: FBT001 - a case
    assert ("running_at_limit" in found(judged(restarted({}, after)))) is is_found


def test_asking_a_server_again_for_what_it_is_changes_nothing() -> None:
    course, reader = Course(PROFILES["online"]), Reader()
    for line in [*start(limit=32, max_running_requests=32), *load(20, 300, running=32, queue=40, usage=0.23)]:
        for event in reader.read(line.encode()):
            course.take(event)
        course.server.facts.inform(ServerInfo("0.5.23", {**ARGUMENTS, "max_running_requests": 32}))
    assert course.end().judgement.verdict == "running_at_limit"
