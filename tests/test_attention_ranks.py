"""DP attention: all ranks run each step together, so a batch without a graph on one rank can have its cause on another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sglang_tuning_exporter.diagnosis.evidence import past_of
from sglang_tuning_exporter.diagnosis.findings import judge
from sglang_tuning_exporter.sglang.events import NO_RANK, RankFigures, Scrape, ServerArgs
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

if TYPE_CHECKING:
    from collections.abc import Mapping

RANKS = 4
ATTENTION = {"tp_size": RANKS, "dp_size": RANKS, "enable_dp_attention": True, "cuda_graph_max_bs": 160}
PLAIN = {"tp_size": 1, "dp_size": RANKS, "enable_dp_attention": False, "cuda_graph_max_bs": 160}


def at(second: int, dp: int, words: str) -> str:
    return f"[2025-11-20 11:{40 + second // 60}:{second % 60:02} DP{dp} TP{dp}] {words}\n"


def decode(running: int = 8, *, graph: bool) -> str:
    return (
        f"Decode batch, #running-req: {running}, #token: 4000, token usage: 0.30, cuda graph: {graph},"
        " gen throughput (token/s): 1280.90, #queue-req: 0"
    )


PREFILL = (
    "Prefill batch, #new-seq: 1, #new-token: 900, #cached-token: 0, token usage: 0.30, #running-req: 8, #queue-req: 0,"
    " #pending-token: 0, cuda graph: False, input throughput (token/s): 2886.79"
)


def state_of(args: Mapping[str, object] | None) -> ServerState:
    state = ServerState(PROFILES["online"], 0.0)
    if args is not None:
        state.observe(ServerArgs(None, NO_RANK, {**args}), 0.0)
    return state


def state_after(lines: list[str], args: Mapping[str, object] | None) -> ServerState:
    state = state_of(args)
    for event in LogReader().feed("".join(lines).encode()):
        state.observe_all([event])
    return state


def eager_beside(others: str, args: Mapping[str, object] | None = ATTENTION) -> ServerState:
    """Five minutes in which rank 0 logs a small batch without a graph, while another rank logs `others`."""
    lines = []
    for second in range(0, 300, 2):
        lines += [at(second, 3, others), at(second + 1, 0, decode(graph=False))]
    return state_after(lines, args)


def found(state: ServerState) -> set[str]:
    return {finding.diagnosis.id for finding in judge(past_of(state, state._printed)).findings}


def seconds(state: ServerState, dp: int = 0) -> set[str]:
    totals = state.ranks[dp].totals.seconds
    return {name for (signal, name), s in totals.items() if signal == "cuda_graph" and s > 5}


def test_a_small_batch_beside_a_prefill_on_another_rank_is_no_finding() -> None:
    state = eager_beside(PREFILL)
    assert "eager" not in seconds(state)
    assert "cuda_graph_off" not in found(state)


def test_a_small_batch_without_a_graph_beside_a_too_large_one_is_put_down_to_the_large_one() -> None:
    state = eager_beside(decode(200, graph=False))
    assert (seconds(state), seconds(state, 3)) == ({"unknown"}, {"beyond_captured"})
    assert "cuda_graph_not_covering" in found(state)
    assert "cuda_graph_off" not in found(state)


def test_small_batches_on_all_ranks_without_a_graph_are_a_finding() -> None:
    lines = [at(0, 3, PREFILL)]
    for second in range(10, 300, 2):
        lines += [at(second, dp, decode(graph=False)) for dp in range(RANKS)]
    assert "cuda_graph_off" in found(state_after(lines, ATTENTION))


def test_ranks_of_plain_data_parallelism_are_judged_each_alone() -> None:
    assert "eager" in seconds(eager_beside(PREFILL, PLAIN))


def test_a_log_without_its_start_may_be_of_dp_attention() -> None:
    assert "eager" not in seconds(eager_beside(PREFILL, None))


def test_a_replayed_graph_counts_as_replayed_whatever_the_other_ranks_do() -> None:
    lines = []
    for second in range(0, 300, 2):
        lines += [at(second, 3, PREFILL), at(second + 1, 0, decode(graph=True))]
    assert seconds(state_after(lines, ATTENTION)) == {"replayed"}


@pytest.mark.parametrize(
    ("release_args", "beyond"),
    [
        # 0.4.4 to 0.4.8 compare the sum of all ranks with the largest captured size; later the largest of them.
        ({**ATTENTION, "version": "0.4.6.post5"}, True),
        ({**ATTENTION, "version": "0.5.9"}, False),
    ],
)
def test_batches_add_up_in_the_releases_that_add_them_up(release_args: Mapping[str, object], beyond: bool) -> None:  # noqa: FBT001 - a case
    state = state_of(ATTENTION)
    state.facts.version = str(release_args["version"])
    lines = [at(0, 3, PREFILL)]
    for second in range(10, 120, 2):
        lines += [at(second, dp, decode(60, graph=False)) for dp in range(RANKS)]
    for event in LogReader().feed("".join(lines).encode()):
        state.observe_all([event])
    assert ("eager" not in seconds(state)) == beyond


def scraped(args: Mapping[str, object]) -> ServerState:
    state = state_of(args)
    for step in range(40):
        ranks = [
            RankFigures(
                dp,
                running=8,
                queued=0,
                full_usage=0.3,
                used_tokens=step,
                graph_passes=10.0 * step,
                eager_passes=30.0 * step,
            )
            for dp in range(RANKS)
        ]
        state.observe_scrape(Scrape(ranks, progress=1000.0 * step), 15.0 * step)
    return state


def test_without_a_log_the_cause_is_unknown() -> None:
    # Three of four steps run eager on every rank: prefills of all of them are in it.
    assert "eager" not in seconds(scraped(ATTENTION))
    assert "eager" in seconds(scraped(PLAIN))


def test_without_a_log_a_batch_that_is_too_large_is_still_seen() -> None:
    state = state_of(ATTENTION)
    for step in range(40):
        ranks = [
            RankFigures(
                dp,
                running=200 if dp == 2 else 8,
                queued=0,
                full_usage=0.3,
                used_tokens=step,
                graph_passes=0.0,
                eager_passes=30.0 * step,
            )
            for dp in range(RANKS)
        ]
        state.observe_scrape(Scrape(ranks, progress=1000.0 * step), 15.0 * step)
    assert (seconds(state, 0), seconds(state, 2)) == ({"unknown"}, {"unknown", "beyond_captured"})


@pytest.mark.parametrize(("running", "found"), [(160, "eager"), (161, "beyond_captured")])
def test_without_a_start_in_the_log_the_largest_captured_batch_is_taken_to_be_160(running: int, found: str) -> None:
    lines = [at(second, 0, decode(running, graph=False)).replace(" DP0 TP0", "") for second in range(60)]
    seconds = state_after(lines, None).totals().seconds
    assert {name for (signal, name), spent in seconds.items() if signal == "cuda_graph" and spent} == {found}
