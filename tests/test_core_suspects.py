"""Flags away from SGLang's defaults: the first advice where figures show them to be the cause, a chance where nothing else explains, else silence."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_tuning_exporter.core.judge import judge
from sglang_tuning_exporter.core.suspects import SUSPECTS, likely, named
from sglang_tuning_exporter.core.view import View
from sglang_tuning_exporter.sglang.args.flags import flag_of, releases
from views import Load, late, seen

RELEASE = "0.5.23"
NAMED = "flags_away_from_defaults"
POOL = 400_000.0
FULL_OF_MANY = Load(running=100, why="pool_full", usage=0.95, prompt=1200)
HELD = Load(why="held_back", usage=0.5, prompt=300)
SLOW_STARTS = Load(running=4, why="held_back", queued=28, usage=0.02, prompt=300)
PREFILL = Load(why="prefill_bound", queued=200, prompt=300, more={"full_lines": 100.0, "prefilling": 150.0})
LATE_TOKENS = Load(running=6, more={**late("inter_token", 0.3), "throughput": 20 * 200.0, "throughput:s": 200.0})
LATE_FIRST = Load(running=16, prompt=2000, more=late("time_to_first_token", 9.0))


def of(load: Load, profile: str = "online", **arguments: Any) -> View:
    return seen(load, profile, RELEASE, **{"POOL": POOL, **arguments})


def by_row(view: View) -> dict[str, list[tuple[str, object]]]:
    return {found.diagnosis: [(each.flag, each.to) for each in found.changes] for found in judge(view).findings}


def flags(view: View) -> set[str]:
    return {flag for changes in by_row(view).values() for flag, _ in changes}


def suspected(view: View) -> dict[str, object]:
    return {change.arg: change.to for change, _ in named(view)}


# Proven: the first advice of what they cause


def test_a_chunk_is_small_by_what_each_rank_of_dp_attention_computes() -> None:
    args: dict[str, Any] = {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True, "chunked_prefill_size": 128}
    assert suspected(of(LATE_FIRST, **args))["chunked_prefill_size"] == 8192


@pytest.mark.parametrize("profile", ["online", "offline"])
def test_without_radix_cache_a_full_cache_of_whole_prompts_names_it_before_a_larger_one(profile: str) -> None:
    args: dict[str, Any] = {"disable_radix_cache": True, "max_running_requests": 512, "max_total_tokens": 400_000}
    changes = by_row(of(FULL_OF_MANY, profile, **args))["running_far_below_limit"]
    assert changes[0] == ("--disable-radix-cache", False)
    assert "--max-total-tokens" in dict(changes)


@pytest.mark.parametrize(
    ("load", "args"),
    [
        (Load(running=100, why="pool_full", usage=0.95, prompt=20), {}),  # no prefix worth a cache
        (Load(why="pool_full", usage=0.95, prompt=1000), {}),  # of 19,000 tokens that each request holds
        (FULL_OF_MANY, {"disable_radix_cache": False}),
        (FULL_OF_MANY, {"disaggregation_mode": "decode"}),  # SGLang switches it off by itself
        (FULL_OF_MANY, {"is_embedding": True}),
        (Load(), {}),  # a healthy server
    ],
)
def test_the_radix_cache_is_not_named_where_it_cannot_be_the_cause(load: Load, args: dict[str, Any]) -> None:
    assert "--disable-radix-cache" not in flags(
        of(load, **{"disable_radix_cache": True, "max_running_requests": 512, **args})
    )


@pytest.mark.parametrize(
    ("args", "first"),
    [
        ({"disable_radix_cache": True}, ("--disable-radix-cache", False)),
        ({"max_prefill_tokens": 512}, ("--max-prefill-tokens", 16384)),
        # On a real 0.5.23 a chunk twice as large left the median first token at 1.5 s; without the interval it took 0.07 s.
        ({"chunked_prefill_size": 8192, "max_prefill_tokens": 8192}, ("--chunked-prefill-size", 16384)),
    ],
)
def test_full_prefill_batches_have_the_flag_that_fills_them_first(
    args: dict[str, Any], first: tuple[str, object]
) -> None:
    changes = by_row(of(PREFILL, **{"chunked_prefill_size": 8192, "max_prefill_tokens": 16384, **args}))[
        "prefill_bound"
    ]
    assert changes[0] == first


@pytest.mark.parametrize(("chunk", "to"), [(256, 4096), (1024, 4096), (4096, 8192), (8192, 16384)])
def test_a_chunk_that_prefill_fills_is_raised_step_by_step(chunk: int, to: int) -> None:
    changes = by_row(of(PREFILL, chunked_prefill_size=chunk, max_prefill_tokens=16384))["prefill_bound"]
    assert ("--chunked-prefill-size", to) in changes


def test_a_prefill_limit_below_the_prompts_explains_a_wait_with_room() -> None:
    load = Load(why="held_back", usage=0.3, prompt=1100)
    assert "--schedule-conservativeness" not in flags(of(load, max_prefill_tokens=256, chunked_prefill_size=8192))


@pytest.mark.parametrize(
    ("load", "args", "to"),
    [
        (Load(why="pool_full", usage=0.95, prompt=70), {"page_size": 512}, 1),
        (Load(why="held_back", usage=0.8, prompt=70), {"page_size": 512}, 1),
        (Load(why="pool_full", usage=0.95, prompt=6000), {"page_size": 512}, None),  # well filled
        (Load(why="pool_full", usage=0.95, prompt=70), {"page_size": 128, "attention_backend": "flashmla"}, None),  # it needs them
        (Load(why="pool_full", usage=0.95, prompt=70), {"page_size": 128, "attention_backend": "trtllm_mla"}, None),
    ],
)  # fmt: skip
def test_large_pages_of_small_requests_are_mostly_empty(load: Load, args: dict[str, Any], to: object) -> None:
    view = of(load, max_total_tokens=400_000, **args)
    assert suspected(view).get("page_size") == to
    if to:
        assert flags(view) == {"--page-size"}  # neither conservativeness nor a larger pool


@pytest.mark.parametrize(
    ("load", "args", "row", "first"),
    [
        (Load(more={"rejected": 20.0}), {"max_queued_requests": 4}, "requests_rejected", ("--max-queued-requests", 16)),
        (SLOW_STARTS, {"prefill_decode_interval": 16}, "admission_too_conservative", ("--prefill-decode-interval", 0)),
        (LATE_FIRST, {"chunked_prefill_size": 256}, "latency_long_prompts", ("--chunked-prefill-size", 1024)),
        (FULL_OF_MANY, {"max_total_tokens": 400_000, "LIMIT": 4096.0}, "running_far_below_limit", ("--max-total-tokens", 800_000)),
    ],
)  # fmt: skip
def test_a_flag_that_figures_show_to_be_the_cause_is_the_first_advice(
    load: Load, args: dict[str, Any], row: str, first: tuple[str, object]
) -> None:
    assert by_row(of(load, **args))[row][0] == first


def test_where_only_bursts_are_refused_nobody_is_told_to_send_more() -> None:
    found = by_row(of(Load(more={"rejected": 20.0}), "offline", max_queued_requests=4))
    assert [*found] == ["requests_rejected"]
    assert found["requests_rejected"][0] == ("--max-queued-requests", 16)


def test_a_short_queue_limit_is_not_named_while_the_running_limit_holds_requests_back() -> None:
    load = Load(running=64, why="running_limit", usage=0.03, more={"rejected": 20.0})
    assert "max_queued_requests" not in suspected(of(load, max_queued_requests=4, LIMIT=64.0))


@pytest.mark.parametrize(("chunk", "to"), [(64, 1024), (512, None), (2048, None)])
def test_late_tokens_alone_name_a_chunk_only_where_a_larger_one_takes_no_longer(chunk: int, to: object) -> None:
    # As on a real server: chunks of 64 tokens 469 tokens/s, of 1,024 764, decode steps between chunks of 64 only 305.
    load = Load(running=10, prompt=840, more=LATE_TOKENS.more)
    assert suspected(of(load, chunked_prefill_size=chunk)).get("chunked_prefill_size") == to


@pytest.mark.parametrize(
    ("profile", "prompt", "chunk", "why", "to"),
    [
        ("offline", 667, 256, "pool_full", 1024),
        ("offline", 667, 1024, "pool_full", None),  # large enough
        ("offline", 200, 256, "pool_full", None),  # a prompt fits into one
        ("offline", 0, 256, "pool_full", None),  # nothing is known of the prompts
        ("offline", 667, 256, "no_queue", None),  # nobody waits
        ("online", 667, 256, "pool_full", None),  # first tokens are in time, and running requests would pause longer
    ],
)
def test_where_throughput_counts_a_full_cache_names_chunks_smaller_than_the_prompts(
    profile: str, prompt: int, chunk: int, why: str, to: object
) -> None:
    # As on a real server: chunks of 256 tokens for prompts of 667 gave 283 and 313 tokens per CPU second, of 1,024 347 and 348.
    load = Load(running=6, why=why, usage=0.95 if why == "pool_full" else 0.5, prompt=prompt)
    assert suspected(of(load, profile, chunked_prefill_size=chunk)).get("chunked_prefill_size") == to


def test_a_small_chunk_beside_a_full_cache_comes_before_a_larger_cache() -> None:
    load = Load(running=6, why="pool_full", usage=0.95, prompt=667)
    changes = by_row(of(load, "offline", chunked_prefill_size=256, max_total_tokens=400_000, LIMIT=64.0))
    assert changes["running_far_below_limit"] == [("--chunked-prefill-size", 1024), ("--max-total-tokens", 800_000)]


def test_late_tokens_between_small_chunks_ask_for_no_more_decode_steps_between_them() -> None:
    # As on a real server: chunks of 64 and 17 decode steps after each gave a first token after 2.8 s in place of 0.14 s, chunks of 1,024 after 0.06 s.
    gaps = late("inter_token", 0.3, 20_000.0, share=0.08)
    load = Load(running=12, prompt=2000, answer=200, more=gaps)
    changes = by_row(of(load, chunked_prefill_size=64, prefill_decode_interval=0))["latency_prefill_between"]
    assert changes[0] == ("--chunked-prefill-size", 1024)


# Likely: a chance, three at most


def test_where_nothing_explains_late_tokens_the_flags_that_were_set_are_named() -> None:
    found = by_row(of(LATE_TOKENS, disable_overlap_schedule=True, log_level="debug", decode_log_interval=1))
    assert found[NAMED] == [
        ("--disable-overlap-schedule", False),
        ("--log-level", "info"),
        ("--decode-log-interval", 40),
    ]


def test_three_at_most_are_named_and_none_is_in_the_command() -> None:
    switches: dict[str, Any] = {
        each.arg: True
        for each in SUSPECTS
        if each.is_suspicious(value=True) and "tokens" in each.troubles and not each.only_with
    }
    judgement = judge(of(LATE_TOKENS, **switches))
    (found,) = [each for each in judgement.findings if each.diagnosis == NAMED]
    assert len(found.changes) == 3
    assert not found.is_limit


def test_a_flag_is_named_before_its_trouble_is_most_of_the_time() -> None:
    # As on a real server: prompts of 2,000 tokens at --max-prefill-tokens 256, computed one by one for 39 % of the time.
    load = Load(running=16, why="prefill_bound", share=0.39, prompt=2000)
    assert ("--max-prefill-tokens", 16384) in by_row(of(load, max_prefill_tokens=256, chunked_prefill_size=8192))[NAMED]


@pytest.mark.parametrize(
    ("load", "args"),
    [
        (Load(), {"disable_overlap_schedule": True, "log_level": "debug", "cpu_offload_gb": 4}),  # nothing is wrong
        (Load(seconds=15, running=6, why="held_back"), {"disable_overlap_schedule": True}),  # too little load
        (LATE_TOKENS, {"disable_overlap_schedule": True, "speculative_algorithm": "EAGLE"}),  # SGLang sets it by itself
        (LATE_TOKENS, {"disable_custom_all_reduce": True, "tp_size": 8, "device": "npu"}),
        (LATE_TOKENS, {"disable_custom_all_reduce": True, "tp_size": 1}),
        (LATE_TOKENS, {}),
        (HELD, {"disable_overlap_schedule": True}),
    ],
)
def test_without_a_trouble_that_it_can_cause_no_flag_is_named(load: Load, args: dict[str, Any]) -> None:
    assert likely(of(load, **args)) in (None, [])


def test_sglangs_own_all_reduce_is_missed_where_it_exists() -> None:
    assert "disable_custom_all_reduce" in suspected(of(LATE_TOKENS, disable_custom_all_reduce=True, tp_size=8))


# The table


def test_each_suspect_is_a_flag_of_some_release_and_says_why_and_when_it_will_not_help() -> None:
    for suspect in SUSPECTS:
        assert any(flag_of(suspect.arg, release) for release in releases()), suspect.arg
        assert suspect.why.endswith(".")
        assert suspect.not_if
        assert suspect.source.startswith("srt/")
        assert suspect.troubles


def test_no_default_of_any_release_is_a_suspect() -> None:
    for suspect in SUSPECTS:
        for release in releases():
            flag = flag_of(suspect.arg, release)
            assert flag is None or not suspect.is_suspicious(flag.default), (suspect.arg, release)
