"""`python -m bench.fleet`: what a Prometheus needs for the rules and the Fleet board of a fleet, calm and in an
incident.

The targets' pages are those of exporters that watched a recording; a third of them retracts during the incident. Their
counters move. Measured over a window: series, memory, cores, seconds of the rules, queries of their texts, and the
board's queries one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
import yaml

from bench.processes import Exporter
from bench.server import LOOPBACK, answering
from bench.table import Table
from sglang_tuning_exporter.mixin import alerts
from sglang_tuning_exporter.recordings.demo import Process, free_port, program

BOARD = Path(__file__).parents[1] / "dashboards" / "sglang-tuning-fleet.json"
RULES = "alerts/rules/sglang-tuning.rules.yml"
EVERY = 15.0  # seconds between two scrapes, and two evaluations
GROWS_FOR = 300.0  # a counter of a page has grown to what it is in so many seconds
KEPT_SECONDS = 2.0  # how long a page is not written anew
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)$")
Samples = list[tuple[str, float, bool]]  # name with labels, value, whether it grows


def _get(url: str, **parameters: str) -> requests.Response:
    with requests.Session() as session:
        session.trust_env = False
        return session.get(url, params=parameters, timeout=60)


def served(recording: str, directory: Path, alert: str) -> Samples:
    """Return an exporter's page after half a minute of a recording, twelve times as fast, on which this alert alone is
    on.
    """
    log = directory / f"{recording}.server.log"
    log.touch()
    played = ("--speed", "12", "--loop", "--log-file", str(log))
    with Exporter(recording, *played, command="replay") as sglang:
        flags = ("--sglang-url", sglang.url, "--log-file", str(log), "--profile", "offline")
        with Exporter(*flags, "--threshold", "alert_wait=0.001") as exporter:
            end, page = time.monotonic() + 30, ""
            while time.monotonic() < end:
                time.sleep(1)
                page = exporter.get()
    counters = set(re.findall(r"^# TYPE (\S+) (?:counter|histogram)$", page, re.MULTILINE))
    samples = Samples()
    for name, labels, value in (found.groups("") for line in page.splitlines() if (found := _SAMPLE.match(line))):
        grows = bool({name, re.sub(r"_(?:bucket|sum|count)$", "", name)} & counters)
        shown = float(f'"{alert}"' in labels) if name == "sglang_tuning_alert" else float(value)
        samples += [(name + labels, shown, grows)] if value != "NaN" else []
    return samples


class Targets:
    """Every target's page: `/calm`, or `/third` of a server that retracts during the incident."""

    def __init__(self, calm: Samples, incident: Samples) -> None:
        self._pages, self._begun = {False: calm, True: incident}, time.monotonic()
        self._texts: dict[bool, tuple[float, bytes]] = {}
        self.is_incident = False

    def page(self, path: str) -> bytes:
        """Return a page that is hardly older than now."""
        which, now = self.is_incident and path == "/third", time.monotonic() - self._begun
        if now - self._texts.get(which, (-10.0, b""))[0] > KEPT_SECONDS:
            grown = 1 + now / GROWS_FOR
            lines = (f"{name} {value * grown if grows else value:g}\n" for name, value, grows in self._pages[which])
            self._texts[which] = now, "".join(lines).encode()
        return self._texts[which][1]


def over(url: str, seconds: float) -> dict[str, float]:
    """Return what a Prometheus says of itself over a window: series, memory, cores, seconds of all groups and of the
    slowest one.
    """

    def own() -> dict[str, float]:
        samples = map(_SAMPLE.match, _get(f"{url}/metrics").text.splitlines())
        return {found[1] + (found[2] or ""): float(found[3]) for found in samples if found}

    begin, first, polls = time.monotonic(), own(), []
    while time.monotonic() - begin < seconds:
        time.sleep(EVERY)
        polls.append(own())
    last, cpu = polls[-1], "process_cpu_seconds_total"
    groups = [key for key in last if key.startswith("prometheus_rule_group_last_duration_seconds")]
    means = [sum(poll.get(key, 0.0) for poll in polls) / len(polls) for key in groups]
    rules = [rule for group in _get(f"{url}/api/v1/rules").json()["data"]["groups"] for rule in group["rules"]]
    texts = [(" ".join(rule.get("annotations", {}).values()), len(rule.get("alerts", ()))) for rule in rules]
    return {
        "all": sum(means),
        "slowest": max(means),
        "cores": (last[cpu] - first[cpu]) / (time.monotonic() - begin),
        "memory": last["process_resident_memory_bytes"] / 1e9,
        "series": last["prometheus_tsdb_head_series"],
        "texts": sum(text.count("| query") * alerts for text, alerts in texts),
    }


def board(url: str) -> tuple[float, float]:
    """Return samples and seconds of every query of the board over ten minutes, asked one after the other."""
    samples, begin = 0.0, time.monotonic()
    for expr, instant in _queries(json.loads(BOARD.read_text())):
        now = time.time()
        span = {"time": f"{now}"} if instant else {"start": f"{now - 600}", "end": f"{now}", "step": "15"}
        answer = _get(f"{url}/api/v1/query{'' if instant else '_range'}", query=expr, stats="all", **span).json()
        if answer["status"] != "success":
            print(f"  not answered: {answer.get('error', '')[:120]}", file=sys.stderr)
            continue
        samples += answer["data"]["stats"]["samples"]["totalQueryableSamples"]
    return samples, time.monotonic() - begin


def _queries(board: Any) -> Iterator[tuple[str, bool]]:
    """Give each query of a board with its variables filled in, and whether it is instant."""
    if isinstance(board, dict):
        expr = board.get("expr")
        if isinstance(expr, str):
            text = re.sub(r"\$__(?:rate_)?interval", "1m", expr).replace("$__range", "10m")
            text = re.sub(r'="\$\w+"', '=~".*"', re.sub(r'=~"\$\w+(?::\w+)?"', '=~".*"', text))
            yield text, bool(board.get("instant"))
        board = list(board.values())
    for each in board if isinstance(board, list) else ():
        yield from _queries(each)


def measure(
    count: int, address: str, targets: Targets, directory: Path, *, warm: float, seconds: float
) -> Iterator[list[str]]:
    """Measure one fleet, calm and in an incident; give the rows of the table."""
    directory.mkdir()
    (directory / "rules.yml").write_text(alerts.files()[RULES])
    entries = [
        {
            "targets": [address],
            "labels": {"instance": f"gpu{number}:9741", "__metrics_path__": "/calm" if number % 3 else "/third"},
        }
        for number in range(count)
    ]
    configuration = {
        "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "sglang", "static_configs": entries}],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    place, path = f"{LOOPBACK}:{free_port()}", program("prometheus")
    assert path is not None, "prometheus is missing (Debian: apt install prometheus)"
    flags = (
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'tsdb'}",
        "--log.level=warn",
    )
    process = Process("prometheus", [path, *flags, f"--web.listen-address={place}"], directory / "prometheus.log")
    try:
        process.wait_until_ready(f"http://{place}/-/ready")
        for phase in ("calm", "incident"):
            targets.is_incident = phase == "incident"
            time.sleep(warm if phase == "calm" else min(warm, 60.0))
            found, (samples, lasted) = over(f"http://{place}", seconds), board(f"http://{place}")
            row = [
                f"{count} {phase}",
                f"{found['series'] / 1e6:.2f} M",
                f"{found['memory']:.1f} GB",
                f"{found['cores']:.2f}",
            ]
            row += [f"{found['all']:.2f} · {found['slowest']:.2f}", f"{found['texts']:.0f}"]
            row += [f"{samples / 1e6:.2f} M", f"{lasted:.1f} s"]
            print(f"  {' | '.join(row)}", file=sys.stderr)
            yield row
    finally:
        process.stop()


def main() -> int:
    """Measure every fleet, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet")
    parser.add_argument("--targets", default="100,300,1000")
    parser.add_argument(
        "--warm",
        type=float,
        default=900.0,
        help="seconds before the first window (default 900: the longest of the rules)",
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="of a window (default 120)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory, load = Path(name), os.getloadavg()
        # Of the incident that of its verdict alone: its consequences do not begin.
        targets = Targets(served("steady", directory, ""), served("retract", directory, "retracting_too_often"))
        page = targets.page("/calm").splitlines()
        how = (
            f"{os.cpu_count()} cores, load {load[0]:.1f} before it began;"
            f" {sum(line.startswith(b'sglang_tuning_') for line in page)} series of ours, {len(page)} lines a page;"
            f" {given.warm:.0f} s before the first window of {given.seconds:.0f} s."
        )
        columns = [
            "targets",
            "series",
            "memory",
            "cores",
            "rules: all · slowest group, s of each 15",
            "queries of texts",
        ]
        table = Table("Rules and boards of a fleet", how, [*columns, "Fleet: samples", "Fleet: one after the other"])
        with answering(targets.page) as url:
            for count in map(int, given.targets.split(",")):
                address, place = url.removeprefix("http://"), directory / str(count)
                table.rows += measure(count, address, targets, place, warm=given.warm, seconds=given.seconds)
    print(table.text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
