"""A case: an input, the ways in, and what is right. An answer: what the product says at one moment by one way in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import yaml

from truth.recording import ROOT, Recording

WAYS = ("report", "log", "metrics", "both")  # offline; live with the log alone, with metrics alone, with both
# Answers that claim nothing of a server.
SILENT = frozenset({"not_enough_data", "no_clear_bottleneck", "no_limit_in_log", "starting"})


@dataclass(frozen=True, slots=True)
class Change:
    """An advised change: `--flag` and its values as JSON has them; words where there is no value."""

    flag: str
    now: Any
    to: Any
    words: str
    said: str = ""  # its direction as the product has it

    @property
    def direction(self) -> str:
        """`up`, `down`, `add`, `drop`, or `set` where both values are words or unknown."""
        if self.now is False or self.to is True:
            return "add"
        if self.now is True or self.to is False:
            return "drop"
        if isinstance(self.now, int | float) and isinstance(self.to, int | float):
            return "up" if self.to > self.now else "down"
        return "set"


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of the answer, in its order."""

    diagnosis: str
    severity: str
    confidence: str
    sentence: str
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the product says at `at` (unix seconds). `status` is the exit status of `report`, of HTTP otherwise."""

    at: float
    status: int
    verdict: str
    findings: tuple[Finding, ...] = ()
    counts: Mapping[str, float] = field(default_factory=dict)
    alerts: tuple[str, ...] = ()
    document: Mapping[str, Any] = field(default_factory=dict, repr=False)  # the JSON as it came
    metrics: Mapping[str, float] = field(default_factory=dict, repr=False)  # series of the page, with their labels
    text: str = field(default="", repr=False)  # `report` for people, or the line on stderr

    @property
    def confidence(self) -> str:
        """How sure the first finding of the verdict is."""
        return next((each.confidence for each in self.findings if each.diagnosis == self.verdict), "")

    @property
    def changes(self) -> tuple[Change, ...]:
        """Every advised change, the first one first."""
        return tuple(change for each in self.findings for change in each.changes)


# For each thing that is checked: empty if it is right, else what is wrong. Answers are in order of time, never none.
Checks: TypeAlias = dict[str, str]


@dataclass(frozen=True, slots=True)
class Case:
    """`check` gets the way in and the answers over time: one by `report`, one a step live.

    `ask` replaces the usual way of asking.
    """

    name: str
    recording: Callable[[], Recording]
    check: Callable[[str, Sequence[Answer]], Checks]
    ways: tuple[str, ...] = WAYS
    profile: str = "online"
    options: tuple[str, ...] = ()  # further options of the command
    ask: Callable[[Case], Sequence[Answer]] | None = None


def data(name: str) -> Any:
    """Read a file of `truth/cases`."""
    return yaml.safe_load((ROOT / "truth" / "cases" / name).read_text(encoding="utf-8"))
