"""`python -m bench.fleet [--targets 100,300,1000] [--warm SECONDS] [--seconds SECONDS] [--old REVISION]`: what rules and the Fleet board cost.

A real Prometheus scrapes so many targets every 15 s and evaluates this tree's rules beside those of an older revision. Every target has the
page of both exporters, each as its command line serves it of a replayed recording, and its counters move. Calm first; then a third of the
servers retracts. Seconds of rule groups are those that Prometheus measures itself, means over the window.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import requests
import yaml

from bench.server import LOOPBACK
from bench.table import Table
from sglang_tuning_exporter.mixin import alerts
from sglang_tuning_exporter.recordings.stack import Process, free_port, program

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).parents[1]
RULES = "alerts/rules/sglang-tuning.rules.yml"
OLD = "72e7a2c5"  # the last revision whose rules judge in PromQL
EVERY = 15.0  # seconds between two scrapes, and two evaluations
GROWS_FOR = 300.0  # a counter of a page has grown to what it is in so many seconds
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)$")


def _get(url: str, **parameters: str) -> requests.Response:
    with requests.Session() as session:
        session.trust_env = False
        return session.get(url, params=parameters, timeout=60)


@contextmanager
def _running(name: str, directory: Path, *arguments: str, tree: Path | None = None) -> Iterator[str]:
    """Run a command of the program, of another tree where one is given; yield its address."""
    address = f"{LOOPBACK}:{free_port()}"
    environment = {**os.environ, **({} if tree is None else {"PYTHONPATH": str(tree / "exporter")})}
    command = [sys.executable, "-m", "sglang_tuning_exporter", name, *arguments, "--listen-address", address]
    with (directory / f"{name}.log").open("wb") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        yield f"http://{address}"
    finally:
        child.terminate()
        child.wait()


def served(recording: str, directory: Path, tree: Path | None) -> str:
    """Return the page that an exporter has after half a minute of a recording, twelve times as fast, its alerts begun."""
    log = directory / f"{recording}.server.log"
    log.unlink(missing_ok=True)
    with _running("replay", directory, recording, "--speed", "12", "--loop", "--log-file", str(log)) as sglang:
        time.sleep(2)
        flags = ["--sglang-url", sglang, "--log-file", str(log), "--profile", "offline"]
        wait = [] if tree is not None else ["--threshold", "alert_wait=0.001"]
        with _running("serve", directory, *flags, *wait, tree=tree) as exporter:
            end, page = time.monotonic() + 30, ""
            while time.monotonic() < end:
                time.sleep(1)
                try:
                    page = _get(f"{exporter}/metrics").text
                except requests.RequestException:
                    continue
    return page


def _with_alert(page: str, diagnosis: str) -> str:
    """Return a page on which the alert of this diagnosis alone is on."""
    return re.sub(
        r'^(sglang_tuning_alert\{diagnosis="(\w+)"\}) \S+$',
        lambda found: f"{found[1]} {float(found[2] == diagnosis)}",
        page,
        flags=re.MULTILINE,
    )


class Page:
    """Both exporters' series of one server; counters grow with time."""

    def __init__(self, *pages: str) -> None:
        seen: set[tuple[str, str]] = set()
        self._parts: list[tuple[str, float, bool]] = []
        counters = {
            name for page in pages for name in re.findall(r"^# TYPE (\S+) (?:counter|histogram)$", page, re.MULTILINE)
        }
        for line in (line for page in pages for line in page.splitlines()):
            found = _SAMPLE.match(line)
            if found is None or (found[1], found[2] or "") in seen or found[3] == "NaN":
                continue
            seen.add((found[1], found[2] or ""))
            base = re.sub(r"_(?:bucket|sum|count)$", "", found[1])
            self._parts.append((f"{found[1]}{found[2] or ''}", float(found[3]), bool({base, found[1]} & counters)))
        self.lines = len(self._parts)
        self.ours = sum(name.startswith("sglang_tuning_") for name, *_ in self._parts)

    def text(self, seconds: float) -> bytes:
        """Return the page so many seconds after the beginning."""
        grown = 1 + seconds / GROWS_FOR
        return "".join(f"{name} {value * grown if moves else value:g}\n" for name, value, moves in self._parts).encode()


class Targets:
    """One port that answers for every target: `/calm`, or `/third` of a server that retracts during the incident."""

    def __init__(self, calm: Page, incident: Page) -> None:
        self._pages, self._begun = {"calm": calm, "incident": incident}, time.monotonic()
        self._texts: dict[str, tuple[float, bytes]] = {}
        self.is_incident = False
        targets = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = targets.text("incident" if targets.is_incident and self.path == "/third" else "calm")
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with suppress(OSError):  # the scrape took too long
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = f"{LOOPBACK}:{self._server.server_address[1]}"

    def text(self, name: str) -> bytes:
        """Return a page that is at most two seconds old."""
        now = time.monotonic() - self._begun
        at, text = self._texts.get(name, (-10.0, b""))
        if now - at > 2:
            text = self._pages[name].text(now)
            self._texts[name] = (now, text)
        return text

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()


def _own(page: str) -> dict[str, float]:
    """Return the series of Prometheus's own page."""
    return {
        f"{found[1]}{found[2] or ''}": float(found[3]) for line in page.splitlines() if (found := _SAMPLE.match(line))
    }


class Watched:
    """What a Prometheus says of itself over a window."""

    def __init__(self, url: str, files: Mapping[str, str]) -> None:
        self._url, self._files = url, files

    def over(self, seconds: float) -> dict[str, float]:
        """Return series, memory, cores, and seconds of all groups and of the slowest one, by file."""
        begin, first = time.monotonic(), _own(_get(f"{self._url}/metrics").text)
        polls = []
        while time.monotonic() - begin < seconds:
            time.sleep(EVERY)
            polls.append(_own(_get(f"{self._url}/metrics").text))
        last, found = polls[-1], dict[str, float]()
        for name, file in self._files.items():
            groups = [
                key for key in last if key.startswith("prometheus_rule_group_last_duration_seconds") and file in key
            ]
            means = {key: sum(poll.get(key, 0.0) for poll in polls) / len(polls) for key in groups}
            found |= {f"{name} all": sum(means.values()), f"{name} slowest": max(means.values(), default=0.0)}
        cpu = "process_cpu_seconds_total"
        found["cores"] = (last[cpu] - first[cpu]) / (time.monotonic() - begin)
        found["memory"] = last["process_resident_memory_bytes"] / 1e9
        found["series"] = last["prometheus_tsdb_head_series"]
        for group in _get(f"{self._url}/api/v1/rules").json()["data"]["groups"]:
            name = next((name for name, file in self._files.items() if file in group["file"]), "")
            for rule in group["rules"]:
                queries = " ".join(rule.get("annotations", {}).values()).count("| query")
                found[f"{name} texts"] = found.get(f"{name} texts", 0) + queries * len(rule.get("alerts", ()))
        return found

    def board(self, path: Path) -> tuple[float, float]:
        """Return samples and seconds of every query of a board over ten minutes, asked one after the other."""
        samples, begin = 0.0, time.monotonic()
        for expr, instant in _queries(json.loads(path.read_text())):
            now = time.time()
            span = {"time": f"{now}"} if instant else {"start": f"{now - 600}", "end": f"{now}", "step": "15"}
            kind = "query" if instant else "query_range"
            try:
                answer = _get(f"{self._url}/api/v1/{kind}", query=expr, stats="all", **span).json()
            except requests.RequestException as error:
                answer = {"status": "error", "error": str(error)}
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
            yield (
                re.sub(r'="\$\w+"', '=~".*"', re.sub(r'=~"\$\w+(?::\w+)?"', '=~".*"', text)),
                bool(board.get("instant")),
            )
        board = list(board.values())
    for each in board if isinstance(board, list) else ():
        yield from _queries(each)


def measure(
    count: int, targets: Targets, old: str | None, directory: Path, *, warm: float, seconds: float
) -> list[list[str]]:
    """Measure one fleet, calm and in an incident; return the rows of the table."""
    directory.mkdir()
    files = {"new": "new.rules.yml", **({} if old is None else {"old": "old.rules.yml"})}
    (directory / "new.rules.yml").write_text(alerts.files()[RULES])
    if old is not None:
        (directory / "old.rules.yml").write_text(old)
    entries = [
        {
            "targets": [targets.address],
            "labels": {"instance": f"gpu{number}:9741", "__metrics_path__": "/calm" if number % 3 else "/third"},
        }
        for number in range(count)
    ]
    (directory / "targets.json").write_text(json.dumps(entries))
    configuration = {
        "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
        "rule_files": list(files.values()),
        "scrape_configs": [{"job_name": "sglang", "file_sd_configs": [{"files": [str(directory / "targets.json")]}]}],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    address = f"{LOOPBACK}:{free_port()}"
    flags = [
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'tsdb'}",
        "--log.level=warn",
    ]
    path = program("prometheus")
    assert path is not None, "prometheus is missing (Debian: apt install prometheus)"
    process = Process("prometheus", [path, *flags, f"--web.listen-address={address}"], directory / "prometheus.log")
    rows, watched = list[list[str]](), Watched(f"http://{address}", files)
    try:
        process.wait_until_ready(f"http://{address}/-/ready")
        for phase in ("calm", "incident"):
            targets.is_incident = phase == "incident"
            time.sleep(warm if phase == "calm" else min(warm, 60.0))
            found = watched.over(seconds)
            samples, lasted = watched.board(ROOT / "dashboards" / "sglang-tuning-fleet.json")
            rows.append(
                [
                    f"{count} {phase}", f"{found['series'] / 1e6:.2f} M", f"{found['memory']:.1f} GB", f"{found['cores']:.2f}",
                    *(f"{found[f'{name} all']:.2f} · {found[f'{name} slowest']:.2f}" for name in files),
                    *(f"{found.get(f'{name} texts', 0):.0f}" for name in files), f"{samples / 1e6:.2f} M", f"{lasted:.1f} s",
                ]
            )  # fmt: skip
            print(f"  {' | '.join(rows[-1])}", file=sys.stderr)
    finally:
        process.stop()
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
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
    parser.add_argument("--old", default=OLD, help=f"revision of the older rules and exporter, or none (default {OLD})")
    given = parser.parse_args(arguments)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tree, old = None, None
        if given.old != "none":
            tree = directory / "old"
            tree.mkdir()
            archive = subprocess.run(
                ["git", "archive", given.old, "exporter"], cwd=ROOT, capture_output=True, check=True
            )
            subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
            shown = subprocess.run(
                ["git", "show", f"{given.old}:{RULES}"], cwd=ROOT, capture_output=True, text=True, check=True
            )
            old = shown.stdout
        pages = {}
        for recording in ("steady", "retract"):
            both = [served(recording, directory, None), *([] if tree is None else [served(recording, directory, tree)])]
            # Calm is without an alert; a server of the incident has that of its verdict alone, as one whose consequences do not begin.
            kept = {"steady": "", "retract": "retracting_too_often"}[recording]
            pages[recording] = Page(_with_alert(both[0], kept), *both[1:])
        own = Page(served("steady", directory, None))
        targets = Targets(pages["steady"], pages["retract"])
        stack.callback(targets.close)
        names = ("new", *(() if old is None else ("old",)))
        columns = [
            "targets", "series", "memory", "cores", *(f"{name} rules: all · slowest group, s of each 15" for name in names),
            *(f"{name}: queries of texts" for name in names), "Fleet: samples", "Fleet: one after the other",
        ]  # fmt: skip
        load = os.getloadavg()
        how = (
            f"{os.cpu_count()} cores, load {load[0]:.1f} before it began; {own.ours} series of ours, {own.lines} lines a page"
            f" ({pages['steady'].lines} with those of {given.old}); {given.warm:.0f} s before the first window of {given.seconds:.0f} s."
        )
        table = Table("Rules and boards of a fleet", how, columns)
        for count in map(int, given.targets.split(",")):
            table.rows += measure(count, targets, old, directory / str(count), warm=given.warm, seconds=given.seconds)
    print(table.text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
