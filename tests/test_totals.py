"""Seconds and integrals are the same whether added at once or one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

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
