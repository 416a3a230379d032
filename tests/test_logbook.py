"""Reading the log with a state file: files on a disk in, counters out, and the same counters after a crash."""

from __future__ import annotations

import gzip
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from conftest import DECODED as DECODE
from conftest import RETRACTED as RETRACTION
from conftest import config
from sglang_tuning_exporter.collect import log as logbook
from sglang_tuning_exporter.collect.log import Logbook
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.alerts import Clocks
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.server import REPEAT_SECONDS
from sglang_tuning_exporter.core.watch import Watch
from sglang_tuning_exporter.sglang.metrics import RankFigures, Scrape

LOCK = threading.RLock()
AT = "[2025-11-20 11:40:10{ranks}] "
TOOL = "Model attempted to call undefined function: get_weather"
UNEXPLAINED = (
    "Scheduler hit an exception: Traceback (most recent call last):\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.75 GiB."
)


class Place:
    """A directory with a server's log and a state file."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "server.log"
        self.log.touch()
        self.state_file = directory / "state.json"

    def write(self, *messages: str, ranks: str = "") -> None:
        with self.log.open("a") as file:
            file.writelines(AT.format(ranks=ranks) + message + "\n" for message in messages)

    def write_past(self, message: str, ago: float, times: int = 1, *, step: float = 0.0) -> None:
        """Write `times` lines as a server did `ago` seconds ago and every `step` seconds after, which prints the time
        of another zone.
        """
        moments = [time.time() - ago + number * step for number in range(times)]
        printed = [time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(each + 5.5 * 3600)) for each in moments]
        with self.log.open("a") as file:
            file.writelines(f"[{each}] {message.format(n=number)}\n" for number, each in enumerate(printed))
        os.utime(self.log, (moments[-1], moments[-1]))

    def start(self, tp: int = 1) -> None:
        self.write(f"server_args={{'tp_size': {tp}, 'dp_size': 1}}")
        self.write(
            "max_total_num_tokens=1040384, chunked_prefill_size=8192, max_running_requests=400",
            ranks=" TP0" if tp > 1 else "",
        )

    @contextmanager
    def reader(self, *, scrapes: bool = False, from_start: bool = False) -> Iterator[tuple[Logbook, Watch]]:
        """Start a reader; it ends without saving, as after SIGKILL."""
        watch = Watch(PROFILES["online"], time.time(), reads=True, scrapes=scrapes)
        settings = config(log_file=(str(self.log),), state_file=self.state_file, from_start=from_start)
        book = Logbook(settings, watch, LOCK, clock=time.time)
        book.poll()
        yield book, watch
        book.close()

    def ended(self, *, ago: float) -> None:
        """An exporter read the log to its end, and ended `ago` seconds ago."""
        with self.reader():
            pass
        document = json.loads(self.state_file.read_text())
        document["at"] -= ago
        self.state_file.write_text(json.dumps(document))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def events(watch: Watch) -> float:
    return watch.server.counted["retraction_events"]


def lately(watch: Watch, name: str) -> float:
    """How many there were in the last ten minutes."""
    watch.advance(time.time())
    return watch.server.window(600.0)[name]


def failures(watch: Watch) -> float:
    return sum(number for name, number in watch.server.counted.items() if name.startswith("out_of_memory."))


def scrape(watch: Watch, retracted: float, *, ago: float = 0.0) -> None:
    figures = RankFigures(None, running=237, queued=4, replayed_batches=1.0, retracted_requests=retracted)
    watch.take_page(Scrape([figures], progress=retracted), time.time() - ago)


def test_positions_and_counters_are_in_the_file_when_the_block_is_read(place: Place) -> None:
    with place.reader() as (book, _watch):
        place.write(DECODE, RETRACTION)
        book.poll()
        document = json.loads(place.state_file.read_bytes())
        assert [mark["position"] for mark in document["positions"]["files"]] == [place.log.stat().st_size]
        assert document["watch"]["counted"]["retraction_events"] == 1


def test_a_save_while_a_block_is_parsed_has_the_position_before_the_block(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place.reader() as (book, watch):
        before = place.log.stat().st_size
        read = Reader.read
        saved = []

        def read_slowly(reader: Reader, line: bytes) -> Any:
            with LOCK:  # a scrape comes meanwhile, with something new to show
                watch.server.counted["out_of_memory.decode"] += 1
                book.save_if_changed(time.time())
            saved.append(json.loads(place.state_file.read_bytes()))
            return read(reader, line)

        monkeypatch.setattr(Reader, "read", read_slowly)
        place.write(DECODE, RETRACTION)
        book.poll()
        assert [[mark["position"] for mark in document["positions"]["files"]] for document in saved] == [[before]] * 2
        assert saved[0]["lines"] == {}


def test_nothing_is_written_while_nothing_happens(place: Place) -> None:
    with place.reader() as (book, watch):
        place.write(DECODE, RETRACTION)
        book.poll()
        written = place.state_file.stat().st_ino, place.state_file.stat().st_mtime_ns
        for _ in range(20):
            watch.advance(time.time())
            book.poll()
        assert (place.state_file.stat().st_ino, place.state_file.stat().st_mtime_ns) == written


def test_the_words_of_the_log_are_not_in_the_file(place: Place) -> None:
    with place.reader() as (book, _watch):
        place.write("server_args={'tp_size': 1, 'api_key': 'sk-secret'}", DECODE, TOOL)
        book.poll()
    text = place.state_file.read_text()
    assert "secret" not in text
    assert "get_weather" not in text


class Rotations:
    """A directory whose logs are followed by a glob, and seconds that pass when the test says so."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now = 1000.0
        self.watch = Watch(PROFILES["online"], self.now, reads=True, scrapes=False)
        self.book = Logbook(
            config(log_file=(str(directory / "*.log"),), from_start=True), self.watch, LOCK, clock=lambda: self.now
        )

    def write(self, name: str, *messages: str) -> Path:
        path = self.directory / name
        with path.open("a") as file:
            file.writelines(AT.format(ranks="") + message + "\n" for message in messages)
        return path

    def poll(self, after: float = 2.0) -> None:
        self.now += after
        for _ in range(2):  # one closes files that are gone, the other drops their positions
            self.book.poll()

    def lines(self, kind: str) -> int:
        return self.book.lines[kind]


def test_a_thousand_files_that_came_and_went_leave_no_memory_of_them_but_their_lines(tmp_path: Path) -> None:
    rotations = Rotations(tmp_path)
    for number in range(1000):
        log = rotations.write(f"{number}.log", DECODE, "Decode batch, nonsense")
        rotations.poll(after=70.0)
        log.unlink()
    assert rotations.lines("decode") == 1000
    assert len(rotations.book._readers) < 20
    rotations.poll()
    rotations.poll(after=700.0)
    rotations.poll(after=700.0)
    assert (rotations.book._readers, rotations.book._gone) == ({}, {})
    rotations.write("last.log", DECODE)
    rotations.poll()
    assert (rotations.lines("decode"), rotations.book.unrecognised["batch_line"]) == (1001, 1000)
    rotations.book.close()


def test_a_failure_that_waits_for_its_phase_survives_a_restart(place: Place) -> None:
    place.start()
    with place.reader() as (book, watch):
        place.write(DECODE, UNEXPLAINED)
        book.poll()
        waiting = failures(watch)
    for _ in range(2):
        with place.reader() as (book, watch):
            watch.advance(time.time() + REPEAT_SECONDS + 1)
            with LOCK:
                book.save_if_changed(time.time())
            assert (waiting, failures(watch)) == (0, 1)


def test_an_event_that_a_scrape_confirmed_is_saved_before_it_is_shown(place: Place) -> None:
    with place.reader(scrapes=True) as (book, watch):
        scrape(watch, 7, ago=60)
        place.write(DECODE, RETRACTION)
        book.poll()
        assert events(watch) == 0
        scrape(watch, 12)
        with LOCK:
            book.save_if_changed(time.time())
        assert events(watch) == 1
    with place.reader(scrapes=True) as (_, watch):
        assert events(watch) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_a_raw_message_before_the_crash_marks_the_lines_after_it(place: Place, *, packed: bool) -> None:
    place.start()
    with place.reader() as (book, watch):
        place.write(DECODE, TOOL)
        book.poll()
    place.write(RETRACTION)
    rotated = place.log.rename(f"{place.log}.1")
    if packed:
        Path(f"{rotated}.gz").write_bytes(gzip.compress(rotated.read_bytes()))
        rotated.unlink()
    place.log.touch()
    with place.reader() as (book, watch):
        marked = sum(totals["marked.retraction_events"] for _, totals in watch.server.buckets)
        assert (events(watch), marked) == (1, 1)
        assert book.lines["retraction"] == 1


@pytest.mark.parametrize("before", [(), (TOOL,)], ids=["plain", "after a raw message"])
def test_the_other_ranks_lines_after_the_crash_are_the_same_event(place: Place, before: tuple[str, ...]) -> None:
    place.start(tp=8)
    with place.reader() as (book, watch):
        place.write(DECODE, ranks=" TP0")
        place.write(*before)
        for rank in range(4):
            place.write(RETRACTION, ranks=f" TP{rank}")
        book.poll()
        assert events(watch) == 1
    for rank in range(4, 8):
        place.write(RETRACTION, ranks=f" TP{rank}")
    with place.reader() as (book, watch):
        assert (book.lines["retraction"], events(watch)) == (8, 1)
        for rank in range(8):
            place.write(RETRACTION.replace("8950", "8951"), ranks=f" TP{rank}")
        book.poll()
        assert (book.lines["retraction"], events(watch)) == (16, 2)


def test_a_retraction_that_waits_for_the_servers_counter_is_settled_after_a_restart(place: Place) -> None:
    place.start()
    with place.reader(scrapes=True) as (book, watch):
        scrape(watch, 7, ago=60)
        place.write(DECODE, RETRACTION)
        book.poll()
        assert events(watch) == 0
    with place.reader(scrapes=True) as (book, watch):
        scrape(watch, 12)  # the first page of this exporter
        watch.advance(time.time() + 31)
        assert events(watch) == 1


@pytest.mark.parametrize(("shift", "kept"), [(0.0, True), (3600.0, False), (-3600.0, False), (None, False)])
def test_a_state_file_from_the_future_continues_counters_and_no_waits(
    shift: float | None, place: Place, monkeypatch: pytest.MonkeyPatch, *, kept: bool
) -> None:
    with place.reader() as (book, watch):
        place.write(DECODE, RETRACTION)
        book.poll()
        counted = events(watch)
    document = json.loads(place.state_file.read_bytes())
    document["at"] = None if shift is None else document["at"] + shift
    place.state_file.write_text(json.dumps(document))
    restored: list[object] = []
    monkeypatch.setattr(Clocks, "restore", lambda _, saved, now: restored.append((saved, now)))
    with place.reader() as (_, watch):
        assert events(watch) == counted == 1
    assert bool(restored) == kept


def test_a_log_without_a_readable_line_is_reported_once_with_its_first_line(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    # Not caplog: `serve` in a test before this one may have given the program's log another way out.
    monkeypatch.setattr(logbook.logger, "warning", lambda words, *figures: said.append(words % figures))
    with place.reader() as (book, _watch):
        for _ in range(2):
            place.log.write_bytes(place.log.read_bytes() + f"x\\y{{{{\x1b[31m {DECODE}\n".encode() * 10)
            book.poll()
            book.poll()
        [status] = book.files
        assert status.unread.endswith(DECODE)
        assert status.unread.isprintable()
    assert sum("cannot parse lines that look like SGLang's; the first:" in each for each in said) == 1


def test_unfinished_arguments_are_read_after_seconds_of_silence(place: Place) -> None:
    now = time.time()
    watch = Watch(PROFILES["online"], now, reads=True, scrapes=False)
    book = Logbook(config(log_file=(str(place.log),)), watch, LOCK, clock=lambda: now)
    book.poll()
    place.write("server_args=ServerArgs(model_path='m', tp_size=8, dp_size=1, pp_size=")
    book.poll()
    assert watch.server.starts == 0
    now += 6.0
    book.poll()
    assert (watch.server.starts, watch.server.facts.number("tp_size")) == (1, 8)
    book.close()


def cri(tag: str, line: str) -> str:
    return f"2025-11-20T11:40:10.5Z stderr {tag} {AT.format(ranks='')}{line}\n"


@pytest.mark.parametrize(("first", "counted"), [(DECODE, 33), ("", 32)])
def test_an_unfinished_last_line_does_not_swallow_the_next_files_first_line(
    place: Place, first: str, counted: int
) -> None:
    with place.reader() as (book, _watch):
        place.log.write_text(cri("F", DECODE) * 16 + cri("P", "Receive: obj=" + "x" * 16_000))
        book.poll()
        place.log.rename(f"{place.log}.1")
        rest = "2025-11-20T11:40:10.5Z stderr F " + "x" * 200 + "\n"
        place.log.write_text((cri("F", first) if first else rest) + cri("F", DECODE) * 16)
        book.poll()
        assert book.lines["decode"] == counted


# Lines of the gap, and those from before the exporter: they are as old as they say.


def test_events_of_the_gap_are_counted_once_and_are_not_of_now(place: Place) -> None:
    place.ended(ago=4000.0)
    place.write_past(RETRACTION.replace("8950", "{n}"), ago=3900.0, times=60, step=6.0)
    for _ in range(2):
        with place.reader() as (_book, watch):
            assert (events(watch), lately(watch, "retraction_events")) == (60, 0)


def test_starts_while_the_exporter_was_down_are_no_restart_loop(place: Place) -> None:
    place.ended(ago=36_000.0)
    place.write_past("server_args={{'tp_size': 1, 'port': {n}}}", ago=35_000.0, times=8, step=4000.0)
    place.write_past(DECODE.replace("usage: 0.97", "usage: 0.40"), ago=1.0)
    with place.reader() as (_book, watch):
        assert watch.server.counted["server_starts"] == 8
        assert "restart_loop" not in {each.diagnosis for each in watch.judge(time.time()).findings}


def test_a_log_read_from_its_start_counts_its_past_and_does_not_judge_by_it(place: Place) -> None:
    place.write_past(RETRACTION.replace("8950", "{n}"), ago=4000.0, times=500, step=6.0)
    place.write_past("Prefill out of memory. Try to lower your batch size.", ago=380.0)
    with place.reader(from_start=True) as (_book, watch):
        assert (events(watch), lately(watch, "retraction_events")) == (500, 0)
        assert lately(watch, "out_of_memory.prefill") == 1


def test_lines_of_one_printed_second_are_of_one_time_whenever_they_are_read(place: Place) -> None:
    """In the zone of the server, and with the clock of the reader moved by hand."""
    watch, now, seen = (
        Watch(PROFILES["online"], 0.0, reads=True, scrapes=False),
        [1_800_000_000.0],
        list[float | None](),
    )
    watch.take_line = lambda event, **_: seen.append(event.time)  # type: ignore[method-assign]
    book = Logbook(config(log_file=(str(place.log),)), watch, LOCK, clock=lambda: now[0])
    book.poll()
    for second, read in ((10, 0.2), (11, 0.0), (12, 0.1), (12, 0.9), (12, 1.6), (13, 0.4), (900, 0.5)):
        now[0] = 1_800_000_000.0 + second + read
        with place.log.open("a") as file:
            file.write(f"[2025-11-20 {11 + second // 900}:40:{second % 60:02}] {DECODE}\n")
        book.poll()
    book.close()
    assert [at and round(at - 1_800_000_000.0, 3) for at in seen] == [
        10.2,
        11.0,
        12.0,
        12.0,
        12.0,
        13.0,
        900.5,
    ]  # the clock was set


def test_a_time_that_a_client_wrote_moves_the_servers_lines_by_a_moment_at_most(place: Place) -> None:
    watch, now, seen = Watch(PROFILES["online"], 0.0, reads=True, scrapes=False), [1_800_000_000.0], list[float]()
    watch.take_line = lambda event, **_: seen.append(now[0] - event.time)  # type: ignore[method-assign]
    book = Logbook(config(log_file=(str(place.log),)), watch, LOCK, clock=lambda: now[0])
    book.poll()
    for second, printed in enumerate((0, 1, 59, 3, 4, 6, 6, 7)):
        now[0] = 1_800_000_000.0 + second
        with place.log.open("a") as file:
            file.write(f"[2025-11-20 11:40:{printed:02}] {DECODE}\n")
        book.poll()
    book.close()
    assert [round(age, 3) for age in seen] == [0, 0, 0, 0, 0, 0, 1, 1]
