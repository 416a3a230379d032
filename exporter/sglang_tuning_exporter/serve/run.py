"""`serve`: runs a sidecar until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import signal
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio._backends._asyncio  # noqa: F401 - else loaded at the first request, when no file descriptor may be left
import uvicorn

from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.config import Address, Config
from sglang_tuning_exporter.serve import allocator
from sglang_tuning_exporter.serve.app import make_app
from sglang_tuning_exporter.serve.connections import MOST_CONNECTIONS, Connection
from sglang_tuning_exporter.serve.listener import BACKLOG, bind
from sglang_tuning_exporter.serve.security import uvicorn_server as wire

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from types import FrameType

    from sglang_tuning_exporter.serve.security.active_config import ActiveConfig

MOST_HEAD_BYTES = 32 << 10  # request line and headers together; more gets a 400
TICK_SECONDS = 1.0
GRACE_SECONDS = 1  # for running responses at the end
TROUBLE_SECONDS = 60.0
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

logger = logging.getLogger("sglang_tuning_exporter")


def uvicorn_config(app: object, web_config: ActiveConfig | None = None) -> uvicorn.Config:
    """Return a uvicorn configuration with limits, without its logging set-up, and with `web_config`'s TLS."""
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
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_SECONDS,
        backlog=BACKLOG,
        limit_concurrency=2 * MOST_CONNECTIONS,  # running requests, those of closed connections included
    )
    config.load()
    wire.set_headers(config, web_config)
    config.ssl = None if web_config is None else web_config.listener_context()
    return config


class _ExporterServer(wire.GuardedServer):
    """Wakes up once a second, for the Date header; uvicorn does so ten times a second to see whether to end."""

    def __init__(self, config: uvicorn.Config, sidecar: Sidecar, web_config: ActiveConfig | None) -> None:
        super().__init__(config, web_config)
        self._sidecar = sidecar
        self._wake: Callable[[], object] = lambda: None
        self._troubled_at = -math.inf
        self._hang_up: Callable[[], None] | None = None
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
            self._hang_up = partial(self._hung_up, has_terminal=_has_terminal())
            signal.signal(signal.SIGHUP, lambda *_: self._hang_up and self._hang_up())

    async def main_loop(self) -> None:
        loop, ending = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(ending.set)
        while not await self.on_tick(0):
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ending.wait(), TICK_SECONDS)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._wake()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._trouble)
        if self._hang_up is not None:
            loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        await super().startup(sockets)

    def _trouble(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log once a minute that no connection can be accepted; asyncio tries again every second."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _EXHAUSTED):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._troubled_at >= TROUBLE_SECONDS:
            self._troubled_at = time.monotonic()
            logger.warning(
                "cannot accept a connection: %s; raise the limit of open files (ulimit -n, LimitNOFILE=)",
                error.strerror,
            )

    def _hung_up(self, *, has_terminal: bool) -> None:
        """Shut down where the terminal is gone; continue as a service, where SIGHUP usually means reload."""
        if has_terminal:
            self.end()
        else:
            logger.warning("SIGHUP: ignored; restart to change settings (rotated logs are followed without a signal)")

    def end(self, *_: object) -> None:
        """End in order."""
        self.should_exit = True
        self._wake()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._sidecar.stop()  # first, so that no request waits for a scrape
        await super().shutdown(sockets)


def _web_config(config: Config) -> ActiveConfig | None:
    if config.web_config is None:
        return None
    from sglang_tuning_exporter.serve.security.active_config import ActiveConfig  # noqa: PLC0415 - YAML and TLS are loaded only where they are set

    return ActiveConfig(config.web_config)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def serve(config: Config) -> int:
    """Run until SIGINT or SIGTERM. Returns the exit status."""
    web_config = _web_config(config)
    listener = bind(config.listen_address)
    allocator.give_back()
    sidecar = Sidecar(config)
    server = _ExporterServer(uvicorn_config(make_app(sidecar, web_config), web_config), sidecar, web_config)
    # uvicorn handles signals while it runs, then raises them again for the handler set before it.
    signal.signal(signal.SIGTERM, server.end)
    sidecar.threads.give_up = server.end
    sidecar.start()
    host, port = listener.getsockname()[:2]
    sources = " and ".join(filter(None, ["metrics" if config.sglang_url else "", "log" if config.log_file else ""]))
    scheme = "https" if web_config is not None and web_config.is_tls else "http"
    logger.info("listening on %s://%s, watching %s, profile %s", scheme, Address(host, port), sources, config.profile)
    try:
        asyncio.run(server.serve(sockets=[listener]))
    except KeyboardInterrupt:
        pass
    finally:
        sidecar.stop()
        listener.close()
    return int(bool(sidecar.threads.failed))
