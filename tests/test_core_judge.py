"""What is the verdict, what follows from what, and when nothing is said. Figures in, judgement out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_tuning_exporter.core.diagnoses import ALL, causes_of, place
from sglang_tuning_exporter.core.findings import Finding, Judgement
from sglang_tuning_exporter.core.judge import judge
from views import Load, late, seen

AT_LIMIT = Load(running=64, why="running_limit", usage=0.3, prompt=300)
LIMIT: dict[str, Any] = {"LIMIT": 64.0, "max_running_requests": 64, "cuda_graph_max_bs": 512}
HELD = Load(why="held_back", prompt=300)


def of(load: Load, profile: str = "online", **arguments: Any) -> Judgement:
    return judge(seen(load, profile, "0.5.9", **{"schedule_conservativeness": 1.0, **arguments}))


def ids(judgement: Judgement) -> list[str]:
    return [each.diagnosis for each in judgement.findings]


def finding(judgement: Judgement, row: str) -> Finding:
    return next(each for each in judgement.findings if each.diagnosis == row)


def and_also(load: Load, **totals: float) -> Load:
    return replace(load, more={**load.more, **totals})


# Causes


def test_a_consequence_has_the_advice_of_its_cause() -> None:
    load = and_also(AT_LIMIT, rejected_requests=40.0, **{"queue/above_range": 400.0})
    judgement = of(load, **LIMIT)
    assert ids(judgement)[:3] == ["running_at_limit", "requests_rejected", "queue_too_long"]
    for row in ("requests_rejected", "queue_too_long"):
        assert finding(judgement, row).changes == finding(judgement, "running_at_limit").changes
        assert "running_at_limit" in finding(judgement, row).because
    said = " ".join(change.words for each in judgement.findings for change in each.changes)
    assert "replica" not in said


@pytest.mark.parametrize(("share", "flag"), [(0.4, "--max-running-requests"), (0.04, "")])
def test_rejections_have_the_flag_of_waits_too_rare_for_a_finding(share: float, flag: str) -> None:
    # As on a real server: a queue of ten, full for 36 of 78 s because of the limit. Few seconds of waits show no
    # reason.
    judgement = of(and_also(replace(AT_LIMIT, share=share), rejected_requests=400.0), **LIMIT)
    assert (judgement.verdict, "running_at_limit" in ids(judgement)) == ("requests_rejected", False)
    changes = finding(judgement, "requests_rejected").changes
    assert (changes[0].flag if changes else "") == flag


def test_no_more_are_let_in_while_each_step_takes_too_long_because_of_those_that_run() -> None:
    # As on a real server: one command line that both admitted more and lowered --max-running-requests.
    slow = {"throughput": 64 / 0.3 * 200, "throughput:s": 200.0}
    judgement = of(and_also(replace(HELD, running=64), **slow), "online")
    changes = {
        change.arg: change.direction
        for each in judgement.findings
        if each.is_limit
        for change in each.changes
        if change.arg
    }
    assert changes.get("max_running_requests") == "lower"
    assert "schedule_conservativeness" not in changes


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({}, set()),
        ({"admission/running_limit": 80.0, "admission/no_queue": 40.0}, {"grammar_queue", "running_at_limit"}),
    ],
)
def test_two_reasons_that_make_up_most_of_the_time_only_together_are_both_found(
    more: dict[str, float], found: set[str]
) -> None:
    load = Load(running=64, why="grammar_queue", share=0.4, usage=0.3, prompt=300, more=more)
    assert set(ids(of(load, **LIMIT))) & {"grammar_queue", "running_at_limit"} == found


def test_no_diagnosis_is_its_own_cause() -> None:
    assert all(place(cause) < place(row) for row in ALL for cause in causes_of(row))


# Requests that are reserved in full


def test_the_fullest_moment_shows_what_requests_of_one_length_fill() -> None:
    # As on a real server: 36 requests of 6,000 tokens at a time, the second wave half done.
    waits = {"held/36": 200.0, "running@held_back": 7200.0, "usage@held_back": 162.0}
    waits |= {"running@held_back:s": 200.0, "usage@held_back:s": 200.0, "most_running": 36.0, "most_usage": 0.97}
    load = Load(running=36, why="held_back", usage=0.81, prompt=4500, answer=900, started=72.0, more=waits)
    judgement = judge(seen(load, "offline", "0.5.23", POOL=221_513.0, schedule_conservativeness=1.0))
    assert "admission_too_conservative" not in ids(judgement)


@pytest.mark.parametrize(
    ("usage", "now", "is_blamed"),
    [
        (0.8, 1.0, False),  # few more would run, and prompts take most of the time
        (0.3, 1.0, True),
        (0.3, 0.5, True),
        (0.8, 0.3, True),  # how much less a still lower one reserves is not asked: then max_new_tokens are named
    ],
)
def test_conservativeness_is_blamed_only_where_a_lower_one_lets_more_run(
    usage: float, now: float, *, is_blamed: bool
) -> None:
    running = usage * 20_000 / 425
    waits = {"running@held_back": running * 200.0, "usage@held_back": usage * 200.0, "held/40": 200.0, "peak": 9000.0}
    waits |= {"running@held_back:s": 200.0, "usage@held_back:s": 200.0, "most_running": running}
    load = Load(running=running, why="held_back", usage=usage, prompt=400, answer=50, started=2500.0, more=waits)
    judgement = judge(seen(load, "offline", "0.5.9", POOL=20_000.0, schedule_conservativeness=now))
    assert ("admission_too_conservative" in ids(judgement)) is is_blamed


def test_requests_that_ended_have_the_lengths_that_count() -> None:
    ended = {"finished_requests": 300.0, "finished_prompt_tokens": 135_000.0, "finished_answer_tokens": 30_000.0}
    view = seen(Load(prompt=300, answer=60, started=400.0, more=ended))
    assert (view.prompt, view.answer) == (450.0, 100.0)
    few = seen(Load(prompt=300, answer=60, started=400.0, more={**ended, "finished_requests": 3.0}))
    assert (few.prompt, few.answer) == (300.0, 60.0)


# Without the start


@pytest.mark.parametrize(("batch", "is_limit"), [(8, True), (40, False), (100, True)])
def test_that_graphs_are_off_is_no_verdict_where_a_small_gpu_captures_less(batch: int, *, is_limit: bool) -> None:
    load = Load(running=batch, more={"cuda_graph/replayed": 0.0, "cuda_graph/eager": 200.0, "eager_inverse": 1 / batch})
    judgement = judge(seen(load, "online"))
    assert finding(judgement, "cuda_graph_off").is_limit is is_limit
    assert (judgement.verdict == "cuda_graph_off") is is_limit


# Latency


@pytest.mark.parametrize(("late_ones", "is_found"), [(15.0, False), (80.0, True)])
def test_one_late_batch_is_not_put_down_to_long_prompts(late_ones: float, *, is_found: bool) -> None:
    # As on a real server: the first batch after a start waited while kernels were compiled.
    first = late("time_to_first_token", 9.0, 100.0, share=late_ones / 100)
    load = Load(running=20, prompt=2000, more={**first, "most_running": 20.0})
    assert ("latency_long_prompts" in ids(judge(seen(load)))) is is_found


@pytest.mark.parametrize(("full", "is_found"), [(60.0, True), (5.0, False)])
def test_a_tiny_chunk_is_named_under_load_where_prompts_fill_it(full: float, *, is_found: bool) -> None:
    load = Load(prompt=120, more={"full_lines": full})
    judgement = of(load, chunked_prefill_size=64)
    assert ("costly_settings" in ids(judgement)) is is_found


# Shared prefixes


def cached(share: float, load: Load, **more: float) -> Load:
    return and_also(
        load,
        cached_tokens=share * 400_000,
        computed_tokens=(1 - share) * 400_000,
        admitted_requests=800.0,
        sequences=800.0,
        **more,
    )


WAITS = Load(why="pool_full", usage=0.95)


@pytest.mark.parametrize(
    ("load", "args", "is_found"),
    [
        (cached(0.3, WAITS), {}, True),
        (cached(0.3, Load()), {}, False),  # nothing waits: there is no order
        (cached(0.05, WAITS), {}, False),
        (cached(0.3, WAITS, retracted_requests=400.0), {}, False),  # retracted requests find their own tokens
        (cached(0.6, WAITS, retracted_requests=20.0), {}, True),
        (
            cached(0.3, WAITS),
            {"enable_priority_scheduling": True},
            False,
        ),  # preempted ones find theirs, and SGLang refuses lpm
        (cached(0.3, WAITS, repeated=120_000.0), {}, False),  # several answers to one prompt
        (cached(0.3, WAITS, generation_posts=100.0), {}, False),
        (cached(0.3, WAITS), {"disable_radix_cache": True}, False),
    ],
)
def test_shared_prefixes_are_told_from_requests_that_find_their_own_tokens(
    load: Load,
    args: dict[str, Any],
    is_found: bool,  # noqa: FBT001 - a case
) -> None:
    assert ("shared_prefixes_unused" in ids(of(load, schedule_policy="fcfs", **args))) is is_found


# Chances


@pytest.mark.parametrize(
    ("weights", "tp", "usage", "more", "is_found"),
    [
        (10.0, 2, 0.5, {}, True),
        (10.0, 2, 0.8, {}, False),  # a KV cache beside all weights would not hold the tokens in use
        (40.0, 2, 0.5, {}, False),
        (17.7, 8, 0.5, {}, False),  # one part and a draft model would fit, eight parts do not
        (2.2, 8, 0.5, {"dp_size": 8, "enable_dp_attention": True}, False),
        (2.2, 8, 0.5, {"ep_size": 2}, False),
        (2.2, 2, 0.5, {"pp_size": 2}, False),
    ],
)
def test_weights_that_fit_one_gpu_need_no_tensor_parallelism(
    weights: float,
    tp: int,
    usage: float,
    more: dict[str, Any],
    is_found: bool,  # noqa: FBT001 - a case
) -> None:
    judgement = of(Load(usage=usage), WEIGHTS=weights, BEFORE=78.0, POOL_GB=50.0, tp_size=tp, **more)
    assert ("data_parallel_would_fit" in ids(judgement)) is is_found
