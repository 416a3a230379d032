"""uvicorn with our headers on its own error responses, and with TLS that is renewed while it runs."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from sglang_tuning_exporter.serve.security.guard import headers

if TYPE_CHECKING:
    import socket

    from sglang_tuning_exporter.serve.security.active_config import ActiveConfig

HANDSHAKE_SECONDS = 10.0
REQUEST_SECONDS = 2.0


class Protocol(H11Protocol):
    """uvicorn's HTTP protocol, with our headers on responses to invalid requests."""

    def send_400_response(self, msg: str) -> None:
        """Respond `400` and close the connection."""
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


class GuardedServer(uvicorn.Server):
    """uvicorn's server, with a handshake timeout and with the configuration that `web_config` reloads."""

    def __init__(self, config: uvicorn.Config, web_config: ActiveConfig | None = None) -> None:
        super().__init__(config)
        self._web_config = web_config

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        loop = asyncio.get_running_loop()
        if self.config.ssl is not None:
            # asyncio allows a minute for a handshake, and uvicorn has no setting for it.
            create = functools.partial(loop.create_server, ssl_handshake_timeout=HANDSHAKE_SECONDS)
            loop.create_server = create  # type: ignore[method-assign]
        await super().startup(sockets)
        if self._web_config is not None:
            self._web_config.start(lambda: loop.call_soon_threadsafe(self._renewed))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish running requests and accept no new ones."""
        if self._web_config is not None:
            self._web_config.stop()
        await super().shutdown(sockets)

    def _renewed(self) -> None:
        """Apply a new configuration: older connections are closed after their running response."""
        set_headers(self.config, self._web_config)
        if self.config.ssl is not None:
            loop = asyncio.get_running_loop()
            for connection in list(self.server_state.connections):
                # A new connection is about to send its first request: let it.
                is_new = getattr(connection, "cycle", None) is None
                loop.call_later(REQUEST_SECONDS if is_new else 0.0, self._end, connection)

    def _end(self, connection: asyncio.Protocol) -> None:
        if connection in self.server_state.connections:
            connection.shutdown()


def set_headers(config: uvicorn.Config, web_config: ActiveConfig | None) -> None:
    """Set our headers on every response, uvicorn's own 400 and 503 too."""
    own = {} if web_config is None else web_config.rules.config.http.headers
    config.encoded_headers = [(name.lower().encode(), value.encode()) for name, value in headers(own)]
