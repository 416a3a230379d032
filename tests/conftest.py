"""Fixtures for several test files: a fake SGLang on a socket, a running exporter, a sidecar behind a real port."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import requests
import uvicorn
from hypothesis import settings
from prometheus_client.parser import text_string_to_metric_families

from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.config import Config
from sglang_tuning_exporter.config.values import joined
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.watch import Watch
from sglang_tuning_exporter.recordings.recording import load
from sglang_tuning_exporter.recordings.replay import packaged
from sglang_tuning_exporter.serve.app import make_app
from sglang_tuning_exporter.serve.process import bind
from sglang_tuning_exporter.serve.run import uvicorn_config
from sglang_tuning_exporter.sglang import metrics as facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

# These variables change what the processes and requests of a test do, so a machine that sets some would test something
# else.
for _name in [name for name in os.environ if name.startswith("PYTHON") or name.lower().endswith("_proxy")]:
    del os.environ[_name]

settings.register_profile("suite", deadline=None)  # a busy machine is no failure
settings.load_profile("suite")

PROGRAM = (sys.executable, "-m", "sglang_tuning_exporter")
DATA = Path(__file__).parent / "data"
SERVING = (DATA / "metrics" / "0.5.23_tp8-retract.prom").read_bytes()
SERVING_WITH_DP_RANKS = (DATA / "metrics" / "0.5.12_dp2-retract.prom").read_bytes()
# Of a server with a full KV cache, so that the exporter accepts a retraction.
DECODED = (
    "Decode batch, #running-req: 237, #token: 1009172, token usage: 0.97, cuda graph: True, "
    "gen throughput (token/s): 4471.70, #queue-req: 4"
)
RETRACTED = (
    "KV cache pool is full. Retract requests. #retracted_reqs: 5, #new_tokens_gained: 8950, #new_token_ratio: 0.3002 ->"
    " 0.5783"
)
DECODE, RETRACTION = f"[2025-11-20 11:40:13] {DECODED}\n".encode(), f"[2025-11-20 11:40:10] {RETRACTED}\n".encode()
Answer: TypeAlias = "Callable[[socket.socket], None]"


def pytest_configure(config: pytest.Config) -> None:
    if sys.version_info < (3, 11):  # its asyncio lets go of every handshake that fails in this way
        config.addinivalue_line("filterwarnings", "ignore:unclosed transport .*SSLProtocolTransport:ResourceWarning")


def reply(
    body: bytes, status: str = "200 OK", content_type: str = "text/plain; version=0.0.4", more: str = ""
) -> Answer:
    """An answer as a well-behaved server gives it."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode()
    return raw(head + body)


def raw(text: bytes) -> Answer:
    """These bytes, then the connection is closed."""
    return lambda connection: connection.sendall(text)


def hang(connection: socket.socket) -> None:
    """No answer until the client closes the connection."""
    connection.settimeout(20)
    with suppress(OSError):
        connection.recv(1)


def drip(head: bytes, drop: bytes = b"x") -> Answer:
    """This beginning, then one byte now and then until the client closes the connection."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(head)
        for _ in range(200):
            connection.sendall(drop)
            time.sleep(0.1)

    return answer


@dataclass
class FakeSGLang:
    """A port that sends the configured `answers`; `asked` has the head of every request.

    It can stop and start again.
    """

    answers: dict[str, Answer] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    host: str = "127.0.0.1"
    port: int = 0
    _listener: socket.socket | None = None

    @property
    def url(self) -> str:
        return f"http://{joined(self.host, self.port)}"

    def start(self) -> None:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self._listener = socket.create_server((self.host, self.port), family=family)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def stop(self) -> None:
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None

    def count(self, path: str) -> int:
        return sum(head.startswith(f"GET {path} ") for head in self.asked)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head and (piece := connection.recv(65536)):
                head += piece
            if not head:
                return  # a client that ended before it asked
            text = head.decode()
            self.asked.append(text)
            path = text.split(" ")[1]
            self.answers.get(path, reply(b"{}", "404 Not Found", "application/json"))(connection)
            connection.shutdown(socket.SHUT_WR)


@pytest.fixture
def sglang() -> Iterator[FakeSGLang]:
    """An SGLang that serves one /metrics page and answers 404 to everything else."""
    fake = FakeSGLang({"/metrics": reply(SERVING)})
    fake.start()
    yield fake
    fake.stop()


class Page:
    """One /metrics page, parsed strictly."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def value(self, name: str, **labels: str) -> float | None:
        """The value of the one series with these labels, None without it."""
        found = [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        assert len(found) <= 1, f"{name}{labels} is not one series"
        return found[0] if found else None

    def labels(self, name: str) -> list[dict[str, str]]:
        return [s.labels for s in self.samples if s.name == name]

    @property
    def error(self) -> str | None:
        """The reason why SGLang could not be scraped."""
        reasons = [labels["reason"] for labels in self.labels("sglang_tuning_scrape_error_info")]
        assert len(reasons) <= 1
        return reasons[0] if reasons else None


class Exporter:
    """A running `serve` with its lines on standard error."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.said: list[str] = []
        self._addresses: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        url = self._addresses.get(timeout=120)
        assert url is not None, "it did not start: " + "".join(self.said)
        self.url = url

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line.decode())
            if b"listening on " in line:
                self._addresses.put(line.decode().split("listening on ")[1].split(",")[0])
        self._addresses.put(None)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> requests.Response:
        return requests.get(self.url + path, headers=headers, timeout=12)

    def page(self, within: str = "5") -> Page:
        answer = self.get("/metrics", {"X-Prometheus-Scrape-Timeout-Seconds": within})
        assert answer.status_code == 200
        return Page(answer.text)

    def end(self) -> int:
        """End it as an orchestrator does; return its exit status."""
        self.process.terminate()
        try:
            return self.process.wait(timeout=10)
        finally:
            self.process.kill()
            self.process.wait()
            if self.process.stderr is not None:
                with suppress(OSError):
                    self.process.stderr.close()


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without the exporter's own variables, and with `variables`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_TUNING_")}
    return kept | variables


def program(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the program to its end."""
    return subprocess.run(
        [*PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
        cwd=cwd,
        env=environment(**variables),
    )


def complaint(*arguments: str, **variables: str) -> str:
    """The error message of the program: one line, with exit status 2."""
    ended = program(*arguments, cwd=None, **variables)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), ended
    return ended.stderr


@contextmanager
def running_exporter(
    *flags: str, before: Sequence[str] = (), variables: Mapping[str, str] | None = None, **how: Any
) -> Iterator[Exporter]:
    """`serve` with these flags on a free port, run by the command `before` in an environment with `variables`; `how`
    for `Popen`.
    """
    process = subprocess.Popen(
        [*before, *PROGRAM, "serve", "--listen-address", "127.0.0.1:0", *flags],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(**variables or {}),
        **how,
    )
    exporter = Exporter(process)
    try:
        yield exporter
    finally:
        exporter.end()


def wait_for(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait until it is true; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def config(**values: object) -> Config:
    """Settings as `resolve` would give them, with these instead of the defaults."""
    defaults: Mapping[str, object] = {
        "sglang_url": None,
        "log_file": (),
        "profile": "online",
        "listen_address": "127.0.0.1:0",
        "scrape_timeout": 5.0,
        "metrics_path": "/metrics",
        "passthrough": True,
        "from_start": False,
        "api_key_file": None,
        "state_file": None,
    }
    return Config(**{**defaults, **values})  # type: ignore[arg-type]  # the tests name fields of their own type


def watched_retractions(directory: Path, *, without: float = 0.0, **settings: object) -> Sidecar:
    """A sidecar, not yet started, that has just seen the `retract` recording, lines and scrapes at their times,
    `without` its last seconds.
    """
    recording = load(packaged("retract"))
    log = directory / "server.log"
    log.touch()
    sidecar = Sidecar(config(**{"sglang_url": "http://127.0.0.1:9", "log_file": (str(log),), **settings}))
    assert sidecar.log is not None
    length = recording.length_seconds - without
    begin = sidecar.now() - length
    scrapes = sidecar.config.sglang_url is not None
    watch = sidecar.watch = sidecar.log._watch = Watch(sidecar.profile, begin, reads=True, scrapes=scrapes)
    reader = Reader()
    moments: list[tuple[float, bytes, bool]] = [(line.at, line.text, True) for line in recording.lines]
    moments += [(scrape.at, scrape.text, False) for scrape in recording.scrapes if scrapes]
    judged = 0.0
    for position, text, is_line in sorted(moments, key=lambda moment: moment[0]):
        if position > length:
            break
        if position - judged >= 10:
            judged = position
            watch.judge(begin + position)
        if not is_line:
            watch.take_page(facts.read(text.decode()), begin + position)
            continue
        for event in reader.read(text):
            event.time = begin + position
            watch.take_line(event)
    return sidecar


@contextmanager
def web(sidecar: Sidecar, limit_concurrency: int | None = None) -> Iterator[str]:
    """The sidecar behind a real port of this process; its address."""
    listener = bind("127.0.0.1:0")
    settings = uvicorn_config(make_app(sidecar))
    settings.limit_concurrency = limit_concurrency or settings.limit_concurrency
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=5)
        listener.close()
        sidecar.stop()
