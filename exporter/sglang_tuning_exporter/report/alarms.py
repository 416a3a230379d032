"""When the committed alerts would have fired over a log, told without a Prometheus. Pure.

The rules' PromQL is followed: `increase()` (`samples`), `for`, `keep_firing_for`, `unless`. Inhibition is Alertmanager's.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from sglang_tuning_exporter.guide.diagnosis import (
    SERVING_SECONDS,
    BurnRate,
    Condition,
    Diagnosis,
    Failures,
    GraphMemory,
    Rejections,
    Reserve,
    RetractionRate,
    Share,
    Source,
    Spread,
    Starts,
    Stuck,
)
from sglang_tuning_exporter.guide.evidence import WATCHDOG, past_of
from sglang_tuning_exporter.guide.findings import judge
from sglang_tuning_exporter.guide.measurement import CONSERVATIVENESS_CEILING
from sglang_tuning_exporter.guide.profiles import ONE_MORE
from sglang_tuning_exporter.guide.promql import duration
from sglang_tuning_exporter.guide.table import ALERTS, BY_ID
from sglang_tuning_exporter.report.samples import (
    COUNTED,
    EVALUATION_SECONDS,
    Samples,
    Shares,
    increase_of,
)
from sglang_tuning_exporter.sglang.events import ENDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_tuning_exporter.guide.profiles import Profile
    from sglang_tuning_exporter.state import ServerState

_TOLD_BY_LOGS = frozenset({"format_drift", "crashed"})
# Nobody watches a log that is silent for longer: alerts end, and the time between is not walked through.
GAP_SECONDS = 86_400.0
_LONG, _SHORT = 600.0, 120.0  # the two windows of a share and of a rate
_HALF, _KNOWN, _HALF_HOUR, _DRIFT = 300.0, 300.0, 1800.0, 3600.0


@dataclass(frozen=True, slots=True)
class Span:
    """One alert that fired. Times are seconds on the log's clock, each that of an evaluation.

    `start`: it fired; `end`: it was resolved (`ongoing`: it was not; then the last evaluation); `pending_since`: its
    condition began to hold.
    """

    alert: str
    diagnosis: str
    severity: str
    start: float
    end: float
    pending_since: float
    ongoing: bool = False


class _Alert:
    """One alert rule: pending, firing, or neither (rules/alerting.go, AlertingRule.Eval)."""

    def __init__(self, row: Diagnosis) -> None:
        self.row = row
        self._hold = duration(row.hold)
        self._keep = duration(row.keep_firing) if row.keep_firing else 0.0
        self._pending: float | None = None
        self._fired: float | None = None
        self._over: float | None = None  # since when it fires only because it is kept firing

    def see(self, now: float, *, holds: bool) -> Span | None:
        """Take one evaluation; the span when it ends one."""
        if holds:
            self._over = None
            if self._pending is None:
                self._pending = now
            if self._fired is None and now - self._pending >= self._hold:
                self._fired = now
            return None
        if self._pending is None:
            return None
        if self._fired is not None and self._keep:
            if self._over is None:
                self._over = now
            if now - self._over < self._keep:
                return None
        return self.end(now)

    @property
    def state(self) -> str:
        """`pending`, `firing`, or nothing."""
        return "" if self._pending is None else "pending" if self._fired is None else "firing"

    def end(self, now: float) -> Span | None:
        """End what it does; the span when it fired."""
        span = self.present(now, ongoing=False)
        self._pending = self._fired = self._over = None
        return span

    def present(self, now: float, *, ongoing: bool = True) -> Span | None:
        """Give the span up to now when it fires."""
        if self._fired is None or self._pending is None:
            return None
        row = self.row
        return Span(row.alert, row.id, row.severity, self._fired, now, self._pending, ongoing)


class Evaluations:
    """The moments at which Prometheus looks: every 15 s of the log's time, from before its first line to after its last."""

    def __init__(self) -> None:
        self.now: float | None = None  # the last one given
        self.next_due = -inf  # none is due before this moment: cheaper to look at than `due` for every line

    def due(self, moment: float) -> Iterator[float]:
        """Give those from the last one up to `moment`, which is included; call it with the first line's time first.

        The first of all is at or before the first line: the exporter was there when the server was started. Take what the
        log says of `moment` only after them.
        """
        if moment == -inf:
            return
        before = moment // EVALUATION_SECONDS * EVALUATION_SECONDS - EVALUATION_SECONDS
        if self.now is None:
            self.now = before
        elif moment - self.now > GAP_SECONDS:
            self.skipped(self.now + EVALUATION_SECONDS)
            self.now = before
        while self.now + EVALUATION_SECONDS <= moment:
            self.now += EVALUATION_SECONDS
            yield self.now
        self.next_due = self.now + EVALUATION_SECONDS

    def rest(self) -> Iterator[float]:
        """Give the one after the last line, if there were any lines: what the log ends with is seen as well."""
        if self.now is not None:
            yield from self.due(self.next_due)

    def skipped(self, since: float) -> None:
        """Nobody looks from `since` until the next one."""


class AlarmClock(Evaluations):
    """Evaluates the alerts that a log can tell, every 15 s of the log's time. Memory does not grow with the log, but for the spans.

    What only Prometheus or SGLang's own `/metrics` can tell (`server_down`, latency objectives, …) never fires here.
    """

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        self._profile = profile
        self._alerts = [
            _Alert(row)
            for row in ALERTS
            if (not row.profiles or profile.name in row.profiles)
            and (row.id in _TOLD_BY_LOGS or not isinstance(row.condition, (Source, BurnRate)))
        ]
        self._spans: list[Span] = []
        self._forget()

    def _forget(self) -> None:
        self._seconds: dict[int | None, Samples[tuple[float, ...]]] = {}
        self._retractions: dict[int | None, Samples[float]] = {}
        self._counts: dict[str, Samples[float]] = {}
        self._left: dict[int | None, tuple[float, float]] = {}  # GPU memory of each rank, GB, and when it was told last
        self._active: dict[str, float] = {}  # when each diagnosis was seen to hold last

    def skipped(self, since: float) -> None:
        """End what fires: without samples no alert holds."""
        self._spans += [span for alert in self._alerts if (span := alert.end(since)) is not None]
        self._forget()

    def take(self, state: ServerState, now: float, *, unrecognised: float = 0.0) -> None:
        """Evaluate every alert. Bring `state` up to `now` first; `unrecognised` counts what the log's reader did not know."""
        self.now = now
        self._sample(state, now, unrecognised)
        evaluation = _Evaluation(self, state, now)
        for alert in self._alerts:
            span = alert.see(now, holds=evaluation.fires(alert.row))
            if span is not None:
                self._spans.append(span)

    def spans(self) -> list[Span]:
        """Give what fired until now, in order of its start; what still fires ends with the last evaluation."""
        now = self.now or 0.0
        firing = [span for alert in self._alerts if (span := alert.present(now)) is not None]
        return sorted([*self._spans, *firing], key=lambda span: (span.start, span.alert))

    def states(self) -> Iterator[tuple[Diagnosis, str]]:
        """Give the alerts that are `pending` or `firing` now."""
        return ((alert.row, state) for alert in self._alerts if (state := alert.state))

    def _sample(self, state: ServerState, now: float, unrecognised: float) -> None:
        """Keep what a Prometheus would have scraped just now."""
        for rank in state.schedulers:
            seconds = rank.totals.seconds
            told = self._seconds.setdefault(rank.dp, Samples(_LONG))
            told.add(now, tuple([seconds[place] for place in COUNTED]))
            self._counted(rank.dp, now, rank.totals.counts["retraction_events"])
        if not state.ranks:
            self._counted(None, now, 0.0)
        for by_rank in (self._seconds, self._retractions):
            gone = []
            for dp, series in by_rank.items():  # a scheduler that is not told of any more leaves the windows
                series.prune(now)
                if not series.samples:
                    gone.append(dp)
            for dp in gone:
                del by_rank[dp]
        if state.facts.reserve_gb is not None:
            by_dp = state.facts.available_gb if state.has_dp_ranks else {}
            of_ranks: dict[int | None, float] = {dp: gb for dp, gb in by_dp.items() if dp is not None}
            for dp, gb in (of_ranks or {None: state.facts.reserve_gb}).items():
                self._left[dp] = (now, gb)
        counts = {
            "starts": (_HALF_HOUR, state.starts),
            "rejected": (_LONG, state.server_totals.counts["rejected_requests"]),
            "unrecognised": (_DRIFT, unrecognised),
            **{event: (_LONG, state.liveness[event]) for event in (WATCHDOG, *ENDS)},
            **{phase: (_LONG, state.out_of_memory[phase]) for phase in _PHASES},
        }
        for name, (kept, value) in counts.items():
            self._counts.setdefault(name, Samples(kept)).add(now, value)

    def _counted(self, dp: int | None, now: float, retractions: float) -> None:
        self._retractions.setdefault(dp, Samples(_LONG)).add(now, retractions)


_PHASES = sorted(
    {"graph_capture"}
    | {phase for row in ALERTS if isinstance(row.condition, Failures) for phase in row.condition.phases}
)


class _Evaluation:
    """One evaluation of every rule. What is costly is reckoned only where an alert asks for it."""

    def __init__(self, clock: AlarmClock, state: ServerState, now: float) -> None:
        self._clock, self._state, self._now = clock, state, now
        self._limits = clock._profile.for_edition(first=state.facts.is_first_edition)  # noqa: SLF001 - one part
        self._windows: dict[float, Shares] = {}
        self._rate = self._retraction_rate(_LONG)
        self._found: tuple[frozenset[str], frozenset[str]] | None = None

    def fires(self, row: Diagnosis) -> bool:
        """Evaluate one alert's expression."""
        if not self._holds(row.condition, row) or (row.needs_advice and not self._is_active(row)):
            return False
        return not any(self._excuses(BY_ID[other].condition, row) for other in row.unless)

    def _is_active(self, row: Diagnosis) -> bool:
        if self._found is None:
            judgement = judge(past_of(self._state, self._now))
            self._found = (
                frozenset(found.diagnosis.id for found in judgement.findings),
                frozenset(check.diagnosis.id for check in judgement.checks),
            )
            self._clock._active.update(dict.fromkeys(self._found[0], self._now))  # noqa: SLF001
        seen = self._clock._active.get(row.id, -inf)  # noqa: SLF001
        return self._now - seen <= _LONG or row.id not in self._found[1]

    def _excuses(self, other: Condition, row: Diagnosis) -> bool:
        if isinstance(other, RetractionRate) and isinstance(row.condition, RetractionRate):
            return self._capped
        if isinstance(other, RetractionRate):
            return (self._rate or 0.0) > self._limits.retractions_per_minute
        return self._holds(other, row)

    def _holds(self, condition: Condition, row: Diagnosis) -> bool:  # noqa: C901, PLR0911 - one case for each kind
        limits = self._limits
        if isinstance(condition, Share):
            return self._share(condition)
        if isinstance(condition, RetractionRate):
            often = (self._rate or 0.0) > limits.retractions_per_minute + ONE_MORE
            if not often or (condition.capped and not self._capped):
                return False
            return (self._retraction_rate(_SHORT) or 0.0) > 0 and (self._retraction_rate(_HALF, _HALF) or 0.0) > 0
        if isinstance(condition, Rejections):
            rejected = self._clock._counts["rejected"]  # noqa: SLF001
            rate, lately = (increase_of(rejected, window, self._now) or 0.0 for window in (_LONG, _SHORT))
            return rate / 10 > limits.rejections_per_minute + ONE_MORE and lately > 0
        if isinstance(condition, Reserve):
            reserves = self._reserves
            if condition.side == "above":
                return bool(reserves) and max(reserves) > limits.reserve_upper_gb
            return bool(reserves) and min(reserves) < limits.reserve_lower_gb
        if isinstance(condition, GraphMemory):
            reserves = [] if self._state.facts.shown_args.get("disable_cuda_graph") == 1 else self._reserves
            return self._grew("graph_capture", _LONG) or (bool(reserves) and min(reserves) < limits.reserve_least_gb)
        if isinstance(condition, Failures):
            return any(self._grew(phase, _LONG) for phase in condition.phases)
        if isinstance(condition, Stuck):
            return self._state.hang(self._now) is not None or self._grew(WATCHDOG, _LONG)
        if isinstance(condition, Starts):
            started = increase_of(self._clock._counts["starts"], _HALF_HOUR, self._now)  # noqa: SLF001
            return started is not None and started > condition.at_least - 0.5
        if isinstance(condition, Spread):
            return self._spread(condition)
        if row.id == "crashed":
            return any(self._grew(event, _LONG) for event in ENDS)
        return row.id == "format_drift" and self._grew("unrecognised", _DRIFT)

    def _share(self, condition: Share) -> bool:
        limit = self._limits.frequent_share
        if self._over(_LONG).busy(condition.signal) <= SERVING_SECONDS:
            return False
        if any((self._over(_LONG).share(other) or 0.0) > other.above for other in condition.unless):
            return False
        shares = (self._over(window).share(condition) for window in (_LONG, _SHORT))
        return all(share is not None and share > limit for share in shares)

    def _over(self, window: float) -> Shares:
        known = self._windows.get(window)
        if known is None:
            known = self._windows[window] = Shares(self._clock._seconds, window, self._now)  # noqa: SLF001
        return known

    def _spread(self, condition: Spread) -> bool:
        limit = self._limits.frequent_share
        waiting = self._over(_LONG).waiting.values()
        if not waiting or self._over(_LONG).busy("queue") <= SERVING_SECONDS:
            return False
        lately = self._over(_SHORT).waiting.values()
        if not lately:
            return False
        return max(waiting) > limit and min(waiting) < condition.hardly and max(lately) > limit

    def _grew(self, name: str, window: float) -> bool:
        series = self._clock._counts[name]  # noqa: SLF001
        if series.is_level:
            return False
        grown = increase_of(series, window, self._now)
        return grown is not None and grown > 0

    def _retraction_rate(self, window: float, ago: float = 0.0) -> float | None:
        every = [increase_of(series, window, self._now - ago) for series in self._clock._retractions.values()]  # noqa: SLF001
        told = [count for count in every if count is not None]
        return sum(told) / (window / 60) if told else None

    @property
    def _capped(self) -> bool:
        return self._state.facts.shown_args.get("schedule_conservativeness", 0.0) > CONSERVATIVENESS_CEILING

    @property
    def _reserves(self) -> list[float]:
        """GPU memory left after the start, of each DP rank, GB (metrics/server.py, memory), as last known."""
        left = self._clock._left  # noqa: SLF001
        return [gb for at, gb in left.values() if self._now - at < _KNOWN]
