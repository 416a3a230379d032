"""A restart of the exporter: counters go on, what is judged begins anew, and lines of the gap are as old as they say."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import config
from sglang_tuning_exporter.collect.log import Logbook
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.events import from_json, to_json
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


def test_a_log_read_from_its_start_counts_its_past_and_does_not_judge_by_it(place: Place) -> None:
    place.write(RETRACTION, ago=4000.0, times=500, step=6.0)
    place.write(OUT_OF_MEMORY, ago=380.0)
    book, watch = place.reader(from_start=True)
    assert (watch.server.counted["retractions"], recent(watch, "retractions")) == (500, 0)
    assert recent(watch, "out_of_memory.prefill") == 1
    book.close()
