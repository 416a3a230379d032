"""What holds requests of one scheduler back beside its queue, its limit and its pool. Pure.

Queues beside the main one (grammar, PD disaggregation) and the new-token ratio, the share of `max_new_tokens` that
admission keeps room for. SGLang raises the ratio at a retraction to a fresh estimate, lets it fall by
(initial - least) / 600 a decode step and sets it back when idle (`schedule_policy.py`, from 0.3.6 on), so that
between two tellings it is known well enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tuning_exporter.state.signals import NO_OTHER_WAITS, OtherWaits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang_tuning_exporter.sglang.events import RankFigures
    from sglang_tuning_exporter.state.facts import ServerFacts

GRAMMAR = "grammar"
# Where a disaggregated server's requests wait: for the other side, for room there, or for their transfer.
DISAGGREGATION = frozenset(
    ("bootstrap", "unbootstrapped", "prealloc", "transfer", "transferring", "inflight", "host_receive")
)
# The ratio this far above where it starts is "still far above": 0.3 starts at 0.21, and a retraction lifts it to some 0.8.
FAR_ABOVE = 0.2
LEAST_SHARE = 0.14  # of the initial ratio: where it stops falling
DECAY_STEPS = 600.0


class OtherQueues:
    """The queues beside the main one and the new-token ratio, as last told; `matters` where any of it can decide."""

    __slots__ = ("_ratio", "matters", "queues")

    def __init__(self) -> None:
        self.queues: dict[str, float] = {}
        self._ratio: float | None = None
        self.matters = False

    def clear(self) -> None:
        """Forget it: nothing has been told for long, the server is idle, or it started anew."""
        self.queues = {}
        self._ratio = None
        self.matters = False

    def idle(self) -> None:
        """Nothing runs or waits, and SGLang sets the ratio back."""
        self.queues = dict.fromkeys(self.queues, 0.0)
        self._ratio = None
        self.matters = False

    def see_queues(self, queues: Mapping[str, float]) -> None:
        """Take the other queues of a batch line; what it does not name stays as it was."""
        if queues:
            self.queues.update(queues)
            self._weigh()

    def see_figures(self, figures: RankFigures) -> None:
        """Take the other queues and the ratio of a scrape."""
        self.queues.update(figures.queues)
        if figures.grammar_queued is not None:
            self.queues[GRAMMAR] = figures.grammar_queued
        if figures.new_token_ratio is not None:
            self._ratio = figures.new_token_ratio
        self._weigh()

    def retracted(self, ratio: float | None) -> None:
        """Take the ratio that a retraction ends with."""
        if ratio is not None:
            self._ratio = ratio
            self.matters = True

    def decoded(self, lines: int, facts: ServerFacts) -> None:
        """Let the ratio fall over the decode steps that `lines` decode lines stand for."""
        initial = facts.initial_new_token_ratio
        if self._ratio is None or initial is None:
            return
        least = LEAST_SHARE * initial
        steps = lines * facts.decode_log_interval
        self._ratio = max(self._ratio - steps * (initial - least) / DECAY_STEPS, least)
        if self._ratio <= initial + FAR_ABOVE:
            self._ratio = None  # it only falls until it is told again: it decides nothing any more
            self._weigh()

    def elsewhere(self, usages: Mapping[str, float], facts: ServerFacts) -> OtherWaits:
        """Say what of it can hold requests back now."""
        if not self.matters and len(usages) < 2:
            return NO_OTHER_WAITS
        initial = facts.initial_new_token_ratio
        return OtherWaits(
            grammar=self.queues.get(GRAMMAR, 0.0),
            disaggregation=sum(waiting for name, waiting in self.queues.items() if name in DISAGGREGATION),
            full_usage=usages.get("full") if len(usages) > 1 else None,
            recovering=self._ratio is not None and initial is not None and self._ratio > initial + FAR_ABOVE,
        )

    def _weigh(self) -> None:
        self.matters = self._ratio is not None or any(self.queues.values())
