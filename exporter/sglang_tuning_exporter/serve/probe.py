"""`python -m sglang_tuning_exporter.serve.probe`: a container's health check, without password or certificate.

An exporter that asks for a password (401), for fewer requests (429), for a web configuration that can be read (403) or, in its
handshake, for a certificate is alive too. The address is that of `SGLANG_TUNING_LISTEN_ADDRESS`, asked from inside the container.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys

DEFAULT_PORT = 9741
SECONDS = 3.0
ALIVE = frozenset({200, 401, 403, 429})


def is_alive(host: str, port: int, seconds: float = SECONDS) -> bool:
    """Whether an exporter answers there, with or without TLS; `seconds` is the timeout of each try."""
    connection = http.client.HTTPConnection(host, port, timeout=seconds)
    try:
        return _status(connection) in ALIVE
    except (http.client.BadStatusLine, ConnectionResetError, BrokenPipeError):
        return _completes_handshake(host, port, seconds)  # it closes connections that do not start with a handshake
    except (http.client.HTTPException, OSError):
        return False
    finally:
        connection.close()


def _completes_handshake(host: str, port: int, seconds: float) -> bool:
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # On loopback, and nothing secret is sent.
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(host, port, timeout=seconds, context=trusting)
    is_handshake_done = False
    try:
        connection.connect()
        is_handshake_done = True
        return _status(connection) in ALIVE
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # it asks for a certificate
    except (http.client.RemoteDisconnected, ConnectionError):
        return is_handshake_done  # it asks for one, and closed the connection after the handshake
    except (http.client.HTTPException, OSError):
        return False
    finally:
        connection.close()


def _status(connection: http.client.HTTPConnection) -> int:
    connection.request("GET", "/-/healthy")
    return connection.getresponse().status


def main() -> int:
    """Return the exit status: 0 for alive."""
    host, _, port = os.environ.get("SGLANG_TUNING_LISTEN_ADDRESS", "").rpartition(":")
    everywhere = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "::1"}  # noqa: S104 - an address to look for, not to listen on
    return 0 if is_alive(everywhere.get(host, host.strip("[]")), int(port or DEFAULT_PORT)) else 1


if __name__ == "__main__":
    sys.exit(main())
