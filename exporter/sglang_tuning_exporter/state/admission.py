"""What else holds requests of one scheduler back: other queues (grammar, PD disaggregation) and the new-token ratio. Pure.

The ratio is the share of `max_new_tokens` that admission keeps free. SGLang raises it at a retraction to a new estimate, lowers it by
(initial - least) / 600 per decode step and resets it when idle (`schedule_policy.py`, from 0.3.6 on), so it can be computed between
two known values.
"""

from __future__ import annotations

from collections.abc import Mapping

from sglang_tuning_exporter.sglang.events import RankFigures
from sglang_tuning_exporter.state.signals import NO_OTHER_WAITS, OtherWaits
from sglang_tuning_exporter.state.totals import AdmissionRate

GRAMMAR = "grammar"
# Where requests of a disaggregated server wait: for the other side, for room there, or for their transfer.
DISAGGREGATION = frozenset(
    ("bootstrap", "unbootstrapped", "prealloc", "transfer", "transferring", "inflight", "host_receive")
)
# Reasons: docs/decisions.md, "Constants by name".
FAR_ABOVE = 0.2
LEAST_SHARE = 0.14  # of the initial ratio
DECAY_STEPS = 600.0


class OtherQueues:
    """The last other queues and new-token ratio; `matters` where one of them can decide why requests wait."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all: nothing was seen for too long, or the server started again."""
        self.queues: dict[str, float] = {}
        self._ratio: float | None = None
        self.may_hold_back = False

    def idle(self) -> None:
        """Set all for an idle scheduler: SGLang resets the ratio."""
        self.queues = dict.fromkeys(self.queues, 0.0)
        self._ratio = None
        self.may_hold_back = False

    def see_queues(self, queues: Mapping[str, float]) -> None:
        """Take the other queues of a batch line; those without a figure keep theirs."""
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
        """Take the ratio after a retraction."""
        if ratio is not None:
            self._ratio = ratio
            self.may_hold_back = True

    def decoded(self, steps: int, initial: float | None) -> None:
        """Lower the ratio by decode steps; it was `initial` at the start."""
        if self._ratio is None or initial is None:
            return
        least = LEAST_SHARE * initial
        self._ratio = max(self._ratio - steps * (initial - least) / DECAY_STEPS, least)
        if self._ratio <= initial + FAR_ABOVE:
            self._ratio = None  # it falls until the next known value, so it decides nothing any more
            self._weigh()

    def waits(
        self, usages: Mapping[str, float], initial: float | None, admission: AdmissionRate, now: float
    ) -> OtherWaits:
        """Return what can hold requests back now."""
        if not self.may_hold_back and len(usages) < 2:
            return NO_OTHER_WAITS
        waiting = sum(waiting for name, waiting in self.queues.items() if name in DISAGGREGATION)
        return OtherWaits(
            grammar=self.queues.get(GRAMMAR, 0.0),
            disaggregation=waiting,
            per_second=admission.per_second(now) if waiting else None,
            full_usage=usages.get("full") if len(usages) > 1 else None,
            recovering=self._ratio is not None and initial is not None and self._ratio > initial + FAR_ABOVE,
        )

    def _weigh(self) -> None:
        self.may_hold_back = self._ratio is not None or any(self.queues.values())
