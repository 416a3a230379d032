"""`demo`: a recorded server, the exporter, and Prometheus and Alertmanager if installed, up to the notification.

`Stack` is the monitoring chain on loopback, also for end-to-end tests.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess  # nosec B404 # the demo runs Prometheus and Alertmanager
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import requests
import yaml

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.mixin import alerts
from sglang_tuning_exporter.mixin.wishes import Wishes
from sglang_tuning_exporter.recordings.notifications import as_text, receiver
from sglang_tuning_exporter.recordings.recording import load
from sglang_tuning_exporter.recordings.replay import ReplayServer, find

ALERT = "SGLangRetractingTooOften"
LOOPBACK = "127.0.0.1"
READY_SECONDS = 30.0
# On Debian the program of Alertmanager has the name of its package.
PROGRAMS = {"prometheus": ("prometheus",), "alertmanager": ("prometheus-alertmanager", "alertmanager")}


def program(name: str) -> str | None:
    """Return the path of Prometheus or Alertmanager, or None."""
    return next((path for candidate in PROGRAMS[name] if (path := shutil.which(candidate))), None)


def free_port() -> int:
    """Return a TCP port that is free on loopback now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _http_get(url: str, **parameters: str) -> requests.Response:
    """Ask a service on loopback, without a proxy of the environment."""
    with requests.Session() as session:
        session.trust_env = False
        return session.get(url, params=parameters, timeout=5)


class Process:
    """A child process whose output goes to a file."""

    def __init__(self, name: str, command: Sequence[str], output: Path) -> None:
        self.name, self.output = name, output
        with output.open("wb") as sink:
            self._child = subprocess.Popen(  # noqa: S603 # nosec B603 # programs of this machine with arguments of ours
                list(command),
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "NO_PROXY": "*"},
            )

    def wait_until_ready(self, url: str) -> None:
        """Wait until it answers 200 there.

        Raises `UsageError` with the end of its output where it ends or takes too long.
        """
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self._child.poll() is None:
            with suppress(requests.RequestException):
                if _http_get(url).status_code == 200:
                    return
            time.sleep(0.1)
        last_words = self.output.read_text(encoding="utf-8", errors="replace")[-600:].strip()
        raise UsageError(f"{self.name} did not start: {last_words or 'it said nothing'}")

    def stop(self) -> None:
        """End it with SIGTERM, then with SIGKILL."""
        self._child.terminate()
        try:
            self._child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it with SIGKILL: it saves nothing."""
        self._child.kill()
        self._child.wait()


class Stack:
    """Everything between an SGLang (real, recorded or fake) and a person.

    `time_scale` divides every duration in rules and grouping, and what the exporter waits until an alert begins or
    ends, for a recording that is replayed faster.
    """

    def __init__(
        self,
        directory: Path,
        *,
        sglang_url: str | None,
        log_file: Path | None,
        profile: str,
        time_scale: float = 1.0,
        scrape_interval: str = "1s",
        on_message: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self._directory, self._profile, self._time_scale = directory, profile, time_scale
        self._sglang_url, self._log_file, self._scrape_interval = sglang_url, log_file, scrape_interval
        self._on_message, self._webhook = on_message, ""
        self._ending = ExitStack()
        self._processes: list[Process] = []
        self.exporter_url = f"http://{LOOPBACK}:{free_port()}"
        self.prometheus_url: str | None = None
        self.alertmanager_url: str | None = None

    def start(self) -> None:
        """Start all installed programs in the order of their dependence. Raise `UsageError` if one does not start."""
        self._webhook = self._ending.enter_context(receiver(f"{LOOPBACK}:0", self._on_message))
        self._start_exporter()
        self._write_rules()
        if program("alertmanager"):
            self._start_alertmanager()
        if program("prometheus"):
            self._start_prometheus()

    def stop(self) -> None:
        """End all processes of `start`."""
        for process in reversed(self._processes):
            process.stop()
        self._processes.clear()
        self._ending.close()

    def get(self, url: str, **parameters: str) -> Any:
        """JSON of one of the services."""
        return _http_get(url, **parameters).json()

    def page(self) -> str:
        """The exporter's exposition."""
        return _http_get(f"{self.exporter_url}/metrics").text

    def query(self, expression: str) -> list[dict[str, Any]]:
        """An instant query's result vector."""
        answer = self.get(f"{self.prometheus_url}/api/v1/query", query=expression)
        return list(answer["data"]["result"])

    def alerts(self) -> dict[str, str]:
        """Alert name → pending or firing."""
        found = self.get(f"{self.prometheus_url}/api/v1/alerts")["data"]["alerts"]
        return {alert["labels"]["alertname"]: alert["state"] for alert in found}

    def _launch(self, name: str, command: Sequence[str], ready_url: str) -> None:
        self._processes.append(Process(name, command, self._directory / f"{name}.log"))
        try:
            self._processes[-1].wait_until_ready(ready_url)
        except UsageError:
            self.stop()
            raise

    def _start_exporter(self) -> None:
        command = [sys.executable, "-m", "sglang_tuning_exporter", "serve", "--profile", self._profile]
        command += ["--listen-address", self.exporter_url.removeprefix("http://")]
        command += ["--sglang-url", self._sglang_url] if self._sglang_url else []
        command += ["--log-file", str(self._log_file)] if self._log_file else []
        command += ["--threshold", f"alert_wait={1 / self._time_scale:.6g}"] if self._time_scale != 1.0 else []
        self._launch("exporter", command, f"{self.exporter_url}/-/ready")

    def _write_rules(self) -> None:
        for name, text in alerts.files(self._time_scale, Wishes(runbook_url=f"{self.exporter_url}/runbooks")).items():
            path = self._directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def _start_alertmanager(self) -> None:
        path = self._directory / "alerts" / "alertmanager.yml"
        configuration = yaml.safe_load(path.read_text(encoding="utf-8"))
        configuration["receivers"][0]["webhook_configs"][0]["url"] = self._webhook
        storage = f"--storage.path={self._directory / 'alertmanager'}"
        self.alertmanager_url = self._start("alertmanager", path, configuration, storage, "--cluster.listen-address=")

    def _start_prometheus(self) -> None:
        def targets(url: str) -> list[dict[str, list[str]]]:
            return [{"targets": [url.removeprefix("http://")]}]

        names = ("scrape_interval", "scrape_timeout", "evaluation_interval")
        configuration: dict[str, Any] = {
            "global": dict.fromkeys(names, self._scrape_interval),
            "rule_files": ["alerts/rules/sglang-tuning.rules.yml"],
            "scrape_configs": [{"job_name": "sglang", "static_configs": targets(self.exporter_url)}],
        }
        if self.alertmanager_url:
            configuration["alerting"] = {"alertmanagers": [{"static_configs": targets(self.alertmanager_url)}]}
        storage = f"--storage.tsdb.path={self._directory / 'prometheus'}"
        path = self._directory / "prometheus.yml"
        self.prometheus_url = self._start("prometheus", path, configuration, storage, "--log.level=warn")

    def _start(self, name: str, path: Path, configuration: dict[str, Any], *flags: str) -> str:
        """Start a program with this configuration on a free port; return its URL."""
        path.write_text(yaml.safe_dump(configuration), encoding="utf-8")
        address = f"{LOOPBACK}:{free_port()}"
        command = [str(program(name)), f"--config.file={path}", f"--web.listen-address={address}", *flags]
        self._launch(name, command, f"http://{address}/-/ready")
        return f"http://{address}"


def run(directory: str, *, profile: str, speed: float, seconds: float) -> int:
    """Run the demo until Ctrl-C, or for `seconds` if above 0. Raise `UsageError`."""
    if not 0 < speed <= 60:
        raise UsageError(f"--speed={speed:g}: give a number above 0 and up to 60")
    if profile not in profiles.PROFILES:
        raise UsageError(f"--profile={profile}: give one of {', '.join(profiles.PROFILES)}")
    recorded = load(find(directory))
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    begin = time.monotonic()

    def show(message: Any) -> None:
        elapsed = time.monotonic() - begin
        _clear()
        text = as_text(message, without="dashboard_url")  # no Grafana runs here
        print(f"\nNotification after {elapsed:.0f} s:\n\n{text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="sglang-tuning-demo-") as scratch, ExitStack() as ending:
        log = Path(scratch) / "server.log"
        log.touch()
        replay = ReplayServer(recorded, log_path=log, speed=speed, loop=True)
        print(
            f"Replaying a recorded SGLang ({directory}) {speed:g} times as fast; every clock of the rules runs as"
            " fast.",
            flush=True,
        )
        print("Starting the exporter, Alertmanager and Prometheus …", flush=True)
        ending.callback(replay.stop)
        replay.start()
        stack = Stack(
            Path(scratch), sglang_url=replay.url, log_file=log, profile=profile, time_scale=speed, on_message=show
        )
        # All are called, also where nobody reads the output any more.
        ending.callback(stack.stop)
        ending.callback(print, "Ending everything that was started.", flush=True)
        ending.callback(_clear)
        with suppress(KeyboardInterrupt):
            stack.start()
            _addresses(replay, stack, log)
            _wait(stack, replay, ended, begin, seconds)
    return 0


def _addresses(replay: ReplayServer, stack: Stack, log: Path) -> None:
    rows = [
        ("SGLang (recorded)", f"{replay.url}/metrics"),
        ("its log", str(log)),
        ("exporter", stack.exporter_url),
        ("Prometheus", stack.prometheus_url),
        ("Alertmanager", stack.alertmanager_url),
    ]
    for name, address in rows:
        if address:
            print(f"  {name:<18} {address}", flush=True)
    missing = " and ".join(name for name, address in rows if not address)
    if missing:
        print(f"  Not installed: {missing}. No notification; the exporter's page shows the same finding.", flush=True)


def _wait(stack: Stack, replay: ReplayServer, ended: threading.Event, begin: float, seconds: float) -> None:
    while not ended.wait(1.0):
        elapsed = time.monotonic() - begin
        if seconds and elapsed >= seconds:
            return
        try:
            state = stack.alerts().get(ALERT, "not yet") if stack.prometheus_url else "no Prometheus"
            lines = stack.page().splitlines()
            counted = (line.split()[1] for line in lines if line.startswith("sglang_tuning_retraction_events_total "))
            retractions = next(counted, "0").removesuffix(".0")
        except (requests.RequestException, KeyError, ValueError):
            state, retractions = "unknown", "?"
        place = f"replay at {replay.position_seconds:.0f} of {replay.recording.length_seconds:.0f} s"
        words = f"{elapsed:4.0f} s  {place}, retractions {retractions}, {ALERT}: {state}"
        if sys.stdout.isatty():
            print(f"\r\033[K{words}", end="", flush=True)
        elif int(elapsed) % 5 == 0:
            print(words, flush=True)


def _clear() -> None:
    if sys.stdout.isatty():
        print("\r\033[K", end="", flush=True)
