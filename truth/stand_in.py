"""SGLang as a recording has it: an HTTP server on loopback that answers, refuses or hangs as the server did at that
time.
"""

from __future__ import annotations

import http.client
import select
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from truth.recording import REFUSES, Page


def get(port: int, path: str) -> str:
    """Ask the exporter as a Prometheus does."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", path, headers={"X-Prometheus-Scrape-Timeout-Seconds": "5"})
    return connection.getresponse().read().decode()


class StandIn:
    """Answers on `port` what the page of that path says at `now()`.

    Where it hangs it calls `hang` with its client's port, and waits until that leaves.
    """

    def __init__(
        self, pages: Iterable[Page], now: Callable[[], float], hang: Callable[[int], object] | None = None
    ) -> None:
        self.now, self.hang = now, hang
        self.pages: dict[str, list[Page]] = {}
        for page in sorted(pages, key=lambda page: page.at):
            self.pages.setdefault(page.path, []).append(page)
        self.server: ThreadingHTTPServer | None = None
        self.port = 0
        self.follow()

    def answer(self, path: str) -> tuple[int | str, str]:
        """Return status and text as of now."""
        rows = self.pages.get(path.partition("?")[0], [])
        place = bisect_right(rows, self.now(), key=lambda page: page.at)
        return (rows[place - 1].status, rows[place - 1].text) if place else (REFUSES if path == "/metrics" else 404, "")

    def follow(self) -> None:
        """Listen, or not, as the server does now; the port is taken at the first call."""
        wanted = self.answer("/metrics")[0] != REFUSES
        if self.server is not None and not wanted:
            self.server.shutdown()
            self.server.server_close()
            self.server = None
        elif self.server is None and (wanted or not self.port):
            handler = type("Handler", (_Handler,), {"stand_in": self})
            self.server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
            self.port = self.server.server_address[1]
            threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
            self.follow()


class _Handler(BaseHTTPRequestHandler):
    stand_in: StandIn

    def do_GET(self) -> None:
        status, text = self.stand_in.answer(self.path)
        if isinstance(status, str):
            if self.stand_in.hang is not None:
                self.stand_in.hang(self.client_address[1])
            select.select([self.connection], [], [], 60.0)
            return
        with suppress(ConnectionError):  # of a client that left
            self._send(status, text)

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4" if self.path == "/metrics" else "application/json")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""
