"""Hours of metrics for a real Prometheus: recordings and written situations, run through the real exporter with a simulated clock.

From the log file on disk to the exposition everything is the real exporter, except its clock. Its answer to each scrape is
written, with the time, to a file that `promtool` converts to blocks.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from conftest import config
from fuzz.promtool import promtool
from sglang_tuning_exporter.collect.scrape import Outcome, ScrapeError
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.serve.metrics import collect
from sglang_tuning_exporter.serve.metrics.families import text_format
from sglang_tuning_exporter.serve.metrics.sources import web
from sglang_tuning_exporter.sglang.server_info import parse_server_info

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from sglang_tuning_exporter.config import Config
    from sglang_tuning_exporter.recordings.recording import Recording

COUNTER = re.compile(r"_(?:total|count|sum|bucket)$")


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


class Timed(Sidecar):
    """The exporter with a clock that a test sets: a page does not change while a test reads it."""

    def __init__(self, settings: Config, at: float) -> None:
        self.at = at  # unix seconds
        super().__init__(settings)
        if self.log is not None:
            self._read_log()

    def now(self) -> float:
        return self.at

    def unix(self, moment: float) -> float:
        return moment

    def live(self, story: Story, moment: Moment, log: Path) -> str:
        """Take the lines and the page of a moment; return what is passed on of the page."""
        self.at = moment.at
        if moment.lines and self.log is not None:
            with log.open("ab") as printed:
                printed.write(moment.lines)
            while self._read_log():
                pass
        if not story.scraped:
            return ""
        refused = "connection refused: nothing listens at that address"
        away = ScrapeError("connection_refused", refused) if moment.page is None else None
        outcome = Outcome(moment.page, away, 0.012)
        self._receive_outcome(outcome)
        if story.server_info is not None and moment.page is not None:
            info = parse_server_info(story.server_info)
            assert info is not None
            self.watch.inform(info)
        return outcome.passed_on

    def pass_on(self, story: Story, moment: Moment, log: Path) -> None:
        """Take a moment and judge it, as for somebody who asks then."""
        self.live(story, moment, log)
        with self.view() as now:
            self.judge(now)


def begin(story: Story, log: Path, at: float) -> Timed:
    """Return the exporter beside the server of a story, before its first moment."""
    log.touch()
    settings = config(
        sglang_url="http://127.0.0.1:9" if story.scraped else None,
        log_file=(str(log),) if story.logged else (),
        profile=story.profile,
    )
    return Timed(settings, at)


def write_story(story: Story, directory: Path, families: Collection[str], sink: IO[str]) -> None:
    """Write what Prometheus would have scraped. Of the server's own families only `families` are kept: they are many."""
    directory.mkdir(parents=True)
    log = directory / "server.log"
    place = f'job="sglang",instance="{story.instance}"'
    exporter: Timed | None = None
    for moment in story.moments:
        if story.gone_from is not None and moment.at >= story.gone_from:
            sink.write(f"up{{{place}}} 0 {moment.at:.3f}\n")
            continue
        exporter = exporter or begin(story, log, moment.at)
        passed_on = exporter.live(story, moment, log)
        page = text_format([*collect(exporter), web(None, is_tls=False)]) + passed_on
        sink.write(f"up{{{place}}} 1 {moment.at:.3f}\n")
        sink.writelines(_placed(page, place, moment.at, families))
    if exporter is not None:
        exporter.stop()


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
