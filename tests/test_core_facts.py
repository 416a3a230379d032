"""What is known of a server by the lines of its start, its metrics and `/server_info`. Memory is in GB of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_tuning_exporter.core.facts import Facts
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.sglang.metrics import RankFigures
from sglang_tuning_exporter.sglang.server_info import ServerInfo

LOGS = Path(__file__).parent / "data" / "logs"
STARTS = ("arguments", "pool", "memory", "limits", "ready")


def read(text: str, ranks: int = 1, **arguments: Any) -> Facts:
    """Take lines that each of so many ranks prints."""
    facts, reader = Facts(arguments=dict(arguments)), Reader()
    for rank in range(ranks):
        prefix = f"[2025-11-20 11:38:33{f' TP{rank}' if ranks > 1 else ''}] "
        for line in text.splitlines():
            for event in reader.read(f"{prefix}{line}".encode()):
                facts.take_line(event)
    return facts


def of_release(release: str) -> Facts:
    facts, reader = Facts(), Reader()
    for line in (LOGS / f"{release}.log").read_bytes().splitlines():
        for event in reader.read(line):
            if event.kind in STARTS:
                facts.take_line(event)
    return facts


# Speculative decoding: target and draft model print the same lines (srt/model_executor/model_runner.py,
# srt/mem_cache/memory_pool.py, srt/speculative/eagle_worker.py of each release; eagle_worker_v2.py in 0.5.20)

TARGET = """\
Load weight begin. avail mem=78.70 GB
Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=62.50 GB, mem usage=16.20 GB.
"""
DRAFT = """\
Load weight begin. avail mem=20.30 GB
Load weight end. type=LlamaForCausalLMEagle, dtype=torch.bfloat16, avail mem=18.80 GB, mem usage=1.50 GB.
"""
LIMITS = (
    "max_total_num_tokens=300000, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=48,"
    " context_len=131072, available_gpu_mem=11.00 GB\n"
)
DRAFTED = {
    "0.4.9.post6": (
        f"""\
{TARGET}KV Cache is allocated. #tokens: 300000, K size: 18.75 GB, V size: 18.75 GB
Memory pool end. avail mem=24.00 GB
Capture cuda graph begin. This can take up to several minutes. avail mem=23.80 GB
Capture cuda graph bs [1, 2, 4, 8, 16, 32]
Capture cuda graph end. Time elapsed: 21.42 s. mem usage=2.00 GB. avail mem=21.80 GB.
{DRAFT}KV Cache is allocated. #tokens: 300000, K size: 1.25 GB, V size: 1.25 GB
Memory pool end. avail mem=12.50 GB
Capture draft cuda graph begin. This can take up to several minutes. avail mem=12.50 GB
Capture draft cuda graph end. Time elapsed: 3.11 s. mem usage=0.40 GB. avail mem=12.10 GB.
Capture draft extend cuda graph begin. This can take up to several minutes. avail mem=12.10 GB
Capture draft extend cuda graph end. Time elapsed: 3.01 s. mem usage=0.30 GB. avail mem=11.80 GB.
{LIMITS}"""
    ),
    "0.5.9": (
        f"""\
{TARGET}KV Cache is allocated. #tokens: 300000, K size: 18.75 GB, V size: 18.75 GB
Memory pool end. avail mem=24.00 GB
Capture cuda graph begin. This can take up to several minutes. avail mem=23.80 GB
Capture cuda graph bs [1, 2, 4, 8, 16, 32]
Capture cuda graph end. Time elapsed: 21.42 s. mem usage=2.00 GB. avail mem=21.80 GB.
Capture piecewise CUDA graph begin. avail mem=21.80 GB
Capture piecewise CUDA graph end. Time elapsed: 20.42 s. mem usage=0.90 GB. avail mem=20.90 GB.
{DRAFT}KV Cache is allocated. #tokens: 300000, K size: 1.25 GB, V size: 1.25 GB
Memory pool end. avail mem=12.50 GB
Capture draft cuda graph begin. This can take up to several minutes. avail mem=12.50 GB
Capture draft cuda graph end. Time elapsed: 3.11 s. mem usage=0.70 GB. avail mem=12.10 GB.
{LIMITS}"""
    ),
    "0.5.20": (
        f"""\
{TARGET}{DRAFT}KV Cache is allocated. dtype: torch.bfloat16, #tokens: 300000, K size: 18.75 GB, V size: 18.75 GB
Memory pool end. avail mem=24.00 GB
Draft KV Cache is allocated. dtype: torch.bfloat16, #tokens: 300000, K size: 1.25 GB, V size: 1.25 GB
Memory pool end. avail mem=21.50 GB
Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[4, 8], avail mem=21.50 GB
Capture target prefill CUDA graph end. elapsed=21.42 s, mem usage=0.90 GB, avail mem=20.60 GB.
Capture target verify CUDA graph begin. backend=full, num_tokens_per_bs=4, avail mem=20.60 GB
Capture target verify CUDA graph end. bs=[1, 2, 4, 8, 16, 32], elapsed=21.42 s, mem usage=2.00 GB, avail mem=18.60 GB.
Capture draft decode CUDA graph begin. backend=full, bs=[1, 2, 4], avail mem=12.50 GB
Capture draft decode CUDA graph end. bs=[1, 2, 4], elapsed=3.11 s, mem usage=0.70 GB, avail mem=12.10 GB.
{LIMITS}"""
    ),
}


@pytest.mark.parametrize("release", DRAFTED)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_memory_of_target_and_draft_model_is_told_apart(release: str, ranks: int) -> None:
    facts = read(DRAFTED[release], ranks)
    assert (facts.capacity_gb, facts.gigabytes("weights"), facts.gigabytes("draft_weights")) == (78.7, 16.2, 1.5)
    assert (facts.gigabytes("pool"), facts.pool(), facts.largest_captured) == (37.5, 300_000, 32)
    assert (facts.reserve_gb, facts.weights_gb) == (11.0, 17.7)
    assert facts.gigabytes("decode_graph") == pytest.approx(2.7)
    assert facts.gigabytes("graph") == pytest.approx(2.7 if release == "0.4.9.post6" else 3.6)


@pytest.mark.parametrize(
    ("lines", "gigabytes"),
    [
        # A model with sliding windows prints a cache for each kind of attention.
        (("KV Cache is allocated. #tokens: 80000, K size: 1.00 GB, V size: 1.00 GB\n"
         "KV Cache is allocated. #tokens: 100000, K size: 3.00 GB, V size: 3.00 GB\n"), 8.0),
        (("Mamba Cache is allocated. max_mamba_cache_size: 311, conv_state size: 0.52GB, ssm_state size: 20.77GB \n"
         "KV Cache is allocated. #tokens: 100000, K size: 9.00 GB, V size: 9.00 GB\n"), 39.29),
        (("Mamba Cache is allocated. max_mamba_cache_size: 100, conv_state size: 0.50GB, ssm_state size: 8.00GB"
         " intermediate_ssm_state_cache size: 4.00GB intermediate_conv_window_cache size: 0.50GB \n"), 13.0),
        (("KV Cache is allocated. dtype: torch.bfloat16, #tokens: 400000, K size: 25.00 GB, V size: 25.00 GB\nMemory"
            " pool end. avail mem=24.00 GB\n"
         "Post-capture KV sizing: KV cache allocated. dtype: torch.bfloat16, #tokens: 300000, KV size: 37.50 GB,"
         " avail mem=9.00 GB\n"), 37.5),
    ],
)  # fmt: skip
def test_a_cache_in_parts_is_their_sum_and_one_sized_again_is_the_last(lines: str, gigabytes: float) -> None:
    assert read(f"{lines}Memory pool end. avail mem=24.00 GB\n").gigabytes("pool") == pytest.approx(gigabytes)


def test_without_the_lines_of_the_start_the_memory_is_what_a_page_shows_of_it() -> None:
    shown = RankFigures(weight_memory_gb=1.9, kv_memory_gb=6.8, graph_memory_gb=3.9, available_gpu_memory_gb=68.7)
    assert Facts(page={None: shown}).capacity_gb == pytest.approx(81.3)  # 82.4 GB in the log
    assert Facts(page={None: RankFigures(weight_memory_gb=1.9, kv_memory_gb=6.8)}).capacity_gb is None


# Limits and sizes


@pytest.mark.parametrize(
    ("arguments", "limits", "dp", "limit"),
    [
        ({"pp_size": 4}, {None: 3.0}, None, 1),  # max(max_running_requests // pp_size, 1)
        ({"dp_size": 2, "pp_size": 2}, {0: 64.0, 1: 64.0}, 1, 32),
        ({"dp_size": 2, "enable_dp_attention": True, "tp_size": 2, "max_running_requests": 101}, {}, 1, 50),
        ({"dp_size": 2, "max_running_requests": 101}, {}, 1, 101),
        # From 0.5.21 on DP attention has an argument of its own, and dp_size counts replicas again.
        ({"attn_dp_size": 8, "dp_size": 1, "tp_size": 8, "enable_dp_attention": True, "max_running_requests": 64}, {},
            3, 8),
        ({}, {}, None, None),
    ],
)  # fmt: skip
def test_the_running_limit_of_one_batch(
    arguments: dict[str, Any], limits: dict[int | None, float], dp: int | None, limit: float | None
) -> None:
    assert Facts(arguments=arguments, limits=limits).limit(dp) == limit


@pytest.mark.parametrize(
    ("version", "arguments", "arg"),
    [
        ("0.5.23.post1", {}, "cuda_graph_max_bs_decode"),
        ("0.5.23", {"cuda_graph_max_bs": None}, "cuda_graph_max_bs"),  # a version from before a change of the server
        ("0.4.9", {"cuda_graph_max_bs_decode": None}, "cuda_graph_max_bs_decode"),
    ],
)
def test_the_flag_of_the_graphs_is_that_of_the_release(version: str, arguments: dict[str, Any], arg: str) -> None:
    assert Facts(arguments=arguments, version=version).graph_arg == arg


# Other sources


INFO = ServerInfo("0.5.23", {}, [
    RankFigures(weight_memory_gb=16.4, kv_memory_gb=39.6, graph_memory_gb=2.1, available_gpu_memory_gb=9.9,
        kv_pool_tokens=1000),
    RankFigures(weight_memory_gb=16.5, kv_memory_gb=39.7, graph_memory_gb=2.0, available_gpu_memory_gb=9.1,
        kv_pool_tokens=990),
], graph_batch_sizes=(1, 80))  # fmt: skip


def test_server_info_fills_what_nothing_else_has() -> None:
    facts = Facts()
    facts.take_info(INFO)
    assert (facts.weights_gb, facts.gigabytes("pool"), facts.gigabytes("graph")) == (16.5, 39.7, 2.1)
    assert (facts.reserve_gb, facts.pools, facts.largest_captured) == (9.1, {None: 990.0}, 80)


def test_the_log_wins_over_server_info() -> None:
    facts, log = of_release("0.5.23"), of_release("0.5.23")
    facts.take_info(INFO)
    for name in ("weights_gb", "pools_gb", "reserve_gb", "pools", "graph_sizes"):
        assert getattr(facts, name) == getattr(log, name)


@pytest.mark.parametrize(
    ("version", "first"), [("0.4.1.post7", True), ("0.4.3", False), ("0.5.23", False), (None, False)]
)
def test_the_guides_first_edition_is_that_of_servers_before_0_4_3(version: str | None, first: bool) -> None:  # noqa: FBT001 - a case
    assert Facts(version=version).is_first_edition is first
