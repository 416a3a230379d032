"""Ranks of DP attention run each step together: what one does decides whether the others replay a captured graph. Pure.

All run eager where one of them prefills, or where the batch of one is larger than the captured sizes (`can_cuda_graph`,
`global_num_tokens`: srt/managers/scheduler_dp_attn_mixin.py in 0.5.5, srt/model_executor/cuda_graph_runner.py). A small batch that
runs eager is then no finding.
"""

from __future__ import annotations

from math import inf

from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.signals import ASSUMED_CAPTURED, HOLD_SECONDS

# Lines of one step come in any order, and a prefill is printed at its end.
STEP_SECONDS = 2.0


class AttentionRanks:
    """What the ranks of one server did last."""

    def __init__(self) -> None:
        self._running: dict[int | None, tuple[float, float]] = {}  # when, and how many
        self._prefilled: list[tuple[int | None, float]] = []  # the last two ranks that did
        self._known_from = inf  # the first prefill

    def forget(self) -> None:
        """Forget the server before."""
        self._running.clear()
        self._prefilled.clear()
        self._known_from = inf

    def prefilled(self, dp: int | None, now: float) -> None:
        """Take a prefill batch of a rank."""
        self._known_from = min(self._known_from, now)
        self._prefilled = [(dp, now), *(each for each in self._prefilled if each[0] != dp)][:2]

    def decoded(self, dp: int | None, running: float, now: float) -> float:
        """Take a decode batch of a rank; return the time of the one before."""
        before = self._running.get(dp, (-inf, 0.0))[0]
        self._running[dp] = (now, running)
        return before

    def has_prefilled(self, dp: int | None, facts: ServerFacts, since: float) -> bool:
        """Return whether this rank's steps waited for a prefill of another one."""
        # In this order: the ranks' arguments are looked at only where another one has prefilled.
        return any(other != dp and at >= since for other, at in self._prefilled) and not _are_independent(facts)

    def explain_eager(self, dp: int | None, facts: ServerFacts, now: float, since: float) -> bool:
        """Return whether another rank can be the cause of steps without a graph; `since` is when the first of them was.

        Without a log it is unknown when a rank prefills: then another rank always can. Lines of one second may come in any order.
        """
        if _are_independent(facts):
            return False
        if now <= self._known_from or self.has_prefilled(dp, facts, min(since, now - STEP_SECONDS)):
            return True
        others = [running for other, (at, running) in self._running.items() if other != dp and now - at <= HOLD_SECONDS]
        if not others:
            return False
        together = sum(others) + self._running.get(dp, (0.0, 0.0))[1] if facts.adds_up_batches else max(others)
        return together > (facts.largest_captured or ASSUMED_CAPTURED)


def _are_independent(facts: ServerFacts) -> bool:
    """Whether each rank runs steps of its own; without a start in the log that is not known."""
    return bool(facts.args) and facts.attention_ranks < 2
