"""The step time: decode lines in, the line through their steps out, or the reason why there is none."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scenes import recording
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.capacity import Line, Room, StepTime, fit, rooms, step_time
from sglang_tuning_exporter.core.events import Event, Rank
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterable


def lines_of(fixed: float, per_request: float, *, noise: float = 0.0) -> list[Line]:
    """A hundred decode lines with 4 to 12 requests; `noise` is relative."""
    random = Random(f"{fixed} {per_request} {noise}")
    batches = [float(random.randint(4, 12)) for _ in range(100)]
    return [
        (float(at), batch, (fixed + per_request * batch) * (1 + random.uniform(-noise, noise)), 1.0)
        for at, batch in enumerate(batches)
    ]


@given(fixed=st.floats(0.001, 0.1), share=st.floats(0.05, 0.5), noise=st.floats(0.0, 0.05))
@settings(max_examples=60)
def test_a_known_line_is_found_again_within_the_noise(fixed: float, share: float, noise: float) -> None:
    per_request = fixed * share
    step = fit(lines_of(fixed, per_request, noise=noise))
    assert step.seen == (4.0, 12.0)
    assert step.line is not None or noise > 0
    for batch in (4.0, 8.0, 12.0) if step.line is not None else ():
        assert step.at(batch) == pytest.approx(fixed + per_request * batch, rel=noise + 1e-9)


@given(
    st.lists(
        st.tuples(st.floats(0, 600), st.floats(0.5, 5000), st.floats(1e-6, 1e3), st.floats(1, 8)),
        min_size=1,
        max_size=60,
    )
)
def test_any_lines_give_a_step_that_takes_time_and_gives_tokens(lines: list[Line]) -> None:
    step = fit(lines)
    assert (step.line is None) is bool(step.refused)
    for batch in (*step.seen, step.batch):
        seconds, speed = step.at(batch), step.tokens_per_second(batch)
        assert seconds is None or seconds > 0
        assert speed is None or speed > 0


def decode(
    at: float, running: int = 8, *, dp: int | None = None, speed: float = 1000.0, accepted: float | None = None
) -> Event:
    figures = {"running": float(running), "queued": 0.0, "tokens": 5000.0, "usage": 0.5, "throughput": speed}
    return Event("decode", at, Rank(dp), figures | ({} if accepted is None else {"accept_length": accepted}))


def server_of(events: Iterable[Event], **arguments: object) -> Server:
    server = Server(PROFILES["offline"])
    if arguments:
        server.take_line(Event("arguments", 0.0, arguments=arguments))
    for event in events:
        server.take_line(event)
    return server


def speed_of(batch: float) -> float:
    """The generation throughput of a batch at 4 ms + 0.5 ms a request."""
    return batch / (0.004 + 0.0005 * batch)


def known(server: Server, now: float) -> StepTime:
    step = step_time(server, now)
    assert isinstance(step, StepTime), step
    return step


def test_the_decode_lines_of_a_log_give_the_step_time() -> None:
    batches = [4 + block % 9 for block in range(100) for _ in range(3)]
    step = known(
        server_of(decode(2.0 * number, each, speed=speed_of(each)) for number, each in enumerate(batches, 1)), 600.0
    )
    assert step.line == pytest.approx((0.004, 0.0005), rel=0.03)


def test_a_speculative_step_gives_each_request_as_many_tokens_as_the_line_shows() -> None:
    events = (decode(float(at), speed=2000.0, accepted=2.5) for at in range(60, 600))
    step = known(server_of(events, speculative_algorithm="EAGLE"), 600.0)
    assert (step.seconds, step.tokens_per_request) == pytest.approx((0.01, 2.5))
    assert step.tokens_per_second(8.0) == pytest.approx(2000.0)


def test_the_lines_of_all_dp_ranks_give_one_step_time() -> None:
    events = [
        decode(2.0 * block + line, batch, dp=dp, speed=speed_of(batch))
        for block in range(1, 25)
        for dp in range(4)
        for batch in [4 + (block + dp) % 9]
        for line in range(2)
    ]
    server = server_of(sorted(events, key=lambda event: event.time or 0.0), dp_size=4)
    assert known(server, 50.0).line == pytest.approx((0.004, 0.0005), rel=0.03)
    assert len(rooms(server, 50.0)) == 4


# A line's throughput is over all the time since the line before.


def test_a_pause_is_no_part_of_a_step() -> None:
    events = [
        decode(30.0 * burst + second, speed=speed_of(8) if second else 10.0)
        for burst in range(1, 20)
        for second in range(5)
    ]
    assert known(server_of(events), 600.0).seconds == pytest.approx(0.008)


def test_the_prefill_of_another_rank_is_no_part_of_a_step() -> None:
    prompt = {"sequences": 1.0, "tokens": 8000.0, "running": 8.0}
    events = [
        event
        for block in range(1, 20)
        for event in (
            Event("prefill", 30.0 * block - 0.5, Rank(1), prompt),
            *(decode(30.0 * block + second, dp=0, speed=speed_of(8) if second else 10.0) for second in range(29)),
        )
    ]
    server = server_of(events, tp_size=2, dp_size=2, enable_dp_attention=True)
    assert known(server, 600.0).seconds == pytest.approx(0.008)


# Where the step time is not known


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([], "no scheduler was seen"),
        ([Event("prefill", 1.0, Rank(None), {"sequences": 1.0, "tokens": 9.0})], "no decode steps were seen"),
        ([decode(float(at)) for at in range(20)], "decode lines of the last ten minutes show the time of a step"),
    ],
)
def test_a_log_without_enough_steps_says_why(events: list[Event], why: str) -> None:
    step = step_time(server_of(events), 30.0)
    assert isinstance(step, str)
    assert why in step


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("healthy-batch", "hardly varied"),
        ("v0.5.9-retract", "larger batches were not slower"),
        ("ignore-eos-small-pool", "explains 26 % of how the steps differ"),
        ("gpu-small-fraction", "a step without requests would take -41.14 ms"),
    ],
)
def test_lines_of_a_real_server_that_allow_no_line_are_refused_with_the_reason(name: str, why: str) -> None:
    reader, server, last = Reader(), Server(PROFILES["online"]), 0.0
    for line in recording(name).lines:
        for event in reader.read(line.text):
            server.take_line(event)
            last = (server.now or 0.0) if event.kind == "decode" else last
    step = known(server, last)
    assert step.line is None
    assert why in step.refused
    assert step.at(2 * step.seen[1]) is None


# How many requests fit


def test_as_many_requests_fit_as_the_cache_has_room_for() -> None:
    limits = Event("limits", 0.0, figures={"max_total_num_tokens": 10_000.0, "max_running_requests": 64.0})
    (room,) = rooms(server_of([limits, *(decode(float(second)) for second in range(60))]), 60.0)
    assert room.tokens_per_request == pytest.approx(625.0)
    assert room.most_requests == 16


def test_the_running_limit_holds_where_more_would_fit() -> None:
    assert Room(10_000.0, 12.0, 625.0).most_requests == 12
    assert Room(10_000.0, None, 625.0).requests_in(20_000.0) == 32
    assert Room(None, 12.0, None).most_requests is None
