"""Prefill/decode disaggregation: normal behaviour of one side is no finding, and a slow side is named."""

from __future__ import annotations

from typing import Any

import pytest

from scenarios import Story, decoding, started
from sglang_tuning_exporter.diagnosis.evidence import past_of
from sglang_tuning_exporter.diagnosis.findings import Judgement, judge
from sglang_tuning_exporter.sglang.events import NO_RANK, PrefillBatch
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

END = 600.0


def judged(story: Story, **args: Any) -> Judgement:
    reserve = args.pop("reserve", 6.5)
    state = ServerState(PROFILES["online"], 0.0)
    for at, event in sorted(started(reserve=reserve, **args) + story, key=lambda pair: pair[0]):
        state.observe(event, at)  # type: ignore[arg-type]  # the stories here have events alone
    state.settle(END)
    return judge(past_of(state, END))


def prefill_side(**queues: int) -> Story:
    """Four prompts of 1,000 tokens each second, and this many requests in other queues: a batch in transfer is usual."""
    line = PrefillBatch(None, NO_RANK, 4, 4000, 0, 0, 0, 0, 0.05, queues={"prealloc": 0, "inflight": 4, **queues})
    return [(float(at), line) for at in range(1, int(END))]


def decode_side(running: int = 20, **queues: int) -> Story:
    return decoding(0.0, END, running=running, every=2.0, queues={"prealloc": 0, "transfer": 0, **queues})


def ids(judgement: Judgement) -> list[str]:
    return [finding.diagnosis.id for finding in judgement.findings]


def test_a_batch_whose_kv_cache_is_being_transferred_does_not_wait_for_the_decode_side() -> None:
    assert judged(prefill_side(), disaggregation_mode="prefill").verdict == "healthy"


def test_requests_that_wait_long_for_a_decode_server_are_named_with_the_side_to_enlarge() -> None:
    judgement = judged(prefill_side(prealloc=40), disaggregation_mode="prefill")  # ten seconds at four a second
    assert judgement.verdict == "pd_queue"
    (advice,) = judgement.findings[0].advice
    assert advice.suggestion.startswith("add decode servers")


def test_on_a_prefill_side_with_full_batches_requests_wait_for_prefill() -> None:
    # A chunk of 16,384 tokens takes ten seconds; requests leave the bootstrap queue only between two chunks.
    line = PrefillBatch(None, NO_RANK, 6, 16384, 0, 0, 0, 0, 0.4, queues={"prealloc": 20, "inflight": 3})
    story: Story = [(10.0 * step, line) for step in range(1, 60)]
    judgement = judged(story, disaggregation_mode="prefill", chunked_prefill_size=16384, max_prefill_tokens=16384)
    assert judgement.verdict == "prefill_bound"
    assert any(advice.suggestion.startswith("add prefill servers") for advice in judgement.findings[0].advice)


@pytest.mark.parametrize("transferring", [0, 5, 20])
def test_fewer_requests_in_transfer_than_run_are_usual_on_the_decode_side(transferring: int) -> None:
    assert judged(decode_side(transfer=transferring), disaggregation_mode="decode").verdict == "healthy"


def test_a_decode_server_that_runs_less_than_it_awaits_needs_more_prefill() -> None:
    judgement = judged(decode_side(running=7, transfer=16), disaggregation_mode="decode")
    assert judgement.verdict == "pd_queue"
    (advice,) = judgement.findings[0].advice
    assert advice.suggestion.startswith("add prefill servers")


def test_a_server_whose_role_is_not_known_gets_both_sides_in_words() -> None:
    (finding, *_) = judged(decode_side(running=7, transfer=16), disaggregation_mode="null").findings
    (advice,) = finding.advice
    assert advice.suggestion.startswith("add servers on the slower side")


@pytest.mark.parametrize("switch", ["disable_cuda_graph", "disable_decode_cuda_graph"])
def test_the_prefill_side_decodes_nothing_so_it_lacks_no_graphs(switch: str) -> None:
    assert "cuda_graph_off" not in ids(judged(prefill_side(), disaggregation_mode="prefill", **{switch: True}))
    assert "cuda_graph_off" in ids(judged(decode_side(), disaggregation_mode="decode", **{switch: True}))


@pytest.mark.parametrize(("role", "found"), [("prefill", True), ("decode", False)])
def test_memory_for_the_activations_of_prompts_is_asked_of_the_side_that_computes_them(role: str, found: bool) -> None:  # noqa: FBT001 - a case
    judgement = judged(decode_side(), reserve=2.7, disaggregation_mode=role)
    assert ("memory_reserve_too_small" in ids(judgement)) is found


@pytest.mark.parametrize(("role", "found"), [("null", True), ("prefill", False)])
def test_memory_beyond_the_reserve_is_of_no_use_to_the_side_that_keeps_no_request(role: str, found: bool) -> None:  # noqa: FBT001 - a case
    judgement = judged(prefill_side(), reserve=23.0, disaggregation_mode=role)
    assert ("memory_reserve_too_large" in ids(judgement)) is found


def test_almost_no_memory_left_is_found_on_either_side() -> None:
    assert "graph_memory_short" in ids(judged(decode_side(), reserve=0.4, disaggregation_mode="decode"))
