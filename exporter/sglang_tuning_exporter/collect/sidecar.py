"""The running sidecar without its HTTP face: follows the log, scrapes SGLang, keeps the state and gives views of it."""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import contextmanager, suppress
from math import inf
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, BinaryIO

from sglang_tuning_exporter.capacity.model import Measured
from sglang_tuning_exporter.collect.inquiry import Inquiry
from sglang_tuning_exporter.collect.loads import LoadsInquiry
from sglang_tuning_exporter.collect.log import Logbook
from sglang_tuning_exporter.collect.scrape import Client, Outcome, ScrapeError, Scraper
from sglang_tuning_exporter.collect.scrape_health import ScrapeHealth
from sglang_tuning_exporter.collect.threads import Threads
from sglang_tuning_exporter.diagnosis.evidence import Past, past_of
from sglang_tuning_exporter.diagnosis.findings import Judgement, judge
from sglang_tuning_exporter.diagnosis.recommendation import Given, Recommendation, recommendations, since
from sglang_tuning_exporter.sglang.metrics import exposition
from sglang_tuning_exporter.sglang.metrics.page_cache import PageReader
from sglang_tuning_exporter.state.arguments import version_tuple
from sglang_tuning_exporter.state.confirmation import ASK_SECONDS
from sglang_tuning_exporter.state.history import History
from sglang_tuning_exporter.state.outage import AWAY, Outage
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_tuning_exporter.config import Config

# Between two looks at the log: while lines come, and once none has come for a while. A log that is copied and truncated
# loses what was written since the last look, so the first pause is short.
POLL_SECONDS = 0.1
QUIET_POLL_SECONDS = 1.0
QUIET_AFTER_SECONDS = 2.0
# A scrape waits so long for the log to be read first: what was written before it is in it, and a flood does not hold it up.
FRESH_SECONDS = 0.05
# Between two looks whether SGLang should be asked for something; the first leaves time for somebody else's scrape.
LOOK_SECONDS = 1.0
FIRST_LOOK_SECONDS = 0.25
# When nobody scrapes us, states, findings and the page live all the same. More than the usual interval of a Prometheus, which would
# otherwise find that SGLang has just been asked.
SELF_SCRAPE_SECONDS = 20.0
STOP_SECONDS = 1.0  # a block of the log, or what a scrape that was cut off still does
# First and longest pause: every /server_info leaves a line in the log that is being read.
# A log has gone silent when the server was seen at work so long after its last batch line, and none has come for two minutes.
LOG_SILENT_SECONDS, LOG_DEAD_SECONDS = 60.0, 120.0
ROTATION_SECONDS = 60.0  # a log whose name is empty for so long is read on (`sources.tail`), and counts
QUIET_LEVELS = ("warning", "error", "critical")  # at these SGLang prints no batch lines
# Between two health checks of our own, made only while requests stand still; and how long one may take.
CHECK_PAUSE_SECONDS, CHECK_PATIENCE_SECONDS = 25.0, 10.0
LOADS_PATIENCE_SECONDS = 2.0  # it is answered from shared memory
# In these cases there is a server to ask for more: it has no figure yet, or no metrics. A 404 may be a proxy's: it is asked again.
# Nobody is there, or another server in its place.
GONE = AWAY | {"metrics_disabled"}
MAY_ANSWER: frozenset[str] = frozenset({"metrics_disabled", "http_404"})

logger = logging.getLogger("sglang_tuning_exporter")


class Sidecar:
    """Two threads (log, self-scrape) and a lock around one `ServerState`.

    `stdin` replaces the process's own for `-`. After `self_scrape_seconds` without anybody's scrape it scrapes itself.
    """

    def __init__(
        self, config: Config, stdin: BinaryIO | None = None, *, self_scrape_seconds: float = SELF_SCRAPE_SECONDS
    ) -> None:
        self.config = config
        self.profile = PROFILES[config.profile].with_thresholds(config.threshold)
        self.health = ScrapeHealth()
        self.state = ServerState(self.profile, time.monotonic())
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self.threads = Threads(self._stopping)
        self._stopped_at = math.inf
        self._readers: SimpleQueue[threading.Event] = SimpleQueue()  # who waits for the log to be read
        self._pages = PageReader(passthrough=config.passthrough)
        self.history = History()
        self.found_since: dict[str, float] = {}  # diagnosis → unix seconds, while it holds
        self.recommended_since: dict[Recommendation, Given] = {}  # what is advised → unix seconds, in the same words
        self.running = False
        self._inquiry = Inquiry()
        self.loads = LoadsInquiry()
        self.measured = Measured(self.profile.window_seconds)
        self._was_away = False
        self._checked_at = -inf  # the last health check of our own
        self._outage = Outage()
        self._read_at = -inf  # when the log's files were last found readable
        self._self_scrape_seconds = self_scrape_seconds
        self._scraped_at: float | None = None
        self.log = Logbook(config, stdin) if config.log_file else None
        if self.log is not None:
            self.log.restore(self.state, time.monotonic())
        self._informant: Client | None = None
        self._scraper: Scraper | None = None
        if config.sglang_url is not None and config.metrics_url is not None:
            where = (config.sglang_url, config.metrics_url, config.api_key, config.api_key_file)
            client = Client(*where)
            self._scraper = Scraper(client.metrics, self._take, client.cut)
            self._informant = Client(*where)

    def start(self) -> None:
        """Begin to watch."""
        if self.log is not None:
            log = self.log
            # What is there now is history; what comes after this line is news.
            self.threads.attempt("log", lambda: self._read_log(log))
            self.history.begin(self.state)
            self.threads.start("log", self._follow)
        if self._scraper is not None:
            self.threads.start("self-scrape", self._scrape_when_alone)
        self.running = True

    def stop(self) -> None:
        """End both threads and close the log; requests under way are cut off."""
        self.running = False
        self._stopping.set()
        self._readers.put(threading.Event())
        if self._scraper is not None and self._informant is not None:
            self._scraper.stop()
            self._informant.end()
        self._stopped_at = min(self._stopped_at, time.monotonic())  # who says it twice does not wait twice
        ended = self.threads.join(self._stopped_at + STOP_SECONDS)
        if self.log is not None:
            log = self.log
            if ended:
                self.threads.attempt("log", lambda: log.hand_over(self.state, self._lock))
            log.close()

    @contextmanager
    def view(self) -> Iterator[float]:
        """Hold the state still, its seconds brought up to the moment that is given."""
        with self._lock:
            now = time.monotonic()
            self.state.log_is_read = self._log_is_read(now)
            self.state.advance(now)
            self.history.offer(self.state, now)
            if self.log is not None:
                self.log.keep(self.state, now)
            yield now

    def scrape(self, timeout: float) -> str:
        """Scrape SGLang, within `timeout` seconds; its series made safe to append to ours, empty when it is away.

        What stood in the log when this was called has been read when it returns, unless that takes long.
        """
        read = threading.Event()
        begin = time.monotonic()
        if self.log is not None and self.running:
            self._readers.put(read)
        else:
            read.set()
        outcome = self._scraper.scrape(timeout) if self._scraper is not None else None
        read.wait(max(0.0, begin + min(FRESH_SECONDS, timeout) - time.monotonic()))
        return "" if outcome is None else outcome.passed_on

    def past(self, now: float, seconds: float | None = None) -> Past:
        """Give what the table's conditions look at of the last `seconds` (the profile's window unless told); call it inside `view`."""
        troubles = set()
        if self.health.up is False and self.health.reason != "not_ready":
            troubles.add("metrics_disabled" if self.health.reason == "metrics_disabled" else "server_down")
        words = {}
        if "server_down" in troubles:
            words["server_down"] = f"its /metrics could not be scraped ({self.health.message})"
            if self.health.reason == "timeout":
                troubles.add("hung")
                words["server_down"] = (
                    f"it takes connections and does not answer ({self.health.message}): its HTTP server or its tokenizer hangs"
                )
        if told := self._log_trouble(now):
            troubles.add("log_silent")
            words["log_silent"] = told
        starting = (
            self.health.starting if self.health.up is False else self.health.up is None and self.state.starting(now)
        )
        half_read = self.log is not None and self.log.reads_the_past
        return past_of(
            self.state,
            now,
            seconds=seconds,
            troubles=frozenset(troubles),
            words=words,
            starting=starting,
            half_read=half_read,
            measured=self.measured,
        )

    @property
    def log_silent_seconds(self) -> float | None:
        """How long after the log's last batch line the metrics showed work; None where there are not both."""
        return None if self.log is None or self._scraper is None else self.state.log_silent_seconds

    def _log_trouble(self, now: float) -> str:
        """Say what is wrong with the log, empty where nothing is."""
        if self.log is None:
            return ""
        unread = next((status for status in self.log.files if not status.up), None)
        if unread is not None:
            return f"the log cannot be read: {unread.reason}"
        seconds, last = self.log_silent_seconds or 0.0, self.state.stages.batch_at or self.state.begun
        if seconds <= LOG_SILENT_SECONDS or now - last < LOG_DEAD_SECONDS:
            return ""
        level = self.state.facts.args.get("log_level")
        why = f"; the server runs with --log-level {level}" if level in QUIET_LEVELS else ""
        return (
            f"no batch line has come from the log for {(now - last) / 60:.0f} minutes, and tokens were generated{why}"
        )

    def _log_is_read(self, now: float) -> bool:
        """Whether the log's counters count what happens: at level warning retractions are printed, and batches are not."""
        if self.log is None or not self._log_trouble(now):
            self._read_at = now
            return True
        if any(not status.up for status in self.log.files):
            if any(status.up for status in self.log.files):  # another one comes later, or is over
                self._read_at = now
                return True
            # A rotated or deleted file is read on for a while.
            return self.log.last_line_at is not None and now - self._read_at < ROTATION_SECONDS
        return self.state.facts.args.get("log_level") == "warning" and not self.state.forgeries.disagrees(now)

    @staticmethod
    def unix(moment: float) -> float:
        """Give a moment on the state's clock as unix seconds, whole ones: the two clocks are read one after the other."""
        return float(int(time.time() - (time.monotonic() - moment)))

    def judge(self, now: float) -> Judgement:
        """Say what limits the server; call it inside `view`."""
        judgement = judge(self.past(now))
        self.found_since = {
            found.diagnosis.id: self.found_since.get(found.diagnosis.id, self.unix(now - (found.ago or 0.0)))
            for found in judgement.findings
        }
        self.recommended_since = since(self.recommended_since, recommendations(judgement), self.unix(now))
        return judgement

    def _failed(self, outcome: Outcome) -> None:
        assert outcome.error is not None
        health, error = self.health, outcome.error
        self.state.lost_scrape(time.monotonic(), gone=error.reason in GONE)
        why = self._outage.explain(error, self.state, time.monotonic())
        if health.up is not False or health.reason != why.reason:
            logger.warning("cannot scrape %s: %s", self.config.metrics_url, why.message)
            if why.reason == "http_404":
                self._inquiry.want()  # whether it is there without metrics
        health.up, health.serves, health.scrape_seconds = False, error.serves, outcome.seconds
        health.reason, health.message, health.starting = why
        self._was_away = self._was_away or error.reason in AWAY

    def _take(self, outcome: Outcome) -> None:
        if self._stopping.is_set():  # it was cut off by us
            return
        self._scraped_at = time.monotonic()
        if outcome.text is None:
            with self._lock:
                self._failed(outcome)
            return
        page = exposition.bounded(outcome.text)
        scrape, native, left_out = self._pages.read(page.text)
        with self._lock:
            self.state.capped["long_metric_lines"] += page.too_long
            self.state.capped["metric_lines"] += page.too_many
            self.state.capped["refused_metric_lines"] += left_out
            if self.health.up is not True:
                logger.info("scraping %s", self.config.metrics_url)
            self.health.up, self.health.reason, self.health.message = True, "", ""
            self.health.starting = self.health.serves = False
            self.health.scrape_seconds = outcome.seconds
            self.health.unrecognised = scrape.unrecognised
            outcome.passed_on = native  # and not ours: between two scrapes nobody needs half a megabyte
            starts = self.state.starts
            self.state.answered(time.monotonic())
            self.state.observe_scrape(scrape, time.monotonic())
            self._outage.ends(self.state.starts)
            if self._was_away or self.state.starts != starts:
                self._inquiry.want()
                self.loads.want()
                self.measured.forget()
            self._was_away = False

    def _ask_server_info(self) -> None:
        with self._lock:
            without = self.health.up is False and self.health.reason in MAY_ANSWER
            answers = self.health.up is True or without or self.health.serves
            if self._informant is None or not answers or not self._inquiry.take(time.monotonic()):
                return
        info = self._informant.server_info(self.config.scrape_timeout)
        with self._lock:
            if without:
                self._outage.asked(answered=info is not None)
            if info is None or without:
                self._inquiry.missed(time.monotonic())
            if info is not None:
                self.state.facts.apply_info(info.version, info.args, info.max_running_requests)
                self.state.facts.apply_ranks(info.ranks)
        # Which DP rank has which limit is told by /v1/loads alone, from 0.5.8 on.
        version = version_tuple(info.version) if info is not None else None
        with self._lock:
            self.loads.starts(version, with_ranks=self.state.has_dp_ranks)

    def _ask_loads(self) -> None:
        """Ask the schedulers what they have counted, once after each scrape, in this thread: no scrape waits for it."""
        with self._lock:
            if self._informant is None or self.health.up is not True or not self.loads.take(self._scraped_at):
                return
        try:
            loads = self._informant.loads(min(self.config.scrape_timeout, LOADS_PATIENCE_SECONDS))
        except ScrapeError as error:
            with self._lock:
                self.loads.failed(error.reason)
            return
        with self._lock:
            self.loads.answered(loads)
            self.measured.observe(loads, time.monotonic())
            for load in loads if self.state.has_dp_ranks else ():
                self.state.facts.apply_load(load.dp, load.max_running_requests)

    def _check_health(self) -> None:
        """Ask for a token where requests are there and nothing moves: the counters alone do not tell a hang from a wait."""
        with self._lock:
            begin = time.monotonic()
            due = begin - self._checked_at >= CHECK_PAUSE_SECONDS
            if (
                self._informant is None
                or not due
                or self.health.up is not True
                or not self.state.stages.suspicious(begin)
            ):
                return
            self._checked_at = begin
        answered = self._informant.health(CHECK_PATIENCE_SECONDS)
        with self._lock:
            now = time.monotonic()
            if answered:
                self.state.stages.answered_check()
            elif answered is False and not self._stopping.is_set():
                self.state.stages.vain_check(now, now - begin)

    def _scrape_when_alone(self) -> None:
        pause = FIRST_LOOK_SECONDS
        while not self._stopping.wait(pause):
            pause = min(LOOK_SECONDS, self._self_scrape_seconds)
            every = (
                min(ASK_SECONDS, self._self_scrape_seconds)
                if self.state.unconfirmed.wait
                else self._self_scrape_seconds
            )
            if self._scraped_at is None or time.monotonic() - self._scraped_at >= every:
                self.scrape(self.config.scrape_timeout)
            self._ask_server_info()
            self._ask_loads()
            self._check_health()
            self._remember()

    def _remember(self) -> None:
        with self._lock:
            now = time.monotonic()
            if len(self.state.ranks) > 1:
                self.state.advance(now)  # what they serve at once is counted by short intervals
            self.history.offer(self.state, now)

    def _follow(self) -> None:
        assert self.log is not None
        pause, seen, seen_at = POLL_SECONDS, self.log.last_line_at, time.monotonic()
        while not self._stopping.is_set():
            waiting = self._wait_for_reader(pause)
            self._remember()
            try:
                while self._read_log(self.log) and not self._stopping.is_set():
                    pass
            finally:
                for read in waiting:
                    read.set()
            if self.log.last_line_at != seen:
                seen, seen_at = self.log.last_line_at, time.monotonic()
            pause = POLL_SECONDS if time.monotonic() - seen_at < QUIET_AFTER_SECONDS else QUIET_POLL_SECONDS

    def _wait_for_reader(self, seconds: float) -> list[threading.Event]:
        """Give who wants the log read now; nobody after `seconds`."""
        waiting = []
        with suppress(Empty):
            waiting.append(self._readers.get(timeout=seconds))
            while True:
                waiting.append(self._readers.get_nowait())
        return waiting

    def _read_log(self, log: Logbook) -> bool:
        starts = self.state.starts, self.state.unconfirmed.start_waits
        behind = log.poll(self.state, self._lock, self._stopping.is_set)
        if (self.state.starts, self.state.unconfirmed.start_waits) != starts:
            self._inquiry.want()
        return behind
