"""`serve`: configuration in, a running sidecar until it is told to end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket

import uvicorn

from sglang_tuning_exporter.config import Address, Config, UsageError
from sglang_tuning_exporter.watcher import Watcher
from sglang_tuning_exporter.web.app import make_app
from sglang_tuning_exporter.web.connections import MOST_CONNECTIONS, Connection

BACKLOG = 128

logger = logging.getLogger("sglang_tuning_exporter")


def bind(address: Address, key: str = "--listen-address") -> socket.socket:
    """Open a listening TCP socket, so that a taken port is one line and not a traceback. Raises `UsageError`."""
    try:
        listener = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:  # a kernel without IPv6
        raise UsageError(f"{key}={address}: {error.strerror or error}; give another address") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address.host, address.port))
        listener.listen(BACKLOG)  # before it listens, another process can bind the same port as well
    except (OSError, ValueError) as error:  # ValueError: a name that is none
        listener.close()
        raise UsageError(
            f"{key}={address}: {getattr(error, 'strerror', None) or error}; give another port or address"
        ) from None
    return listener


def uvicorn_config(app: object) -> uvicorn.Config:
    """Quiet, bounded, and without uvicorn's own logging set-up."""
    return uvicorn.Config(
        app,  # type: ignore[arg-type]  # an ASGI application
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,
        http=Connection,
        ws="none",
        limit_concurrency=2 * MOST_CONNECTIONS,  # of requests at work: those of connections that were let go, too
    )


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, watcher: Watcher) -> None:
        super().__init__(config)
        self._watcher = watcher

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._watcher.stop()  # first, so that no request waits for a scrape any more
        await super().shutdown(sockets)


def serve(config: Config) -> int:
    """Run until SIGINT or SIGTERM. Returns the exit status."""
    listener = bind(config.listen_address)
    watcher = Watcher(config)
    server = _Server(uvicorn_config(make_app(watcher)), watcher)
    # uvicorn takes the signals over while it runs, then raises them again for whoever came before it: that is us, and
    # we end in order.
    signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
    watcher.start()
    host, port = listener.getsockname()[:2]
    sources = " and ".join(filter(None, ["metrics" if config.sglang_url else "", "log" if config.log_file else ""]))
    logger.info("listening on http://%s, watching %s, profile %s", Address(host, port), sources, config.profile)
    try:
        asyncio.run(server.serve(sockets=[listener]))
    except KeyboardInterrupt:
        pass
    finally:
        watcher.stop()
        listener.close()
    return 0
