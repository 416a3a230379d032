"""A real Prometheus that is asked which of many pages it refuses, and promtool, which has another parser."""

from __future__ import annotations

import json
import re
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from fuzz.promtool import promtool
from sglang_tuning_exporter.recordings.stack import LOOPBACK, Process, free_port, program

CLASSIC = "text/plain; version=0.0.4; charset=utf-8"
# Prometheus spreads the pages of a batch over the interval.
_INTERVAL_SECONDS = 5
_LATEST_SECONDS = 120.0
# promtool checks many pages at once, each with its own names; its messages name the line.
_NAMES = re.compile(r"^(# (?:HELP|TYPE) )?(sglang:|sglang_tuning_)", re.MULTILINE)
_LINE = re.compile(r"in line (\d+)")


class _Pages(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def handle_error(self, *_: object) -> None:
        """Log nothing: Prometheus closes the connection when a page is late, and scrapes again."""


class Prometheus:
    """A running Prometheus; `refused` makes it scrape pages."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._batch = directory, 0
        self._pages: Sequence[bytes] = ()
        self._server = _Pages((LOOPBACK, 0), self._handler())
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://{LOOPBACK}:{free_port()}"
        self._configure([])
        self._process = Process(
            "prometheus",
            [
                str(program("prometheus")), f"--config.file={directory / 'prometheus.yml'}", f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={self.url.removeprefix('http://')}", "--web.enable-lifecycle", "--log.level=error",
            ],
            directory / "prometheus.log",
        )  # fmt: skip
        try:
            self._wait(lambda: self._get("/-/ready") is not None)
        except BaseException:
            self.stop()
            raise

    def refused(self, pages: Sequence[bytes]) -> dict[int, str]:
        """Scrape each page once. Gives the places of those that were refused, with Prometheus's words."""
        self._batch += 1
        self._pages = pages
        self._configure([f"/{self._batch}/{place}" for place in range(len(pages))])
        request = urllib.request.Request(f"{self.url}/-/reload", method="POST")
        with urllib.request.urlopen(request, timeout=30):
            pass
        found: dict[int, str] = {}

        def all_scraped() -> bool:
            targets = json.loads(self._get("/api/v1/targets?state=active") or b"{}")["data"]["activeTargets"]
            answers = {
                each["discoveredLabels"]["__metrics_path__"]: (each["health"], each["lastError"]) for each in targets
            }
            known = [answers.get(f"/{self._batch}/{place}", ("unknown", "")) for place in range(len(pages))]
            found.clear()
            found.update({place: error for place, (health, error) in enumerate(known) if health == "down"})
            # A busy machine: the page did not get there in time, and is scraped again.
            return not any(health == "unknown" or error.startswith("Get ") for health, error in known)

        self._wait(all_scraped)
        return found

    def stop(self) -> None:
        """End it."""
        self._process.stop()
        self._server.shutdown()
        self._server.server_close()

    def _configure(self, paths: list[str]) -> None:
        target = f"{LOOPBACK}:{self._server.server_address[1]}"
        jobs: list[dict[str, Any]] = [
            {"job_name": path, "metrics_path": path, "static_configs": [{"targets": [target]}]} for path in paths
        ]
        document = {
            "global": {
                "scrape_interval": f"{_INTERVAL_SECONDS}s",
                "scrape_timeout": f"{_INTERVAL_SECONDS}s",
            },
            "scrape_configs": jobs,
        }
        (self._directory / "prometheus.yml").write_text(yaml.safe_dump(document))

    def _wait(self, done: Any) -> None:
        deadline = time.monotonic() + _LATEST_SECONDS
        while not done():
            if time.monotonic() > deadline:
                message = "Prometheus did not do it in time"
                raise TimeoutError(message)
            time.sleep(0.1)

    def _get(self, path: str) -> bytes | None:
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as answer:
                return bytes(answer.read())
        except OSError:
            return None

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                _, batch, place = self.path.split("/")
                body = owner._pages[int(place)] if int(batch) == owner._batch else b""
                self.send_response(200)
                self.send_header("Content-Type", CLASSIC)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        return Handler


@contextmanager
def prometheus() -> Iterator[Prometheus]:
    """Run one in a directory that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="fuzz-prometheus-") as directory:
        running = Prometheus(Path(directory))
        try:
            yield running
        finally:
            running.stop()


def unreadable(pages: Sequence[bytes]) -> dict[int, str]:
    """Give the places of the pages that promtool cannot read, with its message; a page with mere lint warnings is not among them."""
    found: dict[int, str] = {}
    while True:
        lines = [
            (place, line)
            for place, page in enumerate(pages)
            if place not in found
            for line in _NAMES.sub(rf"\1\2p{place}_", page.decode()).split("\n")
        ]
        said = promtool("check", "metrics", given="".join(f"{line}\n" for _, line in lines)).words
        if "error while linting" not in said:
            return found
        words = next(line for line in said.splitlines() if "error while linting" in line)
        found_line = _LINE.search(words)
        assert found_line is not None, words
        found[lines[int(found_line[1]) - 1][0]] = words
