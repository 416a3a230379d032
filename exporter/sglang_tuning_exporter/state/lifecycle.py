"""Whether one server starts, serves or has ended, and its starts, from log and metrics. Pure; the constants' reasons: docs/decisions.md, "Liveness"."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from sglang_tuning_exporter.sglang.args.printed import are_same_settings
from sglang_tuning_exporter.sglang.events import ENDS, Event, Liveness, ServerArgs
from sglang_tuning_exporter.state.journal import WATCHDOG, Journal

STARTING_SECONDS = 1800.0
ENDING_SECONDS = 60.0
# A log that comes back has the lines that were missed within this time, or not at all.
LATE_SECONDS = 60.0


class Lifecycle:
    """The last start and the last end in the log."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.started_at: float | None = None  # a start that is under way
        self.died = ""  # how the log says that the server ended; empty while it may run
        self.crash = ""  # which process crashed, and how
        self.watchdog = ""  # the stage of the last watchdog line
        self.has_served = False  # the log has a batch line of this start
        self.is_stopping = False  # it was asked to end: how its processes end then is no crash
        self._is_recalled = False  # the end was logged before the exporter started

    def works(self) -> None:
        """Note a batch line."""
        self.died, self.crash, self.has_served = "", "", True

    def decodes(self) -> None:
        """Note a decode line: the start is over."""
        self.started_at = None

    def take(self, event: Event, now: float) -> None:
        """Take a line that says that the server starts, is ready, hangs or ends."""
        if isinstance(event, ServerArgs):
            self.started_at, self.died, self.crash, self.has_served, self.is_stopping = now, "", "", False, False
            self._journal.forget(WATCHDOG)
        elif isinstance(event, Liveness) and event.what != "health_check_failed":
            self.started_at = None
            self.is_stopping = self.is_stopping or event.what == "draining"
            if event.what in ENDS:  # the lines after a crash say less
                self.died, self.crash = event.what, self.crash or event.detail

    def recall(self, event: Event, now: float) -> None:
        """Take such a line from before the exporter started."""
        self.take(event, now)
        self._is_recalled = bool(self.died)
        if isinstance(event, Liveness) and event.what == WATCHDOG:
            self._journal.see(WATCHDOG, now)
            self.watchdog = event.stage

    def recall_work(self) -> None:
        """Take a batch line from before the exporter started."""
        self.works()
        self.decodes()
        self._journal.forget(WATCHDOG)

    def answers(self, now: float = -inf) -> None:
        """Note that the server answers: it has started, and an end in the log is that of a run before this one.

        That holds for an end that was logged before the exporter started, or long ago.
        """
        self.started_at = None
        ended = self._journal.happened(self.died, now)
        if self._is_recalled or now - ended >= ENDING_SECONDS:
            self.died, self.crash, self._is_recalled = "", "", False

    def starts(self, now: float) -> bool:
        """Whether a start is under way: a large model loads for minutes."""
        return self.started_at is not None and now - self.started_at < STARTING_SECONDS

    def start_is_overdue(self, now: float) -> bool:
        """Whether a start took longer than any does, without an end."""
        return self.started_at is not None and not self.starts(now)

    def restarted(self) -> None:
        """Forget how the server before ended."""
        self.died, self.crash, self.is_stopping = "", "", False


class StartCount:
    """Counts each start once, whether the log, the metrics or both show it."""

    def __init__(self) -> None:
        self.count = 0
        self.in_log = False  # the log has starts
        self.settings_since = -inf  # since when the arguments are those of now
        self._unread = 0  # shown by metrics while the log could not be read
        self._unread_at = -inf  # when the log could last not be read
        self._settings: Mapping[str, object] = {}  # the arguments of the last start that has any
        self._settings_from: Mapping[str, object] = {}  # the object they were read from

    def logged(self) -> bool:
        """Take a start from the log; return whether it is a new one."""
        self.in_log = True
        if self._unread > 0:
            self._unread -= 1
            return False
        self.count += 1
        return True

    def counters_fell(self, *, log_is_read: bool) -> bool:
        """Take a start that the server's counters show; return whether it is counted now, and not with its line in the log."""
        if self.in_log and log_is_read:
            return False
        self.count += 1
        self._unread += self.in_log
        return True

    def wait(self, now: float, *, log_is_read: bool) -> None:
        """Give up the lines that a log did not bring in time."""
        if not log_is_read:
            self._unread_at = now
        elif now - self._unread_at > LATE_SECONDS:
            self._unread = 0

    def has_new_settings(self, args: Mapping[str, object]) -> bool:
        """Whether arguments came from `/server_info` that were not compared yet, of a server without starts in its log."""
        return not self.in_log and bool(args) and args is not self._settings_from

    def compare(self, args: Mapping[str, object], now: float) -> bool:
        """Remember the arguments; return whether they differ from those before."""
        before = self.remember(args)
        if are_same_settings(before, self._settings):
            return False
        self.settings_since = now
        return True

    def remember(self, args: Mapping[str, object]) -> Mapping[str, object]:
        """Remember the arguments; return those before."""
        before, self._settings_from = self._settings, args
        self._settings = dict(args)  # later lines of a start fill in what its arguments left open
        return before
