"""`python -m sglang_tuning_exporter.serve.probe`: a container's health check, which knows neither passwords nor authorities.

An exporter that asks for a password (401), for fewer requests (429) or, in its handshake, for a certificate is as alive as one that
says so. The address is that of `SGLANG_TUNING_LISTEN_ADDRESS`, asked from inside.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys

DEFAULT_PORT = 9741
SECONDS = 3.0
ALIVE = frozenset({200, 401, 429})


def is_alive(host: str, port: int, seconds: float = SECONDS) -> bool:
    """Whether an exporter answers there, in the clear or by TLS; `seconds` for each try."""
    connection = http.client.HTTPConnection(host, port, timeout=seconds)
    try:
        return _status(connection) in ALIVE
    except (http.client.BadStatusLine, ConnectionResetError, BrokenPipeError):
        return _shakes_hands(host, port, seconds)  # it hangs up on those who do not begin with a handshake
    except (http.client.HTTPException, OSError):
        return False
    finally:
        connection.close()


def _shakes_hands(host: str, port: int, seconds: float) -> bool:
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # It is asked whether it is there, on the loopback, and is told nothing.
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(host, port, timeout=seconds, context=trusting)
    has_shaken = False
    try:
        connection.connect()
        has_shaken = True
        return _status(connection) in ALIVE
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # it wants a certificate, and says so
    except (http.client.RemoteDisconnected, ConnectionError):
        return has_shaken  # it wants one, and hung up after the handshake
    except (http.client.HTTPException, OSError):
        return False
    finally:
        connection.close()


def _status(connection: http.client.HTTPConnection) -> int:
    connection.request("GET", "/-/healthy")
    return connection.getresponse().status


def main() -> int:
    """Give the exit status: 0 for alive."""
    host, _, port = os.environ.get("SGLANG_TUNING_LISTEN_ADDRESS", "").rpartition(":")
    everywhere = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "::1"}  # noqa: S104 - not listened on, but looked for
    return 0 if is_alive(everywhere.get(host, host.strip("[]")), int(port or DEFAULT_PORT)) else 1


if __name__ == "__main__":
    sys.exit(main())
