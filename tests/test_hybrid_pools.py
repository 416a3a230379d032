"""Hybrid models: which of their memory pools was full while requests waited, over the whole window and not only in the last line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sglang_tuning_exporter.diagnosis.advice import SizingInput, advise
from sglang_tuning_exporter.diagnosis.evidence import past_of
from sglang_tuning_exporter.diagnosis.findings import judge
from sglang_tuning_exporter.sglang.events import NO_RANK, RankFigures, Scrape, ServerArgs
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ARGS = {"mamba_full_memory_ratio": 0.9, "swa_full_tokens_ratio": 0.5, "max_running_requests": 512}


def line(second: int, full: float, beside: str, queued: int, running: int = 237) -> str:
    return (
        f"[2025-11-20 {10 + second // 3600}:{second // 60 % 60:02}:{second % 60:02}] Decode batch, #running-req: {running},"
        f" #full token: {int(1_000_000 * full)}, full token usage: {full:.2f}, {beside}, cuda graph: True,"
        f" gen throughput (token/s): 4471.70, #queue-req: {queued}\n"
    )


def mamba(usage: float) -> str:
    return f"mamba num: {int(450 * usage)}, mamba usage: {usage:.2f}"


def swa(usage: float) -> str:
    return f"#swa token: {int(130_000 * usage)}, swa token usage: {usage:.2f}"


def state_of(lines: list[str], args: Mapping[str, object] = ARGS) -> ServerState:
    state = ServerState(PROFILES["online"], 0.0)
    state.observe(ServerArgs(None, NO_RANK, dict(args)), 0.0)
    for event in LogReader().feed("".join(lines).encode()):
        state.observe_all([event])
    return state


def advised(state: ServerState, now: float) -> tuple[str, str]:
    past = past_of(state, now)
    assert "hybrid_pool_full" in {finding.diagnosis.id for finding in judge(past).findings}
    (advice,) = advise("hybrid_pool_full", SizingInput(past))
    return past.fullest_pool, advice.flag


@pytest.mark.parametrize(
    ("beside", "pool", "flag"),
    [(mamba, "mamba", "--mamba-full-memory-ratio"), (swa, "swa", "--swa-full-tokens-ratio")],
)
def test_a_pool_that_was_full_is_named_even_after_it_has_emptied(
    beside: Callable[[float], str], pool: str, flag: str
) -> None:
    lines = [line(second, 0.62, beside(0.97), 20) for second in range(0, 540, 2)]
    lines += [line(541, 0.62, beside(0.20), 0)]
    state = state_of(lines)
    assert advised(state, state._printed) == (pool, flag)


def test_of_two_pools_the_one_is_named_for_which_requests_waited_longer() -> None:
    both = [line(second, 0.40, f"{swa(0.95)}, {mamba(0.30)}", 20) for second in range(0, 400, 2)]
    both += [line(second, 0.40, f"{swa(0.30)}, {mamba(0.95)}", 20) for second in range(400, 500, 2)]
    state = state_of(both)
    past = past_of(state, state._printed)
    assert past.fullest_pool == "swa"


def test_a_pool_that_is_full_while_no_request_waits_is_not_named() -> None:
    state = state_of([line(second, 0.40, mamba(0.97), 0) for second in range(0, 300, 2)])
    assert past_of(state, state._printed).fullest_pool == "full"


def test_a_pool_that_was_full_before_the_window_is_not_named() -> None:
    lines = [line(second, 0.40, swa(0.97), 20) for second in range(0, 300, 2)]
    lines += [line(second, 0.40, f"{swa(0.40)}, {mamba(0.95)}", 20) for second in range(1200, 1500, 2)]
    state = state_of(lines)
    assert past_of(state, state._printed, seconds=400).fullest_pool == "mamba"


def test_metrics_alone_name_the_same_pool() -> None:
    state = ServerState(PROFILES["online"], 0.0)
    state.observe(ServerArgs(None, NO_RANK, dict(ARGS)), 0.0)
    for step in range(40):
        full = step < 36
        figures = RankFigures(
            running=237, queued=20 if full else 0, full_usage=0.5, mamba_usage=0.97 if full else 0.2, used_tokens=step
        )
        state.observe_scrape(Scrape([figures], progress=1000.0 * step), 15.0 * step)
    assert advised(state, 590.0) == ("mamba", "--mamba-full-memory-ratio")


def at_the_limit(args: dict[str, object], states: int, limit: int) -> list[str]:
    cache = (
        f"Mamba Cache is allocated. max_mamba_cache_size: {states}, conv_state size: 0.40GB, ssm_state size: 21.00GB"
    )
    limits = f"max_total_num_tokens=430000, max_running_requests={limit}, context_len=131072, available_gpu_mem=7.10 GB"
    start = [f"[2025-11-20 09:59:40] {text}\n" for text in (cache, limits)]
    state = state_of([*start, *(line(second, 0.20, mamba(0.55), 30, limit) for second in range(0, 540, 2))], args)
    past = past_of(state, state._printed)
    assert "running_at_limit" in {finding.diagnosis.id for finding in judge(past).findings}
    return [advice.typed or "" for advice in advise("running_at_limit", SizingInput(past))]


def test_a_limit_that_the_states_of_the_mamba_cache_set_is_raised_by_a_larger_cache() -> None:
    args: dict[str, object] = {"mamba_full_memory_ratio": 0.9, "max_running_requests": None}
    assert at_the_limit(args, 186, 62) == ["--mamba-full-memory-ratio 1.12"]
    assert at_the_limit(args, 311, 62) == ["--mamba-full-memory-ratio 1.12"]  # with two further buffers


def test_a_typed_mamba_cache_and_the_limit_that_it_sets_are_raised_together() -> None:
    args: dict[str, object] = {"mamba_full_memory_ratio": 0.9, "max_mamba_cache_size": 192, "max_running_requests": 64}
    assert at_the_limit(args, 192, 64) == ["--max-mamba-cache-size 240", "--max-running-requests 80"]


def test_a_limit_below_what_the_mamba_cache_has_states_for_is_raised_itself() -> None:
    args: dict[str, object] = {"mamba_full_memory_ratio": 0.9, "max_running_requests": 40}
    (typed,) = at_the_limit(args, 186, 40)
    assert typed.startswith("--max-running-requests ")


def test_without_a_radix_cache_the_mamba_cache_follows_the_limit() -> None:
    args: dict[str, object] = {"mamba_full_memory_ratio": 0.9, "max_running_requests": 62, "disable_radix_cache": True}
    (typed,) = at_the_limit(args, 62, 62)
    assert typed.startswith("--max-running-requests ")
