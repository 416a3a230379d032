"""Print one table of figures, each beside its peer's in the same run: `python -m bench [megabytes]`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from bench import corpus, equivalence, exposition, measure, mtail

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
    return [
        f"Log: {log.lines:,} lines, {log.size / 1e6:.0f} MB, {log.starts} starts. Best of {measure.RUNS}, in turn.",
        _compared(log.path, directory, used),
    ]


def _compared(log: Path, directory: Path, used: dict[str, measure.Usage]) -> str:
    """Say that all found the same. Raises `equivalence.DifferentError` where they did not."""
    found = equivalence.figures(log)
    for name, usage in used.items():
        if name.startswith("parse"):
            told = json.loads(usage.output)["figures"]
            equivalence.demand({figure: found[figure] for figure in told}, told, f"the timed {name}")
    if "mtail" not in used:
        return mtail.MISSING
    equivalence.demand(found, equivalence.counted_by_mtail(used["mtail"].output), "mtail")
    dialects = equivalence.check_dialects(directory)
    return (
        f"mtail found the same: {len(found)} counters equal on this log, {dialects} on the wordings of ten releases and "
        "of every failure."
    )


def main() -> None:
    """Measure and print."""
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else MEGABYTES
    _row("what", "CPU s", "speed", "against the peer", "peak memory")
    _row("---", "---:", "---:", "---:", "---:")
    with tempfile.TemporaryDirectory() as directory:
        try:
            notes = _log_rows(Path(directory), megabytes)
        except equivalence.DifferentError as error:
            sys.exit(f"the two are not comparable, they found different things:\n{error}")
    samples, size, theirs, ours, figures = exposition.measure()
    for name, seconds in (("prometheus_client", theirs), ("scan", ours), ("scan and figures", figures)):
        _row(f"page: {name}", f"{seconds:.4f}", f"{samples / seconds:,.0f} samples/s", f"{theirs / seconds:.1f}x", "")
    _print()
    for note in [*notes, f"Page: {samples:,} samples, {size / 1e6:.2f} MB, {exposition.RANKS} DP ranks."]:
        _print(note)


if __name__ == "__main__":
    main()
