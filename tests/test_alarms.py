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
