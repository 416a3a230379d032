"""`python -m bench.attackers FILE`: strangers at the exporter whose port stands in FILE, which changes when it starts again; until killed.

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
from contextlib import suppress
from pathlib import Path

GUESSES_A_SECOND, IMPATIENT_A_SECOND, SLOW_READERS, UNFINISHED = 20.0, 2.0, 6, 6
NAME, PASSWORD = "prometheus", "right"
_ODD = ("0.01", "0", "-1", "nan", "inf", "1e309", "soon", "9" * 400)


def credentials(name: str, password: str) -> str:
    """Return the header of a request with a password."""
    return "Authorization: Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


class Attackers:
    """The threads of all kinds."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.met: Counter[str] = Counter()
        self._lock = threading.Lock()

    def _connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", int(self._file.read_text())), timeout=5)

    def _note(self, kind: str, answer: bytes) -> None:
        with self._lock:
            self.met[f"{kind} {answer[9:12].decode('latin-1') or 'closed'}"] += 1

    def guess(self) -> None:
        """Guess a password; of ten one waits for the answer."""
        for number in range(sys.maxsize):
            time.sleep(1 / GUESSES_A_SECOND)
            with suppress(OSError, ValueError), self._connected() as connection:
                head = credentials(NAME, f"guess {number}")
                connection.sendall(f"GET /metrics HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
                if number % 10 == 0:
                    self._note("guess", connection.recv(64))

    def be_impatient(self) -> None:
        """Scrape with an odd timeout, with the right password."""
        for number in range(sys.maxsize):
            time.sleep(1 / IMPATIENT_A_SECOND)
            with suppress(OSError, ValueError), self._connected() as connection:
                timeout = f"X-Prometheus-Scrape-Timeout-Seconds: {_ODD[number % len(_ODD)]}"
                head = credentials(NAME, PASSWORD)
                connection.sendall(f"GET /metrics HTTP/1.1\r\nHost: x\r\n{head}\r\n{timeout}\r\n\r\n".encode())
                self._note("impatient", connection.recv(64))

    def read_slowly(self) -> None:
        """Ask for pages on one connection and take a few bytes a second."""
        while True:
            with suppress(OSError, ValueError), self._connected() as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                connection.sendall(
                    f"GET /metrics HTTP/1.1\r\nHost: x\r\n{credentials(NAME, PASSWORD)}\r\n\r\n".encode()
                )
                self._note("slow", connection.recv(64))
                for _ in range(60):
                    if not connection.recv(10):
                        break
                    time.sleep(1)
            time.sleep(0.2)

    def never_finish(self) -> None:
        """Send half of a request and wait."""
        while True:
            with suppress(OSError, ValueError), self._connected() as connection:
                connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
                connection.settimeout(30)
                connection.recv(1)
            time.sleep(0.2)

    def start(self) -> None:
        """Start all of them."""
        kinds = [self.guess, self.be_impatient, *[self.read_slowly] * SLOW_READERS, *[self.never_finish] * UNFINISHED]
        for kind in kinds:
            threading.Thread(target=kind, daemon=True).start()


def main() -> int:
    """Attack until SIGTERM."""
    attackers = Attackers(Path(sys.argv[1]))
    attackers.start()
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    print(json.dumps(dict(sorted(attackers.met.items()))), flush=True)
    return 0


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    sys.exit(main())
