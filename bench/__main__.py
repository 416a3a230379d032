"""Print tables of figures, each beside its peer's in the same run: `python -m bench [PART …] [--megabytes N] [--write]`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench import chain, corpus, equivalence, exposition, idle, latency, processes, report
from bench.table import BRIEF, Table, markdown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MEGABYTES = 60
LARGE = ("mtail", "parse and watch", "parse into events")  # a smaller process's peak is that of its parent
DOCUMENT = Path(__file__).parent.parent / "docs" / "benchmarks.md"
_ABOUT = """# Benchmarks

Made by `make bench`: every figure beside a peer's in the same run. Ratios travel from machine to machine, seconds do not.
`python -m bench PART` prints a part and how it is measured.
"""


def _log(log: corpus.Corpus, directory: Path, title: str, made: str) -> Table:
    commands: dict[str, Sequence[str]] = {}
    peer = processes.mtail_command(log.path)
    if peer is not None:
        commands["mtail"] = peer
    parse = [sys.executable, "-m", "bench.equivalence"]
    commands |= {
        "parse and watch": [*parse, "watch", str(log.path)],
        "parse into events": [*parse, "events", str(log.path)],
        "`grep -c`": ["grep", "-c", "Decode batch", str(log.path)],
        "`gzip -1`": ["gzip", "-1", "-c", str(log.path)],
    }
    used = processes.best_of(commands)
    base = used["mtail"].cpu if "mtail" in used else None
    table = Table(
        title,
        f"{made}: {log.lines:,} lines, {log.size / 1e6:.0f} MB, {log.starts} starts; read once by each. mtail "
        f"{processes.version('mtail')} runs a program that keeps the same figures. CPU seconds, user and system, best of {processes.RUNS}, in turn; "
        "ours without the interpreter's start.",
        ["what", "CPU", "speed", "against mtail", "peak memory"],
    )
    for name, usage in used.items():
        found = json.loads(usage.output) if name.startswith("parse") else {}
        cpu, peak = found.get("cpu", usage.cpu), found.get("peak", usage.peak)
        ratio = "" if base is None else f"{base / cpu:.1f}x" if cpu else "-"
        memory = f"{peak / 2**20:.0f} MB" if name in LARGE else ""
        table.rows.append([name, f"{cpu:.2f} s", f"{log.lines / max(cpu, 0.001):,.0f} lines/s", ratio, memory])
    table.notes.append(_compared(log.path, directory, used))
    return table


def _compared(log: Path, directory: Path, used: dict[str, processes.Usage]) -> str:
    """Return in words that all programs found the same. Raises `equivalence.DifferentError` where they did not."""
    found = equivalence.figures(log)
    for name, usage in used.items():
        if name.startswith("parse"):
            timed = json.loads(usage.output)["figures"]
            equivalence.demand({figure: found[figure] for figure in timed}, timed, f"the timed {name}")
    if "mtail" not in used:
        return processes.NO_MTAIL
    equivalence.demand(found, equivalence.counted_by_mtail(used["mtail"].output), "mtail")
    dialects = equivalence.check_dialects(directory)
    return (
        f"mtail found the same: {len(found)} counters equal on this log, {dialects} on the wordings of ten releases and "
        "of every failure."
    )


def _page() -> Table:
    samples, size, theirs, ours, figures, again = exposition.measure()
    table = Table(
        "Reading a page",
        f"One page of {samples:,} samples, {size / 1e6:.2f} MB, {exposition.RANKS} DP ranks. CPU seconds, best of {exposition.RUNS}. "
        "A page that is laid out as the one before it is read by place; the last row is all that a scrape does with it, series to pass on included.",
        ["what", "CPU", "speed", "against prometheus_client"],
    )
    rows = (
        ("prometheus_client", theirs),
        ("scan", ours),
        ("scan and figures", figures),
        ("the same server's next page", again),
    )
    for name, seconds in rows:
        table.rows.append([name, f"{seconds:.4f} s", f"{samples / seconds:,.0f} samples/s", f"{theirs / seconds:.1f}x"])
    return table


def _machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, Python {platform.python_version()}."


def main() -> None:
    """Measure, print, and with `--write` write `docs/benchmarks.md`."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="log, busy, report, page, idle, scrapes, lines, chain (default: all)"
    )
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help=f"how long the log is (default {MEGABYTES})")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md, of all parts")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory, size = Path(name), given.megabytes * 1_000_000
        parts: dict[str, Callable[[], Table]] = {
            "idle": lambda: idle.measure(directory),
            "scrapes": lambda: latency.scrapes(directory),
            "lines": lambda: latency.lines(directory),
            "chain": lambda: chain.measure(directory),
            "log": lambda: _log(
                corpus.write(directory / "server.log", size), directory, "Reading a log", "A log made of recordings"
            ),
            "busy": lambda: _log(
                corpus.write_busy(directory / "busy.log", size),
                directory,
                "Reading the log of a busy server",
                "A start, and tens of requests a second",
            ),
            "report": lambda: report.measure_all(directory, size),
            "page": _page,
        }
        wanted = given.parts or list(parts)
        if unknown := [part for part in wanted if part not in parts]:
            parser.error(f"{unknown[0]}: give one of {', '.join(parts)}")
        tables: list[Table] = []
        for part in wanted:
            begin = time.monotonic()
            sys.stderr.write(f"{part} …")
            sys.stderr.flush()
            try:
                tables.append(parts[part]())
            except equivalence.DifferentError as error:
                sys.exit(f"the two are not comparable, they found different things:\n{error}")
            sys.stderr.write(f" {time.monotonic() - begin:.0f} s\n")
    sys.stdout.write("\n".join(table.text() for table in tables))
    if given.write and not given.parts:
        rows = [row for table in tables for row in table.brief()]
        DOCUMENT.write_text(
            "\n".join([_ABOUT, _machine() + "\n", markdown(BRIEF, rows, figures=True), ""]), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
