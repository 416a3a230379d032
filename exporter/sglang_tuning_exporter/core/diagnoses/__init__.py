"""All diagnoses in one list. Pure.

Causes stand before their consequences. Of equally urgent diagnoses that hold, the first one in the list is the verdict.
A family is a module beside this one, a diagnosis an object in it; what to do after its notification is `prose/<id>.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.config.values import UsageError, suggestion
from sglang_tuning_exporter.core.diagnoses import (
    admission,
    clients,
    exporter,
    graphs,
    latency,
    life,
    memory,
    options,
    pair,
    prefill,
    prefixes,
    retraction,
    sources,
    start,
    waiting,
)
from sglang_tuning_exporter.core.diagnoses.base import Diagnosis, Group

__all__ = [
    "ALL",
    "BY_ID",
    "CHANCES",
    "EXPORTER",
    "FAILURES",
    "LIMITS",
    "OBJECTIVES",
    "Diagnosis",
    "Group",
    "adapted",
    "better_explained_by",
    "causes_of",
    "held_back_by",
    "place",
]

FAILURES: tuple[Diagnosis, ...] = (
    memory.NO_KV_CACHE,
    memory.OUT_OF_MEMORY_PREFILL,
    memory.OUT_OF_MEMORY_DECODE,
    memory.GRAPH_MEMORY_SHORT,
    memory.OUT_OF_MEMORY_ANY,
    life.RESTART_LOOP,
    life.SCHEDULER_STUCK,
    life.CRASHED,
    life.SERVER_DOWN,
    sources.NOT_SGLANG,
    life.OFTEN_DOWN,
    pair.KV_TRANSFER_FAILING,
)
LIMITS: tuple[Diagnosis, ...] = (
    retraction.CONSERVATIVENESS_INEFFECTIVE,
    retraction.RETRACTING_TOO_OFTEN,
    admission.HYBRID_POOL_FULL,
    admission.DP_IMBALANCED,
    admission.RUNNING_AT_LIMIT,
    admission.GRAMMAR_QUEUE,
    pair.PD_QUEUE,
    admission.ADMISSION_STANDING_STILL,
    prefill.PREFILL_BOUND,
    admission.ADMISSION_TOO_CONSERVATIVE,
    graphs.CUDA_GRAPH_NOT_COVERING,
    graphs.CUDA_GRAPH_OFF,
    memory.MEMORY_RESERVE_TOO_SMALL,
    latency.LATENCY_BATCH_TOO_LARGE,
    admission.RUNNING_FAR_BELOW_LIMIT,
    waiting.REQUESTS_REJECTED,
    waiting.QUEUE_TOO_LONG,
    clients.CLIENTS_TIME_OUT,
    latency.LATENCY_QUEUE,
    prefill.LATENCY_PREFILL_BETWEEN,
    prefill.LATENCY_LONG_PROMPTS,
    waiting.CLIENT_TOO_SLOW,
    waiting.UNEXPLAINED,
    clients.REQUESTS_FAILED,
)
OBJECTIVES: tuple[Diagnosis, ...] = (
    latency.TIME_TO_FIRST_TOKEN_BURNING_FAST,
    latency.TIME_TO_FIRST_TOKEN_BURNING_SLOW,
    latency.INTER_TOKEN_LATENCY_BURNING_FAST,
    latency.INTER_TOKEN_LATENCY_BURNING_SLOW,
)
CHANCES: tuple[Diagnosis, ...] = (
    options.SPECULATION_REJECTED,
    start.SGLANG_RECOMMENDS,
    clients.REQUESTS_GIVEN_UP,
    sources.METRICS_DISABLED,
    sources.LOG_SILENT,
    sources.SOURCES_DISAGREE,
    memory.MEMORY_RESERVE_TOO_LARGE,
    options.HICACHE_DEGRADED,
    start.COSTLY_SETTINGS,
    prefixes.SHARED_PREFIXES_UNUSED,
    prefixes.PREFIX_POLICY_WASTED,
    start.FLAGS_AWAY_FROM_DEFAULTS,
    start.DATA_PARALLEL_WOULD_FIT,
    clients.PROMPTS_BEYOND_KV_CACHE,
    clients.PROMPTS_BEYOND_CONTEXT,
    clients.REQUESTS_REFUSED,
    start.ROUTER_CANDIDATE,
    start.PROFILE_SETTINGS,
    graphs.TORCH_COMPILE_CANDIDATE,
    memory.QUANTIZATION_CANDIDATE,
    start.EXPERT_PARALLEL_CANDIDATE,
    start.DP_ATTENTION_CANDIDATE,
    sources.FORMAT_DRIFT,
)
# Alerts about the exporter itself, which only Prometheus sees.
EXPORTER: tuple[Diagnosis, ...] = (
    exporter.EXPORTER_DOWN,
    exporter.EXPORTER_GONE,
    exporter.SCRAPED_TOO_SELDOM,
    exporter.MANY_SERVERS,
)
ALL: tuple[Diagnosis, ...] = (*FAILURES, *LIMITS, *OBJECTIVES, *CHANCES)
BY_ID: Mapping[str, Diagnosis] = {diagnosis.id: diagnosis for diagnosis in ALL}
_PLACES = {diagnosis: place for place, diagnosis in enumerate(ALL)}


def place(diagnosis: Diagnosis) -> int:
    """Return the place of a diagnosis in the list."""
    return _PLACES[diagnosis]


def _members(named: Iterable[Group | Diagnosis]) -> tuple[Diagnosis, ...]:
    """Return the diagnoses that are named directly or by their group, each once."""

    def members() -> Iterator[Diagnosis]:
        for name in named:
            if isinstance(name, Diagnosis):
                yield name
            else:
                yield from (diagnosis for diagnosis in ALL if name in diagnosis.groups)

    return tuple(dict.fromkeys(members()))


_CAUSES = {diagnosis: _members(diagnosis.causes) for diagnosis in ALL}
_BETTER = {diagnosis: _members(diagnosis.unless) for diagnosis in ALL}
_HOLDING_BACK = {diagnosis: _members(diagnosis.held_back_by) for diagnosis in ALL}
for _diagnosis, _causes in _CAUSES.items():
    for _cause in _causes:
        if _PLACES[_cause] > _PLACES[_diagnosis]:
            raise ValueError(f"{_cause.id} can cause {_diagnosis.id}: list it first")


def causes_of(diagnosis: Diagnosis) -> tuple[Diagnosis, ...]:
    """Return the diagnoses that can cause this one."""
    return _CAUSES.get(diagnosis, ())


def better_explained_by(diagnosis: Diagnosis) -> tuple[Diagnosis, ...]:
    """Return the diagnoses that explain the same evidence better."""
    return _BETTER.get(diagnosis, ())


def held_back_by(diagnosis: Diagnosis) -> tuple[Diagnosis, ...]:
    """Return the diagnoses whose alerts keep Alertmanager from notifying of this one."""
    return _HOLDING_BACK.get(diagnosis, ())


def adapted(
    profile: str,
    thresholds: Mapping[str, float] | None = None,
    accepted: Mapping[str, str] | None = None,
    waits: Mapping[str, float] | None = None,
) -> profiles.Profile:
    """Return a profile with the thresholds, mutes and waits of the user.

    Raise `UsageError` for a mute or wait that names no diagnosis.
    """
    accepted, waits = accepted or {}, waits or {}
    for key, names, known in (
        ("accept", accepted, list(BY_ID)),
        ("wait", waits, [diagnosis.id for diagnosis in ALL if diagnosis.alert]),
    ):
        for name in names:
            if name not in known:
                raise UsageError(f"{key}={name}: give a diagnosis of docs/diagnoses.md{suggestion(name, known)}")
    return profiles.PROFILES[profile].with_thresholds(thresholds or {}).adapted(accepted, waits)
