"""What is known of one server since its start. The log lines are those of the data directory, release by release."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_tuning_exporter.sglang.args.flags import version_tuple
from sglang_tuning_exporter.sglang.args.values import number
from sglang_tuning_exporter.sglang.events import (
    NO_RANK,
    DecodeBatch,
    KvPool,
    Limits,
    Memory,
    Rank,
    RankFigures,
    ServerArgs,
)
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.sglang.server_info import RankInfo
from sglang_tuning_exporter.state.arguments import SHOWN_ARGS
from sglang_tuning_exporter.state.facts import ServerFacts

LOGS = Path(__file__).parent / "data" / "logs"


def with_args(**values: object) -> ServerFacts:
    facts = ServerFacts()
    facts.apply(ServerArgs(None, NO_RANK, dict(values)))
    return facts


def limits(
    dp: int | None = None, *, tp: int | None = None, gigabytes: float | None = None, device: str = "gpu"
) -> Limits:
    return Limits(None, Rank(dp=dp, tp=tp), 1000, 32, 8192, available_gb=gigabytes, memory_device=device)


def from_log(release: str) -> ServerFacts:
    facts = ServerFacts()
    for event in LogReader().feed((LOGS / f"{release}.log").read_bytes()):
        facts.apply(event)
    return facts


@pytest.mark.parametrize("release", ["0.4.6.post5", "0.4.9.post6", "0.5.7", "0.5.12", "0.5.20", "0.5.23"])
def test_a_start_as_printed_has_what_advice_needs(release: str) -> None:
    facts = from_log(release)
    assert facts.arg("schedule_conservativeness") is not None
    assert facts.arg("mem_fraction_static") is not None
    assert facts.running_limit(None) == 4096 or set(facts.running_limits.values()) == {4096}
    assert facts.kv_pool_tokens
    assert facts.kv_pool_gb
    assert not facts.is_cpu


@pytest.mark.parametrize("release", ["0.4.9.post6", "0.5.12", "0.5.23"])
def test_the_reserve_is_read_where_the_release_prints_it(release: str) -> None:
    assert from_log(release).reserve_gb == 9.87


def loaded(*lines: str) -> ServerFacts:
    facts, reader = ServerFacts(), LogReader()
    for line in lines:
        for event in reader.feed(f"[11:38:32 TP0] {line}\n".encode()):
            facts.apply(event)
    return facts


def test_weights_are_what_a_load_took_where_the_release_prints_only_what_is_free() -> None:
    # 0.3.0 to 0.4.0.
    facts = loaded(
        "Load weight begin. avail mem=78.71 GB",
        "Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=62.25 GB",
    )
    assert (facts.weights_gb, facts.memory_before_weights_gb) == (16.46, 78.71)


@pytest.mark.parametrize(
    "lines",
    [
        ("Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=62.25 GB",),
        ("Load weight begin.", "Load weight end. type=LlamaForCausalLM, avail mem=62.25 GB"),
        ("Load weight begin. avail mem=78.71 GB", "Load weight end. type=LlamaForCausalLM"),
    ],
)
def test_weights_are_unknown_without_what_was_free_before_and_after(lines: tuple[str, ...]) -> None:
    assert loaded(*lines).weights_gb is None


def test_the_arguments_of_an_event_are_copied() -> None:
    event = ServerArgs(None, NO_RANK, {})
    facts = ServerFacts()
    facts.apply(event)
    facts.apply(limits())
    assert (event.args, facts.arg("chunked_prefill_size")) == ({}, 8192)


def test_an_argument_left_open_takes_the_value_that_the_server_chose() -> None:
    facts = with_args(chunked_prefill_size=None)
    facts.apply(limits())
    assert facts.arg("chunked_prefill_size") == 8192


def test_only_numbers_and_switches_are_shown() -> None:
    facts = with_args(api_key="secret", mem_fraction_static=0.8, disable_cuda_graph=True, schedule_policy="lpm")
    assert facts.shown_args == {"mem_fraction_static": 0.8, "disable_cuda_graph": 1.0}
    assert not {"api_key", "admin_api_key"} & set(SHOWN_ARGS)


@pytest.mark.parametrize(
    ("value", "expected"), [(True, 1.0), (3, 3.0), (0.5, 0.5), ("3", None), (None, None), ([1], None)]
)
def test_a_figure_is_a_number_or_a_switch(value: object, expected: float | None) -> None:
    assert number(value) == expected


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.5.10.post1", (0, 5, 10)), ("0.5.23", (0, 5, 23)), ("main", None), ("", None), (None, None)],
)
def test_a_version_is_read_up_to_its_patch_number(version: str | None, expected: tuple[int, int, int] | None) -> None:
    assert version_tuple(version) == expected


def test_a_scheduler_has_the_limit_it_printed() -> None:
    facts = with_args(max_running_requests=100, dp_size=2, enable_dp_attention=True)
    facts.apply(limits(dp=0))
    assert (facts.running_limit(0), facts.running_limit(1)) == (32, 50)


def test_dp_attention_shares_the_limit_out_and_plain_data_parallelism_does_not() -> None:
    shared = with_args(max_running_requests=101, dp_size=2, enable_dp_attention=True)
    plain = with_args(max_running_requests=101, dp_size=2)
    assert (shared.running_limit(1), plain.running_limit(1), shared.running_limit(None)) == (50, 101, 101)


def test_a_limit_that_was_never_logged_is_unknown() -> None:
    assert ServerFacts().running_limit(None) is None


def test_the_limit_in_force_of_server_info_is_every_schedulers() -> None:
    facts = with_args(max_running_requests=100)
    for dp in (0, 1):
        facts.apply(limits(dp=dp))
    facts.apply_info("0.5.23", {}, 20)
    assert (facts.running_limits, facts.version, facts.arg("max_running_requests")) == ({0: 20, 1: 20}, "0.5.23", 100)


def test_the_reserve_is_that_of_the_rank_with_least() -> None:
    facts = ServerFacts()
    for tp, gigabytes in enumerate((9.0, 4.5, 8.0)):
        facts.apply(limits(tp=tp, gigabytes=gigabytes))
    facts.apply(limits(dp=1, gigabytes=7.0))
    assert facts.reserve_gb == 4.5


def test_a_cpu_server_has_no_reserve_and_no_graphs() -> None:
    facts = with_args(device="cpu")
    facts.apply(limits(gigabytes=20.0, device="cpu"))
    assert (facts.reserve_gb, facts.without_graph) == (None, "unsupported")


def test_a_cpu_server_of_0_4_9_is_known_by_its_argument_though_it_prints_available_gpu_mem() -> None:
    facts = with_args(device="cpu")
    facts.apply(limits(gigabytes=20.0, device="gpu"))
    assert (facts.is_cpu, facts.reserve_gb) == (True, None)


def test_a_cpu_server_whose_start_was_not_seen_is_known_by_its_memory_or_batch_lines() -> None:
    by_memory, by_batch = ServerFacts(), ServerFacts()
    by_memory.apply(limits(gigabytes=20.0, device="cpu"))
    by_batch.apply_figures(RankFigures(available_gpu_memory_gb=20.0))
    by_batch.graph_device = "cpu"
    assert (by_memory.is_cpu, by_batch.is_cpu, by_batch.reserve_gb) == (True, True, None)


@pytest.mark.parametrize(
    "values",
    [
        {"disable_cuda_graph": True},
        {"disable_decode_cuda_graph": True},
        {"cuda_graph_config": {"decode": {"backend": "disabled"}}},
    ],
)
def test_graphs_can_be_switched_off_in_three_ways(values: dict[str, object]) -> None:
    assert with_args(device="cuda", **values).without_graph


@pytest.mark.parametrize(
    "values",
    [
        {"cuda_graph_max_bs": 160},
        {"cuda_graph_max_bs_decode": 160},
        {"cuda_graph_config": {"decode": {"max_bs": 160}}, "cuda_graph_max_bs_decode": None},
    ],
)
def test_the_largest_captured_batch_is_read_in_every_spelling(values: dict[str, object]) -> None:
    facts = with_args(**values)
    assert (facts.largest_captured, facts.without_graph) == (160, "")


def test_the_capture_lines_win_over_the_arguments() -> None:
    facts = with_args(cuda_graph_max_bs=160)
    facts.apply(Memory(None, NO_RANK, "graph_begin", 10.0, graph_sizes=(1, 2, 80)))
    facts.apply(Memory(None, NO_RANK, "graph", 8.0, 2.0))
    assert (facts.largest_captured, facts.graph_gb) == (80, 2.0)


def test_without_captured_graphs_no_size_is_known() -> None:
    assert ServerFacts().largest_captured is None


@pytest.mark.parametrize(
    ("version", "arg"),
    [
        ("0.4.9.post6", "cuda_graph_max_bs"),
        ("0.5.12", "cuda_graph_max_bs"),
        ("0.5.14", "cuda_graph_max_bs_decode"),
        ("0.5.20", "cuda_graph_max_bs_decode"),
        ("0.5.23.post1", "cuda_graph_max_bs_decode"),
        (None, "cuda_graph_max_bs_decode"),
    ],
)
def test_the_graph_flag_is_spelled_for_the_version(version: str | None, arg: str) -> None:
    assert ServerFacts(version=version).graph_flag_arg == arg


@pytest.mark.parametrize(("arg", "stale"), [("cuda_graph_max_bs", "0.5.23"), ("cuda_graph_max_bs_decode", "0.4.9")])
def test_the_running_servers_own_spelling_wins_over_a_version_from_before_an_upgrade(arg: str, stale: str) -> None:
    facts = with_args(**{arg: None})
    facts.version = stale
    assert facts.graph_flag_arg == arg


@pytest.mark.parametrize(("release", "arg"), [("0.5.12", "cuda_graph_max_bs"), ("0.5.23", "cuda_graph_max_bs_decode")])
def test_a_printed_start_gives_the_spelling_without_a_version(release: str, arg: str) -> None:
    assert from_log(release).graph_flag_arg == arg


@pytest.mark.parametrize(
    ("values", "tokens"),
    [
        ({"chunked_prefill_size": 8192, "max_prefill_tokens": 16384}, 8192),
        ({"chunked_prefill_size": -1, "max_prefill_tokens": 16384}, 16384),
        ({}, None),
    ],
)
def test_a_prefill_batch_holds_a_chunk_or_where_chunking_is_off_max_prefill_tokens(
    values: dict[str, object], tokens: float | None
) -> None:
    assert with_args(**values).prefill_batch_tokens == tokens


def test_a_scrapes_constants_are_learned_by_rank() -> None:
    facts = ServerFacts()
    facts.apply_figures(RankFigures(0, kv_pool_tokens=10.0, available_gpu_memory_gb=6.0, kv_memory_gb=3.0))
    facts.apply_figures(RankFigures(1, kv_pool_tokens=12.0, available_gpu_memory_gb=5.5))
    assert (facts.kv_pool_tokens, facts.reserve_gb, facts.kv_pool_gb) == ({0: 10.0, 1: 12.0}, 5.5, 3.0)


def test_the_pool_is_the_last_figure_printed() -> None:
    facts = ServerFacts()
    facts.apply(KvPool(None, NO_RANK, 2000, 8.0))
    facts.apply(KvPool(None, NO_RANK, 1800))
    assert (facts.kv_pool_tokens, facts.kv_pool_gb) == ({None: 1800}, 8.0)


def test_a_batch_line_changes_no_fact_of_the_start() -> None:
    facts = ServerFacts()
    facts.apply(DecodeBatch(None, NO_RANK, 1))
    assert facts == ServerFacts()


@pytest.mark.parametrize(("release", "left"), [("0.4.3.post4", 9.87), ("0.4.6.post5", 9.87), ("0.4.9.post6", 9.87)])
def test_the_memory_left_by_the_last_stage_is_the_reserve_where_the_limits_line_lacks_it(
    release: str, left: float
) -> None:
    assert from_log(release).reserve_gb == left


def test_a_capture_line_without_memory_leaves_the_reserve_unknown() -> None:
    facts = ServerFacts()
    for line in (
        b"[11:38:33 TP0] Memory pool end. avail mem=11.93 GB\n",
        b"[11:38:33 TP0] Capture cuda graph begin. This can take up to several minutes.\n",
        b"[11:38:33 TP0] max_total_num_tokens=1040384, max_prefill_tokens=16384, max_running_requests=4096, context_len=131072\n",
    ):
        for event in LogReader().feed(line):
            facts.apply(event)
    assert facts.reserve_gb is None


@pytest.mark.parametrize(
    ("version", "args", "first"),
    [
        ("0.4.1.post7", {}, True),
        ("0.4.3", {}, False),
        ("0.5.23", {}, False),
        (None, {}, False),
    ],
)
def test_the_guides_first_edition_is_that_of_servers_before_0_4_3(
    version: str | None, args: dict[str, object], *, first: bool
) -> None:
    assert ServerFacts(version=version, args=args).is_first_edition is first


def test_server_info_fills_what_nothing_else_has() -> None:
    # Metrics alone show no KV cache before 0.5.6 and no memory before 0.5.11.
    facts = ServerFacts()
    facts.apply_ranks(
        [
            RankInfo(weight_gb=16.4, kv_cache_gb=39.6, graph_gb=2.1, startup_available_gb=9.9, token_capacity=1000),
            RankInfo(weight_gb=16.5, kv_cache_gb=39.7, graph_gb=2.0, startup_available_gb=9.1, token_capacity=990),
        ]
    )
    assert (facts.weights_gb, facts.kv_pool_gb, facts.graph_gb) == (16.5, 39.7, 2.1)
    assert (facts.reserve_gb, facts.kv_pool_tokens) == (9.1, {None: 990.0})


def test_captured_sizes_are_known_from_server_info() -> None:
    facts = ServerFacts(args={"cuda_graph_max_bs": 160})
    facts.apply_ranks([RankInfo(graph_batch_sizes=(1, 2, 4, 80))])
    assert facts.largest_captured == 80


def test_the_log_and_the_metrics_win_over_server_info() -> None:
    facts = from_log("0.5.23")
    known = (facts.weights_gb, facts.kv_pool_gb, facts.graph_gb, facts.reserve_gb, dict(facts.kv_pool_tokens))
    sizes = facts.graph_sizes
    facts.apply_ranks([RankInfo(1, 1.0, 1.0, 1.0, 1.0, 1, (1,))])
    assert known == (facts.weights_gb, facts.kv_pool_gb, facts.graph_gb, facts.reserve_gb, facts.kv_pool_tokens)
    assert facts.graph_sizes == sizes


def test_memory_that_came_out_below_zero_is_not_shown() -> None:
    facts = ServerFacts()
    facts.apply_ranks([RankInfo(weight_gb=-0.01, kv_cache_gb=0.0, graph_gb=0.0)])
    assert (facts.weights_gb, facts.kv_pool_gb, facts.graph_gb) == (None, None, None)


def test_a_chunk_that_the_scheduler_printed_outlives_arguments_that_leave_it_open() -> None:
    facts = with_args(chunked_prefill_size=None)
    facts.apply(limits())
    facts.apply_info("0.5.23", {"chunked_prefill_size": None, "tp_size": 1}, None)
    assert facts.arg("chunked_prefill_size") == 8192
