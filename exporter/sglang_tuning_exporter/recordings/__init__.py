"""Recorded servers: record, scrub, replay, and the whole chain on loopback. Each is loaded by its own command.

Here is what replayed servers and Alertmanager's webhook share: an HTTP server whose one function answers every request,
and the end by a signal.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

from sglang_tuning_exporter.config.values import joined
from sglang_tuning_exporter.serve.process import bind

MOST_BODY_BYTES = 4 << 20
MOST_THREADS = 32  # of connections that are answered: Alertmanager has one for each group that it notifies at once
Answer: TypeAlias = "tuple[int, str, bytes]"  # status, content type, body
# A wildcard address is for listening, not for connecting.
_REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - translated away, not bound


@contextmanager
def serving(
    address: str, answer: Callable[[str, bytes | None], Answer | None], key: str = "--listen-address"
) -> Iterator[str]:
    """Answer requests, each in a thread, while the block runs; give `http://host:port`.

    Raise `UsageError` that begins with `key`.

    `answer` gets a path without its query, and the body of a POST; where it returns None, the connection is closed
    without an answer.
    """
    listener = bind(address, key)
    server = _Server(listener.getsockname(), partial(_Handler, answer), bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    threading.Thread(target=server.serve_forever, args=(0.05,), name="http", daemon=True).start()
    host, port = listener.getsockname()[:2]
    try:
        yield f"http://{joined(_REACHED_AT.get(host, host), port)}"
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    """Answers each connection in a thread, at most `MOST_THREADS` at once: the oldest connection makes room for a new
    one.
    """

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._open: list[socket.socket] = []  # oldest first
        self._places = threading.Semaphore(MOST_THREADS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            for oldest in self._open[:1]:
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._places.acquire()
        self._open.append(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self._open.remove(request)
        self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base class's signature
        sys.stderr.write(f"a request was not answered: {sys.exc_info()[1]}\n")


class _Handler(BaseHTTPRequestHandler):
    # One connection per request: a stopped replay must not answer on an open connection.
    protocol_version = "HTTP/1.0"
    timeout = 10
    server_version = "sglang-replay"
    sys_version = ""

    def __init__(self, answer: Callable[[str, bytes | None], Answer | None], *connection: Any) -> None:
        self._answer = answer
        super().__init__(*connection)

    def handle(self) -> None:
        """Answer, unless the client disconnects before."""
        with suppress(ConnectionError, TimeoutError):
            super().handle()

    def do_GET(self) -> None:
        self._reply(None)

    do_HEAD = do_GET  # noqa: N815 - the base class looks for this name

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "0")[:9]  # int() accepts at most 4,300 digits
        self._reply(self.rfile.read(min(int(length), MOST_BODY_BYTES)) if length.isdecimal() else b"")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log nothing: the terminal shows the progress or the notifications."""

    def _reply(self, body: bytes | None) -> None:
        answer = self._answer(self.path.partition("?")[0], body)
        if answer is None:  # the connection is closed: as if refused, but the port stays ours
            return
        status, content_type, content = answer
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def stopped_by_signal(stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` on SIGINT and SIGTERM while the block runs. For the main thread only."""
    previous = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
