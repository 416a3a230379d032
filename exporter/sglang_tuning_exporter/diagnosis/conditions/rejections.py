"""Requests that SGLang rejects, or that clients abandon for a reason."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_tuning_exporter.diagnosis.conditions.condition import RECENTLY, WINDOW, Condition, Samples
from sglang_tuning_exporter.diagnosis.conditions.retractions import RATE
from sglang_tuning_exporter.diagnosis.conditions.share import OFTEN, share_of
from sglang_tuning_exporter.diagnosis.evidence import Evidence, Past
from sglang_tuning_exporter.diagnosis.promql import ON, above, threshold
from sglang_tuning_exporter.diagnosis.suspects import LATE_TIMES
from sglang_tuning_exporter.state.journal import ABORTED, REJECTION
from sglang_tuning_exporter.state.profiles import ONE_MORE, Profile

_RATE = "instance:sglang_tuning_rejections:rate"


@dataclass(frozen=True, slots=True)
class Rejections(Condition):
    """SGLang rejected more requests than the profile tolerates, or clients abandoned too large a share for a reason.

    A reason: requests waited too long, or more than `times` the error budget of first tokens came late.
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
        if profile.queue_wait_seconds is None:  # any wait may be too long for the clients of a profile without a limit
            waited = 1.0 - (past.recent.share("queue", "empty") or 0.0)
        late = (recent.breach_share if recent is not None else None) or 0.0
        return waited > profile.frequent_share or late > profile.late_bound(self.times)

    def promql(self) -> list[str]:
        limit = f"({threshold('rejections_per_minute', 'upper')} + {ONE_MORE:g})"
        late = f'instance:sglang_tuning_latency_breaches:ratio{WINDOW}{{latency="time_to_first_token"}}'
        budget = f"({self.times:g} * (1 - {threshold('latency', 'objective')}))"
        empty = share_of("queue", ("empty",))
        return [
            f'({_RATE}{WINDOW}{{kind="rejected"}} {above(limit)}',
            f'or {_RATE}{WINDOW}{{kind="given_up"}} {above(limit)}',
            f"  and {ON} (instance:sglang_tuning_given_up:ratio{WINDOW} {above(threshold('aborted_share', 'upper'))})",
            # Reasons: requests waited (any wait, if the profile has no limit), or first tokens came late.
            f"  and {ON} (",
            f"    {share_of('queue', ('above_range',))} {above(OFTEN)}",
            f"    or ((1 - {empty}) {above(OFTEN)} unless {ON} {threshold('queue', 'wait_seconds')})",
            f"    or {late} {above(OFTEN)}",
            f"    or {late} {above(budget)}",
            "  )",
            # While the server hung, clients had no other reason.
            f"  unless {ON} max by (job, instance) (max_over_time(sglang_tuning_stuck_stage[{WINDOW}])) == 1)",
            # It continues, as with retractions.
            f"and {_RATE}{RECENTLY} > 0",
        ]

    def fires(self, samples: Samples) -> bool:
        if samples.increase(REJECTION, WINDOW) / 10 <= samples.limits.rejections_per_minute + ONE_MORE:
            return False
        return samples.increase(REJECTION, RECENTLY) > 0

    def bound(self, profile: Profile) -> tuple[str, str]:
        given_up = f"(abandoned: also more than {100 * profile.aborted_share:.0f} % of those answered)"
        return f"more than {profile.rejections_per_minute:g}", f", over five minutes {given_up}"
