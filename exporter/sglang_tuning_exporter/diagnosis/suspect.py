"""A flag that can limit throughput or latency: on which side of its default, and what it can cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Literal, TypeAlias

from sglang_tuning_exporter.state.profiles import Trouble

if TYPE_CHECKING:
    from sglang_tuning_exporter.diagnosis.suspect_proofs import ObservedLoad


Side: TypeAlias = Callable[[object], bool]


def is_on(value: object) -> bool:
    """Return whether a switch is set."""
    return value is True


def above(bound: float) -> Side:
    """Return the side of numbers above this."""
    return between(bound, inf)


def between(least: float, most: float) -> Side:
    """Return the side of numbers between these."""
    return lambda value: (
        isinstance(value, (int, float)) and not isinstance(value, bool) and least < value and (value < most)
    )


def among(*words: str) -> Side:
    """Return the side of these words."""
    return lambda value: value in words if isinstance(value, str) else False


def other_than(*words: str) -> Side:
    """Return the side of all words but these."""
    return lambda value: value not in words if isinstance(value, str) else False


# What figures of a server show of a suspect with this value.
Proof: TypeAlias = Callable[["Suspect", "float | str", "ObservedLoad"], "NamedSuspect | None"]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A flag, the side on which it is suspicious, and what it can cause.

    `is_suspicious`: whether a value is on the suspicious side. `proof`: a test of `suspect_proofs`; an `only_proven` suspect
    needs one. `suggested` None: the release's default. `forced_by`: arguments (with these values, or any) for which
    SGLang sets the flag by itself. `only_with`: counts that must be above 1.
    """

    arg: str
    is_suspicious: Side
    troubles: tuple[Trouble, ...]
    why: str
    will_not_help_if: str
    cost: str
    source: str
    proof: Proof | None = None
    only_proven: bool = False
    suggested: float | str | None = None
    forced_by: tuple[tuple[str, tuple[object, ...]], ...] = ()
    only_with: tuple[str, ...] = ()
    gpu_only: bool = False

    @property
    def is_switch(self) -> bool:
        """Whether the flag is set without a value."""
        return self.is_suspicious is is_on


Place: TypeAlias = Literal["instead", "before"]


@dataclass(frozen=True, slots=True)
class NamedSuspect:
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
