"""From a diagnosis to what to turn: the exact flag, its present value, the value to try, and what that gains. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_tuning_exporter.guide.diagnosis import Slow
from sglang_tuning_exporter.guide.sizing import SIZERS, Case, Value
from sglang_tuning_exporter.guide.suspects import explaining, unexplained
from sglang_tuning_exporter.guide.table import BY_ID

if TYPE_CHECKING:
    from sglang_tuning_exporter.guide.diagnosis import Diagnosis
    from sglang_tuning_exporter.guide.suspect import Named
    from sglang_tuning_exporter.server import ServerFacts

__all__ = ["Advice", "Case", "advise"]


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

    @property
    def raises(self) -> bool:
        """Whether more of it is advised."""
        if isinstance(self.current, (int, float)) and isinstance(self.suggested, (int, float)):
            return self.suggested > self.current
        return self.direction == "raise"

    @property
    def typed(self) -> str:
        """What to type, such as `--schedule-policy lpm`; the flag alone where the value is the operator's to choose, empty for people."""
        if not self.flag or self.is_switch:
            return self.flag
        return f"{self.flag} {shown(self.suggested)}" if self.suggested is not None else self.flag


def shown(value: float | str | None) -> str:
    """Write a flag's value as it is typed."""
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.10g}"


def advise(diagnosis_id: str, case: Case) -> list[Advice]:
    """Say what to turn for a diagnosis.

    Empty when the flag already has the value, or when turning it further would change nothing.
    """
    row = BY_ID[diagnosis_id]
    if row.names_suspects:
        return [] if _is_explained(case) else _suspects(unexplained(case.past), case.facts)
    size = SIZERS.get(diagnosis_id)
    values = [Value(None, case.present(row.turn.arg))] if size is None else size(case)
    given = [_advice(row, value, case.facts) for value in values if value.suggested is None or value.changes]
    own = [advice for advice in given if advice is not None]
    named = explaining(diagnosis_id, case.past)
    if not named:
        return own
    first = _suspects(named, case.facts)
    if any(each.place == "instead" for each in named):
        return first
    args = {advice.arg for advice in first}
    return first + [advice for advice in own if advice.arg not in args]


def _is_explained(case: Case) -> bool:
    """Say whether a row that can be the verdict has a flag to set; late answers can have more causes than one."""
    limits = (row for row in case.held if BY_ID[row].is_limit and not isinstance(BY_ID[row].condition, Slow))
    return any(advice.flag for row in limits for advice in advise(row, case))


def _suspects(named: list[Named], facts: ServerFacts) -> list[Advice]:
    """Write suspects as advice, without those whose flag this server's release does not have."""
    return [advice for each in named if (advice := _suspect(each, facts)) is not None]


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
    )


def _advice(row: Diagnosis, value: Value, facts: ServerFacts) -> Advice | None:
    """Write one value as advice; None where this server's release has no such flag: it would not start again."""
    turn = BY_ID[value.row].turn if value.row else row.turn
    arg = turn.arg if value.arg is None else value.arg
    # Another spelling of the same argument is still the row's own.
    own = bool(value.row) or arg == turn.arg or arg.startswith(turn.arg + "_")
    flag = facts.flag(arg) if arg else ""
    if flag is None:
        return None
    return Advice(
        flag=flag,
        arg=arg,
        current=value.current,
        suggested=value.suggested,
        suggestion=value.words or (shown(value.suggested) if value.suggested is not None else turn.fallback),
        why=turn.why,
        will_not_help_if=turn.will_not_help_if,
        gain=value.gain,
        cost=turn.cost if own else "",
        direction=turn.direction if own else "set",
        is_switch=value.is_switch,
    )
