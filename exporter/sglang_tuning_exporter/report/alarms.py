"""When the committed alerts would have fired over a log, without a Prometheus. Pure.

`diagnosis.alerting` evaluates each condition. This module does what Prometheus does around it: samples, `for` and `keep_firing_for`.
Inhibition is left out: Alertmanager does it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from operator import itemgetter
from typing import TypeVar

from sglang_tuning_exporter.diagnosis.alerting import fires, is_evaluated
from sglang_tuning_exporter.diagnosis.conditions.condition import WINDOW
from sglang_tuning_exporter.diagnosis.evidence import UNRECOGNISED, past_of
from sglang_tuning_exporter.diagnosis.findings import judge
from sglang_tuning_exporter.diagnosis.promql import LOOKBACK, duration
from sglang_tuning_exporter.diagnosis.row import Diagnosis
from sglang_tuning_exporter.diagnosis.table import ALERTS
from sglang_tuning_exporter.report.samples import COUNTED, EVALUATION_SECONDS, SampleSeries, Shares
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.journal import REJECTION, RETRACTION, START
from sglang_tuning_exporter.state.profiles import Profile
from sglang_tuning_exporter.state.server import ServerState
from sglang_tuning_exporter.state.signals import Signal

_T = TypeVar("_T")

# In a longer gap of the log alerts end, and nothing is evaluated.
GAP_SECONDS = 86_400.0
# What was found is looked for again after so long: a full judgement costs the most.
JUDGED_SECONDS = 60.0
_LONGEST, _KNOWN = duration(WINDOW), duration(LOOKBACK)
_COUNTED_SECONDS = itemgetter(*COUNTED)


@dataclass(frozen=True, slots=True)
class FiredAlert:
    """One alert that fired. Times are those of evaluations, in seconds on the log's clock.

    `start`: when it fired; `end`: when it was resolved, or the last evaluation if it is `ongoing`; `pending_since`: when its
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
        # What must have moved in the samples for its condition to hold; None: it may hold at any time.
        self.needs: Collection[Hashable] | None = {
            "states": row.condition.measured_by,
            "events": [event for event, _ in row.condition.counted],
            "anything": None,
        }[row.condition.fires_on]
        self._over: float | None = None  # since when only `keep_firing_for` keeps it firing

    def see(self, now: float, *, holds: bool) -> FiredAlert | None:
        """Take one evaluation; return the span that it ends, if any."""
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

    def end(self, now: float) -> FiredAlert | None:
        """End the alert; return its span if it fired."""
        span = self.present(now, ongoing=False)
        self._pending = self._fired = self._over = None
        return span

    def present(self, now: float, *, ongoing: bool = True) -> FiredAlert | None:
        """Return the span up to now if it fires."""
        if self._fired is None or self._pending is None:
            return None
        row = self.row
        return FiredAlert(row.alert, row.id, row.severity, self._fired, now, self._pending, ongoing)


class AlarmClock:
    """The alerts that a log can show, evaluated every 15 s of the log's time. Memory does not grow with the log, except for the spans.

    What only Prometheus or SGLang's own `/metrics` can show (`server_down`, latency objectives, …) never fires here.
    """

    def __init__(self, profile: Profile) -> None:
        self.now: float | None = None  # the last evaluation
        self.next_due = -inf  # no evaluation is due before; cheaper to compare than a call of `due` for every line
        self._alerts = [_Alert(row) for row in ALERTS if is_evaluated(row, profile.name)]
        self._samples = _ScrapedSamples(profile, [alert.row for alert in self._alerts])
        self._spans: list[FiredAlert] = []

    def due(self, moment: float) -> Iterator[float]:
        """Return the evaluations since the last one up to and including `moment`: every 15 s, from before the first line on.

        Take the events of `moment` after these evaluations.
        """
        if moment == -inf:
            return
        before = moment // EVALUATION_SECONDS * EVALUATION_SECONDS - EVALUATION_SECONDS
        if self.now is None:
            self.now = before
        elif moment - self.now > GAP_SECONDS:
            self._end_all(self.now + EVALUATION_SECONDS)
            self.now = before
        while self.now + EVALUATION_SECONDS <= moment:
            self.now += EVALUATION_SECONDS
            yield self.now
        self.next_due = self.now + EVALUATION_SECONDS

    def rest(self) -> Iterator[float]:
        """Return the evaluation after the last line, so that the end of the log is evaluated too."""
        if self.now is not None:
            yield from self.due(self.next_due)

    def _end_all(self, since: float) -> None:
        """End all alerts: without samples none holds."""
        self._spans += [span for alert in self._alerts if (span := alert.end(since)) is not None]
        self._samples.forget()

    def take(self, state: ServerState, now: float, *, unrecognised: float = 0.0) -> None:
        """Evaluate every alert. Bring `state` up to `now` first; `unrecognised` counts what the log's reader could not read."""
        self.now = now
        samples = self._samples
        samples.scrape(state, now, unrecognised)
        for alert in self._alerts:
            holds = (alert.needs is None or not samples.moved.isdisjoint(alert.needs)) and fires(alert.row, samples)
            if (holds or alert.state) and (span := alert.see(now, holds=holds)) is not None:
                self._spans.append(span)

    def spans(self) -> list[FiredAlert]:
        """Return what fired until now, in order of its start; what still fires ends at the last evaluation."""
        now = self.now or 0.0
        firing = [span for alert in self._alerts if (span := alert.present(now)) is not None]
        return sorted([*self._spans, *firing], key=lambda span: (span.start, span.alert))

    def states(self) -> Iterator[tuple[Diagnosis, str]]:
        """Return the alerts that are `pending` or `firing` now."""
        return ((alert.row, state) for alert in self._alerts if (state := alert.state))


class _ScrapedSamples:
    """What a Prometheus holds at one evaluation. Each figure is computed only where a rule asks for it."""

    def __init__(self, profile: Profile, rows: Iterable[Diagnosis]) -> None:
        self._profile = profile
        counted = [each for row in rows for each in row.condition.counted]
        self._kept = max((duration(window) for _, window in counted), default=0.0)
        self._events = tuple(dict.fromkeys(event for event, _ in counted if event != RETRACTION))
        self._places = {event: place for place, event in enumerate(self._events)}
        self.forget()

    def forget(self) -> None:
        """Drop all samples: nothing was scraped for too long."""
        self._seconds: dict[int | None, SampleSeries[tuple[float, ...]]] = {}
        self._retractions: dict[int | None, SampleSeries[float]] = {}
        self._counts: SampleSeries[tuple[float, ...]] = SampleSeries(self._kept)  # of `_events`
        self._left: dict[int | None, tuple[float, float]] = {}  # by rank: when last known, and GPU memory, GB
        self._active: dict[str, float] = {}  # when each diagnosis was last found
        self._limits_of: tuple[ServerFacts, int] | None = None  # the facts, and their revision

    def scrape(self, state: ServerState, now: float, unrecognised: float) -> None:
        """Take what a Prometheus scrapes at `now`, and evaluate at this moment from now on."""
        self.state, self.facts, self.now = state, state.facts, now
        if self._limits_of is None or self._limits_of[0] is not self.facts or self._limits_of[1] != self.facts.revision:
            self._limits_of = (self.facts, self.facts.revision)
            self.limits = self._profile.for_server(self.facts)
        self._shares: dict[str, Shares] = {}
        self._is_judged = False
        schedulers = state.schedulers
        for rank in schedulers:
            if rank.dp not in self._seconds:
                self._seconds[rank.dp] = SampleSeries(_LONGEST)
            self._seconds[rank.dp].add(now, _COUNTED_SECONDS(rank.totals.seconds))
            self._retracted(rank.dp, rank.totals.counts["retraction_events"])
        if not state.ranks:
            self._retracted(None, 0.0)
        if len(self._retractions) > len(schedulers):
            _forget_gone(self._seconds, now)
            _forget_gone(self._retractions, now)
        if state.facts.reserve_gb is not None:
            by_dp = state.facts.available_gb if state.has_dp_ranks else {}
            of_ranks: dict[int | None, float] = {dp: gb for dp, gb in by_dp.items() if dp is not None}
            for dp, gb in (of_ranks or {None: state.facts.reserve_gb}).items():
                self._left[dp] = (now, gb)
        others = {
            START: state.starts,
            REJECTION: state.server_totals.counts["rejected_requests"],
            UNRECOGNISED: unrecognised,
            **state.out_of_memory,
        }
        lives = state.liveness
        self._counts.add(now, tuple([others[each] if each in others else lives[each] for each in self._events]))
        self.moved = self._moved()

    def _moved(self) -> set[Hashable]:
        """Return the states, by signal, in which a second was spent, and the events that happened, as far back as samples are kept."""
        self._working = {dp: series for dp, series in self._seconds.items() if not series.is_level}
        of_names: list[tuple[Sequence[Hashable], SampleSeries[tuple[float, ...]]]]
        of_names = [(COUNTED, series) for series in self._working.values()]
        if not self._counts.is_level:
            of_names.append((self._events, self._counts))
        found: set[Hashable] = set()
        for names, series in of_names:
            ends = zip(names, series.samples[0][1], series.samples[-1][1], strict=True)
            found.update([name for name, first, last in ends if first != last])
        if not all(series.is_level for series in self._retractions.values()):
            found.add(RETRACTION)
        return found

    def _retracted(self, dp: int | None, count: float) -> None:
        if dp not in self._retractions:
            self._retractions[dp] = SampleSeries(_LONGEST)
        self._retractions[dp].add(self.now, count)

    @property
    def hangs(self) -> bool:
        return self.state.hang(self.now) is not None

    @property
    def reserves(self) -> list[float]:
        return [gb for at, gb in self._left.values() if self.now - at < _KNOWN]

    def busy(self, signal: Signal) -> float:
        return self._over(WINDOW).busy(signal)

    def share(self, signal: Signal, states: tuple[str, ...], window: str) -> float | None:
        return self._over(window).share(signal, states)

    def waiting(self, window: str) -> Collection[float]:
        return self._over(window).waiting()

    def increase(self, event: str, window: str, ago: str = "0s") -> float:
        seconds, at = duration(window), self.now - duration(ago)
        if event == RETRACTION:
            vectors = [each.within(seconds, at) for each in self._retractions.values() if not each.is_level]
            return sum(found.increases([(found.first, found.last)])[0] for found in vectors if found is not None)
        if event not in self.moved:
            return 0.0
        place, found = self._places[event], self._counts.within(seconds, at)
        return 0.0 if found is None else found.increases([(found.first[place], found.last[place])])[0]

    def found(self, row: Diagnosis) -> bool:
        if self.now - self._active.get(row.id, -inf) >= JUDGED_SECONDS and not self._is_judged:
            self._is_judged = True
            findings = judge(past_of(self.state, self.now)).findings
            self._active.update(dict.fromkeys((found.diagnosis.id for found in findings), self.now))
        return self.now - self._active.get(row.id, -inf) <= _LONGEST

    def _over(self, window: str) -> Shares:
        if window not in self._shares:
            self._shares[window] = Shares(self._working, duration(window), self.now)
        return self._shares[window]


def _forget_gone(by_rank: dict[int | None, SampleSeries[_T]], now: float) -> None:
    """Remove schedulers that are not reported any more from the windows."""
    for dp, series in list(by_rank.items()):
        series.prune(now)
        if not series.samples:
            del by_rank[dp]
