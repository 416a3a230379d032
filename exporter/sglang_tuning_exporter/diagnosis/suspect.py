"""A flag that can limit throughput or latency when it is set: on which side of its default, and what it can cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from sglang_tuning_exporter.state.profiles import Trouble


@dataclass(frozen=True, slots=True)
class On:
    """The switch is set."""


@dataclass(frozen=True, slots=True)
class Above:
    """A figure above this."""

    bound: float


@dataclass(frozen=True, slots=True)
class Below:
    """A figure above `least` and below this."""

    bound: float
    least: float = 0.0


@dataclass(frozen=True, slots=True)
class Among:
    """One of these words."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Other:
    """Any word but these."""

    words: tuple[str, ...] = ()


Side: TypeAlias = On | Above | Below | Among | Other


@dataclass(frozen=True, slots=True)
class Suspect:
    """A flag, the side on which it is a suspect, and what it can cause.

    `proof` names the test in `suspects` that says whether figures of this server show it; `only_proven` where it is no
    suspect without them. `suggested` is None for the release's default. `forced_by` are arguments (with these values, or
    with any) beside which SGLang sets it by itself; `only_with` are counts that must be above 1.
    """

    arg: str
    side: Side
    troubles: tuple[Trouble, ...]
    why: str
    will_not_help_if: str
    cost: str
    source: str
    proof: str = ""
    only_proven: bool = False
    suggested: float | str | None = None
    forced_by: tuple[tuple[str, tuple[object, ...]], ...] = ()
    only_with: tuple[str, ...] = ()
    gpu_only: bool = False

    @property
    def is_switch(self) -> bool:
        """Whether the flag is set without a value."""
        return isinstance(self.side, On)

    def suits(self, value: object) -> bool:
        """Say whether a value lies on the suspicious side."""
        side = self.side
        if isinstance(side, On):
            return value is True
        if isinstance(side, (Among, Other)):
            return isinstance(value, str) and (value in side.words) is isinstance(side, Among)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return value > side.bound if isinstance(side, Above) else side.least < value < side.bound


Place: TypeAlias = Literal["instead", "before"]


@dataclass(frozen=True, slots=True)
class Named:
    """A suspect of this server with what to set it to; `suggested` None where dropping the flag is all there is to do.

    `rows` are the diagnoses that figures show it to explain, empty where nothing shows it; `place` is where it stands beside their
    own advice; `gain` has the figures.
    """

    suspect: Suspect
    current: float | str
    suggested: float | str | None
    gain: str = ""
    rows: frozenset[str] = frozenset()
    place: Place = "before"

    @property
    def words(self) -> str:
        """What to do where there is no value to type."""
        return "start without it" if self.suspect.is_switch or self.suggested is None else ""
