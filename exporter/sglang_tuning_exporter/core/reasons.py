"""Why requests wait: reasons in their order, each tried on one frozen sample of a scheduler. Pure, without time."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from sglang_tuning_exporter.core.sums import UNKNOWN

AT_LIMIT = 0.95
LARGE_LIMIT = 10.0  # one request fewer is still nearly all of them
# Work and no line, or no progress by pages, for so long is a hang, if the work is still there afterwards.
STUCK_SECONDS = 60.0


class Sample(NamedTuple):
    """What a scheduler shows while requests wait. None: the log or page does not show it."""

    # Its batch
    running: float | None = None  # with those that its last prefill batch added
    joining: float = 0.0  # further ones that a page's gauge does not count yet
    limit: float | None = None  # --max-running-requests of one scheduler
    at_limit_seconds: float = inf  # since the batch was last at that limit
    full_batch: bool = False  # the last prefill batch had all tokens that one may have
    continues: bool = False  # its last prompt continues in the next batch
    # Its KV cache
    usage: float | None = None  # of the fullest pool
    full_usage: float = 0.0  # of full attention's pool
    target: float = 1.0  # from this usage on the cache is full
    free: float = 0.0  # tokens; 0 where the size of the cache is not known
    reserved: float = inf  # tokens that SGLang can have reserved for what runs and for the next requests
    fits: bool = True  # one more request
    # Its queues
    for_grammar: bool = False  # more requests wait for a grammar than in the queue
    elsewhere: bool = False  # most wait for the other side of a pair, and longer than its transfers take
    waits_by: str = ""  # `prefill` or `other` where the new-token ratio alone does not decide who starts
    passes: bool = False  # the next batch takes this queue: only pages show it, and the wait is short
    # Since when
    idle_seconds: float = 0.0  # nothing was started while requests waited
    ended_seconds: float = -inf  # from then until a request ended
    early: bool = False  # too few requests have ended to show how much of its reservation one uses

    @property
    def is_full(self) -> bool:
        """Whether the KV cache is full: then a higher limit would let no more requests run."""
        return self.usage is not None and self.usage >= self.target

    @property
    def stands_still(self) -> bool:
        """Whether none was started for a minute although a request ended, or more is free than SGLang can have
        reserved.
        """
        if self.continues or self.idle_seconds <= STUCK_SECONDS:
            return False
        return self.ended_seconds > STUCK_SECONDS / 2 or self.free > self.reserved

    @property
    def is_below_limit(self) -> bool:
        """Whether fewer run than the limit allows, beside a cache that is not full."""
        return self.running is not None and self.limit is not None and not self.is_full and self.running < self.limit

    @property
    def is_near_limit(self) -> bool:
        """Whether nearly as many run as the limit allows, beside a cache that is not full."""
        if self.running is None or self.limit is None or self.is_full:
            return False
        nearly_all = min(AT_LIMIT * self.limit, max(self.limit - 1.0, 1.0))  # one fewer, until the next one starts
        return self.running + self.joining >= nearly_all

    @property
    def is_kept_by_limit(self) -> bool:
        """Whether the limit is the reason near it: the batch reached it, or others start each time one ends."""
        reached = self.at_limit_seconds <= STUCK_SECONDS or self.free <= self.reserved
        # A prompt in chunks can keep the last place of a small limit for good.
        return reached or (self.limit is not None and self.limit >= LARGE_LIMIT and self.starts_others)

    @property
    def starts_others(self) -> bool:
        """Whether a waiting request was started in the last half a minute."""
        return self.idle_seconds <= STUCK_SECONDS / 2


class Reason(NamedTuple):
    """A state of admission, and when it is the one."""

    state: str
    holds: Callable[[Sample], bool]


EARLY = Reason(UNKNOWN, lambda now: now.early)
# The first that holds is the reason.
REASONS: tuple[Reason, ...] = (
    # A request without its grammar is not in the queue yet, so nothing below is about it.
    Reason("grammar_queue", lambda now: now.for_grammar),
    # Of a pair: this side's own reason, if it has one, keeps requests from the other side.
    Reason("prefill_bound", lambda now: now.elsewhere and now.full_batch),
    Reason("pool_full", lambda now: now.elsewhere and now.is_full),
    Reason("pd_queue", lambda now: now.elsewhere),
    # The limit: before the prefill batches, which are full whenever many requests start at once.
    Reason("standing_still", lambda now: now.is_below_limit and now.stands_still),
    Reason("running_limit", lambda now: now.is_near_limit and now.is_kept_by_limit),
    Reason("standing_still", lambda now: now.is_near_limit and not now.continues and not now.starts_others),
    Reason(UNKNOWN, lambda now: now.is_near_limit),
    # Prompts: before the cache, which fills up while they are computed.
    Reason("prefill_bound", lambda now: now.full_batch or now.waits_by == "prefill"),
    # The cache.
    Reason(UNKNOWN, lambda now: now.usage is None),
    Reason("hybrid_pool_full", lambda now: now.is_full and now.full_usage < now.target),
    Reason("pool_full", lambda now: now.is_full or not now.fits),
    # There is room, and the next request fits.
    Reason("standing_still", lambda now: now.stands_still),
    Reason(UNKNOWN, lambda now: now.passes or bool(now.waits_by)),
    EARLY,
    Reason("held_back", lambda _: True),  # by the new-token ratio, the only reason left
)


def reason(sample: Sample) -> Reason:
    """Return why requests wait."""
    return next(each for each in REASONS if each.holds(sample))
