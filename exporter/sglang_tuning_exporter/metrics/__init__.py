"""State into Prometheus families: a custom collector that makes fresh families for every scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.registry import Collector, CollectorRegistry

from sglang_tuning_exporter.metrics.families import text
from sglang_tuning_exporter.metrics.findings import findings
from sglang_tuning_exporter.metrics.schedulers import schedulers
from sglang_tuning_exporter.metrics.server import failures, memory, server, thresholds
from sglang_tuning_exporter.metrics.sources import agreement, sources

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from sglang_tuning_exporter.watcher import Watcher


class WatcherCollector(Collector):
    """Everything `sglang_tuning_*`: names, labels and meanings are the contract with the rules and dashboards."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def collect(self) -> Iterator[Metric]:
        """All families at one moment. A thing that this server cannot tell is absent."""
        watcher = self._watcher
        with watcher.view() as now:
            families = [
                *sources(watcher),
                *server(watcher, now),
                *memory(watcher),
                *schedulers(watcher, now),
                *failures(watcher, now),
                *findings(watcher, now),
                *thresholds(watcher),
                *agreement(watcher, now),
            ]
        return (family for family in families if family.samples)


def page(families: CollectorRegistry) -> str:
    """Write everything that a registry of ours collects now as Prometheus's text format 0.0.4."""
    return text(families.collect())


def registry(watcher: Watcher) -> CollectorRegistry:
    """Make a registry of its own with nothing but our families (no process or platform metrics)."""
    own = CollectorRegistry(auto_describe=False)
    own.register(WatcherCollector(watcher))
    return own
