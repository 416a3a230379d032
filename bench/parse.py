"""The exporter's parse of a log, in a process of its own: `python -m bench.parse events|watch LOG`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.equivalence import KINDS
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.watch import Watch

# Counters of the watch by their names in `bench.equivalence`.
COUNTED = {"starts": "starts", "retractions": "retractions", "retracted requests": "retracted"}


def read(path: Path, *, watched: bool) -> dict[str, Any]:
    """Read a log as the exporter does; return CPU seconds without the interpreter's start, peak memory, and the figures."""
    reader = Reader()
    watch: Watch | None = None
    begin = time.process_time()
    with path.open("rb") as file:
        for line in file:
            events = reader.read(line.rstrip(b"\n"))
            for event in events if watched else ():
                if watch is None:
                    watch = Watch(PROFILES["online"], event.time or 0.0, reads=True, scrapes=False)
                watch.take(event)
    cpu = time.process_time() - begin
    figures: dict[str, float] = {f"lines of {kind}": reader.lines[kind] for kind in KINDS}
    if watch is not None:
        figures |= {name: watch.server.counted[counter] for name, counter in COUNTED.items()}
    return {"cpu": cpu, "peak": _peak(), "figures": figures}


def _peak() -> int:
    """Return the peak memory of this program in bytes; the figure of wait4 includes the process that it was forked from."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    print(json.dumps(read(Path(sys.argv[2]), watched=sys.argv[1] == "watch")))
