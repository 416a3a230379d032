"""Check that mtail's program and the exporter's parse find the same in a log: only then are their times compared.

`python -m bench.equivalence events|watch LOG` is that parse in a process of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import processes
from bench.processes import Running
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.events import Event
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Mapping

_TESTS = Path(__file__).parent.parent / "tests" / "data" / "logs"
_FAILURES = Path(__file__).parent / "failures.log"
KINDS = ("decode", "prefill", "retraction", "access")  # whose lines are compared; of other lines the events are
LIVENESS = {"ready": "ready", "draining": "draining", "hang": "watchdog_timeout", "health": "health_check_failed"}
_GRAPHS = {1.0: True, 0.0: False}
# Our names of mtail's metrics that are summed over their labels.
_SUMS = {
    "admitted_requests_total": "admitted requests",
    "computed_tokens_total": "computed prompt tokens",
    "cached_tokens_total": "cached prompt tokens",
    "retraction_events_total": "retractions",
    "retracted_requests_total": "retracted requests",
    "server_starts_total": "starts",
}
_BY_LABEL = {"log_lines_total": "lines of", "liveness_total": "liveness", "out_of_memory_total": "out of memory,"}


class DifferentError(Exception):
    """Two programs found different figures in the same log."""


def figures(path: Path) -> Counter[str]:
    """Return what our reader finds in a log."""
    reader, found = Reader(), Counter[str]()
    failed: set[object] = set()
    with path.open("rb") as file:
        for line in file:
            for event in reader.read(line.rstrip(b"\n")):
                failure = (event.time, event.rank, event.word) if event.kind == "out_of_memory" else None
                if failure not in failed:  # a failure is logged, and raised after that
                    count(event, found)
                failed.update({failure} - {None})
    found.update({f"lines of {kind}": reader.lines[kind] for kind in KINDS})
    return found


def count(event: Event, found: Counter[str]) -> None:
    """Count an event."""
    figures = event.figures
    match event.kind:
        case "decode":
            found[f"decode batches, graph {_GRAPHS.get(figures.get('graph', -1.0))}"] += 1
        case "prefill":
            found["admitted requests"] += int(figures.get("sequences", 0))
            found["computed prompt tokens"] += int(figures.get("tokens", 0))
            found["cached prompt tokens"] += int(figures.get("cached", 0))
        case "retraction":
            found["retractions"] += 1
            found["retracted requests"] += int(figures["requests"])
        case "arguments":
            found["starts"] += 1
        case "out_of_memory":
            found[f"out of memory, {event.word}"] += 1
        case "end":
            found[f"liveness {event.word}"] += 1
        case kind if kind in LIVENESS:
            found[f"liveness {LIVENESS[kind]}"] += 1


def counted_by_mtail(output: bytes) -> Counter[str]:
    """Return the same figures from mtail's output."""
    found = Counter[str]()
    for name, metrics in json.loads(output).items():
        for each in (value for metric in metrics for value in metric.get("LabelValues") or ()):
            labels, count = each.get("Labels", []), each["Value"]["Value"]
            if name in _SUMS:
                found[_SUMS[name]] += count
            elif name == "decode_batches_total":
                found[f"decode batches, graph {labels[-1] or None}"] += count
            elif name in _BY_LABEL and (name != "log_lines_total" or labels[0] in KINDS):
                found[f"{_BY_LABEL[name]} {labels[0]}"] += count
    return found


def demand(ours: Mapping[str, int], theirs: Mapping[str, int], where: str) -> None:
    """Compare the counts. Raises `DifferentError` where they differ."""
    differences = [
        f"{name}: {ours.get(name, 0):,} by our parse, {theirs.get(name, 0):,} by {where}"
        for name in sorted({*ours, *theirs})
        if ours.get(name, 0) != theirs.get(name, 0)
    ]
    if differences:
        raise DifferentError("\n".join(differences))


def check_dialects(directory: Path) -> int:
    """Read the lines of all releases and failures with both; return how many figures were equal.

    Raises `DifferentError`.
    """
    log = directory / "dialects.log"
    log.write_bytes(b"".join(path.read_bytes() for path in (*sorted(_TESTS.glob("*.log")), _FAILURES)))
    command = processes.mtail_command(log)
    if command is None:
        return 0
    ours = figures(log)
    demand(ours, counted_by_mtail(processes.run(command).output), "mtail")
    return len(ours)


# Counters of the watch by their names here.
COUNTED = {
    "starts": "server_starts",
    "retractions": "retraction_events",
    "retracted requests": "retracted_requests",
}


def read(path: Path, *, watched: bool) -> dict[str, Any]:
    """Read a log as the exporter does; return CPU seconds without the interpreter's start, peak memory, and the
    figures.
    """
    reader = Reader()
    watch: Watch | None = None
    begin = time.process_time()
    with path.open("rb") as file:
        for line in file:
            events = reader.read(line.rstrip(b"\n"))
            for event in events if watched else ():
                if watch is None:
                    watch = Watch(PROFILES["online"], event.time or 0.0, reads=True, scrapes=False)
                watch.take_line(event)
    cpu = time.process_time() - begin
    figures: dict[str, float] = {f"lines of {kind}": reader.lines[kind] for kind in KINDS}
    if watch is not None:
        figures |= {name: watch.server.counted[counter] for name, counter in COUNTED.items()}
    return {"cpu": cpu, "peak": 1024 * Running(os.getpid(), "").memory_kib("VmHWM"), "figures": figures}


if __name__ == "__main__":
    print(json.dumps(read(Path(sys.argv[2]), watched=sys.argv[1] == "watch")))
