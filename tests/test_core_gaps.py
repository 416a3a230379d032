"""Retracted requests while the log is unreadable: the server's counter takes over, and no request counts twice."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.watch import Watch
from sglang_tuning_exporter.recordings.recording import Recording, load
from sglang_tuning_exporter.recordings.replay import packaged
from sglang_tuning_exporter.sglang.metrics import page_figures
from sglang_tuning_exporter.sglang.metrics.page_figures import Scrape

BEGIN = 1_763_632_800.0


@cache
def recording() -> Recording:
    """Return a real 0.5.23 that retracts."""
    return load(packaged("retract"))


@cache
def page(text: bytes) -> Scrape:
    return page_figures.read(text.decode())


def played(begin: float) -> tuple[list[float], Watch]:
    """Return the retracted requests after each page, with a log that cannot be read from `begin` on."""
    watch, reader = Watch(PROFILES["online"], BEGIN, reads=True, scrapes=True), Reader()
    moments = [(line.at, 0, line.text) for line in recording().lines if line.at < begin]
    moments += [(each.at, 1, each.text) for each in recording().scrapes]
    seen = list[float]()
    for at, is_page, text in sorted(moments, key=lambda moment: moment[:2]):
        if is_page:
            watch.take(page(text), BEGIN + at)
            seen.append(watch.server.counted["retracted"])
        else:
            for event in reader.read(text.rstrip(b"\n")):
                event.time = BEGIN + at
                watch.take(event)
    watch.advance(BEGIN + recording().length_seconds + 60)
    return [*seen, watch.server.counted["retracted"]], watch


@pytest.mark.parametrize("begin", range(0, 150, 30))
def test_after_the_logs_end_the_servers_counter_goes_on_from_there(begin: int) -> None:
    seen, watch = played(float(begin))
    assert seen[-1] == 10
    assert all(now >= before for before, now in pairwise(seen))
    assert dict(watch.doubtful) == {}
