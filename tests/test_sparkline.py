"""A figure's last quarter of an hour as a picture: any points in, a well-formed drawing inside its box out."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tuning_exporter.serve.pages.chart import SPARK, sparkline
from sglang_tuning_exporter.state.history import LENGTH_SECONDS, STEP_SECONDS

WORDS = "Queued requests"
WIDTH, HEIGHT, MARGIN = SPARK.width, SPARK.height, SPARK.margin
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
VALUES = st.none() | st.floats() | st.floats(0, 1) | st.integers(0, 3000).map(float)
POINTS = st.lists(st.tuples(st.floats(-1000, 0.5), VALUES), max_size=30).map(
    lambda points: sorted(points, key=lambda p: p[0])
)
BOUNDS = st.none() | st.floats(0, 1e9)
BANDS = st.tuples(BOUNDS, BOUNDS)


def drawn(points: list[tuple[float, float | None]], **how: object) -> ET.Element:
    return ET.fromstring(sparkline(points, WORDS, **how))  # type: ignore[arg-type]  # the tests name arguments of their own


def steps(*values: float | None) -> list[tuple[float, float | None]]:
    """Values five seconds apart, the last of them now."""
    return [(STEP_SECONDS * (place - len(values) + 1), value) for place, value in enumerate(values)]


def paths(picture: ET.Element, kind: str) -> list[list[tuple[float, float]]]:
    """The corners of each path of a kind."""
    found = []
    for path in picture.iter("path"):
        if path.get("class") == kind:
            numbers = [float(number) for number in NUMBER.findall(path.attrib["d"])]
            found.append(list(zip(numbers[::2], numbers[1::2], strict=True)))
    return found


@given(POINTS, BANDS, st.floats(0, 1e9), st.booleans())
def test_any_points_give_a_drawing_inside_its_box(
    points: list[tuple[float, float | None]],
    band: tuple[float | None, float | None],
    least: float,
    bars: bool,  # noqa: FBT001 - hypothesis gives it by name
) -> None:
    text = sparkline(points, WORDS, band=band, least=least, bars=bars)
    if not text:
        return
    assert not re.search("nan|inf", text)
    picture = ET.fromstring(text)
    assert picture.get("viewBox") == f"0 0 {WIDTH} {HEIGHT}"
    for element in picture.iter():
        if (path := element.get("d")) is not None:
            assert re.fullmatch(r"M[\d.]+ [\d.]+(?:[LHV][\d.]+(?: [\d.]+)?|h0)*", path)
        if element.tag == "rect":
            at, size = float(element.attrib["y"]), float(element.attrib["height"])
            assert 0 <= at <= at + size <= HEIGHT
    for corners in paths(picture, "line"):
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in corners)


@given(POINTS)
def test_there_is_a_drawing_exactly_where_a_figure_is_known(points: list[tuple[float, float | None]]) -> None:
    is_drawn = any(value is not None and abs(value) < inf and at >= -LENGTH_SECONDS for at, value in points)
    assert bool(sparkline(points, WORDS)) is is_drawn


@given(st.text())
def test_any_words_are_the_drawing_s_title(words: str) -> None:
    drawing = sparkline(steps(1, 2), words)
    title = re.fullmatch(r'<svg [^<>]*role="img"[^<>]*><title>([^<>]*)</title><path [^<>]*/></svg>', drawing, re.DOTALL)
    assert title is not None


def test_hostile_words_make_no_element() -> None:
    drawing = sparkline(steps(1), '</title><script>alert("x")</script>')
    assert "<script" not in drawing
    assert ET.fromstring(drawing).findtext("title") == '</title><script>alert("x")</script>'


def test_the_line_breaks_where_a_figure_is_missing() -> None:
    before, after = paths(drawn(steps(1, 2, None, 3, 4)), "line")
    assert (len(before), len(after)) == (2, 2)
    assert before[-1][0] < after[0][0]


def test_the_line_breaks_where_the_exporter_did_not_run() -> None:
    assert len(paths(drawn([(-300, 1), (-295, 1), (-20, 1), (-15, 1)]), "line")) == 2


def test_a_late_step_breaks_no_line() -> None:
    assert len(paths(drawn([(-30, 1), (-18, 1), (0, 1)]), "line")) == 1


def test_a_single_moment_is_drawn_as_a_dot() -> None:
    (dot,) = drawn(steps(None, 5)).iter("path")
    assert dot.get("class") == "dot"


def test_a_value_that_is_not_a_number_is_not_shown() -> None:
    assert len(paths(drawn(steps(1, 2, nan, 3, 4, inf, 5, 6)), "line")) == 3
    assert sparkline(steps(nan, inf, -inf), WORDS) == ""


def test_now_is_at_the_right_edge_and_a_quarter_of_an_hour_ago_at_the_left() -> None:
    (line,) = paths(drawn([(-LENGTH_SECONDS + 10 * place, 1.0) for place in range(91)]), "line")
    assert (line[0][0], line[-1][0]) == (MARGIN, WIDTH - MARGIN)


def test_larger_values_are_higher_and_the_largest_touches_the_top() -> None:
    ((low, middle, high),) = paths(drawn(steps(0, 50, 100)), "line")
    assert (low[1], middle[1], high[1]) == (HEIGHT - MARGIN, HEIGHT / 2, MARGIN)


def test_the_scale_is_at_least_as_high_as_requested() -> None:
    ((_, half),) = paths(drawn(steps(0, 0.5), least=1.0), "line")
    assert half[1] == HEIGHT / 2


def test_constant_zero_is_a_line_along_the_bottom() -> None:
    (line,) = paths(drawn(steps(0, 0, 0)), "line")
    assert {y for _, y in line} == {HEIGHT - MARGIN}


@pytest.mark.parametrize(
    ("band", "values", "share"),
    [
        ((0.9, None), (0.2, 1.0), (0.9, 1.0)),
        ((None, 50), (0, 100), (0, 0.5)),
        ((25, 50), (0, 100), (0.25, 0.5)),
        ((100, 2000), (0, 150), (100 / 150, 1.0)),  # its far end is off the scale
        ((100, 2000), (0, 80), (1.0, 1.0)),  # the scale ends where it begins: too little all the time
        ((100, 2000), (0, 3), (1.0, 1.0)),  # far off: the line is not pressed to the bottom for its sake
    ],
)
def test_the_band_covers_what_is_healthy(
    band: tuple[float | None, float | None], values: tuple[float, ...], share: tuple[float, float]
) -> None:
    (rect,) = drawn(steps(*values), band=band).iter("rect")
    upper = float(rect.attrib["y"])
    ends = (upper + float(rect.attrib["height"]), upper)
    assert [(HEIGHT - MARGIN - end) / (HEIGHT - 2 * MARGIN) for end in ends] == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(("highest", "height"), [(80, 0.8), (3, 1.0)])
def test_a_bound_is_on_the_scale_only_where_the_line_comes_near_it(highest: float, height: float) -> None:
    ((_, end),) = paths(drawn(steps(0, highest), band=(100, 2000)), "line")
    assert (HEIGHT - MARGIN - end[1]) / (HEIGHT - 2 * MARGIN) == pytest.approx(height)


def test_points_older_than_the_drawing_are_left_out() -> None:
    (line,) = paths(drawn([(-LENGTH_SECONDS - 5, 1000), (-5, 1), (0, 2)]), "line")
    assert len(line) == 2
    assert line[-1][1] == MARGIN


def test_marks_stand_where_something_happened_and_on_a_base() -> None:
    picture = drawn(steps(0, 3, 0, 6), bars=True)
    assert [path.get("class") for path in picture.iter("path")] == ["mark", "mark", "base"]
    ends = [NUMBER.findall(path.attrib["d"])[-1] for path in picture.iter("path") if path.get("class") == "mark"]
    assert [float(end) for end in ends] == [HEIGHT / 2, MARGIN]
