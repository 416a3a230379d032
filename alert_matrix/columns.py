"""The columns of the matrix: how Prometheus scrapes and evaluates, what disturbs it, and when."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Literal, TypeAlias

from alert_matrix.troubles import MINUTE, Case

Level: TypeAlias = Literal["present", "below", "absent"]
Scrape: TypeAlias = Literal["read", "failed", "none"]  # none: Prometheus itself was away
SCRAPES = (5, 15, 30, 60, 120)
EVALUATIONS = (15, 60)
HALF = "1 in 2 fails"
AT_THE_START, LATER = "12 min without, at the start", "12 min without, later"
MISSES: dict[str, float] = {
    "no miss": 0.0,
    "1 in 20 fails": 1 / 20,
    "1 in 5 fails": 1 / 5,
    HALF: 1 / 2,
    "30 s without": 0.0,
    AT_THE_START: 0.0,
    LATER: 0.0,
}
# So many seconds of scrapes are lost, of each one's interval, where no window of five minutes is sure to hold enough.
OFTEN_LOST = 24.0
DISTURBANCES = ("nothing else", "exporter restarts", "server restarts", "target relabelled", "DP ranks come and go")
GAP, LONG_GAP, RESTART, LOADING = 30.0, 12 * MINUTE, 30.0, 90.0
# An exporter that has just come must see a hang for a minute, and judge for half of one.
SEES_AGAIN = 60.0
# Scrapes lie at one of five places between two evaluations: on the same moment every window is one sample longer.
PLACES = 5


@dataclass(frozen=True)
class Column:
    """One way in which a server is scraped and its rules are evaluated."""

    scrape: int
    evaluation: int
    misses: str
    disturbance: str

    def __str__(self) -> str:
        return f"scrape {self.scrape} s, {self.misses}, evaluation {self.evaluation} s, {self.disturbance}"


@dataclass(frozen=True)
class Run:
    """One cell: a case at a level in a column, and the moments at which things happen. Seconds from the start of Prometheus."""

    case: Case
    level: Level
    column: Column

    @property
    def _seed(self) -> str:
        """The seed of the run, the same in every run of the matrix and for both evaluation intervals."""
        return f"{self.case.name}|{self.level}|{self.column.scrape}|{self.column.misses}|{self.column.disturbance}"

    @cached_property
    def place(self) -> int:
        """The offset of the scrapes between two evaluations."""
        return random.Random(self._seed).randrange(PLACES)

    @property
    def begin(self) -> float:
        """When the trouble begins: not at a whole interval."""
        return self.case.history + 7.0

    @property
    def _longest_delay(self) -> float:
        """The largest delay by late scrapes and evaluations in this column, the same for all servers of one file."""
        return 8.0 * self.column.scrape + 2.0 * self.column.evaluation

    @property
    def has_long_gap(self) -> bool:
        """Whether Prometheus is away for longer than it looks back."""
        return self.column.misses in {AT_THE_START, LATER}

    @cached_property
    def pending(self) -> float:
        """A moment while the alert is pending, or soon after an event."""
        return self.begin + (0.4 * self.case.time if self.case.time else 2 * MINUTE)

    @cached_property
    def late(self) -> float:
        """A moment at which it must be firing."""
        if self.case.seen_for is not None:
            return self.begin + self.case.seen_for / 2
        delay = LONG_GAP if self.has_long_gap else LOADING
        settled = self.case.settled if self.restart is not None and self.restart > self.begin else 0.0
        return self.begin + delay + self.case.time + settled + self._longest_delay + MINUTE

    @cached_property
    def end(self) -> float:
        """When the trouble is over."""
        if self.case.seen_for is not None:
            return self.begin + self.case.seen_for
        trouble = self.case.present if self.level == "present" else self.case.below
        if trouble is not None and trouble.lasts is not None:
            return self.begin + trouble.lasts
        return self.late + (LONG_GAP + self.case.time if self.has_long_gap else 5 * MINUTE) + 3 * MINUTE

    @cached_property
    def stop(self) -> float:
        """When the run is over."""
        last = max(self.end, self.late + (LONG_GAP if self.has_long_gap else 0.0))
        tail = self.case.tail if self.case.tail < inf else 0.0
        return last + tail + self.case.keep + self._longest_delay + 2 * MINUTE

    @cached_property
    def gaps(self) -> tuple[tuple[float, float], ...]:
        """From when to when the exporter could not be scraped."""
        found: list[tuple[float, float]] = []
        if self.column.misses == "30 s without":
            found += [(at, at + GAP) for at in (self.pending, self.late)]
        if self.column.disturbance == "exporter restarts":
            found += [(at, at + RESTART) for at in (self.pending, self.late)]
        trouble = {"present": self.case.present, "below": self.case.below}.get(self.level)
        if trouble is not None and trouble.is_exporter_away:
            found.append((self.begin, self.end))
        return tuple(found)

    @cached_property
    def away(self) -> tuple[float, float] | None:
        """From when to when Prometheus itself was away."""
        if self.column.misses == AT_THE_START:
            return self.begin - 2 * MINUTE, self.begin - 2 * MINUTE + LONG_GAP
        if self.column.misses == LATER:
            return self.late, self.late + LONG_GAP
        return None

    @cached_property
    def restart(self) -> float | None:
        """When the server restarts: while the alert is pending, or well before the trouble if the trouble is that the server is down."""
        if self.column.disturbance != "server restarts":
            return None
        if self.case.is_server_away or self.case.settled > 10 * MINUTE:
            return self.begin - (self.case.history / 2 if not self.case.settled else self.case.settled + 3 * MINUTE)
        return self.pending

    @cached_property
    def scrapes(self) -> tuple[tuple[float, Scrape], ...]:
        """Every scrape, and how it ended."""
        step = self.column.scrape
        chance, share = random.Random("scrapes " + self._seed), MISSES[self.column.misses]
        found: list[tuple[float, Scrape]] = []
        trouble = {"present": self.case.present, "below": self.case.below}.get(self.level)
        apart, last = (trouble.scrapes_apart if trouble is not None else 0.0), -1e9
        at = step * self.place / PLACES
        while at <= self.stop:
            if self.begin <= at < self.end and at - last < apart:
                found.append((at, "none"))
                at += step
                continue
            last = at
            is_missed = chance.random() < share
            ended: Scrape = "failed" if is_missed or any(begin <= at < end for begin, end in self.gaps) else "read"
            if self.away is not None and self.away[0] <= at < self.away[1]:
                ended = "none"
            found.append((at, ended))
            at += step
        return tuple(found)

    @property
    def is_unseen_before_restart(self) -> bool:
        """Whether the exporter restarts before a scrape has read the event that began the trouble."""
        return not any(ended == "read" and self.begin < at < self.pending for at, ended in self.scrapes)

    @cached_property
    def interval(self) -> float:
        """The longest time between two scrapes that were read while the alert was to come, gaps apart."""
        last = self.deadline_of_the_seen + 8 * self.column.scrape
        read = [at for at, ended in self.scrapes if ended == "read" and at <= last]
        before = sum(at < self.begin for at in read)
        read = read[max(before - 1, 0) :]  # from the last one before the trouble on
        shares = MISSES[self.column.misses]
        if not shares or len(read) < 2:
            return float(self.column.scrape)
        steps = [later - sooner for sooner, later in pairwise(read)]
        return max([self.column.scrape, *(step for step in steps if step < LONG_GAP)])

    @property
    def deadline_of_the_seen(self) -> float:
        """By when it must fire where scrapes and evaluations take no time."""
        own = self.begin + self.case.time
        visible = self.begin
        if self.away is not None and self.away[0] < own:
            visible = self.away[1]
        if self.restart is not None and self.begin < self.restart < own:
            visible = max(visible, self.restart + LOADING + self.case.settled)
        if visible > self.begin:
            own = visible + self.case.time
        if self.column.misses == "30 s without":
            own += GAP
        if self.column.disturbance == "exporter restarts" and not self._is_exporter_away:
            own += RESTART + SEES_AGAIN
        return own

    @property
    def _is_exporter_away(self) -> bool:
        return self.case.present.is_exporter_away

    @property
    def deadline(self) -> float:
        """By when it must fire: two intervals of each kind later."""
        return self.deadline_of_the_seen + 2 * self.interval + 2 * self.column.evaluation
