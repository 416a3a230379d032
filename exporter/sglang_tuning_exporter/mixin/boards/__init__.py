"""The Grafana boards: one YAML file each, a panel is one row of it. `files` gives the exact text of every committed board."""

from __future__ import annotations

import json
from typing import Any

from sglang_tuning_exporter.mixin.boards.board import boards

LONGEST_LINE = 150


def files(loki: str = "") -> dict[str, str]:
    """Return every board as text: repository path -> text, the same bytes at every call. `loki`: where the servers' logs are."""
    return {
        f"dashboards/{board['uid']}.json": _written(board) + "\n"
        for board in boards(("fleet", "server", "latency"), loki)
    }


def _written(node: Any, indent: str = "") -> str:
    """Write JSON with everything on one line that fits on it, so that boards are short and their changes can be read."""
    line = json.dumps(node, ensure_ascii=False)
    if len(indent) + len(line) <= LONGEST_LINE or not isinstance(node, dict | list):
        return line
    deeper = indent + "  "
    if isinstance(node, dict):
        parts, (begin, end) = [f"{json.dumps(key)}: {_written(value, deeper)}" for key, value in node.items()], "{}"
    else:
        parts, (begin, end) = [_written(value, deeper) for value in node], "[]"
    return begin + ",".join(f"\n{deeper}{part}" for part in parts) + f"\n{indent}{end}"
