"""Pipeline parallelism: every stage prints every batch, and a batch that is printed is one of several micro batches."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tuning_exporter.diagnosis.advice import SizingInput, advise
from sglang_tuning_exporter.diagnosis.clients import advise_more
from sglang_tuning_exporter.diagnosis.evidence import past_of
from sglang_tuning_exporter.diagnosis.findings import judge
from sglang_tuning_exporter.sglang.events import NO_RANK, Limits, Rank, ServerArgs
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

MICRO_BATCH = "pp_max_micro_batch_size"


def facts_of(*, limit: int = 64, dp: int | None = None, **args: object) -> ServerFacts:
    facts = ServerFacts()
    facts.apply(ServerArgs(None, NO_RANK, {"max_running_requests": 64, "dp_size": 1, **args}))
    facts.apply(Limits(None, Rank(dp=dp, tp=0), 100_000, limit))
    return facts


@pytest.mark.parametrize(
    ("args", "limit", "dp", "of_one_batch", "batches"),
    [
        ({"tp_size": 8}, 64, None, 64, 1),
        ({"pp_size": 4}, 64, None, 16, 4),
        ({"pp_size": 4}, 3, None, 1, 4),  # max(max_running_requests // pp_size, 1)
        ({"pp_size": 4, "pp_async_batch_depth": 2}, 64, None, 10, 6),
        ({"pp_size": 4, "pp_max_micro_batch_size": None}, 64, None, 16, 4),
        ({"pp_size": 4, "pp_max_micro_batch_size": 8}, 64, None, 8, 4),
        ({"pp_size": 4, "max_micro_batch_size": 8}, 64, None, 8, 4),  # 0.4.6 to 0.5.2
        ({"pp_size": 4, "pp_max_micro_batch_size": 64}, 64, None, 16, 4),  # all together run no more
        ({"pp_max_micro_batch_size": 8}, 64, None, 8, 1),  # asked for without a pipeline, too
        ({"dp_size": 2}, 64, 1, 64, 1),
        ({"dp_size": 2, "pp_size": 2}, 64, 1, 32, 2),
        ({"dp_size": 8, "tp_size": 8, "enable_dp_attention": True}, 8, 3, 8, 8),
        # From 0.5.21 on DP attention has an argument of its own, and dp_size counts replicas again.
        ({"attn_dp_size": 8, "tp_size": 8, "enable_dp_attention": True}, 8, 3, 8, 8),
        ({"attn_dp_size": 8, "tp_size": 8, "enable_dp_attention": True, "pp_size": 2}, 8, 3, 4, 16),
    ],
)
def test_a_printed_batch_has_its_share_of_the_limit(
    args: dict[str, object], limit: int, dp: int | None, of_one_batch: int, batches: int
) -> None:
    facts = facts_of(limit=limit, dp=dp, **args)
    assert (facts.running_limit(dp), facts.limit_shared_by) == (of_one_batch, batches)
    assert facts.scheduler_limit(dp) == limit


def test_a_scheduler_whose_start_was_not_seen_has_its_share_of_the_argument() -> None:
    facts = ServerFacts()
    facts.apply(ServerArgs(None, NO_RANK, {"max_running_requests": 64, "attn_dp_size": 8, "dp_size": 1, "pp_size": 2}))
    assert [facts.running_limit(dp) for dp in (0, 7, 8)] == [4, 4, None]


@pytest.mark.parametrize(
    ("args", "gpus"),
    [({}, 1), ({"tp_size": 8}, 8), ({"pp_size": 2}, 2), ({"tp_size": 8, "pp_size": 2, "dp_size": 4}, 16)],
)
def test_a_copy_of_the_weights_lies_on_the_gpus_of_all_its_shards(args: dict[str, object], gpus: int) -> None:
    assert facts_of(**args).shards == gpus  # type: ignore[arg-type]


# The line of a start as 0.4.9 prints it, and its batch lines; the figures are made.
ARGS = (
    "[2025-11-20 11:38:00] server_args=ServerArgs(model_path='/m/llama', tp_size={tp}, pp_size={pp}, dp_size=1,"
    " max_running_requests=64, max_micro_batch_size={micro}, chunked_prefill_size=8192, schedule_conservativeness=1.0,"
    " mem_fraction_static=0.85, enable_dp_attention=False, device='cuda')"
)
LIMITS = (
    "max_total_num_tokens=100000, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=64,"
    " context_len=131072, available_gpu_mem=7.00 GB"
)
LOAD = "Load weight begin. avail mem=78.00 GB"


@dataclass
class Layout:
    """A server of so many stages and tensor-parallel ranks, and which of them come first in its log."""

    pp: int = 4
    tp: int = 1
    micro: str = "None"

    @property
    def ranks(self) -> list[str]:
        stages = [f" PP{stage}" for stage in range(self.pp)] if self.pp > 1 else [""]
        tensors = [f" TP{rank}" for rank in range(self.tp)] if self.tp > 1 else [""]
        return [stage + tensor for stage in stages for tensor in tensors]

    @property
    def stages(self) -> list[str]:
        return [f" PP{stage}{' TP0' if self.tp > 1 else ''}" for stage in range(self.pp)] if self.pp > 1 else [""]

    def begin(self) -> list[str]:
        start = [ARGS.format(tp=self.tp, pp=self.pp, micro=self.micro)]
        start += [f"[2025-11-20 11:38:01{rank}] {LOAD}" for rank in reversed(self.ranks)]
        return start + [f"[2025-11-20 11:39:00{rank}] {LIMITS}" for rank in reversed(self.stages)]


def at(second: int, rank: str, words: str) -> str:
    return f"[2025-11-20 11:{40 + second // 60}:{second % 60:02}{rank}] {words}"


def decode(running: int, queued: int, usage: float = 0.3) -> str:
    return (
        f"Decode batch. #running-req: {running}, #token: {int(100_000 * usage)}, token usage: {usage:.2f}, cuda graph: True,"
        f" gen throughput (token/s): 1280.90, #queue-req: {queued}, "
    )


def prefill(queued: int, tokens: int = 900) -> str:
    return (
        f"Prefill batch. #new-seq: 1, #new-token: {tokens}, #cached-token: 100, token usage: 0.30,"
        f" #running-req: 8, #queue-req: {queued}, "
    )


RETRACTION = "KV cache pool is full. Retract requests. #retracted_reqs: 5, #new_token_ratio: 0.3002 -> 0.5783"


def state_after(lines: list[str], profile: str = "online") -> ServerState:
    state = ServerState(PROFILES[profile], 0.0)
    for event in LogReader().feed(("\n".join(lines) + "\n").encode()):
        state.observe_all([event])
    return state


def judged(lines: list[str]) -> list[str]:
    state = state_after(lines)
    now = state._printed
    past = past_of(state, now)
    return [finding.diagnosis.id for finding in judge(past).findings]


def served(layout: Layout, words: str, seconds: int = 300) -> list[str]:
    return layout.begin() + [at(second, rank, words) for second in range(0, seconds, 2) for rank in layout.stages]


def test_a_micro_batch_at_its_share_is_the_running_limit_and_not_a_reserve_that_is_too_large() -> None:
    # 16 of the 64 run in each of four micro batches: the flag that helps is --max-running-requests.
    found = judged(served(Layout(pp=4), decode(16, 20)))
    assert "running_at_limit" in found
    assert "admission_too_conservative" not in found


def test_a_micro_batch_with_room_is_not_at_the_limit() -> None:
    state = state_after(served(Layout(pp=4), decode(12, 20)))
    assert state.rank(None, 0.0).states["admission"] != "running_limit"


def test_the_limit_that_is_advised_is_that_of_all_micro_batches_together() -> None:
    state = state_after(served(Layout(pp=4), decode(16, 20)))
    (advice,) = advise("running_at_limit", SizingInput(past_of(state, state._printed)))
    assert (advice.flag, advice.current) == ("--max-running-requests", 64)
    assert advice.suggested > 64  # type: ignore[operator]


def test_where_the_size_of_a_micro_batch_is_the_limit_that_size_is_raised() -> None:
    state = state_after(served(Layout(pp=4, micro="4"), decode(4, 20)))
    (advice,) = advise("running_at_limit", SizingInput(past_of(state, state._printed)))
    assert (advice.flag, advice.current, advice.suggested) == ("--max-micro-batch-size", 4, 11)


def test_clients_send_enough_for_all_micro_batches() -> None:
    state = state_after(served(Layout(pp=4), decode(8, 0, usage=0.45)), "offline")
    words = advise_more(past_of(state, state._printed))
    assert words.startswith("send about 164 requests at once (now 32): about 64 can run")


def counted(lines: list[str]) -> dict[str, float]:
    return dict(state_after(lines).totals().counts)


def history(layout: Layout, order: list[int]) -> list[str]:
    """Two minutes of one load, in which the ranks print in this order."""
    lines = layout.begin()
    for second in range(0, 120, 4):
        for rank in (layout.stages[place] for place in order if place < layout.pp):
            lines += [at(second, rank, prefill(3)), at(second + 1, rank, decode(8, 3))]
        if second % 40 == 0:
            lines += [at(second + 2, layout.ranks[place], RETRACTION) for place in order if place < len(layout.ranks)]
    return lines


def test_ten_retractions_of_a_server_with_four_stages_are_ten() -> None:
    layout = Layout(pp=4)
    lines = layout.begin()
    for event in range(10):
        lines += [at(20 * event, rank, RETRACTION) for rank in layout.ranks]
    assert state_after(lines).totals().counts["retraction_events"] == 10


def test_the_stages_of_two_data_parallel_ranks_are_two_schedulers() -> None:
    lines = [at(0, f" DP{dp} PP{pp}", RETRACTION) for pp in (0, 1) for dp in (0, 1)]
    lines += [at(second, f" DP{dp} PP{pp}", prefill(0)) for second in range(3) for pp in (0, 1) for dp in (0, 1)]
    state = state_after(lines)
    counts = state.totals().counts
    assert (counts["retraction_events"], counts["computed_tokens"]) == (2, 6 * 900)


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 3), st.permutations(range(12)))
def test_counts_do_not_change_when_stages_and_tensor_parallel_ranks_repeat_lines(
    pp: int, tp: int, order: list[int]
) -> None:
    alone = counted(history(Layout(pp=1, tp=1), [0]))
    assert counted(history(Layout(pp=pp, tp=tp), order)) == alone
