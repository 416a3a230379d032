"""What is shown beside the judgement of a server that runs."""

from __future__ import annotations

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.summary import judged_live
from sglang_tuning_exporter.core.text import counted
from sglang_tuning_exporter.core.watch import Watch
from test_core_course import BEGIN, decode, start


def test_a_start_from_before_the_exporter_is_not_shown_beside_a_count_of_no_starts() -> None:
    watch, reader = Watch(PROFILES["online"], BEGIN, reads=True, scrapes=False), Reader()
    watch.recall([event for line in [*start(), decode(12)] for event in reader.read(line.encode())], BEGIN + 15)
    judged = judged_live(watch, watch.judge(BEGIN + 20), BEGIN + 20)
    assert judged.starts[0].time == BEGIN
    assert "starts" not in counted(judged)


def test_a_start_that_the_exporter_saw_is_counted() -> None:
    watch, reader = Watch(PROFILES["online"], BEGIN, reads=True, scrapes=False), Reader()
    for line in start():
        for event in reader.read(line.encode()):
            watch.take(event)
    judged = judged_live(watch, watch.judge(BEGIN + 20), BEGIN + 20)
    assert counted(judged)["starts"] == "1"


def test_lines_that_nobody_counted_are_not_shown_as_none() -> None:
    watch = Watch(PROFILES["online"], BEGIN, reads=True, scrapes=False)
    assert "lines" not in counted(judged_live(watch, watch.judge(BEGIN + 20), BEGIN + 20))
