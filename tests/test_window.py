"""Totals and their differences over the last minutes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tuning_exporter.state.totals import STEP_SECONDS, AdmissionRate, Totals, Window, batch_size_bucket


def serving(seconds: float) -> Totals:
    totals = Totals()
    totals.seconds["activity", "serving"] = seconds
    return totals


def test_the_window_gives_what_came_in_its_length() -> None:
    window, totals = Window(600.0), Totals()
    for now in range(0, 2000, 10):
        totals.seconds["activity", "serving"] = float(now)
        window.mark(now, totals)
    assert window.recent(1990.0, totals).seconds["activity", "serving"] == 600.0


def test_a_shorter_look_back_can_be_asked_for() -> None:
    window, totals = Window(600.0), Totals()
    for now in range(0, 1000, 10):
        totals.seconds["activity", "serving"] = float(now)
        window.mark(now, totals)
    assert window.recent(990.0, totals, 120.0).seconds["activity", "serving"] == 120.0


def test_before_a_whole_window_has_passed_everything_is_recent() -> None:
    window = Window(600.0)
    window.mark(0.0, Totals())
    assert window.recent(50.0, serving(50.0)).seconds["activity", "serving"] == 50.0


def test_the_window_keeps_a_bounded_number_of_marks_however_often_it_is_offered_one() -> None:
    window = Window(600.0)
    for tenth in range(100_000):
        window.mark(tenth / 10, Totals())
    assert len(window._marks) <= 600 / STEP_SECONDS + 2


def test_a_mark_is_a_copy() -> None:
    window, totals = Window(10.0), serving(1.0)
    window.mark(0.0, totals)
    totals.seconds["activity", "serving"] = 5.0
    assert window.recent(10.0, totals).seconds["activity", "serving"] == 4.0


def test_time_that_goes_backwards_adds_no_mark() -> None:
    window = Window(600.0)
    window.mark(100.0, serving(1.0))
    window.mark(50.0, serving(9.0))
    assert len(window._marks) == 1


def test_serving_time_leaves_idle_and_unknown_out() -> None:
    totals = serving(7.0)
    totals.seconds["activity", "idle"] = 100.0
    totals.seconds["activity", "unknown"] = 100.0
    assert totals.serving_seconds() == 7.0


def test_a_share_is_of_the_signals_own_serving_time() -> None:
    totals = Totals()
    totals.seconds["queue", "empty"], totals.seconds["queue", "in_range"], totals.seconds["queue", "idle"] = (
        3.0,
        1.0,
        9.0,
    )
    assert totals.share("queue", "empty") == 0.75


def test_there_is_no_share_without_serving_time() -> None:
    assert Totals().share("queue", "empty") is None


def test_there_is_no_mean_of_a_figure_that_was_never_known() -> None:
    assert Totals().mean("usage") is None


def test_there_is_no_coverage_without_decode_batches() -> None:
    assert Totals().coverage is None


def test_coverage_is_the_share_of_batches_that_replayed_a_graph() -> None:
    totals = Totals()
    totals.counts["replayed"], totals.counts["eager"] = 3, 1
    assert totals.coverage == 0.75


def test_a_batch_size_quantile_is_weighted_by_time() -> None:
    totals = Totals()
    totals.running_seconds[4], totals.running_seconds[200] = 98.0, 2.0
    assert (totals.running_quantile(0.5), totals.running_quantile(0.99)) == (4, 200)


def test_there_is_no_batch_size_quantile_without_batches() -> None:
    assert Totals().running_quantile(0.5) is None


@given(st.floats(0, 1e9))
def test_a_remembered_batch_size_is_never_below_the_real_one_until_the_largest(size: float) -> None:
    bucket = batch_size_bucket(size)
    assert min(int(size), 1 << 16) <= bucket <= int(size) + 8


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=2))
def test_a_sum_minus_one_part_is_the_other_part(seconds: list[float]) -> None:
    first, second = (serving(each) for each in seconds)
    assert ((first + second) - first).seconds["activity", "serving"] == pytest.approx(seconds[1], abs=1e-6)


def test_the_admission_rate_is_unknown_until_ten_seconds_were_watched() -> None:
    rate = AdmissionRate()
    rate.add(0.0, 5)
    assert (rate.per_second(9.0), rate.per_second(10.0)) == (None, 0.5)


def test_the_admission_rate_forgets_what_is_older_than_a_minute() -> None:
    rate = AdmissionRate()
    rate.add(0.0, 600)
    rate.add(100.0, 6)
    assert rate.per_second(110.0) == 0.1
