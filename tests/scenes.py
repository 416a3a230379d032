"""Servers in typical situations for the exporter's page: the real exporter runs through some minutes, then its clock stops.

The lines, scrapes and clocks are those of `situations` and `hours`, or a recording's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import hours
from conftest import config
from hours import Moment, Story, Timed
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.recordings.recording import load
from sglang_tuning_exporter.recordings.replay import packaged
from situations import CLIENTS, HEALTHY, STARTED, STORM, Load, hour

RECORDINGS = Path(__file__).parent / "recordings"
MINUTES = 15.0


@contextmanager
def lived(story: Story, directory: Path) -> Iterator[Sidecar]:
    """The exporter after a story. Its clock stands at the end."""
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "server.log"
    log.touch()
    moments = iter(story.moments)
    first = next(moments)
    url = "http://127.0.0.1:9" if story.scraped else None
    exporter = Timed(config(sglang_url=url, log_file=(str(log),), profile=story.profile), first.at)
    for moment in (first, *moments):
        exporter.pass_on(story, moment, log)
    exporter.running = True
    try:
        yield exporter
    finally:
        exporter.stop()


def invented(plan: Callable[[float], Load | None], minutes: float = MINUTES) -> Iterator[Moment]:
    """Minutes of the server of `situations` under a plan."""
    return hour(plan, end=time.time(), minutes=minutes, every=10.0)


def _growing(load: Load, share: float) -> Load:
    """Between a healthy load and this one."""
    part = min(1.0, share)

    def between(name: str) -> float:
        low, high = (float(getattr(end, name)) for end in (HEALTHY, load))
        return low + part * (high - low)

    names = ("running", "queued", "usage", "generated", "first", "between", "waited", "retractions")
    return replace(load, rejected=0.0, **{name: between(name) for name in names})


def retracting() -> Story:
    """A rate of retractions that has grown for eight minutes."""
    return Story("retracting", invented(lambda minute: _growing(STORM, max(0.0, minute - 7) / 3)))


def recorded() -> Story:
    """The packaged recording of a real server that retracts, at the end of its load."""
    return Story("recorded", hours.recorded(load(packaged("retract")), end=time.time()), profile="offline")


def healthy() -> Story:
    """Fifteen healthy minutes."""
    return Story("healthy", invented(lambda _: HEALTHY))


def idle() -> Story:
    """A server without a request for all the time."""
    nothing = Load(running=0, queued=0, usage=0, generated=0, arriving=0, first=0.1, between=1e9)
    started = b"".join(STARTED)
    silent = (
        replace(moment, lines=started if place == 0 else b"")
        for place, moment in enumerate(invented(lambda _: nothing))
    )
    return Story("idle", silent)


def new() -> Story:
    """A server that was first scraped ten seconds ago."""
    return Story("new", invented(lambda _: HEALTHY, minutes=1 / 6))


def unseen() -> Story:
    """A log without a line so far, and no metrics."""
    return Story("unseen", [Moment(time.time(), b"", None)], scraped=False)


def down() -> Story:
    """A healthy server that has not answered for two minutes."""
    return Story("down", invented(lambda minute: HEALTHY if minute < MINUTES - 2 else None))


def stuck() -> Story:
    """A server whose scheduler has hung for five minutes: its log is silent and its page does not change."""
    moments: list[Moment] = []
    for moment in invented(lambda minute: replace(HEALTHY, queued=7) if minute < MINUTES - 5 else None):
        moments.append(moment if moment.page is not None else Moment(moment.at, b"", moments[-1].page))
    return Story("stuck", moments)


def few_clients() -> Story:
    """A server for throughput whose client sends too little."""
    return Story("few_clients", invented(lambda _: CLIENTS), profile="offline")


def beyond_captured() -> Story:
    """Batches beyond the largest captured graph, and GPU memory to give away."""
    busy = replace(HEALTHY, running=430, usage=0.93, generated=9400)
    swaps = (
        ("cuda graph: True", "cuda graph: False"),
        ('mode="decode_cuda_graph"', 'mode="decode_none"'),
        ("9.87", "18.42"),
        ("11.93", "20.48"),
    )

    def swapped(text: str) -> str:
        for old, new in swaps:
            text = text.replace(old, new)
        return text

    moments = (
        Moment(moment.at, swapped(moment.lines.decode()).encode(), moment.page and swapped(moment.page))
        for moment in invented(lambda _: busy)
    )
    return Story("beyond_captured", moments)


def dp2() -> Story:
    """Two data-parallel ranks, recorded."""
    return Story("dp2", hours.recorded(load(RECORDINGS / "dp2"), end=time.time()))


SCENES: dict[str, Callable[[], Story]] = {
    story.__name__: story
    for story in (retracting, recorded, healthy, idle, new, unseen, down, stuck, few_clients, beyond_captured, dp2)
}
