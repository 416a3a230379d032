"""From a diagnosis to what to turn: the exact flag, its present value, the value to try, and what that gains. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_tuning_exporter.guide.sizing import SIZERS, Case, Value
from sglang_tuning_exporter.guide.table import BY_ID

if TYPE_CHECKING:
    from sglang_tuning_exporter.guide.diagnosis import Diagnosis
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
    size = SIZERS.get(diagnosis_id)
    values = [Value(None, case.present(row.turn.arg))] if size is None else size(case)
    given = [_advice(row, value, case.facts) for value in values if value.suggested is None or value.changes]
    return [advice for advice in given if advice is not None]


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
