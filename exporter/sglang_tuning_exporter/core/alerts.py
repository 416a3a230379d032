"""The alert clocks: 1 once a condition was above its limit for `after`, 0 once it was not for `until`, between them the last word. Pure.

A consequence does not begin while its cause holds, for at most another `after`; once begun, it stays until its own condition ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core.events import is_count
from sglang_tuning_exporter.core.findings import Alert
from sglang_tuning_exporter.core.judge import Measured
from sglang_tuning_exporter.core.rows import ROWS, Row
from sglang_tuning_exporter.core.server import Server

UNKNOWN_SECONDS = 60.0  # a break of knowledge of more than this is a start
NOTIFIED_AS_WELL = frozenset({"requests_rejected", "restart_loop"})  # beside their cause


@dataclass(slots=True)
class Clock:
    """The alert of one row. `value`: True, False, or None while it is not known; times are those of the caller."""

    row: Row
    factor: float = 1.0  # times `until`
    after: float | None = None  # in place of the row's
    since: float | None = None  # above the limit
    calm: float | None = None  # at or below it
    known: float | None = None  # measured last
    firing: float | None = None  # since when it is True
    value: bool | None = None

    def pass_on(self, now: float, begun: float, *, holds: bool | None, hindered: bool) -> Alert | None:
        """Take what holds now; return the alert that ends.

        begun: when the event of the row happened. hindered: a cause holds, so it does not begin before another `after`.
        """
        if holds is None:
            return None
        if self.known is not None and now - self.known > UNKNOWN_SECONDS:
            self.since = self.calm = None
            self.value = True if self.firing is not None else None
        self.known = now
        if holds:
            self.calm, self.since = None, begun if self.since is None else self.since
            after = self.factor * self.row.after if self.after is None else self.after
            wait = after * (2 if hindered else 1)
            if self.firing is None and now - self.since >= wait:
                self.firing, self.value = self.since + wait, True
            return None
        self.since, self.calm = None, now if self.calm is None else self.calm
        if now - self.calm < self.factor * self.row.until:
            return None
        self.value = False
        if self.firing is None:
            return None
        alert, self.firing = self.alert(self.calm + self.factor * self.row.until), None
        return alert

    def alert(self, until: float | None) -> Alert:
        """Return what is or was notified."""
        return Alert(self.row.alert, self.row.id, self.row.severity, self.firing or 0.0, until)


class Clocks:
    """The clocks of all rows that have an alert, but of those that the user accepts."""

    def __init__(self, profile: profiles.Profile) -> None:
        self.by_row = {
            row.id: Clock(row, profile.alert_wait, profile.wait_of(row.id, row.after))
            for row in ROWS
            if row.alert and row.id not in profile.accepts
        }

    def pass_on(self, measured: Measured, server: Server, now: float) -> list[Alert]:
        """Take what was measured; return the alerts that end."""
        holding = set(measured.holding)
        firing = {name for name, clock in self.by_row.items() if clock.firing is not None} & holding
        ended = []
        for name, clock in self.by_row.items():
            row, figure = clock.row, measured.figures.get(name)
            causes = () if holding.isdisjoint(row.causes) else measured.causes(row)
            hindered = not holding.isdisjoint(causes) and name not in NOTIFIED_AS_WELL
            if clock.firing is None and hindered and not firing.isdisjoint(causes):
                continue  # somebody has been called for the cause
            holds = None if figure is None else name in holding
            alert = clock.pass_on(now, _event_at(row, server, now), holds=holds, hindered=hindered)
            if alert is not None:
                ended.append(alert)
        return ended

    def saved(self, now: float) -> dict[str, list[float | bool | None]]:
        """Return the clocks that run as plain JSON, times as ages in seconds."""
        return {
            name: [
                *(None if at is None else now - at for at in (each.since, each.calm, each.known, each.firing)),
                each.value,
            ]
            for name, each in self.by_row.items()
            if each.known is not None
        }

    def restore(self, saved: object, now: float) -> None:
        """Go on from what `saved` returned; what cannot be read is left out."""
        for name, entry in saved.items() if isinstance(saved, dict) else ():
            clock = self.by_row.get(name)
            if clock is None or not isinstance(entry, list) or len(entry) != 5 or not isinstance(entry[4], bool | None):
                continue
            if all(age is None or is_count(age) for age in entry[:4]):
                clock.since, clock.calm, clock.known, clock.firing = (
                    None if age is None else now - age for age in entry[:4]
                )
                clock.value = entry[4]

    @property
    def firing(self) -> list[Alert]:
        """The alerts that have not ended."""
        return [clock.alert(None) for clock in self.by_row.values() if clock.firing is not None]


def _event_at(row: Row, server: Server, now: float) -> float:
    """Return when the event of a row happened or a hang began, `now` for a state."""
    if row.id == "scheduler_stuck" and server.hangs:
        return max(server.hangs[-1].begin, server.last.get("hangs", now) - row.after)  # it is known from then on
    if row.when.kind != "event":
        return now
    return max((server.last[name] for name in row.when.counts if name in server.last), default=now)
