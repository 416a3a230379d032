"""Properties of all advice, for any server and load: random facts and loads in, judgement and command line out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.answer import command
from sglang_tuning_exporter.core.diagnoses import BY_ID
from sglang_tuning_exporter.core.diagnoses.steps import setting, typed_settings
from sglang_tuning_exporter.core.facts import Facts
from sglang_tuning_exporter.core.findings import Change, Judgement
from sglang_tuning_exporter.core.judge import judge
from sglang_tuning_exporter.core.view import View
from sglang_tuning_exporter.sglang.flags import flag_of, have_effect, print_factor, releases
from views import Load, late, seen

STEPS = 12  # of advice followed one after the other
CHOICES: dict[str, list[Any]] = {
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
    "disable_overlap_schedule": [False, True],
    "disable_radix_cache": [False, True],
    "disable_cuda_graph": [False, True],
    "enable_priority_scheduling": [False, True],
    "enable_torch_compile": [False],
    "enable_ep_moe": [False],
}
PRINTED = ("schedule_conservativeness", "chunked_prefill_size")  # multiplied or divided under DP attention


def printed(arg: str, flag: Any, arguments: Mapping[str, object], release: str | None) -> Any:
    factor = print_factor(arg, arguments, release)
    if flag is None or flag <= 0 or factor == 1.0:
        return flag
    return round(flag * factor, 6) if arg == "schedule_conservativeness" else int(flag * factor)


@st.composite
def servers(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Draw a release and what a server of it prints of itself."""
    release = draw(st.sampled_from(releases()))
    arguments: dict[str, Any] = {"model_path": "/models/deepseek-v2", "dp_size": 1}
    for arg, choices in CHOICES.items():
        if flag_of(arg, release) is not None:
            arguments[arg] = draw(st.sampled_from(choices))
    if arguments["tp_size"] > 1 and flag_of("enable_dp_attention", release) is not None and draw(st.booleans()):
        newer = flag_of("attn_dp_size", release) is not None
        arguments |= {"enable_dp_attention": True, "attn_dp_size" if newer else "dp_size": arguments["tp_size"]}
    for arg in PRINTED:
        arguments[arg] = printed(arg, arguments[arg], arguments, release)
    running = arguments["max_running_requests"]
    sizes = {
        "POOL": draw(st.sampled_from([64.0, 4096.0, 100_000.0, 1_000_000.0])), "POOL_GB": 20.0, "GRAPHS": 1.5,
        "BEFORE": 80.0,
        "LEFT": draw(st.sampled_from([0.0, 0.5, 4.0, 5.5, 7.0, 13.5, 30.0, 75.0])),
        "WEIGHTS": draw(st.sampled_from([8.0, 60.0])),
    }  # fmt: skip
    return release, {**arguments, **sizes, **({"LIMIT": float(running)} if running else {})}


@st.composite
def loads(draw: st.DrawFn) -> Load:
    """Draw a load of any kind."""
    more: dict[str, float] = {
        "retraction_events": draw(st.sampled_from([0.0, 0.0, 400.0])),
        "cached_tokens": draw(st.sampled_from([0.0, 1e6])),
        "rejected_requests": draw(st.sampled_from([0.0, 0.0, 1e3])),
        "full_lines": draw(st.sampled_from([0.0, 100.0])),
        "too_long": 10.0,
        "too_long_tokens": draw(st.sampled_from([1e4, 1e8])),
        "refused": draw(st.sampled_from([0.0, 500.0])),
        "beyond_context": 10.0,
        "beyond_context_tokens": draw(st.sampled_from([1e4, 1e8])),
        "throughput": draw(st.sampled_from([200.0, 2e5, 2e6])), "throughput:s": 200.0,
        f"cuda_graph/{draw(st.sampled_from(['beyond_captured', 'eager', 'replayed']))}": 300.0,
        **draw(st.sampled_from([{}, {}, {}, *({f"out_of_memory.{phase}": 1.0} for phase in ("prefill", "decode",
            "graph_capture", "startup"))])),
        **draw(st.sampled_from([{}, late("time_to_first_token", 9.0)])),
        **draw(st.sampled_from([{}, late("inter_token", 9.0, share=0.5), late("inter_token", 0.5, share=0.1)])),
    }  # fmt: skip
    why = draw(
        st.sampled_from(["no_queue", "held_back", "pool_full", "running_limit", "prefill_bound", "hybrid_pool_full"])
    )
    return Load(
        draw(st.sampled_from([0.0, 1.0, 6.0, 50.0, 300.0, 700.0, 1000.0])), draw(st.sampled_from([0.0, 30.0, 3000.0])),
        draw(st.sampled_from([0.0, 0.05, 0.4, 0.7, 0.95, 1.0])), why, queue=draw(st.sampled_from(["above_range",
            "in_range", "empty"])),
        prompt=draw(st.sampled_from([0.0, 30.0, 2600.0])), answer=100.0, more=more,
    )  # fmt: skip


@st.composite
def views(draw: st.DrawFn) -> View:
    """Draw a server of any release under a load of any kind."""
    (release, arguments), load = draw(servers()), draw(loads())
    return seen(load, draw(st.sampled_from(sorted(PROFILES))), release, **arguments)


def in_command(judgement: Judgement) -> list[Change]:
    """Return the changes that go into the command line."""
    return [
        change
        for found in judgement.findings
        if found.is_limit
        for change in found.changes
        if change.arg and (change.to is not None or change.removes)
    ]


many = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@many
@given(views())
def test_what_is_raised_rises_and_nothing_is_advised_that_is_set_already(view: View) -> None:
    for found in judge(view).findings:
        for change in found.changes:
            now, to = change.now, change.to
            if change.arg == "chunked_prefill_size" and isinstance(now, (int, float)) and now <= 0:
                now = inf  # without chunks a prompt is computed whole
            assert to is None or to != now or isinstance(to, bool) != isinstance(now, bool)
            if isinstance(now, (int, float)) and isinstance(to, (int, float)) and not isinstance(to, bool):
                assert change.direction == ("raise" if to > now else "lower"), change
                assert change.to is None or float(to) >= 0


@many
@given(views())
def test_no_flag_is_set_two_ways(view: View) -> None:
    ways = {(change.arg, change.to) for change in in_command(judge(view))}
    assert len({arg for arg, _ in ways}) == len(ways)


@many
@given(views())
def test_every_change_is_accepted_by_the_servers_release(view: View) -> None:
    judgement, release = judge(view), view.facts.release
    assert release is not None
    changes: dict[str, object] = {each.arg: setting(each.to) for each in in_command(judgement)}
    assert have_effect(release, changes, typed_settings(view))
    for found in judgement.findings:
        together: dict[str, object] = {
            each.arg: setting(each.to) for each in found.changes if each.arg and each.to is not None
        }
        for change in found.changes:
            assert not change.arg or change.flag == view.facts.flag(change.arg)
        for arg, value in together.items():  # what is no limit is tried by itself, or with what it needs
            assert any(have_effect(release, tried, typed_settings(view)) for tried in (together, {arg: value}))


@many
@given(views())
def test_findings_and_command_line_say_the_same(view: View) -> None:
    judgement = judge(view)
    line, changed, _ = command(judgement, view.facts)
    flags = {flag for flag, _, _ in changed}
    said = {change.flag for change in in_command(judgement)}
    assert flags - said <= {"--cuda-graph-bs", "--cuda-graph-bs-decode"}
    assert said <= flags
    assert bool(line) is bool(said)


@many
@given(views())
def test_no_advice_takes_memory_after_a_failure_or_adds_requests_to_retractions(view: View) -> None:
    judgement = judge(view)
    protected = {BY_ID[each.diagnosis].protects for each in judgement.findings}
    # 0 and -1 compute prompts whole: every chunk takes less memory.
    changes = [change for each in judgement.findings for change in each.changes]
    moves = {
        (each.arg, each.direction)
        for each in changes
        if each.arg != "chunked_prefill_size" or (isinstance(each.now, int | float) and each.now > 0)
    }
    if "memory" in protected:
        assert not moves & {
            ("mem_fraction_static", "raise"),
            ("max_total_tokens", "raise"),
            ("chunked_prefill_size", "raise"),
        }
    if any(each.diagnosis == "retracting_too_often" for each in judgement.findings):
        assert not moves & {("schedule_conservativeness", "lower"), ("max_running_requests", "raise")}


@many
@given(views())
def test_following_all_advice_again_and_again_never_comes_back_to_an_earlier_setting(view: View) -> None:
    before: list[dict[str, object]] = []
    for _ in range(STEPS):
        changes = in_command(judge(view))
        if not changes:
            break
        now = {arg: view.facts.arguments.get(arg) for arg in CHOICES}
        assert now not in before, [changes, before]
        before.append(now)
        view = followed(view, changes)


def followed(view: View, changes: list[Change]) -> View:
    """Return the same load on a server that was started with the changes."""
    arguments, release = dict(view.facts.arguments), view.facts.release
    for change in changes:
        value = None if change.removes and change.to is None else setting(change.to)
        arguments[change.arg] = printed(change.arg, value, arguments, release) if change.arg in PRINTED else value
    limit = arguments.get("max_running_requests")
    facts = Facts(
        arguments,
        version=view.facts.version,
        pools=view.facts.pools,
        available=view.facts.available,
        memory=view.facts.memory,
    )
    if isinstance(limit, int):
        facts.limits[None] = float(limit)
    return replace(view, facts=facts, totals=view.totals)
