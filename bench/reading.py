"""What is read, beside its peers: a log (mtail), the report of one, and a page of metrics (prometheus_client)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bench import corpus, equivalence, processes, server
from bench.table import Table
from sglang_tuning_exporter.sglang import exposition as sglang
from sglang_tuning_exporter.sglang import metrics as facts

PAGE_RANKS, PAGE_RUNS = 24, 7

LARGE = ("mtail", "parse and watch", "parse into events")  # a smaller process's peak is that of its parent
_PLAIN, _BUSY = "plain", "busy server"
_OF_FILE = frozenset({"sources"})  # differs between reports of one log in two wrappings


def reports(directory: Path, size: int) -> Table:
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
        f"The same kinds of log: that of a busy server, {busy.lines:,} lines and {busy.size / 1e6:.0f} MB, and that of"
        f" recordings, {log.lines:,} lines and {log.size / 1e6:.0f} MB without wrapping. `report --format json` says"
        f" what limited the server, when alerts would have fired and what to change; mtail {processes.version('mtail')}"
        " (`--one_shot`) counts. Its program finds nothing in a wrapped line, so the reports of wrapped logs are"
        " beside its reading of the plain one, the least that it would need. CPU seconds, user and system, of all"
        f" processes, and seconds by the clock, the interpreter's start included; best of {processes.RUNS}, in turn."
        " All reports of a log say the same.",
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


def logs(log: corpus.Corpus, directory: Path, title: str, made: str) -> Table:
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
        f"{made}: {log.lines:,} lines, {log.size / 1e6:.0f} MB, {log.starts} starts; read once by each. mtail"
        f" {processes.version('mtail')} runs a program that keeps the same figures. CPU seconds, user and system, best"
        f" of {processes.RUNS}, in turn; ours without the interpreter's start.",
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
        f"mtail found the same: {len(found)} counters equal on this log, {dialects} on the wordings of ten releases and"
        " of every failure."
    )


def pages() -> Table:
    """Read a page of SGLang's `/metrics`."""
    text, reader, best = server.page(PAGE_RANKS), facts.PageReader(), dict[str, float]()
    reads: dict[str, Callable[[], object]] = {
        "prometheus_client": lambda: [len(family.samples) for family in text_string_to_metric_families(text)],
        "scan": lambda: sglang.scan(text),
        "scan and figures": lambda: facts.read(text),
        "the same server's next page": lambda: reader.read(text),
    }
    reader.read(text)
    for name in [*reads] * PAGE_RUNS:
        begin = time.process_time()
        reads[name]()
        best[name] = min(best.get(name, 1e9), time.process_time() - begin)
    samples = len(sglang.scan(text).samples)
    table = Table(
        "Reading a page",
        f"One page of {samples:,} samples, {len(text.encode()) / 1e6:.2f} MB, {PAGE_RANKS} DP ranks. CPU seconds, best"
        f" of {PAGE_RUNS}. A page that is laid out as the one before it is read by place; the last row is all that a"
        " scrape does with it, series to pass on included.",
        ["what", "CPU", "speed", "against prometheus_client"],
    )
    for name, seconds in best.items():
        ratio = f"{best['prometheus_client'] / seconds:.1f}x"
        table.rows.append([name, f"{seconds:.4f} s", f"{samples / seconds:,.0f} samples/s", ratio])
    return table
