"""What several ranks print of one event is counted once, and nothing else is taken for the same event."""

from __future__ import annotations

from test_core_course import judged, load, retraction, stamp, start

FAILED = "Decode out of memory. Try to lower your batch size."


def count(name: str, *lines: str) -> float:
    return judged([*start(tp_size=8), *load(20, 60), *lines]).counts[name]


def test_the_same_figures_a_minute_later_are_another_event() -> None:
    assert count("retraction_events", *(retraction(at, ranks="TP0") for at in (30, 59))) == 2


def test_a_failure_that_eight_ranks_print_is_one() -> None:
    assert count("out_of_memory.decode", *(f"{stamp(50, f'TP{rank}')}{FAILED}" for rank in range(8))) == 1


def test_two_phases_are_two_failures() -> None:
    lines = [f"{stamp(50, 'TP0')}{FAILED}", f"{stamp(51, 'TP0')}{FAILED.replace('Decode', 'Prefill')}"]
    assert count("out_of_memory.prefill", *lines) == count("out_of_memory.decode", *lines) == 1
