"""When to ask for `/v1/loads`, and how that goes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tuning_exporter.sglang.server_info import Load

# From here on it is answered from a snapshot in shared memory; before, the schedulers are asked, and are held up.
SNAPSHOT_SINCE = (0, 5, 18)
LIMITS_SINCE = (0, 5, 8)
LEAST_SECONDS = 5.0  # between two times, however often somebody scrapes


class LoadsInquiry:
    """Whether to ask after a scrape: always where the release counts steps, else once a start for the ranks' limits.

    `failures` counts by reason the times that no answer came.
    """

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self._once = self._always = False
        self._scraped_at: float | None = None  # the scrape after which it was last asked

    @property
    def counts_steps(self) -> bool:
        """Whether the release is one that counts its steps."""
        return self._always

    def starts(self, version: tuple[int, int, int] | None, *, with_ranks: bool) -> None:
        """Note which release runs; None where that is not known."""
        self._always = version is not None and version >= SNAPSHOT_SINCE
        self._once = version is not None and version >= LIMITS_SINCE and with_ranks

    def want(self) -> None:
        """Ask no more until it is known what runs: another server may be there."""
        self._always = self._once = False

    def take(self, scraped_at: float | None) -> bool:
        """Whether to ask now, `scraped_at` being the last scrape; the one who is told so does it."""
        if scraped_at is None or not (self._always or self._once):
            return False
        if not self._once and self._scraped_at is not None and scraped_at < self._scraped_at + LEAST_SECONDS:
            return False
        self._once, self._scraped_at = False, scraped_at
        return True

    def answered(self, loads: Sequence[Load]) -> None:
        """Note an answer; one without a scheduler is a failure."""
        if not loads:
            self.failures["invalid"] += 1

    def failed(self, reason: str) -> None:
        """Count that no answer came, and why."""
        self.failures[reason] += 1
