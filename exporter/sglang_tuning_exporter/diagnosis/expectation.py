"""The expected effect of a change, by the measured step times: throughput and inter-token latency. Pure.

`BATCHES` computes the batch after a change, by its argument, or by the direction of advice to people. Other changes,
and servers without known step times, have no figure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sglang_tuning_exporter.capacity.prediction import Prediction, predict
from sglang_tuning_exporter.diagnosis.clients import most_running_requests
from sglang_tuning_exporter.diagnosis.demand import demand, held_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tuning_exporter.capacity.ranks import RankCapacity
    from sglang_tuning_exporter.capacity.step_time import StepTime
    from sglang_tuning_exporter.diagnosis.advice import Advice
    from sglang_tuning_exporter.diagnosis.row import Diagnosis
    from sglang_tuning_exporter.diagnosis.sizing.advised_value import SizingInput

WORTH_IT = 0.05  # a change that gains less is not advised for its throughput
# Times the largest batch that was seen: predictions further away were not tested (docs/capacity.md).
MOST_TIMES = 8.0
DOUBLED = 2.0  # an FP8 KV cache holds twice the tokens of a 16-bit one
MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class Expected:
    """The predictions before and after a change, and their basis."""

    now: Prediction
    then: Prediction
    basis: str

    @property
    def gain(self) -> float:
        """The relative change of throughput: 0.39 is 39 % more."""
        return self.then.tokens_per_second.value / self.now.tokens_per_second.value - 1.0

    @property
    def gain_interval(self) -> tuple[float, float]:
        """The ends of the gain's interval, on the machine and with the requests of now."""
        now, then = self.now.tokens_per_second.value, self.then.tokens_per_second
        return then.low / now - 1.0, then.high / now - 1.0

    @property
    def words(self) -> str:
        """The prediction in one sentence."""
        now, then = self.now.tokens_per_second.value, self.then.tokens_per_second.value
        before, after = self.now.inter_token_p50_seconds.value, self.then.inter_token_p50_seconds.value
        return (
            f"{now:,.0f} → {then:,.0f} tokens/s ({100 * self.gain:+.0f} %), inter-token p50"
            f" {1e3 * before:.3g} → {1e3 * after:.3g} ms; from {self.basis}"
        )


def expected(advice: Advice, basis: SizingInput) -> Expected | None:
    """Return the expected effect of `advice`; None if not known."""
    batch_of = BATCHES.get(advice.arg or advice.direction)
    times = None if batch_of is None or basis.facts.micro_batches > 1 else batch_of(advice, basis)
    if times is None or times <= 0:
        return None
    ranks = basis.past.capacities()  # expensive, so only on demand
    now, then = (predict(ranks), predict(ranks, times)) if ranks else (None, None)
    if now is None or then is None or any(_is_too_far(rank, times) for rank in ranks):
        return None
    return Expected(now, then, _basis([rank.step for rank in ranks if rank.step is not None], basis))


def _is_too_far(rank: RankCapacity, times: float) -> bool:
    """Return whether `times` the present batch lies too far beyond the batches that were seen."""
    seen = rank.running or 0.0 if rank.step is None else max(rank.step.largest_seen, rank.running or 0.0)
    return times * (rank.running or 0.0) > MOST_TIMES * seen


def _basis(steps: Sequence[StepTime], basis: SizingInput) -> str:
    """Return where the figures come from."""
    if any(step.source == "log" for step in steps):
        return "the step times of the log's decode lines, prefill left out"
    age = max((step.line_age_seconds for step in steps), default=0.0)
    if age >= MINUTE:
        return f"the step times of {age / MINUTE:.0f} minutes ago, when the batch varied"
    return f"the last {basis.profile.window_seconds / MINUTE:.0f} minutes' step times"


def with_expectation(advice: Advice, basis: SizingInput) -> Advice:
    """Return the advice with its expected effect; advice to change nothing if throughput would hardly rise."""
    found = expected(advice, basis)
    if found is None:
        return advice
    words = f"expected: {found.words}"
    gain = f"{advice.gain}; {words}" if advice.gain else words
    if _runs_more(advice) and found.gain_interval[1] < WORTH_IT:
        what = f"leave {advice.flag} as it is" if advice.flag else "send no more requests at once"
        advice = advice.in_words(f"{what}: more requests at once would gain under {100 * WORTH_IT:.0f} %")
    return replace(advice, gain=gain, expected=found)


def _runs_more(advice: Advice) -> bool:
    if advice.arg == "schedule_conservativeness":
        return not advice.raises
    return advice.raises or advice.direction == "speed up"


def _all_waiting_run(basis: SizingInput) -> float | None:
    """Return the factor by which the batch would grow if all waiting requests ran."""
    running, queued = basis.past.total("running"), basis.past.total("queued")
    return None if not running or queued is None else (running + queued) / running


def _room(basis: SizingInput) -> float | None:
    """Return the factor by which the batch can grow in the KV cache, up to the profile's token usage."""
    usage = basis.recent.mean("usage")
    return None if not usage else max(basis.profile.token_usage_target / usage, 1.0)


def _smallest_of_known(*bounds: float | None) -> float | None:
    known = [each for each in bounds if each is not None]
    return None if len(known) < len(bounds) else min(known)


def _changed_running_limit(advice: Advice, basis: SizingInput) -> float | None:
    """Return the factor for a running limit: up to what fits and what waits, or down to the limit."""
    suggested, running = advice.suggested, basis.recent.mean("running")
    if not isinstance(suggested, float) or not running:
        return None
    limit = suggested / basis.facts.limit_shared_by / running
    return min(limit, 1.0) if not advice.raises else _smallest_of_known(limit, _room(basis), _all_waiting_run(basis))


def _lower_conservativeness(advice: Advice, basis: SizingInput) -> float | None:
    """Return the factor for a lower conservativeness, by the balance of admission with less reserved."""
    past, current, suggested = basis.past, advice.current, advice.suggested
    asking, ratio, tokens_held = demand(past), past.new_token_ratio, held_tokens(past, past.mean_while_held_back)
    if asking is None or ratio is None or tokens_held is None or advice.raises:
        return None
    if not isinstance(current, (int, float)) or not isinstance(suggested, float) or not current:
        return None
    kept, then = asking.asked - asking.used, ratio * suggested / current
    times = (tokens_held + ratio * kept) / (tokens_held + then * kept)
    return _smallest_of_known(times, _room(basis), _all_waiting_run(basis))


def _larger_pool(advice: Advice, basis: SizingInput) -> float | None:
    """Return the factor for a KV cache with more tokens, up to the running limit and what waits."""
    times = DOUBLED
    if isinstance(advice.current, float) and isinstance(advice.suggested, float):
        times = advice.suggested / advice.current
    running, limit = basis.recent.mean("running"), min(filter(None, basis.facts.running_limits.values()), default=None)
    bound = times if not running or limit is None else min(times, limit / running)
    return _smallest_of_known(max(bound, 1.0), _all_waiting_run(basis))


def _more_from_clients(_: Advice, basis: SizingInput) -> float | None:
    """Return the factor for clients that send more at once, up to what fits and may run."""
    running, fit = basis.past.total("running"), most_running_requests(basis.past)
    return None if not running or fit is None else fit / (running * basis.facts.micro_batches)


BATCHES: dict[str, Callable[[Advice, SizingInput], float | None]] = {
    "max_running_requests": _changed_running_limit,
    "schedule_conservativeness": _lower_conservativeness,
    "max_total_tokens": _larger_pool,
    "kv_cache_dtype": _larger_pool,
    "speed up": _more_from_clients,
}


def is_predictable(row: Diagnosis) -> bool:
    """Return whether a prediction exists for the row's own advice, on servers whose step time is known."""
    return not BATCHES.keys().isdisjoint((row.remedy.arg, row.remedy.direction))
