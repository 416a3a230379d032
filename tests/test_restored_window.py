"""After a restart of the exporter, restored counts stay in the counters but do not count as recent."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import config
from sglang_tuning_exporter.collect.log import Logbook
from sglang_tuning_exporter.diagnosis.evidence import past_of
from sglang_tuning_exporter.diagnosis.findings import judge
from sglang_tuning_exporter.sglang.events import (
    NO_RANK,
    DecodeBatch,
    Event,
    Liveness,
    LivenessKind,
    OutOfMemory,
    Rank,
    Rejection,
    Retraction,
    ServerArgs,
)
from sglang_tuning_exporter.state.history import History
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

LOCK = threading.RLock()
RETRACTION = (
    "KV cache pool is full. Retract requests. #retracted_reqs: {n}, #new_tokens_gained: 8950, "
    "#new_token_ratio: 0.3002 -> 0.5783"
)
HEALTHY = (
    "Decode batch, #running-req: 20, #token: 1009, token usage: 0.40, cuda graph: True, "
    "gen throughput (token/s): 4471.70, #queue-req: 0"
)
OOM = "Prefill out of memory. Try to lower your batch size."
CRASH = "Scheduler hit an exception: Traceback (most recent call last):"


def retracted(number: int, dp: int | None = None) -> Retraction:
    return Retraction(None, Rank(dp=dp), 3, new_tokens_gained=8000 + number, ratio_before=0.3, ratio_after=0.5)


def decoded(*, graph: bool = True) -> DecodeBatch:
    return DecodeBatch(None, NO_RANK, 20, 0, 1009, 0.4, graph=graph, graph_device="cuda")


def lived(what: LivenessKind) -> Liveness:
    return Liveness(None, NO_RANK, what)


def a_new_state(now: float = 0.0) -> ServerState:
    return ServerState(PROFILES["online"], now)


def restarted(old: ServerState, at: float, *, ago: float = 0.0, now: float = 5000.0) -> ServerState:
    """The state of a new process that loads the old one's state file, `ago` seconds after it was written."""
    new = a_new_state(now)
    new.restore(json.loads(json.dumps(old.saved(at))), now, ago)
    return new


COUNTED: dict[str, tuple[list[Event], Callable[[ServerState], float]]] = {
    "retraction_events": (
        [retracted(number) for number in range(40)],
        lambda state: state.totals().counts["retraction_events"],
    ),
    "retraction_events of a DP rank": (
        [retracted(number, dp=1) for number in range(40)],
        lambda state: state.totals().counts["retraction_events"],
    ),
    "log_retracted_requests": (
        [retracted(number) for number in range(40)],
        lambda state: state.totals().counts["log_retracted_requests"],
    ),
    "replayed": ([decoded() for _ in range(40)], lambda state: state.totals().counts["replayed"]),
    "eager": ([decoded(graph=False) for _ in range(40)], lambda state: state.totals().counts["eager"]),
    "rejected_requests": (
        [Rejection(None, NO_RANK) for _ in range(40)],
        lambda state: state.totals().counts["rejected_requests"],
    ),
    "out_of_memory": ([OutOfMemory(None, NO_RANK, "decode")], lambda state: state.out_of_memory["decode"]),
    "starts": ([ServerArgs(None, NO_RANK, {"tp_size": 1})] * 4, lambda state: state.starts),
    "liveness": ([lived("watchdog_timeout")], lambda state: state.liveness["watchdog_timeout"]),
}


def recent(state: ServerState, now: float) -> dict[str, float]:
    """All figures of the window that are not zero."""
    past = past_of(state, now)
    return {name: count for name, count in (*past.recent.counts.items(), *past.event_counts.items()) if count} | (
        {"starts": past.starts} if past.starts else {}
    )


@pytest.mark.parametrize("counted", COUNTED)
def test_restored_counts_continue_in_the_counters_and_not_in_the_window(counted: str) -> None:
    events, count = COUNTED[counted]
    old = a_new_state()
    for event in events:
        old.observe(event, 1.0)
    old.settle(3.0)
    new = restarted(old, 3.0)
    for seconds in (0.0, 5.0, 100.0, 599.0, 700.0):
        new.advance(5000.0 + seconds)
        assert count(new) == count(old) >= len(events)
        assert recent(new, 5000.0 + seconds) == {}, seconds


@pytest.mark.parametrize("counted", COUNTED)
def test_the_window_holds_only_events_after_the_restart(counted: str) -> None:
    events, count = COUNTED[counted]
    old = a_new_state()
    for event in events:
        old.observe(event, 1.0)
    old.settle(3.0)
    new, fresh = restarted(old, 3.0, ago=60.0), a_new_state(5000.0)
    for state in (new, fresh):
        state.observe(events[-1], 5015.0)
        state.settle(5015.0)
    assert recent(new, 5016.0) == recent(fresh, 5016.0) != {}
    assert count(new) == count(old) + count(fresh)


def test_the_age_of_an_event_goes_on_over_a_restart() -> None:
    old = a_new_state()
    old.observe(OutOfMemory(None, NO_RANK, "decode"), 1.0)
    old.observe(lived("process_died"), 31.0)
    new = restarted(old, 41.0, ago=60.0)
    assert (new.journal.age("decode", 5000.0), new.journal.age("process_died", 5000.0)) == (100.0, 70.0)
    assert new.journal.age("prefill", 5000.0) is None
    again = restarted(new, 5010.0, ago=5.0, now=9000.0)
    assert again.journal.age("decode", 9000.0) == 115.0


@pytest.mark.parametrize("ages", [None, [], {"decode": "x"}, {"decode": -1e300}, {"x": 5.0}, {"decode": True}])
def test_an_age_is_never_negative_whatever_the_state_file_has(ages: object) -> None:
    new = a_new_state(5000.0)
    new.restore({**a_new_state().saved(0.0), "ages": ages}, 5000.0)
    assert (new.journal.age("decode", 5000.0) or 0.0) >= 0.0
    assert new.journal.age("x", 5000.0) is None


def test_a_healthy_server_is_healthy_after_a_restart_however_often_it_retracted_before() -> None:
    old = a_new_state()
    for number in range(647):
        old.observe(retracted(number), number * 0.01)
    new = restarted(old, 10.0)
    for second in range(0, 300, 5):
        new.observe(decoded(), 5000.0 + second)
        judgement = judge(past_of(new, 5000.0 + second))
        assert judgement.verdict in {"not_enough_data", "healthy"}
        assert judgement.changes == {}
    assert judgement.verdict == "healthy"


def test_the_page_draws_no_restored_retraction_and_no_restored_batch() -> None:
    old = a_new_state()
    for number in range(40):
        old.observe(retracted(number), 1.0)
        old.observe(decoded(graph=False), 1.0)
    new, history = restarted(old, 2.0), History()
    history.begin(new)
    for second in range(0, 60, 5):
        new.observe(decoded(), 5000.0 + second)
        history.offer(new, 5000.0 + second)
    assert {value for _, value in history.retractions()} == {0.0}
    assert {value for _, value in history.line(lambda moment: moment.replayed)} == {1.0}


def test_a_failure_that_waited_for_its_phase_happened_when_it_was_saved() -> None:
    old = a_new_state()
    old.observe(OutOfMemory(None, NO_RANK, "unknown"), 3.0)
    new = restarted(old, 3.0, ago=900.0)
    new.settle(5001.0)
    assert new.out_of_memory["unknown"] == 1
    assert recent(new, 5001.0) == {}


def test_a_failure_in_the_gap_repeats_none_of_those_before_it() -> None:
    old = a_new_state()
    old.observe(OutOfMemory(None, NO_RANK, "decode"), 3.0)
    new = restarted(old, 3.0, ago=3600.0)
    new.observe(OutOfMemory(None, NO_RANK, "decode"), 5000.0 - 1800.0)
    assert new.out_of_memory["decode"] == 2


class Place:
    """A directory with a server's log, whose lines print the time of another zone, and a state file."""

    zone = 5.5 * 3600

    def __init__(self, directory: Path) -> None:
        self.log, self.state_file = directory / "server.log", directory / "state.json"
        self.log.touch()

    def write(self, message: str, ago: float, times: int = 1, *, step: float = 0.0) -> None:
        """Write `times` lines as a server did `ago` seconds ago and every `step` seconds after."""
        with self.log.open("a") as file:
            for number in range(times):
                at = time.time() - ago + number * step
                printed = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at + self.zone))
                file.write(f"[{printed}] {message.format(n=number)}\n")
        os.utime(self.log, (at, at))

    def reader(self, *, from_start: bool = False) -> tuple[Logbook, ServerState]:
        state = ServerState(PROFILES["online"], time.monotonic())
        book = Logbook(
            config(log_file=(str(self.log),), state_file=self.state_file, from_start=from_start), state, LOCK
        )
        book.poll()
        return book, state

    def first(self, *, ago: float) -> None:
        """An exporter that read the log to its end and ended `ago` seconds ago."""
        book, _ = self.reader()
        book.close()
        document = json.loads(self.state_file.read_text())
        document["at"] -= ago
        self.state_file.write_text(json.dumps(document))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_events_of_the_gap_are_counted_once_and_are_no_rate_of_the_time_after_it(place: Place) -> None:
    place.first(ago=400.0)
    place.write(RETRACTION, ago=390.0, times=60, step=6.0)
    for _ in range(2):
        book, state = place.reader()
        assert state.totals().counts["retraction_events"] == 60
        assert recent(state, time.monotonic()) == {}
        book.close()


def test_a_failure_of_the_gap_is_as_old_as_its_line_says(place: Place) -> None:
    place.first(ago=3600.0)
    place.write(OOM, ago=1500.0)
    place.write(HEALTHY, ago=1400.0, times=2)
    book, state = place.reader()
    now = time.monotonic()
    assert state.out_of_memory["prefill"] == 1
    assert (state.recent_marks(now, 600.0), state.recent_marks(now, 1600.0)["prefill"]) == ({}, 1)
    book.close()


def test_an_event_of_before_the_first_look_is_as_old_as_its_line(place: Place) -> None:
    place.write(OOM, ago=9000.0)
    place.write(CRASH, ago=300.0)
    book, state = place.reader(from_start=True)
    now = time.monotonic()
    assert state.journal.age("prefill", now) == pytest.approx(9000.0, abs=2.0)
    assert state.journal.age("scheduler_exception", now) == pytest.approx(300.0, abs=2.0)
    place.write(OOM.replace("Prefill", "Decode"), ago=300.0)  # a clock that runs behind
    book.poll()
    assert state.journal.age("decode", time.monotonic()) == pytest.approx(0.0, abs=2.0)
    book.close()


def test_a_failure_of_the_last_ten_minutes_is_a_finding_even_if_the_exporter_was_down(place: Place) -> None:
    place.first(ago=3600.0)
    place.write(OOM, ago=100.0)
    book, state = place.reader()
    assert state.recent_marks(time.monotonic(), 600.0)["prefill"] == 1
    assert "out_of_memory_prefill" in {found.diagnosis.id for found in judge(past_of(state, time.monotonic())).findings}
    book.close()


def test_starts_while_the_exporter_was_down_are_no_restart_loop(place: Place) -> None:
    place.first(ago=36_000.0)
    place.write("server_args={{'tp_size': 1, 'port': {n}}}", ago=35_000.0, times=8, step=4000.0)
    place.write(HEALTHY, ago=1.0)
    book, state = place.reader()
    assert state.starts == 8
    assert past_of(state, time.monotonic()).starts <= 1
    book.close()


def test_a_batch_from_hours_ago_does_not_count_as_running_now(place: Place) -> None:
    place.first(ago=36_000.0)
    place.write(HEALTHY, ago=30_000.0, times=3)
    book, state = place.reader()
    state.advance(time.monotonic())
    assert [rank.states["activity"] for rank in state.schedulers] == ["unknown"]
    book.close()


def test_a_batch_of_this_moment_runs_now(place: Place) -> None:
    place.first(ago=10.0)
    place.write(HEALTHY.replace("4471.70", "20.00"), ago=2.0, times=3)
    book, state = place.reader()
    state.advance(time.monotonic())
    assert [rank.states["activity"] for rank in state.schedulers] == ["serving"]
    book.close()


def test_a_log_read_from_its_start_counts_its_past_and_does_not_judge_by_it(place: Place) -> None:
    place.write(RETRACTION, ago=4000.0, times=600, step=6.0)
    place.write(OOM, ago=380.0)
    book, state = place.reader(from_start=True)
    assert state.totals().counts["retraction_events"] == 600
    assert recent(state, time.monotonic()) == {"prefill": 1}
    book.close()


def test_lines_written_after_the_restart_count_as_recent(place: Place) -> None:
    place.first(ago=400.0)
    place.write(RETRACTION, ago=390.0, times=5)
    book, state = place.reader()
    place.write(RETRACTION.replace("8950", "77"), ago=0.0, times=7)
    book.poll()
    counts = past_of(state, time.monotonic()).recent.counts
    assert (counts["retraction_events"], state.totals().counts["retraction_events"]) == (7, 12)
    book.close()


def test_an_end_that_was_printed_before_the_exporter_came_is_still_the_end(place: Place) -> None:
    place.write(HEALTHY, ago=400.0)
    place.write(CRASH, ago=300.0)
    book, state = place.reader()
    assert (state.life.died, state.life.starts(time.monotonic())) == ("scheduler_exception", False)
    assert dict(state.liveness) == {}
    book.close()


def test_an_end_that_was_printed_before_the_start_does_not_count_once_the_server_answers(place: Place) -> None:
    place.write(CRASH, ago=300.0)
    book, state = place.reader()
    state.life.answers()
    assert state.life.died == ""
    book.close()


def test_an_end_that_is_printed_now_is_not_cleared_by_an_answer_under_way(place: Place) -> None:
    book, state = place.reader()
    place.write(CRASH, ago=0.0)
    book.poll()
    state.life.answers()
    assert state.life.died == "scheduler_exception"
    book.close()


@pytest.mark.parametrize(("ago", "starting"), [(60.0, True), (1700.0, True), (7200.0, False)])
def test_a_start_that_was_printed_before_the_exporter_came_is_under_way_for_half_an_hour(
    place: Place, ago: float, *, starting: bool
) -> None:
    place.write("server_args={{'tp_size': 1}}", ago=ago)
    book, state = place.reader()
    assert state.life.starts(time.monotonic()) is starting
    book.close()


def test_a_start_that_was_followed_by_a_batch_is_not_under_way(place: Place) -> None:
    place.write("server_args={{'tp_size': 1}}", ago=60.0)
    place.write(HEALTHY, ago=30.0)
    book, state = place.reader()
    assert not state.life.starts(time.monotonic())
    book.close()
