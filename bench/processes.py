"""The programs that are compared: run to their end, or running on a free port, with the
CPU and memory that they use.
"""

from __future__ import annotations

import http.client
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

RUNS = 3
MTAIL = Path(__file__).with_name("sglang.mtail")  # keeps the same counters and gauges, as far as its language can
NO_MTAIL = "mtail is not installed (`apt-get install mtail`), so its row is missing."
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """CPU seconds (user and system) and wall seconds of a process and its children, and its peak memory in bytes."""

    cpu: float
    wall: float
    peak: int
    output: bytes


def run(command: Sequence[str]) -> Usage:
    """Run a command to its end. Raises `CalledProcessError` when it fails."""
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    wall = time.monotonic() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    if process.returncode > 1:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Usage(used.ru_utime + used.ru_stime, wall, used.ru_maxrss * 1024, output)


def best_of(commands: dict[str, Sequence[str]]) -> dict[str, Usage]:
    """Run all commands in turn, several times; return the best of each: a busy machine slows all alike."""
    best: dict[str, Usage] = {}
    for _ in range(RUNS):
        for name, command in commands.items():
            usage = run(command)
            wall = min(usage.wall, best[name].wall) if name in best else usage.wall
            if name not in best or usage.cpu < best[name].cpu:
                best[name] = usage
            best[name] = replace(best[name], wall=wall)
    return best


@dataclass
class Running:
    """A process and the address of its page."""

    pid: int
    url: str

    def memory_kib(self, what: str = "VmRSS") -> int:
        """Its memory, now or at most (`VmHWM`)."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        return int(status.partition(f"{what}:")[2].split()[0])

    @property
    def cpu(self) -> float:
        """CPU seconds (user and system) of all its threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def get(self, path: str = "/metrics") -> str:
        """Return a page."""
        return page(self.url, path).decode()

    def value(self, name: str) -> float | None:
        """Return one of our figures on /metrics, summed over its labels."""
        found = re.findall(rf"^sglang_tuning_{name}(?:\{{[^}}]*\}})? (\S+)$", self.get(), re.MULTILINE)
        return sum(map(float, found)) if found else None


def page(url: str, path: str = "/metrics") -> bytes:
    """Ask for a page on a new connection, as cheaply as Python can."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()


class Exporter(Running):
    """Our program on a free port, `serve` unless `command` says otherwise; `said` is what it printed last."""

    def __init__(self, *flags: str, command: str = "serve", prefix: Sequence[str] = ()) -> None:
        argv = [*prefix, sys.executable, "-m", "sglang_tuning_exporter", command, *flags]
        self.process = subprocess.Popen(
            [*argv, "--listen-address", "127.0.0.1:0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.said: deque[str] = deque(maxlen=1000)
        for line in self._lines():
            if found := re.search(r"(?:listening on|^--sglang-url) (http://[\d.:]+)", line):
                super().__init__(self.process.pid, found[1])
                threading.Thread(target=lambda: deque(self._lines(), maxlen=0), daemon=True).start()
                return
        raise RuntimeError(f"it did not start: {list(self.said)[-1:]}")

    def _lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.rstrip())
            yield line

    def __enter__(self) -> Exporter:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        end(self.process)


def exporter(sglang_url: str | None, log: Path) -> Exporter:
    """Run `serve` with its defaults."""
    log.touch()
    return Exporter("--log-file", str(log), *(("--sglang-url", sglang_url) if sglang_url else ()))


def mtail_command(log: Path) -> Sequence[str] | None:
    """Return the command with which mtail reads `log` once; None where it is not installed."""
    found = shutil.which("mtail")
    return found and [found, "--one_shot", "--port", "0", "--logs", str(log), "--progs", str(MTAIL)]


def mtail(log: Path) -> AbstractContextManager[Running | None]:
    """Run mtail with our program and its defaults; None where it is not installed."""
    log.touch()
    return _peer("mtail", "--address=127.0.0.1", "--port={port}", f"--progs={MTAIL}", f"--logs={log}")


def node_exporter() -> AbstractContextManager[Running | None]:
    """Run the exporter of machine metrics with its defaults; None where it is not installed."""
    return _peer("prometheus-node-exporter", "--web.listen-address=127.0.0.1:{port}")


@contextmanager
def _peer(name: str, *arguments: str) -> Iterator[Running | None]:
    from sglang_tuning_exporter.recordings.demo import free_port  # noqa: PLC0415 - not in the memory of the timed parse

    if (program := shutil.which(name)) is None:
        yield None
        return
    port = free_port()
    command = [program, *(each.format(port=port) for each in arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    running = Running(process.pid, f"http://127.0.0.1:{port}")
    try:
        wait_for(lambda: _answers(running), 10)
        yield running
    finally:
        end(process)


def _answers(running: Running) -> bool:
    with suppress(OSError):
        return bool(running.get())
    return False


def version(program: str) -> str:
    """Return the installed version of a program's Debian package."""
    asked = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Version}", program], capture_output=True, text=True, check=False
    )
    return asked.stdout or "unknown version"


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until it holds. Raises `AssertionError`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s"
        time.sleep(0.1)


def end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """End a process with SIGTERM, then with SIGKILL."""
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
