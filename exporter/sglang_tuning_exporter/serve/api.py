"""`/api/v1/findings`: what limits the server now, as JSON in the report's schema (docs/report.schema.json)."""

from __future__ import annotations

import json

from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.core.arguments import shown
from sglang_tuning_exporter.core.report import document


def render(sidecar: Sidecar, *, whole: bool = False) -> bytes:
    """Return the document as JSON; every key is there, `null` where a value is not known. `whole`: with arguments that no row reads."""
    with sidecar.view() as now:
        judged = sidecar.judged(now)
    found = document(judged)
    found["server"]["args"] = shown(found["server"]["args"], whole=whole)
    return (json.dumps(found, indent=2, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")
