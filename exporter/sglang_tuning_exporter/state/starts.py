"""The starts of one server, from log and metrics, and the settings of the last one. Pure."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from sglang_tuning_exporter.sglang.args.printed import are_same_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

# A log that comes back has the lines that were missed within this time, or not at all.
LATE_SECONDS = 60.0


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
