"""Memory and CPU of an idle sidecar beside two peers, all at the same time."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from bench import processes, server
from bench.processes import Running
from bench.table import Table, verdict

SECONDS = 75
INTERVAL = 15
WARM_UP = 10  # scrapes before the measurement, so that caches are filled
MOST_MB, MOST_PERCENT = 60.0, 0.2
RANKS = (1, 8)
ACCESS = b'[2026-01-01 00:00:00] INFO:     127.0.0.1:40000 - "GET /metrics HTTP/1.1" 200 OK\n'


def measure(directory: Path) -> Table:
    """Return memory and CPU of idle programs over `SECONDS`, scraped every `INTERVAL`."""
    table = Table(
        "Memory and CPU at rest",
        f"`serve` on a log and on a server's `/metrics`, mtail on the same log, and Debian's exporter of machine metrics, side by side for {SECONDS} s, each "
        f"scraped every {INTERVAL} s after {WARM_UP} scrapes at once; the server logs each scrape, as SGLang does. RSS at the end; CPU is the share of "
        "one core, user and system, of all threads.",
        ["what", "RSS", "against the last", "CPU", "against the last", f"aims: {MOST_MB:.0f} MB, {MOST_PERCENT} %"],
    )
    with ExitStack() as stack:
        logs, running = _start(stack, directory)
        for each in running.values():
            for _ in range(WARM_UP):
                each.get()
        before = {name: each.cpu for name, each in running.items()}
        for _ in range(SECONDS // INTERVAL):
            time.sleep(INTERVAL - 1)
            for each in running.values():
                each.get()
            for log in logs:
                with log.open("ab") as file:
                    file.write(ACCESS)
            time.sleep(1)
        used = {
            name: (each.memory_kib() / 2**10, 100 * (each.cpu - before[name]) / SECONDS)
            for name, each in running.items()
        }
    last = list(used.values())[-1]
    for name, (megabytes, percent) in used.items():
        ours = name.startswith("serve")
        aims = f"{verdict(megabytes, MOST_MB)}, {verdict(percent, MOST_PERCENT)}" if ours else ""
        ratios = [f"{megabytes / last[0]:.1f}x", f"{percent / last[1]:.1f}x" if last[1] else "-"]
        table.rows.append([name, f"{megabytes:.1f} MB", ratios[0], f"{percent:.2f} %", ratios[1], aims])
    table.notes.append(
        f"mtail {processes.version('mtail')}, node exporter {processes.version('prometheus-node-exporter')}. Both are Go programs; "
        "of our memory an interpreter, OpenSSL, FastAPI and Pydantic take 50 MB before a line of ours runs."
    )
    table.notes.append(_start_time())
    return table


def _start(stack: ExitStack, directory: Path) -> tuple[list[Path], dict[str, Running]]:
    logs, running = list[Path](), dict[str, Running]()
    for ranks in RANKS:
        log = directory / f"idle-{ranks}.log"
        logs.append(log)
        url = stack.enter_context(server.running(ranks))
        running[f"serve, {ranks} rank{'s' * (ranks > 1)}"] = stack.enter_context(processes.exporter(url, log))
    peers = {"mtail": processes.mtail(logs[0]), "node exporter": processes.node_exporter()}
    for name, peer in peers.items():
        found = stack.enter_context(peer)
        if found is not None:
            running[name] = found
    return logs, running


def _start_time() -> str:
    """Return how long `--help` takes, beside an interpreter that does nothing."""
    taken: dict[str, list[float]] = {"-m sglang_tuning_exporter --help": [], "-c pass": []}
    for _ in range(7):
        for arguments, seconds in taken.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, *arguments.split()], check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - begin)
    helped, bare = (statistics.median(seconds) for seconds in taken.values())
    return f"`--help` takes {helped:.2f} s, `python -c pass` {bare:.2f} s (median of 7, in turn)."
