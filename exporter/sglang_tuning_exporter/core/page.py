"""The report as one HTML file."""

from __future__ import annotations

from sglang_tuning_exporter.core.against import Comparison
from sglang_tuning_exporter.core.findings import Judged
from sglang_tuning_exporter.state.profiles import Profile


def page(judged: Judged, profile: Profile, against: Comparison | None = None) -> str:  # noqa: ARG001
    """Return the page."""
    return f"<!doctype html><title>{judged.judgement.verdict}</title>"
