"""A flag that can limit throughput or latency: on which side of its default, and what it can cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from sglang_tuning_exporter.state.profiles import Trouble


@dataclass(frozen=True, slots=True)
class On:
    """The switch is set."""


@dataclass(frozen=True, slots=True)
class Above:
    """A number above this."""

    bound: float


@dataclass(frozen=True, slots=True)
class Below:
    """A number above `least` and below this."""

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
    """A flag, the side on which it is suspicious, and what it can cause.

    `proof` names the test in `suspect_proofs`; without proof an `only_proven` one is no suspect. `suggested` None:
    the release's default. `forced_by`: arguments (with these values, or any) for which SGLang sets the flag by
    itself. `only_with`: counts that must be above 1.
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
        """Return whether a value is on the suspicious side."""
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
    """A suspect of this server with the value to set; `suggested` None: remove the flag.

    `rows`: the diagnoses that it explains by figures. `place`: before their own advice, or instead of it. `gain`: the
    figures.
    """

    suspect: Suspect
    current: float | str
    suggested: float | str | None
    gain: str = ""
    rows: frozenset[str] = frozenset()
    place: Place = "before"

    @property
    def words(self) -> str:
        """What to do if there is no value to type."""
        return "start without it" if self.suspect.is_switch or self.suggested is None else ""
