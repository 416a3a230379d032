"""Whether one server starts, serves or has ended, from its log. Pure; the constants' reasons: docs/decisions.md, "Liveness"."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from sglang_tuning_exporter.sglang.events import ENDS, Liveness, ServerArgs
from sglang_tuning_exporter.state.journal import WATCHDOG

if TYPE_CHECKING:
    from sglang_tuning_exporter.sglang.events import Event
    from sglang_tuning_exporter.state.journal import Journal

STARTING_SECONDS = 1800.0
ENDING_SECONDS = 60.0


class Life:
    """The last start and the last end in the log."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.started_at: float | None = None  # a start that is under way
        self.died = ""  # how the log says that the server ended; empty while it may run
        self.crash = ""  # which process crashed, and how
        self.watchdog = ""  # the stage of the last watchdog line
        self.has_served = False  # the log has a batch line of this start
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
            self.started_at, self.died, self.crash, self.has_served = now, "", "", False
            self._journal.forget(WATCHDOG)
        elif isinstance(event, Liveness) and event.what != "health_check_failed":
            self.started_at = None
            if event.what in ENDS:  # the lines after a crash say less
                self.died, self.crash = event.what, event.told or self.crash

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
        self.died = self.crash = ""
