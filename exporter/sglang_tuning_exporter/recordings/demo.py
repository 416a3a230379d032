"""`demo`: a recorded server, the exporter, and Prometheus and Alertmanager if installed, up to the notification."""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import requests

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.recordings.notifications import as_text
from sglang_tuning_exporter.recordings.recording import load
from sglang_tuning_exporter.recordings.replay import ReplayServer, find
from sglang_tuning_exporter.recordings.stack import Stack

ALERT = "SGLangRetractingTooOften"


def run(directory: str, *, profile: str, speed: float, seconds: float) -> int:
    """Run the demo until Ctrl-C, or for `seconds` if above 0. Raise `UsageError`."""
    if not 0 < speed <= 60:
        raise UsageError(f"--speed={speed:g}: give a number above 0 and up to 60")
    if profile not in PROFILES:
        raise UsageError(f"--profile={profile}: give one of {', '.join(PROFILES)}")
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
            f"Replaying a recorded SGLang ({directory}) {speed:g} times as fast; every clock of the rules runs as fast.",
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
