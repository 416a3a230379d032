"""One server as an operator handles it: start, kill, stop, rotate the log, send requests."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import requests

from closed_loop import engine
from closed_loop.installation import Installation
from closed_loop.load import Load
from sglang_tuning_exporter.config.values import UsageError

STEADY = Load(clients=3, most_new_tokens=80, prompt_tokens=(24, 60))
STORM = Load(clients=40, most_new_tokens=600)
# With this variable of SGLang, admission expects at most 32 more tokens of a request, and admits too many.
STORM_ENV = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "32"}
STORM_ARGS = ("--max-total-tokens", "3000", "--schedule-conservativeness", "0.3")
STEADY_ARGS = ("--max-total-tokens", "16384")
FAIL_SECONDS = 400.0  # as long as a start takes on a busy machine
DRAIN_SECONDS = 120.0


class Traffic:
    """Clients that send requests until `stop`; then each waits for its last answer."""

    def __init__(self, url: str, load: Load) -> None:
        self.answered = self.failed = 0
        self._url, self._load = url, load
        self._stopping = threading.Event()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(load.clients)]
        for thread in self._threads:
            thread.start()

    def stop(self, seconds: float = 90.0) -> None:
        """Stop sending; returns when every answer has come, or after `seconds`."""
        self._stopping.set()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _ask(self) -> None:
        with requests.Session() as session:
            session.trust_env = False
            while not self._stopping.is_set():
                with self._lock:
                    number = next(self._numbers)
                body = {**self._load.request(number), "stream": False}
                try:
                    status = session.post(f"{self._url}/generate", json=body, timeout=900).status_code
                except (requests.RequestException, OSError):
                    status = 0
                with self._lock:
                    self.answered += status == 200
                    self.failed += status != 200
                if status != 200:
                    self._stopping.wait(0.5)


class Host:
    """One server and its log. `witness` has every line once; `log` is what the exporter follows."""

    def __init__(
        self,
        installation: Installation,
        *,
        port: int,
        core: int | None,
        folder: Path,
        storm: bool,
        more: tuple[str, ...] = (),
    ) -> None:
        self.installation, self.port, self.core, self.folder = installation, port, core, folder
        self.log, self.witness = folder / "server.log", folder / "witness.log"
        self.url = f"http://{engine.LOOPBACK}:{port}"
        self.engine: engine.Engine | None = None
        self.traffic: Traffic | None = None
        self.ready_seconds = 0.0
        self._storm = storm
        self._more = more
        self._writer: subprocess.Popen[bytes] | None = None
        self._stopped: list[int] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.log.touch()
        self.witness.touch()

    def start(self) -> None:
        """Start the server and wait until it answers; its log is appended to."""
        self._launch()
        assert self.engine is not None
        self.ready_seconds = self.engine.wait_ready()

    def start_anew(self) -> None:
        """Start it with an empty log, as a shell's `>` does."""
        os.truncate(self.log, 0)
        self.start()

    def start_in_vain(self) -> None:
        """Start it with almost no KV cache: it prints its arguments, and a scheduler fails."""
        self._launch("--mem-fraction-static", "0.0001")
        self._wait_end(FAIL_SECONDS)
        self.clear()

    def start_without_model(self) -> None:
        """Start it with a missing model."""
        self._launch("--model-path", str(self.folder / "absent-model"))
        self._wait_end(FAIL_SECONDS)
        self.clear()

    def kill_main(self) -> None:
        """SIGKILL the main process alone."""
        os.kill(self._pid(""), signal.SIGKILL)

    def kill_scheduler(self) -> None:
        """SIGKILL the scheduler."""
        os.kill(self._pid("sglang::scheduler"), signal.SIGKILL)

    def stop_scheduler(self) -> None:
        """SIGSTOP the scheduler."""
        pid = self._pid("sglang::scheduler")
        self._stopped.append(pid)
        os.kill(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT what was stopped."""
        while self._stopped:
            with suppress(ProcessLookupError):
                os.kill(self._stopped.pop(), signal.SIGCONT)

    def stop(self) -> None:
        """Stop it as a supervisor does: SIGTERM to the main process, here once its requests are answered."""
        self.pause()
        self.drain()

    def drain(self) -> None:
        """SIGTERM the main process while requests run, as a router that sends no more does, and wait for its end.

        SGLang takes new requests while it drains, and does not end before it has none.
        """
        os.kill(self._pid(""), signal.SIGTERM)
        self.pause()
        self._wait_end(DRAIN_SECONDS)
        self.clear()

    def rotate(self) -> None:
        """Rename the log and have its writer open a new one, as logrotate does with a postrotate script."""
        time.sleep(8)
        assert self._writer is not None
        self.log.rename(self._next_name())
        self._writer.send_signal(signal.SIGHUP)
        time.sleep(8)

    def copytruncate(self) -> None:
        """Copy the log and truncate it, as logrotate's copytruncate does."""
        time.sleep(8)
        shutil.copyfile(self.log, self._next_name())
        os.truncate(self.log, 0)
        time.sleep(8)

    def send(self) -> None:
        """Begin to send requests."""
        self.traffic = Traffic(self.url, STORM if self._storm else STEADY)

    def pause(self) -> None:
        """Send no more, and wait for the answers."""
        if self.traffic is not None:
            self.traffic.stop()
            self.traffic = None

    def clear(self) -> None:
        """Stop what is left of the server."""
        self.go_on()
        if self.engine is not None:
            self.engine.stop()
            self.engine = None
        if self._writer is not None:
            assert self._writer.stdin is not None
            self._writer.stdin.close()
            self._writer.wait()
            self._writer = None

    def close(self) -> None:
        """Stop everything."""
        if self.traffic is not None:
            self.traffic.stop(0.0)
        self.clear()

    @property
    def serves(self) -> bool:
        """Whether it answers its health probe."""
        if self.engine is None or self.engine.ended:
            return False
        try:
            with requests.Session() as session:
                session.trust_env = False
                return session.get(f"{self.url}/health", timeout=20).status_code == 200
        except requests.RequestException:
            return False

    def files(self) -> list[Path]:
        """Return every file of the log, the oldest first."""
        rotated = sorted(self.folder.glob("server.log.*"), key=lambda path: int(path.suffix[1:]))
        return [*rotated, self.log]

    def _next_name(self) -> Path:
        return self.folder / f"server.log.{len(self.files())}"

    def _launch(self, *more: str) -> None:
        self.clear()
        writer = [sys.executable, str(Path(__file__).parent / "writer.py"), str(self.witness), str(self.log)]
        self._writer = subprocess.Popen(writer, stdin=subprocess.PIPE, start_new_session=True)
        assert self._writer.stdin is not None
        args = engine.arguments(
            self.installation, self.port, *(STORM_ARGS if self._storm else STEADY_ARGS), *self._more, *more
        )
        self.engine = engine.start(
            self.installation,
            args,
            port=self.port,
            log=self.log,
            core=self.core,
            env=STORM_ENV if self._storm else {},
            output=self._writer.stdin.fileno(),
        )

    def _pid(self, name: str) -> int:
        """Return the process with that title; the main one for an empty name."""
        assert self.engine is not None
        if not name:
            return self.engine.group
        found = [pid for pid, called in self.engine.processes().items() if called.startswith(name)]
        if not found:
            raise UsageError(f"{name}: no such process in {self.engine.processes()}")
        return found[0]

    def _wait_end(self, seconds: float) -> None:
        assert self.engine is not None
        deadline = time.monotonic() + seconds
        while not self.engine.ended and time.monotonic() < deadline:
            time.sleep(0.2)
        if not self.engine.ended:
            raise UsageError(f"SGLang did not end by itself within {seconds:.0f} s")
