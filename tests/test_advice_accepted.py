"""Advice that the server's own release accepts, in the flag's own unit: facts of a server in, advice out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_tuning_exporter.diagnosis.advice import Advice, SizingInput, advise
from sglang_tuning_exporter.diagnosis.command import command_line
from sglang_tuning_exporter.diagnosis.evidence import Past
from sglang_tuning_exporter.diagnosis.findings import judge
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.totals import Totals, batch_size_bucket

PROFILE = PROFILES["online"]
RANKS: dict[str, Any] = {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}


def case(version: str | None = "0.5.9", /, *, usage: Any = None, ran: Any = None, **args: Any) -> SizingInput:
    recent = Totals()
    if usage is not None:
        recent.integrals.update(usage=100 * usage, usage_seconds=100.0)
    if ran is not None:
        recent.running_seconds[batch_size_bucket(ran)] = 100.0
    facts = ServerFacts(version=version, args={"model_path": "/models/x", **args})
    return SizingInput(Past(recent, {}, 600.0, facts, PROFILE))


def one(diagnosis: str, of: SizingInput) -> Advice:
    (advice,) = advise(diagnosis, of)
    return advice


def changes(diagnosis: str, of: SizingInput) -> list[str]:
    advised = {each.arg: each.setting for each in advise(diagnosis, of) if each.suggested is not None}
    command = command_line(of.facts, advised)
    assert command is not None
    assert command.left_out == ()
    return [change.text for change in command.changes]


def typed(diagnosis: str, of: SizingInput) -> list[str]:
    return [each.typed for each in advise(diagnosis, of)]


@pytest.mark.parametrize(
    ("printed", "now", "raised"), [(1024, 8192.0, 32768.0), (4096, 32768.0, 65536.0), (8192, 65536.0, 131072.0)]
)
def test_a_chunk_that_ranks_share_is_raised_as_a_flag(printed: int, now: float, raised: float) -> None:
    of = case(chunked_prefill_size=printed, **RANKS)
    advice = one("prefill_bound", of)
    assert (advice.current, advice.suggested) == (now, raised)
    assert changes("prefill_bound", of) == [f"--chunked-prefill-size: {now:g} -> {raised:.10g}"]


@pytest.mark.parametrize(
    ("printed", "now", "lowered"),
    [(8192, 65536.0, 32768.0), (4096, 32768.0, 16384.0), (2048, 16384.0, 8192.0), (1024, 8192.0, 4096.0)],
)
def test_after_a_failure_a_chunk_that_ranks_share_is_lowered_step_by_step(
    printed: int, now: float, lowered: float
) -> None:
    advice = one("out_of_memory_prefill", case(chunked_prefill_size=printed, mem_fraction_static=0.85, **RANKS))
    assert (advice.current, advice.suggested) == (now, lowered)


def test_the_smallest_chunk_of_ranks_leaves_the_memory_fraction() -> None:
    of = case(chunked_prefill_size=512, mem_fraction_static=0.85, **RANKS)
    assert typed("out_of_memory_prefill", of) == ["--mem-fraction-static 0.8"]


def test_a_raised_chunk_is_whole_pages_for_each_rank() -> None:
    advice = one("prefill_bound", case(chunked_prefill_size=1152, page_size=48, **RANKS))
    assert isinstance(advice.suggested, float)
    assert advice.suggested % (48 * 8) == 0


def test_an_order_that_priority_scheduling_refuses_is_not_advised() -> None:
    args = {"schedule_policy": "fcfs", "kv_cache_dtype": "auto"}
    assert typed("shared_prefixes_unused", case("0.5.23", **args)) == ["--schedule-policy lpm"]
    assert advise("shared_prefixes_unused", case("0.5.23", enable_priority_scheduling=True, **args)) == []
    assert advise("shared_prefixes_unused", case("0.5.23", disable_radix_cache=True, **args)) == []


def test_no_order_by_prefixes_is_advised_where_more_wait_than_are_sorted() -> None:
    of = case("0.5.23", schedule_policy="fcfs")
    of.recent.integrals.update(queued=100 * 200.0, queued_seconds=100.0)
    assert advise("shared_prefixes_unused", of) == []


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("0.5.23", "--load-balance-method total_requests"),
        ("0.5.5.post3", "--load-balance-method shortest_queue"),
        ("0.4.9.post6", ""),  # its shortest_queue fails at the first request
        ("0.3.0", "--load-balance-method shortest_queue"),
    ],
)
def test_ranks_are_balanced_as_their_release_can(release: str, expected: str) -> None:
    advice = one("dp_imbalanced", case(release, dp_size=2, load_balance_method="round_robin"))
    assert advice.typed == expected
    assert expected or "router" in advice.suggestion


@pytest.mark.parametrize(("release", "kind"), [("0.4.0.post2", "fp8_e5m2"), ("0.4.1.post7", "fp8_e4m3")])
def test_the_8_bit_cache_is_the_one_that_the_release_has(release: str, kind: str) -> None:
    of = case(release, max_running_requests=64, kv_cache_dtype="auto")
    of.recent.integrals.update(running=100 * 12.0, running_seconds=100.0)
    assert typed("running_far_below_limit", of) == [f"--kv-cache-dtype {kind}"]


def test_without_a_release_both_spellings_are_given_in_words() -> None:
    of = SizingInput(replace(case(None, ran=300).past, facts=ServerFacts()))
    advice = one("cuda_graph_not_covering", of)
    assert (advice.flag, advice.suggested) == ("", None)
    assert advice.suggestion == (
        "--cuda-graph-max-bs 320 (up to SGLang 0.5.13), --cuda-graph-max-bs-decode 320 (from SGLang 0.5.14 on)"
    )


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("0.5.9", ["--enable-dp-attention", "--dp-size 8"]),
        ("0.4.9.post6", ["--enable-dp-attention", "--dp-size 8"]),
        ("0.4.2.post4", ["--enable-dp-attention"]),  # sets dp_size by itself
        ("0.5.23", ["--attn-dp-size 8"]),
    ],
)
def test_attention_data_parallelism_is_advised_with_its_ranks(release: str, expected: list[str]) -> None:
    of = case(release, tp_size=8, dp_size=1)
    assert typed("dp_attention_candidate", of) == expected
    assert len(changes("dp_attention_candidate", of)) == len(expected)


def test_attention_data_parallelism_does_not_replace_replicas() -> None:
    assert advise("dp_attention_candidate", case(tp_size=8, dp_size=2)) == []


def test_one_server_on_each_gpu_is_advised_in_words() -> None:
    advice = one("data_parallel_would_fit", case(tp_size=8))
    assert advice.flag == ""
    assert "--tp-size 1 on each of the 8 GPUs, behind a router" in advice.suggestion


@pytest.mark.parametrize("args", [RANKS, {"tp_size": 8, "dp_size": 2}, {"tp_size": 8, "ep_size": 2}])
def test_one_gpu_is_not_advised_beside_ranks_and_experts(args: dict[str, object]) -> None:
    assert advise("data_parallel_would_fit", case(**args)) == []


@pytest.mark.parametrize(
    ("release", "expected"),
    [("0.4.9.post6", ["--enable-ep-moe"]), ("0.5.2", ["--enable-ep-moe"]), ("0.5.9", ["--ep-size 8"])],
)
def test_experts_are_spread_by_the_flag_that_acts(release: str, expected: list[str]) -> None:
    assert typed("expert_parallel_candidate", case(release, tp_size=8, ep_size=1)) == expected


def test_a_switch_to_remove_is_written_as_people_write_it() -> None:
    advice = one("cuda_graph_off", case(disable_cuda_graph=True))
    assert advice.typed == "remove --disable-cuda-graph"
    assert changes("cuda_graph_off", case(disable_cuda_graph=True)) == ["--disable-cuda-graph: on -> off"]


def test_a_switch_that_the_server_sets_by_itself_is_not_to_be_removed() -> None:
    advice = one("cuda_graph_off", case(disable_cuda_graph=True, attention_backend="torch_native"))
    assert advice.arg == "attention_backend"


def test_a_failure_in_decode_of_a_single_request_lowers_the_memory_fraction() -> None:
    of = case(max_running_requests=64, ran=1, mem_fraction_static=0.9)
    assert typed("out_of_memory_decode", of) == ["--mem-fraction-static 0.8"]


def test_each_rank_keeps_one_request_at_least() -> None:
    advice = one("out_of_memory_decode", case(max_running_requests=16, ran=2, mem_fraction_static=0.9, **RANKS))
    assert advice.suggested == 12
    lowest = one("out_of_memory_decode", case(max_running_requests=16, ran=1, mem_fraction_static=0.9, **RANKS))
    assert lowest.arg == "mem_fraction_static"


RESERVE = {"memory_reserve_too_small"}


def at_limit(captured: int, **facts: float) -> list[Advice]:
    of = case(max_running_requests=64, cuda_graph_max_bs=captured, usage=0.22)
    of.facts.graph_gb, of.facts.available_gb[None] = facts.get("graphs", 1.0), facts.get("left", 8.0)
    return advise("running_at_limit", of)


def test_a_limit_is_raised_up_to_the_captured_graphs_where_that_is_twice_as_much() -> None:
    assert [each.typed for each in at_limit(160)] == ["--max-running-requests 160"]


def test_beyond_the_captured_graphs_both_are_raised() -> None:
    assert [each.typed for each in at_limit(64)] == ["--max-running-requests 256", "--cuda-graph-max-bs 256"]


@pytest.mark.parametrize("facts", [{"left": 5.5}, {"graphs": 5.0}])
def test_where_larger_graphs_do_not_fit_memory_is_found_for_them_first(facts: dict[str, float]) -> None:
    (advice,) = at_limit(64, **facts)
    assert (advice.flag, advice.suggested) == ("", None)
    assert "batches beyond 64 would run without" in advice.suggestion


def test_the_advice_warns_that_batches_beyond_all_usual_graphs_run_without() -> None:
    of = case(max_running_requests=640, cuda_graph_max_bs=512, usage=0.22)
    (advice,) = advise("running_at_limit", of)
    assert advice.suggested == 2560
    assert "batches beyond 512 will run without CUDA graphs" in advice.gain


def test_a_limit_is_raised_within_the_kv_cache_that_a_larger_reserve_leaves() -> None:
    args = {"max_running_requests": 384, "mem_fraction_static": 0.8, "cuda_graph_max_bs": 1000}
    of = case(usage=0.53, **args)
    of.facts.available_gb[None], of.facts.kv_pool_gb, of.facts.memory_before_weights_gb = 2.7, 8.8, 60.0
    alone, beside = (
        advise("running_at_limit", replace(of, holding=held)) for held in (frozenset(), frozenset(RESERVE))
    )
    assert [each.suggested for each in alone] == [640]
    assert beside == []  # a reserve of 6.5 GB takes 4.2 of the 8.8 GB: usage would be 1.0 at the present limit


def test_the_advice_has_the_expected_usage_at_the_new_limit() -> None:
    assert at_limit(160)[0].gain.startswith("token usage is 0.22 at this limit, about 0.55 at the new one")


@pytest.mark.parametrize("phase", ["prefill", "decode", "graph_capture", "startup"])
def test_after_a_failure_nothing_in_the_command_takes_more_memory(phase: str) -> None:
    recent = Totals()
    recent.seconds.update(
        {
            ("activity", "serving"): 200.0,
            ("cuda_graph", "beyond_captured"): 200.0,
            ("admission", "prefill_bound"): 200.0,
            ("queue", "in_range"): 200.0,
        }
    )
    recent.running_seconds[batch_size_bucket(400)] = 200.0
    recent.counts["observations"] = 100.0
    args = {
        "model_path": "/models/x",
        "cuda_graph_max_bs_decode": 160,
        "chunked_prefill_size": 8192,
        "mem_fraction_static": 0.85,
        "max_running_requests": 512,
    }
    facts = ServerFacts(version="0.5.23", args=args, available_gb={None: 8.0})
    judged = judge(Past(recent, {phase: 1}, 600.0, facts, PROFILE))
    assert judged.changes
    assert not [a for found in judged.findings for a in found.advice if "memory" in a.takes]


@pytest.mark.parametrize(("left", "lowered"), [(13.5, []), (9.87, []), (6.0, []), (5.5, ["mem_fraction_static"])])
def test_the_advice_and_the_command_have_the_same_memory_fraction(left: float, lowered: list[str]) -> None:
    of = case("0.5.23", cuda_graph_max_bs_decode=160, mem_fraction_static=0.85, ran=300)
    of.facts.available_gb[None], of.facts.memory_before_weights_gb, of.facts.graph_gb = left, 80.0, 1.0
    raised, *others = advise("cuda_graph_not_covering", of)
    assert raised.typed == "--cuda-graph-max-bs-decode 320"
    assert "mem-fraction" not in raised.cost
    assert [each.arg for each in others] == lowered


def test_the_users_own_range_of_memory_left_decides_which_way_the_fraction_moves() -> None:
    own = PROFILE.with_thresholds({"reserve_lower_gb": 12.0, "reserve_upper_gb": 20.0})
    of = case("0.5.23", mem_fraction_static=0.85)
    of.facts.available_gb[None], of.facts.memory_before_weights_gb = 11.0, 80.0
    advice = one("memory_reserve_too_small", SizingInput(replace(of.past, profile=own)))
    assert advice.suggested is not None
    assert float(advice.suggested) < 0.85


def test_the_grammar_backends_named_are_those_of_the_release() -> None:
    assert "llguidance" not in one("grammar_queue", case("0.4.0.post2", grammar_backend="outlines")).suggestion
    assert "llguidance" in one("grammar_queue", case("0.5.9", grammar_backend="xgrammar")).suggestion


@pytest.mark.parametrize(
    ("diagnosis", "of"),
    [
        ("running_far_below_limit", case(max_running_requests=64, max_total_tokens=8192)),
        ("retracting_too_often", case(schedule_conservativeness=1.5, max_total_tokens=8192)),
        ("out_of_memory_decode", case(max_running_requests=1, ran=1, mem_fraction_static=0.9)),
        ("prefill_bound", case(chunked_prefill_size=16384)),
        ("cuda_graph_not_covering", case(cuda_graph_max_bs=768, ran=1000)),
    ],
)
def test_a_change_of_another_flag_has_its_own_reason_and_limits(diagnosis: str, of: SizingInput) -> None:
    of.recent.integrals.update(running=100 * 12.0, running_seconds=100.0)
    advice, remedy = one(diagnosis, of), BY_ID[diagnosis].remedy
    assert advice.why != remedy.why
    assert advice.will_not_help_if != remedy.will_not_help_if
