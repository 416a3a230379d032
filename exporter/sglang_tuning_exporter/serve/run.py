"""`serve`: runs a sidecar until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.config import Config
from sglang_tuning_exporter.config.values import Address
from sglang_tuning_exporter.serve.app import make_app
from sglang_tuning_exporter.serve.hang_up import handle_hang_up
from sglang_tuning_exporter.serve.listener import bind
from sglang_tuning_exporter.serve.security.lane import Lane
from sglang_tuning_exporter.serve.server import ExporterServer, uvicorn_config

if TYPE_CHECKING:
    from sglang_tuning_exporter.serve.security.active_config import ActiveConfig

# https://man7.org/linux/man-pages/man3/mallopt.3.html, numbers from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGE = 64 << 10  # bytes

logger = logging.getLogger("sglang_tuning_exporter")


def serve(config: Config) -> int:
    """Run until SIGINT or SIGTERM. Returns the exit status."""
    web_config: ActiveConfig | None = None
    if config.web_config is not None:
        from sglang_tuning_exporter.serve.security.active_config import ActiveConfig  # noqa: PLC0415 - YAML and TLS are loaded only where they are set

        web_config = ActiveConfig(config.web_config)
    listener = bind(config.listen_address)
    _return_freed_memory()
    sidecar = Sidecar(config)
    server = ExporterServer(uvicorn_config(make_app(sidecar, web_config), web_config), sidecar, web_config)
    handle_hang_up(server.end)
    # uvicorn handles signals while it runs, then raises them again for the handler set before it.
    signal.signal(signal.SIGTERM, server.end)
    sidecar.threads.give_up = server.end
    sidecar.start()
    host, port = listener.getsockname()[:2]
    sources = " and ".join(filter(None, ["metrics" if config.sglang_url else "", "log" if config.log_file else ""]))
    scheme = "https" if web_config is not None and web_config.is_tls else "http"
    logger.info("listening on %s://%s, watching %s, profile %s", scheme, Address(host, port), sources, config.profile)
    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(server.serve(sockets=[listener]))
    finally:
        sidecar.stop()
        listener.close()
    status = int(bool(sidecar.threads.failed))
    if Lane.busy:  # bcrypt in a thread aborts the process where Python's own end meets it
        sys.stderr.flush()
        os._exit(status)
    return status


def _return_freed_memory() -> None:
    """Return freed memory to the system, from all threads: the memory of a large page after a scrape.

    By default glibc keeps a heap for each thread, and keeps freed blocks up to the largest one so far. Call it before
    threads are started. The environment variable MALLOC_ARENA_MAX and similar ones do the same for another process.
    """
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for key, value in ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _LARGE), (_TRIM_THRESHOLD, _LARGE)):
            mallopt(key, value)
