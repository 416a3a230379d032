"""The running sidecar without its HTTP face: follows the log, scrapes SGLang, keeps the state, and gives consistent views of it."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO

from sglang_tuning_exporter.config import Config
from sglang_tuning_exporter.guide.findings import Finding, Past, findings, verdict
from sglang_tuning_exporter.guide.profiles import PROFILES
from sglang_tuning_exporter.sglang import exposition, facts
from sglang_tuning_exporter.sglang.lines import LogReader
from sglang_tuning_exporter.sources.scrape import Client, Outcome, Scraper
from sglang_tuning_exporter.sources.tail import Block, FileStatus, LogFollower
from sglang_tuning_exporter.state import ServerState

POLL_SECONDS = 0.1
SELF_SCRAPE_SECONDS = 15.0  # when nobody scrapes us, states, findings and the page live all the same
INFO_RETRY_SECONDS = 300.0  # every /server_info leaves a line in the log that is being read

logger = logging.getLogger("sglang_tuning_exporter")


@dataclass(slots=True)
class SourceHealth:
    """How the two sources do."""

    up: bool | None = None  # None before the first scrape and without --sglang-url
    reason: str = ""
    message: str = ""
    scrape_seconds: float | None = None
    files: list[FileStatus] = field(default_factory=list)
    last_line_at: float | None = None  # unix seconds
    lines: Counter[str] = field(default_factory=Counter)
    unrecognised: int = 0


class Watcher:
    """Two threads (log, self-scrape) and a lock around one `ServerState`."""

    def __init__(self, config: Config, stdin: BinaryIO | None = None) -> None:
        self.config = config
        self.profile = PROFILES[config.profile]
        self.health = SourceHealth()
        self.state = ServerState(self.profile, time.monotonic())
        self.state.log_tells_retractions = bool(config.log_file)
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._readers: dict[str, LogReader] = {}
        self._past_readers: dict[str, LogReader] = {}
        self._native = ""
        self.running = False
        self._info_wanted, self._info_next = True, 0.0
        self._scraped_at = -SELF_SCRAPE_SECONDS
        if stdin is None and "-" in config.log_file:
            stdin = sys.stdin.buffer
        self._follower = LogFollower(config.log_file, stdin=stdin, from_start=config.from_start) if config.log_file else None
        self._client: Client | None = None
        self._scraper: Scraper | None = None
        if config.sglang_url is not None and config.metrics_url is not None:
            key = config.api_key_file.read_text(encoding="utf-8").strip() if config.api_key_file else None
            self._client = Client(config.sglang_url, config.metrics_url, key)
            self._scraper = Scraper(self._client.metrics, self._take)

    def start(self) -> None:
        """Begin to watch."""
        if self._follower is not None:
            self._poll(self._follower)  # what is there now is history; what comes after this line is news
            self._thread(self._follow, "log")
        if self._scraper is not None:
            self._thread(self._scrape_when_alone, "self-scrape")
        self.running = True

    def stop(self) -> None:
        """End both threads and close the log."""
        self.running = False
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout=2.0)
        if self._follower is not None:
            self._follower.close()

    def _thread(self, target: object, name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)  # type: ignore[arg-type]  # both are plain methods
        thread.start()
        self._threads.append(thread)

    @contextmanager
    def view(self) -> Iterator[float]:
        """Hold the state still, its seconds brought up to the moment that is given."""
        with self._lock:
            now = time.monotonic()
            self.state.advance(now)
            yield now

    def scrape(self, timeout: float) -> str:
        """Scrape SGLang now; its own series made safe to append to ours, empty when it is away. Within `timeout` seconds."""
        if self._scraper is None:
            return ""
        outcome = self._scraper.scrape(timeout)
        if outcome.text is None and outcome.error is not None:
            with self._lock:
                self._failed(outcome)
            return ""
        with self._lock:
            return self._native if self.config.passthrough else ""

    def findings(self) -> tuple[str, list[Finding]]:
        """The verdict and what it rests on, over the profile's window."""
        with self.view() as now:
            past = self.past(now)
            found = findings(past)
            return verdict(found, past), found

    def past(self, now: float) -> Past:
        """What the table's conditions look at; call it inside `view`."""
        window = self.profile.window_seconds
        return Past(
            self.state.recent(now), self.state.recent_failures(now, window), min(now - self.state.begun, window), self.state.facts, self.profile
        )

    def _failed(self, outcome: Outcome) -> None:
        assert outcome.error is not None
        if self.health.up is not False or self.health.reason != outcome.error.reason:
            logger.warning("cannot scrape %s: %s", self.config.metrics_url, outcome.error)
        self.health.up = False
        self.health.reason, self.health.message = outcome.error.reason, str(outcome.error)
        self.health.scrape_seconds = outcome.seconds
        self._info_wanted = True

    def _take(self, outcome: Outcome) -> None:
        self._scraped_at = time.monotonic()
        if outcome.text is None:
            with self._lock:
                self._failed(outcome)
            return
        scrape = facts.read(outcome.text)
        native = exposition.passthrough(outcome.text) if self.config.passthrough else ""
        with self._lock:
            if self.health.up is not True:
                logger.info("scraping %s", self.config.metrics_url)
            self.health.up, self.health.reason, self.health.message = True, "", ""
            self.health.scrape_seconds = outcome.seconds
            self._native = native
            starts = self.state.starts
            self.state.observe_scrape(scrape, time.monotonic())
            self._info_wanted = self._info_wanted or self.state.starts != starts

    def _ask_server_info(self) -> None:
        now = time.monotonic()
        if self._client is None or not self._info_wanted or self.health.up is not True or now < self._info_next:
            return
        self._info_wanted, self._info_next = False, now + INFO_RETRY_SECONDS
        info = self._client.server_info(self.config.scrape_timeout)
        with self._lock:
            if info is None:
                self._info_wanted = True
            else:
                self.state.facts.apply_info(info.version, info.args, info.max_running_requests)

    def _scrape_when_alone(self) -> None:
        while not self._stopping.wait(0.25):
            if time.monotonic() - self._scraped_at >= SELF_SCRAPE_SECONDS:
                self.scrape(self.config.scrape_timeout)
            self._ask_server_info()

    def _follow(self) -> None:
        assert self._follower is not None
        while not self._stopping.wait(POLL_SECONDS):
            self._poll(self._follower)

    def _poll(self, follower: LogFollower) -> None:
        for block in follower.poll():
            self._read(block)
        with self._lock:
            statuses = follower.status()
            for status in statuses:
                before = next((s for s in self.health.files if s.path == status.path), None)
                if before is None or (before.up, before.reason) != (status.up, status.reason):
                    logger.info("log %s: %s", status.path, "following" if status.up else status.reason)
            self.health.files = statuses

    def _read(self, block: Block) -> None:
        if block.historical:
            events = self._past_readers.setdefault(block.path, LogReader()).feed(block.data)
            with self._lock:
                for event in events:
                    self.state.recall(event)
            return
        reader = self._readers.setdefault(block.path, LogReader())
        events = reader.feed(block.data)
        with self._lock:
            now = time.monotonic()
            starts = self.state.starts
            for event in events:
                self.state.observe(event, now)
            self._info_wanted = self._info_wanted or self.state.starts != starts
            self.health.last_line_at = time.time()
            lines: Counter[str] = Counter()
            for each in self._readers.values():
                lines.update(each.counts)
            self.health.lines = lines
            self.health.unrecognised = sum(sum(each.unrecognised.values()) for each in self._readers.values())
