"""What a scheduler does, and why requests wait, by lines of its log: graphs, DP attention, pipelines, hybrid caches,
disaggregation, settings that changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from sglang_tuning_exporter.core.findings import Judgement
from test_core_course import decode, finding, found, judged, load, prefill, stamp, start

MINUTES = 200


def mostly(lines: Iterable[str], signal: str, profile: str = "online") -> str:
    """Return the state of a signal that held for most of the time."""
    shares = judged(lines, profile).shares.get(signal, {})
    return max(shares, key=shares.__getitem__, default="unknown")


# Graphs


def graphs(lines: Iterable[str]) -> set[str]:
    return {state for state, share in judged(lines).shares.get("cuda_graph", {}).items() if share > 0.05}


ATTENTION: dict[str, Any] = {"tp_size": 4, "dp_size": 4, "enable_dp_attention": True, "cuda_graph_max_bs": 160}


def rank(dp: int) -> str:
    return f"DP{dp} TP{dp}"


def beside(other: str, running: int = 8) -> list[str]:
    """A small batch without a graph on rank 0, beside what rank 3 prints."""
    lines = []
    for at in range(20, 320, 2):
        lines += [
            (
                prefill(at, 900, running=8, usage=0.3, ranks=rank(3))
                if other == "prefill"
                else decode(at, 200, usage=0.3, graph=False, ranks=rank(3))
            ),
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


@pytest.mark.parametrize(
    ("usages", "is_limit"),
    [
        ((0.45, 0.55), True),
        ((0.86, *(0.45, 0.55) * 20), False),  # the cache may be what fills up
        ((0.60, 0.84), False),
    ],
)
def test_without_its_start_a_constant_batch_beside_free_cache_is_at_a_limit(
    usages: tuple[float, ...], *, is_limit: bool
) -> None:
    lines = [decode(20 + 2 * step, 40, 20, usages[step % len(usages)]) for step in range(120)]
    assert ("running_at_limit" in found(judged(lines))) is is_limit


# Hybrid caches


def hybrid(at: float, usage: float, other: str, queue: int, running: int = 237) -> str:
    return (
        f"{stamp(at)}Decode batch, #running-req: {running}, #full token: {int(200_000 * usage)}, full token usage:"
        f" {usage:.2f}, {other}, cuda graph: True, gen throughput (token/s): 4471.70, #queue-req: {queue}"
    )


def mamba(usage: float) -> str:
    return f"mamba num: {int(450 * usage)}, mamba usage: {usage:.2f}"


def mamba_cache(states: int) -> str:
    return (
        f"{stamp(8)}Mamba Cache is allocated. max_mamba_cache_size: {states}, conv_state size: 0.40GB, ssm_state size:"
        " 21.00GB"
    )


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
    assert answer.verdict == "hybrid_pool_full"
    assert finding(answer, "hybrid_pool_full").changes[0].flag == flag


# Disaggregation: what one side of a pair does usually is no finding


def pair(role: str, running: int = 20, sequences: int = 0, **queues: int) -> Judgement:
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
        # ten seconds at four a second
        (pair("prefill", sequences=4, prealloc=40, inflight=4), "pd_queue", "add decode servers"),
        (pair("decode", prealloc=0, transfer=0), "no_limit_in_log", ""),
        (pair("decode", prealloc=0, transfer=5), "no_limit_in_log", ""),
        (pair("decode", running=7, prealloc=0, transfer=16), "pd_queue", "add prefill servers"),
        (pair("null", running=7, prealloc=0, transfer=16), "pd_queue", "add servers on the slower side"),
    ],
)  # fmt: skip
def test_requests_that_wait_long_for_the_other_side_name_it(answer: Judgement, verdict: str, words: str) -> None:
    assert answer.verdict == verdict
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


def test_a_prefill_batch_that_a_limit_of_requests_has_ended_is_not_full() -> None:
    lines = [prefill(20 + second, 60, 8, running=8, queue=20) for second in range(120)]
    assert mostly([*start(chunked_prefill_size=64), *lines], "admission") == "prefill_bound"
    assert mostly([*start(chunked_prefill_size=64, prefill_max_requests=8), *lines], "admission") != "prefill_bound"


@pytest.mark.parametrize("chunks", [(300,), (1024, 1024, 1024, 428)])
@pytest.mark.parametrize(("running", "why"), [(16, "running_limit"), (15, "running_limit"), (12, "held_back")])
def test_the_last_place_of_a_batch_can_belong_to_a_prompt_in_chunks(
    running: int, why: str, chunks: tuple[int, ...]
) -> None:
    lines = start(limit=16, pool=900_000, max_running_requests=16, chunked_prefill_size=1024)
    for at in range(20, 320, 5):
        lines += [prefill(at, tokens, running=running - 1, queue=2, usage=0.14) for tokens in chunks]
        lines += [decode(at + later, running, 2, 0.14) for later in (1, 3)]
    assert mostly(lines, "admission") == why


def test_a_chart_of_all_ranks_has_the_limit_of_all() -> None:
    lines = [decode(20 + at, 15, ranks=rank(dp)) for at in range(60) for dp in range(8)]
    assert judged([*start(limit=16, dp_size=8, enable_dp_attention=True), *lines]).running_limit == 128.0


def test_a_cache_that_is_full_while_no_request_waits_is_not_named() -> None:
    lines = [hybrid(at, 0.4, mamba(0.97), 0) for at in range(20, 400, 2)]
    assert "hybrid_pool_full" not in found(judged([*start(mamba_full_memory_ratio=0.9), *lines]))
