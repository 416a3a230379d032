"""State into Prometheus families: a custom collector that makes fresh families for every scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.registry import Collector, CollectorRegistry

from sglang_tuning_exporter.serve.metrics.capacity import capacity
from sglang_tuning_exporter.serve.metrics.diagnoses import findings
from sglang_tuning_exporter.serve.metrics.families import PREFIX, text
from sglang_tuning_exporter.serve.metrics.ranks import schedulers
from sglang_tuning_exporter.serve.metrics.server import failures, memory, server, thresholds
from sglang_tuning_exporter.serve.metrics.sources import agreement, sources

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from sglang_tuning_exporter.serve.metrics.view import SidecarView


# Counters that no line of the log moves.
OF_METRICS = frozenset(
    PREFIX + name
    for name in (
        "aborted_requests",
        "capped",
        "finished_requests",
        "latency_breaches",
        "latency_observations",
        "loads_failures",
        "started_requests",
    )
)


def sections(sidecar: SidecarView, now: float) -> dict[str, list[Metric]]:
    """Make every family by the heading that it has in the reference, those without samples included."""
    return {
        "Data sources": [*sources(sidecar), *agreement(sidecar, now)],
        "Server": [*server(sidecar, now)],
        "GPU memory": [*memory(sidecar)],
        "Scheduler": [*schedulers(sidecar, now)],
        "Capacity": [*capacity(sidecar, now)],
        "Failures": [*failures(sidecar, now)],
        "Findings": [*findings(sidecar, now)],
        "Profile": [*thresholds(sidecar)],
    }


class SidecarCollector(Collector):
    """Everything `sglang_tuning_*`: names, labels and meanings are the contract with the rules and dashboards.

    While the log's past is being read its counters are left out: Prometheus would take their way up for events of now.
    """

    def __init__(self, sidecar: SidecarView) -> None:
        self._sidecar = sidecar

    def collect(self) -> Iterator[Metric]:
        """All families at one moment. A thing that this server cannot tell is absent."""
        sidecar = self._sidecar
        with sidecar.view() as now:
            families = [family for section in sections(sidecar, now).values() for family in section]
            if sidecar.log is not None and sidecar.log.reads_the_past:
                families = [each for each in families if each.type != "counter" or each.name in OF_METRICS]
        return (family for family in families if family.samples)


def page(families: CollectorRegistry) -> str:
    """Write everything that a registry of ours collects now as Prometheus's text format 0.0.4."""
    return text(families.collect())


def registry(sidecar: SidecarView) -> CollectorRegistry:
    """Make a registry of its own with nothing but our families (no process or platform metrics)."""
    own = CollectorRegistry(auto_describe=False)
    own.register(SidecarCollector(sidecar))
    return own
