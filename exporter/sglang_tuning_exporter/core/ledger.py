"""How many observations of each latency missed its objective, minute by minute for six hours: what burn rates are judged by. Pure.

An error budget is the share that may miss the objective (0.01 for 0.99). At 14.4 times the allowed rate 2 % of a month's budget are gone in an
hour, at 6 times 5 % in six hours. A short window, a twelfth of the long one, shows that it goes on. (Google's SRE Workbook, alerting on SLOs.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from sglang_tuning_exporter.core.events import is_count, lists
from sglang_tuning_exporter.core.server import LATENCIES_JUDGED

MINUTE, KEPT_MINUTES = 60.0, 360
ENOUGH_REQUESTS = 20.0  # in the long window: one slow request of fewer is a large share
COUNTS = tuple(f"{latency}_{what}" for latency in LATENCIES_JUDGED for what in ("observed", "late"))


class Rate(NamedTuple):
    """A burn rate: times the budget, over a long and a short window in seconds."""

    times: float
    long: float
    short: float


FAST, SLOW = Rate(14.4, 3600.0, 300.0), Rate(6.0, 6 * 3600.0, 1800.0)


class Ledger:
    """What was counted when each minute began: a window is the difference to now."""

    def __init__(self) -> None:
        self._minutes: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=KEPT_MINUTES)

    def turn(self, counted: Mapping[str, float], now: float) -> None:
        """Begin a new minute, before what a page gained is counted."""
        begin = now // MINUTE * MINUTE
        if not self._minutes or begin > self._minutes[-1][0]:
            self._minutes.append((begin, {name: counted.get(name, 0.0) for name in COUNTS}))

    def burning(self, counted: Mapping[str, float], latency: str, rate: Rate, now: float, begun: float) -> float | None:
        """Return the share that missed the objective, the smaller of both windows; None where that is not known yet.

        begun: when the server or the exporter started: for as long as the short window nothing is said.
        """

        def gained(name: str, seconds: float) -> float:
            then = next((then for begin, then in self._minutes if begin + MINUTE > now - seconds), counted)
            return max(counted.get(name, 0.0) - then.get(name, 0.0), 0.0)

        long, short = gained(f"{latency}_observed", rate.long), gained(f"{latency}_observed", rate.short)
        enough = gained("time_to_first_token_observed", rate.long) >= ENOUGH_REQUESTS
        if not enough or not long or not short or now - begun < rate.short:
            return None
        return min(gained(f"{latency}_late", rate.long) / long, gained(f"{latency}_late", rate.short) / short)

    def saved(self, now: float) -> list[list[object]]:
        """Return it as plain JSON: ages in seconds, and what was counted then."""
        return [[round(now - begin), then] for begin, then in self._minutes]

    def restore(self, saved: object, now: float) -> None:
        """Go on from what `saved` returned; what cannot be read is left out."""
        found: list[tuple[float, Mapping[str, float]]] = []
        for entry in lists(saved):
            match entry:
                case [age, dict() as then] if is_count(age) and age <= KEPT_MINUTES * MINUTE:
                    known = {str(name): float(value) for name, value in then.items() if is_count(value)}
                    found.append(((now - age) // MINUTE * MINUTE, known))
        self._minutes.extend(sorted(found, key=lambda each: each[0]))
