"""Figures over time: a fixed number of buckets, whatever the length of the log."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tuning_exporter.report.series import Series


def filled(length: int, limit: int = 8) -> Series:
    series = Series(1000.0, limit)
    for second in range(length):
        series.at(1000.0 + second).add("queued", float(second), 1.0)
    return series


def test_a_full_series_doubles_the_width_of_its_buckets() -> None:
    assert [(filled(length).width, len(filled(length))) for length in (8, 9, 16, 17, 100)] == [
        (1, 8), (2, 5), (2, 8), (4, 5), (16, 7),
    ]  # fmt: skip


def test_a_bucket_keeps_lowest_mean_and_highest() -> None:
    first = filled(16).line("queued")[0]
    assert (first.at, first.low, first.mean, first.high) == (1.0, 0.0, 0.5, 1.0)


def test_a_mean_is_weighted_by_time() -> None:
    series = Series(0.0)
    series.at(0.0).add("usage", 1.0, 9.0)
    series.at(0.0).add("usage", 0.0, 1.0)
    assert series.line("usage")[0].mean == pytest.approx(0.9)


def test_an_unknown_figure_has_no_points_and_leaves_a_gap() -> None:
    series = Series(0.0)
    series.at(0.0).add("queued", 1.0, 1.0)
    series.at(100.0).add("queued", 1.0, 1.0)
    assert [point.at for point in series.line("queued")] == [0.5, 100.5]
    assert series.line("throughput") == series.coverage() == series.retractions() == []


@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=60).map(sorted), st.integers(2, 50))
def test_nothing_is_lost_and_memory_is_bounded(moments: list[float], limit: int) -> None:
    series = Series(0.0, limit)
    for number, moment in enumerate(moments):
        bucket = series.at(moment)
        bucket.add("queued", float(number), 1.0)
        bucket.retractions += 1
    assert len(series) <= limit
    assert sum(point.mean for point in series.retractions()) == len(moments)
    assert min(point.low for point in series.line("queued")) == 0
    assert max(point.high for point in series.line("queued")) == len(moments) - 1
