"""What a scheduler does at one moment: one state for each signal. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Literal, TypeAlias

from sglang_tuning_exporter.state.profiles import Profile

Signal: TypeAlias = Literal["activity", "queue", "token_usage", "admission", "cuda_graph"]

IDLE, UNKNOWN, STUCK = "idle", "unknown", "stuck"
# Every signal also has `idle` (nothing runs or waits) and `unknown` (nothing observed for HOLD_SECONDS): the seconds of its states
# add up to wall time, and its serving time is that of all others.
STATES: dict[Signal, tuple[str, ...]] = {
    # `stuck`: something runs or waits, /metrics answers, and nothing has moved for HOLD_SECONDS.
    "activity": ("serving", STUCK, IDLE, UNKNOWN),
    "queue": ("empty", "below_range", "in_range", "above_range", IDLE, UNKNOWN),
    "token_usage": ("below_target", "at_target", IDLE, UNKNOWN),
    "admission": (
        "no_queue",
        "held_back",
        "recovering",
        "running_limit",
        "pool_full",
        "hybrid_pool_full",
        "prefill_bound",
        "grammar_queue",
        "pd_queue",
        IDLE,
        UNKNOWN,
    ),
    "cuda_graph": ("replayed", "beyond_captured", "eager", "disabled", "unsupported", IDLE, UNKNOWN),
}
SIGNALS: tuple[Signal, ...] = tuple(STATES)
HOLD_SECONDS = 60.0

# Reasons: docs/decisions.md, "Constants by name".
AT_LIMIT_SHARE = 0.95
# The largest captured batch where the log has no start.
ASSUMED_CAPTURED = 160
_ANSWERS_KEPT = 1024


# One state for each signal, in the order of `SIGNALS`.
States: TypeAlias = tuple[str, str, str, str, str]
ALL_UNKNOWN: States = (UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)
ALL_IDLE: States = (IDLE, IDLE, IDLE, IDLE, IDLE)
ALL_STUCK: States = (STUCK, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)


def named(states: States) -> dict[Signal, str]:
    """Return the state of each signal by its name."""
    return dict(zip(SIGNALS, states, strict=True))


@dataclass(frozen=True, slots=True)
class OtherWaits:
    """What else can hold requests back on one scheduler.

    `grammar` and `disaggregation` are requests in other queues; `per_second` is how many start, None if not known; `full_usage` is that
    of the full-attention pool, 0-1, where another pool may be fuller; `recovering`: the new-token ratio is far above its start.
    """

    grammar: float = 0.0
    disaggregation: float = 0.0
    per_second: float | None = None
    full_usage: float | None = None
    recovering: bool = False


NO_OTHER_WAITS = OtherWaits()


_Fits: TypeAlias = "Callable[[float, float, float], bool | None]"


def _always(_running: float, _usage: float, _target: float) -> bool:
    return True


class Classifier:
    """Gives the states of one scheduler by its thresholds; `waits_by` is that of `Arguments`."""

    def __init__(
        self,
        profile: Profile,
        running_limit: float | None,
        largest_captured: int = ASSUMED_CAPTURED,
        without_graph: str = "",
        waits_by: str = "",
    ) -> None:
        self._lower, self._upper = profile.queue_lower or -inf, profile.queue_upper
        self._objective = profile.queue_wait_seconds
        self._target = profile.token_usage_target
        self._limit = AT_LIMIT_SHARE * (running_limit or inf)
        # Where one request has just ended: of a small limit that is more than the share above.
        self._all_but_one = (running_limit or inf) - 1.0
        self._largest = largest_captured
        self._without_graph = without_graph  # `disabled` or `unsupported`: then `False` in a line means nothing
        self._waits_by = waits_by
        self._unqueued: dict[tuple[float | None, float | None, bool | None], States] = {}

    def unqueued(self, running: float | None, usage: float | None, graph: bool | None) -> States:
        """Return the states without a queue; they are kept, since there are few different figures."""
        known = self._unqueued.get((running, usage, graph))
        if known is None:
            if len(self._unqueued) >= _ANSWERS_KEPT:
                self._unqueued.clear()
            known = self.serving(running, 0.0, usage, graph, False, lambda _: 0.0, 0.0)
            self._unqueued[running, usage, graph] = known
        return known

    def serving(  # noqa: PLR0917 - called for every line, by position
        self,
        running: float | None,
        queued: float | None,
        usage: float | None,
        graph: bool | None,
        prefill_full: bool,
        wait: Callable[[float], float | None],
        now: float,
        other_waits: OtherWaits = NO_OTHER_WAITS,
        next_fits: _Fits = _always,
    ) -> States:
        """Return the states while something runs or waits.

        `wait(now)` and `next_fits(running, usage, target)` are called only where they decide.
        """
        if usage is None:
            token_usage = UNKNOWN
        else:
            token_usage = "at_target" if usage >= self._target else "below_target"
        if queued is None:
            queue = admission = UNKNOWN
        elif queued <= 0:
            queue, admission = "empty", "no_queue"
        else:
            queue = self._queue(queued, wait, now)
            admission = self._admission(running, usage, other_waits, next_fits, prefill_full=prefill_full)
        if other_waits is not NO_OTHER_WAITS and (usage is None or usage < self._target):
            admission = self._other_queue(other_waits, running, queued or 0.0, prefill_full=prefill_full) or admission
        if self._without_graph:
            return ("serving", queue, token_usage, admission, self._without_graph)
        if graph:
            cuda_graph = "replayed"
        elif graph is None:
            cuda_graph = UNKNOWN
        else:
            cuda_graph = "beyond_captured" if (running or 0) > self._largest else "eager"
        return ("serving", queue, token_usage, admission, cuda_graph)

    def _other_queue(self, other_waits: OtherWaits, running: float | None, queued: float, *, prefill_full: bool) -> str:
        """Return why most requests wait in another queue; empty if they do not, or not for long."""
        longest = max(other_waits.grammar, other_waits.disaggregation)
        if longest <= queued:
            return ""
        if other_waits.grammar == longest:
            return "grammar_queue"
        if not self._other_side_is_slow(other_waits, running):
            return ""
        return (
            "prefill_bound" if prefill_full else "pd_queue"
        )  # a server busy with prompts keeps the other side waiting

    def _other_side_is_slow(self, other_waits: OtherWaits, running: float | None) -> bool:
        """Whether requests wait long for the other side of disaggregation: some always do, while their KV cache is transferred.

        The estimated wait decides. Without an objective, or a known rate, more requests must wait there than run here.
        """
        waiting, rate = other_waits.disaggregation, other_waits.per_second
        if self._objective is None or rate is None:
            return waiting > (running or 0)
        return waiting > rate * self._objective

    def _queue(self, queued: float, wait: Callable[[float], float | None], now: float) -> str:
        if queued > self._upper:
            return "above_range"
        if self._objective is not None:
            seconds = wait(now)
            if seconds is not None and seconds > self._objective:
                return "above_range"
        return "below_range" if queued < self._lower else "in_range"

    def _admission(
        self,
        running: float | None,
        usage: float | None,
        other_waits: OtherWaits,
        next_fits: _Fits,
        *,
        prefill_full: bool,
    ) -> str:
        """Return why requests wait. `held_back` needs evidence: a request would fit, and nothing else explains the wait."""
        if (running or 0) >= self._limit:
            return "running_limit"
        if usage is None:
            return UNKNOWN
        if usage >= self._target:
            full = other_waits.full_usage
            return "hybrid_pool_full" if full is not None and full < self._target else "pool_full"
        # Prompts fill every batch: requests wait for prefill, not for memory.
        if prefill_full or self._waits_by == "prefill":
            return "prefill_bound"
        if other_waits.recovering and not self._waits_by:
            return "recovering"
        fits = None if running is None or self._waits_by else next_fits(running, usage, self._target)
        near = running is not None and running >= self._all_but_one
        return UNKNOWN if fits is None else "pool_full" if not fits else "running_limit" if near else "held_back"
