"""What limits a server now: the table's conditions evaluated over its recent past. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from sglang_tuning_exporter.guide.advice import Advice, Case, advise
from sglang_tuning_exporter.guide.table import DIAGNOSES, Diagnosis, Failures, Reserve, RetractionRate, RuleOnly, Share
from sglang_tuning_exporter.server import ServerFacts
from sglang_tuning_exporter.guide.profiles import Profile
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
        """The value as a person writes it."""
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
    """What the conditions look at: the window's totals and failures, and how many seconds of it were watched."""

    recent: Totals
    failures: Mapping[str, int]
    watched_seconds: float
    facts: ServerFacts
    profile: Profile

    @property
    def enough(self) -> bool:
        """Whether there was load enough to judge it: 20 s of serving time and 10 observations (GUIDE, "frequently")."""
        served, seen = self.recent.serving_seconds(), self.recent.counts["observations"]
        return served >= self.profile.enough_serving_seconds and seen >= self.profile.enough_observations

    @property
    def retractions_per_minute(self) -> float:
        """Retractions over the serving time watched; requests where only the metrics tell."""
        count = self.recent.counts["retraction_events"] or self.recent.counts["native_retracted_requests"]
        # Less than a minute of serving time is judged as a minute: one burst is no rate.
        return 60.0 * count / max(self.recent.serving_seconds(), 60.0)


def _hold(condition: object, past: Past) -> Evidence | None:
    profile = past.profile
    if isinstance(condition, Share):
        share = past.recent.share(condition.signal, condition.state) if past.enough else None
        if share is not None and share > profile.frequent_share:
            return Evidence(f"share of serving time {condition.signal} was {condition.state}", share, profile.frequent_share, "share")
    elif isinstance(condition, RetractionRate):
        rate = past.retractions_per_minute
        if past.enough and rate > profile.retractions_per_minute:
            return Evidence("retractions per minute of serving time", rate, profile.retractions_per_minute, "per_minute")
    elif isinstance(condition, Reserve):
        reserve = past.facts.reserve_gb
        above, below = profile.reserve_upper_gb, profile.reserve_lower_gb
        if reserve is not None and (reserve > above if condition.side == "above" else reserve < below):
            return Evidence("available_gpu_mem at start-up", reserve, above if condition.side == "above" else below, "GB")
    elif isinstance(condition, Failures):
        count = sum(past.failures.get(phase, 0) for phase in condition.phases)
        if count:
            return Evidence("out-of-memory failures", float(count), 0.0, "failures")
    return None


def findings(past: Past) -> list[Finding]:
    """The diagnoses that hold, in the table's order of urgency, none explained better by another and no flag turned two ways."""
    found: list[Finding] = []
    turned: set[str] = set()
    held: set[str] = set()
    for row in DIAGNOSES:
        if isinstance(row.condition, RuleOnly) or (row.profiles and past.profile.name not in row.profiles):
            continue
        evidence = _hold(row.condition, past)
        if evidence is None:
            continue
        held.add(row.id)
        if held.intersection(row.unless):
            continue
        advice = tuple(a for a in advise(row.id, Case(past.facts, past.recent, past.profile)) if not a.arg or a.arg not in turned)
        turned.update(a.arg for a in advice if a.arg)
        if row.turn.arg and not advice:
            continue  # the flag is where the guide wants it, or a more urgent finding turns it: nothing to say
        found.append(Finding(row, evidence, _confidence(past), advice))
    return found


def _confidence(past: Past) -> Confidence:
    served = past.recent.serving_seconds()
    return "high" if served >= 120 else "medium" if served >= 60 else "low"


def verdict(found: list[Finding], past: Past) -> Verdict:
    """One word for what limits the server: the most urgent finding that is not mere information, else an honest reason for none."""
    for finding in found:
        if finding.diagnosis.severity != "info" or finding.diagnosis.id == "client_too_slow":
            return finding.diagnosis.id
    if past.enough:
        waits = past.recent.share("queue", "empty")
        return HEALTHY if waits is not None and waits > past.profile.frequent_share else NO_CLEAR_BOTTLENECK
    idle = past.recent.seconds["activity", "idle"]
    return IDLE if idle > 0 and idle >= past.recent.serving_seconds() else NOT_ENOUGH_DATA
