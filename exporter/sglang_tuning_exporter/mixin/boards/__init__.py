"""The Grafana boards: one module each. `files` gives the exact text of every committed board."""

from __future__ import annotations

import json

from sglang_tuning_exporter.mixin.boards import fleet, latency, scheduling, server


def files() -> dict[str, str]:
    """Return every board as text: repository path -> text, the same bytes at every call."""
    made = (fleet.board(), server.board(), scheduling.board(), latency.board())
    return {f"dashboards/{board['uid']}.json": json.dumps(board, indent=2, ensure_ascii=False) + "\n" for board in made}
