"""A restart of the exporter: counters go on, what is judged begins anew, and lines of the gap are as old as they say."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import config
from sglang_tuning_exporter.collect.log import Logbook
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.events import Event, Rank, from_json, to_json
from sglang_tuning_exporter.core.watch import Watch

BEGIN = 1_763_632_800.0
LOCK = threading.RLock()
RETRACTION = "KV cache pool is full. Retract requests. #retracted_reqs: 5, #new_tokens_gained: {n}, #new_token_ratio: 0.3002 -> 0.5783"
HEALTHY = (
    "Decode batch, #running-req: 20, #token: 1009, token usage: 0.40, cuda graph: True, gen throughput (token/s): 2000.00,"
    " #queue-req: 0"
)
OUT_OF_MEMORY = "Prefill out of memory. Try to lower your batch size."
START = "server_args={{'tp_size': 1, 'port': {n}}}"


def watch_at(now: float = BEGIN) -> Watch:
    return Watch(PROFILES["online"], now, reads=True, scrapes=False)


def restarted(old: Watch, at: float, *, ago: float = 0.0, now: float = BEGIN + 5000) -> Watch:
    """Return the watch of a new process that loads what the old one saved `ago` seconds ago."""
    new = watch_at(now)
    new.restore(json.loads(json.dumps(old.saved(at), allow_nan=False)), now, ago)
    return new


def retraction(number: int, dp: int | None = None) -> Event:
    return Event("retraction", rank=Rank(dp), figures={"requests": 3, "gained": 8000 + number})


def decoded(graph: int = 1) -> Event:
    return Event(
        "decode", figures={"running": 20, "queued": 0, "tokens": 1009, "usage": 0.4, "graph": graph}, word="cuda"
    )


COUNTED: dict[str, tuple[list[Event], Callable[[Watch], float]]] = {
    "retraction events": (
        [retraction(number) for number in range(40)],
        lambda watch: watch.server.counted["retractions"],
    ),
    "those of a DP rank": (
        [retraction(number, dp=1) for number in range(40)],
        lambda watch: watch.server.rank_counts(1)["retraction_events"],
    ),
    "retracted requests": (
        [retraction(number) for number in range(40)],
        lambda watch: watch.server.counted["retracted"] / 3,
    ),
    "replayed": ([decoded() for _ in range(40)], lambda watch: watch.server.rank_counts(None)["replayed"]),
    "eager": ([decoded(0) for _ in range(40)], lambda watch: watch.server.rank_counts(None)["eager"]),
    "rejections": ([Event("rejected") for _ in range(40)], lambda watch: watch.server.counted["rejected"]),
    "failures": (
        [Event("out_of_memory", word="decode")],
        lambda watch: watch.server.counted["out_of_memory.decode"],
    ),
    "starts": ([Event("arguments", arguments={"tp_size": 1})] * 4, lambda watch: watch.server.counted["starts"]),
    "hangs": ([Event("hang", word="scheduler")], lambda watch: watch.server.counted["watchdogs"]),
}


def taken(watch: Watch, events: list[Event], at: float) -> None:
    for event in events:
        watch.take(Event(event.kind, at, event.rank, dict(event.figures), event.word, arguments=event.arguments))


@pytest.mark.parametrize("counted", COUNTED)
def test_counters_go_on_and_what_was_counted_before_is_judged_no_more(counted: str) -> None:
    events, count = COUNTED[counted]
    old = watch_at()
    taken(old, events, BEGIN + 1)
    old.advance(BEGIN + 30)
    new = restarted(old, BEGIN + 30)
    before = count(old)
    taken(new, events[-1:], BEGIN + 5015)
    assert before >= len(events)
    assert count(new) > before
    fresh = watch_at(BEGIN + 5000)
    taken(fresh, events[-1:], BEGIN + 5015)
    for each in (new, fresh):
        each.advance(BEGIN + 5016)
    assert dict(new.server.window(600)) == dict(fresh.server.window(600)) != {}


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(
    st.sampled_from(
        ["counted", "ranks", "doubtful", "ledger", "waiting", "retracted", "clocks", "words", "starts", "outages"]
    ),
    JSON,
)
def test_any_value_in_a_state_file_is_read_or_left_out(name: str, value: object) -> None:
    watch = watch_at()
    watch.restore({name: value}, BEGIN, 1.0)
    watch.judge(BEGIN + 1)
    assert json.dumps(watch.saved(BEGIN + 2), allow_nan=False)


@given(JSON)
def test_any_value_in_place_of_an_event_is_one_or_left_out(value: object) -> None:
    for saved in (
        value,
        {"kind": value, "rank": [None] * 3},
        {"kind": "arguments", "rank": [None] * 3, "arguments": value},
    ):
        event = from_json(saved)
        assert event is None or json.dumps(to_json(event))


# Lines of the gap, and those from before the exporter


class Place:
    """A directory with a server's log, whose lines print the time of another zone, and a state file."""

    zone = 5.5 * 3600

    def __init__(self, directory: Path) -> None:
        self.log, self.state_file = directory / "server.log", directory / "state.json"
        self.log.touch()

    def write(self, message: str, ago: float, times: int = 1, *, step: float = 0.0) -> None:
        """Write `times` lines as a server did `ago` seconds ago and every `step` seconds after."""
        at = time.time() - ago
        with self.log.open("a") as file:
            for number in range(times):
                at = time.time() - ago + number * step
                printed = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at + self.zone))
                file.write(f"[{printed}] {message.format(n=number)}\n")
        os.utime(self.log, (at, at))

    def reader(self, *, from_start: bool = False) -> tuple[Logbook, Watch]:
        watch = Watch(PROFILES["online"], time.time(), reads=True, scrapes=False)
        settings = config(log_file=(str(self.log),), state_file=self.state_file, from_start=from_start)
        book = Logbook(settings, watch, LOCK, clock=time.time)
        book.poll()
        return book, watch

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


def recent(watch: Watch, name: str, seconds: float = 600.0) -> float:
    watch.advance(time.time())
    return watch.server.window(seconds)[name]


def test_events_of_the_gap_are_counted_once_and_are_as_old_as_they_say(place: Place) -> None:
    place.first(ago=4000.0)
    place.write(RETRACTION, ago=3900.0, times=60, step=6.0)
    for _ in range(2):
        book, watch = place.reader()
        assert (watch.server.counted["retractions"], recent(watch, "retractions")) == (60, 0)
        book.close()


def test_starts_while_the_exporter_was_down_are_no_restart_loop(place: Place) -> None:
    place.first(ago=36_000.0)
    place.write(START, ago=35_000.0, times=8, step=4000.0)
    place.write(HEALTHY, ago=1.0)
    book, watch = place.reader()
    assert watch.server.counted["starts"] == 8
    assert "restart_loop" not in {each.diagnosis for each in watch.judge(time.time()).findings}
    book.close()


@pytest.mark.parametrize(("ago", "activity"), [(30_000.0, "unknown"), (1.0, "serving")])
def test_a_batch_from_hours_ago_does_not_run_now(place: Place, ago: float, activity: str) -> None:
    place.first(ago=ago + 100)
    place.write(HEALTHY, ago=ago)
    book, watch = place.reader()
    now = time.time()
    watch.advance(now)
    found = {each.moment(now).activity for each in watch.server.schedulers.values()}
    assert found == {activity} if activity == "serving" else "serving" not in found
    book.close()


def test_a_log_read_from_its_start_counts_its_past_and_does_not_judge_by_it(place: Place) -> None:
    place.write(RETRACTION, ago=4000.0, times=500, step=6.0)
    place.write(OUT_OF_MEMORY, ago=380.0)
    book, watch = place.reader(from_start=True)
    assert (watch.server.counted["retractions"], recent(watch, "retractions")) == (500, 0)
    assert recent(watch, "out_of_memory.prefill") == 1
    book.close()


@pytest.mark.parametrize(("ago", "verdict"), [(60.0, "starting"), (1700.0, "starting"), (7200.0, "not_enough_data")])
def test_a_start_from_before_the_exporter_goes_on_for_half_an_hour(place: Place, ago: float, verdict: str) -> None:
    place.write(START, ago=ago)
    book, watch = place.reader()
    assert watch.judge(time.time()).verdict == verdict
    book.close()
