"""What limits a server now: the table's conditions evaluated over its recent past. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal, TypeAlias

from sglang_tuning_exporter.diagnosis.acceptance import objection_to
from sglang_tuning_exporter.diagnosis.advice import Advice, SizingInput, advise
from sglang_tuning_exporter.diagnosis.demand import with_waits_explained
from sglang_tuning_exporter.diagnosis.evidence import PAST_TENSE_SECONDS, Evidence, Past
from sglang_tuning_exporter.diagnosis.profile_settings import differing_settings
from sglang_tuning_exporter.diagnosis.row import URGENCY, Diagnosis
from sglang_tuning_exporter.diagnosis.sizing.admission import tolerated
from sglang_tuning_exporter.diagnosis.suspects import OFTEN, replaces_advice, waits_beside_room
from sglang_tuning_exporter.diagnosis.table import BY_ID, DIAGNOSES, causes_first
from sglang_tuning_exporter.state.profiles import DEFAULT_PROFILE, PROFILES, Profile

Confidence: TypeAlias = Literal["high", "medium", "low"]
Verdict: TypeAlias = str  # a diagnosis id, or one of the words below
HEALTHY, IDLE, NO_CLEAR_BOTTLENECK, NOT_ENOUGH_DATA = "healthy", "idle", "no_clear_bottleneck", "not_enough_data"
STARTING = "starting"


@dataclass(frozen=True, slots=True)
class Finding:
    """A diagnosis that holds, with its evidence and advice. The first evidence is the one that decided."""

    diagnosis: Diagnosis
    evidence: tuple[Evidence, ...]
    confidence: Confidence
    advice: tuple[Advice, ...]
    because: tuple[str, ...] = ()  # ids of the findings that cause it
    ago: float | None = None  # seconds since its evidence was last seen
    profile: Profile = PROFILES[DEFAULT_PROFILE]

    @property
    def is_over(self) -> bool:
        """Whether it was not seen for so long that it is reported in the past tense."""
        return bool(self.diagnosis.summary_past) and self.ago is not None and self.ago > PAST_TENSE_SECONDS

    def summary(self, last: float | None) -> str:
        """Return one sentence; `last` is when it was last seen, in unix seconds."""
        if not self.is_over or last is None:
            return self.headline
        times = self.evidence[0].times
        return self.diagnosis.summary_past.format(until=time_of_day(last), times=f"{times or 0:,.0f} times")

    @property
    def sentence(self) -> str:
        """What was seen, with its figure."""
        return self.diagnosis.sentence(self.evidence[0].words(), self.profile.figures)

    @property
    def headline(self) -> str:
        """What is wrong, in one sentence: the row's summary, or what is known beyond it."""
        return self.evidence[0].headline or self.diagnosis.summary


@dataclass(frozen=True, slots=True)
class Check:
    """One row that was checked. `evidence` is None if the server does not expose it, or too little was seen."""

    diagnosis: Diagnosis
    evidence: Evidence | None

    @property
    def passed(self) -> bool | None:
        """Whether nothing is wrong; None if not known."""
        return None if self.evidence is None else not self.evidence.holds


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of all rows for one past."""

    verdict: Verdict
    findings: tuple[Finding, ...]
    checks: tuple[Check, ...]
    past: Past

    @property
    def changes(self) -> dict[str, object]:
        """All changes advised together, argument → flag value, without chances: those are tried one at a time."""
        advised = (a for found in self.findings if not found.diagnosis.is_chance for a in found.advice)
        return {a.arg: a.setting for a in advised if a.is_set}

    @property
    def severity(self) -> str:
        """The severity of the verdict, or the worst of its consequences: `critical`, `warning`, `info` or `none`."""
        if self.verdict not in BY_ID:
            return "none"
        follow = (found.diagnosis for found in self.findings if self.verdict in found.because and not found.is_over)
        return max((BY_ID[self.verdict], *follow), key=lambda row: URGENCY[row.severity]).severity


@dataclass(frozen=True, slots=True)
class _Advised:
    """What earlier findings advise: the value of each argument, and the changes of the command line."""

    values: dict[str, float | str | None] = field(default_factory=dict)
    changes: dict[str, object] = field(default_factory=dict)


def time_of_day(moment: float) -> str:
    """Return a moment, unix seconds, as `07:33`."""
    minutes = int(moment // 60) % (24 * 60)
    return f"{minutes // 60:02}:{minutes % 60:02}"


def judge(past: Past) -> Judgement:
    """Evaluate every row that the profile uses."""
    past = with_waits_explained(past)
    checks = tuple(
        Check(row, row.condition.measure(past))
        for row in DIAGNOSES
        if not row.profiles or past.profile.name in row.profiles
    )
    holding = {
        check.diagnosis.id: check.evidence for check in checks if check.evidence is not None and check.evidence.holds
    }
    found = _findings(holding, past)
    return Judgement(_verdict(found, holding, past), tuple(found), checks, past)


def causes_of(row: str, holding: Mapping[str, Evidence]) -> list[str]:
    """Return the rows that hold and cause this one, most urgent first.

    If this one began at a known moment, only a failure at that moment or later can be its cause.
    """
    since = holding[row].since
    possible = [cause for cause in holding if cause in BY_ID[row].causes]
    if since is None:
        return possible
    return [cause for cause in possible if (holding[cause].last_seen or -inf) >= since]


def _findings(holding: dict[str, Evidence], past: Past) -> list[Finding]:
    """Return the diagnoses that hold, causes first, without those that another row explains better. No flag is set two ways."""
    found: dict[str, Finding] = {}
    advised = _Advised()
    basis = SizingInput(past, frozenset(holding))
    in_order = causes_first(holding, lambda row: causes_of(row, holding))
    # Chances last: a flag that cures a fault is named with the fault, and belongs to the combined command line.
    for row in sorted(map(BY_ID.__getitem__, in_order), key=lambda row: row.is_chance):
        if not holding.keys().isdisjoint(row.unless) or row.superseded_by in found:
            continue
        if row.condition.can_be_tolerated and tolerated(basis) and not replaces_advice(row.id, past):
            continue  # the best advice is to change nothing
        because = tuple(cause for cause in causes_of(row.id, holding) if cause in found)
        advice = (
            _advice_of_causes(row, [found[cause] for cause in because])
            or _advice_by_wait_time(row, holding, past, advised)
            or _own_advice(row, holding, basis, advised)
        )
        advised.values.update((a.arg, a.suggested) for a in advice if a.arg)
        # Without advice the flag has its best value already, or a more urgent finding sets it. Then there is nothing to
        # report, unless the evidence is a fault in itself.
        if advice or not row.needs_advice:
            seen = (holding[row.id], *row.condition.supporting(past))
            last = row.condition.last_seen(past)
            ago = None if last is None else past.now - last
            found[row.id] = Finding(row, seen, confidence_of(past.served_seconds), advice, because, ago, past.profile)
    # Present findings before past ones, and chances last.
    return sorted(found.values(), key=lambda finding: (finding.diagnosis.is_chance, finding.is_over))


def _own_advice(
    row: Diagnosis, holding: dict[str, Evidence], basis: SizingInput, advised: _Advised
) -> tuple[Advice, ...]:
    """Return the row's own advice, without flags that another finding sets; adds it to the changes unless it is a chance."""
    # A row that would ask people to send less may repeat the flag of its cause.
    again = advised.values.items() if row.uses_advice_of_causes else ()
    advice = tuple(
        each
        for each in advise(row.id, basis)
        if (each.arg not in advised.values or (each.arg, each.suggested) in again) and _is_allowed(each, holding, basis)
    )
    return advice if row.is_chance else _accepted_together(advised.changes, advice, basis)


def _accepted_together(
    changes: dict[str, object], advice: tuple[Advice, ...], basis: SizingInput
) -> tuple[Advice, ...]:
    """Return the advice that the release accepts beside `changes`, and add it to them."""
    accepted = []
    flags = {a.arg: a.setting for a in advice if a.is_set}
    together = objection_to(basis.facts, {**changes, **flags}) is None
    for each in advice:
        if each.is_set:
            if not together and objection_to(basis.facts, {**changes, each.arg: each.setting}) is not None:
                continue
            changes[each.arg] = each.setting
        accepted.append(each)
    return tuple(accepted)


def _advice_of_causes(row: Diagnosis, causes: list[Finding]) -> tuple[Advice, ...]:
    """Return the advice of the first cause with a flag to set, else of the first with any; empty if the row has its own."""
    if not row.uses_advice_of_causes:
        return ()
    given = [cause.advice for cause in causes if cause.advice and not cause.diagnosis.is_chance]
    flags = [flags for advice in given if (flags := tuple(each for each in advice if each.flag))]
    return next(iter(flags or given), ())


def _advice_by_wait_time(
    row: Diagnosis, holding: dict[str, Evidence], past: Past, advised: _Advised
) -> tuple[Advice, ...]:
    """Return the flags of the cause that holds for most of the time in which requests waited; empty if the row has its own.

    After a burst the cause may hold for too little of all serving time to be a finding, and its flag is still the cure.
    """
    if not row.uses_advice_of_causes:
        return ()
    recent = past.recent.copy()
    recent.seconds.pop(("admission", "no_queue"), None)
    waits = replace(past, recent=recent)
    for cause in (BY_ID[cause] for cause in row.causes if cause not in holding):
        evidence = cause.condition.measure(waits)
        if evidence is not None and evidence.holds and holding.keys().isdisjoint(cause.unless):
            basis = SizingInput(waits, frozenset({*holding, cause.id}))
            return tuple(each for each in _own_advice(cause, holding, basis, advised) if each.flag)
    return ()


def _is_allowed(advice: Advice, holding: dict[str, Evidence], basis: SizingInput) -> bool:
    """Return whether the advice may stand beside what else holds.

    After an out-of-memory failure nothing takes more memory. While requests are retracted, or a large batch slows
    each step, nothing lets more requests run. A row that needs advice must have some.
    """
    takes = advice.takes
    protecting = (BY_ID[other] for other in holding if BY_ID[other].condition.protects in takes)
    return not any(not row.needs_advice or advise(row.id, basis) for row in protecting)


def confidence_of(served: float) -> Confidence:
    """Return the confidence in a judgement over so many seconds of serving time."""
    return "high" if served >= 120 else "medium" if served >= 60 else "low"


def _verdict(found: list[Finding], holding: dict[str, Evidence], past: Past) -> Verdict:
    """Return what limits the server: the first finding that can be a limit, else the reason why there is none."""
    for finding in found:
        # While the server starts, only what keeps it from starting is its limit.
        if finding.diagnosis.is_limit and not (past.starting and finding.diagnosis.severity != "critical"):
            return finding.diagnosis.id
    if past.starting:
        return STARTING
    if past.has_enough_load:
        # A condition that holds without advice left is not healthy; one of severity info, only if it holds most of
        # the time. Nor is a queue that is too long for less of the time than a finding needs.
        limited = any(
            BY_ID[row].is_limit and (BY_ID[row].severity != "info" or evidence.value > past.profile.frequent_share)
            for row, evidence in holding.items()
        )
        pressed = limited or waits_beside_room(past) or any(each.needed for each in differing_settings(past))
        fine = past.recent.share_of("queue", past.healthy_queue_states) or 0.0
        return HEALTHY if fine > 1.0 - OFTEN and not pressed else NO_CLEAR_BOTTLENECK
    # Too little load to judge is not idle.
    idle = past.idle_seconds > 0 and past.idle_seconds >= past.served_seconds and not past.serves
    return IDLE if idle and past.served_seconds < past.profile.enough_serving_seconds else NOT_ENOUGH_DATA
