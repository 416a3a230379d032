"""How many observations of each latency missed its objective, minute by minute for six hours: what burn rates are judged by. Pure.

An error budget is the share that may miss the objective (0.01 for 0.99). At 14.4 times the allowed rate 2 % of a month's budget are gone in an
hour, at 6 times 5 % in six hours. A short window, a twelfth of the long one, shows that it goes on. (Google's SRE Workbook, alerting on SLOs.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sglang_tuning_exporter.core.events import is_count
from sglang_tuning_exporter.sglang.metrics.histograms import Histogram

MINUTE, KEPT_MINUTES = 60.0, 360
ENOUGH_REQUESTS = 20.0  # in the long window: one slow request of fewer is a large share
REQUESTS = "time_to_first_token"


class Missed(NamedTuple):
    """Observations of a latency, and those above its objective."""

    observed: float
    late: float


@dataclass(frozen=True, slots=True)
class Rate:
    """A burn rate: times the budget, over a long and a short window in seconds."""

    times: float
    long: float
    short: float


FAST, SLOW = Rate(14.4, 3600.0, 300.0), Rate(6.0, 6 * 3600.0, 1800.0)


class Ledger:
    """Minutes with what was observed in each."""

    def __init__(self) -> None:
        self._minutes: deque[tuple[float, dict[str, Missed]]] = deque(maxlen=KEPT_MINUTES)

    def add(self, gained: Mapping[str, Histogram], objectives: Mapping[str, float | None], now: float) -> None:
        """Add what a page gained."""
        begin = now // MINUTE * MINUTE
        if not self._minutes or begin > self._minutes[-1][0]:
            self._minutes.append((begin, {}))
        minute = self._minutes[-1][1]
        for name, objective in objectives.items():
            seen = gained.get(name)
            if seen is not None and objective is not None:
                before = minute.get(name, Missed(0.0, 0.0))
                minute[name] = Missed(before.observed + seen.observations, before.late + seen.above(objective))

    def sum(self, latency: str, seconds: float, now: float) -> Missed:
        """Return what was observed in the last `seconds`."""
        found = [
            minute[latency] for begin, minute in self._minutes if begin + MINUTE > now - seconds and latency in minute
        ]
        return Missed(sum(each.observed for each in found), sum(each.late for each in found))

    def burning(self, latency: str, rate: Rate, now: float, begun: float) -> float | None:
        """Return the share that missed the objective, the smaller of both windows; None where that is not known yet.

        begun: when the server or the exporter started: for as long as the short window nothing is said.
        """
        long, short = self.sum(latency, rate.long, now), self.sum(latency, rate.short, now)
        enough = self.sum(REQUESTS, rate.long, now).observed >= ENOUGH_REQUESTS
        if not enough or not long.observed or not short.observed or now - begun < rate.short:
            return None
        return min(long.late / long.observed, short.late / short.observed)

    def saved(self, now: float) -> list[list[object]]:
        """Return it as plain JSON: ages in seconds, and the counts by latency."""
        return [
            [round(now - begin), {name: list(each) for name, each in minute.items()}] for begin, minute in self._minutes
        ]

    def restore(self, saved: object, now: float) -> None:
        """Go on from what `saved` returned; what cannot be read is left out."""
        found: list[tuple[float, dict[str, Missed]]] = []
        for entry in saved if isinstance(saved, list) else ():
            if not (isinstance(entry, list) and len(entry) == 2 and is_count(entry[0]) and isinstance(entry[1], dict)):
                continue
            minute = {str(name): Missed(*counts) for name, counts in entry[1].items() if _are_counts(counts)}
            if 0 <= entry[0] <= KEPT_MINUTES * MINUTE:
                found.append(((now - entry[0]) // MINUTE * MINUTE, minute))
        self._minutes.extend(sorted(found, key=lambda each: each[0]))


def _are_counts(values: object) -> bool:
    return isinstance(values, Iterable) and not isinstance(values, (str, dict)) and len(found := list(values)) == 2 and all(map(is_count, found))  # fmt: skip
