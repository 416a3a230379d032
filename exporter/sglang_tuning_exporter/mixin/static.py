"""Configuration files that need no computing: Prometheus's own, and Grafana's provisioning.

They are in `static/`, so that an installed exporter can write all of `alerts/` and `dashboards/` without a checkout.
"""

from __future__ import annotations

from importlib.resources import files as packaged


def files() -> dict[str, str]:
    """Return every such file: repository path → text."""
    found: dict[str, str] = {}
    folders = [("", packaged("sglang_tuning_exporter.mixin") / "static")]
    while folders:
        prefix, folder = folders.pop()
        for entry in folder.iterdir():
            if entry.is_dir():
                folders.append((f"{prefix}{entry.name}/", entry))
            else:
                found[prefix + entry.name] = entry.read_text(encoding="utf-8")
    return dict(sorted(found.items()))
