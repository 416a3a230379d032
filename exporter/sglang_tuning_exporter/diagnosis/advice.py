"""Advice for a diagnosis: the flag, its present value, the value to try, and the expected gain. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_tuning_exporter.diagnosis.acceptance import by_release, objection_to
from sglang_tuning_exporter.diagnosis.conditions.condition import Resource
from sglang_tuning_exporter.diagnosis.expectation import Expected, with_expectation
from sglang_tuning_exporter.diagnosis.row import Diagnosis
from sglang_tuning_exporter.diagnosis.sizing.advised_value import AdvisedValue, SizingInput
from sglang_tuning_exporter.diagnosis.suspect_proofs import NamedSuspect
from sglang_tuning_exporter.diagnosis.suspects import likely_suspects, replaces_advice, suspects_explaining
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.diagnosis.variants import TAKES_MEMORY, variant
from sglang_tuning_exporter.state.facts import ServerFacts

__all__ = ["REASONS", "Advice", "SizingInput", "advise"]
REASONS = (("why", "Why:", ""), ("cost", "It costs:", ""), ("will_not_help_if", "It will not help if", "."))
"""The reasons of an advice as every reader gets them: the field, the words before it, and what ends the sentence."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One change to make.

    `flag` is as typed (`--mem-fraction-static`), empty for advice to people. Values are flag values: numbers, words,
    or 0 and 1 for switches. If no value can be computed, `suggested` is None and `suggestion` is in words.
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
    explains: bool = False  # the flag differs from its default, and figures show that it is the cause

    @property
    def raises(self) -> bool:
        """Whether the value becomes larger."""
        if isinstance(self.current, (int, float)) and isinstance(self.suggested, (int, float)):
            return self.suggested > self.current
        return self.direction == "raise"

    @property
    def removes(self) -> bool:
        """Whether the flag is removed from the command line."""
        dropped = self.direction == "drop" and self.current is not None and self.suggested is None
        return bool(self.flag) and ((self.is_switch and not self.suggested) or dropped)

    @property
    def is_set(self) -> bool:
        """Whether it changes the command line: a flag gets a value, or is removed."""
        return bool(self.arg) and (self.suggested is not None or self.removes)

    @property
    def setting(self) -> object:
        """The flag's new value for a command line: bool for switches, int for whole numbers."""
        return bool(self.suggested) if self.is_switch else whole(self.suggested)

    @property
    def typed(self) -> str:
        """The change as typed, such as `--schedule-policy lpm` or `remove --disable-cuda-graph`.

        The flag alone if the operator must choose the value; empty for advice to people.
        """
        if self.removes:
            return f"remove {self.flag}"
        if not self.flag or self.is_switch:
            return self.flag
        return f"{self.flag} {as_typed(self.suggested)}" if self.suggested is not None else self.flag

    def in_words(self, suggestion: str) -> Advice:
        """Return it as advice to people, without the flag."""
        return replace(self, flag="", arg="", current=None, suggested=None, suggestion=suggestion, is_switch=False)

    @property
    def takes(self) -> frozenset[Resource]:
        """What the change takes: GPU memory, which some do only if the value becomes larger, and capacity for more requests."""
        is_lower_reserve = self.arg == "schedule_conservativeness" and not self.raises
        taken: dict[Resource, bool] = {
            "memory": ("raise" if self.raises else self.direction) in TAKES_MEMORY.get(self.arg, ()),
            "requests": is_lower_reserve or (self.arg == "max_running_requests" and self.raises),
        }
        return frozenset(resource for resource, is_taken in taken.items() if is_taken)


def as_typed(value: float | str | None) -> str:
    """Return a flag's value as it is typed."""
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.10g}"


def whole(value: float | str | None) -> float | int | str | None:
    """Return a whole number as int."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def advise(diagnosis_id: str, basis: SizingInput) -> list[Advice]:
    """Return the advice for a diagnosis.

    Empty if the flag already has the value, or a further change would have no effect.
    """
    row = BY_ID[diagnosis_id]
    if row.names_suspects:
        return [] if _has_flag_to_set(basis) else _suspects(likely_suspects(basis.past), basis)
    values = [AdvisedValue(None, basis.present(row.remedy.arg))] if row.sizes is None else row.sizes(basis)
    own = [with_expectation(advice, basis) for value in values for advice in _accepted(row, value, basis)]
    named = suspects_explaining(diagnosis_id, basis.past)
    if not named:
        return own
    first = _suspects(named, basis)
    if first and replaces_advice(diagnosis_id, basis.past):
        return first
    args = {advice.arg for advice in first}
    return first + [advice for advice in own if advice.arg not in args]


def _has_flag_to_set(basis: SizingInput) -> bool:
    """Return whether a row that can be the verdict has a flag to set; late answers can have several causes."""
    limits = (row for row in basis.holding if BY_ID[row].is_limit and BY_ID[row].condition.is_whole_cause)
    return any(advice.flag for row in limits for advice in advise(row, basis))


def _suspects(named: list[NamedSuspect], basis: SizingInput) -> list[Advice]:
    """Return suspects as advice, without those whose flag this server's release does not have."""
    found = [advice for each in named if (advice := _suspect(each, basis.facts)) is not None]
    accepted = [advice for advice in found if objection_to(basis.facts, {advice.arg: advice.setting}) is None]
    return [with_expectation(advice, basis) for advice in accepted]


def _suspect(named: NamedSuspect, facts: ServerFacts) -> Advice | None:
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
        suggestion=named.words or as_typed(suggested),
        why=suspect.why,
        will_not_help_if=suspect.will_not_help_if,
        gain=named.gain,
        cost=suspect.cost,
        direction=direction,
        is_switch=suspect.is_switch,
        explains=True,
    )


def _accepted(row: Diagnosis, value: AdvisedValue, basis: SizingInput) -> list[Advice]:
    """Return a value, and what is set beside it, as advice; if this server's release refuses it, an alternative.

    Empty if the release accepts none of them: the server would not start, or nothing would change.
    """
    group = [advice for each in (value, *value.set_together) if (advice := _advice(row, each, basis)) is not None]
    flags = [advice for advice in group if advice.suggested is not None]
    changes = {advice.arg: advice.setting for advice in flags}
    lacks_flag = len(group) <= len(value.set_together)
    if not lacks_flag and objection_to(basis.facts, changes) is None:
        moved = (each for each in group if each.suggested is None or each.suggested != each.current)
        return [_in_words(each, basis.facts) for each in moved]
    return next((found for each in value.otherwise if (found := _accepted(row, each, basis))), [])


def _in_words(advice: Advice, facts: ServerFacts) -> Advice:
    """Return the advice with one spelling for each release, if the server's own is not known and they differ."""
    words = by_release(facts, advice.arg, as_typed(advice.suggested) if not advice.is_switch else "")
    return advice.in_words(words) if words else advice


def _advice(row: Diagnosis, value: AdvisedValue, basis: SizingInput) -> Advice | None:
    """Return one value as advice; None if this server's release has no such flag."""
    figures = basis.profile.figures
    remedy = row.remedy.with_figures(figures)
    arg = remedy.arg if value.arg is None else value.arg
    flag = basis.facts.flag(arg) if arg else ""
    if flag is None:
        return None
    direction = _direction(value, remedy.direction if arg == remedy.arg else "set")
    # A release may spell the row's argument differently.
    is_row_arg = arg == remedy.arg or arg.startswith(remedy.arg + "_")
    own = not value.variant and is_row_arg and direction in (remedy.direction, "set")
    found = remedy if own else variant(arg, direction, value.variant, figures)
    text = found or remedy
    return Advice(
        flag=flag,
        arg=arg,
        current=value.current,
        suggested=value.suggested,
        suggestion=value.words or _value_in_words(value) or remedy.fallback,
        why=text.why,
        will_not_help_if=text.will_not_help_if,
        gain=value.gain,
        cost=value.cost or (text.cost if found is not None or not arg else ""),
        direction=direction,
        is_switch=value.is_switch,
    )


def _value_in_words(value: AdvisedValue) -> str:
    if value.is_switch:
        return "add it" if value.suggested else "start without it"
    return as_typed(value.suggested)


def _direction(value: AdvisedValue, otherwise: str) -> str:
    if value.is_switch:
        return "add" if value.suggested else "drop"
    now, then = value.current, value.suggested
    if not isinstance(then, float) or not isinstance(now, (int, float)) or then == now:
        return otherwise
    return "raise" if then > now else "lower"
