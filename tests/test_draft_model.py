"""Speculative decoding: target and draft model print the same start-up lines, and the memory of each is counted apart."""

from __future__ import annotations

import pytest

from sglang_tuning_exporter.diagnosis.advice import SizingInput, advise
from sglang_tuning_exporter.diagnosis.conditions.suitability import data_parallel_would_fit, torch_compile_candidate
from sglang_tuning_exporter.diagnosis.evidence import Past
from sglang_tuning_exporter.diagnosis.sizing.graphs import graphs, tokens_gained
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.totals import Totals

# What a rank prints of a start with EAGLE, in its order; wordings of srt/model_executor/model_runner.py,
# srt/mem_cache/memory_pool.py and srt/speculative/eagle_worker.py (eagle_worker_v2.py in 0.5.20) of each release.
TARGET_WEIGHTS = """\
Load weight begin. avail mem=78.70 GB
Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=62.50 GB, mem usage=16.20 GB.
"""
DRAFT_WEIGHTS = """\
Load weight begin. avail mem=20.30 GB
Load weight end. type=LlamaForCausalLMEagle, dtype=torch.bfloat16, avail mem=18.80 GB, mem usage=1.50 GB.
"""
LIMITS = (
    "max_total_num_tokens=300000, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=48,"
    " context_len=131072, available_gpu_mem=11.00 GB\n"
)
STARTS = {
    "0.4.9.post6": f"""\
{TARGET_WEIGHTS}KV Cache is allocated. #tokens: 300000, K size: 18.75 GB, V size: 18.75 GB
Memory pool end. avail mem=24.00 GB
Capture cuda graph begin. This can take up to several minutes. avail mem=23.80 GB
Capture cuda graph bs [1, 2, 4, 8, 16, 32]
Capture cuda graph end. Time elapsed: 21.42 s. mem usage=2.00 GB. avail mem=21.80 GB.
{DRAFT_WEIGHTS}KV Cache is allocated. #tokens: 300000, K size: 1.25 GB, V size: 1.25 GB
Memory pool end. avail mem=12.50 GB
Capture draft cuda graph begin. This can take up to several minutes. avail mem=12.50 GB
Capture draft cuda graph end. Time elapsed: 3.11 s. mem usage=0.40 GB. avail mem=12.10 GB.
Capture draft extend cuda graph begin. This can take up to several minutes. avail mem=12.10 GB
Capture draft extend cuda graph end. Time elapsed: 3.01 s. mem usage=0.30 GB. avail mem=11.80 GB.
{LIMITS}""",
    "0.5.9": f"""\
{TARGET_WEIGHTS}KV Cache is allocated. #tokens: 300000, K size: 18.75 GB, V size: 18.75 GB
Memory pool end. avail mem=24.00 GB
Capture cuda graph begin. This can take up to several minutes. avail mem=23.80 GB
Capture cuda graph bs [1, 2, 4, 8, 16, 32]
Capture cuda graph end. Time elapsed: 21.42 s. mem usage=2.00 GB. avail mem=21.80 GB.
Capture piecewise CUDA graph begin. avail mem=21.80 GB
Capture piecewise CUDA graph end. Time elapsed: 20.42 s. mem usage=0.90 GB. avail mem=20.90 GB.
{DRAFT_WEIGHTS}KV Cache is allocated. #tokens: 300000, K size: 1.25 GB, V size: 1.25 GB
Memory pool end. avail mem=12.50 GB
Capture draft cuda graph begin. This can take up to several minutes. avail mem=12.50 GB
Capture draft cuda graph end. Time elapsed: 3.11 s. mem usage=0.70 GB. avail mem=12.10 GB.
{LIMITS}""",
    "0.5.20": f"""\
{TARGET_WEIGHTS}{DRAFT_WEIGHTS}KV Cache is allocated. dtype: torch.bfloat16, #tokens: 300000, K size: 18.75 GB, V size: 18.75 GB
Memory pool end. avail mem=24.00 GB
Draft KV Cache is allocated. dtype: torch.bfloat16, #tokens: 300000, K size: 1.25 GB, V size: 1.25 GB
Memory pool end. avail mem=21.50 GB
Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[4, 8], avail mem=21.50 GB
Capture target prefill CUDA graph end. elapsed=21.42 s, mem usage=0.90 GB, avail mem=20.60 GB.
Capture target verify CUDA graph begin. backend=full, num_tokens_per_bs=4, avail mem=20.60 GB
Capture target verify CUDA graph end. bs=[1, 2, 4, 8, 16, 32], elapsed=21.42 s, mem usage=2.00 GB, avail mem=18.60 GB.
Capture draft decode CUDA graph begin. backend=full, bs=[1, 2, 4], avail mem=12.50 GB
Capture draft decode CUDA graph end. bs=[1, 2, 4], elapsed=3.11 s, mem usage=0.70 GB, avail mem=12.10 GB.
{LIMITS}""",
}
ARGS = {
    "tp_size": 8,
    "mem_fraction_static": 0.85,
    "cuda_graph_max_bs": 32,
    "enable_torch_compile": False,
    "quantization": None,
    "speculative_algorithm": "EAGLE",
}


def started(text: str, ranks: int = 1, **args: object) -> ServerFacts:
    facts = ServerFacts(args={**ARGS, **args})
    for rank in range(ranks):
        prefix = f"[2025-11-20 11:38:33{f' TP{rank}' if ranks > 1 else ''}] "
        lines = "".join(prefix + line + "\n" for line in text.splitlines())
        for event in LogReader().feed(lines.encode()):
            facts.apply(event)
    return facts


@pytest.mark.parametrize("release", STARTS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_and_memory_before_them_are_the_targets(release: str, ranks: int) -> None:
    facts = started(STARTS[release], ranks)
    assert (facts.memory_before_weights_gb, facts.weights_gb, facts.draft_weights_gb) == (78.7, 16.2, 1.5)


@pytest.mark.parametrize("release", STARTS)
def test_the_pool_is_the_targets(release: str) -> None:
    facts = started(STARTS[release])
    assert (facts.kv_pool_gb, facts.kv_pool_tokens) == (37.5, {None: 300000})


@pytest.mark.parametrize("release", ["0.4.9.post6", "0.5.9"])
def test_a_token_takes_its_place_in_the_drafts_pool_too(release: str) -> None:
    facts = started(STARTS[release])
    assert facts.pools_gb == 40.0
    assert tokens_gained(facts, 4.0) == "+4.0 GB for the KV cache: +30,000 tokens, +10 %"


@pytest.mark.parametrize("release", STARTS)
def test_captured_sizes_are_the_targets_and_all_graphs_take_memory(release: str) -> None:
    facts = started(STARTS[release])
    assert facts.largest_captured == 32
    assert facts.decode_graph_gb == pytest.approx(2.7)
    assert facts.graph_gb == pytest.approx(2.7 if release == "0.4.9.post6" else 3.6)


@pytest.mark.parametrize("release", STARTS)
def test_the_reserve_is_what_was_left_after_both_models(release: str) -> None:
    assert started(STARTS[release]).reserve_gb == 11.0


@pytest.mark.parametrize("release", STARTS)
def test_the_memory_fraction_grows_by_what_the_reserve_can_spare(release: str) -> None:
    # With the draft's figures the step was four times as large: 0.95, which takes eight of the eleven gigabytes.
    case = SizingInput(Past(Totals(), {}, 60.0, started(STARTS[release]), PROFILES["online"]))
    (advice,) = advise("memory_reserve_too_large", case)
    assert (advice.current, advice.suggested) == (0.85, 0.90)


def test_larger_graphs_are_estimated_by_those_of_decode_batches() -> None:
    recent = Totals()
    recent.running_seconds[60] = 100.0
    facts = started(STARTS["0.5.9"])
    facts.available_gb[None] = 7.0
    (larger,) = graphs(SizingInput(Past(recent, {}, 100.0, facts, PROFILES["online"])))
    assert larger.suggested == 64
    (paid,) = larger.set_together
    assert "2.7 GB" in paid.gain


def loaded(facts: ServerFacts) -> Past:
    recent = Totals()
    recent.running_seconds[4] = 100.0
    recent.seconds["activity", "serving"] = 100.0
    recent.counts["observations"] = 100
    return Past(recent, {}, 100.0, facts, PROFILES["online"])


@pytest.mark.parametrize("release", STARTS)
def test_a_model_of_eight_parts_does_not_fit_on_one_gpu_because_its_draft_does(release: str) -> None:
    found = data_parallel_would_fit(loaded(started(STARTS[release], 8)))
    assert found is not None
    assert not found.holds
    assert found.value == pytest.approx(8 * 17.7)


@pytest.mark.parametrize(("tp", "pp", "small"), [(1, 1, True), (8, 1, False), (1, 2, False), (4, 2, False)])
def test_a_model_is_small_when_all_its_parts_together_are(tp: int, pp: int, small: bool) -> None:  # noqa: FBT001 - a case
    facts = started(TARGET_WEIGHTS, tp_size=tp, pp_size=pp, speculative_algorithm=None)
    assert (torch_compile_candidate(loaded(facts)) is not None) == small


def test_a_pool_in_two_parts_is_both() -> None:
    # A model with sliding windows has a pool for each kind of attention (SWAKVPool), printed one after the other.
    facts = started(
        "KV Cache is allocated. #tokens: 80000, K size: 1.00 GB, V size: 1.00 GB\n"
        "KV Cache is allocated. #tokens: 100000, K size: 3.00 GB, V size: 3.00 GB\n"
        "Memory pool end. avail mem=24.00 GB\n"
    )
    assert (facts.kv_pool_gb, facts.draft_pool_gb) == (8.0, None)


def test_the_states_of_linear_layers_are_a_part_of_the_pool() -> None:
    facts = started(
        "Mamba Cache is allocated. max_mamba_cache_size: 311, conv_state size: 0.52GB, ssm_state size: 20.77GB \n"
        "KV Cache is allocated. #tokens: 100000, K size: 9.00 GB, V size: 9.00 GB\n"
        "Memory pool end. avail mem=24.00 GB\n"
    )
    assert facts.kv_pool_gb == pytest.approx(39.29)
    assert tokens_gained(facts, 3.929) == "+3.9 GB for the KV cache: +10,000 tokens, +10 %"


def test_the_states_that_verifying_drafts_needs_are_a_part_of_the_pool() -> None:
    facts = started(
        "Mamba Cache is allocated. max_mamba_cache_size: 100, conv_state size: 0.50GB, ssm_state size: 8.00GB"
        " intermediate_ssm_state_cache size: 4.00GB intermediate_conv_window_cache size: 0.50GB \n"
        "Memory pool end. avail mem=24.00 GB\n"
    )
    assert facts.kv_pool_gb == 13.0


def test_a_pool_that_is_sized_after_the_capture_is_in_place_of_the_first() -> None:
    facts = started(
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 400000, K size: 25.00 GB, V size: 25.00 GB\n"
        "Memory pool end. avail mem=24.00 GB\n"
        "Post-capture KV sizing: KV cache allocated. dtype: torch.bfloat16, #tokens: 300000, KV size: 37.50 GB, avail mem=9.00 GB\n"
    )
    assert (facts.kv_pool_gb, facts.draft_pool_gb, facts.kv_pool_tokens) == (37.5, None, {None: 300000})


def test_a_fact_from_the_metrics_stays_when_the_log_has_another_fact() -> None:
    facts = ServerFacts(weights_gb=16.0)
    for event in LogReader().feed(b"[2025-11-20 11:38:33] Memory pool end. avail mem=24.00 GB\n"):
        facts.apply(event)
    assert facts.weights_gb == 16.0


@pytest.mark.parametrize(("usage", "fits"), [(0.4, True), (0.7, False)])
def test_replicas_are_advised_only_where_their_kv_caches_hold_the_tokens_in_use(usage: float, fits: bool) -> None:  # noqa: FBT001 - a case
    # Two GPUs with 16 GB of weights and 37.5 GB of KV cache each: a replica's whole weights leave 21.5 GB, 57 %.
    pool = "KV Cache is allocated. #tokens: 300000, K size: 18.75 GB, V size: 18.75 GB\n"
    past = loaded(started(TARGET_WEIGHTS + pool, tp_size=2, speculative_algorithm=None))
    past.recent.integrals["usage"], past.recent.integrals["usage_seconds"] = usage * 100.0, 100.0
    assert (data_parallel_would_fit(past) is not None) is fits
