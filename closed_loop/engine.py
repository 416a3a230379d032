"""A real SGLang as a process group: start it, wait for it, measure it, stop it."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import requests

from closed_loop.installation import Installation
from sglang_tuning_exporter.config.values import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

LOOPBACK, PORT = "127.0.0.1", 31000
URL = f"http://{LOOPBACK}:{PORT}"
# With more OpenMP threads, torch spins while it waits, and is very slow beside other programs.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
}
PROGRAM = ("python3", "-m", "sglang.launch_server")  # the start of the exporter's command lines
SCHEDULER = "sglang::scheduler"
READY_SECONDS = 300.0  # 20 to 30 alone; imports of three processes take long on a busy machine
SETTLE_SECONDS = 3.0  # the server's own first request
PRIORITY = -10  # over other programs of the machine
CORES = sorted(os.sched_getaffinity(0))  # the first for the engine; everything else beside it, where there is another
_TICKS = os.sysconf("SC_CLK_TCK")


def arguments(installation: Installation, flags: str, stream_interval: int | None = 8) -> list[str]:
    """Return the arguments that every server here has, followed by `flags`.

    With a `stream_interval` of 8 the detokenizer, on the same core, is not the bottleneck. The memory fraction is of
    the host's memory, which other programs use too; `--max-total-tokens` limits the KV cache.
    """
    fixed = "--load-format dummy --device cpu --attention-backend torch_native --sampling-backend pytorch"
    fixed += " --grammar-backend none --mem-fraction-static 0.4 --random-seed 42 --enable-metrics"
    if stream_interval is not None:
        fixed += f" --stream-interval {stream_interval}"
    fixed += f" --host {LOOPBACK} --port {PORT}"
    return ["--model-path", str(installation.model), *fixed.split(), *shlex.split(flags)]


def arguments_of(command: str) -> list[str]:
    """Return the arguments of a command line as the exporter writes it. Raises `UsageError` for another program's."""
    words = shlex.split(command)
    if tuple(words[: len(PROGRAM)]) != PROGRAM:
        raise UsageError(f"command={command[:60]}: does not start SGLang")
    return words[len(PROGRAM) :]


def prefer(pid: int, priority: int = PRIORITY) -> None:
    """Raise the priority of this process's session, as far as this user may.

    Linux schedules sessions against each other (autogroups) and applies `nice` only within one, so both are set.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, priority)
    with suppress(OSError):
        Path(f"/proc/{pid or 'self'}/autogroup").write_text(str(priority))


def stay_beside() -> None:
    """Keep this process and its later children off the engine's core, with priority over other programs."""
    prefer(0, PRIORITY // 2)
    os.sched_setaffinity(0, CORES[1:] or CORES)


@dataclass(slots=True)
class Engine:
    """A running server. `group` is the id of its process group; its output goes to `log`."""

    log: Path
    group: int
    started: float  # unix seconds
    _process: subprocess.Popen[bytes]

    def wait_ready(self) -> float:
        """Wait until it answers its health check; return how long the start took.

        Raises `UsageError` if it does not start.
        """
        deadline = time.monotonic() + READY_SECONDS
        with requests.Session() as session:
            session.trust_env = False
            while self._process.poll() is None and time.monotonic() < deadline:
                with suppress(requests.RequestException):
                    if session.get(f"{URL}/health", timeout=10).status_code == 200:
                        return time.time() - self.started
                time.sleep(0.3)
        words = self.log.read_text(encoding="utf-8", errors="replace")[-800:]
        self.stop()
        raise UsageError(f"SGLang did not come up: {words}")

    def processes(self) -> dict[int, str]:
        """Return the processes of its group: id → title (`sglang::scheduler`, …)."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError):
                fields = _fields(folder)
                if int(fields[2]) == self.group and fields[0] != "Z":
                    name = (folder / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
                    found[int(folder.name)] = name
        return found

    def cpu_seconds(self, name: str = "") -> float:
        """Return the CPU time so far of its processes whose name begins with `name`."""
        spent = 0
        for pid, called in self.processes().items():
            if called.startswith(name):
                with suppress(OSError):
                    fields = _fields(Path("/proc") / str(pid))
                    spent += int(fields[11]) + int(fields[12])
        return spent / _TICKS

    def pin(self) -> None:
        """Pin all its threads to its core: its imports may run on any, its work on one."""
        for pid in self.processes() if len(CORES) > 1 else ():
            for task in Path(f"/proc/{pid}/task").glob("[0-9]*"):
                with suppress(OSError):
                    os.sched_setaffinity(int(task.name), {CORES[0]})

    def stop(self, seconds: float = 2.0) -> None:
        """Stop it with SIGTERM, then SIGKILL; returns when no process of its group is left."""
        self._send(signal.SIGCONT)
        self._send(signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while self.processes() and time.monotonic() < deadline:
            self._process.poll()
            time.sleep(0.2)
        self._send(signal.SIGKILL)
        self._process.wait()

    def _send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.group, number)


def start(installation: Installation, args: Sequence[str], log: Path, env: Mapping[str, str]) -> Engine:
    """Start a server on any core; its output is appended to `log`. Raises `UsageError` where another one answers."""
    with socket.socket() as tried:
        if tried.connect_ex((LOOPBACK, PORT)) == 0:
            raise UsageError(f"port={PORT}: another server answers there; end it first")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab", buffering=0) as appended:
        process = subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, CORES)), str(installation.python), *PROGRAM[1:], *args],
            stdout=appended,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **ENVIRONMENT, **env},
            start_new_session=True,
        )
    prefer(process.pid)
    return Engine(log, process.pid, time.time(), process)


@contextmanager
def running(installation: Installation, args: Sequence[str], log: Path, env: Mapping[str, str]) -> Iterator[Engine]:
    """Start a server, and hand it over when it serves and has done its own first request.

    Raises `UsageError` if it does not start.
    """
    server = start(installation, args, log, env)
    try:
        server.wait_ready()
        server.pin()
        time.sleep(SETTLE_SECONDS)
        yield server
    finally:
        server.stop()


def _fields(folder: Path) -> list[str]:
    """Return the fields of /proc/PID/stat after the process's name."""
    return (folder / "stat").read_text().rpartition(")")[2].split()
