"""`python -m bench.attackers FILE`: strangers at the exporter whose port stands in FILE, which changes when it starts
again; until killed.

They guess passwords and hang up, read answers a few bytes at a time, send half of a request, and announce odd timeouts.
At the end (SIGTERM) one line says what they were answered.
"""

from __future__ import annotations

import base64
import json
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

NAME, PASSWORD = "prometheus", "right"
_ODD = ("0.01", "0", "-1", "nan", "inf", "1e309", "soon", "9" * 400)
met: Counter[str] = Counter()


def credentials(name: str, password: str) -> str:
    """Return the header of a request with a password."""
    return "Authorization: Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


def _ask(connection: socket.socket, *headers: str) -> None:
    connection.sendall("\r\n".join(["GET /metrics HTTP/1.1", "Host: x", *headers, "", ""]).encode())


def _met(kind: str, connection: socket.socket) -> None:
    met[f"{kind} {connection.recv(64)[9:12].decode('latin-1') or 'closed'}"] += 1


def guess(connection: socket.socket, number: int) -> None:
    """Guess a password; of ten one waits for the answer."""
    _ask(connection, credentials(NAME, f"guess {number}"))
    if number % 10 == 0:
        _met("guess", connection)


def be_impatient(connection: socket.socket, number: int) -> None:
    """Scrape with an odd timeout, with the right password."""
    timeout = f"X-Prometheus-Scrape-Timeout-Seconds: {_ODD[number % len(_ODD)]}"
    _ask(connection, credentials(NAME, PASSWORD), timeout)
    _met("impatient", connection)


def read_slowly(connection: socket.socket, _: int) -> None:
    """Take a few bytes of a page a second."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    _ask(connection, credentials(NAME, PASSWORD))
    _met("slow", connection)
    for _second in range(60):
        if not connection.recv(10):
            break
        time.sleep(1)


def never_finish(connection: socket.socket, _: int) -> None:
    """Send half of a request and wait."""
    connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
    connection.settimeout(30)
    connection.recv(1)


KINDS = {
    guess: (1, 0.05),
    be_impatient: (1, 0.5),
    read_slowly: (6, 0.2),
    never_finish: (6, 0.2),
}  # how many, and seconds between


def attack(kind: Callable[[socket.socket, int], None], seconds: float, file: Path) -> None:
    """Attack again and again."""
    for number in count():
        time.sleep(seconds)
        with suppress(OSError, ValueError), socket.create_connection(("127.0.0.1", int(file.read_text())), 5) as made:
            kind(made, number)


def main() -> int:
    """Attack until SIGTERM."""
    for kind, (many, seconds) in KINDS.items():
        for _ in range(many):
            threading.Thread(target=attack, args=(kind, seconds, Path(sys.argv[1])), daemon=True).start()
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    print(json.dumps(dict(sorted(met.items()))), flush=True)
    return 0


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    sys.exit(main())
