"""What the conditions of the table measure: a past, and figures against their thresholds. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Literal

from sglang_tuning_exporter.capacity.model import Measured
from sglang_tuning_exporter.capacity.ranks import RankCapacity
from sglang_tuning_exporter.diagnosis.capacities import capacities
from sglang_tuning_exporter.sglang.events import LivenessKind
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.journal import HUNG, START
from sglang_tuning_exporter.state.latency import Latency, RecentLatency
from sglang_tuning_exporter.state.profiles import Profile
from sglang_tuning_exporter.state.server import ServerState
from sglang_tuning_exporter.state.stages import Hang
from sglang_tuning_exporter.state.totals import Totals

WATCHDOG: LivenessKind = "watchdog_timeout"
RESERVE, UNRECOGNISED = "reserve", "unrecognised"
RESTART_LOOP_SECONDS = 1800.0
# What was not seen for so long is reported in the past tense: the rules' short window.
PAST_TENSE_SECONDS = 120.0
# Other ranks continue for so long after one of them failed.
RANKS_OUTLIVE_SECONDS = 10.0
# How the log shows that a server ended, by `LivenessKind`.
_ENDED = {
    "process_died": "its log says that one of its processes died",
    "scheduler_exception": "its log says that an exception ended its scheduler",
    "launch_failed": "its log says that its start failed",
}


def end_in_words(how: str, crash: str = "") -> dict[str, str]:
    """Return how the server ended, by its log, as words of the trouble `server_down`; empty while it may run."""
    if how not in _ENDED:
        return {}
    return {"server_down": f"its log says that {crash}" if crash else _ENDED[how]}


@dataclass(frozen=True, slots=True)
class Evidence:
    """A figure against its threshold. `unit` is share, ratio, per_minute, GB, seconds or count.

    `below`: it is bad to be below the threshold. `good`: the healthy bound where it differs from the threshold;
    nothing judges what lies between. `last_seen`: when a failure last happened. `since`: the earliest time at which a
    state began that a failure can cause. Both are seconds on the state's clock.
    """

    name: str
    value: float
    threshold: float
    unit: str
    below: bool = False
    last_seen: float | None = None
    since: float | None = None
    good: float | None = None
    text: str = ""  # replaces the value, where a figure says too little
    headline: str = ""  # replaces the row's summary, where more is known
    times: float | None = None  # the count behind a rate
    bound: str = ""  # replaces the threshold, where that is not exact

    @property
    def holds(self) -> bool:
        """Whether the figure is on the bad side of its threshold."""
        return self.value < self.threshold if self.below else self.value > self.threshold

    def words(self, figure: float | None = None) -> str:
        """Return the value, or another `figure` of its unit, in words."""
        if self.text and figure is None:
            return self.text
        return amount(self.value if figure is None else figure, self.unit)


def amount(value: float, unit: str) -> str:
    """Return a figure as text; of a rate without its unit."""
    if unit == "share":
        return f"{100 * value:.0f} %"
    if unit == "GB":
        return f"{value:.1f} GB"
    if unit == "seconds":
        return f"{value:.3g} s"
    if unit == "ratio":
        return f"{value:.2f}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}".removesuffix(".0")


@dataclass(frozen=True, eq=False)  # no slots, because of `cached_property`
class Past:
    """What the conditions look at: the totals of a window and what happened in it.

    `recent` is the sum over the schedulers (DP ranks), so its seconds may be a multiple of `watched_seconds`;
    `by_rank` has each. `event_counts` counts failures by phase and liveness events, `starts` the starts of the last half
    hour. `troubles` are ids of `SourceTrouble` rows that the exporter sees. `longest_answer` is the 99th percentile
    of answer tokens, `fixed_answer_tokens` the length where nearly all answers have the same. `last_seen` returns when an
    event (by name) or a state (by signal and state) was last seen, on the clock of `now`. `wait_is_known`: the rate at
    which requests start is known, and so the wait. `abandoned_without_output`: clients gave up requests, and no output has come
    since.
    """

    recent: Totals
    event_counts: Mapping[str, int]
    watched_seconds: float
    facts: ServerFacts
    profile: Profile
    by_rank: Mapping[int | None, Totals] = field(default_factory=dict)
    starts: int = 0
    hang: Hang | None = None
    latency: Mapping[Latency, RecentLatency] = field(default_factory=dict)
    troubles: frozenset[str] = frozenset()
    longest_answer: float | None = None
    fixed_answer_tokens: float | None = None
    now: float = 0.0
    last_seen: Callable[[Hashable], float | None] = lambda _: None
    wait_is_known: bool = False
    watchdog: str = ""  # the stage of the last watchdog timeout
    words: Mapping[str, str] = field(default_factory=dict)  # details of a trouble, by its id
    starting: bool = False  # the server is not up yet
    serves: bool = False  # now
    abandoned_without_output: bool = False
    crash: str = ""  # which process crashed and how, if the log ends with that
    capacities: Callable[[], Sequence[RankCapacity]] = tuple  # what each scheduler can do, as far as it was measured

    @property
    def stage(self) -> str:
        """The stage that hangs; empty if none does. If a server accepts connections and answers nothing, it is the tokenizer."""
        return self.hang.stage if self.hang is not None else "tokenizer" if "hung" in self.troubles else ""

    @property
    def hung(self) -> bool:
        """Whether the server hung within the window, or may hang now. Then late and abandoned requests have no other cause."""
        last = self.last_seen(HUNG)
        return self.abandoned_without_output or (last is not None and self.now - last <= self.profile.window_seconds)

    @cached_property
    def served_seconds(self) -> float:
        """Seconds in which any scheduler served; overlapping seconds count once."""
        if len(self.by_rank) < 2:
            return min(self.recent.serving_seconds(), self.watched_seconds)
        longest = max(totals.serving_seconds() for totals in self.by_rank.values())
        return min(max(self.recent.counts["served_seconds"], longest), self.watched_seconds)

    @property
    def idle_seconds(self) -> float:
        """Seconds in which no scheduler had requests."""
        each = self.by_rank.values() if len(self.by_rank) > 1 else (self.recent,)
        return min(totals.seconds["activity", "idle"] for totals in each)

    @property
    def serving_ranks(self) -> float:
        """The mean number of schedulers that served at once, while any did."""
        return max(self.recent.serving_seconds() / self.served_seconds, 1.0) if self.served_seconds > 0 else 1.0

    def total(self, figure: str) -> float | None:
        """Return the mean of `queued` or `running` over all schedulers together, while any served."""
        mean = self.recent.mean(figure)
        return None if mean is None else mean * self.serving_ranks

    def mean_seconds(self, latency: Latency) -> float | None:
        """Return the mean of a latency; None if not known."""
        recent = self.latency.get(latency)
        return None if recent is None else recent.mean_seconds

    @cached_property
    def has_enough_load(self) -> bool:
        """Whether there was enough load to judge: 20 s of serving time and 10 observations (docs/decisions.md)."""
        enough = self.profile
        return self.served_seconds >= enough.enough_serving_seconds and self.observations >= enough.enough_observations

    @property
    def observations(self) -> float:
        """Batch lines, and scrapes that showed new figures."""
        return self.recent.counts["observations"]

    @property
    def started_requests(self) -> float | None:
        """Requests that got their first token, streamed or not; None if the server does not expose it.

        A prefill server of a disaggregated pair generates no tokens: there it is the requests that left the queue.
        """
        started, queue = self.recent.counts.get("started_requests"), self.latency.get("queue")
        return queue.observations if started is None and queue is not None else started

    @property
    def fullest_pool(self) -> str:
        """The second pool for which requests waited longest; `full`, the main pool, if they waited for none."""
        waited = {pool: self.recent.counts.get(f"{pool}_pool_seconds", 0.0) for pool in ("swa", "mamba")}
        pool = max(waited, key=waited.__getitem__)
        return pool if waited[pool] > 0 else "full"

    @property
    def finished_requests(self) -> float | None:
        """Requests that ended, including those that a client aborted while they ran; None if the server does not expose it."""
        return self.recent.counts.get("finished_requests")

    @property
    def healthy_queue_states(self) -> tuple[str, ...]:
        """The states of a healthy queue.

        For throughput: the guide's range and below. For latency: an empty queue, or one whose wait is known to be
        short.
        """
        if self.profile.queue_lower is not None:
            return ("empty", "below_range", "in_range")
        return ("empty", "in_range") if self.wait_is_known else ("empty",)

    @property
    def queue_wait_seconds(self) -> float | None:
        """The estimated wait in the queue: mean queued requests over requests started per second; None if not known."""
        queued, started = self.total("queued"), self.started_requests or self.recent.counts["new_sequences"]
        return queued * self.served_seconds / started if queued is not None and started else None

    @property
    def given_up_share(self) -> float | None:
        """Share of the requests that clients aborted, 0-1; None if the server does not count them, or there were none.

        A server that counts them and has no count of started requests has started none.
        """
        given_up, started = self.recent.counts.get("aborted_requests"), self.started_requests or 0.0
        if given_up is None or not given_up + started:
            return None
        return given_up / (given_up + started)

    @property
    def new_token_ratio(self) -> float | None:
        """Its mean while requests were held back (`mean_while_held_back`): after a start or a retraction it falls for minutes."""
        for name in ("held_back_new_token_ratio", "new_token_ratio"):
            count = self.recent.counts[f"{name}_samples"]
            if count:
                return self.recent.counts[name] / count
        return None

    def mean_while_held_back(self, figure: Literal["usage", "running"]) -> float | None:
        """Return the mean of a figure while requests were held back, else over all serving time.

        Only while a request waits does the free KV cache show what SGLang reserves.
        """
        held_back = self.recent.mean(f"held_back_{figure}")
        return self.recent.mean(figure) if held_back is None else held_back

    @property
    def retractions(self) -> float:
        """Retractions; retracted requests where only the metrics are available."""
        return self.recent.counts["retraction_events"] or self.recent.counts["native_retracted_requests"]

    @property
    def retractions_per_minute(self) -> float:
        """Retractions per minute of serving time."""
        return self.per_minute(self.retractions)

    def per_minute(self, count: float) -> float:
        """Return a count per minute of serving time. Less than a minute counts as a minute: one burst is no rate."""
        return 60.0 * count / max(self.served_seconds, 60.0)

    @property
    def waited_by_rank(self) -> dict[int | None, float]:
        """Share of the time in which requests waited, for each scheduler, idle time included."""
        shares = {}
        for dp, totals in self.by_rank.items():
            known = sum(s for (signal, state), s in totals.seconds.items() if signal == "queue" and state != "unknown")
            waited = known - totals.seconds["queue", "empty"] - totals.seconds["queue", "idle"]
            if known >= self.profile.enough_serving_seconds:
                shares[dp] = waited / known
        return shares


def past_of(
    state: ServerState,
    now: float,
    *,
    seconds: float | None = None,
    troubles: frozenset[str] = frozenset(),
    words: Mapping[str, str] | None = None,
    starting: bool = False,
    half_read: bool = False,
    measured: Measured | None = None,
) -> Past:
    """Return the past of the last `seconds` before `now` (default: the profile's window).

    `half_read`: the log is not read to its end, so an end in it need not be the last event.
    """
    died = "" if half_read else state.life.died
    profile = state.profile.for_server(state.facts)
    window = profile.window_seconds if seconds is None else seconds
    return Past(
        state.recent(now, seconds),
        state.recent_marks(now, window),
        min(now - state.begun, window),
        state.facts,
        profile,
        {rank.dp: rank.window.recent(now, rank.totals, seconds) for rank in state.schedulers},
        state.recent_marks(now, RESTART_LOOP_SECONDS)[START],
        state.hang(now),
        state.latencies(now, seconds),
        troubles | ({"server_down"} if died else frozenset()),
        state.latency.longest_answer(now, seconds),
        state.latency.fixed_answer(now, seconds),
        now,
        lambda what: state.last_seen(what, now),
        state.knows_waits(now),
        state.life.watchdog,
        {**(words or {}), **end_in_words(died, state.life.crash)},
        starting,
        any(rank.states["activity"] == "serving" for rank in state.schedulers),
        state.stages.has_given_up_requests,
        state.life.crash if died else "",
        cache(lambda: capacities(state, measured, now)),
    )
