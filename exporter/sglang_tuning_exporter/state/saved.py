"""Reads parts of a saved document: whatever they hold, only what is valid comes back. Pure."""

from __future__ import annotations

from typing import Any

from sglang_tuning_exporter.sglang.event_json import is_figure


def counts(saved: object) -> dict[str, int]:
    """Return the counts by name."""
    pairs = saved.items() if isinstance(saved, dict) else ()
    return {str(name): int(count) for name, count in pairs if is_figure(count) and count >= 0}


def lists(saved: object) -> list[list[Any]]:
    """Return the lists of a list."""
    return [entry for entry in saved if isinstance(entry, list)] if isinstance(saved, list) else []


def mappings(saved: object) -> list[dict[str, Any]]:
    """Return the mappings of a list."""
    return [entry for entry in saved if isinstance(entry, dict)] if isinstance(saved, list) else []
