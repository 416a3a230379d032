"""What is shown beside the judgement of a server that runs."""

from __future__ import annotations

import pytest

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.summary import judged_live
from sglang_tuning_exporter.core.text import counted
from sglang_tuning_exporter.core.watch import Watch
from test_core_course import BEGIN, decode, judged, prefill, start


def test_a_start_from_before_the_exporter_is_not_shown_beside_a_count_of_no_starts() -> None:
    watch, reader = Watch(PROFILES["online"], BEGIN, reads=True, scrapes=False), Reader()
    watch.recall([event for line in [*start(), decode(12)] for event in reader.read(line.encode())], BEGIN + 15)
    judged = judged_live(watch, watch.judge(BEGIN + 20), BEGIN + 20)
    assert judged.starts[0].time == BEGIN
    assert "starts" not in counted(judged)


def test_lines_that_nobody_counted_are_not_shown_as_none() -> None:
    watch = Watch(PROFILES["online"], BEGIN, reads=True, scrapes=False)
    assert "lines" not in counted(judged_live(watch, watch.judge(BEGIN + 20), BEGIN + 20))


def test_tokens_a_second_are_over_the_prefill_between_the_decode_lines_too() -> None:
    lines = []
    for begin in range(20, 140, 20):  # ten seconds of each
        lines += [decode(begin + second, throughput=1200) for second in range(0, 10, 2)]
        lines += [prefill(begin + second, 8192, 0, queue=4) for second in range(10, 20)]
    [began] = judged([*start(), *lines]).starts
    assert began.figures["generated_tokens_per_second"] == pytest.approx(600, rel=0.1)
