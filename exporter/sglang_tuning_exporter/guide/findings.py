"""What limits a server now: the table's conditions evaluated over its recent past. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from sglang_tuning_exporter.guide.advice import Advice, Case, advise
from sglang_tuning_exporter.guide.table import (
    BY_ID,
    DIAGNOSES,
    Condition,
    Diagnosis,
    Failures,
    Reserve,
    RetractionRate,
    Share,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang_tuning_exporter.guide.profiles import Profile
    from sglang_tuning_exporter.server import ServerFacts
    from sglang_tuning_exporter.window import Totals

Confidence: TypeAlias = Literal["high", "medium", "low"]
Verdict: TypeAlias = str  # a diagnosis id, or one of the words below
HEALTHY, IDLE, NO_CLEAR_BOTTLENECK, NOT_ENOUGH_DATA = "healthy", "idle", "no_clear_bottleneck", "not_enough_data"


@dataclass(frozen=True, slots=True)
class Evidence:
    """A figure against its threshold; `unit` is share, per_minute, GB or failures."""

    name: str
    value: float
    threshold: float
    unit: str

    def words(self) -> str:
        """Write the value as a person does."""
        if self.unit == "share":
            return f"{100 * self.value:.0f} %"
        if self.unit == "GB":
            return f"{self.value:.1f} GB"
        return f"{self.value:.1f}".removesuffix(".0")


@dataclass(frozen=True, slots=True)
class Finding:
    """A diagnosis that holds, with what it rests on and what to turn."""

    diagnosis: Diagnosis
    evidence: Evidence
    confidence: Confidence
    advice: tuple[Advice, ...]

    @property
    def sentence(self) -> str:
        """What is seen, with its figure."""
        return self.diagnosis.seen.format(value=self.evidence.words())


@dataclass(frozen=True, slots=True)
class Past:
    """What the conditions look at: the window's totals and failures, and how many seconds of it were watched.

    `recent` adds up the schedulers of a server with DP ranks, so its seconds may be a multiple of those watched.
    """

    recent: Totals
    failures: Mapping[str, int]
    watched_seconds: float
    facts: ServerFacts
    profile: Profile

    @property
    def served_seconds(self) -> float:
        """The serving time of the server: at most the time watched, however many schedulers served."""
        return min(self.recent.serving_seconds(), self.watched_seconds)

    @property
    def enough(self) -> bool:
        """Whether there was load enough to judge it: 20 s of serving time and 10 observations (GUIDE, "frequently")."""
        seen = self.recent.counts["observations"]
        return self.served_seconds >= self.profile.enough_serving_seconds and seen >= self.profile.enough_observations

    @property
    def retractions_per_minute(self) -> float:
        """Retractions over the serving time watched; requests where only the metrics tell."""
        count = self.recent.counts["retraction_events"] or self.recent.counts["native_retracted_requests"]
        # Less than a minute of serving time is judged as a minute: one burst is no rate.
        return 60.0 * count / max(self.served_seconds, 60.0)


def _hold(condition: Condition, past: Past) -> Evidence | None:
    profile = past.profile
    if isinstance(condition, Share):
        share = past.recent.share(condition.signal, condition.state) if past.enough else None
        if share is not None and share > profile.frequent_share:
            return Evidence(
                f"share of serving time {condition.signal} was {condition.state}",
                share,
                profile.frequent_share,
                "share",
            )
    elif isinstance(condition, RetractionRate):
        rate = past.retractions_per_minute
        if past.enough and rate > profile.retractions_per_minute:
            return Evidence(
                "retractions per minute of serving time", rate, profile.retractions_per_minute, "per_minute"
            )
    elif isinstance(condition, Reserve):
        reserve = past.facts.reserve_gb
        above, below = profile.reserve_upper_gb, profile.reserve_lower_gb
        if reserve is not None and (reserve > above if condition.side == "above" else reserve < below):
            return Evidence(
                "available_gpu_mem at start-up", reserve, above if condition.side == "above" else below, "GB"
            )
    elif isinstance(condition, Failures):
        count = sum(past.failures.get(phase, 0) for phase in condition.phases)
        if count:
            return Evidence("out-of-memory failures", float(count), 0.0, "failures")
    return None


def _held(past: Past) -> list[tuple[Diagnosis, Evidence]]:
    """Give the rows whose condition holds, in the table's order of urgency."""
    return [
        (row, evidence)
        for row in DIAGNOSES
        if not row.profiles or past.profile.name in row.profiles
        if (evidence := _hold(row.condition, past)) is not None
    ]


def findings(past: Past) -> list[Finding]:
    """Give the diagnoses that hold, most urgent first; none that another explains better, no flag turned two ways."""
    found: list[Finding] = []
    turned: set[str] = set()
    held: set[str] = set()
    for row, evidence in _held(past):
        held.add(row.id)
        if held.intersection(row.unless):
            continue
        case = Case(past.facts, past.recent, past.profile)
        advice = tuple(a for a in advise(row.id, case) if a.arg not in turned) if _may_turn(row, held) else ()
        turned.update(a.arg for a in advice if a.arg)
        # Without advice the flag is where the guide wants it, or a more urgent finding turns it: nothing to say, unless
        # what was seen is bad by itself.
        if advice or not row.turn.arg or isinstance(row.condition, (Failures, RetractionRate)):
            found.append(Finding(row, evidence, _confidence(past), advice))
    return found


def _may_turn(row: Diagnosis, held: set[str]) -> bool:
    """Say whether memory may be given away: not to the KV pool after an OOM, nor where larger graphs need it."""
    needed = any(isinstance(BY_ID[other].condition, Failures) for other in held) or "cuda_graph_not_covering" in held
    return not (needed and row.turn.arg == "mem_fraction_static" and row.turn.direction == "raise")


def _confidence(past: Past) -> Confidence:
    served = past.served_seconds
    return "high" if served >= 120 else "medium" if served >= 60 else "low"


def verdict(found: list[Finding], past: Past) -> Verdict:
    """Say in one word what limits the server.

    The most urgent finding that is not mere information, else an honest reason for none.
    """
    for finding in found:
        if finding.diagnosis.severity != "info" or finding.diagnosis.id == "client_too_slow":
            return finding.diagnosis.id
    if past.enough:
        # A condition that holds and has no advice left is no health.
        pressed = any(row.severity != "info" for row, _ in _held(past))
        # The guide's range for throughput is a healthy queue; where latency counts, only an empty one surely is.
        good = ("empty",) if past.profile.queue_lower is None else ("empty", "in_range")
        fine = sum(past.recent.share("queue", state) or 0.0 for state in good)
        return HEALTHY if fine > past.profile.frequent_share and not pressed else NO_CLEAR_BOTTLENECK
    idle = past.recent.seconds["activity", "idle"]
    return IDLE if idle > 0 and idle >= past.recent.serving_seconds() else NOT_ENOUGH_DATA
