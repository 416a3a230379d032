"""`serve`: runs a sidecar until SIGINT or SIGTERM.

uvicorn serves it, with limits, with our headers on uvicorn's own error responses too, and with a web configuration that
is reloaded while the sidecar runs.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from email.utils import formatdate
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING, Any

import anyio._backends._asyncio  # noqa: F401 - else loaded at the first request, when no file descriptor may be left
import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.config import Config
from sglang_tuning_exporter.config.values import joined
from sglang_tuning_exporter.serve.app import make_app
from sglang_tuning_exporter.serve.guard import Guard, Lane, headers
from sglang_tuning_exporter.serve.process import BACKLOG, bind, return_freed_memory

if TYPE_CHECKING:
    from sglang_tuning_exporter.serve.web_config import ActiveConfig

# Two Prometheus servers, probes and some browsers need about a dozen.
MOST_CONNECTIONS = 64
# More than are accepted at once: a new connection must have the time to send its request.
MOST_STRANGERS = BACKLOG + MOST_CONNECTIONS
MOST_UNREAD_BYTES = 16 << 20  # of all answers that wait to be read: as much as the largest page of SGLang
MOST_HEAD_BYTES = 32 << 10  # request line and headers together; more gets a 400
HANDSHAKE_SECONDS = 10.0
REQUEST_SECONDS = 2.0
GRACE_SECONDS = 1  # for running responses at the end
WARN_AGAIN_SECONDS = 60.0
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_sequence = count()

logger = logging.getLogger("sglang_tuning_exporter")


def serve(config: Config) -> int:
    """Run a sidecar until SIGINT or SIGTERM; return the exit status."""
    web_config: ActiveConfig | None = None
    if config.web_config is not None:
        from sglang_tuning_exporter.serve.web_config import ActiveConfig  # noqa: PLC0415 - YAML and TLS take memory

        web_config = ActiveConfig(config.web_config)
    listener = bind(config.listen_address)
    return_freed_memory()
    sidecar = Sidecar(config)
    server = ExporterServer(uvicorn_config(make_app(sidecar, web_config), web_config), sidecar, web_config)
    # uvicorn handles signals while it runs, then raises them again for the handler set before it.
    signal.signal(signal.SIGTERM, server.end)
    sidecar.threads.give_up = server.end
    sidecar.start()
    host, port = listener.getsockname()[:2]
    sources = " and ".join(filter(None, ["metrics" if config.sglang_url else "", "log" if config.log_file else ""]))
    scheme = "https" if web_config is not None and web_config.is_tls else "http"
    logger.info("listening on %s://%s, watching %s, profile %s", scheme, joined(host, port), sources, config.profile)
    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(server.serve(sockets=[listener]))
    finally:
        sidecar.stop()
        listener.close()
    status = int(bool(sidecar.threads.failed))
    if Lane.busy:  # where Python ends while bcrypt runs in a thread, the process aborts
        sys.stderr.flush()
        os._exit(status)
    return status


class _Answers(h11.Connection):
    """Sends the head of an answer together with the body, which saves a packet and a system call."""

    head = b""

    def send(self, event: Any) -> Any:
        """Return the bytes to send for an event; those of a head wait for the body."""
        written = super().send(event) or b""
        self.head, written = (written, b"") if isinstance(event, h11.Response) else (b"", self.head + written)
        return written


class Connection(H11Protocol):
    """One connection. When there are too many of its kind, the one with the oldest complete request is closed.

    A connection is a stranger's while its last request was not let in or is not complete. Strangers never take the
    place of others. There is no time limit, because a distant scraper may be slow: an idle connection costs nothing
    until another one needs its place, and a scraper opens a new one.
    """

    last_request = 0  # order of complete requests and of new connections

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.conn = _Answers(h11.SERVER, self.config.h11_max_incomplete_event_size or MOST_HEAD_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn narrows it too
        """Accept the connection, and close others if there are too many."""
        self.last_request = next(_sequence)
        super().connection_made(transport)
        all_of_them = sorted(
            (each for each in self.connections if isinstance(each, Connection)), key=lambda each: each.last_request
        )
        for of_strangers, most in ((True, MOST_STRANGERS), (False, MOST_CONNECTIONS)):
            alike = [each for each in all_of_them if each.is_strange is of_strangers]
            for oldest in alike[: max(len(alike) - most, 0)]:
                self.connections.discard(oldest)  # the loop may accept several before it reports this one as closed
                oldest.transport.abort()

    @property
    def is_strange(self) -> bool:
        """Whether the last request was not let in, or is not complete."""
        return not (self.scope or {}).get("admitted", False)

    def handle_events(self) -> None:
        """Record when a request is complete; the date of the answer is that of the request."""
        before = self.cycle
        date = (b"date", formatdate(usegmt=True).encode())
        self.server_state.default_headers = [date, *self.config.encoded_headers]
        super().handle_events()
        if self.cycle is not before:
            self.last_request = next(_sequence)

    def on_response_complete(self) -> None:
        """Go on with the next request, and close connections if too much waits to be read."""
        super().on_response_complete()
        _let_go(self.connections)

    def send_400_response(self, msg: str) -> None:
        """Respond `400` with our headers, and close the connection."""
        if isinstance(self.app, Guard):
            self.app.answered[400] += 1
        text = msg.encode()
        own = [*self.server_state.default_headers, (b"content-type", b"text/plain; charset=utf-8")]
        own += [(b"content-length", str(len(text)).encode()), (b"connection", b"close")]
        for event in (
            h11.Response(status_code=400, headers=own, reason=b"Bad Request"),
            h11.Data(data=text),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _let_go(connections: Iterable[asyncio.Protocol]) -> None:
    """Close the connections with the most unread bytes until the rest is below the limit."""
    ours = (connection for connection in connections if isinstance(connection, Connection))
    waiting = [(one.transport.get_write_buffer_size(), one.last_request, one) for one in ours]
    left = sum(size for size, _, _ in waiting)
    for size, _, connection in sorted(waiting, reverse=True):
        if left > MOST_UNREAD_BYTES:
            connection.transport.abort()
            left -= size


class _Seldom(logging.Filter):
    """Lets each warning about requests and connections through once a minute: a stranger may cause any number."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now, words = time.monotonic(), str(record.msg)
        if record.levelno != logging.WARNING:
            return True
        is_due = now - self._logged_at.get(words, -math.inf) >= WARN_AGAIN_SECONDS
        self._logged_at |= {words: now} if is_due else {}
        return is_due


_of_requests = logging.getLogger("uvicorn.error")
_of_requests.addFilter(_Seldom())


def uvicorn_config(app: object, web_config: ActiveConfig | None = None) -> uvicorn.Config:
    """Return a configuration of uvicorn with limits, with the TLS of `web_config`, and without uvicorn's logging."""
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]  # an ASGI application
        http=Connection,
        ws="none",  # an upgrade to WebSocket would bypass the guard
        proxy_headers=False,
        h11_max_incomplete_event_size=MOST_HEAD_BYTES,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        date_header=False,  # `Connection` has it
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_SECONDS,
        backlog=BACKLOG,
        # Never reached: there are fewer connections, and a request ends with its connection.
        limit_concurrency=2 * (MOST_STRANGERS + MOST_CONNECTIONS),
    )
    config.load()
    _set_headers(config, web_config)
    config.ssl = None if web_config is None else web_config.listener_context()
    return config


def _set_headers(config: uvicorn.Config, web_config: ActiveConfig | None) -> None:
    """Set our headers on every response, also on uvicorn's own 400 and 503."""
    own = {} if web_config is None else web_config.headers
    config.encoded_headers = [(name.lower().encode(), value.encode()) for name, value in headers(own)]


class ExporterServer(uvicorn.Server):
    """Serves the application of a sidecar until `end` is called, then stops the sidecar.

    uvicorn's own server wakes up ten times a second to see whether it should end; this one wakes up at its end.
    """

    def __init__(self, config: uvicorn.Config, sidecar: Sidecar, web_config: ActiveConfig | None) -> None:
        super().__init__(config)
        self._sidecar, self._web_config = sidecar, web_config
        self._wake: Callable[[], object] = lambda: None

    async def main_loop(self) -> None:
        """Wait until the server should end."""
        loop, ending = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(ending.set)
        if not self.should_exit:
            await ending.wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End at SIGINT or SIGTERM."""
        super().handle_exit(sig, frame)
        self._wake()

    def end(self, *_: object) -> None:
        """End the server in order: running requests are answered."""
        self.should_exit = True
        self._wake()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        if self.config.ssl is not None:
            # asyncio allows a minute for a handshake, and uvicorn has no setting for it.
            create = functools.partial(loop.create_server, ssl_handshake_timeout=HANDSHAKE_SECONDS)
            loop.create_server = create  # type: ignore[method-assign]
        if threading.current_thread() is threading.main_thread():
            # Without a terminal SIGHUP usually asks for a reload.
            is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            loop.add_signal_handler(signal.SIGHUP, _ignore_hang_up if is_ignored else self.end)
        await super().startup(sockets)
        web_config, threads = self._web_config, self._sidecar.threads
        if web_config is not None:
            apply = functools.partial(loop.call_soon_threadsafe, self._apply_web_config)
            threads.start("web-config", lambda: web_config.watch(threads.stopping, apply))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish running requests and accept no new ones."""
        self._sidecar.stop()  # first, so that no request waits for a scrape
        await super().shutdown(sockets)

    def _apply_web_config(self) -> None:
        """Apply a new configuration. With TLS, older connections are closed after their running response."""
        _set_headers(self.config, self._web_config)
        if self.config.ssl is not None:
            loop = asyncio.get_running_loop()
            for connection in list(self.server_state.connections):
                # A new connection is about to send its first request: it may.
                is_new = getattr(connection, "cycle", None) is None
                loop.call_later(REQUEST_SECONDS if is_new else 0.0, self._close, connection)

    def _close(self, connection: asyncio.Protocol) -> None:
        if connection in self.server_state.connections:
            connection.shutdown()

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log that no connection can be accepted; asyncio tries again every second."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _EXHAUSTED):
            loop.default_exception_handler(context)
        else:
            _of_requests.warning(
                "cannot accept a connection: %s; raise the limit of open files (ulimit -n, LimitNOFILE=)",
                error.strerror,
            )


def _ignore_hang_up() -> None:
    logger.warning("SIGHUP: ignored; restart to change settings (rotated logs are followed without a signal)")
