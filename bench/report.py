"""`report` on a log beside mtail's single pass over it: plain, as Docker's JSON, and as a Kubernetes node keeps it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from bench import corpus, equivalence, processes
from bench.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_PLAIN, _BUSY = "plain", "busy server"
_OF_FILE = frozenset({"sources"})  # differs between reports of one log in two wrappings


def measure_all(directory: Path, size: int) -> Table:
    """Measure the report of each form. Raises `equivalence.DifferentError`."""
    log, busy = corpus.write(directory / "report.log", size), corpus.write_busy(directory / "busy.log", 4 * size)
    forms = {_BUSY: busy.path, _PLAIN: log.path}
    for name, wrap in corpus.WRAPPINGS.items():
        forms[name] = corpus.wrapped(log.path, directory / f"report.{name.split()[0]}", wrap)
    commands: dict[str, Sequence[str]] = {}
    peers: dict[str, str] = {}
    for name, path in forms.items():
        peer = processes.mtail_command(path)
        if peer is not None and name in {_PLAIN, _BUSY}:
            commands[f"mtail, {name}"] = peer
        report = f"report, {name}"
        commands[report] = _command(path)
        peers[report] = f"mtail, {_BUSY if name == _BUSY else _PLAIN}"
    used = processes.best_of(commands)
    for is_busy in (False, True):
        _demand_one_report({name: used[name].output for name in peers if (_BUSY in name) == is_busy})
    table = Table(
        "The report of a log",
        f"The same kinds of log: that of a busy server, {busy.lines:,} lines and {busy.size / 1e6:.0f} MB, and that of recordings, "
        f"{log.lines:,} lines and {log.size / 1e6:.0f} MB without wrapping. `report --format json` says what "
        "limited the server, when alerts would have fired and what to change; "
        f"mtail {processes.version('mtail')} (`--one_shot`) counts. Its program finds nothing in a wrapped line, so the reports of "
        "wrapped logs are beside its reading of the plain one, the least that it would need. "
        "CPU seconds, user and system, of all processes, and seconds by the clock, the interpreter's start included; "
        f"best of {processes.RUNS}, in turn. All reports of a log say the same.",
        ["what", "CPU", "wall", "CPU against mtail", "wall against mtail"],
    )
    for name, usage in used.items():
        base = used.get(peers.get(name, name))
        ratios = ["", ""] if base is None else [f"{base.cpu / usage.cpu:.1f}x", f"{base.wall / usage.wall:.1f}x"]
        table.rows.append([name, f"{usage.cpu:.2f} s", f"{usage.wall:.2f} s", *ratios])
    if not any(name.startswith("mtail") for name in used):
        table.notes.append(processes.NO_MTAIL)
    return table


def _command(path: Path) -> Sequence[str]:
    module = "sglang_tuning_exporter"
    return [sys.executable, "-m", module, "report", "--format", "json", str(path)]


def _demand_one_report(outputs: dict[str, bytes]) -> None:
    """Compare all reports. Raises `equivalence.DifferentError`."""
    reports = {name: json.loads(output) for name, output in outputs.items()}
    (first, base), *others = reports.items()
    for name, found in others:
        if different := [key for key in base if key not in _OF_FILE and base[key] != found.get(key)]:
            raise equivalence.DifferentError(f"{', '.join(different)}: {name} says something else than {first}")
