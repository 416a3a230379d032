"""After a start with other arguments a server is judged by what it does then, not by what it did with the arguments before."""

from __future__ import annotations

import pytest

from sglang_tuning_exporter.diagnosis.advice import SizingInput, advise
from sglang_tuning_exporter.diagnosis.evidence import Past, past_of
from sglang_tuning_exporter.diagnosis.findings import judge
from sglang_tuning_exporter.sglang.args.printed import are_same_settings
from sglang_tuning_exporter.sglang.events import NO_RANK, DecodeBatch, OutOfMemory, RankFigures, Scrape, ServerArgs
from sglang_tuning_exporter.sglang.metrics.histograms import Histogram
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

ARGS: dict[str, object] = {
    "max_running_requests": 32,
    "chunked_prefill_size": 8192,
    "schedule_conservativeness": 1.0,
    "dp_size": 1,
    "tp_size": 1,
    "random_seed": 1,
    "kv_cache_dtype": "auto",
}


def new_state() -> ServerState:
    return ServerState(PROFILES["online"], 0.0)


def start(state: ServerState, now: float, **args: object) -> None:
    state.observe(ServerArgs(None, NO_RANK, {**ARGS, **args}), now)


def serve(state: ServerState, begin: float, seconds: float, running: int = 32, queued: int = 40) -> float:
    """Decode for so long, in the log; gives when it ends."""
    for step in range(int(seconds / 5)):
        line = DecodeBatch(None, NO_RANK, running, queued, 4000, 0.23, graph=True)
        state.observe(line, begin + 5.0 * step)
    state.advance(begin + seconds)
    return begin + seconds


def found(past: Past) -> set[str]:
    return {finding.diagnosis.id for finding in judge(past).findings}


def test_a_raised_limit_is_not_raised_again_because_of_figures_under_the_lower_one() -> None:
    state = new_state()
    start(state, 0.0)
    now = serve(state, 1.0, 540.0)
    assert "running_at_limit" in found(past_of(state, now))
    start(state, now + 5.0, max_running_requests=256)
    now = serve(state, now + 65.0, 60.0, running=40, queued=0)
    past = past_of(state, now)
    assert past.has_enough_load
    assert "running_at_limit" not in found(past)
    assert past.recent.mean("running") == 40


def test_a_start_with_the_same_arguments_goes_on_where_the_last_one_was() -> None:
    state = new_state()
    start(state, 0.0)
    now = serve(state, 1.0, 540.0)
    start(state, now + 5.0, random_seed=2)
    assert "running_at_limit" in found(past_of(state, now + 10.0))


def test_right_after_a_change_the_effect_is_unknown() -> None:
    state = new_state()
    start(state, 0.0)
    now = serve(state, 1.0, 540.0)
    start(state, now + 5.0, max_running_requests=256)
    assert not past_of(state, now + 10.0).has_enough_load


def test_a_failure_is_not_evidence_about_arguments_that_were_set_after_it() -> None:
    state = new_state()
    start(state, 0.0)
    state.observe(OutOfMemory(None, NO_RANK, "prefill"), 100.0)
    assert advise("out_of_memory_prefill", SizingInput(past_of(state, 101.0)))[0].suggested == 4096
    start(state, 120.0, chunked_prefill_size=4096)
    past = past_of(state, 130.0)
    assert "out_of_memory_prefill" not in found(past)
    assert state.out_of_memory["prefill"] == 1  # the counter goes on


def test_a_failure_stays_where_the_server_is_started_as_it_was() -> None:
    state = new_state()
    start(state, 0.0)
    state.observe(OutOfMemory(None, NO_RANK, "prefill"), 100.0)
    start(state, 120.0)
    assert "out_of_memory_prefill" in found(past_of(state, 130.0))


def test_starts_are_counted_whatever_they_change() -> None:
    state = new_state()
    for number in range(4):
        start(state, 60.0 * number, max_running_requests=32 + number)
    assert "restart_loop" in found(past_of(state, 200.0))


def scrape(step: int, running: int, progress: float) -> Scrape:
    seen = Histogram((0.5, 4.0, float("inf")), (0.0, progress / 100, progress / 100), progress / 50)
    figures = RankFigures(running=running, queued=40, grammar_queued=0, full_usage=0.23, used_tokens=step)
    return Scrape([figures], progress=progress, started_requests=progress / 100, time_to_first_token=seen)


def test_beside_metrics_alone_server_info_shows_that_arguments_changed() -> None:
    state = new_state()
    state.facts.apply_info("0.5.23", ARGS, 32)
    for step in range(40):
        state.observe_scrape(scrape(step, 32, 1000.0 * (step + 1)), 15.0 * step)
    assert "running_at_limit" in found(past_of(state, 600.0))
    state.observe_scrape(scrape(0, 0, 1.0), 700.0)  # its counters began again
    state.facts.apply_info("0.5.23", {**ARGS, "max_running_requests": 256}, 256)
    state.advance(701.0)
    past = past_of(state, 702.0)
    assert not past.has_enough_load
    assert past.latency == {}
    assert not past.started_requests


def test_asking_the_same_server_again_changes_nothing() -> None:
    state = new_state()
    state.facts.apply_info("0.5.23", ARGS, 32)
    for step in range(40):
        if step % 4 == 0:
            state.facts.apply_info("0.5.23", dict(ARGS), 32)
        state.observe_scrape(scrape(step, 32, 1000.0 * (step + 1)), 15.0 * step)
    assert "running_at_limit" in found(past_of(state, 600.0))


def test_a_value_that_the_scheduler_computes_is_no_change_of_the_argument() -> None:
    state = new_state()
    start(state, 0.0, chunked_prefill_size=None)
    now = serve(state, 1.0, 540.0)
    state.facts.args["chunked_prefill_size"] = 8192
    start(state, now + 5.0, chunked_prefill_size=None)
    assert past_of(state, now + 6.0).has_enough_load


@pytest.mark.parametrize(
    ("after", "same"),
    [
        ({}, True),
        ({"random_seed": 7}, True),
        ({"bucket_time_to_first_token": [1, 2]}, True),
        ({"max_running_requests": None}, False),
        ({"kv_cache_dtype": "fp8_e4m3"}, False),
        ({"new_flag_of_a_later_release": 3}, True),
    ],
)
def test_arguments_are_the_same_where_none_was_changed(after: dict[str, object], same: bool) -> None:  # noqa: FBT001 - a case
    assert are_same_settings(ARGS, {**ARGS, **after}) == same
