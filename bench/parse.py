"""Our own reading of a log, in a process of its own: `python -m bench.parse lines|state LOG`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from sglang_tuning_exporter.guide.profiles import PROFILES
from sglang_tuning_exporter.sglang.lines import LogReader
from sglang_tuning_exporter.state import ServerState

BLOCK = 256 << 10


def read(path: Path, *, into_state: bool) -> dict[str, float]:
    """Read a log as the exporter does; CPU seconds without the interpreter's start, and lines."""
    reader = LogReader()
    state: ServerState | None = None
    begin = time.process_time()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            block += file.readline()
            if not into_state:
                reader.feed_runs(block)
                continue
            events = reader.feed_runs(block)
            if state is None and events:
                state = ServerState(PROFILES["online"], events[0].time or 0.0)
            if state is not None:
                state.observe_all(events)
    return {"cpu": time.process_time() - begin, "lines": sum(reader.counts.values()), "peak": _peak()}


def _peak() -> int:
    """Most memory held since this program began, bytes; what wait4 tells also counts the process it was forked from."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    print(json.dumps(read(Path(sys.argv[2]), into_state=sys.argv[1] == "state")))
