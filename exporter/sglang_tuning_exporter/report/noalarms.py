"""Stands in for the alarm clock: no alert ever fires."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_tuning_exporter.state import ServerState


@dataclass(frozen=True, slots=True)
class Span:
    """When an alert would have fired."""

    alert: str
    diagnosis: str
    severity: str
    start: float
    end: float


class AlarmClock:
    """Asked every 15 s what would fire."""

    def take(self, state: ServerState, now: float) -> None:
        """Look at the state of this moment."""

    def spans(self) -> list[Span]:
        """Give what fired."""
        return []
