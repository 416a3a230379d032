"""Properties of all advice, for any server and load: random facts and loads in, findings and command line out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_tuning_exporter.diagnosis.acceptance import settings as values_in_force
from sglang_tuning_exporter.diagnosis.advice import Advice, as_typed
from sglang_tuning_exporter.diagnosis.command import Command, command_line
from sglang_tuning_exporter.diagnosis.evidence import Past
from sglang_tuning_exporter.diagnosis.findings import Judgement, judge
from sglang_tuning_exporter.sglang.args.flags import flag_of, releases
from sglang_tuning_exporter.sglang.args.refusals import objection
from sglang_tuning_exporter.sglang.args.values import print_factor
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.latency import RecentLatency
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.totals import Totals, batch_size_bucket

SERVED = 300.0
STEPS = 12  # of advice followed one after the other
FIGURES: dict[str, list[Any]] = {
    "enable_mixed_chunk": [False, True],
    "prefill_decode_interval": [0, 5, 100],
    "schedule_conservativeness": [0.0, 0.05, 0.3, 0.7, 1.0, 1.3, 1.43, 1.5, 3.0, 100.0],
    "chunked_prefill_size": [-1, 1, 64, 256, 1024, 2048, 3000, 4096, 8192, 16384, 65536, 10**6],
    "max_prefill_tokens": [1, 256, 16384, 10**6],
    "max_running_requests": [None, 1, 2, 8, 64, 250, 1000, 10**6],
    "max_queued_requests": [None, 0, 1, 100],
    "prefill_max_requests": [None, 1, 64],
    "max_total_tokens": [None, 64, 4096, 100_000],
    "mem_fraction_static": [0.01, 0.15, 0.5, 0.71, 0.8, 0.88, 0.95, 0.99],
    "cuda_graph_max_bs": [None, 1, 8, 160, 512, 768, 4096],
    "cuda_graph_max_bs_decode": [None, 1, 8, 160, 512, 768, 4096],
    "page_size": [1, 16, 64, 128, 1024],
    "tp_size": [1, 2, 8],
    "ep_size": [1],
    "schedule_policy": ["fcfs", "lpm", "random"],
    "kv_cache_dtype": ["auto", "fp8_e5m2"],
    "load_balance_method": ["round_robin"],
    "attention_backend": [None, "flashinfer", "torch_native"],
    "grammar_backend": ["outlines", "xgrammar"],
    "quantization": [None],
    "disaggregation_mode": ["null", "prefill", "decode"],
    "lora_paths": [None, ["/a"]],
    "random_seed": [0, 42],
    "swa_full_tokens_ratio": [0.01, 0.8, 1.0],
    "stream_interval": [1, 50],
    "disable_overlap_schedule": [False, True],
    "num_continuous_decode_steps": [1, 16],
    "disable_radix_cache": [False, True],
    "disable_cuda_graph": [False, True],
    "enable_priority_scheduling": [False, True],
    "enable_torch_compile": [False],
    "enable_ep_moe": [False],
}


@st.composite
def servers(draw: st.DrawFn) -> ServerFacts:
    """Draw a server of any release as it prints itself."""
    release = draw(st.sampled_from(releases()))
    args: dict[str, Any] = {"model_path": "/models/deepseek-v2", "dp_size": 1}
    for arg, choices in FIGURES.items():
        if flag_of(arg, release) is not None:
            args[arg] = draw(st.sampled_from(choices))
    if args["tp_size"] > 1 and flag_of("enable_dp_attention", release) is not None and draw(st.booleans()):
        newer = flag_of("attn_dp_size", release) is not None
        args |= {"enable_dp_attention": True, "attn_dp_size" if newer else "dp_size": args["tp_size"]}
    for arg in ("schedule_conservativeness", "chunked_prefill_size"):
        args[arg] = printed(arg, args[arg], args, release)
    running = args["max_running_requests"]
    facts = ServerFacts(version=release, args=args, running_limits={None: float(running)} if running else {})
    facts.kv_pool_tokens[None] = draw(st.sampled_from([64.0, 4096.0, 100_000.0, 1_000_000.0]))
    facts.available_gb[None] = draw(st.sampled_from([0.0, 0.5, 4.0, 5.5, 7.0, 13.5, 30.0, 75.0]))
    facts.memory_before_weights_gb, facts.weights_gb, facts.graph_gb = 80.0, draw(st.sampled_from([8.0, 60.0])), 1.5
    facts.kv_pool_gb = 20.0
    return facts


def printed(arg: str, flag: Any, args: dict[str, Any], release: str | None) -> Any:
    factor = print_factor(arg, args, release)
    if flag is None or flag <= 0 or factor == 1.0:
        return flag
    return round(flag * factor, 6) if arg == "schedule_conservativeness" else int(flag * factor)


@st.composite
def pasts(draw: st.DrawFn) -> Past:
    """Draw a server under a load of any kind."""
    recent = Totals()
    states = {
        "admission": ["held_back", "pool_full", "running_limit", "prefill_bound", "recovering", "hybrid_pool_full"],
        "queue": ["above_range", "in_range", "empty"],
        "cuda_graph": ["beyond_captured", "eager", "replayed"],
    }
    recent.seconds["activity", "serving"] = SERVED
    for signal, among in states.items():
        recent.seconds[signal, draw(st.sampled_from(among))] = SERVED  # type: ignore[index] # drawn from its own states
    usage, running = (
        draw(st.sampled_from([0.0, 0.05, 0.4, 0.7, 0.95, 1.0])),
        draw(st.sampled_from([0, 1, 6, 50, 300, 700, 1000])),
    )
    queued = draw(st.sampled_from([0, 30, 3000]))
    recent.integrals.update(
        usage=SERVED * usage,
        usage_seconds=SERVED,
        running=SERVED * running,
        running_seconds=SERVED,
        queued=SERVED * queued,
        queued_seconds=SERVED,
    )
    recent.running_seconds[batch_size_bucket(running)] = SERVED
    recent.counts.update(
        observations=300.0,
        retraction_events=draw(st.sampled_from([0.0, 0.0, 400.0])),
        computed_tokens=1e6,
        cached_tokens=draw(st.sampled_from([0.0, 1e6])),
        rejected_requests=draw(st.sampled_from([0.0, 0.0, 1e3])),
        too_long_prompts=10.0,
        too_long_tokens=draw(st.sampled_from([1e3, 1e7])),
        refused_requests=draw(st.sampled_from([0.0, 500.0])),
        refused_for_grammar=draw(st.sampled_from([0.0, 500.0])),
        beyond_context_prompts=10.0,
        beyond_context_tokens=draw(st.sampled_from([1e3, 1e7])),
    )
    marks = draw(st.sampled_from([{}, {}, {}, {"prefill": 1}, {"decode": 1}, {"graph_capture": 1}, {"startup": 1}]))
    slow = RecentLatency(500.0, 250.0, 9.0, 8.0, 10.0, 7.0)
    interrupted = RecentLatency(500.0, 50.0, 0.06, 0.012, 0.8, 0.01)
    kinds: Any = {
        "time_to_first_token": draw(st.sampled_from([slow, None])),
        "inter_token": draw(st.sampled_from([slow, interrupted, None])),
    }
    latency = {name: recent_ for name, recent_ in kinds.items() if recent_ is not None}
    recent.counts["replayed"] = draw(st.sampled_from([0.0, 1e3, 1e5]))
    profile = PROFILES[draw(st.sampled_from(sorted(PROFILES)))]
    return Past(recent, marks, SERVED, draw(servers()), profile, latency=latency, longest_answer=100.0)


def advised(judged: Judgement) -> list[Advice]:
    """Give all advice that goes into the command line."""
    found = [f for f in judged.findings if not f.diagnosis.is_chance]
    return [a for each in found for a in each.advice if a.is_set]


def new_value(advice: Advice) -> str:
    """Give the new value as the command line's list of changes has it."""
    if advice.is_switch:
        return "on" if advice.suggested else "off"
    return "not set" if advice.removes else as_typed(advice.suggested)


def command(judged: Judgement) -> Command:
    found = command_line(judged.past.facts, judged.changes)
    assert found is not None
    return found


many = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])


@many
@given(pasts())
def test_raise_raises_and_lower_lowers_the_flag_of_the_command_line(past: Past) -> None:
    judged = judge(past)
    changes = {change.flag: change for change in command(judged).changes}
    for advice in advised(judged):
        change = changes[advice.flag]
        if change.old == "not set" or not isinstance(advice.suggested, float) or advice.is_switch:
            continue
        moved = float(change.new) - float(change.old)
        assert (moved > 0) is advice.raises
        assert advice.direction == ("raise" if moved > 0 else "lower")


@many
@given(pasts())
def test_every_command_line_is_accepted_by_its_release(past: Past) -> None:
    judged = judge(past)
    release = past.facts.release
    assert release is not None
    assert command(judged).left_out == ()
    assert objection(release, values_in_force(past.facts), judged.changes) is None
    for finding in judged.findings:
        # A chance is tried by itself, together with what it needs.
        together = {a.arg: a.setting for a in finding.advice if a.arg and a.suggested is not None}
        for arg, value in together.items():
            tries = (together, {arg: value})
            assert any(objection(release, values_in_force(past.facts), changes) is None for changes in tries)


@many
@given(pasts())
def test_findings_and_command_line_say_the_same(past: Past) -> None:
    judged = judge(past)
    changed = {(change.flag, change.new) for change in command(judged).changes}
    said = {(a.flag, new_value(a)) for a in advised(judged)}
    assert said <= changed
    assert {flag for flag, _ in changed} - {flag for flag, _ in said} <= {"--cuda-graph-bs", "--cuda-graph-bs-decode"}


@many
@given(pasts())
def test_no_advice_is_given_for_the_value_that_is_set(past: Past) -> None:
    for finding in judge(past).findings:
        for advice in finding.advice:
            assert advice.suggested is None or advice.suggested != advice.current


@many
@given(pasts())
def test_following_all_advice_again_and_again_never_comes_back_to_an_earlier_setting(past: Past) -> None:
    seen: list[dict[str, object]] = []
    for _ in range(STEPS):
        judged = judge(past)
        if not judged.changes:
            break
        now = {arg: past.facts.args.get(arg) for arg in FIGURES}
        assert now not in seen, [judged.changes, seen]
        seen.append(now)
        past = followed(past, judged)


def followed(past: Past, judged: Judgement) -> Past:
    """Give the same load on a server that was started with the advice."""
    args: dict[str, Any] = dict(past.facts.args)
    for arg, value in judged.changes.items():
        args[arg] = (
            printed(arg, value, args, past.facts.release)
            if arg in ("schedule_conservativeness", "chunked_prefill_size")
            else value
        )
    running = args.get("max_running_requests")
    facts = replace(past.facts, args=args, running_limits={None: float(running)} if running else {}, graph_sizes=())
    return replace(past, facts=facts, recent=within(past.recent, running))


def within(load: Totals, limit: float | None) -> Totals:
    """Give the same load with no more requests running than the limit allows."""
    running = load.integrals["running"] / SERVED
    if not limit or running <= limit:
        return load
    limited = load.copy()
    limited.integrals["running"] = SERVED * limit
    limited.running_seconds.clear()
    limited.running_seconds[batch_size_bucket(limit)] = SERVED
    return limited
