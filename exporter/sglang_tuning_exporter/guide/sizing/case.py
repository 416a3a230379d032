"""What the sizes of advice look at, and what they give back. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tuning_exporter.guide.evidence import Past
    from sglang_tuning_exporter.guide.profiles import Profile
    from sglang_tuning_exporter.server import ServerFacts
    from sglang_tuning_exporter.window import Totals


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

    def present(self, arg: str) -> float | str | None:
        """Give what an argument is set to; None when it is not told or not set."""
        value = self.facts.args.get(arg) if arg else None
        return value if isinstance(value, str) and value else self.facts.arg(arg)


@dataclass(frozen=True, slots=True)
class Value:
    """What to set an argument to; `arg` where it is not the row's own (empty: none at all), `words` where words say it better."""

    suggested: float | str | None
    current: float | str | None = None
    gain: str = ""
    arg: str | None = None
    words: str = ""
    row: str = ""  # whose words to use where it is another row's advice
    is_switch: bool = False

    @property
    def changes(self) -> bool:
        """Whether the suggestion is anything but the present value."""
        return self.current is None or self.suggested != self.current


def people(words: str) -> list[Value]:
    """Advise people, not a flag."""
    return [Value(None, arg="", words=words)]


def word(arg: str, value: str) -> Callable[[Case], list[Value]]:
    """Set an argument to a word; nothing where it is set to it already."""
    return lambda case: [] if case.present(arg) == value else [Value(value, case.present(arg))]


def switch_on(arg: str) -> Callable[[Case], list[Value]]:
    """Add a switch; nothing where it is on."""
    return lambda case: [] if case.facts.arg(arg) else [Value(1.0, 0.0, words="add it", is_switch=True)]
