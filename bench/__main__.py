"""Print one table of figures, each beside its peer's in the same run: `python -m bench [megabytes]`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from bench import corpus, exposition, measure, mtail

if TYPE_CHECKING:
    from collections.abc import Sequence

MEGABYTES = 60
LARGE = ("mtail", "parse into state", "parse into events")  # a smaller process's peak is that of its parent


def _print(text: str = "") -> None:
    sys.stdout.write(text + "\n")


def _row(*cells: str) -> None:
    _print("| " + " | ".join(cells) + " |")


def _log_rows(directory: Path, megabytes: int) -> list[str]:
    log = corpus.write(directory / "server.log", megabytes * 1_000_000)
    commands: dict[str, Sequence[str]] = {}
    peer = mtail.command(log.path)
    if peer is not None:
        commands["mtail"] = peer
    parse = [sys.executable, "-m", "bench.parse"]
    commands |= {
        "parse into state": [*parse, "state", str(log.path)],
        "parse into events": [*parse, "lines", str(log.path)],
        "`grep -c`": ["grep", "-c", "Decode batch", str(log.path)],
        "`gzip -1`": ["gzip", "-1", "-c", str(log.path)],
    }
    used = measure.best_of(commands)
    base = used["mtail"].cpu if "mtail" in used else None
    for name, usage in used.items():
        told = json.loads(usage.output) if name.startswith("parse") else {}
        cpu, peak = told.get("cpu", usage.cpu), told.get("peak", usage.peak)
        ratio = "" if base is None else f"{base / cpu:.1f}x" if cpu else "-"
        speed = f"{log.lines / max(cpu, 0.001):,.0f}"
        _row(f"log: {name}", f"{cpu:.2f}", f"{speed} lines/s", ratio, f"{peak / 2**20:.0f} MB" if name in LARGE else "")
    notes = [
        f"Log: {log.lines:,} lines, {log.size / 1e6:.0f} MB, {log.starts} starts. Best of {measure.RUNS}, in turn."
    ]
    return notes if base is not None else [*notes, mtail.MISSING]


def main() -> None:
    """Measure and print."""
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else MEGABYTES
    _row("what", "CPU s", "speed", "against the peer", "peak memory")
    _row("---", "---:", "---:", "---:", "---:")
    with tempfile.TemporaryDirectory() as directory:
        notes = _log_rows(Path(directory), megabytes)
    samples, size, theirs, ours, figures = exposition.measure()
    for name, seconds in (("prometheus_client", theirs), ("scan", ours), ("scan and figures", figures)):
        _row(f"page: {name}", f"{seconds:.4f}", f"{samples / seconds:,.0f} samples/s", f"{theirs / seconds:.1f}x", "")
    _print()
    for note in [*notes, f"Page: {samples:,} samples, {size / 1e6:.2f} MB, {exposition.RANKS} ranks."]:
        _print(note)


if __name__ == "__main__":
    main()
