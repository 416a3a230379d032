"""The time of one scheduler: what it does, until when that is known, and the seconds of each state. Pure."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from sglang_tuning_exporter.state.signals import ALL_IDLE, ALL_STUCK, ALL_UNKNOWN, HOLD_SECONDS, SIGNALS, STATES
from sglang_tuning_exporter.state.totals import AdmissionRate, Snapshot, Totals, Window

NOTHING: Snapshot = (ALL_UNKNOWN, None, None, None)
STUCK: Snapshot = (ALL_STUCK, None, None, None)
IDLE: Snapshot = (ALL_IDLE, 0.0, None, 0.0)


class Timeline:
    """What holds now, and what follows while nothing else is seen.

    `plan` gives what the last observation says about the time after it, as pairs of (until, what holds). It is asked only when time
    passes beyond `until`: most lines of a log come before that. `rest` is called when the plan reaches idle, `expire` when nothing
    was seen for so long that no gauge is valid.
    """

    def __init__(
        self,
        now: float,
        window_seconds: float,
        plan: Callable[[], list[tuple[float, Snapshot]]],
        rest: Callable[[], None],
        expire: Callable[[], None],
    ) -> None:
        self.totals = Totals()
        for signal in SIGNALS:
            for state in STATES[signal]:
                self.totals.seconds[signal, state] = 0.0
        self.window = Window(window_seconds)
        self.admission = AdmissionRate()
        self.snapshot = NOTHING
        self.until = -inf  # until then `snapshot` holds without a look at anything else
        self.seen_at: float | None = None  # when `snapshot` was seen; None: nothing is known
        self.is_stalled = False  # there is work, and none of it is done
        self.counted_to = now
        self.served_seconds = 0.0  # also in `totals`, which are added up only when they are read
        self.updated_at: float | None = None  # when `snapshot` was last seen, even if unchanged
        self._plan, self._rest, self._expire = plan, rest, expire
        self._planned = True
        self._stages: list[tuple[float, Snapshot]] = []
        self._stalled_since: float | None = None  # when the state before `forget` was seen

    @property
    def serves(self) -> bool:
        """Whether something runs or waits."""
        return self.snapshot[0][0] == "serving"

    @property
    def hangs(self) -> bool:
        """Whether it has had work for a minute and done none of it."""
        return self.snapshot is STUCK

    @property
    def stuck_since(self) -> float | None:
        """Since when it has work and does none of it; None where it works."""
        return self._stalled_since if self.snapshot is STUCK else None

    def see(self, snapshot: Snapshot, now: float, until: float) -> None:
        """Set what was seen at `now`; it needs no plan before `until`."""
        self.snapshot, self.until, self._planned, self.is_stalled = snapshot, until, False, False
        self.seen_at = self.updated_at = now

    def see_before(self, snapshot: Snapshot, now: float) -> None:
        """Set what held from the seconds counted so far up to `now`."""
        self._stages, self._planned, self.until = [(now, snapshot)], True, -inf

    def see_again(self, now: float, *, is_stalled: bool) -> None:
        """Note that the last observation was seen again, and whether its work `is_stalled`."""
        self.updated_at, self.is_stalled = now, is_stalled
        if self.seen_at is None:
            self.snapshot = STUCK if is_stalled else NOTHING

    def expire(self) -> None:
        """Discard that anything was seen lately, and that its work is stalled."""
        self.updated_at = None
        if self.is_stalled:
            self.is_stalled, self.snapshot = False, NOTHING

    def forget(self) -> None:
        """Discard what was seen: it is too old, or the server started again."""
        self._stalled_since, self.seen_at = self.seen_at, None
        self._stages, self._planned = [], True
        self.snapshot, self.until = STUCK if self.is_stalled else NOTHING, -inf

    def advance(self, now: float) -> None:
        """Count the seconds up to `now`."""
        seconds = now - self.counted_to
        if seconds >= 0 and now <= self.until:
            # Nearly every line of a log: what was seen last still holds.
            if seconds:
                self.counted_to = now
                self.totals.pending.append((seconds, self.snapshot))
                self.served_seconds += seconds
            if now >= self.window.due:
                self.window.mark(now, self.totals)
            return
        begin, self.counted_to = self.counted_to, max(now, self.counted_to)
        stages = self._ahead()
        while stages:
            until, snapshot = stages[0]
            if snapshot is IDLE and self.snapshot is not IDLE:
                self._rest()
            self.snapshot = snapshot
            begin = self._spend(begin, min(until, now))
            if until >= now:
                self.until = until if self.serves else -inf
                break
            self.window.mark(begin, self.totals)
            del stages[0]
        else:
            if self.seen_at is not None:
                self.forget()
            self._spend(begin, now)
        if self.updated_at is not None and now - self.updated_at > HOLD_SECONDS:
            self._expire()
        self.window.mark(now, self.totals)

    def _ahead(self) -> list[tuple[float, Snapshot]]:
        """Return what the last observation says about the time after it."""
        if not self._planned:
            self._planned = True
            self._stages = [] if self.seen_at is None else self._plan()
        return self._stages

    def _spend(self, begin: float, end: float) -> float:
        """Count the seconds between for what holds; return where they end."""
        if end <= begin:
            return begin
        self.totals.pending.append((end - begin, self.snapshot))
        if self.serves:
            self.served_seconds += end - begin
        if self.snapshot[0] is ALL_IDLE or self.seen_at is None:
            self.admission.pause(end - begin)  # nobody waited, as far as is known
        return end
