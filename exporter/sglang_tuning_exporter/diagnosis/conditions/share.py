"""A state of a signal that lasts for too much of the serving time, and load that is unbalanced over DP ranks."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from sglang_tuning_exporter.diagnosis.conditions.condition import RECENTLY, SERVING_SECONDS, WINDOW, Condition, Samples
from sglang_tuning_exporter.diagnosis.demand import mean_prompt
from sglang_tuning_exporter.diagnosis.evidence import Evidence, Past
from sglang_tuning_exporter.diagnosis.promql import ON, above, one_of, threshold
from sglang_tuning_exporter.state.profiles import Profile
from sglang_tuning_exporter.state.signals import IDLE, STATES, UNKNOWN, Signal

# The states in words for users, because their names are internal.
STATE_WORDS: dict[str, str] = {
    "above_range": "the queue longer than its limit",
    "empty": "an empty queue",
    "below_range": "the queue shorter than its range",
    "in_range": "the queue in its range",
    "no_queue": "no request waiting",
    "held_back": "requests waiting and free KV cache",
    "recovering": "requests waiting after a burst of retractions",
    "running_limit": "--max-running-requests reached and requests waiting",
    "pool_full": "a full KV cache and requests waiting",
    "hybrid_pool_full": "a full sliding-window or mamba cache and requests waiting",
    "prefill_bound": "full prefill batches and requests waiting",
    "grammar_queue": "requests waiting for a grammar",
    "pd_queue": "requests waiting for the other server of a prefill/decode pair",
    "beyond_captured": "decode batches larger than the largest captured CUDA graph",
    "eager": "decode batches without a CUDA graph",
    "disabled": "CUDA graphs disabled",
    "replayed": "decode batches that replay a CUDA graph",
    "unsupported": "no CUDA graphs by device or role",
    "at_target": "token usage at its target",
    "below_target": "token usage below its target",
    "serving": "requests served",
    "stuck": "requests and no progress",
}
# States of admission in which requests wait.
WAITS = tuple(state for state in STATES["admission"] if state not in {"no_queue", IDLE, UNKNOWN})
OFTEN = threshold("share", "upper")
PERCENT = "{{ $value | humanizePercentage }}"


def often(profile: Profile) -> str:
    """Return the frequent share in words."""
    return f"more than {100 * profile.frequent_share:.0f} %"


def share_of(signal: Signal, states: tuple[str, ...], window: str = WINDOW) -> str:
    """Return PromQL: the recorded share of each state."""
    return f'instance:sglang_tuning_state:share{window}{{signal="{signal}", {one_of("state", states)}}}'


def busy(signal: Signal) -> str:
    """Return PromQL: the window has enough serving time."""
    return f'and {ON} instance:sglang_tuning_serving_seconds:increase{WINDOW}{{signal="{signal}"}} > SERVING_SECONDS'


def mean_usage(past: Past) -> list[Evidence]:
    """Return the mean token usage, as a list; empty where it is not known."""
    usage = past.recent.mean("usage")
    return [] if usage is None else [Evidence("mean token usage", usage, past.profile.token_usage_target, "ratio")]


def full_cache(past: Past) -> list[Evidence]:
    """Return the figures that show a full KV cache: token usage, else a prompt that is larger than the free space."""
    usage, prompt, pools = past.recent.mean("usage"), mean_prompt(past), past.facts.kv_pool_tokens.values()
    shown = [each for each in mean_usage(past) if not each.value < each.threshold]
    if shown or usage is None or prompt is None or not pools:
        return shown
    name, free = "tokens of a mean prompt, against the free tokens of the KV cache", round((1 - usage) * min(pools))
    return [Evidence(name, round(prompt), free, "count")] if round(prompt) > free else []


@dataclass(frozen=True, slots=True)
class OtherCause:
    """Another cause: more than `above` of a signal's serving time was spent in one of these states."""

    signal: Signal
    states: tuple[str, ...]
    above: float

    def promql(self) -> str:
        return f"sum by (job, instance) ({share_of(self.signal, self.states)}) > {self.above:g}"

    def fires(self, samples: Samples) -> bool:
        return (samples.share(self.signal, self.states, WINDOW) or 0.0) > self.above


@dataclass(frozen=True, slots=True)
class Share(Condition):
    """More than the profile's frequent share of the serving time was spent in one of these states."""

    figure = PERCENT
    title_unit = "of the time"
    fires_on = "states"

    signal: Signal
    states: tuple[str, ...]
    unless: tuple[OtherCause, ...] = ()

    @property
    def needs(self) -> str:
        return f"load, and a log or metrics that show its {self.signal.replace('_', ' ')}"

    def measure(self, past: Past) -> Evidence | None:
        if not past.has_enough_load:
            return None
        share = past.recent.share_of(self.signal, self.states)
        if share is None:
            return None
        bound = past.profile.frequent_share
        if any((past.recent.share_of(other.signal, other.states) or 0.0) > other.above for other in self.unless):
            share = min(share, bound)
        name = f"serving time with {' or '.join(STATE_WORDS[state] for state in self.states)}"
        return Evidence(name, share, bound, "share")

    @property
    def measured_by(self) -> tuple[Hashable, ...]:
        return tuple((self.signal, state) for state in self.states)

    def supporting(self, past: Past) -> list[Evidence]:
        profile = past.profile
        if self.states == ("pool_full",):
            found = full_cache(past)
        else:  # a long queue says nothing about the KV cache
            found = [] if self.states == ("above_range",) else mean_usage(past)
        queued, running = past.recent.mean("queued"), past.total("running")
        by_length = profile.queue_wait_seconds is None  # otherwise the queue's limit is its estimated wait
        if by_length and queued is not None and self.signal in {"queue", "admission"}:
            lower = profile.queue_lower or 0.0
            lowest = queued < lower or self.states == ("empty",)
            bound = lower if lowest else profile.queue_upper
            found.append(Evidence("mean queued requests", queued, bound, "count", below=lowest))
        wait, longest = past.queue_wait_seconds, profile.queue_wait_seconds
        if wait is not None and longest is not None and self.signal in {"queue", "admission"}:
            found.append(Evidence("estimated wait in the queue", wait, longest, "seconds"))
        limit = sum(filter(None, (past.facts.running_limit(dp) for dp in past.by_rank)))
        if running is not None and limit and self.signal == "admission":
            of = " of one micro batch" if past.facts.micro_batches > 1 else ""
            found.append(Evidence(f"mean running requests{of}", running, limit, "count"))
        return found

    def promql(self) -> list[str]:
        long, lately = (share_of(self.signal, self.states, window) for window in (WINDOW, RECENTLY))
        if len(self.states) > 1:
            long, lately = (f"sum without (state) ({share})" for share in (long, lately))
        return [
            f"{long} {above(OFTEN)}",
            busy(self.signal),
            f"and {ON} ({lately} {above(OFTEN)})",
            *(f"unless {ON} ({other.promql()})" for other in self.unless),
        ]

    def fires(self, samples: Samples) -> bool:
        # The long window alone decides most evaluations.
        if samples.busy(self.signal) <= SERVING_SECONDS:
            return False
        limit = samples.limits.frequent_share
        for window in (WINDOW, RECENTLY):
            share = samples.share(self.signal, self.states, window)
            if share is None or share <= limit:
                return False
        return not any(other.fires(samples) for other in self.unless)

    @property
    def description(self) -> str:
        return f"share of `{self.signal}` in {' or '.join(f'`{state}`' for state in self.states)}"

    def bound(self, profile: Profile) -> tuple[str, str]:
        return often(profile), ", over the last ten minutes and over the last two"


@dataclass(frozen=True, slots=True)
class Spread(Condition):
    """Requests wait on one DP rank for more than the frequent share of the time, and hardly ever on another."""

    description = "share of the time with requests waiting: fullest DP rank above `frequent_share`, emptiest below a tenth; ten minutes"
    figure = PERCENT
    needs = "load, and two DP ranks or more"

    hardly: float = 0.1

    def measure(self, past: Past) -> Evidence | None:
        waited = past.waited_by_rank
        if len(waited) < 2 or not past.has_enough_load:
            return None
        fullest, emptiest, bound = max(waited.values()), min(waited.values()), past.profile.frequent_share
        name = "share of the time with requests waiting on the fullest DP rank"
        # A rank with a queue of its own has no capacity for another's requests.
        return Evidence(name, fullest if emptiest < self.hardly else min(fullest, bound), bound, "share")

    def promql(self) -> list[str]:
        waited, lately = (f"rank:sglang_tuning_waiting:share{window}" for window in (WINDOW, RECENTLY))
        return [
            f"max by (job, instance) ({waited}) > {ON} {OFTEN}",
            f"and {ON} min by (job, instance) ({waited}) < {self.hardly:g}",
            f"and {ON} max by (job, instance) ({lately}) > {ON} {OFTEN}",
            busy("queue"),
        ]

    def fires(self, samples: Samples) -> bool:
        waited = samples.waiting(WINDOW)
        limit = samples.limits.frequent_share
        if not waited or max(waited) <= limit or min(waited) >= self.hardly or samples.busy("queue") <= SERVING_SECONDS:
            return False
        return max(samples.waiting(RECENTLY), default=0.0) > limit

    def bound(self, profile: Profile) -> tuple[str, str]:
        return often(profile), ", over the last ten minutes"
