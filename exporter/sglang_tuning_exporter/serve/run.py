"""`serve`: runs a sidecar until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
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
from sglang_tuning_exporter.serve.process import bind, handle_hang_up, return_freed_memory
from sglang_tuning_exporter.serve.security.lane import Lane
from sglang_tuning_exporter.serve.server import ExporterServer, uvicorn_config

if TYPE_CHECKING:
    from sglang_tuning_exporter.serve.security.active_config import ActiveConfig

logger = logging.getLogger("sglang_tuning_exporter")


def serve(config: Config) -> int:
    """Run until SIGINT or SIGTERM. Returns the exit status."""
    web_config: ActiveConfig | None = None
    if config.web_config is not None:
        from sglang_tuning_exporter.serve.security.active_config import ActiveConfig  # noqa: PLC0415 - YAML and TLS are loaded only where they are set

        web_config = ActiveConfig(config.web_config)
    listener = bind(config.listen_address)
    return_freed_memory()
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
