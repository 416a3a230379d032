"""The server's state as Prometheus families, made anew for every scrape."""

from __future__ import annotations

from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.config import resolve
from sglang_tuning_exporter.serve.metrics.capacity import capacity
from sglang_tuning_exporter.serve.metrics.families import Family
from sglang_tuning_exporter.serve.metrics.findings import findings
from sglang_tuning_exporter.serve.metrics.ranks import schedulers
from sglang_tuning_exporter.serve.metrics.server import failures, memory, server, thresholds
from sglang_tuning_exporter.serve.metrics.sources import sources
from sglang_tuning_exporter.serve.metrics.view import SidecarView


def sections(sidecar: SidecarView, now: float) -> dict[str, list[Family]]:
    """Return every family by its heading in the reference, those without samples included."""
    return {
        "Data sources": [*sources(sidecar, now)],
        "Server": [*server(sidecar, now)],
        "GPU memory": [*memory(sidecar)],
        "Scheduler": [*schedulers(sidecar, now)],
        "Capacity": [*capacity(sidecar, now)],
        "Failures": [*failures(sidecar, now)],
        "Findings": [*findings(sidecar, now)],
        "Profile": [*thresholds(sidecar)],
    }


def collect(sidecar: SidecarView) -> list[Family]:
    """Return all `sglang_tuning_*` families with samples, at one moment. Names, labels and meanings are the contract with rules and boards.

    While older lines of the log are read, its counters are left out: Prometheus would count their increase as present events.
    """
    with sidecar.view() as now:
        families = [family for section in sections(sidecar, now).values() for family in section if family.samples]
        if sidecar.log is not None and sidecar.log.is_catching_up:
            families = [each for each in families if each.type != "counter" or each.source == "metrics"]
    return families


def reference_sections() -> dict[str, list[Family]]:
    """Return every family by its heading, of an exporter that was never started: names, labels and help, without samples of a server."""
    config = resolve({"sglang_url": "http://localhost:30000", "log_file": ["server.log"]}, {})
    sidecar = Sidecar(config)
    with sidecar.view() as now:
        return sections(sidecar, now)
