"""The programs that are compared while they run: started on a free port and scraped, with the memory and CPU they use."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bench.mtail import PROGRAM
from sglang_tuning_exporter.recordings.stack import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_TICKS = os.sysconf("SC_CLK_TCK")
_LISTENING = re.compile(r"listening on (http://[^,]+),")


@dataclass(frozen=True)
class Running:
    """A process and the address of its page."""

    pid: int
    url: str

    @property
    def rss(self) -> int:
        """Its present memory in bytes."""
        found = re.search(
            r"^VmRSS:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text(encoding="ascii"), re.MULTILINE
        )
        return int(found[1]) * 1024 if found else 0

    @property
    def cpu(self) -> float:
        """CPU seconds (user and system) of all its threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS


def page(url: str) -> bytes:
    """Scrape `/metrics` once on a new connection, as cheaply as Python can."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read()
    finally:
        connection.close()


@contextmanager
def exporter(sglang_url: str | None, log: Path) -> Iterator[Running]:
    """Run `serve` with its defaults."""
    log.touch()
    command = [sys.executable, "-m", "sglang_tuning_exporter", "serve", "--listen-address", "127.0.0.1:0"]
    command += ["--log-file", str(log), *(["--sglang-url", sglang_url] if sglang_url else [])]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        listening = next(found for line in process.stderr if (found := _LISTENING.search(line)))
        yield Running(process.pid, listening[1])
    finally:
        _end(process)
        process.stderr.close()


@contextmanager
def mtail(log: Path) -> Iterator[Running | None]:
    """Run mtail with our program and its defaults; None where it is not installed."""
    log.touch()
    port = free_port()
    with _peer(
        "mtail", "--address", "127.0.0.1", "--port", str(port), "--progs", str(PROGRAM), "--logs", str(log)
    ) as pid:
        yield _ready(pid, port)


@contextmanager
def node_exporter() -> Iterator[Running | None]:
    """Run the exporter of machine metrics with its defaults; None where it is not installed."""
    port = free_port()
    with _peer("prometheus-node-exporter", f"--web.listen-address=127.0.0.1:{port}") as pid:
        yield _ready(pid, port)


def version(program: str) -> str:
    """Return the installed version of a program's Debian package."""
    asked = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Version}", program], capture_output=True, text=True, check=False
    )
    return asked.stdout or "unknown version"


@contextmanager
def _peer(name: str, *arguments: str) -> Iterator[int | None]:
    program = shutil.which(name)
    if program is None:
        yield None
        return
    command: Sequence[str] = [program, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        _end(process)


def _ready(pid: int | None, port: int) -> Running | None:
    if pid is None:
        return None
    running = Running(pid, f"http://127.0.0.1:{port}")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with suppress(OSError):
            page(running.url)
            return running
        time.sleep(0.1)
    return None


def _end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
