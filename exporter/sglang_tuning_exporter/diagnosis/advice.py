"""From a diagnosis to what to turn: the exact flag, its present value, the value to try, and what that gains. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sglang_tuning_exporter.diagnosis.acceptance import by_release, objection_to
from sglang_tuning_exporter.diagnosis.expectation import with_expectation
from sglang_tuning_exporter.diagnosis.sizing.case import Case, Value
from sglang_tuning_exporter.diagnosis.suspects import explaining, unexplained
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.diagnosis.variants import TAKES_MEMORY, variant

if TYPE_CHECKING:
    from sglang_tuning_exporter.diagnosis.expectation import Expected
    from sglang_tuning_exporter.diagnosis.row import Diagnosis
    from sglang_tuning_exporter.diagnosis.suspect import Named
    from sglang_tuning_exporter.state.facts import ServerFacts

__all__ = ["SWITCHED", "Advice", "Case", "advise"]

SWITCHED = ("on", "off")  # what documents give as the value of a switch


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to turn.

    `flag` is as typed (`--mem-fraction-static`), empty when the advice is to people; values are flag values, words for
    arguments that take words, 0 and 1 for switches. Where no value can be computed `suggested` is None and
    `suggestion` says in words what to try.
    """

    flag: str
    arg: str
    current: float | str | None
    suggested: float | str | None
    suggestion: str
    why: str
    will_not_help_if: str
    gain: str = ""
    cost: str = ""
    direction: str = ""
    is_switch: bool = False
    expected: Expected | None = None  # by the measured step times
    explains: bool = False  # the flag was set away from its default, and figures show that it is the cause

    @property
    def raises(self) -> bool:
        """Whether more of it is advised."""
        if isinstance(self.current, (int, float)) and isinstance(self.suggested, (int, float)):
            return self.suggested > self.current
        return self.direction == "raise"

    @property
    def removes(self) -> bool:
        """Whether the flag is to be taken off the command line."""
        dropped = self.direction == "drop" and self.current is not None and self.suggested is None
        return bool(self.flag) and ((self.is_switch and not self.suggested) or dropped)

    @property
    def is_set(self) -> bool:
        """Whether it belongs to a command line: a flag that gets a value, or loses its own."""
        return bool(self.arg) and (self.suggested is not None or self.removes)

    @property
    def setting(self) -> object:
        """The flag's new value for a command line: switches as truth, whole figures without their point."""
        return bool(self.suggested) if self.is_switch else whole(self.suggested)

    @property
    def typed(self) -> str:
        """What to do to the command line, such as `--schedule-policy lpm` or `remove --disable-cuda-graph`.

        The flag alone where the value is the operator's to choose, empty for people.
        """
        if self.removes:
            return f"remove {self.flag}"
        if not self.flag or self.is_switch:
            return self.flag
        return f"{self.flag} {shown(self.suggested)}" if self.suggested is not None else self.flag

    @property
    def takes_memory(self) -> bool:
        """Whether the change takes GPU memory, as some do only when they raise a value."""
        return (self.arg, "raise" if self.raises else self.direction) in TAKES_MEMORY


def shown(value: float | str | None) -> str:
    """Write a flag's value as it is typed."""
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.10g}"


def whole(value: float | str | None) -> float | int | str | None:
    """Write a whole figure without its point, as flags are."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def advise(diagnosis_id: str, case: Case) -> list[Advice]:
    """Say what to turn for a diagnosis.

    Empty when the flag already has the value, or when turning it further would change nothing.
    """
    row = BY_ID[diagnosis_id]
    if row.names_suspects:
        return [] if _is_explained(case) else _suspects(unexplained(case.past), case)
    values = [Value(None, case.present(row.turn.arg))] if row.sizes is None else row.sizes(case)
    own = [with_expectation(advice, case) for value in values for advice in _accepted(row, value, case)]
    named = explaining(diagnosis_id, case.past)
    if not named:
        return own
    first = _suspects(named, case)
    if first and any(each.place == "instead" for each in named):
        return first
    args = {advice.arg for advice in first}
    return first + [advice for advice in own if advice.arg not in args]


def _is_explained(case: Case) -> bool:
    """Say whether a row that can be the verdict has a flag to set; late answers can have more causes than one."""
    limits = (row for row in case.held if BY_ID[row].is_limit and BY_ID[row].condition.is_whole_cause)
    return any(advice.flag for row in limits for advice in advise(row, case))


def _suspects(named: list[Named], case: Case) -> list[Advice]:
    """Write suspects as advice, without those whose flag this server's release does not have."""
    found = [advice for each in named if (advice := _suspect(each, case.facts)) is not None]
    accepted = [advice for advice in found if objection_to(case.facts, {advice.arg: advice.setting}) is None]
    return [with_expectation(advice, case) for advice in accepted]


def _suspect(named: Named, facts: ServerFacts) -> Advice | None:
    suspect, current, suggested = named.suspect, named.current, named.suggested
    flag = facts.flag(suspect.arg)
    if flag is None or suggested == current:
        return None
    direction = "drop" if suspect.is_switch or suggested is None else "set"
    if isinstance(current, float) and isinstance(suggested, float) and not suspect.is_switch:
        direction = "raise" if suggested > current else "lower"
    return Advice(
        flag=flag,
        arg=suspect.arg,
        current=1.0 if suspect.is_switch else current,
        suggested=suggested,
        suggestion=named.words or shown(suggested),
        why=suspect.why,
        will_not_help_if=suspect.will_not_help_if,
        gain=named.gain,
        cost=suspect.cost,
        direction=direction,
        is_switch=suspect.is_switch,
        explains=True,
    )


def _accepted(row: Diagnosis, value: Value, case: Case) -> list[Advice]:
    """Write a value, and what is set beside it, as advice; where this server's release objects, what it accepts instead.

    Empty where it accepts nothing of the kind: it would not start again, or nothing would change.
    """
    group = [advice for each in (value, *value.beside) if (advice := _advice(row, each, case)) is not None]
    flags = [advice for advice in group if advice.suggested is not None]
    changes = {advice.arg: advice.setting for advice in flags}
    lacks_flag = len(group) <= len(value.beside)
    if not lacks_flag and objection_to(case.facts, changes) is None:
        moved = [
            each for each in group if each.suggested is None or each.suggested != each.current or each.current is None
        ]
        return [_in_words(each, case.facts) for each in moved]
    return next((found for each in value.otherwise if (found := _accepted(row, each, case))), [])


def _in_words(advice: Advice, facts: ServerFacts) -> Advice:
    """Say it for each release where the server's own is not known and they spell it differently."""
    words = by_release(facts, advice.arg, shown(advice.suggested) if not advice.is_switch else "")
    return (
        replace(advice, flag="", arg="", current=None, suggested=None, suggestion=words, is_switch=False)
        if words
        else advice
    )


def _advice(row: Diagnosis, value: Value, case: Case) -> Advice | None:
    """Write one value as advice; None where this server's release has no such flag."""
    figures = case.profile.figures
    turn = row.turn.filled(figures)
    arg = turn.arg if value.arg is None else value.arg
    flag = case.facts.flag(arg) if arg else ""
    if flag is None:
        return None
    direction = _direction(value, turn.direction if arg == turn.arg else "set")
    # Another spelling of the same argument is still the row's own.
    own = (
        not value.variant
        and (arg == turn.arg or arg.startswith(turn.arg + "_"))
        and direction in (turn.direction, "set")
    )
    text = None if own else variant(arg, direction, value.variant, figures)
    return Advice(
        flag=flag,
        arg=arg,
        current=value.current,
        suggested=value.suggested,
        suggestion=value.words or (shown(value.suggested) if value.suggested is not None else turn.fallback),
        why=turn.why if text is None else text.why,
        will_not_help_if=turn.will_not_help_if if text is None else text.will_not_help_if,
        gain=value.gain,
        cost=value.cost or (text.cost if text is not None else turn.cost if own or not arg else ""),
        direction=direction,
        is_switch=value.is_switch,
    )


def _direction(value: Value, otherwise: str) -> str:
    if value.is_switch:
        return "add" if value.suggested else "drop"
    if (
        isinstance(value.suggested, float)
        and isinstance(value.current, (int, float))
        and value.suggested != value.current
    ):
        return "raise" if value.suggested > value.current else "lower"
    return otherwise
