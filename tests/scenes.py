"""Servers in typical situations: recordings of real ones, run through the real exporter with a clock that a test sets.

From the log file on disk to pages and exposition everything is the real exporter, except its clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from conftest import config
from release.archives import unpack
from sglang_tuning_exporter.collect.scrape import ScrapeError
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.config import Config
from sglang_tuning_exporter.recordings.recording import Recording, load
from sglang_tuning_exporter.recordings.replay import packaged
from sglang_tuning_exporter.sglang.server_info import parse_server_info
from watched import load_of

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Moment:
    """One scrape: the lines that were printed before it, and the page that SGLang answered; None: no answer."""

    at: float  # unix seconds
    lines: bytes
    page: str | None


@dataclass(frozen=True)
class Story:
    """One server over time."""

    moments: Iterable[Moment]
    profile: str = "online"
    scraped: bool = True
    logged: bool = True
    server_info: bytes | None = None
    gone_from: float | None = None  # from this moment on the exporter itself does not answer


class Timed(Sidecar):
    """The exporter with a clock that a test sets: a page does not change while a test reads it."""

    def __init__(self, settings: Config, at: float) -> None:
        self.at = at  # unix seconds
        super().__init__(settings)
        if self.log is not None:
            self._read_log()

    @classmethod
    def beside(cls, story: Story, log: Path, at: float) -> Timed:
        """Return the exporter beside the server of a story, before its first moment."""
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        settings = config(
            sglang_url="http://127.0.0.1:9" if story.scraped else None,
            log_file=(str(log),) if story.logged else (),
            profile=story.profile,
        )
        return cls(settings, at)

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
        passed_on = self._receive(moment.page or ScrapeError("connection_refused", refused), 0.012)
        if story.server_info is not None and moment.page is not None:
            info = parse_server_info(story.server_info)
            assert info is not None
            self.watch.take_facts(info)
        return passed_on

    def pass_on(self, story: Story, moment: Moment, log: Path) -> None:
        """Take a moment and judge it, as for somebody who asks then."""
        self.live(story, moment, log)
        with self.view() as now:
            self.judge(now)


@contextmanager
def lived(story: Story, directory: Path) -> Iterator[Sidecar]:
    """The exporter after a story. Its clock stands at the end."""
    log, moments = directory / "server.log", iter(story.moments)
    first = next(moments)
    exporter = Timed.beside(story, log, first.at)
    for moment in (first, *moments):
        exporter.pass_on(story, moment, log)
    exporter.running = True
    try:
        yield exporter
    finally:
        exporter.stop()


@cache
def recording(name: str) -> Recording:
    """Load a recording of the package or of tests/recordings, or a capture of tests/captures."""
    if name in {"retract", "steady"}:
        return load(packaged(name))
    if (HERE / "recordings" / name).exists():
        return load(HERE / "recordings" / name)
    with TemporaryDirectory() as folder:
        unpack(HERE / "captures" / f"{name}.tar.xz", Path(folder))
        return load(Path(folder))


def played(name: str, *, end: float | None = None, every: float = 5.0) -> Iterator[Moment]:
    """Give a recording scraped every so many seconds, so that its load ends at `end` (unix seconds), or now."""
    recorded = recording(name)
    length, taken = load_of(recorded)[1], 0
    end, steps = end or time.time(), int(length // every)
    for step in range(steps + 1):
        position = length - (steps - step) * every
        until = recorded.count_lines_until(position)
        lines = b"".join(line.text for line in recorded.lines[taken:until])
        taken = until
        scrape = recorded.scrape_at(position)
        away = recorded.phase_at(position) == "down"
        yield Moment(end - length + position, lines, None if scrape is None or away else scrape.text.decode())


def then(moments: Iterable[Moment], seconds: float, *, answers: bool) -> list[Moment]:
    """Let so many seconds follow, to now, in which nothing is printed, and nothing or always the same is answered."""
    before, steps = list(moments), range(5, int(seconds) + 1, 5)
    silence = [Moment(before[-1].at + step, b"", before[-1].page if answers else None) for step in steps]
    return [replace(each, at=each.at - seconds) for each in (*before, *silence)]


def idle(*, end: float | None = None) -> list[Moment]:
    """Give a server that has started, and has no request for ten minutes."""
    whole = recording("steady")
    started = b"".join(line.text for line in whole.lines[: whole.count_lines_until(load_of(whole)[0])])
    first = Moment((end or time.time()), started, whole.scrapes[-1].text.decode())
    return then([first], 600.0, answers=True)


# retracting: until the end of its load; down: no answer for two minutes; stuck: its page stands still for five
SCENES: dict[str, Callable[[], Story]] = {
    "retracting": lambda: Story(played("retract")),
    "recorded": lambda: Story(played("retract"), profile="offline"),
    "healthy": lambda: Story(played("healthy-chat")),
    "idle": lambda: Story(idle()),
    "new": lambda: Story(list(played("healthy-chat"))[-2:]),
    "unseen": lambda: Story([Moment(time.time(), b"", None)], scraped=False),
    "down": lambda: Story(then(played("steady"), 120.0, answers=False)),
    "stuck": lambda: Story(then(played("steady"), 300.0, answers=True)),
    "few_clients": lambda: Story(played("client_limited"), profile="offline"),
    "beyond_captured": lambda: Story(played("gpu-graphs-too-small")),
    "dp2": lambda: Story(played("dp2")),
}
