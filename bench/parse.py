"""The exporter's parse of a log, in a process of its own: `python -m bench.parse lines|state|core LOG`."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.equivalence import KINDS
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.state.cadence import DECODE_LOG_INTERVAL
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

BLOCK = 256 << 10


def read(path: Path, *, into_state: bool) -> dict[str, Any]:
    """Read a log as the exporter does; return CPU seconds without the interpreter's start, peak memory, and the figures."""
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
    cpu = time.process_time() - begin
    return {"cpu": cpu, "peak": _peak(), "figures": _figures(reader, state)}


def read_by_core(path: Path) -> dict[str, Any]:
    """Read a log line by line with the core's reader; return what `read` does."""
    reader = Reader()
    begin = time.process_time()
    with path.open("rb") as file:
        for line in file:
            reader.read(line.rstrip(b"\n"))
    cpu = time.process_time() - begin
    figures = {f"lines of {kind}": reader.lines[kind] for kind in ("decode", "prefill", "retraction", "access")}
    return {"cpu": cpu, "peak": _peak(), "figures": figures}


def _figures(reader: LogReader, state: ServerState | None) -> dict[str, float]:
    """Return the figures with the names of `bench.equivalence`."""
    found: dict[str, float] = {f"lines of {kind}": reader.counts[kind] for kind in KINDS}
    if state is not None:
        # Of all schedulers: the corpus has servers with DP ranks and without.
        counts = Counter[str]()
        for rank in state.ranks.values():
            counts.update(rank.totals.counts)
        found |= {
            "starts": state.starts,
            "computed prompt tokens": counts["computed_tokens"],
            "cached prompt tokens": counts["cached_tokens"],
            "decode batches, graph True": counts["replayed"] / DECODE_LOG_INTERVAL,  # a line stands for so many batches
            "decode batches, graph False": counts["eager"] / DECODE_LOG_INTERVAL,
            "retractions": counts["retraction_events"],
            "retracted requests": counts["log_retracted_requests"],
        }
        found |= {f"liveness {what}": count for what, count in state.liveness.items()}
        found |= {f"out of memory, {phase}": count for phase, count in state.out_of_memory.items()}
    return found


def _peak() -> int:
    """Return the peak memory of this program in bytes; the figure of wait4 includes the process that it was forked from."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    what, log = sys.argv[1], Path(sys.argv[2])
    print(json.dumps(read_by_core(log) if what == "core" else read(log, into_state=what == "state")))
