"""The conditions of diagnoses, by what they are about.

May import `state`, `sglang/` and, of `diagnosis/`, evidence, interruption, profile settings, PromQL and suspects; no
rows.
"""

from sglang_tuning_exporter.diagnosis.conditions.condition import Condition, Kind, Samples
from sglang_tuning_exporter.diagnosis.conditions.latency import BurnRate, ObjectiveMissed
from sglang_tuning_exporter.diagnosis.conditions.liveness import Starts, Stuck
from sglang_tuning_exporter.diagnosis.conditions.memory import Failures, GraphMemory, Reserve
from sglang_tuning_exporter.diagnosis.conditions.requests import Rejections, RetractionRate
from sglang_tuning_exporter.diagnosis.conditions.share import OtherCause, Share, Spread
from sglang_tuning_exporter.diagnosis.conditions.source import SourceTrouble
from sglang_tuning_exporter.diagnosis.conditions.suitability import Suitability

__all__ = [
    "BurnRate",
    "Condition",
    "Failures",
    "GraphMemory",
    "Kind",
    "ObjectiveMissed",
    "OtherCause",
    "Rejections",
    "Reserve",
    "RetractionRate",
    "Samples",
    "Share",
    "SourceTrouble",
    "Spread",
    "Starts",
    "Stuck",
    "Suitability",
]
