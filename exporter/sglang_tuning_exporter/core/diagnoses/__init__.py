"""All diagnoses in one list: causes stand before their consequences, and of equally urgent ones the first is the verdict. Pure.

A family is a module beside this one, a diagnosis an object in it; what to do after its notification is `prose/<id>.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.config.values import UsageError, suggestion
from sglang_tuning_exporter.core.diagnoses.admission import (
    ADMISSION_STANDING_STILL,
    ADMISSION_TOO_CONSERVATIVE,
    DP_IMBALANCED,
    GRAMMAR_QUEUE,
    HYBRID_POOL_FULL,
    RUNNING_AT_LIMIT,
    RUNNING_FAR_BELOW_LIMIT,
)
from sglang_tuning_exporter.core.diagnoses.base import Diagnosis, Group
from sglang_tuning_exporter.core.diagnoses.clients import (
    CLIENTS_TIME_OUT,
    PROMPTS_BEYOND_CONTEXT,
    PROMPTS_BEYOND_KV_CACHE,
    REQUESTS_FAILED,
    REQUESTS_GIVEN_UP,
    REQUESTS_REFUSED,
)
from sglang_tuning_exporter.core.diagnoses.exporter import (
    EXPORTER_DOWN,
    EXPORTER_GONE,
    MANY_SERVERS,
    SCRAPED_TOO_SELDOM,
)
from sglang_tuning_exporter.core.diagnoses.graphs import (
    CUDA_GRAPH_NOT_COVERING,
    CUDA_GRAPH_OFF,
    TORCH_COMPILE_CANDIDATE,
)
from sglang_tuning_exporter.core.diagnoses.latency import (
    INTER_TOKEN_LATENCY_BURNING_FAST,
    INTER_TOKEN_LATENCY_BURNING_SLOW,
    LATENCY_BATCH_TOO_LARGE,
    LATENCY_QUEUE,
    TIME_TO_FIRST_TOKEN_BURNING_FAST,
    TIME_TO_FIRST_TOKEN_BURNING_SLOW,
)
from sglang_tuning_exporter.core.diagnoses.life import CRASHED, OFTEN_DOWN, RESTART_LOOP, SCHEDULER_STUCK, SERVER_DOWN
from sglang_tuning_exporter.core.diagnoses.memory import (
    GRAPH_MEMORY_SHORT,
    MEMORY_RESERVE_TOO_LARGE,
    MEMORY_RESERVE_TOO_SMALL,
    NO_KV_CACHE,
    OUT_OF_MEMORY_ANY,
    OUT_OF_MEMORY_DECODE,
    OUT_OF_MEMORY_PREFILL,
    QUANTIZATION_CANDIDATE,
)
from sglang_tuning_exporter.core.diagnoses.options import HICACHE_DEGRADED, SPECULATION_REJECTED
from sglang_tuning_exporter.core.diagnoses.pair import KV_TRANSFER_FAILING, PD_QUEUE
from sglang_tuning_exporter.core.diagnoses.prefill import LATENCY_LONG_PROMPTS, LATENCY_PREFILL_BETWEEN, PREFILL_BOUND
from sglang_tuning_exporter.core.diagnoses.prefixes import PREFIX_POLICY_WASTED, SHARED_PREFIXES_UNUSED
from sglang_tuning_exporter.core.diagnoses.retraction import CONSERVATIVENESS_INEFFECTIVE, RETRACTING_TOO_OFTEN
from sglang_tuning_exporter.core.diagnoses.sources import (
    FORMAT_DRIFT,
    LOG_SILENT,
    METRICS_DISABLED,
    NOT_SGLANG,
    SOURCES_DISAGREE,
)
from sglang_tuning_exporter.core.diagnoses.start import (
    COSTLY_SETTINGS,
    DATA_PARALLEL_WOULD_FIT,
    DP_ATTENTION_CANDIDATE,
    EXPERT_PARALLEL_CANDIDATE,
    FLAGS_AWAY_FROM_DEFAULTS,
    PROFILE_SETTINGS,
    ROUTER_CANDIDATE,
    SGLANG_RECOMMENDS,
)
from sglang_tuning_exporter.core.diagnoses.waiting import (
    CLIENT_TOO_SLOW,
    QUEUE_TOO_LONG,
    REQUESTS_REJECTED,
    UNEXPLAINED,
)

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
    NO_KV_CACHE,
    OUT_OF_MEMORY_PREFILL,
    OUT_OF_MEMORY_DECODE,
    GRAPH_MEMORY_SHORT,
    OUT_OF_MEMORY_ANY,
    RESTART_LOOP,
    SCHEDULER_STUCK,
    CRASHED,
    SERVER_DOWN,
    NOT_SGLANG,
    OFTEN_DOWN,
    KV_TRANSFER_FAILING,
)
LIMITS: tuple[Diagnosis, ...] = (
    CONSERVATIVENESS_INEFFECTIVE,
    RETRACTING_TOO_OFTEN,
    HYBRID_POOL_FULL,
    DP_IMBALANCED,
    RUNNING_AT_LIMIT,
    GRAMMAR_QUEUE,
    PD_QUEUE,
    ADMISSION_STANDING_STILL,
    PREFILL_BOUND,
    ADMISSION_TOO_CONSERVATIVE,
    CUDA_GRAPH_NOT_COVERING,
    CUDA_GRAPH_OFF,
    MEMORY_RESERVE_TOO_SMALL,
    LATENCY_BATCH_TOO_LARGE,
    RUNNING_FAR_BELOW_LIMIT,
    REQUESTS_REJECTED,
    QUEUE_TOO_LONG,
    CLIENTS_TIME_OUT,
    LATENCY_QUEUE,
    LATENCY_PREFILL_BETWEEN,
    LATENCY_LONG_PROMPTS,
    CLIENT_TOO_SLOW,
    UNEXPLAINED,
    REQUESTS_FAILED,
)
OBJECTIVES: tuple[Diagnosis, ...] = (
    TIME_TO_FIRST_TOKEN_BURNING_FAST,
    TIME_TO_FIRST_TOKEN_BURNING_SLOW,
    INTER_TOKEN_LATENCY_BURNING_FAST,
    INTER_TOKEN_LATENCY_BURNING_SLOW,
)
CHANCES: tuple[Diagnosis, ...] = (
    SPECULATION_REJECTED,
    SGLANG_RECOMMENDS,
    REQUESTS_GIVEN_UP,
    METRICS_DISABLED,
    LOG_SILENT,
    SOURCES_DISAGREE,
    MEMORY_RESERVE_TOO_LARGE,
    HICACHE_DEGRADED,
    COSTLY_SETTINGS,
    SHARED_PREFIXES_UNUSED,
    PREFIX_POLICY_WASTED,
    FLAGS_AWAY_FROM_DEFAULTS,
    DATA_PARALLEL_WOULD_FIT,
    PROMPTS_BEYOND_KV_CACHE,
    PROMPTS_BEYOND_CONTEXT,
    REQUESTS_REFUSED,
    ROUTER_CANDIDATE,
    PROFILE_SETTINGS,
    TORCH_COMPILE_CANDIDATE,
    QUANTIZATION_CANDIDATE,
    EXPERT_PARALLEL_CANDIDATE,
    DP_ATTENTION_CANDIDATE,
    FORMAT_DRIFT,
)
# Alerts about the exporter itself, which only Prometheus sees.
EXPORTER: tuple[Diagnosis, ...] = (
    EXPORTER_DOWN,
    EXPORTER_GONE,
    SCRAPED_TOO_SELDOM,
    MANY_SERVERS,
)
ALL: tuple[Diagnosis, ...] = (*FAILURES, *LIMITS, *OBJECTIVES, *CHANCES)
BY_ID: Mapping[str, Diagnosis] = {diagnosis.id: diagnosis for diagnosis in ALL}
_PLACES = {diagnosis: place for place, diagnosis in enumerate(ALL)}


def place(diagnosis: Diagnosis) -> int:
    """Return the place of a diagnosis in the list."""
    return _PLACES[diagnosis]


def _members(named: Iterable[Group | Diagnosis]) -> tuple[Diagnosis, ...]:
    """Return the diagnoses that are named, alone or by a group, each once."""

    def members() -> Iterator[Diagnosis]:
        for group in named:
            if isinstance(group, Diagnosis):
                yield group
            else:
                yield from (diagnosis for diagnosis in ALL if group in diagnosis.groups)

    return tuple(dict.fromkeys(members()))


_CAUSES = {diagnosis: _members(diagnosis.causes) for diagnosis in ALL}
_BETTER = {diagnosis: _members(diagnosis.unless) for diagnosis in ALL}
_HOLDING_BACK = {diagnosis: _members(diagnosis.held_back_by) for diagnosis in ALL}
for _diagnosis, _causes in _CAUSES.items():
    for _cause in _causes:
        if _PLACES[_cause] > _PLACES[_diagnosis]:
            raise ValueError(f"{_cause.id} can cause {_diagnosis.id}: list it first")


def causes_of(diagnosis: Diagnosis) -> tuple[Diagnosis, ...]:
    """Return the diagnoses that this one can follow from."""
    return _CAUSES.get(diagnosis, ())


def better_explained_by(diagnosis: Diagnosis) -> tuple[Diagnosis, ...]:
    """Return the diagnoses that explain the same evidence better."""
    return _BETTER.get(diagnosis, ())


def held_back_by(diagnosis: Diagnosis) -> tuple[Diagnosis, ...]:
    """Return the diagnoses while whose alert fires Alertmanager does not notify of this one."""
    return _HOLDING_BACK.get(diagnosis, ())


def adapted(
    profile: str,
    thresholds: Mapping[str, float] | None = None,
    accepted: Mapping[str, str] | None = None,
    waits: Mapping[str, float] | None = None,
) -> profiles.Profile:
    """Return a profile with the thresholds, mutes and waits of the user's choice. Raise `UsageError` for what is no diagnosis."""
    accepted, waits = accepted or {}, waits or {}
    for key, names, known in (
        ("accept", accepted, list(BY_ID)),
        ("wait", waits, [diagnosis.id for diagnosis in ALL if diagnosis.alert]),
    ):
        for name in names:
            if name not in known:
                raise UsageError(f"{key}={name}: give a diagnosis of docs/diagnoses.md{suggestion(name, known)}")
    return profiles.PROFILES[profile].with_thresholds(thresholds or {}).adapted(accepted, waits)
