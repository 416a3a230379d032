"""What SGLang is asked, when, and how that went: the last scrape, `/server_info`, `/v1/loads`. Pure: time is an argument."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

INFO_RETRY_SECONDS = (15.0, 300.0)
# From this release on the answer comes from shared memory; before, it interrupts the schedulers.
SNAPSHOT_SINCE = (0, 5, 18)
LIMITS_SINCE = (0, 5, 8)
LEAST_SECONDS = 5.0  # between two requests, however often the exporter is scraped


@dataclass(slots=True)
class ScrapeHealth:
    """The last scrape of SGLang: how long it took, None before the first, and how many families no known release has."""

    scrape_seconds: float | None = None
    unrecognised: int = 0


class InfoSchedule:
    """When to ask for `/server_info`: once after each start; without an answer again, after growing pauses."""

    def __init__(self) -> None:
        self.ask_again()

    def ask_again(self) -> None:
        """Ask again: the server may have restarted, so earlier answers may be outdated."""
        self._due: float | None = 0.0
        self._pause = INFO_RETRY_SECONDS[0]

    def start_if_due(self, now: float) -> bool:
        """Return whether to ask now; the caller must then ask."""
        due = self._due is not None and now >= self._due
        if due:
            self._due = None
        return due

    def note_no_answer(self, now: float) -> None:
        """Note that there was no answer."""
        if self._due is None:
            self._due = now + self._pause
            self._pause = min(2 * self._pause, INFO_RETRY_SECONDS[1])


class LoadsSchedule:
    """When to ask for `/v1/loads`: after scrapes if the release counts steps, else once per start for the ranks' limits."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()  # failed requests, by reason
        self.counts_steps = False  # whether the release counts its steps
        self._once = False
        self._scraped_at: float | None = None  # the scrape after which it was asked last

    def set_release(self, version: tuple[int, int, int] | None, *, with_ranks: bool) -> None:
        """Note the release; None if unknown."""
        self.counts_steps = version is not None and version >= SNAPSHOT_SINCE
        self._once = version is not None and version >= LIMITS_SINCE and with_ranks

    def ask_again(self) -> None:
        """Stop asking until the release is known again: another server may be running."""
        self.counts_steps = self._once = False

    def start_if_due(self, scraped_at: float | None) -> bool:
        """Return whether to ask now; the caller must then ask. `scraped_at` is the last scrape."""
        if scraped_at is None or not (self.counts_steps or self._once):
            return False
        if not self._once and self._scraped_at is not None and scraped_at < self._scraped_at + LEAST_SECONDS:
            return False
        self._once, self._scraped_at = False, scraped_at
        return True

    def count_failure(self, reason: str) -> None:
        """Count a failed request by its reason; a 404 of this path does not mean that metrics are disabled."""
        self.failures["http_404" if reason == "metrics_disabled" else reason] += 1
