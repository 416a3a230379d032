"""Reads parts of a saved document: whatever they hold, only what is valid comes back. Pure."""

from __future__ import annotations

from math import isfinite
from typing import Any

_MOST = 2**53  # beyond it a float cannot count by one


def is_number(value: object) -> bool:
    """Whether a value is a number that a float holds exactly."""
    return isinstance(value, (int, float)) and abs(value) <= _MOST and isfinite(value)


def counts(saved: object) -> dict[str, int]:
    """Return the counts by name."""
    pairs = saved.items() if isinstance(saved, dict) else ()
    return {str(name): int(count) for name, count in pairs if is_number(count) and count >= 0}


def lists(saved: object) -> list[list[Any]]:
    """Return the lists of a list."""
    return [entry for entry in saved if isinstance(entry, list)] if isinstance(saved, list) else []


def mappings(saved: object) -> list[dict[str, Any]]:
    """Return the mappings of a list."""
    return [entry for entry in saved if isinstance(entry, dict)] if isinstance(saved, list) else []
