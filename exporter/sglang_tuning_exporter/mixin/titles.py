"""Titles of notifications, short enough for a lock screen: what is wrong, with its figure. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_tuning_exporter.diagnosis.row import URGENCY
from sglang_tuning_exporter.diagnosis.table import ALERTS
from sglang_tuning_exporter.mixin.boards.words import headline

if TYPE_CHECKING:
    from sglang_tuning_exporter.diagnosis.row import Diagnosis


@dataclass(frozen=True, slots=True)
class Title:
    """The words of a title around the figure that the alert's description begins with; `unit` is empty where there is none."""

    words: str
    unit: str = ""


_TITLES: dict[str, Title] = {
    "scheduler_stuck": Title("stuck: requests wait, nothing moves"),
    "server_down": Title("server down"),
    "crashed": Title("crashed"),
    "restart_loop": Title("restarts again and again,", "times in 30 min"),
    "retracting_too_often": Title("retracting", "/min"),
    "conservativeness_ineffective": Title("retracting", "/min"),
    "requests_rejected": Title("requests lost,", "/min"),
    "out_of_memory_prefill": Title("out of GPU memory in prefill"),
    "out_of_memory_decode": Title("out of GPU memory in decode"),
    "out_of_memory_any": Title("out of GPU memory"),
    "graph_memory_short": Title("CUDA graphs leave no GPU memory"),
    "running_at_limit": Title("running limit reached", "of the time"),
    "admission_too_conservative": Title("requests wait beside free KV cache", "of the time"),
    "dp_imbalanced": Title("DP ranks imbalanced"),
    "time_to_first_token_burning_fast": Title("TTFT too long for", "of requests (1 h)"),
    "time_to_first_token_burning_slow": Title("TTFT too long for", "of requests (6 h)"),
    "inter_token_latency_burning_fast": Title("ITL too long for", "of tokens (1 h)"),
    "inter_token_latency_burning_slow": Title("ITL too long for", "of tokens (6 h)"),
}


def title(row: Diagnosis) -> Title:
    """Return the words of a row's title; a share of serving time says so."""
    if row.id in _TITLES:
        return _TITLES[row.id]
    words = headline(row.id)
    words = words if words[:2].isupper() else words[:1].lower() + words[1:]
    return Title(words, row.condition.figure_of)


def most_severe_first() -> list[Diagnosis]:
    """Return the rows with an alert, the most severe first and causes before consequences."""
    return sorted(ALERTS, key=lambda row: -URGENCY[row.severity])
