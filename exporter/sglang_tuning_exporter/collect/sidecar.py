"""The running sidecar without its HTTP server: follows the log, scrapes SGLang, keeps the
state and gives views of it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import inf
from queue import Empty, SimpleQueue
from typing import BinaryIO

from sglang_tuning_exporter.collect.follower import NO_ANSWER
from sglang_tuning_exporter.collect.log import Logbook
from sglang_tuning_exporter.collect.scrape import Client, ScrapeError
from sglang_tuning_exporter.collect.threads import Threads
from sglang_tuning_exporter.config import Config, files
from sglang_tuning_exporter.core.diagnoses import adapted
from sglang_tuning_exporter.core.findings import Judgement
from sglang_tuning_exporter.core.watch import AWAY, Watch
from sglang_tuning_exporter.sglang import flags
from sglang_tuning_exporter.sglang.clean import clean, cleaned
from sglang_tuning_exporter.sglang.metrics import ON_BOARDS, PageReader

# Pause between two polls of the log: while lines come, and when none has come for two seconds. A log that is copied and
# truncated may lose lines written since the last poll, so the first pause is short.
POLL_SECONDS = 0.1
QUIET_POLL_SECONDS = 1.0
# A scrape waits this long for the log to be read: it shows the lines written before it, and a flood does not delay it.
FRESH_SECONDS = 0.05
# Pause between two checks of which requests to SGLang are due; the first pause leaves time for a scrape by Prometheus.
DUE_CHECK_SECONDS = 1.0
FIRST_DUE_CHECK_SECONDS = 0.25
# Without a scraper states, findings and the page are updated all the same. Longer than the usual interval of
# Prometheus, so that the two do not alternate.
SELF_SCRAPE_SECONDS = 20.0
ASK_SECONDS = 1.0  # between two scrapes while a line waits to be settled
MEASURE_SECONDS = 10.0  # between two judgements, so that the alert clocks go on without a scraper
STOP_SECONDS = 1.0  # for a block of the log, or the end of an interrupted scrape
ROTATION_SECONDS = 60.0  # a log whose file is missing this long is still read (`collect/follower`)
# Pause between two health checks, made only while requests make no progress, and the timeout of one.
HEALTH_CHECK_PAUSE_SECONDS, HEALTH_CHECK_TIMEOUT_SECONDS = 25.0, 10.0
# Pauses until a server that did not answer `/server_info` is asked again: the first, and the longest.
INFO_RETRY_SECONDS = (15.0, 300.0)
# From this release on `/v1/loads` has the running limit of each DP rank. Up to 0.5.17 an answer interrupts the
# schedulers: it is asked once.
LIMITS_SINCE = (0, 5, 8)
LOADS_TIMEOUT_SECONDS = 2.0
# A server without metrics may still answer `/server_info`. A 404 may come from a proxy, so ask again.
MAY_ANSWER: frozenset[str] = frozenset({"metrics_disabled", "http_404"})

TWO_SERVERS = "the pages of two servers come in turn, and only one of them is read: give the address of one server"

logger = logging.getLogger("sglang_tuning_exporter")


def passed_on(asked: Future[str] | None) -> str:
    """Return SGLang's series of a scrape, safe to append to ours; empty where it has not ended, or has no page."""
    return asked.result() if asked is not None and asked.done() else ""


class Sidecar:
    """Three threads (log, scrape, self-scrape) and a lock around one `Watch`, whose clock is in unix seconds and never
    goes back.

    `stdin` replaces the process's own for `-`. Without a scraper for `self_scrape_seconds` it scrapes by itself.
    """

    def __init__(
        self, config: Config, stdin: BinaryIO | None = None, *, self_scrape_seconds: float = SELF_SCRAPE_SECONDS
    ) -> None:
        self.config = config
        self.profile = adapted(config.profile, config.threshold, config.accept, config.wait)
        self.scrape_seconds: float | None = None  # that the last scrape took; None before the first
        self.unrecognised_families = 0  # of its page, that no known release has
        self._began = time.time() - time.monotonic()
        is_scraped = config.sglang_url is not None and config.metrics_url is not None
        self.watch = Watch(self.profile, self.now(), reads=bool(config.log_file), scrapes=is_scraped)
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self.threads = Threads(self._stopping)
        self._stopped_at = math.inf
        self._looks: SimpleQueue[Future[None]] = SimpleQueue()  # at the log, that are asked for
        self._look: Future[None] | None = None  # the one that waits: all who ask meanwhile share it
        self._pages = PageReader(passthrough=config.passthrough, only=ON_BOARDS if config.lean_passthrough else None)
        self.running = False
        self._info_due: float | None = 0.0  # when to ask for `/server_info`; None: it was asked since the last start
        self._info_pause = INFO_RETRY_SECONDS[0]  # after which it is asked again where it does not answer; it grows
        self._asks_limits = False  # whether `/v1/loads` is still to be asked for the limits of DP ranks
        self._was_away = False
        self._checked_at = -inf  # our last health check
        self._judged_at = -inf
        self.end_words = set[str]()  # that were a label of `end_info`
        self._log_read_at = -inf  # when a file of the log was last readable
        self._self_scrape_seconds = self_scrape_seconds
        self._scraped_at = -inf
        self.log = Logbook(config, self.watch, self._lock, clock=self.now, stdin=stdin) if config.log_file else None
        # Scrapes are made on demand by a thread and a client of their own; all who ask meanwhile share the one that
        # runs.
        self._scraper: Client | None = None
        self._client: Client | None = None
        self._asking = threading.Lock()
        self._asked: Future[str] | None = None
        self._asked_for: SimpleQueue[Future[str] | None] = SimpleQueue()
        if config.sglang_url is not None and config.metrics_url is not None:
            where = (config.sglang_url, config.metrics_url, config.api_key, config.api_key_file)
            self._scraper, self._client = Client(*where), Client(*where)

    def now(self) -> float:
        """Return the watch's time: unix seconds when the exporter started, and the seconds since."""
        return self._began + time.monotonic()

    def unix(self, moment: float) -> float:
        """Return a time of the watch in present unix seconds: the machine's clock may have been set."""
        return moment + round(time.time() - self.now())

    def start(self) -> None:
        """Start the threads."""
        if self.log is not None:
            # Present lines are history; lines after this point are new. A file system that hangs does not keep the port
            # closed.
            self.threads.start("log", self._follow_log)
            wait({self._next_look()}, files.SECONDS)
        if self._scraper is not None:
            self._start_scraper()
            self.threads.start("self-scrape", self._self_scrape)
        self.running = True

    def stop(self) -> None:
        """End both threads and close the log; current requests are interrupted."""
        self.running = False
        self._stopping.set()
        self._looks.put(Future())
        if self._scraper is not None and self._client is not None:
            self._asked_for.put(None)
            self._scraper.end()
            self._client.end()
        self._stopped_at = min(self._stopped_at, time.monotonic())  # a second call does not wait again
        ended = self.threads.join(self._stopped_at + STOP_SECONDS)
        if self.log is not None:
            if ended:
                self.threads.attempt("log", self.log.end_lines)
            self.log.close()

    @contextmanager
    def view(self) -> Iterator[float]:
        """Lock the state, advanced to the yielded moment."""
        with self._lock:
            now = self.now()
            self.watch.log_trouble = self._log_trouble(now)
            self.watch.advance(now)
            if self.log is not None:
                self.log.save_if_changed(now)
            yield now

    def judge(self, now: float) -> Judgement:
        """Return what limits the server; call it inside `view`."""
        self._judged_at = now
        return self.watch.judge(now)

    def judged(self, now: float) -> Judgement:
        """Return the judgement with what is shown beside it; call it inside `view`."""
        judged = self.watch.report(self.judge(now), now)
        log = self.log
        lines = (
            {} if log is None else {"lines": sum(log.lines.values()), "unrecognised": sum(log.unrecognised.values())}
        )
        return cleaned(replace(judged, counts={**judged.counts, **lines}))

    def refresh(self) -> tuple[Future[None] | None, Future[str] | None]:
        """Have the log read and SGLang scraped.

        Returns when each is done: the log None without one, likewise the scrape.

        The scrape is shared, and has the configured time: how long a caller waits changes nothing for others.
        """
        # A look that is late is not waited for.
        is_read = self.log is not None and self.running and not self.log.is_late(files.SECONDS)
        read = self._next_look() if is_read else None
        if self._scraper is None:
            return read, None
        self._start_scraper()  # if it is asked before `start`
        with self._asking:
            if self._asked is None:
                self._asked = Future()
                self._asked_for.put(self._asked)
            return read, self._asked

    def _next_look(self) -> Future[None]:
        """Return when the log will have been read as it is now."""
        with self._asking:
            if self._look is None:
                self._look = Future()
                self._looks.put(self._look)
            return self._look

    def _start_scraper(self) -> None:
        if "scrape" not in self.threads.up:
            self.threads.start("scrape", self._scrape_on_demand)

    def _scrape_on_demand(self) -> None:
        assert self._scraper is not None
        while (asked := self._asked_for.get()) is not None:
            begin, found = time.monotonic(), ""
            try:
                answer = self._scraper.page(self.config.scrape_timeout)
                found = self._receive(answer, time.monotonic() - begin)
            finally:
                with self._asking:
                    self._asked = None
                asked.set_result(found)

    def scrape(self, patience: float) -> str:
        """Refresh, and wait for at most so many seconds; return SGLang's series, empty without an answer by then."""
        begin = time.monotonic()
        read, asked = self.refresh()
        if asked is not None:
            wait({asked}, patience)
        if read is not None:
            wait({read}, max(0.0, begin + min(FRESH_SECONDS, patience) - time.monotonic()))
        return passed_on(asked)

    def _log_trouble(self, now: float) -> str:
        """Return why the log cannot be read, empty if it can."""
        followed = () if self.log is None else self.log.files
        if not followed or any(status.up for status in followed):  # another one comes later or has ended
            self._log_read_at = now
            return ""
        if followed[0].reason == NO_ANSWER and self.watch.log_trouble != NO_ANSWER:
            logger.warning("log %s: %s", clean(followed[0].path), followed[0].words)
        return followed[0].reason

    @property
    def counts_log(self) -> bool:
        """Whether what the log shows is counted: a rotated or deleted file is still read for a while."""
        if self.log is None or not self.watch.log_trouble:
            return self.log is not None
        return self.log.last_line_at is not None and self.now() - self._log_read_at < ROTATION_SECONDS

    def _note_failure(self, error: ScrapeError, seconds: float) -> None:
        before = self.watch.failure
        failure = self.watch.lose(error.reason, str(error), self.now(), serves=error.serves)
        if before is None or before.reason != failure.reason:
            logger.warning("cannot scrape %s: %s", self.config.metrics_url, failure.message)
            if failure.reason == "http_404":
                self._ask_info_again()  # it may serve without metrics
        self.scrape_seconds, self.unrecognised_families = seconds, 0
        self._was_away = self._was_away or error.reason in AWAY

    def _receive(self, answer: str | ScrapeError, seconds: float) -> str:
        """Take a page, or why there is none; return what is passed on of it."""
        if self._stopping.is_set():  # interrupted by us
            return ""
        self._scraped_at = time.monotonic()
        if isinstance(answer, ScrapeError):
            with self._lock:
                self._note_failure(answer, seconds)
            return ""
        page, native, dropped = self._pages.read(answer)
        with self._lock:
            watch, now = self.watch, self.now()
            watch.server.capped.update(dropped)
            if watch.is_up is not True:
                logger.info("scraping %s", self.config.metrics_url)
            self.scrape_seconds, self.unrecognised_families = seconds, page.unrecognised
            starts = watch.server.starts
            is_known = watch.server.counters.alternate
            watch.take_page(page, now, now - seconds)
            if watch.server.counters.alternate and not is_known:
                logger.warning("%s: %s", self.config.metrics_url, TWO_SERVERS)
            if self._was_away or watch.server.starts != starts:
                self._ask_info_again()
                self._asks_limits = False  # until the release is known: it may be another server
            self._was_away = False
        return native

    def _ask_info_again(self) -> None:
        """Ask for `/server_info` soon: the server may have restarted, so earlier answers may be outdated."""
        self._info_due, self._info_pause = 0.0, INFO_RETRY_SECONDS[0]

    def _ask_server_info(self) -> None:
        with self._lock:
            failure = self.watch.failure
            without = failure is not None and failure.reason in MAY_ANSWER
            answers = self.watch.is_up is True or without or (failure is not None and failure.serves)
            if self._client is None or not answers or self._info_due is None or time.monotonic() < self._info_due:
                return
            self._info_due = None
        info = self._client.server_info(self.config.scrape_timeout)
        version = flags.version_tuple(info.version) if info is not None else None
        with self._lock:
            if without:
                self.watch.answered(answered=info is not None)
            if (info is None or without) and self._info_due is None:
                self._info_due = time.monotonic() + self._info_pause
                self._info_pause = min(2 * self._info_pause, INFO_RETRY_SECONDS[1])
            if info is not None:
                self.watch.take_facts(info)
            self._asks_limits = version is not None and version >= LIMITS_SINCE

    def _ask_limits(self) -> None:
        """Ask for the running limit of each DP rank, once after each start: only `/v1/loads` shows them."""
        with self._lock:
            has_ranks = any(dp is not None for dp in self.watch.server.schedulers)
            if self._client is None or self.watch.is_up is not True or not (self._asks_limits and has_ranks):
                return
            self._asks_limits = False
        with suppress(ScrapeError):  # without them the limits of the start stay
            loads = self._client.loads(min(self.config.scrape_timeout, LOADS_TIMEOUT_SECONDS))
            with self._lock:
                for load in loads:
                    self.watch.take_facts(load)

    def _check_health(self) -> None:
        """Ask for a token if requests make no progress: counters alone cannot distinguish a hang from a wait."""
        with self._lock:
            begin = self.now()
            due = begin - self._checked_at >= HEALTH_CHECK_PAUSE_SECONDS
            is_suspicious = self.watch.is_up is True and self.watch.server.progress.is_suspicious(begin)
            if self._client is None or not due or not is_suspicious:
                return
            self._checked_at = begin
        answered = self._client.health(HEALTH_CHECK_TIMEOUT_SECONDS)
        with self._lock:
            now = self.now()
            if answered is not None and not self._stopping.is_set():
                self.watch.server.progress.check(now, answered=answered, lasted=now - begin)

    def _self_scrape(self) -> None:
        pause = FIRST_DUE_CHECK_SECONDS
        while not self._stopping.wait(pause):
            pause = min(DUE_CHECK_SECONDS, self._self_scrape_seconds)
            waits = self.watch.waits(self.now())
            every = min(ASK_SECONDS, self._self_scrape_seconds) if waits else self._self_scrape_seconds
            if time.monotonic() - self._scraped_at >= every:
                self.scrape(self.config.scrape_timeout)
            self._ask_server_info()
            self._ask_limits()
            self._check_health()
            self._measure()

    def _measure(self) -> None:
        """Judge where nobody has asked for a while: alerts and the times since when something holds go on."""
        if self.now() - self._judged_at >= MEASURE_SECONDS:
            with self.view() as now:
                self.judge(now)

    def _follow_log(self) -> None:
        assert self.log is not None
        pause, seen, seen_at = POLL_SECONDS, self.log.last_line_at, time.monotonic()
        while not self._stopping.is_set():
            asked = self._asked_look(pause)
            try:
                while self._read_log() and not self._stopping.is_set():
                    pass
            finally:
                asked.set_result(None)
            if self._scraper is None:
                self._measure()
            if self.log.last_line_at != seen:
                seen, seen_at = self.log.last_line_at, time.monotonic()
            # Longer and longer after a line: a line of each scrape must not cost twenty polls.
            pause = min(max(POLL_SECONDS, (time.monotonic() - seen_at) / 2), QUIET_POLL_SECONDS)

    def _asked_look(self, seconds: float) -> Future[None]:
        """Return the look that somebody waits for, after at most `seconds`; else one that nobody does."""
        try:
            asked = self._looks.get(timeout=seconds)
        except Empty:
            return Future()
        with self._asking:
            self._look = None
        return asked

    def _read_log(self) -> bool:
        assert self.log is not None
        starts = self.watch.server.starts, self.watch.start_waits
        behind = self.log.poll(self._stopping.is_set)
        if (self.watch.server.starts, self.watch.start_waits) != starts:
            self._ask_info_again()
        return behind
