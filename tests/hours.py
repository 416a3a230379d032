"""Hours of metrics for a real Prometheus: recordings and written situations, run through the real exporter with a simulated clock.

From the log file on disk to the exposition everything is the real exporter, except its clock. Its answer to each scrape is
written, with the time, to a file that `promtool` converts to blocks.
"""

from __future__ import annotations

import re
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING
from unittest.mock import patch

from alert_matrix.promtool import promtool
from conftest import config
from sglang_tuning_exporter.collect import log as logbook
from sglang_tuning_exporter.collect import sidecar
from sglang_tuning_exporter.collect.scrape import Outcome, ScrapeError
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.serve.metrics import collect
from sglang_tuning_exporter.serve.metrics.families import text_format
from sglang_tuning_exporter.sglang.server_info import parse_server_info

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from sglang_tuning_exporter.recordings.recording import Recording

COUNTER = re.compile(r"_(?:total|count|sum|bucket)$")


@dataclass
class Clock:
    """A simulated clock in unix seconds, which moves only when a test sets it; replaces the module `time`."""

    now: float

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    @contextmanager
    def worn(self) -> Iterator[None]:
        """Make the exporter use this clock."""
        with patch.object(sidecar, "time", self), patch.object(logbook, "time", self):
            yield


@dataclass(frozen=True)
class Moment:
    """One scrape: the lines that were printed before it, and the page that SGLang answered; None: no answer."""

    at: float  # unix seconds
    lines: bytes
    page: str | None


@dataclass(frozen=True)
class Story:
    """One server over time, as a Prometheus sees it under `instance`."""

    instance: str
    moments: Iterable[Moment]
    profile: str = "online"
    scraped: bool = True
    logged: bool = True
    server_info: bytes | None = None
    gone_from: float | None = field(default=None)  # from this moment on the exporter itself does not answer


def write_story(story: Story, directory: Path, families: Collection[str], sink: IO[str]) -> None:
    """Write what Prometheus would have scraped. Of the server's own families only `families` are kept: they are many."""
    directory.mkdir(parents=True)
    log = directory / "server.log"
    log.touch()
    place = f'job="sglang",instance="{story.instance}"'
    exporter: Sidecar | None = None
    clock = Clock(0.0)
    for moment in story.moments:
        if story.gone_from is not None and moment.at >= story.gone_from:
            sink.write(f"up{{{place}}} 0 {moment.at:.3f}\n")
            continue
        clock.now = moment.at
        with clock.worn():
            if exporter is None:
                exporter = _exporter(story, log, clock)
            if moment.lines and exporter.log is not None:
                with log.open("ab") as printed:
                    printed.write(moment.lines)
                while exporter._read_log():
                    pass
            passed_on = ""
            if story.scraped:
                refused = ScrapeError("connection_refused", "nobody listens") if moment.page is None else None
                outcome = Outcome(moment.page, refused, 0.012)
                exporter._receive_outcome(outcome)
                passed_on = outcome.passed_on
                if story.server_info is not None and moment.page is not None:
                    _inform(exporter, story.server_info)
            with exporter.view():
                pass
            page = text_format(collect(exporter)) + passed_on
        sink.write(f"up{{{place}}} 1 {moment.at:.3f}\n")
        sink.writelines(_placed(page, place, moment.at, families))
    if exporter is not None:
        exporter.stop()


def _exporter(story: Story, log: Path, clock: Clock) -> Sidecar:
    settings = config(
        sglang_url="http://127.0.0.1:9" if story.scraped else None,
        log_file=(str(log),) if story.logged else (),
        profile=story.profile,
    )
    made = Sidecar(settings)
    if story.logged:
        made.log = logbook.Logbook(settings, made.state, made._lock, clock=clock.monotonic)
        made._read_log()
    return made


def _inform(exporter: Sidecar, answer: bytes) -> None:
    info = parse_server_info(answer)
    assert info is not None
    exporter.state.facts.apply_info(info.version, info.args, info.max_running_requests)
    exporter.state.facts.apply_ranks(info.ranks)


def _placed(page: str, place: str, at: float, families: Collection[str]) -> Iterator[str]:
    for line in page.splitlines():
        if not line or line[0] == "#":
            continue
        series, _, value = line.rpartition(" ")
        name, _, labels = series.partition("{")
        if name.startswith("sglang:") and name not in families:
            continue
        yield f"{name}{{{place}{',' if labels else '}'}{labels} {value} {at:.3f}\n"


def recorded(recording: Recording, *, end: float, every: float = 5.0, lead: float = 0.0) -> Iterator[Moment]:
    """Give a recording scraped every so many seconds, so that its load ends at `end` (unix seconds)."""
    length = recording.loads[-1][1]
    taken = 0
    steps = int(length // every)
    for step in range(steps + 1):
        position = length - (steps - step) * every
        until = recording.count_lines_until(position)
        lines = b"".join(line.text for line in recording.lines[taken:until])
        taken = until
        scrape = recording.scrape_at(position)
        away = recording.phase_at(position) == "down"
        page = None if scrape is None or away else scrape.text.decode()
        yield Moment(end - length + position + lead, lines, page)


def repeated(page: str, *, end: float, count: int = 24, every: float = 5.0) -> Iterator[Moment]:
    """Give one page again and again, its counters growing: what a server under an even load exposes."""
    for step in range(count):
        lines = []
        for line in page.splitlines():
            series, _, value = line.rpartition(" ")
            grows = line and line[0] != "#" and COUNTER.search(series.partition("{")[0])
            lines.append(f"{series} {float(value) * (1 + 0.02 * step)!r}" if grows else line)
        yield Moment(end - (count - 1 - step) * every, b"", "\n".join(lines) + "\n")


def blocks(source: Path, directory: Path) -> None:
    """Turn what `write_story` wrote into a Prometheus's data directory."""
    ran = promtool("tsdb", "create-blocks-from", "openmetrics", source, directory)
    assert ran.status == 0, ran.words[-2000:]


def quarter() -> float:
    """Unix seconds of a whole minute in the past."""
    return time.time() // 60 * 60 - 60
