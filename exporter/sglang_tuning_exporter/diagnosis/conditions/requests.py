"""Requests that SGLang retracts or rejects, or that clients abandon for a reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_tuning_exporter.diagnosis.conditions.condition import HALF, RECENTLY, WINDOW, Condition, Samples
from sglang_tuning_exporter.diagnosis.conditions.share import OFTEN, full_cache, share_of
from sglang_tuning_exporter.diagnosis.evidence import Evidence, Past
from sglang_tuning_exporter.diagnosis.promql import ON, above, argument, largest_before, threshold
from sglang_tuning_exporter.diagnosis.suspects import LATE_TIMES
from sglang_tuning_exporter.state.journal import ABORTED, REJECTION, RETRACTION
from sglang_tuning_exporter.state.profiles import ONE_MORE, Profile

# The new-token ratio starts at min(0.7 x conservativeness, 1): above 1 / 0.7 the flag has no effect
# (srt/managers/scheduler.py, since 0.3.6).
CONSERVATIVENESS_CEILING = 1.43
RATE = '{{ $value | printf "%.1f" }}'
_ARG = "schedule_conservativeness"
_CAPPED = f"{argument(_ARG)} > {CONSERVATIVENESS_CEILING}"
_RETRACTIONS = "instance:sglang_tuning_retractions:rate"
_LIMIT = threshold("retractions_per_minute", "upper")


@dataclass(frozen=True, slots=True)
class RetractionRate(Condition):
    """There were more retractions than the profile tolerates.

    `capped`: the new-token ratio is at its maximum already, so a higher --schedule-conservativeness has no effect.
    """

    counted = ((RETRACTION, WINDOW),)
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
            f"{_RETRACTIONS}{WINDOW} {above(f'({_LIMIT} + {ONE_MORE:g})')}",
            # It continues, and was not a single burst. Not "> limit": at 1.5 a minute every other window of two
            # minutes has two, and `for` would never end.
            f"and {ON} {_RETRACTIONS}{RECENTLY} > 0",
            f"and {ON} {largest_before(_RETRACTIONS + HALF, HALF)} > 0",
            *([f"and {ON} {_CAPPED}"] if self.capped else []),
        ]

    def fires(self, samples: Samples) -> bool:
        if self._rate(samples) <= samples.limits.retractions_per_minute + ONE_MORE:
            return False
        going_on = samples.increase(RETRACTION, RECENTLY) > 0 and samples.increase(RETRACTION, HALF, HALF) > 0
        return going_on and (_is_capped(samples) or not self.capped)

    def promql_as_cause(self, other: Condition) -> list[str]:
        return [_CAPPED] if other == replace(self, capped=False) else [f"{_RETRACTIONS}{WINDOW} {above(_LIMIT)}"]

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


_REJECTIONS = "instance:sglang_tuning_rejections:rate"
# Share of the requests given up, 0-1, above which any wait is a reason: half of them, where all got their first token.
MANY_GIVEN_UP = 0.33


@dataclass(frozen=True, slots=True)
class Rejections(Condition):
    """SGLang rejected more requests than the profile tolerates, or clients abandoned too large a share for a reason.

    A reason: requests waited too long, more than `times` the error budget of first tokens came late, or requests waited at all and
    many of them were given up.
    """

    description = "requests/min rejected or abandoned above `rejections_per_minute`, five minutes"
    counted = ((REJECTION, WINDOW),)
    measured_by = (REJECTION, ABORTED)
    figure = RATE
    is_event = True
    fires_on = "events"
    needs = "load"

    times: float = LATE_TIMES

    def measure(self, past: Past) -> Evidence | None:
        profile, counts = past.profile, past.recent.counts
        if not past.has_enough_load:
            return None
        limit = profile.rejections_per_minute
        rejected, given_up = (past.per_minute(counts[name]) for name in ("rejected_requests", "aborted_requests"))
        # While the server hung, clients had no other reason.
        many = not past.hung and rejected <= limit and (past.given_up_share or 0.0) > profile.aborted_share
        if many and self._has_reason(past):
            return Evidence("abandoned requests/min", given_up, limit, "per_minute")
        return Evidence("rejected requests/min", rejected, limit, "per_minute")

    def _has_reason(self, past: Past) -> bool:
        """Return whether the server gave clients a reason: people who stop an answer on purpose have none."""
        profile, recent = past.profile, past.latency.get("time_to_first_token")
        waited = past.recent.share("queue", "above_range") or 0.0
        # Any wait may be too long for the clients of a profile without a limit, and is where many give up.
        if profile.queue_wait_seconds is None or (past.given_up_share or 0.0) > MANY_GIVEN_UP:
            waited = 1.0 - (past.recent.share("queue", "empty") or 0.0)
        late = (recent.breach_share if recent is not None else None) or 0.0
        return waited > profile.frequent_share or late > profile.late_bound(self.times)

    def promql(self) -> list[str]:
        limit = f"({threshold('rejections_per_minute', 'upper')} + {ONE_MORE:g})"
        late = f'instance:sglang_tuning_latency_breaches:ratio{WINDOW}{{latency="time_to_first_token"}}'
        budget = f"({self.times:g} * (1 - {threshold('latency', 'objective')}))"
        empty, given_up = share_of("queue", ("empty",)), f"instance:sglang_tuning_given_up:ratio{WINDOW}"
        return [
            f'({_REJECTIONS}{WINDOW}{{kind="rejected"}} {above(limit)}',
            f'or {_REJECTIONS}{WINDOW}{{kind="given_up"}} {above(limit)}',
            f"  and {ON} ({given_up} {above(threshold('aborted_share', 'upper'))})",
            # Reasons: requests waited (any wait, if the profile has no limit or many are given up), or first tokens came late.
            f"  and {ON} (",
            f"    {share_of('queue', ('above_range',))} {above(OFTEN)}",
            f"    or ((1 - {empty}) {above(OFTEN)} unless {ON} {threshold('queue', 'wait_seconds')})",
            f"    or ((1 - {empty}) {above(OFTEN)} and {ON} {given_up} > {MANY_GIVEN_UP:g})",
            f"    or {late} {above(OFTEN)}",
            f"    or {late} {above(budget)}",
            "  )",
            # While the server hung, clients had no other reason.
            f"  unless {ON} max by (job, instance) (max_over_time(sglang_tuning_stuck_stage[{WINDOW}])) == 1)",
            # It continues, as with retractions.
            f"and {_REJECTIONS}{RECENTLY} > 0",
        ]

    def fires(self, samples: Samples) -> bool:
        if samples.increase(REJECTION, WINDOW) / 10 <= samples.limits.rejections_per_minute + ONE_MORE:
            return False
        return samples.increase(REJECTION, RECENTLY) > 0

    def bound(self, profile: Profile) -> tuple[str, str]:
        given_up = f"(abandoned: also more than {100 * profile.aborted_share:.0f} % of those answered)"
        return f"more than {profile.rejections_per_minute:g}", f", over five minutes {given_up}"
