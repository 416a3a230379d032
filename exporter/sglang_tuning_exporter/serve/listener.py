"""Listening TCP sockets."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from sglang_tuning_exporter.config.values import Address, UsageError

BACKLOG = 128


def bind(address: Address, key: str = "--listen-address") -> socket.socket:
    """Return a listening TCP socket. Raises `UsageError`, such as for a port in use or a kernel without IPv6."""
    with ExitStack() as on_error:
        try:
            listener = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
            on_error.callback(listener.close)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address.host, address.port))
            listener.listen(BACKLOG)  # before listen(), another process can bind the same port
        except (OSError, ValueError) as error:  # ValueError: not a host name
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"{key}={address}: {reason}; give another port or address") from None
        on_error.pop_all()
    return listener
