"""What a row of the table of diagnoses is made of: what must be seen, and what to turn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang_tuning_exporter.diagnosis.conditions import Condition, Kind

Severity: TypeAlias = Literal["critical", "warning", "info"]
URGENCY: dict[Severity, int] = {"info": 0, "warning": 1, "critical": 2}


@dataclass(frozen=True, slots=True)
class Turn:
    """What to turn. `arg` is the SGLang argument (empty: the advice is to people); `fallback` is said where no figure can be computed."""

    arg: str
    direction: str
    fallback: str
    why: str
    will_not_help_if: str
    cost: str = ""  # what the change takes away; empty where it takes nothing

    def told(self, figures: Mapping[str, str]) -> Turn:
        """Give it with the thresholds in its words; all but the flag and the direction are templates over them."""
        words = {
            name: getattr(self, name).format(**figures) for name in ("fallback", "why", "will_not_help_if", "cost")
        }
        return replace(self, **words)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One row.

    `alert` is empty where none is deserved, and `no_alert` says why. `seen` is one sentence with the figures, as a
    template over the evidence and the thresholds (`Profile.figures`). `hold` is the rule's `for`; `profiles` empty means all; `unless` are diagnoses that
    explain the same evidence better. `causes` are those whose consequence it can be: it comes after them, and is not
    notified while one of them is, unless it is `notified_beside` them. A row that `borrows` asks people for less where no cause
    has advice, and else gives that. One that `hides` explains everything else of its server up to that severity, but for its
    own causes: none of it is notified meanwhile. `about` a job, its alert has no instance;
    about the exporter, there is none to serve its page. `kind` is that of its condition
    unless it is given. `names_suspects`: its advice is the flags that were set away from their defaults (`guide.suspects`).
    `summary_past` says the same of what has not been seen for minutes, as a template over `until` and `times`; empty where
    that is not told.
    """

    id: str
    alert: str
    severity: Severity
    condition: Condition
    summary: str
    seen: str
    guide: str
    turn: Turn
    hold: str = "5m"
    keep_firing: str = ""
    profiles: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    notified_beside: bool = False
    borrows: bool = False
    hides: Severity | None = None
    about: Literal["server", "exporter", "job"] = "server"
    kind: Kind | None = None
    names_suspects: bool = False
    summary_past: str = ""
    no_alert: str = ""

    def sentence(self, value: str, figures: Mapping[str, str]) -> str:
        """Say what is seen, with its figure and the thresholds in force."""
        return self.seen.format(value=value, **figures)

    @property
    def role(self) -> Kind:
        """What a finding of it is: a limit, a chance or a remark."""
        return self.kind or self.condition.kind

    @property
    def is_chance(self) -> bool:
        """Whether it names a chance to do better, to be tried by itself, and nothing that is wrong."""
        return self.role == "chance"

    @property
    def needs_advice(self) -> bool:
        """Whether it is no finding where no advice is left (`guide.findings`)."""
        return self.condition.is_only_advice or (bool(self.turn.arg) and not self.condition.is_event)

    @property
    def is_limit(self) -> bool:
        """Whether it can be what limits the server: the verdict."""
        return self.role == "limit"
