"""Too many retractions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_tuning_exporter.diagnosis.conditions.condition import HALF, RECENTLY, WINDOW, Condition, Samples
from sglang_tuning_exporter.diagnosis.evidence import Evidence, Past, full_cache
from sglang_tuning_exporter.diagnosis.promql import ON, above, argument, largest_before, threshold
from sglang_tuning_exporter.state.journal import RETRACTION
from sglang_tuning_exporter.state.profiles import ONE_MORE, Profile

# The new-token ratio starts at min(0.7 x conservativeness, 1): above 1 / 0.7 the flag has no effect
# (srt/managers/scheduler.py, since 0.3.6).
CONSERVATIVENESS_CEILING = 1.43
RATE = '{{ $value | printf "%.1f" }}'
_ARG = "schedule_conservativeness"
_CAPPED = f"{argument(_ARG)} > {CONSERVATIVENESS_CEILING}"
_RATE = "instance:sglang_tuning_retractions:rate"
_LIMIT = threshold("retractions_per_minute", "upper")


@dataclass(frozen=True, slots=True)
class RetractionRate(Condition):
    """There were more retractions than the profile tolerates.

    `capped`: the new-token ratio is at its maximum already, so a higher --schedule-conservativeness has no effect.
    """

    counted = ((RETRACTION, WINDOW),)
    measured_by = (RETRACTION,)
    protects = "requests"
    figure = RATE
    is_event = True
    fires_on = "events"
    can_be_tolerated = True

    capped: bool = False

    @property
    def needs(self) -> str:
        return "load" + (f", and --schedule-conservativeness above {CONSERVATIVENESS_CEILING}" if self.capped else "")

    def measure(self, past: Past) -> Evidence | None:
        if not past.has_enough_load or (
            self.capped and (past.facts.conservativeness or 0.0) <= CONSERVATIVENESS_CEILING
        ):
            return None
        name, limit = "retractions per minute of serving time", past.profile.retractions_tolerated
        about = f"about {past.profile.retractions_per_minute:g}"
        return Evidence(name, past.retractions_per_minute, limit, "per_minute", times=past.retractions, bound=about)

    def supporting(self, past: Past) -> list[Evidence]:
        counts, target = past.recent.counts, past.profile.token_usage_target
        known = counts["retractions_with_usage"]
        before = counts["usage_before_retractions"] / known if known else 0.0
        if before < target:  # not known, or from a line that was printed some steps earlier
            return full_cache(past)
        name = f"token usage just before retractions, mean of {known:.0f} of {past.retractions:.0f}"
        return [Evidence(name, before, target, "ratio")]

    def promql(self) -> list[str]:
        return [
            f"{_RATE}{WINDOW} {above(f'({_LIMIT} + {ONE_MORE:g})')}",
            # It continues, and was not a single burst. Not "> limit": at 1.5 a minute every other window of two
            # minutes has two, and `for` would never end.
            f"and {ON} {_RATE}{RECENTLY} > 0",
            f"and {ON} {largest_before(_RATE + HALF, HALF)} > 0",
            *([f"and {ON} {_CAPPED}"] if self.capped else []),
        ]

    def fires(self, samples: Samples) -> bool:
        if self._rate(samples) <= samples.limits.retractions_per_minute + ONE_MORE:
            return False
        going_on = samples.increase(RETRACTION, RECENTLY) > 0 and samples.increase(RETRACTION, HALF, HALF) > 0
        return going_on and (_is_capped(samples) or not self.capped)

    def promql_as_cause(self, other: Condition) -> list[str]:
        return [_CAPPED] if other == replace(self, capped=False) else [f"{_RATE}{WINDOW} {above(_LIMIT)}"]

    def holds_as_cause(self, other: Condition, samples: Samples) -> bool:
        if other == replace(self, capped=False):
            return _is_capped(samples)
        return self._rate(samples) > samples.limits.retractions_per_minute

    @property
    def description(self) -> str:
        beyond = f" with conservativeness above {CONSERVATIVENESS_CEILING}" if self.capped else ""
        return f"more than `retractions_per_minute`{beyond}, five minutes"

    def bound(self, profile: Profile) -> tuple[str, str]:
        return f"more than {profile.retractions_per_minute:g}", ", over five minutes"

    def _rate(self, samples: Samples) -> float:
        return samples.increase(RETRACTION, WINDOW) / 10


def _is_capped(samples: Samples) -> bool:
    return samples.facts.shown_args.get(_ARG, 0.0) > CONSERVATIVENESS_CEILING
