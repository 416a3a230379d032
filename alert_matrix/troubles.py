"""What the exporter shows while a row's condition holds, and while it just does not. Derived from the kind of condition, so that a new row has its matrix.

A row of a kind that is not known here, or a `SourceTrouble` that is not described, is an error: nobody would notice that it is not tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from alert_matrix.series import Key, key
from alert_matrix.server import LOG_FILE, REQUESTS, TOKENS, Shares, mixed
from sglang_tuning_exporter.diagnosis.conditions.latency import BurnRate
from sglang_tuning_exporter.diagnosis.conditions.liveness import Starts, Stuck
from sglang_tuning_exporter.diagnosis.conditions.memory import Failures, GraphMemory, Reserve
from sglang_tuning_exporter.diagnosis.conditions.requests import Rejections, RetractionRate
from sglang_tuning_exporter.diagnosis.conditions.share import Share, Spread
from sglang_tuning_exporter.diagnosis.conditions.source import SourceTrouble
from sglang_tuning_exporter.diagnosis.promql import duration
from sglang_tuning_exporter.diagnosis.row import Diagnosis
from sglang_tuning_exporter.state.profiles import DEFAULT_PROFILE, GIGABYTE, PROFILES
from sglang_tuning_exporter.state.signals import Signal

MINUTE, HOUR = 60.0, 3600.0


class UndescribedError(Exception):
    """A row that the matrix cannot test."""


def length(text: str) -> float:
    """Give the seconds of a rule's duration, 0 for none."""
    return duration(text) if text else 0.0


@dataclass(frozen=True)
class Trouble:
    """The differences on the page during the trouble. Rates are per minute, jumps are in seconds after its begin."""

    shares: Mapping[Signal, Shares] = field(default_factory=dict)
    on_rank: Mapping[int, Mapping[Signal, Shares]] = field(default_factory=dict)
    rates: Mapping[Key, float] = field(default_factory=dict)
    jumps: Mapping[Key, tuple[float, ...]] = field(default_factory=dict)
    gauges: Mapping[Key, float | None] = field(default_factory=dict)
    again: Mapping[Key, tuple[float, float, float]] = field(default_factory=dict)  # a value, for how long, how often
    is_exporter_away: bool = False
    is_target_gone: bool = False
    scrapes_apart: float = 0.0  # Prometheus scrapes no more often meanwhile
    lasts: float | None = None  # less than the whole time


@dataclass(frozen=True)
class Case:
    """One way in which a row's trouble shows.

    `window` is how long the trouble must have lasted before the condition can hold, `tail` how long it may hold after the end (`inf`: nothing ends it).
    `seen_for`: the trouble
    is an event, and counts for so long. `settled`: how long after a start of the server nothing is judged.
    """

    row: Diagnosis
    words: str
    present: Trouble
    below: Trouble | None
    window: float = 0.0
    tail: float = 0.0
    seen_for: float | None = None
    always: Trouble = field(default_factory=Trouble)
    ranks: int = 0
    history: float = 16 * MINUTE
    settled: float = 0.0
    is_server_away: bool = False
    counts_starts: bool = False

    @property
    def name(self) -> str:
        """The alert, and the way where it has several."""
        return self.row.alert + (f": {self.words}" if self.words else "")

    @property
    def profile(self) -> str:
        """The profile of its server."""
        return _profile(self.row)

    @property
    def hold(self) -> float:
        """The rule's `for`, in seconds."""
        return length(self.row.hold)

    @property
    def keep(self) -> float:
        """The rule's `keep_firing_for`, in seconds."""
        return length(self.row.keep_firing)

    @property
    def time(self) -> float:
        """After how long an unbroken trouble must notify, seen without a delay."""
        return self.window + self.hold


def _share(row: Diagnosis, condition: Share) -> list[Case]:
    limit = PROFILES[_profile(row)].frequent_share

    def at(share: float) -> dict[Signal, Shares]:
        return {condition.signal: mixed(condition.signal, condition.states, share)}

    return [
        Case(
            row,
            "",
            Trouble(at(0.9)),
            Trouble(at(0.9 * limit)),
            window=10 * MINUTE,
            tail=10 * MINUTE,
            history=11 * MINUTE,
            always=Trouble(at(0.05)),
        )
    ]


def _retractions(row: Diagnosis, condition: RetractionRate) -> list[Case]:
    limit = PROFILES[_profile(row)].retractions_per_minute
    events, requests = key("retraction_events_total"), key("retracted_requests_total")
    capped = {key("server_arg", arg="schedule_conservativeness"): 2.0} if condition.capped else {}

    def case(words: str, often: Callable[[float], dict[Key, float]], always: dict[Key, float | None]) -> Case:
        return Case(
            row,
            words,
            Trouble(rates=often(2 * limit)),
            # "About once a minute is fine."
            Trouble(rates=often(limit)),
            # In both halves of ten minutes, and more than the limit and one more in the whole.
            window=6 * MINUTE,
            tail=5 * MINUTE,
            history=11 * MINUTE,
            always=Trouble(gauges={**capped, **always}),
        )

    return [
        case("events of the log", lambda rate: {events: rate, requests: 2 * rate}, {}),
        case("metrics alone", lambda rate: {requests: rate}, {events: None}),
    ]


def _rejections(row: Diagnosis, _condition: Rejections) -> list[Case]:
    profile = PROFILES[_profile(row)]
    limit, share = profile.rejections_per_minute, profile.aborted_share
    refused, given_up, started = (key(f"{name}_requests_total") for name in ("rejected", "aborted", "started"))
    observed = key("latency_observations_total", latency="time_to_first_token")
    often = 60 * REQUESTS
    waiting: dict[Signal, Shares] = {"queue": mixed("queue", ("above_range",), 0.9)}

    def case(words: str, present: Trouble, below: Trouble) -> Case:
        # Two more minutes than the window of the rate: the share of those who gave up is one of ten minutes.
        return Case(row, words, present, below, window=7 * MINUTE, tail=10 * MINUTE)

    return [
        case("refused", Trouble(rates={refused: 3 * limit}), Trouble(rates={refused: 0.9 * limit})),
        case(
            "given up",
            Trouble(waiting, rates={given_up: 0.4 * often, started: 0.6 * often}),
            Trouble(waiting, rates={given_up: 0.8 * share * often, started: often}),
        ),
        case(
            "everybody gives up",
            Trouble(waiting, rates={given_up: often, started: 0, observed: 0}),
            Trouble(waiting, rates={given_up: 0, started: 0, observed: 0}),
        ),
    ]


def _reserve(row: Diagnosis, condition: Reserve) -> list[Case]:
    profile, left = PROFILES[_profile(row)], key("available_gpu_memory_bytes")
    limit = profile.reserve_lower_gb if condition.side == "below" else profile.reserve_upper_gb
    bad, good = (0.8, 1.01) if condition.side == "below" else (1.2, 0.99)
    return [
        Case(
            row,
            "",
            Trouble(gauges={left: bad * limit * GIGABYTE}),
            Trouble(gauges={left: good * limit * GIGABYTE}),
            tail=5 * MINUTE,
        )
    ]


def _graph_memory(row: Diagnosis, _condition: GraphMemory) -> list[Case]:
    least, left = PROFILES[_profile(row)].reserve_least_gb, key("available_gpu_memory_bytes")
    return [
        _event(row, "capture failed", key("out_of_memory_total", phase="graph_capture")),
        Case(
            row,
            "almost nothing left",
            Trouble(gauges={left: 0.8 * least * GIGABYTE}),
            Trouble(gauges={left: 1.01 * least * GIGABYTE}),
            tail=5 * MINUTE,
        ),
    ]


def _event(row: Diagnosis, words: str, counter: Key, seen_for: float = 10 * MINUTE) -> Case:
    """Describe a row that one increment within its window fulfils. There is no case just below."""
    return Case(row, words, Trouble(jumps={counter: (1.0,)}), None, tail=5 * MINUTE, seen_for=seen_for)


def _failures(row: Diagnosis, condition: Failures) -> list[Case]:
    several = len(condition.phases) > 1
    return [
        _event(row, phase if several else "", key("out_of_memory_total", phase=phase)) for phase in condition.phases
    ]


def _stuck(row: Diagnosis, _condition: Stuck) -> list[Case]:
    hangs = Trouble({"activity": {"stuck": 1.0}}, gauges={key("stuck_stage", stage="scheduler"): 1.0})
    return [
        Case(row, "a stage hangs", hangs, None, tail=5 * MINUTE),
        _event(row, "a watchdog", key("liveness_events_total", event="watchdog_timeout")),
    ]


def _starts(row: Diagnosis, condition: Starts) -> list[Case]:
    starts = key("server_starts_total")

    def every(minutes: float) -> Trouble:
        return Trouble(jumps={starts: tuple(1.0 + minutes * MINUTE * number for number in range(12))})

    often, seldom = 24.0 / condition.at_least, 30.0 / (condition.at_least - 1) + 1
    return [
        Case(
            row,
            "",
            every(often),
            every(seldom),
            window=often * (condition.at_least - 1) * MINUTE,
            tail=30 * MINUTE,
            counts_starts=True,
        )
    ]


def _spread(row: Diagnosis, condition: Spread) -> list[Case]:
    limit = PROFILES[_profile(row)].frequent_share

    def waiting(share: float) -> dict[Signal, Shares]:
        return {"queue": mixed("queue", ("empty",), 1.0 - share)}

    quiet = dict.fromkeys(range(3), waiting(condition.hardly / 5))
    return [
        Case(
            row,
            "",
            Trouble(on_rank={0: waiting(0.9)}),
            Trouble(on_rank={0: waiting(0.9 * limit)}),
            window=10 * MINUTE,
            tail=10 * MINUTE,
            history=11 * MINUTE,
            always=Trouble(on_rank=quiet),
            ranks=3,
        )
    ]


def _burning(row: Diagnosis, condition: BurnRate) -> list[Case]:
    often = TOKENS if condition.latency == "inter_token" else REQUESTS
    breaches = key("latency_breaches_total", latency=condition.latency)
    limit = condition.times * (1 - PROFILES[_profile(row)].latency_objective)
    settled, long, short = (length(each) for each in (condition.settled, condition.long, condition.short))
    history = settled + 6 * MINUTE

    def at(share: float) -> Trouble:
        return Trouble(rates={breaches: 60 * often * share})

    late = 0.5
    return [
        Case(
            row,
            "",
            at(late),
            at(0.9 * limit),
            # As long as half of all, after so long without any, stays below the limit.
            window=min(long, 1.1 * history * limit / (late - limit)),
            tail=short,
            history=history,
            settled=settled,
        )
    ]


def _shown(row: Diagnosis, words: str, gauges: dict[Key, float | None], **more: Any) -> Case:
    """Describe a row that a gauge fulfils; just below means the same value for half of the time."""
    short = Trouble(gauges=gauges, lasts=length(row.hold) / 2)
    return Case(row, words, Trouble(gauges=gauges), short, tail=5 * MINUTE, **more)


def _away(reason: str) -> dict[Key, float | None]:
    return {key("up"): 0.0, key("scrape_error_info", reason=reason): 1.0}


_SOURCES: dict[str, Callable[[Diagnosis], list[Case]]] = {
    "server_down": lambda row: [_shown(row, "", _away("connection_refused"), is_server_away=True)],
    "metrics_disabled": lambda row: [
        _shown(
            row,
            "never had any",
            {key("scrape_error_info", reason="metrics_disabled"): 1.0},
            is_server_away=True,
            always=Trouble(gauges={key("up"): 0.0}),
        ),
        Case(
            row,
            "started anew without",
            Trouble(gauges=_away("metrics_disabled"), jumps={key("server_starts_total"): (1.0,)}),
            None,
            tail=5 * MINUTE,
            is_server_away=True,
        ),
    ],
    "crashed": lambda row: [_event(row, "", key("liveness_events_total", event="process_died"))],
    "often_down": lambda row: [
        Case(
            row,
            "",
            Trouble(again={key("up"): (0.0, 6 * MINUTE, 15 * MINUTE)}),
            Trouble(again={key("up"): (0.0, 1 * MINUTE, 15 * MINUTE)}),
            # Of two hours with one good one before it, a tenth and three pieces.
            window=45 * MINUTE,
            tail=2 * HOUR,
            history=66 * MINUTE,
            is_server_away=True,
        )
    ],
    "log_silent": lambda row: [
        _shown(row, "cannot be read", {key("log_up", file=LOG_FILE): 0.0}),
        Case(
            row,
            "silent",
            Trouble(gauges={key("log_silent_seconds"): 200.0}),
            Trouble(gauges={key("log_silent_seconds"): 55.0}),
            tail=5 * MINUTE,
        ),
    ],
    "sources_disagree": lambda row: [_shown(row, "", {key("sources_disagree", fact="kv_pool_tokens"): 1.0})],
    "format_drift": lambda row: [
        Case(
            row,
            "lines",
            Trouble(rates={key("log_unrecognised_total", kind="batch_key"): 2.0}),
            None,
            window=1 * MINUTE,
            tail=HOUR,
        ),
        _shown(row, "metrics", {key("metrics_unrecognised_families"): 2.0}),
    ],
    "exporter_down": lambda row: [
        Case(
            row,
            "",
            Trouble(is_exporter_away=True),
            Trouble(is_exporter_away=True, lasts=length(row.hold) / 2),
            window=2.5 * MINUTE,  # half of five
            tail=5 * MINUTE,
        )
    ],
    "exporter_gone": lambda row: [
        # For as long as Prometheus would look back, it may be between two scrapes. Nothing says when it is over.
        Case(row, "", Trouble(is_target_gone=True), None, window=5 * MINUTE, tail=inf)
    ],
    "scraped_too_seldom": lambda row: [
        Case(
            row,
            "",
            Trouble(scrapes_apart=180.0),
            Trouble(scrapes_apart=120.0),
            window=30 * MINUTE,
            tail=30 * MINUTE,
            history=31 * MINUTE,
        )
    ],
}


def _source(row: Diagnosis, _condition: SourceTrouble) -> list[Case]:
    described = _SOURCES.get(row.id)
    if described is None:
        raise UndescribedError(f"{row.id}: describe in alert_matrix/troubles.py what the exporter shows meanwhile")
    return described(row)


_KINDS: dict[type, Callable[[Diagnosis, Any], list[Case]]] = {
    Share: _share,
    RetractionRate: _retractions,
    Rejections: _rejections,
    Reserve: _reserve,
    GraphMemory: _graph_memory,
    Failures: _failures,
    Stuck: _stuck,
    Starts: _starts,
    Spread: _spread,
    BurnRate: _burning,
    SourceTrouble: _source,
}
# These alerts are about the exporter itself: failed scrapes are their trouble.
OF_THE_EXPORTER = frozenset({"exporter_down", "exporter_gone", "scraped_too_seldom"})


def _profile(row: Diagnosis) -> str:
    return row.profiles[0] if row.profiles else DEFAULT_PROFILE


def cases(row: Diagnosis) -> list[Case]:
    """Describe every way in which a row's trouble shows. Raises `UndescribedError`."""
    make = _KINDS.get(type(row.condition))
    if make is None:
        kind = type(row.condition).__name__
        raise UndescribedError(f"{row.id}: describe in alert_matrix/troubles.py what the exporter shows for a {kind}")
    return make(row, row.condition)
