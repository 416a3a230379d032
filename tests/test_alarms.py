"""When alerts of a past log would have been sent: the events that are rare in a recording."""

from __future__ import annotations

import pytest

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.course import Course
from sglang_tuning_exporter.core.findings import Alert
from sglang_tuning_exporter.core.lines import Reader
from test_core_course import BEGIN, decode, load, retraction, stamp, start
from test_core_watch import CRASH, Beside

HOUR = 3600.0


def alerts(*lines: str, end: float, profile: str = "online") -> list[Alert]:
    """The alerts of a log whose last line, with or without an event, is of `end`."""
    reader, course = Reader(), Course(PROFILES[profile])
    for line in lines:
        for event in reader.read(line.encode()):
            course.take(event)
    return list(course.end(BEGIN + end).alerts)


def merged(*parts: list[str]) -> list[str]:
    return sorted((line for part in parts for line in part), key=lambda line: line[:21])


def test_retractions_that_go_on_are_notified_and_one_burst_is_not() -> None:
    busy = load(20, 1200, every=5, usage=0.97, queue=3)
    often = [retraction(at) for at in range(20, 1200, 20)]
    burst = [retraction(300 + at) for at in range(5)]
    found, none = (alerts(*start(), *merged(busy, each), end=1220) for each in (often, burst))
    assert "SGLangRetractingTooOften" in [each.alert for each in found]
    assert "SGLangRetractingTooOften" not in [each.alert for each in none]


@pytest.mark.parametrize(("starts", "fires"), [((0, 600), False), ((0, 600, 1100), True), ((0, 1500, 3000), False)])
def test_three_starts_in_half_an_hour_are_a_loop(starts: tuple[float, ...], *, fires: bool) -> None:
    lines = [line for at in starts for line in start(at)]
    assert ("SGLangRestartLoop" in [each.alert for each in alerts(*lines, end=HOUR)]) is fires


def test_a_loop_is_over_half_an_hour_after_its_first_start_and_its_wait() -> None:
    lines = [line for at in (0, 600, 1100) for line in start(at)]
    (loop,) = [each for each in alerts(*lines, end=2 * HOUR) if each.alert == "SGLangRestartLoop"]
    assert loop.until is not None
    assert 1800 <= loop.until - BEGIN <= 2700


def test_a_reserve_that_is_too_small_is_notified_after_ten_minutes_for_as_long_as_the_server_runs() -> None:
    (found,) = alerts(*start(left=2.5), *load(20, 2 * HOUR, every=60, running=4), end=2 * HOUR)
    assert (found.alert, found.until) == ("SGLangMemoryReserveTooSmall", None)
    assert found.at - BEGIN == pytest.approx(600, abs=60)


def fires(beside: Beside, name: str, at: float) -> bool | None:
    beside.judge(at)
    return beside.watch.clocks.by_row[name].value


def test_a_crash_is_not_over_while_the_server_is_dead_and_is_ten_minutes_after_it_is_back() -> None:
    beside = Beside()
    beside.lines(*start(), *(decode(at) for at in range(20, 300, 5)))
    for at in range(20, 300, 10):
        beside.scrape(at, running=4.0)
        beside.judge(at)
    beside.lines(f"{stamp(300)}{CRASH}")
    dead = []
    for at in range(300, 7500, 30):
        beside.watch.lose("refused", "connection refused", BEGIN + at)
        dead.append(fires(beside, "crashed", at))
    assert dead[2:] == [True] * len(dead[2:])  # two hours, far longer than the ten minutes that are judged
    beside.lines(*start(7500))
    alive = []
    for at in range(7530, 9300, 10):
        beside.scrape(at, running=4.0)
        alive.append(fires(beside, "crashed", at))
    assert (alive[0], alive[-1]) == (True, False)
    assert alive == sorted(alive, key=bool, reverse=True)


def test_a_failure_with_minutes_of_other_lines_behind_it_is_notified() -> None:
    failure = [
        f"{stamp(300)}Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/srv/sglang/model_runner.py", line 2100, in forward_extend',
        "    return self.model.forward(batch)",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.75 GiB. GPU 0 has a total capacity of 79.11 GiB.",
    ]
    lines = [*start(), *load(20, 280, every=5), *failure]
    found = {each.alert: each.at - BEGIN for each in alerts(*lines, end=1500)}
    assert found["SGLangOutOfMemoryPrefill"] == 300
