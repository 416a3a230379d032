"""When things happened to one server. Pure."""

from __future__ import annotations

from collections import Counter, deque
from math import inf
from typing import get_args

from sglang_tuning_exporter.sglang.args.values import number
from sglang_tuning_exporter.sglang.events import OUT_OF_MEMORY_PHASES, LivenessKind

# Names of events beside out-of-memory failures (by phase) and what `Liveness` says (by kind).
START, WORK, RETRACTION, REJECTION, ABORTED = "start", "work", "retraction", "rejection", "aborted_requests"
HUNG = "hung"
WATCHDOG: LivenessKind = "watchdog_timeout"
_AGED = frozenset({*OUT_OF_MEMORY_PHASES, *get_args(LivenessKind)})  # whose times outlast a restart of the exporter
_MARKS_KEPT = 1024


class Journal:
    """The last failures, starts and signs of life, and when each kind of event was last seen."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, str]] = deque(maxlen=_MARKS_KEPT)
        self._last_seen: dict[str, float] = {}
        self._happened: dict[str, float] = {}

    def see(self, what: str, now: float) -> None:
        """Note that an event was seen."""
        self._last_seen[what] = now

    def mark(self, what: str, now: float) -> None:
        """Note a failure, a start or a sign of life, which are counted over time."""
        self._marks.append((now, what))
        self._last_seen[what] = now
        if what in _AGED:
            self._happened[what] = max(self._happened.get(what, -inf), now)  # of two logs one is read first

    def forget(self, what: str) -> None:
        """Forget that an event was seen."""
        self._last_seen.pop(what, None)

    def last_seen(self, what: str) -> float | None:
        """Return when an event was last seen; None where it never was."""
        return self._last_seen.get(what)

    def happened(self, what: str, default: float) -> float:
        """Return when an event last happened, in this process or in an earlier one."""
        return self._happened.get(what, default)

    def age(self, what: str, now: float) -> float | None:
        """Return how long ago a failure, by phase, or a `LivenessKind` last happened; None where it never did."""
        at = self._happened.get(what)
        return None if at is None else max(now - at, 0.0)

    def count(self, since: float, failures_since: float) -> Counter[str]:
        """Count the marks since a time; out-of-memory failures have one of their own."""
        return Counter(
            what for at, what in self._marks if at >= (failures_since if what in OUT_OF_MEMORY_PHASES else since)
        )

    def is_last_word(self, what: str) -> bool:
        """Whether no work was seen after an event."""
        seen = self._last_seen.get(what)
        return seen is not None and seen > self._last_seen.get(WORK, -inf)

    def saved(self, now: float) -> dict[str, float]:
        """Return the ages of what happened."""
        return {what: now - at for what, at in self._happened.items()}

    def restore(self, saved: object, then: float, now: float) -> None:
        """Take over the ages that `saved` returned at the time `then`; what cannot be read is left out."""
        for what, age in saved.items() if isinstance(saved, dict) else ():
            seconds = number(age)
            if what in _AGED and seconds is not None:
                self._happened[what] = min(then - seconds, now)
