"""Seconds and integrals are the same whether added at once or one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_tuning_exporter.report.runs import Sightings
from sglang_tuning_exporter.sglang.events import NO_RANK, DecodeBatch
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState
from sglang_tuning_exporter.state.signals import ALL_IDLE, ALL_UNKNOWN, SIGNALS, STATES
from sglang_tuning_exporter.state.totals import Snapshot, Totals

# Whole seconds and quarters: their sums are exact in any order.
FIGURES = st.one_of(st.none(), st.integers(0, 400).map(float))
SERVING = st.tuples(st.just("serving"), *(st.sampled_from(STATES[signal]) for signal in SIGNALS[1:]))
HELD = st.tuples(st.one_of(SERVING, st.sampled_from([ALL_IDLE, ALL_UNKNOWN])), FIGURES, FIGURES, FIGURES)
SPANS = st.lists(st.tuples(st.integers(0, 240).map(lambda quarters: quarters / 4), HELD), max_size=30)


@given(SPANS)
def test_seconds_settled_one_by_one_are_those_settled_together(spans: list[tuple[float, Snapshot]]) -> None:
    together, one_by_one = Totals(), Totals()
    for span in spans:
        together.pending.append(span)
        one_by_one.pending.append(span)
        one_by_one.settle()
    assert one_by_one.seconds == together.seconds
    assert one_by_one.running_seconds == together.running_seconds
    assert one_by_one.integrals == together.integrals


def seen(state: ServerState, at: float, running: int, queued: int) -> None:
    state.advance(at)
    state.observe(DecodeBatch(at, NO_RANK, running=running, queued=queued, tokens=10, full_usage=0.1), at)


def test_a_state_was_first_and_last_seen_when_any_combination_had_it() -> None:
    state, sightings = ServerState(PROFILES["online"], 0.0), Sightings()
    for at, queued in ((1.0, 0), (2.0, 3), (3.0, 0)):
        seen(state, at, 4, queued)
        sightings.see_states(None, state.ranks[None].time.snapshot[0], at)
    assert sightings.last(("activity", "serving")) == 3.0
    assert sightings.last(("queue", "in_range")) == 2.0
    assert sightings.last(("queue", "empty")) == 3.0
    seen(state, 4.0, 4, 3)
    sightings.see_states(None, state.ranks[None].time.snapshot[0], 4.0)
    assert sightings.last(("queue", "in_range")) == 4.0
    assert sightings.last(("queue", "empty")) == 3.0
    assert sightings.last(("queue", "above_range")) is None


def test_a_state_before_another_line_of_the_same_time_held_for_no_time() -> None:
    state, sightings = ServerState(PROFILES["online"], 0.0), Sightings()
    for at, queued in ((1.0, 3), (2.0, 3), (2.0, 0)):
        seen(state, at, 4, queued)
        sightings.see_states(None, state.ranks[None].time.snapshot[0], at)
    assert sightings.last(("queue", "in_range")) == 1.0
    assert sightings.last(("queue", "empty")) == 2.0
