"""One side of a loop: a real server under load, with exporter, Prometheus and Alertmanager, and what they reported."""

from __future__ import annotations

import gzip
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import requests

from closed_loop import engine, load
from closed_loop.advice import in_short
from closed_loop.installation import Installation
from closed_loop.measures import Measures, measure
from sglang_tuning_exporter.recordings.stack import Stack

SETTLE_SECONDS = 3.0  # the server's own first request
POLL_SECONDS = 2.0
TIME_SCALE = 24.0  # the rules' ten minutes take 25 seconds
LULL = (1, 2, 4, 1, 3)  # clients at once before the load, one after the other
LULL_GRACE_SECONDS = 10.0  # for answers under way: clients that leave would be a finding of their own
MODEL, PORT = "MODEL", "PORT"


@dataclass(frozen=True, slots=True)
class Lane:
    """Port and cores of one engine and its monitoring, so that two can run side by side."""

    port: int = 31000
    core: int | None = 0
    beside: int | None = 1

    @staticmethod
    def of(number: int) -> Lane:
        """Return lane 0 or 1 of this machine; without a second core nothing is pinned."""
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            return Lane(31000 + 100 * number, None, None)
        first = 2 * number if len(cores) >= 2 * number + 2 else number
        return Lane(31000 + 100 * number, cores[first], cores[first + 1 if first + 1 < len(cores) else 0])

    @property
    def any(self) -> str | None:
        """Both its cores, as `taskset -c` takes them; None where nothing is pinned."""
        return None if self.core is None else f"{self.core},{self.beside}"

    def stay(self) -> None:
        """Pin this process and its later children beside the engine, with priority over other programs."""
        engine.prefer(0, engine.PRIORITY // 2)
        if self.beside is not None:
            os.sched_setaffinity(0, {self.beside})


@dataclass(frozen=True, slots=True)
class Setting:
    """What is started: SGLang's arguments and environment, and the exporter's profile."""

    args: tuple[str, ...]
    profile: str
    env: Mapping[str, str] = field(default_factory=dict)
    time_scale: float = TIME_SCALE
    warm_seconds: float = 10.0  # of the load, before it is measured
    lull_seconds: float = 0.0  # before the load: a few of its clients, as in a quiet hour
    raw: Path | None = None  # where the server's log and its answers of `/v1/loads` are kept


@dataclass(slots=True)
class Side:
    """The result: figures, the exporter's last JSON under load, and each notification with its seconds after the load began."""

    measures: Measures
    document: dict[str, Any]
    notifications: list[dict[str, Any]]
    verdicts: list[tuple[float, str]]
    ready_seconds: float
    others: float  # share of all cores that other programs took meanwhile
    records: list[load.Record]
    time_scale: float  # of the rules' clocks

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON, without requests and paths."""
        return {
            "measures": self.measures.as_json(),
            "verdict": self.document["verdict"],
            "findings": in_short(self.document),
            "checks": [c["diagnosis"] for c in self.document["checks"] if c["evidence"] and c["evidence"]["holds"]],
            "notifications": self.notifications,
            "verdicts": self.verdicts,
            "ready_seconds": round(self.ready_seconds, 1),
            "others": round(self.others, 3),
        }


def shown(args: Sequence[str], installation: Installation, lane: Lane) -> list[str]:
    """Return arguments without this machine's paths and port."""
    words = {str(installation.model): MODEL, str(lane.port): PORT}
    return [words.get(arg, arg) for arg in args]


def typed(args: Sequence[str], installation: Installation, lane: Lane) -> list[str]:
    """Return the arguments that `shown` was given."""
    words = {MODEL: str(installation.model), PORT: str(lane.port)}
    return [words.get(arg, arg) for arg in args]


def run(
    setting: Setting,
    sent: load.Load,
    installation: Installation,
    lane: Lane,
    say: Callable[[str], None] = lambda _: None,
) -> Side:
    """Start everything, send the load, stop everything. Raises `UsageError` if something does not start."""
    with tempfile.TemporaryDirectory(prefix="closed-loop-") as scratch:
        log = Path(scratch) / "server.log"
        server = engine.start(installation, setting.args, port=lane.port, log=log, core=lane.any, env=setting.env)
        try:
            ready = server.wait_ready()  # its imports on any core, its work on one
            server.pin(lane.core)
            time.sleep(SETTLE_SECONDS)
            side = _watched(setting, sent, server, Path(scratch), say)
            side.ready_seconds = ready
            return side
        finally:
            server.stop()
            if setting.raw is not None:
                setting.raw.mkdir(parents=True, exist_ok=True)
                (setting.raw / "server.log.gz").write_bytes(gzip.compress(log.read_bytes()))


def _watched(
    setting: Setting, sent: load.Load, server: engine.Engine, scratch: Path, say: Callable[[str], None]
) -> Side:
    messages: list[tuple[float, Any]] = []
    stack = Stack(
        scratch,
        sglang_url=server.url,
        log_file=server.log,
        profile=setting.profile,
        time_scale=setting.time_scale,
        on_message=lambda message: messages.append((time.time(), message)),
    )
    stack.start()
    records: list[load.Record] = []
    sending = threading.Thread(target=lambda: records.extend(load.run(sent, server.url)), name="load", daemon=True)
    verdicts: list[tuple[float, str]] = []
    document: dict[str, Any] = {}
    answers = Answers(server.url, setting.raw)
    try:
        for place, clients in enumerate(LULL if setting.lull_seconds else ()):
            # Other prompts each time: repeated ones would be cached prefixes.
            quiet = replace(
                sent,
                clients=clients,
                seconds=setting.lull_seconds / len(LULL),
                seed=sent.seed + 1000 + place,
                grace_seconds=LULL_GRACE_SECONDS,
            )
            load.run(quiet, server.url)
        begin = time.time()
        warm, end = begin + setting.warm_seconds, begin + sent.seconds
        sending.start()
        cpu = before = None
        while (now := time.time()) < end - 0.5:
            if cpu is None and now >= warm:
                warm, cpu, before = now, server.cpu_seconds("sglang::scheduler"), machine(server)
            with suppress(requests.RequestException, ValueError):
                document = stack.get(f"{stack.exporter_url}/api/v1/findings")
                if not verdicts or verdicts[-1][1] != document["verdict"]:
                    verdicts.append((round(now - begin, 1), document["verdict"]))
                    say(f"{now - begin:4.0f} s  {document['verdict']}")
            time.sleep(
                max(
                    0.0, min(POLL_SECONDS, end - 0.5 - time.time(), max(warm - time.time(), 0.1) if cpu is None else 99)
                )
            )
        end = time.time()
        spent = server.cpu_seconds("sglang::scheduler") - cpu if cpu is not None else None
        taken = others(before, machine(server))
        sending.join()
        answers.page(stack.page())
    finally:
        answers.stop()
        stack.stop()
    lines = server.log.read_text(encoding="utf-8", errors="replace").splitlines()
    figures = measure(records, lines, warm, end, spent)
    notified = [n for at, message in messages for n in _notified(at - begin, message)]
    return Side(figures, document, notified, verdicts, 0.0, taken, records, setting.time_scale)


class Answers:
    """Writes the answers of `/v1/loads` with their times to a folder until it is stopped; without a folder it does nothing."""

    def __init__(self, url: str, folder: Path | None) -> None:
        self._url, self._folder = url, folder
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="loads", daemon=True)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._thread.start()

    def page(self, text: str) -> None:
        """Keep a page of metrics."""
        if self._folder is not None:
            (self._folder / "metrics.txt.gz").write_bytes(gzip.compress(text.encode()))

    def stop(self) -> None:
        """Stop; returns when the last answer is written."""
        self._stopping.set()
        if self._folder is not None:
            self._thread.join()

    def _ask(self) -> None:
        assert self._folder is not None
        with gzip.open(self._folder / "loads.jsonl.gz", "at") as kept, requests.Session() as session:
            session.trust_env = False
            while not self._stopping.wait(POLL_SECONDS):
                with suppress(requests.RequestException, ValueError):
                    loads = session.get(f"{self._url}/v1/loads", timeout=POLL_SECONDS).json()
                    kept.write(json.dumps({"at": time.time(), "answer": loads}) + "\n")


def _notified(after: float, message: Any) -> list[dict[str, Any]]:
    """Return the firing alerts of a webhook message."""
    return [
        {
            "after_seconds": round(after, 1),
            "alert": alert["labels"]["alertname"],
            **_advised(alert["annotations"].get("advice", "")),
        }
        for alert in message["alerts"]
        if alert["status"] == "firing"
    ]


def _advised(words: str) -> dict[str, str]:
    """Return flag, present value and value to try of an advice such as `--flag 0.1 → 1.3: why`; without a flag its words are the latter."""
    found = re.match(r"(?:(--\S+) (?:(\S+) )?→ )?(.*?): ", words)
    return dict(zip(("flag", "current", "suggested"), found.groups("") if found else ("", "", words), strict=True))


def machine(server: engine.Engine) -> tuple[float, float, float]:
    """Return CPU seconds so far: of the whole machine, idle, of the engine."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    hertz = os.sysconf("SC_CLK_TCK")
    return sum(ticks) / hertz, (ticks[3] + ticks[4]) / hertz, server.cpu_seconds()


def others(before: tuple[float, float, float] | None, after: tuple[float, float, float]) -> float:
    """Return the share of all cores that other programs took between two moments of `machine`."""
    if before is None:
        return 0.0
    whole, idle, ours = (b - a for a, b in zip(before, after, strict=True))
    return max(0.0, (whole - idle - ours) / whole) if whole else 0.0
