"""One server's state over time: log lines and scrapes in, gauges, counters and seconds out.

Figures are invented; which release exposes what is as in the data directory.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tuning_exporter.diagnosis.evidence import past_of
from sglang_tuning_exporter.sglang.events import (
    DecodeBatch,
    Event,
    Limits,
    Liveness,
    OutOfMemory,
    PrefillBatch,
    Rank,
    RankFigures,
    Retraction,
    Scrape,
    ServerArgs,
)
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState
from sglang_tuning_exporter.state.signals import SIGNALS

NO_RANK = Rank()
STEADY_COUNTERS = ("retraction_events", "log_retracted_requests", "native_retracted_requests", "replayed", "eager")


def decode(
    running: int = 8, queued: int = 0, usage: float = 0.5, *, rank: Rank = NO_RANK, graph: bool | None = True
) -> DecodeBatch:
    return DecodeBatch(
        None, rank, running, queued, 1000, usage, graph=graph, graph_device="cuda", generation_throughput=100.0
    )


def prefill(
    running: int = 8,
    queued: int = 0,
    *,
    new_tokens: int = 100,
    sequences: int = 1,
    cached: int = 0,
    rank: Rank = NO_RANK,
) -> PrefillBatch:
    return PrefillBatch(None, rank, sequences, new_tokens, cached, running, queued, full_usage=0.5)


def retraction(rank: Rank = NO_RANK, *, testing: bool = False) -> Retraction:
    return Retraction(None, rank, 3, ratio_before=0.3, ratio_after=0.8, testing=testing)


def args(**values: object) -> ServerArgs:
    return ServerArgs(None, NO_RANK, dict(values))


def scrape(*ranks: RankFigures, progress: float | None = None) -> Scrape:
    return Scrape(list(ranks), progress=progress)


def figures(running: float | None = 8, queued: float | None = 0, dp: int | None = None, **more: float) -> RankFigures:
    made = RankFigures(dp, running, queued)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def new_state(profile: str = "online") -> ServerState:
    return ServerState(PROFILES[profile], 0.0)


def seconds(state: ServerState, signal: str = "activity") -> dict[str, float]:
    return {name: value for (of, name), value in state.totals().seconds.items() if of == signal and value}


def counts(state: ServerState) -> dict[str, float]:
    return {name: state.totals().counts[name] for name in STEADY_COUNTERS if state.totals().counts[name]}


_events = st.one_of(
    st.builds(decode, st.integers(0, 300), st.integers(0, 3000), st.floats(0, 1), graph=st.none() | st.booleans()),
    st.builds(prefill, st.integers(0, 300), st.integers(0, 3000), new_tokens=st.sampled_from([1, 100, 8192])),
    st.just(retraction()),
    st.just(OutOfMemory(None, NO_RANK, "decode")),
    st.just(args(max_running_requests=64, chunked_prefill_size=8192)),
    st.just(Limits(None, NO_RANK, 1000, 64)),
    st.builds(scrape, st.builds(figures, st.integers(0, 3), st.integers(0, 3)), progress=st.integers(0, 9) | st.none()),
    st.just(scrape()),
)
_steps = st.sampled_from([0.0, 0.0, 0.1, 5.0, 59.9, 60.0, 60.1, 3600.0, -0.5, -30.0, -100.0])


@settings(max_examples=150)
@given(st.lists(st.tuples(_steps, _events), min_size=1, max_size=30))
def test_the_seconds_of_every_signal_add_up_to_wall_time_whatever_happens(
    steps: list[tuple[float, Event | Scrape]],
) -> None:
    state, now, latest, begun = new_state(), 1000.0, 1000.0, None
    for step, event in steps:
        now += step
        latest = max(now, latest)
        if isinstance(event, Scrape):
            state.observe_scrape(event, now)
        else:
            state.observe(event, now)
        if begun is None and state.ranks:
            begun = now
            latest = now
    state.advance(latest + 1.0)
    for signal in SIGNALS:
        spent = seconds(state, signal)
        assert all(value >= 0 for value in spent.values())
        assert sum(spent.values()) == pytest.approx(0.0 if begun is None else latest + 1.0 - begun)


def test_a_scrape_is_valid_for_a_minute_and_then_the_state_is_unknown() -> None:
    state = new_state()
    state.observe_scrape(scrape(figures(running=8)), 0.0)
    state.advance(100.0)
    assert seconds(state) == {"serving": 60.0, "unknown": 40.0}
    assert state.ranks[None].states["activity"] == "unknown"


def test_from_the_log_alone_a_server_whose_next_line_is_overdue_is_idle() -> None:
    state = new_state()
    for now in (0.0, 4.0):  # forty steps in four seconds
        state.observe(decode(), now)
    state.advance(100.0)
    assert seconds(state) == {"serving": 4.0 + 2.5 * 4.0, "idle": 50.0, "unknown": 36.0}
    assert (state.ranks[None].running, state.ranks[None].queued) == (None, None)


def test_a_server_that_falls_silent_while_requests_wait_is_not_called_idle() -> None:
    state = new_state()
    for now in (0.0, 4.0):
        state.observe(decode(queued=3), now)
    state.advance(100.0)
    assert seconds(state) == {"serving": 14.0, "unknown": 86.0}


def test_a_slow_server_is_not_idle_between_two_of_its_lines() -> None:
    state = new_state()
    for step in range(10):
        state.observe(decode(), 24.0 * step)
    state.advance(9 * 24.0)
    assert seconds(state)["serving"] >= 8 * 24.0  # before the second line the pause between lines is unknown


def test_while_scrapes_come_they_say_when_the_server_is_idle() -> None:
    state = new_state()
    state.observe_scrape(scrape(figures(running=8), progress=1.0), 0.0)
    for now in (1.0, 5.0):
        state.observe(decode(), now)
    state.advance(40.0)
    assert seconds(state) == {"serving": 40.0}


def test_after_a_pause_the_throughput_counts_the_pause_and_the_hold_does_not() -> None:
    state = new_state()
    for now in (0.0, 1.0):
        state.observe(decode(running=8), now)
    state.observe(prefill(running=0), 50.0)
    slow = replace(decode(running=8), generation_throughput=8 * 40 / 50.0)  # forty steps since the line of 50 s ago
    state.observe(slow, 51.0)
    state.advance(80.0)
    assert seconds(state)["serving"] <= 10.0


def test_a_log_that_arrives_in_blocks_is_not_idle_between_them() -> None:
    state = new_state()
    for block in range(10):
        for second in range(20):
            at = 20.0 * block + second
            state.observe(replace(decode(), time=1e9 + at), 20.0 * (block + 1))
    state.advance(200.0)
    assert seconds(state)["serving"] >= 160.0


def test_the_hold_is_the_same_however_often_somebody_looks() -> None:
    state = new_state()
    state.observe(decode(), 0.0)
    for now in range(1, 101):
        state.advance(float(now))
    assert seconds(state) == {"serving": 5.0, "idle": 55.0, "unknown": 40.0}


def test_idle_time_is_no_serving_time() -> None:
    state = new_state()
    state.observe_scrape(scrape(figures(8)), 0.0)
    state.observe_scrape(scrape(figures(0)), 10.0)
    state.advance(40.0)
    assert seconds(state) == {"serving": 10.0, "idle": 30.0}
    assert state.totals().serving_seconds() == 10.0


def test_a_health_probes_prefill_is_idle() -> None:
    state = new_state()
    state.observe(prefill(running=0, new_tokens=1), 0.0)
    state.advance(30.0)
    assert seconds(state) == {"idle": 30.0}


def test_a_prefill_of_one_token_behind_running_requests_is_load() -> None:
    state = new_state()
    state.observe(prefill(running=3, new_tokens=1), 0.0)
    state.advance(5.0)
    assert seconds(state) == {"serving": 5.0}


def test_zeros_in_a_scrape_count_again_and_again() -> None:
    state = new_state()
    for now in range(0, 300, 15):
        state.observe_scrape(scrape(figures(0), progress=5), float(now))
    state.advance(300.0)
    assert seconds(state) == {"idle": 300.0}


def test_gauges_that_stand_still_are_the_old_observation() -> None:
    state = new_state()
    for now in range(0, 300, 15):
        state.observe_scrape(scrape(figures(8, full_usage=0.5), progress=5), float(now))
    state.advance(300.0)
    assert seconds(state) == {"serving": 60.0, "unknown": 240.0}


def test_equal_gauges_with_progress_beneath_them_are_a_new_observation() -> None:
    state = new_state()
    for now in range(0, 300, 15):
        state.observe_scrape(scrape(figures(8, full_usage=0.5), progress=float(now)), float(now))
    state.advance(300.0)
    assert seconds(state) == {"serving": 300.0}


def test_a_long_prompt_that_the_gauges_do_not_show_is_load() -> None:
    state = new_state()
    state.observe_scrape(scrape(figures(0), progress=0), 0.0)
    state.observe_scrape(scrape(figures(0), progress=8192), 15.0)
    assert seconds(state) == {"serving": 15.0}


def test_a_probes_few_tokens_are_no_load() -> None:
    state = new_state()
    state.observe_scrape(scrape(figures(0), progress=0), 0.0)
    state.observe_scrape(scrape(figures(0), progress=4), 15.0)
    assert state.ranks[None].states["activity"] == "idle"


def test_progress_of_one_rank_does_not_count_for_another() -> None:
    state = new_state()
    for now, progress in ((0.0, 0.0), (15.0, 9000.0), (30.0, 18_000.0)):
        state.observe_scrape(scrape(figures(8, dp=0, used_tokens=now), figures(0, dp=1), progress=progress), now)
    assert [state.ranks[dp].states["activity"] for dp in (0, 1)] == ["serving", "idle"]


def test_a_rank_that_decoded_between_two_scrapes_was_serving() -> None:
    state = new_state()
    for now in (0.0, 15.0):
        state.observe_scrape(scrape(figures(0, dp=0, graph_passes=40 * now), figures(0, dp=1, graph_passes=1)), now)
    served = [state.ranks[dp].totals.seconds["activity", "serving"] for dp in (0, 1)]
    assert served == [15.0, 0.0]


def test_requests_in_another_queue_are_load() -> None:
    state = new_state()
    waiting = figures(0)
    waiting.queues["transfer"] = 3
    state.observe_scrape(scrape(waiting), 0.0)
    assert state.ranks[None].states["activity"] == "serving"


def test_the_log_and_the_scrapes_of_one_server_are_one_scheduler() -> None:
    state = new_state()
    state.observe(decode(running=8, queued=3), 0.0)
    state.observe_scrape(scrape(figures(9, 4, new_token_ratio=0.4)), 1.0)
    rank = state.ranks[None]
    assert list(state.ranks) == [None]
    assert (rank.running, rank.queued, rank.new_token_ratio, rank.usage) == (9, 4, 0.4, 0.5)


def test_the_ratio_of_the_last_minutes_is_the_mean_of_the_scrapes_under_load() -> None:
    state = new_state()
    for at, (running, ratio) in enumerate([(9, 0.7), (0, 0.7), (9, 0.3), (8, 0.2)]):
        state.observe_scrape(scrape(figures(running, generation_throughput=at, new_token_ratio=ratio)), float(at))
    assert past_of(state, 4.0).new_token_ratio == pytest.approx(0.4)
    assert past_of(new_state(), 4.0).new_token_ratio is None


def test_the_latest_observation_is_the_state() -> None:
    state = new_state()
    state.observe_scrape(scrape(figures(0)), 0.0)
    state.observe(decode(running=8), 1.0)
    assert state.ranks[None].states["activity"] == "serving"
    state.observe_scrape(scrape(figures(0)), 2.0)
    assert state.ranks[None].states["activity"] == "idle"


def test_gauges_disappear_when_they_are_exposed_no_more() -> None:
    state = new_state()
    state.observe(decode(), 0.0)
    state.advance(61.0)
    rank = state.ranks[None]
    assert (rank.running, rank.queued, rank.usages, rank.generation_throughput) == (None, None, {}, None)


def test_gauges_stay_while_the_server_exposes_them_and_disappear_after_the_last_scrape() -> None:
    state = new_state()
    for now in range(0, 100, 10):
        state.observe_scrape(scrape(figures(8)), float(now))
    assert state.ranks[None].running == 8
    state.advance(151.0)
    assert state.ranks[None].running is None


def test_scrapes_without_gauges_keep_none_alive() -> None:
    state = new_state()
    state.observe(decode(), 0.0)
    for now in range(0, 100, 10):
        state.observe_scrape(scrape(figures(None, None, kv_pool_tokens=1000)), float(now))
    assert state.ranks[None].running is None


def test_the_first_scrape_of_a_running_server_only_gives_the_base() -> None:
    state = new_state()
    state.observe_scrape(scrape(figures(graph_passes=5000, eager_passes=10, retracted_requests=7)), 0.0)
    assert counts(state) == {}
    state.observe_scrape(scrape(figures(graph_passes=5040, eager_passes=11, retracted_requests=9)), 15.0)
    assert counts(state) == {"replayed": 40, "eager": 1, "native_retracted_requests": 2}


def test_a_counter_that_was_absent_counts_from_zero() -> None:
    state = new_state()
    state.observe_scrape(scrape(figures(graph_passes=5000)), 0.0)
    state.observe_scrape(scrape(figures(graph_passes=5000, retracted_requests=2)), 15.0)
    assert counts(state) == {"native_retracted_requests": 2}


def test_a_scheduler_that_an_earlier_scrape_did_not_show_counts_from_zero() -> None:
    state = new_state()
    state.observe_scrape(scrape(), 0.0)
    state.observe_scrape(scrape(figures(graph_passes=30)), 15.0)
    assert counts(state) == {"replayed": 30}


def test_a_counter_that_fell_counts_anew() -> None:
    state = new_state()
    state.observe_scrape(scrape(figures(graph_passes=5000)), 0.0)
    state.observe_scrape(scrape(figures(graph_passes=30)), 15.0)
    assert counts(state) == {"replayed": 30}


def test_decode_batches_are_those_of_the_log_until_the_server_counts_them() -> None:
    state = new_state()
    state.observe(decode(graph=True), 0.0)
    state.observe(decode(graph=False), 1.0)
    assert counts(state) == {"replayed": 40, "eager": 40}  # a line for forty steps
    state.observe_scrape(scrape(figures(graph_passes=100)), 2.0)
    state.observe(decode(graph=True), 3.0)
    state.observe_scrape(scrape(figures(graph_passes=180)), 4.0)
    assert counts(state) == {"replayed": 120, "eager": 40}


def test_a_decode_line_stands_for_as_many_batches_as_the_log_interval_says() -> None:
    state = new_state()
    state.observe(args(decode_log_interval=10), 0.0)
    state.observe(decode(graph=True), 1.0)
    assert counts(state) == {"replayed": 10}


def test_a_batch_from_the_log_is_not_counted_again_when_the_server_begins_to_count() -> None:
    state = new_state()
    state.observe_scrape(scrape(), 0.0)
    state.observe(decode(graph=True), 1.0)
    state.observe_scrape(scrape(figures(graph_passes=40)), 2.0)
    assert counts(state) == {"replayed": 40}


def test_after_a_restart_the_log_counts_decode_batches_until_the_server_does() -> None:
    state = new_state()
    state.observe_scrape(scrape(figures(graph_passes=5000)), 0.0)
    state.observe(args(), 1.0)
    state.observe(decode(graph=True), 2.0)
    assert counts(state) == {"replayed": 40}
    state.observe_scrape(scrape(figures(graph_passes=60)), 3.0)
    assert counts(state) == {"replayed": 60}


def test_data_parallel_ranks_are_kept_apart() -> None:
    state = new_state()
    state.observe(decode(running=1, rank=Rank(dp=0)), 0.0)
    state.observe(decode(running=2, rank=Rank(dp=1)), 0.0)
    state.observe_scrape(scrape(figures(3, dp=0), figures(4, dp=1)), 5.0)
    assert {dp: rank.running for dp, rank in state.ranks.items()} == {0: 3, 1: 4}
    state.advance(10.0)
    assert seconds(state) == {"serving": 20.0}


def test_a_metric_without_ranks_does_not_blur_the_ranks_of_the_log() -> None:
    state = new_state()
    state.observe(decode(running=1, rank=Rank(dp=0)), 0.0)
    state.observe_scrape(scrape(figures(9, kv_pool_tokens=5.0)), 5.0)
    assert list(state.ranks) == [0]
    assert state.ranks[0].running == 1


def test_series_without_a_rank_are_left_out_once_there_are_ranks() -> None:
    state = new_state()
    state.observe_scrape(scrape(figures(9)), 0.0)
    state.observe(decode(running=1, rank=Rank(dp=0)), 10.0)
    state.advance(15.0)
    assert seconds(state) == {"serving": 5.0}
    assert state.recent(15.0).serving_seconds() == 5.0


def test_a_retraction_of_eight_tensor_parallel_ranks_is_one_event() -> None:
    state = new_state()
    for tp in range(8):
        state.observe(retraction(Rank(tp=tp)), 0.001 * tp)
    assert counts(state) == {"retraction_events": 1, "log_retracted_requests": 3}
    assert state.ranks[None].new_token_ratio == 0.8


def test_a_retraction_for_testing_is_no_full_pool() -> None:
    state = new_state()
    state.observe(retraction(testing=True), 0.0)
    assert counts(state) == {}


def test_only_the_stats_ranks_batch_lines_count() -> None:
    state = new_state()
    for tp in (0, 1, 2, 3):
        state.observe(decode(rank=Rank(tp=tp)), 0.0)
        state.observe(prefill(rank=Rank(tp=tp)), 0.0)
    assert counts(state) == {"replayed": 40}
    assert state.totals().counts["observations"] == 2


def test_a_restart_in_the_log_resets_gauges_and_no_counters() -> None:
    state = new_state()
    state.observe(args(max_running_requests=2), 0.0)
    state.observe(decode(running=8), 10.0)
    state.observe(retraction(), 11.0)
    before = counts(state)
    state.observe(args(max_running_requests=4), 20.0)
    rank = state.ranks[None]
    assert (rank.running, rank.states["activity"], rank.queue_wait_seconds(20.0)) == (None, "unknown", None)
    assert (state.starts, state.facts.arg("max_running_requests"), counts(state)) == (2, 4, before)
    assert seconds(state)["serving"] == 5.0


def test_facts_of_one_start_are_gone_after_the_next_start() -> None:
    state = new_state()
    state.observe(Limits(None, NO_RANK, 1000, 64, available_gb=12.0, memory_device="gpu"), 0.0)
    state.observe(decode(), 1.0)
    state.observe(args(max_running_requests=128), 2.0)
    assert (state.facts.running_limit(None), state.facts.reserve_gb) == (128, None)


def test_a_restart_seen_only_in_the_metrics_is_a_start() -> None:
    state = new_state()
    state.observe_scrape(scrape(figures(graph_passes=100), progress=5000), 0.0)
    state.observe_scrape(scrape(figures(graph_passes=3), progress=30), 15.0)
    assert (state.starts, counts(state)) == (1, {"replayed": 3})


def test_a_restart_in_the_log_is_not_counted_again_by_the_metrics() -> None:
    state = new_state()
    state.observe_scrape(scrape(figures(), progress=5000), 0.0)
    state.observe(args(), 10.0)
    state.observe_scrape(scrape(figures(), progress=30), 15.0)
    assert state.starts == 1


def test_a_log_whose_history_has_a_start_is_waited_for() -> None:
    state = new_state()
    state.recall(args(), 100.0)
    state.observe_scrape(scrape(figures(), progress=5000), 0.0)
    state.observe_scrape(scrape(figures(), progress=30), 15.0)
    assert state.starts == 0
    state.observe(args(), 16.0)
    assert state.starts == 1


def test_a_restarted_server_is_not_judged_by_the_admissions_of_the_last() -> None:
    state = new_state()
    for now in range(0, 61, 10):
        state.observe(prefill(queued=100, sequences=20), float(now))
    state.observe(args(), 61.0)
    state.observe(decode(queued=5), 62.0)
    assert state.ranks[None].queue_wait_seconds(62.0) is None


def test_after_a_restart_another_rank_may_print_the_batches() -> None:
    state = new_state()
    state.observe(decode(rank=Rank(tp=0)), 0.0)
    state.observe(args(), 1.0)
    state.observe(decode(rank=Rank(tp=4)), 2.0)
    assert counts(state) == {"replayed": 80}


def test_a_server_that_fails_again_right_after_its_restart_failed_twice() -> None:
    state = new_state()
    for now in (0.0, 5.0):
        state.observe(args(), now)
        state.observe(OutOfMemory(None, NO_RANK, "startup"), now + 1.0)
    assert dict(state.out_of_memory) == {"startup": 2}


def test_a_failure_of_eight_ranks_raised_again_is_counted_once() -> None:
    state = new_state()
    for repeat in range(2):
        for tp in range(8):
            state.observe(OutOfMemory(None, Rank(tp=tp), "decode"), repeat + 0.01 * tp)
    assert dict(state.out_of_memory) == {"decode": 1}
    assert state.recent_marks(5.0, 600.0) == {"decode": 1}


@pytest.mark.parametrize("phases", [("unknown", "decode"), ("decode", "unknown")])
def test_a_failure_of_unknown_phase_merges_into_the_known_one(phases: tuple[str, str]) -> None:
    state = new_state()
    for phase in phases:
        state.observe(OutOfMemory(None, NO_RANK, phase), 0.0)  # type: ignore[arg-type]  # both are phases
    assert +state.out_of_memory == {"decode": 1}
    assert state.recent_marks(5.0, 600.0) == {"decode": 1}


def test_a_failure_is_recent_for_as_long_as_asked_even_over_a_restart() -> None:
    state = new_state()
    state.observe(OutOfMemory(None, NO_RANK, "prefill"), 0.0)
    state.observe(args(), 60.0)
    assert state.recent_marks(600.0, 600.0) == {"prefill": 1, "start": 1}
    assert state.recent_marks(601.0, 600.0) == {"start": 1}


def test_history_sets_facts_and_counts_nothing() -> None:
    state = new_state()
    history: list[Event] = [
        args(schedule_conservativeness=0.1),
        Limits(None, NO_RANK, 2048, 32),
        Liveness(None, NO_RANK, "ready"),
        decode(),
        prefill(),
        retraction(),
        OutOfMemory(None, NO_RANK, "decode"),
    ]
    for event in history:
        state.recall(event, 100.0)
    assert (state.facts.arg("schedule_conservativeness"), state.facts.running_limit(None), state.facts.ready) == (
        0.1,
        32,
        True,
    )
    assert (state.starts, dict(state.out_of_memory), dict(state.liveness), state.ranks) == (0, {}, {}, {})


def test_the_wait_is_the_queue_over_the_rate_of_admission() -> None:
    state = new_state()
    for now in range(0, 61, 10):
        state.observe(prefill(queued=100, sequences=20), float(now))
    assert state.ranks[None].queue_wait_seconds(60.0) == pytest.approx(100 / (140 / 60))


def test_the_wait_in_an_empty_queue_is_zero() -> None:
    state = new_state()
    state.observe(decode(queued=0), 0.0)
    assert state.ranks[None].queue_wait_seconds(0.0) == 0.0


def test_the_servers_own_count_of_admissions_wins_over_prefill_lines() -> None:
    state = new_state()
    for now in range(0, 61, 10):
        state.observe_scrape(scrape(figures(8, 60, admitted_requests=10.0 * now)), float(now))
        state.observe(prefill(queued=60, sequences=500), now + 0.5)
    assert state.ranks[None].queue_wait_seconds(60.0) == pytest.approx(6.0)


def test_a_full_prefill_batch_is_the_limit_for_as_long_as_it_is_computed_and_not_until_the_next_line() -> None:
    state = new_state()
    state.observe(args(chunked_prefill_size=8192, decode_log_interval=400), 0.0)
    state.observe(decode(queued=5), 0.0)
    state.observe(decode(queued=5), 10.0)
    state.observe(prefill(queued=5, new_tokens=8192), 10.0)
    state.observe(decode(queued=5), 20.0)
    state.advance(30.0)
    assert seconds(state, "admission") == {"prefill_bound": 1.0, "held_back": 29.0}


def admission(state: ServerState) -> str:
    return state.ranks[None].states["admission"]


def test_a_request_is_not_held_back_where_the_next_would_not_fit() -> None:
    # Three of 1,150 tokens run in a KV cache of 4,200, and the size of the waiting ones is unknown.
    state = new_state()
    state.observe(decode(running=3, queued=20, usage=0.82), 0.0)
    assert admission(state) == "pool_full"


def test_the_size_of_those_that_wait_decides_where_it_is_printed() -> None:
    state = new_state()
    state.observe(Limits(None, NO_RANK, 10_000, 64), 0.0)
    line = replace(prefill(running=40, queued=10), pending_tokens=30_000)  # 3,000 each
    state.observe(line, 1.0)
    state.observe(decode(running=40, queued=10, usage=0.65), 2.0)
    assert admission(state) == "pool_full"
    state.observe(replace(line, pending_tokens=1_000), 3.0)
    state.observe(decode(running=40, queued=10, usage=0.65), 4.0)
    assert admission(state) == "held_back"


def test_a_request_needs_whole_pages() -> None:
    # Seven requests of 70 tokens hold a page of 512 each, in a KV cache of eight.
    state = new_state()
    state.observe(args(page_size=512), 0.0)
    state.observe(Limits(None, NO_RANK, 4_096, 64), 0.0)
    state.observe(replace(prefill(running=6, queued=10, new_tokens=70), pending_tokens=700), 1.0)
    state.observe(decode(running=6, queued=10, usage=0.75), 2.0)
    assert admission(state) == "pool_full"


def test_requests_of_one_prefix_need_little_more_than_they_do_not_share() -> None:
    # Four requests hold one prefix of 6,000 tokens in a KV cache of 10,000, and 100 each.
    state = new_state()
    state.observe(Limits(None, NO_RANK, 10_000, 64), 0.0)
    state.observe(replace(prefill(running=3, queued=5, cached=6000), pending_tokens=30_500), 1.0)
    state.observe(decode(running=4, queued=5, usage=0.64), 2.0)
    assert admission(state) == "held_back"


@pytest.mark.parametrize(
    ("argument", "state_then"),
    [
        ({"disaggregation_mode": "prefill"}, "prefill_bound"),
        ({"disaggregation_mode": "decode"}, "unknown"),
        ({"enable_lora": True}, "unknown"),
        ({"lora_paths": ["a=/a"]}, "unknown"),
        ({"hicache_storage_backend": "file"}, "unknown"),
        ({"disaggregation_mode": "null", "enable_lora": False, "lora_paths": None}, "held_back"),
    ],
)
def test_a_server_that_admits_by_more_than_its_token_ratio_is_not_said_to_hold_back(
    argument: dict[str, object], state_then: str
) -> None:
    state = new_state()
    state.observe(args(**argument), 0.0)
    state.observe(decode(queued=5, usage=0.3), 1.0)
    assert admission(state) == state_then


def test_the_limit_holds_on_such_a_server_too() -> None:
    state = new_state()
    state.observe(args(enable_lora=True, max_running_requests=8), 0.0)
    state.observe(decode(running=8, queued=5, usage=0.3), 1.0)
    assert admission(state) == "running_limit"


def test_a_batch_ends_at_max_prefill_tokens_too() -> None:
    state = new_state()
    state.observe(args(chunked_prefill_size=32768, max_prefill_tokens=16384), 0.0)
    state.observe(prefill(queued=5, new_tokens=16384), 1.0)
    assert admission(state) == "prefill_bound"


def test_a_mixed_batch_is_full_with_the_decoding_requests_in_it() -> None:
    state = new_state()
    state.observe(args(chunked_prefill_size=1024, enable_mixed_chunk=True), 0.0)
    state.observe(prefill(running=200, queued=5, new_tokens=824), 1.0)
    assert admission(state) == "prefill_bound"


def test_the_next_chunk_of_one_prompt_starts_no_request() -> None:
    # One prompt of 40,000 tokens at a time, in chunks of 4,096, a second each: a request in ten seconds.
    state = new_state("long_context")
    state.observe(args(chunked_prefill_size=4096), 0.0)
    for second in range(120):
        sequences = 2 if second % 10 == 9 else 1  # the last chunk takes in the next prompt
        state.observe(prefill(running=0, queued=20, new_tokens=4096, sequences=sequences), float(second))
    wait = state.ranks[None].queue_wait_seconds(120.0)
    assert wait == pytest.approx(200.0, rel=0.1)
    assert state.ranks[None].states["queue"] == "above_range"


def test_whole_prompts_beyond_max_prefill_tokens_each_start_a_request() -> None:
    # A batch ends at 256 tokens and so has one prompt of 2,000; none of them goes on in the next.
    state = new_state()
    state.observe(args(max_prefill_tokens=256, chunked_prefill_size=4096), 0.0)
    for second in range(60):
        state.observe(prefill(queued=5, new_tokens=2000), float(second))
    assert state.ranks[None].queue_wait_seconds(60.0) == pytest.approx(5.0, rel=0.1)


def test_a_rate_of_admission_does_not_count_the_pauses_between_bursts() -> None:
    # Half a minute of load every two minutes: ten start in a second, and twenty wait: two seconds each.
    state = new_state()
    for burst in range(5):
        for second in range(30):
            at = 120.0 * burst + second
            state.observe(prefill(queued=20, sequences=10), at)
            state.observe(decode(queued=20), at + 0.5)
        state.observe(decode(queued=0), 120.0 * burst + 30.0)
        state.advance(120.0 * burst + 119.0)
    totals = state.totals()
    assert totals.seconds["queue", "above_range"] == 0.0
    assert totals.serving_seconds() == pytest.approx(150.0, abs=30.0)


def test_while_the_log_is_read_a_scrape_of_an_idle_server_makes_it_idle() -> None:
    state = new_state()
    state.observe_scrape(scrape(figures(running=0, queued=0), progress=0.0), 0.0)
    state.observe(prefill(running=0, queued=0), 5.0)
    for now in (6.0, 7.0):
        state.observe(decode(), now)
    state.observe_scrape(scrape(figures(running=0, queued=0), progress=90_000.0), 15.0)
    assert state.ranks[None].states["activity"] == "idle"


def test_a_prefill_that_the_gauges_do_not_show_is_work_while_its_line_speaks() -> None:
    state = new_state()
    state.observe_scrape(scrape(figures(running=0, queued=0), progress=0.0), 0.0)
    state.observe(prefill(running=0, queued=0, new_tokens=8192), 5.0)
    state.observe_scrape(scrape(figures(running=0, queued=0), progress=8192.0), 6.0)
    assert state.ranks[None].states["activity"] == "serving"


def test_work_between_two_scrapes_is_dated_before_the_scrape_that_counts_it() -> None:
    state = new_state()
    for step in range(5):
        state.observe_scrape(scrape(figures(running=0, queued=0), progress=9000.0 * step), 15.0 * step)
    state.advance(70.0)
    assert seconds(state) == {"serving": 60.0, "idle": 10.0}


def test_a_burst_that_a_scrape_shows_ends_with_the_next_scrape() -> None:
    state = new_state()
    state.observe_scrape(scrape(figures(running=0, queued=0), progress=0.0), 0.0)
    state.observe_scrape(scrape(figures(running=4, queued=9), progress=9000.0), 10.0)
    state.observe_scrape(scrape(figures(running=0, queued=0), progress=18000.0), 20.0)
    state.advance(50.0)
    assert seconds(state) == {"serving": 10.0, "idle": 40.0}


def test_a_small_limit_is_reached_while_one_of_its_requests_is_being_replaced() -> None:
    state = new_state()
    state.observe(args(max_running_requests=6), 0.0)
    state.observe_scrape(scrape(figures(running=5, queued=18, full_usage=0.3)), 1.0)
    assert admission(state) == "running_limit"


def test_below_a_small_limit_the_kv_cache_is_full_where_the_next_request_would_not_fit() -> None:
    state = new_state()
    state.observe(args(max_running_requests=2), 0.0)
    state.observe_scrape(scrape(figures(running=1, queued=18, full_usage=0.6)), 1.0)
    assert admission(state) == "pool_full"


def test_full_prefill_batches_that_follow_each_other_are_the_limit_all_the_time() -> None:
    state = new_state()
    state.observe(args(chunked_prefill_size=8192), 0.0)
    for step in range(20):
        state.observe(prefill(queued=5, new_tokens=8192), 3.0 * step)
    assert seconds(state, "admission")["prefill_bound"] >= 50.0


def test_the_window_ends_where_the_last_observation_ceased_to_hold() -> None:
    state = new_state()
    state.observe(decode(), 0.0)
    state.observe(decode(), 3600.0)
    assert state.recent(3600.0).serving_seconds() == 0.0
