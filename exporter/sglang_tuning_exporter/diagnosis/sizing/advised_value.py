"""What the functions of `sizing` get and return. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_tuning_exporter.diagnosis.evidence import Past
from sglang_tuning_exporter.sglang.args.refusals import choices_of
from sglang_tuning_exporter.sglang.args.values import print_factor
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.profiles import Profile
from sglang_tuning_exporter.state.totals import Totals


@dataclass(frozen=True, slots=True)
class SizingInput:
    """What advice is based on: the past, and the ids of all rows that hold in it."""

    past: Past
    holding: frozenset[str] = frozenset()

    @property
    def facts(self) -> ServerFacts:
        """The facts of the server."""
        return self.past.facts

    @property
    def recent(self) -> Totals:
        """The totals of the window."""
        return self.past.recent

    @property
    def profile(self) -> Profile:
        """The thresholds in force."""
        return self.past.profile

    def flag(self, arg: str) -> float | None:
        """Return a number as typed: SGLang prints some multiplied or divided. None if not known or not set."""
        return self.facts.flag_value(arg)

    def factor(self, arg: str) -> float:
        """Return the factor between a flag and what SGLang prints."""
        return print_factor(arg, self.facts.args, self.facts.release)

    def present(self, arg: str) -> float | str | None:
        """Return a flag's value; None if not known or not set."""
        value = self.facts.args.get(arg) if arg else None
        return value if isinstance(value, str) and value else self.flag(arg)

    def choices(self, arg: str) -> tuple[object, ...] | None:
        """Return the words that this server's release accepts for a flag; None if any, or not known."""
        return None if self.facts.release is None else choices_of(arg, self.facts.release)


@dataclass(frozen=True, slots=True)
class AdvisedValue:
    """A value to set. `arg`: the argument if it is not the row's own (empty: none); `words`: what to do, in words.

    `variant` names the text if neither the row's nor the argument's fits; `cost` replaces the text's if a figure is
    known. `set_together` are set with it. `otherwise`: alternatives if this server's release refuses or ignores the
    value, best first.
    """

    suggested: float | str | None
    current: float | str | None = None
    gain: str = ""
    arg: str | None = None
    words: str = ""
    variant: str = ""
    cost: str = ""
    is_switch: bool = False
    set_together: tuple[AdvisedValue, ...] = ()
    otherwise: tuple[AdvisedValue, ...] = ()


def in_words(words: str, variant: str = "") -> AdvisedValue:
    """Return advice to people, not a flag."""
    return AdvisedValue(None, arg="", words=words, variant=variant)


def set_to(arg: str, value: str) -> Callable[[SizingInput], list[AdvisedValue]]:
    """Set an argument to a word; nothing if it has that value."""
    return lambda basis: [] if basis.present(arg) == value else [AdvisedValue(value, basis.present(arg))]


def switch_on(arg: str) -> Callable[[SizingInput], list[AdvisedValue]]:
    """Add a switch; nothing if it is on."""
    return lambda basis: [] if basis.facts.arg(arg) else [AdvisedValue(1.0, 0.0, is_switch=True)]
