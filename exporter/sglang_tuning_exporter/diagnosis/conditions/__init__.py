"""The conditions of diagnoses: one module for each kind.

May import `state`, `sglang/` and, of `diagnosis/`, evidence, interruption, profile settings, PromQL and suspects; no
rows.
"""

from sglang_tuning_exporter.diagnosis.conditions.condition import Condition, Kind, Samples
from sglang_tuning_exporter.diagnosis.conditions.failures import Failures
from sglang_tuning_exporter.diagnosis.conditions.graph_memory import GraphMemory
from sglang_tuning_exporter.diagnosis.conditions.latency import BurnRate, ObjectiveMissed
from sglang_tuning_exporter.diagnosis.conditions.rejections import Rejections
from sglang_tuning_exporter.diagnosis.conditions.reserve import Reserve
from sglang_tuning_exporter.diagnosis.conditions.retractions import RetractionRate
from sglang_tuning_exporter.diagnosis.conditions.share import OtherCause, Share
from sglang_tuning_exporter.diagnosis.conditions.source import SourceTrouble
from sglang_tuning_exporter.diagnosis.conditions.spread import Spread
from sglang_tuning_exporter.diagnosis.conditions.starts import Starts
from sglang_tuning_exporter.diagnosis.conditions.stuck import Stuck
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
