"""An SGLang for `faults.ServerProcess`: `faults_child.py HOST PORT DIRECTORY` answers GET /metrics with the file `metrics`."""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        file = Path(sys.argv[3]) / self.path.strip("/").replace("/", "_")
        body = file.read_bytes() if file.is_file() else b"{}"
        with suppress(ConnectionError):
            self.send_response(200 if file.is_file() else 404)
            self.send_header("Content-Type", "text/plain" if self.path == "/metrics" else "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass


class Server(ThreadingHTTPServer):
    address_family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET


if __name__ == "__main__":
    Server((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
