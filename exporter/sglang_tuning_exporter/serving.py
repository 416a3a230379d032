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

logger = logging.getLogger("sglang_tuning_exporter")


def bind(address: Address, key: str = "--listen-address") -> socket.socket:
    """A bound TCP socket, so that a taken port is one line and not a traceback. Raises `UsageError`."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address.host, address.port))
    except OSError as error:
        listener.close()
        raise UsageError(f"{key}={address}: {error.strerror or error}; give another port or address") from None
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
        limit_concurrency=64,
    )


def serve(config: Config) -> int:
    """Run until SIGINT or SIGTERM. Returns the exit status."""
    listener = bind(config.listen_address)
    watcher = Watcher(config)
    server = uvicorn.Server(uvicorn_config(make_app(watcher)))
    watcher.start()
    host, port = listener.getsockname()[:2]
    sources = " and ".join(filter(None, ["metrics" if config.sglang_url else "", "log" if config.log_file else ""]))
    # uvicorn ends its loop on SIGTERM, then raises it again for whoever came before it: that is us, and we end in order.
    signal.signal(signal.SIGTERM, lambda *_: None)
    logger.info("listening on http://%s, watching %s, profile %s", Address(host, port), sources, config.profile)
    try:
        asyncio.run(server.serve(sockets=[listener]))
    except KeyboardInterrupt:
        pass
    finally:
        watcher.stop()
        listener.close()
    return 0

