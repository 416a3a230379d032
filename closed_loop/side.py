"""One side of a loop: a real server under load, with exporter, Prometheus and Alertmanager, its figures and what they
reported.

The log is read with patterns of this module, independent of the exporter.
"""

from __future__ import annotations

import re
import tempfile
import threading
import time
from calendar import timegm
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from closed_loop import engine, load
from closed_loop.installation import Installation
from closed_loop.starts import Start
from sglang_tuning_exporter.recordings.demo import Stack

POLL_SECONDS = 2.0
TIME_SCALE = 24.0  # the rules' ten minutes take 25 seconds
WARM_SECONDS = 10.0  # of the load, before it is measured
_DECODE = re.compile(r"Decode batch.*#running-req: (\d+).*token usage: ([\d.]+).*#queue-req: (\d+)")
_PREFILL = re.compile(r"Prefill batch.*#new-token: (\d+), #cached-token: (\d+)")
_RETRACTED = "KV cache pool is full. Retract requests"


@dataclass(frozen=True, slots=True)
class Side:
    """The figures, the exporter's last JSON under load, and notifications with their seconds after the load began."""

    figures: Mapping[str, float | None]
    document: dict[str, Any]
    notified: list[tuple[str, float]]

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON, of the findings their names."""
        found = [finding["diagnosis"] for finding in self.document["findings"]]
        figures = {name: None if value is None else round(value, 3) for name, value in self.figures.items()}
        return {"verdict": self.document["verdict"], "findings": found, "notifications": self.notified, **figures}


def run(
    args: Sequence[str], start: Start, sent: load.Load, installation: Installation, say: Callable[[str], None]
) -> Side:
    """Start everything, send the load, stop everything. Raises `UsageError` if something does not start."""
    with tempfile.TemporaryDirectory(prefix="closed-loop-") as scratch:
        log, messages = Path(scratch) / "server.log", list[tuple[float, Any]]()
        stack = Stack(
            Path(scratch),
            sglang_url=engine.URL,
            log_file=log,
            profile=start.profile,
            time_scale=TIME_SCALE,
            on_message=lambda message: messages.append((time.time(), message)),
        )
        with engine.running(installation, args, log, start.env) as server:
            try:
                stack.start()
                return _watched(server, stack, sent, messages, say)
            finally:
                stack.stop()


def _watched(
    server: engine.Engine,
    stack: Stack,
    sent: load.Load,
    messages: list[tuple[float, Any]],
    say: Callable[[str], None],
) -> Side:
    records: list[load.Record] = []
    sending = threading.Thread(target=lambda: records.extend(load.run(sent, engine.URL)), name="load", daemon=True)
    begin, document = time.time(), dict[str, Any]()
    sending.start()
    time.sleep(WARM_SECONDS)
    warm, cpu = time.time(), server.cpu_seconds(engine.SCHEDULER)
    while (left := begin + sent.seconds - 0.5 - time.time()) > 0:
        with suppress(requests.RequestException, ValueError):
            last, document = document.get("verdict"), stack.get(f"{stack.exporter_url}/api/v1/findings")
            if document["verdict"] != last:
                say(f"{time.time() - begin:4.0f} s  {document['verdict']}")
        time.sleep(min(POLL_SECONDS, left))
    end, spent = time.time(), server.cpu_seconds(engine.SCHEDULER) - cpu
    sending.join()
    lines = server.log.read_text(encoding="utf-8", errors="replace").splitlines()
    notified = [
        (alert["labels"]["alertname"], round(at - begin, 1))
        for at, message in messages
        for alert in message["alerts"]
        if alert["status"] == "firing"
    ]
    return Side(measure(records, lines, warm, end, spent), document, notified)


def measure(
    records: Sequence[load.Record], log: Iterable[str], begin: float, end: float, cpu_seconds: float
) -> dict[str, float | None]:
    """Return the figures between two times, unix seconds; `log` are the server's lines, in UTC as it prints them.

    None where nothing happened to measure. Latencies are seconds of requests answered in that time, tokens those that
    reached a client in it. `tokens_per_cpu_second` divides by what the scheduler's process got of a core, so that other
    programs matter less; `cpu_share` is that part of a core. Retractions are counted by tokens: per minute a server
    that gets more of the CPU retracts more often.
    """
    seconds = end - begin
    tokens = sum(count for record in records for at, count in record.arrivals if begin <= at < end)
    answered = [r for r in records if r.is_answered and r.ended is not None and begin <= r.ended < end]
    latencies = [r.ended - r.sent for r in answered if r.ended is not None]
    firsts = [r.first - r.sent for r in records if r.first is not None and begin <= r.first < end]
    running, usage, queued, computed, cached, retractions = [], [], [], 0, 0, 0
    for line in log:
        if not begin <= _time(line) < end:
            continue
        if found := _DECODE.search(line):
            running.append(float(found[1]))
            usage.append(float(found[2]))
            queued.append(float(found[3]))
        elif found := _PREFILL.search(line):
            computed += int(found[1])
            cached += int(found[2])
        retractions += _RETRACTED in line
    return {
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / cpu_seconds if cpu_seconds else None,
        "latency_p50": quantile(latencies, 0.5),
        "latency_p99": quantile(latencies, 0.99),
        "first_token_p50": quantile(firsts, 0.5),
        "first_token_p99": quantile(firsts, 0.99),
        "retractions_per_million_tokens": 1e6 * retractions / tokens if tokens else None,
        "token_usage": _mean(usage),
        "running": _mean(running),
        "queued": _mean(queued),
        "cached_share": cached / (cached + computed) if cached + computed else None,
        "errors": sum(bool(r.error) or r.status not in {None, 200} for r in records),
        "cpu_share": cpu_seconds / seconds,
    }


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the value that `share` of all do not exceed; None of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _time(line: str) -> float:
    with suppress(ValueError):
        return timegm(time.strptime(line[:20], "[%Y-%m-%d %H:%M:%S"))
    return 0.0
