"""Judge captures with the exporter on the path: for each line PROFILE CAPTURE of standard input it prints one JSON object.

The exporter's sidecar runs with a simulated clock: the log file grows as it did, and requests get the recorded answers. An older revision is
judged in the same way: set PYTHONPATH to its folder. This file imports nothing else of the project. Each capture has a process of its own,
forked after the exporter is imported.
"""

# ruff: noqa: E402, SLF001 - the clock is replaced before the exporter takes it, and its sidecar is driven step by step

from __future__ import annotations

import calendar
import contextlib
import gzip
import inspect
import io
import json
import os
import re
import sys
import tempfile
import time
import traceback
from bisect import bisect_right
from pathlib import Path
from typing import Any

_NOW = [0.0]
time.time = lambda: _NOW[0]
time.monotonic = lambda: _NOW[0]
time.sleep = lambda _seconds: None

from sglang_tuning_exporter.cli import main as command
from sglang_tuning_exporter.config import Config

try:
    from sglang_tuning_exporter.config.values import Address
except ImportError:  # a revision in which `config` was one module
    from sglang_tuning_exporter.config import Address  # type: ignore[attr-defined]
try:
    from sglang_tuning_exporter.collect import scrape
    from sglang_tuning_exporter.collect.sidecar import Sidecar
except ImportError:  # a revision from before the package had rooms
    from sglang_tuning_exporter.sources import scrape  # type: ignore[import-not-found,no-redef]
    from sglang_tuning_exporter.watcher import Watcher as Sidecar  # type: ignore[import-not-found,no-redef]

STEP_SECONDS = 0.5
SCRAPE_SECONDS = 5.0
JUDGE_SECONDS = 1.0
SOURCES = ("both", "log", "metrics")
_STAMP = re.compile(rb"^\[(\d{4})-(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)")
_REASONS = {"TimeoutError": "timeout", "ClientConnectorError": "connection_refused", "503": "not_ready"}


class Past:
    """The recorded log lines and answers of a server, by time."""

    def __init__(self, folder: Path) -> None:
        self.events = [json.loads(line) for line in _read(folder / "events.jsonl").decode().splitlines()]
        self.begin = next(event["t"] for event in self.events if event["event"] == "start")
        self.ready = next(event["t"] for event in self.events if event["event"] == "ready")
        self.end = max(event["t"] for event in self.events if event["event"] in {"load_end", "ready", "exit"})
        self.lines = _lines(_read(folder / "server.log"), self.begin)
        self.pages = {
            int(path.name.split("-")[2].split(".")[0]) / 1000: path for path in folder.glob("metrics-*.prom*")
        }
        self.page_times = sorted(self.pages)
        self.answers = _answers(folder / "scrapes.tsv") or [(at, "200") for at in self.page_times]
        self.health = _answers(folder / "health.tsv")
        self.info = _read(folder / "server_info.json").decode() or None
        loads = {int(p.stem.split("-")[1]) / 1000: p for p in folder.glob("v1_loads-*.json")}
        self.loads = [(at, path.read_text(encoding="utf-8")) for at, path in sorted(loads.items())]
        self.end = max(self.end, self.answers[-1][0] if self.answers else 0.0)

    def has_news(self, since: float) -> bool:
        """Whether a scrape now would get another page than at `since`, or none."""
        place = bisect_right(self.answers, _NOW[0], key=lambda row: row[0])
        if place == 0 or self.answers[place - 1][1] != "200":
            return True
        return bisect_right(self.page_times, _NOW[0]) > bisect_right(self.page_times, since)

    def hangs(self) -> bool:
        """Whether one of its processes is stopped now."""
        signals = [
            event["event"] for event in self.events if event["event"].startswith("SIG") and event["t"] <= _NOW[0]
        ]
        return bool(signals) and signals[-1].startswith("SIGSTOP")

    def answer(self, path: str, timeout: float) -> str:
        """Return the recorded answer of this time. Raises `ScrapeError` as the client would."""
        now = _NOW[0]
        if path == "/health_generate" and self.hangs():  # nobody asked then; no token can have come
            _NOW[0] += timeout
            raise scrape.ScrapeError("timeout", "a process is stopped")
        status = _nearest(self.answers, now)
        if status != "200":
            raise scrape.ScrapeError(_REASONS.get(status, "unreachable"), f"as it was then: {status}")  # type: ignore[arg-type]  # reasons of the exporter
        if path == "/metrics":
            return _read(self.pages[self.page_times[max(0, bisect_right(self.page_times, now) - 1)]]).decode()
        if path in {"/health", "/health_generate"}:
            place = bisect_right(self.health, now, key=lambda row: row[0])
            status = self.health[place - 1][1] if place else "200"
            if status == "200":
                return ""
            raise scrape.ScrapeError(_REASONS.get(status, "unreachable"), f"as it was then: {status}")  # type: ignore[arg-type]
        if path in {"/server_info", "/get_server_info"} and self.info:
            return self.info
        if path == "/v1/loads" and self.loads:
            return self.loads[max(0, bisect_right(self.loads, now, key=lambda row: row[0]) - 1)][1]
        raise scrape.ScrapeError("metrics_disabled", "404")


def _read(path: Path) -> bytes:
    """Return the content of a file, packed or not; empty if it is missing."""
    packed = path.with_name(path.name + ".gz")
    if path.suffix == ".gz" or (packed.exists() and not path.exists()):
        return gzip.decompress((path if path.suffix == ".gz" else packed).read_bytes())
    return path.read_bytes() if path.exists() else b""


def _nearest(answers: list[tuple[float, str]], now: float) -> str:
    """Return the answer nearest in time."""
    place = bisect_right(answers, now, key=lambda row: row[0])
    near = answers[max(0, place - 1) : place + 1]
    at, status = min(near, key=lambda row: abs(row[0] - now)) if near else (now, "ClientConnectorError")
    return "ClientConnectorError" if not place and at - now > SCRAPE_SECONDS else status


def _answers(path: Path) -> list[tuple[float, str]]:
    rows = [row.split("\t") for row in _read(path).decode().splitlines()]
    return [(float(at), status) for at, status, _ in rows]


def _lines(text: bytes, begin: float) -> list[tuple[float, bytes]]:
    """Return each line with its time: the lines of a printed second are spread evenly; a line without a time follows the one before."""
    found: list[tuple[float, bytes]] = []
    second = begin
    for line in text.splitlines(keepends=True):
        match = _STAMP.match(line)
        if match:
            second = max(second, float(calendar.timegm((*map(int, match.groups()), 0, 0, 0))))
        found.append((second, line))
    numbers: dict[float, int] = {}
    places = []
    for at, line in found:
        numbers[at] = numbers.get(at, 0) + 1
        places.append((at, numbers[at], line))
    return [(at + (place - 0.5) / numbers[at], line) for at, place, line in places]


def _read_log(sidecar: Sidecar) -> None:
    """Read the log as the judged commit does: older ones take it as an argument."""
    read = sidecar._read_log
    read(*(sidecar.log,)[: len(inspect.signature(read).parameters)])


def watch(past: Past, profile: str, sources: str) -> dict[str, Any]:
    """Let the exporter watch the recording; return its judgement every second, with seconds since the server was ready."""
    scrape.Client._get = lambda _self, url, timeout, *_more: past.answer("/" + url.split("/", 3)[3], timeout)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory(prefix="rejudge-") as scratch:
        log = Path(scratch) / "server.log"
        log.touch()
        _NOW[0] = past.begin
        config = Config(
            sglang_url=None if sources == "log" else "http://127.0.0.1:1",
            log_file=() if sources == "metrics" else (str(log),),
            profile=profile,
            listen_address=Address("127.0.0.1", 0),
            scrape_timeout=5.0,
            metrics_path="/metrics",
            passthrough=False,
            from_start=False,
            api_key_file=None,
            state_file=None,
        )
        sidecar = Sidecar(config)
        if sidecar.log is not None:
            _read_log(sidecar)
        data, written, scraped, judged = [], 0, 0.0, 0.0
        with log.open("ab", buffering=0) as growing:
            while _NOW[0] < past.end + 1.0:
                _NOW[0] += STEP_SECONDS
                until = bisect_right(past.lines, _NOW[0], lo=written, key=lambda line: line[0])
                growing.write(b"".join(line for _, line in past.lines[written:until]))
                written = until
                if sidecar.log is not None:
                    _read_log(sidecar)
                if sidecar._scraper is not None and _NOW[0] - scraped >= SCRAPE_SECONDS and past.has_news(scraped):
                    scraped = _NOW[0]
                    sidecar.scrape(5.0)
                    sidecar._ask_server_info()
                if sidecar._scraper is not None and hasattr(sidecar, "_check_health"):
                    sidecar._check_health()
                if _NOW[0] - judged >= JUDGE_SECONDS:
                    judged = _NOW[0]
                    with sidecar.view() as now:
                        data.append(
                            {
                                "at": round(_NOW[0] - past.ready, 1),
                                **_judgement(sidecar.judge(now)),
                            }
                        )
                    if sources == "both":
                        data[-1]["scaling"] = _scaling(sidecar)
        sidecar.stop()
    return {"times": data}


def _scaling(sidecar: Any) -> dict[str, float]:
    """Read the gauges for scaling off the exporter's page, as a scraper would; a gauge that is absent is left out."""
    try:
        from sglang_tuning_exporter.serve.metrics import collect  # noqa: PLC0415 - older revisions lack it
        from sglang_tuning_exporter.serve.metrics.families import text_format  # noqa: PLC0415 - as above
    except ImportError:
        return {}
    samples = (line.split(" ") for line in text_format(collect(sidecar)).splitlines())
    wanted = ("sglang_tuning_capacity_ratio", "sglang_tuning_scale_out_helps")
    return {sample[0]: float(sample[1]) for sample in samples if sample[0] in wanted}


def _judgement(judgement: Any) -> dict[str, Any]:
    return {
        "verdict": judgement.verdict,
        "findings": [
            {
                "diagnosis": found.diagnosis.id,
                "alert": str(getattr(found.diagnosis, "alert", "") or ""),
                "severity": found.diagnosis.severity,
                "sentence": found.sentence,
                "action": str(getattr(getattr(found.diagnosis, "turn", None), "action", "")),
                "advice": [
                    {
                        name: getattr(advice, name, None)
                        for name in (
                            "flag",
                            "arg",
                            "current",
                            "suggested",
                            "suggestion",
                            "direction",
                            "is_switch",
                            "why",
                        )
                    }
                    for advice in found.advice
                ],
            }
            for found in judgement.findings
        ],
    }


def report(folder: Path, profile: str) -> dict[str, Any]:
    """Return the offline report on the log, as its command prints it."""
    log = next(path for path in (folder / "server.log", folder / "server.log.gz") if path.exists())
    printed, said = io.TextIOWrapper(io.BytesIO()), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        status = command(["report", "--format", "json", "--profile", profile, str(log)])
    if status not in {0, 1}:
        return {"verdict": f"exit {status}: {said.getvalue()[-200:]}", "findings": [], "alarms": []}
    printed.seek(0)
    data = json.load(printed)
    return {name: data.get(name) for name in ("verdict", "findings", "alarms", "command")}


def judge(folder: Path, profile: str) -> dict[str, Any]:
    """Judge the capture from each source."""
    past = Past(folder)
    data: dict[str, Any] = {sources: watch(past, profile, sources) for sources in SOURCES}
    data["report"] = report(folder, profile)
    data["events"] = [[event["event"], round(event["t"] - past.ready, 1)] for event in past.events]
    return data


def main() -> None:
    """Answer each line; an error is an object with `error`."""
    for line in sys.stdin:
        profile, folder = line.rstrip("\n").split(" ", 1)
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the exporter's log
            try:
                answer = judge(Path(folder), profile)
            except Exception:  # noqa: BLE001 - whatever an older revision raises
                answer = {"error": traceback.format_exc()[-600:]}
            print(json.dumps(answer), flush=True)
            os._exit(0)
        if status := os.waitpid(child, 0)[1]:  # killed: whoever asked waits for a line
            print(json.dumps({"error": f"its process ended with wait status {status}"}), flush=True)


if __name__ == "__main__":
    main()
