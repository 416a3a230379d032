"""The running sidecar without its HTTP server: follows the log, scrapes SGLang, keeps the state and gives views of it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import inf
from queue import Empty, SimpleQueue
from typing import BinaryIO

from sglang_tuning_exporter.capacity.model import Measured
from sglang_tuning_exporter.collect.log import Logbook
from sglang_tuning_exporter.collect.schedules import InfoSchedule, LoadsSchedule, ScrapeHealth
from sglang_tuning_exporter.collect.scrape import Client, Outcome, ScrapeError, Scraper
from sglang_tuning_exporter.collect.threads import Threads
from sglang_tuning_exporter.config import Config
from sglang_tuning_exporter.diagnosis.evidence import Past, past_of
from sglang_tuning_exporter.diagnosis.findings import Judgement, judge
from sglang_tuning_exporter.diagnosis.recommendation import Recommendation, RecommendedSince, recommendations, since
from sglang_tuning_exporter.sglang.args.flags import version_tuple
from sglang_tuning_exporter.sglang.metrics import exposition
from sglang_tuning_exporter.sglang.metrics.page_cache import PageReader
from sglang_tuning_exporter.state.confirmation import ASK_SECONDS
from sglang_tuning_exporter.state.history import History
from sglang_tuning_exporter.state.outage import AWAY, Outage
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

# Pause between two polls of the log: while lines come, and when none has come for two seconds. A log that is copied and
# truncated may lose lines written since the last poll, so the first pause is short.
POLL_SECONDS = 0.1
QUIET_POLL_SECONDS = 1.0
# A scrape waits this long for the log to be read: it shows the lines written before it, and a flood does not delay it.
FRESH_SECONDS = 0.05
# Pause between two checks of which requests to SGLang are due; the first pause leaves time for a scrape by Prometheus.
DUE_CHECK_SECONDS = 1.0
FIRST_DUE_CHECK_SECONDS = 0.25
# Without a scraper states, findings and the page are updated all the same. Longer than the usual interval of Prometheus,
# so that the two do not alternate.
SELF_SCRAPE_SECONDS = 20.0
STOP_SECONDS = 1.0  # for a block of the log, or the end of an interrupted scrape
# A log is silent if the server worked this long after its last batch line, and none has come for two minutes.
LOG_SILENT_SECONDS, LOG_DEAD_SECONDS = 60.0, 120.0
ROTATION_SECONDS = 60.0  # a log whose file is missing this long is still read (`collect/tail`) and counts
QUIET_LEVELS = ("warning", "error", "critical")  # SGLang prints no batch lines at these levels
# Pause between two health checks, made only while requests make no progress, and the timeout of one.
HEALTH_CHECK_PAUSE_SECONDS, HEALTH_CHECK_TIMEOUT_SECONDS = 25.0, 10.0
LOADS_TIMEOUT_SECONDS = 2.0  # answered from shared memory
# No server answers, or another one.
GONE = AWAY | {"metrics_disabled"}
# A server without metrics may still answer `/server_info`. A 404 may come from a proxy, so ask again.
MAY_ANSWER: frozenset[str] = frozenset({"metrics_disabled", "http_404"})

logger = logging.getLogger("sglang_tuning_exporter")


class Sidecar:
    """Two threads (log, self-scrape) and a lock around one `ServerState`.

    `stdin` replaces the process's own for `-`. Without a scraper for `self_scrape_seconds` it scrapes by itself.
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
        self._waiting_scrapes: SimpleQueue[threading.Event] = SimpleQueue()  # waiting for the log to be read
        self._pages = PageReader(passthrough=config.passthrough)
        self.history = History()
        self.found_since: dict[str, float] = {}  # diagnosis → unix seconds, while it holds
        self.recommended_since: dict[Recommendation, RecommendedSince] = {}  # advice in the same words → unix seconds
        self.running = False
        self._info_schedule = InfoSchedule()
        self.loads = LoadsSchedule()
        self.measured = Measured(self.profile.window_seconds)
        self._was_away = False
        self._checked_at = -inf  # our last health check
        self._outage = Outage()
        self._log_read_at = -inf  # when a file of the log was last readable
        self._self_scrape_seconds = self_scrape_seconds
        self._scraped_at: float | None = None
        self.log = Logbook(config, self.state, self._lock, stdin=stdin) if config.log_file else None
        self._client: Client | None = None
        self._scraper: Scraper | None = None
        if config.sglang_url is not None and config.metrics_url is not None:
            where = (config.sglang_url, config.metrics_url, config.api_key, config.api_key_file)
            client = Client(*where)
            self._scraper = Scraper(client.metrics, self._receive_outcome, client.cut)
            self._client = Client(*where)

    def start(self) -> None:
        """Start the threads."""
        if self.log is not None:
            # Present lines are history; lines after this point are new.
            self.threads.attempt("log", self._read_log)
            self.history.begin(self.state)
            self.threads.start("log", self._follow_log)
        if self._scraper is not None:
            self.threads.start("self-scrape", self._self_scrape)
        self.running = True

    def stop(self) -> None:
        """End both threads and close the log; current requests are interrupted."""
        self.running = False
        self._stopping.set()
        self._waiting_scrapes.put(threading.Event())
        if self._scraper is not None and self._client is not None:
            self._scraper.stop()
            self._client.end()
        self._stopped_at = min(self._stopped_at, time.monotonic())  # a second call does not wait again
        ended = self.threads.join(self._stopped_at + STOP_SECONDS)
        if self.log is not None:
            if ended:
                self.threads.attempt("log", self.log.process_held)
            self.log.close()

    @contextmanager
    def view(self) -> Iterator[float]:
        """Lock the state, advanced to the yielded moment."""
        with self._lock:
            now = time.monotonic()
            self.state.log_is_read = self._log_is_read(now)
            self.state.advance(now)
            self.history.offer(self.state, now)
            if self.log is not None:
                self.log.save_if_changed(now)
            yield now

    def scrape(self, timeout: float) -> str:
        """Scrape SGLang within `timeout` seconds; return its series, safe to append to ours, empty without an answer.

        Lines that were in the log before the call have been read on return, unless that takes long.
        """
        read = threading.Event()
        begin = time.monotonic()
        if self.log is not None and self.running:
            self._waiting_scrapes.put(read)
        else:
            read.set()
        outcome = self._scraper.scrape(timeout) if self._scraper is not None else None
        read.wait(max(0.0, begin + min(FRESH_SECONDS, timeout) - time.monotonic()))
        return "" if outcome is None else outcome.passed_on

    def past(self, now: float, seconds: float | None = None) -> Past:
        """Return the input of the conditions for the last `seconds` (default: the profile's window); call it inside `view`."""
        health, troubles, words = self.health, set(), {}
        if health.up is False and health.reason == "metrics_disabled":
            troubles.add("metrics_disabled")
        elif health.up is False and health.reason != "not_ready":
            words["server_down"] = f"its /metrics could not be scraped ({health.message})"
            if health.reason == "timeout":
                troubles.add("hung")
                words["server_down"] = (
                    f"it takes connections and does not answer ({health.message}): its HTTP server or its tokenizer hangs"
                )
        if trouble := self._log_trouble(now):
            words["log_silent"] = trouble
        starting = health.starting if health.up is False else health.up is None and self.state.life.starts(now)
        half_read = self.log is not None and self.log.is_catching_up
        return past_of(
            self.state,
            now,
            seconds=seconds,
            troubles=frozenset({*troubles, *words}),
            words=words,
            starting=starting,
            half_read=half_read,
            measured=self.measured,
        )

    @property
    def log_silent_seconds(self) -> float | None:
        """How long after the last batch line the metrics showed work; None unless both sources exist."""
        return None if self.log is None or self._scraper is None else self.state.log_silent_seconds

    def _log_trouble(self, now: float) -> str:
        """Return what is wrong with the log, empty if nothing."""
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
        """Return whether the log's counters are complete: at level warning retractions are printed, batches are not."""
        if self.log is None or not self._log_trouble(now):
            self._log_read_at = now
            return True
        if any(not status.up for status in self.log.files):
            if any(status.up for status in self.log.files):  # the other one comes later or has ended
                self._log_read_at = now
                return True
            # A rotated or deleted file is still read for a while.
            return self.log.last_line_at is not None and now - self._log_read_at < ROTATION_SECONDS
        return self.state.facts.args.get("log_level") == "warning" and not self.state.forgeries.disagrees(now)

    @staticmethod
    def unix(moment: float) -> float:
        """Return a moment of the state's clock in whole unix seconds: the two clocks are not read at the same time."""
        return float(int(time.time() - (time.monotonic() - moment)))

    def judge(self, now: float) -> Judgement:
        """Return what limits the server; call it inside `view`."""
        judgement = judge(self.past(now))
        self.found_since = {
            found.diagnosis.id: self.found_since.get(found.diagnosis.id, self.unix(now - (found.ago or 0.0)))
            for found in judgement.findings
        }
        self.recommended_since = since(self.recommended_since, recommendations(judgement), self.unix(now))
        return judgement

    def _note_failure(self, outcome: Outcome) -> None:
        assert outcome.error is not None
        health, error = self.health, outcome.error
        self.state.lost_scrape(time.monotonic(), gone=error.reason in GONE)
        why = self._outage.explain(error, self.state, time.monotonic())
        if health.up is not False or health.reason != why.reason:
            logger.warning("cannot scrape %s: %s", self.config.metrics_url, why.message)
            if why.reason == "http_404":
                self._info_schedule.ask_again()  # it may serve without metrics
        health.up, health.serves, health.scrape_seconds = False, error.serves, outcome.seconds
        health.reason, health.message, health.starting = why
        self._was_away = self._was_away or error.reason in AWAY

    def _receive_outcome(self, outcome: Outcome) -> None:
        if self._stopping.is_set():  # interrupted by us
            return
        self._scraped_at = time.monotonic()
        if outcome.text is None:
            with self._lock:
                self._note_failure(outcome)
            return
        page = exposition.bounded(outcome.text)
        scrape, native, left_out = self._pages.read(page.text)
        with self._lock:
            self.state.capped["long_metric_lines"] += page.too_long
            self.state.capped["metric_lines"] += page.too_many
            self.state.capped["refused_metric_lines"] += left_out
            if self.health.up is not True:
                logger.info("scraping %s", self.config.metrics_url)
            self.health = ScrapeHealth(up=True, scrape_seconds=outcome.seconds, unrecognised=scrape.unrecognised)
            outcome.passed_on = native  # the page is freed: nobody needs half a megabyte between two scrapes
            starts = self.state.starts
            self.state.life.answers(time.monotonic())
            self.state.observe_scrape(scrape, time.monotonic())
            self._outage.ends(self.state.starts)
            if self._was_away or self.state.starts != starts:
                self._info_schedule.ask_again()
                self.loads.ask_again()
                self.measured.forget()
            self._was_away = False

    def _ask_server_info(self) -> None:
        with self._lock:
            without = self.health.up is False and self.health.reason in MAY_ANSWER
            answers = self.health.up is True or without or self.health.serves
            if self._client is None or not answers or not self._info_schedule.start_if_due(time.monotonic()):
                return
        info = self._client.server_info(self.config.scrape_timeout)
        version = version_tuple(info.version) if info is not None else None
        with self._lock:
            if without:
                self._outage.asked(answered=info is not None)
            if info is None or without:
                self._info_schedule.note_no_answer(time.monotonic())
            if info is not None:
                self.state.facts.apply_info(info.version, info.args, info.max_running_requests)
                self.state.facts.apply_ranks(info.ranks)
            # Only /v1/loads shows the limit of each DP rank, from 0.5.8 on.
            self.loads.set_release(version, with_ranks=self.state.has_dp_ranks)

    def _ask_loads(self) -> None:
        """Ask the schedulers for their counters, once after each scrape, in this thread, so that no scrape waits."""
        with self._lock:
            if self._client is None or self.health.up is not True or not self.loads.start_if_due(self._scraped_at):
                return
        try:
            loads = self._client.loads(min(self.config.scrape_timeout, LOADS_TIMEOUT_SECONDS))
        except ScrapeError as error:
            with self._lock:
                self.loads.count_failure(error.reason)
            return
        with self._lock:
            if not loads:  # an answer without schedulers
                self.loads.count_failure("invalid")
            self.measured.observe(loads, time.monotonic())
            for load in loads if self.state.has_dp_ranks else ():
                self.state.facts.apply_load(load.dp, load.max_running_requests)

    def _check_health(self) -> None:
        """Ask for a token if requests make no progress: counters alone cannot distinguish a hang from a wait."""
        with self._lock:
            begin = time.monotonic()
            due = begin - self._checked_at >= HEALTH_CHECK_PAUSE_SECONDS
            if self._client is None or not due or self.health.up is not True or not self.state.stages.suspicious(begin):
                return
            self._checked_at = begin
        answered = self._client.health(HEALTH_CHECK_TIMEOUT_SECONDS)
        with self._lock:
            now = time.monotonic()
            if answered:
                self.state.stages.answer_health_check()
            elif answered is False and not self._stopping.is_set():
                self.state.stages.fail_health_check(now, now - begin)

    def _self_scrape(self) -> None:
        pause = FIRST_DUE_CHECK_SECONDS
        while not self._stopping.wait(pause):
            pause = min(DUE_CHECK_SECONDS, self._self_scrape_seconds)
            waits = self.state.unconfirmed.wait
            every = min(ASK_SECONDS, self._self_scrape_seconds) if waits else self._self_scrape_seconds
            if self._scraped_at is None or time.monotonic() - self._scraped_at >= every:
                self.scrape(self.config.scrape_timeout)
            self._ask_server_info()
            self._ask_loads()
            self._check_health()
            self._sample_history()

    def _sample_history(self) -> None:
        with self._lock:
            now = time.monotonic()
            if len(self.state.ranks) > 1:
                self.state.advance(now)  # concurrent requests are counted over short intervals
            self.history.offer(self.state, now)

    def _follow_log(self) -> None:
        assert self.log is not None
        pause, seen, seen_at = POLL_SECONDS, self.log.last_line_at, time.monotonic()
        while not self._stopping.is_set():
            waiting = self._wait_for_reader(pause)
            self._sample_history()
            try:
                while self._read_log() and not self._stopping.is_set():
                    pass
            finally:
                for read in waiting:
                    read.set()
            if self.log.last_line_at != seen:
                seen, seen_at = self.log.last_line_at, time.monotonic()
            # Longer and longer after a line: a line of each scrape must not cost twenty polls.
            pause = min(max(POLL_SECONDS, (time.monotonic() - seen_at) / 2), QUIET_POLL_SECONDS)

    def _wait_for_reader(self, seconds: float) -> list[threading.Event]:
        """Return the callers that wait for the log, after at most `seconds`."""
        waiting = []
        with suppress(Empty):
            waiting.append(self._waiting_scrapes.get(timeout=seconds))
            while True:
                waiting.append(self._waiting_scrapes.get_nowait())
        return waiting

    def _read_log(self) -> bool:
        assert self.log is not None
        starts = self.state.starts, self.state.unconfirmed.start_waits
        behind = self.log.poll(self._stopping.is_set)
        if (self.state.starts, self.state.unconfirmed.start_waits) != starts:
            self._info_schedule.ask_again()
        return behind
