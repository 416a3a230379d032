"""The server's state as Prometheus families: a custom collector that makes new families for every scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.registry import Collector, CollectorRegistry

from sglang_tuning_exporter.serve.metrics.capacity import capacity
from sglang_tuning_exporter.serve.metrics.diagnoses import findings
from sglang_tuning_exporter.serve.metrics.families import METRICS, text
from sglang_tuning_exporter.serve.metrics.ranks import schedulers
from sglang_tuning_exporter.serve.metrics.server import failures, memory, server, thresholds
from sglang_tuning_exporter.serve.metrics.sources import agreement, sources

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sglang_tuning_exporter.serve.metrics.families import Family
    from sglang_tuning_exporter.serve.metrics.view import SidecarView


def sections(sidecar: SidecarView, now: float) -> dict[str, list[Family]]:
    """Return every family by its heading in the reference, those without samples included."""
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
    """Collects all `sglang_tuning_*` families. Names, labels and meanings are the contract with rules and boards.

    While older lines of the log are read, its counters are left out: Prometheus would count their increase as present events.
    """

    def __init__(self, sidecar: SidecarView) -> None:
        self._sidecar = sidecar

    def collect(self) -> Iterator[Family]:
        """Return all families at one moment; unknown figures are absent."""
        sidecar = self._sidecar
        with sidecar.view() as now:
            families = [family for section in sections(sidecar, now).values() for family in section]
            if sidecar.log is not None and sidecar.log.is_catching_up:
                families = [each for each in families if each.type != "counter" or each.source == METRICS]
        return (family for family in families if family.samples)


class FamilyCollector(Collector):
    """Collects the one family that a function returns at each scrape."""

    def __init__(self, family: Callable[[], Family]) -> None:
        self._family = family

    def collect(self) -> list[Family]:
        """Return the family."""
        return [self._family()]


def page(families: CollectorRegistry) -> str:
    """Return what a registry of ours collects now in Prometheus's text format 0.0.4."""
    return text(families.collect())


def registry(sidecar: SidecarView) -> CollectorRegistry:
    """Return a registry with our families alone (no process or platform metrics)."""
    own = CollectorRegistry(auto_describe=False)
    own.register(SidecarCollector(sidecar))
    return own
