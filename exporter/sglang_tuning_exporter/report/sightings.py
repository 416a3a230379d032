"""When what a finding rests on was first and last printed. Pure; moments in seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tuning_exporter.state.signals import named

if TYPE_CHECKING:
    from collections.abc import Hashable

    from sglang_tuning_exporter.diagnosis.findings import Finding
    from sglang_tuning_exporter.state.rank import RankState
    from sglang_tuning_exporter.state.signals import States


class Sightings:
    """What one start of a server has shown, and when."""

    def __init__(self) -> None:
        self._first: dict[Hashable, float] = {}
        self._last: dict[Hashable, float] = {}
        self._together: dict[States, tuple[float, float]] = {}  # all signals' states at once: when first and last

    def see(self, what: Hashable, now: float | None) -> None:
        """Take what was printed at `now`, perhaps later than others; None where no times are printed."""
        if now is not None:
            self._first[what] = min(self._first.get(what, now), now)
            self._last[what] = max(self._last.get(what, now), now)

    def see_states(self, rank: RankState, now: float | None) -> None:
        """Take the state that each signal of a scheduler has at `now`."""
        if now is not None:
            states = rank.states_now
            seen = self._together.get(states)
            self._together[states] = (now if seen is None else seen[0], now)

    def _take_apart(self) -> None:
        """Note of each signal what was kept of all together: dozens of combinations, where lines are millions."""
        for states, (first, last) in self._together.items():
            for item in named(states).items():
                self._first[item] = min(self._first.get(item, first), first)
                self._last[item] = max(self._last.get(item, last), last)
        self._together.clear()

    def last(self, what: Hashable) -> float | None:
        """Give when an event, by its name, or a state, by signal and state, was last seen; None where it never was."""
        self._take_apart()
        return self._last.get(what)

    def of(self, finding: Finding) -> tuple[float | None, float | None]:
        """Give when what a finding rests on was first and last printed."""
        self._take_apart()
        keys = finding.diagnosis.condition.traces
        first = [self._first[key] for key in keys if key in self._first]
        last = [self._last[key] for key in keys if key in self._last]
        return min(first, default=None), max(last, default=None)
