"""What the sizes of advice look at, and what they give back. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_tuning_exporter.sglang.args.refusals import choices_of
from sglang_tuning_exporter.sglang.args.values import made_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tuning_exporter.diagnosis.evidence import Past
    from sglang_tuning_exporter.state.facts import ServerFacts
    from sglang_tuning_exporter.state.profiles import Profile
    from sglang_tuning_exporter.state.totals import Totals


@dataclass(frozen=True, slots=True)
class Case:
    """What advice may look at: the past, and the ids of all rows that hold in it."""

    past: Past
    held: frozenset[str] = frozenset()

    @property
    def facts(self) -> ServerFacts:
        """What is known of the server."""
        return self.past.facts

    @property
    def recent(self) -> Totals:
        """What happened lately."""
        return self.past.recent

    @property
    def profile(self) -> Profile:
        """The thresholds in force."""
        return self.past.profile

    def flag(self, arg: str) -> float | None:
        """Give a figure as it is typed: some are printed multiplied or divided. None when not known or not set."""
        return self.facts.flag_value(arg)

    def factor(self, arg: str) -> float:
        """Give what the server makes of the flag: what it prints is the flag's value times this."""
        return made_of(arg, self.facts.args, self.facts.release)

    def present(self, arg: str) -> float | str | None:
        """Give what a flag is set to; None when it is not known or not set."""
        value = self.facts.args.get(arg) if arg else None
        return value if isinstance(value, str) and value else self.flag(arg)

    def choices(self, arg: str) -> tuple[object, ...] | None:
        """Give the words that this server's release takes for a flag; None where it takes any, or is not known."""
        return None if self.facts.release is None else choices_of(arg, self.facts.release)


@dataclass(frozen=True, slots=True)
class Value:
    """What to set an argument to; `arg` where it is not the row's own (empty: none at all), `words` where words say it better.

    `variant` names the text to use where neither the row's nor the argument's fits; `cost` is said in place of the text's where a
    figure is known. What is `beside` is set together with it. `otherwise` is what to advise instead where this server's release
    refuses the value or ignores it, best first.
    """

    suggested: float | str | None
    current: float | str | None = None
    gain: str = ""
    arg: str | None = None
    words: str = ""
    variant: str = ""
    cost: str = ""
    is_switch: bool = False
    beside: tuple[Value, ...] = ()
    otherwise: tuple[Value, ...] = ()

    @property
    def changes(self) -> bool:
        """Whether the suggestion is anything but the present value."""
        return self.current is None or self.suggested != self.current


def person(words: str, variant: str = "") -> Value:
    """Advise people, not a flag."""
    return Value(None, arg="", words=words, variant=variant)


def people(words: str, variant: str = "") -> list[Value]:
    """Advise people, and nothing else."""
    return [person(words, variant)]


def word(arg: str, value: str) -> Callable[[Case], list[Value]]:
    """Set an argument to a word; nothing where it is set to it already."""
    return lambda case: [] if case.present(arg) == value else [Value(value, case.present(arg))]


def switch_on(arg: str) -> Callable[[Case], list[Value]]:
    """Add a switch; nothing where it is on."""
    return lambda case: [] if case.facts.arg(arg) else [Value(1.0, 0.0, words="add it", is_switch=True)]
