"""The server's counter of retracted requests beside the lines of its log, for one scheduler. Pure."""

from __future__ import annotations

from collections import deque
from math import inf

from sglang_tuning_exporter.sglang.events import Retraction

# Reasons: docs/decisions.md, "Log lines that may be forged".
BASE_SECONDS = 5.0
CONFIRM_SECONDS = 15.0
DISAGREE_SECONDS = 60.0


class RetractionAccount:
    """Matches lines with what the counter gained; figures are requests.

    The lines never match more than the counter gained. Increments that no line matched expire after a minute, so a later forged line
    cannot use them.
    """

    def __init__(self, now: float, counter: float | None = None) -> None:
        self.counter = counter  # at the last scrape
        self.missed_at: float | None = None  # when log and counter last differed for a minute
        self._base_at = self._accepted_at = now
        self._gained = self._matched = self._expired = 0.0
        self._gains: deque[tuple[float, float]] = deque()  # when, and the sum of all gains by then

    def saved(self) -> list[float | None]:
        """Return the counter, and what it gained that no line has matched."""
        return [self.counter, self._gained - self._matched]

    @classmethod
    def restored(cls, counter: float, unmatched: float, now: float) -> RetractionAccount:
        """Go on from what `saved` returned; the gain until the next scrape is known, so the base is exact."""
        account = cls(-inf, counter)
        account.gain(max(unmatched, 0.0), now)
        account._matched = max(-unmatched, 0.0)
        account._accepted_at = now
        return account

    def gain(self, requests: float, now: float) -> None:
        """Add what the counter gained."""
        self._expire(now)
        if requests > 0:
            self._gained += requests
            self._gains.append((now, self._gained))

    def match(self, line: Retraction, now: float) -> bool:
        """Match a line with what the counter gained; return whether that was enough."""
        self._expire(now)
        if self._matched + line.requests > self._gained:
            return False
        self._matched += line.requests
        return True

    def accept(self, line: Retraction, at: float) -> None:
        """Match a line with what the counter gains later: it counts without the counter."""
        if not self.is_blurred(at):
            self._matched += line.requests
            self._accepted_at = max(at, self._accepted_at)

    def is_blurred(self, at: float) -> bool:
        """Whether the first scrape may already contain a line that was read at `at`."""
        return at - self._base_at <= BASE_SECONDS

    def _expire(self, now: float) -> None:
        while self._gains and now - self._gains[0][0] > DISAGREE_SECONDS:
            at, self._expired = self._gains.popleft()
            # Lines that the first scrape contains have matched nothing.
            if self._expired > self._matched and at - self._base_at > BASE_SECONDS + CONFIRM_SECONDS:
                self.missed_at = now
        # A line that was accepted without the counter takes increments from later lines for a minute only.
        most = self._gained if now - self._accepted_at > DISAGREE_SECONDS else inf
        if self._matched > most:
            self.missed_at = now
        self._matched = min(max(self._matched, self._expired), most)
