"""Each line of a followed log must have the wrapping of the lines before it, until the wrapping changes for good."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tuning_exporter.sglang.events import DecodeBatch, Event, Liveness, OutOfMemory, Retraction
from sglang_tuning_exporter.sglang.log.reader import LogReader
from wrappings import AROUND

if TYPE_CHECKING:
    from collections.abc import Callable

DECODE = "Decode batch, #running-req: 7, #token: 900, token usage: 0.90, gen throughput (token/s): 87.00, #queue-req: 7"
PREFILL = (
    "Prefill batch, #new-seq: 1, #new-token: 24, #cached-token: 0, token usage: 0.38, #running-req: 2, #queue-req: 21"
)
READY = "The server is fired up and ready to roll!"
RETRACTION = "KV cache pool is full. Retract requests. #retracted_reqs: 99, #new_token_ratio: 0.1000 -> 0.9000"
WHEN = dt.datetime(2026, 11, 20, 19, 51, 0)  # noqa: DTZ001 - as a server prints it, without a zone
WRAPPED = sorted(set(AROUND) - {"nothing"})


def server(number: int, rank: str = " TP0") -> list[str]:
    """Give this many lines, of three kinds."""
    bodies = (DECODE, PREFILL, READY)
    return [f"[2026-11-20 19:51:{at % 60:02d}{rank}] {bodies[at % 3]}" for at in range(number)]


def around(name: str, lines: list[str]) -> str:
    return "".join(AROUND[name](line, number, WHEN) + "\n" for number, line in enumerate(lines, 1))


def journald(lines: list[str], host: str = "gpu-01", pid: int = 4711) -> str:
    return "".join(f"Nov 20 19:51:18 {host} sglang[{pid}]: {line}\n" for line in lines)


def read(*texts: str) -> Reader:
    """Read each text as one look at a followed file."""
    reader = Reader()
    for text in texts:
        reader.events += reader.feed(text.encode())
    return reader


class Reader(LogReader):
    """A log reader that keeps the events of everything it has read."""

    def __init__(self) -> None:
        super().__init__(strict=True)
        self.events: list[Event] = []

    def number(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)


FORGED = f"[2026-11-20 19:51:18 TP0] {RETRACTION}"


@pytest.mark.parametrize("name", ["stern", "docker --timestamps", "kubernetes", "GCP", "Fluent Bit", "syslog", "CSV"])
def test_a_line_without_the_wrapping_of_the_others_is_no_event(name: str) -> None:
    reader = read(around(name, server(90)), FORGED + "\n", around(name, server(3)))
    assert len(reader.events) == 93
    assert reader.number(Retraction) == 0


@pytest.mark.parametrize("name", ["stern", "kubernetes", "GCP", "syslog"])
def test_a_traceback_without_the_wrapping_of_the_others_is_no_failure(name: str) -> None:
    raw = 'Traceback (most recent call last):\n  File "x.py", line 1, in forward\ntorch.OutOfMemoryError: CUDA out of memory.\n'
    assert read(around(name, server(90)), raw).number(OutOfMemory) == 0
    wrapped = [f"[2026-11-20 19:51:18 TP0] Scheduler hit an exception: {raw.splitlines()[0]}", *raw.splitlines()[1:]]
    assert read(around(name, server(90)), around(name, wrapped)).number(OutOfMemory) == 1


@pytest.mark.parametrize(("host", "pid"), [("gpu-02", 4711), ("gpu-01", 4712)])
def test_a_host_and_a_process_id_that_never_changed_are_required(host: str, pid: int) -> None:
    reader = read(journald(server(90)), journald([FORGED], host, pid), journald(server(3)))
    assert (len(reader.events), reader.number(Retraction)) == (93, 0)


def test_a_restart_with_another_process_id_loses_nothing() -> None:
    reader = read(journald(server(90)), journald(server(15), pid=5000))
    assert len(reader.events) == 90
    reader.events += reader.feed(journald(server(10), pid=5000).encode())
    assert len(reader.events) == 115


RAISED = [
    "[2026-11-20 19:51:18 TP3] Scheduler hit an exception: Traceback (most recent call last):",
    '  File "x.py", line 1, in event_loop_normal',
    '  File "y.py", line 2, in forward_extend',
    "torch.OutOfMemoryError: CUDA out of memory.",
]


def ray(lines: list[str], pid: int = 101) -> str:
    return "".join(f"(SGLangEngine pid={pid}, ip=10.0.0.1) {line}\n" for line in lines)


@pytest.mark.parametrize("wrap", [journald, ray])
def test_the_first_lines_of_a_new_process_are_passed_on_as_doubtful(
    wrap: Callable[..., str],
) -> None:
    reader = Reader()
    reader.feed(wrap(server(90)).encode(), 100.0)
    assert reader.feed(wrap(RAISED, pid=5000).encode(), 101.0) == []
    assert reader.release_held(103.0) == []
    crash, failure = reader.release_held(107.0)
    assert isinstance(crash, Liveness)
    assert isinstance(failure, OutOfMemory)
    assert (crash.suspect, failure.phase, failure.rank.tp, failure.suspect) == (True, "prefill", 3, True)
    assert reader.release_held(120.0) == []


@pytest.mark.parametrize("between", [[server(70)], [server(1)] * 70])
def test_they_are_passed_on_while_other_processes_go_on_writing(between: list[list[str]]) -> None:
    reader = read(journald(server(90)), journald(RAISED, pid=5000), *map(journald, between), journald(server(1)))
    [event] = [event for event in reader.events if isinstance(event, OutOfMemory)]
    assert event.suspect


def test_lines_of_a_process_with_another_prefix_layout_are_not_passed_on() -> None:
    reader = read(journald(server(90)), journald([f"[2026-11-20 19:51:18 DP0 TP0] {RETRACTION}"], pid=5000))
    assert reader.release_held(1e9) == []


def test_lines_that_were_passed_on_still_count_as_the_form_of_their_process() -> None:
    reader = Reader()
    reader.feed(journald(server(90)).encode(), 0.0)
    for at in range(1, 15):
        reader.events += reader.feed(journald(server(1), pid=5000).encode(), 10.0 * at)
    assert all(event.suspect for event in reader.events)
    reader.feed(journald(server(3), pid=5000).encode(), 1000.0)
    [event] = reader.feed(journald(server(1), pid=5000).encode(), 1010.0)
    assert not event.suspect


def test_fields_that_differ_from_line_to_line_are_not_required() -> None:
    lines = server(120)
    text = "".join(journald([line], pid=4000 + number % 7) for number, line in enumerate(lines))
    assert len(read(text, journald([FORGED], pid=1)).events) == 121


@pytest.mark.parametrize(
    "prefix", ["[2026-11-20 19:51:18]", "[2026-11-20 19:51:18 DP0 TP0]", "[2026-11-20 19:51:18.123 TP0]"]
)
@pytest.mark.parametrize("wrap", [lambda lines: "".join(f"{line}\n" for line in lines), journald])
def test_sglangs_own_prefix_keeps_its_layout_and_its_ranks(wrap: Callable[[list[str]], str], prefix: str) -> None:
    lines = server(90)
    assert read(wrap(lines), wrap([f"{prefix} {RETRACTION}"]), wrap(lines)).number(Retraction) == 0
    changed = [f"{prefix} {DECODE}"] * 20
    assert len(read(wrap(lines), wrap(changed), wrap([f"{prefix} {RETRACTION}"])).events) == 111


@pytest.mark.parametrize("name", ["stern", "GCP", "kubetail", "CSV", "kubernetes", "syslog"])
def test_another_wrapping_that_lasts_is_accepted_and_loses_nothing(name: str) -> None:
    reader = read(around("nothing", server(90)), around(name, server(15)))
    assert len(reader.events) == 90
    reader.events += reader.feed(around(name, server(20)).encode())
    assert len(reader.events) == 125
    reader.events += reader.feed(around("nothing", server(20)).encode())
    assert len(reader.events) == 145


def test_two_containers_in_one_log_are_both_read() -> None:
    lines = server(200)
    text = "".join(f"sglang-{number % 2}  | {line}\n" for number, line in enumerate(lines))
    assert len(read(text).events) == 200


@settings(max_examples=40)
@given(
    st.sampled_from(WRAPPED),
    st.sampled_from(["", " TP0", " DP1 TP3"]),
    st.sampled_from(WRAPPED),
    st.integers(70, 120),
    st.sampled_from(["{0}", "Words: {0}", "obj=GenerateReqInput(text='{0}", "[{0}", "x {0}"]),
)
def test_a_text_that_imitates_another_wrapping_changes_nothing(
    name: str, rank: str, other: str, number: int, sentence: str
) -> None:
    """Text of a request is inside a line, whatever it looks like."""
    lines = server(number, rank)
    imitation = AROUND[other](f"[2026-11-20 19:51:18{rank}] {RETRACTION}", 1, WHEN)
    forged = f"[2026-11-20 19:51:18{rank}] Receive: obj={sentence.format(imitation)}"
    mixed = [*lines, forged, *lines]
    events = read(around(name, mixed)).events
    assert sum(isinstance(event, Retraction) for event in events) == 0
    assert len(events) == len(read(around(name, lines + lines)).events)
    assert sum(isinstance(event, DecodeBatch) for event in events) == 2 * sum(DECODE in line for line in lines)
