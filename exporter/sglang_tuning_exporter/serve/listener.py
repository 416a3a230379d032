"""Listening TCP sockets."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from sglang_tuning_exporter.config.values import UsageError

if TYPE_CHECKING:
    from sglang_tuning_exporter.config.values import Address

BACKLOG = 128


def bind(address: Address, key: str = "--listen-address") -> socket.socket:
    """Return a listening TCP socket. Raises `UsageError`, such as for a port in use."""
    try:
        listener = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:  # a kernel without IPv6
        raise UsageError(f"{key}={address}: {error.strerror or error}; give another address") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address.host, address.port))
        listener.listen(BACKLOG)  # before listen(), another process can bind the same port
    except (OSError, ValueError) as error:  # ValueError: not a host name
        listener.close()
        raise UsageError(
            f"{key}={address}: {getattr(error, 'strerror', None) or error}; give another port or address"
        ) from None
    return listener
