"""`python -m sglang_tuning_exporter.serve.probe`: a container's health check, without password or certificate.

An exporter that closes the connection is alive too, such as one that waits for a TLS handshake: one that hangs does not
answer at all. The probe runs inside the container and asks the address of `SGLANG_TUNING_LISTEN_ADDRESS`.
"""

from __future__ import annotations

import os
import socket
import sys

DEFAULT_PORT = 9741
SECONDS = 3.0


def is_alive(host: str, port: int, seconds: float = SECONDS) -> bool:
    """Whether an exporter answers there, or closes the connection, within so many seconds."""
    try:
        with socket.create_connection((host, port), seconds) as connection:
            connection.sendall(b"GET /-/healthy HTTP/1.0\r\n\r\n")
            connection.recv(1)
    except (ConnectionResetError, BrokenPipeError):
        return True
    except OSError:
        return False
    return True


def main() -> int:
    """Return the exit status: 0 for alive."""
    host, _, port = os.environ.get("SGLANG_TUNING_LISTEN_ADDRESS", "").rpartition(":")
    everywhere = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "::1"}  # noqa: S104 - to compare with
    return 0 if is_alive(everywhere.get(host, host.strip("[]")), int(port or DEFAULT_PORT)) else 1


if __name__ == "__main__":
    sys.exit(main())
