"""Imitated servers: any page from this process, and an SGLang that answers at a constant cost from its own (`python -m
bench.server RANKS`).
"""

from __future__ import annotations

import gzip
import re
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOOPBACK = "127.0.0.1"
RECORDED = Path(__file__).parent.parent / "exporter" / "sglang_tuning_exporter" / "recordings" / "steady"
_RANK, _DP_RANK = re.compile(r'\btp_rank="\d+"'), re.compile(r'\bdp_rank="\d+",?')
_COUNTERS = re.compile(r"^(sglang:(?:generation_tokens|realtime_tokens)_total\S* )(\S+)$", re.MULTILINE)


@contextmanager
def answering(page: Callable[[str], bytes]) -> Iterator[str]:
    """Answer with the page of each path on a free port; return its address."""

    class Handler(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True  # head and body are two packets

        def do_GET(self) -> None:
            body = page(self.path)
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(OSError):  # of a client that left
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer((LOOPBACK, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{LOOPBACK}:{server.server_address[1]}"
        server.shutdown()


def page(ranks: int) -> str:
    """Return a recorded page; for more than one rank with every series of a scheduler once for each, as DP attention
    prints it.
    """
    recorded = gzip.decompress(max(RECORDED.glob("metrics-*.prom.gz")).read_bytes()).decode()
    if ranks == 1:
        return recorded
    lines: list[str] = []
    for line in recorded.splitlines():
        copies = range(ranks) if line.startswith("sglang:") and _RANK.search(line) else ()
        plain = _DP_RANK.sub("", line)
        lines += [_RANK.sub(f'tp_rank="{rank}",dp_rank="{rank}"', plain) for rank in copies] or [line]
    return "\n".join(lines) + "\n"


def _answer(body: bytes, content_type: str, status: str = "200 OK") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode() + body


def _pages(ranks: int) -> list[bytes]:
    """Return two pages of a server at work: a page that never changes would be read at less cost."""
    text = page(ranks)
    moved = _COUNTERS.sub(lambda match: f"{match[1]}{float(match[2]) + 7}", text)
    return [_answer(each.encode(), "text/plain; version=0.0.4; charset=utf-8") for each in (text, moved)]


def serve(ranks: int) -> None:
    """Answer one connection after the other until killed; the first line of the output is the port."""
    pages = _pages(ranks)
    info = _answer(gzip.decompress((RECORDED / "server_info.json.gz").read_bytes()), "application/json")
    missing = _answer(b"{}", "application/json", "404 Not Found")
    listener = socket.create_server((LOOPBACK, 0), backlog=64)
    print(listener.getsockname()[1], flush=True)
    asked = 0
    while True:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head and (piece := connection.recv(65536)):
                head += piece
            path = head.split(b" ", 2)[1] if head.count(b" ") > 1 else b""
            asked += path == b"/metrics"
            connection.sendall({b"/metrics": pages[asked % 2], b"/server_info": info}.get(path, missing))


@contextmanager
def running(ranks: int) -> Iterator[str]:
    """Start such a server on a free port; return its address."""
    process = subprocess.Popen([sys.executable, "-m", "bench.server", str(ranks)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://{LOOPBACK}:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
