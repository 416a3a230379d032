"""The labels that identify a server: in rules, template queries, Alertmanager's grouping and inhibition, and boards."""

from __future__ import annotations

# A pool: servers that are scraped as one job of one namespace of one cluster.
POOL = ("cluster", "namespace", "job")
# A target of Prometheus, which is one exporter. `up` has these, and no more.
TARGET = ("cluster", "namespace", "pod", "job", "instance")
# A server: the exporter's own label is that of several behind one exporter, and absent with one.
SERVER = (*TARGET, "server")


def listed(labels: tuple[str, ...]) -> str:
    """Return labels as PromQL and Alertmanager's configuration list them."""
    return ", ".join(labels)
