"""When the evidence of a finding was first and last printed. Pure; times in seconds."""

from __future__ import annotations

from collections.abc import Hashable

from sglang_tuning_exporter.diagnosis.findings import Finding
from sglang_tuning_exporter.state.journal import WORK
from sglang_tuning_exporter.state.signals import States, named


class Sightings:
    """The events and states of one start, and when they were first and last seen."""

    def __init__(self) -> None:
        self._first: dict[Hashable, float] = {}
        self._last: dict[Hashable, float] = {}
        self._together: dict[States, tuple[float, float]] = {}  # states of all signals together: first and last seen
        self._latest: dict[int | None, States] = {}  # of each DP rank at the last batch line of the present time
        self._now = 0.0
        self._states: States | None = None  # those seen last; most often the next ones are the same
        self._since = self._until = 0.0

    def see(self, what: Hashable, now: float) -> None:
        """Note an event printed at `now`, perhaps out of order."""
        self._first[what] = min(self._first.get(what, now), now)
        self._last[what] = max(self._last.get(what, now), now)

    def see_states(self, dp: int | None, states: States, now: float) -> None:
        """Note the states of a scheduler at a batch line. Those before another line of the same time held for no time."""
        if now != self._now:
            self._take_latest()
            self._now = now
        self._latest[dp] = states

    def _take_latest(self) -> None:
        for states in self._latest.values():
            if states is not self._states:
                self._keep()
                self._states, self._since = states, self._now
            self._until = self._now
        self._latest.clear()

    def _keep(self) -> None:
        if self._states is not None:
            first = self._together.get(self._states, (self._since, 0.0))[0]
            self._together[self._states] = (first, self._until)
            self._states = None

    def _take_apart(self) -> None:
        """Note when each signal's state was seen: there are dozens of combinations and millions of lines."""
        self._take_latest()
        self._keep()
        for states, (first, last) in self._together.items():
            for item in (*named(states).items(), WORK):
                self._first[item] = min(self._first.get(item, first), first)
                self._last[item] = max(self._last.get(item, last), last)
        self._together.clear()

    def last(self, what: Hashable) -> float | None:
        """Return when an event, by its name, or a state, by signal and state, was last seen; None where it never was."""
        self._take_apart()
        return self._last.get(what)

    def of(self, finding: Finding) -> tuple[float | None, float | None]:
        """Return when the evidence of a finding was first and last printed."""
        self._take_apart()
        keys = finding.diagnosis.condition.measured_by
        first = [self._first[key] for key in keys if key in self._first]
        last = [self._last[key] for key in keys if key in self._last]
        return min(first, default=None), max(last, default=None)
